"""The timer's process without its clients: the partitions it serves, and its files."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mqd.base import paths, schedule_files
from mqd.base.schedule_files import PartitionStatus, Schedules, ScheduleTopic
from mqd.timer import partition
from mqd.timer.__main__ import ENDING_S, IDLE_S, STATUS_S, Timer
from mqd.timer.core import START, Progress
from mqd.timer.index import Entry, Index
from mqd.timer.progress import CHANGE_COUNT_MAX, Change, Delays, parse_progress, progress_text
from mqd.timer.storage import Directory
from tests.polling import PATIENCE_S, eventually

TOPIC, OTHER = b"t" * 16, b"o" * 16


class FakeTimer:
    """A fake PartitionTimer."""

    alive: list[FakeTimer] = []

    def __init__(self, schedule: ScheduleTopic, index: int, *others: Any) -> None:
        self.topic, self.index = schedule, index
        self.on_status: Callable[[], None] = others[-1]
        self.status = PartitionStatus(schedule.topic, index)
        self.ends = True  # as soon as it is stopped

    def start(self) -> None:
        self.alive.append(self)

    def stop(self) -> None:
        if self in self.alive:
            self.alive.remove(self)

    def join(self, timeout_s: float) -> bool:
        return self.ends


def schedule(topic_id: bytes, led: dict[int, int], target: str = "orders") -> ScheduleTopic:
    return ScheduleTopic(topic_id[:1].decode(), topic_id, target, 0, led)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> paths.Layout:
    monkeypatch.setattr(partition, "PartitionTimer", FakeTimer)
    monkeypatch.setattr(FakeTimer, "alive", [])
    found = paths.layout(tmp_path)
    found.run_dir.mkdir(parents=True, exist_ok=True)
    return found


def test_served_partitions(places: paths.Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("mqd.timer.__main__.time.monotonic", lambda: now)
    timer = Timer(places)

    def look(*topics: ScheduleTopic) -> list[tuple[str, int, str, int]]:
        schedule_files.write(places.run_dir, schedule_files.SCHEDULES, Schedules({}, list(topics)))
        assert timer.update()
        return sorted(
            (one.topic.topic, one.index, one.topic.target, one.topic.led[one.index]) for one in FakeTimer.alive
        )

    assert timer.update() and not FakeTimer.alive
    assert look(schedule(TOPIC, {0: 5, 2: 6}), schedule(OTHER, {})) == [("t", 0, "orders", 5), ("t", 2, "orders", 6)]
    kept = next(one for one in FakeTimer.alive if one.index == 0)
    # another leader epoch or another target restarts the timer; unchanged ones continue
    assert look(schedule(TOPIC, {0: 5, 2: 7})) == [("t", 0, "orders", 5), ("t", 2, "orders", 7)]
    assert kept in FakeTimer.alive
    assert look(schedule(TOPIC, {0: 5}, "elsewhere")) == [("t", 0, "elsewhere", 5)]
    assert kept not in FakeTimer.alive
    now += 1.0
    assert timer.update() and [one.topic for one in schedule_files.read_status(places.run_dir)] == ["t"]
    assert look() == []
    now += IDLE_S
    assert not timer.update(), "there was no schedule for a minute"


def test_a_timer_starts_when_the_earlier_one_of_its_partition_has_ended(places: paths.Layout) -> None:
    """Both use the same files."""
    timer = Timer(places)

    def look(*topics: ScheduleTopic) -> list[tuple[int, int]]:
        schedule_files.write(places.run_dir, schedule_files.SCHEDULES, Schedules({}, list(topics)))
        assert timer.update()
        return sorted((one.index, one.topic.led[one.index]) for one in FakeTimer.alive)

    assert look(schedule(TOPIC, {0: 5, 1: 5})) == [(0, 5), (1, 5)]
    first = next(one for one in FakeTimer.alive if one.index == 0)
    first.ends = False
    assert look(schedule(TOPIC, {0: 6, 1: 6})) == [(1, 6)]
    assert look(schedule(TOPIC, {})) == [] and look(schedule(TOPIC, {0: 7})) == []
    assert timer.wait_s() == ENDING_S
    first.ends = True
    assert timer.update() and [one.topic.led for one in FakeTimer.alive] == [{0: 7}]
    timer.stop()
    assert not FakeTimer.alive


def test_it_sleeps_until_there_is_something_to_do(places: paths.Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    now, woken = 1000.0, []
    monkeypatch.setattr("mqd.timer.__main__.time.monotonic", lambda: now)
    timer = Timer(places, lambda: woken.append(now))
    assert timer.update() and timer.wait_s() == IDLE_S
    schedule_files.write(places.run_dir, schedule_files.SCHEDULES, Schedules({}, [schedule(TOPIC, {0: 5})]))
    assert timer.update() and timer.wait_s() == STATUS_S, "its status was published just now"
    now += STATUS_S
    assert timer.update() and timer.wait_s() is None
    (partition_timer,) = FakeTimer.alive
    for _ in range(3):
        partition_timer.on_status()
    assert woken == [now], "once, until it has looked"
    now += 0.25
    assert timer.update() and timer.wait_s() == STATUS_S - 0.25
    now += 0.75
    assert timer.update() and timer.wait_s() is None


def test_a_timer_that_runs_is_found_and_woken(tmp_path: Path) -> None:
    schedule_files.wake(tmp_path)  # no effect
    assert schedule_files.timer_process(tmp_path) is None
    program = "import select, sys; from pathlib import Path; from mqd.base import schedule_files; "
    program += "fd = schedule_files.register_timer(Path(sys.argv[1])); "
    program += "print('entered', flush=True); select.select([fd], [], [])"
    with subprocess.Popen([sys.executable, "-c", program, tmp_path], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"entered\n"
        found = schedule_files.timer_process(tmp_path)
        assert found is not None and found[0] == process.pid
        with pytest.raises(BlockingIOError):
            schedule_files.register_timer(tmp_path)
        schedule_files.wake(tmp_path)
        assert process.wait(PATIENCE_S) == 0
    assert schedule_files.timer_process(tmp_path) is None


def test_indexes_of_deleted_topics_are_removed(places: paths.Layout) -> None:
    for topic_id in (TOPIC, OTHER):
        Index(Directory(places.data_dir / "timer" / f"{topic_id.hex()}-0")).save(0)
    schedule_files.write(places.run_dir, schedule_files.SCHEDULES, Schedules({}, [schedule(TOPIC, {})]))
    assert Timer(places).update()
    assert [path.name for path in (places.data_dir / "timer").iterdir()] == [f"{TOPIC.hex()}-0"]


def test_progress_as_metadata() -> None:
    last, changes = Entry(1_800_000_000_000, 17), [Change(0, 5), Change(12, 0)]
    text = progress_text(TOPIC, last, Delays(changes))
    progress, delays = parse_progress(20, text, TOPIC)
    assert progress == Progress(20, last) and delays.changes == changes
    for offset, wrong, topic_id in (
        (-1001, "", TOPIC),
        (20, "", TOPIC),
        (20, text, OTHER),
        (20, f"2{text[1:]}", TOPIC),
    ):
        progress, delays = parse_progress(offset, wrong, topic_id)
        assert progress == Progress(0, START) and not delays.changes


def test_each_record_has_the_delay_with_which_it_was_first_read() -> None:
    delays = Delays([]).with_delay(5, 0, 0).with_delay(7, 10, 0).with_delay(7, 15, 0).with_delay(9, 20, 0)
    assert [delays.of(offset) for offset in (0, 9, 10, 19, 20, 1_000)] == [5, 5, 7, 7, 9, 9]
    assert delays.with_delay(6, 20, 0).changes[-2:] == [Change(10, 7), Change(20, 6)], "nothing was read with the 9"
    assert delays.with_delay(9, 30, 15).changes == [Change(10, 7), Change(20, 9)], "older records are deleted"


def test_the_text_of_the_delays_is_bounded() -> None:
    delays, begin, year_ms = Delays([]), 10**15, 31_622_400_000
    for number in range(3 * CHANGE_COUNT_MAX):
        delays = delays.with_delay(year_ms - number, begin + number, 0)
    assert len(progress_text(TOPIC, Entry(begin, begin), delays)) < 4096
    assert delays.of(begin + CHANGE_COUNT_MAX) == delays.of(2 * begin)
    assert delays.with_delay(1, 2 * begin, begin + 10).of(2 * begin) == 1


def test_an_index_on_disk(tmp_path: Path) -> None:
    day = 86_400_000
    index = Index(Directory(tmp_path), 4)
    entries = [Entry(100 * day + number * 7_000 % (3 * day), number) for number in range(100)]
    index.take(99 * day, 1)
    for entry in entries:
        index.add(*entry)
    index.cancel(*entries[50])
    index.save(100)
    index.take(100 * day + 70_000, 5)  # after the saved position
    again, end_offset = Index.open(Directory(tmp_path), 4)
    assert end_offset == 100 and again.count == 99
    taken: list[Entry] = []
    while some := again.take(104 * day, 7):
        taken += some
    assert taken == sorted(set(entries) - {entries[50]})
    (tmp_path / "manifest").write_bytes(b"{")
    assert Index.open(Directory(tmp_path), 4)[1] == -1
    assert not list(tmp_path.iterdir())


def test_a_timer_that_starts_after_the_broker_was_stopped_ends(tmp_path: Path) -> None:
    """Another supervisord may have forked it before, and it had no lock yet by which to be found."""
    run_dir = paths.layout(tmp_path).run_dir
    run_dir.mkdir(parents=True)
    schedule_files.end_timer(run_dir)
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "mqd.timer"], env={**os.environ, "MQD_DATA_DIR": str(tmp_path)}, timeout=IDLE_S / 2
    )
    assert ended.returncode == 0
    schedule_files.allow_timer(run_dir)
    assert schedule_files.may_run(run_dir)


def test_a_stop_right_after_the_start_is_no_failed_start_for_supervisord(tmp_path: Path) -> None:
    supervisord = configparser.RawConfigParser()
    supervisord.read(Path(schedule_files.__file__).parents[1] / "supervisord.conf")
    run_dir = paths.layout(tmp_path).run_dir
    run_dir.mkdir(parents=True)
    began_s = time.monotonic()
    environment = {**os.environ, "MQD_DATA_DIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-P", "-m", "mqd.timer"], env=environment) as process:
        eventually(lambda: schedule_files.timer_process(run_dir))
        schedule_files.end_timer(run_dir)
        assert process.wait(PATIENCE_S) == 0
    assert time.monotonic() - began_s >= supervisord["program:mqd-timer"].getfloat("startsecs")
