"""The delegation tokens of the cluster as this host knows them: the metadata has their ids, owners
and times; their passwords are computed here, from delegation.token.secret.key.

Computing a SCRAM verifier takes a millisecond, so verifiers are cached: at most one for each token
and mechanism, and at most VERIFIERS_MAX.
"""

from collections import OrderedDict
from collections.abc import Mapping

from mqd.acceptor.metadata import Metadata
from mqd.base import clock, config
from mqd.cluster.metadata.records import DelegationToken
from mqd.cluster.metadata.rules.tokens import is_expired
from mqd.security import scram, tokens
from mqd.security.scram import Verifier

VERIFIERS_MAX = 1024


class Tokens:
    """An empty `secret` disables delegation tokens."""

    def __init__(self, metadata: Metadata, secret: str, max_lifetime_ms: int, lifetime_ms: int) -> None:
        self._metadata = metadata
        self._secret = secret
        self.max_lifetime_ms = max_lifetime_ms
        self.lifetime_ms = lifetime_ms  # without renewal
        self._ids: dict[bytes, str] = {}  # by HMAC; also of removed tokens, until the next by_hmac()
        self._verifiers: OrderedDict[tuple[str, str, bytes], Verifier] = OrderedDict()

    @property
    def are_enabled(self) -> bool:
        return bool(self._secret)

    def hmac_of(self, token_id: str) -> bytes:
        return tokens.hmac_of(self._secret, token_id)

    def by_hmac(self, token_hmac: bytes) -> DelegationToken | None:
        by_id = self._metadata.delegation_tokens
        for token_id in by_id.keys() - self._ids.values():
            self._ids[self.hmac_of(token_id)] = token_id
        if len(self._ids) > len(by_id):
            self._ids = {known_hmac: token_id for known_hmac, token_id in self._ids.items() if token_id in by_id}
        return by_id.get(self._ids.get(token_hmac, ""))

    def valid_token(self, token_id: str) -> DelegationToken | None:
        """Returns the token if clients may authenticate with it now."""
        token = self._metadata.delegation_tokens.get(token_id) if self._secret else None
        return token if token is not None and not is_expired(token, clock.now_ms()) else None

    def verifier(self, token_id: str, mechanism: str, seed: bytes) -> Verifier | None:
        if self.valid_token(token_id) is None:
            return None
        key = token_id, mechanism, seed
        verifier = self._verifiers.get(key)
        if verifier is None:
            password = tokens.password_of(self.hmac_of(token_id))
            verifier = self._verifiers[key] = scram.token_verifier(mechanism, seed, token_id, password)
            if len(self._verifiers) > VERIFIERS_MAX:
                self._verifiers.popitem(last=False)
        return verifier


def from_config(properties: Mapping[str, str], metadata: Metadata) -> Tokens:
    return Tokens(
        metadata,
        properties.get("delegation.token.secret.key") or "",
        config.broker_number(properties, "delegation.token.max.lifetime.ms"),
        config.broker_number(properties, "delegation.token.expiry.time.ms"),
    )
