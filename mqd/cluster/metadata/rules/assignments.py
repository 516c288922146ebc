"""Assignments of a topic's new partitions: replicas that the client lists or that placement chooses,
with Kafka's checks and error texts, and the partitions' initial state.
"""

from collections.abc import Sequence
from typing import NamedTuple

from mqd.cluster.host import messages
from mqd.cluster.metadata.limits import check_image, check_replicas
from mqd.cluster.metadata.records import PartitionState
from mqd.cluster.metadata.refusal import Refusal
from mqd.cluster.metadata.rules.configs import ConfigRules
from mqd.cluster.metadata.rules.partitions import COMPUTED, default_replication_factor
from mqd.cluster.metadata.rules.placement import Directories, Loads, choose_replicas, replica_limits
from mqd.cluster.metadata.state import INTERNAL_TOPICS, MetadataState
from mqd.cluster.metadata.view import View
from mqd.protocol.errors import ErrorCode


class PlacementContext(NamedTuple):
    """What the rules need to place new partitions."""

    node_id: int  # the controller's host, whose configuration file has the defaults
    view: View
    directories: Directories
    partition_count_max: int  # per host, without internal topics


def manual_assignments(state: MetadataState, change: messages.CreateTopic) -> list[tuple[int, ...]]:
    if change.partition_count != -1:
        raise Refusal(
            ErrorCode.INVALID_REQUEST,
            "A manual partition assignment was specified, but numPartitions was not set to -1.",
        )
    if change.replication_factor != -1:
        raise Refusal(
            ErrorCode.INVALID_REQUEST,
            "A manual partition assignment was specified, but replication factor was not set to -1.",
        )
    if sorted(change.assignments) != list(range(len(change.assignments))):
        raise Refusal(
            ErrorCode.INVALID_REPLICA_ASSIGNMENT, "Partitions should be a consecutive 0-based integer sequence."
        )
    ordered = [change.assignments[index] for index in range(len(change.assignments))]
    return check_assignments(state, ordered, len(ordered[0]))


def check_assignments(
    state: MetadataState, assignments: Sequence[Sequence[int]], replication_factor: int
) -> list[tuple[int, ...]]:
    for index, replicas in enumerate(assignments):
        check_replicas(
            len(replicas), ErrorCode.INVALID_REPLICA_ASSIGNMENT, f"Partition {index} of the manual partition assignment"
        )
        if not replicas:
            raise Refusal(
                ErrorCode.INVALID_REPLICA_ASSIGNMENT,
                f"The manual partition assignment {index} includes an empty replica list.",
            )
        if len(set(replicas)) != len(replicas):
            raise Refusal(
                ErrorCode.INVALID_REPLICA_ASSIGNMENT,
                f"The manual partition assignment includes the broker {_first_repeated(replicas)} more than once.",
            )
        unknown = [node for node in replicas if node not in state.brokers]
        if unknown:
            raise Refusal(
                ErrorCode.INVALID_REPLICA_ASSIGNMENT,
                f"The manual partition assignment includes broker {unknown[0]}, but no such broker is registered.",
            )
        if len(replicas) != replication_factor:
            raise Refusal(
                ErrorCode.INVALID_REPLICA_ASSIGNMENT,
                f"The manual partition assignment includes a partition with {len(replicas)} replica(s), but this is not"
                f" consistent with {replication_factor} replica(s) elsewhere.",
            )
    return [tuple(replicas) for replicas in assignments]


def _first_repeated(replicas: Sequence[int]) -> int:
    return next(node for node in replicas if replicas.count(node) > 1)


def automatic_assignments(
    state: MetadataState, change: messages.CreateTopic, context: PlacementContext, rules: ConfigRules
) -> list[tuple[int, ...]]:
    config = state.broker_config(context.node_id)
    count, factor = change.partition_count, change.replication_factor
    if factor == 0 or factor < -1:
        raise Refusal(
            ErrorCode.INVALID_REPLICATION_FACTOR,
            "Replication factor must be larger than 0, or -1 to use the default value.",
        )
    if count == 0 or count < -1:
        raise Refusal(ErrorCode.INVALID_PARTITIONS, "Number of partitions was set to an invalid non-positive value.")
    if count == -1:
        count = rules.broker_number("num.partitions", config)
    if factor == -1:
        factor = rules.broker_number("default.replication.factor", config)
    if factor == COMPUTED:
        # hosts that are down count: the topic will still have its replicas when they are back
        hosts = [node for node, broker in state.brokers.items() if not broker.draining]
        factor = default_replication_factor(context.directories.usable_host_count(hosts))
    check_replicas(factor)
    return spread(state, count, factor, context, change.name in INTERNAL_TOPICS)


