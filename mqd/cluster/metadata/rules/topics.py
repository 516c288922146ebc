"""Kafka's rules for changes to topics and configurations: translates a change into records, or refuses
it.

Pure functions of the state and the change; Refusal carries Kafka's error code and a message with the
topic or property. Sources: the public protocol guide, KIP-107 (DeleteRecords),
KIP-195 (CreatePartitions), KIP-339 (IncrementalAlterConfigs), KIP-516 (topic ids).
"""

import re
from collections.abc import Callable, Mapping

from mqd.base.property_values import ConfigError
from mqd.base.views import VIEW_OF
from mqd.cluster.host import messages
from mqd.cluster.metadata.records import (
    BrokerConfigured,
    GroupConfigured,
    PartitionsAdded,
    ProducerIdsAllocated,
    Record,
    TopicConfigured,
    TopicCreated,
    TopicRemoved,
    TopicState,
)
from mqd.cluster.metadata.refusal import Refusal
from mqd.cluster.metadata.rules import client_metrics, deduplication, fifo, schedules, spares, views
from mqd.cluster.metadata.rules.assignments import (
    PlacementContext,
    automatic_assignments,
    check_assignments,
    manual_assignments,
    place_partitions,
    spread,
)
from mqd.cluster.metadata.rules.configs import (
    RESOURCE_BROKER,
    RESOURCE_CLIENT_METRICS,
    RESOURCE_GROUP,
    RESOURCE_TOPIC,
    ConfigRules,
)
from mqd.cluster.metadata.rules.elections import UNCLEAN_ENABLE
from mqd.cluster.metadata.rules.partitions import (
    MIN_IN_SYNC,
    configured_min_in_sync,
    effective_min_in_sync,
    replicas_before,
)
from mqd.cluster.metadata.state import INTERNAL_TOPICS, MetadataState, collision_key
from mqd.protocol.errors import ErrorCode
from mqd.protocol.repeated import repeated

TOPIC_NAME_CHARS_MAX = 249
_LEGAL_NAME = re.compile(r"[A-Za-z0-9._-]+")
METADATA_TOPIC = "__cluster_metadata"
PRODUCER_ID_MAX = 2**63 - 1
PRODUCER_ID_BLOCK_MAX = 1_000_000
GROUP_CONFIGS_MAX = 100_000
OPERATIONS = ("set", "delete", "append", "subtract")


# -- names -----------------------------------------------------------------------------------------


def check_topic_name(name: str) -> None:
    """Raises Refusal(INVALID_TOPIC_EXCEPTION) with Kafka's reasons."""
    reason = None
    if not name:
        reason = "the empty string is not allowed"
    elif name in (".", ".."):
        reason = "'.' or '..' is not allowed"
    elif len(name) > TOPIC_NAME_CHARS_MAX:
        reason = f"the length of '{name}' is longer than the max allowed length {TOPIC_NAME_CHARS_MAX}"
    elif not _LEGAL_NAME.fullmatch(name):
        reason = f"'{name}' contains one or more characters other than ASCII alphanumerics, '.', '_' and '-'"
    elif name == METADATA_TOPIC:
        reason = f"creation of internal topic {METADATA_TOPIC} is prohibited"
    if reason is not None:
        raise Refusal(ErrorCode.INVALID_TOPIC_EXCEPTION, f"Topic name is invalid: {reason}")


def existing_topic(state: MetadataState, name: str) -> TopicState:
    topic = state.topics.get(name)
    if topic is None:
        raise Refusal(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"The topic '{name}' does not exist.")
    return topic


def _check_not_internal(name: str, verb: str) -> None:
    """Refuses changes to internal topics: groups and transactional ids are hashed to their partitions, so
    with another partition count existing state would not be found.
    """
    if name in INTERNAL_TOPICS:
        raise Refusal(
            ErrorCode.POLICY_VIOLATION,
            f"The internal topic {name} cannot be {verb}: it holds the state of all groups and transactions.",
        )


