"""Committed offsets of a group: the core by itself, random histories against a plain model, and
state derived from the log.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from mqd.coordinator.actions import Action, Persist, Reply, Timer, TransactionEnded
from mqd.coordinator.group.cores import GroupCoreFactory
from mqd.coordinator.group.group import DeleteGroup, Group
from mqd.coordinator.group.offsets import (
    EXPIRATION_TIMER,
    KEEP,
    CommitOffsets,
    CommittedOffset,
    DeleteOffsets,
    FetchedOffset,
    FetchOffsets,
    Offsets,
    OffsetsCommitted,
    OffsetsFetched,
    OffsetsSettings,
    PartitionsGone,
)
from mqd.coordinator.group.records import decode_offset_key, decode_offset_value
from mqd.coordinator.group.settings import ClassicSettings
from mqd.coordinator.load import load
from mqd.coordinator.shard import WriteUnit
from mqd.log.schedule_headers import GROUP_PREFIX
from mqd.protocol.errors import ErrorCode
from tests.tiers import quick
from tests.unit.coordinator.group_shell import GroupShell
from tests.unit.coordinator.test_load import Files

SETTINGS = OffsetsSettings(retention_ms=1000, check_interval_ms=100, metadata_bytes_max=10)


class Members:
    """A group that allows everything that a test does not forbid."""

    def __init__(self) -> None:
        self.error = 0
        self.subscribed: set[str] = set()
        self.since: int | None = None

    def commit_error(self, event: CommitOffsets) -> int:
        return self.error

    def fetch_error(self, member_id: str | None, member_epoch: int) -> int:
        return self.error

    def delete_error(self) -> int:
        return self.error

    def is_subscribed(self, topic: str) -> bool:
        return topic in self.subscribed

    def empty_since_ms(self) -> int | None:
        return self.since

    def on_committed(self, event: CommitOffsets, now_ms: int) -> list[Action]:
        return []


def commit(
    *offsets: tuple[str, int, int], producer_id: int = -1, retention_ms: int = -1, metadata: str = ""
) -> CommitOffsets:
    return CommitOffsets(
        1,
        8,
        "",
        None,
        -1,
        tuple(CommittedOffset(topic, partition, offset, 3, metadata) for topic, partition, offset in offsets),
        retention_ms,
        producer_id,
        0,
    )


class World:
    def __init__(self) -> None:
        self.members = Members()
        self.offsets = Offsets("g", SETTINGS)
        self.now = 0
        self.log: list[Persist] = []

    def do(self, event: object) -> object:
        """The response, if any; collects the persisted records."""
        return self.take(self.offsets.handle(event, self.members, self.now))

    def take(self, actions: list[Action]) -> object:
        replies = [action.response for action in actions if isinstance(action, Reply)]
        # the shell ignores empty ones
        self.log += [action for action in actions if isinstance(action, Persist) and action.records]
        assert len(replies) <= 1 and (not replies or isinstance(actions[-1], Reply))
        self.offsets.check()
        return replies[0] if replies else None

    def fetch(self, *topics: tuple[str, tuple[int, ...]], stable: bool = False) -> dict[tuple[str, int], FetchedOffset]:
        found = self.do(FetchOffsets(1, topics or None, stable))
        assert isinstance(found, OffsetsFetched) and not found.error
        return {(topic, one.partition): one for topic, partitions in found.topics for one in partitions}

    def expire(self) -> bool:
        actions, is_last = self.offsets.on_expiration_timer(self.members, self.now)
        self.take(actions)
        return is_last


def test_commit_and_fetch() -> None:
    world = World()
    assert world.do(commit(("t", 0, 5), ("t", 1, 6), ("u", 0, 7), metadata="m")) == OffsetsCommitted(0, (0, 0, 0))
    assert world.fetch() == {
        ("t", 0): FetchedOffset(0, 5, 3, "m"),
        ("t", 1): FetchedOffset(1, 6, 3, "m"),
        ("u", 0): FetchedOffset(0, 7, 3, "m"),
    }
    assert world.fetch(("t", (1, 9)), ("x", (0,))) == {
        ("t", 1): FetchedOffset(1, 6, 3, "m"),
        ("t", 9): FetchedOffset(9),
        ("x", 0): FetchedOffset(0),
    }
    (persist,) = world.log
    assert [decode_offset_key(key) for key, _ in persist.records] == [
        ("g", "t", 0),
        ("g", "t", 1),
        ("g", "u", 0),
    ] and persist.producer_id == -1


def test_all_offsets_come_in_order() -> None:
    world = World()
    world.do(commit(("u", 1, 6), ("t", 1, 6)))
    world.do(commit(("u", 0, 5)))
    assert list(world.fetch()) == [("t", 1), ("u", 0), ("u", 1)]


def test_metadata_has_a_bound_in_bytes() -> None:
    world = World()
    response = world.do(
        CommitOffsets(
            1, 8, "", None, -1, (CommittedOffset("t", 0, 1, -1, "x" * 10), CommittedOffset("t", 1, 1, -1, "ü" * 6))
        )
    )
    assert response == OffsetsCommitted(0, (0, int(ErrorCode.OFFSET_METADATA_TOO_LARGE))) and list(world.fetch()) == [
        ("t", 0)
    ]
    assert len(world.log[0].records) == 1


def test_a_commit_larger_than_a_batch_is_refused_whole() -> None:
    """A group id of 32 KiB is in the key of every record: a small request could require a batch
    that is too large to write.
    """
    world = World()
    world.offsets = Offsets("g" * 32767, SETTINGS)
    fits = (SETTINGS.commit_bytes_max - 4096) // (32767 + 90)
    assert world.do(commit(*(("t", 0, number) for number in range(fits)))).error == 0
    before = world.fetch()
    assert world.do(commit(*(("t", 0, number) for number in range(fits + 2)))) == OffsetsCommitted(
        int(ErrorCode.INVALID_COMMIT_OFFSET_SIZE)
    )
    assert world.fetch() == before and len(world.log) == 1
    assert all(fits_in_a_batch(persist) for persist in world.log)


def fits_in_a_batch(persist: Persist) -> bool:
    return WriteUnit().try_add(persist)  # raises TooLarge


def test_many_offsets_go_in_batches_that_can_be_written() -> None:
    world = World()
    count = 30_000  # with long names 4 MiB of tombstones and more
    for topic in ("t" * 249, "u" * 249, "v" * 249):
        for partition in range(0, count, 10_000):
            world.do(commit(*((topic, one, 5) for one in range(partition, partition + 10_000))))
    del world.log[:]
    world.do(DeleteOffsets(1, (("t" * 249, tuple(range(count))),)))
    world.do(PartitionsGone({"u" * 249: 0}))
    world.now = 10_000
    world.expire()
    assert world.offsets.is_empty and len(world.log) > 10
    assert all(fits_in_a_batch(persist) for persist in world.log)
    assert (
        len({key for persist in world.log for key, _ in persist.records})
        == sum(len(persist.records) for persist in world.log)
        == 3 * count
    )


def test_a_retention_time_without_end() -> None:
    world = World()
    world.now = 1_000
    assert world.do(commit(("t", 0, 5), retention_ms=2**63 - 1)).error == 0
    assert world.offsets.get("t", 0).expire_timestamp_ms == 2**63 - 1


def test_a_refused_commit_changes_nothing() -> None:
    world = World()
    world.members.error = int(ErrorCode.ILLEGAL_GENERATION)
    assert world.do(commit(("t", 0, 5))) == OffsetsCommitted(22)
    assert world.do(FetchOffsets(1, None)) == OffsetsFetched(22)
    assert world.do(DeleteOffsets(1, (("t", (0,)),))).error == 22
    assert world.offsets.is_empty and world.log == []


def test_a_transactions_offsets_take_effect_with_its_marker() -> None:
    world = World()
    world.do(commit(("t", 0, 5)))
    world.do(commit(("t", 0, 50), ("t", 1, 51), producer_id=9))
    assert world.log[1].producer_id == 9
    assert world.fetch() == {("t", 0): FetchedOffset(0, 5, 3)}
    unstable = int(ErrorCode.UNSTABLE_OFFSET_COMMIT)
    assert {name: one.error for name, one in world.fetch(("t", (0, 1, 2)), stable=True).items()} == {
        ("t", 0): unstable,
        ("t", 1): unstable,
        ("t", 2): 0,
    }
    world.do(TransactionEnded(8, 0, True))
    world.do(TransactionEnded(9, 0, True))
    assert {name: one.offset for name, one in world.fetch(stable=True).items()} == {("t", 0): 50, ("t", 1): 51}
    world.do(commit(("t", 0, 60), producer_id=9))
    world.do(TransactionEnded(9, 0, False))
    assert world.fetch(stable=True)["t", 0].offset == 50


def test_a_plain_commit_overtakes_a_pending_one() -> None:
    world = World()
    world.do(commit(("t", 0, 50), ("t", 1, 51), producer_id=9))
    world.do(commit(("t", 0, 5)))
    assert world.fetch(("t", (0,)), stable=True)["t", 0].error == ErrorCode.UNSTABLE_OFFSET_COMMIT
    world.do(TransactionEnded(9, 0, True))
    assert {name: one.offset for name, one in world.fetch(stable=True).items()} == {("t", 0): 5, ("t", 1): 51}


def test_deletion() -> None:
    world = World()
    world.do(commit(("t", 0, 5), ("t", 1, 6), ("u", 0, 7)))
    world.members.subscribed = {"u"}
    response = world.do(DeleteOffsets(1, (("t", (0, 0, 8)), ("u", (0,)))))
    assert response.errors == (("t", (0, 0, 0)), ("u", (int(ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC),)))
    assert list(world.fetch()) == [("t", 1), ("u", 0)] and [value for _, value in world.log[-1].records] == [None]
    world.do(commit(("v", 0, 1), producer_id=9))
    world.do(PartitionsGone({"t": 0, "v": 0, "w": 0}))
    world.do(TransactionEnded(9, 0, True))
    assert list(world.fetch()) == [("u", 0)]
    world.do(commit(("v", 0, 1), producer_id=9))
    assert [decode_offset_key(key) for key, value in world.offsets.delete_all() if value is None] == [
        ("g", "u", 0),
        ("g", "v", 0),
    ]
    world.do(TransactionEnded(9, 0, True))
    assert world.offsets.is_empty


def test_offsets_of_deleted_partitions_are_removed_including_pending_ones() -> None:
    world = World()
    world.do(commit(("t", 0, 5), ("t", 3, 6), ("t", 4, 7), ("u", 9, 8)))
    world.do(commit(("t", 2, 50), ("t", 5, 51), ("v", 6, 52), producer_id=9))
    assert world.offsets.partition_ends() == {"t": 6, "u": 10, "v": 7}
    world.do(PartitionsGone({"t": 4, "w": 0}))
    assert [(decode_offset_key(key), value) for key, value in world.log[-1].records] == [
        (("g", "t", 4), None),
        (("g", "t", 5), None),
    ]
    world.do(TransactionEnded(9, 0, True))
    assert {name: one.offset for name, one in world.fetch().items()} == {
        ("t", 0): 5,
        ("t", 3): 6,
        ("u", 9): 8,
        ("t", 2): 50,
        ("v", 6): 52,
    }
    count = len(world.log)
    world.do(PartitionsGone({"t": 4}))
    assert len(world.log) == count, "nothing is left to remove"


def test_offsets_without_members_expire_by_their_commit_time() -> None:
    world = World()
    world.do(commit(("t", 0, 5)))
    world.now = 500
    world.do(commit(("t", 1, 6)))
    world.now = 999
    assert not world.expire() and len(world.fetch()) == 2
    world.now = 1000
    assert not world.expire() and list(world.fetch()) == [("t", 1)]
    world.do(commit(("t", 1, 7), producer_id=9))
    world.now = 5000
    assert not world.expire() and list(world.fetch()) == [("t", 1)]  # its transaction is open
    world.do(TransactionEnded(9, 0, False))
    assert world.expire() and world.offsets.is_empty


def test_the_progress_of_a_schedule_does_not_expire() -> None:
    world = World()
    world.offsets.group_id = f"{GROUP_PREFIX}later"
    world.do(commit(("t", 0, 5)))
    world.now = 1_000_000
    assert not world.expire() and list(world.fetch()) == [("t", 0)]


def test_offsets_of_members_expire_by_the_end_of_the_group_and_by_subscription() -> None:
    world = World()
    world.do(commit(("t", 0, 5), ("u", 0, 5)))
    world.now = 10_000
    world.members.since = KEEP
    world.expire()
    assert len(world.fetch()) == 2
    world.members.since = 9_500
    world.expire()
    assert len(world.fetch()) == 2
    world.members.since, world.members.subscribed = None, {"t"}
    world.expire()
    assert list(world.fetch()) == [("t", 0)]
    world.members.since, world.members.subscribed, world.now = 9_500, set(), 10_500
    world.expire()
    assert world.fetch() == {}


def test_an_explicit_expiration_time_takes_precedence() -> None:
    world = World()
    world.do(commit(("t", 0, 5), retention_ms=50))
    world.do(commit(("t", 1, 5), retention_ms=5000))
    world.now = 50
    world.expire()
    assert list(world.fetch()) == [("t", 1)]
    world.now = 2000
    world.expire()
    assert list(world.fetch()) == [("t", 1)]
    world.now = 5000
    world.expire()
    assert world.offsets.is_empty


def test_the_timer_is_never_due_in_the_turn_in_which_it_is_armed() -> None:
    """It fired again immediately, and the coordinator did nothing else."""
    world = World()
    world.offsets._settings = OffsetsSettings(retention_ms=1000, check_interval_ms=1, metadata_bytes_max=10)
    (timer,) = [
        action for action in world.offsets.handle(commit(("t", 0, 5)), world.members, 7000) if isinstance(action, Timer)
    ]
    assert timer.at_ms >= 7050
    (timer,) = [
        action
        for action in world.offsets.on_expiration_timer(world.members, timer.at_ms)[0]
        if isinstance(action, Timer)
    ]
    assert timer.at_ms >= 7100


def test_the_timer_is_armed_while_there_are_offsets() -> None:
    world = World()
    _, timer, _ = world.offsets.handle(commit(("t", 0, 5)), world.members, 0)
    assert isinstance(timer, Timer) and timer.name == EXPIRATION_TIMER and 50 <= timer.at_ms < 150
    assert [type(action) for action in world.offsets.handle(commit(("t", 0, 5)), world.members, 0)] == [Persist, Reply]
    world.now = 10_000
    actions, _ = world.offsets.on_expiration_timer(world.members, world.now)
    assert [type(action) for action in actions] == [Persist]


# -- random histories ------------------------------------------------------------------------------


class Model:
    """A model of committed offsets, as simple as possible. A pending offset has the time of its
    writing, and so does a committed one: the later one counts.
    """

    def __init__(self) -> None:
        self.committed: dict[tuple[str, int], tuple[int, int | None]] = {}  # no offset: deleted then
        self.pending: dict[int, dict[tuple[str, int], tuple[int, int]]] = {}

    def end(self, producer_id: int, commit: bool) -> None:
        for name, (written, offset) in self.pending.pop(producer_id, {}).items():
            if commit and self.committed.get(name, (-1, 0))[0] < written:
                self.committed[name] = (written, offset)


@pytest.mark.parametrize("seed", quick(range(30), range(10)))
def test_histories_agree_with_the_model_and_with_their_own_log(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    world, model, files = World(), Model(), Files(tmp_path / "__consumer_offsets-7")
    for turn in range(1, 300):
        world.now += chance.randrange(3)
        names = [(chance.choice("tuv"), chance.randrange(3)) for _ in range(chance.randrange(1, 4))]
        kind, producer_id = chance.random(), chance.randrange(3)
        if kind < 0.45:
            world.do(commit(*((topic, partition, turn) for topic, partition in names)))
            model.committed |= {name: (turn, turn) for name in names}
        elif kind < 0.75:
            world.do(commit(*((topic, partition, turn) for topic, partition in names), producer_id=producer_id))
            model.pending.setdefault(producer_id, {}).update({name: (turn, turn) for name in names})
        elif kind < 0.95:
            done = chance.random() < 0.7
            world.do(TransactionEnded(producer_id, 0, done))
            model.end(producer_id, done)
            files.end(producer_id, done)
        else:
            world.do(DeleteOffsets(1, tuple((topic, (partition,)) for topic, partition in names)))
            model.committed |= {name: (turn, None) for name in names}
        for persist in world.log:
            files.put(*persist.records, producer_id=persist.producer_id)
        world.log.clear()
        assert {name: one.offset for name, one in world.fetch().items()} == {
            name: offset for name, (_, offset) in model.committed.items() if offset is not None
        }
    loaded = load(
        files.directory, files.next_offset, GroupCoreFactory(lambda name: Group(name, ClassicSettings(), SETTINGS))
    )
    again = World()
    again.offsets = loaded.cores["g"].offsets if "g" in loaded.cores else Offsets("g", SETTINGS)
    again.take(again.offsets.on_loaded(world.now))
    assert again.fetch() == world.fetch()
    for producer_id in range(3):
        for either in (world, again):
            either.do(TransactionEnded(producer_id, 0, True))
        assert again.fetch() == world.fetch()


# -- loading ---------------------------------------------------------------------------------------


def test_values_of_every_version_are_loaded_and_damaged_ones_named(tmp_path: Path) -> None:
    files, world = Files(tmp_path / "__consumer_offsets-1"), World()
    world.do(commit(("t", 0, 5), metadata="abc"))
    world.do(commit(("t", 1, 6), retention_ms=77))
    for persist in world.log:
        files.put(*persist.records)
    key = world.log[0].records[0][0]
    sound = next(value for persist in world.log for _, value in persist.records if b"abc" in value)
    for partition, value in (
        (2, b"\0\3short"),
        (3, b"\0\x09" + bytes(30)),
        (4, b""),
        (5, sound.replace(b"abc", b"\xffbc")),
    ):
        files.put((key[:-4] + partition.to_bytes(4, "big"), value))
    files.put(
        (b"\0\1\0\x09too long", b"x"),
        (b"\0\2\0\1h", b"\0\7"),
        (b"\0\x63\0\1h", b"of the future"),
        (key[:-4], b"x"),
        (b"\xff\xff" + key[2:], sound),
    )
    loaded = load(
        files.directory, files.next_offset, GroupCoreFactory(lambda name: Group(name, ClassicSettings(), SETTINGS))
    )
    offsets = loaded.cores["g"].offsets
    assert {name: len(offsets.table(name)) for name in offsets.topics} == {"t": 2}
    assert offsets.get("t", 0).metadata == "abc" and offsets.get("t", 1).expire_timestamp_ms == 77
    assert loaded.skipped_count == 7


def test_random_bytes_are_refused_with_nothing_but_value_errors() -> None:
    chance = random.Random(3)
    cores = GroupCoreFactory(lambda name: Group(name, ClassicSettings(), SETTINGS))
    sound = World()
    sound.do(commit(("t", 0, 5), metadata="abc"))
    ((key, value),) = sound.log[0].records
    for _ in range(3000):
        bad_key, bad_value = bytearray(key), bytearray(value)
        for data in (bad_key, bad_value):
            if chance.random() < 0.7 and data:
                data[chance.randrange(len(data))] = chance.randrange(256)
            if chance.random() < 0.3:
                del data[chance.randrange(len(data)) :]
        try:
            decode_offset_value(bytes(bad_value))
            name = cores.core_name_of(bytes(bad_key))
            if name is not None:
                cores.make(name).replay(bytes(bad_key), bytes(bad_value))
        except ValueError:
            pass


def test_a_group_outlives_its_last_offset_until_it_is_looked_at() -> None:
    """As in Kafka: after deleting the offsets a user can still list and delete the group."""
    interval_ms = OffsetsSettings().check_interval_ms

    def shell() -> GroupShell:
        found = GroupShell()
        found.handle(commit(("t", 0, 5)))
        found.handle(DeleteOffsets(2, (("t", (0,)),)))
        assert found.core.exists and found.core.listing().state == "Empty" and found.core.offsets.is_empty
        return found

    kept = shell()
    kept.advance(min(kept.timers.values()) - kept.now - 1)
    assert kept.core.exists
    kept.advance(interval_ms)
    assert kept.core.is_empty and not kept.timers
    deleted = shell()
    deleted.handle(DeleteGroup(3))
    deleted.handle(DeleteGroup(4))
    assert (deleted.replies[3], deleted.replies[4]) == (0, int(ErrorCode.GROUP_ID_NOT_FOUND)) and deleted.core.is_empty
    used = shell()
    used.replies.clear()
    used.handle(commit(("t", 0, 6)))
    used.advance(3 * interval_ms)
    assert used.core.exists and not used.core.offsets.is_empty, "it has an offset again"
    gone = shell()
    gone.restart()
    assert gone.core.is_empty, "the log has nothing of it"
    unknown = GroupShell()
    unknown.handle(DeleteOffsets(5, (("t", (0,)),)))
    assert unknown.core.is_empty, "there was none"
