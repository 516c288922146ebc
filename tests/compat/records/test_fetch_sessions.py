"""Incremental fetch sessions (KIP-227) with raw frames."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from mqd.protocol import ErrorCode
from mqd.protocol.messages import FetchResponse
from mqd.protocol.records import decode_records
from tests.broker import Broker
from tests.compat import topics
from tests.compat.topics import FETCH
from tests.kafka_connection import KafkaConnection

VERSIONS = (7, 12, 13, 18)  # by name, flexible, by id, newest


class Session:
    """A client's side of one session: keeps id and epoch."""

    def __init__(self, kafka: KafkaConnection, version: int, topic_ids: dict[str, bytes]) -> None:
        self.kafka, self.version, self.topic_ids = kafka, version, topic_ids
        self.id, self.epoch = 0, 0

    def fetch(self, *partitions: tuple[str, int, int], **options) -> FetchResponse:
        response = self.kafka.call(
            FETCH,
            self.version,
            topics.fetch_request(
                partitions, topic_ids=self.topic_ids, session_id=self.id, session_epoch=self.epoch, **options
            ),
        )
        if response.error_code == 0:
            self.id, self.epoch = response.session_id, self.epoch + 1
        return response

    def fetch_until(self, *expected: tuple[str, int]) -> dict[tuple[str, int], FetchResponse.PartitionData]:
        """Fetches until these partitions, and no others, have returned records: the session sees
        records in another worker's partition a moment after they are acknowledged.
        """
        found: dict[tuple[str, int], FetchResponse.PartitionData] = {}
        deadline = time.monotonic() + topics.READY_SECONDS
        while not found.keys() >= set(expected):
            assert time.monotonic() < deadline, f"{sorted(found)} of {expected}"
            found |= {key: part for key, part in self.parts(self.fetch(max_wait_ms=1000)).items() if part.records}
        assert found.keys() == set(expected)
        return found

    def parts(self, response: FetchResponse) -> dict[tuple[str, int], FetchResponse.PartitionData]:
        names = {topic_id: name for name, topic_id in self.topic_ids.items()}
        return {
            (names.get(answered.topic_id, "?") if self.version >= 13 else answered.topic, part.partition_index): part
            for answered in response.responses
            for part in answered.partitions
        }


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def topic(shared_broker: Broker) -> str:
    return topics.create_topic(shared_broker, "session", 4)


@pytest.fixture
def open_session(shared_broker: Broker, topic: str, version: int):
    with topics.connect(shared_broker) as kafka:
        topic_ids = {topic: topics.topic_id(kafka, topic)}

        def open_one(*partitions: tuple[str, int, int]) -> Session:
            session = Session(kafka, version, topic_ids)
            response = session.fetch(*partitions)
            assert response.error_code == 0 and session.id != 0, response
            assert set(session.parts(response)) == {(name, partition) for name, partition, _ in partitions}
            return session

        yield open_one


def test_only_changes_are_reported(shared_broker: Broker, topic: str, open_session: Callable[..., Session]) -> None:
    session = open_session(*[(topic, partition, 0) for partition in range(4)])
    assert session.parts(session.fetch()) == {}, "nothing changed"
    with topics.connect(shared_broker) as writer:
        topics.must_produce(writer, topic, b"first", partition=2)
        changed = session.fetch_until((topic, 2))
        assert changed[topic, 2].high_watermark == 1
        assert [record.value for record in decode_records(changed[topic, 2].records)] == [b"first"]
        again = session.parts(session.fetch())
        assert set(again) == {(topic, 2)}, "its offset has not been moved on: the same records again"
        assert session.parts(session.fetch((topic, 2, 1))) == {}, "moved on: read to the end"
        topics.must_produce(writer, topic, b"second", partition=2)
        topics.must_produce(writer, topic, b"other", partition=0)
        both = session.fetch_until((topic, 0), (topic, 2))
        assert {key: [record.value for record in decode_records(part.records)] for key, part in both.items()} == {
            (topic, 0): [b"other"],
            (topic, 2): [b"second"],
        }


def test_a_parked_session_is_woken_by_any_of_its_partitions(
    shared_broker: Broker, topic: str, open_session: Callable[..., Session]
) -> None:
    session = open_session(*[(topic, partition, 0) for partition in range(4)])
    with topics.connect(shared_broker) as writer:
        for partition in (3, 0, 1):
            request = topics.fetch_request(
                [], topic_ids=session.topic_ids, session_id=session.id, session_epoch=session.epoch, max_wait_ms=30_000
            )
            session.kafka.send(FETCH, session.version, request)
            time.sleep(0.05)  # the fetch must be parked when the record arrives
            began = time.monotonic()
            topics.must_produce(writer, topic, b"wake", partition=partition)
            response = session.kafka.receive().body
            assert time.monotonic() - began < 15
            session.epoch += 1
            assert set(session.parts(response)) == {(topic, partition)}
            assert session.parts(session.fetch((topic, partition, 1))) == {}


