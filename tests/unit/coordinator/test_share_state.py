"""A share-partition at its coordinator: its encoded records, its name, refusals, and its log loaded
in order. Random histories: tests/property/test_share_state_histories.py.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from mqd.coordinator import load
from mqd.coordinator.actions import KeyValue, Persist, Reply, Timer, TimerFired
from mqd.coordinator.log import records_batch
from mqd.coordinator.share import records
from mqd.coordinator.share.core import (
    RUNS_MAX,
    SNAPSHOT_TIMER,
    Delete,
    Initialize,
    Read,
    ReadSummary,
    Settings,
    SharePartition,
    SharePartitions,
    Write,
)
from mqd.coordinator.share.runs import ACKNOWLEDGED, ARCHIVED, AVAILABLE, Run

TOPIC_ID = bytes(range(16))
NAME = records.share_partition_name("g", TOPIC_ID, 2)


class Driver:
    def __init__(self, **settings: int) -> None:
        self.core = SharePartition(NAME, Settings(**settings))
        self.log: list[KeyValue] = []
        self.timers: dict[str, int | None] = {}
        self.now = 1_000

    def send_request(self, kind: type, *fields: object):
        return self.report(kind(7, *fields))

    def report(self, event: object):
        reply = None
        for action in self.core.handle(event, self.now):
            match action:
                case Persist(found):
                    self.log += found
                case Timer(name, at_ms):
                    self.timers[name] = at_ms
                case Reply(7, response):
                    reply = response
        self.core.check()
        return reply

    def write(self, *runs: Run, start: int = -1, epoch: int = 4, complete: int = 0):
        return self.send_request(Write, 3, epoch, start, complete, runs)

    def started(self) -> Driver:
        assert self.send_request(Initialize, 3, -1).error_code == 0
        assert self.send_request(Read, 4).start_offset == -1
        return self


def test_the_records_byte_by_byte() -> None:
    driver = Driver().started()
    driver.write(Run(5, 9, ACKNOWLEDGED, 1), start=5, complete=5)
    key = "0001 67" + TOPIC_ID.hex() + "00000002"
    expected = [
        # snapshot epoch, state epoch, leader epoch, start offset, created, written, batches
        ("0000" + key, "0000 00000000 00000003 00000000 ffffffffffffffff" + "00000000000003e8" * 2 + "01 00"),
        # snapshot epoch, leader epoch, start offset, batches
        ("0001" + key, "0000 00000000 00000004 ffffffffffffffff 01 00"),
        (
            "0001" + key,
            "0000 00000000 00000004 0000000000000005 02 0000000000000005 0000000000000009 02 0001 00"
            # DeliveryCompleteCount, tag 0
            " 01 00 04 00000005",
        ),
    ]
    assert driver.log == [(bytes.fromhex(one), bytes.fromhex(other)) for one, other in expected]


def test_a_name_is_that_of_kafkas_coordinator_key() -> None:
    assert NAME == "g:AAECAwQFBgcICQoLDA0ODw:2"
    odd = records.share_partition_name("a:b", b"\xff" * 16, 0)
    assert odd == "a:b:_____________________w:0"
    assert records.split_name(odd) == ("a:b", b"\xff" * 16, 0)


@pytest.mark.parametrize(
    "name",
    [
        "g",
        "g:AAECAwQFBgcICQoLDA0ODw",
        ":AAECAwQFBgcICQoLDA0ODw:1",
        "g:AAEC:1",
        "g:*:1",
        "g:AAECAwQFBgcICQoLDA0ODw:-1",
        "g:äöü:1",
    ],
)
def test_invalid_names(name: str) -> None:
    with pytest.raises(ValueError):
        records.split_name(name)


@pytest.mark.parametrize(
    "run",
    [
        Run(-1, 4, 2, 1),
        Run(5, 4, 2, 1),
        Run(0, 1, 1, 1),
        Run(0, 1, 6, 1),
        Run(0, 1, 2, -1),
        Run(0, (1 << 63) - 1, 2, 1),
    ],
)
def test_invalid_state_batches(run: Run) -> None:
    batch = SimpleNamespace(
        first_offset=run.first, last_offset=run.last, delivery_state=run.state, delivery_count=run.deliveries
    )
    with pytest.raises(ValueError, match="a state batch"):
        records.runs_of([batch])


def test_before_it_is_initialized_and_after_its_end() -> None:
    driver = Driver()
    for _ in range(2):
        assert (driver.send_request(Read, 0).error_code, driver.write().error_code) == (42, 42)
        summary = driver.send_request(ReadSummary)
        assert (summary.error_code, summary.start_offset, summary.delivery_complete_count) == (0, -1, -1)
        driver.started()
        assert driver.send_request(Delete).error_code == 0
        assert driver.send_request(Delete).error_code == 0  # as in Kafka
        assert driver.core.is_empty
        assert driver.log[-1] == (driver.log[0][0], None)


def test_a_leader_fences_its_predecessor_and_an_administrator_both() -> None:
    driver = Driver().started()
    assert driver.send_request(Read, 5).error_code == 0
    assert driver.write(Run(0, 0, 2, 1)).error_code == 74
    assert driver.send_request(Read, 4).error_code == 74
    assert driver.write(Run(0, 0, 2, 1), epoch=5).error_code == 0
    assert driver.send_request(Initialize, 2, 7).error_code == 124
    assert driver.send_request(Initialize, 4, 7).error_code == 0
    assert driver.write(Run(8, 8, 2, 1), epoch=5).error_code == 124
    found = driver.send_request(Read, 5)
    assert (found.state_epoch, found.start_offset, found.state_batches) == (4, 7, [])


def test_a_repeated_initialization_changes_nothing() -> None:
    driver = Driver().started()
    driver.write(Run(3, 4, ACKNOWLEDGED, 1), start=3)
    before, records_before = driver.core.durable_state(), len(driver.log)
    assert driver.send_request(Initialize, 3, -1).error_code == 0
    assert (driver.core.durable_state(), len(driver.log)) == (before, records_before)
    assert driver.send_request(Initialize, 3, 9).error_code == 0
    assert driver.core.start_offset == 9


def test_a_write_never_lowers_the_start() -> None:
    driver = Driver().started()
    driver.write(Run(10, 19, ARCHIVED, 5), start=10)
    driver.write(Run(4, 11, AVAILABLE, 6), start=3)
    assert driver.core.start_offset == 10
    assert driver.core.runs.runs == [Run(10, 11, AVAILABLE, 6), Run(12, 19, ARCHIVED, 5)]


def test_snapshots_by_number_of_updates_and_by_time() -> None:
    driver = Driver(updates_per_snapshot=3, cold_ms=50).started()  # the read was the first update
    for offset in range(3):
        driver.write(Run(offset, offset, ACKNOWLEDGED, 1))
    kinds = [int.from_bytes(key[:2], "big") for key, _ in driver.log]
    assert kinds == [0, 1, 1, 1, 0]
    assert driver.timers == {SNAPSHOT_TIMER: None}
    driver.write(Run(9, 9, ACKNOWLEDGED, 1))
    assert driver.timers == {SNAPSHOT_TIMER: 1_050}
    driver.report(TimerFired(SNAPSHOT_TIMER))
    value = records.SHARE_SNAPSHOT.decode_value(driver.log[-1][1])
    assert (value.snapshot_epoch, len(value.state_batches)) == (2, 2)


def test_too_many_runs_are_refused() -> None:
    driver = Driver().started()
    half = RUNS_MAX // 2 - 1
    assert driver.write(*(Run(2 * n, 2 * n, ACKNOWLEDGED, 1) for n in range(half))).error_code == 0
    assert driver.write(Run(1 << 40, 1 << 40, 2, 1), Run(1 << 41, 1 << 41, 2, 1)).error_code == 0
    many = tuple(Run((1 << 42) + 2 * n, (1 << 42) + 2 * n, ACKNOWLEDGED, 1) for n in range(half))
    assert driver.write(*many).error_code == 42
    assert driver.write(start=1 << 43).error_code == 0
    assert driver.core.runs.runs == []


def test_a_log_is_loaded_in_order(tmp_path: Path) -> None:
    """Many updates have one key: a loader that keeps only the last record of each would lose the
    others.
    """
    driver = Driver().started()
    for offset in range(0, 100, 2):
        driver.write(Run(offset, offset, ACKNOWLEDGED, 1), complete=offset)
    driver.send_request(Read, 9)
    segment = bytearray()
    for number, (key, value) in enumerate(driver.log):
        batch = bytearray(records_batch([(key, value)], 1_000, -1, -1))
        batch[:8] = number.to_bytes(8, "big")
        segment += batch
    (tmp_path / "00000000000000000000.log").write_bytes(segment)
    loaded = load.load(tmp_path, len(driver.log), SharePartitions(Settings()), "__share_group_state-0")
    (core,) = loaded.cores.values()
    assert isinstance(core, SharePartition)
    assert (loaded.record_count, loaded.skipped_count) == (len(driver.log), 0)
    assert core.durable_state() == driver.core.durable_state()
    assert core.on_loaded(5) == [Timer(SNAPSHOT_TIMER, 300_005)]
    driver.send_request(Delete)
    segment += b"".join(
        number.to_bytes(8, "big") + bytes(records_batch([record], 1_000, -1, -1))[8:]
        for number, record in enumerate(driver.log[-1:], len(driver.log) - 1)
    )
    (tmp_path / "00000000000000000000.log").write_bytes(segment)
    assert load.load(tmp_path, len(driver.log), SharePartitions(Settings()), "gone").cores == {}


def test_updates_of_a_deleted_state_do_not_restore_it() -> None:
    driver = Driver().started()
    core = SharePartition(NAME, Settings())
    core.replay(*driver.log[1])
    assert core.is_empty


def test_what_the_log_has_lost_is_forgotten() -> None:
    """Epoch 4 ends at 12 in the log of leader 6; what is at 12 now is another record."""
    driver = Driver().started()
    driver.write(Run(14, 16, ACKNOWLEDGED, 1), start=13, complete=3)
    response = driver.send_request(Read, 6, ((3, 0), (6, 12), (records.LOG_END_EPOCH, 40)))
    assert (response.start_offset, response.state_batches) == (12, [])
    assert driver.core.complete_count == 0
    assert driver.log[-1][0][:2] == b"\0\0", "a snapshot: updates cannot lower the start"


def test_a_state_below_the_lost_records_is_kept() -> None:
    driver = Driver().started()
    driver.write(Run(5, 9, ACKNOWLEDGED, 1), Run(11, 14, AVAILABLE, 1), start=5, complete=5)
    response = driver.send_request(Read, 5, ((4, 0), (5, 12), (records.LOG_END_EPOCH, 12)))
    assert response.start_offset == 5
    assert [(one.first_offset, one.last_offset) for one in response.state_batches] == [(5, 9), (11, 11)]
    assert driver.core.complete_count == 5


def test_the_same_leader_epoch_loses_nothing() -> None:
    driver = Driver().started()
    driver.write(start=13)
    assert driver.send_request(Read, 4, ((records.LOG_END_EPOCH, 2),)).start_offset == 13


def test_an_administrators_offset_is_not_beyond_the_logs_end() -> None:
    driver = Driver()
    driver.send_request(Initialize, 3, 13)
    assert driver.send_request(Read, 4, ((2, 0), (4, 3), (records.LOG_END_EPOCH, 11))).start_offset == 11


@pytest.mark.parametrize(
    "epochs", [[(4, 0)], [(5, 0), (4, 3), (records.LOG_END_EPOCH, 9)], [(4, 9), (records.LOG_END_EPOCH, 3)]]
)
def test_what_is_no_list_of_epochs(epochs: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError):
        records.checked_epoch_starts(epochs)


def test_what_waits_for_another_delivery_is_counted_by_deliveries() -> None:
    driver = Driver().started()
    driver.write(
        Run(5, 9, AVAILABLE, 1), Run(10, 10, ACKNOWLEDGED, 2), Run(11, 12, AVAILABLE, 3), Run(14, 14, AVAILABLE, 1)
    )
    assert driver.send_request(ReadSummary).deliveries == []
    found = driver.send_request(ReadSummary, True).deliveries
    assert [(one.delivery_count, one.records) for one in found] == [(1, 6), (3, 2)]
