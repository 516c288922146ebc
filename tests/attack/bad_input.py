"""Hostile input from the network, without credentials and from a user without rights. Each kind is
a function that does it once and returns the outcome in a word; `Intruded` is raised where an attack
succeeded.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import json
import random
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from mqd.protocol import encode_request, with_length
from mqd.protocol.messages import FetchRequest, MetadataRequest, SaslAuthenticateRequest, SaslHandshakeRequest
from mqd.security import client
from tests.attack.libssl import Session
from tests.attack.target import ALICE, MALLORY, PASSWORDS, TOPICS, SecuredConnection, Target
from tests.interaction.random_requests import Requests
from tests.interaction.traffic import batch, produce_request
from tests.kafka_connection import ConnectionEnded, KafkaConnection

PRODUCE, FETCH, METADATA, HANDSHAKE, API_VERSIONS, AUTHENTICATE = 0, 1, 3, 17, 18, 36
TOKEN_BYTES_MAX = 512 << 10
WAIT_S = 20.0
QUIET_S = 0.05  # how long a client that sent half of something waits for a response
_OTHER_KEY = rsa.generate_private_key(65537, 2048)


class Intruded(Exception):
    """An attack succeeded; the text describes it."""


# -- pieces ----------------------------------------------------------------------------------------


def mutated(rng: random.Random, data: bytes) -> bytes:
    """Flipped, truncated, repeated, with boundary numbers: like a fuzzer."""
    bytes_ = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at = rng.randrange(len(bytes_)) if bytes_ else 0
        match rng.randrange(6):
            case 0 if bytes_:
                bytes_[at] ^= 1 << rng.randrange(8)
            case 1:
                del bytes_[at:]
            case 2:
                bytes_[at:at] = rng.randbytes(rng.randrange(1, 64))
            case 3:
                bytes_[at : at + 4] = struct.pack(">i", rng.choice((-1, 0, 1, 0x7FFFFFFF, -(2**31), 1 << 20)))
            case 4:
                bytes_[at : at + 2] = struct.pack(">h", rng.choice((-1, 0, 1, 32767, -32768)))
            case _:
                bytes_[at:at] = bytes_[at : at + rng.randrange(1, 200)]
    return bytes(bytes_)


def client_hello(rng: random.Random, name: str = "localhost", version: ssl.TLSVersion | None = None) -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if version is not None:
        context.maximum_version = version
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        context.wrap_bio(incoming, outgoing, server_hostname=name).do_handshake()
    except ssl.SSLWantReadError:
        pass
    return outgoing.read()


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)


def outcome(connection: socket.socket, wait_s: float = WAIT_S) -> str:
    """The broker's reaction: an alert, a closed connection, a response, or it waits for more."""
    connection.settimeout(wait_s)
    try:
        found = connection.recv(1 << 16)
    except TimeoutError:
        return "waits"
    except OSError:
        return "reset"
    if not found:
        return "closed"
    return {0x15: "alert", 0x16: "handshake"}.get(found[0], "answered")


def mechanism(kafka: KafkaConnection, name: str) -> None:
    response = kafka.call(HANDSHAKE, 1, SaslHandshakeRequest(mechanism=name))
    if response.error_code:
        raise AssertionError(f"{name} is not there: {response}")


def authenticated(kafka: KafkaConnection, token: bytes) -> SaslAuthenticateRequest:
    return kafka.call(AUTHENTICATE, 2, SaslAuthenticateRequest(auth_bytes=token))


def must_be_stranger(kafka: KafkaConnection) -> None:
    """Only the SASL exchange gets responses on this connection."""
    try:
        response = kafka.call(METADATA, 12, MetadataRequest())
    except (ConnectionEnded, OSError):
        return
    raise Intruded(f"Metadata was answered without credentials: {response}")


# -- TLS -------------------------------------------------------------------------------------------


def handshake_garbage(target: Target, rng: random.Random) -> str:
    hello = client_hello(rng, version=rng.choice((None, ssl.TLSVersion.TLSv1_2)))
    port = rng.choice((target.tls_port, target.mutual_port))
    with connected(port) as connection:
        try:
            connection.sendall(rng.randbytes(rng.randrange(1, 600)) if rng.random() < 0.2 else mutated(rng, hello))
        except OSError:
            return "reset"
        return outcome(connection, QUIET_S)


