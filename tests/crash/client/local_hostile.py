"""Local clients that misbehave. A separate process, because its clients are forked and killed.

    python -m tests.crash.client.local_hostile SOCKET TOPIC

Reads seeds from standard input, one per line, and prints `SEED HOW WHAT...` when that client has
ended: how it ended and what it did. A client attaches, misbehaves in a few of the ways of WAYS, and
then closes, exits or is killed at any moment before. HOW: ended, killed, or failed (it could do
something forbidden, or raised an unexpected exception).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import random
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable

from mqd.protocol.messages import MetadataRequest
from tests.crash.checker import make_value
from tests.interaction.traffic import METADATA, batch, fetch_request, produce_request
from tests.kafka_connection import ConnectionEnded
from tests.local_connection import (
    CLIENT_SLEEPING,
    NEEDS_ROOM,
    QUERY,
    REPLY_HEAD,
    REPLY_TAIL,
    SUBMISSION_HEAD,
    SUBMISSION_TAIL,
    LocalConnection,
    Refused,
    hello,
)

PRODUCE, FETCH = 0, 1
LIFE_SECONDS_MAX = 0.4
BEFORE_THE_RECORDS_BYTES = 300  # of a Produce's frame: its headers, and the batch's
VALUES = [make_value("hostile", counter) for counter in range(100)]  # exactly these must be stored
_PUNCH_HOLE_KEEP_SIZE = 3
_libc = ctypes.CDLL(None, use_errno=True)
WORDS = (SUBMISSION_TAIL, REPLY_HEAD, CLIENT_SLEEPING, SUBMISSION_HEAD, REPLY_TAIL, NEEDS_ROOM)
LIES = (0, 1, 7, 8, 4095, 65535, 65536, 1 << 20, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 63, (1 << 64) - 1, (1 << 64) - 8)


class ShouldNotBePossible(Exception):
    """The forbidden action that the client could do."""


class Hostile:
    def __init__(self, path: str, topic: str, chance: random.Random) -> None:
        self.topic, self.chance = topic, chance
        greeting = hello(
            b"hostile", chance.choice((0, 16, 64)), chance.choice((0, 65536, 1 << 20)), chance.choice((0, 4096, 65536))
        )
        self.local = LocalConnection(path, greeting=greeting, timeout_s=1.0)

    # -- ways --------------------------------------------------------------------------------------

    def scribble_everywhere(self) -> None:
        local = self.local
        for _ in range(self.chance.randrange(1, 200)):
            at, count = self.chance.randrange(local.total_bytes - 64), self.chance.randrange(1, 64)
            local.memory[at : at + count] = self.chance.randbytes(count)
            if self.chance.random() < 0.2:
                local.wake_worker()

    def scribble_over_words(self) -> None:
        for _ in range(self.chance.randrange(1, 20)):
            self.local.set_word(self.chance.choice(WORDS), self.chance.choice((*LIES, self.chance.getrandbits(64))))
            self.local.wake_worker()

    def scribble_over_what_is_submitted(self) -> None:
        """A child repeatedly rewrites the records of a batch, but not the bytes around it, while
        the worker copies and checks them: only the CRC can detect it.
        """
        local, request = self.local, produce_request(self.topic, {0: batch(*VALUES)}, acks=1)
        size = sum(map(len, VALUES))
        parent, child = os.getpid(), os.fork()
        if child == 0:
            generator = random.Random(self.chance.random())
            noise = [generator.randbytes(128) for _ in range(16)]
            while os.getppid() == parent:  # which may be killed at any time
                at = local.data_offset + BEFORE_THE_RECORDS_BYTES + generator.randrange(size - 256)
                local.memory[at : at + 128] = noise[at % 16]
            os._exit(0)
        try:
            for _ in range(self.chance.randrange(10, 40)):
                local.wait(
                    lambda: local.word(SUBMISSION_TAIL) == local.word(SUBMISSION_HEAD),
                    "everything submitted to be taken",
                )
                local._data_at = 0  # at the same position each time
                local.send(PRODUCE, 9, request)
                local.receive_frame()
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    def send_wrong_positions(self) -> None:
        for _ in range(self.chance.randrange(1, 8)):
            offset, size = (
                self.chance.choice((*LIES, self.local.data_bytes, self.local.data_bytes - 8)),
                self.chance.choice(LIES) & 0xFFFFFFFF,
            )
            self.local.submit(offset, size)

    def never_read(self) -> None:
        """Sends requests without reading responses."""
        for _ in range(self.chance.randrange(10, 80)):
            if self.local.word(SUBMISSION_TAIL) - self.local.word(SUBMISSION_HEAD) >= self.local.submission_count:
                break
            if self.chance.random() < 0.5:
                self.local.send(METADATA, 12, MetadataRequest(topics=None))
            else:
                self.local.send(FETCH, 12, fetch_request(self.topic, {0: 0}, bytes_max=1 << 20))

    def read_in_drops(self) -> None:
        self.never_read()
        for _ in range(200):
            self.local.take_replies(self.chance.randrange(1, 9))

    def truncate(self) -> None:
        for size in (0, 4096, self.local.total_bytes - 1, self.local.total_bytes + 4096):
            try:
                os.ftruncate(self.local.memory_fd, size)
            except PermissionError:
                continue
            raise ShouldNotBePossible(f"the memory could be made {size} bytes long")
        for seal in (fcntl.F_SEAL_WRITE, fcntl.F_SEAL_SEAL):
            try:
                fcntl.fcntl(self.local.memory_fd, fcntl.F_ADD_SEALS, seal)
            except PermissionError:
                continue
            raise ShouldNotBePossible("the memory could be sealed further")

    def punch_holes(self) -> None:
        """Removes pages, which a size that cannot shrink does not prevent: they read as zeros."""
        if _libc.fallocate(
            self.local.memory_fd,
            _PUNCH_HOLE_KEEP_SIZE,
            ctypes.c_long(4096),
            ctypes.c_long(self.local.total_bytes - 4096),
        ):
            raise OSError(ctypes.get_errno(), "fallocate")
        self.local.wake_worker()

    def spoil_descriptors(self) -> None:
        for fd in (self.local.to_worker, self.local.to_client, self.local.socket.fileno()):
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) ^ os.O_NONBLOCK)
        with contextlib.suppress(BlockingIOError):
            fcntl.fcntl(self.local.to_worker, fcntl.F_SETFL, os.O_NONBLOCK)
            for _ in range(3):
                os.write(self.local.to_worker, struct.pack("<Q", (1 << 64) - 2))

    def send_and_not_read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self.local.socket.setblocking(False)
            for number in range(self.chance.randrange(1, 300)):
                topic_id = self.chance.choice((bytes(16), self.chance.randbytes(16)))
                packet = QUERY.pack(
                    self.chance.choice((1, 1, 1, 0, 9)),
                    number,
                    topic_id,
                    self.chance.choice((0, -1, 1 << 30)),
                    0,
                    self.chance.choice((0, -1, 1 << 62)),
                )
                self.local.socket.send(packet[: self.chance.choice((40, 40, 40, 0, 39))] or b"x")

    def give_descriptors(self) -> None:
        with open("/dev/null") as file, contextlib.suppress(BlockingIOError, TimeoutError):
            for _ in range(8):
                socket.send_fds(self.local.socket, [QUERY.pack(1, 1, bytes(16), 0, 0, 0)], [file.fileno()] * 16)

    def sleep_for_ever(self) -> None:
        """Sets its sleep flag and never drains its wake-ups."""
        for _ in range(60):
            self.local.memory[CLIENT_SLEEPING : CLIENT_SLEEPING + 4] = struct.pack(
                "<I", self.chance.choice((1, 2, 3, 0xFFFFFFFF))
            )
            if self.local.word(SUBMISSION_TAIL) - self.local.word(SUBMISSION_HEAD) < self.local.submission_count:
                self.local.send(METADATA, 12, MetadataRequest(topics=[]))
            self.local.take_replies()

    def fork_and_leave(self) -> None:
        """Two processes write the same rings; the child, which continues for a while, has all our
        descriptors.
        """
        if os.fork() == 0:
            os.setsid()
            with contextlib.suppress(BaseException):
                end = time.monotonic() + 2 * LIFE_SECONDS_MAX
                while time.monotonic() < end:
                    self.chance.choice(
                        (self.scribble_over_words, self.send_wrong_positions, self.scribble_everywhere, self.never_read)
                    )()
                    time.sleep(0.01)
            os._exit(0)

    def half_close(self) -> None:
        self.local.socket.shutdown(self.chance.choice((socket.SHUT_RD, socket.SHUT_WR, socket.SHUT_RDWR)))

    def stay(self) -> None:
        select.select([self.local.socket], [], [], self.chance.uniform(0, 0.1))


WAYS: tuple[Callable[[Hostile], None], ...] = (
    *(3 * [Hostile.scribble_over_what_is_submitted]),
    Hostile.scribble_everywhere,
    Hostile.scribble_over_words,
    Hostile.send_wrong_positions,
    Hostile.never_read,
    Hostile.read_in_drops,
    Hostile.truncate,
    Hostile.punch_holes,
    Hostile.spoil_descriptors,
    Hostile.send_and_not_read,
    Hostile.give_descriptors,
    Hostile.sleep_for_ever,
    Hostile.fork_and_leave,
    Hostile.half_close,
    Hostile.stay,
)


def plan(seed: str) -> list[Callable[[Hostile], None]]:
    chance = random.Random(f"{seed} plan")
    return [chance.choice(WAYS) for _ in range(chance.randrange(1, 5))]


def live(path: str, topic: str, seed: str) -> None:
    """One client, in its own process."""
    try:
        hostile = Hostile(path, topic, random.Random(seed))
        for way in plan(seed):
            # An attachment that was closed for our actions is the expected outcome; so is one that
            # no longer responds. Our own shutdown also fails on words that we corrupted.
            with contextlib.suppress(
                ConnectionEnded,
                TimeoutError,
                BlockingIOError,
                BrokenPipeError,
                ConnectionResetError,
                struct.error,
                AssertionError,
                ValueError,
            ):
                way(hostile)
        if random.Random(f"{seed} end").random() < 0.5:
            hostile.local.close()
    except (Refused, ConnectionEnded):
        pass
    except OSError as error:
        if error.errno != errno.ENOTCONN:  # after half_close
            raise


def run(path: str, topic: str, seed: str) -> str:
    chance = random.Random(f"{seed} death")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            live(path, topic, seed)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    watched = os.pidfd_open(child)
    try:
        patience = chance.uniform(0.005, LIFE_SECONDS_MAX) if chance.random() < 0.6 else 20.0
        ended, _, _ = select.select([watched], [], [], patience)
        if not ended:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    finally:
        os.close(watched)
    how = "killed" if os.WIFSIGNALED(status) else "ended" if status == 0 else "failed"
    if how == "killed" and patience == 20.0:
        how = "failed"
    return f"{seed} {how} {' '.join(way.__name__ for way in plan(seed))}"


def main() -> None:
    _, path, topic = sys.argv
    for line in sys.stdin:
        print(run(path, topic, line.strip()), flush=True)


if __name__ == "__main__":
    main()
