"""Where a share group begins in a partition that it has never read: `earliest`, `latest`, or
`by_duration:` and an ISO 8601 duration (P1DT2H3M4.5S), in the syntax of java.time.Duration
(KIP-1106).
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import NamedTuple

LATEST, EARLIEST, BY_DURATION = 0, 1, 2
_BY_DURATION = "by_duration:"
_DURATION = re.compile(
    r"([-+]?)P(?:([-+]?[0-9]+)D)?(T(?:([-+]?[0-9]+)H)?(?:([-+]?[0-9]+)M)?(?:([-+]?[0-9]+(?:[.,][0-9]{0,9})?)S)?)?",
    re.IGNORECASE | re.ASCII,
)
_SECONDS = (86_400, 3_600, 60, 1)
MS_MAX = 2**63 - 1


class OffsetReset(NamedTuple):
    kind: int
    duration_ms: int = 0  # of BY_DURATION: begin this long before now


def parse_offset_reset(text: str) -> OffsetReset:
    """Raises ValueError if the text is not a valid setting."""
    if text == "latest":
        return OffsetReset(LATEST)
    if text == "earliest":
        return OffsetReset(EARLIEST)
    if not text.startswith(_BY_DURATION):
        raise ValueError(f"{text!r} is not one of earliest, latest, by_duration:PnDTnHnMn.nS")
    return OffsetReset(BY_DURATION, _duration_ms(text.removeprefix(_BY_DURATION)))


def _duration_ms(text: str) -> int:
    match = _DURATION.fullmatch(text)
    if match is None or text.upper().endswith(("P", "T")) or len(text) > 100:
        raise ValueError(f"{text[:100]!r} is not a duration of the form PnDTnHnMn.nS")
    sign, days, _, hours, minutes, seconds = match.groups()
    parts = zip((days, hours, minutes, seconds), _SECONDS, strict=True)
    total = sum(Decimal((part or "0").replace(",", ".")) * scale for part, scale in parts) * 1000
    milliseconds = int(-total if sign == "-" else total)
    if not 0 <= milliseconds <= MS_MAX:
        raise ValueError(f"the duration {text!r} is negative, or too long")
    return milliseconds
