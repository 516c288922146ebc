"""Connections between hosts: access, markers to other hosts, sockets for workers."""

import asyncio
import socket

import msgspec
import pytest

from mqd.acceptor.interbroker import client as peers
from mqd.acceptor.interbroker import server as between
from mqd.acceptor.interbroker import transactions as remote_transactions
from mqd.acceptor.interbroker.channel import Channel, authenticate
from mqd.acceptor.interbroker.client import PeerError, Peers
from mqd.acceptor.interbroker.server import InterbrokerServer, admission
from mqd.acceptor.interbroker.transactions import MarkerToWrite, RemoteMarkers
from mqd.acceptor.metadata import Metadata
from mqd.cluster.host import messages
from mqd.cluster.membership import handshake
from mqd.cluster.membership.credentials import Credentials
from mqd.cluster.membership.handshake import Hello, Identity, Refusal
from mqd.coordinator.log import AppendError
from mqd.protocol.api import decode_request, encode_response
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import ListTransactionsResponse, WriteTxnMarkersRequest, WriteTxnMarkersResponse
from mqd.security import pki
from mqd.security.pki import CertifiedKey
from tests.ports import free_port
from tests.recorder import Recorder
from tests.unit.acceptor.test_cluster import NODE, SECRET, broker_image, made, partition, topic
from tests.unit.security.host_files import NOW, authority, host, impose

# -- between hosts ---------------------------------------------------------------------------------


def hello(
    node: int = 3, directory: str = "d3", cluster: str = "cluster", worker: int = 0, purpose: str = "data"
) -> Hello:
    return Hello(1, b"", purpose, Identity(node, directory, cluster), worker)


def test_connections_that_the_listener_between_hosts_accepts() -> None:
    metadata = made().metadata
    assert admission(hello(), metadata, NODE, 2) == Identity(NODE, "d2", "cluster")
    assert admission(hello(worker=-1), metadata, NODE, 2) == Identity(NODE, "d2", "cluster")
    for message, code in (
        (hello(purpose="controller"), handshake.REFUSED_PURPOSE),
        (hello(cluster=""), handshake.REFUSED_CLUSTER),
        (hello(node=2, directory="d2"), handshake.REFUSED_IDENTITY),
        (hello(directory="wiped"), handshake.REFUSED_IDENTITY),
        (hello(node=9), handshake.REFUSED_BUSY),
        (hello(worker=2), handshake.REFUSED_WORKER),
        (hello(worker=-2), handshake.REFUSED_WORKER),
    ):
        response = admission(message, metadata, NODE, 2)
        assert isinstance(response, Refusal) and response.code == code
    assert admission(hello(), Metadata(), NODE, 2).code == handshake.REFUSED_BUSY


class Hosts:
    """Host 2's acceptor sends requests to host 3's over a real socket; `answer` (request, node) ->
    response.
    """

    def __init__(self, response, two: Credentials | None = None, three: Credentials | None = None) -> None:
        self.answer = response
        self.two, self.three = two or Credentials([SECRET]), three or Credentials([SECRET])
        self.requested: list[tuple[object, int]] = []

    async def __aenter__(self) -> "Hosts":
        listener = socket.create_server(("127.0.0.1", free_port()))
        self.handoff, self.worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        brokers = [
            msgspec.structs.replace(broker_image(node), inter_broker_port=listener.getsockname()[1])
            for node in (1, 2, 3)
        ]
        self.broker = made(topic(partition(0, (3, 2)), partition(1, (2, 3))), brokers=brokers)
        self.peers = Peers(self.broker.metadata, NODE, self.two)
        self.between = InterbrokerServer(listener, [self.handoff], self.three, self.broker.metadata, 3, self._serve)
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
        self.requested.append((request, node))
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
            ((request, node),) = hosts.requested
            assert node == NODE and [one.producer_id for one in request.markers] == list(range(10))
            message = [
                (one.transaction_result, one.transaction_version, one.coordinator_epoch, one.leader_epoch)
                for one in request.markers[4:6]
            ]
            assert message == [(True, 0, 7, 4), (False, 2, 7, 4)]

    asyncio.run(scenario())


