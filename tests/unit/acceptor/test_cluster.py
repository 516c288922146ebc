"""The acceptor of one host among three: the leaders and coordinators that it reports, refusals,
access to the inter-broker listener; markers and checks of transactions on other hosts.
"""

import asyncio
import time

import pytest

from mqd.acceptor.broker import Broker, Context
from mqd.acceptor.broker_state import Origin
from mqd.acceptor.coordinators import BrokerPartitions, InternalPartitions
from mqd.acceptor.handlers.cluster import describe_cluster, list_partition_reassignments
from mqd.acceptor.handlers.topics import describe_topic_partitions
from mqd.acceptor.handlers.topics import metadata as metadata_handler
from mqd.acceptor.interbroker import transactions as remote_transactions
from mqd.acceptor.interbroker.client import PeerError
from mqd.acceptor.interbroker.transactions import RoutedCoordinator
from mqd.acceptor.metadata import Metadata
from mqd.base.config import load_broker
from mqd.cluster.host import messages
from mqd.cluster.metadata.records import RETIRE_HIDDEN
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.coordinator.log import AppendError
from mqd.coordinator.topics import CONSUMER_OFFSETS, TRANSACTION_STATE
from mqd.coordinator.transaction.events import AddPartitions, VerifyPartitions
from mqd.native import SlotRole, SlotState, SlotView
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import (
    AddPartitionsToTxnResponse,
    DescribeClusterRequest,
    DescribeTopicPartitionsRequest,
    ListPartitionReassignmentsRequest,
    ListTransactionsResponse,
    MetadataRequest,
)

NODE = 2
TOPIC = b"t" * 16
ORIGIN = Origin(0, "10.0.0.2", 9092)
SECRET = b"the secret of these tests"
INT64_MAX = (1 << 63) - 1


class Table:
    """The control segment: slot = partition index; every replica is online and leads unless a test
    changes it.
    """

    def __init__(self) -> None:
        self.metadata_version = 100
        self.lease_deadline_ns = INT64_MAX
        self.roles: dict[int, int] = {}

    def endpoint_generation(self, endpoint: int) -> int:
        return 1

    def slot_view(self, slot: int) -> SlotView:
        values = dict.fromkeys(SlotView.__struct_fields__, 0) | {
            "topic_id": TOPIC,
            "partition_index": slot,
            "state": SlotState.ONLINE,
            "owner_generation": 1,
        }
        return SlotView(**values | {"role": self.roles.get(slot, SlotRole.LEADS)})


def broker_image(node: int, **fields) -> messages.BrokerImage:
    return messages.BrokerImage(
        node,
        f"host{node}",
        9092,
        f"rack{node}",
        10 + node,
        inter_broker_host="127.0.0.1",
        inter_broker_port=1,
        directory_id=f"d{node}",
        **fields,
    )


def partition(index: int, replicas: tuple[int, ...], leader: int | None = None, **fields) -> messages.PartitionImage:
    here = NODE in replicas
    return messages.PartitionImage(
        index,
        index if here else -1,
        0 if here else 65535,
        0,
        replicas[0] if leader is None else leader,
        3,
        list(replicas),
        list(replicas),
        **fields,
    )


def topic(*partitions: messages.PartitionImage, name: str = "t", topic_id: bytes = TOPIC) -> messages.TopicImage:
    return messages.TopicImage(name, topic_id, list(partitions), {}, name.startswith("__"))


def made(*topics: messages.TopicImage, brokers: list[messages.BrokerImage] | None = None) -> Broker:
    metadata = Metadata()
    metadata.apply(
        messages.Image(
            1, "cluster", 1, brokers or [broker_image(node) for node in (1, 2, 3)], list(topics), {}, node_id=NODE
        )
    )
    config = {**load_broker(None, {}, {"node.id": str(NODE)}), "log.dirs": "/nowhere"}
    return Broker(config, [("PLAINTEXT", "127.0.0.1", 9092)], metadata, None, Table())


def report(broker: Broker, context: Context | None = None) -> dict[int, tuple[int, int, list[int]]]:
    """Partition -> (error, leader, offline replicas)."""
    request = MetadataRequest(topics=[MetadataRequest.Topic(name="t")])
    response = asyncio.run(
        metadata_handler.handle(context or Context(broker, ORIGIN), RequestHeader(3, 12, 1, None), request)
    )
    return {
        one.partition_index: (one.error_code, one.leader_id, one.offline_replicas)
        for one in response.topics[0].partitions
    }


