"""Simulated share groups: clients of KIP-932 over a network that loses responses, members that die
or leave, topics that change, a share coordinator that is slow, fails, or never responds,
administrators, a group coordinator that is restarted from its persisted state. One seed, one
history.

Checked at each step
    the core's own invariants
    V1  partitions assigned to a client are initialized at the share coordinator
    V2  each request gets one response, after the Persist on which it depends
    V3  a share-partition's state is only lost by an administrator's request: its initialization
        never replaces a state that members may have used
    V4  an administrator changes nothing while the group has members
    V6  a restart restores members, epochs, target and states
and at the end of a history, when faults have stopped
    V5  every partition of every subscribed topic is initialized and assigned, every client knows
        its epoch, and counts are as even as `simple` makes them
"""

from __future__ import annotations

import random
from collections import Counter

from mqd.coordinator.actions import KeyValue, Persist, Reply, Timer, TimerFired
from mqd.coordinator.group.consumer.cluster import FixedCluster
from mqd.coordinator.group.group import DeleteGroup, Group
from mqd.coordinator.group.offsets import OffsetsSettings, PartitionsGone
from mqd.coordinator.group.settings import ClassicSettings, ShareSettings
from mqd.coordinator.group.share.events import (
    AlterOffsets,
    DeleteOffsets,
    DeleteStates,
    InitializeStates,
    ShareHeartbeat,
    StatesChanged,
)
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import ShareGroupHeartbeatRequest

