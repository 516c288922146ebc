"""A broker's lifecycle as records: registration, fencing, unfencing, controlled shutdown,
unregistration (rules R8, R9, R10, R15).

Pure functions of a View; Refusal carries Kafka's error code. The returned records go into one
batch, so that a broker is never fenced while it still leads (P7).

R9 in short: a node id has one session at a time. A new incarnation with the same metadata directory
proves that the old one is dead (a live keeper locks the directory), so the old one is fenced and
replaced in one batch. A new incarnation with another directory must wait until the old one is fenced.
After an unclean start the broker is removed from the eligible replicas of its partitions, because it
may have lost records. Partitions that acknowledge only flushed records (flush.on.ack) are an
exception: they lose acknowledged records only if the disk is lost. Without the exception a power cut of all
hosts would leave no eligible leader.
"""

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from mqd.cluster.broker.messages import RegisterBroker
from mqd.cluster.metadata.features import describe_unsupported
from mqd.cluster.metadata.records import (
    BrokerChanged,
    BrokerRegistered,
    BrokerState,
    BrokerUnregistered,
    PartitionChange,
    PartitionsChanged,
    PartitionState,
    Record,
    TopicState,
)
from mqd.cluster.metadata.refusal import Refusal
from mqd.cluster.metadata.rules.partitions import Target, effective_min_in_sync, without
from mqd.cluster.metadata.rules.placement import Directory, choose_directory
from mqd.cluster.metadata.state import INTERNAL_TOPICS, MetadataState
from mqd.cluster.metadata.view import CannotServe, View, assume_served
from mqd.protocol.errors import ErrorCode

FLUSH_ON_ACK = "flush.on.ack"

# -- leaving ---------------------------------------------------------------------------------------


def _acknowledged_only_flushed(state: MetadataState, topic: TopicState, node: int) -> bool:
    """Whether the broker, under its previous registration, acknowledged only flushed records of
    this topic. (The same rule as mqd.worker.assignments.settings_of.)
    """
    if topic.name in INTERNAL_TOPICS:
        return True
    value = topic.config.get(FLUSH_ON_ACK) or state.broker_config(node).get("log." + FLUSH_ON_ACK)
    broker = state.brokers.get(node)
    return value == "true" if value else broker is not None and broker.flush_on_ack


def _targets_without(
    state: MetadataState,
    nodes: frozenset[int],
    lossy_node: int = -1,
    keeps_disk: bool = False,
    node: int = -1,
    emptied_directories: frozenset[str] = frozenset(),
) -> Iterator[tuple[TopicState, Target]]:
    """Yields a target for each partition that changes when `nodes` leave the in-sync sets.
    `lossy_node`: a broker that has lost the records that it had not flushed and, unless `keeps_disk`,
    its disks. `emptied_directories`: directories of `node` that were emptied.
    """
    for topic in state.topics.values():
        lossy_in_topic = (
            frozenset((lossy_node,))
            if lossy_node >= 0 and not (keeps_disk and _acknowledged_only_flushed(state, topic, lossy_node))
            else frozenset()
        )
        for partition in topic.partitions:
            is_emptied = (
                bool(emptied_directories)
                and len(partition.replicas) > 1
                and any(
                    replica == node and directory_id in emptied_directories
                    for replica, directory_id in zip(partition.replicas, partition.directories)
                )
            )
            replicas_with_losses = frozenset((node,)) if is_emptied else lossy_in_topic
            if not nodes.isdisjoint(partition.in_sync_replicas) or (
                replicas_with_losses and not replicas_with_losses.isdisjoint(partition.eligible_leader_replicas)
            ):
                target = Target(partition)
                target.in_sync = without(partition.in_sync_replicas, nodes)
                # the broker has the only copy, so no other replica can have more records
                is_only_copy = keeps_disk and partition.replicas == (lossy_node,)
                target.replicas_with_losses = frozenset() if is_only_copy else replicas_with_losses
                yield topic, target


