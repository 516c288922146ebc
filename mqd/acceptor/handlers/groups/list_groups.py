"""ListGroups 0-5 (KIP-518, 848): every group with members, a generation or offsets; filtered by
state and type on request.
"""

from mqd.acceptor.broker import Context
from mqd.acceptor.handlers.groups.group_requests import group_coordinator
from mqd.coordinator.group.group import Group
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import ListGroupsRequest, ListGroupsResponse
from mqd.security.acl import Operation, ResourceType


async def handle(context: Context, header: RequestHeader, request: ListGroupsRequest) -> ListGroupsResponse:
    states = {state.lower() for state in request.states_filter}
    types = {kind.lower() for kind in request.types_filter}
    try:
        groups = group_coordinator(context.broker)
        groups.check_loaded()
        listings = [core.listing() for _, core in groups.items() if isinstance(core, Group) and core.is_visible]
    except CoordinatorError as error:
        return ListGroupsResponse(error_code=error.error_code)
    sees_all = context.authorize(Operation.DESCRIBE, ResourceType.CLUSTER, named_in_request=False)
    return ListGroupsResponse(
        groups=[
            ListGroupsResponse.Group(
                group_id=listing.group_id,
                protocol_type=listing.protocol_type,
                group_state=listing.state,
                group_type=listing.kind,
            )
            for listing in listings
            if (not states or listing.state.lower() in states)
            and (not types or listing.kind in types)
            and (
                sees_all
                or context.authorize(Operation.DESCRIBE, ResourceType.GROUP, listing.group_id, named_in_request=False)
            )
        ]
    )
