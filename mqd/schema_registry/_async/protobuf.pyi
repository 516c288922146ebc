# mypy: disable-error-code="attr-defined"
from confluent_kafka.schema_registry._async.protobuf import PROTOBUF_TYPE as PROTOBUF_TYPE
from confluent_kafka.schema_registry._async.protobuf import AsyncBaseDeserializer as AsyncBaseDeserializer
from confluent_kafka.schema_registry._async.protobuf import AsyncBaseSerializer as AsyncBaseSerializer
from confluent_kafka.schema_registry._async.protobuf import AsyncProtobufDeserializer as AsyncProtobufDeserializer
from confluent_kafka.schema_registry._async.protobuf import (
    AsyncProtobufDeserializerBuilder as AsyncProtobufDeserializerBuilder,
)
from confluent_kafka.schema_registry._async.protobuf import AsyncProtobufSerializer as AsyncProtobufSerializer
from confluent_kafka.schema_registry._async.protobuf import (
    AsyncProtobufSerializerBuilder as AsyncProtobufSerializerBuilder,
)
from confluent_kafka.schema_registry._async.protobuf import AsyncSchemaRegistryClient as AsyncSchemaRegistryClient
from confluent_kafka.schema_registry._async.protobuf import DeserializerBuilder as DeserializerBuilder
from confluent_kafka.schema_registry._async.protobuf import MessageField as MessageField
from confluent_kafka.schema_registry._async.protobuf import ParsedSchemaCache as ParsedSchemaCache
from confluent_kafka.schema_registry._async.protobuf import RuleMode as RuleMode
from confluent_kafka.schema_registry._async.protobuf import RulePhase as RulePhase
from confluent_kafka.schema_registry._async.protobuf import RuleRegistry as RuleRegistry
from confluent_kafka.schema_registry._async.protobuf import Schema as Schema
from confluent_kafka.schema_registry._async.protobuf import SchemaId as SchemaId
from confluent_kafka.schema_registry._async.protobuf import SchemaReference as SchemaReference
from confluent_kafka.schema_registry._async.protobuf import SerializationContext as SerializationContext
from confluent_kafka.schema_registry._async.protobuf import SerializationError as SerializationError
from confluent_kafka.schema_registry._async.protobuf import SerializerBuilder as SerializerBuilder
from confluent_kafka.schema_registry._async.protobuf import ValidationRulesExecution as ValidationRulesExecution
from confluent_kafka.schema_registry._async.protobuf import async_build_serde as async_build_serde
from confluent_kafka.schema_registry._async.protobuf import asyncinit as asyncinit
from confluent_kafka.schema_registry._async.protobuf import clear_original_key as clear_original_key
from confluent_kafka.schema_registry._async.protobuf import dual_schema_id_deserializer as dual_schema_id_deserializer
from confluent_kafka.schema_registry._async.protobuf import prefix_schema_id_serializer as prefix_schema_id_serializer
from confluent_kafka.schema_registry._async.protobuf import (
    reference_subject_name_strategy as reference_subject_name_strategy,
)
from confluent_kafka.schema_registry._async.protobuf import set_original_key as set_original_key
from confluent_kafka.schema_registry._async.protobuf import transform as transform
from confluent_kafka.schema_registry._async.protobuf import validate_message as validate_message

from mqd.client.messages import Message as Message
