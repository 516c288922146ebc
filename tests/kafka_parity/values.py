"""Requests from the schema: for each field, by its name, valid values, boundary values and invalid
ones. Repeated entries are drawn more often.
"""

from __future__ import annotations

from hypothesis import strategies as st

from mqd.protocol import KNOWN
from mqd.protocol.messages import message_class, message_of
from mqd.protocol.schema.language import FIXED, INTEGERS, OWN_TAG_MIN, Field, Struct
from tests.kafka_parity.compare import IDENTITIES
from tests.kafka_parity.model import NO_UUID, Batch, Ref

A, B, MISSING, LIBRARY = "¤a", "¤b", "¤missing", "library"  # two partitions, one, none, the shared one
GROUP = "¤g"
TXN = "¤t"
SHARE_MEMBER = "c2hhcmUtbWVtYmVyLW9uZQ"
STREAMS_MEMBER = "c3RyZWFtcy1tZW1iZXItMQ"
UNKNOWN_ID = b"\x07" * 16
INT32_MAX, INT64_MAX = 2**31 - 1, 2**63 - 1

_SEEN_TOPICS = [A, A, A, B, B, LIBRARY, MISSING, "", "bad name!", ".", "x" * 250]
_OWN_TOPICS = [A, A, A, A, B, B, MISSING, "bad name!", "", ".."]
_TOPIC_IDS = [*[Ref("topic_id", A)] * 3, *[Ref("topic_id", B)] * 2, Ref("topic_id", LIBRARY), UNKNOWN_ID, NO_UUID]
_PARTITIONS = [0, 0, 0, 0, 1, 1, 2, -1, INT32_MAX]
_OFFSETS = [0, 0, 1, 2, 3, 5, 7, 100, -1, -2, INT64_MAX]
_EPOCHS = [-1, -1, -1, 0, 0, 1, INT32_MAX, -2]
_MEMBERS = [*[Ref("member_id", "one")] * 5, "", "unknown-member"]
_GENERATIONS = [*[Ref("generation_id", "one")] * 5, Ref("generation_id", "one", 1), -1, 0, INT32_MAX]
_INSTANCES = [None, None, None, "static", "static", "unknown-static", ""]
_TXNS = [TXN, TXN, TXN, TXN, "¤other", ""]
_PRODUCERS = [*[Ref("producer_id", "one")] * 6, -1, 987654321]
_PRODUCER_EPOCHS = [*[Ref("producer_epoch", "one")] * 6, Ref("producer_epoch", "one", 1), -1, 32767]
_GROUPS = [GROUP, GROUP, GROUP, GROUP, "¤new", "", "library-group"]
# Not 0: how much a broker does in zero time is a race.
_TIMEOUTS = [5000, 10000, 30000]

_CONFIGS = [
    ("retention.ms", "3600000"), ("retention.ms", "-1"), ("retention.ms", "-2"), ("retention.ms", "soon"),
    ("cleanup.policy", "compact"), ("cleanup.policy", "compact,delete"), ("cleanup.policy", "shred"),
    ("segment.bytes", "1048576"), ("segment.bytes", "10"), ("max.message.bytes", "2000"), ("max.message.bytes", "-1"),
    ("min.insync.replicas", "1"), ("min.insync.replicas", "0"), ("message.timestamp.type", "LogAppendTime"),
    ("message.timestamp.type", "Never"), ("compression.type", "producer"), ("compression.type", "zip"),
    ("flush.ms", "1000"), ("preallocate", "true"), ("preallocate", "maybe"), ("min.cleanable.dirty.ratio", "0.3"),
    ("min.cleanable.dirty.ratio", "1.5"), ("delete.retention.ms", "0"), ("no.such.config", "1"), ("", "1"),
    ("retention.ms", None), ("retention.bytes", "100000"), ("retention.bytes", ""), ("segment.ms", "0"),
]  # fmt: skip

