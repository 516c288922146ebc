# mypy: disable-error-code="attr-defined"
from confluent_kafka.avro import AvroConsumer as AvroConsumer
from confluent_kafka.avro import AvroProducer as AvroProducer
from confluent_kafka.avro import CachedSchemaRegistryClient as CachedSchemaRegistryClient
from confluent_kafka.avro import ClientError as ClientError
from confluent_kafka.avro import KeySerializerError as KeySerializerError
from confluent_kafka.avro import MessageSerializer as MessageSerializer
from confluent_kafka.avro import SerializerError as SerializerError
from confluent_kafka.avro import ValueSerializerError as ValueSerializerError
from confluent_kafka.avro import load as load
from confluent_kafka.avro import loads as loads

from mqd.client.consumer import Consumer as Consumer
from mqd.client.producer import Producer as Producer
