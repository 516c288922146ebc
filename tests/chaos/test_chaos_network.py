"""The network of the chaos tests works: which hosts reach each other before, during and after a
cut.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.chaos import network

REASON = network.why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

LISTEN = (
    "import socket,sys; s=socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind((sys.argv[1], 9));"
    " s.settimeout(1.0)\nprint('ready', flush=True)\ntry: print(s.recv(9).decode())\nexcept TimeoutError:"
    " print('silence')"
)
SAY = (
    "import socket,sys; s=socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind((sys.argv[1], 0));"
    " s.sendto(b'heard', (sys.argv[2], 9))"
)


def received(net: network.Network, sender: str, receiver: str) -> bool:
    with subprocess.Popen(
        net.run(receiver, [sys.executable, "-c", LISTEN, net.address(receiver)]), stdout=subprocess.PIPE, text=True
    ) as listener:
        assert listener.stdout is not None
        assert listener.stdout.readline() == "ready\n"
        done = subprocess.run(
            net.run(sender, [sys.executable, "-c", SAY, net.address(sender), net.address(receiver)]),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"a cut is silence, not an error at the sender: {done.stderr}"
        return listener.stdout.readline() == "heard\n"


def test_cuts() -> None:
    with network.Network(("a", "b", "c")) as net:
        assert received(net, "a", "b") and received(net, "b", "a")
        net.cut("a", "b")
        assert not received(net, "a", "b")
        assert received(net, "b", "a") and received(net, "a", "c") and received(net, "c", "b")
        net.split(("a",), ("b", "c"))
        assert not received(net, "b", "a") and not received(net, "a", "c") and received(net, "b", "c")
        net.heal()
        assert net.cuts == frozenset() and received(net, "a", "b") and received(net, "c", "a")
        assert received(net, "a", "a"), "a host reaches itself"


def test_no_namespace_is_left() -> None:
    with network.Network(("a",)) as net:
        name = net.namespace("a")
        assert name in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert name not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
