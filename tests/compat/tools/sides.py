"""Two sides, mqd and Apache Kafka, on which the same stories are run step by step."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, Producer

from tests.broker import Broker
from tests.cluster import Cluster
from tests.compat.kafka_tools import KafkaCluster, KafkaTools
from tests.compat.tools.driver import RUN_SECONDS, Ran, ToolDriver
from tests.compat.tools.normal import normal

PATIENCE_S = 30.0
# So that both have the same counts, and nothing takes long
BOTH = {
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.num.partitions": "4",
    "group.initial.rebalance.delay.ms": "0",
    "group.streams.initial.rebalance.delay.ms": "0",
    "log.segment.bytes": "536870912",
    # everyone is a super user, so that ACL tools work
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:ANONYMOUS",
}
KAFKA = {"share.coordinator.state.topic.num.partitions": "1", "log.initial.task.delay.ms": "1000"}
THREE = {
    "default.replication.factor": "3",
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2",
}


@dataclasses.dataclass(frozen=True)
class Step:
    """One call of a tool and its result, ready to be compared."""

    tool: str
    words: str
    code: int | None
    out: list[str]
    err: list[str]

    def lines(self) -> list[str]:
        code = "took too long" if self.code is None else str(self.code)
        return [f"exit {code}", *(f"out {line}" for line in self.out), *(f"err {line}" for line in self.err)]


class Side:
    """`name` is mqd or kafka. A story calls `run` and the methods below it."""

    def __init__(self, name: str, driver: ToolDriver, directory: Path, brokers: dict[int, Any], bootstrap: str) -> None:
        self.name, self.bootstrap, self.directory = name, bootstrap, directory
        self._driver, self._brokers = driver, brokers
        self.steps: list[Step] = []
        self._cleanup = ExitStack()
        self._places = {str(directory): "DIRECTORY", bootstrap: "BOOTSTRAP"}
        for number, broker in brokers.items():
            self._places[broker.bootstrap] = f"BROKER{number}"
            self._places[str(self.log_dir(number))] = f"LOGS{number}"

    def log_dir(self, node: int = 1) -> Path:
        broker = self._brokers[node]
        return broker.log_dir if self.name == "kafka" else broker.data_dir / "log"

    def run(
        self,
        tool: str,
        *words: str,
        stdin: str = "",
        seconds: float = RUN_SECONDS,
        until: Callable[[Ran], bool] | None = None,
        unordered: bool | str = False,
        shape: bool = False,
        bootstrap: bool = True,
        quiet: bool = False,
        shown: Callable[[str], str] = str,
        enough: Callable[[str], bool] | None = None,
    ) -> Ran:
        """One step. {bootstrap} in a word is replaced by this side's addresses. `until`: repeated
        until the result matches, for PATIENCE_S. `unordered`: the order of lines is undefined,
        "words": nor that of words. `shape`: its numbers are measurements. `quiet`: the step is not
        compared. `shown`: the part of the output to compare. `enough`: the output at which a tool
        that never ends is stopped.
        """
        asked = [word.replace("{bootstrap}", self.bootstrap) for word in words]
        if bootstrap:
            asked = ["--bootstrap-server", self.bootstrap, *asked]
        deadline = time.monotonic() + PATIENCE_S
        while True:
            ran = self._driver.run(tool, asked, stdin, seconds, enough)
            if until is None or until(ran) or time.monotonic() > deadline:
                break
            time.sleep(0.2)  # polls another process; there is no event to wait for
        out, err = (normal(shown(text), self._places, shape) for text in (ran.out, ran.err))
        if unordered == "words":
            out, err = ([" ".join(sorted(re.findall(r"[\w.-]+", line))) for line in lines] for lines in (out, err))
        if unordered:
            out, err = sorted(out), sorted(err)
        if not quiet:
            label = " ".join(normal(" ".join(words), self._places))
            self.steps.append(Step(tool, label, ran.code, out, err))
        return ran

    def names(self, text: str, name: str) -> None:
        """From here on `text`, an id of this side, is compared as `name`."""
        self._places[text] = name

    def impatient(self) -> list[str]:
        """--command-config for an admin client that gives up after five seconds."""
        settings = "default.api.timeout.ms=5000\nrequest.timeout.ms=4000\n"
        return ["--command-config", self.file("impatient.properties", settings)]

    def topic(self, name: str, *words: str) -> None:
        """A topic that the story needs but does not test."""
        ran = self.run("topics", "--create", "--topic", name, *words, quiet=True)
        assert ran.code == 0, ran

    def file(self, name: str, text: str) -> str:
        """A file's path, for a tool to read."""
        path = self.directory / name
        path.write_text(text)
        return str(path)

    def produce(self, topic: str, values: list[str], partition: int = 0, keys: bool = False, **settings: Any) -> None:
        """All acknowledged; timestamps are 1000, 2000, ..."""
        failed: list[object] = []
        producer = Producer({"bootstrap.servers": self.bootstrap, "acks": "all", "linger.ms": 1, **settings})
        for index, value in enumerate(values):
            producer.produce(
                topic,
                value,
                key=f"k{index}" if keys else None,
                partition=partition,
                timestamp=1000 * (index + 1),
                on_delivery=lambda error, _message: failed.append(error) if error else None,
            )
        assert producer.flush(PATIENCE_S) == 0 and not failed, failed

    def producer(self, **settings: Any) -> Producer:
        return Producer({"bootstrap.servers": self.bootstrap, **{k.replace("_", "."): v for k, v in settings.items()}})

    def member(self, group: str, topics: list[str], **settings: Any) -> Consumer:
        """A member of a group with an assignment; closed when the story ends."""
        own = {"group.id": group, "auto.offset.reset": "earliest", "enable.auto.commit": False, "client.id": "member"}
        consumer = Consumer({"bootstrap.servers": self.bootstrap, **own, **settings})
        self._cleanup.callback(consumer.close)
        consumer.subscribe(topics)
        deadline = time.monotonic() + PATIENCE_S
        while not consumer.assignment() and time.monotonic() < deadline:
            consumer.poll(0.1)
        assert consumer.assignment(), f"{self.name}: no assignment in {group}"
        return consumer

    def stop(self, node: int) -> None:
        self._brokers[node].stop()

    def start(self, node: int) -> None:
        self._brokers[node].start()
        if self.name == "kafka":
            self._brokers[node].wait_until_it_answers()

    def tell(self, story: Callable[[Side], None]) -> list[Step]:
        self.steps = []
        try:
            story(self)
        finally:
            self._cleanup.close()
        return self.steps


