"""testssl.sh against a listener as `mqd up --secure` creates it: it reports no weakness, and its
handshakes disturb no client.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from mqd.cli import secure
from perf.peers.debian import program, unpack
from perf.peers.peer import Unavailable
from tests.broker import Broker
from tests.kafka_connection import KafkaConnection
from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# expected of a private CA: no public root trusts it, and it publishes no revocations
OF_OUR_OWN_AUTHORITY = {"cert_chain_of_trust", "cert_revocation"}
WEAK = ("LOW", "MEDIUM", "HIGH", "CRITICAL", "FATAL")
KINDS = ("--protocols", "--std", "--pfs", "--server-preference", "--server-defaults", "--vulnerable")
# an interrupted scan lacks some of these
FOUND = {
    **dict.fromkeys(("SSLv2", "SSLv3", "TLS1", "TLS1_1"), "not offered"),
    **dict.fromkeys(("TLS1_2", "TLS1_3"), "offered"),
    **dict.fromkeys(("heartbleed", "CCS", "secure_client_renego", "CRIME_TLS", "FREAK", "LUCKY13"), "not vulnerable"),
    "PFS_ECDHE_curves": "prime256v1 secp384r1 secp521r1 X25519",
}


def installed_or_unpacked(folder: Path) -> tuple[str, dict[str, str]]:
    """The script, and its environment. Skips the test where it is not available."""
    environment = {**os.environ, "TERM": "dumb"}
    if installed := shutil.which("testssl") or shutil.which("testssl.sh"):
        return installed, environment
    try:
        root = unpack(["testssl.sh"])
        script = program(root, "usr/bin/testssl")
    except Unavailable as error:
        pytest.skip(f"testssl.sh: {error}; apt-get install testssl.sh")
    for needed in ("hexdump", "openssl", "ps"):
        if shutil.which(needed) is None:
            pytest.skip(f"testssl.sh needs {needed}")
    # it insists on a resolver, even for an address that needs none
    resolver = folder / "bin" / "host"
    resolver.parent.mkdir()
    resolver.write_text("#!/bin/sh\nexit 1\n")
    resolver.chmod(0o755)
    environment["PATH"] = f"{environment['PATH']}:{resolver.parent}"
    return script, {**environment, "TESTSSL_INSTALL_DIR": str(root / "etc" / "testssl")}


def test_it_finds_no_weakness(tmp_path: Path) -> None:
    script, environment = installed_or_unpacked(tmp_path)
    port, report = free_port(), tmp_path / "report.json"
    places = secure.prepare(tmp_path, 1, ["127.0.0.1"])
    config = {
        "listeners": f"PLAINTEXT://127.0.0.1:0,SSL://127.0.0.1:{port}",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(places.broker),
    }
    with Broker(tmp_path / "data", config=config) as broker:
        before = {process["name"]: process["pid"] for process in broker.running()}
        quiet = ("--quiet", "--color", "0", "--warnings", "off", "--nodns", "min", "--ip", "127.0.0.1")
        own = ("--openssl", str(shutil.which("openssl")), "--jsonfile", str(report))
        done = subprocess.run(
            [script, *quiet, *own, *KINDS, f"127.0.0.1:{port}"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=800,
            stdin=subprocess.DEVNULL,
        )
        assert report.exists(), done.stdout + done.stderr
        with KafkaConnection(port=broker.port) as kafka:
            assert kafka.call(18, 3).error_code == 0
        assert {process["name"]: process["pid"] for process in broker.running()} == before
    findings = {finding["id"]: finding for finding in json.loads(report.read_text())}
    weak = [
        finding
        for name, finding in findings.items()
        if finding["severity"] in WEAK and name not in OF_OUR_OWN_AUTHORITY
    ]
    assert weak == [], done.stdout
    for name, words in FOUND.items():
        assert name in findings and findings[name]["finding"].startswith(words), (name, findings.get(name))
    assert "DH_groups" not in findings, "finite fields cost a server far more than a client"
