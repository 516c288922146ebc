"""Decodes a request's frame, calls its handler, and encodes the response.

HANDLERS names the module that handles each supported API in this process. A module is imported on
first use. An API that is not in the table is not advertised. An unknown API or version ends the
connection (except ApiVersions, which returns error 35 in a body of version 0, KIP-511).
"""

import time
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import msgspec

from mqd.acceptor import failures, rights, throttle
from mqd.acceptor.broker import Broker, CloseConnection, Context
from mqd.acceptor.broker_state import Origin
from mqd.base import logging
from mqd.native import PrincipalKind
from mqd.protocol.api import decode_request, decode_response, encode_request, encode_response
from mqd.protocol.errors import ProtocolError, TrailingBytes
from mqd.protocol.headers import API_VERSIONS_KEY, SUPPORTED, RequestHeader, UnsupportedVersion

HANDLERS: dict[int, str] = {
    0: "records.produce",
    1: "records.fetch",
    2: "records.list_offsets",
    3: "topics.metadata",
    8: "groups.offset_commit",
    9: "groups.offset_fetch",
    10: "groups.find_coordinator",
    11: "groups.join_group",
    12: "groups.heartbeat",
    13: "groups.leave_group",
    14: "groups.sync_group",
    15: "groups.describe_groups",
    16: "groups.list_groups",
    17: "security.sasl",
    18: "cluster.api_versions",
    19: "topics.create_topics",
    20: "topics.delete_topics",
    21: "records.delete_records",
    22: "transactions.init_producer_id",
    23: "records.offset_for_leader_epoch",
    24: "transactions.add_partitions_to_txn",
    25: "transactions.add_offsets_to_txn",
    26: "transactions.end_txn",
    27: "transactions.write_txn_markers",
    28: "transactions.txn_offset_commit",
    29: "security.acls",
    30: "security.acls",
    31: "security.acls",
    32: "configs.describe_configs",
    33: "configs.alter_configs",
    34: "cluster.alter_replica_log_dirs",
    35: "cluster.describe_log_dirs",
    36: "security.sasl",
    37: "topics.create_partitions",
    38: "security.delegation_tokens",
    39: "security.delegation_tokens",
    40: "security.delegation_tokens",
    41: "security.delegation_tokens",
    42: "groups.delete_groups",
    43: "cluster.elect_leaders",
    44: "configs.incremental_alter_configs",
    45: "cluster.alter_partition_reassignments",
    46: "cluster.list_partition_reassignments",
    47: "groups.offset_delete",
    48: "configs.describe_client_quotas",
    49: "configs.alter_client_quotas",
    50: "security.user_scram_credentials",
    51: "security.user_scram_credentials",
    55: "cluster.describe_quorum",
    57: "cluster.update_features",
    60: "cluster.describe_cluster",
    61: "records.describe_producers",
    64: "cluster.unregister_broker",
    65: "transactions.describe_transactions",
    66: "transactions.list_transactions",
    68: "groups.consumer_group_heartbeat",
    69: "groups.consumer_group_describe",
    74: "configs.list_config_resources",
    75: "topics.describe_topic_partitions",
    76: "groups.share_group_heartbeat",
    77: "groups.share_group_describe",
    78: "records.share_fetch",
    79: "records.share_fetch",
    80: "cluster.add_raft_voter",
    81: "cluster.remove_raft_voter",
    88: "groups.streams_group_heartbeat",
    89: "groups.streams_group_describe",
    90: "groups.share_group_offsets",
    91: "groups.share_group_offsets",
    92: "groups.share_group_offsets",
}

MESSAGE_CHARS_MAX = 1000

log = logging.get("acceptor.requests")
Handler = Callable[[Context, RequestHeader, object], Awaitable[object | None]]
_loaded: dict[int, Handler] = {}


class Outcome(NamedTuple):
    """`body` None: the request is done and has no response. `close_reason`: why the connection must be
    closed instead. `authenticated_as`: Context.authenticated_as. `ends_connection`: the connection is
    closed after the response. `delay_s`: the response is sent after this delay.
    """

    body: bytes | None
    is_cacheable: bool = False
    close_reason: str | None = None
    authenticated_as: tuple[str, int, PrincipalKind] | None = None
    ends_connection: bool = False
    delay_s: float = 0.0


class RequestMalformed(Exception):
    """The frame is not a valid request of its API and version. Distinct from ProtocolError, which
    can also be raised while the response is encoded.
    """


class Observer(Protocol):
    def observe(self, api: str, seconds: float, failed: bool) -> None: ...


def handler_of(api_key: int) -> Handler:
    handler = _loaded.get(api_key)
    if handler is None:
        handler = _loaded[api_key] = import_module(f"mqd.acceptor.handlers.{HANDLERS[api_key]}").handle
    return handler


