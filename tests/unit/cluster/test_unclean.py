"""An unclean election where the leader is alive and cannot serve: its disk failed, and no other
host has all records. Until an operator decides, the partition is neither written nor read.
"""

import msgspec
import pytest

from mqd.base.config import load_broker
from mqd.cluster.broker import messages as broker_messages
from mqd.cluster.host import messages
from mqd.cluster.metadata import changes
from mqd.cluster.metadata.active_controller import ActiveController
from mqd.cluster.metadata.maintenance import UNSERVED_HEARTBEATS, UPKEEP_MS
from mqd.cluster.metadata.options import ControllerOptions
from mqd.cluster.metadata.records import BrokerChanged, PartitionChange, PartitionState, TopicState
from mqd.cluster.metadata.refusal import Refusal
from mqd.cluster.metadata.rules.assignments import PlacementContext
from mqd.cluster.metadata.rules.configs import RESOURCE_BROKER, RESOURCE_TOPIC, ConfigRules
from mqd.cluster.metadata.rules.elections import ELECT_PREFERRED, ELECT_UNCLEAN, restore_leaders
from mqd.cluster.metadata.rules.partitions import Target
from mqd.cluster.metadata.state import MetadataState
from mqd.cluster.metadata.view import View
from mqd.protocol.errors import ErrorCode as E
from tests.unit.cluster.test_rules import TOPIC, cluster, registration, topic

OPTIONS = ControllerOptions()


class Controller:
    """The active controller; `state`: a partition with replicas on 1, 2 and 3."""

    def __init__(self, of_file: bool = False, config: dict[str, str] | None = None, **fields) -> None:
        """`of_file`: unclean.leader.election.enable in the active controller's file."""
        config = {"min.insync.replicas": "1", "flush.on.ack": "true", **(config or {})}
        self.state: MetadataState = topic(cluster(3), (1, 2, 3), config=config, **fields)
        options = msgspec.structs.replace(OPTIONS, unclean_elections=of_file)
        self.active = ActiveController(1, self.state, options, 0, True)
        self.now_ms = 0

    @property
    def partition(self) -> PartitionState:
        return self.state.topics["t"].partitions[0]

    def apply(self, records) -> None:
        for record in records:
            self.state.apply(record)
        self.state.check()

    def after(self, milliseconds: int, lease_valid: bool = False) -> None:
        self.now_ms += milliseconds
        self.receive_heartbeat(*(node for node, broker in self.state.brokers.items() if not broker.fenced))
        self.apply(self.active.tick(self.state, self.now_ms, lease_valid))

    def unserved(self) -> dict[tuple[bytes, int], set[int]]:
        return self.active.reported_unserved(UNSERVED_HEARTBEATS * OPTIONS.heartbeat_ms)

    def receive_heartbeat(self, *nodes: int) -> None:
        for node in nodes:
            self.active.sessions.on_heartbeat(node, self.now_ms)

    def reports(self, node: int, **directories: bool) -> None:
        self.active.set_reported_directories(
            node,
            [
                broker_messages.DirectoryReport(name, f"/{name}", 1 << 40 if usable else 0, usable)
                for name, usable in directories.items()
            ],
        )

    def fenced(self, node: int) -> None:
        self.apply(self.active.fence(self.state, [node], self.now_ms))

    def fails(self, node: int) -> None:
        self.apply(
            self.active.on_replicas_failed(
                self.state, broker_messages.ReplicasFailed(node, node * 10, [(TOPIC, 0)]), self.now_ms
            )
        )

    def elect(self, partitions: list[tuple[str, int]] | None = [("t", 0)], kind: int = ELECT_UNCLEAN) -> list[int]:
        """The error code of each partition."""
        request = messages.Request(1, messages.ElectLeaders(kind, partitions))
        place = PlacementContext(1, self.active.view(self.state), self.active.directories(self.state), 1_000_000)
        decision = changes.decide(self.state, self.active, request, place, ConfigRules({}), lambda: b"n" * 16)
        self.apply(decision.records)
        return [result.error for result in decision.response.results]


