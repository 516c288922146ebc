"""`mqd doctor` with a broker whose disk hangs, and with a group that cannot process a record: it
names cause and cure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from mqd import Consumer, Producer, TopicPartition
from mqd.cli.common import Settings
from mqd.cli.inspection.diagnosis import Finding, Harm
from mqd.cli.verbs.doctor import examine
from tests.broker import Broker
from tests.broker_files import faults_file
from tests.interaction.traffic import eventually


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    data_dir = tmp_path_factory.mktemp("ill") / "data"
    faults = faults_file(data_dir)
    with Broker(data_dir, workers=1, environment={"MQD_FILE_FAULTS": f"@{faults}"}) as running:
        yield running


def findings(broker: Broker, harm: Harm, word: str) -> list[Finding]:
    found = examine(Settings(broker.bootstrap), broker.data_dir)
    return [one for one in found if one.harm == harm and word in one.what]


def test_a_record_that_blocks_a_member(broker: Broker) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    for _ in range(3):
        producer.produce("jobs", b"poison", timestamp=1)
    assert producer.flush(60) == 0
    settings = {"bootstrap.servers": broker.bootstrap, "group.id": "workers", "enable.auto.commit": False}
    with contextlib.closing(Consumer(settings)) as consumer:
        consumer.subscribe(["jobs"])
        eventually(lambda: consumer.poll(0.1) is None and consumer.assignment(), "an assignment")
        consumer.commit(offsets=[TopicPartition("jobs", 0, 1)], asynchronous=False)
        (found,) = eventually(lambda: findings(broker, Harm.NUISANCE, "has not passed"), "the finding")
    assert found.what.startswith("group workers has members but has not passed offset 1 of jobs-0")
    assert "mqd consume jobs --partition 0 --offset 1 --count 1" in found.cure
    assert "mqd group seek workers jobs:0 --shift-by 1 --execute" in found.cure


def test_a_hung_disk(broker: Broker) -> None:
    assert findings(broker, Harm.OUTAGE, "disk") == []
    faults = broker.data_dir / "faults"
    rules = faults.with_suffix(".new")
    rules.write_text("sync:DELAY:.log:ms=20000")
    rules.replace(faults)
    producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 0})

    def written_and_found() -> list[Finding]:
        producer.produce("hung", b"value")
        producer.flush(0.5)  # it hangs: this is the interval between two examinations
        return findings(broker, Harm.OUTAGE, "the disk does not respond")

    try:
        (found,) = eventually(written_and_found, "the finding", 60)
        assert "hung-0" in found.what and "dmesg" in found.cure
    finally:
        rules.write_text("")
        rules.replace(faults)
        producer.flush(60)
