"""Requests that one host's acceptor forwards to another on behalf of a client: their destinations
and responses, and that no client gains rights by it.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import msgspec
import pytest

from mqd.acceptor.broker_state import LISTENER_LOCAL, Origin
from mqd.acceptor.interbroker.client import PeerError
from mqd.acceptor.local import relay as relaying
from mqd.acceptor.local.relay import ENVELOPE, ClientIdentity, Relaying
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.native import PrincipalKind
from mqd.protocol.api import decode_request, decode_response, encode_request, encode_response
from mqd.protocol.messages import (
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    EnvelopeRequest,
    EnvelopeResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    InitProducerIdRequest,
    ListOffsetsRequest,
    ListOffsetsResponse,
    MetadataRequest,
    OffsetFetchRequest,
    TxnOffsetCommitRequest,
)

LOCAL = Origin(
    LISTENER_LOCAL, peer_ip="127.0.0.1", uid=1000, pid=77, principal="User:alice", principal_kind=PrincipalKind.LOCAL
)
HEARTBEAT, LIST_OFFSETS = 12, 2


class FakeCoordinator:
    """Names that begin with a digit belong to the host of that number."""

    topic = "__internal"

    def partition_for(self, name: str) -> int:
        if name == "none":
            raise CoordinatorError(15)
        return int(name[0])


class FakeBroker:
    node_id = 1
    coordinators = SimpleNamespace(groups=FakeCoordinator(), transactions=FakeCoordinator())
    metadata = SimpleNamespace(brokers={1: SimpleNamespace(inter_broker_host="10.1.2.3")})

    def partition_of(self, topic: str, index: int) -> object:
        """Led by the host of the partition's number; 8: no leader; 9: unknown."""
        return None if index == 9 else SimpleNamespace(leader=-1 if index == 8 else index)


class FakePeers:
    def __init__(self) -> None:
        self.requested: list[tuple[int, EnvelopeRequest, float]] = []
        self.answer: object = None  # of EnvelopeRequest -> EnvelopeResponse

    async def request(self, node_id: int, request: EnvelopeRequest, version: int, timeout_s: float) -> object:
        assert version == 0
        self.requested.append((node_id, request, timeout_s))
        response = self.answer(request)
        if isinstance(response, Exception):
            raise response
        return response


def relayed(request: object, version: int, origin: Origin = LOCAL, answer: object = None) -> tuple[FakePeers, object]:
    peers = FakePeers()
    peers.answer = answer or (
        lambda envelope: EnvelopeResponse(response_data=bytes(envelope.request_data)[4:8] + b"the answer", error_code=0)
    )
    frame = encode_request(request, version, 4711, "app")
    header, decoded = decode_request(frame)

    async def respond_locally(part: object) -> object:
        requests = [(topic.name, one.partition_index) for topic in part.topics for one in topic.partitions]
        return ListOffsetsResponse(
            topics=[
                ListOffsetsResponse.TopicResponse(name=name, partitions=[part_of(index, 0, 100 + index)])
                for name, index in requests
            ]
        )

    return peers, asyncio.run(
        Relaying(FakeBroker(), FakeBroker.coordinators, peers).respond(origin, header, decoded, frame, respond_locally)
    )  # type: ignore[arg-type]


def part_of(index: int, error: int, offset: int) -> object:
    return ListOffsetsResponse.PartitionResponse(
        partition_index=index, error_code=error, timestamp=-1, offset=offset, leader_epoch=0
    )


REQUESTS = [
    (HeartbeatRequest(group_id="2group"), 4),
    (OffsetFetchRequest(group_id="2group"), 5),
    (OffsetFetchRequest(groups=[OffsetFetchRequest.Group(group_id="2group")]), 8),
    (TxnOffsetCommitRequest(transactional_id="1id", group_id="2group"), 3),
    (InitProducerIdRequest(transactional_id="2id"), 4),
    (AddPartitionsToTxnRequest(v3_and_below_transactional_id="2id"), 3),
    (EndTxnRequest(transactional_id="2id"), 3),
]


