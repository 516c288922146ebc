"""Carries out a consumer's rebalances on the application's thread: calls the callbacks, changes the
assignment and notifies the membership core.

Callbacks see a rebalance in one of two forms. Incremental (group.protocol=consumer, or
cooperative-sticky): they get the partitions that are added or removed. Eager (librdkafka's
default): they first get all partitions as revoked, then the whole new assignment, so an
application written for range assignment can call assign() with it. For the other members there is
no difference: partitions that stay with this member are not released.

    B1  one operation at a time, each ended by exactly one done(), even if a callback raises; poll()
        then raises the exception
    B2  if the callback has changed the assignment itself, its change is kept; otherwise the assignment
        is changed here, even if this or an earlier callback raises, because the group has given
        these partitions to this member only
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from mqd.client.group.events import Assign, Left, Lost, Partitions, Problem, Revoke
from mqd.client.messages import KafkaError, TopicPartition, broker_error, local_error
from mqd.client.offsets import Key
from mqd.protocol.errors import ErrorCode


class Call(NamedTuple):
    """One of the user's functions, to be called by poll()."""

    function: Callable[..., None]
    arguments: tuple[Any, ...]


class Rebalancer:
    """`consumer`: a ShmConsumer."""

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer
        self._on_assign: Callable | None = None
        self._on_revoke: Callable | None = None
        self._on_lost: Callable | None = None
        self._owned: dict[Key, bytes] = {}  # the member's partitions and their topic ids
        self._eager_assignment: list[Key] = []  # eager: the last assignment passed to the application
        self._has_left = False
        self._has_application_assigned = False
        self.is_releasing_lost = False  # the partitions that are released may already have other owners

    def set_callbacks(self, on_assign: Callable | None, on_revoke: Callable | None, on_lost: Callable | None) -> None:
        self._on_assign, self._on_revoke, self._on_lost = on_assign, on_revoke, on_lost

    def on_application_assigns(self) -> None:
        self._has_application_assigned = True

    def carry_out(self, operation: object) -> KafkaError | None:
        """Returns an error for the application, or None."""
        match operation:
            case Problem(ErrorCode.GROUP_ID_NOT_FOUND, _, True) if self._consumer.switch_to_classic_protocol():
                return None
            case Problem(code, text, is_fatal):
                return _problem(code, text, is_fatal)
            case Call(function, arguments):
                function(*arguments)
            case Left():
                self._has_left = True
            case Assign(partitions):
                self._run(lambda: self._assign(partitions))
            case Revoke(partitions) if not self._consumer._runner.core.has_lost_partitions:
                self._run(lambda: self._revoke(partitions, self._on_revoke))
            case Revoke(partitions) | Lost(partitions):
                self.is_releasing_lost = True
                self._run(lambda: self._revoke(partitions, self._on_lost or self._on_revoke))
        return None

    def _run(self, rebalance: Callable[[], None]) -> None:
        """Carries out one rebalance, then notifies the core (B1)."""
        try:
            rebalance()
        finally:
            self.is_releasing_lost = False
            self._consumer._runner.done()
            # eager: the application has released all partitions, even those that this member keeps
            if (
                self._is_eager
                and not self._eager_assignment
                and self._owned
                and not self._has_queued_rebalance
                and self._consumer._subscription
            ):
                self._assign_all(list(self._owned))

    @property
    def _is_eager(self) -> bool:
        return self._consumer.config.is_eager

    @property
    def _has_queued_rebalance(self) -> bool:
        return any(isinstance(operation, (Assign, Revoke, Lost)) for operation in self._consumer._inbox.operations)

    def _assign(self, partitions: Partitions) -> None:
        added = [(partition.topic, partition.index) for partition in partitions]
        self._owned.update({(partition.topic, partition.index): partition.topic_id for partition in partitions})
        if not self._is_eager:
            self._call(self._on_assign, added, lambda: self._consumer.incremental_assign(_topic_partitions(added)))
            return
        if self._eager_assignment:
            self._revoke_all(self._on_revoke)
        self._assign_all(list(self._owned))

    def _revoke(self, partitions: Partitions, callback: Callable | None) -> None:
        revoked = [(partition.topic, partition.index) for partition in partitions]
        try:
            if self._is_eager:
                if self._eager_assignment:
                    self._revoke_all(callback)
            else:
                self._call(callback, revoked, lambda: None)
        finally:
            for key in revoked:
                self._owned.pop(key, None)
            parts = [part for part in self._consumer.parts if part.key in revoked]
            try:
                if parts:
                    self._consumer._remove(parts)
            finally:
                self._consumer._offsets.release(revoked, self.is_releasing_lost)

    def _assign_all(self, keys: list[Key]) -> None:
        self._eager_assignment = sorted(keys)
        self._call(
            self._on_assign,
            self._eager_assignment,
            lambda: self._consumer.assign(_topic_partitions(self._eager_assignment)),
        )

    def _revoke_all(self, callback: Callable | None) -> None:
        revoked, self._eager_assignment = self._eager_assignment, []
        try:
            self._call(callback, revoked, lambda: None)
        finally:
            parts = [part for part in self._consumer.parts if part.key in revoked]
            if parts:
                self._consumer._remove(parts)

    def _call(self, callback: Callable | None, keys: list[Key], default_action: Callable[[], None]) -> None:
        self._has_application_assigned = False
        try:
            if callback is not None:
                callback(self._consumer._owner, _topic_partitions(keys))
        finally:
            if not self._has_application_assigned:
                default_action()

    def wait_until_left(self, deadline: float) -> None:
        """Carries out the release of all partitions, and waits for Left."""
        consumer = self._consumer
        self._has_left = False
        while not self._has_left and time.monotonic() < deadline:
            consumer._handle_responses()
            if consumer._inbox.operations:
                self.carry_out(consumer._inbox.operations.popleft())
            else:
                consumer.control.wait_for(
                    lambda: consumer._inbox.operations or consumer._inbox.responses,
                    min(deadline - time.monotonic(), 1.0),
                )


def _topic_partitions(keys: list[Key]) -> list[TopicPartition]:
    return [TopicPartition(topic, index) for topic, index in keys]


def _problem(code: int, text: str, is_fatal: bool) -> KafkaError:
    return local_error(code, text, fatal=is_fatal) if code < 0 or is_fatal else broker_error(code, text)
