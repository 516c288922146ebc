"""The acceptor of one host among three: whom it sends clients to, what it refuses, who may connect
between hosts; markers and checks of transactions to other hosts.
"""

import asyncio
import socket
import time

import msgspec
import pytest

from mqd.acceptor.broker import Address, Broker, Context
from mqd.acceptor.coordinators import BrokerPartitions, InternalPartitions
from mqd.acceptor.handlers.cluster import describe_cluster, list_partition_reassignments
from mqd.acceptor.handlers.topics import describe_topic_partitions
from mqd.acceptor.handlers.topics import metadata as metadata_handler
from mqd.acceptor.interbroker import client as peers
from mqd.acceptor.interbroker import server as between
from mqd.acceptor.interbroker import transactions as remote_transactions
from mqd.acceptor.interbroker.client import PeerError, Peers
from mqd.acceptor.interbroker.server import Between, judge
from mqd.acceptor.interbroker.transactions import MarkerToWrite, RemoteMarkers, RoutedCoordinator
from mqd.acceptor.metadata import Metadata
from mqd.base.config import load_broker
from mqd.cluster.host import messages
from mqd.cluster.membership import handshake
from mqd.cluster.membership.handshake import Hello, Identity, Refusal
from mqd.cluster.metadata.records import RETIRE_HIDDEN
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.coordinator.log import AppendError
from mqd.coordinator.topics import CONSUMER_OFFSETS, TRANSACTION_STATE
from mqd.coordinator.transaction.events import AddPartitions, VerifyPartitions
from mqd.native import SlotRole, SlotState, SlotView
from mqd.protocol.api import decode_request, encode_response
from mqd.protocol.errors import ErrorCode
from mqd.protocol.framing import RequestHeader
from mqd.protocol.messages import (
    AddPartitionsToTxnResponse,
    DescribeClusterRequest,
    DescribeTopicPartitionsRequest,
    ListPartitionReassignmentsRequest,
    ListTransactionsResponse,
    MetadataRequest,
    WriteTxnMarkersRequest,
    WriteTxnMarkersResponse,
)

NODE = 2
TOPIC = b"t" * 16
ADDRESS = Address(0, "10.0.0.2", 9092)
SECRET = b"the secret of these tests"
INT64_MAX = (1 << 63) - 1


