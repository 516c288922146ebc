"""`python -m perf alternate REVISION`: a broker of this tree and one of an older tree run at the same
time, and one load generator loads them alternately, in many short loads.

The speed of a shared machine changes within seconds. Adjacent loads of some tenths of a second see
the same machine, so the ratio of CPU time is known to a few per cent, where whole benches in turns
(`python -m perf beside`) differ by a third. Only a broker's workers are counted.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from perf import loading
from perf.accounting import cpu_time
from perf.cases import FILL_BATCH_COUNT, LABELS, SATURATE
from perf.trees.beside import checkout

RESAMPLES = 2000
PARTS = 3  # short loads: a third of what the bench appends
PRODUCE: dict[str, object] = {"acks": 1, "milliseconds": 20_000}
FILLED: dict[str, object] = {**PRODUCE, **SATURATE[16384], "batch": 16384, "count": FILL_BATCH_COUNT}


def _produce(size: int, parts: int = PARTS, **more: object) -> dict[str, object]:
    return {**PRODUCE, **SATURATE[size], "batch": size, "count": SATURATE[size]["count"] // parts, **more}


def _over_workers(size: int) -> list[dict[str, object]]:
    """In one of the two loads the connections are at the workers that own their partitions, in the
    other each batch is forwarded.
    """
    return [_produce(size, 2 * PARTS, connections=2, partitions=2, shift=shift) for shift in (0, 1)]


ONE_WORKER: dict[str, list[dict[str, object]]] = {
    **{f"produce of {size} bytes": [_produce(size)] for size in SATURATE},
    "fetch of 64 KiB": [{"bytes": 65536, "connections": 4, "milliseconds": 300}],
    "fetch of 1 MiB": [{"bytes": 1 << 20, "connections": 4, "milliseconds": 300}],
}
TWO_WORKERS = {f"produce of {size} bytes, local and forwarded": _over_workers(size) for size in (1024, 16384)}
# broker -> name of a load -> arguments of the load generator, for each of its runs
LOADS = {"epoll": ONE_WORKER, "uring": ONE_WORKER, "two": TWO_WORKERS}
# Runs in each tree with that tree's own perf, and executes one command per line.
SERVER = """
import os, sys
sys.path.insert(0, os.getcwd())
from perf.brokers import Brokers
with Brokers() as brokers:
    broker = brokers.get(sys.argv[1])
    print(broker.port, *broker.worker_pids, flush=True)
    for line in sys.stdin:
        command, topic, *more = line.split()
        if command == "create":
            broker.topic(topic, int(more[0]), **dict(pair.split("=") for pair in more[1:]))
        else:
            broker.delete(topic)
        print("done", flush=True)
"""


@dataclasses.dataclass
class Side:
    """The broker of one tree: CPU-µs of its worker for each request, by load."""

    process: subprocess.Popen[str]
    config: Sequence[str]  # of every topic, NAME=VALUE with _ for dots

    def __post_init__(self) -> None:
        assert self.process.stdout is not None
        port, *pids = (int(word) for word in self.process.stdout.readline().split())
        self.port, self.pids = port, pids

    def _command(self, *words: str) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(" ".join(words) + "\n")
        self.process.stdin.flush()
        if self.process.stdout.readline() != "done\n":
            raise loading.LoadFailed(f"{' '.join(words)}: the broker's process ended with {self.process.wait()}")

    def create(self, topic: str, partitions: int) -> None:
        self._command("create", topic, str(partitions), "flush_on_ack=false", *self.config)

    def delete(self, topic: str) -> None:
        self._command("delete", topic)

    def load(self, what: str, topic: str, arguments: dict[str, object]) -> float:
        before = cpu_time(self.pids)
        result = loading.run(what, port=self.port, topic=topic, **arguments)
        return (cpu_time(self.pids) - before).run_us / result["count"]


@contextlib.contextmanager
def _side(tree: Path, backend: str, config: Sequence[str]) -> Iterator[Side]:
    command = [str(tree / ".venv/bin/python"), "-c", SERVER, backend]
    with subprocess.Popen(command, cwd=tree, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Side(process, config)  # the end of its input ends the broker


def ratio(old: Sequence[float], new: Sequence[float]) -> tuple[float, float, float]:
    """The median of new to old by round, and the bounds that hold 95 % of its bootstrap
    distribution.
    """
    ratios = [after / before for before, after in zip(old, new, strict=True)]
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return statistics.median(ratios), medians[RESAMPLES // 40], medians[-RESAMPLES // 40]


def _load(side: Side, runs: Sequence[dict[str, object]], topic: str) -> float:
    """CPU-µs a request, the mean of the runs."""
    if "batch" not in runs[0]:
        return statistics.mean(side.load("fetch", "filled", arguments) for arguments in runs)
    side.create(topic, 2)
    try:
        return statistics.mean(side.load("produce", topic, arguments) for arguments in runs)
    finally:
        side.delete(topic)


def _alternate(sides: Sequence[Side], rounds: int, runs: Sequence[dict[str, object]]) -> tuple[list[float], ...]:
    costs: tuple[list[float], list[float]] = ([], [])
    for number in range(-1, rounds):  # the first warms up
        for index in (0, 1) if number % 2 else (1, 0):
            cost = _load(sides[index], runs, f"round-{number + 1}")
            if number >= 0:
                costs[index].append(cost)
    return costs


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m perf alternate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("revision")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument(
        "--topic",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a property of this tree's topics, with _ for dots",
    )
    arguments = parser.parse_args(words)
    old = checkout(arguments.revision)
    print(f"{'old':>9} {'new':>9}  {'ratio':>5} {'95 %':>12}  CPU-µs of a worker, {arguments.rounds} rounds")
    for broker, loads in LOADS.items():
        with _side(old, broker, ()) as before, _side(loading.ROOT, broker, arguments.topic) as after:
            for side in (before, after):
                side.create("filled", 1)
                side.load("produce", "filled", FILLED)
            for name, runs in loads.items():
                costs = _alternate((before, after), arguments.rounds, runs)
                middle, low, high = ratio(*costs)
                medians = " ".join(f"{statistics.median(cost):9.3f}" for cost in costs)
                print(
                    f"{medians}  {middle:5.3f}  {low:.3f}-{high:.3f}  {name}, {LABELS.get(broker, 'two workers')}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
