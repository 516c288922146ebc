"""Replica reassignments in the console, on a cluster: a broker is drained, its moves are watched
and cancelled, and the cluster is balanced.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from confluent_kafka import Producer

from tests.cluster import Cluster
from tests.interaction.cluster_clients import all_in_sync, create, partitions, run, until
from tests.interaction.console.chromium import faults, opened
from tests.interaction.console.test_console_browser import Console, press, problems, wait

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
MOVED = "big"
THROTTLE = "follower.replication.throttled"


def _mqd(cluster: Cluster, *arguments: str) -> None:
    done = run(*arguments, "-b", cluster.bootstrap)
    assert done.returncode == 0, f"{arguments}: {done.stderr}\n{cluster.logs()}"


def _held_by(cluster: Cluster, node: int) -> int:
    return sum(node in one.replicas for one in partitions(cluster, MOVED).values())


def _throttle(cluster: Cluster, rate: int | None) -> None:
    for node in (1, 2, 3):
        words = ("unset", f"{THROTTLE}.rate") if rate is None else ("set", f"{THROTTLE}.rate={rate}")
        _mqd(cluster, "config", words[0], f"broker/{node}", words[1])


def test_a_broker_is_drained_and_the_cluster_balanced(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        create(cluster, MOVED, partitions=6, replicas=2, config={f"{THROTTLE}.replicas": "*"})
        until("in sync", lambda: all_in_sync(cluster, MOVED), cluster)
        assert _held_by(cluster, 3) == 4
        producer = Producer({"bootstrap.servers": cluster.bootstrap, "message.max.bytes": 2_000_000})
        for number in range(240):
            producer.produce(MOVED, os.urandom(100_000), partition=number % 6)
            producer.poll(0)
        assert producer.flush(60) == 0
        _throttle(cluster, 100_000)
        console = Console(cluster)
        try:
            with opened() as window:
                window.get(console.url + "/cluster")
                press(window, "Moves of replicas")
                wait(window, "No replica moves")
                _mqd(cluster, "topic", "reassign", MOVED, "--brokers", "1,2", "--no-wait")
                wait(window, "partitions are moving")
                press(window, "Stop")
                press(window, "Go on")
                wait(window, f"mqd topic reassign {MOVED} --cancel")
                press(window, "Confirm")
                wait(window, f"The replicas of {MOVED} stay where they were")
                wait(window, "No replica moves")
                assert _held_by(cluster, 3) == 4

                window.get(console.url + "/cluster/drain?node=3")
                press(window, "Go on")
                assert "mqd cluster drain 3 --no-wait" in wait(window, "replicas of broker 3 move to other brokers")
                assert faults(window) == []
                press(window, "Confirm")
                wait(window, "Broker 3 is being drained")
                wait(window, "copied, ")
                wait(window, " s\nleft, at this pace")
                pages = {"moves": "/moves", "cluster": "/cluster", "cancel": f"/moves/cancel?topic={MOVED}"}
                assert problems(window, console, pages, ("moves",)) == {}
                _throttle(cluster, None)
                window.get(console.url + "/moves")
                until("drained", lambda: _held_by(cluster, 3) == 0, cluster)
                wait(window, "No replica moves")

                window.get(console.url + "/cluster/drain?node=3&cancel=1")
                press(window, "Go on")
                wait(window, "can have replicas again")
                press(window, "Confirm")
                wait(window, "Broker 3 can have replicas again.")
                press(window, "Balance the cluster")
                press(window, "Go on")
                wait(window, "mqd cluster balance --no-wait")
                assert faults(window) == []
                press(window, "Confirm")
                wait(window, "The controller has begun the planned moves")
                until("balanced", lambda: _held_by(cluster, 3) == 4, cluster)
        finally:
            console.stop()
