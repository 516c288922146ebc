"""An advertised address that does not resolve, or a refused login, is named with the remedy."""

from __future__ import annotations

import time

import pytest

confluent_kafka = pytest.importorskip("confluent_kafka")

from confluent_kafka import KafkaError, KafkaException  # noqa: E402

from mqd.cli import librdkafka  # noqa: E402
from mqd.cli.common import EXIT_UNREACHABLE  # noqa: E402

PRINTED = (
    "nohost.invalid:9092/1: Failed to resolve 'nohost.invalid:9092': Name or service not known (after 3ms in state X)"
)


@pytest.fixture(autouse=True)
def none_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(librdkafka, "_unresolved_host", "")
    monkeypatch.setattr(librdkafka, "_last_refusal", None)


@pytest.mark.parametrize("code", [KafkaError._TIMED_OUT, KafkaError._MSG_TIMED_OUT, KafkaError._ALL_BROKERS_DOWN])
def test_timeouts_by_unresolved_addresses_name_the_cause(code: int) -> None:
    error = KafkaException(KafkaError(code))
    assert "advertise" not in librdkafka.explain_kafka(error)[0]
    librdkafka.note_error(KafkaError(KafkaError._TRANSPORT, "Failed to resolve 'x'"))
    assert librdkafka.recent_error() is None
    librdkafka.note_error(KafkaError(KafkaError._RESOLVE, PRINTED))
    text, status = librdkafka.explain_kafka(error)
    assert status == EXIT_UNREACHABLE
    assert "a broker advertises nohost.invalid:9092" in text and "advertised.listeners" in text


def test_an_address_that_resolves_again_explains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The console runs for weeks, and keeps what the process has noted."""
    librdkafka.note_error(KafkaError(KafkaError._RESOLVE, PRINTED))
    assert librdkafka.recent_error() is not None
    now_s = time.monotonic()
    monkeypatch.setattr(librdkafka.time, "monotonic", lambda: now_s + librdkafka.RECENT_ERROR_S + 1)
    assert librdkafka.recent_error() is None


def test_other_errors_are_unchanged() -> None:
    librdkafka.note_error(KafkaError(KafkaError._RESOLVE, PRINTED))
    text, _ = librdkafka.explain_kafka(KafkaException(KafkaError(KafkaError.TOPIC_ALREADY_EXISTS)))
    assert "advertise" not in text


@pytest.mark.parametrize(
    ("code", "reason", "remedy"),
    [
        (KafkaError._AUTHENTICATION, "invalid credentials", "sasl.password"),
        (KafkaError._SSL, "certificate verify failed", "ssl.ca.location"),
    ],
)
def test_timeouts_by_a_refused_login_name_the_cause(code: int, reason: str, remedy: str) -> None:
    librdkafka.note_error(KafkaError(code, f"x:9092/1: failed: {reason} (after 3ms in state AUTH_REQ)"))
    for timeout in (KafkaError._TRANSPORT, KafkaError._MSG_TIMED_OUT):
        text, status = librdkafka.explain_kafka(KafkaException(KafkaError(timeout)))
        assert status == 1 and f"{reason}; " in text and remedy in text


def test_librdkafka_still_uses_this_text() -> None:
    """Its text may change: the address is parsed from it."""
    noted: list[KafkaError] = []
    client = confluent_kafka.Producer(
        {"bootstrap.servers": "nohost.invalid:9092", "log_level": 0, "error_cb": noted.append}
    )
    for _ in range(100):
        client.poll(0.1)
        if any(error.code() == KafkaError._RESOLVE for error in noted):
            break
    for error in noted:
        librdkafka.note_error(error)
    cause = librdkafka.recent_error()
    assert cause is not None and "advertises nohost.invalid:9092," in cause.message


def test_an_admin_clients_errors_are_included(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(librdkafka, "require_broker", lambda *_: None)
    monkeypatch.setattr(librdkafka, "_admin_ref", lambda: None)
    client = librdkafka.admin_client("nohost.invalid:9092")
    with pytest.raises(KafkaException) as error:
        client.list_topics(timeout=1.0)
    assert "a broker advertises nohost.invalid:9092," in librdkafka.explain_kafka(error.value)[0]
