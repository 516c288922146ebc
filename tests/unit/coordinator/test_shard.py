"""A coordinator's partition: which records are written together, which responses wait for that,
timers; and the batches themselves.
"""

from __future__ import annotations

import random

import msgspec
import pytest

from mqd.coordinator.actions import Action, Effect, Persist, Reply, Timer, TransactionEnded
from mqd.coordinator.log import BATCH_BYTES_MAX, marker_batch, records_batch
from mqd.coordinator.shard import LoadedPartition, Shard, TooLarge
from mqd.coordinator.timers import Timers
from mqd.protocol.errors import ErrorCode
from mqd.protocol.records import decode_batch, decode_batch_header, has_valid_crc

INVALID_PRODUCER_EPOCH = int(ErrorCode.INVALID_PRODUCER_EPOCH)


class Do(msgspec.Struct, frozen=True):
    """An event with the response that its core is to send."""

    actions: tuple[Action, ...]
    empty_afterwards: bool = False


class Shout(Effect, frozen=True):
    text: str


class Puppet:
    def __init__(self, name: str) -> None:
        self.name, self.is_empty, self.seen = name, False, []

    def handle(self, event: object, now_ms: int) -> list[Action]:
        self.seen.append(event)
        if isinstance(event, Do):
            self.is_empty = event.empty_afterwards
            return list(event.actions)
        return []

    def replay(self, key: bytes, value: bytes | None) -> None: ...

    def on_loaded(self, now_ms: int) -> list[Action]:
        return [Timer("loaded", now_ms + 5)]


class Puppets:
    def __init__(self) -> None:
        self.made: list[Puppet] = []

    def core_name_of(self, key: bytes) -> str:
        return key.decode()

    def make(self, name: str) -> Puppet:
        self.made.append(Puppet(name))
        return self.made[-1]


class World:
    def __init__(self, loaded: LoadedPartition | None = None) -> None:
        self.sent: list[object] = []
        self.wakes = 0
        self.alarms: list[int] = []
        self.cores = Puppets()
        self.shard = Shard(
            self.cores,
            loaded or LoadedPartition(100),
            7,
            lambda number, response: self.sent.append((number, response)),
            lambda name, effect: self.sent.append((name, effect.text)),
            self._wake,
            self.alarms.append,
        )

    def _wake(self) -> None:
        self.wakes += 1

    def do(self, name: str, *actions: Action, empty: bool = False) -> None:
        self.shard.handle(name, Do(actions, empty), 0)
        self.shard.check()

    def write(self) -> list[list[tuple[bytes, bytes | None]]]:
        unit = self.shard.next_unit()
        assert unit is not None and self.shard.next_unit() is None
        self.shard.finish_write()
        self.shard.check()
        return [batch.records for batch in unit.batches]


def record(text: str) -> tuple[tuple[bytes, bytes], ...]:
    return ((text.encode(), b"v"),)


def test_a_response_waits_only_for_records_its_core_persisted_before() -> None:
    world = World()
    world.do("a", Reply(1, "early"), Persist(record("a1")), Reply(2, "late"), Shout("after"))
    world.do("b", Reply(3, "other"))
    world.do("a", Reply(4, "later still"))
    assert world.sent == [(1, "early"), (3, "other")]
    assert world.write() == [[(b"a1", b"v")]]
    assert world.sent[2:] == [(2, "late"), ("a", "after"), (4, "later still")]
    assert world.shard.end_offset == 101


def test_waiting_records_are_written_together_one_unit_at_a_time() -> None:
    world = World()
    world.do("a", Persist(record("a1")), Reply(1, ""))
    first = world.shard.next_unit()
    assert first is not None
    for number in range(2, 6):
        world.do(f"core-{number}", Persist(record(f"r{number}")), Reply(number, ""))
    world.do("a", Persist(record("a2")), Reply(9, ""))
    assert world.shard.next_unit() is None and world.sent == []
    world.shard.finish_write()
    assert world.sent == [(1, "")]
    assert world.write() == [[(b"r2", b"v"), (b"r3", b"v"), (b"r4", b"v"), (b"r5", b"v"), (b"a2", b"v")]]
    assert world.sent[1:] == [(2, ""), (3, ""), (4, ""), (5, ""), (9, "")]
    assert world.shard.next_unit() is None


def test_records_of_transactions_are_separate_batches() -> None:
    world = World()
    world.do(
        "a",
        Persist(record("plain-1")),
        Persist(record("t1"), 5, 0),
        Persist(record("t2"), 5, 0),
        Persist(record("u1"), 6, 1),
        Persist(record("plain-2")),
    )
    assert world.write() == [[(b"plain-1", b"v")], [(b"t1", b"v"), (b"t2", b"v")], [(b"u1", b"v")]]
    assert world.write() == [[(b"plain-2", b"v")]]  # H3: with an equal one it could have been kept or lost alone


