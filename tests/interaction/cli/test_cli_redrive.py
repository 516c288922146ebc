"""`mqd queue redrive` against a real broker. Dead letters are written in the broker's format."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from mqd.cli.redrive import plan
from mqd.coordinator.share.letter_records import PREFIX
from tests.broker import Broker
from tests.client_reading import read_all
from tests.interaction.command_line import CommandLine
from tests.polling import PATIENCE_S

Headers = list[tuple[str, bytes]]


class Topics:
    """A source topic of two partitions, and a dead-letter topic."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.source = f"work-{uuid.uuid4().hex[:10]}"
        self.letters = f"dlq.{self.source}"
        self.create(self.source, 2)
        self.create(self.letters, 1, **{"errors.deadletterqueue.group.enable": "true"})
        self.producer = Producer({"bootstrap.servers": broker.bootstrap})

    def create(self, name: str, partitions: int, **config: str) -> None:
        admin = AdminClient({"bootstrap.servers": self.broker.bootstrap})
        admin.create_topics([NewTopic(name, partitions, config=config)])[name].result(PATIENCE_S)

    def letter(
        self,
        value: str | None,
        group: str = "workers",
        source: str | None = None,
        offset: int = 0,
        message: str = plan.REJECTED_MESSAGE,
        own: Headers | None = None,
    ) -> None:
        about = {"topic": source or self.source, "partition": 1, "offset": offset, "group": group, "message": message}
        headers = [(PREFIX + name, str(text).encode()) for name, text in about.items()]
        self.producer.produce(self.letters, value, headers=[*(own or []), *headers])
        self.flush()

    def flush(self) -> None:
        assert self.producer.flush(PATIENCE_S) == 0

    def moved(self, count: int) -> list[tuple[bytes, Headers]]:
        """Values and headers of the source topic's records, by partition."""
        found = read_all(self.broker, self.source, count)
        assert {one.partition() for one in found} <= {1}
        return [(one.value(), one.headers() or []) for one in found]


@pytest.fixture
def topics(shared_broker: Broker) -> Iterator[Topics]:
    yield Topics(shared_broker)


@pytest.fixture
def mqd(
    shared_broker: Broker, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> CommandLine:
    return CommandLine(shared_broker, monkeypatch, capfdbinary)


def counts(found: dict) -> tuple[int, dict[str, int], int, int]:
    """(moved, not moved by reason, moved before, not selected)"""
    refused = {one["reason"]: one["letters"] for one in found["not_moved"]}
    return sum(one["records"] for one in found["moved"]), refused, found["moved_before"], found["not_selected"]


def test_each_letter_is_moved_once_with_any_filters(topics: Topics, mqd: CommandLine) -> None:
    topics.producer.produce(topics.source, "uncopied", partition=1)
    topics.flush()
    topics.letter("copied", own=[("own", b"1"), (plan.COUNT_HEADER, b"1")])
    topics.letter(None)
    topics.letter(None, offset=1000)
    topics.letter("other group", group="others", message=plan.EXHAUSTED_MESSAGE)
    topics.letter("loop", source=topics.letters)
    topics.letter("too often", own=[(plan.COUNT_HEADER, b"3")])
    topics.producer.produce(topics.letters, "no letter")
    topics.flush()
    refused = {plan.GONE: 1, plan.LOOP: 1, plan.TOO_OFTEN: 1, plan.NOT_A_LETTER: 1}

    redrive = ("queue", "redrive", topics.letters)
    code, out, error = mqd(*redrive, "--dry-run")
    assert code == 0 and "nothing was changed; 3 records would be moved" in out and plan.GONE in error, out + error
    assert counts(mqd.json(*redrive, "--group", "others", "--reason", "exhausted")) == (1, {plan.NOT_A_LETTER: 1}, 0, 5)
    assert counts(mqd.json(*redrive, "--limit", "1")) == (1, {}, 0, 0)
    assert counts(mqd.json(*redrive, "--rate", "1000")) == (1, refused, 1, 0)
    assert counts(mqd.json(*redrive)) == (0, {}, 0, 0)
    assert counts(mqd.json(*redrive, "--since", "-1h", "--source", topics.source)) == (0, {plan.NOT_A_LETTER: 1}, 5, 1)
    assert topics.moved(4) == [
        (b"uncopied", []),
        (b"other group", [(plan.COUNT_HEADER, b"1")]),
        (b"copied", [("own", b"1"), (plan.COUNT_HEADER, b"2")]),
        (b"uncopied", [(plan.COUNT_HEADER, b"1")]),
    ]


def test_letters_of_a_missing_topic_stay_unmoved(topics: Topics, mqd: CommandLine) -> None:
    missing = f"missing-{topics.source}"
    topics.letter("first")
    topics.letter("second", source=missing)
    code, out, error = mqd("queue", "redrive", topics.letters)
    assert code == 1 and "1 record moved" in out and f"topic {missing}, which does not exist" in error
    topics.create(missing, 2)
    assert mqd("queue", "redrive", topics.letters)[0] == 0
    assert [one.value() for one in read_all(topics.broker, missing, 1)] == [b"second"]
    assert [value for value, _ in topics.moved(1)] == [b"first"]


def test_missing_topics_are_reported(topics: Topics, mqd: CommandLine) -> None:
    code, _, error = mqd("queue", "redrive", f"dlq.none-{topics.source}")
    assert code == 1 and "mqd topic list" in error
    assert mqd("queue", "redrive", topics.letters, "--reason", "bored")[0] == 2
    assert mqd("queue", "redrive", topics.letters, "--since", "soon")[0] == 2
