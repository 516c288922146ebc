"""A bit flips in a stored segment: the broker detects and reports it without being asked, and
serves everything else.
"""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mqd.log.dump import dump_segment
from tests.broker import Broker
from tests.interaction.traffic import create_topic, delete_records, eventually, fetch, must_produce, read_batches
from tests.kafka_connection import KafkaConnection

SEGMENT_BYTES = 4096
BATCH_COUNT = 24
VALUE = b"v" * 900


def corrupt_segments(broker: Broker) -> dict[tuple[str, str], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{broker.status()['metrics_port']}/metrics", timeout=60) as response:
        families = text_string_to_metric_families(response.read().decode())
    (family,) = [family for family in families if family.name == "mqd_corrupt_segments"]
    return {(sample.labels["topic"], sample.labels["partition"]): sample.value for sample in family.samples}


def damage_lines(broker: Broker) -> list[str]:
    logs = sorted((broker.data_dir / "logs").glob("mqd-worker-*.log"))
    return [line for path in logs for line in path.read_text().splitlines() if "stored segment is damaged" in line]


def flip_a_bit(path: Path, position: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 16]))


def test_a_flipped_bit_is_reported_and_nothing_else_is_affected(start_broker) -> None:
    broker: Broker = start_broker(
        workers=2, config={"log.scrub.interval.ms": "1000", "log.segment.bytes": str(SEGMENT_BYTES)}
    )
    with KafkaConnection(port=broker.port) as kafka:
        create_topic(kafka, "t", 3)
        for partition in range(3):
            for _ in range(BATCH_COUNT):
                must_produce(kafka, "t", partition, VALUE)
        directory = broker.data_dir / "log" / "t-1"
        segment = sorted(directory.glob("*.log"))[2]
        bad, after = list(dump_segment(segment))[1:3]
        assert corrupt_segments(broker) == {("t", str(partition)): 0 for partition in range(3)}
        assert not damage_lines(broker)

        flip_a_bit(segment, bad.position + 100)

        (line,) = eventually(lambda: damage_lines(broker), lambda: f"the line\n{broker.logs()}")
        fields = dict(re.findall(r"(\w+)=(\"[^\"]*\"|\S+)", line))
        assert " ERROR " in line
        assert (fields["partition"], fields["segment"], fields["position"]) == ("t-1", segment.name, str(bad.position))
        assert (
            fields["next_sound_offset"] == str(after.base_offset)
            and "CRC" in fields["reason"]
            and str(segment) in fields["see"]
        )
        eventually(
            lambda: corrupt_segments(broker) == {("t", "0"): 0, ("t", "1"): 1, ("t", "2"): 0},
            lambda: str(corrupt_segments(broker)),
        )

        for partition in (0, 2):
            must_produce(kafka, "t", partition, VALUE)
            assert len(list(read_batches(kafka, "t", partition))) == BATCH_COUNT + 1
        must_produce(kafka, "t", 1, VALUE)
        assert fetch(kafka, "t", 1, after.base_offset).error_code == 0

        # the operator's options: restore the bit, or give up the records
        flip_a_bit(segment, bad.position + 100)
        eventually(lambda: corrupt_segments(broker)["t", "1"] == 0, "the segment is sound again")
        flip_a_bit(segment, bad.position + 100)
        eventually(lambda: corrupt_segments(broker)["t", "1"] == 1, "damaged again")
        assert delete_records(kafka, "t", 1, after.base_offset) == after.base_offset
        eventually(lambda: corrupt_segments(broker)["t", "1"] == 0, "the bad batch cannot be read any more")
        flip_a_bit(segment, after.position + 100)
        eventually(
            lambda: corrupt_segments(broker)["t", "1"] == 1, "what lies behind the given-up batch is still looked at"
        )
        eventually(lambda: len(damage_lines(broker)) >= 3, "a line each")
        assert len(damage_lines(broker)) == 3, f"checked every second, reported once a day\n{broker.logs()}"


@pytest.mark.slow
def test_damage_is_remembered_across_a_restart_and_can_be_switched_off(start_broker) -> None:
    broker: Broker = start_broker(
        workers=1, config={"log.scrub.interval.ms": "1000", "log.segment.bytes": str(SEGMENT_BYTES)}
    )
    with KafkaConnection(port=broker.port) as kafka:
        create_topic(kafka, "t", 1)
        for _ in range(BATCH_COUNT):
            must_produce(kafka, "t", 0, VALUE)
    segment = sorted((broker.data_dir / "log" / "t-0").glob("*.log"))[0]
    flip_a_bit(segment, 100)
    eventually(lambda: corrupt_segments(broker) == {("t", "0"): 1}, lambda: f"found\n{broker.logs()}")
    assert broker.stop() == 0
    broker.config["log.scrub.interval.ms"] = "604800000"
    broker.start()
    assert corrupt_segments(broker) == {("t", "0"): 1}
    eventually(lambda: len(damage_lines(broker)) == 2, lambda: f"looked at first, not in a day\n{broker.logs()}")
    assert broker.stop() == 0
    broker.config["log.scrub.interval.ms"] = "-1"
    broker.start()
    eventually(lambda: corrupt_segments(broker) == {("t", "0"): 0}, "without a scrub the count is 0")