def test_a_markers_error_is_returned_and_a_lost_host_is_an_unknown_outcome() -> None:
    async def scenario() -> None:
        async with Hosts(markers_answer(int(ErrorCode.INVALID_PRODUCER_EPOCH))) as hosts:
            markers = RemoteMarkers(hosts.peers)
            with pytest.raises(AppendError) as refused:
                await markers.write(3, MarkerToWrite(("t", 0), 1, 1, 7, True, False))
            assert refused.value.error == ErrorCode.INVALID_PRODUCER_EPOCH
            hosts.answer = lambda _request: None  # it closes the connection
            with pytest.raises(AppendError) as lost:
                await markers.write(3, MarkerToWrite(("t", 0), 1, 1, 7, True, False))
            assert lost.value.error == ErrorCode.COORDINATOR_NOT_AVAILABLE and lost.value.is_outcome_unknown
            hosts.answer = markers_answer(0)
            await markers.write(3, MarkerToWrite(("t", 0), 1, 1, 7, True, False))  # over a new connection

    asyncio.run(scenario())


@pytest.mark.parametrize("failure", [ValueError("our own fault"), None])
def test_each_marker_gets_a_result_with_any_fault(failure: Exception | None) -> None:
    """Otherwise the end of the transaction would wait forever. None: a response of another kind."""

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
                isinstance(error, AppendError)
                and error.error == ErrorCode.COORDINATOR_NOT_AVAILABLE
                and error.is_outcome_unknown
            )

    asyncio.run(scenario())


def test_responses_may_be_out_of_order_and_a_hung_host_times_out() -> None:
    async def scenario() -> None:
        held: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        async with Hosts(None) as hosts:
            serve = hosts._serve

            async def slow(frame: bytes, node: int) -> bytes | None:
                if len(hosts.requested) == 0:
                    hosts.requested.append((None, node))
                    await held
                return await serve(frame, node)

            hosts.between._serve, hosts.answer = slow, lambda _request: ListTransactionsResponse()
            request = remote_transactions.ListTransactionsRequest(state_filters=[], producer_id_filters=[1])
            first = asyncio.create_task(hosts.peers.request(3, request, 1, 0.3))
            await asyncio.sleep(0)
            while not hosts.requested:
                await asyncio.sleep(0.001)
            assert isinstance(await hosts.peers.request(3, request, 1, 10), ListTransactionsResponse)
            with pytest.raises(PeerError, match="has not answered"):
                await first
            held.set_result(None)
            assert isinstance(await hosts.peers.request(3, request, 1, 10), ListTransactionsResponse)

    asyncio.run(scenario())


MARKERS_OF_ONE = WriteTxnMarkersRequest(markers=[])


def test_markers_of_a_dead_acceptor_are_not_written_after_its_successors() -> None:
    """A marker delayed by the network arrived later and ended the producer's next transaction."""

    async def scenario() -> None:
        history: list[str] = []
        async with Hosts(markers_answer(0)) as hosts:
            serve, begun = hosts._serve, asyncio.Event()

            async def report(frame: bytes, node: int) -> bytes | None:
                if history:
                    history.append("the successor's")
                    return await serve(frame, node)
                try:
                    history.append("begun")
                    begun.set()
                    return await asyncio.get_running_loop().create_future()
                finally:
                    history.append("given up")

            hosts.between._serve = report
            first = asyncio.create_task(hosts.peers.request(3, MARKERS_OF_ONE, 2, 20))
            await asyncio.wait_for(begun.wait(), 20)
            successor = Peers(hosts.broker.metadata, NODE, Credentials([SECRET]))
            try:
                assert isinstance(await successor.request(3, MARKERS_OF_ONE, 2, 20), WriteTxnMarkersResponse)
                assert history == ["begun", "given up", "the successor's"]
                with pytest.raises(PeerError):  # at once
                    await first
                assert 3 not in hosts.peers._connections and 3 in successor._connections
            finally:
                successor.close()

    asyncio.run(scenario())


