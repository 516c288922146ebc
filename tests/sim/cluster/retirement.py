"""A topic of a simulated cluster gets fewer partitions
(docs/decisions/cluster/2026-11-21-retired-partitions.md): the real cores of the metadata, the
worker's real catalog and partition reporter, and models of the owners' treatment of batches
(native/server/redirect.h), of producers of one key each, and of retention.

Retention is a point in time for each retired partition: all its records are then too old. Producers
send one batch at a time; half of them, like librdkafka, never accept a smaller number of
partitions, and end when faults do. When the first record of a producer arrives at the partition
that takes those of p, its sequence numbers restart (the broker keeps the client's numbers, and p's
verdict).

Checked at each step
    V1  steps follow one another, all retired partitions take them together, each in a new leader
        epoch; a partition is sealed while it is led where its successor is
    V2  nothing is committed in a retired partition that was appended in the leader epoch in which
        it was sealed, or later
    V3  the records of a key are committed in the order in which they were sent, in any partition,
        each once
    V4  no partition is hidden or deleted while it has records within retention; none is deleted
        without a grace period without writes (its leader's report is trusted for UNUSED_MS: writes
        within this time are redirected, and change nothing; seed 701426)
    V5  deleted partitions stay deleted
and after everything has been repaired
    LIVE  no partition is still being retired, no producer waits; no host has files of deleted
          partitions; acknowledged records were committed (V3)
Rules that can be off: `seal` (its owner does not check whether it is sealed), `emptied` (a
partition is reported as empty that is not), `used` (writes to a hidden partition are not reported).
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from mqd.cluster.host import messages
from mqd.cluster.metadata.maintenance import UNUSED_MS
from mqd.cluster.metadata.records import RETIRE_HIDDEN, RETIRE_SEALED, RETIRE_UNSEALED, TopicState
from mqd.worker.partition_reporter import TICK_S, PartitionReporter
from tests.sim.clients import TIMEOUT, Client, Consumer
from tests.sim.kernel import MILLISECOND, SECOND, Violation
from tests.sim.replica.model_worker import Caller, Place
from tests.sim.replica.partition_replica import NOT_LEADER, OUT_OF_ORDER, STORAGE_ERROR

if TYPE_CHECKING:
    from tests.sim.cluster.cluster_world import ClusterWorld
    from tests.sim.cluster.host_processes import ClusterWorker

Partition = tuple[bytes, int]
TOPIC = "keyed"
SHIFT = 40
NOT_ENOUGH_REPLICAS = 19
BARRIER_MS, GRACE_MS = 1_500, 3_000
PAUSE_MIN = int(GRACE_MS * MILLISECOND * 0.85)  # clocks drift
BELIEVED = (UNUSED_MS + 1_000) * MILLISECOND  # and the record that deletes the partition is committed
HIDDEN_MAX, SETTLE_MAX = 15 * SECOND, 60 * SECOND


class _Reporter(PartitionReporter):
    def _report_recovered(self, *_: Any) -> None:
        """No unclean elections here."""


class KeyedProducer(Client):
    def __init__(self, retirement: Retirement, number: int) -> None:
        self.retirement, self.key = retirement, number
        self.shrinks = bool(number % 2)
        self.count = retirement.shown()
        self.next: dict[int, int] = {}
        self.sent: tuple[int, tuple[int, ...]] | None = None
        self.id = retirement.world.producer_ids
        retirement.world.producer_ids += 1
        self._look_at = 0
        super().__init__(retirement.world, [], 150 * MILLISECOND)

    def turn(self) -> None:
        random, retirement = self.retirement.random, self.retirement
        if self.kernel.now >= self._look_at:
            self._look_at = self.kernel.now + random.randrange(500, 1_500) * MILLISECOND
            self.count = retirement.shown() if self.shrinks else max(self.count, retirement.shown())
        if self.sent is not None and self.sent[0] >= retirement.count():
            self.sent = None  # the partition is deleted: its batches are reported as timed out
        if self.sent is None:
            if self.stopping:
                return
            self.sent = (
                self.key % min(self.count, retirement.count()),
                retirement.new_values(self.key, random.randrange(1, 4)),
            )
        index, values = self.sent
        partition = (retirement.topic_id, index)
        self.again(TIMEOUT)
        node = self.leader(partition)
        worker = self.world.worker_of(node, partition) if node >= 0 else None
        if worker is not None:
            caller = (self.world.client_node, self.process, self.answered, self.token)
            self.world.network.send(
                self.world.client_node,
                node,
                worker.process,
                retirement.on_produce,
                worker,
                partition,
                self.id,
                self.next.get(index, 0),
                values,
                caller,
            )

    def on_answer(self, error: int, offset: int) -> None:
        if error == OUT_OF_ORDER:
            raise Violation(
                "V3",
                f"producer {self.id} of key {self.key} is out of order at sequence {self.next.get(self.sent[0], 0)} of"
                f" partition {self.sent[0]}",
            )
        if not error:
            index, values = self.sent
            self.retirement.acked.update(dict.fromkeys(values))
            self.next[index] = self.next.get(index, 0) + len(values)
            self.sent = None
            self.done += len(values)
        self.again(self.pause if not error else 40 * MILLISECOND)


class Retirement:
    def __init__(self, world: ClusterWorld) -> None:
        self.world, self.kernel = world, world.kernel
        self.random = Random(f"retirement {world.seed}")
        self.topic_id = b""
        self.producers: list[KeyedProducer] = []
        self.acked: dict[int, None] = {}
        self.counts = {"redirected": 0, "sealed": 0, "hidden": 0, "gone": 0}
        self._keys: dict[int, int] = {}  # value -> key
        self._seen: dict[int, Partition] = {}  # value -> where it was committed
        self._last: dict[int, int] = {}  # key -> the last value that was committed
        self._read: dict[Partition, int] = {}
        self._sealed: dict[Partition, int] = {}  # -> leader epoch
        self._expired: dict[Partition, None] = {}
        self._used: dict[Partition, int] = {}  # hidden, and last written to at
        self._hidden: dict[Partition, int] = {}  # hidden since
        # when a pause of all its producers ended that was as long as the grace period
        self._pause: dict[Partition, int] = {}
        self._reporter: dict[ClusterWorker, _Reporter] = {}
        self._checked_left_behind: dict[ClusterWorker, None] = {}
        self._over = False

    # -- the topic ---------------------------------------------------------------------------------

    def topic(self) -> TopicState:
        return self.world.state.topics[TOPIC]

    def count(self) -> int:
        return len(self.topic().partitions)

    def shown(self) -> int:
        """As Metadata has it."""
        return sum(partition.retiring < RETIRE_HIDDEN for partition in self.topic().partitions)

    def new_values(self, key: int, count: int) -> tuple[int, ...]:
        first, self.world.values = self.world.values + 1, self.world.values + count
        self._keys.update(dict.fromkeys(range(first, first + count), key))
        return tuple(range(first, first + count))

    # -- the run -----------------------------------------------------------------------------------

    def begin(self) -> None:
        self.topic_id = self.topic().topic_id
        partitions = [(self.topic_id, index) for index in range(self.count())]
        self.producers = [KeyedProducer(self, number) for number in range(2 * self.count())]
        self.world.clients += [*self.producers, Consumer(self.world, partitions, 100 * MILLISECOND)]
        self.kernel.after(self.random.randrange(1_000) * MILLISECOND, None, self._retire)
        self._tick()

    def _retire(self) -> None:
        count, expected = self.count(), self.world.admin.requested
        if self._over:
            return
        if self.topic().partitions[-1].retiring == RETIRE_SEALED and self.random.random() < 0.5:
            expected.append(messages.ReleaseRetired(TOPIC))
        elif count > 1:
            expected.append(
                messages.RetirePartitions(
                    TOPIC, self.random.choice([one for one in range(1, count) if count % one == 0])
                )
            )
        self.kernel.after(self.random.randrange(500, 4_000) * MILLISECOND, None, self._retire)

    def heal(self) -> None:
        """Producers continue for a while: those that never accept a smaller number keep the
        partitions that they write to.
        """
        self._over = True
        self._run_until(
            lambda: self.topic().partitions[-1].redirect < 0 or self.topic().partitions[-1].retiring == RETIRE_HIDDEN,
            HIDDEN_MAX,
        )
        self.kernel.run(until=self.kernel.now + 2 * GRACE_MS * MILLISECOND)
        for producer in self.producers:
            producer.stopping = True
        self._run_until(lambda: not self._unfinished(), SETTLE_MAX)

    def _run_until(self, over: Callable[[], bool], longest: int) -> None:
        last = self.kernel.now + longest
        while self.kernel.now < last and not over():
            self.kernel.run(until=self.kernel.now + 500 * MILLISECOND)

    def _unfinished(self) -> str:
        if any(self.world.stuck((self.topic_id, partition.index)) for partition in self.topic().partitions):
            return ""  # an operator has to act first
        waiting = [producer.key for producer in self.producers if producer.sent is not None]
        if waiting or self.topic().partitions[-1].redirect >= 0:
            return f"producers of keys {waiting} wait; {self.topic().partitions[-1]}"
        gone = [
            (host.node, key[1])
            for host in self.world.hosts
            for key in host.logs
            if key[0] == self.topic_id and key[1] >= self.count()
        ]
        return f"files of partitions that are gone, by host: {gone}" if gone else ""

    def check_end(self) -> None:
        if problem := self._unfinished():
            raise Violation("LIVE", f"{TOPIC}: {problem}")
        lost = [value for value in self.acked if value not in self._seen]
        if lost:
            raise Violation("V3", f"acknowledged and never committed: {lost}")

    # -- what is checked ---------------------------------------------------------------------------

    def applied(self, before: dict[str, TopicState]) -> None:
        """A metadata record has been committed."""
        old, new = before.get(TOPIC), self.world.state.topics.get(TOPIC)
        if old is new or old is None or new is None:
            return
        if len(new.partitions) > len(old.partitions):
            raise Violation("V5", f"{TOPIC} has {len(new.partitions)} partitions after {len(old.partitions)}")
        steps = {partition.retiring for partition in new.partitions if partition.redirect >= 0}
        if len(steps) > 1:
            raise Violation("V1", f"steps of partitions that go: {steps}")
        for partition in old.partitions[len(new.partitions) :]:
            self._gone(partition)
        for was, now in zip(old.partitions, new.partitions, strict=False):
            if was.retiring != now.retiring:
                self._stepped(was, now)

    def _stepped(self, was: Any, now: Any) -> None:
        key = (self.topic_id, now.index)
        if now.retiring != was.retiring + 1 or now.leader_epoch <= was.leader_epoch:
            raise Violation("V1", f"{was} became {now}")
        self.kernel.report("step", now.index, now.retiring, now.leader_epoch)
        if now.retiring == RETIRE_SEALED:
            self.counts["sealed"] += 1
            self._sealed[key] = now.leader_epoch
            if now.leader != self.topic().partitions[now.redirect].leader:
                raise Violation("V1", f"{now} is sealed, and led elsewhere than {now.redirect}")
        elif now.retiring == RETIRE_HIDDEN:
            self.counts["hidden"] += 1
            self._hidden[key] = self.kernel.now
            self._check_empty(key, "is hidden")
        else:
            self.kernel.after(self.random.randrange(200, 6_000) * MILLISECOND, None, self._expire, key)

    def _expire(self, key: Partition) -> None:
        self._expired[key] = None

    def _gone(self, partition: Any) -> None:
        key = (self.topic_id, partition.index)
        self.counts["gone"] += 1
        self.kernel.report("gone", partition.index)
        self._check_empty(key, "is gone")
        unused = self.kernel.now - self._used.get(key, -SECOND * 1_000)
        since_pause = self.kernel.now - self._pause.get(key, -SECOND * 1_000)
        if partition.retiring != RETIRE_HIDDEN or (
            self.world.plan.drift_is_bounded and unused < PAUSE_MIN and since_pause > BELIEVED
        ):
            raise Violation(
                "V4", f"{TOPIC}-{partition.index} is gone {unused / SECOND:.3f} s after it was written to; {partition}"
            )

    def _check_empty(self, key: Partition, what: str) -> None:
        if key not in self._expired and self.world.history.committed.get(key):
            raise Violation(
                "V4",
                f"{TOPIC}-{key[1]} {what} with {len(self.world.history.committed[key])} records that are not too old",
            )

    def check(self) -> None:
        if not self.topic_id:
            return
        for index in range(self.world.plan.retire):
            key = (self.topic_id, index)
            committed, read = self.world.history.committed.get(key, ()), self._read.get(key, 0)
            for entry in committed[read:]:
                self._committed(key, entry)
            self._read[key] = len(committed)

    def _committed(self, partition: Partition, entry: Any) -> None:
        value = entry.value
        if entry.epoch >= self._sealed.get(partition, 1 << 62):
            raise Violation(
                "V2",
                f"{TOPIC}-{partition[1]} was sealed in leader epoch {self._sealed[partition]}, and has {entry} of"
                f" leader epoch {entry.epoch}",
            )
        if value in self._seen:
            raise Violation("V3", f"{entry} is in partition {partition[1]}, and was in {self._seen[value][1]} already")
        self._seen[value] = partition
        key = self._keys[value]
        if value < self._last.get(key, -1):
            raise Violation(
                "V3",
                f"key {key}: {value} comes in partition {partition[1]} after {self._last[key]} in"
                f" {self._seen[self._last[key]][1]}",
            )
        self._last[key] = value

    # -- workers -----------------------------------------------------------------------------------

    def _tick(self) -> None:
        """New workers begin to tell; once their metadata is up to date they delete what left
        this host before their life (orphan_directories.py).
        """
        for host in self.world.hosts:
            for worker in host.workers:
                if worker is not None and worker not in self._reporter:
                    self._reporter[worker] = self._new_reporter(worker)
                    self.kernel.after(int(TICK_S * SECOND), worker.process, self._look, worker)
                if worker is not None and worker not in self._checked_left_behind and worker.catalog.has_caught_up:
                    self._checked_left_behind[worker] = None
                    for key in [
                        key
                        for key in host.logs
                        if key not in worker.places
                        and worker is self.world.worker_of(host.node, key)
                        and worker.catalog.is_left_behind(*key)
                    ]:
                        del host.logs[key]
        self.kernel.after(500 * MILLISECOND, None, self._tick)

    def _new_reporter(self, worker: ClusterWorker) -> _Reporter:
        def find(key: Partition) -> Any:
            owned = worker.catalog.owned.get(key)
            return SimpleNamespace(closing=False, owned=owned) if owned is not None and key in worker.places else None

        def of_slot(slot: int) -> Any:
            return next(
                (SimpleNamespace(owned=each) for each in worker.catalog.owned.values() if each.slot == slot), None
            )

        def slot_view(slot: int) -> Any:
            place = worker.places[of_slot(slot).owned.key]
            end = place.log.end
            is_empty = "emptied" in self.world.off or (
                place.partition in self._expired and place.core.high_watermark >= end
            )
            return SimpleNamespace(log_start_offset=end if is_empty else 0, log_end_offset=end)

        host = worker.cluster_host
        return _Reporter(
            SimpleNamespace(slot_view=slot_view),
            None,
            None,
            SimpleNamespace(open=SimpleNamespace(get=find), by_slot=SimpleNamespace(get=of_slot)),
            worker.catalog,  # type: ignore[arg-type]
            lambda message: worker.send(host, message),
            lambda _work: None,
            GRACE_MS / 1000,
            lambda: host.clock.now() / 1e9,
        )

    def _look(self, worker: ClusterWorker) -> None:
        self._reporter[worker].check()
        self.kernel.after(worker.cluster_host.clock.true_delay(int(TICK_S * 1e9)), worker.process, self._look, worker)

    def on_produce(
        self,
        worker: ClusterWorker,
        partition: Partition,
        producer: int,
        sequence: int,
        values: tuple[int, ...],
        caller: Caller,
    ) -> None:
        """A client's batch arrives at a worker that may own the partition."""
        topic = worker.catalog.topics.get(partition[0])
        image = topic.partitions[partition[1]] if topic is not None and partition[1] < len(topic.partitions) else None
        place = worker.places.get(partition)
        if image is None or place is None:
            return worker._answer(caller, NOT_LEADER, -1)
        if image.retiring == RETIRE_UNSEALED or "seal" in self.world.off:
            return worker.on_produce(partition, producer, sequence, values, True, caller)
        host = worker.cluster_host
        error = place.core.may_append(True, host.lease_deadline_ns, host.clock_ns()) or (
            STORAGE_ERROR if worker.failed or host.full else 0
        )
        if error:
            return worker._answer(caller, error, -1)
        known = place.log.producers.get(producer, ())
        if sequence < len(known) and not (image.retiring != RETIRE_SEALED and not self._settled(place, image)):
            return worker._acknowledge(place, known[sequence], True, caller)
        if image.retiring == RETIRE_HIDDEN:
            self._use(worker, partition)
        if image.retiring == RETIRE_SEALED or not self._settled(place, image):
            return worker._answer(caller, NOT_ENOUGH_REPLICAS, -1)
        target = (partition[0], image.redirect)
        other = self.world.worker_of(host.node, target)
        if other is not None:
            self.counts["redirected"] += 1
            self.kernel.after(
                20,
                other.process,
                self._take_on,
                other,
                target,
                producer + ((partition[1] + 1) << SHIFT),
                sequence - len(known),
                values,
                caller,
            )

    def _settled(self, place: Place, image: Any) -> bool:
        """Its records are below the high watermark, in the epoch of the step."""
        return place.core.leader_epoch >= image.leader_epoch and place.core.high_watermark >= place.log.end

    def _use(self, worker: ClusterWorker, partition: Partition) -> None:
        if self.kernel.now - self._used.get(partition, self._hidden[partition]) >= PAUSE_MIN:
            self._pause[partition] = self.kernel.now
        self._used[partition] = self.kernel.now
        owned, reporter = worker.catalog.owned.get(partition), self._reporter.get(worker)
        if owned is not None and reporter is not None and "used" not in self.world.off:
            reporter.on_used(SimpleNamespace(slot=owned.slot))  # type: ignore[arg-type]

    def _take_on(
        self,
        worker: ClusterWorker,
        target: Partition,
        producer: int,
        sequence: int,
        values: tuple[int, ...],
        caller: Caller,
    ) -> None:
        """Of the partition that takes the records; NOT_LEADER would be about another partition than
        the client knows.
        """
        place, host = worker.places.get(target), worker.cluster_host
        error = (
            place.core.may_append(True, host.lease_deadline_ns, host.clock_ns()) if place is not None else NOT_LEADER
        )
        if error == NOT_LEADER:
            return worker._answer(caller, NOT_ENOUGH_REPLICAS, -1)
        worker.on_produce(target, producer, sequence, values, True, caller)
