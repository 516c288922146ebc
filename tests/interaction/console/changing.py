"""Helpers for changes on the console's pages: previewed, confirmed, and in the audit log."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path

from mqd.console.pages.changes import KINDS
from tests.console_client import Answer, Browser

IN_THE_URL = {name for kind in KINDS for name in kind.fields}


def fresh(browser: Browser, path: str, **query: object) -> str:
    """The current page, whatever other tests have cached."""
    browser.app._app.state.console.cache.clear()
    return browser.get(path, **query).words


def lines(audit: Path) -> list[tuple[str, str]]:
    return [(line["command"], line["outcome"]) for line in map(json.loads, audit.read_text().splitlines())]


def shown(browser: Browser, path: str, **form: str) -> Answer:
    """The preview of a change."""
    form_page = browser.get(path, **{name: value for name, value in form.items() if name in IN_THE_URL})
    return browser.post(path, {**form, "token": form_page.fields["token"]})


def command(response: Answer) -> str:
    (found,) = re.findall(r'data-copy="([^"]*)"', response.text)
    return unescape(found)


def confirmed(browser: Browser, path: str, response: Answer, **typed: str) -> Answer:
    return browser.post(path, {**response.fields, **typed})


def change(browser: Browser, path: str, **form: str) -> Answer:
    """Preview and confirmation; returns the page to which the change redirects."""
    done = confirmed(browser, path, shown(browser, path, **form), typed=form.get("name", ""))
    assert done.status == 303, done.words
    return browser.get(done.headers["location"])
