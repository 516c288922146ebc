"""What a cluster cannot be larger than, refused when it is asked for and not met later.

REPLICAS_MAX: the replication core of a partition has room for so many (native/replica/rules.h,
MQD_REPLICA_COUNT_MAX), those that a reassignment brings and those that it takes away together.
IMAGE_BYTES_MAX: every process gets the metadata as one image, and is disconnected when more is
unread (mqd/controller/server.py, SEND_BYTES_MAX); the rest of that is for the news behind it.
"""

from mqd.cluster.metadata.refusal import Refusal
from mqd.cluster.metadata.state import MetadataState
from mqd.protocol.errors import ErrorCode

REPLICAS_MAX = 16
IMAGE_BYTES_MAX = 120 << 20
# Upper bounds of what msgpack makes of them; tests/unit/cluster/test_limits.py measures it.
TOPIC_BYTES, PARTITION_BYTES, REPLICA_BYTES = 400, 150, 12


def image_bytes(state: MetadataState) -> int:
    """At most so many bytes has the image, but for what brokers and configuration take. In constant
    time for the number of partitions.
    """
    return (
        TOPIC_BYTES * len(state.topics)
        + PARTITION_BYTES * state.partition_count
        + REPLICA_BYTES * sum(state.partition_counts.values())
    )


def check_image(state: MetadataState, partitions: int, replicas: int) -> None:
    """With so many more. Raises Refusal(INVALID_PARTITIONS)."""
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
