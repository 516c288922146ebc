"""Directories found by a worker that was down: those of deleted topics are deleted, those of
unknown ones kept; and interrupted deletions are finished.
"""

from pathlib import Path

import msgspec

from mqd.cluster.host.images import owner_of
from mqd.cluster.host.messages import Image, PartitionImage, TopicImage
from mqd.cluster.metadata import state as metadata_state
from mqd.cluster.metadata.records import PartitionState, TopicCreated, TopicRemoved, TopicState
from mqd.cluster.metadata.state import MetadataState, Snapshot
from mqd.log import directories, moving
from mqd.worker.log_directory import LogDirectory
from mqd.worker.orphan_directories import set_aside_left_behind_replicas, set_aside_strays

WORKERS = 2


class PlainFiles:
    def replace(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def make_directory(self, path: Path) -> None:
        path.mkdir()

    def sync_directory(self, path: Path) -> None:
        assert path.is_dir()


def topic_id(number: int) -> bytes:
    return number.to_bytes(16, "big")


def log_directory(path: Path, worker: int) -> LogDirectory:
    return LogDirectory(0, path, worker, WORKERS, 0, PlainFiles(), lambda _path: -1)


def partition(path: Path, name: str, index: int, number: int) -> Path:
    directory, _ = directories.prepare(path, name, index, topic_id(number), PlainFiles())
    (directory / "00000000000000000000.log").write_bytes(b"records")
    return directory


def names(path: Path, ending: str) -> set[str]:
    return {entry.name.split(".")[0] for entry in path.iterdir() if entry.name.endswith(ending)}


def test_partitions_of_removed_topics_are_deleted_and_of_unknown_ones_kept(tmp_path: Path):
    for index in range(4):
        partition(tmp_path, "removed", index, 1)
        partition(tmp_path, "unknown", index, 2)
    image = Image(1, "cluster", 1, [], [], {}, removed_topic_ids=[topic_id(1)])
    doomed = [
        path
        for worker in range(WORKERS)
        for _, path in set_aside_strays([log_directory(tmp_path, worker)], image, worker, WORKERS, PlainFiles())
    ]
    assert (
        names(tmp_path, "-delete")
        == {f"removed-{index}" for index in range(4)}
        == {path.name.split(".")[0] for path in doomed}
    )
    assert names(tmp_path, "-stray") == {f"unknown-{index}" for index in range(4)}
    assert all((entry / "00000000000000000000.log").exists() for entry in tmp_path.iterdir())


def moved_image(log_dir: int) -> Image:
    partitions = [
        PartitionImage(index, index, owner_of(topic_id(3), index, WORKERS), log_dir, 1, 0, [1], [1])
        for index in range(4)
    ]
    return Image(1, "cluster", 1, [], [TopicImage("moved", topic_id(3), partitions, {})], {})


def look(disks: list[Path], image: Image) -> list[Path]:
    found = []
    for worker in range(WORKERS):
        log_dirs = [
            LogDirectory(number, disk, worker, WORKERS, 0, PlainFiles(), lambda _path: -1)
            for number, disk in enumerate(disks)
        ]
        found += [path for _, path in set_aside_strays(log_dirs, image, worker, WORKERS, PlainFiles())]
    return found


def test_the_current_copy_of_a_move_stays_and_the_other_is_deleted(tmp_path: Path):
    # the copy on disk 1 was complete; the metadata may or may not know
    for counts in (0, 1):
        disks = [tmp_path / f"{counts}-{number}" for number in range(2)]
        for disk in disks:
            disk.mkdir()
        for index in range(4):
            partition(disks[0], "moved", index, 3)
            (partition(disks[1], "moved", index, 3) / moving.MARKER).write_bytes(b"")
        doomed = look(disks, moved_image(counts))
        assert names(disks[1 - counts], "-delete") == {f"moved-{index}" for index in range(4)} and len(doomed) == 4
        assert sorted(path.name for path in disks[counts].iterdir()) == [f"moved-{index}" for index in range(4)]
        assert len(list(disks[counts].glob(f"*/{moving.MARKER}"))) == 4 * counts, "it goes when the partition is open"


def test_an_unfinished_copy_is_deleted_and_a_restored_directory_of_its_name_kept(tmp_path: Path):
    disks = [tmp_path / "a", tmp_path / "b"]
    for disk in disks:
        disk.mkdir()
    for index in range(4):
        source = partition(disks[0], "moved", index, 3)
        copy = moving.PartitionCopy(source, disks[1], "moved", index, topic_id(3), PlainFiles())
        copy.begin()
        assert moving.find_future(disks[1], topic_id(3), index) == copy.path
    partition(disks[1], "moved", 0, 3)  # from a backup, for example: unrelated to any move
    doomed = look(disks, moved_image(0))
    assert len(doomed) == 4 and all(path.name.endswith("-delete") for path in doomed)
    assert names(disks[1], "-stray") == {"moved-0"} and list(moving.future_copies(disks[1])) == []
    assert sorted(path.name for path in disks[0].iterdir()) == [f"moved-{index}" for index in range(4)]


def test_the_former_owner_of_a_partition_finishes_its_deletion(tmp_path: Path):
    for index in range(8):
        partition(tmp_path, "t", index, 7)
        aside = directories.set_aside_for_deletion(tmp_path, "t", index, PlainFiles())
        assert aside is not None and directories.aside_partition_index(aside) == index
    finishes = {worker: log_directory(tmp_path, worker).open() for worker in range(WORKERS)}
    assert sorted(path for paths in finishes.values() for path in paths) == directories.leftovers(tmp_path)
    for worker, paths in finishes.items():
        assert {owner_of(topic_id(7), directories.aside_partition_index(path), WORKERS) for path in paths} <= {worker}


def test_the_file_that_identifies_the_partition_is_deleted_last(tmp_path: Path):
    directory = partition(tmp_path, "t", 0, 7)
    (directory / "zzz").write_bytes(b"")
    assert [path.name for path in directories.delete_tree(directory, PlainFiles())][-1] == directories.METADATA
    assert list(directories.delete_tree(directory, PlainFiles())) == [], "another worker was faster"


def test_the_metadata_remembers_the_newest_removed_topics(monkeypatch):
    monkeypatch.setattr(metadata_state, "REMOVED_TOPIC_IDS_MAX", 3)
    state = MetadataState()
    for number in range(5):
        one = PartitionState(
            index=0,
            replicas=(1,),
            directories=("d",),
            in_sync_replicas=(1,),
            leader=1,
            leader_epoch=0,
            partition_epoch=0,
        )
        state.apply(
            TopicCreated(TopicState(name=f"t{number}", topic_id=topic_id(number), partitions=(one,), config={}))
        )
        if number != 1:
            state.apply(TopicRemoved(topic_id(number)))
        state.check()
    assert list(state.removed_topic_ids) == [topic_id(2), topic_id(3), topic_id(4)]
    stored = msgspec.msgpack.decode(msgspec.msgpack.encode(state.snapshot()), type=Snapshot)
    again = MetadataState.from_snapshot(stored)
    assert again == state and list(again.removed_topic_ids) == list(state.removed_topic_ids)


def test_a_checkpoint_of_an_earlier_version_is_read():
    old = msgspec.to_builtins(MetadataState().snapshot())
    del old["removed_topic_ids"]
    assert MetadataState.from_snapshot(msgspec.convert(old, Snapshot)).removed_topic_ids == {}


def test_a_removed_replica_is_kept_until_the_metadata_are_current(tmp_path: Path):
    """While this host was down its replicas of partitions 0 and 1 were moved elsewhere; they may
    have been assigned to it again since those metadata.
    """
    for index in range(4):
        partition(tmp_path, "t", index, 3)
    partitions = [
        (
            PartitionImage(index, index, owner_of(topic_id(3), index, WORKERS), 0, 1, 0, [1, 2], [1])
            if index > 1
            else PartitionImage(index, -1, 65535, 255, 2, 0, [2, 3], [2])
        )
        for index in range(4)
    ]
    image = Image(1, "cluster", 1, [], [TopicImage("t", topic_id(3), partitions, {}, partition_count=4)], {}, node_id=1)
    for worker in range(WORKERS):
        assert set_aside_strays([log_directory(tmp_path, worker)], image, worker, WORKERS, PlainFiles()) == []
    assert names(tmp_path, "-stray") == names(tmp_path, "-delete") == set()
    requests: list[tuple[bytes, int]] = []

    def left_behind(topic: bytes, index: int) -> bool:
        requests.append((topic, index))
        return index < 2

    doomed = [
        path
        for worker in range(WORKERS)
        for _, path in set_aside_left_behind_replicas(
            [log_directory(tmp_path, worker)], left_behind, worker, WORKERS, PlainFiles()
        )
    ]
    assert names(tmp_path, "-delete") == {"t-0", "t-1"} == {path.name.split(".")[0] for path in doomed}
    assert sorted(requests) == [(topic_id(3), index) for index in range(4)], "each by one worker"
    assert (tmp_path / "t-2").is_dir() and (tmp_path / "t-3").is_dir()


def test_a_removed_replica_that_cannot_be_renamed_is_left_behind(tmp_path: Path):
    """An exception would end the worker, and again at each start."""

    class Refusing(PlainFiles):
        def rename(self, source: Path, target: Path) -> None:
            if source.name == "t-1":
                raise OSError(5, "Input/output error", str(source))
            super().rename(source, target)

        def sync_directory(self, path: Path) -> None:
            raise OSError(5, "Input/output error", str(path))

    for index in range(4):
        partition(tmp_path, "t", index, 3)
    doomed = []
    for worker in range(WORKERS):
        log_dirs = [log_directory(tmp_path / "unmounted", worker), log_directory(tmp_path, worker)]
        doomed += set_aside_left_behind_replicas(log_dirs, lambda *_: True, worker, WORKERS, Refusing())
    assert names(tmp_path, "-delete") == {"t-0", "t-2", "t-3"} == {path.name.split(".")[0] for _, path in doomed}
    assert (tmp_path / "t-1").is_dir()
