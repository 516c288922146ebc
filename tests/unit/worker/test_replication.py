"""Connections to leaders: which are needed, and how one is opened, authenticated, passed to the
reactor and reopened. The test plays the leader; the reactor is a list.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from mqd import native
from mqd.base.config import BROKER
from mqd.cluster.host.images import owner_of
from mqd.cluster.host.messages import BrokerImage, PartitionImage, TopicImage
from mqd.cluster.membership import handshake
from mqd.cluster.membership.credentials import Credentials
from mqd.cluster.membership.handshake import Hello, Identity, Refusal
from mqd.worker import replication
from mqd.worker.assignments import Assignment, ClusterView, Member, assignment_of, settings_of
from mqd.worker.host_connections import DialledConnection
from mqd.worker.replication import CATCH_UP, IN_SYNC, THROTTLED, Replication, Route, Target, spare_routes, target_routes
from tests.polling import PATIENCE_S
from tests.ports import free_port
from tests.unit.security.host_files import host

SECRET = b"a secret of sixteen bytes and more"
TOPIC = b"t" * 16


def broker(node_id: int, port: int = 9093, epoch: int = 5, host: str = "127.0.0.1") -> BrokerImage:
    return BrokerImage(
        node_id,
        "clients",
        9092,
        None,
        epoch,
        inter_broker_host=host,
        inter_broker_port=port,
        worker_count=4,
        directory_id=f"directory-{node_id}",
    )


def assignment(
    leader: int,
    worker: int = 0,
    in_sync: bool = True,
    node_id: int = 1,
    replicas: tuple[int, ...] = (1, 2, 3),
    throttled: bool = False,
) -> Assignment:
    members = tuple(Member(node, node != node_id or in_sync, True, 5) for node in replicas)
    return Assignment(node_id, 5, leader, 7, 3, 2, 10_000, -1, True, members, worker, throttled=throttled)


# -- target routes ---------------------------------------------------------------------------------


def test_one_route_for_each_worker_and_lane() -> None:
    assigned = {
        (TOPIC, 0): assignment(2, 0),
        (TOPIC, 1): assignment(2, 0),
        (TOPIC, 2): assignment(2, 3),
        (TOPIC, 3): assignment(3, 0, in_sync=False),
        (TOPIC, 4): assignment(1),  # led here
        (TOPIC, 5): assignment(-1),  # without a leader
        (TOPIC, 6): assignment(4),  # led by a host that is not registered
        (TOPIC, 7): assignment(2, 1, replicas=(2, 3)),  # this host is no longer a replica
        (TOPIC, 8): assignment(5),  # led by a host without an inter-broker listener
    }
    brokers = {1: broker(1), 2: broker(2, 1111), 3: broker(3, 2222, epoch=9), 5: broker(5, host="")}
    assert target_routes(assigned, brokers) == {
        Route(2, 0, IN_SYNC): Target("127.0.0.1", 1111, 5),
        Route(2, 3, IN_SYNC): Target("127.0.0.1", 1111, 5),
        Route(3, 0, CATCH_UP): Target("127.0.0.1", 2222, 9),
    }
    assert target_routes({}, brokers) == {}


@pytest.mark.parametrize(
    ("in_sync", "throttled", "lane"),
    [(True, False, IN_SYNC), (True, True, IN_SYNC), (False, False, CATCH_UP), (False, True, THROTTLED)],
)
def test_replicas_in_sync_are_not_throttled(in_sync: bool, throttled: bool, lane: int) -> None:
    assert list(target_routes({(TOPIC, 0): assignment(2, in_sync=in_sync, throttled=throttled)}, {2: broker(2)})) == [
        Route(2, 0, lane)
    ]


@pytest.mark.parametrize(
    ("listed", "throttled"),
    [("", []), ("*", [0, 1, 2]), ("1:1", [1]), ("1:2,2:1,0:3", [2]), ("11:1,1:11", []), ("0:1,*", [0, 1, 2])],
)
def test_throttled_replicas_are_those_in_the_topics_list(listed: str, throttled: list[int]) -> None:
    partitions = [PartitionImage(index, index, 0, 0, 1, 2, [2, 1], [2, 1]) for index in range(3)]
    topic = TopicImage("t", TOPIC, partitions, {"follower.replication.throttled.replicas": listed})
    reported = ClusterView(1, {2: broker(2)})
    settings = settings_of(topic, reported, {})
    assert [
        partition.index for partition in partitions if assignment_of(topic, partition, reported, settings).throttled
    ] == throttled


def test_routes_to_possible_next_leaders() -> None:
    brokers = {1: broker(1), 2: broker(2, 1111), 3: broker(3, 2222, 9), 4: broker(4, host="")}
    key = next((TOPIC, index) for index in range(4) if owner_of(TOPIC, index, 4) == 3)
    there = {Route(3, 3, IN_SYNC): Target("127.0.0.1", 2222, 9)}
    assert spare_routes({key: assignment(2)}, brokers) == there, "the leader's own route is wanted anyway"
    assert spare_routes({key: assignment(1)}, brokers) == {
        Route(2, 3, IN_SYNC): Target("127.0.0.1", 1111, 5),
        **there,
    }, "when this host leads no more"
    assert spare_routes({key: assignment(2, in_sync=False)}, brokers) == {}, "it has to catch up first"
    assert spare_routes({key: assignment(2, replicas=(1, 2))}, brokers) == {}
    assert spare_routes({key: assignment(2, replicas=(1, 2, 4))}, brokers) == {}, (
        "a host of one has no listener for others"
    )


def test_lanes_are_those_of_the_native_core() -> None:
    assert (IN_SYNC, CATCH_UP, THROTTLED) == (
        native.lib.MQD_LANE_IN_SYNC,
        native.lib.MQD_LANE_CATCH_UP,
        native.lib.MQD_LANE_THROTTLED,
    )


# -- connections -----------------------------------------------------------------------------------


class FakeReactor:
    """The commands that Replication uses; tokens as in ReactorCommands."""

    def __init__(self) -> None:
        self.put: list[tuple[int, socket.socket, native.FetcherOptions]] = []
        self.removed: list[tuple[int, int, int]] = []
        self.rates: list[int] = []

    def fetcher_put(self, token: int, fd: int, options: native.FetcherOptions) -> None:
        self.put.append((token, socket.socket(fileno=fd), options))

    def fetcher_remove(self, token: int, node: int, worker: int, lane: int) -> None:
        self.removed.append((node, worker, lane))

    def set_fetcher_rate(self, token: int, rate: int) -> None:
        self.rates.append(rate)


class FakeCommands:
    def __init__(self) -> None:
        self.token = 0
        self.before_done: Callable[[int], None] | None = None  # before the command's own response

    async def run(self, command: Callable[..., None], *arguments: object) -> native.Event:
        self.token += 1
        token = self.token
        command(token, *arguments)
        if self.before_done is not None:
            self.before_done(token)
        await asyncio.sleep(0)
        return event(native.EventKind.DONE, token)


def event(kind: int, token: int, text: str = "") -> native.Event:
    return native.Event(kind, native.SLOT_NONE, token, 0, 0, 0, 0, 0, None, text)


class Leader:
    """A host's listener: performs handshakes, keeps the connections. `decide`: as the acceptor's."""

    def __init__(self, node_id: int, secret: bytes = SECRET, tls: int = handshake.TLS_OFF) -> None:
        self.node_id = node_id
        self.tls = tls
        self.secret = secret
        self.hellos: list[Hello] = []
        self.refuse: Refusal | None = None
        self.streams: list[asyncio.StreamWriter] = []
        self.port = 0
        self._server: asyncio.Server | None = None

    def decide(self, hello: Hello) -> Identity | Refusal:
        self.hellos.append(hello)
        return self.refuse or Identity(self.node_id, f"directory-{self.node_id}", "cluster")

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._on_connection, "127.0.0.1", free_port())
        self.port = self._server.sockets[0].getsockname()[1]

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.streams.append(writer)
        side = handshake.Responder(
            handshake.derive_key(self.secret, "handshake"), self.decide, os.urandom(handshake.NONCE_BYTES), self.tls
        )
        try:
            while side.missing_bytes:
                writer.write(side.feed(await reader.readexactly(side.missing_bytes)))
            if side.done:
                writer.write(b"first byte behind the handshake")
        except (handshake.HandshakeFailed, asyncio.IncompleteReadError):
            writer.close()

    async def stop(self) -> None:
        assert self._server is not None
        for writer in self.streams:
            writer.close()
        self._server.close()
        await self._server.wait_closed()


@contextlib.asynccontextmanager
async def following(
    leader: Leader, credentials: Credentials | None = None, **assigned: Assignment
) -> AsyncIterator[tuple[Replication, FakeReactor, FakeCommands, dict[tuple[bytes, int], Assignment]]]:
    await leader.start()
    reactor, commands = FakeReactor(), FakeCommands()
    table = {(TOPIC, index): one for index, one in enumerate(assigned.values())}
    config = {"replica.fetch.max.bytes": "5000"}
    subject = Replication(reactor, commands, table, config, credentials or Credentials([SECRET]))  # type: ignore[arg-type]
    try:
        yield subject, reactor, commands, table
    finally:
        await subject.close()
        for _, connection, _ in reactor.put:
            connection.close()
        await leader.stop()


def cluster(leader: Leader, epoch: int = 5, port: int | None = None) -> ClusterView:
    return ClusterView(
        1, {1: broker(1), leader.node_id: broker(leader.node_id, port if port is not None else leader.port, epoch)}
    )


async def until(what: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not what():
            await asyncio.sleep(0.005)


def run(scenario: Awaitable[None]) -> None:
    asyncio.run(scenario)  # type: ignore[arg-type]


def test_an_authenticated_socket_goes_to_the_reactor_with_all_bytes_after_the_handshake() -> None:
    async def scenario() -> None:
        leader = Leader(2)
        async with following(leader, one=assignment(2, 3)) as (subject, reactor, _, _):
            subject.update(cluster(leader), "cluster", {})
            await until(lambda: reactor.put)
            _, connection, options = reactor.put[0]
            assert (leader.hellos[0].purpose, leader.hellos[0].worker, leader.hellos[0].identity) == (
                "data",
                3,
                Identity(1, "directory-1", "cluster"),
            )
            assert (
                options.leader_node,
                options.leader_worker,
                options.lane,
                options.node_id,
                options.partition_bytes_max,
            ) == (2, 3, IN_SYNC, 1, 5000)
            connection.setblocking(True)
            assert connection.recv(100) == b"first byte behind the handshake"

    run(scenario())


def test_a_closed_connection_is_reopened_and_an_unneeded_one_closed() -> None:
    async def scenario() -> None:
        leader = Leader(2)
        async with following(leader, one=assignment(2)) as (subject, reactor, _, table):
            subject.update(cluster(leader), "cluster", {})
            await until(lambda: len(reactor.put) == 1)
            await asyncio.sleep(0.01)
            subject.update(cluster(leader), "cluster", {})  # nothing new
            subject.on_ended(
                event(native.EventKind.FETCHER_ENDED, reactor.put[0][0], "the leader closed the connection")
            )
            await until(lambda: len(reactor.put) == 2)
            table.clear()
            subject.update(cluster(leader), "cluster", {})
            await until(lambda: reactor.removed == [(2, 0, IN_SYNC)])
            await asyncio.sleep(0.15)
            assert len(reactor.put) == 2

    run(scenario())


def test_an_end_reported_before_the_start_is_handled() -> None:
    async def scenario() -> None:
        leader = Leader(2)
        async with following(leader, one=assignment(2)) as (subject, reactor, commands, _):
            commands.before_done = lambda token: (
                subject.on_ended(event(native.EventKind.FETCHER_ENDED, token, "at once"))
                if len(reactor.put) == 1
                else None
            )
            subject.update(cluster(leader), "cluster", {})
            await until(lambda: len(reactor.put) == 2)

    run(scenario())


def test_a_new_incarnation_of_the_leader_is_connected_to_at_once() -> None:
    async def scenario() -> None:
        leader = Leader(2)
        async with following(leader, one=assignment(2)) as (subject, reactor, _, _):
            subject.update(cluster(leader), "cluster", {})
            await until(lambda: len(reactor.put) == 1)
            subject.update(cluster(leader, epoch=6), "cluster", {})
            await until(lambda: len(reactor.put) == 2)
            assert reactor.removed == []  # the new one replaces the old one

    run(scenario())


@pytest.mark.parametrize("wrong", ["key", "refused", "identity", "address"])
def test_a_replica_that_does_not_lead_receives_nothing(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replication, "BACKOFF_S_MAX", 0.02)

    async def scenario() -> None:
        leader = Leader(2, b"another secret of sixteen bytes" if wrong == "key" else SECRET)
        if wrong == "refused":
            leader.refuse = Refusal(handshake.REFUSED_BUSY, "not yet")
        async with following(leader, one=assignment(2)) as (subject, reactor, _, _):
            if wrong == "identity":
                leader.node_id = 9
                reported = ClusterView(1, {1: broker(1), 2: broker(2, leader.port)})
            else:
                reported = cluster(leader, port=1 if wrong == "address" else None)
            subject.update(reported, "cluster", {})
            if wrong == "address":
                await asyncio.sleep(0.2)
            else:
                await until(lambda: len(leader.streams) > 1)  # it is retried
            assert reactor.put == []
            leader.refuse, leader.secret, leader.node_id = None, SECRET, 2
            subject.update(cluster(leader, epoch=7), "cluster", {})
            await until(lambda: reactor.put)

    run(scenario())


@pytest.mark.parametrize(
    ("mode", "leaders", "tls"),
    [
        ("off", handshake.TLS_ALLOWED, False),
        ("allowed", handshake.TLS_OFF, False),
        ("allowed", handshake.TLS_ALLOWED, True),
        ("required", handshake.TLS_ALLOWED, True),
    ],
)
def test_the_reactor_continues_with_tls_where_both_hosts_use_it(
    tmp_path: Path, mode: str, leaders: int, tls: bool
) -> None:
    async def scenario() -> None:
        leader = Leader(2, tls=leaders)
        credentials = Credentials([SECRET], None if mode == "off" else host(tmp_path, 1, mode))
        async with following(leader, credentials, one=assignment(2)) as (subject, reactor, _, _):
            subject.update(cluster(leader), "cluster", {})
            await until(lambda: reactor.put)
            assert reactor.put[0][2].tls is tls

    run(scenario())


def test_a_leader_without_tls_is_refused_where_it_is_required(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        leader, credentials = Leader(2), Credentials([SECRET], host(tmp_path, 1))
        async with following(leader, credentials, one=assignment(2)) as (subject, reactor, _, _):
            subject.update(cluster(leader), "cluster", {})
            await until(lambda: caplog.records)
            assert "cluster.tls=required" in caplog.records[0].mqd_fields["reason"]  # type: ignore[attr-defined]
            assert not reactor.put

    with caplog.at_level("INFO"):
        run(scenario())


NO_NAMES = ["a..b", "a" * 64 + ".example"]  # names that no resolver accepts


@pytest.mark.parametrize("wrong", [*NO_NAMES, "our own fault"])
def test_a_connection_survives_unresolvable_names_and_internal_errors(
    wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is retried, logged once, and opened when the leader's correct name arrives."""

    async def scenario() -> None:
        leader = Leader(2)
        async with following(leader, one=assignment(2)) as (subject, reactor, _, _):
            tried: list[Target] = []
            connect = subject._connect

            async def counted(route: Route, target: Target) -> DialledConnection:
                tried.append(target)
                if wrong == "our own fault" and target.epoch == 5:
                    raise ZeroDivisionError(wrong)
                return await connect(route, target)

            subject._connect = counted  # type: ignore[method-assign]
            host = wrong if wrong in NO_NAMES else "127.0.0.1"
            subject.update(ClusterView(1, {1: broker(1), 2: broker(2, leader.port, host=host)}), "cluster", {})
            await until(lambda: len(tried) == 3)
            assert len([record for record in caplog.records if "cannot be reached" in record.getMessage()]) == 1
            subject.update(cluster(leader, epoch=6), "cluster", {})
            await until(lambda: reactor.put)

    with caplog.at_level("INFO"):
        run(scenario())


