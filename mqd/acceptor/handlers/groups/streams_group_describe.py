"""StreamsGroupDescribe version 0 (KIP-1071): streams groups, their topologies, and their members
with tasks.
"""

from mqd.acceptor.broker import Context
from mqd.acceptor.handlers.groups.describing import describe
from mqd.acceptor.handlers.groups.group_requests import has_streams_groups
from mqd.coordinator.group.streams.events import StreamsDescribe
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import StreamsGroupDescribeRequest, StreamsGroupDescribeResponse


async def handle(
    context: Context, header: RequestHeader, request: StreamsGroupDescribeRequest
) -> StreamsGroupDescribeResponse:
    groups = await describe(
        context,
        request.group_ids,
        StreamsDescribe,
        StreamsGroupDescribeResponse.Group,
        _topics_of,
        is_supported=has_streams_groups(context.broker),
        includes_operations=request.include_authorized_operations,
    )
    return StreamsGroupDescribeResponse(groups=groups)


def _topics_of(group: StreamsGroupDescribeResponse.Group) -> set[str]:
    names: set[str] = set()
    for subtopology in (group.topology.subtopologies or ()) if group.topology is not None else ():
        names.update(subtopology.source_topics, subtopology.repartition_sink_topics)
        internal_topics = (*subtopology.repartition_source_topics, *subtopology.state_changelog_topics)
        names.update(topic.name for topic in internal_topics)
    return names
