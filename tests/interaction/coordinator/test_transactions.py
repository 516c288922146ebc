"""Transactions against a real broker: committed records are visible, aborted ones are not, and
late, repeated or forged requests change nothing.
"""

from __future__ import annotations

import os
import signal

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from mqd.protocol.messages import (
    ApiVersionsRequest,
    InitProducerIdRequest,
    ListTransactionsRequest,
    TxnOffsetCommitRequest,
    WriteTxnMarkersRequest,
)
from mqd.protocol.records import Record, encode_batch
from tests.broker import Broker
from tests.interaction.traffic import INIT_PRODUCER_ID, PRODUCE, eventually, one_outcome, produce, produce_request
from tests.interaction.transactional import (
    END_TXN,
    RETRIABLE_AT_START,
    RawProducer,
    connect,
    fetch_committed,
    fresh,
    producers,
    read_committed,
    topic_of,
)
from tests.kafka_connection import ConnectionEnded
from tests.polling import PATIENCE_S

LIST_TRANSACTIONS, WRITE_TXN_MARKERS, TXN_OFFSET_COMMIT = 66, 27, 28
INVALID_PRODUCER_EPOCH, INVALID_TXN_STATE, INVALID_PRODUCER_ID_MAPPING, INVALID_TRANSACTION_TIMEOUT = 47, 48, 49, 50
FENCED, TRANSACTION_ABORTABLE, COORDINATOR_FENCED, UNAUTHORIZED = 90, 120, 52, 31
UNKNOWN_PRODUCER_ID = 59

VERSIONS = pytest.mark.parametrize("version", [2, 0], ids=["v2", "v1"])


def begin(producer: RawProducer, topic: str, partition: int, *values: bytes) -> None:
    if producer.version == 0:
        assert producer.add(topic, partition) == 0
    assert producer.produce(topic, partition, *values) == 0


@pytest.mark.both_backends
@VERSIONS
def test_committed_records_are_visible_at_once_and_aborted_ones_never(shared_broker: Broker, version: int) -> None:
    with connect(shared_broker) as kafka:
        topic = topic_of(kafka, 3)
        producer = RawProducer(kafka, version=version)
        assert producer.init().error_code == 0
        for number in range(6):
            for partition in range(3):
                begin(producer, topic, partition, f"{number}".encode())
            before = [fetch_committed(kafka, topic, partition).last_stable_offset for partition in range(3)]
            assert before == [2 * number] * 3
            assert producer.end(number % 2 == 0) == 0
            for partition in range(3):
                assert read_committed(kafka, topic, partition) == [f"{one}".encode() for one in range(0, number + 1, 2)]


def test_one_produce_begins_in_many_partitions(shared_broker: Broker) -> None:
    with connect(shared_broker) as kafka:
        topic = topic_of(kafka, 3)
        producer = RawProducer(kafka)
        producer.init()
        (response,) = kafka.call(
            PRODUCE, 12, producer.request(topic, {index: (b"a", b"b") for index in range(3)})
        ).responses
        assert [one.error_code for one in response.partition_responses] == [0, 0, 0]
        assert {(one.topic, tuple(one.partitions)) for one in producer.state().topics} == {(topic, (0, 1, 2))}
        assert producer.end(True) == 0
        assert [read_committed(kafka, topic, index) for index in range(3)] == [[b"a", b"b"]] * 3


# -- late and repeated requests (KIP-890) ----------------------------------------------------------


def test_a_repeated_end_gets_the_same_response(shared_broker: Broker) -> None:
    with connect(shared_broker) as kafka:
        topic = topic_of(kafka)
        producer = RawProducer(kafka)
        producer.init()
        begin(producer, topic, 0, b"a")
        request = producer.end_request(True)
        responses = [kafka.call(END_TXN, 5, request) for _ in range(3)]
        assert {(one.error_code, one.producer_id, one.producer_epoch) for one in responses} == {
            (0, producer.producer_id, producer.epoch + 1)
        }
        other = producer.end_request(False)
        assert kafka.call(END_TXN, 5, other).error_code == INVALID_TXN_STATE
        assert read_committed(kafka, topic, 0) == [b"a"]


