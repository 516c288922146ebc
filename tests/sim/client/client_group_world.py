"""The client's group membership core (KIP-848) against the broker's group core: requests and
responses travel over one connection in order, connections break before or after a request was
received, members die, applications do not poll, subscriptions and topics change, the coordinator is
reloaded. One seed, one history.

Checked at each step
    both cores' invariants (check())
    W1  a member works only on partitions that the coordinator has assigned to it: so no two members
        work on one partition
and after faults have stopped
    W2  the group is Stable, and every member works on exactly its target
    W3  then only one heartbeat per interval is sent
"""

from __future__ import annotations

import contextlib
import random
from collections import deque

import msgspec
import pytest

from mqd.client.group.consumer_protocol import ConsumerProtocolCore, Settings
from mqd.client.group.events import (
    Assign,
    Done,
    Leave,
    Left,
    Lost,
    Partition,
    Polled,
    Problem,
    Resolve,
    ResponseMissing,
    ResponseReceived,
    Revoke,
    Send,
    Subscribe,
    Tick,
    TopicsKnown,
)
from mqd.client.group.membership import State
from mqd.coordinator.actions import Persist, Reply, Timer, TimerFired
from mqd.coordinator.group.consumer.cluster import FixedCluster
from mqd.coordinator.group.consumer.core import ConsumerGroup
from mqd.coordinator.group.consumer.events import ConsumerHeartbeat
from mqd.coordinator.group.consumer.requests import problem_of
from mqd.coordinator.group.settings import ConsumerSettings

TOPICS = ("alpha", "beta", "gamma")
SUBSCRIPTIONS = (
    Subscribe(("alpha",)),
    Subscribe(("alpha", "beta")),
    Subscribe(TOPICS),
    Subscribe((), "alpha.*|beta"),
    Subscribe(("gamma", "no-such-topic")),
)
SESSION_MS, INTERVAL_MS, MAX_POLL_MS = 3_000, 300, 2_000


class Violation(AssertionError):
    """An invariant of the history does not hold."""


class Consumer:
    """A core and its environment: the connection, and an application that carries out actions after
    a while.
    """

    def __init__(self, world: World, member_id: str, instance_id: str | None) -> None:
        self.world, self.rng = world, world.rng
        self.core = ConsumerProtocolCore(Settings("g", member_id, instance_id, max_poll_interval_ms=MAX_POLL_MS))
        self.requests: deque[tuple[int, Send]] = deque()
        self.answers: deque[tuple[int, int, object]] = deque()
        self.names: list[tuple[int, TopicsKnown]] = []  # metadata arrives at any time
        self.callback: tuple[int, object] | None = None
        self.works_on: set[tuple[bytes, int]] = set()
        self.busy_until_ms = 0
        self.sent_count = 0
        self.is_closing = self.is_gone = False
        self.problems: list[int] = []

    def give(self, event: object) -> None:
        now_ms = self.world.now_ms
        for action in self.core.handle(event, now_ms):
            match action:
                case Send():
                    self.sent_count += 1
                    self.requests.append((now_ms + self.world.delay_ms(), action))
                case Revoke(partitions) | Lost(partitions) | Assign(partitions):
                    if self.callback is not None:
                        raise Violation("M2: two things for the application at once")
                    if isinstance(action, Assign):
                        self.works_on |= places(partitions)
                    self.callback = now_ms + self.rng.randrange(150), action
                case Resolve(topic_ids, topics):
                    cluster = self.world.cluster
                    known = {
                        topic_id: name for topic_id in topic_ids if (name := cluster.topic_name(topic_id)) is not None
                    }
                    counts = dict.fromkeys(topics or (), 0)
                    counts.update({name: topic.partition_count for name, topic in cluster.topics.items()})
                    self.names.append(
                        (
                            now_ms + self.world.delay_ms() + self.rng.choice((0, 0, 0, 600, 900)),
                            TopicsKnown(known, counts),
                        )
                    )
                case Problem(code, _, is_fatal):
                    self.problems.append(code)
                    if is_fatal and code in self.world.fatal_codes:
                        self.is_gone = True
                    elif is_fatal:
                        raise Violation(f"fatal: {action}")
                case Left():
                    self.is_gone = self.is_closing
        self.core.check()
        if not self.works_on <= self.identity():
            raise Violation("M1: the application works on what the core does not know of")

    def identity(self) -> set[tuple[bytes, int]]:
        return self.core.owned

    def give_unanswered(self, number: int) -> None:
        self.give(ResponseMissing(number))

    def step(self) -> None:
        now_ms = self.world.now_ms
        while self.requests and self.requests[0][0] <= now_ms:
            _, send = self.requests.popleft()
            self.answers.append((now_ms + self.world.delay_ms(), send.number, self.world.receive(self, send.message)))
        while self.answers and self.answers[0][0] <= now_ms:
            _, number, message = self.answers.popleft()
            self.give(ResponseReceived(number, message))
        for one in [one for one in self.names if one[0] <= now_ms]:
            self.names.remove(one)
            self.give(one[1])
        if now_ms >= self.busy_until_ms:
            self._poll()
        if self.core.next_ms is not None and self.core.next_ms <= now_ms:
            self.give(Tick())
            if self.core.next_ms is not None and self.core.next_ms < now_ms:
                raise Violation("M5: a Tick that leaves something overdue")

    def _poll(self) -> None:
        self.give(Polled())
        if self.callback is not None and self.callback[0] <= self.world.now_ms:
            _, action = self.callback
            self.callback = None
            if not isinstance(action, Assign):
                self.works_on -= places(action.partitions)
            self.give(Done())

    def break_connection(self) -> None:
        """Some of the requests in flight were received; none gets a response."""
        numbers = [send.number for _, send in self.requests] + [number for _, number, _ in self.answers]
        for _, send in list(self.requests)[: self.rng.randrange(len(self.requests) + 1)]:
            self.world.receive(self, send.message)
        self.requests.clear()
        self.answers.clear()
        for number in numbers:
            self.give(ResponseMissing(number))


