"""Keys and values of `__share_group_state` in Kafka's format, so that Kafka's tools can read them.

    key type   record          one per                    contains
    0          ShareSnapshot   share-partition            its whole state; a tombstone deletes it
    1          ShareUpdate     write since the snapshot   what the write changed

Both keys are group (string), topic id, partition. The updates of a share-partition are applied, in
the order of the log, to the last snapshot before them. Source: the record schemas of Kafka's share
coordinator (KIP-932, KIP-1226).
"""

from __future__ import annotations

import base64
from itertools import pairwise

from mqd.coordinator.actions import KeyValue
from mqd.coordinator.schema import RecordType, key_type_of
from mqd.coordinator.share.runs import Run

SNAPSHOT, UPDATE = 0, 1
LOG_END_EPOCH = (1 << 31) - 1  # denotes the log's end in a list of leader epochs
_KEY = "group_id: string 0+\ntopic_id: uuid 0+\npartition: int32 0+\n"
_BATCHES = """
state_batches: [StateBatch] 0+
    first_offset: int64 0+
    last_offset: int64 0+
    delivery_state: int8 0+
    delivery_count: int16 0+
"""
SHARE_SNAPSHOT = RecordType(
    SNAPSHOT,
    "ShareSnapshot",
    _KEY,
    """
snapshot_epoch: int32 0+
state_epoch: int32 0+
leader_epoch: int32 0+
start_offset: int64 0+
delivery_complete_count: int32 0+ tag=0 = -1
create_timestamp: int64 0+
write_timestamp: int64 0+"""
    + _BATCHES,
)
SHARE_UPDATE = RecordType(
    UPDATE,
    "ShareUpdate",
    _KEY,
    """
snapshot_epoch: int32 0+
leader_epoch: int32 0+
start_offset: int64 0+
delivery_complete_count: int32 0+ tag=0 = -1"""
    + _BATCHES,
)
TYPES = {record_type.key_type: record_type for record_type in (SHARE_SNAPSHOT, SHARE_UPDATE)}
_SNAPSHOT_BATCH = SHARE_SNAPSHOT.value.cls.StateBatch
_UPDATE_BATCH = SHARE_UPDATE.value.cls.StateBatch


def share_partition_name(group_id: str, topic_id: bytes, partition: int) -> str:
    """The share-partition as FindCoordinator names it: `group:topicId:partition`, the id in base64
    as Kafka prints it.
    """
    return f"{group_id}:{base64.urlsafe_b64encode(topic_id).rstrip(b'=').decode()}:{partition}"


def split_name(name: str) -> tuple[str, bytes, int]:
    """(group, topic id, partition). A group's id may have colons. Raises ValueError."""
    group_id, topic, partition = name.rsplit(":", 2)
    topic_id = base64.b64decode(topic.encode() + b"==", altchars=b"-_", validate=True)
    if not group_id or len(topic_id) != 16 or not partition.isdecimal():
        raise ValueError(f"not the name of a share-partition: {name[:200]}")
    return group_id, topic_id, int(partition)


def name_of_key(key: bytes) -> str | None:
    """The name of the key's share-partition. None: the record has an unknown type. Raises
    ValueError.
    """
    record_type = TYPES.get(key_type_of(key))
    if record_type is None:
        return None
    decoded = record_type.decode_key(key)
    return share_partition_name(decoded.group_id, decoded.topic_id, decoded.partition)


def encode_keys(group_id: str, topic_id: bytes, partition: int) -> tuple[bytes, bytes]:
    """(key of the snapshot, key of the updates)."""
    fields = group_id, topic_id, partition
    return SHARE_SNAPSHOT.encode_key(*fields), SHARE_UPDATE.encode_key(*fields)


def snapshot_record(
    key: bytes,
    snapshot_epoch: int,
    state_epoch: int,
    leader_epoch: int,
    start_offset: int,
    complete_count: int,
    create_ms: int,
    write_ms: int,
    runs: list[Run],
) -> KeyValue:
    value = SHARE_SNAPSHOT.value.cls(
        snapshot_epoch=snapshot_epoch,
        state_epoch=state_epoch,
        leader_epoch=leader_epoch,
        start_offset=start_offset,
        delivery_complete_count=complete_count,
        create_timestamp=create_ms,
        write_timestamp=write_ms,
        state_batches=[_SNAPSHOT_BATCH(*run) for run in runs],
    )
    return key, SHARE_SNAPSHOT.encode_value(value)


def update_record(
    key: bytes, snapshot_epoch: int, leader_epoch: int, start_offset: int, complete_count: int, runs: list[Run]
) -> KeyValue:
    value = SHARE_UPDATE.value.cls(
        snapshot_epoch=snapshot_epoch,
        leader_epoch=leader_epoch,
        start_offset=start_offset,
        delivery_complete_count=complete_count,
        state_batches=[_UPDATE_BATCH(*run) for run in runs],
    )
    return key, SHARE_UPDATE.encode_value(value)


def runs_of(batches: list) -> list[Run]:
    """State batches of a record or a request as runs. Raises ValueError for invalid batches."""
    runs = [Run(batch.first_offset, batch.last_offset, batch.delivery_state, batch.delivery_count) for batch in batches]
    for run in runs:
        run.validate()
    return runs


def checked_epoch_starts(epochs: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Checks the (leader epoch, first offset) pairs of the requester's partition log, and returns
    them as a tuple. The last pair is (LOG_END_EPOCH, the log's end). Raises ValueError.
    """
    for (epoch, start), (next_epoch, next_start) in pairwise(epochs):
        if not (0 <= epoch < next_epoch and 0 <= start <= next_start):
            raise ValueError(f"leader epochs do not ascend: {epoch} begins at {start}, {next_epoch} at {next_start}")
    if epochs and (epochs[-1][0] != LOG_END_EPOCH or epochs[-1][1] < 0):
        raise ValueError("leader epochs without the log's end")
    return tuple(epochs)
