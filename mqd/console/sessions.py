"""Sessions of logged-in users: random cookies and the user's credentials, kept only in this process.
A restart of the console ends all sessions.

Without a login a browser still gets a cookie, because the CSRF token is bound to it.
"""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from mqd.security.client import ClientSecurity

IDLE_S = 3600.0
SESSION_S = 12 * 3600.0
SESSIONS_MAX = 1000  # beyond this, the least recently used session is ended
COOKIE_BYTES = 32


class Session(msgspec.Struct):
    """`user` is "" if the console has no login."""

    user: str
    security: ClientSecurity
    begun_s: float
    last_used_s: float


class Sessions:
    """Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._lock = threading.Lock()

    @staticmethod
    def new_cookie() -> str:
        return secrets.token_urlsafe(COOKIE_BYTES)

    def begin(self, user: str, security: ClientSecurity) -> str:
        """Begins a session and returns its new cookie."""
        cookie, now = self.new_cookie(), self._clock()
        with self._lock:
            self._sessions[cookie] = Session(user, security, now, now)
            while len(self._sessions) > SESSIONS_MAX:
                self._sessions.popitem(last=False)
        return cookie

    def find(self, cookie: str) -> Session | None:
        now = self._clock()
        with self._lock:
            session = self._sessions.get(cookie)
            if session is None:
                return None
            if now - session.last_used_s > IDLE_S or now - session.begun_s > SESSION_S:
                del self._sessions[cookie]
                return None
            session.last_used_s = now
            self._sessions.move_to_end(cookie)
            return session

    def end(self, cookie: str) -> None:
        with self._lock:
            self._sessions.pop(cookie, None)

    def token(self, cookie: str) -> str:
        """The CSRF token, which a form must contain to change something."""
        return self.signature(cookie, "form")

    def signature(self, cookie: str, text: str) -> str:
        return hmac.digest(self._secret, f"{cookie}\n{text}".encode(), "sha256").hex()

    def is_valid_token(self, cookie: str, token: str) -> bool:
        return bool(cookie) and hmac.compare_digest(self.token(cookie).encode(), token.encode())
