"""The APIs of access control lists and of users' passwords, with Kafka's validation."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mqd.acceptor.broker_state import Origin
from mqd.protocol import messages as m
from mqd.protocol.api import encode_request
from mqd.protocol.errors import ErrorCode as E
from mqd.security.acl import Operation, PatternType, ResourceType
from mqd.security.audit import DENIALS_MAX, Audit
from mqd.security.scram import salted_password, verifier_of
from tests.unit.acceptor.handler_broker import HandlerBroker

ADMIN = Origin(principal="User:admin", peer_ip="127.0.0.1")
CONFIG = {"authorizer.class.name": "standard", "super.users": "User:admin"}


def run(test: Callable[..., Any]) -> Callable[..., None]:
    @functools.wraps(test)
    def running(*arguments: Any, **named: Any) -> None:
        asyncio.run(test(*arguments, **named))

    return running


def creation(name: str = "t", **more: Any) -> m.CreateAclsRequest.AclCreation:
    fields = {"resource_type": 2, "principal": "User:alice", "host": "*", "operation": 3, "permission_type": 3}
    return m.CreateAclsRequest.AclCreation(resource_name=name, **(fields | more))


def acl_filter(**more: Any) -> m.DeleteAclsRequest.Filter:
    fields = {"resource_type_filter": 1, "pattern_type_filter": 1, "operation": 1, "permission_type": 1}
    return m.DeleteAclsRequest.Filter(**(fields | more))


def described(response: m.DescribeAclsResponse) -> list[tuple[str, int, list[str]]]:
    return [(one.resource_name, one.pattern_type, [acl.principal for acl in one.acls]) for one in response.resources]


@run
async def test_rules_are_created_described_and_deleted(tmp_path: Path) -> None:
    async with HandlerBroker(tmp_path, CONFIG) as broker:
        written: list[tuple[str, dict[str, object]]] = []
        broker.broker.audit.write = lambda event, **fields: written.append((event, fields))  # type: ignore[method-assign]
        made = [
            creation("a"),
            creation("a", principal="User:bob"),
            creation("a", resource_pattern_type=4),
            creation("a"),
            creation("日本", operation=2, permission_type=2),
        ]
        response = await broker.send_request(m.CreateAclsRequest(creations=made), 3, ADMIN)
        assert [one.error_code for one in response.results] == [0] * 5
        assert len(broker.metadata.rules.bindings) == 4
        everything = m.DescribeAclsRequest(
            resource_type_filter=1, pattern_type_filter=1, operation=1, permission_type=1
        )
        shown = described(await broker.send_request(everything, 3, ADMIN))
        assert shown == [("a", 3, ["User:alice", "User:bob"]), ("日本", 3, ["User:alice"]), ("a", 4, ["User:alice"])]
        match = m.DescribeAclsRequest(
            resource_type_filter=2, resource_name_filter="abc", pattern_type_filter=2, operation=1, permission_type=1
        )
        assert described(await broker.send_request(match, 3, ADMIN)) == [("a", 4, ["User:alice"])]
        requests = [
            acl_filter(principal_filter="User:bob"),
            acl_filter(resource_name_filter="a"),
            acl_filter(operation=12),
        ]
        response = await broker.send_request(m.DeleteAclsRequest(filters=requests), 3, ADMIN)
        found = [[acl.principal for acl in one.matching_acls] for one in response.filter_results]
        assert [sorted(names) for names in found] == [["User:bob"], ["User:alice", "User:alice", "User:bob"], []]
        assert described(await broker.send_request(everything, 3, ADMIN)) == [("日本", 3, ["User:alice"])]
        events = [event for event, _ in written]
        assert events.count("acl created") == 5 and events.count("acl removed") == 3
        assert all(fields["by"] == "User:admin" for _, fields in written)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"resource_type": 4, "name": "other"}, "The only valid name for the CLUSTER resource is kafka-cluster"),
        ({"name": ""}, "Invalid empty resource name"),
        ({"resource_pattern_type": 2}, "Invalid patternType MATCH"),
        ({"resource_pattern_type": 1}, "Invalid patternType ANY"),
        ({"operation": 1}, "Invalid operation ANY"),
        ({"permission_type": 1}, "Invalid permissionType ANY"),
        ({"operation": 99}, "Unknown operation"),
        ({"resource_type": -5}, "Unknown resource type"),
        ({"principal": "alice"}, "Could not parse principal from `alice`"),
    ],
)
@run
async def test_an_invalid_rule_is_refused_and_the_others_are_created(
    tmp_path: Path, wrong: dict[str, Any], message: str
) -> None:
    async with HandlerBroker(tmp_path, CONFIG) as broker:
        response = await broker.send_request(
            m.CreateAclsRequest(creations=[creation(**wrong), creation("ok")]), 3, ADMIN
        )
        assert [one.error_code for one in response.results] == [E.INVALID_REQUEST, 0]
        assert response.results[0].error_message.startswith(message)
        assert [one.name for one in broker.metadata.rules.bindings.values()] == ["ok"]


@pytest.mark.parametrize(
    "request_",
    [
        m.CreateAclsRequest(creations=[creation(operation=0)]),
        m.CreateAclsRequest(creations=[creation(resource_type=0)]),
        m.DeleteAclsRequest(filters=[acl_filter(permission_type=0)]),
        m.DescribeAclsRequest(resource_type_filter=0, pattern_type_filter=1, operation=1, permission_type=1),
    ],
)
@run
async def test_an_unknown_mechanism_ends_the_connection(tmp_path: Path, request_: object) -> None:
    async with HandlerBroker(tmp_path, CONFIG) as broker:
        outcome = await broker.frame(encode_request(request_, 3, 1), ADMIN)
        assert outcome.close_reason is not None and "not known" in outcome.close_reason


@run
async def test_a_filter_of_another_version_is_refused_and_the_others_used(tmp_path: Path) -> None:
    async with HandlerBroker(tmp_path, CONFIG) as broker:
        await broker.send_request(m.CreateAclsRequest(creations=[creation("a")]), 3, ADMIN)
        unknown = m.DescribeAclsRequest(resource_type_filter=8, pattern_type_filter=1, operation=1, permission_type=1)
        response = await broker.send_request(unknown, 3, ADMIN)
        assert (response.error_code, response.resources) == (0, [])
        filters = [acl_filter(operation=99), acl_filter()]
        response = await broker.send_request(m.DeleteAclsRequest(filters=filters), 3, ADMIN)
        assert [(one.error_code, len(one.matching_acls)) for one in response.filter_results] == [
            (E.INVALID_REQUEST, 0),
            (0, 1),
        ]


# -- passwords -------------------------------------------------------------------------------------


def upsertion(name: str, iterations: int = 4096, mechanism: int = 1, password: str = "secret") -> Any:
    salted = salted_password({2: "SCRAM-SHA-512"}.get(mechanism, "SCRAM-SHA-256"), password.encode(), b"salt", 4096)
    return m.AlterUserScramCredentialsRequest.ScramCredentialUpsertion(
        name=name, mechanism=mechanism, iterations=iterations, salt=b"salt", salted_password=salted
    )


def deletion(name: str, mechanism: int = 1) -> Any:
    return m.AlterUserScramCredentialsRequest.ScramCredentialDeletion(name=name, mechanism=mechanism)


async def alter(
    broker: HandlerBroker, deletions: list[Any], upsertions: list[Any]
) -> dict[str, tuple[int, str | None]]:
    request = m.AlterUserScramCredentialsRequest(deletions=deletions, upsertions=upsertions)
    return {
        one.user: (one.error_code, one.error_message) for one in (await broker.send_request(request, 0, ADMIN)).results
    }


@run
async def test_a_password_is_kept_as_a_verifier_and_never_revealed(tmp_path: Path) -> None:
    async with HandlerBroker(tmp_path) as broker:
        assert await alter(broker, [], [upsertion("alice"), upsertion("alice", mechanism=2), upsertion("ünï")]) == {
            "alice": (0, None),
            "ünï": (0, None),
        }
        kept = broker.metadata.scram_credentials["alice", 1]
        salted = salted_password("SCRAM-SHA-256", b"secret", b"salt", 4096)
        made = verifier_of("SCRAM-SHA-256", salted, b"salt", 4096)
        assert (kept.salt, kept.iterations) == (b"salt", 4096)
        assert (kept.stored_key, kept.server_key) == (made.stored_key, made.server_key)
        response = await broker.send_request(m.DescribeUserScramCredentialsRequest(users=None), 0, ADMIN)
        reported = {
            one.user: [(info.mechanism, info.iterations) for info in one.credential_infos] for one in response.results
        }
        assert reported == {"alice": [(1, 4096), (2, 4096)], "ünï": [(1, 4096)]}
        assert await alter(broker, [deletion("alice")], [upsertion("ünï", password="new")]) == {
            "alice": (0, None),
            "ünï": (0, None),
        }
        assert sorted(broker.metadata.scram_credentials) == [("alice", 2), ("ünï", 1)]
        names = [m.DescribeUserScramCredentialsRequest.UserName(name=name) for name in ("alice", "bob", "ünï", "ünï")]
        response = await broker.send_request(m.DescribeUserScramCredentialsRequest(users=names), 0, ADMIN)
        assert {one.user: one.error_code for one in response.results} == {
            "alice": 0,
            "bob": E.RESOURCE_NOT_FOUND,
            "ünï": E.DUPLICATE_RESOURCE,
        }


@run
async def test_invalid_password_changes_are_refused(tmp_path: Path) -> None:
    async with HandlerBroker(tmp_path) as broker:
        await alter(broker, [], [upsertion("both"), upsertion("keeps")])
        found = await alter(
            broker,
            [deletion("gone"), deletion("unknown", 9), deletion("both"), deletion(""), deletion("keeps")],
            [
                upsertion("few", 4095),
                upsertion("many", 16385),
                upsertion("both"),
                upsertion("fine", 16384),
                upsertion("null", mechanism=0),
                upsertion("keeps", iterations=1, mechanism=2),
            ],
        )
        assert found == {
            "gone": (E.RESOURCE_NOT_FOUND, "Attempt to delete a user credential that does not exist"),
            "unknown": (E.UNSUPPORTED_SASL_MECHANISM, "Unknown SCRAM mechanism"),
            "both": (E.DUPLICATE_RESOURCE, "A user credential cannot be altered twice in the same request"),
            "": (E.UNACCEPTABLE_CREDENTIAL, "Username must not be empty"),
            "few": (E.UNACCEPTABLE_CREDENTIAL, "Too few iterations"),
            "many": (E.UNACCEPTABLE_CREDENTIAL, "Too many iterations"),
            "fine": (0, None),
            "null": (E.UNSUPPORTED_SASL_MECHANISM, "Unknown SCRAM mechanism"),
            "keeps": (E.UNACCEPTABLE_CREDENTIAL, "Too few iterations"),
        }
        assert sorted(broker.metadata.scram_credentials) == [("both", 1), ("fine", 1), ("keeps", 1)]


# -- the audit log ---------------------------------------------------------------------------------


def test_denials_are_written_once_in_ten_seconds(tmp_path: Path) -> None:
    now = [1000.0]
    audit = Audit(tmp_path / "audit.log", lambda: now[0])

    def deny(name: str = "t", only_logged: bool = False) -> None:
        audit.record_denial("User:a\nb", "10.0.0.1", Operation.READ, ResourceType.TOPIC, name, only_logged)

    for _ in range(5):
        deny()
    deny("other", True)
    now[0] += 11
    deny()
    audit.write("acl created", by="User:admin", acl=str(PatternType.LITERAL))
    lines = [json.loads(line) for line in (tmp_path / "audit.log").read_text().splitlines()]
    assert [line["event"] for line in lines] == [
        "denied",
        "would be denied, but allowed by authorizer.log.only",
        "denied",
        "acl created",
    ]
    assert lines[0] == {
        "time": "1970-01-01T00:16:40Z",
        "event": "denied",
        "principal": "User:a\nb",
        "host": "10.0.0.1",
        "operation": "READ",
        "resource_type": "TOPIC",
        "resource": "t",
    }
    assert lines[2]["suppressed"] == 4


def test_the_audit_log_counts_a_bounded_number_of_denials(tmp_path: Path) -> None:
    audit = Audit(None, lambda: 1.0)
    for index in range(DENIALS_MAX + 50):
        audit.record_denial("User:a", "", Operation.READ, ResourceType.TOPIC, str(index), False)
    assert len(audit._denials) == DENIALS_MAX
