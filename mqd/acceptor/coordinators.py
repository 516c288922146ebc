"""The coordinators of this broker: the log they append to, and one Coordinator each for groups, for
transactional ids and for share-partitions.

Handlers use `context.broker.coordinators`: `.groups.request(...)`, `.transactions.request(...)`,
`.log.append(...)`, `.share_states.respond(...)`.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from functools import partial

from mqd.acceptor.broker_state import OWNER_NONE, BrokerState
from mqd.acceptor.group_cluster import BrokerCluster
from mqd.acceptor.interbroker.queue_deletion import QueueDeletion
from mqd.acceptor.interbroker.share_states import ShareStates
from mqd.acceptor.share_pruning import SharePruning
from mqd.base import logging
from mqd.cluster.host import messages
from mqd.cluster.metadata.state import INTERNAL_TOPICS
from mqd.coordinator import load
from mqd.coordinator.actions import Core, CoreFactory, Effect
from mqd.coordinator.group.budget import GroupBudget
from mqd.coordinator.group.cores import GroupCoreFactory
from mqd.coordinator.group.group import Group
from mqd.coordinator.group.offsets import OffsetsSettings, PartitionsGone
from mqd.coordinator.group.settings import ClassicSettings
from mqd.coordinator.internal_topic import ServedPartition
from mqd.coordinator.log import AppendError, LogAppender, Sender, Served
from mqd.coordinator.runtime import Coordinator
from mqd.coordinator.shard import LoadedPartition
from mqd.coordinator.share.core import Forget, SharePartition, SharePartitions
from mqd.coordinator.share.core import Settings as ShareStateSettings
from mqd.coordinator.topics import (
    CONSUMER_OFFSETS,
    OFFSETS_TOPIC,
    SHARE_GROUP_STATE,
    SHARE_STATES_TOPIC,
    TRANSACTION_STATE,
    InternalTopic,
)
from mqd.native import SlotState
from mqd.protocol.errors import ErrorCode

CREATE_TIMEOUT_MS = 10_000
TOKEN_BASE = 1 << 63  # tokens of batches have bit 63 set (K5 of mqd/acceptor/link.py)

log = logging.get("acceptor.coordinators")


class SteadyClock:
    """Milliseconds since 1970 at the start, advanced by the monotonic clock: timers and ages do not
    jump when the wall clock is set.
    """

    def __init__(self) -> None:
        self._base_ns = time.time_ns() - time.monotonic_ns()

    def now_ms(self) -> int:
        return (self._base_ns + time.monotonic_ns()) // 1_000_000


class BrokerPartitions:
    """Implements log.Partitions: where appends go."""

    def __init__(self, broker: BrokerState) -> None:
        self._broker = broker

    def served(self, topic: str, partition: int) -> Served:
        image = self._broker.partition_of(topic, partition)
        if image is None or self._broker.metadata.log_topic_of(topic) != topic:  # a view has no log of its own
            raise AppendError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        if image.leader not in (-1, self._broker.node_id):
            raise AppendError(ErrorCode.NOT_LEADER_OR_FOLLOWER)
        if image.owner == OWNER_NONE:
            raise AppendError(ErrorCode.KAFKA_STORAGE_ERROR)
        view = self._broker.view(image)
        if (
            view is None
            or view.owner != image.owner
            or view.owner_generation != self._broker.table.endpoint_generation(view.owner)
        ):
            raise AppendError(ErrorCode.NOT_LEADER_OR_FOLLOWER)
        return Served(image.slot, view.owner, view.owner_generation, view.leader_epoch)


class InternalPartitions:
    """Implements internal_topic.Partitions for one internal topic."""

    def __init__(self, broker: BrokerState, topic: InternalTopic) -> None:
        self._broker = broker
        self._topic = topic

    def count(self) -> int:
        image = self._broker.metadata.topics.get(self._topic.name)
        return len(image.partitions) if image is not None else 0

    def served(self, partition: int) -> ServedPartition | None:
        image = self._broker.partition_of(self._topic.name, partition)
        if image is None:
            return None
        view = self._broker.view(image)
        if (
            view is None
            or view.state != SlotState.ONLINE
            or view.owner_generation != self._broker.table.endpoint_generation(view.owner)
        ):
            return None
        if view.leader_epoch > image.leader_epoch:
            # the worker already has newer metadata: this process does not know yet which host led
            # the partition in between
            return None
        return ServedPartition(view.leader_epoch, view.owner_generation, view.log_end_offset, view.high_watermark)

    async def load(self, partition: int, end_offset: int, cores: CoreFactory) -> LoadedPartition:
        image = self._broker.partition_of(self._topic.name, partition)
        if image is None:
            raise OSError(f"partition {partition} of {self._topic.name} is gone")
        path = self._broker.path_of(self._topic.name, image)
        return await self._broker.disks.load(
            image.log_dir, partial(load.load, path, end_offset, cores, f"{self._topic.name}-{partition}")
        )

    def is_led_elsewhere(self, partition: int) -> bool:
        image = self._broker.partition_of(self._topic.name, partition)
        return image is not None and image.leader not in (-1, self._broker.node_id)

    def may_lead(self) -> bool:
        return self._broker.may_lead()

    async def create(self) -> bool:
        config = self._broker.effective_config()
        change = messages.CreateTopic(
            self._topic.name, self._topic.partition_count(config), -1, {}, dict(self._topic.topic_config(config))
        )
        response = await self._broker.controller.request(change, CREATE_TIMEOUT_MS)
        if response.error not in (0, ErrorCode.TOPIC_ALREADY_EXISTS):
            log.warning(
                "an internal topic cannot be created",
                topic=self._topic.name,
                reason=response.message,
                error=response.error,
            )
        return self.count() > 0


class Coordinators:
    """`transaction_cores` None: transactional ids are not coordinated here."""

    def __init__(
        self,
        broker: BrokerState,
        sender: Sender,
        generation: int,
        transaction_cores: CoreFactory | None = None,
        carry_out: Callable[[str, Effect, int], None] | None = None,
    ) -> None:
        self.clock = SteadyClock()
        self.log = LogAppender(BrokerPartitions(broker), sender, TOKEN_BASE | (generation & 0x7FFF) << 48)
        self.budget = GroupBudget(broker.broker_number("group.coordinator.memory.bytes"))
        self.groups = Coordinator(
            OFFSETS_TOPIC,
            GroupCoreFactory(self._make_group),
            InternalPartitions(broker, CONSUMER_OFFSETS),
            self.log,
            self.clock.now_ms,
            carry_out=self._carry_out,
            after_load=self._find_missed_deletions,
            budget=self.budget,
            turn=broker.turn,
        )
        self.share = Coordinator(
            SHARE_STATES_TOPIC,
            SharePartitions(share_state_settings(broker)),
            InternalPartitions(broker, SHARE_GROUP_STATE),
            self.log,
            self.clock.now_ms,
            after_load=self._forget_if_topic_deleted,
            turn=broker.turn,
        )
        self.cluster = BrokerCluster(broker, self._count_members)
        self.share_states = ShareStates(
            broker, self.share, self.groups, self.cluster.share_settings, lambda: self.cluster.dead_letters_allowed
        )
        self.share_pruning = SharePruning(broker, self.share)
        self.queue_deletion = QueueDeletion(broker, self.share)
        self.transactions: Coordinator | None = None
        if transaction_cores is not None:
            self.transactions = Coordinator(
                TRANSACTION_STATE.name,
                transaction_cores,
                InternalPartitions(broker, TRANSACTION_STATE),
                self.log,
                self.clock.now_ms,
                carry_out,
                turn=broker.turn,
            )
        self.offsets_settings = offsets_settings(broker)
        self.classic_settings = classic_settings(broker)
        self._gone_topics: dict[str, int] = {}  # name -> number of partitions that remain
        self._broker = broker

    def _make_group(self, name: str) -> Group:
        return Group(name, self.classic_settings, self.offsets_settings, self.cluster)

    def _count_members(self) -> int:
        """Number of members of consumer groups."""
        return sum(
            len(core.consumer.members)
            for _, core in self.groups.items()
            if isinstance(core, Group) and core.consumer is not None
        )

    def _carry_out(self, name: str, effect: Effect, leader_epoch: int) -> None:
        self.share_states.carry_out(name, effect, leader_epoch)

    def _coordinators(self) -> Iterable[Coordinator]:
        coordinators = (self.groups, self.share)
        return coordinators if self.transactions is None else (*coordinators, self.transactions)

    def of_topic(self, name: str) -> Coordinator | None:
        return next((coordinator for coordinator in self._coordinators() if coordinator.topic == name), None)

    def start(self) -> None:
        for coordinator in self._coordinators():
            coordinator.start()
        self.share_pruning.periodic_task.start()
        self.queue_deletion.periodic_task.start()

    def stop(self) -> None:
        for coordinator in self._coordinators():
            coordinator.stop()
        self.share_states.stop()
        self.share_pruning.periodic_task.stop()
        self.queue_deletion.periodic_task.stop()
        self.log.close()

    # -- external events --------------------------------------------------------------------------

    def on_worker_death(self, worker: int) -> None:
        self.log.on_owner_death(worker)
        for coordinator in self._coordinators():
            coordinator.check_partitions()

    def on_metadata(self, message: object) -> None:
        """To be called after the metadata has been updated."""
        parts = message.parts if isinstance(message, messages.MessageList) else [message]
        for (topic, partition), leader_epoch in self._broker.metadata.take_partitions_led_elsewhere().items():
            if (coordinator := self.of_topic(topic)) is not None:
                coordinator.on_led_elsewhere(partition, leader_epoch)
        for name, remaining_count in self._broker.metadata.take_shrunk_topics().items():
            if not self._gone_topics:
                asyncio.get_running_loop().call_soon(self._forget_gone)
            self._gone_topics[name] = min(remaining_count, self._gone_topics.get(name, remaining_count))
        if self._gone_topics and any(isinstance(part, messages.TopicPut | messages.Image) for part in parts):
            self._forget_gone()  # before a client commits for a topic that was created again
        if any(self._affects_internal_topics(part) for part in parts):
            for coordinator in self._coordinators():
                coordinator.check_partitions()

    def _affects_internal_topics(self, message: object) -> bool:
        """Whether partitions of internal topics may have been added, removed or moved to another
        host."""
        if isinstance(message, messages.PartitionsPut):
            return self._broker.metadata.names.get(message.topic_id) in INTERNAL_TOPICS
        return isinstance(message, messages.Image) or (
            isinstance(message, messages.TopicPut) and message.topic.internal
        )

    def _forget_gone(self) -> None:
        """Removes the offsets of deleted topics and partitions, as Kafka does. A topic that has been
        created again since then starts without offsets.
        """
        if not self._gone_topics:
            return
        event = PartitionsGone(self._gone_topics)
        self._gone_topics = {}
        self.groups.post_all(
            event, lambda core: isinstance(core, Group) and core.has_state_of_any(event.remaining_counts.keys())
        )
        self.share.post_all(Forget(), self._is_gone)

    def _is_gone(self, core: Core) -> bool:
        """Whether the share-partition's topic was deleted. The broker that wrote the state knew the
        topic before this host became leader of that log. So this host's metadata has the topic,
        unless the topic was deleted or is withheld. Withheld topics are known only by name: while
        there are any, no topic is treated as deleted.
        """
        metadata = self._broker.metadata
        return isinstance(core, SharePartition) and not metadata.withheld and metadata.by_id(core.topic_id) is None

    def _forget_if_topic_deleted(self, core: Core) -> Forget | None:
        return Forget() if self._is_gone(core) else None

    def _find_missed_deletions(self, core: Core) -> PartitionsGone | None:
        """Finds deletions that happened while no coordinator was active. The broker that wrote the
        offsets knew those partitions before this host became leader of that log. So this host's
        metadata has them, unless they were deleted or are withheld. The deletion of a topic that was
        created again under the same name is not noticed, because the record of an offset has no
        topic id.
        """
        assert isinstance(core, Group)
        metadata, remaining_counts = self._broker.metadata, {}
        for name, end in core.offsets.partition_ends().items():
            image = metadata.topics.get(name)
            count = 0 if image is None else image.partition_count if image.partition_count >= 0 else end
            if end > count and name not in metadata.withheld:
                remaining_counts[name] = count
        if core.share is not None:
            for topic_id, name in core.share.states.names.items():
                if metadata.by_id(topic_id) is None and name not in metadata.withheld:
                    remaining_counts[name] = 0
        if not remaining_counts:
            return None
        log.info(
            "committed offsets of deleted partitions are removed", group=core.group_id, topics=sorted(remaining_counts)
        )
        return PartitionsGone(remaining_counts)


def classic_settings(broker: BrokerState) -> ClassicSettings:
    return ClassicSettings(
        initial_rebalance_delay_ms=broker.broker_number("group.initial.rebalance.delay.ms"),
        min_session_timeout_ms=broker.broker_number("group.min.session.timeout.ms"),
        max_session_timeout_ms=broker.broker_number("group.max.session.timeout.ms"),
        max_size=broker.broker_number("group.max.size"),
    )


def share_state_settings(broker: BrokerState) -> ShareStateSettings:
    return ShareStateSettings(
        updates_per_snapshot=broker.broker_number("share.coordinator.snapshot.update.records.per.snapshot"),
        cold_ms=broker.broker_number("share.coordinator.cold.partition.snapshot.interval.ms"),
    )


def offsets_settings(broker: BrokerState) -> OffsetsSettings:
    return OffsetsSettings(
        retention_ms=broker.broker_number("offsets.retention.minutes") * 60_000,
        check_interval_ms=broker.broker_number("offsets.retention.check.interval.ms"),
        metadata_bytes_max=broker.broker_number("offset.metadata.max.bytes"),
    )
