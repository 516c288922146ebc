"""`python -m tests.attack`: attacks a secured broker in rounds, until its time is over. Prints the
result of each round; the exit code says whether anything was found.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tests.broker
from tests.attack import damage, floods, other_user
from tests.attack.bad_input import KINDS, Intruded
from tests.attack.network import Proxy
from tests.attack.target import Target
from tests.attack.witness import Latencies, Memory, Witnesses, in_words

THREADS = 48
LATENCY_MAX_S = 10.0  # of a record while attackers act and nothing is killed; its p99 is printed
MEMORY_MAX_MIB = 700  # of one process
FAULT_S = (0.3, 4.0)
FINDINGS_MAX = 20  # printed at most
START_S = 240.0  # with attackers that use every core


class Attack:
    """One broker, its witnesses, and the findings."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self.proxy = Proxy()
        self.target = Target(folder, self.proxy.port)
        self.proxy.to_port = self.target.tls_port
        self.counts: Counter[str] = Counter()
        self.findings: list[str] = []

    def __enter__(self) -> Attack:
        self.target.start()
        self.proxy.start()
        self.witnesses = Witnesses(self.target, self.seed)
        self.latencies, self.memory = Latencies(self.target), Memory([self.target.broker])
        self.witnesses.start()
        self.latencies.start()
        self.memory.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.latencies.end()
        self.memory.end()
        for one in (*self.witnesses.producers, *self.witnesses.consumers):
            one.end()
        self.proxy.end()
        self.target.broker.stop()

    def step(self, name: str, work: Callable[[], Counter[str]], bounded: bool = True) -> None:
        """`bounded`: no process is killed in it, so records must be accepted meanwhile."""
        began = time.monotonic()
        try:
            outcomes = work()
        except Exception:
            outcomes = Counter({"failed": 1})
            self.find(f"{name}: {traceback.format_exc()}")
        seconds, latencies, memory = time.monotonic() - began, self.latencies.since(began), self.memory.taken()
        print(
            f"{name}: {dict(outcomes.most_common(6))} in {seconds:.1f} s; {in_words(latencies)}; MiB {memory}",
            flush=True,
        )
        if bounded and latencies and latencies[-1] > LATENCY_MAX_S:
            self.find(f"{name}: a record took {latencies[-1]:.1f} s")
        if any(size > MEMORY_MAX_MIB for size in memory.values()):
            self.find(f"{name}: memory {memory}")
        try:
            self.witnesses.wait_for_progress()
        except AssertionError as error:
            self.find(f"{name}: {error}")

    def find(self, text: str) -> None:
        if len(self.findings) < FINDINGS_MAX:
            print(f"FOUND {text}", flush=True)
        self.findings.append(text)

    # -- steps -------------------------------------------------------------------------------------

    def bad_input(self, kind: str, count: int) -> Counter[str]:
        outcomes: Counter[str] = Counter()
        seeds = iter([self.rng.getrandbits(60) for _ in range(count)])
        lock = threading.Lock()

        def run() -> None:
            while True:
                with lock:
                    seed = next(seeds, None)
                if seed is None:
                    return
                try:
                    found = KINDS[kind](self.target, random.Random(seed))
                except Intruded as error:
                    self.find(f"{kind}, seed {seed}: {error}")
                    found = "INTRUDED"
                except Exception as error:
                    found = f"{type(error).__name__}: {str(error)[:60]}"
                with lock:
                    outcomes[found] += 1

        with ThreadPoolExecutor(THREADS) as pool:
            for one in [pool.submit(run) for _ in range(THREADS)]:
                one.result()
        while self.target.proven:
            self.target.proven.pop().close()
        self.counts[kind] += count
        return outcomes

    def kills(self, count: int) -> Counter[str]:
        outcomes: Counter[str] = Counter()
        for _ in range(count):
            outcomes[damage.kill_or_pause(self.target.broker, self.rng).partition(" ")[0]] += 1
            time.sleep(self.rng.uniform(0, 0.4))  # a random moment under load
        self.counts.update(outcomes)
        return outcomes

    def faults(self, count: int) -> Counter[str]:
        outcomes: Counter[str] = Counter()
        for _ in range(count):
            outcomes[self.proxy.fault(self.rng)] += 1
            time.sleep(self.rng.uniform(*FAULT_S))
            self.proxy.heal()
            self.witnesses.wait_for_progress()
        self.counts["network fault"] += count
        return outcomes

    def corruptions(self, count: int) -> Counter[str]:
        outcomes: Counter[str] = Counter()
        while outcomes.total() < count:
            outcomes.update(
                one.split("/")[0].split("-")[0] for one in damage.damage_and_restart(self.target.broker, self.rng)
            )
            self.witnesses.wait_for_progress()
        self.counts["corruption"] += outcomes.total()
        return outcomes

    def local(self, count: int) -> Counter[str]:
        outcomes, found = other_user.attack(self.target, self.rng, count)
        for one in found[:10]:
            self.find(f"as another user: {one}")
        self.counts["local frame"] += count
        return outcomes

    def flood(self, name: str, count: int) -> Counter[str]:
        outcomes = floods.KINDS[name](self.target, self.rng, count)
        self.counts[f"flood of {name}"] += count
        return outcomes

    def conclude(self) -> None:
        acknowledged, wrong = self.witnesses.finish()
        self.counts["acknowledged"] = acknowledged
        for one in wrong:
            self.find(one)


def round_(attack: Attack, count: int, is_over: Callable[[], bool], only: set[str]) -> None:
    steps: list[tuple[str, Callable[[], Counter[str]], bool]] = [
        (kind, lambda kind=kind: attack.bad_input(kind, count), True) for kind in KINDS
    ]
    steps += [(name, lambda name=name: attack.flood(name, count), True) for name in floods.KINDS]
    steps += [
        ("other-user", lambda: attack.local(count), True),
        ("kills", lambda: attack.kills(max(1, count // 80)), False),
        ("faults", lambda: attack.faults(max(1, count // 150)), False),
        ("corruptions", lambda: attack.corruptions(max(1, count // 120)), False),
    ]
    attack.rng.shuffle(steps)
    for name, work, bounded in steps:
        if is_over():
            return
        if not only or name in only:
            attack.step(name, work, bounded)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the first round; the next ones count on")
    parser.add_argument("--seconds", type=float, default=600, help="no round and no step begins after them")
    parser.add_argument("--count", type=int, default=500, help="how often each kind is done in a round")
    parser.add_argument("--only", default="", help="these steps, separated by commas")
    parser.add_argument("--keep", action="store_true", help="leave the directories")
    arguments = parser.parse_args()
    tests.broker.START_SECONDS = START_S
    end = time.monotonic() + arguments.seconds
    only = set(filter(None, arguments.only.split(",")))
    totals: Counter[str] = Counter()
    findings: list[str] = []
    seed = arguments.seed
    while time.monotonic() < end:
        print(f"--- seed {seed}", flush=True)
        folder = Path(tempfile.mkdtemp(prefix="attack-"))
        with Attack(folder, seed) as attack:
            round_(attack, arguments.count, lambda: time.monotonic() > end, only)
            attack.conclude()
        totals.update(attack.counts)
        findings += [f"seed {seed}: {one}" for one in attack.findings]
        if not arguments.keep and not attack.findings:
            shutil.rmtree(folder)
        seed += 1
    print(json.dumps({"seeds": [arguments.seed, seed - 1], **dict(sorted(totals.items()))}))
    print(*findings, f"{len(findings)} findings", sep="\n")
    return 1 if findings else 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
