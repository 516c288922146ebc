"""Attaches a client: opens the C attachment and translates its errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mqd.client.config import Settings, TransportChoice
from mqd.client.messages import KafkaError, failure
from mqd.native import E_LAYOUT, NativeError
from mqd.native.client import Client
from mqd.shm import rendezvous

_ATTACH_TIMEOUT_MS = 5000


def opener(
    settings: Settings,
    choice: TransportChoice,
    client_id: str,
    data_bytes: int = 0,
    reply_bytes: int = 0,
    request_bytes: int = 0,
) -> Callable[[], Any]:
    """Returns a function that makes a new attachment to the broker of `choice`. Attaching fails
    permanently if the broker was built with a different memory layout than this process's code.
    """
    servers, socket_path = str(settings.rdkafka.get("bootstrap.servers") or ""), settings.own["mqd.socket.path"]

    def attach() -> Client:
        endpoint = None if socket_path else rendezvous.find(servers)
        path, server = (
            (endpoint.path, endpoint.server) if endpoint and endpoint.path else (choice.socket_path, choice.server)
        )
        assert path is not None  # the choice was shared memory
        try:
            return Client(
                path,
                client_id=client_id,
                data_bytes=data_bytes,
                reply_bytes=reply_bytes,
                request_bytes=request_bytes,
                timeout_ms=_ATTACH_TIMEOUT_MS,
                spin_us=settings.own["mqd.spin.us"],
                server=server,
            )
        except NativeError as error:
            if error.code == E_LAYOUT:
                raise failure(
                    KafkaError._FATAL, f"the broker is from a different build of mqd: {error}", fatal=True
                ) from error
            raise

    return attach
