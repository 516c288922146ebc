"""Converts properties (text) to options of the native side. Does not import the native extension,
and reads no files.
"""

from collections.abc import Iterable, Mapping
from typing import Any, cast

from mqd.base.config import broker_value, parse_cpus, topic_effective, topic_list, topic_number, topic_value
from mqd.base.listeners import Listener
from mqd.log.compaction import CompactionPolicy
from mqd.log.retention import RetentionPolicy
from mqd.protocol.compression import CODECS
from mqd.security import audit

_BACKENDS = {"auto": 0, "io_uring": 1, "epoll": 2}  # enum mqd_backend
_VALIDATION = {"none": 0, "uncompressed": 1, "all": 2}  # enum mqd_record_validation
_SCHEDULES = 3  # of enum mqd_record_validation: for a topic of schedules
_LISTENER_TLS, _LISTENER_SASL = 1, 2  # MQD_LISTENER_*
_INT32_MAX = (1 << 31) - 1
_HEADER_BYTES_MAX = 1024  # of a SaslAuthenticate request, in addition to its token
_AUTHENTICATION_MS_MAX = 10_000


def _clamp(value: Any, maximum: int = _INT32_MAX) -> int:
    return max(0, min(int(value), maximum))


def log_options(broker: Mapping[str, str], topic: Mapping[str, str], internal: bool) -> dict[str, Any]:
    """Returns the fields of native.LogOptions. `topic`: the topic's own settings. `broker`: the
    broker's effective settings. `internal`: whether the topic is internal; records of an internal
    topic count as replicated only once they are flushed, whatever the settings.
    """
    effective = topic_effective(broker, topic)

    def value(name: str) -> Any:
        return topic_value(effective, name)

    return {
        "segment_bytes": value("segment.bytes"),
        "segment_ms": _segment_ms(effective),
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
        "queue_unflushed_bytes": 0 if internal else value("queue.unflushed.bytes"),
        "producer_id_count_max": broker_value(broker, "producer.id.count.max"),
        "producer_id_expiration_ms": _clamp(broker_value(broker, "producer.id.expiration.ms")),
        "log_append_time": value("message.timestamp.type") == "LogAppendTime",
        "flush_on_ack": internal or value("flush.on.ack"),
        "compacted": "compact" in value("cleanup.policy"),
        "validation": _SCHEDULES if value("schedule.to") else _VALIDATION[value("record.validation")],
        "readonly": False,
        "dedup_window_ms": 0 if internal else value("dedup.window.ms"),
        "dedup_count_max": value("dedup.ids.max"),
        "dedup_header": value("dedup.header").encode(),
        "share_priority": value("share.priority"),
        **({} if internal else _compression(effective)),
    }


def _compression(effective: Mapping[str, str]) -> dict[str, int]:
    codec = topic_value(effective, "compression.type")
    if codec == "producer":
        return {}
    number = CODECS.index("none" if codec == "uncompressed" else str(codec))
    level = f"compression.{codec}.level"
    return {"compression": number + 1, "compression_level": topic_number(effective, level) if level in effective else 0}


def retention_policy(broker: Mapping[str, str], topic: Mapping[str, str]) -> RetentionPolicy:
    effective = topic_effective(broker, topic)
    # the schedule's timer, not retention, moves the log start
    is_schedule = bool(topic_value(effective, "schedule.to"))
    return RetentionPolicy(
        retention_ms=-1 if is_schedule else topic_number(effective, "retention.ms"),
        retention_bytes=-1 if is_schedule else topic_number(effective, "retention.bytes"),
        segment_ms=_segment_ms(effective),
        may_delete="delete" in topic_list(effective, "cleanup.policy"),
    )


def _segment_ms(effective: Mapping[str, str]) -> int:
    """A record can be compacted only once its segment is closed, so the segment must close in time
    for max.compaction.lag.ms (Kafka's LogConfig.maxSegmentMs).
    """
    segment_ms, lag_ms = topic_number(effective, "segment.ms"), topic_number(effective, "max.compaction.lag.ms")
    return min(segment_ms, lag_ms) if "compact" in topic_list(effective, "cleanup.policy") else segment_ms


def compaction_policy(broker: Mapping[str, str], topic: Mapping[str, str]) -> CompactionPolicy:
    effective = topic_effective(broker, topic)
    return CompactionPolicy(
        is_enabled="compact" in topic_list(effective, "cleanup.policy"),
        min_lag_ms=topic_number(effective, "min.compaction.lag.ms"),
        max_lag_ms=topic_number(effective, "max.compaction.lag.ms"),
        dirty_ratio_min=cast(float, topic_value(effective, "min.cleanable.dirty.ratio")),
        delete_retention_ms=topic_number(effective, "delete.retention.ms"),
        segment_bytes=min(topic_number(effective, "segment.bytes"), _INT32_MAX),
        index_interval_bytes=topic_number(effective, "index.interval.bytes"),
    )


def listener_flags(listeners: Iterable[Listener]) -> list[int]:
    """native.ReactorOptions.listener_flags."""
    return [_LISTENER_TLS * listener.has_tls | _LISTENER_SASL * listener.has_sasl for listener in listeners]


def _rights(config: Mapping[str, str]) -> int:
    """A value of enum mqd_rights."""
    if not broker_value(config, "authorizer.class.name"):
        return 0
    return 2 if broker_value(config, "authorizer.log.only") else 1


def reactor_options(
    config: Mapping[str, str], worker: int, own_arena_bytes: int, connection_count_max: int
) -> dict[str, Any]:
    """Returns the fields of native.ReactorOptions that come from the configuration.
    `own_arena_bytes`: the size of this worker's arena, as the keeper created it.
    """

    def value(name: str) -> Any:
        return broker_value(config, name)

    cpus = parse_cpus(config.get("worker.cpus", ""))
    idle_ms = value("connections.max.idle.ms")
    return {
        "backend": _BACKENDS[value("io.backend")],
        "cpu": cpus[worker % len(cpus)] if cpus else -1,
        "spin_us": value("worker.spin.us"),
        "profile_turns": value("worker.loop.profile"),
        "connection_count_max": connection_count_max,
        "request_bytes_max": value("socket.request.max.bytes"),
        "large_bytes": own_arena_bytes - value("receive.arena.bytes"),
        "large_ms_max": value("large.request.timeout.ms"),
        "heap_bytes_max": value("queued.max.request.bytes"),
        "inflight_count_max": value("connection.inflight.max"),
        "connection_idle_ms_max": _INT32_MAX if idle_ms < 0 else _clamp(idle_ms),
        "fetch_bytes_max": value("fetch.max.bytes"),
        "session_count_max": value("max.incremental.fetch.session.cache.slots"),
        "share_bytes_max": value("share.memory.max.bytes"),
        "share_session_count_max": value("group.share.max.share.sessions"),
        "group_commit_us": value("log.flush.linger.us"),
        "sendfile_bytes_min": value("sendfile.bytes.min"),
        "read_fd_count_max": value("read.fd.count.max"),
        "authentication_bytes_max": value("sasl.server.max.receive.size") + _HEADER_BYTES_MAX,
        "authentication_ms_max": _AUTHENTICATION_MS_MAX,
        "rights": _rights(config),
        "slow_ms": value("slow.request.ms"),
        "denied_interval_ms": int(audit.WINDOW_S * 1000),
    }
