# mypy: disable-error-code="attr-defined"
from confluent_kafka.error import (
    ConsumeError as ConsumeError,
    KafkaError as KafkaError,
    KafkaException as KafkaException,
    KeyDeserializationError as KeyDeserializationError,
    KeySerializationError as KeySerializationError,
    ProduceError as ProduceError,
    SerializationError as SerializationError,
    ValueDeserializationError as ValueDeserializationError,
    ValueSerializationError as ValueSerializationError,
)

from mqd.client.messages import Message as Message
