"""The cluster as this broker's groups see it: implements mqd/coordinator/group/consumer/cluster.py
with the acceptor's metadata. A partition is visible once every worker serves it.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

from mqd.acceptor.broker_state import BrokerState
from mqd.base.fifo import parse_fifo
from mqd.base.offset_reset import parse_offset_reset
from mqd.cluster.metadata.features import dead_letters_allowed, has_share_groups, has_streams_groups, levels
from mqd.coordinator.group.consumer.cluster import ClientIdentity, Topic
from mqd.coordinator.group.regex import RegexMatcher
from mqd.coordinator.group.settings import ConsumerSettings, ShareSettings, StreamsSettings
from mqd.security.acl import Operation, ResourceType

UPGRADE_POLICIES = ("bidirectional", "upgrade")
DOWNGRADE_POLICIES = ("bidirectional", "downgrade")
COUNT_INTERVAL_S = 5.0  # members are counted this often
CACHED_GROUPS_MAX = 10_000  # groups with overrides, whose effective settings are cached


class _Effective(NamedTuple):
    consumer: ConsumerSettings
    share: ShareSettings
    streams: StreamsSettings


class BrokerCluster:
    """Concurrency: the event loop's thread only."""

    def __init__(self, broker: BrokerState, count_members: Callable[[], int]) -> None:
        self.matcher = RegexMatcher()
        self._broker = broker
        # `_defaults` differ from the configured settings in the heartbeat interval, which is adapted
        self._configured = self._defaults = consumer_settings(broker)
        self._share_defaults = share_settings(broker)
        self._quick_interval_ms = broker.broker_number("group.consumer.heartbeat.interval.quick.ms")
        self._count_members = count_members
        self._counted_at_s = float("-inf")
        self._levels, self._features_version = levels({}), -1
        self._streams_defaults = streams_settings(broker)
        self._effective_cache: dict[str, tuple[Mapping[str, str], ConsumerSettings, _Effective]] = {}
        self._names: frozenset[str] = frozenset()
        self._names_version: object = None

    @property
    def has_consumer_groups(self) -> bool:
        """Whether the cluster's feature levels include consumer groups (group.version); if not, the
        consumer protocol is refused.
        """
        return self._feature_levels()["group.version"] >= 1

    @property
    def has_share_groups(self) -> bool:
        """Whether the cluster's feature levels include share groups; if not, the share protocol is
        refused.
        """
        return has_share_groups(self._feature_levels())

    @property
    def has_streams_groups(self) -> bool:
        """Whether the cluster's feature levels include streams groups; if not, the streams protocol
        is refused.
        """
        return has_streams_groups(self._feature_levels())

    @property
    def dead_letters_allowed(self) -> bool:
        """Whether the cluster's feature levels include dead letters; if not, rejected records are
        archived immediately.
        """
        return dead_letters_allowed(self._feature_levels())

    def _feature_levels(self) -> Mapping[str, int]:
        metadata = self._broker.metadata
        if self._features_version != metadata.features_version:
            self._features_version = metadata.features_version
            self._levels = levels(metadata.features)
        return self._levels

    @property
    def version(self) -> tuple[int, int, int]:
        rules = self._broker.authorizer
        return (
            self._broker.metadata.version,
            self._broker.table.metadata_version,
            rules.generation if rules is not None else 0,
        )

    def topic(self, name: str) -> Topic | None:
        metadata = self._broker.metadata
        image = metadata.topics.get(name)
        if image is None:
            return None
        count = metadata.known_count(image, self._broker.table.metadata_version)
        return Topic(image.topic_id, count) if count else None

    def topic_name(self, topic_id: bytes) -> str | None:
        return self._broker.metadata.names.get(topic_id)

    def names(self) -> frozenset[str]:
        metadata = self._broker.metadata
        if self._names_version != metadata.version:
            names = frozenset(metadata.topics)
            if names != self._names:
                self._names = names
            self._names_version = metadata.version
        return self._names

    def describable(self, client: ClientIdentity, names: frozenset[str]) -> frozenset[str]:
        rules = self._broker.authorizer
        if rules is None or self._broker.denials_only_logged:
            return names
        mask = rules.table(client.principal, client.host, ResourceType.TOPIC).mask
        return frozenset(name for name in names if mask(name) >> Operation.DESCRIBE & 1)

    def settings(self, group_id: str) -> ConsumerSettings:
        if time.monotonic() - self._counted_at_s > COUNT_INTERVAL_S:
            self._adapt_heartbeat_interval()
        return self._effective(group_id).consumer

    def share_settings(self, group_id: str) -> ShareSettings:
        return self._effective(group_id).share

    def streams_settings(self, group_id: str) -> StreamsSettings:
        return self._effective(group_id).streams

    def _effective(self, group_id: str) -> _Effective:
        config = self._broker.metadata.group_configs.get(group_id)
        if not config:
            return _Effective(self._defaults, self._share_defaults, self._streams_defaults)
        cached = self._effective_cache.get(group_id)
        if cached is None or cached[0] is not config or cached[1] is not self._defaults:
            if len(self._effective_cache) >= CACHED_GROUPS_MAX:
                self._effective_cache.clear()
            effective = _Effective(
                _overridden(self._defaults, config, "consumer"),
                _overridden(self._share_defaults, config, "share"),
                _overridden(self._streams_defaults, config, "streams"),
            )
            cached = self._effective_cache[group_id] = (config, self._defaults, effective)
        return cached[2]

    def _adapt_heartbeat_interval(self) -> None:
        """Shortens the heartbeat interval while there are few members. The interval is at least one
        millisecond per member, so all members together send at most a thousand heartbeats per second.
        """
        self._counted_at_s = time.monotonic()
        interval_ms = min(self._configured.heartbeat_interval_ms, max(self._quick_interval_ms, self._count_members()))
        if interval_ms != self._defaults.heartbeat_interval_ms:
            self._defaults = msgspec.structs.replace(self._configured, heartbeat_interval_ms=interval_ms)


