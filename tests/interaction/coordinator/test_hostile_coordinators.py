"""Clients that send arbitrary requests to the coordinators: each gets an error code, other clients
are not affected, and nothing in the acceptor fails.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from mqd.coordinator.internal_topic import partition_for
from mqd.protocol.errors import ErrorCode as E
from mqd.protocol.headers import SUPPORTED
from mqd.protocol.messages import (
    CreateTopicsRequest,
    FindCoordinatorRequest,
    ListGroupsRequest,
    ListTransactionsRequest,
    MetadataRequest,
    OffsetCommitRequest,
    OffsetFetchRequest,
    WriteTxnMarkersRequest,
)
from tests.interaction.random_requests import TOPICS, Requests
from tests.interaction.traffic import (
    CREATE_TOPICS,
    METADATA,
    PRODUCE,
    Watch,
    batch,
    create_topic,
    eventually,
    log_end,
    must_produce,
    new_producer_id,
    produce,
)
from tests.interaction.transactional import RawProducer
from tests.kafka_connection import ConnectionEnded, KafkaConnection

(
    OFFSET_COMMIT,
    OFFSET_FETCH,
    FIND_COORDINATOR,
    JOIN_GROUP,
    SYNC_GROUP,
    LIST_GROUPS,
    WRITE_TXN_MARKERS,
    LIST_TRANSACTIONS,
) = (8, 9, 10, 11, 14, 16, 27, 66)
# these wait for other members: the client closes the connection after this time
WAITS = {JOIN_GROUP: 0.05, SYNC_GROUP: 0.05}
ROUND = 250
CLIENTS = 5


class Bystander:
    """Writes records, commits offsets and fetches them, and checks every response."""

    def __init__(self, watch: Watch) -> None:
        self.watch, self.count = watch, 0
        self.kafka = watch.connect()
        create_topic(self.kafka, "bystander", 1)
        for kind in (0, 1):
            found = lambda kind=kind: (
                self.kafka.call(
                    FIND_COORDINATOR, 4, FindCoordinatorRequest(key_type=kind, coordinator_keys=["bystander"])
                )
                .coordinators[0]
                .error_code
                == 0
            )  # noqa: E731
            eventually(found, "a coordinator")
        eventually(lambda: self.kafka.call(LIST_GROUPS, 5, ListGroupsRequest()).error_code == 0, "loaded groups")
        eventually(
            lambda: self.kafka.call(LIST_TRANSACTIONS, 0, ListTransactionsRequest()).error_code == 0,
            "loaded transactions",
        )
        self.processes = self.pids()

    def pids(self) -> list[int]:
        return [*self.watch.worker_pids(), *self.watch.broker.pids("acceptor")]

    def look(self) -> None:
        self.count += 1
        must_produce(self.kafka, "bystander", 0, b"%d" % self.count)
        partition = OffsetCommitRequest.Partition(partition_index=0, committed_offset=self.count)
        commit = OffsetCommitRequest(
            group_id="bystander",
            generation_id_or_member_epoch=-1,
            topics=[OffsetCommitRequest.Topic(name="bystander", partitions=[partition])],
        )
        assert self.kafka.call(OFFSET_COMMIT, 9, commit).topics[0].partitions[0].error_code == 0
        requested = OffsetFetchRequest(groups=[OffsetFetchRequest.Group(group_id="bystander", topics=None)])
        (group,) = self.kafka.call(OFFSET_FETCH, 9, requested).groups
        assert [
            (topic.name, one.partition_index, one.committed_offset)
            for topic in group.topics
            for one in topic.partitions
        ] == [("bystander", 0, self.count)]

    def end(self) -> None:
        self.kafka.close()
        assert self.pids() == self.processes, f"a process died\n{self.watch.broker.logs()}"


def close_reasons(watch: Watch) -> str:
    """Why connections were closed."""
    lines = [
        line
        for path in (watch.broker.data_dir / "logs").glob("*.log")
        for line in path.read_text(errors="replace").splitlines()
    ]
    return "\n".join(line for line in lines if "closing the connection" in line or "connection is closed" in line)


def unexpected_errors(watch: Watch) -> list[str]:
    """Log lines that no request may cause."""
    never = (
        "a handler failed",
        "core failed",
        "Traceback",
        "is loaded again",
        "cannot be loaded",
        "a check failed",
        "Task exception",
        "Exception in callback",
        "was never retrieved",
    )
    lines = [
        line
        for path in (watch.broker.data_dir / "logs").glob("*.log")
        for line in path.read_text(errors="replace").splitlines()
    ]
    return [line for line in lines if any(part in line for part in never)]


@pytest.fixture
def watch(start_broker) -> Watch:
    return Watch(start_broker())


# Describe-, Create- and DeleteAcls: a type, operation or permission that does not exist ends the connection, as in Kafka
OF_ACLS = (29, 30, 31)


class Swarm:
    """Connections that send random requests, one after the other."""

    def __init__(self, watch: Watch, seed: int) -> None:
        self.watch, self.requests = watch, Requests(seed)
        self.clients: list[KafkaConnection | None] = [None] * CLIENTS
        self.outcomes: Counter[str] = Counter()
        self.closed: Counter[str] = Counter()

    def __enter__(self) -> Swarm:
        return self

    def __exit__(self, *_exception) -> None:
        for kafka in self.clients:
            if kafka is not None:
                kafka.close()

    def send(self) -> None:
        index = self.requests.random.randrange(CLIENTS)
        kafka = self.clients[index]
        if kafka is None:
            kafka = self.clients[index] = self.watch.connect()
        key, version, request = self.requests.next()
        name = f"{SUPPORTED[key].name} {version}"
        kafka.socket.settimeout(WAITS.get(key, 60.0))
        try:
            silent = key == PRODUCE and request.acks == 0
            kafka.send(key, version, request, expect_response=not silent)
            if silent:
                raise TimeoutError
            response = kafka.receive().body
        except TimeoutError:
            assert key in WAITS or silent, f"{name} was not answered: {request}\n{self.watch.broker.logs()}"
            self._hang_up(index)
            return
        except ConnectionEnded:
            if key not in OF_ACLS:
                self.closed[name] += 1
            self._hang_up(index)
            return
        self.outcomes[name] += 1
        self._read(name, request, response)

    def _hang_up(self, index: int) -> None:
        self.clients[index].close()
        self.clients[index] = None

    def _read(self, name: str, request: object, response: object) -> None:
        """Every error code in the response is one of Kafka's, and none is UNKNOWN_SERVER_ERROR;
        values in the response go back into the pools.
        """
        todo = [response]
        while todo:
            one = todo.pop()
            self.requests.learn(one)
            for field in one.__struct_fields__:
                value = getattr(one, field)
                if field.endswith("error_code"):
                    assert value in E._value2member_map_ and value != E.UNKNOWN_SERVER_ERROR, (
                        f"{name} was answered with error code {value}: {request}"
                    )
                elif isinstance(value, list):
                    todo += [element for element in value if hasattr(element, "__struct_fields__")]
                elif hasattr(value, "__struct_fields__"):
                    todo.append(value)

    def topics(self) -> None:
        """They may have been deleted meanwhile."""
        expected = [CreateTopicsRequest.Topic(name=name, num_partitions=2, replication_factor=1) for name in TOPICS]
        with self.watch.connect() as kafka:
            kafka.call(CREATE_TOPICS, 7, CreateTopicsRequest(topics=expected, timeout_ms=30_000))
            requested = MetadataRequest(topics=[MetadataRequest.Topic(name=name) for name in TOPICS])
            self.requests.pools["topic_id"] = [
                bytes(16),
                b"\1" * 16,
                *(topic.topic_id for topic in kafka.call(METADATA, 12, requested).topics),
            ]


def _swarm(watch: Watch, seed: int, count: int) -> Swarm:
    bystander = Bystander(watch)
    with Swarm(watch, seed) as swarm:
        for number in range(count):
            if number % ROUND == 0:
                swarm.topics()
                bystander.look()
                assert not unexpected_errors(watch), (seed, number, unexpected_errors(watch))
            swarm.send()
    bystander.look()
    bystander.end()
    assert not unexpected_errors(watch), (seed, unexpected_errors(watch))
    assert not swarm.closed, f"seed {seed}: connections were closed upon {swarm.closed}\n{close_reasons(watch)}"
    return swarm


def test_random_requests_of_every_version(watch):
    swarm = _swarm(watch, seed=1, count=2000)
    assert len(swarm.outcomes) > 150, sorted(swarm.outcomes)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "seed", range(int(os.environ.get("MQD_TEST_SEED", "100")), int(os.environ.get("MQD_TEST_SEED", "100")) + 8)
)
def test_many_random_requests(watch, seed):
    swarm = _swarm(watch, seed, count=20_000)
    missing = {
        f"{spec.name} {version}"
        for spec in SUPPORTED.values()
        for version in range(spec.min_version, spec.max_version + 1)
    } - swarm.outcomes.keys()
    assert not missing


# -- one attack each -------------------------------------------------------------------------------


@pytest.fixture
def bystander(watch: Watch):
    one = Bystander(watch)
    one.look()
    yield one
    one.look()
    one.end()
    assert not unexpected_errors(watch), unexpected_errors(watch)


def commit(
    kafka: KafkaConnection, group: str, *partitions: OffsetCommitRequest.Partition, version: int = 9, **fields
) -> set[int]:
    """The error codes."""
    request = OffsetCommitRequest(
        group_id=group,
        generation_id_or_member_epoch=-1,
        topics=[OffsetCommitRequest.Topic(name="bystander", partitions=list(partitions))],
        **fields,
    )
    return {one.error_code for topic in kafka.call(OFFSET_COMMIT, version, request).topics for one in topic.partitions}


def test_a_commit_that_cannot_be_written(watch, bystander):
    """Timestamps beyond int64; and a small request whose records would exceed the size of a batch,
    since each contains the group's id.
    """
    one = OffsetCommitRequest.Partition(partition_index=0, committed_offset=7)
    with watch.connect() as kafka:
        for version in (2, 3, 4):
            assert commit(kafka, "g", one, version=version, retention_time_ms=2**63 - 1) == {0}
        assert commit(kafka, "g" * 32767, *[one] * 200) == {E.INVALID_COMMIT_OFFSET_SIZE}
        assert commit(kafka, "g" * 32767, one) == {0}


@pytest.mark.parametrize("topic", ["__transaction_state", "__consumer_offsets"])
def test_clients_cannot_add_internal_topics_to_transactions(watch, bystander, topic):
    """Its marker would be written among the records of the coordinator that ends the transaction,
    and corrupt its state each time.
    """
    with watch.connect() as kafka:
        producer = RawProducer(kafka, version=0)
        producer.init()
        own = partition_for(producer.name, 50)
        assert producer.add(topic, own) == E.TOPIC_AUTHORIZATION_FAILED
        assert producer.add("bystander", 0) == 0 and producer.end(True) == 0


def test_forged_markers_are_refused(watch, bystander):
    """A marker locks no producer out of a partition, and none is written to the transaction
    coordinator's own log.
    """

    def mark(
        producer_id: int, epoch: int, topic: str, partition: int = 0, coordinator_epoch: int = 0, version: int = 0
    ) -> int:
        topics = [WriteTxnMarkersRequest.Topic(name=topic, partition_indexes=[partition])]
        marker = WriteTxnMarkersRequest.Marker(
            producer_id=producer_id,
            producer_epoch=epoch,
            coordinator_epoch=coordinator_epoch,
            transaction_version=version,
            topics=topics,
        )
        return (
            kafka.call(WRITE_TXN_MARKERS, 2, WriteTxnMarkersRequest(markers=[marker]))
            .markers[0]
            .topics[0]
            .partitions[0]
            .error_code
        )

    with watch.connect() as kafka:
        create_topic(kafka, "owned", 1)
        for version in (0, 2):
            producer = RawProducer(kafka, version=version)
            producer.init()
            assert version or producer.add("owned", 0) == 0
            assert producer.produce("owned", 0, b"x") == 0 and producer.end(True) == 0
            end = log_end(kafka, "owned", 0)
            for forged in (32767, producer.epoch + 1, producer.epoch + 2):
                assert mark(producer.producer_id, forged, "owned") == 0, "nothing is open"
            assert log_end(kafka, "owned", 0) == end
            assert version or producer.add("owned", 0) == 0
            assert producer.produce("owned", 0, b"y") == 0 and producer.end(True) == 0
        idempotent = new_producer_id(kafka)
        assert (
            produce(
                kafka, "owned", 0, batch(b"z", producer_id=idempotent[0], producer_epoch=0, base_sequence=0)
            ).error_code
            == 0
        )
        assert mark(idempotent[0], 32767, "owned") == 0
        assert (
            produce(
                kafka, "owned", 0, batch(b"z", producer_id=idempotent[0], producer_epoch=0, base_sequence=1)
            ).error_code
            == 0
        )
        for partition in range(50):
            assert mark(5, 3, "__transaction_state", partition) == mark(5, 3, "__consumer_offsets", partition) == 0
        assert mark(5, 3, "nowhere") == E.UNKNOWN_TOPIC_OR_PARTITION
        for _ in range(50):
            assert RawProducer(kafka).init().error_code == 0
