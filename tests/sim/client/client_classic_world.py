"""The client's classic membership core against the broker's classic group core; like
client_group_world.py, with the guarantees of the classic protocol.

Checked at each step
    both cores' invariants (check())
    W1  no two members of the current generation work on one partition
and after faults have stopped
    W2  the group is Stable, and every partition of every subscribed topic has exactly one member
        that works on it
    W3  then only one heartbeat per interval is sent
"""

from __future__ import annotations

from mqd.client.group.classic import ClassicCore, ClassicSettings
from mqd.client.group.membership import State
from mqd.coordinator.actions import Persist, Reply, Timer, TimerFired
from mqd.coordinator.group.classic.core import ClassicGroup
from mqd.coordinator.group.classic.events import Heartbeat, JoinGroup, LeaveGroup, SyncGroup
from mqd.coordinator.group.classic.state import State as GroupState
from mqd.coordinator.group.consumer.cluster import FixedCluster
from mqd.coordinator.group.settings import ClassicSettings as GroupSettings
from mqd.protocol.messages import HeartbeatRequest, JoinGroupRequest, LeaveGroupRequest
from tests.sim.client.client_group_world import INTERVAL_MS, MAX_POLL_MS, SESSION_MS, TOPICS, Consumer, Violation, World

COOPERATIVE, EAGER = ("cooperative-sticky",), ("range", "roundrobin")


class ClassicConsumer(Consumer):
    """Responses may arrive much later."""

    def __init__(self, world: ClassicWorld, member_id: str, instance_id: str | None) -> None:
        super().__init__(world, member_id, instance_id)
        settings = ClassicSettings(
            "g", instance_id, SESSION_MS, INTERVAL_MS, MAX_POLL_MS, world.assignors, metadata_interval_ms=1_000
        )
        self.core = ClassicCore(settings)

    def identity(self) -> set[tuple[bytes, int]]:
        return {(one[0].encode(), one[1]) for one in self.core.owned}

    def step(self) -> None:
        now_ms = self.world.now_ms
        while self.requests and self.requests[0][0] <= now_ms:
            _, send = self.requests.popleft()
            self.world.send_request(self, send)
        super().step()

    def break_connection(self) -> None:
        numbers = (
            {send.number for _, send in self.requests}
            | {number for _, number, _ in self.answers}
            | self.world.forget(self)
        )
        for _, send in list(self.requests)[: self.rng.randrange(len(self.requests) + 1)]:
            self.world.send_request(None, send)
        self.requests.clear()
        self.answers.clear()
        for number in sorted(numbers):
            self.give_unanswered(number)


class ClassicWorld(World):
    consumer_type = ClassicConsumer
    more_settling = 3  # members that died while joining are removed one after the other, in one rebalance each
    # a coordinator that recovers without the last generation knows an instance by its previous
    # member id: FENCED_INSTANCE_ID, as in Kafka
    fatal_codes = frozenset({82})

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.assignors = self.rng.choice((COOPERATIVE, EAGER))
        self.cluster = FixedCluster({name: self.rng.randrange(1, 7) for name in TOPICS})
        self.settings = GroupSettings(
            initial_rebalance_delay_ms=self.rng.choice((0, 300)),
            pending_timeout_ms=1_500,
            new_member_join_timeout_ms=3_000,
        )
        self.group = ClassicGroup("g", self.settings)
        self.requested: dict[int, tuple[ClassicConsumer | None, int]] = {}

    def send_request(self, consumer: ClassicConsumer | None, send) -> None:
        self.number += 1
        message = send.message
        self.requested[self.number] = consumer, send.number
        match message:
            case JoinGroupRequest():
                event = JoinGroup(self.number, 9, "c", "/h", message, f"id-{self.number}")
            case HeartbeatRequest():
                event = Heartbeat(self.number, message)
            case LeaveGroupRequest():
                event = LeaveGroup(self.number, message)
            case _:
                event = SyncGroup(self.number, message)
        self._carry_out(self.group.handle(event, self.now_ms))

    def _carry_out(self, actions: list) -> object:
        for action in actions:
            match action:
                case Persist():
                    self.log.update(action.records)
                case Reply():
                    consumer, number = self.requested.pop(action.request)
                    self.received.add(action.response.error_code)
                    if consumer is not None:
                        consumer.answers.append((self.now_ms + self.delay_ms(), number, action.response))
                case Timer(name, at_ms):
                    self.timers.pop(name, None)
                    if at_ms is not None:
                        self.timers[name] = at_ms
        self.group.check()
        return None

    def _fire(self) -> None:
        for name, at_ms in sorted(self.timers.items()):
            if at_ms <= self.now_ms and self.timers.get(name) == at_ms:
                del self.timers[name]
                self._carry_out(self.group.handle(TimerFired(name), self.now_ms))

    def forget(self, consumer: ClassicConsumer) -> set[int]:
        """Its connection has ended: responses to its requests are lost."""
        found = {number for asker, number in self.requested.values() if asker is consumer}
        self.requested = {
            request: (None if asker is consumer else asker, number)
            for request, (asker, number) in self.requested.items()
        }
        return found

    def _restart(self) -> None:
        """The coordinator restarts with its written state."""
        for consumer in self.consumers:
            consumer.break_connection()
        self.requested.clear()
        self.timers.clear()
        self.group = ClassicGroup("g", self.settings)
        for value in self.log.values():
            self.group.replay(value)
        self._carry_out(self.group.on_loaded(self.now_ms))

    def _check(self) -> None:
        owners: dict[tuple[bytes, int], str] = {}
        for consumer in self.consumers:
            core = consumer.core
            if (
                core.state is not State.MEMBER
                or core.epoch != self.group.generation
                or core.member_id not in self.group.members.by_id
            ):
                continue
            for place in consumer.works_on:
                if owners.setdefault(place, core.member_id) != core.member_id:
                    raise Violation(f"W1: {owners[place]} and {core.member_id} work on {place}")

    def _check_settled(self) -> None:
        if not self.consumers:
            return
        if self.group.state is not GroupState.STABLE:
            raise Violation(
                f"W2: the group is {self.group.state}, its members {[one.core.state for one in self.consumers]}"
            )
        cores: list[ClassicCore] = [one.core for one in self.consumers]
        requested = {topic for core in cores for topic in core._subscribed_topics()}
        expected = sorted(
            (topic.encode(), index)
            for topic in requested
            if (known := self.cluster.topic(topic)) is not None
            for index in range(known.partition_count)
        )
        found = sorted(place for one in self.consumers for place in one.works_on)
        if found != expected:
            raise Violation(f"W2: worked on is {found}, not {expected}")


def run(seed: int, steps: int = 400) -> ClassicWorld:
    world = ClassicWorld(seed)
    for _ in range(steps):
        world.step()
    world.settle()
    return world
