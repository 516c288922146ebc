"""The C programs of native/examples, built as their page describes and run against a broker: the C
client's API as a C program uses it.
"""

from __future__ import annotations

import collections
import subprocess
import time
from pathlib import Path

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from mqd.native import client as native_client
from tests.broker import Broker
from tests.client_reading import read_all

EXAMPLES = Path(__file__).resolve().parents[3] / "native" / "examples"
PARTITIONS = 3


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = tmp_path_factory.mktemp("examples")
    done = subprocess.run(
        [
            "make",
            "-C",
            EXAMPLES,
            f"BUILD={build}",
            (
                "CFLAGS=-std=gnu11 -D_GNU_SOURCE -O1 -fno-strict-aliasing -ffunction-sections -fdata-sections -Wall"
                " -Werror -pthread -I.."
            ),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return build


@pytest.fixture
def topic(shared_broker: Broker, io_backend: str) -> str:
    name = f"example-{io_backend}-{time.monotonic_ns()}"
    admin = AdminClient({"bootstrap.servers": shared_broker.bootstrap})
    admin.create_topics([NewTopic(name, PARTITIONS, 1)])[name].result(20)
    return name


def _socket(broker: Broker) -> str:
    return str(broker.data_dir / "run" / "client.sock")


def _produce(programs: Path, broker: Broker, topic: str, lines: list[str]) -> str:
    done = subprocess.run(
        [programs / "produce", _socket(broker), topic],
        input="".join(f"{line}\n" for line in lines),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_consumer_prints_records_while_it_waits(programs: Path, shared_broker: Broker, topic: str) -> None:
    lines = [f"line {number}" for number in range(5000)]
    with subprocess.Popen(
        [programs / "consume", _socket(shared_broker), topic, str(len(lines))], stdout=subprocess.PIPE, text=True
    ) as consumer:
        try:
            assert "100 records written" in _produce(programs, shared_broker, topic, lines[:100])
            assert "4900 records written" in _produce(programs, shared_broker, topic, lines[100:])
            printed, _ = consumer.communicate(timeout=60)
        finally:
            consumer.kill()
    assert consumer.returncode == 0
    assert sorted(printed.splitlines()) == sorted(lines)


def test_keys_are_partitioned_as_by_librdkafka(programs: Path, shared_broker: Broker, topic: str) -> None:
    keys = [f"key-{number}" for number in range(200)]
    _produce(programs, shared_broker, topic, [f"{key}\tby C" for key in keys])
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": shared_broker.bootstrap, "partitioner": "consistent_random"}
    )
    for key in keys:
        producer.produce(topic, key=key, value="by librdkafka")
    assert producer.flush(30) == 0
    places: dict[bytes, set[int]] = collections.defaultdict(set)
    for message in read_all(shared_broker, topic, 400):
        places[message.key()].add(message.partition())
    assert len(places) == 200
    assert all(len(partitions) == 1 for partitions in places.values())
    for key, partitions in places.items():
        assert partitions == {native_client.partition_for(native_client.Partitioner.CONSISTENT_RANDOM, key, PARTITIONS)}


def test_wrong_arguments_are_reported(programs: Path, shared_broker: Broker) -> None:
    done = subprocess.run(
        [programs / "produce", "/nowhere/client.sock", "t"], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "check that the broker is running" in done.stderr
    assert subprocess.run([programs / "consume"], capture_output=True).returncode == 2
