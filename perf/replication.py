"""The cost of replication: `python -m perf.replication` fills its part of docs/scale.md. It runs three
brokers of one worker each on this machine's loopback, for some minutes.

A topic with one replica and one with three, acks=all, flush.on.ack=false, are written to in turns,
through the same broker as their leader. CPU-µs are those of each broker's worker process, for a
record of 1 KiB: the cost on the leader, compared with an unreplicated partition in the same turn, and
on the followers. Then the time to the acknowledgement at fractions of the highest rate: by the load
generator, which uses almost no CPU, and by librdkafka, which takes most of the machine.

* The workers share a CPU and its caches unless --cpus says otherwise: this is less favourable than
  a real cluster, where each host has its own. Clients have the other CPU. So rates hold for this machine
  only; the ratios are the result.
* Three brokers fill three times as many pages as one. In a virtual machine whose host reclaims free
  pages, touching a page again costs several times more: that made a follower of 16 KiB batches seem
  five times as expensive as it is. So before each run as much memory is touched as all copies take,
  and the first turn is discarded.
* How long workers waited for a CPU is shown beside the latencies: only the rest is mqd's own.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import NamedTuple

from mqd.cli.sizing import Figures, shipped_figures
from mqd.protocol.messages import CreateTopicsRequest, DeleteTopicsRequest
from perf import loading
from perf import replication_model as model
from perf.accounting import CpuTime, cpu_time, machine
from perf.peers.driving import Librdkafka
from perf.peers.peer import Load
from perf.replication_model import Roles
from perf.report import Figure, markdown_table, number, replace_block, rounded
from tests.cluster import Cluster, Member
from tests.kafka_connection import KafkaConnection

CREATE_TOPICS, DELETE_TOPICS = 19, 20
BATCHED, SINGLE, BATCH_RECORDS = "16 records a batch", "one record a batch", 16
WAYS = {
    BATCHED: {"batch": 16384, "records": BATCH_RECORDS, "connections": 4, "depth": 16, "burst": 8, "count": 12_000},
    SINGLE: {"batch": 1024, "records": 1, "connections": 8, "depth": 128, "burst": 64, "count": 120_000},
}
TARGETS = {"leader": 1.4, "follower": 1.2}  # at most this many times the CPU time of an unreplicated record
LATENCY_TARGET_US = 5000
LOAD = Load(record_bytes=1024, partitions=6)
SHARES = (1 / 2, 1 / 4, 1 / 8)  # of the maximum
MAXIMUM_MS, PACED_MS, WARM_MS, PACED_WARM_MS = 6000, 10_000, 3000, 1000
TOUCH_FACTOR, TOUCH_LIMIT_MS = (
    1.3,
    20_000,
)  # times the copies' size; a machine on which touching takes longer is too busy
DESIGN_RATE = 500_000  # records/s of a cluster at three replicas according to the first design
HOSTS, WORKERS, COMPRESSIONS = (3, 5, 10), (1, 2), (1.0, 0.5, 0.25)
RESULT = loading.ROOT / "perf" / "replication.json"
PAGE = loading.ROOT / "docs" / "scale.md"


class _Address(NamedTuple):
    """The part of a peer that the drivers of perf.peers use."""

    address: str
    port: int


class OnLoopback(Cluster):
    """All members on 127.0.0.1, where the load generator connects, with ports of their own; each worker
    on its given CPU.
    """

    def __init__(self, directory: Path, cpus: list[str]) -> None:
        self._cpus = cpus
        super().__init__(directory, config={"log.segment.delete.delay.ms": "0", "admin.port": "-1"})

    def _member(self, node_id: int, name: str | None = None) -> Member:
        seeds = ",".join(f"127.0.0.1:{self._port_of(number) + 2}" for number in (1, 2, 3))
        config = {**self._config, "worker.cpus": self._cpus[node_id - 1]}
        return Member(
            self._directory / (name or f"broker-{node_id}"),
            node_id,
            "127.0.0.1",
            self._port_of(node_id),
            seeds,
            self._workers,
            config,
        )

    def _port_of(self, node_id: int) -> int:
        return self._port + 5000 + 10 * node_id


# -- measuring -------------------------------------------------------------------------------------


def _topic(member: Member, name: str, assignments: list[list[int]]) -> None:
    requested = CreateTopicsRequest.Topic(
        name=name,
        num_partitions=-1,
        replication_factor=-1,
        configs=[CreateTopicsRequest.Config(name="flush.on.ack", value="false")],
        assignments=[
            CreateTopicsRequest.Assignment(partition_index=index, broker_ids=nodes)
            for index, nodes in enumerate(assignments)
        ],
    )
    with KafkaConnection(member.address, member.port, timeout_s=60) as kafka:
        (result,) = kafka.call(CREATE_TOPICS, 5, CreateTopicsRequest(topics=[requested], timeout_ms=60_000)).topics
    if result.error_code:
        raise loading.LoadFailed(f"cannot create {name}: error {result.error_code} {result.error_message}")


def _drop(member: Member, name: str) -> None:
    with KafkaConnection(member.address, member.port, timeout_s=60) as kafka:
        kafka.call(DELETE_TOPICS, 5, DeleteTopicsRequest(topic_names=[name], timeout_ms=60_000))


def _touch(records: int, copies: int) -> None:
    requested = int(records * LOAD.record_bytes * copies * TOUCH_FACTOR) >> 20
    touched = loading.run("warm", megabytes=requested, milliseconds=TOUCH_LIMIT_MS)["bytes"] >> 20
    if touched < requested:
        print(
            f"only {touched} of {requested} MB could be touched within {TOUCH_LIMIT_MS / 1000:.0f} s: the next"
            " figures are too high",
            file=sys.stderr,
        )


def _begin(leader: Member, topic: str, words: dict[str, int]) -> None:
    """Sends some batches until they are accepted: the topic's followers have to be in sync first."""
    deadline = time.monotonic() + 30
    while True:
        try:
            loading.run(
                "produce",
                port=leader.port,
                topic=topic,
                acks=-1,
                milliseconds=5000,
                **{**words, "count": 64, "connections": 1, "depth": 8, "burst": 8},
            )
            return
        except loading.LoadFailed:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _turn(leader: Member, pids: list[list[int]], words: dict[str, int], name: str) -> dict:
    """CPU-µs for a record by role, records/s with three replicas, and how long each worker waited
    for a CPU meanwhile, as a share of what it ran.
    """
    spent: dict[str, list[CpuTime]] = {}
    seconds, records = 1.0, words["count"] * words["records"]
    for kind, nodes in (("alone", [1]), ("replicated", [1, 2, 3])):
        topic = f"{kind}-{name}"
        _topic(leader, topic, [nodes])
        _begin(leader, topic, words)
        _touch(records, len(nodes))
        before = [cpu_time(one) for one in pids]
        seconds = loading.run("produce", port=leader.port, topic=topic, acks=-1, milliseconds=60_000, **words)[
            "seconds"
        ]
        spent[kind] = [cpu_time(one) - earlier for one, earlier in zip(pids, before, strict=True)]
        _drop(leader, topic)
    alone, led, *followed = (rounded(one.run_us / records) for one in (spent["alone"][0], *spent["replicated"]))
    waited = [rounded(one.waited_ns / max(one.run_ns, 1)) for one in spent["replicated"]]
    return {"alone": alone, "leader": led, "followers": followed, "rate": rounded(records / seconds), "waited": waited}


