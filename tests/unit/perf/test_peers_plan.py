"""The plan of the peer comparison: the star, the product, and the order of a round."""

from __future__ import annotations

import dataclasses

import pytest

from perf.peers import plan
from perf.peers.driving import KAFKA_TOOLS, LEAN, NEUTRAL
from perf.peers.peer import Load
from perf.peers.plan import BASE, Step


def _differing(load: Load) -> list[str]:
    return [field.name for field in dataclasses.fields(Load) if getattr(load, field.name) != getattr(BASE, field.name)]


def test_a_star_varies_one_factor_at_a_time_over_all_its_values() -> None:
    loads = plan.vary(BASE)
    assert loads[0] == BASE
    assert all(len(_differing(load)) == 1 for load in loads[1:])
    assert {load.record_bytes for load in loads} == set(plan.RECORD_BYTES)
    assert {load.acks for load in loads} == set(plan.ACKS)
    assert {load.compression for load in loads} == set(plan.COMPRESSIONS)
    assert {load.partitions for load in loads} == set(plan.PARTITIONS)


def test_durable_loads_use_acks_all() -> None:
    durable = dataclasses.replace(BASE, durable=True)
    assert {load.acks for load in plan.vary(durable)} == {"all"}
    assert all(load.acks == "all" for load in plan.all_combinations() if load.durable)


def test_the_product_has_every_combination_once() -> None:
    loads = plan.all_combinations()
    assert len(loads) == len(set(loads)) == 3 * 3 * 3 * 3 + 3 * 1 * 3 * 3


@pytest.mark.parametrize("full", [False, True])
def test_a_plan_measures_nothing_twice_and_begins_with_the_base(full: bool) -> None:
    steps = plan.steps(full)
    assert len(steps) == len(set(dataclasses.replace(step, everyone=False) for step in steps))
    through = [step for step in steps if step.kind == plan.THROUGHPUT and step.driver == NEUTRAL]
    assert through[0].load == BASE
    assert {step.load for step in through} == set(
        plan.all_combinations() if full else [*plan.vary(BASE), dataclasses.replace(BASE, durable=True)]
    )


def test_shares_are_measured_after_their_maximum() -> None:
    seen: set[Load] = set()
    for step in plan.steps():
        if step.kind == plan.ALONG:
            seen.add(step.load)
        if step.kind == plan.LATENCY and step.driver == NEUTRAL:
            assert step.share is None or step.load in seen
            assert (step.share is None) != (step.rate is None)
    assert seen == {BASE, dataclasses.replace(BASE, durable=True)}


def test_kafkas_tools_drive_only_peers_with_its_protocol() -> None:
    assert not any(step.everyone for step in plan.steps() if step.driver == KAFKA_TOOLS)
    assert any(step.driver == KAFKA_TOOLS for step in plan.steps(quick=True)), (
        "the shortest run shows that no client is favoured"
    )


def test_peers_without_codecs_are_measured_at_the_record_sizes() -> None:
    loads = {step.load for step in plan.steps() if step.kind == plan.THROUGHPUT and step.everyone}
    assert {load.record_bytes for load in loads} == set(plan.RECORD_BYTES)
    assert all(set(_differing(load)) <= {"record_bytes", "durable"} for load in loads)


def test_other_work_is_done_beside_a_rate_that_every_peer_can_reach() -> None:
    mixed = [step for step in plan.steps() if step.beside]
    assert {step.beside for step in mixed} == {plan.READERS, plan.CATCH_UP, plan.NEIGHBOUR}
    assert all(step.everyone and step.rate == min(plan.RATES) for step in mixed)


def test_clusters_have_three_replicas_and_lose_a_leader_last() -> None:
    for quick in (False, True):
        steps = plan.replicated_steps(quick)
        assert all(step.load.replicas == 3 for step in steps)
        assert [step.kind for step in steps].index(plan.FAILOVER) == len(steps) - 1


def test_peers_take_turns_forwards_and_backwards() -> None:
    assert [plan.order(["a", "b", "c"], number) for number in range(3)] == [
        ["a", "b", "c"],
        ["c", "b", "a"],
        ["a", "b", "c"],
    ]


def test_labels_say_what_differs() -> None:
    assert BASE.label() == "1 KiB, acks=all, 6 partitions, no fsync"
    assert (
        Load(100, "1", "zstd", 1, True).label() == "100 B, acks=1, zstd, 1 partition, fsync before the acknowledgement"
    )
    assert (
        Step(plan.LATENCY, share=0.5).label()
        == "latency at 50% of the broker's maximum rate: 1 KiB, acks=all, 6 partitions, no fsync"
    )
    assert (
        Step(plan.PRODUCE, driver=LEAN).label()
        == "producing by the leanest client: 1 KiB, acks=all, 6 partitions, no fsync"
    )
    assert (
        Step(plan.LATENCY, rate=10_000, beside=plan.READERS).label()
        == "latency at 10,000 records/s read by ten: 1 KiB, acks=all, 6 partitions, no fsync"
    )
    assert plan.REPLICATED.label() == "1 KiB, acks=all, 6 partitions, 3 replicas, no fsync"
    assert Step(plan.START).label() == "start-up"
