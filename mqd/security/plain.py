"""SASL PLAIN (RFC 4616): the password itself, checked against the verifiers of SCRAM, so that a
user has one password for all mechanisms.
"""

from collections.abc import Awaitable, Callable

from mqd.security import scram
from mqd.security.exchange import PASSWORD_TOKEN_BYTES_MAX, AuthenticationFailed
from mqd.security.scram import Verifier

# user -> mechanism and verifier; None: there is no such user
Lookup = Callable[[str], tuple[str, Verifier] | None]
# runs a check, which takes milliseconds, in a thread outside the event loop; raises
# AuthenticationFailed if too many checks are already waiting
RunInThread = Callable[[Callable[[], bool]], Awaitable[bool]]


class PlainExchange:
    def __init__(
        self, lookup: Lookup, seed: bytes, run_in_thread: RunInThread, parameter_counts: scram.ParameterCounts = dict
    ) -> None:
        self._lookup, self._seed = lookup, seed
        self._run_in_thread, self._parameter_counts = run_in_thread, parameter_counts
        self.user = ""
        self.done = False

    async def step(self, token: bytes) -> bytes:
        if self.done:
            raise AuthenticationFailed("the exchange has already ended")
        authzid, user, password = self._parse(token)
        self.user = user
        if authzid not in ("", user):
            raise AuthenticationFailed("a client cannot act as another user", user=user)
        credential = self._lookup(user)
        # an unknown user must take as long as a wrong password
        mechanism, verifier = credential or scram.decoy_for_plain(self._seed, user, self._parameter_counts())
        is_correct = await self._run_in_thread(lambda: scram.matches_password(mechanism, verifier, password))
        if not is_correct or credential is None:
            raise AuthenticationFailed("wrong user or password", user=user)
        self.done = True
        return b""

    def _parse(self, token: bytes) -> tuple[str, str, bytes]:
        """(authzid, user, password). Raises AuthenticationFailed."""
        parts = token.split(b"\0")
        if len(parts) != 3 or not parts[1] or not parts[2] or len(token) > PASSWORD_TOKEN_BYTES_MAX:
            raise AuthenticationFailed("the token is not AUTHZID NUL USER NUL PASSWORD")
        try:
            return parts[0].decode(), parts[1].decode(), parts[2]
        except UnicodeDecodeError:
            raise AuthenticationFailed("a name is not UTF-8") from None
