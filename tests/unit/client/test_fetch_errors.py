"""The position of a partition whose reading fails, or moves between hosts: it is kept, so that no
record is returned twice.
"""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any

import pytest

from mqd.client.shm.reading import Problem
from mqd.protocol.errors import ErrorCode
from tests.unit.client.client_consumer import NEW, TOPIC, ConsumerWorld, LogReader, look_again, make, world  # noqa: F401


def read_offsets(world: ConsumerWorld, count: int) -> list[int]:
    """The offsets of the next records; errors are skipped."""
    found: list[int] = []
    while len(found) < count:
        message = world.consumer.poll(30)
        assert message is not None
        if message.error() is None:
            found.append(message.offset())
    return found


@pytest.fixture
def part(world: ConsumerWorld) -> Any:
    """Its five records have been read, and there are three more."""
    assert read_offsets(world, 5) == [0, 1, 2, 3, 4]
    world.ends[0] = world.readers[0].end = 8
    return world.consumer.parts.get((TOPIC, 0))


def test_reading_continues_after_an_error_of_a_file(
    world: ConsumerWorld, part: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = part.reader.read

    def fail(*_maxima: int) -> None:
        monkeypatch.setattr(part.reader, "read", read)
        raise OSError(errno.EIO, "a damaged disk")

    monkeypatch.setattr(part.reader, "read", fail)
    assert read_offsets(world, 3) == [5, 6, 7]


def test_reading_continues_when_a_reader_on_this_host_cannot_be_opened_at_once(
    world: ConsumerWorld, part: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetcher = world.consumer._fetcher
    open_reader = fetcher._open_reader

    def fail(*_arguments: object) -> None:
        monkeypatch.setattr(fetcher, "_open_reader", open_reader)
        raise BrokenPipeError(errno.EPIPE, "the worker has ended")

    monkeypatch.setattr(fetcher, "_open_reader", fail)
    part.remote_replicas = ()  # it is read from another host, and has a replica here now
    fetcher.on_metadata()
    assert read_offsets(world, 3) == [5, 6, 7]


def test_an_offset_out_of_range_is_reset_although_the_end_is_not_found_at_once(
    world: ConsumerWorld, part: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """auto.offset.reset is latest: the log was truncated to three records, and has grown again."""
    world.ends[0], world.list_errors, reader = 3, [int(ErrorCode.NOT_LEADER_OR_FOLLOWER)], part.reader
    reader.end, reader.problem = 4, Problem("range")

    def seek(offset: int) -> None:
        reader.position = offset
        reader.problem = Problem("range") if offset > reader.end else None

    monkeypatch.setattr(reader, "seek", seek)
    assert read_offsets(world, 1) == [3] and not world.list_errors


def test_a_partition_without_metadata_is_read_from_another_host(world: ConsumerWorld, part: Any) -> None:
    world.broker.topics.clear()
    look_again(world)
    opened = LogReader(0, NEW, 5, 8, lambda: None)

    def open_remote(*_arguments: object) -> LogReader:
        world.consumer._inbox.notify()  # it has records
        return opened

    world.consumer._fetcher._remote = SimpleNamespace(open=open_remote)
    part.reader.problem = Problem("gone", int(ErrorCode.REPLICA_NOT_AVAILABLE))
    assert read_offsets(world, 3) == [5, 6, 7] and part.reader is opened
    world.consumer._fetcher.on_metadata()
    assert part.reader is opened
