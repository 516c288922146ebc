"""Membership changes of a cluster: a fourth host that joins and leaves, as an operator does it
(docs/operations.md), and the completion of all changes when the faults are over.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from tests.chaos import commands
from tests.chaos.hosts import ChaosCluster

SETTLE_SECONDS = 90.0
EMPTY_SECONDS = 30.0
FORGET_SECONDS = 20.0


def join(cluster: ChaosCluster) -> str:
    """The spare host is a member; it is started if it was not."""
    name = f"n{cluster.spare}"
    if cluster.spare in cluster.hosts:
        return f"{name} is there"
    cluster.add(cluster.spare)
    return f"{name} joins"


def leave(cluster: ChaosCluster, empty: bool) -> str:
    """The spare host is drained, stopped and unregistered; or it stays, and takes part, if that is
    not possible now. `empty`: it returns without its previous disk.
    """
    if cluster.spare not in cluster.hosts:
        return f"n{cluster.spare} is not there"
    number, host = str(cluster.spare), cluster.hosts[cluster.spare]
    known = voters(cluster)
    if cluster.spare in known:
        commands.mqd(cluster, "cluster", "remove-voter", number)
        known = voters(cluster)
    if not known or cluster.spare in known:
        return f"{host.name} stays: a voter does not leave"
    if not (output := commands.mqd(cluster, "cluster", "drain", number, seconds=EMPTY_SECONDS)).done:
        return (
            f"{host.name} stays, not empty ({output.text}); "
            + commands.mqd(cluster, "cluster", "drain", number, "--cancel").text
        )
    host.stop()
    until = time.monotonic() + FORGET_SECONDS
    while not _forgotten(output := commands.mqd(cluster, "cluster", "forget", number)):
        if time.monotonic() > until:
            host.start()
            return f"{host.name} is started again: {output.text}"
        time.sleep(0.5)  # its session has to expire if no host received its leave
    cluster.remove(cluster.spare)
    if empty:
        host.empty()
    return f"{host.name} leaves" + (", its disk is emptied" if empty else "")


def _forgotten(reported: commands.Report) -> bool:
    """Even by a request whose response was lost."""
    return reported.done or "BROKER_ID_NOT_REGISTERED" in reported.output


def voters(cluster: ChaosCluster) -> list[int]:
    """According to the active controller; empty when there is none."""
    output = commands.mqd(cluster, "cluster", "status", "--format", "json")
    return json.loads(output.output)["voters"] if output.done else []


def settle(cluster: ChaosCluster, stays: bool) -> str:
    """The faults are over: the founders are the voters again, all members take part, the spare host
    is a member (`stays`) or not, and nothing moves any more. Raises AssertionError when that takes
    too long.
    """
    until = time.monotonic() + SETTLE_SECONDS
    nodes = [str(number) for number in cluster.hosts]
    for node in nodes:
        _until(cluster, until, lambda node=node: _done(cluster, "cluster", "drain", node, "--cancel"))
    for host in cluster.founders:
        _until(cluster, until, lambda node=host.node_id: _votes(cluster, node))
    _until(cluster, until, lambda: _votes_not(cluster, cluster.spare))
    if not stays:
        _until(cluster, until, lambda: "" if cluster.spare not in cluster.hosts else leave(cluster, empty=False))
    _until(cluster, until, lambda: _even(cluster))
    return f"members: {', '.join(host.name for host in cluster)}"


def _until(cluster: ChaosCluster, until: float, attempt: Callable[[], str]) -> None:
    """`attempt()` returns what is missing; "" when it is done."""
    while missing := attempt():
        assert time.monotonic() < until, (
            f"the members do not come to rest within {SETTLE_SECONDS:.0f} s: {missing}\n{cluster.logs()}"
        )
        time.sleep(0.5)  # other hosts copy, elect


def _done(cluster: ChaosCluster, *words: str) -> str:
    output = commands.mqd(cluster, *words)
    return "" if output.done else f"mqd {' '.join(words)}: {output.text}"


def _votes(cluster: ChaosCluster, node: int) -> str:
    return (
        ""
        if node in voters(cluster)
        else _done(cluster, "cluster", "add-voter", str(node)) or f"whether node {node} votes"
    )


def _votes_not(cluster: ChaosCluster, node: int) -> str:
    known = voters(cluster)
    if known and node not in known:
        return ""
    return _done(cluster, "cluster", "remove-voter", str(node)) or f"whether node {node} votes"


def _even(cluster: ChaosCluster) -> str:
    """A started balance continues by itself, move after move: it has ended when nothing is left to
    move.
    """
    output = commands.mqd(cluster, "cluster", "balance", seconds=60.0)
    return "" if output.done and "nothing moves" in output.output else f"mqd cluster balance: {output.text}"
