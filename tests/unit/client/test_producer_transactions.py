"""The shared-memory producer's transactions: failures, the coordinator's responses, versions; with
a fake C core and a fake broker.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mqd.client import requests
from mqd.client.messages import GroupMetadata, KafkaError, KafkaException, TopicPartition
from mqd.client.shm import transactional
from mqd.client.shm.producer import ShmProducer
from mqd.protocol.api import decode_request
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import (
    AddOffsetsToTxnResponse,
    AddPartitionsToTxnResponse,
    EndTxnResponse,
    InitProducerIdResponse,
    TxnOffsetCommitResponse,
)
from tests.unit.client.client_broker import FakeBroker
from tests.unit.client.client_native import FakeProducer, Reports, broker, make  # noqa: F401 (fixtures)


def _begun(make: Callable[..., tuple[ShmProducer, FakeProducer]], **config: Any) -> tuple[ShmProducer, FakeProducer]:
    """A transaction is open."""
    producer, native = make(transactional_id="t", **config)
    producer.init_transactions(10)
    producer.begin_transaction()
    return producer, native


def _seen(broker: FakeBroker, *keys: int) -> list[int]:
    return [
        key
        for key, _ in broker.seen
        if key
        in (
            keys
            or (
                requests.INIT_PRODUCER_ID,
                requests.END_TXN,
                requests.TXN_OFFSET_COMMIT,
                requests.ADD_PARTITIONS_TO_TXN,
                requests.ADD_OFFSETS_TO_TXN,
            )
        )
    ]


def test_version_2_returns_the_next_epoch(make, broker: FakeBroker) -> None:
    producer, native = make(transactional_id="t")
    producer.init_transactions(10)
    for _ in range(2):
        producer.begin_transaction()
        producer.produce("events", b"x", partition=0)
        producer.commit_transaction(10)
    assert native.identities == [(100, 0), (100, 1), (100, 2)] and native.options.produce_version == 12
    assert _seen(broker) == [requests.INIT_PRODUCER_ID, requests.END_TXN, requests.END_TXN]


def test_version_1_joins_first_and_renews_after_an_abort(make, broker: FakeBroker) -> None:
    broker.transaction_version = 1
    result = AddPartitionsToTxnResponse.TopicResult
    broker.answers[requests.ADD_PARTITIONS_TO_TXN] = lambda request: AddPartitionsToTxnResponse(
        results_by_topic_v3_and_below=[
            result(
                name=topic.name,
                results_by_partition=[
                    AddPartitionsToTxnResponse.PartitionResult(partition_index=index) for index in topic.partitions
                ],
            )
            for topic in request.v3_and_below_topics
        ]
    )
    broker.answers[requests.ADD_OFFSETS_TO_TXN] = lambda request: AddOffsetsToTxnResponse()
    broker.answers[requests.TXN_OFFSET_COMMIT] = lambda request: TxnOffsetCommitResponse()
    producer, native = _begun(make)
    producer.produce("events", b"x", partition=0)
    producer.send_offsets_to_transaction([TopicPartition("events", 0, 5)], GroupMetadata("g"), 10)
    producer.commit_transaction(10)
    assert native.options.produce_version == 11 and native.written == {0: [b"x"]}
    assert sorted(_seen(broker)) == sorted(
        [
            requests.INIT_PRODUCER_ID,
            requests.ADD_PARTITIONS_TO_TXN,
            requests.ADD_OFFSETS_TO_TXN,
            requests.TXN_OFFSET_COMMIT,
            requests.END_TXN,
        ]
    )
    producer.begin_transaction()
    producer.produce_batch("events", [b"y"] * 3)
    producer.abort_transaction(10)
    assert _seen(broker, requests.INIT_PRODUCER_ID, requests.ADD_PARTITIONS_TO_TXN) == [
        requests.INIT_PRODUCER_ID,
        requests.ADD_PARTITIONS_TO_TXN,
        requests.ADD_PARTITIONS_TO_TXN,
        requests.INIT_PRODUCER_ID,
    ]


def test_a_producer_of_version_1_stays_with_it_when_the_broker_speaks_version_2(make, broker: FakeBroker) -> None:
    """For an EndTxn of version 2 the coordinator bumps the epoch, which a producer of version 1
    does not adopt.
    """
    epoch, versions = 0, []
    usual = broker.answer

    def answer(frame: bytes) -> bytes | None:
        header, _ = decode_request(frame)
        if header.api_key == requests.END_TXN:
            versions.append(header.api_version)
        return usual(frame)

    def end(request: Any) -> EndTxnResponse:
        nonlocal epoch
        if request.producer_epoch != epoch:
            return EndTxnResponse(error_code=ErrorCode.INVALID_PRODUCER_EPOCH)
        epoch += versions[-1] >= 5
        return EndTxnResponse(producer_id=request.producer_id, producer_epoch=epoch)

    broker.transaction_version = 1
    broker.answer = answer  # type: ignore[method-assign]
    broker.answers[requests.END_TXN] = end
    broker.answers[requests.ADD_PARTITIONS_TO_TXN] = lambda request: AddPartitionsToTxnResponse()
    producer, native = make(transactional_id="t")
    producer.init_transactions(10)
    for number in range(3):
        producer.begin_transaction()
        producer.produce("events", b"%d" % number, partition=0)
        producer.commit_transaction(10)
        if not number:
            broker.transaction_version = 2
            broker.kill()
            assert producer.attachment.wait_for(lambda: producer.attachment.api.supports_transactions_v2, 10)
    assert native.written[0] == [b"0", b"1", b"2"] and max(versions) == 4


def _add_answers(broker: FakeBroker, *codes: list[int]) -> list[list[int]]:
    """Version 1. The partitions' errors in the n-th response to AddPartitionsToTxn; none in those that
    follow. Returns a list of the partitions of every request.
    """
    left, added = list(codes), []
    result = AddPartitionsToTxnResponse.PartitionResult

    def answer(request: Any) -> AddPartitionsToTxnResponse:
        (topic,) = request.v3_and_below_topics
        added.append(topic.partitions)
        errors = left.pop(0) if left else [0] * len(topic.partitions)
        results = [
            result(partition_index=index, partition_error_code=code)
            for index, code in zip(topic.partitions, errors, strict=True)
        ]
        return AddPartitionsToTxnResponse(
            results_by_topic_v3_and_below=[
                AddPartitionsToTxnResponse.TopicResult(name=topic.name, results_by_partition=results)
            ]
        )

    broker.transaction_version = 1
    broker.answers[requests.ADD_PARTITIONS_TO_TXN] = answer
    return added


def test_a_partition_that_the_coordinator_does_not_know_yet_is_added_again(make, broker: FakeBroker) -> None:
    """The topic has got another one: the error of the others follows from that."""
    not_attempted = int(ErrorCode.OPERATION_NOT_ATTEMPTED)
    added = _add_answers(broker, [not_attempted, not_attempted, int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)])
    producer, native = _begun(make)
    producer.produce("events", b"x", partition=0)
    producer.commit_transaction(10)
    assert native.written == {0: [b"x"]} and added == [[0, 1, 2]] * 2


def test_partitions_created_during_a_transaction_are_added_to_it(make, broker: FakeBroker) -> None:
    added = _add_answers(broker)
    producer, native = _begun(make)
    producer.produce("events", b"x", partition=0)
    assert producer.flush(10) == 0
    broker.topics["events"] = 5
    with producer.attachment.lock:
        producer.attachment.metadata.refresh(["events"])
    assert producer.attachment.wait_for(lambda: producer.stages["events"].partition_count == 5, 10)
    producer.produce("events", b"y", partition=4)
    producer.commit_transaction(10)
    assert native.written == {0: [b"x"], 4: [b"y"]} and added == [[0, 1, 2], [0, 1, 2, 3, 4]]


def _add_a_topic(producer: ShmProducer, broker: FakeBroker) -> None:
    broker.answers[requests.ADD_PARTITIONS_TO_TXN] = lambda _request: None
    producer.produce("events", b"x", partition=0)
    assert producer.attachment.wait_for(lambda: _seen(broker, requests.ADD_PARTITIONS_TO_TXN), 10)


def _add_offsets(producer: ShmProducer, broker: FakeBroker) -> None:
    broker.answers[requests.ADD_OFFSETS_TO_TXN] = lambda _request: None
    with pytest.raises(KafkaException) as raised:
        producer.send_offsets_to_transaction([TopicPartition("events", 0, 5)], GroupMetadata("g"), 0.1)
    assert raised.value.args[0].retriable()


@pytest.mark.parametrize(
    ("work", "commit"),
    [(_add_a_topic, False), (_add_offsets, False), (_add_offsets, True)],
    ids=["topic", "offsets", "offsets, committed"],
)
def test_what_a_request_without_a_response_may_have_begun_is_ended(
    make, broker: FakeBroker, work: Callable[..., None], commit: bool
) -> None:
    """By the request for the next epoch: EndTxn may find no transaction. Without either, the
    coordinator would fence the producer when the transaction times out.
    """
    broker.transaction_version = 1
    producer, native = _begun(make)
    work(producer, broker)
    (producer.commit_transaction if commit else producer.abort_transaction)(10)
    assert _seen(broker, requests.INIT_PRODUCER_ID, requests.END_TXN) == [requests.INIT_PRODUCER_ID] * 2
    _add_answers(broker)
    producer.begin_transaction()
    producer.produce("events", b"y", partition=0)
    producer.commit_transaction(10)
    assert native.written == {0: [b"y"]} and native.identities[-1] == (101, 0)


@pytest.mark.parametrize("code", [ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.PRODUCER_FENCED])
def test_fenced_by_the_coordinator(make, broker: FakeBroker, code: int) -> None:
    broker.answers[requests.END_TXN] = lambda request: EndTxnResponse(error_code=code)
    producer, _ = _begun(make)
    producer.produce("events", b"x")
    with pytest.raises(KafkaException) as raised:
        producer.commit_transaction(10)
    assert raised.value.args[0].code() == KafkaError._FENCED and raised.value.args[0].fatal()


def test_a_failed_record_breaks_the_transaction(make, broker: FakeBroker) -> None:
    producer, native = _begun(make)
    native.fate = lambda batch: ErrorCode.INVALID_RECORD
    producer.produce("events", b"bad", partition=0)
    with pytest.raises(KafkaException) as raised:
        producer.commit_transaction(10)
    assert raised.value.args[0].txn_requires_abort() and not raised.value.args[0].fatal()
    with pytest.raises(KafkaException):
        producer.produce("events", b"more")
    assert producer.flush(10) == 0
    producer.abort_transaction(10)
    native.fate = lambda batch: 0
    producer.begin_transaction()
    producer.produce("events", b"good", partition=0)
    producer.commit_transaction(10)
    assert native.written == {0: [b"good"]}
    committed = [request.committed for key, request in broker.seen if key == requests.END_TXN]
    assert committed == [False, True]


def _unknown_topic(producer: ShmProducer, _broker: FakeBroker, reports: Reports) -> None:
    producer.produce("typo", b"payment", on_delivery=reports)
    producer.produce("events", b"order", on_delivery=reports)


def _unknown_partition(producer: ShmProducer, broker: FakeBroker, reports: Reports) -> None:
    producer.produce("late", b"payment", partition=7, on_delivery=reports)  # nothing is known of the topic yet
    producer.produce("late", b"order", partition=0, on_delivery=reports)
    broker.topics["late"] = 3


def _purged_before_sending(producer: ShmProducer, _broker: FakeBroker, reports: Reports) -> None:
    producer.produce("typo", b"payment", on_delivery=reports)
    producer.purge(in_flight=False)


def _purged_before_compression(producer: ShmProducer, _broker: FakeBroker, reports: Reports) -> None:
    producer.produce("events", b"order", on_delivery=reports)
    assert producer.flush(10) == 0
    producer.produce("events", bytes(20 << 10), on_delivery=reports)  # sent at once, and lingers there
    assert producer.compressor.record_count == 1
    producer.purge()


@pytest.mark.parametrize(
    ("work", "config"),
    [
        (_unknown_topic, {"topic_metadata_propagation_max_ms": 100}),
        (_unknown_partition, {}),
        (_purged_before_sending, {}),
        (_purged_before_compression, {"compression_type": "lz4", "linger_ms": 60_000}),
    ],
)
def test_no_transaction_commits_without_one_of_its_records(
    make, broker: FakeBroker, work: Callable[..., None], config: dict[str, Any]
) -> None:
    producer, _ = _begun(make, **config)
    reports = Reports()
    work(producer, broker, reports)
    with pytest.raises(KafkaException) as raised:
        producer.commit_transaction(10)
    assert raised.value.args[0].txn_requires_abort() and not raised.value.args[0].fatal()
    assert producer.flush(10) == 0 and any(reports.errors)
    producer.abort_transaction(10)
    producer.begin_transaction()
    producer.produce("events", b"good", partition=0)
    producer.commit_transaction(10)
    *before, last = (request.committed for key, request in broker.seen if key == requests.END_TXN)
    assert last and not any(before)


def test_nothing_is_produced_into_a_transaction_that_fails_while_waiting_for_space(make, broker: FakeBroker) -> None:
    """It was accepted, and flush() waited for it until its timeout."""
    producer, _ = _begun(make, linger_ms=60_000, queue_buffering_max_messages=2)
    producer.produce("late", b"payment", partition=7)  # nothing is known of the topic yet
    producer.produce("late", b"order", partition=0)
    broker.topics["late"] = 3
    assert producer.attachment.wait_for(lambda: producer.stages["late"].number >= 0, 10)
    with pytest.raises(KafkaException) as refused:
        producer.produce("late", b"more", partition=0)
    assert refused.value.args[0].code() == KafkaError._STATE and producer.flush(10) == 0
    producer.abort_transaction(10)


@pytest.mark.parametrize("topic", ["events", "late"])
def test_a_record_whose_transaction_fails_while_it_is_partitioned_ends(
    make, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch, topic: str
) -> None:
    """By a slow partitioner here. It stayed in its stage, and flush() waited until its timeout."""

    def partitioner(_key: object, _count: int) -> int:
        with producer.attachment.lock:
            producer.transactions.mark_broken(KafkaError(KafkaError._FAIL))
        return 0

    producer, _ = _begun(make, partitioner=partitioner)
    monkeypatch.setattr(producer, "_partition_count", lambda _stage: 3)
    reports = Reports()
    producer.produce(topic, b"x", on_delivery=reports)
    assert producer.flush(10) == 0 and reports.errors == [KafkaError._PURGE_QUEUE]
    producer.abort_transaction(10)


def test_a_batch_whose_transaction_fails_meanwhile_is_refused(make, broker: FakeBroker) -> None:
    """It waited forever, for space in a transaction that accepts nothing more."""
    producer, _ = _begun(make)
    producer.produce("events", b"x", partition=7)  # of three, which is not known yet
    with pytest.raises(KafkaException) as refused:
        producer.produce_batch("events", [b"a"] * 10)
    assert refused.value.args[0].code() == KafkaError._STATE and refused.value.accepted == 0
    producer.abort_transaction(10)
    producer.begin_transaction()
    assert producer.produce_batch("events", [b"a"] * 10) == 10
    producer.commit_transaction(10)


def test_a_batch_that_waits_for_room_when_its_transaction_fails_is_refused(make, broker: FakeBroker) -> None:
    producer, native = _begun(make)
    native.fate, native.capacity = lambda batch: None, 5
    failed = threading.Timer(0.2, lambda: producer.purge(in_flight=True))
    failed.start()
    with pytest.raises(KafkaException) as refused:
        producer.produce_batch("events", [b"a"] * 10)
    failed.join()
    assert refused.value.args[0].code() == KafkaError._STATE and refused.value.accepted == 5
    native.fate = lambda batch: 0
    producer.abort_transaction(10)


def test_a_busy_coordinator_gets_the_request_again(make, broker: FakeBroker) -> None:
    responses = iter([ErrorCode.CONCURRENT_TRANSACTIONS, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS])
    broker.answers[requests.INIT_PRODUCER_ID] = lambda request: InitProducerIdResponse(
        error_code=next(responses, 0), producer_id=5, producer_epoch=3
    )
    producer, native = make(transactional_id="t")
    producer.init_transactions(10)
    assert native.identities == [(5, 3)]


def _offset_answers(broker: FakeBroker, *codes: int) -> None:
    """The error of the n-th TxnOffsetCommit; the last for all that follow."""
    left = list(codes)
    response = TxnOffsetCommitResponse

    def answer(request: Any) -> TxnOffsetCommitResponse:
        code = left.pop(0) if len(left) > 1 else left[0]
        return response(
            topics=[
                response.TopicResponse(
                    name=topic.name,
                    partitions=[
                        response.PartitionResponse(partition_index=one.partition_index, error_code=code)
                        for one in topic.partitions
                    ],
                )
                for topic in request.topics
            ]
        )

    broker.answers[requests.TXN_OFFSET_COMMIT] = answer


def test_offsets_of_a_deleted_topic_are_given_up(make, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the producer, which aborts and continues; the coordinator would fence it when the
    transaction times out.
    """
    monkeypatch.setattr(transactional, "_UNKNOWN_TOPIC_S", 0.3)
    _offset_answers(broker, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    producer, _ = _begun(make)
    with pytest.raises(KafkaException) as raised:
        producer.send_offsets_to_transaction([TopicPartition("deleted", 0, 5)], GroupMetadata("g"), 10)
    assert raised.value.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART and raised.value.args[0].txn_requires_abort()
    with pytest.raises(KafkaException) as raised:
        producer.commit_transaction(10)
    assert raised.value.args[0].txn_requires_abort()
    producer.abort_transaction(10)
    producer.begin_transaction()
    assert producer.fatal is None


def test_offsets_of_a_deleted_topic_are_given_up_over_several_short_calls(
    make, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactional, "_UNKNOWN_TOPIC_S", 1.0)
    _offset_answers(broker, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    producer, _ = make(transactional_id="t")
    producer.init_transactions(10)
    for _ in range(2):  # the second transaction has its own time limit
        producer.begin_transaction()
        began, calls = time.monotonic(), 0
        while True:
            calls += 1
            with pytest.raises(KafkaException) as raised:
                producer.send_offsets_to_transaction([TopicPartition("deleted", 0, 5)], GroupMetadata("g"), 0.2)
            if not raised.value.args[0].retriable() or time.monotonic() - began > 30:
                break
        assert raised.value.args[0].txn_requires_abort() and calls > 1
        producer.abort_transaction(10)


def test_offsets_of_a_deleted_topic_are_given_up_while_a_coordinator_loads(
    make, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That error comes first in the response; it does not end the producer."""
    monkeypatch.setattr(transactional, "_UNKNOWN_TOPIC_S", 0.3)
    response, codes = (
        TxnOffsetCommitResponse,
        {"a": ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, "deleted": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION},
    )
    broker.answers[requests.TXN_OFFSET_COMMIT] = lambda request: response(
        topics=[
            response.TopicResponse(
                name=topic.name,
                partitions=[response.PartitionResponse(partition_index=0, error_code=codes[topic.name])],
            )
            for topic in request.topics
        ]
    )
    producer, _ = _begun(make)
    with pytest.raises(KafkaException) as raised:
        producer.send_offsets_to_transaction(
            [TopicPartition("a", 0, 5), TopicPartition("deleted", 0, 5)], GroupMetadata("g"), 10
        )
    assert raised.value.args[0].txn_requires_abort() and producer.fatal is None
    producer.abort_transaction(10)


def test_an_abort_waits_for_a_commit_of_another_thread(make, broker: FakeBroker) -> None:
    """The commit returned, though the coordinator had aborted: close() could do the same between
    two polls.
    """
    producer, _ = _begun(make)
    producer.produce("events", b"x", partition=0)
    producer.flush(10)
    transactions, raised = producer.transactions, []

    def abort() -> None:
        try:
            transactions.abort(10)
        except KafkaException as error:
            raised.append(error.args[0].code())

    end = transactions._end_transaction

    def crossed(commit: bool, deadline: float) -> None:
        transactions._end_transaction = end
        other = threading.Thread(target=abort)
        other.start()
        other.join()
        end(commit, deadline)

    transactions._end_transaction = crossed
    producer.commit_transaction(10)
    assert raised == [KafkaError._STATE]
    assert [request.committed for key, request in broker.seen if key == requests.END_TXN] == [True]


def test_the_time_limit_of_a_deleted_topic_does_not_apply_to_a_late_one(
    make, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = 0.0
    monkeypatch.setattr(transactional, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + later))
    monkeypatch.setattr(transactional, "_UNKNOWN_TOPIC_S", 600.0)
    _offset_answers(broker, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    producer, _ = _begun(make)
    with pytest.raises(KafkaException) as raised:
        producer.send_offsets_to_transaction([TopicPartition("deleted", 0, 5)], GroupMetadata("g"), 0.1)
    assert raised.value.args[0].retriable()
    later = 1000.0
    _offset_answers(broker, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, 0)
    producer.send_offsets_to_transaction([TopicPartition("late", 0, 5)], GroupMetadata("g"), 60)
    _offset_answers(broker, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    with pytest.raises(KafkaException) as raised:
        producer.send_offsets_to_transaction([TopicPartition("deleted", 0, 5)], GroupMetadata("g"), 60)
    assert raised.value.args[0].txn_requires_abort()


def test_offsets_of_a_topic_that_appears_late_are_committed(make, broker: FakeBroker) -> None:
    _offset_answers(
        broker,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        0,
    )
    producer, _ = _begun(make)
    producer.send_offsets_to_transaction([TopicPartition("late", 0, 5)], GroupMetadata("g"), 10)
    producer.commit_transaction(10)


def test_a_coordinator_that_stays_busy_is_a_timeout(make, broker: FakeBroker) -> None:
    broker.answers[requests.INIT_PRODUCER_ID] = lambda request: InitProducerIdResponse(
        error_code=ErrorCode.CONCURRENT_TRANSACTIONS
    )
    producer, _ = make(transactional_id="t")
    with pytest.raises(KafkaException) as raised:
        producer.init_transactions(0.1)
    assert raised.value.args[0].code() == KafkaError._TIMED_OUT and raised.value.args[0].retriable()
