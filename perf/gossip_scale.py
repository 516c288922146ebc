"""Gossip of up to a thousand hosts, by simulation with the real core: how long it takes until all know
of a failure, and how much a host sends, receives and computes meanwhile.

The model: every host has its own GossipCore with the settings of a broker; datagrams take DELAY_MS
and are lost at random; clocks drift; TCP exchanges take ROUND_TRIP_MS. All hosts know each other at
the start (the simulator covers joining: tests/sim). The model has no bandwidth, switches, garbage
collection, or other work of the controller's process.
"""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Callable

from mqd.cluster.membership import gossip_events as events
from mqd.cluster.membership.gossip import GossipCore
from mqd.cluster.membership.gossip_events import (
    DEAD,
    SUSPECT,
    MemberChanged,
    ProbeStream,
    Profile,
    PushPull,
    SendDatagram,
    Settings,
)
from mqd.cluster.membership.gossip_messages import LIFE_UNIT, MemberEntry, Seal, State, encode

DELAY_MS = (1, 5)
ROUND_TRIP_MS = 10
DRIFT = 0.001
WARM_MS = 12_000
IDLE_MS = 10_000
FAILURE_EVERY_MS = 2_500
FAILURE_WAIT_MS = 12_000
DATAGRAM_HEADERS_BYTES = 28  # IPv4 and UDP


class Host:
    __slots__ = ("alive", "core", "drift", "received", "sent", "sent_bytes", "tick_at")

    def __init__(self, core: GossipCore, drift: float) -> None:
        self.core, self.drift, self.alive, self.tick_at = core, drift, True, -1
        self.sent: dict[int, int] = {}
        self.sent_bytes = 0
        self.received = 0


