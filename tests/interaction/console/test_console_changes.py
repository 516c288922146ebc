"""Changes by the console: previewed with the equivalent command, confirmed, written to the audit
log; and refusals.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import confluent_kafka
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from mqd.console.pages.changes import KINDS
from tests.console_client import Browser, options
from tests.interaction.console.changing import command, confirmed, lines, shown
from tests.interaction.console.test_console_overview import log_in
from tests.interaction.security.secured import PASSWORDS, Secured


@pytest.fixture
def audit(tmp_path: Path) -> Path:
    return tmp_path / "audit.log"


@pytest.fixture
def browser(secured: Secured, audit: Path) -> Browser:
    found = Browser(options(secured.broker.bootstrap, audit=audit))
    found.get("/")
    return found


def topics(secured: Secured) -> dict[str, int]:
    found = AdminClient({"bootstrap.servers": secured.broker.bootstrap}).list_topics(timeout=60).topics
    return {name: len(topic.partitions) for name, topic in found.items()}


def test_create_change_and_delete_a_topic(secured: Secured, browser: Browser, audit: Path) -> None:
    response = shown(browser, "/topic/create", name="born", partitions="2", configs="retention.ms=1000\n")
    create = f"mqd topic create born -p 2 -c retention.ms=1000 -b {secured.broker.bootstrap}"
    assert command(response) == create and "2 partitions, each with 1 replica" in response.words
    assert "born" not in topics(secured) and not lines(audit), "nothing yet"
    done = confirmed(browser, "/topic/create", response)
    assert done.status == 303 and done.headers["location"].startswith("/topic?name=born&notice=Created")
    assert "Created the topic born." in browser.get(done.headers["location"]).words
    forged = browser.get("/topic", name="born", notice="Call 555-0100", signature="0" * 64)
    assert forged.status == 200 and "555-0100" not in forged.words
    assert topics(secured)["born"] == 2 and lines(audit) == [(create, "begun"), (create, "done")]

    response = shown(browser, "/topic/alter", name="born", key="retention.ms", config="2000")
    assert "From 1000 (this topic) to 2000." in response.words and "topic alter born -c retention.ms=2000" in command(
        response
    )
    confirmed(browser, "/topic/alter", response)
    assert "retention.ms 2000" in browser.get("/topic", name="born").words
    response = shown(browser, "/topic/alter", name="born", key="retention.ms", reset="1")
    assert "topic alter born -d retention.ms" in command(response)
    confirmed(browser, "/topic/alter", response)
    assert "None: every property has its default" in browser.get("/topic", name="born").words

    confirmed(browser, "/topic/partitions", shown(browser, "/topic/partitions", name="born", total="5"))
    assert topics(secured)["born"] == 5

    response = shown(browser, "/topic/delete", name="born")
    assert "They cannot be restored" in response.words
    assert "type born to confirm" in confirmed(browser, "/topic/delete", response, typed="bron").words
    assert "born" in topics(secured)
    assert confirmed(browser, "/topic/delete", response, typed="born").status == 303
    assert "born" not in topics(secured) and lines(audit)[-1][0].startswith("mqd topic delete born -y")


@pytest.mark.parametrize(
    ("path", "form", "reason"),
    [
        ("/topic/create", {"name": "a b"}, "INVALID_TOPIC_EXCEPTION"),
        ("/topic/create", {"name": ""}, "give a name for the topic"),
        ("/topic/create", {"name": "x", "partitions": "0"}, "is not a number from 1"),
        ("/topic/create", {"name": "x", "replicas": "9"}, "INVALID_REPLICATION_FACTOR"),
        ("/topic/create", {"name": "x", "configs": "retention.ms=soon"}, "INVALID_CONFIG"),
        ("/topic/create", {"name": "x", "configs": "nonsense"}, "KEY=VALUE"),
        ("/topic/alter", {"name": "shop2", "key": "no.such", "config": "1"}, "no property no.such"),
        ("/topic/alter", {"name": "shop2", "key": "retention.ms", "config": "soon"}, "INVALID_CONFIG"),
        ("/topic/partitions", {"name": "shop2", "total": "1"}, "INVALID_PARTITIONS"),
        ("/produce", {"topic": "shop2", "value": "", "key": ""}, "give a value, or a key"),
        ("/produce", {"topic": "shop2", "value": "v", "partition": "9"}, "has no partition 9"),
        ("/produce", {"topic": "shop2", "value": "v", "headers": "=x"}, "NAME=VALUE"),
        ("/group/seek", {"name": "no-such", "to": "earliest"}, "there is no group no-such"),
        ("/group/seek", {"name": "no-such", "to": "yonder"}, "give earliest, latest"),
    ],
)
def test_invalid_changes_are_reported_in_the_preview(
    secured: Secured, browser: Browser, audit: Path, path: str, form: dict[str, str], reason: str
) -> None:
    if "shop2" not in topics(secured):
        confirmed(browser, "/topic/create", shown(browser, "/topic/create", name="shop2", partitions="3"))
    before = len(audit.read_text())
    response = shown(browser, path, **form)
    assert response.status == 400 and reason in response.words and "Go on" in response.words
    assert len(audit.read_text()) == before


def test_the_command_that_is_shown_does_the_same(secured: Secured, browser: Browser) -> None:
    """With a value and a key full of shell metacharacters."""
    confirmed(browser, "/topic/create", shown(browser, "/topic/create", name="twice", partitions="1"))
    odd = 'it\'s $HOME `x` \\n %s\n"two" <b>'
    for form in (
        {"value": odd, "key": "k:'$1", "headers": "a=b c\nd='"},
        {"value": "", "key": "gone'", "null": "1"},
        {"value": "", "key": "empty"},
    ):
        response = shown(browser, "/produce", topic="twice", **form)
        assert confirmed(browser, "/produce", response).status == 303
        shell = f'mqd() {{ "{sys.executable}" -m mqd.cli.main "$@"; }}; {command(response)}'
        subprocess.run(["sh", "-c", shell], check=True, timeout=60, env={**os.environ}, stderr=subprocess.PIPE)
    read = browser.get("/messages/download", topic="twice", **{"from": "beginning"}).body.splitlines()
    records = [{**json.loads(line), "offset": 0, "timestamp_ms": 0} for line in read]
    assert len(records) == 6 and records[0::2] == records[1::2]
    assert records[0]["value"] == odd and records[0]["headers"][1] == {"name": "d", "value": "'"}
    assert records[2]["value"] is None and records[4]["value"] == ""


def test_a_seek_is_previewed(secured: Secured, browser: Browser) -> None:
    confirmed(browser, "/topic/create", shown(browser, "/topic/create", name="sought", partitions="1"))
    for _ in range(5):
        confirmed(browser, "/produce", shown(browser, "/produce", topic="sought", value="v"))
    settings = {"bootstrap.servers": secured.broker.bootstrap, "group.id": "seeker", "enable.auto.commit": False}
    client = confluent_kafka.Consumer(settings)
    client.commit(offsets=[TopicPartition("sought", 0, 4)], asynchronous=False)

    response = shown(browser, "/group/seek", name="seeker", to="-3", topics="sought:0")
    assert "sought-0 4 2 -2" in response.words and "1 of 1 offset would move" in response.words
    assert command(response).startswith("mqd group seek seeker sought:0 --to -3 --execute")
    assert client.committed([TopicPartition("sought", 0)], timeout=60)[0].offset == 4
    assert confirmed(browser, "/group/seek", response).status == 303
    assert client.committed([TopicPartition("sought", 0)], timeout=60)[0].offset == 2

    client.subscribe(["sought"])
    while not client.assignment():
        client.poll(0.2)
    response = shown(browser, "/group/seek", name="seeker", to="latest")
    assert "It would be refused now: group seeker has 1 member" in response.words
    assert confirmed(browser, "/group/seek", response).status == 200
    client.close()


# -- read-only mode
# ---------------------------------------------------------------------------------

PATHS = [kind.path for kind in KINDS]
FORM = {
    **{name: "forged" for kind in KINDS for name in kind.fields},
    "confirmed": "1",
    "typed": "forged",
    "to": "earliest",
    "total": "9",
    "node": "1",
    "permission": "allow",
}


@pytest.mark.parametrize("path", PATHS)
def test_a_forged_form_changes_nothing(secured: Secured, browser: Browser, audit: Path, path: str) -> None:
    token = browser.get("/topic/create").fields["token"]
    other = Browser(options("127.0.0.1:1"), browser.app)
    other.get("/")
    assert browser.post(path, FORM).status == 403
    assert browser.post(path, {**FORM, "token": "0" * 64}).status == 403
    assert other.post(path, {**FORM, "token": token}).status == 403, "another's token"
    assert browser.post(path, {**FORM, "token": token}, [("origin", "http://evil.example")]).status == 403
    assert browser.get(path, **FORM, token=token).status in (200, 502), "a link shows a form at most"
    assert "forged" not in topics(secured) and not lines(audit)


def test_a_read_only_console_changes_nothing(secured: Secured, browser: Browser) -> None:
    reader = Browser(options(secured.broker.bootstrap, is_read_only=True))
    page = reader.get("/topics")
    assert "read only" in page.words and "Create a topic" not in page.words
    token = re.findall(r'name="token" value="(\w+)"', browser.get("/topic/create").text)[0]
    for path in PATHS:
        refused = reader.get(path, **FORM)
        assert refused.status == 403 and "The console refused the request" in refused.words
        assert reader.post(path, {**FORM, "token": token}).status == 403


def test_a_change_is_made_with_the_users_rights(secured: Secured, audit: Path, login_browser: Browser) -> None:
    console = login_browser.app._app.state.console
    console.audit = type(console.audit)(audit)
    assert login_browser.post("/topic/create", FORM).headers["location"] == "/login"
    log_in(login_browser, "bob", PASSWORDS["bob"])
    refused = shown(login_browser, "/topic/create", name="bobs")
    assert refused.status == 400 and "AUTHORIZATION_FAILED" in refused.words
    log_in(login_browser, "alice", PASSWORDS["alice"])
    confirmed(login_browser, "/topic/create", shown(login_browser, "/topic/create", name="alices"))
    written = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [(line["user"], line["address"], line["outcome"]) for line in written] == [
        ("alice", "127.0.0.1", "begun"),
        ("alice", "127.0.0.1", "done"),
    ]
