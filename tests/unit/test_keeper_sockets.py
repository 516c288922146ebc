"""Listening sockets: what the connections inherit from them."""

import selectors
import socket

import pytest

from mqd.keeper.sockets import listen


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_connections_over_loopback_are_not_paced(host):
    """A connection that began with BBR is paced for ever: over loopback that is a timer for every 64 KiB, and twice the CPU of a fetch."""
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


def test_connections_are_turned_away_while_nobody_would_answer_them() -> None:
    """Refused with a reset, those that wait already and those that come; and left to the acceptor when there is one again."""
    from types import SimpleNamespace

    from mqd.keeper.loop import Keeper

    keeper = Keeper.__new__(Keeper)
    keeper._selector, keeper._turning_away = selectors.DefaultSelector(), False
    with socket.create_server(("127.0.0.1", 0)) as listener:
        keeper.resources = SimpleNamespace(listeners=[listener])

        def turn() -> None:
            for key, mask in keeper._selector.select(10):
                keeper._deliver(key, mask)

        waiting = socket.create_connection(listener.getsockname(), timeout=10)
        keeper._turn_away(True)
        keeper._turn_away(True)
        turn()
        with waiting, pytest.raises(ConnectionResetError):
            waiting.recv(1)
        with socket.create_connection(listener.getsockname(), timeout=10) as late:
            turn()
            with pytest.raises(ConnectionResetError):
                late.recv(1)
        keeper._turn_away(False)
        with socket.create_connection(listener.getsockname(), timeout=10) as client:
            assert keeper._selector.select(0) == []
            listener.setblocking(True)
            taken, _ = listener.accept()
            taken.sendall(b"x")
            assert client.recv(1) == b"x"
            taken.close()
