"""The APIs of delegation tokens, with Kafka's validation, and clients that authenticate with one."""

from __future__ import annotations

import asyncio
import base64
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mqd.acceptor.authentication import Authentication, ListenerOptions, MetadataUsers, Refused
from mqd.acceptor.broker_state import Origin
from mqd.acceptor.metadata import Metadata
from mqd.acceptor.tokens import Tokens
from mqd.base import clock
from mqd.cluster.metadata.records import DelegationToken
from mqd.native import PrincipalKind
from mqd.protocol import messages as m
from mqd.protocol.errors import ErrorCode as E
from mqd.security import client, scram, tokens
from tests.unit.acceptor.handler_broker import HandlerBroker

SECRET = "one secret for all hosts"
DAY_MS = 86_400_000
CONFIG = {"authorizer.class.name": "standard", "super.users": "User:admin", "delegation.token.secret.key": SECRET}


def who(name: str, kind: PrincipalKind = PrincipalKind.SASL) -> Origin:
    return Origin(principal=f"User:{name}", principal_kind=kind, peer_ip="127.0.0.1")


ADMIN, ALICE, BOB, REN = who("admin"), who("alice"), who("bob"), who("ren")


def run(test: Callable[..., Any]) -> Callable[..., None]:
    @functools.wraps(test)
    def running(*arguments: Any, **named: Any) -> None:
        asyncio.run(test(*arguments, **named))

    return running


async def create(broker: HandlerBroker, by: Origin, owner: str | None = None, renewers=(), version: int = 3, **more):
    return await broker.send_request(
        m.CreateDelegationTokenRequest(
            owner_principal_type=owner and "User",
            owner_principal_name=owner,
            renewers=[
                m.CreateDelegationTokenRequest.CreatableRenewers(principal_type="User", principal_name=name)
                for name in renewers
            ],
            max_lifetime_ms=more.pop("max_lifetime_ms", -1),
            **more,
        ),
        version,
        by,
    )


async def described(broker: HandlerBroker, by: Origin, owners: list[str] | None = None) -> list[str]:
    """Owners of the tokens in the response."""
    requested = owners and [
        m.DescribeDelegationTokenRequest.DescribeDelegationTokenOwner(principal_type="User", principal_name=name)
        for name in owners
    ]
    response = await broker.send_request(m.DescribeDelegationTokenRequest(owners=requested), 3, by)
    assert response.error_code == 0
    for one in response.tokens:
        assert one.hmac == tokens.hmac_of(SECRET, one.token_id)
    return sorted(one.principal_name for one in response.tokens)


