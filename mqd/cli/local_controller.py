"""Requests one change from the controller of a broker on this host, over the controller's Unix
socket. Only the user that runs the broker can open this socket. It is for changes that must be made
before any client can authenticate.
"""

import socket
import time
from pathlib import Path

import msgspec

from mqd.cli.common import CliError
from mqd.cluster.host import messages

MESSAGE_BYTES_MAX = 256 << 20
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(messages.FromController).decode


def change(path: Path, requested: messages.Change, timeout_s: float) -> messages.Response:
    """Sends the requested change and waits for the response. `path`: Layout.controller_socket.
    Raises CliError if the controller cannot be reached, or does not respond in time.
    """
    deadline = time.monotonic() + timeout_s
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(path))
            _send(connection, messages.Subscribe("tool", 0, 0))
            _send(connection, messages.Request(1, requested, False))
            while time.monotonic() < deadline:
                connection.settimeout(max(0.001, deadline - time.monotonic()))
                message = _receive(connection)
                if isinstance(message, messages.Response):
                    return message
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise CliError(f"the broker's controller cannot be reached ({path}): {error}") from None
    raise CliError(f"the broker's controller has not responded within {timeout_s:g} s ({path})")


def _send(connection: socket.socket, message: messages.ToController) -> None:
    data = _encode(message)
    connection.sendall(len(data).to_bytes(4, "big") + data)


def _receive(connection: socket.socket) -> messages.FromController:
    size = int.from_bytes(_receive_exactly(connection, 4), "big")
    if size > MESSAGE_BYTES_MAX:
        raise ValueError(f"it sent a message of {size} bytes; at most {MESSAGE_BYTES_MAX} are allowed")
    return _decode(_receive_exactly(connection, size))


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = connection.recv(min(size - len(data), 1 << 20))
        if not chunk:
            raise ConnectionError("it closed the connection")
        data += chunk
    return bytes(data)
