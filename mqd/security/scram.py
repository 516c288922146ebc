"""SCRAM-SHA-256 and SCRAM-SHA-512, the server's side (RFC 5802, RFC 7677), as in Kafka: names
and passwords are UTF-8 without SASLprep, there is no channel binding, and `tokenauth=true` in the
first message marks the user as a delegation token. Clients that cannot send this (librdkafka) may
also use a token: a name that is not a user's is looked up among the tokens.

A server stores a verifier instead of the password; neither the password nor a client's proof can be
computed from it. An unknown user gets a salt that looks like any other, and fails at the same step
as a wrong password: clients cannot find out which users exist.
"""

import base64
import binascii
import hashlib
import hmac
import math
import re
import secrets
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from mqd.security.exchange import PASSWORD_TOKEN_BYTES_MAX, AuthenticationFailed

MECHANISMS = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
MECHANISM_NUMBERS = {"SCRAM-SHA-256": 1, "SCRAM-SHA-512": 2}  # in Kafka's requests and in our metadata
ITERATIONS_MIN, ITERATIONS_MAX = 4096, 16384  # Kafka's
SALT_BYTES = 24
DECOY_SECRET_PROPERTY = "sasl.scram.decoy.secret"  # its value: the cluster's secret for the salts of unknown users
_NAME = r"(?:[^\x00=,]|=2C|=3D)+"
_CLIENT_FIRST = re.compile(
    rf"(?P<header>(?P<binding>[ny]),(?:a=(?P<authzid>{_NAME}))?,)"
    rf"(?P<bare>n=(?P<user>{_NAME}),r=(?P<nonce>[\x21-\x2b\x2d-\x7e]+)(?P<extensions>(?:,[A-Za-z]+=[^\x00,]+)*))"
)
_CLIENT_FINAL = re.compile(
    r"(?P<without_proof>c=(?P<binding>[A-Za-z0-9+/]+=*),r=(?P<nonce>[\x21-\x2b\x2d-\x7e]+)(?:,[A-Za-z]+=[^\x00,]+)*)"
    r",p=(?P<proof>[A-Za-z0-9+/]+=*)"
)


class Verifier(msgspec.Struct, frozen=True):
    """The server's verifier of one user's password for one mechanism."""

    salt: bytes
    iterations: int
    stored_key: bytes
    server_key: bytes


# (user, whether the user is a delegation token) -> verifier; None: there is no such user
Lookup = Callable[[str, bool], Verifier | None]
# the number of users by the parameters of their credentials
ParameterCounts = Callable[[], Mapping["CredentialParameters", int]]


def salted_password(mechanism: str, password: bytes, salt: bytes, iterations: int) -> bytes:
    """Takes 1 ms for 4,096 iterations."""
    return hashlib.pbkdf2_hmac(MECHANISMS[mechanism], password, salt, iterations)


def verifier_of(mechanism: str, salted: bytes, salt: bytes, iterations: int) -> Verifier:
    """`salted`: the salted password, which kafka-configs sends instead of the password."""
    name = MECHANISMS[mechanism]
    client_key = hmac.digest(salted, b"Client Key", name)
    return Verifier(salt, iterations, hashlib.new(name, client_key).digest(), hmac.digest(salted, b"Server Key", name))


def make_verifier(mechanism: str, password: str, iterations: int = ITERATIONS_MIN) -> Verifier:
    salt = secrets.token_bytes(SALT_BYTES)
    return verifier_of(mechanism, salted_password(mechanism, password.encode(), salt, iterations), salt, iterations)


def new_decoy_secret() -> str:
    return secrets.token_urlsafe(32)


def matches_password(mechanism: str, verifier: Verifier, password: bytes) -> bool:
    salted = salted_password(mechanism, password, verifier.salt, verifier.iterations)
    candidate = verifier_of(mechanism, salted, verifier.salt, verifier.iterations)
    return hmac.compare_digest(candidate.stored_key, verifier.stored_key)


def _pseudorandom(mechanism: str, seed: bytes, user: str) -> bytes:
    return hmac.digest(seed, f"{mechanism} {user}".encode(), "sha256")


