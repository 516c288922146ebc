"""A transactional producer gets a response after the transaction that sent the request has ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mqd.client import requests
from mqd.client.messages import GroupMetadata, KafkaError, TopicPartition
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import AddOffsetsToTxnResponse, AddPartitionsToTxnResponse, TxnOffsetCommitResponse
from tests.unit.client.client_broker import FakeBroker
from tests.unit.client.client_native import broker, make  # noqa: F401 (fixtures)


@pytest.mark.parametrize("arrival", ["while it ends", "between", "in the next"])
@pytest.mark.parametrize("code", [0, ErrorCode.TOPIC_AUTHORIZATION_FAILED, ErrorCode.INVALID_PRODUCER_EPOCH])
def test_a_late_response_does_not_affect_the_next_transaction(
    make, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch, code: int, arrival: str
) -> None:
    """Formerly the partition counted as added to the next transaction, so records were sent that the
    coordinator did not know of; or an error failed that transaction, or even the producer, because
    the abort had already renewed the epoch.
    """
    broker.transaction_version = 1
    broker.answers |= {
        requests.ADD_OFFSETS_TO_TXN: lambda request: AddOffsetsToTxnResponse(),
        requests.TXN_OFFSET_COMMIT: lambda request: TxnOffsetCommitResponse(),
    }
    responses: list[Callable[[Any, KafkaError | None], None]] = []
    producer, native = make(transactional_id="t")
    producer.init_transactions(10)
    producer.begin_transaction()
    send = producer.attachment.send
    monkeypatch.setattr(
        producer.attachment,
        "send",
        lambda key, *rest: responses.append(rest[-1]) if key == requests.ADD_PARTITIONS_TO_TXN else send(key, *rest),
    )
    producer.produce("events", b"x", partition=0)
    assert producer.attachment.wait_for(lambda: bool(responses), 10)
    result = AddPartitionsToTxnResponse.TopicResult(
        name="events",
        results_by_partition=[AddPartitionsToTxnResponse.PartitionResult(partition_index=0, partition_error_code=code)],
    )
    late = AddPartitionsToTxnResponse(results_by_topic_v3_and_below=[result])
    renewed = broker.answers[requests.INIT_PRODUCER_ID]
    broker.answers[requests.INIT_PRODUCER_ID] = lambda request: (
        arrival == "while it ends" and responses[0](late, None) or renewed(request)
    )
    # otherwise the abort sends no EndTxn
    producer.send_offsets_to_transaction([TopicPartition("events", 0, 5)], GroupMetadata("g"), 10)
    producer.abort_transaction(10)
    with producer.attachment.lock:
        if arrival == "between":
            responses[0](late, None)
        producer.begin_transaction()
        if arrival == "in the next":
            responses[0](late, None)
    producer.produce("events", b"y", partition=0)
    assert producer.attachment.wait_for(lambda: len(responses) == 2, 10) and not native.written
    with producer.attachment.lock:
        responses[1](AddPartitionsToTxnResponse(), None)
    producer.commit_transaction(10)
    assert native.written == {0: [b"y"]}
