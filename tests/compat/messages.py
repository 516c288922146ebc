"""The records that every client writes and every client must read back, byte for byte."""

from __future__ import annotations

import dataclasses
import random

PARTITION_COUNT = 6
BIG_BYTES = 700_000
BASE_TIMESTAMP_MS = 1_700_000_000_000
COMPRESSIONS = ("none", "gzip", "snappy", "lz4", "zstd")

Headers = tuple[tuple[str, bytes | None], ...]


@dataclasses.dataclass(frozen=True)
class Message:
    """`timestamp_ms` None: the client chooses it, and it is not compared."""

    partition: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    timestamp_ms: int | None = None

    def __repr__(self) -> str:  # pytest prints these: a large value would fill the screen
        def short(data: bytes | None) -> str:
            return repr(data) if data is None or len(data) <= 40 else f"{data[:30]!r}... ({len(data)} bytes)"

        return (
            f"Message({self.partition}, key={short(self.key)}, value={short(self.value)}, headers={self.headers},"
            f" timestamp_ms={self.timestamp_ms})"
        )


def compressible(size: int, seed: str) -> bytes:
    """Bytes of all values that compress to about a quarter."""
    source = random.Random(seed)
    block = source.randbytes(max(1, size // 4))
    return (block * 5)[:size]


def messages_of(writer: str, compression: str) -> list[Message]:
    """The messages that one client writes into the six partitions of one topic: every shape in each
    partition, a large one in the last. The key names the writer.
    """
    found = []
    for partition in range(PARTITION_COUNT):
        name = f"{writer} {compression} {partition}".encode()
        shapes: list[tuple[bytes | None, bytes | None, Headers]] = [
            (name, b"a plain value of " + name * 8, ()),
            (name + b" null value", None, ()),
            (name + b" empty value", b"", ()),
            (b"", b"under an empty key " + name, ()),
            (None, b"without a key " + name * 4, ()),
            (name + bytes(range(256)), bytes(range(256)) * 16, ()),
            (name, b"one header", (("trace", b"42"),)),
            (
                name,
                b"many headers",
                (
                    ("a", b"1"),
                    ("a", b"2"),
                    ("null", None),
                    ("empty", b""),
                    ("bytes", bytes(range(256))),
                    ("naïve-☃", "ü".encode()),
                ),
            ),
            (name + b" text " * 20, compressible(20_000, f"{writer}{partition}"), (("size", b"20000"),)),
        ]
        if partition == PARTITION_COUNT - 1:
            shapes.append((name + b" big", compressible(BIG_BYTES, writer), ()))
        found += [
            Message(partition, key, value, headers, BASE_TIMESTAMP_MS + partition * 1000 + number)
            for number, (key, value, headers) in enumerate(shapes)
        ]
    return found
