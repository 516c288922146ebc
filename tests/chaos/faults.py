"""Faults of a cluster, one at a time: each fault begins, lasts, and ends; afterwards only the
cluster's reaction remains. Only membership changes last longer, across other faults.

`pick(rng, cluster)` returns the next one; `KINDS` names them for a schedule. All randomness comes
from the given generator, so a seed is a schedule (not a run, since real processes are not
deterministic).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from tests.chaos import commands, members
from tests.chaos.commands import CLIENTS
from tests.chaos.hosts import ChaosCluster, ChaosHost


class Fault:
    """`begin()`, then `end()`; `text` describes it. `lasts`: seconds, at least and at most."""

    lasts = (2.0, 12.0)
    kind = ""

    def __init__(self, cluster: ChaosCluster, rng: random.Random) -> None:
        self.cluster, self.rng = cluster, rng
        self.text = type(self).__name__

    def host(self) -> ChaosHost:
        return self.rng.choice([host for host in self.cluster if host.runs])

    def seconds(self) -> float:
        return self.rng.uniform(*self.lasts)

    def begin(self) -> None:
        raise NotImplementedError

    def end(self) -> None:
        """Does nothing by default."""


# -- the network -----------------------------------------------------------------------------------


class _Cut(Fault):
    lasts = (3.0, 20.0)

    @property
    def names(self) -> list[str]:
        return [host.name for host in self.cluster]

    def end(self) -> None:
        self.cluster.network.heal()


class Isolated(_Cut):
    """One host is cut off from the others; clients still reach it (or not)."""

    def begin(self) -> None:
        one = self.rng.choice(self.names)
        others = [name for name in self.names if name != one]
        with_clients = self.rng.random() < 0.5
        self.cluster.network.split([one], [*others, *([CLIENTS] if with_clients else [])])
        self.text = f"{one} is cut off from the other hosts" + (" and from clients" if with_clients else "")


class OneWay(_Cut):
    """One host neither sends nor receives, or only its own messages are lost."""

    def begin(self) -> None:
        one = self.rng.choice(self.names)
        deaf = self.rng.random() < 0.5
        for other in self.names:
            if other != one:
                self.cluster.network.cut(*((other, one) if deaf else (one, other)))
        self.text = f"{one} {'hears none of the other hosts' if deaf else 'is not heard by the other hosts'}"


class Pair(_Cut):
    """Two hosts do not reach each other; both reach the third: each still has a majority."""

    def begin(self) -> None:
        one, other = self.rng.sample(self.names, 2)
        if self.rng.random() < 0.5:
            self.cluster.network.cut_both(one, other)
            self.text = f"{one} and {other} do not reach each other"
        else:
            self.cluster.network.cut(one, other)
            self.text = f"{other} does not hear {one}"


class AllApart(_Cut):
    """No host reaches another: none has a majority."""

    lasts = (3.0, 12.0)

    def begin(self) -> None:
        names = self.names
        for index, one in enumerate(names):
            self.cluster.network.split([one], names[index + 1 :])
        self.text = "no host reaches another"


class ClientsCut(_Cut):
    """Clients do not reach one host; hosts reach each other."""

    def begin(self) -> None:
        one = self.rng.choice(self.names)
        self.cluster.network.split([one], [CLIENTS])
        self.text = f"clients do not reach {one}"


class Flapping(_Cut):
    """A link that fails and recovers faster than any lease expires."""

    lasts = (0.3, 1.5)

    def begin(self) -> None:
        one, other = self.rng.sample(self.names, 2)
        self.cluster.network.cut_both(one, other)
        self.text = f"{one} and {other} lose each other for a moment"


# -- processes -------------------------------------------------------------------------------------


class KillProcess(Fault):
    """kill -9 of one kind of process on one host; supervisord starts a successor."""

    lasts = (0.5, 6.0)

    def begin(self) -> None:
        host, name = self.host(), self.rng.choice(self.cluster.targets.processes)
        self.text = f"kill -9 of {name} on {host.name}" + ("" if host.kill([name]) else " (it was not there)")


class KillBroker(Fault):
    """kill -9 of acceptor, controller and workers at once; the keeper survives and proves their
    death.
    """

    lasts = (1.0, 6.0)

    def begin(self) -> None:
        host = self.host()
        host.kill(self.cluster.targets.processes)
        self.text = f"kill -9 of all but the keeper on {host.name}"


class KillHost(Fault):
    """kill -9 of all processes, supervisord included; restarted at the end."""

    lasts = (1.0, 15.0)
    victims: tuple[ChaosHost, ...] = ()

    def begin(self) -> None:
        self.victims = (self.host(),)
        for host in self.victims:
            host.kill_all()
        self.text = f"kill -9 of every process of {', '.join(host.name for host in self.victims)}"

    def end(self) -> None:
        self.cluster.start()  # in parallel: where all were killed, one alone is never ready


class PowerLoss(KillHost):
    """The same, and all or a part of the unflushed data is lost; on one host, or on all at once."""

    def begin(self) -> None:
        running = [host for host in self.cluster if host.runs]
        self.victims = tuple(running) if self.rng.random() < 0.3 else (self.rng.choice(running),)
        harshest = self.rng.random() < 0.3
        for host in self.victims:
            host.kill_all()
        for host in self.victims:
            host.power_loss(self.rng, harshest)
        self.text = f"power loss of {', '.join(host.name for host in self.victims)}" + (
            ", with all that was not flushed" if harshest else ""
        )


class KillMajority(KillHost):
    """Two of the three founders of a cluster, at once: with them the majority of the voters,
    whatever other members there are (even if one of the three is not a voter: then it was two of
    two, or one of them).
    """

    def begin(self) -> None:
        running = [host for host in self.cluster.founders if host.runs]
        self.victims = tuple(self.rng.sample(running, min(len(running), 2)))
        for host in self.victims:
            host.kill_all()
        self.text = f"kill -9 of every process of {', '.join(host.name for host in self.victims)}"


class Restart(Fault):
    """A controlled shutdown and a start: one step of a rolling upgrade."""

    lasts = (0.1, 3.0)

    def begin(self) -> None:
        self.victim = self.host()
        self.text = f"{self.victim.name} is stopped and started"
        self.victim.stop()

    def end(self) -> None:
        if not self.victim.runs:
            self.victim.start()


class PauseProcess(Fault):
    """SIGSTOP of one kind of process: a gray failure, since the others on its host continue."""

    lasts = (1.0, 15.0)

    def begin(self) -> None:
        self.victim, name = self.host(), self.rng.choice(self.cluster.targets.processes)
        self.victim.pause([name])
        self.text = f"SIGSTOP of {name} on {self.victim.name}"

    def end(self) -> None:
        self.victim.resume()


class PauseHost(Fault):
    """SIGSTOP of all processes of a host, for longer than its lease or not."""

    lasts = (1.0, 20.0)

    def begin(self) -> None:
        self.victim = self.host()
        self.victim.pause()
        self.text = f"SIGSTOP of every process of {self.victim.name}"

    def end(self) -> None:
        self.victim.resume()


# -- disks, clocks, tools --------------------------------------------------------------------------


class DiskFull(Fault):
    lasts = (2.0, 10.0)

    def begin(self) -> None:
        self.victim = self.host()
        self.victim.fill_disk()
        self.text = f"the disk of {self.victim.name} is full"

    def end(self) -> None:
        self.victim.free_disk()


class WallClock(Fault):
    """The wall clock of a host jumps, by seconds or by most of a day, and later back. Leases,
    sessions and timeouts use other clocks.
    """

    lasts = (2.0, 12.0)

    def begin(self) -> None:
        self.victim = self.host()
        ahead_s = self.rng.choice((1.0, 30.0, 1_800.0, 72_000.0)) * self.rng.choice((-1, 1))
        self.victim.wall_clock(ahead_s)
        self.text = f"the wall clock of {self.victim.name} jumps by {ahead_s:+.0f} s"

    def end(self) -> None:
        self.victim.wall_clock(0.0)


class Tools(Fault):
    """Requests of an operator's tools with Kafka's protocol: other replicas, leaders, configuration
    (operator.py). Refused while the cluster is not healthy, and then not retried.
    """

    lasts = (1.0, 5.0)

    def begin(self) -> None:
        action = self.rng.choice(("reassign", "elect", "configure", "cancel"))
        output = commands.run(
            self.cluster,
            [
                "tests.chaos.operator",
                action,
                json.dumps(self.cluster.operator),
                str(self.rng.getrandbits(32)),
                ",".join(self.cluster.targets.topics),
            ],
        )
        self.text = f"{action}: {output.text}"


class Operator(Fault):
    """The same with the commands of mqd: replicas and leadership balanced, a topic moved to other
    hosts, a move cancelled, status queried. Refused while the cluster is not healthy, and then not
    retried.
    """

    lasts = (1.0, 5.0)

    def begin(self) -> None:
        words = self.words()
        output = commands.mqd(self.cluster, *words)
        self.text = f"mqd {' '.join(words)}: {output.text}"

    def words(self) -> tuple[str, ...]:
        topic = self.rng.choice(self.cluster.targets.topics)
        nodes = [str(host.node_id) for host in self.cluster]
        three = ",".join(self.rng.sample(nodes, min(len(nodes), 3)))
        balance, move = (
            ("cluster", "balance", "--no-wait"),
            (
                "topic",
                "reassign",
                topic,
                "--brokers",
                three,
                "--replication-factor",
                str(min(len(nodes), 3)),
                "--no-wait",
            ),
        )
        return self.rng.choice((balance, move, move, ("topic", "reassign", topic, "--cancel"), ("cluster", "status")))


# -- secrets, of secured clusters ------------------------------------------------------------------


class Certificates(Fault):
    """A host gets new certificates and keys, for clients and for other hosts, while it runs."""

    lasts = (0.5, 6.0)

    def begin(self) -> None:
        assert self.cluster.security is not None, "a plain cluster has no certificates"
        host = self.host()
        self.cluster.security.renew(host.node_id)
        self.text = f"{host.name} has other certificates"


class ClusterKey(Fault):
    """The next step of a rotation of the cluster's key."""

    lasts = (0.5, 6.0)

    def begin(self) -> None:
        assert self.cluster.security is not None, "a plain cluster does not change its key"
        self.text = self.cluster.security.rotate_key()


