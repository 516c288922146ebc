"""Memory under everything at once: hostile frames, clients that do not read, trickle, or reconnect,
beside well-behaved ones. It reaches a plateau and stays there.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest

from mqd.protocol import encode_request, with_length
from mqd.protocol.messages import MetadataRequest
from tests.interaction.server.test_hostile_frames import mutate, valid_frames
from tests.interaction.traffic import (
    FETCH,
    FETCH_VERSION,
    PRODUCE_VERSION,
    Watch,
    batch,
    create_topic,
    fetch_request,
    log_end,
    must_produce,
    produce,
    produce_request,
    rss_bytes,
)
from tests.kafka_connection import ConnectionEnded

MIB = 1 << 20
SAMPLES, GROWTH_MAX = 12, 16 * MIB  # from the first third of the samples to the last


class Crowd:
    """Threads that each repeat one kind of action until stopped; errors of well-behaved ones are
    kept.
    """

    def __init__(self, watch: Watch) -> None:
        self.watch, self.stop, self.failures, self.rounds = watch, threading.Event(), [], {}
        self.threads: list[threading.Thread] = []
        with watch.connect() as kafka:
            self.topic_id = create_topic(kafka, "crowd", 4)
            create_topic(kafka, "honest", 2)
            for partition in range(4):
                must_produce(kafka, "crowd", partition, *[bytes(20_000)] * 20)

    def start(self, *kinds: Callable[[random.Random], None]) -> None:
        for seed, kind in enumerate(kinds):
            self.threads.append(
                threading.Thread(target=self._run, args=(kind, random.Random(seed)), name=kind.__name__)
            )
            self.threads[-1].start()

    def _run(self, kind: Callable[[random.Random], None], chance: random.Random) -> None:
        while not self.stop.is_set():
            try:
                kind(chance)
                self.rounds[kind.__name__] = self.rounds.get(kind.__name__, 0) + 1
            except (ConnectionEnded, OSError, AssertionError) as error:
                if kind.__name__.startswith("honest"):
                    self.failures.append(f"{kind.__name__}: {error!r}")
                    return

    def end(self) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()

    # -- well-behaved clients --

    def honest_producer(self, chance: random.Random) -> None:
        with self.watch.connect() as kafka:
            for _ in range(50):
                size = chance.choice((10, 1000, 50_000, 400_000))
                outcome = produce(kafka, "honest", chance.randrange(2), batch(bytes(size)))
                assert outcome.error_code == 0, outcome

    def honest_reader(self, chance: random.Random) -> None:
        with self.watch.connect() as kafka:
            for _ in range(50):
                partition = chance.randrange(2)
                end = log_end(kafka, "honest", partition)
                response = kafka.call(
                    FETCH, FETCH_VERSION, fetch_request("honest", {partition: max(0, end - 3)}, bytes_max=MIB)
                )
                assert response.error_code == 0

    # -- hostile clients --

    def mutants(self, chance: random.Random) -> None:
        seeds = valid_frames("crowd", self.topic_id)
        for _ in range(50):
            with self.watch.connect() as kafka:
                kafka.send_raw(with_length(mutate(chance.choice(seeds)[2], chance)))

    def deaf(self, chance: random.Random) -> None:
        frame = with_length(
            encode_request(
                fetch_request("crowd", dict.fromkeys(range(4), 0), bytes_max=chance.choice((4000, MIB))),
                FETCH_VERSION,
                1,
                "deaf",
            )
        )
        opened = [self.watch.connect() for _ in range(10)]
        for kafka in opened:
            kafka.socket.setblocking(False)
            kafka.socket.send(frame * 50)
        self.stop.wait(0.3)
        for kafka in opened:
            kafka.close()

    def trickle(self, chance: random.Random) -> None:
        frame = with_length(
            encode_request(produce_request("crowd", {0: batch(bytes(300_000))}), PRODUCE_VERSION, 1, "slow")
        )
        opened = [self.watch.connect() for _ in range(20)]
        for end in sorted(chance.randrange(1, len(frame)) for _ in range(5)):
            for kafka in opened:
                kafka.send_raw(frame[kafka.sent_bytes if hasattr(kafka, "sent_bytes") else 0 : end])
                kafka.sent_bytes = end
            self.stop.wait(0.05)
        for kafka in opened:
            kafka.close()

    def sessions(self, chance: random.Random) -> None:
        """New sessions all the time, of partitions that do not exist."""
        with self.watch.connect() as kafka:
            for _ in range(20):
                request = fetch_request(
                    f"none-{chance.randrange(1000)}", {index: 0 for index in range(chance.choice((1, 2000)))}
                )
                request.session_id, request.session_epoch = 0, 0
                kafka.call(FETCH, FETCH_VERSION, request)

    def long_polls(self, chance: random.Random) -> None:
        opened = [self.watch.connect() for _ in range(10)]
        every = with_length(encode_request(MetadataRequest(topics=None), 9, 1, "many"))
        for kafka in opened:
            kafka.send(FETCH, FETCH_VERSION, fetch_request("crowd", {0: 10**6}, max_wait_ms=10_000))
            kafka.send(FETCH, FETCH_VERSION, fetch_request("unheard-of", {0: 0}, max_wait_ms=10_000))
            kafka.send_raw(every * 30)
        self.stop.wait(0.2)
        for kafka in opened:
            kafka.close()


def _settles(watch: Watch, seconds: float, patience: float) -> None:
    """Within `patience` there must be a period of `seconds` in which the workers' memory does not
    grow. Until then arenas, pools and caches may fill; with a leak there is no such period.
    """
    crowd = Crowd(watch)
    pids = watch.worker_pids()
    crowd.start(
        crowd.honest_producer,
        crowd.honest_reader,
        crowd.mutants,
        crowd.deaf,
        crowd.trickle,
        crowd.sessions,
        crowd.long_polls,
    )
    names = {thread.name for thread in crowd.threads}
    levels: list[int] = []
    growth = 1 << 40
    try:
        until = time.monotonic() + patience
        while time.monotonic() < until and not (growth < GROWTH_MAX and set(crowd.rounds) == names):
            time.sleep(seconds / SAMPLES)
            levels.append(sum(map(rss_bytes, pids)))
            if len(levels) >= SAMPLES:
                growth = min(levels[-SAMPLES // 3 :]) - max(levels[-SAMPLES : -2 * SAMPLES // 3])
    finally:
        crowd.end()
    assert not crowd.failures, crowd.failures
    assert watch.worker_pids() == pids
    assert set(crowd.rounds) == names, f"somebody never came round: {crowd.rounds}"
    assert growth < GROWTH_MAX, f"resident bytes of the workers grow: {[round(level / MIB) for level in levels]} MiB"
    assert max(levels) < 400 * MIB, f"{[round(level / MIB) for level in levels]} MiB"
    watch.wait_quiet()


@pytest.mark.slow
def test_memory_reaches_a_plateau_in_seconds(start_broker):
    _settles(Watch(start_broker(config={"log.flush.on.ack": "false"})), 4.0, 60.0)


@pytest.mark.slow
def test_memory_reaches_a_plateau_in_a_minute(start_broker, io_backend):
    _settles(Watch(start_broker(config={"io.backend": io_backend, "log.flush.on.ack": "false"})), 60.0, 180.0)