# By field name, in requests of every API; (API, field) takes precedence.
POOLS: dict[object, list[object]] = {
    "name": _SEEN_TOPICS, "topic": _SEEN_TOPICS, "topic_name": _SEEN_TOPICS, "topic_id": _TOPIC_IDS,
    "topic_names": _OWN_TOPICS, "subscribed_topic_names": [A, A, B, MISSING],
    "partition_index": _PARTITIONS, "partition": _PARTITIONS, "partitions": _PARTITIONS, "index": _PARTITIONS,
    "partition_indexes": _PARTITIONS, "current_leader_epoch": _EPOCHS, "leader_epoch": [0, 0, 0, 1, -1, 5, INT32_MAX],
    "committed_leader_epoch": [-1, -1, 0, 1, INT32_MAX], "offset": _OFFSETS, "fetch_offset": _OFFSETS,
    "committed_offset": [0, 1, 5, 100, -1, -2, INT64_MAX], "committed_metadata": ["", None, "note", "m" * 4096, "m" * 4097],
    "group_id": _GROUPS, "groups": _GROUPS, "groups_names": ["¤gone", GROUP, "¤new", "", "¤other"], "group_ids": _GROUPS,
    "member_id": _MEMBERS, "generation_id": _GENERATIONS, "generation_id_or_member_epoch": _GENERATIONS,
    "group_instance_id": _INSTANCES, "instance_id": [None, None, None, "static", ""],
    "member_epoch": [*[Ref("generation_id", "one")] * 4, 0, 0, -1, -2, 7, -3],
    "transactional_id": _TXNS, "transactional_ids": [*_TXNS, "library-open", "library-done"],
    "v3_and_below_transactional_id": _TXNS,
    "producer_id": _PRODUCERS, "v3_and_below_producer_id": _PRODUCERS,
    "producer_epoch": _PRODUCER_EPOCHS, "v3_and_below_producer_epoch": _PRODUCER_EPOCHS,
    "transaction_timeout_ms": [60000, 60000, 1, 0, -1, 900000, 900001, INT32_MAX],
    "timeout_ms": _TIMEOUTS, "validate_only": [False, False, True],
    "isolation_level": [0, 0, 1, 1, 2, -1], "replica_id": [-1, -1, -1, -1, -2],
    "timestamp": [-1, -1, -2, -2, -3, -4, -5, -6, -7, 0, 1_700_000_000_000, 1_700_000_000_001, INT64_MAX],
    "max_wait_ms": [0], "min_bytes": [0, 1, 1000], "max_bytes": [INT32_MAX, 1 << 20, 100, 1, 0, -1],
    "partition_max_bytes": [1 << 20, 1 << 20, 100, 1, 0, -1], "session_id": [0, 0, 0, 0, 77], "session_epoch": [-1, -1, -1, 0, 1],
    "rack_id": ["", "", "rack1"], "log_start_offset": [-1], "cluster_id": [None], "last_fetched_epoch": [-1, -1, 0, 3],
    "acks": [-1, -1, -1, 1, 1, 0, 2, -2], "topics_id": _TOPIC_IDS,
    "key_type": [0, 0, 0, 1, 1, 2, 3, -1], "key": [GROUP, TXN, "", "¤new"], "coordinator_keys": [GROUP, TXN, "", "¤new"],
    "session_timeout_ms": [10000, 10000, 30000, 6000, 5999, 1800000, 1800001, 0, -1],
    "rebalance_timeout_ms": [10000, 60000, 300, 0, 10000], "protocol_type": ["consumer", "consumer", "consumer", "connect", ""],
    "protocol_name": ["range", "range", "range", None, "sticky"], "reason": [None, "why", "r" * 300],
    "metadata": [b"\x00\x01\x00\x00\x00\x00\xff\xff\xff\xff", b"", b"\x00\x03\xff"], "assignment": [b"assigned", b""],
    "num_partitions": [1, 1, 2, 3, -1, 0, -2, 10001], "replication_factor": [1, 1, 1, -1, 0, 2, 32767, -2],
    "broker_ids": [1, 1, 1, 2, -1], "replicas": [1, 1, 1, 2, -1], "count": [3, 3, 4, 2, 1, 0, -1, 40],
    "resource_type": [2, 2, 2, 2, 2, 4, 4, 32, 8, 16, 0, 99], "config_operation": [0, 0, 0, 1, 2, 3, 4],
    "configuration_keys": ["retention.ms", "cleanup.policy", "no.such.config", "min.insync.replicas", ""],
    "include_synonyms": [False, True], "include_documentation": [False], "resource_types": [2, 4, 8, 16, 32, 0, 99],
    "election_type": [0, 0, 1, 2], "state_filters": ["Ongoing", "CompleteCommit", "Nonsense", "Empty", ""],
    "producer_id_filters": [Ref("producer_id", "one"), 987654321, -1], "duration_filter": [-1, -1, 0, INT64_MAX, -2],
    "transactional_id_pattern": [None, None, ".*", "¤.*", "(", ""],
    "states_filter": ["Stable", "stable", "Empty", "Dead", "Nonsense", "PreparingRebalance", ""],
    "types_filter": ["classic", "Consumer", "consumer", "share", "nonsense", ""],
    "response_partition_limit": [2000, 2000, 1, 2, 0, -1], "include_fenced_brokers": [False, True],
    "endpoint_type": [1, 1, 1, 2, 0, 3], "client_software_name": ["judge", "judge", "", "bad name", "-x"],
    "client_software_version": ["1.0", "", "not!"], "path": ["/tmp/elsewhere", ""],
    "entity_type": ["client-id", "client-id", "user", "ip", "nonsense", ""], "match_type": [0, 0, 1, 2, 3, -1],
    "match": ["¤c", "¤c", None, ""], "entity_name": ["¤c", "¤c", "¤d", None, ""], "strict": [False, True],
    "value": [1000.0, 1000.0, 0.0, -1.0, 1.5], "remove": [False, False, True],
    "subscribed_topic_regex": [None, None, "¤.*", "(", ""], "server_assignor": [None, None, "uniform", "range", "nonsense"],
    "feature": ["group.version", "transaction.version", "nonsense", "metadata.version"], "max_version_level": [1, 2, 29, 30, 0, -1],
    "upgrade_type": [1, 2, 3, 0, 9], "users": ["ann"], "balance": [0],
    "coordinator_epoch": [0, -1], "transaction_result": [False, False, True],
    "first_offset": [0, 0, 0, 1, 2, 3, -1], "last_offset": [0, 1, 2, 2, 4, 4, 5, -1], "start_offset": [0, 0, 1, 3, 5, 9, -1],
    "acknowledge_types": [1, 1, 1, 2, 2, 3, 0, 4, 5, -1], "is_renew_ack": [False, False, False, True],
    "share_acquire_mode": [0, 0, 0, 1, 2], "share_session_epoch": [1, 1, 1, 0, 0, 2, -1, -2, INT32_MAX],
    "max_records": [500, 500, 1, 2, 4, 0, -1], "batch_size": [500],
    # Not 2: whether a released record returns in this or the next response is a race in Kafka.
    ("ShareFetch", "acknowledge_types"): [1, 1, 1, 3, 0, 4, 5, -1],
    ("ShareGroupHeartbeat", "group_id"): [GROUP, GROUP, GROUP, ""],
    # Not the shared group: a member with a regular expression raises its epoch again in Kafka.
    ("ConsumerGroupHeartbeat", "group_id"): [GROUP, GROUP, GROUP, GROUP, "¤new", ""],
    ("ShareGroupHeartbeat", "rack_id"): [None, None, None, "rack1", ""],
    # min_bytes not 0: whether a partition that was just added is read at once or later is a race in Kafka.
    # max_bytes not negative: Kafka fails with an internal exception.
    ("ShareFetch", "max_wait_ms"): [100], ("ShareFetch", "min_bytes"): [1, 1, 1000],
    ("ShareFetch", "max_bytes"): [INT32_MAX, 1 << 20, 100, 1, 0],
    # One member: which of two gets which partition depends on the topics' random ids.
    ("ShareGroupHeartbeat", "member_id"): [SHARE_MEMBER, SHARE_MEMBER, SHARE_MEMBER, SHARE_MEMBER, "", "m" * 37],
    ("StreamsGroupHeartbeat", "member_id"): [STREAMS_MEMBER, STREAMS_MEMBER, STREAMS_MEMBER, "other", ""],
    ("StreamsGroupHeartbeat", "group_id"): [GROUP, GROUP, GROUP, "¤new", ""],
    ("StreamsGroupHeartbeat", "epoch"): [1, 1, 1, 0, 2], ("StreamsGroupHeartbeat", "process_id"): ["process", "process", "another"],
    ("StreamsGroupHeartbeat", "subtopology_id"): ["0", "0", "1", "nonsense"],
    # Internal topics that exist: whether those that Kafka creates are there at the next heartbeat is a race.
    ("StreamsGroupHeartbeat", "name"): [B, B, A], ("StreamsGroupHeartbeat", "replication_factor"): [0, 0, 1],
    ("StreamsGroupHeartbeat", "source_topics"): [A, A, B, MISSING],
    ("StreamsGroupHeartbeat", "repartition_sink_topics"): [B], ("StreamsGroupHeartbeat", "partitions"): [0, 0, 1, 2],
    ("StreamsGroupHeartbeat", "source_topic_regex"): [".*"], ("StreamsGroupHeartbeat", "value"): ["compact", ""],
    ("StreamsGroupHeartbeat", "key"): ["cleanup.policy", "rack"],
    ("StreamsGroupHeartbeat", "repartition_source_topics"): [B],
    ("StreamsGroupHeartbeat", "endpoint_information_epoch"): [-1, 0, 0, 1], ("StreamsGroupHeartbeat", "rack_id"): [None, None, "rack1", ""],
    ("ShareFetch", "member_id"): [SHARE_MEMBER, SHARE_MEMBER, SHARE_MEMBER, "b3RoZXItc2hhcmUtbWVtYg", "", "unknown-member"],
    ("ShareAcknowledge", "member_id"): [SHARE_MEMBER, SHARE_MEMBER, SHARE_MEMBER, "b3RoZXItc2hhcmUtbWVtYg", "", "unknown-member"],
    # So high that no quota, even a default one, delays the following cases.
    ("AlterClientQuotas", "value"): [1e9, 1e9, 0.0, -1.0, 1e9 + 0.5],
    ("AlterClientQuotas", "key"): [
        "producer_byte_rate", "consumer_byte_rate", "request_percentage", "connection_creation_rate", "nonsense", "",
    ],
    ("DescribeUserScramCredentials", "name"): ["ann", "ben", ""],
    ("JoinGroup", "name"): ["range", "range", "sticky", ""],
    ("CreateTopics", "name"): ["¤c", "¤c", "¤c", "¤d", A, "", "bad name!", "..", "x" * 249, "x" * 250],
    ("CreateTopics", "partition_index"): [0, 0, 1, 1, 2, -1],
    # Kafka fails on an empty name without a cursor, and counts past the largest index.
    ("DescribeTopicPartitions", "name"): [name for name in _SEEN_TOPICS if name],
    ("DescribeTopicPartitions", "partition_index"): [0, 0, 0, 0, 1, 1, 2, -1],
    ("ElectLeaders", "partitions"): _PARTITIONS,
    ("DescribeQuorum", "topic_name"): ["__cluster_metadata", "__cluster_metadata", "__other", ""],
    ("OffsetForLeaderEpoch", "replica_id"): [-1, -1, -2],
    ("InitProducerId", "transactional_id"): [TXN, TXN, None, None, "¤other", ""],
    ("Produce", "transactional_id"): [None, None, None, TXN, ""],
    ("AlterPartitionReassignments", "replicas"): [1, 1, 1, 2, -1],
    ("DescribeClientQuotas", "entity_type"): ["client-id", "client-id", "user", "ip", "nonsense"],
}  # fmt: skip