@pytest.mark.parametrize(("request_", "version"), REQUESTS, ids=lambda one: type(one).__name__)
def test_requests_for_another_coordinator_are_forwarded_with_their_principal(request_: object, version: int) -> None:
    peers, response = relayed(request_, version)
    assert response == (4711).to_bytes(4, "big") + b"the answer"
    ((node_id, envelope, _),) = peers.requested
    assert node_id == 2 and decode_request(bytes(envelope.request_data))[1] == request_
    principal = msgspec.msgpack.decode(envelope.request_principal, type=ClientIdentity)
    assert principal == ClientIdentity(1000, 77, "User:alice", PrincipalKind.LOCAL, "127.0.0.1")
    assert bytes(envelope.client_host_address) == bytes([10, 1, 2, 3])


@pytest.mark.parametrize(
    ("request_", "version", "origin"),
    [
        (HeartbeatRequest(group_id="1group"), 4, LOCAL),  # coordinated here
        (HeartbeatRequest(group_id="8group"), 4, LOCAL),  # by no host
        (HeartbeatRequest(group_id="none"), 4, LOCAL),  # there are no groups yet
        (HeartbeatRequest(group_id="2group"), 4, Origin(0)),  # a TCP client goes there itself
        (HeartbeatRequest(group_id="2group"), 4, Origin(peer_node=3)),  # a request is forwarded only once
        (
            OffsetFetchRequest(
                groups=[OffsetFetchRequest.Group(group_id="2a"), OffsetFetchRequest.Group(group_id="3b")]
            ),
            8,
            LOCAL,
        ),
        (InitProducerIdRequest(transactional_id=None), 4, LOCAL),
        (AddPartitionsToTxnRequest(transactions=[]), 5, LOCAL),  # only hosts send this version
        (MetadataRequest(topics=None), 12, LOCAL),
    ],
)
def test_all_other_requests_are_handled_here(request_: object, version: int, origin: Origin) -> None:
    peers, response = relayed(request_, version, origin)
    assert response is None and not peers.requested


@pytest.mark.parametrize(
    "response",
    [
        lambda _: PeerError("it does not answer"),
        lambda _: EnvelopeResponse(response_data=None, error_code=42),
        lambda _: EnvelopeResponse(response_data=b"", error_code=0),
        lambda _: EnvelopeResponse(response_data=(4712).to_bytes(4, "big") + b"to another", error_code=0),
    ],
)
def test_a_request_is_handled_here_when_the_other_host_does_not_respond(response: object) -> None:
    assert relayed(HeartbeatRequest(group_id="2group"), 4, answer=response)[1] is None


# -- ListOffsets -----------------------------------------------------------------------------------


def listing(*indexes: int) -> ListOffsetsRequest:
    Topic, Partition = ListOffsetsRequest.Topic, ListOffsetsRequest.Partition
    return ListOffsetsRequest(
        isolation_level=1,
        topics=[Topic(name="t", partitions=[Partition(partition_index=index, timestamp=-1) for index in indexes])],
    )


def test_offsets_are_reported_by_each_leader() -> None:
    def answer(envelope: EnvelopeRequest) -> object:
        header, requested = decode_request(bytes(envelope.request_data))
        assert requested.isolation_level == 1
        if any(one.partition_index == 3 for one in requested.topics[0].partitions):
            return PeerError("host 3 is away")
        topic = ListOffsetsResponse.TopicResponse(
            name="t", partitions=[part_of(one.partition_index, 0, 1000) for one in requested.topics[0].partitions]
        )
        return EnvelopeResponse(
            response_data=encode_response(header, ListOffsetsResponse(throttle_time_ms=5, topics=[topic])), error_code=0
        )

    peers, response = relayed(listing(2, 1, 3, 2, 9), 8, answer=answer)
    assert sorted(node for node, _, _ in peers.requested) == [2, 3]
    assert response.throttle_time_ms == 5
    assert [(one.partition_index, one.offset) for one in response.topics[0].partitions] == [
        (2, 1000),
        (1, 101),
        (3, 103),
        (2, 1000),
        (9, 109),
    ]


