"""Rules for settings other than those of topics and brokers: clients' quotas, feature levels, and
moves of replicas between directories.

Pure functions of the state and the change, as in topics.py; Refusal carries Kafka's error code.
Sources: KIP-113, KIP-546, KIP-584, KIP-1022.
"""

import math

from mqd.cluster.host import messages
from mqd.cluster.metadata.features import FEATURES, MQD_VERSION, levels
from mqd.cluster.metadata.records import ClientQuotaSet, Entity, FeatureLevelSet, Record, ReplicaMoved
from mqd.cluster.metadata.refusal import Refusal
from mqd.cluster.metadata.state import MetadataState
from mqd.protocol.errors import ErrorCode

CLIENT_QUOTA_COUNT_MAX = 4096  # capacity of the table in the control segment
CLIENT_ID_BYTES_MAX = 32767

USER, CLIENT_ID, IP = "user", "client-id", "ip"
PRODUCE, FETCH, REQUEST = "producer_byte_rate", "consumer_byte_rate", "request_percentage"
QUOTA_KEYS = (PRODUCE, FETCH, REQUEST)
_NOT_THERE = {
    "controller_mutation_rate": (
        "quotas of topic changes are not available; producer_byte_rate, consumer_byte_rate and request_percentage are"
    ),
    "connection_creation_rate": (
        "it belongs to addresses (ip), and quotas by address are not available; max.connections limits connections"
    ),
}
UPGRADE, SAFE_DOWNGRADE, UNSAFE_DOWNGRADE = 1, 2, 3


# -- quotas ----------------------------------------------------------------------------------------


def checked_entity(entity: list[tuple[str, str | None]]) -> Entity:
    """Ordered by type. Raises Refusal."""
    types = [kind for kind, _ in entity]
    if not entity:
        raise Refusal(ErrorCode.INVALID_REQUEST, "Invalid empty client quota entity.")
    if len(set(types)) != len(types):
        raise Refusal(
            ErrorCode.INVALID_REQUEST,
            f"The client quota entity names {next(kind for kind in types if types.count(kind) > 1)} twice.",
        )
    for kind, name in entity:
        if kind == USER:
            raise Refusal(
                ErrorCode.INVALID_REQUEST,
                "Quotas by user need authentication, which is not available yet; use client-id.",
            )
        if kind == IP:
            raise Refusal(
                ErrorCode.INVALID_REQUEST,
                "Quotas by address (ip) are not available; use client-id, or max.connections for connections.",
            )
        if kind != CLIENT_ID:
            raise Refusal(ErrorCode.INVALID_REQUEST, f"Unhandled client quota entity type: {kind}")
        if name is not None and not 0 < len(name.encode()) <= CLIENT_ID_BYTES_MAX:
            raise Refusal(
                ErrorCode.INVALID_REQUEST,
                f"A client-id has 1 to {CLIENT_ID_BYTES_MAX} bytes; the default of all is a null name.",
            )
    return tuple(sorted(entity, key=lambda pair: pair[0]))


def _checked_quota(key: str, value: float) -> float:
    if not math.isfinite(value) or value <= 0:
        raise Refusal(ErrorCode.INVALID_REQUEST, f"Quota {key} must be greater than 0, not {value:g}.")
    if key != REQUEST and (value != int(value) or value >= 2**63):
        raise Refusal(
            ErrorCode.INVALID_REQUEST, f"Quota {key} must be a whole number of bytes per second, not {value:g}."
        )
    return value


