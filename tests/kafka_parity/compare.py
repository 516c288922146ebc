"""Two outcomes compared: normalised, then every field; differences are looked up in the table of
allowed ones.
"""

from __future__ import annotations

import dataclasses
import re
import time

import msgspec

from mqd.protocol import KNOWN, ProtocolError
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import message_of
from mqd.protocol.records import HEADER_BYTES, decode_batch_header
from mqd.protocol.schema.language import OWN_TAG_MIN, Versions
from tests.kafka_parity.model import PREFIX, World
from tests.kafka_parity.sides import Outcome

ANY = "any"
RECENT_MS = 60_000
ON_RESEND = " on resend"
# Fields that identify an element of a list, in order of precedence.
IDENTITIES = (
    "name", "topic", "topic_name", "topic_id", "group_id", "transactional_id", "key", "resource_name", "member_id",
    "entity_type", "partition_index", "partition", "partition_id", "index", "node_id", "broker_id", "api_key", "user",
)  # fmt: skip


class Allowed(msgspec.Struct, frozen=True):
    """One line of the table. `field` is a path as in "topics[].partitions[].error_code", or a
    suffix of one when it begins with "*."; `kafka` and `mqd` are the only values for which it is
    allowed. `order`: the list may have another order. `said`: a part of Kafka's or mqd's error
    message beside the field, where the values alone would allow too much.
    """

    api: str
    versions: str
    field: str
    reason: str
    kafka: object = ANY
    mqd: object = ANY
    order: bool = False
    said: str = ""

    def covers(self, api: str, version: int, field: str) -> bool:
        if self.api not in ("*", api) or version not in Versions.parse(self.versions):
            return False
        return self.field == field or (self.field.startswith("*.") and _ends(field, self.field[2:]))


def _ends(field: str, name: str) -> bool:
    return field == name or field.endswith(("." + name, "]." + name))


@dataclasses.dataclass(frozen=True)
class Difference:
    api: str
    version: int
    field: str
    kafka: object
    mqd: object
    # Kafka's and mqd's error messages, if the field is an error's code
    messages: tuple[str, ...] = dataclasses.field(default=(), compare=False)


class Table:
    """The allowed differences, and how often each occurred."""

    def __init__(self, entries: tuple[Allowed, ...]) -> None:
        self.entries = entries
        self.used = dict.fromkeys(range(len(entries)), 0)

    def allows(self, difference: Difference) -> bool:
        return any(
            self._use(number)
            for number, entry in enumerate(self.entries)
            if not entry.order
            and entry.covers(difference.api, difference.version, difference.field)
            and entry.kafka in (ANY, difference.kafka)
            and entry.mqd in (ANY, difference.mqd)
            and (not entry.said or any(entry.said in message for message in difference.messages))
        )

    def is_unordered(self, api: str, version: int, field: str) -> int | None:
        for number, entry in enumerate(self.entries):
            if entry.order and entry.covers(api, version, field):
                return number
        return None

    def used_entries(self) -> list[Allowed]:
        return [self.entries[number] for number, count in self.used.items() if count]

    def unused(self) -> list[Allowed]:
        return [self.entries[number] for number, count in self.used.items() if not count]

    def _use(self, number: int) -> bool:
        self.used[number] += 1
        return True

    def met_order(self, number: int) -> None:
        self._use(number)


def differences(
    api_key: int, version: int, outcomes: tuple[Outcome, Outcome], worlds: tuple[World, World], table: Table
) -> list[Difference]:
    """The differences that are not allowed. The first outcome is Kafka's."""
    return compared(api_key, version, outcomes, worlds, table)[0]


def compared(
    api_key: int, version: int, outcomes: tuple[Outcome, Outcome], worlds: tuple[World, World], table: Table
) -> tuple[list[Difference], list[Difference]]:
    """The differences that are not allowed, and those that are."""
    api = KNOWN[api_key].name
    kafka, mqd = outcomes
    if kafka.kind != mqd.kind or kafka.kind == "undecodable":
        found = [Difference(api, version, "outcome", _kind(kafka), _kind(mqd))]
    elif kafka.kind == "answered":
        walk = _Walk(api, version, table)
        walk.compare(normal(kafka.body, version, worlds[0]), normal(mqd.body, version, worlds[1]), "")
        found = walk.found
    else:
        found = []
    verdicts = [(difference, table.allows(difference)) for difference in found]
    return [one for one, is_allowed in verdicts if not is_allowed], [one for one, is_allowed in verdicts if is_allowed]


