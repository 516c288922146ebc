"""A simulated world around the core of a joint transaction: drivers that carry out batches by
tasks, die at any point, and continue as zombies beside their successors; task attempts that die,
are repeated and run concurrently; the coordinator's log and its crashes; partitions with Kafka's
rules for producers; a network that loses, delays and repeats.

Nothing runs by itself: `step()` carries out one random possible event. Runs are deterministic.

Checked, besides the core's own check() after every event
    W1  every record of a committed batch is visible once, and none of any other batch, whatever
        died and whichever task wrote it twice
    W2  a confirmed commit is in force; its driver may forget the batch
    W3  when nothing is in flight no partition has an open transaction
    W4  a request gets at most one response, and exactly one if the coordinator has not crashed
        since
    W5  a replay of the log, in any order, gives the persisted state
    W6  markers are written for decisions that are in the log, and Complete follows the markers of
        all partitions
    W7  a producer id and epoch is given to one attempt
    W8  a driver alone, without deaths and pauses, is never refused (`peaceful`)
    W9  after the response to a run's abort none of its surviving tasks begins a transaction: only
        its timeout would end it
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Generator
from typing import Any

from mqd.coordinator.actions import Persist, Reply, Timer, TimerFired
from mqd.coordinator.transaction import events
from mqd.coordinator.transaction.events import NEED_PRODUCER_ID, JointResponse, WriteMarkers
from mqd.coordinator.transaction.joint import CONCURRENT, JointTransaction
from mqd.coordinator.transaction.joint_state import FENCED_RUNS_MAX
from mqd.coordinator.transaction.records import State
from mqd.coordinator.transaction.state import Settings
from tests.sim.coordinator.transaction_world import LOST, Broken, DataPartition

NAME = "mqd.joint.query"
TIMEOUT_MS = 5_000
PARTITIONS = tuple(("t", index) for index in range(5))
SETTINGS = Settings(expiration_ms=10_000_000)
ATTEMPTS_MAX = 4

Script = Generator[tuple[str, tuple], Any, None]


class Actor:
    """Sends one request at a time and waits for its response, which may never arrive."""

    def __init__(self, world: JointWorld) -> None:
        self.world = world
        self.waiting: int | None = None
        self.alive = True
        self.script = self.live()
        self.request: tuple[str, tuple] | None = None
        self.advance(None)

    def live(self) -> Script:
        raise NotImplementedError

    def advance(self, response: object) -> None:
        self.waiting = None
        try:
            self.request = next(self.script) if response is None else self.script.send(response)
        except StopIteration:
            self.alive, self.request = False, None

    def again(self, kind: str, *arguments: object) -> Generator[tuple[str, tuple], Any, Any]:
        """Retries until there is a response."""
        while True:
            response = yield kind, arguments
            if response is not LOST and getattr(response, "error", response) != CONCURRENT:
                return response


class Attempt(Actor):
    """One task attempt: enlists, writes its share of the batch, reports. `result`: None,
    "replayed", "failed", or its (producer id, epoch).
    """

    def __init__(self, world: JointWorld, batch: int, run: str, task: int) -> None:
        world.attempts += 1
        self.number, self.batch, self.run, self.task = world.attempts, batch, run, task
        self.result: object = None
        super().__init__(world)

    def live(self) -> Script:
        world, rng = self.world, self.world.rng
        response = yield from self.again("enlist", self.batch, self.run, -1, -1)
        if response.error:
            world.refused("enlist", response.error)
            self.result = "failed"
            return
        if response.producer_id < 0:
            self.result = "replayed"
            return
        mine = (response.producer_id, response.producer_epoch)
        for record in world.share(self.batch, self.task):
            if rng.random() < 0.01 and not world.peaceful:
                return  # dies
            if rng.random() < 0.05:
                response = yield from self.again("enlist", self.batch, self.run, *mine)
                if response.error or response.producer_id < 0:
                    self.result = "failed"
                    return
            error = yield from self.again(
                "produce", *mine, rng.randrange(len(PARTITIONS)), (self.batch, record, self.number)
            )
            if error:
                world.refused("produce", error)
                self.result = "failed"
                return
        self.result = mine


class Driver(Actor):
    """Carries out batches from the checkpoint on, one after the other."""

    def __init__(self, world: JointWorld) -> None:
        world.runs += 1
        self.run = f"run-{world.runs}"
        super().__init__(world)

    def live(self) -> Script:
        world, rng = self.world, self.world.rng
        batch = world.checkpoint
        while True:
            winners = yield from self.carry_out(batch)
            if winners is None:
                if rng.random() < 0.5:
                    yield from self.again("end", batch, self.run, False, ())
                return
            response = yield from self.again("end", batch, self.run, True, winners)
            if response.error:
                world.refused("commit", response.error)
                return
            world.confirmed(batch)
            if rng.random() < 0.03 and not world.peaceful:
                return  # dies before it is remembered
            batch += 1
            world.checkpoint = max(world.checkpoint, batch)

    def carry_out(self, batch: int) -> Generator[tuple[str, tuple], Any, tuple | None]:
        world, rng = self.world, self.world.rng
        tasks = range(world.task_count(batch))
        attempts: dict[int, list[Attempt]] = {task: [self.spawn(batch, task)] for task in tasks}
        winners = []
        while True:
            yield "pause", ()
            if rng.random() < 0.003 and not world.peaceful:
                return None
            for own in attempts.values():
                if (
                    own[-1].result == "failed"
                    or not own[-1].alive
                    and own[-1].result is None
                    or (rng.random() < 0.003 and not world.peaceful)
                ):
                    if len(own) == ATTEMPTS_MAX:
                        return None
                    own.append(self.spawn(batch, own[0].task))  # a retry, or a concurrent attempt
            done = [
                next((one.result for one in own if one.result not in (None, "failed")), None)
                for own in attempts.values()
            ]
            if None not in done:
                winners = [result for result in done if result != "replayed"]
                return tuple(winners)

    def spawn(self, batch: int, task: int) -> Attempt:
        attempt = Attempt(self.world, batch, self.run, task)
        self.world.actors.append(attempt)
        return attempt


class JointWorld:
    def __init__(
        self, seed: int, make: Callable[[str, Settings], JointTransaction] = JointTransaction, peaceful: bool = False
    ) -> None:
        self.rng = random.Random(seed)
        self.make, self.peaceful = make, peaceful
        self.now = 1_000
        self.log: list[tuple[bytes, bytes | None]] = []
        self.spare = 1_000
        self.guards = self.attempts = self.runs = self.sent = self.requests = 0
        self.stalled_until = 0
        self.checkpoint = 0
        self.confirmed_max = self.committed_max = -1
        self.given: dict[tuple[int, int], int] = {}
        self.fenced: list[str] = []  # every run that the log has fenced, in order
        self.aborted: set[str] = set()  # runs whose abort was confirmed
        self.partitions = [DataPartition(self) for _ in PARTITIONS]  # type: ignore[arg-type]
        self.answers: dict[int, Callable[[object], None]] = {}
        self.network: list[Callable[[], None]] = []
        self.late: list[Callable[[], None]] = []
        self.actors: list[Actor] = []
        self.start()
        self.actors.append(Driver(self))

    # -- what batches hold -------------------------------------------------------------------------

    @staticmethod
    def task_count(batch: int) -> int:
        return 1 + batch % 3

    def share(self, batch: int, task: int) -> list[int]:
        """Records of a batch, by task; every fifth batch has none."""
        return [task * 10 + index for index in range((batch * 7 + task) % 4 if batch % 5 else 0)]

    # -- the coordinator ---------------------------------------------------------------------------

    def start(self) -> None:
        """A start of the coordinator: everything but the log is new."""
        self.core = self.replayed()
        self.queue: list[object] = []
        self.jobs: list[tuple[WriteMarkers, list[int]]] = []
        self.answers.clear()
        self.timer: int | None = None
        self.act(self.core.on_loaded(self.now))

    def replayed(self) -> JointTransaction:
        """The latest record of each key, in any order."""
        left = list(dict(self.log).items())
        self.rng.shuffle(left)
        core = self.make(NAME, SETTINGS)
        for key, value in left:
            core.replay(key, value)
        core.check()
        return core

    def act(self, actions: list) -> None:
        for action in actions:
            if type(action) is Timer:
                self.timer = action.at_ms
            else:
                self.queue.append(action)

    def feed(self, event: object) -> None:
        actions = self.core.handle(event, self.now)
        self.core.check()
        if self.core.committed_batch_id < self.committed_max and self.log:
            raise Broken(f"J1: batch {self.core.committed_batch_id} after {self.committed_max}")
        self.act(actions)

    def send_request(self, make: Callable[[int, int], object], respond: Callable[[object], None]) -> None:
        """With a producer id only when the core wants one, as the handlers do."""

        def again(found: object) -> None:
            if isinstance(found, JointResponse) and found.error == NEED_PRODUCER_ID:
                self.spare += 1
                spare = self.spare
                self.request_once(lambda number: make(number, spare), respond)
            else:
                respond(found)

        self.request_once(lambda number: make(number, -1), again)

    def request_once(self, make: Callable[[int], object], response: Callable[[object], None]) -> None:
        self.requests += 1
        self.answers[self.requests] = response
        self.feed(make(self.requests))

    def carry_out(self) -> None:
        action = self.queue.pop(0)
        if isinstance(action, Persist):
            self.log.extend(action.records)
            fresh = self.replayed()
            if (
                not any(isinstance(other, Persist) for other in self.queue)
                and fresh.durable_state() != self.core.durable_state()
            ):
                raise Broken(f"W5: {fresh.durable_state()} replayed, {self.core.durable_state()} persisted")
            self.committed_max = max(self.committed_max, fresh.committed_batch_id)
            self.check_aborted(fresh)
            if fresh.state in (State.COMPLETE_COMMIT, State.COMPLETE_ABORT) and any(left for _, left in self.jobs):
                raise Broken("W6: complete before all markers are written")
        elif isinstance(action, Reply):
            respond = self.answers.pop(action.request, None)
            if respond is None:
                raise Broken(f"W4: request {action.request} is answered twice")
            respond(action.response)
        elif isinstance(action, WriteMarkers):
            fresh = self.replayed()
            if fresh.state not in (State.PREPARE_COMMIT, State.PREPARE_ABORT) or (
                action.committed and fresh.state != State.PREPARE_COMMIT
            ):
                raise Broken(f"W6: markers without a decision in the log: {fresh.state!r}")
            self.jobs.append((action, list(range(len(action.partitions)))))

    def check_aborted(self, fresh: JointTransaction) -> None:
        """The core remembers a bounded number of runs, the most recently fenced."""
        if fresh.fenced_run_ids[-1:] != tuple(self.fenced[-1:]):
            self.fenced += fresh.fenced_run_ids[-1:]
        is_forgotten = fresh.run_id in self.fenced and fresh.run_id not in self.fenced[-FENCED_RUNS_MAX:]
        if fresh.state == State.ONGOING and fresh.run_id in self.aborted and not is_forgotten:
            raise Broken(f"W9: {fresh.run_id} was told that its transaction is over, and another one of it is open")

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
            if self.rng.random() < 0.1:
                self.late.append(deliver)
            if self.rng.random() < 0.1:
                left.append(index)
        if not left:
            self.jobs.remove((job, left))
            self.feed(events.MarkersWritten(job.attempt))

    # -- the network -------------------------------------------------------------------------------

    def send(self, actor: Actor) -> None:
        assert actor.request is not None
        kind, arguments = actor.request
        actor.request = None
        if kind == "pause":
            actor.advance(0)
            return
        self.sent += 1
        attempt = actor.waiting = self.sent
        for _ in range(1 if self.peaceful else self.rng.choice((0, 1, 1, 1, 1, 1, 2, 3))):
            deliver = functools.partial(self.deliver, kind, arguments, functools.partial(self.answer, actor, attempt))
            (self.late if self.rng.random() < 0.1 and not self.peaceful else self.network).append(deliver)

    def answer(self, actor: Actor, attempt: int, found: object) -> None:
        def arrive() -> None:
            if actor.waiting == attempt and actor.alive:
                if isinstance(found, JointResponse) and isinstance(actor, Attempt):
                    self.report(found, actor)
                actor.advance(found)

        if self.rng.random() < 0.95 or self.peaceful:
            self.network.append(arrive)

    def report(self, found: JointResponse, attempt: Attempt) -> None:
        if (
            found.producer_id >= 0
            and self.given.setdefault((found.producer_id, found.producer_epoch), attempt.number) != attempt.number
        ):
            raise Broken(f"W7: {found} is given to two attempts")

    def deliver(self, kind: str, arguments: tuple, respond: Callable[[object], None]) -> None:
        if kind == "enlist":
            batch, run, producer_id, epoch = arguments
            self.send_request(
                lambda number, spare: events.Enlist(number, batch, run, TIMEOUT_MS, producer_id, epoch, spare), respond
            )
        elif kind == "end":
            batch, run, committed, winners = arguments

            def ended(found: object) -> None:
                if not committed and isinstance(found, JointResponse) and not found.error:
                    self.aborted.add(run)
                respond(found)

            self.send_request(lambda number, _: events.EndJoint(number, batch, run, committed, winners), ended)
        else:
            self.produce(*arguments, respond)

    def produce(
        self, producer_id: int, epoch: int, index: int, record: tuple, respond: Callable[[object], None]
    ) -> None:
        partition = self.partitions[index]
        error, guard = partition.append(producer_id, epoch, record, 0)
        if error >= 0:
            respond(error)
            return

        def checked(error: object) -> None:
            def begin() -> None:
                found = error or partition.append(producer_id, epoch, record, guard)[0]
                respond(LOST if found in (-1, CONCURRENT) else found)

            self.network.append(begin)

        self.network.append(
            lambda: self.send_request(
                lambda number, _: events.AddPartitions(number, producer_id, epoch, (PARTITIONS[index],), 2), checked
            )
        )

    # -- ground truth ------------------------------------------------------------------------------

    def confirmed(self, batch: int) -> None:
        self.confirmed_max = max(self.confirmed_max, batch)
        if self.replayed().committed_batch_id < batch:
            raise Broken(f"W2: batch {batch} is confirmed, the log knows {self.replayed().committed_batch_id}")

    def refused(self, what: str, error: object) -> None:
        if self.peaceful:
            raise Broken(f"W8: {what} of a driver without rivals is refused with {error}")

    def on_outcome(self, record: tuple, committed: bool) -> None:
        """Reported by the partitions; checked at the end."""

    # -- running -----------------------------------------------------------------------------------

    def step(self) -> None:
        rng = self.rng
        self.now += rng.randrange(3)
        if not self.peaceful and self.disturb(rng.random()):
            return
        if self.timer is not None and self.timer <= self.now:
            self.timer = None
            self.feed(TimerFired("due"))
            return
        choices: list[Callable[[], None]] = []
        if self.queue:
            choices += [self.carry_out] * 3
        if self.jobs and self.now >= self.stalled_until:
            choices += [self.write_marker] * 2
        if self.network:
            choices += [lambda: self.network.pop(rng.randrange(len(self.network)))()] * 3
        if self.late and rng.random() < 0.03:
            choices.append(lambda: self.late.pop(rng.randrange(len(self.late)))())
        ready = [actor for actor in self.actors if actor.request is not None]
        if ready:
            choices += [lambda: self.send(rng.choice(ready))] * 2
        waiting = [actor for actor in self.actors if actor.waiting is not None]
        if waiting and not self.peaceful and (rng.random() < 0.03 or not choices):
            choices.append(lambda: rng.choice(waiting).advance(LOST))
        if choices:
            rng.choice(choices)()
        self.actors = [actor for actor in self.actors if actor.alive]
        if not any(isinstance(actor, Driver) for actor in self.actors):
            self.actors.append(Driver(self))

    def disturb(self, chance: float) -> bool:
        """A crash of the coordinator, of a driver with or without its tasks, a pause, an
        administrator.
        """
        if chance < 0.001:
            self.start()
        elif chance < 0.0015:
            self.now += self.rng.randrange(2 * TIMEOUT_MS)
        elif chance < 0.002:
            self.stalled_until = self.now + self.rng.randrange(1, 2_000)
        elif chance < 0.0023:
            self.send_request(lambda number, _: events.EndJoint(number, -1, "", False), lambda _: None)
        elif chance < 0.003:
            self.actors.append(Driver(self))  # a rival: the old one continues as a zombie
        elif chance < 0.004:
            kept = Attempt if self.rng.random() < 0.5 else ()
            self.actors = [actor for actor in self.actors if isinstance(actor, kept)]  # type: ignore[arg-type]
            self.actors.append(Driver(self))
        else:
            return False
        return True

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        self.settle()

    def settle(self) -> None:
        """There are no new requests; pending ones arrive, time passes."""
        self.actors = []
        self.stalled_until = 0
        for _ in range(200_000):
            if self.queue:
                self.carry_out()
            elif self.jobs:
                self.write_marker()
            elif self.network:
                self.network.pop(0)()
            elif self.late:
                self.late.pop(0)()
            elif self.core.state == State.ONGOING or self.answers:
                if self.timer is None:
                    raise Broken(f"W4: {len(self.answers)} requests wait for nothing in {self.core.state!r}")
                self.now, self.timer = max(self.now, self.timer), None
                self.feed(TimerFired("due"))
            else:
                break
        else:
            raise Broken("W3: it never becomes quiet")
        for index, partition in enumerate(self.partitions):
            for producer_id, producer in partition.producers.items():
                if producer.open:
                    raise Broken(f"W3: partition {index} has an open transaction of {producer_id}: {producer.open}")
        self.check_output()

    def check_output(self) -> None:
        seen: dict[int, list[int]] = {}
        for partition in self.partitions:
            for (batch, record, _), committed in partition.outcomes.items():
                if committed:
                    seen.setdefault(batch, []).append(record)
        last = self.core.committed_batch_id
        if last < self.confirmed_max:
            raise Broken(f"W2: batch {self.confirmed_max} was confirmed, {last} is the last one committed")
        for batch in range(last + 1):
            expected = sorted(record for task in range(self.task_count(batch)) for record in self.share(batch, task))
            if sorted(seen.pop(batch, [])) != expected:
                raise Broken(f"W1: batch {batch} is committed, and not every record of it once")
        if seen:
            raise Broken(f"W1: records of batches {sorted(seen)}, the last one committed is {last}")
