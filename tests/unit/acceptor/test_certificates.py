"""Certificates that expire: log lines at each stage, and metrics."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from mqd.acceptor import certificates
from mqd.acceptor.certificates import Certificates, due_warning
from mqd.base.config import load_broker
from tests.certificates import Authority

NOW = datetime.datetime(2026, 11, 26, tzinfo=datetime.UTC)
DAY = datetime.timedelta(days=1)
SECOND = datetime.timedelta(seconds=1)


@pytest.mark.parametrize(
    ("left", "due"),
    [
        (31 * DAY, None),
        (30 * DAY + SECOND, None),
        (30 * DAY, 30),
        (14 * DAY + SECOND, 30),
        (14 * DAY, 14),
        (7 * DAY, 7),
        (DAY, 1),
        (SECOND, 1),
        (0 * DAY, -1),
        (-DAY, -2),
    ],
)
def test_the_stages(left: datetime.timedelta, due: int | None) -> None:
    assert due_warning(NOW + left, NOW) == due


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []

    def report(level: str) -> Callable[..., None]:
        return lambda text, **fields: found.append((level, f"{text} {fields}"))

    monkeypatch.setattr(certificates, "log", SimpleNamespace(warning=report("warning"), error=report("error")))
    return found


def test_each_stage_is_logged_once_and_a_new_certificate_ends_it(tmp_path: Path, logged: list[tuple[str, str]]) -> None:
    authority = Authority()
    keystore = authority.issue("broker", days=9).write(tmp_path / "keystore.pem")
    other = authority.issue("metrics", days=3)
    other.write_pkcs12(tmp_path / "metrics.p12", "secret")
    config = load_broker(
        None,
        {},
        {
            "listeners": "SSL://127.0.0.1:0",
            "ssl.keystore.location": str(keystore),
            "metrics.listener": "https://127.0.0.1:0",
            "listener.name.metrics.ssl.keystore.location": str(tmp_path / "metrics.p12"),
            "listener.name.metrics.ssl.keystore.password": "secret",
        },
    )
    watched, now = Certificates(config), datetime.datetime.now(datetime.UTC)
    watched.check(now)
    watched.check(now + SECOND)
    assert [level for level, _ in logged] == ["warning", "warning"]
    assert "of listener SSL expires soon" in logged[0][1] and "of listener METRICS" in logged[1][1]
    assert watched.expiries_s["METRICS"] == pytest.approx((now + 3 * DAY).timestamp(), abs=60)
    logged.clear()
    watched.check(now + 3 * DAY)
    assert [level for level, _ in logged] == ["warning", "error"]
    assert "'days_left': 5" in logged[0][1] and "METRICS has expired" in logged[1][1]
    logged.clear()
    authority.issue("broker", days=9).write(tmp_path / "new").replace(keystore)
    (tmp_path / "metrics.p12").write_bytes(b"nonsense")
    watched.check(now)
    assert [level for level, _ in logged] == ["warning", "warning"]  # another certificate; the certificate in use
    assert set(watched.expiries_s) == {"SSL", "METRICS"}


def test_a_broker_without_tls_has_nothing_to_watch() -> None:
    watched = Certificates(load_broker(None, {}, {}))
    watched.check(NOW)
    assert watched.expiries_s == {}