def test_a_host_that_is_unregistered_while_it_dials_dials_again_when_it_is_back() -> None:
    async def scenario() -> None:
        leader = Leader(2)
        async with following(leader, one=assignment(2)) as (subject, reactor, _, _):
            connect, made = subject._connect, []

            async def unregistered_meanwhile(route: Route, target: Target) -> DialledConnection:
                made.append(await connect(route, target))
                if len(made) == 1:
                    subject.update(ClusterView(1, {2: broker(2, leader.port)}), "cluster", {})
                return made[-1]

            subject._connect = unregistered_meanwhile  # type: ignore[method-assign]
            subject.update(cluster(leader), "cluster", {})
            await until(lambda: made)
            await asyncio.sleep(0)
            assert made[0].socket.fileno() < 0 and not reactor.put
            subject.update(cluster(leader), "cluster", {})
            await until(lambda: reactor.put)

    run(scenario())


def test_nothing_is_connected_before_this_host_is_registered() -> None:
    async def scenario() -> None:
        leader = Leader(2)
        async with following(leader, one=assignment(2)) as (subject, reactor, _, _):
            subject.update(ClusterView(1, {2: broker(2, leader.port)}), "cluster", {})
            await asyncio.sleep(0.1)
            assert (leader.hellos, reactor.put) == ([], [])
            subject.update(cluster(leader), "cluster", {})
            await until(lambda: reactor.put)

    run(scenario())


def test_the_catch_up_rate_follows_the_configuration() -> None:
    async def scenario() -> None:
        leader = Leader(2)
        async with following(leader) as (subject, reactor, _, _):
            subject.update(cluster(leader), "cluster", {})
            subject.update(cluster(leader), "cluster", {"follower.replication.throttled.rate": "1000000"})
            subject.update(cluster(leader), "cluster", {"follower.replication.throttled.rate": "1000000"})
            subject.update(cluster(leader), "cluster", {})
            await until(lambda: reactor.rates == [250_000, 0])  # four workers share it

    run(scenario())
    assert BROKER["follower.replication.throttled.rate"].dynamic
