"""A worker's reports to its controller about the replicated partitions that it leads: proposed
in-sync sets, the recovery of an uncleanly elected leader, empty retiring partitions, and hidden
partitions to which no client has written for the grace period.

No state depends on the controller's memory: the reactor repeats a proposal until it gets a
response, and everything else is checked every TICK_S.

A hidden partition is removed only when its leader has reported it unused: a late or lost report, or
a suspended process, is never taken for the absence of producers. For the same reason time is summed
over checks (at most CHECK_S_MAX for each): while this process or the machine was suspended, no
producer could write. Concurrency: the event loop's thread.
"""

import time
from collections.abc import Callable, Coroutine
from typing import Any

from mqd import native
from mqd.base import logging
from mqd.cluster.host.messages import InSyncResponse, PartitionEmptied, PartitionImage, ProposeInSync, ToController
from mqd.cluster.metadata.records import RETIRE_HIDDEN, RETIRE_REDIRECTED, RETIRE_SEALED
from mqd.worker.catalog import Catalog, Key
from mqd.worker.commands import ReactorCommands
from mqd.worker.partitions import PartitionSet
from mqd.worker.periodic_work import PeriodicWork

TICK_S = 1.0
CHECK_S_MAX = 2 * TICK_S
USED_S = 1.0  # USED_MS of native/server/redirect.c: a use this soon after another is not reported


class PartitionReporter:
    """`run_in_background(work)` runs the work in a separate task."""

    def __init__(
        self,
        control: native.Control,
        reactor: native.Reactor,
        commands: ReactorCommands,
        partitions: PartitionSet,
        catalog: Catalog,
        send: Callable[[ToController], None],
        run_in_background: Callable[[Coroutine[Any, Any, Any]], None],
        grace_s: float,
        monotonic: Callable[[], float] = time.monotonic,
        periodic_work: PeriodicWork | None = None,
    ):
        self._control = control
        self._reactor = reactor
        self._commands = commands
        self._partitions = partitions
        self._catalog = catalog
        self._send = send
        self._run_in_background = run_in_background
        self._grace_s = grace_s  # partition.retire.grace.ms
        self._periodic_work = periodic_work or PeriodicWork()
        self._monotonic = monotonic
        self._checked_s = monotonic()
        # for the hidden partitions led here: leader epoch, seconds without a batch
        self._unused: dict[Key, tuple[int, float]] = {}
        self._proposed: dict[Key, int] = {}  # leader epoch of the reactor's last proposal
        self._log = logging.get("worker.replication")

    def on_proposal(self, event: native.Event) -> None:
        opened, proposal = self._partitions.by_slot.get(event.slot), event.proposal
        if opened is None or proposal is None:
            return
        owned = opened.owned
        self._proposed[owned.key] = proposal.leader_epoch
        assignment = self._catalog.assigned.get(owned.key)
        recovered = (
            assignment is not None and assignment.recovering and assignment.leader_epoch == proposal.leader_epoch
        )
        self._send(
            ProposeInSync(
                owned.topic_id,
                owned.index,
                proposal.leader_epoch,
                proposal.partition_epoch,
                list(proposal.in_sync),
                proposal.sequence,
                recovered,
            )
        )

    def on_used(self, event: native.Event) -> None:
        """Producers still write to a retired partition that is hidden from clients."""
        opened = self._partitions.by_slot.get(event.slot)
        if opened is not None:
            self._unused.pop(opened.owned.key, None)

    def on_response(self, response: InSyncResponse) -> None:
        opened = self._partitions.open.get((response.topic_id, response.index))
        if opened is None:
            return
        if response.error:
            self._log.info(
                "in-sync set was not accepted",
                partition=opened.owned.name,
                error=response.error,
                leader_epoch=response.leader_epoch,
            )
        if response.sequence:
            self._run_in_background(
                self._commands.run(
                    self._reactor.in_sync_response,
                    opened.owned.slot,
                    response.sequence,
                    response.leader_epoch,
                    response.error,
                )
            )

    async def run(self) -> None:
        """Runs until cancelled."""
        async for _ in self._periodic_work.ticks(TICK_S, self._is_needed):
            self.check()

    def _is_needed(self) -> bool:
        return bool(self._catalog.retiring) or any(
            assignment.recovering for assignment in self._catalog.assigned.values()
        )

    def check(self) -> None:
        for key, assignment in list(self._catalog.assigned.items()):
            if assignment.leader == assignment.node_id:
                self._report_recovered(
                    key,
                    assignment.leader_epoch,
                    assignment.partition_epoch,
                    assignment.recovering,
                    assignment.broker_epoch,
                )
        now_s = self._monotonic()
        elapsed_s, self._checked_s = min(now_s - self._checked_s, CHECK_S_MAX), now_s
        previous, self._unused = self._unused, {}
        for topic_id in self._catalog.retiring:
            led = [
                partition
                for partition in self._catalog.topics[topic_id].partitions
                if partition.leader == self._catalog.cluster.node_id
            ]
            sealed = [partition for partition in led if partition.retiring in (RETIRE_SEALED, RETIRE_REDIRECTED)]
            hidden = [partition for partition in led if partition.retiring == RETIRE_HIDDEN]
            self._report_emptied(topic_id, sealed)
            self._report_unused(topic_id, hidden, previous, elapsed_s)

    def _report_recovered(
        self, key: Key, leader_epoch: int, partition_epoch: int, recovering: bool, broker_epoch: int
    ) -> None:
        """Reports the recovery of an unclean leader: the log was recovered when the partition was
        opened. Uses sequence 0, which is lower than any of the reactor's; the reactor's own
        proposals report the recovery, too.
        """
        if recovering and key in self._partitions.open and self._proposed.get(key) != leader_epoch:
            self._send(
                ProposeInSync(
                    *key,
                    leader_epoch,
                    partition_epoch,
                    [(self._catalog.cluster.node_id, broker_epoch)],
                    0,
                    recovered=True,
                )
            )

    def _report_emptied(self, topic_id: bytes, partitions: list[PartitionImage]) -> None:
        for partition in partitions:
            opened = self._partitions.open.get((topic_id, partition.index))
            if opened is None or opened.closing:
                continue
            view = self._control.slot_view(opened.owned.slot)
            if view.log_start_offset == view.log_end_offset:
                self._send(PartitionEmptied(topic_id, partition.index, partition.leader_epoch))

    def _report_unused(
        self,
        topic_id: bytes,
        partitions: list[PartitionImage],
        previous: dict[Key, tuple[int, float]],
        elapsed_s: float,
    ) -> None:
        for partition in partitions:
            key = (topic_id, partition.index)
            opened = self._partitions.open.get(key)
            if opened is None or opened.closing:
                continue
            epoch, unused_s = previous.get(key, (-1, 0.0))
            unused_s = unused_s + elapsed_s if epoch == partition.leader_epoch else 0.0
            self._unused[key] = (partition.leader_epoch, unused_s)
            if unused_s >= self._grace_s + USED_S:
                self._send(PartitionEmptied(topic_id, partition.index, partition.leader_epoch))