# -- metadata --------------------------------------------------------------------------------------


def test_metadata_names_live_leaders() -> None:
    broker = made(
        topic(partition(0, (1, 2)), partition(1, (2, 3)), partition(2, (3, 1)), partition(3, (1, 3), leader=-1))
    )
    missing = int(ErrorCode.LEADER_NOT_AVAILABLE)
    assert report(broker) == {0: (0, 1, []), 1: (0, 2, []), 2: (0, 3, []), 3: (missing, -1, [])}
    broker.metadata.apply(messages.BrokersPut(2, [broker_image(1), broker_image(2), broker_image(3, fenced=True)], 1))
    assert report(broker) == {0: (0, 1, []), 1: (0, 2, [3]), 2: (missing, -1, [3]), 3: (missing, -1, [3])}
    assert [node for node, *_ in broker.brokers(ORIGIN)] == [1, 2]


def test_a_host_without_its_lease_does_not_direct_clients_to_itself() -> None:
    broker = made(topic(partition(0, (2, 3))))
    broker.table.lease_deadline_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) + 60_000_000_000
    assert report(broker)[0][1] == 2
    broker.table.lease_deadline_ns = 5
    assert report(broker)[0] == (ErrorCode.LEADER_NOT_AVAILABLE, -1, [])
    assert broker.unserved_error(broker.partition_of("t", 0)) == ErrorCode.NOT_LEADER_OR_FOLLOWER


def test_responses_without_the_lease_are_not_cached() -> None:
    """A worker caches responses by version: with the lease it would also repeat those from without
    the lease.
    """
    broker = made(topic(partition(0, (1, 3)), partition(1, (2, 3))))
    for deadline_ns, leaders, cacheable in ((INT64_MAX, [1, 2], True), (5, [1, -1], False), (INT64_MAX, [1, 2], True)):
        broker.table.lease_deadline_ns = deadline_ns
        context = Context(broker, ORIGIN)
        assert [leader for _, leader, _ in report(broker, context).values()] == leaders
        assert context.is_cacheable is cacheable


def test_a_replica_that_follows_is_not_taken_for_a_leader() -> None:
    broker = made(topic(partition(0, (2, 3)), partition(1, (1, 2))))
    broker.table.roles[0] = SlotRole.FOLLOWS  # its owner does not know yet
    assert report(broker)[0][0] == ErrorCode.LEADER_NOT_AVAILABLE
    follows = broker.partition_of("t", 1)
    assert broker.view(follows) is None and broker.replica_view(follows) is not None
    assert broker.unserved_error(follows) == ErrorCode.NOT_LEADER_OR_FOLLOWER


def test_updates_of_single_partitions_and_several_at_once() -> None:
    broker = made(topic(partition(0, (1, 2)), partition(1, (1, 3))))
    broker.metadata.apply(messages.PartitionsPut(2, TOPIC, [partition(1, (1, 3), leader=3)]))
    assert [one.leader for one in broker.metadata.topics["t"].partitions] == [1, 3] and broker.metadata.version == 2
    news = messages.MessageList(
        3,
        [
            messages.BrokersPut(3, [broker_image(2)], 2),
            messages.PartitionsPut(3, TOPIC, [partition(0, (1, 2), leader=2)]),
        ],
    )
    broker.metadata.apply(news)
    assert (broker.metadata.controller_id, broker.metadata.version, broker.metadata.is_single_host) == (2, 3, True)
    assert broker.metadata.topics["t"].partitions[0].leader == 2
    broker.metadata.apply(messages.PartitionsPut(4, b"x" * 16, [partition(0, (1,))]))  # of a deleted topic


