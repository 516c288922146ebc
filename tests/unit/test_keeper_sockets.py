"""Listening sockets: what the connections inherit from them."""

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
