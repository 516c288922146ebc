"""SCRAM against the vectors of RFC 7677, and attacks by clients."""

import asyncio
import base64
import hashlib
import hmac
from collections import Counter
from random import Random

import pytest

from mqd.security import client, scram
from mqd.security.exchange import AuthenticationFailed
from mqd.security.scram import ScramExchange, Verifier

SEED = b"seed"
RFC_SALT = base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
RFC_NONCE = "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"


def rfc_verifier() -> Verifier:
    salted = scram.salted_password("SCRAM-SHA-256", b"pencil", RFC_SALT, 4096)
    return scram.verifier_of("SCRAM-SHA-256", salted, RFC_SALT, 4096)


def exchange(verifier: Verifier | None, mechanism: str = "SCRAM-SHA-256", **more) -> ScramExchange:
    return ScramExchange(mechanism, lambda user, is_token: verifier, SEED, **more)


def step(server: ScramExchange, text: str | bytes) -> str:
    return asyncio.run(server.step(text.encode() if isinstance(text, str) else text)).decode()


class Client:
    """A client that computes its proof without the code under test."""

    def __init__(self, user: str, password: str, mechanism: str = "SCRAM-SHA-256", header: str = "n,,") -> None:
        self.hash = scram.MECHANISMS[mechanism]
        self.password, self.header = password, header
        self.bare = f"n={user},r=abc"

    @property
    def first(self) -> str:
        return self.header + self.bare

    def final(self, server_first: str, binding: str = "", nonce: str = "") -> str:
        fields = dict(part.split("=", 1) for part in server_first.split(","))
        salted = hashlib.pbkdf2_hmac(self.hash, self.password.encode(), base64.b64decode(fields["s"]), int(fields["i"]))
        client_key = hmac.new(salted, b"Client Key", self.hash).digest()
        without = f"c={binding or base64.b64encode(self.header.encode()).decode()},r={nonce or fields['r']}"
        signed = f"{self.bare},{server_first},{without}".encode()
        signature = hmac.new(hashlib.new(self.hash, client_key).digest(), signed, self.hash).digest()
        self.server_signature = hmac.new(
            hmac.new(salted, b"Server Key", self.hash).digest(), signed, self.hash
        ).digest()
        proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
        return f"{without},p={base64.b64encode(proof).decode()}"


def test_the_exchange_of_rfc_7677():
    server = exchange(rfc_verifier(), nonce=RFC_NONCE)
    first = step(server, "n,,n=user,r=rOprNGfwEbeRWgbNEkqO")
    assert first == f"r=rOprNGfwEbeRWgbNEkqO{RFC_NONCE},s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
    assert not server.done
    final = step(server, f"c=biws,r=rOprNGfwEbeRWgbNEkqO{RFC_NONCE},p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=")
    assert final == "v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="
    assert server.done and server.user == "user"


@pytest.mark.parametrize("mechanism", scram.MECHANISMS)
@pytest.mark.parametrize("header", ["n,,", "y,,", "n,a=alice,"])
def test_a_right_password(mechanism, header):
    peer = Client("alice", "s3cret", mechanism, header)
    server = exchange(scram.make_verifier(mechanism, "s3cret"), mechanism)
    proof = step(server, peer.final(step(server, peer.first)))
    assert server.done and proof == "v=" + base64.b64encode(peer.server_signature).decode()


def refused(server: ScramExchange, text: str | bytes, why: str) -> None:
    with pytest.raises(AuthenticationFailed, match=why):
        step(server, text)
    assert not server.done


def test_a_wrong_password_and_an_unknown_user_fail_alike():
    known = exchange(scram.make_verifier("SCRAM-SHA-256", "right"))
    unknown = exchange(None)
    peer = Client("alice", "wrong")
    refused(known, peer.final(step(known, peer.first)), "wrong user or password")
    response = step(unknown, peer.first)
    refused(unknown, peer.final(response), "wrong user or password")
    again = dict(part.split("=", 1) for part in step(exchange(None), peer.first).split(","))
    assert again["s"] == dict(part.split("=", 1) for part in response.split(","))["s"], (
        "an unknown user's salt is stable"
    )
    assert len(base64.b64decode(again["s"])) == scram.SALT_BYTES
    # a generated password or a typed one: the number says nothing of whether there is such a user
    counts = {scram.make_decoy("SCRAM-SHA-256", SEED, f"user {number}").iterations for number in range(50)}
    assert counts == {scram.ITERATIONS_MIN, scram.ITERATIONS_MAX} and int(again["i"]) in counts


