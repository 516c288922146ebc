"""How a tool (`mqd status`, `mqd down`) finds a running broker and queries its keeper."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from mqd.base.paths import layout, trusts
from mqd.shm import locks
from mqd.shm.attach import MESSAGE_BYTES_MAX, KeeperError, connect_keeper, receive_packet, send_message
from mqd.shm.keeper_messages import FromKeeper, Refused, Status, StatusQuery

RESPONSE_TIMEOUT_S = 5.0

_decode = msgspec.msgpack.Decoder(FromKeeper).decode


class KeeperConnection:
    """A tool's connection to the keeper of a data directory. Raises KeeperError if no keeper runs
    there, or if it does not answer.
    """

    def __init__(self, data_dir: str | os.PathLike[str]):
        self._connection = connect_keeper(layout(data_dir).keeper_socket)
        self._connection.settimeout(RESPONSE_TIMEOUT_S)

    def request(self, message: Any) -> Status:
        try:
            send_message(self._connection, message)
            packet, _ = receive_packet(self._connection, size_bytes_max=MESSAGE_BYTES_MAX)
        except TimeoutError as error:
            raise KeeperError(f"the keeper did not answer within {RESPONSE_TIMEOUT_S:.0f} s; see its log") from error
        except OSError as error:
            raise KeeperError(f"the keeper's socket failed: {error.strerror}") from error
        if not packet:
            raise KeeperError("the keeper ended")
        response = _decode(packet)
        if isinstance(response, Refused):
            raise KeeperError(response.reason)
        if not isinstance(response, Status):
            raise KeeperError(f"the keeper answered with {type(response).__name__}")
        return response

    def status(self) -> Status:
        return self.request(StatusQuery())

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> KeeperConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def supervisor_pid(status: Status) -> int:
    """The pid of supervisord, or 0 if the keeper has no supervisor."""
    return next((process.pid for process in status.processes if process.role == "supervisord"), 0)


def lock_holder_pid(lock_path: Path) -> int | None:
    """The pid in a lock file that is held now; None if it is not held, 0 if the pid cannot be read
    or trusted.
    """
    if not locks.is_locked(lock_path):
        return None
    try:
        if not trusts(lock_path.parent, lock_path.stat().st_uid):
            return 0
        text = lock_path.read_text().split("\n")[0].strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() else 0
