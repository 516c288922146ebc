"""A large cluster as one run of real brokers, on this machine: three hosts with partitions on disk, in a
cluster whose metadata is many times larger.

The other partitions belong to hosts that have been in the cluster and are down: while such a host
runs, its workers are paused, so it has its partitions in the metadata but makes no files for them.
Then all processes of the broker that leads every partition on disk are killed.

Concurrency: a thread polls the leaders, another writes.
"""

from __future__ import annotations

import itertools
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from mqd import KafkaError, Message, Producer
from mqd.protocol.messages import CreateTopicsRequest, MetadataRequest
from perf import loading
from perf.accounting import pss_bytes
from perf.peers.processes import cpu_seconds, tree
from tests.broker import pause
from tests.cluster import Cluster, Member
from tests.kafka_connection import KafkaConnection

METADATA, CREATE_TOPICS = 3, 19
TOPIC_PARTITIONS = 1000
HOST_PARTITIONS = 16_000  # a broker's own limit is 16,384
KILLED, OBSERVER = 1, 2
REST_S = 10.0
SYNC_SECONDS, FAILOVER_SECONDS = 300.0, 120.0
CONFIG = {"admin.port": "-1", "core.files.allow": "true"}  # so that any user can measure the memory


class ScaleFailed(RuntimeError):
    """The cluster did not reach the state that is to be measured."""


def _create(member: Member, name: str, replicas: list[int], partitions: int) -> None:
    assignments = [
        CreateTopicsRequest.Assignment(partition_index=index, broker_ids=replicas) for index in range(partitions)
    ]
    requested = CreateTopicsRequest.Topic(
        name=name, num_partitions=-1, replication_factor=-1, configs=[], assignments=assignments
    )
    with KafkaConnection(member.address, member.port, timeout_s=120) as kafka:
        (result,) = kafka.call(CREATE_TOPICS, 5, CreateTopicsRequest(topics=[requested], timeout_ms=100_000)).topics
    if result.error_code:
        raise ScaleFailed(f"{name} cannot be created: error {result.error_code} {result.error_message}")


def _create_all(member: Member, prefix: str, replicas: list[int], partitions: int) -> list[str]:
    names = [f"{prefix}-{start}" for start in range(0, partitions, TOPIC_PARTITIONS)]
    for name, start in zip(names, range(0, partitions, TOPIC_PARTITIONS), strict=True):
        _create(member, name, replicas, min(TOPIC_PARTITIONS, partitions - start))
    return names


def _fill_metadata(cluster: Cluster, partitions: int) -> None:
    """Adds hosts with `partitions` partitions, and kills them."""
    for node_id in itertools.count(len(cluster.brokers) + 1):
        if partitions <= 0:
            return
        host = cluster.add(node_id)
        for pid in host.pids("worker"):
            pause(pid)
        _create_all(cluster.brokers[OBSERVER], f"of-{node_id}", [node_id], min(HOST_PARTITIONS, partitions))
        cluster.brokers.pop(node_id).kill_all()
        partitions -= HOST_PARTITIONS


def _partitions(member: Member, topics: list[str]) -> list:
    requested = MetadataRequest(topics=[MetadataRequest.Topic(name=name) for name in topics])
    with KafkaConnection(member.address, member.port, timeout_s=60) as kafka:
        found = kafka.call(METADATA, 5, requested).topics
    return [partition for topic in found for partition in topic.partitions]


def _wait_in_sync(member: Member, topics: list[str], replicas: int) -> float:
    """Returns the seconds until all replicas are in sync."""
    began = time.monotonic()
    while any(len(partition.isr_nodes) < replicas for partition in _partitions(member, topics)):
        if time.monotonic() - began > SYNC_SECONDS:
            raise ScaleFailed(f"not all replicas are in sync after {SYNC_SECONDS:.0f} s")
        time.sleep(0.5)
    return time.monotonic() - began


def _pids(member: Member) -> list[int]:
    assert member.process is not None
    return tree([member.process.pid])