def test_offsets_of_own_partitions_are_reported_here() -> None:
    assert relayed(listing(1, 8, 9), 8)[1] is None


# -- the other end ---------------------------------------------------------------------------------


def served(envelope: EnvelopeRequest | bytes) -> tuple[list[tuple[Origin, bytes]], bytes | None]:
    requests: list[tuple[Origin, bytes]] = []

    async def answer(origin: Origin, frame: bytes) -> bytes | None:
        requests.append((origin, frame))
        header, request = decode_request(frame)
        return encode_response(header, HeartbeatResponse(error_code=0)) if header.api_key == HEARTBEAT else None

    frame = envelope if isinstance(envelope, bytes) else encode_request(envelope, 0, 99)
    return requests, asyncio.run(relaying.serve(frame, answer))


def envelope_of(
    request: object,
    version: int,
    principal: bytes = msgspec.msgpack.encode(ClientIdentity(5, 6, "User:bob", PrincipalKind.LOCAL, "127.0.0.1")),
    address: bytes = bytes([10, 0, 0, 9]),
) -> EnvelopeRequest:
    return EnvelopeRequest(
        request_data=encode_request(request, version, 7, "app"),
        request_principal=principal,
        client_host_address=address,
    )


def test_a_forwarded_request_has_the_clients_rights() -> None:
    requested, response = served(envelope_of(HeartbeatRequest(group_id="g"), 4))
    ((origin, _),) = requested
    assert (origin.peer_node, origin.listener_id, origin.uid, origin.pid) == (-1, 0, 5, 6)
    assert origin.peer_ip == "127.0.0.1", "authorized by the address where it is attached"
    assert origin.reported_ip == "10.0.0.9", "reported with its own host's address"
    assert (origin.principal, origin.principal_kind) == ("User:bob", PrincipalKind.LOCAL)
    assert response is not None
    number, answer = decode_response(response, ENVELOPE, 0)
    assert number == 99 and answer.error_code == 0
    assert decode_response(bytes(answer.response_data), HEARTBEAT, 4) == (7, HeartbeatResponse(error_code=0))


def test_a_hosts_own_request_is_trusted_and_a_clients_is_not() -> None:
    principal = msgspec.msgpack.encode(ClientIdentity(-1, 0, is_host=True))
    for envelope, expected in (
        (envelope_of(EndTxnRequest(transactional_id="t"), 3, principal), True),
        (envelope_of(EndTxnRequest(transactional_id="t"), 3), False),
    ):
        ((origin, _),) = served(envelope)[0]
        assert origin.is_trusted is expected and origin.peer_node == -1


@pytest.mark.parametrize(
    ("request_", "version"),
    [
        (AddPartitionsToTxnRequest(transactions=[]), 5),
        (MetadataRequest(topics=None), 12),
        (EnvelopeRequest(request_data=b""), 0),
    ],
)
def test_clients_cannot_send_envelopes_of_hosts(request_: object, version: int) -> None:
    requested, response = served(envelope_of(request_, version))
    assert not requested and response is not None and decode_response(response, ENVELOPE, 0)[1].error_code == 42


@pytest.mark.parametrize("inner", [b"", b"\0", b"\0\x0c\0"])
def test_malformed_requests_in_an_envelope_are_refused(inner: bytes) -> None:
    requested, response = served(
        EnvelopeRequest(
            request_data=inner, request_principal=msgspec.msgpack.encode(ClientIdentity(5, 6)), client_host_address=b""
        )
    )
    assert not requested and response is not None and decode_response(response, ENVELOPE, 0)[1].error_code == 42


def test_malformed_envelopes_end_the_connection() -> None:
    whole = encode_request(envelope_of(HeartbeatRequest(group_id="g"), 4), 0, 99)
    for cut in range(len(whole)):
        assert served(whole[:cut])[1] is None
    assert served(whole + b"more")[1] is None
    for principal in (b"", b"\xc1", b"\x93\1\2\3", msgspec.msgpack.encode({"uid": "root", "pid": 1})):
        assert served(envelope_of(HeartbeatRequest(group_id="g"), 4, principal))[1] is None
