"""The console's web application: routes, cookies, login, forms and errors."""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import AsyncIterator, Callable
from functools import partial
from urllib.parse import parse_qsl, urlsplit

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from mqd.base.property_values import ConfigError
from mqd.cli import client_security
from mqd.cli.common import EXIT_UNREACHABLE, CliError, explain
from mqd.cli.kafka_request import Broker
from mqd.console import rendering
from mqd.console.guard import App, Guard
from mqd.console.options import Options, user_security
from mqd.console.page_request import PageRequest, Refused
from mqd.console.pages import access, changes, cluster, groups, messages, moves, overview, queues, topics, transactions
from mqd.console.sessions import Session
from mqd.console.shared import Console
from mqd.security.client import ClientSecurity

FORM_BYTES_MAX = 4 << 20  # a record of 1 MiB, with each byte written as %XX
LOGIN_BYTES_MAX = 16 << 10  # small, because clients that have not authenticated can send it
FIELDS_MAX = 100
LOGIN_FAILURE_DELAY_S = 1.0
PageFunction = Callable[[PageRequest], Response]


def application(options: Options) -> App:
    console = Console(options)

    def get(path: str, page: PageFunction) -> Route:
        return Route(path, partial(_show, console, page), methods=["GET"])

    routes: list[Route | Mount] = [
        get("/", overview.page),
        get("/topics", topics.page),
        get("/topic", topics.topic_page),
        get("/messages", messages.page),
        get("/messages/stream", messages.stream_page),
        get("/messages/download", messages.download),
        get("/message", messages.record_page),
        get("/message/raw", messages.raw),
        get("/groups", groups.page),
        get("/queues", queues.page),
        get("/group", groups.group_page),
        get("/transactions", transactions.page),
        get("/transaction", transactions.transaction_page),
        get("/cluster", cluster.page),
        get("/moves", moves.page),
        get("/access", access.page),
        *(get(kind.path, kind.show) for kind in changes.KINDS),
        *(Route(kind.path, partial(_change, console, kind.post), methods=["POST"]) for kind in changes.KINDS),
        Route("/login", partial(_login, console), methods=["GET", "POST"]),
        Route("/logout", partial(_logout, console), methods=["POST"]),
        Mount("/static", StaticFiles(directory=rendering.FOLDER / "static")),
    ]

    @contextlib.asynccontextmanager
    async def running(_app: Starlette) -> AsyncIterator[None]:
        console.metrics.start()
        yield
        console.metrics.stop()

    app = Starlette(routes=routes, exception_handlers={404: partial(_not_found, console)}, lifespan=running)
    app.state.console = console
    return Guard(app, options.allowed_hosts, "https" if options.has_tls else "http")


# -- pages -----------------------------------------------------------------------------------------


async def _change(console: Console, page: PageFunction, request: Request) -> Response:
    cookie = request.cookies.get(console.cookie_name, "")
    session = console.session(cookie)
    if session is None:
        return Response(status_code=303, headers={"location": "/login"})
    page_request, refused = PageRequest(console, request, session, cookie), None
    try:
        page_request.form = await read_form(request)
    except Refused as error:
        refused = error

    def respond(page_request: PageRequest) -> Response:
        if refused is not None:
            raise refused
        return page(page_request)

    return await run_in_threadpool(_respond, page_request, respond)


async def _show(console: Console, page: PageFunction, request: Request) -> Response:
    cookie = request.cookies.get(console.cookie_name, "")
    session = console.session(cookie)
    if session is None:
        return _to_login(request)
    is_new = not cookie
    cookie = cookie or console.sessions.new_cookie()
    response = await run_in_threadpool(_respond, PageRequest(console, request, session, cookie), page)
    if is_new:
        console.set_cookie(response, cookie)
    return response


def _respond(page_request: PageRequest, page: PageFunction) -> Response:
    """Runs on a thread with the user's credentials. An error becomes a page that names its cause."""
    with client_security.acting_as(page_request.session.security):
        try:
            return page(page_request)
        except Refused as error:
            title = "This page does not exist" if error.status == 404 else "The console refused the request"
            return page_request.page("error.html", error.status, title=title, reason=str(error), retry=False)
        except CliError as error:
            is_unreachable = error.exit_code == EXIT_UNREACHABLE
            title = "The cluster cannot be reached" if is_unreachable else "The cluster refused the request"
            return page_request.page(
                "error.html", 503 if is_unreachable else 502, title=title, reason=error.message, retry=True
            )
        except Exception as error:
            if not isinstance(error, ConfigError) and not type(error).__module__.startswith(
                ("confluent_kafka", "cimpl")
            ):
                traceback.print_exc()
            reason, _ = explain(error)
            return page_request.page("error.html", 500, title="This page failed", reason=reason, retry=True)