def test_a_late_end_does_not_touch_the_next_transaction(shared_broker: Broker) -> None:
    with connect(shared_broker) as kafka:
        topic = topic_of(kafka)
        producer = RawProducer(kafka)
        producer.init()
        begin(producer, topic, 0, b"a")
        late = producer.end_request(True)
        assert producer.end(True) == 0
        begin(producer, topic, 0, b"b")
        assert kafka.call(END_TXN, 5, late).error_code == FENCED
        assert producer.state().transaction_state == "Ongoing"
        assert producer.end(False) == 0
        assert read_committed(kafka, topic, 0) == [b"a"]


def test_a_late_produce_begins_no_transaction(shared_broker: Broker) -> None:
    with connect(shared_broker) as kafka:
        topic = topic_of(kafka, 2)
        producer = RawProducer(kafka)
        producer.init()
        begin(producer, topic, 0, b"a")
        late = producer.request(topic, {1: (b"late",)})
        again = producer.request(topic, {0: (b"late too",)})
        assert producer.end(True) == 0
        assert one_outcome(kafka.call(PRODUCE, 12, late)).error_code == INVALID_PRODUCER_EPOCH
        assert one_outcome(kafka.call(PRODUCE, 12, again)).error_code == INVALID_PRODUCER_EPOCH
        assert producer.state().transaction_state == "CompleteCommit"
        assert all(one.current_txn_start_offset == -1 for index in range(2) for one in producers(kafka, topic, index))


@pytest.mark.parametrize(
    ("produce_version", "error"), [(9, INVALID_TXN_STATE), (10, INVALID_TXN_STATE), (11, TRANSACTION_ABORTABLE)]
)
def test_a_produce_to_a_partition_that_was_not_added_is_refused(
    shared_broker: Broker, produce_version: int, error: int
) -> None:
    with connect(shared_broker) as kafka:
        topic = topic_of(kafka, 2)
        producer = RawProducer(kafka, version=0)
        producer.init()
        assert producer.produce(topic, 0, b"before", version=produce_version) == error
        producer.sequences.clear()
        begin(producer, topic, 0, b"a")
        assert producer.produce(topic, 1, b"elsewhere", version=produce_version) == error
        assert producer.end(True) == 0
        late = producer.request(topic, {0: (b"late",)})
        assert one_outcome(kafka.call(PRODUCE, produce_version, late)).error_code == error
        assert read_committed(kafka, topic, 0) == [b"a"]
        assert fetch_committed(kafka, topic, 1).high_watermark == 0


def test_an_abort_without_records_fences_requests_in_flight(shared_broker: Broker) -> None:
    with connect(shared_broker) as kafka:
        topic = topic_of(kafka)
        producer = RawProducer(kafka)
        producer.init()
        late = producer.request(topic, {0: (b"late",)})
        assert producer.end(False) == 0
        assert one_outcome(kafka.call(PRODUCE, 12, late)).error_code == INVALID_PRODUCER_EPOCH
        assert producer.end(True) == INVALID_TXN_STATE, "nothing to commit"


@pytest.mark.parametrize("committed", [False, True], ids=["aborted", "committed"])
def test_sequences_of_an_ended_transaction_are_not_repetitions(shared_broker: Broker, committed: bool) -> None:
    """When librdkafka aborts, it gives up records that it may already have sent, and the next
    records get their sequence numbers: if the broker took them for repetitions, they would be
    acknowledged and lost.
    """
    with connect(shared_broker) as kafka:
        topic = topic_of(kafka)
        producer = RawProducer(kafka, version=0)
        producer.init()
        begin(producer, topic, 0, b"given", b"up")
        first = [b"given", b"up"] if committed else []
        assert producer.end(committed) == 0
        assert producer.add(topic, 0) == 0
        producer.sequences.clear()
        assert producer.produce(topic, 0, b"two", b"others") == UNKNOWN_PRODUCER_ID
        producer.sequences.clear()
        assert producer.produce(topic, 0, b"one") == UNKNOWN_PRODUCER_ID
        assert producer.end(False) == 0
        producer.sequences[topic, 0] = 2
        begin(producer, topic, 0, b"next")
        producer.sequences[topic, 0] = 2
        assert producer.produce(topic, 0, b"next") == 0, "a repetition within its transaction is one"
        assert producer.end(True) == 0
        assert read_committed(kafka, topic, 0) == [*first, b"next"]


