"""A client's choice of transport: in a cluster as anywhere, since requests for partitions led by
other hosts are forwarded (tests/interaction/cluster/test_cluster_local.py).
"""

import socket
from pathlib import Path

import pytest

from mqd.client.config import choose_transport, read


@pytest.mark.parametrize(("transport", "taken"), [("auto", "shm"), ("shm", "shm"), ("tcp", "tcp")])
def test_shared_memory_where_the_broker_is_here(tmp_path: Path, transport: str, taken: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(tmp_path / "client.sock"))
        listening.listen()
        choice = choose_transport(
            read(
                {
                    "bootstrap.servers": "127.0.0.1:1",
                    "mqd.socket.path": str(tmp_path / "client.sock"),
                    "transport": transport,
                }
            )
        )
    assert choice.transport == taken
