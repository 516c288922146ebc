"""How many rows `mqd sql` prints, and its note about the others: without Spark."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mqd.cli.common import OutputClosedError
from mqd.cli.verbs import sql
from tests.unit.cli.unread_stdout import unread


class Frame:
    """Of `count` rows with one column."""

    columns = ("number",)

    def __init__(self, count: int) -> None:
        self._count = count

    def limit(self, count: int) -> Frame:
        return Frame(min(count, self._count))

    def collect(self) -> list[tuple[str]]:
        return list(self.toLocalIterator())

    def toLocalIterator(self) -> Iterator[tuple[str]]:
        return ((str(number),) for number in range(self._count))


@pytest.mark.parametrize(
    ("as_json", "max_rows", "there", "shown", "reported"),
    [
        (True, None, 2500, 2500, ""),
        (True, 7, 8, 7, "mqd: only the first 7 rows are shown; to show more, use --max-rows\n"),
        (True, 8, 8, 8, ""),
        (False, None, 1001, 1000, "mqd: only the first 1000 rows are shown; to show more, use --max-rows\n"),
        (False, None, 1000, 1000, ""),
        (False, 2000, 1500, 1500, ""),
    ],
)
def test_rows(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    as_json: bool,
    max_rows: int | None,
    there: int,
    shown: int,
    reported: str,
) -> None:
    monkeypatch.setattr(sql, "_as_json_rows", lambda frame: frame)
    assert sql._show(Frame(there), as_json, max_rows) == 0  # type: ignore[arg-type]
    out, error = capsys.readouterr()
    lines = [line.strip() for line in out.splitlines()]
    assert lines == [*([] if as_json else ["number"]), *map(str, range(shown))]
    assert error == reported


class Query:
    """A streaming query of one batch, which arrives in its own thread, as Spark's do. `failures`:
    its exceptions.
    """

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self.failures: list[BaseException] = []
        self.is_stopped = False

    def outputMode(self, _mode: str) -> Query:
        return self

    def foreachBatch(self, show: Callable[[Any, int], None]) -> Query:
        self._show = show
        return self

    def start(self) -> Query:
        self._thread = threading.Thread(target=self._batch)
        self._thread.start()
        return self

    def _batch(self) -> None:
        try:
            self._show(self._frame, 0)
        except BaseException as failure:
            self.failures.append(failure)

    def awaitTermination(self, _seconds: float) -> bool:
        self._thread.join()
        return True

    def stop(self) -> None:
        self.is_stopped = True


def test_a_table_that_is_not_read_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with unread(monkeypatch), pytest.raises(OutputClosedError):
        sql._show(Frame(3), False, None)  # type: ignore[arg-type]


def test_a_live_query_whose_tables_are_not_read_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = ModuleType("pyspark.errors")
    errors.AnalysisException = LookupError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyspark.errors", errors)
    monkeypatch.setattr(sql, "stop_when_interrupted", lambda stop: None)
    query = Query(Frame(3))
    with unread(monkeypatch), pytest.raises(OutputClosedError):
        sql._follow(SimpleNamespace(writeStream=query), False)  # type: ignore[arg-type]
    assert query.is_stopped and not query.failures
