"""Topics and groups in the console: search, pages, hostile names, lag in records and in time."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import confluent_kafka
import pytest
from confluent_kafka import AcknowledgeType, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tests.console_client import Browser
from tests.interaction.console.test_console_overview import log_in
from tests.interaction.coordinator.test_dead_letters import Dead
from tests.interaction.coordinator.test_share_groups import committed, polled
from tests.interaction.security.secured import PASSWORDS, Secured
from tests.interaction.traffic import eventually

HOSTILE = '"><script>alert(1)</script>\u202e'


@pytest.fixture(scope="module")
def topics(secured: Secured) -> Iterator[None]:
    admin = AdminClient({"bootstrap.servers": secured.broker.bootstrap})
    wanted = [NewTopic(f"many-{number:03}", 1, 1) for number in range(60)]
    wanted.append(NewTopic("orders", 3, 1, config={"retention.ms": "86400000"}))
    futures = admin.create_topics(wanted)
    for future in futures.values():
        future.result(30)
    producer = confluent_kafka.Producer({"bootstrap.servers": secured.broker.bootstrap})
    for number in range(30):
        producer.produce("orders", b"value %d" % number, partition=number % 3)
    assert producer.flush(30) == 0
    yield


def consumer(secured: Secured, group: str, **more: str) -> confluent_kafka.Consumer:
    return confluent_kafka.Consumer(
        {"bootstrap.servers": secured.broker.bootstrap, "group.id": group, "enable.auto.commit": False, **more}
    )


def commit(secured: Secured, group: str, *offsets: int) -> None:
    client = consumer(secured, group)
    client.commit(offsets=[TopicPartition("orders", index, at) for index, at in enumerate(offsets)], asynchronous=False)
    client.close()


def test_a_view_names_its_topic_and_condition(topics: None, secured: Secured, browser: Browser) -> None:
    admin = AdminClient({"bootstrap.servers": secured.broker.bootstrap})
    config = {"view.of": "orders", "view.filter": "tag = '<b>'"}
    admin.create_topics([NewTopic("some-orders", -1, config=config)])["some-orders"].result(30)
    page = browser.get("/topic", name="some-orders")
    assert "A view of orders : its records with tag = '<b>' ." in page.words and "30 records" in page.words
    assert "Add partitions" not in page.words and "Produce a record" not in page.words and "Delete" in page.words
    assert "A view of" not in browser.get("/topic", name="orders").words
    admin.delete_topics(["some-orders"])["some-orders"].result(30)


def test_topics_are_searched_sorted_and_paged_by_the_server(topics: None, browser: Browser) -> None:
    first = browser.get("/topics", q="many-")  # other modules create topics on this broker too
    assert "1–50 of 60" in first.words and "many-049" in first.words and "many-050" not in first.words
    assert "many-050" in browser.get("/topics", q="many-", page=2).words
    assert "many-059" in browser.get("/topics", q="many-", page="9" * 30).words, "beyond the last page is the last page"
    found = browser.get("/topics", q="MANY-05")
    assert re.search(r"10 of \d+ topics", found.words) and "many-050" in found.words and "orders" not in found.words
    assert "No topic has “<b>” in its name" in browser.get("/topics", q="<b>").words
    assert "orders 3 1 30" in browser.get("/topics", q="orders").words
    largest = browser.get("/topics", sort="size", order="down").words
    assert largest.index("orders") < largest.index("many-000")


@pytest.mark.parametrize("query", [{"page": "x"}, {"page": "-1"}, {"page": ""}, {"sort": "'", "order": "<"}])
def test_an_invalid_query_shows_the_whole_list(topics: None, browser: Browser, query: dict[str, str]) -> None:
    response = browser.get("/topics", **query)
    assert response.status == 200 and "many-000" in response.words
    assert browser.get("/topics", q="x" * 1001).status == 400


def test_a_topic_shows_partitions_readers_and_its_own_settings(
    secured: Secured, topics: None, browser: Browser
) -> None:
    commit(secured, "billing", 4, 10)
    words = browser.get("/topic", name="orders").words
    assert "3 partitions" in words and "30 records" in words
    assert "billing Empty 0 6" in words
    assert "Overridden properties Property Value Without the override retention.ms 86400000" in words
    missing = browser.get("/topic", name="no-such")
    assert missing.status == 502 and "UNKNOWN_TOPIC_OR_PARTITION" in missing.words
    assert "no-such" not in browser.get("/topics", q="no-such").text.partition("<section")[2].partition("“")[0]
    assert browser.get("/topic").status == 404


def test_a_group_is_behind_in_records_and_in_time(secured: Secured, topics: None, browser: Browser) -> None:
    commit(secured, HOSTILE, 4, 10, 10)
    listed = browser.get("/groups", q="alert")
    assert "<script>alert" not in listed.text and "‹U+202E›" in listed.words and "Empty classic 0 6" in listed.words
    response = browser.get("/group", name=HOSTILE)
    assert "<script>alert" not in response.text and "6 records of lag" in response.words
    eventually(
        lambda: re.search(r"orders-0 4 10 6 [1-9]\d* s", browser.get("/group", name=HOSTILE).words), "an age of seconds"
    )
    assert "orders-1 10 10 0 0 s" in response.words
    missing = browser.get("/group", name="no-such")
    assert missing.status == 502 and "there is no group no-such" in missing.words


def test_a_queue_shows_its_backlog_its_retries_and_its_dead_letters(secured: Secured, browser: Browser) -> None:
    queue = Dead(secured.broker.bootstrap)
    assert "No share group matches." in browser.get("/queues", q=queue.group).words
    queue.create_letters()
    queue.name_letters()
    queue.produce("a", "b", "c", "poison")
    kinds = {"a": AcknowledgeType.ACCEPT, "poison": AcknowledgeType.REJECT}
    with queue.consumer("explicit") as client:
        while kinds:
            for value, message in polled(client):
                client.acknowledge(message, kinds.pop(value, AcknowledgeType.RELEASE))
            committed(client)
        found = f"{queue.topic} 1 2"  # one member, a backlog of two
        eventually(lambda: found in browser.get("/queues", q=queue.group).words, found)
    # a letter, and the end of its transaction
    found = rf"{queue.topic} 0 2 \d+ \S+ 2 after \d deliver\S+ {re.escape(queue.letters)} : up to 2 "
    eventually(
        lambda: re.search(found, browser.get("/queues", q=queue.group).words),
        lambda: browser.get("/queues", q=queue.group).words,
    )
    assert f"mqd queue redrive {queue.letters}" in browser.get("/queues", q=queue.group).words


def test_a_member_and_what_it_is_assigned(secured: Secured, topics: None, browser: Browser) -> None:
    client = consumer(secured, "live", **{"client.id": "reader-<1>", "auto.offset.reset": "earliest"})
    client.subscribe(["orders"])
    deadline = time.monotonic() + 60
    while not client.assignment() and time.monotonic() < deadline:
        client.poll(0.2)
    client.commit(offsets=[TopicPartition("orders", 0, 10)], asynchronous=False)
    words = browser.get("/group", name="live").words
    assert "Stable state 1 member 0 records" in words and "reader-<1> 127.0.0.1 orders:0-2 3 0" in words
    assert "live Stable 1 0" in browser.get("/topic", name="orders").words
    client.close()


def test_a_user_without_rights_sees_nothing_of_others(topics: None, login_browser: Browser) -> None:
    log_in(login_browser, "bob", PASSWORDS["bob"])
    assert "There are no topics yet" in login_browser.get("/topics").words
    assert "No client has joined a group" in login_browser.get("/groups").words
    assert "AUTHORIZATION_FAILED" in login_browser.get("/topic", name="orders").words
