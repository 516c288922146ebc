"""`mqd user` and `mqd acl` against a secured broker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.broker import Broker
from tests.interaction.security.secured import SecureBroker, done, mqd


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory):
    with SecureBroker(tmp_path_factory.mktemp("secure")) as found:
        yield found


def told(broker: Broker, *words: str) -> object:
    return json.loads(done(mqd(broker, "--format", "json", *words)))


def test_users(broker: Broker, tmp_path: Path) -> None:
    assert told(broker, "user", "list") == [
        {"user": "admin", "mechanisms": {"SCRAM-SHA-256": 4096, "SCRAM-SHA-512": 4096}}
    ]
    made = told(broker, "user", "create", "carol", "--generate", "--mechanism", "SCRAM-SHA-256")
    assert made["user"] == "carol" and len(made["password"]) == 32
    (tmp_path / "password").write_text("s3cret\n")
    done(mqd(broker, "user", "create", "dave", "--password-file", str(tmp_path / "password")))
    assert {one["user"]: one["mechanisms"] for one in told(broker, "user", "list")} == {
        "admin": {"SCRAM-SHA-256": 4096, "SCRAM-SHA-512": 4096},
        "carol": {"SCRAM-SHA-256": 4096},
        "dave": {"SCRAM-SHA-256": 16384, "SCRAM-SHA-512": 16384},
    }
    told(broker, "user", "delete", "carol", "dave")
    assert [one["user"] for one in told(broker, "user", "list")] == ["admin"]
    missing = mqd(broker, "user", "delete", "carol")
    assert missing.returncode == 1 and "does not exist" in missing.stderr


def rules(broker: Broker, *words: str) -> list[tuple[str, ...]]:
    return [tuple(rule.values()) for rule in told(broker, "acl", "list", *words)]


def test_rules(broker: Broker, tmp_path: Path) -> None:
    done(mqd(broker, "acl", "allow", "alice", "read,write", "topic:orders"))
    done(mqd(broker, "acl", "allow", "User:alice", "describe", "topic:public-*"))
    done(mqd(broker, "acl", "deny", "alice", "all", "topic:orders", "--host", "10.0.0.7"))
    done(mqd(broker, "acl", "allow", "bob", "cluster-action", "cluster"))
    of_alice = [
        ("allow", "User:alice", "read", "topic:orders", "*"),
        ("allow", "User:alice", "write", "topic:orders", "*"),
        ("deny", "User:alice", "all", "topic:orders", "10.0.0.7"),
        ("allow", "User:alice", "describe", "topic:public-*", "*"),
    ]
    assert sorted(rules(broker, "--principal", "alice")) == sorted(of_alice)
    assert rules(broker, "--resource", "topic:public-news") == [of_alice[3]]
    assert ("allow", "User:bob", "cluster-action", "cluster", "*") in rules(broker)

    def explained(*words: str) -> str:
        return done(mqd(broker, "acl", "explain", *words))

    assert explained("alice", "read", "topic:orders").startswith("allowed: a rule allows it: allow User:alice read")
    assert explained("alice", "describe", "topic:orders").startswith("allowed")
    assert explained("alice", "delete", "topic:orders") == "denied: no rule allows it\n"
    assert "a rule denies it" in explained("alice", "read", "topic:orders", "--host", "10.0.0.7")

    policy = tmp_path / "policy"
    policy.write_text(
        "# who may read orders\nallow alice read topic:orders\ndeny alice read topic:orders from 10.0.0.7\n"
        "deny bob read topic:orders\n"
    )
    assert done(mqd(broker, "acl", "test", str(policy))) == "3 of 3 hold\n"
    policy.write_text("allow bob read topic:orders\n")
    broken = mqd(broker, "acl", "test", str(policy))
    assert broken.returncode == 1 and "line 1: allow bob read topic:orders: no rule allows it" in broken.stdout
    policy.write_text("permit bob\n")
    assert "line 1 is not" in mqd(broker, "acl", "test", str(policy)).stderr

    done(mqd(broker, "acl", "remove", "alice", "write", "topic:orders"))
    assert len(rules(broker, "--principal", "alice")) == 3
    assert "removed 3 rules" in done(mqd(broker, "acl", "remove", "alice", "--all"))
    assert rules(broker, "--principal", "alice") == []
    assert mqd(broker, "acl", "remove", "alice", "--all").returncode == 1


@pytest.mark.parametrize(
    "words",
    [
        ("allow", "alice", "fly", "topic:orders"),
        ("allow", "alice", "read", "orders"),
        ("allow", "alice", "read", "topic:"),
        ("remove", "alice"),
        ("remove", "alice", "read", "topic:orders", "--all"),
        ("explain", "alice", "read", "planet:earth"),
    ],
)
def test_words_that_mean_nothing(broker: Broker, words: tuple[str, ...]) -> None:
    assert mqd(broker, "acl", *words).returncode == 2
