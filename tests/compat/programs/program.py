"""Shared by the tests of programs: a program that is killed and restarted, and a reader that
records what committed readers see.
"""

from __future__ import annotations

import collections
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

from tests.broker import Broker
from tests.crash.processes import kill_and_wait

READY_S = 60.0  # JVMs start at the same time


class Program:
    """`with Program(command, output):` runs it, and kills it at the end."""

    def __init__(self, command: list[str], output: Path) -> None:
        self.command, self.output = command, output
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with open(self.output, "ab") as output:
            self.process = subprocess.Popen(self.command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)

    def kill(self) -> None:
        """kill -9."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def restart(self) -> None:
        self.kill()
        self.start()

    def ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def tail(self, last: int = 6_000) -> str:
        return f"--- {self.output.name}\n{self.output.read_text(errors='replace')[-last:]}"

    def __enter__(self) -> Program:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class CommittedReader:
    """The values that a read_committed consumer reads from some topics: by partition, in order."""

    def __init__(self, bootstrap: str, partitions: dict[str, int]) -> None:
        self._consumer = Consumer(
            {"bootstrap.servers": bootstrap, "group.id": "committed-reader", "isolation.level": "read_committed"}
        )
        self._consumer.assign(
            [
                TopicPartition(topic, index, OFFSET_BEGINNING)
                for topic, count in partitions.items()
                for index in range(count)
            ]
        )
        self.values: dict[tuple[str, int], list[str]] = collections.defaultdict(list)

    def count(self) -> int:
        return sum(map(len, self.values.values()))

    def read(self, seconds: float) -> int:
        """Reads for this long; returns how many records there are."""
        for message in self._consumer.consume(5_000, seconds):
            if message.error() is not None:
                assert message.error().retriable(), message.error()
                continue
            self.values[message.topic(), message.partition()].append(message.value().decode())
        return self.count()

    def read_until(self, count: int, seconds: float, programs: Sequence[Program]) -> None:
        self.read_while(lambda: self.count() < count, seconds, programs, f" of {count}")

    def read_while(
        self, condition: Callable[[], bool], seconds: float, programs: Sequence[Program], expected: str = ""
    ) -> None:
        """AssertionError after this many seconds without a new record, and at once when a program
        has ended.
        """
        deadline = time.monotonic() + seconds
        before = self.count()
        while condition():
            if (now := self.read(0.5)) > before:
                before, deadline = now, time.monotonic() + seconds
            ended = [program.output.name for program in programs if program.ended()]
            if ended or time.monotonic() > deadline:
                why = f"{ended} ended" if ended else f"nothing new within {seconds:.0f} s"
                said = "\n".join(program.tail() for program in programs)
                raise AssertionError(f"{why}: {now} records{expected}\n{said}")

    def close(self) -> None:
        self._consumer.close()


def kill_process(broker: Broker, name: str) -> None:
    """kill -9 of one of the broker's processes, or of all ("broker"); returns when the broker is
    healthy again.
    """
    if name == "broker":
        broker.kill_all()
        broker.start()
    else:
        kill_and_wait(broker, name, READY_S)


def difference(expected: dict[tuple[str, int], list[str]], found: dict[tuple[str, int], list[str]]) -> str:
    """Empty when each partition has the expected records: each value once, in order."""
    lines = []
    for key in sorted({*expected, *found}):
        here, there = expected.get(key, []), found.get(key, [])
        if here != there:
            counts = collections.Counter(there)
            twice = [value for value, number in counts.items() if number > 1]
            lost = [value for value in here if value not in counts]
            place = next(
                (at for at, pair in enumerate(zip(here, there)) if pair[0] != pair[1]), min(len(here), len(there))
            )
            lines.append(
                f"{key}: {len(here)} expected, {len(there)} found, {len(twice)} more than once {twice[:5]}, "
                f"{len(lost)} lost {lost[:5]}; first at {place}: {there[place : place + 3]} for"
                f" {here[place : place + 3]}"
            )
    return "\n".join(lines)