class Model:
    """The simulated cluster. `seen`: victim -> host -> [suspected at, dead at]."""

    def __init__(self, count: int, loss: float, seed: int) -> None:
        self.rng = random.Random(seed)
        self.loss, self.now = loss, 0
        self._queue: list[tuple[int, int, Callable, tuple]] = []
        self._number = 0
        self.hosts: dict[int, Host] = {}
        self.host_by_name: dict[str, Host] = {}
        self.killed: dict[int, int] = {}
        self.seen: dict[int, dict[int, list[int]]] = {}
        self.false_suspicions = 0
        self.false_deaths = 0
        self.exchange_bytes = 0
        self.cpu_s = 0.0
        seal = Seal(b"a secret of this cluster, 32 bytes", "scale")
        for number in range(1, count + 1):
            profile = Profile(
                number,
                number.to_bytes(16, "big"),
                f"10.0.{number >> 8}.{number & 255}",
                9094,
                f"rack-{number % 40}",
                "1.0.0",
                8,
                16,
                64 << 30,
                4 << 40,
            )
            core = GossipCore(profile, seal, Settings(), random.Random(self.rng.getrandbits(64)), 1)
            host = Host(core, 1 + self.rng.uniform(-DRIFT, DRIFT))
            self.hosts[number] = self.host_by_name[profile.host] = host
        every_process = State(
            -1, -1, [MemberEntry(host.core.membership.own_alive(), "alive", LIFE_UNIT) for host in self.hosts.values()]
        )
        self._state_bytes = len(encode(every_process))
        for number, host in self.hosts.items():
            core = host.core
            core.handle(events.Started(), 0)
            core._joined = True
            core.membership.merge(every_process, spread=False)
            core.drop_broadcast(core.membership.identity)
            core.handle(events.LoadMeasured(number, 1_000, 400, 1 << 39, 50 << 20, 90 << 20, 200, 600), 0)
            self._set_timer(number, host)

    def at(self, when: int, run: Callable, *arguments: object) -> None:
        self._number += 1
        heapq.heappush(self._queue, (when, self._number, run, arguments))

    def run(self, until: int) -> None:
        queue = self._queue
        while queue and queue[0][0] <= until:
            self.now, _, run, arguments = heapq.heappop(queue)
            run(*arguments)
        self.now = until

    def kill(self, number: int) -> None:
        self.hosts[number].alive = False
        self.killed[number] = self.now
        self.seen[number] = {}

    # -- carrying out ------------------------------------------------------------------------------

    def _set_timer(self, number: int, host: Host) -> None:
        when = int(host.core.due_ms / host.drift) + 1
        if host.tick_at < self.now or when < host.tick_at:
            host.tick_at = when
            self.at(when, self._tick, number, when)

    def _tick(self, number: int, when: int) -> None:
        host = self.hosts[number]
        if host.tick_at == when and host.alive:
            host.tick_at = -1
            self._handle(number, host, events.Tick())

    def _arrive(self, number: int, data: bytes) -> None:
        host = self.hosts[number]
        if host.alive:
            host.received += 1
            self._handle(number, host, events.DatagramReceived(data))

    def _handle(self, number: int, host: Host, event: events.Event) -> None:
        began = time.perf_counter()
        effects = host.core.handle(event, int(self.now * host.drift))
        self.cpu_s += time.perf_counter() - began
        for effect in effects:
            match effect:
                case SendDatagram():
                    self._send(host, effect)
                case MemberChanged():
                    self._on_changed(number, effect)
                case PushPull():
                    self.at(self.now + ROUND_TRIP_MS, self._exchange, number, effect)
                case ProbeStream():
                    self.at(self.now + ROUND_TRIP_MS, self._probe, number, effect)
        self._set_timer(number, host)

    def _send(self, host: Host, effect: SendDatagram) -> None:
        second = self.now // 1000
        host.sent[second] = host.sent.get(second, 0) + 1
        host.sent_bytes += len(effect.data) + DATAGRAM_HEADERS_BYTES
        if self.rng.random() >= self.loss:
            target = self.host_by_name[effect.host].core.membership.identity[0]
            self.at(self.now + self.rng.randint(*DELAY_MS), self._arrive, target, effect.data)

    def _exchange(self, number: int, effect: PushPull) -> None:
        host, other = self.hosts[number], self.host_by_name[effect.host]
        if host.alive and other.alive:
            self.exchange_bytes += 2 * self._state_bytes
            theirs = other.core.state(False)
            self._handle(other.core.membership.identity[0], other, events.StateReceived(host.core.state()))
            self._handle(number, host, events.StateReceived(theirs, effect.exchange_id))

    def _probe(self, number: int, effect: ProbeStream) -> None:
        if self.hosts[number].alive and self.host_by_name[effect.host].alive:
            self._handle(number, self.hosts[number], events.StreamResponded(effect.probe_id))

    def _on_changed(self, number: int, effect: MemberChanged) -> None:
        which = effect.member.node_id
        if which in self.killed:
            times = self.seen[which].setdefault(number, [-1, -1])
            place = {SUSPECT: 0, DEAD: 1}.get(effect.member.state)
            if place is not None and times[place] < 0:
                times[place] = self.now - self.killed[which]
        elif effect.member.state == DEAD:
            self.false_deaths += 1
        elif effect.member.state == SUSPECT:
            self.false_suspicions += 1

    # -- results -----------------------------------------------------------------------------------

    def detection_ms(self) -> tuple[list[int], list[int]]:
        """For each victim: when the last live host suspected it (or considered it dead), and when the
        last live host considered it dead.
        """
        living = [number for number, host in self.hosts.items() if host.alive]
        suspected, dead = [], []
        for victim, by in self.seen.items():
            times = [by.get(number, [-1, -1]) for number in living]
            assert all(one[1] >= 0 for one in times), (
                f"{sum(one[1] < 0 for one in times)} hosts do not know that {victim} is dead"
            )
            suspected.append(max(one[0] if one[0] >= 0 else one[1] for one in times))
            dead.append(max(one[1] for one in times))
        return suspected, dead

    def controller_known_ms(self, epoch: int) -> int:
        """Milliseconds until every live host knows the controller of a new epoch."""
        living = [host for host in self.hosts.values() if host.alive]
        began, first = self.now, self.rng.choice(living)
        number = first.core.membership.identity[0]
        self._handle(number, first, events.ControllerKnown(number, epoch))
        while any(host.core.controller.epoch < epoch for host in living):
            self.run(self.now + 20)
        return self.now - began

    def rates(self, first_ms: int, end_ms: int) -> tuple[float, int]:
        """Datagrams per host per second: mean, and the most any host sent in any second."""
        seconds = range(first_ms // 1000, end_ms // 1000)
        living = [host for host in self.hosts.values() if host.alive]
        counts = [host.sent.get(second, 0) for host in living for second in seconds]
        return sum(counts) / len(counts), max(counts)


def failures(count: int, loss: float, victims: int, seed: int) -> dict:
    """Hosts fail one after the other; then a living host announces the controller. Milliseconds;
    datagrams per living host per second.
    """
    model = Model(count, loss, seed)
    model.run(WARM_MS)
    cpu_s, began = model.cpu_s, model.now
    bytes_before = sum(host.sent_bytes for host in model.hosts.values())
    model.run(began + IDLE_MS)
    idle_mean, idle_most = model.rates(began, model.now)
    idle = {
        "mean_per_s": idle_mean,
        "most_per_s": idle_most,
        "bytes_per_s": (sum(host.sent_bytes for host in model.hosts.values()) - bytes_before) / count * 1000 / IDLE_MS,
        "cpu_ms_per_s": (model.cpu_s - cpu_s) * 1e6 / count / IDLE_MS,
    }
    began = model.now
    for victim in model.rng.sample(range(1, count + 1), victims):
        model.kill(victim)
        model.run(model.now + FAILURE_EVERY_MS)
    mean, most = model.rates(began, model.now)
    model.run(model.now + FAILURE_WAIT_MS)
    suspected, dead = model.detection_ms()
    return {
        "hosts": count,
        "loss": loss,
        "suspected_by_all_ms": suspected,
        "dead_for_all_ms": dead,
        "idle": idle,
        "mean_per_s": mean,
        "most_per_s": most,
        "exchange_bytes_per_s": model.exchange_bytes / count / (model.now / 1000),
        "false_suspicions": model.false_suspicions,
        "false_deaths": model.false_deaths,
        "simulated_s": model.now / 1000,
        "controller_known_ms": [model.controller_known_ms(epoch) for epoch in range(1, 6)],
    }


def simultaneous_failures(count: int, loss: float, share: float, seed: int) -> dict:
    """A share of the hosts fails at the same moment: a rack, a switch."""
    model = Model(count, loss, seed)
    model.run(WARM_MS)
    began = model.now
    for victim in model.rng.sample(range(1, count + 1), max(1, round(share * count))):
        model.kill(victim)
    model.run(began + 2 * FAILURE_WAIT_MS)
    suspected, dead = model.detection_ms()
    mean, most = model.rates(began, began + FAILURE_WAIT_MS)
    return {
        "hosts": count,
        "loss": loss,
        "share": share,
        "suspected_by_all_ms": suspected,
        "dead_for_all_ms": dead,
        "mean_per_s": mean,
        "most_per_s": most,
        "false_suspicions": model.false_suspicions,
        "false_deaths": model.false_deaths,
    }
