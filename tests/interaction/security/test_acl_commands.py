"""`mqd acl` and `mqd user` on a broker with an authorizer, and the effect of the rules on a client."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.broker import Broker
from tests.ports import free_port
from tests.preloaded import PRELOADED


class Commands:
    def __init__(self, broker: Broker, port: int, directory: Path) -> None:
        self.broker, self.port, self.directory = broker, port, directory

    def run(self, *words: str, user: str | None = None, given: str = "") -> tuple[int, str]:
        """As the broker's super user, or as a user by SASL; exit code and output."""
        port = self.broker.port if user is None else self.port
        environment = {**os.environ, "MQD_BOOTSTRAP": f"127.0.0.1:{port}"}
        if user is not None:
            environment["MQD_CLIENT_CONFIG"] = str(self.directory / user)
        done = PRELOADED.run(*words, environment=environment, given=given)
        return done.returncode, done.stdout + done.stderr

    def ok(self, *words: str, **more: str) -> str:
        code, said = self.run(*words, **more)
        assert code == 0, said
        return said

    def settings(self, user: str, password: str) -> None:
        (self.directory / user).write_text(
            "security.protocol=SASL_PLAINTEXT\nsasl.mechanism=SCRAM-SHA-256\n"
            f"sasl.username={user}\nsasl.password={password}\n"
        )


@pytest.fixture
def commands(start_broker: Callable[..., Broker], tmp_path: Path) -> Commands:
    port = free_port()
    broker = start_broker(
        config={
            "listeners": f"PLAINTEXT://127.0.0.1:0,SASL_PLAINTEXT://127.0.0.1:{port}",
            "sasl.enabled.mechanisms": "SCRAM-SHA-256,SCRAM-SHA-512",
            "authorizer.class.name": "standard",
            "super.users": "User:ANONYMOUS",
        }
    )
    return Commands(broker, port, tmp_path)


def test_users_and_their_rights(commands: Commands) -> None:
    run, ok = commands.run, commands.ok
    made = json.loads(ok("user", "create", "alice", "--format", "json"))
    assert made["principal"] == "User:alice" and len(made["password"]) >= 27
    assert "User:bob: password set" in ok("user", "create", "bob", "--password-stdin", given="bob's\n")
    local = ok("user", "create", "carol", "--data-dir", str(commands.broker.data_dir))
    assert "User:carol, password " in local
    code, said = run("user", "create", "bob")
    assert code == 1 and "exists; --replace gives it a new password" in said
    assert "User:bob: password set" in ok("user", "create", "bob", "--replace", "--password-stdin", given="bob's\n")
    assert "User:carol, password " in ok("user", "create", "carol", "--data-dir", str(commands.broker.data_dir))
    listed = ok("user", "list")
    assert "alice  SCRAM-SHA-256  4096" in listed and "bob    SCRAM-SHA-512  16384" in listed and "carol" in listed
    commands.settings("alice", made["password"])
    commands.settings("bob", "bob's")
    commands.settings("mallory", "guessed")

    ok("topic", "create", "orders")
    ok("topic", "create", "secret")
    code, said = run("user", "list", user="mallory")
    assert code == 1 and "not authenticated" in said
    assert "orders" not in ok("topic", "list", user="alice")
    ok("acl", "allow", "alice", "describe,describe-configs", "topic/ord*")
    shown = ok("topic", "list", user="alice")
    assert "orders" in shown and "secret" not in shown
    assert "orders" not in ok("topic", "list", user="bob")
    code, said = run("acl", "list", user="alice")
    assert code == 1 and "CLUSTER_AUTHORIZATION_FAILED" in said
    code, said = run("user", "list", user="alice")
    assert code == 1 and "CLUSTER_AUTHORIZATION_FAILED" in said
    ok("acl", "deny", "alice", "all", "topic/orders")
    assert "orders" not in ok("topic", "list", user="alice")

    assert "user bob is deleted" in ok("user", "delete", "bob")
    code, said = run("user", "list", user="bob")
    assert code == 1 and "not authenticated" in said
    code, said = run("user", "delete", "bob")
    assert code == 1 and "there is no user bob" in said
    written = (commands.broker.data_dir / "logs" / "audit.log").read_text()
    events = [json.loads(line) for line in written.splitlines()]
    assert {"password changed", "acl created", "denied"} <= {one["event"] for one in events}
    denial = next(one for one in events if one["event"] == "denied")
    assert denial["principal"] == "User:alice" and denial["host"] == "127.0.0.1"
    assert made["password"] not in written
    told = next(one for one in events if one.get("user") == "carol")
    assert (told["event"], told["by"]) == ("password changed", f"uid {os.getuid()}")


