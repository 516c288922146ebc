"""A simulated world around the core of one transactional id: its log, partitions with Kafka's rules
for producers, clients, and a network that loses, delays and repeats.

Nothing runs by itself: `step()` carries out one random possible event. Runs are deterministic.

Checked, besides the core's own check() after every event
    W1  a commit marker covers records of one transaction only, and its client requested that commit
    W2  all records of an ended transaction share one outcome; a confirmed outcome is the one in
        every partition, and covers every acknowledged record
    W3  when nothing is in flight no partition has an open transaction
    W4  a request gets at most one response, and exactly one if the coordinator has not crashed
        since
    W5  a replay of the log gives the persisted state
    W6  markers are written for decisions that are in the log, and Complete follows the markers of
        all its partitions
    W7  the epoch of a producer id never decreases, and no client gets the last epoch
    W8  a client alone, without pauses, crashes and administrators, is never refused (`peaceful`)
Every request of version 2 clients may be repeated and delayed. Of version 0 clients this holds for
Produce; AddPartitionsToTxn and EndTxn arrive once and in order, because that protocol cannot
distinguish a repetition from the next transaction.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from mqd.coordinator.actions import Persist, Reply, Timer, TimerFired
from mqd.coordinator.transaction import events
from mqd.coordinator.transaction.core import CONCURRENT, Transaction
from mqd.coordinator.transaction.events import NEED_PRODUCER_ID, Identity, WriteMarkers
from mqd.coordinator.transaction.records import State, TransactionValue, encode_key, encode_value
from mqd.coordinator.transaction.state import EPOCH_MAX, Settings

NAME = "orders"
TIMEOUT_MS = 5_000
PARTITIONS = tuple(("t", index) for index in range(8))
SETTINGS = Settings(expiration_ms=10_000_000)
PRODUCER_FENCED_HERE = 47
LOST = object()  # a client's view of a request without a response in time


class Broken(AssertionError):
    """An invariant of the world."""


@dataclass
class Producer:
    """What a partition knows of one producer id."""

    epoch: int
    open: list[tuple[int, int]] | None = None  # records, each (transaction, number)
    guard: int = 0
    seen: set[tuple[int, int]] = field(default_factory=set)


class DataPartition:
    """The native contract: a transaction begins only with the guard that was issued for it; a
    marker ends it and invalidates guards.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.producers: dict[int, Producer] = {}
        self.outcomes: dict[tuple[int, int], bool] = {}

    def append(self, producer_id: int, epoch: int, record: tuple[int, int], guard: int) -> tuple[int, int]:
        """(error, guard): error -1 asks for verification."""
        producer = self.producers.setdefault(producer_id, Producer(epoch))
        if epoch < producer.epoch:
            return PRODUCER_FENCED_HERE, 0
        if record in producer.seen:
            return 0, 0
        if producer.open is None or epoch > producer.epoch:
            if not guard or guard != producer.guard:
                if not producer.guard:
                    self.world.guards += 1
                    producer.guard = self.world.guards
                return -1, producer.guard
            if epoch > producer.epoch and producer.open:
                raise Broken(f"W1: epoch {epoch} begins within a transaction of epoch {producer.epoch}")
            producer.open = []
        producer.epoch = epoch
        producer.open.append(record)
        producer.seen.add(record)
        return 0, 0

    def marker(self, producer_id: int, epoch: int, committed: bool, is_bumped: bool) -> None:
        producer = self.producers.setdefault(producer_id, Producer(epoch - is_bumped))
        if epoch < producer.epoch + is_bumped:
            return  # a repetition
        for record in producer.open or ():
            self.outcomes[record] = committed
            self.world.on_outcome(record, committed)
        producer.epoch, producer.open, producer.guard = epoch, None, 0


Script = Generator[tuple[str, tuple], object, None]


