"""AsyncProducer: Producer for asyncio, with the calls of confluent_kafka.aio.AIOProducer, plus produce_batch()."""

from __future__ import annotations

import asyncio
import collections
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from mqd.client.messages import BatchDelivery, KafkaError, KafkaException, Message
from mqd.client.producer import Producer

_POLL_S = 1.0
_PAUSE_S = 0.1
_CALLBACKS = ("error_cb", "stats_cb", "throttle_cb")

_log = logging.getLogger("mqd.client")


class AsyncProducer:
    """Producer whose delivery reports are futures.

        async with AsyncProducer({"bootstrap.servers": "127.0.0.1:9092"}) as producer:
            future = await producer.produce("events", b"...", key=b"k")     # accepted; waits while the queue is full
            message = await future                                         # written; or raises KafkaException
            deliveries = await producer.produce_batch("events", values)    # all written

    Create and use it in one event loop. `config` is that of Producer. One thread serves the reports.
    error_cb, stats_cb and throttle_cb are called in any thread; their exceptions are logged.
    """

    def __init__(self, config: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        self._loop = asyncio.get_running_loop()
        self._producer = Producer(
            _guard_callbacks(config) if isinstance(config, Mapping) else config, **_guard_callbacks(more)
        )
        self._pending_calls: collections.deque[tuple[Callable[..., None], Any]] = collections.deque()
        self._is_run_scheduled = False
        self._room_available = asyncio.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, name="mqd-async-producer", daemon=True)
        self._thread.start()

    @property
    def transport(self) -> str:
        """ "shm" or "tcp"."""
        return self._producer.transport

    @property
    def transport_reason(self) -> str:
        return self._producer.transport_reason

    async def produce(
        self,
        topic: str,
        value: bytes | str | None = None,
        key: bytes | str | None = None,
        partition: int = -1,
        timestamp: int = 0,
        headers: Any = None,
    ) -> asyncio.Future[Message]:
        """Accepts one record, waiting while the queue is full. The future gets the record's Message when
        it is written, or a KafkaException.
        """
        future: asyncio.Future[Message] = self._loop.create_future()

        def report(error: KafkaError | None, message: Message) -> None:
            self._call_in_loop(_complete, (future, error, message))

        while True:
            self._room_available.clear()
            try:
                self._producer.produce(
                    topic, value, key, partition, on_delivery=report, timestamp=timestamp, headers=headers
                )
                return future
            except BufferError:
                await self._wait_for_room()

    async def produce_batch(
        self,
        topic: str,
        values: Any,
        keys: Any = None,
        headers: Any = None,
        partition: Any = -1,
        timestamps: Any = None,
    ) -> list[BatchDelivery]:
        """Writes many records, and returns when all are written. The arguments have the same types as
        in Producer.produce_batch, except that dicts are not accepted: await produce() for each. If a
        record batch fails, raises the first KafkaException once all record batches have a result.
        """
        if isinstance(values, list) and values and isinstance(values[0], dict):
            raise TypeError("values is a list of dicts; await produce() for each of them")
        finished: asyncio.Future[list[BatchDelivery]] = self._loop.create_future()
        deliveries: list[BatchDelivery] = []
        state = _BatchState()

        def finish_if_complete() -> None:
            if (
                state.accepted_count is not None
                and state.reported_count >= state.accepted_count
                and not finished.done()
            ):
                if state.error is not None:
                    finished.set_exception(KafkaException(state.error))
                else:
                    finished.set_result(deliveries)

        def add_delivery(error: KafkaError | None, delivery: BatchDelivery) -> None:
            state.reported_count += delivery.count
            state.error = state.error or error
            if error is None:
                deliveries.append(delivery)
            finish_if_complete()

        def report(error: KafkaError | None, delivery: BatchDelivery) -> None:
            self._call_in_loop(add_delivery, (error, delivery))

        accepted = await self._loop.run_in_executor(
            None,
            lambda: self._producer.produce_batch(
                topic, values, keys, headers=headers, partition=partition, timestamps=timestamps, on_delivery=report
            ),
        )
        state.accepted_count = accepted
        finish_if_complete()
        return await finished

    async def _wait_for_room(self) -> None:
        try:
            # not wait_for(): it loses a cancellation that arrives in the same iteration as the event
            async with asyncio.timeout(0.01):
                await self._room_available.wait()
        except TimeoutError:
            pass

    def __len__(self) -> int:
        return len(self._producer)

    def __bool__(self) -> bool:
        return True

    async def flush(self, timeout: float = -1) -> int:
        """Like Producer.flush."""
        return await self._loop.run_in_executor(None, self._producer.flush, timeout)

    async def purge(self, in_queue: bool = True, in_flight: bool = True) -> None:
        """Like Producer.purge; the futures get a KafkaException."""
        self._producer.purge(in_queue, in_flight)

    async def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any:
        """Like Producer.list_topics."""
        return await self._loop.run_in_executor(None, self._producer.list_topics, topic, timeout)

    async def init_transactions(self, timeout: float = -1) -> None:
        await self._loop.run_in_executor(None, self._producer.init_transactions, timeout)

    async def begin_transaction(self) -> None:
        await self._loop.run_in_executor(None, self._producer.begin_transaction)

    async def send_offsets_to_transaction(self, positions: list[Any], group_metadata: Any, timeout: float = -1) -> None:
        await self._loop.run_in_executor(
            None, self._producer.send_offsets_to_transaction, positions, group_metadata, timeout
        )

    async def commit_transaction(self, timeout: float = -1) -> None:
        await self._loop.run_in_executor(None, self._producer.commit_transaction, timeout)

    async def abort_transaction(self, timeout: float = -1) -> None:
        await self._loop.run_in_executor(None, self._producer.abort_transaction, timeout)

    async def close(self) -> None:
        """Flushes, then closes the producer."""
        if self._is_closing:
            return
        try:
            await self._loop.run_in_executor(None, self._producer.flush)
        except Exception as error:  # a fatal error is reported by the futures
            _log.warning("an AsyncProducer could not be flushed when it was closed: %r", error)
        self._is_closing = True
        try:
            await self._loop.run_in_executor(None, self._producer.close)
        finally:
            await self._loop.run_in_executor(None, self._thread.join)
            self._run_pending_calls()

    async def __aenter__(self) -> AsyncProducer:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    # -- the thread that serves reports ------------------------------------------------------------

    def _serve(self) -> None:
        while not self._is_closing:
            try:
                self._producer.poll(_POLL_S)
            except (KafkaException, RuntimeError):
                if self._is_closing:
                    return
                threading.Event().wait(_POLL_S)  # fatal errors are reported by the futures
            except BaseException:  # without this thread no future would ever be completed
                _log.exception("an AsyncProducer could not serve its reports")
                threading.Event().wait(_PAUSE_S)  # the next iteration may fail for the same reason

    def _call_in_loop(self, function: Callable[..., None], arguments: Any) -> None:
        """Has the loop call the function; for any thread. The loop is woken once for many calls."""
        self._pending_calls.append((function, arguments))
        if not self._is_run_scheduled:
            self._is_run_scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._run_pending_calls)
            except RuntimeError:
                pass  # the loop is closed: no caller waits

    def _run_pending_calls(self) -> None:
        self._is_run_scheduled = False
        while self._pending_calls:
            function, arguments = self._pending_calls.popleft()
            function(*arguments)
        self._room_available.set()


def _guard_callbacks(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration with callbacks that log their exceptions. Otherwise an exception would
    end the flush(), the batch or the commit that happens to serve the callback.
    """
    return {
        key: _log_exceptions(key, value) if key in _CALLBACKS and callable(value) else value
        for key, value in config.items()
    }


def _log_exceptions(name: str, callback: Callable[[Any], object]) -> Callable[[Any], None]:
    def call(argument: Any) -> None:
        try:
            callback(argument)
        except BaseException:  # sys.exit() too: it would only end the thread that serves the reports
            _log.exception("%s of an AsyncProducer raised", name)

    return call


class _BatchState:
    def __init__(self) -> None:
        self.reported_count = 0
        self.accepted_count: int | None = None  # None: produce_batch() has not returned yet
        self.error: KafkaError | None = None


def _complete(future: asyncio.Future[Message], error: KafkaError | None, message: Message) -> None:
    if future.done():
        return  # cancelled
    if error is not None:
        future.set_exception(KafkaException(error))
    else:
        future.set_result(message)