def _latencies(members: list[Member], pids: list[list[int]], turns: int) -> dict:
    """librdkafka to all three brokers: its maximum rate, then fractions of it, with a concurrent consumer."""
    peer, driver = _Address(",".join(member.bootstrap for member in members), members[0].port), Librdkafka()

    def topic(name: str) -> None:
        _topic(members[0], name, [[1 + (index + step) % 3 for step in range(3)] for index in range(LOAD.partitions)])
        time.sleep(2.0)  # until every host has published its leaderships

    def turn(share: float, name: str) -> dict:
        rate = int(maximum * share)
        topic(name)
        _touch(int(rate * (PACED_MS + WARM_MS) / 1000), 3)
        with _WorkerTime(pids) as spent:
            paced = driver.latency(peer, name, LOAD, rate=rate, milliseconds=PACED_MS, warm_milliseconds=WARM_MS)  # type: ignore[arg-type]
        _drop(members[0], name)
        return _point(share, rate, paced, spent)

    topic("maximum")
    most = driver.produce(peer, "maximum", LOAD, records=5_000_000, milliseconds=MAXIMUM_MS)  # type: ignore[arg-type]
    _drop(members[0], "maximum")
    maximum = most["records"] / most["seconds"]
    return {
        "maximum": rounded(maximum),
        "points": [
            _median_turn([turn(share, f"latency-{round(1 / share)}-{number}") for number in range(turns)])
            for share in SHARES
        ],
    }


