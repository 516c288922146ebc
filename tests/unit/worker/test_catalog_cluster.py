"""A worker's reactions to messages of the controller, on one host among several: assignments of
replicas, removed replicas, brokers.
"""

import msgspec

from mqd.cluster.host.images import owner_of
from mqd.cluster.host.messages import (
    BrokerConfigPut,
    BrokerImage,
    BrokersPut,
    Image,
    MessageList,
    PartitionImage,
    PartitionsPut,
    TopicImage,
    TopicPut,
    TopicRemoved,
)
from mqd.worker.assignments import Member
from mqd.worker.catalog import Catalog, Changes

NODE, INCARNATION = 2, 70
TOPIC = b"t" * 16


def broker(node: int, epoch: int = 5, **fields) -> BrokerImage:
    return BrokerImage(
        node, "h", 9000 + node, None, epoch, worker_count=3, incarnation=INCARNATION if node == NODE else 1, **fields
    )


BROKERS = [broker(1), broker(2), broker(3)]


def partition(
    index: int = 0,
    slot: int = 5,
    replicas: tuple[int, ...] = (1, 2, 3),
    in_sync: tuple[int, ...] | None = None,
    leader: int = 1,
    epoch: int = 0,
    owner: int = 0,
    **fields,
):
    return PartitionImage(
        index,
        slot,
        owner if slot >= 0 else 65535,
        0,
        leader,
        epoch,
        list(replicas),
        list(replicas if in_sync is None else in_sync),
        **fields,
    )


def topic(*partitions: PartitionImage, count: int | None = None, **config: str) -> TopicImage:
    return TopicImage(
        "t",
        TOPIC,
        list(partitions),
        {key.replace("_", "."): value for key, value in config.items()},
        partition_count=len(partitions) if count is None else count,
    )


def image(*topics: TopicImage, brokers: list[BrokerImage] | None = None) -> Image:
    return Image(1, "cluster", 1, BROKERS if brokers is None else brokers, list(topics), {}, node_id=NODE)


def catalog(*topics: TopicImage, brokers: list[BrokerImage] | None = None) -> tuple[Catalog, Changes]:
    made = Catalog(0, {}, INCARNATION)
    return made, made.on_image(image(*topics, brokers=brokers))


def test_an_opened_replica_gets_its_assignment() -> None:
    _, changes = catalog(topic(partition(in_sync=(1, 3), partition_epoch=4), min_insync_replicas="2"))
    assert [owned.slot for owned in changes.open] == [5] and changes.open[0].gets_assignments
    ((owned, reported),) = changes.assign
    assert owned == changes.open[0]
    assert (
        reported.node_id,
        reported.broker_epoch,
        reported.leader,
        reported.leader_epoch,
        reported.partition_epoch,
        reported.min_insync,
    ) == (2, 5, 1, 0, 4, 2)
    assert reported.members == (Member(1, True, True, 5), Member(2, False, True, 5), Member(3, True, True, 5))
    assert reported.leader_worker == owner_of(TOPIC, 0, 3) and reported.flush_on_ack and reported.lag_ms_max > 0
    assert [one.node_id for one in changes.brokers] == [1, 2, 3]


def test_a_single_replica_has_no_assignment_until_others_are_added() -> None:
    made, changes = catalog(topic(partition(replicas=(2,), leader=2)))
    assert changes.assign == [] and not changes.open[0].gets_assignments
    changes = made.on_message(TopicPut(2, topic(partition(replicas=(2,), leader=2, epoch=1))))
    assert [owned.leader_epoch for owned in changes.set_epoch] == [1] and changes.assign == []
    changes = made.on_message(
        PartitionsPut(
            3, TOPIC, [partition(replicas=(2, 3), in_sync=(2,), leader=2, epoch=1, partition_epoch=2, adding=[3])]
        )
    )
    ((owned, reported),) = changes.assign
    assert owned.gets_assignments and reported.min_insync == 1, "records are taken while the second replica comes"
    assert changes.open == changes.close == changes.set_epoch == []
    changes = made.on_message(PartitionsPut(4, TOPIC, [partition(replicas=(2,), leader=2, epoch=2, partition_epoch=3)]))
    assert [reported.leader_epoch for _, reported in changes.assign] == [2], "once it had one, it gets them"


def test_only_what_changed_is_assigned_again() -> None:
    made, _ = catalog(topic(partition(0, 5), partition(1, 6)))
    assert made.on_image(image(topic(partition(0, 5), partition(1, 6)))).assign == []
    changes = made.on_message(PartitionsPut(2, TOPIC, [partition(1, 6, leader=2, epoch=1, partition_epoch=1)]))
    assert [(owned.index, reported.leader) for owned, reported in changes.assign] == [(1, 2)]
    assert [put.name for put in changes.put_topics] == ["t"], "clients learn the leader from the reactor"
    changes = made.on_message(
        PartitionsPut(3, TOPIC, [partition(1, 6, leader=2, epoch=1, in_sync=(2,), partition_epoch=2)])
    )
    assert [owned.index for owned, _ in changes.assign] == [1] and changes.put_topics == []


