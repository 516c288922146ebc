"""Readers of mapped segments with everything at once: rolls every few batches, mixed codecs,
records deleted under them, seeks, their workers killed. They return every record from the position
on, once, in order, byte for byte.
"""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Callable

import pytest

from mqd.client.shm.reading import PartitionReader
from mqd.native import NativeError
from mqd.native.client import Client
from tests.broker import Broker
from tests.crash.processes import kill_and_wait
from tests.interaction.traffic import batch, create_topic, delete_records, log_end, produce
from tests.kafka_connection import ConnectionEnded, KafkaConnection

CONFIG = {"log.flush.on.ack": "false", "log.retention.check.interval.ms": "200", "log.segment.delete.delay.ms": "0"}
LATER = {5, 6, 7, 56}  # the leader will be back
ENDED = {errno.EPIPE, errno.ECONNRESET, errno.ETIMEDOUT, errno.ECONNREFUSED, errno.ENOENT}
CODECS = ["none"] * 6 + ["gzip", "snappy", "lz4", "zstd"]


def value(offset: int) -> bytes:
    return b"%d" % offset + b"." * (offset % 300)


class World:
    """Two partitions, a writer and two readers for each, until `ending`."""

    def __init__(self, broker: Broker, seed: int) -> None:
        self.broker, self.seed = broker, seed
        self.ending = threading.Event()
        self.problems: list[object] = []
        self.written = [0, 0]
        self.read = [0, 0, 0, 0]
        self.resets = self.moves = 0
        # values of batches whose response was lost, or at unexpected offsets: a killed worker may
        # have forwarded one
        self.displaced: list[set[bytes]] = [set(), set()]
        self.odd: list[tuple[int, int, bytes]] = []
        with KafkaConnection(port=broker.port) as kafka:
            self.topic_ids = [create_topic(kafka, f"t{i}", 1, segment_bytes="16384") for i in range(2)]

    def run(self, seconds: float, meanwhile: Callable[[], None]) -> None:
        threads = [threading.Thread(target=self._guarded, args=(self._write, i)) for i in range(2)]
        threads += [threading.Thread(target=self._guarded, args=(self._read, i)) for i in range(4)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + seconds
        try:
            # on a busy machine little may have happened by then
            while time.monotonic() < deadline + (0 if self.moves and self.resets else 60) and not self.problems:
                meanwhile()
        finally:
            self.ending.set()
            for thread in threads:
                thread.join(60)
        assert not self.problems, (self.seed, self.problems)
        assert not [(i, offset, found) for i, offset, found in self.odd if found not in self.displaced[i]]
        assert all(self.read) and all(self.written)

    def _guarded(self, work: Callable[[int], None], number: int) -> None:
        try:
            work(number)
        except Exception as error:  # noqa: BLE001
            self.problems.append((work.__name__, number, repr(error)))

    def _write(self, i: int) -> None:
        chance = random.Random(self.seed * 10 + i)
        while not self.ending.is_set():
            try:
                with KafkaConnection(port=self.broker.port) as kafka:
                    self.written[i] = log_end(kafka, f"t{i}", 0)
                    while not self.ending.is_set():
                        self._write_one(kafka, i, chance)
            except (ConnectionEnded, OSError, AssertionError):  # the last: log_end of a partition without leader
                self.ending.wait(0.05)

    def _write_one(self, kafka: KafkaConnection, i: int, chance: random.Random) -> None:
        base, count = self.written[i], chance.randrange(1, 30)
        values = [value(base + k) for k in range(count)]
        try:
            outcome = produce(kafka, f"t{i}", 0, batch(*values, compression=chance.choice(CODECS)))
        except (ConnectionEnded, OSError):
            self.displaced[i].update(values)
            raise
        if outcome.error_code in LATER:
            self.displaced[i].update(values)
            self.ending.wait(0.02)
            self.written[i] = log_end(kafka, f"t{i}", 0)
            return
        if outcome.error_code:
            self.problems.append(("produce", i, base, outcome))
        if outcome.base_offset != base:
            self.displaced[i].update(values)
        self.written[i] = outcome.base_offset + count
        if chance.random() < 0.003:
            delete_records(kafka, f"t{i}", 0, max(0, self.written[i] - chance.randrange(3000)))

    def _read(self, me: int) -> None:
        chance = random.Random(self.seed * 10 + 5 + me)
        client: Client | None = None
        reader: PartitionReader | None = None
        while not self.ending.is_set() and not self.problems:
            try:
                if client is None:
                    client = Client(self.broker.data_dir / "run" / "client.sock", timeout_ms=5000)
                    if reader is None:
                        reader = PartitionReader(client, f"t{me % 2}", self.topic_ids[me % 2], 0, 0)
                    else:
                        reader.move(client)
                        self.moves += 1
                assert reader is not None
                self._read_one(me, reader, chance)
            except NativeError as error:
                if error.errno not in ENDED:
                    raise
                if client is not None:
                    client.close()
                client = None
                self.ending.wait(0.05)
        if reader is not None:
            reader.close()
        if client is not None:
            client.close()

    def _read_one(self, me: int, reader: PartitionReader, chance: random.Random) -> None:
        position = reader.position
        view = reader.read(chance.choice([1, 10, 1000, 100_000]), chance.choice([1, 5000, 1 << 20]))
        if view is None:
            problem = reader.take_problem()
            if problem is None:
                self.ending.wait(0.0005)
            elif problem.kind == "range":
                self.resets += 1
                reader.seek(max(0, reader.log_start()))
            elif problem.kind == "gone" and problem.code in LATER:
                self.ending.wait(0.01)
            else:
                self.problems.append((me, position, problem))
            return
        if view.offsets.tolist() != list(range(position, position + len(view))) or reader.position != position + len(
            view
        ):
            self.problems.append((me, position, "offsets", view))
        self.odd += [(me % 2, offset, found) for offset, _, _, found in view.records() if found != value(offset)]
        self.read[me] += len(view)
        if chance.random() < 0.01:
            reader.seek(max(0, reader.position - chance.randrange(20_000)))


@pytest.mark.parametrize(("seed", "seconds"), [(1, 4.0), pytest.param(2, 60.0, marks=pytest.mark.slow)])
def test_every_record_is_read_once_and_in_order_under_faults(start_broker, seed: int, seconds: float) -> None:
    broker = start_broker(workers=2, config=CONFIG)
    world, chance = World(broker, seed), random.Random(seed)

    def kill() -> None:
        world.ending.wait(chance.uniform(0.3, 1.5))
        kill_and_wait(broker, f"mqd-worker-{chance.randrange(2)}")

    world.run(seconds, kill)
    assert world.moves and world.resets
