"""The records selected by a view's filter, according to its page, and random filters, records and
batches. This model evaluates the parsed filter; native code evaluates the compiled one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random

from mqd.base.views import conditions as view_filter
from mqd.base.views.conditions import Combine, Compare, Node
from mqd.native.core import ffi, lib
from mqd.protocol.records import Record, encode_batch

NAMES = ("tag", "region", "n", "odd name")
TEXTS = ("", "a", "b", "ab", "eu-west", "eu", "it's", "5", "-7", "07", "12x", "\u00e9", "1" * 19)
NUMBERS = (-7, 0, 5, 10**18 - 1)
CODECS = ("none", "gzip", "lz4", "zstd")  # snappy's library is not installed everywhere
_COMPARE = {
    "=": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "LIKE": lambda a, b: a.startswith(b),
    "NOT LIKE": lambda a, b: not a.startswith(b),
}


def selects(node: Node, headers: Sequence[tuple[str, bytes | None]]) -> bool:
    if isinstance(node, Combine):
        found = [selects(operand, headers) for operand in node.operands]
        return {"AND": all(found), "OR": any(found), "NOT": not found[0]}[node.operator]
    named = dict(headers)
    if node.operator == view_filter.EXISTS:
        return node.name in named
    value = named.get(node.name)
    if value is None:
        return False
    if isinstance(node.value, int):
        return bool(re.fullmatch(rb"-?[0-9]{1,18}", value)) and _COMPARE[node.operator](int(value), node.value)
    return _COMPARE[node.operator](value, node.value.encode())


def random_filter(rng: Random, depth: int = 3) -> str:
    if depth and rng.random() < 0.6:
        left, right = random_filter(rng, depth - 1), random_filter(rng, depth - 1)
        return rng.choice((f"({left} AND {right})", f"{left} or ({right})", f"NOT ({left})", f"({left}) AND {right}"))
    name = rng.choice(NAMES)
    shown = f'"{name}"' if " " in name or rng.random() < 0.2 else name
    text = "'" + rng.choice(TEXTS).replace("'", "''") + "'"
    value = rng.choice((text, str(rng.choice(NUMBERS))))
    return rng.choice(
        (
            f"{shown} {rng.choice(('=', '!=', '<>', '<', '<=', '>', '>='))} {value}",
            f"{shown} {rng.choice(('IN', 'not in'))} ({value}, {text})",
            f"{shown} {rng.choice(('LIKE', 'NOT LIKE'))} {text[:-1]}%'",
            f"EXISTS {shown}",
        )
    )


def random_headers(rng: Random) -> list[tuple[str, bytes | None]]:
    return [
        (rng.choice(NAMES), None if rng.random() < 0.1 else rng.choice(TEXTS).encode())
        for _ in range(rng.choice((0, 1, 2, 3, 6)))
    ]


def random_batches(rng: Random, count: int) -> list[tuple[bytes, list[Record]]]:
    """Batches with their records; the last offset may be beyond the last record, as in a compacted
    log.
    """
    batches, offset = [], rng.randrange(100)
    for number in range(count):
        records, at = [], offset
        for _ in range(rng.choice((0, 1, 2, 5, 20))):
            at += rng.choice((0, 0, 1, 3))
            records.append(Record(b"v" * rng.randrange(40), b"k", 1000 + rng.randrange(50), random_headers(rng), at))
            at += 1
        append_time_ms = 5000 if rng.random() < 0.2 else None
        data = encode_batch(
            records,
            base_offset=offset,
            compression=rng.choice(CODECS) if records else "none",
            producer_id=rng.choice((-1, 7)),
            partition_leader_epoch=number // 3,
            is_transactional=rng.random() < 0.3,
            log_append_time_ms=append_time_ms,
            last_offset_delta=max(0, at - offset - 1) + rng.choice((0, 0, 2)),
        )
        for record in records if append_time_ms else ():
            record.timestamp_ms = append_time_ms
        batches.append((data, records))
        offset = at + rng.choice((2, 3, 10))
    return batches


class Filtered:
    """mqd_filter_batches: `error` is Kafka's code."""

    def __init__(self, program: bytes, data: bytes, from_offset: int, output_bytes_max: int) -> None:
        out = ffi.new("struct mqd_filtered *")
        self.error = lib.mqd_filter_batches(program, len(program), data, len(data), from_offset, output_bytes_max, out)
        self.data = ffi.buffer(out.bytes, out.size_bytes)[:] if out.bytes else b""
        self.next_offset = out.next_offset
        self.empty = ffi.buffer(out.empty)[:] if out.has_empty else b""
        lib.mqd_filtered_free(out)


def check(program: bytes) -> bool:
    return bool(lib.mqd_filter_check(program, len(program)))


def compared(node: Node) -> list[Compare]:
    if isinstance(node, Compare):
        return [node]
    return [one for operand in node.operands for one in compared(operand)]
