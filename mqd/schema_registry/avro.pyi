# mypy: disable-error-code="attr-defined"
from confluent_kafka.schema_registry.avro import (
    AsyncAvroDeserializer as AsyncAvroDeserializer,
    AsyncAvroDeserializerBuilder as AsyncAvroDeserializerBuilder,
    AsyncAvroSerializer as AsyncAvroSerializer,
    AsyncAvroSerializerBuilder as AsyncAvroSerializerBuilder,
    AvroDeserializer as AvroDeserializer,
    AvroDeserializerBuilder as AvroDeserializerBuilder,
    AvroSerializer as AvroSerializer,
    AvroSerializerBuilder as AvroSerializerBuilder,
    LocalSchemaRepository as LocalSchemaRepository,
    get_inline_tags as get_inline_tags,
    get_type as get_type,
    parse_schema_with_repo as parse_schema_with_repo,
    transform as transform,
    validate_message as validate_message,
)
