"""The load generators of the benchmark, real but small: librdkafka's against a broker,
stream_load's against fake servers; and, in the slow tier, a whole comparison.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from perf.peers import command, maven, plan, queues, stream_peer
from perf.peers.apache_kafka import POM
from perf.peers.driving import KAFKA_TOOLS, EncodedFrames, Librdkafka, LoadFailed, run
from perf.peers.peer import Load, Unavailable
from perf.peers.plan import Step
from tests.broker import Broker
from tests.ports import free_port

SMALL = Load(record_bytes=200, partitions=3)


class AtBroker:
    """The part of a Peer that a driver uses."""

    def __init__(self, broker: Broker) -> None:
        self.address, self.port = broker.bootstrap, broker.port


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("load"), config={"num.partitions": "3"}) as broker:
        yield broker


@pytest.fixture(scope="module")
def librdkafka() -> Librdkafka:
    try:
        return Librdkafka()
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("acks", ["0", "1", "all"])
def test_librdkafka_reads_back_the_records_it_produced(broker: Broker, librdkafka: Librdkafka, acks: str) -> None:
    load = Load(200, acks, "lz4", 3)
    produced = librdkafka.produce(AtBroker(broker), f"made-{acks}", load, records=5000, milliseconds=20_000)  # type: ignore[arg-type]
    assert produced["records"] == 5000
    assert produced["stored"] == 5003, "one to each partition, before the clock starts"
    assert produced["seconds"] > 0
    consumed = librdkafka.consume(AtBroker(broker), f"made-{acks}", load, records=produced["stored"])  # type: ignore[arg-type]
    assert consumed["records"] == 5003


def test_librdkafka_reads_concurrently_and_ends_with_the_last_record(broker: Broker, librdkafka: Librdkafka) -> None:
    produced = librdkafka.produce(AtBroker(broker), "along", SMALL, records=20_000, milliseconds=20_000, reading=True)  # type: ignore[arg-type]
    assert produced["records"] == 20_000


def test_an_open_loop_counts_every_record_due_after_the_warm_up(broker: Broker, librdkafka: Librdkafka) -> None:
    measured = librdkafka.latency(AtBroker(broker), "paced", SMALL, rate=2000, milliseconds=400, warm_milliseconds=100)  # type: ignore[arg-type]
    assert measured["records"] == 1000
    for what in ("acknowledged", "consumed", "late"):
        found = measured[what]
        assert found["count"] == 800
        assert 0 <= found["p50_us"] <= found["p99_us"] <= found["p999_us"] <= found["max_us"]
    assert measured["reached"] <= 2100, "never faster than requested"


def test_the_time_limit_ends_a_producer_before_its_last_record(broker: Broker, librdkafka: Librdkafka) -> None:
    produced = librdkafka.produce(AtBroker(broker), "bounded", SMALL, records=10**9, milliseconds=100)  # type: ignore[arg-type]
    assert 0 < produced["records"] < 10**9


def test_encoded_frames_have_as_many_records_as_declared(broker: Broker, librdkafka: Librdkafka) -> None:
    load = Load(1024, "all", "none", 3)
    peer = AtBroker(broker)
    librdkafka.produce(peer, "frames", load, records=1, milliseconds=1000)  # type: ignore[arg-type]  # makes the topic
    sent = EncodedFrames().produce(peer, "frames", load, records=1600, milliseconds=20_000)  # type: ignore[arg-type]
    assert sent["records"] >= 1600 and sent["records"] % 100 == 0
    assert sent["stored"] == sent["records"] + 3 * 100, "a batch to each partition comes first"
    assert librdkafka.consume(peer, "frames", load, records=sent["stored"] + 4)["records"] == sent["stored"] + 4  # type: ignore[arg-type]


# -- stream_load -----------------------------------------------------------------------------------


class FakeRedis:
    """PING, XADD, XREAD, UNLINK, for successive and concurrent clients. `refuse`: the reply to
    XADD.
    """

    def __init__(self, refuse: bytes = b"", garbage: bytes = b"") -> None:
        self.refuse, self.garbage = refuse, garbage
        self.streams: dict[bytes, list[bytes]] = {}
        self.more = threading.Condition()
        self.closed = False

    def serve(self, connection: socket.socket) -> None:
        incoming = connection.makefile("rb")
        with suppress(OSError), connection, incoming:  # a client that fails closes with responses unread
            while words := self._words(incoming):
                if (response := self._answer(words)) is None:
                    return
                connection.sendall(response)

    @staticmethod
    def _words(incoming) -> list[bytes]:
        first = incoming.readline().strip()
        if not first.startswith(b"*"):
            return first.split()
        return [incoming.read(int(incoming.readline()[1:]) + 2)[:-2] for _ in range(int(first[1:]))]

    def _answer(self, words: list[bytes]) -> bytes | None:
        match words[0]:
            case b"PING":
                return b"+PONG\r\n"
            case b"XADD" if self.refuse or self.garbage:
                return self.refuse or self.garbage
            case b"XADD":
                with self.more:
                    entries = self.streams.setdefault(words[1], [])
                    entries.append(words[4])
                    self.more.notify_all()
                return b"$3\r\n%d-0\r\n" % (len(entries) % 10)
            case b"XREAD":
                return self._read(words)
            case _:
                return b":1\r\n"

    def _read(self, words: list[bytes]) -> bytes | None:
        rest = words[words.index(b"STREAMS") + 1 :]
        places = {
            name: int(place.split(b"-")[0])
            for name, place in zip(rest[: len(rest) // 2], rest[len(rest) // 2 :], strict=True)
        }
        with self.more:
            self.more.wait_for(
                lambda: self.closed or any(len(self.streams.get(name, [])) > place for name, place in places.items())
            )
            found = {
                name: list(enumerate(self.streams.get(name, [])))[place : place + 7] for name, place in places.items()
            }
        found = {name: entries for name, entries in found.items() if entries}
        if not found:
            return None
        return b"*%d\r\n" % len(found) + b"".join(self._stream(name, entries) for name, entries in found.items())

    @staticmethod
    def _stream(name: bytes, entries: list[tuple[int, bytes]]) -> bytes:
        def bulk(text: bytes) -> bytes:
            return b"$%d\r\n%s\r\n" % (len(text), text)

        return (
            b"*2\r\n"
            + bulk(name)
            + b"*%d\r\n" % len(entries)
            + b"".join(
                b"*2\r\n" + bulk(b"%d-0" % (index + 1)) + b"*2\r\n" + bulk(b"v") + bulk(value)
                for index, value in entries
            )
        )


@contextmanager
def serving(fake: FakeRedis) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", free_port())) as listener:

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=fake.serve, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield listener.getsockname()[1]
        finally:
            with fake.more:
                fake.closed = True
                fake.more.notify_all()
            listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def stream_load() -> Callable[..., dict]:
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        pytest.skip("no C compiler")
    program = str(stream_peer.stream_load())

    def load(what: str, **words: object) -> dict:
        return json.loads(
            run(
                [
                    program,
                    what,
                    "protocol=redis",
                    "topic=t",
                    "partitions=2",
                    "record_bytes=64",
                    *(f"{key}={value}" for key, value in words.items()),
                ],
                60,
            )
        )

    return load


def test_stream_load_has_every_record_acknowledged_and_read(stream_load: Callable[..., dict]) -> None:
    fake = FakeRedis()
    with serving(fake) as port:
        produced = stream_load("produce", port=port, records=500, milliseconds=20_000, window=40, reading=1)
        assert (produced["records"], produced["stored"]) == (500, 502)
        assert sorted(fake.streams) == [b"t-0", b"t-1"]
        assert [len(entries) for entries in fake.streams.values()] == [301, 201], (
            "a hundred to one stream, a hundred to the next"
        )
        assert stream_load("consume", port=port, records=502)["records"] == 502


def test_stream_load_is_an_open_loop(stream_load: Callable[..., dict]) -> None:
    with serving(FakeRedis()) as port:
        measured = stream_load("latency", port=port, rate=1000, milliseconds=300, warm_milliseconds=100)
    assert [measured[what]["count"] for what in ("acknowledged", "consumed", "late")] == [300, 300, 300]


@pytest.mark.parametrize(
    ("fake", "reason"),
    [
        (FakeRedis(refuse=b"-OOM command not allowed\r\n"), "OOM command not allowed"),
        (FakeRedis(garbage=b"*99999999\r\n"), "an array of 99999999"),
        (FakeRedis(garbage=b"$99999999999\r\n"), "a string of 99999999999 bytes"),
        (FakeRedis(garbage=b"hello\r\n"), "not RESP"),
    ],
    ids=["refused", "an array", "a string too long", "not its protocol"],
)
def test_stream_load_reports_errors(stream_load: Callable[..., dict], fake: FakeRedis, reason: str) -> None:
    with serving(fake) as port, pytest.raises(LoadFailed, match=reason):
        stream_load("produce", port=port, records=10, milliseconds=1000)


def test_no_server_is_reported_at_once(stream_load: Callable[..., dict]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        with pytest.raises(LoadFailed, match="cannot connect"):
            stream_load("ping", port=taken.getsockname()[1])


# -- a whole comparison ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_smallest_comparison_from_jars_to_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    try:
        maven.java()
        maven.jars(POM)
    except Unavailable as error:
        pytest.skip(str(error))
    steps = [
        Step(plan.START, everyone=True),
        Step(plan.THROUGHPUT),
        Step(plan.ALONG),
        Step(plan.LATENCY, share=0.25),
        Step(plan.THROUGHPUT, driver=KAFKA_TOOLS),
    ]
    monkeypatch.setattr(plan, "steps", lambda full, quick: steps)
    before = command.HISTORY.read_text()
    assert (
        command.main(["--quick", "--only", "mqd", "--only", "kafka", "--minutes", "4", "--directory", str(tmp_path)])
        == 0
    )
    output = capsys.readouterr().out
    for row in (
        "produce, no fsync",
        "broker CPU to read",
        "produce, by Kafka's own tool",
        "memory after load",
        "start-up on an empty directory",
    ):
        assert row in output
    assert "failed" not in output
    assert command.HISTORY.read_text() == before, "a quick run is recorded nowhere"
    assert list(tmp_path.iterdir()) == [], "its data is gone"
    assert not subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True).stdout, (
        "and so are its processes"
    )


@pytest.mark.slow
def test_queues_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert queues.main(["--only", "mqd", "--jobs", "2000"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("mqd, a share group")]
    assert len(lines) == 3 and all(float(line.split()[-2]) > 0 for line in lines), lines
