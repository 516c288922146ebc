"""Authentication of clients by SASL: which mechanisms a listener has, the exchanges under way, and
how long the response to a failure is delayed.

An exchange is kept here between the requests of its connection. It is lost with this process: the
client's next token is then refused, and it connects again. Passwords and tokens are checked in
a few threads, so a flood of checks delays only other authentications.

Bounds: at most EXCHANGES_MAX exchanges (the oldest is dropped first) and WAITING_MAX checks;
failures are remembered for at most FAILURES_MAX pairs of address and user. Concurrency: the event
loop's thread.
"""

import asyncio
import hmac
import os
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from mqd.acceptor.metadata import Metadata
from mqd.acceptor.tokens import Tokens
from mqd.base import clock, cluster_config, listeners, logging
from mqd.cluster.metadata.records import DelegationToken
from mqd.security import oauth, scram
from mqd.security.exchange import AuthenticationFailed, Exchange
from mqd.security.oauth import Issuer, OauthExchange
from mqd.security.plain import PlainExchange
from mqd.security.scram import CredentialParameters, ScramExchange, Verifier

EXCHANGES_MAX = 4096
EXCHANGE_S_MAX = 60.0
WAITING_MAX = 1024  # checks that wait for a thread: together a few seconds of CPU time
WAITING_BYTES_MAX = 32 << 20  # total size of the tokens of these checks
THREADS = 2
FAILURES_MAX = 4096
FAILURE_DELAY_S_MAX = 5.0
FAILURE_MEMORY_S = 60.0
LIFETIME_MS_MAX = 2**63 - 1

T = TypeVar("T")
ConnectionKey = tuple[int, int]  # (generation of the worker's process, connection id)
log = logging.get("acceptor.authentication")


class Users(Protocol):
    """The part of the metadata that holds users and their delegation tokens."""

    def verifier(self, user: str, mechanism: str) -> Verifier | None: ...

    def decoy_secret(self) -> str:
        """The cluster's secret, from which the salts of unknown users are derived; "" before there is
        one.
        """
        ...

    def parameter_counts(self, mechanism: str | None) -> Mapping[CredentialParameters, int]:
        """Returns how many users have credentials with each set of parameters. Mechanism None: PLAIN."""
        ...

    def token(self, token_id: str) -> DelegationToken | None:
        """Returns the token, or None if there is no such token or it has expired."""
        ...

    def token_verifier(self, token_id: str, mechanism: str, seed: bytes) -> Verifier | None: ...


class NoUsers:
    def verifier(self, user: str, mechanism: str) -> Verifier | None:
        return None

    def decoy_secret(self) -> str:
        return ""

    def parameter_counts(self, mechanism: str | None) -> Mapping[CredentialParameters, int]:
        return {}

    def token(self, token_id: str) -> DelegationToken | None:
        return None

    def token_verifier(self, token_id: str, mechanism: str, seed: bytes) -> Verifier | None:
        return None


class MetadataUsers:
    """The users whose credentials are in the cluster's metadata."""

    def __init__(self, metadata: Metadata, tokens: Tokens) -> None:
        self._metadata = metadata
        self._parameter_counts: dict[str | None, Counter[CredentialParameters]] = {}
        self._counts_version = -1
        self.token, self.token_verifier = tokens.valid_token, tokens.verifier

    def verifier(self, user: str, mechanism: str) -> Verifier | None:
        credential = self._metadata.scram_credentials.get((user, scram.MECHANISM_NUMBERS[mechanism]))
        if credential is None:
            return None
        return Verifier(credential.salt, credential.iterations, credential.stored_key, credential.server_key)

    def decoy_secret(self) -> str:
        return self._metadata.broker_config.get(scram.DECOY_SECRET_PROPERTY, "")

    def parameter_counts(self, mechanism: str | None) -> Mapping[CredentialParameters, int]:
        """Computed on first use after each change of users."""
        if self._counts_version != self._metadata.scram_version or not self._parameter_counts:
            self._counts_version, self._parameter_counts = self._metadata.scram_version, self._count_parameters()
        return self._parameter_counts[mechanism]

    def _count_parameters(self) -> dict[str | None, Counter[CredentialParameters]]:
        counts: dict[str | None, Counter[CredentialParameters]] = {
            name: Counter() for name in (None, *scram.MECHANISMS)
        }
        credentials = self._metadata.scram_credentials
        first = next(iter(scram.MECHANISM_NUMBERS.values()))
        for name, number in scram.MECHANISM_NUMBERS.items():
            for (user, mechanism), credential in credentials.items():
                if mechanism == number:
                    parameters = scram.parameters_of(name, credential.salt, credential.iterations)
                    counts[name][parameters] += 1
                    # PLAIN checks only the first of a user's mechanisms (_first_verifier)
                    counts[None][parameters] += number == first or (user, first) not in credentials
        counts[None] = +counts[None]  # drops zero counts
        return counts


