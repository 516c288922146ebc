"""AsyncProducer and AsyncConsumer over implementations played by the test: cancellations at any
point.
"""

from __future__ import annotations

import asyncio
import gc
import queue
import subprocess
import sys
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from mqd.client import async_consumer, async_producer
from mqd.client.async_consumer import AsyncConsumer
from mqd.client.async_producer import AsyncProducer
from mqd.client.messages import KafkaError, KafkaException, TopicPartition, local_error


class FullProducer:
    """Its queue is full, whatever is reported."""

    def __init__(self, _config: object, **_more: object) -> None:
        self.requested = 0

    def produce(self, *_arguments: Any, **_named: Any) -> None:
        self.requested += 1
        raise BufferError("the queue is full")

    def poll(self, timeout: float) -> int:
        threading.Event().wait(timeout)
        return 0

    def flush(self) -> int:
        return 0

    def close(self) -> bool:
        return True


class FailingProducer:
    """The thread that serves its callbacks gets `problem` first, then the reports; flush() fails."""

    def __init__(self, config: dict[str, Any], **_more: object) -> None:
        self.problems = [config["problem"]]
        self.reports: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.closed = 0

    def produce(self, _topic: str, value: bytes, _key: None, _partition: int, on_delivery: Any, **_named: Any) -> None:
        self.reports.put((on_delivery, value))

    def poll(self, timeout: float) -> int:
        if self.problems:
            raise self.problems.pop()
        try:
            on_delivery, value = self.reports.get(timeout=timeout)
        except queue.Empty:
            return 0
        on_delivery(None, value)
        return 1

    def flush(self) -> int:
        raise KafkaException(local_error(KafkaError._FATAL, "restart this process", fatal=True))

    def close(self) -> bool:
        self.closed += 1
        return True


@pytest.mark.parametrize("problem", [ValueError("error_cb raised this"), SystemExit("error_cb raised this")])
def test_futures_complete_when_a_callback_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, problem: BaseException
) -> None:
    monkeypatch.setattr(async_producer, "Producer", FailingProducer)

    async def main() -> None:
        producer = AsyncProducer({"problem": problem})
        future = await producer.produce("events", b"record")
        assert await asyncio.wait_for(future, 10) == b"record"
        await producer.close()

    asyncio.run(main())
    assert "error_cb raised this" in caplog.text


def test_an_async_producer_that_cannot_flush_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_producer, "Producer", FailingProducer)

    async def main() -> AsyncProducer:
        producer = AsyncProducer(
            {"problem": KafkaException(local_error(KafkaError._FATAL, "restart this process", fatal=True))}
        )
        await producer.close()
        await producer.close()
        return producer

    producer = asyncio.run(main())
    assert producer._producer.closed == 1 and not producer._thread.is_alive()  # type: ignore[attr-defined]


class AloneProducer(FailingProducer):
    """Without a broker, which error_cb reports in the thread that flushes; then the broker returns,
    and everything is written. close() gives up the rest.
    """

    def __init__(self, config: dict[str, Any], **more: object) -> None:
        super().__init__({"problem": None})
        self.problems.clear()
        self._error_cb = {**config, **more}["error_cb"]

    def poll(self, _timeout: float) -> int:
        threading.Event().wait(0.01)
        return 0

    def _settle(self, error: KafkaError | None) -> None:
        while not self.reports.empty():
            on_delivery, value = self.reports.get()
            on_delivery(error, value)

    def flush(self) -> int:
        self._error_cb(local_error(KafkaError._TRANSPORT))
        self._settle(None)
        return 0

    def close(self) -> bool:
        self._settle(local_error(KafkaError._PURGE_QUEUE))
        return super().close()


@pytest.mark.parametrize(
    "problem",
    [ValueError("error_cb raised this"), RuntimeError("error_cb raised this"), SystemExit("error_cb raised this")],
)
@pytest.mark.parametrize("is_keyword", [False, True])
def test_an_error_callback_that_raises_does_not_end_the_flush_of_close(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, problem: BaseException, is_keyword: bool
) -> None:
    monkeypatch.setattr(async_producer, "Producer", AloneProducer)

    def error_cb(_error: KafkaError) -> None:
        raise problem

    async def main() -> None:
        producer = AsyncProducer({}, error_cb=error_cb) if is_keyword else AsyncProducer({"error_cb": error_cb})
        future = await producer.produce("events", b"record")
        await producer.close()
        assert await asyncio.wait_for(future, 10) == b"record"

    asyncio.run(main())
    assert "error_cb raised this" in caplog.text


def test_errors_of_every_turn_are_logged_with_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    polls, pauses, enough = [], [], threading.Event()

    class Event:
        def wait(self, _timeout: float) -> None:
            pauses.append(len(polls))
            if len(pauses) >= 3:
                enough.set()

    class Raising(FailingProducer):
        def poll(self, _timeout: float) -> int:
            polls.append(None)
            if enough.is_set() or len(polls) > 100:
                enough.set()
                return 0
            raise ValueError("a fault of ours")

    monkeypatch.setattr(async_producer, "Producer", Raising)
    monkeypatch.setattr(async_producer, "threading", SimpleNamespace(Thread=threading.Thread, Event=Event))

    async def main() -> None:
        producer = AsyncProducer({"problem": None})
        assert await asyncio.to_thread(enough.wait, 10)
        await producer.close()

    asyncio.run(main())
    assert pauses[:3] == [1, 2, 3]


