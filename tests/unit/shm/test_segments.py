"""Named segments and directory locks."""

import errno
import os
import subprocess
import sys
import threading
import time

import pytest

from mqd.shm import locks, segments


@pytest.fixture
def base(tmp_path):
    name = segments.prefix(tmp_path)
    yield name
    segments.clean(name)


def test_a_segment_is_shared_by_descriptor_even_after_unlink(base):
    made = segments.create(segments.control_name(base), 8192)
    made[100:103] = b"abc"
    fd = segments.open_descriptor(segments.control_name(base))
    segments.unlink(segments.control_name(base))
    seen = segments.attach(fd, "control", 8192)
    assert seen[100:103] == b"abc"


def test_a_reader_cannot_write(base):
    segments.create(segments.arena_name(base, 0), 4096)
    fd = segments.open_descriptor(segments.arena_name(base, 0))
    seen = segments.attach(fd, "arena-0", 4096, writable=False)
    with pytest.raises(TypeError):
        seen[0] = 1
    fd = segments.open_descriptor(segments.arena_name(base, 0), writable=False)
    with pytest.raises(segments.SegmentError, match="arena-0: Permission denied"):
        segments.attach(fd, "arena-0", 4096)


def test_only_the_owner_may_open_it(base):
    segments.create(segments.links_name(base), 4096)
    path = "/dev/shm" + segments.links_name(base)
    assert os.stat(path).st_mode & 0o777 == 0o600


def test_a_segment_is_created_once(base):
    segments.create(segments.control_name(base), 4096)
    with pytest.raises(segments.SegmentError):
        segments.create(segments.control_name(base), 4096)


def test_too_large_a_segment_is_an_error_with_a_remedy_and_leaves_no_file(base):
    huge = os.statvfs("/dev/shm").f_bavail * os.statvfs("/dev/shm").f_frsize + (1 << 40)
    with pytest.raises(segments.SegmentError, match="receive.arena.bytes"):
        segments.create(segments.arena_name(base, 1), huge)
    assert not segments.unlink(segments.arena_name(base, 1))


def test_a_segment_that_is_missing_or_too_small_is_refused(base):
    with pytest.raises(segments.SegmentError) as error:
        segments.open_descriptor(segments.control_name(base))
    assert error.value.errno == errno.ENOENT
    segments.create(segments.control_name(base), 4096)
    with pytest.raises(segments.SegmentError, match="restart the whole broker"):
        segments.attach(segments.open_descriptor(segments.control_name(base)), "control", 8192)


def test_segments_of_the_directorys_dead_broker_count_as_free(base, tmp_path):
    free = os.statvfs("/dev/shm")
    segments.create(segments.control_name(base), 64 << 20)
    # others use /dev/shm meanwhile: half of the segment is enough to distinguish
    assert segments.free_bytes(tmp_path) > segments.free_bytes(tmp_path / "no-such") + (32 << 20)
    assert free.f_blocks == 0 or segments.free_bytes(tmp_path) <= free.f_blocks * free.f_frsize + (64 << 20)


def test_leftovers_are_cleaned_and_mappings_survive(base):
    memory = segments.create(segments.control_name(base), 4096)
    segments.create(segments.arena_name(base, 65), 4096)
    assert sorted(segments.clean(base)) == sorted([segments.control_name(base), segments.arena_name(base, 65)])
    memory[0] = 1
    assert segments.clean(base) == []


def test_only_segments_of_dead_brokers_are_swept(tmp_path, monkeypatch):
    bases = {}
    for name in ("living", "dead", "new"):
        (tmp_path / name).mkdir()
        bases[name] = segments.prefix(tmp_path / name)
        segments.create(segments.control_name(bases[name]), 4096)
        segments.create(segments.arena_name(bases[name], 1), 4096)
    held = segments.lock_control_segment(segments.control_name(bases["living"]))
    try:
        for name in ("living", "dead"):
            for segment in (segments.control_name(bases[name]), segments.arena_name(bases[name], 1)):
                os.utime(segments.SHM_DIRECTORY + segment, (0, 0))
        # utime sets ctime to now, so the sweep has to run at a later time; only segments touched
        # later still are new then
        later = time.time() + segments.SWEEP_AGE_S + 1
        os.utime(segments.SHM_DIRECTORY + segments.control_name(bases["new"]), (later, later))
        names = [segments.control_name(base)[1:] for base in bases.values()]
        with monkeypatch.context() as patch:  # other brokers of this host are not part of this test
            patch.setattr(segments.os, "listdir", lambda path: [*names, "mqd-0-control", "other"])
            assert segments.sweep(later) == [segments.control_name(bases["dead"])]
        assert not segments.unlink(segments.arena_name(bases["dead"], 1))
        assert segments.unlink(segments.arena_name(bases["living"], 1)) and segments.unlink(
            segments.arena_name(bases["new"], 1)
        )
    finally:
        os.close(held)
        for base in bases.values():
            segments.clean(base)


def succeed(base: str, made: list[int]) -> None:
    """The steps of a keeper that starts after another one was killed."""
    with segments.taking_over(base):
        segments.clean(base)
        segments.create(segments.control_name(base), 4096)
        made.append(segments.lock_control_segment(segments.control_name(base)))


