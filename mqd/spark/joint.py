"""A sink's requests for a query's joint transaction: to enlist children and to end the transaction
(mqd/coordinator/transaction/joint.py; docs/protocol.md).

    J1  every request may be repeated: a lost response to enlist() leaves a child transaction that
        is aborted with the others that were not chosen, and a repeated commit or abort is
        recognized by its batch id
    J2  a request with a retriable error is repeated, to the current coordinator, for
        kafka.default.api.timeout.ms
Concurrency: one thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from mqd.protocol.errors import ERRORS, ErrorCode, ProtocolError
from mqd.protocol.messages import EndTxnRequest, FindCoordinatorRequest, InitProducerIdRequest
from mqd.spark.encoding import MqdWriteError
from mqd.spark.wire import BrokerConnection, BrokerError, Cluster, MqdReadError, check

FIND_COORDINATOR_VERSION = 6
KEY_TYPE_TRANSACTION = 1
_RETRIABLE = frozenset(
    (
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.NOT_COORDINATOR,
        ErrorCode.CONCURRENT_TRANSACTIONS,
        ErrorCode.REQUEST_TIMED_OUT,
        ErrorCode.NETWORK_EXCEPTION,
    )
)


class Child(NamedTuple):
    producer_id: int
    producer_epoch: int


class JointTransaction:
    """The transaction of one batch and run."""

    def __init__(self, cluster: Cluster, transactional_id: str, batch_id: int, run_id: str, timeout_ms: int) -> None:
        self._cluster = cluster
        self.transactional_id, self.batch_id, self.run_id = transactional_id, batch_id, run_id
        self._timeout_ms = timeout_ms
        self._node_id = -1

    def enlist(self) -> Child | None:
        """Enlists a child for this task attempt. Returns None if the batch is already committed.
        Raises MqdWriteError.
        """
        response = self._request(
            self._enlist_request(Child(-1, -1)), f"enlisting in the transaction of batch {self.batch_id}"
        )
        self._require_joint_support(response)
        return None if response.producer_id < 0 else Child(response.producer_id, response.producer_epoch)

    def heartbeat(self, child: Child) -> None:
        """Sends a heartbeat. Raises MqdWriteError when the transaction no longer includes this
        child.
        """
        self._request(self._enlist_request(child), f"continuing the transaction of batch {self.batch_id}")

    def commit(self, winners: Iterable[Child]) -> None:
        """Commits the batch; has no effect if it was committed before. Raises MqdWriteError."""
        self._require_joint_support(
            self._request(self._end_request(True, winners), f"committing batch {self.batch_id}")
        )

    def abort(self) -> None:
        """Aborts the batch. Raises MqdWriteError."""
        self._request(self._end_request(False, ()), f"aborting batch {self.batch_id}")

    # -- requests ----------------------------------------------------------------------------------

    def _enlist_request(self, child: Child) -> InitProducerIdRequest:
        joint = InitProducerIdRequest.Joint(batch_id=self.batch_id, run_id=self.run_id)
        return InitProducerIdRequest(
            transactional_id=self.transactional_id,
            transaction_timeout_ms=self._timeout_ms,
            producer_id=child.producer_id,
            producer_epoch=child.producer_epoch,
            joint=joint,
        )

    def _end_request(self, committed: bool, winners: Iterable[Child]) -> EndTxnRequest:
        named_winners = [
            EndTxnRequest.Winner(producer_id=child.producer_id, producer_epoch=child.producer_epoch)
            for child in winners
        ]
        joint = EndTxnRequest.Joint(batch_id=self.batch_id, run_id=self.run_id, winners=named_winners)
        return EndTxnRequest(
            transactional_id=self.transactional_id, producer_id=-1, producer_epoch=-1, committed=committed, joint=joint
        )

    def _require_joint_support(self, response: Any) -> None:
        if response.joint is None:
            raise MqdWriteError(
                "the brokers do not support joint transactions, which write a batch exactly once: they are not mqd"
                " brokers, or run an older version. Set the option 'delivery' to 'at-least-once'"
            )

    def _request(self, request: Any, activity: str) -> Any:
        """Sends a request to the coordinator until it succeeds (J2). `activity`: what it is for,
        for messages. Raises MqdWriteError.
        """
        deadline = time.monotonic() + self._cluster.api_timeout_s
        pause_s, problem = 0.005, ""
        while True:
            try:
                response = self._coordinator().request(request)
                if not response.error_code:
                    return response
                if response.error_code not in _RETRIABLE:
                    raise MqdWriteError(f"{activity}: {self._explain(response.error_code)}")
                problem = str(BrokerError(response.error_code))
                if response.error_code != ErrorCode.CONCURRENT_TRANSACTIONS:
                    self._node_id = -1
            except (OSError, BrokerError) as error:
                if isinstance(error, BrokerError) and not error.is_retriable:
                    raise MqdWriteError(f"{activity}: {error}") from error
                problem = str(error)
                self._node_id = -1
                self._cluster.close()
            except (MqdReadError, ProtocolError) as error:
                raise MqdWriteError(f"{activity}: {error}") from error
            if time.monotonic() + pause_s >= deadline:
                raise MqdWriteError(
                    f"{activity}: no outcome within {self._cluster.api_timeout_s:g} s (kafka.default.api.timeout.ms)"
                    f" from {self._cluster.settings.bootstrap_servers}: {problem}"
                )
            time.sleep(pause_s)  # there is no notification when another coordinator is ready
            pause_s = min(2 * pause_s, 0.5)

    def _explain(self, code: int) -> str:
        error = ERRORS.get(code)
        text = f"{error.message} ({error.name})" if error else f"error {code}"
        if code == ErrorCode.PRODUCER_FENCED:
            return (
                f"{text}: the batch had no activity for {self._timeout_ms} ms (tasks are active while rows arrive: if"
                " they wait longer for rows, raise kafka.transaction.timeout.ms), or another run of this query has"
                " replaced this one (two queries must not share a checkpoint), or this run was aborted, because its"
                " job failed or by `mqd txn abort`"
            )
        if code in (ErrorCode.INVALID_TXN_STATE, ErrorCode.INVALID_PRODUCER_ID_MAPPING):
            return (
                f"{text}: the transaction was aborted meanwhile: it had no activity for {self._timeout_ms} ms"
                " (kafka.transaction.timeout.ms), or `mqd txn abort` has ended it. The batch will be repeated"
            )
        if code == ErrorCode.INVALID_TRANSACTION_TIMEOUT:
            return (
                f"{text}: kafka.transaction.timeout.ms is {self._timeout_ms}, above the broker's"
                " transaction.max.timeout.ms"
            )
        if code == ErrorCode.POLICY_VIOLATION:
            return (
                f"{text}: a joint transaction can have at most 10000 task attempts; write with fewer partitions"
                " (coalesce)"
            )
        return text

    def _coordinator(self) -> BrokerConnection:
        """A connection to the transaction's coordinator. Raises OSError, BrokerError."""
        if self._node_id < 0:
            coordinator = (
                self._cluster.any_connection()
                .request(
                    FindCoordinatorRequest(key_type=KEY_TYPE_TRANSACTION, coordinator_keys=[self.transactional_id]),
                    FIND_COORDINATOR_VERSION,
                )
                .coordinators[0]
            )
            check(coordinator.error_code, f"the coordinator of {self.transactional_id}")
            self._cluster.brokers[coordinator.node_id] = (coordinator.host, coordinator.port)
            self._node_id = coordinator.node_id
        return self._cluster.connection_to(self._node_id)