def test_changed_lag_bounds_are_assigned_to_leaders_and_followers() -> None:
    def topics(**config: str) -> TopicImage:
        return topic(partition(0, 5, leader=NODE), partition(1, 6), **config)

    made, changes = catalog(topics())
    assert [(reported.leader, reported.lag_records_max) for _, reported in changes.assign] == [(NODE, -1), (1, -1)]
    changes = made.on_message(TopicPut(2, topics(replica_lag_max_messages="100")))
    assert [(reported.leader, reported.lag_records_max) for _, reported in changes.assign] == [(NODE, 100), (1, 100)]
    changes = made.on_message(TopicPut(3, topics()))
    assert [(reported.leader, reported.lag_records_max) for _, reported in changes.assign] == [(NODE, -1), (1, -1)]
    changes = made.on_message(BrokerConfigPut(4, {"replica.lag.time.max.ms": "700"}))
    assert [reported.lag_ms_max for _, reported in changes.assign] == [700, 700]


def test_eligibility_follows_the_brokers_state() -> None:
    made, _ = catalog(topic(partition()))
    changes = made.on_message(BrokersPut(2, [broker(1), broker(2), broker(3, fenced=True)]))
    ((_, reported),) = changes.assign
    assert [member.eligible for member in reported.members] == [True, True, False]
    assert [one.node_id for one in changes.brokers] == [1, 2], "clients are not sent to a fenced one"
    changes = made.on_message(BrokersPut(3, [broker(1), broker(2), broker(3, epoch=9, in_controlled_shutdown=True)]))
    assert [(member.eligible, member.broker_epoch) for member in changes.assign[0][1].members] == [
        (True, 5),
        (True, 5),
        (False, 9),
    ]
    changes = made.on_message(BrokersPut(4, [broker(1), broker(2)]))
    assert [(member.eligible, member.broker_epoch) for member in changes.assign[0][1].members][2] == (False, -1)


def test_files_are_deleted_only_when_the_replica_was_removed() -> None:
    made, _ = catalog(topic(partition(0, 5), partition(1, 6), partition(2, 7), partition(3, 8)))
    left = partition(0, -1, replicas=(1, 3))
    offline = msgspec.structs.replace(partition(1, 6), owner=65535)
    changes = made.on_message(PartitionsPut(2, TOPIC, [left, offline]))
    assert [owned.index for owned in changes.delete] == [0] and [owned.index for owned in changes.close] == [1]
    changes = made.on_message(TopicPut(3, topic(left, offline, partition(2, 7), count=3)))
    assert [owned.index for owned in changes.delete] == [3], "partition 3 has vanished"
    changes = made.on_message(TopicPut(4, topic(left, offline, count=3)))
    assert changes.delete == [] and [owned.index for owned in changes.close] == [2], "it is only not reported"


def test_outdated_metadata_delete_nothing() -> None:
    """A replica that was removed and added again while this host was down must not be deleted by
    older metadata.
    """
    before = [broker(1), msgspec.structs.replace(broker(2), incarnation=INCARNATION - 1), broker(3)]
    made, _ = catalog(topic(partition()), brokers=before)
    assert not made.has_caught_up
    changes = made.on_message(PartitionsPut(2, TOPIC, [partition(slot=-1, replicas=(1, 3))]))
    assert changes.delete == [] and [owned.index for owned in changes.close] == [0]
    assert not made.is_left_behind(TOPIC, 0)
    made.on_message(BrokersPut(3, BROKERS))
    assert made.has_caught_up and made.is_left_behind(TOPIC, 0) and not made.is_left_behind(b"u" * 16, 0)
    changes = made.on_message(PartitionsPut(4, TOPIC, [partition(slot=9)]))
    assert [owned.slot for owned in changes.open] == [9] and not made.is_left_behind(TOPIC, 0)


def test_several_messages_are_one_change() -> None:
    made, _ = catalog(topic(partition()))
    other = TopicImage("u", b"u" * 16, [partition(0, 6)], {}, partition_count=1)
    parts = [BrokersPut(2, [broker(2), broker(3)]), TopicRemoved(2, "t", TOPIC, [5]), TopicPut(2, other)]
    changes = made.apply_updates(MessageList(2, parts).parts)
    assert [owned.slot for owned in changes.delete] == [5] and [owned.slot for owned in changes.open] == [6]
    assert [gone.name for gone in changes.forget_topics] == ["t"] and len(changes.brokers) == 2
    assert [owned.topic for owned, _ in changes.assign] == ["u"]


def test_a_partition_that_failed_to_open_is_assigned_once_it_opens() -> None:
    made, changes = catalog(topic(partition()))
    made.record_failure(changes.open[0].key, is_transient=True)
    assert made.on_message(PartitionsPut(2, TOPIC, [partition(epoch=1)])).assign == []
    changes = made.retry()
    assert [owned.slot for owned in changes.open] == [5] and [
        reported.leader_epoch for _, reported in changes.assign
    ] == [1]
