"""A shared-memory producer whose application is interrupted by Ctrl-C: each record is written once
and reported once, and no transaction ends without its records.

With a fake C core and a fake broker; Ctrl-C is raised once, by a wrapper of the interrupted
function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mqd.client import requests
from mqd.client.messages import KafkaError, KafkaException
from mqd.client.shm import appending, compressing
from mqd.client.shm.producer import ShmProducer
from tests.unit.client.client_broker import FakeBroker
from tests.unit.client.client_native import Reports, broker, make  # noqa: F401 (fixtures)


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """interrupt(owner, name): its next call raises KeyboardInterrupt before it does anything;
    behind=True: when it is done.
    """

    def interrupt(owner: Any, name: str, behind: bool = False) -> None:
        usual = getattr(owner, name)

        def interrupted(*arguments: Any) -> None:
            monkeypatch.setattr(owner, name, usual)
            if behind:
                usual(*arguments)
            raise KeyboardInterrupt

        monkeypatch.setattr(owner, name, interrupted)

    return interrupt


def _ends(broker: FakeBroker) -> list[bool]:
    return [request.committed for key, request in broker.seen if key == requests.END_TXN]


def _begun(producer: ShmProducer, broker: FakeBroker) -> None:
    """A transaction is open, in a known topic."""
    producer.init_transactions(10)
    producer.begin_transaction()
    producer.produce("events", b"known", partition=1)
    producer.commit_transaction(10)
    producer.begin_transaction()
    broker.seen.clear()


@pytest.mark.parametrize("commits", [True, False])
def test_a_transaction_whose_batch_is_interrupted_while_it_is_compressed_ends_with_its_records(
    make, broker: FakeBroker, interrupt, commits: bool
) -> None:
    """They were written, and became part of the next transaction."""
    producer, native = make(transactional_id="t", compression_type="lz4", linger_ms=60_000, batch_num_messages=10)
    _begun(producer, broker)
    interrupt(compressing, "compress")
    with pytest.raises(KeyboardInterrupt) as raised:
        producer.produce_batch("events", [b"y" * 50] * 10, partition=0)
    assert raised.value.accepted == 10 and producer.flush(10) == 0  # type: ignore[attr-defined]
    assert len(native.written[0]) == 10
    (producer.commit_transaction if commits else producer.abort_transaction)(10)
    assert _ends(broker) == [commits]


def test_records_of_a_full_batch_whose_compression_is_interrupted_are_written_once(make, interrupt) -> None:
    producer, native = make(compression_type="lz4", linger_ms=60_000, batch_num_messages=10)
    producer.produce("events", b"known", partition=1)
    assert producer.flush(10) == 0
    reports = Reports()
    for number in range(25):
        producer.produce("events", b"%d" % number * 50, partition=0, on_delivery=reports)
    interrupt(compressing, "compress")
    with pytest.raises(KeyboardInterrupt):
        producer.flush(10)
    assert producer.flush(10) == 0
    assert len(native.written[0]) == 25 and [message.value() for message in reports.messages] == [
        b"%d" % number * 50 for number in range(25)
    ]


@pytest.mark.parametrize("partition", [0, list(range(3)) * 8 + [0]])
def test_a_batch_whose_compression_is_interrupted_was_accepted_whole(make, interrupt, partition: Any) -> None:
    producer, native = make(compression_type="lz4", linger_ms=60_000, batch_num_messages=5)
    producer.produce("events", b"known", partition=1)
    assert producer.flush(10) == 0
    interrupt(compressing, "compress")
    reports: list[int] = []
    with pytest.raises(KeyboardInterrupt) as raised:
        producer.produce_batch(
            "events",
            [b"y" * 50] * 25,
            partition=partition,
            on_delivery=lambda error, delivery: reports.append(delivery.count),
        )
    assert raised.value.accepted == 25 and producer.flush(10) == 0  # type: ignore[attr-defined]
    assert sum(map(len, native.written.values())) == 26 and sum(reports) == 25


def test_close_in_a_signal_handler_does_not_wait_for_the_interrupted_commit(make, broker: FakeBroker) -> None:
    """The commit can only continue when the handler returns: an abort in between waited forever."""
    producer, _ = make(transactional_id="t")
    _begun(producer, broker)
    producer.produce("events", b"x", partition=0)
    assert producer.flush(10) == 0

    def end(_request: Any) -> None:
        """No response; instead the handler runs in the waiting thread."""
        producer.transactions.on_close(1.0)

    usual, broker.answers[requests.END_TXN] = broker.answers[requests.END_TXN], end
    with pytest.raises(KafkaException) as raised:
        producer.commit_transaction(0.1)
    assert raised.value.args[0].code() == KafkaError._TIMED_OUT and _ends(broker) == [True]
    broker.answers[requests.END_TXN] = usual
    producer.transactions.on_close(1.0)
    assert _ends(broker) == [True, False], "it is no longer being ended"


def _commit_interrupted_before_anything(producer: ShmProducer, meanwhile: Callable[[], None]) -> None:
    """Ctrl-C before other threads are prevented from producing; one of them produces."""
    usual = producer.transactions._stop_staging

    def interrupted() -> None:
        producer.transactions._stop_staging = usual  # type: ignore[method-assign]
        meanwhile()
        raise KeyboardInterrupt

    producer.transactions._stop_staging = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        producer.commit_transaction(10)


def test_nothing_is_produced_after_a_commit_interrupted_at_its_start(make, broker: FakeBroker) -> None:
    producer, native = make(transactional_id="t", linger_ms=60_000)
    _begun(producer, broker)
    producer.produce("events", b"x", partition=0)
    stage = producer.stages["events"]
    _commit_interrupted_before_anything(producer, lambda: setattr(stage, "limit", 10))
    with pytest.raises(KafkaException) as raised:
        producer.produce("events", b"late", partition=0)
    assert raised.value.args[0].code() == KafkaError._STATE
    producer.commit_transaction(10)
    assert native.written[0] == [b"x"] and _ends(broker) == [True]


def test_a_commit_that_was_interrupted_does_not_end_without_a_record_that_failed_since(
    make, broker: FakeBroker
) -> None:
    """Produced by another thread at that moment."""
    producer, native = make(transactional_id="t", linger_ms=60_000, delivery_timeout_ms=100)
    _begun(producer, broker)
    reports = Reports()
    _commit_interrupted_before_anything(
        producer,
        lambda: producer.stages["events"].entries.append(
            producer._entry_of(producer.stages["events"], b"late", None, 0, reports, 0, None)
        ),
    )
    with pytest.raises(KafkaException) as raised:
        producer.commit_transaction(10)
    assert (
        raised.value.args[0].txn_requires_abort()
        and reports.errors == [KafkaError._MSG_TIMED_OUT]
        and True not in _ends(broker)
    )
    producer.abort_transaction(10)
    producer.begin_transaction()


def test_a_handler_that_raises_the_same_exception_again_loses_no_records(make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of the first interrupt, which hit while records were taken, was applied to the
    second, which hit when none were.
    """
    producer, native = make(linger_ms=60_000)
    producer.produce("events", b"known", partition=1)
    assert producer.flush(10) == 0
    stop, usual, usual_columns = KeyboardInterrupt(), native.append, appending.native_columns

    def stopped_behind(*arguments: Any) -> int:
        native.append = usual  # type: ignore[method-assign]
        usual(*arguments)
        raise stop

    def stopped_before(*_arguments: Any) -> Any:
        monkeypatch.setattr(appending, "native_columns", usual_columns)
        raise stop

    native.append = stopped_behind  # type: ignore[method-assign]
    values = [b"%d" % number for number in range(8)]
    for place, some in ((None, values[:3]), (stopped_before, values[3:])):
        for value in some:
            producer.produce("events", value, partition=0)
        if place is not None:
            monkeypatch.setattr(appending, "native_columns", place)
        with pytest.raises(KeyboardInterrupt):
            producer.flush(10)
        assert producer.flush(10) == 0
    assert native.written[0] == values