def _kind(outcome: Outcome) -> str:
    if outcome.kind == "undecodable":
        return f"undecodable: {outcome.body}"
    code = getattr(outcome.body, "error_code", 0)
    return f"{outcome.kind} with error {code}" if code else outcome.kind


class _Walk:
    def __init__(self, api: str, version: int, table: Table) -> None:
        self.api, self.version, self.table = api, version, table
        self.found: list[Difference] = []

    def compare(self, kafka: object, mqd: object, path: str) -> None:
        if isinstance(kafka, dict) and isinstance(mqd, dict):
            # With another error code the other fields are irrelevant.
            codes = [name for name in kafka if name.endswith("error_code") and kafka[name] != mqd[name]]
            for name, value in kafka.items() if not codes else [(name, kafka[name]) for name in codes]:
                what = f"{name}{ON_RESEND}" if name in codes and self._is_resend(kafka) else name
                where = f"{path}.{what}" if path else what
                if name in codes:
                    messages = tuple(str(side.get("error_message") or "") for side in (kafka, mqd))
                    self.found.append(Difference(self.api, self.version, where, value, mqd[name], messages))
                else:
                    self.compare(value, mqd[name], where)
        elif isinstance(kafka, list) and isinstance(mqd, list):
            self._compare_lists(kafka, mqd, path)
        elif kafka != mqd:
            self.found.append(Difference(self.api, self.version, path, kafka, mqd))

    def _is_resend(self, kafka: dict) -> bool:
        """Kafka returns the timestamp only for a duplicate batch: topics of cases keep the
        producer's.
        """
        return self.api == "Produce" and kafka.get("error_code") == 0 and kafka.get("log_append_time_ms", -1) >= 0

    def _compare_lists(self, kafka: list, mqd: list, path: str) -> None:
        if (self.api, path) == ("Fetch", "responses"):
            kafka, mqd = _joined(_named_with_partitions(kafka)), _joined(mqd)
        if (self.api, path) in (("AlterClientQuotas", "entries"), ("DescribeClientQuotas", "entries")):
            kafka, mqd = _by_entity(kafka), _by_entity(mqd)
        names = [_identity(item) for item in kafka], [_identity(item) for item in mqd]
        is_same_set = sorted(names[0]) == sorted(names[1])
        if names[0] != names[1] and not is_same_set and not _are_named(kafka + mqd):
            self.found.append(Difference(self.api, self.version, path, kafka, mqd))
            return
        number = self.table.is_unordered(self.api, self.version, path)
        is_twice = number is not None and all(names[0]) and len(set(names[0])) < len(names[0])
        if names[0] != names[1] or is_twice:
            if is_same_set and number is None:
                self.found.append(Difference(self.api, self.version, f"{path}[] order", names[0], names[1]))
            elif number is not None and is_same_set and names[0] != names[1]:
                self.table.met_order(number)
            kafka, mqd = self._paired(kafka, mqd, names, path)
        for one, other in zip(kafka, mqd, strict=True):
            self.compare(one, other, f"{path}[]")

    def _paired(self, kafka: list, mqd: list, names: tuple[list[str], list[str]], path: str) -> tuple[list, list]:
        """Pairs elements with the same name, of a duplicate name the equal ones first, then those
        with the same error; unpaired elements are a difference.
        """
        pairs, left = ([], []), list(zip(names[1], mqd, strict=True))
        alone = list(zip(names[0], kafka, strict=True))
        for key in (_whole, _with_code, _name):
            for item in list(alone):
                match = next((other for other in left if key(other) == key(item)), None)
                if match is not None:
                    alone.remove(item)
                    left.remove(match)
                    pairs[0].append(item[1])
                    pairs[1].append(match[1])
        self.found += [Difference(self.api, self.version, f"{path}[] only Kafka", name, None) for name, _ in alone]
        self.found += [Difference(self.api, self.version, f"{path}[] only mqd", None, name) for name, _ in left]
        return pairs


def _named_with_partitions(topics: list) -> list:
    """After an internal exception Kafka repeats every topic of the request, including those without
    partitions, which it otherwise omits.
    """
    codes = {partition["error_code"] for topic in topics for partition in topic["partitions"]}
    return [topic for topic in topics if topic["partitions"]] if codes == {ErrorCode.UNKNOWN_SERVER_ERROR} else topics


