"""The quorum's store: recovery from every torn end, refusal of corruption, snapshots, truncation,
the vote, logs from before clusters, the ballast file on a full disk. On real files through the
native file layer.
"""

import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from mqd import native
from mqd.cluster.metadata.records import (
    ClusterCreated,
    PartitionState,
    ProducerIdsAllocated,
    Record,
    TopicCreated,
    TopicRemoved,
    TopicState,
    decode_record,
    encode_record,
)
from mqd.cluster.metadata.state import MetadataState
from mqd.cluster.raft import files as metadata_files
from mqd.cluster.raft import identity as replica_identity
from mqd.cluster.raft.events import VoteState
from mqd.cluster.raft.identity import TOPIC_DIRECTORY, MetadataCorrupt, load_or_create_key
from mqd.cluster.raft.messages import (
    DATA,
    LEADER_CHANGE,
    VOTERS,
    Batch,
    ReplicaKey,
    SnapshotMeta,
    Voter,
    leader_change_batch,
    make_batch,
    voters_batch,
)
from mqd.cluster.raft.store import FlushFailed, QuorumStore, encode_state
from mqd.log.batches import parse_header
from mqd.log.records import records

KEY = ReplicaKey(1, b"directory-of-one")
OTHER = ReplicaKey(2, b"directory-of-two")
VOTERS_OF_ONE = (Voter(KEY, "", 0),)


def topic(number: int) -> TopicCreated:
    partition = PartitionState(0, (1,), ("directory",), (1,), 1, 0)
    return TopicCreated(
        TopicState(f"topic-{number}", number.to_bytes(16, "big"), (partition,), {"retention.ms": str(number)})
    )


def changes(count: int) -> list[list]:
    """The first has the cluster's id, the others one or two records each."""
    found: list[list] = [[ClusterCreated("cluster", 1)]]
    for number in range(1, count):
        found.append(
            [topic(number), ProducerIdsAllocated(number * 1000)]
            if number % 2
            else [ProducerIdsAllocated(number * 1000)]
        )
    return found


def batch(base_offset: int, group: Sequence[Record], epoch: int = 1) -> Batch:
    return make_batch(base_offset, epoch, DATA, tuple(encode_record(record) for record in group))


def apply(state: MetadataState, batches: Sequence[Batch]) -> MetadataState:
    for one in batches:
        assert one.base_offset == state.version and one.is_sound
        for value in one.values if one.kind == DATA else ():
            state.apply(decode_record(value))
        state.version = one.next_offset
    return state


def opened(directory: Path, **options) -> tuple[QuorumStore, MetadataState]:
    """A log, created if there was none, and its content."""
    log = QuorumStore(directory, KEY, **options)
    recovered = log.open()
    if recovered.stored.snapshot is None:
        log.initialize(SnapshotMeta(0, 0, VOTERS_OF_ONE, 1))
        return log, recovered.state
    return log, apply(recovered.state, recovered.stored.batches)


def snapshot(log: QuorumStore, state: MetadataState, epoch: int = 1) -> None:
    log.store_snapshot(SnapshotMeta(state.version, epoch, VOTERS_OF_ONE, 1), encode_state(state))


def write(directory: Path, groups: list[list], snapshot_every: int = 0, **options) -> MetadataState:
    log, state = opened(directory, **options)
    for number, group in enumerate(groups, 1):
        append(log, state, group)
        if snapshot_every and number % snapshot_every == 0:
            snapshot(log, state)
    log.close()
    return state


def append(log: QuorumStore, state: MetadataState, group: list) -> None:
    one = batch(state.version, group)
    log.append([one], 1_700_000_000_000, state.version)
    apply(state, [one])


class Reopened:
    def __init__(self, directory: Path) -> None:
        log = QuorumStore(directory, KEY)
        recovered = log.open()
        self.cut_bytes, self.stored = recovered.cut_bytes, recovered.stored
        self.state = apply(recovered.state, recovered.stored.batches)
        assert log.next_offset == self.state.version
        self.state.check()
        log.close()


