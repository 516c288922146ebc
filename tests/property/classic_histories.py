"""Random histories of one classic group: members that join, sync, send heartbeats, leave, die,
return, repeat old requests and send wrong ones; a coordinator that restarts from its log.

`History(seed).run(events)` raises AssertionError at the first broken rule. Checked in every
history:
    check()   the core's own invariants, after every event
    ONCE      every request gets exactly one response, from the core or because its coordinator is
              lost
    LEADER    one leader and one protocol in a generation; the generation in responses never
              decreases while the coordinator lives
    LOGGED    an assignment was in the log before its response
    OWN       a member only receives its own part of the leader's assignment
    FENCED    a member id that was replaced (static membership) never gets a success
    TRUE      a heartbeat without an error comes from a member of the current generation, with no
              rebalance pending for it
    REPLAY    the state in the log is the group: members, leader, protocol, assignments, generation
    SETTLES   when wrong requests stop, the group becomes Stable with exactly the live members, and
              stays so
"""

from __future__ import annotations

import random

import msgspec

from mqd.coordinator.actions import Persist, Reply, Timer, TimerFired
from mqd.coordinator.group.classic.core import ClassicGroup
from mqd.coordinator.group.classic.events import Heartbeat, JoinGroup, LeaveGroup, SyncGroup
from mqd.coordinator.group.classic.state import State
from mqd.coordinator.group.settings import ClassicSettings
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import (
    HeartbeatRequest,
    JoinGroupRequest,
    JoinGroupResponse,
    LeaveGroupRequest,
    SyncGroupRequest,
    SyncGroupResponse,
)

E = ErrorCode
PROTOCOLS = ("range", "roundrobin", "sticky")
COMMON_PROTOCOL = "range"  # supported by all clients
SETTLE_MS = 400_000


class Client:
    """One consumer. `mood`: "good" follows the protocol, "mute" never syncs but sends heartbeats,
    "fading" is mute and gives up when it is removed, "dead" sends nothing.
    """

    def __init__(self, number: int, instance_id: str | None, rng: random.Random) -> None:
        self.number, self.instance_id = number, instance_id
        self.version = rng.randint(5 if instance_id else 0, 9)
        self.session_timeout_ms = rng.choice((6_000, 10_000, 45_000))
        self.rebalance_timeout_ms = rng.choice((5_000, 20_000, 60_000))
        self.metadata = b"m%d" % number
        self.mood = "good"
        self.waits_for: int | None = None
        self.forget()

    def forget(self) -> None:
        if self.mood == "fading":
            self.mood = "dead"
        self.member_id, self.generation, self.reported, self.is_leader, self.assigned = "", -1, [], False, False