def places(partitions: tuple[Partition, ...]) -> set[tuple[bytes, int]]:
    """With the topic id where there is one: a topic that was recreated is another one."""
    return {(one.topic_id or one.topic.encode(), one.index) for one in partitions}


def leaves_slowly(world: World, poll_ms: int) -> tuple[Consumer, int]:
    """A single consumer whose application carries out the last Revoke for three sessions. Returns it
    and for how long its commits were valid, in ms.
    """
    world.has_faults = False
    world._join()
    (consumer,) = world.consumers
    consumer.core.settings = msgspec.structs.replace(consumer.core.settings, max_poll_interval_ms=poll_ms)
    consumer.give(Subscribe(TOPICS))
    world._run_ms(3 * SESSION_MS)
    if not consumer.works_on:
        raise Violation("the member has no partitions")
    consumer.is_closing = True
    began_ms = valid_ms = world.now_ms
    consumer.give(Leave())
    assert consumer.callback is not None
    consumer.callback = began_ms + 3 * SESSION_MS, consumer.callback[1]
    while not consumer.is_gone and world.now_ms < began_ms + 5 * SESSION_MS:
        if consumer.core.generation >= 0 and world.group.members:
            valid_ms = world.now_ms
        # the application is busy: it does not poll meanwhile
        consumer.busy_until_ms = consumer.callback[0] if consumer.callback is not None else 0
        world.step()
    return consumer, valid_ms - began_ms