def handshake_cut_short(target: Target, rng: random.Random) -> str:
    """Half-open: the client disconnects in the middle of the handshake."""
    hello = client_hello(rng)
    with connected(rng.choice((target.tls_port, target.mutual_port))) as connection:
        connection.sendall(hello[: rng.randrange(len(hello))] if rng.random() < 0.5 else hello)
        if rng.random() < 0.5:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return "left"


def plain_on_tls(target: Target, rng: random.Random) -> str:
    sent = rng.choice(
        (
            with_length(encode_request(MetadataRequest(), 12, 1, "plain")),
            b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
            with_length(encode_request(SaslHandshakeRequest(mechanism="PLAIN"), 1, 1, "plain")),
            b"SSH-2.0-OpenSSH_9.2\r\n",
        )
    )
    with connected(rng.choice((target.tls_port, target.mutual_port))) as connection:
        connection.sendall(sent)
        found = outcome(connection)
    if found in ("answered", "handshake", "waits"):
        raise Intruded(f"plain text on a TLS listener: {found}")
    return found


def tls_on_plain(target: Target, rng: random.Random) -> str:
    with connected(target.sasl_port) as connection:
        connection.sendall(client_hello(rng, version=rng.choice((None, ssl.TLSVersion.TLSv1_2))))
        found = outcome(connection)
    if found in ("answered", "waits"):
        raise Intruded(f"TLS on a plain listener: {found}")
    return found


def wrong_certificate(target: Target, rng: random.Random) -> str:
    kind = rng.choice(sorted(target.wrong_clients))
    with connected(target.mutual_port) as plain:
        try:
            with target.wrong_clients[kind].wrap_socket(plain) as connection:
                connection.sendall(with_length(encode_request(MetadataRequest(), 12, 1, "wrong")))
                found = connection.recv(1 << 16)
        except (ssl.SSLError, OSError) as error:
            return f"{kind}: {getattr(error, 'reason', None) or type(error).__name__}"
    if found:
        raise Intruded(f"a certificate of kind {kind} was let in")
    return f"{kind}: closed"


def wrong_name(target: Target, rng: random.Random) -> str:
    """The client requests another server (SNI), and must detect that this is not it."""
    name = rng.choice(("elsewhere.example", "localhost.", "a" * 60 + ".example", "xn--nxasmq6b.example", "127.0.0.2"))
    context = ssl.create_default_context(cafile=str(target.ca))
    with connected(target.tls_port) as plain:
        try:
            with context.wrap_socket(plain, server_hostname=name):
                raise Intruded(f"the broker has proven itself as {name}")
        except ssl.SSLCertVerificationError:
            return "the client refuses"
        except (ssl.SSLError, OSError) as error:
            return str(getattr(error, "reason", None) or type(error).__name__)


def key_updates(target: Target, rng: random.Random) -> str:
    """Sixteen of them, with requests in between: each request must still get a response."""
    frame = with_length(encode_request(SaslHandshakeRequest(mechanism="SCRAM-SHA-512"), 1, 7, "update"))
    with Session(connected(target.tls_port)) as session:
        for number in range(16):
            for _ in range(rng.choice((1, 1, 1, 2, 8))):
                session.update_key(rng.random() < 0.5)
            if number < 8:
                session.send(frame)
                if len(session.receive()) < 8:
                    return "lost"
    return "served"


def renegotiation(target: Target, rng: random.Random) -> str:
    frame = with_length(encode_request(SaslHandshakeRequest(mechanism="SCRAM-SHA-512"), 1, 7, "again"))
    with Session(connected(target.tls_port), is_tls_1_2=True) as session:
        session.send(frame)
        session.receive()
        try:
            session.renegotiate()
        except ConnectionError:
            return "refused"
    raise Intruded("a client has renegotiated")


# -- SASL ------------------------------------------------------------------------------------------


def _refused(kafka: KafkaConnection, token: bytes) -> str:
    """The token is refused with an error or a closed connection, and does not authenticate."""
    try:
        response = authenticated(kafka, token)
    except (ConnectionEnded, OSError):
        return "closed"
    if response.error_code == 0:
        # a step of an exchange, or the refusal of RFC 7628, which the client acknowledges
        if bytes(response.auth_bytes).startswith(b'{"status"'):
            return _refused(kafka, b"\x01")
        must_be_stranger(kafka)
        return "a step"
    must_be_stranger(kafka)
    return f"error {response.error_code}"


