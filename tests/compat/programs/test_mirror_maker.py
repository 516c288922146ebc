"""A migration from Apache Kafka to mqd with MirrorMaker 2, as described in
docs/migrating-from-kafka.md: records, topic configurations, topic ACLs and offsets of groups, each
record once while MirrorMaker and the broker are killed; then the consumers continue on mqd. And the
way back, from mqd to Apache Kafka.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from confluent_kafka import (
    TIMESTAMP_CREATE_TIME,
    Consumer,
    ConsumerGroupTopicPartitions,
    Message,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

from perf.peers.peer import Unavailable
from tests.broker import Broker
from tests.compat.java_client import build_java, java_program
from tests.compat.kafka_tools import KafkaCluster, KafkaTools
from tests.compat.programs.program import CommittedReader, Program, difference, kill_process
from tests.crash.workload import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PARTITIONS = 2
STAGE = 400  # records of each partition between two kills
KILLS = ("mirror", "mqd-acceptor", "broker", "mqd-worker-0")
TOTAL = STAGE * (len(KILLS) + 1)
PATIENCE_S = 180.0
RIGHTS = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:ANONYMOUS",
    "group.initial.rebalance.delay.ms": "0",
}
CONFIG = {"retention.ms": "90000000", "max.message.bytes": "700000", "cleanup.policy": "compact,delete"}
PAGE = Path(__file__).parents[3] / "docs/migrating-from-kafka.md"
FIRST_MS = int(time.time() * 1000) - 3_600_000  # within the retention of both


def value(number: int) -> str:
    return f"order {number}"


def place(kafka: str, numbers: range) -> None:
    producer = Producer({"bootstrap.servers": kafka, "enable.idempotence": True, "compression.type": "zstd"})
    for number in numbers:
        for partition in range(PARTITIONS):
            producer.produce(
                "orders",
                value(number),
                key=f"{partition} {number}",
                partition=partition,
                headers=[("number", str(number).encode()), ("empty", b""), ("null", None)],
                timestamp=FIRST_MS + number,
            )
        producer.poll(0)
    assert producer.flush(PATIENCE_S) == 0


def place_aborted(kafka: str) -> None:
    """Writes records of a transaction that is aborted: they are not copied."""
    producer = Producer({"bootstrap.servers": kafka, "transactional.id": "aborted"})
    producer.init_transactions(60)
    producer.begin_transaction()
    for partition in range(PARTITIONS):
        producer.produce("orders", "aborted", key="aborted", partition=partition)
    producer.flush(PATIENCE_S)
    producer.abort_transaction(60)


def consume(bootstrap: str, group: str, last: int) -> list[Message]:
    """The records that a member of the group reads until both partitions have returned record
    `last`; then it commits.
    """
    with closing(
        Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": group,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
            }
        )
    ) as consumer:
        consumer.subscribe(["orders"])
        read: list[Message] = []
        finished: set[int] = set()
        while len(finished) < PARTITIONS:
            message = consumer.poll(PATIENCE_S)
            assert message is not None, f"{group}: nothing more after {len(read)} records"
            if message.error() is None and message.partition() not in finished:
                read.append(message)
                if message.value() == value(last).encode():
                    finished.add(message.partition())
        places = {message.partition(): message.offset() + 1 for message in read}
        consumer.commit(offsets=[TopicPartition("orders", *pair) for pair in places.items()], asynchronous=False)
        return read


def numbers_of(messages: list[Message], partition: int) -> list[int]:
    return [int(message.value().split()[1]) for message in messages if message.partition() == partition]


def committed(admin: AdminClient, group: str) -> dict[int, int]:
    response = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])[group].result(60)
    return {each.partition: each.offset for each in response.topic_partitions if each.offset >= 0}


def values_of_config(admin: AdminClient) -> dict[str, str]:
    resource = ConfigResource(ConfigResource.Type.TOPIC, "orders")
    found = admin.describe_configs([resource])[resource].result(60)
    return {name: found[name].value for name in CONFIG}


def rules(admin: AdminClient) -> set[tuple[str, AclOperation]]:
    everything = AclBindingFilter(
        ResourceType.ANY, None, ResourcePatternType.ANY, None, None, AclOperation.ANY, AclPermissionType.ANY
    )
    return {(rule.principal, rule.operation) for rule in admin.describe_acls(everything).result(60)}


def settings_of_page(first: str) -> dict[str, str]:
    """The block of properties of docs/migrating-from-kafka.md that begins with `first`."""
    page = re.search(rf"```properties\n({re.escape(first)} = .*?)```", PAGE.read_text(), re.DOTALL)
    assert page is not None, f"{PAGE} has no settings of MirrorMaker that begin with {first}"
    return dict(line.split(" = ", 1) for line in page[1].splitlines() if line and not line.startswith("#"))


def settings(directory: Path, old: str, new: str, more: Mapping[str, str] = {}) -> str:
    """The file of docs/migrating-from-kafka.md, with these brokers, and with shorter intervals."""
    lines = {**settings_of_page("clusters"), **more, "old.bootstrap.servers": old, "new.bootstrap.servers": new}
    lines = {name: "1" if name.endswith("replication.factor") else text for name, text in lines.items()}
    repeated = ("refresh.topics", "refresh.groups", "sync.topic.configs", "sync.topic.acls")
    lines |= {f"{name}.interval.seconds": "2" for name in repeated}
    lines |= {f"{name}.interval.seconds": "1" for name in ("sync.group.offsets", "emit.checkpoints")}
    lines |= {
        "listeners": "http://127.0.0.1:0",
        "plugin.discovery": "service_load",
        "new.session.timeout.ms": "6000",
        "new.heartbeat.interval.ms": "1000",
        "new.scheduled.rebalance.max.delay.ms": "1000",
        "new.offset.storage.partitions": "3",
        "new.status.storage.partitions": "3",
    }
    path = directory / "mm2.properties"
    path.write_text("".join(f"{name} = {text}\n" for name, text in lines.items()))
    return str(path)


def wait_with(mirror: Program, what: str, condition: Callable[[], bool]) -> None:
    """Raises AssertionError with the end of MirrorMaker's output."""
    try:
        wait_until(condition, PATIENCE_S, lambda: what)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{mirror.tail()}") from None


