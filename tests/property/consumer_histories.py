"""Simulated consumer groups: KIP-848 clients over a network that loses responses, members that
die, do not release partitions or return, topics that change, a coordinator that is restarted from
its persisted state. One seed, one history.

Checked at each step
    the core's own invariants (invariants.py)
    V1  partitions that a client works on, as a known member, are assigned to it by the coordinator:
        so no two clients work on one partition
    V2  a partition that is assigned and in the target, before and after, was not revoked in
        between: no member that keeps a partition is interrupted
    V3  each request gets one response
    V4  a commit is accepted exactly with the member's epoch
    V6  a client with a wrong epoch, or with the last one and partitions that it does not own, is
        fenced
    V7  a static member that returns keeps its partitions, if nothing else has changed
and at the end of a history, when faults have stopped and all clients have sent some heartbeats
    V5  the group is Stable, every partition of every subscribed topic has an owner that works on
        it, and counts are as even as the uniform assignor makes them
"""

from __future__ import annotations

import random
from collections import Counter

from mqd.coordinator.actions import Persist, Reply, Timer, TimerFired
from mqd.coordinator.group.consumer.cluster import FixedCluster
from mqd.coordinator.group.consumer.core import ConsumerGroup
from mqd.coordinator.group.consumer.events import ConsumerHeartbeat
from mqd.coordinator.group.consumer.members import LEFT_STATIC_EPOCH
from mqd.coordinator.group.offsets import CommitOffsets
from mqd.coordinator.group.settings import ConsumerSettings
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import ConsumerGroupHeartbeatRequest

TOPICS = ("alpha", "beta", "gamma", "alpha-2")
SUBSCRIPTIONS = (
    (("alpha",), None),
    (("alpha", "beta"), None),
    (("alpha", "beta", "gamma"), None),
    ((), "alpha.*"),
    (("gamma",), "beta|alpha"),
    ((), None),
)
SESSION_MS, REBALANCE_MS, INTERVAL_MS = 3_000, 1_500, 300
NONE, FENCED, UNKNOWN = 0, int(ErrorCode.FENCED_MEMBER_EPOCH), int(ErrorCode.UNKNOWN_MEMBER_ID)
UNRELEASED, FENCED_INSTANCE, STALE = (
    int(ErrorCode.UNRELEASED_INSTANCE_ID),
    int(ErrorCode.FENCED_INSTANCE_ID),
    int(ErrorCode.STALE_MEMBER_EPOCH),
)
_Partitions = ConsumerGroupHeartbeatRequest.TopicPartitions

OwnedPartitions = set[tuple[bytes, int]]


class Violation(AssertionError):
    """An invariant of the history does not hold."""


def demand(holds: bool, text: str) -> None:
    if not holds:
        raise Violation(text)


class Client:
    """A consumer. `owned`: the partitions it works on. `assigned`: its last assignment; it releases
    the others, which takes until `busy_until_ms`.
    """

    def __init__(
        self,
        member_id: str,
        instance_id: str | None,
        subscription: tuple[tuple[str, ...], str | None],
        rng: random.Random,
    ) -> None:
        self.member_id, self.instance_id = member_id, instance_id
        self.subscription = subscription
        self.epoch = 0
        self.owned: OwnedPartitions = set()
        self.assigned: OwnedPartitions | None = None
        self.next_ms = 0
        self.busy_until_ms = -1
        self.report_all = True
        self.sent: object = None  # the subscription that it last sent
        self.stuck = False  # never releases partitions
        self.silent_until_ms = -1
        self.assignor = rng.choice((None, None, None, "uniform", "range"))

    def heartbeat(self, now_ms: int) -> ConsumerGroupHeartbeatRequest:
        names, regex = self.subscription
        if self.epoch == 0 or self.report_all:
            owned = [] if self.epoch == 0 else self._listed()
            self.sent = self.subscription
            return ConsumerGroupHeartbeatRequest(
                group_id="g",
                member_id=self.member_id,
                member_epoch=self.epoch,
                instance_id=self.instance_id,
                rebalance_timeout_ms=REBALANCE_MS,
                subscribed_topic_names=list(names),
                subscribed_topic_regex=regex or "",
                server_assignor=self.assignor,
                topic_partitions=owned,
            )
        return ConsumerGroupHeartbeatRequest(
            group_id="g",
            member_id=self.member_id,
            member_epoch=self.epoch,
            instance_id=self.instance_id,
            topic_partitions=self._listed() if now_ms % 2 else None,
        )

    def _listed(self) -> list:
        by_topic: dict[bytes, list[int]] = {}
        for topic_id, index in sorted(self.owned):
            by_topic.setdefault(topic_id, []).append(index)
        return [_Partitions(topic_id=topic_id, partitions=indexes) for topic_id, indexes in by_topic.items()]

    def on_answer(self, response, now_ms: int, rng: random.Random) -> None:
        if response.error_code in (FENCED, UNKNOWN):
            self.start_over(now_ms)
            return
        if response.error_code == UNRELEASED:
            self.next_ms = now_ms + INTERVAL_MS
            return
        demand(response.error_code == NONE, f"unexpected error {response.error_code}: {response.error_message}")
        # it may have changed while the response was in flight
        self.epoch, self.report_all = response.member_epoch, self.sent != self.subscription
        self.next_ms = now_ms + min(response.heartbeat_interval_ms, INTERVAL_MS)
        if response.assignment is not None:
            self.assigned = {
                (one.topic_id, index) for one in response.assignment.topic_partitions for index in one.partitions
            }
            if self.owned - self.assigned:
                self.busy_until_ms = now_ms + rng.randrange(200)
            else:
                self.owned = set(self.assigned)

    def start_over(self, now_ms: int) -> None:
        self.epoch, self.owned, self.assigned, self.busy_until_ms, self.report_all = 0, set(), None, -1, True
        self.next_ms = now_ms

    def maybe_release(self, now_ms: int) -> None:
        if self.busy_until_ms >= 0 and now_ms >= self.busy_until_ms and not self.stuck and self.assigned is not None:
            self.busy_until_ms = -1
            self.owned = set(self.assigned)
            self.report_all, self.next_ms = True, now_ms


