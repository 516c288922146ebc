"""The console is a client of the Kafka protocol: the same pages, searches and changes against Apache Kafka."""

from __future__ import annotations

from pathlib import Path

import confluent_kafka
import pytest
from confluent_kafka import TopicPartition

from perf.peers.peer import Unavailable
from tests.compat.kafka_tools import KafkaTools
from tests.console_client import Browser, options
from tests.interaction.console.changing import confirmed, shown
from tests.interaction.console.test_console_messages import offsets, searched

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
        browser.app._app.state.console.cache.clear()  # the topic was looked at before the group began
        assert "billing Empty 0 2" in browser.get("/topic", name="orders").words
        answer = shown(browser, "/group/seek", name="billing", to="latest")
        assert "orders-0 1 3 +2" in answer.words
        assert confirmed(browser, "/group/seek", answer).status == 303
        assert client.committed([TopicPartition("orders", 0)], timeout=30)[0].offset == 3
        client.close()

        cluster = browser.get("/cluster")
        assert "online controller" in cluster.words and "Not shown" not in cluster.words
        confirmed(browser, "/topic/delete", shown(browser, "/topic/delete", name="orders"), typed="orders")
        assert "There are no topics yet" in browser.get("/topics").words
