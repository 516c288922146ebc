"""statistics.interval.ms and stats_cb of a shared-memory consumer: librdkafka's JSON, limited to the
fields that make sense for shared memory.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from mqd.client.group.rebalancing import Call
from mqd.client.shm.inbox import Inbox
from mqd.client.shm.producer_statistics import NOT_COUNTED

_NEVER = float("inf")


class ConsumerStatistics:
    """`due`: time.monotonic of the next report. The report is built in the callback, on the
    application's thread.
    """

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer
        self._callback = consumer.config["stats_cb"]
        self._interval_s = consumer.config["statistics.interval.ms"] / 1000 if self._callback is not None else 0.0
        self._began = time.monotonic()
        self.due = self._began + self._interval_s if self._interval_s else _NEVER
        self._is_queued = False

    def put(self, inbox: Inbox, now: float) -> None:
        """Queues a report unless one is pending."""
        self.due = now + self._interval_s
        if not self._is_queued:
            self._is_queued = True
            inbox.put_operation(Call(self._report, ()))

    def _report(self) -> None:
        self._is_queued = False
        self._callback(json.dumps(self._figures()))

    def _figures(self) -> dict[str, Any]:
        consumer = self._consumer
        topics: dict[str, Any] = {}
        for part in consumer.parts:
            end = part.reader.lag_end() if part.reader is not None else -1
            topics.setdefault(part.topic, {"topic": part.topic, "partitions": {}})["partitions"][str(part.index)] = {
                "partition": part.index,
                "fetch_state": "paused" if part.paused else part.phase.name.lower(),
                "next_offset": part.fetched,
                "app_offset": part.position,
                "stored_offset": part.stored,
                "committed_offset": part.committed,
                "hi_offset": end,
                "ls_offset": end,
                "lo_offset": part.reader.log_start() if part.reader is not None else -1,
                "consumer_lag": max(end - max(part.position, 0), 0) if end >= 0 and part.position >= 0 else -1,
            }
        return {
            "name": f"{consumer.config['client.id']}#consumer-{os.getpid()}",
            "client_id": consumer.config["client.id"],
            "type": "consumer",
            "transport": "shm",
            "ts": time.monotonic_ns() // 1000,
            "time": int(time.time()),
            "age": int((time.monotonic() - self._began) * 1e6),
            "attachments": consumer.control.generation,
            **NOT_COUNTED,
            "txmsgs": 0,
            "remote_records": consumer.remote.records_read,
            "replyq": len(consumer._fetcher.events),
            "topics": topics,
        }