class History:
    def __init__(self, seed: int, member_count: int = 6) -> None:
        self.rng = random.Random(seed)
        self.now_ms = 1_000_000
        settings = ConsumerSettings(session_timeout_ms=SESSION_MS, heartbeat_interval_ms=INTERVAL_MS)
        self.cluster = FixedCluster({name: self.rng.randrange(1, 7) for name in TOPICS[:3]}, settings)
        self.core = ConsumerGroup("g", self.cluster)
        self.log: list[tuple[bytes, bytes | None]] = []
        self.unwritten: list[tuple[list[tuple[bytes, bytes | None]], list[Reply]]] = []
        self.timers: dict[str, int] = {}
        self.clients: list[Client] = []
        self.senders: dict[int, Client | None] = {}
        self.member_count = member_count
        self.event_count = self.number = self.names = 0
        self.errors: Counter[int] = Counter()

    # -- the shell ---------------------------------------------------------------------------------

    def handle(self, event: object) -> None:
        self.event_count += 1
        core = self.core
        before = {member_id: (member, member.assigned) for member_id, member in core.members.items()}
        targets, static = dict(core.target), dict(core.static_member_ids)
        epoch = core.assignment_epoch
        actions = core.handle(event, self.now_ms)
        core.check()
        self._check_no_interruption(before, targets, epoch)
        self._check_static(static, before, targets, epoch)
        records: list[tuple[bytes, bytes | None]] = []
        replies = []
        for action in actions:
            match action:
                case Persist():
                    demand(not replies, "V3: a reply before the Persist it rests on")
                    records += action.records
                case Reply():
                    replies.append(action)
                case Timer(name, at_ms):
                    self.timers.pop(name, None)
                    if at_ms is not None:
                        self.timers[name] = at_ms
        demand(len(replies) == (0 if isinstance(event, TimerFired) else 1), f"V3: {len(replies)} replies")
        self.unwritten.append((records, replies))

    def _check_no_interruption(self, before, targets, epoch: int) -> None:
        if self.core.epoch != self.core.assignment_epoch and self.core.assignment_epoch != epoch:
            return
        for member_id, (member, assigned) in before.items():
            if self.core.members.get(member_id) is member:
                target = self.core.target.get(member_id, {})
                for topic_id, indexes in assigned.items():
                    stays = set(indexes) & set(target.get(topic_id, ()))
                    demand(
                        stays <= set(member.assigned.get(topic_id, ())),
                        f"V2: {member_id} keeps {stays} of {topic_id.hex()}, and lost some on the way",
                    )

    def _check_static(self, static, before, targets, epoch: int) -> None:
        core = self.core
        for instance_id, member_id in core.static_member_ids.items():
            old = static.get(instance_id)
            if old is not None and old != member_id and old in before and core.epoch == epoch == core.assignment_epoch:
                demand(
                    core.target.get(member_id, {}) == targets.get(old, {}),
                    f"V7: {instance_id} comes back and has another target",
                )

    def write(self, all_of_it: bool = True) -> None:
        """Pending writes are completed; their responses are sent, or lost."""
        count = len(self.unwritten) if all_of_it else self.rng.randrange(len(self.unwritten) + 1)
        for records, replies in self.unwritten[:count]:
            self.log += records
            for reply in replies:
                client = self.senders.pop(reply.request)
                self._answer(client, reply.response)
        del self.unwritten[:count]

    def _answer(self, client: Client | None, response) -> None:
        if client is None or client not in self.clients:
            return
        if self.rng.random() < self.loss:
            client.report_all, client.next_ms = True, self.now_ms + self.rng.randrange(INTERVAL_MS)
            return
        self.errors[response.error_code] += 1
        client.on_answer(response, self.now_ms, self.rng)

    loss = 0.05

    def restart(self) -> None:
        """The coordinator dies, loses its unwritten changes, and is loaded from its compacted log."""
        for _, replies in self.unwritten:
            for reply in replies:
                client = self.senders.pop(reply.request)
                if client is not None:
                    client.report_all, client.next_ms = True, self.now_ms
        self.unwritten = []
        latest: dict[bytes, bytes | None] = {}
        for key, value in self.log:
            latest.pop(key, None)
            latest[key] = value
        self.log = list(latest.items())
        self.core = ConsumerGroup("g", self.cluster)
        for key, value in latest.items():
            if value is not None:
                self.core.replay(key, value)
        self.timers = {}
        for action in self.core.on_loaded(self.now_ms):
            demand(not isinstance(action, Persist), "a log without damage needs no repair")
            if isinstance(action, Timer):
                self.timers[action.name] = action.at_ms
        self.core.check()

    def fire(self) -> None:
        for name, at_ms in sorted(self.timers.items()):
            if at_ms <= self.now_ms:
                del self.timers[name]
                self.handle(TimerFired(name))

    # -- clients -----------------------------------------------------------------------------------

    def add_client(self) -> None:
        self.names += 1
        used = {client.instance_id for client in self.clients}
        instance_id = self.rng.choice(("one", "two", None, None))
        self.clients.append(
            Client(
                f"m{self.names}", None if instance_id in used else instance_id, self.rng.choice(SUBSCRIPTIONS), self.rng
            )
        )

    def send(self, client: Client, message: ConsumerGroupHeartbeatRequest | None = None) -> None:
        if client in self.senders.values():
            return  # one at a time
        self.number += 1
        self.senders[self.number] = client
        client.next_ms = self.now_ms + INTERVAL_MS
        self.handle(ConsumerHeartbeat(self.number, client.member_id, "/h", message or client.heartbeat(self.now_ms)))

    def leave(self, client: Client, epoch: int) -> None:
        self.clients.remove(client)
        self.number += 1
        self.senders[self.number] = None
        message = ConsumerGroupHeartbeatRequest(
            group_id="g", member_id=client.member_id, member_epoch=epoch, instance_id=client.instance_id
        )
        self.handle(ConsumerHeartbeat(self.number, client.member_id, "/h", message))

    def commit(self, client: Client) -> None:
        member = self.core.members.get(client.member_id)
        expected = UNKNOWN if member is None else NONE if member.epoch == client.epoch else STALE
        error = self.core.commit_error(CommitOffsets(0, 9, client.member_id, None, client.epoch, ()))
        demand(
            error == expected or client.epoch < 0,
            f"V4: commit of {client.member_id} at {client.epoch}: {error}, not {expected}",
        )

    def forge(self, client: Client) -> None:
        """A delayed copy of the client sends a request."""
        member = self.core.members.get(client.member_id)
        if member is None or member.epoch < 1:
            return
        strange = _Partitions(topic_id=bytes(16), partitions=[0])
        epoch, owned = self.rng.choice(
            (
                (member.epoch + 1, []),
                (member.epoch + 7, None),
                (member.previous_epoch - 1, []),
                (member.previous_epoch, [strange]),
                (member.previous_epoch, None),
            )
        )
        if epoch < 1 or epoch == member.epoch:
            return
        self.number += 1
        self.senders[self.number] = None
        message = ConsumerGroupHeartbeatRequest(
            group_id="g", member_id=client.member_id, member_epoch=epoch, topic_partitions=owned
        )
        before = member.current
        self.handle(ConsumerHeartbeat(self.number, client.member_id, "/h", message))
        response = self.unwritten[-1][1][0].response
        demand(
            response.error_code == FENCED and member.current == before,
            f"V6: epoch {epoch} of {client.member_id}, which is at {before.epoch}, is answered with"
            f" {response.error_code}",
        )

    # -- time --------------------------------------------------------------------------------------

    def step(self) -> None:
        rng = self.rng
        self.now_ms += rng.randrange(1, 60)
        self.fire()
        self.faults()
        for client in list(self.clients):
            client.maybe_release(self.now_ms)
            if client.next_ms <= self.now_ms and client.silent_until_ms <= self.now_ms:
                self.send(client)
        self.write(all_of_it=rng.random() < 0.7)
        self.check_clients()

    def faults(self) -> None:
        rng = self.rng
        dice = rng.random()
        if len(self.clients) < self.member_count and dice < 0.10:
            self.add_client()
        elif self.clients and dice < 0.12:
            client = rng.choice(self.clients)
            if client not in self.senders.values():
                self.leave(client, LEFT_STATIC_EPOCH if client.instance_id is not None and rng.random() < 0.7 else -1)
        elif self.clients and dice < 0.13:
            self.clients.remove(rng.choice(self.clients))  # it dies
        elif self.clients and dice < 0.14:
            rng.choice(self.clients).silent_until_ms = self.now_ms + rng.randrange(2 * SESSION_MS)
        elif self.clients and dice < 0.15:
            rng.choice(self.clients).stuck = True
        elif self.clients and dice < 0.17:
            client = rng.choice(self.clients)
            client.subscription, client.report_all, client.next_ms = rng.choice(SUBSCRIPTIONS), True, self.now_ms
        elif self.clients and dice < 0.20:
            self.commit(rng.choice(self.clients))
        elif self.clients and dice < 0.21:
            self.forge(rng.choice(self.clients))
        elif dice < 0.23:
            name = rng.choice(TOPICS)
            topic = self.cluster.topic(name)
            count = 0 if topic is None else topic.partition_count
            self.cluster.set(name, rng.choice((count + 1, count + 2, 0, 3)))
        elif dice < 0.235:
            self.restart()

    def check_clients(self) -> None:
        """V1. A silent member, or a removed one that does not know it yet, continues alone: its
        commits are refused.
        """
        for client in self.clients:
            member = self.core.members.get(client.member_id)
            if member is None or client.epoch == 0:
                continue
            for topic_id, index in client.owned:
                known = index in member.assigned.get(topic_id, ()) or index in member.revoking.get(topic_id, ())
                demand(
                    known,
                    f"V1: {client.member_id} works on {topic_id.hex()}-{index}, which the coordinator gave to"
                    f" {self.core.owners.get(topic_id, index)}",
                )

    # -- the end -----------------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        self.settle()

    def settle(self) -> None:
        self.loss = 0.0
        for client in self.clients:
            client.stuck, client.silent_until_ms = False, -1
        if not self.clients:
            self.add_client()
        self._settle()
        name = self.rng.choice(TOPICS)
        topic = self.cluster.topic(name)
        self.cluster.set(name, 2 if topic is None else topic.partition_count + 1)
        self._settle()

    def _settle(self) -> None:
        for _ in range(200):
            self.now_ms += 50
            self.fire()
            for client in list(self.clients):
                client.maybe_release(self.now_ms)
                if client.next_ms <= self.now_ms:
                    self.send(client)
            self.write()
            self.check_clients()
        core = self.core
        demand(core.state_name == "Stable", f"V5: {core.state_name} after everybody has had its say")
        demand(
            set(core.members) == {client.member_id for client in self.clients},
            "V5: members are not the clients that are there",
        )
        owned = [partition for client in self.clients for partition in client.owned]
        expected = {(topic_id, index) for topic_id, count in self._requested().items() for index in range(count)}
        demand(
            len(owned) == len(set(owned)) and set(owned) == expected,
            f"V5: {len(owned)} partitions are worked on, {len(expected)} are there",
        )
        for client in self.clients:
            demand(client.epoch == core.members[client.member_id].epoch, "V5: a client does not know its epoch")

    def _requested(self) -> dict[bytes, int]:
        import re

        found = {}
        for client in self.clients:
            names, regex = client.subscription
            for name, topic in self.cluster.topics.items():
                if name in names or (regex is not None and re.fullmatch(regex, name)):
                    found[topic.topic_id] = topic.partition_count
        return found


def run(seed: int, steps: int = 400) -> History:
    history = History(seed)
    history.run(steps)
    return history
