"""The treatment of each letter by `mqd queue redrive`."""

from __future__ import annotations

import dataclasses
from unittest.mock import Mock

import hypothesis
import pytest
from hypothesis import strategies as some

from mqd.cli.redrive import moving, plan
from mqd.cli.redrive.plan import EarlierRedrive, Filter, NewRecord, Origin, StoredRecord
from mqd.coordinator.share.dead_letter_writer import Letter
from mqd.coordinator.share.letter_records import CopiedFields, LetterSource, letter_records
from tests.tiers import examples

NOW_MS = 1_000_000


@dataclasses.dataclass
class Written:
    """A letter in the broker's format."""

    copied: CopiedFields = CopiedFields(b"key", b"value", (("own", b"1"), ("own", b"2")))
    deliveries: int = 1
    offset: int = 7

    def letter(self) -> StoredRecord:
        source = LetterSource("jobs", 2, "workers", delivery_limit=5)
        (one,) = letter_records(
            source, [Letter(41, self.deliveries)], {41: self.copied}, NOW_MS, batch_bytes_max=1 << 20
        )
        return StoredRecord(1, self.offset, one.timestamp_ms, one.key, one.value, tuple(one.headers))


ORIGIN = Origin("jobs", 2, 41, "workers", plan.REJECTED_MESSAGE)


def record(
    letter: StoredRecord, source: StoredRecord | None = None, from_dead_letter_topic: bool = False
) -> NewRecord | str:
    origin = plan.origin_of(letter)
    assert origin is not None
    return plan.record_of(letter, origin, source, from_dead_letter_topic)


def test_a_copied_letter_is_restored_to_its_record() -> None:
    letter = Written().letter()
    assert plan.origin_of(letter) == ORIGIN and not plan.needs_source(letter)
    assert record(letter) == NewRecord(
        "jobs", 2, b"key", b"value", (("own", b"1"), ("own", b"2"), ("mqd-redriven", b"1"))
    )


def test_each_redrive_is_counted_and_the_fourth_refused() -> None:
    headers: tuple[tuple[str, bytes | None], ...] = (("own", b"1"),)
    for count in (1, 2, 3):
        new = record(Written(CopiedFields(None, b"value", headers)).letter())
        assert isinstance(new, NewRecord) and new.headers == (("own", b"1"), ("mqd-redriven", b"%d" % count))
        headers = new.headers
    assert record(Written(CopiedFields(None, b"value", headers)).letter()) == plan.TOO_OFTEN


@pytest.mark.parametrize("text", [b"many", b"", None, b"-5", b"9" * 5000])
def test_a_count_not_written_by_a_redrive_is_ignored(text: bytes | None) -> None:
    new = record(Written(CopiedFields(None, b"value", (("mqd-redriven", text),))).letter())
    assert isinstance(new, NewRecord) and new.headers == (("mqd-redriven", b"1"),)


def test_a_letter_without_copy_takes_the_source_record() -> None:
    letter = Written(CopiedFields()).letter()
    assert plan.needs_source(letter)
    source = StoredRecord(2, 41, NOW_MS - 1, b"k", None, (("own", b"3"), ("mqd-redriven", b"1")))
    assert record(letter, source) == NewRecord("jobs", 2, b"k", None, (("own", b"3"), ("mqd-redriven", b"2")))
    assert record(letter, source._replace(headers=(("mqd-redriven", b"3"),))) == plan.TOO_OFTEN
    assert record(letter) == plan.GONE
    assert record(letter, source._replace(timestamp_ms=NOW_MS + plan.CLOCK_SKEW_MAX_MS + 1)) == plan.REPLACED


def test_a_copied_tombstone_needs_no_source() -> None:
    new = record(Written(CopiedFields(None, None, (("own", b"1"),))).letter())
    assert isinstance(new, NewRecord) and (new.key, new.value) == (None, None)


def test_a_dead_letter_topic_gets_no_letters_back() -> None:
    assert record(Written().letter(), from_dead_letter_topic=True) == plan.LOOP