# -- create, extend, delete ------------------------------------------------------------------------


def create_topic(
    state: MetadataState,
    change: messages.CreateTopic,
    context: PlacementContext,
    rules: ConfigRules,
    new_id: Callable[[], bytes],
) -> list[Record]:
    check_topic_name(change.name)
    if change.name in state.topics:
        raise Refusal(ErrorCode.TOPIC_ALREADY_EXISTS, f"Topic '{change.name}' already exists.")
    collision = state.collisions.get(collision_key(change.name))
    if collision is not None:
        raise Refusal(
            ErrorCode.INVALID_TOPIC_EXCEPTION,
            f"Topic '{change.name}' collides with existing topic: {collision} ('.' and '_' are the same in metric"
            " names)",
        )
    config = _new_topic_config(change.config, rules)
    if config.get(VIEW_OF):
        return views.create(state, change, config, new_id)
    deduplication.check(state, config)
    schedules.check(state, change.name, config, {}, rules, state.broker_config(context.node_id))
    if change.assignments:
        assignments = manual_assignments(state, change)
    else:
        assignments = automatic_assignments(state, change, context, rules)
    _store_min_in_sync(state, change.name, config, len(assignments[0]), rules)
    partitions = spares.limit_in_sync(
        state, config, place_partitions(state, assignments, 0, context, 0, change.name in INTERNAL_TOPICS)
    )
    return [TopicCreated(TopicState(name=change.name, topic_id=new_id(), partitions=partitions, config=config))]


def _new_topic_config(config: Mapping[str, str | None], rules: ConfigRules) -> dict[str, str]:
    nulls = sorted(name for name, value in config.items() if value is None)
    if nulls:
        raise Refusal(ErrorCode.INVALID_CONFIG, f"Null value not supported for topic configs: {', '.join(nulls)}")
    for name in config:
        _check_known(rules, RESOURCE_TOPIC, name)
    return _check_config(rules, RESOURCE_TOPIC, {name: value for name, value in config.items() if value is not None})


def _store_min_in_sync(
    state: MetadataState, name: str, config: dict[str, str], replica_count: int, rules: ConfigRules
) -> None:
    """Adds this controller's min.insync.replicas to the topic's configuration, because the next
    controller's configuration file may differ (partitions.py).

    If that is the built-in default, a new topic of two replicas gets 1, so that it accepts records
    while one replica is down. The 1 is stored: without it the computed value would be 2, as for
    older topics. Internal topics always have the computed value, because they grow with the cluster.
    """
    if MIN_IN_SYNC in config or MIN_IN_SYNC in state.broker_configs.get("", {}):
        return
    value = rules.broker_number(MIN_IN_SYNC, {})
    if value != int(rules.built_in_default(MIN_IN_SYNC)):
        config[MIN_IN_SYNC] = str(value)
    elif replica_count == 2 and name not in INTERNAL_TOPICS:
        config[MIN_IN_SYNC] = "1"