@pytest.fixture
def kafka(tmp_path: Path) -> Iterator[KafkaCluster]:
    (tmp_path / "kafka").mkdir()
    try:
        tools = KafkaTools(tmp_path / "kafka")
    except Unavailable as missing:
        pytest.skip(f"Apache Kafka cannot be had: {missing}")
    with KafkaCluster(tools, tmp_path / "kafka", 1, RIGHTS) as cluster:
        yield cluster


def test_a_migration_from_kafka(start_broker, kafka: KafkaCluster, tmp_path: Path) -> None:
    home = build_java(Path(__file__).parent / "connect", "programs-connect")
    broker: Broker = start_broker(workers=2, config=RIGHTS)
    at_kafka, at_mqd = (AdminClient({"bootstrap.servers": one.bootstrap}) for one in (kafka, broker))
    at_kafka.create_topics([NewTopic("orders", PARTITIONS, 1, config=CONFIG)])["orders"].result(60)
    allowed = {("User:reader", AclOperation.READ), ("User:writer", AclOperation.WRITE)}
    for future in at_kafka.create_acls(
        [
            AclBinding(
                ResourceType.TOPIC, "orders", ResourcePatternType.LITERAL, who, "*", operation, AclPermissionType.ALLOW
            )
            for who, operation in allowed
        ]
    ).values():
        future.result(60)

    command = java_program(
        home,
        "org.apache.kafka.connect.mirror.MirrorMaker",
        settings(tmp_path, kafka.bootstrap, broker.bootstrap),
        heap="512m",
    )
    with Program(command, tmp_path / "mirror.out") as mirror:
        wait_for = partial(wait_with, mirror)
        place(kafka.bootstrap, range(STAGE))
        place_aborted(kafka.bootstrap)
        wait_for("the topic is at mqd", lambda: "orders" in at_mqd.list_topics(timeout=60).topics)
        reader = CommittedReader(broker.bootstrap, {"orders": PARTITIONS})
        for stage, victim in enumerate(KILLS, 1):
            reader.read_until(PARTITIONS * (stage - 1) * STAGE + 1, PATIENCE_S, [mirror])
            if victim == "mirror":
                mirror.restart()
            else:
                kill_process(broker, victim)
            place(kafka.bootstrap, range(stage * STAGE, (stage + 1) * STAGE))
        reader.read_until(PARTITIONS * TOTAL, PATIENCE_S, [mirror])
        reader.read(3.0)  # records that should not exist
        expected = [value(number) for number in range(TOTAL)]
        wrong = difference({("orders", index): expected for index in range(PARTITIONS)}, reader.values)
        assert not wrong, f"{wrong}\n{mirror.tail()}"
        reader.close()

        wait_for("the topic's configuration", lambda: values_of_config(at_mqd) == CONFIG)
        entry = ConfigEntry("retention.ms", "80000000", incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ConfigResource.Type.TOPIC, "orders", incremental_configs=[entry])
        at_kafka.incremental_alter_configs([resource])[resource].result(60)
        wait_for("its change", lambda: values_of_config(at_mqd) == CONFIG | {"retention.ms": "80000000"})
        # writers are excluded, so that none writes to the copy before the switch
        wait_for("the rules of topics", lambda: rules(at_mqd) == {("User:reader", AclOperation.READ)})

        half = TOTAL // 2
        consume(kafka.bootstrap, "behind", half - 1)
        consume(kafka.bootstrap, "billing", TOTAL - 1)
        wait_for("a group far behind is translated", lambda: len(committed(at_mqd, "behind")) == PARTITIONS)
        # the switch as on the page: the writers stop, the group reads to the end
        place(kafka.bootstrap, range(TOTAL, TOTAL + STAGE))
        consume(kafka.bootstrap, "billing", TOTAL + STAGE - 1)
        copied = consume(broker.bootstrap, "copied", TOTAL + STAGE - 1)
        end = {message.partition(): message.offset() + 1 for message in copied}
        wait_for("billing is at the end of the copy", lambda: committed(at_mqd, "billing") == end)

    place(broker.bootstrap, range(TOTAL + STAGE, TOTAL + 2 * STAGE))
    final = TOTAL + 2 * STAGE - 1
    continued = consume(broker.bootstrap, "billing", final)
    again = consume(broker.bootstrap, "behind", final)
    for index in range(PARTITIONS):
        assert numbers_of(continued, index) == list(range(TOTAL + STAGE, final + 1)), "billing"
        numbers = numbers_of(again, index)
        # nothing is skipped; MirrorMaker translates few offsets far behind, so more records may be
        # repeated
        assert numbers[0] <= half and numbers == list(range(numbers[0], final + 1)), "behind"
    for message in again:
        number = int(message.value().split()[1])
        assert message.key() == f"{message.partition()} {number}".encode()
        assert message.headers() == [("number", str(number).encode()), ("empty", b""), ("null", None)]
        assert message.timestamp() == (TIMESTAMP_CREATE_TIME, FIRST_MS + number)


