"""The bearer token that a scraper must send: `metrics.token.file`."""

import hmac
import os
import time
from pathlib import Path

from mqd.base import logging
from mqd.base.property_values import ConfigError
from mqd.security.tls_files import file_state

NAME = "metrics.token.file"
POLL_S = 2.0
BYTES_MIN, BYTES_MAX = 16, 4096
log = logging.get("acceptor.metrics")


def read(path: Path) -> bytes:
    """The token in the file. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            token = file.read(BYTES_MAX + 1).strip()
    except OSError as error:
        raise ConfigError(f"{NAME}={path} cannot be read: {error.strerror}", NAME) from None
    if not BYTES_MIN <= len(token) <= BYTES_MAX or not token.isascii() or b" " in token:
        raise ConfigError(
            f"{NAME}={path} must contain one token of {BYTES_MIN} to {BYTES_MAX} ASCII characters:"
            f" openssl rand -hex 32 > {path}",
            NAME,
        )
    if mode & 0o077:
        raise ConfigError(f"{NAME}={path} can be read by others on this machine: chmod 600 {path}", NAME)
    return token


class Token:
    """The token that is in the file now, or the previous token while the file cannot be used."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file_state, self._checked_s = file_state(path), time.monotonic()
        self._token = read(path)

    def permits(self, request: bytes) -> bool:
        """Whether the request's header carries the token. Compares in constant time."""
        presented_token = b""
        for line in request.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            scheme, _, credentials = value.strip().partition(b" ")
            if name.strip().lower() == b"authorization" and scheme.lower() == b"bearer":
                presented_token = credentials.strip()
        return hmac.compare_digest(presented_token, self._current())

    def _current(self) -> bytes:
        now = time.monotonic()
        if now >= self._checked_s + POLL_S:
            self._checked_s = now
            state = file_state(self._path)
            if state != self._file_state:
                self._file_state = state
                try:
                    self._token = read(self._path)
                except ConfigError as error:
                    log.error(
                        "the new token of the metrics page cannot be used; the previous one stays in use",
                        reason=str(error),
                    )
        return self._token
