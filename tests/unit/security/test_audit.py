import fcntl
import json
import resource
import stat
import threading
from pathlib import Path

import pytest

from mqd.security import audit
from mqd.security.acl import Operation, ResourceType
from mqd.security.audit import KEPT_FILE_COUNT, WINDOW_S, Audit, SharedFile


def test_a_flood_of_names_is_counted_not_logged(tmp_path, monkeypatch):
    """One request can name 300,000 topics."""
    monkeypatch.setattr(audit, "DENIALS_MAX", 5)
    now, file = [1000.0], tmp_path / "audit.log"
    found = Audit(file, lambda: now[0])

    def deny(name: str) -> None:
        found.record_denial("User:eve", "10.0.0.1", Operation.DESCRIBE, ResourceType.TOPIC, name, False)

    for number in range(1000):
        deny(f"t{number}")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["resource"] for line in lines] == [f"t{number}" for number in range(5)]
    now[0] += WINDOW_S
    deny("later")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line.get("suppressed") or line["resource"] for line in lines[5:]] == [995, "later"]


def test_the_same_denial_is_written_once_in_a_window_with_the_number_of_those_between(tmp_path):
    now, file = [1000.0], tmp_path / "audit.log"
    found = Audit(file, lambda: now[0])
    for _ in range(4):
        found.record_denial("User:eve", "10.0.0.1", Operation.READ, ResourceType.TOPIC, "t", False)
    now[0] += WINDOW_S
    found.record_denial("User:eve", "10.0.0.1", Operation.READ, ResourceType.TOPIC, "t", False)
    first, second = (json.loads(line) for line in file.read_text().splitlines())
    assert "suppressed" not in first and second["suppressed"] == 3


def test_denials_that_a_reactor_has_counted_are_counted(tmp_path):
    now, file = [1000.0], tmp_path / "audit.log"
    found = Audit(file, lambda: now[0])
    for count in (1, 5, 2):
        found.record_denial("User:eve", "10.0.0.1", Operation.READ, ResourceType.TOPIC, "t", False, count)
        now[0] += WINDOW_S
    assert [json.loads(line).get("suppressed") for line in file.read_text().splitlines()] == [None, 4, 1]


def lines_of(path: Path) -> list[bytes]:
    files = [path, *(path.with_name(f"audit.log.{number}") for number in range(1, KEPT_FILE_COUNT + 1))]
    return [line for file in files if file.exists() for line in file.read_bytes().splitlines()]


def test_processes_share_a_file_that_each_may_rename(tmp_path):
    """F1, F2: no line is lost while the rotated files have room, and none is cut."""
    path = tmp_path / "audit.log"
    writers = [SharedFile(path, 100) for _ in range(3)]
    written = [b"%04d" % number for number in range(60)]
    for number, line in enumerate(written):
        writers[number * number % 3].append(line + b"\n")
    assert sorted(lines_of(path)) == written
    assert all(one.stat().st_size == 100 for one in tmp_path.glob("audit.log.*"))
    for number in range(60, 990):
        writers[number % 3].append(b"%04d\n" % number)
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        "audit.log",
        *(f"audit.log.{number}" for number in range(1, KEPT_FILE_COUNT + 1)),
    ]
    assert sorted(lines_of(path))[-1] == b"0989"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_line_that_is_cut_off_does_not_spoil_the_next_one(tmp_path):
    one = SharedFile(tmp_path / "audit.log")
    one.append(b"first\n")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9, limits[1]))  # like a full disk: the write is short
    try:
        with pytest.raises(OSError, match="only a part"):
            one.append(b"second\n")
        with pytest.raises(OSError):
            one.append(b"third\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    one.append(b"fourth\n")
    assert lines_of(tmp_path / "audit.log") == [b"first", b"sec", b"fourth"]


def test_a_file_that_another_process_has_just_renamed_is_not_renamed_again(tmp_path):
    path = tmp_path / "audit.log"
    first, second = SharedFile(path, 10), SharedFile(path, 10)
    second.append(b"a\n")
    first.append(b"0123456789\n")  # is renamed
    first.append(b"b\n")
    second._rename()  # as if its line had been written in between
    assert path.read_bytes() == b"b\n"
    second.append(b"c\n")
    assert path.read_bytes() == b"b\nc\n"
    assert not (tmp_path / "audit.log.2").exists()


def test_a_file_that_cannot_be_renamed_is_not_left_locked(tmp_path):
    path = tmp_path / "audit.log"
    (tmp_path / f"audit.log.{KEPT_FILE_COUNT}").mkdir()
    (tmp_path / f"audit.log.{KEPT_FILE_COUNT - 1}").touch()
    first = SharedFile(path, 10)
    with pytest.raises(IsADirectoryError):
        first.append(b"0123456789\n")
    with path.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_process_does_not_wait_for_another_that_renames(tmp_path):
    path = tmp_path / "audit.log"
    one = SharedFile(path, 10)
    with path.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        appending = threading.Thread(target=one.append, args=(b"0123456789\n",), daemon=True)
        appending.start()
        appending.join(5)
        assert not appending.is_alive()
    assert path.read_bytes() == b"0123456789\n"
    one.append(b"a\n")
    assert lines_of(path) == [b"0123456789", b"a"] and not path.exists()


def test_a_disk_that_refuses_does_not_stop_the_process(tmp_path, caplog):
    (tmp_path / "audit.log").mkdir()
    Audit(tmp_path / "audit.log").write("acl created", by="User:admin")
    assert "the audit log cannot be written" in caplog.text


def test_denials_whose_window_ends_during_a_flood_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(audit, "DENIALS_MAX", 2)
    now, file = [1000.0], tmp_path / "audit.log"
    found = Audit(file, lambda: now[0])
    for name in ("a", "a", "a", "b"):
        found.record_denial("User:eve", "10.0.0.1", Operation.READ, ResourceType.TOPIC, name, False)
    now[0] += WINDOW_S
    found.record_denial("User:eve", "10.0.0.1", Operation.READ, ResourceType.TOPIC, "c", False)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line.get("suppressed") or line["resource"] for line in lines] == ["a", "b", 2, "c"]
