"""The quorum core by single events: changes of voters, snapshots, generations."""

from __future__ import annotations

import msgspec
import pytest

from mqd.cluster.raft import events
from mqd.cluster.raft.core import standalone_meta
from mqd.cluster.raft.events import QuorumSettings, Stored, VoteState
from mqd.cluster.raft.messages import (
    FOUNDED,
    GROWING,
    SHRUNK,
    Fetch,
    FetchResponse,
    FetchSnapshot,
    ReplicaKey,
    SnapshotChunk,
    SnapshotMeta,
    Voter,
    VoteRequest,
    Voters,
)
from mqd.protocol.errors import ErrorCode
from tests.unit.cluster.quorum_driver import SECOND, Driver, follower, key, messages, meta, of, three, voter

# -- voters ----------------------------------------------------------------------------------------


def test_a_new_voter_must_have_caught_up_and_is_committed_by_the_new_majority() -> None:
    driver = Driver()
    driver.disk()
    driver(events.Propose("p", (b"a",), 1))
    driver.disk()
    driver.fetch(2, offset=0)
    assert not of(driver(events.AddVoter("add", voter(2))), events.AppendLog)
    effects = driver.fetch(2, offset=2)
    assert (
        of(effects, events.ControlAppended) == [events.ControlAppended(3)]
        and type(effects[0]) is events.ControlAppended
    )
    assert len(driver.core.voters) == 2 and driver.core.lease_deadline_ns(driver.now) == 0
    assert not of(driver.disk(), events.VoterChangeEnded), "the only old voter's flush is no majority any more"
    effects = driver.fetch(2, offset=3)
    assert of(effects, events.VoterChangeEnded) == [events.VoterChangeEnded("add", 0)]


def test_a_voter_set_records_whether_it_grows_or_was_shrunk_across_restarts() -> None:
    driver = Driver()
    driver.disk()

    def add(node: int) -> int:
        driver(events.AddVoter("add", voter(node)))
        return settled(node)

    def settled(*nodes: int) -> int:
        for _ in range(2):
            driver.disk()
            for node in nodes:
                driver.fetch(node)
        assert driver.core.log.voters_offset < driver.core.high_watermark
        return driver.core.log.voters_trend

    def after_restart() -> int:
        """The next controller's state from a snapshot with the voter set, when the log before it is
        deleted.
        """
        found = msgspec.msgpack.decode(
            msgspec.msgpack.encode(driver.core.snapshot_meta(driver.core.applied_offset)), type=SnapshotMeta
        )
        again = Driver(stored=Stored(VoteState(driver.core.epoch), found, 5, (), found.offset))
        assert again.core.voters == driver.core.voters
        return again.core.log.voters_trend

    assert driver.core.log.voters_trend == after_restart() == FOUNDED
    assert add(2) == after_restart() == GROWING
    driver(events.UpdateVoter("moved", Voter(key(2), "elsewhere", 1)))
    assert settled(2) == after_restart() == GROWING
    assert add(3) == after_restart() == GROWING
    driver(events.RemoveVoter("out", key(3)))
    assert settled(2, 3) == after_restart() == SHRUNK
    driver(events.RemoveVoter("out", key(2)))
    assert settled() == after_restart() == SHRUNK
    assert add(2) == after_restart() == SHRUNK, "two, where an operator has gone from three to one, are a wish"
    assert add(3) == after_restart() == GROWING
    assert standalone_meta(driver.core.snapshot_meta(driver.core.applied_offset), (voter(1),)).trend == FOUNDED


def test_a_version_without_history_reads_and_writes_the_other_fields() -> None:
    class Before(msgspec.Struct, array_like=True):
        offset: int
        epoch: int
        voters: Voters
        generation: int

    newer = SnapshotMeta(9, 2, (voter(1),), 1, SHRUNK)
    older = msgspec.msgpack.decode(msgspec.msgpack.encode(newer), type=Before)
    assert (older.offset, older.epoch, older.voters, older.generation) == (9, 2, (voter(1),), 1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(older), type=SnapshotMeta) == SnapshotMeta(
        9, 2, (voter(1),), 1, FOUNDED
    )


