"""Clients that misbehave for a long time: they stop reading, send a byte now and then, or stay idle
by the thousand. They cost little and do not harm other clients.
"""

from __future__ import annotations

import resource
import socket
import struct
import threading
import time

import pytest

from mqd.protocol import encode_request, with_length
from mqd.protocol.messages import MetadataRequest
from tests.interaction.traffic import (
    API_VERSIONS,
    FETCH,
    FETCH_VERSION,
    METADATA,
    PRODUCE_VERSION,
    Watch,
    batch,
    cpu_seconds,
    create_topic,
    eventually,
    fetch_request,
    must_produce,
    one_outcome,
    produce_request,
    rss_bytes,
    send_produce,
)
from tests.kafka_connection import ConnectionEnded, KafkaConnection
from tests.tiers import quick

MIB = 1 << 20


@pytest.fixture
def watch(start_broker, io_backend) -> Watch:
    """A broker for this module only, since memory is measured."""
    return Watch(start_broker(config={"io.backend": io_backend, "log.flush.on.ack": "false"}))


def _others_are_served(connections: list[KafkaConnection], topic: str, seconds: float, values: int = 20) -> None:
    """Each partition can be written through each worker, in at most `seconds`."""
    for kafka in connections:
        for partition in (0, 1):
            for _ in range(values):
                began = time.monotonic()
                must_produce(kafka, topic, partition, bytes(1000))
                assert time.monotonic() - began < seconds


def test_requests_of_a_client_that_stops_reading_are_not_read(watch):
    with watch.connection_to_each_worker() as connections:
        create_topic(connections[0], "read", 2)
        create_topic(connections[0], "others", 2)
        create_topic(connections[0], "wide", 500)
        for partition in (0, 1):
            for _ in range(40):
                must_produce(connections[0], "read", partition, bytes(100_000))
        _others_are_served(connections, "others", 6.0)
        before = watch.worker_rss_bytes()
        deaf = [watch.connect(timeout_s=30) for _ in range(6)]
        sent = [0] * len(deaf)
        for index, kafka in enumerate(deaf):  # as many as the socket buffers take
            kafka.socket.setblocking(False)
            large = with_length(
                encode_request(fetch_request("read", {index % 2: 0}, bytes_max=4 * MIB), FETCH_VERSION, 1, "deaf")
            )
            small = with_length(
                encode_request(fetch_request("read", {index % 2: 0}, bytes_max=4000), FETCH_VERSION, 1, "deaf")
            )
            every = with_length(encode_request(MetadataRequest(topics=None), 9, 1, "deaf"))
            frame = (large, small, every)[index % 3]
            try:
                for _ in range(20_000):
                    taken = kafka.socket.send(frame)
                    sent[index] += taken == len(frame)
                    if taken < len(frame):
                        break
            except BlockingIOError:
                pass
        _others_are_served(connections, "others", 6.0)
        grown = watch.worker_rss_bytes() - before
        assert grown < len(deaf) * 4 * MIB, f"{len(deaf)} deaf clients cost {grown / MIB:.0f} MiB"
        for index in (0, 1, 2):  # a client that resumes reading is served, in order
            deaf[index].socket.settimeout(30)
            responses = min(sent[index], 60)
            for _ in range(responses):
                (correlation_id,) = struct.unpack_from(">i", deaf[index].receive_frame())
                assert correlation_id == 1
        for kafka in deaf:
            kafka.close()
        watch.wait_quiet(connections=32)


