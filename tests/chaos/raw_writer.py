"""Writes one acks=all record after the other to partition 0 of topic "t", without a client library's own waits: asks one host after the other until one takes the record.

    python -m tests.chaos.raw_writer '["10.77.0.11:9092,...", PACE_MS]' FILE

A line for each acknowledgement: CLOCK_MONOTONIC nanoseconds, 0. A host that does not answer within ANSWER_S, or cannot be connected to within CONNECT_S, is left for the next one.
"""

from __future__ import annotations

import json
import sys
import time

from tests.crash.workload import produce
from tests.kafka_connection import ConnectionEnded, KafkaConnection

CONNECT_S, ANSWER_S = 0.25, 1.0
ASK_AGAIN_S = 0.01


def main() -> int:
    bootstrap, pace_ms = json.loads(sys.argv[1])
    hosts = [(host, int(port)) for host, port in (entry.rsplit(":", 1) for entry in bootstrap.split(","))]
    number, connection = 0, None
    with open(sys.argv[2], "w", buffering=1) as log:
        while True:
            try:
                if connection is None:
                    connection = KafkaConnection(*hosts[number], timeout_s=CONNECT_S)
                    connection.socket.settimeout(ANSWER_S)
                error, _ = produce(connection, "t", 0, b"x" * 100)
            except (OSError, ConnectionEnded):
                error = -1
            if error == 0:
                log.write(f"{time.monotonic_ns()} 0\n")
                time.sleep(pace_ms / 1000)
                continue
            if connection is not None:
                connection.close()
            connection, number = None, (number + 1) % len(hosts)
            time.sleep(ASK_AGAIN_S)


if __name__ == "__main__":
    sys.exit(main())
