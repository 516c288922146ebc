"""Load by the Python client, through shared memory or TCP: one command for each run, one line of JSON.
It is a process of its own, so that it can be pinned and its CPU time measured separately.

    python -m perf.local_load produce_batch  transport=shm bootstrap=127.0.0.1:9092 topic=t
                                             record=100 count=1000000 [form=array|list]
                                             [chunk=10000] [batch=65536] [acks=1]
    python -m perf.local_load produce        transport=... bootstrap topic record count [batch acks
                                             linger_ms]
    python -m perf.local_load consume_batch  transport=... bootstrap topic record count
                                             [chunk=65536]
    python -m perf.local_load consume        transport=... bootstrap topic record count [chunk=1000]
                                             lists of messages; each one's value is taken
    python -m perf.local_load poll           transport=... bootstrap topic record count
                                             one message a call
    python -m perf.local_load round_trip     transport=... bootstrap topic record count
                                             produce, then flush: microseconds of each
    python -m perf.local_load idle           transport=... bootstrap topic seconds
                                             caught up: prints `ready`, waits in poll, prints its own
                                             CPU time
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy

from mqd import Consumer, Producer, TopicPartition

TIME_LIMIT_S = 60.0


class _Arguments(dict[str, str]):
    def number(self, name: str, otherwise: int | None = None) -> int:
        if name not in self and otherwise is None:
            raise SystemExit(f"{name}= is missing")
        return int(self.get(name, otherwise))


def _client(arguments: _Arguments, **more: Any) -> dict[str, Any]:
    config: dict[str, Any] = {"bootstrap.servers": arguments["bootstrap"], "transport": arguments["transport"], **more}
    if arguments["transport"] == "shm":
        config["mqd.spin.us"] = arguments.number("spin", 50)
        if "data" in arguments:
            config["mqd.buffer.bytes"] = arguments.number("data")
    return config


def _producer(arguments: _Arguments) -> Producer:
    return Producer(
        _client(
            arguments,
            acks=arguments.number("acks", 1),
            **{
                "batch.size": arguments.number("batch", 65536),
                "linger.ms": arguments.number("linger_ms", 1),
                "queue.buffering.max.messages": 2_000_000,
                "queue.buffering.max.kbytes": 1 << 20,
                "batch.num.messages": 100_000,
            },
        )
    )


def _values(record: int, count: int) -> numpy.ndarray:
    """Letters, neither all equal nor random: uint8[count, record]."""
    return (
        (numpy.arange(record * count, dtype=numpy.uint64) * 2654435761 // 128 % 26 + 65)
        .astype(numpy.uint8)
        .reshape(count, record)
    )


def _check_acknowledged(left: int) -> None:
    if left:
        raise SystemExit(f"{left} records were not acknowledged within {TIME_LIMIT_S:.0f} s")


class _Reports:
    """Counts acknowledged records, so that records that were lost are not counted."""

    def __init__(self) -> None:
        self.records = 0

    def batch(self, error: Any, delivery: Any) -> None:
        if error is not None:
            raise SystemExit(f"a batch failed: {error}")
        self.records += delivery.count

    def one(self, error: Any, _message: Any) -> None:
        if error is not None:
            raise SystemExit(f"a record failed: {error}")
        self.records += 1


def produce_batch(arguments: _Arguments) -> dict[str, Any]:
    record, count, chunk = arguments.number("record"), arguments.number("count"), arguments.number("chunk", 10_000)
    values: Any = _values(record, chunk)
    if arguments.get("form", "array") == "list":
        values = [bytes(row) for row in values]
    producer = _producer(arguments)
    producer.produce_batch(arguments["topic"], values, partition=0)
    _check_acknowledged(producer.flush(TIME_LIMIT_S))
    began, cpu, sent = time.perf_counter(), time.process_time(), 0
    while sent < count:
        sent += producer.produce_batch(arguments["topic"], values, partition=0)
    _check_acknowledged(producer.flush(TIME_LIMIT_S))
    return {
        "count": sent,
        "seconds": time.perf_counter() - began,
        "client_cpu_seconds": time.process_time() - cpu,
        "transport": producer.transport,
    }


def produce(arguments: _Arguments) -> dict[str, Any]:
    record, count, topic = arguments.number("record"), arguments.number("count"), arguments["topic"]
    values = [bytes(row) for row in _values(record, 1000)]
    producer = _producer(arguments)
    producer.produce(topic, values[0], partition=0)
    _check_acknowledged(producer.flush(TIME_LIMIT_S))
    put, poll = producer.produce, producer.poll
    began, cpu, sent = time.perf_counter(), time.process_time(), 0
    while sent < count:
        try:
            for value in values:
                put(topic, value, None, 0)
                sent += 1
        except BufferError:
            poll(0.01)
        poll(0)
    _check_acknowledged(producer.flush(TIME_LIMIT_S))
    return {
        "count": sent,
        "seconds": time.perf_counter() - began,
        "client_cpu_seconds": time.process_time() - cpu,
        "transport": producer.transport,
    }


def _consumer(arguments: _Arguments) -> Consumer:
    consumer = Consumer(
        _client(
            arguments,
            **{
                "group.id": f"perf-{time.time_ns()}",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "fetch.message.max.bytes": 8 << 20,
                "fetch.max.bytes": 52428800,
                "queued.max.messages.kbytes": 1 << 18,
            },
        )
    )
    consumer.assign([TopicPartition(arguments["topic"], 0, arguments.number("offset", 0))])
    return consumer


def _measure_consumer(arguments: _Arguments, take: Callable[[Consumer], tuple[int, int]]) -> dict[str, Any]:
    """`take` returns (records, bytes of their values). The first call, which includes attaching, does
    not count.
    """
    record, count = arguments.number("record"), arguments.number("count")
    consumer = _consumer(arguments)
    first, size = take(consumer)
    began, cpu, seen = time.perf_counter(), time.process_time(), first
    while seen < count and time.perf_counter() - began < TIME_LIMIT_S:
        records, more = take(consumer)
        seen += records
        size += more
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    if seen < count or size != seen * record:
        raise SystemExit(f"{seen} records of {size} bytes instead of {count} of {record} each")
    found = {"count": seen - first, "seconds": seconds, "client_cpu_seconds": cpu, "transport": consumer.transport}
    consumer.close()
    return found


def consume_batch(arguments: _Arguments) -> dict[str, Any]:
    chunk = arguments.number("chunk", 65536)

    def take(consumer: Consumer) -> tuple[int, int]:
        batch = consumer.consume_batch(chunk, 5)
        if batch is None:
            raise SystemExit("no record arrived for 5 s")
        return len(batch), int(batch.values.sizes.sum())

    return _measure_consumer(arguments, take)


def consume(arguments: _Arguments) -> dict[str, Any]:
    chunk = arguments.number("chunk", 1000)

    def take(consumer: Consumer) -> tuple[int, int]:
        messages = consumer.consume(chunk, 5)
        return len(messages), sum([len(message.value()) for message in messages])

    return _measure_consumer(arguments, take)


def poll(arguments: _Arguments) -> dict[str, Any]:
    def take(consumer: Consumer) -> tuple[int, int]:
        message = consumer.poll(5)
        if message is None or message.error() is not None:
            raise SystemExit(f"no message: {message and message.error()}")
        return 1, len(message.value())

    return _measure_consumer(arguments, take)


def round_trip(arguments: _Arguments) -> dict[str, Any]:
    record, count, topic = arguments.number("record"), arguments.number("count"), arguments["topic"]
    producer = Producer(_client(arguments, acks=1, **{"linger.ms": 0}))
    value, took = bytes(_values(record, 1)[0]), []
    for number in range(count + count // 10 + 1):
        began = time.perf_counter_ns()
        producer.produce(topic, value, None, 0)
        _check_acknowledged(producer.flush(TIME_LIMIT_S))
        if number > count // 10:
            took.append((time.perf_counter_ns() - began) / 1e3)
    p50, p99 = numpy.quantile(took, [0.5, 0.99])
    return {"count": len(took), "p50_us": float(p50), "p99_us": float(p99), "transport": producer.transport}


def idle(arguments: _Arguments) -> dict[str, Any]:
    consumer = _consumer(arguments)
    while consumer.poll(0.5) is not None:  # until caught up
        continue
    print("ready", flush=True)
    began, cpu = time.perf_counter(), time.process_time()
    message = consumer.poll(float(arguments["seconds"]))
    spent, seconds = time.process_time() - cpu, time.perf_counter() - began
    if message is not None:
        raise SystemExit("a record arrived, but none was expected")
    return {"seconds": seconds, "client_cpu_seconds": spent, "transport": consumer.transport}


WORK: dict[str, Callable[[_Arguments], dict[str, Any]]] = {
    "produce_batch": produce_batch,
    "produce": produce,
    "consume_batch": consume_batch,
    "consume": consume,
    "poll": poll,
    "round_trip": round_trip,
    "idle": idle,
}


def main(words: list[str]) -> None:
    if not words or words[0] not in WORK:
        raise SystemExit(f"one of {', '.join(WORK)}, then NAME=VALUE")
    print(json.dumps(WORK[words[0]](_Arguments(word.split("=", 1) for word in words[1:]))))


if __name__ == "__main__":
    main(sys.argv[1:])
