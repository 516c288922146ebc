"""Rules for settings other than those of topics and brokers: quotas, feature levels, and
moves of replicas between directories.

Pure functions of the state and the change, as in topics.py; Refusal carries Kafka's error code.
Sources: KIP-113, KIP-546, KIP-584, KIP-599, KIP-612, KIP-1022.
"""

import math
from collections.abc import Mapping
from ipaddress import ip_address

from mqd.base.config import broker_number
from mqd.cluster.host import messages
from mqd.cluster.metadata.features import FEATURES, MQD_VERSION, levels
from mqd.cluster.metadata.records import ClientQuotaSet, Entity, FeatureLevelSet, Record, ReplicaMoved
from mqd.cluster.metadata.refusal import Refusal
from mqd.cluster.metadata.state import MetadataState
from mqd.protocol.errors import ErrorCode
from mqd.protocol.repeated import repeated

CLIENT_QUOTA_COUNT_MAX = 4096  # capacity of the table in the control segment
ENTITY_NAME_BYTES_MAX = 32767

USER, CLIENT_ID, IP = "user", "client-id", "ip"
PRODUCE, FETCH, REQUEST = "producer_byte_rate", "consumer_byte_rate", "request_percentage"
MUTATION, CONNECTION = "controller_mutation_rate", "connection_creation_rate"
QUOTA_KEYS = (PRODUCE, FETCH, REQUEST, MUTATION)  # the quotas of users and client ids
# Keys with integer values: Kafka's type, and the lowest value that is too large for it.
_INTEGER_LIMITS = {PRODUCE: ("a LONG", 2**63), FETCH: ("a LONG", 2**63), CONNECTION: ("an INT", 2**31)}
UPGRADE, SAFE_DOWNGRADE, UNSAFE_DOWNGRADE = 1, 2, 3


def quota_window_ns(config: Mapping[str, str]) -> int:
    """The burst that a quota allows, as a duration: how long traffic at the quota's rate takes to
    add up to it. This is the length of the complete windows over which Kafka measures a rate (all
    of quota.window.num but the current one).
    """
    window_s = broker_number(config, "quota.window.size.seconds")
    return (broker_number(config, "quota.window.num") - 1) * window_s * 1_000_000_000


# -- quotas ----------------------------------------------------------------------------------------


def checked_entity(entity: list[tuple[str, str | None]]) -> Entity:
    """Returns the entity ordered by type. Raises Refusal with Kafka's messages."""
    types = [kind for kind, _ in entity]
    if not entity:
        raise Refusal(ErrorCode.INVALID_REQUEST, "Invalid empty client quota entity")
    for kind, name in entity:
        if kind not in (USER, CLIENT_ID, IP):
            raise Refusal(ErrorCode.INVALID_REQUEST, f"Unhandled client quota entity type: {kind}")
        if types.count(kind) > 1:
            raise Refusal(ErrorCode.INVALID_REQUEST, f"Invalid client quota entity, duplicate entity entry {kind}")
        if name == "":
            raise Refusal(ErrorCode.INVALID_REQUEST, f"Empty {kind} not supported")
        if name is not None and len(name.encode()) > ENTITY_NAME_BYTES_MAX:
            raise Refusal(
                ErrorCode.INVALID_REQUEST, f"The name of a {kind} must have at most {ENTITY_NAME_BYTES_MAX} bytes"
            )
    if IP in types:
        _check_ip(entity)
    return tuple(sorted(entity, key=lambda pair: pair[0]))


def _check_ip(entity: list[tuple[str, str | None]]) -> None:
    if len(entity) > 1:
        raise Refusal(
            ErrorCode.INVALID_REQUEST,
            "Invalid quota entity combination, IP entity should not be combined with User or ClientId",
        )
    ((_, name),) = entity
    try:
        ip_address(name or "::")
    except ValueError:
        raise Refusal(
            ErrorCode.INVALID_REQUEST,
            f"{name} is not a valid IP. Use an address such as 10.0.0.1 or ::1: host names are not resolved",
        ) from None


def _checked_quota(key: str, value: float) -> float:
    if not math.isfinite(value) or value <= 0:
        raise Refusal(ErrorCode.INVALID_REQUEST, f"Quota {key} must be greater than 0")
    type_text, limit = _INTEGER_LIMITS.get(key, ("a DOUBLE", math.inf))
    if value >= limit:
        raise Refusal(ErrorCode.INVALID_REQUEST, f"Proposed value for {key} is too large for {type_text}.")
    if key in _INTEGER_LIMITS and value != int(value):
        raise Refusal(ErrorCode.INVALID_REQUEST, f"{key} cannot be a fractional value.")
    return value


