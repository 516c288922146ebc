"""The view of the metadata that the active controller's rules use: which brokers are live, and the
changes that the rules may make.

For each decision a new View is made from the metadata core's newest state, which may be uncommitted.
`gone`: brokers that this decision fences or removes, although the metadata still has them as
unfenced.
"""

from collections.abc import Callable, Iterator

from mqd.cluster.metadata.records import PartitionChange, PartitionsChanged, PartitionState, Record, TopicState
from mqd.cluster.metadata.rules.partitions import Target, compose_change, configured_min_in_sync
from mqd.cluster.metadata.rules.redirects import would_break_colocation
from mqd.cluster.metadata.state import MetadataState

# whether the node is alive but cannot serve its replica, because its disk failed
CannotServe = Callable[[TopicState, PartitionState, int], bool]


def assume_served(topic: TopicState, partition: PartitionState, node: int) -> bool:
    """The default CannotServe: every replica can be served."""
    return False


class View:
    def __init__(
        self,
        state: MetadataState,
        gone: frozenset[int] = frozenset(),
        unfencing: frozenset[int] = frozenset(),
        cannot_serve: CannotServe = assume_served,
    ) -> None:
        """`unfencing`: brokers that this decision unfences."""
        self.state, self.cannot_serve = state, cannot_serve
        brokers = state.brokers.values()
        self._unfenced = {
            broker.node_id
            for broker in brokers
            if (not broker.fenced or broker.node_id in unfencing) and broker.node_id not in gone
        }
        self._may_lead = {node for node in self._unfenced if not state.brokers[node].in_controlled_shutdown}
        self._shutting_down = self._unfenced - self._may_lead
        self._all_brokers_config = state.broker_configs.get("", {})

    def is_unfenced(self, node: int) -> bool:
        return node in self._unfenced

    def may_lead(self, node: int) -> bool:
        """Whether the node is unfenced and not shutting down."""
        return node in self._may_lead

    def may_take_over(self, topic: TopicState, partition: PartitionState, node: int) -> bool:
        """Whether the node may lead the partition and can serve its replica."""
        return node in self._may_lead and not self.cannot_serve(topic, partition, node)

    def placement_nodes(self) -> list[int]:
        """The nodes on which new replicas may be placed."""
        brokers = self.state.brokers
        return sorted(node for node in self._may_lead if not brokers[node].draining)

    def configured_min(self, topic: TopicState) -> int:
        return configured_min_in_sync(topic.config, self._all_brokers_config)

    def partition(self, topic_id: bytes, index: int) -> tuple[TopicState, PartitionState] | None:
        name = self.state.topics_by_id.get(topic_id)
        if name is None:
            return None
        topic = self.state.topics[name]
        return (topic, topic.partitions[index]) if 0 <= index < len(topic.partitions) else None

    def change_to(self, topic: TopicState, target: Target, leaving: int = -1) -> PartitionChange | None:
        """Returns the change that leads to `target`. The leader stays while it is unfenced, even if it is
        shutting down, unless it is `leaving`. A replica on a broker that is shutting down is elected
        only if no other replica may lead. A replica that cannot be served is never elected.
        """
        leader = target.old.leader
        leaving = -1 if target.keeps_leader else leaving
        target.keeps_reassignment = would_break_colocation(topic, target)

        def can_serve(node: int) -> bool:
            return node == leader or not self.cannot_serve(topic, target.old, node)

        def may_be_elected(node: int) -> bool:
            return (
                node != leaving
                and (node in self._may_lead or (node == leader and node in self._unfenced))
                and can_serve(node)
            )

        change = compose_change(target, self.configured_min(topic), may_be_elected)
        new_leader = leader if change is None or change.leader is None else change.leader
        if new_leader < 0 and self._shutting_down:
            return compose_change(
                target,
                self.configured_min(topic),
                lambda node: node != leaving and node in self._unfenced and can_serve(node),
            )
        return change

    def changes(self, targets: Iterator[tuple[TopicState, Target]], leaving: int = -1) -> list[Record]:
        """Returns the changes that lead to the targets: one record per topic."""
        by_topic: dict[bytes, list[PartitionChange]] = {}
        for topic, target in targets:
            change = self.change_to(topic, target, leaving)
            if change is not None:
                by_topic.setdefault(topic.topic_id, []).append(change)
        return [PartitionsChanged(topic_id, tuple(changes)) for topic_id, changes in by_topic.items()]
