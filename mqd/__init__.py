"""mqd: a distributed message queue that speaks the Kafka wire protocol, and its client library.

    from mqd import Producer, Consumer

    producer = Producer({"bootstrap.servers": "127.0.0.1:9092"})
    producer.produce("greetings", value=b"hello", key=b"world")
    producer.flush()

    consumer = Consumer({"bootstrap.servers": "127.0.0.1:9092", "group.id": "readers",
                             "auto.offset.reset": "earliest"})
    consumer.subscribe(["greetings"])
    message = consumer.poll(10)

Names, modules (mqd.admin, mqd.serialization, mqd.schema_registry...), configuration keys and
signatures are those of confluent_kafka: an application written for confluent_kafka needs to change
only its imports. If the broker runs on this host, clients use shared memory, otherwise librdkafka
(`transport=auto`, the default; `client.transport` shows which, and why).

    Producer       produce, poll, flush, transactions; produce_batch takes lists, numpy and Arrow
                   arrays
    Consumer       subscribe, assign, poll, commit, seek; consume_batch returns columns (a
                   RecordBatchView: numpy, Arrow, bytes; without a copy over shared memory)
    ShareConsumer  a share group's member: poll, acknowledge, commit_sync, renew
    AsyncProducer  AsyncConsumer
                   the same for asyncio
    AdminClient    the same as confluent_kafka's
    Message  TopicPartition  BatchDelivery  KafkaError  KafkaException

docs/client.md has the details. The broker itself is started by the command `mqd up`.
"""

from __future__ import annotations

from mqd.client import confluent as _confluent

__version__ = "0.1.0"  # the only copy: pyproject.toml and `mqd --version` read it

TYPE_CHECKING = False  # not imported from typing, which takes longer to load than the rest of this module
if TYPE_CHECKING:  # at run time, __getattr__ below finds these names
    from confluent_kafka import OFFSET_BEGINNING as OFFSET_BEGINNING
    from confluent_kafka import OFFSET_END as OFFSET_END
    from confluent_kafka import OFFSET_INVALID as OFFSET_INVALID
    from confluent_kafka import OFFSET_STORED as OFFSET_STORED
    from confluent_kafka import TIMESTAMP_CREATE_TIME as TIMESTAMP_CREATE_TIME
    from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME as TIMESTAMP_LOG_APPEND_TIME
    from confluent_kafka import TIMESTAMP_NOT_AVAILABLE as TIMESTAMP_NOT_AVAILABLE
    from confluent_kafka import AcknowledgeType as AcknowledgeType
    from confluent_kafka import ConcurrentModificationException as ConcurrentModificationException
    from confluent_kafka import ConsumerGroupState as ConsumerGroupState
    from confluent_kafka import ConsumerGroupTopicPartitions as ConsumerGroupTopicPartitions
    from confluent_kafka import ConsumerGroupType as ConsumerGroupType
    from confluent_kafka import DeserializingConsumer as DeserializingConsumer
    from confluent_kafka import DeserializingShareConsumer as DeserializingShareConsumer
    from confluent_kafka import ElectionType as ElectionType
    from confluent_kafka import IllegalStateException as IllegalStateException
    from confluent_kafka import IsolationLevel as IsolationLevel
    from confluent_kafka import KafkaError as KafkaError
    from confluent_kafka import KafkaException as KafkaException
    from confluent_kafka import Messages as Messages
    from confluent_kafka import Node as Node
    from confluent_kafka import SerializingProducer as SerializingProducer
    from confluent_kafka import ThrottleEvent as ThrottleEvent
    from confluent_kafka import TopicCollection as TopicCollection
    from confluent_kafka import TopicPartition as TopicPartition
    from confluent_kafka import TopicPartitionInfo as TopicPartitionInfo
    from confluent_kafka import Uuid as Uuid
    from confluent_kafka import consistent as consistent
    from confluent_kafka import fnv1a as fnv1a
    from confluent_kafka import libversion as libversion
    from confluent_kafka import murmur2 as murmur2
    from confluent_kafka import version as version

    from mqd.client.admin import AdminClient as AdminClient
    from mqd.client.async_consumer import AsyncConsumer as AsyncConsumer
    from mqd.client.async_producer import AsyncProducer as AsyncProducer
    from mqd.client.consumer import Consumer as Consumer
    from mqd.client.messages import BatchDelivery as BatchDelivery
    from mqd.client.messages import Message as Message
    from mqd.client.producer import Producer as Producer
    from mqd.client.record_batch import RecordBatchView as RecordBatchView
    from mqd.client.share_consumer import ShareConsumer as ShareConsumer

_CLIENT_NAMES = (
    "AdminClient",
    "AsyncConsumer",
    "AsyncProducer",
    "BatchDelivery",
    "Consumer",
    "Message",
    "Producer",
    "RecordBatchView",
    "ShareConsumer",
)

_confluent.install()

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Imports the client's names on first use, so that the broker's processes do not load them."""
        if name == "__all__":
            return sorted({*_CLIENT_NAMES, *_confluent.names()})
        # one of mqd's own modules: `from mqd import native` calls this function before it imports native
        if name.startswith("__") or name in _confluent.OWN_MODULES:
            raise AttributeError(f"module 'mqd' has no attribute {name!r}")
        if name in _CLIENT_NAMES:
            from mqd import client

            value = getattr(client, name)
        else:
            value = _confluent.find(name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_CLIENT_NAMES, *_confluent.names()})