def test_an_image_shows_no_partition_before_every_worker_knows_it() -> None:
    """The controller was restarted while a topic got partitions; the image adds more, and a topic."""
    metadata = Metadata()

    def of_size(name: bytes, count: int) -> messages.TopicImage:
        return messages.TopicImage(name.decode(), name * 16, [partition(index, (1,)) for index in range(count)], {})

    def image(version: int, *topics: messages.TopicImage) -> messages.Image:
        return messages.Image(version, "cluster", 1, [], list(topics), {}, node_id=1)

    metadata.apply(image(1, of_size(b"t", 1)))
    metadata.apply(messages.TopicPut(2, of_size(b"t", 2)))
    metadata.apply(image(4, of_size(b"t", 3), of_size(b"u", 1)))

    def known(name: str) -> list[int]:
        return [metadata.known_count(metadata.topics[name], applied) for applied in (1, 2, 3, 4)]

    assert known("t") == [1, 2, 2, 3] and known("u") == [0, 0, 0, 1]


def test_hidden_partitions_are_not_shown() -> None:
    broker = made(
        topic(
            partition(0, (2, 3)),
            partition(1, (2, 3), retiring=RETIRE_HIDDEN),
            partition(2, (2, 3), retiring=RETIRE_HIDDEN),
        )
    )
    assert list(report(broker)) == [0] and broker.metadata.known_count(broker.metadata.topics["t"], 100) == 1
    request = DescribeTopicPartitionsRequest(
        topics=[DescribeTopicPartitionsRequest.Topic(name="t")], response_partition_limit=10
    )
    response = asyncio.run(
        describe_topic_partitions.handle(Context(broker, ORIGIN), RequestHeader(75, 0, 1, None), request)
    )
    assert [one.partition_index for one in response.topics[0].partitions] == [0] and response.next_cursor is None


def test_fenced_brokers_are_described_on_demand() -> None:
    broker = made(brokers=[broker_image(1), broker_image(2), broker_image(3, fenced=True)])
    for requested, expected in ((False, [(1, False), (2, False)]), (True, [(1, False), (2, False), (3, True)])):
        response = asyncio.run(
            describe_cluster.handle(
                Context(broker, ORIGIN),
                RequestHeader(60, 2, 1, None),
                DescribeClusterRequest(include_fenced_brokers=requested),
            )
        )
        assert [(one.broker_id, one.is_fenced) for one in response.brokers] == expected


def test_reassignments_under_way_are_listed() -> None:
    broker = made(topic(partition(0, (1, 2, 3), adding=[3], removing=[1]), partition(1, (1, 2))))
    Requested = ListPartitionReassignmentsRequest.ListPartitionReassignmentsTopics
    for topics in (
        None,
        [Requested(name="t", partition_indexes=[0, 1, 9]), Requested(name="none", partition_indexes=[0])],
    ):
        request = ListPartitionReassignmentsRequest(timeout_ms=1, topics=topics)
        response = asyncio.run(
            list_partition_reassignments.handle(Context(broker, ORIGIN), RequestHeader(46, 0, 1, None), request)
        )
        ((one,),) = [listed.partitions for listed in response.topics]
        assert (one.partition_index, one.replicas, one.adding_replicas, one.removing_replicas) == (
            0,
            [1, 2, 3],
            [3],
            [1],
        )


# -- coordinators ----------------------------------------------------------------------------------


def test_coordinators_run_at_the_leaders_of_their_partitions() -> None:
    broker = made(
        topic(partition(0, (2, 3)), partition(1, (1, 2)), partition(2, (3, 1), leader=-1), name="__consumer_offsets")
    )
    partitions = InternalPartitions(broker, CONSUMER_OFFSETS)
    assert [partitions.is_led_elsewhere(index) for index in range(4)] == [False, True, False, False]
    assert [partitions.served(index) is not None for index in range(3)] == [True, False, False]
    appends = BrokerPartitions(broker)
    assert appends.served("__consumer_offsets", 0).slot == 0
    with pytest.raises(AppendError) as refused:
        appends.served("__consumer_offsets", 1)
    assert refused.value.error == ErrorCode.NOT_LEADER_OR_FOLLOWER


# -- checks of transactions ------------------------------------------------------------------------


class LocalCoordinator:
    topic = TRANSACTION_STATE.name

    def __init__(self, place: int) -> None:
        self.place = place
        self.requested: list[object] = []

    def partition_for(self, name: str) -> int:
        return self.place

    async def request(self, name: str, make_event, timeout_s=None) -> object:
        self.requested.append(make_event(1))
        return 0


