"""The quorum's log since the last snapshot, in memory, with its epochs and voter sets. Fetches are
served from it.

Invariants (check())
    G1  batches are gapless from start_offset to end_offset; epochs do not fall
    G2  epochs[i] = (epoch, offset of its first record); both ascend, and all epochs are above
        start_epoch, that of the record before start_offset
    G3  the first voter set is the one in force at start_offset, the others belong to batches in the
        log. Each has a trend (messages.FOUNDED ...), derived from the sets before it; the trend is
        kept after those sets are dropped
"""

from bisect import bisect_left, bisect_right

from mqd.cluster.raft.messages import FOUNDED, VOTERS, Batch, SnapshotMeta, Voters, trend_after, voters_of


class MemoryLog:
    """`snapshot` None: a joining host, which has no state yet."""

    def __init__(self, snapshot: SnapshotMeta | None, snapshot_bytes: int) -> None:
        self.reset(snapshot, snapshot_bytes)

    def reset(self, snapshot: SnapshotMeta | None, snapshot_bytes: int) -> None:
        """Empties the log; it then starts at the snapshot."""
        self.snapshot, self.snapshot_bytes = snapshot, snapshot_bytes
        self.start_offset = snapshot.offset if snapshot is not None else 0
        self.start_epoch = snapshot.epoch if snapshot is not None else 0
        self.end_offset = self.start_offset
        self.size_bytes = 0
        self._batches: list[Batch] = []
        self._base_offsets: list[int] = []
        self._epochs: list[tuple[int, int]] = []
        first = (-1, snapshot.voters, snapshot.trend) if snapshot is not None else (-1, (), FOUNDED)
        self._voters: list[tuple[int, Voters, int]] = [first]  # (base offset of the batch, set, its trend)

    @property
    def last_epoch(self) -> int:
        return self._epochs[-1][0] if self._epochs else self.start_epoch

    @property
    def voters(self) -> Voters:
        return self._voters[-1][1]

    @property
    def voters_trend(self) -> int:
        """FOUNDED, GROWING or SHRUNK: how the newest voter set got its size."""
        return self._voters[-1][2]

    @property
    def voters_offset(self) -> int:
        """Offset of the batch with the newest voter set; -1 = older than the log."""
        return self._voters[-1][0]

    def append(self, batch: Batch) -> None:
        if batch.base_offset != self.end_offset or batch.epoch < self.last_epoch or not batch.values:
            raise ValueError(
                f"cannot append a batch of {len(batch.values)} records, epoch {batch.epoch}, at offset"
                f" {batch.base_offset}: the log ends in epoch {self.last_epoch} at offset {self.end_offset}"
            )
        if batch.kind == VOTERS:
            voters = voters_of(batch)
            self._voters.append((batch.base_offset, voters, trend_after(self.voters_trend, self.voters, voters)))
        if batch.epoch > self.last_epoch:
            self._epochs.append((batch.epoch, batch.base_offset))
        self._batches.append(batch)
        self._base_offsets.append(batch.base_offset)
        self.end_offset = batch.next_offset
        self.size_bytes += batch.size_bytes

    def truncate(self, offset: int) -> None:
        """Removes all batches from `offset` on, which must be the start of a batch."""
        index = bisect_left(self._base_offsets, offset)
        if offset != self.end_offset and (index == len(self._base_offsets) or self._base_offsets[index] != offset):
            raise ValueError(
                f"no batch begins at offset {offset} in the log from {self.start_offset} to {self.end_offset}"
            )
        self.size_bytes -= sum(batch.size_bytes for batch in self._batches[index:])
        del self._batches[index:], self._base_offsets[index:]
        self.end_offset = offset
        while self._epochs and self._epochs[-1][1] >= offset:
            self._epochs.pop()
        while self._voters[-1][0] >= offset:
            self._voters.pop()

    def on_snapshot_stored(self, meta: SnapshotMeta, size_bytes: int, retained_bytes: int) -> None:
        """A newer snapshot replaces the batches below its offset; up to `retained_bytes` of them are kept
        for replicas that are slightly behind.
        """
        self.snapshot, self.snapshot_bytes = meta, size_bytes
        excess_bytes = (
            sum(batch.size_bytes for batch in self._batches[: bisect_left(self._base_offsets, meta.offset)])
            - retained_bytes
        )
        dropped = 0
        while excess_bytes > 0 and self._batches[dropped].next_offset <= meta.offset:
            batch = self._batches[dropped]
            excess_bytes -= batch.size_bytes
            self.size_bytes -= batch.size_bytes
            self.start_offset, self.start_epoch = batch.next_offset, batch.epoch
            dropped += 1
        del self._batches[:dropped], self._base_offsets[:dropped]
        self._epochs = [entry for entry in self._epochs if entry[0] > self.start_epoch]
        while len(self._voters) > 1 and self._voters[1][0] < self.start_offset:
            del self._voters[0]
        self._voters[0] = (-1, *self._voters[0][1:])

    def read(self, offset: int, end_offset: int, bytes_max: int) -> tuple[Batch, ...]:
        """Returns whole batches from `offset`, which must be the start of a batch, up to `end_offset`; at
        least one if there is any.
        """
        batches: list[Batch] = []
        index, size = bisect_left(self._base_offsets, offset), 0
        while index < len(self._batches) and self._batches[index].next_offset <= end_offset:
            batch = self._batches[index]
            size += batch.size_bytes
            if batches and size > bytes_max:
                break
            batches.append(batch)
            index += 1
        return tuple(batches)

    def bytes_after(self, offset: int) -> int:
        """The size of the batches from `offset` on; fast near the end of the log."""
        size, index = 0, len(self._batches) - 1
        while index >= 0 and self._base_offsets[index] >= offset:
            size += self._batches[index].size_bytes
            index -= 1
        return size

    # -- epochs ------------------------------------------------------------------------------------

    def epoch_end(self, epoch: int) -> tuple[int, int] | None:
        """Returns (the largest epoch in the log that is at most `epoch`, its end offset). None: all epochs
        in the log are newer.
        """
        index = bisect_right(self._epochs, (epoch, 1 << 62))
        end = self._epochs[index][1] if index < len(self._epochs) else self.end_offset
        if index > 0:
            return self._epochs[index - 1][0], end
        return (self.start_epoch, end) if self.start_epoch <= epoch else None

    def epoch_before(self, offset: int) -> int:
        """The epoch of the record before `offset`, which must be in the log or at one of its ends."""
        index = bisect_left(self._epochs, offset, key=lambda entry: entry[1])
        return self._epochs[index - 1][0] if index > 0 else self.start_epoch

    def batch_start(self, offset: int) -> int:
        """Returns the start of the batch that contains `offset`; an offset outside of the log is returned
        unchanged.
        """
        index = bisect_right(self._base_offsets, offset)
        return offset if offset >= self.end_offset or index == 0 else self._base_offsets[index - 1]

    def voters_before(self, offset: int) -> Voters:
        """The voter set in force after all records below `offset`."""
        return self._voters_at(offset)[1]

    def trend_before(self, offset: int) -> int:
        """The trend of the set that voters_before() returns."""
        return self._voters_at(offset)[2]

    def _voters_at(self, offset: int) -> tuple[int, Voters, int]:
        index = bisect_left(self._voters, offset, key=lambda entry: entry[0])
        return self._voters[max(index - 1, 0)]

    def check(self) -> None:
        offset, epoch, starts = self.start_offset, self.start_epoch, []
        for index, batch in enumerate(self._batches):
            assert batch.base_offset == offset == self._base_offsets[index] and batch.epoch >= epoch, "G1"
            if batch.epoch > epoch:
                starts.append((batch.epoch, offset))
            offset, epoch = batch.next_offset, batch.epoch
        assert offset == self.end_offset and len(self._base_offsets) == len(self._batches), "G1"
        assert starts == self._epochs, "G2"
        voter_batch_offsets = [batch.base_offset for batch in self._batches if batch.kind == VOTERS]
        assert [entry[0] for entry in self._voters] == [-1, *voter_batch_offsets], "G3"
        assert self.size_bytes == sum(batch.size_bytes for batch in self._batches)
