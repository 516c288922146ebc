"""The worker compiles rights for its reactor: when a client connects, and when rules change."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from mqd import native
from mqd.native import E_STALE, Event, EventKind, NativeError
from mqd.security.acl import AclBinding, Operation, PatternType, Permission, ResourceType
from mqd.security.audit import Audit
from mqd.security.authorizer import Authorizer
from mqd.security.subject import compile_subject
from mqd.worker.subjects import Subjects

ID = b"0" * 16


def rule(principal: str, name: str = "orders") -> AclBinding:
    return AclBinding(ResourceType.TOPIC, PatternType.LITERAL, name, principal, "*", Operation.READ, Permission.ALLOW)


def event(kind: int, token: int, text: str = "", level: int = 0, offset: int = 0) -> Event:
    return Event(kind, native.SLOT_NONE, token, 0, 0, offset, 0, level, None, text)


class Reactor:
    """Commands are carried out when the test calls for it."""

    def __init__(self) -> None:
        self.put: list[tuple[int, bytes, bytes, bytes]] = []
        self.go = asyncio.Event()
        self.gone: set[int] = set()
        self.taken: list[list[int]] = []

    def subject_put(self, token: int, subject: int, topics: bytes, ids: bytes, groups: bytes) -> None:
        self.put.append((subject, topics, ids, groups))

    def revoke_mappings(self, token: int, slots: list[int]) -> None:
        self.taken.append(slots)

    async def run(self, command: Callable[..., None], *arguments: object) -> None:
        command(0, *arguments)
        await self.go.wait()
        if command == self.subject_put and arguments[0] in self.gone:
            raise NativeError(E_STALE, "gone")


def scenario(body: Callable[[Reactor, Authorizer, Subjects], Awaitable[None]]) -> None:
    async def run() -> None:
        reactor, rules = Reactor(), Authorizer({"User:admin"})
        await body(reactor, rules, Subjects(reactor, reactor, rules, log_only=False))  # type: ignore[arg-type]

    asyncio.run(run())


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def tables(rules: Authorizer, principal: str, host: str) -> tuple[bytes, bytes, bytes]:
    subject = compile_subject(rules, principal, host)
    return subject.topics, subject.transactional_ids, subject.groups


def test_a_new_principal_gets_its_rights() -> None:
    async def body(reactor: Reactor, rules: Authorizer, subjects: Subjects) -> None:
        rules.change({ID: rule("User:alice")}, ())
        subjects.on_requested(event(EventKind.SUBJECT_REQUESTED, 7, "10.0.0.1 User:alice"))
        subjects.on_requested(event(EventKind.SUBJECT_REQUESTED, 8, "::1 User:a b"))
        await turns()
        assert reactor.put == [(7, *tables(rules, "User:alice", "10.0.0.1")), (8, *tables(rules, "User:a b", "::1"))]
        assert reactor.put[0][1] != reactor.put[1][1]

    scenario(body)


def test_a_change_of_rules_is_applied_when_the_reactor_has_it() -> None:
    async def body(reactor: Reactor, rules: Authorizer, subjects: Subjects) -> None:
        reactor.go.set()
        for number in (7, 8, 9):
            subjects.on_requested(event(EventKind.SUBJECT_REQUESTED, number, "10.0.0.1 User:alice"))
        await turns()
        await subjects.apply()
        assert len(reactor.put) == 3, "nothing has changed"
        subjects.on_gone(event(EventKind.SUBJECT_GONE, 9))
        rules.change({ID: rule("User:alice")}, ())
        reactor.put.clear()
        reactor.go.clear()
        applying = asyncio.ensure_future(subjects.apply())
        await turns()
        assert reactor.put == [(number, *tables(rules, "User:alice", "10.0.0.1")) for number in (7, 8)]
        assert not applying.done()
        reactor.go.set()
        await applying

    scenario(body)


def test_a_disconnected_subject_is_dropped() -> None:
    async def body(reactor: Reactor, rules: Authorizer, subjects: Subjects) -> None:
        reactor.go.set()
        reactor.gone.add(7)
        subjects.on_requested(event(EventKind.SUBJECT_REQUESTED, 7, "10.0.0.1 User:alice"))
        await turns()
        reactor.put.clear()
        rules.change({ID: rule("User:alice")}, ())
        await subjects.apply()
        assert not reactor.put

    scenario(body)


def test_a_denial_names_its_principal(tmp_path: Path) -> None:
    audit = Audit(tmp_path / "audit.log", lambda: 0.0)

    async def body(reactor: Reactor, rules: Authorizer, subjects: Subjects) -> None:
        subjects._audit = audit
        subjects.on_requested(event(EventKind.SUBJECT_REQUESTED, 7, "10.0.0.1 User:alice"))
        subjects.on_denied(
            msgspec.structs.replace(
                event(EventKind.DENIED, 7, "orders", level=Operation.WRITE, offset=ResourceType.TOPIC), count=3
            )
        )

    scenario(body)
    assert [json.loads(line) for line in (tmp_path / "audit.log").read_text().splitlines()] == [
        {
            "time": "1970-01-01T00:00:00Z",
            "event": "denied",
            "principal": "User:alice",
            "host": "10.0.0.1",
            "operation": "WRITE",
            "resource_type": "TOPIC",
            "resource": "orders",
            "suppressed": 2,
        }
    ]


def test_mapped_segments_are_revoked_when_a_right_may_be_gone() -> None:
    topics = {"orders": 1, "other": 2}

    async def body(reactor: Reactor, rules: Authorizer, subjects: Subjects) -> None:
        reactor.go.set()
        subjects._slots_of = lambda expected: [slot for name, slot in topics.items() if expected(name)]
        denial = msgspec.structs.replace(rule("User:alice", "other"), permission=Permission.DENY)
        changes = [
            ({ID: rule("User:alice")}, (), []),  # a right that is granted
            ({}, (b"unknown",), []),
            ({}, (ID,), [[1]]),
            ({ID: denial}, (), [[2]]),
            ({}, (ID,), [[2]]),
        ]
        for put, removed, taken in changes:
            subjects.change(put, removed)
            await subjects.apply()
            assert reactor.taken == taken
            reactor.taken.clear()
        subjects.replace({ID: rule("User:alice")})
        await subjects.apply()
        assert reactor.taken == [[1, 2]], "an image: what has gone meanwhile is not known"
        subjects.replace({ID: rule("User:alice")})
        await subjects.apply()
        assert reactor.taken == [[1, 2]]

    scenario(body)
