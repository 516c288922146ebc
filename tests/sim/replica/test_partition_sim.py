"""The small world: its invariants hold, and every disabled rule is detected, in the Python model of
the rules and in the broker's own core.
"""

from __future__ import annotations

import multiprocessing
import os
from functools import partial

import pytest

from tests.sim.disks import PartitionLog
from tests.sim.replica.native_replica import NativeReplica
from tests.sim.replica.partition_world import LAG_MS, PartitionWorld
from tests.sim.replica.spare_rules import SpareRules
from tests.tiers import quick

CHUNK = 25


def run(
    seed: int,
    core: str = "native",
    off: frozenset[str] = frozenset(),
    flush_on_ack: bool | None = None,
    partitions: int = 1,
) -> PartitionWorld:
    """`core`: model, native, or spares: native, of a topic with acks.replicas."""
    spares = SpareRules(2 + seed % 2, LAG_MS) if core == "spares" else None

    def native(log: PartitionLog) -> NativeReplica:
        return NativeReplica(
            log, world.flush_on_ack, off, LAG_MS, acks_replicas=spares.acks_replicas if spares is not None else 0
        )

    world = PartitionWorld(seed, off, flush_on_ack, partitions, None if core == "model" else native, spares)
    world.run()
    return world


def finding(seed: int, core: str, off: frozenset[str], flush_on_ack: bool | None) -> tuple[int, str, int, int, int]:
    """(seed, the violated invariant or "", events, acknowledged, stuck)."""
    try:
        world = run(seed, core, off, flush_on_ack)
    except AssertionError as error:
        return seed, getattr(error, "name", "") or repr(error), 0, 0, 0
    return seed, "", world.kernel.steps, world.history.counts["acked"], world.stuck_count


def findings(
    seeds: range, core: str, off: frozenset[str] = frozenset(), flush_on_ack: bool | None = None, enough: int = 1 << 30
) -> list[tuple[int, str, int, int, int]]:
    """Of all these seeds, on all cores; stops after `enough` violations."""
    out = []
    found = 0
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        for result in pool.imap(partial(finding, core=core, off=off, flush_on_ack=flush_on_ack), seeds, chunksize=10):
            out.append(result)
            found += bool(result[1])
            if found >= enough:
                pool.terminate()
                break
    return out


BLOCK = 25  # seeds
BLOCKS = [
    *((block, "native") for block in range(12)),
    *((block, "model") for block in range(6)),
    *((block, "spares") for block in range(12)),
]


@pytest.mark.parametrize(("block", "core"), quick(BLOCKS, lambda one: one == (0, "native")))
def test_the_rules_hold(block: int, core: str) -> None:
    results = findings(range(BLOCK * block, BLOCK * block + BLOCK), core)
    assert not [f"seed {seed}: {name}" for seed, name, *_ in results if name]
    assert sum(events for _, _, events, *_ in results) > 3_000 * len(results) and sum(
        acked for *_, acked, _ in results
    ) > 60 * len(results), "too little happens to prove anything"


@pytest.mark.parametrize("first", quick(range(1_000, 1_150, 15), [1_000]))
def test_with_flush_on_ack_no_partition_needs_an_operator(first: int) -> None:
    results = findings(range(first, first + 15), "native", flush_on_ack=True)
    assert not [result for result in results if result[1] or result[4]]


def test_several_partitions() -> None:
    for seed in range(12):
        assert len(run(seed, partitions=3).partitions) == 3


def test_runs_are_deterministic() -> None:
    first, second = run(5), run(5)
    assert (
        first.kernel.trace_hash() == second.kernel.trace_hash() and first.history.committed == second.history.committed
    )


# Disabled rule -> (which core can disable it, topic with flush.on.ack or not or either, seeds
# within which it is detected)
MUTANTS = {
    "R2": ("native", None, 60),
    "R4": ("native", None, 100),
    "R5": ("native", None, 30),
    "R7": ("native", None, 200),
    "R8": ("native", False, 60),
    "R9": ("native", False, 60),
    "R10": ("native", None, 100),
    "R11": ("native", None, 30),
    "R12": ("native", None, 60),
    "R13": ("native", False, 60),
    "flush": ("native", True, 30),
    "lease": ("native", None, 100),
    "ack": ("model", None, 30),
    "swap unchecked": ("spares", None, 100),
    "swap in two": ("spares", None, 100),
    "swap often": ("spares", None, 100),
    "count spares": ("spares", None, 100),
}
RARE = {
    "R1": ("native", None, 6_000),
    "R3": ("native", None, 6_000),
    "R6": ("native", None, 3_000),
    "903": ("native", False, 3_000),
}


@pytest.mark.parametrize("rule", quick(MUTANTS, ["flush", "ack", "count spares"]))
def test_a_disabled_rule_is_detected(rule: str) -> None:
    core, flush_on_ack, count = MUTANTS[rule]
    results = findings(range(count), core, frozenset([rule]), flush_on_ack, enough=1)
    assert any(name for _, name, *_ in results), f"{rule} survives {count} seeds"


@pytest.mark.slow
@pytest.mark.timeout(1200)  # 500 CPU seconds if only the last seeds detect the rule
@pytest.mark.parametrize("rule", RARE)
def test_a_rarely_relevant_disabled_rule_is_detected(rule: str) -> None:
    core, flush_on_ack, count = RARE[rule]
    results = findings(range(count), core, frozenset([rule]), flush_on_ack, enough=1)
    assert any(name for _, name, *_ in results), f"{rule} survives {count} seeds"


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_many_more_seeds(block: int) -> None:
    results = findings(range(10_000 + block * 2_000, 12_000 + block * 2_000), "native")
    assert not [f"seed {seed}: {name}" for seed, name, *_ in results if name]
