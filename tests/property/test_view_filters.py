"""Filters of views: native code compared with view_model.py, and proof that the comparison finds
bugs.
"""

from __future__ import annotations

from random import Random

import pytest

from mqd.base.views import conditions as view_filter
from mqd.base.views.conditions import FilterError, compile_filter, parse
from mqd.protocol.records import BatchHeader, decode_batch, decode_batch_header, iterate_batches
from tests.property.view_model import CODECS, Filtered, check, random_batches, random_filter, selects
from tests.tiers import quick

SEEDS_OF_A_SHARE = 150


def run(seed: int) -> int:
    """V1 for one random filter over random batches. Returns the number of selected records."""
    rng = Random(seed)
    text = random_filter(rng)
    node, program = parse(text), compile_filter(text)
    assert check(program), text
    batches = random_batches(rng, rng.randrange(1, 8))
    data = b"".join(one for one, _ in batches)
    offset = decode_batch_header(data).base_offset + rng.randrange(12)
    end = max(header.last_offset for header, _ in iterate_batches(data)) + 1
    wanted = [one for _, records in batches for one in records if one.offset >= offset and selects(node, one.headers)]
    originals = {decode_batch_header(one).base_offset: (decode_batch_header(one), one) for one, _ in batches}
    found = []
    while offset < end:
        answer = Filtered(program, data, offset, rng.choice((1, 200, 1 << 20)))
        assert answer.error == 0, text
        for header, batch in iterate_batches(answer.data):
            records = list(decode_batch(batch))
            found += records
            _same_batch(*originals[header.base_offset], header, bytes(batch), len(records))
        if answer.empty:
            header = decode_batch_header(answer.empty)
            assert header.last_offset + 1 == answer.next_offset
            _same_batch(*originals[header.base_offset], header, answer.empty, 0)
            assert list(decode_batch(answer.empty)) == []
        assert answer.next_offset > offset
        offset = answer.next_offset
    assert found == wanted, text
    return len(found)


def _same_batch(before: BatchHeader, stored: bytes, header: BatchHeader, batch: bytes, count: int) -> None:
    for field in ("last_offset_delta", "producer_id", "producer_epoch", "base_sequence", "partition_leader_epoch"):
        assert getattr(header, field) == getattr(before, field)
    assert header.is_transactional == before.is_transactional
    if count == before.record_count > 0:
        assert batch == stored


@pytest.mark.parametrize("share_number", quick(list(range(40)), [0]))
def test_native_code_matches_the_model(share_number: int) -> None:
    first = share_number * SEEDS_OF_A_SHARE
    assert sum(run(seed) for seed in range(first, first + SEEDS_OF_A_SHARE)) > 300


# -- planted bugs ----------------------------------------------------------------------------------


def _finds() -> bool:
    try:
        for seed in range(400):
            run(seed)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_COMBINING_CODES", {"AND": 17, "OR": 16, "NOT": 18}),
        ("_TEXT_OPERATORS", ("=", "!=", "<=", "<", ">", ">=", "LIKE", "NOT LIKE")),
        ("_TEXT_OPERATORS", ("=", "!=", "<", "<=", ">", ">=", "NOT LIKE", "LIKE")),
        ("OPERATORS", ("!=", "=", "<", "<=", ">", ">=")),
        ("_NUMBER_CODE_FIRST", 11),
    ],
)
def test_a_wrong_instruction_is_found(name: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_filter, name, value)
    assert _finds()


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the filter ends where the name of a header"),
        ("tag", "the filter ends where =, !="),
        ("tag = ", "the filter ends where 'text' or a whole number"),
        ("tag = a", "there is 'a' at character 7"),
        ("tag = 'a' region = 'b'", "there is 'region' at character 11 where AND, OR or the end"),
        ("(tag = 'a'", "the filter ends where ')'"),
        ("tag IN ()", "there is ')' at character 9"),
        ("tag IN ('a'", "the filter ends where ',' or ')'"),
        ("tag LIKE '%a'", "must be a prefix followed by %"),
        ("tag LIKE 'a_%'", "must be a prefix followed by %"),
        ("tag NOT = 'a'", "where IN or LIKE should be"),
        ("n = 1.5", "'1.5' at character 5 cannot be read"),
        ("n = " + "1" * 19, "more than 18 digits"),
        ("tag = 'a", "cannot be read"),
        ("tag = 'a' ; x", "';' at character 11 cannot be read"),
        ("(" * 10_000, "more than 4096 bytes"),
        ("(" * 4_000, "nested more than 64 deep"),
        (" AND ".join(["EXISTS a"] * 33), "65 comparisons and operators, at most 64"),
        ("EXISTS " + "x" * 256, "more than 255 bytes"),
    ],
)
def test_invalid_filters_are_refused_with_the_position(text: str, message: str) -> None:
    with pytest.raises(FilterError) as caught:
        parse(text)
    assert message in str(caught.value)


def test_the_largest_filter_is_compiled_and_accepted() -> None:
    name = "x" * 255
    assert check(compile_filter(f"{name} IN ({', '.join(['7'] * 32)})"))
    assert check(compile_filter(" OR ".join([f"{name} = '{'y' * 30}'"] * 13)))
    assert not check(b"") and not check(bytes([1, 1])) and not check(compile_filter("EXISTS a") * 2)


@pytest.mark.parametrize("codec", CODECS)
def test_damaged_batches_are_reported(codec: str) -> None:
    from mqd.protocol.records import Record, encode_batch

    data = bytearray(encode_batch([Record(b"v" * 20, headers=[("a", b"1")])] * 3, compression=codec))
    data[63:75] = b"\xff" * 12
    assert Filtered(compile_filter("EXISTS a"), bytes(data), 0, 1 << 20).error == 2
    assert Filtered(compile_filter("EXISTS a"), bytes(data[:70]), 0, 1 << 20).error == 2
