"""Records of joint transactions in __transaction_state. The key types are mqd's own; Kafka's tools
and older brokers skip them.

    key type   record              key                    value
    9100       JointTransaction    transactional id       its current or last transaction, and the
                                                          last committed batch
    9101       JointChild          transactional id,      the most recent transaction in which the
                                   producer id            child was enlisted, and the partitions
                                                          that the child wrote to in that transaction

A child's record is rewritten when the child is enlisted and when partitions are added to it. The
end of a transaction, which bumps the epoch of each child by one, is not written to the children's
records: it is inferred from the transaction's own record (its serial and state). So it takes one
record to begin a transaction and one to end it, even with a thousand children.
`winners`: the producer ids of the children that a commit covers; the others are aborted.
"""

import msgspec

from mqd.coordinator.schema import RecordType, key_type_of
from mqd.coordinator.transaction.events import Partition

TRANSACTION = RecordType(
    9100,
    "JointTransaction",
    "transactional_id: string 0+\n",
    """
serial: int64 0+
state: int8 0+
batch_id: int64 0+
run_id: string 0+
committed_batch_id: int64 0+
timeout_ms: int32 0+
start_ms: int64 0+
last_update_ms: int64 0+
winners: [int64] 0+
fenced_run_ids: [string] 0+
""",
)
CHILD = RecordType(
    9101,
    "JointChild",
    "transactional_id: string 0+\nproducer_id: int64 0+\n",
    """
serial: int64 0+
producer_epoch: int16 0+
topics: [Topic] 0+
    name: string 0+
    partitions: [int32] 0+
""",
)


class Child(msgspec.Struct):
    """The content of a JointChild record: the last transaction that the child was enlisted in, its
    epoch in that transaction, and the partitions that it wrote to.
    """

    serial: int
    epoch: int
    partitions: dict[Partition, None]


def encode_child(child: Child) -> bytes:
    topics: dict[str, list[int]] = {}
    for name, index in child.partitions:
        topics.setdefault(name, []).append(index)
    value_class = CHILD.value.cls
    return CHILD.encode_value(
        value_class(
            serial=child.serial,
            producer_epoch=child.epoch,
            topics=[value_class.Topic(name=name, partitions=indexes) for name, indexes in topics.items()],
        )
    )


def decode_child(value: bytes) -> Child:
    """Raises ValueError for invalid bytes."""
    record = CHILD.decode_value(value)
    return Child(
        record.serial,
        record.producer_epoch,
        {(topic.name, index): None for topic in record.topics for index in topic.partitions},
    )


def transactional_id_of(key: bytes) -> str | None:
    """The transactional id of a key of these types; None for other types. Raises ValueError for
    bytes that are not a key.
    """
    key_type = key_type_of(key)
    if key_type == TRANSACTION.key_type:
        return TRANSACTION.decode_key(key).transactional_id
    return CHILD.decode_key(key).transactional_id if key_type == CHILD.key_type else None
