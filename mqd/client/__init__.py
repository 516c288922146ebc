"""The client library: confluent_kafka's API, over shared memory if the broker is on this host,
otherwise over TCP.

`from mqd import Producer, Consumer, AdminClient, AsyncProducer, AsyncConsumer`; docs/client.md
describes their use. Modules are imported on first use.
"""

from __future__ import annotations

import importlib

_MODULES = {
    "Producer": "mqd.client.producer",
    "AsyncProducer": "mqd.client.async_producer",
    "Consumer": "mqd.client.consumer",
    "AsyncConsumer": "mqd.client.async_consumer",
    "ShareConsumer": "mqd.client.share_consumer",
    "AdminClient": "mqd.client.admin",
    "RecordBatchView": "mqd.client.record_batch",
    "BatchDelivery": "mqd.client.messages",
    "Message": "mqd.client.messages",
    "TopicPartition": "mqd.client.messages",
    "KafkaError": "mqd.client.messages",
    "KafkaException": "mqd.client.messages",
    "OFFSET_BEGINNING": "mqd.client.messages",
    "OFFSET_END": "mqd.client.messages",
    "OFFSET_STORED": "mqd.client.messages",
    "OFFSET_INVALID": "mqd.client.messages",
    "TIMESTAMP_NOT_AVAILABLE": "mqd.client.messages",
    "TIMESTAMP_CREATE_TIME": "mqd.client.messages",
    "TIMESTAMP_LOG_APPEND_TIME": "mqd.client.messages",
}

__all__ = sorted(_MODULES)  # noqa: PLE0605


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