class Table:
    """The control segment: slot = partition index; every replica is online and leads unless a test
    says otherwise.
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


def told(broker: Broker, context: Context | None = None) -> dict[int, tuple[int, int, list[int]]]:
    """Partition -> (error, leader, offline replicas)."""
    request = MetadataRequest(topics=[MetadataRequest.Topic(name="t")])
    answer = asyncio.run(
        metadata_handler.handle(context or Context(broker, ADDRESS), RequestHeader(3, 12, 1, None), request)
    )
    return {
        one.partition_index: (one.error_code, one.leader_id, one.offline_replicas)
        for one in answer.topics[0].partitions
    }


# -- metadata --------------------------------------------------------------------------------------


def test_clients_are_sent_to_leaders_that_live() -> None:
    broker = made(
        topic(partition(0, (1, 2)), partition(1, (2, 3)), partition(2, (3, 1)), partition(3, (1, 3), leader=-1))
    )
    missing = int(ErrorCode.LEADER_NOT_AVAILABLE)
    assert told(broker) == {0: (0, 1, []), 1: (0, 2, []), 2: (0, 3, []), 3: (missing, -1, [])}
    broker.metadata.apply(messages.BrokersPut(2, [broker_image(1), broker_image(2), broker_image(3, fenced=True)], 1))
    assert told(broker) == {0: (0, 1, []), 1: (0, 2, [3]), 2: (missing, -1, [3]), 3: (missing, -1, [3])}
    assert [node for node, *_ in broker.brokers(ADDRESS)] == [1, 2]


def test_a_host_without_its_lease_sends_nobody_to_itself() -> None:
    broker = made(topic(partition(0, (2, 3))))
    broker.table.lease_deadline_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) + 60_000_000_000
    assert told(broker)[0][1] == 2
    broker.table.lease_deadline_ns = 5
    assert told(broker)[0] == (ErrorCode.LEADER_NOT_AVAILABLE, -1, [])
    assert broker.unserved_error(broker.partition_of("t", 0)) == ErrorCode.NOT_LEADER_OR_FOLLOWER


def test_what_is_said_without_the_lease_is_not_kept_for_when_it_is_back() -> None:
    """A worker gives again what is cacheable, in the same version: with the lease, also what came
    without it.
    """
    broker = made(topic(partition(0, (1, 3)), partition(1, (2, 3))))
    for deadline_ns, leaders, cacheable in ((INT64_MAX, [1, 2], True), (5, [1, -1], False), (INT64_MAX, [1, 2], True)):
        broker.table.lease_deadline_ns = deadline_ns
        context = Context(broker, ADDRESS)
        assert [leader for _, leader, _ in told(broker, context).values()] == leaders
        assert context.cacheable is cacheable


def test_a_replica_that_follows_is_not_taken_for_a_leader() -> None:
    broker = made(topic(partition(0, (2, 3)), partition(1, (1, 2))))
    broker.table.roles[0] = SlotRole.FOLLOWS  # its owner has not heard yet
    assert told(broker)[0][0] == ErrorCode.LEADER_NOT_AVAILABLE
    follows = broker.partition_of("t", 1)
    assert broker.view(follows) is None and broker.replica_view(follows) is not None
    assert broker.unserved_error(follows) == ErrorCode.NOT_LEADER_OR_FOLLOWER


def test_news_of_single_partitions_and_several_news_at_once() -> None:
    broker = made(topic(partition(0, (1, 2)), partition(1, (1, 3))))
    broker.metadata.apply(messages.PartitionsPut(2, TOPIC, [partition(1, (1, 3), leader=3)]))
    assert [one.leader for one in broker.metadata.topics["t"].partitions] == [1, 3] and broker.metadata.version == 2
    news = messages.Several(
        3,
        [
            messages.BrokersPut(3, [broker_image(2)], 2),
            messages.PartitionsPut(3, TOPIC, [partition(0, (1, 2), leader=2)]),
        ],
    )
    broker.metadata.apply(news)
    assert (broker.metadata.controller_id, broker.metadata.version, broker.metadata.is_alone) == (2, 3, True)
    assert broker.metadata.topics["t"].partitions[0].leader == 2
    broker.metadata.apply(messages.PartitionsPut(4, b"x" * 16, [partition(0, (1,))]))  # of a topic that is gone


def test_hidden_partitions_are_not_shown() -> None:
    broker = made(
        topic(
            partition(0, (2, 3)),
            partition(1, (2, 3), retiring=RETIRE_HIDDEN),
            partition(2, (2, 3), retiring=RETIRE_HIDDEN),
        )
    )
    assert list(told(broker)) == [0] and broker.metadata.visible_count(broker.metadata.topics["t"], 100) == 1
    request = DescribeTopicPartitionsRequest(
        topics=[DescribeTopicPartitionsRequest.Topic(name="t")], response_partition_limit=10
    )
    answer = asyncio.run(
        describe_topic_partitions.handle(Context(broker, ADDRESS), RequestHeader(75, 0, 1, None), request)
    )
    assert [one.partition_index for one in answer.topics[0].partitions] == [0] and answer.next_cursor is None


def test_fenced_brokers_are_described_on_demand() -> None:
    broker = made(brokers=[broker_image(1), broker_image(2), broker_image(3, fenced=True)])
    for asked, expected in ((False, [(1, False), (2, False)]), (True, [(1, False), (2, False), (3, True)])):
        answer = asyncio.run(
            describe_cluster.handle(
                Context(broker, ADDRESS),
                RequestHeader(60, 2, 1, None),
                DescribeClusterRequest(include_fenced_brokers=asked),
            )
        )
        assert [(one.broker_id, one.is_fenced) for one in answer.brokers] == expected


def test_reassignments_under_way_are_listed() -> None:
    broker = made(topic(partition(0, (1, 2, 3), adding=[3], removing=[1]), partition(1, (1, 2))))
    Asked = ListPartitionReassignmentsRequest.ListPartitionReassignmentsTopics
    for topics in (None, [Asked(name="t", partition_indexes=[0, 1, 9]), Asked(name="none", partition_indexes=[0])]):
        request = ListPartitionReassignmentsRequest(timeout_ms=1, topics=topics)
        answer = asyncio.run(
            list_partition_reassignments.handle(Context(broker, ADDRESS), RequestHeader(46, 0, 1, None), request)
        )
        ((one,),) = [listed.partitions for listed in answer.topics]
        assert (one.partition_index, one.replicas, one.adding_replicas, one.removing_replicas) == (
            0,
            [1, 2, 3],
            [3],
            [1],
        )


# -- coordinators ----------------------------------------------------------------------------------


def test_coordinators_are_where_their_partitions_are_led() -> None:
    broker = made(
        topic(partition(0, (2, 3)), partition(1, (1, 2)), partition(2, (3, 1), leader=-1), name="__consumer_offsets")
    )
    partitions = InternalPartitions(broker, CONSUMER_OFFSETS)
    assert [partitions.is_elsewhere(index) for index in range(4)] == [False, True, False, False]
    assert [partitions.source(index) is not None for index in range(3)] == [True, False, False]
    appends = BrokerPartitions(broker)
    assert appends.served("__consumer_offsets", 0).slot == 0
    with pytest.raises(AppendError) as refused:
        appends.served("__consumer_offsets", 1)
    assert refused.value.error == ErrorCode.NOT_LEADER_OR_FOLLOWER


# -- between hosts ---------------------------------------------------------------------------------


def hello(
    node: int = 3, directory: str = "d3", cluster: str = "cluster", worker: int = 0, purpose: str = "data"
) -> Hello:
    return Hello(1, b"", purpose, Identity(node, directory, cluster), worker)


def test_who_may_connect_between_hosts() -> None:
    metadata = made().metadata
    assert judge(hello(), metadata, NODE, 2) == Identity(NODE, "d2", "cluster")
    assert judge(hello(worker=-1), metadata, NODE, 2) == Identity(NODE, "d2", "cluster")
    for said, code in (
        (hello(purpose="controller"), handshake.REFUSED_PURPOSE),
        (hello(cluster=""), handshake.REFUSED_CLUSTER),
        (hello(node=2, directory="d2"), handshake.REFUSED_IDENTITY),
        (hello(directory="wiped"), handshake.REFUSED_IDENTITY),
        (hello(node=9), handshake.REFUSED_BUSY),
        (hello(worker=2), handshake.REFUSED_WORKER),
        (hello(worker=-2), handshake.REFUSED_WORKER),
    ):
        answer = judge(said, metadata, NODE, 2)
        assert isinstance(answer, Refusal) and answer.code == code
    assert judge(hello(), Metadata(), NODE, 2).code == handshake.REFUSED_BUSY


class Hosts:
    """Host 2's acceptor asks host 3's, over a real socket; `answer` (request, node) -> response."""

    def __init__(self, answer) -> None:
        self.answer = answer
        self.asked: list[tuple[object, int]] = []

    async def __aenter__(self) -> "Hosts":
        listener = socket.create_server(("127.0.0.1", 0))
        self.handoff, self.worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        brokers = [
            msgspec.structs.replace(broker_image(node), inter_broker_port=listener.getsockname()[1])
            for node in (1, 2, 3)
        ]
        self.broker = made(topic(partition(0, (3, 2)), partition(1, (2, 3))), brokers=brokers)
        self.peers = Peers(self.broker.metadata, NODE, SECRET)
        self.between = Between(listener, [self.handoff], SECRET, self.broker.metadata, 3, self._serve)
        self.between.start(asyncio.get_running_loop())
        self.listener = listener
        return self

    async def __aexit__(self, *_: object) -> None:
        self.between.stop()
        self.peers.close()
        for one in (self.listener, self.handoff, self.worker):
            one.close()

    async def _serve(self, frame: bytes, node: int) -> bytes | None:
        header, request = decode_request(frame)
        self.asked.append((request, node))
        response = self.answer(request)
        return None if response is None else encode_response(header, response)


def markers_answer(error: int):
    def answer(request):
        results = [
            WriteTxnMarkersResponse.MarkerResult(
                producer_id=marker.producer_id,
                topics=[
                    WriteTxnMarkersResponse.TopicResult(
                        name=one.name,
                        partitions=[WriteTxnMarkersResponse.PartitionResult(partition_index=0, error_code=error)],
                    )
                    for one in marker.topics
                ],
            )
            for marker in request.markers
        ]
        return WriteTxnMarkersResponse(markers=results)

    return answer


def test_markers_of_one_turn_go_in_one_request() -> None:
    async def scenario() -> None:
        async with Hosts(markers_answer(0)) as hosts:
            markers = RemoteMarkers(hosts.peers)
            given = [
                markers.write(3, MarkerToWrite(("t", 0), producer, 1, 7, producer % 2 == 0, producer == 5, 4))
                for producer in range(10)
            ]
            await asyncio.gather(*given)
            ((request, node),) = hosts.asked
            assert node == NODE and [one.producer_id for one in request.markers] == list(range(10))
            said = [
                (one.transaction_result, one.transaction_version, one.coordinator_epoch, one.leader_epoch)
                for one in request.markers[4:6]
            ]
            assert said == [(True, 0, 7, 4), (False, 2, 7, 4)]

    asyncio.run(scenario())


def test_a_marker_s_error_comes_back_and_a_lost_host_is_an_unknown_outcome() -> None:
    async def scenario() -> None:
        async with Hosts(markers_answer(int(ErrorCode.INVALID_PRODUCER_EPOCH))) as hosts:
            markers = RemoteMarkers(hosts.peers)
            with pytest.raises(AppendError) as refused:
                await markers.write(3, MarkerToWrite(("t", 0), 1, 1, 7, True, False))
            assert refused.value.error == ErrorCode.INVALID_PRODUCER_EPOCH
            hosts.answer = lambda _request: None  # it closes the connection
            with pytest.raises(AppendError) as lost:
                await markers.write(3, MarkerToWrite(("t", 0), 1, 1, 7, True, False))
            assert lost.value.error == ErrorCode.COORDINATOR_NOT_AVAILABLE and lost.value.unknown
            hosts.answer = markers_answer(0)
            await markers.write(3, MarkerToWrite(("t", 0), 1, 1, 7, True, False))  # over a new connection

    asyncio.run(scenario())


@pytest.mark.parametrize("failure", [ValueError("our own fault"), None])
def test_whatever_goes_wrong_each_marker_is_answered(failure: Exception | None) -> None:
    """Else the transaction's end would wait for it for ever. None: an answer of another kind."""

    class Faulty:
        async def request(self, node_id: int, request: object, version: int, timeout_s: float) -> object:
            if failure is not None:
                raise failure
            return object()

    async def scenario() -> None:
        markers = RemoteMarkers(Faulty())  # type: ignore[arg-type]
        given = [markers.write(3, MarkerToWrite(("t", 0), producer, 1, 7, True, False)) for producer in range(3)]
        for error in await asyncio.wait_for(asyncio.gather(*given, return_exceptions=True), 10):
            assert (
                isinstance(error, AppendError) and error.error == ErrorCode.COORDINATOR_NOT_AVAILABLE and error.unknown
            )

    asyncio.run(scenario())


