"""The directory of sockets in /tmp, which other users could have created first."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from mqd.base import paths
from mqd.cli.common import explain
from mqd.shm import locks, tools
from mqd.shm.attach import KeeperDenied, connect_keeper

NOT_OURS = "is not a directory that only this user can write"


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A path too long for sockets below it; /tmp is a private one, and short wherever TMPDIR is."""
    with tempfile.TemporaryDirectory(prefix="mqd-", dir="/tmp") as shared:
        monkeypatch.setattr(paths, "SHARED_DIR", Path(shared))
        yield tmp_path / ("d" * 120)


def as_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process runs as a user other than the owner of the file."""
    uid = os.getuid() + 1
    monkeypatch.setattr(paths, "os", SimpleNamespace(**{**vars(os), "getuid": lambda: uid}))


def test_an_own_directory_is_created_and_restricted(data_dir: Path) -> None:
    places = paths.layout(data_dir)
    assert places.run_dir.parent == paths.SHARED_DIR and not places.run_dir.exists()
    paths.create(places)
    assert places.run_dir.stat().st_mode & 0o777 == 0o700
    places.run_dir.chmod(0o755)
    paths.create(paths.layout(data_dir))
    assert places.run_dir.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kind", ["link", "file", "writable", "other"])
def test_a_directory_that_another_user_could_have_created_is_refused(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """By everything that looks for it: up, down, status, the processes; and by up if it appears
    later.
    """
    before = paths.layout(data_dir)
    if kind == "other":
        as_another(monkeypatch)
        before = paths.layout(data_dir)
    run = before.run_dir
    if kind == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        run.symlink_to(tmp_path / "elsewhere")
    elif kind == "file":
        run.write_text("")
    else:
        run.mkdir()
        run.chmod(0o777 if kind == "writable" else 0o700)
    with pytest.raises(PermissionError, match=NOT_OURS) as error:
        paths.layout(data_dir)
    assert "choose a shorter --data-dir" in explain(error.value)[0]
    with pytest.raises(PermissionError, match=NOT_OURS):
        paths.create(before)


def test_the_process_behind_the_socket_must_run_as_this_user(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would name the process that `mqd down` kills."""
    places = paths.layout(data_dir)
    paths.create(places)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(places.keeper_socket))
        listener.listen()
        connect_keeper(places.keeper_socket).close()
        as_another(monkeypatch)
        if os.getuid() != 0:  # root is trusted
            with pytest.raises(KeeperDenied, match="another user"):
                connect_keeper(places.keeper_socket)
        monkeypatch.setattr("mqd.shm.attach.peer_credentials", lambda _connection: (1, 4321))
        with pytest.raises(KeeperDenied, match="uid 4321"):
            connect_keeper(places.keeper_socket)


def test_a_lock_of_another_user_names_no_process(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = paths.layout(data_dir)
    paths.create(places)
    fd = locks.lock_file(places.supervisor_lock)
    os.pwrite(fd, b"77\n", 0)
    try:
        assert tools.lock_holder_pid(places.supervisor_lock) == 77
        monkeypatch.setattr(tools, "trusts", lambda run, uid: run.parent != paths.SHARED_DIR)
        assert tools.lock_holder_pid(places.supervisor_lock) == 0
    finally:
        os.close(fd)


def test_in_a_data_directory_its_permissions_suffice(tmp_path: Path) -> None:
    """root runs the command for another user's broker."""
    assert paths.trusts(tmp_path / "run", os.getuid() + 1)
    assert not paths.trusts(paths.SHARED_DIR / "mqd-1-x", os.getuid() + 1)
    assert paths.trusts(paths.SHARED_DIR / "mqd-1-x", os.getuid())