def _stranger(target: Target, rng: random.Random) -> KafkaConnection:
    """To the listener without TLS: the same exchange at a lower cost. From any address of this
    machine, since each has its own delay after failures.
    """
    address = f"127.{rng.randrange(1, 255)}.{rng.randrange(256)}.{rng.randrange(1, 255)}"
    return KafkaConnection(port=target.sasl_port, timeout_s=WAIT_S, from_address=address)


def broken_token(target: Target, rng: random.Random) -> str:
    user = rng.choice((ALICE, f"nobody{rng.randrange(10**9)}"))
    nonce = base64.b64encode(rng.randbytes(18))
    name, token = rng.choice(
        (
            ("PLAIN", b"\0%s\0%s" % (user.encode(), b"password")),
            ("SCRAM-SHA-256", b"n,,n=%s,r=%s" % (user.encode(), nonce)),
            ("SCRAM-SHA-512", b"n,a=%s,n=%s,r=%s,tokenauth=true" % (user.encode(), user.encode(), nonce)),
            ("OAUTHBEARER", b"n,,\x01auth=Bearer %s\x01\x01" % target.token(exp=1).encode()),
        )
    )
    with _stranger(target, rng) as kafka:
        mechanism(kafka, name)
        return _refused(kafka, mutated(rng, token)[:TOKEN_BYTES_MAX])


def giant_token(target: Target, rng: random.Random) -> str:
    size = rng.choice((4095, 4096, 4097, 65536, TOKEN_BYTES_MAX - 60, TOKEN_BYTES_MAX, TOKEN_BYTES_MAX + 1, 1 << 20))
    filling = b"%x" % rng.getrandbits(4) * size
    name, token = rng.choice(
        (
            ("PLAIN", b"\0%s\0p" % filling),
            ("PLAIN", b"\0%d\0%s" % (rng.getrandbits(60), filling)),
            ("SCRAM-SHA-256", b"n,,n=%s,r=x" % filling),
            ("SCRAM-SHA-512", b"n,,n=%d,r=%s" % (rng.getrandbits(60), filling)),
            ("SCRAM-SHA-256", b"n,,n=%d,r=x,e=%s" % (rng.getrandbits(60), filling)),
            ("OAUTHBEARER", b"n,,\x01auth=Bearer %s\x01\x01" % filling),
            ("OAUTHBEARER", b"n,,\x01auth=Bearer %s.%s.%s\x01\x01" % (_part({"alg": "RS256"}), filling, filling[:10])),
        )
    )
    with _stranger(target, rng) as kafka:
        mechanism(kafka, name)
        try:
            found = authenticated(kafka, token)
        except (ConnectionEnded, OSError):
            return "closed"
        return f"error {found.error_code}"  # and it disconnects in the middle of the exchange


def replayed_scram(target: Target, rng: random.Random) -> str:
    """Replays an eavesdropped successful exchange, completely or with the new nonce."""
    if not target.received:
        received: list[bytes] = []
        with _stranger(target, rng) as kafka:
            mechanism(kafka, "SCRAM-SHA-256")

            def step(token: bytes) -> bytes:
                received.append(token)
                return bytes(authenticated(kafka, token).auth_bytes)

            client.scram("SCRAM-SHA-256", ALICE, PASSWORDS[ALICE], step)
        target.received = received
    first, final = target.received
    with _stranger(target, rng) as kafka:
        mechanism(kafka, "SCRAM-SHA-256")
        response = bytes(authenticated(kafka, first).auth_bytes)
        if rng.random() < 0.5:
            nonce = response.partition(b",")[0][2:]
            proof = final.rpartition(b",p=")[2]
            final = b"c=biws,r=" + nonce + b",p=" + proof
        return _refused(kafka, final)


def _part(claims: dict) -> bytes:
    return base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=")


def _claims(**changed: object) -> dict:
    return {"sub": ALICE, "iss": "https://issuer.example", "aud": "kafka", "exp": time.time() + 300, **changed}


def _bearer(target: Target, rng: random.Random, token: bytes) -> str:
    with _stranger(target, rng) as kafka:
        mechanism(kafka, "OAUTHBEARER")
        found = _refused(kafka, b"n,,\x01auth=Bearer " + token + b"\x01\x01")
    if found == "a step":
        raise Intruded(f"the token {token!r} was taken")
    return found


