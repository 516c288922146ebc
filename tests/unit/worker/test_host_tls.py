"""The certificates of a worker: what the reactor gets of them at the start and after a change."""

import asyncio
from pathlib import Path

import pytest

from mqd.cluster.membership import credentials
from mqd.cluster.membership.credentials import Credentials
from mqd.native.tls import LISTENER_ID_HOSTS, TlsContext
from mqd.security import pki
from mqd.worker import tls
from mqd.worker.tls import TlsListeners
from tests.certificates import Authority
from tests.unit.security.host_files import NOW, authority, host, write
from tests.unit.worker.test_replication import SECRET, FakeCommands, run, until


class FakeReactor:
    def __init__(self) -> None:
        self.given: list[tuple[int, TlsContext]] = []

    def set_listener_tls(self, _token: int, listener_id: int, context: TlsContext) -> None:
        self.given.append((listener_id, context))


def made(proofs: Credentials, **more: str) -> tuple[TlsListeners, FakeReactor]:
    reactor, config = FakeReactor(), {"listeners": "PLAINTEXT://127.0.0.1:9092"}
    config |= {name.replace("_", "."): value for name, value in more.items()}
    return TlsListeners(config, reactor, FakeCommands(), b"", proofs), reactor  # type: ignore[arg-type]


def test_a_worker_without_tls_between_hosts_gives_the_reactor_nothing() -> None:
    subject, reactor = made(Credentials([SECRET]))
    subject.load()
    assert not reactor.given


def test_a_changed_host_certificate_reaches_the_reactor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "POLL_S", 0.01)
    subject, reactor = made(Credentials([SECRET], host(tmp_path, 2)))

    async def scenario() -> None:
        watching = asyncio.create_task(subject.run())
        again = pki.issue_host(authority(), 2, NOW)
        write(tmp_path / "2" / "host.pem", again.key + again.certificate)
        await until(lambda: len(reactor.given) == 2)
        watching.cancel()

    subject.load()
    run(scenario())
    assert [listener for listener, _ in reactor.given] == [LISTENER_ID_HOSTS] * 2


def test_a_certificate_whose_mode_is_corrected_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "POLL_S", 0.01)
    file = Authority().issue("broker").write(tmp_path / "broker.pem")
    subject, reactor = made(
        Credentials([SECRET]), listeners="SSL://127.0.0.1:9093", ssl_keystore_location=str(file), ssl_client_auth="none"
    )

    async def scenario() -> None:
        watching = asyncio.create_task(subject.run())
        file.chmod(0o640)
        await until(lambda: len(reactor.given) == 2)
        watching.cancel()

    subject.load()
    run(scenario())
