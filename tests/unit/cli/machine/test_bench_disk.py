"""`mqd bench disk`: its measurements, the space and time they take, and its output."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from mqd.cli.common import CliError
from mqd.cli.machine import bench, disk
from mqd.cli.machine.disk import GROUP_BYTES, MIB, RECORD_BYTES, Figures, Flushes
from mqd.cli.main import cli


def figures(p50_ms: float, p99_ms: float = 1.0, is_cached: bool = False) -> Figures:
    one = Flushes(RECORD_BYTES, 1000, p50_ms, p99_ms, p99_ms, 1000 / p50_ms)
    return Figures(one, one._replace(size_bytes=GROUP_BYTES), 5e8, 1e9, is_cached)


def test_it_measures_and_leaves_no_files(tmp_path: Path) -> None:
    found = disk.measure(tmp_path, 4 * MIB, 0.1)
    for one, size in ((found.single, RECORD_BYTES), (found.group, GROUP_BYTES)):
        assert one.size_bytes == size and one.appends >= 1
        assert 0 < one.p50_ms <= one.p99_ms <= one.max_ms
    assert found.write_bytes_per_s > 0 and found.read_bytes_per_s > 0
    assert not list(tmp_path.iterdir())


def test_the_command(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["bench", "disk", str(tmp_path), "--seconds", "0.2", "--size", "4"])
    assert done.exit_code == 0 and "append 4 KiB and flush" in done.output and "the median flush takes" in done.output
    words = ["bench", "disk", str(tmp_path), "--seconds", "0.2", "--size", "4", "--format", "json"]
    shown = json.loads(CliRunner().invoke(cli, words).output)
    assert shown["directory"] == str(tmp_path) and shown["append_and_flush"][0]["size_bytes"] == RECORD_BYTES


def test_the_file_system_is_that_of_the_directory_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to("target")
    monkeypatch.chdir(tmp_path)
    asked: list[Path] = []
    monkeypatch.setattr(bench.storage, "file_system_of", lambda _root, directory: asked.append(directory))
    for directory in ("target", "link"):
        done = CliRunner().invoke(cli, ["bench", "disk", directory, "--seconds", "0.2", "--size", "4"])
        assert done.exit_code == 0, done.output
    assert asked == [tmp_path / "target"] * 2


def test_a_missing_directory_is_reported(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["bench", "disk", str(tmp_path / "no")], standalone_mode=False)
    assert isinstance(done.exception, CliError) and "is not a directory" in str(done.exception)


def test_the_disk_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = SimpleNamespace(f_bavail=300, f_blocks=1000, f_frsize=MIB)
    monkeypatch.setattr(os, "statvfs", lambda _path: about)
    disk.check_space(tmp_path, 250 * MIB)
    with pytest.raises(CliError, match="use a smaller --size, or free space"):
        disk.check_space(tmp_path, 251 * MIB)


def test_a_write_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fails)
    with pytest.raises(CliError, match="Input/output error"):
        disk.measure(tmp_path, 4 * MIB, 0.1)


def test_a_hung_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    responses = threading.Event()
    monkeypatch.setattr(os, "fdatasync", lambda _fd: responses.wait())
    try:
        with pytest.raises(CliError, match="has not completed a write or flush within"):
            disk.measure(tmp_path, 4 * MIB, 0.0, patience_s=0.1)
    finally:
        responses.set()


def test_percentiles() -> None:
    ordered = [float(number) for number in range(1, 101)]
    assert [disk.percentile(ordered, share) for share in (0.5, 0.99, 1.0)] == [50, 99, 100]
    assert disk.percentile([7.0], 0.99) == 7
    one = disk.flushes_of(RECORD_BYTES, [0.003, 0.001, 0.002])
    assert (one.p50_ms, one.max_ms, one.per_second) == (2, 3, pytest.approx(500))


@pytest.mark.parametrize(
    ("p50_ms", "said"),
    [
        (0.005, "ignores flushes"),
        (0.1, "survives a power cut"),
        (1.5, "a typical SSD"),
        (8, "slow"),
        (20, "a spinning disk"),
    ],
)
def test_the_kind_of_disk_in_words(p50_ms: float, said: str) -> None:
    assert said in disk.advice(figures(p50_ms, p50_ms), "ext4")[0]


def test_the_report() -> None:
    assert any("1,000 records/s" in line for line in disk.advice(figures(1.0), "xfs"))
    assert any("one flush in a hundred takes 80.0 ms" in line for line in disk.advice(figures(1.0, 80.0), "xfs"))
    assert not any("in a hundred" in line for line in disk.advice(figures(10.0, 80.0), "xfs"))
    assert any("has no direct I/O" in line for line in disk.advice(figures(1.0, is_cached=True), "xfs"))
    assert disk.advice(figures(0.001), "tmpfs") == [
        "this is tmpfs, memory: nothing in it survives a restart of the machine"
    ]
