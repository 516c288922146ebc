"""The certificates of hosts: what is loaded, what is refused and why, and two of them shaking hands
in memory.
"""

import datetime
import os
import re
import ssl
from pathlib import Path

import pytest

from mqd.base.property_values import ConfigError
from mqd.security import host_identity, pki
from mqd.security.host_identity import NotThatHost
from mqd.security.pki import Pair

NOW = datetime.datetime.now(datetime.UTC)


@pytest.fixture(scope="module")
def authority() -> Pair:
    return pki.make_authority("mqd test", NOW)


@pytest.fixture(scope="module")
def stranger() -> Pair:
    return pki.make_authority("mqd test", NOW)


def write(path: Path, content: bytes, mode: int = 0o600) -> None:
    beside = path.with_suffix(".new")
    beside.write_bytes(content)
    beside.chmod(mode)
    beside.replace(path)


def config_of(folder: Path, pair: Pair, trusted: Pair, node_id: int, tls: str = "required") -> dict[str, str]:
    """One file for the certificate and its key, as `mqd up --secure` makes it."""
    folder.mkdir(exist_ok=True)
    write(folder / "host.pem", pair.key + pair.certificate)
    write(folder / "ca.pem", trusted.certificate)
    return {
        "node.id": str(node_id),
        "cluster.tls": tls,
        "cluster.tls.certificate.file": str(folder / "host.pem"),
        "cluster.tls.ca.file": str(folder / "ca.pem"),
    }


def shake(client: ssl.SSLContext, server: ssl.SSLContext) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Both sides in memory. Raises what either met."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)
    left = set(sides)
    for _ in range(8):
        for side in list(left):
            try:
                side.do_handshake()
                left.discard(side)
            except ssl.SSLWantReadError:
                pass
    assert not left
    return sides


def test_two_hosts_prove_their_node_ids(tmp_path, authority):
    one, two = (
        host_identity.load(config_of(tmp_path / str(node), pki.issue_host(authority, node, NOW), authority, node))
        for node in (1, 2)
    )
    assert one is not None and two is not None
    initiator, responder = shake(one.client, two.server)
    assert initiator.version() == responder.version() == "TLSv1.3"
    host_identity.check_peer(initiator.getpeercert(), 2)
    host_identity.check_peer(responder.getpeercert(), 1)
    with pytest.raises(NotThatHost, match=r"says that it is node 3, but its certificate is of mqd://node/2"):
        host_identity.check_peer(initiator.getpeercert(), 3)
    with pytest.raises(NotThatHost, match="of no host"):
        host_identity.check_peer(None, 3)


def test_no_host_of_another_authority_nor_of_the_past(tmp_path, authority, stranger):
    mine = host_identity.load(config_of(tmp_path / "1", pki.issue_host(authority, 1, NOW), authority, 1))
    foreign = host_identity.load(config_of(tmp_path / "2", pki.issue_host(stranger, 2, NOW), authority, 2))
    long_ago = NOW - datetime.timedelta(days=pki.CERTIFICATE_DAYS + 1)
    old_config = config_of(tmp_path / "3", pki.issue_host(authority, 3, long_ago), authority, 3)
    old = host_identity.load(old_config)
    cases = ((foreign, "refused: (self-signed certificate|unable to get)"), (old, "refused: certificate has expired"))
    for other, reason in cases:
        for client, server in ((mine.client, other.server), (other.client, mine.server)):
            with pytest.raises(ssl.SSLError) as failed:
                shake(client, server)
            assert re.search(reason, host_identity.reason_of(failed.value))
    with pytest.raises(ConfigError, match="has ended on .*mqd cert renew"):
        host_identity.check(old_config)


def test_a_client_or_broker_certificate_is_no_host(tmp_path, authority):
    for pair in (
        pki.issue(authority, "mqd://node/1", (), NOW),
        pki.issue(authority, "mqd host 1", ("mqd://node/1", "localhost"), NOW),
        pki.issue_host(authority, 2, NOW),
    ):
        with pytest.raises(ConfigError, match="needs the URI mqd://node/1"):
            host_identity.load(config_of(tmp_path, pair, authority, 1))


def test_a_renewed_host_stays_the_same_host(authority):
    pair = pki.issue_host(authority, 7, NOW)
    again = pki.renewed(authority, pair.certificate, NOW + datetime.timedelta(days=80))
    assert pki.is_host(again.certificate, 7) and not pki.is_host(again.certificate, 8) and again.key != pair.key
    assert pki.expires(again.certificate) > pki.expires(pair.certificate)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder, config: config.pop("cluster.tls.ca.file"), "needs cluster.tls.ca.file; `mqd up --secure`"),
        (lambda folder, config: (folder / "ca.pem").unlink(), "ca.pem cannot be read: No such file"),
        (lambda folder, config: write(folder / "ca.pem", b""), "ca.pem is empty"),
        (lambda folder, config: write(folder / "ca.pem", b"nonsense"), "cannot be used together"),
        (lambda folder, config: (folder / "host.pem").chmod(0o644), "can be read by others on this machine: chmod 600"),
        (lambda folder, config: write(folder / "host.pem", b"nonsense"), "has no certificate"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path, authority, spoil, words):
    config = config_of(tmp_path, pki.issue_host(authority, 1, NOW), authority, 1)
    spoil(tmp_path, config)
    with pytest.raises(ConfigError, match=words):
        host_identity.load(config)


def test_changed_files_are_used_and_nonsense_is_not(tmp_path, authority, stranger):
    identity = host_identity.load(config_of(tmp_path, pki.issue_host(authority, 1, NOW), authority, 1))
    assert identity is not None and not identity.reload()
    first, server = identity.files, identity.server
    another = pki.issue_host(authority, 1, NOW)
    write(tmp_path / "host.pem", another.key + another.certificate)
    assert identity.reload() and not identity.reload()
    assert identity.files != first and another.key in identity.files.key and identity.server is not server
    good = identity.files
    write(tmp_path / "host.pem", pki.issue_host(authority, 1, NOW).key + another.certificate)
    with pytest.raises(ConfigError, match="cannot be used together"):
        identity.reload()
    assert identity.files is good and not identity.reload()  # said once


def test_the_mode_and_what_is_shown(tmp_path, authority):
    pair = pki.issue_host(authority, 1, NOW)
    assert host_identity.load({"node.id": "1"}) is None
    for mode, name in enumerate(host_identity.MODES[1:], 1):
        identity = host_identity.load(config_of(tmp_path, pair, authority, 1, name))
        assert identity is not None and identity.mode == mode
        assert "PRIVATE" not in repr(identity.files)
    assert host_identity.absolute({"cluster.tls.ca.file": "ca.pem", "node.id": "1"}) == {
        "cluster.tls.ca.file": os.path.abspath("ca.pem"),
        "node.id": "1",
    }
