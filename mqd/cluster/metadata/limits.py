"""Upper limits of a cluster's size. A request that would exceed a limit is refused.

REPLICAS_MAX: the replication core has room for this many replicas of a partition
(native/replica/rules.h, MQD_REPLICA_COUNT_MAX), including those that a reassignment adds and
removes. IMAGE_BYTES_MAX: every process gets the metadata as one image, and is disconnected when
more than SEND_BYTES_MAX (mqd/controller/server.py) is unread. The difference between these two
limits is for access control lists, credentials and tokens (55 MiB at their limits) and for
subsequent changes.
"""

from collections.abc import Iterable

from mqd.cluster.metadata.refusal import Refusal
from mqd.cluster.metadata.state import MetadataState, acl_bytes
from mqd.protocol.errors import ErrorCode
from mqd.security.acl import AclBinding

REPLICAS_MAX = 16
ACL_COUNT_MAX = 100_000
ACL_BYTES_MAX = 16 << 20  # total bytes of their names, principals and hosts
SCRAM_CREDENTIAL_COUNT_MAX = 100_000
TOKEN_COUNT_MAX = 10_000
TOKENS_PER_REQUESTER_MAX = 1_000  # requested by one principal
TOKEN_BYTES_MAX = 1024  # bytes of the principals in one token
IMAGE_BYTES_MAX = 120 << 20
# upper bounds of the encoded size of one topic, partition or replica;
# tests/unit/cluster/test_limits.py measures them
TOPIC_BYTES, PARTITION_BYTES, REPLICA_BYTES = 400, 150, 12


def image_bytes(state: MetadataState) -> int:
    """Upper bound on the image's size without brokers and configuration. The time to compute it does
    not depend on the number of partitions.
    """
    return (
        TOPIC_BYTES * len(state.topics)
        + PARTITION_BYTES * state.partition_count
        + REPLICA_BYTES * sum(state.directory_replica_counts.values())
    )


def check_image(state: MetadataState, new_partition_count: int, new_replica_count: int) -> None:
    """Checks the image's size with `new_partition_count` more partitions and `new_replica_count` more
    replicas in total. Raises Refusal(INVALID_PARTITIONS).
    """
    needed = image_bytes(state) + PARTITION_BYTES * new_partition_count + REPLICA_BYTES * new_replica_count
    if needed > IMAGE_BYTES_MAX:
        raise Refusal(
            ErrorCode.INVALID_PARTITIONS,
            f"The cluster has {state.partition_count} partitions; with {new_partition_count} more"
            f" ({new_replica_count} replicas) its"
            f" metadata would take {needed >> 20} MiB in every process, the limit is {IMAGE_BYTES_MAX >> 20} MiB."
            " Delete topics first, or use another cluster.",
        )


def check_acls(state: MetadataState, bindings: Iterable[AclBinding]) -> None:
    """Checks the number and size of the rules with `bindings` added. Raises
    Refusal(POLICY_VIOLATION).
    """
    count, size_bytes = len(state.acls), state.acl_bytes
    for binding in bindings:
        count, size_bytes = count + 1, size_bytes + acl_bytes(binding)
    if count > ACL_COUNT_MAX:
        raise Refusal(
            ErrorCode.POLICY_VIOLATION,
            f"The cluster would have {count} access control lists; {ACL_COUNT_MAX} is the maximum. Use prefixed"
            " resource patterns to need fewer.",
        )
    if size_bytes > ACL_BYTES_MAX:
        raise Refusal(
            ErrorCode.POLICY_VIOLATION,
            f"The names in the access control lists would take {size_bytes >> 20} MiB; {ACL_BYTES_MAX >> 20} MiB is"
            " the maximum.",
        )


def check_replicas(
    count: int, error: ErrorCode = ErrorCode.INVALID_REPLICATION_FACTOR, subject: str = "A partition"
) -> None:
    """Raises Refusal(`error`)."""
    if count > REPLICAS_MAX:
        raise Refusal(error, f"{subject} would have {count} replicas; {REPLICAS_MAX} is the maximum.")
