"""Group coordinators of simulated hosts: the real shard and the real cores of groups on partitions
of __consumer_offsets, with a model of mqd/coordinator/runtime.py: load, write, unload.

A coordinator runs in its host's acceptor as long as its host leads the partition; the next leader's
loads the log. Clients are groups of one: they commit rising offsets, each over one connection at a
time, and fetch the committed offset. Groups with members are in group_members.py.

Checked
    C5  a coordinator reports at least the offset that it or any predecessor has acknowledged or
        reported for the group, and at most the highest attempted one
    L5  no coordinator responds without its host's lease
Rules that can be off: `R4c` (a coordinator is active before the records it has loaded are below the
high watermark), `held` (responses do not wait for the writes on which they depend), `L5`, `timers`
(those of cores are not armed).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from mqd.coordinator.actions import TimerFired
from mqd.coordinator.group.cores import GroupCoreFactory
from mqd.coordinator.group.group import Group
from mqd.coordinator.group.offsets import (
    CommitOffsets,
    CommittedOffset,
    FetchOffsets,
    OffsetsCommitted,
    OffsetsFetched,
    OffsetsSettings,
)
from mqd.coordinator.group.settings import ClassicSettings
from mqd.coordinator.shard import LoadedPartition, Shard, WriteUnit
from tests.sim.clients import Client
from tests.sim.kernel import MILLISECOND, Process, Violation

if TYPE_CHECKING:
    from tests.sim.cluster.cluster_host import ClusterHost
    from tests.sim.cluster.cluster_world import ClusterWorld
    from tests.sim.cluster.host_processes import Acceptor

Partition = tuple[bytes, int]
TOPIC = "__consumer_offsets"
LOOK, LOOK_IDLE, RETRY = 20 * MILLISECOND, 1_000 * MILLISECOND, 200 * MILLISECOND
WRITE_TIMEOUT = 1_000 * MILLISECOND
NOT_COORDINATOR, NOT_AVAILABLE = 16, 15


class Source(NamedTuple):
    leader_epoch: int
    owner_generation: int
    end_offset: int
    high_watermark: int


class Place:
    def __init__(self) -> None:
        self.shard: Shard | None = None
        self.source: Source | None = None
        self.loaded: LoadedPartition | None = None
        self.not_before = 0
        self.alarm_ms: int | None = None
        self.write = 0  # number of the current write, of this shard or of a discarded one
        self.writer = -1  # the worker's generation that has received it
        # number -> the requester, in which leader epoch, with the lease
        self.requests: dict[int, tuple[Any, int, bool]] = {}


class Coordinator:
    """The coordinator in one acceptor."""

    def __init__(self, acceptor: Acceptor) -> None:
        self.host: ClusterHost = acceptor.host
        self.world: ClusterWorld = self.host.world
        self.kernel = self.world.kernel
        self.process: Process = acceptor.process
        self._acceptor = acceptor
        members = self.world.members
        self._cores = GroupCoreFactory(
            members.core_maker(self.host)
            if members is not None
            else lambda name: Group(name, ClassicSettings(), OffsetsSettings())
        )
        self._has_timers = members is not None and "timers" not in self.world.off
        # as mqd/acceptor/coordinators.py: the wall clock at the start of the process, advanced by
        self._base_ms = self.host.clock.wall_ms() - self.host.clock.now_ms()
        self._places: dict[Partition, Place] = {}
        self._number = 0
        self.kernel.after(LOOK, self.process, self._look_again)

    def _now_ms(self) -> int:
        return self._base_ms + self.host.clock.now() // 1_000_000

    def _may_lead(self) -> bool:
        return self.host.clock_ns() < self.host.lease_deadline_ns

    # -- which partitions --------------------------------------------------------------------------

    def _source(self, partition: Partition) -> Source | None:
        """As in the control segment and the metadata."""
        worker = self.host.worker_of(self.host.node, partition)
        place = worker.places.get(partition) if worker is not None and not worker.failed else None
        if (
            place is None
            or not place.core.leading
            or self._acceptor.leaders.get(partition, (-1, -1))[0] != self.host.node
            or not self._may_lead()
        ):
            return None
        return Source(place.core.leader_epoch, worker.generation, place.log.end, place.core.high_watermark)

    def look(self) -> None:
        for partition in self.world.coordinated():
            self._look_at(partition, self._places.setdefault(partition, Place()))

    def _look_again(self) -> None:
        self.look()
        waiting = any(
            place.shard is None and self._acceptor.leaders.get(partition, (-1, -1))[0] == self.host.node
            for partition, place in self._places.items()
        )
        self.kernel.after(LOOK if waiting else LOOK_IDLE, self.process, self._look_again)

    def _look_at(self, partition: Partition, place: Place) -> None:
        source = self._source(partition)
        if place.shard is not None:
            if source is None or source[:2] != place.source[:2]:
                self._unload(place)
            return
        if (
            source is not None
            and place.write
            and place.writer == source.owner_generation
            and "R6c" not in self.world.off
        ):
            return  # it may not be written yet
        if source is None or self.kernel.now < place.not_before:
            place.loaded = None
            return
        if place.loaded is None or source[:3] != place.source[:3]:
            place.source, place.loaded = source, self._load(partition, source.end_offset)
            if "R4c" not in self.world.off:
                return  # reading takes a while
        if source.high_watermark >= source.end_offset or "R4c" in self.world.off:
            self._activate(partition, place)

    def _load(self, partition: Partition, end: int) -> LoadedPartition:
        loaded = LoadedPartition(end)
        log = self.host.logs[partition]
        records: dict[bytes, bytes] = {}
        for key, value in (entry.value for entry in log.entries[:end]):
            records.pop(key, None)
            if value is not None:
                records[key] = value
        self._cores.replay_all(loaded.cores, records, self._unreadable)
        return loaded

    def _unreadable(self, key: bytes, error: Exception) -> None:
        raise error

    def _activate(self, partition: Partition, place: Place) -> None:
        epoch = place.source.leader_epoch
        self.kernel.report("coordinator", self.host.node, partition[1], epoch)
        place.shard = Shard(
            self._cores,
            place.loaded,
            epoch,
            lambda number, response: self._reply(place, number, response),
            self._no_effect,
            lambda: self.kernel.after(0, self.process, self._turn, partition, place),
            lambda at_ms: self._armed(place, at_ms),
        )
        place.loaded = None
        place.shard.on_loaded(self._now_ms())

    def _no_effect(self, name: str, effect: Any) -> None:
        raise AssertionError(f"{name} wants {effect}")

    def _unload(self, place: Place) -> None:
        shard, place.shard = place.shard, None
        place.alarm_ms = None
        place.not_before = self.kernel.now + RETRY
        shard.fail(NOT_COORDINATOR)
        requests, place.requests = place.requests, {}
        for caller, *_ in requests.values():
            self._answer(caller, NOT_COORDINATOR, None, -1)

    # -- timers ------------------------------------------------------------------------------------

    def _armed(self, place: Place, at_ms: int) -> None:
        if self._has_timers and (place.alarm_ms is None or at_ms < place.alarm_ms):
            place.alarm_ms = at_ms
            self.kernel.after(
                self.host.clock.true_delay(max(0, at_ms - self._now_ms()) * 1_000_000),
                self.process,
                self._on_alarm,
                place,
                place.shard,
                at_ms,
            )

    def _on_alarm(self, place: Place, shard: Shard | None, at_ms: int) -> None:
        """As in mqd/coordinator/runtime.py: without checking whether this host has its lease."""
        if place.alarm_ms != at_ms or place.shard is None or (shard is not None and place.shard is not shard):
            return
        place.alarm_ms, shard, now_ms = None, place.shard, self._now_ms()
        for timer in shard.timers.take_due(now_ms):
            name = shard.fire(timer)
            if name is not None and place.shard is shard:
                shard.handle_existing(name, TimerFired(timer[1]), now_ms)
        next_ms = shard.timers.next_ms()
        if place.shard is shard and next_ms is not None:
            self._armed(place, next_ms)

    # -- requests ----------------------------------------------------------------------------------

    def on_request(self, partition: Partition, group: str, make: Any, caller: Any, connection: Any) -> None:
        """connection: still open? A client that has given up has closed it."""
        place = self._places.get(partition)
        if (
            place is None
            or place.shard is None
            or not connection()
            or (not self._may_lead() and "L5" not in self.world.off)
        ):
            return self._answer(caller, NOT_COORDINATOR, None, -1)
        self._number += 1
        place.requests[self._number] = (caller, place.shard.leader_epoch, self._may_lead())
        place.shard.handle(group, make(self._number), self._now_ms())
        place.shard.check() if place.shard is not None else None
        if self._has_timers and place.shard is not None and (core := place.shard.core(group)) is not None:
            core.check()

    def _reply(self, place: Place, number: int, response: Any) -> None:
        entry = place.requests.pop(number, None)
        if entry is not None:
            # the time of the request: a response that waits until its content is replicated is
            # valid for that time, whichever host leads by now
            caller, epoch, could_lead = entry
            if isinstance(response, OffsetsFetched) and not could_lead:
                raise Violation(
                    "L5",
                    f"node {self.host.node} tells what a group has committed, as the coordinator of epoch {epoch},"
                    " without a lease",
                )
            self._answer(caller, 0, response, epoch)

    def _answer(self, caller: Any, *what: Any) -> None:
        node, process, do, token = caller
        self.host.network.send(self.host.node, node, process, do, token, *what)

    # -- writing -----------------------------------------------------------------------------------

    def _turn(self, partition: Partition, place: Place) -> None:
        shard = place.shard
        unit = shard.next_unit(is_lazy_due=True) if shard is not None else None
        if unit is None:
            return
        self._number += 1
        number, place.writer = self._number, place.source.owner_generation
        place.write = number
        worker = self.host.worker_of(self.host.node, partition)
        [batch] = unit.batches  # no producers' transactions here
        if "held" in self.world.off:
            shard.finish_write()
            place.write = 0
        if worker is not None and worker.generation == place.source.owner_generation:
            self.kernel.after(
                20,
                worker.process,
                worker.on_append,
                partition,
                shard.leader_epoch,
                tuple(batch.records),
                (self.host.node, self.process, self._written, (partition, place, shard, unit, number)),
            )
        self.kernel.after(WRITE_TIMEOUT, self.process, self._late, place, number)

    def _late(self, place: Place, number: int) -> None:
        """The worker has died, or does not respond: whether it was written is unknown."""
        if place.write == number and place.shard is not None:
            self._unload(place)

    def _written(self, key: tuple[Partition, Place, Shard, WriteUnit, int], error: int, offset: int) -> None:
        partition, place, shard, unit, number = key
        if place.write != number:
            return
        place.write = 0
        if place.shard is not shard:
            return
        if error or offset != shard.end_offset:  # another writer's records are there, or may be
            self._unload(place)
            return
        shard.finish_write()
        self._turn(partition, place)


class GroupClient(Client):
    """A group's only consumer: commits rising offsets, and fetches them."""

    def __init__(self, world: ClusterWorld, number: int, partition: Partition, pause: int) -> None:
        self.group = f"group-{number}"
        self.partition = partition
        self.tried = 0
        self.acked: list[tuple[int, int]] = []  # (leader epoch, offset), both rising
        self.asks = False
        self.floor = 0
        super().__init__(world, [partition], pause)

    def turn(self) -> None:
        world = self.world
        if self.stopping and not self.asks:
            self.asks = True  # the last request
        elif world.kernel.random.random() < 0.3:
            self.asks = True
        if not self.asks:
            self.tried += 1
        node = self.leader(self.partition)
        self.again(700 * MILLISECOND)
        token, tried, group = self.token, self.tried, self.group
        acceptor = world.hosts[node].acceptor if node >= 0 else None
        if acceptor is None or acceptor.coordinator is None:
            return

        def make(number: int) -> CommitOffsets | FetchOffsets:
            if self.asks:
                return FetchOffsets(number, (("t", (0,)),))
            return CommitOffsets(number, 8, "", None, -1, (CommittedOffset("t", 0, tried),))

        caller = (world.client_node, self.process, self.answered, token)
        link = world.network.links[world.client_node][node]
        double, link.double = link.double, 0.0  # one connection: a request arrives once, or never
        world.network.send(
            world.client_node,
            node,
            acceptor.process,
            acceptor.coordinator.on_request,
            self.partition,
            group,
            make,
            caller,
            lambda: self.token == token,
        )
        link.double = double

    def on_answer(self, error: int, response: Any, epoch: int) -> None:
        if error or response.error:
            self.again(50 * MILLISECOND)
            return
        if isinstance(response, OffsetsCommitted):
            if any(response.errors):
                raise Violation("C5", f"{self.group}: a commit was refused: {response}")
            self.acked.append((epoch, self.tried))
        else:
            offset = response.topics[0][1][0].offset
            self._check(offset, epoch)
            self.acked.append((epoch, offset))  # once reported it is kept
        self.asks = False
        self.done += 1
        self.again(self.pause)

    def _check(self, offset: int, epoch: int) -> None:
        """A coordinator of an old epoch may not know commits acknowledged in later ones."""
        floor = max([acked for since, acked in self.acked if since <= epoch], default=-1)
        if not floor <= offset <= self.tried:
            raise Violation(
                "C5",
                f"{self.group}: the coordinator of epoch {epoch} says {offset}; {floor} was acknowledged, {self.tried}"
                " is the last that was tried",
            )
