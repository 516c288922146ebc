"""Checks the host name and the origin of every request before a page sees it, and adds headers that
keep a browser from executing a record's content.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.responses import PlainTextResponse

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
    " form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    # not no-referrer: browsers would then hide the origin of our own forms
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


def host_name(text: str) -> str:
    """The name in a Host header, without its port; "" when it is invalid."""
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:]+)\]|([A-Za-z0-9._-]+))(?::\d{1,5})?", text)
    return (match[1] or match[2]).lower() if match else ""


def refusal(method: str, headers: dict[str, str], hosts: frozenset[str], scheme: str) -> tuple[int, str] | None:
    """Returns the status and the reason of a refusal, or None if the request may continue."""
    host = headers.get("host", "")
    if host_name(host) not in hosts:
        return 421, f"this console does not answer to the name {host!r}; mqd console --allow-host NAME allows a name"
    if method not in ("GET", "HEAD", "POST"):
        return 405, "the console accepts only GET and POST"
    site = headers.get("sec-fetch-site", "same-origin")
    if method == "POST":
        origin = headers.get("origin")
        if (origin is not None and origin != f"{scheme}://{host}") or site not in ("same-origin", "none"):
            return 403, "this change comes from another site"
    elif site in ("cross-site", "same-site") and headers.get("sec-fetch-mode", "navigate") != "navigate":
        return 403, "another site may link to the console, but not load anything from it"
    return None


class Guard:
    def __init__(self, app: App, hosts: frozenset[str], scheme: str) -> None:
        self._app, self._hosts, self._scheme = app, hosts, scheme

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # the console has no WebSockets
        headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            # the values of a repeated header are joined, so that they match no valid value
            text, key = value.decode("latin-1"), name.decode("latin-1").lower()
            headers[key] = f"{headers[key]}, {text}" if key in headers else text
        is_static = scope["path"].startswith("/static/")

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [*HEADERS, (b"cache-control", b"max-age=3600" if is_static else b"no-store")]
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        refused = refusal(scope["method"], headers, self._hosts, self._scheme)
        if refused is not None:
            await PlainTextResponse(refused[1] + "\n", refused[0])(scope, receive, send_guarded)
            return
        await self._app(scope, receive, send_guarded)
