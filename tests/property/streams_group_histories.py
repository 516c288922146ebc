"""Simulated streams groups: clients of KIP-1071 over a network that loses responses, several of
them in a process, which take time to release tasks, die, leave or stop responding; topics that are
created, extended and deleted; internal topics whose creation fails; settings that change; a
coordinator that is restarted from its persisted state. One seed, one history.

Checked at each step
    the core's own invariants
    V1  a task is active at one live client; of a process's clients only one has it, in any role
    V2  each request gets one response, after the Persist on which it depends; a refused one changes
        nothing
    V3  the epoch in responses to a client never decreases while it is a member
    V4  a restart restores members, epochs, target, tasks and topology
    V5  a client that owns a task may commit for it with the epoch it knows; one whose task was
        reassigned may not
and at the end of a history, when faults have stopped
    V6  each task is active at one client and owned there, has its standbys, counts of active tasks are
        even, and every client knows its epoch
"""

from __future__ import annotations

import random
from collections import Counter

from mqd.coordinator.actions import KeyValue, Persist, Reply, Timer, TimerFired
from mqd.coordinator.group.consumer.cluster import FixedCluster
from mqd.coordinator.group.group import DeleteGroup, Group
from mqd.coordinator.group.offsets import CommitOffsets, CommittedOffset, OffsetsSettings
from mqd.coordinator.group.settings import ClassicSettings, StreamsSettings
from mqd.coordinator.group.streams.assignor import MemberSpec, TopologyShape, check_assignment
from mqd.coordinator.group.streams.events import StreamsDescribe, StreamsHeartbeat
from mqd.coordinator.group.streams.tasks import Task, TaskSet, iter_tasks, task_set
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import StreamsGroupHeartbeatRequest

SESSION_MS, INTERVAL_MS, REBALANCE_MS, DELAY_MS = 3_000, 300, 1_500, 400
FENCED, UNKNOWN, NOT_FOUND = (
    int(ErrorCode.FENCED_MEMBER_EPOCH),
    int(ErrorCode.UNKNOWN_MEMBER_ID),
    int(ErrorCode.GROUP_ID_NOT_FOUND),
)
FULL, STALE = int(ErrorCode.GROUP_MAX_SIZE_REACHED), int(ErrorCode.STALE_MEMBER_EPOCH)
_Request = StreamsGroupHeartbeatRequest
# two subtopologies: orders are repartitioned, then joined with payments, with state
SOURCES = ("orders", "payments")
INPUTS = {"0": ("orders",), "1": ("by-number", "payments")}
INTERNAL = ("by-number", "joined-changelog")


class Violation(AssertionError):
    """An invariant of the history does not hold."""


def demand(holds: bool, text: str) -> None:
    if not holds:
        raise Violation(text)


def topology(epoch: int = 1) -> _Request.Topology:
    repartition = _Request.TopicInfo(name="by-number")
    changelog = _Request.TopicInfo(
        name="joined-changelog", topic_configs=[_Request.KeyValue(key="cleanup.policy", value="compact")]
    )
    return _Request.Topology(
        epoch=epoch,
        subtopologies=[
            _Request.Subtopology(subtopology_id="0", source_topics=["orders"], repartition_sink_topics=["by-number"]),
            _Request.Subtopology(
                subtopology_id="1",
                source_topics=["payments"],
                repartition_source_topics=[repartition],
                state_changelog_topics=[changelog],
                copartition_groups=[_Request.CopartitionGroup(source_topics=[0], repartition_source_topics=[0])],
            ),
        ],
    )


def durable(group: Group) -> object:
    streams = group.streams
    if streams is None:
        return None
    members = {
        name: (member.description, member.current, streams.target.get(name)) for name, member in streams.members.items()
    }
    return streams.epoch, streams.assignment_epoch, streams.validated_epoch, members, streams.topology


def listed(role: TaskSet) -> list[_Request.TaskIds]:
    return [_Request.TaskIds(subtopology_id=name, partitions=list(some)) for name, some in role.items()]