@run
async def test_a_token_is_created_renewed_and_expired(tmp_path: Path) -> None:
    async with HandlerBroker(tmp_path, CONFIG) as broker:
        written: list[str] = []
        broker.broker.audit.write = lambda event, **fields: written.append(event)  # type: ignore[method-assign]
        for version in (1, 2, 3):
            now_ms = clock.now_ms()
            made = await create(broker, ALICE, renewers=["ren"], version=version)
            assert (made.error_code, made.principal_type, made.principal_name) == (0, "User", "alice")
            assert made.token_requester_principal_name == ("alice" if version == 3 else "")
            assert len(made.token_id) == 22 and made.hmac == tokens.hmac_of(SECRET, made.token_id)
            assert now_ms <= made.issue_timestamp_ms <= clock.now_ms()
            assert made.expiry_timestamp_ms - made.issue_timestamp_ms == DAY_MS
            assert made.max_timestamp_ms - made.issue_timestamp_ms == 7 * DAY_MS
        token = broker.metadata.delegation_tokens[made.token_id]
        assert (token.owner, token.requester, token.renewers) == ("User:alice", "User:alice", ("User:ren",))
        short = await create(broker, ALICE, max_lifetime_ms=1000)
        assert short.expiry_timestamp_ms == short.max_timestamp_ms == short.issue_timestamp_ms + 1000

        async def renew(by: Origin, period_ms: int, version: int = 2):
            return await broker.send_request(
                m.RenewDelegationTokenRequest(hmac=made.hmac, renew_period_ms=period_ms), version, by
            )

        async def expire(by: Origin, period_ms: int, version: int = 2):
            return await broker.send_request(
                m.ExpireDelegationTokenRequest(hmac=made.hmac, expiry_time_period_ms=period_ms), version, by
            )

        for period_ms, lasts_ms in ((60_000, 60_000), (-1, DAY_MS), (1 << 62, DAY_MS)):
            now_ms = clock.now_ms()
            renewed = await renew(REN, period_ms)
            assert renewed.error_code == 0 and 0 <= renewed.expiry_timestamp_ms - now_ms - lasts_ms < 10_000
            assert broker.metadata.delegation_tokens[made.token_id].expires_ms == renewed.expiry_timestamp_ms
        for request in (renew, expire):
            assert (await request(BOB, 5)).error_code == E.DELEGATION_TOKEN_OWNER_MISMATCH
            assert (await request(ADMIN, 5, 1)).error_code == E.DELEGATION_TOKEN_OWNER_MISMATCH
        assert (await expire(ALICE, 0, 1)).error_code == 0
        await asyncio.sleep(0.002)
        assert (await renew(ALICE, -1)).error_code == E.DELEGATION_TOKEN_EXPIRED
        assert (await expire(ALICE, 5)).error_code == E.DELEGATION_TOKEN_EXPIRED
        assert (await expire(ALICE, -1)).error_code == 0
        for request in (renew, expire):
            assert (await request(ALICE, -1)).error_code == E.DELEGATION_TOKEN_NOT_FOUND
        assert written == ["token created"] * 4 + ["token renewed"] * 3 + ["token expired"] * 2


@run
async def test_a_token_just_created_on_another_host(tmp_path: Path) -> None:
    """This host gets it with the controller's response."""
    async with HandlerBroker(tmp_path, CONFIG) as broker:
        made = await create(broker, ALICE)
        known = broker.metadata.delegation_tokens
        request = broker.request

        async def late(change, *more):
            broker.metadata.delegation_tokens = known
            return await request(change, *more)

        broker.request = late  # type: ignore[method-assign]
        broker.metadata.delegation_tokens = {}
        renewed = await broker.send_request(
            m.RenewDelegationTokenRequest(hmac=made.hmac, renew_period_ms=1000), 2, ALICE
        )
        assert renewed.error_code == 0


@run
async def test_tokens_for_others_and_their_visibility(tmp_path: Path) -> None:
    async with HandlerBroker(tmp_path, CONFIG) as broker:
        refused = await create(broker, BOB, "alice")
        assert refused.error_code == E.DELEGATION_TOKEN_AUTHORIZATION_FAILED
        assert (refused.principal_name, refused.token_requester_principal_name) == ("alice", "bob")
        assert refused.issue_timestamp_ms == refused.expiry_timestamp_ms == refused.max_timestamp_ms == -1

        async def allow(resource_type: int, name: str, operation: int) -> None:
            rule = m.CreateAclsRequest.AclCreation(
                resource_type=resource_type,
                resource_name=name,
                principal="User:bob",
                host="*",
                operation=operation,
                permission_type=3,
            )
            assert (await broker.send_request(m.CreateAclsRequest(creations=[rule]), 3, ADMIN)).results[
                0
            ].error_code == 0

        await allow(7, "User:alice", 13)
        made = await create(broker, BOB, "alice")
        assert made.error_code == 0 and (await create(broker, BOB, "carol")).error_code == 65
        assert (await create(broker, ADMIN, "carol", ["ren"])).error_code == 0
        assert await described(broker, ADMIN) == ["alice", "carol"]
        assert await described(broker, ALICE) == ["alice"]
        assert await described(broker, BOB) == ["alice"], "the requester of a token sees it"
        assert await described(broker, REN) == ["carol"]
        assert await described(broker, who("eve")) == []
        assert await described(broker, ADMIN, ["carol"]) == ["carol"]
        assert await described(broker, ADMIN, ["ren", "eve"]) == ["carol"]
        assert await described(broker, ADMIN, []) == []
        await allow(7, "User:carol", 14)
        assert await described(broker, BOB) == ["alice", "carol"]
        # the requester may only see it
        requested = m.ExpireDelegationTokenRequest(hmac=made.hmac, expiry_time_period_ms=-1)
        assert (await broker.send_request(requested, 2, BOB)).error_code == E.DELEGATION_TOKEN_OWNER_MISMATCH
        for wrong, code in (("Group", E.INVALID_PRINCIPAL_TYPE), ("User", E.INVALID_REQUEST)):
            requested = m.CreateDelegationTokenRequest(owner_principal_type=wrong, owner_principal_name="a\nb")
            assert (await broker.send_request(requested, 3, ADMIN)).error_code == code
        renewer = m.CreateDelegationTokenRequest.CreatableRenewers(principal_type="Group", principal_name="g")
        requested = m.CreateDelegationTokenRequest(renewers=[renewer])
        assert (await broker.send_request(requested, 3, ALICE)).error_code == E.INVALID_PRINCIPAL_TYPE


