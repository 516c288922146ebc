"""share.auto.offset.reset accepts and refuses the same values as java.time.Duration."""

from __future__ import annotations

import pytest

from mqd.base.offset_reset import BY_DURATION, EARLIEST, LATEST, OffsetReset, parse_offset_reset


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("latest", OffsetReset(LATEST)),
        ("earliest", OffsetReset(EARLIEST)),
        ("by_duration:PT0S", OffsetReset(BY_DURATION, 0)),
        ("by_duration:P1DT2H3M4.5S", OffsetReset(BY_DURATION, 93_784_500)),
        ("by_duration:pt1,25s", OffsetReset(BY_DURATION, 1_250)),
        ("by_duration:P2D", OffsetReset(BY_DURATION, 172_800_000)),
        ("by_duration:PT2H-30M", OffsetReset(BY_DURATION, 5_400_000)),
        ("by_duration:-PT-1S", OffsetReset(BY_DURATION, 1_000)),
    ],
)
def test_accepted_values(text: str, expected: OffsetReset) -> None:
    assert parse_offset_reset(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "none", "Latest", "by_duration", "by_duration:", "by_duration:P", "by_duration:PT", "by_duration:P1DT"]
    + ["by_duration:1S", "by_duration:-PT1S", "by_duration:P1Y", "by_duration:PT1.5H", "by_duration:PT\u0661S"]
    + [f"by_duration:P{'9' * 30}D", f"by_duration:PT{'9' * 500}S"],
)
def test_refused_values(text: str) -> None:
    with pytest.raises(ValueError):
        parse_offset_reset(text)