def test_a_new_voter_that_does_not_catch_up_is_given_up() -> None:
    driver = Driver()
    driver.disk()
    driver(events.AddVoter("add", voter(2)))
    ended = of(driver.after(31), events.VoterChangeEnded)
    assert ended[0].error == ErrorCode.REQUEST_TIMED_OUT and driver.core.is_alone


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (events.AddVoter("c", voter(1)), ErrorCode.DUPLICATE_VOTER),
        (events.AddVoter("c", Voter(ReplicaKey(1, b"another-director"), "h", 1)), ErrorCode.DUPLICATE_VOTER),
        (events.RemoveVoter("c", key(1)), ErrorCode.INVALID_REQUEST),
        (events.RemoveVoter("c", key(5)), ErrorCode.VOTER_NOT_FOUND),
        (events.UpdateVoter("c", voter(5)), ErrorCode.VOTER_NOT_FOUND),
    ],
)
def test_invalid_changes_are_refused(change, error: int) -> None:
    driver = Driver()
    driver.disk()
    assert of(driver(change), events.VoterChangeEnded)[0].error == error


def test_one_change_at_a_time() -> None:
    driver = three()
    driver.fetch(2)
    driver(events.UpdateVoter("one", Voter(key(3), "elsewhere", 1)))
    assert (
        of(driver(events.UpdateVoter("two", Voter(key(2), "elsewhere", 1))), events.VoterChangeEnded)[0].error
        == ErrorCode.REQUEST_TIMED_OUT
    )
    driver.disk()
    assert of(driver.fetch(2), events.VoterChangeEnded) == [events.VoterChangeEnded("one", 0)]


def test_no_voter_is_removed_when_the_rest_is_unavailable() -> None:
    driver = three()
    driver.fetch(2)
    assert of(driver(events.RemoveVoter("r", key(2))), events.VoterChangeEnded)[0].error == ErrorCode.INVALID_REQUEST


def test_no_voter_is_removed_when_the_rest_does_not_keep_up() -> None:
    """Its disk is full: it keeps fetching, but does not help to commit."""
    driver = three()
    driver.fetch(2)
    driver.fetch(3)
    end = driver.core.log.end_offset
    driver(events.Propose("p", (b"x",), end))
    driver.disk()
    for _ in range(4):
        driver.fetch(2)
        driver.fetch(3, offset=end)
        driver.now += SECOND
    refused = of(driver(events.RemoveVoter("r", key(2))), events.VoterChangeEnded)
    assert [one.error for one in refused] == [ErrorCode.INVALID_REQUEST]
    driver.fetch(3)
    assert not of(driver(events.RemoveVoter("r", key(2))), events.VoterChangeEnded), "now it has everything"


def test_a_leader_that_removes_itself_resigns_when_that_is_committed() -> None:
    driver = three()
    driver.fetch(2)
    driver.fetch(3)
    driver(events.RemoveVoter("out", key(1)))
    driver.disk()
    assert driver.core.is_leader and not driver.core.is_voter
    driver.fetch(2)
    assert driver.core.is_leader, "it does not count itself"
    effects = driver.fetch(3)
    assert of(effects, events.VoterChangeEnded) == [events.VoterChangeEnded("out", 0)] and of(effects, events.Deposed)


def test_voters_are_changed_by_the_leader_only() -> None:
    driver = follower()
    assert (
        of(driver(events.AddVoter("add", voter(9))), events.VoterChangeEnded)[0].error
        == ErrorCode.NOT_LEADER_OR_FOLLOWER
    )


# -- snapshots -------------------------------------------------------------------------------------


