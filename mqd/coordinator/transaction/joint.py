"""The core of one joint transactional id: many producers write one transaction, and one request
names those whose records are committed. Pure; time and producer ids are passed in.

This is for engines that write a batch with many tasks, retry tasks and batches, and decide at the
end which attempts are committed (Spark). A batch has a number. The driver that executes it has a
run id, a new one at every start.

    (none)                         Enlist -> Ongoing; EndJoint(abort) -> CompleteAbort: the end of
                                   the run is recorded even if none of its tasks has enlisted
    Ongoing                        Enlist -> Ongoing, with one more child; EndJoint(commit, winners)
                                   -> PrepareCommit; EndJoint(abort), timeout, another run, an
                                   administrator -> PrepareAbort
    PrepareCommit                  markers written -> CompleteCommit
    PrepareAbort                   markers written -> CompleteAbort
    CompleteCommit, CompleteAbort  Enlist of the next batch -> Ongoing

Every task attempt enlists a child: a producer id and epoch for this transaction only. Children
write like transactional producers of this transactional id (KIP-890: the first batch to a partition
adds it). The commit names the winners. They get commit markers; all other children get abort
markers.

Every marker's epoch is one above the child's, which fences late writes of the child. The producer
ids continue with that epoch in the next transaction. The decision and the number of the batch are
one record: a repeated batch is recognized by its number, whichever run sends it, and none of it is
written twice.

Invariants (check() asserts those of one state; tests/sim/coordinator/test_joint_sim.py those across
transitions)
    J1  committed_batch_id only rises, and only in the record that decides a commit; an Enlist for
        that batch or an earlier one gets no producer id
    J2  there is one open transaction at a time, of one batch and one run; a commit names only
        children of that transaction
    J3  a child's epoch rises from transaction to transaction; each (producer id, epoch) is assigned
        once
    J4  after the Persist of the Prepare record, and not before, one WriteMarkers comes for each
        child that has partitions; Complete comes after the MarkersWritten of all of them
    J5  a run that was superseded by another or has aborted gets no child and can no longer end a
        transaction (the last FENCED_RUNS_MAX such runs are remembered)
    J6  every request is answered once: immediately, when the markers are written, or when it has
        waited for its maximum time
    J7  requests wait only in a Prepare state
    J8  replaying the persisted records in any order gives the same state
    J9  a transaction is Ongoing no longer than its timeout after its last activity: an Enlist or an
        added partition
Bounds: CHILDREN_MAX children; HELD_MAX waiting requests; further ones get CONCURRENT_TRANSACTIONS.
"""

from mqd.coordinator.actions import Action, KeyValue, Persist, Reply, Timer, TimerFired
from mqd.coordinator.transaction import events
from mqd.coordinator.transaction import joint_records as records
from mqd.coordinator.transaction.events import NEED_PRODUCER_ID, Identity, JointResponse, WriteMarkers
from mqd.coordinator.transaction.joint_records import Child
from mqd.coordinator.transaction.joint_state import (
    CHILDREN_MAX,
    HELD_MAX,
    PREPARING,
    RETIREMENT_EPOCH,
    HeldRequest,
    JointState,
)
from mqd.coordinator.transaction.records import State
from mqd.protocol.errors import ErrorCode

JOINT_PREFIX = "mqd.joint."  # of the transactional ids of joint transactions
RUN_ID_CHARS_MAX = 100
TIMER = "due"

NONE = 0  # no error
FENCED = int(ErrorCode.PRODUCER_FENCED)
UNKNOWN_PRODUCER = int(ErrorCode.INVALID_PRODUCER_ID_MAPPING)
INVALID_STATE = int(ErrorCode.INVALID_TXN_STATE)
INVALID_REQUEST = int(ErrorCode.INVALID_REQUEST)
CONCURRENT = int(ErrorCode.CONCURRENT_TRANSACTIONS)
INVALID_TIMEOUT = int(ErrorCode.INVALID_TRANSACTION_TIMEOUT)
TOO_MANY = int(ErrorCode.POLICY_VIOLATION)


def is_valid_request(transactional_id: str, batch_id: int, run_id: str) -> bool:
    """Whether a request may have these values."""
    return transactional_id.startswith(JOINT_PREFIX) and batch_id >= 0 and 0 < len(run_id) <= RUN_ID_CHARS_MAX


