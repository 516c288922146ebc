"""Many seeds of the cluster simulator, on all cores, for the tests, the long tier and `python -m
tests.sim.schedules FIRST COUNT [RULE,... [KIND]]` (KIND: of plans.py).
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from functools import partial
from typing import NamedTuple

from tests.sim.cluster.cluster_plan import Plan
from tests.sim.cluster.cluster_world import ClusterWorld
from tests.sim.plans import KINDS

CHAOS = 3_000  # events of a schedule before healing begins


class Outcome(NamedTuple):
    seed: int
    name: str  # of the violated invariant, or the exception; "" = success
    what: str
    events: int
    faults: int
    acked: int
    elections: int
    stuck: int
    kinds: dict[str, int]
    kind: str = ""  # of plans.py
    unclean: int = 0  # leaders elected outside the in-sync set
    lost: int = 0  # acknowledged records that they lacked


def outcome(
    seed: int, off: frozenset[str] = frozenset(), chaos: int = CHAOS, plan: Plan | None = None, kind: str = ""
) -> Outcome:
    """kind: of plans.py, instead of `chaos` and `plan`."""
    world, make = None, ClusterWorld
    if kind:
        plan, chaos, make = KINDS[kind].plan(seed), KINDS[kind].chaos, KINDS[kind].world
    name = what = ""
    try:
        world = make(seed, off, plan)
        world.run(chaos)
    except Exception as error:
        name, what = getattr(error, "name", "") or type(error).__name__, str(error)
    if world is None:
        return Outcome(seed, name, what, 0, 0, 0, 0, 0, {}, kind)
    counts, kinds = world.history.counts, world.faults.counts
    return Outcome(
        seed,
        name,
        what,
        world.kernel.steps,
        sum(kinds.values()),
        counts["acked"],
        counts["elections"],
        getattr(world, "stuck_count", 0),
        kinds,
        kind,
        counts["unclean"],
        counts["lost"],
    )


def outcomes(
    seeds: range,
    off: frozenset[str] = frozenset(),
    chaos: int = CHAOS,
    enough: int = 1 << 30,
    plan: Plan | None = None,
    kind: str = "",
) -> list[Outcome]:
    """Of all these seeds; stops after `enough` violations."""
    found: list[Outcome] = []
    violations = 0
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        for result in pool.imap(partial(outcome, off=off, chaos=chaos, plan=plan, kind=kind), seeds, chunksize=5):
            found.append(result)
            violations += bool(result.name)
            if violations >= enough:
                pool.terminate()
                break
    return found


def report(found: list[Outcome]) -> str:
    """The message of a failing test: the violation, and the command that repeats it."""
    return "\n".join(
        f"{result.name}: {result.what}\n    python -m tests.sim.replay"
        f" {result.seed}{' --kind ' + result.kind if result.kind else ''}"
        for result in found
        if result.name
    )


def main(arguments: list[str]) -> int:
    first, count = int(arguments[0]), int(arguments[1])
    off = frozenset(rule for rule in (arguments[2] if len(arguments) > 2 else "").split(",") if rule)
    began = time.monotonic()
    found = outcomes(range(first, first + count), off, kind=arguments[3] if len(arguments) > 3 else "")
    seconds = time.monotonic() - began
    events = sum(result.events for result in found)
    kinds: dict[str, int] = {}
    for result in found:
        for kind, number in result.kinds.items():
            kinds[kind] = kinds.get(kind, 0) + number
    print(
        f"{len(found)} schedules, {events} events in {seconds:.0f} s ({events / seconds:.0f}/s),"
        f" {sum(result.acked for result in found)} acknowledged,"
    )
    print(
        f"{sum(result.elections for result in found)} leader epochs, {sum(result.stuck for result in found)} partitions"
        f" for an operator; faults: {kinds}"
    )
    failed = report(found)
    print(failed or "all invariants held")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