def reopen(directory: Path) -> Reopened:
    return Reopened(directory)


def files(directory: Path) -> tuple[Path, Path]:
    place = directory / TOPIC_DIRECTORY
    return next(iter(sorted(place.glob("*.log")))), place / "committed"


def test_written_records_are_read_back(tmp_path: Path) -> None:
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
    assert metadata_files.encode_batch(batch(0, [topic(1)]), 5)


def test_torn_end_at_every_byte(tmp_path: Path) -> None:
    """The last write was interrupted at any byte: exactly what was acknowledged before is there."""
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


def test_a_torn_end_of_garbage_or_zeroes_is_truncated(tmp_path: Path) -> None:
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
        with pytest.raises(MetadataCorrupt) as error:
            reopen(tmp_path)
        assert str(log) in str(error.value)
        assert log.read_bytes() == damaged, "a refused log must stay as it is"


def test_corruption_inside_is_refused_without_a_mark_too(tmp_path: Path) -> None:
    write(tmp_path, changes(6))
    log, committed = files(tmp_path)
    data = bytearray(log.read_bytes())
    data[100] ^= 1
    log.write_bytes(data)
    committed.unlink()
    with pytest.raises(MetadataCorrupt, match="valid batch follows"):
        reopen(tmp_path)


def test_lost_end_is_refused(tmp_path: Path) -> None:
    write(tmp_path, changes(6))
    log, committed = files(tmp_path)
    log.write_bytes(log.read_bytes()[:-1])
    with pytest.raises(MetadataCorrupt, match="bytes were flushed"):
        reopen(tmp_path)
    log.unlink()
    with pytest.raises(MetadataCorrupt, match="missing"):
        reopen(tmp_path)


def test_the_remedy_named_in_a_refusal_works(tmp_path: Path) -> None:
    write(tmp_path, changes(6))
    log, committed = files(tmp_path)
    position = len(metadata_files.encode_batch(make_batch(0, 0, DATA, (b"",)), 0))  # anywhere inside the first batches
    data = bytearray(log.read_bytes())
    data[position + 200] ^= 1
    log.write_bytes(data)
    with pytest.raises(MetadataCorrupt) as error:
        reopen(tmp_path)
    text = str(error.value)
    cut = int(text.split("truncate the file to ")[1].split(" ")[0])
    log.write_bytes(bytes(data[:cut]))
    committed.unlink()
    assert reopen(tmp_path).state.version > 0


def test_snapshots_replace_a_long_log(tmp_path: Path) -> None:
    state = write(tmp_path, changes(200), snapshot_every=30)
    place = tmp_path / TOPIC_DIRECTORY
    assert len(list(place.glob("*.log"))) == 1 and len(list(place.glob("*.checkpoint"))) == 1
    assert reopen(tmp_path).state == state


def test_a_snapshot_of_a_part_of_the_log(tmp_path: Path) -> None:
    """Records after the snapshot's offset, committed or not, stay; files are deleted when a
    snapshot covers them completely.
    """
    log, state = opened(tmp_path)
    groups = changes(12)
    states = []
    for group in groups:
        append(log, state, group)
        states.append(state.copy())
    snapshot(log, states[4])
    assert len(list(log.directory.glob("*.log"))) == 2
    assert reopen(tmp_path).state == state and reopen(tmp_path).stored.batches[0].base_offset == states[4].version
    append(log, state, [ProducerIdsAllocated(10**6)])
    assert reopen(tmp_path).state == state
    snapshot(log, states[-1])
    assert reopen(tmp_path).state == state and len(reopen(tmp_path).stored.batches) == 1
    snapshot(log, states[7])  # an older one changes nothing
    assert reopen(tmp_path).stored.snapshot.offset == states[-1].version
    log.close()
    assert write(tmp_path, [[ProducerIdsAllocated(10**8)]]) == reopen(tmp_path).state