def test_an_idle_session_waits_and_gets_an_empty_response(topic: str, open_session: Callable[..., Session]) -> None:
    session = open_session((topic, 0, 0))
    began = time.monotonic()
    response = session.fetch(max_wait_ms=300)
    assert (response.error_code, response.responses, response.session_id) == (0, [], session.id)
    assert time.monotonic() - began >= 0.29


@pytest.mark.parametrize("wait_ms", [0, 200])
def test_a_partition_that_joins_at_its_end_is_reported(
    topic: str, open_session: Callable[..., Session], wait_ms: int
) -> None:
    """Kafka Streams does not process a task until it knows the end of each of its partitions."""
    session = open_session((topic, 0, 0))
    joined = session.parts(session.fetch((topic, 1, 0), max_wait_ms=wait_ms))
    assert {key: (part.error_code, part.high_watermark) for key, part in joined.items()} == {(topic, 1): (0, 0)}
    assert session.parts(session.fetch(max_wait_ms=wait_ms)) == {}, "it is known now"


def test_a_partition_is_reported_after_its_error_although_it_is_at_its_end(
    topic: str, open_session: Callable[..., Session]
) -> None:
    session = open_session((topic, 0, 0))
    failed = session.parts(session.fetch((topic, 1, 5)))
    assert failed[topic, 1].error_code == ErrorCode.OFFSET_OUT_OF_RANGE
    healed = session.parts(session.fetch((topic, 1, 0), max_wait_ms=200))
    assert {key: (part.error_code, part.high_watermark) for key, part in healed.items()} == {(topic, 1): (0, 0)}


def test_partitions_join_and_are_forgotten(
    shared_broker: Broker, topic: str, open_session: Callable[..., Session]
) -> None:
    session = open_session((topic, 0, 0), (topic, 1, 0))
    with topics.connect(shared_broker) as writer:
        for partition in range(4):
            topics.must_produce(writer, topic, b"x", partition=partition)
    session.fetch_until((topic, 0), (topic, 1))
    assert set(session.parts(session.fetch((topic, 3, 0)))) == {(topic, 0), (topic, 1), (topic, 3)}
    assert set(session.parts(session.fetch(forgotten=[(topic, 0), (topic, 3)]))) == {(topic, 1)}
    assert set(session.parts(session.fetch((topic, 0, 0), forgotten=[(topic, 1)]))) == {(topic, 0)}
    assert session.parts(session.fetch(forgotten=[(topic, 0), (topic, 2)])) == {}, (
        "forgetting what was never there is nothing"
    )


def test_fairness_the_next_fetch_begins_with_partitions_that_got_nothing(
    shared_broker: Broker, topic: str, open_session: Callable[..., Session]
) -> None:
    session = open_session(*[(topic, partition, 0) for partition in range(4)])
    with topics.connect(shared_broker) as writer:
        for partition in range(4):
            topics.must_produce(writer, topic, b"z" * 5000, partition=partition)
    session.fetch_until(*[(topic, partition) for partition in range(4)])
    served: set[int] = set()
    for _ in range(4):
        parts = session.parts(session.fetch(max_bytes=100))
        served |= {partition for (_, partition), part in parts.items() if part.records}
    assert served == {0, 1, 2, 3}


def test_a_wrong_epoch_is_refused_and_the_session_stays_usable(
    topic: str, open_session: Callable[..., Session]
) -> None:
    session = open_session((topic, 0, 0))
    right = session.epoch
    for wrong in (right + 1, right - 1 or right + 5, 1 << 30):
        session.epoch = wrong
        response = session.fetch()
        assert (response.error_code, response.responses) == (ErrorCode.INVALID_FETCH_SESSION_EPOCH, [])
    session.epoch = right
    assert session.fetch().error_code == 0


def test_an_unknown_session_is_refused(topic: str, open_session: Callable[..., Session]) -> None:
    session = open_session((topic, 0, 0))
    session.id ^= 0x5A5A5A
    response = session.fetch()
    assert (response.error_code, response.session_id, response.responses) == (
        ErrorCode.FETCH_SESSION_ID_NOT_FOUND,
        0,
        [],
    )


