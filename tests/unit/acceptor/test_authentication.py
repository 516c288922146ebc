"""The acceptor's side of SASL: order of steps, bounds and the delay after failures."""

import asyncio
from types import SimpleNamespace

import pytest

from mqd.acceptor import authentication
from mqd.acceptor.authentication import Authentication, IllegalState, ListenerOptions, Refused, UnsupportedMechanism
from mqd.acceptor.broker import CloseConnection, Context, Origin
from mqd.acceptor.handlers.security import sasl
from mqd.acceptor.metadata import Metadata
from mqd.cluster.host.messages import CredentialsPut
from mqd.cluster.metadata.records import ScramCredential
from mqd.native import PrincipalKind
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import SaslAuthenticateRequest, SaslHandshakeRequest
from mqd.security import client, scram

ALICE = scram.make_verifier("SCRAM-SHA-256", "s3cret")
SASL, PLAIN_LISTENER = 0, 1
CONNECTION = (7, 64)


class Users:
    secret = ""

    def decoy_secret(self) -> str:
        return self.secret

    def verifier(self, user: str, mechanism: str) -> scram.Verifier | None:
        return ALICE if (user, mechanism) == ("alice", "SCRAM-SHA-256") else None

    def parameter_counts(self, mechanism: str | None) -> dict[scram.CredentialParameters, int]:
        return {}

    def token_verifier(self, token_id: str, mechanism: str, seed: bytes) -> None:
        return None


def service(**more) -> Authentication:
    options = ListenerOptions(
        **{"mechanisms": ("SCRAM-SHA-256", "PLAIN"), "token_bytes_max": 1000, "reauthenticate_ms": 0, **more}
    )
    return Authentication([options, None], Users(), b"seed", 100)


async def plain(found: Authentication, token: bytes, before: str = "", connection=CONNECTION):
    found.begin(connection, SASL, "PLAIN")
    return await found.step(connection, SASL, "10.0.0.1", before, token)


def test_plain_and_scram_name_the_principal():
    async def scenario() -> None:
        found = service()
        step = await plain(found, b"\0alice\0s3cret")
        assert (step.principal, step.lifetime_ms, step.token) == ("User:alice", 0, b"")
        found.begin(CONNECTION, SASL, "SCRAM-SHA-256")
        loop, steps = asyncio.get_running_loop(), []

        def send(token: bytes) -> bytes:
            steps.append(
                asyncio.run_coroutine_threadsafe(found.step(CONNECTION, SASL, "10.0.0.1", "", token), loop).result(10)
            )
            return steps[-1].token

        await loop.run_in_executor(None, lambda: client.scram("SCRAM-SHA-256", "alice", "s3cret", send))
        assert [one.principal for one in steps] == ["", "User:alice"]
        assert found.succeeded_count == 2 and found.failed_count == 0

    asyncio.run(scenario())


def test_mechanisms_that_a_listener_has():
    found = service()
    assert found.mechanisms(SASL) == ("SCRAM-SHA-256", "PLAIN") and found.mechanisms(PLAIN_LISTENER) == ()
    with pytest.raises(UnsupportedMechanism):
        found.begin(CONNECTION, SASL, "GSSAPI")
    for listener in (PLAIN_LISTENER, 2, 0xFFFF):
        with pytest.raises(IllegalState):
            found.begin(CONNECTION, listener, "PLAIN")


def test_tokens_come_after_a_handshake_and_once():
    async def scenario() -> None:
        found = service()
        with pytest.raises(IllegalState):
            await found.step(CONNECTION, SASL, "10.0.0.1", "", b"\0alice\0s3cret")
        await plain(found, b"\0alice\0s3cret")
        with pytest.raises(IllegalState):
            await found.step(CONNECTION, SASL, "10.0.0.1", "", b"\0alice\0s3cret")
        found.begin(CONNECTION, SASL, "PLAIN")
        with pytest.raises(IllegalState):  # in another worker's process
            await found.step((8, 64), SASL, "10.0.0.1", "", b"\0alice\0s3cret")

    asyncio.run(scenario())


def test_the_delay_grows_with_failures_of_the_same_address_and_user():
    async def scenario() -> None:
        found, delays_s = service(), []
        for _ in range(9):
            with pytest.raises(Refused, match="invalid credentials with SASL mechanism PLAIN") as refused:
                await plain(found, b"\0alice\0wrong")
            delays_s.append(refused.value.delay_s)
        assert delays_s == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 5]
        with pytest.raises(Refused) as refused:
            await plain(found, b"\0bob\0wrong")
        assert refused.value.delay_s == 0.1
        assert (await plain(found, b"\0alice\0s3cret")).principal, "it is not locked out"
        assert found.failed_count == 10

    asyncio.run(scenario())


