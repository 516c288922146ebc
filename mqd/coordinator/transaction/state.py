"""The current state of a transactional id, and its encoding in the log. The transitions, and the
invariants that check() asserts, are in core.py.
"""

import msgspec

from mqd.coordinator.actions import Action, Persist
from mqd.coordinator.transaction import events
from mqd.coordinator.transaction.events import TRANSACTIONS_V2, Description, Partition
from mqd.coordinator.transaction.records import (
    NO_PARTITIONS,
    NULL_PARTITIONS,
    STATE_NAMES,
    State,
    TransactionValue,
    decode_value,
    encode_key,
    encode_partitions,
    encode_value,
)

EPOCH_MAX = 32767
HELD_MAX = 32  # waiting requests

IDLE = frozenset((State.EMPTY, State.COMPLETE_COMMIT, State.COMPLETE_ABORT))
PREPARING = frozenset((State.PREPARE_COMMIT, State.PREPARE_ABORT))


class Settings(msgspec.Struct, frozen=True):
    max_timeout_ms: int = 900_000  # transaction.max.timeout.ms
    expiration_ms: int = 604_800_000  # transactional.id.expiration.ms
    response_ms: int = 200  # how long EndTxn waits for its markers
    hold_ms: int = 1_000  # how long other requests wait for the previous transaction to end


class HeldRequest(msgspec.Struct, frozen=True):
    """A request that waits until the markers are written, or until `until_ms`."""

    until_ms: int
    event: events.Request


class TransactionState:
    """`producer_id` -1: the transactional id is unknown."""

    __slots__ = (
        "_armed_ms",
        "_attempt",
        "_encoded_partitions",
        "_held",
        "_key",
        "_settings",
        "client_version",
        "last_producer_epoch",
        "last_update_ms",
        "next_producer_id",
        "partitions",
        "previous_producer_id",
        "producer_epoch",
        "producer_id",
        "start_ms",
        "state",
        "timeout_ms",
        "transactional_id",
    )

    def __init__(self, transactional_id: str, settings: Settings) -> None:
        self.transactional_id = transactional_id
        self._settings = settings
        self._key = encode_key(transactional_id)
        self._attempt = 0  # number of the last WriteMarkers
        self._held: list[HeldRequest] = []
        self._armed_ms: int | None = None  # when the armed timer fires
        self._forget()

    def _forget(self) -> None:
        self.state = State.EMPTY
        self.producer_id = self.previous_producer_id = self.next_producer_id = -1
        self.producer_epoch = self.last_producer_epoch = -1
        self.timeout_ms = 0
        self.start_ms = self.last_update_ms = -1
        self.client_version = 0
        self._set_partitions({})

    def replay(self, key: bytes, value: bytes | None) -> None:
        """Applies one record of the log. Raises ValueError for bytes that it cannot read."""
        if value is None:
            self._forget()
            return
        record = decode_value(value)
        if not 0 <= record.producer_epoch <= EPOCH_MAX - (record.state == State.ONGOING):  # T3
            raise ValueError(
                f"a transaction's record has epoch {record.producer_epoch}, invalid in state"
                f" {STATE_NAMES[record.state]}"
            )
        self.state = record.state
        self.producer_id, self.previous_producer_id, self.next_producer_id = (
            record.producer_id,
            record.previous_producer_id,
            record.next_producer_id,
        )
        self.producer_epoch, self.timeout_ms, self.client_version = (
            record.producer_epoch,
            record.timeout_ms,
            record.client_version,
        )
        self.start_ms, self.last_update_ms = record.start_ms, record.last_update_ms
        self._set_partitions(dict.fromkeys(record.partitions))
        self.last_producer_epoch = self._derived_last_epoch()

    def replay_pending(self, key: bytes, value: bytes | None, producer_id: int, producer_epoch: int) -> None:
        raise ValueError("a coordinator's own records are never transactional; this one has another writer")

    def _derived_last_epoch(self) -> int:
        """The producer epoch before the current one. Kafka's schema cannot hold it; if a client of
        version 2 ended the transaction, it follows from the other fields.
        """
        if self.client_version < TRANSACTIONS_V2 or self.state in (State.EMPTY, State.ONGOING):
            return -1
        if self.state in IDLE and self.previous_producer_id != self.producer_id:
            return EPOCH_MAX - 1
        return self.producer_epoch - 1

    @property
    def is_empty(self) -> bool:
        return self.producer_id < 0 and not self._held

    def description(self) -> Description | None:
        if self.producer_id < 0:
            return None
        return Description(
            self.transactional_id,
            STATE_NAMES[self.state],
            self.producer_id,
            self.producer_epoch,
            self.timeout_ms,
            self.start_ms,
            tuple(self.partitions),
        )

    def open_producers(self) -> dict[int, int]:
        """Producer id -> epoch of the producers with an open transaction."""
        return {self.producer_id: self.producer_epoch} if self.partitions else {}

    # -- records -----------------------------------------------------------------------------------

    def _set_partitions(self, partitions: dict[Partition, None]) -> None:
        self.partitions = partitions
        self._encoded_partitions = encode_partitions(tuple(partitions)) if partitions else NO_PARTITIONS

    def _persist(self, now_ms: int, actions: list[Action], is_lazy: bool = False) -> None:
        self.last_update_ms = now_ms
        value = TransactionValue(
            self.producer_id,
            self.producer_epoch,
            self.timeout_ms,
            self.state,
            (),
            now_ms,
            self.start_ms,
            self.previous_producer_id,
            self.next_producer_id,
            self.client_version,
        )
        encoded = NULL_PARTITIONS if self.state == State.EMPTY else self._encoded_partitions
        actions.append(Persist(((self._key, encode_value(value, encoded)),), is_lazy=is_lazy))

    def durable_state(self) -> tuple[object, ...]:
        """The state that a replay of the log must reproduce (T8)."""
        return (
            self.state,
            self.producer_id,
            self.previous_producer_id,
            self.next_producer_id,
            self.producer_epoch,
            self.timeout_ms,
            self.client_version,
            self.start_ms,
            self.last_update_ms,
            tuple(sorted(self.partitions)),
        )

    def check(self) -> None:
        """Raises AssertionError."""
        is_in_transaction = self.state == State.ONGOING or self.state in PREPARING
        assert bool(self.partitions) == is_in_transaction, f"T1: {self.state!r} with partitions {list(self.partitions)}"
        assert self.producer_id >= 0 or (self.state == State.EMPTY and self.producer_epoch == -1), (
            "T2: a state without a producer id"
        )
        assert self.producer_id < 0 or 0 <= self.producer_epoch <= EPOCH_MAX, f"T2: epoch {self.producer_epoch}"
        assert self.state != State.ONGOING or self.producer_epoch < EPOCH_MAX, "T3: a client has the reserved epoch"
        assert self.next_producer_id < 0 or (self.state in PREPARING and self.producer_epoch == EPOCH_MAX), (
            "T2: an unnecessary next producer id"
        )
        assert not self._held or self.state in PREPARING, f"T7: requests wait in {self.state!r}"
        assert len(self._held) <= HELD_MAX