class Client:
    """`active`, `standby`: its running tasks. `told`: its last assignment; after a while it stops
    tasks that are not in it, and then starts the rest.
    """

    def __init__(self, member_id: str, process_id: str, topology_epoch: int) -> None:
        self.member_id, self.process_id, self.topology_epoch = member_id, process_id, topology_epoch
        self.epoch = self.next_ms = 0
        self.active: set[Task] = set()
        self.standby: set[Task] = set()
        self.told: tuple[set[Task], set[Task]] = (set(), set())
        self.since: dict[Task, int] = {}  # active task -> the epoch at which it was started
        self.stops_ms: int | None = None
        self.reports_all = True
        self.is_stuck = False  # never releases anything

    def reset(self) -> None:
        self.epoch, self.active, self.standby, self.told = 0, set(), set(), (set(), set())
        self.stops_ms, self.reports_all, self.since = None, True, {}

    def heartbeat(self, endpoint_epoch: int) -> _Request:
        message = _Request(group_id="g", member_id=self.member_id, member_epoch=self.epoch)
        message.endpoint_information_epoch = endpoint_epoch
        if self.epoch == 0:
            message.rebalance_timeout_ms = REBALANCE_MS
            message.topology = topology(self.topology_epoch)
            message.process_id = self.process_id
            message.active_tasks, message.standby_tasks, message.warmup_tasks = [], [], []
        elif self.reports_all:
            message.active_tasks = listed(task_set(sorted(self.active)))
            message.standby_tasks, message.warmup_tasks = listed(task_set(sorted(self.standby))), []
        return message

    def on_answer(self, response, now_ms: int, rng: random.Random) -> None:
        demand(
            response.member_epoch >= self.epoch,
            f"V3: {self.member_id} goes from {self.epoch} to {response.member_epoch}",
        )
        self.epoch, self.reports_all = response.member_epoch, False
        self.next_ms = now_ms + INTERVAL_MS
        if response.active_tasks is None:
            return
        self.told = tuple(
            {(one.subtopology_id, index) for one in role for index in one.partitions}
            for role in (response.active_tasks, response.standby_tasks)
        )
        self.stops_ms = now_ms + rng.randrange(0, 600)

    def turn(self, now_ms: int) -> None:
        """Stops removed tasks, starts new ones, and reports."""
        if self.stops_ms is None or now_ms < self.stops_ms or self.is_stuck or not self.epoch:
            return
        self.stops_ms = None
        self.active, self.standby = set(self.told[0]), set(self.told[1])
        self.since = {task: self.since.get(task, self.epoch) for task in self.active}
        self.reports_all, self.next_ms = True, now_ms


