"""One run: a cluster in namespaces, clients on it, faults from a seed, then healing and checks."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from perf import revision
from tests.chaos import checker, faults, history, members, replicas, secured
from tests.chaos.guests import rights
from tests.chaos.history import FinalLog, Place
from tests.chaos.hosts import ChaosCluster, Extras, Targets
from tests.chaos.network import Network
from tests.chaos.secured import Security

ROOT = Path(__file__).resolve().parents[2]
TOPICS = {"plain": 3, "mixed": 2, "atomic": 3}
CONFIG = {
    "group.initial.rebalance.delay.ms": "300",
    "group.min.session.timeout.ms": "2000",
    "transaction.max.timeout.ms": "60000",
    "offsets.topic.num.partitions": "5",
    "transaction.state.log.num.partitions": "5",
}
PROGRESS_SECONDS = 60.0
END_SECONDS = 90.0
DISK_BYTES = 3 << 30
CREATE = """
import json, sys
from confluent_kafka.admin import AdminClient, NewTopic
operator, topics, config = json.loads(sys.argv[1])
admin = AdminClient({**operator, "log_level": 0})
for future in admin.create_topics([NewTopic(name, count, min(3, len(admin.list_topics(timeout=20).brokers)), config=config) for name, count in topics.items()]).values():
    future.result(30)
"""
IN_SYNC = """
import json, sys
from confluent_kafka.admin import AdminClient
operator, topics = json.loads(sys.argv[1])
found = AdminClient({**operator, "log_level": 0}).list_topics(timeout=20).topics
behind = [f"{name}-{index}: leader {one.leader}, replicas {one.replicas}, in sync {one.isrs}" for name in found for index, one in found[name].partitions.items()
          if one.leader < 0 or set(one.isrs) != set(one.replicas)]
