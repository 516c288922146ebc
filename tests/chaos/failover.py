"""How long writes are interrupted when a leader fails:
`python -m tests.chaos.failover [--kills 30] [--minutes 40] [--only killed,cut,...]`.

A writer sends one acks=all record after another to one partition of three replicas, PACE_MS apart.
A gap is the time between two consecutive acknowledgements, the longest around each fault. Before
each fault all hosts are ready and all replicas in sync. The writer behaves like a client, but
without a client library's own delays (raw_writer.py), so that the cluster is measured; with
--client librdkafka it uses that library.

    killed      kill -9 of acceptor, controller and workers of the leader's host; its keeper
                survives and proves it. Alternately the leader's host is the active controller's, or
                is not
    stopped     controlled shutdown of the leader's host, alternating as above; the writer's errors
                are counted too
    lost        kill -9 of all processes on the leader's host: detected by session expiry
    cut         the leader's host is cut off from the other hosts and from the writer
    controller  kill -9 of the active controller's process, with the leader elsewhere: writes should
                not be interrupted; and how long it takes until another one is active

`lost` and `cut` are measured with the broker's default session and then, on another cluster, with
one of 2 s and a quorum that waits a quarter of that for its leader. Prints a line for each fault
(stderr) and at the end a table (Markdown), with the machine's load: on a machine with other load
these are upper bounds. By default it takes about half an hour, and never begins another fault after
--minutes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

from tests.chaos import network
from tests.chaos.asking import Asking, Report
from tests.chaos.hosts import PORT, ChaosCluster, ChaosHost, Targets
from tests.chaos.run import CREATE

ROOT = Path(__file__).resolve().parents[2]
PACE_MS = 2
WAIT_SECONDS = 60.0
CALM_SECONDS = 0.5  # between two faults, after everything has recovered
SHORT_SESSION_MS = 2_000
KINDS = ("killed", "stopped", "controller", "lost", "cut")
WRITER = """
import json, sys, time
from confluent_kafka import Producer
bootstrap, pace_ms = json.loads(sys.argv[1])
log = open(sys.argv[2], "w", buffering=1)
p = Producer({"bootstrap.servers": bootstrap, "acks": "all", "enable.idempotence": True, "linger.ms": 0, "message.timeout.ms": 60000, "request.timeout.ms": 1500, "socket.timeout.ms": 2000, "log_level": 0,
              "reconnect.backoff.ms": 10, "reconnect.backoff.max.ms": 100, "retry.backoff.ms": 10, "retry.backoff.max.ms": 50, "metadata.recovery.strategy": "none",
              "topic.metadata.refresh.fast.interval.ms": 50, "socket.connection.setup.timeout.ms": 1000, "error_cb": lambda e: None})
waiting = False
def done(error, message):
    global waiting
    waiting = False
    log.write(f"{time.monotonic_ns()} {error.code() if error else 0}\\n")
while True:
    waiting = True
    p.produce("t", b"x" * 100, on_delivery=done)
    p.flush(0)
    while waiting:
        p.poll(0.05)
    time.sleep(pace_ms / 1000)
