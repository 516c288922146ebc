"""Relays those requests of local clients that another host must answer: requests to coordinators,
and ListOffsets of partitions that other hosts lead. A client attached through shared memory knows only
this broker, so this broker sends the request on its behalf.

    entry host     respond(): the coordinator of the group or transactional id is on another host, so
                   an Envelope (KIP-590) with the request's frame and the client's identity goes to
                   that host's acceptor
    other host     serve(): the request is answered as if its client had connected here; requests
                   reserved for hosts are refused. The Envelope's response holds the frame of
                   the client's response

Invariants
    E1  a client gains no rights by being relayed: a request in an Envelope has the rights of its
        client, not those of the host that sent it, and is checked with the address from which the
        client reached that host. Only RELAYED_APIS APIs are accepted. A host marks its own requests
        with `is_host`
    E2  when the other host is unreachable or does not respond, this host responds NOT_COORDINATOR
        or similar, and the client retries. A request may therefore be carried out twice, which is
        safe for each of these APIs (Kafka's clients do the same after a lost connection)
    E3  ListOffsets is split by leaders; each part is answered by its leader, or refused by this host
Bounds: those of mqd/acceptor/interbroker/client.py and server.py. The connections are separate from
those for transaction markers, which must not wait behind a JoinGroup. Concurrency: the event loop's
thread.
"""

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from mqd.acceptor.broker_state import LISTENER_LOCAL, BrokerState, Origin
from mqd.acceptor.coordinators import Coordinators
from mqd.acceptor.interbroker.client import PeerError, Peers
from mqd.acceptor.interbroker.transactions import remote_leader_id
from mqd.base import logging
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.coordinator.runtime import Coordinator
from mqd.native import PrincipalKind
from mqd.protocol import codec
from mqd.protocol.api import decode_response, encode_request
from mqd.protocol.errors import ErrorCode, ProtocolError
from mqd.protocol.headers import MEMBER_WAIT_APIS, RequestHeader, encode_response_header
from mqd.protocol.messages import EnvelopeRequest, EnvelopeResponse, ListOffsetsRequest, ListOffsetsResponse
from mqd.security.principal import ANONYMOUS

ENVELOPE = 58
LIST_OFFSETS, OFFSET_FETCH, INIT_PRODUCER_ID, ADD_PARTITIONS_TO_TXN = 2, 9, 22, 24
# APIs that name one group, in group_id; OffsetFetch may name several
GROUP_APIS = frozenset((8, 11, 12, 13, 14, 28, 68))
# APIs that always name a transactional id, in transactional_id
TRANSACTION_APIS = frozenset((25, 26))
RELAYED_APIS = GROUP_APIS | TRANSACTION_APIS | {LIST_OFFSETS, OFFSET_FETCH, INIT_PRODUCER_ID, ADD_PARTITIONS_TO_TXN}
WAIT_S_MAX, TIMEOUT_S = 900.0, 30.0
ADD_PARTITIONS_CLIENT_VERSION_MAX = 3  # versions from 4 on are sent only by hosts
_FIXED_BYTES = 10  # bytes of a request header before the client id

log = logging.get("acceptor.relaying")


class ClientIdentity(msgspec.Struct, frozen=True):
    """The identity of a relayed client: uid and pid as reported by the entry host's kernel, and the
    principal and address that the entry host uses for its access checks. `is_host`: the request is
    the entry host's own, not a client's.
    """

    uid: int
    pid: int
    principal: str = ANONYMOUS
    principal_kind: int = PrincipalKind.ANONYMOUS
    host: str = ""
    is_host: bool = False