# -- fencing ---------------------------------------------------------------------------------------


@VERSIONS
def test_a_second_producer_fences_the_first(shared_broker: Broker, version: int) -> None:
    with connect(shared_broker) as kafka:
        topic = topic_of(kafka)
        first = RawProducer(kafka, version=version)
        first.init()
        begin(first, topic, 0, b"a")
        second = RawProducer(kafka, first.name, version)
        assert second.init().error_code == 0
        assert second.producer_id == first.producer_id and second.epoch > first.epoch
        assert first.produce(topic, 0, b"b") == INVALID_PRODUCER_EPOCH
        assert first.end(True) == FENCED
        begin(second, topic, 0, b"c")
        assert first.end(False) == FENCED
        assert second.end(True) == 0
        assert read_committed(kafka, topic, 0) == [b"c"]


@VERSIONS
def test_a_transaction_that_takes_too_long_is_aborted(shared_broker: Broker, version: int) -> None:
    with connect(shared_broker) as kafka:
        topic = topic_of(kafka)
        producer = RawProducer(kafka, version=version, timeout_ms=300)
        producer.init()
        begin(producer, topic, 0, b"a")
        assert fetch_committed(kafka, topic, 0).last_stable_offset == 0
        eventually(lambda: producer.state().transaction_state == "CompleteAbort", "the coordinator aborts")
        assert fetch_committed(kafka, topic, 0).last_stable_offset == 2
        assert producer.produce(topic, 0, b"b") == INVALID_PRODUCER_EPOCH
        assert producer.end(True) == FENCED
        assert read_committed(kafka, topic, 0) == []
        assert producer.init().error_code == 0
        begin(producer, topic, 0, b"c")
        assert producer.end(True) == 0
        assert read_committed(kafka, topic, 0) == [b"c"]


def test_a_producer_recovers_with_its_epoch(shared_broker: Broker) -> None:
    with connect(shared_broker) as kafka:
        producer = RawProducer(kafka)
        producer.init()
        mine = {"producer_id": producer.producer_id, "producer_epoch": producer.epoch}
        before = producer.epoch
        assert producer.init(**mine).error_code == 0 and producer.epoch == before + 1
        assert producer.init(**mine).error_code == 0 and producer.epoch == before + 1, "a retry of the same"
        other = RawProducer(kafka, producer.name)
        other.init()
        assert producer.init(**mine).error_code == FENCED
        refused = kafka.call(
            INIT_PRODUCER_ID,
            3,
            InitProducerIdRequest(transactional_id=producer.name, transaction_timeout_ms=1000, **mine),
        )
        assert refused.error_code == INVALID_PRODUCER_EPOCH, "clients of version 3 do not know PRODUCER_FENCED"


def test_forged_producers_are_refused(shared_broker: Broker) -> None:
    with connect(shared_broker) as kafka:
        topic = topic_of(kafka)
        producer = RawProducer(kafka)
        producer.init()
        begin(producer, topic, 0, b"a")
        forger = RawProducer(kafka, producer.name)
        forger.producer_id, forger.epoch = producer.producer_id + 1000, producer.epoch
        assert forger.end(True) == INVALID_PRODUCER_ID_MAPPING
        assert forger.produce(topic, 0, b"x") == INVALID_PRODUCER_ID_MAPPING
        forger.producer_id, forger.epoch = producer.producer_id, producer.epoch + 1
        forger.sequences.clear()
        assert forger.end(True) == FENCED
        assert forger.produce(topic, 0, b"x") == INVALID_PRODUCER_EPOCH
        control = encode_batch(
            [Record(key=bytes(4), value=bytes(6))],
            producer_id=producer.producer_id,
            producer_epoch=producer.epoch,
            is_transactional=True,
            is_control=True,
        )
        assert produce(kafka, topic, 0, control).error_code != 0
        plain = encode_batch(
            [Record(value=b"x")], producer_id=producer.producer_id, producer_epoch=producer.epoch, base_sequence=1
        )
        assert one_outcome(kafka.call(PRODUCE, 9, produce_request(topic, {0: plain}))).error_code == INVALID_TXN_STATE
        assert producer.end(True) == 0
        assert read_committed(kafka, topic, 0) == [b"a"]


