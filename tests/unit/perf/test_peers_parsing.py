"""Parsing the output of Kafka's tools, java and apt into figures and reasons."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import uuid
import zipfile
from pathlib import Path

import pytest

from perf.peers import debian, golang, maven
from perf.peers.apache_kafka import cluster_id
from perf.peers.debian import apt_reason
from perf.peers.driving import LoadFailed, parse_consumer_performance, parse_end_to_end, parse_producer_performance
from perf.peers.maven import java_major
from perf.peers.peer import Unavailable, described

PRODUCED = """119491 records sent, 23898.2 records/sec (23.34 MB/sec), 704.5 ms avg latency, 1148.0 ms max latency.
300000 records sent, 40037.368210 records/sec (39.10 MB/sec), 537.30 ms avg latency, 1148.00 ms max latency, 520 ms 50th, 949 ms 95th, 1032 ms 99th, 1114 ms 99.9th.

"""
CONSUMED = """start.time, end.time, data.consumed.in.MB, MB.sec, data.consumed.in.nMsg, nMsg.sec, rebalance.time.ms, fetch.time.ms, fetch.MB.sec, fetch.nMsg.sec
2026-11-21 10:00:04:157, 2026-11-21 10:00:07:570, 292.9688, 85.8391, 300000, 87899.2089, 1101, 2312, 126.7166, 129757.7855