# -- members ---------------------------------------------------------------------------------------


class Change(Fault):
    """A membership change: other faults begin and end while it lasts. `end()` reverts it, during
    another fault if `amid` is set; the rest of it is completed by members.settle() when the faults
    are over. Its requests may be refused; `text` has the outcome.
    """

    lasts = (1.0, 5.0)  # until the next fault
    others = (1, 3)  # faults that begin before it ends

    def __init__(self, cluster: ChaosCluster, rng: random.Random) -> None:
        super().__init__(cluster, rng)
        self.left = rng.randint(*self.others)
        self.amid = rng.random() < 0.5

    def send_request(self, *words: str) -> str:
        return f"mqd {' '.join(words)}: {commands.mqd(self.cluster, *words).text}"


class Voters(Change):
    """A voter of the quorum becomes an observer, and later a voter again; if there is a fourth
    host, it replaces the voter half of the time.
    """

    def begin(self) -> None:
        self.victim = self.rng.choice(self.cluster.founders)
        replaced = self.rng.random() < 0.5 and self.cluster.spare in self.cluster.hosts
        added = [self.send_request("cluster", "add-voter", str(self.cluster.spare))] if replaced else []
        self.text = "; ".join([*added, self.send_request("cluster", "remove-voter", str(self.victim.node_id))])

    def end(self) -> None:
        self.text = self.send_request("cluster", "add-voter", str(self.victim.node_id))


