"""The metadata log: recovery from every torn end, refusal of corruption, checkpoints, the ballast on a full disk. On real files through the native file layer."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from mqd import native
from mqd.cluster import metadata_log
from mqd.cluster.metadata_log import FlushFailed, MetadataCorrupt, MetadataLog, encode_batch
from mqd.cluster.metadata_records import ClusterCreated, PartitionState, ProducerIdsAllocated, TopicCreated, TopicRemoved, TopicState
from mqd.cluster.metadata_state import MetadataState
from mqd.log.batches import parse_header
from mqd.log.records import records


def topic(number: int) -> TopicCreated:
    partition = PartitionState(0, (1,), ("directory",), (1,), 1, 0)
    return TopicCreated(TopicState(f"topic-{number}", number.to_bytes(16, "big"), (partition,), {"retention.ms": str(number)}))


def changes(count: int) -> list[list]:
    """The first has the cluster's id, the others one or two records each."""
    found: list[list] = [[ClusterCreated("cluster", 1)]]
    for number in range(1, count):
        found.append([topic(number), ProducerIdsAllocated(number * 1000)] if number % 2 else [ProducerIdsAllocated(number * 1000)])
    return found


def write(directory: Path, groups: list[list], **options) -> MetadataState:
    log = MetadataLog(directory, **options)
    state = log.open().state
    for group in groups:
        append(log, state, group)
        log.maybe_checkpoint(state)
    log.close()
    return state


def append(log: MetadataLog, state: MetadataState, group: list) -> None:
    log.append(group, state.version, 0, 1_700_000_000_000)
    for record in group:
        state.apply(record)


def reopen(directory: Path, **options) -> tuple[MetadataState, int]:
    log = MetadataLog(directory, **options)
    recovered = log.open()
    recovered.state.check()
    log.close()
    return recovered


def files(directory: Path) -> tuple[Path, Path]:
    place = directory / metadata_log.TOPIC_DIRECTORY
    return next(iter(sorted(place.glob("*.log")))), place / "committed"


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    state = write(tmp_path, changes(20))
    recovered = reopen(tmp_path)
    assert recovered.state == state and recovered.cut_bytes == 0
    write(tmp_path, [[TopicRemoved((1).to_bytes(16, "big"))]])
    assert "topic-1" not in reopen(tmp_path).state.topics


def test_batches_are_kafka_record_batches(tmp_path: Path) -> None:
    write(tmp_path, changes(6))
    data = files(tmp_path)[0].read_bytes()
    position, offset = 0, 0
    while position < len(data):
        size = parse_header(data, position, position).size_bytes
        error, reason, header = native.batch_validate(bytearray(data[position : position + size]))
        assert error == 0, reason
        assert header.base_offset == offset
        found = list(records(parse_header(data, position, position), data[position : position + size]))
        assert [record.offset for record in found] == list(range(offset, offset + header.record_count))
        position, offset = position + size, offset + header.record_count
    assert encode_batch(0, 0, 5, [b"x" * 1000])


def test_torn_end_at_every_byte(tmp_path: Path) -> None:
    """The last write was interrupted anywhere: whatever was answered before is there, nothing else."""
    groups = changes(5)
    before = write(tmp_path / "a", groups[:-1])
    log, committed = files(tmp_path / "a")
    start, mark = log.stat().st_size, committed.read_bytes()
    after = write(tmp_path / "a", groups[-1:])
    whole = log.read_bytes()
    for length in range(start, len(whole) + 1):
        shutil.rmtree(tmp_path / "b", ignore_errors=True)
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        log_b, committed_b = files(tmp_path / "b")
        log_b.write_bytes(whole[:length])
        committed_b.write_bytes(mark)
        recovered = reopen(tmp_path / "b")
        assert recovered.state == (after if length == len(whole) else before), length
        assert recovered.cut_bytes == (0 if length == len(whole) else length - start)
        assert write(tmp_path / "b", [[ProducerIdsAllocated(10**6)]]).next_producer_id == 10**6
        assert reopen(tmp_path / "b").state.next_producer_id == 10**6


def test_torn_end_of_garbage_or_zeroes_is_cut(tmp_path: Path) -> None:
    state = write(tmp_path, changes(4))
    log, _ = files(tmp_path)
    whole = log.read_bytes()
    for tail in (b"\0" * 300, os.urandom(500), whole[:70], b"\2" * 100):
        log.write_bytes(whole + tail)
        recovered = reopen(tmp_path)
        assert recovered.state == state and recovered.cut_bytes == len(tail)
        assert files(tmp_path)[0].read_bytes() == whole


def test_every_flipped_byte_below_the_mark_is_refused(tmp_path: Path) -> None:
    write(tmp_path, changes(4))
    log, _ = files(tmp_path)
    whole = bytearray(log.read_bytes())
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        log.write_bytes(damaged)
        if _leader_epoch_byte(whole, position):
            continue  # outside the checksum, as in every record batch; it says nothing here
        with pytest.raises(MetadataCorrupt) as error:
            reopen(tmp_path)
        assert str(log) in str(error.value)
        assert log.read_bytes() == damaged, "a refused log must stay as it is"


def _leader_epoch_byte(data: bytes, position: int) -> bool:
    at = 0
    while at < len(data):
        if at + 12 <= position < at + 16:
            return True
        at += parse_header(bytes(data), at, at).size_bytes
    return False


