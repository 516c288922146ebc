"""Well-formed requests with random values, of every version of every advertised API, generated from
the protocol's schema.

Values come from small pools, so that requests interact: groups, members, transactional ids,
producers and topics recur, and values in responses (member ids, generations, producer ids, epochs)
are added to the pools. Other values are boundary numbers, unknown strings, or null.

Excluded, because the bystanders of the test depend on it: their topics and groups, the broker's own
configuration, the feature levels, and the quotas of others.
"""

from __future__ import annotations

import random
import struct
import time

from mqd.protocol.headers import SUPPORTED
from mqd.protocol.messages import message_class, message_of
from mqd.protocol.records import Record, encode_batch
from mqd.protocol.schema.language import Field, Struct

TOPICS = ("random-0", "random-1", "random-2")
GROUPS = ("g0", "g1", "g2", "g3", "g4")
TRANSACTIONAL_IDS = ("t0", "t1", "t2", "t3")
ASSIGNOR_NAMES = ("uniform", "range", "sticky", "\u00fcnknown", "")
BOUNDS = {
    8: (-128, -2, -1, 0, 1, 2, 3, 127),
    16: (-32768, -2, -1, 0, 1, 2, 32766, 32767),
    32: (-(2**31), -2, -1, 0, 1, 2, 3, 2**31 - 1),
    64: (-(2**63), -2, -1, 0, 1, 2, 7, 2**63 - 1),
}
STRINGS = (
    "",
    "x",
    "y" * 300,
    "\u00e4\u2603\U0001f600",
    "a\nb\0c",
    "__consumer_offsets",
    "__transaction_state",
    "../../etc",
    ".",
    "z" * 9000,
    "q" * 32767,
)
CONFIG_NAMES = (
    "retention.ms",
    "cleanup.policy",
    "max.message.bytes",
    "segment.bytes",
    "consumer.session.timeout.ms",
    "consumer.heartbeat.interval.ms",
    "nothing.of.the.kind",
    "",
)
CONFIG_VALUES = (
    "1",
    "-1",
    "0",
    "compact",
    "delete",
    "compact,delete",
    "1000000",
    "99999999999999999999",
    "text",
    "",
    None,
)
RESOURCE_TOPIC, RESOURCE_GROUP = 2, 32
POOL_MAX = 12


def _subscription(*topics: str) -> bytes:
    names = b"".join(struct.pack(">h", len(topic)) + topic.encode() for topic in topics)
    return struct.pack(">hi", 1, len(topics)) + names + struct.pack(">ii", -1, 0)


