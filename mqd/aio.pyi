# mypy: disable-error-code="attr-defined"
from confluent_kafka.aio import (
    AIOConsumer as AIOConsumer,
    AIOProducer as AIOProducer,
    AsyncDeserializingConsumer as AsyncDeserializingConsumer,
    AsyncSerializingProducer as AsyncSerializingProducer,
)
