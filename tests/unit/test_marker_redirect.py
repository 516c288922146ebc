"""Markers of transactions for partitions that are being retired: written to the partition that takes the records, too, under the rewritten producer id."""

import asyncio
from typing import Any

import pytest

from mqd.coordinator.log import AppendError, Log, Marker, Served
from mqd.protocol.errors import ErrorCode
from mqd.protocol.records import HEADER
from mqd.protocol.redirected import origin_of, redirected_producer

MARKER = Marker("t", 3, 7, 1, 5, True, 1_000, is_bumped=True)


class Owners:
    """`sent`: (slot, producer id, token)."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int, int]] = []

    def served(self, _topic: str, partition: int) -> Served:
        return Served(partition + 10, 0, 1, 4)

    def send_batch(self, _owner: int, token: int, slot: int, batch: bytes, *_: int) -> None:
        self.sent.append((slot, HEADER.unpack_from(batch)[9], token))


def run(*answers: tuple[int, int]) -> tuple[list[tuple[int, int]], Any]:
    """`answers`: (error, redirect) to the appends, in order. What was written where, and what came of it."""

    async def scenario() -> tuple[list[tuple[int, int]], Any]:
        owners = Owners()
        log = Log(owners, owners, 1 << 63)
        future = log.marker_nowait(MARKER)
        for number, (error, redirect) in enumerate(answers):
            assert log.produced(owners.sent[number][2], error, 20 + number, redirect)
            await asyncio.sleep(0)
        assert log.pending_count == 0
        try:
            result: Any = await asyncio.wait_for(future, 1)
        except AppendError as error:
            result = error.error
        return [one[:2] for one in owners.sent], result

    return asyncio.run(scenario())


def test_a_marker_goes_to_its_partition_alone_when_nothing_is_redirected() -> None:
    assert run((0, -1)) == ([(13, 7)], 20)


def test_a_marker_goes_to_both() -> None:
    assert run((0, 1), (0, -1)) == ([(13, 7), (11, redirected_producer(7, 3))], 20)


def test_what_was_written_before_to_the_first_is_written_to_the_second_all_the_same() -> None:
    assert run((ErrorCode.INVALID_PRODUCER_EPOCH, 1), (0, -1)) == ([(13, 7), (11, redirected_producer(7, 3))], ErrorCode.INVALID_PRODUCER_EPOCH)


@pytest.mark.parametrize("error", [ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.INVALID_PRODUCER_EPOCH])
def test_an_error_of_the_second_is_the_markers(error: int) -> None:
    assert run((0, 1), (error, -1))[1] == error


def test_an_error_of_the_first_that_is_tried_again_ends_it() -> None:
    assert run((ErrorCode.NOT_ENOUGH_REPLICAS, 1)) == ([(13, 7)], ErrorCode.NOT_ENOUGH_REPLICAS)


def test_numbers() -> None:
    assert origin_of(redirected_producer(7, 0)) == (7, 0) and origin_of(redirected_producer((1 << 40) - 1, (1 << 22) - 1)) == ((1 << 40) - 1, (1 << 22) - 1)
    assert origin_of(7) == (7, -1) and origin_of(-1) == (-1, -1) and redirected_producer(-1, 3) == -1
