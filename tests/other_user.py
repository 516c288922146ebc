"""A client through shared memory whose process belongs to another user of this machine: `nobody`.

It is a child of the test's process; it takes frames and returns the responses. Only root may start
a process of another user; `why_not` says so.
"""

from __future__ import annotations

import collections
import multiprocessing
import os
import pwd
from multiprocessing.connection import Connection
from pathlib import Path

from tests.kafka_connection import ConnectionEnded, KafkaConnection
from tests.local_connection import LocalConnection

LOGIN = "nobody"
WAIT_S = 20.0


def why_not() -> str:
    """Why no process of another user can be started here; "" if one can."""
    return "" if os.geteuid() == 0 else "only root may start a process of another user, and this is not root"


class OtherUser(KafkaConnection):
    """`path`: the broker's local socket."""

    def __init__(self, path: Path, client_id: str = "other-user") -> None:
        self.client_id = client_id
        self._next_correlation_id = 1
        self._waiting = collections.deque()
        fork = multiprocessing.get_context("fork")  # the modules are in memory: it may not read their files
        self._pipe, theirs = fork.Pipe()
        self._process = fork.Process(target=_serve, args=(theirs, self._pipe, path), daemon=True)
        self._process.start()
        theirs.close()
        if refused := self._receive():
            raise ConnectionEnded(refused)

    def close(self) -> None:
        self._pipe.close()
        self._process.join(WAIT_S)

    def send_raw(self, data: bytes) -> None:
        self._pipe.send(data)

    def receive_frame(self) -> bytes:
        frame = self._receive()
        if not isinstance(frame, bytes):
            raise ConnectionEnded(str(frame))
        return frame

    def send_request(self, topic_id: bytes, partition: int) -> tuple[int, bytes]:
        """(error, the beginning of the mapped segment file) of a request for a mapping."""
        self._pipe.send((topic_id, partition))
        return self._receive()

    def _receive(self):
        if not self._pipe.poll(WAIT_S):
            raise TimeoutError("the client of another user does not answer")
        try:
            return self._pipe.recv()
        except EOFError as error:
            raise ConnectionEnded("the client of another user has ended") from error


def _serve(pipe: Connection, parents: Connection, path: Path) -> None:
    parents.close()  # otherwise this process would keep its own pipe open
    user = pwd.getpwnam(LOGIN)
    os.setgroups([])
    os.setresgid(user.pw_gid, user.pw_gid, user.pw_gid)
    os.setresuid(user.pw_uid, user.pw_uid, user.pw_uid)
    try:
        local = LocalConnection(path)
    except Exception as error:  # any error is reported to the test
        pipe.send(repr(error))
        return
    pipe.send("")
    while True:
        try:
            requested = pipe.recv()
        except EOFError:
            return
        if isinstance(requested, bytes):
            try:
                local.send_raw(requested)
                pipe.send(local.receive_frame())
            except (ConnectionEnded, TimeoutError) as error:
                pipe.send(repr(error))
        else:
            response, fd = local.send_request(requested[0], requested[1], 0)
            content = b""
            if fd is not None:
                content = os.pread(fd, 1 << 16, 0)
                os.close(fd)
            pipe.send((response["error"], content))
