"""Bounds when disks or clients are slow: waiting requests, remembered producers, fetch sessions;
and that no other client waits with them.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqd.protocol.messages import FetchRequest
from tests.broker import Broker
from tests.broker_files import faults_file
from tests.interaction.traffic import (
    FETCH,
    FETCH_VERSION,
    NOT_LEADER,
    STORAGE_ERROR,
    TIMED_OUT,
    UNKNOWN_TOPIC,
    Watch,
    batch,
    create_topic,
    delete_topic,
    eventually,
    fetch_request,
    log_end,
    must_produce,
    new_producer_id,
    one_outcome,
    produce,
    send_produce,
    topic_name,
)
from tests.kafka_connection import KafkaConnection

MIB = 1 << 20


@pytest.fixture(scope="module")
def watch(shared_broker: Broker) -> Watch:
    return Watch(shared_broker)


@pytest.fixture
def name(request) -> str:
    return topic_name(request.node.name)


# -- a stalled disk --------------------------------------------------------------------------------


def _p99_s(samples: list[float]) -> float:
    return sorted(samples)[int(len(samples) * 0.99)]


def _partition_of_directory(watch: Watch, topic: str, directory: Path) -> int:
    return next(
        int(path.name.rpartition("-")[2]) for path in sorted(directory.iterdir()) if path.name.startswith(f"{topic}-")
    )


@pytest.mark.both_backends
def test_a_stalled_disk_does_not_delay_the_other(start_broker, io_backend, tmp_path):
    faults, sound, stalled = faults_file(tmp_path / "data"), tmp_path / "disk-sound", tmp_path / "disk-stalled"
    watch = Watch(
        start_broker(
            workers=1,
            config={"io.backend": io_backend, "log.dirs": f"{sound},{stalled}"},
            environment={"MQD_FILE_FAULTS": f"@{faults}"},
        )
    )
    with watch.connect() as kafka, watch.connect() as victim:
        create_topic(kafka, "t", 4)
        good, bad = _partition_of_directory(watch, "t", sound), _partition_of_directory(watch, "t", stalled)

        def measure() -> float:
            samples = []
            for _ in range(200):
                began = time.perf_counter()
                must_produce(kafka, "t", good, bytes(500))
                samples.append(time.perf_counter() - began)
            return _p99_s(samples)

        measure()
        before = measure()
        faults.write_text(
            "sync:DELAY:disk-stalled:ms=6000\nsyncfs:DELAY:disk-stalled:ms=6000\nfallocate:DELAY:disk-stalled:ms=6000"
        )
        for _ in range(20):
            send_produce(victim, "t", bad, batch(bytes(50_000)), timeout_ms=60_000)
        began = time.monotonic()
        during = min(measure() for _ in range(2))
        assert time.monotonic() - began < 5.4, "the sound disk's records took as long as the stall"
        assert during < max(3 * before, 0.05), (
            f"p99 {before * 1e3:.2f} ms before, {during * 1e3:.2f} ms beside a stalled disk"
        )
        faults.write_text("")
        assert [one_outcome(victim.receive().body).error_code for _ in range(20)] == [0] * 20


# -- acks=all waiting ------------------------------------------------------------------------------


@pytest.fixture
def slow_disk(start_broker, io_backend, tmp_path):
    """(watch, slow(ms)): sets how long every flush of topic t takes from now on."""
    faults = faults_file(tmp_path / "data")
    watch = Watch(start_broker(config={"io.backend": io_backend}, environment={"MQD_FILE_FAULTS": f"@{faults}"}))

    def slow(ms: int) -> None:
        faults.write_text(f"sync:DELAY:log/t-:ms={ms}\n" if ms else "")

    return watch, slow


def test_acks_all_times_out_when_the_disk_is_slow(slow_disk):
    watch, slow = slow_disk
    with watch.connection_to_each_worker() as connections:
        create_topic(connections[0], "t", 1)
        must_produce(connections[0], "t", 0, b"warm")
        producer_id, epoch = new_producer_id(connections[0])
        slow(3000)
        for number, kafka in enumerate(connections):  # owned and forwarded ones
            data = batch(b"late", producer_id=producer_id, producer_epoch=epoch, base_sequence=number)
            began = time.monotonic()
            outcome = produce(kafka, "t", 0, data, timeout_ms=300)
            assert outcome.error_code == TIMED_OUT, outcome
            assert 0.25 < time.monotonic() - began < 2.7
            assert outcome.error_message and "timeout.ms" in outcome.error_message
            slow(0)
            again = produce(kafka, "t", 0, data)  # it was written nevertheless: the retry gets its offset
            assert (again.error_code, again.base_offset) == (0, 1 + number)
            slow(3000)
        slow(0)
        assert log_end(connections[0], "t", 0) == 3


def test_requests_waiting_for_a_disk_are_bounded_and_all_get_responses(slow_disk):
    watch, slow = slow_disk
    with watch.connection_to_each_worker(timeout_s=30) as connections:
        create_topic(connections[0], "t", 1)
        must_produce(connections[0], "t", 0, b"warm")
        slow(6000)
        count = 1000  # connection.inflight.max is 256
        senders = [
            threading.Thread(
                target=lambda kafka=kafka: [
                    send_produce(kafka, "t", 0, batch(b"x"), timeout_ms=60_000) for _ in range(count)
                ]
            )
            for kafka in connections
        ]
        for sender in senders:
            sender.start()
        eventually(lambda: watch.total("requests_produce") > 2 * 200, lambda: str(watch.total("requests_produce")))
        time.sleep(0.3)  # time to see that no more are read; still within the first flush
        read = watch.total("requests_produce")
        assert read <= 1 + 2 * 256, f"{read} requests were taken while 256 of a connection may wait"
        slow(0)
        for sender, kafka in zip(senders, connections, strict=True):
            outcomes = [one_outcome(kafka.receive().body) for _ in range(count)]
            assert {outcome.error_code for outcome in outcomes} == {0}
            assert [outcome.base_offset for outcome in outcomes] == sorted(
                {outcome.base_offset for outcome in outcomes}
            )
            sender.join()
        assert log_end(connections[0], "t", 0) == 1 + 2 * count


@pytest.mark.slow
def test_waiting_requests_get_responses_when_their_topic_is_deleted(slow_disk):
    watch, slow = slow_disk
    with watch.connection_to_each_worker() as connections:
        create_topic(connections[0], "t", 1)
        must_produce(connections[0], "t", 0, b"warm")
        slow(1000)
        for kafka in connections:
            for _ in range(20):
                send_produce(kafka, "t", 0, batch(b"x"), timeout_ms=60_000)
        with watch.connect() as other:
            delete_topic(other, "t")
        for kafka in connections:
            errors = [one_outcome(kafka.receive().body).error_code for _ in range(20)]
            assert set(errors) <= {0, NOT_LEADER, UNKNOWN_TOPIC, STORAGE_ERROR}, errors
        slow(0)
        watch.wait_quiet(connections=34)


# -- producer ids and fetch sessions ---------------------------------------------------------------


def test_remembered_producers_are_bounded_and_expire(start_broker):
    # of one worker, which the connection keeps awake: a quiet one only checks every minute
    config = {"producer.id.count.max": "16", "producer.id.expiration.ms": "1500"}
    watch = Watch(start_broker(workers=1, config=config))
    with watch.connect() as kafka:
        create_topic(kafka, "t", 1)
        for producer_id in range(1000, 1200):
            assert (
                produce(
                    kafka, "t", 0, batch(b"x", producer_id=producer_id, producer_epoch=0, base_sequence=0)
                ).error_code
                == 0
            )
        eventually(
            lambda: 0 < watch.total("producers") <= 16,
            lambda: f"{watch.total('producers')} producers are remembered",
            5,
        )
        again = batch(b"y", producer_id=1000, producer_epoch=0, base_sequence=1)  # forgotten, and accepted nevertheless
        assert produce(kafka, "t", 0, again).error_code == 0
        eventually(
            lambda: watch.total("producers") == 0, lambda: f"{watch.total('producers')} producers are remembered", 10
        )


def _session(
    kafka: KafkaConnection,
    topic: str | None,
    session_id: int,
    epoch: int,
    offset: int = 0,
    partition: int = 0,
    **options,
):
    request = (
        fetch_request(topic, {partition: offset}, **options)
        if topic
        else FetchRequest(max_wait_ms=0, min_bytes=0, max_bytes=MIB)
    )
    request.session_id, request.session_epoch = session_id, epoch
    return kafka.call(FETCH, FETCH_VERSION, request)


def test_fetch_sessions_are_bounded(start_broker, io_backend):
    """When live sessions use all slots, a later client reads without a session; a closed one frees
    its slot.
    """
    watch = Watch(
        start_broker(workers=1, config={"io.backend": io_backend, "max.incremental.fetch.session.cache.slots": "8"})
    )
    with watch.connect() as kafka:
        create_topic(kafka, "t", 1)
        must_produce(kafka, "t", 0, b"x")
        ids = [_session(kafka, "t", 0, 0).session_id for _ in range(20)]
        assert all(ids[:8]) and len(set(ids[:8])) == 8 and not any(ids[8:])
        eventually(lambda: watch.total("sessions") == 8, "the gauge follows")
        assert _session(kafka, None, ids[0], 1).error_code == 0
        assert _session(kafka, "t", ids[1], -1).session_id == 0  # ends it
        assert _session(kafka, None, ids[1], 1).error_code == 70  # FETCH_SESSION_ID_NOT_FOUND
        assert _session(kafka, "t", 0, 0).session_id not in (0, *ids)


def test_unknown_partitions_do_not_accumulate_in_a_session(start_broker, io_backend):
    watch = Watch(start_broker(workers=1, config={"io.backend": io_backend}))
    with watch.connect() as kafka:
        create_topic(kafka, "t", 1)
        response = _session(kafka, "t", 0, 0)
        session_id = response.session_id
        for epoch in range(1, 200):
            response = _session(kafka, "unheard-of", session_id, epoch)
            assert response.error_code == 0
            reported = [
                partition.error_code
                for topic in response.responses
                for partition in topic.partitions
                if topic.topic == "unheard-of"
            ]
            assert reported == [UNKNOWN_TOPIC], f"after {epoch} requests the answer names it {len(reported)} times"


def _next_outcome(kafka: KafkaConnection, session_id: int, epochs: Iterator[int]):
    """The next response with a partition: a worker may learn of a change after the client."""

    def look():
        response = _session(kafka, None, session_id, next(epochs))
        return response if response.responses else None

    return eventually(look)


def test_a_session_continues_after_its_topic_is_recreated(watch, name):
    """A client below Fetch 13 identifies topics by name: a topic that is created (again) during its
    session is served to it.
    """
    with watch.connection_to_each_worker() as connections:
        for kafka in connections:
            create_topic(kafka, name, 1)
            must_produce(kafka, name, 0, b"first life")
            session_id, epochs = _session(kafka, name, 0, 0).session_id, itertools.count(1)
            delete_topic(kafka, name)
            gone = _next_outcome(kafka, session_id, epochs)
            assert [partition.error_code for topic in gone.responses for partition in topic.partitions] == [
                UNKNOWN_TOPIC
            ]
            create_topic(kafka, name, 1)
            must_produce(kafka, name, 0, b"second life")
            back = _next_outcome(kafka, session_id, epochs)
            assert [partition.error_code for topic in back.responses for partition in topic.partitions] == [0], back
            assert b"second life" in one_outcome(back).records
            unknown = _session(kafka, f"{name}-new", 0, 0)
            assert one_outcome(unknown).error_code == UNKNOWN_TOPIC
            create_topic(kafka, f"{name}-new", 1)
            assert one_outcome(_session(kafka, None, unknown.session_id, 1)).error_code == 0
            delete_topic(kafka, f"{name}-new")
            delete_topic(kafka, name)
