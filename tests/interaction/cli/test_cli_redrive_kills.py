"""`mqd queue redrive` is killed and run again, and so are the broker's processes: the record of
each letter is written back once, and the share group delivers it again.
"""

from __future__ import annotations

import collections
import contextlib
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from confluent_kafka import AcknowledgeType, Producer

from tests.broker import Broker
from tests.client_reading import read_all
from tests.compat.programs.program import kill_process
from tests.interaction.coordinator.test_dead_letters import Dead
from tests.interaction.coordinator.test_share_groups import committed, polled

pytestmark = pytest.mark.slow

RECORDS, KILLS, SECONDS = 2_000, 12, 120.0
PROCESSES = ("mqd-worker-0", "mqd-acceptor")


def redrive(dead: Dead, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mqd.cli.main", "queue", "redrive", dead.letters, *options]
    return subprocess.Popen(
        command,
        env={**os.environ, "MQD_BOOTSTRAP": dead.bootstrap},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def reject_all(dead: Dead) -> None:
    left = RECORDS
    with dead.consumer("explicit") as consumer:
        while left > 0:
            for _, message in polled(consumer):
                consumer.acknowledge(message, AcknowledgeType.REJECT)
                left -= 1
            committed(consumer)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("copied", ["true", "false"])
def test_each_record_comes_back_once(tmp_path: Path, copied: str) -> None:
    chance = random.Random(7)
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(Broker(tmp_path / "data"))
        dead = Dead(broker.bootstrap, partitions=2)
        dead.create_letters(partitions=2)
        dead.configure("errors.deadletterqueue.copy.record.enable", copied)
        dead.name_letters()
        producer = Producer({"bootstrap.servers": dead.bootstrap})
        for number in range(RECORDS):
            producer.produce(dead.topic, str(number), partition=number % 2)
        assert producer.flush(SECONDS) == 0
        reject_all(dead)
        assert len(read_all(broker, dead.letters, RECORDS, seconds=SECONDS)) == RECORDS

        kills = fenced = 0
        deadline = time.monotonic() + SECONDS
        for turn in range(1000):
            assert time.monotonic() < deadline, f"{kills} kills"
            if turn in (2, 5):
                kill_process(broker, PROCESSES[turn // 3])
            if turn in (1, 4):
                both = [redrive(dead, "--limit", "150", "--rate", "50") for _ in range(2)]
                printed = [one.communicate(timeout=SECONDS)[0] for one in both]
                fenced += sum("another redrive" in text for text in printed)
                continue
            # another filter each time
            options = ("--rate", "150") + (("--reason", "rejected") if turn % 3 == 0 else ())
            running = redrive(dead, *options)
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(chance.uniform(0.5, 3.0) if kills < KILLS else SECONDS)
            if running.poll() is None:
                running.kill()
                kills += 1
            text = running.communicate()[0]
            if running.returncode == 0 and text.startswith("0 records moved") and "--reason" not in options:
                break
        found = read_all(broker, dead.topic, 2 * RECORDS, seconds=SECONDS)
        counts = collections.Counter(one.value() for one in found if ("mqd-redriven", b"1") in (one.headers() or ()))
        assert counts == {str(number).encode(): 1 for number in range(RECORDS)}
        assert kills >= 3, f"the redrive was killed {kills} times only"
        assert fenced == 2, "the second redrive ends the first"
        print(f"{kills} kills of the redrive")