def test_a_batch_of_dicts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reports come record by record, so the call never returned."""
    monkeypatch.setattr(async_producer, "Producer", FullProducer)
    monkeypatch.setattr(FullProducer, "produce_batch", lambda *_arguments, **_named: 1, raising=False)

    async def main() -> None:
        async with AsyncProducer({}) as producer:
            with pytest.raises(TypeError, match="await produce"):
                await asyncio.wait_for(producer.produce_batch("t", [{"value": b"x"}]), 0.5)

    asyncio.run(main())


@pytest.mark.parametrize("turns", range(5))
def test_a_cancellation_is_met_while_the_queue_is_full(monkeypatch: pytest.MonkeyPatch, turns: int) -> None:
    """Also in the turns of the loop in which reports are delivered."""
    monkeypatch.setattr(async_producer, "Producer", FullProducer)
    # nothing else wakes it for reports
    monkeypatch.setattr(
        async_producer, "threading", SimpleNamespace(Thread=lambda **_arguments: SimpleNamespace(start=lambda: None))
    )

    async def main() -> None:
        producer = AsyncProducer({})
        task = asyncio.get_running_loop().create_task(producer.produce("events", b"record"))
        while not producer._producer.requested:  # type: ignore[attr-defined]
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        producer._run_pending_calls()
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        for _ in range(10):  # turns, shorter than its polling interval
            await asyncio.sleep(0)
        assert task.cancelled()

    asyncio.run(main())


PROGRAM_LEFT_OPEN = """
import asyncio, threading
from mqd.client import async_consumer

class Implementation:
    def __init__(self):
        self.told = threading.Event()

    def take(self, count, timeout):
        self.told.wait()
        return []

    def interrupt(self):
        {interrupt}

    def uninterrupt(self):
        pass

class Consumer:
    def __init__(self, config, **more):
        self._implementation = Implementation()

async_consumer.Consumer = Consumer

async def main():
    consumer = async_consumer.AsyncConsumer()
    async with asyncio.timeout(0.01):
        async for message in consumer:
            pass

try:
    asyncio.run(main())
except TimeoutError:
    print("main has ended")