def test_an_operator_can_replace_a_failed_leader_by_any_live_replica() -> None:
    one = Controller(in_sync_replicas=(1,))
    assert one.elect() == [E.ELECTION_NOT_NEEDED], "it serves"
    one.fails(1)
    assert (one.partition.leader, one.partition.in_sync_replicas) == (-1, (1,)), "by itself nothing is given up"
    assert one.elect(kind=ELECT_PREFERRED) == [E.PREFERRED_LEADER_NOT_AVAILABLE]
    assert one.elect() == [0]
    assert (
        one.partition.leader,
        one.partition.in_sync_replicas,
        one.partition.recovering,
        one.partition.leader_epoch,
    ) == (2, (2,), True, 7)
    assert one.elect() == [E.ELECTION_NOT_NEEDED]


def test_an_election_of_all_partitions_finds_it() -> None:
    one = Controller(in_sync_replicas=(1,))
    assert one.elect(None) == []
    one.fails(1)
    assert one.elect(None) == [0] and one.partition.leader == 2


def test_replicas_that_cannot_serve_or_are_fenced_are_not_elected() -> None:
    one = Controller(in_sync_replicas=(1, 2))
    one.fails(2)
    one.fails(1)
    assert one.partition.in_sync_replicas == (1,) and one.partition.leader == -1
    assert one.elect() == [0] and one.partition.leader == 3
    one = Controller(in_sync_replicas=(1,))
    one.apply([BrokerChanged(3, 30, fenced=True)])
    one.fails(1)
    one.fails(2)
    before = one.partition
    assert one.elect() == [E.ELIGIBLE_LEADERS_NOT_AVAILABLE] and one.partition == before


@pytest.mark.parametrize("heals", ["silence", "registration"])
def test_an_outdated_report_of_a_failed_replica_loses_no_records(heals: str) -> None:
    one = Controller(in_sync_replicas=(1,))
    one.fails(1)
    if heals == "silence":
        one.after(UNSERVED_HEARTBEATS * OPTIONS.heartbeat_ms)
        assert one.unserved() == {(TOPIC, 0): {1}}
        one.after(1)
    else:
        message = msgspec.structs.replace(registration(1, incarnation=2), directory_id="m1")
        records, response = one.active.register(one.state, message, one.now_ms)
        assert response.error == 0 and records
    assert one.unserved() == {}
    if heals == "registration":
        one.apply([BrokerChanged(1, one.state.brokers[1].epoch, fenced=False)])
    assert one.elect() == [0] and (one.partition.leader, one.partition.recovering) == (1, False)


# -- replicas that cannot be served are never chosen------------------------------------------------


def test_a_replica_in_a_missing_directory_is_not_elected_even_if_it_reported_nothing() -> None:
    """Its replica is not in sync, so it is not reported; but its directories are known."""
    one = Controller(in_sync_replicas=(1,))
    one.reports(2, d2=False)
    one.fenced(1)
    assert one.partition.leader == -1
    assert one.elect() == [0] and one.partition.leader == 3
    one = Controller(in_sync_replicas=(1,))
    one.reports(2, other=True)  # d2 is no longer in log.dirs
    one.reports(3, d3=False)
    one.fenced(1)
    before = one.partition
    assert one.elect() == [E.ELIGIBLE_LEADERS_NOT_AVAILABLE] and one.partition == before
    one.reports(2, d2=True)
    assert one.elect() == [0] and one.partition.leader == 2, "requested again"


def test_an_election_may_be_repeated_when_the_new_leader_cannot_serve() -> None:
    one = Controller(in_sync_replicas=(1,))
    one.fenced(1)
    assert one.elect() == [0] and one.partition.leader == 2
    one.fails(2)
    assert one.partition.leader == -1
    assert one.elect() == [0] and one.partition.leader == 3


def test_a_clean_election_does_not_choose_a_missing_directory_either() -> None:
    one = Controller()
    one.reports(2, d2=False)
    one.fenced(1)
    assert one.partition.leader == 3
    one = Controller(in_sync_replicas=(1, 2))
    one.fails(2)
    one.apply(one.active.fence(one.state, [1], one.now_ms))
    one.fails(2)
    one.apply([BrokerChanged(1, 10, fenced=False)])
    assert one.partition.leader == -1


