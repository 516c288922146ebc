"""The core of one transactional id: its valid producer, the partitions of its transaction, and how
the transaction ends. Pure; time and producer ids are passed in.

    (none)                         InitProducerId -> Empty
    Empty                          first partition -> Ongoing
    Ongoing                        EndTxn -> PrepareCommit or PrepareAbort; timeout, fencing ->
                                   PrepareAbort
    PrepareCommit                  markers written -> CompleteCommit
    PrepareAbort                   markers written -> CompleteAbort
    CompleteCommit, CompleteAbort  InitProducerId -> Empty; first partition -> Ongoing
    Empty, CompleteCommit and CompleteAbort expire: a tombstone, and (none) again (Kafka: Dead).

The Prepare record is the decision: once it is in the log the markers follow, whichever processes
die. EndTxn is answered when the markers are written, so that committed records are readable when
the producer gets the response. After `response_ms` without markers it is answered anyway, because
the outcome can no longer change.

Client version 2 (KIP-890 part 2): every end bumps the producer epoch, so that a delayed or repeated
request of an ended transaction has an old epoch. When the epochs of a producer id run out, the end
assigns the next producer id. Client version 0: the epoch stays; only fencing bumps it. A
repeated EndTxn or AddPartitionsToTxn of such a client cannot be distinguished from one of its next
transaction. A repeated Produce can, because it is verified.

Fencing (a second InitProducerId, a timeout, an administrator) bumps the epoch by two: the retry of
an EndTxn is recognized by the epoch before the current one, and an EndTxn of a fenced producer must
not be mistaken for such a retry.

Invariants (check() asserts those of one state; the simulator those across transitions)
    T1  a transaction has partitions in Ongoing and the two Prepare states, and in no other state;
        an abort without partitions goes directly to CompleteAbort
    T2  for one producer id the epoch never falls; a new producer id begins at epoch 0; each
        producer id is used by only one transactional id
    T3  epoch 32767 is never sent to a client: it is reserved for fencing the producer that has
        32766
    T4  an EndTransaction of version 2 changes only the transaction of its own epoch; a repetition
        gets the same response until the epoch changes again
    T5  WriteMarkers comes only after the Persist of its Prepare record; the Complete record only
        after MarkersWritten with the attempt of the last WriteMarkers
    T6  every request is answered exactly once: immediately, when the markers are written, or when
        it has waited too long for them
    T7  requests wait only in a Prepare state
    T8  replaying the persisted records gives the same state (except `last_producer_epoch` after
        InitProducerId, which Kafka's schema cannot hold: a retry of that request across a restart
        is fenced)
    T9  a transaction is Ongoing no longer than its timeout
Bounds: HELD_MAX requests wait; further ones get CONCURRENT_TRANSACTIONS.
"""

from mqd.coordinator.actions import Action, Persist, Reply, Timer, TimerFired
from mqd.coordinator.transaction import events
from mqd.coordinator.transaction.events import NEED_PRODUCER_ID, TRANSACTIONS_V2, Identity, Partition, WriteMarkers
from mqd.coordinator.transaction.records import State
from mqd.coordinator.transaction.state import EPOCH_MAX, HELD_MAX, IDLE, PREPARING, HeldRequest, TransactionState
from mqd.protocol.errors import ErrorCode

TIMER = "due"

NONE = 0
FENCED = int(ErrorCode.PRODUCER_FENCED)
UNKNOWN_PRODUCER = int(ErrorCode.INVALID_PRODUCER_ID_MAPPING)
INVALID_STATE = int(ErrorCode.INVALID_TXN_STATE)
CONCURRENT = int(ErrorCode.CONCURRENT_TRANSACTIONS)
INVALID_TIMEOUT = int(ErrorCode.INVALID_TRANSACTION_TIMEOUT)


