"""Readers of views on a segment that grows, is truncated by new leaders, compacted and deleted, while the process
that reads it is killed and its memory is short. An event is one read, or one change of the log.

Judged: V1, what a read returns is what the filter selects from the log as it is then, byte for byte, and it says
rightly how far it has read. The filter itself is judged by tests/property/test_view_filters.py.
"""

from __future__ import annotations

import os
import random
from collections.abc import Collection
from typing import NamedTuple

from mqd.base.views.conditions import compile_filter
from mqd.protocol.records import Record, encode_batch
from tests.sim.views.view_reads import Index, filtered

TAGS = ("a", "b", "c", "d")
FILTERS = [compile_filter(text) for text in ("tag = 'a'", "tag IN ('a', 'b')", "tag = 'x'", "EXISTS tag", "rare = 1")]
PIECE = 4096
LOG_BYTES_MAX = 24 * PIECE
EPOCH_AT = 12


class Batch(NamedTuple):
    offset: int
    next_offset: int
    position: int
    end: int


def templates(rng: random.Random) -> list[tuple[bytes, int]]:
    """(batch at offset 0, its number of offsets): many without a record that is selected, some larger than a piece."""
    made = []
    for number in range(60):
        records: list[Record] = []
        for offset in range(rng.choice((1, 2, 5, 12))):
            headers: list[tuple[str, bytes | None]] = []
            if number % 3 == 0:
                headers.append(("tag", rng.choice(TAGS).encode()))
            if number % 10 == 0 and offset % 2:
                headers.append(("rare", b"1"))
            size = rng.choice((0, 20, 150)) if number % 20 else rng.choice((PIECE, 2 * PIECE))
            records.append(Record(rng.randbytes(size), b"k", 1000 + offset, headers, offset))
        compression = rng.choice(("none", "none", "lz4", "gzip"))
        made.append((encode_batch(records, compression=compression, is_transactional=number % 7 == 0), len(records)))
    return made


