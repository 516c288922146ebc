"""Every client with every mechanism that it supports, on one broker and on three: while a producer
and a consumer of each work, certificates and keys change and processes are killed, and finally the
client's credentials change. Every record is acknowledged, is in the topic once, and is read.

The table is printed at the end; the reason for a cell with "-" is below it.
"""

from __future__ import annotations

import itertools
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from perf.peers.peer import Unavailable
from tests.compat.go_client import build_go_client
from tests.compat.java_client import build_java_client
from tests.compat.kafka_tools import KafkaTools
from tests.compat.kcat import find_kcat
from tests.compat.security import pairs
from tests.compat.security.changing import MECHANISMS, PATIENCE_S, TOKEN, Changing
from tests.compat.security.pairs import Pair, Way

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

WAYS = [
    *(("SASL_SSL", mechanism) for mechanism in (*MECHANISMS, TOKEN)),
    ("SASL_PLAINTEXT", "SCRAM-SHA-256"),
    ("SSL", "certificate"),
]
CLIENTS = ("java", "confluent-kafka", "kcat", "kafka-python", "aiokafka", "go", "kafka-tools", "mqd")
OLD_LIBRDKAFKA = (
    "librdkafka before 2.6.1 (Debian 12 has 2.0.2) repeats its nonce; Apache Kafka 4 refuses that, too"
    " (librdkafka pull request 4895)"
)
CANNOT = {
    ("kcat", "OAUTHBEARER"): "kcat has no way to name a token; Debian's librdkafka is built without OpenID Connect",
    ("kcat", "SCRAM-SHA-256"): OLD_LIBRDKAFKA,
    ("kcat", "SCRAM-SHA-512"): OLD_LIBRDKAFKA,
    ("kcat", TOKEN): OLD_LIBRDKAFKA,
}
LINES = 20  # between two changes

Make = Callable[[Way, str], Pair]


class Clients:
    """How each client begins a pair."""

    def __init__(self, folder: Path, unpacked: Path) -> None:
        self._folder, self._unpacked = folder, unpacked
        self.unavailable: dict[str, str] = {}
        self.makers: dict[str, Make] = {}
        for name in CLIENTS:
            try:
                self.makers[name] = self._maker(name)
            except (Unavailable, pytest.skip.Exception) as why:
                self.unavailable[name] = str(why)

    def _maker(self, name: str) -> Make:
        """Raises Unavailable, or the exception that skips a test."""
        if name == "java":
            home = build_java_client()
            return lambda way, topic: pairs.java_pair(way, topic, home)
        if name == "go":
            program = build_go_client()
            return lambda way, topic: pairs.go_pair(way, topic, program)
        if name == "kcat":
            kcat = find_kcat(self._unpacked)
            return lambda way, topic: pairs.KcatPair(way, topic, kcat)
        if name == "kafka-tools":
            tools = KafkaTools(self._folder)
            return lambda way, topic: pairs.tools_pair(way, topic, tools)
        return {
            "confluent-kafka": pairs.LibrdkafkaPair,
            "kafka-python": pairs.KafkaPythonPair,
            "aiokafka": pairs.AiokafkaPair,
            "mqd": pairs.mqd_pair,
        }[name]

    def reason(self, name: str, mechanism: str) -> str:
        """Why a cell is empty; "" if it is not."""
        return CANNOT.get((name, mechanism)) or self.unavailable.get(name, "")


class Table:
    """The result of each cell, and the reason for each that is empty."""

    def __init__(self) -> None:
        self.cells: dict[tuple[int, str, str, str], str] = {}
        self.reasons: dict[tuple[str, str], str] = {}
        self.seconds: dict[tuple[int, str, str], float] = {}

    def text(self, brokers: int) -> list[str]:
        heads = [f"{mechanism}/{'TLS' if 'SSL' in protocol else 'plain'}" for protocol, mechanism in WAYS]
        rows = [[f"{brokers} broker{'s' if brokers > 1 else ''}", *heads]]
        for client in CLIENTS:
            rows.append([client, *(self.cells.get((brokers, client, *way), "") for way in WAYS)])
        rows.append(["seconds", *(f"{self.seconds.get((brokers, *way), 0):.0f}" for way in WAYS)])
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[Table]:
    found = Table()
    yield found
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    for brokers in sorted({key[0] for key in found.cells}):
        for line in ["", *found.text(brokers)]:
            reporter.write_line(line)
    for (client, mechanism), reason in found.reasons.items():
        reporter.write_line(f"{client}, {mechanism}: {reason}")