async def respond(
    broker: Broker, origin: Origin, frame: bytes, connection_id: int, observer: Observer | None = None
) -> Outcome:
    """Raises only CancelledError. For an invalid request, Outcome.close_reason says why the
    connection is closed. An internal error is logged and answered with UNKNOWN_SERVER_ERROR.
    """
    began_s = time.perf_counter()
    api, failed = "unknown", True
    header: RequestHeader | None = None
    request: object = None
    try:
        header, request = _decode(frame)
        api = SUPPORTED[header.api_key].name
        outcome = await _call_handler(broker, origin, header, request, frame, began_s)
        failed = False
        return outcome
    except UnsupportedVersion as error:
        if error.header.api_key == API_VERSIONS_KEY:
            return _unsupported_api_versions(broker, error.header)
        return _close(connection_id, str(error), error.header)
    except RequestMalformed as error:
        return _close(connection_id, str(error), None)
    except CloseConnection as error:
        return _close(connection_id, str(error), None, api)
    except Exception:
        log.exception("a handler failed", connection=connection_id, api=api)
        return _failure_outcome(header, request)
    finally:
        if observer is not None:
            observer.observe(api, time.perf_counter() - began_s, failed)


async def _call_handler(
    broker: Broker, origin: Origin, header: RequestHeader, request: object, frame: bytes, began_s: float
) -> Outcome:
    context = Context(broker, origin)
    handler = handler_of(header.api_key)
    authorization = rights.authorize(context, header, request)
    if authorization.request is None:
        return Outcome(_encode(header, authorization.denied_response))
    if broker.relaying is not None:
        if authorization.denied_response is not None:
            frame = encode_request(authorization.request, header.api_version, header.correlation_id, header.client_id)
        relayed = await broker.relaying.respond(
            origin, header, authorization.request, frame, lambda part: handler(context, header, part)
        )
        if relayed is not None:
            if isinstance(relayed, bytes) and authorization.denied_response is None:
                return Outcome(relayed)
            if isinstance(relayed, bytes):
                relayed = decode_response(relayed, header.api_key, header.api_version)[1]
            return Outcome(_encode(header, authorization.complete(relayed)))
    handling = handler(context, header, authorization.request)
    if throttle.is_charged(context, header):
        response = await throttle.run_and_charge(handling, context, header, began_s)
    else:
        response = await handling
    response = authorization.complete(response)
    return Outcome(
        _encode(header, response) if response is not None else None,
        context.is_cacheable,
        authenticated_as=context.authenticated_as,
        ends_connection=context.ends_connection,
        delay_s=context.delay_s,
    )


def _failure_outcome(header: RequestHeader | None, request: object) -> Outcome:
    """`header` None: the request could not be read at all."""
    if header is None:
        return Outcome(None, close_reason="the request could not be read because of an internal error")
    api = SUPPORTED[header.api_key].name
    try:
        response = failures.failed_response(header, request)
        if response is not None:
            return Outcome(encode_response(header, response))
    except Exception:
        log.exception("an error cannot be returned; the connection is closed", api=api)
    return Outcome(None, close_reason=f"{api} failed, and its response has no field for an error")


def _decode(frame: bytes) -> tuple[RequestHeader, object]:
    """Bytes after a whole message are ignored, as in Kafka: librdkafka 2.x appends three bytes to a
    Metadata request (9+) for all topics.

    Raises UnsupportedVersion, RequestMalformed.
    """
    try:
        try:
            return decode_request(frame)
        except TrailingBytes as error:
            return decode_request(frame[: error.position])
    except UnsupportedVersion:
        raise
    except ProtocolError as error:
        raise RequestMalformed(str(error)) from error


def _encode(header: RequestHeader, response: object) -> bytes:
    """Error messages quote strings from clients, which may have the maximum length; messages that
    become too long are truncated.
    """
    try:
        return encode_response(header, response)
    except ProtocolError:
        if not _cut_messages(response):
            raise
        return encode_response(header, response)


def _cut_messages(response: object) -> bool:
    """Truncates error messages to MESSAGE_CHARS_MAX. Returns whether any was longer."""
    was_cut = False
    pending: list[Any] = [response]
    while pending:
        struct = pending.pop()
        for name in struct.__struct_fields__:
            value = getattr(struct, name)
            if name == "error_message" and value is not None and len(value) > MESSAGE_CHARS_MAX:
                setattr(struct, name, value[:MESSAGE_CHARS_MAX])
                was_cut = True
            children = value if type(value) is list else (value,)
            pending += [child for child in children if isinstance(child, msgspec.Struct)]
    return was_cut


def _unsupported_api_versions(broker: Broker, header: RequestHeader) -> Outcome:
    from mqd.acceptor.handlers.cluster import api_versions

    return Outcome(
        encode_response(header, api_versions.unsupported_version_response(broker.metadata.features), version=0)
    )


def _close(connection_id: int, reason: str, header: RequestHeader | None, api: str = "") -> Outcome:
    fields: dict[str, object] = {"connection": connection_id, "reason": reason}
    if api:
        fields["api"] = api
    if header is not None:
        fields.update(api_key=header.api_key, api_version=header.api_version, client=header.client_id)
    log.warning("request cannot be answered; the connection is closed", **fields)
    return Outcome(None, close_reason=reason)
