"""Shared-memory clients that die at any instruction, stop, or misbehave; and the broker's
processes killed under well-behaved ones.

After each: no torn record, acknowledged records exist, records of idempotent producers exist once,
the broker holds nothing for dead clients, and other clients, one over shared memory and one over
TCP, are not affected.

`local_killer.c` kills producers after a counted number of instructions, `local_hostile.py`
misbehaves; the checks are in `checker.py` and `holdings.py`. MQD_CRASH_SEED=N runs other rounds;
the message of a failure lists them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mqd.client.shm import attachment
from mqd.shm.attach import KeeperError
from tests.broker import Broker
from tests.crash.checker import Acknowledged, check, identity_of, summary
from tests.crash.client.holdings import Holdings, free_credits
from tests.crash.client.local_hostile import VALUES
from tests.crash.processes import kill, wait_until_healthy
from tests.crash.test_exactly_once import QUICK_GROUPS, Job
from tests.crash.workload import Load, create_topics, wait_until
from tests.interaction.traffic import batch, new_producer_id, produce
from tests.kafka_connection import KafkaConnection
from tests.polling import PATIENCE_S, eventually
from tests.preloaded import PRELOADED

ROOT = Path(__file__).resolve().parents[3]
WINDOWS = ("open", "find", "produce", "answer", "read", "close")
SHARES = (2, 10, 40, 25, 10, 13)  # how often each is chosen; attaching is long, and most of it touches nothing shared
CALM, VICTIMS = "calm", "victims"
SMALL_SEGMENTS = {"segment.bytes": "262144", "segment.index.bytes": "65536"}
DUPLICATE_SEQUENCE_NUMBER = 46
CFLAGS = (
    "CFLAGS=-std=gnu11 -D_GNU_SOURCE -O1 -fno-strict-aliasing -ffunction-sections -fdata-sections -Wall -Werror"
    " -pthread -I.."
)
BYSTANDER_ATTACHMENTS = 3  # a producer's, and a consumer's two
BACKENDS = ("epoll", "io_uring")


def quick_on(backend: str) -> list:
    """Both backends; the quick tier takes one."""
    return [pytest.param(one, marks=[] if one == backend else [pytest.mark.slow]) for one in BACKENDS]


# -- clients that die ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def local_killer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = tmp_path_factory.mktemp("killer")
    library = build / "libmqd_client.a"
    commands = (
        ["make", "-j2", "-C", ROOT / "native" / "examples", f"BUILD={build}", CFLAGS, library],
        [
            "gcc",
            "-std=gnu11",
            "-O1",
            "-Wall",
            "-Wextra",
            "-Wno-unused-parameter",
            "-Werror",
            f"-I{ROOT / 'native'}",
            ROOT / "tests" / "crash" / "client" / "local_killer.c",
            library,
            "-pthread",
            "-Wl,--gc-sections",
            "-Wl,-z,now",
            "-o",
            build / "local_killer",
        ],
    )
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return build / "local_killer"


@dataclasses.dataclass
class Round:
    """As in local_killer.c."""

    name: str
    window: int
    steps: int
    action: str
    warm: int = 1
    batches: int = 2
    records: int = 3
    producer_id: int = -1
    epoch: int = -1

    def line(self) -> str:
        return (
            f"{self.name} {self.window} {self.steps} {self.action} {self.producer_id} {self.epoch} {self.warm}"
            f" {self.batches} {self.records}"
        )

    def value(self, counter: int) -> bytes:
        body = b"%s:%d:" % (self.name.encode(), counter)
        body += bytes([ord("a") + counter % 26]) * (counter * 2654435761 % 2**32 % 600)
        return body + zlib.crc32(body).to_bytes(4, "big")


class Killer:
    """The process that starts and kills them. `story`: the rounds, and how each ended."""

    def __init__(self, program: Path, broker: Broker, topic: str) -> None:
        self.history: list[str] = []
        self._errors = open(broker.data_dir / "killer.stderr", "w+")
        self._process = subprocess.Popen(
            [program, broker.data_dir / "run" / "client.sock", topic],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def __enter__(self) -> Killer:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._process.stdin.close()
        self._process.wait(30)
        self._errors.close()

    def _log(self, line: str) -> None:
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _receive(self) -> list[str]:
        line = self._process.stdout.readline()
        assert line, f"local_killer has ended: {self.errors()}"
        return line.split()

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read()

    def play(self, one: Round, while_it_stands: Callable[[], None] | None = None) -> tuple[str, int, dict[int, int]]:
        """How it ended, the instructions, batch -> base offset of acknowledged batches.
        `while_it_stands`: called while it is stopped, if it gets that far.
        """
        self._log(one.line())
        words = self._receive()
        if words[0] == "paused":
            assert while_it_stands is not None
            while_it_stands()
            self._log("go on")
            words = self._receive()
        _, name, how, steps, _, _, *acknowledged = words
        assert name == one.name
        self.history.append(f"{one.line()} -> {how} {steps}")
        assert how != "failed", f"{self.history[-1]}: {self.errors()}"
        return (
            how,
            int(steps),
            {int(batch): int(offset) for batch, offset in (pair.split(":") for pair in acknowledged)},
        )


class Theatre:
    """A broker, its bystanders, and the history of the victims. All checks run on exit."""

    def __init__(self, broker: Broker, seed: int, *, is_mortal: bool = False) -> None:
        """`is_mortal`: the broker's processes are killed too, so that bystanders reattach."""
        self.broker, self.is_mortal = broker, is_mortal
        create_topics(broker.bootstrap, {CALM: 2, VICTIMS: 1}, {VICTIMS: SMALL_SEGMENTS})
        self.before = Holdings.of(broker)
        self.load = Load(
            broker, {CALM: 2}, others={VICTIMS: 1}, seed=seed, producers=2, consumers=2, rate=200, local=True
        )
        self.acknowledged: list[Acknowledged] = []
        self.sent: dict[str, int] = {}
        self.idempotent: set[str] = set()
        self.history: list[str] = []

    def __enter__(self) -> Theatre:
        """The memory of processes that serve is the measure: after their start they still share pages."""
        self.load.__enter__()
        self.load.wait_for_progress()
        self.before = dataclasses.replace(self.before, pss_bytes=Holdings.of(self.broker).pss_bytes)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        try:
            if kind is None:
                self._conclude()
        finally:
            self.load.__exit__()

    # -- what became of a victim -------------------------------------------------------------------

    def note(self, one: Round, acknowledged: dict[int, int], *, more: bool = False) -> None:
        """`more`: it may have sent more batches than requested."""
        self.sent[one.name] = 1 << 40 if more else (one.warm + one.batches) * one.records
        for number, base in acknowledged.items():
            if base >= 0:  # a repeated batch whose offset is no longer known is acknowledged without one
                for index in range(one.records):
                    self._acknowledge(one, number * one.records + index, base + index)

    def _acknowledge(self, one: Round, counter: int, offset: int) -> None:
        self.acknowledged.append(Acknowledged(one.name, counter, VICTIMS, 0, offset, time.monotonic_ns()))

    def succeed(self, kafka: KafkaConnection, one: Round, acknowledged: dict[int, int]) -> None:
        """The dead idempotent producer's successor resends, over TCP, batches without an
        acknowledgement: each is written or recognized, whatever its predecessor did.
        """
        self.idempotent.add(one.name)
        self.wait_for_attachments()
        for number in range(one.warm + one.batches):
            if number in acknowledged:
                continue
            values = [one.value(number * one.records + index) for index in range(one.records)]
            again = batch(
                *values, producer_id=one.producer_id, producer_epoch=one.epoch, base_sequence=number * one.records
            )
            outcome = produce(kafka, VICTIMS, 0, again)
            assert outcome.error_code in (0, DUPLICATE_SEQUENCE_NUMBER), (
                f"batch {number} of {one}: {outcome}\n{self.report()}"
            )
            if outcome.error_code == 0 and outcome.base_offset >= 0:
                for index in range(one.records):
                    self._acknowledge(one, number * one.records + index, outcome.base_offset + index)

    # -- what must hold ----------------------------------------------------------------------------

    def report(self) -> str:
        return "\n".join([*self.history[-60:], self.broker.logs()])

    def attachments(self) -> int:
        return sum(worker["local_clients"] for worker in self.broker.status()["workers"])

    def wait_for_attachments(self, seconds: float = PATIENCE_S) -> None:
        """Until only the bystanders are attached."""
        wait_until(
            lambda: self.attachments() == BYSTANDER_ATTACHMENTS,
            seconds,
            lambda: f"{self.attachments()} attachments, {BYSTANDER_ATTACHMENTS} are bystanders'\n{self.report()}",
        )

    def check_bystanders(self) -> None:
        self.wait_for_attachments()
        self.load.wait_for_progress(15)
        assert not self.load.errors(), f"{self.load.errors()[:10]}\n{self.report()}"
        if not self.is_mortal:
            names = tuple(one.name for one in (*self.load.producers, *self.load.consumers))
            generations = [
                one.generation
                for one in attachment._open_attachments
                if one.client_id.startswith(names) and not one.is_closed
            ]  # closed: those of earlier tests
            assert generations == [1] * BYSTANDER_ATTACHMENTS, (
                f"shared-memory bystanders attached {generations} times\n{self.report()}"
            )
            lost = sum(one.connections.lost for one in (*self.load.producers, *self.load.consumers))
            assert lost == 0, f"bystanders over TCP lost {lost} connections\n{self.report()}"

    def _conclude(self) -> None:
        self.check_bystanders()
        final = self.load.finish()
        history = self.load.history()
        history.acknowledged += self.acknowledged
        history.sent.update(self.sent)
        history.idempotent |= self.idempotent
        violations = check(history, final)
        assert not violations, f"{summary(violations)}\n{self.report()}"
        assert not self.load.errors(), f"{self.load.errors()[:10]}\n{self.report()}"
        for name in self.idempotent:
            found = {
                identity_of(value)[1]
                for _, value in final[VICTIMS, 0].records
                if value.startswith(name.encode() + b":")
            }
            assert found == set(range(self.sent[name])), (
                f"{name}: {sorted(set(range(self.sent[name])) ^ found)} lack or are too many\n{self.report()}"
            )
        for producer in self.load.producers:
            producer.leave()
        self.check_nothing_is_held()
        self.broker.stop()
        self._check_stored()

    def _check_stored(self) -> None:
        """Every batch stored in the files."""
        done = PRELOADED.run("log", "verify", str(self.broker.data_dir))
        assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{self.report()}"

    def check_nothing_is_held(self) -> None:
        seen: list[str] = []

        def is_clean() -> bool:
            seen[:] = Holdings.of(self.broker).beyond(self.before)
            return not seen

        eventually(is_clean, lambda: f"held for those who are gone: {seen}\n{self.report()}")


