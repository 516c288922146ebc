"""One request for a page: its user, the parameters of its URL, and the response."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from mqd.cli.common import CliError, Settings
from mqd.console import rendering
from mqd.console.sessions import Session
from mqd.console.shared import Console

T = TypeVar("T")
TEXT_MAX = 1000  # characters of one parameter in a URL


class Refused(Exception):
    """The console refuses a request: an edited URL, an unknown page, an exceeded limit."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class PageRequest:
    """`form`: the fields of a POST. Pages run on threads of their own and may block."""

    def __init__(
        self, console: Console, http: Request, session: Session, cookie: str, form: dict[str, str] | None = None
    ) -> None:
        self.console, self.http, self.session, self.cookie = console, http, session, cookie
        self.form = form or {}
        self.settings = Settings(console.options.bootstrap)

    def text(self, name: str, default: str = "") -> str:
        value = self.http.query_params.get(name, default)
        if len(value) > TEXT_MAX:
            raise Refused(400, f"{name} is longer than {TEXT_MAX} characters")
        return value

    def number(self, name: str, default: int, minimum: int, maximum: int) -> int:
        """Returns the default for a value that is not a number, and the nearest limit for one out of range,
        because users edit URLs.
        """
        try:
            return min(maximum, max(minimum, int(self.text(name) or default)))
        except ValueError:
            return default

    def required_text(self, name: str) -> str:
        value = self.text(name)
        if not value:
            raise Refused(404, f"the URL has no {name}")
        return value

    def cached(self, key: str, seconds: float, load: Callable[[], T]) -> T:
        """Loads through the cache. Each user has its own entries, because others may see less."""
        return self.console.cache.get((self.session.user, key), seconds, load)

    def attempt(self, load: Callable[[], T]) -> tuple[T | None, str]:
        """Returns the result and "", or None and the reason: a part of a page may fail."""
        try:
            return load(), ""
        except CliError as error:
            return None, error.message

    def page(self, template: str, status: int = 200, **values: Any) -> Response:
        console = self.console
        html = console.templates.get_template(template).render(
            path=self.http.url.path,
            bootstrap=console.options.bootstrap,
            user=self.session.user,
            has_login=console.options.has_login,
            is_read_only=console.options.is_read_only,
            token=console.sessions.token(self.cookie),
            version=console.version,
            notice=self._notice(),
            **values,
        )
        return HTMLResponse(html, status)

    def redirect(self, path: str, notice: str, **query: object) -> Response:
        """The response after a change: a redirect, so that reloading does not repeat the change.
        `notice` is shown on the new page; its signature prevents links on other sites from showing
        their own text.
        """
        notice = notice if len(notice) <= TEXT_MAX else f"{notice[: TEXT_MAX - 1]}…"
        signature = self.console.sessions.signature(self.cookie, notice)
        return RedirectResponse(rendering.url(path, **query, notice=notice, signature=signature), 303)

    def _notice(self) -> str:
        """Must not raise, because the page that explains a refused request calls it, too."""
        query = self.http.query_params
        notice, sent_signature = query.get("notice", "")[:TEXT_MAX], query.get("signature", "")[:TEXT_MAX]
        signature = self.console.sessions.signature(self.cookie, notice)
        return notice if hmac.compare_digest(signature.encode(), sent_signature.encode()) else ""