@pytest.fixture(scope="module", params=[1, 3], ids=["1_broker", "3_brokers"])
def brokers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Changing]:
    with Changing(tmp_path_factory.mktemp("changing"), request.param) as made:
        yield made
        request.config.pluginmanager.get_plugin("terminalreporter").write_line(f"\n{dict(made.changes)}")


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory, unpacked_clients: Path) -> Clients:
    return Clients(tmp_path_factory.mktemp("clients"), unpacked_clients)


class Story:
    """A working pair. Its errors are in `failure`; the others continue."""

    def __init__(self, client: str, make: Make, brokers: Changing) -> None:
        self.client, self.brokers = client, brokers
        self.topic = f"{client}-{next(_numbers)}"
        self._make = make
        self.pair: Pair | None = None
        self._read: set[str] = set()  # by ended pairs
        self._acknowledged: set[str] = set()
        self.written: list[str] = []
        self.failure = ""

    def begin(self, way: Way) -> None:
        self._attempt(lambda: setattr(self, "pair", self._make(way, self.topic)))

    def _attempt(self, work: Callable[[], None]) -> None:
        if not self.failure:
            try:
                work()
            except Exception as error:
                self.failure = "".join(traceback.format_exception(error))

    def write(self) -> None:
        self._attempt(self._write)

    def _write(self) -> None:
        for _ in range(LINES):
            line = f"line {len(self.written)}"
            self.pair.write(line)
            self.written.append(line)
        self.pair.flush()

    def settle(self) -> None:
        """Waits until all lines are read."""
        self._attempt(self._settle)

    def _settle(self) -> None:
        end = time.monotonic() + PATIENCE_S
        while missing := sorted(set(self.written) - self._read - self.pair.read):
            self.pair.check()
            assert time.monotonic() < end, (
                f"not read: {len(missing)}, {missing[:3]}; {self.pair.failures[:3]}; {self.pair.said()}"
            )
            time.sleep(0.01)  # polls another thread or program

    def end(self) -> None:
        """Ends the pair; the next one continues."""
        pair, self.pair = self.pair, None
        if pair is None:
            return
        failed, self.failure = self.failure, ""
        self._attempt(pair.finish)
        self.failure = failed or self.failure
        self._read |= pair.read
        self._acknowledged |= pair.acknowledged
        self._attempt(lambda: self._check_pair(pair))

    @staticmethod
    def _check_pair(pair: Pair) -> None:
        assert pair.failures == []

    def finish(self) -> None:
        self.end()
        self._attempt(self._check)

    def _check(self) -> None:
        assert self._acknowledged == set(self.written)
        found = self.brokers.values(self.topic)
        assert found == dict.fromkeys(self.written, 1), f"missing, or there twice: {found - Counter(self.written)}"


_numbers = itertools.count(1)


@pytest.mark.parametrize(("protocol", "mechanism"), WAYS)
def test_every_client_by_a_mechanism(
    brokers: Changing, clients: Clients, table: Table, tmp_path: Path, protocol: str, mechanism: str
) -> None:
    stories, began = [], time.monotonic()
    brokers.wait_until_ready()
    for name in CLIENTS:
        if reason := clients.reason(name, mechanism):
            table.reasons[name, mechanism] = reason
            table.cells[brokers.count, name, protocol, mechanism] = "-"
        else:
            stories.append(Story(name, clients.makers[name], brokers))
    brokers.topics([story.topic for story in stories])

    def way(story: Story) -> Way:
        folder = tmp_path / story.client
        folder.mkdir(exist_ok=True)
        return brokers.way(protocol, mechanism, story.client, folder)

    with ThreadPoolExecutor(len(CLIENTS)) as pool:
        together = lambda work: list(pool.map(work, stories))
        try:
            together(lambda story: story.begin(way(story)))
            together(Story.write)
            together(Story.settle)
            brokers.change_certificates()
            for change in (brokers.kill, brokers.change_cluster_key, brokers.kill):
                together(Story.write)
                change()
                together(Story.write)
                together(Story.settle)
            brokers.wait_until_ready()
            # a user has one password at a time (Kafka), so its programs are restarted
            has_password = mechanism not in ("OAUTHBEARER", "certificate")
            together(Story.write)
            if has_password:
                together(Story.end)
            brokers.change_proofs(protocol, mechanism, [story.client for story in stories])
            if has_password:
                together(lambda story: story.begin(way(story)))
            together(Story.write)
            together(Story.settle)
        finally:
            together(Story.finish)
    for story in stories:
        outcome = "FAILED" if story.failure else f"{len(story.written)} ok"
        table.cells[brokers.count, story.client, protocol, mechanism] = outcome
    table.seconds[brokers.count, protocol, mechanism] = time.monotonic() - began
    failures = "\n".join(f"===== {story.client}\n{story.failure}" for story in stories if story.failure)
    assert not failures, f"{failures}\n{brokers.logs()[-8000:]}"
