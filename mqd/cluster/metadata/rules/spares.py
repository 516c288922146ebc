"""The rules for topics with acks.replicas, the size of the in-sync set; their other replicas are spares."""

from collections.abc import Iterable, Mapping

import msgspec

from mqd.cluster.metadata.features import ACKS_REPLICAS_LEVEL, MQD_VERSION, levels
from mqd.cluster.metadata.records import PartitionState
from mqd.cluster.metadata.refusal import Refusal
from mqd.cluster.metadata.rules.partitions import ACKS_REPLICAS, MIN_IN_SYNC, acks_replicas
from mqd.cluster.metadata.state import MetadataState
from mqd.protocol.errors import ErrorCode


def check(state: MetadataState, config: Mapping[str, str], replica_counts: Iterable[int]) -> None:
    """`config`: the new configuration of a topic. `replica_counts`: the number of replicas of each
    partition. Raises Refusal.
    """
    count = acks_replicas(config)
    if not count:
        return
    fewest = min(replica_counts, default=count)
    if count == 1:
        _refuse("it must be at least 2; for one replica, produce with acks=1")
    if count > fewest:
        _refuse(f"{count} is more than the {fewest} replica(s) of a partition of the topic")
    minimum = int(config.get(MIN_IN_SYNC) or state.broker_configs.get("", {}).get(MIN_IN_SYNC) or 0)
    if minimum > count:
        _refuse(f"{count} is less than {MIN_IN_SYNC}={minimum}; acks=all would always be refused")
    if levels(state.features)[MQD_VERSION] < ACKS_REPLICAS_LEVEL:
        _refuse(
            f"it needs level {ACKS_REPLICAS_LEVEL} of {MQD_VERSION}, which all hosts must support; run"
            " `mqd cluster upgrade` once they do"
        )


def limit_in_sync(
    state: MetadataState, config: Mapping[str, str], partitions: tuple[PartitionState, ...]
) -> tuple[PartitionState, ...]:
    """Limits the in-sync sets of a new topic's partitions to acks.replicas. Raises Refusal."""
    check(state, config, (len(partition.replicas) for partition in partitions))
    count = acks_replicas(config) or None
    return tuple(
        msgspec.structs.replace(partition, in_sync_replicas=partition.in_sync_replicas[:count])
        for partition in partitions
    )


def check_reassigned(name: str, config: Mapping[str, str], replica_count: int) -> None:
    """Raises Refusal."""
    if replica_count < acks_replicas(config):
        raise Refusal(
            ErrorCode.INVALID_REPLICA_ASSIGNMENT,
            f"{name} has {ACKS_REPLICAS}={acks_replicas(config)}, but would have only {replica_count} replica(s);"
            f" lower {ACKS_REPLICAS} first.",
        )


def _refuse(reason: str) -> None:
    raise Refusal(ErrorCode.INVALID_CONFIG, f"Invalid value for configuration {ACKS_REPLICAS}: {reason}.")
