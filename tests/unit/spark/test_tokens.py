"""A delegation token instead of a query's password: its options and its renewal. Broker and clock
are simulated: waiting advances the time.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from mqd.protocol import messages as m
from mqd.protocol.errors import ErrorCode
from mqd.security import client
from mqd.spark import tokens
from mqd.spark.options import MqdOptionError
from mqd.spark.tokens import DelegationToken
from mqd.spark.wire import MqdReadError

OPTIONS = {
    "kafka.bootstrap.servers": "h:9092",
    "kafka.security.protocol": "SASL_SSL",
    "kafka.ssl.truststore.location": "/ca.pem",
    "kafka.sasl.mechanism": "SCRAM-SHA-256",
    "kafka.sasl.jaas.config": client.jaas_config("scram.ScramLoginModule", "alice", "s3cret"),
    "Subscribe": "t",
}


NOW_S = 1_700_000_000.0


class Clock:
    def __init__(self) -> None:
        self.now_s = NOW_S

    def time(self) -> float:
        return self.now_s


CLOCK = Clock()


class Event(threading.Event):
    def wait(self, timeout: float | None = None) -> bool:
        CLOCK.now_s += timeout or 0.0
        return self.is_set()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    CLOCK.now_s = NOW_S
    monkeypatch.setattr(tokens, "time", CLOCK)
    monkeypatch.setattr(tokens, "threading", SimpleNamespace(Event=Event, Thread=threading.Thread))


class Played:
    """Cluster and link in one. `says`: for each renewal, the milliseconds to live, or an error."""

    def __init__(self, lives_ms: int = 60_000, max_ms: int = 600_000, says: tuple = (), error: int = 0) -> None:
        self.lives_ms, self.max_ms, self.error = lives_ms, max_ms, error
        self.says = list(says)
        self.requested: list[Any] = []
        self.renewed_at_s: list[float] = []

    def any_connection(self) -> Played:
        return self

    def close(self) -> None:
        pass

    def request(self, request: Any) -> Any:
        self.requested.append(request)
        now_ms = int(CLOCK.now_s * 1000)
        if isinstance(request, m.CreateDelegationTokenRequest):
            return m.CreateDelegationTokenResponse(
                error_code=self.error,
                token_id="id",
                hmac=b"hmac",
                issue_timestamp_ms=now_ms,
                expiry_timestamp_ms=now_ms + self.lives_ms,
                max_timestamp_ms=now_ms + self.max_ms,
            )
        if isinstance(request, m.ExpireDelegationTokenRequest):
            return m.ExpireDelegationTokenResponse()
        self.renewed_at_s.append(CLOCK.now_s - NOW_S)
        message = self.says.pop(0)
        if isinstance(message, Exception):
            raise message
        return m.RenewDelegationTokenResponse(expiry_timestamp_ms=now_ms + message)


def played(monkeypatch: pytest.MonkeyPatch, **more: Any) -> Played:
    cluster = Played(**more)
    monkeypatch.setattr(tokens, "Cluster", lambda settings: cluster)
    return cluster


def test_the_options_have_the_token_in_place_of_the_password(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = played(monkeypatch, max_ms=60_000)
    with DelegationToken(OPTIONS, max_lifetime_s=90) as token:
        assert cluster.requested[0].max_lifetime_ms == 90_000
    assert cluster.requested[-1].hmac == b"hmac" and cluster.requested[-1].expiry_time_period_ms == -1
    assert token.options == {
        **OPTIONS,
        "kafka.sasl.jaas.config": client.jaas_config("scram.ScramLoginModule", "id", "aG1hYw==", is_token=True),
    }
    plain = {**OPTIONS, "kafka.sasl.mechanism": "PLAIN"}
    with DelegationToken(plain) as token:
        assert token.options["kafka.sasl.mechanism"] == "SCRAM-SHA-512", "tokens are for SCRAM alone"


def test_it_is_renewed_repeatedly_and_failures_are_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """After two thirds of each lifetime; a closed connection does not stop the renewals."""
    gone = OSError("gone")
    says = (60_000, gone, 90_000, gone, gone, 90_000, MqdReadError("not now"), 600_000)
    cluster = played(monkeypatch, says=says)
    with DelegationToken(OPTIONS) as token:
        token._renewer.join(20)
    assert cluster.renewed_at_s == [40, 80, 80, 140, 140, *cluster.renewed_at_s[5:]]
    assert not cluster.says and token.expires_ms > token.max_ms


def test_renewals_end_at_the_maximum_lifetime(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = played(monkeypatch, lives_ms=1000, max_ms=1000)
    with DelegationToken(OPTIONS) as token:
        token._renewer.join(20)
        assert not token._renewer.is_alive(), "it cannot live longer"
    assert not cluster.renewed_at_s
    cluster = played(monkeypatch, says=(MqdReadError("no"),) * 100)
    with DelegationToken(OPTIONS) as token:
        token._renewer.join(20)
        assert not token._renewer.is_alive()
    assert "has expired" in caplog.text and len(cluster.renewed_at_s) < 10


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    played(monkeypatch, error=int(ErrorCode.DELEGATION_TOKEN_AUTH_DISABLED))
    with pytest.raises(MqdReadError, match="DELEGATION_TOKEN_AUTH_DISABLED"):
        DelegationToken(OPTIONS)
    for protocol in ("PLAINTEXT", "SSL"):
        options = {"kafka.bootstrap.servers": "h:9092", "kafka.security.protocol": protocol}
        with pytest.raises(MqdOptionError, match=f"needs a listener with SASL, not {protocol}"):
            DelegationToken(options)
