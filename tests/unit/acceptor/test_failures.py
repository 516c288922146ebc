"""A bug in a handler: the log has the traceback, the client gets an error; a malformed request
closes its connection, whatever the exception's text.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from mqd.acceptor import dispatch
from mqd.acceptor.broker import CloseConnection
from mqd.protocol.api import decode_response, encode_request
from mqd.protocol.errors import ErrorCode, ProtocolError
from mqd.protocol.headers import SUPPORTED
from mqd.protocol.messages import MetadataRequest, OffsetCommitRequest, message_class, message_of
from mqd.protocol.schema.language import BLOBS, Struct
from tests.unit.acceptor.handler_broker import HandlerBroker

UNKNOWN = int(ErrorCode.UNKNOWN_SERVER_ERROR)
# The last version whose connection is closed instead: the request of 34 is by directory and its
# response by topic; 35 has an error code since version 3 and a response by directory.
NO_ROOM = {34: 2, 35: 2}
FAULTS = (
    KeyError("a bug"),
    ValueError("7 bytes too many"),
    AttributeError("a bug"),
    ProtocolError("a bug in an answer", position=3),
)


def _filled(cls: type, struct: Struct, version: int) -> object:
    """One element in every array, a name in every string."""
    message = cls()
    api = message_of(cls)[0]
    for field in struct.fields:
        if version not in field.versions:
            continue
        if field.struct is not None:
            inner = _filled(getattr(message_class(api.api_key, "Request"), field.struct.name), field.struct, version)
            setattr(message, field.name, [inner] if field.is_array else inner)
        elif field.is_array:
            setattr(
                message,
                field.name,
                (
                    ["asked"]
                    if field.type == "string"
                    else [b"asked"]
                    if field.type in BLOBS
                    else [bytes(16)]
                    if field.type == "uuid"
                    else [7]
                ),
            )
        elif field.type == "string":
            setattr(message, field.name, "asked")
    return message


def _structs(value: object) -> Iterator[msgspec.Struct]:
    if isinstance(value, msgspec.Struct):
        yield value
        for name in value.__struct_fields__:
            yield from _structs(getattr(value, name))
    elif isinstance(value, list):
        for one in value:
            yield from _structs(one)


def _failing(monkeypatch: pytest.MonkeyPatch, fault: BaseException) -> None:
    async def handle(*_: object) -> object:
        raise fault

    monkeypatch.setattr(dispatch, "handler_of", lambda _: handle)


def _logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The exceptions logged with a traceback, by API."""
    found: list[str] = []

    class Log:
        def exception(self, _text: str, **fields: object) -> None:
            found.append(f"{fields['api']}: {sys.exc_info()[0].__name__}")

        def warning(self, _text: str, **_fields: object) -> None:
            pass

    monkeypatch.setattr(dispatch, "log", Log())
    return found


@pytest.mark.parametrize("key", sorted(dispatch.HANDLERS))
def test_every_api_has_an_error_response_for_our_bugs(
    key: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _failing(monkeypatch, FAULTS[key % len(FAULTS)])
    request_class, api = message_class(key, "Request"), SUPPORTED[key]

    async def run() -> None:
        async with HandlerBroker(tmp_path) as broker:
            for version in range(api.min_version, api.max_version + 1):
                request = _filled(request_class, message_of(request_class)[1], version)
                outcome = await broker.frame(encode_request(request, version, 5))
                if version <= NO_ROOM.get(key, -1):
                    assert outcome.body is None and outcome.close_reason
                    continue
                assert outcome.close_reason is None and outcome.body is not None and not outcome.is_cacheable, (
                    api.name,
                    version,
                )
                correlation_id, response = decode_response(outcome.body, key, version)
                found = [
                    one
                    for one in _structs(response)
                    if UNKNOWN in (getattr(one, "error_code", 0), getattr(one, "partition_error_code", 0))
                ]
                assert correlation_id == 5 and found, (api.name, version, response)
                for one in found:  # the client finds its own
                    names = [
                        getattr(one, name)
                        for name in ("name", "group_id", "transactional_id", "key", "resource_name", "topic")
                        if hasattr(one, name)
                    ]
                    assert "asked" in names or not any(isinstance(name, str) for name in names) or one is response, (
                        api.name,
                        version,
                        response,
                    )

    asyncio.run(asyncio.wait_for(run(), 60))


def test_the_error_response_names_the_requested_resources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _failing(monkeypatch, KeyError("t"))
    partitions = [OffsetCommitRequest.Partition(partition_index=index, committed_offset=1) for index in (4, 2)]
    request = OffsetCommitRequest(
        group_id="g", topics=[OffsetCommitRequest.Topic(name=name, partitions=partitions) for name in ("a", "b")]
    )

    async def run() -> None:
        async with HandlerBroker(tmp_path) as broker:
            response = await broker.send_request(request, 8)
            assert [
                (topic.name, [(one.partition_index, one.error_code) for one in topic.partitions])
                for topic in response.topics
            ] == [(name, [(4, UNKNOWN), (2, UNKNOWN)]) for name in ("a", "b")]

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_the_log_has_the_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException) -> None:
    _failing(monkeypatch, fault)
    logged = _logged(monkeypatch)

    async def run() -> None:
        async with HandlerBroker(tmp_path) as broker:
            response = await broker.send_request(MetadataRequest(topics=[MetadataRequest.Topic(name="t")]), 9)
            assert [topic.error_code for topic in response.topics] == [UNKNOWN]

    asyncio.run(asyncio.wait_for(run(), 60))
    assert logged == ["Metadata: " + type(fault).__name__]


def test_malformed_and_refused_requests_end_the_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = encode_request(MetadataRequest(topics=[MetadataRequest.Topic(name="t")]), 9, 5)
    logged = _logged(monkeypatch)

    async def run() -> None:
        async with HandlerBroker(tmp_path) as broker:
            whole = await broker.frame(frame + b"\0\0\0")
            assert whole.body and not whole.close_reason, "what follows a whole message is ignored"
            for damaged in (frame[:-2], frame[:3], b"", frame[:12] + b"\xff" * 8):
                outcome = await broker.frame(damaged)
                assert outcome.body is None and outcome.close_reason
            _failing(monkeypatch, CloseConnection("not here"))
            assert (await broker.frame(frame)).close_reason == "not here"

    asyncio.run(asyncio.wait_for(run(), 60))
    assert not logged