def test_trickling_frames_do_not_exhaust_the_arena(watch):
    """Together they announce many times the arena's size; each sends a byte now and then and is
    never idle. All others can still produce, even large batches.
    """
    arena_extents = int(min(watch.counters()["arena_extents_max"].values()) or 192)
    with watch.connection_to_each_worker() as connections:
        create_topic(connections[0], "others", 2)
        frame = with_length(
            encode_request(produce_request("others", {0: batch(bytes(1_000_000))}), PRODUCE_VERSION, 1, "slow")
        )
        count = 2 * 3 * arena_extents * 65536 // len(frame)
        slow = [watch.connect() for _ in range(count)]
        for index, kafka in enumerate(slow):
            kafka.send_raw(frame[: 40_000 + index])
        at = [40_000 + index for index in range(count)]
        stop = threading.Event()

        def trickle() -> None:
            """Writes to every connection some fifty times a second, so that none of them counts as
            idle.
            """
            while not stop.is_set():
                for index, kafka in enumerate(slow):
                    try:
                        kafka.socket.send(frame[at[index] : at[index] + 1])
                        at[index] += 1
                    except OSError:
                        pass  # disconnected: that is a bound too
                stop.wait(0.01)

        sender = threading.Thread(target=trickle)
        sender.start()
        try:
            for _ in range(4):
                _others_are_served(connections, "others", 6.0, values=1)
                # a large frame waits until an older one has had its 200 ms, two of them at most
                for kafka in connections:
                    began = time.monotonic()
                    must_produce(kafka, "others", 0, bytes(900_000))
                    assert time.monotonic() - began < 15.0
        finally:
            stop.set()
            sender.join()
        heap = watch.counters()["heap_bytes"]
        assert max(heap.values()) <= 64 * MIB, heap
        served = 0
        for index, kafka in enumerate(slow[:8]):  # slow clients within the limit are served in the end
            try:
                kafka.send_raw(frame[at[index] :])
                served += len(kafka.receive_frame()) > 0
            except (OSError, ConnectionEnded):
                continue
        assert served, "no slow client was served"
        for kafka in slow:
            kafka.close()
        watch.wait_quiet(connections=32)
        _others_are_served(connections, "others", 6.0)


@pytest.mark.slow
def test_trickling_small_frames_cost_little(watch):
    """Three hundred clients send one byte at a time: each costs only the few bytes it has sent."""
    frame = with_length(encode_request(produce_request("others", {0: batch(bytes(500))}), PRODUCE_VERSION, 1, "slow"))
    with watch.connection_to_each_worker() as connections:
        create_topic(connections[0], "others", 2)
        _others_are_served(connections, "others", 6.0)
        before = watch.worker_rss_bytes()
        slow = [watch.connect() for _ in range(300)]
        for at in range(len(frame)):
            for kafka in slow:
                kafka.send_raw(frame[at : at + 1])
            if at % 100 == 0:
                _others_are_served(connections, "others", 6.0, values=1)
        for kafka in slow:
            assert len(kafka.receive_frame()) > 0
        assert watch.worker_rss_bytes() - before < 16 * MIB
        for kafka in slow:
            kafka.close()
    watch.wait_quiet(connections=0)


IDLE = 5000


