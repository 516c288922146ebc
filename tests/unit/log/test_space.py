"""When Produce is refused for lack of space, and when it is accepted again."""

from hypothesis import given
from hypothesis import strategies as st

from mqd.log.space import HOLD_MS_MAX, HOLD_MS_MIN, SpaceGuard

MIB = 1 << 20


def test_produce_stops_at_the_reserve_and_resumes_well_above_it() -> None:
    guard = SpaceGuard(64 * MIB)
    assert not guard.on_free_bytes(64 * MIB, 0) and not guard.is_full
    assert guard.on_free_bytes(64 * MIB - 1, 1000) and guard.is_full
    assert not guard.on_free_bytes(70 * MIB, 2000), "just above the reserve is not enough"
    assert guard.on_free_bytes(80 * MIB, 3000) and not guard.is_full


def test_a_failed_write_stops_produce_whatever_is_measured() -> None:
    guard = SpaceGuard(0)
    assert guard.on_write_refused(0) and guard.is_full
    assert not guard.on_free_bytes(10**12, HOLD_MS_MIN - 1), "held"
    assert guard.on_free_bytes(10**12, HOLD_MS_MIN) and not guard.is_full
    assert guard.on_write_refused(HOLD_MS_MIN + 1)
    assert not guard.on_free_bytes(10**12, 2 * HOLD_MS_MIN + 1), "each time longer"
    assert guard.on_free_bytes(10**12, 3 * HOLD_MS_MIN + 1)


def test_the_hold_time_is_bounded_and_forgotten() -> None:
    guard, now = SpaceGuard(0), 0
    for _ in range(20):
        guard.on_write_refused(now)
        now += HOLD_MS_MAX
        assert guard.on_free_bytes(10**12, now), "never held longer than the bound"
    now += HOLD_MS_MAX + 1
    guard.on_free_bytes(10**12, now)
    guard.on_write_refused(now)
    assert guard.on_free_bytes(10**12, now + HOLD_MS_MIN), "the long good time starts over"


@given(st.integers(0, 1 << 40), st.lists(st.tuples(st.integers(0, 1 << 41), st.booleans()), max_size=60))
def test_each_change_is_reported_once(reserve: int, steps: list[tuple[int, bool]]) -> None:
    guard, now = SpaceGuard(reserve), 0
    for free, refused in steps:
        now += 1000
        before = guard.is_full
        changed = guard.on_write_refused(now) if refused else guard.on_free_bytes(free, now)
        assert changed == (guard.is_full != before)
        if not refused and free < reserve:
            assert guard.is_full
        if refused:
            assert guard.is_full


def test_a_disk_that_fills_up_again_and_again_accepts_records_often_enough() -> None:
    """Every write fails as soon as the hold has ended: within a producer's delivery.timeout.ms (two
    minutes) there are many attempts.
    """
    guard, attempts = SpaceGuard(0), 0
    for now in range(0, 120_000, 100):
        if not guard.is_full:
            attempts += 1
            guard.on_write_refused(now)
        guard.on_free_bytes(1 << 40, now)
    assert attempts >= 12
