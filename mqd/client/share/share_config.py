"""A share consumer's configuration: librdkafka's keys and defaults, read once."""

from __future__ import annotations

from typing import Any

import confluent_kafka

from mqd.client.config import Settings, convert_value
from mqd.client.messages import KafkaError, failure

_DEFAULTS: dict[str, Any] = {
    "bootstrap.servers": "",
    "client.id": "mqd",
    "client.rack": "",
    "group.id": "",
    "share.acknowledgement.mode": "implicit",
    "max.poll.records": 500,
    "max.poll.interval.ms": 300_000,
    "fetch.min.bytes": 1,
    "fetch.max.bytes": 52_428_800,
    "fetch.wait.max.ms": 500,
    "check.crcs": False,
    "topic.metadata.refresh.interval.ms": 300_000,
    "allow.auto.create.topics": False,
    "socket.timeout.ms": 60_000,
}
_ALIASES = {"metadata.broker.list": "bootstrap.servers"}
MODES = ("implicit", "explicit")


class ShareConfig:
    """Values by key: `config["max.poll.interval.ms"]`. Raises what confluent_kafka raises for this configuration."""

    def __init__(self, settings: Settings) -> None:
        if settings.encryption is not None:
            raise failure(KafkaError._INVALID_ARG, "encryption.* is not available for share consumers")
        given = {_ALIASES.get(key, key): value for key, value in settings.rdkafka.items()}
        if not given.get("group.id"):
            raise ValueError("Failed to create consumer: group.id must be set")
        _check({key: value for key, value in settings.rdkafka.items() if _ALIASES.get(key, key) != "bootstrap.servers"})
        self.values = {key: convert_value(key, given.get(key), default) for key, default in _DEFAULTS.items()}
        mode = str(self.values["share.acknowledgement.mode"]).lower()
        if mode not in MODES:
            raise failure(
                KafkaError._INVALID_ARG,
                f'Invalid value "{mode}" for configuration property "share.acknowledgement.mode"',
            )
        self.is_explicit = mode == "explicit"

    def __getitem__(self, key: str) -> Any:
        return self.values[key]


def _check(properties: dict[str, Any]) -> None:
    """Lets librdkafka check its own keys, with a client that does not connect."""
    probe = confluent_kafka.ShareConsumer({**properties, "log_level": 0})
    probe.close()
