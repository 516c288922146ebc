"""A replica whose log was truncated before valid records: what it may do until it has caught up."""

import asyncio
import errno
from pathlib import Path
from types import SimpleNamespace

import pytest

from mqd import native
from mqd.log.directories import partition_path
from mqd.worker import shortened_log as shortened
from mqd.worker.assignments import Assignment, Member
from mqd.worker.catalog import Catalog
from mqd.worker.open_partitions import OpenPartition
from mqd.worker.partitions import PartitionSet
from mqd.worker.shortened_log import ShortenedState
from tests.unit.cluster.test_unclean import OPTIONS, Controller
from tests.unit.worker.test_strays import PlainFiles

OWN, OTHER = 1, 2


def assignment(leader: int, in_sync: tuple[int, ...], recovering: bool = False) -> Assignment:
    members = tuple(Member(node, node in in_sync, True, 10 + node) for node in (OWN, OTHER))
    return Assignment(OWN, 10 + OWN, leader, 3, 4, 1, 10_000, -1, True, members, 0, recovering)


def test_it_does_not_lead_but_follows() -> None:
    state = ShortenedState()
    given, is_whole = state.on_assignment(assignment(OWN, (OWN,)))
    assert given == assignment(-1, (OWN,)) and not is_whole
    given, is_whole = state.on_assignment(assignment(OTHER, (OTHER,)))
    assert given == assignment(OTHER, (OTHER,)) and not is_whole
    assert state.on_assignment(assignment(OTHER, (OTHER, OWN))) == (assignment(OTHER, (OTHER, OWN)), True)


def test_staying_in_sync_throughout_proves_nothing() -> None:
    """It may have been added when its log was longer."""
    state = ShortenedState()
    for _ in range(2):
        assert not state.on_assignment(assignment(OTHER, (OTHER, OWN)))[1]
    assert state.on_assignment(assignment(OWN, (OWN, OTHER)))[0].leader == -1
    state.on_assignment(assignment(-1, (OTHER,)))
    assert not state.on_assignment(assignment(-1, (OTHER, OWN)))[1], "no leader: the log was not checked"
    state.on_assignment(assignment(OTHER, (OTHER,)))
    assert state.on_assignment(assignment(OTHER, (OTHER, OWN)))[1]


def test_an_operators_choice_is_respected() -> None:
    assert ShortenedState().on_assignment(assignment(OWN, (OWN,), recovering=True)) == (
        assignment(OWN, (OWN,), recovering=True),
        True,
    )


class Set:
    """A PartitionSet whose reactor records its commands."""

    def __init__(self, path: Path) -> None:
        self.given: list[Assignment] = []

        async def urgent(_log_dir, work, *arguments):
            return work(*arguments)

        async def run(_command, _slot: int, what: Assignment, _worker: int) -> None:
            self.given.append(what)

        directory = SimpleNamespace(index=0, path=path, failure="")
        self.partitions = PartitionSet(
            0,
            [directory],
            None,
            SimpleNamespace(replica_set=None),
            SimpleNamespace(run=run),
            SimpleNamespace(urgent=urgent),
            Catalog(0),
            {},
            PlainFiles(),  # type: ignore[arg-type, list-item]
        )
        self.owned = SimpleNamespace(
            key=(b"t" * 16, 0), slot=5, log_dir=0, name="t-0", topic_id=b"t" * 16, index=0, leader_epoch=3
        )
        self.path = partition_path(path, "t", 0)
        self.path.mkdir()

    def open(self) -> None:
        opened = OpenPartition(self.owned, self.path, 0, None, None)  # type: ignore[arg-type]
        opened.shortened_state = ShortenedState() if shortened.is_marked(self.path) else None
        self.partitions.open[self.owned.key] = opened

    def assign(self, what: Assignment) -> Assignment:
        asyncio.run(self.partitions._assign(self.owned, what))  # type: ignore[arg-type]
        return self.given[-1]

    def check(self, log_end: int, known: int, published: int) -> None:
        view = SimpleNamespace(topic_id=self.owned.topic_id, partition_index=0, log_end_offset=published)
        closed: list[bool] = []
        partition = SimpleNamespace(close=closed.append)
        try:
            self.partitions._check_length(
                self.owned, self.path, partition, native.Recovery(log_end_offset=log_end), view, known
            )  # type: ignore[arg-type]
        except OSError:
            assert closed == [False]
            raise
        assert not closed