def test_the_names_of_users_are_unescaped():
    requests = []
    server = ScramExchange("SCRAM-SHA-256", lambda user, is_token: requests.append((user, is_token)), SEED)
    step(server, "n,,n=a=2Cb=3Dc,r=abc,tokenauth=true")
    assert requests == [("a,b=c", True)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "n,,",
        "n,,n=,r=a",
        "n,,n=a,r=",
        "n,,n=a",
        "p=tls-unique,,n=a,r=b",
        "n,,n=a=2Fb,r=c",
        "n,,n=a\0,r=c",
        "n,,r=c,n=a",
        "n,,n=a,r=c d",
        "n,,m=x,n=a,r=c",
        b"\xff\xfe",
        "n,,n=a,r=c,bad",
    ],
)
def test_a_malformed_first_message(text):
    refused(exchange(rfc_verifier()), text, "malformed|UTF-8")


@pytest.mark.parametrize("text", ["n,,n={},r=abc", "n,,n=alice,r={}", "n,,n=alice,r=abc,x={}"])
def test_a_message_is_bounded(text):
    """Messages of unauthenticated clients are kept until their exchange is dropped."""
    step(exchange(None), text.format("x" * 4000))
    refused(exchange(None), text.format("x" * 4096), "more than 4096 bytes")


def test_a_client_cannot_act_as_another_user():
    refused(exchange(rfc_verifier()), "n,a=admin,n=user,r=c", "another user")


def test_a_final_message_of_another_exchange():
    """CVE-2024-56128: the nonce must be the whole one of this exchange."""
    verifier = scram.make_verifier("SCRAM-SHA-256", "s3cret")
    peer, recorded = Client("alice", "s3cret"), exchange(verifier)
    final = peer.final(step(recorded, peer.first))
    step(recorded, final)
    replayed = exchange(verifier)
    step(replayed, peer.first)
    refused(replayed, final, "another exchange")
    for nonce in ("abc", "abcx"):
        server = exchange(verifier)
        refused(server, peer.final(step(server, peer.first), nonce=nonce), "another exchange")


def test_a_client_that_repeats_its_nonce_is_distinguished():
    """librdkafka before 2.6.1 does this (its pull request 4895). Apache Kafka 4 refuses it, too."""
    server, peer = exchange(scram.make_verifier("SCRAM-SHA-256", "s3cret")), Client("alice", "s3cret")
    first = step(server, peer.first)
    nonce = first.split(",")[0].removeprefix("r=")
    refused(server, peer.final(first, nonce=f"abc{nonce}"), "librdkafka before 2.6.1 does")


def test_a_final_message_with_another_binding():
    server, peer = exchange(scram.make_verifier("SCRAM-SHA-256", "s3cret")), Client("alice", "s3cret")
    refused(server, peer.final(step(server, peer.first), binding=base64.b64encode(b"y,,").decode()), "channel binding")


@pytest.mark.parametrize("proof", ["", "AAAA", "%%%%", "A" * 44, "AA=="])
def test_a_proof_of_any_shape_is_refused(proof):
    server = exchange(scram.make_verifier("SCRAM-SHA-256", "s3cret"))
    nonce = step(server, "n,,n=alice,r=abc").split(",")[0]
    refused(server, f"c=biws,{nonce},p={proof}", "malformed|base64|wrong user")


def test_a_finished_exchange_accepts_nothing():
    peer, server = Client("alice", "s3cret"), exchange(scram.make_verifier("SCRAM-SHA-256", "s3cret"))
    final = peer.final(step(server, peer.first))
    step(server, final)
    with pytest.raises(AuthenticationFailed, match="has already ended"):
        step(server, final)


def test_a_proof_of_all_zeroes_for_an_unknown_user():
    """Not even the decoy's own key would be accepted."""
    decoy = scram.make_decoy("SCRAM-SHA-256", SEED, "nobody")
    assert not scram.matches_password("SCRAM-SHA-256", decoy, b"")
    assert scram.make_decoy("SCRAM-SHA-256", b"other seed", "nobody").salt != decoy.salt


