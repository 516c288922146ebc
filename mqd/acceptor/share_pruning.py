"""Prunes `__share_group_state`: deletes the records before the snapshots of all share-partitions.

Kafka's share coordinator deletes the records before the oldest snapshot in use, and makes
snapshots of idle share-partitions now and then so that this offset advances. Here a prune makes
these snapshots: in one partition of the topic, every share-partition writes a snapshot; then
everything before the first of these snapshots is deleted. A prune is due when it would delete at least RECORDS_MIN
records, and at least twice as many as it would write.

Invariants
    U1  what a prune leaves in the log is enough to rebuild every share-partition: those that exist
        when the new log start is chosen have a snapshot after it, and later ones begin after it
    U2  a prune deletes nothing if the leader epoch has changed since it began: the log may be
        another one
Bounds: at most IN_FLIGHT_MAX snapshots are in flight. Concurrency: the event loop's thread.
"""

import asyncio

from mqd.acceptor.broker_state import BrokerState
from mqd.base import logging
from mqd.base.tasks import Periodic
from mqd.cluster.host import messages
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.coordinator.partition_state import PartitionState
from mqd.coordinator.runtime import Coordinator
from mqd.coordinator.share.core import Snapshot

IN_FLIGHT_MAX = 100
RECORDS_MIN = 1_000  # fewer are not worth a prune
SNAPSHOT_TIMEOUT_S, DELETE_TIMEOUT_MS = 10.0, 30_000

log = logging.get("acceptor.share")


class SharePruning:
    def __init__(self, broker: BrokerState, coordinator: Coordinator) -> None:
        self._broker = broker
        self._coordinator = coordinator
        self.periodic_task = Periodic(
            lambda: broker.broker_number("share.coordinator.state.topic.prune.interval.ms") / 1000,
            self._prune_all,
            log,
            "states of share groups cannot be pruned",
        )

    async def _prune_all(self) -> None:
        for state in self._coordinator.partition_states:
            try:
                await self.prune(state)
            except Exception:  # the other partitions are still pruned
                log.exception("states of share groups cannot be pruned", partition=state.index)

    async def prune(self, state: PartitionState) -> int:
        """Prunes one partition. Returns the offset below which everything was deleted, or -1 if
        nothing was deleted.
        """
        shard = state.shard
        if shard is None:
            return -1
        leader_epoch, end_offset = shard.leader_epoch, shard.end_offset
        names = [name for name, _ in shard.items()]
        if not is_due(self._start_offset(state.index), end_offset, len(names)):
            return -1
        try:
            for first in range(0, len(names), IN_FLIGHT_MAX):
                await asyncio.gather(*map(self._snapshot, names[first : first + IN_FLIGHT_MAX]))
        except CoordinatorError:
            return -1  # the next prune starts over
        if state.shard is None or state.shard.leader_epoch != leader_epoch:  # U2
            return -1
        change = messages.DeleteRecords(self._coordinator.topic, state.index, end_offset)
        response = await self._broker.controller.request(change, DELETE_TIMEOUT_MS)
        if response.error:
            log.warning(
                "states of share groups cannot be pruned",
                partition=state.index,
                offset=end_offset,
                reason=response.message,
            )
            return -1
        return end_offset

    async def _snapshot(self, name: str) -> None:
        await self._coordinator.request(name, Snapshot, SNAPSHOT_TIMEOUT_S)

    def _start_offset(self, partition: int) -> int:
        image = self._broker.partition_of(self._coordinator.topic, partition)
        view = self._broker.view(image) if image is not None else None
        return view.log_start_offset if view is not None else 0


def is_due(start_offset: int, end_offset: int, core_count: int) -> bool:
    return end_offset - start_offset >= max(RECORDS_MIN, 2 * core_count)
