"""The files that a confined process may still read, and its log line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mqd.base import paths
from mqd.security import confinement

PROGRAM = """
import errno, sys
from mqd.base import logging, paths, sandbox
from mqd.security import confinement

def missing(*_):
    raise OSError(errno.ENOSYS, "Landlock: Function not implemented")

sandbox.restrict_files = missing
logging.setup("worker", 0, {}, sys.stdout)
print(confinement.confine({"core.files.allow": sys.argv[1], "process.sandbox": sys.argv[2]}, paths.layout(sys.argv[3])))
"""


def test_symbolic_links_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like those of Kubernetes and of certbot."""
    real, named, certificates = tmp_path / "archive" / "1", tmp_path / "live", tmp_path / "certificates"
    for directory in (real, named, certificates):
        directory.mkdir(parents=True)
    (real / "key.pem").write_text("")
    (named / "key.pem").symlink_to(real / "key.pem")
    monkeypatch.setenv("SSL_CERT_DIR", str(certificates))
    for name in confinement._FILE_VARIABLES:
        if name != "SSL_CERT_DIR":
            monkeypatch.delenv(name, raising=False)
    config = {
        "listener.name.a.ssl.keystore.location": str(named / "key.pem"),
        "metrics.token.file": "",
        "sasl.oauthbearer.jwks.endpoint.url": "https://issuer.example/keys",
        "listener.name.b.sasl.oauthbearer.jwks.endpoint.url": f"file://{tmp_path}/jwks/keys.json",
    }
    assert set(confinement._configured_directories(config)) == {
        *map(str, (named, real, certificates)),
        str(tmp_path / "jwks"),
    }


def test_the_log_line(tmp_path: Path) -> None:
    places = paths.layout(tmp_path / "data")
    own = confinement._own_directories({"log.dirs": f"{tmp_path}/a,{tmp_path}/b"}, places)
    assert own == [str(places.data_dir), str(places.run_dir), f"{tmp_path}/a", f"{tmp_path}/b", "/dev/shm"]


def test_bytecode_outside_the_source_tree_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.pycache_prefix", "/somewhere/bytecode")
    assert "/somewhere/bytecode" in confinement._code_directories()


@pytest.mark.parametrize(
    ("core_files", "sandbox", "message"),
    [("true", "off", "nothing"), ("false", "off", "no core files"), ("true", "on", "no new privileges, seccomp")],
)
def test_features_the_kernel_lacks_are_left_out_and_reported(
    tmp_path: Path, core_files: str, sandbox: str, message: str
) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, core_files, sandbox, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert ran.stdout.splitlines()[-1] == message, ran.stdout + ran.stderr
    warned = "part of process.sandbox is not in force here" in ran.stdout
    assert warned == (sandbox == "on")
