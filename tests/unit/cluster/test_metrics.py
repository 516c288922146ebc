"""Cluster health as metrics of one host."""

import msgspec

from mqd.acceptor.metadata import Metadata
from mqd.acceptor.metrics import cluster as cluster_metrics
from mqd.cluster.host.messages import BrokerImage, Image, PartitionImage, PartitionsPut, TopicImage


def metadata(*partitions: PartitionImage, brokers: int = 3, config: dict[str, str] | None = None) -> Metadata:
    found = Metadata()
    found.brokers = {node: BrokerImage(node, "h", 1, None, 1) for node in range(1, brokers + 1)}
    found.topics = {
        "t": TopicImage(
            "t",
            b"t" * 16,
            [msgspec.structs.replace(one, index=index) for index, one in enumerate(partitions)],
            config or {},
        )
    }
    return found


def partition(
    leader: int, in_sync: list[int], replicas: tuple[int, ...] = (1, 2, 3), adding: tuple[int, ...] = ()
) -> PartitionImage:
    return PartitionImage(0, -1, -1, 0, leader, 0, list(replicas), in_sync, adding=list(adding))


def test_each_host_counts_partitions_it_leads_and_leaderless_ones() -> None:
    seen = metadata(
        partition(1, [1, 2, 3]), partition(1, [1, 2]), partition(1, [1]), partition(2, [2]), partition(-1, [])
    )
    assert cluster_metrics.partition_counts(seen, 1) == (1, 2, 1)
    assert cluster_metrics.partition_counts(seen, 2) == (1, 1, 1)
    assert cluster_metrics.partition_counts(seen, 3) == (1, 0, 0)


def test_min_in_sync_is_the_configured_one_and_added_replicas_are_not_missing() -> None:
    assert cluster_metrics.partition_counts(metadata(partition(1, [1]), config={"min.insync.replicas": "1"}), 1) == (
        0,
        1,
        0,
    )
    assert cluster_metrics.partition_counts(metadata(partition(1, [1, 2], (1, 2, 3), (3,))), 1) == (0, 0, 0)


def test_a_single_host_lacks_nothing() -> None:
    assert cluster_metrics.partition_counts(metadata(partition(-1, []), brokers=1), 1) == (0, 0, 0)


def test_brokers_are_counted_by_state() -> None:
    seen = metadata(partition(1, [1, 2, 3]))
    seen.brokers[2] = msgspec.structs.replace(seen.brokers[2], fenced=True)
    seen.controller_id = 3
    families = {one.name: one for one in cluster_metrics.collect(seen, 3)}
    assert {sample.labels["state"]: sample.value for sample in families["mqd_cluster_brokers"].samples} == {
        "in_service": 2,
        "fenced": 1,
        "draining": 0,
    }
    assert families["mqd_cluster_active_controller"].samples[0].value == 1


def test_elections_are_counted() -> None:
    """A change of the in-sync set is not an election, nor is a new partition; an unclean one counts
    twice.
    """

    def state(index: int, leader: int, epoch: int, recovering: bool = False) -> PartitionImage:
        return PartitionImage(index, -1, -1, 0, leader, epoch, [1, 2], [1], recovering=recovering)

    found = Metadata()
    topic = TopicImage("t", b"t" * 16, [state(0, 1, 0), state(1, 2, 0)], {})
    found.apply(Image(1, "cluster", 1, [BrokerImage(1, "h", 1, None, 1)], [topic], {}))
    found.apply(PartitionsPut(2, topic.topic_id, [state(0, 1, 0)]))
    assert (found.election_count, found.unclean_election_count) == (0, 0)
    found.apply(PartitionsPut(3, topic.topic_id, [state(0, 2, 1), state(1, -1, 1)]))
    assert (found.election_count, found.unclean_election_count) == (1, 0)
    found.apply(PartitionsPut(4, topic.topic_id, [state(1, 1, 2, recovering=True)]))
    found.apply(PartitionsPut(5, topic.topic_id, [state(1, 1, 2)]))
    assert (found.election_count, found.unclean_election_count) == (2, 1)
    shown = {one.name: one.samples[0].value for one in cluster_metrics.collect(found, 1) if "elections" in one.name}
    assert shown == {"mqd_leader_elections": 2, "mqd_unclean_leader_elections": 1}
