"""Creates a shared-memory consumer with all its parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mqd.client.config import Settings, TransportChoice
from mqd.client.shm.attachment import Attachment
from mqd.client.shm.consumer import ShmConsumer
from mqd.client.shm.consumer_config import ConsumerConfig
from mqd.client.shm.opening import opener
from mqd.client.shm.partitions import AssignedPartition
from mqd.client.shm.reading import BlockPool, PartitionReader
from mqd.client.shm.remote_reading import RemoteRecords

DATA_BYTES = 1 << 20  # for requests only: the records come from mapped files
REPLY_BYTES = 64 << 10


def open_consumer(owner: Any, settings: Settings, choice: TransportChoice) -> ShmConsumer:
    """Raises KafkaException or OSError if the client cannot attach to the broker."""
    config = ConsumerConfig(settings)
    pool = BlockPool()

    def open_attachment(name: str) -> Attachment:
        attach = opener(settings, choice, config["client.id"], DATA_BYTES, REPLY_BYTES, DATA_BYTES)
        return Attachment(
            attach,
            client_id=config["client.id"] if name == "requests" else f"{config['client.id']}-{name}",
            request_timeout_s=config["socket.timeout.ms"] / 1000,
            metadata_max_age_s=max(config["topic.metadata.refresh.interval.ms"], 1000) / 1000,
        )

    def open_reader(native: Any, part: AssignedPartition, offset: int) -> PartitionReader:
        return PartitionReader(
            native,
            part.topic,
            part.topic_id or b"",
            part.index,
            offset,
            config.isolation_level,
            bool(config["check.crcs"]),
            pool,
        )

    new_consumer: Callable[..., ShmConsumer] = ShmConsumer
    if settings.encryption is not None:
        from mqd.client.encryption.clients import DecryptingShmConsumer

        new_consumer = DecryptingShmConsumer.factory(settings.encryption)
    return new_consumer(
        config, owner, open_attachment, open_reader, RemoteRecords(settings, config.isolation_level), choice.reason
    )
