# mypy: disable-error-code="attr-defined"
from confluent_kafka.serializing_producer import (
    K as K,
    KeySerializationError as KeySerializationError,
    MessageField as MessageField,
    SerializationContext as SerializationContext,
    SerializingProducer as SerializingProducer,
    SharedClusterIdResolver as SharedClusterIdResolver,
    TYPE_CHECKING as TYPE_CHECKING,
    V as V,
    ValueSerializationError as ValueSerializationError,
    build_serdes as build_serdes,
    close_serdes as close_serdes,
    pop_serde_props as pop_serde_props,
    propagate_cluster_id_resolver as propagate_cluster_id_resolver,
)
