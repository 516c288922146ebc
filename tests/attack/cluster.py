"""`python -m tests.attack.cluster`: three brokers started with `mqd cluster local --secure`,
attacked on the ports of clients, hosts and controllers while processes are killed and stopped; the
admin's producer and consumer must notice at most a pause.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from mqd.cli import secure
from mqd.cli.verbs import status
from tests.attack.bad_input import KINDS, Intruded
from tests.attack.target import wrong_clients
from tests.certificates import Authority
from tests.crash.workload import IDEMPOTENT, LoadConsumer, LoadProducer, wait_until
from tests.interaction.security.test_cluster_secure import secure_cluster

TOPIC, PARTITIONS, RATE, THREADS = "good", 3, 100, 16
OF_EVERY_PORT = ("handshake-garbage", "handshake-cut-short", "plain-on-tls", "wrong-certificate")
OF_CLIENTS = ("wrong-name", "key-updates", "renegotiation")
ROLES = ("worker", "acceptor", "controller")
HEALTHY_S = 180.0


def librdkafka(admin: Path, port: int) -> dict[str, object]:
    settings: dict[str, object] = dict(line.split("=", 1) for line in admin.read_text().splitlines())
    return {**settings, "bootstrap.servers": ",".join(f"127.0.0.{node}:{port}" for node in (1, 2, 3))}


def disturb(data_dir: Path, rng: random.Random) -> str:
    """A process of one broker is killed, or stopped for a while."""
    broker = data_dir / f"broker-{rng.randrange(1, 4)}"
    running = [one for one in status.broker_status(broker)["processes"] if one["pid"] and one["role"] in ROLES]
    if not running:
        return "none runs"
    victim = rng.choice(running)
    with contextlib.suppress(ProcessLookupError):
        if rng.random() < 0.5:
            os.kill(victim["pid"], signal.SIGKILL)
            return "kill"
        os.kill(victim["pid"], signal.SIGSTOP)
        time.sleep(rng.uniform(0.1, 2.0))  # how long it is stopped
        os.kill(victim["pid"], signal.SIGCONT)
        return "pause"
    return "it had ended"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=200, help="of each kind")
    parser.add_argument("--kills", type=int, default=10)
    arguments = parser.parse_args()
    rng, counts, findings = random.Random(arguments.seed), Counter[str](), []
    folder = Path(tempfile.mkdtemp(prefix="attack-cluster-"))
    with secure_cluster(folder / "cluster") as (port, data_dir):
        files = secure.files(data_dir / "broker-1")
        settings = librdkafka(files.admin, port)
        topic = NewTopic(TOPIC, PARTITIONS, 3, config={"min.insync.replicas": "2"})
        admin = AdminClient(settings)  # ending it would cancel the request in progress
        admin.create_topics([topic])[TOPIC].result(60)
        bootstrap, topics = str(settings["bootstrap.servers"]), {TOPIC: PARTITIONS}
        patient = {**settings, **IDEMPOTENT, "message.timeout.ms": 600_000}
        producer = LoadProducer(f"p{arguments.seed}", bootstrap, topics, arguments.seed, RATE, patient, Producer)
        consumer = LoadConsumer("c", bootstrap, topics, lambda own: Consumer({**settings, **own}))
        producer.start()
        consumer.start()
        clients = wrong_clients(Authority(), Authority("Somebody Else's CA"), folder)
        steps = [(kind, at) for kind in OF_EVERY_PORT for at in range(3)] + [(kind, 0) for kind in OF_CLIENTS]
        rng.shuffle(steps)
        for kind, at in steps:
            of = SimpleNamespace(
                tls_port=port + at, mutual_port=port + at, wrong_clients=clients, ca=settings["ssl.ca.location"]
            )

            def once(seed: int, kind: str = kind, of: SimpleNamespace = of) -> str:
                try:
                    return f"{kind}: {KINDS[kind](of, random.Random(seed))}"
                except Intruded as error:
                    findings.append(f"{kind} at port {of.tls_port}, seed {seed}: {error}")
                    return f"{kind}: INTRUDED"
                except Exception as error:
                    return f"{kind}: {type(error).__name__}"

            with ThreadPoolExecutor(THREADS) as pool:
                counts.update(pool.map(once, [rng.getrandbits(60) for _ in range(arguments.count)]))
        for _ in range(arguments.kills):
            counts[disturb(data_dir, rng)] += 1
            before = len(producer.acknowledged), len(consumer.seen)
            wait_until(
                lambda before=before: len(producer.acknowledged) > before[0] and len(consumer.seen) > before[1],
                HEALTHY_S,
                lambda: f"no progress: {producer.errors} {producer.failed[:3]} {consumer.errors}",
            )
        producer.end()
        producer.join(HEALTHY_S)
        expected = {(one.topic, one.partition, one.offset): one.counter for one in producer.acknowledged}
        with contextlib.suppress(AssertionError):
            wait_until(lambda: len(consumer.seen) >= len(expected), HEALTHY_S, lambda: "records are missing")
        consumer.end()
        consumer.join(60)
    seen = {(one.topic, one.partition, one.offset) for one in consumer.seen}
    findings += [f"lost: {where}" for where in expected if where not in seen][:10] + producer.failed[:10]
    findings += producer.errors + consumer.errors
    print(f"seed {arguments.seed}: {dict(counts)}; {len(expected)} acknowledged, {len(consumer.seen)} seen")
    print(*findings, f"{len(findings)} findings", sep="\n")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
