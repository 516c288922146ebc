"""Consumers over shared memory when processes of the broker die: nothing is lost or duplicated, and
the group continues. Also AsyncConsumer on both transports.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator

import confluent_kafka
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from mqd import AsyncConsumer, Consumer
from tests.broker import Broker

SECONDS = 60.0
QUICK_GROUPS = {
    "group.consumer.min.heartbeat.interval.ms": "100",
    "group.consumer.heartbeat.interval.ms": "200",
    "group.initial.rebalance.delay.ms": "0",
}


def make_topic(broker: Broker, partitions: int) -> str:
    name = f"t{uuid.uuid4().hex[:12]}"
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.create_topics([NewTopic(name, partitions)])[name].result(SECONDS)
    return name


def local(broker: Broker, group: str, **config: object) -> Consumer:
    """It commits automatically when partitions are revoked and when it closes."""
    settings = {
        "bootstrap.servers": broker.bootstrap,
        "group.id": group,
        "auto.offset.reset": "earliest",
        "transport": "shm",
        # not in between: commit() does not return what an automatic commit has committed meanwhile
        "auto.commit.interval.ms": 600_000,
    }
    return Consumer({**settings, **{name.replace("_", "."): value for name, value in config.items()}})


def produce(broker: Broker, topic: str, numbers: range, partitions: int = 4) -> None:
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": broker.bootstrap, "enable.idempotence": True, "linger.ms": 1, "log_level": 0}
    )
    for number in numbers:
        producer.produce(topic, b"%d" % number, partition=number % partitions)
    assert producer.flush(SECONDS) == 0


def read(consumers: list[Consumer], found: list[tuple[int, int, bytes]], count: int) -> None:
    """Polls until `count` records have arrived; skips and returns errors."""
    deadline = time.monotonic() + SECONDS
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} records"
        for consumer in consumers:
            for message in consumer.consume(100, 0.05):
                if message.error() is None:
                    found.append((message.partition(), message.offset(), message.value()))


@pytest.mark.parametrize(("role", "io_backend"), [("worker", "io_uring"), ("acceptor", "epoll")])
def test_a_process_dies_while_a_group_reads(start_broker: Callable[..., Broker], role: str, io_backend: str) -> None:
    broker = start_broker(workers=2, config={**QUICK_GROUPS, "io.backend": io_backend})
    topic = make_topic(broker, 4)
    members = [local(broker, "g") for _ in range(2)]
    for member in members:
        member.subscribe([topic])
    found: list[tuple[int, int, bytes]] = []
    produce(broker, topic, range(1000))
    read(members, found, 1000)
    for pid in broker.pids(role):
        os.kill(pid, signal.SIGKILL)
    produce(broker, topic, range(1000, 2000))
    read(members, found, 2000)
    # A consumer that restarted after partitions moved may have read some records twice: compare
    # values as a set, and order within each partition.
    assert {value for _, _, value in found} == {b"%d" % number for number in range(2000)}
    for partition in range(4):
        offsets = [offset for index, offset, _ in found if index == partition]
        assert offsets == sorted(set(offsets)), "a record twice, or out of order"
    assert (
        sum(one.offset for one in members[0].commit(asynchronous=False) + members[1].commit(asynchronous=False)) == 2000
    )
    for member in members:
        member.close()


def test_the_broker_is_killed_and_starts_again(start_broker: Callable[..., Broker]) -> None:
    broker = start_broker(workers=1, config=QUICK_GROUPS)
    topic = make_topic(broker, 2)
    produce(broker, topic, range(100), 2)
    consumer = local(broker, "g")
    consumer.subscribe([topic])
    found: list[tuple[int, int, bytes]] = []
    read([consumer], found, 100)
    consumer.commit(asynchronous=False)
    broker.kill_all()
    assert consumer.poll(0.1) is None
    broker.start()
    produce(broker, topic, range(100, 200), 2)
    read([consumer], found, 200)
    assert sorted(int(value) for _, _, value in found) == list(range(200))
    consumer.close()


def test_a_child_of_fork_has_no_consumer(shared_broker: Broker) -> None:
    topic = make_topic(shared_broker, 1)
    produce(shared_broker, topic, range(10), 1)
    consumer = local(shared_broker, uuid.uuid4().hex)
    consumer.assign([TopicPartition(topic, 0, 0)])
    first = consumer.poll(SECONDS)
    assert first is not None and first.error() is None, first and first.error()
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            try:
                consumer.seek(TopicPartition(topic, 0, 0))
                consumer.poll(1)
            except confluent_kafka.KafkaException:
                code = 0
        os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert [consumer.poll(SECONDS).value() for _ in range(9)] == [b"%d" % number for number in range(1, 10)]
    consumer.close()


# -- members that come and go ----------------------------------------------------------------------


def test_members_come_and_go_while_records_arrive(shared_broker: Broker) -> None:
    """With automatic commits and members that leave cleanly: every record once, however often its
    partition moves.
    """
    count, partitions = 12_000, 8
    topic = make_topic(shared_broker, partitions)
    seen: collections.Counter[tuple[int, int]] = collections.Counter()
    errors: list = []
    lock, stop = threading.Lock(), threading.Event()

    def member(seed: int) -> None:
        rng = random.Random(seed)
        while not stop.is_set():
            with local(
                shared_broker,
                "g-" + topic,
                group_protocol=rng.choice(("classic", "consumer")),
                auto_commit_interval_ms=200,
            ) as consumer:
                consumer.subscribe([topic])
                end = time.monotonic() + rng.uniform(0.2, 0.8)
                while time.monotonic() < end and not stop.is_set():
                    if rng.random() < 0.7:
                        messages = consumer.consume(rng.choice((1, 10, 300)), 0.05)
                        errors.extend(message.error() for message in messages if message.error() is not None)
                        found = [
                            (message.partition(), message.offset()) for message in messages if message.error() is None
                        ]
                    else:
                        batch = consumer.consume_batch(rng.choice((3, 300)), 0.05)
                        found = (
                            [] if batch is None else [(batch.partition, offset) for offset in batch.offsets.tolist()]
                        )
                    with lock:
                        seen.update(found)

    members = [threading.Thread(target=member, args=(seed,)) for seed in range(4)]
    for thread in members:
        thread.start()
    producer = confluent_kafka.Producer({"bootstrap.servers": shared_broker.bootstrap, "linger.ms": 1})
    for number in range(count):
        producer.produce(topic, b"x", partition=number % partitions)
        if number % 100 == 0:
            producer.flush(SECONDS)
    producer.flush(SECONDS)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and len(seen) < count:
        time.sleep(0.05)  # other threads read
    stop.set()
    for thread in members:
        thread.join()
    assert len(seen) == count and set(seen.values()) == {1} and not errors


@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
def test_a_group_of_the_classic_protocol(classic_broker: Broker, strategy: str) -> None:
    """The broker admits no member of the newer protocol to this group: members over shared memory
    use the classic protocol, led by librdkafka or leading it.
    """
    topic = make_topic(classic_broker, 6)
    more = {
        "session_timeout_ms": 10_000,
        "heartbeat_interval_ms": 200,
        "partition_assignment_strategy": strategy,
        "enable_auto_commit": False,
    }
    remote = local(classic_broker, "g-" + topic, transport="tcp", **more)
    remote.subscribe([topic])
    found: list[tuple[int, int, bytes]] = []
    produce(classic_broker, topic, range(60), 6)
    read([remote], found, 60)
    remote.commit(asynchronous=False)
    members = [remote, local(classic_broker, "g-" + topic, **more), local(classic_broker, "g-" + topic, **more)]
    for member in members[1:]:
        member.subscribe([topic])
    settle(members, [2, 2, 2])
    produce(classic_broker, topic, range(60, 120), 6)
    read(members, found, 120)
    assert sorted(int(value) for _, _, value in found) == list(range(120))
    assert sum(one.offset for member in members[1:] for one in member.commit(asynchronous=False)) == 80
    remote.commit(asynchronous=False)
    members.pop(0).close()
    settle(members, [3, 3])
    members.pop(0).close()
    settle(members, [6])
    members[0].close()


def settle(members: list[Consumer], sizes: list[int]) -> None:
    deadline = time.monotonic() + SECONDS
    while sorted(len(member.assignment()) for member in members) != sizes:
        assert time.monotonic() < deadline, [member.assignment() for member in members]
        for member in members:
            message = member.poll(0.02)
            assert message is None, message.error() or message


@pytest.fixture(scope="module")
def classic_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(
        tmp_path_factory.mktemp("classic"),
        workers=1,
        config={"group.consumer.migration.policy": "disabled", "group.initial.rebalance.delay.ms": "0"},
    ) as broker:
        yield broker


# -- asyncio ---------------------------------------------------------------------------------------


def asynchronous(broker: Broker, transport: str, group: str | None = None, **config: object) -> AsyncConsumer:
    settings = {
        "bootstrap.servers": broker.bootstrap,
        "group.id": group or uuid.uuid4().hex,
        "auto.offset.reset": "earliest",
        "transport": transport,
    }
    return AsyncConsumer({**settings, **{name.replace("_", "."): value for name, value in config.items()}})


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_asyncio(shared_broker: Broker, transport: str) -> None:
    topic = make_topic(shared_broker, 2)
    produce(shared_broker, topic, range(500), 2)

    async def run() -> None:
        assigned: list = []

        async def on_assign(consumer: AsyncConsumer, partitions: list[TopicPartition]) -> None:
            await asyncio.sleep(0)
            assigned.extend(partitions)

        async with asynchronous(shared_broker, transport, "a-" + topic, enable_auto_commit=False) as consumer:
            assert consumer.transport == transport
            await consumer.subscribe([topic], on_assign=on_assign)
            found = [message.value() async for message in _first(consumer, 300)]
            while len(found) < 500:
                found += [message.value() for message in await consumer.getmany(50, SECONDS)]
            assert sorted(found, key=int) == [b"%d" % number for number in range(500)] and len(assigned) == 2
            # a cancelled wait loses no record and does not block the next
            waiting = asyncio.create_task(consumer.getone())
            await asyncio.sleep(0.05)
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting
            committed = await asyncio.wait_for(consumer.commit(), SECONDS)
            assert sum(one.offset for one in committed) == 500
            assert await consumer.poll(0.05) is None
            await asyncio.to_thread(produce, shared_broker, topic, range(500, 502), 2)
            assert {(await consumer.getone()).value() for _ in range(2)} == {b"500", b"501"}

    asyncio.run(asyncio.wait_for(run(), SECONDS))


async def _first(consumer: AsyncConsumer, count: int):
    async for message in consumer:
        yield message
        count -= 1
        if not count:
            return


PROGRAM_LEFT_OPEN = """
import asyncio, sys
from mqd import AsyncConsumer

async def main():
    consumer = AsyncConsumer({"bootstrap.servers": sys.argv[1], "group.id": sys.argv[2], "auto.offset.reset": "earliest", "transport": sys.argv[3]})
    await consumer.subscribe([sys.argv[2]])
    async for message in consumer:
        break
    async with asyncio.timeout(0.2):
        async for message in consumer:
            pass

try:
    asyncio.run(main())
except TimeoutError:
    print("main has ended")
"""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_program_that_leaves_its_consumer_open_ends(shared_broker: Broker, transport: str) -> None:
    topic = make_topic(shared_broker, 1)
    produce(shared_broker, topic, range(1), 1)
    command = [sys.executable, "-c", PROGRAM_LEFT_OPEN, shared_broker.bootstrap, topic, transport]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "main has ended\n", "")