class Sides:
    """Both, with `count` brokers each."""

    def __init__(self, mqd: Side, kafka: Side) -> None:
        self.mqd, self.kafka = mqd, kafka

    def tell(self, story: Callable[[Side], None]) -> tuple[list[Step], list[Step]]:
        """The results of Kafka and mqd, run in parallel."""
        with ThreadPoolExecutor(2) as pool:
            told = [pool.submit(side.tell, story) for side in (self.kafka, self.mqd)]
            return told[0].result(), told[1].result()


@contextmanager
def started(tools: KafkaTools, directory: Path, count: int) -> Iterator[Sides]:
    settings = {**BOTH, **(THREE if count > 1 else {})}
    with ExitStack() as stack:
        places = {name: directory / f"{name}-{count}" for name in ("kafka", "mqd")}
        for place in places.values():
            place.mkdir()
        kafka = stack.enter_context(KafkaCluster(tools, places["kafka"], count, {**settings, **KAFKA}))
        brokers: dict[int, Any]
        if count == 1:
            one = stack.enter_context(Broker(places["mqd"] / "data", config={**settings, "node.id": "1"}))
            brokers, bootstrap = {1: one}, one.bootstrap
        else:
            key = directory / "cluster.key"
            key.write_text("a key that three hosts of a test share\n")
            key.chmod(0o600)
            own = {**settings, "cluster.key.file": str(key)}
            cluster = stack.enter_context(Cluster(places["mqd"], count, config=own))
            brokers, bootstrap = dict(cluster.brokers), cluster.bootstrap
        sides = []
        for name, addresses, found in (("mqd", bootstrap, brokers), ("kafka", kafka.bootstrap, kafka.brokers)):
            driver = ToolDriver(tools, places[name] / "driver.err")
            stack.callback(driver.stop)
            sides.append(Side(name, driver, places[name], found, addresses))
        yield Sides(*sides)