class Died(BaseException):
    pass


STEPS = (
    "file_open_append",
    "file_sync_directory",
    "file_replace",
    "file_append",
    "file_unlink",
    "file_close",
    "file_flush",
)


def dies_at(monkeypatch: pytest.MonkeyPatch, step: int, action) -> bool:
    """Runs `action` in a process that dies before the step-th call of the file layer. Returns
    whether it died.
    """
    left = step
    with monkeypatch.context() as patch:
        for name in STEPS:

            def call(*arguments, real=getattr(native, name)):
                nonlocal left
                if left == 0:
                    raise Died
                left -= 1
                return real(*arguments)

            patch.setattr(native, name, call)
        try:
            action()
        except Died:
            return True
    return False


def at_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepare, action, check) -> None:
    """`prepare(directory)` -> context; action(context); after a death before each call of the file
    layer in turn, check(directory, context, died).
    """
    for step in range(40):
        directory = tmp_path / str(step)
        context = prepare(directory)
        died = dies_at(monkeypatch, step, lambda: action(context))
        check(directory, context, died)
        if not died:
            assert step > 3
            return
    raise AssertionError("it never ended")


def test_snapshot_interrupted_between_any_two_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(directory):
        log, state = opened(directory)
        for group in changes(9):
            append(log, state, group)
        return log, state

    def check(directory, context, died):
        assert reopen(directory).state == context[1]
        assert write(directory, [[ProducerIdsAllocated(10**7)]]) == reopen(directory).state

    at_every_step(tmp_path, monkeypatch, prepare, lambda context: snapshot(*context), check)


def test_truncation_interrupted_between_any_two_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Across a file boundary: afterwards the log is complete, or truncated at a batch from the
    truncation's offset on; then other batches follow.
    """

    def prepare(directory):
        log, state = opened(directory)
        states = []
        for number, group in enumerate(changes(12)):
            log.append([batch(state.version, group)], 0, 3)
            states.append(apply(state, [batch(state.version, group)]).copy())
            if number == 8:
                snapshot(log, states[1])
        return log, states

    def check(directory, context, died):
        log, states = context
        found = reopen(directory).state
        assert found in states[4:] and (died or found == states[4])
        log, state = opened(directory)
        log.truncate(states[4].version)
        other = batch(states[4].version, [ProducerIdsAllocated(10**9)], epoch=7)
        log.append([other], 0, 0)
        log.close()
        after = reopen(directory)
        assert after.state == apply(states[4].copy(), [other]) and after.stored.batches[-1].epoch == 7

    at_every_step(tmp_path, monkeypatch, prepare, lambda context: context[0].truncate(context[1][4].version), check)


@pytest.mark.parametrize("offset", [3, 8, 40])
def test_install_interrupted_between_any_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: int
) -> None:
    """The leader's snapshot replaces the local log, which was shorter or had another history:
    afterwards there is one or the other, never a mixture.
    """
    leaders = MetadataState()
    leaders.apply(ClusterCreated("cluster", 1))
    leaders.apply(ProducerIdsAllocated(5))
    leaders.version = offset
    meta = SnapshotMeta(offset, 9, (Voter(OTHER, "h", 1),), 2)

    def prepare(directory):
        log, state = opened(directory)
        for group in changes(9):
            log.append([batch(state.version, group)], 0, 2)
            apply(state, [batch(state.version, group)])
        return log, state

    def check(directory, context, died):
        log, state = context
        after = reopen(directory)
        if after.stored.snapshot == meta:
            assert after.state == leaders and after.stored.batches == ()
        else:
            assert died and after.stored.snapshot.offset == 0
            assert after.state.version <= state.version and after.state.next_producer_id <= state.next_producer_id
        log, state = opened(directory)
        assert log.install(meta, encode_state(leaders)) == leaders
        append(log, state := leaders.copy(), [ProducerIdsAllocated(10**9)])
        log.close()
        assert reopen(directory).state == state

    at_every_step(
        tmp_path, monkeypatch, prepare, lambda context: context[0].install(meta, encode_state(leaders)), check
    )


def test_founding_interrupted_between_any_two_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards the directory is empty, or has all voters: this host never becomes the only one."""
    meta = SnapshotMeta(0, 0, (Voter(KEY, "one", 1), Voter(OTHER, "two", 2)), 1)

    def prepare(directory):
        log = QuorumStore(directory, KEY)
        assert log.open().stored.snapshot is None
        return log

    def check(directory, log, died):
        again = QuorumStore(directory, KEY)
        found = again.open().stored.snapshot
        assert found == meta or (died and found is None)
        if found is None:
            again.initialize(meta)
        again.close()
        assert reopen(directory).stored.snapshot == meta

    at_every_step(tmp_path, monkeypatch, prepare, lambda log: log.initialize(meta), check)