"""
END_TO_END = """0	74.723967
1000	0.515199
Avg latency: 1.2835 ms
Percentiles: 50th = 0, 99th = 16, 99.9th = 33
"""


def test_producer_performance_is_read_from_its_last_summary() -> None:
    found = parse_producer_performance(PRODUCED)
    assert found["records"] == 300_000
    assert found["seconds"] == pytest.approx(7.493, abs=1e-3)
    assert found["acknowledged"] == {
        "count": 300_000,
        "p50_us": 520_000,
        "p95_us": 949_000,
        "p99_us": 1_032_000,
        "p999_us": 1_114_000,
        "max_us": 1_148_000,
    }


def test_numbers_with_thousands_separated_are_numbers() -> None:
    message = PRODUCED.replace("40037.368210", "40,037.37").replace("1148.00 ms max", "1,148.00 ms max")
    assert parse_producer_performance(message)["acknowledged"]["max_us"] == 1_148_000


@pytest.mark.parametrize(
    "message",
    ["", PRODUCED.splitlines()[0], "Exception in thread main\n"],
    ids=["nothing", "progress only", "an exception"],
)
def test_a_producer_without_a_summary_has_failed(message: str) -> None:
    with pytest.raises(LoadFailed, match="no summary"):
        parse_producer_performance(message)


def test_consumer_performance_counts_fetching_not_joining() -> None:
    assert parse_consumer_performance("WARNING: something, deprecated\n" + CONSUMED) == {
        "records": 300_000,
        "seconds": 2.312,
    }


def test_columns_are_found_by_name() -> None:
    assert parse_consumer_performance("start.time, fetch.time.ms, data.consumed.in.nMsg\nnow, 500, 1000\n") == {
        "records": 1000,
        "seconds": 0.5,
    }


@pytest.mark.parametrize(
    "message",
    ["", CONSUMED.splitlines()[0], CONSUMED.replace("2312", "0"), CONSUMED.replace(" 300000,", " 0,")],
    ids=["nothing", "header only", "no time", "no records"],
)
def test_a_consumer_that_read_nothing_has_failed(message: str) -> None:
    with pytest.raises(LoadFailed, match="ConsumerPerformance"):
        parse_consumer_performance(message)


def test_end_to_end_latency_has_an_average_since_its_percentiles_are_whole_milliseconds() -> None:
    assert parse_end_to_end(END_TO_END) == {
        "average_us": 1283.5,
        "p50_us": 0.0,
        "p99_us": 16_000.0,
        "p999_us": 33_000.0,
    }
    with pytest.raises(LoadFailed, match="no percentiles"):
        parse_end_to_end("0\t74.7\n")


@pytest.mark.parametrize(
    ("message", "major"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_391"', 8),
        ('openjdk version "25" 2025-09-16', 25),
        ("what?", 0),
    ],
)
def test_javas_version(message: str, major: int) -> None:
    assert java_major(message) == major


def test_apts_reason_names_no_address() -> None:
    message = "W: nothing\nE: Failed to fetch http://somewhere.example/x.deb  404  Not Found\nE: second\n"
    assert apt_reason(message) == "Failed to fetch 404 Not Found"
    assert apt_reason("") == "apt gave no reason"


def test_a_cluster_id_never_looks_like_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    # in base64 the first two begin with a dash
    made = [uuid.UUID(bytes=bytes([first]) + bytes(15)) for first in (0xF8, 0xFB, 0x04)]
    monkeypatch.setattr(uuid, "uuid4", lambda: made.pop(0))
    assert cluster_id() == "BAAAAAAAAAAAAAAAAAAAAA"


# -- missing programs ------------------------------------------------------------------------------


@pytest.fixture
def pom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(maven, "CACHE", tmp_path)
    monkeypatch.setattr(debian, "CACHE", tmp_path)
    monkeypatch.setattr(maven, "ROOT", tmp_path)
    (tmp_path / "kafka").mkdir()
    path = tmp_path / "kafka" / "pom.xml"
    path.write_text("<project/>")
    return path


def _running(monkeypatch: pytest.MonkeyPatch, code: int, out: str = "", error: str = "") -> list[list[str]]:
    """Records the commands that would be run, and returns this result."""
    ran: list[list[str]] = []

    def run(command: list[str], **_more) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        for word in command:
            if not code and word.startswith("-DoutputDirectory="):
                Path(word.partition("=")[2]).mkdir()
        return subprocess.CompletedProcess(command, code, out, error)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    return ran


def test_without_a_tool_the_reason_is_its_name(pom: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    for request, reason in (
        (maven.java, "no java"),
        (lambda: maven.jars(pom), "no mvn"),
        (lambda: debian.unpack(["redis-server"]), "no apt-get"),
    ):
        with pytest.raises(Unavailable, match=reason):
            request()


def test_an_old_java_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _running(monkeypatch, 0, error='openjdk version "11.0.2" 2019-01-15\nmore')
    with pytest.raises(Unavailable, match='needs Java 17; there is openjdk version "11.0.2"'):
        maven.java()


def test_downloads_that_failed_in_maven_are_retried(pom: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = _running(monkeypatch, 1, out="[INFO] x\n[ERROR] Could not resolve dependencies\n")
    for _ in range(2):
        with pytest.raises(Unavailable, match="Could not resolve dependencies"):
            maven.jars(pom)
    assert len(ran) == 2


def test_existing_jars_are_not_downloaded_again(pom: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = _running(monkeypatch, 0)
    found = maven.jars(pom)
    assert maven.jars(pom) == found
    assert len(ran) == 1
    pom.write_text("<project>another version</project>")
    assert maven.jars(pom) != found


def test_apts_own_lists_are_tried_before_a_package_is_given_up(pom: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = _running(monkeypatch, 100, error="E: Unable to locate package redis-server\n")
    with pytest.raises(Unavailable, match="Unable to locate package redis-server"):
        debian.unpack(["redis-server"])
    assert [command[-1] for command in ran] == ["redis-server", "update", "redis-server"]


def test_a_jar_is_as_old_as_its_manifest(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.jar", "w") as archive:
        archive.writestr(zipfile.ZipInfo("kafka.Kafka", (2025, 1, 1, 0, 0, 0)), "")
        archive.writestr(zipfile.ZipInfo("META-INF/MANIFEST.MF", (2026, 10, 6, 9, 46, 0)), "")
    assert maven.built_on(tmp_path / "a.jar") == "2026-10-06"


def test_a_debian_package_is_as_old_as_its_last_change(tmp_path: Path) -> None:
    changelog = tmp_path / "usr/share/doc/redis-server/changelog.Debian.gz"
    changelog.parent.mkdir(parents=True)
    entry = "redis (7.0.15) bookworm; urgency=high\n\n  * A fix.\n\n -- A B <ab@example.org>  {}\n\n"
    days = ("Thu, 24 Sep 2026 13:34:16 -0700", "Mon, 27 Nov 2023 08:25:34 +0100")
    changelog.write_bytes(gzip.compress("".join(entry.format(day) for day in days).encode()))
    assert debian.packaged_on(tmp_path, "redis-server") == "2026-09-24"
    assert debian.packaged_on(tmp_path, "another") == ""


def test_a_go_module_has_the_day_of_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = _running(monkeypatch, 0, json.dumps({"Version": "v2.15.3", "Time": "2026-11-11T11:09:33Z"}))
    assert golang.released_on(tmp_path, "a.example/nats") == "2026-11-11"
    assert commands == [["go", "list", "-m", "-json", "a.example/nats"]]
    _running(monkeypatch, 1)
    assert golang.released_on(tmp_path, "a.example/nats") == "", "a run of an hour does not end for want of a day"


def test_a_version_is_shown_with_what_is_known_of_it() -> None:
    assert described("3.10.8", "Debian", "", "Erlang 13") == "3.10.8 (Debian, Erlang 13)"
    assert described("2.15.3", "") == "2.15.3"
