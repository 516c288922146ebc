"""Gossip as a state machine without I/O: SWIM with Lifeguard's refinements. Its results are only hints:
gossip does not elect, fence or count a quorum.

Sources: Das et al., SWIM (2002); Dadgar et al., Lifeguard (2017, arXiv 1707.00788); the parameters
follow memberlist, tuned to detect a failure within seconds.

    gossip.py              datagrams, timers, exchanges of states, joining, leaving
    gossip_membership.py   members' states and their precedence
    gossip_probing.py      probes of members
    gossip_events.py       events, effects, settings
    gossip_messages.py     messages on the wire
    gossip_parts.py        windows, suspicion, queues

Invariants (asserted by check() and the simulator, in addition to those of the parts)
    G4  a datagram has at most DATAGRAM_BYTES_MAX bytes
    G6  datagrams per second are bounded by the settings: per probe round 1 + indirect_count, per
        gossip round gossip_fanout, responses limited by their token buckets
    G7  a datagram that is not sealed, is a replay, or is not addressed to this host's current life
        changes only a counter (but a ping from an unknown host gets a response, at a limited rate)
Time: milliseconds of any clock that does not go back. A late tick means that this process was
stopped. The core's own time excludes that interval, so that no member is suspected because of
messages that this process could not receive.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from mqd.cluster.membership import gossip_events as events
from mqd.cluster.membership.gossip_events import ALIVE as ALIVE
from mqd.cluster.membership.gossip_events import (
    DEAD,
    ControllerSeen,
    Effect,
    Event,
    LeaveDone,
    MemberView,
    Profile,
    PushPull,
    SendDatagram,
    Settings,
)
from mqd.cluster.membership.gossip_events import SUSPECT as SUSPECT
from mqd.cluster.membership.gossip_membership import Member, Membership
from mqd.cluster.membership.gossip_messages import (
    BODY_BYTES_MAX,
    UPDATE_COUNT_MAX,
    Ack,
    Body,
    Identity,
    Left,
    Load,
    Nack,
    PacketOut,
    Ping,
    PingRequest,
    Raw,
    Refused,
    Seal,
    State,
    StreamPing,
    encode,
    encode_update,
    life_of,
)
from mqd.cluster.membership.gossip_parts import Broadcasts, ControllerHint, Health, ReplayWindow, TokenBucket
from mqd.cluster.membership.gossip_probing import Prober

EXCHANGE_COUNT_MAX = 4
LEAVE_ROUNDS, LEAVE_INTERVAL_MS = 3, 50
# States are exchanged again this long after joining: when all hosts start together, the seed does not
# know all of them at first.
EXCHANGES_AFTER_JOIN_MS = (1_000, 3_000, 8_000)
SWEEP_MS = 10_000
LOAD_RETRANSMIT_MULTIPLIER = 2  # multiplied by ceil(log10(members + 1)): few, because loads are sent again regularly

Address = tuple[str, int]


class GossipCore:
    """`seal` authenticates datagrams. `life`: how often this host has started with this directory; the
    number is already on disk. `seeds`: addresses of controller listeners, which may include this
    host's. `rng` chooses targets and probe ids, so other hosts must not be able to predict its results
    (a broker uses a random.Random seeded by the system).
    """

    def __init__(
        self,
        profile: Profile,
        seal: Seal,
        settings: Settings,
        rng: random.Random,
        life: int,
        seeds: Sequence[Address] = (),
    ) -> None:
        self.settings, self.rng = settings, rng
        self.counts: Counter[str] = Counter()  # datagrams by result
        self.own_time_ms = 0  # the clock minus `_stopped_ms`
        self.quiet = False  # whether changes are not forwarded to other hosts
        self.health = Health(settings.health_score_max)
        self.own_load: Load | None = None
        self.seal = seal
        self._effects: list[Effect] = []
        self._timers: list[tuple[int, int, Callable[[Any], None], Any]] = []
        self._timer_count = 0
        # the clock at the first event, plus the total time for which the process was stopped since
        self._stopped_ms = 0
        self._sequence = 0
        self._updates = Broadcasts(2 * settings.member_count_max)
        self._loads = Broadcasts(settings.member_count_max)
        self._windows: dict[Identity, ReplayWindow] = {}
        self._is_round_scheduled = False
        self._urgent_rounds = 0
        self._controller_hint = ControllerHint()
        self._seeds: tuple[Address, ...] = tuple(seeds)
        self._seed_identities: dict[Address, Identity] = {}
        self._joined = False
        self._join_wait_ms = settings.join_interval_ms
        self._seed_tried_ms = 0
        self._exchanges: dict[int, Address] = {}
        self._exchange_count = 0
        self._reconnecting: tuple[int, bytes] | None = None
        self._measured_load: events.LoadMeasured | None = None
        self._response_limit = TokenBucket(settings.response_rate_per_s, settings.response_burst, 0)
        self._unknown_limit = TokenBucket(settings.unknown_rate_per_s, settings.unknown_rate_per_s, 0)
        self.prober = Prober(self)
        self.membership = Membership(self, profile, life)

    # -- queries ----------------------------------------------------------------------------------

    @property
    def due_ms(self) -> int:
        """Time of the next required Tick, on the caller's clock."""
        return self._timers[0][0] + self._stopped_ms if self._timers else self.own_time_ms + self._stopped_ms + SWEEP_MS

    @property
    def controller(self) -> ControllerSeen:
        """The active controller; node_id -1: not known."""
        return ControllerSeen(self._controller_hint.node_id, self._controller_hint.epoch)

    @property
    def joined(self) -> bool:
        return self._joined

    def view(self, node_id: int) -> MemberView | None:
        """Returns the view of another member; None: there is none, or it is this host itself."""
        member = self.membership.of_node(node_id)
        return member.view() if member is not None else None

    def views(self) -> list[MemberView]:
        return [member.view() for member in self.membership.members.values()]

    def is_for_this_host(self, ping: StreamPing) -> bool:
        """Whether a probe over TCP was sent to this host."""
        return (ping.node_id, ping.directory_id) == self.membership.identity and not self.membership.has_left

    def state(self, wants_response: bool = True) -> State:
        """Returns the state to send in a push-pull; its first entry is this host."""
        return State(
            self._controller_hint.epoch, self._controller_hint.node_id, self.membership.entries(), wants_response
        )

    # -- the one mutator ---------------------------------------------------------------------------

    def handle(self, event: Event, now_ms: int) -> list[Effect]:
        effects: list[Effect] = []
        self._effects = effects
        self._set_time(now_ms)
        if type(event) is events.DatagramReceived:
            self._on_datagram(event.data)
        elif type(event) is not events.Tick:
            self._on_event(event)
        self._run_timers()
        return effects

    def _set_time(self, now_ms: int) -> None:
        if not self._timers:
            self._stopped_ms = now_ms - self.own_time_ms  # the first event
        late_ms = now_ms - self._stopped_ms - self._timers[0][0] if self._timers else 0
        if late_ms > self.settings.late_ms:
            self._stopped_ms += late_ms
            self.counts["stood_still"] += 1
            self.health.worsen(1 + late_ms // self.settings.probe_interval_ms)
        self.own_time_ms = max(self.own_time_ms, now_ms - self._stopped_ms)

    def _run_timers(self) -> None:
        timers = self._timers
        while timers and timers[0][0] <= self.own_time_ms:
            _, _, run, argument = heapq.heappop(timers)
            run(argument)

    def _on_event(self, event: Event) -> None:
        match event:
            case events.Started():
                self._on_started()
            case events.StateReceived():
                self._on_state(event)
            case events.ExchangeFailed():
                self._exchanges.pop(event.exchange_id, None)
            case events.StreamResponded():
                self.prober.on_response(event.probe_id)
            case events.LoadMeasured():
                self._measured_load = event
            case events.ProfileChanged():
                self.membership.change_profile(event.profile)
                self.gossip_now()
            case events.ControllerKnown():
                self._learn_controller(event.epoch, event.node_id)
            case events.UnreachableHint():
                member = self.membership.of_node(event.node_id)
                if member is not None and member.state in (ALIVE, SUSPECT):
                    self.prober.probe(member.identity)
            case events.SeedsChanged():
                self._seeds = event.seeds
            case events.Forget():
                self.membership.forget(event.node_id)
            case events.Leave():
                self._on_leave()

    def _on_started(self) -> None:
        settings, rng = self.settings, self.rng
        self.prober.start()
        self.membership.announce()
        self.after(1, self._on_join)
        self.after(rng.randrange(1, settings.push_pull_interval_ms), self._on_push_pull)
        self.after(rng.randrange(1, settings.reconnect_interval_ms), self._on_reconnect)
        self.after(rng.randrange(1, settings.load_interval_ms), self._on_load_due)
        self.after(SWEEP_MS, self._on_sweep)

    # -- for the parts ----------------------------------------------------------------------------

    def emit(self, effect: Effect) -> None:
        self._effects.append(effect)
        if (
            isinstance(effect, events.MemberChanged)
            and effect.member.state == ALIVE
            and (effect.member.node_id, effect.member.directory_id) == self._reconnecting
        ):
            self._reconnecting = None
            self.after(0, self._on_reconnected, (effect.member.profile.host, effect.member.profile.port))

    def after(self, wait_ms: int, run: Callable[[Any], None], argument: Any = None) -> None:
        self.at_time(self.own_time_ms + wait_ms, run, argument)

    def at_time(self, when_ms: int, run: Callable[[Any], None], argument: Any = None) -> None:
        if self.membership.has_left and run != self._on_gossip and run != self._on_leave_done:
            return
        self._timer_count += 1
        heapq.heappush(self._timers, (when_ms, self._timer_count, run, argument))

    def choose_live_members(self, count: int) -> list[Identity]:
        """Returns up to `count` different live members, chosen at random."""
        living = self.membership.living
        return self.rng.sample(living, min(count, len(living)))

    def may_respond(self) -> bool:
        if self._response_limit.take(self.own_time_ms):
            return True
        self.counts["responses_left_out"] += 1
        return False

    def may_respond_to_unknown(self) -> bool:
        if self._unknown_limit.take(self.own_time_ms):
            return True
        self.counts["strangers_left_out"] += 1
        return False

    def broadcast(self, key: object, data: bytes) -> None:
        if not self.quiet:
            self._updates.put(key, data)
            self._arm_gossip()

    def broadcast_load(self, identity: Identity, data: bytes) -> None:
        """Adds a load to datagrams that are sent for other reasons."""
        if not self.quiet:
            self._loads.put(identity, data)

    def drop_broadcast(self, key: object) -> None:
        self._updates.drop(key)
        self._loads.drop(key)

    # -- sending -----------------------------------------------------------------------------------

    def _sends_max(self, multiplier: int) -> int:
        return multiplier * max(1, math.ceil(math.log10(self.membership.live_count + 1)))

    def send_to(self, member: Member, body: Body | None, urgent: Sequence[bytes] = ()) -> None:
        self.send((member.profile.directory_id, member.life), member.profile.host, member.profile.port, body, urgent)

    def send(
        self,
        recipient: tuple[bytes, int],
        host: str,
        port: int,
        body: Body | None,
        urgent: Sequence[bytes] = (),
        without_queued: bool = False,
    ) -> None:
        """Sends one datagram to `recipient` (directory id, life), with the updates `urgent` and as many
        queued updates as fit (none if `without_queued`). Sends nothing if there is neither a body nor an
        update, except in an urgent round.
        """
        membership = self.membership
        head = (
            *recipient,
            *membership.identity,
            membership.incarnation,
            self._sequence + 1,
            self._controller_hint.epoch,
            self._controller_hint.node_id,
            body,
        )
        room = BODY_BYTES_MAX - len(encode(PacketOut(*head, []))) - 2 - sum(map(len, urgent))
        updates = list(urgent)
        if not without_queued:
            updates += self._updates.take(
                room, UPDATE_COUNT_MAX - len(updates), self._sends_max(self.settings.retransmit_multiplier)
            )
            if body is None and not updates and not self._urgent_rounds:
                return
            room -= sum(map(len, updates)) - sum(map(len, urgent))
            updates += self._loads.take(
                room, UPDATE_COUNT_MAX - len(updates), self._sends_max(LOAD_RETRANSMIT_MULTIPLIER)
            )
        self._sequence += 1
        self.emit(SendDatagram(host, port, self.seal.seal(PacketOut(*head, [Raw(update) for update in updates]))))
        self.counts["sent"] += 1

    def _arm_gossip(self) -> None:
        if not self._is_round_scheduled:
            self._is_round_scheduled = True
            self.after(self.rng.randrange(1, self.settings.gossip_interval_ms + 1), self._on_gossip)

    def gossip_now(self) -> None:
        """Runs a round early for an urgent update. Rate-limited like a response, because other hosts can
        cause it.
        """
        if self.may_respond():
            self._gossip_round()
        self._arm_gossip()

    def _on_gossip(self, _: object) -> None:
        self._is_round_scheduled = False
        self._gossip_round()
        if (self._updates or self._urgent_rounds) and self.membership.living and not self.membership.has_left:
            self._is_round_scheduled = True
            self.after(self.settings.gossip_interval_ms, self._on_gossip)

    def _gossip_round(self) -> None:
        for identity in self.choose_live_members(self.settings.gossip_fanout):
            self.send_to(self.membership.members[identity], None, ())
        self._urgent_rounds = max(0, self._urgent_rounds - 1)

    # -- receiving ---------------------------------------------------------------------------------

    def _on_datagram(self, data: bytes) -> None:
        try:
            packet = self.seal.open(data)
        except Refused:
            self.counts["refused"] += 1
            return
        membership = self.membership
        sender = (packet.node_id, packet.directory_id)
        if packet.to_directory_id != membership.identity[1] or sender == membership.identity or membership.has_left:
            self.counts["misaddressed"] += 1
            return
        if not self._window_of(sender).accept(life_of(packet.incarnation), packet.sequence):
            self.counts["repeated"] += 1
            return
        # Before it has joined, a host cannot know that its incarnation is new, because its disk may be
        # a copy: datagrams sent to the earlier incarnation could be replayed.
        if sender not in membership.members or packet.to_life != membership.life or not self._joined:
            self.counts["strangers"] += 1
            if isinstance(packet.body, Ping):
                self.prober.on_ping(packet, packet.body, is_unknown=True)
            return
        self.counts["received"] += 1
        self._learn_controller(packet.controller_epoch, packet.controller_id)
        for update in packet.updates:
            membership.apply(update)
        match packet.body:
            case Ping():
                self.prober.on_ping(packet, packet.body, is_unknown=False)
            case Ack():
                self.prober.on_ack(packet, packet.body)
            case PingRequest():
                self.prober.on_ping_request(packet, packet.body)
            case Nack():
                self.prober.on_nack(packet, packet.body)

    def _window_of(self, sender: Identity) -> ReplayWindow:
        """Returns the replay window of a sender. A sender that is not a member yet has one, too:
        otherwise its earlier datagrams could be replayed once it is a member.
        """
        window = self._windows.get(sender)
        if window is None:
            if len(self._windows) >= 2 * self.settings.member_count_max:
                members = self.membership.members
                del self._windows[next(identity for identity in self._windows if identity not in members)]
            window = self._windows[sender] = ReplayWindow()
        return window

    def _learn_controller(self, epoch: int, node_id: int) -> None:
        if self._controller_hint.learn(epoch, node_id):
            self._urgent_rounds = self._sends_max(self.settings.retransmit_multiplier)
            self._arm_gossip()
            self.emit(self.controller)

    # -- joining, states ---------------------------------------------------------------------------

    def _other_seeds(self) -> list[Address]:
        own = self.membership
        return [
            seed
            for seed in self._seeds
            if seed != (own.profile.host, own.profile.port) and self._seed_identities.get(seed) != own.identity
        ]

    def _on_join(self, _: object) -> None:
        seeds = self._other_seeds()
        if self._joined or not seeds:
            self._joined = True
            return
        self._exchange(self.rng.choice(seeds))
        self.after(self.rng.randint(self._join_wait_ms // 2, self._join_wait_ms), self._on_join)
        self._join_wait_ms = min(2 * self._join_wait_ms, self.settings.join_interval_ms_max)

    def _exchange(self, address: Address) -> None:
        if len(self._exchanges) >= EXCHANGE_COUNT_MAX:
            return
        self._exchange_count += 1
        self._exchanges[self._exchange_count] = address
        self.emit(PushPull(self._exchange_count, *address))
        self.after(self.settings.exchange_ms_max, self._on_exchange_late, self._exchange_count)

    def _on_exchange_late(self, exchange_id: int) -> None:
        self._exchanges.pop(exchange_id, None)

    def _on_state(self, event: events.StateReceived) -> None:
        address = self._exchanges.pop(event.exchange_id, None) if event.exchange_id is not None else None
        state, membership = event.state, self.membership
        if not state.entries or membership.has_left or (event.exchange_id is not None and address is None):
            return
        sender = (state.entries[0].alive.node_id, state.entries[0].alive.directory_id)
        if address in self._seeds:
            self._seed_identities[address] = sender
        if sender == membership.identity:
            return  # from this host itself, at another of its addresses
        # a joining host does not spread what it learns from its exchange: the others know it already
        membership.merge(state, spread=self._joined or event.exchange_id is None)
        self._learn_controller(state.controller_epoch, state.controller_id)
        if event.exchange_id is not None and not self._joined:
            self._joined = True
            membership.announce()
            self.gossip_now()
            for wait_ms in EXCHANGES_AFTER_JOIN_MS:
                self.after(self.rng.randint(wait_ms // 2, wait_ms), self._on_exchange_due)

    def _on_push_pull(self, _: object) -> None:
        count = self.membership.live_count
        scale = 1 if count <= 32 else math.ceil(math.log2(count)) - 4
        self.after(self.settings.push_pull_interval_ms * scale, self._on_push_pull)
        self._on_exchange_due(None)

    def _on_exchange_due(self, _: object) -> None:
        for identity in self.choose_live_members(1):
            profile = self.membership.members[identity].profile
            self._exchange((profile.host, profile.port))

    def _on_reconnect(self, _: object) -> None:
        settings, membership = self.settings, self.membership
        self.after(settings.reconnect_interval_ms, self._on_reconnect)
        dead = [member for member in membership.members.values() if member.state == DEAD]
        self._reconnecting = None
        if dead:
            chosen = self.rng.choice(dead)
            self._reconnecting = chosen.identity
            self.prober.reconnect(chosen)
        if self._joined and self.own_time_ms - self._seed_tried_ms >= settings.seed_interval_ms:
            missing = self._missing_seeds()
            if missing:
                self._seed_tried_ms = self.own_time_ms
                self._exchange(self.rng.choice(missing))

    def _on_reconnected(self, address: Address) -> None:
        """Exchanges states with a host that was considered dead and has responded. That host may have lost
        its state, and would otherwise be updated only by the next regular exchange.
        """
        self._exchange(address)

    def _missing_seeds(self) -> list[Address]:
        living = {
            (member.profile.host, member.profile.port)
            for member in self.membership.members.values()
            if member.state in (ALIVE, SUSPECT)
        }
        missing = []
        for seed in self._other_seeds():
            member = self.membership.members.get(self._seed_identities.get(seed, (-1, b"")))
            if seed not in living and (member is None or member.state not in (ALIVE, SUSPECT)):
                missing.append(seed)
        return missing

    # -- load, removal of old members, leaving -----------------------------------------------------

    def _on_load_due(self, _: object) -> None:
        settings = self.settings
        self.after(
            max(settings.load_interval_ms, settings.load_interval_ms_per_member * self.membership.live_count),
            self._on_load_due,
        )
        if self._measured_load is not None:
            self._timer_count += 1  # doubles as the load's number, which rises within a life
            measured = self._measured_load
            self.own_load = Load(
                *self.membership.identity,
                self.membership.life,
                self._timer_count,
                measured.broker_epoch,
                measured.metadata_version,
                measured.cpu_permille,
                measured.disk_used_bytes,
                measured.in_bytes_per_s,
                measured.out_bytes_per_s,
                measured.leader_count,
                measured.replica_count,
            )
            self._loads.put(self.membership.identity, encode_update(self.own_load))

    def _on_sweep(self, _: object) -> None:
        self.after(SWEEP_MS, self._on_sweep)
        self.membership.sweep()

    def _on_leave(self) -> None:
        membership = self.membership
        if membership.has_left:
            return
        membership.has_left = True
        self._timers.clear()
        membership.own_update = encode_update(Left(*membership.identity, membership.incarnation))
        self.broadcast(membership.identity, membership.own_update)
        self._urgent_rounds = LEAVE_ROUNDS
        rounds = LEAVE_ROUNDS if membership.living else 0
        for number in range(rounds):
            self.after(LEAVE_INTERVAL_MS * number, self._on_gossip)
        self.after(LEAVE_INTERVAL_MS * rounds, self._on_leave_done)

    def _on_leave_done(self, _: object) -> None:
        self._timers.clear()
        self.emit(LeaveDone())

    # -- invariants --------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises AssertionError."""
        self.membership.check()
        self.prober.check()
        self._updates.check()
        self._loads.check()
        assert len(self._exchanges) <= EXCHANGE_COUNT_MAX
        assert len(self._windows) <= 2 * self.settings.member_count_max
        assert not any(effect.__class__ is SendDatagram and len(effect.data) > 1400 for effect in self._effects), "G4"
