"""Whole simulated clusters with transactions: coordinators of transactional ids and of groups in
the acceptors, their state in partitions of the cluster, markers to leaders on any host, producers
that share transactional ids, readers of committed records. Faults, healing and all other invariants
are in cluster_world.py.

Checked: T1 to T4 and FENCE of transaction_history.py; and at the end, of the coordinators
themselves
    T1  the committed offset of a group is that of the last transaction that committed one
    T3  no transaction is open, and no partition knows of one
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

from mqd.base.logging import Logger
from mqd.cluster.host import messages
from mqd.coordinator.group.records import encode_offset_key
from mqd.coordinator.topics import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from mqd.coordinator.transaction.records import State
from tests.sim.cluster.cluster_plan import Plan
from tests.sim.cluster.cluster_world import ClusterWorld, Partition
from tests.sim.coordinator.transaction_coordination import Coordination
from tests.sim.coordinator.transaction_history import LATE, TransactionHistory
from tests.sim.coordinator.transactional_producer import CommittedReader, TransactionalProducer, partition_of
from tests.sim.kernel import MILLISECOND, SECOND, Violation

TIMEOUTS_MS = (1_500, 3_000, 6_000)
INTERNAL_PARTITIONS = 2


class Transactions:
    """The interface that hosts use in a world with transactions."""

    @staticmethod
    def coordination(acceptor: Any) -> Coordination:
        return Coordination(acceptor)

    @staticmethod
    def check(
        worker: Any, transactional_id: str, version: int, data: bytes
    ) -> Callable[[Any, Callable[[int], None]], None]:
        """A worker's request, before it begins a transaction, to its host's current acceptor."""

        def request(partition: Partition, take: Callable[[int], None]) -> None:
            acceptor = worker.cluster_host.acceptor
            if acceptor is not None:
                acceptor.transactions.check(worker, transactional_id, version, data)(partition, take)

        return request


def _raised(_logger: Logger, message: str, /, **_fields: object) -> None:
    """Replaces Logger.exception."""
    raise sys.exception() or AssertionError(message)


class TransactionCluster(ClusterWorld):
    def __init__(
        self, seed: int, off: frozenset[str] = frozenset(), plan: Plan | None = None, quiet: bool = False
    ) -> None:
        """plan: of plans.py, kind transactions."""
        self.transactions = Transactions()
        self.late_markers = 0.0  # share of requests between coordinators and leaders that are delayed by seconds
        self.transactional = TransactionHistory(lambda partition: self.history.committed.get(partition, []), self.name)
        super().__init__(seed, off, plan, quiet=quiet)

    # -- making ------------------------------------------------------------------------------------

    def _create_topics(self, plan: Plan) -> None:
        super()._create_topics(plan)
        for name in (OFFSETS_TOPIC, TRANSACTIONS_TOPIC):
            self.admin.requested.append(
                messages.CreateTopic(
                    name,
                    INTERNAL_PARTITIONS,
                    min(3, plan.hosts),
                    {},
                    {"cleanup.policy": "compact", "flush.on.ack": "true", "min.insync.replicas": "2"},
                )
            )

    def internal(self, name: str) -> list[Partition]:
        topic = self.state.topics.get(name)
        return [(topic.topic_id, partition.index) for partition in topic.partitions] if topic is not None else []

    def coordinated(self) -> list[Partition]:
        return self.internal(OFFSETS_TOPIC) + self.internal(TRANSACTIONS_TOPIC)

    def group_of(self, transactional_id: str) -> str:
        return f"group-{transactional_id}"

    def group_partition(self, transactional_id: str) -> Partition:
        return partition_of(self.group_of(transactional_id), self.internal(OFFSETS_TOPIC))

    def coordinated_by(self, transactional_id: str) -> Partition:
        return partition_of(transactional_id, self.internal(TRANSACTIONS_TOPIC))

    def begin(self) -> None:
        super().begin()
        random = self.kernel.random
        self.late_markers = random.choice((0.0, 0.03, 0.2))
        self.data = [
            partition
            for partition in self.partitions()
            if self.state.topics_by_id[partition[0]] in ("flushed", "cached")
        ]
        self.ids = [f"id-{number}" for number in range(random.choice((1, 2, 3)))]
        for transactional_id in self.ids:
            version, timeout_ms, commits_offsets = (
                random.choice((2, 0)),
                random.choice(TIMEOUTS_MS),
                random.random() < 0.7,
            )
            for _ in range(random.choice((1, 1, 2))):
                self.clients.append(
                    TransactionalProducer(
                        self,
                        transactional_id,
                        version,
                        self.data,
                        random.choice((5, 20, 60)) * MILLISECOND,
                        timeout_ms,
                        commits_offsets,
                    )
                )
        self.clients.append(CommittedReader(self, self.data, 50 * MILLISECOND, nearest=False))
        self.clients.append(CommittedReader(self, self.data, 70 * MILLISECOND, nearest=True))

    def run(self, chaos: int = 6_000) -> None:
        """Without the broker's own log lines: injected faults would cause many. A line about a bug
        of mqd ends the run (E3).
        """
        before = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        try:
            with mock.patch.object(Logger, "exception", _raised):
                super().run(chaos)
        finally:
            logging.disable(before)

    # -- what is checked ---------------------------------------------------------------------------

    def _after_each(self) -> None:
        for partition in self.history.dirty:
            self.transactional.look(partition)
        super()._after_each()

    def heal(self) -> None:
        """T3: after everything has been repaired, open transactions end by their timeout."""
        super().heal()
        bound = self.kernel.now + max(TIMEOUTS_MS) * 2 * MILLISECOND + LATE
        # its end must be written too (seed 420099)
        while self.kernel.now < bound and (self.under_way() or not all(map(self.settled, self.partitions()))):
            self.kernel.run(until=self.kernel.now + 500 * MILLISECOND)

    def _excused(self, partition: Partition) -> bool:
        return self.stuck(partition)

    def coordination(self, partition: Partition) -> Coordination | None:
        view = self.view(partition)
        acceptor = self.hosts[view.leader].acceptor if view is not None and view.leader >= 0 else None
        return acceptor.transactions if acceptor is not None else None

    def under_way(self) -> str:
        """An open transaction; "" = none."""
        for partition in self.internal(TRANSACTIONS_TOPIC):
            coordination = None if self._excused(partition) else self.coordination(partition)
            if coordination is None:
                continue
            place = coordination.ids.partition_states[partition[1]] if coordination.ids.partition_states else None
            if place is None or place.shard is None:
                return f"{self.name(partition)} is not loaded by its leader"
            for name, core in place.shard.items():
                if core.state in (State.ONGOING, State.PREPARE_COMMIT, State.PREPARE_ABORT):
                    return f"{name} is in {core.state!r} with {list(core.partitions)}"
        for partition in [*self.data, *self.internal(OFFSETS_TOPIC)]:
            view = self.view(partition)
            place = self.running(view.leader, partition) if view is not None and view.leader >= 0 else None
            if place is None or self._excused(partition):
                continue
            worker = self.worker_of(view.leader, partition)
            offset = worker.producers_of(place).first_ongoing()
            if offset >= 0:
                return f"{self.name(partition)} has a transaction open from offset {offset} on"
        return ""

    def check_end(self) -> None:
        super().check_end()
        excused = [
            partition
            for partition in self.internal(TRANSACTIONS_TOPIC) + self.data + self.internal(OFFSETS_TOPIC)
            if self._excused(partition)
        ]
        left = self.under_way()
        if left and not excused:
            raise Violation(
                "T3", f"{left}, {LATE // SECOND} s after its timeout and after everything has been put right"
            )
        self.transactional.check_end(lambda partition: bool(excused))
        for transactional_id in self.ids:
            self._check_group(transactional_id)

    def _check_group(self, transactional_id: str) -> None:
        partition, group = self.group_partition(transactional_id), self.group_of(transactional_id)
        coordination = None if self._excused(partition) else self.coordination(partition)
        log = self.transactional.logs.get(partition)
        if coordination is None or log is None or coordination.groups.partition_states[partition[1]].shard is None:
            return
        core = coordination.groups.partition_states[partition[1]].shard.core(group)
        found = core.offsets.get("flushed", 0) if core is not None else None
        expected = log.offsets.get(encode_offset_key(group, "flushed", 0))
        if (found.offset if found is not None else None) != expected:
            raise Violation(
                "T1",
                f"{group} has {found} as committed; the last transaction that committed an offset of it is {expected}",
            )
