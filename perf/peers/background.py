"""What else a broker does while a latency is measured: more readers, a reader far behind, a producer at
full speed. The driver's own processes do it, so any peer can be measured this way.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from perf.peers.driving import Driver
from perf.peers.peer import Load, Peer
from perf.peers.plan import BASE, CATCH_UP, NEIGHBOUR, READERS

READERS_MORE = 9  # the tenth belongs to the measurement
RECORDS_BEHIND = 400_000  # of 1 KiB: more than any client's buffers, less than the page cache
MILLISECONDS_MAX = 10_000


@contextlib.contextmanager
def beside(
    kind: str, peer: Peer, driver: Driver, topic: str, load: Load, other: str, *, records: int, milliseconds: int
) -> Iterator[None]:
    """Runs another load, of this `kind`, during the with block. `topic`, `load`: the measured ones; `other`:
    a topic of the load BASE; `records`: how many the measurement writes, in `milliseconds`. Raises
    LoadFailed.
    """
    ended = threading.Event()
    behind = 0
    if kind == CATCH_UP:
        behind = driver.produce(peer, other, BASE, records=RECORDS_BEHIND, milliseconds=MILLISECONDS_MAX)["stored"]

    def read() -> None:
        driver.consume(peer, topic, load, records=records + load.partitions)

    def catch_up() -> None:
        while not ended.is_set():
            driver.consume(peer, other, BASE, records=behind)

    def produce() -> None:
        driver.produce(peer, other, BASE, records=milliseconds * 2000, milliseconds=milliseconds)

    jobs: dict[str, list[Callable[[], None]]] = {
        READERS: [read] * READERS_MORE,
        CATCH_UP: [catch_up],
        NEIGHBOUR: [produce],
    }
    with ThreadPoolExecutor(READERS_MORE) as pool:
        running = [pool.submit(job) for job in jobs[kind]]
        try:
            yield
        finally:
            ended.set()
    for job in running:
        job.result()