def test_requests_are_answered_out_of_order_and_a_host_that_hangs_ends_in_a_timeout() -> None:
    async def scenario() -> None:
        held: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        async with Hosts(None) as hosts:
            serve = hosts._serve

            async def slow(frame: bytes, node: int) -> bytes | None:
                if len(hosts.asked) == 0:
                    hosts.asked.append((None, node))
                    await held
                return await serve(frame, node)

            hosts.between._serve, hosts.answer = slow, lambda _request: ListTransactionsResponse()
            request = remote_transactions.ListTransactionsRequest(state_filters=[], producer_id_filters=[1])
            first = asyncio.create_task(hosts.peers.request(3, request, 1, 0.3))
            await asyncio.sleep(0)
            while not hosts.asked:
                await asyncio.sleep(0.001)
            assert isinstance(await hosts.peers.request(3, request, 1, 10), ListTransactionsResponse)
            with pytest.raises(PeerError, match="has not answered"):
                await first
            held.set_result(None)
            assert isinstance(await hosts.peers.request(3, request, 1, 10), ListTransactionsResponse)

    asyncio.run(scenario())


MARKERS_OF_ONE = WriteTxnMarkersRequest(markers=[])


def test_markers_of_an_acceptor_that_has_gone_are_not_written_after_its_successors() -> None:
    """One that the network kept back came behind and ended the producer's next transaction."""

    async def scenario() -> None:
        story: list[str] = []
        async with Hosts(markers_answer(0)) as hosts:
            serve, begun = hosts._serve, asyncio.Event()

            async def told(frame: bytes, node: int) -> bytes | None:
                if story:
                    story.append("the successor's")
                    return await serve(frame, node)
                try:
                    story.append("begun")
                    begun.set()
                    return await asyncio.get_running_loop().create_future()
                finally:
                    story.append("given up")

            hosts.between._serve = told
            first = asyncio.create_task(hosts.peers.request(3, MARKERS_OF_ONE, 2, 20))
            await asyncio.wait_for(begun.wait(), 20)
            successor = Peers(hosts.broker.metadata, NODE, SECRET)
            try:
                assert isinstance(await successor.request(3, MARKERS_OF_ONE, 2, 20), WriteTxnMarkersResponse)
                assert story == ["begun", "given up", "the successor's"]
                with pytest.raises(PeerError):  # at once
                    await first
                assert 3 not in hosts.peers._connections and 3 in successor._connections
            finally:
                successor.close()

    asyncio.run(scenario())


