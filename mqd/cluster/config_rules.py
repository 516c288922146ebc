"""What may be configured while the broker runs: mqd.base.config's tables as the metadata core needs them."""

from collections.abc import Mapping

from mqd.base import config as tables
from mqd.base.config import BROKER, TOPIC, ConfigError

RESOURCE_TOPIC, RESOURCE_BROKER = 2, 4  # Kafka's ConfigResource types


class ConfigRules:
    """`static`: this broker's configuration as loaded at start."""

    def __init__(self, static: Mapping[str, str]) -> None:
        self._static = dict(static)

    def known(self, resource_type: int, name: str) -> bool:
        return name in (TOPIC if resource_type == RESOURCE_TOPIC else BROKER)

    def is_list(self, resource_type: int, name: str) -> bool:
        return (TOPIC if resource_type == RESOURCE_TOPIC else BROKER)[name].kind == "list"

    def is_dynamic(self, resource_type: int, name: str) -> bool:
        return resource_type == RESOURCE_TOPIC or BROKER[name].dynamic

    def check(self, resource_type: int, config: Mapping[str, str]) -> dict[str, str]:
        """The whole configuration of one resource in canonical text. Raises ConfigError, which names the property. What an older version stored and this
        one does not know stays as it is."""
        known = {name: value for name, value in config.items() if self.known(resource_type, name)}
        unknown = {name: value for name, value in config.items() if name not in known}
        if resource_type == RESOURCE_TOPIC:
            return {**unknown, **tables.validate_topic(known)}
        return {**unknown, **tables.validate_broker_dynamic(known, self._static)}

    def refusal_of(self, resource_type: int, name: str) -> str:
        """Why this name cannot be set, with the closest known one."""
        try:
            tables.property_of(TOPIC if resource_type == RESOURCE_TOPIC else BROKER, name)
        except ConfigError as error:
            return str(error)
        return ""

    def default(self, resource_type: int, name: str, dynamic: Mapping[str, str]) -> str | None:
        """What is in force when the resource does not set the property; `dynamic`: the configuration below it that was set at run time."""
        broker = tables.broker_effective(self._static, dynamic)
        if resource_type == RESOURCE_TOPIC:
            return tables.topic_effective(broker, {})[name]
        return broker.get(name, BROKER[name].default)

    def broker_value(self, name: str, dynamic: Mapping[str, str]) -> tables.Value | None:
        return tables.broker_value(tables.broker_effective(self._static, dynamic), name)
