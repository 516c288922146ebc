"""One run of the comparison: rounds over the plan, every step on every peer in turn, until the rounds
are done or the time has run out.

It runs unattended: a measurement that fails is recorded with its reason, a peer that died is restarted,
a peer that fails repeatedly is left out of the rest with the reason; every sample is written to a file
immediately.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from perf import loading
from perf.accounting import wait_until_idle
from perf.peers import background, plan
from perf.peers.driving import KAFKA_TOOLS, LEAN, NEUTRAL, Driver, LoadFailed
from perf.peers.peer import Load, Peer
from perf.peers.plan import Step
from perf.peers.processes import PeerFailed
from perf.peers.results import Failure, PeerFacts, Sample, latency_values, step_json, throughput_values

FAILURES_MAX = 4  # of one peer, one after the other: then it is left out
# of a peer or a load generator; anything else is a bug of this program
ERRORS = (LoadFailed, PeerFailed, OSError, EOFError, ValueError, KeyError)
SYNC_SECONDS = 10.0
WARM_MILLISECONDS = 5000
FAILOVER_AFTER_S, FAILOVER_MS = 3.0, 6000  # it starts a client and writes to the topic first


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The limits of one measurement."""

    throughput_ms: int = 2500
    latency_ms: int = 3000
    latency_warm_ms: int = 800
    warm_ms: int = 8000  # of load for each peer, once it has started: compilers, page cache, connections
    payload_bytes: int = 1_500_000_000
    tools_seconds: float = 4.0
    tools_records_max: int = 4_000_000

    @classmethod
    def quick(cls) -> Bounds:
        return cls(1000, 1000, 500, 1000, 200_000_000, 1.5, 300_000)


