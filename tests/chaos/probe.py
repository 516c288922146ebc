"""Requests to one host directly, whichever host it considers the leader: to inspect one side of a
cut. Runs in the clients' namespace, prints one JSON line.

    python -m tests.chaos.probe HOST PORT TOPIC PARTITION [VALUE]       with VALUE: Produce, acks=all; then a Fetch from offset 0
"""

from __future__ import annotations

import json
import sys

from tests.crash.workload import fetch_records, produce
from tests.kafka_connection import ConnectionEnded, KafkaConnection


def main() -> int:
    host, port, topic, partition = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    found: dict[str, object] = {}
    try:
        with KafkaConnection(host, port, timeout_s=12) as kafka:
            if len(sys.argv) > 5:
                found["produced"] = produce(kafka, topic, partition, sys.argv[5].encode())
            try:
                records, high_watermark = fetch_records(kafka, topic, partition, 0)
                found |= {
                    "values": [value.decode(errors="replace") for _, value in records],
                    "high_watermark": high_watermark,
                }
            except AssertionError as error:
                found["fetch_error"] = str(error)
    except (OSError, ConnectionEnded) as error:
        found["error"] = str(error) or type(error).__name__
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
