"""AsyncConsumer: the Consumer for asyncio.

Blocking calls run on the consumer's own thread; a record that is already buffered is returned on
the event loop, without that thread.

    A1  cancellation loses no records: a cancelled wait continues, and its records are returned by
        the next call, or are read again; until then they are not committed
    A2  another call interrupts a wait that is under way: commit() does not queue behind a poll()
        without a timeout
    A3  a program that ends without close() is not blocked by a wait without a timeout
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import inspect
import os
import queue
import threading
import weakref
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from mqd.client.consumer import Consumer
from mqd.client.messages import KafkaException, Message, TopicPartition

EXIT_WAIT_S = 1.0  # how long the interpreter's exit waits for a call to end


class _CallThread:
    """Runs calls one after another in its own thread. Unlike an executor's threads, it does not delay
    the interpreter's exit (A3).
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._has_ended = False
        self._queued_count = self._done_count = 0  # calls; each number is changed by one thread only

    @property
    def is_busy(self) -> bool:
        """Whether a call is in the queue or under way, even if its caller was cancelled."""
        return self._done_count != self._queued_count

    def call(self, function: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        """Calls the function in the thread. Returns a future of the running loop. Raises RuntimeError
        after end().
        """
        if self._has_ended:
            raise RuntimeError("Consumer closed")
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Any] = loop.create_future()

        def complete(setter: Callable[[Any], None], result: Any) -> None:
            if not outcome.done():
                setter(result)

        def finish(setter: Callable[[Any], None], result: Any) -> None:
            self._done_count += 1  # must come first: once it continues, the caller may use the consumer itself
            with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits
                loop.call_soon_threadsafe(complete, setter, result)

        def run_call() -> None:
            try:
                result = function(*arguments) if not outcome.cancelled() else None
            except StopIteration as error:  # raised by a callback; a future does not accept it
                stopped = RuntimeError("a callback has raised StopIteration")
                stopped.__cause__ = error
                finish(outcome.set_exception, stopped)
            except BaseException as error:
                finish(outcome.set_exception, error)
            else:
                finish(outcome.set_result, result)

        if self._thread is None:
            thread = threading.Thread(target=self._run, name="mqd-async-consumer", daemon=True)
            thread.start()
            self._thread = thread
        self._queued_count += 1
        self._queue.put(run_call)
        return outcome

    def end(self, wait_s: float = 0) -> None:
        """Ends the thread after the calls in the queue."""
        self._has_ended = True
        self._queue.put(None)
        if self._thread is not None and wait_s:
            self._thread.join(wait_s)

    def _run(self) -> None:
        while (run_call := self._queue.get()) is not None:
            run_call()
            del run_call  # otherwise it would keep alive a consumer that is dropped without close()