def _joined(topics: list) -> list:
    """Kafka repeats a topic when its partitions are not adjacent."""
    found: dict[str, dict] = {}
    for topic in topics:
        known = found.setdefault(_identity(topic), {**topic, "partitions": []})
        known["partitions"] = known["partitions"] + topic["partitions"]
    return list(found.values())


def _by_entity(entries: list[dict]) -> list[dict]:
    """Kafka responds in hash table order, and the entity is the only name of an entry."""
    return sorted(entries, key=lambda entry: sorted(map(repr, entry["entity"])))


def _whole(named: tuple[str, object]) -> object:
    return named


def _with_code(named: tuple[str, object]) -> object:
    name, item = named
    return name, item.get("error_code") if isinstance(item, dict) else None


def _name(named: tuple[str, object]) -> object:
    return named[0]


def _are_named(items: list) -> bool:
    return any(isinstance(item, dict) for item in items)


def _identity(item: object) -> str:
    if not isinstance(item, dict):
        return repr(item)
    named = [repr(item[name]) for name in (*IDENTITIES, "resource_type") if item.get(name) not in (None, "")]
    return " ".join(named[:3])


# the time of the change
CLOCKS = frozenset({
    "timestamp", "transaction_start_time_ms", "issue_timestamp_ms", "issue_timestamp", "last_fetch_timestamp",
    "last_caught_up_timestamp", "last_timestamp",
})  # fmt: skip
UUID_TAIL = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def normal(value: object, version: int, world: World, name: str = "") -> object:
    """Plain values, with broker-assigned values replaced by symbols."""
    if isinstance(value, msgspec.Struct):
        _, spec = message_of(type(value))
        return {
            field.name: normal(getattr(value, field.name), version, world, field.name)
            for field in spec.fields
            if version in field.versions and field.tag < OWN_TAG_MIN
        }
    if isinstance(value, list):
        return [normal(item, version, world, name) for item in value if not _is_foreign(item, world)]
    if name == "records" and value:
        return _batches(value, world)
    if isinstance(value, str):
        symbol = world.symbol(value)
        return symbol or UUID_TAIL.sub("<uuid>", value.replace(world.prefix, PREFIX) if world.prefix else value)
    if name == "session_id" and value:
        return "<session>"
    if isinstance(value, bytes) or name in ("producer_id", "port"):
        return world.symbol(value) or value
    if name in CLOCKS and abs(value - time.time_ns() // 1_000_000) < RECENT_MS:
        return "<now>"
    return value


NAMES = ("name", "topic", "group_id", "transactional_id", "resource_name")
OF_A_CASE = re.compile(r"(\w+\.)?[a-z]+\.\d+\.\d+r?-")  # the prefixes assigned by runner.py


def _is_foreign(item: object, world: World) -> bool:
    """Of another case: lists of everything contain leftovers of earlier cases."""
    return any(
        isinstance(name := getattr(item, field, None), str)
        and OF_A_CASE.match(name) is not None
        and not name.startswith(world.prefix)
        for field in NAMES
    )


def _batches(data: bytes, world: World) -> object:
    """A consumer's view of the bytes of a Fetch: without an incomplete last batch, which Kafka
    sends at max_bytes.
    """
    try:
        seen, position = [], 0
        while position + HEADER_BYTES <= len(data):
            header = decode_batch_header(data, position)
            if position + header.size_bytes > len(data):
                break
            seen.append(
                {
                    "base_offset": header.base_offset,
                    "last_offset": header.last_offset,
                    "leader_epoch": header.partition_leader_epoch,
                    "attributes": header.attributes,
                    "producer": world.symbol(header.producer_id) or header.producer_id,
                    "producer_epoch": header.producer_epoch,
                    "base_sequence": header.base_sequence,
                    "count": header.record_count,
                    "max_timestamp": None if header.is_control else header.max_timestamp_ms,
                    "records": "" if header.is_control else data[position + 61 : position + header.size_bytes].hex(),
                }
            )
            position += header.size_bytes
        return seen
    except ProtocolError as error:
        return f"unreadable: {error}"


def learn(api_key: int, outcome: Outcome, world: World) -> None:
    """Records topic ids by name, and members' ids, from any response."""
    if outcome.kind != "answered":
        return
    for topic in getattr(outcome.body, "topics", None) or []:
        identity, name = getattr(topic, "topic_id", None), getattr(topic, "name", None)
        if identity and name:
            world.name(identity, f"<id of {name.replace(world.prefix, PREFIX) if world.prefix else name}>")
