"""A Kafka connection through shared memory, in plain Python, for tests: like
tests/kafka_connection.py it hides nothing and repairs nothing.

It implements the layout of native/shm/local_layout.h independently, so that broker and client
library are not only tested against each other. Not made for speed: it wakes the worker with every
submission and polls for responses.
"""

from __future__ import annotations

import collections
import mmap
import os
import select
import socket
import struct
import time
from pathlib import Path

from mqd import native
from tests.kafka_connection import ConnectionEnded, KafkaConnection

MAGIC, VERSION = 0x314C434F4C44514D, 2
HELLO = struct.Struct("<QIIQQII64s72s")
WELCOME = struct.Struct("<QQIi232s")
HEADER = struct.Struct("<QIIQQQQQQII")
QUERY = struct.Struct("<II16siIq")
SEGMENT = struct.Struct("<IIiIqqQIIII8x")
SUBMISSION_TAIL, REPLY_HEAD, CLIENT_SLEEPING, SUBMISSION_HEAD, REPLY_TAIL, NEEDS_ROOM = 128, 192, 200, 256, 320, 328


class Refused(Exception):
    """The broker refused the connection; `error` and the reason."""

    def __init__(self, error: int, reason: str):
        super().__init__(reason)
        self.error = error


def hello(
    client_id: bytes = b"test",
    submission_count: int = 64,
    data_bytes: int = 1 << 20,
    reply_bytes: int = 1 << 16,
    magic: int = MAGIC,
    version: int = VERSION,
    abi_hash: int | None = None,
    server: bytes = b"",
) -> bytes:
    return HELLO.pack(
        magic,
        version,
        submission_count,
        native.local_abi_hash() if abi_hash is None else abi_hash,
        data_bytes,
        reply_bytes,
        0,
        client_id,
        server,
    )


def connect(path: str | Path, timeout_s: float = 10.0) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(timeout_s)
    connection.connect(os.fspath(path))
    return connection


