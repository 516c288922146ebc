"""The state that all requests share."""

from __future__ import annotations

import asyncio

from starlette.responses import Response

from mqd import __version__
from mqd.console import rendering
from mqd.console.audit import Audit
from mqd.console.cache import Cache
from mqd.console.metrics import Sampler
from mqd.console.options import Options
from mqd.console.sessions import Session, Sessions
from mqd.console.streaming import StreamLimit

CONCURRENT_LOGINS_MAX = 4


class Console:
    def __init__(self, options: Options) -> None:
        self.options = options
        self.version = __version__
        self.sessions = Sessions()
        self.cache = Cache()
        self.templates = rendering.environment()
        self.stream_limit = StreamLimit()
        self.audit = Audit(options.audit)
        self.metrics = Sampler(options)
        self.cookie_name = "__Host-mqd-console" if options.has_tls else "mqd-console"
        self.login_slots = asyncio.Semaphore(CONCURRENT_LOGINS_MAX)

    def session(self, cookie: str) -> Session | None:
        if not self.options.has_login:
            return Session("", self.options.security, 0.0, 0.0)
        return self.sessions.find(cookie)

    def set_cookie(self, response: Response, cookie: str) -> None:
        # lax: a link on another site opens a page with the cookie, but other sites' forms are sent
        # without it
        response.set_cookie(
            self.cookie_name, cookie, path="/", secure=self.options.has_tls, httponly=True, samesite="lax"
        )
