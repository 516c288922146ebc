"""The delay and cost of schedules: python -m perf.micro.schedules

steady     records that are due a second or two later, at a rate; how late a consumer with
           read_committed gets each (p50, p99), and the timer's CPU microseconds per record
together   records that are all due in the same millisecond; the time until the last is delivered
index      the timer's index alone: microseconds per entry to add and to take, and memory
"""

from __future__ import annotations

import argparse
import random
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from mqd.client import Consumer, Producer, TopicPartition
from mqd.timer.index import Index
from mqd.timer.storage import Directory
from perf.brokers import Brokers, Measured


def _timer_cpu_s(broker: Measured) -> float:
    """CPU time of the broker's process mqd.timer."""
    for parent in {psutil.Process(pid).parent() for pid in broker.pids()}:
        for child in parent.children() if parent is not None else []:
            if "mqd.timer" in child.cmdline():
                times = child.cpu_times()
                return times.user + times.system
    return 0.0


def _consumer(broker: Measured, topic: str) -> Consumer:
    consumer = Consumer(
        {
            "bootstrap.servers": f"127.0.0.1:{broker.port}",
            "group.id": "perf",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    return consumer


def measure_delivery(broker: Measured, name: str, dues: list[int], rate: float | None) -> tuple[np.ndarray, float]:
    """The delay of each record in ms, and CPU seconds of the timer. `dues`: ms from now."""
    target = broker.topic(f"{name}-target")
    schedule = broker.topic(name, **{"schedule.to": target})
    producer = Producer({"bootstrap.servers": f"127.0.0.1:{broker.port}", "queue.buffering.max.messages": 10_000_000})
    consumer = _consumer(broker, target)
    producer.produce(schedule, b"0", partition=0)
    while consumer.consume_batch(1, 1.0) is None:  # the timer runs
        pass
    before, begin = _timer_cpu_s(broker), time.time()
    late: list[np.ndarray] = []

    def take(timeout: float) -> int:
        batch = consumer.consume_batch(65_536, timeout)
        if batch is None:
            return 0
        at = time.time() * 1000
        late.append(at - np.array([float(value) for value in batch.values.to_list()]))
        return len(batch)

    taken = 0
    for number, due in enumerate(dues):
        if rate and number % 100 == 0:
            while time.time() < begin + number / rate:
                taken += take(0.001)
        at = int((time.time() if rate else begin) * 1000) + due
        while True:
            try:
                producer.produce(schedule, b"%d" % at, partition=0, headers=[("mqd-deliver-at", b"%d" % at)])
                break
            except BufferError:
                producer.poll(0.01)
    producer.flush(60)
    while taken < len(dues):
        taken += take(10.0)
    return np.concatenate(late), _timer_cpu_s(broker) - before


def index(count: int, parent: Path) -> None:
    rng = random.Random(1)
    begin_ms, month_ms = 1_800_000_000_000, 30 * 86_400_000
    with tempfile.TemporaryDirectory(dir=parent) as directory:
        made = Index(Directory(Path(directory)))
        made.take(begin_ms, 1)
        dues = [begin_ms + int(rng.random() * month_ms) for _ in range(count)]
        base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        cpu = time.process_time()
        for offset, due in enumerate(dues):
            made.add(due, offset)
        made.save(count)
        added = time.process_time() - cpu
        cpu, taken, now_ms = time.process_time(), 0, begin_ms
        while taken < count // 10:
            now_ms += 60_000
            while some := made.take(now_ms, 8192):
                taken += len(some)
        took = time.process_time() - cpu
        more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) / 1024
    print(
        f"index of {count:,}: added {added / count * 1e6:.2f} us, taken {took / taken * 1e6:.2f} us each, {more:.0f} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=20_000)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--together", type=int, default=500_000)
    parser.add_argument("--entries", type=int, default=3_000_000)
    given = parser.parse_args()
    rng = random.Random(1)
    with Brokers() as brokers:
        broker = brokers.get("schedules", 1)
        count = int(given.rate * given.seconds)
        late, cpu_s = measure_delivery(broker, "steady", [1000 + rng.randrange(1000) for _ in range(count)], given.rate)
        p50, p99 = np.percentile(late, [50, 99])
        print(
            f"steady, {given.rate:,.0f}/s: p50 {p50:.0f} ms, p99 {p99:.0f} ms late, earliest {late.min():.1f} ms;"
            f" {cpu_s / count * 1e6:.1f} CPU-us a record"
        )
        wait_ms = 5_000 + given.together // 20
        late, cpu_s = measure_delivery(broker, "together", [wait_ms] * given.together, None)
        print(
            f"together, {given.together:,}: the last {late.max() / 1000:.2f} s late, earliest {late.min():.1f} ms;"
            f" {cpu_s / given.together * 1e6:.1f} CPU-us a record"
        )
    index(given.entries, Path(tempfile.gettempdir()))


if __name__ == "__main__":
    main()