def test_the_way_back(start_broker, kafka: KafkaCluster, tmp_path: Path) -> None:
    home = build_java(Path(__file__).parent / "connect", "programs-connect")
    broker: Broker = start_broker(workers=2, config=RIGHTS)
    at_kafka, at_mqd = (AdminClient({"bootstrap.servers": one.bootstrap}) for one in (kafka, broker))
    own = {"flush.on.ack": "true", "record.validation": "all", "replica.lag.max.messages": "100000"}
    at_mqd.create_topics([NewTopic("orders", PARTITIONS, 1, config=CONFIG | own)])["orders"].result(60)
    place(broker.bootstrap, range(STAGE))
    place_aborted(broker.bootstrap)
    consume(broker.bootstrap, "billing", STAGE - 1)
    excluded = settings_of_page("config.properties.exclude")
    command = java_program(
        home,
        "org.apache.kafka.connect.mirror.MirrorMaker",
        settings(tmp_path, broker.bootstrap, kafka.bootstrap, excluded),
        heap="512m",
    )
    with Program(command, tmp_path / "mirror.out") as mirror:
        wait_for = partial(wait_with, mirror)
        wait_for("the topic is at Kafka", lambda: "orders" in at_kafka.list_topics(timeout=60).topics)
        with closing(CommittedReader(kafka.bootstrap, {"orders": PARTITIONS})) as reader:
            reader.read_until(PARTITIONS * STAGE, PATIENCE_S, [mirror])
            mirror.restart()
            place(broker.bootstrap, range(STAGE, 2 * STAGE))
            reader.read_until(PARTITIONS * 2 * STAGE, PATIENCE_S, [mirror])
            reader.read(3.0)  # records that should not exist
            expected = [value(number) for number in range(2 * STAGE)]
            wrong = difference({("orders", index): expected for index in range(PARTITIONS)}, reader.values)
            assert not wrong, f"{wrong}\n{mirror.tail()}"
        wait_for("the topic's configuration", lambda: values_of_config(at_kafka) == CONFIG)
        wait_for("the group is translated", lambda: len(committed(at_kafka, "billing")) == PARTITIONS)
