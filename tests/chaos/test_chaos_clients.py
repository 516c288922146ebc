"""The histories written by the clients of the chaos tests, without a broker: one line for each
record, whatever the library reports and when.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kafka.errors import InvalidTimestampError, KafkaTimeoutError, MessageSizeTooLargeError

from tests.chaos.client_python import PythonProducer


class Sent:
    def add_callback(self, call: Any) -> Sent:
        self.done = call
        return self

    def add_errback(self, call: Any) -> Sent:
        self.failed = call
        return self


class Library:
    """kafka-python's producer, whose responses come when the test calls for them."""

    def __init__(self) -> None:
        self.sent: list[Sent] = []
        self.full = False

    def send(self, *_: Any, **__: Any) -> Sent:
        if self.full:
            raise KafkaTimeoutError("no room")
        self.sent.append(Sent())
        return self.sent[-1]

    def flush(self, timeout: float) -> None:
        """Nothing more comes."""

    def close(self, timeout: float) -> None:
        """Nothing more comes."""


def test_each_record_has_one_outcome(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    producer = PythonProducer(
        {"name": "p", "seed": 1, "history": str(path), "topics": {"t": 1}, "rate": 1, "bootstrap": ""}
    )
    library = producer.producer = Library()
    assert all(producer.send() for _ in range(4))
    acknowledged, too_large, late, never = library.sent
    acknowledged.done(SimpleNamespace(offset=7))
    too_large.failed(MessageSizeTooLargeError())
    producer.take_fates(0.0)
    library.full = True
    assert not producer.send()
    producer.end_producer(0.0)
    late.done(SimpleNamespace(offset=9))  # after it was recorded as unknown
    producer.take_fates(0.0)
    sends = [one for line in path.read_text().splitlines() if (one := json.loads(line))["kind"] == "send"]
    assert {one["number"]: (one["status"], one["offset"]) for one in sends} == {
        0: ("ok", 7),
        1: ("fail", -1),
        2: ("info", -1),
        3: ("info", -1),
        4: ("info", -1),
    }
    assert len(sends) == 5 and producer.producer is None and not producer.under_way


def test_a_library_that_refuses_permanently_is_replaced(tmp_path: Path) -> None:
    """As after a record whose timestamp is too far from a broker's clock: it accepts records and
    fails all of them.
    """
    path = tmp_path / "p.jsonl"
    producer = PythonProducer(
        {"name": "p", "seed": 1, "history": str(path), "topics": {"t": 1}, "rate": 1000, "bootstrap": ""}
    )
    lives: list[Library] = []

    def begin() -> None:
        if producer.producer is None:
            lives.append(Library())
            producer.producer = lives[-1]
        if len(lives) == 2 and lives[1].sent:
            lives[0].sent[-1].failed(InvalidTimestampError())  # late reports of an earlier life do not end a later one
            producer.ending = bool(lives[1].sent[20:])
        elif len(lives) == 1 and lives[0].sent:
            lives[0].sent[0].failed(InvalidTimestampError())

    producer.begin = begin  # type: ignore[method-assign]
    producer.run()
    notes = [one["text"] for line in path.read_text().splitlines() if (one := json.loads(line))["kind"] == "error"]
    assert len(lives) == 2 and len(notes) == 1 and "InvalidTimestampError" in notes[0]
