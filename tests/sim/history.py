"""Invariants of partitions, checked while the cluster runs. Their names are those of
docs/design/cluster.md, section 7.

`committed` is a ghost variable: for each partition everything that was ever below any replica's
high watermark, in order. It never changes: another entry at the same offset violates P5, a leader
without it P3, and a consumer that read something else C3.

Losses by an unclean election are excused: when its leader begins, forget() truncates the ghost to
its log. Until then nothing is checked for the partition, and replicas of earlier leader epochs keep
the log as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from tests.sim.disks import Entry, PartitionLog
from tests.sim.kernel import Violation


class PartitionView(NamedTuple):
    """One partition as committed by the controller."""

    leader: int
    leader_epoch: int
    partition_epoch: int
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]
    eligible: tuple[int, ...]
    min_in_sync: int


class History:
    def __init__(
        self,
        view: Callable[[Any], PartitionView | None],
        running: Callable[[int, Any], Any],
        logs: Callable[[Any], Iterable[PartitionLog]],
        flush_on_ack: Callable[[Any], bool],
    ) -> None:
        """view: the partition as committed by the controller. running: the Place of a node whose
        processes run under the broker epoch known to the controller, else None. logs: of every
        host, running or not.
        """
        self._view = view
        self._running = running
        self._logs = logs
        self._flush_on_ack = flush_on_ack
        self.committed: dict[Any, list[Entry]] = {}
        self.sequences: dict[tuple[Any, int], int] = {}  # of idempotent producers, as committed
        self.acked: dict[Any, dict[int, Entry]] = {}
        # (partition, leader epoch) -> committed entries when the controller chose it
        self.began: dict[tuple[Any, int], int] = {}
        self.epochs: dict[Any, tuple[int, int]] = {}
        self.dirty: dict[Any, None] = {}
        self.unclean: dict[Any, int] = {}  # partition -> newest leader epoch that was elected uncleanly
        self.unsettled: set[Any] = set()  # an unclean leader is elected and has not begun
        self.before: dict[Any, list[list[Entry]]] = {}  # the committed entries before each of them began
        self.counts = {
            "unclean": 0,
            "lost": 0,
            "acked": 0,
            "committed": 0,
            "elections": 0,
            "reads": 0,
            "refused": 0,
            "truncated": 0,
        }
        self.aware = True  # false while a scenario damages data by hand
        # was durable, and was lost with its disk or behind a flipped bit
        self.lost_logs: dict[Any, list[list[Entry]]] = {}

    # -- what happened -----------------------------------------------------------------------------

    def touched(self, worker: Any, place: Any) -> None:
        self.dirty[place.partition] = None

    def moved(self, worker: Any, place: Any) -> None:
        """A high watermark rose: P4, P5, C2."""
        partition, log, high = place.partition, place.log, place.core.high_watermark
        self.dirty[partition] = None
        if partition in self.unsettled or place.core.leader_epoch < self.unclean.get(partition, -1):
            return
        if high > log.end:
            raise Violation(
                "A1", f"{partition}: node {worker.host.node} has high watermark {high} and only {log.end} entries"
            )
        if high and log.entries[high - 1].left:
            raise Violation(
                "BATCH", f"{partition}: high watermark {high} of node {worker.host.node} lies within a batch"
            )
        committed = self.committed.setdefault(partition, [])
        self._compare(partition, log, min(high, len(committed)), worker.host.node, "P5")
        for entry in log.entries[len(committed) : high]:
            if entry.producer >= 0:
                key = (partition, entry.producer)
                expected = self.sequences.get(key, 0)
                if entry.sequence != expected:
                    raise Violation(
                        "C2",
                        f"{partition}: producer {entry.producer} has sequence {entry.sequence} after {expected - 1} in"
                        f" the log of node {worker.host.node}",
                    )
                self.sequences[key] = expected + 1
            committed.append(entry)
            self.counts["committed"] += 1

    def _compare(self, partition: Any, log: PartitionLog, end: int, node: int, name: str) -> None:
        start = log.verified
        if end > start:
            committed = self.committed[partition]
            if log.entries[start:end] != committed[start:end]:
                offset = next(
                    offset
                    for offset in range(start, end)
                    if offset >= log.end or log.entries[offset] != committed[offset]
                )
                has = log.entries[offset] if offset < log.end else "nothing"
                raise Violation(
                    name, f"{partition}: offset {offset} was committed as {committed[offset]}, node {node} has {has}"
                )
            log.verified = end

    def chosen(self, partition: Any, leader_epoch: int) -> None:
        """The controller committed a new leader epoch."""
        self.began[partition, leader_epoch] = len(self.committed.get(partition, ()))
        self.counts["elections"] += 1
        self.dirty[partition] = None

    def leading(self, worker: Any, place: Any) -> None:
        """P3: a new leader has everything that was committed when it was elected."""
        partition, log = place.partition, place.log
        view = self._view(partition)
        if view is None or view.leader_epoch != place.core.leader_epoch or view.leader != worker.host.node:
            return  # of an epoch that is over: it cannot do anything
        if partition in self.unsettled:
            self.unsettled.discard(partition)
            self.forget(partition, log)
        committed = self.committed.get(partition, ())
        if log.end < len(committed):
            raise Violation(
                "P3",
                f"{partition}: node {worker.host.node} leads epoch {view.leader_epoch} with {log.end} entries,"
                f" {len(committed)} are committed",
            )
        self._compare(partition, log, len(committed), worker.host.node, "P3")
        self.dirty[partition] = None

    def accepted(self, worker: Any, place: Any, all_acks: bool) -> None:
        """R11 before the append, and the lease."""
        core = place.core
        if all_acks and core.in_sync_count < core.min_in_sync and not core.holding:
            raise Violation(
                "R11", f"{place.partition}: acks=all taken with {core.in_sync_count} in sync, {core.min_in_sync} needed"
            )
        if worker.host.clock_ns() >= worker.host.lease_deadline_ns:
            raise Violation("L4", f"{place.partition}: node {worker.host.node} took a record after its lease")

    def acknowledged(self, worker: Any, place: Any, offset: int, end: int) -> None:
        """The records from `offset` to before `end`: P9, and the input of C1."""
        partition, entries = place.partition, place.log.entries[offset:end]
        view = self._view(partition)
        self.counts["acked"] += len(entries)
        if self._flush_on_ack(partition):
            copies = sum(
                1 for log in self._logs(partition) if log.on_disk >= end and log.entries[offset:end] == entries
            )
            copies += sum(1 for held in self.lost_logs.get(partition, ()) if held[offset:end] == entries)
            needed = min(view.min_in_sync, len(view.replicas)) if view is not None else 1
            if copies < needed:
                raise Violation(
                    "P9", f"{partition}: offset {offset} is acknowledged and durable on {copies} hosts only"
                )
        acked = self.acked.setdefault(partition, {})
        acked.update(zip(range(offset, end), entries))
        committed = self.committed.get(partition, ())
        if committed[offset:end] != entries:
            raise Violation("C1", f"{partition}: offset {offset} is acknowledged and was never committed")

    def lost(self, partition: Any, entries: list[Entry]) -> None:
        """A durable log that was lost, or was truncated at a flipped bit: its position may have
        been reported, and the leader may still acknowledge records by it.
        """
        self.lost_logs.setdefault(partition, []).append(entries)

    def served(self, partition: Any, offset: int, entries: list[Entry]) -> None:
        """C3: every reader reads the committed records."""
        self.counts["reads"] += len(entries)
        committed = self.committed.get(partition, [])
        known = (committed, *self.before.get(partition, ()))
        if entries and not any(log[offset : offset + len(entries)] == entries for log in known):
            raise Violation(
                "C3",
                f"{partition}: a reader at {offset} got {entries[:3]}, committed is {committed[offset : offset + 3]}",
            )

    def reported_latest(self, place: Any) -> None:
        """R12: the reported end is not below what was committed before this leader was elected."""
        began = self.began.get((place.partition, place.core.leader_epoch), 0)
        if place.core.high_watermark < began:
            raise Violation(
                "R12",
                f"{place.partition}: the end is told as {place.core.high_watermark}, {began} entries were committed"
                f" when epoch {place.core.leader_epoch} began",
            )

    def chosen_uncleanly(self, partition: Any, leader_epoch: int) -> None:
        self.unclean[partition] = leader_epoch
        self.unsettled.add(partition)
        self.counts["unclean"] += 1

    def forget(self, partition: Any, log: PartitionLog) -> None:
        """An unclean election made this log authoritative."""
        committed = self.committed.setdefault(partition, [])
        self.before.setdefault(partition, []).append(list(committed))
        same = 0
        while same < min(len(committed), log.end) and committed[same] == log.entries[same]:
            same += 1
        del committed[same:]
        for key in self.began:
            if key[0] == partition:
                self.began[key] = min(same, self.began[key])
        self.counts["lost"] += sum(offset >= same for offset in self.acked.get(partition, ()))
        self.acked[partition] = {
            offset: entry for offset, entry in self.acked.get(partition, {}).items() if offset < same
        }
        counts: dict[tuple[Any, int], int] = {}
        for entry in committed:
            if entry.producer >= 0:
                counts[partition, entry.producer] = counts.get((partition, entry.producer), 0) + 1
        for key in [key for key in self.sequences if key[0] == partition]:
            del self.sequences[key]
        self.sequences.update(counts)
        for each in self._logs(partition):
            each.verified = min(each.verified, same)

    # -- after every event -------------------------------------------------------------------------

    def check(self) -> None:
        if self.dirty and self.aware:
            dirty, self.dirty = self.dirty, {}
            for partition in dirty:
                self._check_partition(partition)

    def _check_partition(self, partition: Any) -> None:
        view = self._view(partition)
        if view is None or partition in self.unsettled:
            return
        self._check_view(partition, view)
        committed = self.committed.get(partition, [])
        count = len(committed)
        durable = self._flush_on_ack(partition)
        for node in view.in_sync + view.eligible:
            place = self._running(node, partition)
            if place is None:
                continue
            log = place.log
            if log.shortened:
                continue  # it leads nothing until it has everything
            if log.end < count or (durable and log.on_disk < count):
                raise Violation(
                    "P2",
                    f"{partition}: node {node} of the in-sync or eligible set has {log.end} entries ({log.on_disk}"
                    f" durable), {count} are committed; {view}",
                )
            if log.verified < count:
                self._compare(partition, log, count, node, "P2")
        place = self._running(view.leader, partition) if view.leader >= 0 else None
        if place is not None and place.core.leading and place.core.leader_epoch == view.leader_epoch:
            core = place.core
            if core.in_sync_count >= core.min_in_sync:
                missing = [
                    node for node in view.in_sync + view.eligible if node not in core.maximal and node != view.leader
                ]
                if missing:
                    raise Violation(
                        "P1",
                        f"{partition}: leader {view.leader} does not count {missing}; {sorted(core.maximal)} against"
                        f" {view}",
                    )

    def _check_view(self, partition: Any, view: PartitionView) -> None:
        leader_epoch, partition_epoch = self.epochs.get(partition, (-1, -1))
        if view.leader_epoch < leader_epoch or view.partition_epoch < partition_epoch:
            raise Violation(
                "I6", f"{partition}: {view} after leader epoch {leader_epoch}, partition epoch {partition_epoch}"
            )
        self.epochs[partition] = (view.leader_epoch, view.partition_epoch)
        if (
            not set(view.in_sync) <= set(view.replicas)
            or (view.leader >= 0 and view.leader not in view.in_sync)
            or set(view.in_sync) & set(view.eligible)
        ):
            raise Violation("P7", f"{partition}: {view}")

    # -- at the end --------------------------------------------------------------------------------

    def check_end(self, partition: Any, place: Any) -> None:
        """C1, after healing: `place` is the leader's."""
        log = place.log
        for offset, entry in self.acked.get(partition, {}).items():
            if offset >= log.end or log.entries[offset] != entry:
                raise Violation(
                    "C1", f"{partition}: acknowledged {entry} is not at offset {offset} of the healed leader"
                )
        if place.core.high_watermark < len(self.committed.get(partition, ())):
            raise Violation(
                "P6",
                f"{partition}: high watermark {place.core.high_watermark} of the healed leader is below"
                f" {len(self.committed[partition])}",
            )
