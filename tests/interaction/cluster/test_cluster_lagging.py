"""A follower that is too many records behind leaves the in-sync set (replica.lag.max.messages),
however long replica.lag.time.max.ms is, and rejoins when it has caught up.
"""

from __future__ import annotations

import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from tests.broker import pause
from tests.cluster import Cluster, Member
from tests.interaction.cluster_clients import PATIENCE_S, all_in_sync, create, read, run, until, wait_for_in_sync

BOUND = 100
HOUR_MS = 3_600_000
FETCHED = b"fetched by all"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("lagging"), config={"replica.lag.time.max.ms": str(HOUR_MS)}) as started:
        yield started


@contextmanager
def stopped_worker(broker: Member) -> Iterator[None]:
    """The host stays alive and sends heartbeats; its worker fetches nothing."""
    (pid,) = broker.pids("worker")
    pause(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def leader_and_follower(cluster: Cluster, topic: str) -> tuple[Member, Member]:
    """(leader, a follower) of the only partition, once all are in sync."""
    found = wait_for_in_sync(cluster, topic)[0]
    return cluster.brokers[found.leader], cluster.brokers[next(node for node in found.replicas if node != found.leader)]


def leader_and_follower_after_fetch(cluster: Cluster, topic: str) -> tuple[Member, Member]:
    """Like leader_and_follower(), after all have fetched: the bound applies from a follower's first fetch in a
    leader epoch, and replicas of a new topic are in sync before it.
    """
    leader, follower = leader_and_follower(cluster, topic)
    write(leader, topic, [FETCHED], "all")
    return leader, follower


def write(leader: Member, topic: str, values: list[bytes], acks: str) -> None:
    """All acknowledged, or the test fails. Acknowledged by the leader only: a stopped worker does
    not respond.
    """
    failed: list[object] = []
    producer = Producer({"bootstrap.servers": leader.bootstrap, "acks": acks, "message.timeout.ms": 60_000})
    for value in values:
        producer.produce(
            topic, value, partition=0, on_delivery=lambda error, _message: failed.append(error) if error else None
        )
    assert producer.flush(60) == 0
    assert not failed


def in_sync(leader: Member, topic: str) -> list[int]:
    return (
        AdminClient({"bootstrap.servers": leader.bootstrap})
        .list_topics(topic, timeout=PATIENCE_S)
        .topics[topic]
        .partitions[0]
        .isrs
    )


def logged(broker: Member, verb: str, topic: str) -> list[str]:
    """The lines of its log, which the worker writes when it applies the change."""
    return re.findall(rf"^.*a replica {verb} the in-sync set .*partition={topic}-0.*$", broker.logs(1000), re.MULTILINE)


def has_logged(leader: Member, follower: Member, verb: str, topic: str) -> bool:
    return any(f'detail="node {follower.node_id}, ' in line for line in logged(leader, verb, topic))


def changes(broker: Member) -> dict[str, int]:
    """Counters of replicas that left and joined the in-sync sets of the partitions that it leads."""
    with urllib.request.urlopen(f"http://127.0.0.1:{broker.status()['metrics_port']}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    return {
        verb: int(sum(float(line.split()[-1]) for line in lines if line.startswith(f"mqd_in_sync_{name}_total")))
        for verb, name in (("leaves", "shrinks"), ("joins", "expands"))
    }


def wait_for_return(cluster: Cluster, leader: Member, follower: Member, topic: str) -> None:
    """Waits for the leader's log, since other hosts' metadata may be that from before the follower
    left, or be ahead of the leader's worker.
    """
    until("it has returned", lambda: has_logged(leader, follower, "joins", topic), cluster)
    until("all replicas are in sync", lambda: all_in_sync(cluster, topic), cluster)


def test_a_follower_too_many_records_behind_leaves_the_isr_and_returns(cluster: Cluster) -> None:
    create(cluster, "bounded", partitions=1, config={"replica.lag.max.messages": str(BOUND)})
    leader, follower = leader_and_follower_after_fetch(cluster, "bounded")
    values = [str(number).encode() for number in range(3 * BOUND)]
    before = {broker.node_id: changes(broker) for broker in cluster}
    with stopped_worker(follower):
        write(leader, "bounded", values, "1")
        until("who is behind has left", lambda: follower.node_id not in in_sync(leader, "bounded"), cluster)
        write(leader, "bounded", [b"without it"], "all")
    wait_for_return(cluster, leader, follower, "bounded")
    assert has_logged(leader, follower, "leaves", "bounded"), cluster.logs()
    for broker in cluster:  # one line and one count for each change, only at the leader
        for verb, count in changes(broker).items():
            expected = int(broker is leader)
            assert len(logged(broker, verb, "bounded")) == expected, cluster.logs()
            assert count - before[broker.node_id][verb] == expected, (verb, broker.node_id)
    assert read(cluster, "bounded", len(values) + 2) == [FETCHED, *values, b"without it"]


def test_a_bound_set_while_a_follower_is_stopped_applies_at_once(cluster: Cluster) -> None:
    create(cluster, "unbounded", partitions=1)
    leader, follower = leader_and_follower_after_fetch(cluster, "unbounded")
    values = [str(number).encode() for number in range(3 * BOUND)]
    with stopped_worker(follower):
        write(leader, "unbounded", values, "1")
        assert follower.node_id in in_sync(leader, "unbounded"), "its time is not over for an hour"
        done = run("config", "set", "topic/unbounded", f"replica.lag.max.messages={BOUND}", "-b", leader.bootstrap)
        assert done.returncode == 0, done.stderr
        until("who is behind has left", lambda: follower.node_id not in in_sync(leader, "unbounded"), cluster)
    wait_for_return(cluster, leader, follower, "unbounded")
