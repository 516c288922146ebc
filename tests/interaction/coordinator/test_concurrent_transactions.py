"""Transactions of several producers at once on one connection, as in a JavaScript client: a
producer that uses its transactional id alone is never fenced; others are.

docs/decisions/coordinators/2026-11-26-kafkajs-invalid-producer-epoch.md
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Generator
from typing import Any

import pytest

from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import AddPartitionsToTxnRequest, InitProducerIdRequest
from tests.broker import Broker
from tests.interaction.traffic import INIT_PRODUCER_ID, PRODUCE, create_topic, one_outcome
from tests.interaction.transactional import ADD_PARTITIONS, END_TXN, RawProducer, connect, fresh

PRODUCERS, TRANSACTIONS = 6, 12
FENCED = {ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.PRODUCER_FENCED}
AGAIN = {ErrorCode.CONCURRENT_TRANSACTIONS, ErrorCode.NOT_ENOUGH_REPLICAS}
Step = Generator[tuple[int, int, Any], Any, None]


def _add(producer: RawProducer, topic: str, partition: int) -> AddPartitionsToTxnRequest:
    return AddPartitionsToTxnRequest(
        v3_and_below_transactional_id=producer.name,
        v3_and_below_producer_id=producer.producer_id,
        v3_and_below_producer_epoch=producer.epoch,
        v3_and_below_topics=[AddPartitionsToTxnRequest.Topic(name=topic, partitions=[partition])],
    )


def _life(producer: RawProducer, topic: str, chance: random.Random, errors: list[int]) -> Step:
    """One transaction after the other; every request waits for the previous response."""
    for _ in range(TRANSACTIONS):
        partition = chance.randrange(2)
        if producer.version == 0:  # KafkaJS: AddPartitionsToTxn 1, Produce 7, EndTxn 1
            while True:
                response = yield ADD_PARTITIONS, 1, _add(producer, topic, partition)
                errors.append(response.results_by_topic_v3_and_below[0].results_by_partition[0].partition_error_code)
                if errors[-1] not in AGAIN:
                    break
        for _ in range(chance.randrange(1, 4)):
            request = producer.request(topic, {partition: (b"v",)})
            while True:
                response = yield PRODUCE, 7 if producer.version == 0 else 12, request
                errors.append(one_outcome(response).error_code)
                if errors[-1] not in AGAIN:
                    break
        response = yield END_TXN, 1 if producer.version == 0 else 5, producer.end_request(chance.random() < 0.6)
        errors.append(response.error_code)
        if producer.version == 2:
            producer.adopt(response)


@pytest.mark.parametrize("version", [0, 2])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_producer_alone_with_its_id_is_never_fenced(shared_broker: Broker, seed: int, version: int) -> None:
    chance, topic, errors = random.Random(seed), fresh("concurrent"), []
    with connect(shared_broker) as kafka:
        create_topic(kafka, topic, 2)
        producers = [RawProducer(kafka, version=version) for _ in range(PRODUCERS)]
        for producer in producers:
            assert producer.init().error_code == 0
        lives = [_life(producer, topic, chance, errors) for producer in producers]
        idle: list[tuple[Step, Any]] = [(life, None) for life in lives]
        waiting: deque[Step] = deque()
        while idle or waiting:
            if idle and (not waiting or chance.random() < 0.7):
                life, response = idle.pop(chance.randrange(len(idle)))
                try:
                    kafka.send(*life.send(response))
                except StopIteration:
                    continue
                waiting.append(life)
            else:
                idle.append((waiting.popleft(), kafka.receive().body))
    assert not FENCED & set(errors), sorted(errors)
    assert set(errors) <= {0, *AGAIN} and len(errors) > PRODUCERS * TRANSACTIONS * 2


@pytest.mark.parametrize("version", [0, 2])
def test_two_concurrent_transactions_of_one_id_are_fenced(shared_broker: Broker, version: int) -> None:
    """KafkaJS requests a producer id in every transaction() that begins before the first response
    has arrived: the second producer id fences the first one's transaction.
    """
    topic = fresh("fenced")
    with connect(shared_broker) as kafka:
        create_topic(kafka, topic, 1)
        first = RawProducer(kafka, version=version)
        assert first.init().error_code == 0  # returns once the coordinator is available
        requested = InitProducerIdRequest(transactional_id=first.name, transaction_timeout_ms=60_000)
        for _ in range(2):
            kafka.send(INIT_PRODUCER_ID, 1, requested)
        first.adopt(kafka.receive().body)
        second = RawProducer(kafka, first.name, version=version)
        second.adopt(kafka.receive().body)
        assert (second.producer_id, second.epoch) == (first.producer_id, first.epoch + 1)
        if version == 0:
            assert second.add(topic, 0) == 0
        assert second.produce(topic, 0, b"of the second") == 0
        assert first.produce(topic, 0, b"of the first") == ErrorCode.INVALID_PRODUCER_EPOCH
        kafka.send(END_TXN, 3, second.end_request(True))
        assert kafka.receive().body.error_code == 0