class Requests:
    """One stream of requests; the same seed gives the same stream as long as the broker's responses
    are the same.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.pools: dict[str, list] = {
            "topic": list(TOPICS),
            "topic_id": [bytes(16), b"\1" * 16],
            "group": list(GROUPS),
            "member_id": ["", "stranger"],
            "transactional_id": list(TRANSACTIONAL_IDS),
            "producer_id": [-1, 0, 1, 1000],
            "producer_epoch": [-1, 0, 1, 2],
            "generation": [-1, 0, 1, 2],
            "instance_id": ["one", "two"],
            "regex": [".*", "random-.", "(", "a{999}{999}"],
        }

    def next(self) -> tuple[int, int, object]:
        """(api key, version, request)."""
        key = self.random.choice(sorted(SUPPORTED))
        spec = SUPPORTED[key]
        version = self.random.randint(spec.min_version, spec.max_version)
        return key, version, self.make(key, version)

    def make(self, key: int, version: int) -> object:
        cls = message_class(key, "Request")
        message = self._struct(message_of(cls)[1], cls, cls, version, cls.__name__)
        self._spare_bystanders(cls.__name__, message)
        return message

    def learn(self, response: object) -> None:
        """Adds values from a response to the pools."""
        for name, pool in (
            ("member_id", "member_id"),
            ("generation_id", "generation"),
            ("member_epoch", "generation"),
            ("producer_id", "producer_id"),
            ("producer_epoch", "producer_epoch"),
        ):
            value = getattr(response, name, None)
            if value is not None and value not in self.pools[pool]:
                self._add(pool, value)

    def _add(self, pool: str, value: object) -> None:
        known = self.pools[pool]
        known.append(value)
        if len(known) > POOL_MAX:
            del known[self.random.randrange(len(known) - 1)]

    def _spare_bystanders(self, name: str, message) -> None:
        if name == "UpdateFeaturesRequest":
            message.validate_only = True
        elif name == "CreateTopicsRequest":
            for topic in message.topics:
                topic.num_partitions = min(topic.num_partitions, 3)
        elif name == "CreatePartitionsRequest":
            for topic in message.topics:
                topic.count = min(topic.count, 4)
        elif name == "UnregisterBrokerRequest":
            message.drain = 0
        elif name == "FetchRequest":
            message.max_wait_ms = min(message.max_wait_ms, 100)
        elif name == "JoinGroupRequest" and self.random.random() < 0.9:
            message.session_timeout_ms = self.random.choice((6_000, 10_000))

    # -- values ------------------------------------------------------------------------------------

    def _struct(self, of: Struct, cls: type, root: type, version: int, path: str) -> object:
        values = {}
        for field in of.fields:
            if version not in field.versions or (field.is_tagged(version) and self.random.random() < 0.5):
                continue
            values[field.name] = self._field(field, root, version, f"{path}.{field.name}")
        return cls(**values)

    def _field(self, field: Field, root: type, version: int, path: str) -> object:
        if version in field.nullable and self.random.random() < 0.2:
            return None
        if not field.is_array:
            return self._one(field, root, version, path)
        return [self._one(field, root, version, path) for _ in range(self.random.choice((0, 1, 1, 1, 2, 3)))]

    def _one(self, field: Field, root: type, version: int, path: str) -> object:
        chance = self.random
        if field.struct is not None:
            return self._struct(field.struct, getattr(root, field.struct.name), root, version, path)
        if field.type == "bool":
            return chance.random() < 0.5
        if field.type == "uuid":
            return chance.choice(self.pools["topic_id"])
        if field.type == "float64":
            return chance.choice((0.0, -1.0, 1e6, float("inf"), float("nan"), 1e308))
        if field.type == "string":
            return self._string(field.name, path)
        if field.type == "records":
            return self._records()
        if field.type == "bytes":
            return chance.choice(
                (
                    b"",
                    b"\xff" * 9,
                    chance.randbytes(20),
                    _subscription("random-0"),
                    _subscription("random-1", "nowhere"),
                    bytes(5000),
                )
            )
        return self._number(field, path)

    def _string(self, name: str, path: str) -> str:
        chance = self.random
        if name in ("entity_name", "match"):
            return "nobody"  # a user whose quotas affect no client
        if name == "entity_type":
            return chance.choice(("client-id", "user", "ip", ""))
        if chance.random() < 0.08:
            return chance.choice(STRINGS)
        if "group_instance_id" in name or name == "instance_id":
            return chance.choice(self.pools["instance_id"])
        if "member_id" in name:
            return chance.choice(self.pools["member_id"])
        if "transactional_id" in name and "pattern" not in name:
            return chance.choice(self.pools["transactional_id"])
        if "regex" in name or "pattern" in name:
            return chance.choice(self.pools["regex"])
        if "assignor" in name or name == "protocol_name" or path.endswith("protocols.name"):
            return chance.choice(ASSIGNOR_NAMES)
        if name == "protocol_type":
            return chance.choice(("consumer", "consumer", "connect", ""))
        if name == "value" or path.endswith("configs.value"):
            return chance.choice([value for value in CONFIG_VALUES if value is not None])
        if ".configs" in path or "configuration_keys" in path:
            return chance.choice(CONFIG_NAMES)
        if (
            "group" in name
            or name in ("key", "coordinator_keys")
            or (name == "resource_name" and chance.random() < 0.3)
        ):
            return chance.choice(self.pools["group"])
        return chance.choice(self.pools["topic"])

    def _number(self, field: Field, path: str) -> int:
        chance, name = self.random, field.name
        if name == "resource_type":
            return chance.choice((RESOURCE_TOPIC, RESOURCE_TOPIC, RESOURCE_GROUP, 0, 99, -1))
        if name == "key_type":
            return chance.choice((0, 1, 2, -1))
        if chance.random() < 0.15:
            return chance.choice(
                BOUNDS[{"int8": 8, "int16": 16, "int32": 32, "int64": 64, "uint16": 16, "uint32": 32}[field.type]]
            ) & (0xFFFF if field.type == "uint16" else -1)
        if "producer_id" in name:
            return chance.choice(self.pools["producer_id"])
        if "producer_epoch" in name:
            return chance.choice(self.pools["producer_epoch"])
        if "generation" in name or name == "member_epoch":
            return chance.choice(self.pools["generation"])
        if name.endswith("timeout_ms"):
            return chance.choice((6_000, 10_000, 1_000, 500, 0, -1))
        if name == "acks":
            return -1
        if name in ("num_partitions", "count"):
            return chance.randint(1, 3)
        if name == "replication_factor":
            return chance.choice((1, -1))
        if "partition" in name or name in ("index", "partitions"):
            return chance.randint(0, 2)
        return chance.choice((0, 0, 1, 5, 65535) if field.type == "uint16" else (-1, 0, 0, 1, 5))

    def _records(self) -> bytes:
        chance = self.random
        if chance.random() < 0.2:
            return chance.randbytes(chance.randrange(100))
        records = [
            Record(key=chance.choice((None, b"k")), value=b"v", timestamp_ms=int(time.time() * 1000))
            for _ in range(chance.randint(1, 3))
        ]
        return encode_batch(
            records,
            producer_id=chance.choice(self.pools["producer_id"]),
            producer_epoch=chance.choice(self.pools["producer_epoch"]),
            base_sequence=chance.choice((-1, 0, 1, 3)),
            is_transactional=chance.random() < 0.5,
            compression=chance.choice(("none", "gzip", "lz4", "zstd", "snappy")),
        )
