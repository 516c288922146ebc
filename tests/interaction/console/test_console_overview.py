"""The first pages of `mqd console`, and the rights with which they act, against a real broker."""

from __future__ import annotations

import urllib.request

from mqd.cli.verbs import status
from tests.console_client import Answer, Browser, options
from tests.interaction.security.secured import PASSWORDS, Secured


def log_in(browser: Browser, user: str, password: str) -> Answer:
    form = {"token": browser.get("/login").fields["token"], "to": "/cluster", "user": user, "password": password}
    return browser.post("/login", form)


def test_the_overview_states_that_all_is_well(browser: Browser) -> None:
    response = browser.get("/")
    assert response.status == 200
    assert "Healthy: 1 broker online" in response.words and "0 without a leader" in response.words


def test_the_cluster_page_shows_brokers_disks_and_controllers(secured: Secured, browser: Browser) -> None:
    response = browser.get("/cluster")
    assert response.status == 200 and "Not shown" not in response.words
    assert "online controller" in response.words and str(secured.broker.data_dir) in response.words
    assert "Offline and under-replicated partitions None." in response.words


def test_rates_come_from_the_metrics_page(secured: Secured) -> None:
    url = status.broker_status(secured.broker.data_dir)["metrics_url"]
    browser = Browser(options(secured.broker.bootstrap, metrics=(url,)))
    sampler = browser.app._app.state.console.metrics
    sampler.sample()
    assert "read twice" in browser.get("/").words
    sampler.sample()
    words = browser.get("/").words
    assert "0 /s Records in, peak 0/s" in words and "free on the fullest disk" in words
    with urllib.request.urlopen(url) as page:
        assert "mqd_produce_seconds_bucket" in page.read().decode()  # a name that metrics.py depends on


def test_metrics_that_cannot_be_read_are_reported(secured: Secured) -> None:
    browser = Browser(options(secured.broker.bootstrap, metrics=("http://127.0.0.1:1/metrics",)))
    browser.app._app.state.console.metrics.sample()
    assert "Not shown: metrics of http://127.0.0.1:1/metrics" in browser.get("/").words


def test_an_unavailable_broker_is_reported_on_every_page() -> None:
    browser = Browser(options("127.0.0.1:1"))
    for path in ("/", "/cluster"):
        response = browser.get(path)
        assert response.status == 503 and "cannot reach a broker at 127.0.0.1:1" in response.words, path
        assert 'data-refresh="' in response.text, "it recovers by itself"


def test_a_user_acts_by_its_own_rights(login_browser: Browser) -> None:
    wrong = log_in(login_browser, "alice", "guess")
    assert wrong.status == 403 and "not authenticated" in wrong.words and "guess" not in wrong.text

    before = dict(login_browser.cookies)
    inside = log_in(login_browser, "alice", PASSWORDS["alice"])
    assert inside.status == 303 and inside.headers["location"] == "/cluster"
    assert login_browser.cookies != before, "a cookie from before the login is worth nothing"
    assert "Healthy: 1 broker" in login_browser.get("/").words

    other = Browser(options("127.0.0.1:1"), login_browser.app)
    assert log_in(other, "bob", PASSWORDS["bob"]).status == 303
    words = other.get("/").words  # nothing from alice's cached pages
    assert "only what you are authorized to see" in words and "Not shown: controllers: " in words

    left = login_browser.post("/logout", {"token": login_browser.get("/").fields["token"]})
    assert left.status == 303 and login_browser.get("/").status == 303
    assert other.get("/").status == 200
