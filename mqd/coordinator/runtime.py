"""Runs the cores of one kind of coordinator: of groups (__consumer_offsets), transactional ids
(__transaction_state) or share-partitions (__share_group_state).

A request goes to the shard of its name's partition: request() -> Shard.handle -> actions -> one
unit of writes at a time -> replies. See shard.py.

    absent   the partition is served here -> loading
    loading  loaded, and everything is below the high watermark -> active
    active   a write failed, or epoch or owner changed -> absent

Invariants
    R1  a shard is active for one leader epoch and one generation of its owner; when either changes
        it is reloaded
    R2  every request is answered once: by its core, by CoordinatorError when the shard is
        discarded, or by its timeout
    R3  every batch begins at the offset that this shard expects; otherwise the log holds records
        from another writer (late records of a predecessor), and the shard is reloaded
    R4  a shard becomes active when everything it has loaded is below the high watermark: records
        that a predecessor had in flight are then committed
    R5  without its host's lease a shard answers no request: another host may already lead its
        partition and hold newer state
    R6  a partition is loaded only when no write of a predecessor on this host is in flight: it
        could be appended after the log was read, and the cores would not have its records
    R7  an event posted to all reaches every core that it concerns: immediately if the core is
        loaded, and after each load, before the core answers any request, until the event's effects
        are written. This ends if the core fails on the event, or if another host leads the
        partition, but not if this host loses its lease or the partition has no leader for a time.
        `after_load` makes up for events missed while no coordinator was active
Bounds: REQUESTS_MAX requests wait in one coordinator; further ones are refused with
COORDINATOR_NOT_AVAILABLE. MISSED_MAX posted events wait for one partition; the oldest are dropped.

Concurrency: the event loop's thread; a loading thread builds cores before they are shared.
"""

import asyncio
import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from mqd.base import logging
from mqd.base.tasks import InlineCoroutine, PromptFuture, Turn
from mqd.coordinator.actions import Core, CoreFactory, Effect, TimerFired
from mqd.coordinator.budget import Budget
from mqd.coordinator.internal_topic import CoordinatorError, Partitions, ServedPartition, partition_for
from mqd.coordinator.log import AppendError, LogAppender, outcome
from mqd.coordinator.partition_state import CoreSelector, MissedEvent, PartitionState, expire, select_core
from mqd.coordinator.shard import Shard, TooLarge, WriteUnit
from mqd.protocol.errors import ErrorCode

REQUESTS_MAX = 100_000
MISSED_MAX = 10_000
# between checks: POLL_S growing to POLL_SLOW_S while a partition is not loaded, else POLL_IDLE_S
POLL_S, POLL_SLOW_S, POLL_IDLE_S = 0.02, 0.25, 1.0
FIRST_CHECKS, FIRST_CHECK_S = 1000, 0.005
LAZY_S = 0.1  # how long lazy Persists wait to be batched with others
RETRY_S = 0.2  # delay before a shard that could not be written or loaded is loaded again
SILENT_RETRY_S = 2.0  # the same if its log directory does not respond

# codes with which a partition's owner refuses a marker: nothing was written to the log
MARKER_REFUSALS = frozenset((ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.TRANSACTION_COORDINATOR_FENCED))

log = logging.get("coordinator")


