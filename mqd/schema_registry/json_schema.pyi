# mypy: disable-error-code="attr-defined"
from confluent_kafka.schema_registry.json_schema import (
    AsyncJSONDeserializer as AsyncJSONDeserializer,
    AsyncJSONDeserializerBuilder as AsyncJSONDeserializerBuilder,
    AsyncJSONSerializer as AsyncJSONSerializer,
    AsyncJSONSerializerBuilder as AsyncJSONSerializerBuilder,
    DEFAULT_SPEC as DEFAULT_SPEC,
    JSONDeserializer as JSONDeserializer,
    JSONDeserializerBuilder as JSONDeserializerBuilder,
    JSONSerializer as JSONSerializer,
    JSONSerializerBuilder as JSONSerializerBuilder,
    get_inline_tags as get_inline_tags,
    get_type as get_type,
    transform as transform,
    validate_message as validate_message,
)