def spread(
    state: MetadataState, count: int, factor: int, context: PlacementContext, internal: bool
) -> list[tuple[int, ...]]:
    """Chooses the replicas of new partitions. As in Kafka, fenced brokers are included, unless they are
    being drained: a fenced broker gets a replica if there are too few live ones, but does not lead.
    """
    live = context.view.placement_nodes()
    not_live = [node for node in sorted(state.brokers) if node not in live and not state.brokers[node].draining]
    if factor > len(live) + len(not_live):
        draining = sum(broker.draining for broker in state.brokers.values())
        exclusion = f", not counting {draining} being drained" if draining else ""
        raise Refusal(
            ErrorCode.INVALID_REPLICATION_FACTOR,
            f"Unable to replicate the partition {factor} time(s): The target replication factor of {factor} cannot be"
            f" reached because only {len(live) + len(not_live)} broker(s) are registered{exclusion}.",
        )
    if not live:
        raise Refusal(
            ErrorCode.INVALID_REPLICATION_FACTOR,
            f"Unable to replicate the partition {factor} time(s): All brokers are currently fenced.",
        )
    nodes = live if factor <= len(live) else live + not_live
    _check_room(state, count * factor, nodes, context, internal)
    check_image(state, count, count * factor)
    loads = Loads(state, nodes, context.directories.full_hosts(nodes), internal, not_live)
    chosen = [replicas for _ in range(count) if (replicas := choose_replicas(loads, factor)) is not None]
    if len(chosen) < count:
        raise Refusal(
            ErrorCode.INVALID_PARTITIONS,
            f"Fewer than {factor} hosts have room for {count} more partition(s); delete topics first, or add hosts.",
        )
    return chosen


def _check_room(
    state: MetadataState, count: int, nodes: Sequence[int], context: PlacementContext, internal: bool
) -> None:
    """Checks that the hosts have room. Called first: a huge request must not allocate a huge list."""
    limit_of = replica_limits(state, nodes, internal, context.partition_count_max)
    room = sum(max(0, limit_of[node] - replica_count) for node, replica_count in _replica_counts(state, nodes).items())
    if count > room:
        raise Refusal(
            ErrorCode.INVALID_PARTITIONS,
            _no_room_text(
                "This host has" if len(state.brokers) == 1 else "The hosts have",
                room,
                context.partition_count_max,
                count,
            ),
        )


def _no_room_text(who: str, room: int, limit: int, requested: int) -> str:
    return f"{who} room for {room} more partition(s) (of {limit}), {requested} were requested; delete topics first."


def _replica_counts(state: MetadataState, nodes: Sequence[int]) -> dict[int, int]:
    counts = dict.fromkeys(nodes, 0)
    for (node, _), count in state.directory_replica_counts.items():
        if node in counts:
            counts[node] += count
    return counts


def place_partitions(
    state: MetadataState,
    assignments: Sequence[tuple[int, ...]],
    first_index: int,
    context: PlacementContext,
    leader_epoch: int,
    internal: bool = False,
) -> tuple[PartitionState, ...]:
    """Returns new partitions, with a directory for each replica. Replicas on fenced brokers are not in
    sync, but at least one replica must be. Raises Refusal.
    """
    check_image(state, len(assignments), sum(map(len, assignments)))
    added_counts: dict[int, int] = {}
    for replicas in assignments:
        for node in replicas:
            added_counts[node] = added_counts.get(node, 0) + 1
    limit_of = replica_limits(state, list(added_counts), internal, context.partition_count_max)
    for node, replica_count in _replica_counts(state, list(added_counts)).items():
        if replica_count + added_counts[node] > limit_of[node]:
            who = "This host has" if node == context.node_id else f"Broker {node} has"
            raise Refusal(
                ErrorCode.INVALID_PARTITIONS,
                _no_room_text(
                    who, max(0, limit_of[node] - replica_count), context.partition_count_max, added_counts[node]
                ),
            )
    partitions = []
    for position, replicas in enumerate(assignments):
        in_sync = tuple(node for node in replicas if context.view.may_lead(node))
        if not in_sync:
            raise Refusal(
                ErrorCode.INVALID_REPLICA_ASSIGNMENT,
                f"All brokers specified in the manual partition assignment for partition {first_index + position} are"
                " fenced or in controlled shutdown.",
            )
        directories = []
        for node in replicas:
            directory = context.directories.choose(node)
            if directory is None:
                host_text = "this host" if node == context.node_id else f"broker {node}"
                raise Refusal(
                    ErrorCode.KAFKA_STORAGE_ERROR,
                    f"No log directory of {host_text} can be written to; see the broker's log for the reason.",
                )
            directories.append(directory)
        partitions.append(
            PartitionState(
                index=first_index + position,
                replicas=replicas,
                directories=tuple(directories),
                in_sync_replicas=in_sync,
                leader=in_sync[0],
                leader_epoch=leader_epoch,
            )
        )
    return tuple(partitions)
