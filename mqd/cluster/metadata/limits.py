"""Upper limits of a cluster's size. A request beyond them is refused at once, before the limit is
reached in operation.

REPLICAS_MAX: the replication core of a partition has room for that many replicas
(native/replica/rules.h, MQD_REPLICA_COUNT_MAX), including those that a reassignment adds and
removes. IMAGE_BYTES_MAX: every process gets the metadata as one image, and is disconnected when
more bytes are unread (mqd/controller/server.py, SEND_BYTES_MAX); the remaining room is for
subsequent changes.
"""

from mqd.cluster.metadata.refusal import Refusal
from mqd.cluster.metadata.state import MetadataState
from mqd.protocol.errors import ErrorCode

REPLICAS_MAX = 16
IMAGE_BYTES_MAX = 120 << 20
# Upper bounds on their msgpack size; tests/unit/cluster/test_limits.py measures it.
TOPIC_BYTES, PARTITION_BYTES, REPLICA_BYTES = 400, 150, 12


def image_bytes(state: MetadataState) -> int:
    """Upper bound on the image's size without brokers and configuration. Constant time in the
    number of partitions.
    """
    return (
        TOPIC_BYTES * len(state.topics)
        + PARTITION_BYTES * state.partition_count
        + REPLICA_BYTES * sum(state.partition_counts.values())
    )


def check_image(state: MetadataState, partitions: int, replicas: int) -> None:
    """Checks the image with that many more. Raises Refusal(INVALID_PARTITIONS)."""
    wanted = image_bytes(state) + PARTITION_BYTES * partitions + REPLICA_BYTES * replicas
    if wanted > IMAGE_BYTES_MAX:
        raise Refusal(
            ErrorCode.INVALID_PARTITIONS,
            f"The cluster has {state.partition_count} partitions; with {partitions} more of {replicas} replicas its"
            f" metadata would take {wanted >> 20} MiB in every process, {IMAGE_BYTES_MAX >> 20} MiB are the limit."
            " Delete topics first, or use another cluster.",
        )


def check_replicas(
    count: int, error: ErrorCode = ErrorCode.INVALID_REPLICATION_FACTOR, what: str = "A partition"
) -> None:
    """Raises Refusal(`error`)."""
    if count > REPLICAS_MAX:
        raise Refusal(error, f"{what} would have {count} replicas; {REPLICAS_MAX} are the most.")
