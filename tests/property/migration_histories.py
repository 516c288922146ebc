"""Simulated groups between the protocols: members of both kinds join and leave, with the whole core
of a group (mqd/coordinator/group/group.py).

Classic clients are cooperative: they report owned partitions, release those they are not assigned
and rejoin; while the group is a classic one its leader assigns, withholding partitions that another
member still owns. Some members are static: they are stopped without LeaveGroup, and restart
immediately with either protocol. Checked at each step: the core's invariants, every request gets
one response (even late ones), no two members, according to the coordinator, work on one partition,
and the group does not wait for the session of the classic member whose instance id a new member
carries. At the end the group is Stable, of either kind, and every partition is worked on.
"""

from __future__ import annotations

import random
import struct
from collections import Counter

from mqd.coordinator.actions import Persist, Reply, Timer, TimerFired
from mqd.coordinator.group.classic.events import Heartbeat, JoinGroup, LeaveGroup, SyncGroup
from mqd.coordinator.group.consumer.cluster import FixedCluster
from mqd.coordinator.group.consumer.events import ConsumerHeartbeat
from mqd.coordinator.group.consumer_protocol import decode_assignment, decode_subscription, encode_assignment
from mqd.coordinator.group.group import Group
from mqd.coordinator.group.offsets import OffsetsSettings
from mqd.coordinator.group.settings import ClassicSettings, ConsumerSettings
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import (
    ConsumerGroupHeartbeatRequest,
    HeartbeatRequest,
    JoinGroupRequest,
    LeaveGroupRequest,
    SyncGroupRequest,
)
from tests.property.consumer_histories import INTERVAL_MS, REBALANCE_MS, SESSION_MS, UNRELEASED, Client, demand

TOPICS = ("alpha", "beta")
INSTANCES = (None, None, None, "one", "two")
REBALANCE, UNKNOWN, ILLEGAL = (
    int(ErrorCode.REBALANCE_IN_PROGRESS),
    int(ErrorCode.UNKNOWN_MEMBER_ID),
    int(ErrorCode.ILLEGAL_GENERATION),
)
GROUP_ID_NOT_FOUND, MEMBER_ID_REQUIRED = int(ErrorCode.GROUP_ID_NOT_FOUND), int(ErrorCode.MEMBER_ID_REQUIRED)


def metadata(owned: dict[str, tuple[int, ...]]) -> bytes:
    def string(text: str) -> bytes:
        return struct.pack(">h", len(text)) + text.encode()

    topics = struct.pack(">hi", 1, len(TOPICS)) + b"".join(map(string, TOPICS)) + struct.pack(">i", -1)
    return (
        topics
        + struct.pack(">i", len(owned))
        + b"".join(
            string(name) + struct.pack(f">i{len(indexes)}i", len(indexes), *indexes) for name, indexes in owned.items()
        )
    )


class ClassicClient:
    """`phase`: join, joining (waits), sync, syncing (waits), stable."""

    def __init__(self, cluster: FixedCluster, instance_id: str | None = None) -> None:
        self.cluster, self.instance_id = cluster, instance_id
        self.member_id, self.generation, self.phase = "", -1, "join"
        self.owned: dict[str, tuple[int, ...]] = {}
        self.given: dict[str, bytes] = {}
        self.next_ms = 0
        self.request = -1

    @property
    def partitions(self) -> set[tuple[bytes, int]]:
        return {
            (topic.topic_id, index)
            for name, indexes in self.owned.items()
            if (topic := self.cluster.topic(name)) is not None
            for index in indexes
        }

    def forget(self, with_id: bool) -> None:
        self.owned, self.phase, self.generation = {}, "join", -1
        if with_id:
            self.member_id = ""

    def event(self, number: int, made_up: str) -> object:
        self.request = number
        if self.phase == "join":
            self.phase = "joining"
            protocols = [JoinGroupRequest.Protocol(name="cooperative", metadata=metadata(self.owned))]
            message = JoinGroupRequest(
                group_id="g",
                session_timeout_ms=SESSION_MS,
                rebalance_timeout_ms=REBALANCE_MS,
                member_id=self.member_id,
                group_instance_id=self.instance_id,
                protocol_type="consumer",
                protocols=protocols,
            )
            return JoinGroup(number, 7, "classic", "/h", message, made_up)
        if self.phase == "sync":
            self.phase = "syncing"
            given = [SyncGroupRequest.Assignment(member_id=name, assignment=data) for name, data in self.given.items()]
            message = SyncGroupRequest(
                group_id="g",
                generation_id=self.generation,
                member_id=self.member_id,
                group_instance_id=self.instance_id,
                protocol_type="consumer",
                protocol_name="cooperative",
                assignments=given,
            )
            return SyncGroup(number, message)
        return Heartbeat(
            number,
            HeartbeatRequest(
                group_id="g",
                generation_id=self.generation,
                member_id=self.member_id,
                group_instance_id=self.instance_id,
            ),
        )

    def on_answer(self, response, now_ms: int) -> None:
        kind, error = type(response).__name__, response.error_code
        self.request, self.next_ms = -1, now_ms
        if kind == "JoinGroupResponse":
            self.phase = "join"
            if error in (MEMBER_ID_REQUIRED,):
                self.member_id = response.member_id
            elif error == UNKNOWN:
                self.forget(with_id=True)
            elif error == REBALANCE:
                pass
            else:
                demand(error == 0, f"JoinGroup: {error}")
                self.member_id, self.generation, self.phase = response.member_id, response.generation_id, "sync"
                self.given = self.assign(response) if response.leader == self.member_id else {}
        elif kind == "SyncGroupResponse":
            self.on_synced(response)
        elif error in (REBALANCE,):
            self.phase = "join"
        elif error in (UNKNOWN, ILLEGAL):
            self.forget(with_id=error == UNKNOWN)
        else:
            demand(error == 0, f"Heartbeat: {error}")
            self.next_ms = now_ms + INTERVAL_MS

    def on_synced(self, response) -> None:
        self.phase = "join"
        if response.error_code in (UNKNOWN, ILLEGAL):
            self.forget(with_id=response.error_code == UNKNOWN)
        elif response.error_code == 0:
            assigned = decode_assignment(response.assignment)
            lost = any(set(indexes) - set(assigned.get(name, ())) for name, indexes in self.owned.items())
            self.owned = assigned
            self.phase = "join" if lost else "stable"
        else:
            demand(response.error_code == REBALANCE, f"SyncGroup: {response.error_code}")

    def assign(self, response) -> dict[str, bytes]:
        owners: dict[tuple[str, int], str] = {}
        names = sorted(one.member_id for one in response.members)
        for one in response.members:
            for name, indexes in decode_subscription(one.metadata).owned.items():
                owners.update({(name, index): one.member_id for index in indexes})
        given: dict[str, dict[str, list[int]]] = {name: {} for name in names}
        every = [
            (name, index)
            for name, topic in sorted(self.cluster.topics.items())
            for index in range(topic.partition_count)
        ]
        for number, (name, index) in enumerate(every):
            member_id = names[number % len(names)]
            if owners.get((name, index), member_id) == member_id:
                given[member_id].setdefault(name, []).append(index)
        return {
            member_id: encode_assignment(1, {name: tuple(indexes) for name, indexes in parts.items()})
            for member_id, parts in given.items()
        }


