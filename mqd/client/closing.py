"""The end of the producer over shared memory, when its application asks for it."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mqd.client.shm_producer import ShmProducer

_log = logging.getLogger("mqd.client")
_ALONE_S = 5.0


def close(producer: ShmProducer) -> None:
    """Aborts an open transaction, flushes, ends the producer."""
    if producer.fatal is None:
        producer.transactions.on_close()
        _flush(producer)
    producer.end()


def _flush(producer: ShmProducer) -> None:
    """Until everything is delivered or has failed; while there is no broker to deliver to, not for long."""
    alone_since = time.monotonic()
    while left := producer.flush(0.2):
        if producer.attachment.attached:
            alone_since = time.monotonic()
        elif time.monotonic() - alone_since > _ALONE_S:
            _log.warning("%s: closed with %d records undelivered: there is no broker", producer.config["client.id"], left)
            return
