"""A replay reports missing parts of the archive before it reads anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mqd.spark.pipelines.manifest import Archive, ArchivedFile, ArchiveError, Commit, Span
from mqd.spark.pipelines.replay import _refuse_unknown, replay
from mqd.spark.pipelines.settings import SettingsError


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    """Topics t and u; t has partitions 0 and 1, the second without a record."""
    found = Archive(str(tmp_path))
    files = [
        ArchivedFile(f"topic={topic}/date=2026-11-21/a.parquet", topic, "2026-11-21", 1, [Span(0, 0, 10, 10, 0, 0)])
        for topic in ("t", "u")
    ]
    for file in files:
        path = tmp_path / file.path
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x")
    found.commit(Commit("q", 0, files, ends={"t": {"0": 10, "1": 0}}))
    return found


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"to": {"T": "v"}}, "to: 'T' is not among the topics that are replayed; they are t, u"),
        ({"to": {"u": "v"}, "topics": ["t"]}, "to: 'u' is not among the topics that are replayed; they are t$"),
        ({"starting_offsets": {"tt": {"0": 1}}}, "starting_offsets: 'tt' is not among"),
        ({"ending_offsets": {"tt": {"0": 1}}}, "ending_offsets: 'tt' is not among"),
        (
            {"starting_offsets": {"t": {"2": 1}}},
            "starting_offsets: the archive .* has no partition '2' of t; it has 0, 1",
        ),
        ({"ending_offsets": {"u": {"00": 1}}}, "ending_offsets: the archive .* has no partition '00' of u; it has 0"),
        ({"starting_timestamp": "yesterday"}, "starting_timestamp: 'yesterday' is not a time"),
    ],
)
def test_missing_parts_are_reported(archive: Archive, given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        replay(None, archive, **{"topics": [], "to": {}, **given})  # type: ignore[arg-type]


def test_a_topic_that_was_not_archived_is_reported(archive: Archive) -> None:
    with pytest.raises(ArchiveError, match="has no records of v; it has t, u"):
        replay(None, archive, topics=["v"], to={})  # type: ignore[arg-type]


def test_existing_parts_may_be_named(archive: Archive) -> None:
    _refuse_unknown(archive, ["t", "u"], {"t": "v", "u": "v"}, {"t": {"0": 3, "1": 0}}, {"u": {"0": 7}})
