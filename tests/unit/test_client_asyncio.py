"""AsyncProducer and AsyncConsumer over implementations that are the test: what a cancellation meets."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from mqd.client import async_producer
from mqd.client.async_producer import AsyncProducer


class FullProducer:
    """Its queue is full, whatever is reported."""

    def __init__(self, _config: object, **_more: object) -> None:
        self.asked = 0

    def produce(self, *_arguments: Any, **_named: Any) -> None:
        self.asked += 1
        raise BufferError("the queue is full")

    def poll(self, _timeout: float) -> int:
        return 0


@pytest.mark.parametrize("turns", range(5))
def test_a_cancellation_is_met_while_the_queue_is_full(monkeypatch: pytest.MonkeyPatch, turns: int) -> None:
    """Also in the turns of the loop in which reports are handed out."""
    monkeypatch.setattr(async_producer, "Producer", FullProducer)
    monkeypatch.setattr(async_producer, "threading", SimpleNamespace(Thread=lambda **_arguments: SimpleNamespace(start=lambda: None)))  # nothing else tells of reports

    async def main() -> None:
        producer = AsyncProducer({})
        task = asyncio.get_running_loop().create_task(producer.produce("events", b"record"))
        while not producer._producer.asked:  # type: ignore[attr-defined]
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        producer._deliver()
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        for _ in range(10):  # turns, less than the time for which it waits before it looks again
            await asyncio.sleep(0)
        assert task.cancelled()

    asyncio.run(main())
