"""Limits of a cluster's size: what exceeds them is refused with a message, before it is created."""

import msgspec
import pytest

from mqd.cluster.broker import messages as broker_messages
from mqd.cluster.host.messages import AddPartitions, CreateTopic, Image, PartitionImage, TopicImage
from mqd.cluster.metadata import limits
from mqd.cluster.metadata.active_controller import ActiveController
from mqd.cluster.metadata.maintenance import UNSERVED_MS
from mqd.cluster.metadata.options import ControllerOptions
from mqd.cluster.metadata.refusal import Refusal
from mqd.cluster.metadata.rules import reassignments as reassign_rules
from mqd.cluster.metadata.rules.assignments import PlacementContext
from mqd.cluster.metadata.rules.configs import ConfigRules
from mqd.cluster.metadata.rules.placement import PARTITIONS_MAX, Directories
from mqd.cluster.metadata.rules.topics import add_partitions, create_topic
from mqd.cluster.metadata.state import MetadataState
from mqd.cluster.metadata.view import View
from mqd.protocol.errors import ErrorCode as E
from tests.unit.cluster.test_rules import TOPIC, cluster, topic

NONE: frozenset[str] = frozenset()
HOSTS = 20


def place(state: MetadataState) -> PlacementContext:
    return PlacementContext(1, View(state, NONE), Directories(state, {}), 1_000_000)


def creation(count: int = -1, factor: int = -1, assignments: dict[int, list[int]] | None = None) -> CreateTopic:
    return CreateTopic("new", count, factor, assignments or {}, {})


def create(state: MetadataState, change: CreateTopic):
    return create_topic(state, change, place(state), ConfigRules({}), lambda: b"n" * 16)


def test_sixteen_replicas_are_the_most() -> None:
    state = cluster(HOSTS)
    for number, change in enumerate((creation(1, 16), creation(assignments={0: list(range(1, 17))}))):
        assert create(state, change), number
    for change, error in (
        (creation(1, 17), E.INVALID_REPLICATION_FACTOR),
        (creation(assignments={0: list(range(1, 18))}), E.INVALID_REPLICA_ASSIGNMENT),
    ):
        with pytest.raises(Refusal, match="17 replicas; 16 is the maximum") as refusal:
            create(state, change)
        assert refusal.value.error == error


def reassigned(state: MetadataState, replicas: tuple[int, ...]):
    view, found = View(state, NONE), state.topics["t"]
    reassign_rules.check_target(view, found.partitions[0], replicas, True)
    return reassign_rules.reassign(view, found, found.partitions[0], replicas, Directories(state, {}))


def test_the_limit_of_a_reassignment_counts_old_and_new_replicas() -> None:
    state = topic(cluster(HOSTS), (1, 2, 3))
    with pytest.raises(Refusal, match="would have 17 replicas"):
        reassigned(state, tuple(range(1, 18)))
    assert reassigned(state, tuple(range(4, 17))) is not None
    with pytest.raises(
        Refusal, match="in several steps: during the reassignment from 3 to 14 replicas, t-0 would have 17 replicas"
    ) as refusal:
        reassigned(state, tuple(range(4, 18)))
    assert refusal.value.error == E.INVALID_REPLICA_ASSIGNMENT


def test_the_number_of_partitions_is_limited_by_the_size_of_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    state = topic(cluster(HOSTS), (1, 2, 3), count=100)
    monkeypatch.setattr(
        limits, "IMAGE_BYTES_MAX", limits.image_bytes(state) + 10 * (limits.PARTITION_BYTES + 3 * limits.REPLICA_BYTES)
    )
    assert create(state, creation(10, 3)) and add_partitions(state, AddPartitions("t", 110, None), place(state))
    for request in (
        lambda: create(state, creation(11, 3)),
        lambda: add_partitions(state, AddPartitions("t", 111, None), place(state)),
        lambda: create(state, creation(1_000_000, 3)),
    ):
        with pytest.raises(Refusal, match="The cluster has 100 partitions; .*Delete topics first") as refusal:
            request()
        assert refusal.value.error == E.INVALID_PARTITIONS


