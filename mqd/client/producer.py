"""confluent_kafka's Producer, over shared memory if the broker is on this host."""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping
from typing import Any

import confluent_kafka

from mqd.client import config as configuration
from mqd.client.messages import KafkaException

_log = logging.getLogger("mqd.client")


class Producer:
    """Asynchronous producer with confluent_kafka.Producer's methods.

        producer = Producer({"bootstrap.servers": "127.0.0.1:9092", "enable.idempotence": True})
        producer.produce("events", value=b"...", key=b"k", on_delivery=lambda error, message: ...)
        producer.poll(0)       # serves delivery reports
        producer.flush()       # waits until nothing is outstanding

    `config`: librdkafka's keys; unknown ones raise KafkaException. Added keys:

        transport           auto (default): shared memory if the broker is on this host and this
                            process may attach, else TCP. shm: shared memory or an error. tcp:
                            TCP only.
        mqd.socket.path     the broker's client socket (RUN/client.sock); default: found from
                            bootstrap.servers. The environment variable MQD_SOCKET does the same.
        mqd.buffer.bytes    memory shared with the broker for records in flight, 64 KiB to 1 GiB; 0
                            (default) = 16 MiB. It bounds what is outstanding over shared memory.
        mqd.spin.us         how long a wait spins before it sleeps; default 20
        partitioner         may also be a callable (key: bytes or None, partition_count) -> partition
        encryption.*        values are sealed before they leave the client (docs/payload-encryption.md)

    `transport` and `transport_reason` give the transport in use and the reason, which are also logged
    (logger "mqd.client").

    All methods may be called by any thread. In a child of fork() every call raises KafkaException:
    create a new producer there. As a context manager, it is closed at the end of the block.
    """

    def __init__(self, config: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        settings = configuration.read(config, more)
        self._implementation = _create_implementation(settings)
        self.transport_reason: str = self._implementation.reason
        own_class = type(self)
        for name in ("produce", "poll"):  # one call fewer per record
            if getattr(own_class, name) is getattr(Producer, name):
                setattr(self, name, getattr(self._implementation, name))

    @property
    def transport(self) -> str:
        """ "shm" or "tcp"."""
        return self._implementation.transport

    # -- records -----------------------------------------------------------------------------------

    def produce(
        self,
        topic: str,
        value: bytes | str | None = None,
        key: bytes | str | None = None,
        partition: int = -1,
        callback: Any = None,
        on_delivery: Any = None,
        timestamp: int = 0,
        headers: Any = None,
    ) -> None:
        """Accepts one record; does not wait for the broker.

        partition: -1 = chosen by the partitioner. timestamp: milliseconds since the epoch, 0 = now.
        headers: a dict or a list of (str, bytes | str | None). on_delivery (or callback): called as
        on_delivery(error: KafkaError | None, message: Message) from poll() or flush() when the
        record's outcome is known.

        Raises BufferError when the queue is full: call poll(), then try again. Raises KafkaException
        with MSG_SIZE_TOO_LARGE, _UNKNOWN_PARTITION, _STATE (no transaction begun), or the producer's
        fatal error; TypeError if a key or value is not bytes, str or None.
        """
        self._implementation.produce(topic, value, key, partition, callback, on_delivery, timestamp, headers)

    def produce_batch(
        self,
        topic: str,
        values: Any = None,
        keys: Any = None,
        headers: Any = None,
        partition: Any = -1,
        timestamps: Any = None,
        on_delivery: Any = None,
        timeout: float = -1,
        *,
        messages: list[dict[str, Any]] | None = None,
        callback: Any = None,
    ) -> int:
        """Accepts many records of one topic, in order; several million a second over shared memory.
        Returns how many were accepted.

        values, keys: lists of bytes (or str, None); numpy arrays of 'S' or, with two dimensions,
        uint8; Arrow arrays (binary, string, fixed_size_binary). headers: a dict or list of tuples
        for all records, or a list with a dict, a list of tuples or None for each. partition: one
        for all (-1 = by the partitioner), or an array. timestamps: milliseconds, one for all or an
        array; numpy's datetime64 as well. on_delivery: called as on_delivery(error, BatchDelivery)
        from poll() or flush(), once for each record batch of this call. timeout: how long to wait
        for room, in seconds. Below 0, the default: until all are accepted, so that the result is
        always len(values). 0: does not wait. A result smaller than len(values) means that there was
        no room for the remaining records; pass them again.

        The arguments are checked first: if that raises (TypeError, ValueError, KafkaException
        MSG_SIZE_TOO_LARGE, ...), no record was accepted. Any later exception (the producer was
        closed or fenced, a callback raised, Ctrl-C) has the attribute `accepted`, the number of
        accepted records. The memory of numpy and Arrow arrays may be reused once the call returns.

        confluent_kafka's form, a list of dicts with value, key, partition, timestamp, callback, works
        too: record by record as in produce(), without waiting; records that do not fit have
        "_error" set. As in confluent_kafka, messages and callback may be keywords, and partition and
        callback may be the third and fourth argument.
        """
        on_delivery = on_delivery if callback is None else callback
        if messages is not None:
            values = messages
        if isinstance(values, list) and (isinstance(keys, int) or (values and isinstance(values[0], dict))):
            # in confluent_kafka's signature, partition and callback have the positions of keys and headers
            partition = keys if keys is not None else -1 if partition is None else partition
            on_delivery = on_delivery if headers is None else headers
            return self._produce_dicts(topic, values, operator.index(partition), on_delivery)
        return self._implementation.produce_batch(
            topic,
            values,
            keys,
            headers=headers,
            partition=partition,
            timestamps=timestamps,
            on_delivery=on_delivery,
            timeout=timeout,
        )

    def _produce_dicts(self, topic: str, messages: list[dict[str, Any]], partition: int, on_delivery: Any) -> int:
        if on_delivery is not None and not callable(on_delivery):
            raise TypeError("expected on_delivery to be callable")
        accepted_count = 0
        try:
            for message in messages:
                accepted_count += self._produce_dict(topic, message, partition, on_delivery)
        except BaseException as problem:
            problem.accepted = accepted_count  # type: ignore[attr-defined]  # read by the caller
            raise
        return accepted_count

    def _produce_dict(self, topic: str, message: dict[str, Any], partition: int, on_delivery: Any) -> int:
        """Returns how many records were accepted, 1 or 0."""
        if not isinstance(message, dict):
            raise TypeError("expected messages to be a list of dicts")
        own_partition = message.get("partition")
        report = message.get("callback") or message.get("on_delivery") or on_delivery
        try:
            self.produce(
                topic,
                message.get("value"),
                message.get("key"),
                partition if own_partition is None else own_partition,
                on_delivery=report,
                timestamp=message.get("timestamp") or 0,
                headers=message.get("headers"),
            )
            return 1
        except BufferError:
            message["_error"] = confluent_kafka.KafkaError(confluent_kafka.KafkaError._QUEUE_FULL)
        except KafkaException as error:
            message["_error"] = error.args[0]
        return 0

    def poll(self, timeout: float = -1) -> int:
        """Calls the callbacks that are due (of delivery reports and others). Waits up to `timeout`
        seconds for the first one (below 0: no limit). Returns how many were called.
        """
        return self._implementation.poll(timeout)

    def flush(self, timeout: float = -1) -> int:
        """Sends everything immediately and serves reports until nothing is outstanding, or for
        `timeout` seconds. Returns how many records are outstanding.
        """
        return self._implementation.flush(timeout)

    def purge(self, in_queue: bool = True, in_flight: bool = True, blocking: bool = True) -> None:
        """Discards queued records, and those that were sent but not acknowledged (which may be
        written anyway); the reports have the errors _PURGE_QUEUE and _PURGE_INFLIGHT.
        """
        self._implementation.purge(in_queue=in_queue, in_flight=in_flight, blocking=blocking)

    def __len__(self) -> int:
        """The number of undelivered records, plus the delivery reports that are still to be served."""
        return len(self._implementation)

    def __bool__(self) -> bool:
        return True

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any:
        """confluent_kafka.admin.ClusterMetadata of one topic or of all."""
        return (
            self._implementation.list_topics(topic, timeout)
            if topic is not None
            else self._implementation.list_topics(timeout=timeout)
        )

    def cluster_id(self, timeout: float = -1) -> str | None:
        """The cluster's id."""
        return self._implementation.list_topics(timeout=timeout).cluster_id

    def broker_request(self, api_key: int, message: object, timeout: float = -1) -> Any:
        """Sends a request of mqd.protocol.messages in the newest version that both sides support, and
        returns the response. Only over shared memory. Raises KafkaException if there is
        no response.
        """
        if self.transport != "shm":
            raise RuntimeError("broker_request() needs shared memory: use an AdminClient over TCP")
        return self._implementation.request(api_key, message, timeout)

    def set_sasl_credentials(self, username: str, password: str) -> None:
        """Sets the credentials for future TCP connections. Has no effect over shared memory, where
        a client is identified by its process's user.
        """
        self._implementation.set_sasl_credentials(username, password)

    # -- transactions ------------------------------------------------------------------------------

    def init_transactions(self, timeout: float = -1) -> None:
        """Fences older producers of this transactional.id and aborts their open transaction. Must be
        called once, before all other methods.

        This method and those below raise KafkaException; its KafkaError is retriable(),
        txn_requires_abort() or fatal().
        """
        self._implementation.init_transactions(timeout)

    def begin_transaction(self) -> None:
        """Begins a transaction: records produced from now on belong to it."""
        self._implementation.begin_transaction()

    def send_offsets_to_transaction(self, positions: list[Any], group_metadata: Any, timeout: float = -1) -> None:
        """Makes consumed positions (list of TopicPartition, the next offsets to read) part of the
        transaction. group_metadata: consumer.consumer_group_metadata().
        """
        self._implementation.send_offsets_to_transaction(positions, group_metadata, timeout)

    def commit_transaction(self, timeout: float = -1) -> None:
        """Flushes, then commits. Raises KafkaException with txn_requires_abort() if a record could not be
        written.
        """
        self._implementation.commit_transaction(timeout)

    def abort_transaction(self, timeout: float = -1) -> None:
        """Discards outstanding records (with the errors of purge()) and aborts the transaction."""
        self._implementation.abort_transaction(timeout)

    # -- closing -----------------------------------------------------------------------------------

    def close(self) -> bool:
        """Aborts an open transaction, flushes and ends the producer. When it returns, every record
        has had its report, even after a fatal error. Must not be called from a callback.

        Over shared memory it waits 5 s for a broker that is down, then discards the outstanding
        records with the errors of purge().
        """
        return self._implementation.close()

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        implementation = getattr(self, "_implementation", None)
        if implementation is not None:
            implementation.abandon()


def _create_implementation(settings: configuration.Settings) -> Any:
    choice = configuration.choose_transport(settings)
    if choice.transport == "shm":
        configuration.check(settings, confluent_kafka.Producer)
        implementation, choice = _try_shared_memory(settings, choice)
        if implementation is not None:
            return implementation
    from mqd.client.tcp.producer import TcpProducer

    _log.info("producer uses TCP: %s", choice.reason)
    return TcpProducer(settings, choice.reason)


def _try_shared_memory(
    settings: configuration.Settings, choice: configuration.TransportChoice
) -> tuple[Any, configuration.TransportChoice]:
    producer_class: Any
    if settings.encryption is None:
        from mqd.client.shm.producer import ShmProducer as producer_class
    else:
        from mqd.client.encryption.clients import EncryptingShmProducer as producer_class

    try:
        implementation = producer_class(settings, choice)
    except (KafkaException, OSError) as error:
        if settings.own["transport"] == "shm":
            raise
        return None, configuration.TransportChoice(
            "tcp",
            None,
            f"shared memory is not available: {error.args[0] if isinstance(error, KafkaException) else error}",
        )
    _log.info("producer uses shared memory: %s", choice.reason)
    return implementation, choice