def test_markers_over_a_superseded_connection_are_never_read() -> None:
    async def scenario() -> None:
        async with Hosts(
            lambda request: (
                ListTransactionsResponse()
                if isinstance(request, remote_transactions.ListTransactionsRequest)
                else markers_answer(0)(request)
            )
        ) as hosts:
            requested = remote_transactions.ListTransactionsRequest(state_filters=[], producer_id_filters=[1])
            # its first markers are still in flight
            assert isinstance(await hosts.peers.request(3, requested, 1, 20), ListTransactionsResponse)
            successor = Peers(hosts.broker.metadata, NODE, Credentials([SECRET]))
            await successor.request(3, MARKERS_OF_ONE, 2, 20)
            successor.close()
            with pytest.raises(PeerError):
                await hosts.peers.request(3, MARKERS_OF_ONE, 2, 20)
            assert [type(request) for request, _ in hosts.requested] == [
                remote_transactions.ListTransactionsRequest,
                WriteTxnMarkersRequest,
            ]
            await hosts.peers.request(3, MARKERS_OF_ONE, 2, 20)  # over a newer one

    asyncio.run(scenario())


def test_other_requests_use_separate_connections_from_markers() -> None:
    """An acceptor forwards its clients' requests over a separate connection."""

    async def scenario() -> None:
        async with Hosts(
            lambda request: (
                ListTransactionsResponse()
                if isinstance(request, remote_transactions.ListTransactionsRequest)
                else markers_answer(0)(request)
            )
        ) as hosts:
            requested = remote_transactions.ListTransactionsRequest(state_filters=[], producer_id_filters=[1])
            relays = Peers(hosts.broker.metadata, NODE, Credentials([SECRET]))
            try:
                made = set()
                for _ in range(3):
                    await hosts.peers.request(3, MARKERS_OF_ONE, 2, 20)
                    await relays.request(3, requested, 1, 20)
                    made |= {hosts.peers._connections[3], relays._connections[3]}
                assert len(made) == 2
            finally:
                relays.close()

    asyncio.run(scenario())