# APIs that change topics do not use the shared one, whose state every case reads.
CHANGING = frozenset({
    "CreateTopics", "DeleteTopics", "DeleteRecords", "CreatePartitions", "Produce", "AlterPartitionReassignments",
    "AlterReplicaLogDirs", "WriteTxnMarkers", "AddPartitionsToTxn", "TxnOffsetCommit", "ElectLeaders",
})  # fmt: skip

BATCHES = [
    *[Batch()] * 4,
    Batch((b"one", b"two", b"three"), b"k"),
    Batch((b"z" * 200,) * 3, compression="gzip"),
    Batch((b"z" * 200,) * 3, compression="lz4"),
    Batch((b"z" * 200,) * 3, compression="zstd"),
    Batch((b"z" * 200,) * 3, compression="snappy"),
    Batch((None,), b"tombstone"),
    Batch((b"late",), timestamp_ms=4_000_000_000_000),
    Batch((b"none",), timestamp_ms=-1),
    Batch((b"old",), timestamp_ms=0),
    Batch(producer_id=-5, producer_epoch=0, base_sequence=0),
    Batch(producer_id=987654321, producer_epoch=-1, base_sequence=4),
    Batch(producer_id=987654321, producer_epoch=-2, base_sequence=0),
    Batch(is_control=True),
    Batch(copies=2),
    Batch((b"x" * 3000,)),
    Batch(damage="crc"), Batch(damage="cut"), Batch(damage="header only"), Batch(damage="empty"),
    Batch(damage="magic 1"), Batch(damage="magic 3"), Batch(damage="count lies"), Batch(damage="count negative"),
    Batch(damage="last offset lies"), Batch(damage="codec 6"), Batch(damage="base offset"),
    Batch(damage="log append time"), Batch(damage="garbage"), Batch(damage="length"),
    Batch(damage="crc", compression="gzip"), Batch(compression="gzip", damage="count lies"),
]  # fmt: skip