def test_markers_over_an_older_connection_are_not_read_any_more_also_when_the_newer_one_has_ended() -> None:
    async def scenario() -> None:
        async with Hosts(
            lambda request: (
                ListTransactionsResponse()
                if isinstance(request, remote_transactions.ListTransactionsRequest)
                else markers_answer(0)(request)
            )
        ) as hosts:
            asked = remote_transactions.ListTransactionsRequest(state_filters=[], producer_id_filters=[1])
            # its first markers are under way still
            assert isinstance(await hosts.peers.request(3, asked, 1, 20), ListTransactionsResponse)
            successor = Peers(hosts.broker.metadata, NODE, SECRET)
            await successor.request(3, MARKERS_OF_ONE, 2, 20)
            successor.close()
            with pytest.raises(PeerError):
                await hosts.peers.request(3, MARKERS_OF_ONE, 2, 20)
            assert [type(request) for request, _ in hosts.asked] == [
                remote_transactions.ListTransactionsRequest,
                WriteTxnMarkersRequest,
            ]
            await hosts.peers.request(3, MARKERS_OF_ONE, 2, 20)  # over one that is newer

    asyncio.run(scenario())


def test_connections_for_other_things_live_beside_the_one_for_markers() -> None:
    """An acceptor passes its clients' requests on over one of their own."""

    async def scenario() -> None:
        async with Hosts(
            lambda request: (
                ListTransactionsResponse()
                if isinstance(request, remote_transactions.ListTransactionsRequest)
                else markers_answer(0)(request)
            )
        ) as hosts:
            asked = remote_transactions.ListTransactionsRequest(state_filters=[], producer_id_filters=[1])
            relays = Peers(hosts.broker.metadata, NODE, SECRET)
            try:
                made = set()
                for _ in range(3):
                    await hosts.peers.request(3, MARKERS_OF_ONE, 2, 20)
                    await relays.request(3, asked, 1, 20)
                    made |= {hosts.peers._connections[3], relays._connections[3]}
                assert len(made) == 2
            finally:
                relays.close()

    asyncio.run(scenario())


