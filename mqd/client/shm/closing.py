"""Closing a producer over shared memory: every record gets a report, even if it was not written."""

from __future__ import annotations

import logging
import time
from typing import Protocol

from mqd.client.config import ProducerConfig
from mqd.client.messages import KafkaError
from mqd.client.shm.attachment import Attachment
from mqd.client.shm.delivering import Events
from mqd.client.shm.transactional import Transactions

_log = logging.getLogger("mqd.client")
_WAIT_WITHOUT_BROKER_S = 5.0  # how long close() waits for a broker to come back


class ClosableProducer(Protocol):
    """The part of ShmProducer that close() needs."""

    config: ProducerConfig
    events: Events
    fatal: KafkaError | None
    attachment: Attachment
    transactions: Transactions

    def flush(self, timeout: float | None = -1) -> int: ...

    def fail_outstanding(self) -> None:
        """Reports an error for every record that is not delivered yet."""
        ...

    def end(self, report_outstanding: bool = False) -> None:
        """Makes the producer refuse all further calls. `report_outstanding`: also reports an error for
        each record that callbacks have produced since fail_outstanding()."""
        ...

    def __len__(self) -> int: ...


def close(producer: ClosableProducer) -> None:
    """Aborts an open transaction, flushes, and ends the producer. All callbacks are called even when
    some raise; the first exception is raised at the end.

    Callbacks that run after end() mostly raise because they try to produce again, so their exceptions
    are only logged.
    """
    raised: list[Exception] = []
    if producer.fatal is None:
        producer.transactions.on_close(_WAIT_WITHOUT_BROKER_S)
        _flush(producer, raised)
    producer.fail_outstanding()
    _serve(producer, raised)  # before end(): callbacks can still call poll() and produce
    producer.end(report_outstanding=True)
    raised_late: list[Exception] = []
    _serve(producer, raised_late)
    if raised_late:
        _log.warning(
            "%s: a delivery callback raised, for a record that was not sent before the producer was closed",
            producer.config["client.id"],
            exc_info=raised_late[0],
        )
    if raised:
        raise raised[0]


def _flush(producer: ClosableProducer, raised: list[Exception]) -> None:
    """Waits until all records are delivered or have failed; while there is no broker, for at most
    _WAIT_WITHOUT_BROKER_S."""
    detached_since = time.monotonic()
    undelivered = -1
    while undelivered:
        try:
            undelivered = producer.flush(0.2)
        except Exception as error:
            _keep_first(raised, error)
            if producer.attachment.is_closed or producer.attachment.fatal is not None:
                return
            undelivered = len(producer)
        if producer.attachment.attached:
            detached_since = time.monotonic()
        elif time.monotonic() - detached_since > _WAIT_WITHOUT_BROKER_S:
            _log.warning(
                "%s: closed with %d records undelivered: there is no broker", producer.config["client.id"], undelivered
            )
            return


def _serve(producer: ClosableProducer, raised: list[Exception]) -> None:
    while producer.events:
        try:
            producer.events.run_callbacks(producer.attachment.lock)
        except Exception as error:
            _keep_first(raised, error)


def _keep_first(raised: list[Exception], error: Exception) -> None:
    """Keeps only the first exception: each of a million reports can raise one."""
    if not raised:
        raised.append(error)