@contextlib.contextmanager
def killing(
    broker: Broker, local_killer: Path, seed: int, *, is_mortal: bool = False
) -> Iterator[tuple[Theatre, Killer, KafkaConnection, random.Random]]:
    with (
        Theatre(broker, seed, is_mortal=is_mortal) as theatre,
        Killer(local_killer, broker, VICTIMS) as killer,
        KafkaConnection(port=broker.port) as kafka,
    ):
        theatre.history = killer.history
        theatre.load.wait_for_progress()
        yield theatre, killer, kafka, random.Random(seed)


OPEN_INSTRUCTIONS = 56_000  # seconds to step through: a constant
_lengths: list[int] = []


def lengths_of_windows(theatre: Theatre, killer: Killer) -> list[int]:
    """In instructions, of a client that is not killed. Measured once."""
    if _lengths:
        return _lengths
    found = [OPEN_INSTRUCTIONS]
    for window, name in list(enumerate(WINDOWS))[1:]:
        one = Round(f"measure-{name}", window, 1 << 40, "kill", warm=0)
        how, steps, acknowledged = killer.play(one)
        assert how == "through" and steps > 500 and len(acknowledged) == one.batches
        theatre.note(one, acknowledged)
        found.append(steps)
    _lengths.extend(found)
    return _lengths


