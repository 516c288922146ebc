"""Which partition a directory belongs to, and the deletion of directories."""

from pathlib import Path

import pytest

from mqd.log import directories
from tests.unit.log.log_files import PlainFiles

A, B = bytes(range(16)), bytes(range(16, 32))


def test_metadata_has_kafkas_format() -> None:
    assert directories.format_metadata(A) == b"version: 0\ntopic_id: AAECAwQFBgcICQoLDA0ODw\n"
    assert directories.parse_metadata(directories.format_metadata(B)) == B


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"version: 1\ntopic_id: AAECAwQFBgcICQoLDA0ODw\n",
        b"version: 0\n",
        b"version: 0\ntopic_id: short\n",
        b"\xff" * 40,
    ],
)
def test_invalid_metadata_is_refused(data: bytes) -> None:
    with pytest.raises(directories.TopicIdMismatch):
        directories.parse_metadata(data)


def test_a_new_directory_names_its_topic(tmp_path: Path) -> None:
    path, moved = directories.prepare(tmp_path, "t", 3, A, PlainFiles())
    assert path == tmp_path / "t-3" and moved is None
    assert directories.exists(tmp_path, "t", 3, A) and not directories.exists(tmp_path, "t", 3, B)


def test_preparing_again_changes_nothing(tmp_path: Path) -> None:
    directories.prepare(tmp_path, "t", 3, A, PlainFiles())
    files = PlainFiles()
    assert directories.prepare(tmp_path, "t", 3, A, files) == (tmp_path / "t-3", None)
    assert files.changes == []


def test_directory_of_another_topic_is_moved_aside_whole(tmp_path: Path) -> None:
    path, _ = directories.prepare(tmp_path, "t", 3, A, PlainFiles())
    (path / "00000000000000000000.log").write_bytes(b"old records")
    _, moved = directories.prepare(tmp_path, "t", 3, B, PlainFiles())
    assert moved is not None and moved.name.startswith("t-3.") and moved.name.endswith("-stray")
    assert (moved / "00000000000000000000.log").read_bytes() == b"old records"
    assert directories.exists(tmp_path, "t", 3, B) and list(path.glob("*.log")) == []
    assert directories.leftovers(tmp_path) == [], "a stray is never deleted by itself"


def test_records_without_metadata_are_not_served(tmp_path: Path) -> None:
    (tmp_path / "t-0").mkdir()
    (tmp_path / "t-0" / "00000000000000000000.log").write_bytes(b"whose?")
    assert directories.prepare(tmp_path, "t", 0, A, PlainFiles())[1] is not None


def test_a_crash_in_the_middle_of_creation_is_finished(tmp_path: Path) -> None:
    (tmp_path / "t-0").mkdir()
    assert directories.prepare(tmp_path, "t", 0, A, PlainFiles()) == (tmp_path / "t-0", None)
    assert directories.exists(tmp_path, "t", 0, A)


def test_a_directory_with_damaged_metadata_is_a_stray(tmp_path: Path) -> None:
    path, _ = directories.prepare(tmp_path, "t", 0, A, PlainFiles())
    (path / directories.METADATA).write_bytes(b"version: 0\ntopic_id")
    assert directories.prepare(tmp_path, "t", 0, A, PlainFiles())[1] is not None


def test_deletion_frees_the_name_first_and_durably(tmp_path: Path) -> None:
    path, _ = directories.prepare(tmp_path, "t", 0, A, PlainFiles())
    (path / "00000000000000000000.log").write_bytes(b"records")
    files = PlainFiles()
    aside = directories.set_aside_for_deletion(tmp_path, "t", 0, files)
    assert aside is not None and not path.exists()
    assert [kind for kind, _ in files.changes] == ["rename", "sync"]
    assert directories.leftovers(tmp_path) == [aside], "what a crash leaves is found by the next start"
    assert [step.name for step in directories.delete_tree(aside, files)] == [
        "00000000000000000000.log",
        "partition.metadata",
    ]
    assert not aside.exists()
    assert directories.set_aside_for_deletion(tmp_path, "t", 0, files) is None


def test_names_of_moved_directories_fit_the_limit(tmp_path: Path) -> None:
    name = directories.aside_name("x" * 249, 2147483647, "delete")
    assert len(name) <= 255
    (tmp_path / name).mkdir()
    assert directories.leftovers(tmp_path) == [tmp_path / name]


def test_a_topic_named_like_a_deleted_directory_is_not_deleted(tmp_path: Path) -> None:
    directories.prepare(tmp_path, "t-delete", 0, A, PlainFiles())
    directories.prepare(tmp_path, "t." + "0" * 32 + "-delete", 0, A, PlainFiles())
    assert directories.leftovers(tmp_path) == []


@pytest.mark.parametrize("metadata", [None, b"", b"\0" * 44])
@pytest.mark.parametrize("has_other_replicas", [False, True])
def test_lost_metadata_of_a_checkpointed_partition_is_an_error_with_a_remedy(
    tmp_path: Path, metadata: bytes | None, has_other_replicas: bool
) -> None:
    path, _ = directories.prepare(tmp_path, "t", 0, A, PlainFiles())
    (path / "00000000000000000000.log").write_bytes(b"records")
    (path / directories.METADATA).unlink()
    if metadata is not None:
        (path / directories.METADATA).write_bytes(metadata)
    files = PlainFiles()
    with pytest.raises(OSError, match="topic_id: AAECAwQFBgcICQoLDA0ODw.*restart the broker"):
        directories.prepare(tmp_path, "t", 0, A, files, 7, has_other_replicas)
    assert files.changes == [] and (path / "00000000000000000000.log").read_bytes() == b"records"
    # as the error message advises
    (path / directories.METADATA).write_text("version: 0\ntopic_id: AAECAwQFBgcICQoLDA0ODw\n")
    assert directories.prepare(tmp_path, "t", 0, A, files, 7, has_other_replicas) == (path, None)


def test_a_missing_directory_is_only_recreated_for_one_of_several_replicas(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="below offset 7"):
        directories.prepare(tmp_path, "t", 0, A, PlainFiles(), 7)
    assert not (tmp_path / "t-0").exists()
    assert directories.prepare(tmp_path, "t", 0, A, PlainFiles(), 7, has_other_replicas=True) == (
        tmp_path / "t-0",
        None,
    )
