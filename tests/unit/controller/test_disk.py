"""The controller's queue to the disk, the choice of voters, and records of sessions."""

import asyncio
import errno
from pathlib import Path
from types import SimpleNamespace

import pytest

from mqd.cluster.metadata.records import BrokerState
from mqd.cluster.metadata.state import MetadataState
from mqd.cluster.raft import events, promotion
from mqd.cluster.raft.events import VoteState
from mqd.cluster.raft.identity import directory_text
from mqd.cluster.raft.log_memory import MemoryLog
from mqd.cluster.raft.messages import (
    DATA,
    FOUNDED,
    GROWING,
    SHRUNK,
    ReplicaKey,
    SnapshotMeta,
    Voter,
    make_batch,
    voters_batch,
)
from mqd.cluster.raft.store import FlushFailed
from mqd.controller import session
from mqd.controller.disk import Disk, StoreSnapshot
from mqd.controller.quorum import Quorum
from mqd.controller.voters import VoterChanges

KEY = ReplicaKey(1, b"d" * 16)


class Store:
    """Records its requests; refuses those that a test selects."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.failures: list[Exception | None] = []

    def _done(self, *call: object) -> None:
        self.calls.append(call)
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            raise failure

    def append(self, batches, now_ms: int, committed: int) -> None:
        self._done("append", [batch.base_offset for batch in batches], committed)

    def write_vote(self, vote: VoteState) -> None:
        self._done("vote", vote.epoch)

    def truncate(self, offset: int) -> None:
        self._done("truncate", offset)

    def install(self, meta: SnapshotMeta, data: bytes) -> None:
        self._done("install", meta.offset)

    def store_snapshot(self, meta: SnapshotMeta, data: bytes) -> None:
        self._done("snapshot", meta.offset)

    def read_snapshot(self, *where: int) -> bytes:
        self._done("read", *where)
        return b"bytes"

    def close(self) -> None:
        pass


def append(sequence: int, offset: int) -> events.AppendLog:
    return events.AppendLog(sequence, (make_batch(offset, 1, DATA, (b"x",)),))


def run(work: list, failures: list[Exception | None] = ()) -> tuple[list[tuple], list, list[str]]:
    """(requests to the store, events for the quorum, the reason why the process had to end)"""
    store, received, ended = Store(), [], []

    async def act() -> None:
        store.failures = list(failures)
        disk = Disk(store, received.append, ended.append, lambda: 7)  # type: ignore[arg-type]
        for one in work:
            disk.submit(one)
        await disk.stop()

    asyncio.run(act())
    return store.calls, received, ended


def test_writes_that_wait_behind_an_append_are_flushed_with_it():
    calls, received, ended = run(
        [
            append(1, 0),
            append(2, 1),
            append(3, 2),
            events.PersistVote(4, VoteState(5)),
            append(5, 3),
            events.TruncateLog(6, 2),
            append(7, 2),
            append(8, 3),
        ]
    )
    assert calls == [("append", [0, 1, 2], 7), ("vote", 5), ("append", [3], 7), ("truncate", 2), ("append", [2, 3], 7)]
    assert received == [events.DiskDone(number) for number in (3, 4, 5, 6, 8)] and not ended


def test_a_refused_write_fails_the_writes_that_wait_behind_it():
    full = OSError(errno.ENOSPC, "no space left on device")
    meta = SnapshotMeta(0, 0, (), 1)
    snapshot = StoreSnapshot(meta, MetadataState())
    calls, received, ended = run(
        [append(1, 0), events.PersistVote(2, VoteState(5)), append(3, 1), snapshot, append(4, 2)], [None, full]
    )
    assert calls == [("append", [0], 7), ("vote", 5), ("snapshot", 0)]
    assert (
        received[0] == events.DiskDone(1) and isinstance(received[1], events.DiskRefused) and received[1].sequence == 2
    )
    assert isinstance(received[2], events.SnapshotStored) and not ended


def test_a_failed_flush_ends_the_process_and_nothing_follows():
    calls, received, ended = run(
        [append(1, 0), events.TruncateLog(2, 0), append(3, 0)], [FlushFailed("input/output error")]
    )
    assert calls == [("append", [0], 7)] and received == [] and "unknown" in ended[0]


def test_an_unreadable_snapshot_is_refused_and_other_read_errors_are_fatal():
    install = events.InstallSnapshot(1, SnapshotMeta(9, 1, (), 1), b"")
    _, received, ended = run([install], [ValueError("no state")])
    assert isinstance(received[0], events.DiskRefused) and not ended
    _, received, ended = run([append(1, 0)], [ValueError("append at offset 0, the log ends at 5")])
    assert received == [] and ended


def broker(node_id: int, **changes) -> BrokerState:
    fields = {
        "controller_host": f"host-{node_id}",
        "controller_port": 9094,
        "directory_id": directory_text(bytes([node_id]) * 16),
        **changes,
    }
    return BrokerState(node_id, "h", 9092, None, 1, 1, {}, **fields)


def voter(node_id: int) -> Voter:
    return Voter(ReplicaKey(node_id, bytes([node_id]) * 16), f"host-{node_id}", 9094)


def test_one_voter_grows_to_three_and_other_numbers_stay():
    brokers = [broker(1), broker(2), broker(3), broker(4)]
    assert [one.node_id for one in promotion.candidates((voter(1),), brokers, FOUNDED)] == [2, 3, 4]
    assert [one.node_id for one in promotion.candidates((voter(1), voter(2)), brokers, GROWING)] == [3, 4]
    assert promotion.candidates((voter(1), voter(2)), brokers, FOUNDED) == [], "two voters were somebody's wish"
    assert (
        promotion.candidates((voter(1), voter(2)), brokers, SHRUNK)
        == promotion.candidates((voter(1),), brokers, SHRUNK)
        == []
    ), "so are those who are left when one was removed"
    assert promotion.candidates((voter(1), voter(2), voter(3)), brokers, GROWING) == []
    assert promotion.candidates((voter(1),), brokers[:2], FOUNDED) == [], (
        "two hosts keep one voter: the loss of either of two would stop both"
    )


class GrowingCluster:
    """Four hosts; the first has founded the cluster; a quorum that accepts all requests. Each host
    has its own controller.
    """

    def __init__(self) -> None:
        self.log = MemoryLog(SnapshotMeta(0, 0, (voter(1),), 1), 1)
        self.brokers = {node: broker(node, fenced=False) for node in (1, 2, 3, 4)}

    def controller(self) -> VoterChanges:
        """As in a process that has just become active."""
        describe = lambda now_ns: SimpleNamespace(
            observers=[
                SimpleNamespace(key=promotion.key_of(one), last_caught_up_age_ns=0) for one in self.brokers.values()
            ]
        )  # noqa: E731
        quorum = SimpleNamespace(
            voters=self.log.voters,
            voters_trend=self.log.voters_trend,
            core=SimpleNamespace(describe=describe),
            change_voters=self.change,
        )
        metadata = SimpleNamespace(active=True, committed=SimpleNamespace(brokers=self.brokers))
        return VoterChanges(quorum, metadata)  # type: ignore[arg-type]

    def change(self, make, ended) -> None:
        wish = make("token")
        self.vote(*(one.node_id for one in self.log.voters), wish.voter.node_id)
        ended(0, "")

    def vote(self, *nodes: int) -> None:
        self.log.append(voters_batch(self.log.end_offset, 1, tuple(voter(node) for node in sorted(nodes))))

    def after_ticks(self) -> list[int]:
        """Each change by another controller."""
        for _ in range(5):
            self.controller().tick()
        return [one.node_id for one in self.log.voters]


def test_growth_continues_under_the_next_controller_and_removed_voters_stay_removed():
    cluster = GrowingCluster()
    assert cluster.after_ticks() == [1, 2, 3]
    cluster.vote(1, 3)
    assert cluster.after_ticks() == [1, 3], "an operator's wish"
    cluster.vote(1)
    assert cluster.after_ticks() == [1]
    cluster.vote(1, 2)
    assert cluster.after_ticks() == [1, 2]


@pytest.mark.parametrize(
    "unfit",
    [
        {"fenced": True},
        {"draining": True},
        {"in_controlled_shutdown": True},
        {"controller_host": ""},
        {"directory_id": ""},
    ],
)
def test_unreachable_or_leaving_hosts_are_not_candidates(unfit):
    assert promotion.candidates((voter(1),), [broker(1), broker(2), broker(3, **unfit)], FOUNDED) == []


def test_a_voter_that_has_moved_is_reported_to_the_quorum():
    moved = broker(2, controller_host="elsewhere")
    assert promotion.moved_voter((voter(1), voter(2)), [broker(1), moved]) == Voter(voter(2).key, "elsewhere", 9094)
    assert promotion.moved_voter((voter(1), voter(2)), [broker(1), broker(2), broker(3)]) is None
    wiped = broker(2, controller_host="elsewhere", directory_id=directory_text(b"n" * 16))
    assert promotion.moved_voter((voter(1), voter(2)), [broker(1), wiped]) is None, (
        "the same node id over another directory is not a voter"
    )


def test_a_session_ended_well_if_recorded_or_if_the_machine_did_not_restart(tmp_path: Path):
    path = tmp_path / "session"
    assert session.clean_epoch(path, "d", "boot-1", [1]) == -1
    session.write(path, session.Session(40, "d", "boot-1", [1, 2], False))
    assert session.clean_epoch(path, "d", "boot-1", [1, 2]) == 40, "killed, but the page cache is still there"
    assert session.clean_epoch(path, "d", "boot-2", [1, 2]) == -1, "the machine was restarted"
    assert session.clean_epoch(path, "d", "boot-1", [1, 3]) == -1, "another disk lies there now"
    assert session.clean_epoch(path, "d", "", [1, 2]) == -1
    assert session.clean_epoch(path, "other", "boot-1", [1, 2]) == -1
    session.write(path, session.Session(41, "d", "boot-1", [1, 2], True))
    assert session.clean_epoch(path, "d", "boot-9", [5]) == 41
    path.write_bytes(b"{")
    assert session.clean_epoch(path, "d", "boot-1", [1, 2]) == -1


def test_a_failed_quorum_does_not_rearm_its_timer() -> None:
    """Its deadline has passed and nothing handles it any more, while the process ends."""

    class Core:
        high_watermark = 0
        next_deadline_ns = 1

        def handle(self, event: object, now_ns: int) -> list[object]:
            raise ValueError("our own fault")

    async def scenario() -> None:
        failed: list[str] = []
        nothing = lambda *_arguments: None
        quorum = Quorum(
            Core(), SimpleNamespace(active=False), Store(), nothing, nothing, nothing, nothing, failed.append
        )  # type: ignore[arg-type]
        for _ in range(2):
            quorum._on_timer()
            assert failed == ["ValueError: our own fault"] and quorum._timer is None

    asyncio.run(scenario())
