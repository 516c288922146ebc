"""How long writes stand still when a leader goes: `python -m tests.chaos.failover [--kills 30] [--only killed,cut,...]`.

A writer sends one acks=all record after the other to one partition, PACE_MS apart. A gap is the time between two acknowledgements that follow each other, the longest around each
fault. Before each fault all replicas are in sync. The writer asks the hosts itself (raw_writer.py), so that the cluster is measured; with --client librdkafka it is that library, which looks
for a new leader once a second, and whose records that failed are counted.

    killed      kill -9 of acceptor, controller and workers of the leader's host; its keeper lives and proves it
    stopped     controlled shutdown of the leader's host; errors that the writer sees are counted too
    lost        kill -9 of everything on the leader's host: found out by its session's end
    cut         the leader's host is cut off from the other hosts and from the writer, which gives an answer up after 2 s (socket.timeout.ms; librdkafka's own default is a minute)
    controller  kill -9 of the active controller's process: writes should not stand still at all
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from tests.chaos import network
from tests.chaos.faults import PROCESSES
from tests.chaos.hosts import ChaosCluster, ChaosHost
from tests.chaos.run import CREATE, IN_SYNC

ROOT = Path(__file__).resolve().parents[2]
PACE_MS = 2
WAIT_SECONDS = 60.0
WRITER = """
import json, sys, time, collections
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
LEADER_OF = """
import json, sys
from confluent_kafka.admin import AdminClient
bootstrap, topic = json.loads(sys.argv[1])
print(AdminClient({"bootstrap.servers": bootstrap, "log_level": 0}).list_topics(topic, timeout=20).topics[topic].partitions[0].leader)
"""


