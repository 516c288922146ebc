"""`python -m tests.attack.fuzz_sasl`: mutated tokens of every mechanism against the acceptor's side
of SASL, guided by line coverage. A model decides what may be accepted: only the messages of the
test's own client. Part of `make fuzz`.

Each input is a mechanism and a list of tokens. Inputs that reach a line, or a transition between
lines, for the first time are kept and mutated further.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import hmac
import json
import random
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa

from mqd.acceptor import authentication
from mqd.acceptor.authentication import Authentication, IllegalState, ListenerOptions, Refused
from mqd.cluster.metadata.records import DelegationToken
from mqd.security import oauth, scram
from mqd.security.scram import Verifier

TOKEN_BYTES_MAX = 512 << 10
KEPT_MAX = 2000
CONNECTION = (1, 64)
PASSWORD, NONCE = "alice's s3cret", "c2VydmVyIG5vbmNl"
FOLDERS = (str(Path(scram.__file__).parent), authentication.__file__)
Input = tuple[str, tuple[bytes, ...]]  # mechanism, tokens


class World:
    """One user, one issuer, and a server whose nonces are known, so that a valid response can be a
    seed.
    """

    def __init__(self) -> None:
        key = rsa.generate_private_key(65537, 2048)
        published = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key()))
        options = oauth.IssuerOptions("https://issuer.example/keys", "https://issuer.example", ("kafka",))
        issuer = oauth.Issuer(options, lambda _url: {"keys": [{**published, "kid": "one", "use": "sig"}]})
        claims = {"sub": "alice", "iss": options.issuer, "aud": "kafka", "exp": int(time.time()) + 86400}
        self._bearer = jwt.encode(claims, key, "RS256", {"kid": "one"}).encode()
        self.verifiers = {name: scram.make_verifier(name, PASSWORD) for name in scram.MECHANISMS}
        mechanisms = (*scram.MECHANISMS, "PLAIN", "OAUTHBEARER")
        self.service = Authentication(
            [ListenerOptions(mechanisms, TOKEN_BYTES_MAX, 0, issuer)], self, b"seed of unknown users", 0
        )

    # -- Users -------------------------------------------------------------------------------------

    def verifier(self, user: str, mechanism: str) -> Verifier | None:
        return self.verifiers[mechanism] if user == "alice" else None

    def parameter_counts(self, _mechanism: str | None) -> dict:
        return {}

    def token_verifier(self, _token_id: str, _mechanism: str, _seed: bytes) -> Verifier | None:
        return None

    def token(self, _token_id: str) -> DelegationToken | None:
        return None

    def decoy_secret(self) -> str:
        return "a secret of the cluster"

    # -- the model ---------------------------------------------------------------------------------

    def final(self, mechanism: str, first: str, nonce: str, extensions: str = "") -> tuple[str, bytes]:
        """The only final message that alice's client may send after this first one: without its
        proof, and the proof.
        """
        name, verifier = scram.MECHANISMS[mechanism], self.verifiers[mechanism]
        header, bare = re.match(r"(.*?,.*?,)(.*)", first, re.DOTALL).groups()  # type: ignore[union-attr]
        salt = base64.b64encode(verifier.salt).decode()
        server_first = f"r={nonce},s={salt},i={verifier.iterations}"
        without = f"c={base64.b64encode(header.encode()).decode()},r={nonce}{extensions}"
        salted = hashlib.pbkdf2_hmac(name, PASSWORD.encode(), verifier.salt, verifier.iterations)
        client_key = hmac.digest(salted, b"Client Key", name)
        signature = hmac.digest(
            hashlib.new(name, client_key).digest(), f"{bare},{server_first},{without}".encode(), name
        )
        return without, bytes(a ^ b for a, b in zip(client_key, signature, strict=True))

    def seeds(self) -> Iterator[Input]:
        for mechanism in scram.MECHANISMS:
            for first in (
                "n,,n=alice,r=abc",
                "y,a=alice,n=alice,r=xyz",
                "n,,n=alice,r=abc,tokenauth=true",
                "n,,n=bob,r=q",
            ):
                nonce = first.partition("r=")[2].partition(",")[0] + NONCE
                for extensions in ("", ",x=y"):
                    without, proof = self.final(mechanism, first, nonce, extensions)
                    yield mechanism, (first.encode(), f"{without},p={base64.b64encode(proof).decode()}".encode())
        yield "PLAIN", (b"\0alice\0" + PASSWORD.encode(),)
        yield "PLAIN", (b"alice\0alice\0" + PASSWORD.encode(),)
        yield "PLAIN", (b"\0bob\0x",)
        yield "OAUTHBEARER", (b"n,,\x01auth=Bearer " + self._bearer + b"\x01\x01",)
        yield "OAUTHBEARER", (b"n,a=alice,\x01auth=Bearer " + self._bearer + b"\x01traceId=1\x01\x01", b"\x01")

    def may_be_accepted(self, mechanism: str, tokens: tuple[bytes, ...]) -> bool:
        last = tokens[-1]
        if mechanism == "PLAIN":
            return last in (b"\0alice\0" + PASSWORD.encode(), b"alice\0alice\0" + PASSWORD.encode())
        if mechanism == "OAUTHBEARER":
            return b"Bearer" in last.title() and self._bearer in last and last.startswith(b"n,")
        first, final = tokens[-2].decode(errors="replace"), last.decode(errors="replace")
        of_alice = re.fullmatch(r"[ny],(?:a=alice)?,n=alice,r=([^,]+)(?:,[A-Za-z]+=[^\0,]+)*", first)
        parts = re.fullmatch(r"(c=[^,]+,r=[^,]+((?:,[A-Za-z]+=[^\0,]+)*)),p=([^,]+)", final)
        if of_alice is None or parts is None or max(map(len, tokens)) > 4096 or "tokenauth=true" in first.lower():
            return False
        without, proof = self.final(mechanism, first, of_alice[1] + NONCE, parts[2])
        return parts[1] == without and base64.b64decode(parts[3]) == proof


class Coverage:
    """Pairs of consecutive lines in the modules under test."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, int, int]] = set()
        self._new, self._before = False, 0

    def run(self, work) -> bool:
        """Whether `work` covered anything new."""
        self._new, self._before = False, 0
        sys.settrace(self._call)
        try:
            work()
        finally:
            sys.settrace(None)
        return self._new

    def _call(self, frame, _event, _argument):
        return self._line if frame.f_code.co_filename.startswith(FOLDERS) else None

    def _line(self, frame, event, _argument):
        if event == "line":
            reached = (id(frame.f_code), self._before, frame.f_lineno)
            self._before = frame.f_lineno
            if reached not in self.seen:
                self.seen.add(reached)
                self._new = True
        return self._line


