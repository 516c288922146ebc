"""The cache of segments, while one thread reads it and another forgets partitions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PosixPath

from mqd.log.segments import TimestampCache, segment_path


class Meeting(PosixPath):
    """A path whose comparison lets another thread run first."""

    meanwhile: Callable[[], object] = staticmethod(lambda: None)

    def __eq__(self, other: object) -> bool:
        self.meanwhile()
        return super().__eq__(other)

    __hash__ = PosixPath.__hash__


def test_a_directory_is_forgotten_while_another_thread_reads_others() -> None:
    read: list[Path] = []

    def scan(path: Path, base_offset: int, position: int) -> tuple[int, int]:
        read.append(path)
        return 100, 1000 + base_offset

    cache = TimestampCache(scan)
    for name in ("deleted", "kept"):
        assert [cache.newest_in_sealed(Path(name), base) for base in (0, 10)] == [1000, 1010]
    counts = iter(range(1000))
    directory = Meeting("deleted")
    directory.meanwhile = lambda: cache.newest_in_sealed(Path(f"new-{next(counts)}"), 0)  # type: ignore[method-assign]
    cache.forget(directory)
    assert next(counts) > 0, "the other thread never came"
    read.clear()
    assert [cache.newest_in_sealed(Path(name), base) for name in ("deleted", "kept") for base in (0, 10)] == [
        1000,
        1010,
        1000,
        1010,
    ]
    assert read == [segment_path(Path("deleted"), base) for base in (0, 10)]


def test_two_forget_the_same_directory() -> None:
    cache = TimestampCache(lambda path, base_offset, position: (100, 1000))
    directory = Meeting("deleted")
    cache.newest_in_sealed(Path("deleted"), 0)
    directory.meanwhile = lambda: cache.forget(Path("deleted"))  # type: ignore[method-assign]
    cache.forget(directory)


def test_segments_found_after_the_directory_was_removed_are_not_kept() -> None:
    """A topic is deleted while retention reads its segments; a recreated one has other segments."""
    ends = [1000, 2000]
    before: list[Callable[[], None]] = [lambda: cache.forget(Path("t-0")), lambda: None]

    def scan(path: Path, base_offset: int, position: int) -> tuple[int, int]:
        assert position == 0
        before.pop(0)()
        return 100, ends.pop(0)

    cache = TimestampCache(scan)
    assert [cache.newest_in_sealed(Path("t-0"), 0), cache.newest_in_sealed(Path("t-0"), 0)] == [1000, 2000]
    ends += [1000, 2000]
    before += [lambda: cache.forget(Path("t-0")), lambda: None]
    assert [cache.newest_in_active(Path("t-0"), 0), cache.newest_in_active(Path("t-0"), 0)] == [1000, 2000]


def test_segments_below_the_log_start_are_forgotten() -> None:
    read: list[int] = []

    def scan(path: Path, base_offset: int, position: int) -> tuple[int, int]:
        read.append(base_offset)
        return 100, base_offset

    cache = TimestampCache(scan)
    for _ in range(2):
        assert [cache.newest_in_sealed(Path("t-0"), base) for base in (0, 10, 20)] == [0, 10, 20]
    cache.forget_below(Path("t-0"), 20)
    assert [cache.newest_in_sealed(Path("t-0"), base) for base in (0, 10, 20)] == [0, 10, 20]
    assert read == [0, 10, 20, 0, 10]
