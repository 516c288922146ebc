"""Real hosts on loopback addresses: they find each other, elect a controller, hold the same
metadata, and lose controllers, hosts and disks. The cores' decisions are tested in the simulator;
these tests check that sockets, disks and processes meet the cores' assumptions.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from mqd.cluster.membership.formation import ADVICE
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import CreateTopicsRequest
from tests.cluster_hosts import Cluster, Host
from tests.interaction.cluster_clients import produce, read
from tests.preloaded import PRELOADED

CREATE_TOPICS = 19


def create(host: Host, name: str, partitions: int = 3, replicas: int = -1) -> int:
    topic = CreateTopicsRequest.Topic(name=name, num_partitions=partitions, replication_factor=replicas)
    return host.request(CREATE_TOPICS, CreateTopicsRequest(topics=[topic], timeout_ms=60_000)).topics[0].error_code


def create_with_retries(cluster: Cluster, host: Host, name: str) -> None:
    """As a client would: retries while the error is retriable. Whether a failed attempt took effect
    is unknown.
    """

    def tried() -> bool:
        try:
            return create(host, name) in (0, 36)  # 36: it exists
        except Exception:
            return False

    cluster.wait(f"topic {name} created by node {host.node_id}", tried)


def knows(host: Host, *names: str) -> bool:
    response = host.metadata(names)
    return response is not None and all(not topic.error_code for topic in response.topics)


def every_host_knows(cluster: Cluster, *names: str) -> None:
    for host in cluster.hosts:
        if host.process is not None:
            cluster.wait(f"node {host.node_id} knows {names}", lambda host=host: knows(host, *names))


def brokers(host: Host) -> set[int]:
    response = host.metadata()
    return {broker.node_id for broker in response.brokers} if response is not None else set()


def voters(host: Host) -> dict[int, bytes]:
    response = host.quorum()
    if response is None or response.error_code:
        return {}
    return {one.replica_id: bytes(one.replica_directory_id) for one in response.topics[0].partitions[0].current_voters}


def observers(host: Host) -> dict[int, bytes]:
    response = host.quorum()
    return (
        {one.replica_id: bytes(one.replica_directory_id) for one in response.topics[0].partitions[0].observers}
        if response is not None and not response.error_code
        else {}
    )


def mqd(host: Host, *arguments: str, status: int = 0) -> str:
    found = PRELOADED.run(*arguments, "-b", host.bootstrap)
    assert found.returncode == status, found.stdout + found.stderr
    return found.stdout + found.stderr


def test_three_hosts_form_one_cluster_and_hold_the_same_metadata(tmp_path: Path) -> None:
    with Cluster(tmp_path, 3) as cluster:
        ids = {host.metadata().cluster_id for host in cluster.hosts}
        assert len(ids) == 1 and len(ids.pop()) == 22
        for host in cluster.hosts:
            cluster.wait("all brokers are shown", lambda host=host: brokers(host) == {1, 2, 3})
            assert set(voters(host)) == {1, 2, 3}
        leader = cluster.leader()
        for host in cluster.hosts:
            assert create(host, f"from-{host.node_id}") == 0
            assert create(host, f"from-{host.node_id}") == 36
            assert knows(host, f"from-{host.node_id}"), "a host that learned of it finds it there"
        every_host_knows(cluster, "from-1", "from-2", "from-3")
        assert {cluster.leader().node_id for _ in range(3)} == {leader.node_id}


@pytest.mark.slow
def test_controllers_and_hosts_are_killed_one_after_another(tmp_path: Path) -> None:
    with Cluster(tmp_path, 3) as cluster:
        create_with_retries(cluster, cluster[1], "before")
        # kill -9 of the active controller's process: the others elect, and it rejoins as a follower
        leader = cluster.leader()
        other = next(host for host in cluster.hosts if host is not leader)
        os.kill(leader.pid("mqd-controller"), signal.SIGKILL)
        began = time.monotonic()
        create_with_retries(cluster, other, "one")
        assert time.monotonic() - began < 10
        leader.wait_until_ready()
        every_host_knows(cluster, "before", "one")
        # kill -9 of the leader's whole host
        leader = cluster.leader()
        others = [host for host in cluster.hosts if host is not leader]
        leader.kill_all()
        create_with_retries(cluster, others[0], "two")
        for host in others:
            cluster.wait(
                "the lost host is not shown any more",
                lambda host=host: brokers(host) == {one.node_id for one in others},
            )
        leader.start()
        for host in cluster.hosts:
            cluster.wait("the host is back", lambda host=host: brokers(host) == {1, 2, 3})
        every_host_knows(cluster, "before", "one", "two")
        # all at once, as in a power cut
        identity = cluster[1].metadata().cluster_id
        for host in cluster.hosts:
            host.kill_all()
        cluster.start()
        every_host_knows(cluster, "before", "one", "two")
        assert {host.metadata().cluster_id for host in cluster.hosts} == {identity}
        create_with_retries(cluster, cluster[2], "three")


@pytest.mark.slow
def test_status_reports_a_lost_voter_that_was_not_the_active_controller(tmp_path: Path) -> None:
    """It fetched in this epoch and has stopped since: one more loss would stop the cluster."""
    with Cluster(tmp_path, 3) as cluster:
        active = cluster.leader()
        victim = next(host for host in cluster.hosts if host is not active)

        def status(*arguments: str) -> str:
            """Empty while there is no active controller."""
            return PRELOADED.run("cluster", "status", *arguments, "-b", active.bootstrap, timeout=100).stdout

        assert "voters: 1, 2, 3; the quorum can lose 1 of them" in status("--wait", "60")
        victim.kill_all()
        cluster.wait(
            "it is missing",
            lambda: (
                f"voters: 1, 2, 3; not heard from: {victim.node_id}; the quorum can lose none of the others" in status()
            ),
        )
        found = cluster.wait("for programs, too", lambda: json.loads(status("--format", "json") or "null"))
        assert (found["voters_not_heard_from"], found["voters_behind"], found["voter_losses_tolerated"]) == (
            [victim.node_id],
            [],
            0,
        )
        cluster.start([victim])
        assert "voters: 1, 2, 3; the quorum can lose 1 of them" in status("--wait", "60")


def leaders(host: Host, topic: str) -> list[int]:
    response = host.metadata([topic])
    return [partition.leader_id for partition in response.topics[0].partitions] if response is not None else []


def test_leadership_moves_from_a_host_whose_workers_died(tmp_path: Path) -> None:
    """By the keeper's proof, not by session expiry, which would take the minute configured here."""
    with Cluster(
        tmp_path, 3, config={"broker.session.timeout.ms": "60000", "broker.heartbeat.interval.ms": "1000"}
    ) as cluster:
        create_with_retries(cluster, cluster[1], "t")
        every_host_knows(cluster, "t")
        victim = next(host for host in cluster.hosts if host is not cluster.leader())
        witness = next(host for host in cluster.hosts if host is not victim)
        cluster.wait(
            "all three are in sync",
            lambda: all(len(partition.isr_nodes) == 3 for partition in witness.metadata(["t"]).topics[0].partitions),
        )
        assert victim.node_id in leaders(witness, "t")
        began = time.monotonic()
        os.kill(victim.pid("mqd-worker-0"), signal.SIGKILL)
        cluster.wait(
            "the others lead",
            lambda: (found := leaders(witness, "t")) and victim.node_id not in found and -1 not in found,
            10,
        )
        assert time.monotonic() - began < 10
        cluster.wait("it is back in service", lambda: brokers(witness) == {1, 2, 3})
        cluster.wait(
            "and in sync",
            lambda: all(len(partition.isr_nodes) == 3 for partition in witness.metadata(["t"]).topics[0].partitions),
        )