def test_who_writes_to_a_host_that_does_not_read_hears_at_once_that_it_has_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They waited until their own time was over, and the next connection got the number of the one
    that was closed and was never told that it can be written to.
    """
    read_frame = between.read_frame

    async def scenario() -> None:
        async with Hosts(lambda _request: ListTransactionsResponse()) as hosts:

            async def read_nothing(_connection: socket.socket) -> bytes | None:
                await asyncio.get_running_loop().create_future()
                return None

            monkeypatch.setattr(between, "read_frame", read_nothing)
            large = remote_transactions.ListTransactionsRequest(state_filters=[], producer_id_filters=[1] * (2 << 20))
            stuck = [asyncio.create_task(hosts.peers.request(3, large, 1, 900)) for _ in range(3)]
            while not (known := hosts.peers._connections.get(3)) or not known.writing.locked():
                await asyncio.sleep(0.001)
            monkeypatch.setattr(between, "read_frame", read_frame)
            hosts.broker.metadata.apply(
                messages.BrokersPut(
                    2,
                    [
                        msgspec.structs.replace(one, epoch=one.epoch + 10)
                        for one in hosts.broker.metadata.brokers.values()
                    ],
                    1,
                )
            )
            request = remote_transactions.ListTransactionsRequest(state_filters=[], producer_id_filters=[1])
            assert isinstance(await hosts.peers.request(3, request, 1, 20), ListTransactionsResponse)
            for error in await asyncio.wait_for(asyncio.gather(*stuck, return_exceptions=True), 20):
                assert isinstance(error, PeerError)

    asyncio.run(scenario())


def test_a_connection_that_ended_at_once_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where nobody has used it: whoever wanted it has given up."""

    async def scenario() -> None:
        async with Hosts(lambda _request: ListTransactionsResponse()) as hosts:

            async def ended(_connection: socket.socket) -> bytes | None:
                return None

            request = remote_transactions.ListTransactionsRequest(state_filters=[], producer_id_filters=[1])
            with monkeypatch.context() as patch:
                patch.setattr(peers, "read_frame", ended)
                given_up = asyncio.create_task(hosts.peers.request(3, request, 1, 20))
                while not hosts.peers._connecting:
                    await asyncio.sleep(0)
                given_up.cancel()
                while hosts.peers._connecting:
                    await asyncio.sleep(0.001)
            assert isinstance(await hosts.peers.request(3, request, 1, 20), ListTransactionsResponse)

    asyncio.run(scenario())


