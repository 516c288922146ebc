"""The console connected to something that is no cluster or that rejects it; topics deleted while
they are shown.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from mqd.console.pages.changes import KINDS
from tests.console_client import Browser, options
from tests.interaction.console.changing import change, command, confirmed, fresh, shown
from tests.interaction.console.test_console_messages import searched
from tests.interaction.security.secured import Secured
from tests.ports import free_port

PAGES = (
    "/", "/topics", "/topic?name=x", "/messages?topic=x", "/message?topic=x", "/groups", "/group?name=x", "/transactions",
    "/transactions?show=hanging", "/transaction?id=x", "/cluster", "/moves", "/access", "/access?show=rules",
    "/access?show=quotas", *(kind.path for kind in KINDS), "/topic/alter?name=x",
)  # fmt: skip


@contextlib.contextmanager
def greeting(banner: bytes) -> Iterator[str]:
    """A server that sends this to each client, and then waits until the client closes."""
    with socket.create_server(("127.0.0.1", free_port())) as listening:

        def run() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    with connection, contextlib.suppress(OSError):
                        connection.sendall(banner)
                        connection.settimeout(10)
                        while connection.recv(4096):
                            pass

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(20)


def open_all(bootstrap: str, reason: str) -> None:
    """Each page is shown; pages that query the cluster show why they are empty."""
    browser = Browser(options(bootstrap))
    for page in PAGES:
        response = browser._request("GET", page, (), b"")
        forms_only = page in {kind.path for kind in KINDS} or page.startswith("/messages")
        assert "Traceback" not in response.text and response.status in (200, 404, 502, 503), page
        assert forms_only or reason in response.words, (page, response.words[200:])
    rows, said = searched(browser, "x")
    assert rows == "" and said["event"] == "event: failed" and reason in said["said"]


def test_an_unreachable_broker() -> None:
    open_all("127.0.0.1:1", "cannot reach a broker at 127.0.0.1:1")


@pytest.mark.parametrize("banner", [b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_server_that_is_no_broker(banner: bytes) -> None:
    with greeting(banner) as bootstrap:
        open_all(bootstrap, "is not a Kafka broker")


def test_a_listener_that_rejects_clients_without_a_login(secured: Secured) -> None:
    open_all(secured.bootstrap, "--client-config")


def test_a_topic_that_is_deleted_while_it_is_shown(secured: Secured, browser: Browser) -> None:
    change(browser, "/topic/create", name="doomed", partitions="1")
    change(browser, "/produce", topic="doomed", value="v")
    altered = shown(browser, "/topic/alter", name="doomed", key="retention.ms", config="1000")
    produced = shown(browser, "/produce", topic="doomed", value="v")
    deleted = shown(browser, "/topic/delete", name="doomed")
    assert fresh(browser, "/topic", name="doomed").count("doomed") > 1
    admin = AdminClient({"bootstrap.servers": secured.broker.bootstrap})  # must outlive its futures
    admin.delete_topics(["doomed"])["doomed"].result(30)

    browser.app._app.state.console.cache.clear()
    for path, query in (("/topic", {"name": "doomed"}), ("/message", {"topic": "doomed"})):
        response = browser.get(path, **query)
        assert response.status in (404, 502) and "doomed" in response.words, path
    rows, said = searched(browser, "doomed")
    assert rows == "" and "there is no topic doomed" in said["said"]
    for path, response in (("/topic/alter", altered), ("/produce", produced), ("/topic/delete", deleted)):
        refused = confirmed(browser, path, response, typed="doomed")
        assert refused.status in (400, 502) and "UNKNOWN_TOPIC_OR_PARTITION" in refused.words, path


def test_invalid_utf8_in_urls_and_forms(browser: Browser) -> None:
    for page in ("/topic?name=%ff%fe", "/group?name=%ff", "/topics?q=%ed%a0%80", "/message?topic=a%00b", "/%ff"):
        response = browser._request("GET", page, (), b"")
        assert response.status in (200, 400, 404, 502) and "bug in mqd" not in response.words, page
    token = browser.get("/topic/create").fields["token"]
    sent = [("content-type", "application/x-www-form-urlencoded")]
    for body, status in (
        (b"name=%ff&token=" + token.encode(), 400),
        (b"\xff\xfe", 400),
        (b"a=" + b"x" * (4 << 20), 413),
    ):
        assert browser._request("POST", "/topic/create", sent, body).status == status


def test_a_large_login_form_is_refused(login_browser: Browser) -> None:
    """It is read before the client is authenticated."""
    assert login_browser.post("/login", {"user": "x" * (20 << 10)}).status == 413


def test_a_value_of_a_megabyte_from_a_form(secured: Secured, tmp_path: Path) -> None:
    browser = Browser(options(secured.broker.bootstrap, audit=tmp_path / "audit.log"))
    browser.get("/")
    change(browser, "/topic/create", name="wide", partitions="1")
    value = "x" * 1_000_000
    response = shown(browser, "/produce", topic="wide", value=value)
    assert "1,000,000 bytes" in response.words and "-X message.max.bytes=4000000" in command(response)
    assert command(response).startswith("cat VALUE | mqd produce wide") and len(response.body) < 1_010_000
    assert confirmed(browser, "/produce", response).status == 303
    assert browser.get("/message/raw", topic="wide", partition=0, offset=0).body == value.encode()
    assert (tmp_path / "audit.log").stat().st_size < 2000
