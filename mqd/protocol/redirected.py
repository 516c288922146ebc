"""Producer ids of records that were sent to a retired partition and are stored in the partition
that takes its records: docs/decisions/cluster/2026-11-21-retired-partitions.md. The encoding must be
the same as in native/server/redirect.h.
"""

REDIRECT_SHIFT = 40  # producer ids are assigned from 0 upwards, and stay below 1 << 40


def redirected_producer_id(producer_id: int, partition: int) -> int:
    """The producer id that a producer's records for retired `partition` have in the partition that
    takes them.
    """
    return producer_id + (partition + 1 << REDIRECT_SHIFT) if producer_id >= 0 else producer_id


def origin_of(producer_id: int) -> tuple[int, int]:
    """(the producer's own id, the retired partition to which it sent the records; -1: none)."""
    return (
        (producer_id & (1 << REDIRECT_SHIFT) - 1, (producer_id >> REDIRECT_SHIFT) - 1)
        if producer_id >= 0
        else (producer_id, -1)
    )
