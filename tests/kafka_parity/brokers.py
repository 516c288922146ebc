"""Starts both brokers with equal settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.broker import Broker
from tests.compat.kafka_tools import KafkaTools
from tests.kafka_parity.compare import Table
from tests.kafka_parity.journal import Journal
from tests.kafka_parity.runner import Comparison
from tests.kafka_parity.sides import Side

# The same on both. No auto-creation of topics: Kafka creates them a moment later.
SETTINGS = {
    "auto.create.topics.enable": "false",
    "group.initial.rebalance.delay.ms": "0",
    "group.streams.initial.rebalance.delay.ms": "0",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.num.partitions": "4",
    "share.coordinator.state.topic.num.partitions": "4",
    # not the default, so that both name the same source
    "num.partitions": "2",
    # beyond the timestamps of the cases' records: concurrent retention would cause differences
    "log.retention.hours": "876000",
    "log.segment.bytes": "1073741823",
    "log.retention.check.interval.ms": "300001",
    "offsets.retention.check.interval.ms": "86400000",
    # A busy machine must not make either fence itself, since its partitions' leader epochs would
    # rise.
    "broker.session.timeout.ms": "600000",
    # for the ACL APIs; everyone has all rights
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:ANONYMOUS",
}


@contextmanager
def both(directory: Path, table: Table, journal: Journal | None = None) -> Iterator[Comparison]:
    """A comparison of new brokers. Raises perf.peers.peer.Unavailable where Kafka is not available."""
    (directory / "kafka").mkdir()
    tools = KafkaTools(directory / "kafka")
    settings = {name.replace(".", "_"): value for name, value in SETTINGS.items()}
    with tools.broker(**settings) as bootstrap, Broker(directory / "mqd", workers=1, config=SETTINGS) as broker:
        kafka, mqd = Side("Apache Kafka", int(bootstrap.rpartition(":")[2])), Side("mqd", broker.port)
        comparison = Comparison(kafka, mqd, table, journal)
        try:
            comparison.prepare()
            yield comparison
        finally:
            kafka.close()
            mqd.close()
