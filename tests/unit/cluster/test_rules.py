"""The active controller's rules by single traces: in-sync replicas, leaders, registrations. Mutants
that random histories do not detect are covered here.
"""

import msgspec
import pytest

from mqd.cluster.broker import messages as broker_messages
from mqd.cluster.metadata.active_controller import ActiveController
from mqd.cluster.metadata.records import (
    BrokerRegistered,
    BrokerState,
    PartitionChange,
    PartitionsChanged,
    PartitionState,
    TopicCreated,
    TopicState,
)
from mqd.cluster.metadata.refusal import Refusal
from mqd.cluster.metadata.rules import brokers as broker_rules
from mqd.cluster.metadata.rules.in_sync import Proposals
from mqd.cluster.metadata.rules.partitions import effective_min_in_sync
from mqd.cluster.metadata.state import MetadataState
from mqd.cluster.metadata.view import View
from mqd.protocol.errors import ErrorCode as E
from tests.planted import planted
from tests.unit.controller.controller_world import FEATURES, OPTIONS

TOPIC = b"t" * 16
KEY = (TOPIC, 0)


def cluster(count: int = 3, racks: dict[int, str] | None = None) -> MetadataState:
    state = MetadataState()
    for node in range(1, count + 1):
        features = {name: (first, last) for name, (first, last) in FEATURES.items()}
        state.apply(
            BrokerRegistered(
                BrokerState(
                    node,
                    f"h{node}",
                    1,
                    (racks or {}).get(node),
                    node * 10,
                    1,
                    {f"d{node}": "/d"},
                    directory_id=f"m{node}",
                    features=features,
                )
            )
        )
    return state


def topic(
    state: MetadataState,
    replicas=(1, 2, 3),
    name: str = "t",
    config: dict | None = None,
    count: int = 1,
    topic_id: bytes = TOPIC,
    **fields,
) -> MetadataState:
    partitions = []
    for index in range(count):
        values = {
            "in_sync_replicas": tuple(replicas),
            "leader": replicas[0],
            "leader_epoch": 5,
            "partition_epoch": 7,
        } | fields
        partitions.append(PartitionState(index, tuple(replicas), tuple(f"d{node}" for node in replicas), **values))
    state.apply(TopicCreated(TopicState(name, topic_id, tuple(partitions), config or {})))
    state.check()
    return state


def do(state: MetadataState, records) -> PartitionState:
    for record in records:
        state.apply(record)
    state.check()
    return state.topics["t"].partitions[0]


def proposal(
    members, sequence: int = 1, leader_epoch: int = 5, partition_epoch: int = 7, index: int = 0
) -> broker_messages.InSyncProposal:
    return broker_messages.InSyncProposal(
        TOPIC,
        index,
        leader_epoch,
        partition_epoch,
        sequence,
        [(node, node * 10) if isinstance(node, int) else node for node in members],
    )


def judge(state: MetadataState, expected, node: int = 1, epoch: int = 10, proposals: Proposals | None = None):
    result, change = (proposals or Proposals()).decide(View(state), node, epoch, expected)
    if change is not None:
        do(state, [PartitionsChanged(TOPIC, (change[1],))])
    return result


