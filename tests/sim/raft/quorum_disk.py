"""The disk of one replica of the metadata quorum: vote, snapshot, log; a queue of operations in
order, each durable when it is reported as done.

A crash keeps some prefix of the operation in progress (whole batches: a torn one is truncated when
the log is opened) and no queued operation. A full disk refuses an append and with it all operations
queued behind. The contract of raft/events.py is asserted here.
"""

from __future__ import annotations

from collections import deque
from random import Random

from mqd.cluster.raft import events
from mqd.cluster.raft.events import Stored, VoteState
from mqd.cluster.raft.messages import Batch, SnapshotMeta


class StoreSnapshot:
    """The shell's own operation: the state at meta.offset."""

    def __init__(self, meta: SnapshotMeta, data: bytes) -> None:
        self.meta, self.data = meta, data


Operation = events.PersistVote | events.AppendLog | events.TruncateLog | events.InstallSnapshot | StoreSnapshot


class QuorumDisk:
    def __init__(self) -> None:
        self.vote = VoteState()
        self.snapshot: tuple[SnapshotMeta, bytes] | None = None
        self.log: list[Batch] = []
        self.committed_offset = 0  # a mark that may lag
        self.queue: deque[Operation] = deque()
        self.under_way: list[Operation] = []
        self.full = False

    @property
    def end_offset(self) -> int:
        if self.log:
            return self.log[-1].next_offset
        return self.snapshot[0].offset if self.snapshot is not None else 0

    @property
    def epoch(self) -> int:
        if self.log:
            return self.log[-1].epoch
        return self.snapshot[0].epoch if self.snapshot is not None else 0

    def has(self, offset: int, epoch: int) -> bool:
        """Whether the record before `offset`, of `epoch`, is durable here."""
        if self.snapshot is not None and offset <= self.snapshot[0].offset:
            return True  # the checker compares the states of snapshots
        return any(batch.epoch == epoch and batch.base_offset < offset <= batch.next_offset for batch in self.log)

    def apply(self, operation: Operation) -> None:
        match operation:
            case events.PersistVote():
                old, new = self.vote, operation.vote
                assert new.epoch > old.epoch or (new.epoch == old.epoch and old.voted_for in (None, new.voted_for)), (
                    f"I4: {old} then {new}"
                )
                self.vote = new
            case events.AppendLog():
                for batch in operation.batches:
                    assert batch.base_offset == self.end_offset and batch.epoch >= self.epoch, (
                        f"disk: append at {batch.base_offset}, the log ends at {self.end_offset}"
                    )
                    self.log.append(batch)
            case events.TruncateLog():
                while self.log and self.log[-1].next_offset > operation.offset:
                    gone = self.log.pop()
                    assert gone.base_offset >= operation.offset, "disk: a batch is cut in two"
                self.committed_offset = min(self.committed_offset, operation.offset)
            case events.InstallSnapshot():
                self.snapshot, self.log = (operation.meta, operation.data), []
            case StoreSnapshot():
                if self.snapshot is None or operation.meta.offset > self.snapshot[0].offset:
                    assert operation.meta.offset <= self.end_offset, "disk: a snapshot beyond the log"
                    self.snapshot = (operation.meta, operation.data)
                    self.log = [batch for batch in self.log if batch.base_offset >= operation.meta.offset]

    def crash(self, random: Random, keeps: float) -> None:
        """Some prefix of the current operation stays: all of it with probability `keeps`."""
        count = len(self.under_way) if random.random() < keeps else random.randrange(len(self.under_way) + 1)
        for operation in self.under_way[:count]:
            self.apply(operation)
        if count < len(self.under_way):
            torn = self.under_way[count]
            if isinstance(torn, events.AppendLog) and len(torn.batches) > 1:
                self.apply(events.AppendLog(torn.sequence, torn.batches[: random.randrange(len(torn.batches))]))
        self.under_way = []
        self.queue.clear()

    def stored(self) -> Stored:
        meta, data = self.snapshot if self.snapshot is not None else (None, b"")
        return Stored(self.vote, meta, len(data), tuple(self.log), self.committed_offset)