def test_another_user_on_the_same_connection_is_refused():
    async def scenario() -> None:
        found = service(reauthenticate_ms=5000)
        step = await plain(found, b"\0alice\0s3cret", "User:alice")
        assert step.lifetime_ms == 5000
        with pytest.raises(Refused):
            await plain(found, b"\0alice\0s3cret", "User:bob")

    asyncio.run(scenario())


def test_pending_exchanges_are_bounded(monkeypatch):
    async def scenario() -> None:
        found = service()
        monkeypatch.setattr(authentication, "EXCHANGES_MAX", 2)
        for number in range(3):
            found.begin((7, number), SASL, "PLAIN")
        with pytest.raises(IllegalState):
            await found.step((7, 0), SASL, "10.0.0.1", "", b"\0alice\0s3cret")
        assert (await found.step((7, 2), SASL, "10.0.0.1", "", b"\0alice\0s3cret")).principal
        with pytest.raises(Refused):
            await plain(found, b"x" * 1001)
        monkeypatch.setattr(authentication, "WAITING_MAX", 0)
        with pytest.raises(Refused):
            await plain(found, b"\0alice\0s3cret")
        monkeypatch.setattr(authentication, "FAILURES_MAX", 1)
        for user in (b"a", b"b", b"c"):
            with pytest.raises(Refused):
                await plain(found, b"\0" + user + b"\0wrong")
        assert len(found._failures) == 1

    asyncio.run(scenario())


def test_exchanges_of_disconnected_clients_are_dropped(monkeypatch):
    found, now = service(), [1000.0]
    monkeypatch.setattr(authentication.time, "monotonic", lambda: now[0])
    for number in range(100):
        found.begin((7, number), SASL, "SCRAM-SHA-256")
    now[0] += authentication.EXCHANGE_S_MAX + 1
    found.begin((7, 100), SASL, "SCRAM-SHA-256")
    assert list(found._exchanges) == [(7, 100)]


def test_waiting_large_tokens_have_a_memory_budget(monkeypatch):
    """A thousand tokens of 512 KiB must not wait for the issuer's keys at the same time."""

    async def scenario() -> None:
        found = service(token_bytes_max=1 << 20)
        monkeypatch.setattr(authentication, "WAITING_BYTES_MAX", 1000)
        found.begin(CONNECTION, SASL, "PLAIN")
        first = asyncio.create_task(found.step(CONNECTION, SASL, "10.0.0.1", "", b"\0alice\0" + b"x" * 700))
        await asyncio.sleep(0)
        with pytest.raises(Refused):
            await plain(found, b"\0alice\0" + b"x" * 700, connection=(7, 65))
        with pytest.raises(Refused):
            await first
        assert (await plain(found, b"\0alice\0s3cret")).principal

    asyncio.run(scenario())


def test_a_session_without_an_end_fits_its_64_bits():
    options = ListenerOptions((), 0, 0)
    assert authentication._lifetime_ms(options, 10**400) == 2**63 - 1
    assert authentication._lifetime_ms(options, 0) == 0


def test_an_exchange_does_not_wait_forever(monkeypatch):
    async def scenario() -> None:
        found, now = service(), [1000.0]
        monkeypatch.setattr(authentication.time, "monotonic", lambda: now[0])
        found.begin(CONNECTION, SASL, "PLAIN")
        now[0] += authentication.EXCHANGE_S_MAX + 1
        with pytest.raises(Refused):
            await found.step(CONNECTION, SASL, "10.0.0.1", "", b"\0alice\0s3cret")

    asyncio.run(scenario())


def test_a_second_token_does_not_overtake_the_first():
    async def scenario() -> None:
        found = service()
        found.begin(CONNECTION, SASL, "PLAIN")
        first = asyncio.create_task(found.step(CONNECTION, SASL, "10.0.0.1", "", b"\0alice\0s3cret"))
        for _ in range(3):
            await asyncio.wait({first}, timeout=0)
        with pytest.raises(IllegalState):
            await found.step(CONNECTION, SASL, "10.0.0.1", "", b"\0alice\0s3cret")
        assert (await first).principal == "User:alice"

    asyncio.run(scenario())


def salt_of(found: Authentication, user: str) -> str:
    async def scenario() -> bytes:
        found.begin(CONNECTION, SASL, "SCRAM-SHA-256")
        return (await found.step(CONNECTION, SASL, "10.0.0.1", "", f"n,,n={user},r=abc".encode())).token

    return asyncio.run(scenario()).decode().split(",")[1]


