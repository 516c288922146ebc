# mypy: disable-error-code="attr-defined"
from confluent_kafka.error import ConsumeError as ConsumeError
from confluent_kafka.error import KafkaError as KafkaError
from confluent_kafka.error import KafkaException as KafkaException
from confluent_kafka.error import KeyDeserializationError as KeyDeserializationError
from confluent_kafka.error import KeySerializationError as KeySerializationError
from confluent_kafka.error import ProduceError as ProduceError
from confluent_kafka.error import SerializationError as SerializationError
from confluent_kafka.error import ValueDeserializationError as ValueDeserializationError
from confluent_kafka.error import ValueSerializationError as ValueSerializationError

from mqd.client.messages import Message as Message