def fence(state: MetadataState, nodes: Iterable[int], cannot_serve: CannotServe = assume_served) -> list[Record]:
    """Fences these brokers together: removes them from all in-sync sets and elects other leaders for
    their partitions (R8).
    """
    unfenced = [node for node in nodes if node in state.brokers and not state.brokers[node].fenced]
    if not unfenced:
        return []
    gone = frozenset(unfenced)
    view = View(state, gone=gone, cannot_serve=cannot_serve)
    records: list[Record] = [
        BrokerChanged(node, state.brokers[node].epoch, fenced=True, in_controlled_shutdown=False)
        for node in sorted(gone)
    ]
    return records + view.changes(_targets_without(state, gone))


# -- joining ---------------------------------------------------------------------------------------


def register(state: MetadataState, message: RegisterBroker, cannot_serve: CannotServe = assume_served) -> list[Record]:
    """Registers a broker; returns no records if it is already registered. The broker's epoch is the
    offset of its BrokerRegistered record, which is always the first record. Raises Refusal.
    """
    old = state.brokers.get(message.node_id)
    _check_features(state, message)
    same_directory = old is not None and old.directory_id in ("", message.directory_id)
    if old is not None and same_directory and old.incarnation == message.incarnation:
        renewed = _make_broker(message, old.epoch, old)
        return [] if renewed == old else [BrokerRegistered(renewed)]
    if old is not None and same_directory and old.incarnation > message.incarnation:
        raise Refusal(
            ErrorCode.DUPLICATE_BROKER_REGISTRATION, f"A newer incarnation of broker {message.node_id} is registered."
        )
    if old is not None and not same_directory and not old.fenced:
        raise Refusal(
            ErrorCode.DUPLICATE_BROKER_REGISTRATION,
            f"Another broker with node.id {message.node_id} is registered and alive; give this host another node.id.",
        )
    view = View(state, gone=frozenset((message.node_id,)), cannot_serve=cannot_serve)
    new = _make_broker(message, state.version, old)
    is_clean = old is not None and same_directory and message.clean_epoch == old.epoch
    lossy_node, emptied_directories = _find_losses(message, is_clean)
    changes = view.changes(
        _targets_without(
            state, frozenset((message.node_id,)), lossy_node, same_directory, message.node_id, emptied_directories
        )
    )
    if old is not None and not same_directory:
        changes += _place_on_new_disks(state, message)
    return [BrokerRegistered(msgspec.structs.replace(new, fenced=True, in_controlled_shutdown=False)), *changes]


def _find_losses(message: RegisterBroker, is_clean: bool) -> tuple[int, frozenset[str]]:
    """R9: returns (the broker's node id, or -1 if its logs cannot have lost records; the ids of its emptied
    directories).
    """
    emptied_directories = frozenset(entry.directory_id for entry in message.directories if entry.fresh)
    return -1 if is_clean else message.node_id, emptied_directories


def _make_broker(message: RegisterBroker, epoch: int, old: BrokerState | None) -> BrokerState:
    same_directory = old is not None and old.directory_id in ("", message.directory_id)
    paths = dict(old.directories) if old is not None and same_directory else {}
    paths.update({entry.directory_id: entry.path for entry in message.directories if entry.directory_id})
    return BrokerState(
        node_id=message.node_id,
        host=message.host,
        port=message.port,
        rack=message.rack,
        epoch=epoch,
        incarnation=message.incarnation,
        directories=paths,
        fenced=old.fenced if old is not None else True,
        in_controlled_shutdown=old.in_controlled_shutdown if old is not None else False,
        draining=old.draining if old is not None else False,
        inter_broker_host=message.inter_broker_host,
        inter_broker_port=message.inter_broker_port,
        controller_host=message.controller_host,
        controller_port=message.controller_port,
        worker_count=message.worker_count,
        directory_id=message.directory_id,
        flush_on_ack=message.flush_on_ack,
        endpoints={name: (host, port) for name, (host, port) in message.endpoints.items()},
        features={name: (first, last) for name, (first, last) in message.features.items()},
    )