@pytest.mark.slow
def test_a_minority_commits_nothing(tmp_path: Path) -> None:
    with Cluster(tmp_path, 3) as cluster:
        create_with_retries(cluster, cluster[1], "before")
        every_host_knows(cluster, "before")
        last = cluster.leader()
        others = [host for host in cluster.hosts if host is not last]
        for host in others:
            host.kill_all()

        def refused() -> bool:
            try:
                return create(last, "never") != 0
            except Exception:
                return True

        assert refused()
        assert knows(last, "before"), "what is committed can be read"
        cluster.start(others[:1])
        create_with_retries(cluster, last, "after")
        cluster.start(others[1:])
        every_host_knows(cluster, "before", "after")


def requests_cached(host: Host) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{host.status()['metrics_port']}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("mqd_requests_cached_total"))


def test_an_isolated_host_stops_claiming_leadership(tmp_path: Path) -> None:
    """Also for a repeated request, whose response is in the worker's cache."""
    with Cluster(tmp_path, 3) as cluster:
        create_with_retries(cluster, cluster[1], "t")
        every_host_knows(cluster, "t")
        last, *others = cluster.hosts
        cluster.wait("it leads", lambda: last.node_id in leaders(last, "t"))

        def led() -> dict[int, int]:
            """The partitions it claims to lead, or that have no leader -> error."""
            response = last.metadata(["t"])
            assert response is not None, "its processes live"
            return {
                one.partition_index: one.error_code
                for one in response.topics[0].partitions
                if one.leader_id in (-1, last.node_id)
            }

        def is_known() -> bool:
            before = requests_cached(last)
            led()
            return requests_cached(last) > before

        cluster.wait("its worker knows the answer", is_known)
        for host in others:
            host.kill_all()
        missing = int(ErrorCode.LEADER_NOT_AVAILABLE)
        cluster.wait("it leads nothing any more", lambda: set(led().values()) == {missing})
        assert last.node_id not in leaders(last, "t")
        cluster.start(others)
        cluster.wait("all partitions have leaders again", lambda: (found := leaders(last, "t")) and -1 not in found)
        cluster.wait("its worker knows the answer again", is_known)


