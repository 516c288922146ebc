"""Accepting connections: errors of accept(), connection rates of addresses, listeners and the
broker, and connection limits.
"""

import asyncio
import errno
import socket

import pytest

from mqd.acceptor import accepting, connection_limits
from mqd.acceptor.accepting import PACKET, Acceptor
from mqd.acceptor.connection_limits import NO_LIMIT, ConnectionLimits
from mqd.acceptor.metadata import Metadata
from mqd.base.config import ConfigError, load_broker, validate_broker_dynamic
from mqd.base.host_names import packed_ip
from mqd.cluster.host import messages
from tests.ports import free_port
from tests.unit.worker.refusing_listener import RefusingListener

SECOND_NS = 1_000_000_000
TWO_WINDOWS = {"quota.window.num": "2"}  # a burst of one second
ONE, TWO = packed_ip("10.0.0.1"), packed_ip("10.0.0.2")


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("code", [errno.EPERM, errno.EACCES, errno.EMFILE, errno.EOPNOTSUPP])
def test_accepting_pauses_when_no_connection_can_be_accepted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    """A waiting connection stays readable: without a pause the acceptor would loop forever."""

    async def scenario() -> None:
        faults: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context))
        listener = RefusingListener([code] * 3)
        acceptor = Acceptor([listener], [], lambda worker: 0, lambda worker: True, ConnectionLimits({}, ["PLAINTEXT"]))  # type: ignore[list-item]
        monkeypatch.setattr(accepting, "PAUSE_S", 3600.0)
        acceptor.start(asyncio.get_running_loop())
        await turns(20)
        assert (
            listener.requested == 1 and len(caplog.records) == 1 and ("ulimit" in caplog.text) == (code == errno.EMFILE)
        )
        acceptor._resume_unless_full()
        await turns(20)
        assert listener.requested == 2 and not faults
        acceptor.stop()
        listener.close()

    asyncio.run(scenario())


def test_a_connection_closed_before_it_is_served_is_skipped() -> None:
    async def scenario() -> None:
        codes = [errno.ECONNABORTED, errno.EPROTO, errno.ENETDOWN, errno.ENOPROTOOPT, errno.EHOSTDOWN, errno.ENONET]
        codes += [errno.EHOSTUNREACH, errno.ENETUNREACH]  # errors of the new connection, see accept(2)
        count = len(codes)
        listener = RefusingListener(codes)
        acceptor = Acceptor([listener], [], lambda worker: 0, lambda worker: True, ConnectionLimits({}, ["PLAINTEXT"]))  # type: ignore[list-item]
        acceptor.start(asyncio.get_running_loop())
        await turns(3)
        assert listener.requested > count and not acceptor._paused
        acceptor.stop()
        listener.close()

    asyncio.run(scenario())


# -- limits ----------------------------------------------------------------------------------------


def limited(limits: ConnectionLimits, **rates: float) -> Metadata:
    """With quotas of the address a, "default" for all others."""
    metadata = Metadata()
    metadata.client_quotas = [
        messages.ClientQuota((("ip", None if name == "default" else "10.0.0.1"),), {"connection_creation_rate": rate})
        for name, rate in rates.items()
    ]
    limits.update(metadata)
    return metadata


def admitted(limits: ConnectionLimits, address: bytes, now_ns: int, count: int = 1000) -> int:
    return sum(not limits.address_delay_s(address, now_ns) for _ in range(count))


def test_addresses_have_a_rate_and_all_others_the_default() -> None:
    limits = ConnectionLimits(TWO_WINDOWS, ["PLAINTEXT"])
    now_ns = 100 * SECOND_NS
    assert admitted(limits, ONE, now_ns) == 1000
    limited(limits, one=5.0, default=20.0)
    assert admitted(limits, ONE, now_ns) == 6  # a second's worth and the first
    assert admitted(limits, TWO, now_ns) == admitted(limits, packed_ip("::1"), now_ns) == 21
    assert admitted(limits, packed_ip("::ffff:10.0.0.1"), now_ns) == 0  # the same address
    # refused connections did not count
    assert admitted(limits, ONE, now_ns + SECOND_NS) == 5
    assert 0 < limits.address_delay_s(ONE, now_ns + SECOND_NS) <= 0.2
    limited(limits, default=1.0)
    assert admitted(limits, ONE, now_ns + SECOND_NS) == 2
    limited(limits)
    assert admitted(limits, ONE, now_ns + SECOND_NS) == 1000


def test_the_delay_of_a_connection_is_bounded() -> None:
    limits = ConnectionLimits({"quota.window.num": "2"}, ["A"])
    limited(limits, default=0.25)
    assert [limits.address_delay_s(ONE, 0) for _ in range(3)] == [0, 1.0, 1.0]


