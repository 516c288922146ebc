"""How a client finds the broker on its host: real sockets and directories."""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqd.shm import rendezvous


@pytest.fixture
def client_socket(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "client.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.fspath(path))
        listener.listen()
        yield path


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    return [tmp_path / "first", tmp_path / "second"]


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MQD_SOCKET", raising=False)


@pytest.mark.parametrize(
    "bound, bootstrap",
    [
        ("0.0.0.0", "localhost:9092"),
        ("0.0.0.0", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.9:9092"),
        ("::", "[::1]:9092"),
        ("127.0.0.1", "127.0.0.1:9092"),
        ("127.0.0.1", "localhost"),
        ("::ffff:127.0.0.1", "127.0.0.1:9092"),
        ("127.0.0.1", "PLAINTEXT://127.0.0.1:9092"),
        ("127.0.0.1", "192.0.2.1:9092, 127.0.0.1:9092"),
    ],
)
def test_published_sockets_are_found(client_socket, places, bound, bootstrap):
    links = rendezvous.publish([(bound, 9092)], client_socket, places)
    assert [one.link.parent for one in links] == places
    found = rendezvous.find(bootstrap, search_dirs=places)
    assert found.path == str(client_socket) and "this host" in found.reason
    assert found.server in rendezvous.server_names([(bound, 9092)]) and len(found.server) < 72
    rendezvous.withdraw(links)
    assert rendezvous.find(bootstrap, search_dirs=places).path is None
    assert not any(list(place.iterdir()) for place in places)


@pytest.mark.parametrize(
    "bootstrap, reason",
    [
        ("127.0.0.1:9093", "published port 9093"),
        ("192.0.2.1:9092", "not on this host"),
        ("127.0.0.2:9092", "published port 9092"),
        ("", "has no address"),
        ("no.such.host.invalid:9092", "not on this host"),
        ("127.0.0.1:x", "has no address"),
    ],
)
def test_missing_sockets_are_reported_with_a_reason(client_socket, places, bootstrap, reason):
    rendezvous.publish([("127.0.0.1", 9092)], client_socket, places)
    found = rendezvous.find(bootstrap, search_dirs=places)
    assert found.path is None and reason in found.reason


def test_a_directory_that_others_can_write_is_not_trusted(client_socket, places):
    rendezvous.publish([("0.0.0.0", 9092)], client_socket, places)
    places[0].chmod(0o777)
    assert rendezvous.find("127.0.0.1:9092", search_dirs=places[:1]) == rendezvous.Rendezvous(
        None, f"{places[0]} is not trusted: others can write to it"
    )
    places[1].rename(places[1].with_name("moved"))
    places[1].symlink_to(places[1].with_name("moved"))
    assert "not a directory" in rendezvous.find("127.0.0.1:9092", search_dirs=places[1:]).reason
    assert rendezvous.publish([("0.0.0.0", 9092)], client_socket, places) == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_another_users_directory_is_trusted_only_if_root_must_have_created_it(client_socket, places):
    """/run/mqd belongs to the broker's user, by systemd's RuntimeDirectory= or as in the manual."""
    rendezvous.publish([("0.0.0.0", 9092)], client_socket, places[:1])
    os.chown(places[0], 12345, 12345)
    places[0].chmod(0o775)
    assert rendezvous.find("127.0.0.1:9092", search_dirs=places[:1]).path == str(client_socket)
    places[0].parent.chmod(0o1777)  # like /tmp: any user could have created it
    assert "belongs to uid 12345" in rendezvous.find("127.0.0.1:9092", search_dirs=places[:1]).reason
    places[0].parent.chmod(0o700)
    os.chown(places[0].parent, 12345, 12345)
    assert "belongs to uid 12345" in rendezvous.find("127.0.0.1:9092", search_dirs=places[:1]).reason


_DEAD_BROKER = """
import os, signal, sys
from pathlib import Path
from mqd.shm import rendezvous
assert rendezvous.publish([("0.0.0.0", 9092), ("0.0.0.0", 9093)], sys.argv[1], [Path(sys.argv[2])])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_other_files_in_a_rendezvous_directory_are_left_alone(tmp_path, client_socket, places):
    """A runtime directory also has pid files, a home directory anything."""
    places[0].mkdir(mode=0o700)
    (places[0] / "mqd.pid").write_text("7")
    (places[0] / "current").symlink_to(tmp_path)
    (places[0] / "127.0.0.1@9092.net-1-2").write_text("not a link")
    before = sorted(places[0].iterdir())
    rendezvous.withdraw(rendezvous.publish([("127.0.0.1", 9092)], client_socket, places[:1]))
    assert sorted(places[0].iterdir()) == before


def test_links_of_dead_brokers_are_removed_and_replaced(tmp_path, client_socket, places):
    subprocess.run([sys.executable, "-c", _DEAD_BROKER, tmp_path / "dead.sock", places[0]])
    assert len(list(places[0].iterdir())) == 4
    links = rendezvous.publish([("0.0.0.0", 9092)], client_socket, places[:1])
    name = rendezvous.server_name("0.0.0.0", 9092)
    assert {path.name for path in places[0].iterdir()} == {name, f".{name}.lock"}
    assert rendezvous.find("localhost:9092", search_dirs=places).path == str(client_socket)
    rendezvous.withdraw(links)
    assert list(places[0].iterdir()) == []


def test_a_link_of_a_live_broker_is_neither_replaced_nor_removed(tmp_path, client_socket, places):
    """Even if nothing seems to listen: its path is that of another container."""
    elsewhere = tmp_path / "not-in-this-container.sock"
    links = rendezvous.publish([("0.0.0.0", 9092)], elsewhere, places[:1])
    assert rendezvous.publish([("0.0.0.0", 9092)], client_socket, places[:1]) == []
    assert [os.readlink(one.link) for one in links] == [str(elsewhere)]
    rendezvous.withdraw(links)
    assert len(rendezvous.publish([("0.0.0.0", 9092)], client_socket, places[:1])) == 1


def test_brokers_of_two_network_namespaces_have_a_name_each(tmp_path, client_socket, places, monkeypatch):
    here = rendezvous.publish([("127.0.0.1", 9092)], client_socket, places[:1])
    own = rendezvous.network_namespace()
    monkeypatch.setattr(rendezvous, "network_namespace", lambda: "f0000001-00000000")
    assert rendezvous.find("127.0.0.1:9092", search_dirs=places[:1]).path is None
    there = rendezvous.publish([("127.0.0.1", 9092)], tmp_path / "other.sock", places[:1])
    monkeypatch.setattr(rendezvous, "network_namespace", lambda: own)
    assert rendezvous.find("127.0.0.1:9092", search_dirs=places[:1]).path == str(client_socket)
    rendezvous.withdraw(there)
    assert rendezvous.find("127.0.0.1:9092", search_dirs=places[:1]).path == str(client_socket)
    rendezvous.withdraw(here)


def test_without_proc_no_broker_is_found(client_socket, places, monkeypatch):
    def missing() -> str:
        raise FileNotFoundError("/proc/self/ns/net")

    monkeypatch.setattr(rendezvous, "network_namespace", missing)
    assert rendezvous.publish([("0.0.0.0", 9092)], client_socket, places) == []
    assert "network namespace is not known" in rendezvous.find("127.0.0.1:9092", search_dirs=places).reason


def test_the_home_directory_is_the_last_resort(tmp_path, client_socket):
    first, home = tmp_path / "first", tmp_path / ".mqd"
    made = rendezvous.publish([("0.0.0.0", 9092)], client_socket, [tmp_path / "no" / "parent", home])
    assert [one.link.parent for one in made] == [home] and home.stat().st_mode & 0o777 == 0o700
    rendezvous.withdraw(made)
    made = rendezvous.publish([("0.0.0.0", 9092)], client_socket, [first, home])
    assert [one.link.parent for one in made] == [first]


def test_a_configured_socket_comes_first(client_socket, places, monkeypatch):
    assert rendezvous.find("192.0.2.1:9092", str(client_socket), places).path == str(client_socket)
    assert rendezvous.find("192.0.2.1:9092", str(client_socket) + "x", places).path is None
    monkeypatch.setenv("MQD_SOCKET", str(client_socket))
    assert rendezvous.find("192.0.2.1:9092", search_dirs=places).path == str(client_socket)
    monkeypatch.setenv("MQD_SOCKET", "/dev/null")
    assert "MQD_SOCKET" in rendezvous.find("127.0.0.1:9092", search_dirs=places).reason


def test_directories_come_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("MQD_RUN_RENDEZVOUS", f"{tmp_path}/a:{tmp_path}/b")
    assert rendezvous.directories() == [tmp_path / "a", tmp_path / "b"]
    monkeypatch.delenv("MQD_RUN_RENDEZVOUS")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    home = Path(pwd.getpwuid(os.getuid()).pw_dir) / ".mqd"
    assert rendezvous.directories() == [Path("/run/mqd"), Path("/run/user/7/mqd"), home]
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert rendezvous.directories() == [Path("/run/mqd"), Path(f"/run/user/{os.getuid()}/mqd"), home]
