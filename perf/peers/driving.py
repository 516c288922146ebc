"""Drivers: they run load generators against a peer and convert their output to figures.

`neutral` is one program per protocol, the same for every peer that speaks it. `kafka tools` are
Apache Kafka's own, run from its jars against every broker that speaks its protocol, so that the
client cannot favour mqd. `lean` uses almost no CPU in the client, so that the broker is measured:
perf/native's generator for Kafka's protocol, and stream_load, which is lean already, for the others.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from perf.loading import ROOT, LoadFailed
from perf.loading import build as build_generator
from perf.peers import maven
from perf.peers.apache_kafka import POM, TOOL_LOGGING
from perf.peers.peer import Load, Peer, Unavailable

SOURCES = Path(__file__).resolve().parent / "native"
BUILD = ROOT / ".build" / "perf" / "peers"
LATENCY_LINGER_MS = "1"
NEUTRAL, KAFKA_TOOLS, LEAN = "neutral", "kafka tools", "lean"


class Driver(Protocol):
    """Each method returns a dict of figures. `topic` exists; `records` of it were produced before
    `consume`.
    """

    name: str

    def produce(
        self, peer: Peer, topic: str, load: Load, *, records: int, milliseconds: int, reading: bool = False
    ) -> dict: ...

    def consume(self, peer: Peer, topic: str, load: Load, *, records: int) -> dict: ...

    def latency(
        self, peer: Peer, topic: str, load: Load, *, rate: int, milliseconds: int, warm_milliseconds: int
    ) -> dict: ...


def run(command: list[str], timeout_s: float) -> str:
    """Runs the command. Returns its standard output. Raises LoadFailed."""
    what = Path(command[0]).name
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise LoadFailed(f"{what}: not done within {timeout_s:.0f} s") from None
    if done.returncode:
        reason = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise LoadFailed(f"{what}: exit {done.returncode}: {reason[:300]}")
    return done.stdout


# -- the programs of native/ -----------------------------------------------------------------------


def librdkafka() -> Path:
    """The library in confluent-kafka's wheel. Raises Unavailable."""
    spec = find_spec("confluent_kafka")
    place = Path(spec.origin).parent.parent / "confluent_kafka.libs" if spec and spec.origin else None
    found = sorted(place.glob("librdkafka*.so*")) if place and place.exists() else []
    if not found:
        raise Unavailable("confluent-kafka is not installed from its wheel: no librdkafka to load with")
    return found[0]


