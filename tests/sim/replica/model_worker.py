"""A worker process of a simulated host: a model of the C reactor around the replication core, at
the granularity of batches. It moves bytes and calls the core; it makes no decisions.

Leader: gate, append, group commit, acknowledge at the high watermark, respond to followers (parked
while there is nothing for them), propose in-sync sets. Follower: one fetch at a time for each
leader host, append or truncate as the core decides, flush before the next fetch where the topic
requires it.

Invariants
    W1  an acknowledgement with acks=all is sent only when the high watermark has passed the record,
        in the leader epoch in which it was appended
    W2  a replica serves nothing in a leader epoch that a dead generation of this worker has led
        (Control.led): that generation's knowledge is lost
    W3  responses to a request other than the current one are dropped
    W4  batches are appended, sent, read and truncated as a whole; no host appends one whose
        checksum is wrong
    W5  after a failed flush no partition of the directory is served or counts until the host is
        restarted; a full disk only refuses records
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from tests.sim.disks import Entry, PartitionLog
from tests.sim.kernel import MILLISECOND, Kernel, Network, Process, Timer
from tests.sim.replica.partition_replica import (
    APPEND,
    BELOW_MIN,
    HIGH_WATERMARK,
    NEW_EPOCH,
    NEW_ROLE,
    NOT_ENOUGH_AFTER,
    NOT_LEADER,
    OUT_OF_ORDER,
    RESTART,
    STALE_IGNORED,
    STORAGE_ERROR,
    TRUNCATE,
    Answer,
    Assignment,
    Fetch,
    Proposal,
)

Caller = tuple[int, Process, Callable[..., None], int]  # node, process, callback for the response, token
PARK_MAX = 120 * MILLISECOND
FETCH_TIMEOUT = 400 * MILLISECOND
AGAIN = 60 * MILLISECOND
REPEAT_MS = 500
READ_MAX = 8


class Control:
    """The state of one partition in the host's control segment: outlives processes, not the host."""

    __slots__ = ("high_watermark", "led")

    def __init__(self) -> None:
        self.high_watermark = 0
        self.led = -1  # highest leader epoch that was led here


class HostView(Protocol):
    """The part of its host that a worker needs."""

    node: int
    kernel: Kernel
    network: Network
    lease_deadline_ns: int
    controls: dict[Any, Control]
    logs: dict[Any, PartitionLog]
    full: bool  # its disk has no space

    def clock_ns(self) -> int: ...
    def propose(self, worker: ModelWorker, partition: Any, proposal: Proposal) -> None: ...
    def worker_of(self, node: int, partition: Any) -> ModelWorker | None: ...
    def flush_delay(self) -> int: ...
    def flush_fails(self) -> bool: ...


class Place:
    """A partition in its worker."""

    __slots__ = (
        "partition",
        "log",
        "core",
        "control",
        "waiting",
        "flush_pending",
        "flushing",
        "sent",
        "later",
        "refused_epoch",
        "producers",
        "refused",
    )

    def __init__(self, partition: Any, log: PartitionLog, core: Any, control: Control) -> None:
        self.partition = partition
        self.log = log
        self.core = core
        self.control = control
        self.waiting: list[tuple[int, int, Caller]] = []  # offset after its last record, its first one
        self.flush_pending = self.flushing = False
        self.sent: dict[int, int] = {}  # node -> last high watermark sent to it
        self.later = False  # the follower waits before it retries
        self.refused_epoch = control.led
        self.producers: Any = None  # this and the next belong to batch_worker.py
        self.refused: list[tuple[int, Caller]] = []


class Fetcher:
    __slots__ = ("leader", "token", "busy", "timer")

    def __init__(self, leader: int) -> None:
        self.leader = leader
        self.token = 0
        self.busy = False
        self.timer: Timer | None = None