def test_a_host_with_another_key_is_not_reached() -> None:
    async def scenario() -> None:
        async with Hosts(lambda _request: ListTransactionsResponse()) as hosts:
            stranger = Peers(hosts.broker.metadata, NODE, b"quite another secret")
            with pytest.raises(PeerError):
                await stranger.request(3, remote_transactions.ListTransactionsRequest(), 1, 10)
            assert hosts.asked == []
            with pytest.raises(PeerError, match="not registered"):
                await hosts.peers.request(9, remote_transactions.ListTransactionsRequest(), 1, 10)

    asyncio.run(scenario())


def test_a_host_of_no_name_is_not_reached() -> None:
    async def scenario() -> None:
        async with Hosts(lambda _request: ListTransactionsResponse()) as hosts:
            brokers = hosts.broker.metadata.brokers
            # what no resolver can be asked for
            brokers[3] = msgspec.structs.replace(brokers[3], inter_broker_host="a..b")
            with pytest.raises(PeerError, match="a..b is no name of a host"):
                await hosts.peers.request(3, remote_transactions.ListTransactionsRequest(), 1, 10)

    asyncio.run(scenario())


def test_a_worker_gets_the_socket_that_is_meant_for_it() -> None:
    async def scenario() -> None:
        async with Hosts(None) as hosts:
            side = handshake.Initiator(
                handshake.derive_key(SECRET, "handshake"),
                "data",
                Identity(2, "d2", "cluster"),
                b"n" * handshake.NONCE_BYTES,
                0,
            )
            loop = asyncio.get_running_loop()
            connection = socket.socket()
            connection.setblocking(False)
            await loop.sock_connect(connection, hosts.listener.getsockname())
            await loop.sock_sendall(connection, side.opening())
            await between.shake(side, connection)
            await loop.sock_sendall(connection, b"what follows is the worker's")
            hosts.worker.settimeout(10)
            packet, descriptors, _, _ = await loop.run_in_executor(None, socket.recv_fds, hosts.worker, 100, 1)
            assert between.PACKET.unpack(packet)[2] == between.FLAG_PEER and between.PACKET.unpack(packet)[-1] == 2
            with socket.socket(fileno=descriptors[0]) as taken:
                taken.settimeout(10)
                assert await loop.run_in_executor(None, taken.recv, 100) == b"what follows is the worker's"
            connection.close()

    asyncio.run(scenario())


