"""Directed runs on real brokers in namespaces: the responses on each side of a cut, and one short
run of all parts of the machinery. Longer ones: `python -m tests.chaos`.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos import network, replicas
from tests.chaos.hosts import NOT_DATA, PORT, ChaosCluster, Extras, Targets, wall_clock_shim
from tests.chaos.run import CREATE, DISK_BYTES, IN_SYNC, Plan, Run

ROOT = Path(__file__).resolve().parents[2]
REASON = network.why_not()
needs_namespaces = pytest.mark.skipif(bool(REASON), reason=REASON)
LEADER = """
import json, sys
from confluent_kafka.admin import AdminClient
bootstrap, topic = json.loads(sys.argv[1])
print(AdminClient({"bootstrap.servers": bootstrap, "log_level": 0}).list_topics(topic, timeout=20).topics[topic].partitions[0].leader)
"""


class Bench:
    def __init__(self, net: network.Network, cluster: ChaosCluster) -> None:
        self.network, self.cluster = net, cluster

    def script(self, code: str, *arguments: object) -> str:
        done = subprocess.run(
            self.network.run("client", [sys.executable, "-c", code, json.dumps(arguments)]),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def leader(self, nodes: list[int], topic: str = "t") -> int:
        """According to these hosts."""
        return int(self.script(LEADER, ",".join(self.cluster.hosts[node].bootstrap for node in nodes), topic))

    def probe(self, node: int, *value: str) -> dict:
        command = [
            sys.executable,
            "-m",
            "tests.chaos.probe",
            self.cluster.hosts[node].address,
            str(PORT),
            "t",
            "0",
            *value,
        ]
        done = subprocess.run(self.network.run("client", command), cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def wait_write(self, node: int, value: str, seconds: float = 30.0) -> None:
        until = time.monotonic() + seconds
        while (found := self.probe(node, value)).get("produced", [-1])[0] != 0:
            assert time.monotonic() < until, f"{found}\n{self.cluster.logs()}"
            time.sleep(0.1)  # another host has to take over


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with network.Network(("n1", "n2", "n3", "client")) as net, ChaosCluster(net, tmp_path / "hosts") as cluster:
        cluster.wait_healthy()
        made = Bench(net, cluster)
        made.script(CREATE, cluster.operator, {"t": 1}, {})
        yield made


@needs_namespaces
@pytest.mark.slow
def test_the_minority_refuses_writes_and_serves_what_was_committed(bench: Bench) -> None:
    """A leader that is cut off from the other hosts, but not from clients: it acknowledges no
    acks=all write, and committed records can be read there; the others continue; finally the logs
    are equal.
    """
    old = bench.leader([1, 2, 3])
    others = [node for node in (1, 2, 3) if node != old]
    for number in range(10):
        assert bench.probe(old, f"before-{number}")["produced"][0] == 0
    bench.network.split([f"n{old}"], [f"n{node}" for node in others])
    refused = [bench.probe(old, f"lost-{number}") for number in range(3)]
    assert all(found["produced"][0] != 0 for found in refused), refused
    until = time.monotonic() + 30
    while (new := bench.leader(others)) in (old, -1):
        assert time.monotonic() < until, bench.cluster.logs()
        time.sleep(0.1)  # the session of the old one has to expire
    for number in range(10):
        bench.wait_write(new, f"during-{number}")
    committed = [f"before-{number}" for number in range(10)]
    stale = bench.probe(old)
    assert stale["values"][:10] == committed and stale["high_watermark"] == 10, (
        "reads below the high watermark continue"
    )
    assert bench.probe(old, "lost-again")["produced"][0] != 0
    bench.network.heal()
    until = time.monotonic() + 60
    while json.loads(bench.script(IN_SYNC, bench.cluster.operator, {"t": 1})):
        assert time.monotonic() < until, bench.cluster.logs()
        time.sleep(0.2)  # it follows again, and truncates records that were never committed
    values = bench.probe(bench.leader([1, 2, 3]))["values"]
    assert [value for value in values if not value.startswith("lost")] == committed + [
        f"during-{number}" for number in range(10)
    ]
    assert not any(value.startswith("lost") for value in values)
    for host in bench.cluster:
        host.stop()
    assert (
        replicas.compare(
            {host.name: host.data_dir for host in bench.cluster}, {("t", 0): [host.name for host in bench.cluster]}
        )
        == []
    )


@needs_namespaces
@pytest.mark.slow
def test_a_leader_with_a_full_disk_is_replaced_and_rejoins(tmp_path: Path) -> None:
    """The disk of a leader fills up: the others take over its partition at once and no longer wait
    for it; when there is space, it is in sync again. Without an operator.
    """
    with (
        network.Network(("n1", "n2", "n3", "client")) as net,
        ChaosCluster(net, tmp_path / "hosts", extras=Extras(disk_bytes=DISK_BYTES)) as cluster,
    ):
        cluster.wait_healthy()
        bench = Bench(net, cluster)
        bench.script(CREATE, cluster.operator, {"t": 1}, {})
        for round_, host_of in enumerate(("leader", "follower")):
            leader = bench.leader([1, 2, 3])
            full = leader if host_of == "leader" else next(node for node in (1, 2, 3) if node != leader)
            others = [node for node in (1, 2, 3) if node != full]
            bench.wait_write(leader, f"before-{round_}")
            cluster.hosts[full].fill_disk()
            until = time.monotonic() + 8  # much sooner than replica.lag.time.max.ms
            while f"in sync {sorted(others)}" not in (
                behind := str(json.loads(bench.script(IN_SYNC, cluster.operator, {"t": 1})))
            ).replace(str(others[::-1]), str(others)):
                assert time.monotonic() < until, f"{host_of}: {behind}\n{cluster.logs()}"
                time.sleep(0.1)  # another host decides
            new = bench.leader(others)
            assert new in others
            for number in range(5):
                bench.wait_write(new, f"during-{round_}-{number}")
            cluster.hosts[full].free_disk()
            until = time.monotonic() + 60
            while behind := json.loads(bench.script(IN_SYNC, cluster.operator, {"t": 1})):
                assert time.monotonic() < until, f"{behind}\n{cluster.logs()}"
                time.sleep(0.2)  # it fetches again
        values = bench.probe(bench.leader([1, 2, 3]))["values"]
        cluster.keep = False
        assert values == [
            value
            for round_ in (0, 1)
            for value in (f"before-{round_}", *(f"during-{round_}-{number}" for number in range(5)))
        ]


@needs_namespaces
@pytest.mark.slow
def test_every_host_loses_power_at_once(tmp_path: Path) -> None:
    """With all unflushed data: acknowledged records exist, and the hosts recover by themselves. The
    test relies on the journal, which records every file.
    """
    with (
        network.Network(("n1", "n2", "n3", "client")) as net,
        ChaosCluster(net, tmp_path / "hosts", extras=Extras(journal=True)) as cluster,
    ):
        cluster.wait_healthy()
        bench = Bench(net, cluster)
        bench.script(CREATE, cluster.operator, {"t": 1}, {})
        message = []
        for round_ in range(2):
            leader = bench.leader([1, 2, 3])
            for number in range(5):
                bench.wait_write(leader, f"{round_}-{number}")
                message.append(f"{round_}-{number}")
            for host in cluster:
                host.kill_all()
            for host in cluster:
                reported = {path for path in host.disk().present().files if path.startswith(f"{host.data_dir}/")}
                found = {
                    str(path)
                    for path in host.data_dir.rglob("*")
                    if path.is_file() and path.relative_to(host.data_dir).parts[0] not in NOT_DATA
                }
                past = {path for path in found - reported if Path(path).name not in (".lock", "reserve", "up.stderr")}
                assert not past, past
                host.power_loss(random.Random(round_), harshest=True)
            cluster.start()
            cluster.wait_healthy()
            until = time.monotonic() + 60
            while json.loads(bench.script(IN_SYNC, cluster.operator, {"t": 1})):
                assert time.monotonic() < until, cluster.logs()
                time.sleep(0.2)  # they find each other
            values = bench.probe(bench.leader([1, 2, 3]))["values"]
            assert list(dict.fromkeys(values)) == message, "a record that was written by a retry may be there twice"


@needs_namespaces
@pytest.mark.slow
def test_a_full_run(tmp_path: Path) -> None:
    result = Run(Plan(7, 20.0, ["pair", "kill-process", "flap"]), tmp_path)()
    assert result.ok, result.line() + "\n" + "\n".join(str(one) for one in result.anomalies[:20])
    assert (
        result.numbers["acknowledged"] > 200 and result.numbers["transactions"] > 5 and result.numbers["polled"] > 500
    )


@needs_namespaces
@pytest.mark.slow
def test_an_operators_tools_get_responses(bench: Bench) -> None:
    bench.script(CREATE, bench.cluster.operator, {name: 2 for name in Targets.topics}, {})
    settings = json.dumps(bench.cluster.operator)
    for number, action in enumerate(("reassign", "elect", "configure", "configure", "cancel", "reassign")):
        command = [
            sys.executable,
            "-m",
            "tests.chaos.operator",
            action,
            settings,
            str(number),
            ",".join(Targets.topics),
        ]
        done = subprocess.run(
            bench.network.run("client", command), cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert "refused" not in done.stdout and (action == "cancel" or "done" in done.stdout), done.stdout


# -- without a cluster -----------------------------------------------------------------------------


def test_only_one_hosts_wall_clock_jumps(tmp_path: Path) -> None:
    clock, code = (
        tmp_path / "clock",
        "import time; print(time.time(), time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME))",
    )
    for ahead_s in (0, 72_000, -1_800):
        clock.write_bytes(int(ahead_s * 1e9).to_bytes(8, sys.byteorder, signed=True))
        environment = {**os.environ, "CHAOS_WALL_CLOCK": str(clock), "LD_PRELOAD": str(wall_clock_shim(tmp_path))}
        before = (time.time() + ahead_s, time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME))
        output = [
            float(word)
            for word in subprocess.run(
                [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
            ).stdout.split()
        ]
        assert all(0 <= one - begun < 60 for one, begun in zip(output, before, strict=True)), (ahead_s, output, before)


def _batch(base_offset: int, text: bytes) -> bytes:
    body = text.ljust(60, b".")
    return base_offset.to_bytes(8, "big") + len(body).to_bytes(4, "big") + body


@pytest.mark.parametrize(
    ("second", "reported"),
    [
        ((_batch(0, b"a"), _batch(3, b"b")), 0),
        ((_batch(0, b"a"),), 1),
        ((_batch(0, b"a"), _batch(3, b"c")), 1),
        ((_batch(0, b"a"), _batch(2, b"b")), 2),
        ((_batch(3, b"b"),), 0),
    ],
    ids=["same", "short", "other bytes", "other offsets", "older ones gone"],
)
def test_replicas_are_compared(tmp_path: Path, second: tuple[bytes, ...], reported: int) -> None:
    for host, batches in (("n1", (_batch(0, b"a"), _batch(3, b"b"))), ("n2", second)):
        folder = tmp_path / host / "data" / "t-0"
        folder.mkdir(parents=True)
        # with preallocated space after it
        (folder / "00000000000000000000.log").write_bytes(b"".join(batches) + bytes(4096))
    found = replicas.compare({"n1": tmp_path / "n1", "n2": tmp_path / "n2"}, {("t", 0): ["n1", "n2"]})
    assert len(found) == reported, found


def test_a_missing_replica_is_reported_and_a_host_without_one_is_not_queried(tmp_path: Path) -> None:
    folder = tmp_path / "n1" / "data" / "t-0"
    folder.mkdir(parents=True)
    (folder / "00000000000000000000.log").write_bytes(_batch(0, b"a"))
    data_dirs = {host: tmp_path / host for host in ("n1", "n2", "n3")}
    assert replicas.compare(data_dirs, {("t", 0): ["n1", "n2"]}) == ["t-0: n2 has no such replica"]
    assert replicas.compare(data_dirs, {("t", 0): ["n1"]}) == []