def test_the_broker_limits_the_transaction_timeout(shared_broker: Broker) -> None:
    with connect(shared_broker) as kafka:
        assert RawProducer(kafka, timeout_ms=900_001).init().error_code == INVALID_TRANSACTION_TIMEOUT
        assert RawProducer(kafka, timeout_ms=0).init().error_code == INVALID_TRANSACTION_TIMEOUT


# -- administration --------------------------------------------------------------------------------


def test_transactions_are_listed_and_described(shared_broker: Broker) -> None:
    with connect(shared_broker) as kafka:
        topic = topic_of(kafka)
        producer = RawProducer(kafka)
        producer.init()
        begin(producer, topic, 0, b"a")
        found = producer.state()
        assert (found.transaction_state, found.producer_id, found.producer_epoch, found.transaction_timeout_ms) == (
            "Ongoing",
            producer.producer_id,
            producer.epoch,
            60_000,
        )
        (one,) = producers(kafka, topic, 0)
        assert (one.producer_id, one.producer_epoch, one.current_txn_start_offset, one.last_sequence) == (
            producer.producer_id,
            producer.epoch,
            0,
            0,
        )

        def listed(**filters):
            response = kafka.call(LIST_TRANSACTIONS, 2, ListTransactionsRequest(**filters))
            assert response.error_code == 0
            return {state.transactional_id for state in response.transaction_states}

        assert producer.name in listed()
        assert producer.name in listed(
            state_filters=["Ongoing"], producer_id_filters=[producer.producer_id], duration_filter=0
        )
        assert producer.name not in listed(state_filters=["Empty"])
        assert producer.name not in listed(duration_filter=3_600_000)
        assert listed(transactional_id_pattern=f"{producer.name}.*") == {producer.name}
        assert kafka.call(
            LIST_TRANSACTIONS, 0, ListTransactionsRequest(state_filters=["Nonsense"])
        ).unknown_state_filters == ["Nonsense"]
        assert producer.end(False) == 0
        (one,) = producers(kafka, topic, 0)
        assert one.current_txn_start_offset == -1 and one.coordinator_epoch >= 0


def marker(
    producer: RawProducer, topic: str, commit: bool = False, coordinator_epoch: int = 0, epoch: int | None = None
) -> WriteTxnMarkersRequest:
    one = WriteTxnMarkersRequest.Marker(
        producer_id=producer.producer_id,
        producer_epoch=producer.epoch if epoch is None else epoch,
        transaction_result=commit,
        coordinator_epoch=coordinator_epoch,
        topics=[WriteTxnMarkersRequest.Topic(name=topic, partition_indexes=[0])],
    )
    return WriteTxnMarkersRequest(markers=[one])


def written(kafka, request: WriteTxnMarkersRequest) -> int:
    return kafka.call(WRITE_TXN_MARKERS, 1, request).markers[0].topics[0].partitions[0].error_code


def test_an_administrator_aborts_everywhere_or_nowhere(shared_broker: Broker) -> None:
    with connect(shared_broker) as kafka:
        topic, other = topic_of(kafka), topic_of(kafka)
        producer = RawProducer(kafka)
        producer.init()
        begin(producer, topic, 0, b"a")
        begin(producer, other, 0, b"b")
        assert written(kafka, marker(producer, topic, commit=True)) == UNAUTHORIZED, "commits are the coordinator's"
        assert written(kafka, marker(producer, topic, coordinator_epoch=1 << 30)) == COORDINATOR_FENCED
        assert written(kafka, marker(producer, topic)) == 0
        assert producer.state().transaction_state == "CompleteAbort"
        assert producer.end(True) == FENCED
        assert read_committed(kafka, topic, 0) == read_committed(kafka, other, 0) == []
        assert fetch_committed(kafka, other, 0).last_stable_offset == 2


