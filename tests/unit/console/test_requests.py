"""Changes and their notices, searches, and sizes of replicas."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from mqd.cli.common import CliError, Settings
from mqd.console import queries, searching
from mqd.console.changing import Change
from mqd.console.page_request import TEXT_MAX, PageRequest
from mqd.console.pages.changes import ChangeKind
from mqd.console.searching import Query
from mqd.console.shared import Console
from mqd.protocol.messages import DescribeLogDirsResponse
from tests.console_client import options

NOWHERE = "127.0.0.1:1"
COOKIE = "cookie"


def requested(console: Console, form: dict[str, str] | None = None, **query: str) -> PageRequest:
    session = console.session(COOKIE)
    assert session is not None
    http: Any = SimpleNamespace(query_params=query, client=None, url=SimpleNamespace(path="/"))
    return PageRequest(console, http, session, COOKIE, form)


@pytest.mark.parametrize("length", [1, TEXT_MAX, TEXT_MAX + 1, 5000])
def test_a_notice_of_any_length_is_shown(length: int) -> None:
    console, notice = Console(options(NOWHERE)), "é" * length
    location = requested(console).redirect("/topic", notice, name="orders").headers["location"]
    query = dict(parse_qsl(urlsplit(location).query))
    shown = requested(console, **query)._notice()
    assert shown == notice or (len(shown) == TEXT_MAX and shown == f"{notice[: TEXT_MAX - 1]}…")
    assert requested(console, **{**query, "notice": "x" * length})._notice() == ""


def test_every_change_has_an_outcome_in_the_audit_log(tmp_path: Path) -> None:
    def do() -> None:
        raise RuntimeError("a bug")

    change = Change("Delete", "mqd topic delete t", [], do, "deleted", ("/", {}))
    kind = ChangeKind("/topic/delete", "ask.html", lambda settings, form: change, ("name",))
    console = Console(options(NOWHERE, audit=tmp_path / "audit.log"))
    with pytest.raises(RuntimeError):
        kind.post(requested(console, {"token": console.sessions.token(COOKIE), "confirmed": "1"}))
    outcomes = [json.loads(line)["outcome"] for line in (tmp_path / "audit.log").read_text().splitlines()]
    assert outcomes == ["begun", "failed: a bug"]


class Consumer:
    """Partition 0 is written all the time; partition 1 is silent. Each call takes a second."""

    def __init__(self) -> None:
        self.paused: list[int] = []
        self.now = 0.0
        self._offsets = itertools.count()

    def assign(self, partitions: list[Any]) -> None: ...

    def pause(self, partitions: list[Any]) -> None:
        self.paused += [one.partition for one in partitions]

    def consume(self, _count: int, timeout: float) -> list[Any]:
        self.now += 1
        assert self.now < 10 * searching.SILENT_S, "it waits for ever"
        fields = {"partition": 0, "offset": next(self._offsets), "error": None, "value": b"", "key": None}
        return [SimpleNamespace(**{name: lambda value=value: value for name, value in fields.items()})]

    def close(self) -> None: ...


def test_a_silent_partition_is_noticed_while_another_one_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = Consumer()
    monkeypatch.setattr(searching, "_consumer", lambda settings: consumer)
    monkeypatch.setattr(searching, "_offset_ranges", lambda settings, query: ({0: (0, 2), 1: (0, 2)}, 4))
    monkeypatch.setattr(searching, "time", SimpleNamespace(monotonic=lambda: consumer.now))
    query = Query("t", "beginning", count=100)
    with pytest.raises(CliError, match="no record for 15 s"):
        for _ in searching.search(Settings(NOWHERE), query, Event(), lambda message: message, False):
            pass
    assert consumer.paused == [0]


def test_the_copy_of_a_move_is_not_the_size_of_a_replica() -> None:
    def directory(size: int, is_future: bool) -> DescribeLogDirsResponse.Result:
        partition = DescribeLogDirsResponse.Partition(partition_index=0, partition_size=size, is_future_key=is_future)
        return DescribeLogDirsResponse.Result(
            log_dir="/disk", topics=[DescribeLogDirsResponse.Topic(name="t", partitions=[partition])]
        )

    response = DescribeLogDirsResponse(results=[directory(1000, False), directory(10, True)])
    broker = SimpleNamespace(request=lambda *_: response)
    cluster: Any = SimpleNamespace(addresses=lambda: {1: "h:9092"}, node=lambda node: broker)
    assert queries.sizes(cluster, None) == {("t", 0): {1: 1000}}