def test_a_shortened_partition_is_reported_as_failed_until_it_has_caught_up(tmp_path: Path) -> None:
    made = Set(tmp_path)
    shortened.mark(made.path, PlainFiles())
    made.open()
    assert (
        made.assign(assignment(OWN, (OWN,))).leader == -1
        and "deleted" not in made.partitions.failures[5]
        and shortened.MARKER in made.partitions.failures[5]
    )
    assert made.assign(assignment(OTHER, (OTHER,))).leader == OTHER and not made.partitions.failures
    assert made.assign(assignment(OTHER, (OTHER, OWN))).leader == OTHER and not shortened.is_marked(made.path)
    assert made.assign(assignment(OWN, (OTHER, OWN))).leader == OWN and not made.partitions.failures


class Both:
    """The controller, and the host of the only in-sync replica, which is shortened: it gets the
    partition's changes, and reports twice in each heartbeat interval what it does not serve.
    """

    def __init__(self, path: Path) -> None:
        self.controller = Controller(in_sync_replicas=(OWN,))
        self.set = Set(path)
        shortened.mark(self.set.path, PlainFiles())
        self.set.open()
        self.report()

    def report(self) -> Assignment:
        partition = self.controller.partition
        members = tuple(
            Member(node, node in partition.in_sync_replicas, True, node * 10) for node in partition.replicas
        )
        return self.set.assign(
            Assignment(
                OWN,
                OWN * 10,
                partition.leader,
                partition.leader_epoch,
                partition.partition_epoch,
                1,
                0,
                -1,
                True,
                members,
                0,
                partition.recovering,
            )
        )

    def half_a_heartbeat(self) -> None:
        if self.set.partitions.failures:
            self.controller.fails(OWN)
            self.report()
        self.controller.after(OPTIONS.heartbeat_ms // 2, lease_valid=True)
        self.report()


def test_the_only_in_sync_replica_is_not_elected_and_deposed_repeatedly(tmp_path: Path) -> None:
    both = Both(tmp_path)
    both.half_a_heartbeat()
    assert (both.controller.partition.leader, both.controller.partition.leader_epoch) == (-1, 6)
    before = both.controller.partition
    for _ in range(60):
        both.half_a_heartbeat()
        assert both.controller.partition == before and shortened.MARKER in both.set.partitions.failures[5]


@pytest.mark.parametrize("halves", [1, 7, 8, 20])
def test_an_unclean_election_elects_another_replica_at_any_time(tmp_path: Path, halves: int) -> None:
    """This is the operator's option without stopping the broker."""
    both = Both(tmp_path)
    for _ in range(halves):
        both.half_a_heartbeat()
    assert both.controller.elect() == [0] and both.controller.partition.leader == OTHER
    assert both.report().leader == OTHER and not both.set.partitions.failures


def test_an_operator_may_elect_it_as_the_last_replica(tmp_path: Path) -> None:
    made = Set(tmp_path)
    shortened.mark(made.path, PlainFiles())
    made.open()
    made.assign(assignment(-1, (OTHER,)))
    assert not made.partitions.failures, "a replica that cannot serve is not elected"
    assert made.assign(assignment(OWN, (OWN,), recovering=True)).leader == OWN and not shortened.is_marked(made.path)


def test_a_log_below_the_known_committed_offset_is_marked(tmp_path: Path) -> None:
    made = Set(tmp_path)
    made.check(log_end=10, known=10, published=0)
    assert not shortened.is_marked(made.path)
    made.check(log_end=9, known=10, published=0)
    assert shortened.is_marked(made.path)


def test_a_log_below_a_predecessors_published_offset_stays_offline(tmp_path: Path) -> None:
    made = Set(tmp_path)
    with pytest.raises(OSError, match="restart the broker") as error:
        made.check(log_end=9, known=0, published=10)
    assert error.value.errno == errno.EIO and shortened.is_marked(made.path)


@pytest.mark.parametrize("error", [errno.EROFS, errno.ENOENT])
def test_a_replica_that_has_caught_up_leads_although_its_mark_cannot_be_removed(
    tmp_path: Path, error: int, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(PlainFiles):
        def unlink(self, path: Path) -> None:
            raise OSError(error, "refused")

    made = Set(tmp_path)
    shortened.mark(made.path, PlainFiles())
    made.open()
    made.partitions._files = Refusing()
    made.assign(assignment(OTHER, (OTHER,)))
    made.assign(assignment(OTHER, (OTHER, OWN)))
    assert made.assign(assignment(OWN, (OTHER, OWN))).leader == OWN and not made.partitions.failures
    assert ("cannot be removed" in caplog.text) == (error != errno.ENOENT), "otherwise it is already removed"