class History:
    def __init__(self, seed: int, group: type[ClassicGroup] = ClassicGroup, clients: int = 6) -> None:
        self.rng = random.Random(seed)
        self.make = group
        self.settings = ClassicSettings(
            initial_rebalance_delay_ms=self.rng.choice((0, 300, 3000)),
            max_size=self.rng.choice((2, 4, 1000, 1000, 1000)),
            new_member_join_timeout_ms=90_000,
        )
        self.now = 1_000_000
        self.number = 0
        self.event_count = 0
        self.log: list[tuple[bytes, bytes | None]] = []  # below the high watermark
        self.unwritten: list[Persist | Reply] = []  # in order: responses wait for earlier ones
        self.timers: dict[str, int] = {}
        self.requested: dict[int, tuple[Client | None, object]] = {}  # without a response
        self.sent: list[object] = []  # to be repeated
        self.meant: dict[bytes, int] = {}  # assignment -> the generation whose leader sent it
        self.replaced: dict[str, str] = {}  # instance id -> member id in force
        self.clients = [
            Client(number, f"i{number}" if number % 3 == 0 else None, self.rng) for number in range(clients)
        ]
        self.core = self.make("g", self.settings)
        self._new_incarnation()

    def _new_incarnation(self) -> None:
        self.leaders: dict[int, tuple[str, str]] = {}
        self.highest = -1
        self.replaced.clear()
        self.static_assignments: dict[tuple[int, str], bytes] = {}

    # -- the shell ---------------------------------------------------------------------------------

    def handle(self, event: object) -> None:
        self.event_count += 1
        before = self.core.state, self.core.generation
        actions = self.core.handle(event, self.now)
        self.core.check()
        if before[0] != State.COMPLETING_REBALANCE and self.core.state == State.COMPLETING_REBALANCE:
            assert self.core.generation == before[1] + 1, (
                f"G3: a join phase ended, generation {before[1]} became {self.core.generation}"
            )
        assert self.core.generation >= before[1], "G3: the generation fell"
        if isinstance(event, Heartbeat):
            self._check_heartbeat(event, actions)
        self._carry_out(actions)

    def _carry_out(self, actions: list) -> None:
        for action in actions:
            if isinstance(action, Timer):
                if action.at_ms is None:
                    self.timers.pop(action.name, None)
                else:
                    self.timers[action.name] = action.at_ms
            elif isinstance(action, Persist) or self.unwritten:
                self.unwritten.append(action)
            else:
                self._log(action)
        state, timers = self.core.state, self.timers
        assert (state == State.PREPARING_REBALANCE) == ("classic.join" in timers), f"G5: {state} with {timers}"
        assert bool(self.core.pending_sync) == ("classic.sync" in timers), f"G5: {self.core.pending_sync} with {timers}"
        assert "classic.session" in timers or self.core.members.deadlines.next_ms is None, (
            "G4: the sessions are not watched"
        )

    def write(self) -> None:
        """Writes in flight are below the high watermark: their responses are sent."""
        waiting, self.unwritten = self.unwritten, []
        for action in waiting:
            if isinstance(action, Persist):
                self.log.extend(action.records)
            else:
                self._log(action)

    def advance(self, by_ms: int) -> None:
        end = self.now + by_ms
        while due := sorted((at, name) for name, at in self.timers.items() if at <= end):
            at, name = due[0]
            self.now = max(self.now, at)
            del self.timers[name]
            self.handle(TimerFired(name))
        self.now = end

    def restart(self) -> None:
        """Some of the writes in flight may have reached the log, and no member gets a response."""
        persists = [action for action in self.unwritten if isinstance(action, Persist)]
        for action in persists[: self.rng.randint(0, len(persists))]:
            self.log.extend(action.records)
        self.unwritten.clear()
        self.timers.clear()
        for client, _ in self.requested.values():
            if client is not None:
                client.waits_for = None
        self.requested.clear()
        self._new_incarnation()
        self.core = self._replayed()
        self._carry_out(self.core.on_loaded(self.now))
        self.core.check()
        del self.log[:-1]  # compacted: the group's last record suffices

    def _replayed(self) -> ClassicGroup:
        core = self.make("g", self.settings)
        for _, value in self.log:
            core.replay(value)
        return core

    def check_replay(self) -> None:
        if self.unwritten or self.core.state not in (State.STABLE, State.EMPTY):
            return
        again, live = self._replayed(), self.core

        def shape(core: ClassicGroup) -> tuple:
            members = {
                one.member_id: (
                    one.instance_id,
                    one.assignment,
                    one.protocols.get(core.protocol),
                    one.session_timeout_ms,
                )
                for one in core.members.by_id.values()
            }
            return core.state, core.generation, core.leader, core.protocol, members

        assert shape(again) == shape(live), f"REPLAY: {shape(again)} != {shape(live)}"

    # -- answers -----------------------------------------------------------------------------------

    def send_request(self, client: Client | None, event: object) -> None:
        self.requested[event.request] = (client, event)
        if client is not None:
            client.waits_for = event.request
        if len(self.sent) < 50:
            self.sent.append(event)
        else:
            self.sent[self.rng.randrange(50)] = event
        if isinstance(event, SyncGroup):
            for one in event.message.assignments:
                self.meant.setdefault(one.assignment, event.message.generation_id)
        self.handle(event)

    def _log(self, reply: Reply) -> None:
        assert reply.request in self.requested, f"ONCE: {reply.request} is answered twice, or was never asked"
        client, event = self.requested.pop(reply.request)
        response = reply.response
        if isinstance(event, JoinGroup):
            self._on_join(client, event, response)
        elif isinstance(event, SyncGroup):
            self._on_sync(client, event, response)
        if client is None or client.waits_for != reply.request:
            return
        client.waits_for = None
        if isinstance(event, LeaveGroup) or response.error_code in (
            E.UNKNOWN_MEMBER_ID,
            E.FENCED_INSTANCE_ID,
            E.ILLEGAL_GENERATION,
            E.GROUP_MAX_SIZE_REACHED,
            E.INCONSISTENT_GROUP_PROTOCOL,
        ):
            client.forget()
        elif isinstance(event, Heartbeat) and response.error_code == E.REBALANCE_IN_PROGRESS:
            client.assigned, client.generation = False, -1

    def _on_join(self, client: Client | None, event: JoinGroup, response: JoinGroupResponse) -> None:
        if response.error_code == E.MEMBER_ID_REQUIRED and client is not None:
            client.member_id = response.member_id
        if response.error_code:
            return
        generation = response.generation_id
        assert generation >= self.highest, f"LEADER: generation {generation} after {self.highest}"
        self.highest = generation
        protocol = response.protocol_name
        reported = self.leaders.setdefault(generation, (response.leader, protocol))
        if event.message.group_instance_id is not None:
            before = self.replaced.get(event.message.group_instance_id)
            self.replaced[event.message.group_instance_id] = response.member_id
            if reported[0] == before:
                # a leader that returned with a new id
                self.leaders[generation] = reported = (response.member_id, protocol)
        assert protocol == reported[1], f"LEADER: {protocol} beside {reported[1]} in generation {generation}"
        assert response.leader == reported[0] or event.message.group_instance_id is not None, (
            f"LEADER: {response.leader} beside {reported[0]} in generation {generation}"
        )
        assert {one.member_id for one in response.members} >= ({response.member_id} if response.members else set()), (
            "LEADER: a leader that is no member"
        )
        if client is not None:
            client.member_id, client.generation, client.assigned = response.member_id, generation, False
            client.is_leader = response.leader == response.member_id and not response.skip_assignment
            client.reported = [one.member_id for one in response.members]

    def _on_sync(self, client: Client | None, event: SyncGroup, response: SyncGroupResponse) -> None:
        if response.error_code:
            if client is not None and client.waits_for == event.request:
                client.assigned, client.generation = False, -1
            return
        message = event.message
        from_log = {
            one.assignment
            for _, value in self.log
            if value
            for one in _members_of(value, message.generation_id)
            if one.member_id == message.member_id
        }
        assert response.assignment in from_log, (
            f"LOGGED: {message.member_id} was told {response.assignment!r}, generation {message.generation_id}; the log"
            f" has {from_log}"
        )
        if response.assignment:
            meant_for = self.meant[response.assignment]
            assert meant_for == message.generation_id, (
                f"OWN: {message.member_id} got {response.assignment!r} of generation {meant_for} in"
                f" {message.generation_id}"
            )
            owner = response.assignment.split(b"|")[1].decode()
            instance = message.member_id.partition("-")[0]
            assert owner == message.member_id or (instance[0] == "i" and owner.partition("-")[0] == instance), (
                f"OWN: {message.member_id} got what was for {owner}"
            )
        if message.group_instance_id is not None:
            reported = self.static_assignments.setdefault(
                (message.generation_id, message.group_instance_id), response.assignment
            )
            assert reported == response.assignment, (
                f"OWN: {message.group_instance_id} was told {reported!r}, now {response.assignment!r}, in the same"
                " generation"
            )
        if client is not None:
            client.assigned = True

    def _check_heartbeat(self, event: Heartbeat, actions: list) -> None:
        message, replies = event.message, [action for action in actions if isinstance(action, Reply)]
        assert len(replies) == 1, "ONCE: a heartbeat is answered at once"
        if replies[0].response.error_code:
            return
        core = self.core
        assert message.generation_id == core.generation and core.state in (State.STABLE, State.COMPLETING_REBALANCE), (
            f"TRUE: generation {message.generation_id} in {core.state} {core.generation}"
        )
        assert message.member_id in core.members.by_id, "TRUE: no member"
        if message.group_instance_id is not None:
            in_force = self.replaced.get(message.group_instance_id, message.member_id)
            assert in_force == message.member_id or self.unwritten, (
                f"FENCED: {message.member_id} was replaced by {in_force}"
            )

    # -- clients -----------------------------------------------------------------------------------

    def _next(self) -> int:
        self.number += 1
        return self.number

    def join(self, client: Client) -> None:
        rng, number = self.rng, self._next()
        names = [name for name in PROTOCOLS if name == COMMON_PROTOCOL or (client.number + ord(name[0])) % 2]
        if rng.random() < 0.5:
            names.reverse()
        message = JoinGroupRequest(
            group_id="g",
            session_timeout_ms=client.session_timeout_ms,
            rebalance_timeout_ms=-1 if client.version == 0 else client.rebalance_timeout_ms,
            member_id=client.member_id,
            group_instance_id=client.instance_id,
            protocol_type="consumer",
            protocols=[JoinGroupRequest.Protocol(name=name, metadata=client.metadata) for name in names],
            reason="because",
        )
        new_id = f"{client.instance_id or 'c%d' % client.number}-{number}"
        self.send_request(client, JoinGroup(number, client.version, f"c{client.number}", "10.0.0.1", message, new_id))

    def sync(self, client: Client) -> None:
        number = self._next()
        assignments = []
        if client.is_leader:
            assignments = [
                SyncGroupRequest.Assignment(member_id=one, assignment=b"%d|%s" % (number, one.encode()))
                for one in client.reported
                if self.rng.random() < 0.97
            ]
        message = SyncGroupRequest(
            group_id="g",
            generation_id=client.generation,
            member_id=client.member_id,
            group_instance_id=client.instance_id,
            assignments=assignments,
        )
        self.send_request(client, SyncGroup(number, message))

    def beat(self, client: Client) -> None:
        self.send_request(
            client,
            Heartbeat(
                self._next(),
                HeartbeatRequest(
                    group_id="g",
                    generation_id=client.generation,
                    member_id=client.member_id,
                    group_instance_id=client.instance_id,
                ),
            ),
        )

    def leave(self, client: Client) -> None:
        member = LeaveGroupRequest.MemberIdentity(
            member_id=client.member_id, group_instance_id=client.instance_id, reason="enough"
        )
        self.send_request(client, LeaveGroup(self._next(), LeaveGroupRequest(group_id="g", members=[member])))

    def act(self, client: Client) -> None:
        """The next request of a good client."""
        if client.waits_for is not None or client.mood == "dead":
            return
        if client.generation < 0 or not client.member_id:
            self.join(client)
        elif client.assigned or client.mood in ("mute", "fading"):
            self.beat(client)
        else:
            self.sync(client)

    def lie(self) -> None:
        """An old request again, a request with wrong ids, a removal by an administrator."""
        rng = self.rng
        dice = rng.random()
        if dice < 0.5 and self.sent:
            old = rng.choice(self.sent)
            self.send_request(None, msgspec.structs.replace(old, request=self._next(), **self._fresh_id(old)))
        elif dice < 0.7:
            forged = HeartbeatRequest(
                group_id="g",
                generation_id=rng.randint(-1, self.core.generation + 1),
                member_id=rng.choice(["", "nobody", *self.core.members.by_id]),
            )
            self.send_request(None, Heartbeat(self._next(), forged))
        elif dice < 0.9:
            forged = SyncGroupRequest(
                group_id="g",
                generation_id=rng.randint(-1, self.core.generation + 1),
                member_id=rng.choice(["", "nobody", *self.core.members.by_id]),
                protocol_name=rng.choice([None, "range", "?"]),
            )
            self.send_request(None, SyncGroup(self._next(), forged))
        else:
            members = [
                LeaveGroupRequest.MemberIdentity(group_instance_id=rng.choice([None, "i0", "i3", "i9"]))
                for _ in range(2)
            ]
            self.send_request(None, LeaveGroup(self._next(), LeaveGroupRequest(group_id="g", members=members)))

    def _fresh_id(self, old: object) -> dict[str, str]:
        return (
            {"new_member_id": f"{old.message.group_instance_id or 'again'}-{self.number}"}
            if isinstance(old, JoinGroup)
            else {}
        )

    # -- a whole history ---------------------------------------------------------------------------

    def step(self) -> None:
        rng = self.rng
        dice = rng.random()
        client = rng.choice(self.clients)
        if dice < 0.55:
            self.act(client)
        elif dice < 0.70:
            self.advance(rng.choice((1, 50, 500, 3_000)))
        elif dice < 0.80:
            self.write()
        elif dice < 0.84:
            self.lie()
        elif dice < 0.87 and client.waits_for is not None:
            client.waits_for = None  # its connection is closed; it will retry
        elif dice < 0.89 and client.member_id and client.waits_for is None:
            self.leave(client)
        elif dice < 0.92:
            client.mood = rng.choice(("good", "good", "mute", "dead"))
        elif dice < 0.94:
            client.forget()  # the process died and was restarted
            client.waits_for = None
        elif dice < 0.96:
            client.metadata = b"m%d" % rng.randint(0, 99)
            if client.waits_for is None and client.member_id:
                client.generation = -1
        elif dice < 0.97:
            self.advance(rng.choice((10_000, 60_000)))
        elif dice < 0.975:
            self.restart()
        self.check_replay()

    def settle(self) -> None:
        """All clients are good, dead or about to be; lost responses are requested again. The group
        must be Stable with the live ones, well before SETTLE_MS, and stay unchanged.
        """
        for client in self.clients:
            client.mood = self.rng.choice(("good", "good", "dead", "fading"))
            client.waits_for = None
            # as a new process and member: an existing member need not sync, and would never be
            # removed
            if client.mood == "fading":
                client.forget()
                client.mood = "fading" if client.instance_id is None else "dead"
        self.clients[0].mood = "good"
        self._rejoin_loaded_members()
        self.settings = ClassicSettings(initial_rebalance_delay_ms=300, new_member_join_timeout_ms=90_000)
        self.core.settings = self.settings
        self._until_settled()
        self.rng.choice(self.clients[1:]).mood = "dead"  # in a stable group
        self._until_settled()
        generation = self.core.generation
        for _ in range(30):
            self._round()
        assert self.core.generation == generation and self.core.state == State.STABLE, (
            "SETTLES: a group with nothing amiss rebalances"
        )
        assert all(client.assigned for client in self.clients if client.mood == "good"), (
            "SETTLES: a member of a stable group has no assignment"
        )
        self.write()
        assert not self.requested, f"ONCE: {len(self.requested)} requests were never answered"

    def _rejoin_loaded_members(self) -> None:
        """A member loaded from the log supports the group's protocol and no other, as in Kafka: clients
        that lack it are refused until the members join again.
        """
        loaded = {one.member_id for one in self.core.members.by_id.values() if COMMON_PROTOCOL not in one.protocols}
        for client in self.clients:
            if client.member_id in loaded:
                client.generation, client.assigned = -1, False

    def _until_settled(self) -> None:
        end = self.now + SETTLE_MS
        while not self._is_settled():
            assert self.now < end, (
                f"SETTLES: {self.core.state}, {set(self.core.members.by_id)} where {self._living()} live"
            )
            self._round()

    def _living(self) -> set[str]:
        return {client.member_id for client in self.clients if client.mood == "good"}

    def _is_settled(self) -> bool:
        return (
            self.core.state == State.STABLE
            and set(self.core.members.by_id) == self._living()
            and all(client.assigned for client in self.clients if client.mood == "good")
            and not any(client.mood == "fading" for client in self.clients)
        )

    def _round(self) -> None:
        for client in self.clients:
            self.act(client)
        self.write()
        self.advance(2_000)

    def run(self, events: int) -> int:
        """Histories of chaos and calm until `events` were handled. Returns how many."""
        while self.event_count < events:
            for _ in range(400):
                self.step()
            self.settle()
            self.settings = ClassicSettings(
                initial_rebalance_delay_ms=self.rng.choice((0, 300, 3000)),
                max_size=self.rng.choice((2, 4, 1000, 1000, 1000)),
                new_member_join_timeout_ms=90_000,
            )
            self.restart()
        return self.event_count


def _members_of(value: bytes, generation: int) -> tuple:
    from mqd.coordinator.group.classic.records import decode_value

    record = decode_value(value)
    return record.members if record.generation == generation else ()
