"""Failures that end the process, because it would silently handle nothing from then on."""

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mqd.base import crash_on_error
from mqd.native import EventKind
from mqd.shm.attach import KeeperClient
from mqd.shm.keeper_messages import Death
from mqd.worker.commands import ReactorCommands
from tests.unit.acceptor.handler_broker import HandlerBroker
from tests.unit.acceptor.test_handler_link import Wire, everything


class Ended(BaseException):
    """Replaces the end of the process; its argument is the status."""


@pytest.fixture(autouse=True)
def ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(status: int) -> None:
        raise Ended(status)

    monkeypatch.setattr(crash_on_error.os, "_exit", leave)


def failing(*_: object) -> None:
    raise MemoryError


def test_the_acceptor_ends_when_it_cannot_handle_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The remaining messages that it had taken from the ring were lost, and nothing woke it again."""

    async def scenario() -> None:
        async with HandlerBroker(tmp_path) as broker:
            wire = Wire(broker)
            try:
                wire.link._loop.remove_reader(wire.eventfds[2])  # type: ignore[union-attr]
                wire.send_request(0, 1, everything())
                monkeypatch.setattr(wire.link, "_on_request", failing)
                with pytest.raises(Ended, match="1"):
                    wire.link._on_wake()
            finally:
                wire.close()

    asyncio.run(scenario())


def test_a_worker_ends_when_it_cannot_handle_its_reactors_events() -> None:
    """The events after it were never handled: their callers waited forever."""
    event = SimpleNamespace(kind=EventKind.DONE, token=5)
    commands = ReactorCommands(SimpleNamespace(next_events=lambda _count: [event]), None, failing)  # type: ignore[arg-type]
    with pytest.raises(Ended, match="1"):
        commands.drain()


def test_any_process_ends_when_it_cannot_handle_the_keepers_notices() -> None:
    """A shutdown notice could be behind it."""
    readers: dict[int, Any] = {}
    client = KeeperClient.__new__(KeeperClient)
    connection, other = socket.socketpair()
    with connection, other:
        client._connection, client._parent_fds = connection, []
        client.receive = lambda: [Death(role="worker", index=0, endpoint=0, generation=1, pid=1)]  # type: ignore[method-assign]
        loop = SimpleNamespace(
            add_reader=lambda fd, callback, *rest: readers.__setitem__(fd, callback), remove_reader=readers.pop
        )
        client.watch(loop, failing, failing, failing)
        with pytest.raises(Ended, match="1"):
            readers[connection.fileno()]()