print(json.dumps(behind))
"""
PLACES = """
import json, sys
from confluent_kafka.admin import AdminClient
operator, topics = json.loads(sys.argv[1])
found = AdminClient({**operator, "log_level": 0}).list_topics(timeout=20).topics
print(json.dumps([[name, index, sorted(one.replicas)] for name in topics for index, one in found[name].partitions.items()]))
"""


@dataclasses.dataclass
class Plan:
    seed: int
    seconds: float
    kinds: list[str]
    hosts: int = 3
    workers: int = 1
    rate: int = 80
    secured: bool = False
    queues: bool = False


@dataclasses.dataclass
class Result:
    plan: Plan
    anomalies: list[checker.Anomaly] = dataclasses.field(default_factory=list)
    faults: list[str] = dataclasses.field(default_factory=list)
    numbers: dict[str, float] = dataclasses.field(default_factory=dict)
    # fault -> writers' seconds from its beginning to the next one's: [served, all]
    kinds: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    failure: str = ""  # the run itself did not complete
    # when the run began, and the commit of its tree
    date: str = dataclasses.field(default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat("T", "seconds"))
    commit: str = dataclasses.field(default_factory=revision.commit)

    @property
    def ok(self) -> bool:
        return not self.anomalies and not self.failure

    def line(self) -> str:
        return json.dumps(
            {
                "date": self.date,
                "commit": self.commit,
                "seed": self.plan.seed,
                "seconds": self.plan.seconds,
                **({"secured": True} if self.plan.secured else {}),
                **({"queues": True} if self.plan.queues else {}),
                "ok": self.ok,
                "faults": len(self.faults),
                **self.numbers,
                "kinds": self.kinds,
                "anomalies": Counter(one.kind for one in self.anomalies),
                "failure": self.failure[:300],
            }
        )


class Client:
    """A client process that is restarted when it has ended by itself."""

    def __init__(self, run: Run, role: str, name: str, topics: dict[str, int], **more: object) -> None:
        self.run, self.role, self.name = run, role, name
        self.settings = {
            "role": role,
            "name": name,
            "topics": topics,
            "history": str(run.directory / f"{name}.jsonl"),
            "seed": run.plan.seed,
            "rate": run.plan.rate,
            **run.reached(),
            **more,
        }
        self.lives = 0
        self.process: subprocess.Popen | None = None

    def tend(self) -> None:
        if self.process is not None and self.process.poll() is None:
            return
        self.lives += 1
        # A later life restarts its record numbers, so it has another name; a transactional one
        # keeps its id, and is the successor that fences the first.
        settings = {
            **self.settings,
            "name": self.name if self.lives == 1 else f"{self.name}.{self.lives}",
            "transactional": self.name,
        }
        with (self.run.directory / f"{self.name}.stderr").open("ab") as errors:
            self.process = subprocess.Popen(
                self.run.network.run(
                    faults.CLIENTS, [sys.executable, "-m", "tests.chaos.client", json.dumps(settings)]
                ),
                cwd=ROOT,
                stderr=errors,
            )

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def wait(self, until: float) -> bool:
        assert self.process is not None
        try:
            self.process.wait(max(0.1, until - time.monotonic()))
            return True
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return False


class Run:
    """`config`: of the brokers. `progress`: the clients that must make progress, and what counts as that in their
    files.
    """

    config = CONFIG
    targets = Targets()
    reader_role = "reader"
    progress = {
        "p1": '"status": "ok"',
        "p2": '"status": "ok"',
        "x1": '"kind": "end"',
        "x2": '"kind": "end"',
        "c1": '"kind": "poll"',
    }

    def __init__(self, plan: Plan, directory: Path, log: Callable[[str], None] = lambda line: None) -> None:
        self.plan, self.directory, self.log = plan, directory, log
        self.result = Result(plan)
        self.clients: list[Client] = []
        self.begun: list[tuple[int, str]] = []  # second, kind of fault
        self.network: Network
        self.cluster: ChaosCluster
        self.topics = TOPICS | ({secured.GUARDED: secured.GUARDED_PARTITIONS} if plan.secured else {})
        self.read_topics = self.topics  # by the final reader

    def reached(self) -> dict[str, object]:
        """How clients reach the cluster."""
        security = self.cluster.security
        return {"bootstrap": self.cluster.clients_bootstrap, "login": security.login() if security is not None else {}}

    def __call__(self) -> Result:
        self.directory.mkdir(parents=True, exist_ok=True)
        kinds = self.plan.kinds
        names = [f"n{number}" for number in range(1, self.plan.hosts + 1 + bool(faults.CHANGES & set(kinds)))]
        extras = Extras(DISK_BYTES if "disk-full" in kinds else 0, "power-loss" in kinds, "wall-clock" in kinds)
        with Network([*names, faults.CLIENTS]) as self.network:
            security = Security(self.directory / "security", self.network) if self.plan.secured else None
            try:
                with ChaosCluster(
                    self.network,
                    self.directory / "hosts",
                    self.plan.hosts,
                    self.plan.workers,
                    self.config,
                    extras,
                    security,
                    self.targets,
                ) as self.cluster:
                    self._go()
                    self.cluster.keep = not self.result.ok
            except (AssertionError, OSError, subprocess.SubprocessError) as error:
                self.result.failure = f"{type(error).__name__}: {error}"
            finally:
                for client in self.clients:
                    client.end()
                for client in self.clients:
                    if client.process is not None:
                        client.wait(time.monotonic() + 5)
        return self.result

    def _go(self) -> None:
        self.cluster.wait_healthy()
        self._prepare()
        self.clients = self._load()
        self._tend()
        self._wait_progress("at the start")
        began = time.monotonic()
        self._faults(began + self.plan.seconds)
        ended = time.monotonic()
        self._heal()
        self._wait_progress("after healing")
        healed = time.monotonic()
        if faults.MOVES & set(self.plan.kinds):
            self.log(members.settle(self.cluster, stays=random.Random(f"{self.plan.seed} members").random() < 0.5))
        self._drain()
        self._end_clients(self.clients)
        self._wait_in_sync()
        final = self._read_final()
        places = {
            (topic, index): [self.cluster.hosts[node].name for node in nodes]
            for topic, index, nodes in json.loads(self._script(PLACES, self.cluster.operator, list(self.topics)))
        }
        self._judge(final, places, int(began), int(ended), healed - ended)

    def _prepare(self) -> None:
        """Creates what the clients need."""
        self._script(CREATE, self.cluster.operator, self.topics, {})
        if self.cluster.security is not None:
            operator = self.cluster.security.operator()
            self._module("guests.process", [[host.address for host in self.cluster], list(self.topics), operator])

    # -- clients -----------------------------------------------------------------------------------

    def _load(self) -> list[Client]:
        plain = {name: TOPICS[name] for name in ("plain", "mixed")}
        atomic = {name: TOPICS[name] for name in ("atomic", "mixed")}
        other = "python-" if self.plan.seed % 2 else ""  # every second run includes clients of another library
        clients = [
            Client(self, "producer", "p1", plain),
            Client(self, f"{other}producer", "p2", plain),
            Client(self, "transactor", "x1", atomic),
            Client(self, "transactor", "x2", atomic),
            Client(self, f"{other}consumer", "c1", TOPICS),
            Client(self, "member", "m1", TOPICS, group="readers"),
            Client(self, "member", "m2", TOPICS, group="readers"),
            Client(self, "member", "k1", TOPICS, group="new-readers", protocol="consumer"),
        ]
        if self.cluster.security is not None:
            hosts, operator = [host.address for host in self.cluster], self.cluster.security.operator()
            clients.append(Client(self, "guests", "guests", {}, hosts=hosts, operator=operator))
        return clients

    def _tend(self) -> None:
        for client in self.clients:
            client.tend()

    def _after_fault(self) -> None:
        self._tend()

    def _drain(self) -> None:
        """Waits until what the clients wrote has been processed, where something processes it."""

    def _count(self) -> Counter:
        """The counts of each sender and of the consumer, according to their files."""
        counts = Counter(dict.fromkeys(self.progress, 0))
        for name, mark in self.progress.items():
            with contextlib.suppress(OSError):
                counts[name] = (self.directory / f"{name}.jsonl").read_text().count(mark)
        return counts

    def _wait_progress(self, when: str) -> None:
        """Every one of them made progress: the cluster serves."""
        before, until = self._count(), time.monotonic() + PROGRESS_SECONDS
        while waiting := [name for name, count in self._count().items() if count <= before[name]]:
            self._tend()
            assert time.monotonic() < until, (
                f"{when}: no progress of {waiting} within {PROGRESS_SECONDS:.0f} s\n{self.cluster.logs()}"
            )
            time.sleep(0.2)  # other processes: there is no event to wait for

    def _end_clients(self, clients: list[Client]) -> None:
        for client in clients:
            client.end()
        until = time.monotonic() + END_SECONDS
        late = [client.name for client in clients if not client.wait(until)]
        assert not late, f"clients did not come to an end: {late}\n{self.cluster.logs()}"

    # -- faults ------------------------------------------------------------------------------------

    def _faults(self, until: float) -> None:
        rng = random.Random(self.plan.seed)
        following = faults.schedule(rng, self.cluster, self.plan.kinds)
        changes: list[faults.Change] = []
        while time.monotonic() < until:
            fault = following()
            lasts = min(fault.seconds(), max(0.5, until - time.monotonic()))
            self.begun.append((int(time.monotonic()), fault.kind))
            fault.begin()
            self.result.faults.append(fault.text)
            self.log(f"{fault.text}, for {lasts:.1f} s")
            time.sleep(lasts)
            self._end_changes(changes, amid=True)
            if isinstance(fault, faults.Change):
                changes.append(fault)
            else:
                fault.end()
            self._end_changes(changes, amid=False)
            self._after_fault()
            time.sleep(rng.choice((0.0, 0.5, 2.0, 6.0)))

    def _end_changes(self, changes: list[faults.Change], amid: bool) -> None:
        """`amid`: another fault has begun since these, and continues."""
        for change in list(changes):
            change.left -= amid
            if change.left <= 0 and (change.amid or not amid):
                changes.remove(change)
                change.end()
                self.log(f"  {change.text}")

    def _heal(self) -> None:
        self.log("healing")
        self.network.heal()
        for host in self.cluster:
            host.resume()
            if host.extras.disk_bytes:
                host.free_disk()
            if host.extras.clocks:
                host.wall_clock(0.0)
            if not host.runs:
                host.start()
        self.cluster.wait_healthy()

    # -- judgement ---------------------------------------------------------------------------------

    def _script(self, code: str, *arguments: object) -> str:
        done = subprocess.run(
            self.network.run(faults.CLIENTS, [sys.executable, "-c", code, json.dumps(arguments)]),
            capture_output=True,
            text=True,
            timeout=90,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    def _wait_in_sync(self) -> None:
        until = time.monotonic() + PROGRESS_SECONDS
        while behind := json.loads(self._script(IN_SYNC, self.cluster.operator, self.topics)):
            assert time.monotonic() < until, (
                f"replicas are not in sync within {PROGRESS_SECONDS:.0f} s after healing:"
                f" {behind[:5]}\n{self.cluster.logs()}"
            )
            time.sleep(0.5)  # other hosts copy

    def _read_final(self) -> dict[Place, FinalLog]:
        self.log("reading everything")
        settings = {
            "role": self.reader_role,
            "name": "reader",
            "topics": self.read_topics,
            "history": str(self.directory / "reader.jsonl"),
            "seed": 0,
            **self.reached(),
        }
        message = self._module("client", settings)
        (self.directory / "final.json").write_text(message)
        return final_of(message)

    def _module(self, name: str, settings: object) -> str:
        """Runs a module of tests.chaos in the clients' namespace, and waits for its end."""
        command = [sys.executable, "-m", f"tests.chaos.{name}", json.dumps(settings)]
        done = subprocess.run(
            self.network.run(faults.CLIENTS, command), cwd=ROOT, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, f"{name} failed: {done.stderr[-2000:]}"
        return done.stdout

    def _judge(
        self, final: dict[Place, FinalLog], places: dict[Place, list[str]], began: int, ended: int, heal_s: float
    ) -> None:
        found = history.read(self.directory.glob("*.jsonl"))
        self.result.anomalies, judged = self._check(found, final)
        for host in self.cluster:
            host.stop()
        different = replicas.compare({host.name: host.data_dir for host in self.cluster}, places)
        self.result.anomalies += [checker.Anomaly("replicas-differ", text) for text in different]
        status = Counter(send.status for send in found.sends)
        ends = {(end.client, end.txn): end for end in found.ends}
        senders = [
            client.name for client in self.clients if client.role.rpartition("-")[2] in ("producer", "transactor")
        ]
        for (since, kind), (until, _) in zip(self.begun, [*self.begun[1:], (ended, "")], strict=True):
            served, everything = history.served(found, senders, since, until)
            known = self.result.kinds.get(kind, [0, 0])
            self.result.kinds[kind] = [known[0] + served, known[1] + everything]
        writers, readers = history.served(found, senders, began, ended), history.served(found, ["c1"], began, ended)
        self.result.numbers = {
            "acknowledged": status["ok"],
            "unknown": status["info"],
            "refused": status["fail"],
            "polled": len(found.polls),
            "transactions": sum(end.status == "ok" for end in ends.values()),
            "transactions_unknown": sum(end.status != "ok" for end in ends.values()),
            "fault_seconds": ended - began,
            "writer_seconds": writers[1],
            "writer_seconds_served": writers[0],
            "reader_seconds": readers[1],
            "reader_seconds_served": readers[0],
            "writers_available": round(writers[0] / max(1, writers[1]), 4),
            "readers_available": round(readers[0] / max(1, readers[1]), 4),
            "heal_s": round(heal_s, 1),
            **judged,
        }

    def _check(
        self, found: history.History, final: dict[Place, FinalLog]
    ) -> tuple[list[checker.Anomaly], Counter[str]]:
        """The anomalies, and what there was to judge."""
        guarded = [final.pop(place) for place in list(final) if place[0] == secured.GUARDED]
        anomalies = checker.check(found, final)
        if not self.plan.secured:
            return anomalies, Counter()
        lines = rights.read(self.directory.glob("guests*.jsonl"))
        more, counts = rights.check(lines, guarded, secured.BOUND_MS, secured.REAUTHENTICATE_MS)
        return anomalies + more, counts


def final_of(text: str) -> dict[Place, FinalLog]:
    found: dict[Place, FinalLog] = {}
    for name, log in json.loads(text).items():
        topic, _, partition = name.rpartition("/")
        found[(topic, int(partition))] = FinalLog(
            log["start"], log["end"], [tuple(one) for one in log["all"]], [tuple(one) for one in log["committed"]]
        )
    return found
