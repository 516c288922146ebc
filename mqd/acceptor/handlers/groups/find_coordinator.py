"""FindCoordinator 0-6 (KIP-98, KIP-699, KIP-890, KIP-932): finds the coordinator of a group,
transactional id or share-partition (`group:topicId:partition`; version 6 and later). Each of these
belongs to a partition of an internal topic; its coordinator is the leader of that partition.

The first request creates the internal topic; until its partitions have leaders the response is
COORDINATOR_NOT_AVAILABLE, and the client retries. The same response is given for partitions that
this host leads while it has no lease.
"""

from mqd.acceptor.broker import Context
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.coordinator.runtime import Coordinator
from mqd.coordinator.share.records import split_name
from mqd.protocol.errors import ErrorCode, error_message
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import FindCoordinatorRequest, FindCoordinatorResponse

GROUP, TRANSACTION, SHARE = 0, 1, 2
SHARE_SINCE_VERSION = 6
NOT_AVAILABLE = "The coordinator is not available."


async def handle(context: Context, header: RequestHeader, request: FindCoordinatorRequest) -> FindCoordinatorResponse:
    keys = request.coordinator_keys if header.api_version >= 4 else [request.key]
    error, message = await _ensure_internal_topic(context, header, request.key_type, keys)
    results = [_coordinator(context, key, request.key_type, error, message) for key in keys]
    if header.api_version >= 4:
        return FindCoordinatorResponse(coordinators=results)
    result = results[0]
    return FindCoordinatorResponse(
        error_code=result.error_code,
        error_message=result.error_message,
        node_id=result.node_id,
        host=result.host,
        port=result.port,
    )


def _coordinator_of_type(context: Context, key_type: int) -> Coordinator | None:
    coordinators = context.broker.coordinators
    return (
        {GROUP: coordinators.groups, TRANSACTION: coordinators.transactions, SHARE: coordinators.share}.get(key_type)
        if coordinators is not None
        else None
    )


async def _ensure_internal_topic(
    context: Context, header: RequestHeader, key_type: int, keys: list[str]
) -> tuple[int, str | None]:
    """Creates the internal topic if it does not exist. Returns an error code and message."""
    if key_type == SHARE and header.api_version < SHARE_SINCE_VERSION:
        return int(ErrorCode.INVALID_REQUEST), error_message(ErrorCode.INVALID_REQUEST)
    coordinator = _coordinator_of_type(context, key_type)
    if coordinator is None and key_type == TRANSACTION:
        # This broker does not coordinate transactions: the client's next request gets an error that
        # clients treat as fatal.
        return 0, None
    if coordinator is None:
        return int(ErrorCode.INVALID_REQUEST), f"There are no coordinators of type {key_type} here."
    # Do not create the topic if no key can name a share-partition.
    if key_type == SHARE and not any(map(_is_share_partition, keys)):
        return 0, None
    if not await coordinator.ensure_topic():
        return int(ErrorCode.COORDINATOR_NOT_AVAILABLE), NOT_AVAILABLE
    return 0, None


def _coordinator_node_id(context: Context, key: str, key_type: int) -> int:
    """The coordinator's node id; -1: there is no coordinator at the moment."""
    coordinator = _coordinator_of_type(context, key_type)
    if coordinator is None:
        return context.broker.node_id
    try:
        image = context.broker.partition_of(coordinator.topic, coordinator.partition_for(key))
    except CoordinatorError:
        return -1
    if image is None or (image.leader == context.broker.node_id and not context.broker.may_lead()):
        return -1
    return image.leader


def _coordinator(
    context: Context, key: str, key_type: int, error: int, message: str | None
) -> FindCoordinatorResponse.Coordinator:
    if key_type == SHARE and not _is_share_partition(key):
        error, message = int(ErrorCode.INVALID_REQUEST), error_message(ErrorCode.INVALID_REQUEST)
    if not error:
        node = _coordinator_node_id(context, key, key_type)
        endpoint = context.broker.endpoint(node, context.origin)
        if endpoint is not None:
            return FindCoordinatorResponse.Coordinator(
                key=key, node_id=node, host=endpoint[0], port=endpoint[1], error_code=0, error_message=None
            )
        error, message = int(ErrorCode.COORDINATOR_NOT_AVAILABLE), NOT_AVAILABLE
    return FindCoordinatorResponse.Coordinator(
        key=key, node_id=-1, host="", port=-1, error_code=error, error_message=message
    )


def _is_share_partition(key: str) -> bool:
    try:
        split_name(key)
    except ValueError:
        return False
    return True
