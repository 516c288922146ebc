"""Three short scenarios in a real browser, with one window for all of them; the long ones are slow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import confluent_kafka
import pytest
from selenium.webdriver.common.by import By

from tests.console_client import Browser, options
from tests.interaction.console.changing import change
from tests.interaction.console.chromium import PHONE, WIDE, faults, opened, resize
from tests.interaction.console.serving import served
from tests.interaction.console.test_console_browser import fill, press, wait
from tests.interaction.security.secured import Secured


@pytest.fixture(scope="module")
def url(secured: Secured) -> Iterator[str]:
    with served(options(secured.broker.bootstrap)) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def window() -> Iterator[Any]:
    with opened(may_fetch=False) as window:
        yield window


def test_pages_fit_and_are_readable(url: str, window: Any) -> None:
    for size, is_dark, path, text in (
        (WIDE, False, "/", "Healthy: 1 broker online"),
        (WIDE, True, "/transactions", "Hanging"),
        (PHONE, False, "/cluster", "Controllers"),
        (PHONE, True, "/access/quota", "Limit clients"),
    ):
        resize(window, size, is_dark)
        window.get(url + path)
        wait(window, text)
        assert faults(window) == [], path
    resize(window, WIDE)


def test_a_topic_is_created_by_hand(url: str, window: Any) -> None:
    window.get(url + "/topic/create")
    fill(window, name="by-hand", partitions="2", configs="retention.ms=86400000")
    press(window, "Go on")
    wait(window, "mqd topic create by-hand -p 2")
    press(window, "Confirm")
    wait(window, "Created the topic by-hand.")
    assert faults(window) == []


def test_hostile_records_are_only_shown(secured: Secured, url: str, window: Any) -> None:
    """They arrive one by one; the page's script inserts them."""
    browser = Browser(options(secured.broker.bootstrap))
    browser.get("/")
    change(browser, "/topic/create", name="window", partitions="1")
    producer = confluent_kafka.Producer({"bootstrap.servers": secured.broker.bootstrap})
    producer.produce(
        "window", b"<script>document.title = 'owned'</script>", "<img src=x onerror=\"document.title='owned'\">"
    )
    producer.produce("window", b"\xff\xfe" + b"x" * 100_000)
    assert producer.flush(30) == 0
    window.get(url + "/messages?topic=window")
    assert "<script>document.title" in wait(window, "Done: 2 found")
    for summary in window.find_elements(By.TAG_NAME, "summary"):
        summary.click()
    assert window.title != "owned" and not window.find_elements(By.CSS_SELECTOR, "main script, main img")
    assert faults(window) == []
