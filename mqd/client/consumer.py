"""confluent_kafka's Consumer, over shared memory if the broker is on this host."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NoReturn

import confluent_kafka

from mqd.client import config as configuration
from mqd.client.messages import KafkaException, Message, TopicPartition

_log = logging.getLogger("mqd.client")


class Consumer:
    """Consumer with confluent_kafka.Consumer's methods.

        settings = {"bootstrap.servers": "127.0.0.1:9092", "group.id": "app", "auto.offset.reset": "earliest"}
        consumer = Consumer(settings)
        consumer.subscribe(["events"])
        while (message := consumer.poll(1.0)) is not None:
            if message.error() is None:
                handle(message.key(), message.value())
        consumer.close()

    `config`: librdkafka's keys; unknown ones raise KafkaException. Added keys:

        transport           auto (default): shared memory if the broker is on this host and this
                            process may attach, else TCP. shm: shared memory or an error. tcp:
                            TCP only.
        mqd.socket.path     the broker's client socket (RUN/client.sock); default: found from
                            bootstrap.servers. The environment variable MQD_SOCKET does the same.
        mqd.spin.us         how long a wait spins before it sleeps; default 20
        encryption.*        sealed values are opened (docs/payload-encryption.md)

    `transport` and `transport_reason` give the transport in use and the reason, which are also logged
    (logger "mqd.client"). Differences from librdkafka: docs/client.md.

    For one thread at a time; memberid() and consumer_group_metadata() may be called from any. In a
    child of fork() every call raises KafkaException: create a new consumer there. As a context
    manager, it is closed at the end of the block. Every method raises RuntimeError when the consumer
    is closed, and KafkaException where confluent_kafka does.
    """

    def __init__(self, config: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        settings = configuration.read(
            config, {name.replace("_", "."): value for name, value in more.items()} if config is None else more
        )
        self._implementation = _create_implementation(self, settings)
        self.transport_reason: str = self._implementation.reason
        own_class = type(self)
        for name in ("poll", "consume"):  # one call fewer per record
            if getattr(own_class, name) is getattr(Consumer, name):
                setattr(self, name, getattr(self._implementation, name))

    @property
    def transport(self) -> str:
        """ "shm" or "tcp"."""
        return self._implementation.transport

    # -- records -----------------------------------------------------------------------------------

    def poll(self, timeout: float | None = None) -> Message | None:
        """Returns the next record, or an event (its error() is not None), or None when `timeout`
        seconds have passed without one (None or below 0: no limit).

        Calls the callbacks of subscribe() and on_commit. An application that does not poll for
        max.poll.interval.ms loses its partitions.
        """
        return self._implementation.poll(timeout)

    def consume(self, num_messages: int = 1, timeout: float = -1) -> list[Message]:
        """Returns up to `num_messages` records and events; waits at most `timeout` seconds for them."""
        return self._implementation.consume(num_messages, timeout)

    def consume_batch(self, max_records: int = 65_536, timeout: float | None = None) -> Any:
        """Returns the next records of one partition as columns
        (mqd.client.record_batch.RecordBatchView), as soon as there are any; None when `timeout`
        seconds have passed without a record.

        Over shared memory its columns are views of the mapped log: nothing is copied, and they are
        valid as long as the batch, or an array made of it, exists. Uncommitted and aborted records
        are left out, as in poll(). Raises KafkaException for an error of a partition or of the
        group, once for each error.
        """
        return self._implementation.consume_batch(max_records, timeout)

    # -- the group ---------------------------------------------------------------------------------

    def subscribe(self, topics: list[str], on_assign: Any = None, on_revoke: Any = None, on_lost: Any = None) -> None:
        """Joins the group for these topics; replaces an earlier subscription. A name that begins
        with ^ is a regular expression (RE2).

        on_assign, on_revoke, on_lost(consumer, list of TopicPartition): called from poll(),
        consume(), unsubscribe() and close(). on_assign may call assign() (with
        group.protocol=consumer or cooperative-sticky: incremental_assign()) to start at other
        offsets; if it does not, the partitions are assigned at their committed offsets. Without
        on_lost, on_revoke is called for lost partitions.
        """
        self._implementation.subscribe(topics, on_assign=on_assign, on_revoke=on_revoke, on_lost=on_lost)

    def unsubscribe(self) -> None:
        """Leaves the group and releases the assigned partitions."""
        self._implementation.unsubscribe()

    def subscription(self) -> list[str]:
        """The topics given to subscribe()."""
        return self._implementation.subscription()

    def memberid(self) -> str | None:
        """This member's id in the group; empty before subscribe()."""
        return self._implementation.memberid()

    def consumer_group_metadata(self) -> Any:
        """The group metadata for Producer.send_offsets_to_transaction(), on either transport."""
        return self._implementation.consumer_group_metadata()

    # -- the assignment ----------------------------------------------------------------------------

    def assign(self, partitions: list[TopicPartition]) -> None:
        """Reads exactly these partitions, each from its offset: absolute, OFFSET_BEGINNING,
        OFFSET_END, or (OFFSET_STORED, OFFSET_INVALID) the committed one.
        """
        self._implementation.assign(partitions)

    def incremental_assign(self, partitions: list[TopicPartition]) -> None:
        """Reads these partitions too."""
        self._implementation.incremental_assign(partitions)

    def unassign(self) -> None:
        """Stops reading all partitions."""
        self._implementation.unassign()

    def incremental_unassign(self, partitions: list[TopicPartition]) -> None:
        """Stops reading these partitions."""
        self._implementation.incremental_unassign(partitions)

    def assignment(self) -> list[TopicPartition]:
        """The assigned partitions."""
        return self._implementation.assignment()

    def seek(self, partition: TopicPartition) -> None:
        """Continues reading this assigned partition at partition.offset (absolute or logical)."""
        self._implementation.seek(partition)

    def pause(self, partitions: list[TopicPartition]) -> None:
        """Stops returning records of these partitions until resume(), even those read ahead."""
        self._implementation.pause(partitions)

    def resume(self, partitions: list[TopicPartition]) -> None:
        """Continues reading these partitions."""
        self._implementation.resume(partitions)

    def position(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        """For each partition, returns the offset after the last returned record, or OFFSET_INVALID if
        no record was returned.
        """
        return self._implementation.position(partitions)

    # -- commits -----------------------------------------------------------------------------------

    def commit(
        self, message: Message | None = None, offsets: list[TopicPartition] | None = None, asynchronous: bool = True
    ) -> list[TopicPartition] | None:
        """Commits the offset after `message`, or `offsets`, or all stored offsets. Asynchronous:
        poll() calls on_commit. Otherwise returns the committed offsets, each with its error or None;
        raises KafkaException if one of them failed.
        """
        if message is not None and offsets is not None:
            _raise_exclusive()
        return self._implementation.commit(message=message, offsets=offsets, asynchronous=asynchronous)

    def store_offsets(self, message: Message | None = None, offsets: list[TopicPartition] | None = None) -> None:
        """Stores offsets for the next commit; needs enable.auto.offset.store=false."""
        if message is not None and offsets is not None:
            _raise_exclusive()
        if message is not None:
            self._implementation.store_offsets(message=message)
        else:
            self._implementation.store_offsets(offsets=offsets)

    def committed(self, partitions: list[TopicPartition], timeout: float | None = None) -> list[TopicPartition]:
        """The group's committed offsets; OFFSET_INVALID: none."""
        return (
            self._implementation.committed(partitions, timeout)
            if timeout is not None
            else self._implementation.committed(partitions)
        )

    # -- queries -----------------------------------------------------------------------------------

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any:
        """confluent_kafka.admin.ClusterMetadata of one topic or of all."""
        return (
            self._implementation.list_topics(topic, timeout)
            if topic is not None
            else self._implementation.list_topics(timeout=timeout)
        )

    def get_watermark_offsets(
        self, partition: TopicPartition, timeout: float | None = None, cached: bool = False
    ) -> tuple[int, int] | None:
        """Returns (log start offset, end); the end is the high watermark or, with
        isolation.level=read_committed, the last stable offset. cached: the last known offsets,
        without a request.
        """
        more = {"timeout": timeout} if timeout is not None else {}
        return self._implementation.get_watermark_offsets(partition, cached=cached, **more)

    def offsets_for_times(self, partitions: list[TopicPartition], timeout: float | None = None) -> list[TopicPartition]:
        """For each partition, returns the offset of the first record with a timestamp of at least
        partition.offset (milliseconds since the epoch), or OFFSET_END if there is none.
        """
        return (
            self._implementation.offsets_for_times(partitions, timeout)
            if timeout is not None
            else self._implementation.offsets_for_times(partitions)
        )

    def cluster_id(self, timeout: float = -1) -> str | None:
        """The cluster's id."""
        return self._implementation.cluster_id(timeout)

    def set_sasl_credentials(self, username: str, password: str) -> None:
        """Sets the credentials for future TCP connections. Has no effect over shared memory, where
        a client is identified by its process's user.
        """
        self._implementation.set_sasl_credentials(username, password)

    # -- closing -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Commits if enable.auto.commit is set, releases all partitions and leaves the group. A static
        member (group.instance.id) stays in the group until its session times out.
        """
        self._implementation.close()

    def __enter__(self) -> Consumer:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def _raise_exclusive() -> NoReturn:
    raise ValueError("message and offsets are mutually exclusive")


def _create_implementation(owner: Consumer, settings: configuration.Settings) -> Any:
    if settings.rdkafka.get("group.id", "-") == "":  # otherwise an assertion in confluent_kafka would abort the process
        raise ValueError("Failed to create consumer: group.id must be set")
    choice = configuration.choose_transport(settings)
    if choice.transport == "shm":
        configuration.check(settings, confluent_kafka.Consumer)
        implementation, choice = _try_shared_memory(owner, settings, choice)
        if implementation is not None:
            return implementation
    from mqd.client.tcp.consumer import TcpConsumer

    _log.info("consumer uses TCP: %s", choice.reason)
    return TcpConsumer(owner, settings, choice.reason)


def _try_shared_memory(
    owner: Consumer, settings: configuration.Settings, choice: configuration.TransportChoice
) -> tuple[Any, configuration.TransportChoice]:
    from mqd.client.shm.consumer_opening import open_consumer

    try:
        implementation = open_consumer(owner, settings, choice)
    except (KafkaException, OSError) as error:
        if settings.own["transport"] == "shm" or (
            isinstance(error, KafkaException) and error.args[0].code() == confluent_kafka.KafkaError._INVALID_ARG
        ):
            raise
        return None, configuration.TransportChoice(
            "tcp",
            None,
            f"shared memory is not available: {error.args[0] if isinstance(error, KafkaException) else error}",
        )
    _log.info("consumer uses shared memory: %s", choice.reason)
    return implementation, choice
