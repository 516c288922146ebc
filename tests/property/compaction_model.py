"""A hand-written partition directory, compacted by the native core, and the expected result
according to a plain model.
"""

from __future__ import annotations

import random
import struct
from pathlib import Path

from mqd import native
from mqd.log import compaction as policies
from mqd.log import segments
from mqd.log.compaction import StoredSegment
from mqd.log.segments import Segment
from mqd.protocol.crc32c import crc32c
from mqd.protocol.records import DELETE_HORIZON, BatchHeader, Record, decode_batch, encode_batch, iterate_batches
from mqd.worker import compaction_steps as steps

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
RETENTION_MS = 1000
_ABORT, _COMMIT = 0, 1


class Log:
    """Sealed segments and an empty active one. Each producer's sequence numbers count up; `now_ms`
    is the clock that compactions use.
    """

    def __init__(self, directory: Path, seed: int, keys: int = 12, transactional: bool = True):
        self.directory = directory
        directory.mkdir(exist_ok=True)
        self.random = random.Random(seed)
        self.keys = keys
        self.now_ms = 1_000_000
        self.end = 0
        self.clean_to: int | None = None
        self.appended: dict[int, Record] = {}  # committed or not
        self.decided: dict[int, bool] = {}  # offset -> whether it is visible (not transactional, or committed)
        self.first_of: dict[int, int] = {}  # producer -> first offset of its ongoing transaction
        self.ongoing: dict[int, list[int]] = {}
        self.producers: set[int] = set()
        self.epoch: dict[int, int] = {}  # of each producer
        self.last_data: dict[int, int] = {}  # producer -> base offset of its last data batch of this epoch
        self.sequence: dict[int, int] = {}
        self.batch_of: dict[int, tuple[int, int]] = {}  # base offset -> (last offset, producer)
        self.transactional = transactional

    # -- writing -----------------------------------------------------------------------------------

    def bases(self) -> list[int]:
        return segments.base_offsets(self.directory)

    def _append(self, data: bytes, count: int, producer: int) -> None:
        bases = self.bases()
        if not bases or self.random.random() < 0.25:
            bases.append(self.end)
        with open(segments.segment_path(self.directory, bases[-1]), "ab") as file:
            file.write(data)
        self.batch_of[self.end] = (self.end + count - 1, producer)
        if producer >= 0:
            self.producers.add(producer)
        self.end += count

    def record(self, offset: int) -> Record:
        value = None if self.random.random() < 0.15 else b"v%d" % offset + bytes(self.random.randrange(60))
        headers = [("h", b"x")] if self.random.random() < 0.2 else []
        return Record(
            value,
            b"k%d" % self.random.randrange(self.keys),
            self.now_ms + self.random.randrange(-50, 50),
            headers,
            offset,
        )

    def produce(self) -> None:
        producer = self.random.choice((-1, -1, 1, 2))
        transactional = False
        if self.transactional and self.random.random() < 0.5:
            producer, transactional = self.random.choice((10, 11, 12)), True
        records = [self.record(self.end + number) for number in range(self.random.randrange(1, 6))]
        for record in records:
            self.appended[record.offset] = record
            self.decided[record.offset] = not transactional
        if transactional:
            self.first_of.setdefault(producer, self.end)
            self.ongoing.setdefault(producer, []).extend(record.offset for record in records)
        sequence = self.sequence.get(producer, 0)
        self.sequence[producer] = sequence + len(records)
        data = encode_batch(
            records,
            base_offset=self.end,
            compression=self.random.choice(CODECS),
            partition_leader_epoch=3,
            producer_id=producer,
            producer_epoch=self.epoch.get(producer, 0) if producer >= 0 else -1,
            base_sequence=sequence if producer >= 0 else -1,
            is_transactional=transactional,
        )
        if producer >= 0:
            self.last_data[producer] = self.end
        self._append(data, len(records), producer)

    def end_transaction(self, producer: int, commit: bool) -> None:
        for offset in self.ongoing.pop(producer, ()):
            self.decided[offset] = commit
        first = self.first_of.pop(producer, None)
        if self.random.random() < 0.3:  # as transactions of version 2: the marker raises the epoch
            self.epoch[producer] = self.epoch.get(producer, 0) + 1
            self.sequence.pop(producer, None)
            self.last_data.pop(producer, None)
        marker = Record(
            struct.pack(">hi", 0, 5), struct.pack(">hh", 0, _COMMIT if commit else _ABORT), self.now_ms, offset=self.end
        )
        at = self.end
        self._append(
            encode_batch(
                [marker],
                base_offset=at,
                producer_id=producer,
                producer_epoch=self.epoch.get(producer, 0),
                is_transactional=True,
                is_control=True,
            ),
            1,
            producer,
        )
        if not commit and first is not None:
            base = max(base for base in self.bases() if base <= at)
            entry = struct.pack(">hqqqq", 0, producer, first, at, at + 1)
            with open(segments.segment_path(self.directory, base, ".txnindex"), "ab") as file:
                file.write(entry)
            # a number for each entry, over the one before it
            with open(segments.segment_path(self.directory, base, ".txnsum"), "a+b") as file:
                file.seek(max(0, file.tell() - 4))
                before = int.from_bytes(file.read(4), "big")
                file.write(struct.pack(">I", crc32c(struct.pack(">q", base) + entry, before)))

    def roll(self) -> None:
        if self.end not in self.bases():
            segments.segment_path(self.directory, self.end).touch()

    # -- compacting --------------------------------------------------------------------------------

    @property
    def last_stable(self) -> int:
        return min(self.first_of.values(), default=self.end)

    def listing(self) -> list[StoredSegment]:
        return [
            StoredSegment(
                Segment(base, segments.segment_path(self.directory, base).stat().st_size, self.now_ms, self.now_ms)
            )
            for base in self.bases()
        ]

    def compact(
        self, *, map_bytes: int = 1 << 20, segment_bytes: int = 4000, stop_at: int | None = None
    ) -> native.CompactFigures | None:
        """All groups; `stop_at`: a crash after this many of the swaps' steps (four each)."""
        self.roll()
        stored = self.listing()
        policy = policies.CompactionPolicy(True, 0, 1 << 62, 0.0, RETENTION_MS, segment_bytes, 256)
        ends = policies.LogOffsets(0, self.last_stable, stored[-1].base_offset, 0, self.end)
        plan = policies.plan(stored, ends, policy, self.clean_to, self.now_ms)
        if plan is None:
            return None
        options = native.CompactOptions(
            first_dirty_offset=plan.first_dirty_offset,
            to_clean_count=plan.to_clean_count,
            now_ms=self.now_ms,
            delete_retention_ms=RETENTION_MS,
            map_bytes=map_bytes,
            snapshot_offset=steps.newest_snapshot(self.directory),
            index_interval_bytes=256,
            end_position=plan.end_position,
        )
        compaction = native.Compaction(self.directory, plan.bases, options)
        try:
            return self._groups(compaction, stored, plan, segment_bytes, stop_at)
        finally:
            compaction.close()

    def _groups(self, compaction, stored, plan, segment_bytes, stop_at) -> native.CompactFigures | None:
        budget = self.random.choice((1, 300, 1 << 20))
        while not steps.advance(compaction, budget)[0]:
            pass
        count = compaction.figures().to_clean_count
        done = 0
        for first, size in policies.merge_groups(stored[:count], stored[count].base_offset, segment_bytes):
            compaction.group_begin(first, size)
            while not steps.advance(compaction, budget)[0]:
                pass
            group = compaction.group_end()
            if not group.changed:
                continue
            bases = [one.base_offset for one in stored[first : first + size]]
            for step in (
                lambda bases=bases, group=group: native.compact_swap_prepare(
                    self.directory, bases[0], bases[1:], group.has_transactions
                ),
                lambda bases=bases: native.compact_swap_install(self.directory, bases[0]),
                lambda bases=bases: native.compact_swap_finish(self.directory, bases[0]),
            ):
                if stop_at is not None and done >= stop_at:
                    return None
                done += 1
                step()
        figures = compaction.figures()
        self.clean_to = figures.mapped_end
        return figures

    # -- what is there -----------------------------------------------------------------------------

    def batches(self) -> list[tuple[BatchHeader, bytes]]:
        found = []
        for base in self.bases():
            found += [
                (header, bytes(data))
                for header, data in iterate_batches(segments.segment_path(self.directory, base).read_bytes())
            ]
        return found

    def check(self) -> None:
        """All invariants. Raises AssertionError."""
        last = -1
        seen: dict[int, Record] = {}
        for header, data in self.batches():
            assert header.base_offset > last, "offsets rise"
            last = header.last_offset
            assert self.batch_of[header.base_offset] == (last, header.producer_id), (
                "a batch keeps its bounds and its producer"
            )
            for record in decode_batch(data):
                if header.is_control:
                    continue
                original = self.appended[record.offset]
                assert (record.key, record.value, record.headers, record.timestamp_ms) == (
                    original.key,
                    original.value,
                    original.headers,
                    original.timestamp_ms,
                )
                seen[record.offset] = record
            if not header.is_control and header.record_count and not header.is_log_append_time:
                assert header.max_timestamp_ms == max(record.timestamp_ms for record in decode_batch(data))
        assert last + 1 == self.end, "the end can be derived from the files"
        committed = {offset: record for offset, record in self.appended.items() if self.decided[offset]}
        expected: dict[bytes, Record] = {}
        for offset in sorted(committed):
            expected[committed[offset].key] = committed[offset]
        for key, record in expected.items():
            if record.value is not None:
                assert seen.get(record.offset) == record, f"the last value of {key!r} at {record.offset}"
        for offset in sorted(seen):  # the final view of a reader of committed records
            if self.decided[offset]:
                newest = expected[seen[offset].key]
                assert newest.offset in seen or newest.value is None
        left: dict[bytes, bytes | None] = {}
        for offset in sorted(seen):
            if self.decided[offset]:
                left[seen[offset].key] = seen[offset].value
        assert {key: value for key, value in left.items() if value is not None} == {
            key: record.value for key, record in expected.items() if record.value is not None
        }
        self._check_producers()
        self._check_transactions(seen)

    def _check_producers(self) -> None:
        """Each producer's last sequence is still there; if no data batch has its epoch, its epoch is."""
        headers = [header for header, _ in self.batches()]
        for producer in self.producers:
            base = self.last_data.get(producer)
            assert any(
                header.producer_id == producer
                and header.producer_epoch == self.epoch.get(producer, 0)
                and (header.is_control if base is None else header.base_offset == base)
                for header in headers
            ), f"the last batch of producer {producer}"

    def _check_transactions(self, seen: dict[int, Record]) -> None:
        """Remaining aborted records are listed as aborted; each listed transaction has a marker."""
        reported = []
        for base in self.bases():
            path = segments.segment_path(self.directory, base, ".txnindex")
            if path.exists():
                reported += [
                    struct.unpack_from(">hqqqq", path.read_bytes(), at)[1:4] for at in range(0, path.stat().st_size, 34)
                ]
        markers = {header.base_offset: header.producer_id for header, _ in self.batches() if header.is_control}
        for producer, _, marker in reported:
            assert markers.get(marker) == producer
        ongoing = {offset for offsets in self.ongoing.values() for offset in offsets}
        for header, data in self.batches():
            if header.is_transactional and not header.is_control:
                for record in decode_batch(data):
                    if not self.decided[record.offset] and record.offset not in ongoing:
                        assert any(
                            producer == header.producer_id and first <= record.offset < marker
                            for producer, first, marker in reported
                        ), f"aborted record {record.offset} is not reported"

    def check_compacted(self) -> None:
        """Records that must be removed by a full compaction."""
        committed: dict[bytes, int] = {}
        clean_to = self.clean_to or 0
        for offset in sorted(self.appended):
            if self.decided[offset] and offset < clean_to:
                committed[self.appended[offset].key] = offset
        for header, data in self.batches():
            if header.last_offset >= clean_to or header.is_control:
                continue
            for record in decode_batch(data):
                assert self.decided[record.offset], f"aborted record {record.offset} below {clean_to}"
                assert committed[record.key] == record.offset, f"outdated record {record.offset}"
                if record.value is None:
                    horizon_ms = self._horizon(data)
                    assert horizon_ms is not None and horizon_ms > self.now_ms, f"tombstone {record.offset}"

    @staticmethod
    def _horizon(data: bytes) -> int | None:
        (header, _), *_ = iterate_batches(data)
        return header.base_timestamp_ms if header.attributes & DELETE_HORIZON else None

    def forget(self) -> None:
        """Loses files beside the log: the cleaner's checkpoint, or the producers' state."""
        if self.random.random() < 0.5:
            self.clean_to = None
        else:
            for path in self.directory.glob("*.snapshot"):
                path.unlink()

    # -- recovery ----------------------------------------------------------------------------------

    def recover(self, clean: bool = False) -> None:
        """As in a worker's start after a crash of everything: nothing is trusted. `clean`: after a
        clean shutdown, which leaves a snapshot of the producers.
        """
        recovery = native.Recovery()
        partition = native.Partition.open(self.directory, native.LogOptions(compacted=True), 3, self.now_ms, recovery)
        assert recovery.log_end_offset == self.end, (recovery, self.end)
        views = native.ffi.new("struct mqd_producer_view[64]")
        count = native.lib.mqd_partition_producers(partition.pointer, views, 64)
        ongoing = {
            view.producer_id: view.transaction_first_offset
            for view in views[0:count]
            if view.transaction_first_offset >= 0
        }
        assert ongoing == self.first_of, "the last stable offset is where the oldest of them began"
        partition.close(clean)
        left = [path.name for path in self.directory.iterdir() if path.suffix in (".cleaned", ".swap", ".tmp")]
        assert not left, left
