"""The encoded records of share groups: GroupCoordinatorRecordSerde of Apache Kafka 4.2.0 reads
these bytes, and writes the same.
"""

from __future__ import annotations

import pytest

from mqd.coordinator.actions import KeyValue
from mqd.coordinator.group.share import records
from mqd.coordinator.group.share.records import CurrentAssignment, Description, States

A, B, C = bytes(16), bytes(range(16)), b"x" * 16
STATES = States({A: (1, 2)}, {B: (0,)}, frozenset({C}), {A: "a", B: "b", C: "c"})
MEMBER = Description("r", "c", "/h", ("t", "u"))
CURRENT = CurrentAssignment(3, 2, {A: (0, 1)})

GOLDEN: dict[str, tuple[KeyValue, str, str]] = {
    "states": (
        records.states_record("grp", STATES),
        "000f0003677270",
        (
            "0000020000000000000000000000000000000002610300000001000000020002000102030405060708090a0b0c0d0e0f"
            "0262020000000000027878787878787878787878787878787802630000"
        ),
    ),
    "member": (records.member_record("grp", "m", MEMBER), "000a000367727000016d", "000002720263032f68030274027500"),
    "group": (records.group_record("grp", 3, -5), "000b0003677270", "000000000003fffffffffffffffb00"),
    "target_epoch": (records.target_epoch_record("grp", 3), "000c0003677270", "00000000000300"),
    "target": (
        records.target_record("grp", "m", {A: (0, 1)}),
        "000d000367727000016d",
        "000002000000000000000000000000000000000300000000000000010000",
    ),
    "current": (
        records.current_record("grp", "m", CURRENT),
        "000e000367727000016d",
        "000000000003000000020002000000000000000000000000000000000300000000000000010000",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_encoding_is_kafkas(name: str) -> None:
    record, key, value = GOLDEN[name]
    assert record == (bytes.fromhex(key), bytes.fromhex(value))


def test_they_are_read_back() -> None:
    value = {name: bytes.fromhex(value) for name, (_, _, value) in GOLDEN.items()}
    assert records.decode_states(value["states"]) == STATES
    assert records.decode_member(value["member"]) == MEMBER
    assert records.decode_group(value["group"]) == (3, -5)
    assert records.decode_target_epoch(value["target_epoch"]) == 3
    assert records.decode_target(value["target"]) == {A: (0, 1)}
    assert records.decode_current(value["current"]) == CURRENT
    keys = [records.decode_key(bytes.fromhex(key)) for _, key, _ in GOLDEN.values()]
    assert keys == [(15, ""), (10, "m"), (11, ""), (12, ""), (13, "m"), (14, "m")]


@pytest.mark.parametrize("name", GOLDEN)
def test_truncated_records_are_a_value_error(name: str) -> None:
    value = bytes.fromhex(GOLDEN[name][2])
    decode = getattr(records, f"decode_{name}")
    for size in range(len(value)):
        with pytest.raises(ValueError):
            decode(value[:size])
