"""Kafka Streams on three hosts with `group.protocol=streams` and a standby of each task: two instances
of the application and the hosts are killed in turn. While one of them is away, what is ordered then
is completed without it; at the end each result is there once and in order.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mqd.protocol.messages import StreamsGroupDescribeRequest, StreamsGroupDescribeResponse
from tests.cluster import Cluster
from tests.compat.java_client import build_java
from tests.compat.programs.program import Program
from tests.compat.programs.test_streams import (
    KILLS,
    SETTINGS,
    application,
    committed,
    create_topics,
    difference,
    expected,
    orders_of,
    place,
    reader,
)
from tests.compat.transactions.test_exactly_once_cluster import QUICK_HOSTS
from tests.crash.workload import wait_until
from tests.kafka_connection import ConnectionEnded, KafkaConnection

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
STREAMS_GROUP_DESCRIBE = 89
RESULTS_OF_AN_ORDER = 3
PATIENCE_S = 240.0
VICTIMS = ("first", 1, "second", 2, "first", 3)  # an instance of the application, or a host
assert len(VICTIMS) == len(KILLS)  # orders_of() makes a share for each


def members(cluster: Cluster) -> list[StreamsGroupDescribeResponse.Member]:
    """The group as its coordinator describes it; empty while there is none."""
    for broker in cluster:
        try:
            with KafkaConnection(broker.address, broker.port) as kafka:
                (group,) = kafka.call(
                    STREAMS_GROUP_DESCRIBE, 0, StreamsGroupDescribeRequest(group_ids=["orders"])
                ).groups
        except (OSError, ConnectionEnded):
            continue
        if not group.error_code:
            return group.members
    return []


def tasks(cluster: Cluster, kind: str) -> dict[tuple[str, int], int]:
    """How many processes have each task, by subtopology and partition; `kind` as in the response."""
    return collections.Counter(
        (task.subtopology_id, partition)
        for member in members(cluster)
        for task in getattr(member.assignment, kind)
        for partition in task.partitions
    )


class Run:
    def __init__(self, cluster: Cluster, programs: dict[str, Program]) -> None:
        self.cluster, self.programs = cluster, programs
        self.began_ms = int(time.time() - 600) // 60 * 60_000
        self.expected = expected(self.began_ms)
        self.found: dict[str, dict[str, list[str]]] = {name: collections.defaultdict(list) for name in self.expected}
        self.consumer = reader(cluster.bootstrap, self.expected)
        self.placed = 0

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        wait_until(condition, PATIENCE_S, lambda: f"{what}: {self.report()}")

    def report(self) -> str:
        results = sum(len(values) for by_key in self.found.values() for values in by_key.values())
        return "\n".join(
            [
                f"{results} results of {self.placed} orders",
                *(program.tail() for program in self.programs.values()),
                self.cluster.logs(),
            ]
        )

    def order(self, part: int) -> None:
        numbers = orders_of(part)
        place(self.cluster.bootstrap, self.began_ms, numbers)
        self.placed = numbers.stop

    def wait_for_results(self, what: str) -> None:
        self.wait(what, lambda: committed(self.consumer, self.found, 1.0) >= RESULTS_OF_AN_ORDER * self.placed)

    def wait_for_standbys(self) -> None:
        """Each task with a changelog is active in one process and a standby in the other."""
        self.wait("each task has a standby", lambda: self._standbys() >= 1)

    def _standbys(self) -> int:
        active, standby = tasks(self.cluster, "active_tasks"), tasks(self.cluster, "standby_tasks")
        processes = {member.process_id for member in members(self.cluster)}
        stateful = {subtopology for subtopology, _ in standby}
        is_whole = all(count == 1 and (task[0] not in stateful or standby[task] == 1) for task, count in active.items())
        return len(standby) if is_whole and len(processes) == len(self.programs) else 0

    def kill(self, victim: str | int) -> None:
        if isinstance(victim, str):
            self.programs[victim].kill()
        else:
            self.cluster.brokers[victim].kill_all()

    def bring_back(self, victim: str | int) -> None:
        if isinstance(victim, str):
            self.programs[victim].start()
        else:
            self.cluster.brokers[victim].start()


def test_standbys_take_over_while_instances_and_hosts_are_killed_in_turn(tmp_path: Path) -> None:
    home = build_java(Path(__file__).parent / "streams", "programs-streams")
    config = SETTINGS | QUICK_HOSTS | {"group.streams.num.standby.replicas": "1"}
    with Cluster(tmp_path / "hosts", config=config) as cluster:
        create_topics(cluster.bootstrap, 3)
        programs = {
            name: application(home, cluster.bootstrap, tmp_path / name, "streams", 3) for name in ("first", "second")
        }
        run = Run(cluster, programs)
        with programs["first"], programs["second"]:
            run.order(0)
            run.wait_for_results("with all of them")
            for part, victim in enumerate(VICTIMS, start=1):
                run.wait_for_standbys()
                run.kill(victim)
                run.order(part)
                run.wait_for_results(f"without {victim}")
                run.bring_back(victim)
            committed(run.consumer, run.found, 5.0)  # results that should not exist
        run.consumer.close()
        assert not (problem := difference(run.expected, run.found)), f"{problem}\n{run.report()}"