def test_rules_are_shown_explained_tested_and_removed(commands: Commands) -> None:
    run, ok = commands.run, commands.ok
    assert "there is no rule" in ok("acl", "list")
    ok("acl", "allow", "alice", "read,write", "topic/orders-*")
    ok("acl", "deny", "*", "write", "topic/orders-eu", "--from", "10.0.0.7")
    ok("acl", "allow", "User:CN=ops,O=x", "all", "cluster", "--data-dir", str(commands.broker.data_dir))
    rows = [line.split() for line in ok("acl", "list").splitlines()]
    assert rows[0] == ["PRINCIPAL", "PERMISSION", "OPERATION", "RESOURCE", "HOST"]
    assert ["User:alice", "allow", "read", "topic/orders-*", "*"] in rows
    assert ["User:*", "deny", "write", "topic/orders-eu", "10.0.0.7"] in rows
    assert ["User:CN=ops,O=x", "allow", "all", "cluster", "*"] in rows
    assert len(json.loads(ok("acl", "list", "--principal", "alice", "--format", "json"))) == 2

    assert ok("acl", "explain", "alice", "describe", "topic/orders-eu").startswith(
        "allowed: a rule allows it: User:alice allow read topic/orders-* *"
    )
    assert "denied: a rule denies it" in ok("acl", "explain", "alice", "write", "topic/orders-eu", "--from", "10.0.0.7")
    assert "denied: no rule allows it" in ok("acl", "explain", "bob", "read", "topic/orders-eu")
    assert "super user" in ok("acl", "explain", "ANONYMOUS", "alter", "cluster")

    page = commands.directory / "rights"
    page.write_text(
        "# what must hold\nalice can read topic/orders-us\nalice cannot write topic/orders-eu from 10.0.0.7\n\n"
        "User:CN=ops,O=x can alter cluster  # administrators\n"
    )
    assert "all 3 expectations hold" in ok("acl", "test", str(page))
    page.write_text("alice can read topic/orders-us\nbob can read topic/orders-us\n")
    code, said = run("acl", "test", str(page))
    assert code == 1 and "rights:2: bob can read topic/orders-us: does not hold: no rule allows it" in said
    page.write_text("alice may read topic/orders-us\n")
    code, said = run("acl", "test", str(page))
    assert code == 2 and "rights:1: expected PRINCIPAL can|cannot" in said

    code, said = run("acl", "remove")
    assert code == 2 and "select the rules" in said
    assert "orders-*" in ok("acl", "remove", "topic/orders-*", "--operation", "read", "--dry-run")
    removed = json.loads(ok("acl", "remove", "topic/orders-*", "--operation", "read", "--format", "json"))
    assert [one["operation"] for one in removed] == ["read"]
    assert "no rule matches" in ok("acl", "remove", "topic/orders-*", "--operation", "read")
    ok("acl", "remove", "--all")
    assert "there is no rule" in ok("acl", "list")


def test_without_an_authorizer_rules_are_refused(start_broker: Callable[..., Broker], tmp_path: Path) -> None:
    commands = Commands(start_broker(), 0, tmp_path)
    code, said = commands.run("acl", "allow", "alice", "read", "topic/t")
    assert code == 1 and "No Authorizer is configured (SECURITY_DISABLED)" in said