def test_thousands_of_idle_connections(watch):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < IDLE + 500:
        pytest.skip(f"the limit of open files is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 20_000), hard))
    idle: list[socket.socket] = []
    try:
        with watch.connection_to_each_worker() as connections:
            create_topic(connections[0], "others", 2)
            _others_are_served(connections, "others", 6.0)
            pids = watch.worker_pids()
            before = sum(map(rss_bytes, pids))
            for _ in range(IDLE):
                idle.append(socket.create_connection(("127.0.0.1", watch.broker.port), timeout=60))
            eventually(lambda: watch.total("connections") >= IDLE, lambda: f"{watch.counters()['connections']}")
            assert watch.total("connections_refused") == 0
            eventually(
                lambda: abs(watch.counters()["connections"]["0"] - watch.counters()["connections"]["1"]) < IDLE // 4,
                lambda: f"{watch.counters()['connections']}",
            )
            grown = sum(map(rss_bytes, pids)) - before
            assert grown < 32 * MIB, f"{IDLE} idle connections cost the workers {grown / MIB:.0f} MiB"
            _others_are_served(connections, "others", 6.0)
            with watch.connect() as one_more:
                one_more.call(API_VERSIONS, 3)
                must_produce(one_more, "others", 0, b"one more")
            for one in idle[:: IDLE // 50]:  # none of them is forgotten
                one.sendall(with_length(encode_request(MetadataRequest(topics=[]), 9, 3, "late")))
                assert one.recv(4)
            cpu, began = sum(map(cpu_seconds, pids)), time.monotonic()
            time.sleep(2.0)  # the interval over which the cost of idling is measured
            busy = (sum(map(cpu_seconds, pids)) - cpu) / (time.monotonic() - began)
            assert busy < 0.05, f"the workers use {100 * busy:.1f} % of a CPU for idle connections"
    finally:
        for one in idle:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    eventually(lambda: watch.total("connections") == 0, lambda: f"{watch.counters()['connections']}")


def test_idle_connections_are_closed_in_the_end(start_broker, io_backend):
    watch = Watch(start_broker(config={"io.backend": io_backend, "connections.max.idle.ms": "500"}))
    with watch.connect() as idle, watch.connect() as busy, watch.connect() as polling:
        create_topic(busy, "t")
        polling.send(FETCH, FETCH_VERSION, fetch_request("t", {0: 0}, max_wait_ms=2000))
        began = time.monotonic()
        while time.monotonic() - began < 1.6:
            must_produce(busy, "t", 0, b"x") if time.monotonic() - began > 1.3 else busy.call(API_VERSIONS, 0)
            time.sleep(0.05)  # the pace of a busy client
        assert idle.is_closed_by_peer()
        assert one_outcome(polling.receive().body).records  # waiting for records is not idling


def test_connections_above_the_limit_are_closed_at_once_and_reported(start_broker, io_backend):
    watch = Watch(start_broker(config={"io.backend": io_backend, "max.connections": "40"}))
    opened = [watch.connect() for _ in range(60)]
    served = 0
    for kafka in opened:
        try:
            kafka.call(API_VERSIONS, 0)
            served += 1
        except (OSError, ConnectionEnded):  # closed, at any moment
            pass
    assert 20 <= served <= 40
    watch.wait_logged("connection refused", "max.connections")
    for kafka in opened:
        kafka.close()

    def again() -> bool:
        with watch.connect() as kafka:
            try:
                return bool(kafka.call(API_VERSIONS, 0))
            except (OSError, ConnectionEnded):
                return False

    eventually(again, "a place becomes free")


def test_a_failed_produce_with_acks_0_only_closes_the_connection(watch):
    with watch.connect() as kafka, watch.connect() as other:
        create_topic(other, "t")
        send_produce(kafka, "t", 0, batch(b"good"), acks=0)
        send_produce(kafka, "nowhere", 0, batch(b"lost"), acks=0)
        assert kafka.is_closed_by_peer()
        assert must_produce(other, "t", 0, b"next") == 1


@pytest.mark.parametrize("how", quick(["metadata", "sessions", "produce"], ["produce"]))
def test_memory_for_requests_behind_a_long_poll_is_bounded(start_broker, how):
    """Responses are sent in order, so all those behind a parked fetch are kept. Their memory is
    bounded, whatever is requested.
    """
    watch = Watch(start_broker())
    with watch.connection_to_each_worker() as connections:
        create_topic(connections[0], "t", 2)
        create_topic(connections[0], "wide", 1000)
        connections[0].call(METADATA, 9, MetadataRequest(topics=None))
        before = watch.worker_rss_bytes()
        waiting = [watch.connect(timeout_s=2) for _ in range(30)]
        names = {index: 0 for index in range(3000)}
        frame = {
            "metadata": with_length(encode_request(MetadataRequest(topics=None), 9, 1, "many")),
            "sessions": with_length(encode_request(fetch_request("unheard-of", names), FETCH_VERSION, 1, "many")),
            "produce": with_length(
                encode_request(produce_request("unheard-of", dict.fromkeys(names)), PRODUCE_VERSION, 1, "many")
            ),
        }[how]
        for kafka in waiting:
            kafka.send(FETCH, FETCH_VERSION, fetch_request("t", {0: 0}, max_wait_ms=3_000))
            kafka.socket.setblocking(False)
            try:
                for _ in range(200):
                    if kafka.socket.send(frame) < len(frame):
                        break
            except (BlockingIOError, BrokenPipeError, ConnectionResetError):
                pass
        for _ in range(5):
            for kafka in connections:
                assert must_produce(kafka, "t", 1, b"x") >= 0
        high = sum(_peak_bytes(pid) for pid in watch.worker_pids())
        assert high - before < 2 * 64 * MIB + 48 * MIB, f"grew by {(high - before) / MIB:.0f} MiB"
        for kafka in waiting:
            kafka.close()
    watch.wait_quiet(connections=0)


def _peak_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
