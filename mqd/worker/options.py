"""From properties (text) to what the native side is told. Pure: no extension, no file."""

from collections.abc import Mapping
from typing import Any

from mqd.base.config import broker_value, parse_cpus, topic_effective, topic_value
from mqd.log.retention import RetentionPolicy

_BACKENDS = {"auto": 0, "io_uring": 1, "epoll": 2}  # enum mqd_backend
_INT32_MAX = (1 << 31) - 1


def _limit(value: Any, maximum: int = _INT32_MAX) -> int:
    return max(0, min(int(value), maximum))


def log_options(broker: Mapping[str, str], topic: Mapping[str, str], internal: bool = False) -> dict[str, Any]:
    """The fields of native.LogOptions. `topic`: only what was set on it; `broker`: what counts now."""
    effective = topic_effective(broker, topic)

    def value(name: str) -> Any:
        return topic_value(effective, name)

    return {
        "segment_bytes": value("segment.bytes"),
        "segment_ms": value("segment.ms"),
        "segment_jitter_ms": value("segment.jitter.ms"),
        "index_interval_bytes": value("index.interval.bytes"),
        "max_message_bytes": value("max.message.bytes"),
        "preallocate_bytes_min": broker_value(broker, "log.preallocate.bytes.min"),
        "preallocate_bytes_max": broker_value(broker, "log.preallocate.bytes.max"),
        "stripe_bytes": broker_value(broker, "log.stripe.bytes"),
        "timestamp_before_max_ms": value("message.timestamp.before.max.ms"),
        "timestamp_after_max_ms": value("message.timestamp.after.max.ms"),
        "flush_interval_messages": value("flush.messages"),
        "flush_interval_ms": value("flush.ms"),
        "producer_id_count_max": broker_value(broker, "producer.id.count.max"),
        "producer_id_expiration_ms": _limit(broker_value(broker, "producer.id.expiration.ms")),
        "log_append_time": value("message.timestamp.type") == "LogAppendTime",
        "flush_on_ack": value("flush.on.ack"),
        "compacted": "compact" in value("cleanup.policy"),
        "readonly": False,
    }


def retention_policy(broker: Mapping[str, str], topic: Mapping[str, str]) -> RetentionPolicy:
    effective = topic_effective(broker, topic)
    return RetentionPolicy(
        retention_ms=topic_value(effective, "retention.ms"),  # type: ignore[arg-type]
        retention_bytes=topic_value(effective, "retention.bytes"),  # type: ignore[arg-type]
        segment_ms=topic_value(effective, "segment.ms"),  # type: ignore[arg-type]
        delete="delete" in topic_value(effective, "cleanup.policy"),  # type: ignore[operator]
    )


def reactor_options(config: Mapping[str, str], worker: int, arena_bytes: int, connection_count_max: int) -> dict[str, Any]:
    """The fields of native.ReactorOptions that come from the configuration."""

    def value(name: str) -> Any:
        return broker_value(config, name)

    cpus = parse_cpus(config.get("worker.cpus", ""))
    idle_ms = value("connections.max.idle.ms")
    return {
        "backend": _BACKENDS[value("io.backend")],
        "cpu": cpus[worker % len(cpus)] if cpus else -1,
        "spin_us": value("worker.spin.us"),
        "connection_count_max": connection_count_max,
        "request_bytes_max": _limit(value("socket.request.max.bytes"), arena_bytes // 2),
        "heap_bytes_max": value("queued.max.request.bytes"),
        "inflight_count_max": value("connection.inflight.max"),
        "connection_idle_ms_max": _INT32_MAX if idle_ms < 0 else _limit(idle_ms),
        "fetch_bytes_max": value("fetch.max.bytes"),
        "session_count_max": value("max.incremental.fetch.session.cache.slots"),
        "group_commit_us": value("group.commit.window.us"),
        "sendfile_bytes_min": value("sendfile.bytes.min"),
        "read_fd_count_max": value("read.fd.count.max"),
    }
