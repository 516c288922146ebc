"""mqd's authorizer compared with Apache Kafka's StandardAuthorizer: the same random rules, the same
requests. Kafka runs from its jars in a small Java program (java/AuthorizerOracle.java).
"""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

from mqd.security.authorizer import Authorizer
from perf.peers import maven
from perf.peers.peer import Unavailable
from tests.compat.kafka_tools import POM
from tests.unit.security.reference import HOSTS, NAMES, OPERATIONS, PRINCIPALS, TYPES, random_binding

pytestmark = pytest.mark.slow

SOURCE = Path(__file__).parent / "java" / "AuthorizerOracle.java"
WORLDS, QUESTIONS = 400, 60
SUPER_USERS = "User:admin;User:CN=root,O=x"
# Kafka's authorizer fails for a client named "User:*".
CLIENTS = [name for name in PRINCIPALS if name != "User:*"] + ["User:admin", "User:CN=root,O=x", "User:x"]

# Kafka's search stops too early for a name that begins with "*", and misses rules, including
# denials.
ASKED = [name for name in (*NAMES, "z", "abcd", "日", "hardcode") if not name.startswith("*") or name == "*"]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that runs it."""
    if shutil.which("javac") is None:
        pytest.skip("no javac to compile the oracle with")
    try:
        java, jars = maven.java(), maven.jars(POM)
    except Unavailable as why:
        pytest.skip(f"Kafka's authorizer cannot be had: {why}")
    classes = tmp_path_factory.mktemp("oracle")
    built = subprocess.run(
        ["javac", "-encoding", "UTF-8", "-cp", f"{jars}/*", "-d", str(classes), str(SOURCE)],
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    return [java, "-XX:+UseSerialGC", "-cp", f"{classes}:{jars}/*", "AuthorizerOracle"]


def _line(*fields: object) -> str:
    return "\t".join(str(int(field)) if isinstance(field, int) else str(field) for field in fields) + "\n"


def test_kafka_decides_the_same(oracle: list[str]) -> None:
    lines: list[str] = []
    expected: list[tuple[str, bool]] = []
    for seed in range(WORLDS):
        chance = random.Random(seed)
        allow_everyone = seed % 3 == 0
        lines.append(_line("world", SUPER_USERS, str(allow_everyone).lower()))
        rules = {random_binding(chance) for _ in range(chance.randrange(40))}  # Kafka refuses duplicates
        bindings = {index.to_bytes(16): rule for index, rule in enumerate(sorted(rules))}
        for rule in bindings.values():
            fields = (rule.resource_type, rule.pattern_type, rule.name, rule.principal, rule.host)
            lines.append(_line("acl", *fields, rule.operation, rule.permission))
        ours = Authorizer(SUPER_USERS.split(";"), allow_everyone)
        ours.replace(bindings)
        for _ in range(QUESTIONS):
            who = (chance.choice(CLIENTS), chance.choice(HOSTS))
            operation, kind = chance.choice(OPERATIONS), chance.choice(TYPES)
            name = chance.choice(ASKED)
            lines.append(_line("ask", *who, operation, kind, name))
            expected.append((f"{seed}: {lines[-1]}", ours.allows(*who, operation, kind, name)))
            if chance.random() < 0.3:
                lines.append(_line("any", *who, operation, kind))
                expected.append((f"{seed}: {lines[-1]}", ours.allows_any(*who, operation, kind)))
    done = subprocess.run(oracle, input="".join(lines), capture_output=True, text=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    responses = [response == "1" for response in done.stdout.split()[-1]]
    assert len(responses) == len(expected) >= 10_000
    assert any(responses) and not all(responses)
    assert [
        (question, response) for (question, decided), response in zip(expected, responses) if decided != response
    ] == []
