"""Two brokers on one machine that share a file system and listen on the same address and port, each
in its own network namespace, as two containers do. A client never attaches to a broker that it
would not reach over TCP.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqd.shm import rendezvous
from tests.broker import Broker
from tests.chaos import network
from tests.local_connection import LocalConnection, Refused, hello

_WHY_NOT = network.why_not()
pytestmark = pytest.mark.skipif(bool(_WHY_NOT), reason=f"needs network namespaces: {_WHY_NOT}")

# produces one record with transport `auto`; prints the transport that was chosen
_PRODUCE = """
import sys
from mqd import Producer
with Producer({"bootstrap.servers": sys.argv[1], "message.timeout.ms": 10000}) as producer:
    producer.produce("t", sys.argv[2].encode())
    assert producer.flush(60) == 0
    print(producer.transport, producer.transport_reason)
"""


class NamespacedBroker(Broker):
    """On a host of `net`; its clients run there too."""

    def __init__(self, net: network.Network, host: str, data_dir: Path, port: int, links: Path) -> None:
        super().__init__(data_dir, workers=1, environment={"MQD_RUN_RENDEZVOUS": str(links)})
        self.net, self.host, self.port = net, host, port

    def command(self) -> list[str]:
        return self.net.run(self.host, super().command())

    def produce(self, text: str) -> str:
        words = self.net.run(self.host, [sys.executable, "-c", _PRODUCE, self.bootstrap, text])
        done = subprocess.run(
            words, env={**os.environ, **self.environment}, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def holds(self, text: str) -> bool:
        return any(
            text.encode() in log.read_bytes() for log in self.data_dir.rglob("*.log") if log.parent.name == "t-0"
        )


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[tuple[NamespacedBroker, NamespacedBroker]]:
    with network.Network(("a", "b")) as net:
        port = Broker(tmp_path).port
        pair = tuple(NamespacedBroker(net, host, tmp_path / host, port, tmp_path / "links") for host in net.names)
        try:
            for one in pair:
                one.start()
            yield pair
        finally:
            for one in pair:
                one.stop()


def test_records_go_to_the_broker_of_the_clients_own_namespace(brokers):
    first, second = brokers
    assert first.produce("to the first").startswith("shm")
    assert second.produce("to the second").startswith("shm")
    assert (first.holds("to the first"), first.holds("to the second")) == (True, False)
    assert (second.holds("to the first"), second.holds("to the second")) == (False, True)
    second.stop()  # removes only its own link
    assert first.produce("again").startswith("shm") and first.holds("again")


@pytest.mark.slow
def test_a_link_to_another_broker_is_not_followed(brokers):
    """The path names another file in this container: the link is not trusted, and the records go
    where TCP goes.
    """
    first, second = brokers
    links = Path(first.environment["MQD_RUN_RENDEZVOUS"])
    names = {os.readlink(link): link for link in links.iterdir() if link.is_symlink()}
    own = next(link for target, link in names.items() if str(first.data_dir) in target)
    other = next(target for target in names if str(second.data_dir) in target)
    own.unlink()
    own.symlink_to(other)
    way = first.produce("over TCP")
    assert way.startswith("tcp") and "this broker does not listen on " in way
    assert first.holds("over TCP") and not second.holds("over TCP")
    with pytest.raises(Refused, match="this broker does not listen on "):
        LocalConnection(other, greeting=hello(server=own.name.encode()))
    assert rendezvous.find(first.bootstrap, search_dirs=[links]).path is None  # this process runs in a third namespace
