"""The members, their states and incarnations: SWIM's order of precedence, with Lifeguard's
suspicion.

    statement         overrides                                         if
    Alive(i)          all states                                        i >  known incarnation
    Suspect(i)        alive                                             i >= known
    Dead(i)           alive, suspect                                    i >= known
    Left(i)           alive, suspect, dead                              i >= known

Invariants (check())
    G1  the incarnation of a member never falls; within one incarnation its state only moves alive
        -> suspect -> dead -> left
    G2  a member becomes dead here only if its suspicion expires here (never before the shortest wait)
        or a peer sends Dead; a push-pull state alone is not enough
    G3  this host refutes other hosts' statements about itself with a higher incarnation, until it
        leaves
    G5  at most member_count_max members; a full table evicts the member that died or left first,
        and takes no new member when all are live
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from mqd.cluster.membership.gossip_events import (
    ALIVE,
    DEAD,
    LEFT,
    SUSPECT,
    DuplicateNodeId,
    Effect,
    MemberChanged,
    MemberView,
    Profile,
    Settings,
    StoreLife,
)
from mqd.cluster.membership.gossip_messages import (
    LIFE_MAX,
    LIFE_UNIT,
    Alive,
    Dead,
    Identity,
    Left,
    Load,
    MemberEntry,
    State,
    Suspect,
    Update,
    encode_update,
    life_of,
)
from mqd.cluster.membership.gossip_parts import Health, Suspicion

RANK = {ALIVE: 0, SUSPECT: 1, DEAD: 2, LEFT: 3}


class Member:
    __slots__ = ("incarnation", "load", "profile", "since_ms", "state", "suspicion")

    def __init__(self, profile: Alive, since_ms: int) -> None:
        self.profile = profile
        # the incarnation to which `state` applies; `profile` may belong to an earlier one
        self.incarnation = profile.incarnation
        self.state = ALIVE
        self.since_ms = since_ms
        self.suspicion: Suspicion | None = None
        self.load: Load | None = None

    @property
    def identity(self) -> Identity:
        return self.profile.node_id, self.profile.directory_id

    @property
    def life(self) -> int:
        """How often the host has started, which is the upper part of its incarnation."""
        return life_of(self.incarnation)

    def view(self) -> MemberView:
        return MemberView(self.profile, self.state, self.incarnation, self.since_ms, self.load)

    def refutable_update(self) -> bytes:
        """The update to put into a datagram to this member, so that the member can refute it; empty if the
        member is considered alive.
        """
        node_id, directory_id = self.identity
        if self.state == SUSPECT:
            assert self.suspicion is not None
            return encode_update(Suspect(node_id, directory_id, self.incarnation, self.suspicion.confirmers[0]))
        if self.state == ALIVE:
            return b""
        return encode_update(Dead(node_id, directory_id, self.incarnation, node_id))


class Prober(Protocol):
    """The part of gossip_probing.Prober that Membership needs."""

    def add_target(self, identity: Identity) -> None: ...

    def on_suspected(self, member: Member, by: int) -> None: ...


class Core(Protocol):
    """The part of GossipCore that Membership needs."""

    settings: Settings
    rng: random.Random
    counts: Counter[str]
    health: Health
    own_time_ms: int
    quiet: bool
    own_load: Load | None

    @property
    def joined(self) -> bool: ...

    @property
    def prober(self) -> Prober: ...

    def emit(self, effect: Effect) -> None: ...

    def at_time(self, when_ms: int, run: Callable[[Any], None], argument: Any = None) -> None: ...

    def broadcast(self, key: object, data: bytes) -> None: ...

    def broadcast_load(self, identity: Identity, data: bytes) -> None: ...

    def drop_broadcast(self, key: object) -> None: ...

    def gossip_now(self) -> None: ...


class Membership:
    """A host's member table and its own incarnation. `life`: how often the host has started."""

    def __init__(self, core: Core, profile: Profile, life: int) -> None:
        self._core = core
        self.profile = profile
        self.identity: Identity = (profile.node_id, profile.directory_id)
        self.incarnation = life * LIFE_UNIT
        self._token = core.rng.getrandbits(61)
        self.members: dict[Identity, Member] = {}
        self.living: list[Identity] = []  # alive or suspect, without this host
        self.suspect_count = 0
        self._identities_of_node: dict[int, list[Identity]] = {}
        self.has_left = False
        self.own_update = encode_update(self.own_alive())

    # -- this host ---------------------------------------------------------------------------------

    @property
    def life(self) -> int:
        return life_of(self.incarnation)

    @property
    def live_count(self) -> int:
        """Live members, including this host."""
        return len(self.living) + 1

    def own_alive(self) -> Alive:
        return self.profile.to_alive(self.incarnation, self._token)

    def announce(self) -> None:
        self.own_update = encode_update(self.own_alive())
        self._core.broadcast(self.identity, self.own_update)

    def change_profile(self, profile: Profile) -> None:
        assert (profile.node_id, profile.directory_id) == self.identity, "another node or directory is another member"
        self.profile = profile
        self._raise_above(self.incarnation)
        self.announce()

    def _raise_above(self, incarnation: int) -> bool:
        """Moves to an incarnation above `incarnation`. Returns False if there is none."""
        if life_of(incarnation) == self.life and (incarnation + 1) % LIFE_UNIT:
            self.incarnation = incarnation + 1
            return True
        return self._start_later_life(incarnation)

    def _start_later_life(self, incarnation: int) -> bool:
        """Moves to a life above that of `incarnation`, because other hosts have seen another process with this
        host's incarnation: its directory is an old copy, or has lost its count of starts.
        """
        life = life_of(incarnation) + 1
        if life > LIFE_MAX:
            return False  # only a faulty or malicious host can send this
        self.incarnation = life * LIFE_UNIT
        self._core.emit(StoreLife(life))
        return True

    def _refute(self, incarnation: int) -> None:
        if self.has_left or incarnation < self.incarnation:
            return
        if not self._raise_above(incarnation):
            self._core.counts["unrefutable"] += 1
            return
        self._core.health.worsen()
        self.announce()
        self._core.gossip_now()

    # -- statements about members -----------------------------------------------------------------

    def apply(self, update: Update) -> None:
        match update:
            case Alive():
                self._on_alive(update)
            case Suspect():
                self.on_suspect(update)
            case Dead():
                self._on_dead(update)
            case Left():
                self._on_left(update)
            case Load():
                self._on_load(update)

    def merge(self, state: State, spread: bool) -> None:
        """Merges another host's state. Members that are dead in that state become suspects here, so that they
        can refute this if they are alive. `spread`: forward the changes.
        """
        core = self._core
        core.quiet = not spread
        by = state.entries[0].alive.node_id if state.entries else self.identity[0]
        for entry in state.entries:
            profile, incarnation = entry.alive, max(entry.incarnation, entry.alive.incarnation)
            identity = (profile.node_id, profile.directory_id)
            if identity == self.identity:
                if not core.joined and incarnation >= self.incarnation and profile.token != self._token:
                    self._start_later_life(incarnation)
                    self.announce()
                elif incarnation > self.incarnation or (entry.state != ALIVE and incarnation == self.incarnation):
                    self._refute(incarnation)
                continue
            if identity not in self.members and entry.state in (DEAD, LEFT):
                continue
            self._on_alive(profile)
            if entry.state == LEFT:
                self._on_left(Left(profile.node_id, profile.directory_id, incarnation))
            elif entry.state != ALIVE:
                self.on_suspect(Suspect(profile.node_id, profile.directory_id, incarnation, by))
            if entry.load is not None and (entry.load.node_id, entry.load.directory_id) == identity:
                self._on_load(entry.load)
        core.quiet = False

    def _on_alive(self, alive: Alive) -> None:
        identity = (alive.node_id, alive.directory_id)
        if identity == self.identity:
            if alive.incarnation > self.incarnation:
                self._refute(alive.incarnation)
            return
        member = self.members.get(identity)
        if member is None:
            if not self._make_room():
                self._core.counts["table_full"] += 1
                return
            member = self.members[identity] = Member(alive, self._core.own_time_ms)
            self._identities_of_node.setdefault(alive.node_id, []).append(identity)
            self._revive(member, None)
        elif alive.incarnation > member.incarnation:
            before = member.state
            member.profile, member.incarnation = alive, alive.incarnation
            self._revive(member, before)
        else:
            if alive.incarnation > member.profile.incarnation:
                # the suspicion of this incarnation has arrived before its profile
                member.profile = alive
            return
        self._core.broadcast(identity, encode_update(alive))

    def _revive(self, member: Member, before: str | None) -> None:
        identity = member.identity
        if before not in (ALIVE, SUSPECT):
            self._report_duplicate_node(identity)
            self.living.append(identity)
            self._core.prober.add_target(identity)
        if before != ALIVE:
            member.since_ms = self._core.own_time_ms
        self._end_suspicion(member)
        member.state = ALIVE
        self._core.emit(MemberChanged(before, member.view()))

    def _report_duplicate_node(self, identity: Identity) -> None:
        others_with_id = [
            other
            for other in self._identities_of_node.get(identity[0], ())
            if other != identity and self.members[other].state in (ALIVE, SUSPECT)
        ]
        if identity[0] == self.identity[0]:
            others_with_id.append(self.identity)
        if others_with_id:
            self._core.emit(DuplicateNodeId(identity[0], (others_with_id[0][1], identity[1])))

    def _make_room(self) -> bool:
        if len(self.members) < self._core.settings.member_count_max:
            return True
        removable = [member for member in self.members.values() if member.state in (DEAD, LEFT)]
        if not removable:
            return False
        self._forget(min(removable, key=lambda member: member.since_ms))
        return True

    def on_suspect(self, suspect: Suspect) -> None:
        identity = (suspect.node_id, suspect.directory_id)
        if identity == self.identity:
            self._refute(suspect.incarnation)
            return
        member = self.members.get(identity)
        if member is None or suspect.incarnation < member.incarnation or member.state in (DEAD, LEFT):
            return
        if member.suspicion is not None and suspect.incarnation == member.incarnation:
            if member.suspicion.confirm(suspect.by):
                self._core.broadcast((identity, suspect.by), encode_update(suspect))
                self._await_refutation(member)
            return
        self._end_suspicion(member)
        before, member.state, member.incarnation = member.state, SUSPECT, suspect.incarnation
        if before != SUSPECT:
            member.since_ms = self._core.own_time_ms
        member.suspicion = self._make_suspicion(suspect.by)
        self.suspect_count += 1
        self._core.broadcast(identity, encode_update(suspect))
        self._await_refutation(member)
        self._core.emit(MemberChanged(before, member.view()))
        self._core.prober.on_suspected(member, suspect.by)

    def _make_suspicion(self, by: int) -> Suspicion:
        settings = self._core.settings
        # A refutation reaches all hosts in log(count) gossip intervals, which are much shorter than
        # probe intervals: half of memberlist's wait is enough.
        shortest_ms = int(
            settings.suspicion_multiplier * max(1.0, math.log10(self.live_count) / 2) * settings.probe_interval_ms
        )
        return Suspicion(
            self._core.own_time_ms,
            shortest_ms,
            settings.suspicion_factor_max,
            min(settings.confirmation_count, self.live_count - 2),
            by,
        )

    def _await_refutation(self, member: Member) -> None:
        assert member.suspicion is not None
        self._core.at_time(
            member.suspicion.deadline_ms, self._on_suspicion_expired, (member.identity, member.suspicion)
        )

    def _on_suspicion_expired(self, expired: tuple[Identity, Suspicion]) -> None:
        identity, suspicion = expired
        member = self.members.get(identity)
        if member is None or member.suspicion is not suspicion or suspicion.deadline_ms > self._core.own_time_ms:
            return
        self._on_dead(Dead(*identity, member.incarnation, self.identity[0]))

    def _end_suspicion(self, member: Member) -> None:
        if member.suspicion is not None:
            for by in member.suspicion.confirmers:
                self._core.drop_broadcast((member.identity, by))
            member.suspicion = None
            self.suspect_count -= 1

    def _on_dead(self, dead: Dead) -> None:
        self._on_end(dead, DEAD)

    def _on_left(self, left: Left) -> None:
        self._on_end(left, LEFT)

    def _on_end(self, update: Dead | Left, state: str) -> None:
        identity = (update.node_id, update.directory_id)
        if identity == self.identity:
            self._refute(update.incarnation)
            return
        member = self.members.get(identity)
        if member is None or update.incarnation < member.incarnation:
            return
        if RANK[member.state] >= RANK[state]:
            member.incarnation = update.incarnation
            return
        self._end_suspicion(member)
        before, member.state, member.incarnation, member.since_ms = (
            member.state,
            state,
            update.incarnation,
            self._core.own_time_ms,
        )
        if before in (ALIVE, SUSPECT):
            self.living.remove(identity)
        self._core.broadcast(identity, encode_update(update))
        self._core.emit(MemberChanged(before, member.view()))

    def _on_load(self, load: Load) -> None:
        member = self.members.get((load.node_id, load.directory_id))
        if member is None or (
            member.load is not None and (load.life, load.number) <= (member.load.life, member.load.number)
        ):
            return
        member.load = load
        self._core.broadcast_load(member.identity, encode_update(load))

    # -- forgetting -------------------------------------------------------------------------------

    def sweep(self) -> None:
        settings, now_ms = self._core.settings, self._core.own_time_ms
        for member in list(self.members.values()):
            retention_ms = {DEAD: settings.dead_retention_ms, LEFT: settings.left_retention_ms}.get(member.state)
            if retention_ms is not None and now_ms - member.since_ms > retention_ms:
                self._forget(member)

    def forget(self, node_id: int) -> None:
        for identity in list(self._identities_of_node.get(node_id, ())):
            if self.members[identity].state in (DEAD, LEFT):
                self._forget(self.members[identity])

    def _forget(self, member: Member) -> None:
        identity = member.identity
        del self.members[identity]
        self._identities_of_node[identity[0]].remove(identity)
        if not self._identities_of_node[identity[0]]:
            del self._identities_of_node[identity[0]]
        self._core.drop_broadcast(identity)

    # -- views -------------------------------------------------------------------------------------

    def entries(self) -> list[MemberEntry]:
        """The entries of a state: this host first, then all members."""
        own = MemberEntry(self.own_alive(), LEFT if self.has_left else ALIVE, self.incarnation, self._core.own_load)
        return [
            own,
            *(
                MemberEntry(member.profile, member.state, member.incarnation, member.load)
                for member in self.members.values()
            ),
        ]

    def of_node(self, node_id: int) -> Member | None:
        """The member with that node id: a live one rather than a dead one, then the newest."""
        members = [self.members[identity] for identity in self._identities_of_node.get(node_id, ())]
        return max(members, key=lambda member: (-RANK[member.state], member.since_ms), default=None)

    def check(self) -> None:
        """Raises AssertionError."""
        assert self.identity not in self.members, "G3: this host is in its own table"
        assert len(self.members) <= self._core.settings.member_count_max, "G5"
        assert sorted(self.living) == sorted(
            identity for identity, member in self.members.items() if member.state in (ALIVE, SUSPECT)
        )
        assert sorted(
            identity for identities in self._identities_of_node.values() for identity in identities
        ) == sorted(self.members)
        assert self.suspect_count == sum(member.state == SUSPECT for member in self.members.values())
        for identity, member in self.members.items():
            assert member.identity == identity
            assert (member.suspicion is not None) == (member.state == SUSPECT)
            assert member.incarnation >= member.profile.incarnation, "G1"
