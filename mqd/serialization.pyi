# mypy: disable-error-code="attr-defined"
from confluent_kafka.serialization import (
    Deserializer as Deserializer,
    DeserializerBuilder as DeserializerBuilder,
    DoubleDeserializer as DoubleDeserializer,
    DoubleSerializer as DoubleSerializer,
    IntegerDeserializer as IntegerDeserializer,
    IntegerSerializer as IntegerSerializer,
    KafkaException as KafkaException,
    MessageField as MessageField,
    SerializationContext as SerializationContext,
    SerializationError as SerializationError,
    Serializer as Serializer,
    SerializerBuilder as SerializerBuilder,
    StringDeserializer as StringDeserializer,
    StringSerializer as StringSerializer,
)