def token_verifier(mechanism: str, seed: bytes, token_id: str, password: str) -> Verifier:
    """The verifier of a delegation token, with the salt that a decoy for its id would have."""
    salt = _pseudorandom(mechanism, seed, token_id)[:SALT_BYTES]
    salted = salted_password(mechanism, password.encode(), salt, ITERATIONS_MIN)
    return verifier_of(mechanism, salted, salt, ITERATIONS_MIN)


class CredentialParameters(NamedTuple):
    """The parts of a credential that clients see before they authenticate."""

    mechanism: str
    salt_bytes: int  # or JAVA_SALT, for a salt as Java clients generate it
    iterations: int


JAVA_SALT = 0
_JAVA_BITS = 130  # Java writes this many random bits in base 36, as text
_JAVA_DIGITS = b"0123456789abcdefghijklmnopqrstuvwxyz"


def parameters_of(mechanism: str, salt: bytes, iterations: int) -> CredentialParameters:
    is_java = 20 <= len(salt) <= 26 and not set(salt) - set(_JAVA_DIGITS)
    return CredentialParameters(mechanism, JAVA_SALT if is_java else len(salt), iterations)


def usual_parameters(mechanism: str) -> dict[CredentialParameters, int]:
    """The parameters of the users that `mqd user` creates: ITERATIONS_MIN for generated passwords,
    ITERATIONS_MAX for typed ones.
    """
    return {
        CredentialParameters(mechanism, SALT_BYTES, iterations): 1 for iterations in (ITERATIONS_MIN, ITERATIONS_MAX)
    }


def make_decoy(
    mechanism: str,
    seed: bytes,
    user: str,
    is_token: bool = False,
    parameter_counts: Mapping[CredentialParameters, int] | None = None,
) -> Verifier:
    """A decoy verifier for a user that does not exist. No password matches it; its salt and
    iterations are the same at each attempt.

    `parameter_counts`: the number of users by parameters. The decoy's parameters are drawn with
    these weights (weighted rendezvous hashing), so that they do not reveal whether the user exists;
    when the numbers change, few decoys get other parameters.
    """
    random_bytes = _pseudorandom(mechanism, seed, user)
    if is_token:
        parameters = CredentialParameters(mechanism, SALT_BYTES, ITERATIONS_MIN)
    else:
        parameters = _draw_parameters(random_bytes, parameter_counts or usual_parameters(mechanism))
    size_bytes = hashlib.new(MECHANISMS[mechanism]).digest_size
    return Verifier(
        _salt(random_bytes, parameters.salt_bytes),
        parameters.iterations,
        secrets.token_bytes(size_bytes),
        secrets.token_bytes(size_bytes),
    )


def decoy_for_plain(
    seed: bytes, user: str, parameter_counts: Mapping[CredentialParameters, int]
) -> tuple[str, Verifier]:
    """Like make_decoy(), for PLAIN, where the client does not choose the verifier's mechanism."""
    parameters = _draw_parameters(
        _pseudorandom("PLAIN", seed, user), parameter_counts or usual_parameters("SCRAM-SHA-256")
    )
    return parameters.mechanism, make_decoy(parameters.mechanism, seed, user, parameter_counts={parameters: 1})


def _draw_parameters(random_bytes: bytes, parameter_counts: Mapping[CredentialParameters, int]) -> CredentialParameters:
    def score(parameters: CredentialParameters) -> float:
        draw = hmac.digest(random_bytes, repr(parameters).encode(), "sha256")
        return parameter_counts[parameters] / -math.log((int.from_bytes(draw[:8], "big") + 1) / (2**64 + 1))

    return max(parameter_counts, key=score)


def _salt(random_bytes: bytes, size_bytes: int) -> bytes:
    if size_bytes == JAVA_SALT:
        number = int.from_bytes(random_bytes, "big") >> (8 * len(random_bytes) - _JAVA_BITS)
        digits = bytearray()
        while number:
            number, digit = divmod(number, 36)
            digits.append(_JAVA_DIGITS[digit])
        return bytes(reversed(digits))
    return (random_bytes + hashlib.shake_256(random_bytes).digest(max(0, size_bytes - len(random_bytes))))[:size_bytes]