class Laboratory:
    """`log` shows progress. `neutral`: the driver of each protocol. `tools`: drives the peers of Kafka's
    protocol; None: not available.
    """

    def __init__(
        self,
        peers: list[Peer],
        neutral: dict[str, Driver],
        tools: Driver | None,
        lean: dict[str, Driver] | None = None,
        *,
        log: Callable[[str], None],
        seconds: float,
        bounds: Bounds = Bounds(),
        samples_file: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.peers = {peer.name: peer for peer in peers}
        self.samples: list[Sample] = []
        self.failures: list[Failure] = []
        self.left_out: dict[str, str] = {}
        self.rounds = 0
        self._neutral, self._lean, self._tools, self._bounds = neutral, lean or {}, tools, bounds
        self._log, self._clock, self._samples_file = log, clock, samples_file
        self._began = clock()
        self._deadline = self._began + seconds
        self._serial = 0
        self._strikes = dict.fromkeys(self.peers, 0)
        self._took: dict[tuple[str, Step], float] = {}

    # -- the run --

    def warm(self) -> None:
        for peer in list(self.peers.values()):
            self._guarded(peer, Step(plan.THROUGHPUT), 0, lambda peer=peer: self._warm_peer(peer))

    def run(self, steps: list[Step], rounds: int) -> None:
        for number in range(rounds):
            for step in steps:
                for name in plan.order(list(self.peers), number):
                    if not self._is_selected(self.peers[name], step):
                        continue
                    if number and self._took.get((name, step), 0.0) > self._deadline - self._clock():
                        continue  # no time for it any more; a shorter one may still fit
                    if self._clock() > self._deadline:
                        self._log(f"The time ran out in round {number + 1}.")
                        return
                    self._measure(self.peers[name], step, number)
            self.rounds = number + 1
            if self._clock() > self._deadline:
                return

    def facts(self) -> list[PeerFacts]:
        return [
            PeerFacts(
                name,
                peer.version(),
                peer.settings,
                peer.flush_settings,
                self._neutral[peer.protocol].name,
                self.left_out.get(name, "") if not self._has_samples(name) else "",
            )
            for name, peer in self.peers.items()
        ]

    def _has_samples(self, name: str) -> bool:
        return any(sample.peer == name for sample in self.samples)

    # -- one measurement --

    def _is_selected(self, peer: Peer, step: Step) -> bool:
        if peer.name in self.left_out or (peer.protocol != "kafka" and not step.everyone):
            return False
        if (step.driver == KAFKA_TOOLS and self._tools is None) or (
            step.driver == LEAN and peer.protocol not in self._lean
        ):
            return False
        return not peer.unsupported_reason(step.load)

    def _driver(self, peer: Peer, step: Step) -> Driver:
        if step.driver == NEUTRAL:
            return self._neutral[peer.protocol]
        if step.driver == LEAN:
            return self._lean[peer.protocol]
        assert self._tools is not None
        return self._tools

    def _measure(self, peer: Peer, step: Step, number: int) -> None:
        began = self._clock()
        self._log(f"{(began - self._began) / 60:5.1f} min  round {number + 1}  {peer.name:<18} {step.label()}")
        values = self._guarded(peer, step, number, lambda: self._values(peer, step))
        self._took[(peer.name, step)] = self._clock() - began
        if values:
            sample = Sample(peer.name, step, number, values)
            self.samples.append(sample)
            self._keep({"peer": peer.name, "step": step_json(step), "round": number, "values": values})

    def _guarded(self, peer: Peer, step: Step, number: int, measure: Callable[[], dict | None]) -> dict | None:
        try:
            if not peer.running():
                peer.start()
            found = measure()
        except ERRORS as error:
            reason = f"{error}".strip().splitlines()[0][:300] if f"{error}".strip() else type(error).__name__
            self._log(f"           {peer.name}: {reason}")
            self.failures.append(Failure(peer.name, step, number, reason))
            self._keep({"peer": peer.name, "step": step_json(step), "round": number, "failed": reason})
            self._count_failure(peer, reason)
            return None
        self._strikes[peer.name] = 0
        return found

    def _count_failure(self, peer: Peer, reason: str) -> None:
        self._strikes[peer.name] += 1
        if self._strikes[peer.name] >= FAILURES_MAX:
            self.left_out[peer.name] = f"failed {FAILURES_MAX} times in a row, the last time: {reason}"
            self._log(f"           {peer.name} is left out of the rest: it {self.left_out[peer.name]}")
            peer.stop()

    def _values(self, peer: Peer, step: Step) -> dict[str, float] | None:
        quiesce()
        if step.kind == plan.START:
            with self._second(peer) as other:
                return {"start_seconds": other.start_seconds, "idle_pss_mb": other.pss_bytes() / 1e6}
        if step.kind == plan.FAILOVER:
            with self._second(peer) as other:
                return self._failover(other, step)
        topic = self._topic(peer, step.load)
        try:
            touch(self._megabytes(peer, step))
            if step.kind == plan.LATENCY:
                return self._latency(peer, step, topic)
            return self._throughput(peer, step, topic)
        finally:
            self._drop(peer, topic)

    @contextlib.contextmanager
    def _second(self, peer: Peer) -> Iterator[Peer]:
        """Starts a second instance on an empty directory, so that the measured one stays warm, and alive.
        Until a client connects, its memory is that of a broker without clients.
        """
        self._serial += 1
        other = type(peer)(peer.directory.parent / f"{peer.directory.name}-second-{self._serial}", peer.heap)
        try:
            other.prepare()
            other.start()
            yield other
        finally:
            other.drop()

    def _failover(self, peer: Peer, step: Step) -> dict[str, float]:
        """The longest time to an acknowledgement, of records that are due every millisecond while the
        partition's leader is killed.
        """
        topic = self._topic(peer, step.load)
        kill = threading.Timer(FAILOVER_AFTER_S, peer.kill_leader, (topic,))
        kill.start()
        measured = self._driver(peer, step).latency(
            peer, topic, step.load, rate=1000, milliseconds=FAILOVER_MS, warm_milliseconds=0
        )
        kill.join()
        return {"failover_seconds": measured["acknowledged"]["max_us"] / 1e6}

    def _throughput(self, peer: Peer, step: Step, topic: str) -> dict[str, float]:
        driver, load = self._driver(peer, step), step.load
        along = step.kind == plan.ALONG
        disk, cpu = peer.topic_disk_bytes(topic), peer.cpu_spent()
        produced = driver.produce(
            peer, topic, load, records=self._records(peer, step), milliseconds=self._bounds.throughput_ms, reading=along
        )
        values = throughput_values(produced, peer.cpu_spent() - cpu, load)
        if "acknowledged" in produced:
            values |= {
                f"acknowledged_{key}": value for key, value in produced["acknowledged"].items() if key != "count"
            }
        if step.kind == plan.THROUGHPUT:
            values["disk_bytes_per_record"] = (peer.topic_disk_bytes(topic) - disk) / produced["stored"]
            values["pss_mb"] = peer.pss_bytes() / 1e6
            cpu = peer.cpu_spent()
            consumed = driver.consume(peer, topic, load, records=produced["stored"])
            values |= {
                f"consume_{key}": value
                for key, value in throughput_values(consumed, peer.cpu_spent() - cpu, load).items()
            }
        return values

    def _megabytes(self, peer: Peer, step: Step) -> int:
        """Roughly how much the step will write, in all replicas."""
        bounds, rate = self._bounds, self._median(peer.name, Step(plan.THROUGHPUT, step.load), "records_per_s")
        seconds = (
            bounds.latency_ms + bounds.latency_warm_ms if step.kind == plan.LATENCY else bounds.throughput_ms
        ) / 1e3
        payload = (
            bounds.payload_bytes
            if rate is None
            else min(
                bounds.payload_bytes, int((step.rate or rate * (step.share or 1.0)) * seconds * step.load.record_bytes)
            )
        )
        return payload * step.load.replicas // 1_000_000

    def _records(self, peer: Peer, step: Step) -> int:
        """The neutral clients are bounded by time and bytes; Kafka's tool needs a count: the records of
        a few seconds at its own rate or, before that is known, at half of the neutral client's.
        """
        by_bytes = self._bounds.payload_bytes // step.load.record_bytes
        if step.driver != KAFKA_TOOLS:
            return by_bytes
        neutral = self._median(peer.name, Step(plan.THROUGHPUT, step.load), "records_per_s")
        rate = self._median(peer.name, step, "records_per_s") or (neutral or 100_000) / 2
        return max(1000, min(by_bytes, self._bounds.tools_records_max, int(rate * self._bounds.tools_seconds)))

    def _latency(self, peer: Peer, step: Step, topic: str) -> dict[str, float] | None:
        rate, bounds = self._rate(peer, step), self._bounds
        cpu = peer.cpu_spent()
        with self._beside(peer, step, topic, rate):
            measured = self._driver(peer, step).latency(
                peer,
                topic,
                step.load,
                rate=rate,
                milliseconds=bounds.latency_ms,
                warm_milliseconds=bounds.latency_warm_ms,
            )
        values = latency_values(measured, peer.cpu_spent() - cpu)
        if step.beside:  # the broker's CPU time includes that of the other load
            values = {name: value for name, value in values.items() if "_cpu_s_per_million" not in name}
        return values

    def _rate(self, peer: Peer, step: Step) -> int:
        if step.driver == KAFKA_TOOLS:
            return 1  # the tool ignores it
        if step.rate is not None:
            return step.rate
        assert step.share is not None
        maximum = self._median(peer.name, Step(plan.ALONG, step.load), "records_per_s")
        if maximum is None:
            raise LoadFailed("its maximum is not known: it could not be measured")
        return max(1, int(maximum * step.share))

    @contextlib.contextmanager
    def _beside(self, peer: Peer, step: Step, topic: str, rate: int) -> Iterator[None]:
        if not step.beside:
            yield
            return
        milliseconds = self._bounds.latency_ms + self._bounds.latency_warm_ms
        other = self._topic(peer, plan.BASE)
        try:
            with background.beside(
                step.beside,
                peer,
                self._driver(peer, step),
                topic,
                step.load,
                other,
                records=rate * milliseconds // 1000,
                milliseconds=milliseconds,
            ):
                yield
        finally:
            self._drop(peer, other)

    def _median(self, name: str, step: Step, value: str) -> float | None:
        step = dataclasses.replace(step, everyone=False)
        found = [
            sample.values[value]
            for sample in self.samples
            if sample.peer == name
            and dataclasses.replace(sample.step, everyone=False) == step
            and value in sample.values
        ]
        return statistics.median(found) if found else None

    # -- before and after a measurement --

    def _topic(self, peer: Peer, load: Load) -> str:
        self._serial += 1
        name = f"peers{self._serial:05}"  # of one length: none is part of another
        peer.make_topic(name, load)
        return name

    def _drop(self, peer: Peer, topic: str) -> None:
        """Deletes the topic. A failure is only logged: the measurement counts, or has failed for a more
        important reason.
        """
        try:
            peer.drop_topic(topic)
        except ERRORS as error:
            self._log(f"           {peer.name}: {topic} stays: {error}")

    def _warm_peer(self, peer: Peer) -> dict:
        """Load by every driver, which does not count: afterwards a JVM has compiled its hot paths, and
        each process has touched its memory.
        """
        self._log(f"{(self._clock() - self._began) / 60:5.1f} min  warming  {peer.name}")
        driver, load = self._neutral[peer.protocol], dataclasses.replace(plan.BASE, replicas=peer.brokers)
        topic = self._topic(peer, load)
        try:
            stored = driver.produce(
                peer,
                topic,
                load,
                records=self._bounds.payload_bytes * 2 // plan.BASE.record_bytes,
                milliseconds=self._bounds.warm_ms,
                reading=True,
            )["stored"]
            driver.consume(peer, topic, load, records=stored)
        finally:
            self._drop(peer, topic)
        return {}

    def _keep(self, line: dict) -> None:
        if self._samples_file is not None:
            with self._samples_file.open("a") as out:
                out.write(json.dumps(line, ensure_ascii=False) + "\n")


def quiesce() -> None:
    """Writes back what the previous measurement left dirty, so that it is not charged to the next one;
    for a limited time, since a disk may be slow.
    """
    writer = threading.Thread(target=os.sync, daemon=True)
    writer.start()
    writer.join(SYNC_SECONDS)
    wait_until_idle(1.0)


def touch(megabytes: int) -> None:
    """Touches and frees as much memory as the page cache is about to take, immediately before it
    does: in a virtual machine the first touch of a page costs several times what writing to it
    does, and the host takes free pages back within seconds (perf/README.md). It would be charged to
    whichever peer happens to write there first.
    """
    if megabytes:
        loading.run("warm", megabytes=megabytes, milliseconds=WARM_MILLISECONDS)
