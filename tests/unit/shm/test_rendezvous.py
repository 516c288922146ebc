"""How a client finds its host's broker: real sockets and directories."""

from __future__ import annotations

import os
import socket
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
def test_what_is_published_is_found(client_socket, places, bound, bootstrap):
    links = rendezvous.publish([(bound, 9092)], client_socket, places)
    assert [link.parent for link in links] == places
    found = rendezvous.find(bootstrap, places=places)
    assert found.path == str(client_socket) and "this host" in found.reason
    rendezvous.withdraw(links, client_socket)
    assert rendezvous.find(bootstrap, places=places).path is None
    assert not any(list(place.iterdir()) for place in places)


@pytest.mark.parametrize(
    "bootstrap, reason",
    [
        ("127.0.0.1:9093", "published port 9093"),
        ("192.0.2.1:9092", "not on this host"),
        ("127.0.0.2:9092", "published port 9092"),
        ("", "names no address"),
        ("no.such.host.invalid:9092", "not on this host"),
        ("127.0.0.1:x", "names no address"),
    ],
)
def test_what_is_not_there_is_not_found_and_says_why(client_socket, places, bootstrap, reason):
    rendezvous.publish([("127.0.0.1", 9092)], client_socket, places)
    found = rendezvous.find(bootstrap, places=places)
    assert found.path is None and reason in found.reason


def test_a_directory_that_others_can_write_is_not_believed(client_socket, places):
    rendezvous.publish([("0.0.0.0", 9092)], client_socket, places)
    places[0].chmod(0o777)
    assert rendezvous.find("127.0.0.1:9092", places=places[:1]) == rendezvous.Rendezvous(
        None, f"{places[0]} is not believed: others can write to it"
    )
    places[1].rename(places[1].with_name("moved"))
    places[1].symlink_to(places[1].with_name("moved"))
    assert "not a directory" in rendezvous.find("127.0.0.1:9092", places=places[1:]).reason
    assert rendezvous.publish([("0.0.0.0", 9092)], client_socket, places) == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_somebody_else_is_not_believed(client_socket, places):
    rendezvous.publish([("0.0.0.0", 9092)], client_socket, places[:1])
    os.chown(places[0], 12345, 12345)
    assert "belongs to uid 12345" in rendezvous.find("127.0.0.1:9092", places=places[:1]).reason


def test_links_of_the_dead_are_swept_and_replaced(tmp_path, client_socket, places):
    dead = tmp_path / "dead.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.fspath(dead))
        listener.listen()
        rendezvous.publish([("0.0.0.0", 9092), ("0.0.0.0", 9093)], dead, places)
    links = rendezvous.publish([("0.0.0.0", 9092)], client_socket, places)
    assert {path.name for path in places[0].iterdir()} == {"9092"}
    assert rendezvous.find("localhost:9092", places=places).path == str(client_socket)
    rendezvous.withdraw(links, dead)  # who was replaced takes nothing away
    assert rendezvous.find("localhost:9092", places=places).path == str(client_socket)


def test_a_link_that_was_made_anew_while_it_was_swept_stays(client_socket, places, monkeypatch):
    """Its broker starts again beside the one that sweeps: nobody listened there a moment ago."""
    rendezvous.publish([("0.0.0.0", 9092)], client_socket, places)
    answers, asked = rendezvous._answers, []
    monkeypatch.setattr(
        rendezvous, "_answers", lambda target: bool(asked.append(target) or len(asked) > 1) and answers(target)
    )
    rendezvous._sweep(places[0])
    assert asked == [str(client_socket)] * 2 and [path.name for path in places[0].iterdir()] == ["9092"]
    assert rendezvous.find("localhost:9092", places=places).path == str(client_socket)


def test_what_is_told_outright_comes_first(client_socket, places, monkeypatch):
    assert rendezvous.find("192.0.2.1:9092", str(client_socket), places).path == str(client_socket)
    assert rendezvous.find("192.0.2.1:9092", str(client_socket) + "x", places).path is None
    monkeypatch.setenv("MQD_SOCKET", str(client_socket))
    assert rendezvous.find("192.0.2.1:9092", places=places).path == str(client_socket)
    monkeypatch.setenv("MQD_SOCKET", "/dev/null")
    assert "MQD_SOCKET" in rendezvous.find("127.0.0.1:9092", places=places).reason


def test_directories_come_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("MQD_RUN_RENDEZVOUS", f"{tmp_path}/a:{tmp_path}/b")
    assert rendezvous.directories() == [tmp_path / "a", tmp_path / "b"]
    monkeypatch.delenv("MQD_RUN_RENDEZVOUS")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert rendezvous.directories() == [Path("/run/mqd"), Path("/run/user/7/mqd"), Path(f"/tmp/mqd-{os.getuid()}")]