ANY = (
    m.CreateDelegationTokenRequest(),
    m.RenewDelegationTokenRequest(hmac=b"h"),
    m.ExpireDelegationTokenRequest(hmac=b"h"),
    m.DescribeDelegationTokenRequest(owners=None),
)


@run
async def test_users_that_may_request_tokens(tmp_path: Path) -> None:
    async with HandlerBroker(tmp_path, CONFIG) as broker:
        for kind, refused in (
            (PrincipalKind.TOKEN, True),
            (PrincipalKind.ANONYMOUS, True),
            (PrincipalKind.TLS, False),
            (PrincipalKind.LOCAL, False),
        ):
            for request in ANY:
                code = (await broker.send_request(request, 2, who("admin", kind))).error_code
                assert (code == E.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED) == refused, (kind, request)
    async with HandlerBroker(tmp_path / "without", {**CONFIG, "delegation.token.secret.key": ""}) as broker:
        for request in ANY:
            assert (await broker.send_request(request, 2, ALICE)).error_code == E.DELEGATION_TOKEN_AUTH_DISABLED


# -- authentication --------------------------------------------------------------------------------


class World:
    def __init__(self, reauthenticate_ms: int = 0) -> None:
        self.metadata = Metadata()
        self.tokens = Tokens(self.metadata, SECRET, 7 * DAY_MS, DAY_MS)
        options = ListenerOptions(tuple(scram.MECHANISMS), 10_000, reauthenticate_ms)
        self.service = Authentication([options], MetadataUsers(self.metadata, self.tokens), b"seed", 0)

    def put(self, token_id: str = "t", lasts_ms: int = 60_000) -> str:
        """Adds the token; returns its password."""
        now_ms = clock.now_ms()
        owner, max_ms = "User:alice", now_ms + DAY_MS
        token = DelegationToken(token_id, owner, owner, (), now_ms, max_ms, now_ms + lasts_ms)
        self.metadata.delegation_tokens[token_id] = token
        return base64.b64encode(tokens.hmac_of(SECRET, token_id)).decode()

    async def authenticate(self, user: str, password: str, is_token: bool, mechanism: str, before: str = ""):
        """The last step of the exchange. Raises Refused."""
        self.service.begin((1, 1), 0, mechanism)
        loop, steps = asyncio.get_running_loop(), []

        def send(token: bytes) -> bytes:
            step = asyncio.run_coroutine_threadsafe(self.service.step((1, 1), 0, "ip", before, token), loop)
            steps.append(step.result(10))
            return steps[-1].token

        await loop.run_in_executor(None, lambda: client.scram(mechanism, user, password, send, is_token))
        return steps[-1]