# -- R6, R6b, KIP-903 ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "node", "epoch", "error"),
    [
        (proposal([1, 2]), 1, 10, 0),
        (proposal([1, 2]), 1, 9, E.STALE_BROKER_EPOCH),
        (proposal([1, 2], leader_epoch=4), 1, 10, E.FENCED_LEADER_EPOCH),
        (proposal([1, 2], leader_epoch=6), 1, 10, E.NOT_CONTROLLER),
        (proposal([1, 2], partition_epoch=6), 1, 10, E.INVALID_UPDATE_VERSION),
        (proposal([1, 2], partition_epoch=8), 1, 10, E.INVALID_UPDATE_VERSION),
        (proposal([1, 2]), 2, 20, E.NOT_LEADER_OR_FOLLOWER),
        (proposal([2, 3]), 1, 10, E.INVALID_REQUEST),
        (proposal([]), 1, 10, E.INVALID_REQUEST),
        (proposal([1, 2, 2]), 1, 10, E.INVALID_REQUEST),
        (proposal([1, 4]), 1, 10, E.INVALID_REQUEST),
        (proposal([1, (2, 19)]), 1, 10, E.INELIGIBLE_REPLICA),
        (proposal([1, 2, 3]), 1, 10, E.OPERATION_NOT_ATTEMPTED),
        (proposal([1], index=1), 1, 10, E.UNKNOWN_TOPIC_OR_PARTITION),
        (msgspec.structs.replace(proposal([1]), topic_id=b"x" * 16), 1, 10, E.UNKNOWN_TOPIC_ID),
    ],
)
def test_a_proposal_must_be_based_on_the_current_state(expected, node: int, epoch: int, error: int) -> None:
    state = topic(cluster(4))
    before = state.copy()
    result = judge(state, expected, node, epoch)
    assert result.error == error
    assert (state == before) == (error != 0)
    if error == 0:
        assert (result.partition_epoch, result.leader_epoch, result.in_sync_replicas) == (8, 5, [1, 2])


def test_fenced_or_stopping_replicas_do_not_join_the_isr() -> None:
    state = topic(cluster(), in_sync_replicas=(1, 2))
    do(state, broker_rules.begin_shutdown(state, 3))
    assert judge(state, proposal([1, 2, 3])).error == E.INELIGIBLE_REPLICA
    do(state, broker_rules.fence(state, [3]))
    assert judge(state, proposal([1, 2, 3])).error == E.INELIGIBLE_REPLICA


def test_a_stopping_replica_may_stay_in_the_isr() -> None:
    state = topic(cluster())
    do(state, broker_rules.begin_shutdown(state, 3))
    assert judge(state, proposal([1, 3])).error == 0


def _late_copy() -> PartitionState:
    """The first copy of an expansion is late; the second was refused while the follower was fenced;
    then the follower is back, and the first copy arrives.
    """
    state, proposals = topic(cluster(), in_sync_replicas=(1, 2)), Proposals()
    expected = proposal([1, 2, 3])
    do(state, broker_rules.fence(state, [3]))
    assert judge(state, expected, proposals=proposals).error == E.INELIGIBLE_REPLICA
    do(state, broker_rules.unfence(state, 3))
    judge(state, expected, proposals=proposals)
    return state.topics["t"].partitions[0]


def test_a_late_copy_of_a_refused_proposal_changes_nothing() -> None:
    assert _late_copy().in_sync_replicas == (1, 2)
    with planted("R6b"):
        assert _late_copy().in_sync_replicas == (1, 2, 3), "the trace shows nothing without the bug"


def test_an_older_proposal_is_not_attempted_after_a_newer_one() -> None:
    state, proposals = topic(cluster(), in_sync_replicas=(1, 2)), Proposals()
    do(state, broker_rules.fence(state, [3]))
    assert judge(state, proposal([1, 2, 3], 2), proposals=proposals).error == E.INELIGIBLE_REPLICA
    do(state, broker_rules.unfence(state, 3))
    assert judge(state, proposal([1, 2, 3], 1), proposals=proposals).error == E.OPERATION_NOT_ATTEMPTED
    assert judge(state, proposal([1, 2, 3], 3), proposals=proposals).error == 0


def test_a_repeated_proposal_gets_the_same_response() -> None:
    state, proposals = topic(cluster()), Proposals()
    first = judge(state, proposal([1, 2]), proposals=proposals)
    assert judge(state, proposal([1, 2]), proposals=proposals) == first and first.error == 0
    assert state.topics["t"].partitions[0].partition_epoch == 8