class Drain(Change):
    """All replicas of a host move to others, with a fourth host present: three replicas need three.
    Later it takes part again and gets its share.
    """

    def begin(self) -> None:
        joined = members.join(self.cluster)
        self.victim = self.rng.choice(self.cluster.founders)
        self.text = f"{joined}; " + self.send_request("cluster", "drain", str(self.victim.node_id), "--no-wait")

    def end(self) -> None:
        self.text = "; ".join(
            [
                self.send_request("cluster", "drain", str(self.victim.node_id), "--cancel"),
                self.send_request("cluster", "balance", "--no-wait"),
            ]
        )


class Join(Change):
    """A fourth host joins with the same seeds and gets its share; later it is drained, stopped and
    unregistered. The next time it starts with its old disk or an empty one.
    """

    def __init__(self, cluster: ChaosCluster, rng: random.Random) -> None:
        super().__init__(cluster, rng)
        self.amid = False  # starting and stopping a host needs its cluster

    def begin(self) -> None:
        self.text = f"{members.join(self.cluster)}; " + self.send_request("cluster", "balance", "--no-wait")

    def end(self) -> None:
        self.text = members.leave(self.cluster, empty=self.rng.random() < 0.5)


KINDS: dict[str, type[Fault]] = {
    "isolate": Isolated,
    "one-way": OneWay,
    "pair": Pair,
    "apart": AllApart,
    "clients": ClientsCut,
    "flap": Flapping,
    "kill-process": KillProcess,
    "kill-broker": KillBroker,
    "kill-host": KillHost,
    "kill-majority": KillMajority,
    "restart": Restart,
    "pause-process": PauseProcess,
    "pause-host": PauseHost,
    "disk-full": DiskFull,
    "operator": Operator,
    "power-loss": PowerLoss,
    "wall-clock": WallClock,
    "tools": Tools,
    "voters": Voters,
    "drain": Drain,
    "join": Join,
}
SECURED: dict[str, type[Fault]] = {"certificates": Certificates, "cluster-key": ClusterKey}
CHANGES = frozenset(name for name, kind in KINDS.items() if issubclass(kind, Change))
MOVES = CHANGES | {"operator"}  # may continue to move replicas by itself


def schedule(rng: random.Random, cluster: ChaosCluster, kinds: list[str]) -> Callable[[], Fault]:
    """The next fault, of a subset of kinds that changes every few faults, as in Jepsen: one kind of
    stress, then another.
    """
    chosen: list[str] = []
    left = 0

    def following() -> Fault:
        nonlocal chosen, left
        if left <= 0:
            chosen = rng.sample(kinds, min(len(kinds), rng.randint(1, 4)))
            left = rng.randint(2, 5)
        left -= 1
        kind = rng.choice(chosen)
        fault = (KINDS | SECURED)[kind](cluster, rng)
        fault.kind = kind
        return fault

    return following
