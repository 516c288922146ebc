# mypy: disable-error-code="attr-defined"
from confluent_kafka.avro import (
    AvroConsumer as AvroConsumer,
    AvroProducer as AvroProducer,
    CachedSchemaRegistryClient as CachedSchemaRegistryClient,
    ClientError as ClientError,
    KeySerializerError as KeySerializerError,
    MessageSerializer as MessageSerializer,
    SerializerError as SerializerError,
    ValueSerializerError as ValueSerializerError,
    load as load,
    loads as loads,
)

from mqd.client.consumer import Consumer as Consumer
from mqd.client.producer import Producer as Producer
