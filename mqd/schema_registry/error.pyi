# mypy: disable-error-code="attr-defined"
from confluent_kafka.schema_registry.error import OAuthTokenError as OAuthTokenError
from confluent_kafka.schema_registry.error import SchemaParseException as SchemaParseException
from confluent_kafka.schema_registry.error import SchemaRegistryError as SchemaRegistryError
from confluent_kafka.schema_registry.error import UnknownType as UnknownType
