"""A small blocking connection for Kafka frames, for tests and benches: it hides nothing and repairs
nothing.

    with KafkaConnection("127.0.0.1", 9092) as kafka:
        topics = kafka.call(3, 12, MetadataRequest())           # one request, its response
        first = kafka.send(0, 9, produce)                       # pipelined: send any number,
        second = kafka.send(0, 9, produce)
        assert kafka.receive().correlation_id == first          # then receive them in order
        kafka.send_raw(b"\\x00\\x00\\x00\\x04junk")                # hostile bytes, as they are

Every wait ends: `timeout_s` is for each call. One thread at a time per connection.
"""

from __future__ import annotations

import collections
import dataclasses
import socket
import struct

from mqd.protocol import decode_response, encode_request, with_length
from mqd.protocol.messages import message_class
from tests.polling import PATIENCE_S

API_VERSIONS = 18
FRAME_BYTES_MAX = 512 << 20


class ConnectionEnded(Exception):
    """The broker closed (or reset) the connection; the message says during which operation."""


@dataclasses.dataclass(frozen=True)
class Response:
    correlation_id: int
    api_key: int
    api_version: int
    body: object  # the response struct
    frame: bytes  # as received, without the length word


def _defaults(api_key: int) -> object:
    made = message_class(api_key, "Request")
    return made(client_software_name="tests", client_software_version="1") if api_key == API_VERSIONS else made()


class KafkaConnection:
    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 9092,
        *,
        client_id: str | None = "test",
        timeout_s: float = PATIENCE_S,
        from_address: str = "",
    ) -> None:
        self.client_id = client_id
        self.socket = socket.create_connection((host, port), timeout_s, (from_address, 0) if from_address else None)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._next_correlation_id = 1
        # (correlation id, api key, version), in order sent
        self._waiting: collections.deque[tuple[int, int, int]] = collections.deque()
        self._received = bytearray()

    @classmethod
    def connect(cls, host: str, port: int, **options) -> KafkaConnection:
        return cls(host, port, **options)

    def __enter__(self) -> KafkaConnection:
        return self

    def __exit__(self, *_exception) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    # -- requests ----------------------------------------------------------------------------------

    def send(self, api_key: int, version: int, request: object | None = None, *, expect_response: bool = True) -> int:
        """Sends one request (None: all defaults, and in ApiVersions a client name, which is
        mandatory); returns its correlation id. `expect_response=False` for Produce with acks=0.
        """
        correlation_id = self._next_correlation_id
        self._next_correlation_id += 1
        body = _defaults(api_key) if request is None else request
        frame = encode_request(body, version, correlation_id, self.client_id)
        if expect_response:
            self._waiting.append((correlation_id, api_key, version))
        self.send_raw(with_length(frame))
        return correlation_id

    def receive(self) -> Response:
        """The response to the oldest pending request. AssertionError when another correlation id
        arrives: responses come in order.
        """
        if not self._waiting:
            raise AssertionError("no request is waiting for a response")
        expected, api_key, version = self._waiting.popleft()
        frame = self.receive_frame()
        (correlation_id,) = struct.unpack_from(">i", frame)
        assert correlation_id == expected, f"response {correlation_id} where {expected} was due"
        return Response(correlation_id, api_key, version, decode_response(frame, api_key, version)[1], frame)

    def call(self, api_key: int, version: int, request: object | None = None) -> object:
        """Sends, receives, returns the response struct. Nothing else may be in flight."""
        assert not self._waiting, "responses to earlier requests have not been received"
        self.send(api_key, version, request)
        return self.receive().body

    # -- bytes -------------------------------------------------------------------------------------

    def send_raw(self, data: bytes) -> None:
        """Bytes as they are: the caller writes the length words."""
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ConnectionEnded(f"while sending: {error}") from error

    def send_frame(self, frame: bytes) -> None:
        self.send_raw(with_length(frame))

    def receive_frame(self) -> bytes:
        """One frame, without its length word. ConnectionEnded at the end of the connection,
        TimeoutError after timeout_s.
        """
        (size,) = struct.unpack(">i", self._receive_exactly(4))
        if not 0 <= size <= FRAME_BYTES_MAX:
            raise AssertionError(f"the broker announces a frame of {size} bytes")
        return self._receive_exactly(size)

    def is_closed_by_peer(self) -> bool:
        """Waits (at most timeout_s) for the end of the connection: True when it ends, False when
        bytes or nothing arrive.
        """
        if self._received:
            return False
        try:
            data = self.socket.recv(65536)
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False
        self._received += data
        return not data

    def _receive_exactly(self, size: int) -> bytes:
        while len(self._received) < size:
            try:
                data = self.socket.recv(max(65536, size - len(self._received)))
            except ConnectionResetError as error:
                raise ConnectionEnded(f"reset with {len(self._received)} of {size} bytes received") from error
            if not data:
                raise ConnectionEnded(f"ended with {len(self._received)} of {size} bytes received")
            self._received += data
        taken = bytes(self._received[:size])
        del self._received[:size]
        return taken