class JointTransaction(JointState):
    """The core of one joint transactional id."""

    __slots__ = ()

    # -- called by the runtime ----------------------------------------------------------------------

    def handle(self, event: object, now_ms: int) -> list[Action]:
        actions: list[Action] = []
        getattr(self, _HANDLERS[type(event)])(event, now_ms, actions)
        self._arm(actions)
        return actions

    def on_loaded(self, now_ms: int) -> list[Action]:
        """Restarts the timeout, because writers could not reach this coordinator before the load."""
        self.start_ms, self.last_update_ms, self._last_activity_ms = (
            min(self.start_ms, now_ms),
            min(self.last_update_ms, now_ms),
            now_ms,
        )
        actions: list[Action] = []
        if self.state in PREPARING:
            self._write_markers(actions)
        self._arm(actions)
        return actions

    # -- children ----------------------------------------------------------------------------------

    def _on_enlist(self, event: events.Enlist, now_ms: int, actions: list[Action]) -> None:
        response = self._enlist(event, now_ms, actions)
        if response is not None:
            actions.append(Reply(event.request, response))

    def _enlist(self, event: events.Enlist, now_ms: int, actions: list[Action]) -> JointResponse | None:
        """Enlists a child, or handles its heartbeat. None: the response comes later."""
        if event.batch_id <= self.committed_batch_id:
            return self._response()  # J1
        if not 0 < event.timeout_ms <= self._settings.max_timeout_ms:
            return self._response(INVALID_TIMEOUT)
        if event.run_id in self.fenced_run_ids:
            return self._response(FENCED)  # J5
        is_current = (event.batch_id, event.run_id) == (self.batch_id, self.run_id)
        if event.producer_id >= 0:
            return self._heartbeat(event, is_current, now_ms)
        if self.state in PREPARING:
            return self._hold(event, now_ms, actions)
        if self.state == State.ONGOING and not is_current:
            return self._supersede(event, event.batch_id, event.run_id, now_ms, actions)
        return self._add_child(event, now_ms, actions)

    def _heartbeat(self, event: events.Enlist, is_current: bool, now_ms: int) -> JointResponse:
        child = self.children.get(event.producer_id)
        if (
            not is_current
            or self.state != State.ONGOING
            or child is None
            or not self._is_active(child)
            or child.epoch != event.producer_epoch
        ):
            return self._response(FENCED)
        self._last_activity_ms = now_ms
        return JointResponse(NONE, event.producer_id, event.producer_epoch, self.committed_batch_id)

    def _supersede(
        self, event: events.Request, batch_id: int, run_id: str, now_ms: int, actions: list[Action]
    ) -> JointResponse | None:
        """Handles a request of another batch or run while a transaction is open: aborts the open
        transaction, or refuses the request if its batch is older than the open one.
        """
        if batch_id < self.batch_id:
            return self._response(FENCED)
        self._fence_predecessor_of(run_id)
        self._decide(State.PREPARE_ABORT, now_ms, actions)
        if self.state in PREPARING:
            return self._hold(event, now_ms, actions)
        getattr(self, _HANDLERS[type(event)])(event, now_ms, actions)
        return None

    def _add_child(self, event: events.Enlist, now_ms: int, actions: list[Action]) -> JointResponse:
        if not self._idle_ids and event.spare_producer_id < 0:
            return self._response(NEED_PRODUCER_ID if len(self.children) < CHILDREN_MAX else TOO_MANY)
        begins_transaction = self.state != State.ONGOING
        if self._idle_ids:
            producer_id = self._idle_ids.pop()
            epoch = self._current_epoch(self.children[producer_id])
        else:
            producer_id, epoch = event.spare_producer_id, 0
        key_values: list[KeyValue] = []
        if begins_transaction:
            self._begin(event.batch_id, event.run_id, event.timeout_ms, now_ms)
            key_values.append(self._transaction_record(now_ms))
        self.children[producer_id] = Child(self.serial, epoch, {})
        self._active_ids.append(producer_id)
        self._last_activity_ms = now_ms
        key_values.append(self._child_record(producer_id))
        actions.append(Persist(tuple(key_values)))
        return JointResponse(NONE, producer_id, epoch, self.committed_batch_id)

    # -- partitions --------------------------------------------------------------------------------

    def _on_add_partitions(self, event: events.AddPartitions, now_ms: int, actions: list[Action]) -> None:
        error = self._producer_error(event.producer_id, event.producer_epoch)
        if error == NONE:
            child = self.children[event.producer_id]
            self._last_activity_ms = now_ms
            if not child.partitions.keys() >= set(event.partitions):
                child.partitions = child.partitions | dict.fromkeys(event.partitions)
                actions.append(Persist((self._child_record(event.producer_id),)))
        actions.append(Reply(event.request, error))

    def _on_verify_partitions(self, event: events.VerifyPartitions, now_ms: int, actions: list[Action]) -> None:
        error = self._producer_error(event.producer_id, event.producer_epoch)
        added = self.children[event.producer_id].partitions if error == NONE else {}
        actions.append(
            Reply(
                event.request,
                tuple(error or (NONE if partition in added else INVALID_STATE) for partition in event.partitions),
            )
        )

    def _producer_error(self, producer_id: int, epoch: int) -> int:
        child = self.children.get(producer_id)
        if child is None:
            return UNKNOWN_PRODUCER
        return NONE if self.state == State.ONGOING and self._is_active(child) and child.epoch == epoch else FENCED

    # -- the end -----------------------------------------------------------------------------------

    def _on_end_joint(self, event: events.EndJoint, now_ms: int, actions: list[Action]) -> None:
        handle_end = self._abort_any if not event.run_id else self._commit if event.committed else self._abort
        response = handle_end(event, now_ms, actions)
        if response is not None:
            actions.append(Reply(event.request, response))

    def _commit(self, event: events.EndJoint, now_ms: int, actions: list[Action]) -> JointResponse | None:
        if event.batch_id <= self.committed_batch_id:  # J1: already committed, whichever run sends the request
            return self._hold(event, now_ms, actions) if self.state == State.PREPARE_COMMIT else self._response()
        if event.run_id in self.fenced_run_ids:
            return self._response(FENCED)  # J5
        is_current = self.state == State.ONGOING and (event.batch_id, event.run_id) == (self.batch_id, self.run_id)
        if not is_current and event.winners:
            return self._response(INVALID_STATE)  # the winners' records are aborted
        if self.state in PREPARING:
            return self._hold(event, now_ms, actions)
        if self.state == State.ONGOING and not is_current:
            return self._supersede(event, event.batch_id, event.run_id, now_ms, actions)
        if not all(self._producer_error(producer_id, epoch) == NONE for producer_id, epoch in event.winners):
            return self._response(UNKNOWN_PRODUCER)  # J2
        if self.state != State.ONGOING:
            # a batch without records
            self._begin(event.batch_id, event.run_id, self.timeout_ms, now_ms)
        return self._finish(
            event, State.PREPARE_COMMIT, frozenset(producer_id for producer_id, _ in event.winners), now_ms, actions
        )

    def _abort(self, event: events.EndJoint, now_ms: int, actions: list[Action]) -> JointResponse | None:
        """A run that aborts is over, but its tasks may outlive it: a task that enlisted later would
        begin a transaction that is never ended, so the run is fenced (J5). Aborting a transaction
        that does not exist succeeds immediately.
        """
        if event.batch_id <= self.committed_batch_id:
            return self._response(INVALID_STATE)
        is_current_run = event.run_id == self.run_id
        if is_current_run and event.batch_id < self.batch_id:
            return self._response()
        is_newly_fenced = self._fence(event.run_id)
        if is_current_run and self.state == State.ONGOING:
            return self._abort_any(event, now_ms, actions)
        if is_newly_fenced:
            if self.serial == 0:
                self._begin(event.batch_id, event.run_id, self.timeout_ms, now_ms)
                self.state = State.COMPLETE_ABORT
            actions.append(Persist((self._transaction_record(now_ms),)))
        return self._abort_any(event, now_ms, actions) if is_current_run else self._response()

    def _abort_any(self, event: events.EndJoint, now_ms: int, actions: list[Action]) -> JointResponse | None:
        if self.state == State.ONGOING:
            if not event.run_id:
                self._fence_predecessor_of("")
            return self._finish(event, State.PREPARE_ABORT, frozenset(), now_ms, actions)
        return self._hold(event, now_ms, actions) if self.state in PREPARING else self._response()

    def _finish(
        self, event: events.Request, state: State, winners: frozenset[int], now_ms: int, actions: list[Action]
    ) -> JointResponse | None:
        self._decide(state, now_ms, actions, winners)
        return self._hold(event, now_ms, actions) if self.state in PREPARING else self._response()

    def _response(self, error: int = NONE) -> JointResponse:
        return JointResponse(error, committed_batch_id=self.committed_batch_id)

    def _decide(self, state: State, now_ms: int, actions: list[Action], winners: frozenset[int] = frozenset()) -> None:
        """Moves to a Prepare state or, if no child has written records, directly to Complete."""
        self.state, self.winners = state, winners
        if state == State.PREPARE_COMMIT:
            self.committed_batch_id = self.batch_id
        if any(self.children[producer_id].partitions for producer_id in self._active_ids):
            actions.append(Persist((self._transaction_record(now_ms),)))
            self._write_markers(actions)
        else:
            actions.append(Persist(self._complete(now_ms)))

    def _write_markers(self, actions: list[Action]) -> None:
        self._pending_attempts = set()
        for producer_id in self._active_ids:
            child = self.children[producer_id]
            if child.partitions:
                self._attempt += 1
                self._pending_attempts.add(self._attempt)
                actions.append(
                    WriteMarkers(
                        tuple(child.partitions),
                        producer_id,
                        child.epoch + 1,
                        producer_id in self.winners,
                        self._attempt,
                        is_bumped=True,
                    )
                )

    def _on_markers_written(self, event: events.MarkersWritten, now_ms: int, actions: list[Action]) -> None:
        """The waiting EndJoint is answered before the Complete record is written: the outcome does
        not depend on that record.
        """
        if self.state not in PREPARING or event.attempt not in self._pending_attempts:
            return
        self._pending_attempts.discard(event.attempt)
        if self._pending_attempts:
            return
        key_values = self._complete(now_ms)
        waiting_events, self._held = [held.event for held in self._held], []
        other_events = []
        for waiting in waiting_events:
            if type(waiting) is events.EndJoint and self._is_over(waiting):
                actions.append(Reply(waiting.request, self._response()))
            else:
                other_events.append(waiting)
        # If this record is lost, the markers are written again. Persists keep their order, so it
        # precedes the records of the events handled below.
        actions.append(Persist(key_values, is_lazy=True))
        for event_to_handle in other_events:
            getattr(self, _HANDLERS[type(event_to_handle)])(event_to_handle, now_ms, actions)

    def _complete(self, now_ms: int) -> tuple[KeyValue, ...]:
        """Moves to a Complete state, and returns the records to persist for it."""
        self.state = State.COMPLETE_COMMIT if self.state == State.PREPARE_COMMIT else State.COMPLETE_ABORT
        key_values = [self._transaction_record(now_ms)]
        for producer_id in self._active_ids:
            if self._current_epoch(self.children[producer_id]) >= RETIREMENT_EPOCH:
                del self.children[producer_id]
                key_values.append((records.CHILD.encode_key(self.transactional_id, producer_id), None))
            else:
                self._idle_ids.append(producer_id)
        self._active_ids = []
        return tuple(key_values)

    def _is_over(self, event: events.EndJoint) -> bool:
        """Whether this end is already done: a commit of a committed batch, or an abort of an
        aborted one.
        """
        if event.committed:
            return event.batch_id <= self.committed_batch_id
        return self.state == State.COMPLETE_ABORT or not event.run_id

    # -- requests of ordinary transactions --------------------------------------------------------

    def _refuse_ordinary(
        self, event: events.InitProducerId | events.EndTransaction, now_ms: int, actions: list[Action]
    ) -> None:
        """Refuses a request of an ordinary producer that uses a joint transactional id."""
        actions.append(Reply(event.request, Identity(INVALID_REQUEST)))

    def _on_abort_by_administrator(
        self, event: events.AbortByAdministrator, now_ms: int, actions: list[Action]
    ) -> None:
        """Aborts the whole transaction. One child's records cannot be aborted alone: its run may
        already have named it a winner.
        """
        child = self.children.get(event.producer_id)
        if child is None or not self._is_active(child):
            actions.append(Reply(event.request, UNKNOWN_PRODUCER if child is None else NONE))
            return
        if self.state == State.ONGOING:
            self._fence_predecessor_of("")
            self._decide(State.PREPARE_ABORT, now_ms, actions)
        if self.state in PREPARING:
            if self._hold(event, now_ms, actions) is not None:
                actions.append(Reply(event.request, CONCURRENT))
        else:
            actions.append(Reply(event.request, NONE))

    def _on_describe(self, event: events.Describe, now_ms: int, actions: list[Action]) -> None:
        actions.append(Reply(event.request, self.description()))

    # -- waiting and timers -----------------------------------------------------------------------

    def _hold(self, event: events.Request, now_ms: int, actions: list[Action]) -> JointResponse | None:
        """Keeps the request until the markers are written (J7). Returns the response if it cannot
        wait.
        """
        if len(self._held) >= HELD_MAX:
            return self._response_without_markers(event)
        wait_ms = self._settings.response_ms if type(event) is events.EndJoint else self._settings.hold_ms
        self._held.append(HeldRequest(now_ms + wait_ms, event))
        return None

    def _response_without_markers(self, event: events.Request) -> JointResponse:
        """The response to a request that cannot wait until the markers are written: they take too
        long, or too many requests wait. The outcome of an EndJoint may already be decided; other
        requests must be retried.
        """
        is_decided = type(event) is events.EndJoint and (
            event.batch_id <= self.committed_batch_id if event.committed else self.state == State.PREPARE_ABORT
        )
        return self._response(NONE if is_decided else CONCURRENT)

    def _on_timer_fired(self, event: TimerFired, now_ms: int, actions: list[Action]) -> None:
        self._armed_ms = None
        expired_events = [held.event for held in self._held if held.until_ms <= now_ms]
        self._held = [held for held in self._held if held.until_ms > now_ms]
        for waiting in expired_events:
            response = self._response_without_markers(waiting)
            actions.append(
                Reply(waiting.request, response.error if type(waiting) is events.AbortByAdministrator else response)
            )
        if self.state == State.ONGOING:
            if now_ms >= self._last_activity_ms + self.timeout_ms:
                self._decide(State.PREPARE_ABORT, now_ms, actions)  # J9
        elif (
            self.serial and self.state not in PREPARING and now_ms >= self.last_update_ms + self._settings.expiration_ms
        ):
            tombstones = [
                (self._key, None),
                *(
                    (records.CHILD.encode_key(self.transactional_id, producer_id), None)
                    for producer_id in self.children
                ),
            ]
            self.children.clear()
            self._forget()
            actions.append(Persist(tuple(tombstones)))

    def _due_ms(self) -> int | None:
        if self._held:
            return min(held.until_ms for held in self._held)
        if self.serial == 0 or self.state in PREPARING:
            return None
        return (
            self._last_activity_ms + self.timeout_ms
            if self.state == State.ONGOING
            else self.last_update_ms + self._settings.expiration_ms
        )

    def _arm(self, actions: list[Action]) -> None:
        """Arms the timer for the next due time. It may fire too early; it is then armed again."""
        due_ms = self._due_ms()
        if due_ms is not None and (self._armed_ms is None or due_ms < self._armed_ms):
            self._armed_ms = due_ms
            actions.append(Timer(TIMER, due_ms))


_HANDLERS: dict[type, str] = {
    events.Enlist: "_on_enlist",
    events.EndJoint: "_on_end_joint",
    events.AddPartitions: "_on_add_partitions",
    events.VerifyPartitions: "_on_verify_partitions",
    events.InitProducerId: "_refuse_ordinary",
    events.EndTransaction: "_refuse_ordinary",
    events.AbortByAdministrator: "_on_abort_by_administrator",
    events.MarkersWritten: "_on_markers_written",
    events.Describe: "_on_describe",
    TimerFired: "_on_timer_fired",
}
