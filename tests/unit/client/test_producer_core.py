"""The shared-memory producer's decisions: retries, time limits, identities, full queues, batches
that end early; with a fake C core and a fake broker.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from mqd.client import requests
from mqd.client.config import read
from mqd.client.messages import KafkaError, KafkaException, Message
from mqd.client.producer import Producer
from mqd.client.shm import compressing
from mqd.client.shm.delivery_outcomes import ErrorAction, action_after
from mqd.client.tcp.producer import TcpProducer
from mqd.protocol.errors import ErrorCode
from tests.unit.client.client_broker import FakeBroker
from tests.unit.client.client_native import FakeProducer, Reports, broker, make  # noqa: F401 (fixtures)


def test_a_retriable_error_is_retried_in_its_place(make) -> None:
    producer, native = make()
    fates = iter([ErrorCode.NOT_ENOUGH_REPLICAS, ErrorCode.LEADER_NOT_AVAILABLE])
    native.fate = lambda batch: next(fates, 0)
    reports = Reports()
    for number in range(5):
        producer.produce("events", b"%d" % number, partition=0, on_delivery=reports)
    assert producer.flush(10) == 0
    assert reports.errors == [0] * 5 and native.written[0] == [b"0", b"1", b"2", b"3", b"4"]
    assert [message.offset() for message in reports.messages] == list(range(5))


def test_a_permanent_error_is_reported(make) -> None:
    producer, native = make()
    native.fate = lambda batch: ErrorCode.INVALID_RECORD if b"bad" in batch.values else 0
    reports = Reports()
    producer.produce("events", b"bad", partition=0, on_delivery=reports)
    assert producer.flush(10) == 0
    producer.produce("events", b"good", partition=0, on_delivery=reports)
    assert producer.flush(10) == 0
    assert (
        reports.errors == [ErrorCode.INVALID_RECORD, 0]
        and reports.messages[0].offset() is None
        and reports.messages[0].partition() == 0
    )


def test_retries_end(make) -> None:
    producer, native = make(retries=2)
    tries = []
    native.fate = lambda batch: tries.append(1) or ErrorCode.NOT_ENOUGH_REPLICAS
    reports = Reports()
    producer.produce("events", b"x", partition=0, on_delivery=reports)
    assert producer.flush(10) == 0
    assert reports.errors == [ErrorCode.NOT_ENOUGH_REPLICAS] and len(tries) == 3


@pytest.mark.parametrize("response", [None, ErrorCode.NOT_ENOUGH_REPLICAS])
def test_delivery_timeout_is_respected(make, response) -> None:
    producer, native = make(delivery_timeout_ms=100)
    native.fate = lambda batch: response
    reports = Reports()
    producer.produce("events", b"x", partition=0, on_delivery=reports)
    began = time.monotonic()
    assert producer.flush(10) == 0
    assert reports.errors == [KafkaError._MSG_TIMED_OUT] and time.monotonic() - began < 5


def test_batches_that_were_never_sent_time_out_too(make, broker: FakeBroker) -> None:
    broker.answers[requests.INIT_PRODUCER_ID] = lambda request: None
    producer, _ = make(delivery_timeout_ms=100, enable_idempotence=True)
    reports = Reports()
    producer.produce("events", b"x", on_delivery=reports)
    assert producer.flush(10) == 0
    assert reports.errors == [KafkaError._MSG_TIMED_OUT]


@pytest.mark.parametrize("is_flushed", [False, True])
@pytest.mark.parametrize("has_broker", [False, True])
def test_batches_that_wait_for_compression_time_out_too(
    make, broker: FakeBroker, is_flushed: bool, has_broker: bool
) -> None:
    """Those without space, and those without a broker."""
    producer, native = make(delivery_timeout_ms=300, compression_type="lz4", linger_ms=200)
    producer.produce("events", b"known", partition=0)
    assert producer.flush(10) == 0
    native.capacity = 0
    if not has_broker:
        broker.refuse = ConnectionRefusedError("nobody listens")
        broker.kill()
        assert producer.attachment.wait_for(lambda: not producer.attachment.attached, 10)
    reports = Reports()
    # sent at once, if there is a broker
    producer.produce("events", bytes(20 << 10), partition=0, on_delivery=reports)
    assert producer.compressor.record_count == has_broker, (
        "without a broker each waits by itself: in one batch all would end with the first one's time"
    )
    deadline = time.monotonic() + 10
    while not reports.errors and time.monotonic() < deadline:
        producer.flush(0.1) if is_flushed else producer.poll(0.1)
    assert (
        reports.errors == [KafkaError._MSG_TIMED_OUT] and len(producer) == 0 and producer.outcomes.records_failed == 1
    )


def test_the_time_of_a_record_begins_before_it_is_compressed(make) -> None:
    """One that has waited for space has no more time left in the C core than any other of its age."""
    producer, native = make(compression_type="lz4", linger_ms=60_000)
    native.fate = lambda batch: None
    producer.produce("events", b"known", partition=0)
    assert producer.flush(0.05) == 1
    producer.produce("events", bytes(20 << 10), partition=0)
    waits_since = time.monotonic()
    assert producer.flush(0.05) == 2
    assert list(producer.outcomes.batches.values())[-1].created <= waits_since


@pytest.mark.parametrize("compression", ["none", "lz4"])
@pytest.mark.parametrize("value", [b"one of a batch", bytes(20 << 10)], ids=["batch", "large record"])
def test_the_driver_sends_a_batch_when_it_has_lingered(make, compression: str, value: bytes) -> None:
    """By the driver, which sleeps for a minute when nothing is outstanding."""
    producer, native = make(compression_type=compression, linger_ms=50)
    producer.produce("events", b"known", partition=0)
    assert producer.flush(10) == 0
    native.linger_us = 50_000
    while producer.attachment._sleep_until < time.monotonic() + 40:
        time.sleep(0.001)
    sent = threading.Event()
    native.fate = lambda batch: sent.set() or 0
    if len(value) < 100:
        assert producer.produce_batch("events", [value], partition=0) == 1
    else:
        producer.produce("events", value, partition=0)
    assert sent.wait(20)


@pytest.mark.parametrize("has_broker", [True, False])
def test_a_producer_that_waits_for_room_does_not_spin_while_a_batch_lingers(
    make, broker: FakeBroker, has_broker: bool
) -> None:
    """It drives meanwhile, and each turn would have been followed immediately by another one: a
    busy core as long as there was no space.
    """
    producer, native = make(linger_ms=50)
    producer.produce("events", b"known", partition=0)
    assert producer.flush(10) == 0
    native.capacity, native.linger_us = 1, 3_600_000_000
    if not has_broker:
        assert producer.produce_batch("events", [b"lingers"], partition=0) == 1
        broker.refuse, native.linger_us = ConnectionRefusedError("nobody listens"), 1
        broker.kill()
        assert producer.attachment.wait_for(lambda: not producer.attachment.attached, 10)
    requests: list[float] = []
    producer.attachment.wake_by = requests.append
    assert producer.produce_batch("events", [b"lingers", b"waits"], partition=0, timeout=0.3) == has_broker
    assert len(requests) == has_broker, "for what was added"


@pytest.mark.parametrize("large", ["value", "key", "headers"])
def test_a_large_record_is_not_staged(make, large: str) -> None:
    producer, native = make(linger_ms=3_600_000)
    native.linger_us = 3_600_000_000
    producer.produce("events", b"finds the topic")
    assert producer.flush(10) == 0
    record: dict[str, Any] = {"value": b"v", "key": b"k", "headers": [("h", b"h")]}
    producer.produce("events", **record, partition=0)
    assert producer.stages["events"].entries, "a small one is"
    record[large] = [("h", bytes(20_000))] if large == "headers" else bytes(20_000)
    producer.produce("events", **record, partition=0)
    assert not producer.stages["events"].entries
    producer.purge()


def test_batches_to_be_compressed_fit_the_shared_memory(make) -> None:
    """With any batch.size; only a record that never fits is refused, alone."""
    producer, native = make(compression_type="lz4", mqd_buffer_bytes=64 << 10, linger_ms=200)
    native.memory_bytes = 48 << 10  # the rest is for requests
    reports = Reports()
    for _ in range(200):
        producer.produce("events", os.urandom(1000), partition=0, on_delivery=reports)
    assert producer.flush(10) == 0 and reports.errors == [0] * 200
    for size in (1000, 100_000, 1000):
        producer.produce("events", os.urandom(size), partition=0, on_delivery=reports)
    assert producer.flush(10) == 0 and sorted(reports.errors[200:]) == [0, 0, KafkaError.MSG_SIZE_TOO_LARGE]
    assert producer.outcomes.records_failed == 1 and len(native.written[0]) == 202


def test_a_transaction_fails_with_a_record_that_is_too_large_compressed(make) -> None:
    producer, native = make(compression_type="lz4", mqd_buffer_bytes=64 << 10, transactional_id="t", linger_ms=60_000)
    native.memory_bytes = 48 << 10
    producer.init_transactions(10)
    producer.begin_transaction()
    producer.produce("events", b"known", partition=0)
    assert producer.flush(10) == 0
    reports = Reports()
    for size in (10, 100_000):  # together, when the second is sent
        producer.produce("events", os.urandom(size), partition=0, on_delivery=reports)
    with pytest.raises(KafkaException):
        producer.produce("events", b"more")
    producer.abort_transaction(10)
    assert producer.flush(10) == 0 and sorted(reports.errors) == [0, KafkaError.MSG_SIZE_TOO_LARGE], (
        "each once; the first was written, and aborted"
    )
    producer.begin_transaction()
    producer.produce("events", b"good", partition=0, on_delivery=reports)
    producer.commit_transaction(10)
    assert reports.errors[2:] == [0]


def test_an_unknown_topic_ends(make) -> None:
    producer, _ = make(topic_metadata_propagation_max_ms=100)
    reports = Reports()
    producer.produce("nowhere", b"x", on_delivery=reports)
    assert producer.flush(10) == 0
    assert len(reports.errors) == 1 and reports.errors[0] in (
        KafkaError._UNKNOWN_TOPIC,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
    )
    with pytest.raises(KafkaException) as raised:
        producer.produce_batch("nowhere", [b"x"])
    assert raised.value.args[0].code() == KafkaError._UNKNOWN_TOPIC and raised.value.accepted == 0


def test_a_topic_may_appear_late(make, broker: FakeBroker) -> None:
    producer, native = make()
    threading.Timer(0.1, lambda: broker.topics.update(late=1)).start()
    producer.produce("late", b"x")
    assert producer.flush(10) == 0 and native.written == {0: [b"x"]}


def test_a_topic_that_grows(make, broker: FakeBroker) -> None:
    producer, native = make()
    producer.produce("events", b"x", partition=2)
    assert producer.flush(10) == 0
    with pytest.raises(KafkaException):
        producer.produce("events", b"x", partition=5)
    broker.topics["events"] = 6
    producer.attachment.metadata.refresh()
    assert producer.attachment.wait_for(lambda: producer.stages["events"].partition_count == 6, 10)
    producer.produce("events", b"y", partition=5)
    assert producer.flush(10) == 0 and native.written == {2: [b"x"], 5: [b"y"]}


# -- identity --------------------------------------------------------------------------------------


def test_an_identity_is_requested_first(make) -> None:
    producer, native = make(enable_idempotence=True)
    producer.produce("events", b"x", partition=0)
    assert producer.flush(10) == 0
    assert native.identities == [(100, 0)] and native.options.inflight_max == 5


def test_a_forgotten_identity_is_renewed_and_the_batch_sent_again(make) -> None:
    producer, native = make(enable_idempotence=True)
    fates = iter([ErrorCode.UNKNOWN_PRODUCER_ID])
    native.fate = lambda batch: next(fates, 0)
    reports = Reports()
    producer.produce("events", b"x", partition=0, on_delivery=reports)
    assert producer.flush(10) == 0
    assert reports.errors == [0] and native.identities == [(100, 0), (101, 0)]


def test_a_hole_is_filled_by_a_new_identity(make) -> None:
    producer, native = make(enable_idempotence=True, linger_ms=0)
    producer.produce("events", b"first", partition=1)
    assert producer.flush(10) == 0
    native.fate = lambda batch: (
        ErrorCode.INVALID_RECORD
        if b"bad" in batch.values
        else ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        if len(native.identities) == 1
        else 0
    )
    reports = Reports()
    producer.produce("events", b"bad", partition=0, on_delivery=reports)
    producer.produce("events", b"good", partition=0, on_delivery=reports)
    assert producer.flush(10) == 0
    assert sorted(reports.errors) == [0, ErrorCode.INVALID_RECORD] and len(native.identities) == 2


@pytest.mark.parametrize("unknown", [ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.REQUEST_TIMED_OUT])
def test_batches_with_an_unknown_outcome_are_sent_again_before_the_identity_changes(make, unknown: ErrorCode) -> None:
    """After a leader change one batch has an open outcome while another is refused permanently (a
    wrong timestamp): under the new identity the broker would not recognize the first one, and write
    it twice.
    """
    producer, native = make(enable_idempotence=True, linger_ms=0)
    log: list[tuple[int, bytes]] = []  # (identity, value), as in a broker that knows its producers
    refused = threading.Event()

    def fate(batch: Any) -> int:
        if b"bad" in batch.values:
            refused.set()
            return ErrorCode.INVALID_TIMESTAMP
        entry = (len(native.identities), batch.values[0])
        if entry in log:  # a repetition
            return 0 if refused.is_set() and producer.identity.renewing else unknown
        log.append(entry)
        return unknown

    native.fate = fate
    reports = Reports()
    producer.produce("events", b"first", partition=0, on_delivery=reports)
    producer.poll(0.01)
    producer.produce("events", b"bad", partition=1, on_delivery=reports)
    assert producer.flush(10) == 0
    assert sorted(reports.errors) == [0, ErrorCode.INVALID_TIMESTAMP] and log == [(1, b"first")]
    deadline = time.monotonic() + 10
    while len(native.identities) < 2 and time.monotonic() < deadline:
        producer.poll(0.01)
    assert len(native.identities) == 2, "now it changes"


def test_a_hole_under_the_gapless_guarantee_is_fatal(make) -> None:
    errors: list[KafkaError] = []
    producer, native = make(enable_idempotence=True, enable_gapless_guarantee=True, error_cb=errors.append)
    native.fate = lambda batch: ErrorCode.INVALID_RECORD
    producer.produce("events", b"x", partition=0)
    producer.flush(10)
    producer.poll(0)
    with pytest.raises(KafkaException) as raised:
        producer.produce("events", b"y")
    assert raised.value.args[0].fatal() and producer.fatal.code() == KafkaError._GAPLESS_GUARANTEE
    assert errors[0].fatal()


def test_out_of_order_sequences_are_fatal(make) -> None:
    producer, native = make(enable_idempotence=True)
    native.fate = lambda batch: ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    reports = Reports()
    producer.produce("events", b"x", partition=0, on_delivery=reports)
    producer.flush(10)
    assert producer.fatal is not None and producer.fatal.code() == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert reports.errors == [ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER]


@pytest.mark.parametrize(
    ("error", "idempotent", "transactional", "renewing", "action"),
    [
        (ErrorCode.NOT_LEADER_OR_FOLLOWER, False, False, False, ErrorAction.RETRY),
        (ErrorCode.KAFKA_STORAGE_ERROR, True, False, False, ErrorAction.RETRY),
        (ErrorCode.MESSAGE_TOO_LARGE, False, False, False, ErrorAction.FAIL),
        (ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, True, False, False, ErrorAction.FATAL),
        (ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, True, False, True, ErrorAction.RENEW),
        (ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, True, True, False, ErrorAction.FAIL),
        (ErrorCode.UNKNOWN_PRODUCER_ID, True, False, False, ErrorAction.RENEW),
        (ErrorCode.UNKNOWN_PRODUCER_ID, True, True, False, ErrorAction.FAIL),
        (ErrorCode.INVALID_PRODUCER_EPOCH, True, True, False, ErrorAction.FATAL),
        (ErrorCode.PRODUCER_FENCED, True, True, False, ErrorAction.FATAL),
        (ErrorCode.INVALID_PRODUCER_EPOCH, True, False, False, ErrorAction.RENEW),
        (ErrorCode.TRANSACTION_ABORTABLE, True, True, False, ErrorAction.FAIL),
        (ErrorCode.CONCURRENT_TRANSACTIONS, True, True, False, ErrorAction.RETRY),
    ],
)
def test_the_treatment_of_each_error(
    error: int, idempotent: bool, transactional: bool, renewing: bool, action: ErrorAction
) -> None:
    assert action_after(error, idempotent, transactional, renewing) is action


# -- full, lost, closed ----------------------------------------------------------------------------


def test_full_memory_is_a_buffer_error_and_nothing_is_lost(make) -> None:
    producer, native = make()
    producer.produce("events", b"first", partition=0)
    assert producer.flush(10) == 0
    native.capacity = 100
    native.fate = lambda batch: None
    taken = [b"first"]
    with pytest.raises(BufferError):
        for number in range(5000):
            producer.produce("events", b"%d" % number, partition=0)
            taken.append(b"%d" % number)
    native.fate = lambda batch: 0
    for batch in list(native.batches.values()):
        if batch.state == "sent":
            native.answer(batch, 0)
    assert producer.flush(10) == 0
    assert native.written[0] == taken


def test_unserved_reports_fill_the_queue(make) -> None:
    producer, _ = make(queue_buffering_max_messages=10)
    reports = Reports()
    for _ in range(10):
        producer.produce("events", b"x", on_delivery=reports)
    deadline = time.monotonic() + 10
    while producer.native.outstanding_records or any(stage.entries for stage in producer.stages.values()):
        assert time.monotonic() < deadline
        time.sleep(0.001)  # the background thread delivers
    with pytest.raises(BufferError):
        producer.produce("events", b"x")
    assert producer.poll(0) == 10
    producer.produce("events", b"x")


def test_a_dead_worker_and_its_successor(make, broker: FakeBroker) -> None:
    errors: list[KafkaError] = []
    producer, native = make(error_cb=errors.append, enable_idempotence=True)
    native.fate = lambda batch: None
    reports = Reports()
    producer.produce("events", b"under way", partition=0, on_delivery=reports)
    producer.flush(0.05)
    broker.refuse = ConnectionRefusedError("nobody listens")
    broker.kill()
    producer.attachment.wait_for(lambda: not producer.attachment.attached, 10)
    producer.produce("events", b"meanwhile", partition=0, on_delivery=reports)
    native.fate = lambda batch: 0
    broker.refuse = None
    assert producer.flush(10) == 0
    producer.poll(0)
    assert native.moves == 1 and reports.errors == [0, 0] and native.written[0] == [b"under way", b"meanwhile"]
    assert errors and errors[0].code() == KafkaError._TRANSPORT


def test_without_retries_nothing_is_sent_twice(make, broker: FakeBroker) -> None:
    producer, native = make(retries=0)
    native.fate = lambda batch: None
    reports = Reports()
    producer.produce("events", b"under way", partition=0, on_delivery=reports)
    producer.flush(0.05)
    broker.kill()
    assert producer.flush(10) == 0
    assert reports.errors == [KafkaError._TRANSPORT] and native.written == {}


def test_statistics(make) -> None:
    seen: list[dict] = []
    producer, _ = make(statistics_interval_ms=20, stats_cb=lambda text: seen.append(json.loads(text)))
    producer.produce("events", b"x")
    producer.flush(10)
    deadline = time.monotonic() + 10
    while not any(figures["txmsgs"] for figures in seen):
        assert time.monotonic() < deadline
        producer.poll(0.1)
    assert seen[-1]["type"] == "producer" and seen[-1]["topics"]["events"]["partition_cnt"] == 3


def test_a_garbage_collected_producer_ends(make) -> None:
    producer, native = make()
    producer.produce("events", b"x")
    producer.abandon()
    assert native.closed and producer.attachment.is_closed
    producer.abandon()


def test_reports_only_of_errors(make) -> None:
    producer, native = make(delivery_report_only_error=True)
    native.fate = lambda batch: ErrorCode.INVALID_RECORD if b"bad" in batch.values else 0
    reports = Reports()
    producer.produce("events", b"good", partition=0, on_delivery=reports)
    producer.produce("events", b"bad", partition=1, on_delivery=reports)
    producer.flush(10)
    assert [message.value() for message in reports.messages] == [b"bad"]


# -- batches that end early ------------------------------------------------------------------------


def test_a_batch_cut_short_reports_how_much_was_accepted(make) -> None:
    """By a callback of the application here: the records before must not be given again."""
    producer, native = make(queue_buffering_max_messages=100)

    def refuse(_error: KafkaError | None, _message: Message) -> None:
        raise ValueError("a callback's own")

    producer.produce("events", b"first", partition=0, on_delivery=refuse)
    with pytest.raises(ValueError, match="a callback's own") as raised:
        producer.produce_batch("events", [b"%d" % number for number in range(1000)], partition=0)
    assert producer.flush(10) == 0
    assert 0 < raised.value.accepted < 1000 and native.written[0] == [b"first"] + [
        b"%d" % number for number in range(raised.value.accepted)
    ]  # type: ignore[attr-defined]


def _interrupt_after(native: FakeProducer, call: int) -> None:
    """Ctrl-C while the C core takes records: it is raised when that is done, in the n-th call from
    here on.
    """
    usual, calls = native.append, itertools.count(1)

    def append(*arguments: Any) -> int:
        done = usual(*arguments)
        if next(calls) == call:
            raise KeyboardInterrupt
        return done

    native.append = append  # type: ignore[method-assign]


def test_an_interrupted_batch_reports_how_much_was_accepted(make) -> None:
    producer, native = make()
    native.capacity = 1 << 20
    producer.produce("events", b"known", partition=1)
    assert producer.flush(10) == 0
    _interrupt_after(native, 2)
    values, reports = [b"%d" % number for number in range(30_000)], []
    with pytest.raises(KeyboardInterrupt) as raised:
        producer.produce_batch(
            "events", values, partition=0, on_delivery=lambda error, delivery: reports.append(delivery.count)
        )
    assert producer.flush(10) == 0
    taken = raised.value.accepted  # type: ignore[attr-defined]
    assert 0 < taken < 30_000 and native.written[0] == values[:taken] and sum(reports) == taken


def test_records_accepted_during_ctrl_c_are_tracked_and_not_written_twice(make) -> None:
    producer, native = make(linger_ms=60_000)
    producer.produce("events", b"known", partition=1)
    assert producer.flush(10) == 0
    codes = iter([ErrorCode.NOT_LEADER_OR_FOLLOWER])
    native.fate = lambda batch: next(codes, 0)
    _interrupt_after(native, 1)
    reports = Reports()
    producer.produce("events", b"0", partition=0, on_delivery=reports)
    with pytest.raises(KeyboardInterrupt):
        producer.flush(10)
    producer.produce("events", b"1", partition=0)
    deadline = time.monotonic() + 10
    while not reports.errors and time.monotonic() < deadline:
        producer.poll(0.05)
    assert native.written[0] == [b"0"] and reports.errors == [0], "the second lingers: no flush is under way any more"
    assert producer.flush(10) == 0 and native.written[0] == [b"0", b"1"]


def test_a_batch_whose_compression_is_interrupted_is_compressed_again(make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was lost, and flush() waited for its records forever."""
    producer, native = make(compression_type="lz4", linger_ms=60_000)
    producer.produce("events", b"known", partition=1)
    assert producer.flush(10) == 0

    def interrupted(*_arguments: Any) -> bytes:
        raise KeyboardInterrupt

    reports = Reports()
    producer.produce("events", b"x" * 1000, partition=0, on_delivery=reports)
    with monkeypatch.context() as patched:
        patched.setattr(compressing, "compress", interrupted)
        with pytest.raises(KeyboardInterrupt):
            producer.flush(10)
    assert producer.flush(10) == 0
    assert reports.errors == [0] and len(native.written[0]) == 1