def test_memory_of_addresses_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "ADDRESS_COUNT_MAX", 10)
    limits = ConnectionLimits(TWO_WINDOWS, ["A"])
    limited(limits, default=1.0)
    for number in range(100):
        limits.address_delay_s(packed_ip(f"10.0.1.{number}"), number * SECOND_NS // 5)
        assert len(limits._address_buckets) <= 10
    assert admitted(limits, packed_ip("10.0.1.99"), 99 * SECOND_NS // 5) == 1  # it is still in debt


def test_the_broker_and_listeners_have_rates() -> None:
    config = {**TWO_WINDOWS, "listener.name.a.max.connection.creation.rate": "2"}
    limits = ConnectionLimits(config, ["A", "B"])

    def accepted(listener_id: int, now_ns: int) -> int:
        count = 0
        while count < 100 and not limits.wait_s(listener_id, now_ns):
            limits.on_accepted(listener_id, now_ns)
            count += 1
        return count

    assert (accepted(0, 0), accepted(1, 0)) == (3, 100)
    metadata = Metadata()
    metadata.broker_config = {"max.connection.creation.rate": "10"}
    limits.update(metadata)
    assert (accepted(1, SECOND_NS), accepted(0, SECOND_NS)) == (11, 0)
    assert 0 < limits.wait_s(0, SECOND_NS) <= 1


def test_numbers_of_connections_follow_the_configuration() -> None:
    limits = ConnectionLimits({"listener.name.b.max.connections": "7", "max.connections": "5000"}, ["A", "B"])
    assert limits.address_limit(ONE) == NO_LIMIT and limits.listener_limits == [0, 7]
    metadata = Metadata()
    metadata.broker_config = {"max.connections.per.ip": "3", "max.connections.per.ip.overrides": "10.0.0.1:100, ::1:0"}
    limits.update(metadata)
    assert [limits.address_limit(one) for one in (ONE, TWO, packed_ip("::1"))] == [100, 3, 0]


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"max.connections.per.ip.overrides": "10.0.0.1"}, "not ADDRESS:NUMBER"),
        ({"max.connections.per.ip.overrides": "somewhere:5"}, "not an address"),
        ({"max.connections.per.ip": "0"}, "lets no client connect"),
        ({"max.connection.creation.rate": "0"}, "at least 1"),
    ],
)
def test_impossible_limits_are_refused(given: dict[str, str], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        validate_broker_dynamic(given, load_broker(None, {}, {}))


# -- on sockets ------------------------------------------------------------------------------------


class Setting:
    def __init__(self, limits: ConnectionLimits) -> None:
        self.listener = socket.create_server(("127.0.0.1", free_port()))
        self.worker, self.ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.acceptor = Acceptor([self.listener], [self.ours], lambda worker: 0, lambda worker: True, limits)
        self.acceptor.start(asyncio.get_running_loop())
        self.worker.setblocking(False)
        self.clients: list[socket.socket] = []
        self.given: list[tuple] = []

    def connect(self) -> socket.socket:
        client = socket.create_connection(self.listener.getsockname())
        client.setblocking(False)
        self.clients.append(client)
        return client

    async def handed(self, count: int) -> int:
        for _ in range(2000):
            await asyncio.sleep(0.001)
            try:
                data, fds, _, _ = socket.recv_fds(self.worker, 64, 1)
            except BlockingIOError:
                continue
            self.given.append(PACKET.unpack(data))
            self.clients.append(socket.socket(fileno=fds[0]))
            if len(self.given) == count:
                break
        return len(self.given)

    def close(self) -> None:
        self.acceptor.stop()
        for one in [*self.clients, self.listener, self.worker, self.ours]:
            one.close()


async def ended(client: socket.socket) -> bool:
    for _ in range(2000):
        await asyncio.sleep(0.001)
        try:
            return client.recv(1) == b""
        except BlockingIOError:
            continue
    return False


def test_an_address_above_its_rate_is_closed_late_and_others_wait_in_the_queue() -> None:
    async def scenario() -> None:
        limits = ConnectionLimits({"quota.window.num": "2", "max.connections.per.ip": "5"}, ["A"])
        metadata = Metadata()
        metadata.client_quotas = [messages.ClientQuota((("ip", "127.0.0.1"),), {"connection_creation_rate": 1.0})]
        limits.update(metadata)
        setting = Setting(limits)
        clients = [setting.connect() for _ in range(4)]
        assert await setting.handed(2) == 2 and setting.given[0][-2:] == (5, 0)
        assert len(setting.acceptor._delayed) == 2
        for client in clients[2:]:
            assert await ended(client)
        assert not setting.acceptor._delayed
        limited(limits)
        metadata.client_quotas, metadata.broker_config = [], {"max.connection.creation.rate": "50"}
        limits.update(metadata)
        for _ in range(60):
            setting.connect()
        assert await setting.handed(62) == 62  # all are accepted, but not at once
        setting.close()

    asyncio.run(scenario())


def test_few_refused_connections_are_kept_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "DELAYED_COUNT_MAX", 2)

    async def scenario() -> None:
        limits = ConnectionLimits(TWO_WINDOWS, ["A"])
        limited(limits, default=0.001)
        setting = Setting(limits)
        assert setting.connect() and await setting.handed(1) == 1
        clients = [setting.connect() for _ in range(3)]
        assert await ended(clients[2]) and len(setting.acceptor._delayed) == 2
        setting.acceptor.stop()
        assert await ended(clients[0])
        setting.close()

    asyncio.run(scenario())