@pytest.mark.parametrize("mechanism", scram.MECHANISMS)
@pytest.mark.parametrize("is_token", [True, False])
@run
async def test_a_token_authenticates_its_owner(mechanism: str, is_token: bool) -> None:
    """Also without Kafka's extension, which librdkafka cannot send."""
    world = World()
    password = world.put()
    step = await world.authenticate("t", password, is_token, mechanism)
    assert (step.principal, step.used_delegation_token) == ("User:alice", True)
    assert 0 < step.lifetime_ms <= 60_000, "the session ends with the token"
    assert (await world.authenticate("t", password, is_token, mechanism, "User:alice")).principal
    with pytest.raises(Refused):
        await world.authenticate("t", password, is_token, mechanism, "User:bob")
    with pytest.raises(Refused):
        await world.authenticate("t", password[:-4] + "AA==", is_token, mechanism)
    del world.metadata.delegation_tokens["t"]
    with pytest.raises(Refused):
        await world.authenticate("t", password, is_token, mechanism)


@run
async def test_a_session_ends_at_the_earlier_of_both_limits() -> None:
    world = World(reauthenticate_ms=5000)
    password = world.put()
    assert (await world.authenticate("t", password, True, "SCRAM-SHA-256")).lifetime_ms == 5000
    world.put(lasts_ms=1000)
    assert (await world.authenticate("t", password, True, "SCRAM-SHA-256")).lifetime_ms <= 1000
    world.put(lasts_ms=-1)
    with pytest.raises(Refused):
        await world.authenticate("t", password, True, "SCRAM-SHA-256")


@run
async def test_a_token_that_expires_during_the_exchange() -> None:
    world = World()
    password = world.put()
    world.tokens.verifier("t", "SCRAM-SHA-256", b"seed")
    verifier = world.tokens.verifier
    world.service._users.token_verifier = lambda *requested: (
        verifier(*requested),
        world.metadata.delegation_tokens.clear(),
    )[0]  # type: ignore[attr-defined]
    with pytest.raises(Refused):
        await world.authenticate("t", password, True, "SCRAM-SHA-256")


@run
async def test_a_token_does_not_authenticate_a_user_of_its_name() -> None:
    world = World()
    token_password = world.put("twin")
    made = scram.make_verifier("SCRAM-SHA-256", "own")
    world.service._users.verifier = lambda user, mechanism: made if user == "twin" else None  # type: ignore[attr-defined]
    assert (await world.authenticate("twin", "own", False, "SCRAM-SHA-256")).principal == "User:twin"
    with pytest.raises(Refused):
        await world.authenticate("twin", token_password, False, "SCRAM-SHA-256")
    assert (await world.authenticate("twin", token_password, True, "SCRAM-SHA-256")).principal == "User:alice"
    with pytest.raises(Refused):
        await world.authenticate("twin", "own", True, "SCRAM-SHA-256")


def test_existing_users_are_not_revealed() -> None:
    """Salt and iterations of a token are those of a name without a token."""
    world = World()
    world.put("there")
    found = world.tokens.verifier("there", "SCRAM-SHA-512", b"seed")
    decoy = scram.make_decoy("SCRAM-SHA-512", b"seed", "there", is_token=True)
    assert found is not None and (found.salt, found.iterations) == (decoy.salt, decoy.iterations)


def test_cached_tokens_follow_the_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mqd.acceptor.tokens.VERIFIERS_MAX", 2)
    world = World()
    for token_id in "abc":
        world.put(token_id)
        assert world.tokens.verifier(token_id, "SCRAM-SHA-256", b"seed") is not None
        assert world.tokens.by_hmac(tokens.hmac_of(SECRET, token_id)).token_id == token_id  # type: ignore[union-attr]
    assert len(world.tokens._verifiers) == 2
    del world.metadata.delegation_tokens["b"]
    assert world.tokens.by_hmac(tokens.hmac_of(SECRET, "b")) is None and len(world.tokens._ids) == 2
    world.put("d")
    assert world.tokens.by_hmac(tokens.hmac_of(SECRET, "d")) is not None
    assert Tokens(world.metadata, "", 1, 1).verifier("a", "SCRAM-SHA-256", b"seed") is None
