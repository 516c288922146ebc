"""Bits that flip on the disk: detected and reported with topic, partition and position; nothing
else is affected, before and after a restart.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mqd.log.checkpoints import RECOVERY_POINT
from mqd.protocol.records import has_valid_crc, iterate_batches
from tests.broker import Broker
from tests.interaction.traffic import Watch, create_topic, fetch, log_end, must_produce, read_batches
from tests.preloaded import PRELOADED
from tests.tiers import quick

COUNT = 40
DAMAGED = 20  # the number (and offset) of the damaged batch


@pytest.fixture
def broker(start_broker) -> Broker:
    return start_broker()


def _fill(watch: Watch) -> Path:
    """Writes two partitions of COUNT batches of one record each; returns the segment of the first."""
    with watch.connect() as kafka:
        create_topic(kafka, "t", 2)
        for number in range(COUNT):
            for partition in (0, 1):
                assert must_produce(kafka, "t", partition, b"%d-%d " % (partition, number) + bytes(3000)) == number
    return watch.broker.data_dir / "log" / "t-0" / f"{0:020}.log"


def _flip(segment: Path, batch_number: int, within: int) -> int:
    """Flips one bit at byte `within` of the batch; returns its position in the file."""
    data = segment.read_bytes()
    position = 0
    for _ in range(batch_number):
        position += 12 + int.from_bytes(data[position + 8 : position + 12], "big")
    with segment.open("r+b") as file:  # in place, as a disk would
        file.seek(position + within)
        file.write(bytes([data[position + within] ^ 0x10]))
    return position


def _forget_checkpoints(broker: Broker) -> None:
    """As if the broker had been killed before its first checkpoint, which is written within
    CHECKPOINT_S of a start.
    """
    for path in (broker.data_dir / "log").glob(f"{RECOVERY_POINT}.*"):
        path.unlink()


def _size_of(segment: Path, position: int) -> int:
    return 12 + int.from_bytes(segment.read_bytes()[position + 8 : position + 12], "big")


def _verify(broker: Broker) -> tuple[int, dict[str, str]]:
    """Exit code, and the problems by partition."""
    done = PRELOADED.run("log", "verify", str(broker.data_dir / "log"), "--format", "json")
    reports = json.loads(done.stdout)
    wrong = {
        Path(one["path"]).name: "; ".join(segment["problem"] or "" for segment in one["segments"])
        for one in reports
        if one["damaged"]
    }
    return done.returncode, wrong


def _check_other_partitions(watch: Watch) -> None:
    with watch.connect() as kafka:
        end = log_end(kafka, "t", 1)
        stored = list(read_batches(kafka, "t", 1))
        assert len(stored) == end and all(map(has_valid_crc, stored))
        assert must_produce(kafka, "t", 1, b"goes on") == end
        must_produce(kafka, "t", 0, b"goes on here too")


def test_a_flipped_bit_in_a_record_is_detected_by_clients_and_verify(broker):
    watch = Watch(broker)
    segment = _fill(watch)
    assert _verify(broker)[0] == 0
    position = _flip(segment, DAMAGED, 200)
    for restart in (False, True):
        if restart:
            broker.stop()
            broker.start()
            watch = Watch(broker)
        with watch.connect() as kafka:
            stored = list(read_batches(kafka, "t", 0))
            assert [number for number, data in enumerate(stored) if not has_valid_crc(data)] == [DAMAGED]
        code, wrong = _verify(broker)
        assert code == 1 and list(wrong) == ["t-0"] and f"position {position}" in wrong["t-0"], wrong
        _check_other_partitions(watch)


def _read_before_the_damage(watch: Watch) -> None:
    with watch.connect() as kafka:
        offsets: list[int] = []
        while len(offsets) < DAMAGED:
            outcome = fetch(kafka, "t", 0, len(offsets), bytes_max=8000)
            assert outcome.error_code == 0 and outcome.records, outcome
            before = len(offsets)
            for header, data in iterate_batches(outcome.records, allow_partial=True):
                if header.base_offset >= DAMAGED or not has_valid_crc(data):
                    break
                offsets.append(header.base_offset)
            assert len(offsets) > before
        assert offsets == list(range(DAMAGED))
        for number in range(DAMAGED, COUNT):  # each read must get a response, even if it is an error
            fetch(kafka, "t", 0, number, bytes_max=8000)


@pytest.mark.parametrize("within", quick([8, 10, 3], [10]), ids=["length-large", "length", "base-offset"])
def test_a_flipped_bit_in_a_header_stops_readers_only_there(broker, within):
    """A false length or offset: records before it can still be read, and no reader hangs, crashes
    or takes other bytes for a batch.
    """
    watch = Watch(broker)
    segment = _fill(watch)
    position = _flip(segment, DAMAGED, within)
    # an offset that is too high is detected at the next one, which is lower
    found_at = position if within != 3 else position + _size_of(segment, position)
    for restart in (False, True):
        if restart:
            broker.stop()
            broker.start()
            watch = Watch(broker)
        pids = watch.worker_pids()
        _read_before_the_damage(watch)
        code, wrong = _verify(broker)
        assert code == 1 and list(wrong) == ["t-0"] and f"position {found_at}" in wrong["t-0"], wrong
        _check_other_partitions(watch)
        assert watch.worker_pids() == pids


@pytest.mark.parametrize("within", quick([8, 10, 200], [10, 200]), ids=["length-large", "length", "record"])
def test_damage_found_by_recovery_is_truncated_and_reported(start_broker, within):
    """After a crash everything above the checkpoint is scanned: the log is truncated at the first
    invalid batch, and a log line reports it.
    """
    broker = start_broker()
    watch = Watch(broker)
    position = _flip(_fill(watch), DAMAGED, within)
    broker.kill_all()
    _forget_checkpoints(broker)
    broker.start()
    watch = Watch(broker)
    watch.wait_logged("partition=t-0", str(position), logs="mqd-worker-*.log")
    with watch.connect() as kafka:
        assert log_end(kafka, "t", 0) == DAMAGED and log_end(kafka, "t", 1) == COUNT
        assert len(list(read_batches(kafka, "t", 0))) == DAMAGED
    _check_other_partitions(watch)
    assert _verify(broker) == (0, {})