def test_a_writer_continues_at_once_when_a_stalled_host_reads_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writers used to wait until their timeout, because the next connection got the number of the
    closed one and never received its writable event.
    """
    read_frame = Channel.read_frame

    async def scenario() -> None:
        async with Hosts(lambda _request: ListTransactionsResponse()) as hosts:

            async def read_nothing(_channel: Channel) -> bytes | None:
                await asyncio.get_running_loop().create_future()
                return None

            monkeypatch.setattr(Channel, "read_frame", read_nothing)
            large = remote_transactions.ListTransactionsRequest(state_filters=[], producer_id_filters=[1] * (2 << 20))
            stuck = [asyncio.create_task(hosts.peers.request(3, large, 1, 900)) for _ in range(3)]
            while not (known := hosts.peers._connections.get(3)) or not known.write_lock.locked():
                await asyncio.sleep(0.001)
            monkeypatch.setattr(Channel, "read_frame", read_frame)
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
    """Not even if it was unused because its caller has given up."""

    async def scenario() -> None:
        async with Hosts(lambda _request: ListTransactionsResponse()) as hosts:

            async def ended(_channel: Channel) -> bytes | None:
                return None

            request = remote_transactions.ListTransactionsRequest(state_filters=[], producer_id_filters=[1])
            with monkeypatch.context() as patch:
                patch.setattr(Channel, "read_frame", ended)
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
            stranger = Peers(hosts.broker.metadata, NODE, Credentials([b"quite another secret"]))
            with pytest.raises(PeerError):
                await stranger.request(3, remote_transactions.ListTransactionsRequest(), 1, 10)
            assert hosts.requested == []
            with pytest.raises(PeerError, match="not registered"):
                await hosts.peers.request(9, remote_transactions.ListTransactionsRequest(), 1, 10)

    asyncio.run(scenario())


def test_an_unresolvable_host_is_not_reached() -> None:
    async def scenario() -> None:
        async with Hosts(lambda _request: ListTransactionsResponse()) as hosts:
            brokers = hosts.broker.metadata.brokers
            # no resolver accepts this name
            brokers[3] = msgspec.structs.replace(brokers[3], inter_broker_host="a..b")
            with pytest.raises(PeerError, match="a..b is not a host name"):
                await hosts.peers.request(3, remote_transactions.ListTransactionsRequest(), 1, 10)

    asyncio.run(scenario())


# -- TLS -------------------------------------------------------------------------------------------


def secured(tmp_path, node: int, pair: CertifiedKey | None = None) -> Credentials:
    return Credentials([SECRET], host(tmp_path, node, pair=pair))


def transactions(names: int) -> ListTransactionsResponse:
    """With names that a reader of the wire would recognise."""
    state = ListTransactionsResponse.TransactionState
    found = [state(transactional_id="MARKER" * 1000, producer_id=1, transaction_state="Ongoing") for _ in range(names)]
    return ListTransactionsResponse(transaction_states=found)


def test_requests_between_secured_hosts_are_encrypted(tmp_path) -> None:
    async def scenario() -> None:
        two, three = secured(tmp_path, NODE), secured(tmp_path, 3)
        async with Hosts(lambda request: transactions(len(request.producer_id_filters)), two, three) as hosts:
            with Recorder(hosts.listener.getsockname()) as wire:
                brokers = hosts.broker.metadata.brokers
                brokers[3] = msgspec.structs.replace(brokers[3], inter_broker_port=wire.address[1])
                requests = [
                    hosts.peers.request(
                        3,
                        remote_transactions.ListTransactionsRequest(
                            state_filters=["MARKER" * 1000], producer_id_filters=[1] * count
                        ),
                        1,
                        20,
                    )
                    for count in (1, 300, 0, 2)
                ]
                responses = await asyncio.gather(*requests)
                assert [len(response.transaction_states) for response in responses] == [1, 300, 0, 2]
                assert wire.count == 1
                hosts.peers.close()
            seen = b"".join(wire.seen)
            assert len(seen) > 1_800_000 and b"MARKER" not in seen and b"MQDP" in seen

    asyncio.run(scenario())


@pytest.mark.parametrize("thief", [NODE, 3])
def test_an_acceptor_with_another_hosts_certificate_is_refused(tmp_path, thief, caplog) -> None:
    stolen = pki.issue_host(authority(), 1, NOW)

    async def scenario() -> None:
        two, three = (secured(tmp_path, node, stolen if node == thief else None) for node in (NODE, 3))
        async with Hosts(lambda _request: ListTransactionsResponse(), two, three) as hosts:
            request = remote_transactions.ListTransactionsRequest()
            with pytest.raises(
                PeerError, match=f"node {thief} has a certificate of mqd://node/1; install on each host"
            ):
                await hosts.peers.request(3, request, 1, 20)
            assert hosts.requested == []
            right = pki.issue_host(authority(), thief, NOW)
            impose((two if thief == NODE else three).host, tmp_path / str(thief), right)
            await asyncio.sleep(peers.RETRY_S * 1.1)
            assert isinstance(await hosts.peers.request(3, request, 1, 20), ListTransactionsResponse)

    asyncio.run(scenario())
    logged = [record for record in caplog.records if "inter-broker listener is closed" in record.getMessage()]
    assert len(logged) == 1


@pytest.mark.parametrize("tls", [False, True])
def test_each_worker_gets_its_own_socket(tmp_path, tls: bool) -> None:
    async def scenario() -> None:
        async with Hosts(None, three=secured(tmp_path, 3) if tls else None) as hosts:
            side = handshake.Initiator(
                handshake.derive_key(SECRET, "handshake"),
                "data",
                Identity(2, "d2", "cluster"),
                b"n" * handshake.NONCE_BYTES,
                0,
                handshake.TLS_ALLOWED,
            )
            loop = asyncio.get_running_loop()
            connection = socket.socket()
            connection.setblocking(False)
            await loop.sock_connect(connection, hosts.listener.getsockname())
            await loop.sock_sendall(connection, side.opening())
            await authenticate(side, connection)
            await loop.sock_sendall(connection, b"what follows is the worker's")
            hosts.worker.settimeout(10)
            packet, descriptors, _, _ = await loop.run_in_executor(None, socket.recv_fds, hosts.worker, 100, 1)
            flags = between.FLAG_PEER | between.FLAG_TLS * tls
            assert between.PACKET.unpack(packet)[2] == flags and between.PACKET.unpack(packet)[-1] == 2
            assert side.uses_tls is tls
            with socket.socket(fileno=descriptors[0]) as taken:
                taken.settimeout(10)
                assert await loop.run_in_executor(None, taken.recv, 100) == b"what follows is the worker's"
            connection.close()

    asyncio.run(scenario())
