"""The internal topics of the coordinators: their configuration and their creation.

The controller creates them as it does any topic, when they are first needed: when a client looks up
the coordinator of its group or transactional id. Their records are flushed before they are
acknowledged (flush.on.ack), because exactly-once depends on committed offsets and transactions. No
records are deleted by age or size. The topics are compacted, except that of share-partitions: their
state consists of a snapshot and all updates after it, so the share coordinator deletes the records
before its snapshots (mqd/acceptor/share_pruning.py).
"""

from collections.abc import Mapping
from typing import NamedTuple

from mqd.base.config import broker_number
from mqd.base.properties import TOPIC
from mqd.coordinator.log import BATCH_BYTES_MAX

OFFSETS_TOPIC = "__consumer_offsets"
TRANSACTIONS_TOPIC = "__transaction_state"
SHARE_STATES_TOPIC = "__share_group_state"


class InternalTopic(NamedTuple):
    name: str
    partitions_property: str
    segment_property: str
    is_compacted: bool = True

    def partition_count(self, config: Mapping[str, str]) -> int:
        return broker_number(config, self.partitions_property)

    def topic_config(self, config: Mapping[str, str]) -> dict[str, str]:
        """The configuration to create the topic with. It must be valid regardless of the
        broker's defaults for other topics.
        """
        topic_config = {
            "segment.bytes": config.get(self.segment_property, "104857600"),
            "max.message.bytes": str(BATCH_BYTES_MAX),
            "flush.on.ack": "true",
            "message.timestamp.type": "CreateTime",
            "retention.bytes": "-1",
        }
        return topic_config | self.cleanup_config()

    def cleanup_config(self) -> dict[str, str]:
        """Compaction if the topic uses it and this broker supports it; otherwise unlimited
        retention.
        """
        return (
            {"cleanup.policy": "compact"}
            if self.is_compacted and "compact" not in TOPIC["cleanup.policy"].refused
            else {"cleanup.policy": "delete", "retention.ms": "-1"}
        )


CONSUMER_OFFSETS = InternalTopic(OFFSETS_TOPIC, "offsets.topic.num.partitions", "offsets.topic.segment.bytes")
TRANSACTION_STATE = InternalTopic(
    TRANSACTIONS_TOPIC, "transaction.state.log.num.partitions", "transaction.state.log.segment.bytes"
)
SHARE_GROUP_STATE = InternalTopic(
    SHARE_STATES_TOPIC,
    "share.coordinator.state.topic.num.partitions",
    "share.coordinator.state.topic.segment.bytes",
    is_compacted=False,
)