@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize(
    ("owner", "name", "behind"),
    [
        ("transactions", "_set_identity", False),
        ("native", "set_identity", True),
        ("producer", "hold", True),
        ("transactions", "_set_identity", True),
    ],
)
def test_an_end_of_transaction_interrupted_after_the_response_can_be_repeated(
    make, broker: FakeBroker, interrupt, owner: str, name: str, behind: bool, commits: bool
) -> None:
    """No second EndTxn is sent: under the next epoch the coordinator has no such transaction."""
    producer, native = make(transactional_id="t")
    _begun(producer, broker)
    producer.produce("events", b"x", partition=0)
    assert producer.flush(10) == 0
    target = {"transactions": producer.transactions, "native": native, "producer": producer}[owner]
    usual = broker.answers[requests.END_TXN]

    def end(request: Any) -> Any:
        interrupt(target, name, behind)
        return usual(request)

    broker.answers[requests.END_TXN] = end
    ends = producer.commit_transaction if commits else producer.abort_transaction
    with pytest.raises(KeyboardInterrupt):
        ends(10)
    with pytest.raises(KafkaException):
        producer.produce("events", b"late", partition=0)
    ends(10)
    assert _ends(broker) == [commits] and native.identities[-1] == (100, 2)
    producer.begin_transaction()
    producer.produce("events", b"y", partition=0)
    assert producer.flush(10) == 0 and native.written[0] == [b"x", b"y"]


