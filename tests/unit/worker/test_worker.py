"""How a worker orders its changes: what waits for what, and what an end interrupts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace

from mqd.cluster.host.messages import PartitionImage, TopicImage
from mqd.worker.catalog import Catalog
from mqd.worker.worker import Worker

TOPIC = b"t" * 16


def test_a_partition_that_failed_to_open_still_counts_as_failed_when_the_worker_ends() -> None:
    """Its log was not checked, so the directory must not be marked as clean."""

    async def once(*_: object) -> AsyncIterator[None]:
        yield

    catalog = Catalog(0)
    catalog.on_topic_put(TopicImage("t", TOPIC, [PartitionImage(0, 5, 0, 0, 1, 0, [1], [1])], {}))
    catalog.record_failure((TOPIC, 0), may_pass=True)
    worker = SimpleNamespace(
        _catalog=catalog,
        _applying=asyncio.Lock(),
        _stopping=asyncio.Event(),
        _mover=SimpleNamespace(report_again=lambda: None),
        _periodic_work=SimpleNamespace(ticks=once),
    )
    worker._stopping.set()
    asyncio.run(Worker._retry_failed(worker))  # type: ignore[arg-type]
    assert [owned.slot for owned in catalog.failed_partitions()] == [5]
