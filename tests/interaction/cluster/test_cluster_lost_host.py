"""A host is lost: its replicas are recreated elsewhere after replication.recovery.delay.ms, which
is cancelled when it returns; and the consequences when an operator makes a replica leader that
lacks records.
"""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic

from mqd.cli.kafka_request import Broker as Requested
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import ElectLeadersRequest
from tests.cluster import Cluster, Member
from tests.interaction.cluster_clients import (
    PATIENCE_S,
    all_in_sync,
    create,
    log,
    partitions,
    produce,
    read,
    run,
    until,
)

DELAY_S = 4.0
SESSION_S = 2.0
QUICK = {
    "broker.session.timeout.ms": str(int(SESSION_S * 1000)),
    "broker.heartbeat.interval.ms": "300",
    "controller.quorum.fetch.timeout.ms": "1000",
}
SLOW_BYTES_PER_S = 20_000
VALUES = [b"%06d" % number + b"x" * 1000 for number in range(3000)]  # more than two minutes at that rate
ELECT_LEADERS, PREFERRED, UNCLEAN = 43, 0, 1
UNCLEAN_ENABLE = "unclean.leader.election.enable"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, config={**QUICK, "replication.recovery.delay.ms": str(int(DELAY_S * 1000))}) as started:
        yield started


@pytest.fixture
def never_replaced(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, config={**QUICK, "replication.recovery.delay.ms": "-1"}) as started:
        yield started


def replicas(cluster: Cluster, topic: str) -> set[int]:
    """During a reassignment: the old and the new ones."""
    found = partitions(cluster, topic).get(0)
    return set(found.replicas) if found else set()


def in_sync(cluster: Cluster, topic: str) -> set[int]:
    found = partitions(cluster, topic).get(0)
    return set(found.isrs) if found else set()


def filled(cluster: Cluster, topic: str) -> None:
    """On hosts 1, 2 and 3, before the fourth joins."""
    create(cluster, topic, partitions=1)
    produce(cluster, topic, VALUES)
    until("all are in sync", lambda: all_in_sync(cluster, topic), cluster)
    cluster.add(4)


def has(host: Member, topic: str) -> bool:
    return (host.data_dir / "log" / f"{topic}-0").exists()


def test_partitions_of_a_lost_host_are_moved_after_the_delay(cluster: Cluster) -> None:
    filled(cluster, "lost")
    lost = cluster.brokers[3]
    lost_at = time.monotonic()
    lost.kill_all()
    until("it is out of the in-sync set", lambda: 3 not in in_sync(cluster, "lost"), cluster)
    until("the fourth host has it", lambda: replicas(cluster, "lost") == in_sync(cluster, "lost") == {1, 2, 4}, cluster)
    assert time.monotonic() - lost_at > DELAY_S + SESSION_S / 2  # its last heartbeat may be one or two intervals old
    assert (
        log(cluster.brokers[4], "lost", 0) == log(cluster.brokers[1], "lost", 0) == log(cluster.brokers[2], "lost", 0)
    )
    assert read(cluster, "lost", len(VALUES)) == VALUES
    lost.start()
    until("what it had is deleted, for it is no replica any more", lambda: not has(lost, "lost"), cluster)
    assert replicas(cluster, "lost") == {1, 2, 4}


@pytest.mark.slow
def test_the_move_is_cancelled_when_the_host_returns(cluster: Cluster) -> None:
    filled(cluster, "back")
    slow = run(
        "config", "set", "broker/4", f"follower.replication.throttled.rate={SLOW_BYTES_PER_S}", "-b", cluster.bootstrap
    )
    assert slow.returncode == 0, slow.stderr
    listed = run("config", "set", "topic/back", "follower.replication.throttled.replicas=*", "-b", cluster.bootstrap)
    assert listed.returncode == 0, listed.stderr
    cluster.brokers[3].kill_all()
    until(
        "the fourth host copies it",
        lambda: replicas(cluster, "back") == {1, 2, 3, 4} and has(cluster.brokers[4], "back"),
        cluster,
    )
    cluster.brokers[3].start()
    until(
        "the third is in sync, and the fourth is none",
        lambda: replicas(cluster, "back") == in_sync(cluster, "back") == {1, 2, 3},
        cluster,
    )
    until("the fourth has deleted what it had", lambda: not has(cluster.brokers[4], "back"), cluster)
    assert read(cluster, "back", len(VALUES)) == VALUES


