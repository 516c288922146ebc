"""Transactions of a producer whose commit or abort is interrupted, late, or without a response."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from mqd.client import requests
from mqd.client.messages import KafkaError, KafkaException
from mqd.client.shm.producer import ShmProducer
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import AddPartitionsToTxnResponse, EndTxnResponse, InitProducerIdResponse
from tests.unit.client.client_broker import FakeBroker
from tests.unit.client.client_native import FakeProducer, Reports, broker, make  # noqa: F401 (fixtures)
from tests.unit.client.test_producer_transactions import _begun


def test_a_commit_whose_outcome_is_open_is_repeated(make, broker: FakeBroker) -> None:
    producer, _ = _begun(make)
    producer.produce("events", b"x", partition=0)
    usual = broker.answers[requests.END_TXN]
    broker.answers[requests.END_TXN] = lambda request: EndTxnResponse(error_code=ErrorCode.COORDINATOR_NOT_AVAILABLE)
    with pytest.raises(KafkaException) as raised:
        producer.commit_transaction(0.1)
    assert raised.value.args[0].retriable()
    broker.answers[requests.END_TXN] = usual
    producer.commit_transaction(10)
    producer.begin_transaction()


def _interrupted_commit(producer: ShmProducer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the EndTxn is being sent, before the coordinator receives it."""
    usual = producer.attachment.request

    def request(api_key: int, *arguments: Any) -> Any:
        if api_key == requests.END_TXN:
            raise KeyboardInterrupt
        return usual(api_key, *arguments)

    producer.init_transactions(10)
    producer.begin_transaction()
    producer.produce("events", b"x", partition=0)
    with monkeypatch.context() as patched:
        patched.setattr(producer.attachment, "request", request)
        with pytest.raises(KeyboardInterrupt):
            producer.commit_transaction(10)


