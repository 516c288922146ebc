"""Spring Kafka's retry topics, while the program and the broker's processes are killed: each record
succeeds or ends at the dead letter handler, at least once, and none in the wrong place.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from tests.broker import Broker
from tests.compat.java_client import build_java, java_program
from tests.compat.programs.program import CommittedReader, Program, kill_process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PARTITIONS = 2
STAGE = 300
KILLS = ("mqd-acceptor", "program", "mqd-worker-0", "broker", "program")
PATIENCE_S = 180.0
ATTEMPTS = 4  # of Retries.java


def outcome(number: int) -> tuple[str, str]:
    """Topic and value."""
    if number % 7 == 0:
        return "dead", f"{number} jobs"
    return "done", f"{number} {3 if number % 5 == 0 else 1}"


def test_each_record_succeeds_or_is_dead_lettered(start_broker, tmp_path: Path) -> None:
    home = build_java(Path(__file__).parent / "spring", "programs-spring")
    broker: Broker = start_broker(workers=2, config={"group.initial.rebalance.delay.ms": "0"})
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    for future in admin.create_topics([NewTopic(name, PARTITIONS, 1) for name in ("jobs", "done", "dead")]).values():
        future.result(60)
    producer = Producer({"bootstrap.servers": broker.bootstrap, "enable.idempotence": True})
    reader = CommittedReader(broker.bootstrap, {"done": PARTITIONS, "dead": PARTITIONS})
    program = Program(java_program(home, "mqd.programs.Retries", broker.bootstrap), tmp_path / "retries.out")

    def seen() -> set[tuple[str, str]]:
        return {(topic, value) for (topic, _), values in reader.values.items() for value in values}

    with program:
        for stage, victim in enumerate((*KILLS, "")):
            for number in range(stage * STAGE, (stage + 1) * STAGE):
                producer.produce("jobs", str(number), str(number))
            assert producer.flush(PATIENCE_S) == 0
            # in the middle of this stage: some are done, and some wait for their retries
            first = {outcome(number) for number in range(stage * STAGE, stage * STAGE + STAGE)}
            reader.read_while(lambda: not first & seen(), PATIENCE_S, [program])
            if victim == "program":
                program.restart()
            elif victim:
                kill_process(broker, victim)
        expected = {outcome(number) for number in range((len(KILLS) + 1) * STAGE)}
        reader.read_while(lambda: not expected <= seen(), PATIENCE_S, [program])
        reader.read(3.0)  # records that should not exist
    reader.close()
    wrong = seen() - expected
    assert not wrong, f"{len(wrong)} in the wrong place: {sorted(wrong)[:5]}\n{program.tail()}"
    topics = admin.list_topics(timeout=60).topics
    delays = [200 * 2**attempt for attempt in range(ATTEMPTS - 1)]
    assert {f"jobs-retry-{delay}" for delay in delays} | {"jobs-dlt"} <= set(topics), sorted(topics)
