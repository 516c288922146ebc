"""The checks after each step of the small cluster of controller_world.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mqd.cluster.metadata.records import BrokerRegistered, PartitionsChanged

if TYPE_CHECKING:
    from tests.unit.controller.controller_world import World


class Checks:
    """Mixed into World."""

    def check_epochs(self: World, before, brokers, records) -> None:
        for record in records:
            if isinstance(record, BrokerRegistered):
                old = brokers.get(record.broker.node_id)
                assert old is None or record.broker.epoch >= old.epoch, "I6"
                if (old is None or record.broker.epoch > old.epoch) and self.clean[
                    (record.broker.node_id, record.broker.incarnation)
                ] != (old.epoch if old is not None else None):
                    self.forget(
                        record.broker.node_id, wiped=old is not None and old.directory_id != record.broker.directory_id
                    )
            if (
                isinstance(record, PartitionsChanged)
                and record.topic_id in before
                and record.topic_id in self.unlogged.topics_by_id
            ):
                new = self.unlogged.topics[self.unlogged.topics_by_id[record.topic_id]]
                for change in record.changes:
                    old_partition, partition = (
                        before[record.topic_id].partitions[change.index],
                        new.partitions[change.index],
                    )
                    assert partition.leader_epoch >= old_partition.leader_epoch, "I6"
                    assert (
                        partition.leader == old_partition.leader or partition.leader_epoch > old_partition.leader_epoch
                    ), "I6: another leader in the same epoch"
                    touching = sum(
                        1
                        for other in records
                        if isinstance(other, PartitionsChanged) and other.topic_id == record.topic_id
                        for entry in other.changes
                        if entry.index == change.index
                    )
                    assert partition.partition_epoch == old_partition.partition_epoch + touching, "I6"
                    for node in partition.in_sync_replicas:
                        if (
                            node not in old_partition.in_sync_replicas
                            and node not in old_partition.eligible_leader_replicas
                        ):
                            # its leader has added it to the in-sync set again
                            self.forgotten.discard((record.topic_id, change.index, node))

    def forget(self: World, node: int, wiped: bool) -> None:
        for topic in self.unlogged.topics.values():
            for partition in topic.partitions:
                if partition.replicas == (node,) and not wiped:
                    self.lost.add((topic.topic_id, partition.index))  # an only replica is trusted whatever its log has
                elif node in partition.replicas:
                    self.forgotten.add((topic.topic_id, partition.index, node))

    def check(self: World) -> None:
        state = self.unlogged
        for topic in state.topics.values():
            for partition in topic.partitions:
                key = (topic.topic_id, partition.index)
                members = partition.in_sync_replicas + partition.eligible_leader_replicas
                for node in members:
                    assert (*key, node) not in self.forgotten, (
                        f"P8: {topic.name}-{partition.index}: broker {node} may have forgotten"
                    )
                if key in self.lost:
                    continue
                if not members:
                    assert len(partition.last_known_eligible) >= 1, f"P10: {partition}"
                true = self.true_high_watermark.get(key, [])
                for node in members:
                    host = self.hosts[node]
                    registered = state.brokers.get(node)
                    if host.up and host.broker.broker_epoch != (registered.epoch if registered is not None else None):
                        continue  # restarted, and not registered yet
                    if not host.up and registered is not None and host.clean_epoch != registered.epoch:
                        continue
                    if node in partition.replicas and key in host.logs:
                        assert host.logs[key][: len(true)] == true, (
                            f"P2: {topic.name}-{partition.index}: broker {node} has {host.logs[key]}, below the high"
                            f" watermark is {true}; {partition}"
                        )
        for host, key in self.leading():
            true = self.true_high_watermark.get(key, [])
            leader = host.leaders[key]
            topic, partition = self.partition_of(state_host(self), key)
            if (
                key not in self.lost
                and partition is not None
                and partition.leader == host.node
                and partition.leader_epoch == leader.epoch
            ):
                assert host.logs[key][: len(true)] == true, (
                    f"P6: leader {host.node} of {key[1]} lacks what was below a high watermark"
                )


class state_host:  # noqa: N801  what partition_of() asks of a host, over everything that is committed
    def __init__(self, world: World) -> None:
        self.core = self
        self.committed = world.unlogged
