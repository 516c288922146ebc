"""A headless browser: calls the console's application in this process, and keeps cookies."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from html import unescape
from http.cookies import SimpleCookie
from urllib.parse import urlencode, urlsplit

import msgspec

from mqd.console.app import application
from mqd.console.guard import App
from mqd.console.options import Options, checked
from mqd.security.client import ClientSecurity

HOST = "127.0.0.1:9180"
TIMEOUT_S = 60.0


def options(bootstrap: str, security: ClientSecurity | None = None, **changed: object) -> Options:
    given = Options(bootstrap, security or ClientSecurity(), "127.0.0.1", 9180, frozenset())
    return checked(msgspec.structs.replace(given, **changed))


class Answer(msgspec.Struct):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def words(self) -> str:
        """The visible text: no tags, single spaces."""
        return " ".join(unescape(re.sub(r"<(script|style).*?</\1>|<[^>]*>", " ", self.text, flags=re.S)).split())

    @property
    def fields(self) -> dict[str, str]:
        """Hidden fields of all forms of the page."""
        return {
            unescape(name): unescape(value)
            for name, value in re.findall(r'<input type="hidden" name="([^"]*)" value="([^"]*)"', self.text)
        }


class Browser:
    def __init__(self, options: Options, app: App | None = None) -> None:
        self.app = app or application(options)
        self.cookies: dict[str, str] = {}

    def get(self, path: str, /, headers: Iterable[tuple[str, str]] = (), **query: object) -> Answer:
        return self._request("GET", path + (f"?{urlencode(query)}" if query else ""), headers, b"")

    def post(self, path: str, form: dict[str, str], headers: Iterable[tuple[str, str]] = ()) -> Answer:
        sent = [("content-type", "application/x-www-form-urlencoded"), ("origin", f"http://{HOST}"), *headers]
        return self._request("POST", path, sent, urlencode(form).encode())

    def _request(self, method: str, target: str, headers: Iterable[tuple[str, str]], body: bytes) -> Answer:
        given = dict(headers)
        given.setdefault("host", HOST)
        if self.cookies:
            given["cookie"] = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        parts = urlsplit(target)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": parts.path,
            "raw_path": parts.path.encode(),
            "query_string": parts.query.encode(),
            "root_path": "",
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in given.items()],
            "client": ("127.0.0.1", 50000),
            "server": ("127.0.0.1", 9180),
        }
        response = asyncio.run(asyncio.wait_for(_call(self.app, scope, body), TIMEOUT_S))
        for name, morsel in SimpleCookie(response.headers.get("set-cookie", "")).items():
            self.cookies[name] = morsel.value
        return response


async def _call(app: App, scope: dict[str, object], body: bytes) -> Answer:
    requests = [{"type": "http.request", "body": body, "more_body": False}]
    response = Answer(0, {}, b"")
    ended = asyncio.Event()

    async def receive() -> dict[str, object]:
        if requests:
            return requests.pop()
        await ended.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict) -> None:
        if message["type"] == "http.response.start":
            response.status = message["status"]
            response.headers = {name.decode().lower(): value.decode("latin-1") for name, value in message["headers"]}
        else:
            response.body += message.get("body", b"")
            if not message.get("more_body"):
                ended.set()

    await app(scope, receive, send)
    return response