@pytest.mark.parametrize(
    "name, value",
    [("topic", None), ("topic", b""), ("topic", b"\xff"), ("partition", b"x"), ("partition", b"-1"), ("offset", b"")],
)
def test_records_without_an_origin_are_not_dead_letters(name: str, value: bytes | None) -> None:
    letter = Written().letter()
    changed = tuple((n, value if n == plan.PREFIX + name else v) for n, v in letter.headers)
    without = tuple(one for one in letter.headers if one[0] != plan.PREFIX + name)
    for headers in (changed, without, ()):
        assert plan.origin_of(letter._replace(headers=headers)) is None


@pytest.mark.parametrize(
    "chosen, is_selected",
    [
        (Filter(), True),
        (Filter(group="workers", topic="jobs", reason="rejected", since_ms=NOW_MS, until_ms=NOW_MS + 1), True),
        (Filter(group="others"), False),
        (Filter(topic="job"), False),
        (Filter(reason="exhausted"), False),
        (Filter(since_ms=NOW_MS + 1), False),
        (Filter(until_ms=NOW_MS), False),
    ],
)
def test_filters(chosen: Filter, is_selected: bool) -> None:
    assert chosen.selects(Written().letter(), ORIGIN) is is_selected


def test_the_limit_of_deliveries_is_a_reason() -> None:
    letter = Written(deliveries=5).letter()
    origin = plan.origin_of(letter)
    assert origin is not None
    assert [reason for reason in plan.REASONS if Filter(reason=reason).selects(letter, origin)] == ["exhausted"]


def test_letters_moved_by_another_redrive_are_not_moved_again() -> None:
    letter = Written(offset=7).letter()
    for chosen, positions, is_moved in (
        (Filter(), {1: 8}, True),
        (Filter(group="workers"), {1: 8}, True),
        (Filter(), {1: 7}, False),
        (Filter(), {0: 100}, False),
        (Filter(group="others"), {1: 8}, False),
    ):
        other = EarlierRedrive(Filter(topic="other"), {1: 100})
        assert plan.is_moved(letter, ORIGIN, [other, EarlierRedrive(chosen, positions)]) is is_moved


def test_a_batch_larger_than_the_queue_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """librdkafka's queue is bounded in bytes, and a batch may have 500 records of any size."""
    written: list[str] = []
    calls = iter([None, BufferError("Local: Queue full"), None])

    def produce(topic: str, *_: object, **__: object) -> None:
        if (failure := next(calls)) is not None:
            raise failure
        written.append(topic)

    producer = Mock(produce=produce)
    monkeypatch.setattr(moving, "base_config", lambda bootstrap: {})
    monkeypatch.setattr(moving, "Producer", lambda config: producer)
    writer = moving.Writer("127.0.0.1:1", "dlq.jobs", Mock())
    writer.commit([NewRecord(topic, 0, None, b"value", ()) for topic in ("a", "b")], {0: 2})
    assert written == ["a", "b"] and producer.poll.called and producer.commit_transaction.called


TEXT = some.text(min_size=0, max_size=8)
FILTERS = some.builds(
    Filter, TEXT, TEXT, some.sampled_from(["", *plan.REASONS]), some.integers(0, 1 << 42), some.integers(0, 1 << 42)
)


@hypothesis.settings(max_examples=examples(50, 2000))
@hypothesis.given(FILTERS, FILTERS)
def test_a_group_is_named_for_its_filter(one: Filter, other: Filter) -> None:
    group = plan.group_of("dlq.jobs", one)
    assert plan.filter_of(group, "dlq.jobs") == one
    assert plan.filter_of(group, "dlq.job") is plan.filter_of(group, "dlq.jobs.x") is None
    assert (group == plan.group_of("dlq.jobs", other)) is (one == other)


@pytest.mark.parametrize(
    "group", ["dlq.jobs", "mqd-redrive:dlq.jobs?", "mqd-redrive:dlq.jobs?colour=red", "mqd-redrive:dlq.jobs?since_ms=x"]
)
def test_other_groups_are_not_redrives(group: str) -> None:
    assert plan.filter_of(group, "dlq.jobs") is None