WORDS = (
    *(b"n,,", b"y,,", b"p=tls-unique,,", b"a=alice,", b"n=", b"r=", b"c=biws", b"p=", b"=2C", b"=3D", b"\0", b"\x01"),
    *(b"tokenauth=true", b"alice", b"\xff\xfe", b"\xe2\x80\x8b", b"auth=Bearer ", b".", b"==", b"A" * 5000, b",m=x"),
    *(b"eyJhbGciOiJub25lIn0", b"eyJhbGciOiJIUzI1NiIsImtpZCI6Im9uZSJ9", b"W10", b"MQ", b"bnVsbA", b"e30"),
)


def mutated(rng: random.Random, one: Input, other: Input) -> Input:
    mechanism, tokens = one[0], list(one[1])
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(tokens))
        token = bytearray(tokens[at])
        where = rng.randrange(len(token) + 1)
        match rng.randrange(9):
            case 0 if token:
                token[where - 1] ^= 1 << rng.randrange(8)
            case 1:
                del token[where : where + rng.randrange(1, 9)]
            case 2:
                token[where:where] = rng.choice(WORDS)
            case 3:
                token[where:where] = token[where : where + rng.randrange(1, 40)]
            case 4:
                token[where : where + 1] = rng.randbytes(1)
            case 5:
                token[where:] = rng.choice(other[1])[rng.randrange(len(other[1][0]) + 1) :]
            case 6:
                tokens.insert(at, rng.choice(other[1]))
                tokens = tokens[:4]
                continue
            case 7:
                mechanism = other[0]
                continue
            case _:
                token += rng.choice((b"x", b"=", b"A")) * rng.choice((1, 64, 4096, TOKEN_BYTES_MAX))
        tokens[at] = bytes(token[: TOKEN_BYTES_MAX + 1])
    return mechanism, tuple(tokens)


def play(world: World, one: Input) -> None:
    """Raises AssertionError where something was accepted that must not be."""
    mechanism, tokens = one
    world.service.begin(CONNECTION, 0, mechanism)
    for number, token in enumerate(tokens):
        step = world.service.step(CONNECTION, 0, "127.0.0.1", "", token)
        try:
            response = asyncio.run(step) if mechanism in ("PLAIN", "OAUTHBEARER") else _at_once(step)
        except (IllegalState, Refused):
            return
        if response.principal:
            assert response.principal == "User:alice", response
            assert world.may_be_accepted(mechanism, tokens[: number + 1]), f"{mechanism} {tokens} was accepted"
            return


def _at_once(step):
    """The result of a coroutine that never waits."""
    try:
        step.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("an exchange of SCRAM waits")


def _silent(*_words: object, **_fields: object) -> None:
    pass


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=120)
    arguments = parser.parse_args(words)
    authentication.log = SimpleNamespace(info=_silent, warning=_silent)  # type: ignore[assignment]
    rng, world, coverage = random.Random(arguments.seed), World(), Coverage()
    scram.secrets.token_urlsafe = lambda _bytes=None: NONCE  # type: ignore[assignment]
    kept = list(world.seeds())
    for one in kept:
        coverage.run(lambda one=one: play(world, one))
    assert world.service.succeeded_count == 2 * 2 * 2 + 2 + 2, "the seeds that are right are accepted"
    count, end = len(kept), time.monotonic() + arguments.seconds
    while time.monotonic() < end:
        one = mutated(rng, rng.choice(kept), rng.choice(kept))
        count += 1
        try:
            is_new = coverage.run(lambda one=one: play(world, one))
        except BaseException:
            print(f"seed {arguments.seed}, input {count}: {one}")
            raise
        if is_new and len(kept) < KEPT_MAX:
            kept.append(one)
    world.service.close()
    print(
        f"fuzz_sasl: seed {arguments.seed}, {count} exchanges, {len(kept)} kept, {len(coverage.seen)} steps between"
        f" lines, {world.service.succeeded_count} accepted, {world.service.failed_count} refused: no finding"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
