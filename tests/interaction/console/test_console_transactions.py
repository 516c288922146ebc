"""Transactions, share groups, streaming queries and moves in the console."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mqd.cli.broker_lookup import Cluster
from mqd.cli.seeking import Move, commit
from tests.console_client import Browser, options
from tests.interaction.console.changing import change, command, confirmed, fresh, lines, shown
from tests.interaction.console.test_console_overview import log_in
from tests.interaction.coordinator.test_share_groups import Shared, take
from tests.interaction.security.secured import PASSWORDS, Secured
from tests.interaction.transactional import begun, connect, hang, topic_of
from tests.kafka_connection import KafkaConnection


@pytest.fixture
def audit(tmp_path: Path) -> Path:
    return tmp_path / "audit.log"


@pytest.fixture
def browser(secured: Secured, audit: Path) -> Browser:
    found = Browser(options(secured.broker.bootstrap, audit=audit))
    found.get("/")
    return found


@pytest.fixture
def kafka(secured: Secured) -> Iterator[KafkaConnection]:
    with connect(secured.broker) as connection:
        yield connection


def test_an_open_transaction_is_shown_and_aborted(
    secured: Secured, kafka: KafkaConnection, browser: Browser, audit: Path
) -> None:
    topic = topic_of(kafka, 3)
    producer = begun(kafka, topic, 0, 2)
    listed = browser.get("/transactions", q=producer.name).words
    assert f"{producer.name} Ongoing" in listed and "1 of " in listed
    assert producer.name not in browser.get("/transactions", state="Dead").words.partition("Search")[2]
    words = browser.get("/transaction", id=producer.name).words
    assert f"{topic}-0 0" in words and f"{topic}-2 0" in words and "of at most 1 min" in words

    response = shown(browser, "/transaction/abort", id=producer.name)
    assert command(response) == f"mqd txn abort {producer.name} --execute -b {secured.broker.bootstrap}"
    assert f"{topic} 0,2" in response.words and "is fenced" in response.words
    assert producer.state().transaction_state == "Ongoing"
    done = confirmed(browser, "/transaction/abort", response)
    assert f"Aborted the transaction of {producer.name}" in browser.get(done.headers["location"]).words
    assert producer.state().transaction_state == "Empty" and producer.end(True) != 0, "it is fenced"
    assert [outcome for _, outcome in lines(audit)] == ["begun", "done"]
    again = shown(browser, "/transaction/abort", id=producer.name)
    assert again.status == 400 and "has no transaction open" in again.words
    assert "there is no transactional id" in browser.get("/transaction", id="no-such").words


def test_a_transaction_newer_than_the_previewed_one_is_not_aborted(kafka: KafkaConnection, browser: Browser) -> None:
    topic = topic_of(kafka, 1)
    producer = begun(kafka, topic, 0)
    response = shown(browser, "/transaction/abort", id=producer.name)
    assert producer.end(True) == 0
    refused = confirmed(browser, "/transaction/abort", response)
    assert refused.status == 400 and "has no transaction open" in refused.words


def test_a_hanging_transaction_is_found_and_aborted(kafka: KafkaConnection, browser: Browser) -> None:
    topic = topic_of(kafka, 2)
    hang(kafka, topic, 1, 4_000_000_011)
    assert "No transaction hangs" in browser.get("/transactions", show="hanging").words
    assert f"{topic}-1 0 4000000011 0" in browser.get("/transactions", show="hanging", idle=0).words
    response = shown(browser, "/transaction/abort", topic=topic, partition="1", offset="0")
    assert command(response).startswith(f"mqd txn abort {topic} 1 0 --execute")
    assert "no coordinator will end it" in response.words
    confirmed(browser, "/transaction/abort", response)
    assert topic not in browser.get("/transactions", show="hanging", idle=0).words


def test_a_share_group_is_shown_and_its_offsets_are_moved(secured: Secured, browser: Browser) -> None:
    shared = Shared(secured.broker.bootstrap, 1)
    shared.produce("a", "b", "c")
    with shared.consumer("explicit") as consumer:
        take(consumer, 3)
        words = browser.get("/group", name=shared.group).words
        assert "share group" in words and "1 member " in words and f"{shared.topic}:0" in words
        assert "It would be refused now" in shown(browser, "/group/seek", name=shared.group, to="earliest").words
    words = fresh(browser, "/groups", q=shared.group)
    assert f"{shared.group} Empty share 0 0" in words
    response = shown(browser, "/group/seek", name=shared.group, to="1")
    assert f"{shared.topic}-0 3 1 -2" in response.words
    confirmed(browser, "/group/seek", response)
    words = browser.get("/group", name=shared.group).words
    assert f"Start Log end Lag Lag in time Relative lag Member {shared.topic}-0 1 3 – –" in words


def test_a_streaming_query_is_distinguished_from_a_group(secured: Secured, browser: Browser) -> None:
    change(browser, "/topic/create", name="streamed", partitions="1")
    with Cluster(secured.broker.bootstrap) as cluster:
        assert commit(cluster, "query", [Move("streamed", 0, None, 0, "", is_spark_progress=True)]) == {}
    assert "query Empty Spark query 0 0" in fresh(browser, "/groups", q="query")
    assert "It reads from its checkpoint" in browser.get("/group", name="query").words


def test_moves_of_a_cluster_of_one_broker(secured: Secured, browser: Browser) -> None:
    change(browser, "/topic/create", name="stays", partitions="2")
    words = browser.get("/moves").words
    assert "No replica moves" in words and "Balance the cluster" in words and "Drain" in words
    response = shown(browser, "/cluster/balance", topics="stays")
    assert response.status == 400 and "balanced already" in response.words
    response = shown(browser, "/cluster/drain", node="1")
    assert command(response) == f"mqd cluster drain 1 --no-wait -b {secured.broker.bootstrap}"
    assert "stays-0 1" in response.words and "more replicas than there would be brokers" in response.words
    assert "Confirm" in confirmed(browser, "/cluster/drain", response).words, "it is refused before it is tried"
    for path, form, reason in (
        ("/cluster/drain", {"node": "7"}, "there is no broker 7"),
        ("/cluster/drain", {"node": "x"}, "'x' is not a number"),
        ("/moves/cancel", {"topic": "stays"}, "no replicas are moving"),
        ("/transaction/abort", {"topic": "stays", "partition": "9", "offset": "0"}, "there is no partition 9"),
        ("/transaction/abort", {"topic": "stays", "partition": "0", "offset": "-1"}, "'-1' is not a number"),
    ):
        response = shown(browser, path, **form)
        assert response.status == 400 and reason in response.words


def test_a_user_without_rights_moves_and_aborts_nothing(
    secured: Secured, kafka: KafkaConnection, login_browser: Browser
) -> None:
    producer = begun(kafka, topic_of(kafka, 1), 0)
    log_in(login_browser, "bob", PASSWORDS["bob"])
    assert producer.name not in login_browser.get("/transactions").words
    assert "AUTHORIZATION_FAILED" in shown(login_browser, "/transaction/abort", id=producer.name).words
    assert "AUTHORIZATION_FAILED" in login_browser.get("/moves").words
    assert "AUTHORIZATION_FAILED" in shown(login_browser, "/cluster/drain", node="1").words
    assert "AUTHORIZATION_FAILED" in shown(login_browser, "/cluster/balance").words
    producer.end(True)