def _paced(leader: Member, pids: list[list[int]], maximum: float, turns: int) -> list[dict]:
    """The load generator, at fractions of the rate that it reached: open-loop, times count from when a
    batch was due.
    """
    words = {name: WAYS[BATCHED][name] for name in ("batch", "records", "connections")}

    def turn(share: float, name: str) -> dict:
        _topic(leader, name, [[1, 2, 3]])
        _begin(leader, name, WAYS[BATCHED])
        batches = round(maximum * share / BATCH_RECORDS)
        _touch(int(batches * BATCH_RECORDS * (PACED_MS + PACED_WARM_MS) / 1000), 3)
        with _WorkerTime(pids) as spent:
            output = loading.run(
                "paced",
                port=leader.port,
                topic=name,
                rate=batches,
                milliseconds=PACED_MS,
                warm_milliseconds=PACED_WARM_MS,
                acks=-1,
                **words,
            )
        _drop(leader, name)
        return _point(share, batches * BATCH_RECORDS, output, spent)

    return [
        _median_turn([turn(share, f"paced-{round(1 / share)}-{number}") for number in range(turns)]) for share in SHARES
    ]


class _WorkerTime:
    """The time that all workers ran and waited for a CPU within the block, as shares of its actual
    duration, which is longer than planned if the rate was not reached.
    """

    def __init__(self, pids: list[list[int]]) -> None:
        self._pids = [pid for one in pids for pid in one]
        self.running = self.waiting = 0.0

    def __enter__(self) -> _WorkerTime:
        self._began, self._before = time.monotonic(), cpu_time(self._pids)
        return self

    def __exit__(self, *_exc: object) -> None:
        spent, seconds = cpu_time(self._pids) - self._before, time.monotonic() - self._began
        self.running, self.waiting = rounded(spent.reactor_ns / seconds / 1e9), rounded(spent.waited_ns / seconds / 1e9)


