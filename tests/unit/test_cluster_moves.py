"""Reassignments while hosts are lost: no move lets go of the last who has acknowledged records, and none waits for a host that cannot take it, by single traces of the rules."""

import pytest
from test_cluster_replicas import NONE, begin, cancel, elect, in_sync, move
from test_cluster_rules import cluster, do, topic

from mqd.cluster import broker_rules, election_rules, reassign_rules
from mqd.cluster.broker_messages import DirectoryReport, RegisterBroker
from mqd.cluster.cluster_view import View
from mqd.cluster.metadata_records import PartitionsChanged, PartitionState
from mqd.cluster.metadata_state import MetadataState
from mqd.cluster.refusal import Refusal
from mqd.protocol.errors import ErrorCode as E


def returned(state: MetadataState, node: int, clean: bool = False, anew: str = "") -> PartitionState:
    """The host's next start: `anew`, with other disks; or on the same, and not `clean` is a start after which memory may be gone."""
    old = state.brokers[node]
    clean_epoch = old.epoch if clean else -1
    directories = [DirectoryReport(f"{anew or 'd'}{node}", "/d", 1, True)]
    message = RegisterBroker(node, anew + old.directory_id, old.incarnation + 1, "h", 1, None, "", 0, "", 0, 1, directories, clean_epoch, dict(old.features))
    do(state, broker_rules.register(state, message, NONE))
    return do(state, broker_rules.unfence(state, node, NONE))


def in_sync_by(state: MetadataState, *members: int) -> PartitionState:
    """As its leader would have it, in whichever session the members are."""
    entry = state.topics["t"]
    target = reassign_rules.Target(entry.partitions[0])
    target.in_sync = tuple(node for node in entry.partitions[0].replicas if node in members)
    change = View(state).settled(entry, target)
    return do(state, [PartitionsChanged(entry.topic_id, (change,))])


def only_the_added_one_is_left(config: dict[str, str], clean: bool = True) -> MetadataState:
    """{1, 2} is moved to {3, 4}; 3 has caught up, when 1 and 2 are lost and come back without what they had, and 3 restarts."""
    state = topic(cluster(5), replicas=(1, 2), config=config)
    move(state, 3, 4)
    assert in_sync(state, 1, 2, 3).adding_replicas == (3, 4)
    for node in (1, 2):
        do(state, broker_rules.fence(state, [node], NONE))
        if not config:
            returned(state, node, anew="new")
    partition = do(state, broker_rules.fence(state, [3], NONE))
    assert (partition.leader, partition.in_sync_replicas, partition.eligible_leader_replicas) == (-1, (), (3,))
    return state


@pytest.mark.parametrize("config", [{}, {"min.insync.replicas": "1"}])
def test_another_target_does_not_let_go_of_the_last_who_has_all_records(config: dict[str, str]) -> None:
    state = only_the_added_one_is_left(config)
    partition = move(state, 1, 2)
    assert partition.replicas == (1, 2, 3) and partition.removing_replicas == (3,) and partition.eligible_leader_replicas == (3,) and partition.leader == -1
    partition = returned(state, 3, clean=True)
    assert partition.leader == 3, "it leads, and the others copy what they lack"
    for node in (1, 2):
        if state.brokers[node].fenced:
            returned(state, node)
    partition = in_sync_by(state, 1, 2, 3)
    assert (partition.replicas, partition.in_sync_replicas, partition.removing_replicas, partition.leader) == ((1, 2), (1, 2), (), 1)


def test_who_has_forgotten_some_is_still_the_last_that_is_known() -> None:
    state = only_the_added_one_is_left({})
    partition = returned(state, 3)
    assert (partition.in_sync_replicas, partition.eligible_leader_replicas, partition.leader) == ((), (), -1) and 3 in partition.last_known_eligible
    with pytest.raises(Refusal) as refused:
        cancel(state)
    assert refused.value.error == E.INVALID_REPLICA_ASSIGNMENT and "uncleanly" in refused.value.message
    partition = move(state, 1, 2)
    assert partition.removing_replicas == (3,) and 3 in partition.last_known_eligible
    partition = elect(state, election_rules.ELECT_UNCLEAN)
    assert partition.leader in (2, 3), "one of those who knew, not the one that is only empty"
    partition = in_sync_by(state, 1, 2, 3)
    assert partition.replicas == (1, 2) and not partition.removing_replicas


def test_a_copy_that_counts_while_too_few_are_in_sync_stays_until_enough_are() -> None:
    state = topic(cluster(6))
    move(state, 4, 5, 6)
    in_sync(state, 1, 2, 3, 4)
    do(state, broker_rules.fence(state, [2, 3], NONE))
    do(state, broker_rules.fence(state, [4], NONE))
    partition = move(state, 1, 2, 3)
    assert partition.in_sync_replicas == (1,) and 4 in partition.eligible_leader_replicas and partition.removing_replicas == (4,)
    do(state, broker_rules.fence(state, [1], NONE))
    assert returned(state, 4, clean=True).leader == 4, "it has all that was acknowledged, and the three are away"
    returned(state, 2)
    partition = in_sync_by(state, 2, 4)
    assert partition.removing_replicas == (4,)
    returned(state, 3)
    partition = in_sync_by(state, 2, 3, 4)
    assert set(partition.replicas) == {1, 2, 3} and not partition.removing_replicas


def sent_astray() -> tuple[MetadataState, int]:
    """A move of mqd's own from 1, the others lost: its first goal has caught up and is drained as well, but needed."""
    state = topic(cluster(6), replicas=(1, 2, 3))
    begin(state, 1)
    (first,) = state.topics["t"].partitions[0].adding_replicas
    do(state, broker_rules.fence(state, [2, 3], NONE))
    assert in_sync(state, 1, first).in_sync_replicas == (first, 1)
    begin(state, 1, first)
    partition = state.topics["t"].partitions[0]
    assert set(partition.removing_replicas) == {1, first} and partition.replacing == 1 and len(partition.adding_replicas) == 1
    return state, first


def test_a_needed_goal_that_was_given_up_is_no_replica_for_good() -> None:
    state, first = sent_astray()
    (second,) = state.topics["t"].partitions[0].adding_replicas
    begin(state, 1, first, second)
    partition = state.topics["t"].partitions[0]
    assert set(partition.removing_replicas) == {1, first} and len(partition.adding_replicas) == 1 and len(partition.replicas) == 5
    partition = in_sync_by(state, 1, first, *partition.adding_replicas)
    assert first in partition.replicas, "two have to be in sync without those that leave"
    for node in (2, 3):
        returned(state, node)
    partition = in_sync_by(state, *partition.replicas)
    assert len(partition.replicas) == 3 and not {1, first, second} & set(partition.replicas)


def test_nor_when_the_move_is_taken_back() -> None:
    state, first = sent_astray()
    for entry, change in reassign_rules.taken_back(View(state), 1):
        do(state, [PartitionsChanged(entry.topic_id, (change,))])
    partition = state.topics["t"].partitions[0]
    assert set(partition.replicas) == {1, 2, 3, first} and partition.removing_replicas == (first,) and not partition.adding_replicas
    returned(state, 2)
    partition = in_sync_by(state, 1, 2, first)
    assert set(partition.replicas) == {1, 2, 3} and not partition.removing_replicas and partition.replacing == -1
