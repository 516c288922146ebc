"""The console is a client of the Kafka protocol: the same pages, searches and changes against Apache Kafka."""

from __future__ import annotations

import os
from pathlib import Path

import confluent_kafka
import pytest
from confluent_kafka import TopicPartition

from mqd.cli import moves
from mqd.cli.broker_lookup import Cluster
from mqd.cli.kafka_request import Broker
from mqd.console.changing import ALTER_CONFIGS
from mqd.protocol.messages import IncrementalAlterConfigsRequest
from perf.peers.peer import Unavailable
from tests.compat.kafka_tools import KafkaCluster, KafkaTools
from tests.console_client import Browser, options
from tests.interaction.console.changing import change, command, confirmed, fresh, shown
from tests.interaction.console.test_console_messages import offsets, searched
from tests.interaction.coordinator.test_share_groups import Shared, take
from tests.interaction.traffic import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_pages_searches_and_changes_against_apache_kafka(tmp_path: Path) -> None:
    (tmp_path / "kafka").mkdir()
    try:
        tools = KafkaTools(tmp_path / "kafka")
    except Unavailable as error:
        pytest.skip(f"Apache Kafka: {error}")
    with tools.broker(offsets_topic_num_partitions="2") as bootstrap:
        browser = Browser(options(bootstrap, audit=tmp_path / "audit.log"))
        overview = browser.get("/")
        assert "Healthy: 1 broker online" in overview.words and "Not shown" not in overview.words
        form = {"name": "orders", "partitions": "2", "configs": "retention.ms=1000000"}
        assert confirmed(browser, "/topic/create", shown(browser, "/topic/create", **form)).status == 303
        for number in range(6):
            record = {"topic": "orders", "value": '{"order": %d}' % number, "partition": str(number % 2)}
            assert confirmed(browser, "/produce", shown(browser, "/produce", **record)).status == 303
        assert "orders 2 1 6" in browser.get("/topics").words
        topic = browser.get("/topic", name="orders")
        assert "Without the override retention.ms 1000000" in topic.words and "Not shown" not in topic.words
        rows, said = searched(browser, "orders", **{"from": "beginning", "path": "$.order > 3"})
        assert offsets(rows) == ["0:2", "1:2"] or offsets(rows) == ["1:2", "0:2"]
        assert said["said"]["scanned"] == 6

        settings = {"bootstrap.servers": bootstrap, "group.id": "billing", "enable.auto.commit": False, "log_level": 0}
        client = confluent_kafka.Consumer(settings)
        client.commit(offsets=[TopicPartition("orders", 0, 1)], asynchronous=False)
        assert "2 records of lag" in browser.get("/group", name="billing").words
        browser.app._app.state.console.cache.clear()  # the topic was cached before the group began
        assert "billing Empty 0 2" in browser.get("/topic", name="orders").words
        response = shown(browser, "/group/seek", name="billing", to="latest")
        assert "orders-0 1 3 +2" in response.words
        assert confirmed(browser, "/group/seek", response).status == 303
        assert client.committed([TopicPartition("orders", 0)], timeout=60)[0].offset == 3
        client.close()

        cluster = browser.get("/cluster")
        assert "online controller" in cluster.words and "Not shown" not in cluster.words
        confirmed(browser, "/topic/delete", shown(browser, "/topic/delete", name="orders"), typed="orders")
        assert "There are no topics yet" in browser.get("/topics").words


SETTINGS = {
    "offsets_topic_num_partitions": "2",
    "transaction_state_log_num_partitions": "2",
    "share_coordinator_state_topic_num_partitions": "2",
    "authorizer_class_name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super_users": "User:ANONYMOUS",
}


