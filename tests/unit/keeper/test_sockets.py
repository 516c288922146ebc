"""Listening sockets: options that connections inherit from them."""

import errno
import selectors
import socket
from types import SimpleNamespace

import pytest

from mqd.keeper.loop import Keeper
from mqd.keeper.sockets import listen
from tests.ports import free_port
from tests.unit.worker.refusing_listener import RefusingListener


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_connections_over_loopback_are_not_paced(host):
    """A connection that began with BBR is paced forever: over loopback that means a timer for every
    64 KiB, and twice the CPU of a fetch.
    """
    try:
        listener = listen(host, 0)
    except OSError as error:
        pytest.skip(f"this host has no {host}: {error}")
    with listener, socket.create_connection(listener.getsockname()[:2]):
        listener.setblocking(True)
        accepted, _ = listener.accept()
        with accepted:
            algorithm = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
    assert algorithm in (b"cubic", b"reno")


def test_connections_are_refused_while_there_is_no_acceptor() -> None:
    """Reset, both waiting connections and new ones; and left to the acceptor when there is one
    again.
    """
    keeper = Keeper.__new__(Keeper)
    keeper._selector, keeper._is_refusing = selectors.DefaultSelector(), False
    with socket.create_server(("127.0.0.1", free_port())) as listener:
        keeper.resources = SimpleNamespace(listeners=[listener])

        def turn() -> None:
            for key, mask in keeper._selector.select(10):
                keeper._deliver(key, mask)

        waiting = socket.create_connection(listener.getsockname(), timeout=10)
        keeper._set_refusing(True)
        keeper._set_refusing(True)
        turn()
        with waiting, pytest.raises(ConnectionResetError):
            waiting.recv(1)
        with socket.create_connection(listener.getsockname(), timeout=10) as late:
            turn()
            with pytest.raises(ConnectionResetError):
                late.recv(1)
        keeper._set_refusing(False)
        with socket.create_connection(listener.getsockname(), timeout=10) as client:
            assert keeper._selector.select(0) == []
            listener.setblocking(True)
            taken, _ = listener.accept()
            taken.sendall(b"x")
            assert client.recv(1) == b"x"
            taken.close()


@pytest.mark.parametrize("code", [errno.ENFILE, errno.EMFILE, errno.ENOBUFS, errno.EPERM, errno.EACCES])
@pytest.mark.parametrize("who", ["clients", "processes"])
def test_the_keeper_pauses_when_no_connection_can_be_accepted(who: str, code: int) -> None:
    """Waiting connections stay readable: without a pause the keeper would loop forever."""
    keeper, listener = Keeper.__new__(Keeper), RefusingListener([], code)
    keeper._selector, keeper._is_refusing, keeper._timers, keeper._timer_count, keeper._tools = (
        selectors.DefaultSelector(),
        False,
        [],
        0,
        {},
    )
    keeper.resources = SimpleNamespace(listeners=[listener], keeper_socket=listener)

    def turn() -> None:
        for key, mask in keeper._selector.select(0):
            keeper._deliver(key, mask)

    if who == "clients":
        keeper._set_refusing(True)
    else:
        keeper._watch(listener, keeper._on_connect)
    for round_ in range(1, 4):
        for _ in range(5):
            turn()
        assert listener.requested == round_ and len(keeper._timers) == 1
        keeper._timers.pop()[2]()
    if who == "clients":  # an acceptor is back during the pause: the listener belongs to it
        turn()
        keeper._set_refusing(False)
        keeper._timers.pop()[2]()
        assert not keeper._selector.get_map()
    listener.close()