def test_a_closed_session_is_unknown(topic: str, open_session: Callable[..., Session]) -> None:
    """Epoch -1 closes it and fetches in full once; epoch 0 with its id replaces it by another."""
    session = open_session((topic, 0, 0))
    old = session.id
    session.epoch = -1
    response = session.fetch((topic, 1, 0))
    assert (response.error_code, response.session_id) == (0, 0) and set(session.parts(response)) == {(topic, 1)}
    session.id, session.epoch = old, 2
    assert session.fetch().error_code == ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    session.id, session.epoch = 0, 0
    assert session.fetch((topic, 0, 0)).error_code == 0
    second, session.epoch = session.id, 0
    assert session.fetch((topic, 0, 0)).error_code == 0 and session.id not in (0, second)


def test_errors_are_reported_in_every_response(topic: str, open_session: Callable[..., Session]) -> None:
    session = open_session((topic, 0, 0), (topic, 99, 0))
    for _ in range(3):
        parts = session.parts(session.fetch(max_wait_ms=30_000))
        assert {key: part.error_code for key, part in parts.items()} == {
            (topic, 99): ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        }


def test_a_deleted_topic_is_reported(
    shared_broker: Broker, topic: str, version: int, open_session: Callable[..., Session]
) -> None:
    session = open_session((topic, 0, 0))
    topics.delete_topic(shared_broker, topic)
    expected = ErrorCode.UNKNOWN_TOPIC_ID if version >= 13 else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    deadline = time.monotonic() + topics.READY_SECONDS
    while True:
        parts = session.parts(session.fetch(max_wait_ms=100))
        if parts:
            assert [part.error_code for part in parts.values()] == [expected]
            break
        assert time.monotonic() < deadline
    parts = session.parts(session.fetch(forgotten=[(topic, 0)]))
    assert parts == {}


@pytest.mark.parametrize("version", [7, 12], indirect=True)
def test_a_topic_created_later_is_found_by_name(
    shared_broker: Broker, topic: str, version: int, open_session: Callable[..., Session]
) -> None:
    """A session by name looks up the name each time: a topic created (again) after the session is
    served without being named again.
    """
    later = topics.fresh_name("session-later")
    with topics.connect(shared_broker) as kafka:
        session = Session(kafka, version, {})
        response = session.fetch((later, 0, 0))
        assert [part.error_code for part in session.parts(response).values()] == [
            ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        ] and session.id
        for life in (b"first life", b"second life"):
            topics.create_named(shared_broker, later)
            with topics.connect(shared_broker) as writer:
                topics.must_produce(writer, later, life)
            part = _wait_for_records(session, later)
            assert [record.value for record in decode_records(part.records)] == [life]
            topics.delete_topic(shared_broker, later)
        assert session.kafka is kafka


def _wait_for_records(session: Session, name: str) -> FetchResponse.PartitionData:
    deadline = time.monotonic() + topics.READY_SECONDS
    while True:
        parts = session.parts(session.fetch(max_wait_ms=100))
        if (name, 0) in parts and parts[name, 0].records:
            return parts[name, 0]
        assert time.monotonic() < deadline, f"still {parts}"
        time.sleep(0.02)  # an error does not wait


def test_naming_an_unknown_partition_again_keeps_one_entry(
    topic: str, open_session: Callable[..., Session], version: int
) -> None:
    """A client may name it in every request; the session does not grow."""
    session = open_session((topic, 0, 0))
    nowhere = topics.fresh_name("nowhere")
    session.topic_ids[nowhere] = b"0123456789abcdef"
    for _ in range(5):
        response = session.fetch((nowhere, 0, 0))
        assert [len(answered.partitions) for answered in response.responses] == [1]


def test_clients_without_a_free_session_fetch_in_full(start_broker: Callable[..., Broker]) -> None:
    """When the cache is full of sessions in use, a new client gets session 0 and works without one;
    a freed slot is reused.
    """
    broker = start_broker(workers=1, config={"max.incremental.fetch.session.cache.slots": "3"})
    name = topics.create_topic(broker, "evict")
    with topics.connect(broker) as kafka:
        sessions = [Session(kafka, 12, {}) for _ in range(5)]
        for session in sessions:
            response = session.fetch((name, 0, 0))
            assert response.error_code == 0 and list(session.parts(response)) == [(name, 0)]
        assert [session.id != 0 for session in sessions] == [True, True, True, False, False]
        for session in sessions[:3]:
            assert session.fetch().error_code == 0
        sessions[0].epoch = -1
        assert sessions[0].fetch((name, 0, 0)).session_id == 0
        last = Session(kafka, 12, {})
        assert last.fetch((name, 0, 0)).error_code == 0 and last.id != 0


def test_no_sessions_when_the_cache_is_disabled(start_broker: Callable[..., Broker]) -> None:
    broker = start_broker(workers=1, config={"max.incremental.fetch.session.cache.slots": "0"})
    name = topics.create_topic(broker, "none")
    with topics.connect(broker) as kafka:
        session = Session(kafka, 12, {})
        assert session.fetch((name, 0, 0)).session_id == 0
