"""Writes to a topic with one librdkafka producer, and counts the outcomes. The producer's queue
limits the memory used.
"""

import time
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from mqd.cli.client_security import take_encryption
from mqd.cli.common import CliError, error_line, is_interruption
from mqd.cli.librdkafka import base_config, explain_kafka

_QUEUE_FULL_WAIT_S = 0.1
_FLUSH_STEP_S = 0.2  # flush() cannot be interrupted, so it is called for at most this long at a time
_INTERRUPTED_S = 1.0  # how long to wait for queued records after an interruption


class Writer:
    """Counts sent and failed records. Only failures call back into Python, so a large input
    costs no callback per record. Not thread-safe.

    `with Writer(...) as writer:` ends with finish(), even after an error, so that records sent
    before the error are written. When interrupted, it prints on stderr how many records were not
    acknowledged.
    """

    def __init__(self, bootstrap: str, properties: dict[str, str]):
        properties = dict(properties)
        encryption = take_encryption(properties)
        config = base_config(bootstrap, properties=properties) | {
            "delivery.report.only.error": True,
            "message.timeout.ms": 60000,
            "on_delivery": self._on_failure,
        }
        if encryption is None:
            self.producer = Producer(config | properties)
        else:
            from mqd.client.encryption.clients import EncryptingProducer

            self.producer = EncryptingProducer(config | properties, encryption)
        self.sent_count = 0
        self.sent_bytes = 0
        self.failed_count = 0
        self.first_failure: Any = None

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, _kind: object, exception: BaseException | None, _trace: object) -> None:
        try:
            if exception is None or not is_interruption(exception):
                self.finish()
                return
            deadline = time.monotonic() + _INTERRUPTED_S
            while self.producer.flush(_FLUSH_STEP_S) and time.monotonic() < deadline:
                pass
        except BaseException as error:
            if not is_interruption(error):
                raise
            self._report_interrupted()
            raise
        self._report_interrupted()

    def _report_interrupted(self) -> None:
        failed = self.failed_count + self.unacknowledged_count
        if failed:
            error_line(f"interrupted: {failed} of {self.sent_count} records were not acknowledged")

    def _on_failure(self, error: Any, _message: Any) -> None:
        if error is not None:
            self.failed_count += 1
            self.first_failure = self.first_failure or error

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        headers: list[tuple[str, bytes | None]],
        partition: int,
    ) -> None:
        """Queues one record; waits while the queue is full. A record that librdkafka refuses
        because it is too large is counted as failed. Raises KafkaException.
        """
        options: dict[str, Any] = {"partition": partition} if partition >= 0 else {}
        if headers:
            options["headers"] = headers
        while True:
            try:
                self.producer.produce(topic, value, key, **options)
                break
            except BufferError:
                self.producer.poll(_QUEUE_FULL_WAIT_S)
            except KafkaException as error:
                if error.args[0].code() != KafkaError.MSG_SIZE_TOO_LARGE:
                    raise
                self._on_failure(error.args[0], None)
                break
        self.sent_count += 1
        self.sent_bytes += len(value or b"") + len(key or b"")
        if self.sent_count % 64 == 0:
            self.producer.poll(0)

    @property
    def unacknowledged_count(self) -> int:
        """Records that are queued or sent, but neither acknowledged nor failed."""
        return len(self.producer)

    def finish(self) -> None:
        """Waits until every record is acknowledged or has failed. Raises CliError when some were
        not written.
        """
        while self.producer.flush(_FLUSH_STEP_S):
            pass
        if self.failed_count:
            text, code = explain_kafka(KafkaException(self.first_failure))
            if self.first_failure.code() == KafkaError.POLICY_VIOLATION:
                text += "; a view cannot be written: write to its base (mqd topic describe shows view.of)"
            raise CliError(f"{self.failed_count} of {self.sent_count} records were not written: {text}", code)
