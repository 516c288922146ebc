import asyncio
import gc
import json
import time
import tracemalloc

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from mqd.security import oauth, scram
from mqd.security.exchange import AuthenticationFailed
from mqd.security.oauth import Issuer, OauthExchange
from mqd.security.plain import PlainExchange

VERIFIER = scram.make_verifier("SCRAM-SHA-512", "s3cret")


async def here(work):
    return work()


def plain(token: bytes) -> PlainExchange:
    server = PlainExchange(lambda user: ("SCRAM-SHA-512", VERIFIER) if user == "alice" else None, b"seed", here)
    assert asyncio.run(server.step(token)) == b""
    return server


@pytest.mark.parametrize("token", [b"\0alice\0s3cret", b"alice\0alice\0s3cret"])
def test_plain(token):
    server = plain(token)
    assert server.done and server.user == "alice"


@pytest.mark.parametrize(
    "token",
    [
        b"\0alice\0wrong",
        b"\0bob\0s3cret",
        b"bob\0alice\0s3cret",
        b"",
        b"\0\0",
        b"\0alice\0",
        b"\0alice",
        b"\0alice\0s3cret\0",
        b"\0\xff\0s3cret",
        b"\0alice\0" + b"a" * 5000,
    ],
)
def test_plain_refuses_invalid_messages(token):
    with pytest.raises(AuthenticationFailed):
        plain(token)


# -- OAUTHBEARER -----------------------------------------------------------------------------------

KEY = rsa.generate_private_key(65537, 2048)
OTHER = rsa.generate_private_key(65537, 2048)
CURVE = ec.generate_private_key(ec.SECP256R1())
OPTIONS = oauth.IssuerOptions("https://issuer.example/keys", "https://issuer.example", ("kafka",))


def jwk(key, key_id: str, kind=jwt.algorithms.RSAAlgorithm) -> dict:
    return {**json.loads(kind.to_jwk(key.public_key())), "kid": key_id, "use": "sig"}


def claims(**more) -> dict:
    now = time.time()
    found = {"sub": "alice", "iss": OPTIONS.issuer, "aud": "kafka", "iat": now, "exp": now + 300, **more}
    return {name: value for name, value in found.items() if value is not None}


def token(key=KEY, algorithm: str = "RS256", key_id: str | None = "one", **more) -> bytes:
    return jwt.encode(claims(**more), key, algorithm, {"kid": key_id} if key_id else None).encode()


def first(bearer: bytes, acts_as: bytes = b"") -> bytes:
    return b"n," + acts_as + b",\x01auth=Bearer " + bearer + b"\x01\x01"


def issuer(*keys: dict, options: oauth.IssuerOptions = OPTIONS) -> Issuer:
    found = keys or (jwk(KEY, "one"), jwk(CURVE, "curve", jwt.algorithms.ECAlgorithm))
    return Issuer(options, lambda url: {"keys": list(found)})


def outcome(message: bytes, by: Issuer | None = None) -> OauthExchange:
    server = OauthExchange(by or issuer(), here)
    response = asyncio.run(server.step(message))
    assert server.done == (response == b"")
    if not server.done:
        assert json.loads(response) == {"status": "invalid_token"}
        with pytest.raises(AuthenticationFailed) as failed:
            asyncio.run(server.step(b"\x01"))
        server.why = str(failed.value)
    return server


def test_a_token_of_the_issuer():
    server = outcome(first(token()))
    assert server.done and server.user == "alice"
    assert 300 <= server.expires_ms / 1000 - time.time() <= 331
    assert outcome(first(token(CURVE, "ES256", "curve"), b"a=alice")).done
    assert outcome(b"n,,\x01auth=Bearer " + token() + b"\x01traceId=1\x01\x01").done


@pytest.mark.parametrize("seconds", [60, 2**62, 10**400], ids=["soon", "64 bits", "more"])
@pytest.mark.parametrize("kind", [int, str])
def test_tokens_with_any_expiry(seconds: int, kind: type) -> None:
    """Claims are written by the issuer: some never expire, some are digits in quotes."""
    server = outcome(first(token(exp=kind(int(time.time()) + seconds))))
    assert server.done and server.expires_ms >= seconds * 1000


def test_a_refused_token_is_not_kept():
    """But its exchange is: the client that was refused may never send its final byte."""
    tracemalloc.start()
    try:
        refused = [outcome_of_garbage() for _ in range(4)]
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 100_000, refused
    finally:
        tracemalloc.stop()


def outcome_of_garbage() -> OauthExchange:
    server = OauthExchange(issuer(), here)
    asyncio.run(server.step(first(b"A" * 400_000)))
    return server