class MigrationHistory:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_ms = 1_000_000
        self.cluster = FixedCluster(
            {name: self.rng.randrange(1, 6) for name in TOPICS},
            ConsumerSettings(session_timeout_ms=SESSION_MS, heartbeat_interval_ms=INTERVAL_MS),
        )
        self.core = self._new()
        self.log: list[tuple[bytes, bytes | None]] = []
        self.timers: dict[str, int] = {}
        self.waiting: dict[int, Client | ClassicClient | None] = {}
        self.clients: list[Client | ClassicClient] = []
        self.number = self.names = self.event_count = 0
        self.kinds: list[str] = []
        self.counts: Counter[str] = Counter()

    def _new(self) -> Group:
        return Group(
            "g",
            ClassicSettings(initial_rebalance_delay_ms=0, min_session_timeout_ms=1),
            OffsetsSettings(),
            self.cluster,
        )

    def handle(self, event: object) -> None:
        self.event_count += 1
        actions = self.core.handle(event, self.now_ms)
        self.core.check()
        if not self.kinds or self.kinds[-1] != self.core.kind:
            self.kinds.append(self.core.kind)
        for action in actions:
            match action:
                case Persist():
                    self.log += action.records
                case Reply():
                    demand(action.request in self.waiting, f"request {action.request} is answered twice")
                    client = self.waiting.pop(action.request)
                    if client is not None and client in self.clients:
                        self._answer(client, action)
                case Timer(name, at_ms):
                    self.timers.pop(name, None)
                    if at_ms is not None:
                        self.timers[name] = at_ms
        self.check_clients()

    def _answer(self, client: Client | ClassicClient, reply: Reply) -> None:
        if isinstance(client, ClassicClient):
            if client.request == reply.request:
                client.on_answer(reply.response, self.now_ms)
        elif reply.response.error_code == GROUP_ID_NOT_FOUND:
            client.start_over(self.now_ms)
        else:
            consumer = self.core.consumer
            owner = (
                consumer.members.get(consumer.static_member_ids.get(client.instance_id, ""))
                if consumer is not None
                else None
            )
            demand(
                reply.response.error_code != UNRELEASED or (owner is not None and not owner.is_classic),
                f"{client.member_id} waits for the session of a classic member",
            )
            client.on_answer(reply.response, self.now_ms, self.rng)

    def check_clients(self) -> None:
        """Only clients that are members in their current epoch or generation."""
        worked: dict[tuple[bytes, int], str] = {}
        for client in self.clients:
            if not self._is_member(client):
                continue
            for partition in client.partitions if isinstance(client, ClassicClient) else client.owned:
                demand(
                    partition not in worked,
                    f"{client.member_id} and {worked.get(partition)} work on {partition[0].hex()}-{partition[1]}",
                )
                worked[partition] = client.member_id

    def _is_member(self, client: Client | ClassicClient) -> bool:
        consumer = self.core.consumer
        if consumer is not None:
            member = consumer.members.get(client.member_id)
            return member is not None and (
                client.generation >= 0 if isinstance(client, ClassicClient) else client.epoch > 0
            )
        return (
            isinstance(client, ClassicClient)
            and client.generation == self.core.classic.generation
            and client.member_id in self.core.classic.members.by_id
        )

    def send(self, client: Client | ClassicClient) -> None:
        if client in self.waiting.values():
            return
        self.number += 1
        self.waiting[self.number] = client
        client.next_ms = self.now_ms + INTERVAL_MS
        if isinstance(client, ClassicClient):
            self.handle(client.event(self.number, f"c{self.number}"))
        else:
            self.handle(ConsumerHeartbeat(self.number, "consumer", "/h", client.heartbeat(self.now_ms)))

    def add(self) -> None:
        taken = {client.instance_id for client in self.clients}
        instance_id = self.rng.choice(INSTANCES)
        self.begin(instance_id if instance_id not in taken else None)

    def begin(self, instance_id: str | None) -> None:
        self.names += 1
        if self.rng.random() < 0.5:
            self.clients.append(ClassicClient(self.cluster, instance_id))
        else:
            self.clients.append(Client(f"m{self.names}", instance_id, (TOPICS, None), self.rng))

    def replace(self, client: Client | ClassicClient) -> None:
        """A static member is stopped, and restarted immediately with either protocol. A response to
        its last request may still arrive; no member receives it.
        """
        if client.instance_id is not None:
            self.clients.remove(client)
            self.counts["replaced"] += 1
            self.begin(client.instance_id)

    def leave(self, client: Client | ClassicClient) -> None:
        if client in self.waiting.values():
            return
        self.clients.remove(client)
        if self.rng.random() < 0.3 or not client.member_id:
            return  # it dies
        self.number += 1
        self.waiting[self.number] = None
        if isinstance(client, ClassicClient):
            self.handle(
                LeaveGroup(
                    self.number,
                    LeaveGroupRequest(
                        group_id="g", members=[LeaveGroupRequest.MemberIdentity(member_id=client.member_id)]
                    ),
                )
            )
        else:
            self.handle(
                ConsumerHeartbeat(
                    self.number,
                    "consumer",
                    "/h",
                    ConsumerGroupHeartbeatRequest(group_id="g", member_id=client.member_id, member_epoch=-1),
                )
            )

    def restart(self) -> None:
        for client in self.waiting.values():
            if isinstance(client, ClassicClient):
                client.phase = {"joining": "join", "syncing": "join"}.get(client.phase, client.phase)
                client.request = -1
            elif client is not None:
                client.report_all = True
        self.waiting = {}
        latest: dict[bytes, bytes | None] = {}
        for key, value in self.log:
            latest.pop(key, None)
            latest[key] = value
        self.log = list(latest.items())
        self.core, self.timers = self._new(), {}
        for key, value in latest.items():
            if value is not None:
                self.core.replay(key, value)
        for action in self.core.on_loaded(self.now_ms):
            demand(not isinstance(action, Persist), "a log without damage needs no repair")
            if isinstance(action, Timer):
                self.timers[action.name] = action.at_ms

    def tick(self, by_ms: int) -> None:
        self.now_ms += by_ms
        for name, at_ms in sorted(self.timers.items()):
            if at_ms <= self.now_ms and self.timers.get(name) == at_ms:
                del self.timers[name]
                self.handle(TimerFired(name))
        for client in list(self.clients):
            if isinstance(client, Client):
                client.maybe_release(self.now_ms)
            if client.next_ms <= self.now_ms:
                self.send(client)

    def run(self, steps: int) -> MigrationHistory:
        for _ in range(steps):
            dice = self.rng.random()
            if len(self.clients) < 5 and dice < 0.06:
                self.add()
            elif self.clients and dice < 0.10:
                self.leave(self.rng.choice(self.clients))
            elif self.clients and dice < 0.11:
                self.replace(self.rng.choice(self.clients))
            elif dice < 0.115:
                name = self.rng.choice(TOPICS)
                self.cluster.set(name, self.cluster.topics[name].partition_count + 1)
            elif dice < 0.12:
                self.restart()
            self.tick(self.rng.randrange(1, 120))
        self.settle()
        return self

    def settle(self) -> None:
        if not self.clients:
            self.add()
        for _ in range(300):
            self.tick(50)
        if self.core.kind == "classic":  # its leader checks the topics when a member joins
            self.clients.append(ClassicClient(self.cluster))
            for _ in range(300):
                self.tick(50)
        demand(
            self.core.state_name == "Stable",
            f"{self.core.kind} group is {self.core.state_name} after everybody has had its say",
        )
        worked = [
            one
            for client in self.clients
            for one in (client.partitions if isinstance(client, ClassicClient) else client.owned)
        ]
        expected = {
            (topic.topic_id, index) for topic in self.cluster.topics.values() for index in range(topic.partition_count)
        }
        demand(
            len(worked) == len(set(worked)) and set(worked) == expected,
            f"{len(worked)} partitions are worked on, {len(expected)} are there",
        )
