"""The SASL fuzzer runs, and finds planted bugs."""

from __future__ import annotations

import hmac

import pytest

from mqd.acceptor import authentication
from mqd.security import scram
from tests.attack import fuzz_sasl


@pytest.fixture(autouse=True)
def unchanged(monkeypatch):
    """The fuzzer replaces the log and the nonces of its process."""
    monkeypatch.setattr(authentication, "log", authentication.log)
    monkeypatch.setattr(scram.secrets, "token_urlsafe", scram.secrets.token_urlsafe)


def test_it_finds_no_bug_in_the_server(capsys):
    assert fuzz_sasl.main(["--seconds", "0.2"]) == 0
    assert "no finding" in capsys.readouterr().out


def test_it_finds_a_server_that_accepts_any_proof(monkeypatch):
    monkeypatch.setattr(hmac, "compare_digest", lambda _one, _other: True)
    with pytest.raises(AssertionError):
        fuzz_sasl.main(["--seconds", "20"])