def random_round(
    kafka: KafkaConnection, chance: random.Random, name: str, window: int, steps: int, action: str
) -> Round:
    """Half of them idempotent."""
    one = Round(
        name,
        window,
        steps,
        action,
        warm=chance.choice((0, 0, 1, 5)),
        batches=chance.randrange(1, 5),
        records=chance.choice((1, 3, 8)),
    )
    if chance.random() < 0.5:
        one.producer_id, one.epoch = new_producer_id(kafka)
    return one


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("io_backend", quick_on("io_uring"))
def test_a_producer_is_killed_at_any_instruction(start_broker, local_killer, rounds, seed, io_backend):
    """In each phase of its life, after a random number of instructions: attaching, claiming and
    filling a batch, submitting it, taking its acknowledgement, reading, detaching. One in eight is
    not killed but stopped there for a while, and continues.
    """
    broker = start_broker(config={"io.backend": io_backend})
    with killing(broker, local_killer, seed) as (theatre, killer, kafka, chance):
        lengths = lengths_of_windows(theatre, killer)
        for number in range(rounds(20, 300)):
            (window,) = chance.choices(range(len(WINDOWS)), SHARES)
            one = random_round(
                kafka,
                chance,
                f"k{number}",
                window,
                chance.randrange(lengths[window]),
                "pause" if chance.random() < 0.125 else "kill",
            )
            # a client that stops at any point delays no other
            how, _, acknowledged = killer.play(one, theatre.load.wait_for_progress)
            theatre.note(one, acknowledged)
            if how == "ended":
                assert len(acknowledged) == one.warm + one.batches, killer.history[-1]
            if one.producer_id >= 0:
                theatre.succeed(kafka, one, acknowledged)
            if number % 20 == 10:
                theatre.check_bystanders()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("io_backend", quick_on("epoll"))