class Writer:
    """Writes to a partition of each topic, every 20 ms; `acknowledged` has the times for each topic."""

    def __init__(self, bootstrap: str, topics: list[str]) -> None:
        self.acknowledged: dict[str, list[float]] = {topic: [] for topic in topics}
        self.failed: list[str] = []
        self._ended = threading.Event()
        self._producer = Producer({"bootstrap.servers": bootstrap, "transport": "tcp", "acks": "all", "linger.ms": 0})
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            for topic in self.acknowledged:
                self._producer.produce(topic, b"x", partition=0, on_delivery=self._delivered)
            self._producer.poll(0.02)
        self._producer.flush(60)

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self.failed.append(str(error))
        else:
            self.acknowledged[message.topic()].append(time.monotonic())

    def has_written(self, after: float) -> bool:
        """Whether each topic has an acknowledgement after that time."""
        return all(times and times[-1] > after for times in self.acknowledged.values())

    def end(self) -> float:
        """Returns the longest time between two acknowledgements of a topic, in seconds."""
        self._ended.set()
        self._thread.join()
        if self.failed:
            raise ScaleFailed(f"{len(self.failed)} records were not written: {self.failed[0]}")
        pauses = ([later - one for one, later in itertools.pairwise(times)] for times in self.acknowledged.values())
        return max(itertools.chain.from_iterable(pauses))


def _fail_over(cluster: Cluster, topics: list[str]) -> dict[str, float]:
    """Kills the leader of all partitions. Seconds until all have another, as clients of another broker
    learn it, and the longest pause of writes.
    """
    observer, bootstrap = cluster.brokers[OBSERVER], cluster.bootstrap
    writer = Writer(bootstrap, topics)
    try:
        _until(lambda: writer.has_written(0.0), "nothing could be written")
        killed = time.monotonic()
        cluster.brokers[KILLED].kill_all()
        _until(
            lambda: all(partition.leader_id not in (KILLED, -1) for partition in _partitions(observer, topics)),
            "not all partitions have a new leader",
        )
        elected = time.monotonic()
        _until(lambda: writer.has_written(elected), "the writes do not go on")
    finally:
        pause_s = writer.end()
    return {"elected_s": elected - killed, "writes_paused_s": pause_s}


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + FAILOVER_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise ScaleFailed(f"{what} within {FAILOVER_SECONDS:.0f} s")
        time.sleep(0.05)


def one_run(image: int, on_disk: int) -> dict:
    """`image`: partitions in the metadata; `on_disk`: those with three replicas on the three hosts, all led
    by the broker that is killed.
    """
    place = Path(tempfile.mkdtemp(prefix="scale-", dir=loading.BUILD))
    cluster = Cluster(place, config=CONFIG)
    try:
        cluster.start()
        _fill_metadata(cluster, image - on_disk)
        hosts = list(cluster.brokers)
        began = time.monotonic()
        topics = _create_all(cluster.brokers[OBSERVER], "on-disk", [KILLED, OBSERVER, 3], on_disk)
        _wait_in_sync(cluster.brokers[OBSERVER], topics, len(hosts))
        created = time.monotonic() - began
        pids = {node_id: _pids(cluster.brokers[node_id]) for node_id in hosts}
        before = {node_id: cpu_seconds(found) for node_id, found in pids.items()}
        time.sleep(REST_S)  # the window in which the CPU time of idle brokers is counted
        idle = [(cpu_seconds(pids[node_id]) - before[node_id]) / REST_S for node_id in hosts]
        found = {
            "partitions": image,
            "on_disk": on_disk * len(hosts),
            "leaders": on_disk,
            "created_per_s": on_disk / created,
            "pss_mb": statistics.median(pss_bytes(pids[node_id]) for node_id in hosts) / 1e6,
            "idle_percent": statistics.median(idle) * 100,
            **_fail_over(cluster, topics),
        }
        began = time.monotonic()
        cluster.brokers[KILLED].start()
        ready = time.monotonic() - began
        return {**found, "ready_s": ready, "in_sync_s": ready + _wait_in_sync(cluster.brokers[OBSERVER], topics, 3)}
    finally:
        for member in cluster:
            member.kill_all()
        shutil.rmtree(place, ignore_errors=True)
