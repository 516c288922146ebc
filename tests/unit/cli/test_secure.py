import contextlib
import datetime
import json
import stat
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from click.testing import CliRunner

from mqd.cli import secure
from mqd.cli.common import CliError
from mqd.cli.main import cli
from mqd.security import client, pki

HOSTS = ["localhost", "127.0.0.1"]
NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)


def test_what_is_made_once_is_kept(tmp_path):
    places = secure.prepare(tmp_path, 1, HOSTS, NOW)
    before = {file: file.read_bytes() for file in places[1:]}
    assert not secure.is_secured(tmp_path / "other") and secure.is_secured(tmp_path)
    assert {file: file.read_bytes() for file in secure.prepare(tmp_path, 1, HOSTS, NOW + 30 * DAY)[1:]} == before
    for file in places[1:]:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    assert stat.S_IMODE(places.directory.stat().st_mode) == 0o700
    admin = client.read(places.admin)[0]
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
    assert third != second and pki.expires(third) > NOW + 140 * DAY
    assert places.ca.read_bytes() == ca


def test_damaged_files_are_named(tmp_path):
    places = secure.prepare(tmp_path, 1, HOSTS, NOW)
    places.broker.write_bytes(b"nonsense")
    with pytest.raises(CliError, match="are damaged"):
        secure.prepare(tmp_path, 1, HOSTS, NOW)
    places.broker.unlink()
    places.ca_key.unlink()
    with pytest.raises(CliError, match="copy ca.pem and ca.key"):
        secure.prepare(tmp_path, 1, HOSTS, NOW)


def test_two_first_starts_at_once_make_one_authority(tmp_path, monkeypatch):
    """Without a lock the second would come to this point while the first waits there."""
    made, both, make = [], threading.Barrier(2), pki.make_authority

    def make_authority(name: str, now: datetime.datetime) -> pki.Pair:
        made.append(name)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.3)
        return make(name, now)

    monkeypatch.setattr(pki, "make_authority", make_authority)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: secure.prepare(tmp_path, 1, HOSTS, NOW), range(2))
    assert first == second and len(made) == 1
    assert pki.renewed(pki.Pair(first.ca.read_bytes(), first.ca_key.read_bytes()), first.broker.read_bytes(), NOW)


def test_the_names_of_a_broker():
    config = {"listeners": "PLAINTEXT://127.0.0.1:9092", "advertised.listeners": "PLAINTEXT://broker.example:9092"}
    found = secure.hosts_of(config)
    assert {"localhost", "127.0.0.1", "::1", "broker.example"} <= set(found) and len(set(found)) == len(found)


def test_the_commands(tmp_path):
    def cert(*words: str):
        return CliRunner().invoke(cli, ["cert", *words, "--data-dir", str(tmp_path)], standalone_mode=False)

    assert "`mqd up --secure` makes them" in str(cert("status").exception)
    places = secure.prepare(tmp_path, 1, HOSTS)
    before = places.broker.read_bytes()
    found = cert("status")
    assert found.return_value == 0 and "broker.pem: until" in found.output and "89 days left" in found.output
    assert json.loads(cert("status", "--format", "json").output)["broker.pem"]["days_left"] == 89
    assert cert("renew").return_value == 0
    after = places.broker.read_bytes()
    assert after != before and pki.covers(after, HOSTS)
    out = tmp_path / "bob.pem"
    assert cert("create", "bob", "-o", str(out)).return_value == 0
    assert not pki.covers(out.read_bytes(), ["localhost"]) and stat.S_IMODE(out.stat().st_mode) == 0o600
    assert cert("create", "b2", "--host", "b2.example", "--host", "10.0.0.2", "-o", str(out)).return_value == 0
    assert pki.covers(out.read_bytes(), ["b2.example", "10.0.0.2"])
    secure.prepare(tmp_path, 1, ["another"], NOW - 85 * DAY)
    assert cert("status").return_value == 1
