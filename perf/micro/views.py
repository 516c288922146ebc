"""The cost of reading a view for the broker, compared with a full read of its base: python -m perf.micro.views

CPU microseconds of the workers for each record of the base, and for each MiB of it, with views that
select 1 %, half and none of it, in batches of some 100 records.
"""

from __future__ import annotations

import argparse

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from perf.accounting import cpu_time
from perf.brokers import Brokers, Measured

VIEWS = {"1 %": "tag = '0'", "half": "tag LIKE '1%' OR tag LIKE '2%' OR tag IN ('30', '31')", "nothing": "tag = 'x'"}
TAGS = 100


def _fill(broker: Measured, topic: str, count: int, size_bytes: int, codec: str) -> None:
    producer = Producer(
        {
            "bootstrap.servers": f"127.0.0.1:{broker.port}",
            "batch.num.messages": 100,
            "compression.type": codec,
            "queue.buffering.max.messages": 10_000_000,
            "queue.buffering.max.kbytes": 2_000_000,
        }
    )
    for number in range(count):
        producer.produce(topic, b"v" * size_bytes, headers={"tag": str(number % TAGS)}, partition=0)
    producer.flush(120)


def read(broker: Measured, topic: str) -> tuple[int, float]:
    """(records, CPU seconds of the workers) of one read to the end."""
    consumer = Consumer(
        {"bootstrap.servers": f"127.0.0.1:{broker.port}", "group.id": "perf", "enable.partition.eof": True}
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    before, count = cpu_time(broker.worker_pids), 0
    while True:
        messages = consumer.consume(10_000, 1)
        count += sum(message.error() is None for message in messages)
        if messages and messages[-1].error() is not None:
            break
    spent = cpu_time(broker.worker_pids) - before
    consumer.close()
    return count, spent.run_ns / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=2_000_000)
    parser.add_argument("--bytes", type=int, default=200)
    parser.add_argument("--codec", default="none")
    given = parser.parse_args()
    with Brokers() as brokers:
        broker = brokers.get("views", 1)
        base = broker.topic("base")
        _fill(broker, base, given.records, given.bytes, given.codec)
        admin = AdminClient({"bootstrap.servers": f"127.0.0.1:{broker.port}"})
        topics = {"the base": base}
        for number, (name, condition) in enumerate(VIEWS.items()):
            topics[name] = f"view-{number}"
            created = NewTopic(topics[name], -1, config={"view.of": base, "view.filter": condition})
            admin.create_topics([created])[topics[name]].result(30)
        for _ in range(2):
            for name, topic in topics.items():
                count, seconds = read(broker, topic)
                print(
                    f"{name:9} {count:9,} records {1e9 * seconds / given.records:7.1f} CPU-ns a record of the base"
                    f" {1e6 * seconds / (given.records * given.bytes / 2**20):7.1f} CPU-us a MiB",
                    flush=True,
                )


if __name__ == "__main__":
    main()