class Client:
    """One producer application; it restarts with a new identity when it was fenced."""

    def __init__(self, world: World, version: int) -> None:
        self.world, self.version = world, version
        self.identity = (-1, -1)
        self.waiting: int | None = None  # the attempt whose response it waits for
        self.pauses_until = 0
        self.script = self.live()
        self.request: tuple[str, tuple] | None = next(self.script)

    def live(self) -> Script:
        while True:
            yield from self.initialise(recover=False)
            while (yield from self.transaction()):
                if self.world.rng.random() < 0.05:
                    break  # restarts
            if self.world.rng.random() < 0.2 and not self.world.peaceful:
                self.pauses_until = self.world.now + self.world.rng.randrange(3 * TIMEOUT_MS)

    def initialise(self, recover: bool) -> Generator[tuple[str, tuple], object, bool]:
        while True:
            expected = self.identity if recover else (-1, -1)
            response = yield "init", expected
            if isinstance(response, Identity):
                if response.error == 0:
                    self.world.report(response)
                    self.identity = (response.producer_id, response.producer_epoch)
                    return True
                if response.error != CONCURRENT:
                    self.world.refused(self, "init", response.error)
                    return False

    def transaction(self) -> Generator[tuple[str, tuple], object, bool]:
        """False: fenced, or unsure of its identity."""
        world, rng = self.world, self.world.rng
        number = world.begin(self)
        sure = True
        added: set[int] = set()
        for serial in range(rng.randrange(4)):
            partition = rng.randrange(len(PARTITIONS))
            if self.version < 2 and partition not in added:
                if not (yield from self.add(partition)):
                    return False
                added.add(partition)
            response = yield "produce", (*self.identity, partition, (number, serial))
            tries = 0
            while response is LOST and tries < 2 and rng.random() < 0.7:
                tries += 1
                response = yield "produce", (*self.identity, partition, (number, serial))
            if response == 0:
                world.acknowledged.setdefault(number, set()).add((partition, (number, serial)))
            else:
                sure = False
                if response is not LOST:
                    world.refused(self, "produce", response)
                break
            if rng.random() < 0.02 and not world.peaceful:
                self.pauses_until = world.now + rng.randrange(2 * TIMEOUT_MS)
        committed = sure and rng.random() < 0.8
        if (self.version < 2 and not added) or (committed and number not in world.acknowledged):
            return True  # nothing to end: clients send no request
        return (yield from self.end(number, committed, sure))

    def add(self, partition: int) -> Generator[tuple[str, tuple], object, bool]:
        while True:
            response = yield "add", (*self.identity, partition)
            if response == 0:
                return True
            if response not in (CONCURRENT, LOST):
                return False

    def end(self, number: int, committed: bool, sure: bool) -> Generator[tuple[str, tuple], object, bool]:
        world = self.world
        world.requested[number] = committed
        while True:
            response = yield "end", (*self.identity, committed)
            if response is LOST:
                if world.rng.random() < 0.03:
                    return False
                continue
            assert isinstance(response, Identity)
            if response.error == CONCURRENT:
                continue
            if response.error:
                world.refused(self, "end", response.error)
                return False
            world.confirmed[number] = committed
            if self.version >= 2:
                world.report(response)
                self.identity = (response.producer_id, response.producer_epoch)
                return True
            return sure or (yield from self.initialise(recover=True))

    def take(self, response: object) -> None:
        self.waiting = None
        self.request = self.script.send(response)


