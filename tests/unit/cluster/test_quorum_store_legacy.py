"""Metadata logs from before clusters, damaged checkpoints, and disks that are full or fail."""

import errno
import os
from pathlib import Path

import msgspec
import pytest

from mqd import native
from mqd.cluster.metadata.records import ClusterCreated, ProducerIdsAllocated, encode_record
from mqd.cluster.metadata.state import MetadataState
from mqd.cluster.raft import files as metadata_files
from mqd.cluster.raft import store as quorum_store
from mqd.cluster.raft.events import VoteState
from mqd.cluster.raft.identity import TOPIC_DIRECTORY, MetadataCorrupt
from mqd.cluster.raft.store import FlushFailed, QuorumStore
from mqd.protocol import records as codec
from tests.unit.cluster.test_quorum_store import (
    KEY,
    VOTERS_OF_ONE,
    append,
    at_every_step,
    batch,
    changes,
    files,
    opened,
    reopen,
    write,
)


def legacy(directory: Path, groups: list[list], checkpoint_at: int | None = None) -> MetadataState:
    """As written by mqd before there were clusters."""
    place = directory / TOPIC_DIRECTORY
    place.mkdir(parents=True)
    state, base, data = MetadataState(), 0, b""
    for number, group in enumerate(groups):
        if number == checkpoint_at:
            body = msgspec.msgpack.encode(state.snapshot())
            (place / f"{state.version:020d}.checkpoint").write_bytes(
                metadata_files._CHECKPOINT_1.pack(b"MQDMETA1", native.crc32c(body), len(body)) + body
            )
            base, data = state.version, b""
        values = [codec.Record(timestamp_ms=5, value=encode_record(record)) for record in group]
        data += codec.encode_batch(values, base_offset=state.version, partition_leader_epoch=0)
        for record in group:
            state.apply(record)
    (place / f"{base:020d}.log").write_bytes(data)
    mark = metadata_files._MARK_1.pack(b"MQDMARK1", base, len(data), 0)[:-4]
    (place / "committed").write_bytes(mark + native.crc32c(mark).to_bytes(4, "big"))
    return state


@pytest.mark.parametrize("checkpoint_at", [None, 4])
def test_a_log_from_before_clusters_is_a_quorum_of_one(tmp_path: Path, checkpoint_at: int | None) -> None:
    state = legacy(tmp_path, changes(9), checkpoint_at)
    found = reopen(tmp_path)
    assert found.state == state
    assert (
        found.stored.snapshot.voters == VOTERS_OF_ONE
        and found.stored.snapshot.generation == 1
        and found.stored.vote == VoteState()
    )
    assert reopen(tmp_path).stored == found.stored
    more = write(tmp_path, [[ProducerIdsAllocated(10**7)]])
    assert reopen(tmp_path).state == more
    log, _ = files(tmp_path)
    log.write_bytes(log.read_bytes()[:-3])
    with pytest.raises(MetadataCorrupt, match="bytes were flushed"):
        reopen(tmp_path)


def test_adopting_an_old_log_interrupted_between_any_two_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(directory, state, died):
        assert reopen(directory).state == state

    at_every_step(
        tmp_path,
        monkeypatch,
        lambda directory: legacy(directory, changes(6), 3),
        lambda state: None if state is None else adopt(state),
        check,
    )


def adopt(state: MetadataState) -> None:
    """open() of the newest directory: at_every_step creates one per step."""
    newest = max((path for path in adopt.root.iterdir()), key=lambda path: int(path.name))
    QuorumStore(newest, KEY).open()


@pytest.fixture(autouse=True)
def _root(tmp_path: Path) -> None:
    adopt.root = tmp_path


@pytest.mark.parametrize("byte", [0, 9, 14, 30, -1])
def test_damaged_checkpoint_is_refused(tmp_path: Path, byte: int) -> None:
    write(tmp_path, changes(100), snapshot_every=20)
    path = next((tmp_path / TOPIC_DIRECTORY).glob("*.checkpoint"))
    data = bytearray(path.read_bytes())
    data[byte] ^= 4
    path.write_bytes(data)
    with pytest.raises(MetadataCorrupt, match="damaged"):
        reopen(tmp_path)


def test_full_disk_gives_up_the_reserve_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, state = opened(tmp_path)
    reserve = tmp_path / TOPIC_DIRECTORY / "reserve"
    assert reserve.stat().st_size == quorum_store.RESERVE_BYTES
    real = native.file_append

    def full(fd: int, data, position: int) -> None:
        if reserve.exists() or state.version:
            raise native.NativeError(errno.ENOSPC, "no space left on device")
        real(fd, data, position)

    monkeypatch.setattr(native, "file_append", full)
    append(log, state, [ClusterCreated("cluster", 1)])
    assert not reserve.exists()
    with pytest.raises(OSError, match="no space"):
        log.append([batch(1, [ProducerIdsAllocated(5)])], 0)
    monkeypatch.undo()
    append(log, state, [ProducerIdsAllocated(5)])
    log.restore_reserve()
    assert reserve.exists()
    log.close()
    assert reopen(tmp_path).state == state


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EMFILE])
def test_without_space_for_it_the_reserve_is_created_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """The controller requests it repeatedly, and serves without it; so does a start."""
    log, state = opened(tmp_path)
    append(log, state, [ClusterCreated("cluster", 1)])
    reserve = tmp_path / TOPIC_DIRECTORY / "reserve"
    reserve.unlink()
    real = os.open

    def full(path: Path, flags: int, *rest: int) -> int:
        if flags & os.O_CREAT and path == reserve:
            raise OSError(code, os.strerror(code), str(path))
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", full)
    log.restore_reserve()
    append(log, state, [ProducerIdsAllocated(5)])
    log.close()
    assert reopen(tmp_path).state == state and not reserve.exists()
    monkeypatch.undo()
    assert reopen(tmp_path).state == state and reserve.exists()


def test_failed_flush_is_never_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, state = opened(tmp_path)

    def failing(fd: int) -> None:
        raise native.NativeError(errno.EIO, "input/output error")

    monkeypatch.setattr(native, "file_flush", failing)
    with pytest.raises(FlushFailed):
        append(log, state, [ClusterCreated("cluster", 1)])
    monkeypatch.undo()
    log.close()
    written: list[bytes] = []
    real = native.file_append
    monkeypatch.setattr(
        native, "file_append", lambda fd, data, position: (written.append(bytes(data)), real(fd, data, position))[1]
    )
    # it is in the page cache: it counts only after it was written and flushed again (M4)
    assert reopen(tmp_path).state.version == 1
    assert any(b"cluster_created" in data for data in written)
