"""Runs of the cluster simulator with something special in them, by name: `--kind members` of replay.py, the fourth argument of schedules.py."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import NamedTuple

import msgspec

from tests.sim.cluster_world import Plan, draw_plan


class Kind(NamedTuple):
    plan: Callable[[int], Plan]  # of a seed
    chaos: int  # events before healing begins


def members(seed: int) -> Plan:
    """A group of each protocol, with members."""
    drawn = draw_plan(Random(f"members plan {seed}"))
    return msgspec.structs.replace(drawn, members=3, groups=0, producers=1, partitions=1)


KINDS = {"members": Kind(members, 6_000)}
