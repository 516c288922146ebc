"""The cost of share.fifo for the broker: python -m perf.micro.share_fifo

One member of a share group takes records and accepts each individually, without share.fifo and with it:
CPU microseconds of the workers and of the acceptor for each record. With few keys a member gets no more
records at a time than there are keys, so the cost of a request is shared by fewer records.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import psutil
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from mqd import Producer, ShareConsumer
from perf.brokers import Brokers, Measured


class Cost(NamedTuple):
    worker_us: float
    acceptor_us: float
    polls: int


def _cpu_s(broker: Measured, name: str) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in broker.pids() if name in psutil.Process(pid).cmdline()]
    return sum(one.user + one.system for one in times)


def _configure(broker: Measured, group: str, **config: str) -> None:
    entries = [
        ConfigEntry(name.replace("_", "."), value, incremental_operation=AlterConfigOpType.SET)
        for name, value in config.items()
    ]
    resource = ConfigResource(ResourceType.GROUP, group, incremental_configs=entries)
    admin = AdminClient({"bootstrap.servers": f"127.0.0.1:{broker.port}"})
    admin.incremental_alter_configs([resource])[resource].result(10)


def measure(broker: Measured, name: str, fifo: str, key_count: int, count: int, codec: str) -> Cost:
    topic, servers = broker.topic(name), {"bootstrap.servers": f"127.0.0.1:{broker.port}"}
    _configure(broker, name, share_auto_offset_reset="earliest", share_fifo=fifo)
    producer = Producer({**servers, "compression.type": codec, "queue.buffering.max.messages": 10_000_000})
    for number in range(count):
        producer.produce(topic, b"%0100d" % number, key=b"%d" % (number % key_count))
    producer.flush(60)
    with ShareConsumer(
        {**servers, "group.id": name, "share.acknowledgement.mode": "explicit", "transport": "tcp"}
    ) as consumer:
        consumer.subscribe([topic])
        taken = polls = 0
        begin = worker, acceptor = 0.0, 0.0
        while taken < count:
            messages = consumer.poll(1.0)
            if messages and not taken:  # it has joined
                begin = _cpu_s(broker, "mqd.worker"), _cpu_s(broker, "mqd.acceptor")
            for message in messages:
                consumer.acknowledge(message)
            consumer.commit_async()
            taken += len(messages)
            polls += 1
        consumer.commit_sync()
        worker, acceptor = _cpu_s(broker, "mqd.worker") - begin[0], _cpu_s(broker, "mqd.acceptor") - begin[1]
    return Cost(worker / count * 1e6, acceptor / count * 1e6, polls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=300_000)
    parser.add_argument("--codec", default="none")
    given = parser.parse_args()
    with Brokers() as brokers:
        broker = brokers.get("share-fifo", 1)
        for name, fifo, key_count in (
            ("without", "", 1_000_000),
            ("keys-differ", "key", 1_000_000),
            ("1000-keys", "key", 1_000),
            ("100-keys", "key", 100),
        ):
            cost = measure(broker, name, fifo, key_count, given.records, given.codec)
            print(
                f"{name:12} {cost.worker_us:5.2f} CPU-us a record in the worker,"
                f" {cost.acceptor_us:5.2f} in the acceptor;"
                f" {given.records / cost.polls:,.0f} records a poll",
                flush=True,
            )


if __name__ == "__main__":
    main()