def alter_client_quota(state: MetadataState, change: messages.AlterClientQuota) -> list[Record]:
    entity = checked_entity(change.entity)
    keys = [operation.key for operation in change.operations]
    if duplicates := repeated(keys):
        raise Refusal(ErrorCode.INVALID_REQUEST, f"Duplicate quota key {duplicates[0]}.")
    allowed_keys = (CONNECTION,) if entity[0][0] == IP else QUOTA_KEYS
    before = state.client_quotas.get(entity, {})
    quotas = dict(before)
    for operation in change.operations:
        if operation.value is None:
            quotas.pop(operation.key, None)  # including names that cannot exist, as in Kafka
        elif operation.key not in allowed_keys:
            raise Refusal(ErrorCode.INVALID_REQUEST, f"Invalid configuration key {operation.key}")
        else:
            quotas[operation.key] = _checked_quota(operation.key, operation.value)
    if not before and quotas and len(state.client_quotas) >= CLIENT_QUOTA_COUNT_MAX:
        raise Refusal(
            ErrorCode.POLICY_VIOLATION,
            f"{CLIENT_QUOTA_COUNT_MAX} users, client ids and addresses have their own quotas, which is the maximum;"
            " remove some, or set a default.",
        )
    return [] if quotas == before else [ClientQuotaSet(entity, quotas)]


# -- features --------------------------------------------------------------------------------------


def update_features(state: MetadataState, change: messages.UpdateFeatures) -> list[Record]:
    names = [update.name for update in change.updates]
    if duplicates := repeated(names):
        raise Refusal(ErrorCode.INVALID_REQUEST, f"The feature {duplicates[0]} is updated twice.")
    current = levels(state.features)
    records: list[Record] = []
    for update in change.updates:
        _check_update(update, current.get(update.name, 0))
        _check_brokers(state, update)
        if state.features.get(update.name) != update.level:
            records.append(FeatureLevelSet(update.name, update.level))
    return records


def _check_update(update: messages.FeatureUpdate, current: int) -> None:
    feature = FEATURES.get(update.name)
    problem = f"Invalid update version {update.level} for feature {update.name}."
    if feature is None:
        raise Refusal(ErrorCode.INVALID_UPDATE_VERSION, f"{problem} The controller does not support this feature.")
    if update.upgrade_type not in (UPGRADE, SAFE_DOWNGRADE, UNSAFE_DOWNGRADE):
        raise Refusal(
            ErrorCode.INVALID_UPDATE_VERSION, f"{problem} The upgrade type {update.upgrade_type} is not known."
        )
    if not feature.first <= update.level <= feature.last:
        raise Refusal(
            ErrorCode.INVALID_UPDATE_VERSION,
            f"{problem} The controller supports versions {feature.first} to {feature.last}.",
        )
    if update.level < current and update.name == MQD_VERSION:
        raise Refusal(
            ErrorCode.INVALID_UPDATE_VERSION,
            f"{problem} Can't downgrade from version {current}: data of that version may already be stored.",
        )
    if update.level < current and update.upgrade_type == UPGRADE:
        raise Refusal(
            ErrorCode.INVALID_UPDATE_VERSION,
            f"{problem} Can't downgrade from version {current} without setting the upgrade type to safe or unsafe"
            " downgrade.",
        )
    if update.level > current and update.upgrade_type != UPGRADE:
        raise Refusal(ErrorCode.INVALID_UPDATE_VERSION, f"{problem} Can't downgrade to a newer version.")


def _check_brokers(state: MetadataState, update: messages.FeatureUpdate) -> None:
    """Refuses a level that a host does not support, including hosts that are down (V1): hosts of two
    versions coexist during a rolling upgrade.
    """
    incompatible = []
    for node_id, broker in sorted(state.brokers.items()):
        first, last = broker.features.get(update.name, (0, 0))
        if broker.features and not first <= update.level <= last:
            incompatible.append(f"{node_id} at {broker.host} ({first} to {last})")
    if incompatible:
        raise Refusal(
            ErrorCode.INVALID_UPDATE_VERSION,
            f"Invalid update version {update.level} for feature {update.name}. Not supported by broker"
            f" {', '.join(incompatible)}: upgrade it first, or unregister it (mqd cluster forget) if it is gone"
            " permanently.",
        )


# -- replicas --------------------------------------------------------------------------------------


def move_completed(state: MetadataState, topic_id: bytes, index: int, node_id: int, directory: str) -> list[Record]:
    """Records that a broker has moved its replica to another of its directories. Returns no records if
    the partition is deleted, or already in the directory (a repeated request).
    """
    name = state.topics_by_id.get(topic_id)
    if name is None or not 0 <= index < len(state.topics[name].partitions):
        return []
    partition = state.topics[name].partitions[index]
    if node_id not in partition.replicas or partition.directories[partition.replicas.index(node_id)] == directory:
        return []
    return [ReplicaMoved(topic_id, index, node_id, directory)]
