"""What this broker's consumer groups see of the cluster: mqd/group/consumer_cluster.py over the acceptor's metadata. A partition is seen when every worker serves it."""

from collections.abc import Mapping

import msgspec

from mqd.acceptor.broker import Broker
from mqd.group.consumer_cluster import Topic
from mqd.group.regex import RegexMatcher
from mqd.group.settings import ConsumerSettings

UPGRADES = ("bidirectional", "upgrade")
DOWNGRADES = ("bidirectional", "downgrade")
OVERRIDES_MAX = 10_000  # groups with a configuration of their own whose settings are remembered


class BrokerCluster:
    """Concurrency: the event loop's thread."""

    def __init__(self, broker: Broker) -> None:
        self.matcher = RegexMatcher()
        self._broker = broker
        self._defaults = consumer_settings(broker)
        self._overrides: dict[str, tuple[Mapping[str, str], ConsumerSettings]] = {}
        self._names: frozenset[str] = frozenset()
        self._names_version: object = None

    @property
    def version(self) -> tuple[int, int]:
        return self._broker.metadata.version, self._broker.table.metadata_version

    def topic(self, name: str) -> Topic | None:
        metadata = self._broker.metadata
        image = metadata.topics.get(name)
        if image is None:
            return None
        count = metadata.visible_count(image, self._broker.table.metadata_version)
        return Topic(image.topic_id, count) if count else None

    def topic_name(self, topic_id: bytes) -> str | None:
        return self._broker.metadata.names.get(topic_id)

    def names(self) -> frozenset[str]:
        metadata = self._broker.metadata
        if self._names_version != metadata.version:
            names = frozenset(name for name, image in metadata.topics.items() if not image.internal)
            if names != self._names:
                self._names = names
            self._names_version = metadata.version
        return self._names

    def settings(self, group_id: str) -> ConsumerSettings:
        config = self._broker.metadata.group_configs.get(group_id)
        if not config:
            return self._defaults
        known = self._overrides.get(group_id)
        if known is None or known[0] is not config:
            if len(self._overrides) >= OVERRIDES_MAX:
                self._overrides.clear()
            known = self._overrides[group_id] = (config, _overridden(self._defaults, config))
        return known[1]


def consumer_settings(broker: Broker) -> ConsumerSettings:
    policy = str(broker.broker_value("group.consumer.migration.policy"))
    return ConsumerSettings(
        session_timeout_ms=int(broker.broker_value("group.consumer.session.timeout.ms")),  # type: ignore[arg-type]
        heartbeat_interval_ms=int(broker.broker_value("group.consumer.heartbeat.interval.ms")),  # type: ignore[arg-type]
        max_size=int(broker.broker_value("group.consumer.max.size")),  # type: ignore[arg-type]
        assignors=tuple(broker.broker_value("group.consumer.assignors")),  # type: ignore[arg-type]
        upgrade=policy in UPGRADES,
        downgrade=policy in DOWNGRADES,
    )


def _overridden(settings: ConsumerSettings, config: Mapping[str, str]) -> ConsumerSettings:
    names = {"consumer.session.timeout.ms": "session_timeout_ms", "consumer.heartbeat.interval.ms": "heartbeat_interval_ms"}
    return msgspec.structs.replace(settings, **{names[name]: int(value) for name, value in config.items() if name in names})
