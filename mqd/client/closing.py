"""The end of the producer over shared memory, when its application asks for it: every record has its report, written or not."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mqd.client.shm_producer import ShmProducer

_log = logging.getLogger("mqd.client")
_ALONE_S = 5.0


def close(producer: ShmProducer) -> None:
    """Aborts an open transaction, flushes, ends the producer. Raises what a callback raised; one that does after the end keeps no other from being called."""
    if producer.fatal is None:
        producer.transactions.on_close()
        _flush(producer)
    producer.end(reported=True)
    _serve(producer)


def _flush(producer: ShmProducer) -> None:
    """Until everything is delivered or has failed; while there is no broker to deliver to, not for long."""
    alone_since = time.monotonic()
    while left := producer.flush(0.2):
        if producer.attachment.attached:
            alone_since = time.monotonic()
        elif time.monotonic() - alone_since > _ALONE_S:
            _log.warning("%s: closed with %d records undelivered: there is no broker", producer.config["client.id"], left)
            return


def _serve(producer: ShmProducer) -> None:
    problem: Exception | None = None
    while producer.events:
        try:
            producer.events.serve(producer.attachment.lock)
        except Exception as error:  # the application's: it is told of the first
            problem = problem or error
    if problem is not None:
        raise problem
