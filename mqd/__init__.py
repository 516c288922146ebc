"""mqd: a distributed message queue that speaks the Kafka wire protocol, and its client library.

    from mqd import Producer, Consumer

    producer = Producer({"bootstrap.servers": "127.0.0.1:9092"})
    producer.produce("greetings", value=b"hello", key=b"world")
    producer.flush()

    consumer = Consumer({"bootstrap.servers": "127.0.0.1:9092", "group.id": "readers",
    "auto.offset.reset": "earliest"}) consumer.subscribe(["greetings"]) message = consumer.poll(10)

Names, configuration keys and call shapes are confluent_kafka's: an application written for it
changes its import and nothing else. Where the broker is this host's, clients go through shared
memory; elsewhere through librdkafka (`transport=auto`, the default; `client.transport` tells which,
and why).

    Producer       produce, poll, flush, transactions; produce_batch takes lists, numpy and Arrow
                   arrays
    Consumer       subscribe, assign, poll, commit, seek; consume_batch gives columns (a
                   RecordBatchView: numpy, Arrow, bytes; on shared memory without a copy)
    AsyncProducer  AsyncConsumer          the same for asyncio
    AdminClient    confluent_kafka's
    Message  TopicPartition  BatchDelivery  KafkaError  KafkaException

docs/client.md says more. The broker itself is started by the command `mqd up`.
"""

from __future__ import annotations

_CLIENT = (
    "AdminClient",
    "AsyncConsumer",
    "AsyncProducer",
    "BatchDelivery",
    "Consumer",
    "KafkaError",
    "KafkaException",
    "Message",
    "Producer",
    "RecordBatchView",
    "TopicPartition",
    "OFFSET_BEGINNING",
    "OFFSET_END",
    "OFFSET_INVALID",
    "OFFSET_STORED",
    "TIMESTAMP_CREATE_TIME",
    "TIMESTAMP_LOG_APPEND_TIME",
    "TIMESTAMP_NOT_AVAILABLE",
)

__all__ = list(_CLIENT)  # noqa: PLE0605


def __getattr__(name: str) -> object:
    """The client's names, imported when first asked for: a process of the broker does not pay for
    them.
    """
    if name not in _CLIENT:
        raise AttributeError(f"module 'mqd' has no attribute {name!r}")
    from mqd import client

    found = globals()[name] = getattr(client, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_CLIENT})