def load_seed(file: Path) -> bytes:
    """Returns the secret in the file. Creates the file if it does not exist. Raises OSError."""
    if not file.exists():
        new_file = file.with_suffix(".new")
        fd = os.open(new_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as output:
            output.write(secrets.token_bytes(32))
        new_file.replace(file)
    return file.read_bytes()


class IllegalState(Exception):
    """The request is out of order in its exchange (ILLEGAL_SASL_STATE)."""


class UnsupportedMechanism(Exception):
    pass


class Refused(Exception):
    """The client failed to authenticate. The text is for the client, and is sent after `delay_s`."""

    def __init__(self, text: str, delay_s: float) -> None:
        super().__init__(text)
        self.delay_s = delay_s


class Step(msgspec.Struct, frozen=True):
    """The response to one token of the client. `principal` is empty until the exchange is done."""

    token: bytes
    principal: str = ""
    lifetime_ms: int = 0  # until the client must authenticate again; 0 = never
    used_delegation_token: bool = False


class _ExchangeState(msgspec.Struct):
    mechanism: str
    exchange: Exchange
    began_s: float  # time.monotonic()
    is_busy: bool = False


class ListenerOptions(msgspec.Struct, frozen=True):
    """How clients of one listener authenticate."""

    mechanisms: tuple[str, ...]
    token_bytes_max: int
    reauthenticate_ms: int  # 0 = never
    issuer: Issuer | None = None  # for OAUTHBEARER


def options_of(config: Mapping[str, str], listener: listeners.Listener) -> ListenerOptions | None:
    """The listener's options. None: its clients do not authenticate by SASL."""
    if not listener.has_sasl:
        return None
    settings = listeners.listener_settings(config, listener.name)
    mechanisms = tuple(settings["sasl.enabled.mechanisms"].split(","))
    return ListenerOptions(
        mechanisms,
        int(settings["sasl.server.max.receive.size"]),
        int(settings["connections.max.reauth.ms"]),
        Issuer(_oauth_options(settings)) if "OAUTHBEARER" in mechanisms else None,
    )


def _oauth_options(settings: Mapping[str, str]) -> oauth.IssuerOptions:
    return oauth.IssuerOptions(
        settings["sasl.oauthbearer.jwks.endpoint.url"],
        settings["sasl.oauthbearer.expected.issuer"],
        tuple(settings["sasl.oauthbearer.expected.audience"].split(",")),
        settings["sasl.oauthbearer.sub.claim.name"],
        int(settings["sasl.oauthbearer.clock.skew.seconds"]),
        int(settings["sasl.oauthbearer.jwks.endpoint.refresh.ms"]) / 1000,
    )


class Authentication:
    """`seed`: the broker's secret from which salts for unknown users are derived, until the cluster
    has a secret for them.
    """

    def __init__(
        self, options: Sequence[ListenerOptions | None], users: Users, seed: bytes, failure_delay_ms: int
    ) -> None:
        self._options = options
        self._users = users
        self._own_seed = seed
        self._failure_delay_s = failure_delay_ms / 1000
        self._exchanges: OrderedDict[ConnectionKey, _ExchangeState] = OrderedDict()  # the oldest first
        # (address, user) -> number of failures at most FAILURE_MEMORY_S apart, time of the last one
        self._failures: OrderedDict[tuple[str, str], tuple[int, float]] = OrderedDict()
        self._threads = ThreadPoolExecutor(THREADS, "authentication")
        # a separate pool, because these checks may wait for an issuer's server
        self._issuer_threads = ThreadPoolExecutor(1, "tokens")
        self._waiting_count = self._waiting_bytes = 0
        self.succeeded_count = self.failed_count = 0

    def _seed(self) -> bytes:
        secret = self._users.decoy_secret()
        return _seed_of(secret.encode()) if secret else self._own_seed

    def mechanisms(self, listener_id: int) -> tuple[str, ...]:
        options = self._options_of(listener_id)
        return options.mechanisms if options is not None else ()

    def begin(self, connection: ConnectionKey, listener_id: int, mechanism: str) -> None:
        """Handles SaslHandshake. Raises IllegalState (this listener has no authentication) or
        UnsupportedMechanism.
        """
        options = self._options_of(listener_id)
        if options is None:
            raise IllegalState("clients of this listener do not authenticate")
        if mechanism not in options.mechanisms:
            raise UnsupportedMechanism(mechanism)
        now_s = time.monotonic()
        self._exchanges.pop(connection, None)
        self._exchanges[connection] = _ExchangeState(mechanism, self._make_exchange(options, mechanism), now_s)
        # drop the oldest exchanges: most belong to connections that have ended
        while len(self._exchanges) > EXCHANGES_MAX or self._oldest_s() < now_s - EXCHANGE_S_MAX:
            self._exchanges.popitem(last=False)

    def _oldest_s(self) -> float:
        return next(iter(self._exchanges.values())).began_s

    async def step(
        self, connection: ConnectionKey, listener_id: int, address: str, current_principal: str, token: bytes
    ) -> Step:
        """Handles one token from the client. `address`: the client's.
        `current_principal`: the connection's, "" = none.

        Raises IllegalState or Refused. On Refused the caller delays its response and does not keep
        the token in the meantime.
        """
        options = self._options_of(listener_id)
        state = self._exchanges.get(connection)
        if options is None or state is None or state.is_busy:
            raise IllegalState("no SaslHandshake preceded this token, or its exchange was lost")
        state.is_busy = True
        try:
            return await self._step(options, state, connection, current_principal, token)
        except AuthenticationFailed as error:
            self._exchanges.pop(connection, None)
            delay_s = self._on_failed(error, state, connection, address)
            raise Refused(
                f"Authentication failed during authentication due to invalid credentials with SASL mechanism"
                f" {state.mechanism}",
                delay_s,
            ) from None
        finally:
            state.is_busy = False

    def close(self) -> None:
        for threads in (self._threads, self._issuer_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _step(
        self,
        options: ListenerOptions,
        state: _ExchangeState,
        connection: ConnectionKey,
        current_principal: str,
        token: bytes,
    ) -> Step:
        exchange = state.exchange
        if len(token) > options.token_bytes_max:
            raise AuthenticationFailed(f"a token of {len(token)} bytes, more than sasl.server.max.receive.size")
        if time.monotonic() > state.began_s + EXCHANGE_S_MAX:
            raise AuthenticationFailed("the exchange has taken too long", user=exchange.user)
        if self._waiting_bytes + len(token) > WAITING_BYTES_MAX:
            raise AuthenticationFailed("too many large tokens are being checked; retry later", user=exchange.user)
        self._waiting_bytes += len(token)
        try:
            response = await exchange.step(token)
        finally:
            self._waiting_bytes -= len(token)
        if not exchange.done:
            return Step(response)
        self._exchanges.pop(connection, None)
        principal, expires_ms, used_delegation_token = self._proven_principal(exchange)
        if current_principal and principal != current_principal:
            raise AuthenticationFailed(
                f"the connection belongs to {current_principal} and cannot change its principal", user=exchange.user
            )
        self.succeeded_count += 1
        log.info("authenticated", connection=connection[1], principal=principal, mechanism=state.mechanism)
        return Step(response, principal, _lifetime_ms(options, expires_ms), used_delegation_token)

    def _proven_principal(self, exchange: Exchange) -> tuple[str, int, bool]:
        """Returns the principal, the time when its credential expires (0 = never), and whether the
        credential is a delegation token.
        """
        if isinstance(exchange, ScramExchange) and exchange.is_token:
            token = self._users.token(exchange.user)
            if token is None:
                raise AuthenticationFailed("the delegation token has expired", user=exchange.user)
            return token.owner, min(token.expires_ms, token.renewable_until_ms), True
        expires_ms = exchange.expires_ms if isinstance(exchange, OauthExchange) else 0
        return f"User:{exchange.user}", expires_ms, False

    def _on_failed(
        self, error: AuthenticationFailed, state: _ExchangeState, connection: ConnectionKey, address: str
    ) -> float:
        """Records the failure. Returns how long the response is delayed, in seconds."""
        self.failed_count += 1
        user = error.user or state.exchange.user
        log.warning(
            "authentication failed",
            connection=connection[1],
            address=address,
            mechanism=state.mechanism,
            user=user[:255],
            reason=str(error),
        )
        key, now = (address, user), time.monotonic()
        count, last_s = self._failures.pop(key, (0, now))
        count = count + 1 if now < last_s + FAILURE_MEMORY_S else 1
        self._failures[key] = count, now
        while len(self._failures) > FAILURES_MAX:
            self._failures.popitem(last=False)
        return min(self._failure_delay_s * 2 ** min(count - 1, 16), FAILURE_DELAY_S_MAX)

    # -- mechanisms --------------------------------------------------------------------------------

    def _options_of(self, listener_id: int) -> ListenerOptions | None:
        return self._options[listener_id] if listener_id < len(self._options) else None

    def _make_exchange(self, options: ListenerOptions, mechanism: str) -> Exchange:
        if mechanism in scram.MECHANISMS:
            return ScramExchange(
                mechanism,
                lambda user, is_token: self._verifier(mechanism, user, is_token),
                self._seed(),
                parameter_counts=partial(self._users.parameter_counts, mechanism),
            )
        if mechanism == "PLAIN":
            run_in_thread = partial(self._run_in_thread, self._threads)
            return PlainExchange(
                self._first_verifier, self._seed(), run_in_thread, partial(self._users.parameter_counts, None)
            )
        assert mechanism == "OAUTHBEARER" and options.issuer is not None
        return OauthExchange(options.issuer, partial(self._run_in_thread, self._issuer_threads))

    def _verifier(self, mechanism: str, user: str, is_token: bool) -> Verifier | None:
        if is_token:
            return self._users.token_verifier(user, mechanism, self._seed())
        return self._users.verifier(user, mechanism)

    def _first_verifier(self, user: str) -> tuple[str, Verifier] | None:
        for mechanism in scram.MECHANISMS:
            verifier = self._users.verifier(user, mechanism)
            if verifier is not None:
                return mechanism, verifier
        return None

    async def _run_in_thread(self, threads: ThreadPoolExecutor, check: Callable[[], T]) -> T:
        """Runs `check` in a thread. Raises AuthenticationFailed if WAITING_MAX checks are already
        waiting or running.
        """
        if self._waiting_count >= WAITING_MAX:
            raise AuthenticationFailed("too many clients are authenticating; retry later")
        self._waiting_count += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, check)
        finally:
            self._waiting_count -= 1


def _seed_of(secret: bytes) -> bytes:
    # the label must never change, because the salts that clients see would change with it
    return hmac.digest(secret, b"salts of users that do not exist", "sha256")


def from_config(config: Mapping[str, str], metadata: Metadata, tokens: Tokens, data_dir: Path) -> Authentication:
    """The authentication that the configuration describes. Raises OSError if the seed can be
    neither read nor created.
    """
    options = [options_of(config, listener) for listener in listeners.parse_listeners(config)]
    if not any(options):
        return Authentication((), NoUsers(), b"", 0)
    # Salts of unknown users are derived from the seed until the cluster has a secret for them
    # (rules/security.py). All hosts of a cluster have the same seed.
    in_cluster = bool(config.get("cluster.key.file"))
    key = cluster_config.load_key(config) if in_cluster else load_seed(data_dir / "authentication.seed")
    delay_ms = int(config["connection.failed.authentication.delay.ms"])
    return Authentication(options, MetadataUsers(metadata, tokens), _seed_of(key), delay_ms)


def _lifetime_ms(options: ListenerOptions, expires_ms: int) -> int:
    """The shorter of the listener's limit and the credential's remaining time, within the 64 bits
    of the response's field. 0: neither is limited.
    """
    bounds = [options.reauthenticate_ms] if options.reauthenticate_ms else []
    if expires_ms:
        bounds.append(max(1, expires_ms - clock.now_ms()))
    return min(*bounds, LIFETIME_MS_MAX) if bounds else 0
