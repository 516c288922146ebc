"""An owner's treatment of encoded batches: those of transactional producers, of coordinators, and
markers; and reads of committed records.

Before a transaction begins in a partition its coordinator is consulted, through the host's acceptor
(CHECK, native/server/check/check.c). Producers' tables are the broker's own: native_producers.py.

Invariants
    W6  a batch that begins a transaction is appended only with the guard from its coordinator's
        response
    W7  readers of committed records get none at or above the last stable offset of the replica from
        which they read
    W8  a marker that the log already has is refused only when all records of the log are below the
        high watermark: a host that gets this error considers the transaction ended there
Rules that can be off: `M4` (such a marker is refused at once), `LSO` (the last stable offset is the
high watermark), `fence` and `verify` (native_producers.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mqd.native import PRODUCE_CONTROL, PRODUCE_MARKER_BUMPED
from tests.sim.disks import Entry
from tests.sim.replica.model_worker import READ_MAX, Caller, ModelWorker, Place
from tests.sim.replica.native_producers import VERIFY, Carried, ProducerState, Verdict, parsed
from tests.sim.replica.partition_replica import NOT_LEADER, STORAGE_ERROR

INVALID_EPOCH = 47

Check = Callable[[Any, Callable[[int], None]], None]  # (partition, callback with the error code)


class BatchWorker(ModelWorker):
    def producers_of(self, place: Place) -> ProducerState:
        if place.producers is None:
            place.producers = ProducerState(place.log)
        return place.producers

    # -- appending ---------------------------------------------------------------------------------

    def on_batch(self, partition: Any, data: bytes, flags: int, leader_epoch: int, caller: Caller) -> None:
        """From a coordinator of this host; acks=all. leader_epoch -1: the current one."""
        place = self.places.get(partition)
        if place is None or leader_epoch not in (-1, place.core.leader_epoch):
            return self._answer(caller, NOT_LEADER, -1)
        bumped = bool(flags & PRODUCE_MARKER_BUMPED)
        verdict = self._stage(place, data, bool(flags & PRODUCE_CONTROL), bumped, 0)
        if (
            bumped
            and verdict.error == INVALID_EPOCH
            and place.log.end > place.core.high_watermark
            and "M4" not in self.off
        ):
            place.refused.append((place.log.end, caller))  # W8
        else:
            self._carry_out_verdict(place, data, verdict, caller)

    def on_transactional(self, partition: Any, data: bytes, check: Check, caller: Caller) -> None:
        """A Produce of a transactional producer. `check` consults the coordinator."""
        place = self.places.get(partition)
        if place is None:
            return self._answer(caller, NOT_LEADER, -1)
        verdict = self._stage(place, data, False, False, 0)
        if verdict.error == VERIFY:
            check(partition, lambda error: self._checked(place, data, verdict.guard, caller, error))
        else:
            self._carry_out_verdict(place, data, verdict, caller)

    def _checked(self, place: Place, data: bytes, guard: int, caller: Caller, error: int) -> None:
        if error:
            self._answer(caller, error, -1)
        elif self.places.get(place.partition) is not place:
            self._answer(caller, NOT_LEADER, -1)
        else:
            self._carry_out_verdict(place, data, self._stage(place, data, False, False, guard), caller)

    def _stage(self, place: Place, data: bytes, coordinator: bool, bumped: bool, guard: int) -> Verdict:
        host = self.host
        error = place.core.may_append(True, host.lease_deadline_ns, host.clock_ns())
        if not error and (self.failed or host.full):
            error = STORAGE_ERROR
        if error:
            return Verdict(error)
        return self.producers_of(place).stage(data, coordinator, bumped, guard, self._now_ms(), self.off)

    def _carry_out_verdict(self, place: Place, data: bytes, verdict: Verdict, caller: Caller) -> None:
        if verdict.error:
            return self._answer(caller, verdict.error, -1)
        self.history.accepted(self, place, True)
        if verdict.duplicate_of >= 0:
            return self._acknowledge(place, verdict.duplicate_of, True, caller)
        log, core = place.log, place.core
        offset, count = log.end, parsed(data).info.record_count
        for number in range(count):
            log.append(Entry(core.leader_epoch, -1, 0, Carried(data, number), count - 1 - number))  # type: ignore[arg-type]
        self.producers_of(place).sync()
        self._appended(place, offset, True, caller)

    def _moved(self, place: Place, changed: int) -> None:
        super()._moved(place, changed)
        if place.refused:
            high = place.core.high_watermark
            due, place.refused = (
                [caller for end, caller in place.refused if end <= high],
                [each for each in place.refused if each[0] > high],
            )
            for caller in due:
                self._answer(caller, INVALID_EPOCH, -1)

    def _refuse(self, place: Place, error: int) -> None:
        super()._refuse(place, error)
        refused, place.refused = place.refused, []
        for _, caller in refused:
            self._answer(caller, error, -1)

    # -- reading -----------------------------------------------------------------------------------

    def on_read_committed(self, partition: Any, offset: int, caller: Caller) -> None:
        """Responds with the records below the last stable offset, and the aborted transactions
        among them.
        """
        place = self.places.get(partition)
        if place is None or not (place.core.leading or place.core.following):
            return self._answer(caller, NOT_LEADER, offset, (), ())
        if self.failed:
            return self._answer(caller, STORAGE_ERROR, offset, (), ())
        producers = self.producers_of(place)
        stable = (
            producers.last_stable_offset(place.core.high_watermark)
            if "LSO" not in self.off
            else place.core.high_watermark
        )
        producers.sync()
        entries = place.log.read(offset, min(stable, offset + READ_MAX))
        self.history.served(partition, offset, entries)
        self._answer(caller, 0, offset, entries, producers.aborted_between(offset, offset + len(entries)))
