"""Which requests reach the console's pages, and headers of every response."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mqd.cli.common import CliError
from mqd.console import options as console_options
from mqd.console.guard import host_name, refusal
from mqd.console.rendering import FOLDER
from mqd.security.client import ClientSecurity
from tests.console_client import HOST, Browser, options

NOWHERE = "127.0.0.1:1"  # no broker is needed: the guard runs first
SASL = ClientSecurity({"security.protocol": "SASL_SSL"})
HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})


@pytest.fixture(scope="module")
def browser() -> Browser:
    return Browser(options(NOWHERE))


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("127.0.0.1:9180", "127.0.0.1"),
        ("LOCALHOST", "localhost"),
        ("[::1]:9180", "::1"),
        ("", ""),
        ("evil.example\r\nX: y", ""),
        ("127.0.0.1:9180, evil.example", ""),
        ("user@127.0.0.1", ""),
    ],
)
def test_the_name_in_a_host_header(header: str, name: str) -> None:
    assert host_name(header) == name


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:9180", "10.0.0.1:9180", ""])
def test_dns_rebinding_is_refused(browser: Browser, host: str) -> None:
    response = browser.get("/", headers=[("host", host)])
    assert response.status == 421 and "--allow-host" in response.text


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("GET", {}, None),
        ("GET", {"sec-fetch-site": "none", "sec-fetch-mode": "navigate"}, None),
        ("GET", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, None),  # a link in a message
        ("GET", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),  # <img> of another site
        ("GET", {"sec-fetch-site": "same-site", "sec-fetch-mode": "cors"}, 403),
        ("POST", {"origin": f"http://{HOST}", "sec-fetch-site": "same-origin"}, None),
        ("POST", {"origin": "http://evil.example"}, 403),
        ("POST", {"origin": "null"}, 403),
        ("POST", {"origin": f"https://{HOST}"}, 403),
        ("POST", {"sec-fetch-site": "cross-site"}, 403),
        ("PUT", {}, 405),
        ("OPTIONS", {"origin": "http://evil.example"}, 405),
    ],
)
def test_cross_site_requests_are_refused(method: str, headers: dict[str, str], status: int | None) -> None:
    refused = refusal(method, {"host": HOST, **headers}, HOSTS, "http")
    assert (refused and refused[0]) == status


@pytest.mark.parametrize("path", ["/", "/no-such-page", "/static/console.css"])
def test_each_response_has_the_headers(browser: Browser, path: str) -> None:
    headers = browser.get(path).headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy and "http" not in policy
    assert headers["x-content-type-options"] == "nosniff" and headers["x-frame-options"] == "DENY"
    assert headers["cache-control"] == ("max-age=3600" if path.startswith("/static") else "no-store")


@pytest.mark.parametrize("path", ["/static/../app.py", "/static/..%2fapp.py", "/static/%2e%2e/app.py"])
def test_only_the_folder_of_static_files_is_served(browser: Browser, path: str) -> None:
    assert browser.get(path).status == 404


def test_the_cookie_is_restricted_to_the_consoles_pages() -> None:
    cookie = Browser(options(NOWHERE)).get("/").headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=lax" in cookie and "Path=/" in cookie


def test_templates_respect_the_content_security_policy() -> None:
    """No inline script or style, nothing from other hosts, no text that is parsed as HTML."""
    for path in [*(FOLDER / "templates").iterdir(), *(FOLDER / "static").iterdir()]:
        text = path.read_text()
        assert not re.search(r"\son\w+=|\sstyle=|<style|javascript:|\|\s*safe\b", text), path.name
        assert re.findall(r"https?://(?!www\.w3\.org/2000/svg|HOST:PORT)", text) == [], path.name


# -- start options ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "security", "reason"),
    [
        ({"host": "0.0.0.0"}, ClientSecurity(), "needs a login .* and TLS"),
        ({"host": "10.0.0.1", "certificate": Path("c"), "key": Path("k")}, ClientSecurity(), "needs a login"),
        ({"host": "10.0.0.1"}, SASL, "needs TLS"),
        ({"host": "0.0.0.0", "certificate": Path("c"), "key": Path("k")}, SASL, "--allow-host"),
        ({"key": Path("k")}, SASL, "--tls-key goes with --tls-certificate"),
        ({}, ClientSecurity({"security.protocol": "SSL", "ssl.certificate.location": "c"}), "have a certificate"),
        ({}, ClientSecurity({"security.protocol": "SASL_SSL", "sasl.mechanisms": "OAUTHBEARER"}), "with a password"),
    ],
)
def test_requests_without_a_valid_session_are_refused(changed: dict, security: ClientSecurity, reason: str) -> None:
    with pytest.raises(CliError, match=reason):
        options(NOWHERE, security, **changed)


def test_users_need_their_own_credentials() -> None:
    """Credentials in the file are the operator's: no page uses them."""
    settings = {"security.protocol": "SASL_SSL", "sasl.username": "root", "sasl.password": "secret"}
    chosen = options(NOWHERE, ClientSecurity(settings))
    assert chosen.has_login and "secret" not in str(chosen.security)
    user = console_options.user_security(chosen.security, "ada", "hers")
    assert user.settings["sasl.username"] == "ada" and user.settings["sasl.mechanisms"] == "SCRAM-SHA-512"
    off = options(NOWHERE, SASL, host="10.0.0.1", certificate=Path("c"), key=Path("k"))
    assert off.allowed_hosts == {"10.0.0.1"}


# -- login -----------------------------------------------------------------------------------------


def test_without_a_login_no_page_is_shown() -> None:
    browser = Browser(options(NOWHERE, SASL))
    for path in ("/", "/cluster", "/nowhere"):
        response = browser.get(path)
        assert response.status == 303 and response.headers["location"].startswith("/login"), path
    assert "Password" in browser.get("/login").words


@pytest.mark.parametrize("to", ["//evil.example", "/\\evil.example", "https://evil.example", "evil", "/a\nb"])
def test_a_login_only_redirects_to_the_consoles_pages(to: str) -> None:
    assert Browser(options(NOWHERE, SASL)).get("/login", to=to).fields["to"] == "/"


def test_a_login_needs_the_token_of_its_own_form() -> None:
    browser = Browser(options(NOWHERE, SASL))
    form = {"user": "ada", "password": "x", "to": "/", "token": browser.get("/login").fields["token"]}
    assert browser.post("/login", {**form, "token": "0" * 64}).status == 403
    other = Browser(options(NOWHERE, SASL), browser.app)
    other.get("/login")
    assert "try again" in other.post("/login", form).words
    refused = browser.post("/login", form)
    assert refused.status == 403 and "cannot reach a broker" in refused.words


@pytest.mark.parametrize(
    ("body_type", "form", "status"),
    [
        ("application/json", {}, 415),
        ("application/x-www-form-urlencoded", {"value": "x" * (2 << 20)}, 413),
        ("application/x-www-form-urlencoded", {str(number): "" for number in range(101)}, 400),
    ],
)
def test_a_form_has_bounds(body_type: str, form: dict[str, str], status: int) -> None:
    browser = Browser(options(NOWHERE, SASL))
    assert browser.post("/login", form, [("content-type", body_type)]).status == status
