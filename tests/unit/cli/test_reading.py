"""Where `mqd consume` ends, and which records it has printed by then, with a simulated consumer."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

confluent_kafka = pytest.importorskip("confluent_kafka")

from confluent_kafka import KafkaError, KafkaException  # noqa: E402

from mqd.cli import main as main_module  # noqa: E402
from mqd.cli import topic_reading as reading  # noqa: E402
from mqd.cli.records import Position  # noqa: E402
from mqd.cli.topic_reading import Reader  # noqa: E402
from mqd.cli.verbs import consume  # noqa: E402

NOW = 10_000
END = KafkaError._PARTITION_EOF
QUIET = None


class Message:
    def __init__(self, partition: int, offset: int, time_ms: int = -1, error: int | None = None) -> None:
        self.place, self._time_ms, self._error = (partition, offset), time_ms, error

    def partition(self) -> int:
        return self.place[0]

    def offset(self) -> int:
        return self.place[1]

    def timestamp(self) -> tuple[int, int]:
        return 1, self._time_ms

    def error(self) -> Any:
        return None if self._error is None else KafkaError(self._error)


class Consumer:
    """`logs`: partition -> timestamps of its records at the time of the query. `feed`: successive
    results of poll(); a callable is called, and poll() returns nothing.
    """

    def __init__(self, logs: dict[int, list[int]], feed: list[Any]) -> None:
        self.logs, self.feed = logs, feed
        self.paused: list[int] = []

    def offsets_for_times(self, requested: list[Any], timeout: float) -> list[Any]:
        found = []
        for one in requested:
            later = [offset for offset, time_ms in enumerate(self.logs[one.partition]) if time_ms >= one.offset]
            found.append(SimpleNamespace(partition=one.partition, offset=later[0] if later else -1, error=None))
        return found

    def get_watermark_offsets(self, partition: Any, timeout: float) -> tuple[int, int]:
        return 0, len(self.logs[partition.partition])

    def assign(self, partitions: list[Any]) -> None: ...

    def pause(self, partitions: list[Any]) -> None:
        self.paused += [one.partition for one in partitions]

    def poll(self, timeout: float) -> Any:
        assert self.feed, "it waits for more"
        found = self.feed.pop(0)
        if callable(found):
            found()
            return None
        return found

    def consume(self, count: int, timeout: float) -> list[Any]:
        found = []
        while self.feed and len(found) < count and isinstance(self.feed[0], Message):
            found.append(self.feed.pop(0))
        return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    found = {"ms": NOW}
    monkeypatch.setattr(reading, "now_ms", lambda: found["ms"])
    monkeypatch.setattr(reading, "base_config", lambda _bootstrap, **_: {})
    return found


def shown(
    monkeypatch: pytest.MonkeyPatch, consumer: Consumer, until_ms: int | None, count: int | None = None
) -> tuple[list[tuple[int, int]], KafkaException | None]:
    monkeypatch.setattr(reading, "Consumer", lambda _config: consumer)
    reader = Reader("", "t")
    reader.assign(
        sorted(consumer.logs), Position("beginning"), None if until_ms is None else Position("time", until_ms)
    )
    found: list[tuple[int, int]] = []
    try:
        for batch in reader.batches(count, False):
            found += [message.place for message in batch]
    except KafkaException as error:
        return found, error
    return found, None


@pytest.mark.parametrize(
    ("what", "logs", "feed", "expected"),
    [
        (
            "a partition ends before the time",
            {0: [900, 1100], 1: [800]},
            [Message(0, 0, 900), Message(0, 1, 1100), Message(1, 0, 800)],
            [(0, 0), (1, 0)],
        ),
        ("an empty one", {0: [900, 1100], 1: []}, [Message(0, 0, 900), QUIET, Message(1, 0, error=END)], [(0, 0)]),
        ("what is written meanwhile is later", {0: [800]}, [Message(0, 0, 800), Message(0, 1, 5000)], [(0, 0)]),
        ("the last offset is a marker's", {0: [800, 900]}, [Message(0, 0, 800), Message(0, 2, error=END)], [(0, 0)]),
        (
            "offsets without records before the stop",
            {0: [700, 800, 900, 1100]},
            [Message(0, 0, 700), Message(0, 5, 1100)],
            [(0, 0)],
        ),
    ],
)
def test_until_a_time_in_the_past(
    monkeypatch: pytest.MonkeyPatch,
    clock: dict[str, int],
    what: str,
    logs: dict[int, list[int]],
    feed: list[Any],
    expected: list[tuple[int, int]],
) -> None:
    consumer = Consumer(logs, feed)
    assert shown(monkeypatch, consumer, 1000) == (expected, None), what
    assert sorted(set(consumer.paused)) == sorted(logs), "what arrives later would hide another partition's silence"


def test_records_written_while_the_end_is_looked_up_are_left_out(
    monkeypatch: pytest.MonkeyPatch, clock: dict[str, int]
) -> None:
    consumer = Consumer({0: [800]}, [Message(0, 0, 800), Message(0, 1, 5000)])
    consumer.get_watermark_offsets = lambda partition, timeout: (0, 2)  # type: ignore[method-assign]
    assert shown(monkeypatch, consumer, 1000) == ([(0, 0)], None)


def test_until_a_time_in_the_future(monkeypatch: pytest.MonkeyPatch, clock: dict[str, int]) -> None:
    consumer = Consumer({0: [], 1: []}, [])

    def written() -> None:
        consumer.logs = {0: [NOW + 1, NOW + 100], 1: [NOW + 2]}

    def over() -> None:
        clock["ms"] = NOW + 100

    consumer.feed = [
        Message(0, 0, error=END),
        Message(1, 0, error=END),
        QUIET,
        written,
        Message(0, 0, NOW + 1),
        Message(1, 0, NOW + 2),
        Message(0, 1, NOW + 100),
        Message(1, 1, error=END),
        QUIET,
        over,
    ]
    assert shown(monkeypatch, consumer, NOW + 100) == ([(0, 0), (1, 0)], None)
    assert consumer.feed == []


def test_the_end_time_passes_while_earlier_timestamps_arrive(
    monkeypatch: pytest.MonkeyPatch, clock: dict[str, int]
) -> None:
    """From a producer with a slow clock: the last record at the end time is the last one printed."""
    consumer = Consumer(
        {0: [1, 2]}, [Message(0, 0, 1), lambda: clock.update(ms=NOW + 100), Message(0, 1, 2), Message(0, 2, 3)]
    )
    assert shown(monkeypatch, consumer, NOW + 100) == ([(0, 0), (0, 1)], None)


def test_records_before_an_error_are_printed(monkeypatch: pytest.MonkeyPatch, clock: dict[str, int]) -> None:
    consumer = Consumer(
        {0: [1, 2]}, [Message(0, 0, 1), Message(0, 1, 2), Message(0, -1, error=KafkaError.TOPIC_AUTHORIZATION_FAILED)]
    )
    found, problem = shown(monkeypatch, consumer, None)
    assert found == [(0, 0), (0, 1)] and problem is not None


@pytest.mark.parametrize(("arguments", "waits"), [((), True), (("-e",), False), (("--until", "-1h"), False)])
def test_consume_reports_once_that_it_waits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], waits: bool
) -> None:
    class Silent:
        def __init__(self, *_: object) -> None:
            pass

        def partitions(self, _requested: object) -> list[int]:
            return [0]

        def assign(self, *_: object) -> None:
            pass

        def batches(self, *_: object) -> Iterator[list[Any]]:
            yield from [[] for _ in range(consume.SILENT_POLLS_MAX - 1)]
            yield [SimpleNamespace()]  # from here on the silence counts again
            yield from [[] for _ in range(consume.SILENT_POLLS_MAX - 1)]
            assert capsys.readouterr().err == ""
            yield from [[] for _ in range(20)]
            raise KeyboardInterrupt

        def close(self) -> None:
            pass

    monkeypatch.setattr(reading, "Reader", Silent)
    monkeypatch.setattr(consume, "compile_format", lambda *_: lambda _message: b"")
    assert main_module._run(["consume", "t", *arguments]) == 130
    reported = ["mqd: waiting for more records; Ctrl-C stops, and -e stops at the end of the partitions"]
    assert [line for line in capsys.readouterr().err.splitlines() if line] == reported * waits