@pytest.mark.parametrize("mechanism", scram.MECHANISMS)
def test_our_client_and_our_server(mechanism):
    server = exchange(scram.make_verifier(mechanism, "pässword,="), mechanism)
    client.scram(mechanism, "a,b=c", "pässword,=", lambda token: asyncio.run(server.step(token)))
    assert server.done and server.user == "a,b=c"


def test_our_client_refuses_a_server_that_knows_no_verifier():
    """Any server can respond; only one with the verifier can sign."""
    server = exchange(scram.make_verifier("SCRAM-SHA-256", "right"))

    def step(token: bytes) -> bytes:
        return asyncio.run(server.step(token)) if token.startswith(b"n,,") else b"v=" + base64.b64encode(bytes(32))

    with pytest.raises(client.NotAuthenticated, match="may not be the real broker"):
        client.scram("SCRAM-SHA-256", "alice", "right", step)


@pytest.mark.parametrize(
    "first",
    [
        b"",
        b"r=x,s=AAAA,i=4096",
        b"r={},s=AAAA,i=4096",
        b"r={}x,s=AAAA,i=1",
        b"r={}x,s=AAAA,i=999999999",
        b"r={}x,s=AAA,i=4096",
    ],
)
def test_our_client_refuses_a_first_message(first):
    def step(token: bytes) -> bytes:
        return first.replace(b"{}", token.split(b"r=")[1])

    with pytest.raises(client.NotAuthenticated):
        client.scram("SCRAM-SHA-256", "alice", "right", step)


def salts_of_java(count: int) -> list[bytes]:
    """As Kafka's clients make them: new BigInteger(130, random).toString(36)."""
    random = Random(7)

    def text(number: int) -> str:
        return "" if not number else text(number // 36) + "0123456789abcdefghijklmnopqrstuvwxyz"[number % 36]

    return [text(random.getrandbits(130)).encode() for _ in range(count)]


def test_an_unknown_user_looks_like_existing_users():
    """Users created by Java's clients, by librdkafka (64 bytes) or by mqd, with any number of
    iterations.
    """
    name = "SCRAM-SHA-512"
    made = [scram.parameters_of(name, salt, 4096) for salt in salts_of_java(60)]
    made += [scram.parameters_of(name, bytes(64), 8192)] * 30 + [scram.parameters_of(name, bytes(24), 16384)] * 10
    parameter_counts = Counter(made)
    assert len(parameter_counts) == 3
    decoys = [
        scram.make_decoy(name, SEED, f"user {number}", parameter_counts=parameter_counts) for number in range(2000)
    ]
    found = Counter(scram.parameters_of(name, one.salt, one.iterations) for one in decoys)
    assert found.keys() == parameter_counts.keys()
    for parameters, count in parameter_counts.items():
        assert found[parameters] / 2000 == pytest.approx(count / 100, abs=0.04)
    # as text they are indistinguishable, too: in length, and in the prefix of the longer ones
    texts = [one.salt for one in decoys if one.iterations == 4096]
    lengths = [Counter((len(salt), salt[:1] == b"1") for salt in salts) for salts in (texts, salts_of_java(2000))]
    for kind, count in lengths[1].items():
        assert lengths[0][kind] / len(texts) == pytest.approx(count / 2000, abs=0.05)


def test_few_decoys_change_when_users_do():
    parameter_counts = Counter(
        {
            scram.CredentialParameters("SCRAM-SHA-256", 24, 4096): 50,
            scram.CredentialParameters("SCRAM-SHA-256", 64, 4096): 50,
        }
    )
    more = parameter_counts + Counter({scram.CredentialParameters("SCRAM-SHA-256", 24, 8192): 5})
    changed = sum(
        scram.make_decoy("SCRAM-SHA-256", SEED, f"user {number}", parameter_counts=parameter_counts).salt
        != scram.make_decoy("SCRAM-SHA-256", SEED, f"user {number}", parameter_counts=more).salt
        or scram.make_decoy("SCRAM-SHA-256", SEED, f"user {number}", parameter_counts=more).iterations == 8192
        for number in range(1000)
    )
    assert 20 <= changed <= 80  # 5 of 105


def test_the_cost_of_plain_is_that_of_the_users_mechanism():
    parameter_counts = {scram.CredentialParameters("SCRAM-SHA-512", 24, 8192): 1}
    mechanism, verifier = scram.decoy_for_plain(SEED, "nobody", parameter_counts)
    assert (mechanism, verifier.iterations, len(verifier.stored_key)) == ("SCRAM-SHA-512", 8192, 64)
