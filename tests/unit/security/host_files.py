"""Host certificates for tests, as created by `mqd up --secure`."""

import datetime
import functools
from pathlib import Path

from mqd.security import host_identity, pki
from mqd.security.host_identity import HostIdentity
from mqd.security.pki import CertifiedKey

NOW = datetime.datetime.now(datetime.UTC)
LONG_AGO = NOW - datetime.timedelta(days=pki.CERTIFICATE_DAYS + 1)


@functools.cache
def authority(name: str = "mqd test") -> CertifiedKey:
    return pki.make_authority(name, NOW)


def write(path: Path, content: bytes, mode: int = 0o600) -> None:
    beside = path.with_suffix(".new")
    beside.write_bytes(content)
    beside.chmod(mode)
    beside.replace(path)


def config_of(folder: Path, pair: CertifiedKey, node_id: int, tls: str = "required") -> dict[str, str]:
    """One file for the certificate and its key."""
    folder.mkdir(exist_ok=True)
    write(folder / "host.pem", pair.key + pair.certificate)
    write(folder / "ca.pem", authority().certificate)
    return {
        "node.id": str(node_id),
        "cluster.tls": tls,
        "cluster.tls.certificate.file": str(folder / "host.pem"),
        "cluster.tls.ca.file": str(folder / "ca.pem"),
    }


def host(folder: Path, node_id: int, tls: str = "required", pair: CertifiedKey | None = None) -> HostIdentity:
    """`pair`: replaces the host's own, once it has started."""
    found = host_identity.load(
        config_of(folder / str(node_id), pki.issue_host(authority(), node_id, NOW), node_id, tls)
    )
    assert found is not None
    if pair is not None:
        impose(found, folder / str(node_id), pair)
    return found


def impose(identity: HostIdentity, folder: Path, pair: CertifiedKey) -> None:
    """A host that does not check its own files, as an attacker would not."""
    write(folder / "host.pem", pair.key + pair.certificate)
    checked, host_identity._check_node = host_identity._check_node, lambda certificate, path, node_id: None
    try:
        identity.reload()
    finally:
        host_identity._check_node = checked