def test_a_producer_is_killed_or_stopped_at_any_time_under_full_load(
    start_broker, local_killer, rounds, seed, io_backend
):
    broker = start_broker(config={"io.backend": io_backend})
    with killing(broker, local_killer, seed) as (theatre, killer, kafka, chance):
        for number in range(rounds(5, 120)):
            one = random_round(
                kafka, chance, f"t{number}", -1, chance.randrange(1000, 120_000), chance.choice(("time", "time", "nap"))
            )
            _, _, acknowledged = killer.play(one, theatre.load.wait_for_progress)
            theatre.note(one, acknowledged, more=True)
            theatre.wait_for_attachments()


@pytest.mark.timeout(1800)
@pytest.mark.slow
@pytest.mark.parametrize("io_backend", BACKENDS)
def test_a_worker_is_killed_at_any_instruction_of_its_client(start_broker, local_killer, rounds, seed, io_backend):
    """The client stops after a counted instruction, its broker loses processes, the client
    continues: it reattaches, and idempotent records exist once.
    """
    broker = start_broker(config={"io.backend": io_backend})
    with killing(broker, local_killer, seed, is_mortal=True) as (theatre, killer, kafka, chance):
        lengths = lengths_of_windows(theatre, killer)
        for number in range(rounds(5, 60)):
            (window,) = chance.choices(range(len(WINDOWS)), SHARES)
            with KafkaConnection(port=broker.port) as fresh:
                one = random_round(fresh, chance, f"w{number}", window, chance.randrange(lengths[window]), "pause")
            victims = chance.choice(
                (
                    ("mqd-worker-0", "mqd-worker-1"),
                    ("mqd-worker-0",),
                    ("mqd-worker-1",),
                    ("mqd-acceptor",),
                    ("mqd-acceptor", "mqd-worker-0"),
                )
            )
            is_patient, before = chance.random() < 0.5, {}

            def end_them() -> None:
                before.update({victim: kill(broker, victim) for victim in victims})  # noqa: B023 - called in this round
                if is_patient:  # noqa: B023
                    wait_until_healthy(broker, before)  # noqa: B023

            how, _, acknowledged = killer.play(one, end_them)
            killer.history[-1] += f" kill {victims if before else 'nobody'}"
            wait_until_healthy(broker, before)
            theatre.note(one, acknowledged)
            if how == "ended":
                assert len(acknowledged) == one.warm + one.batches, killer.history[-1]
            if one.producer_id >= 0:
                theatre.idempotent.add(one.name)


# -- clients that do what no client should ---------------------------------------------------------


@contextlib.contextmanager
def hostile(broker: Broker) -> Iterator[subprocess.Popen[str]]:
    command = [
        sys.executable,
        "-m",
        "tests.crash.client.local_hostile",
        str(broker.data_dir / "run" / "client.sock"),
        VICTIMS,
    ]
    with (
        open(broker.data_dir / "hostile.stderr", "w") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT
        ) as process,
    ):
        yield process
        process.stdin.close()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("io_backend", quick_on("epoll"))