class Relaying:
    def __init__(self, broker: BrokerState, coordinators: Coordinators, peers: Peers) -> None:
        self._broker = broker
        self._coordinators = coordinators
        self._peers = peers

    async def respond(
        self,
        origin: Origin,
        header: RequestHeader,
        request: object,
        frame: bytes,
        respond_locally: Callable[[object], Awaitable[object | None]],
    ) -> bytes | object | None:
        """Returns the other host's response frame or, for ListOffsets, the response itself; None if
        this host must answer. `respond_locally(request)` returns this host's response.
        """
        if origin.listener_id != LISTENER_LOCAL or header.api_key not in RELAYED_APIS:
            return None
        if header.api_key == LIST_OFFSETS:
            return await self._list_offsets(origin, header, request, respond_locally)
        node_id = self._coordinator_of(header, request)
        if node_id < 0:
            return None
        try:
            return await self._request(node_id, origin, header, frame)
        except PeerError as error:
            log.info(
                "a coordinator on another host cannot be reached; the client retries", node=node_id, reason=str(error)
            )
            return None

    # -- coordinators ------------------------------------------------------------------------------

    def _coordinator_of(self, header: RequestHeader, request: object) -> int:
        """Returns the node id of the other host that coordinates all requested names; -1 if this host
        coordinates one of them, if different hosts do, or if no host does.
        """
        names = coordinated_names(header, request)
        is_for_groups = header.api_key in GROUP_APIS or header.api_key == OFFSET_FETCH
        coordinator = self._coordinators.groups if is_for_groups else self._coordinators.transactions
        coordinator_ids = (
            {self._remote_leader_id(coordinator, name) for name in names} if coordinator is not None else set()
        )
        return coordinator_ids.pop() if len(coordinator_ids) == 1 else -1

    def _remote_leader_id(self, coordinator: Coordinator, name: str) -> int:
        try:
            return remote_leader_id(self._broker, coordinator.topic, coordinator.partition_for(name))
        except CoordinatorError:
            return -1  # its internal topic does not exist yet

    async def _request(self, node_id: int, origin: Origin, header: RequestHeader, frame: bytes) -> bytes:
        """Sends the request in an Envelope and returns the response's frame. Raises PeerError."""
        identity = msgspec.msgpack.encode(
            ClientIdentity(
                origin.uid, origin.pid, origin.principal, origin.principal_kind, origin.peer_ip, origin.is_host
            )
        )
        envelope = EnvelopeRequest(
            request_data=frame, request_principal=identity, client_host_address=own_address(self._broker)
        )
        response = await self._peers.request(
            node_id, envelope, 0, WAIT_S_MAX if header.api_key in MEMBER_WAIT_APIS else TIMEOUT_S
        )
        assert isinstance(response, EnvelopeResponse)
        if response.error_code or not response.response_data:
            raise PeerError(f"host {node_id} refuses a client's relayed request: error {response.error_code}")
        if response.response_data[:4] != header.correlation_id.to_bytes(4, "big", signed=True):
            raise PeerError(f"host {node_id} sent the response to another request")
        return bytes(response.response_data)

    # -- ListOffsets -------------------------------------------------------------------------------

    async def _list_offsets(
        self,
        origin: Origin,
        header: RequestHeader,
        request: object,
        respond_locally: Callable[[object], Awaitable[object | None]],
    ) -> object | None:
        assert isinstance(request, ListOffsetsRequest)
        parts = split_by_leader(self._broker, request)
        if set(parts) <= {-1}:
            return None
        responses = await asyncio.gather(
            *(self._list_part(node_id, origin, header, part, respond_locally) for node_id, part in parts.items())
        )
        partition_responses = {
            (topic.name, partition.partition_index): partition
            for response in responses
            for topic in response.topics
            for partition in topic.partitions
        }
        return ListOffsetsResponse(
            throttle_time_ms=max(response.throttle_time_ms for response in responses),
            topics=[
                ListOffsetsResponse.TopicResponse(
                    name=topic.name,
                    partitions=[
                        partition_responses.get((topic.name, partition.partition_index))
                        or _not_leader_response(partition.partition_index)
                        for partition in topic.partitions
                    ],
                )
                for topic in request.topics
            ],
        )

    async def _list_part(
        self,
        node_id: int,
        origin: Origin,
        header: RequestHeader,
        part: ListOffsetsRequest,
        respond_locally: Callable[[object], Awaitable[object | None]],
    ) -> ListOffsetsResponse:
        if node_id >= 0:
            try:
                frame = encode_request(part, header.api_version, header.correlation_id, header.client_id)
                return decode_response(
                    await self._request(node_id, origin, header, frame), LIST_OFFSETS, header.api_version
                )[1]
            except (PeerError, ProtocolError) as error:
                log.info(
                    "a leader on another host cannot be reached for offsets; the client retries",
                    node=node_id,
                    reason=str(error),
                )
        response = await respond_locally(part)
        assert isinstance(response, ListOffsetsResponse)
        return response


def _not_leader_response(index: int) -> ListOffsetsResponse.PartitionResponse:
    return ListOffsetsResponse.PartitionResponse(
        partition_index=index,
        error_code=int(ErrorCode.NOT_LEADER_OR_FOLLOWER),
        timestamp=-1,
        offset=-1,
        leader_epoch=-1,
    )


