"""Probes: members are pinged in turn. If one does not respond, other hosts ping it on request, and a
TCP connection is tried. If no host reaches it, it becomes a suspect.

Every second probe goes to the successor in a ring of all hosts, so that each host is probed within
two intervals by its predecessor. The other probes go to all members in random order: with the
ring alone each host would be probed by one host only, which may fail, too, or have a bad link.

    round (every probe interval, times the health multiplier; twice as often while many are suspected)
      Ping -> Ack               alive
      no Ack within the probe timeout: PingRequest to `indirect_count` others, and a probe over TCP
      Ack from one of them      alive
      Nack from one of them     that host got no response either, so this host's own health is not the cause
      end of the interval       the member is suspected, and informed of it

Bounds: one probe per member, PROBE_COUNT_MAX in total; RELAY_COUNT_MAX pings on behalf of other
hosts. Excess probes are skipped, since other hosts probe, too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mqd.cluster.membership.gossip_events import ALIVE, DEAD, LEFT, SUSPECT, Effect, ProbeStream, Settings
from mqd.cluster.membership.gossip_membership import Member, Membership
from mqd.cluster.membership.gossip_messages import (
    Ack,
    Body,
    Identity,
    Nack,
    Packet,
    Ping,
    PingRequest,
    Suspect,
    life_of,
)
from mqd.cluster.membership.gossip_parts import Health

PROBE_COUNT_MAX = 64
RELAY_COUNT_MAX = 256


class Probe:
    __slots__ = ("helpers", "identity", "incarnation", "nack_count")

    def __init__(self, identity: Identity, incarnation: int) -> None:
        self.identity = identity
        self.incarnation = incarnation
        self.helpers: list[Identity] = []
        self.nack_count = 0


class Relay:
    """A ping on behalf of another host. `requester`: that host, as (directory id, life); `host`, `port`: its
    address; `probe_id`: the id of its probe.
    """

    __slots__ = ("host", "port", "probe_id", "requester")

    def __init__(self, requester: tuple[bytes, int], request: PingRequest) -> None:
        self.requester, self.host, self.port, self.probe_id = requester, request.host, request.port, request.probe_id


class Core(Protocol):
    """The part of GossipCore that a Prober needs."""

    settings: Settings
    rng: random.Random
    health: Health
    membership: Membership

    def emit(self, effect: Effect) -> None: ...

    def after(self, wait_ms: int, run: Callable[[Any], None], argument: Any = None) -> None: ...

    def choose_live_members(self, count: int) -> list[Identity]: ...

    def may_respond(self) -> bool: ...

    def may_respond_to_unknown(self) -> bool: ...

    def send_to(self, member: Member, body: Body | None, urgent: Sequence[bytes] = ()) -> None: ...

    def send(
        self,
        recipient: tuple[bytes, int],
        host: str,
        port: int,
        body: Body | None,
        urgent: Sequence[bytes] = (),
        without_queued: bool = False,
    ) -> None: ...

    def gossip_now(self) -> None: ...


class Prober:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._is_successors_turn = False
        self._order: list[Identity] = []
        self._next_index = 0
        self._waiting: set[Identity] = set()  # the members in _order[_next_index:]
        self.probes: dict[int, Probe] = {}
        self._probe_ids: dict[Identity, int] = {}
        self._relays: dict[int, Relay] = {}

    # -- rounds ------------------------------------------------------------------------------------

    def start(self) -> None:
        core = self._core
        core.after(core.rng.randrange(1, core.settings.probe_interval_ms + 1), self._on_round)

    def add_target(self, identity: Identity) -> None:
        """Inserts a new member at a random position in the order, so that not all hosts probe it at the
        same time.
        """
        if identity not in self._waiting:
            self._waiting.add(identity)
            self._order.insert(self._core.rng.randint(self._next_index, len(self._order)), identity)

    def _on_round(self, _: object) -> None:
        core, settings = self._core, self._core.settings
        interval_ms = settings.probe_interval_ms * core.health.multiplier
        if core.membership.suspect_count >= settings.mass_failure_count:
            interval_ms //= 2
        core.after(interval_ms, self._on_round)
        self._is_successors_turn = not self._is_successors_turn
        identity = (self._successor() if self._is_successors_turn else None) or self._next_target()
        if identity is not None:
            self.probe(identity)

    def _successor(self) -> Identity | None:
        """The next host in the order of directory ids. The ids are random, so hosts of one rack are seldom
        neighbours. Suspects are skipped, so that two neighbours that failed are both found soon.
        """
        membership = self._core.membership
        own = membership.identity[1]
        alive = [identity for identity in membership.living if membership.members[identity].state == ALIVE]
        return min(alive, key=lambda identity: (identity[1] < own, identity[1]), default=None)

    def _next_target(self) -> Identity | None:
        """The next member in an order that is shuffled again after each pass, so that every member is
        probed within two passes.
        """
        membership = self._core.membership
        for _ in range(len(self._order) + 1):
            if self._next_index >= len(self._order):
                self._order = list(membership.living)
                self._core.rng.shuffle(self._order)
                self._next_index = 0
                self._waiting = set(self._order)
                if not self._order:
                    return None
            identity = self._order[self._next_index]
            self._next_index += 1
            self._waiting.discard(identity)
            member = membership.members.get(identity)
            if member is not None and member.state in (ALIVE, SUSPECT):
                return identity
        return None

    def probe(self, identity: Identity) -> None:
        core = self._core
        member = core.membership.members[identity]
        if identity in self._probe_ids or len(self.probes) >= PROBE_COUNT_MAX:
            return
        probe_id = self._new_id()
        self.probes[probe_id] = Probe(identity, member.incarnation)
        self._probe_ids[identity] = probe_id
        self._ping(member, probe_id)
        multiplier = core.health.multiplier
        core.after(core.settings.probe_timeout_ms * multiplier, self._on_timeout, probe_id)
        core.after(core.settings.probe_interval_ms * multiplier, self._on_probe_ended, probe_id)

    def _new_id(self) -> int:
        """An unpredictable probe id, so that a forged Ack matches no probe."""
        return self._core.rng.getrandbits(62)

    def _ping(self, member: Member, probe_id: int) -> None:
        core = self._core
        core.send_to(
            member,
            Ping(probe_id, core.membership.profile.host, core.membership.profile.port),
            [refutable] if (refutable := member.refutable_update()) else [],
        )

    def on_suspected(self, member: Member, by: int) -> None:
        """If this host began the suspicion, it informs the suspect immediately. Otherwise about
        confirmer_count hosts, chosen at random, probe the suspect, and this host may be one of them:
        their probes confirm or end the suspicion sooner.
        """
        core = self._core
        if by == core.membership.identity[0]:
            core.send_to(member, None, [member.refutable_update()])
            core.gossip_now()
        elif core.rng.random() * core.membership.live_count < core.settings.confirmer_count:
            self.probe(member.identity)

    def reconnect(self, member: Member) -> None:
        """Tells a dead member that it is considered dead. If it is alive, it refutes this."""
        self._ping(member, self._new_id())

    # -- end of a probe ---------------------------------------------------------------------------

    def _on_timeout(self, probe_id: int) -> None:
        core = self._core
        probe = self.probes.get(probe_id)
        member = core.membership.members.get(probe.identity) if probe is not None else None
        if probe is None or member is None:
            return
        settings, own = core.settings, core.membership.profile
        wait_ms = (settings.probe_interval_ms - settings.probe_timeout_ms) * core.health.multiplier
        helpers = [
            identity for identity in core.choose_live_members(settings.indirect_count + 1) if identity != probe.identity
        ][: settings.indirect_count]
        for identity in helpers:
            helper = core.membership.members[identity]
            if helper.state != ALIVE:
                continue
            probe.helpers.append(identity)
            target = member.profile
            # two thirds of the remaining time, so that a Nack arrives before the interval ends
            request = PingRequest(
                probe_id,
                own.host,
                own.port,
                target.node_id,
                target.directory_id,
                member.life,
                target.host,
                target.port,
                max(1, min(10_000, wait_ms * 2 // 3)),
            )
            core.send_to(helper, request)
        core.emit(ProbeStream(probe_id, *probe.identity, member.profile.host, member.profile.port, wait_ms))

    def _on_probe_ended(self, probe_id: int) -> None:
        probe = self._pop(probe_id)
        core = self._core
        member = core.membership.members.get(probe.identity) if probe is not None else None
        if probe is None or member is None or member.state in (DEAD, LEFT):
            return
        core.health.worsen(len(probe.helpers) - probe.nack_count if probe.helpers else 1)
        if member.incarnation == probe.incarnation:
            core.membership.on_suspect(Suspect(*probe.identity, member.incarnation, core.membership.identity[0]))

    def on_response(self, probe_id: int) -> None:
        if self._pop(probe_id) is not None:
            self._core.health.improve()

    def _pop(self, probe_id: int) -> Probe | None:
        probe = self.probes.pop(probe_id, None)
        if probe is not None:
            del self._probe_ids[probe.identity]
        return probe

    # -- messages from peers ----------------------------------------------------------------------

    def on_ping(self, packet: Packet, ping: Ping, is_unknown: bool) -> None:
        core = self._core
        if not (core.may_respond_to_unknown() if is_unknown else core.may_respond()):
            return
        member = core.membership.members.get((packet.node_id, packet.directory_id))
        urgent = [refutable] if member is not None and (refutable := member.refutable_update()) else []
        if any((update.node_id, update.directory_id) == core.membership.identity for update in packet.updates):
            # this host's refutation, even if it was sent long ago, has not reached the sender
            urgent.append(core.membership.own_update)
        if is_unknown:
            # no queued updates: each is sent only a few times, and replayed pings could use these up
            urgent = [core.membership.own_update]
        core.send(
            (packet.directory_id, life_of(packet.incarnation)),
            ping.host,
            ping.port,
            Ack(ping.probe_id),
            urgent,
            without_queued=is_unknown,
        )

    def on_ack(self, packet: Packet, ack: Ack) -> None:
        probe = self.probes.get(ack.probe_id)
        if probe is not None and (
            probe.identity == (packet.node_id, packet.directory_id)
            or (packet.node_id, packet.directory_id) in probe.helpers
        ):
            self.on_response(ack.probe_id)
            return
        relay = self._relays.pop(ack.probe_id, None)
        if relay is not None:
            self._core.send(relay.requester, relay.host, relay.port, Ack(relay.probe_id))

    def on_nack(self, packet: Packet, nack: Nack) -> None:
        probe = self.probes.get(nack.probe_id)
        if probe is not None and (packet.node_id, packet.directory_id) in probe.helpers:
            probe.nack_count = min(probe.nack_count + 1, len(probe.helpers))

    def on_ping_request(self, packet: Packet, request: PingRequest) -> None:
        core = self._core
        if len(self._relays) >= RELAY_COUNT_MAX or not core.may_respond():
            return
        relay_id = self._new_id()
        self._relays[relay_id] = Relay((packet.directory_id, life_of(packet.incarnation)), request)
        own = core.membership.profile
        recipient = (request.target_directory_id, request.target_life)
        target = core.membership.members.get((request.target_node_id, request.target_directory_id))
        core.send(
            recipient,
            request.target_host,
            request.target_port,
            Ping(relay_id, own.host, own.port),
            [refutable] if target is not None and (refutable := target.refutable_update()) else [],
        )
        core.after(request.wait_ms, self._on_relay_ended, relay_id)

    def _on_relay_ended(self, relay_id: int) -> None:
        relay = self._relays.pop(relay_id, None)
        if relay is not None:
            self._core.send(relay.requester, relay.host, relay.port, Nack(relay.probe_id))

    def check(self) -> None:
        assert len(self.probes) <= PROBE_COUNT_MAX and len(self._relays) <= RELAY_COUNT_MAX
        assert all(self._probe_ids[probe.identity] == probe_id for probe_id, probe in self.probes.items())
        assert sorted(self._probe_ids.values()) == sorted(self.probes)
        assert self._waiting == set(self._order[self._next_index :])
        assert len(self._order) <= 2 * self._core.settings.member_count_max