def idempotent_batches(is_transactional: bool = False) -> list[Batch]:
    """Of the story's producer: valid, repeated, with a gap, of other epochs."""
    own = {"producer_id": Ref("producer_id", "one"), "is_transactional": is_transactional}
    epoch = Ref("producer_epoch", "one")
    sequences = [0, 0, 0, 1, 1, 2, 5, -1, INT32_MAX]
    return [
        *[Batch(base_sequence=sequence, producer_epoch=epoch, **own) for sequence in sequences],
        Batch((b"a", b"b"), base_sequence=0, producer_epoch=epoch, **own),
        Batch(base_sequence=0, producer_epoch=Ref("producer_epoch", "one", 1), **own),
        Batch(base_sequence=0, producer_epoch=-1, **own),
        Batch(base_sequence=3, producer_epoch=-1, **own),
        Batch(base_sequence=-1, producer_epoch=-1, **own),
        Batch(base_sequence=0, producer_epoch=-2, **own),
        Batch(base_sequence=0, producer_epoch=0, producer_id=-5, is_transactional=is_transactional),
        Batch(base_sequence=0, producer_epoch=0, producer_id=424242, is_transactional=is_transactional),
    ]


# APIs for which the meaning of a duplicate in one request is compared. Where it matters to no
# client, Kafka's hash tables decide.
TWICE = frozenset({"CreateTopics", "DeleteTopics", "CreatePartitions"})


