"""One client that tries to exhaust the coordinator's memory, or the time for others' requests."""

from __future__ import annotations

import threading
import time
import urllib.request

import pytest

from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import HeartbeatRequest, JoinGroupRequest, OffsetCommitRequest, SyncGroupRequest
from tests.interaction.coordinator.test_hostile_coordinators import Bystander, commit
from tests.interaction.traffic import Watch, must_produce, rss_bytes
from tests.kafka_connection import ConnectionEnded, KafkaConnection

OFFSET_COMMIT, JOIN_GROUP, HEARTBEAT, SYNC_GROUP = 8, 11, 12, 14
MB = 1 << 20
LIMIT = 64 * MB
REFUSED = int(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)


def join_request(group: str, size: int, member_id: str = "") -> JoinGroupRequest:
    return JoinGroupRequest(
        group_id=group,
        session_timeout_ms=60_000,
        rebalance_timeout_ms=60_000,
        member_id=member_id,
        protocol_type="consumer",
        protocols=[JoinGroupRequest.Protocol(name="range", metadata=bytes(size))],
    )


def commit_request(group: str, offset: int = 1, count: int = 1) -> OffsetCommitRequest:
    partitions = [OffsetCommitRequest.Partition(partition_index=0, committed_offset=offset)] * count
    return OffsetCommitRequest(
        group_id=group,
        generation_id_or_member_epoch=-1,
        topics=[OffsetCommitRequest.Topic(name="bystander", partitions=partitions)],
    )


def metric(port: int, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as page:
        lines = page.read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))


class Member:
    """The only member of a group, which joined before the flood."""

    def __init__(self, watch: Watch) -> None:
        self.kafka = watch.connect()
        joined = self.kafka.call(JOIN_GROUP, 3, join_request("before", 1000))
        assert joined.error_code == 0
        self.member_id, self.generation = joined.member_id, joined.generation_id
        self.sync()

    def sync(self) -> None:
        assignment = SyncGroupRequest.Assignment(member_id=self.member_id, assignment=b"mine")
        request = SyncGroupRequest(
            group_id="before", generation_id=self.generation, member_id=self.member_id, assignments=[assignment]
        )
        assert self.kafka.call(SYNC_GROUP, 3, request).error_code == 0

    def check_still_served(self) -> None:
        """Heartbeats, and rebalances of its own."""
        request = HeartbeatRequest(group_id="before", generation_id=self.generation, member_id=self.member_id)
        assert self.kafka.call(HEARTBEAT, 3, request).error_code == 0
        joined = self.kafka.call(JOIN_GROUP, 3, join_request("before", 1000, self.member_id))
        assert joined.error_code == 0
        self.generation = joined.generation_id
        self.sync()


@pytest.fixture
def watch(start_broker) -> Watch:
    config = {"group.coordinator.memory.bytes": str(LIMIT), "group.initial.rebalance.delay.ms": "0"}
    return Watch(start_broker(workers=1, config=config))


def commit_to_many(kafka: KafkaConnection, count: int) -> list[int]:
    """Commits one offset for each of `count` groups; returns the error codes."""
    outcomes: list[int] = []
    for base in range(0, count, 500):
        for number in range(base, base + 500):
            kafka.send(OFFSET_COMMIT, 9, commit_request(f"group-{number}"))
        outcomes += [kafka.receive().body.topics[0].partitions[0].error_code for _ in range(500)]
    return outcomes


def test_members_with_much_metadata_stay_within_the_budget(watch: Watch) -> None:
    bystander, member = Bystander(watch), Member(watch)
    bystander.look()
    (acceptor,) = watch.broker.pids("acceptor")
    before = rss_bytes(acceptor)

    connections = [watch.connect() for _ in range(200)]
    errors = [
        kafka.call(JOIN_GROUP, 3, join_request(f"large-{number}", MB)).error_code
        for number, kafka in enumerate(connections)
    ]
    assert set(errors) == {0, REFUSED} and 40 <= errors.count(0) <= LIMIT // MB, errors
    port = watch.broker.status()["metrics_port"]
    assert metric(port, "mqd_group_memory_bytes") <= metric(port, "mqd_group_memory_max_bytes") == LIMIT
    assert metric(port, "mqd_group_memory_refusals_total") == errors.count(REFUSED)
    member.check_still_served()
    bystander.look()

    # no further 1 MB fits; small groups still do, until the budget is used up
    with watch.connect() as kafka:
        outcomes = commit_to_many(kafka, 2_000)
        assert set(outcomes) == {0, REFUSED} and outcomes[-1] == REFUSED
        assert commit(kafka, "group-0", commit_request("group-0", 2).topics[0].partitions[0]) == {0}
    assert metric(port, "mqd_group_memory_bytes") <= LIMIT
    grown = rss_bytes(acceptor) - before
    assert grown <= LIMIT + 32 * MB, f"the acceptor grew by {grown >> 20} MB"
    member.check_still_served()
    bystander.look()

    for kafka in connections:
        kafka.close()
    bystander.end()
    member.kafka.close()