class ScramExchange:
    """One authentication: step() is called with the client's first message, then with its final
    message.

    `seed`: a secret of the cluster, for the salts of unknown users.
    """

    def __init__(
        self,
        mechanism: str,
        lookup: Lookup,
        seed: bytes,
        nonce: str | None = None,
        parameter_counts: ParameterCounts = dict,
    ) -> None:
        self._mechanism, self._lookup, self._seed, self._parameter_counts = mechanism, lookup, seed, parameter_counts
        self._hash_name = MECHANISMS[mechanism]
        self._nonce = nonce or secrets.token_urlsafe(24)
        self._first: re.Match[str] | None = None
        self._server_first = ""
        self._verifier: Verifier | None = None
        self._user_exists = False
        self.user = ""  # as the client claims; proven only once `done` is true
        self.is_token = False
        self.done = False

    async def step(self, token: bytes) -> bytes:
        """The server's response. Raises AuthenticationFailed."""
        if self.done:
            raise AuthenticationFailed("the exchange has already ended")
        if len(token) > PASSWORD_TOKEN_BYTES_MAX:
            raise AuthenticationFailed(f"a message of more than {PASSWORD_TOKEN_BYTES_MAX} bytes")
        try:
            text = token.decode()
        except UnicodeDecodeError:
            raise AuthenticationFailed("a message is not UTF-8") from None
        return self._on_first(text) if self._first is None else self._on_final(self._first, text)

    def _on_first(self, text: str) -> bytes:
        first = self._first = _CLIENT_FIRST.fullmatch(text)
        if first is None:
            raise AuthenticationFailed("the first message is malformed, or requests channel binding")
        self.user = first["user"].replace("=2C", ",").replace("=3D", "=")
        if first["authzid"] not in (None, first["user"]):
            raise AuthenticationFailed("a client cannot act as another user")
        self.is_token = ",tokenauth=true" in first["extensions"].lower()
        verifier = self._lookup(self.user, self.is_token)
        if verifier is None and not self.is_token:
            verifier = self._lookup(self.user, True)
            self.is_token = verifier is not None
        self._user_exists = verifier is not None
        if verifier is None:
            verifier = make_decoy(self._mechanism, self._seed, self.user, self.is_token, self._parameter_counts())
        self._verifier = verifier
        self._nonce = first["nonce"] + self._nonce
        salt = base64.b64encode(verifier.salt).decode()
        self._server_first = f"r={self._nonce},s={salt},i={verifier.iterations}"
        return self._server_first.encode()

    def _on_final(self, first: re.Match[str], text: str) -> bytes:
        final = _CLIENT_FINAL.fullmatch(text)
        if final is None:
            raise AuthenticationFailed("the final message is malformed")
        if not hmac.compare_digest(final["nonce"], self._nonce):
            if final["nonce"] == first["nonce"] + self._nonce:  # CVE-2024-56128: must not be accepted
                raise AuthenticationFailed(
                    "the client repeats its nonce, as librdkafka before 2.6.1 does (kcat in Debian 12); upgrade it"
                )
            raise AuthenticationFailed("the final message belongs to another exchange")
        if _decode(final["binding"]) != first["header"].encode():
            raise AuthenticationFailed("the final message has a different channel binding")
        verifier = self._verifier
        assert verifier is not None
        signed = f"{first['bare']},{self._server_first},{final['without_proof']}".encode()
        signature = hmac.digest(verifier.stored_key, signed, self._hash_name)
        proof = _decode(final["proof"])
        has_right_size = len(proof) == len(signature)
        client_key = bytes(a ^ b for a, b in zip(proof if has_right_size else signature, signature, strict=True))
        stored_key = hashlib.new(self._hash_name, client_key).digest()
        if not (hmac.compare_digest(stored_key, verifier.stored_key) and has_right_size and self._user_exists):
            raise AuthenticationFailed("wrong user or password", user=self.user)
        self.done = True
        return b"v=" + base64.b64encode(hmac.digest(verifier.server_key, signed, self._hash_name))


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        raise AuthenticationFailed("a message is not base64 where it must be") from None
