"""A broker that has ended after it was found, before the client attaches."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mqd.client import Consumer, KafkaException, Producer, ShareConsumer

SETTINGS: dict[str, Any] = {"bootstrap.servers": "127.0.0.1:1", "log_level": 0}
CLIENTS = [
    pytest.param(Producer, {}, id="producer"),
    pytest.param(Consumer, {"group.id": "g"}, id="consumer"),
    pytest.param(ShareConsumer, {"group.id": "g"}, id="share"),
]


@pytest.fixture
def abandoned_path(tmp_path: Path) -> Iterator[str]:
    """The path of a client socket on which no process listens any more, as a killed broker leaves it."""
    path = tmp_path / "client.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
    yield str(path)


@pytest.mark.parametrize(("kind", "more"), CLIENTS)
def test_transport_auto_goes_over_tcp(kind: Any, more: dict[str, str], abandoned_path: str) -> None:
    with kind({**SETTINGS, **more, "mqd.socket.path": abandoned_path}) as client:
        assert client.transport == "tcp"
        assert client.transport_reason.startswith("shared memory is not available: ")


@pytest.mark.parametrize(("kind", "more"), CLIENTS)
def test_transport_shm_raises(kind: Any, more: dict[str, str], abandoned_path: str) -> None:
    with pytest.raises((KafkaException, OSError)):
        kind({**SETTINGS, **more, "transport": "shm", "mqd.socket.path": abandoned_path})
