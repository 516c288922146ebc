"""Users, rules and quotas in the console: each is previewed, confirmed, and then in force."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest

from tests.console_client import Browser, options
from tests.interaction.console.changing import change, command, confirmed, fresh, lines, shown
from tests.interaction.console.test_console_overview import log_in
from tests.interaction.security.secured import PASSWORDS, Secured


@pytest.fixture
def audit(tmp_path: Path) -> Path:
    return tmp_path / "audit.log"


@pytest.fixture
def browser(secured: Secured, audit: Path) -> Browser:
    found = Browser(options(secured.broker.bootstrap, audit=audit))
    found.get("/")
    return found


def rows(browser: Browser, show: str, text: str) -> str:
    return fresh(browser, "/access", show=show, q=text).partition(" Search ")[2]


def test_a_users_password_is_shown_once(
    secured: Secured, browser: Browser, login_browser: Browser, audit: Path
) -> None:
    response = shown(browser, "/access/user", name="dora")
    assert command(response) == f"mqd user create dora -b {secured.broker.bootstrap}"
    assert "Create the user dora?" in response.words and "Nothing here contains" in rows(browser, "users", "dora")
    done = confirmed(browser, "/access/user", response)
    (password,) = map(unescape, re.findall(r'data-copy="([^"]*)"', done.text))
    assert done.status == 200 and "shown here once" in done.words and len(password) > 20
    assert "dora SCRAM-SHA-256 (4,096 iterations), SCRAM-SHA-512" in rows(browser, "users", "dora")
    assert log_in(login_browser, "dora", password).status == 303
    assert password not in audit.read_text() and lines(audit)[-1][1] == "done"

    response = shown(browser, "/access/user", name="dora")
    assert "Give a new password to the user dora?" in response.words
    assert command(response) == f"mqd user create dora --replace -b {secured.broker.bootstrap}"
    confirmed(browser, "/access/user", response)
    assert log_in(login_browser, "dora", password).status == 403

    response = shown(browser, "/access/user/delete", name="dora")
    assert "type dora to confirm" in confirmed(browser, "/access/user/delete", response, typed="").words
    assert confirmed(browser, "/access/user/delete", response, typed="dora").status == 303
    assert "Nothing here contains" in rows(browser, "users", "dora")


def test_a_rule_is_in_force_until_it_is_removed(
    secured: Secured, browser: Browser, login_browser: Browser, audit: Path
) -> None:
    change(browser, "/topic/create", name="ruled-1")
    log_in(login_browser, "bob", PASSWORDS["bob"])
    rule = {"principal": "bob", "permission": "allow", "operations": "read, describe", "resource": "topic/ruled-*"}
    response = shown(browser, "/access/rule", **rule)
    assert command(response) == f"mqd acl allow bob read,describe 'topic/ruled-*' -b {secured.broker.bootstrap}"
    assert "2 rules would be added" in response.words and "User:bob allow read topic/ruled-* *" in response.words
    assert "AUTHORIZATION_FAILED" in login_browser.get("/topic", name="ruled-1").words
    confirmed(browser, "/access/rule", response)
    assert login_browser.get("/topic", name="ruled-1").status == 200
    assert "User:bob allow describe topic/ruled-* any address Remove" in rows(browser, "rules", "ruled-")
    assert "1 other rule exists already" in shown(browser, "/access/rule", **rule | {"operations": "read,write"}).words

    denied = shown(browser, "/access/rule", **rule | {"permission": "deny", "operations": "all", "host": "127.0.0.1"})
    assert command(denied).startswith("mqd acl deny bob all 'topic/ruled-*' --from 127.0.0.1")
    for operation in ("read", "describe"):
        gone = shown(browser, "/access/rule/delete", **rule | {"operations": operation, "host": "*"})
        assert f"--operation {operation} --permission allow --from '*'" in command(gone)
        confirmed(browser, "/access/rule/delete", gone)
    assert "Nothing here contains" in rows(browser, "rules", "ruled-")
    missing = shown(browser, "/access/rule/delete", **rule | {"operations": "read", "host": "*"})
    assert missing.status == 400 and "there is no such rule" in missing.words
    assert len(lines(audit)) == 8


def test_a_limit_is_shown_beside_the_one_before(secured: Secured, browser: Browser) -> None:
    response = shown(
        browser, "/access/quota", user="limited", client="<default>", produce="2MB", **{"request-time": "50"}
    )
    words = "mqd quota set --user limited --default --produce 2MB --request-time 50 -b"
    assert command(response).startswith(words) and "produce - 2.0 MB/s" in response.words
    confirmed(browser, "/access/quota", response)
    assert "limited <default> – 2.0 MB/s – 50 % – –" in rows(browser, "quotas", "limited")
    response = shown(browser, "/access/quota", user="limited", client="<default>", produce="1MB")
    assert "produce 2.0 MB/s 1.0 MB/s" in response.words
    response = shown(browser, "/access/quota/delete", user="limited", client="<default>")
    assert command(response).startswith("mqd quota delete --user limited --default -b")
    confirmed(browser, "/access/quota/delete", response)
    assert "Nothing here contains" in rows(browser, "quotas", "limited")


@pytest.mark.parametrize(
    ("path", "form", "reason"),
    [
        ("/access/user", {"name": "*"}, "must not be '*'"),
        ("/access/user/delete", {"name": "no-such"}, "there is no user no-such"),
        ("/access/rule", {"principal": "bob", "operations": "fly", "resource": "topic/x"}, "'fly' is not an operation"),
        (
            "/access/rule",
            {"principal": "bob", "operations": "read", "resource": "moon/x"},
            "'moon/x' is not a resource",
        ),
        ("/access/rule", {"principal": "b", "operations": "read", "resource": "topic/x", "permission": "?"}, "'?'"),
        ("/access/quota", {"user": "bob"}, "nothing to set"),
        ("/access/quota", {"produce": "1MB"}, "name a user, a client id or an address"),
        ("/access/quota", {"ip": "10.0.0.1", "user": "bob", "produce": "1MB"}, "either to an address, or to a user"),
        ("/access/quota", {"user": "bob", "produce": "fast"}, "'fast' is not a rate"),
        ("/access/quota", {"user": "bob", "request-time": "nan"}, "is not a number above 0"),
        ("/access/quota", {"ip": "10.0.0.1", "connections": "1.5"}, "is not a whole number"),
        ("/access/quota/delete", {"user": "no-such"}, "has none of these quotas"),
    ],
)
def test_invalid_changes_are_reported_in_the_preview(
    browser: Browser, audit: Path, path: str, form: dict[str, str], reason: str
) -> None:
    response = shown(browser, path, **form)
    assert response.status == 400 and reason in response.words
    assert audit.read_text() == ""


def test_a_user_without_the_right_learns_the_reason(login_browser: Browser) -> None:
    log_in(login_browser, "bob", PASSWORDS["bob"])
    for show in ("users", "rules", "quotas"):
        response = login_browser.get("/access", show=show)
        assert response.status == 200 and "AUTHORIZATION_FAILED" in response.words and "alice" not in response.words
    assert "AUTHORIZATION_FAILED" in shown(login_browser, "/access/user", name="eve").words
