"""The part of AMQP 0-9-1 that a queue's benchmark needs, over a blocking socket. Raises PeerFailed when the
server closes the channel or the connection.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

from perf.peers.processes import PeerFailed

METHOD, HEADER, BODY, HEARTBEAT = 1, 2, 3, 8
FRAME_END = b"\xce"
FRAME_BYTES_MAX = 131072
START, START_OK, TUNE, TUNE_OK, OPEN, OPEN_OK = (10, 10), (10, 11), (10, 30), (10, 31), (10, 40), (10, 41)
CHANNEL_OPEN, CHANNEL_OPEN_OK = (20, 10), (20, 11)
DECLARE, DECLARE_OK, QOS, QOS_OK, CONSUME, CONSUME_OK = (50, 10), (50, 11), (60, 10), (60, 11), (60, 20), (60, 21)
PUBLISH, DELIVER, ACK = (60, 40), (60, 60), (60, 80)
SELECT, SELECT_OK = (85, 10), (85, 11)
CLOSED = frozenset({(10, 50), (20, 40)})


def short_string(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


def _table(entries: dict[str, str]) -> bytes:
    body = b"".join(
        short_string(name) + b"S" + struct.pack(">I", len(value)) + value.encode() for name, value in entries.items()
    )
    return struct.pack(">I", len(body)) + body


def _frame(kind: int, channel: int, payload: bytes) -> bytes:
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + FRAME_END


def _method(channel: int, method: tuple[int, int], arguments: bytes = b"") -> bytes:
    return _frame(METHOD, channel, struct.pack(">HH", *method) + arguments)


class Channel:
    """One connection with one channel."""

    def __init__(self, port: int, queue: str, kind: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), 60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self._socket.makefile("rb")
        self._queue = queue
        self._socket.sendall(b"AMQP\x00\x00\x09\x01")
        self._expect(START)
        login = b"\0guest\0guest"
        response = _table({}) + short_string("PLAIN") + struct.pack(">I", len(login)) + login + short_string("en_US")
        self._socket.sendall(_method(0, START_OK, response))
        self._expect(TUNE)
        self._socket.sendall(_method(0, TUNE_OK, struct.pack(">HIH", 1, FRAME_BYTES_MAX, 0)))
        self._call(OPEN, short_string("/") + b"\0\0", OPEN_OK, 0)
        self._call(CHANNEL_OPEN, b"\0", CHANNEL_OPEN_OK)
        durable = b"\x02"
        arguments = b"\0\0" + short_string(queue) + durable + _table({"x-queue-type": kind})
        self._call(DECLARE, arguments, DECLARE_OK)

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def publish(self, bodies: list[bytes]) -> None:
        """Publishes the messages. Returns when all are confirmed."""
        self._call(SELECT, b"\0", SELECT_OK)
        head = b"\0\0" + short_string("") + short_string(self._queue) + b"\0"
        persistent = 0x1000
        for begin in range(0, len(bodies), 1000):
            some = bodies[begin : begin + 1000]
            self._socket.sendall(
                b"".join(
                    _method(1, PUBLISH, head)
                    + _frame(HEADER, 1, struct.pack(">HHQHB", 60, 0, len(body), persistent, 2))
                    + _frame(BODY, 1, body)
                    for body in some
                )
            )
            confirmed = 0
            while confirmed < begin + len(some):
                tag, is_multiple = struct.unpack(">QB", self._expect(ACK))
                confirmed = tag if is_multiple else confirmed + 1

    def consume(self, prefetch: int) -> Iterator[int]:
        """Yields delivery tags, endlessly."""
        self._call(QOS, struct.pack(">IHB", 0, prefetch, 0), QOS_OK)
        self._call(CONSUME, b"\0\0" + short_string(self._queue) + short_string("") + b"\0" + _table({}), CONSUME_OK)
        while True:
            arguments = self._expect(DELIVER)
            at = 1 + arguments[0]  # after the consumer's tag
            yield struct.unpack_from(">Q", arguments, at)[0]

    def acknowledge(self, tags: list[int]) -> None:
        """Acknowledges each delivery individually."""
        self._socket.sendall(b"".join(_method(1, ACK, struct.pack(">QB", tag, 0)) for tag in tags))

    def wait_until_read(self) -> None:
        """Returns when the server has read all acknowledgements."""
        self._call(QOS, struct.pack(">IHB", 0, 1, 0), QOS_OK)

    def _call(self, method: tuple[int, int], arguments: bytes, response: tuple[int, int], channel: int = 1) -> None:
        self._socket.sendall(_method(channel, method, arguments))
        self._expect(response)

    def _expect(self, method: tuple[int, int]) -> bytes:
        """The arguments of the next method, which must be this one. Contents are skipped."""
        while True:
            kind, _, size = struct.unpack(">BHI", self._read(7))
            payload = self._read(size + 1)
            if kind != METHOD:
                continue
            found = struct.unpack_from(">HH", payload)
            if found in CLOSED:
                raise PeerFailed(f"RabbitMQ closes the connection: {payload[4:-1]!r}")
            if found == method:
                return payload[4:-1]

    def _read(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) < count:
            raise PeerFailed("RabbitMQ has closed the connection")
        return data
