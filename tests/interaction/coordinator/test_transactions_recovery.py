"""Random transactions of several producers over many small segments, through every way of stopping
a broker: readers of committed records see exactly the committed ones, and the last stable offset is
the start of the oldest open transaction.
"""

from __future__ import annotations

import os
import random
import signal

import pytest

from mqd.protocol.messages import DeleteRecordsRequest
from mqd.protocol.records import iterate_batches
from tests.broker import Broker
from tests.interaction.traffic import eventually
from tests.interaction.transactional import (
    RETRIABLE_AT_START,
    RawProducer,
    connect,
    fetch_committed,
    producers,
    read_committed,
    topic_of,
)
from tests.kafka_connection import ConnectionEnded
from tests.tiers import quick

DELETE_RECORDS = 21
CONCURRENT_TRANSACTIONS = 51
PARTITIONS = 2
WAYS = ["worker", "restart", "everything", "snapshots"]


def stop_and_start(broker: Broker, way: str, topic: str) -> None:
    """`snapshots` is false: everything is killed and the producer snapshots are deleted; recovery
    rebuilds them from the log.
    """
    if way == "worker":
        killed = broker.pids("worker")
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        eventually(
            lambda: len(broker.pids("worker")) == len(killed) and not set(killed) & set(broker.pids("worker")),
            "other workers",
        )
        return
    if way == "restart":
        broker.stop()
    else:
        broker.kill_all()
    if way == "snapshots":
        for path in broker.data_dir.rglob(f"{topic}-*/*.snapshot"):
            path.unlink()
    broker.start()


class History:
    """`open`: values and first offsets by partition of each producer's transaction; `committed`: in
    log order.
    """

    def __init__(self, topic: str, seed: int) -> None:
        self.topic, self.random = topic, random.Random(seed)
        # (value, producer, transaction)
        self.written: list[list[tuple[bytes, int, int]]] = [[] for _ in range(PARTITIONS)]
        self.outcome: dict[tuple[int, int], bool] = {}  # (producer, transaction): committed?
        self.number = [0, 0, 0]

    def step(self, clients: list[RawProducer]) -> None:
        who = self.random.randrange(len(clients))
        client, transaction = clients[who], (who, self.number[who])
        begun = any(entry[1:] == transaction for partition in self.written for entry in partition)
        if begun and self.random.random() < 0.4:
            committed = self.random.random() < 0.5
            assert client.end(committed) == 0
            self.outcome[transaction] = committed
            self.number[who] += 1
            return
        partition = self.random.randrange(PARTITIONS)
        values = [
            f"{who}.{self.number[who]}.{len(self.written[partition]) + one}".encode() + b"x" * 300
            for one in range(self.random.randint(1, 4))
        ]
        if client.version == 0:
            eventually(lambda: client.add(self.topic, partition) == 0, "the partition is added")
        error = client.produce(self.topic, partition, *values)
        assert error == 0, error
        self.written[partition] += [(value, *transaction) for value in values]

    def committed(self, partition: int) -> list[bytes]:
        return [
            value
            for value, *transaction in self.written[partition]
            if self.outcome.get((transaction[0], transaction[1]))
        ]

    def open_producers(self, partition: int) -> set[int]:
        return {who for _, who, transaction in self.written[partition] if (who, transaction) not in self.outcome}


def settled(kafka, history: History, clients: list[RawProducer]) -> None:
    """State after a restart: markers that were already decided are written first."""
    for partition in range(PARTITIONS):
        expected = {clients[who].producer_id for who in history.open_producers(partition)}

        def open_now(partition: int = partition) -> set[int]:
            return {
                one.producer_id
                for one in producers(kafka, history.topic, partition)
                if one.current_txn_start_offset >= 0
            }

        eventually(lambda: open_now() == expected, lambda: f"open are {open_now()}, not {expected}")
        first = min(
            (
                one.current_txn_start_offset
                for one in producers(kafka, history.topic, partition)
                if one.current_txn_start_offset >= 0
            ),
            default=None,
        )
        found = fetch_committed(kafka, history.topic, partition)
        assert found.last_stable_offset == (found.high_watermark if first is None else first)
        below = [value for value in read_committed(kafka, history.topic, partition)]
        assert below == history.committed(partition)[: len(below)]
        if first is None:
            assert below == history.committed(partition)


@pytest.mark.parametrize("way", quick(WAYS, ["worker", "snapshots"]))
def test_transactions_are_the_same_after(start_broker, way: str) -> None:
    broker = start_broker(workers=2)
    with connect(broker) as kafka:
        topic = topic_of(kafka, PARTITIONS, **{"segment.bytes": "4096"})
        clients = [RawProducer(kafka, version=version) for version in (2, 0, 2)]
        for client in clients:
            client.init()
    history = History(topic, WAYS.index(way))
    for _ in range(2):
        with connect(broker) as kafka:
            for client in clients:
                client.kafka = kafka
            for _ in range(30):
                history.step(clients)
        stop_and_start(broker, way, topic)

        def serves() -> bool:
            try:
                with connect(broker) as kafka:
                    return all(
                        fetch_committed(kafka, topic, partition).error_code == 0 for partition in range(PARTITIONS)
                    ) and clients_known(kafka, clients)
            except (OSError, ConnectionEnded):
                return False

        eventually(serves, "the broker serves again")
        with connect(broker) as kafka:
            settled(kafka, history, clients)
    with connect(broker) as kafka:
        for who, client in enumerate(clients):
            client.kafka = kafka
            if any(entry[1:] == (who, history.number[who]) for partition in history.written for entry in partition):
                eventually(lambda client=client: client.end(True) in (0,), "the transaction is committed")
                history.outcome[who, history.number[who]] = True
        settled(kafka, history, clients)


def clients_known(kafka, clients: list[RawProducer]) -> bool:
    """Returns once the coordinators have loaded."""
    known = True
    for client in clients:
        client.kafka = kafka
        known &= client.state().error_code not in RETRIABLE_AT_START
    return known


def test_deletion_goes_past_an_open_transaction(shared_broker: Broker) -> None:
    with connect(shared_broker) as kafka:
        topic = topic_of(kafka, 1, **{"segment.bytes": "4096"})
        client = RawProducer(kafka)
        client.init()
        for number in range(12):
            assert client.produce(topic, 0, f"{number}".encode() + b"x" * 1000) == 0
        partitions = [DeleteRecordsRequest.Partition(partition_index=0, offset=9)]
        request = DeleteRecordsRequest(
            topics=[DeleteRecordsRequest.Topic(name=topic, partitions=partitions)], timeout_ms=60_000
        )
        assert kafka.call(DELETE_RECORDS, 2, request).topics[0].partitions[0].error_code == 0
        found = fetch_committed(kafka, topic, 0, 9)
        assert (found.log_start_offset, found.last_stable_offset, found.high_watermark) == (9, 9, 12)
        assert client.end(False) == 0
        found = eventually(
            lambda: (seen := fetch_committed(kafka, topic, 0, 9)).last_stable_offset == 13 and seen, "the marker counts"
        )
        assert [(one.producer_id, one.first_offset) for one in found.aborted_transactions] == [(client.producer_id, 0)]
        assert [header.is_control for header, _ in iterate_batches(found.records, allow_partial=True)][-1]
