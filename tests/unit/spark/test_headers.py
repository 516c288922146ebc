"""The column `headers` as header sections: the same bytes as encoding row by row."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mqd.client.messages import decode_headers, encode_headers
from mqd.spark import headers
from tests.tiers import examples

Row = list[tuple[str, bytes | None]] | None

# on both sides of where a varint needs one more byte
SIZES = st.one_of(st.integers(0, 5), st.sampled_from([63, 64, 8191, 8192]))
TEXTS = st.one_of(st.text(max_size=8), SIZES.map(lambda size: "k" * size))
BLOBS = st.one_of(st.none(), st.binary(max_size=8), SIZES.map(lambda size: b"\0" * size))
ROWS = st.lists(st.one_of(st.none(), st.lists(st.tuples(TEXTS, BLOBS), max_size=4)), max_size=12)


def array(rows: list[Row], large: bool = False) -> pa.Array:
    text, blob, many = (
        (pa.large_string(), pa.large_binary(), pa.large_list) if large else (pa.string(), pa.binary(), pa.list_)
    )
    kind = many(pa.struct([("key", text), ("value", blob)]))
    return pa.array(
        [None if row is None else [{"key": key, "value": value} for key, value in row] for row in rows], kind
    )


def one_by_one(rows: list[Row]) -> list[bytes]:
    return [encode_headers(row) if row else b"\0" for row in rows]


@settings(deadline=None, max_examples=examples(80, 300))
@given(rows=ROWS, large=st.booleans(), before=st.integers(0, 3), behind=st.integers(0, 3))
@example(rows=[], large=False, before=0, behind=0)
@example(rows=[None, []], large=False, before=1, behind=1)
@example(rows=[[("k", b"v")] * 70, None, [("", b"")]], large=False, before=0, behind=0)
def test_the_bytes_equal_encoding_row_by_row(rows: list[Row], large: bool, before: int, behind: int) -> None:
    around: list[Row] = [[("not", b"of it")], None, []]
    given = array(around[:before] + rows + around[:behind], large).slice(before, len(rows))
    column = headers.encode(given)
    expected = one_by_one(rows)
    assert (bytes(column.data), column.sizes.tolist()) == (b"".join(expected), [len(one) for one in expected])
    assert [decode_headers(section) if section != b"\0" else [] for section in column.items()] == [
        row or [] for row in rows
    ]


def test_rows_in_another_order() -> None:
    rows: list[Row] = [[("a", b"1")], None, [("b", None), ("c", b"3" * 200)]]
    column = headers.encode(array(rows).take(pa.array([2, 0, 1, 2])))
    assert column.items() == [one_by_one(rows)[index] for index in (2, 0, 1, 2)]


def test_a_header_without_key_is_refused() -> None:
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    for wrong in ([{"key": None, "value": b"v"}], [None], [{"key": "k", "value": None}, {"key": None, "value": None}]):
        with pytest.raises(headers.HeadersError, match="1 headers are null, or have a null key"):
            headers.encode(pa.array([wrong, None], kind))