def test_a_judged_proposal_that_was_not_written_is_finally_refused() -> None:
    state, proposals = topic(cluster()), Proposals()
    before = state.copy()
    assert judge(state, proposal([1, 2]), proposals=proposals).error == 0
    proposals.on_persist_failed(before.version)
    assert judge(before, proposal([1, 2]), proposals=proposals).error == E.OPERATION_NOT_ATTEMPTED
    assert judge(before, proposal([1, 2], 2), proposals=proposals).error == 0


def test_a_stale_leader_changes_nothing() -> None:
    def trace() -> PartitionState:
        """Leadership was moved away and back; a proposal of the leader's first epoch arrives now."""
        state = topic(cluster())
        do(state, [PartitionsChanged(TOPIC, (msgspec.structs.replace(_change(leader=2), raises_leader_epoch=True),))])
        do(
            state,
            [
                PartitionsChanged(
                    TOPIC,
                    (msgspec.structs.replace(_change(leader=1, in_sync_replicas=(1, 2)), raises_leader_epoch=True),),
                )
            ],
        )
        judge(state, proposal([1, 2, 3]))
        return state.topics["t"].partitions[0]

    assert trace().in_sync_replicas == (1, 2)
    with planted("R6"):
        assert trace().in_sync_replicas == (1, 2, 3)


def _change(**fields):
    return PartitionChange(0, **fields)


def test_an_incarnation_that_has_not_fetched_does_not_join_the_isr() -> None:
    """KIP-903: the follower fetched, was restarted without its files, and registered again: the
    proposal is based on its old files.
    """

    def trace() -> PartitionState:
        state = topic(cluster(), in_sync_replicas=(1, 2))
        state.apply(BrokerRegistered(msgspec.structs.replace(state.brokers[3], epoch=99)))
        judge(state, proposal([1, 2, 3]))
        return state.topics["t"].partitions[0]

    assert trace().in_sync_replicas == (1, 2)
    with planted("903"):
        assert trace().in_sync_replicas == (1, 2, 3)


def test_a_proposal_for_another_controller_is_not_read() -> None:
    state = topic(cluster())
    active = ActiveController(3, state, OPTIONS, 0, True)
    for epoch in (2, 4):
        records, response = active.alter_partition(
            state, broker_messages.AlterPartition(epoch, 1, 10, [proposal([1, 2])])
        )
        assert not records and response.error == E.NOT_CONTROLLER and not response.results


# -- R8: fencing and elections ---------------------------------------------------------------------


def test_the_minimum_follows_the_replicas() -> None:
    assert [effective_min_in_sync(-1, count) for count in (1, 2, 3, 5)] == [1, 2, 2, 2]
    assert effective_min_in_sync(3, 2) == 2 and effective_min_in_sync(1, 3) == 1
    assert effective_min_in_sync(-1, 3, 2) == 1, "a partition that grows from one to three takes records meanwhile"


def test_a_fenced_leader_is_replaced() -> None:
    state = topic(cluster())
    after = do(state, broker_rules.fence(state, [1]))
    assert (
        after.leader,
        after.leader_epoch,
        after.partition_epoch,
        after.in_sync_replicas,
        after.eligible_leader_replicas,
    ) == (2, 6, 8, (2, 3), ())


def test_a_fenced_follower_leaves_the_leader_in_its_epoch() -> None:
    state = topic(cluster())
    after = do(state, broker_rules.fence(state, [3]))
    assert (after.leader, after.leader_epoch, after.partition_epoch, after.in_sync_replicas) == (1, 5, 8, (1, 2))


def test_below_the_minimum_a_leaving_replica_stays_eligible() -> None:
    state = topic(cluster())
    do(state, broker_rules.fence(state, [1]))
    after = do(state, broker_rules.fence(state, [2]))
    assert (after.leader, after.in_sync_replicas, after.eligible_leader_replicas) == (3, (3,), (2,))
    after = do(state, broker_rules.fence(state, [3]))
    assert (after.leader, after.in_sync_replicas, sorted(after.eligible_leader_replicas)) == (-1, (), [2, 3])
    after = do(state, broker_rules.unfence(state, 1))
    assert after.leader == -1, "it lacks what was written since"
    after = do(state, broker_rules.unfence(state, 2))
    assert (after.leader, after.in_sync_replicas, after.eligible_leader_replicas) == (2, (2,), (3,))
    judge(
        state,
        proposal([2, 1], leader_epoch=after.leader_epoch, partition_epoch=after.partition_epoch),
        node=2,
        epoch=20,
    )
    after = state.topics["t"].partitions[0]
    assert (after.in_sync_replicas, after.eligible_leader_replicas) == ((1, 2), ())


