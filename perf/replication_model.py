"""The records per second of a cluster, computed from the CPU time of a record on the leader of its
partition and on each follower (`python -m perf.replication`). Arithmetic only.

1. A batch has a fixed cost and a cost for its bytes: a straight line through the two measured points,
   one record of 1 KiB a batch, and many. The leader's decompression, to validate records, is left
   out, so compression only reduces the bytes.
2. Each follower costs a leader the same: its cost beyond an unreplicated partition is divided by the
   number of followers in the measurement.
3. Leaders and followers are spread evenly, so a record's cost is shared by all hosts. Workers of
   one host are worth less than their number, by the law of mqd.cli.sizing.
4. Network: each copy arrives once and leaves its leader once for each follower. Readers are excluded:
   `mqd size` includes them.
"""

from __future__ import annotations

from typing import NamedTuple

from mqd.cli.sizing import WIRE_FACTOR, Figures, speedup

RECORD_BYTES = 1024
FOLLOWERS_MEASURED = 2
NETWORK_BYTES_PER_S = 1.25e9  # of a host, each way


class Roles(NamedTuple):
    """CPU-µs for a record of 1 KiB: of an unreplicated partition's leader, of a replicated partition's
    leader, and of each follower.
    """

    alone: float
    leader: float
    follower: float


class Costs(NamedTuple):
    """The cost of a batch: `fixed` CPU-µs, and `per_record` for the uncompressed bytes of each record."""

    fixed: Roles
    per_record: Roles

    def record(self, replicas: int, batch_records: int, compression: float) -> float:
        """CPU-µs of all hosts together for one record. `compression`: compressed bytes divided by
        uncompressed bytes.
        """
        each = Roles(
            *(
                fixed / batch_records + per_record * compression
                for fixed, per_record in zip(self.fixed, self.per_record, strict=True)
            )
        )
        followers = replicas - 1
        return each.alone + (each.leader - each.alone) * followers / FOLLOWERS_MEASURED + each.follower * followers


def costs_from(single: Roles, batched: Roles, batch_records: int) -> Costs:
    """`single`: one record a batch; `batched`: `batch_records`. Neither part is negative, despite noise."""
    per_record, fixed = [], []
    for one, many in zip(single, batched, strict=True):
        slope = max(0.0, (many * batch_records - one) / (batch_records - 1))
        per_record.append(min(slope, many))
        fixed.append(max(0.0, (many - per_record[-1]) * batch_records))
    return Costs(Roles(*fixed), Roles(*per_record))


def network_rate(hosts: int, replicas: int, compression: float, bytes_per_s: float = NETWORK_BYTES_PER_S) -> float:
    """Records/s that hosts of this bandwidth, each way, can receive from producers and from leaders."""
    return bytes_per_s * hosts / (WIRE_FACTOR * RECORD_BYTES * compression * replicas)


def cores_rate(
    costs: Costs,
    figures: Figures,
    *,
    hosts: int,
    workers: int = 1,
    replicas: int = 3,
    batch_records: int = 16,
    compression: float = 1.0,
) -> float:
    """Records/s of `hosts` hosts with `workers` workers each, which have a core each."""
    return 1e6 * hosts * speedup(figures, workers) / costs.record(replicas, batch_records, compression)