"""
ACTIVE = re.compile(r"^(\S+ \S+) .* this host is the active controller ")


class Found(NamedTuple):
    gap_ms: float
    refused: int  # responses to Produce with an error; with librdkafka: failed records
    load: float  # of the machine (loadavg, one minute)
    controller_ms: float = -1.0  # until another controller was active


class Measure:
    def __init__(self, net: network.Network, cluster: ChaosCluster, directory: Path, client: str) -> None:
        self.network, self.cluster, self.log = net, cluster, directory / "writer.log"
        done = subprocess.run(
            net.run("client", [sys.executable, "-c", CREATE, json.dumps([cluster.operator, {"t": 1}, {}])]),
            capture_output=True,
            text=True,
            timeout=60,
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-500:])
        self.queries = Asking(net.namespace("client"), {host.node_id: (host.address, PORT) for host in cluster})
        words = ["-m", "tests.chaos.raw_writer"] if client == "raw" else ["-c", WRITER]
        self.writer = subprocess.Popen(
            net.run("client", [sys.executable, *words, json.dumps([cluster.bootstrap, PACE_MS]), str(self.log)]),
            cwd=ROOT,
        )

    def _until(self, what: str, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + WAIT_SECONDS
        while not condition():
            assert time.monotonic() < until, f"{what}\n{self.cluster.logs()}"
            time.sleep(0.05)  # other processes

    def report(self) -> Report:
        """Once all hosts agree, with all replicas in sync."""
        seen: list[Report] = []

        def calm() -> bool:
            reported = [self.queries.report("t", [node]) for node in self.cluster.hosts]
            seen[:] = [one for one in reported if one is not None]
            first = seen[0] if seen else None
            return (
                first is not None
                and len(seen) == len(reported)
                and len({(one.controller, one.leader) for one in seen}) == 1
                and min(first[:2]) >= 0
                and set(first.in_sync) == set(first.replicas)
            )

        self._until("the hosts do not agree, or not all are in sync", calm)
        return seen[0]

    def prepare(self, on_active: bool | None) -> tuple[ChaosHost, ChaosHost]:
        """The leader's host and the active controller's, when everything is calm; the same one if
        `on_active`, two different ones if not, either if None.
        """
        self.cluster.wait_healthy()
        reported = self.report()
        if on_active is not None and (reported.leader == reported.controller) != on_active:
            expected = (
                reported.controller
                if on_active
                else next(node for node in reported.replicas if node != reported.controller)
            )
            self.queries.lead("t", expected, reported.replicas)
            self._until("the leadership does not move", lambda: self.report().leader == expected)
            reported = self.report()
        self._until(
            "nothing is written",
            lambda: (
                len([when for when, code in self.answers() if code == 0 and when > time.monotonic_ns() - 1_000_000_000])
                >= 10
            ),
        )
        time.sleep(CALM_SECONDS)
        return self.cluster.hosts[reported.leader], self.cluster.hosts[reported.controller]

    def answers(self) -> list[tuple[int, int]]:
        """(when, error code) of every record whose outcome is known."""
        lines = self.log.read_text().split("\n")[:-1] if self.log.exists() else []
        return [
            (int(when), int(code))
            for when, _, code in (line.partition(" ") for line in lines)
            if not code.startswith("#")
        ]

    def gap_ms(self, since_ns: int) -> tuple[float, int]:
        """The longest period without an acknowledgement that ends after `since_ns`, once writes
        continue; and how many responses were errors.
        """
        until = time.monotonic() + WAIT_SECONDS
        while True:
            seen = self.answers()
            flowing = [when for when, code in seen if code == 0]
            if (
                len(flowing) > 20
                and flowing[-20] > since_ns + 1_000_000_000
                and flowing[-1] > time.monotonic_ns() - 500_000_000
            ):
                around = [when for when in flowing if when >= since_ns - 50_000_000]
                first = max((when for when in flowing if when < since_ns), default=since_ns)
                longest = max(later - earlier for earlier, later in zip([first, *around], around, strict=False))
                return longest / 1e6, sum(code != 0 for when, code in seen if when >= since_ns)
            assert time.monotonic() < until, f"writes do not flow again\n{self.cluster.logs()}"
            time.sleep(0.1)  # the writer continues by itself

    def active_since(self, moment: float) -> float:
        """time.time() at which a host became the active controller, the first after `moment`."""
        found: list[float] = []

        def seen() -> bool:
            for host in self.cluster:
                for line in host.logs(400).splitlines():
                    if match := ACTIVE.match(line):
                        found.append(datetime.datetime.fromisoformat(match[1]).replace(tzinfo=datetime.UTC).timestamp())
            found[:] = [one for one in found if one >= moment]
            return bool(found)

        self._until("no host becomes the active controller", seen)
        return min(found)

    def stop(self) -> None:
        self.writer.kill()
        self.writer.wait()
        self.queries.close()


def _start(host: ChaosHost) -> None:
    if not host.runs:
        host.start()


def once(measure: Measure, kind: str, on_active: bool | None) -> Found:
    net = measure.network
    leader, active = measure.prepare(on_active)
    load, moment, began = os.getloadavg()[0], time.time(), time.monotonic_ns()
    controller_ms = -1.0
    if kind == "killed":
        leader.kill(Targets.processes)
    elif kind == "stopped":
        leader.stop()
    elif kind == "lost":
        leader.kill_all()
    elif kind == "cut":
        net.split([leader.name], [other for other in net.names if other != leader.name])
    else:
        active.kill(["mqd-controller"])
        controller_ms = (measure.active_since(moment) - moment) * 1000
    gap_ms, refused = measure.gap_ms(began)
    net.heal()
    _start(leader)
    return Found(gap_ms, refused, load, controller_ms)


def _row(name: str, values: list[float], found: list[Found]) -> str:
    ordered = sorted(values)
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return (
        f"| {name} | {len(ordered)} | {median(ordered):,.0f} | {p95:,.0f} | {ordered[-1]:,.0f} |"
        f" {sum(one.refused for one in found)} | {mean(one.load for one in found):.1f} |"
    )


def table(results: dict[str, list[Found]]) -> str:
    rows = [
        "| fault | count | median ms | p95 ms | longest ms | refused | load |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, found in results.items():
        rows.append(_row(name, [one.gap_ms for one in found], found))
        if found[0].controller_ms >= 0:
            rows.append(_row(f"{name}: until another one is active", [one.controller_ms for one in found], found))
    return "\n".join(rows)


def _runs(kinds: list[str], kills: int) -> Iterator[tuple[str, str, bool | None]]:
    """(name of the row, kind, whether on the active controller's host), in execution order."""
    for kind in kinds:
        if kind in ("killed", "stopped"):
            for _ in range(kills):
                yield f"{kind}, another host is the controller", kind, False
                yield f"{kind}, the active controller's host", kind, True
        else:
            for _ in range(kills if kind == "controller" else max(1, kills // 3)):
                yield kind, kind, False if kind == "controller" else None


def measure_all(
    kinds: list[str], kills: int, client: str, session_ms: int, until: float, results: dict[str, list[Found]]
) -> None:
    config: dict[str, str] = {}
    if session_ms:  # when the active controller's host is lost another one is elected first, which has to be as quick
        config = {
            "broker.session.timeout.ms": str(session_ms),
            "broker.heartbeat.interval.ms": str(session_ms // 6),
            "controller.quorum.fetch.timeout.ms": str(max(200, session_ms // 4)),
        }
    names = ("n1", "n2", "n3", "client")
    with (
        tempfile.TemporaryDirectory(prefix="mqd-failover-") as directory,
        network.Network(names) as net,
        ChaosCluster(net, Path(directory) / "hosts", config=config) as cluster,
    ):
        cluster.wait_healthy()
        measure = Measure(net, cluster, Path(directory), client)
        try:
            for name, kind, on_active in _runs(kinds, kills):
                if time.monotonic() > until:
                    print("  no time is left", file=sys.stderr)
                    break
                name = f"{name}, session {session_ms / 1000:g} s" if session_ms else name
                found = once(measure, kind, on_active)
                results.setdefault(name, []).append(found)
                more = f", another controller after {found.controller_ms:.0f} ms" if found.controller_ms >= 0 else ""
                print(
                    f"  {name}: {found.gap_ms:.0f} ms, {found.refused} refused{more}, load {found.load:.1f}",
                    file=sys.stderr,
                    flush=True,
                )
        finally:
            measure.stop()


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.failover", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kills",
        type=int,
        default=30,
        help="of `killed`, `stopped` (on either kind of host) and `controller`; the others a third of that",
    )
    parser.add_argument("--minutes", type=float, default=40.0)
    parser.add_argument("--only", default=",".join(KINDS))
    parser.add_argument("--client", choices=("raw", "librdkafka"), default="raw")
    parser.add_argument(
        "--session-ms",
        type=int,
        default=-1,
        help=(
            "broker.session.timeout.ms of all clusters (default: 0, the broker's own; and `lost` and `cut` once more"
            " with 2000)"
        ),
    )
    arguments = parser.parse_args(words)
    if reason := network.why_not():
        print(f"not measured here: {reason}")
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    kinds, until = arguments.only.split(","), time.monotonic() + 60 * arguments.minutes
    results: dict[str, list[Found]] = {}
    try:
        measure_all(kinds, arguments.kills, arguments.client, max(0, arguments.session_ms), until, results)
        short = [kind for kind in ("lost", "cut") if kind in kinds]
        if short and arguments.session_ms < 0 and time.monotonic() < until:
            measure_all(short, arguments.kills, arguments.client, SHORT_SESSION_MS, until, results)
    finally:
        if results:
            print(table(results), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