class World:
    consumer_type = Consumer
    more_settling = 0
    fatal_codes: frozenset[int] = frozenset()  # errors after which a member may give up

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_ms = 1_000_000
        self.cluster = FixedCluster(
            {name: self.rng.randrange(1, 7) for name in TOPICS},
            ConsumerSettings(session_timeout_ms=SESSION_MS, heartbeat_interval_ms=INTERVAL_MS),
        )
        self.group = ConsumerGroup("g", self.cluster)
        self.log: dict[bytes, bytes | None] = {}
        self.timers: dict[str, int] = {}
        self.consumers: list[Consumer] = []
        self.number = self.names = 0
        self.has_faults = True
        self.received: set[int] = set()

    def delay_ms(self) -> int:
        return self.rng.randrange(1, 40)

    # -- the coordinator ---------------------------------------------------------------------------

    def _carry_out(self, actions: list) -> object:
        response = None
        for action in actions:
            match action:
                case Persist():
                    self.log.update(action.records)
                case Reply():
                    response = action.response
                case Timer(name, at_ms):
                    self.timers.pop(name, None)
                    if at_ms is not None:
                        self.timers[name] = at_ms
        self.group.check()
        return response

    def receive(self, consumer: Consumer, message: object) -> object:
        self.number += 1
        problem = problem_of(message, 1, ("uniform", "range"))
        if problem is not None:
            raise Violation(f"a request that is refused: {problem[1]}")
        response = self._carry_out(
            self.group.handle(ConsumerHeartbeat(self.number, consumer.core.member_id, "/h", message), self.now_ms)
        )
        self.received.add(response.error_code)
        return response

    def _fire(self) -> None:
        for name, at_ms in sorted(self.timers.items()):
            if at_ms <= self.now_ms:
                del self.timers[name]
                self._carry_out(self.group.handle(TimerFired(name), self.now_ms))

    def _restart(self) -> None:
        self.group = ConsumerGroup("g", self.cluster)
        for key, value in self.log.items():
            if value is not None:
                self.group.replay(key, value)
        self.timers = {}
        self._carry_out(self.group.on_loaded(self.now_ms))
        for consumer in self.consumers:
            consumer.break_connection()

    # -- time --------------------------------------------------------------------------------------

    def step(self) -> None:
        self.now_ms += self.rng.randrange(1, 30)
        self._fire()
        if self.has_faults:
            self._fault()
        for consumer in list(self.consumers):
            consumer.step()
        self.consumers = [one for one in self.consumers if not one.is_gone]
        self._check()

    def _fault(self) -> None:
        rng, dice = self.rng, self.rng.random()
        if len(self.consumers) < 5 and dice < 0.05:
            self._join()
            return
        if dice < 0.055:
            self._restart()
        elif dice < 0.065:
            name = rng.choice(TOPICS)
            topic = self.cluster.topic(name)
            self.cluster.set(name, rng.choice((topic.partition_count + 2 if topic else 2, 0, 3)))
        if not self.consumers:
            return
        consumer = rng.choice(self.consumers)
        if dice > 0.99:
            self.consumers.remove(consumer)  # it dies
        elif dice > 0.98:
            consumer.busy_until_ms = self.now_ms + rng.randrange(2 * MAX_POLL_MS)
        elif dice > 0.96:
            consumer.break_connection()
        elif dice > 0.95 and not consumer.is_closing:
            consumer.give(rng.choice(SUBSCRIPTIONS))
        elif dice > 0.94 and not consumer.is_closing:
            consumer.is_closing = rng.random() < 0.7
            consumer.give(Leave())
            if not consumer.is_closing:
                consumer.give(rng.choice(SUBSCRIPTIONS))

    def _join(self) -> None:
        self.names += 1
        used = {one.core.settings.instance_id for one in self.consumers}
        instance_id = self.rng.choice(("one", "two", None, None, None))
        consumer = self.consumer_type(self, f"m{self.names}", None if instance_id in used else instance_id)
        self.consumers.append(consumer)
        consumer.give(self.rng.choice(SUBSCRIPTIONS))

    def _check(self) -> None:
        """W1. A silent member, or a removed one that does not know it yet, continues alone: its
        commits are refused.
        """
        owners: dict[tuple[bytes, int], str] = {}
        for consumer in self.consumers:
            member = self.group.members.get(consumer.core.member_id)
            if member is None or consumer.core.state is not State.MEMBER or member.epoch < consumer.core.epoch:
                continue
            for topic_id, index in consumer.works_on:
                if index not in member.assigned.get(topic_id, ()) and index not in member.revoking.get(topic_id, ()):
                    raise Violation(
                        f"W1: {member.member_id} works on {topic_id.hex()}-{index}, which is"
                        f" {self.group.owners.get(topic_id, index)}'s"
                    )
                if owners.setdefault((topic_id, index), member.member_id) != member.member_id:
                    raise Violation("W1: two work on one partition")

    # -- the end -----------------------------------------------------------------------------------

    def settle(self) -> None:
        self.has_faults = False
        for consumer in self.consumers:
            consumer.busy_until_ms = 0
            if not consumer.is_closing and consumer.core.subscription is None:
                consumer.give(Subscribe(TOPICS))
        self._run_ms(3 * SESSION_MS)
        for _ in range(self.more_settling):
            with contextlib.suppress(Violation):
                self._check_settled()
                break
            self._run_ms(SESSION_MS)
        self._check_settled()
        before = {one.core.member_id: one.sent_count for one in self.consumers}
        self._run_ms(10 * INTERVAL_MS)
        for consumer in self.consumers:
            sent = consumer.sent_count - before[consumer.core.member_id]
            if not 7 <= sent <= 11:
                raise Violation(f"W3: {sent} heartbeats within ten intervals")

    def _run_ms(self, time_ms: int) -> None:
        end_ms = self.now_ms + time_ms
        while self.now_ms < end_ms:
            self.step()

    def _check_settled(self) -> None:
        if self.consumers and self.group.state_name != "Stable":
            raise Violation(f"W2: the group is {self.group.state_name}")
        for consumer in self.consumers:
            target = {
                (topic_id, index)
                for topic_id, indexes in self.group.target.get(consumer.core.member_id, {}).items()
                for index in indexes
            }
            if consumer.works_on != target or consumer.core.state is not State.MEMBER:
                raise Violation(
                    f"W2: {consumer.core.member_id} ({consumer.core.state}) works on {consumer.works_on}, not on"
                    f" {target}"
                )


def run(seed: int, steps: int = 400) -> World:
    world = World(seed)
    for _ in range(steps):
        world.step()
    world.settle()
    return world


def acknowledges_before_it_lets_go(patch: pytest.MonkeyPatch) -> None:
    """A planted bug: the member reports partitions as released while the application still has
    them.
    """

    def handle(self, event, now_ms, _before=ConsumerProtocolCore.handle):
        actions = _before(self, event, now_ms)
        if self.action_under_way is not None and self.action_under_way[0] is Revoke:
            self.owned -= self.action_under_way[1]
            self._must_report_owned = True
        return actions

    patch.setattr(ConsumerProtocolCore, "handle", handle)
    patch.setattr(ConsumerProtocolCore, "check", lambda self: None)