def unsigned(**header) -> bytes:
    return jwt.encode(claims(), None, "none", header)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bearer", "why"),
    [
        (lambda: token(OTHER), "refused"),
        (lambda: token(exp=time.time() - 100), "expired"),
        (lambda: token(exp=None), "exp"),
        (lambda: token(nbf=time.time() + 100), "not yet valid"),
        (lambda: token(iat=time.time() + 100), "not yet valid"),
        (lambda: token(aud="other"), "[Aa]udience"),
        (lambda: token(aud=None), "aud"),
        (lambda: token(iss="https://evil.example"), "[Ii]ssuer"),
        (lambda: token(iss=None), "iss"),
        (lambda: token(sub=None), "sub"),
        (lambda: token(sub=""), "names no user"),
        (lambda: token(sub="\ud800"), "names no user"),
        (lambda: token(sub="alice\nbob"), "names no user: .* unprintable"),
        (lambda: token(sub="*"), "names no user"),
        (lambda: token(sub="\u00e4" * 128), "names no user: .* at most 255 bytes"),
        (lambda: token(key_id="unknown"), "which https://issuer.example/keys does not have"),
        (lambda: token(key_id=None), "does not have"),
        (lambda: unsigned(kid="one").encode(), "signed with 'none'"),
        (
            lambda: jwt.encode(claims(), "a secret of 32 bytes or more, at least", "HS256", {"kid": "one"}).encode(),
            "HS256",
        ),
        (lambda: token(CURVE, "ES256", "one"), "refused"),
        (lambda: b"a.b.c", "refused"),
        (lambda: b"x" * 1000, "refused"),
    ],
)
def test_a_token_is_refused(bearer, why):
    server = outcome(first(bearer()))
    assert not server.done
    assert __import__("re").search(why, server.why), server.why


def test_a_token_signed_with_the_published_key_as_a_secret():
    """Key confusion: the public key is not a secret."""
    import hashlib
    import hmac

    from jwt.utils import base64url_encode

    public = json.dumps(jwk(KEY, "one")).encode()
    head = base64url_encode(b'{"alg":"HS256","kid":"one"}') + b"." + base64url_encode(json.dumps(claims()).encode())
    forged = head + b"." + base64url_encode(hmac.new(public, head, hashlib.sha256).digest())
    assert not outcome(first(forged)).done


def test_a_client_cannot_act_as_another_user():
    assert outcome(first(token(), b"a=bob")).why == "a client cannot act as another user"


@pytest.mark.parametrize("message", [b"", b"\x01", b"n,,", b"n,,\x01auth=Basic abc\x01\x01", first(b"a b"), first(b"")])
def test_a_malformed_message(message):
    with pytest.raises(AuthenticationFailed):
        asyncio.run(OauthExchange(issuer(), here).step(message))


def test_keys_are_read_again_for_an_unknown_key_but_not_for_each(monkeypatch):
    published, reads, now = [jwk(KEY, "one")], [], [1000.0]
    monkeypatch.setattr(oauth.time, "monotonic", lambda: now[0])
    by = Issuer(OPTIONS, lambda url: reads.append(url) or {"keys": list(published)})
    assert by.check(token()).user == "alice"
    published.append(jwk(OTHER, "two"))
    for _ in range(10):
        with pytest.raises(AuthenticationFailed):
            by.check(token(OTHER, key_id="two"))
    assert len(reads) == 1
    now[0] += oauth.UNKNOWN_KEY_PAUSE_S + 1
    assert by.check(token(OTHER, key_id="two")).user == "alice"
    assert len(reads) == 2


def test_an_issuer_that_is_down(monkeypatch):
    now, down = [1000.0], [True]
    monkeypatch.setattr(oauth.time, "monotonic", lambda: now[0])

    def read(url: str) -> dict:
        if down[0]:
            raise OSError("connection refused")
        return {"keys": [jwk(KEY, "one")]}

    by = Issuer(OPTIONS, read)
    with pytest.raises(AuthenticationFailed, match="keys cannot be read"):
        by.check(token())
    down[0], now[0] = False, now[0] + 20
    assert by.check(token()).user == "alice"
    down[0], now[0] = True, now[0] + 10_000
    assert by.check(token()).user == "alice", "the keys read before still hold"


def test_a_key_set_is_read_from_a_file_and_bounded(tmp_path):
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": [jwk(KEY, "one")]}))
    assert Issuer(OPTIONS, lambda url: oauth.read_keys(file.as_uri())).check(token()).user == "alice"
    file.write_text("[]")
    with pytest.raises(ValueError, match="no key set"):
        oauth.read_keys(file.as_uri())
    file.write_bytes(b" " * (oauth.KEYS_BYTES_MAX + 1))
    with pytest.raises(ValueError, match="more than"):
        oauth.read_keys(file.as_uri())