class History:
    loss = 0.05

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_ms = 1_000_000
        self.cluster = FixedCluster({"orders": self.rng.randrange(1, 5), "payments": 3})
        self.settings(self.rng.randrange(3), self.rng.choice((0, DELAY_MS)))
        self.core = self._new()
        self.log: list[KeyValue] = []
        self.timers: dict[str, int] = {}
        self.clients: list[Client] = []
        self.event_count = self.number = self.names = self.commits = self.zombies = 0
        self.errors: Counter[int] = Counter()
        self.statuses: Counter[int] = Counter()

    def settings(self, standbys: int, delay_ms: int) -> None:
        self.cluster.streams_group_settings = StreamsSettings(SESSION_MS, INTERVAL_MS, 7, standbys, delay_ms)

    def _new(self) -> Group:
        return Group("g", ClassicSettings(), OffsetsSettings(), self.cluster)

    # -- the shell ---------------------------------------------------------------------------------

    def handle(self, event: object) -> object | None:
        self.event_count += 1
        reply, persists, written = None, True, False
        before = durable(self.core)
        for action in self.core.handle(event, self.now_ms):
            match action:
                case Persist():
                    demand(persists, "V2: an answer before the Persist it rests on")
                    self.log += action.records
                    written = True
                case Reply():
                    demand(reply is None, "V2: two replies")
                    persists, reply = False, action.response
                case Timer(name, at_ms):
                    self.timers.pop(name, None)
                    if at_ms is not None:
                        self.timers[name] = at_ms
        self.core.check()
        if isinstance(event, StreamsHeartbeat) and reply.error_code:
            demand(not written and durable(self.core) == before, f"V2: error {reply.error_code} changes something")
        return reply

    def restart(self) -> None:
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
        demand(durable(self.core) == before, f"V4: {durable(self.core)} was {before}")

    # -- clients -----------------------------------------------------------------------------------

    def send(self, client: Client) -> None:
        self.number += 1
        client.next_ms = self.now_ms + INTERVAL_MS
        message = client.heartbeat(self.rng.randrange(3))
        outcome = self.handle(StreamsHeartbeat(self.number, client.member_id, "/h", message))
        demand(outcome is not None, "V2: a heartbeat is not answered")
        self.create(outcome.missing_topics)
        if self.rng.random() < self.loss:
            client.reports_all = True
            return
        response = outcome.response
        self.errors[response.error_code] += 1
        if response.error_code in (FENCED, UNKNOWN, NOT_FOUND):
            client.reset()
            client.next_ms = self.now_ms
        elif "Topology updates" in (response.error_message or ""):
            client.topology_epoch = self.core.streams.topology.epoch  # of the one that was first
        elif response.error_code != FULL:
            demand(response.error_code == 0, f"unexpected error {response.error_code}: {response.error_message}")
            self.statuses.update(one.status_code for one in response.status)
            client.on_answer(response, self.now_ms, self.rng)

    def create(self, missing) -> None:
        for topic in missing:
            if self.rng.random() >= 4 * self.loss:
                demand(topic.name in INTERNAL, f"{topic.name} is not an internal topic")
                self.cluster.set(topic.name, topic.partition_count)

    def leave(self, client: Client) -> None:
        self.clients.remove(client)
        self.number += 1
        message = _Request(group_id="g", member_id=client.member_id, member_epoch=-1)
        self.handle(StreamsHeartbeat(self.number, client.member_id, "/h", message))

    def forge(self, client: Client) -> None:
        """A wrong epoch."""
        member = self.core.streams.members.get(client.member_id) if self.core.streams is not None else None
        if member is None:
            return
        epoch = self.rng.choice((member.epoch + 1, member.current.previous_epoch - 1, member.epoch + 7))
        if epoch < 1 or epoch == member.epoch:
            return
        self.number += 1
        message = _Request(group_id="g", member_id=client.member_id, member_epoch=epoch)
        outcome = self.handle(StreamsHeartbeat(self.number, client.member_id, "/h", message))
        demand(outcome.error_code == FENCED, f"epoch {epoch} of {client.member_id} at {member.epoch} passes")

    def living(self) -> list[Client]:
        """Clients that the group knows. Another one's tasks may be elsewhere: its session has
        expired.
        """
        members = self.core.streams.members if self.core.streams is not None else {}
        return [client for client in self.clients if client.member_id in members and client.epoch]

    def look(self) -> None:
        owners: dict[Task, str] = {}
        in_process: dict[tuple[str, Task], str] = {}
        for client in self.living():
            for task in client.active:
                demand(task not in owners, f"V1: {task} is active at {owners.get(task)} and {client.member_id}")
                owners[task] = client.member_id
            for task in (*client.active, *client.standby):
                place = client.process_id, task
                demand(place not in in_process, f"V1: {place} at {in_process.get(place)} and {client.member_id}")
                in_process[place] = client.member_id

    def commit(self, client: Client) -> None:
        """For a task that it runs, with its current epoch, or one that it knew when the task began."""
        if client not in self.living() or not client.active:
            return
        task = self.rng.choice(sorted(client.active))
        epoch = self.rng.randrange(client.since[task], client.epoch + 1)
        demand(self._commit(client.member_id, epoch, task) == 0, f"V5: {client.member_id} cannot commit for {task}")
        self.commits += 1
        mates = [one for one in self.living() if one is not client and task not in one.active]
        if mates:
            mate = self.rng.choice(mates)
            if (member := self.core.streams.members[mate.member_id]).epoch > 1 and task not in {
                *iter_tasks(member.current.assigned.active),
                *iter_tasks(member.current.revoking.active),
            }:
                error = self._commit(mate.member_id, member.epoch - 1, task)
                demand(error == STALE, f"V5: {mate.member_id} commits for {task} of {client.member_id}")
                self.zombies += 1

    def _commit(self, member_id: str, epoch: int, task: Task) -> int:
        self.number += 1
        offsets = tuple(CommittedOffset(topic, task[1], 5) for topic in INPUTS[task[0]])
        return self.core.commit_error(CommitOffsets(self.number, 9, member_id, None, epoch, offsets))

    # -- time --------------------------------------------------------------------------------------

    def tick(self) -> None:
        self.now_ms += self.rng.randrange(1, 150)
        for name, at_ms in sorted(self.timers.items()):
            if at_ms <= self.now_ms:
                del self.timers[name]
                self.handle(TimerFired(name))
        for client in list(self.clients):
            client.turn(self.now_ms)
            self.look()
            if client.next_ms <= self.now_ms:
                self.send(client)
            self.look()

    def join(self) -> None:
        self.names += 1
        process = f"p{self.rng.randrange(3)}"
        self.clients.append(Client(f"m{self.names}", process, self.rng.choice((1, 1, 1, 0))))

    def step(self) -> None:
        self.tick()
        rng, dice = self.rng, self.rng.random()
        if dice < 0.08 and len(self.clients) < 6:
            self.join()
        elif dice < 0.11 and self.clients:
            self.leave(rng.choice(self.clients))
        elif dice < 0.13 and self.clients:
            self.clients.remove(rng.choice(self.clients))  # dies
        elif dice < 0.15 and self.clients:
            rng.choice(self.clients).is_stuck = True
        elif dice < 0.18 and self.clients:
            self.forge(rng.choice(self.clients))
        elif dice < 0.20:
            self.change_topic()
        elif dice < 0.23:
            self.restart()
        elif dice < 0.235:
            self.clients.clear()
        elif dice < 0.24:
            self.settings(rng.randrange(3), rng.choice((0, DELAY_MS)))
        elif dice < 0.25:
            self.number += 1
            demand(self.handle(StreamsDescribe(self.number)) is not None, "V2: a description is missing")
        elif dice < 0.255:
            self.number += 1
            self.handle(DeleteGroup(self.number))
        elif dice < 0.45 and self.clients:
            self.commit(rng.choice(self.clients))

    def change_topic(self) -> None:
        for name in SOURCES:
            if self.cluster.topic(name) is None:
                self.cluster.set(name, self.rng.randrange(1, 5))
                return
        for name in INTERNAL:
            self.cluster.set(name, 0)
        name = self.rng.choice((*SOURCES, *INTERNAL))
        topic = self.cluster.topic(name)
        self.cluster.set(name, self.rng.choice(((topic.partition_count if topic else 0) + 1, 0, 2)))

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        self.settle()

    def settle(self) -> None:
        self.loss = 0.0
        counts = {name: topic.partition_count for name, topic in self.cluster.topics.items()}
        fits = all(counts.get(name, counts.get("payments")) == counts.get("payments") for name in INTERNAL)
        if self.rng.random() < 0.5 or not (fits and counts.keys() >= set(SOURCES)):
            for name in INTERNAL:
                self.cluster.set(name, 0)
            for name in SOURCES:
                self.cluster.set(name, 0)
                self.cluster.set(name, 4 if name == "payments" else self.rng.randrange(1, 7))
        for client in self.clients:
            client.is_stuck = False
        if not self.clients:
            self.join()
        for _ in range(200):
            self.tick()
        streams = self.core.streams
        demand(streams is not None and streams.members.keys() == {one.member_id for one in self.clients}, "V6: members")
        demand(streams.configured.is_ready, f"V6: {streams.configured.status}")
        specs = {one.member_id: MemberSpec(one.process_id, streams.target[one.member_id]) for one in self.clients}
        counts = {number: self.cluster.topics[name].partition_count for number, name in enumerate(SOURCES)}
        shape = TopologyShape({str(number): count for number, count in counts.items()}, frozenset({"1"}))
        standbys = self.cluster.streams_group_settings.standby_replicas
        try:
            check_assignment(specs, shape, standbys, streams.target)
        except AssertionError as problem:
            raise Violation(f"V6: {problem}") from None
        for client in self.clients:
            demand(client.epoch == streams.epoch, f"V6: {client.member_id} is at {client.epoch}, not {streams.epoch}")
            target = streams.target[client.member_id]
            held = set(iter_tasks(target.active)), set(iter_tasks(target.standby))
            demand((client.active, client.standby) == held, f"V6: {client.member_id} does not run its target")
        demand(streams.state_name == "Stable", f"V6: {streams.state_name}")


def run(seed: int, steps: int = 200) -> History:
    history = History(seed)
    history.run(steps)
    return history
