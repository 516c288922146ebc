"""The configuration of a consumer over shared memory: librdkafka's keys and defaults, read once."""

from __future__ import annotations

from typing import Any

from mqd.client.config import Settings, convert_value

_DEFAULTS: dict[str, Any] = {
    "bootstrap.servers": "",
    "client.id": "mqd",
    "client.rack": "",
    "group.id": "",
    "group.instance.id": None,
    "group.protocol": "classic",
    "group.remote.assignor": None,
    "partition.assignment.strategy": "range,roundrobin",
    "session.timeout.ms": 45_000,
    "heartbeat.interval.ms": 3_000,
    "max.poll.interval.ms": 300_000,
    "enable.auto.commit": True,
    "auto.commit.interval.ms": 5_000,
    "enable.auto.offset.store": True,
    "auto.offset.reset": "largest",
    "isolation.level": "read_committed",
    "enable.partition.eof": False,
    "check.crcs": False,
    "queued.min.messages": 100_000,
    "queued.max.messages.kbytes": 65_536,
    "fetch.message.max.bytes": 1_048_576,
    "fetch.min.bytes": 1,
    "fetch.error.backoff.ms": 500,
    "topic.metadata.refresh.interval.ms": 300_000,
    "allow.auto.create.topics": False,
    "topic.blacklist": None,
    "socket.timeout.ms": 60_000,
    "statistics.interval.ms": 0,
    "error_cb": None,
    "on_commit": None,
    "stats_cb": None,
    "logger": None,
}
_ALIASES = {
    "metadata.broker.list": "bootstrap.servers",
    "max.partition.fetch.bytes": "fetch.message.max.bytes",
    "auto.commit.enable": "enable.auto.commit",
}
EARLIEST, LATEST, ERROR = "earliest", "latest", "error"
_RESETS = {
    "smallest": EARLIEST,
    "earliest": EARLIEST,
    "beginning": EARLIEST,
    "largest": LATEST,
    "latest": LATEST,
    "end": LATEST,
    "error": ERROR,
}


class ConsumerConfig:
    """Read as `config["max.poll.interval.ms"]`. config.check has already rejected the values that
    librdkafka rejects.
    """

    def __init__(self, settings: Settings) -> None:
        configured: dict[str, Any] = {}
        topic = settings.rdkafka.get("default.topic.config") or {}
        for key, value in {**topic, **settings.rdkafka}.items():
            configured[_ALIASES.get(key, key)] = value
        self.values = {key: convert_value(key, configured.get(key), default) for key, default in _DEFAULTS.items()}
        values = self.values
        if not values["group.id"]:
            raise ValueError("Failed to create consumer: group.id must be set")
        self.offset_reset = _RESETS[str(values["auto.offset.reset"]).lower()]
        self.isolation_level = 1 if str(values["isolation.level"]).lower() == "read_committed" else 0
        self.is_eager = str(values["group.protocol"]).lower() == "classic" and "cooperative" not in str(
            values["partition.assignment.strategy"]
        )

    def __getitem__(self, key: str) -> Any:
        return self.values[key]