def test_hostile_clients_harm_only_themselves(start_broker, rounds, seed, io_backend):
    """Two at a time, each in a few of the ways of local_hostile.py."""
    broker = start_broker(config={"io.backend": io_backend})
    with Theatre(broker, seed) as theatre, hostile(broker) as one, hostile(broker) as other:
        theatre.load.wait_for_progress()
        theatre.sent["hostile"] = len(VALUES)
        for number in range(rounds(8, 200)):
            for process, name in ((one, "one"), (other, "other")):
                process.stdin.write(f"{seed}.{io_backend}.{number}.{name}\n")
                process.stdin.flush()
            for process in (one, other):
                theatre.history.append(process.stdout.readline().strip())
                assert theatre.history[-1].split()[1] != "failed", (
                    f"{theatre.history[-1]}\n{(broker.data_dir / 'hostile.stderr').read_text()}"
                )
            if number % 10 == 7:
                theatre.check_bystanders()


# -- the broker's processes, under clients that behave ---------------------------------------------


def strike(broker: Broker, chance: random.Random) -> tuple[str, dict[str, int]]:
    """Kills or stops some of the broker's processes; returns a description, and the pids of the
    dead.
    """
    victims = chance.choice(
        (
            ("mqd-worker-0",),
            ("mqd-worker-1",),
            ("mqd-acceptor",),
            ("mqd-worker-0", "mqd-worker-1"),
            ("mqd-worker-0", "mqd-acceptor"),
            ("mqd-controller", "mqd-worker-1"),
        )
    )
    if chance.random() < 0.25:
        pids = [broker.pid(victim) for victim in victims]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(chance.uniform(0.01, 0.3))  # how long it is stopped
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        return f"stop {' '.join(victims)}", {}
    before: dict[str, int] = {}
    for victim in victims:
        with contextlib.suppress(KeeperError, ProcessLookupError):
            before[victim] = kill(broker, victim)
    return f"kill {' '.join(victims)}", before


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("io_backend", quick_on("io_uring"))
def test_processes_of_the_broker_are_killed_or_stopped_under_local_clients(start_broker, rounds, seed, io_backend):
    """Producers, idempotent and not, and consumers, over shared memory and over TCP. At the end
    everything that a fresh broker does not hold is free again, credits included.
    """
    broker = start_broker(config={"io.backend": io_backend})
    wait_until_healthy(broker, {name: kill(broker, name) for name in ("mqd-worker-0", "mqd-worker-1")})
    credits_before = free_credits(broker)
    chance, left, history = random.Random(f"{seed} strikes"), rounds(2, 60), []
    while left > 0:
        now = min(left, 10)
        left -= now
        topics, relaxed = {f"plain-{left}": 3, f"rolling-{left}": 2}, {f"relaxed-{left}": 2}
        create_topics(
            broker.bootstrap,
            {**topics, **relaxed},
            {f"rolling-{left}": {"segment.bytes": "131072"}, f"relaxed-{left}": {"flush.on.ack": "false"}},
        )
        with Load(
            broker, topics, relaxed=relaxed, seed=seed * 1000 + left, producers=3, consumers=2, local=True
        ) as load:
            load.wait_for_progress()
            for _ in range(now):
                time.sleep(chance.uniform(0, 0.4))  # a random moment under load
                what, before = strike(broker, chance)
                history.append(what)
                wait_until_healthy(broker, before)
                load.wait_for_progress()
            final = load.finish()
            violations = check(load.history(), final)
            assert not violations, f"{history}\n{summary(violations)}\n{broker.logs()}"
            assert not load.errors(), f"{history}\n{load.errors()[:10]}\n{broker.logs()}"
        for producer in load.producers:
            producer.leave()
    eventually(
        lambda: sum(worker["local_clients"] for worker in broker.status()["workers"]) == 0,
        lambda: f"clients are left: {broker.status()['workers']}",
    )
    wait_until_healthy(broker, {name: kill(broker, name) for name in ("mqd-worker-0", "mqd-worker-1")})
    eventually(
        lambda: free_credits(broker) == credits_before,
        lambda: f"credits {free_credits(broker)}, at first {credits_before}; {history}",
    )


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize("run", range(12))
def test_a_copy_job_in_transactions_over_shared_memory(start_broker, tmp_path, rounds, seed, run):
    """Its members and the broker's processes are killed; the output is the input, every record
    once, in order.
    """
    backend, protocol = BACKENDS[run & 1], ("classic", "consumer")[(run ^ run >> 1) & 1]
    broker = start_broker(config={"io.backend": backend, **QUICK_GROUPS})
    with Job(broker, tmp_path, f"{seed}.local.{run}", protocol, "shm") as job:
        job.wait_until_it_copies()
        for _ in range(rounds(2, 12)):
            job.kill_at_random()
        job.wait_until_it_copies()
        job.finish()