def test_salts_of_unknown_users_are_derived_from_the_cluster_secret():
    options = ListenerOptions(mechanisms=("SCRAM-SHA-256",), token_bytes_max=1000, reauthenticate_ms=0)
    hosts = []
    for seed in (b"one key", b"another key"):
        users = Users()
        hosts.append((users, Authentication([options, None], users, seed, 100)))
    first, second = (found for _, found in hosts)
    assert salt_of(first, "carol") != salt_of(second, "carol"), "the cluster has no secret yet"
    for users, _ in hosts:
        users.secret = "the cluster's"
    assert salt_of(first, "carol") == salt_of(second, "carol")
    assert salt_of(first, "carol") != salt_of(first, "dora")
    for users, _ in hosts:
        users.secret = "another cluster's"
    assert salt_of(first, "carol") == salt_of(second, "carol")


def test_shapes_of_credentials_are_counted_again_after_a_change():
    metadata = Metadata()
    users = authentication.MetadataUsers(metadata, SimpleNamespace(valid_token=None, verifier=None))

    def put(user: str, mechanism: int, salt: bytes, iterations: int) -> None:
        made = ScramCredential(user, mechanism, salt, iterations, b"", b"")
        metadata.apply(CredentialsPut(metadata.version, [made], []))

    assert users.parameter_counts(None) == users.parameter_counts("SCRAM-SHA-256") == {}
    put("alice", 1, bytes(24), 4096)
    put("alice", 2, bytes(24), 4096)
    put("bob", 2, b"0123456789abcdefghijklmno", 8192)
    alice = scram.CredentialParameters("SCRAM-SHA-256", 24, 4096)
    bob = scram.CredentialParameters("SCRAM-SHA-512", scram.JAVA_SALT, 8192)
    assert users.parameter_counts("SCRAM-SHA-256") == {alice: 1}
    assert users.parameter_counts("SCRAM-SHA-512") == {scram.CredentialParameters("SCRAM-SHA-512", 24, 4096): 1, bob: 1}
    assert users.parameter_counts(None) == {alice: 1, bob: 1}  # each user once, by the mechanism that PLAIN checks
    metadata.apply(CredentialsPut(metadata.version, [], [("alice", 1)]))
    assert users.parameter_counts("SCRAM-SHA-256") == {}


@pytest.mark.parametrize(("is_authenticated", "listener"), [(False, SASL), (True, SASL), (False, SASL + 1)])
def test_without_an_exchange_an_unauthenticated_connection_ends(is_authenticated: bool, listener: int) -> None:
    """A client that sends raw tokens gets no response, so it would wait for its timeout. The exchange was
    lost with the acceptor's restart. A listener without SASL keeps the connection, as in Kafka.
    """
    kind = PrincipalKind.SASL if is_authenticated else PrincipalKind.ANONYMOUS
    origin = Origin(
        connection=CONNECTION,
        listener_id=listener,
        peer_ip="10.0.0.1",
        principal="User:alice" if is_authenticated else "",
        principal_kind=kind,
    )
    context = Context(SimpleNamespace(authentication=service(), authorizer=None, may_lead=lambda: True), origin)
    request = SaslAuthenticateRequest(auth_bytes=b"\0alice\0s3cret")
    response = asyncio.run(sasl.handle(context, None, request))
    assert response.error_code == ErrorCode.ILLEGAL_SASL_STATE and context.ends_connection is (
        not is_authenticated and listener == SASL
    )


@pytest.mark.parametrize(
    ("rights", "has_lease", "password", "outcome"),
    [
        (True, True, "s3cret", 0),
        (True, True, "wrong", 58),
        (True, False, "s3cret", "no verdict"),
        (True, False, "wrong", "no verdict"),
        (False, False, "s3cret", 0),
        ("super", False, "s3cret", 0),
    ],
)
def test_a_host_without_its_lease_may_not_know_a_changed_password(rights, has_lease, password, outcome):
    """A host without a lease would not serve the client anyway, as where rights are checked."""
    rules = SimpleNamespace(super_users=frozenset({"User:alice"} if rights == "super" else ())) if rights else None
    broker = SimpleNamespace(authentication=service(), authorizer=rules, may_lead=lambda: has_lease)
    origin = Origin(connection=CONNECTION, listener_id=SASL, peer_ip="10.0.0.1")

    async def scenario() -> object:
        context = Context(broker, origin)
        await sasl.handle(context, None, SaslHandshakeRequest(mechanism="PLAIN"))
        proof = SaslAuthenticateRequest(auth_bytes=f"\0alice\0{password}".encode())
        try:
            response = await sasl.handle(context, None, proof)
        except CloseConnection:
            return "no verdict"
        assert (context.authenticated_as is not None) == (response.error_code == 0)
        return response.error_code

    assert asyncio.run(scenario()) == outcome