def consumer_settings(broker: BrokerState) -> ConsumerSettings:
    policy = str(broker.broker_value("group.consumer.migration.policy"))
    return ConsumerSettings(
        session_timeout_ms=broker.broker_number("group.consumer.session.timeout.ms"),
        heartbeat_interval_ms=broker.broker_number("group.consumer.heartbeat.interval.ms"),
        max_size=broker.broker_number("group.consumer.max.size"),
        assignors=tuple(cast(list[str], broker.broker_value("group.consumer.assignors"))),
        may_upgrade=policy in UPGRADE_POLICIES,
        may_downgrade=policy in DOWNGRADE_POLICIES,
    )


def share_settings(broker: BrokerState) -> ShareSettings:
    return ShareSettings(
        session_timeout_ms=broker.broker_number("group.share.session.timeout.ms"),
        heartbeat_interval_ms=broker.broker_number("group.share.heartbeat.interval.ms"),
        max_size=broker.broker_number("group.share.max.size"),
        initialize_retry_ms=broker.broker_number("group.share.initialize.retry.interval.ms"),
        record_lock_ms=broker.broker_number("group.share.record.lock.duration.ms"),
        delivery_count_limit=broker.broker_number("group.share.delivery.count.limit"),
        record_locks_max=broker.broker_number("group.share.partition.max.record.locks"),
    )


def streams_settings(broker: BrokerState) -> StreamsSettings:
    return StreamsSettings(
        session_timeout_ms=broker.broker_number("group.streams.session.timeout.ms"),
        heartbeat_interval_ms=broker.broker_number("group.streams.heartbeat.interval.ms"),
        max_size=broker.broker_number("group.streams.max.size"),
        standby_replicas=broker.broker_number("group.streams.num.standby.replicas"),
        initial_rebalance_delay_ms=broker.broker_number("group.streams.initial.rebalance.delay.ms"),
    )


_Settings = TypeVar("_Settings", ConsumerSettings, ShareSettings, StreamsSettings)


# config name -> kind of group, field of its settings, parser of the value
_GROUP_CONFIGS: dict[str, tuple[str, str, Callable[[str], Any]]] = {
    "consumer.session.timeout.ms": ("consumer", "session_timeout_ms", int),
    "consumer.heartbeat.interval.ms": ("consumer", "heartbeat_interval_ms", int),
    "share.session.timeout.ms": ("share", "session_timeout_ms", int),
    "share.heartbeat.interval.ms": ("share", "heartbeat_interval_ms", int),
    "share.record.lock.duration.ms": ("share", "record_lock_ms", int),
    "share.retry.backoff.ms": ("share", "retry_backoff_ms", int),
    "share.retry.backoff.max.ms": ("share", "retry_backoff_max_ms", int),
    "errors.deadletterqueue.topic.name": ("share", "dead_letter_topic", str),
    "errors.deadletterqueue.copy.record.enable": ("share", "copies_dead_records", lambda text: text == "true"),
    "share.fifo": ("share", "fifo", parse_fifo),
    "share.isolation.level": ("share", "read_committed", lambda text: text == "read_committed"),
    "streams.session.timeout.ms": ("streams", "session_timeout_ms", int),
    "streams.heartbeat.interval.ms": ("streams", "heartbeat_interval_ms", int),
    "streams.num.standby.replicas": ("streams", "standby_replicas", int),
    "streams.initial.rebalance.delay.ms": ("streams", "initial_rebalance_delay_ms", int),
    "share.auto.offset.reset": ("share", "offset_reset", parse_offset_reset),
}


def _overridden(settings: _Settings, config: Mapping[str, str], kind: str) -> _Settings:
    overrides = {
        field: parse(config[name])
        for name, (group_kind, field, parse) in _GROUP_CONFIGS.items()
        if name in config and group_kind == kind
    }
    return msgspec.structs.replace(settings, **overrides)
