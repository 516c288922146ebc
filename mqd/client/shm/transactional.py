"""Transactions of the producer over shared memory (KIP-98). Version 2 (KIP-890) is used if the
broker's feature transaction.version is 2.

    READY -> OPEN -> ENDING (commit or abort) -> READY
    BROKEN       the transaction must be aborted; a fatal error ends the producer instead
    UNDECIDED    a commit was abandoned before its outcome was known: no more records are written, and
                 an abort may find that the coordinator has committed

1. A record is accepted only while OPEN, and reaches the C core only while OPEN: when a transaction
   ends, no staged records remain.
2. Version 2: writing to a partition adds it to the transaction; ending the transaction returns the
   next epoch, in which sequences start from 0. Version 1: all partitions of a topic are added before
   the first record is sent to one of them. This takes only one request, but every partition gets
   a marker.
3. After an abort, even one that came too late, the sequences of dropped records are missing:
   version 1 requests the next epoch, version 2 always gets it.
4. Requests without a response are repeated: all of them are idempotent.

Errors have librdkafka's flags: txn_requires_abort(), fatal(), retriable() of the KafkaError. Methods
block only the calling thread.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from typing import Any

from mqd.client import requests
from mqd.client.messages import GroupMetadata, KafkaError, KafkaException, broker_error, failure, local_error
from mqd.native import NativeError
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    FindCoordinatorRequest,
    TxnOffsetCommitRequest,
)

_NEVER = float("inf")
_RETRY_S = 0.02
# How long a commit of offsets is retried while the broker does not know one of the topics, which may
# be new. Each retry writes the offsets of the other topics again.
_UNKNOWN_TOPIC_S, _UNKNOWN_TOPIC_RETRY_S = 5.0, 0.25
_RETRIED = frozenset(
    {
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.NOT_COORDINATOR,
        ErrorCode.CONCURRENT_TRANSACTIONS,
        ErrorCode.REQUEST_TIMED_OUT,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.NETWORK_EXCEPTION,
        ErrorCode.LEADER_NOT_AVAILABLE,
    }
)
_FENCED = frozenset({ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.PRODUCER_FENCED})
_ABORTABLE = frozenset(
    {
        ErrorCode.TRANSACTION_ABORTABLE,
        ErrorCode.INVALID_PRODUCER_ID_MAPPING,
        ErrorCode.UNKNOWN_PRODUCER_ID,
        ErrorCode.GROUP_AUTHORIZATION_FAILED,
        ErrorCode.TOPIC_AUTHORIZATION_FAILED,
        ErrorCode.ILLEGAL_GENERATION,
        ErrorCode.UNKNOWN_MEMBER_ID,
        ErrorCode.FENCED_INSTANCE_ID,
        ErrorCode.STALE_MEMBER_EPOCH,
        ErrorCode.FENCED_MEMBER_EPOCH,
        ErrorCode.OFFSET_METADATA_TOO_LARGE,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    }
)
_COMMITTED = ErrorCode.INVALID_TXN_STATE  # the response to an abort after a commit


class _CommittedError(KafkaException):
    """Raised by an abort that came too late: the coordinator has decided to commit."""


class State(enum.Enum):
    UNINITIALIZED = "init_transactions() has not been called"
    READY = "no transaction is open: begin_transaction() first"
    OPEN = "a transaction is open"
    BROKEN = "the transaction has failed: abort_transaction(), then begin again"
    ENDING = "the transaction is being ended"
    UNDECIDED = "the outcome of commit_transaction() is not known: call it again"


class _TransactionState:
    """The state of one transaction."""

    def __init__(self) -> None:
        self.broken_by: KafkaError | None = None
        self.may_have_written = False  # records or offsets may have reached the broker
        # version 1: topic -> how many of its partitions were added
        self.added_topics: dict[str, int] = {}
        self.topics_being_added: set[str] = set()
        # version 1: a request was sent that makes the coordinator begin the transaction
        self.may_have_begun = False
        self.added_groups: set[str] = set()  # version 1: groups whose offsets partition was added
        # topics of committed offsets that the broker does not know -> time.monotonic() of the first
        # response that said so
        self.unknown_since: dict[str, float] = {}
        self.commit_requested = False  # the coordinator may have decided to commit
        # an abort has begun and may have dropped records: in version 1 the next transaction needs
        # another epoch, even if this transaction is committed after all
        self.needs_new_epoch = False
        # whether the coordinator has committed (True) or aborted (False) the transaction; None: neither yet
        self.committed: bool | None = None
        # the identity for the next transaction; None = not known yet, or unchanged
        self.next_identity: tuple[int, int] | None = None


class Transactions:
    """`enabled`: transactional.id is set."""

    def __init__(self, producer: Any) -> None:
        self._producer = producer
        self._id: str | None = producer.config["transactional.id"] or None
        self.enabled = self._id is not None
        self.state = State.UNINITIALIZED
        self._current = _TransactionState()
        self._producer_id, self._producer_epoch = -1, -1
        self._uses_version_2 = producer.attachment.api.supports_transactions_v2
        self._ending_calls: set[object] = set()  # calls that are ending a transaction
        if self.enabled:
            producer.hold_reason = State.UNINITIALIZED.value

    # -- for the producer --------------------------------------------------------------------------

    def require_may_produce(self) -> None:
        if self.enabled and self.state is not State.OPEN:
            raise failure(KafkaError._STATE, f"Unable to produce message: Local: Erroneous state: {self.state.value}")

    @property
    def is_broken(self) -> bool:
        """Whether the transaction must be aborted; then no more of its records are written."""
        return self.state is State.BROKEN

    def note_write(self) -> None:
        self._current.may_have_written = True

    def may_write(self, stage: Any) -> bool:
        """Whether records of the stage may be sent. False: no transaction is open, or the topic's
        partitions are still being added; the stage is handed over again once they have been.
        """
        if not self.enabled:
            return True
        if self.state is not State.OPEN:
            return False
        if self._uses_version_2 or stage.partition_count <= self._current.added_topics.get(stage.topic, 0):
            return True
        if stage.topic not in self._current.topics_being_added:
            self._add_topic(stage)
        return False

    def mark_broken(self, error: KafkaError) -> None:
        """Marks the transaction as broken: a record or a partition could not be added to it."""
        if (
            self.enabled
            and self.state in (State.OPEN, State.ENDING, State.UNDECIDED)
            and self._current.broken_by is None
        ):
            self._current.broken_by = error
            if self.state is not State.ENDING:
                self.state = State.BROKEN
            self._stop_staging()
            for stage in self._producer.stages.values():
                self._producer.fail_entries(stage, len(stage.entries), local_error(KafkaError._PURGE_QUEUE))

    def on_close(self, wait_without_broker_s: float) -> None:
        """Aborts the open transaction. While no broker is attached, waits for at most `wait_without_broker_s`."""
        if self.enabled and self.state in (State.OPEN, State.BROKEN, State.UNDECIDED, State.ENDING):
            timeout = self._producer.config["transaction.timeout.ms"] / 1000
            try:
                self.abort(timeout if self._producer.attachment.attached else min(timeout, wait_without_broker_s))
            except KafkaException:
                # another call is ending the transaction, or the coordinator will end it after
                # transaction.timeout.ms
                pass

    def _stop_staging(self) -> None:
        for stage in self._producer.stages.values():
            stage.limit = 0

    # -- methods for the application ---------------------------------------------------------------

    def init(self, timeout: float) -> None:
        self._require_enabled()
        deadline = _deadline(timeout)
        with self._producer.attachment.lock:
            if self.state is not State.UNINITIALIZED:
                raise failure(KafkaError._STATE, "init_transactions() has been called already")
        self._request(
            requests.FIND_COORDINATOR, 3, lambda: FindCoordinatorRequest(key=self._id or "", key_type=1), deadline
        )
        identity = self._init_identity(-1, -1, deadline)
        with self._producer.attachment.lock:
            self._set_identity(*identity)
            self.state = State.READY

    def begin(self) -> None:
        self._require_enabled()
        with self._producer.attachment.lock:
            self._require(State.READY)
            self._current = _TransactionState()
            self.state = State.OPEN

    def send_offsets(self, positions: Any, group_metadata: Any, timeout: float) -> None:
        self._require_enabled()
        group = GroupMetadata.read(group_metadata)
        deadline = _deadline(timeout)
        offsets = [position for position in positions if position.offset >= 0]
        with self._producer.attachment.lock:
            self._require(State.OPEN)
        if not offsets:
            return
        if not self._uses_version_2 and group.group_id not in self._current.added_groups:
            self._current.may_have_begun = True
            self._request(
                requests.ADD_OFFSETS_TO_TXN,
                None,
                lambda: AddOffsetsToTxnRequest(**self._identity_fields(), group_id=group.group_id),
                deadline,
            )
            self._current.added_groups.add(group.group_id)
        self._current.may_have_written = True
        self._request(requests.TXN_OFFSET_COMMIT, None, lambda: self._offset_commit(offsets, group), deadline)

    def commit(self, timeout: float) -> None:
        self._require_enabled()
        deadline, this_call = _deadline(timeout), object()
        with self._producer.attachment.lock:
            self._require(State.OPEN, State.UNDECIDED)
        undelivered = self._producer.flush(_remaining_s(deadline))
        try:
            with self._producer.attachment.lock:
                self._require(State.OPEN, State.UNDECIDED)
                if undelivered:
                    raise failure(
                        KafkaError._TIMED_OUT,
                        f"{undelivered} records are not delivered yet: call commit_transaction() again",
                        retriable=True,
                    )
                self._start_ending(this_call)
            self._carry_out_end(True, deadline)
        finally:
            self._ending_calls.discard(this_call)

    def abort(self, timeout: float) -> None:
        self._require_enabled()
        deadline, this_call = _deadline(timeout), object()
        try:
            with self._producer.attachment.lock:
                if self.state is State.ENDING and self._ending_calls:
                    raise failure(
                        KafkaError._STATE,
                        "the transaction is being ended by another thread, or by the call that this signal interrupted",
                    )
                if self.state not in (State.BROKEN, State.ENDING):
                    self._require(State.OPEN, State.UNDECIDED)
                self._start_ending(this_call)
            self._carry_out_end(False, deadline)
        finally:
            self._ending_calls.discard(this_call)

    def _start_ending(self, call: object) -> None:
        """Registers the call and sets the state; lock held. Later, the state ENDING without a registered
        call means that Ctrl-C has interrupted the call.
        """
        self._ending_calls.add(call)
        self.state = State.ENDING

    def _carry_out_end(self, commit: bool, deadline: float) -> None:
        try:
            with self._producer.attachment.lock:
                self._stop_staging()
            if not commit:
                self._producer.purge()
            self._end_transaction(commit, deadline)
            with self._producer.attachment.lock:
                if self._current.next_identity is not None:
                    self._set_identity(*self._current.next_identity)
                self._stop_staging()
                self.state = State.READY
        except BaseException as problem:
            with self._producer.attachment.lock:
                self._stop_staging()  # Ctrl-C may have come before _stop_staging() above
                if self.state is not State.ENDING:
                    pass  # Ctrl-C came after the end
                elif isinstance(problem, _CommittedError):
                    self.state, self._current.broken_by = State.UNDECIDED, None
                # the outcome is not known (also after Ctrl-C): the method may be called again
                elif not isinstance(problem, KafkaException) or problem.args[0].retriable():
                    self.state = State.UNDECIDED if commit and self._current.broken_by is None else State.BROKEN
                elif self._producer.fatal is None:
                    self.state = State.BROKEN
                    self._current.broken_by = problem.args[0]
            raise

    def _end_transaction(self, commit: bool, deadline: float) -> None:
        """Carries out the steps with the coordinator that have not been done yet."""
        has_begun = self._current.may_have_written or self._current.added_topics
        if not has_begun and not self._current.may_have_begun:
            return
        if not has_begun:
            # Nothing was written. The request for the next epoch ends what the coordinator may have
            # begun; EndTxn would be refused if it has begun nothing.
            self._current.needs_new_epoch, self._current.committed = True, commit
        # set before _wait_until_drained(), which makes the C core discard the sequences
        self._current.needs_new_epoch |= not commit
        if not commit and not self._wait_until_drained(deadline):
            raise failure(
                KafkaError._TIMED_OUT,
                "the broker has not responded to all batches: call abort_transaction() again",
                retriable=True,
            )
        if self._current.committed is None:
            response = self._request_end(commit, deadline)
            if self._uses_version_2:
                self._current.next_identity = response.producer_id, response.producer_epoch
            self._current.committed = commit
        elif self._current.committed is not commit:
            raise (
                _too_late_error()
                if self._current.committed
                else failure(KafkaError._STATE, "the transaction has been aborted")
            )
        if self._current.needs_new_epoch and self._current.next_identity is None:
            self._current.next_identity = self._init_identity(self._producer_id, self._producer_epoch, deadline)

    def _request_end(self, commit: bool, deadline: float) -> Any:
        self._current.commit_requested |= commit
        expected_error = _COMMITTED if self._current.commit_requested and not commit else 0
        response = self._request(
            requests.END_TXN,
            None,
            lambda: EndTxnRequest(**self._identity_fields(), committed=commit),
            deadline,
            expected_error,
        )
        if response.error_code:
            raise _too_late_error()
        return response

    def _wait_until_drained(self, deadline: float) -> bool:
        """Waits until all sent batches have a response; returns False at the deadline. A batch that the
        broker receives later could become part of the next transaction.
        """
        producer = self._producer
        return producer.attachment.wait_for(
            lambda: (
                not producer.attachment.attached or self._set_native_identity(self._producer_id, self._producer_epoch)
            ),
            _remaining_s(deadline),
        )

    # -- requests ----------------------------------------------------------------------------------

    def _init_identity(self, producer_id: int, producer_epoch: int, deadline: float) -> tuple[int, int]:
        timeout_ms = self._producer.config["transaction.timeout.ms"]
        response = self._request(
            requests.INIT_PRODUCER_ID,
            None,
            lambda: requests.init_producer_id_request(self._id, timeout_ms, producer_id, producer_epoch),
            deadline,
        )
        return response.producer_id, response.producer_epoch

    def _set_identity(self, producer_id: int, producer_epoch: int) -> None:
        self._producer_id, self._producer_epoch = producer_id, producer_epoch
        self._set_native_identity(producer_id, producer_epoch)
        self._producer.hold(None)
        self._stop_staging()

    def _set_native_identity(self, producer_id: int, producer_epoch: int) -> bool:
        """Sets the C core's identity. False: not set, because a batch has no response yet."""
        try:
            self._producer.native.set_identity(producer_id, producer_epoch)
        except NativeError:
            return False
        return True

    def _identity_fields(self) -> dict[str, Any]:
        return {"transactional_id": self._id, "producer_id": self._producer_id, "producer_epoch": self._producer_epoch}

    def _offset_commit(self, offsets: list[Any], group: GroupMetadata) -> TxnOffsetCommitRequest:
        topics: dict[str, Any] = {}
        for position in offsets:
            topic = topics.setdefault(position.topic, TxnOffsetCommitRequest.Topic(name=position.topic, partitions=[]))
            epoch = getattr(position, "leader_epoch", None)
            topic.partitions.append(
                TxnOffsetCommitRequest.Partition(
                    partition_index=position.partition,
                    committed_offset=position.offset,
                    committed_leader_epoch=-1 if epoch is None else epoch,
                    committed_metadata=getattr(position, "metadata", None) or "",
                )
            )
        return TxnOffsetCommitRequest(
            **self._identity_fields(),
            group_id=group.group_id,
            generation_id=group.generation_id,
            member_id=group.member_id,
            group_instance_id=group.group_instance_id,
            topics=list(topics.values()),
        )

    def _request(
        self,
        api_key: int,
        version_max: int | None,
        message: Callable[[], Any],
        deadline: float,
        expected_error: int = 0,
    ) -> Any:
        """Sends a request, with retries, and returns its response, which has no error or
        `expected_error`. Raises KafkaException with librdkafka's flags.
        """
        attachment = self._producer.attachment
        while True:
            self._require_alive()
            self._producer.require_usable()
            remaining_s = _remaining_s(deadline)
            version = (
                attachment.api.pick_transactional(api_key, self._uses_version_2)
                if version_max is None
                else attachment.api.pick(api_key, version_max)
            )
            problem, response = None, None
            try:
                response = attachment.request(
                    api_key,
                    version,
                    message(),
                    min(remaining_s, attachment.request_timeout_s) if remaining_s >= 0 else -1,
                )
            except KafkaException as error:
                problem = error.args[0]
                if not problem.retriable():
                    raise
            code = _first_error(response) if response is not None else 0
            is_unknown_topic = code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION and api_key == requests.TXN_OFFSET_COMMIT
            is_given_up = api_key == requests.TXN_OFFSET_COMMIT and self._is_unknown_too_long(response, problem)
            if response is not None and code in (0, expected_error):
                return response
            if (problem is None and code not in _RETRIED) or is_given_up:
                raise KafkaException(
                    self._handle_error(
                        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if is_given_up and code in _RETRIED else code, api_key
                    )
                )
            retry_s = _UNKNOWN_TOPIC_RETRY_S if is_unknown_topic else _RETRY_S
            if time.monotonic() + retry_s >= deadline:
                reason = problem.str() if problem is not None else broker_error(code).str()
                raise failure(
                    KafkaError._TIMED_OUT, f"no outcome in time ({reason}): call the method again", retriable=True
                )
            attachment.wait_for(lambda: False, retry_s)

    def _is_unknown_too_long(self, response: Any, problem: KafkaError | None) -> bool:
        """Whether, after a TxnOffsetCommit, one of its topics has been unknown for too long."""
        if response is None:
            if problem is not None and problem.code() != KafkaError._TIMED_OUT:
                self._current.unknown_since.clear()
            return False
        now = time.monotonic()
        for topic in response.topics:
            if any(partition.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION for partition in topic.partitions):
                self._current.unknown_since.setdefault(topic.name, now)
            else:
                self._current.unknown_since.pop(topic.name, None)
        return any(
            now - self._current.unknown_since.get(topic.name, now) >= _UNKNOWN_TOPIC_S for topic in response.topics
        )

    def _handle_error(self, code: int, api_key: int) -> KafkaError:
        """Marks the transaction as broken or the producer as failed, according to the error code; returns
        the error.
        """
        if code in _FENCED:
            error = local_error(KafkaError._FENCED, "Local: a newer producer uses this transactional.id", fatal=True)
            with self._producer.attachment.lock:
                self._producer.set_fatal(error)
            return error
        if code in _ABORTABLE and api_key != requests.INIT_PRODUCER_ID:
            error = broker_error(code, abort=True)
            with self._producer.attachment.lock:
                self.mark_broken(error)
            return error
        error = broker_error(code, fatal=True)
        with self._producer.attachment.lock:
            self._producer.set_fatal(error)
        return error

    # -- version 1: adding a topic -----------------------------------------------------------------

    def _add_topic(self, stage: Any) -> None:
        """Requests to add all partitions of the topic, without waiting; lock held. An error in the
        response breaks only the transaction for which the request was sent, and only while that
        transaction is open: later, the broker may refuse the request because its epoch is old.
        """
        current, attachment, partition_count = self._current, self._producer.attachment, stage.partition_count
        current.topics_being_added.add(stage.topic)
        current.may_have_begun = True
        identity = self._identity_fields()
        request = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=identity["transactional_id"],
            v3_and_below_producer_id=identity["producer_id"],
            v3_and_below_producer_epoch=identity["producer_epoch"],
            v3_and_below_topics=[
                AddPartitionsToTxnRequest.Topic(name=stage.topic, partitions=list(range(partition_count)))
            ],
        )

        def on_response(response: Any, error: KafkaError | None) -> None:
            current.topics_being_added.discard(stage.topic)
            code = 0 if response is None else _first_error(response)
            if error is None and not code:
                current.added_topics[stage.topic] = partition_count
            elif error is None and code not in _RETRIED and current is self._current and self.state is State.OPEN:
                self.mark_broken(self._handle_error(code, requests.ADD_PARTITIONS_TO_TXN))
            self._producer.retry_after(stage, 0.0 if error is None and not code else _RETRY_S)

        attachment.send(
            requests.ADD_PARTITIONS_TO_TXN,
            attachment.api.pick_transactional(requests.ADD_PARTITIONS_TO_TXN, self._uses_version_2),
            request,
            on_response,
        )

    def _require_enabled(self) -> None:
        if not self.enabled:
            raise failure(
                KafkaError._NOT_CONFIGURED, "The Transactional API requires transactional.id to be configured"
            )
        self._require_alive()
        self._producer.require_usable()

    def _require_alive(self) -> None:
        """Raises the fatal error, if there is one. produce() reports _FATAL instead of this cause, as in
        librdkafka.
        """
        if self._producer.fatal is not None:
            raise KafkaException(self._producer.fatal)

    def _require(self, *states: State) -> None:
        self._require_alive()
        if self.state in states:
            return
        if self.state is State.BROKEN and self._current.broken_by is not None:
            raise failure(
                self._current.broken_by.code(),
                f"the transaction has failed: {self._current.broken_by.str()}",
                abort=True,
            )
        raise failure(KafkaError._STATE, f"Local: Erroneous state: {self.state.value}")


def _too_late_error() -> _CommittedError:
    return _CommittedError(
        local_error(
            KafkaError._STATE, "the coordinator has decided to commit the transaction: call commit_transaction() again"
        )
    )


def _deadline(timeout: float) -> float:
    return _NEVER if timeout is None or timeout < 0 else time.monotonic() + timeout


def _remaining_s(deadline: float) -> float:
    """Returns the seconds until `deadline`, or -1 if there is no limit."""
    return -1 if deadline == _NEVER else max(deadline - time.monotonic(), 0)


def _first_error(response: Any) -> int:
    """Returns the first error code anywhere in the response to one of the requests above; 0 = none.
    OPERATION_NOT_ATTEMPTED, which only follows from another partition's error, is returned last.
    """
    codes = [getattr(response, "error_code", 0)]
    for topic in getattr(response, "topics", None) or ():
        codes += [partition.error_code for partition in topic.partitions]
    for topic in getattr(response, "results_by_topic_v3_and_below", None) or ():
        codes += [partition.partition_error_code for partition in topic.results_by_partition]
    return min(filter(None, codes), key=lambda code: code == ErrorCode.OPERATION_NOT_ATTEMPTED, default=0)
