"""GroupMetadata in Kafka's layout, and invalid bytes."""

from __future__ import annotations

import random

import pytest

from mqd.coordinator.group.classic import records
from mqd.coordinator.group.classic.core import ClassicGroup
from mqd.coordinator.group.classic.records import GroupRecord, MemberRecord
from mqd.coordinator.group.settings import ClassicSettings
from mqd.coordinator.log import BATCH_BYTES_MAX

MEMBERS = (
    MemberRecord("m-1", None, "client", "/10.0.0.1", 60_000, 10_000, b"sub", b"assigned"),
    MemberRecord("i-2", "i", "", "/10.0.0.2", 5_000, 6_000, b"", b""),
)
TWIN = MemberRecord("i-3", "i", "", "", 5_000, 6_000, b"", b"")
GROUP = GroupRecord("consumer", 7, "range", "m-1", 1234, MEMBERS)
VERSION_0 = (
    b"\0\0"
    b"\0\x08consumer"
    b"\0\0\0\x07"
    b"\0\x05range"
    b"\0\x03m-1"
    b"\0\0\0\x01"
    b"\0\x03m-1"
    b"\0\x06client"
    b"\0\x09/10.0.0.1"
    b"\0\0\x27\x10"
    b"\0\0\0\x03sub"
    b"\0\0\0\x08assigned"
)
VERSION_3_EMPTY = b"\0\x03\0\x08consumer\0\0\0\x08\xff\xff\xff\xff\0\0\0\0\0\0\x04\xd2\0\0\0\0"
VERSION_4 = (
    b"\0\x04"
    b"\x09consumer"
    b"\0\0\0\x07"
    b"\x06range"
    b"\x04m-1"
    b"\0\0\0\0\0\0\x04\xd2"
    b"\x02"
    b"\x04m-1"
    b"\0"
    b"\x07client"
    b"\x0a/10.0.0.1"
    b"\0\0\xea\x60"
    b"\0\0\x27\x10"
    b"\x04sub"
    b"\x09assigned"
    b"\0"
    b"\x01\x63\x02\xff\xff"
)


def test_values_are_encoded_and_decoded() -> None:
    assert records.decode_value(records.encode_value(GROUP)) == GROUP


def test_the_encoding_is_kafkas() -> None:
    assert records.encode_key("gr") == b"\0\x02\0\x02gr"
    assert records.encode_value(GroupRecord("consumer", 8, None, None, 1234, ())) == VERSION_3_EMPTY


def test_older_and_newer_versions_are_read() -> None:
    old = records.decode_value(VERSION_0)
    assert (
        old.state_since_ms,
        old.members[0].group_instance_id,
        old.members[0].rebalance_timeout_ms,
        old.members[0].assignment,
    ) == (-1, None, 10_000, b"assigned")
    new = records.decode_value(VERSION_4)
    assert new.members == (MEMBERS[0],) and new.state_since_ms == 1234


@pytest.mark.parametrize("value", [VERSION_0, VERSION_3_EMPTY, VERSION_4, records.encode_value(GROUP)])
def test_damaged_values_are_refused_or_read_but_never_more(value: bytes) -> None:
    for size in range(len(value)):
        with pytest.raises(ValueError):
            records.decode_value(value[:size])
    with pytest.raises(ValueError):
        records.decode_value(value + b"\0")
    rng = random.Random(1)
    for _ in range(2_000):
        damaged = bytearray(value)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        core = ClassicGroup("g", ClassicSettings())
        try:
            core.replay(bytes(damaged))
        except ValueError:
            assert core.is_empty and not core.is_persisted
            continue
        core.on_loaded(1)
        core.check()


@pytest.mark.parametrize(
    "change",
    [
        {"leader": "stranger"},
        {"leader": None},
        {"protocol": None},
        {"members": (MEMBERS[0], MEMBERS[0])},
        {"members": (*MEMBERS, TWIN)},
    ],
)
def test_a_record_that_contradicts_itself_changes_nothing(change: dict) -> None:
    core = ClassicGroup("g", ClassicSettings())
    core.replay(records.encode_value(GROUP))
    fields = {name: getattr(GROUP, name) for name in GROUP.__struct_fields__} | change
    with pytest.raises(ValueError):
        core.replay(records.encode_value(GroupRecord(**fields)))
    assert core.generation == 7 and len(core.members) == 2


def test_the_largest_generation_fits_into_a_batch() -> None:
    assert ClassicSettings().record_bytes_max + 4096 <= BATCH_BYTES_MAX


def test_topics_of_a_subscription() -> None:
    assert records.subscribed_topics(b"\0\1\0\0\0\2\0\1a\0\2bc and more") == ["a", "bc"]
    for data in (
        b"",
        b"\0\1",
        b"\0\1\0\0\0\2\0\1a",
        b"\0\1\xff\xff\xff\xff",
        b"\0\1\x7f\0\0\0aa",
        b"\0\1\0\0\0\1\0\1\xff",
    ):
        with pytest.raises(ValueError):
            records.subscribed_topics(data)
