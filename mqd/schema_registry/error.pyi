# mypy: disable-error-code="attr-defined"
from confluent_kafka.schema_registry.error import (
    OAuthTokenError as OAuthTokenError,
    SchemaParseException as SchemaParseException,
    SchemaRegistryError as SchemaRegistryError,
    UnknownType as UnknownType,
)
