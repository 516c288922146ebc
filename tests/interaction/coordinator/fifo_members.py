"""Members of a share group with share.fifo as processes, what they print, and what must hold of it (F1).

    python -m tests.interaction.coordinator.fifo_members BOOTSTRAP GROUP TOPIC [librdkafka | auto | tcp]

A value is KEY:NUMBER, where the numbers of a key count from 0. A line: what happened, when (monotonic, in
A value is KEY:NUMBER, where the numbers of a key count from 0. A line has the event, its time
(monotonic, in ns, the same clock for all processes of a host), the value, and details.
"""

from __future__ import annotations

import collections
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from confluent_kafka import AcknowledgeType, KafkaException, TopicPartition

from tests.interaction.share_members import consumer_of

SECONDS = 60.0


class Line(NamedTuple):
    when_ns: int
    member: str
    what: str  # delivered, sent (its acknowledgement), or answered
    key: str
    number: int
    rest: str


def lines(outputs: Iterable[Path]) -> Iterator[Line]:
    for output in outputs:
        for text in output.read_text(errors="replace").splitlines(keepends=True):
            words = text.split()
            if text.endswith("\n") and words and words[0] in ("delivered", "sent", "answered"):
                key, number = words[2].split(":")
                yield Line(int(words[1]), output.name, words[0], key, int(number), words[3])


def accepted(outputs: Iterable[Path]) -> set[tuple[str, int]]:
    """Values whose acceptance was confirmed."""
    return {(one.key, one.number) for one in lines(outputs) if one.what == "answered" and one.rest == "ok"}


def check(outputs: Iterable[Path], counts: dict[str, int], kills_ns: Collection[int], spared_s: float) -> str:
    """AssertionError unless each key's records came in order: the first deliveries always; otherwise, but
    for `spared_s` after a kill, no record while the one before it is held.
    """
    by_key: dict[str, list[Line]] = collections.defaultdict(list)
    for line in sorted(lines(outputs)):
        by_key[line.key].append(line)
    delivered = repeated = 0
    for key, count in counts.items():
        first: list[int] = []
        held: dict[int, str] = {}  # the member of each
        for line in by_key[key]:
            if line.what == "sent" and held.get(line.number) == line.member:
                del held[line.number]
            if line.what != "delivered":
                continue
            delivered += 1
            if line.number not in first:
                first.append(line.number)
            else:
                repeated += 1
            if not any(0 <= line.when_ns - kill_ns < spared_s * 1e9 for kill_ns in kills_ns):
                assert not held, f"F1: {line} came while {held} are held"
            held = {line.number: line.member}
        assert first == list(range(count)), f"F1: {key} came as {first}"
    return f"{delivered} deliveries, {repeated} of them repeated"


def run(bootstrap: str, group: str, topic: str, client: str) -> None:
    settings = {"bootstrap.servers": bootstrap, "group.id": group, "share.acknowledgement.mode": "explicit"}
    consumer = consumer_of(settings, client)
    consumer.subscribe([topic])

    def tell(what: str, value: str, rest: object) -> None:
        print(what, time.monotonic_ns(), value, rest)

    while True:
        taken = [message for message in consumer.poll(0.5) if message.error() is None]
        for message in taken:
            tell("delivered", message.value().decode(), message.delivery_count())
        sys.stdout.flush()
        released = set()
        for message in taken:
            value = message.value().decode()
            if value.endswith("3") and message.delivery_count() == 1:
                released.add(value)
            tell("sent", value, "-")
            consumer.acknowledge(message, AcknowledgeType.RELEASE if value in released else AcknowledgeType.ACCEPT)
        sys.stdout.flush()
        try:
            outcome = consumer.commit_sync(SECONDS) if taken else {}
        except KafkaException as failure:
            print("commit failed", failure.args[0])
            continue
        for message in taken:
            place = TopicPartition(message.topic(), message.partition())
            is_done = place in outcome and outcome[place] is None and message.value().decode() not in released
            tell("answered", message.value().decode(), "ok" if is_done else "no")
        sys.stdout.flush()


if __name__ == "__main__":
    run(*sys.argv[1:])
