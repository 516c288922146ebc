"""What the handlers of group requests share: what is checked before a request goes to its group's core, and how a coordinator that cannot answer is told of."""

from __future__ import annotations

from collections.abc import Callable

from mqd.acceptor.broker import Broker
from mqd.coordinator.runtime import Coordinator, CoordinatorError
from mqd.protocol.errors import ErrorCode

NAME_BYTES_MAX = 32767  # what a record's string holds
# READ, DELETE and DESCRIBE: all that can be done to a group, where nobody is kept from anything (KIP-430).
AUTHORIZED_OPERATIONS = 1 << 3 | 1 << 6 | 1 << 8


def is_group_id(name: str) -> bool:
    """Whether members can gather under it. Offsets, descriptions and deletion also know the empty one."""
    return 0 < len(name) <= NAME_BYTES_MAX and (len(name) <= NAME_BYTES_MAX // 4 or len(name.encode()) <= NAME_BYTES_MAX)


def coordinator(broker: Broker) -> Coordinator:
    """Raises CoordinatorError."""
    if broker.coordinators is None:
        raise CoordinatorError(ErrorCode.COORDINATOR_NOT_AVAILABLE)
    return broker.coordinators.groups


async def ask(broker: Broker, group_id: str, make_event: Callable[[int], object]) -> object:
    """The core's response. It comes when the core gives it: a JoinGroup waits as long as its rebalance does. Raises CoordinatorError."""
    if not is_group_id(group_id):
        raise CoordinatorError(ErrorCode.INVALID_GROUP_ID)
    return await coordinator(broker).request(group_id, make_event)
