"""How many rows `mqd sql` gives, and what it says of the others: without Spark."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mqd.cli import sql


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
    ("as_json", "max_rows", "there", "shown", "told"),
    [
        (True, None, 2500, 2500, ""),
        (True, 7, 8, 7, "mqd: there are more rows; --max-rows shows more than 7\n"),
        (True, 8, 8, 8, ""),
        (False, None, 1001, 1000, "mqd: there are more rows; --max-rows shows more than 1000\n"),
        (False, None, 1000, 1000, ""),
        (False, 2000, 1500, 1500, ""),
    ],
)
def test_rows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool, max_rows: int | None, there: int, shown: int, told: str) -> None:
    monkeypatch.setattr(sql, "_lines", lambda frame: frame)
    assert sql._show(Frame(there), as_json, max_rows) == 0  # type: ignore[arg-type]
    out, error = capsys.readouterr()
    lines = [line.strip() for line in out.splitlines()]
    assert lines == [*([] if as_json else ["number"]), *map(str, range(shown))]
    assert error == told