@pytest.mark.parametrize("offset", [0, 1])
def test_a_host_that_joins_begins_with_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: int) -> None:
    leaders = MetadataState()
    if offset:
        leaders.apply(ClusterCreated("cluster", 1))
    meta = SnapshotMeta(offset, 4, (Voter(OTHER, "h", 1),), 3)

    def prepare(directory):
        log = QuorumStore(directory, KEY)
        recovered = log.open()
        assert recovered.stored.snapshot is None and recovered.stored.batches == ()
        log.write_vote(VoteState(4, None, OTHER))
        return log

    def check(directory, log, died):
        again = QuorumStore(directory, KEY)
        stored = again.open().stored
        assert stored.vote == VoteState(4, None, OTHER)
        assert stored.snapshot == meta or (died and stored.snapshot is None)
        assert again.install(meta, encode_state(leaders)) == leaders if stored.snapshot is None else True
        again.close()
        assert reopen(directory).state == leaders

    at_every_step(tmp_path, monkeypatch, prepare, lambda log: log.install(meta, encode_state(leaders)), check)


def test_an_installed_snapshot_that_cannot_be_read_changes_nothing(tmp_path: Path) -> None:
    log, state = opened(tmp_path)
    append(log, state, [ClusterCreated("cluster", 1)])
    for data, offset in ((b"\x81", 5), (encode_state(state), 5)):
        with pytest.raises(ValueError):
            log.install(SnapshotMeta(offset, 1, VOTERS_OF_ONE, 1), data)
    append(log, state, [ProducerIdsAllocated(7)])
    log.close()
    assert reopen(tmp_path).state == state


def test_full_disk_while_installing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, state = opened(tmp_path)
    append(log, state, [ClusterCreated("cluster", 1)])

    def full(path, data) -> None:
        raise native.NativeError(errno.ENOSPC, "no space left on device")

    other = MetadataState()
    other.version = 50
    with monkeypatch.context() as patch:
        patch.setattr(native, "file_replace", full)
        with pytest.raises(OSError, match="no space"):
            log.install(SnapshotMeta(50, 1, VOTERS_OF_ONE, 1), encode_state(other))
    append(log, state, [ProducerIdsAllocated(7)])
    log.close()
    assert reopen(tmp_path).state == state