TOPICS = ("alpha", "beta", "gamma")
SUBSCRIPTIONS = (("alpha",), ("alpha", "beta"), ("alpha", "beta"), ("beta", "gamma"))
SESSION_MS, INTERVAL_MS, RETRY_MS = 3_000, 300, 2_000
FENCED, UNKNOWN, NOT_FOUND = (
    int(ErrorCode.FENCED_MEMBER_EPOCH),
    int(ErrorCode.UNKNOWN_MEMBER_ID),
    int(ErrorCode.GROUP_ID_NOT_FOUND),
)
FULL = int(ErrorCode.GROUP_MAX_SIZE_REACHED)
NON_EMPTY, BUSY = int(ErrorCode.NON_EMPTY_GROUP), int(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
SharePartition = tuple[bytes, int]


class Violation(AssertionError):
    """An invariant of the history does not hold."""


def demand(holds: bool, text: str) -> None:
    if not holds:
        raise Violation(text)


def durable(group: Group) -> object:
    share = group.share
    if share is None:
        return None
    members = {
        name: (member.description, member.epoch, member.previous_epoch, member.assigned, share.target.get(name, {}))
        for name, member in share.members.items()
    }
    return share.epoch, share.assignment_epoch, members, share.states


class Client:
    def __init__(self, member_id: str, names: tuple[str, ...]) -> None:
        self.member_id, self.names = member_id, names
        self.epoch = 0
        self.assigned: set[SharePartition] = set()
        self.next_ms = 0
        self.reports_all = True

    def heartbeat(self) -> ShareGroupHeartbeatRequest:
        names = list(self.names) if self.epoch == 0 or self.reports_all else None
        return ShareGroupHeartbeatRequest(
            group_id="g", member_id=self.member_id, member_epoch=self.epoch, subscribed_topic_names=names
        )

    def on_answer(self, response, now_ms: int) -> None:
        if response.error_code in (FENCED, UNKNOWN, NOT_FOUND):
            self.epoch, self.assigned, self.reports_all, self.next_ms = 0, set(), True, now_ms
            return
        if response.error_code == FULL:
            self.next_ms = now_ms + INTERVAL_MS
            return
        demand(response.error_code == 0, f"unexpected error {response.error_code}: {response.error_message}")
        self.epoch, self.reports_all = response.member_epoch, False
        self.next_ms = now_ms + min(response.heartbeat_interval_ms, INTERVAL_MS)
        if response.assignment is not None:
            self.assigned = {
                (one.topic_id, index) for one in response.assignment.topic_partitions for index in one.partitions
            }


class History:
    loss = 0.05

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_ms = 1_000_000
        self.cluster = FixedCluster({name: self.rng.randrange(1, 6) for name in TOPICS[:2]})
        self.cluster.share_group_settings = ShareSettings(SESSION_MS, INTERVAL_MS, 6, RETRY_MS)
        self.core = self._new()
        self.log: list[KeyValue] = []
        self.timers: dict[str, int] = {}
        self.clients: list[Client] = []
        self.states: dict[SharePartition, tuple[int, int]] = {}  # (state epoch, start offset)
        self.used: set[SharePartition] = set()  # members may have written to them
        self.calls: list[tuple[int, InitializeStates | DeleteStates]] = []
        self.event_count = self.number = self.names = self.altered = 0
        self.errors: Counter[int] = Counter()
        self.waiting: dict[int, object] = {}  # administrators' requests

    def _new(self) -> Group:
        return Group("g", ClassicSettings(), OffsetsSettings(), self.cluster)

    # -- the shell ---------------------------------------------------------------------------------

    def handle(self, event: object) -> object | None:
        self.event_count += 1
        reply = None
        persists = True
        for action in self.core.handle(event, self.now_ms):
            match action:
                case Persist():
                    demand(persists, "V2: an answer before the Persist it rests on")
                    self.log += action.records
                case Reply():
                    persists = False
                    if action.request in self.waiting:
                        self._administered(action.request, action.response)
                    else:
                        demand(reply is None, "V2: two replies")
                        reply = action.response
                case InitializeStates() | DeleteStates():
                    persists = False
                    self.calls.append((self.now_ms + self.rng.randrange(400), action))
                    if isinstance(action, DeleteStates):  # in any case
                        self.used -= {
                            (topic_id, index) for topic_id, some in action.partitions.items() for index in some
                        }
                case Timer(name, at_ms):
                    self.timers.pop(name, None)
                    if at_ms is not None:
                        self.timers[name] = at_ms
        self.core.check()
        return reply

    def restart(self) -> None:
        """From the compacted log. Calls to the share coordinator are carried out, or not; their
        responses and those to administrators are lost.
        """
        for _, call in self.calls:
            if self.rng.random() < 0.5:
                self._carry_out(call)
        self.calls, self.waiting = [], {}
        latest: dict[bytes, bytes | None] = {}
        for key, value in self.log:
            latest.pop(key, None)
            latest[key] = value
        before = durable(self.core)
        self.core = self._new()
        for key, value in latest.items():
            if value is not None:
                self.core.replay(key, value)
        self.timers = {}
        for action in self.core.on_loaded(self.now_ms):
            demand(not isinstance(action, Persist), "a log without damage needs no repair")
            if isinstance(action, Timer):
                self.timers[action.name] = action.at_ms
        self.core.check()
        demand(durable(self.core) == before, f"V6: {durable(self.core)} was {before}")

    # -- the share coordinator ---------------------------------------------------------------------

    def _carry_out(self, call: InitializeStates | DeleteStates) -> dict[SharePartition, int]:
        errors = {}
        if isinstance(call, InitializeStates):
            for topic_id, starts in call.offsets.items():
                for index, start in starts.items():
                    one = topic_id, index
                    if self.rng.random() < self.loss:
                        errors[one] = 15
                    elif self.states.get(one, (-1, 0))[0] > call.state_epoch:
                        errors[one] = 124
                    elif start >= 0 or self.states.get(one, (-1, 0))[0] != call.state_epoch:
                        demand(one not in self.used or start >= 0, f"V3: the state of {one} is set back")
                        self.states[one] = call.state_epoch, start
                        self.used.discard(one)
            return errors
        for topic_id, indexes in call.partitions.items():
            for index in indexes:
                if self.rng.random() < self.loss:
                    errors[topic_id, index] = 15
                else:
                    self.states.pop((topic_id, index), None)
                    self.used.discard((topic_id, index))
        return errors

    def answer_calls(self) -> None:
        due = [(at_ms, call) for at_ms, call in self.calls if at_ms <= self.now_ms]
        self.calls = [one for one in self.calls if one not in due]
        for _, call in due:
            self.handle(StatesChanged(call.token, self._carry_out(call)))

    # -- administrators ----------------------------------------------------------------------------

    def administer(self) -> None:
        self.number += 1
        number = self.number
        share = self.core.share
        has_members = share is not None and bool(share.members)
        before = (share.states, share.epoch) if share is not None else None
        kind = self.rng.randrange(3)
        event: object
        if kind == 0:
            starts = {index: self.rng.randrange(100) for index in range(self.rng.randrange(1, 4))}
            event = AlterOffsets(number, {self.rng.choice(TOPICS): starts})
        elif kind == 1:
            event = DeleteOffsets(number, tuple(self.rng.sample(TOPICS, 2)))
        else:
            event = DeleteGroup(number)
        self.waiting[number] = event
        self.handle(event)
        if has_members:
            demand(number not in self.waiting, "V4: with members an administrator is refused at once")
            share = self.core.share
            demand(share is not None and (share.states, share.epoch) == before, "V4: it changes nothing")

    def _administered(self, number: int, response) -> None:
        event = self.waiting.pop(number)
        error = response if isinstance(response, int) else response.error_code
        demand(error in (0, NON_EMPTY, BUSY, NOT_FOUND, 15), f"an administrator gets {error}")
        self.errors[error] += 1
        if isinstance(event, AlterOffsets) and not error:
            for topic in response.responses:
                for partition in topic.partitions:
                    if not partition.error_code:
                        expected = event.offsets[topic.topic_name][partition.partition_index]
                        held = self.states[topic.topic_id, partition.partition_index]
                        demand(held[1] == expected, f"an offset is set to {expected}, and is {held[1]}")
                        self.altered += 1
        if isinstance(event, DeleteGroup) and not error:
            demand(self.core.share is None or self.core.kind != "share", "a deleted group is there")

    # -- clients -----------------------------------------------------------------------------------

    def send(self, client: Client) -> None:
        self.number += 1
        client.next_ms = self.now_ms + INTERVAL_MS
        response = self.handle(ShareHeartbeat(self.number, client.member_id, "/h", client.heartbeat()))
        demand(response is not None, "V2: a heartbeat is not answered")
        if self.rng.random() < self.loss:
            client.reports_all = True
            return
        self.errors[response.error_code] += 1
        client.on_answer(response, self.now_ms)
        for one in client.assigned:
            topic_is_there = self.cluster.topic_name(one[0]) is not None
            if client.epoch and topic_is_there and response.assignment is not None:
                demand(one in self.states, f"V1: {client.member_id} is told of {one}, which has no state")
                self.used.add(one)

    def leave(self, client: Client) -> None:
        self.clients.remove(client)
        self.number += 1
        message = ShareGroupHeartbeatRequest(group_id="g", member_id=client.member_id, member_epoch=-1)
        self.handle(ShareHeartbeat(self.number, client.member_id, "/h", message))

    def forge(self, client: Client) -> None:
        """A client with a wrong epoch."""
        share = self.core.share
        member = share.members.get(client.member_id) if share is not None else None
        if member is None:
            return
        epoch = self.rng.choice((member.epoch + 1, member.previous_epoch - 1, member.epoch + 7))
        if epoch < 1 or epoch == member.epoch:
            return
        self.number += 1
        message = ShareGroupHeartbeatRequest(group_id="g", member_id=client.member_id, member_epoch=epoch)
        response = self.handle(ShareHeartbeat(self.number, client.member_id, "/h", message))
        demand(response.error_code == FENCED, f"epoch {epoch} of {client.member_id} at {member.epoch} passes")

    def set_topic(self, name: str, count: int) -> None:
        old = self.cluster.topic(name)
        self.cluster.set(name, count)
        new = self.cluster.topic(name)
        if old is not None and (new is None or new.topic_id != old.topic_id):
            self.states = {one: state for one, state in self.states.items() if one[0] != old.topic_id}
            self.used = {one for one in self.used if one[0] != old.topic_id}
            self.handle(PartitionsGone({name: 0}))

    # -- time --------------------------------------------------------------------------------------

    def tick(self) -> None:
        self.now_ms += self.rng.randrange(1, 150)
        for name, at_ms in sorted(self.timers.items()):
            if at_ms <= self.now_ms:
                del self.timers[name]
                self.handle(TimerFired(name))
        self.answer_calls()
        for client in list(self.clients):
            if client.next_ms <= self.now_ms:
                self.send(client)

    def step(self) -> None:
        self.tick()
        rng, dice = self.rng, self.rng.random()
        if dice < 0.06 and len(self.clients) < 5:
            self.names += 1
            self.clients.append(Client(f"m{self.names}", rng.choice(SUBSCRIPTIONS)))
        elif dice < 0.10 and self.clients:
            client = rng.choice(self.clients)
            client.names, client.reports_all = rng.choice(SUBSCRIPTIONS), True
        elif dice < 0.13 and self.clients:
            self.leave(rng.choice(self.clients))
        elif dice < 0.15 and self.clients:
            self.clients.remove(rng.choice(self.clients))  # dies
        elif dice < 0.18 and self.clients:
            self.forge(rng.choice(self.clients))
        elif dice < 0.20:
            topic = self.cluster.topic(name := rng.choice(TOPICS))
            self.set_topic(name, rng.choice(((topic.partition_count if topic else 0) + 1, 0, 2)))
        elif dice < 0.22:
            self.restart()
        elif dice < 0.225:
            self.clients.clear()
        elif dice < 0.30:
            self.administer()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        self.settle()

    def settle(self) -> None:
        self.loss = 0.0
        for name in TOPICS:
            self.set_topic(name, self.rng.randrange(3, 7))
        if not self.clients:
            self.clients.append(Client("last", SUBSCRIPTIONS[1]))
        for _ in range(150):
            self.tick()
        share = self.core.share
        demand(share is not None and share.members.keys() == {one.member_id for one in self.clients}, "V5: members")
        expected = {
            (topic.topic_id, index)
            for client in self.clients
            for name in client.names
            if (topic := self.cluster.topic(name)) is not None
            for index in range(topic.partition_count)
        }
        demand(expected <= self.states.keys(), "V5: not everything is initialized")
        demand(expected == set().union(*(client.assigned for client in self.clients)), "V5: not everything is assigned")
        for client in self.clients:
            demand(client.epoch == share.epoch, "V5: a client does not know its epoch")
        if len({client.names for client in self.clients}) == 1:
            counts = [len(client.assigned) for client in self.clients]
            demand(max(counts) - min(counts) <= 1, f"V5: {counts}")
            demand(min(counts) >= 1, f"V5: {counts}")


def run(seed: int, steps: int = 200) -> History:
    history = History(seed)
    history.run(steps)
    return history
