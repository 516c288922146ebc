"""Repeats one seed of the cluster simulator and prints it: `python -m tests.sim.replay SEED [--off
R5] [--kind members] [--chaos 3000] [--last 60]`. The same seed and commit give the same run.
"""

from __future__ import annotations

import argparse
import sys
import traceback

from tests.sim.cluster.cluster_world import ClusterWorld
from tests.sim.plans import KINDS
from tests.sim.schedules import CHAOS


def report(world: ClusterWorld, last: int) -> None:
    for entry in world.kernel.history[-last:]:
        print(f"{entry[0] / 1e6:12.6f}", *entry[1:])
    print(f"\nseed {world.seed}: {world.plan}")
    print(
        f"{world.kernel.steps} events, {world.kernel.now / 1e6:.3f} s of simulated time, trace"
        f" {world.kernel.trace_hash()}"
    )
    print("faults:", world.faults.counts)
    print("quorum:", world.history_of_quorum())
    for broker in world.state.brokers.values():
        host = world.hosts[broker.node_id]
        left = (host.lease_deadline_ns - host.clock.now()) / 1e9
        print(
            f"node {broker.node_id}: registered as {broker.epoch} (incarnation {broker.incarnation}, fenced"
            f" {broker.fenced}); itself {host.broker_epoch} ({host.incarnation}), lease {left:.3f} s"
        )
    for partition in world.partitions():
        print(world.name(partition), world.view(partition))
        for host in world.hosts:
            for worker in host.workers:
                place = worker.places.get(partition) if worker is not None else None
                if place is not None:
                    core, role = (
                        place.core,
                        ("leads" if place.core.leading else "follows" if place.core.following else "idle"),
                    )
                    print(
                        f"    node {host.node} {role} epoch {core.leader_epoch}.{core.partition_epoch}: high watermark"
                        f" {core.high_watermark}, end {place.log.end}, durable {place.log.durable}, in sync"
                        f" {sorted(core.maximal)}, waiting {len(place.waiting)}"
                    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.replay", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--off", default="", help="rules to switch off, with commas")
    parser.add_argument("--kind", choices=KINDS, help="of plans.py; none: as drawn")
    parser.add_argument(
        "--chaos", type=int, help=f"events before healing begins; {CHAOS} unless the kind has another number"
    )
    parser.add_argument("--last", type=int, default=60, help="entries of the story to show")
    given = parser.parse_args(arguments)
    kind = KINDS.get(given.kind)
    make = kind.world if kind is not None else ClusterWorld
    world = make(
        given.seed,
        frozenset(rule for rule in given.off.split(",") if rule),
        kind.plan(given.seed) if kind is not None else None,
    )
    try:
        world.run(given.chaos or (kind.chaos if kind is not None else CHAOS))
    except Exception as error:
        traceback.print_exc()
        report(world, given.last)
        print(f"\n{error}")
        return 1
    report(world, given.last)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
