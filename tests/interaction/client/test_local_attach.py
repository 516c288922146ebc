"""Clients on the broker's host, through shared memory: attaching, the same service as over TCP,
refusals with reasons, and cleanup when clients or the broker's processes die.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import signal
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from mqd import Producer, native
from mqd.protocol.messages import (
    AlterClientQuotasRequest,
    FindCoordinatorRequest,
    MetadataRequest,
    OffsetCommitRequest,
    OffsetFetchRequest,
)
from mqd.shm import rendezvous
from tests.broker import Broker
from tests.interaction.traffic import (
    API_VERSIONS,
    FETCH,
    FETCH_VERSION,
    METADATA,
    PRODUCE,
    PRODUCE_VERSION,
    Watch,
    batch,
    create_topic,
    eventually,
    fetch,
    fetch_request,
    must_produce,
    produce_request,
    read_batches,
    topic_name,
)
from tests.interaction.transactional import RawProducer, topic_of
from tests.kafka_connection import ConnectionEnded, KafkaConnection
from tests.local_connection import MAGIC, QUERY, WELCOME, LocalConnection, Refused, connect, hello

MIB = 1 << 20


def socket_of(broker: Broker) -> str:
    found = rendezvous.find(broker.bootstrap)
    assert found.path is not None, found.reason
    return found.path


def attach(broker: Broker, **options) -> LocalConnection:
    return LocalConnection(socket_of(broker), **options)


@contextlib.contextmanager
def one_for_each_worker(broker: Broker, **options) -> Iterator[list[LocalConnection]]:
    """The acceptor assigns each client to the worker with the fewest."""
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(attach(broker, **options)) for _ in range(2 * broker.workers)]
        by_worker = {connection.worker: connection for connection in opened}
        assert len(by_worker) == broker.workers, [connection.worker for connection in opened]
        yield [by_worker[worker] for worker in sorted(by_worker)]


# -- served ----------------------------------------------------------------------------------------


def test_every_api_of_tcp_works_over_shared_memory(shared_broker, request):
    topic = topic_name(request.node.name)
    with one_for_each_worker(shared_broker) as local, KafkaConnection(port=shared_broker.port) as tcp:
        create_topic(local[0], topic, 2)
        values = []
        for number in range(12):
            value = b"%d " % number + bytes(number * 5000)
            must_produce((*local, tcp)[number % 3], topic, number % 2, value)
            values.append(value)
        for kafka in (*local, tcp):
            for partition in (0, 1):
                stored = b"".join(read_batches(kafka, topic, partition))
                assert all(value in stored for value in values[partition::2])
        offset = OffsetCommitRequest.Partition(partition_index=0, committed_offset=5)
        committed = OffsetCommitRequest(
            group_id=topic,
            generation_id_or_member_epoch=-1,
            topics=[OffsetCommitRequest.Topic(name=topic, partitions=[offset])],
        )
        eventually(
            lambda: (
                local[1].call(10, 4, FindCoordinatorRequest(coordinator_keys=[topic])).coordinators[0].error_code == 0
            ),
            "a coordinator",
        )
        eventually(
            lambda: local[0].call(8, 9, committed).topics[0].partitions[0].error_code == 0,
            "a coordinator that has loaded",
        )
        (group,) = tcp.call(
            9, 9, OffsetFetchRequest(groups=[OffsetFetchRequest.Group(group_id=topic, topics=None)])
        ).groups
        assert [one.committed_offset for one in group.topics[0].partitions] == [5]


def test_metadata_names_the_first_listener_and_logs_name_the_process(shared_broker):
    with attach(shared_broker, client_id="who-am-i") as local:
        (broker,) = local.call(METADATA, 12, MetadataRequest(topics=[])).brokers
        assert (broker.host, broker.port) == ("127.0.0.1", shared_broker.port)
        line = Watch(shared_broker).wait_logged("who-am-i", "attached", logs="mqd-worker-*.log")
        assert f"pid {os.getpid()}" in line and f"uid {os.getuid()}" in line


def test_a_log_is_read_from_its_files(shared_broker, request):
    """Mapping requests and positions: what a reader of segment files depends on."""
    topic = topic_name(request.node.name)
    with attach(shared_broker) as local:
        topic_id = bytes(create_topic(local, topic, 1, **{"segment.bytes": "16384"}))
        for number in range(60):
            must_produce(local, topic, 0, b"%04d" % number + bytes(1000))
        expected, offset, seen = b"".join(read_batches(local, topic, 0)), 0, b""
        # the client's library maps it read-only
        control = mmap.mmap(local.control_fd, os.fstat(local.control_fd).st_size, mmap.MAP_PRIVATE)
        view_of = native.Control.attach(control).slot_view
        while offset < 60:
            response, fd = local.send_request(topic_id, 0, offset)
            assert response["error"] == 0 and response["base_offset"] == offset and fd is not None
            assert view_of(response["slot"]).high_watermark == 60
            seen += os.pread(fd, response["size_bytes"], 0)
            os.close(fd)
            offset = min(response["next_base_offset"], 60)
        assert seen == expected
        positions = msgspec.structs.replace(fetch_request(topic, {0: 7}), max_bytes=0)
        (partition,) = local.call(FETCH, FETCH_VERSION, positions).responses[0].partitions
        assert (partition.error_code, partition.high_watermark, partition.records or b"") == (0, 60, b"")
        assert fetch(local, topic, 0, 7).records  # with a max_bytes: a usual Fetch


def test_positions_name_the_aborted_transactions(shared_broker):
    """With read_committed: the aborted transactions from the fetch offset to the last stable
    offset, and no records.
    """
    with attach(shared_broker) as local, KafkaConnection(port=shared_broker.port) as tcp:
        producer = RawProducer(local)  # a coordinator's requests go through shared memory too
        producer.init()
        topic, ends = topic_of(local), []
        for committed in (False, True, False):
            assert producer.produce(topic, 0, b"one", b"two") == 0
            ends.append(producer.end(committed))
        assert ends == [0, 0, 0]

        def positions(kafka, offset: int):
            request = msgspec.structs.replace(fetch_request(topic, {0: offset}), max_bytes=0, isolation_level=1)
            (partition,) = kafka.call(FETCH, FETCH_VERSION, request).responses[0].partitions
            return partition

        eventually(lambda: positions(local, 0).last_stable_offset == 9, "the last marker")
        for offset, first_offsets in ((0, [0, 6]), (2, [0, 6]), (3, [6]), (8, [6]), (9, [])):
            response = positions(local, offset)
            assert (
                response.error_code,
                response.high_watermark,
                response.last_stable_offset,
                response.records or b"",
            ) == (0, 9, 9, b"")
            assert [one.first_offset for one in response.aborted_transactions or []] == first_offsets, offset
        assert positions(tcp, 0).records  # over TCP max_bytes 0 means one batch, as in Kafka


def test_clients_cannot_shrink_or_write_the_shared_memory(shared_broker):
    with attach(shared_broker) as local:
        with pytest.raises(OSError):
            os.ftruncate(local.memory_fd, 4096)
        with pytest.raises(OSError):
            os.pwrite(local.control_fd, b"x", 0)
        with pytest.raises(PermissionError):
            mmap.mmap(local.control_fd, 4096)
        local.call(API_VERSIONS, 3)


def test_quotas_hold_through_shared_memory(shared_broker, request):
    """The burst is one megabyte (ten windows of one second); a client that exceeds it gets its
    response and is then not read from until its throttle time is over.
    """
    topic, client_id = topic_name(request.node.name), request.node.name
    rate = AlterClientQuotasRequest.OpData(key="producer_byte_rate", value=100_000.0)
    entry = AlterClientQuotasRequest.EntryData(
        entity=[AlterClientQuotasRequest.EntityData(entity_type="client-id", entity_name=client_id)], ops=[rate]
    )
    with attach(shared_broker, client_id=client_id) as slow, attach(shared_broker) as other:
        create_topic(other, topic, 1)
        assert other.call(49, 1, AlterClientQuotasRequest(entries=[entry])).entries[0].error_code == 0
        throttled_ms = 0
        while not throttled_ms:
            throttled_ms = slow.call(
                PRODUCE, PRODUCE_VERSION, produce_request(topic, {0: batch(bytes(150_000))}, acks=1)
            ).throttle_time_ms
        began = time.monotonic()
        slow.send(API_VERSIONS, 3)
        must_produce(other, topic, 0, b"meanwhile")
        slow.receive()
        assert time.monotonic() - began > throttled_ms / 1000 * 0.8 - 0.1


# -- refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "greeting, reason",
    [
        (hello(version=1), "layout version 1"),
        (hello(abi_hash=1), "different sources"),
        (hello()[:-1], "175 bytes"),
        (hello() + b"x", "177 bytes"),
        (hello()[:16], "16 bytes"),
    ],
)
def test_another_layout_is_refused_with_the_reason(shared_broker, greeting, reason):
    with pytest.raises(Refused, match=reason) as refused:
        LocalConnection(socket_of(shared_broker), greeting=greeting)
    assert refused.value.error == native.E_LAYOUT and "TCP" in str(refused.value)


@pytest.mark.parametrize("greeting", [hello(magic=1), b"x", b"GET / HTTP/1.1\r\n\r\n", bytes(104), bytes(5000)])
def test_a_connection_with_an_unknown_greeting_is_closed(shared_broker, greeting):
    with pytest.raises(ConnectionEnded):
        LocalConnection(socket_of(shared_broker), greeting=greeting)
    with attach(shared_broker) as local:
        local.call(API_VERSIONS, 3)


def test_a_silent_client_delays_no_other(shared_broker):
    path = socket_of(shared_broker)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect(path)) for _ in range(150)]  # more than may wait in the handshake
        with attach(shared_broker) as local:
            local.call(API_VERSIONS, 3)
        silent[0].settimeout(10)
        assert silent[0].recv(1) == b""  # the oldest was closed to admit another


def test_sizes_are_the_brokers_choice(shared_broker):
    with (
        attach(shared_broker, greeting=hello(data_bytes=0, reply_bytes=0, submission_count=0)) as least,
        attach(shared_broker, greeting=hello(data_bytes=3 * MIB + 1, reply_bytes=5000, submission_count=1000)) as odd,
    ):
        assert (least.data_bytes, least.reply_bytes, least.submission_count) == (65536, 4096, 16)
        assert (odd.data_bytes, odd.reply_bytes, odd.submission_count) == (3 * MIB + 4096, 8192, 1024)
        for local in (least, odd):
            local.call(API_VERSIONS, 3)


def test_limits_permissions_and_switching_off(start_broker):
    broker = start_broker(
        config={
            "local.memory.max.bytes": str(24 * MIB),
            "local.attachments.max": "6",
            "local.socket.permissions": "0666",
        }
    )
    path = Path(socket_of(broker))
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 and stat.S_IMODE(path.parent.stat().st_mode) == 0o711
    opened: list[LocalConnection] = []
    try:
        with pytest.raises(Refused, match="local.memory.max.bytes"):
            while True:
                opened.append(attach(broker, greeting=hello(data_bytes=8 * MIB)))
        assert 16 * MIB <= sum(local.total_bytes for local in opened) <= 24 * MIB
        status = broker.status()
        assert sum(worker["local_clients"] for worker in status["workers"]) == len(opened)
        assert sum(worker["local_bytes"] for worker in status["workers"]) == sum(local.total_bytes for local in opened)
        assert status["client_socket"] == str(path)
        for local in opened:
            local.close()
        watch = Watch(broker)
        eventually(lambda: watch.total("local_bytes") == 0, "memory given back")
        opened = [attach(broker, greeting=hello(data_bytes=65536)) for _ in range(6)]
        with pytest.raises(Refused, match="local.attachments.max"):
            opened.append(attach(broker, greeting=hello(data_bytes=65536)))
        assert watch.total("local_refused") == 2 and watch.total("local_attachments") == 6
    finally:
        for local in opened:
            local.close()
    broker.stop()
    assert not path.exists() and rendezvous.find(broker.bootstrap).path is None
    broker.config["local.attachments.max"] = "0"
    broker.start()
    assert (
        not path.exists()
        and rendezvous.find(broker.bootstrap).path is None
        and broker.status()["client_socket"] is None
    )


# -- deaths ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def killed_broker(io_backend, tmp_path_factory) -> Iterator[Broker]:
    """A broker whose processes are killed and restarted."""
    with Broker(tmp_path_factory.mktemp(f"mortal-{io_backend}"), config={"io.backend": io_backend}) as broker:
        yield broker


def _attach_and_fork(pipe, path: str, bootstrap: str, is_ours: bool) -> None:
    """A client, of this package or one that follows no rules, whose forked child inherits
    everything; then it waits to be killed.
    """
    client = Producer({"bootstrap.servers": bootstrap, "transport": "shm"}) if is_ours else LocalConnection(path)
    if is_ours:
        client.list_topics()  # it is attached now
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    pipe.send((os.getpid(), child))
    signal.pause()


@pytest.mark.parametrize("is_ours", [True, False])
def test_memory_of_a_killed_client_is_freed_unless_a_child_keeps_it(killed_broker, is_ours):
    """A child of a client of this package keeps nothing. The memory that a child of another client
    keeps stays on the broker's account until it is released: otherwise clients could take any
    amount of it.
    """
    watch, context = Watch(killed_broker), multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    client = context.Process(
        target=_attach_and_fork, args=(there, socket_of(killed_broker), killed_broker.bootstrap, is_ours)
    )
    client.start()
    pid, child = here.recv()
    try:
        kept_bytes = eventually(lambda: watch.total("local_bytes"), "attached")
        os.kill(pid, signal.SIGKILL)
        client.join()
        eventually(lambda: watch.total("local_attachments") == 0, "the dead client forgotten while its child lives")
        if not is_ours:
            assert watch.total("local_bytes") == kept_bytes
            os.kill(child, signal.SIGKILL)
        eventually(lambda: watch.total("local_bytes") == 0, "memory given back")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def test_deaths_of_the_brokers_processes(killed_broker):
    broker, path = killed_broker, socket_of(killed_broker)
    with one_for_each_worker(broker) as local:
        topic_id = create_topic(local[0], "deaths", 2)
        must_produce(local[0], "deaths", 0, b"first")
        # attachments stay; new clients wait in the keeper's socket meanwhile
        os.kill(broker.pid("mqd-acceptor"), signal.SIGKILL)
        must_produce(local[0], "deaths", 0, b"second")
        with attach(broker) as later:
            must_produce(later, "deaths", 1, b"third")
        victim = local[1].worker
        os.kill(broker.pid(f"mqd-worker-{victim}"), signal.SIGKILL)
        with pytest.raises((ConnectionEnded, TimeoutError)):
            for _ in range(1000):
                local[1].call(API_VERSIONS, 3)
        assert local[1].has_ended() and not local[0].has_ended()
        with attach(broker) as again:  # the other worker, or the replacement of the killed one
            eventually(lambda: _produces(again), "the successor")
        broker.wait_until_ready()
        with one_for_each_worker(broker) as fresh:
            for partition in (0, 1):
                must_produce(fresh[victim], "deaths", partition, b"by the successor")
            assert b"first" in b"".join(read_batches(fresh[0], "deaths", 0))
            response, fd = fresh[victim].send_request(bytes(topic_id), 0, 0)
            assert response["error"] == 0 and fd is not None
            os.close(fd)
        watch = Watch(broker)
        # those of `local` on the surviving worker
        eventually(lambda: watch.total("local_attachments") == 2, "the dead worker's attachments forgotten")
    assert rendezvous.find(broker.bootstrap).path == path


def _produces(kafka: LocalConnection) -> bool:
    try:
        must_produce(kafka, "deaths", 1, b"again")
        return True
    except AssertionError:
        return False  # its owner is being replaced


def test_a_descriptor_that_comes_with_a_packet_is_closed(shared_broker):
    """SCM_RIGHTS to a receiver that does not expect it: closed by the kernel."""
    with attach(shared_broker) as local, open("/dev/null") as file:
        pids = Watch(shared_broker).worker_pids()
        before = [_null_count(pid) for pid in pids]
        topic_id = bytes(16)
        for _ in range(8):
            request = QUERY.pack(1, 1, topic_id, 0, 0, 0)
            socket.send_fds(local.socket, [request], [file.fileno()] * 4)
            assert local.answer()[0]["error"] == 100
        assert [_null_count(pid) for pid in pids] == before


def _null_count(pid: int) -> int:
    """Descriptors of /dev/null: others change at any moment, for example with a checkpoint."""
    found = 0
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(path) == os.devnull
    return found


def test_the_welcome_names_the_process_that_refused():
    assert WELCOME.size == 256 and int.from_bytes(b"MQDLOCL1", "little") == MAGIC