def alter_client_quota(state: MetadataState, change: messages.AlterClientQuota) -> list[Record]:
    entity = checked_entity(change.entity)
    keys = [operation.key for operation in change.operations]
    if len(set(keys)) != len(keys):
        raise Refusal(
            ErrorCode.INVALID_REQUEST, f"Duplicate quota key {next(key for key in keys if keys.count(key) > 1)}."
        )
    before = state.client_quotas.get(entity, {})
    quotas = dict(before)
    for operation in change.operations:
        if operation.key in _NOT_THERE:
            raise Refusal(ErrorCode.INVALID_REQUEST, f"{operation.key} cannot be set: {_NOT_THERE[operation.key]}.")
        if operation.key not in QUOTA_KEYS:
            raise Refusal(
                ErrorCode.INVALID_REQUEST, f"Unexpected quota key {operation.key}; known are {', '.join(QUOTA_KEYS)}."
            )
        if operation.value is None:
            quotas.pop(operation.key, None)
        else:
            quotas[operation.key] = _checked_quota(operation.key, operation.value)
    if not before and quotas and len(state.client_quotas) >= CLIENT_QUOTA_COUNT_MAX:
        raise Refusal(
            ErrorCode.POLICY_VIOLATION,
            f"{CLIENT_QUOTA_COUNT_MAX} client ids have quotas of their own, more are not possible; remove some, or set"
            " a default.",
        )
    return [] if quotas == before else [ClientQuotaSet(entity, quotas)]


# -- features --------------------------------------------------------------------------------------


def update_features(state: MetadataState, change: messages.UpdateFeatures) -> list[Record]:
    names = [update.name for update in change.updates]
    if len(set(names)) != len(names):
        raise Refusal(
            ErrorCode.INVALID_REQUEST,
            f"The feature {next(name for name in names if names.count(name) > 1)} is updated twice.",
        )
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
    what = f"Invalid update version {update.level} for feature {update.name}."
    if feature is None:
        raise Refusal(ErrorCode.INVALID_UPDATE_VERSION, f"{what} The controller does not support this feature.")
    if update.upgrade_type not in (UPGRADE, SAFE_DOWNGRADE, UNSAFE_DOWNGRADE):
        raise Refusal(ErrorCode.INVALID_UPDATE_VERSION, f"{what} The upgrade type {update.upgrade_type} is not known.")
    if not feature.first <= update.level <= feature.last:
        raise Refusal(
            ErrorCode.INVALID_UPDATE_VERSION,
            f"{what} The controller supports versions {feature.first} to {feature.last}.",
        )
    if update.level < current and update.name == MQD_VERSION:
        raise Refusal(
            ErrorCode.INVALID_UPDATE_VERSION,
            f"{what} Can't downgrade from version {current}: what that version brought may be stored already.",
        )
    if update.level < current and update.upgrade_type == UPGRADE:
        raise Refusal(
            ErrorCode.INVALID_UPDATE_VERSION,
            f"{what} Can't downgrade from version {current} without setting the upgrade type to safe or unsafe"
            " downgrade.",
        )
    if update.level < current and update.name == "metadata.version" and update.upgrade_type == SAFE_DOWNGRADE:
        return  # a higher level changes nothing in the stored form
    if update.level > current and update.upgrade_type != UPGRADE:
        raise Refusal(ErrorCode.INVALID_UPDATE_VERSION, f"{what} Can't downgrade to a newer version.")


def _check_brokers(state: MetadataState, update: messages.FeatureUpdate) -> None:
    """Hosts of two versions coexist during a rolling upgrade: a level may be set only if every host
    supports it, including those that are down (V1).
    """
    lacking = []
    for node_id, broker in sorted(state.brokers.items()):
        first, last = broker.features.get(update.name, (0, 0))
        if broker.features and not first <= update.level <= last:
            lacking.append(f"{node_id} at {broker.host} ({first} to {last})")
    if lacking:
        raise Refusal(
            ErrorCode.INVALID_UPDATE_VERSION,
            f"Invalid update version {update.level} for feature {update.name}. Not supported by broker"
            f" {', '.join(lacking)}: upgrade it first, or have it forgotten if it is gone for good.",
        )


# -- replicas --------------------------------------------------------------------------------------


def move_completed(state: MetadataState, topic_id: bytes, index: int, node_id: int, directory: str) -> list[Record]:
    """No records if the partition is deleted or already there (a repetition)."""
    name = state.topics_by_id.get(topic_id)
    if name is None or not 0 <= index < len(state.topics[name].partitions):
        return []
    partition = state.topics[name].partitions[index]
    if node_id not in partition.replicas or partition.directories[partition.replicas.index(node_id)] == directory:
        return []
    return [ReplicaMoved(topic_id, index, node_id, directory)]
