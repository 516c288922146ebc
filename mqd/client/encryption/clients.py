"""Producers that seal values and consumers that open them, for both transports. The sealing and
opening itself is in payload.py.

A record that cannot be opened is returned with its error() set, like other events, and with its
sealed bytes as value(); it is not committed until a later record of its partition has been returned.
consume_batch() returns the records before such a record, then raises its error once, then continues
after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import confluent_kafka

from mqd.base.property_values import ConfigError
from mqd.client import columns
from mqd.client.config import Settings, TransportChoice
from mqd.client.encryption.envelope import PayloadError
from mqd.client.encryption.payload import Opener, Sealer, opener_of, sealer_of
from mqd.client.encryption.settings import Encryption
from mqd.client.encryption.views import open_view
from mqd.client.messages import KafkaError, KafkaException, Message, TopicPartition, failure, local_error
from mqd.client.shm.consumer import ShmConsumer
from mqd.client.shm.producer import ShmProducer

_REPORT_KEYS = ("on_delivery", "dr_cb", "dr_msg_cb")


def _create(make: Callable[[Encryption], Any], encryption: Encryption | None) -> Any:
    assert encryption is not None  # these classes are used only with encryption settings
    try:
        return make(encryption)
    except ConfigError as error:
        raise failure(KafkaError._INVALID_ARG, str(error)) from error


# -- producers -------------------------------------------------------------------------------------


def with_sealing(produce: Callable[..., None], sealer: Sealer, default_report: Any) -> Callable[..., None]:
    """Returns a produce() that seals values. Its delivery reports have the original value."""

    def produce_sealed(
        topic, value=None, key=None, partition=-1, callback=None, on_delivery=None, timestamp=0, headers=None
    ) -> None:
        report = callback or on_delivery
        if value is not None and isinstance(topic, str) and sealer.seals(topic):
            value, key = columns.to_bytes(value, 2), columns.to_bytes(key, 3)
            report = report or default_report
            if callable(report):
                report = _with_original_value(value, report)
            try:
                value = sealer.seal(topic, key, value)
            except PayloadError as error:
                raise _sealing_failure(error) from error
        more = {} if report is None else {"on_delivery": report}
        produce(topic, value, key, partition, timestamp=timestamp, headers=headers, **more)

    return produce_sealed


def _with_original_value(value: bytes, report: Any) -> Callable[[Any, Any], None]:
    def with_original(error: Any, message: Any) -> None:
        message.set_value(value)
        report(error, message)

    return with_original


def _configured_callback(config: Mapping[str, Any]) -> Any:
    return next((config[name] for name in _REPORT_KEYS if callable(config.get(name))), None)


def _sealing_failure(problem: PayloadError) -> KafkaException:
    return failure(KafkaError._VALUE_SERIALIZATION, f"Unable to produce message: {problem}")


class EncryptingProducer(confluent_kafka.Producer):
    """confluent_kafka's Producer that seals values; for TcpProducer and the command line."""

    def __init__(self, config: dict[str, Any], encryption: Encryption, **more: Any) -> None:
        sealer = _create(sealer_of, encryption)
        super().__init__(config, **more)
        produce = with_sealing(super().produce, sealer, _configured_callback(config))
        self.produce = produce  # type: ignore[method-assign]  # one call fewer per record than a method


class EncryptingShmProducer(ShmProducer):
    def __init__(self, settings: Settings, choice: TransportChoice) -> None:
        self._sealer: Sealer = _create(sealer_of, settings.encryption)
        self._default_report = _configured_callback(settings.rdkafka)
        super().__init__(settings, choice)

    def _make_produce(self) -> Callable[..., None]:
        return with_sealing(super()._make_produce(), self._sealer, self._default_report)

    def produce_batch(self, topic: str, values: Any, keys: Any = None, **more: Any) -> int:
        packed = columns.pack(values, "values")
        packed_keys = None if keys is None else columns.pack_keys(keys, packed.count)
        try:
            sealed = self._sealer.seal_column(topic, packed, packed_keys)
        except PayloadError as error:
            raise _sealing_failure(error) from error
        return super().produce_batch(topic, sealed, packed_keys, **more)


# -- consumers -------------------------------------------------------------------------------------


def open_message(opener: Opener, message: Any) -> Any:
    """Opens the message's value or sets its error. Returns the same message."""
    if message is None or message.error() is not None:
        return message
    value = message.value()
    if value is not None:
        try:
            message.set_value(opener.open(message.topic(), message.key(), value))
        except PayloadError as error:
            message.set_error(_opening_error(message.topic(), message.partition(), message.offset(), error))
    return message


def _opening_error(topic: str, partition: int, offset: int, problem: PayloadError) -> KafkaError:
    return local_error(
        KafkaError._VALUE_DESERIALIZATION,
        f"{topic} [{partition}]: the value at offset {offset} cannot be opened: {problem}",
    )


class DecryptingConsumer(confluent_kafka.Consumer):
    """confluent_kafka's Consumer that opens values; for TcpConsumer and the command line."""

    def __init__(self, config: dict[str, Any], encryption: Encryption, **more: Any) -> None:
        self._opener: Opener = _create(opener_of, encryption)
        super().__init__(config, **more)

    def poll(self, timeout: float = -1) -> Any:
        return open_message(self._opener, super().poll(timeout))

    def consume(self, num_messages: int = 1, timeout: float = -1) -> list[Any]:
        return [open_message(self._opener, message) for message in super().consume(num_messages, timeout)]


class DecryptingShmConsumer(ShmConsumer):
    _opener: Opener

    @classmethod
    def factory(cls, encryption: Encryption) -> Callable[..., ShmConsumer]:
        """Returns a function that takes the arguments of ShmConsumer. Raises KafkaException."""
        opener = _create(opener_of, encryption)

        def make(*arguments: Any) -> ShmConsumer:
            consumer = cls(*arguments)
            consumer._opener = opener
            return consumer

        return make

    def _read_chunk(self) -> bool:
        if not super()._read_chunk():
            return False
        self._ready = map(lambda message: open_message(self._opener, message), self._ready)
        return True

    def consume_batch(self, max_records: int = 65_536, timeout: float | None = None) -> Any:
        batch = super().consume_batch(max_records, timeout)
        if batch is None:
            return None
        opened, problem = open_view(self._opener, batch)
        if problem is None:
            return opened
        partition, offset = (batch.topic, batch.partition), int(batch.offsets[len(opened)])
        self.give_back([Message(*partition, offset)])
        if opened:
            return opened
        if partition not in self._recreated:
            self.seek(TopicPartition(*partition, offset + 1))  # type: ignore[attr-defined]  # set by ShmConsumer.__init__
        raise KafkaException(_opening_error(*partition, offset, problem))
