"""Special runs of the cluster simulator, by name: `--kind members` of replay.py, the fourth
argument of schedules.py.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import NamedTuple

import msgspec

from tests.sim.cluster.cluster_plan import Plan, draw_plan
from tests.sim.cluster.cluster_world import ClusterWorld
from tests.sim.coordinator.transaction_cluster import TransactionCluster


class Kind(NamedTuple):
    plan: Callable[[int], Plan]  # of a seed
    chaos: int  # events before healing begins
    world: type[ClusterWorld] = ClusterWorld


def members(seed: int) -> Plan:
    """A group of each protocol, with members."""
    drawn = draw_plan(Random(f"members plan {seed}"))
    return msgspec.structs.replace(drawn, members=3, groups=0, producers=1, partitions=1)


def transactions(seed: int) -> Plan:
    """Transactional ids, their producers and readers of committed records."""
    return msgspec.structs.replace(draw_plan(Random(f"transactions {seed}")), groups=0, producers=1)


def retire(seed: int) -> Plan:
    """A topic of four partitions, or two, whose number is reduced while keyed producers write to
    it.
    """
    random = Random(f"retirement plan {seed}")
    return msgspec.structs.replace(draw_plan(random), retire=random.choice((2, 4)), groups=0, producers=0, partitions=1)


def coordinators(seed: int) -> Plan:
    """As transactions; the only faults are that leaders move and die, including coordinators."""
    return msgspec.structs.replace(
        transactions(seed), faults=("leaders", "worker", "restart", "processes", "pause", "mend")
    )


def last_markers(seed: int) -> Plan:
    """As transactions, with hardly any fault but a frequent one: a coordinator's acceptor dies
    after sending markers, which arrive long after those of its successor.
    """
    return msgspec.structs.replace(transactions(seed), faults=("mend",), last_markers=0.1)


def rights(seed: int) -> Plan:
    """Access control lists and passwords come and go; two workers a host."""
    drawn = draw_plan(Random(f"rights plan {seed}"))
    return msgspec.structs.replace(drawn, rights=True, groups=0, producers=1, partitions=1, workers=2)


def spares(seed: int) -> Plan:
    """In-sync sets of two, the other replicas spares."""
    return msgspec.structs.replace(draw_plan(Random(f"spares plan {seed}")), acks_replicas=2, groups=0)


def unclean(seed: int) -> Plan:
    """Leaders out of the in-sync set where no replica in sync is alive; hosts die often."""
    drawn = draw_plan(Random(f"unclean plan {seed}"))
    return msgspec.structs.replace(
        drawn,
        unclean=True,
        groups=0,
        drift_max=0.001,
        drift_is_bounded=True,
        faults=("many_down", "restart", "isolate", "mend"),
    )


KINDS = {
    "coordinators": Kind(coordinators, 6_000, TransactionCluster),
    "last_markers": Kind(last_markers, 6_000, TransactionCluster),
    "members": Kind(members, 6_000),
    "retire": Kind(retire, 6_000),
    "rights": Kind(rights, 12_000),
    "spares": Kind(spares, 6_000),
    "unclean": Kind(unclean, 6_000),
    "transactions": Kind(transactions, 6_000, TransactionCluster),
}
