"""The certificates of hosts: loading, refusals with reasons, and TLS handshakes between two of them
in memory.
"""

import datetime
import os
import re
import ssl

import pytest

from mqd.base.property_values import ConfigError
from mqd.security import host_identity, pki
from mqd.security.host_identity import WrongHost
from tests.unit.security.host_files import LONG_AGO, NOW, authority, config_of, host, write


def shake(client: ssl.SSLContext, server: ssl.SSLContext) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Both sides in memory. Raises the error of either."""
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


def test_two_hosts_authenticate_their_node_ids(tmp_path):
    one, two = host(tmp_path, 1), host(tmp_path, 2)
    initiator, responder = shake(one.client, two.server)
    assert initiator.version() == responder.version() == "TLSv1.3"
    host_identity.check_peer(initiator.getpeercert(), 2)
    host_identity.check_peer(responder.getpeercert(), 1)
    with pytest.raises(WrongHost, match="node 3 has a certificate of mqd://node/2; install"):
        host_identity.check_peer(initiator.getpeercert(), 3)
    with pytest.raises(WrongHost, match="of no host"):
        host_identity.check_peer(None, 3)


def test_hosts_of_another_authority_or_with_expired_certificates_are_refused(tmp_path):
    mine = host(tmp_path, 1)
    foreign = host(tmp_path, 2, pair=pki.issue_host(authority("another"), 2, NOW))
    old_config = config_of(tmp_path / "3", pki.issue_host(authority(), 3, LONG_AGO), 3)
    old = host_identity.load(old_config)
    cases = ((foreign, "refused: (self-signed certificate|unable to get)"), (old, "refused: certificate has expired"))
    for other, reason in cases:
        for client, server in ((mine.client, other.server), (other.client, mine.server)):
            with pytest.raises(ssl.SSLError) as failed:
                shake(client, server)
            assert re.search(reason, host_identity.reason_of(failed.value))
    with pytest.raises(ConfigError, match="expired on .*mqd cert renew"):
        host_identity.check(old_config)


def test_client_and_broker_certificates_are_not_accepted_for_hosts(tmp_path):
    for pair in (
        pki.issue(authority(), "mqd://node/1", (), NOW),
        pki.issue(authority(), "mqd host 1", ("mqd://node/1", "localhost"), NOW),
        pki.issue_host(authority(), 2, NOW),
    ):
        with pytest.raises(ConfigError, match="needs the URI mqd://node/1"):
            host_identity.load(config_of(tmp_path, pair, 1))


def test_a_renewed_host_stays_the_same_host():
    pair = pki.issue_host(authority(), 7, NOW)
    again = pki.renew(authority(), pair.certificate, NOW + datetime.timedelta(days=80))
    assert pki.is_for_host(again.certificate, 7) and not pki.is_for_host(again.certificate, 8) and again.key != pair.key
    assert pki.expiry_time(again.certificate) > pki.expiry_time(pair.certificate)


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
def test_unusable_files_are_named(tmp_path, spoil, words):
    config = config_of(tmp_path, pki.issue_host(authority(), 1, NOW), 1)
    spoil(tmp_path, config)
    with pytest.raises(ConfigError, match=words):
        host_identity.load(config)


def test_changed_files_are_used_unless_invalid(tmp_path):
    identity = host_identity.load(config_of(tmp_path, pki.issue_host(authority(), 1, NOW), 1))
    assert identity is not None and not identity.reload()
    first, server = identity.files, identity.server
    another = pki.issue_host(authority(), 1, NOW)
    write(tmp_path / "host.pem", another.key + another.certificate)
    assert identity.reload() and not identity.reload()
    assert identity.files != first and another.key in identity.files.key and identity.server is not server
    good = identity.files
    write(tmp_path / "host.pem", pki.issue_host(authority(), 1, NOW).key + another.certificate)
    with pytest.raises(ConfigError, match="cannot be used together"):
        identity.reload()
    assert identity.files is good and not identity.reload()  # logged once


def test_the_mode_and_its_description(tmp_path):
    pair = pki.issue_host(authority(), 1, NOW)
    assert host_identity.load({"node.id": "1"}) is None
    for mode, name in enumerate(host_identity.MODES[1:], 1):
        identity = host_identity.load(config_of(tmp_path, pair, 1, name))
        assert identity is not None and identity.mode == mode
        assert "PRIVATE" not in repr(identity.files)
    assert host_identity.with_absolute_paths({"cluster.tls.ca.file": "ca.pem", "node.id": "1"}) == {
        "cluster.tls.ca.file": os.path.abspath("ca.pem"),
        "node.id": "1",
    }