def _median_turn(points: list[dict]) -> dict:
    """The turn with the median p99, and the p99 of all turns. A stall of the machine for a second then
    affects one turn of ten seconds, not the figure.
    """
    in_order = sorted(points, key=lambda point: point["p99_us"])
    return {**in_order[len(points) // 2], "all_p99_us": [point["p99_us"] for point in in_order]}


def _point(share: float, rate: int, reported: dict, spent: _WorkerTime) -> dict:
    times = {name: reported["acknowledged"][name] for name in ("p50_us", "p99_us", "p999_us")}
    return {
        "share": share,
        "rate": rate,
        **times,
        "late_p99_us": reported["late"]["p99_us"],
        "running": spent.running,
        "waiting": spent.waiting,
    }


def measure(directory: Path, turns: int, cpus: list[str], latency: bool) -> dict:
    with (
        tempfile.TemporaryDirectory(prefix="replication-", dir=directory) as logs,
        OnLoopback(Path(logs), cpus) as cluster,
    ):
        members = list(cluster)
        pids = [member.pids("worker") for member in members]
        found = {
            way: [_turn(members[0], pids, words, f"{number}-{words['records']}") for number in range(turns + 1)][1:]
            for way, words in WAYS.items()
        }
        reported = {
            "date": datetime.datetime.now().isoformat(timespec="seconds"),
            "machine": machine(),
            "cpus": ",".join(cpus),
            "turns": found,
        }
        if latency:
            reported["paced"] = _paced(
                members[0], pids, statistics.median(turn["rate"] for turn in found[BATCHED]), turns
            )
            reported["latency"] = _latencies(members, pids, min(turns, 3))
        return reported


# -- the page --------------------------------------------------------------------------------------


def _follower(turn: dict) -> float:
    return statistics.mean(turn["followers"])


def summary(turns: list[dict]) -> Roles:
    return Roles(
        statistics.median(turn["alone"] for turn in turns),
        statistics.median(turn["leader"] for turn in turns),
        statistics.median(map(_follower, turns)),
    )


def _rows(way: str, turns: list[dict]) -> list[tuple[str, ...]]:
    def row(what: str, values: list[float], ratio: str = "", target: str = "") -> tuple[str, ...]:
        return (
            f"{what}, {way}",
            number(statistics.median(values)),
            f"{number(min(values))}–{number(max(values))}",
            ratio,
            target,
        )

    found = [row("one replica", [turn["alone"] for turn in turns])]
    for kind, what, values in (
        ("leader", "leader", [turn["leader"] for turn in turns]),
        ("follower", "each follower", [_follower(turn) for turn in turns]),
    ):
        ratios = [value / turn["alone"] for value, turn in zip(values, turns, strict=True)]
        figure = Figure(kind, "×", ratios, target=TARGETS[kind])
        found.append(
            row(
                f"three replicas: {what}",
                values,
                f"{figure.median:.2f} ({min(ratios):.2f}–{max(ratios):.2f})",
                f"{figure.target_text}: {figure.verdict}",
            )
        )
    return [*found, row("three replicas: records/s", [turn["rate"] for turn in turns])]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _points_table(points: list[dict]) -> str:
    def row(point: dict) -> tuple[str, ...]:
        p50, p99, p999, late = (number(point[name] / 1000) for name in ("p50_us", "p99_us", "p999_us", "late_p99_us"))
        if turns := point.get("all_p99_us"):
            p99 += f" ({number(turns[0] / 1000)}–{number(turns[-1] / 1000)})"
        return (
            f"1/{round(1 / point['share'])}",
            number(point["rate"]),
            p50,
            p99,
            p999,
            late,
            _percent(point["running"]),
            _percent(point["waiting"]),
        )

    headings = (
        "fraction",
        "records/s",
        "ms until acknowledged, p50",
        "p99",
        "p99.9",
        "the client's own delay in ms, p99",
        "CPU used by workers, of one CPU",
        "workers waited for a CPU",
    )
    return markdown_table(headings, map(row, points), right=range(1, 8))


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def _latency_lines(result: dict) -> list[str]:
    half = next(point for point in result["paced"] if point["share"] == 1 / 2)
    verdict = Figure("p99", "µs", half.get("all_p99_us", [half["p99_us"]]), target=LATENCY_TARGET_US).verdict
    return [
        _wrapped(
            f"Latency with the load generator ({BATCHED}) at fractions of the rate that it reached (target at 1/2: p99"
            f" ≤ 5 ms: {verdict}); latencies count from when a batch was due. Figures of the run with the median p99;"
            " in parentheses the lowest and the highest p99 of all runs:"
        ),
        "",
        _points_table(result["paced"]),
        "",
        _wrapped(
            f"librdkafka writes {number(result['latency']['maximum'])} records/s at most, to six partitions that three"
            " brokers lead, on the same two cores. At fractions of that, while a consumer reads:"
        ),
        "",
        _points_table(result["latency"]["points"]),
        "",
    ]


def _model_rows(costs: model.Costs, figures: Figures) -> list[tuple[str, ...]]:
    def row(hosts: int, compression: float) -> tuple[str, ...]:
        by_cores = [
            number(
                model.cores_rate(
                    costs, figures, hosts=hosts, workers=workers, batch_records=BATCH_RECORDS, compression=compression
                )
            )
            for workers in WORKERS
        ]
        return (
            str(hosts),
            "not compressed" if compression == 1 else f"compressed to {_percent(compression)}",
            *by_cores,
            number(model.network_rate(hosts, 3, compression)),
        )

    return [row(hosts, compression) for hosts in HOSTS for compression in COMPRESSIONS]


def block(result: dict, figures: Figures) -> str:
    turns = result["turns"]
    costs = model.costs_from(summary(turns[SINGLE]), summary(turns[BATCHED]), BATCH_RECORDS)
    both = 2e6 / costs.record(3, BATCH_RECORDS, 1.0)
    waited = statistics.median(share for way in turns.values() for turn in way for share in turn["waited"])
    return "\n".join(
        [
            _wrapped(
                f"{result['machine']['cpu']}, {result['machine']['cores']} cores; the workers of brokers 1, 2, 3 on CPU"
                f" {result['cpus']}; {result['date'][:10]}; medians of {len(turns[BATCHED])} runs. For each second"
                f" that a worker ran it waited {waited:.2g} s for its CPU, because of the other workers and other load."
            ),
            "",
            markdown_table(
                ("CPU-µs for a record of 1 KiB", "median", "spread", "× the unreplicated one", "target"),
                [row for way in WAYS for row in _rows(way, turns[way])],
                right=(1, 2, 3, 4),
            ),
            "",
            *(_latency_lines(result) if "latency" in result else ()),
            _wrapped(
                f"A record with three replicas, in batches of {BATCH_RECORDS}, costs"
                f" {number(costs.record(3, BATCH_RECORDS, 1.0))} CPU-µs on all hosts together. Two such cores,"
                f" used by brokers only, carry {number(both)} records/s, **{_percent(both / DESIGN_RATE)}** of the"
                f" target of {DESIGN_RATE:,}."
                " With the load generator on one of them, the measured rate was"
                f" {number(statistics.median(turn['rate'] for turn in turns[BATCHED]))} records/s."
                " According to the model, records/s of a cluster:"
            ),
            "",
            markdown_table(
                (
                    "hosts",
                    "records",
                    *(f"{workers} worker core{'s' * (workers > 1)} a host" for workers in WORKERS),
                    "10 Gbit/s a host",
                ),
                _model_rows(costs, figures),
                right=range(2, 5),
            ),
        ]
    )


def write(result: dict) -> None:
    PAGE.write_text(replace_block(PAGE.read_text(), "replication", block(result, shipped_figures())))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.replication", description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5, help="turns that count; one more is run")
    parser.add_argument(
        "--cpus",
        default="0,0,0",
        help="of the workers of brokers 1 (the leader), 2 and 3; the load generator has the last one",
    )
    parser.add_argument(
        "--directory", type=Path, default=loading.BUILD, help="the directory for the logs, which are deleted at the end"
    )
    parser.add_argument(
        "--no-latency", action="store_true", help="CPU time only: other programs on the machine would affect latencies"
    )
    parser.add_argument(
        "--page", action="store_true", help="only write docs/scale.md again, from perf/replication.json"
    )
    parser.add_argument(
        "--keep",
        type=Path,
        default=RESULT,
        help="the file for the figures; the page is written only for the default file",
    )
    arguments = parser.parse_args()
    if not arguments.page:
        arguments.directory.mkdir(parents=True, exist_ok=True)
        arguments.keep.write_text(
            json.dumps(
                measure(arguments.directory, arguments.turns, arguments.cpus.split(","), not arguments.no_latency),
                indent=1,
                ensure_ascii=False,
            )
            + "\n"
        )
    result = json.loads(arguments.keep.read_text())
    print(block(result, shipped_figures()))
    if arguments.keep == RESULT:
        write(result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
