"""statistics.interval.ms and stats_cb: librdkafka's JSON, limited to the fields that make sense for
shared memory.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

_NEVER = float("inf")
# librdkafka's socket counters, always empty or 0 here: exporters expect these keys
NOT_COUNTED: dict[str, Any] = {
    "brokers": {},
    "simple_cnt": 0,
    "metadata_cache_cnt": 0,
    "tx": 0,
    "tx_bytes": 0,
    "rx": 0,
    "rx_bytes": 0,
    "txmsg_bytes": 0,
    "rxmsgs": 0,
    "rxmsg_bytes": 0,
}


class ProducerStatistics:
    def __init__(self, producer: Any) -> None:
        self._producer = producer
        self._interval_s: float = producer.config["statistics.interval.ms"] / 1000
        self._callback = producer.config["stats_cb"]
        self._began = time.monotonic()
        self._due = self._began + self._interval_s if self._interval_s and self._callback else _NEVER

    def on_turn(self, now: float) -> float:
        if now >= self._due:
            self._due = now + self._interval_s
            self._producer.put(_StatisticsEvent(self._callback, json.dumps(self._figures(now))))
            self._producer.attachment.changed.notify_all()
        return self._due

    def _figures(self, now: float) -> dict[str, Any]:
        producer = self._producer
        topics = {
            stage.topic: {"topic": stage.topic, "partition_cnt": stage.partition_count, "msg_cnt": len(stage.entries)}
            for stage in producer.stages.values()
        }
        return {
            "name": f"{producer.config['client.id']}#producer-{os.getpid()}",
            "client_id": producer.config["client.id"],
            "type": "producer",
            "transport": "shm",
            "ts": time.monotonic_ns() // 1000,
            "time": int(time.time()),
            "age": int((now - self._began) * 1e6),
            "replyq": len(producer.events),
            "msg_cnt": producer.outstanding(),
            "msg_max": producer.config["queue.buffering.max.messages"],
            "msg_size": producer.native.outstanding_bytes,
            "msg_size_max": producer.config["queue.buffering.max.kbytes"] << 10,
            "txmsgs": producer.outcomes.records_written,
            "txmsgs_failed": producer.outcomes.records_failed,
            **NOT_COUNTED,
            "txretries": producer.outcomes.batches_retried,
            "batches": len(producer.outcomes.batches),
            "attachments": producer.attachment.generation,
            "topics": topics,
        }


class _StatisticsEvent:
    def __init__(self, callback: Any, text: str) -> None:
        self._callback, self._text = callback, text

    def count_pending_calls(self) -> int:
        return 0

    def call(self) -> int:
        self._callback(self._text)
        return 1
