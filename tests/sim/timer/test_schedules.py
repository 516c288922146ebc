"""Random histories of one schedule, and planted bugs that they must find."""

from __future__ import annotations

import pytest

from mqd.timer import core, index
from mqd.timer.core import START, Progress, Schedule
from mqd.timer.index import Entry, Index
from tests.sim.timer.schedule_world import Files, World
from tests.tiers import quick

QUICK, SLOW = range(12), range(1_000, 1_240)
STEPS = 2_000


def _events(seeds: range) -> int:
    """Steps, and the numbers of records read, scheduled and delivered or cancelled."""
    worlds = [World(seed).run(STEPS) for seed in seeds]
    return sum(STEPS + len(world.log) for world in worlds)


def test_schedules() -> None:
    assert _events(QUICK) >= 50_000


@pytest.mark.slow
def test_many_schedules() -> None:
    assert _events(SLOW) >= 1_000_000


def _early(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Index.take
    monkeypatch.setattr(Index, "take", lambda self, now_ms, count_max: take(self, now_ms + 40, count_max))


def _late_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records after X are delivered, whatever the clock says."""
    read = Schedule.read
    monkeypatch.setattr(Schedule, "read", lambda self, rows, now_ms, due_of: read(self, rows, 1 << 62, due_of))


def _again(monkeypatch: pytest.MonkeyPatch) -> None:
    """X is ignored after a takeover."""
    monkeypatch.setattr(Progress, "is_settled", lambda self, entry: False)


def _kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The index keeps records that were delivered since it was saved."""
    monkeypatch.setattr(Index, "drop_delivered", lambda self, last: None)


def _late_is_scheduled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress covers late records that are not in the tick."""
    tick = Schedule.tick

    def without_late(self: Schedule, now_ms: int, count_max: int) -> object:
        self._late = self._late[1:]
        return tick(self, now_ms, count_max)

    monkeypatch.setattr(Schedule, "tick", without_late)


def _remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old index has records that were cancelled and deleted since."""
    monkeypatch.setattr(Index, "forget_below", lambda self, offset: None)


def _not_caught_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new timer delivers before it has read up to Y: cancellations may be there."""
    tick = Schedule.tick

    def at_once(self: Schedule, now_ms: int, count_max: int) -> core.Tick | None:
        end, self.end_offset = self.end_offset, max(self.end_offset, self.progress.end_offset)
        found = tick(self, now_ms, count_max)
        self.end_offset = end
        return found

    monkeypatch.setattr(Schedule, "tick", at_once)


def _backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """X is the last entry of the tick, and not the largest so far."""
    tick = Schedule.tick

    def last(self: Schedule, now_ms: int, count_max: int) -> core.Tick | None:
        found = tick(self, now_ms, count_max)
        if found is None or not found.entries:
            return found
        return found._replace(progress=found.progress._replace(last=found.entries[0]))

    monkeypatch.setattr(Schedule, "tick", last)


def _trimmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log's start follows Y."""
    monkeypatch.setattr(Schedule, "first_needed_offset", lambda self: self.progress.end_offset)


def _removed_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """I3: files are deleted before a manifest without them exists."""
    read_all = Index._read_all

    def and_remove(self: Index, file: index._File) -> object:
        rows = list(read_all(self, file))
        self._storage.remove(file.name)
        return rows

    monkeypatch.setattr(Index, "_read_all", and_remove)


def _unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    def sync(self: Files, name: str) -> None:
        if name == index.MANIFEST:
            self.synced[name] = len(self.files[name])

    monkeypatch.setattr(Files, "sync", sync)


def _cancelled_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancellations of records in files are forgotten."""
    cancel = Index.cancel
    monkeypatch.setattr(
        Index, "cancel", lambda self, due, offset: cancel(self, due, offset) if due < self._loaded_end else None
    )


PLANTED = [
    ("T1", _early),
    ("T1", _late_is_due),
    ("T2: twice", _again),
    ("T2: twice", _kept),
    ("T2", _late_is_scheduled),
    ("T2", _not_caught_up),
    ("T2", _cancelled_too_late),
    ("T3", _backwards),
    ("T4", _trimmed),
    ("T4", _remembered),
]


@pytest.mark.parametrize(
    ("broken", "plant"),
    quick(PLANTED, lambda one: one != ("T4", _remembered)),
    ids=lambda given: getattr(given, "__name__", given),
)
def test_planted_bugs_are_found(broken: str, plant: object, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)  # type: ignore[operator]
    with pytest.raises(AssertionError, match=broken):
        for seed in range(200):
            World(seed).run(500)


@pytest.mark.parametrize("plant", [_removed_early, _unsynced], ids=lambda given: given.__name__)
def test_missing_index_files_are_rebuilt_without_losing_records(plant: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index is rebuilt from the log."""
    plant(monkeypatch)  # type: ignore[operator]
    for seed in range(10):
        World(seed).run(500)


def test_a_schedule_without_records_has_nothing_to_do() -> None:
    schedule = Schedule(Index(Files()), 0, Progress(0, START))
    assert schedule.tick(1 << 40, 10) is None
    assert schedule.first_needed_offset() == 0 and schedule.pending_count == 0
    assert schedule.index.take(1 << 40, 10) == [] and Entry(0, 0) > START