def test_a_marker_reaches_only_the_cores_of_its_transaction() -> None:
    world = World()
    world.do("a", Persist(record("t1"), 5, 0))
    world.do("b", Persist(record("t2"), 5, 0))
    world.do("c", Persist(record("t3"), 6, 0))
    ended: list[object] = []
    world.shard.end_transaction(5, 0, 3, True, 0, ended.append)
    world.do("a", Reply(1, "after the marker"))
    event = TransactionEnded(5, 0, True)
    assert [core.name for core in world.cores.made if event in core.seen] == ["a", "b"] and ended == []
    unit = world.shard.next_unit()
    assert unit is not None and [batch.marker for batch in unit.batches] == [None, None, (3, True)]
    world.shard.finish_write()
    assert ended == [None] and world.sent == [(1, "after the marker")]
    assert world.shard.end_offset == 104
    world.shard.end_transaction(5, 0, 3, True, 0, ended.append)
    assert sum(event in core.seen for core in world.cores.made) == 2  # nothing is pending any more


def test_a_late_marker_does_not_affect_an_open_transaction() -> None:
    """A bumped one (KIP-890) has the epoch of the next transaction."""
    world = World()
    world.do("a", Persist(record("t1"), 5, 3))
    reported: list[object] = []
    for epoch, is_bumped in ((2, False), (3, True)):
        world.shard.end_transaction(5, epoch, 3, True, 0, reported.append, is_bumped)
    assert reported == [INVALID_PRODUCER_EPOCH] * 2 and not any(
        isinstance(event, TransactionEnded) for event in world.cores.made[0].seen
    )
    world.write()
    world.shard.end_transaction(5, 4, 3, True, 0, reported.append, True)
    # its response was lost: nothing is open, so it does no harm
    world.shard.end_transaction(5, 4, 3, True, 0, reported.append, True)
    assert sum(isinstance(event, TransactionEnded) for event in world.cores.made[0].seen) == 1
    world.write()
    assert reported[2:] == [None, None]


def test_a_refused_marker_uses_no_offset() -> None:
    world = World()
    reported: list[object] = []
    world.shard.end_transaction(5, 0, 3, False, 0, reported.append)
    world.do("a", Persist(record("a1")))
    unit = world.shard.next_unit()
    assert (
        unit is not None
        and world.shard.on_refused(unit.batches[0], 47)
        and not world.shard.on_refused(unit.batches[1], 47)
    )
    world.shard.finish_write()
    assert reported == [47] and world.shard.end_offset == 101
    world.do("a", Persist(record("t1"), 6, 0))
    world.write()
    world.shard.end_transaction(6, 0, 3, False, 0, reported.append)
    unit = world.shard.next_unit()
    assert unit is not None and not world.shard.on_refused(unit.batches[0], 52), (
        "its cores have ended something that is open in the log"
    )
    world.shard.fail(15)
    assert reported == [47, 52]


def test_lazy_records_wait_for_others_and_delay_none() -> None:
    world = World()
    world.do("a", Persist(record("a1"), is_lazy=True), Reply(1, "at once"))
    assert world.sent == [(1, "at once")] and world.shard.has_only_lazy and world.shard.next_unit() is None
    world.do("b", Persist(record("b1")), Reply(2, "later"))
    assert not world.shard.has_only_lazy and world.write() == [[(b"a1", b"v"), (b"b1", b"v")]]
    assert world.sent[1:] == [(2, "later")]
    world.do("a", Persist(record("a2"), is_lazy=True))
    late = world.shard.next_unit(is_lazy_due=True)
    assert late is not None and [batch.records for batch in late.batches] == [[(b"a2", b"v")]]
    world.do("a", Persist(record("a3"), is_lazy=True), Persist(record("a4")), Reply(3, ""))
    world.shard.check()
    world.shard.finish_write()
    assert world.write() == [[(b"a3", b"v"), (b"a4", b"v")]] and world.sent[2:] == [(3, "")]


def test_lazy_records_do_not_delay_another_unit() -> None:
    """H3 may require a second one."""
    world = World()
    world.do(
        "a",
        Persist(record("a1"), is_lazy=True),
        Persist(record("t1"), 5, 0, is_lazy=True),
        Persist(record("a2"), is_lazy=True),
    )
    assert not world.shard.has_only_lazy
    assert world.write() == [[(b"a1", b"v")], [(b"t1", b"v")]]
    assert world.shard.has_only_lazy and world.shard.next_unit() is None


