"""The end of a shared-memory producer: every record has its report, whatever prevents it from being
written. With a fake C core and a fake broker.
"""

from __future__ import annotations

import errno
import time

import pytest

from mqd.client.messages import KafkaError, KafkaException, Message, local_error
from mqd.client.shm import closing
from mqd.client.shm.producer import ShmProducer
from mqd.protocol.errors import ErrorCode
from tests.unit.client.client_broker import FakeBroker
from tests.unit.client.client_native import FakeProducer, Reports, broker, make  # noqa: F401 (fixtures)


def _end_by_a_fatal_error(producer: ShmProducer, native: FakeProducer, reports: Reports) -> None:
    """Two records are in flight in partition 0; the response to their batch is fatal, and a third
    is never sent.
    """
    native.fate = lambda batch: None
    for value in (b"0", b"1"):
        producer.produce("events", value, partition=0, on_delivery=reports)
    assert producer.flush(0.05) == 2
    producer.produce("typo", b"2", on_delivery=reports)
    with producer.attachment.lock:
        for batch in [batch for batch in native.batches.values() if batch.state == "sent"]:
            native.answer(batch, ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER)
    assert producer.attachment.wait_for(lambda: producer.fatal, 10)


def test_a_producer_closed_after_a_fatal_error_reports_failed_records(make) -> None:
    errors: list[KafkaError] = []
    producer, native = make(enable_idempotence=True, error_cb=errors.append)
    reports = Reports()
    _end_by_a_fatal_error(producer, native, reports)
    assert reports.errors == [] and producer.close()
    assert reports.errors == [
        ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
        ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
        KafkaError._PURGE_QUEUE,
    ]
    assert [message.value() for message in reports.messages] == [b"0", b"1", b"2"]
    assert [error.code() for error in errors] == [KafkaError._FATAL] and native.closed


@pytest.mark.parametrize("compression", ["none", "lz4"])
def test_a_producer_closed_without_a_broker_reports_failed_records(
    make, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch, compression: str
) -> None:
    monkeypatch.setattr(closing, "_WAIT_WITHOUT_BROKER_S", 0.0)
    producer, native = make(compression_type=compression, linger_ms=60_000)
    producer.produce("events", b"known")
    assert producer.flush(10) == 0
    broker.refuse = ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens")
    broker.kill()
    assert producer.attachment.wait_for(lambda: not producer.attachment.attached, 10)
    reports = Reports()
    large = bytes(20 << 10)  # sent at once as far as possible
    producer.produce("events", large, on_delivery=reports)
    producer.produce("typo", b"small", on_delivery=reports)
    assert producer.close() and native.closed
    assert sorted(message.value() for message in reports.messages) == [large, b"small"]
    assert set(reports.errors) <= {KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT}
    assert producer.close() and len(reports.errors) == 2


def test_reports_of_dropped_records_are_in_record_order(make) -> None:
    producer, native = make()
    native.fate, native.capacity = lambda batch: None, 2
    reports = Reports()
    for value in (b"0", b"1", b"2"):
        producer.produce("events", value, partition=0, on_delivery=reports)
    assert producer.flush(0.05) == 3
    producer.purge()
    assert producer.flush(10) == 0
    assert [message.value() for message in reports.messages] == [b"0", b"1", b"2"]


def test_a_statistics_callback_that_raises_does_not_keep_close_from_giving_up(
    make, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closing, "_WAIT_WITHOUT_BROKER_S", 0.5)

    def raises(_statistics: str) -> None:
        raise ValueError("ours")

    producer, _ = make(statistics_interval_ms=50, stats_cb=raises)
    broker.refuse = ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens")
    broker.kill()
    assert producer.attachment.wait_for(lambda: not producer.attachment.attached, 10)
    reports = Reports()
    producer.produce("events", b"x", on_delivery=reports)
    with pytest.raises(ValueError, match="ours"):
        producer.close()
    assert reports.errors == [KafkaError._PURGE_QUEUE]


@pytest.mark.parametrize("is_fatal", [False, True])
def test_a_report_that_raises_does_not_block_others(make, is_fatal: bool) -> None:
    producer, native = make(enable_idempotence=True)
    reports = Reports(raising=2)
    if is_fatal:
        _end_by_a_fatal_error(producer, native, reports)
    else:
        for value in (b"0", b"1", b"2"):
            producer.produce("events", value, partition=0, on_delivery=reports)
    with pytest.raises(ValueError, match="report 1"):
        producer.close()
    assert (
        [message.value() for message in reports.messages] == [b"0", b"1", b"2"] and native.closed and producer.close()
    )