def test_a_repeated_marker_does_not_end_the_next_transaction(shared_broker: Broker) -> None:
    """KIP-890, KIP-1228: the marker of version 2 has the epoch of the next transaction. The
    partition itself distinguishes a repeated one from a first one.
    """

    def again(version: int) -> int:
        request = marker(producer, topic)  # the end returned the epoch that the marker has
        request.markers[0].transaction_version = version
        return kafka.call(WRITE_TXN_MARKERS, 2, request).markers[0].topics[0].partitions[0].error_code

    with connect(shared_broker) as kafka:
        topic = topic_of(kafka)
        producer = RawProducer(kafka)
        producer.init()
        begin(producer, topic, 0, b"a")
        assert producer.end(True) == 0
        assert again(2) == INVALID_PRODUCER_EPOCH, "the partition has it"
        assert fetch_committed(kafka, topic, 0).last_stable_offset == 2, "nothing was written"
        begin(producer, topic, 0, b"b")
        assert again(2) == INVALID_PRODUCER_EPOCH
        assert producer.state().transaction_state == "Ongoing"
        assert producer.end(True) == 0
        assert read_committed(kafka, topic, 0) == [b"a", b"b"]
        assert again(0) == 0, "older ones cannot be distinguished; nothing is open"
        assert fetch_committed(kafka, topic, 0).last_stable_offset == 4, "nothing was written"


# -- with the client library -----------------------------------------------------------------------


def library_producer(broker: Broker, name: str, **settings: object) -> Producer:
    producer = Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": name, "linger.ms": 0, **settings})
    producer.init_transactions(20)
    return producer


def consume(broker: Broker, topic: str, count: int, isolation: str = "read_committed") -> list[bytes]:
    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": fresh("reader"),
            "isolation.level": isolation,
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        }
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    found: list[bytes] = []
    try:
        while True:
            message = consumer.poll(PATIENCE_S)
            assert message is not None, f"{len(found)} of {count} records came"
            if message.error():
                break  # the end of the partition
            found.append(message.value())
    finally:
        consumer.close()
    assert len(found) == count
    return found


def test_the_library_commits_and_aborts(shared_broker: Broker) -> None:
    with connect(shared_broker) as kafka:
        topic = topic_of(kafka)
    producer = library_producer(shared_broker, fresh("lib"))
    for number in range(6):
        producer.begin_transaction()
        producer.produce(topic, f"{number}".encode(), partition=0)
        producer.flush(60)
        producer.commit_transaction(10) if number % 2 == 0 else producer.abort_transaction(10)
    assert consume(shared_broker, topic, 3) == [b"0", b"2", b"4"]
    assert len(consume(shared_broker, topic, 6, "read_uncommitted")) == 6


def test_the_library_is_fenced_by_its_successor(shared_broker: Broker) -> None:
    with connect(shared_broker) as kafka:
        topic = topic_of(kafka)
    name = fresh("lib")
    first = library_producer(shared_broker, name)
    first.begin_transaction()
    first.produce(topic, b"first", partition=0)
    first.flush(60)
    second = library_producer(shared_broker, name)
    with pytest.raises(KafkaException) as refused:
        first.commit_transaction(10)
    assert refused.value.args[0].fatal()
    second.begin_transaction()
    second.produce(topic, b"second", partition=0)
    second.commit_transaction(10)
    assert consume(shared_broker, topic, 1) == [b"second"]


def test_consume_transform_produce(shared_broker: Broker) -> None:
    """Offsets are committed with the output, or not at all."""
    with connect(shared_broker) as kafka:
        source, target = topic_of(kafka), topic_of(kafka)
    plain = Producer({"bootstrap.servers": shared_broker.bootstrap})
    for number in range(10):
        plain.produce(source, f"{number}".encode(), partition=0)
    assert plain.flush(60) == 0
    settings = {
        "bootstrap.servers": shared_broker.bootstrap,
        "group.id": fresh("copy"),
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
    }
    consumer = Consumer(settings)
    consumer.subscribe([source])
    producer = library_producer(shared_broker, fresh("copier"))
    taken = 0
    aborted = False
    while taken < 10:
        messages = consumer.consume(5 - taken % 5, 10)
        assert messages and not any(one.error() for one in messages)
        producer.begin_transaction()
        for one in messages:
            producer.produce(target, b"copy of " + one.value(), partition=0)
        producer.send_offsets_to_transaction(
            consumer.position(consumer.assignment()), consumer.consumer_group_metadata(), 10
        )
        if not aborted:
            aborted = True
            producer.abort_transaction(10)
            assert consumer.committed([TopicPartition(source, 0)], 10)[0].offset < 0
            consumer.seek(TopicPartition(source, 0, 0))
            continue
        producer.commit_transaction(10)
        taken += len(messages)
        assert consumer.committed([TopicPartition(source, 0)], 10)[0].offset == taken
    consumer.close()
    assert consume(shared_broker, target, 10) == [f"copy of {number}".encode() for number in range(10)]