class Coordinator:
    """`topic`: the internal topic's name. `now_ms`: a clock that never goes back. `carry_out(name,
    effect, leader_epoch)`: see actions.Effect; may post events. `after_load(core)` returns an
    event that the core receives before it serves any request, or None. `turn`: the turn in which
    the process handles messages; writes leave at its end.
    """

    def __init__(
        self,
        topic: str,
        cores: CoreFactory,
        partitions: Partitions,
        log_appender: LogAppender,
        now_ms: Callable[[], int],
        carry_out: Callable[[str, Effect, int], None] | None = None,
        after_load: Callable[[Core], object | None] | None = None,
        budget: Budget | None = None,
        turn: Turn | None = None,
    ) -> None:
        self.topic = topic
        self._cores = cores
        self._partitions = partitions
        self._log = log_appender
        self._now_ms = now_ms
        self._carry_out = carry_out
        self._after_load = after_load
        self._budget = budget
        self.partition_states: list[PartitionState] = []
        self._futures: dict[int, asyncio.Future[object]] = {}
        self._last_number = 0
        self._turn = turn or Turn()
        self._to_write: dict[PartitionState, None] = {}
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_ms = 0
        self._next_check: asyncio.TimerHandle | None = None
        self._poll_s = POLL_S
        self._tasks: set[asyncio.Task[Any] | InlineCoroutine] = set()
        self._creating: asyncio.Task[bool] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # -- start and end -----------------------------------------------------------------------------

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.check_partitions()

    def stop(self) -> None:
        for handle in (self._alarm, self._next_check):
            if handle is not None:
                handle.cancel()
        for task in self._tasks:
            task.cancel()
        for state in self.partition_states:
            if state.lazy_timer is not None:
                state.lazy_timer.cancel()
            self._unload(state, int(ErrorCode.COORDINATOR_NOT_AVAILABLE), "the acceptor is stopping", is_quiet=True)
        self._loop = None

    @property
    def partition_count(self) -> int:
        return self._partitions.count()

    def partition_for(self, name: str) -> int:
        """The partition of a name. Raises CoordinatorError(COORDINATOR_NOT_AVAILABLE) if the
        internal topic does not exist.
        """
        count = self._partitions.count()
        if not count:
            raise CoordinatorError(ErrorCode.COORDINATOR_NOT_AVAILABLE)
        return partition_for(name, count)

    async def ensure_topic(self) -> bool:
        """Creates the internal topic on first need. False: it does not exist yet; call again."""
        if self._creating is None or self._creating.done():
            if self._partitions.count():
                return True
            self._creating = asyncio.get_running_loop().create_task(self._create())
        return await asyncio.shield(self._creating)

    async def _create(self) -> bool:
        """Creates the topic and waits, for some seconds at most, until its empty partitions are
        loaded, so that the first clients do not get COORDINATOR_LOAD_IN_PROGRESS.
        """
        if not await self._partitions.create():
            return False
        self.check_partitions()
        for _ in range(FIRST_CHECKS):
            try:
                self.check_loaded()
                break
            except CoordinatorError:
                await asyncio.sleep(FIRST_CHECK_S)
        return True

    # -- requests ----------------------------------------------------------------------------------

    async def request(self, name: str, make_event: Callable[[int], object], timeout_s: float | None = None) -> Any:
        """Passes an event to a core and returns its response. Raises CoordinatorError; after a
        timeout its code is COORDINATOR_NOT_AVAILABLE, and the outcome is unknown.
        """
        state, shard = self._find_shard(name)
        if len(self._futures) >= REQUESTS_MAX:
            raise CoordinatorError(ErrorCode.COORDINATOR_NOT_AVAILABLE)
        self._last_number += 1
        number = self._last_number
        loop = asyncio.get_running_loop()
        future: asyncio.Future[object] = PromptFuture(loop=loop)
        self._futures[number] = future
        state.requests.add(number)
        try:
            event = make_event(number)
            if self._budget is not None and (error := self._budget.refusal(name, shard.core(name), event)):
                raise CoordinatorError(error)
            self._handle(state, shard, name, event)
            if future.done():
                return future.result()
            if timeout_s is None:
                return await future
            alarm = loop.call_later(timeout_s, expire, future)
            try:
                return await future
            finally:
                alarm.cancel()
        finally:
            self._futures.pop(number, None)
            state.requests.discard(number)

    def post(self, name: str, event: object) -> None:
        """Passes an event that needs no response to a core. Raises CoordinatorError."""
        state, shard = self._find_shard(name)
        self._handle(state, shard, name, event)

    def post_all(self, event: object, concerns: Callable[[Core], bool]) -> None:
        """Sends an event to every core that it concerns. If a partition is being loaded, or will be
        reloaded without another host having led it in between, its cores receive the event after
        the load, before they serve any request (R7).
        """
        for state in self.partition_states:
            if state.loaded_epoch >= 0:
                self._notify(state, event, lambda shard: [name for name, core in shard.items() if concerns(core)])
                del state.missed[:-MISSED_MAX]

    def on_led_elsewhere(self, partition: int, leader_epoch: int) -> None:
        """Called when another host leads the partition in this epoch, or may have led it in an
        epoch up to this one. That host has handled the posted events. Delivering them here again
        could remove what that host has committed since.
        """
        if partition < len(self.partition_states) and self.partition_states[partition].loaded_epoch <= leader_epoch:
            self.partition_states[partition].forget_missed()

    def _notify(
        self, state: PartitionState, event: object, select: CoreSelector, failed: frozenset[str] = frozenset()
    ) -> None:
        """Delivers the event now, and again after each load until its effects are written. If a
        core fails on the event, the shard is discarded, and the other cores get the event again.
        """
        shard, until_written_count = state.shard, 0
        if shard is not None:
            for name in select(shard):
                if name not in failed and state.shard is shard:
                    self._handle(state, shard, name, event, only_existing=True)
                    failed = failed if state.shard is shard else failed | {name}
            if state.shard is shard:
                if not shard.unwritten_count:
                    return
                until_written_count = shard.written_count + shard.unwritten_count
        state.missed.append(MissedEvent(until_written_count, event, select, failed))

    def core(self, name: str) -> Core | None:
        """The core of this name, for reading only; its state may not be written yet. None: there is
        no such core. Raises CoordinatorError while the partition is not loaded.
        """
        return self._find_shard(name)[1].core(name)

    def items(self) -> Iterator[tuple[str, Core]]:
        """All cores of all loaded partitions, for reading only. See check_loaded()."""
        for state in self.partition_states:
            if state.shard is not None:
                yield from state.shard.items()

    def check_loaded(self) -> None:
        """Raises CoordinatorError(COORDINATOR_LOAD_IN_PROGRESS) while items() is incomplete."""
        if len(self.partition_states) < self._partitions.count() or any(
            state.shard is None and not self._partitions.is_led_elsewhere(state.index)
            for state in self.partition_states
        ):
            raise CoordinatorError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)

    def leader_epoch(self, name: str) -> int:
        """The leader epoch in which the name's partition was loaded. Raises CoordinatorError."""
        return self._find_shard(name)[1].leader_epoch

    async def write_marker(
        self,
        partition: int,
        producer_id: int,
        producer_epoch: int,
        coordinator_epoch: int,
        commit: bool,
        is_bumped: bool = False,
        leader_epoch: int = -1,
    ) -> None:
        """Ends a producer's transaction in one partition of this coordinator's topic, in the log
        and in the cores. Raises CoordinatorError. INVALID_PRODUCER_EPOCH means that nothing was
        written because the open transaction has a newer epoch (`is_bumped`: or the same epoch).
        `leader_epoch`: write in this epoch only; -1 accepts any.
        """
        if not 0 <= partition < len(self.partition_states):
            raise CoordinatorError(ErrorCode.NOT_COORDINATOR)
        state = self.partition_states[partition]
        if state.shard is None:
            raise CoordinatorError(self._absent_error(state))
        if leader_epoch not in (-1, state.shard.leader_epoch):
            raise CoordinatorError(ErrorCode.NOT_COORDINATOR)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_done(error: int | None) -> None:
            if not future.done():
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(CoordinatorError(error))

        try:
            state.shard.end_transaction(
                producer_id, producer_epoch, coordinator_epoch, commit, self._now_ms(), on_done, is_bumped
            )
        except Exception:
            log.exception(
                "a coordinator's core failed at the end of a transaction; its partition is loaded again",
                topic=self.topic,
                partition=partition,
                producer_id=producer_id,
            )
            self._unload(state, int(ErrorCode.COORDINATOR_NOT_AVAILABLE), "the end of a transaction failed")
            on_done(int(ErrorCode.COORDINATOR_NOT_AVAILABLE))  # unless _unload() has called it
        await future

    def _find_shard(self, name: str) -> tuple[PartitionState, Shard]:
        partition = self.partition_for(name)
        if partition >= len(self.partition_states):
            self.check_partitions()
            raise CoordinatorError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
        state = self.partition_states[partition]
        if state.shard is None:
            raise CoordinatorError(self._absent_error(state))
        if not self._partitions.may_lead():  # R5
            # On this error Markers drops its effects, and only a load starts them again. If the
            # lease has not returned after that load, the shard is unloaded here again.
            if self._carry_out is not None:
                self._unload(state, int(ErrorCode.NOT_COORDINATOR), "this host has no lease")
            raise CoordinatorError(ErrorCode.NOT_COORDINATOR)
        return state, state.shard

    def _absent_error(self, state: PartitionState) -> int:
        if self._partitions.is_led_elsewhere(state.index) or not self._partitions.may_lead():
            return int(ErrorCode.NOT_COORDINATOR)
        return int(
            ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
            if state.served is not None or state.not_before_s == 0.0
            else ErrorCode.NOT_COORDINATOR
        )

    def _handle(
        self, state: PartitionState, shard: Shard, name: str, event: object, only_existing: bool = False
    ) -> None:
        try:
            (shard.handle_existing if only_existing else shard.handle)(name, event, self._now_ms())
        except TooLarge as error:
            self._unload(state, int(ErrorCode.COORDINATOR_NOT_AVAILABLE), f"{name} cannot be written: {error}")
        except Exception:
            log.exception(
                "a coordinator's core failed; its partition is loaded again",
                topic=self.topic,
                partition=state.index,
                core=name,
                event=type(event).__name__,
            )
            self._unload(state, int(ErrorCode.COORDINATOR_NOT_AVAILABLE), f"{name} failed")

    def _on_reply(self, number: int, response: object) -> None:
        future = self._futures.get(number)
        if future is not None and not future.done():
            future.set_result(response)

    def _on_effect(self, leader_epoch: int, name: str, effect: Effect) -> None:
        """Carries the effect out in a later turn of the loop: the events that it posts must not
        reach a core that is handling an event.
        """
        if self._carry_out is None:
            raise TypeError(
                f"a core of {self.topic} requested the effect {type(effect).__name__}, for which there is no handler"
            )
        if self._loop is not None:
            self._loop.call_soon(self._carry_out, name, effect, leader_epoch)

    # -- writing and timers ------------------------------------------------------------------------

    def _wake(self, state: PartitionState) -> None:
        """Schedules a write at the end of this turn: requests of one turn are written together."""
        if not self._to_write and self._loop is not None:
            self._turn.call(self._on_turn)
        self._to_write[state] = None

    def _on_turn(self) -> None:
        partition_states, self._to_write = self._to_write, {}
        for state in partition_states:
            shard = state.shard
            unit = shard.next_unit() if shard is not None else None
            if shard is not None and unit is not None:
                self._write(state, shard, unit)
            elif shard is not None and shard.has_only_lazy and state.lazy_timer is None and self._loop is not None:
                state.lazy_timer = self._loop.call_later(LAZY_S, self._on_lazy_timer, state)

    def _on_lazy_timer(self, state: PartitionState) -> None:
        state.lazy_timer = None
        shard = state.shard
        unit = shard.next_unit(is_lazy_due=True) if shard is not None else None
        if shard is not None and unit is not None:
            self._write(state, shard, unit)

    def _write(self, state: PartitionState, shard: Shard, unit: WriteUnit) -> None:
        now_ms = self._now_ms()
        futures = [
            self._log.append_nowait(self.topic, state.index, batch.encode(now_ms), shard.leader_epoch)
            for batch in unit.batches
        ]
        write = state.last_write = InlineCoroutine(self._turn, self._finish_write(state, shard, unit, futures))
        self._tasks.add(write)
        write.add_done_callback(self._tasks.discard)
        write.start()

    async def _finish_write(
        self, state: PartitionState, shard: Shard, unit: WriteUnit, futures: list[asyncio.Future[int]]
    ) -> None:
        results = [await outcome(future) for future in futures]
        if state.shard is not shard:
            return
        expected = shard.end_offset
        for batch, result in zip(unit.batches, results, strict=True):
            if isinstance(result, AppendError):
                if result.error in MARKER_REFUSALS and shard.on_refused(batch, result.error):
                    continue
                is_led_elsewhere = result.error == ErrorCode.NOT_LEADER_OR_FOLLOWER
                error = ErrorCode.NOT_COORDINATOR if is_led_elsewhere else ErrorCode.COORDINATOR_NOT_AVAILABLE
                self._unload(state, int(error), f"a write failed: {result}")
                return
            if isinstance(result, Exception):
                self._unload(state, int(ErrorCode.COORDINATOR_NOT_AVAILABLE), f"a write failed: {result!r}")
                return
            if result != expected:  # R3
                self._unload(
                    state, int(ErrorCode.NOT_COORDINATOR), f"a batch was appended at offset {result}, not at {expected}"
                )
                return
            expected += batch.offset_count
        shard.finish_write()
        if state.missed:
            state.missed = [missed for missed in state.missed if missed.until_written_count > shard.written_count]
        self._wake(state)

    def _fire_timers(self) -> None:
        now_ms = self._now_ms()
        for state in self.partition_states:
            shard = state.shard
            if shard is None:
                continue
            due_ms = shard.timers.next_ms()
            if due_ms is None or due_ms > now_ms:
                continue
            for timer in shard.timers.take_due(now_ms):
                name = shard.fire(timer)
                if name is not None and state.shard is shard:
                    self._handle(state, shard, name, TimerFired(timer[1]), only_existing=True)

    def _on_armed(self, at_ms: int) -> None:
        """A timer was set. It is nearly always later than the current alarm."""
        if self._loop is None or (self._alarm is not None and self._alarm_ms <= at_ms):
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_ms = at_ms
        self._alarm = self._loop.call_later(max(at_ms - self._now_ms(), 0) / 1000, self._on_alarm)

    def _on_alarm(self) -> None:
        self._alarm = None
        self._fire_timers()
        shards = [state.shard for state in self.partition_states if state.shard is not None]
        due_times_ms = [at_ms for shard in shards if (at_ms := shard.timers.next_ms()) is not None]
        if due_times_ms:
            self._on_armed(min(due_times_ms))

    # -- loading -----------------------------------------------------------------------------------

    def check_partitions(self) -> None:
        """Call when partitions may have changed. Loads those that are served but not loaded, and
        drops those that another process or another epoch serves.
        """
        self._poll_s = POLL_S
        self._check_partitions()

    def _check_partitions(self) -> None:
        if self._loop is None:
            return
        if self._next_check is not None:
            self._next_check.cancel()
        count = self._partitions.count()
        if count < len(self.partition_states):  # the topic was deleted
            for state in self.partition_states:
                self._unload(state, int(ErrorCode.NOT_COORDINATOR), "the topic was deleted")
            self.partition_states = []
        while len(self.partition_states) < count:
            self.partition_states.append(PartitionState(len(self.partition_states)))
        if not self.partition_states:
            return  # check_partitions() is called again when the topic exists
        any_unloaded = False
        for partition, state in enumerate(self.partition_states):
            self._check_partition(partition, state)
            any_unloaded = any_unloaded or (state.shard is None and not self._partitions.is_led_elsewhere(partition))
        self._next_check = self._loop.call_later(self._poll_s if any_unloaded else POLL_IDLE_S, self._check_partitions)
        # polls less and less often: a failed directory rarely recovers
        self._poll_s = min(1.1 * self._poll_s, POLL_SLOW_S) if any_unloaded else POLL_S

    def _check_partition(self, partition: int, state: PartitionState) -> None:
        assert self._loop is not None
        if state.loading is not None:
            return
        served = self._partitions.served(partition)
        if state.shard is not None:
            # R1
            if served is None or state.served is None or not served.is_same_term_as(state.served):
                self._unload(
                    state,
                    int(ErrorCode.NOT_COORDINATOR),
                    "its leader epoch or owner changed" if served is not None else "it is not served",
                )
            return
        if served is None:
            state.served = None
            if self._partitions.is_led_elsewhere(partition):
                state.forget_missed()
            return
        is_writing = state.last_write is not None and not state.last_write.done()
        if is_writing or self._loop.time() < state.not_before_s:  # R6
            return
        state.served, state.loaded_epoch = served, served.leader_epoch
        state.loading = self._loop.create_task(self._load(partition, state, served))
        self._tasks.add(state.loading)
        state.loading.add_done_callback(self._tasks.discard)

    async def _load(self, partition: int, state: PartitionState, served: ServedPartition) -> None:
        assert self._loop is not None
        try:
            began_s = self._loop.time()
            loaded = await self._partitions.load(partition, served.end_offset, self._cores)
            while True:
                current = self._partitions.served(partition)
                if current is None or not current.is_same_term_as(served) or current.end_offset != served.end_offset:
                    return  # another append happened or the owner changed: try again
                if current.high_watermark >= served.end_offset:
                    break
                await asyncio.sleep(POLL_S)  # R4
            shard = Shard(
                self._cores,
                loaded,
                served.leader_epoch,
                self._on_reply,
                functools.partial(self._on_effect, served.leader_epoch),
                functools.partial(self._wake, state),
                self._on_armed,
                self._budget,
            )
            state.shard = shard
            shard.on_loaded(self._now_ms())
            self._catch_up(state, shard)
            if loaded.record_count or loaded.skipped_count:
                log.info(
                    "coordinator's partition loaded",
                    topic=self.topic,
                    partition=partition,
                    cores=len(shard),
                    records=loaded.record_count,
                    skipped=loaded.skipped_count,
                    leader_epoch=served.leader_epoch,
                    milliseconds=round((self._loop.time() - began_s) * 1000),
                )
        except Exception as error:
            self._unload(state, int(ErrorCode.COORDINATOR_NOT_AVAILABLE), str(error), is_quiet=True)
            state.not_before_s = self._loop.time() + (SILENT_RETRY_S if isinstance(error, TimeoutError) else RETRY_S)
            # any error that is not a disk error is a bug
            log_failure = log.error if isinstance(error, OSError) else log.exception
            log_failure(
                "a coordinator's partition cannot be loaded; trying again",
                topic=self.topic,
                partition=partition,
                reason=f"{type(error).__name__}: {error}",
            )
        finally:
            state.loading = None

    def _catch_up(self, state: PartitionState, shard: Shard) -> None:
        """Delivers the events that were posted while the partition was not loaded."""
        missed, state.missed = state.missed, []
        for _, event, select, failed in missed:
            self._notify(state, event, select, failed)
        if self._after_load is None:
            return
        for name, core in shard.items():
            event = self._after_load(core)
            if event is not None and state.shard is shard:
                self._notify(state, event, partial(select_core, name))

    def _unload(self, state: PartitionState, error: int, reason: str, is_quiet: bool = False) -> None:
        """Discards the cores of a partition. Waiting requests get a retriable error."""
        shard, state.shard = state.shard, None
        if shard is None:
            return
        if self._loop is not None:
            state.not_before_s = self._loop.time() + RETRY_S
            self._loop.call_later(RETRY_S, self.check_partitions)
        if not is_quiet and (len(shard) or state.requests):
            log.warning(
                "a coordinator's partition was unloaded",
                topic=self.topic,
                partition=state.index,
                cores=len(shard),
                requests=len(state.requests),
                reason=reason,
            )
        shard.fail(error)
        for number in state.requests:
            future = self._futures.get(number)
            if future is not None and not future.done():
                future.set_exception(CoordinatorError(error))
        state.requests = set()