class Transaction(TransactionState):
    """The core of one transactional id."""

    __slots__ = ()

    # -- called by the runtime ----------------------------------------------------------------------

    def handle(self, event: object, now_ms: int) -> list[Action]:
        actions: list[Action] = []
        getattr(self, _HANDLERS[type(event)])(event, now_ms, actions)
        self._arm(actions)
        return actions

    def on_loaded(self, now_ms: int) -> list[Action]:
        """The clock may have been ahead when the log was written. A start time in the future is
        moved back to now; otherwise the transaction would outlive its timeout (T9).
        """
        self.start_ms, self.last_update_ms = min(self.start_ms, now_ms), min(self.last_update_ms, now_ms)
        actions: list[Action] = []
        if self.state in PREPARING:
            self._write_markers(actions)
        self._arm(actions)
        return actions

    # -- InitProducerId ----------------------------------------------------------------------------

    def _on_init_producer_id(self, event: events.InitProducerId, now_ms: int, actions: list[Action]) -> None:
        if not 0 < event.timeout_ms <= self._settings.max_timeout_ms:
            actions.append(Reply(event.request, Identity(INVALID_TIMEOUT)))
        elif self.producer_id < 0:
            self._assign_new_id(event, now_ms, actions, last_epoch=-1)
        elif not self._is_expected_producer(event):
            actions.append(Reply(event.request, Identity(FENCED)))
        elif self.state in PREPARING:
            self._hold(event, now_ms, actions)
        elif self.state == State.ONGOING:
            self._init_in_transaction(event, now_ms, actions)
        else:
            self._init_idle(event, now_ms, actions)

    def _is_expected_producer(self, event: events.InitProducerId) -> bool:
        """A recovering producer (KIP-360) must be the current one, or its predecessor that ran out
        of epochs and missed the response.
        """
        expected = event.expected_producer_id
        if expected < 0 or expected == self.producer_id:
            return True
        return expected == self.previous_producer_id and event.expected_producer_epoch >= EPOCH_MAX - 1

    def _init_in_transaction(self, event: events.InitProducerId, now_ms: int, actions: list[Action]) -> None:
        """Aborts the transaction first. A recovering producer must own the transaction: a delayed
        repetition of an earlier recovery aborts nothing.
        """
        if event.expected_producer_id >= 0 and (event.expected_producer_id, event.expected_producer_epoch) != (
            self.producer_id,
            self.producer_epoch,
        ):
            actions.append(Reply(event.request, Identity(FENCED)))
            return
        self._fence(
            now_ms, actions, last_epoch=event.expected_producer_epoch if event.expected_producer_id >= 0 else -1
        )
        self._hold(event, now_ms, actions)

    def _init_idle(self, event: events.InitProducerId, now_ms: int, actions: list[Action]) -> None:
        expected = event.expected_producer_epoch if event.expected_producer_id >= 0 else None
        epoch = self.producer_epoch
        is_repeated = expected is not None and expected != epoch and expected == self.last_producer_epoch
        if expected is not None and expected != epoch and not is_repeated:
            actions.append(Reply(event.request, Identity(FENCED)))
        elif epoch == EPOCH_MAX or (epoch == EPOCH_MAX - 1 and not is_repeated):
            self._assign_new_id(event, now_ms, actions, last_epoch=-1 if expected is None else expected)
        elif is_repeated:
            self._initialize(event, now_ms, actions, self.producer_id, epoch, self.last_producer_epoch)
        else:
            self._initialize(event, now_ms, actions, self.producer_id, epoch + 1, -1 if expected is None else epoch)

    def _assign_new_id(self, event: events.InitProducerId, now_ms: int, actions: list[Action], last_epoch: int) -> None:
        if event.spare_producer_id < 0:
            actions.append(Reply(event.request, Identity(NEED_PRODUCER_ID)))
        else:
            self._initialize(event, now_ms, actions, event.spare_producer_id, 0, last_epoch)

    def _initialize(
        self,
        event: events.InitProducerId,
        now_ms: int,
        actions: list[Action],
        producer_id: int,
        epoch: int,
        last_epoch: int,
    ) -> None:
        self.previous_producer_id = self.producer_id
        self.producer_id, self.producer_epoch, self.last_producer_epoch = producer_id, epoch, last_epoch
        self.state, self.timeout_ms, self.start_ms = State.EMPTY, event.timeout_ms, -1
        self._persist(now_ms, actions)
        actions.append(Reply(event.request, Identity(NONE, producer_id, epoch)))

    # -- partitions --------------------------------------------------------------------------------

    def _on_add_partitions(self, event: events.AddPartitions, now_ms: int, actions: list[Action]) -> None:
        error = self._producer_error(event.producer_id, event.producer_epoch)
        if error == CONCURRENT and event.client_version >= TRANSACTIONS_V2:
            self._hold(event, now_ms, actions)  # it can only belong to the next transaction
            return
        if error == NONE:
            added = [partition for partition in event.partitions if partition not in self.partitions]
            if added:
                self._add(added, event.client_version, now_ms, actions)
        actions.append(Reply(event.request, error))

    def _add(self, added: list[Partition], client_version: int, now_ms: int, actions: list[Action]) -> None:
        if self.state != State.ONGOING:
            self.state, self.start_ms = State.ONGOING, now_ms
        self.client_version = client_version
        self.previous_producer_id = self.producer_id
        self._set_partitions(self.partitions | dict.fromkeys(added))
        self._persist(now_ms, actions)

    def _on_verify_partitions(self, event: events.VerifyPartitions, now_ms: int, actions: list[Action]) -> None:
        error = self._producer_error(event.producer_id, event.producer_epoch)
        added = self.partitions  # empty unless in a transaction
        actions.append(
            Reply(
                event.request,
                tuple(error or (NONE if partition in added else INVALID_STATE) for partition in event.partitions),
            )
        )

    def _producer_error(self, producer_id: int, epoch: int) -> int:
        """Returns NONE for the current producer, CONCURRENT for the current producer while its last
        transaction is ending, and an error for any other producer.
        """
        if self.producer_id < 0:
            return UNKNOWN_PRODUCER
        if self.state in PREPARING:
            if (producer_id, epoch) == self._identity():
                return CONCURRENT
            return FENCED if producer_id == self.producer_id else UNKNOWN_PRODUCER
        if producer_id != self.producer_id:
            return UNKNOWN_PRODUCER
        return NONE if epoch == self.producer_epoch < EPOCH_MAX else FENCED  # T3

    def _identity(self) -> tuple[int, int]:
        """The identity that the client uses in its next transaction."""
        return (self.next_producer_id, 0) if self.next_producer_id >= 0 else (self.producer_id, self.producer_epoch)

    # -- the end -----------------------------------------------------------------------------------

    def _on_end_transaction(self, event: events.EndTransaction, now_ms: int, actions: list[Action]) -> None:
        error = (
            UNKNOWN_PRODUCER
            if self.producer_id < 0
            else (
                self._end_version_2(event, now_ms, actions)
                if event.client_version >= TRANSACTIONS_V2
                else self._end_version_0(event, now_ms, actions)
            )
        )
        if error is not None:
            actions.append(
                Reply(event.request, Identity(error, *self._identity()) if error == NONE else Identity(error))
            )

    def _end_version_2(self, event: events.EndTransaction, now_ms: int, actions: list[Action]) -> int | None:
        """Returns an error code, or None if the response comes later. A repeated request has the
        epoch before the current one (T4).
        """
        requested = (event.producer_id, event.producer_epoch)
        is_current = requested == self._identity() and event.producer_epoch < EPOCH_MAX  # T3
        is_repeated = self._has_ended(event.producer_id, event.producer_epoch)
        if not is_current and not is_repeated:
            return FENCED if event.producer_id == self.producer_id else UNKNOWN_PRODUCER
        if self.state == State.ONGOING:
            return self._prepare(event, now_ms, actions) if is_current else FENCED
        if is_repeated:
            return FENCED if self.state == State.EMPTY else self._on_repetition(event, now_ms, actions)
        if self.state in PREPARING:
            self._hold(event, now_ms, actions)  # belongs to the next transaction
            return None
        return INVALID_STATE if event.committed else self._abort_without_transaction(event, now_ms, actions)

    def _has_ended(self, producer_id: int, epoch: int) -> bool:
        """Whether a client with this identity ended its transaction, and the current identity is
        the one it got (or will get) in return.
        """
        if producer_id == self.producer_id:
            return epoch + 1 == self.producer_epoch and (self.producer_epoch < EPOCH_MAX or self.next_producer_id >= 0)
        return producer_id == self.previous_producer_id and epoch == EPOCH_MAX - 1 and self.producer_epoch == 0

    def _end_version_0(self, event: events.EndTransaction, now_ms: int, actions: list[Action]) -> int | None:
        if event.producer_id != self.producer_id:
            return UNKNOWN_PRODUCER
        if event.producer_epoch != self.producer_epoch:
            return FENCED
        if self.state == State.ONGOING:
            return self._prepare(event, now_ms, actions)
        return INVALID_STATE if self.state == State.EMPTY else self._on_repetition(event, now_ms, actions)

    def _on_repetition(self, event: events.EndTransaction, now_ms: int, actions: list[Action]) -> int | None:
        """In Prepare and Complete states a repeated end with the same outcome gets the same response."""
        if event.committed != (self.state in (State.PREPARE_COMMIT, State.COMPLETE_COMMIT)):
            return INVALID_STATE
        if self.state in PREPARING:
            self._hold(event, now_ms, actions)
            return None
        return NONE

    def _prepare(self, event: events.EndTransaction, now_ms: int, actions: list[Action]) -> int | None:
        if event.client_version >= TRANSACTIONS_V2:
            if self.producer_epoch >= EPOCH_MAX - 1:
                if event.spare_producer_id < 0:
                    return NEED_PRODUCER_ID
                self.next_producer_id = event.spare_producer_id
            self.last_producer_epoch = self.producer_epoch
            self.producer_epoch += 1
        self.client_version = event.client_version
        self._decide(State.PREPARE_COMMIT if event.committed else State.PREPARE_ABORT, now_ms, actions)
        self._hold(event, now_ms, actions)
        return None

    def _abort_without_transaction(self, event: events.EndTransaction, now_ms: int, actions: list[Action]) -> int:
        """Handles an abort without a transaction: a client of version 2 does not know whether any
        of its records arrived. From now on they are refused.
        """
        self.previous_producer_id = self.producer_id
        if self.producer_epoch >= EPOCH_MAX - 1:
            if event.spare_producer_id < 0:
                return NEED_PRODUCER_ID
            self.producer_id, self.producer_epoch, self.last_producer_epoch = (
                event.spare_producer_id,
                0,
                self.producer_epoch,
            )
        else:
            self.last_producer_epoch = self.producer_epoch
            self.producer_epoch += 1
        self.state, self.client_version, self.start_ms = State.COMPLETE_ABORT, event.client_version, now_ms
        self._persist(now_ms, actions)
        return NONE

    def _fence(self, now_ms: int, actions: list[Action], last_epoch: int = -1) -> None:
        """Aborts the ongoing transaction without its producer's request, and fences the producer."""
        self.producer_epoch = min(self.producer_epoch + 2, EPOCH_MAX)
        self.last_producer_epoch = last_epoch
        self.client_version = TRANSACTIONS_V2
        self._decide(State.PREPARE_ABORT, now_ms, actions)

    def _decide(self, state: State, now_ms: int, actions: list[Action]) -> None:
        self.state = state
        self.previous_producer_id = self.producer_id
        self._persist(now_ms, actions)
        self._write_markers(actions)

    def _write_markers(self, actions: list[Action]) -> None:
        self._attempt += 1
        committed = self.state == State.PREPARE_COMMIT
        is_bumped = self.client_version >= TRANSACTIONS_V2  # fencing also bumps the epoch
        actions.append(
            WriteMarkers(
                tuple(self.partitions), self.producer_id, self.producer_epoch, committed, self._attempt, is_bumped
            )
        )

    def _on_markers_written(self, event: events.MarkersWritten, now_ms: int, actions: list[Action]) -> None:
        """The waiting EndTxn is answered before the Complete record is written: the outcome does
        not depend on that record.
        """
        if self.state not in PREPARING or event.attempt != self._attempt:
            return
        self.previous_producer_id = self.producer_id
        if self.next_producer_id >= 0:
            self.producer_id, self.producer_epoch, self.next_producer_id = self.next_producer_id, 0, -1
        self.state = State.COMPLETE_COMMIT if self.state == State.PREPARE_COMMIT else State.COMPLETE_ABORT
        self._set_partitions({})
        held, self._held = self._held, []
        other_events = []
        for waiting in held:
            if type(waiting.event) is events.EndTransaction and self._respond_to_end(waiting.event, actions):
                continue
            other_events.append(waiting.event)
        # If this record is lost, the markers are written again. Persists keep their order, so it
        # precedes the records of the events handled below.
        self._persist(now_ms, actions, is_lazy=True)
        for event_to_handle in other_events:
            getattr(self, _HANDLERS[type(event_to_handle)])(event_to_handle, now_ms, actions)

    def _respond_to_end(self, event: events.EndTransaction, actions: list[Action]) -> bool:
        """Responds if the request ended this transaction. False: it belongs to the next one."""
        requested = (event.producer_id, event.producer_epoch)
        if event.client_version >= TRANSACTIONS_V2 and not self._has_ended(*requested):
            return False
        actions.append(Reply(event.request, Identity(NONE, *self._identity())))
        return True

    def _on_abort_by_administrator(
        self, event: events.AbortByAdministrator, now_ms: int, actions: list[Action]
    ) -> None:
        if event.producer_id != self.producer_id:
            actions.append(
                Reply(
                    event.request, UNKNOWN_PRODUCER if self.state in PREPARING or self.state == State.ONGOING else NONE
                )
            )
        elif self.state == State.ONGOING:
            self._fence(now_ms, actions)
            self._hold(event, now_ms, actions)
        elif self.state in PREPARING:
            self._hold(event, now_ms, actions)
        else:
            actions.append(Reply(event.request, NONE))

    def _on_describe(self, event: events.Describe, now_ms: int, actions: list[Action]) -> None:
        actions.append(Reply(event.request, self.description()))

    # -- waiting and timers -----------------------------------------------------------------------

    def _hold(self, event: events.Request, now_ms: int, actions: list[Action]) -> None:
        """Keeps the request until the markers are written (T7)."""
        if len(self._held) >= HELD_MAX:
            self._give_up(event, actions)
            return
        wait_ms = self._settings.response_ms if type(event) is events.EndTransaction else self._settings.hold_ms
        self._held.append(HeldRequest(now_ms + wait_ms, event))

    def _give_up(self, event: events.Request, actions: list[Action]) -> None:
        """Answers a request that cannot wait until the markers are written: they take too long, or
        too many requests wait. If it is an EndTxn of the transaction that is ending, the outcome is
        already decided; other requests must be retried.
        """
        if type(event) is events.EndTransaction:
            is_decided = event.client_version < TRANSACTIONS_V2 or self._has_ended(
                event.producer_id, event.producer_epoch
            )
            actions.append(
                Reply(event.request, Identity(NONE, *self._identity()) if is_decided else Identity(CONCURRENT))
            )
        elif type(event) is events.InitProducerId:
            actions.append(Reply(event.request, Identity(CONCURRENT)))
        else:
            actions.append(Reply(event.request, CONCURRENT))

    def _on_timer_fired(self, event: TimerFired, now_ms: int, actions: list[Action]) -> None:
        self._armed_ms = None
        if self._held:
            expired = [held for held in self._held if held.until_ms <= now_ms]
            self._held = [held for held in self._held if held.until_ms > now_ms]
            for held in expired:
                self._give_up(held.event, actions)
        if self.producer_id < 0:
            return
        if self.state == State.ONGOING:
            if now_ms >= self.start_ms + self.timeout_ms:
                self._fence(now_ms, actions)  # T9
        elif self.state in IDLE and now_ms >= self.last_update_ms + self._settings.expiration_ms:
            self._forget()
            actions.append(Persist(((self._key, None),)))

    def _due_ms(self) -> int | None:
        if self._held:
            return min(held.until_ms for held in self._held)
        if self.producer_id < 0 or self.state in PREPARING:
            return None
        return (
            self.start_ms + self.timeout_ms
            if self.state == State.ONGOING
            else self.last_update_ms + self._settings.expiration_ms
        )

    def _arm(self, actions: list[Action]) -> None:
        """Arms the timer for the next due time. It may fire too early and is then armed again,
        which is cheaper than moving it with every transaction.
        """
        due_ms = self._due_ms()
        if due_ms is not None and (self._armed_ms is None or due_ms < self._armed_ms):
            self._armed_ms = due_ms
            actions.append(Timer(TIMER, due_ms))


_HANDLERS: dict[type, str] = {
    events.InitProducerId: "_on_init_producer_id",
    events.AddPartitions: "_on_add_partitions",
    events.VerifyPartitions: "_on_verify_partitions",
    events.EndTransaction: "_on_end_transaction",
    events.AbortByAdministrator: "_on_abort_by_administrator",
    events.MarkersWritten: "_on_markers_written",
    events.Describe: "_on_describe",
    TimerFired: "_on_timer_fired",
}