@pytest.mark.slow
def test_many_group_ids_stay_within_the_budget(watch: Watch) -> None:
    bystander, member = Bystander(watch), Member(watch)
    bystander.look()
    (acceptor,) = watch.broker.pids("acceptor")
    before = rss_bytes(acceptor)
    with watch.connect() as kafka:
        outcomes = commit_to_many(kafka, 50_000)
    assert set(outcomes) == {0, REFUSED} and 10_000 <= outcomes.count(0) <= LIMIT // 3_000
    grown = rss_bytes(acceptor) - before
    assert grown <= LIMIT, f"the acceptor grew by {grown >> 20} MB"
    member.check_still_served()
    bystander.look()
    bystander.end()
    member.kafka.close()


COMMITTED = 200  # offsets in one request: half a millisecond of work


class Pipeline(threading.Thread):
    """Commits over and over, with many requests in flight, until it is stopped."""

    def __init__(self, watch: Watch) -> None:
        super().__init__(daemon=True)
        self.kafka: KafkaConnection = watch.connect()
        self.ending = threading.Event()
        self.count = 0

    def run(self) -> None:
        try:
            for number in range(2000):
                self.kafka.send(OFFSET_COMMIT, 9, commit_request("pipelined", number, COMMITTED))
            while not self.ending.is_set():
                assert self.kafka.receive().body.topics[0].partitions[0].error_code == 0
                self.count += 1
                self.kafka.send(OFFSET_COMMIT, 9, commit_request("pipelined", self.count, COMMITTED))
        except (ConnectionEnded, OSError):
            assert self.ending.is_set()


def _medians_ms(watch: Watch, seconds: float) -> tuple[float, float]:
    """The median times to connect with a first request to the acceptor, and to produce one record."""
    connects, produces = [], []
    with watch.connect() as kafka:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            began = time.monotonic()
            with watch.connect() as other:
                other.call(OFFSET_COMMIT, 9, commit_request("others"))
            connects.append(time.monotonic() - began)
            began = time.monotonic()
            must_produce(kafka, "bystander", 0, b"x")
            produces.append(time.monotonic() - began)
    return 1000 * sorted(connects)[len(connects) // 2], 1000 * sorted(produces)[len(produces) // 2]


@pytest.mark.slow
def test_a_client_that_pipelines_commits_does_not_stop_the_others(watch: Watch) -> None:
    """The ratio within one run: other clients are slower beside it, but not blocked (2.7 s to
    connect, 600 ms to produce before connections took turns).
    """
    bystander = Bystander(watch)
    connect_ms, produce_ms = _medians_ms(watch, 2.0)
    pipeline = Pipeline(watch)
    pipeline.start()
    beside_connect_ms, beside_produce_ms = _medians_ms(watch, 4.0)
    deadline = time.monotonic() + 60
    while pipeline.count <= 100 and time.monotonic() < deadline:  # a busy machine handles few of them
        time.sleep(0.05)
    assert pipeline.count > 100 and pipeline.is_alive()
    pipeline.ending.set()
    pipeline.kafka.close()
    pipeline.join()
    reported = f"connect {connect_ms:.1f} -> {beside_connect_ms:.1f} ms, produce {produce_ms:.1f} -> {beside_produce_ms:.1f} ms"
    print(reported)
    assert beside_connect_ms <= 20 * connect_ms + 100 and beside_produce_ms <= 20 * produce_ms + 100, reported
    bystander.end()