def test_loaded_transactions_end_too() -> None:
    loaded = LoadedPartition(10)
    loaded.cores["g"] = Puppet("g")
    loaded.transactions[5] = {"g": None}
    world = World(loaded)
    world.shard.end_transaction(5, 1, 0, False, 0, lambda error: None)
    assert loaded.cores["g"].seen == [TransactionEnded(5, 1, False)]


def test_a_failed_marker_is_reported_to_its_waiter() -> None:
    world = World()
    ended: list[object] = []
    world.shard.end_transaction(5, 0, 3, True, 0, ended.append)
    world.shard.fail(16)
    assert ended == [16]


def test_an_idle_empty_core_is_dropped_with_its_timers() -> None:
    world = World()
    world.do("a", empty=True)
    assert world.shard.core("a") is None
    world.do("b", Timer("t", 10), Persist(record("gone")), empty=True)
    assert world.shard.core("b") is not None
    world.write()
    assert world.shard.core("b") is None and world.shard.timers.take_due(1000) == []


def test_too_large_for_a_batch() -> None:
    world = World()
    with pytest.raises(TooLarge):
        world.shard.handle("a", Do((Persist(((b"k", bytes(BATCH_BYTES_MAX)),)),)), 0)
    world = World()
    for number in range(5):  # together too large: several units
        world.do("a", Persist(((b"%d" % number, bytes(BATCH_BYTES_MAX // 2 - 1000)),)))
    assert [len(world.write()[0]) for _ in range(3)] == [2, 2, 1]


def test_timers_fire_once_and_not_too_early() -> None:
    timers = Timers()
    chance = random.Random(5)
    armed: dict[tuple[str, str], int] = {}
    now = 0
    for _ in range(3000):
        name = (f"c{chance.randrange(20)}", "t")
        at = None if chance.random() < 0.2 else now + chance.randrange(1, 200)
        timers.set(name, at)
        if at is None:
            armed.pop(name, None)
        else:
            armed[name] = at
        now += chance.randrange(8)
        due = timers.take_due(now)
        assert [armed[one] for one in due] == sorted(at for at in armed.values() if at <= now)
        for one in due:
            del armed[one]
        assert len(timers) == len(armed)
        assert not armed or timers.next_ms() <= min(armed.values())


def test_a_timer_fires_only_while_its_core_exists() -> None:
    world = World()
    world.do("a", Timer("t", 10), Timer("u", 20), Timer("u", None))
    assert world.alarms == [10, 20] and world.shard.timers.next_ms() == 10 and not world.wakes
    (due,) = world.shard.timers.take_due(50)
    assert world.shard.fire(due) == "a" and world.shard.fire(due) is None


def test_loading_arms_timers() -> None:
    loaded = LoadedPartition(0)
    loaded.cores["g"] = Puppet("g")
    world = World(loaded)
    world.shard.on_loaded(1000)
    assert world.shard.timers.take_due(1005) == [("g", "loaded")]


# -- batches ---------------------------------------------------------------------------------------


def test_batches_have_the_standard_format() -> None:
    records = [(b"key", b"value"), (b"k" * 200, None), (b"", b""), (b"k", bytes(70_000))]
    batch = records_batch(records, 1234)
    header = decode_batch_header(batch)
    assert has_valid_crc(batch) and (
        header.producer_id,
        header.base_sequence,
        header.is_transactional,
        header.record_count,
    ) == (-1, -1, False, 4)
    assert [(one.key, one.value, one.timestamp_ms, one.offset) for one in decode_batch(batch)] == [
        (key, value, 1234, at) for at, (key, value) in enumerate(records)
    ]
    header = decode_batch_header(records_batch(records, 1234, 42, 3))
    assert (header.producer_id, header.producer_epoch, header.is_transactional, header.is_control) == (
        42,
        3,
        True,
        False,
    )


@pytest.mark.parametrize(("commit", "kind"), [(True, 1), (False, 0)])
def test_markers(commit: bool, kind: int) -> None:
    batch = marker_batch(42, 3, 77, commit, 1234)
    header = decode_batch_header(batch)
    assert (
        has_valid_crc(batch)
        and header.is_control
        and header.is_transactional
        and (header.producer_id, header.producer_epoch) == (42, 3)
    )
    (one,) = decode_batch(batch)
    assert (one.key, one.value) == (bytes([0, 0, 0, kind]), b"\0\0" + (77).to_bytes(4, "big"))