class World:
    def __init__(
        self,
        seed: int,
        versions: tuple[int, ...] = (2, 2),
        make: Callable[[str, Settings], Transaction] = Transaction,
        first_epoch: int = -1,
        peaceful: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        self.make = make
        self.peaceful = peaceful
        self.now = 1_000
        self.step_count = 0
        self.log: list[tuple[bytes, bytes | None]] = []
        self.spare = 1_000
        self.guards = 0
        self.stalled_until = 0
        self.transactions = 0
        self.requested: dict[int, bool] = {}
        self.confirmed: dict[int, bool] = {}
        self.acknowledged: dict[int, set[tuple[int, tuple[int, int]]]] = {}
        self.epochs: dict[int, int] = {}
        self.owners: dict[int, Client] = {}
        self.partitions = [DataPartition(self) for _ in PARTITIONS]
        self.requests = 0
        self.answers: dict[int, Callable[[object], None]] = {}  # by request number, since the coordinator's start
        self.attempts = 0
        self.network: list[Callable[[], None]] = []
        self.ordered: list[Callable[[], None]] = []  # must not overtake
        self.late: list[Callable[[], None]] = []  # arrives some transactions later
        if first_epoch >= 0:
            value = TransactionValue(
                7, first_epoch, TIMEOUT_MS, State.COMPLETE_COMMIT, (), self.now, self.now, 7, -1, 2
            )
            self.log.append((encode_key(NAME), encode_value(value)))
        self.start()
        self.clients = [Client(self, version) for version in versions]

    # -- the coordinator ---------------------------------------------------------------------------

    def start(self) -> None:
        """A start of the coordinator: everything but the log is new."""
        self.core = self.make(NAME, SETTINGS)
        for key, value in self.log:
            self.core.replay(key, value)
        self.core.check()
        self.queue: list[object] = []
        self.durables: list[tuple] = []
        self.jobs: list[tuple[WriteMarkers, list[int]]] = []
        self.answers.clear()
        self.timer: int | None = None
        self.act(self.core.on_loaded(self.now))

    def act(self, actions: list) -> None:
        for action in actions:
            if type(action) is Timer:
                self.timer = action.at_ms
            else:
                self.queue.append(action)

    def feed(self, event: object) -> None:
        before = (self.core.producer_id, self.core.producer_epoch)
        actions = self.core.handle(event, self.now)
        self.core.check()
        after = (self.core.producer_id, self.core.producer_epoch)
        if before[0] == after[0] and after[1] < before[1]:
            raise Broken(f"W7: epoch {after[1]} after {before[1]} of producer {before[0]}")
        self.act(actions)

    def send_request(self, make: Callable[[int], object], response: Callable[[object], None]) -> None:
        self.requests += 1
        self.answers[self.requests] = response
        self.feed(make(self.requests))

    def request_with_spare(self, make: Callable[[int, int], object], respond: Callable[[object], None]) -> None:
        """As in the handlers: a producer id only when the core requests one."""

        def again(found: object) -> None:
            if isinstance(found, Identity) and found.error == NEED_PRODUCER_ID:
                self.spare += 1
                spare = self.spare
                self.send_request(lambda number: make(number, spare), respond)
            else:
                respond(found)

        self.send_request(lambda number: make(number, -1), again)

    def carry_out(self) -> None:
        """The oldest effect of the core: effects are carried out in order."""
        action = self.queue.pop(0)
        if isinstance(action, Persist):
            self.log.extend(action.records)
            fresh = self.make(NAME, SETTINGS)
            for key, value in self.log[-1:]:
                fresh.replay(key, value)
            if (
                not any(isinstance(other, Persist) for other in self.queue)
                and fresh.durable_state() != self.core.durable_state()
            ):
                raise Broken(f"W5: {fresh.durable_state()} replayed, {self.core.durable_state()} persisted")
            if fresh.state in (State.COMPLETE_COMMIT, State.COMPLETE_ABORT) and self.jobs and self.jobs[0][1]:
                raise Broken("W6: complete before all markers are written")
        elif isinstance(action, Reply):
            respond = self.answers.pop(action.request, None)
            if respond is None:
                raise Broken(f"W4: request {action.request} is answered twice")
            respond(action.response)
        elif isinstance(action, WriteMarkers):
            fresh = self.make(NAME, SETTINGS)
            fresh.replay(*self.log[-1])
            if (
                fresh.state not in (State.PREPARE_COMMIT, State.PREPARE_ABORT)
                or (fresh.state == State.PREPARE_COMMIT) != action.committed
            ):
                raise Broken(f"W6: markers without a decision in the log: {fresh.state!r}")
            self.jobs.append((action, list(range(len(action.partitions)))))

    def write_marker(self) -> None:
        job, left = self.rng.choice(self.jobs)
        if left:
            index = left.pop(self.rng.randrange(len(left)))
            deliver = functools.partial(
                self.partitions[job.partitions[index][1]].marker,
                job.producer_id,
                job.producer_epoch,
                job.committed,
                job.is_bumped,
            )
            deliver()
            if job.is_bumped and self.rng.random() < 0.1:
                self.late.append(deliver)  # arrives twice, the second time during a later transaction
            if self.rng.random() < 0.1:
                left.append(index)  # its response was lost: retry
        if not left:
            self.jobs.remove((job, left))
            self.feed(events.MarkersWritten(job.attempt))

    # -- the network -------------------------------------------------------------------------------

    def send(self, client: Client) -> None:
        assert client.request is not None
        kind, arguments = client.request
        client.request = None
        self.attempts += 1
        attempt = client.waiting = self.attempts
        # A late repetition of a first InitProducerId fences the producer id that it created: the
        # protocol requires it.
        once = kind in ("add", "end", "init") if client.version < 2 else kind == "init" and self.peaceful
        copies = 1 if once else self.rng.choice((0, 1, 1, 1, 1, 2, 3))
        for _ in range(copies):
            deliver = self.delivery(client, attempt, kind, arguments)
            (self.ordered if once else self.late if self.rng.random() < 0.15 else self.network).append(deliver)

    def delivery(self, client: Client, attempt: int, kind: str, arguments: tuple) -> Callable[[], None]:
        def answer(found: object) -> None:
            def arrive() -> None:
                if client.waiting == attempt:
                    client.take(found)

            if self.rng.random() < 0.95 or self.peaceful:
                self.network.append(arrive)

        return lambda: self.deliver(client.version, kind, arguments, answer)

    def deliver(self, version: int, kind: str, arguments: tuple, response: Callable[[object], None]) -> None:
        if kind == "init":
            producer_id, epoch = arguments
            self.request_with_spare(
                lambda number, spare: events.InitProducerId(number, TIMEOUT_MS, producer_id, epoch, spare), response
            )
        elif kind == "add":
            producer_id, epoch, partition = arguments
            self.send_request(
                lambda number: events.AddPartitions(number, producer_id, epoch, (PARTITIONS[partition],)), response
            )
        elif kind == "end":
            producer_id, epoch, committed = arguments
            self.request_with_spare(
                lambda number, spare: events.EndTransaction(number, producer_id, epoch, committed, version, spare),
                response,
            )
        else:
            self.produce(version, *arguments, response)

    def produce(
        self,
        version: int,
        producer_id: int,
        epoch: int,
        index: int,
        record: tuple[int, int],
        respond: Callable[[object], None],
    ) -> None:
        partition = self.partitions[index]
        error, guard = partition.append(producer_id, epoch, record, 0)
        if error >= 0:
            respond(error)
            return

        def checked(found: object) -> None:
            def begin() -> None:
                error = found[0] if isinstance(found, tuple) else found
                if not error:
                    error = partition.append(producer_id, epoch, record, guard)[0]
                respond(LOST if error in (-1, CONCURRENT) else error)  # retriable

            self.network.append(begin)

        def check() -> None:
            which = (PARTITIONS[index],)
            if version >= 2:
                self.send_request(lambda number: events.AddPartitions(number, producer_id, epoch, which, 2), checked)
            else:
                self.send_request(lambda number: events.VerifyPartitions(number, producer_id, epoch, which), checked)

        self.network.append(check)

    # -- ground truth ------------------------------------------------------------------------------

    def begin(self, client: Client) -> int:
        self.transactions += 1
        self.owners[self.transactions] = client
        return self.transactions

    def report(self, identity: Identity) -> None:
        if identity.producer_epoch >= EPOCH_MAX:
            raise Broken("W7: a client is told the last epoch")

    def refused(self, client: Client, what: str, error: object) -> None:
        if self.peaceful:
            raise Broken(f"W8: {what} of a client without rivals is refused with {error}")

    def on_outcome(self, record: tuple[int, int], committed: bool) -> None:
        transaction = record[0]
        if committed and self.requested.get(transaction) is not True:
            raise Broken(f"W1: transaction {transaction} is committed, its client never asked for that")
        if self.confirmed.get(transaction, committed) != committed:
            raise Broken(
                f"W2: transaction {transaction} was confirmed {self.confirmed[transaction]}, a marker says {committed}"
            )

    # -- running -----------------------------------------------------------------------------------

    def step(self) -> None:
        self.step_count += 1
        rng = self.rng
        chance = 1.0 if self.peaceful else rng.random()
        if chance < 0.001:
            self.start()  # a crash
            return
        if chance < 0.0015:
            self.now += rng.randrange(2 * TIMEOUT_MS)
        elif chance < 0.0025 and self.core.producer_id >= 0:
            self.send_request(lambda number: events.AbortByAdministrator(number, self.core.producer_id), lambda _: None)
        elif chance < 0.005:
            self.stalled_until = self.now + rng.randrange(1, 2_000)  # markers cannot be written
        self.now += rng.randrange(3)
        if self.timer is not None and self.timer <= self.now:
            self.timer = None
            self.feed(TimerFired("due"))
            return
        choices: list[Callable[[], None]] = []
        if self.queue:
            choices += [self.carry_out] * 3
        if self.jobs and self.now >= self.stalled_until:
            choices += [self.write_marker] * 3
        if self.network:
            choices += [self.from_network] * 3
        if len(self.late) > rng.randrange(1, 60):
            choices.append(lambda: self.late.pop(rng.randrange(len(self.late)))())
        if self.ordered:
            choices += [lambda: self.ordered.pop(0)()] * 2
        for client in self.clients:
            if client.request is not None and client.pauses_until <= self.now:
                choices += [lambda client=client: self.send(client)] * 2
            elif client.waiting is not None and rng.random() < 0.02 and not self.ordered:
                choices.append(lambda client=client: client.take(LOST))
        if choices:
            rng.choice(choices)()
        else:
            self.when_quiet()

    def when_quiet(self) -> None:
        """A waiting client gives up; otherwise time passes until something is due."""
        waiting = [client for client in self.clients if client.waiting is not None]
        if waiting and self.now >= self.stalled_until:
            waiting[0].take(LOST)
        else:
            self.now = min(
                [at for at in (self.stalled_until, *(client.pauses_until for client in self.clients)) if at > self.now],
                default=self.now,
            )

    def from_network(self) -> None:
        """Mostly the oldest; sometimes any, so that a few are very late."""
        at = self.rng.randrange(len(self.network)) if self.rng.random() < 0.3 else 0
        self.network.pop(at)()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        self.settle()

    def settle(self) -> None:
        """No new requests; pending ones arrive, every timeout passes. Then W2, W3 and W4 must hold."""
        for client in self.clients:
            client.waiting = None
        for _ in range(100_000):
            if self.queue:
                self.carry_out()
            elif self.jobs:
                self.write_marker()
            elif self.ordered:
                self.ordered.pop(0)()
            elif self.network:
                self.network.pop(0)()
            elif self.late:
                self.late.pop(0)()
            elif self.core.state == State.ONGOING or self.answers:
                if self.timer is None:
                    raise Broken(f"W4: {len(self.answers)} requests wait for nothing in {self.core.state!r}")
                self.now = max(self.now, self.timer)
                self.timer = None
                self.feed(TimerFired("due"))
            else:
                break
        for index, partition in enumerate(self.partitions):
            for producer_id, producer in partition.producers.items():
                if producer.open:
                    raise Broken(f"W3: partition {index} has an open transaction of {producer_id}: {producer.open}")
        self.check_outcomes()

    def check_outcomes(self) -> None:
        outcomes: dict[int, set[bool]] = {}
        for partition in self.partitions:
            for (transaction, _), committed in partition.outcomes.items():
                outcomes.setdefault(transaction, set()).add(committed)
        for transaction, found in outcomes.items():
            if len(found) > 1:
                raise Broken(f"W2: transaction {transaction} is committed in part")
        for transaction, committed in self.confirmed.items():
            for index, record in self.acknowledged.get(transaction, ()):
                if self.partitions[index].outcomes.get(record) != committed:
                    raise Broken(
                        f"W2: record {record} of a transaction confirmed {committed} is"
                        f" {self.partitions[index].outcomes.get(record)}"
                    )
