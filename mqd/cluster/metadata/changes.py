"""Translates a client's change into records, a response, and the topic to return in the response: one
function per kind of change. For the active controller only.

A change to several partitions is treated as several changes: each has its own result, and a refusal
of one does not affect the others (KIP-455, KIP-460). All records of a request form one batch.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from mqd.cluster.host import messages
from mqd.cluster.metadata.active_controller import ActiveController
from mqd.cluster.metadata.maintenance import group_changes
from mqd.cluster.metadata.records import BrokerChanged, PartitionChange, PartitionState, Record, TopicState
from mqd.cluster.metadata.refusal import Refusal
from mqd.cluster.metadata.rules import brokers as broker_rules
from mqd.cluster.metadata.rules import elections as election_rules
from mqd.cluster.metadata.rules import placement
from mqd.cluster.metadata.rules import reassignments as reassign_rules
from mqd.cluster.metadata.rules import retirement as retire_rules
from mqd.cluster.metadata.rules import security as security_rules
from mqd.cluster.metadata.rules import settings as settings_rules
from mqd.cluster.metadata.rules import tokens as token_rules
from mqd.cluster.metadata.rules import topics as rules
from mqd.cluster.metadata.rules.configs import RESOURCE_TOPIC, ConfigRules
from mqd.cluster.metadata.state import MetadataState
from mqd.protocol.errors import ErrorCode

PARTITIONS_PER_REQUEST_MAX = 200_000


class Decision(NamedTuple):
    response: messages.Response
    topic_name: str | None
    records: list[Record]


def decide(
    state: MetadataState,
    active: ActiveController,
    request: messages.Request,
    context: rules.PlacementContext,
    config_rules: ConfigRules,
    new_id: Callable[[], bytes],
) -> Decision:
    """Raises Refusal."""
    change, request_id = request.change, request.request_id

    def success(records: list[Record], topic_name: str | None = None) -> Decision:
        return Decision(messages.Response(request_id, 0), topic_name, records)

    match change:
        case messages.CreateTopic():
            return success(rules.create_topic(state, change, context, config_rules, new_id), change.name)
        case messages.AddPartitions():
            return success(rules.add_partitions(state, change, context), change.name)
        case messages.DeleteTopic():
            return success(rules.delete_topic(state, change, context, config_rules))
        case messages.AlterConfig():
            return success(rules.alter_config(state, change, context, config_rules))
        case messages.AlterClientQuota():
            return success(settings_rules.alter_client_quota(state, change))
        case messages.UpdateFeatures():
            return success(settings_rules.update_features(state, change))
        case messages.CreateAcls():
            return success(security_rules.create_acls(state, change, new_id))
        case messages.DeleteAcls():
            return Decision(*security_rules.delete_acls(state, change, request_id))
        case messages.AlterScramCredentials():
            return Decision(*security_rules.alter_scram_credentials(state, change, request_id))
        case messages.CreateDelegationToken():
            return success(token_rules.create(state, change.token))
        case messages.SetTokenExpiry():
            return Decision(*token_rules.set_expiry(state, change, request_id))
        case messages.AllocateProducerIds():
            response = messages.Response(request_id, 0, offset=state.next_producer_id, count=change.count)
            return Decision(response, None, rules.allocate_producer_ids(state, change))
        case messages.AlterReassignments():
            return _alter_reassignments(context, change, request_id)
        case messages.ElectLeaders():
            return _elect_leaders(context, change, request_id)
        case messages.BalanceReplicas():
            return _balance(state, active, context, change, request)
        case messages.UnregisterBroker():
            return success(broker_rules.unregister(state, change.node_id))
        case messages.DrainBroker():
            return success(_drain(state, change))
        case messages.RetirePartitions():
            policy = config_rules.default(RESOURCE_TOPIC, "cleanup.policy", state.broker_config(context.node_id)) or ""
            return success(
                retire_rules.retire(context.view, change.name, change.partition_count, change.allow_moved_keys, policy),
                change.name,
            )
        case messages.ReleaseRetired():
            return success(retire_rules.release(context.view, rules.existing_topic(state, change.name)), change.name)
        case _:
            raise Refusal(ErrorCode.INVALID_REQUEST, f"{type(change).__name__} is not a metadata change.")


def _partition(state: MetadataState, name: str, index: int) -> tuple[TopicState, PartitionState]:
    topic = state.topics.get(name)
    if topic is None or not 0 <= index < len(topic.partitions):
        raise Refusal(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"There is no partition {name}-{index}.")
    return topic, topic.partitions[index]


def _change_each(
    requested: Iterable[tuple[str, int]],
    request_id: int,
    view_state: MetadataState,
    make_change: Callable[[int, TopicState, PartitionState], PartitionChange | None],
) -> Decision:
    """Returns one result for each partition; `make_change(n, ...)` returns the change to the n-th
    partition, or None if it needs none. A partition that is listed twice is changed only the first time.
    """
    changes: list[tuple[TopicState, PartitionChange]] = []
    results: list[messages.PartitionResult] = []
    seen: set[tuple[str, int]] = set()
    for position, (name, index) in enumerate(requested):
        try:
            if (name, index) in seen:
                raise Refusal(ErrorCode.INVALID_REQUEST, f"{name}-{index} is listed twice.")
            seen.add((name, index))
            topic, partition = _partition(view_state, name, index)
            change = make_change(position, topic, partition)
        except Refusal as refusal:
            results.append(messages.PartitionResult(name, index, refusal.error, refusal.message))
            continue
        results.append(messages.PartitionResult(name, index))
        if change is not None:
            changes.append((topic, change))
    return Decision(messages.Response(request_id, 0, results=results), None, group_changes(changes))


def _alter_reassignments(
    context: rules.PlacementContext, change: messages.AlterReassignments, request_id: int
) -> Decision:
    if len(change.partitions) > PARTITIONS_PER_REQUEST_MAX:
        raise Refusal(
            ErrorCode.INVALID_REQUEST,
            f"The request has {len(change.partitions)} partitions; at most {PARTITIONS_PER_REQUEST_MAX} are allowed.",
        )

    def make_change(position: int, topic: TopicState, partition: PartitionState) -> PartitionChange | None:
        target = change.partitions[position].replicas
        if target is None:
            return reassign_rules.cancel(context.view, topic, partition)
        reassign_rules.check_target(context.view, partition, target, change.allow_replication_factor_change)
        return reassign_rules.reassign(context.view, topic, partition, tuple(target), context.directories)

    return _change_each(
        ((entry.name, entry.partition) for entry in change.partitions), request_id, context.view.state, make_change
    )


def _elect_leaders(context: rules.PlacementContext, change: messages.ElectLeaders, request_id: int) -> Decision:
    view, election_type, requested = context.view, change.election_type, change.partitions
    if requested is None:
        requested = [
            (topic.name, partition.index)
            for topic in view.state.topics.values()
            for partition in topic.partitions
            if election_rules.needs_election(view, election_type, topic, partition)
        ]
    return _change_each(
        requested,
        request_id,
        view.state,
        lambda _, topic, partition: election_rules.elect(view, election_type, topic, partition),
    )


def _balance(
    state: MetadataState,
    active: ActiveController,
    context: rules.PlacementContext,
    change: messages.BalanceReplicas,
    request: messages.Request,
) -> Decision:
    """Returns the first moves (at most placement.BALANCE_MOVES_MAX). Unless validate_only is set, they
    are started a few at a time, and more follow until all replicas are balanced.
    """
    names = None if change.topics is None else frozenset(change.topics)
    for name in sorted(names or ()):
        rules.existing_topic(state, name)
    nodes = context.view.placement_nodes()
    moves = placement.plan_balance(
        state, nodes, lambda name: names is None or name in names, full=context.directories.full_hosts(nodes)
    )
    if not request.validate_only:
        active.start_balancing(moves, names)
    results = [messages.PartitionResult(move.name, move.index, replicas=list(move.replicas)) for move in moves]
    return Decision(messages.Response(request.request_id, 0, results=results), None, [])


def _drain(state: MetadataState, change: messages.DrainBroker) -> list[Record]:
    broker = state.brokers.get(change.node_id)
    if broker is None:
        raise Refusal(ErrorCode.BROKER_ID_NOT_REGISTERED, f"Broker ID {change.node_id} is not currently registered.")
    if broker.draining == (not change.cancel):
        return []
    others = [
        other
        for other in state.brokers.values()
        if other.node_id != change.node_id and not other.fenced and not other.draining
    ]
    if not change.cancel and not others:
        raise Refusal(
            ErrorCode.POLICY_VIOLATION,
            f"There is no other live broker that could take the replicas of broker {change.node_id}.",
        )
    return [BrokerChanged(change.node_id, broker.epoch, draining=not change.cancel)]
