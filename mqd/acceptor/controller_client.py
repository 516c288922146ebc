"""The acceptor's connection to the controller: metadata in, requested changes out.

    4-byte big-endian length, then msgpack (mqd/cluster/host/messages.py).

The controller may be restarted at any time. A change in flight then has an unknown outcome: it is
answered with REQUEST_TIMED_OUT, never with a definite failure. A change that could not be sent is
sent when the controller is back, or times out too. New partitions that are requested before any
broker is in service wait as well: the controller would refuse them, with an error that clients do
not retry. Bounds: REQUESTS_MAX changes in flight, further ones are refused; MESSAGE_BYTES_MAX per
message.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec

from mqd.base import logging
from mqd.base.collector import paused
from mqd.base.tasks import timeout
from mqd.cluster.host import messages
from mqd.protocol.errors import ErrorCode

MESSAGE_BYTES_MAX = 256 << 20
REQUESTS_MAX = 10_000
RETRY_S_MIN, RETRY_S_MAX = 0.01, 0.5

log = logging.get("acceptor.controller")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(messages.FromController).decode

MetadataMessage = (
    messages.Image
    | messages.TopicPut
    | messages.PartitionsPut
    | messages.TopicRemoved
    | messages.BrokersPut
    | messages.BrokerConfigPut
    | messages.GroupConfigPut
    | messages.ClientMetricsPut
    | messages.SettingsPut
    | messages.AclsPut
    | messages.CredentialsPut
    | messages.TokensPut
    | messages.MessageList
)


class _InvalidMessage(Exception):
    """The controller sent an invalid message. A bug in handling a valid one is a MetadataFault."""


class MetadataFault(Exception):
    """A bug in applying metadata."""


class ControllerClient:
    """`on_metadata` is called with every metadata message, in order, and before any response that
    follows the message is delivered. `in_service`: whether these messages show a broker in service;
    not called again after it has returned True.
    """

    def __init__(
        self,
        path: Path,
        generation: int,
        on_metadata: Callable[[MetadataMessage], None],
        in_service: Callable[[], bool],
    ) -> None:
        self._path = path
        self._subscribe_message = messages.Subscribe("acceptor", 0, generation)
        self._on_metadata = on_metadata
        self._in_service = in_service
        self._was_in_service = False
        self._writer: asyncio.StreamWriter | None = None
        self._unsent: dict[int, messages.Request] = {}
        self._pending: dict[int, asyncio.Future[messages.Response]] = {}  # also those in _unsent
        self._request_id = 0

    async def request(self, change: messages.Change, timeout_ms: int, validate_only: bool = False) -> messages.Response:
        """Never raises: a failure is returned as the response's error."""
        if len(self._pending) >= REQUESTS_MAX:
            return messages.Response(0, ErrorCode.REQUEST_TIMED_OUT, "Too many changes are in progress; try again.")
        self._request_id += 1
        request_id = self._request_id
        response_future = self._pending[request_id] = asyncio.get_running_loop().create_future()
        request = messages.Request(request_id, change, validate_only)
        if self._writer is not None and not self._writer.is_closing() and self._may_send(change):
            self._write(request)
        else:
            self._unsent[request_id] = request
        try:
            async with timeout(max(timeout_ms, 1) / 1000):
                return await response_future
        except TimeoutError:
            never_sent = self._unsent.pop(request_id, None) is not None
            text = (
                "The controller cannot be reached, or no broker is in service; nothing was changed."
                if never_sent
                else "The controller has not answered in time; the change may still take effect."
            )
            return messages.Response(request_id, ErrorCode.REQUEST_TIMED_OUT, text)
        finally:
            self._pending.pop(request_id, None)

    async def run(self) -> None:
        """Runs until cancelled. Raises MetadataFault."""
        pause_s = RETRY_S_MIN
        while True:
            try:
                reader, self._writer = await asyncio.open_unix_connection(str(self._path))
            except OSError:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_S_MAX)
                continue
            pause_s = RETRY_S_MIN
            try:
                self._write(self._subscribe_message)
                await self._receive(reader)
            except (OSError, EOFError, _InvalidMessage) as error:
                log.warning("connection to the controller ended", reason=str(error) or type(error).__name__)
            finally:
                self._writer.close()
                self._writer = None
                self._fail_sent()
            await asyncio.sleep(pause_s)

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        while True:
            size = int.from_bytes(await reader.readexactly(4), "big")
            if size > MESSAGE_BYTES_MAX:
                raise _InvalidMessage(f"a message of {size} bytes, more than {MESSAGE_BYTES_MAX}")
            data = await reader.readexactly(size)
            try:
                with paused():
                    message = _decode(data)
            except (ValueError, msgspec.MsgspecError) as error:
                raise _InvalidMessage(str(error)) from error
            if isinstance(message, messages.Response):
                response_future = self._pending.get(message.request_id)
                if response_future is not None and not response_future.done():
                    response_future.set_result(message)
            elif not isinstance(message, messages.Command | messages.InSyncResponse):
                self._apply(message)
                self._write(messages.Applied(message.version, {}))
            self._was_in_service = self._was_in_service or self._in_service()
            self._send_unsent()

    def _apply(self, message: MetadataMessage) -> None:
        """Raises MetadataFault, which ends run(): the error would recur with the next connection."""
        try:
            self._on_metadata(message)
        except Exception as error:
            log.exception("a message from the controller cannot be processed")
            raise MetadataFault(repr(error)) from error

    def _may_send(self, change: messages.Change) -> bool:
        return self._was_in_service or not isinstance(change, messages.CreateTopic | messages.AddPartitions)

    def _send_unsent(self) -> None:
        for request_id, request in list(self._unsent.items()):
            if self._may_send(request.change):
                del self._unsent[request_id]
                self._write(request)

    def _fail_sent(self) -> None:
        text = "The controller was restarted while the change was under way; it may or may not have taken effect."
        for request_id, response_future in self._pending.items():
            if request_id not in self._unsent and not response_future.done():
                response_future.set_result(messages.Response(request_id, ErrorCode.REQUEST_TIMED_OUT, text))

    def _write(self, message: messages.ToController) -> None:
        data = _encode(message)
        assert self._writer is not None
        self._writer.write(len(data).to_bytes(4, "big") + data)