def elected(broker: Member, topic: str, way: int) -> int:
    """The error code of the election."""
    with Requested(broker.bootstrap) as requested:
        request = ElectLeadersRequest(
            election_type=way,
            topic_partitions=[ElectLeadersRequest.TopicPartitions(topic=topic, partitions=[0])],
            timeout_ms=60_000,
        )
        response = requested.request(ELECT_LEADERS, request)
    assert response.error_code == 0
    ((one,),) = (result.partition_result for result in response.replica_election_results)
    return one.error_code


def leader(cluster: Cluster, topic: str) -> int | None:
    found = partitions(cluster, topic).get(0)
    return found.leader if found else None


def only_one_has_all(cluster: Cluster, name: str, both: list[bytes], one: list[bytes]) -> None:
    """A partition of brokers 1 and 2. Only broker 1 has `one`, and it is dead: there is no leader."""
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    topic = NewTopic(name, num_partitions=1, replica_assignment=[[1, 2]], config={"min.insync.replicas": "1"})
    admin.create_topics([topic])[name].result(PATIENCE_S)
    until("both are in sync", lambda: in_sync(cluster, name) == {1, 2}, cluster)
    produce(cluster, name, both)
    cluster.brokers[2].kill_all()
    until("the second is out of the in-sync set", lambda: in_sync(cluster, name) == {1}, cluster)
    produce(cluster, name, one)
    cluster.brokers[1].kill_all()
    cluster.brokers[2].start()
    until("no leader: the second is not known to have all records", lambda: leader(cluster, name) == -1, cluster)


@pytest.mark.slow
def test_unclean_leader_election_is_logged_as_a_warning(never_replaced: Cluster) -> None:
    cluster = never_replaced
    both, one, after = ([b"%s %d" % (word, number) for number in range(50)] for word in (b"both", b"one", b"after"))
    only_one_has_all(cluster, "enabled", both, one)
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    expected = ConfigEntry(UNCLEAN_ENABLE, "true", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource("topic", "enabled", incremental_configs=[expected])
    admin.incremental_alter_configs([resource])[resource].result(PATIENCE_S)
    until("the second leads", lambda: leader(cluster, "enabled") == 2, cluster)
    produce(cluster, "enabled", after)
    assert read(cluster, "enabled", len(both) + len(after)) == [*both, *after]
    reported = cluster.brokers[3].logs(1_000)
    assert (
        "a leader was elected from outside the in-sync set" in reported
        and "topic=enabled partition=0 leader=2" in reported
    ), reported
    address = f"http://127.0.0.1:{cluster.brokers[3].status()['metrics_port']}/metrics"
    with urllib.request.urlopen(address, timeout=PATIENCE_S) as page:
        assert "mqd_unclean_leader_elections_total 1.0" in page.read().decode()


def test_an_operator_may_make_a_replica_leader_that_lacks_records(never_replaced: Cluster) -> None:
    cluster = never_replaced
    both, one, after = ([b"%s %d" % (word, number) for number in range(50)] for word in (b"both", b"one", b"after"))
    only_one_has_all(cluster, "chosen", both, one)
    assert elected(cluster.brokers[3], "chosen", PREFERRED) == ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE
    assert elected(cluster.brokers[3], "chosen", UNCLEAN) == 0
    until("the second leads", lambda: leader(cluster, "chosen") == 2, cluster)
    produce(cluster, "chosen", after)
    cluster.brokers[1].start()
    until("the first is in sync again", lambda: in_sync(cluster, "chosen") == {1, 2}, cluster)
    assert read(cluster, "chosen", len(both) + len(after)) == [*both, *after]
    assert log(cluster.brokers[1], "chosen", 0) == log(cluster.brokers[2], "chosen", 0)
