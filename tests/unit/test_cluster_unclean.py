"""An unclean election where the leader lives and cannot serve: its disk failed, and nobody else has all records. Until somebody decides, the partition is neither written nor read."""

import msgspec
import pytest
from test_cluster_limits import place
from test_cluster_rules import TOPIC, cluster, registration, topic

from mqd.cluster import broker_messages, changes
from mqd.cluster import controller_messages as messages
from mqd.cluster.active_controller import UNABLE_HEARTBEATS, ActiveController
from mqd.cluster.config_rules import ConfigRules
from mqd.cluster.controller_options import ControllerOptions
from mqd.cluster.election_rules import ELECT_PREFERRED, ELECT_UNCLEAN
from mqd.cluster.metadata_records import BrokerChanged, PartitionState
from mqd.cluster.metadata_state import MetadataState
from mqd.protocol.errors import ErrorCode as E

OPTIONS = ControllerOptions()


class Controller:
    """The active one; `state`: a partition with replicas on 1, 2 and 3."""

    def __init__(self, **fields) -> None:
        self.state: MetadataState = topic(cluster(3), (1, 2, 3), config={"min.insync.replicas": "1", "flush.on.ack": "true"}, **fields)
        self.active = ActiveController(1, self.state, OPTIONS, 0, True)
        self.now_ms = 0

    @property
    def partition(self) -> PartitionState:
        return self.state.topics["t"].partitions[0]

    def apply(self, records) -> None:
        for record in records:
            self.state.apply(record)
        self.state.check()

    def after(self, milliseconds: int) -> None:
        self.now_ms += milliseconds
        self.active.tick(self.state, self.now_ms, False)

    def fails(self, node: int) -> None:
        self.apply(self.active.replicas_failed(self.state, broker_messages.ReplicasFailed(node, node * 10, [(TOPIC, 0)]), self.now_ms))

    def elect(self, partitions: list[tuple[str, int]] | None = [("t", 0)], kind: int = ELECT_UNCLEAN) -> list[int]:
        """The error of each."""
        request = messages.Request(1, messages.ElectLeaders(kind, partitions))
        decision = changes.decide(self.state, self.active, request, place(self.state), ConfigRules({}), lambda: b"n" * 16)
        self.apply(decision.records)
        return [result.error for result in decision.answer.results]


def test_a_leader_that_cannot_serve_gives_way_to_whoever_lives_when_an_operator_says_so() -> None:
    one = Controller(in_sync_replicas=(1,))
    assert one.elect() == [E.ELECTION_NOT_NEEDED], "it serves"
    one.fails(1)
    assert one.partition.leader == 1, "by itself nothing is given up"
    assert one.elect(kind=ELECT_PREFERRED) == [E.ELECTION_NOT_NEEDED]
    assert one.elect() == [0]
    assert (one.partition.leader, one.partition.in_sync_replicas, one.partition.recovering, one.partition.leader_epoch) == (2, (2,), True, 6)
    assert one.elect() == [E.ELECTION_NOT_NEEDED]


def test_an_election_of_all_partitions_finds_it() -> None:
    one = Controller(in_sync_replicas=(1,))
    assert one.elect(None) == []
    one.fails(1)
    assert one.elect(None) == [0] and one.partition.leader == 2


def test_nobody_is_chosen_who_cannot_serve_either_or_is_fenced() -> None:
    one = Controller(in_sync_replicas=(1, 2))
    one.fails(2)
    one.fails(1)
    assert one.partition.in_sync_replicas == (1,) and one.partition.leader == 1
    assert one.elect() == [0] and one.partition.leader == 3
    one = Controller(in_sync_replicas=(1,))
    one.apply([BrokerChanged(3, 30, fenced=True)])
    one.fails(1)
    one.fails(2)
    before = one.partition
    assert one.elect() == [E.ELIGIBLE_LEADERS_NOT_AVAILABLE] and one.partition == before


@pytest.mark.parametrize("heals", ["silence", "registration"])
def test_what_was_said_a_while_ago_costs_no_records(heals: str) -> None:
    one = Controller(in_sync_replicas=(1,))
    one.fails(1)
    if heals == "silence":
        one.after(UNABLE_HEARTBEATS * OPTIONS.heartbeat_ms)
        assert one.active.unable() == {(TOPIC, 0): {1}}
        one.after(1)
    else:
        message = msgspec.structs.replace(registration(1, incarnation=2), directory_id="m1")
        records, answer = one.active.register(one.state, message, one.now_ms)
        assert answer.error == 0 and records
    assert one.active.unable() == {}
    assert one.elect() == [E.ELECTION_NOT_NEEDED] and one.partition.leader == 1
