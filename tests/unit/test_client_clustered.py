"""Which way a client goes when its host's broker is one of several."""

import json
import socket
from pathlib import Path

import pytest

from mqd.client.config import choose_transport, read
from mqd.shm import rendezvous


@pytest.fixture
def client_socket(tmp_path: Path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(tmp_path / "client.sock"))
        listening.listen()
        yield tmp_path / "client.sock"


@pytest.mark.parametrize(("text", "expected"), [(json.dumps({"clustered": True}), True), (json.dumps({"clustered": False}), False), ("{}", False), ("[]", False), ("no json", False), (None, False)])
def test_a_broker_says_whether_it_is_one_of_several(client_socket: Path, text: str | None, expected: bool) -> None:
    if text is not None:
        (client_socket.parent / "broker.json").write_text(text)
    assert rendezvous.is_clustered(str(client_socket)) is expected


@pytest.mark.parametrize(("clustered", "transport", "taken"), [(False, "auto", "shm"), (True, "auto", "tcp"), (True, "shm", "shm"), (True, "tcp", "tcp")])
def test_the_way_that_reaches_every_leader_is_taken(client_socket: Path, clustered: bool, transport: str, taken: str) -> None:
    (client_socket.parent / "broker.json").write_text(json.dumps({"clustered": clustered}))
    choice = choose_transport(read({"bootstrap.servers": "127.0.0.1:1", "mqd.socket.path": str(client_socket), "transport": transport}))
    assert choice.transport == taken
