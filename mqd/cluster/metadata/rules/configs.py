"""Adapts the property tables of mqd.base.config to the metadata core: which properties can be set at run
time, and their values.
"""

from collections.abc import Mapping

from mqd.base import cluster_config, kafka_names, listeners
from mqd.base import config as tables
from mqd.base.config import BROKER, CLIENT_METRICS, GROUP, TOPIC, Property
from mqd.base.property_values import ConfigError

# Kafka's ConfigResource types
RESOURCE_TOPIC, RESOURCE_BROKER, RESOURCE_CLIENT_METRICS, RESOURCE_GROUP = 2, 4, 16, 32
_TABLES: dict[int, Mapping[str, Property]] = {
    RESOURCE_TOPIC: TOPIC,
    RESOURCE_BROKER: BROKER,
    RESOURCE_CLIENT_METRICS: CLIENT_METRICS,
    RESOURCE_GROUP: GROUP,
}


class ConfigRules:
    """`static`: this broker's configuration as loaded at start."""

    def __init__(self, static: Mapping[str, str]) -> None:
        self._static = dict(static)

    def is_known(self, resource_type: int, name: str) -> bool:
        if name in _TABLES[resource_type]:
            return True
        is_listener_override = resource_type == RESOURCE_BROKER and listeners.override_of(name) is not None
        return is_listener_override and not self.refusal_of(resource_type, name)

    def is_renamed_or_unsupported(self, name: str) -> bool:
        """Whether this is a broker setting of Apache Kafka that mqd has under another name, or does not
        have.
        """
        return name in kafka_names.ALIASES or name in kafka_names.REFUSED

    def is_list(self, resource_type: int, name: str) -> bool:
        """Whether elements can be appended and subtracted; as in Kafka, not for client metrics."""
        return (
            resource_type != RESOURCE_CLIENT_METRICS and tables.property_of(_TABLES[resource_type], name).kind == "list"
        )

    def is_dynamic(self, resource_type: int, name: str) -> bool:
        return resource_type != RESOURCE_BROKER or tables.property_of(BROKER, name).dynamic

    def check(self, resource_type: int, config: Mapping[str, str]) -> dict[str, str]:
        """Returns the whole configuration of one resource in canonical form. Keeps stored properties of
        older versions that this version does not have. Raises ConfigError, which names the property.
        """
        known = {name: value for name, value in config.items() if self.is_known(resource_type, name)}
        unknown = {name: value for name, value in config.items() if name not in known}
        if resource_type == RESOURCE_TOPIC:
            request_bytes_max = tables.broker_number(self._static, "socket.request.max.bytes")
            clustered = cluster_config.listens_for_hosts(self._static)
            return {**unknown, **tables.validate_topic(known, clustered, request_bytes_max)}
        if resource_type == RESOURCE_GROUP:
            return {**unknown, **tables.validate_group(known, self._static)}
        if resource_type == RESOURCE_CLIENT_METRICS:
            return {**unknown, **tables.validate_client_metrics(known)}
        return {**unknown, **tables.validate_broker_dynamic(known, self._static)}

    def refusal_of(self, resource_type: int, name: str) -> str:
        """Returns the reason why this name cannot be set, with the closest known name; "" = it can be set."""
        try:
            tables.property_of(_TABLES[resource_type], name)
        except ConfigError as error:
            return str(error)
        return ""

    def default(self, resource_type: int, name: str, dynamic: Mapping[str, str]) -> str | None:
        """The effective value when the resource does not set the property. `dynamic`: the brokers' run-time
        configuration.
        """
        broker = tables.broker_effective(self._static, dynamic)
        if resource_type == RESOURCE_TOPIC:
            return tables.topic_effective(broker, {})[name]
        if resource_type == RESOURCE_GROUP:
            return tables.group_effective(broker, {})[name]
        if resource_type == RESOURCE_CLIENT_METRICS:
            return CLIENT_METRICS[name].default
        return broker.get(name, tables.property_of(BROKER, name).default)

    def built_in_default(self, name: str) -> str:
        """The default of a broker's property; "" = none."""
        return tables.property_of(BROKER, name).default or ""

    def broker_value(self, name: str, dynamic: Mapping[str, str]) -> tables.Value | None:
        return tables.broker_value(tables.broker_effective(self._static, dynamic), name)

    def broker_number(self, name: str, dynamic: Mapping[str, str]) -> int:
        return tables.broker_number(tables.broker_effective(self._static, dynamic), name)
