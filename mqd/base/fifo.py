"""The setting share.fifo of a share group: whether records with the same key are delivered one
after the other, and what a record's key is.
"""

from __future__ import annotations

from typing import NamedTuple

FIFO = "share.fifo"
HEADER = "header:"
HEADER_BYTES_MAX = 63


class Fifo(NamedTuple):
    is_on: bool = False
    header: bytes = b""  # name of the header whose value is the key; empty: the record's own key


def parse_fifo(text: str) -> Fifo:
    """Raises ValueError, with the reason, if the text is not a valid setting."""
    if text in ("", "key"):
        return Fifo(text == "key")
    header = text.removeprefix(HEADER).encode()
    if not text.startswith(HEADER) or not header:
        raise ValueError(f"it must be empty, key, or {HEADER} and a header's name")
    if len(header) > HEADER_BYTES_MAX:
        raise ValueError(f"the header's name has more than {HEADER_BYTES_MAX} bytes")
    return Fifo(True, header)
