"""A streaming read from trigger to trigger: its start, the end of each batch, and the offsets that
it commits for a group.

Spark keeps the offsets in the query's checkpoint; this object exists as long as the query's run and
holds only state that may be lost.

    S1  a batch's records depend on its start and end alone: a batch planned again after a restart
        has the same records, as long as the log holds them
    S2  the offsets of a `latest` start are determined once, and kept in Spark's checkpoint. A query
        that begins at the end of the log makes its first batch empty, [end, end): Spark records
        that before anything is read. If the query restarts before its first batch was committed,
        the start is looked up again, and may be later by then; but the repeated batch has the end
        that Spark recorded, and the next batch begins there. So nothing in between is skipped,
        although Spark does not pass the checkpoint to the source.
    S3  nothing is skipped silently: a deleted or recreated topic, offsets that went back, and a log
        that begins after the query's position are losses (failOnDataLoss)
    S4  a partition that is found later begins at its earliest offset
    S5  only the end offsets of batches that Spark has committed are committed for the group. Spark
        calls commit(end) for all batches but the last of a run; the end of that one is committed
        when the next batch starts there. A failure is only a warning: nothing depends on it
    S6  one broker's response is not enough for a loss: missing topics are requested again, from
        other brokers too, for ATTEMPTS * PAUSE_S. A topic that is still missing keeps its position
        (as long as failOnDataLoss lets the query continue): if it reappears, the query continues
        there and reads nothing twice; its id shows whether it was recreated
    S7  partitions that a topic (with the same id) no longer lists were retired, and have no records
        left. The query drops them; that is no loss if it had reached their end, which their leaders
        report for partition.retire.grace.ms at least. Partitions that no leader reports are
        treated as lost: records may have been added and deleted since the last lookup
Source: the rules of Spark's Kafka source in its integration guide.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from mqd.spark.driver import Driver
from mqd.spark.offsets import Position
from mqd.spark.options import EARLIEST, LATEST, SourceOptions
from mqd.spark.planning import Key, Range, limit_rate
from mqd.spark.wire import BrokerError, MqdMissingError, MqdReadError

log = logging.getLogger("mqd.spark")

ATTEMPTS, PAUSE_S = 20, 0.25  # S6


class Progress:
    """See the module's docstring. Raises MqdReadError."""

    def __init__(
        self,
        options: SourceOptions,
        driver: Driver,
        now: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.options, self._driver, self._now, self._pause = options, driver, now, pause
        self._initial: Position | None = None
        self._first_batch_due = False  # the empty first batch of S2
        self._target: Position | None = None  # Trigger.AvailableNow
        self._latest: Position | None = None  # the ends of the logs at the last lookup
        self._reported_lost: set[Key] = set()  # partitions already reported as lost (S6)
        self._last_trigger: float | None = None
        self._committed: dict[Key, int] = {}

    def close(self) -> None:
        self._driver.close()

    # -- the start ---------------------------------------------------------------------------------

    def initial(self) -> dict[str, Any]:
        if self._initial is None:
            starting = self.options.starting
            keys = self._driver.partitions()
            starts = self._driver.resolve(starting, keys, "starting")
            self._first_batch_due = (
                starting.symbolic == LATEST
                or any(LATEST in partitions.values() for partitions in (starting.offsets or {}).values())
                or self._may_start_at_end_by_time()
            )
            self._initial = Position(starts, self._driver.topic_ids())
        return self._initial.to_json()

    def _is_initial(self, position: Position) -> bool:
        return self._initial is not None and position.offsets == self._initial.offsets

    def _may_start_at_end_by_time(self) -> bool:
        """Whether the query may start at the end because its starting time is later than all
        records.
        """
        return self.options.timestamp_without_match == "latest" and (
            self.options.starting.timestamp is not None or self.options.starting.timestamps is not None
        )

    # -- the end of a batch ------------------------------------------------------------------------

    def prepare_available_now(self) -> None:
        self._target = self._latest = self._log_ends(lambda: self._driver.partitions(skip_missing=True))

    def latest(self, start: dict[str, Any], unlimited: bool) -> dict[str, Any]:
        """The end of the next batch; `start` itself means that there is nothing to do yet."""
        position = Position.from_json(start)
        is_first = self._is_initial(position)
        if is_first and self._first_batch_due:
            self._first_batch_due = False
            return start
        if not is_first:
            self._commit_quietly(position)
        if self._target is not None and self._any_missing(position, self._target.offsets.keys(), self._target.ids):
            self._target = self._find_ends(position)
        available = self._target or self._find_ends(position)
        starts, ends = self._reconcile(position, available)
        if not unlimited:
            if self._target is None and self._must_wait_for_more(starts, ends.offsets):
                return start
            if self.options.max_offsets_per_trigger is not None:
                ends = Position(limit_rate(starts, ends.offsets, self.options.max_offsets_per_trigger), ends.ids)
        return ends.to_json()

    def _find_ends(self, position: Position) -> Position:
        self._latest = self._log_ends(lambda: self._find_partitions(position))
        return self._latest

    def _log_ends(self, find: Callable[[], list[Key]]) -> Position:
        try:
            return Position(self._driver.offsets_at(find(), LATEST), self._driver.topic_ids())
        except MqdMissingError:  # deleted in between: the caller decides whether that is a loss
            return Position(self._driver.offsets_at(find(), LATEST), self._driver.topic_ids())

    def _find_partitions(self, target: Position) -> list[Key]:
        """The existing partitions; if some of `target` are missing, they are requested again (S6)."""
        keys = self._driver.partitions(skip_missing=bool(target.offsets))
        for _ in range(ATTEMPTS):
            if not self._any_missing(target, keys, self._driver.topic_ids()):
                break
            self._pause(PAUSE_S)
            self._driver.use_another_broker()
            keys = self._driver.partitions(skip_missing=True)
        return keys

    def _any_missing(self, target: Position, keys: Collection[Key], ids: Mapping[str, bytes]) -> bool:
        return any(
            key not in self._reported_lost and (key not in keys or _was_recreated(key[0], target.ids, ids))
            for key in target.offsets
        )

    def _reconcile(self, start: Position, available: Position) -> tuple[dict[Key, int], Position]:
        """Returns (the start of each partition, its possible end) according to the current state of
        the log. Reports losses.
        """
        recreated = self._recreated(start, available)
        kept = self._keep_missing(start, available, recreated)
        starts = {
            key: offset for key, offset in start.offsets.items() if key in available.offsets and key not in recreated
        }
        new_keys = [key for key in available.offsets if key not in starts]
        starts |= self._new_starts(new_keys, start, recreated)
        ends = dict(available.offsets)
        for key, begin in starts.items():
            if ends[key] < begin:
                self._driver.report_loss(
                    f"{key[0]}-{key[1]}: the log ends at {ends[key]}, before offset {begin}, the query's position:"
                    " it was truncated"
                )
                ends[key] = begin
        return starts | kept, Position(ends | kept, available.ids | {topic: start.ids[topic] for topic, _ in kept})

    def _recreated(self, start: Position, later: Position) -> set[Key]:
        """Partitions of topics that were deleted and recreated."""
        recreated = set()
        for topic in start.topics():
            if _was_recreated(topic, start.ids, later.ids):
                self._driver.report_loss(
                    f"topic {topic} was deleted and created again since the last batch, which ended at"
                    f" {_format_ends(start, topic)}"
                )
                recreated |= {key for key in start.offsets if key[0] == topic}
        return recreated

    def _keep_missing(self, start: Position, available: Position, recreated: set[Key]) -> dict[Key, int]:
        """Reports missing partitions. Returns those that keep their position (S6)."""
        self._reported_lost -= available.offsets.keys()
        kept: dict[Key, int] = {}
        for topic in start.topics():
            missing = sorted(
                key
                for key in start.offsets
                if key[0] == topic and key not in available.offsets and key not in recreated
            )
            if missing and topic in available.ids and available.ids[topic] == start.ids.get(topic):
                ends = self._driver.retired_end_offsets(missing)
                for key in [key for key in missing if ends.get(key) == start.offsets[key]]:
                    missing.remove(key)
                    log.warning(
                        "%s-%d was retired, and the query has read it to its end, offset %d: it continues without it",
                        *key,
                        start.offsets[key],
                    )
            elif topic in start.ids and topic not in available.ids:
                kept |= {key: start.offsets[key] for key in missing}
            if not self._reported_lost.issuperset(missing):
                names = ", ".join(str(partition) for _, partition in missing)
                self._driver.report_loss(
                    f"{topic}-{names} {'was' if len(missing) == 1 else 'were'} deleted; the last batch ended at"
                    f" {_format_ends(start, topic)}"
                )
            self._reported_lost.update(missing)
        return kept

    def _new_starts(self, keys: list[Key], start: Position, recreated: set[Key]) -> dict[Key, int]:
        earliest = self._driver.offsets_at(keys, EARLIEST)
        for (topic, partition), offset in earliest.items():
            if offset > 0 and start.offsets and (topic, partition) not in recreated:
                self._driver.report_loss(f"the new partition {topic}-{partition} begins at {offset} instead of 0")
        return earliest

    def _must_wait_for_more(self, starts: Mapping[Key, int], ends: Mapping[Key, int]) -> bool:
        """Whether to wait for minOffsetsPerTrigger, for maxTriggerDelay at most. The first batch
        does not wait.
        """
        min_offsets = self.options.min_offsets_per_trigger
        now, last = self._now(), self._last_trigger
        count = sum(ends[key] - starts[key] for key in ends)
        if (
            min_offsets is not None
            and count < min_offsets
            and last is not None
            and (now - last) * 1000 < self.options.max_trigger_delay_ms
        ):
            return True
        self._last_trigger = now
        return False

    # -- tasks -------------------------------------------------------------------------------------

    def plan(self, start: dict[str, Any], end: dict[str, Any]) -> list[Range]:
        begin, stop = Position.from_json(start), Position.from_json(end)
        if not self._driver.topics and stop.offsets:
            self._driver.partitions(skip_missing=True)  # after a restart: the leaders, for the sizes of tasks
        recreated = self._recreated(begin, stop)  # latest() has reported the other losses
        starts = {key: offset for key, offset in begin.offsets.items() if key in stop.offsets and key not in recreated}
        new_keys = [key for key in stop.offsets if key not in starts]
        vanished = self._vanished(new_keys, stop)
        starts |= self._new_starts([key for key in new_keys if key not in vanished], begin, recreated)
        ranges = []
        for key, until in sorted(stop.offsets.items()):
            if key in vanished:
                continue
            if starts[key] > until and not self._is_initial(begin):  # S2: the first batch again, from a later "latest"
                self._driver.report_loss(
                    f"{key[0]}-{key[1]}: the batch ends at {until}, before its beginning {starts[key]}"
                )
            if until > starts[key]:
                ranges.append(Range(*key, starts[key], until, stop.ids.get(key[0], b"")))
        return self._driver.split_into_tasks(ranges)

    def _vanished(self, new_keys: list[Key], stop: Position) -> set[Key]:
        """Returns the partitions of `new_keys` (those that are new in this batch) that were deleted
        or recreated before the batch was read, because the query was restarted in between. Reports
        them as lost.
        """
        if not new_keys:
            return set()
        existing = set(self._find_partitions(Position({key: stop.offsets[key] for key in new_keys}, stop.ids)))
        ids = self._driver.topic_ids()
        vanished = {key for key in new_keys if key not in existing or _was_recreated(key[0], stop.ids, ids)}
        for topic, partition in sorted(vanished - self._reported_lost):
            self._driver.report_loss(
                f"{topic}-{partition} was deleted or recreated; the batch that ends at"
                f" {stop.offsets[topic, partition]} was not read"
            )
        self._reported_lost |= vanished
        return vanished

    # -- reports -----------------------------------------------------------------------------------

    def report(self) -> dict[str, Any] | None:
        """The ends of the logs at the last lookup, for Spark's progress reports."""
        return None if self._latest is None else self._latest.to_json()

    def commit_offsets(self, end: dict[str, Any]) -> None:
        self._commit_quietly(Position.from_json(end))

    def _commit_quietly(self, position: Position) -> None:
        """Commits the offsets that have changed; a failure is only a warning (S5)."""
        if self.options.group_id is None:
            return
        changed = {
            key: offset
            for key, offset in position.offsets.items()
            if self._committed.get(key) != offset and key not in self._reported_lost
        }
        if not changed:
            return
        try:
            self._driver.commit_offsets(self.options.group_id, changed)
        except (OSError, BrokerError, MqdReadError) as error:
            self._driver.close()
            log.warning(
                "the query's progress could not be committed for group %s: %s; the query continues, and the next"
                " batch retries",
                self.options.group_id,
                error,
            )
        else:
            self._committed |= changed


def _was_recreated(topic: str, before: Mapping[str, bytes], now: Mapping[str, bytes]) -> bool:
    return topic in before and topic in now and before[topic] != now[topic]


def _format_ends(position: Position, topic: str) -> str:
    return ", ".join(
        f"{partition}: {offset}" for (name, partition), offset in sorted(position.offsets.items()) if name == topic
    )
