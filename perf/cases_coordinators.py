"""The cost of groups and transactions: the acceptor's part of the broker. The load is
perf/coordinating.py, on the clients' CPU; the acceptor runs where the kernel puts it.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

from mqd.protocol.messages import FindCoordinatorRequest, ListGroupsRequest, OffsetCommitRequest
from perf import loading
from perf.accounting import cpu_time
from perf.bench import Bench
from perf.brokers import Measured
from tests.kafka_connection import KafkaConnection

OFFSET_COMMIT, LIST_GROUPS, FIND_COORDINATOR = 8, 16, 10
MEMBERS = 100
BEATS_PER_SECOND = 5_000
BEAT_SECONDS = 10  # the latencies measured meanwhile take three
TRANSACTIONS_PER_SECOND = 1_000
PRODUCERS = 50
GROUPS = OFFSETS_EACH = 1_000
NOT_READY_ERRORS = (14, 15, 16)
COMMIT_TRIES_S = 60.0


def _command(what: str, broker: Measured, arguments: dict[str, object]) -> list[str]:
    words = [f"{name}={value}" for name, value in arguments.items()]
    return [
        "taskset",
        "-c",
        str(loading.client_cpu()),
        sys.executable,
        "-m",
        "perf.coordinating",
        what,
        f"port={broker.port}",
        *words,
    ]


@contextlib.contextmanager
def _load(what: str, broker: Measured, **arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Runs the load; the block begins when its members or producers have started, and may end before the
    load does: `_result` waits for it.
    """
    with subprocess.Popen(
        _command(what, broker, arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=loading.ROOT
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            if process.stdout.readline() != "ready\n":
                raise loading.LoadFailed(f"{what} {arguments}: {process.stderr.read()[-2000:]}")
            yield process
        finally:
            process.kill()


def _result(process: subprocess.Popen[str]) -> dict:
    out, errors = process.communicate(timeout=120)
    if process.returncode:
        raise loading.LoadFailed(errors[-2000:])
    return json.loads(out.splitlines()[-1])


def _run(what: str, broker: Measured, **arguments: object) -> dict:
    done = subprocess.run(
        _command(what, broker, arguments), capture_output=True, text=True, timeout=120, cwd=loading.ROOT
    )
    if done.returncode:
        raise loading.LoadFailed(f"{what} {arguments}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _flushes(broker: Measured) -> float:
    """The flushes of all workers since their start."""
    with urllib.request.urlopen(
        f"http://127.0.0.1:{broker.broker.status()['metrics_port']}/metrics", timeout=10
    ) as answer:
        lines = answer.read().decode().splitlines()
    return sum(
        float(line.split()[-1])
        for line in lines
        if "syncs" in line and not line.startswith("#") and "_created" not in line
    )


# -- groups ----------------------------------------------------------------------------------------


def groups(bench: Bench) -> None:
    """A rebalance of many members (classic protocol)."""
    broker = bench.brokers.get("uring")
    topic = broker.topic("groups", MEMBERS)
    joined, left = [], []
    for _ in bench.repeat(f"{MEMBERS} members", 3):
        result = _run("members", broker, topic=topic, members=MEMBERS)
        joined.append(result["joined_s"])
        left.append(result["left_s"])
    bench.add(
        f"{MEMBERS} members join one group, stable after",
        "s",
        joined,
        1.0,
        note="group.initial.rebalance.delay.ms (300 by default) is part of it",
    )
    bench.add(
        f"one of {MEMBERS} members leaves, stable after",
        "s",
        left,
        1.0,
        note="members learn of it by their heartbeat, every 300 ms",
    )


def heartbeats(bench: Bench) -> None:
    """The effect of 5,000 heartbeats a second on the acceptor and on other clients: the same load at
    another broker of this machine shows how much is due only to sharing the CPUs.
    """
    broker, other = bench.brokers.get("uring"), bench.brokers.get("heartbeats")
    topic = broker.topic("beside-heartbeats", flush_on_ack="false")
    other.topic("beside-heartbeats")
    share: list[float] = []
    late: list[float] = []
    p99: dict[tuple[str, str], list[float]] = {}
    for _ in bench.repeat("heartbeats", 3):
        for where, beaten in (("without", None), ("elsewhere", other), ("with", broker)):
            bench.prepare()
            if beaten is None:
                found = _latencies(broker, topic)
            else:
                acceptor = beaten.broker.pids("acceptor")
                with _load(
                    "heartbeats", beaten, topic=topic, members=500, rate=BEATS_PER_SECOND, seconds=BEAT_SECONDS
                ) as process:
                    before, began = cpu_time(acceptor), time.monotonic()
                    found = _latencies(broker, topic)
                    spent, taken = cpu_time(acceptor) - before, time.monotonic() - began
                    if process.poll() is not None:
                        raise loading.LoadFailed(
                            f"measuring latencies took {taken:.0f} s, longer than the heartbeats, {BEAT_SECONDS} s:"
                            " this machine is too busy"
                        )
                    result = _result(process)
                if result["errors"]:
                    raise loading.LoadFailed(f"{result['errors']} heartbeats were refused")
                if beaten is broker:
                    share.append(100 * spent.run_ns / 1e9 / taken)
                    late.append(result["p99_ms"])
            for what, value in found.items():
                p99.setdefault((what, where), []).append(value)
    bench.add("5,000 heartbeats/s, CPU of the acceptor", "% of a core", share, 40.0)
    bench.add("5,000 heartbeats/s, p99 of a heartbeat", "ms", late)
    places = {"without": "without heartbeats", "elsewhere": "heartbeats at another broker", "with": "with heartbeats"}
    for what in ("produce", "end_to_end"):
        words = what.replace("_", " ")
        for where, place in places.items():
            bench.add(f"p99 of {words}, {place}", "µs", p99[what, where])
        ratio = [one / same for one, same in zip(p99[what, "with"], p99[what, "elsewhere"], strict=True)]
        bench.add(
            f"p99 of {words} with 5,000 heartbeats/s, as a multiple of that with them at another broker",
            "times",
            ratio,
            1.2,
            note="the other broker is on the same CPUs",
        )
    bench.brokers.drop("heartbeats")


def _latencies(broker: Measured, topic: str) -> dict[str, float]:
    """p99 in µs, one record at a time, for about two seconds."""
    produced, _ = broker.load("latency", topic=topic, batch=200, count=5000, acks=1, cpu=loading.WORKER_CPU)
    fetched, _ = broker.load("end_to_end", topic=topic, batch=200, count=1000, acks=1)
    return {"produce": produced["produce"]["p99_us"], "end_to_end": fetched["end_to_end"]["p99_us"]}


# -- transactions ----------------------------------------------------------------------------------


def transactions(bench: Bench) -> None:
    """1,000 a second, of ten records into three partitions each, by 50 producers (transactions v2)."""
    broker = bench.brokers.get("uring")
    acceptor = broker.broker.pids("acceptor")
    seconds, warm = (5, 1) if not bench.quick else (2, 1)
    for flush in ("false", "true"):
        topic = broker.topic(f"transactions-{flush}", 3, flush_on_ack=flush)
        p50, p99, rate, flushes, cost, worker = [], [], [], [], [], []
        for _ in bench.repeat(f"transactions, flush.on.ack={flush}", 3):
            bench.prepare()
            with _load(
                "transactions",
                broker,
                topic=topic,
                producers=PRODUCERS,
                rate=TRANSACTIONS_PER_SECOND,
                seconds=seconds,
                warm=warm,
            ) as process:
                flushed, before, before_workers = _flushes(broker), cpu_time(acceptor), cpu_time(broker.worker_pids)
                result = _result(process)
                count = result["all_count"]
                cost.append((cpu_time(acceptor) - before).run_us / count)
                worker.append((cpu_time(broker.worker_pids) - before_workers).run_us / count)
                flushes.append((_flushes(broker) - flushed) / count)
            p50.append(result["p50_ms"])
            p99.append(result["p99_ms"])
            rate.append(result["rate"])
        bench.add(
            f"transactions, 10 records over 3 partitions, flush.on.ack={flush}",
            "1/s",
            rate,
            0.98 * TRANSACTIONS_PER_SECOND,
            at_least=True,
            note="1,000/s are sent",
        )
        bench.add(f"commit at that rate, p50, flush.on.ack={flush}", "ms", p50)
        bench.add(f"commit at that rate, p99, flush.on.ack={flush}", "ms", p99, 20.0 if flush == "false" else None)
        bench.add(
            f"disk flushes of a commit at that rate, flush.on.ack={flush}",
            "flushes",
            flushes,
            4.0,
            note="all of a transaction: data, markers, the coordinator's records",
        )
        bench.add(f"acceptor's part of a transaction, flush.on.ack={flush}", "CPU-µs", cost)
        bench.add(f"worker's part of a transaction, flush.on.ack={flush}", "CPU-µs", worker)


# -- committed offsets -----------------------------------------------------------------------------


def offsets(bench: Bench) -> None:
    """A million committed offsets: the time until all groups can be queried again, after kill -9 of the
    acceptor and after a restart of the broker.
    """
    groups, each = (GROUPS, OFFSETS_EACH) if not bench.quick else (100, OFFSETS_EACH)
    broker = bench.brokers.get("offsets", workers=2, config={"worker.cpus": ""})
    topic = broker.topic("committed", each)
    with KafkaConnection("127.0.0.1", broker.port, timeout_s=60) as kafka:
        # makes the internal topic
        kafka.call(FIND_COORDINATOR, 4, FindCoordinatorRequest(key_type=0, coordinator_keys=["group-0"]))
        for number in range(groups):
            _commit(kafka, f"group-{number}", topic, each)
    killed, restarted = [], []
    for _ in bench.repeat(f"{groups * each:,} committed offsets", 3):
        bench.prepare()
        pid = broker.broker.pid("mqd-acceptor")
        subprocess.run(["kill", "-9", str(pid)], check=True)
        killed.append(_ready_after(broker, groups))
    for _ in bench.repeat("the same, broker restarted", 2):
        broker.broker.stop()
        began = time.monotonic()
        broker.broker.start()
        serves = time.monotonic() - began
        restarted.append(serves + _ready_after(broker, groups))
    label = "1 M" if not bench.quick else f"{groups * each:,}"
    bench.add(f"{label} committed offsets ready after kill -9 of the acceptor", "s", killed, 5.0)
    bench.add(
        f"{label} committed offsets ready after the broker's restart",
        "s",
        restarted,
        5.0,
        note=f"the whole restart counts, including {each:,} partitions of users",
    )
    bench.brokers.drop("offsets")


def _commit(kafka: KafkaConnection, group: str, topic: str, count: int) -> None:
    requested = OffsetCommitRequest.Topic(
        name=topic,
        partitions=[
            OffsetCommitRequest.Partition(partition_index=index, committed_offset=index) for index in range(count)
        ],
    )
    deadline = time.monotonic() + COMMIT_TRIES_S
    while True:
        answer = kafka.call(
            OFFSET_COMMIT, 8, OffsetCommitRequest(group_id=group, generation_id_or_member_epoch=-1, topics=[requested])
        )
        errors = {one.error_code for one in answer.topics[0].partitions}
        if errors == {0}:
            return
        if errors.difference(NOT_READY_ERRORS) or time.monotonic() > deadline:
            raise loading.LoadFailed(f"OffsetCommit of {group} returned {errors}")
        time.sleep(0.05)


def _ready_after(broker: Measured, groups: int) -> float:
    """Seconds until every group can be listed: all partitions of the coordinator are loaded then."""
    began = time.monotonic()
    while time.monotonic() < began + COMMIT_TRIES_S:
        with (
            contextlib.suppress(OSError, AssertionError),
            KafkaConnection("127.0.0.1", broker.port, timeout_s=10) as kafka,
        ):
            answer = kafka.call(LIST_GROUPS, 4, ListGroupsRequest())
            if answer.error_code == 0 and len(answer.groups) == groups:
                return time.monotonic() - began
        time.sleep(0.01)
    raise loading.LoadFailed(f"{groups} groups cannot be listed after {COMMIT_TRIES_S:.0f} s")


CASES = {"groups": groups, "heartbeats": heartbeats, "transactions": transactions, "offsets": offsets}
