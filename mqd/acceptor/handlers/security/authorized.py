"""The operations that each type of resource supports, as bits numbered like Kafka's AclOperation
(KIP-430). Context.authorized_operations() removes those that the client may not do.
"""

from mqd.acceptor.broker import Context
from mqd.security.acl import CLUSTER_NAME, Operation, ResourceType


def _bits(*operations: Operation) -> int:
    return sum(1 << operation for operation in operations)


_CONFIGS = (Operation.DESCRIBE_CONFIGS, Operation.ALTER_CONFIGS)
TOPIC_OPERATIONS = _bits(
    Operation.READ, Operation.WRITE, Operation.CREATE, Operation.DELETE, Operation.ALTER, Operation.DESCRIBE, *_CONFIGS
)
CLUSTER_OPERATIONS = _bits(
    Operation.CREATE,
    Operation.ALTER,
    Operation.DESCRIBE,
    Operation.CLUSTER_ACTION,
    Operation.IDEMPOTENT_WRITE,
    *_CONFIGS,
)
GROUP_OPERATIONS = _bits(Operation.READ, Operation.DELETE, Operation.DESCRIBE, *_CONFIGS)


def authorized_cluster_operations(context: Context) -> int:
    """The operations that the client may do on the cluster. As in Kafka, none (0) without DESCRIBE."""
    if not context.authorize(Operation.DESCRIBE, ResourceType.CLUSTER, named_in_request=False):
        return 0
    return context.authorized_operations(ResourceType.CLUSTER, CLUSTER_NAME, CLUSTER_OPERATIONS)