def _check_features(state: MetadataState, message: RegisterBroker) -> None:
    unsupported_text = describe_unsupported(state.features, message.features)
    if message.features and unsupported_text:
        raise Refusal(
            ErrorCode.UNSUPPORTED_VERSION,
            f"Node {message.node_id} runs a version of mqd that this cluster no longer supports: {unsupported_text}."
            " Install the version that the other hosts run.",
        )


def _place_on_new_disks(state: MetadataState, message: RegisterBroker) -> list[Record]:
    """The host has lost its disks: places its replicas, which start empty, in its current directories."""
    reported = [
        Directory(entry.directory_id, entry.path, entry.free_bytes, entry.usable)
        for entry in message.directories
        if entry.directory_id
    ]
    counts = {entry.directory_id: 0 for entry in reported if entry.usable}
    if not counts:
        return []
    records: list[Record] = []
    for topic in state.topics.values():
        changes = []
        for partition in topic.partitions:
            if message.node_id not in partition.replicas:
                continue
            position = partition.replicas.index(message.node_id)
            if partition.directories[position] in counts:
                continue
            chosen = choose_directory(reported, counts)
            assert chosen is not None
            counts[chosen] += 1
            directories = (*partition.directories[:position], chosen, *partition.directories[position + 1 :])
            changes.append(PartitionChange(partition.index, directories=directories, replicas=partition.replicas))
        if changes:
            records.append(PartitionsChanged(topic.topic_id, tuple(changes)))
    return records


def has_applied_registration(metadata_version: int, broker_epoch: int) -> bool:
    """R10: whether a broker at this metadata version has applied its registration."""
    return metadata_version > broker_epoch


def unfence(state: MetadataState, node: int, cannot_serve: CannotServe = assume_served) -> list[Record]:
    """Unfences a broker that has applied its registration, and elects leaders for those of its partitions
    that have none.
    """
    broker = state.brokers[node]
    view = View(state, unfencing=frozenset((node,)), cannot_serve=cannot_serve)
    targets = (
        (topic, Target(partition))
        for topic in state.topics.values()
        for partition in topic.partitions
        if partition.leader < 0 and node in partition.replicas
    )
    return [BrokerChanged(node, broker.epoch, fenced=False), *view.changes(targets)]


def on_replicas_failed(
    state: MetadataState, node: int, partitions: Iterable[tuple[bytes, int]], cannot_serve: CannotServe = assume_served
) -> list[Record]:
    """Handles partitions that a live broker cannot serve. If another replica may lead, it takes over.
    Otherwise the broker stays in sync, because its copy is the only one, but the partition has no
    leader until elections.restore_leaders finds that it can be served again.
    """
    view = View(state, cannot_serve=cannot_serve)

    def targets() -> Iterator[tuple[TopicState, Target]]:
        for topic_id, index in dict.fromkeys(partitions):
            topic_and_partition = view.partition(topic_id, index)
            if topic_and_partition is None:
                continue
            topic, partition = topic_and_partition
            if node not in partition.in_sync_replicas:
                continue
            target = Target(partition)
            others = without(partition.in_sync_replicas, (node,)) or partition.eligible_leader_replicas
            if any(view.may_take_over(topic, partition, other) for other in others if other != node):
                target.in_sync = without(partition.in_sync_replicas, (node,))
                target.replicas_with_losses = (
                    frozenset() if _acknowledged_only_flushed(state, topic, node) else frozenset((node,))
                )
            elif partition.leader != node or len(state.brokers) == 1:
                # a single host without a quorum is skipped: it serves the partition again as soon as it can
                continue
            yield topic, target

    return view.changes(targets(), leaving=node)


