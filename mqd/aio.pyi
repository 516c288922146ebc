# mypy: disable-error-code="attr-defined"
from confluent_kafka.aio import AIOConsumer as AIOConsumer
from confluent_kafka.aio import AIOProducer as AIOProducer
from confluent_kafka.aio import AsyncDeserializingConsumer as AsyncDeserializingConsumer
from confluent_kafka.aio import AsyncSerializingProducer as AsyncSerializingProducer