@pytest.mark.slow
def test_one_host_is_forced_to_continue_alone(tmp_path: Path) -> None:
    """Two of three disks are lost permanently. A lost voter that reappears is refused, erases its
    data, and joins again.
    """
    with Cluster(tmp_path, 3) as cluster:
        create_with_retries(cluster, cluster[1], "before")
        every_host_knows(cluster, "before")
        for host in cluster.hosts:
            host.kill_all()
        last = cluster[2]

        def force(*more: str) -> subprocess.CompletedProcess[str]:
            command = [
                sys.executable,
                "-m",
                "mqd.cli.main",
                "cluster",
                "force-standalone",
                "--data-dir",
                str(last.data_dir),
                *more,
            ]
            return subprocess.run(command, capture_output=True, text=True, timeout=60)

        assert "nothing was done" in force().stderr
        assert "generation 2" in force("--i-accept-data-loss").stdout
        cluster.start([last])
        assert (
            "another broker" in force("--i-accept-data-loss").stderr or "runs" in force("--i-accept-data-loss").stderr
        )
        assert set(voters(last)) == {2}
        create_with_retries(cluster, last, "after")
        assert knows(last, "before", "after")
        old = cluster[1]
        started = subprocess.Popen(old.command(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            cluster.wait("it is told to be emptied", lambda: "empty this host's data directory" in old.logs())
        finally:
            started.send_signal(signal.SIGTERM)
            started.wait(60)
        shutil.rmtree(old.data_dir)
        cluster.start([old])
        assert knows(old, "before", "after")


@pytest.mark.slow
def test_a_wiped_seed_joins_as_a_new_host(tmp_path: Path) -> None:
    with Cluster(tmp_path, 3) as cluster:
        create_with_retries(cluster, cluster[1], "before")
        wiped = next(host for host in cluster.hosts if host is not cluster.leader())
        cluster.wait("the voters are shown", lambda: len(voters(cluster.leader())) == 3)
        before = voters(cluster.leader())
        identity = wiped.metadata().cluster_id
        wiped.kill_all()
        shutil.rmtree(wiped.data_dir)
        # its predecessor's session must expire before its node id is given to another directory
        wiped.start()
        every_host_knows(cluster, "before")
        assert wiped.metadata().cluster_id == identity, "it founded no second cluster"
        seen = cluster.wait(
            "it is an observer",
            lambda: observers(cluster.leader()) if wiped.node_id in observers(cluster.leader()) else None,
        )
        assert seen[wiped.node_id] != before[wiped.node_id]
        assert voters(cluster.leader()) == before, "the lost voter is replaced by an operator, not by itself"
        create_with_retries(cluster, wiped, "after")


@pytest.mark.slow  # test_a_single_host_grows_to_three has two that join
def test_a_later_host_joins(tmp_path: Path) -> None:
    with Cluster(tmp_path, 3) as cluster:
        create_with_retries(cluster, cluster[1], "before")
        late = cluster.make(4)
        cluster.hosts.append(late)
        late.start()
        every_host_knows(cluster, "before")
        assert brokers(late) == {1, 2, 3, 4}
        assert set(voters(late)) == {1, 2, 3} and set(observers(late)) == {4}
        assert create(late, "from-4") == 0
        # and the quorum commands of the command line
        shown = json.loads(mqd(late, "cluster", "status", "--format", "json"))
        assert (shown["voters"], shown["brokers"], shown["fenced"], shown["voter_losses_tolerated"]) == (
            [1, 2, 3],
            [1, 2, 3, 4],
            [],
            1,
        )
        assert [line.split()[-1] for line in mqd(late, "cluster", "brokers").splitlines()[1:]].count("observer") == 1
        assert "node 4 is a voter" in mqd(late, "cluster", "add-voter", "4")
        gone = cluster.leader().node_id % 3 + 1
        assert f"node {gone} is no longer a voter" in mqd(late, "cluster", "remove-voter", str(gone))
        replicas = json.loads(mqd(late, "cluster", "controller", "--format", "json"))["replicas"]
        assert {one["node"] for one in replicas if one["role"] != "observer"} == {1, 2, 3, 4} - {gone}
        assert "not a voter" in mqd(late, "cluster", "remove-voter", str(gone), status=1)


# -- one host grows to three -----------------------------------------------------------------------

ALONE = [f"alone {number}".encode() for number in range(500)]
COMMITTED = 400
LISTENS = ("cluster.seeds", "controller.listener", "inter.broker.listener")


def write_alone(host: Host) -> None:
    """The data of a single host: ALONE in partition 0 of topic alone, a group that has read
    COMMITTED of them, a transaction.
    """
    assert create(host, "alone") == 0
    produce(host, "alone", ALONE)
    mqd(host, "group", "seek", "billing", "alone:0", "--to", str(COMMITTED), "--execute")
    producer = Producer({"bootstrap.servers": host.bootstrap, "transactional.id": "receipts"})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce("alone", b"receipt", partition=1)
    producer.commit_transaction(30)


def committed(host: Host) -> int | None:
    """Of group billing; None while its coordinator is away."""
    group = Consumer({"bootstrap.servers": host.bootstrap, "group.id": "billing"})
    try:
        (found,) = group.committed([TopicPartition("alone", 0)], 10)
        return None if found.error else found.offset
    except KafkaException:
        return None
    finally:
        group.close()


def check_alone(cluster: Cluster, host: Host, more: Sequence[bytes] = ()) -> None:
    """`more`: records written after ALONE."""
    assert read(host, "alone", len(ALONE) + len(more)) == [*ALONE, *more]
    assert read(host, "alone", 1, 1) == [b"receipt"]
    assert cluster.wait("the group's coordinator answers", lambda: committed(host)) == COMMITTED


def on_three(host: Host, topic: str) -> bool:
    response = host.metadata([topic])
    return response is not None and all(
        sorted(one.replica_nodes) == sorted(one.isr_nodes) == [1, 2, 3] and one.leader_id > 0
        for one in response.topics[0].partitions
    )


def check_grown(cluster: Cluster, identity: str) -> None:
    """Three voters and three copies of everything; then the first host is lost, without any data
    loss.
    """
    every_host_knows(cluster, "alone")
    assert {host.metadata().cluster_id for host in cluster.hosts} == {identity}
    cluster.wait("three voters", lambda: set(voters(cluster.leader())) == {1, 2, 3})
    for host in cluster.hosts:
        check_alone(cluster, host)
    mqd(cluster[2], "topic", "reassign", "alone", "--brokers", "1,2,3", "--replication-factor", "3")
    for topic in ("alone", "__consumer_offsets", "__transaction_state"):
        cluster.wait(
            f"{topic} has three copies, the internal ones by themselves",
            lambda topic=topic: on_three(cluster[2], topic),
            60,
        )
    cluster[1].kill_all()
    create_with_retries(cluster, cluster[2], "without-the-first")
    produce(cluster[3], "alone", [b"later"])
    for host in cluster.hosts[1:]:
        check_alone(cluster, host, [b"later"])


@pytest.mark.parametrize("prepared_by", ["--cluster-seeds", pytest.param("its listeners", marks=pytest.mark.slow)])
def test_a_single_host_grows_to_three(tmp_path: Path, prepared_by: str) -> None:
    """It has had an inter-broker listener since its first start, so it is never restarted: others
    join through it; the quorum and the internal topics grow automatically.
    """
    cluster = Cluster(tmp_path, 3, seeds=1)
    if prepared_by != "--cluster-seeds":
        del cluster[1].config["cluster.seeds"]
    try:
        cluster.start(cluster.hosts[:1])
        write_alone(cluster[1])
        identity = cluster[1].metadata().cluster_id
        assert "no other host can join" not in mqd(cluster[1], "cluster", "status")
        cluster.start(cluster.hosts[1:])
        check_grown(cluster, identity)
    finally:
        cluster.__exit__()


@pytest.mark.slow
def test_a_host_without_an_inter_broker_listener_grows_to_three_with_one_restart(tmp_path: Path) -> None:
    """The log names the next step once, and the host joins without a restart."""
    cluster = Cluster(tmp_path, 3, seeds=1)
    first, second, third = cluster.hosts
    grown = dict(first.config)
    for name in LISTENS:
        del first.config[name]
    try:
        cluster.start([first])
        write_alone(first)
        identity = first.metadata().cluster_id
        assert "no other host can join" in mqd(first, "cluster", "status")
        assert "no other host can join" in mqd(first, "cluster", "add-voter", "2", status=1)
        second.data_dir.mkdir()
        output = second.data_dir / "up.stderr"
        with open(output, "w") as errors:
            second.process = subprocess.Popen(
                second.command(), stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
            )
        cluster.wait("it says what to look at", lambda: ADVICE in output.read_text(), 60)
        assert (
            f"mqd is waiting: {cluster.seeds} cannot be reached: Connection refused. {ADVICE}\n" in output.read_text()
        )
        first.stop()
        first.config = grown
        cluster.start([first])
        check_alone(cluster, first)
        cluster.wait("who waited is ready", lambda: second.status()["ready"], 60)
        assert output.read_text().count(ADVICE) == 1
        cluster.start([third])
        check_grown(cluster, identity)
    finally:
        cluster.__exit__()


@pytest.mark.slow
def test_a_second_host_with_a_node_id_in_use_stays_out_and_disturbs_no_other(tmp_path: Path) -> None:
    with Cluster(tmp_path, 3) as cluster:
        create_with_retries(cluster, cluster[1], "before")
        victim = cluster[cluster.leader().node_id % 3 + 1]
        before = victim.logs(1_000).count("this broker's state")
        second = cluster.make(5)
        second.config["node.id"] = str(victim.node_id)
        second.data_dir.mkdir(parents=True)
        with open(second.data_dir / "up.stderr", "w") as errors:
            second.process = subprocess.Popen(
                second.command(), stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
            )
        cluster.hosts.append(second)
        cluster.wait(
            "it says why it waits",
            lambda: "which is in service: give the newcomer a node.id of its own" in second.logs(100),
        )
        time.sleep(5)  # two and a half sessions, in which nothing must change
        assert victim.logs(1_000).count("this broker's state") == before, "the one in service has kept its lease"
        assert "this broker's state" not in second.logs(1_000)
        assert create(victim, "after") == 0
        victim.kill_all()
        victim.process = None
        cluster.wait(
            "it takes the place of a host that is gone", lambda: "ready=True fenced=False" in second.logs(1_000)
        )


@pytest.mark.slow
def test_a_host_without_the_key_is_refused(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    key.chmod(0o600)
    other = tmp_path / "other"
    other.write_bytes(b"o" * 32)
    other.chmod(0o600)
    with Cluster(tmp_path, 3, config={"cluster.key.file": str(key)}) as cluster:
        create_with_retries(cluster, cluster[1], "before")
        stranger = cluster.make(4)
        stranger.config["cluster.key.file"] = str(other)
        stranger.data_dir.mkdir()
        with open(stranger.data_dir / "up.stderr", "w") as errors:
            started = subprocess.Popen(stranger.command(), stdout=subprocess.DEVNULL, stderr=errors)
        try:
            cluster.wait("it says for whom it waits", lambda: "mqd is waiting: 127.0.0.1" in stranger.logs())
            cluster.wait("the others say why", lambda: "does not have this cluster's key" in cluster[1].logs())
            assert started.poll() is None and "mqd ready" not in stranger.logs()
        finally:
            started.send_signal(signal.SIGTERM)
            started.wait(30)
        assert brokers(cluster[1]) == {1, 2, 3}
