import contextlib
import datetime
import json
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner

from mqd.base.config import BROKER
from mqd.cli import secure
from mqd.cli.common import CliError
from mqd.cli.main import cli
from mqd.security import client, host_identity, pki

HOSTS = ["localhost", "127.0.0.1"]
NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)


def test_certificates_and_keys_are_created_once(tmp_path):
    places = secure.prepare(tmp_path, 1, HOSTS, NOW)
    made = [file for file in places[1:] if file != places.plaintext_allowed]
    before = {file: file.read_bytes() for file in made}
    assert not secure.is_secured(tmp_path / "other") and secure.is_secured(tmp_path)
    assert secure.prepare(tmp_path, 1, HOSTS, NOW + 30 * DAY) == places and not places.plaintext_allowed.exists()
    assert {file: file.read_bytes() for file in made} == before
    for file in made:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    assert stat.S_IMODE(places.directory.stat().st_mode) == 0o700
    admin = client.read_properties(places.admin)[0]
    assert admin.settings["sasl.username"] == "admin" and len(admin.settings["sasl.password"]) == 32
    assert admin.has_tls and admin.has_sasl


def test_a_certificate_is_renewed_before_it_ends_and_for_new_names(tmp_path):
    places = secure.prepare(tmp_path, 1, HOSTS, NOW)
    first, ca = places.broker.read_bytes(), places.ca.read_bytes()
    secure.prepare(tmp_path, 1, [*HOSTS, "broker.example"], NOW)
    second = places.broker.read_bytes()
    assert second != first and pki.covers(second, ["broker.example"])
    secure.prepare(tmp_path, 1, HOSTS, NOW + 61 * DAY)
    third = places.broker.read_bytes()
    assert third != second and pki.expiry_time(third) > NOW + 140 * DAY
    assert places.ca.read_bytes() == ca


def config_of(tmp_path) -> dict[str, str]:
    return {**{name: row.default for name, row in BROKER.items() if row.default}, **secure.settings(tmp_path)}


def test_hosts_authenticate_with_their_own_certificates(tmp_path):
    assert secure.settings(tmp_path)["cluster.tls"] == "required", "also before there is one"
    places = secure.prepare(tmp_path, 7, HOSTS, NOW)
    assert secure.settings(tmp_path)["cluster.tls"] == "required" and secure.hosts_hint(tmp_path) == ""
    first = places.host.read_bytes()
    assert pki.is_for_host(first, 7) and not pki.is_for_host(places.broker.read_bytes(), 7)
    assert host_identity.load({**config_of(tmp_path), "node.id": "7"}) is not None
    secure.prepare(tmp_path, 7, HOSTS, NOW + 61 * DAY)
    second = places.host.read_bytes()
    assert second != first and pki.expiry_time(second) > NOW + 140 * DAY
    secure.prepare(tmp_path, 8, HOSTS, NOW + 61 * DAY)
    assert pki.is_for_host(places.host.read_bytes(), 8)


def test_a_cluster_secured_by_an_earlier_release(tmp_path):
    """Its peers may still run that release, so the first start accepts them as they are."""
    places = secure.prepare(tmp_path, 1, HOSTS, NOW)
    places.host.unlink()
    assert secure.settings(tmp_path)["cluster.tls"] == "allowed"
    for _ in range(2):  # a host that is started twice does not lock the others out
        secure.prepare(tmp_path, 1, HOSTS, NOW)
        assert places.host.exists() and secure.settings(tmp_path)["cluster.tls"] == "allowed"
        assert "mqd cert require" in secure.hosts_hint(tmp_path)
    words = ["cert", "require", "--data-dir", str(tmp_path)]
    assert CliRunner().invoke(cli, words, standalone_mode=False).return_value == 0
    assert secure.settings(tmp_path)["cluster.tls"] == "required" and secure.hosts_hint(tmp_path) == ""


def test_a_plain_cluster_is_secured_host_by_host(tmp_path):
    """The first one still has to reach the others."""
    (tmp_path / "meta.properties").write_text("cluster.id=c\n")
    assert secure.settings(tmp_path)["cluster.tls"] == "allowed"
    secure.prepare(tmp_path, 1, HOSTS, NOW)
    assert secure.settings(tmp_path)["cluster.tls"] == "allowed" and "mqd cert require" in secure.hosts_hint(tmp_path)


def test_a_single_host_secured_by_an_earlier_release(tmp_path):
    secure.prepare(tmp_path, 1, HOSTS, NOW).host.unlink()
    secure.prepare(tmp_path, 1, HOSTS, NOW, has_peers=False)
    assert secure.settings(tmp_path)["cluster.tls"] == "required"


def test_the_authoritys_key_may_be_kept_elsewhere(tmp_path):
    """An earlier release's host then starts as before, and reports the missing certificate."""
    places = secure.prepare(tmp_path / "a", 1, HOSTS, NOW)
    there = secure.prepare(tmp_path / "b", 2, HOSTS, NOW)
    for name in ("ca", "ca_key"):
        getattr(there, name).write_bytes(getattr(places, name).read_bytes())
    there.host.unlink()
    there.ca_key.unlink()
    secure.prepare(tmp_path / "b", 2, HOSTS, NOW)
    assert not there.host.exists() and secure.settings(tmp_path / "b")["cluster.tls"] == "off"
    assert "mqd cert host NODE_ID" in secure.hosts_hint(tmp_path / "b")
    words = ["cert", "host", "2", "-o", str(there.host), "--data-dir", str(tmp_path / "a")]
    assert CliRunner().invoke(cli, words, standalone_mode=False).return_value == 0
    assert secure.settings(tmp_path / "b")["cluster.tls"] == "allowed"
    assert host_identity.load({**config_of(tmp_path / "b"), "node.id": "2"}) is not None
    before = there.broker.read_bytes(), there.host.read_bytes()
    secure.prepare(tmp_path / "b", 2, [*HOSTS, "another"], NOW + 80 * DAY)  # it cannot renew them, and starts
    assert (there.broker.read_bytes(), there.host.read_bytes()) == before


