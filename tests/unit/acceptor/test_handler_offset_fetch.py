"""OffsetFetch's errors: a group-level error is also set where clients look for it."""

import asyncio
from types import SimpleNamespace

import pytest

from mqd.acceptor.handlers.groups.offset_fetch import handle
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.protocol import codec
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import OffsetFetchRequest, OffsetFetchResponse


class _Refusing:
    """Coordinators that refuse all requests."""

    def __init__(self, error: ErrorCode) -> None:
        self._error = error

    async def request(self, *_arguments: object) -> None:
        raise CoordinatorError(self._error)


def answered(
    version: int, request: OffsetFetchRequest, error: ErrorCode | None = ErrorCode.NOT_COORDINATOR
) -> OffsetFetchResponse:
    """The decoded response; error None: from a host without coordinators."""
    context = SimpleNamespace(
        authorize=lambda *_rights, **_options: True,
        broker=SimpleNamespace(coordinators=SimpleNamespace(groups=_Refusing(error)) if error else None),
    )
    response = asyncio.run(handle(context, RequestHeader(9, version, 1, "client"), request))  # type: ignore[arg-type]
    decoded: OffsetFetchResponse = codec.decode(OffsetFetchResponse, version, codec.encode(response, version))
    return decoded


@pytest.mark.parametrize("version", range(1, 8))
def test_a_host_that_is_not_coordinator_sets_the_error_at_each_partition(version: int) -> None:
    """A client that only checks there must not conclude that the group has committed nothing."""
    topics = [OffsetFetchRequest.Topic(name="t", partition_indexes=[0, 2])]
    response = answered(version, OffsetFetchRequest(group_id="g", topics=topics))
    reported = [
        (topic.name, one.partition_index, one.committed_offset, one.error_code)
        for topic in response.topics
        for one in topic.partitions
    ]
    assert reported == [("t", 0, -1, ErrorCode.NOT_COORDINATOR), ("t", 2, -1, ErrorCode.NOT_COORDINATOR)]
    assert response.error_code == (ErrorCode.NOT_COORDINATOR if version >= 2 else 0)


@pytest.mark.parametrize("version", range(1, 11))
@pytest.mark.parametrize(("error", "reported"), [(14, 14), (15, 16), (16, 16), (None, 16)])
def test_clients_get_an_error_that_they_retry(version: int, error: int | None, reported: int) -> None:
    """On COORDINATOR_NOT_AVAILABLE some clients give up permanently."""
    if version < 8:
        request = OffsetFetchRequest(group_id="g", topics=[OffsetFetchRequest.Topic(name="t", partition_indexes=[0])])
    else:
        request = OffsetFetchRequest(groups=[OffsetFetchRequest.Group(group_id="g", topics=None)])
    response = answered(version, request, None if error is None else ErrorCode(error))
    found = {one.error_code for topic in response.topics for one in topic.partitions} | {
        group.error_code for group in response.groups
    }
    assert found | ({response.error_code} if 2 <= version < 8 else set()) == {reported}


@pytest.mark.parametrize("version", range(2, 8))
def test_a_request_for_all_partitions_gets_the_error_of_the_group(version: int) -> None:
    response = answered(version, OffsetFetchRequest(group_id="g", topics=None))
    assert (response.topics, response.error_code) == ([], ErrorCode.NOT_COORDINATOR)
