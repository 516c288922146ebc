"""The quorum's log in memory, compared with a list of records."""

from __future__ import annotations

import random

import pytest

from mqd.cluster.raft.log_memory import MemoryLog
from mqd.cluster.raft.messages import (
    DATA,
    FOUNDED,
    GROWING,
    SHRUNK,
    ReplicaKey,
    SnapshotMeta,
    Voter,
    make_batch,
    voters_batch,
)
from tests.tiers import quick


def voters(*nodes: int) -> tuple[Voter, ...]:
    return tuple(Voter(ReplicaKey(node, b"%016d" % node), f"h{node}", 9_000) for node in nodes)


def founded(offset: int = 0, epoch: int = 0) -> MemoryLog:
    return MemoryLog(SnapshotMeta(offset, epoch, voters(1), 1), 10)


@pytest.mark.parametrize("seed", quick(range(30), range(10)))
def test_histories_agree_with_a_plain_list(seed: int) -> None:
    """Appends, truncations and snapshots; every query is also evaluated on the list of (epoch of
    each record, voter set after it, its trend).
    """
    chance = random.Random(seed)
    log, records, batches = founded(), [], [0]  # batches: the start of each, and the end
    epoch, base, first = 0, 0, (0, voters(1), FOUNDED)  # of the state before the first record
    for _ in range(200):
        step = chance.random()
        if step < 0.6:
            epoch += chance.random() < 0.3
            _, chosen, trend = records[-1] if records else first
            if chance.random() < 0.2:
                chosen, trend = changed(chance, chosen, trend)
                batch = voters_batch(log.end_offset, epoch, chosen)
            else:
                batch = make_batch(
                    log.end_offset,
                    epoch,
                    DATA,
                    tuple(b"x" * chance.randrange(1, 40) for _ in range(chance.choice((1, 1, 3)))),
                )
            log.append(batch)
            records += [(epoch, chosen, trend)] * len(batch.values)
            batches.append(log.end_offset)
        elif step < 0.8 and len(batches) > 1:
            kept = chance.randrange(max(0, len(batches) - 4), len(batches))
            if batches[kept] >= log.snapshot.offset:
                log.truncate(batches[kept])
                del records[batches[kept] - base :], batches[kept + 1 :]
        elif step > 0.95:
            offset = chance.choice(batches)
            if offset > log.snapshot.offset:
                meta = SnapshotMeta(
                    offset, log.epoch_before(offset), log.voters_before(offset), 1, log.trend_before(offset)
                )
                assert (meta.epoch, meta.voters, meta.trend) == (records[offset - base - 1] if offset > base else first)
                log.on_snapshot_stored(meta, 10, chance.choice((0, 100, 10_000)))
                if log.start_offset > base:
                    first = records[log.start_offset - base - 1]
                    del records[: log.start_offset - base]
                    batches = [start for start in batches if start >= log.start_offset]
                    base = log.start_offset
        epoch = max(epoch, log.last_epoch)
        log.check()
        compare(log, records, batches, base, first)


def changed(chance: random.Random, before: tuple[Voter, ...], trend: int) -> tuple[tuple[Voter, ...], int]:
    """A voter more, one less, or one that has moved; and the change of their number."""
    nodes = {voter.node_id for voter in before}
    kind = chance.randrange(3)
    if kind == 0 and len(nodes) < 5:
        nodes.add(chance.choice(sorted(set(range(1, 6)) - nodes)))
        return voters(*sorted(nodes)), SHRUNK if trend == SHRUNK and len(nodes) in (1, 2) else GROWING
    if kind == 1 and len(nodes) > 1:
        nodes.remove(chance.choice(sorted(nodes)))
        return voters(*sorted(nodes)), SHRUNK
    return (Voter(before[0].key, "elsewhere", 1), *before[1:]), trend


def compare(log: MemoryLog, records: list, batches: list[int], base: int, first: tuple) -> None:
    base_epoch = first[0]
    epochs = [base_epoch] + [epoch for epoch, _, _ in records]
    assert (log.start_offset, log.end_offset, log.last_epoch) == (base, base + len(records), epochs[-1])
    assert (log.voters, log.voters_trend) == (records[-1] if records else first)[1:]
    for offset in range(base, base + len(records) + 1):
        assert log.epoch_before(offset) == epochs[offset - base]
        assert log.batch_start(offset) == max(start for start in batches if start <= offset)
    for epoch in range(base_epoch - 1, epochs[-1] + 2):
        older = [(known, base + index) for index, known in enumerate(epochs) if known <= epoch]
        assert log.epoch_end(epoch) == (older[-1] if older else None)
    for start in batches:
        assert (log.voters_before(start), log.trend_before(start)) == (
            records[start - base - 1] if start > base else first
        )[1:]
        read = log.read(start, log.end_offset, 50)
        assert bool(read) == (start < log.end_offset) and (not read or read[0].base_offset == start)
        assert len(read) <= 1 or sum(batch.size_bytes for batch in read) <= 50


def test_batches_that_do_not_follow_are_refused() -> None:
    log = founded()
    log.append(make_batch(0, 3, DATA, (b"a", b"b")))
    for wrong in (
        make_batch(1, 3, DATA, (b"c",)),
        make_batch(3, 3, DATA, (b"c",)),
        make_batch(2, 2, DATA, (b"c",)),
        make_batch(2, 3, DATA, ()),
    ):
        with pytest.raises(ValueError):
            log.append(wrong)
    with pytest.raises(ValueError):
        log.truncate(1)


def test_an_epoch_that_a_snapshot_covers_ends_where_the_next_begins() -> None:
    log = founded(offset=10, epoch=4)
    assert log.epoch_end(4) == (4, 10) and log.epoch_end(3) is None
    log.append(make_batch(10, 4, DATA, (b"a",)))
    log.append(make_batch(11, 6, DATA, (b"b",)))
    assert log.epoch_end(4) == (4, 11) and log.epoch_end(5) == (4, 11) and log.epoch_end(9) == (6, 12)