def test_two_fenced_at_once_change_the_epoch_once() -> None:
    state = topic(cluster())
    after = do(state, broker_rules.fence(state, [1, 2]))
    assert (after.leader, after.leader_epoch, after.in_sync_replicas, sorted(after.eligible_leader_replicas)) == (
        3,
        6,
        (3,),
        [1, 2],
    )


def test_a_fence_is_one_batch_for_all_partitions() -> None:
    state = topic(cluster(), count=50)
    records = broker_rules.fence(state, [1])
    assert len(records) == 2 and len(records[1].changes) == 50


def test_one_replica_comes_back_as_leader() -> None:
    state = topic(cluster(), replicas=(1,))
    after = do(state, broker_rules.fence(state, [1]))
    assert (after.leader, after.in_sync_replicas, after.eligible_leader_replicas) == (-1, (), (1,))
    after = do(state, broker_rules.unfence(state, 1))
    assert (after.leader, after.in_sync_replicas, after.eligible_leader_replicas) == (1, (1,), ())


# -- R9: registration ------------------------------------------------------------------------------


def registration(
    node: int = 1, incarnation: int = 2, directory_id: str | None = None, clean_epoch: int = -1, **fields
) -> broker_messages.RegisterBroker:
    reports = [broker_messages.DirectoryReport(f"d{node}", "/d", 10, True)]
    values = {"directories": reports, "features": FEATURES} | fields
    return broker_messages.RegisterBroker(
        node,
        directory_id or f"m{node}",
        incarnation,
        "h",
        1,
        None,
        "h",
        2,
        "h",
        3,
        2,
        clean_epoch=clean_epoch,
        **values,
    )


def test_an_unclean_start_is_neither_in_sync_nor_eligible() -> None:
    state = topic(cluster(), replicas=(1, 2), in_sync_replicas=(1,))
    after = do(state, broker_rules.register(state, registration()))
    assert (after.leader, after.in_sync_replicas, after.eligible_leader_replicas, after.last_known_eligible) == (
        -1,
        (),
        (),
        (1,),
    )
    assert state.brokers[1].fenced and state.brokers[1].epoch == 4 and state.brokers[1].incarnation == 2
    assert do(state, broker_rules.unfence(state, 1)).leader == -1


def test_an_only_replica_stays_eligible() -> None:
    """No host could have more of it; a single host starts without help."""
    state = topic(cluster(), replicas=(1,))
    do(state, broker_rules.register(state, registration()))
    assert do(state, broker_rules.unfence(state, 1)).leader == 1


def test_an_only_replica_whose_disk_is_gone_is_not_led_by_an_empty_one() -> None:
    """Found by a random history (seed 6455)."""
    state = topic(cluster(), replicas=(1,))
    do(state, broker_rules.fence(state, [1]))
    after = do(state, broker_rules.register(state, registration(directory_id="other")))
    assert (after.leader, after.in_sync_replicas, after.eligible_leader_replicas, after.last_known_eligible) == (
        -1,
        (),
        (),
        (1,),
    )
    assert do(state, broker_rules.unfence(state, 1)).leader == -1, "a human says that the records are lost"