def split_by_leader(broker: BrokerState, request: ListOffsetsRequest) -> dict[int, ListOffsetsRequest]:
    """Splits the request by leader. Returns node id of another host -> the part with the partitions
    that it leads. Key -1: the part with the partitions that this host leads, that have no leader,
    or that do not exist.
    """
    parts: dict[int, dict[str, list[ListOffsetsRequest.Partition]]] = {}
    for topic in request.topics:
        for partition in topic.partitions:
            parts.setdefault(remote_leader_id(broker, topic.name, partition.partition_index), {}).setdefault(
                topic.name, []
            ).append(partition)
    return {
        node_id: msgspec.structs.replace(
            request,
            topics=[ListOffsetsRequest.Topic(name=name, partitions=partitions) for name, partitions in topics.items()],
        )
        for node_id, topics in parts.items()
    }


def coordinated_names(header: RequestHeader, request: Any) -> list[str]:
    """The groups, or the transactional id, that the request names."""
    key = header.api_key
    if key == OFFSET_FETCH and request.groups:
        return [group.group_id for group in request.groups]
    if key in GROUP_APIS or key == OFFSET_FETCH:
        return [request.group_id]
    if key == ADD_PARTITIONS_TO_TXN:
        return (
            [request.v3_and_below_transactional_id] if header.api_version <= ADD_PARTITIONS_CLIENT_VERSION_MAX else []
        )
    name = request.transactional_id
    return [name] if name else []


def own_address(broker: BrokerState) -> bytes:
    """Returns this host's address, packed; descriptions of group members show it as the client's
    host. Empty if a host name is configured instead of an address.
    """
    own = broker.metadata.brokers.get(broker.node_id)
    try:
        return ipaddress.ip_address(own.inter_broker_host if own is not None else "").packed
    except ValueError:
        return b""


# -- the other host's side -------------------------------------------------------------------------


def _decode_envelope(frame: bytes) -> tuple[int, EnvelopeRequest]:
    """(correlation id, the Envelope). Raises ProtocolError."""
    if len(frame) < _FIXED_BYTES:
        raise ProtocolError("cut off", "Envelope header", position=len(frame))
    position = _FIXED_BYTES + max(int.from_bytes(frame[8:_FIXED_BYTES], "big", signed=True), 0)
    if position >= len(frame) or frame[position] or frame[2:4] != b"\0\0":
        raise ProtocolError(
            "has an unsupported version or tagged fields", "Envelope header", position=min(position, len(frame))
        )
    request = codec.decode(EnvelopeRequest, 0, frame, position + 1)
    return int.from_bytes(frame[4:8], "big", signed=True), request


async def serve(frame: bytes, respond: Callable[[Origin, bytes], Awaitable[bytes | None]]) -> bytes | None:
    """Serves a client's request that another host has relayed. Returns the response's frame, or None
    if the connection must be closed. `respond(origin, frame)` returns the response's frame.
    """
    try:
        correlation_id, envelope = _decode_envelope(frame)
        identity = msgspec.msgpack.decode(envelope.request_principal or b"", type=ClientIdentity)
    except (ProtocolError, msgspec.MsgspecError) as error:
        log.warning("another host sent an invalid Envelope; the connection is closed", reason=str(error))
        return None
    client_frame = bytes(envelope.request_data or b"")
    is_allowed = len(client_frame) >= 4 and may_be_relayed(
        int.from_bytes(client_frame[:2], "big"), int.from_bytes(client_frame[2:4], "big")
    )
    reported_ip = _ip_text(envelope.client_host_address)
    client = Origin(
        peer_ip=identity.host or reported_ip,
        reported_ip=reported_ip,
        uid=identity.uid,
        pid=identity.pid,
        principal=identity.principal,
        principal_kind=identity.principal_kind,
        is_host=identity.is_host,
    )
    response = await respond(client, client_frame) if is_allowed else None
    error_code = 0 if response is not None else int(ErrorCode.INVALID_REQUEST)
    out = bytearray(encode_response_header(ENVELOPE, 0, correlation_id))
    codec.encode_into(out, EnvelopeResponse(response_data=response, error_code=error_code), 0)
    return bytes(out)


def may_be_relayed(api_key: int, version: int) -> bool:
    """Whether E1 permits the request."""
    return api_key in RELAYED_APIS and (
        api_key != ADD_PARTITIONS_TO_TXN or version <= ADD_PARTITIONS_CLIENT_VERSION_MAX
    )


def _ip_text(packed: bytes) -> str:
    try:
        return str(ipaddress.ip_address(bytes(packed)))
    except ValueError:
        return ""