def test_corruption_inside_is_refused_without_a_mark_too(tmp_path: Path) -> None:
    write(tmp_path, changes(6))
    log, committed = files(tmp_path)
    data = bytearray(log.read_bytes())
    data[100] ^= 1
    log.write_bytes(data)
    committed.unlink()
    with pytest.raises(MetadataCorrupt, match="sound batch follows"):
        reopen(tmp_path)


def test_lost_end_is_refused(tmp_path: Path) -> None:
    write(tmp_path, changes(6))
    log, committed = files(tmp_path)
    log.write_bytes(log.read_bytes()[:-1])
    with pytest.raises(MetadataCorrupt, match="in force"):
        reopen(tmp_path)
    log.unlink()
    with pytest.raises(MetadataCorrupt, match="missing"):
        reopen(tmp_path)


def test_way_out_of_a_refusal_works(tmp_path: Path) -> None:
    write(tmp_path, changes(6))
    log, committed = files(tmp_path)
    position = len(encode_batch(0, 0, 0, [b""]))  # anywhere inside the first batches
    data = bytearray(log.read_bytes())
    data[position + 200] ^= 1
    log.write_bytes(data)
    with pytest.raises(MetadataCorrupt) as error:
        reopen(tmp_path)
    text = str(error.value)
    cut = int(text.split("cut the file to ")[1].split(" ")[0])
    log.write_bytes(bytes(data[:cut]))
    committed.unlink()
    assert reopen(tmp_path).state.version > 0


def test_unknown_record_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    write(tmp_path, changes(2))
    log, _ = files(tmp_path)
    with log.open("ab") as file:
        file.write(encode_batch(3, 0, 0, [b"\x81\xa4type\xacfrom_future/9"]))
    with pytest.raises(MetadataCorrupt, match="version"):
        reopen(tmp_path)


def test_checkpoint_takes_the_place_of_a_long_log(tmp_path: Path) -> None:
    state = write(tmp_path, changes(200), log_bytes_max=2000)
    place = tmp_path / metadata_log.TOPIC_DIRECTORY
    assert len(list(place.glob("*.log"))) == 1 and len(list(place.glob("*.checkpoint"))) == 1
    assert next(place.glob("*.log")).stat().st_size < 3000
    assert reopen(tmp_path).state == state


def test_checkpoint_interrupted_between_any_two_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process dies before the n-th call of the file layer."""

    class Died(BaseException):
        pass

    for step in range(12):
        directory = tmp_path / str(step)
        state = write(directory, changes(9))
        log = MetadataLog(directory)
        log.open()
        left = step
        with monkeypatch.context() as patch:
            for name in ("file_open_append", "file_sync_directory", "file_replace", "file_append", "file_unlink", "file_close"):

                def call(*arguments, real=getattr(native, name)):
                    nonlocal left
                    if left == 0:
                        raise Died
                    left -= 1
                    return real(*arguments)

                patch.setattr(native, name, call)
            try:
                log.checkpoint(state)
            except Died:
                pass
        assert reopen(directory).state == state
        more = write(directory, [[ProducerIdsAllocated(10**7)]])
        assert reopen(directory).state == more


@pytest.mark.parametrize("byte", [0, 9, 14, 30, -1])
def test_damaged_checkpoint_is_refused(tmp_path: Path, byte: int) -> None:
    write(tmp_path, changes(100), log_bytes_max=1000)
    path = next((tmp_path / metadata_log.TOPIC_DIRECTORY).glob("*.checkpoint"))
    data = bytearray(path.read_bytes())
    data[byte] ^= 4
    path.write_bytes(data)
    with pytest.raises(MetadataCorrupt, match="damaged"):
        reopen(tmp_path)


def test_full_disk_gives_up_the_reserve_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = MetadataLog(tmp_path)
    state = log.open().state
    reserve = tmp_path / metadata_log.TOPIC_DIRECTORY / "reserve"
    assert reserve.stat().st_size == metadata_log.RESERVE_BYTES
    real = native.file_append

    def full(fd: int, data, position: int) -> None:
        if reserve.exists() or state.version:
            raise native.NativeError(errno.ENOSPC, "no space left on device")
        real(fd, data, position)

    monkeypatch.setattr(native, "file_append", full)
    append(log, state, [ClusterCreated("cluster", 1)])
    assert not reserve.exists()
    with pytest.raises(OSError, match="no space"):
        log.append([ProducerIdsAllocated(5)], 1, 0, 0)
    monkeypatch.undo()
    append(log, state, [ProducerIdsAllocated(5)])
    log.restore_reserve()
    assert reserve.exists()
    log.close()
    assert reopen(tmp_path).state == state


def test_failed_flush_is_never_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = MetadataLog(tmp_path)
    state = log.open().state

    def failing(fd: int) -> None:
        raise native.NativeError(errno.EIO, "input/output error")

    monkeypatch.setattr(native, "file_flush", failing)
    with pytest.raises(FlushFailed):
        append(log, state, [ClusterCreated("cluster", 1)])
    monkeypatch.undo()
    log.close()
    recovered = reopen(tmp_path)  # the record may be there; then it is in a checkpoint of its own
    assert recovered.state.version in (0, 1)
    if recovered.state.version:
        assert list((tmp_path / metadata_log.TOPIC_DIRECTORY).glob("*.checkpoint"))
