"""OffsetFetch's errors: what concerns the whole group is told where every client looks."""

import asyncio
from types import SimpleNamespace

import pytest

from mqd.acceptor.handlers.offset_fetch import handle
from mqd.coordinator.runtime import CoordinatorError
from mqd.protocol import codec
from mqd.protocol.errors import ErrorCode
from mqd.protocol.framing import RequestHeader
from mqd.protocol.messages import OffsetFetchRequest, OffsetFetchResponse


class _Elsewhere:
    """The coordinators of a host that does not coordinate the group."""

    async def request(self, *_arguments: object) -> None:
        raise CoordinatorError(ErrorCode.NOT_COORDINATOR)


def answered(version: int, request: OffsetFetchRequest) -> OffsetFetchResponse:
    """As it comes out of the wire."""
    context = SimpleNamespace(broker=SimpleNamespace(coordinators=SimpleNamespace(groups=_Elsewhere())))
    response = asyncio.run(handle(context, RequestHeader(9, version, 1, "client"), request))  # type: ignore[arg-type]
    decoded: OffsetFetchResponse = codec.decode(OffsetFetchResponse, version, codec.encode(response, version))
    return decoded


@pytest.mark.parametrize("version", range(1, 8))
def test_a_host_that_does_not_coordinate_says_so_at_each_partition(version: int) -> None:
    """Who looks there only, must not take it for a group that has committed nothing."""
    topics = [OffsetFetchRequest.Topic(name="t", partition_indexes=[0, 2])]
    response = answered(version, OffsetFetchRequest(group_id="g", topics=topics))
    told = [(topic.name, one.partition_index, one.committed_offset, one.error_code) for topic in response.topics for one in topic.partitions]
    assert told == [("t", 0, -1, ErrorCode.NOT_COORDINATOR), ("t", 2, -1, ErrorCode.NOT_COORDINATOR)]
    assert response.error_code == (ErrorCode.NOT_COORDINATOR if version >= 2 else 0)


@pytest.mark.parametrize("version", range(2, 8))
def test_who_asks_for_all_partitions_is_told_of_the_group(version: int) -> None:
    response = answered(version, OffsetFetchRequest(group_id="g", topics=None))
    assert (response.topics, response.error_code) == ([], ErrorCode.NOT_COORDINATOR)