def test_offsets_without_a_transaction_are_refused(shared_broker: Broker) -> None:
    with connect(shared_broker) as kafka:
        topic = topic_of(kafka)
        producer = RawProducer(kafka)
        producer.init()

        def commit(version: int) -> int:
            partitions = [
                TxnOffsetCommitRequest.Partition(partition_index=0, committed_offset=1, committed_metadata="")
            ]
            request = TxnOffsetCommitRequest(
                transactional_id=producer.name,
                group_id="somebody",
                producer_id=producer.producer_id,
                producer_epoch=producer.epoch,
                topics=[TxnOffsetCommitRequest.Topic(name=topic, partitions=partitions)],
            )
            return kafka.call(TXN_OFFSET_COMMIT, version, request).topics[0].partitions[0].error_code

        eventually(lambda: commit(3) not in (14, 15, 16), "a group coordinator")
        assert commit(3) == INVALID_TXN_STATE and commit(4) == TRANSACTION_ABORTABLE
        assert commit(5) == 0, "version 5 adds the group itself"
        assert producer.end(True) == 0
        producer.epoch -= 1
        assert commit(5) == INVALID_PRODUCER_EPOCH


# -- deaths ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["acceptor", "worker"])
def test_a_transaction_survives_process_deaths(start_broker, role: str) -> None:
    broker = start_broker(workers=2)
    with connect(broker) as kafka:
        topic = topic_of(kafka, 2)
        producer = RawProducer(kafka)
        producer.init()
        begin(producer, topic, 0, b"a")
        begin(producer, topic, 1, b"b")
    for pid in broker.pids(role):
        os.kill(pid, signal.SIGKILL)

    def is_committed() -> bool:
        try:
            with connect(broker) as kafka:
                producer.kafka = kafka
                error = producer.end(True)
        except (OSError, ConnectionEnded):
            return False
        assert error in (0, *RETRIABLE_AT_START), error
        return error == 0

    eventually(is_committed, "the transaction is committed")
    with connect(broker) as kafka:  # the response says that it is decided; the markers are written afterwards
        eventually(
            lambda: read_committed(kafka, topic, 0) == [b"a"] and read_committed(kafka, topic, 1) == [b"b"],
            "both markers",
        )
        producer.kafka = kafka
        begin(producer, topic, 0, b"c")
        assert producer.end(True) == 0
        eventually(lambda: read_committed(kafka, topic, 0) == [b"a", b"c"], "another marker")


def test_a_decided_transaction_is_completed_after_a_restart(start_broker) -> None:
    broker = start_broker(workers=2)
    with connect(broker) as kafka:
        topic = topic_of(kafka)
        producer = RawProducer(kafka, timeout_ms=800)
        producer.init()
        begin(producer, topic, 0, b"a")
    broker.stop()
    broker.start()
    with connect(broker) as kafka:
        producer.kafka = kafka
        eventually(
            lambda: producer.state().transaction_state == "CompleteAbort", "its timeout counts from its begin", 30
        )
        assert fetch_committed(kafka, topic, 0).last_stable_offset == 2


def test_transaction_version_is_reported(shared_broker: Broker) -> None:
    with connect(shared_broker) as kafka:
        response = kafka.call(18, 3, ApiVersionsRequest(client_software_name="test", client_software_version="1"))
        finalized = {one.name: (one.min_version_level, one.max_version_level) for one in response.finalized_features}
        assert finalized["transaction.version"][1] == 2
