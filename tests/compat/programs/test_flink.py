"""Flink's exactly-once sink: a job copies a topic, while its tasks fail, its task manager and the
whole job are lost, and the broker's processes are killed. Committed readers see each record once.
"""

from __future__ import annotations

import collections
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from tests.broker import Broker
from tests.compat.java_client import build_java, java_program
from tests.compat.programs.program import CommittedReader, Program, kill_process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PARTITIONS = 2
STAGE = 3_000
# the event in the middle of a stage: the first two are triggered by a record (Copy.java)
EVENTS = ("fail", "mqd-worker-0", "job", "mqd-acceptor", "lose", "broker", "job")
PATIENCE_S = 180.0
GUARANTEE = "EXACTLY_ONCE"


def place(producer: Producer, stage: int) -> list[str]:
    """Writes the records of a stage; an event of the job itself is one of them."""
    event = EVENTS[stage] if stage < len(EVENTS) else ""
    numbers = range(stage * STAGE, (stage + 1) * STAGE)
    values = [str(number) for number in numbers]
    if event in ("fail", "lose"):
        values[STAGE // 2] = f"{event} {numbers[STAGE // 2]}"
    for value in values:
        producer.produce("in", value)
        producer.poll(0)
    assert producer.flush(PATIENCE_S) == 0
    return values


@pytest.mark.parametrize("naming", ("INCREMENTING", "POOLING"))
def test_each_record_is_copied_once(start_broker, tmp_path: Path, naming: str) -> None:
    home = build_java(Path(__file__).parent / "flink", "programs-flink")
    broker: Broker = start_broker(workers=2, config={"group.initial.rebalance.delay.ms": "0"})
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    for future in admin.create_topics([NewTopic(name, PARTITIONS, 1) for name in ("in", "out")]).values():
        future.result(60)
    producer = Producer({"bootstrap.servers": broker.bootstrap, "enable.idempotence": True})
    reader = CommittedReader(broker.bootstrap, {"out": PARTITIONS})
    job = Program(
        java_program(
            home, "mqd.programs.Copy", broker.bootstrap, str(tmp_path / "checkpoints"), GUARANTEE, naming, heap="384m"
        ),
        tmp_path / "job.out",
    )
    expected: list[str] = []
    with job:
        for stage, event in enumerate((*EVENTS, "")):
            expected += place(producer, stage)
            # before the event, some of this stage are committed, if that can be awaited
            reader.read_until(stage * STAGE + 1, PATIENCE_S, [job])
            if event == "job":
                job.restart()
            elif event not in ("fail", "lose", ""):
                kill_process(broker, event)
        reader.read_until(len(expected), PATIENCE_S, [job])
        reader.read(3.0)  # records that should not exist
        said = job.output.read_text(errors="replace")
        for event in ("fail", "lose"):
            assert f"\n{event} " in said, f"no task was made to {event}\n{job.tail()}"
        assert "begins from /" in said, f"the job was never restored\n{job.tail()}"
    reader.close()
    counts = collections.Counter(value for values in reader.values.values() for value in values)
    lost = [value for value in expected if value not in counts]
    twice = [value for value, count in counts.items() if count > 1]
    assert not lost and not twice, f"{len(lost)} lost {lost[:5]}, {len(twice)} twice {twice[:5]}\n{job.tail()}"
    assert counts.total() == len(expected)
