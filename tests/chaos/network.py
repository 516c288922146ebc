"""Hosts of a cluster as network namespaces on one machine, connected by a bridge; links between
them are cut in one direction or both, silently: packets are lost.

    with Network(("n1", "n2", "n3", "client")) as network:
        network.run("n1", ["mqd", ...])            the command to start a program there
        network.cut("n1", "n2")                    nothing from n1 reaches n2; n2 still reaches n1
        network.heal()

Needs root (or CAP_NET_ADMIN and CAP_SYS_ADMIN) and iproute2: `why_not()` reports what is missing. A
cut is a blackhole rule at the receiver: a route or rule at the sender would make send() fail at
once, unlike a cut cable. The kernel consults the table of local addresses first (pref 0), so it is
moved behind ours.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence

SUBNET = "10.77.0"
FIRST_ADDRESS = 11
PREF_CUT, PREF_LOCAL = 5, 10
_serial = itertools.count()


class NetworkFailed(RuntimeError):
    """A command of iproute2 failed; the message has the command and its output."""


def _ip(*words: str, namespace: str | None = None, check: bool = True) -> str:
    command = ["ip", *(("-n", namespace) if namespace else ()), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and check:
        raise NetworkFailed(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def why_not() -> str:
    """Empty when namespaces can be created here."""
    if shutil.which("ip") is None:
        return "iproute2 (the program `ip`) is not installed"
    name = f"mqd-try-{os.getpid()}"
    try:
        _ip("netns", "add", name)
        try:
            _ip("link", "add", "try0", "type", "veth", "peer", "name", "try1", namespace=name)
            _ip("link", "add", "try2", "type", "bridge", namespace=name)
            _ip("rule", "add", "pref", str(PREF_CUT), "from", f"{SUBNET}.1", "iif", "lo", "blackhole", namespace=name)
        finally:
            _ip("netns", "del", name)
    except NetworkFailed as error:
        return f"network namespaces are not permitted here: {error}"
    return ""


class Network:
    """The caller chooses names of hosts; their addresses are `address(name)`. Everything is removed
    after the with block, and processes still running in it lose their network.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        self._prefix = f"mqd{os.getpid()}-{next(_serial)}"
        self._cuts: set[tuple[str, str]] = set()

    def address(self, name: str) -> str:
        return f"{SUBNET}.{FIRST_ADDRESS + self.names.index(name)}"

    def namespace(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def run(self, name: str, words: Sequence[str]) -> list[str]:
        """The command that runs `words` there; its process becomes that program (ip replaces
        itself).
        """
        return ["ip", "netns", "exec", self.namespace(name), *words]

    # -- building ----------------------------------------------------------------------------------

    def __enter__(self) -> Network:
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _build(self) -> None:
        hub = self.namespace("hub")
        _ip("netns", "add", hub)
        _ip("link", "add", "br0", "type", "bridge", namespace=hub)
        _ip("link", "set", "br0", "up", namespace=hub)
        for number, name in enumerate(self.names):
            own = self.namespace(name)
            _ip("netns", "add", own)
            _ip("link", "set", "lo", "up", namespace=own)
            _ip("link", "add", "eth0", "type", "veth", "peer", "name", f"port{number}", "netns", hub, namespace=own)
            _ip("addr", "add", f"{self.address(name)}/24", "dev", "eth0", namespace=own)
            _ip("link", "set", "eth0", "up", namespace=own)
            _ip("link", "set", f"port{number}", "master", "br0", namespace=hub)
            _ip("link", "set", f"port{number}", "up", namespace=hub)
            _ip("rule", "add", "pref", str(PREF_LOCAL), "lookup", "local", namespace=own)
            _ip("rule", "del", "pref", "0", namespace=own)

    def __exit__(self, *_exc: object) -> None:
        for name in (*self.names, "hub"):
            _ip("netns", "del", self.namespace(name), check=False)

    # -- cutting -----------------------------------------------------------------------------------

    def cut(self, sender: str, receiver: str) -> None:
        """No packet from `sender` reaches `receiver`."""
        if (sender, receiver) not in self._cuts:
            self._rule("add", sender, receiver)
            self._cuts.add((sender, receiver))

    def cut_both(self, one: str, other: str) -> None:
        self.cut(one, other)
        self.cut(other, one)

    def split(self, one_side: Iterable[str], other_side: Iterable[str]) -> None:
        others = tuple(other_side)
        for one in one_side:
            for other in others:
                self.cut_both(one, other)

    def heal(self) -> None:
        for sender, receiver in sorted(self._cuts):
            self._rule("del", sender, receiver)
        self._cuts.clear()

    @property
    def cuts(self) -> frozenset[tuple[str, str]]:
        return frozenset(self._cuts)

    def _rule(self, verb: str, sender: str, receiver: str) -> None:
        _ip(
            "rule",
            verb,
            "pref",
            str(PREF_CUT),
            "from",
            f"{self.address(sender)}/32",
            "iif",
            "eth0",
            "blackhole",
            namespace=self.namespace(receiver),
        )
