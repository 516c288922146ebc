"""The traps of this architecture: mistakes made before, each with tests that fail if it is
repeated.

TRAPS maps each to the tests that guard it; a test below checks that they exist. Traps of several
hosts are named in LATER.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from mqd import native
from mqd.base import paths
from mqd.shm.attach import MESSAGE_BYTES_MAX, _decode, connect_keeper, receive_packet, send_message
from mqd.shm.keeper_messages import Hello
from tests.broker import Broker, BrokerFailed
from tests.broker_files import faults_file
from tests.interaction.traffic import (
    FETCH,
    FETCH_VERSION,
    NOT_LEADER,
    PRODUCE,
    PRODUCE_VERSION,
    STORAGE_ERROR,
    TIMED_OUT,
    UNKNOWN_TOPIC,
    Watch,
    allocated_bytes,
    batch,
    create_topic,
    delete_records,
    delete_topic,
    deleted_files_open,
    eventually,
    fetch,
    fetch_request,
    log_end,
    must_produce,
    new_producer_id,
    one_outcome,
    produce,
    produce_request,
    read_batches,
    send_produce,
    topic_name,
)
from tests.kafka_connection import ConnectionEnded, KafkaConnection
from tests.polling import PATIENCE_S

TRAPS = {
    "partial restart": [
        "interaction/test_traps.py::test_a_killed_worker_recovers_its_records_and_producers",
        "interaction/test_traps.py::test_restarted_processes_never_assign_a_producer_id_twice",
        "unit/worker/test_process.py::test_a_restarted_worker_gets_its_partitions_back",
        "unit/worker/test_process.py::test_a_restarted_controller_changes_nothing",
    ],
    "forwarded produce": [
        "interaction/test_traps.py::test_forwarded_batches_of_a_producer_never_overtake_each_other",
        "interaction/test_traps.py::test_a_retry_through_another_worker_gets_the_original_offset",
    ],
    "deleted segments": [
        "interaction/test_traps.py::test_the_space_of_deleted_records_is_freed",
        "interaction/test_traps.py::test_the_space_of_a_deleted_topic_is_freed",
        "interaction/test_traps.py::test_a_client_that_stops_reading_does_not_keep_deleted_files_forever",
    ],
    "arena": [
        "interaction/test_traps.py::test_the_arena_is_empty_after_traffic",
        "interaction/test_traps.py::test_a_killed_workers_borrowed_extents_are_freed",
        "interaction/server/test_hostile_clients.py::test_trickling_frames_do_not_exhaust_the_arena",
        "interaction/server/test_hostile_frames.py::test_connections_that_end_within_a_frame_leave_nothing",
    ],
    "preallocation": ["interaction/test_traps.py::test_quiet_partitions_take_little_disk"],
    "a stalled disk": [
        "interaction/server/test_limits.py::test_a_stalled_disk_does_not_delay_the_other",
        "unit/worker/test_process.py::test_a_failed_flush_fences_its_directory_and_no_other",
    ],
    "acks=all waiting": [
        "interaction/server/test_limits.py::test_acks_all_times_out_when_the_disk_is_slow",
        "interaction/server/test_limits.py::test_requests_waiting_for_a_disk_are_bounded_and_all_get_responses",
        "interaction/server/test_limits.py::test_waiting_requests_get_responses_when_their_topic_is_deleted",
    ],
    "waiters": [
        "interaction/test_traps.py::test_a_long_poll_wakes_through_any_worker",
        "interaction/test_traps.py::test_more_workers_than_the_bitmap_has_bits_are_refused",
    ],
    "producer ids and fetch sessions": [
        "interaction/server/test_limits.py::test_remembered_producers_are_bounded_and_expire",
        "interaction/server/test_limits.py::test_fetch_sessions_are_bounded",
        "interaction/server/test_limits.py::test_unknown_partitions_do_not_accumulate_in_a_session",
        "interaction/server/test_limits.py::test_a_session_continues_after_its_topic_is_recreated",
    ],
    "between hosts": [
        "interaction/test_traps.py::test_a_client_cannot_fetch_as_a_follower",
        "interaction/server/test_hostile_frames.py::test_an_unknown_api_ends_the_connection",
    ],
    "versions": [
        "interaction/test_traps.py::test_a_process_of_another_build_is_refused_with_a_remedy",
        "unit/shm/test_native.py::test_zeroes_are_not_a_control_segment",
    ],
}
LATER = {
    "truncation and sendfile": (
        "on one host nothing below a published position is ever cut: only recovery truncates, before anybody serves"
    ),
    "local client, remote leader": "there are no local clients yet, and no remote leaders",
}
TESTS = Path(__file__).parents[1]
MIB = 1 << 20


def test_every_trap_has_its_tests():
    for trap, names in TRAPS.items():
        for name in names:
            path, _, function = name.partition("::")
            assert re.search(rf"^def {function}\(", (TESTS / path).read_text(), re.MULTILINE), (
                f"{trap}: {name} does not exist"
            )


@pytest.fixture(scope="module")
def watch(shared_broker: Broker) -> Watch:
    return Watch(shared_broker)


@pytest.fixture
def name(request) -> str:
    return topic_name(request.node.name)


# -- partial restart -------------------------------------------------------------------------------


class IdempotentProducer:
    """The producer of one partition: like a real one it retries requests without a response, and it
    keeps the acknowledged batches.
    """

    def __init__(self, topic: str, partition: int, ids: tuple[int, int]) -> None:
        self.topic, self.partition, self.ids = topic, partition, ids
        self.acknowledged: list[tuple[int, bytes]] = []  # (offset, batch)

    def next_batch(self) -> bytes:
        number = len(self.acknowledged)
        return batch(
            b"%d-%d" % (self.partition, number),
            producer_id=self.ids[0],
            producer_epoch=self.ids[1],
            base_sequence=number,
        )

    def produce(self, watch: Watch) -> None:
        """Writes one record, with as many attempts as needed."""
        data = self.next_batch()
        deadline = time.monotonic() + PATIENCE_S
        while True:
            assert time.monotonic() < deadline, (
                f"{self.topic}-{self.partition} does not come back\n{watch.broker.logs()}"
            )
            try:
                with watch.connect(timeout_s=5) as kafka:
                    outcome = produce(kafka, self.topic, self.partition, data, timeout_ms=1000)
            except (ConnectionEnded, OSError):
                continue
            if outcome.error_code == 0:
                self.acknowledged.append((outcome.base_offset, data))
                return
            assert outcome.error_code in (NOT_LEADER, TIMED_OUT, STORAGE_ERROR), outcome


@pytest.mark.both_backends
def test_a_killed_worker_recovers_its_records_and_producers(start_broker, io_backend):
    watch = Watch(start_broker(config={"io.backend": io_backend}))
    with watch.connect() as kafka:
        create_topic(kafka, "t", 4)
        producers = [IdempotentProducer("t", partition, new_producer_id(kafka)) for partition in range(4)]
    for victim in (0, 1, 0):
        for producer in producers:
            for _ in range(8):
                producer.produce(watch)
        pids = watch.worker_pids()
        os.kill(pids[victim], signal.SIGKILL)
        for producer in producers:
            for _ in range(3):
                producer.produce(watch)
        survivors = [pid for pid in watch.worker_pids() if pid in pids]
        assert survivors == [pid for index, pid in enumerate(pids) if index != victim], "another worker fell with it"
    with watch.connection_to_each_worker() as connections:
        for producer in producers:
            offsets = [offset for offset, _ in producer.acknowledged]
            assert offsets == list(range(len(offsets))), "a record was written twice, or lost"
            for kafka in connections:
                for offset, data in producer.acknowledged[-5:]:  # a client may still repeat these
                    outcome = produce(kafka, "t", producer.partition, data)
                    assert (outcome.error_code, outcome.base_offset) == (0, offset)
                stored = [bytes(data[61:]) for data in read_batches(kafka, "t", producer.partition)]
                assert stored == [data[61:] for _, data in producer.acknowledged]


def test_restarted_processes_never_assign_a_producer_id_twice(start_broker):
    watch = Watch(start_broker())
    given: list[int] = []

    def request() -> bool:
        try:
            with watch.connect(timeout_s=5) as kafka:
                given.append(new_producer_id(kafka)[0])
            return True
        except (ConnectionEnded, OSError, AssertionError):
            return False

    for role in (None, "acceptor", "controller", "acceptor", "controller"):
        if role:
            os.kill(watch.broker.pids(role)[0], signal.SIGKILL)
        for _ in range(3):
            eventually(request, "a producer id")
    assert len(set(given)) == len(given), given


# -- forwarded produce -----------------------------------------------------------------------------


def test_forwarded_batches_of_a_producer_never_overtake_each_other(watch, name):
    """Five in flight, through the worker that does not own the partition, among large and small
    requests of others that take another path.
    """
    with watch.connection_to_each_worker() as connections:
        create_topic(connections[0], name, 2)
        chance = random.Random(7)
        for partition in (0, 1):
            owner = watch.owner_of(connections, name, partition)
            through = connections[1 - owner]
            before = watch.total("batches_forwarded")
            producer_id, epoch = new_producer_id(through)
            sequence, start = 0, log_end(through, name, partition)
            for _ in range(150):
                for _ in range(5):
                    values = [bytes(chance.choice((1, 100, 3000, 60_000)))]
                    send_produce(
                        through,
                        name,
                        partition,
                        batch(*values, producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence),
                        acks=chance.choice((1, -1)),
                    )
                    sequence += 1
                for expected in range(sequence - 5, sequence):
                    outcome = one_outcome(through.receive().body)
                    assert (outcome.error_code, outcome.base_offset) == (0, start + expected)
            assert watch.total("batches_forwarded") - before == 750


@pytest.mark.both_backends
def test_a_retry_through_another_worker_gets_the_original_offset(watch, name):
    with watch.connection_to_each_worker() as connections:
        create_topic(connections[0], name, 1)
        producer_id, epoch = new_producer_id(connections[0])
        for sequence in range(20):
            data = batch(b"%d" % sequence, producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence)
            first, again = connections if sequence % 2 else reversed(connections)
            assert produce(first, name, 0, data).base_offset == sequence
            assert produce(again, name, 0, data).base_offset == sequence
        skipped = batch(b"gap", producer_id=producer_id, producer_epoch=epoch, base_sequence=30)
        # OUT_OF_ORDER_SEQUENCE_NUMBER
        assert [produce(kafka, name, 0, skipped).error_code for kafka in connections] == [45, 45]
        assert log_end(connections[0], name, 0) == 20


# -- deleted segments ------------------------------------------------------------------------------


def _fill(kafka: KafkaConnection, topic: str, count: int = 60, size: int = 100_000) -> None:
    for _ in range(count):
        must_produce(kafka, topic, 0, bytes(size))


def _nothing_deleted_is_open(watch: Watch, topic: str) -> None:
    def held() -> list[str]:
        return [
            f"{pid}: {path}" for pid in watch.worker_pids() for path in deleted_files_open(pid) if f"/{topic}-" in path
        ]

    eventually(lambda: not held(), lambda: f"still open: {held()[:5]}")


def test_the_space_of_deleted_records_is_freed(watch, name):
    with watch.connection_to_each_worker() as connections:
        create_topic(connections[0], name, 1, segment_bytes="300000")
        _fill(connections[0], name)
        for kafka in connections:  # every worker has the segments open
            assert sum(1 for _ in read_batches(kafka, name, 0)) == 60
        directory = watch.broker.data_dir / "log" / f"{name}-0"
        assert allocated_bytes(directory) > 5_000_000
        assert delete_records(connections[0], name, 0, 60) == 60
        eventually(
            lambda: allocated_bytes(directory) < 1_000_000,
            lambda: f"{allocated_bytes(directory)} bytes are still there",
        )
        _nothing_deleted_is_open(watch, name)
        for kafka in connections:
            assert fetch(kafka, name, 0, 10).error_code == 1  # OFFSET_OUT_OF_RANGE
            must_produce(kafka, name, 0, b"goes on")
            assert fetch(kafka, name, 0, 60).records


def test_the_space_of_a_deleted_topic_is_freed(watch, name):
    with watch.connection_to_each_worker() as connections:
        create_topic(connections[0], name, 1, segment_bytes="300000")
        _fill(connections[0], name)
        for kafka in connections:
            assert sum(1 for _ in read_batches(kafka, name, 0)) == 60
        delete_topic(connections[0], name)
        log = watch.broker.data_dir / "log"
        eventually(
            lambda: not [path for path in log.iterdir() if path.name.startswith(name)],
            lambda: f"{sorted(path.name for path in log.iterdir())}",
        )
        _nothing_deleted_is_open(watch, name)
        for kafka in connections:
            assert fetch(kafka, name, 0, 0).error_code == UNKNOWN_TOPIC


def test_a_client_that_stops_reading_does_not_keep_deleted_files_forever(start_broker, io_backend):
    watch = Watch(start_broker(config={"io.backend": io_backend, "connections.max.idle.ms": "5000"}))
    with watch.connect() as kafka, watch.connect() as deaf:
        create_topic(kafka, "t", 1, segment_bytes="1000000")
        deaf.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        _fill(kafka, "t", count=60, size=500_000)
        for offset in range(0, 60, 2):
            deaf.send(FETCH, FETCH_VERSION, fetch_request("t", {0: offset}, bytes_max=MIB))
        eventually(
            lambda: any("/t-0/" in target for pid in watch.worker_pids() for target in _open_files(pid)),
            "segments are open",
        )
        delete_records(kafka, "t", 0, 60)

        def gone() -> bool:
            must_produce(kafka, "t", 0, b"not idle")
            return not [path for pid in watch.worker_pids() for path in deleted_files_open(pid)]

        eventually(gone, "the deaf client keeps deleted segments open")


def _open_files(pid: int) -> list[str]:
    """The files behind its descriptors; some are closed while they are listed."""
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(path))
    return found


# -- arena -----------------------------------------------------------------------------------------


@pytest.mark.both_backends
def test_the_arena_is_empty_after_traffic(watch, name):
    """Small and large, owned and forwarded, accepted and refused, complete and cut off: none of
    them stays in the arena.
    """
    with watch.connection_to_each_worker() as connections:
        create_topic(connections[0], name, 2)
        chance = random.Random(11)
        extra = [watch.connect() for _ in range(20)]
        for _ in range(40):
            for kafka in [*connections, *extra]:
                size = chance.choice((10, 500, 20_000, 40_000, 200_000, 900_000))
                data = bytearray(batch(bytes(size)))
                if chance.random() < 0.2:
                    data[-1] ^= 1
                topic = name if chance.random() < 0.8 else "nowhere"
                send_produce(kafka, topic, chance.randrange(3), bytes(data), acks=chance.choice((1, -1)))
                if chance.random() < 0.5:
                    kafka.send(FETCH, FETCH_VERSION, fetch_request(name, {0: 0, 1: 0}, bytes_max=100_000))
            for kafka in [*connections, *extra]:
                while kafka._waiting:
                    kafka.receive()
        for kafka in extra[:10]:
            kafka.send_raw(b"\x00\x04\x00\x00\x00\x00\x00\x09" + bytes(100_000))
        for kafka in extra:
            kafka.close()
        watch.wait_quiet(connections=34)


def test_a_killed_workers_borrowed_extents_are_freed(start_broker, io_backend, tmp_path):
    """The owner dies while it has batches of another worker's arena: the sender's extents are
    freed, and its clients get responses.
    """
    faults = faults_file(tmp_path / "data")
    watch = Watch(start_broker(config={"io.backend": io_backend}, environment={"MQD_FILE_FAULTS": f"@{faults}"}))
    with watch.connection_to_each_worker() as connections:
        create_topic(connections[0], "t", 2)
        owner = watch.owner_of(connections, "t", 0)
        through = connections[1 - owner]
        faults.write_text("write:DELAY:t-0:ms=60000:count=1")  # longer than it lives
        forwarded = watch.total("batches_forwarded")
        for _ in range(40):
            send_produce(through, "t", 0, batch(bytes(60_000)), acks=1)
        eventually(lambda: watch.total("batches_forwarded") > forwarded, "a batch is with the owner")
        os.kill(watch.worker_pids()[owner], signal.SIGKILL)
        faults.write_text("")
        outcomes = [one_outcome(through.receive().body).error_code for _ in range(40)]
        assert set(outcomes) <= {0, TIMED_OUT, NOT_LEADER} and TIMED_OUT in outcomes, outcomes
        eventually(
            lambda: watch.counters()["arena_extents_used"][str(1 - owner)] <= 1,
            lambda: f"{watch.counters()['arena_extents_used']}",
        )
        producer = IdempotentProducer("t", 0, new_producer_id(through))
        producer.produce(watch)


# -- preallocation ---------------------------------------------------------------------------------


def test_quiet_partitions_take_little_disk(start_broker):
    count = 600
    watch = Watch(start_broker(config={"log.flush.on.ack": "false"}))
    with watch.connect(timeout_s=60) as kafka:
        create_topic(kafka, "quiet", count)
        log = watch.broker.data_dir / "log"
        assert allocated_bytes(log) < count * 16_384, "an empty partition has no blocks to speak of"
        for first in range(0, count, 200):
            body = kafka.call(
                PRODUCE,
                PRODUCE_VERSION,
                produce_request("quiet", {index: batch(bytes(100)) for index in range(first, first + 200)}),
            )
            assert {outcome.error_code for outcome in body.responses[0].partition_responses} == {0}
        time.sleep(1.0)  # preallocation happens in the background
        taken = allocated_bytes(log)
        assert taken < count * (65_536 + 16_384), f"{taken / count:.0f} bytes for each quiet partition"


# -- waiters ---------------------------------------------------------------------------------------


@pytest.mark.both_backends
def test_a_long_poll_wakes_through_any_worker(watch, name):
    """Reader on either worker, writer on either worker, partitions of either: no request waits for
    the timeout.
    """
    with watch.connection_to_each_worker() as readers, watch.connection_to_each_worker() as writers:
        create_topic(readers[0], name, 2)
        end = [0, 0]
        for _ in range(25):
            for reader in readers:
                for writer in writers:
                    for partition in (0, 1):
                        reader.send(
                            FETCH, FETCH_VERSION, fetch_request(name, {0: end[0], 1: end[1]}, max_wait_ms=120_000)
                        )
                        must_produce(writer, name, partition, b"wake up")
                        # a fetch that missed the record would end after the connection's timeout
                        outcomes = reader.receive().body.responses[0].partitions
                        assert [bool(outcome.records) for outcome in outcomes] == [partition == 0, partition == 1]
                        end[partition] += 1


def test_more_workers_than_the_bitmap_has_bits_are_refused(tmp_path):
    with pytest.raises(BrokerFailed, match=r"64"):
        Broker(tmp_path / "data", workers=65).start()


# -- between hosts, versions -----------------------------------------------------------------------


def test_a_client_cannot_fetch_as_a_follower(watch, name):
    with watch.connect() as kafka:
        create_topic(kafka, name, 1)
        must_produce(kafka, name, 0, b"x")
        request = fetch_request(name, {0: 0})
        request.replica_id = 1
        response = kafka.call(FETCH, FETCH_VERSION, request)
        assert response.error_code == 31 and not response.responses  # CLUSTER_AUTHORIZATION_FAILED


def test_a_process_of_another_build_is_refused_with_a_remedy(watch):
    connection = connect_keeper(paths.layout(watch.broker.data_dir).keeper_socket)
    send_message(connection, Hello("worker", 0, os.getpid(), native.abi_hash() ^ 1))
    packet, _ = receive_packet(connection, size_bytes_max=MESSAGE_BYTES_MAX)
    connection.close()
    reason = _decode(packet).reason
    assert "built from other sources" in reason and "mqd down, mqd up" in reason, reason