def add_partitions(state: MetadataState, change: messages.AddPartitions, context: PlacementContext) -> list[Record]:
    topic = existing_topic(state, change.name)
    _check_not_internal(topic.name, "extended")
    views.check_not_view(topic, "extended")
    current = len(topic.partitions)
    if change.partition_count == current:
        raise Refusal(ErrorCode.INVALID_PARTITIONS, f"Topic already has {current} partition(s).")
    if change.partition_count < current:
        raise Refusal(
            ErrorCode.INVALID_PARTITIONS,
            f"The topic {change.name} currently has {current} partition(s); {change.partition_count} would not be an"
            " increase.",
        )
    if topic.partitions[-1].redirect >= 0:
        raise Refusal(
            ErrorCode.INVALID_PARTITIONS, f"Partitions of {change.name} are being retired; wait until they are gone."
        )
    # the requester did not know of all removed partitions when it checked for open transactions
    if topic.first_leader_epoch not in (0, change.first_leader_epoch):
        text = (
            f"The broker that received the request did not know of removed partitions of {change.name} yet, and could"
            " not check them for open transactions; try again."
        )
        raise Refusal(ErrorCode.LEADER_NOT_AVAILABLE, text)
    added = change.partition_count - current
    factor = len(replicas_before(topic.partitions[0]))
    if change.assignments is None:
        assignments = spread(state, added, factor, context, internal=False)
    else:
        if len(change.assignments) != added:
            raise Refusal(
                ErrorCode.INVALID_REPLICA_ASSIGNMENT,
                f"Attempted to add {added} additional partition(s), but {len(change.assignments)} assignment(s) were"
                " specified.",
            )
        assignments = check_assignments(state, change.assignments, factor)
    return [
        PartitionsAdded(
            topic.topic_id, place_partitions(state, assignments, current, context, topic.first_leader_epoch)
        )
    ]


def delete_topic(
    state: MetadataState, change: messages.DeleteTopic, context: PlacementContext, rules: ConfigRules
) -> list[Record]:
    if not rules.broker_value("delete.topic.enable", state.broker_config(context.node_id)):
        raise Refusal(ErrorCode.TOPIC_DELETION_DISABLED, "Topic deletion is disabled (delete.topic.enable=false).")
    topic_id = existing_topic(state, change.name).topic_id if change.name is not None else change.topic_id
    if topic_id is None or topic_id not in state.topics_by_id:
        raise Refusal(ErrorCode.UNKNOWN_TOPIC_ID, "This server does not host this topic ID.")
    _check_not_internal(state.topics_by_id[topic_id], "deleted")
    views.check_has_no_views(state, state.topics_by_id[topic_id])
    return [TopicRemoved(topic_id)]


def allocate_producer_ids(state: MetadataState, change: messages.AllocateProducerIds) -> list[Record]:
    if not 0 < change.count <= PRODUCER_ID_BLOCK_MAX:
        raise Refusal(
            ErrorCode.INVALID_REQUEST,
            f"A block of producer ids must have 1 to {PRODUCER_ID_BLOCK_MAX} ids, not {change.count}.",
        )
    if state.next_producer_id > PRODUCER_ID_MAX - change.count:
        raise Refusal(ErrorCode.POLICY_VIOLATION, "All producer ids are used up.")
    return [ProducerIdsAllocated(state.next_producer_id + change.count)]


# -- configuration ---------------------------------------------------------------------------------


def _check_known(rules: ConfigRules, resource_type: int, name: str) -> None:
    if not rules.is_known(resource_type, name):
        # broker settings of Kafka that mqd does not support are refused as not dynamically updatable
        is_renamed_or_unsupported = resource_type == RESOURCE_BROKER and rules.is_renamed_or_unsupported(name)
        code = ErrorCode.INVALID_REQUEST if is_renamed_or_unsupported else ErrorCode.INVALID_CONFIG
        raise Refusal(code, rules.refusal_of(resource_type, name))


def _check_config(rules: ConfigRules, resource_type: int, config: Mapping[str, str]) -> dict[str, str]:
    try:
        return rules.check(resource_type, config)
    except ConfigError as error:
        # Kafka's code for a broker's value, kept for compatibility (KAFKA-13609)
        code = ErrorCode.INVALID_REQUEST if resource_type == RESOURCE_BROKER else ErrorCode.INVALID_CONFIG
        raise Refusal(code, str(error)) from None