def test_damaged_files_are_named(tmp_path):
    places = secure.prepare(tmp_path, 1, HOSTS, NOW)
    places.broker.write_bytes(b"nonsense")
    with pytest.raises(CliError, match="are damaged"):
        secure.prepare(tmp_path, 1, HOSTS, NOW)
    places.broker.unlink()
    places.ca_key.unlink()
    with pytest.raises(CliError, match="copy ca.pem and ca.key"):
        secure.prepare(tmp_path, 1, HOSTS, NOW)


def test_two_concurrent_first_starts_create_one_authority(tmp_path, monkeypatch):
    """Without a lock the second would get here while the first waits here."""
    made, both, make = [], threading.Barrier(2), pki.make_authority

    def make_authority(name: str, now: datetime.datetime) -> pki.CertifiedKey:
        made.append(name)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.3)
        return make(name, now)

    monkeypatch.setattr(pki, "make_authority", make_authority)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: secure.prepare(tmp_path, 1, HOSTS, NOW), range(2))
    assert first == second and len(made) == 1
    assert pki.renew(pki.CertifiedKey(first.ca.read_bytes(), first.ca_key.read_bytes()), first.broker.read_bytes(), NOW)


def test_the_names_of_a_broker():
    config = {"listeners": "PLAINTEXT://127.0.0.1:9092", "advertised.listeners": "PLAINTEXT://broker.example:9092"}
    found = secure.hosts_of(config)
    assert {"localhost", "127.0.0.1", "::1", "broker.example"} <= set(found) and len(set(found)) == len(found)


def test_the_commands(tmp_path):
    def cert(*words: str):
        return CliRunner().invoke(cli, ["cert", *words, "--data-dir", str(tmp_path)], standalone_mode=False)

    assert "`mqd up --secure` creates them" in str(cert("status").exception)
    places = secure.prepare(tmp_path, 1, HOSTS)
    before = places.broker.read_bytes()
    found = cert("status")
    assert found.return_value == 0 and "broker.pem: until" in found.output and "89 days left" in found.output
    shown = json.loads(cert("status", "--format", "json").output)
    assert shown["broker.pem"]["days_left"] == shown["host.pem"]["days_left"] == 89
    host = places.host.read_bytes()
    renewed = cert("renew")
    assert renewed.return_value == 0 and "/broker.pem is renewed" in renewed.output
    assert "/host.pem is renewed" in renewed.output
    assert places.host.read_bytes() != host and pki.is_for_host(places.host.read_bytes(), 1)
    after = places.broker.read_bytes()
    assert after != before and pki.covers(after, HOSTS)
    out = tmp_path / "bob.pem"
    assert cert("create", "bob", "-o", str(out)).return_value == 0
    assert not pki.covers(out.read_bytes(), ["localhost"]) and stat.S_IMODE(out.stat().st_mode) == 0o600
    assert cert("create", "b2", "--host", "b2.example", "--host", "10.0.0.2", "-o", str(out)).return_value == 0
    assert pki.covers(out.read_bytes(), ["b2.example", "10.0.0.2"])
    assert cert("create", "mqd host 1", "--host", pki.node_uri(1), "-o", str(out)).return_value == 0
    assert not pki.is_for_host(out.read_bytes(), 1), "no client becomes a host"
    secure.prepare(tmp_path, 1, ["another"], NOW - 85 * DAY)
    assert cert("status").return_value == 1


def test_a_start_imports_only_what_it_needs(tmp_path: Path) -> None:
    """Without --secure no cryptography, without such names no IDNA tables: a third of the earlier
    CPU time of `mqd up`. A worker does not import the controller's rules.
    """
    program = (
        "import sys\nfrom pathlib import Path\nfrom mqd.cli.verbs import up\n"
        "up._preflight(up._load_settings(Path(sys.argv[1]), None, {}, 0, False)[0])\nimport mqd.worker.worker\n"
        "unused = ('cryptography', 'encodings.idna', 'mqd.cluster.metadata.core')\n"
        "print([name for name in sys.modules if name.startswith(unused)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"


def test_supervisord_gets_the_values_in_force(tmp_path, monkeypatch):
    """The variables that are printed outrank the file, so they must not be the defaults of --secure."""
    config = tmp_path / "mqd.properties"
    config.write_text("sasl.enabled.mechanisms=PLAIN\n")
    monkeypatch.setenv("MQD_SUPER_USERS", "User:ops")
    words = ["up", "--data-dir", str(tmp_path / "data"), "--secure", "--config", str(config)]
    printed = CliRunner().invoke(cli, [*words, "--print-supervisord", "include"])
    assert printed.exit_code == 0, printed.output
    assert 'MQD_SASL_ENABLED_MECHANISMS="PLAIN"' in printed.output
    assert 'MQD_SUPER_USERS="User:ops"' in printed.output