@pytest.mark.parametrize(
    ("owner", "name", "behind"),
    [
        ("transactions", "note_write", False),
        ("transactions", "note_write", True),
        ("outcomes", "split_by_batch", False),
        ("outcomes", "split_by_batch", True),
        ("outcomes", "add_records", False),
        ("outcomes", "add_records", True),
    ],
)
@pytest.mark.parametrize("partition", [0, -1])
def test_records_whose_accounting_is_interrupted_are_written_once_and_reported_once(
    make, broker: FakeBroker, interrupt, owner: str, name: str, behind: bool, partition: int
) -> None:
    producer, native = make(transactional_id="t", linger_ms=60_000)
    _begun(producer, broker)
    reports = Reports()
    for number in range(6):
        producer.produce(
            "events", b"%d" % number, partition=partition if partition >= 0 else number % 3, on_delivery=reports
        )
    interrupt(getattr(producer, owner), name, behind)
    with pytest.raises(KeyboardInterrupt):
        producer.flush(10)
    producer.commit_transaction(10)
    values = sorted(b"%d" % number for number in range(6))
    assert (
        sorted(message.value() for message in reports.messages) == values
        and set(reports.errors) == {0}
        and _ends(broker) == [True]
    )
    assert sorted([*sum(native.written.values(), [])]) == [*values, b"known"]


def test_a_part_of_a_batch_is_accounted_for_once(make) -> None:
    """Ctrl-C between two batches of one call: finished work is not repeated."""
    producer, _ = make()
    outcomes, waiters = producer.outcomes, [Reports()] * 4
    outcomes.before_append(waiters)
    parts = outcomes.split_by_batch(np.array([1, 2, 1, 2], np.uint64), waiters, 0)
    outcomes.add_records(0, parts[:1])
    outcomes.add_records(0, parts)
    assert [(number, batch.parts) for number, batch in outcomes.batches.items()] == [
        (1, [(waiters, [0, 2], 2)]),
        (2, [(waiters, [1, 3], 2)]),
    ]
    outcomes.batches.clear()


def test_outcomes_left_unprocessed_by_ctrl_c_are_reported(make, interrupt) -> None:
    """They were lost: flush() returned 0 without their reports, and later the records timed out,
    though they were written.
    """
    producer, native = make()
    producer.produce("events", b"known", partition=0)
    assert producer.flush(10) == 0
    native.fate = lambda batch: None
    reports = Reports()
    for number in range(3):
        producer.produce("events", b"%d" % number, partition=number, on_delivery=reports)
    assert producer.flush(0.05) == 3
    with producer.attachment.lock:
        for batch in list(native.batches.values()):
            native.answer(batch, 0)
        interrupt(producer.outcomes, "_report")
        with pytest.raises(KeyboardInterrupt):
            producer.outcomes.take_deliveries(0.0)
    assert producer.flush(10) == 0
    assert (
        [message.value() for message in reports.messages] == [b"0", b"1", b"2"]
        and reports.errors == [0] * 3
        and not producer.outcomes.batches
    )


@pytest.mark.parametrize(
    ("owner", "name"), [("native", "append_batch"), ("appender", "append_batch"), ("outcomes", "add_batch")]
)
def test_a_compressed_batch_accepted_during_ctrl_c_is_written_once(make, interrupt, owner: str, name: str) -> None:
    producer, native = make(compression_type="lz4", linger_ms=60_000)
    producer.produce("events", b"known", partition=1)
    assert producer.flush(10) == 0
    reports = Reports()
    for number in range(3):
        producer.produce("events", b"%d" % number * 500, partition=0, on_delivery=reports)
    interrupt(native if owner == "native" else getattr(producer, owner), name, behind=True)
    with pytest.raises(KeyboardInterrupt):
        producer.flush(10)
    assert producer.flush(10) == 0 and producer.compressor.record_count == 0
    assert len(native.written[0]) == 3 and reports.errors == [0] * 3