async def _not_found(console: Console, request: Request, _error: Exception) -> Response:
    def page(_page_request: PageRequest) -> Response:
        raise Refused(404, "the console has no page at this address")

    return await _show(console, page, request)


# -- login -----------------------------------------------------------------------------------------


def _to_login(request: Request) -> Response:
    target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    return Response(
        status_code=303, headers={"location": rendering.url("/login", to=None if target == "/" else target)}
    )


def _page_after_login(text: str) -> str:
    """The page to open after a login: always one of the console's, never an external address."""
    parts = urlsplit(text)
    is_ours = text.startswith("/") and not text.startswith(("//", "/\\")) and not parts.netloc and text.isprintable()
    return text if is_ours else "/"


async def read_form(request: Request, bytes_max: int = FORM_BYTES_MAX) -> dict[str, str]:
    """Raises Refused."""
    if request.headers.get("content-type", "").split(";")[0].strip() != "application/x-www-form-urlencoded":
        raise Refused(415, "a form is expected")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > bytes_max:
            raise Refused(413, f"the form has more than {bytes_max} bytes; for larger records, use mqd produce")
    try:
        pairs = parse_qsl(body.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=FIELDS_MAX)
    except ValueError as error:
        raise Refused(400, f"the form cannot be read: {error}") from None
    return {name: value.replace("\r\n", "\n") for name, value in pairs}


def _verify_login(console: Console, security: ClientSecurity) -> None:
    """Raises CliError if the cluster refuses this user and password, or cannot be reached."""
    with client_security.acting_as(security), Broker(console.options.bootstrap):
        pass


async def _login(console: Console, request: Request) -> Response:
    if not console.options.has_login:
        return Response(status_code=303, headers={"location": "/"})
    cookie = request.cookies.get(console.cookie_name, "") or console.sessions.new_cookie()
    page_request = PageRequest(console, request, Session("", ClientSecurity(), 0.0, 0.0), cookie)
    to, reason, status = _page_after_login(request.query_params.get("to", "/")), "", 200
    if request.method == "POST":
        try:
            form = await read_form(request, LOGIN_BYTES_MAX)
        except Refused as error:
            return page_request.page("error.html", error.status, title="Not logged in", reason=str(error), retry=False)
        to = _page_after_login(form.get("to", "/"))
        if not console.sessions.is_valid_token(cookie, form.get("token", "")):
            reason, status = "the console has restarted since this form was loaded; try again", 403
        else:
            user, password = form.get("user", ""), form.get("password", "")
            security = user_security(console.options.security, user, password)
            reason = await _login_refusal(console, security)
            if not reason:
                response = Response(status_code=303, headers={"location": to})
                console.set_cookie(response, console.sessions.begin(user, security))
                return response
            status = 403
    response = page_request.page("login.html", status, to=to, reason=reason)
    console.set_cookie(response, cookie)
    return response


async def _login_refusal(console: Console, security: ClientSecurity) -> str:
    """Returns why the login is refused, or "" if it succeeded. The response to a failed login is
    delayed, so that passwords cannot be guessed quickly. Logins occupy at most a few threads.
    """
    user = security.settings["sasl.username"]
    if not user or "\0" in user + security.settings["sasl.password"]:
        return "enter a user name and password"
    async with console.login_slots:
        try:
            await run_in_threadpool(_verify_login, console, security)
        except (CliError, ConfigError) as error:
            await asyncio.sleep(LOGIN_FAILURE_DELAY_S)
            return str(error)
    return ""


async def _logout(console: Console, request: Request) -> Response:
    cookie = request.cookies.get(console.cookie_name, "")
    try:
        form = await read_form(request, LOGIN_BYTES_MAX)
    except Refused:
        form = {}
    if console.sessions.is_valid_token(cookie, form.get("token", "")):
        console.sessions.end(cookie)
    return Response(status_code=303, headers={"location": "/login"})