def alg_none(target: Target, rng: random.Random) -> str:
    name = rng.choice(("none", "None", "NONE", "nOnE", "", None, "none\0", 0, ["none"], {"alg": "none"}))
    signature = rng.choice((b"", b"AA", base64.urlsafe_b64encode(rng.randbytes(256)).rstrip(b"=")))
    header = {"alg": name, "typ": "JWT", **({"kid": "one"} if rng.random() < 0.7 else {})}
    return _bearer(target, rng, _part(header) + b"." + _part(_claims()) + b"." + signature)


def key_confusion(target: Target, rng: random.Random) -> str:
    """The issuer's public key as a secret, another key with the issuer's name, a key in the token."""
    public = target.issuer_key.public_key()
    if rng.random() < 0.5:
        pem = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        der = public.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
        secret = rng.choice((pem, pem.strip(), der, target.keys.read_bytes(), b"", b"one"))
        name, digest = rng.choice((("HS256", "sha256"), ("HS384", "sha384"), ("HS512", "sha512")))
        signed = _part({"alg": name, "kid": rng.choice(("one", ""))}) + b"." + _part(_claims())
        signature = hmac.digest(secret, signed, digest)
        return _bearer(target, rng, signed + b"." + base64.urlsafe_b64encode(signature).rstrip(b"="))
    jwk = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(_OTHER_KEY.public_key()))
    header = rng.choice(
        (
            {"kid": "one"},
            {"kid": "one", "jwk": jwk},
            {"kid": "one", "jku": "https://localhost:1/keys"},
            {"kid": "../../../etc/passwd"},
            {"kid": "one", "x5u": "file:///etc/passwd"},
            {"kid": "one", "crit": ["exp"], "exp": 1},
        )
    )
    name = rng.choice(("RS256", "RS512", "PS256"))
    return _bearer(target, rng, jwt.encode(_claims(), _OTHER_KEY, name, header).encode())


def token_of_another_time(target: Target, rng: random.Random) -> str:
    """With a valid signature, but not valid now, or not here."""
    now, year = time.time(), 365 * 86400
    claims = rng.choice(
        (
            {"nbf": now + rng.randrange(60, year)},
            {"iat": now + rng.randrange(60, year)},
            {"exp": now - rng.randrange(60, year)},
            {"exp": -1},
            {"exp": "tomorrow"},
            {"exp": None},
            {"aud": "another"},
            {"aud": None},
            {"iss": "https://issuer.example.org"},
            {"sub": ""},
            {"sub": None},
            {"sub": [ALICE]},
        )
    )
    return _bearer(target, rng, target.token(**claims).encode())


# -- Kafka frames ----------------------------------------------------------------------------------


def malformed_before(target: Target, rng: random.Random) -> str:
    """Any frame, before authentication."""
    key, version, request = _requests(target, rng).next()
    frame = encode_request(request, version, rng.getrandbits(31), "stranger")
    data = with_length(frame) if rng.random() < 0.3 else mutated(rng, with_length(frame))
    with _stranger(target, rng) as kafka:
        try:
            kafka.send_raw(data)
        except (ConnectionEnded, OSError):
            return "closed"
        kafka.socket.settimeout(QUIET_S)
        try:
            response = kafka.receive_frame()
        except TimeoutError:
            return "waits"
        except (ConnectionEnded, OSError):
            return "closed"
        sent_key = struct.unpack_from(">h", data, 4)[0] if len(data) >= 6 else -1
        if sent_key not in (HANDSHAKE, API_VERSIONS, AUTHENTICATE):
            raise Intruded(f"API {sent_key} was answered before any proof: {response[:60]!r}")
    return "answered"


def _requests(target: Target, rng: random.Random) -> Requests:
    made = Requests(0)
    made.random = rng
    return made


def _mallory(target: Target) -> SecuredConnection:
    """One of mallory's authenticated connections: with an exchange for each frame, only those would
    be tested.
    """
    with contextlib.suppress(IndexError):
        return target.proven.pop()
    kafka = KafkaConnection(port=target.sasl_port, timeout_s=WAIT_S)
    SecuredConnection.prove(kafka, MALLORY, PASSWORDS[MALLORY])
    return kafka