class LocalConnection(KafkaConnection):
    """Attached. `memory` is the whole memfd, writable; `control` the control segment, read-only."""

    def __init__(
        self,
        path: str | Path,
        *,
        client_id: str | None = "test",
        timeout_s: float = 10.0,
        greeting: bytes | None = None,
    ) -> None:
        self.client_id = client_id
        self.timeout_s = timeout_s
        self.socket = connect(path, timeout_s)
        self._next_correlation_id = 1
        self._waiting: collections.deque[tuple[int, int, int]] = collections.deque()
        self._received = bytearray()
        self._data_at = 0
        self.socket.send(hello((client_id or "").encode()) if greeting is None else greeting)
        try:
            packet, self.fds, _, _ = socket.recv_fds(self.socket, 4096, 16)
        except ConnectionResetError:
            packet, self.fds = b"", []
        if len(packet) != WELCOME.size:
            self.socket.close()
            raise ConnectionEnded(f"no welcome but {len(packet)} bytes")
        magic, total_bytes, self.worker, error, reason = WELCOME.unpack(packet)
        assert magic == MAGIC
        if error:
            assert not self.fds
            self.socket.close()
            raise Refused(error, reason.split(b"\0")[0].decode())
        self.memory_fd, self.to_worker, self.to_client, self.control_fd = self.fds
        self.memory = mmap.mmap(self.memory_fd, total_bytes)
        (
            magic,
            version,
            worker,
            abi_hash,
            self.total_bytes,
            self.submissions_offset,
            self.replies_offset,
            self.data_offset,
            self.data_bytes,
            self.submission_count,
            self.reply_bytes,
        ) = HEADER.unpack_from(self.memory)
        assert (magic, version, worker, abi_hash, self.total_bytes) == (
            MAGIC,
            VERSION,
            self.worker,
            native.local_abi_hash(),
            total_bytes,
        )

    def close(self) -> None:
        if hasattr(self, "memory") and not self.memory.closed:
            self.memory.close()
            for fd in self.fds:
                os.close(fd)
        self.socket.close()

    # -- words -------------------------------------------------------------------------------------

    def word(self, at: int) -> int:
        return struct.unpack_from("<Q", self.memory, at)[0]

    def set_word(self, at: int, value: int) -> None:
        struct.pack_into("<Q", self.memory, at, value & 0xFFFF_FFFF_FFFF_FFFF)

    def wake_worker(self) -> None:
        os.eventfd_write(self.to_worker, 1)

    # -- frames ------------------------------------------------------------------------------------

    def submit(self, offset: int, size_bytes: int) -> None:
        """Announces a request at this offset; whether there is one is up to the test."""
        tail = self.word(SUBMISSION_TAIL)
        struct.pack_into(
            "<QII", self.memory, self.submissions_offset + tail % self.submission_count * 16, offset, size_bytes, 0
        )
        self.set_word(SUBMISSION_TAIL, tail + 1)
        self.wake_worker()

    def send_raw(self, data: bytes) -> None:
        """One whole frame, with its length word, placed so that it does not overwrite a frame that
        has not been taken.
        """
        frame = data[4:]
        self.wait(
            lambda: self.word(SUBMISSION_TAIL) - self.word(SUBMISSION_HEAD) < self.submission_count,
            "room for a submission",
        )
        if self._data_at + len(frame) > self.data_bytes:
            self.wait(
                lambda: self.word(SUBMISSION_TAIL) == self.word(SUBMISSION_HEAD), "everything submitted to be taken"
            )
            self._data_at = 0
        self.memory[self.data_offset + self._data_at : self.data_offset + self._data_at + len(frame)] = frame
        at, self._data_at = self._data_at, self._data_at + len(frame)
        self.submit(at, len(frame))

    def wait(self, look, what: str) -> None:
        """Polls; ConnectionEnded at the worker's end, TimeoutError after timeout_s."""
        deadline = time.monotonic() + self.timeout_s
        while not look():
            if self.has_ended():
                raise ConnectionEnded(f"the worker ended the attachment within {what}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {what} within {self.timeout_s} s")
            time.sleep(0.0002)

    def has_ended(self) -> bool:
        poll = select.poll()
        poll.register(self.socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def take_replies(self, most: int = 1 << 30) -> bytes:
        """The bytes in the reply ring."""
        head, tail = self.word(REPLY_HEAD), self.word(REPLY_TAIL)
        count = min(tail - head, most)
        assert 0 <= tail - head <= self.reply_bytes
        at = head % self.reply_bytes
        first = min(count, self.reply_bytes - at)
        data = bytes(self.memory[self.replies_offset + at : self.replies_offset + at + first]) + bytes(
            self.memory[self.replies_offset : self.replies_offset + count - first]
        )
        self.set_word(REPLY_HEAD, head + count)
        if struct.unpack_from("<I", self.memory, NEEDS_ROOM)[0]:
            self.wake_worker()
        return data

    def receive_frame(self) -> bytes:
        def whole() -> bool:
            self._received += self.take_replies()
            return len(self._received) >= 4 and len(self._received) >= 4 + struct.unpack_from(">I", self._received)[0]

        if not whole():
            self.wait(whole, "reply")
        size_bytes = struct.unpack_from(">I", self._received)[0]
        frame = bytes(self._received[4 : 4 + size_bytes])
        del self._received[: 4 + size_bytes]
        return frame

    # -- questions ---------------------------------------------------------------------------------

    def request_nowait(
        self, topic_id: bytes, partition_index: int, offset: int, number: int = 7, kind: int = 1
    ) -> None:
        self.socket.send(QUERY.pack(kind, number, topic_id, partition_index, 0, offset))

    def answer(self) -> tuple[dict[str, int], int | None]:
        packet, fds, _, _ = socket.recv_fds(self.socket, 4096, 4)
        if not packet:
            raise ConnectionEnded("the worker ended the attachment instead of answering")
        names = (
            "kind",
            "number",
            "error",
            "slot",
            "base_offset",
            "next_base_offset",
            "segments_generation",
            "position",
            "size_bytes",
            "map_bytes",
        )
        assert len(packet) == SEGMENT.size and len(fds) <= 1
        return dict(zip(names, SEGMENT.unpack(packet), strict=False)), fds[0] if fds else None

    def send_request(
        self, topic_id: bytes, partition_index: int, offset: int, number: int = 7
    ) -> tuple[dict[str, int], int | None]:
        self.request_nowait(topic_id, partition_index, offset, number)
        return self.answer()
