"""Connections that the acceptor hands to workers."""

import asyncio
import socket

import pytest

from mqd.acceptor.accepting import MAGIC, PACKET, Acceptor, packet
from mqd.acceptor.connection_limits import ConnectionLimits
from mqd.base.host_names import packed_ip
from tests.ports import free_port

# -- hand-off --------------------------------------------------------------------------------------


def test_the_packet_has_the_reactors_format() -> None:
    data = packet(3, packed_ip("192.0.2.1"), 50000, ("198.51.100.2", 9092), 5, 7)
    assert len(data) == 64 and data[:4] == b"ONC1"
    magic, listener, flags, peer, peer_port, local_port, local, *counts = PACKET.unpack(data)
    assert (magic, listener, flags, peer_port, local_port) == (MAGIC, 3, 0, 50000, 9092)
    assert peer == bytes(10) + b"\xff\xff" + bytes([192, 0, 2, 1]) and local == bytes(10) + b"\xff\xff" + bytes(
        [198, 51, 100, 2]
    )
    assert counts == [5, 7]
    six = PACKET.unpack(packet(0, packed_ip("2001:db8::1"), 1, ("fe80::1%eth0", 2, 0, 2)))
    assert six[3].hex() == "20010db8000000000000000000000001" and six[6].hex() == "fe800000000000000000000000000001"


class Handoffs:
    """Sockets of `count` workers, with small buffers on request."""

    def __init__(self, count: int, buffer_bytes: int = 0) -> None:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(count)]
        self.acceptor, self.worker = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        for end in self.worker:
            end.setblocking(False)
        if buffer_bytes:
            for end in self.acceptor:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        self.taken: list[tuple[int, socket.socket]] = []

    def take(self, worker: int) -> int:
        count = 0
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self.worker[worker], 64, 1)
            except BlockingIOError:
                return count
            assert len(data) == 64 and len(fds) == 1
            self.taken.append((worker, socket.socket(fileno=fds[0])))
            count += 1

    def close(self) -> None:
        for end in [*self.acceptor, *self.worker, *(one for _, one in self.taken)]:
            end.close()


@pytest.mark.parametrize("buffer_bytes", [0, 1])
def test_every_connection_is_handed_over(buffer_bytes: int) -> None:
    """With the smallest buffers only a few fit before the workers take them: the rest wait, and
    none is dropped.
    """

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        handoffs = Handoffs(2, buffer_bytes)
        listener = socket.create_server(("127.0.0.1", free_port()), backlog=512)
        acceptor = Acceptor(
            [listener],
            handoffs.acceptor,
            lambda worker: len([1 for other, _ in handoffs.taken if other == worker]),
            lambda worker: True,
            ConnectionLimits({}, ["PLAINTEXT"]),
        )
        acceptor.start(loop)
        clients = [socket.create_connection(listener.getsockname()) for _ in range(200)]
        for _ in range(2000):
            await asyncio.sleep(0.001)
            handoffs.take(0)
            handoffs.take(1)
            if len(handoffs.taken) == 200:
                break
        assert len(handoffs.taken) == 200 == acceptor.accepted_count
        assert {connection.getpeername() for _, connection in handoffs.taken} == {
            client.getsockname() for client in clients
        }
        assert all(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for _, connection in handoffs.taken)
        per_worker = [sum(1 for worker, _ in handoffs.taken if worker == index) for index in (0, 1)]
        assert min(per_worker) >= 60, per_worker
        acceptor.stop()
        for client in [*clients, listener]:
            client.close()
        handoffs.close()

    asyncio.run(scenario())


def test_a_worker_that_does_not_run_gets_connections_last() -> None:
    async def scenario() -> None:
        handoffs = Handoffs(2)
        listener = socket.create_server(("127.0.0.1", free_port()))
        running = {1}
        acceptor = Acceptor(
            [listener],
            handoffs.acceptor,
            lambda worker: 0,
            lambda worker: worker in running,
            ConnectionLimits({}, ["PLAINTEXT"]),
        )
        acceptor.start(asyncio.get_running_loop())
        clients = []
        for expected in (1, 0):
            for _ in range(3):
                clients.append(socket.create_connection(listener.getsockname()))
            for _ in range(1000):
                await asyncio.sleep(0.001)
                if handoffs.take(expected) + handoffs.take(1 - expected) and len(handoffs.taken) == len(clients):
                    break
            running = {0}
        assert [worker for worker, _ in handoffs.taken] == [1, 1, 1, 0, 0, 0]
        acceptor.stop()
        for one in [*clients, listener]:
            one.close()
        handoffs.close()

    asyncio.run(scenario())


def test_out_of_descriptors_pauses_and_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    from mqd.acceptor import accepting

    monkeypatch.setattr(accepting, "PAUSE_S", 0.01)

    class Listener:
        """A listening socket whose accept fails at first."""

        def __init__(self, real: socket.socket) -> None:
            self._real, self.refusals = real, 3

        def __getattr__(self, name: str):
            return getattr(self._real, name)

        def accept(self):
            if self.refusals:
                self.refusals -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return self._real.accept()

    async def scenario() -> None:
        handoffs = Handoffs(1)
        listener = Listener(socket.create_server(("127.0.0.1", free_port())))
        acceptor = Acceptor(
            [listener], handoffs.acceptor, lambda worker: 0, lambda worker: True, ConnectionLimits({}, ["PLAINTEXT"])
        )  # type: ignore[list-item]
        acceptor.start(asyncio.get_running_loop())
        client = socket.create_connection(listener.getsockname())
        for _ in range(1000):
            await asyncio.sleep(0.001)
            if handoffs.take(0):
                break
        assert len(handoffs.taken) == 1 and listener.refusals == 0
        acceptor.stop()
        for one in (client, listener):
            one.close()
        handoffs.close()

    asyncio.run(scenario())