class Measure:
    def __init__(self, net: network.Network, cluster: ChaosCluster, directory: Path, client: str) -> None:
        self.network, self.cluster, self.log = net, cluster, directory / "writer.log"
        self.script(CREATE, cluster.bootstrap, {"t": 1}, {})
        words = ["-m", "tests.chaos.raw_writer"] if client == "raw" else ["-c", WRITER]
        command = net.run("client", [sys.executable, *words, json.dumps([cluster.bootstrap, PACE_MS]), str(self.log)])
        self.writer = subprocess.Popen(command, cwd=ROOT)

    def script(self, code: str, *arguments: object) -> str:
        done = subprocess.run(self.network.run("client", [sys.executable, "-c", code, json.dumps(arguments)]), capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise RuntimeError(done.stderr[-500:])
        return done.stdout

    def leader(self) -> ChaosHost:
        until = time.monotonic() + WAIT_SECONDS
        while (node := int(self.script(LEADER_OF, self.cluster.bootstrap, "t"))) < 0:
            assert time.monotonic() < until, self.cluster.logs()
        return self.cluster.hosts[node]

    def wait_in_sync(self) -> None:
        until = time.monotonic() + WAIT_SECONDS
        while json.loads(self.script(IN_SYNC, self.cluster.bootstrap, {"t": 1})):
            assert time.monotonic() < until, self.cluster.logs()
            time.sleep(0.2)  # other hosts copy

    def acknowledged(self) -> list[tuple[int, int]]:
        """(when, error code) of every record whose fate is known."""
        lines = self.log.read_text().split("\n")[:-1]
        return [(int(when), int(code)) for when, code in (line.split() for line in lines)]

    def gap_ms(self, since_ns: int) -> tuple[float, int]:
        """The longest stretch without an acknowledgement that ends after `since_ns`, once writes flow again; and how many records failed."""
        until = time.monotonic() + WAIT_SECONDS
        while True:
            seen = self.acknowledged()
            flowing = [when for when, code in seen if code == 0]
            if len(flowing) > 20 and flowing[-20] > since_ns + 1_000_000_000 and flowing[-1] > time.monotonic_ns() - 500_000_000:
                around = [when for when in flowing if when >= since_ns - 50_000_000]
                first = max((when for when in flowing if when < since_ns), default=since_ns)
                longest = max(later - earlier for earlier, later in zip([first, *around], around, strict=False))
                return longest / 1e6, sum(code != 0 for when, code in seen if when >= since_ns)
            assert time.monotonic() < until, f"writes do not flow again\n{self.cluster.logs()}"
            time.sleep(0.1)  # the writer goes on by itself

    def around(self, fault: Callable[[ChaosHost], None], after: Callable[[ChaosHost], None]) -> tuple[float, int]:
        self.cluster.wait_whole()
        self.wait_in_sync()
        victim = self.leader()
        began = time.monotonic_ns()
        fault(victim)
        found = self.gap_ms(began)
        after(victim)
        return found

    def stop(self) -> None:
        self.writer.kill()
        self.writer.wait()


def _nothing(host: ChaosHost) -> None:
    pass


def _start(host: ChaosHost) -> None:
    if not host.runs:
        host.start()


def _kinds(measure: Measure) -> dict[str, tuple[Callable[[ChaosHost], None], Callable[[ChaosHost], None]]]:
    net, cluster = measure.network, measure.cluster

    def killed(host: ChaosHost) -> None:
        host.kill(PROCESSES)

    def cut(host: ChaosHost) -> None:
        net.split([host.name], [other for other in net.names if other != host.name])

    def heal(host: ChaosHost) -> None:
        net.heal()

    def controller(host: ChaosHost) -> None:
        active = [one for one in cluster if "this host is the active controller" in one.logs(400)]
        newest = max(active, key=lambda one: max((line for line in one.logs(400).splitlines() if "this host is the active controller" in line), default=""))
        newest.kill(["mqd-controller"])

    return {
        "killed": (killed, _nothing), "stopped": (lambda host: host.stop() and None, _start), "lost": (lambda host: host.kill_all(), _start), "cut": (cut, heal),
        "controller": (controller, _nothing),
    }  # fmt: skip


def _line(kind: str, found: list[tuple[float, int]]) -> dict:
    gaps = sorted(gap for gap, _ in found)
    return {
        "fault": kind, "count": len(gaps), "median_ms": round(median(gaps), 1), "p95_ms": round(gaps[min(len(gaps) - 1, int(0.95 * len(gaps)))], 1), "longest_ms": round(gaps[-1], 1),
        "failed_records": sum(failed for _, failed in found),
    }  # fmt: skip


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.failover", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30, help="of `killed`; the others a third of that")
    parser.add_argument("--only", default="killed,stopped,lost,cut,controller")
    parser.add_argument("--client", choices=("raw", "librdkafka"), default="raw")
    parser.add_argument("--session-ms", type=int, default=0, help="broker.session.timeout.ms (default: the broker's own)")
    arguments = parser.parse_args(words)
    if reason := network.why_not():
        print(f"not measured here: {reason}")
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    config = {"broker.session.timeout.ms": str(arguments.session_ms), "broker.heartbeat.interval.ms": str(arguments.session_ms // 6)} if arguments.session_ms else {}
    names = ("n1", "n2", "n3", "client")
    with tempfile.TemporaryDirectory(prefix="mqd-failover-") as directory, network.Network(names) as net, ChaosCluster(net, Path(directory) / "hosts", config=config) as cluster:
        cluster.wait_whole()
        measure = Measure(net, cluster, Path(directory), arguments.client)
        try:
            for kind in arguments.only.split(","):
                fault, after = _kinds(measure)[kind]
                count = arguments.kills if kind == "killed" else max(1, arguments.kills // 3)
                found = []
                for _ in range(count):
                    found.append(measure.around(fault, after))
                    print(f"  {kind}: {found[-1][0]:.0f} ms, {found[-1][1]} failed", file=sys.stderr, flush=True)
                print(json.dumps(_line(kind, found)), flush=True)
        finally:
            measure.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
