# mypy: disable-error-code="attr-defined"
from confluent_kafka.deserializing_consumer import (
    ConsumeError as ConsumeError,
    DeserializingConsumer as DeserializingConsumer,
    K as K,
    KeyDeserializationError as KeyDeserializationError,
    MessageField as MessageField,
    SerializationContext as SerializationContext,
    SharedClusterIdResolver as SharedClusterIdResolver,
    TYPE_CHECKING as TYPE_CHECKING,
    V as V,
    ValueDeserializationError as ValueDeserializationError,
    build_serdes as build_serdes,
    close_serdes as close_serdes,
    pop_serde_props as pop_serde_props,
    propagate_cluster_id_resolver as propagate_cluster_id_resolver,
)

from mqd.client.messages import Message as Message