def test_a_commit_that_was_interrupted_is_repeated(make, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    producer, native = make(transactional_id="t")
    _interrupted_commit(producer, monkeypatch)
    producer.commit_transaction(10)
    producer.begin_transaction()
    assert native.written[0] == [b"x"] and [
        request.committed for key, request in broker.seen if key == requests.END_TXN
    ] == [True]


def test_a_producer_that_is_closed_after_an_interrupted_commit_aborts(
    make, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers of committed records would wait until the transaction times out."""
    producer, _ = make(transactional_id="t")
    _interrupted_commit(producer, monkeypatch)
    assert producer.close()
    assert [request.committed for key, request in broker.seen if key == requests.END_TXN] == [False]


def _decides_to_commit(broker: FakeBroker, producer: ShmProducer) -> list[bool]:
    """The coordinator processes an EndTxn and responds, but Ctrl-C comes first; from then on it
    keeps the outcome that it has decided. Returns its requests.
    """
    requested: list[bool] = []
    usual = producer.attachment.request

    def end(request: Any) -> EndTxnResponse:
        requested.append(request.committed)
        if not request.committed and requested[0]:
            return EndTxnResponse(error_code=ErrorCode.INVALID_TXN_STATE)
        return EndTxnResponse(producer_id=request.producer_id, producer_epoch=1)

    def request(api_key: int, *arguments: Any) -> Any:
        response = usual(api_key, *arguments)
        if api_key == requests.END_TXN and len(requested) == 1:
            raise KeyboardInterrupt
        return response

    broker.answers[requests.END_TXN] = end
    producer.attachment.request = request  # type: ignore[method-assign]
    producer.init_transactions(10)
    producer.begin_transaction()
    producer.produce("events", b"x", partition=0)
    with pytest.raises(KeyboardInterrupt):
        producer.commit_transaction(10)
    assert requested == [True]
    return requested


@pytest.mark.parametrize("version", [1, 2])
def test_closing_after_a_commit_without_response_is_not_a_fatal_error(make, broker: FakeBroker, version: int) -> None:
    broker.transaction_version = version
    broker.answers[requests.ADD_PARTITIONS_TO_TXN] = lambda request: AddPartitionsToTxnResponse()
    errors: list[KafkaError] = []
    producer, _ = make(transactional_id="t", error_cb=errors.append)
    requested = _decides_to_commit(broker, producer)
    assert producer.close()
    assert requested == [True, False] and producer.fatal is None and errors == []


def test_an_abort_of_a_committed_transaction_is_reported_and_the_producer_continues(make, broker: FakeBroker) -> None:
    producer, native = make(transactional_id="t")
    requested = _decides_to_commit(broker, producer)
    with pytest.raises(KafkaException) as refused:
        producer.abort_transaction(10)
    error = refused.value.args[0]
    assert error.code() == KafkaError._STATE and not (error.fatal() or error.retriable() or error.txn_requires_abort())
    producer.commit_transaction(10)
    assert requested == [True, False, True] and native.identities[-1] == (100, 1)
    producer.begin_transaction()


def test_nothing_is_produced_into_a_transaction_whose_commit_was_interrupted(
    make, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, native = make(transactional_id="t")
    _interrupted_commit(producer, monkeypatch)
    for refused in (
        lambda: producer.produce("events", b"late"),
        lambda: producer.produce_batch("events", [b"late"]),
        producer.begin_transaction,
    ):
        with pytest.raises(KafkaException) as raised:
            refused()
        assert raised.value.args[0].code() == KafkaError._STATE
    producer.commit_transaction(10)
    assert native.written == {0: [b"x"]}


def _interrupted(_self: Any = None, *_arguments: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("target", "requested"),
    [("producer.purge", [False]), ("transactions._stop_staging", [False]), ("transactions._set_identity", [False])],
)
def test_a_producer_that_is_closed_after_an_interrupted_abort_aborts(
    make, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch, target: str, requested: list[bool]
) -> None:
    """At any point: before the coordinator was contacted, or after its response."""
    producer, _ = _begun(make)
    producer.produce("events", b"x")
    assert producer.flush(10) == 0
    owner, name = target.split(".")
    with monkeypatch.context() as patched:
        patched.setattr(producer if owner == "producer" else producer.transactions, name, _interrupted)
        with pytest.raises(KeyboardInterrupt):
            producer.abort_transaction(10)
    assert producer.close()
    assert [request.committed for key, request in broker.seen if key == requests.END_TXN] == requested


def test_close_does_not_abort_during_a_commit_in_another_thread(make, broker: FakeBroker) -> None:
    producer, _ = _begun(make)
    producer.produce("events", b"x")
    requested = threading.Event()
    broker.answers[requests.END_TXN] = lambda request: requested.set()  # no response
    raised: list[int] = []

    def commit() -> None:
        with pytest.raises(KafkaException) as error:
            producer.commit_transaction(60)
        raised.append(error.value.args[0].code())

    committing = threading.Thread(target=commit)
    committing.start()
    assert requested.wait(10) and producer.close()
    committing.join()
    assert [request.committed for key, request in broker.seen if key == requests.END_TXN] == [True] and raised == [
        KafkaError._DESTROY
    ]


class _VersionOne:
    """A coordinator of version 1 with its rules: InitProducerId assigns the next epoch, EndTxn of
    an older one is fenced, and an abort after a commit is refused. `silent`: keys of requests that
    are processed without a response.
    """

    def __init__(self, broker: FakeBroker) -> None:
        self.epoch, self.committed, self.silent = -1, False, set[int]()
        broker.transaction_version = 1
        broker.answers[requests.ADD_PARTITIONS_TO_TXN] = lambda request: AddPartitionsToTxnResponse()
        broker.answers[requests.INIT_PRODUCER_ID] = self._init
        broker.answers[requests.END_TXN] = self._end

    def _init(self, request: Any) -> InitProducerIdResponse | None:
        if request.producer_epoch in (-1, self.epoch):  # otherwise it has the next one already: the response was lost
            self.epoch += 1
        return (
            None
            if requests.INIT_PRODUCER_ID in self.silent
            else InitProducerIdResponse(producer_id=7, producer_epoch=self.epoch)
        )

    def _end(self, request: Any) -> EndTxnResponse | None:
        code = 0
        if request.producer_epoch != self.epoch:
            code = ErrorCode.PRODUCER_FENCED
        elif self.committed and not request.committed:
            code = ErrorCode.INVALID_TXN_STATE
        else:
            self.committed = request.committed
        return None if requests.END_TXN in self.silent else EndTxnResponse(error_code=code)


def _times_out(ends: Callable[[float], None]) -> None:
    with pytest.raises(KafkaException) as raised:
        ends(0.2)
    assert raised.value.args[0].retriable()


def test_version_1_gets_a_new_epoch_after_a_late_abort(make, broker: FakeBroker) -> None:
    """The C core counts from 0 again since the abort, and under the same epoch the next
    transaction's sequence numbers did not fit.
    """
    coordinator = _VersionOne(broker)
    producer, native = _begun(make)
    producer.produce("events", b"x", partition=0)
    assert producer.flush(10) == 0
    coordinator.silent = {requests.END_TXN}
    _times_out(producer.commit_transaction)
    coordinator.silent = set()
    with pytest.raises(KafkaException) as refused:
        producer.abort_transaction(10)
    assert refused.value.args[0].code() == KafkaError._STATE and native.identities[-1] == (7, 0), (
        "the sequences start over"
    )
    producer.commit_transaction(10)
    assert native.identities[-1] == (7, 1)
    producer.begin_transaction()
    producer.produce("events", b"y", partition=0)
    producer.commit_transaction(10)
    assert native.identities[-1] == (7, 1), "a commit alone needs none"


@pytest.mark.parametrize("ends_by_abort", [True, False])
def test_a_lost_response_with_the_next_epoch_does_not_end_a_version_1_transaction_twice(
    make, broker: FakeBroker, ends_by_abort: bool
) -> None:
    """The coordinator fenced the second request, under the previous epoch."""
    coordinator = _VersionOne(broker)
    producer, native = _begun(make)
    producer.produce("events", b"x", partition=0)
    assert producer.flush(10) == 0
    if not ends_by_abort:
        coordinator.silent = {requests.END_TXN}
        _times_out(producer.commit_transaction)
        coordinator.silent = set()
        with pytest.raises(KafkaException):
            producer.abort_transaction(10)
    coordinator.silent = {requests.INIT_PRODUCER_ID}
    _times_out(producer.abort_transaction if ends_by_abort else producer.commit_transaction)
    coordinator.silent = set()
    if not ends_by_abort:
        with pytest.raises(KafkaException) as refused:
            producer.abort_transaction(10)
        assert refused.value.args[0].code() == KafkaError._STATE
    (producer.abort_transaction if ends_by_abort else producer.commit_transaction)(10)
    assert producer.fatal is None and native.identities[-1] == (7, 1)
    coordinator.committed = False
    producer.begin_transaction()
    producer.produce("events", b"y", partition=0)
    assert producer.flush(10) == 0
    producer.abort_transaction(10)
    assert native.identities[-1] == (7, 2)