class World:
    def __init__(self, seed: int, planted: Collection[str] = ()) -> None:
        self.random = rng = random.Random(seed)
        self.planted = planted
        self.templates = templates(rng)
        self.bytes_max = rng.choice((2_000, 20_000, 1 << 24))
        self.epoch, self.events, self.selected = 1, 0, 0
        self.file, self.last_view = 0, len(FILTERS)
        self.views = list(enumerate(FILTERS, 1))
        self.fd = -1
        self.used = 0
        self.kill()
        self.create(0)

    # -- the log -----------------------------------------------------------------------------------

    def create(self, offset: int) -> None:
        """An empty file: the segment was deleted, or compacted."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = os.memfd_create("segment")
        self.file += 1
        self.log: list[Batch] = []
        self.data = bytearray()
        self.end_offset = offset

    def close(self) -> None:
        os.close(self.fd)
        self.fd = -1

    def put(self, batch: bytes, offset: int, count: int) -> None:
        batch = offset.to_bytes(8, "big") + batch[8:]
        self.log.append(Batch(offset, offset + count, len(self.data), len(self.data) + len(batch)))
        os.pwrite(self.fd, batch, len(self.data))
        self.data += batch
        self.end_offset = offset + count

    def append(self) -> None:
        for _ in range(self.random.choice((1, 1, 4, 20))):
            template, count = self.random.choice(self.templates)
            self.put(self.stamped(template), self.end_offset + self.random.choice((0, 0, 0, 3)), count)
        if len(self.data) > LOG_BYTES_MAX:
            self.random.choice((self.compact, self.delete))()

    def stamped(self, template: bytes) -> bytes:
        return template[:EPOCH_AT] + self.epoch.to_bytes(4, "big") + template[EPOCH_AT + 4 :]

    def of_the_size_of(self, data: bytes, at: int) -> tuple[bytes, int]:
        """(batch, its number of offsets)"""
        size = int.from_bytes(data[at + 8 : at + 12], "big") + 12
        count = int.from_bytes(data[at + 23 : at + 27], "big") + 1
        same = [one for one in self.templates if len(one[0]) == size and one[1] == count]
        return self.stamped(self.random.choice(same)[0]), count

    def read_another(self) -> None:
        """Another partition, whose segment has some of the same batches, at the same places."""
        if not self.log or self.random.random() < 0.9:
            return
        before, data = self.log, bytes(self.data)
        self.create(0)
        for batch in before:
            other, count = self.of_the_size_of(data, batch.position)
            same = self.random.random() < 0.8
            self.put(data[batch.position : batch.end] if same else other, batch.offset, count)

    def truncate(self) -> None:
        """A new leader has other records: some are cut off, and others are written in their places."""
        if not self.log or self.random.random() < 0.7:
            return
        view = self.random.choice(self.views)
        if self.random.random() < 0.5:
            self.read_from(view, self.random.randrange(len(self.log)))  # one that continues behind it
        keep = self.random.randrange(max(0, len(self.log) - 40), len(self.log))
        before = bytes(self.data)
        self.epoch += 1
        self.end_offset = self.log[keep].offset
        del self.data[self.log[keep].position :]
        del self.log[keep:]
        os.ftruncate(self.fd, len(self.data))
        generation = self.index.generation[0]
        self.index.generation[0] += 1
        if self.random.random() < 0.5:  # as many bytes, in batches of the same sizes
            at = len(self.data)
            while at < len(before):
                batch, count = self.of_the_size_of(before, at)
                self.put(batch, self.end_offset, count)
                at += len(batch)
            self.read_beside(before, generation)
            self.append()
            behind = [number for number, one in enumerate(self.log) if one.position == len(before)]
            if behind:
                self.read_from(view, behind[0])
        else:
            self.append()

    def read_beside(self, before: bytes, generation: int) -> None:
        """Reads that began before the truncation and end after it: they find the old bytes up to somewhere, and
        new ones behind.
        """
        mixed = bytearray(self.data)
        batch = self.random.choice(self.log)
        mixed[: batch.position] = before[: batch.position]
        os.pwrite(self.fd, mixed, 0)
        for view, program in self.views:
            for _ in range(2):
                start = self.random.choice(self.log)
                self.index.read(
                    self.fd, self.file, view, program, start.position, len(mixed), start.offset, 1 << 20,
                    generation, 1 << 20,
                )  # fmt: skip
        os.pwrite(self.fd, self.data, 0)

    def compact(self) -> None:
        before, data = self.log, bytes(self.data)
        self.create(0)
        for batch in before:
            if self.random.random() < 0.6:
                self.put(data[batch.position : batch.end], batch.offset, batch.next_offset - batch.offset)
        self.end_offset = before[-1].next_offset if before else 0

    def delete(self) -> None:
        self.create(self.end_offset)

    # -- the reader's process ----------------------------------------------------------------------

    def kill(self) -> None:
        if self.events:
            self.used += self.index.stats()["hits"]
        self.index = Index(self.bytes_max, PIECE, self.planted)

    def rarely_kill(self) -> None:
        if self.random.random() < 0.1:
            self.kill()

    def replace_view(self) -> None:
        if self.random.random() < 0.2:
            self.last_view += 1
            self.views[self.random.randrange(len(self.views))] = (self.last_view, self.random.choice(FILTERS))

    # -- reads -------------------------------------------------------------------------------------

    def read(self) -> None:
        """Some reads of one view, each where the last one ended."""
        if not self.log:
            return
        rng = self.random
        view, program = rng.choice(self.views)
        at = rng.choice((0, 0, rng.randrange(len(self.log))))
        offset = self.log[at].offset
        if rng.random() < 0.3:
            offset = rng.randrange(offset, self.log[at].next_offset)
        last = len(self.log) - 1 if rng.random() < 0.7 else rng.randrange(at, len(self.log))
        limit = self.log[last].end
        for _ in range(rng.choice((1, 3, 10))):
            room, most = rng.choice((1, 100, 3_000, 1 << 20)), rng.choice((1, PIECE, 1 << 20))
            at, offset = self.read_once(view, program, at, last, limit, offset, room, most)
            if at > last:
                break

    def read_from(self, view: tuple[int, bytes], at: int) -> None:
        """To the end of the log."""
        last = len(self.log) - 1
        self.read_once(*view, at, last, self.log[last].end, self.log[at].offset, 1 << 30, 1 << 30)

    def read_once(
        self, view: int, program: bytes, at: int, last: int, limit: int, offset: int, room: int, most: int
    ) -> tuple[int, int]:
        position = self.log[at].position
        got = self.index.read(
            self.fd, self.file, view, program, position, limit, offset, room, self.index.generation[0], most
        )
        self.events += 1
        assert got.error == 0, f"error {got.error}"
        next_at = at
        while next_at <= last and self.log[next_at].next_offset <= got.next_offset:
            next_at += 1
        assert next_at > at, "V1: no progress"
        end = self.log[next_at - 1]
        assert got.next_offset == end.next_offset, f"V1: {got.next_offset} is within a batch"
        wanted, _, empty = filtered(program, bytes(self.data[position : end.end]), offset)
        assert got.data == wanted, f"V1: {len(got.data)} bytes of {len(wanted)} from offset {offset} on"
        assert got.empty == empty, "V1: the batch in the place of those without a selected record"
        assert got.end in (0, end.end) and (got.end or len(got.data) >= room), "V1: it ends too early"
        assert next_at > last or len(got.data) >= room or most <= end.end - position, "V1: it ends too early"
        self.selected += len(got.data)
        return next_at, got.next_offset

    STEPS = (append, append, read, read, read, read, read, read, truncate, read_another, rarely_kill, replace_view)

    def run(self, events: int) -> int:
        """Returns the number of events."""
        while self.events < events:
            self.random.choice(self.STEPS)(self)
            self.events += 1
        stats = self.index.stats()
        assert stats["bytes"] <= self.bytes_max
        self.used += stats["hits"]
        self.close()
        return self.events