def alter_config(
    state: MetadataState, change: messages.AlterConfig, context: PlacementContext, rules: ConfigRules
) -> list[Record]:
    names = [operation.name for operation in change.operations]
    if duplicates := sorted(repeated(names)):
        raise Refusal(ErrorCode.INVALID_REQUEST, f"Error due to duplicate config keys: {', '.join(duplicates)}")
    for operation in change.operations:
        if operation.operation not in OPERATIONS:
            raise Refusal(ErrorCode.INVALID_REQUEST, f"Unknown operation {operation.operation} on {operation.name}.")
    if nulls := [
        operation.name for operation in change.operations if operation.value is None and operation.operation != "delete"
    ]:
        raise Refusal(ErrorCode.INVALID_REQUEST, f"Null value not supported for: {', '.join(nulls)}")
    broker_config = state.broker_config(context.node_id)
    if change.resource_type == RESOURCE_TOPIC:
        # Kafka's order of checks: the operations, the name, the values, and only then whether the
        # topic exists.
        current_topic = state.topics.get(change.resource_name)
        updated = _with_operations(current_topic.config if current_topic else {}, change, rules, broker_config)
        if not change.resource_name:
            raise Refusal(ErrorCode.INVALID_REQUEST, "Default topic resources are not allowed.")
        check_topic_name(change.resource_name)
        config = _checked_config(updated, change, rules)
        topic = existing_topic(state, change.resource_name)
        views.check_filter_unchanged(config, topic.config)
        _check_min_in_sync(topic, config, state.broker_configs.get("", {}))
        deduplication.check(state, config)
        spares.check(
            state,
            config,
            (len(partition.replicas) - len(partition.removing_replicas) for partition in topic.partitions),
        )
        schedules.check(state, topic.name, config, topic.config, rules, broker_config)
        return [] if config == topic.config else [TopicConfigured(topic.topic_id, config)]
    if change.resource_type == RESOURCE_BROKER:
        _check_broker_name(state, change.resource_name)
        current = state.broker_configs.get(change.resource_name, {})
        config = _new_config(current, change, rules, state.broker_configs.get("", {}) if change.resource_name else {})
        for operation in change.operations if change.resource_name else ():
            # as in Kafka, a broker's min.insync.replicas cannot be deleted either
            if operation.name == MIN_IN_SYNC or (operation.name == UNCLEAN_ENABLE and operation.operation == "set"):
                raise Refusal(
                    ErrorCode.INVALID_CONFIG,
                    f"{operation.name} cannot be set for one broker, because partitions move between brokers. Set it"
                    " for a topic, or for all brokers.",
                )
        if not change.resource_name and config.get(MIN_IN_SYNC) != current.get(MIN_IN_SYNC):
            for topic in state.topics.values():
                _check_min_in_sync(topic, topic.config, config)
        return [] if config == current else [BrokerConfigured(change.resource_name, config)]
    if change.resource_type == RESOURCE_GROUP:
        current = state.group_configs.get(change.resource_name, {})
        updated = _with_operations(current, change, rules, broker_config)
        if not change.resource_name:
            raise Refusal(ErrorCode.INVALID_REQUEST, "The name of a group must not be empty.")
        if not current and len(state.group_configs) >= GROUP_CONFIGS_MAX:
            raise Refusal(
                ErrorCode.POLICY_VIOLATION,
                f"{GROUP_CONFIGS_MAX} groups already have a configuration, which is the maximum; delete some.",
            )
        config = _checked_config(updated, change, rules)
        fifo.check(state, config, current)
        return [] if config == current else [GroupConfigured(change.resource_name, config)]
    if change.resource_type == RESOURCE_CLIENT_METRICS:
        current = state.client_metrics.get(change.resource_name, {})
        updated = _with_operations(current, change, rules, broker_config)
        client_metrics.check(state, change.resource_name, updated, rules)
        return client_metrics.configure(change.resource_name, current, _checked_config(updated, change, rules))
    raise Refusal(
        ErrorCode.INVALID_REQUEST,
        f"Unexpected resource type {change.resource_type}; topics (2), brokers (4), client metrics (16) and"
        " groups (32) have configurations.",
    )