def sweep_as_another(base: str, patch: pytest.MonkeyPatch) -> list[str]:
    """Sweeps the segments of this directory, long after they were created."""
    patch.setattr(segments.os, "listdir", lambda path: [segments.control_name(base)[1:]])
    return segments.sweep(time.time() + segments.SWEEP_AGE_S + 1)


def test_a_successor_waits_for_a_running_sweep(base, monkeypatch):
    """Hosts that lost power together start together: a segment recreated by one must not be
    mistaken by another for the one it saw before.
    """
    segments.create(segments.control_name(base), 4096)
    made: list[int] = []
    successor = threading.Thread(target=succeed, args=(base, made))
    clean = segments.clean

    def cleaned(name: str) -> list[str]:
        if threading.current_thread() is not successor:
            successor.start()
            successor.join(0.3)  # long enough to overtake this one, if nothing prevented it
        return clean(name)

    with monkeypatch.context() as patch:
        patch.setattr(segments, "clean", cleaned)
        assert sweep_as_another(base, patch) == [segments.control_name(base)]
    successor.join(10)
    assert os.path.exists(segments.SHM_DIRECTORY + segments.control_name(base))
    os.close(made[0])


def test_a_segment_recreated_since_it_was_seen_is_not_swept(base, monkeypatch):
    segments.create(segments.control_name(base), 4096)
    made: list[int] = []
    flock = segments.fcntl.flock

    def locked(fd: int, how: int) -> None:
        if not made:
            made.append(-1)
            succeed(base, made)
        flock(fd, how)

    with monkeypatch.context() as patch:
        patch.setattr(segments.fcntl, "flock", locked)
        assert sweep_as_another(base, patch) == []
    assert os.path.exists(segments.SHM_DIRECTORY + segments.control_name(base))
    os.close(made[1])


def test_a_sweep_may_lock_a_new_segment_briefly(base):
    segments.create(segments.control_name(base), 4096)
    swept = segments.lock_control_segment(segments.control_name(base))
    threading.Timer(0.05, os.close, [swept]).start()
    os.close(segments.lock_control_segment(segments.control_name(base)))


def test_a_sweep_that_does_not_end_is_reported(base, monkeypatch):
    segments.create(segments.control_name(base), 4096)
    monkeypatch.setattr(segments, "TAKE_OVER_S", 0.05)
    held = segments.lock_control_segment(segments.control_name(base))
    with pytest.raises(segments.SegmentError, match="removing the shared memory segments"), segments.taking_over(base):
        pass
    os.close(held)


def test_every_path_to_a_directory_gives_the_same_names(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "data")
    assert segments.prefix(tmp_path / "data") == segments.prefix(tmp_path / "link")
    assert segments.prefix(tmp_path / "data") != segments.prefix(tmp_path / "other")


def test_a_directory_is_locked_once_and_the_error_names_the_holder(tmp_path):
    fd = locks.lock_directory(tmp_path)
    with pytest.raises(locks.DirectoryInUse, match=f"pid {os.getpid()}.*mqd down --data-dir {tmp_path}") as error:
        locks.lock_directory(tmp_path)
    assert error.value.holder_pid == os.getpid()
    assert locks.is_locked(tmp_path / locks.LOCK_NAME)
    os.close(fd)
    assert not locks.is_locked(tmp_path / locks.LOCK_NAME)
    os.close(locks.lock_directory(tmp_path))


def test_the_lock_lasts_until_its_last_copy_is_closed(tmp_path):
    fd = locks.lock_directory(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[fd])
    os.close(fd)
    assert locks.is_locked(tmp_path / locks.LOCK_NAME)
    child.communicate(b"\n")
    assert not locks.is_locked(tmp_path / locks.LOCK_NAME)


def test_several_directories_are_locked_all_or_none(tmp_path):
    held = locks.lock_directory(tmp_path / "b")
    with pytest.raises(locks.DirectoryInUse, match="log.dirs"):
        locks.lock_directories([tmp_path / "a", tmp_path / "b"], tmp_path / "a")
    os.close(held)
    assert not locks.is_locked(tmp_path / "a" / locks.LOCK_NAME)
    fds = locks.lock_directories([tmp_path / "a", tmp_path / "a", tmp_path / "b"], tmp_path / "a")
    assert len(fds) == 2
    for fd in fds:
        os.close(fd)


def test_a_directory_that_cannot_be_created_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot use"):
        locks.lock_directory(tmp_path / "file" / "data")


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written_is_reported(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OSError, match="not writable"):
        locks.lock_directory(tmp_path)


def test_read_only_shared_memory_is_reported_with_a_remedy(base, monkeypatch):
    """A dead broker's names are removed before new ones are created; Linux refuses that too, even
    where the name does not exist.
    """

    def refuse(*_arguments, **_options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patched:
        patched.setattr(segments.posix_ipc, "unlink_shared_memory", refuse)
        patched.setattr(segments.posix_ipc, "SharedMemory", refuse)
        for attempt in (lambda: segments.clean(base), lambda: segments.create(segments.control_name(base), 4096)):
            with pytest.raises(segments.SegmentError) as error:
                attempt()
            assert error.value.strerror.startswith("/dev/shm is read-only")
            assert "mount -o remount,rw /dev/shm" in error.value.strerror