def build(program: str, sources: list[str], libraries: list[str]) -> Path:
    """The program, compiled again when its sources or libraries are newer. Raises LoadFailed."""
    target = BUILD / program
    newest = max(
        [path.stat().st_mtime for path in SOURCES.iterdir()]
        + [Path(word).stat().st_mtime for word in libraries if word.startswith("/")]
    )
    if not target.exists() or target.stat().st_mtime < newest:
        BUILD.mkdir(parents=True, exist_ok=True)
        compiler = os.environ.get("CC") or shutil.which("cc") or "gcc"
        command = [
            compiler,
            "-std=gnu11",
            "-O2",
            "-g",
            "-Wall",
            "-Wextra",
            "-o",
            str(target),
            *(str(SOURCES / source) for source in sources),
            *libraries,
            "-lpthread",
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise LoadFailed(f"{compiler} cannot build {program}:\n{done.stderr}")
    return target


def rdkafka_load() -> Path:
    library = librdkafka()
    return build("rdkafka_load", ["common.c", "rdkafka_load.c"], [str(library), f"-Wl,-rpath,{library.parent}"])


class Librdkafka:
    """librdkafka with its defaults except for acks, compression, linger where latency is measured, and
    the backoff of a reader whose queue is full (native/rdkafka_load.c).
    """

    name = "librdkafka"

    def __init__(self) -> None:
        self._program = str(rdkafka_load())

    def version(self) -> str:
        return "librdkafka " + run([self._program, "version"], 10).strip()

    def _run(self, what: str, peer: Peer, topic: str, load: Load, timeout_s: float, **words: object) -> dict:
        common = {
            "bootstrap": peer.address,
            "topic": topic,
            "partitions": load.partitions,
            "record_bytes": load.record_bytes,
            "acks": load.acks,
            "compression": load.compression,
        }
        return json.loads(
            run([self._program, what, *(f"{key}={value}" for key, value in {**common, **words}.items())], timeout_s)
        )

    def produce(
        self, peer: Peer, topic: str, load: Load, *, records: int, milliseconds: int, reading: bool = False
    ) -> dict:
        return self._run(
            "produce",
            peer,
            topic,
            load,
            60 + milliseconds / 1000,
            records=records,
            milliseconds=milliseconds,
            reading=int(reading),
        )

    def consume(self, peer: Peer, topic: str, load: Load, *, records: int) -> dict:
        return self._run("consume", peer, topic, load, 90, records=records)

    def latency(
        self, peer: Peer, topic: str, load: Load, *, rate: int, milliseconds: int, warm_milliseconds: int
    ) -> dict:
        words = {
            "rate": rate,
            "milliseconds": milliseconds,
            "warm_milliseconds": warm_milliseconds,
            "linger_ms": LATENCY_LINGER_MS,
        }
        return self._run("latency", peer, topic, load, 60 + (milliseconds + warm_milliseconds) / 1000, **words)


class EncodedFrames:
    """perf/native's generator: Produce requests with a batch of 100 records each (as many as
    stream_load puts in a frame), encoded once and sent repeatedly by one thread; it only
    produces.
    """

    name = "encoded frames"
    BATCH_RECORDS, BATCH_BYTES_MAX = 100, 900_000
    RECORD_OVERHEAD, BATCH_OVERHEAD = 10, 61
    LEADER_SECONDS = 10.0
    FLOW = {"connections": 4, "depth": 16, "burst": 8, "spin": 0}  # 64 batches in flight: 6,400 records

    def __init__(self) -> None:
        self._program = str(build_generator())

    def version(self) -> str:
        return "perf/native"

    def produce(
        self, peer: Peer, topic: str, load: Load, *, records: int, milliseconds: int, reading: bool = False
    ) -> dict:
        each = max(1, min(self.BATCH_RECORDS, self.BATCH_BYTES_MAX // load.record_bytes))
        frame = {
            "port": peer.port,
            "topic": topic,
            "partitions": load.partitions,
            "acks": -1 if load.acks == "all" else int(load.acks),
            "records": each,
            "batch": self.BATCH_OVERHEAD + each * (load.record_bytes + self.RECORD_OVERHEAD),
        }
        self._warm({**frame, "count": load.partitions, "milliseconds": 10_000})
        message = self._produce(
            {**frame, "count": max(1, records // each), "milliseconds": milliseconds, **self.FLOW},
            60 + milliseconds / 1000,
        )
        sent = message["count"] * each
        return {
            "records": sent,
            "stored": sent + load.partitions * each,
            "seconds": message["seconds"],
            "client_cpu_seconds": message["client_cpu_seconds"],
        }

    def _produce(self, words: dict[str, object], timeout_s: float) -> dict:
        return json.loads(
            run([self._program, "produce", *(f"{key}={value}" for key, value in words.items())], timeout_s)
        )

    def _warm(self, words: dict[str, object]) -> None:
        """Sends a batch to each partition until all are accepted: a topic that was just created may have
        no leader yet, which other clients wait for by themselves.
        """
        deadline = time.monotonic() + self.LEADER_SECONDS
        while True:
            try:
                self._produce(words, 30)
                return
            except LoadFailed:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def consume(self, peer: Peer, topic: str, load: Load, *, records: int) -> dict:
        raise LoadFailed("encoded frames only produce")

    def latency(
        self, peer: Peer, topic: str, load: Load, *, rate: int, milliseconds: int, warm_milliseconds: int
    ) -> dict:
        raise LoadFailed("encoded frames only produce")


# -- Apache Kafka's own tools ----------------------------------------------------------------------

_PRODUCED = re.compile(
    r"^(?P<records>\d+) records sent, (?P<rate>[\d.,]+) records/sec \([\d.,]+ MB/sec\), (?P<average>[\d.,]+) ms avg"
    r" latency, (?P<maximum>[\d.,]+) ms max latency, "
    r"(?P<p50>[\d.,]+) ms 50th, (?P<p95>[\d.,]+) ms 95th, (?P<p99>[\d.,]+) ms 99th, (?P<p999>[\d.,]+) ms 99\.9th",
    re.M,
)
_END_TO_END = re.compile(r"50th = (?P<p50>[\d.]+), 99th = (?P<p99>[\d.]+), 99\.9th = (?P<p999>[\d.]+)")
_END_TO_END_AVERAGE = re.compile(r"Avg latency: (?P<average>[\d.]+) ms")


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def parse_producer_performance(message: str) -> dict:
    """The last summary line: of the whole run (or of the records after the warm-up, which Kafka prints
    last). Milliseconds become microseconds.
    """
    found = list(_PRODUCED.finditer(message))
    if not found:
        raise LoadFailed(f"ProducerPerformance printed no summary: {message.strip()[-200:]!r}")
    last = {key: _number(value) for key, value in found[-1].groupdict().items()}
    latency = {f"{key}_us": last[key] * 1000 for key in ("p50", "p95", "p99", "p999")}
    return {
        "records": int(last["records"]),
        "seconds": last["records"] / last["rate"],
        "acknowledged": {"count": int(last["records"]), **latency, "max_us": last["maximum"] * 1000},
    }


def parse_consumer_performance(message: str) -> dict:
    """Parses the CSV by the names in its header. `seconds` is the fetch time, without joining the
    group.
    """
    lines = [line for line in message.splitlines() if "," in line]
    header = next((index for index, line in enumerate(lines) if line.startswith("start.time")), None)
    if header is None or len(lines) < header + 2:
        raise LoadFailed(f"ConsumerPerformance printed no figures: {message.strip()[-200:]!r}")
    row = dict(
        zip(
            (word.strip() for word in lines[header].split(",")),
            (word.strip() for word in lines[header + 1].split(",")),
            strict=True,
        )
    )
    records, milliseconds = int(row["data.consumed.in.nMsg"]), float(row["fetch.time.ms"])
    if not records or milliseconds <= 0:
        raise LoadFailed(f"ConsumerPerformance read {records} records in {milliseconds} ms")
    return {"records": records, "seconds": milliseconds / 1000}


def parse_end_to_end(message: str) -> dict:
    found = _END_TO_END.search(message)
    average = _END_TO_END_AVERAGE.search(message)
    if not found or not average:
        raise LoadFailed(f"EndToEndLatency printed no percentiles: {message.strip()[-200:]!r}")
    return {
        "average_us": float(average["average"]) * 1000,
        **{f"{key}_us": float(found[key]) * 1000 for key in ("p50", "p99", "p999")},
    }


class KafkaTools:
    """ProducerPerformance, ConsumerPerformance and EndToEndLatency of Apache Kafka, with the heap
    of its scripts (512 MB).
    """

    name = "Apache Kafka's tools"
    END_TO_END_RECORDS = 3000

    def __init__(self) -> None:
        self._java = maven.java()
        self._jars = maven.jars(POM)
        BUILD.mkdir(parents=True, exist_ok=True)
        self._logging = BUILD / "tools-log4j2.xml"
        self._logging.write_text(TOOL_LOGGING)

    def version(self) -> str:
        return "Apache Kafka " + next(
            path.name.removeprefix("kafka-tools-").removesuffix(".jar")
            for path in self._jars.glob("kafka-tools-[0-9]*.jar")
        )

    def _tool(self, name: str, *words: str, timeout_s: float = 120) -> str:
        options = [
            "-Xmx512M",
            "-XX:+UseG1GC",
            "-Djava.awt.headless=true",
            f"-Dlog4j2.configurationFile={self._logging}",
        ]
        return run(
            [self._java, *options, "-cp", f"{self._jars}/*", f"org.apache.kafka.tools.{name}", *words], timeout_s
        )

    def produce(
        self, peer: Peer, topic: str, load: Load, *, records: int, milliseconds: int, reading: bool = False
    ) -> dict:
        properties = [f"acks={load.acks}", f"compression.type={load.compression}"]
        if load.acks != "all":
            properties.append("enable.idempotence=false")  # the tool's own default would refuse these acks
        message = self._tool(
            "ProducerPerformance",
            "--bootstrap-server",
            peer.address,
            "--topic",
            topic,
            "--num-records",
            str(records),
            "--throughput",
            "-1",
            "--record-size",
            str(load.record_bytes),
            "--command-property",
            *properties,
        )
        figures = parse_producer_performance(message)
        return {**figures, "stored": records}

    def consume(self, peer: Peer, topic: str, load: Load, *, records: int) -> dict:
        message = self._tool(
            "ConsumerPerformance",
            "--bootstrap-server",
            peer.address,
            "--topic",
            topic,
            "--num-records",
            str(records),
            "--timeout",
            "20000",
        )
        return parse_consumer_performance(message)

    def latency(
        self, peer: Peer, topic: str, load: Load, *, rate: int, milliseconds: int, warm_milliseconds: int
    ) -> dict:
        """One record at a time, produced and read back; the tool ignores `rate` and the durations."""
        with tempfile.NamedTemporaryFile("w", suffix=".properties", dir=BUILD) as config:
            config.write(f"compression.type={load.compression}\n")
            config.flush()
            message = self._tool(
                "EndToEndLatency",
                peer.address,
                topic,
                str(self.END_TO_END_RECORDS),
                load.acks,
                str(load.record_bytes),
                config.name,
            )
        return {"records": self.END_TO_END_RECORDS, "end_to_end": parse_end_to_end(message)}
