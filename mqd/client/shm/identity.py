"""An idempotent producer's identity (producer id and epoch): requests it, and requests another one
when its sequences have a gap or the broker has no state for it.

A new identity has a new producer id, so that requests still in flight with the old id cannot be
mistaken for new ones. The C core adopts the identity, and numbers the remaining batches from 0,
once every batch that was sent has a response that says whether it was written. Until then no new
batch is submitted, and unanswered batches are sent again with the old identity; with the new one
they could be written twice
(docs/decisions/clients/2026-11-26-producer-identity-and-unknown-outcomes.md).
transactional.py manages the identity of a transactional producer. Source: KIP-98, KIP-360.
Concurrency: with the attachment's lock held.
"""

from __future__ import annotations

from typing import Any

from mqd.client import requests
from mqd.client.messages import KafkaError, broker_error, local_error
from mqd.native import NativeError
from mqd.protocol.errors import is_retriable

_NEVER = float("inf")
_RETRY_S = 0.1
HOLD_REASON = "the producer has no identity yet"


class ProducerIdentity:
    def __init__(self, producer: Any) -> None:
        self._producer = producer
        self.idempotent: bool = producer.config["enable.idempotence"]
        self._is_managed_here = self.idempotent and not producer.config["transactional.id"]
        self._gapless: bool = producer.config["enable.gapless.guarantee"]
        self.renewing = self._is_managed_here
        self._is_requesting = False
        self._next_request_at = 0.0
        self._new_identity: tuple[int, int] | None = None
        if self._is_managed_here:
            producer.hold_reason = HOLD_REASON

    def on_gap(self, error: KafkaError) -> None:
        """Handles the gap in the sequences that a batch leaves when it is given up."""
        if self._producer.transactions.enabled:
            self._producer.transactions.mark_broken(error)
        elif self.idempotent and self._producer.fatal is None:
            if self._gapless:
                self._producer.set_fatal(
                    local_error(
                        KafkaError._GAPLESS_GUARANTEE, f"a record could not be delivered: {error.str()}", fatal=True
                    )
                )
            else:
                self.renew()

    def renew(self) -> None:
        if not self.renewing:
            self.renewing = True
            self._next_request_at = 0.0
            self._producer.hold(HOLD_REASON)
            self._producer.attachment.wake()

    def on_turn(self, now: float) -> float:
        """Takes the next step; returns the time of the next turn."""
        if not self.renewing or not self._is_managed_here or self._producer.fatal is not None:
            return _NEVER
        if self._new_identity is not None:
            # each response causes a turn; the retry is for responses that never arrive
            return _NEVER if self._adopt() else now + _RETRY_S
        if self._is_requesting or now < self._next_request_at:
            return self._next_request_at if not self._is_requesting else _NEVER
        self._is_requesting = True
        api = self._producer.attachment.api
        self._producer.attachment.send(
            requests.INIT_PRODUCER_ID,
            api.pick(requests.INIT_PRODUCER_ID),
            requests.init_producer_id_request(None, 0),
            self._on_response,
        )
        return _NEVER

    def _on_response(self, response: Any, error: KafkaError | None) -> None:
        self._is_requesting = False
        if error is None and response.error_code:
            error = broker_error(response.error_code, "InitProducerId", retriable=is_retriable(response.error_code))
        if error is None:
            self._new_identity = (response.producer_id, response.producer_epoch)
            self._producer.attachment.wake()
        elif error.retriable():
            self._next_request_at = self._producer.now() + _RETRY_S
            self._producer.attachment.wake_by(self._next_request_at)
        elif error.code() != KafkaError._DESTROY:
            self._producer.set_fatal(local_error(error.code(), error.str(), fatal=True))

    def _adopt(self) -> bool:
        assert self._new_identity is not None
        try:
            self._producer.native.set_identity(*self._new_identity)
        except NativeError:
            # Some batch has no response and may have been written: the broker recognizes it only by
            # the old identity.
            self._producer.send_queued()
            return False
        self._new_identity = None
        self.renewing = False
        self._producer.outcomes.retry_parked()
        self._producer.hold(None)
        return True