class ModelWorker:
    def __init__(
        self,
        host: HostView,
        history: Any,
        make_core: Callable[[PartitionLog], Any],
        off: frozenset[str],
        fetch_max: int,
    ) -> None:
        self.host = host
        self.kernel = host.kernel
        self.history = history
        self.process = Process(f"worker {host.node}")
        self.places: dict[Any, Place] = {}
        self.off = off
        self.failed = False  # W5
        self.fetch_max = fetch_max
        self._make_core = make_core
        self._fetchers: dict[int, Fetcher] = {}
        self._parked: list[tuple[int, list[tuple[Any, Fetch]], Caller, Timer]] = []
        self._token = 0
        self.kernel.after(self.kernel.random.randrange(100, 400) * MILLISECOND, self.process, self._look)

    def _now_ms(self) -> int:
        return self.host.clock_ns() // 1_000_000

    # -- metadata ----------------------------------------------------------------------------------

    def assign(self, partition: Any, given: Assignment) -> None:
        place = self.places.get(partition)
        if place is None:
            host = self.host
            control = host.controls.setdefault(partition, Control())
            log = host.logs.setdefault(partition, PartitionLog())
            if log.dropped < 0 or "rewrite" not in self.off:
                log.rewrite()  # opening leaves everything flushed
            log.durable = log.end
            core = self._make_core(log)
            place = self.places[partition] = Place(partition, log, core, control)
            core.restore(control.high_watermark)
            core.log_changed(self._now_ms())
        if given.leader == given.node and given.leader_epoch <= place.refused_epoch:
            given = given._replace(leader=-1)  # W2
        end = place.log.end
        changed = place.core.assign(given, self._now_ms())
        if place.log.end != end:
            self.history.touched(self, place)
        if changed & STALE_IGNORED:
            return
        if changed & (NEW_EPOCH | NEW_ROLE):
            place.sent = {}
            place.later = False
            self._refuse(place, NOT_LEADER)
            if place.core.leading:
                place.control.led = max(place.control.led, given.leader_epoch)
                self.history.leading(self, place)
            elif place.core.following:
                self._flush(place)
                self._fetch(place.core.leader)
        if changed & BELOW_MIN:
            self._refuse(place, NOT_ENOUGH_AFTER)
        self._moved(place, changed)
        if self._parked:
            self._answer_parked()
        self._propose(place)

    def remove(self, partition: Any) -> None:
        """The metadata no longer have a replica on this host: its files are deleted."""
        place = self.places.pop(partition, None)
        if place is not None:
            self._refuse(place, NOT_LEADER)
            self.host.logs.pop(partition, None)
            self.host.controls.pop(partition, None)

    # -- producers ---------------------------------------------------------------------------------

    def on_produce(
        self, partition: Any, producer: int, sequence: int, values: tuple[int, ...], all_acks: bool, caller: Caller
    ) -> None:
        place = self.places.get(partition)
        if place is None:
            return self._answer(caller, NOT_LEADER, -1)
        host, core, log = self.host, place.core, place.log
        error = core.may_append(all_acks, host.lease_deadline_ns, host.clock_ns())
        if not error and (self.failed or host.full):
            error = STORAGE_ERROR
        if error:
            return self._answer(caller, error, -1)
        self.history.accepted(self, place, all_acks)
        if producer >= 0:
            known = log.producers.get(producer, ())
            if sequence < len(known):
                return self._acknowledge(place, known[sequence], all_acks, caller)
            if sequence > len(known):
                return self._answer(caller, OUT_OF_ORDER, -1)
        offset, last = log.end, len(values) - 1
        for number, value in enumerate(values):
            log.append(Entry(core.leader_epoch, producer, sequence + number, value, last - number))
        self._appended(place, offset, all_acks, caller)

    def _appended(self, place: Place, offset: int, all_acks: bool, caller: Caller) -> None:
        """A batch, at `offset`."""
        changed = place.core.log_changed(self._now_ms())
        self.history.touched(self, place)
        self._moved(place, changed)
        self._acknowledge(place, offset, all_acks, caller)
        if place.core.flush_on_ack:
            self._flush(place)
        if self._parked:
            self._answer_parked()

    def on_append(self, partition: Any, leader_epoch: int, values: tuple[Any, ...], caller: Caller) -> None:
        """From a process of this host, for this leader epoch; acks=all."""
        place = self.places.get(partition)
        if place is None or place.core.leader_epoch != leader_epoch:
            return self._answer(caller, NOT_LEADER, -1)
        self.on_produce(partition, -1, 0, values, True, caller)

    def _acknowledge(self, place: Place, offset: int, all_acks: bool, caller: Caller) -> None:
        end = offset + 1 + place.log.entries[offset].left
        if not all_acks or "ack" in self.off:
            if all_acks:
                self.history.acknowledged(self, place, offset, end)
            self._answer(caller, 0, offset)
        elif place.core.high_watermark >= end:
            self.history.acknowledged(self, place, offset, end)
            self._answer(caller, 0, offset)
        else:
            place.waiting.append((end, offset, caller))

    def _refuse(self, place: Place, error: int) -> None:
        waiting, place.waiting = place.waiting, []
        for _, _, caller in waiting:
            self._answer(caller, error, -1)

    def _answer(self, caller: Caller, *what: Any) -> None:
        node, process, do, token = caller
        self.host.network.send(self.host.node, node, process, do, token, *what)

    def _moved(self, place: Place, changed: int) -> None:
        """After any change that may have advanced the high watermark."""
        if not changed & HIGH_WATERMARK:
            return
        high = place.core.high_watermark
        place.control.high_watermark = high
        self.history.moved(self, place)
        waiting = place.waiting
        if waiting and waiting[0][0] <= high or len(waiting) > 1:
            place.waiting = [entry for entry in waiting if entry[0] > high]
            for end, offset, caller in waiting:
                if end <= high:
                    self.history.acknowledged(self, place, offset, end)
                    self._answer(caller, 0, offset)

    # -- consumers ---------------------------------------------------------------------------------

    def on_read(self, partition: Any, offset: int, caller: Caller) -> None:
        place = self.places.get(partition)
        if place is None or not (place.core.leading or place.core.following):
            return self._answer(caller, NOT_LEADER, offset, ())
        if self.failed:
            return self._answer(caller, STORAGE_ERROR, offset, ())
        # an offset that an unclean election has moved into a batch: the consumer skips the records
        # before it
        entries = place.log.read(offset, min(place.core.high_watermark, offset + READ_MAX))
        entries = entries[offset - place.log.whole(offset) :]
        self.history.served(partition, offset, entries)
        self._answer(caller, 0, offset, entries)

    def on_latest(self, partition: Any, caller: Caller) -> None:
        place = self.places.get(partition)
        error = (
            NOT_LEADER if place is None or self.host.clock_ns() >= self.host.lease_deadline_ns else place.core.latest()
        )
        if error:
            return self._answer(caller, error, -1)
        self.history.reported_latest(place)
        self._answer(caller, 0, place.core.high_watermark)

    # -- the disk ----------------------------------------------------------------------------------

    def _flush(self, place: Place) -> None:
        if self.failed:
            return
        if place.flushing:
            place.flush_pending = True
        elif place.log.durable < place.log.end or place.log.undone is not None:
            place.flushing = True
            self.kernel.after(self.host.flush_delay(), self.process, self._flushed, place, place.log.flush_begin())

    def _flushed(self, place: Place, changes: int) -> None:
        place.flushing = False
        if self.failed:
            return
        if self.host.flush_fails():
            place.log.flush_failed()
            if "fsync" not in self.off:
                return self._fail()
        place.log.flush_done(changes)
        changed = place.core.log_changed(self._now_ms())
        self._moved(place, changed)
        if place.flush_pending:
            place.flush_pending = False
            self._flush(place)
        for fetcher in list(self._fetchers.values()):
            self._fetch(fetcher.leader)  # the fetcher that waited for this flush, whichever leader it follows by now
        if self._parked:
            self._answer_parked()

    def _fail(self) -> None:
        """W5."""
        self.kernel.report("directory failed", self.host.node)
        self.failed = True
        for place in self.places.values():
            self._refuse(place, STORAGE_ERROR)
        parked, self._parked = self._parked, []
        for _, requested, caller, timer in parked:
            timer.cancel()
            self._send_answers(
                [(partition, fetch, self._look_at(partition, fetch, 0)) for partition, fetch in requested], caller
            )
        self.on_failed()

    def on_failed(self) -> None:
        """Sends each subscriber its event."""

    def flush_in_background(self) -> None:
        for place in self.places.values():
            if not place.core.flush_on_ack:
                self._flush(place)

    # -- followers of ours -------------------------------------------------------------------------

    def on_fetch(self, requested: list[tuple[Any, Fetch]], caller: Caller) -> None:
        now_ms = self._now_ms()
        responses = [(partition, fetch, self._look_at(partition, fetch, now_ms)) for partition, fetch in requested]
        if any(self._worth(partition, fetch, response) for partition, fetch, response in responses):
            self._send_answers(responses, caller)
        else:
            self._token += 1
            self._parked.append(
                (self._token, requested, caller, self.kernel.timer(PARK_MAX, self.process, self._unpark, self._token))
            )
        for partition, _, response in responses:
            place = self.places.get(partition)
            if place is not None and place.core.leading:
                self._moved(place, response.changed)
                self._propose(place)
        if self._parked:
            self._answer_parked()

    def _look_at(self, partition: Any, fetch: Fetch, now_ms: int) -> Answer:
        place = self.places.get(partition)
        if place is None:
            return Answer(NOT_LEADER, -1, -1, -1, -1, -1, 0)
        if self.failed:
            return Answer(STORAGE_ERROR, -1, -1, -1, -1, -1, 0)
        return place.core.fetch(fetch, now_ms)

    def _worth(self, partition: Any, fetch: Fetch, response: Answer) -> bool:
        if response.error or response.diverging_end >= 0 or response.read_end > fetch.offset:
            return True
        place = self.places[partition]
        return place.core.high_watermark > place.sent.get(fetch.node, -1)

    def _send_answers(self, responses: list[tuple[Any, Fetch, Answer]], caller: Caller) -> None:
        out = []
        for partition, fetch, response in responses:
            entries: list[Entry] | None = []
            if not response.error and response.diverging_end < 0:
                place = self.places[partition]
                log = place.log
                entries = (
                    log.read(fetch.offset, fetch.offset + self.fetch_max)
                    if "batch" not in self.off
                    else log.entries[fetch.offset : fetch.offset + self.fetch_max]
                )
                if not entries and fetch.offset in log.damaged:  # the data it sends has a wrong checksum
                    entries = None if "CRC" not in self.off else [log.entries[fetch.offset]._replace(value=-1)]
                response = response._replace(high_watermark=place.core.high_watermark)
                place.sent[fetch.node] = response.high_watermark
            out.append((partition, fetch, response, entries))
        self._answer(caller, out)

    def _answer_parked(self) -> None:
        """Those with data to receive now."""
        parked, self._parked = self._parked, []
        for entry in parked:
            _, requested, caller, timer = entry
            for partition, fetch in requested:
                place = self.places.get(partition)
                if (
                    place is None
                    or not place.core.leading
                    or place.core.leader_epoch != fetch.leader_epoch
                    or place.log.end > fetch.offset
                    or place.core.high_watermark > place.sent.get(fetch.node, -1)
                ):
                    timer.cancel()
                    self._send_parked(requested, caller)
                    break
            else:
                self._parked.append(entry)

    def _unpark(self, token: int) -> None:
        for place, entry in enumerate(self._parked):
            if entry[0] == token:
                del self._parked[place]
                return self._send_parked(entry[1], entry[2])

    def _send_parked(self, requested: list[tuple[Any, Fetch]], caller: Caller) -> None:
        """Includes changes since then: the high watermark may advance when a follower is checked
        whose registration was forgotten meanwhile (seed 623445).
        """
        now_ms = self._now_ms()
        responses = [(partition, fetch, self._look_at(partition, fetch, now_ms)) for partition, fetch in requested]
        self._send_answers(responses, caller)
        for partition, _, response in responses:
            place = self.places.get(partition)
            if place is not None and place.core.leading:
                self._moved(place, response.changed)

    # -- as a follower -----------------------------------------------------------------------------

    def _fetch(self, leader: int) -> None:
        if self.failed:
            return
        fetcher = self._fetchers.get(leader)
        if fetcher is None:
            fetcher = self._fetchers[leader] = Fetcher(leader)
        if fetcher.busy:
            return
        requests = []
        for place in self.places.values():
            core = place.core
            if core.following and core.leader == leader and not place.later:
                fetch = core.next_fetch()
                if fetch is not None:
                    requests.append((place.partition, fetch))
                elif place.flushing:
                    return  # all together after the flush: a fetch without it would be parked, and it behind that
        if not requests:
            return
        fetcher.busy = True
        fetcher.token += 1
        host = self.host
        target = host.worker_of(leader, requests[0][0])
        fetcher.timer = self.kernel.timer(FETCH_TIMEOUT, self.process, self._fetch_late, fetcher, fetcher.token)
        if target is not None:
            host.network.send(
                host.node,
                leader,
                target.process,
                target.on_fetch,
                requests,
                (host.node, self.process, self._on_fetched, (fetcher, fetcher.token)),
            )

    def _fetch_late(self, fetcher: Fetcher, token: int) -> None:
        if fetcher.busy and fetcher.token == token:
            fetcher.busy = False
            self._fetch(fetcher.leader)

    def _on_fetched(
        self, key: tuple[Fetcher, int], responses: list[tuple[Any, Fetch, Answer, list[Entry] | None]]
    ) -> None:
        fetcher, token = key
        if not fetcher.busy or fetcher.token != token:
            return  # W3
        fetcher.busy = False
        fetcher.timer.cancel()
        for partition, fetch, response, entries in responses:
            place = self.places.get(partition)
            if place is not None and not self.failed:
                self._follow(place, fetch, response, entries)
        self._fetch(fetcher.leader)

    def _follow(self, place: Place, fetch: Fetch, response: Answer, entries: list[Entry] | None) -> None:
        core, log = place.core, place.log
        action, offset = core.step(fetch, response)
        if action == APPEND and (entries is None or (entries and self.host.full)):  # W4; W5
            self._wait(place)
        elif action == APPEND:
            if entries:
                for entry in entries:
                    log.append(entry)
                core.log_changed(self._now_ms())
                self.history.touched(self, place)
                if core.flush_on_ack and "flush" not in self.off:
                    self._flush(place)
            self._moved(place, core.followed(response.leader_epoch, response.high_watermark))
        elif action in (TRUNCATE, RESTART):
            log.truncate(offset if action == TRUNCATE else 0)
            core.log_changed(self._now_ms())
            self.history.touched(self, place)
            self._flush(place)
        else:
            self._wait(place)

    def _wait(self, place: Place) -> None:
        place.later = True
        self.kernel.after(AGAIN, self.process, self._again, place)

    def _again(self, place: Place) -> None:
        place.later = False
        if place.core.following:
            self._fetch(place.core.leader)

    # -- in-sync sets ------------------------------------------------------------------------------

    def _propose(self, place: Place) -> None:
        if place.core.leading and not self.failed:
            proposal = place.core.propose(self._now_ms(), REPEAT_MS)
            if proposal is not None:
                self.host.propose(self, place.partition, proposal)

    def on_answered(self, partition: Any, sequence: int, leader_epoch: int, error: int) -> None:
        place = self.places.get(partition)
        if place is not None and place.core.leading:
            now_ms = self._now_ms()
            self._moved(place, place.core.answered(sequence, leader_epoch, error, now_ms + REPEAT_MS))

    def _look(self) -> None:
        """Periodically: which followers lag, which requests had no response."""
        for place in self.places.values():
            if place.core.tick(self._now_ms()) & BELOW_MIN:
                self._refuse(place, NOT_ENOUGH_AFTER)
            self._propose(place)
        if self.kernel.random.random() < 0.1:
            self.flush_in_background()
        self.kernel.after(300 * MILLISECOND, self.process, self._look)
