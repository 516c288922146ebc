"""The console in a real browser: an operator's tasks, hostile values, a broker that dies while the
page is open, phones, dark mode and contrast. CONSOLE_SCREENSHOTS=docs/images renews the screenshots
of the docs.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select, WebDriverWait

from mqd.cli.broker_lookup import Cluster
from mqd.cli.seeking import Move, commit
from mqd.cli.verbs import status
from tests.broker import Broker
from tests.interaction.console.chromium import PHONE, WIDE, faults, opened, resize
from tests.interaction.coordinator.test_share_groups import Shared, take
from tests.interaction.transactional import connect, hang

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
WAIT_S = 60.0
HOSTILE = [
    ("<b>key</b>", b"<script>document.title = 'owned'</script>"),
    (
        '"><img src=x onerror="document.title = \'owned\'">',
        b'{"a": "</pre><script>document.title = \'owned\'</script>"}',
    ),
    ("bytes", bytes(range(256))),
    ("large", b"\xc3" + b"x" * 1_000_000),
]


class Console:
    def __init__(self, broker: Broker, *words: str) -> None:
        command = [sys.executable, "-m", "mqd.cli.main", "-b", broker.bootstrap, "console", "--listen", "127.0.0.1:0"]
        self.process = subprocess.Popen([*command, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], WAIT_S)[0], "the console does not start"
        self.url = self.process.stdout.readline().split(" on ")[1].split(" ")[0].rstrip("/")

    def stop(self) -> None:
        self.process.terminate()
        self.process.communicate(timeout=30)


@pytest.fixture
def start_console() -> Iterator[Callable[..., Console]]:
    consoles: list[Console] = []

    def start(broker: Broker, *words: str) -> Console:
        consoles.append(Console(broker, *words))
        return consoles[-1]

    yield start
    for console in consoles:
        console.stop()


def wait(window: Any, text: str, seconds: float = WAIT_S) -> str:
    """Waits until the page contains the text."""

    def shown(_window: Any) -> str | None:
        try:
            found = window.find_element(By.TAG_NAME, "body").text
        except Exception:
            return None  # the page is being replaced
        return found if text in found else None

    try:
        return WebDriverWait(window, seconds, 0.1).until(shown)
    except TimeoutException:
        said = window.find_element(By.TAG_NAME, "body").text[:2000]
        raise AssertionError(f"the page does not say {text!r}, but: {said}") from None


def press(window: Any, text: str) -> None:
    window.find_element(By.XPATH, f"//main//*[self::a or self::button][normalize-space()={json.dumps(text)}]").click()


def fill(window: Any, **fields: str) -> None:
    for name, value in fields.items():
        field = window.find_element(By.CSS_SELECTOR, f"main [name={name}]:not([type=hidden])")
        if field.tag_name == "select":
            Select(field).select_by_value(value)
        else:
            field.clear()
            field.send_keys(value)


def picture(window: Any, name: str) -> None:
    folder = os.environ.get("CONSOLE_SCREENSHOTS")
    if folder:
        window.save_screenshot(str(Path(folder) / f"console-{name}.png"))


def look(window: Any, name: str) -> None:
    """Checks the page that is open, in every size and scheme. CONSOLE_LOOK=FOLDER saves a screenshot
    of each. The browser reports a cluster that cannot be reached as an error (503).
    """
    for is_dark in (False, True):
        for size in (WIDE, PHONE):
            resize(window, size, is_dark)
            assert [one for one in faults(window) if "503" not in one] == [], f"{name} {size}"
            save(window, name, size, is_dark)
    resize(window, WIDE)


def save(window: Any, name: str, size: tuple[int, int], is_dark: bool) -> None:
    if folder := os.environ.get("CONSOLE_LOOK"):
        window.save_screenshot(str(Path(folder) / f"{name}-{size[0]}-{'dark' if is_dark else 'light'}.png"))


def write(broker: Broker, topic: str, records: list[tuple[str, bytes]], partitions: int = 1) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})  # must outlive its futures
    admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result(30)
    producer = confluent_kafka.Producer({"bootstrap.servers": broker.bootstrap, "message.max.bytes": 2_000_000})
    for number, (key, value) in enumerate(records):
        producer.produce(topic, value, key, number % partitions, headers=[("source", b"shop"), (key[:20], b"\xff")])
    assert producer.flush(60) == 0


def test_an_operators_tasks(start_broker: Callable[..., Broker], start_console: Callable[..., Console]) -> None:
    broker = start_broker(config={"offsets.topic.num.partitions": "4"})
    countries = ("de", "fr", "us")
    orders = [
        (f"cust-{number % 97}", json.dumps({"order": number, "customer": {"country": countries[number % 3]},
         "total": number * 7 % 300, "items": [{"sku": f"A-{number % 13}"}]}).encode())
        for number in range(3000)
    ]  # fmt: skip
    write(broker, "orders", orders, 6)
    write(broker, "payments", orders[:300], 3)
    client = confluent_kafka.Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": "billing",
            "client.id": "biller",
            "enable.auto.commit": False,
            "log_level": 0,
        }
    )
    client.subscribe(["orders"])
    while not client.assignment():
        client.poll(0.2)
    lagging = [TopicPartition("orders", index, 500 - 80 * index) for index in range(6)]
    client.commit(offsets=lagging, asynchronous=False)
    console = start_console(broker, "--metrics", status.broker_status(broker.data_dir)["metrics_url"])
    with opened() as window:
        begun = time.monotonic()
        window.get(console.url)
        first_s = time.monotonic() - begun
        wait(window, "Healthy: 1 broker online")
        print(f"first page after {first_s:.2f} s")

        window.get(console.url + "/topics")
        fill(window, q="pay")
        press(window, "Search")
        assert "orders" not in wait(window, "payments") and "q=pay" in window.current_url
        press(window, "payments")
        wait(window, "3\npartitions")

        window.get(console.url + "/topics")
        press(window, "Create a topic")
        fill(window, name="refunds", partitions="2", configs="retention.ms=86400000")
        press(window, "Go on")
        wait(window, "mqd topic create refunds -p 2")
        look(window, "create-confirmed")
        press(window, "Confirm")
        wait(window, "Created the topic refunds.")
        look(window, "created")
        press(window, "Produce a record")
        fill(window, key="cust-1", value='{"refund": 1}')
        press(window, "Go on")
        wait(window, "Write a record to refunds?")
        look(window, "produce-confirmed")
        press(window, "Confirm")
        wait(window, "1 found in 1 of 1 records")
        wait(window, '{"refund": 1}')

        window.get(console.url + "/messages?topic=orders")
        fill(window, **{"from": "beginning", "path": "$.customer.country = de", "count": "20"})
        press(window, "Show")
        wait(window, "Enough: 20 found in")
        rows = window.find_elements(By.CSS_SELECTOR, "#records tr")
        assert len(rows) == 20 and all('"de"' in row.text for row in rows)
        rows[0].find_element(By.TAG_NAME, "summary").click()
        assert '"country": "de"' in rows[0].text and "Copy as kcat" in rows[0].text

        window.get(console.url + "/messages?topic=refunds&from=live")
        wait(window, "Live: 0 found")
        producer = confluent_kafka.Producer({"bootstrap.servers": broker.bootstrap})
        producer.produce("refunds", b"just now")
        producer.flush(30)
        wait(window, "just now")
        press(window, "Stop")
        wait(window, "Stopped: 1 found")

        window.get(console.url + "/group?name=billing")
        wait(window, "biller")
        client.commit(offsets=[TopicPartition("orders", index, 500) for index in range(6)], asynchronous=False)
        wait(window, "0\nrecords of lag")  # without a reload
        client.commit(offsets=lagging, asynchronous=False)
        wait(window, "1,200\nrecords of lag")

        for number in range(3000):
            producer.produce("refunds", b'{"refund": %d}' % number)
        assert producer.flush(60) == 0
        window.get(console.url)
        wait(window, "Records in, peak")

        pages = {
            "overview": "/", "topics": "/topics", "topic": "/topic?name=orders", "records": "/messages?topic=orders&count=8",
            "record": "/message?topic=orders&partition=0&offset=3", "groups": "/groups", "group": "/group?name=billing",
            "cluster": "/cluster", "create": "/topic/create", "seek": "/group/seek?name=billing",
            "produce": "/produce?topic=orders", "nowhere": "/nowhere", "alter": "/topic/alter?name=orders",
            "partitions": "/topic/partitions?name=orders", "delete": "/topic/delete?name=orders",
        }  # fmt: skip
        assert problems(window, console, pages, ("overview", "records", "group")) == {}
    client.close()


def problems(window: Any, console: Console, pages: dict[str, str], pictures: tuple[str, ...] = ()) -> dict[str, Any]:
    """Problems of the pages for a reader, wide and on a phone, light and dark."""
    said: dict[str, list[str]] = {}
    for is_dark in (False, True):
        for size in (WIDE, PHONE):
            resize(window, size, is_dark)
            for name, path in pages.items():
                window.get(console.url + path)
                if name == "records":
                    wait(window, "Done")
                found = [one for one in faults(window) if "404" not in one]
                if found:
                    said[f"{name} {'dark' if is_dark else 'light'} {size[0]}"] = found
                if size == WIDE and name in pictures and not is_dark:
                    picture(window, name)
                if size == PHONE and is_dark and name == "group" and "group" in pictures:
                    picture(window, "phone-dark")
                save(window, name, size, is_dark)
    resize(window, WIDE)
    return said


def test_transactions_and_access_are_managed(
    start_broker: Callable[..., Broker], start_console: Callable[..., Console]
) -> None:
    broker = start_broker(
        config={
            "offsets.topic.num.partitions": "2",
            "transaction.state.log.num.partitions": "2",
            "transaction.partition.verification.enable": "false",
            "authorizer.class.name": "standard",
            "super.users": "User:ANONYMOUS",
        }
    )
    write(broker, "orders", [("a", b"1")] * 6, 3)
    console = start_console(broker)
    settings = {"bootstrap.servers": broker.bootstrap, "log_level": 0}
    # it stays open for the whole story, however slow the machine is
    producer = confluent_kafka.Producer({**settings, "transactional.id": "till-7", "transaction.timeout.ms": 600_000})
    producer.init_transactions(30)
    producer.begin_transaction()
    for index in range(3):
        producer.produce("orders", b"x", partition=index)
    producer.flush(30)
    with connect(broker) as kafka:
        hang(kafka, "orders", 1, 4_000_000_001)
    shared = Shared(broker.bootstrap, 1)
    shared.produce("a", "b", "c")
    with shared.consumer("explicit") as consumer:
        take(consumer, 2)
    with Cluster(broker.bootstrap) as cluster:
        assert commit(cluster, "daily-totals", [Move("orders", 0, None, 1, "", is_spark_progress=True)]) == {}
    with opened() as window:
        window.get(console.url + "/access")
        press(window, "Create a user")
        fill(window, name="dora")
        press(window, "Go on")
        wait(window, "mqd user create dora")
        press(window, "Confirm")
        wait(window, "shown here once")
        look(window, "password")
        press(window, "I have it")
        wait(window, "SCRAM-SHA-512")
        press(window, "Rules")
        wait(window, "There is no rule.")
        window.get(console.url + "/access/rule")
        fill(window, principal="dora", operations="read,write", resource="topic/orders-*")
        press(window, "Go on")
        wait(window, "mqd acl allow dora read,write 'topic/orders-*'")
        press(window, "Confirm")
        wait(window, "Allowed dora read,write on topic/orders-*.")
        window.get(console.url + "/access/quota")
        fill(window, user="dora", produce="2MB", **{"request-time": "50"})
        press(window, "Go on")
        wait(window, "mqd quota set --user dora --produce 2MB --request-time 50")
        press(window, "Confirm")
        wait(window, "2.0 MB/s")

        pages = {
            "transactions": "/transactions",
            "transaction": "/transaction?id=till-7",
            "hanging": "/transactions?show=hanging&idle=0",
            "abort": "/transaction/abort?id=till-7",
            "users": "/access",
            "rules": "/access?show=rules",
            "quotas": "/access?show=quotas",
            "new-user": "/access/user",
            "new-rule": "/access/rule",
            "new-quota": "/access/quota",
            "rule-delete": "/access/rule/delete?principal=User:dora&operations=read&resource=topic/orders-*&host=*",
            "moves": "/moves",
            "drain": "/cluster/drain?node=1",
            "all-groups": "/groups",
            "queues": "/queues",
            "share-group": f"/group?name={shared.group}",
            "spark-query": "/group?name=daily-totals",
        }
        assert problems(window, console, pages, ("rules",)) == {}

        window.get(console.url + "/queues")
        wait(window, "To be delivered again")
        press(window, shared.group)
        press(window, "Move its offsets")
        fill(window, to="earliest")
        press(window, "Go on")
        wait(window, f"mqd group seek {shared.group} --to earliest --execute")
        look(window, "seek-confirmed")
        press(window, "Confirm")
        wait(window, f"Moved the offsets of {shared.group}.")

        window.get(console.url + "/transactions?show=hanging&idle=0")
        press(window, "Abort")
        press(window, "Go on")
        wait(window, "no coordinator will end it")
        look(window, "abort-confirmed")
        press(window, "Confirm")
        wait(window, "No transaction hangs")
        window.get(console.url + "/transactions")
        press(window, "till-7")
        press(window, "Abort its transaction")
        press(window, "Go on")
        wait(window, "is fenced")
        press(window, "Confirm")
        wait(window, "Aborted the transaction of till-7.")
    with pytest.raises(confluent_kafka.KafkaException):
        producer.commit_transaction(30)


def test_hostile_values_are_only_shown(
    start_broker: Callable[..., Broker], start_console: Callable[..., Console]
) -> None:
    broker = start_broker()
    write(broker, "hostile", HOSTILE)
    console = start_console(broker)
    with opened() as window:
        for path in (
            "/messages?topic=hostile",
            *(f"/message?topic=hostile&partition=0&offset={at}" for at in range(4)),
        ):
            window.get(console.url + path)
            if path.startswith("/messages"):
                text = wait(window, "Done: 4 found")
                assert "<script>document.title" in text and "<b>key</b>" in text
                for summary in window.find_elements(By.TAG_NAME, "summary"):
                    summary.click()
            assert window.title != "owned" and not window.find_elements(By.CSS_SELECTOR, "main script, main img")
            look(window, f"hostile-{path.rpartition('=')[2]}")


def test_a_broker_that_dies_while_the_page_is_open(
    start_broker: Callable[..., Broker], start_console: Callable[..., Console]
) -> None:
    broker = start_broker()
    console = start_console(broker)
    with opened() as window:
        window.get(console.url)
        wait(window, "Healthy")
        broker.kill_all()
        wait(window, "The cluster cannot be reached")
        look(window, "unreachable")
        assert "mqd up" in wait(window, "cannot reach a broker")
        broker.start()
        wait(window, "Healthy")
        console.process.kill()
        wait(window, "The console does not respond")