def _distinct(values: list) -> list:
    """The first of each name."""
    kept: dict[object, object] = {}
    for value in values:
        names = getattr(type(value), "__struct_fields__", ())
        named = [repr(getattr(value, name)) for name in IDENTITIES if name in names]
        kept.setdefault(" ".join(named) if named else repr(value), value)
    return list(kept.values())


class Generator:
    """Draws one request of an API's version; `pools` take precedence over POOLS."""

    def __init__(self, draw, api_key: int, version: int, pools: dict[str, list[object]] | None = None) -> None:
        self._draw, self._version = draw, version
        self._api = KNOWN[api_key].name
        self._class = message_class(api_key, "Request")
        self._pools = pools or {}
        self._is_tame = draw(st.booleans())  # mostly the first of each pool: an acceptable request

    def request(self) -> object:
        return self._struct(message_of(self._class)[1], self._class)

    def _struct(self, spec: Struct, cls: type) -> object:
        values = {}
        for field in spec.fields:
            if self._version in field.versions and field.tag < OWN_TAG_MIN:
                values[field.name] = self._field(field)
        if {"name", "value"} <= values.keys() and self._api in (
            "CreateTopics",
            "AlterConfigs",
            "IncrementalAlterConfigs",
        ):
            values["name"], values["value"] = self._draw(st.sampled_from(_CONFIGS[:1] if self._is_tame else _CONFIGS))
        if values.get("resource_type", 2) != 2 and "resource_name" in values:
            values["resource_name"] = self._draw(st.sampled_from(["1", "1", "", "9", "x"]))
            # Complete lists of brokers' own settings differ between the two programs.
            if "configuration_keys" in values:
                values["configuration_keys"] = self._draw(
                    st.sampled_from([["num.partitions"], ["message.max.bytes", "no.such"]])
                )
        return cls(**values)

    def _field(self, field: Field) -> object:
        pool = self._pool(field)
        if field.is_array:
            if self._version in field.nullable and (pool is None or None not in pool) and self._rarely(8):
                return None
            if self._is_tame and field.name == "assignments" and self._api != "SyncGroup":
                return []
            size = 1 if self._is_tame else self._draw(st.sampled_from([0, 1, 1, 1, 1, 2, 2, 3]))
            values = [self._value(field, pool) for _ in range(size)]
            return values if self._api in TWICE else _distinct(values)
        return self._value(field, pool)

    def _value(self, field: Field, pool: list[object] | None) -> object:
        if pool is not None and field.type in INTEGERS and isinstance(pool[0], str):
            pool = None  # another field of this name, in another struct
        nullable = self._version in field.nullable
        if field.struct is not None:
            if (nullable and not field.is_array and self._draw(st.booleans())) or self._is_rare(field):
                return None
            return self._struct(field.struct, getattr(self._class, field.struct.name))
        if pool is None and nullable and not field.is_array and self._rarely(4):
            return None
        if pool is None:
            return self._plain(field)
        value = pool[0] if self._is_tame and not self._rarely(8) else self._draw(st.sampled_from(pool))
        return value if value is not None or nullable else field.default if field.default is not None else ""

    def _is_rare(self, field: Field) -> bool:
        return not field.is_array and field.default is None and field.tag >= 0

    def _rarely(self, one_of: int) -> bool:
        return self._draw(st.sampled_from([False] * (one_of - 1) + [True]))

    def _pool(self, field: Field) -> list[object] | None:
        if field.name in self._pools:
            return self._pools[field.name]
        found = POOLS.get((self._api, field.name), POOLS.get(field.name))
        if field.type == "records":
            return BATCHES
        if field.name == "resource_name":
            return [A, A, A, B, MISSING, "", "bad name!"]
        if self._api in CHANGING and found in (_SEEN_TOPICS, _TOPIC_IDS):
            return (
                _OWN_TOPICS
                if found is _SEEN_TOPICS
                else [value for value in found if value != Ref("topic_id", LIBRARY)]
            )
        return found

    def _plain(self, field: Field) -> object:
        if field.type == "bool":
            return self._draw(st.booleans())
        if field.type == "string":
            return self._draw(st.sampled_from(["", "text", "ä" * 3]))
        if field.type in ("bytes", "records"):
            return self._draw(st.sampled_from([b"", b"bytes"]))
        if field.type == "uuid":
            return self._draw(st.sampled_from([NO_UUID, UNKNOWN_ID]))
        if field.type == "float64":
            return self._draw(st.sampled_from([0.0, 1.5, -1.0]))
        bits = FIXED[field.type][1] * 8
        return self._draw(st.sampled_from([field.default or 0, 0, 1, 2 ** (bits - 1) - 1]))