def test_a_dead_worker_stays_leader_where_no_other_can_serve() -> None:
    """Its successor opens its files in a moment. The other in-sync replica is in an unusable
    directory, and clients would wait for it forever.
    """
    one = Controller(in_sync_replicas=(1, 2))
    one.reports(2, d2=False)
    died = broker_messages.WorkersDied(1, 10, [(TOPIC, 0, one.partition.leader_epoch)], [])
    one.apply(one.active.on_workers_died(one.state, died))
    assert (one.partition.leader, one.partition.in_sync_replicas, one.partition.leader_epoch) == (1, (1, 2), 6), (
        "in a new epoch"
    )
    one.reports(2, d2=True)
    died = broker_messages.WorkersDied(1, 10, [(TOPIC, 0, one.partition.leader_epoch)], [])
    one.apply(one.active.on_workers_died(one.state, died))
    assert (one.partition.leader, one.partition.in_sync_replicas) == (2, (2,))


# -- a partition that no host can serve has no leader -----------------------------------------------


@pytest.mark.parametrize("flushed", ["true", "false"])
def test_the_only_in_sync_replica_loses_leadership_with_its_disk_and_regains_it(flushed: str) -> None:
    """Clients and operators see that it has none. No record is given up by that."""
    one = Controller(in_sync_replicas=(1,))
    one.state.topics["t"].config["flush.on.ack"] = flushed
    one.fails(1)
    assert (one.partition.leader, one.partition.in_sync_replicas, one.partition.leader_epoch) == (-1, (1,), 6)
    before = one.partition
    for _ in range(10):
        one.after(OPTIONS.heartbeat_ms // 2, lease_valid=True)
        one.fails(1)
        assert one.partition == before, "as long as it reports this"
    one.after(UNSERVED_HEARTBEATS * OPTIONS.heartbeat_ms + 1_001, lease_valid=True)
    assert (
        one.partition.leader,
        one.partition.in_sync_replicas,
        one.partition.leader_epoch,
        one.partition.recovering,
    ) == (1, (1,), 7, False)


def test_partitions_whose_hosts_are_all_lost_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """This runs every second: tens of thousands of them would take much of it."""
    state = topic(cluster(3), (1, 2), count=3, in_sync_replicas=(1,))
    active = ActiveController(1, state, OPTIONS, 0, True)
    for record in active.fence(state, [1], 0):
        state.apply(record)
    assert [(partition.leader, partition.eligible_leader_replicas) for partition in state.topics["t"].partitions] == [
        (-1, (1,))
    ] * 3
    settled: list[int] = []
    original = View.change_to

    def noted(self: View, entry: TopicState, target: Target, *arguments: int) -> PartitionChange | None:
        settled.append(target.old.index)
        return original(self, entry, target, *arguments)

    monkeypatch.setattr(View, "change_to", noted)
    assert restore_leaders(active.view(state)) == [] and settled == []
    state.apply(BrokerChanged(1, 10, fenced=False))
    assert [change.leader for _, change in restore_leaders(active.view(state))] == [1] * 3 and settled == [0, 1, 2]


def test_a_single_host_stays_leader() -> None:
    """No other host has its records; and it serves again as soon as it can."""
    state = topic(cluster(1), (1,))
    active = ActiveController(1, state, OPTIONS, 0, False)
    assert active.on_replicas_failed(state, broker_messages.ReplicasFailed(1, 10, [(TOPIC, 0)]), 0) == []


def test_two_failed_in_sync_replicas_both_stay_eligible() -> None:
    one = Controller(in_sync_replicas=(1, 2))
    one.reports(2, d2=False)
    one.fails(1)
    assert (one.partition.leader, one.partition.in_sync_replicas) == (-1, (1, 2))
    one.reports(2, d2=True)
    one.after(OPTIONS.heartbeat_ms, lease_valid=True)
    one.fails(1)
    one.after(1_001, lease_valid=True)
    assert one.partition.leader == 2
    one.fails(1)
    assert one.partition.in_sync_replicas == (2,)


def test_a_new_controller_waits_for_reports_of_failed_replicas() -> None:
    one = Controller(in_sync_replicas=(1,))
    one.fails(1)
    one.active = ActiveController(2, one.state, OPTIONS, one.now_ms, True)
    one.receive_heartbeat(1, 2, 3)
    one.after(1, lease_valid=True)
    one.fails(1)
    one.after(OPTIONS.heartbeat_ms, lease_valid=True)
    assert one.partition.leader == -1
    one.after(OPTIONS.heartbeat_ms, lease_valid=True)
    one.fails(1)
    one.after(OPTIONS.heartbeat_ms, lease_valid=True)
    one.after(UPKEEP_MS, lease_valid=True)
    assert one.partition.leader == -1


def test_the_default_replication_factor_counts_only_hosts_with_usable_directories() -> None:
    """One of three hosts with a lost disk would cause the refusal of every new topic, and keep the
    internal ones from growing to the other two.
    """
    one = Controller()
    for node in (1, 2):
        one.reports(node, **{f"d{node}": True})
    one.reports(3, d3=False)
    place = PlacementContext(1, one.active.view(one.state), one.active.directories(one.state), 1_000_000)
    decision = changes.decide(
        one.state,
        one.active,
        messages.Request(1, messages.CreateTopic("new", 1, -1, {}, {})),
        place,
        ConfigRules(load_broker(None, {}, {})),
        lambda: b"n" * 16,
    )
    assert decision.response.error == 0, decision.response.message
    one.apply(decision.records)
    assert set(one.state.topics["new"].partitions[0].replicas) == {1, 2}


# -- unclean.leader.election.enable ----------------------------------------------------------------

ENABLE = "unclean.leader.election.enable"
GRACE_MS = UNSERVED_HEARTBEATS * OPTIONS.heartbeat_ms  # for a new active controller


def altered(one: Controller, resource: int, name: str, config: dict[str, str]) -> int:
    """The error code."""
    operations = [messages.ConfigOperation(key, "set", value) for key, value in config.items()]
    request = messages.Request(1, messages.AlterConfig(resource, name, operations, False))
    place = PlacementContext(1, one.active.view(one.state), one.active.directories(one.state), 1_000_000)
    rules = ConfigRules(load_broker(None, {}, {}))
    try:
        decision = changes.decide(one.state, one.active, request, place, rules, lambda: b"n" * 16)
    except Refusal as refusal:
        return refusal.error
    one.apply(decision.records)
    return 0


@pytest.mark.parametrize(
    ("of_file", "of_all", "of_topic", "elects"),
    [
        (False, None, None, False),
        (True, None, None, True),
        (True, "false", None, False),
        (False, "true", None, True),
        (False, "true", "false", False),
        (True, "false", "true", True),
    ],
)
def test_precedence_of_configurations(of_file: bool, of_all: str | None, of_topic: str | None, elects: bool) -> None:
    one = Controller(of_file, {ENABLE: of_topic} if of_topic else None, in_sync_replicas=(1,))
    if of_all:
        assert altered(one, RESOURCE_BROKER, "", {ENABLE: of_all}) == 0
    one.fenced(1)
    assert one.partition.leader == -1, "at first none: a replica that has everything may be back at once"
    one.after(GRACE_MS, True)
    assert one.partition.leader == (2 if elects else -1)
    assert one.partition.recovering is elects and one.partition.in_sync_replicas == ((2,) if elects else ())


def test_a_change_of_the_topic_elects_within_a_second() -> None:
    one = Controller(in_sync_replicas=(1,))
    one.fenced(1)
    one.after(GRACE_MS, True)
    assert one.partition.leader == -1
    assert altered(one, RESOURCE_TOPIC, "t", {ENABLE: "true"}) == 0
    one.after(UPKEEP_MS, True)
    assert (one.partition.leader, one.partition.recovering) == (2, True)


def test_a_replica_that_has_everything_is_preferred() -> None:
    one = Controller(True, in_sync_replicas=(1, 3))
    one.fenced(1)
    assert one.partition.leader == 3, "in sync: nothing is lost"
    one.after(GRACE_MS, True)
    assert one.partition.leader == 3 and not one.partition.recovering
    one.fenced(3)
    one.apply([BrokerChanged(3, 30, fenced=False)])
    one.after(UPKEEP_MS, True)
    assert (one.partition.leader, one.partition.recovering) == (3, False), "back in time"


def test_a_leader_whose_disk_failed_is_replaced() -> None:
    one = Controller(True, in_sync_replicas=(1,))
    one.fails(1)
    assert one.partition.leader == -1
    one.after(GRACE_MS, True)
    assert (one.partition.leader, one.partition.recovering) == (2, True)


def test_without_a_live_replica_there_is_no_leader() -> None:
    one = Controller(True, in_sync_replicas=(1,))
    for node in (3, 2, 1):
        one.fenced(node)
    one.after(GRACE_MS, True)
    assert one.partition.leader == -1


def test_it_cannot_be_set_for_one_broker() -> None:
    assert altered(Controller(), RESOURCE_BROKER, "1", {ENABLE: "true"}) == E.INVALID_CONFIG
