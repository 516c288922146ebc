"""SASL OAUTHBEARER (RFC 7628): a signed token (JWT) from an issuer that the operator trusts. PyJWT
checks the signature; issuer, audience, expiry and user are required.
"""

import json
import re
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from mqd.security import principal
from mqd.security.exchange import AuthenticationFailed

# only asymmetric algorithms: with HMAC, the key that checks signatures could also sign
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
KEYS_BYTES_MAX = 1 << 20
FETCH_TIMEOUT_S = 10.0
REASON_CHARS_MAX = 200  # PyJWT's messages may quote the token
UNKNOWN_KEY_PAUSE_S = 10.0  # tokens with unknown key ids cause a reload of the issuer's keys at most this often
_FIRST_MESSAGE = re.compile(
    rb"n,(?:a=(?P<authzid>[^\x00,\x01]+))?,\x01auth=[Bb]earer +(?P<token>[A-Za-z0-9._~+/=-]+)\x01"
    rb"(?:[A-Za-z]+=[^\x00\x01]*\x01)*\x01"
)
_REFUSAL = json.dumps({"status": "invalid_token"}).encode()
# runs slow work in a thread, outside the event loop
RunInThread = Callable[[Callable[[], "Claims"]], Awaitable["Claims"]]


class IssuerOptions(msgspec.Struct, frozen=True):
    url: str  # of the issuer's keys (JWKS): https: or file:
    issuer: str
    audiences: tuple[str, ...]
    user_claim: str = "sub"
    skew_s: int = 30
    refresh_s: float = 3600.0


class Claims(msgspec.Struct, frozen=True):
    user: str
    expires_ms: int  # wall clock


def read_keys(url: str) -> dict[str, Any]:
    """The issuer's key set. Raises OSError, ValueError."""
    from urllib.request import urlopen  # an acceptor without OAUTHBEARER needs no HTTP client

    with urlopen(url, timeout=FETCH_TIMEOUT_S) as response:
        content = response.read(KEYS_BYTES_MAX + 1)
    if len(content) > KEYS_BYTES_MAX:
        raise ValueError(f"{url} has more than {KEYS_BYTES_MAX} bytes")
    keys = json.loads(content)
    if not isinstance(keys, dict) or not isinstance(keys.get("keys"), list):
        raise ValueError(f"{url} has no key set (JWKS)")
    return keys


class Issuer:
    """Checks the tokens of one issuer; caches its keys. Any thread may call it."""

    def __init__(self, options: IssuerOptions, read: Callable[[str], Mapping[str, Any]] = read_keys) -> None:
        self.options = options
        self._read = read
        self._lock = threading.Lock()
        self._keys: dict[str, Any] = {}  # key id -> key
        self._last_read_s = -1e9  # time.monotonic() of the last attempt

    def check(self, token: bytes) -> Claims:
        """Checks a token and returns its claims. Raises AuthenticationFailed."""
        import jwt

        options = self.options
        try:
            header = jwt.get_unverified_header(token)
            if header.get("alg") not in ALGORITHMS:
                raise AuthenticationFailed(
                    f"a token is signed with {str(header.get('alg'))[:40]!r}, which is not accepted"
                )
            key = self._current_key(str(header.get("kid", "")))
            claims = jwt.decode(
                token,
                key,
                algorithms=[header["alg"]],
                audience=list(options.audiences),
                issuer=options.issuer,
                leeway=options.skew_s,
                options={"require": ["exp", "iss", "aud", options.user_claim]},
            )
        except (jwt.PyJWTError, TypeError, ValueError, OverflowError) as error:
            raise AuthenticationFailed(f"a token is refused: {str(error)[:REASON_CHARS_MAX]}") from None
        user = claims[options.user_claim]
        try:
            if not isinstance(user, str):
                raise ValueError("it is not a string")
            principal.user(user)  # checks the name: many issuers let users choose their own
        except ValueError as error:
            raise AuthenticationFailed(f"a token's claim {options.user_claim} names no user: {error}") from None
        return Claims(user, (int(claims["exp"]) + options.skew_s) * 1000)  # PyJWT also accepts a string of digits

    def _current_key(self, key_id: str) -> Any:
        """The issuer's key with this id; without an id, the issuer's only key."""
        with self._lock:
            age_s = time.monotonic() - self._last_read_s
            if age_s > self.options.refresh_s or (self._find_key(key_id) is None and age_s > UNKNOWN_KEY_PAUSE_S):
                self._refresh()
            key = self._find_key(key_id)
        if key is None:
            raise AuthenticationFailed(f"a token names key {key_id[:80]!r}, which {self.options.url} does not have")
        return key

    def _find_key(self, key_id: str) -> Any:
        if not key_id and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        return self._keys.get(key_id)

    def _refresh(self) -> None:
        import jwt

        self._last_read_s = time.monotonic()
        try:
            key_set = jwt.PyJWKSet.from_dict(dict(self._read(self.options.url)))
        except (OSError, ValueError, jwt.PyJWTError) as error:
            if not self._keys:
                raise AuthenticationFailed(
                    f"the issuer's keys cannot be read from {self.options.url}: {error}"
                ) from None
            return  # the previously read keys are still valid
        self._keys = {key.key_id or "": key for key in key_set.keys if key.public_key_use in (None, "sig")}


class OauthExchange:
    """The broker's side of one authentication. A refused token gets the error response of RFC 7628;
    the client replies with one byte, and the exchange then fails.
    """

    def __init__(self, issuer: Issuer, run_in_thread: RunInThread) -> None:
        self._issuer, self._run_in_thread = issuer, run_in_thread
        self._failure: tuple[str, str] | None = None  # not the exception: its traceback would keep the token in memory
        self.user = ""
        self.expires_ms = 0
        self.done = False

    async def step(self, token: bytes) -> bytes:
        if self._failure is not None:
            reason, user = self._failure
            raise AuthenticationFailed(reason, user)
        if self.done:
            raise AuthenticationFailed("the exchange has already ended")
        first = _FIRST_MESSAGE.fullmatch(token)
        if first is None:
            raise AuthenticationFailed("the message is not an OAUTHBEARER message")
        try:
            bearer = first["token"]
            claims = await self._run_in_thread(lambda: self._issuer.check(bearer))
            if first["authzid"] not in (None, claims.user.encode()):
                raise AuthenticationFailed("a client cannot act as another user", user=claims.user)
        except AuthenticationFailed as error:
            self._failure = str(error), error.user
            return _REFUSAL
        self.user, self.expires_ms, self.done = claims.user, claims.expires_ms, True
        return b""
