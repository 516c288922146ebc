"""The cost of connecting: connections with a full TLS handshake and SCRAM, and their effect on other
clients; the cost of access rules for a record.

Names of figures are the keys of perf/history.jsonl: a new meaning needs a new name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mqd.protocol.messages import AlterUserScramCredentialsRequest, CreateAclsRequest
from mqd.security.scram import ITERATIONS_MIN, salted_password
from perf import loading
from perf.accounting import cpu_time
from perf.bench import Bench
from perf.brokers import Measured
from tests.certificates import Authority
from tests.kafka_connection import KafkaConnection
from tests.ports import free_port

USER, PASSWORD = "perf", "perf-password"
SHA_256 = 1  # SCRAM-SHA-256, in Kafka's request
CREATE_ACLS, ALTER_USERS = 30, 51
DURATION_MS = 4000
CONNECTIONS_PER_CORE_SECOND = 1200.0
PACED = {"batch": 1024, "rate": 300, "acks": 1, "connections": 1}
SMALL = {"batch": 200, "acks": 1, "connections": 4, "depth": 64, "burst": 32}


def _create_user(broker: Measured) -> None:
    salt = os.urandom(24)
    salted = salted_password("SCRAM-SHA-256", PASSWORD.encode(), salt, ITERATIONS_MIN)
    put = AlterUserScramCredentialsRequest.ScramCredentialUpsertion(USER, SHA_256, ITERATIONS_MIN, salt, salted)
    with KafkaConnection("127.0.0.1", broker.port, timeout_s=60) as kafka:
        result = kafka.call(ALTER_USERS, 0, AlterUserScramCredentialsRequest(upsertions=[put])).results[0]
    if result.error_code:
        raise loading.LoadFailed(f"cannot create a user: error {result.error_code} {result.error_message}")


@contextmanager
def _run_connecting(port: int, ca: str, threads: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "perf.security.connecting", str(port), ca, USER, PASSWORD, str(threads)]
    with subprocess.Popen([*command, str(DURATION_MS)], stdout=subprocess.PIPE, text=True) as process:
        yield process


def _outcome(process: subprocess.Popen[str]) -> dict[str, float]:
    output, _ = process.communicate(timeout=DURATION_MS / 1000 + 60)
    if process.returncode:
        raise loading.LoadFailed(f"perf.security.connecting: exit status {process.returncode}")
    return json.loads(output)


def connections(bench: Bench) -> None:
    """CPU of the whole broker for a connection, and a paced producer's p99 meanwhile."""
    port, authority, folder = free_port(), Authority(), bench.brokers.directory
    ca = authority.write(folder / "ca.pem")
    keystore = authority.issue("broker").write(folder / "broker.pem")
    config = {
        "listeners": f"PLAINTEXT://127.0.0.1:0,SASL_SSL://127.0.0.1:{port}",
        "ssl.keystore.location": str(keystore),
        "sasl.enabled.mechanisms": "SCRAM-SHA-256",
    }
    broker = bench.brokers.get("connections", config=config)
    _create_user(broker)
    topic = broker.topic("others", flush_on_ack="false")
    cost: list[float] = []
    rate: list[float] = []
    tail: list[float] = []
    for _ in bench.repeat("connections of TLS and SCRAM"):
        bench.prepare()
        alone, _ = broker.load("paced", topic=topic, milliseconds=DURATION_MS - 1000, **PACED)
        before = cpu_time(broker.pids())
        with _run_connecting(port, str(ca), 4) as process:
            others, _ = broker.load("paced", topic=topic, milliseconds=DURATION_MS - 1000, **PACED)
            done = _outcome(process)
        spent = cpu_time(broker.pids()) - before
        # the paced producer's part is two hundredths of it
        cost.append(spent.run_us / done["count"])
        rate.append(done["count"] / (spent.run_ns / 1e9))
        tail.append(others["acknowledged"]["p99_us"] / alone["acknowledged"]["p99_us"])
    bench.add("connection with TLS 1.3 (ECDSA) and SCRAM-SHA-256, all processes", "CPU-µs", cost)
    name = "connections with TLS 1.3 and SCRAM-SHA-256 per CPU-second"
    bench.add(name, "connections", rate, CONNECTIONS_PER_CORE_SECOND, at_least=True)
    bench.add("p99 of others during handshakes, as a multiple of that without them", "times", tail, 2.0)
    bench.brokers.drop("connections")


def _rule(resource_type: int, name: str, operation: int) -> CreateAclsRequest.AclCreation:
    literal, allow = 3, 3
    return CreateAclsRequest.AclCreation(resource_type, name, literal, "User:ANONYMOUS", "*", operation, allow)


def rights(bench: Bench) -> None:
    """Batches of 200 bytes, one in a request, without access rules and with them: each request needs a
    decision, so this is the highest cost.
    """
    config = {"": {}, "with access rules": {"authorizer.class.name": "standard", "super.users": "User:admin"}}
    config["with access rules"]["allow.everyone.if.no.acl.found"] = "true"  # until there are some
    brokers = {way: bench.brokers.get(f"rights {way}".strip(), config=more) for way, more in config.items()}
    topic, write, everything = 2, 4, 2
    for way, broker in brokers.items():
        broker.topic("ruled", flush_on_ack="false")
        if way:
            rules = [_rule(topic, "ruled", write), _rule(4, "kafka-cluster", everything)]
            with KafkaConnection("127.0.0.1", broker.port, timeout_s=60) as kafka:
                results = kafka.call(CREATE_ACLS, 3, CreateAclsRequest(rules)).results
            if any(result.error_code for result in results):
                raise loading.LoadFailed(f"cannot create access rules: {results}")
    cost: dict[str, list[float]] = {way: [] for way in brokers}
    for number in bench.repeat("access rules"):
        # in alternating order
        for way, broker in list(brokers.items())[:: -1 if number % 2 else 1]:
            bench.prepare()
            result, spent = bench.measure_undisturbed(
                lambda broker=broker: broker.load("produce", topic="ruled", count=400_000, milliseconds=30_000, **SMALL)
            )
            cost[way].append(spent.reactor_ns / 1e3 / result["count"])
    for way, found in cost.items():
        bench.add(f"200-byte batch appended in a request, {way or 'without access rules'}", "CPU-µs", found)
    more = [(ruled / plain - 1) * 100 for plain, ruled in zip(*cost.values(), strict=True)]
    bench.add("CPU added by access rules", "% of a batch", more, 1.0)
    for way in brokers:
        bench.brokers.drop(f"rights {way}".strip())


CASES: dict[str, Callable[[Bench], None]] = {"connections": connections, "rights": rights}