def test_full_disk_while_a_longer_log_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log was truncated before, so its caller must not go on as if nothing had changed."""
    log, state = opened(tmp_path)
    append(log, state, [ClusterCreated("cluster", 1)])
    log.append([batch(state.version, [ProducerIdsAllocated(7)])], 0, 0)

    def full(path, data) -> None:
        raise native.NativeError(errno.ENOSPC, "no space left on device")

    leaders = state.copy()
    with monkeypatch.context() as patch:
        patch.setattr(native, "file_replace", full)
        with pytest.raises(FlushFailed, match="no space"):
            log.install(SnapshotMeta(leaders.version, 2, VOTERS_OF_ONE, 1), encode_state(leaders))
    log.close()
    assert reopen(tmp_path).state == state


def test_a_host_that_joins_with_a_full_disk_leaks_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, leaders = QuorumStore(tmp_path, KEY), MetadataState()
    log.open()
    replace = native.file_replace

    def full(path, data) -> None:
        if Path(path).suffix == ".checkpoint":
            raise native.NativeError(errno.ENOSPC, "no space left on device")
        replace(path, data)

    monkeypatch.setattr(native, "file_replace", full)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(OSError, match="no space"):
            log.install(SnapshotMeta(0, 1, VOTERS_OF_ONE, 1), encode_state(leaders))
    assert len(os.listdir("/proc/self/fd")) == before


def test_snapshots_are_read_in_pieces(tmp_path: Path) -> None:
    log, state = opened(tmp_path)
    for group in changes(50):
        append(log, state, group)
    snapshot(log, state)
    whole, position = b"", 0
    while piece := log.read_snapshot(state.version, 1, position, 100):
        whole, position = whole + piece, position + len(piece)
    assert whole == encode_state(state)
    assert log.read_snapshot(state.version, 2, 0, 100) == b"" == log.read_snapshot(3, 1, 0, 100)
    log.close()


def test_epochs_and_control_batches_survive(tmp_path: Path) -> None:
    log, state = opened(tmp_path)
    voters = tuple(sorted((Voter(KEY, "a", 1), Voter(OTHER, "b", 2))))
    written = [
        leader_change_batch(0, 3, KEY),
        batch(1, [ClusterCreated("cluster", 1), ProducerIdsAllocated(4)], 3),
        voters_batch(3, 5, voters),
        leader_change_batch(4, 6, OTHER),
    ]
    log.append(written[:2], 0, 1)
    log.append(written[2:], 0, 3)
    log.close()
    stored = reopen(tmp_path).stored
    assert list(stored.batches) == written and [one.kind for one in stored.batches] == [
        LEADER_CHANGE,
        DATA,
        VOTERS,
        LEADER_CHANGE,
    ]
    assert stored.committed_offset == 3


def test_the_vote_is_kept_and_never_guessed(tmp_path: Path) -> None:
    log, state = opened(tmp_path)
    log.write_vote(VoteState(7, OTHER, KEY))
    log.close()
    assert reopen(tmp_path).stored.vote == VoteState(7, OTHER, KEY)
    path = tmp_path / TOPIC_DIRECTORY / "vote"
    good = path.read_bytes()
    for damaged in (good[:-1], b"", bytes([*good[:20], good[20] ^ 1, *good[21:]]), b"x" + good[1:]):
        path.write_bytes(damaged)
        with pytest.raises(MetadataCorrupt, match="vote twice"):
            reopen(tmp_path)
    path.unlink()
    with pytest.raises(MetadataCorrupt, match="vote twice"):
        reopen(tmp_path)


def test_the_key_of_a_directory_is_generated_once(tmp_path: Path) -> None:
    first = load_or_create_key(tmp_path, 1, b"a" * 16)
    assert first == ReplicaKey(1, b"a" * 16) == load_or_create_key(tmp_path, 1, b"b" * 16)
    with pytest.raises(MetadataCorrupt, match=r"node\.id 1"):
        load_or_create_key(tmp_path, 2, b"b" * 16)
    QuorumStore(tmp_path, first).open()
    (tmp_path / TOPIC_DIRECTORY / "vote").write_bytes(metadata_files.encode_vote(VoteState()))
    (tmp_path / "meta.properties").write_text("version=1\nnode.id=1\ndirectory.id=short\n")
    with pytest.raises(MetadataCorrupt, match="damaged"):
        load_or_create_key(tmp_path, 1, b"b" * 16)
    (tmp_path / "meta.properties").unlink()
    with pytest.raises(MetadataCorrupt, match="missing"):
        load_or_create_key(tmp_path, 1, b"b" * 16)
    assert replica_identity.directory_bytes(replica_identity.directory_text(first.directory_id)) == first.directory_id
