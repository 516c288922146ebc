"""Hosts that gossip over a network which loses, delays, repeats and reorders datagrams and cuts
links in one direction, with hosts that pause, crash and return, and clocks that drift.

One seed, one run: virtual milliseconds, one queue. `World.run(until_ms)` continues randomly;
`calm()` ends every fault, after which all hosts must converge to the truth.

Checked, besides the cores' own check() after every event
    S1  no host is declared dead without a cause: some host was down, paused or cut off within the
        last `bound_ms` (losing a tenth of all datagrams, or delays, is no cause)
    S2  after calm, all agree on which hosts live, under the newest incarnations, within SETTLE_MS;
        and on the active controller of the highest epoch
    S3  the incarnation that a host knows of another never decreases; its own never does, not even
        over crashes and restores from an old copy
    S4  no host sends more than datagrams_per_s_max in any second
    S5  a datagram that was repeated, misdirected, damaged, forged or sealed by another cluster's
        key changes nothing in a host; at most it responds to a ping of an unknown host
    S6  tables, queues and probes stay within their bounds (check())
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from mqd.cluster.membership import gossip_events as events
from mqd.cluster.membership.gossip import GossipCore
from mqd.cluster.membership.gossip_events import (
    ALIVE,
    DEAD,
    LEFT,
    SUSPECT,
    LeaveDone,
    MemberChanged,
    ProbeStream,
    Profile,
    PushPull,
    SendDatagram,
    Settings,
    StoreLife,
)
from mqd.cluster.membership.gossip_messages import Seal, StreamPing, decode_stream, encode

BUFFER_DATAGRAMS_MAX = 300  # of a socket, while its process is stopped
CAPTURED_MAX = 400
ROUND_TRIP_MS = 20

Address = tuple[str, int]


class Broken(AssertionError):
    """An invariant of the world."""


@dataclass
class Weather:
    """The quality of the network for a while."""

    loss: float = 0.0
    duplicate: float = 0.0
    delay_ms: int = 3
    tcp_loss: float = 0.0


@dataclass
class Host:
    """A machine: its disk, and the process if it runs."""

    number: int
    node_id: int
    directory_id: bytes
    drift: float = 0.0
    offset_ms: int = 0
    life: int = 0
    latest_life: int = 0
    # since when the host runs in a life that it has had before, restored from an old copy of its disk
    repeats_since: int | None = None
    core: GossipCore | None = None
    paused_until: int = 0
    waiting: list[bytes] = field(default_factory=list)
    leaving: bool = False
    disturbed_until: int = 0  # until when other hosts have cause to think it dead
    incarnation_seen: int = 0
    sent: dict[int, int] = field(default_factory=dict)
    tick_at: int = -1

    @property
    def address(self) -> Address:
        return f"host-{self.number}", 9094

    def local(self, now: int) -> int:
        return self.offset_ms + int(now * (1 + self.drift))

    def true_time(self, local: int) -> int:
        return int((local - self.offset_ms) / (1 + self.drift)) + 1


class World:
    def __init__(
        self,
        seed: int,
        count: int,
        settings: Settings | None = None,
        make: Callable[..., GossipCore] = GossipCore,
        seal: Callable[[], Seal] | None = None,
        drift: float = 0.02,
    ) -> None:
        self.rng = random.Random(seed)
        self.settings = settings or Settings()
        self.make, self.drift = make, drift
        self.seal = seal or (lambda: Seal(b"secret", "cluster"))
        self.now = 0
        self.weather = Weather()
        self.cut: dict[tuple[int, int], int] = {}  # (from, to) -> the number of faults that cut it
        self.captured: list[tuple[int, bytes]] = []  # (when, datagram)
        self.trace: list[tuple] = []
        # (when, observer, before, after, member)
        self.changes: list[tuple[int, int, str | None, str, tuple[int, bytes]]] = []
        self.deaths: list[tuple[int, int, tuple[int, bytes]]] = []
        self._queue: list[tuple[int, int, Callable, tuple]] = []
        self._count = 0
        self.controller = (-1, -1)
        self.hosts = [Host(number, number, self._directory()) for number in range(1, count + 1)]
        self.of_address = {host.address: host for host in self.hosts}
        self.by_identity: dict[tuple[int, bytes], Host] = {}
        self.seeds = tuple(host.address for host in self.hosts[:3])
        self.incarnations: dict[tuple[int, tuple[int, bytes]], tuple[object, int]] = {}
        for host in self.hosts:
            host.drift = self.rng.uniform(-drift, drift)
            host.offset_ms = self.rng.randrange(10_000_000)

    def _directory(self) -> bytes:
        return self.rng.getrandbits(128).to_bytes(16, "big")

    # -- the queue ---------------------------------------------------------------------------------

    def at(self, when: int, run: Callable, *arguments: object) -> None:
        self._count += 1
        heapq.heappush(self._queue, (max(when, self.now), self._count, run, arguments))

    def run(self, until: int) -> None:
        while self._queue and self._queue[0][0] <= until:
            self.now, _, run, arguments = heapq.heappop(self._queue)
            run(*arguments)
        self.now = until

    # -- lives of hosts ----------------------------------------------------------------------------

    def start(self, host: Host) -> None:
        assert host.core is None
        host.life += 1
        host.repeats_since = self.now if host.life <= host.latest_life else None
        host.latest_life = max(host.latest_life, host.life)
        host.leaving = False
        host.paused_until = 0
        host.waiting.clear()
        profile = Profile(host.node_id, host.directory_id, *host.address, rack=f"rack-{host.number % 3}", version="1")
        core = self.make(
            profile, self.seal(), self.settings, random.Random(self.rng.getrandbits(64)), host.life, self.seeds
        )
        host.core = core
        self.by_identity[(host.node_id, host.directory_id)] = host
        self.disturb(host)
        self.give(host, events.Started())

    def start_all(self, spread_ms: int = 500) -> None:
        for host in self.hosts:
            self.at(self.now + self.rng.randrange(spread_ms), self.start, host)

    def crash(self, host: Host) -> None:
        host.core = None
        self.disturb(host)
        self.trace.append((self.now, "crash", host.number))

    def wipe(self, host: Host) -> None:
        """The machine returns with an empty disk: another member."""
        assert host.core is None
        host.directory_id, host.life, host.incarnation_seen = self._directory(), 0, 0
        host.latest_life = 0

    def pause(self, host: Host, until: int) -> None:
        host.paused_until = until
        self.disturb(host, until)
        self.at(until, self._wake, host, host.core)

    def _wake(self, host: Host, core: GossipCore) -> None:
        """Waiting datagrams and due timers are handled in any order."""
        if host.core is not core or core is None:
            return
        waiting, host.waiting = host.waiting, []
        self.disturb(host)
        if self.rng.random() < 0.5:
            self._tick(host, core)
        for data in waiting:
            self._arrive(host, data)
        self._tick(host, core)

    def leave(self, host: Host) -> None:
        host.leaving = True
        self.disturb(host)
        self.give(host, events.Leave())

    def runs(self, host: Host) -> bool:
        return host.core is not None and host.paused_until <= self.now

    def disturb(self, host: Host, until: int | None = None) -> None:
        host.disturbed_until = max(host.disturbed_until, self.now if until is None else until)

    # -- the network -------------------------------------------------------------------------------

    def cut_links(self, links: list[tuple[int, int]], until: int) -> None:
        for link in links:
            self.cut[link] = self.cut.get(link, 0) + 1
            for number in link:
                self.disturb(self.hosts[number - 1], until)
        self.at(until, self._heal_links, links)

    def _heal_links(self, links: list[tuple[int, int]]) -> None:
        for link in links:
            if link in self.cut:
                self.cut[link] -= 1
                if not self.cut[link]:
                    del self.cut[link]
                for number in link:
                    self.disturb(self.hosts[number - 1])

    def _send(self, host: Host, address: Address, data: bytes) -> None:
        second = self.now // 1000
        host.sent[second] = host.sent.get(second, 0) + 1
        target = self.of_address.get(address)
        if target is None or (host.number, target.number) in self.cut:
            return
        weather, rng = self.weather, self.rng
        for _ in range(2 if rng.random() < weather.duplicate else 1):
            if rng.random() >= weather.loss:
                self.at(self.now + rng.randint(1, weather.delay_ms), self._arrive, target, data)

    def _arrive(self, host: Host, data: bytes) -> None:
        if host.core is None:
            return
        if not self.runs(host):
            if len(host.waiting) < BUFFER_DATAGRAMS_MAX:
                host.waiting.append(data)
            return
        self.give(host, events.DatagramReceived(data))
        if len(self.captured) < CAPTURED_MAX:
            self.captured.append((self.now, data))
        elif self.rng.random() < 0.02:
            self.captured[self.rng.randrange(CAPTURED_MAX)] = (self.now, data)

    def connected(self, a: Host, b: Host) -> bool:
        return (
            (a.number, b.number) not in self.cut
            and (b.number, a.number) not in self.cut
            and self.rng.random() >= self.weather.tcp_loss
        )

    def _exchange(self, host: Host, core: GossipCore, effect: PushPull) -> None:
        target = self.of_address.get((effect.host, effect.port))
        if host.core is not core:
            return
        if target is None or not self.runs(target) or not self.connected(host, target):
            self.at(self.now + ROUND_TRIP_MS, self._exchange_failed, host, core, effect.exchange_id)
            return
        theirs = decode_stream(encode(target.core.state(False)))
        self.give(target, events.StateReceived(decode_stream(encode(core.state()))))
        self.at(self.now + ROUND_TRIP_MS // 2, self._exchange_done, host, core, theirs, effect.exchange_id)

    def _exchange_done(self, host: Host, core: GossipCore, state, exchange_id: int) -> None:
        if host.core is core and self.runs(host):
            self.give(host, events.StateReceived(state, exchange_id))

    def _exchange_failed(self, host: Host, core: GossipCore, exchange_id: int) -> None:
        if host.core is core and self.runs(host):
            self.give(host, events.ExchangeFailed(exchange_id))

    def _probe_stream(self, host: Host, core: GossipCore, effect: ProbeStream) -> None:
        target = self.of_address.get((effect.host, effect.port))
        if (
            host.core is core
            and target is not None
            and self.runs(target)
            and self.runs(host)
            and self.connected(host, target)
        ):
            ping = decode_stream(encode(StreamPing(effect.node_id, effect.directory_id)))
            if target.core.is_for_this_host(ping) and not target.leaving:
                self.give(host, events.StreamResponded(effect.probe_id))

    # -- a core and its effects --------------------------------------------------------------------

    def give(self, host: Host, event: events.Event) -> list:
        core = host.core
        assert core is not None
        effects = core.handle(event, host.local(self.now))
        for effect in effects:
            match effect:
                case SendDatagram():
                    if len(effect.data) > 1400:
                        raise Broken(f"G4: {len(effect.data)} bytes")
                    self._send(host, (effect.host, effect.port), effect.data)
                case PushPull():
                    self.at(self.now + ROUND_TRIP_MS // 2, self._exchange, host, core, effect)
                case ProbeStream():
                    self.at(self.now + ROUND_TRIP_MS, self._probe_stream, host, core, effect)
                case StoreLife():
                    host.life = effect.life
                case MemberChanged():
                    self._on_changed(host, effect)
                case LeaveDone():
                    host.core = None
        core.check()
        self._check_incarnations(host, core)
        if host.core is core:
            self._set_timer(host, core)
        return effects

    def _set_timer(self, host: Host, core: GossipCore) -> None:
        when = host.true_time(core.due_ms)
        if host.tick_at < self.now or when < host.tick_at:
            host.tick_at = when
            self.at(when, self._timer, host, core, when)

    def _timer(self, host: Host, core: GossipCore, when: int) -> None:
        if host.core is core and host.tick_at == when:
            host.tick_at = -1
            if self.runs(host):
                self._tick(host, core)

    def _tick(self, host: Host, core: GossipCore) -> None:
        if host.core is core:
            self.give(host, events.Tick())

    def _on_changed(self, host: Host, effect: MemberChanged) -> None:
        identity = (effect.member.node_id, effect.member.directory_id)
        self.changes.append((self.now, host.number, effect.before, effect.member.state, identity))
        self.trace.append(
            (self.now, host.number, effect.before, effect.member.state, identity[0], effect.member.incarnation)
        )
        if effect.member.state == DEAD:
            self._judge_death(host, identity)

    # -- judging -----------------------------------------------------------------------------------

    @property
    def bound_ms(self) -> int:
        """The longest time from a cause to the last death it may lead to: a probe, as slow as
        health allows, and the longest suspicion; its propagation may take as long again.
        """
        s = self.settings
        probe = 2 * s.probe_interval_ms * (s.health_score_max + 1)
        return int((probe + s.suspicion_multiplier * s.suspicion_factor_max * s.probe_interval_ms) * 1.2) + 2_000

    def _judge_death(self, observer: Host, identity: tuple[int, bytes]) -> None:
        target = self.by_identity[identity]
        self.deaths.append((self.now, observer.number, identity))
        if (target.node_id, target.directory_id) != identity or target.core is None or target.leaving:
            return  # it is dead
        if self.weather.loss > 0.1:
            return
        if max(host.disturbed_until for host in self.hosts) + self.bound_ms < self.now:
            raise Broken(
                f"S1: at {self.now} host {observer.number} declares {target.number} dead; nothing happened for"
                f" {self.bound_ms} ms"
            )

    def false_deaths(self) -> list[tuple[int, int, tuple[int, bytes]]]:
        return [death for death in self.deaths if self.by_identity[death[2]].core is not None]

    def _check_incarnations(self, host: Host, core: GossipCore) -> None:
        own = core.membership.incarnation
        if own < host.incarnation_seen:
            raise Broken(f"S3: host {host.number} fell from incarnation {host.incarnation_seen} to {own}")
        host.incarnation_seen = own
        for identity, member in core.membership.members.items():
            key = (host.number, identity)
            life, before = self.incarnations.get(key, (core, -1))
            if life is core and member.incarnation < before:
                raise Broken(f"S3: host {host.number} takes {identity[0]} back from {before} to {member.incarnation}")
            self.incarnations[key] = (core, member.incarnation)

    def check_rates(self, most: int, since: int = 0) -> None:
        for host in self.hosts:
            for second, count in host.sent.items():
                if count > most and second * 1000 >= since:
                    raise Broken(
                        f"S4: host {host.number} sent {count} datagrams in second {second}; at most {most} are allowed"
                    )

    def disagreement(self) -> str:
        """Why the live hosts do not all have the truth; empty when they do."""
        living = {(host.node_id, host.directory_id): host for host in self.hosts if host.core is not None}
        for host in living.values():
            core = host.core
            assert core is not None
            for identity, other in living.items():
                if other is host:
                    continue
                member = core.membership.members.get(identity)
                if member is None or member.state != ALIVE:
                    return f"host {host.number} has {other.number} as {member.state if member else None}"
                if (
                    member.incarnation != other.core.membership.incarnation
                    or member.profile.incarnation != member.incarnation
                ):
                    return f"host {host.number} has {other.number} under an old incarnation"
            for identity, member in core.membership.members.items():
                if identity not in living and member.state in (ALIVE, SUSPECT):
                    return f"host {host.number} has {identity[0]} as {member.state}, which is gone"
            if (core.controller.epoch, core.controller.node_id) != self.controller:
                return f"host {host.number} has controller {core.controller}, not {self.controller}"
        return ""

    def calm(self) -> None:
        """All faults end; hosts that are down return."""
        self.weather = Weather()
        self.cut.clear()
        for host in self.hosts:
            if host.core is not None and host.paused_until > self.now:
                host.paused_until = self.now
                self._wake(host, host.core)

    def settle(self, within_ms: int) -> int:
        """How long it took until all hosts had the truth."""
        began = self.now
        while reason := self.disagreement():
            if self.now - began > within_ms:
                raise Broken(f"S2: {within_ms} ms after calm: {reason}")
            self.run(self.now + 100)
        return self.now - began

    # -- hostility ---------------------------------------------------------------------------------

    def attack(self, host: Host) -> None:
        """One datagram of an attacker that sees all traffic and has no key."""
        if not self.runs(host) or not self.captured:
            return
        self.give(host, events.Tick())  # so that nothing else is due
        rng, core = self.rng, host.core
        if core is None:
            return
        # unchanged: a repetition, or meant for another host or an earlier incarnation
        when, data = rng.choice(self.captured)
        match rng.randrange(6):
            case 0:
                data = self._damaged(data)
            case 1:
                data = rng.randbytes(rng.randrange(1500))
            case 2:
                data = Seal(b"other", "cluster").seal(self.seal().open(data))
            case 3:
                data = Seal(b"secret", "other").seal(self.seal().open(data))
            case _ if host.repeats_since is not None and when < host.repeats_since:
                return  # if no host remembers the later life, a datagram to the earlier one counts as new
        before = digest(core)
        effects = core.handle(events.DatagramReceived(data), host.local(self.now))
        if digest(core) != before:
            raise Broken(f"S5: a hostile datagram changed host {host.number}")
        if len(effects) > 1 or not all(isinstance(effect, SendDatagram) for effect in effects):
            raise Broken(f"S5: a hostile datagram made host {host.number} do {effects}")

    def _damaged(self, data: bytes) -> bytes:
        rng = self.rng
        changed = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        return bytes(changed) if bytes(changed) != data else data[:-1]


def digest(core: GossipCore) -> tuple:
    """The part of a host's state that an unknown sender must not change: all but its counters, its
    clock and its token buckets.
    """
    membership = core.membership
    return (
        membership.incarnation,
        core.health.score,
        core.controller,
        tuple(core._updates._level_of.items()),
        tuple(core._loads._level_of.items()),
        len(core.prober.probes),
        len(core.prober._relays),
        tuple(
            (
                identity,
                m.state,
                m.incarnation,
                m.since_ms,
                m.profile,
                m.load,
                m.suspicion and tuple(m.suspicion.confirmers),
            )
            for identity, m in membership.members.items()
        ),
        core._timer_count,
        core._seed_identities,
        core._joined,
    )


__all__ = ["LEFT", "Broken", "Host", "Weather", "World"]
