"""An application as users write it for confluent_kafka: orders are produced, billed in a
transaction, and read back. Its argument is the library to import:

    python example_app.py confluent_kafka BOOTSTRAP
    python example_app.py mqd BOOTSTRAP [shm | tcp]

Ends with 0 and prints its results as a line of JSON. It depends on nothing of mqd but the name to
import.
"""

import importlib
import json
import sys
import time

library = importlib.import_module(sys.argv[1])  # "import confluent_kafka", except for this
Producer, Consumer, KafkaError, KafkaException, TopicPartition = (
    library.Producer,
    library.Consumer,
    library.KafkaError,
    library.KafkaException,
    library.TopicPartition,
)

BOOTSTRAP = sys.argv[2]
COMMON = {"bootstrap.servers": BOOTSTRAP, **({"transport": sys.argv[3]} if len(sys.argv) > 3 else {})}
NAME = f"{sys.argv[1]}-{(sys.argv[3:] or ['x'])[0]}"
ORDERS, BILLS = f"orders-{NAME}", f"bills-{NAME}"
COUNT = 500

delivered = []


def on_delivery(error, message):
    if error is not None:
        raise KafkaException(error)
    delivered.append((message.topic(), message.partition(), message.offset()))


def place_orders():
    producer = Producer(
        {**COMMON, "client.id": "shop", "enable.idempotence": True, "linger.ms": 5, "compression.type": "lz4"}
    )
    for number in range(COUNT):
        value = json.dumps({"order": number, "amount": number * 1.5})
        while True:
            try:
                producer.produce(
                    ORDERS,
                    value=value,
                    key=f"customer-{number % 20}",
                    headers={"source": "shop"},
                    on_delivery=on_delivery,
                )
                break
            except BufferError:
                producer.poll(0.1)
        producer.poll(0)
    if producer.flush(30) != 0:
        raise SystemExit("orders were not delivered")
    assert len(delivered) == COUNT and len(producer) == 0


def bill_orders():
    """Consume, transform, produce: exactly once. The first attempt at a batch is aborted on
    purpose.
    """
    assigned = []
    consumer = Consumer(
        {**COMMON, "group.id": f"billing-{NAME}", "auto.offset.reset": "earliest", "enable.auto.commit": False}
    )
    consumer.subscribe([ORDERS], on_assign=lambda _consumer, partitions: assigned.extend(partitions))
    producer = Producer({**COMMON, "transactional.id": f"billing-{NAME}"})
    producer.init_transactions(30)
    billed, aborted, deadline = 0, False, time.time() + 60
    while billed < COUNT and time.time() < deadline:
        messages = [message for message in consumer.consume(100, timeout=1.0)]
        for message in messages:
            if message.error() is not None and message.error().code() != KafkaError._PARTITION_EOF:
                raise KafkaException(message.error())
        messages = [message for message in messages if message.error() is None]
        if not messages:
            continue
        producer.begin_transaction()
        for message in messages:
            order = json.loads(message.value())
            assert dict(message.headers())["source"] == b"shop"
            producer.produce(
                BILLS, key=message.key(), value=json.dumps({"bill": order["order"], "total": order["amount"] * 1.19})
            )
        if not aborted:
            aborted = True
            producer.abort_transaction(30)
            first = {}
            for message in messages:
                place = (message.topic(), message.partition())
                first[place] = min(first.get(place, message.offset()), message.offset())
            for (topic, partition), offset in first.items():
                consumer.seek(TopicPartition(topic, partition, offset))
            continue
        producer.send_offsets_to_transaction(
            consumer.position(consumer.assignment()), consumer.consumer_group_metadata()
        )
        producer.commit_transaction(30)
        billed += len(messages)
    committed = {one.partition: one.offset for one in consumer.committed(consumer.assignment(), timeout=60)}
    consumer.close()
    assert assigned and billed == COUNT, f"{billed} of {COUNT} billed"
    return sum(offset for offset in committed.values() if offset > 0)


def read_bills():
    consumer = Consumer(
        {
            **COMMON,
            "group.id": f"audit-{NAME}",
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        }
    )
    metadata = consumer.list_topics(BILLS, timeout=60)
    partitions = [TopicPartition(BILLS, partition) for partition in metadata.topics[BILLS].partitions]
    ends = {one.partition: consumer.get_watermark_offsets(one, timeout=60)[1] for one in partitions}
    consumer.assign([TopicPartition(BILLS, one.partition, 0) for one in partitions])
    seen, ended, deadline = [], set(), time.time() + 60
    while len(ended) < len(partitions) and time.time() < deadline:
        message = consumer.poll(1.0)
        if message is None:
            continue
        if message.error():
            if message.error().code() == KafkaError._PARTITION_EOF:
                ended.add(message.partition())
                continue
            raise KafkaException(message.error())
        assert message.offset() < ends[message.partition()] and message.timestamp()[1] > 0
        seen.append(json.loads(message.value())["bill"])
        consumer.commit(message=message, asynchronous=True)
    consumer.commit(offsets=consumer.position(partitions), asynchronous=False)
    consumer.close()
    return seen


def main():
    try:
        Producer({**COMMON, "no.such.property": 1})
        raise SystemExit("a wrong property was taken")
    except KafkaException as error:
        assert error.args[0].code() == KafkaError._INVALID_ARG
    place_orders()
    offsets = bill_orders()
    bills = read_bills()
    assert sorted(bills) == list(range(COUNT)), f"{len(bills)} bills, {len(set(bills))} different"
    print(json.dumps({"orders": len(delivered), "committed": offsets, "bills": len(bills)}))


main()