class AsyncConsumer:
    """Consumer with the methods of mqd.Consumer as coroutines, and iteration.

        config = {"bootstrap.servers": "127.0.0.1:9092", "group.id": "app"}
        async with AsyncConsumer(config) as consumer:
            await consumer.subscribe(["events"])
            async for message in consumer:          # errors are raised as KafkaException
                handle(message.value())

    For one event loop, and one task at a time. Callbacks of subscribe() may be coroutine functions
    (run on the loop) or functions (run in the consumer's thread).
    """

    def __init__(self, config: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        self._consumer = Consumer(config, **more)
        self._implementation = self._consumer._implementation
        self._calls = _CallThread()
        self._lock = asyncio.Lock()
        self._pending_wait: asyncio.Future[list[Message]] | None = None
        self._unreturned: list[Message] = []  # records that a wait has read and no call has returned yet
        self._take_ready = getattr(self._implementation, "take_ready", _no_message)
        _open_consumers.add(self)
        weakref.finalize(self, self._calls.end).atexit = False

    @property
    def transport(self) -> str:
        """ "shm" or "tcp"."""
        return self._consumer.transport

    @property
    def transport_reason(self) -> str:
        """Why this transport is used."""
        return self._consumer.transport_reason

    # -- records -----------------------------------------------------------------------------------

    async def poll(self, timeout: float = -1) -> Message | None:
        """Like Consumer.poll."""
        # a cancelled call may still be under way in the thread
        if self._pending_wait is None and not self._unreturned and not self._lock.locked() and not self._calls.is_busy:
            message = self._take_ready()
            if message is not None:
                return message
        messages = await self._take(1, timeout)
        return messages[0] if messages else None

    async def getone(self) -> Message:
        """Waits for the next record, without a timeout. Raises KafkaException for an error; skips events
        that report the end of a partition.
        """
        while True:
            message = await self.poll()
            if message is None:
                continue
            error = message.error()
            if error is None:
                return message
            if error.code() != error._PARTITION_EOF:
                raise KafkaException(error)

    async def getmany(self, max_records: int = 500, timeout: float = -1) -> list[Message]:
        """Waits for a record or event, then returns all that are available, up to `max_records`."""
        return await self._take(max_records, timeout)

    async def consume(self, num_messages: int = 1, timeout: float = -1) -> list[Message]:
        """Like Consumer.consume: waits until there are `num_messages`, at most `timeout` seconds."""
        async with self._lock:
            await self._interrupt()
            self._give_back_unreturned()
            pending_wait = self._start_wait(self._implementation.gather, num_messages)
            try:
                await asyncio.wait({pending_wait}, timeout=timeout if timeout >= 0 else None)
            finally:
                if not pending_wait.done():
                    self._implementation.interrupt()
            await self._interrupt()
            messages, self._unreturned = self._unreturned[:num_messages], self._unreturned[num_messages:]
            return messages

    async def consume_batch(self, max_records: int = 65_536, timeout: float | None = None) -> Any:
        """Like Consumer.consume_batch. Limit it with `timeout`: a cancelled call loses the batch that it
        was reading.
        """
        return await self._call(self._consumer.consume_batch, max_records, timeout)

    def __aiter__(self) -> AsyncConsumer:
        return self

    async def __anext__(self) -> Message:
        return await self.getone()

    async def _take(self, count: int, timeout: float) -> list[Message]:
        async with self._lock:
            if self._unreturned:
                messages, self._unreturned = self._unreturned[:count], self._unreturned[count:]
                return messages
            pending_wait = (
                self._pending_wait
                if self._pending_wait is not None
                else self._start_wait(self._implementation.take, count, None)
            )
            done, _ = await asyncio.wait({pending_wait}, timeout=timeout if timeout >= 0 else None)
            if not done:
                await self._interrupt()
            else:
                self._pending_wait = None
                self._unreturned += pending_wait.result()
            messages, self._unreturned = self._unreturned[:count], self._unreturned[count:]
            return messages

    def _start_wait(self, wait: Callable[..., list[Message]], *arguments: Any) -> asyncio.Future[list[Message]]:
        """Starts a wait. The caller has already ended any other wait."""
        self._implementation.uninterrupt()
        pending_wait = self._pending_wait = self._calls.call(self._carry_out, wait, *arguments)
        return pending_wait

    def _carry_out(self, wait: Callable[..., list[Message]], *arguments: Any) -> list[Message]:
        """Calls `wait`. It is a method so that the call under way keeps this object alive, and
        _end_waits() can interrupt the wait (A3).
        """
        return wait(*arguments)

    async def _interrupt(self) -> None:
        """Ends the wait that is under way, if any, and adds its records to `_unreturned`."""
        pending_wait = self._pending_wait
        if pending_wait is not None:
            if not pending_wait.done():
                self._implementation.interrupt()
                await asyncio.wait({pending_wait})
            self._pending_wait = None
            self._unreturned += pending_wait.result()

    def _give_back_unreturned(self) -> None:
        """Gives back records that a wait has read and no call has returned: the next call may be a
        commit, which must not include them. Not awaited, so that it cannot be cancelled.
        """
        unreturned, self._unreturned = self._unreturned, []
        if unreturned:
            self._calls.call(self._implementation.give_back, unreturned)

    # -- everything else, in the thread ------------------------------------------------------------

    async def _call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if self._pending_wait is not None:
            self._implementation.interrupt()
        async with self._lock:
            await self._interrupt()
            self._give_back_unreturned()
            return await self._calls.call(lambda: function(*arguments, **named))

    def _callback(self, function: Any) -> Any:
        if not inspect.iscoroutinefunction(function):
            return function if function is None else lambda _consumer, partitions: function(self, partitions)
        loop = asyncio.get_running_loop()

        def call(_consumer: Any, partitions: list[TopicPartition]) -> None:
            asyncio.run_coroutine_threadsafe(function(self, partitions), loop).result()

        return call

    async def subscribe(
        self, topics: list[str], on_assign: Any = None, on_revoke: Any = None, on_lost: Any = None
    ) -> None:
        """Like Consumer.subscribe. A callback that is a coroutine function may not await this
        consumer.
        """
        await self._call(
            self._consumer.subscribe,
            topics,
            self._callback(on_assign),
            self._callback(on_revoke),
            self._callback(on_lost),
        )

    async def unsubscribe(self) -> None:
        """Like Consumer.unsubscribe."""
        await self._call(self._consumer.unsubscribe)

    async def assign(self, partitions: list[TopicPartition]) -> None:
        """Like Consumer.assign."""
        await self._call(self._consumer.assign, partitions)

    async def incremental_assign(self, partitions: list[TopicPartition]) -> None:
        """Like Consumer.incremental_assign."""
        await self._call(self._consumer.incremental_assign, partitions)

    async def unassign(self) -> None:
        """Like Consumer.unassign."""
        await self._call(self._consumer.unassign)

    async def incremental_unassign(self, partitions: list[TopicPartition]) -> None:
        """Like Consumer.incremental_unassign."""
        await self._call(self._consumer.incremental_unassign, partitions)

    async def assignment(self) -> list[TopicPartition]:
        """Like Consumer.assignment."""
        return await self._call(self._consumer.assignment)

    async def seek(self, partition: TopicPartition) -> None:
        """Like Consumer.seek."""
        await self._call(self._consumer.seek, partition)

    async def pause(self, partitions: list[TopicPartition]) -> None:
        """Like Consumer.pause."""
        await self._call(self._consumer.pause, partitions)

    async def resume(self, partitions: list[TopicPartition]) -> None:
        """Like Consumer.resume."""
        await self._call(self._consumer.resume, partitions)

    async def position(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        """Like Consumer.position."""
        return await self._call(self._consumer.position, partitions)

    async def commit(
        self, message: Message | None = None, offsets: list[TopicPartition] | None = None, asynchronous: bool = False
    ) -> list[TopicPartition] | None:
        """Like Consumer.commit, but by default waits for the outcome, without blocking the event loop."""
        return await self._call(self._consumer.commit, message, offsets, asynchronous)

    async def store_offsets(self, message: Message | None = None, offsets: list[TopicPartition] | None = None) -> None:
        """Like Consumer.store_offsets."""
        await self._call(self._consumer.store_offsets, message, offsets)

    async def committed(self, partitions: list[TopicPartition], timeout: float | None = None) -> list[TopicPartition]:
        """Like Consumer.committed."""
        return await self._call(self._consumer.committed, partitions, timeout)

    async def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any:
        """Like Consumer.list_topics."""
        return await self._call(self._consumer.list_topics, topic, timeout)

    async def get_watermark_offsets(
        self, partition: TopicPartition, timeout: float | None = None, cached: bool = False
    ) -> tuple[int, int] | None:
        """Like Consumer.get_watermark_offsets."""
        return await self._call(self._consumer.get_watermark_offsets, partition, timeout, cached)

    async def offsets_for_times(
        self, partitions: list[TopicPartition], timeout: float | None = None
    ) -> list[TopicPartition]:
        """Like Consumer.offsets_for_times."""
        return await self._call(self._consumer.offsets_for_times, partitions, timeout)

    async def consumer_group_metadata(self) -> Any:
        """Like Consumer.consumer_group_metadata."""
        return await self._call(self._consumer.consumer_group_metadata)

    async def memberid(self) -> str | None:
        """Like Consumer.memberid."""
        return await self._call(self._consumer.memberid)

    def subscription(self) -> list[str]:
        """Like Consumer.subscription."""
        return self._consumer.subscription()

    # -- closing -----------------------------------------------------------------------------------

    async def close(self) -> None:
        """Like Consumer.close. Records that a cancelled wait has read, and that no call has returned,
        are read again by the member that gets the partition; an exception of that wait is raised at the
        end.
        """
        if self._pending_wait is not None:
            self._implementation.interrupt()
        async with self._lock:
            raised = await _raised_by(self._interrupt())
            self._give_back_unreturned()
            raised = await _raised_by(self._calls.call(self._consumer.close)) or raised
            self._calls.end()
            _open_consumers.discard(self)
            if raised is not None:
                raise raised

    async def __aenter__(self) -> AsyncConsumer:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()


def _no_message() -> None:
    """The take_ready() of an implementation that has none."""


async def _raised_by(awaitable: Awaitable[Any]) -> Exception | None:
    try:
        await awaitable
    except Exception as error:
        return error
    return None


_open_consumers: weakref.WeakSet[AsyncConsumer] = weakref.WeakSet()


def _end_waits() -> None:
    """Called when the interpreter exits, before the attachments that the threads use are closed."""
    for consumer in list(_open_consumers):
        consumer._implementation.interrupt()
    for consumer in list(_open_consumers):
        consumer._calls.end(EXIT_WAIT_S)


atexit.register(_end_waits)
os.register_at_fork(after_in_child=_open_consumers.clear)
