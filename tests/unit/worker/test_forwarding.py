"""Connections for forwarding local clients' batches to leaders on other hosts: opened on demand,
refused when no host listens, closed when the host's incarnation ends. The leader is the one of the
replication tests; the reactor is a list.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from mqd import native
from mqd.cluster.membership import handshake
from mqd.cluster.membership.credentials import Credentials
from mqd.worker.assignments import ClusterView
from mqd.worker.forwarding import BACKOFF_MS_MAX, Forwarding
from tests.unit.security.host_files import host
from tests.unit.worker.test_replication import (
    NO_NAMES,
    SECRET,
    FakeCommands,
    Leader,
    broker,
    cluster,
    event,
    run,
    until,
)


class FakeReactor:
    def __init__(self) -> None:
        self.put: list[tuple[int, socket.socket, tuple[int, int, int]]] = []
        self.refused: list[tuple[tuple[int, int, int], int]] = []
        self.removed: list[int] = []
        self.tls: list[bool] = []

    def relay_put(self, token: int, fd: int, node: int, worker: int, lane: int, _timeout_ms: int, tls: bool) -> None:
        self.put.append((token, socket.socket(fileno=fd), (node, worker, lane)))
        self.tls.append(tls)

    def relay_refuse(self, _token: int, node: int, worker: int, lane: int, refuse_ms: int) -> None:
        self.refused.append(((node, worker, lane), refuse_ms))

    def relay_remove(self, _token: int, node: int) -> None:
        self.removed.append(node)


@contextlib.asynccontextmanager
async def forwarding(
    leader: Leader, credentials: Credentials | None = None
) -> AsyncIterator[tuple[Forwarding, FakeReactor]]:
    await leader.start()
    reactor = FakeReactor()
    subject = Forwarding(reactor, FakeCommands(), {}, credentials or Credentials([SECRET]))  # type: ignore[arg-type]
    try:
        yield subject, reactor
    finally:
        await subject.close()
        for _, connection, _ in reactor.put:
            connection.close()
        await leader.stop()


def requested(node: int, worker: int = 0, lane: int = 0) -> native.Event:
    return native.Event(native.EventKind.RELAY_REQUESTED, native.SLOT_NONE, 0, 0, worker, node, 0, lane, None, "")


def test_connections_are_dialled_on_demand() -> None:
    async def scenario() -> None:
        leader = Leader(2)
        async with forwarding(leader) as (subject, reactor):
            subject.update(cluster(leader), "cluster")
            await asyncio.sleep(0.02)
            assert not leader.hellos
            subject.on_requested(requested(2, 3, 1))
            subject.on_requested(requested(2, 3, 1))  # once is enough
            await until(lambda: reactor.put)
            token, connection, way = reactor.put[0]
            assert way == (2, 3, 1) and [hello.worker for hello in leader.hellos] == [3]
            connection.setblocking(True)
            assert connection.recv(100) == b"first byte behind the handshake"
            subject.on_ended(event(native.EventKind.RELAY_ENDED, token, "the leader closed the connection"))
            await asyncio.sleep(0.02)
            assert len(reactor.put) == 1  # no second one is needed
            subject.on_requested(requested(2, 3, 1))
            await until(lambda: len(reactor.put) == 2)

    run(scenario())


@pytest.mark.parametrize("tls", [False, True])
def test_the_reactor_continues_with_tls_where_both_hosts_use_it(tmp_path: Path, tls: bool) -> None:
    async def scenario() -> None:
        leader = Leader(2, tls=handshake.TLS_ALLOWED)
        async with forwarding(leader, Credentials([SECRET], host(tmp_path, 1) if tls else None)) as (subject, reactor):
            subject.update(cluster(leader), "cluster")
            subject.on_requested(requested(2))
            await until(lambda: reactor.put)
            assert reactor.tls == [tls]

    run(scenario())


@pytest.mark.parametrize("reachable", [True, False])
def test_a_host_wanted_in_the_turn_of_the_response_is_dialled(reachable: bool) -> None:
    """A late loop gets both from the reactor at once: the result of the last command, and the next
    request, which the reactor sends only once.
    """

    async def scenario() -> None:
        leader = Leader(2)
        async with forwarding(leader) as (subject, reactor):
            wishes = [requested(2)]
            subject._commands.before_done = lambda token: subject.on_requested(wishes.pop()) if wishes else None  # type: ignore[attr-defined]
            subject.update(cluster(leader, port=None if reachable else 1), "cluster")
            subject.on_requested(requested(2))
            responses = reactor.put if reachable else reactor.refused
            await until(lambda: len(responses) == 2)
            assert not wishes and len(leader.hellos) == (2 if reachable else 0)

    run(scenario())


def test_nothing_is_dialled_after_the_end() -> None:
    async def scenario() -> None:
        leader = Leader(2)
        async with forwarding(leader) as (subject, reactor):
            ends: list[asyncio.Task[None]] = []

            def request_and_end(token: int) -> None:
                subject.on_requested(requested(2))
                ends.append(asyncio.ensure_future(subject.close()))

            subject._commands.before_done = request_and_end  # type: ignore[attr-defined]
            subject.update(cluster(leader), "cluster")
            subject.on_requested(requested(2))
            await until(lambda: ends)
            await ends[0]
            assert not subject._dialling and len(reactor.put) == 1

    run(scenario())


def test_another_worker_replaces_one_that_no_longer_exists() -> None:
    """The host was restarted with fewer workers; any of them forwards batches."""

    async def scenario() -> None:
        leader = Leader(2)
        async with forwarding(leader) as (subject, reactor):
            subject.update(cluster(leader), "cluster")
            subject.on_requested(requested(2, 7))
            await until(lambda: reactor.put)
            assert leader.hellos[0].worker == 3 and reactor.put[0][2] == (2, 7, 0)

    run(scenario())


def test_an_unreachable_host_is_refused_with_growing_backoff() -> None:
    async def scenario() -> None:
        leader = Leader(2)
        async with forwarding(leader) as (subject, reactor):
            subject.update(cluster(leader, port=1), "cluster")
            for count in range(1, 8):
                subject.on_requested(requested(2))
                await until(lambda count=count: len(reactor.refused) == count)
            subject.on_requested(requested(9))  # an unknown client
            await until(lambda: len(reactor.refused) == 8)
            times = [ms for _, ms in reactor.refused[:7]]
            assert (
                all(25 <= ms <= BACKOFF_MS_MAX for ms in times) and times[0] <= 50 and times[6] >= BACKOFF_MS_MAX // 2
            )
            subject.update(cluster(leader), "cluster")
            subject.on_requested(requested(2))
            await until(lambda: reactor.put)
            assert not reactor.removed or reactor.removed == [2]  # another port is another endpoint

    run(scenario())


@pytest.mark.parametrize("host", NO_NAMES)
def test_an_unresolvable_host_is_refused_like_an_unreachable_one(host: str) -> None:
    async def scenario() -> None:
        leader = Leader(2)
        async with forwarding(leader) as (subject, reactor):
            subject.update(ClusterView(1, {1: broker(1), 2: broker(2, host=host)}), "cluster")
            subject.on_requested(requested(2))
            await until(lambda: reactor.refused)

    run(scenario())


def test_a_host_with_another_key_gets_nothing() -> None:
    async def scenario() -> None:
        leader = Leader(2, secret=b"another secret of sixteen bytes")
        async with forwarding(leader) as (subject, reactor):
            subject.update(cluster(leader), "cluster")
            subject.on_requested(requested(2))
            await until(lambda: reactor.refused)
            assert not reactor.put

    run(scenario())


def test_connections_end_with_the_hosts_incarnation() -> None:
    async def scenario() -> None:
        leader = Leader(2)
        async with forwarding(leader) as (subject, reactor):
            subject.update(cluster(leader), "cluster")
            subject.on_requested(requested(2))
            await until(lambda: reactor.put)
            subject.update(cluster(leader), "cluster")
            await asyncio.sleep(0.01)
            assert not reactor.removed
            subject.update(cluster(leader, epoch=6), "cluster")
            await until(lambda: reactor.removed == [2])
            subject.on_requested(requested(2))
            await until(lambda: len(reactor.put) == 2)
            subject.update(ClusterView(1, {1: broker(1)}), "cluster")  # it was unregistered
            await until(lambda: reactor.removed == [2, 2])

    run(scenario())


def test_a_connection_to_a_host_that_was_restarted_meanwhile_is_not_used() -> None:
    """Nothing would end it at the next restart of that host."""

    async def scenario() -> None:
        leader = Leader(2)
        async with forwarding(leader) as (subject, reactor):
            subject.update(cluster(leader), "cluster")
            subject.on_requested(requested(2))
            await asyncio.sleep(0)  # it is being dialled
            subject.update(cluster(leader, epoch=6), "cluster")
            await until(lambda: reactor.put or reactor.refused)
            assert not reactor.put
            subject.on_requested(requested(2))
            await until(lambda: reactor.put)
            subject.update(cluster(leader, epoch=7), "cluster")
            await until(lambda: reactor.removed == [2])

    run(scenario())