class Remote:
    def __init__(self, response) -> None:
        self.answer, self.requested = response, []

    async def request(self, node_id: int, request: object, version: int, timeout_s: float) -> object:
        self.requested.append((node_id, request))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def transaction_errors(*errors: tuple[str, int, int]) -> AddPartitionsToTxnResponse:
    topics = [
        AddPartitionsToTxnResponse.TopicResult(
            name=name,
            results_by_partition=[
                AddPartitionsToTxnResponse.PartitionResult(partition_index=index, partition_error_code=error)
            ],
        )
        for name, index, error in errors
    ]
    return AddPartitionsToTxnResponse(
        results_by_transaction=[AddPartitionsToTxnResponse.Result(transactional_id="id", topic_results=topics)]
    )


def test_a_transactions_coordinator_is_consulted_on_any_host() -> None:
    broker = made(topic(partition(0, (2, 3)), partition(1, (3, 2)), name="__transaction_state"))
    requested = (("a", 0), ("b", 4))

    async def scenario() -> None:
        here = RoutedCoordinator(broker, LocalCoordinator(0), Remote(None))
        assert await here.request("id", lambda number: AddPartitions(number, 5, 1, requested)) == 0
        remote = Remote(transaction_errors(("a", 0, 0), ("b", 4, int(ErrorCode.INVALID_TXN_STATE))))
        there = RoutedCoordinator(broker, LocalCoordinator(1), remote)
        assert await there.request("id", lambda number: VerifyPartitions(number, 5, 1, requested)) == (
            0,
            ErrorCode.INVALID_TXN_STATE,
        )
        assert (
            await there.request("id", lambda number: AddPartitions(number, 5, 1, requested, 2))
            == ErrorCode.INVALID_TXN_STATE
        )
        assert [(node, request.transactions[0].verify_only) for node, request in remote.requested] == [
            (3, True),
            (3, False),
        ]
        remote.answer = PeerError("gone")
        with pytest.raises(CoordinatorError) as failed:
            await there.request("id", lambda number: AddPartitions(number, 5, 1, requested, 2))
        assert failed.value.error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE
        remote.answer = AddPartitionsToTxnResponse()  # does not name the topic
        assert (
            await there.request("id", lambda number: AddPartitions(number, 5, 1, requested, 2))
            == ErrorCode.COORDINATOR_NOT_AVAILABLE
        )

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (ListTransactionsResponse(), 0),
        (
            ListTransactionsResponse(
                transaction_states=[
                    ListTransactionsResponse.TransactionState(
                        transactional_id="x", producer_id=5, transaction_state="Ongoing"
                    )
                ]
            ),
            (ErrorCode.CONCURRENT_TRANSACTIONS, 1, "x"),
        ),
        (
            ListTransactionsResponse(
                transaction_states=[
                    ListTransactionsResponse.TransactionState(
                        transactional_id="x", producer_id=5, transaction_state="PrepareCommit"
                    )
                ]
            ),
            ErrorCode.CONCURRENT_TRANSACTIONS,
        ),
        (
            ListTransactionsResponse(
                transaction_states=[
                    ListTransactionsResponse.TransactionState(
                        transactional_id="x", producer_id=5, transaction_state="CompleteCommit"
                    )
                ]
            ),
            0,
        ),
        (
            ListTransactionsResponse(error_code=int(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)),
            ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ),
        (PeerError("gone"), ErrorCode.COORDINATOR_NOT_AVAILABLE),
    ],
)
def test_coordinators_elsewhere_are_asked_before_a_hanging_transaction_is_ended(response, expected) -> None:
    broker, remote = made(brokers=[broker_image(1), broker_image(2), broker_image(3, fenced=True)]), Remote(response)
    found = asyncio.run(remote_transactions.find_remote_transaction(broker, remote, 5))
    assert found == (expected if isinstance(expected, tuple) else (expected, -1, ""))
    assert [node for node, _ in remote.requested] == [1], "a fenced host coordinates nothing"


def test_leaders_of_partitions_elsewhere() -> None:
    broker = made(topic(partition(0, (1, 2)), partition(1, (2, 1)), partition(2, (1, 3), leader=-1)))
    assert [remote_transactions.remote_leader_id(broker, "t", index) for index in range(4)] == [1, -1, -1, -1]