# -- checks of transactions ------------------------------------------------------------------------


class LocalCoordinator:
    topic = TRANSACTION_STATE.name

    def __init__(self, place: int) -> None:
        self.place = place
        self.asked: list[object] = []

    def partition_for(self, name: str) -> int:
        return self.place

    async def request(self, name: str, make_event, timeout_s=None) -> object:
        self.asked.append(make_event(1))
        return 0


class Remote:
    def __init__(self, answer) -> None:
        self.answer, self.asked = answer, []

    async def request(self, node_id: int, request: object, version: int, timeout_s: float) -> object:
        self.asked.append((node_id, request))
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


def test_a_transaction_s_coordinator_is_asked_wherever_it_is() -> None:
    broker = made(topic(partition(0, (2, 3)), partition(1, (3, 2)), name="__transaction_state"))
    asked = (("a", 0), ("b", 4))

    async def scenario() -> None:
        here = RoutedCoordinator(broker, LocalCoordinator(0), Remote(None))
        assert await here.request("id", lambda number: AddPartitions(number, 5, 1, asked)) == 0
        remote = Remote(transaction_errors(("a", 0, 0), ("b", 4, int(ErrorCode.INVALID_TXN_STATE))))
        there = RoutedCoordinator(broker, LocalCoordinator(1), remote)
        assert await there.request("id", lambda number: VerifyPartitions(number, 5, 1, asked)) == (
            0,
            ErrorCode.INVALID_TXN_STATE,
        )
        assert (
            await there.request("id", lambda number: AddPartitions(number, 5, 1, asked, 2))
            == ErrorCode.INVALID_TXN_STATE
        )
        assert [(node, request.transactions[0].verify_only) for node, request in remote.asked] == [
            (3, True),
            (3, False),
        ]
        remote.answer = PeerError("gone")
        with pytest.raises(CoordinatorError) as failed:
            await there.request("id", lambda number: AddPartitions(number, 5, 1, asked, 2))
        assert failed.value.error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE
        remote.answer = AddPartitionsToTxnResponse()  # says nothing of what was asked
        assert (
            await there.request("id", lambda number: AddPartitions(number, 5, 1, asked, 2))
            == ErrorCode.COORDINATOR_NOT_AVAILABLE
        )

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("answer", "expected"),
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
def test_coordinators_elsewhere_are_asked_before_a_hanging_transaction_is_ended(answer, expected) -> None:
    broker, remote = made(brokers=[broker_image(1), broker_image(2), broker_image(3, fenced=True)]), Remote(answer)
    found = asyncio.run(remote_transactions.ongoing_elsewhere(broker, remote, 5))
    assert found == (expected if isinstance(expected, tuple) else (expected, -1, ""))
    assert [node for node, _ in remote.asked] == [1], "a fenced host coordinates nothing"


def test_leaders_of_partitions_elsewhere() -> None:
    broker = made(topic(partition(0, (1, 2)), partition(1, (2, 1)), partition(2, (1, 3), leader=-1)))
    assert [remote_transactions.leader_elsewhere(broker, "t", index) for index in range(4)] == [1, -1, -1, -1]