@pytest.mark.parametrize("replicas", [1, 3, 16])
def test_an_image_is_not_larger_than_estimated(replicas: int) -> None:
    """Large numbers, and a reassignment in progress on each."""
    nodes = [30_000 + number for number in range(replicas)]
    partitions = [
        PartitionImage(
            100_000, 100_000, 30, 3, 30_000, 300_000, nodes, nodes, 300_000, adding=nodes[:1], removing=nodes[-1:]
        )
        for _ in range(200)
    ]
    name = "n" * 249
    size = len(
        msgspec.msgpack.encode(
            Image(1, "c", 1, [], [TopicImage(name, bytes(16), partitions, {"min.insync.replicas": "2"})], {})
        )
    )
    assert size < limits.TOPIC_BYTES + 200 * (limits.PARTITION_BYTES + replicas * limits.REPLICA_BYTES) + 500
    assert limits.REPLICAS_MAX == 16 and limits.IMAGE_BYTES_MAX < 128 << 20


def test_a_limit_of_the_native_core() -> None:
    from mqd.native.core import ffi

    assert (
        ffi.sizeof(ffi.new("struct mqd_replica_assignment *").members) // ffi.sizeof("struct mqd_replica_member")
        == limits.REPLICAS_MAX
    )


def test_leadership_does_not_alternate_between_two_failed_replicas() -> None:
    """Found by the simulator: twenty thousand leader epochs in half a minute."""
    state = topic(
        cluster(3), (1, 2, 3), config={"min.insync.replicas": "2", "flush.on.ack": "true"}, in_sync_replicas=(1, 2)
    )
    active = ActiveController(1, state, ControllerOptions(), 0, True)

    def fails(node: int, now_ms: int) -> int:
        """The leader afterwards."""
        for record in active.on_replicas_failed(
            state, broker_messages.ReplicasFailed(node, node * 10, [(TOPIC, 0)]), now_ms
        ):
            state.apply(record)
        return state.topics["t"].partitions[0].leader

    assert fails(1, 0) == 2 and fails(2, 100) == -1
    epoch = state.topics["t"].partitions[0].leader_epoch
    for now_ms in range(100, 5_000, 500):
        assert fails(2, now_ms) == -1 and fails(1, now_ms) == -1
    assert state.topics["t"].partitions[0].leader_epoch == epoch
    assert fails(2, UNSERVED_MS + 5_000) == 1, "an old report may be outdated"


def host_with(count: int) -> tuple[MetadataState, PlacementContext]:
    """One host with this many partitions of users' topics."""
    state = topic(cluster(1), (1,), count=count)
    return state, PlacementContext(1, View(state, NONE), Directories(state, {}), PARTITIONS_MAX)


def send_request(state: MetadataState, where: PlacementContext, name: str, count: int, assigned: bool = False):
    change = (
        CreateTopic(name, -1, -1, {index: [1] for index in range(count)}, {})
        if assigned
        else CreateTopic(name, count, 1, {}, {})
    )
    return create_topic(state, change, where, ConfigRules({}), lambda: name.encode().rjust(16, b"n")[:16])


@pytest.mark.parametrize("assigned", [False, True])
def test_a_host_full_of_partitions_has_slots_for_internal_topics(assigned: bool) -> None:
    """16,384 partitions used to be the total: then groups and transactions were impossible."""
    assert PARTITIONS_MAX == 16_384
    state, where = host_with(PARTITIONS_MAX)
    with pytest.raises(Refusal, match="room for 0 more") as refusal:
        send_request(state, where, "one-more", 1, assigned)
    assert refusal.value.error == E.INVALID_PARTITIONS
    for name in ("__consumer_offsets", "__transaction_state", "__share_group_state"):
        (record,) = send_request(state, where, name, 50, assigned)
        state.apply(record)
        with pytest.raises(Refusal, match="room for 0 more"):
            send_request(state, where, "one-more", 1, assigned)
    with pytest.raises(Refusal, match="room for 0 more"):
        add_partitions(state, AddPartitions("t", PARTITIONS_MAX + 1, None), where)


@pytest.mark.parametrize("assigned", [False, True])
def test_internal_topics_do_not_reduce_users_limits(assigned: bool) -> None:
    state, where = host_with(10)
    (record,) = send_request(state, where, "__consumer_offsets", 50, assigned)
    state.apply(record)
    assert send_request(state, where, "rest", PARTITIONS_MAX - 10, assigned)
    with pytest.raises(Refusal, match="room for 16374 more"):
        send_request(state, where, "rest", PARTITIONS_MAX - 9, assigned)