def test_a_batch_of_dicts_cut_short_reports_how_much_was_accepted(
    make, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    implementation, native = make()
    monkeypatch.setattr("mqd.client.producer._create_implementation", lambda settings: implementation)
    producer = Producer({"bootstrap.servers": "x"})
    with pytest.raises(TypeError) as raised:
        producer.produce_batch(
            "events", [{"value": b"0", "partition": 0}, {"value": b"1", "partition": 0}, {"value": object()}]
        )
    assert producer.flush(10) == 0
    assert raised.value.accepted == 2 and native.written[0] == [b"0", b"1"]  # type: ignore[attr-defined]


class FullAfterThree:
    """librdkafka's Producer, whose queue is full with three records; serving a report fails with
    `problem`.
    """

    def __init__(self, problem: BaseException) -> None:
        self.problem = problem
        self.taken: list[bytes] = []

    def produce(self, _topic: str, value: bytes, *_arguments: Any, **_named: Any) -> None:
        if len(self.taken) == 3:
            raise BufferError("Local: Queue full")
        self.taken.append(value)

    def poll(self, _timeout: float) -> int:
        raise self.problem

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return lambda *_arguments: None


@pytest.mark.parametrize("problem", [ValueError("a callback's own"), KeyboardInterrupt()])
def test_a_batch_over_tcp_cut_short_reports_how_much_was_accepted(
    monkeypatch: pytest.MonkeyPatch, problem: BaseException
) -> None:
    played = FullAfterThree(problem)
    monkeypatch.setattr("confluent_kafka.Producer", lambda *_arguments, **_named: played)
    producer = TcpProducer(read({"bootstrap.servers": "x"}), "a test")
    with pytest.raises(type(problem)) as raised:
        producer.produce_batch("events", [b"%d" % number for number in range(10)])
    assert raised.value.accepted == 3 and played.taken == [b"0", b"1", b"2"]  # type: ignore[attr-defined]