def test_access_transactions_and_moves_against_apache_kafka(tmp_path: Path) -> None:
    (tmp_path / "kafka").mkdir()
    try:
        tools = KafkaTools(tmp_path / "kafka")
    except Unavailable as error:
        pytest.skip(f"Apache Kafka: {error}")
    with tools.broker(**SETTINGS) as bootstrap:
        browser = Browser(options(bootstrap, audit=tmp_path / "audit.log"))
        browser.get("/")
        change(browser, "/topic/create", name="orders", partitions="2")

        created = confirmed(browser, "/access/user", shown(browser, "/access/user", name="dora"))
        assert created.status == 200 and "shown here once" in created.words, created.words
        assert "dora SCRAM-SHA-256 (4,096 iterations), SCRAM-SHA-512" in fresh(browser, "/access")
        change(browser, "/access/user/delete", name="dora")
        assert "No user has a password here" in fresh(browser, "/access")
        rule = {"principal": "dora", "operations": "read", "resource": "topic/or*"}
        change(browser, "/access/rule", **rule)
        assert "User:dora allow read topic/or* any address" in fresh(browser, "/access", show="rules")
        change(browser, "/access/rule/delete", **rule)
        assert "There is no rule" in fresh(browser, "/access", show="rules")
        change(browser, "/access/quota", user="dora", client="<default>", produce="2MB")
        assert "dora <default> – 2.0 MB/s" in fresh(browser, "/access", show="quotas")
        change(browser, "/access/quota/delete", user="dora", client="<default>")
        assert "No limit is set" in fresh(browser, "/access", show="quotas")

        producer = confluent_kafka.Producer(
            {"bootstrap.servers": bootstrap, "transactional.id": "till", "log_level": 0}
        )
        producer.init_transactions(60)
        producer.begin_transaction()
        producer.produce("orders", b"x", partition=1)
        producer.flush(30)
        assert "till Ongoing" in fresh(browser, "/transactions")
        assert "orders-1 0" in fresh(browser, "/transaction", id="till")
        assert "No transaction hangs" in fresh(browser, "/transactions", show="hanging")
        change(browser, "/transaction/abort", id="till")
        with pytest.raises(confluent_kafka.KafkaException):
            producer.commit_transaction(30)

        shared = Shared(bootstrap, 1)
        shared.produce("a", "b", "c")
        with shared.consumer("explicit") as consumer:
            take(consumer, 3)
            words = fresh(browser, "/group", name=shared.group)
            assert "share group" in words and "1 member " in words and f"{shared.topic}:0" in words
        eventually(lambda: f"{shared.group} Empty share" in fresh(browser, "/groups"), "without members")
        words = shown(browser, "/group/seek", name=shared.group, to="1").words  # Kafka's log start follows later
        assert f"{shared.topic}-0 3 1 -2" in words or f"{shared.topic}-0 0 1 +1" in words, words
        change(browser, "/group/seek", name=shared.group, to="1")
        assert f"{shared.topic}-0 1 3" in fresh(browser, "/group", name=shared.group)

        words = browser.get("/moves").words
        assert "No replica moves" in words and "Drain" not in words and "Balance" not in words.partition("Brokers")[0]
        for path, form, reason in (
            ("/cluster/balance", {}, "only an mqd cluster"),
            ("/cluster/drain", {"node": "1"}, "only mqd can"),
        ):
            response = shown(browser, path, **form)
            assert response.status == 400 and reason in response.words
        assert "1 broker online" in fresh(browser, "/"), "it is registered still"


def test_moves_of_two_brokers_of_apache_kafka(tmp_path: Path) -> None:
    (tmp_path / "kafka").mkdir()
    try:
        tools = KafkaTools(tmp_path / "kafka")
    except Unavailable as error:
        pytest.skip(f"Apache Kafka: {error}")
    throttle = "replication.throttled"
    with KafkaCluster(tools, tmp_path / "kafka", 2) as kafka:
        browser = Browser(options(kafka.bootstrap, audit=tmp_path / "audit.log"))
        browser.get("/")
        configs = f"leader.{throttle}.replicas=*\nfollower.{throttle}.replicas=*"
        change(browser, "/topic/create", name="moved", partitions="1", replicas="1", configs=configs)
        producer = confluent_kafka.Producer({"bootstrap.servers": kafka.bootstrap})
        for _ in range(40):
            producer.produce("moved", os.urandom(100_000))
        assert producer.flush(60) == 0
        with Cluster(kafka.bootstrap) as cluster:
            ((partition, (here,)),) = moves.replicas_of(cluster.bootstrap_broker, "moved").items()
            for node in (1, 2):
                for side in ("leader", "follower"):
                    _set(cluster.node(node), str(node), f"{side}.{throttle}.rate", "100000")
            moves.begin(cluster.bootstrap_broker, {partition: [3 - here]})
        eventually(lambda: "1 partition is moving" in fresh(browser, "/moves"), "moving")
        words = fresh(browser, "/moves")
        assert f"{3 - here} {here} Stop" in words and "copied, " in words
        response = shown(browser, "/moves/cancel", topic="moved")
        assert command(response).startswith("mqd topic reassign moved --cancel") and f"moved-0 {here}" in response.words
        assert confirmed(browser, "/moves/cancel", response).status == 303
        eventually(lambda: "No replica moves" in fresh(browser, "/moves"), "cancelled")
        with Broker(kafka.bootstrap) as broker:
            assert moves.replicas_of(broker, "moved") == {partition: [here]}


def _set(broker: Broker, node: str, name: str, value: str) -> None:
    message = IncrementalAlterConfigsRequest
    config = message.Config(name=name, config_operation=0, value=value)
    resource = message.Resource(resource_type=4, resource_name=node, configs=[config])
    assert not broker.request(ALTER_CONFIGS, message(resources=[resource])).responses[0].error_code