def _check_min_in_sync(topic: TopicState, config: Mapping[str, str], broker_default: Mapping[str, str]) -> None:
    """R13: while a partition has eligible replicas, refuses a minimum that its in-sync replicas already
    satisfy: the metadata would then drop the eligible replicas, which also have all records.
    """
    configured = configured_min_in_sync(config, broker_default)
    for partition in topic.partitions:
        minimum = effective_min_in_sync(configured, len(partition.replicas), len(partition.adding_replicas))
        if partition.eligible_leader_replicas and minimum <= len(partition.in_sync_replicas):
            raise Refusal(
                ErrorCode.POLICY_VIOLATION,
                f"{MIN_IN_SYNC} cannot become {minimum} while {topic.name}-{partition.index} has eligible leader"
                f" replicas {list(partition.eligible_leader_replicas)}: wait until they are in sync again.",
            )


def _check_broker_name(state: MetadataState, name: str) -> None:
    """ "" is the default for all brokers; otherwise a registered node id in decimal."""
    if name and (not name.isascii() or not name.isdigit() or int(name) not in state.brokers or str(int(name)) != name):
        raise Refusal(
            ErrorCode.INVALID_REQUEST,
            f"Unexpected broker id '{name}', expected one of {sorted(state.brokers)}, or the empty string for all"
            " brokers.",
        )


def _new_config(
    current: Mapping[str, str], change: messages.AlterConfig, rules: ConfigRules, broker_config: Mapping[str, str]
) -> dict[str, str]:
    """The whole new configuration of the resource."""
    return _checked_config(_with_operations(current, change, rules, broker_config), change, rules)


def _with_operations(
    current: Mapping[str, str], change: messages.AlterConfig, rules: ConfigRules, broker_config: Mapping[str, str]
) -> dict[str, str]:
    config = {} if change.replace else dict(current)
    for operation in change.operations:
        _apply_operation(config, operation, change.resource_type, rules, broker_config)
    if change.replace:
        for name in current.keys() - config.keys():
            _check_dynamic(rules, change.resource_type, name)
    return config


def _checked_config(config: dict[str, str], change: messages.AlterConfig, rules: ConfigRules) -> dict[str, str]:
    checked = _check_config(rules, change.resource_type, config)
    for operation in change.operations:  # after the values of known properties, as in Kafka
        if operation.operation != "delete":
            _check_known(rules, change.resource_type, operation.name)
    return checked


def _check_dynamic(rules: ConfigRules, resource_type: int, name: str) -> None:
    if rules.is_known(resource_type, name) and not rules.is_dynamic(resource_type, name):
        raise Refusal(
            ErrorCode.INVALID_REQUEST,
            f"Cannot update these configs dynamically: {name}; set it in the configuration file and restart the"
            " broker.",
        )


def _apply_operation(
    config: dict[str, str],
    operation: messages.ConfigOperation,
    resource_type: int,
    rules: ConfigRules,
    broker_config: Mapping[str, str],
) -> None:
    name, value, verb = operation.name, operation.value, operation.operation
    if verb == "delete":  # also an unknown name, as in Kafka: tools delete throttles that are not set
        _check_dynamic(rules, resource_type, name)
        config.pop(name, None)
        return
    _check_dynamic(rules, resource_type, name)
    assert value is not None
    if verb == "set":
        config[name] = value
        return
    _check_known(rules, resource_type, name)
    if not rules.is_list(resource_type, name):
        raise Refusal(ErrorCode.INVALID_CONFIG, f"Can't {verb.upper()} to key {name} because its type is not LIST.")
    current = config.get(name)
    if current is None:
        current = rules.default(resource_type, name, broker_config) or ""
    items = [item for item in (part.strip() for part in current.split(",")) if item]
    listed = [item for item in (part.strip() for part in value.split(",")) if item]
    if verb == "append":
        items += [item for item in dict.fromkeys(listed) if item not in items]
    else:
        items = [item for item in items if item not in listed]
    config[name] = ",".join(items)