def test_an_emptied_directory_is_not_eligible() -> None:
    """Even after a clean shutdown, and where only flushed records count."""
    state = topic(cluster(), replicas=(1, 2), in_sync_replicas=(1,), config={"flush.on.ack": "true"})
    reports = [broker_messages.DirectoryReport("d1", "/d", 10, True, fresh=True)]
    after = do(state.copy(), broker_rules.register(state, registration(clean_epoch=10, directories=reports)))
    assert (after.eligible_leader_replicas, after.last_known_eligible) == ((), (1,))
    reports = [
        broker_messages.DirectoryReport("d1", "/d", 10, True),
        broker_messages.DirectoryReport("e1", "/e", 10, True, fresh=True),
    ]
    assert do(
        state, broker_rules.register(state, registration(clean_epoch=10, directories=reports))
    ).eligible_leader_replicas == (1,)


def test_a_clean_start_keeps_eligibility() -> None:
    state = topic(cluster(), replicas=(1,))
    after = do(state, broker_rules.register(state, registration(clean_epoch=10)))
    assert (after.eligible_leader_replicas, after.last_known_eligible) == ((1,), ())
    assert do(state, broker_rules.unfence(state, 1)).leader == 1


def test_a_marker_of_an_older_registration_is_not_clean() -> None:
    state = topic(cluster(), replicas=(1, 2), in_sync_replicas=(1,))
    assert do(state, broker_rules.register(state, registration(clean_epoch=9))).last_known_eligible == (1,)


def test_the_same_incarnation_registers_once() -> None:
    state = topic(cluster())
    do(state, broker_rules.register(state, registration()))
    epoch, version = state.brokers[1].epoch, state.version
    assert broker_rules.register(state, registration()) == [] and (state.brokers[1].epoch, state.version) == (
        epoch,
        version,
    )
    moved = broker_rules.register(state, msgspec.structs.replace(registration(), host="elsewhere"))
    do(state, moved)
    assert (state.brokers[1].epoch, state.brokers[1].host, state.brokers[1].fenced) == (epoch, "elsewhere", True)


def test_a_second_host_of_the_same_number_waits_or_is_refused() -> None:
    state = topic(cluster())
    with pytest.raises(Refusal) as refused:
        broker_rules.register(state, registration(directory_id="other"))
    assert refused.value.error == E.DUPLICATE_BROKER_REGISTRATION
    do(state, broker_rules.fence(state, [1]))
    do(state, broker_rules.register(state, registration(directory_id="other", clean_epoch=10)))
    assert state.brokers[1].directory_id == "other"
    with pytest.raises(Refusal):
        broker_rules.register(state, msgspec.structs.replace(registration(directory_id="other"), incarnation=1))


def test_a_wiped_host_starts_with_empty_replicas() -> None:
    state = topic(cluster(), replicas=(1, 2, 3), count=4)
    do(state, broker_rules.fence(state, [1]))
    reports = [
        broker_messages.DirectoryReport("new-a", "/a", 1, True),
        broker_messages.DirectoryReport("new-b", "/b", 1, True),
        broker_messages.DirectoryReport("new-c", "/c", 1, False),
    ]
    do(state, broker_rules.register(state, registration(directory_id="other", directories=reports)))
    assert sorted(partition.directories[0] for partition in state.topics["t"].partitions) == [
        "new-a",
        "new-a",
        "new-b",
        "new-b",
    ]


def test_a_version_without_the_levels_in_force_is_refused() -> None:
    with pytest.raises(Refusal) as refused:
        broker_rules.register(cluster(), registration(4, features={**FEATURES, "transaction.version": (0, 1)}))
    assert refused.value.error == E.UNSUPPORTED_VERSION and "transaction.version" in refused.value.message


def test_a_stopping_host_keeps_partitions_that_no_other_can_lead() -> None:
    state = topic(cluster(), in_sync_replicas=(1, 2))
    do(state, broker_rules.begin_shutdown(state, 2))
    after = do(state, broker_rules.fence(state, [1]))
    assert (after.leader, after.in_sync_replicas, after.eligible_leader_replicas) == (2, (2,), (1,))
    records, done = broker_rules.move_away(state, 2, 10)
    assert not records and done, "it leads to its end"
