"""Connections between controllers on loopback: messages both ways, access, and unavailable hosts."""

import asyncio
import contextlib
import logging
from types import SimpleNamespace

import msgspec
import pytest

from mqd.base import cluster_key
from mqd.cluster.broker import messages as broker_messages
from mqd.cluster.membership import credentials, handshake
from mqd.cluster.membership.credentials import Credentials
from mqd.cluster.membership.handshake import HandshakeFailed, HandshakeRefused, Hello, Identity, Refusal
from mqd.cluster.metadata.records import BrokerState
from mqd.cluster.raft.messages import ReplicaKey
from mqd.controller import peers
from mqd.controller.membership import Membership
from mqd.controller.peer_streams import TlsWriter
from mqd.controller.peers import Connection, Peers
from mqd.keeper import sockets
from mqd.security import pki
from mqd.security.host_identity import HostIdentity
from tests.recorder import Recorder
from tests.unit.security.host_files import NOW, authority, host, impose, write

SECRET = b"the secret of the cluster"


def heartbeat(number: int, node_id: int = 1) -> broker_messages.Heartbeat:
    return broker_messages.Heartbeat(node_id, 1, number, 0)


class Host:
    def __init__(
        self,
        node_id: int,
        secret: bytes = SECRET,
        cluster_id: str = "cluster",
        port: int = 0,
        host: HostIdentity | None = None,
        proofs: Credentials | None = None,
    ) -> None:
        self.listener = sockets.listen("127.0.0.1", port)
        self.port = self.listener.getsockname()[1]
        self.node_id, self.cluster_id = node_id, cluster_id
        self.directory_id = f"directory-{node_id}"
        self.unknown_peers: set[str] = set()  # directory ids
        self.voters: set[str] = set()
        self.received: list[tuple[int, object]] = []
        self.streams: list[bytes] = []
        self.news = asyncio.Event()
        self.peers = Peers(
            proofs or Credentials([secret], host),
            self.identity,
            self.decide,
            self.on_message,
            self.on_stream,
            self.mismatch_of,
            lambda identity: identity.directory_id in self.voters,
        )

    def identity(self) -> Identity:
        return Identity(self.node_id, self.directory_id, self.cluster_id, host="127.0.0.1", port=self.port)

    def decide(self, hello: Hello) -> Identity | Refusal:
        if hello.identity.cluster_id != self.cluster_id:
            return Refusal(handshake.REFUSED_CLUSTER, "another cluster's")
        return self.identity()

    def mismatch_of(self, identity: Identity) -> str:
        return "it is another host" if identity.directory_id in self.unknown_peers else ""

    def on_message(self, connection: Connection, message: object) -> None:
        self.received.append((connection.identity.node_id, message))
        self.news.set()

    async def on_stream(self, hello: Hello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.streams.append(await reader.readexactly(3))
        self.news.set()

    async def wait(self, count: int) -> list[tuple[int, object]]:
        async with asyncio.timeout(10):
            while len(self.received) + len(self.streams) < count:
                await self.news.wait()
                self.news.clear()
        return self.received

    async def __aenter__(self) -> "Host":
        await self.peers.listen(self.listener)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.peers.stop()
        self.listener.close()


def run(work) -> None:
    asyncio.run(work())


def test_a_peer_with_another_id_is_skipped():
    async def work():
        async with Host(1) as one, Host(2) as two, Host(2) as impostor:
            impostor.directory_id = "another"
            one.unknown_peers.add("another")
            one.peers.add_address(2, "127.0.0.1", two.port)
            one.peers.add_address(2, "127.0.0.1", impostor.port)  # the newest address is tried first
            one.peers.send(2, heartbeat(7))
            assert (await two.wait(1))[0] == (1, heartbeat(7)) and not impostor.received

    run(work)


def test_an_invalid_address_is_skipped():
    async def work():
        async with Host(1) as one, Host(2) as two:
            one.peers.add_address(2, "127.0.0.1", two.port)
            one.peers.add_address(2, "a..b", two.port)  # no resolver accepts this name
            one.peers.send(2, heartbeat(7))
            assert (await two.wait(1))[0] == (1, heartbeat(7))

    run(work)


class JoinsMeanwhile(Host):
    """Joins a cluster right after stating that it belongs to none."""

    def decide(self, hello: Hello) -> Identity | Refusal:
        stated, self.cluster_id = self.identity(), "cluster"
        return stated


def test_a_connection_from_before_this_host_joined_is_not_kept():
    async def work():
        async with Host(1) as one, JoinsMeanwhile(2, cluster_id="") as two:
            seen: list[str] = []
            one.peers._on_message = lambda connection, message: seen.append(connection.identity.cluster_id)
            one.peers.add_address(2, "127.0.0.1", two.port)
            async with asyncio.timeout(10):
                while not seen:
                    one.peers.send(2, heartbeat(7))
                    two.peers.send(1, heartbeat(8))
                    await asyncio.sleep(0.01)
            assert set(seen) == {"cluster"}  # messages of a host without a cluster are ignored

    run(work)


class Joiner:
    """A connection from a host that is admitted."""

    def __init__(self, identity: Identity) -> None:
        self.identity, self.ended, self.writer = identity, False, self
        self.transport = self

    def abort(self) -> None:
        self.ended = True


def test_a_node_id_in_service_belongs_to_one_directory():
    """Messages to a node id use one connection: the host in service would no longer receive any,
    and lose its lease to the newcomer.
    """
    broker = BrokerState(
        2, "h", 9092, None, 5, 1, {}, controller_host="127.0.0.2", controller_port=9094, directory_id="directory-2"
    )
    received = []
    shell = SimpleNamespace(
        metadata=SimpleNamespace(committed=SimpleNamespace(brokers={2: broker}, features={})),
        quorum=SimpleNamespace(
            core=SimpleNamespace(
                leader=3,
                generation=1,
                epoch=7,
                applied_offset=40,
                voters=(),
                log=SimpleNamespace(epoch_before=lambda offset: 7 if offset >= 40 else 6),
            )
        ),
        on_peer=lambda node_id, message: received.append((node_id, message)),
    )
    host = object.__new__(Membership)
    host._key, host._cluster_id, host.address, host._shell, host.gossip, host._forming = (
        ReplicaKey(1, b"d" * 16),
        "cluster",
        ("127.0.0.1", 9094),
        shell,
        None,
        None,
    )  # type: ignore[assignment]

    def let_in(directory_id: str, cluster_id: str = "cluster") -> bool:
        identity = Identity(2, directory_id, cluster_id, 1, False, 0, 1 << 30)
        response = host._decide(Hello(1, b"", "controller", identity))
        if isinstance(response, Refusal):
            assert response.code == handshake.REFUSED_IDENTITY and "127.0.0.2:9094" in response.message
        connection = Joiner(identity)
        host._on_message(connection, heartbeat(1, 2))  # type: ignore[arg-type]
        assert connection.ended == isinstance(response, Refusal), "so is what was let in before"
        return not connection.ended

    assert let_in("directory-2") and received == [(2, heartbeat(1, 2))]
    assert not let_in("another") and not let_in("another", cluster_id="") and len(received) == 1
    shell.quorum.core.leader = -1
    assert let_in("another"), "without a leader it is unknown which host is valid"
    shell.quorum.core.leader, shell.quorum.core.applied_offset = 3, 39
    assert let_in("another"), (
        "its metadata is from before this epoch: the one may have taken the other's place meanwhile"
    )
    shell.quorum.core.applied_offset = 40
    assert not let_in("another")
    shell.metadata.committed.brokers[2] = msgspec.structs.replace(broker, fenced=True)
    assert let_in("another"), "its predecessor's session has ended"
    shell.metadata.committed.brokers[2] = msgspec.structs.replace(broker, directory_id="")
    assert let_in("another"), "it was registered by a version that did not say"
    del shell.metadata.committed.brokers[2]
    assert let_in("another")


def test_messages_go_both_ways_over_one_connection_in_order():
    async def work():
        async with Host(1) as one, Host(2) as two:
            one.peers.add_address(2, "127.0.0.1", two.port)
            for number in range(20):
                one.peers.send(2, heartbeat(number))
            received = await two.wait(20)
            assert [(node, message.sent_ms) for node, message in received] == [(1, number) for number in range(20)]
            two.peers.send(1, heartbeat(99, 2))  # node 2 does not know node 1's address: it has a connection
            assert (await one.wait(1))[0] == (2, heartbeat(99, 2))
            assert one.peers.connected_nodes() == [2] and two.peers.connected_nodes() == [1]

    run(work)


def test_both_connect_at_once():
    async def work():
        async with Host(1) as one, Host(2) as two:
            one.peers.add_address(2, "127.0.0.1", two.port)
            two.peers.add_address(1, "127.0.0.1", one.port)
            for number in range(10):
                one.peers.send(2, heartbeat(number))
                two.peers.send(1, heartbeat(number, 2))
                await asyncio.sleep(0)
            assert [message.sent_ms for _, message in await two.wait(10)] == list(range(10))
            assert [message.sent_ms for _, message in await one.wait(10)] == list(range(10))

    run(work)


def test_a_host_that_was_unavailable_is_reached_again():
    async def work():
        async with Host(1) as one:
            two = Host(2)
            port = two.port
            two.listener.close()
            one.peers.add_address(2, "127.0.0.1", port)
            one.peers.send(2, heartbeat(1))
            while one.peers._nodes[2].failure_count == 0:
                await asyncio.sleep(0.005)
            assert not one.peers._nodes[2].pending  # waiting messages are lost: the cores send them again
            one.peers._nodes[2].failure_count = 5_000  # it may be away for hours: the backoff's exponent is bounded
            async with Host(2, port=port) as two:
                async with asyncio.timeout(10):
                    while not two.received:
                        one.peers.send(2, heartbeat(2))
                        await asyncio.sleep(0.02)
                assert {message.sent_ms for _, message in two.received} == {2}
            async with asyncio.timeout(10):
                while one.peers.connected_nodes():
                    await asyncio.sleep(0.005)
            async with Host(2, port=port) as two:
                async with asyncio.timeout(10):
                    while not two.received:
                        one.peers.send(2, heartbeat(3))
                        await asyncio.sleep(0.02)

    run(work)


def test_peers_of_other_clusters_are_refused():
    async def work():
        async with Host(1) as one, Host(2, b"another cluster's secret") as two, Host(3, cluster_id="other") as three:
            with pytest.raises((HandshakeFailed, EOFError)) as failed:
                await two.peers.open("127.0.0.1", one.port, "controller")
            assert not isinstance(failed.value, HandshakeRefused)
            with pytest.raises(HandshakeRefused, match="another cluster's"):
                await three.peers.open("127.0.0.1", one.port, "controller")
            reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            with contextlib.suppress(OSError):
                assert await reader.read() == b""
            writer.close()
            assert one.received == [] and one.peers.connected_nodes() == []

    run(work)


def test_an_invalid_message_closes_the_connection():
    async def work():
        async with Host(1) as one, Host(2) as two:
            connection = await two.peers.open("127.0.0.1", one.port, "controller")
            connection.writer.write((5).to_bytes(4, "big") + b"\xc1\xc1\xc1\xc1\xc1")
            with pytest.raises((EOFError, OSError)):
                await connection.receive()
            assert one.received == []

    run(work)


def test_the_wrong_host_at_an_address_is_not_taken_for_the_right_one():
    async def work():
        async with Host(1) as one, Host(3) as three:
            one.peers.add_address(2, "127.0.0.1", three.port)
            one.peers.send(2, heartbeat(1))
            async with asyncio.timeout(10):
                while one.peers._nodes[2].failure_count == 0:
                    await asyncio.sleep(0.005)
            assert three.received == []

    run(work)


def test_other_purposes_get_the_stream():
    async def work():
        async with Host(1) as one, Host(2) as two:
            connection = await two.peers.open("127.0.0.1", one.port, "gossip")
            connection.writer.write(b"abc")
            await one.wait(1)
            assert one.streams == [b"abc"] and one.peers.connected_nodes() == []
            connection.writer.close()

    run(work)


def test_a_live_voter_is_not_displaced_by_another_host_with_its_node_id():
    """While there is no leader both are accepted; messages to the voter (such as a vote request)
    must not go to the newcomer.
    """

    async def work():
        async with Host(1) as one, Host(2) as two:
            one.voters.add(two.directory_id)
            voter = await two.peers.open("127.0.0.1", one.port, "controller")
            while one.peers.connected_nodes() != [2]:
                await asyncio.sleep(0.005)
            two.directory_id = "another-disk"
            newcomer = await two.peers.open("127.0.0.1", one.port, "controller")
            while len(one.peers._nodes[2].connections) < 2:
                await asyncio.sleep(0.005)
            one.peers.send(2, heartbeat(5))
            assert await voter.receive() == heartbeat(5)
            voter.writer.close()
            while len(one.peers._nodes[2].connections) > 1:
                await asyncio.sleep(0.005)
            one.peers.send(2, heartbeat(6))
            assert await newcomer.receive() == heartbeat(6), "the voter is gone"

    run(work)


def test_a_restarted_peer_with_another_directory_is_spoken_to():
    async def work():
        async with Host(1) as one, Host(2) as two:
            old = await two.peers.open("127.0.0.1", one.port, "controller")
            while one.peers.connected_nodes() != [2]:
                await asyncio.sleep(0.005)
            two.directory_id = "another-disk"
            new = await two.peers.open("127.0.0.1", one.port, "controller")
            while len(one.peers._nodes[2].connections) < 2:
                await asyncio.sleep(0.005)
            one.peers.send(2, heartbeat(5))
            assert await new.receive() == heartbeat(5)
            for _ in range(peers.CONNECTIONS_PER_NODE_MAX + 1):
                await two.peers.open("127.0.0.1", one.port, "controller")
            async with asyncio.timeout(10):
                while len(one.peers._nodes[2].connections) > peers.CONNECTIONS_PER_NODE_MAX:
                    await asyncio.sleep(0.005)
            old.writer.close()

    run(work)


# -- TLS -------------------------------------------------------------------------------------------


def secured(tmp_path, node_id: int, tls: str = "required", pair=None) -> Host:
    return Host(node_id, host=host(tmp_path, node_id, tls, pair))


def long_name(text: str, size: int = 50) -> broker_messages.Heartbeat:
    """A message that a reader of the wire would recognise."""
    return msgspec.structs.replace(
        heartbeat(1), directories=[broker_messages.DirectoryReport(text * size, "/d", 1, True)]
    )


def test_messages_between_secured_hosts_are_encrypted(tmp_path):
    async def work():
        async with secured(tmp_path, 1) as one, secured(tmp_path, 2) as two:
            with Recorder(("127.0.0.1", two.port)) as wire:
                one.peers.add_address(2, "127.0.0.1", wire.address[1])
                for size in (1, 100, 200_000):
                    one.peers.send(2, long_name("MARKER", size))
                received = await two.wait(3)
                assert [len(message.directories[0].directory_id) for _, message in received] == [6, 600, 1_200_000]
                two.peers.send(1, heartbeat(8, 2))  # over the same connection
                assert await one.wait(1) == [(2, heartbeat(8, 2))]
                assert one.peers.connected_nodes() == [2] and two.peers.connected_nodes() == [1]
                exchange = await one.peers.open("127.0.0.1", wire.address[1], "gossip")
                exchange.writer.write(b"abc")
                await two.wait(4)
                assert two.streams == [b"abc"]
                exchange.writer.transport.abort()
                await one.peers.flush()
                one.peers.drop(lambda identity: False)
            seen = b"".join(wire.seen)
            assert len(seen) > 1_200_000 and b"MARKER" not in seen and b"MQDP" in seen

    run(work)


def test_bytes_that_a_host_does_not_read_are_bounded_under_tls(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "SEND_BYTES_MAX", 4 << 20)

    class Silent(Host):
        async def on_stream(self, hello, reader, writer) -> None:
            await asyncio.get_running_loop().create_future()

    async def work():
        async with secured(tmp_path, 1) as one, Silent(2, host=host(tmp_path, 2)) as two:
            connection = await one.peers.open("127.0.0.1", two.port, "gossip")
            count = 0
            while connection.is_open:
                connection.send(b"x" * (1 << 20))
                count += 1
                await asyncio.sleep(0)
            assert 4 <= count < 40, "the bound, and what the kernel holds"

    run(work)


@pytest.mark.parametrize(("mine", "theirs"), [("required", None), (None, "required")])
def test_a_host_that_must_use_tls_refuses_one_that_cannot(tmp_path, mine, theirs, caplog):
    async def work():
        one = secured(tmp_path, 1, mine) if mine else Host(1)
        two = secured(tmp_path, 2, theirs) if theirs else Host(2)
        async with one, two:
            for _ in range(2):
                with pytest.raises(HandshakeRefused, match=r"has cluster.tls=required.*mqd up --secure") as refused:
                    await one.peers.open("127.0.0.1", two.port, "controller")
                assert refused.value.code == handshake.REFUSED_TLS
            assert two.received == [] and two.peers.connected_nodes() == []

    run(work)
    logged = [record for record in caplog.records if "was refused" in record.getMessage()]
    assert len(logged) == 1, "once, though it tried twice"


def test_a_rolling_restart(tmp_path):
    """off -> allowed, host by host, then required."""

    async def work():
        async with Host(1) as old, secured(tmp_path, 2, "allowed") as new, secured(tmp_path, 3) as strict:
            for one, other, encrypted in (
                (old, new, False),
                (new, old, False),
                (new, strict, True),
                (strict, new, True),
            ):
                connection = await one.peers.open("127.0.0.1", other.port, "controller")
                assert isinstance(connection.writer, TlsWriter) == encrypted
                connection.writer.transport.abort()

    run(work)


@pytest.mark.parametrize("thief", [1, 2])
def test_another_hosts_certificate_is_refused_and_both_log_it(tmp_path, thief, caplog):
    """The connection is established once the certificate is right."""
    stolen = pki.issue_host(authority(), 3, NOW)

    async def work():
        one = secured(tmp_path, 1, pair=stolen if thief == 1 else None)
        two = secured(tmp_path, 2, pair=stolen if thief == 2 else None)
        async with one, two:
            one.peers.add_address(2, "127.0.0.1", two.port)
            one.peers.send(2, heartbeat(1))
            async with asyncio.timeout(10):
                while one.peers._nodes[2].failure_count == 0:
                    await asyncio.sleep(0.005)
            assert two.received == [] and one.peers.connected_nodes() == two.peers.connected_nodes() == []
            reason = f"node {thief} has a certificate of mqd://node/3"
            assert reason in one.peers._nodes[2].logged_failure
            bad = (one, two)[thief - 1].peers._credentials.host
            impose(bad, tmp_path / str(thief), pki.issue_host(authority(), thief, NOW))
            async with asyncio.timeout(10):
                while not two.received:
                    one.peers.send(2, heartbeat(2))
                    await asyncio.sleep(0.02)

    run(work)
    logged = [record for record in caplog.records if "was refused" in record.getMessage()]
    assert len(logged) == 1


def test_certificates_rotate_under_load(tmp_path):
    """Connections are opened and closed, messages flow, and each certificate is replaced
    repeatedly.
    """

    async def work():
        async with secured(tmp_path, 1) as one, secured(tmp_path, 2) as two:
            one.peers.add_address(2, "127.0.0.1", two.port)
            seen = set()
            for turn in range(6):
                host_of = (one, two)[turn % 2]
                impose(
                    host_of.peers._credentials.host,
                    tmp_path / str(host_of.node_id),
                    pki.issue_host(authority(), host_of.node_id, NOW),
                )
                for number in range(20):
                    one.peers.send(2, heartbeat(turn * 100 + number))
                await two.wait(20 * (turn + 1))
                connection = await two.peers.open("127.0.0.1", one.port, "gossip")
                seen.add(connection.writer._tls._ssl.getpeercert()["serialNumber"])
                connection.writer.transport.abort()
            assert [message.sent_ms for _, message in two.received] == [
                turn * 100 + number for turn in range(6) for number in range(20)
            ]
            assert len(seen) == 3, "new connections use the new certificate"

    run(work)


# -- the key ---------------------------------------------------------------------------------------


def test_the_key_rotates_under_load(tmp_path, caplog):
    """Three hosts get the file of each step in different orders and connect all the time; none is
    refused.
    """
    caplog.set_level(logging.INFO)
    origin = tmp_path / "key"
    cluster_key.make(origin)
    first = origin.read_bytes()
    files = {node_id: tmp_path / f"key-{node_id}" for node_id in (1, 2, 3)}
    for file in files.values():
        write(file, first)

    async def work():
        proofs = {node_id: credentials.load({"cluster.key.file": str(file)}) for node_id, file in files.items()}
        async with (
            Host(1, proofs=proofs[1]) as one,
            Host(2, proofs=proofs[2]) as two,
            Host(3, proofs=proofs[3]) as three,
        ):
            hosts = (one, two, three)

            async def all_reach_all() -> None:
                for host in hosts:
                    for other in hosts:
                        if other is not host:
                            connection = await host.peers.open("127.0.0.1", other.port, "controller")
                            connection.writer.transport.abort()

            await all_reach_all()
            for step, order in ((1, (1, 2, 3)), (2, (3, 1, 2)), (3, (2, 3, 1))):
                assert cluster_key.rotate(origin) == step
                for node_id in order:
                    write(files[node_id], origin.read_bytes())
                    assert proofs[node_id].reload() and not proofs[node_id].reload()
                    await all_reach_all()
            async with Host(4, secret=first.strip()) as late:
                with pytest.raises((HandshakeFailed, EOFError)):
                    await late.peers.open("127.0.0.1", one.port, "controller")

    run(work)
    assert len([record for record in caplog.records if "cluster key reloaded" in record.getMessage()]) == 9


def test_a_key_file_that_cannot_be_used_leaves_the_previous_in_use(tmp_path, caplog):
    file = tmp_path / "key"
    cluster_key.make(file)
    proofs = credentials.load({"cluster.key.file": str(file)})
    before = proofs.secrets
    for content, mode in ((b"short", 0o600), (b"x" * 43, 0o644)):
        write(file, content, mode)
        assert not proofs.reload() and not proofs.reload() and proofs.secrets == before
    assert len([record for record in caplog.records if "cannot be used" in record.getMessage()]) == 2
    file.chmod(0o600)  # as the message advises
    assert proofs.reload() and proofs.secrets == (b"x" * 43,)
    file.unlink()
    assert not proofs.reload() and proofs.secrets == (b"x" * 43,)
