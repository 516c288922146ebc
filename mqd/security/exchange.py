"""The interface of a SASL mechanism: an exchange of tokens that authenticates a user, or fails."""

from typing import Protocol

# The limit for PLAIN and SCRAM tokens: enough for names of 255 characters with a password or a
# nonce. The state of an exchange, even a failed one, is smaller than this.
PASSWORD_TOKEN_BYTES_MAX = 4096


class AuthenticationFailed(Exception):
    """The reason is for the broker's log; the client receives the same text for every failure.
    `user`: the name that the client claimed; "" if it is not known.
    """

    def __init__(self, reason: str, user: str = "") -> None:
        super().__init__(reason)
        self.user = user


class Exchange(Protocol):
    """One authentication of one connection."""

    @property
    def user(self) -> str: ...

    @property
    def done(self) -> bool:
        """Whether the user is authenticated."""
        ...

    async def step(self, token: bytes) -> bytes:
        """The response to the client's token. Raises AuthenticationFailed."""
        ...