def test_producing_in_a_delivery_report_is_refused_after_a_fatal_error(make, broker: FakeBroker) -> None:
    producer, native = make(enable_idempotence=True)
    reported = []

    def again(_error: KafkaError | None, message: Message) -> None:
        reported.append(message.value())
        producer.produce("events", message.value(), on_delivery=again)

    native.fate = lambda batch: None
    producer.produce("events", b"x", on_delivery=again)
    assert producer.flush(0.05) == 1
    broker.refuse = KafkaException(local_error(KafkaError._FATAL, "another build: restart this process", fatal=True))  # type: ignore[assignment]
    broker.kill()
    deadline = time.monotonic() + 10
    while producer.fatal is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)  # the background thread gets it
    with pytest.raises(KafkaException) as refused:
        producer.close()
    assert refused.value.args[0].code() == KafkaError._FATAL and reported == [b"x"]


def _without_a_broker(producer: ShmProducer, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closing, "_WAIT_WITHOUT_BROKER_S", 0.0)
    broker.refuse = ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens")
    broker.kill()
    assert producer.attachment.wait_for(lambda: not producer.attachment.attached, 10)


def test_a_report_of_close_may_poll_and_produce_once_more(
    make, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets a report of that record, too."""
    producer, native = make()
    _without_a_broker(producer, broker, monkeypatch)
    last = Reports()

    def again(_error: KafkaError | None, message: Message) -> None:
        producer.produce("events", message.value() + b" again", on_delivery=last)
        producer.poll(0)

    producer.produce("events", b"0", on_delivery=again)
    producer.produce("events", b"1", on_delivery=again)
    assert producer.close() and native.closed
    assert sorted(message.value() for message in last.messages) == [b"0 again", b"1 again"] and set(last.errors) == {
        KafkaError._PURGE_QUEUE
    }


def test_close_ends_when_each_report_produces_again(
    make, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    producer, native = make()
    _without_a_broker(producer, broker, monkeypatch)
    reported = []

    def again(_error: KafkaError | None, message: Message) -> None:
        reported.append(message.value())
        producer.produce("events", message.value(), on_delivery=again)

    producer.produce("events", b"x", on_delivery=again)
    assert producer.close()
    assert reported == [b"x", b"x"] and native.closed
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["Producer has been closed"]


def test_a_producer_that_another_thread_closes_meanwhile_is_closed(make, monkeypatch: pytest.MonkeyPatch) -> None:
    producer, native = make()

    def closed_meanwhile(ours: ShmProducer, _raised: list[Exception]) -> None:
        ours.end()

    native.deliveries = lambda: pytest.fail("used after it was closed") if native.closed else []  # type: ignore[method-assign]
    monkeypatch.setattr(closing, "_flush", closed_meanwhile)
    assert producer.close() and native.closed


def test_an_open_transaction_does_not_prolong_close_without_a_broker(
    make, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, native = make(transactional_id="t", transaction_timeout_ms=600_000, delivery_timeout_ms=600_000)
    producer.init_transactions(10)
    producer.begin_transaction()
    reports = Reports()
    producer.produce("events", b"0")
    assert producer.flush(10) == 0
    _without_a_broker(producer, broker, monkeypatch)
    monkeypatch.setattr(closing, "_WAIT_WITHOUT_BROKER_S", 0.3)
    producer.produce("events", b"1", on_delivery=reports)
    requests: list[float] = []
    usual = producer.transactions.abort

    def abort(timeout: float) -> None:
        requests.append(timeout)
        usual(min(timeout, 0.5))

    monkeypatch.setattr(producer.transactions, "abort", abort)
    assert producer.close() and native.closed
    assert requests == [0.3] and reports.errors == [KafkaError._PURGE_QUEUE]


def test_close_waits_for_a_slow_coordinator_as_long_as_the_transaction_may_take(
    make, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, _ = make(transactional_id="t", transaction_timeout_ms=600_000, delivery_timeout_ms=600_000)
    producer.init_transactions(10)
    producer.begin_transaction()
    requests: list[float] = []
    monkeypatch.setattr(producer.transactions, "abort", requests.append)
    assert producer.close() and requests == [600.0]