def malformed_after(target: Target, rng: random.Random) -> str:
    """Broken frames of an authenticated user without rights."""
    key, version, request = _requests(target, rng).next()
    data = mutated(rng, with_length(encode_request(request, version, rng.getrandbits(31), "mallory")))
    kafka = _mallory(target)
    try:
        kafka.send_raw(data)
        kafka.socket.settimeout(QUIET_S)
        kafka.receive_frame()
        return "answered"
    except TimeoutError:
        return "waits"
    except (ConnectionEnded, OSError):
        return "closed"
    finally:
        kafka.close()  # its stream may be out of step


def without_rights(target: Target, rng: random.Random) -> str:
    """Well-formed requests to every API, with the names of other users' resources."""
    requests = _requests(target, rng)
    requests.pools["topic"] = [*TOPICS, "bad-sacrifice", "__consumer_offsets", *strange_names(rng)]
    requests.pools["group"] = ["good-group", "good", *strange_names(rng)]
    requests.pools["transactional_id"] = ["good-tx", *strange_names(rng)]
    key, version, request = requests.next()
    kafka = _mallory(target)
    try:
        kafka.socket.settimeout(WAIT_S)
        acks_0 = key == PRODUCE and getattr(request, "acks", 1) == 0
        kafka.send(key, version, request, expect_response=not acks_0)
        if acks_0:
            kafka.close()
            return "no answer is due"
        response = kafka.receive().body
    except (ConnectionEnded, OSError):
        kafka.close()
        return "closed"
    _must_show_nothing(key, response)
    target.proven.append(kafka)
    return "answered"


def named_oddly(target: Target, rng: random.Random) -> str:
    """Topic names with wildcards and unicode: none of them gives access to another user's records."""
    name = rng.choice(list(strange_names(rng)))
    key, version, request = rng.choice(
        (
            (METADATA, 9, MetadataRequest(topics=[MetadataRequest.Topic(name=name)])),
            (PRODUCE, 9, produce_request(name, {0: batch(b"mallory was here")})),
            (
                FETCH,
                12,
                FetchRequest(
                    max_wait_ms=0,
                    max_bytes=1 << 20,
                    session_epoch=-1,
                    topics=[
                        FetchRequest.Topic(
                            topic=name, partitions=[FetchRequest.Partition(partition=0, partition_max_bytes=1 << 20)]
                        )
                    ],
                ),
            ),
        )
    )
    kafka = _mallory(target)
    try:
        kafka.socket.settimeout(WAIT_S)
        response = kafka.call(key, version, request)
    except (ConnectionEnded, OSError):
        kafka.close()
        return "closed"
    _must_show_nothing(key, response)
    target.proven.append(kafka)
    return "answered"


def strange_names(rng: random.Random) -> Iterator[str]:
    good = rng.choice(sorted(TOPICS))
    yield from (good, "*", "good*", "?ood", "good\0", f"{good}\0x", "g\u043eod", "\uff47ood", f"{good}\u200b", " good")
    yield from ("GOOD", "good/../good", "..", ".", "", "\u202edoog", "g" * 249, "g" * 32767, f"{good},x", "good%00")
    yield "".join(chr(rng.choice((42, 46, 47, 0x41, 0xE9, 0x430, 0x1F600))) for _ in range(rng.randrange(1, 30)))


def _must_show_nothing(key: int, response) -> None:
    if key == METADATA and any(topic.error_code == 0 for topic in response.topics):
        raise Intruded(f"Metadata shows topics: {response.topics}")
    if key == PRODUCE:
        for topic in response.responses:
            if any(one.error_code == 0 for one in topic.partition_responses):
                raise Intruded(f"a record was taken: {response}")
    if key == FETCH:
        for topic in response.responses:
            if any(one.records for one in topic.partitions):
                raise Intruded(f"records were shown: {topic.topic}")


KINDS: dict[str, Callable[[Target, random.Random], str]] = {
    one.__name__.replace("_", "-"): one
    for one in (
        handshake_garbage,
        handshake_cut_short,
        plain_on_tls,
        tls_on_plain,
        wrong_certificate,
        wrong_name,
        key_updates,
        renegotiation,
        broken_token,
        giant_token,
        replayed_scram,
        alg_none,
        key_confusion,
        token_of_another_time,
        malformed_before,
        malformed_after,
        without_rights,
        named_oddly,
    )
}