"""


@pytest.mark.parametrize("interrupt", ["self.told.set()", "pass"])
def test_a_program_that_leaves_its_consumer_open_ends(interrupt: str) -> None:
    """While an unbounded wait continues in the consumer's thread; also a consumer that receives
    nothing.
    """
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM_LEFT_OPEN.replace("{interrupt}", interrupt)],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "main has ended\n", "")


class Implementation:
    """take() returns at once; every call raises when requested."""

    def __init__(self) -> None:
        self.problem: BaseException | None = None
        self.threads: set[threading.Thread] = set()

    def take(self, count: int, _timeout: float | None) -> list[object]:
        self.threads.add(threading.current_thread())
        if self.problem is not None:
            raise self.problem
        return [object()] * count

    def interrupt(self) -> None:
        pass

    def uninterrupt(self) -> None:
        pass

    def give_back(self, messages: list[object]) -> None:
        assert not messages


@pytest.fixture
def implementation(monkeypatch: pytest.MonkeyPatch) -> Implementation:
    made = Implementation()
    monkeypatch.setattr(
        async_consumer,
        "Consumer",
        lambda _config, **_more: SimpleNamespace(_implementation=made, commit=None, close=lambda: None),
    )
    return made


def test_calls_get_their_results_from_one_thread(implementation: Implementation) -> None:
    async def main() -> None:
        consumer = AsyncConsumer()
        assert len(await consumer.getmany(3)) == 3 and len(await consumer.getmany(2)) == 2
        implementation.problem = ValueError("told")
        with pytest.raises(ValueError, match="told"):
            await consumer.getmany(1)

    asyncio.run(main())
    (thread,) = implementation.threads
    assert thread is not threading.current_thread() and thread.daemon


def test_a_garbage_collected_consumer_ends_its_thread(implementation: Implementation) -> None:
    async def main() -> weakref.ref[AsyncConsumer]:
        consumer = AsyncConsumer()
        await consumer.getmany(3)
        return weakref.ref(consumer)

    forgotten = asyncio.run(main())
    gc.collect()
    (thread,) = implementation.threads
    thread.join(30)
    assert forgotten() is None and not thread.is_alive()


def test_a_closed_consumer_raises(implementation: Implementation) -> None:
    async def main() -> None:
        async with AsyncConsumer() as consumer:
            await consumer.getmany(3)
        for call in (consumer.getmany(3), consumer.commit(), consumer.close()):
            with pytest.raises(RuntimeError, match="closed"):
                await asyncio.wait_for(call, 10)

    asyncio.run(main())
    (thread,) = implementation.threads
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.parametrize("by_close", [False, True], ids=["the wait", "close()"])
def test_a_consumer_whose_callback_raises_when_it_is_closed_is_closed(
    monkeypatch: pytest.MonkeyPatch, implementation: Implementation, by_close: bool
) -> None:
    """In the wait that close() ends, or in close() itself: the member left the group only when its
    session expired, and the thread stayed.
    """
    interrupted, calls = threading.Event(), []

    def take(_count: int, _timeout: float | None) -> list[object]:
        implementation.threads.add(threading.current_thread())
        interrupted.wait(30)
        if not by_close:
            raise ValueError("on_revoke's own")
        return []

    def close() -> None:
        calls.append("close")
        if by_close:
            raise ValueError("on_revoke's own")

    implementation.take, implementation.interrupt = take, interrupted.set  # type: ignore[method-assign]
    monkeypatch.setattr(
        async_consumer,
        "Consumer",
        lambda _config, **_more: SimpleNamespace(_implementation=implementation, close=close),
    )

    async def main() -> None:
        consumer = AsyncConsumer()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(consumer.getone(), 0.05)
        with pytest.raises(ValueError, match="on_revoke's own"):
            await asyncio.wait_for(consumer.close(), 10)
        assert calls == ["close"]

    asyncio.run(main())
    (thread,) = implementation.threads
    thread.join(30)
    assert not thread.is_alive()


def test_a_callback_that_raises_stop_iteration_ends_the_wait(
    monkeypatch: pytest.MonkeyPatch, implementation: Implementation
) -> None:
    """Like next() of an empty iterator. Futures cannot hold it: the wait never ended, nor did
    close().
    """

    def take(_count: int, _timeout: float | None) -> list[object]:
        implementation.threads.add(threading.current_thread())
        return next(iter(()))

    implementation.take = take  # type: ignore[method-assign]
    monkeypatch.setattr(
        async_consumer,
        "Consumer",
        lambda _config, **_more: SimpleNamespace(_implementation=implementation, close=lambda: next(iter(()))),
    )

    async def main() -> None:
        consumer = AsyncConsumer()
        with pytest.raises(RuntimeError) as raised:
            await asyncio.wait_for(consumer.getone(), 10)
        assert isinstance(raised.value.__cause__, StopIteration)
        with pytest.raises(RuntimeError):
            await asyncio.wait_for(consumer.close(), 10)

    asyncio.run(main())
    (thread,) = implementation.threads
    thread.join(30)
    assert not thread.is_alive()


def test_a_buffered_record_waits_for_a_cancelled_call(
    monkeypatch: pytest.MonkeyPatch, implementation: Implementation
) -> None:
    """The consumer's thread is still in that call, and a Consumer is for one thread at a time: a record
    from before a cancelled seek() was returned after it.
    """
    buffered: list[object] = ["before the seek", "more"]
    may_seek = threading.Event()

    def seek(_partition: object) -> None:
        assert may_seek.wait(30)
        buffered[0] = "after the seek"

    implementation.take = lambda _count, _timeout: [buffered.pop(0)]  # type: ignore[method-assign]
    implementation.take_ready = lambda: buffered.pop(0)  # type: ignore[attr-defined]
    monkeypatch.setattr(
        async_consumer, "Consumer", lambda _config, **_more: SimpleNamespace(_implementation=implementation, seek=seek)
    )

    async def main() -> None:
        consumer = AsyncConsumer()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(consumer.seek(TopicPartition("events", 0, 5)), 0.05)
        asyncio.get_running_loop().call_later(0.05, may_seek.set)
        assert await asyncio.wait_for(consumer.poll(), 10) == "after the seek"
        implementation.take = None  # type: ignore[assignment,method-assign]  # the next needs no thread
        assert await asyncio.wait_for(consumer.poll(), 10) == "more"

    asyncio.run(main())


def test_a_cancelled_call_that_has_not_begun_does_not_slow_later_ones(
    monkeypatch: pytest.MonkeyPatch, implementation: Implementation
) -> None:
    called: list[str] = []
    may_seek = threading.Event()
    implementation.take_ready = object  # type: ignore[attr-defined]
    monkeypatch.setattr(
        async_consumer,
        "Consumer",
        lambda _config, **_more: SimpleNamespace(
            _implementation=implementation, seek=lambda _: may_seek.wait(30), commit=lambda *_: called.append("commit")
        ),
    )

    async def main() -> None:
        consumer = AsyncConsumer()
        for call in (consumer.seek(TopicPartition("events", 0, 5)), consumer.commit()):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(call, 0.05)
        may_seek.set()
        assert await asyncio.wait_for(consumer.getmany(1), 10) and not called
        implementation.take = None  # type: ignore[assignment,method-assign]  # the next needs no thread
        assert await asyncio.wait_for(consumer.poll(), 10)

    asyncio.run(main())
