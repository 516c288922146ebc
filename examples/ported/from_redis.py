"""A group that counts page views, written for Redis Streams and redis-py. Records that a member has not
acknowledged are delivered to another member.

    mqd topic create views -p 1 -c retention.bytes=100000000
    mqd config set group/counters share.auto.offset.reset=earliest share.record.lock.duration.ms=15000

    python from_redis.py 127.0.0.1:9092
"""

import collections
import sys

from mqd import Producer, ShareConsumer


def add(bootstrap: str, count: int) -> None:
    producer = Producer({"bootstrap.servers": bootstrap})
    for number in range(count):
        # xadd("views", {"page": ...}, maxlen=100_000); the fields are headers, or JSON in the value
        producer.produce("views", b"", headers={"page": f"/{number % 3}"})
    if producer.flush():
        sys.exit("not added")


def member(bootstrap: str) -> ShareConsumer:
    # xgroup_create("views", "counters", id="0", mkstream=True): share.auto.offset.reset above
    settings = {"bootstrap.servers": bootstrap, "group.id": "counters", "share.acknowledgement.mode": "explicit"}
    consumer = ShareConsumer(settings)
    consumer.subscribe(["views"])
    return consumer


def count_views(consumer: ShareConsumer, count: int) -> collections.Counter[str]:
    found: collections.Counter[str] = collections.Counter()
    while found.total() < count:
        # xreadgroup("counters", NAME, {"views": ">"}, count=10, block=2000); xautoclaim() is not
        # needed: unacknowledged records of another member are delivered, with delivery_count() 2
        for message in consumer.consume(10, timeout=2.0):
            found[dict(message.headers())["page"].decode()] += 1
            consumer.acknowledge(message)  # xack("views", "counters", id)
        consumer.commit_sync()
    return found


if __name__ == "__main__":
    add(sys.argv[1], 30)
    dead = member(sys.argv[1])
    while not (taken := dead.consume(10, timeout=2.0)):
        pass
    del dead  # without an acknowledgement; the lock expires after 15 s
    print(f"{len(taken)} records taken and not acknowledged")
    with member(sys.argv[1]) as consumer:
        for page, views in sorted(count_views(consumer, 30).items()):
            print(page, views)
