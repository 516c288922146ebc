"""The pipelines archive and replay, as `mqd pipeline run` starts them: topics into Parquet (zstd),
and back into a fresh topic.

Bytes are those of keys and values, uncompressed. Records are typical JSON: short ones, and of about
1 KB. CPU is that of the JVM and its Python workers; MB/s/core is MB for each of these CPU seconds.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from perf.spark.reading import cpu_seconds, create

SIZES = {0: 4_800_000, 780: 1_200_000}
"""Bytes of text in each record: how many records."""
MB = 1e6


def archive_and_replay(
    session: Any, bootstrap: str, place: Path, partitions: int, broker: Callable[[], float]
) -> Iterator[str]:
    from mqd.spark.pipelines.running import run, start
    from mqd.spark.pipelines.session import default_configuration
    from mqd.spark.pipelines.settings import parse_settings

    for key, value in default_configuration("local[2]").items():
        if key.startswith("spark.sql.execution."):
            session.conf.set(key, value)
    for text_bytes, count in SIZES.items():
        topic = f"perf-spark-archive-{text_bytes}"
        back = f"{topic}-back"
        for name in (topic, back):
            create(bootstrap, name, partitions)
        megabytes = _fill(bootstrap, topic, text_bytes, count, partitions) / MB
        size = f"{round(1e6 * megabytes / count)} B"
        for turn in range(2):  # the first one warms the JVM up
            path = str(place / f"archive-{text_bytes}-{turn}")
            common = {"name": f"{topic}-{turn}", "bootstrap": bootstrap, "path": path}
            archive = parse_settings(
                {
                    "pipeline": "archive",
                    "trigger": "available-now",
                    "checkpoint": f"{path}-checkpoint",
                    "source": {"topics": [topic]},
                    **common,
                },
                "perf",
            )
            took, cpu, broker_cpu_s = _measure(
                lambda archive=archive: start(session, archive).awaitTermination(), broker
            )
        yield (
            _line(f"archive, {size}", megabytes, took, cpu, broker_cpu_s)
            + f"   {sum(file.stat().st_size for file in Path(path).rglob('*.parquet')) / MB:.0f} MB of Parquet"
        )
        replay = parse_settings({"pipeline": "replay", "to": {topic: back}, **common}, "perf")
        for _ in range(2):
            took, cpu, broker_cpu_s = _measure(
                lambda replay=replay: run(session, replay, lambda _reported: None, None), broker
            )
        yield _line(f"replay, {size}", megabytes, took, cpu, broker_cpu_s)


def _measure(work: Callable[[], object], broker: Callable[[], float]) -> tuple[float, float, float]:
    broker_cpu_s, cpu, began = broker(), cpu_seconds(os.getpid()), time.perf_counter()
    work()
    return time.perf_counter() - began, cpu_seconds(os.getpid()) - cpu, broker() - broker_cpu_s


def _line(name: str, megabytes: float, wall_s: float, cpu_s: float, broker_cpu_s: float) -> str:
    return (
        f"{name:<28} {megabytes / wall_s:7.0f} MB/s   {megabytes / cpu_s:6.0f} MB/s/core   broker {broker_cpu_s:.1f}"
        f" CPU-s   {megabytes:.0f} MB"
    )


def _fill(bootstrap: str, topic: str, text_bytes: int, count: int, partitions: int) -> int:
    """Produces the records. Returns the bytes of keys and values."""
    from mqd import Producer

    chance = random.Random(1)
    words = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randint(3, 9))) for _ in range(5000)]
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 20, "queue.buffering.max.messages": 200_000})
    total = 0
    chunks = [
        [_value(chance, words, number, text_bytes) for number in range(start, start + 10_000)]
        for start in range(0, 200_000, 10_000)
    ]
    for start in range(0, count, 10_000):
        values = chunks[start // 10_000 % len(chunks)]
        keys = [b"%010d" % number for number in range(start, start + 10_000)]
        producer.produce_batch(topic, values, keys, partition=start // 10_000 % partitions)
        total += sum(map(len, values)) + sum(map(len, keys))
    if producer.flush(600):
        raise RuntimeError("the records could not be produced in ten minutes")
    producer.close()
    return total


def _value(chance: random.Random, words: list[str], number: int, text_bytes: int) -> bytes:
    event = {
        "id": number,
        "user": f"u{chance.randrange(100_000):06}",
        "session": f"{chance.getrandbits(64):016x}",
        "event": chance.choice(("view", "click", "add_to_cart", "purchase")),
        "at": 1_700_000_000_000 + 37 * number,
        "page": f"/{chance.choice(words)}/{chance.choice(words)}",
        "price": round(chance.uniform(1, 500), 2),
        "country": chance.choice(("de", "fr", "us", "jp")),
    }
    if text_bytes:
        event["text"] = " ".join(chance.choices(words, k=text_bytes // 7))
    return json.dumps(event).encode()