def test_a_follower_below_the_log_start_gets_the_snapshot_in_pieces() -> None:
    leader = Driver(settings=QuorumSettings(retained_bytes=0))
    leader.disk()
    leader(events.Propose("p", (b"a",), 1))
    leader.disk()
    leader(events.SnapshotStored(leader.core.snapshot_meta(2), 5))
    joiner = Driver(node=2, stored=Stored())
    joiner(events.PeersKnown((1,)))
    joiner.after(0.1)
    route(joiner, leader, state=b"state", piece=2)
    assert joiner.core.generation == 1 and joiner.core.voters == (voter(1),)
    assert of(joiner.effects, events.LoadState) == [events.LoadState(leader.core.log.snapshot, b"state")]
    leader(events.Propose("q", (b"b",), 2))
    leader.disk()
    route(joiner, leader, state=b"state", piece=2)
    assert of(joiner.effects, events.Committed)[-1].next_offset == 3


def route(one: Driver, other: Driver, state: bytes, piece: int) -> None:
    """Delivers messages between the two (all that were not delivered yet), and completes disk
    operations, until nothing is left.
    """
    drivers = {1: other, 2: one}
    for driver in drivers.values():
        driver.carried = getattr(driver, "carried", 0)  # type: ignore[attr-defined]
    moved = True
    while moved:
        moved = False
        for node, driver in sorted(drivers.items()):
            driver.disk()
            while driver.carried < len(driver.effects):
                effect = driver.effects[driver.carried]
                driver.carried += 1
                moved = True
                if isinstance(effect, events.Send) and effect.to in drivers:
                    drivers[effect.to].receive(node, effect.message)
                elif isinstance(effect, events.ReadSnapshot):
                    driver(events.SnapshotRead(effect, state[effect.position : effect.position + piece]))


def test_a_deleted_snapshot_is_requested_again() -> None:
    driver = Driver(stored=Stored(), node=1)
    driver(events.PeersKnown((2,)))
    driver.receive(2, FetchResponse(1, 4, 2, key(2), 0, 0))
    driver.disk()
    requested = messages(driver.effects, Fetch)[-1]
    newer = meta(2, offset=9, epoch=3)
    driver.receive(2, FetchResponse(1, 4, 2, key(2), requested.sequence, 77, snapshot=newer, snapshot_bytes=10))
    wish = messages(driver.disk(), FetchSnapshot)[0]
    assert (wish.snapshot_offset, wish.snapshot_epoch, wish.position) == (9, 3, 0)
    driver.receive(2, SnapshotChunk(1, 4, key(2), wish.sequence, 78, 0, b"", 0))
    assert not of(driver.effects, events.InstallSnapshot)
    assert messages(driver.after(0.6), Fetch)


def test_a_long_log_requests_a_snapshot_once() -> None:
    driver = Driver(settings=QuorumSettings(log_bytes_max=100, retained_bytes=10))
    driver.disk()
    for number in range(8):
        driver(events.Propose(number, (b"x" * 30,), driver.core.next_offset))
        driver.disk()
    expected = of(driver.effects, events.SnapshotWanted)
    assert len(expected) == 1
    driver(events.SnapshotStored(driver.core.snapshot_meta(expected[0].offset), 5))
    assert driver.core.log.start_offset > 1


# -- generations -----------------------------------------------------------------------------------


def test_members_of_an_older_generation_are_refused_with_the_current_one() -> None:
    forced = Driver(stored=Stored(VoteState(7), standalone_meta(meta(1, 2, 3, offset=5, epoch=7), (voter(1),)), 5))
    forced.disk()
    assert forced.core.is_active and forced.core.generation == 2
    old = follower()
    effects = forced.receive(2, Fetch(1, 9, key(2), 1, 5, 7, 5, 0))
    refusal = messages(effects, FetchResponse)[0]
    assert refusal.generation == 2 and not refusal.batches and forced.core.epoch == 8
    assert of(old.receive(3, refusal), events.Outdated)
    assert not forced.receive(2, VoteRequest(1, 99, key(2), key(1), 99, 99, False, 1))