def on_replicas_full(
    state: MetadataState, node: int, partitions: Iterable[tuple[bytes, int]], cannot_serve: CannotServe = assume_served
) -> list[Record]:
    """Handles partitions whose replicas the broker cannot write now, because its disk is full. The
    broker leaves an in-sync set if enough other replicas are in sync. Otherwise it stays: leaving would
    not help, because acks=all would still be refused. It has lost no records: once there is space
    it fetches and rejoins. It cannot rejoin earlier, because in a new leader epoch a follower's
    offset is known only from its fetch.
    """
    view = View(state, cannot_serve=cannot_serve)

    def targets() -> Iterator[tuple[TopicState, Target]]:
        for topic_id, index in dict.fromkeys(partitions):
            topic_and_partition = view.partition(topic_id, index)
            if topic_and_partition is None:
                continue
            topic, partition = topic_and_partition
            if node not in partition.in_sync_replicas:
                continue
            others = without(partition.in_sync_replicas, (node,))
            if len(others) >= state.min_in_sync(topic, partition) and any(
                view.may_take_over(topic, partition, other) for other in others
            ):
                target = Target(partition)
                target.in_sync, target.raises_leader_epoch = others, True
                yield topic, target

    return view.changes(targets(), leaving=node)


# -- controlled shutdown ---------------------------------------------------------------------------


def begin_shutdown(state: MetadataState, node: int) -> list[Record]:
    return [BrokerChanged(node, state.brokers[node].epoch, in_controlled_shutdown=True)]


def _would_refuse_acks_all(
    topic: TopicState, partition: PartitionState, view: View, recently_alive: frozenset[int]
) -> bool:
    """Whether acks=all would be refused without this broker, while another replica may soon be in sync."""
    minimum = effective_min_in_sync(view.configured_min(topic), len(partition.replicas), len(partition.adding_replicas))
    return len(partition.in_sync_replicas) == minimum and any(
        other in recently_alive for other in partition.replicas if other not in partition.in_sync_replicas
    )


def move_away(
    state: MetadataState,
    node: int,
    moves_max: int,
    recently_alive: frozenset[int] = frozenset(),
    cannot_serve: CannotServe = assume_served,
) -> tuple[list[Record], bool]:
    """Returns (changes to at most `moves_max` partitions, whether no more are needed). The broker
    gives up its leaderships and leaves the in-sync sets, so that no leader waits for it when it
    ends. Partitions that no other replica can lead stay as they are. A partition with just enough
    replicas in sync must wait while another of its replicas is on a broker in `recently_alive`
    (brokers that have sent a heartbeat recently), because that replica may soon be in sync.
    """
    view = View(state, cannot_serve=cannot_serve)
    targets: list[tuple[TopicState, Target]] = []
    done = True
    for topic in state.topics.values():
        for partition in topic.partitions:
            if node not in partition.in_sync_replicas or not any(
                other != node and view.may_take_over(topic, partition, other) for other in partition.in_sync_replicas
            ):
                continue
            if _would_refuse_acks_all(topic, partition, view, recently_alive) or len(targets) == moves_max:
                done = False
                continue
            target = Target(partition)
            target.in_sync = without(partition.in_sync_replicas, (node,))
            targets.append((topic, target))
    return view.changes(iter(targets), leaving=node), done


# -- permanent removal -----------------------------------------------------------------------------


def unregister(state: MetadataState, node: int) -> list[Record]:
    broker = state.brokers.get(node)
    if broker is None:
        raise Refusal(ErrorCode.BROKER_ID_NOT_REGISTERED, f"Broker ID {node} is not currently registered.")
    if not broker.fenced:
        raise Refusal(ErrorCode.POLICY_VIOLATION, f"Broker {node} is alive; shut it down before you unregister it.")
    replica_count = replica_counts_by_node(state).get(node, 0)
    if replica_count:
        raise Refusal(
            ErrorCode.POLICY_VIOLATION,
            f"Broker {node} still has {replica_count} replica(s) according to the metadata: drain it (mqd cluster drain"
            f" {node}), or wait until they are replicated elsewhere, or reassign them.",
        )
    return [BrokerUnregistered(node)]


def replica_counts_by_node(state: MetadataState) -> Mapping[int, int]:
    counts: dict[int, int] = {}
    for (node, _), count in state.directory_replica_counts.items():
        counts[node] = counts.get(node, 0) + count
    return counts
