"""mqd/base/clock.py: periodic tasks of a process wake together."""

from __future__ import annotations

import pytest

from mqd.base import clock


@pytest.mark.parametrize(
    ("now_s", "period_s", "left_s"),
    [(100.25, 1.0, 0.75), (100.25, 2.0, 1.75), (101.0, 2.0, 1.0), (100.0, 2.0, 2.0), (100.95, 1.0, 1.05)],
)
def test_ticks_of_different_tasks_coincide(
    monkeypatch: pytest.MonkeyPatch, now_s: float, period_s: float, left_s: float
) -> None:
    monkeypatch.setattr(clock.time, "monotonic", lambda: now_s)
    assert clock.seconds_until_tick(period_s) == pytest.approx(left_s)
    assert (now_s + clock.seconds_until_tick(period_s)) % period_s == pytest.approx(0.0)
