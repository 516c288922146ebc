"""What every SASL mechanism is to the broker: an exchange of tokens that proves a user, or fails."""

from typing import Protocol

# of PLAIN and SCRAM: names of 255 characters, a password or a nonce. What an exchange keeps, and what
# is kept of its failure, is smaller than this.
PASSWORD_TOKEN_BYTES_MAX = 4096


class AuthenticationFailed(Exception):
    """The reason is for the broker's log; the client receives the same words for every failure.
    `user`: as claimed; "" where it is not known.
    """

    def __init__(self, reason: str, user: str = "") -> None:
        super().__init__(reason)
        self.user = user


class Exchange(Protocol):
    """One authentication of one connection."""

    @property
    def user(self) -> str: ...

    @property
    def done(self) -> bool: ...

    async def step(self, token: bytes) -> bytes:
        """The answer to the client's token. Raises AuthenticationFailed."""
        ...
