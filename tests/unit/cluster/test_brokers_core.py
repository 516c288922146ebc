"""The metadata core in a quorum, and the core of one broker."""

import msgspec
import pytest

from mqd.base.config import load_broker
from mqd.cluster.broker import core as broker_core
from mqd.cluster.broker import messages as broker_messages
from mqd.cluster.host import messages
from mqd.cluster.metadata import core as metadata_core
from mqd.cluster.metadata.records import TopicRemoved
from mqd.cluster.metadata.rules.configs import ConfigRules
from mqd.cluster.metadata.state import MetadataState
from mqd.protocol.errors import ErrorCode as E
from tests.unit.cluster.test_brokers import partitions, world  # noqa: F401 (a fixture)
from tests.unit.cluster.test_rules import registration
from tests.unit.controller.controller_world import OPTIONS, World

# -- the metadata core in a quorum -----------------------------------------------------------------


def test_requests_waiting_when_the_leadership_ends_get_not_controller(world: World) -> None:
    active = world.hosts[world.active]
    local = world.request(messages.CreateTopic("a", 1, -1, {}, {}), node=active.node)
    other = world.request(
        messages.CreateTopic("b", 1, -1, {}, {}), node=next(node for node in world.hosts if node != active.node)
    )
    world.quiet = True
    world.now_ms += 5
    world.deliver()
    world.proposed.clear()
    world.depose()
    assert world.answers[local].error == E.NOT_CONTROLLER and world.answers[other].error == E.NOT_CONTROLLER
    assert "a" not in active.core.proposed.topics and active.core.proposed is active.core.committed
    world.settle(5)
    assert world.send_request(messages.CreateTopic("a", 1, -1, {}, {})).error == 0


def test_proposals_of_a_stopped_controller_may_still_be_committed(world: World) -> None:
    active = world.hosts[world.active]
    world.request(messages.CreateTopic("a", 1, -1, {}, {}), node=active.node)
    world.commit(report=False)
    world.depose()
    assert "a" not in active.core.committed.topics
    world.settle(5)
    assert all("a" in host.core.committed.topics for host in world.hosts.values())


def test_a_response_to_a_change_is_never_dropped(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """No broker repeats a change, so its client would wait for its timeout."""
    monkeypatch.setattr(metadata_core, "PEER_RESPONSES_WAITING_MAX", 2)
    core, now_ms = world.hosts[world.active].core, world.now_ms
    epoch = world.unlogged.brokers[2].epoch

    def forward(number: int, name: str) -> list[metadata_core.Action]:
        request = messages.Request(number, messages.CreateTopic(name, 1, -1, {}, {}))
        change = broker_messages.ChangeForwarded(2, epoch, number, 1, request)
        return core.handle(metadata_core.PeerReceived(2, change), now_ms)

    def propose(node: int) -> list[metadata_core.Action]:
        return core.handle(metadata_core.PeerReceived(node, broker_messages.AlterPartition(-1, node, 1, [])), now_ms)

    (persist,) = forward(1, "a")
    assert isinstance(persist, metadata_core.Persist)
    assert propose(3) == [] and propose(4) == [], "a broker repeats the dropped one"
    (refused,) = forward(2, "b")
    assert isinstance(refused, metadata_core.SendPeer) and isinstance(refused.message, broker_messages.ChangeResponse)
    assert refused.message.response.error == E.REQUEST_TIMED_OUT and "b" not in core.proposed.topics
    actions = core.handle(metadata_core.Committed(persist.records, persist.version), now_ms)
    sent = [action for action in actions if isinstance(action, metadata_core.SendPeer)]
    assert [one.node_id for one in sent] == [2, 4]
    assert isinstance(sent[0].message, broker_messages.ChangeResponse) and sent[0].message.response.error == 0
    core.check()


def test_offsets_of_control_records_are_skipped(world: World) -> None:
    host = world.hosts[world.active]
    version = host.core.proposed.version
    actions = host.core.handle(metadata_core.OffsetsTaken(version + 2), world.now_ms)
    assert actions == [] and host.core.proposed.version == version + 2
    (persist,) = host.core.handle(
        metadata_core.ChangeRequested("c", messages.Request(1, messages.AllocateProducerIds(5))), world.now_ms
    )
    assert persist.base_offset == version + 2
    host.core.check()
    host.core.handle(metadata_core.Committed((), version + 2), world.now_ms)
    publish, reply = host.core.handle(metadata_core.Committed(persist.records, persist.version), world.now_ms)
    assert publish.version == version + 3 and reply.response.error == 0
    host.core.check()


def test_a_snapshot_replaces_the_state_and_says_what_is_new(world: World) -> None:
    source = world.hosts[world.active].core.committed
    state = MetadataState()
    core = metadata_core.MetadataCore(state, 9, ConfigRules(load_broker(None, {}, {})), lambda: b"", 100, active=False)
    (publish,) = core.handle(metadata_core.SnapshotInstalled(MetadataState.from_snapshot(source.snapshot())), 0)
    assert core.committed is state and core.proposed is state and state == source
    assert (
        [topic.name for topic in publish.topics] == ["t"]
        and publish.brokers_changed
        and publish.version == source.version
    )
    core.check()
    later = MetadataState.from_snapshot(source.snapshot())
    later.apply(TopicRemoved(later.topics["t"].topic_id))
    (publish,) = core.handle(metadata_core.SnapshotInstalled(later), 0)
    assert [topic.name for topic in publish.removed_topics] == ["t"] and not publish.topics


def test_a_message_under_another_id_is_ignored(world: World) -> None:
    active = world.hosts[world.active]
    epoch = world.unlogged.brokers[2].epoch
    assert (
        active.core.handle(
            metadata_core.PeerReceived(3, broker_messages.ProofOfDeath(2, epoch, world.epoch, world.now_ms)),
            world.now_ms,
        )
        == []
    )
    assert (
        active.core.handle(
            metadata_core.PeerReceived(2, broker_messages.ProofOfDeath(2, epoch - 1, world.epoch, world.now_ms)),
            world.now_ms,
        )
        == []
    )


def test_a_host_that_is_not_the_controller_refuses(world: World) -> None:
    host = next(host for host in world.hosts.values() if host.node != world.active)
    for message in (
        registration(2),
        broker_messages.Heartbeat(2, 1, 5, 1),
        broker_messages.AlterPartition(1, 2, 1, []),
    ):
        (response,) = host.core.handle(metadata_core.PeerReceived(2, message), world.now_ms)
        assert response.node_id == 2 and response.message.error == E.NOT_CONTROLLER
    assert host.core.handle(metadata_core.PeerReceived(2, broker_messages.WorkersDied(2, 1, [])), world.now_ms) == []


# -- the broker core -------------------------------------------------------------------------------


def answered(
    host,
    world: World,
    sent_ms: int,
    lease_ms: int = 4_500,
    epoch: int | None = None,
    fenced: bool = False,
    error: int = 0,
):
    message = broker_messages.BrokerHeartbeatResponse(
        1, host.node, host.broker.broker_epoch if epoch is None else epoch, sent_ms, lease_ms, fenced, error=error
    )
    return host.broker.handle(broker_core.PeerReceived(1, message), world.now_ms)


def test_a_lease_counts_from_when_its_heartbeat_was_sent(world: World) -> None:
    host = world.hosts[3]
    world.now_ms += 1_000
    (sent,) = [
        action.message
        for action in host.broker.handle(broker_core.Tick(), world.now_ms)
        if isinstance(action, broker_core.SendPeer)
    ]
    world.now_ms += 4_000
    (message,) = answered(host, world, sent.sent_ms)
    assert message.lease_until_ms == sent.sent_ms + 4_500
    assert answered(host, world, sent.sent_ms, 9_000) == [], "answered already"
    assert answered(host, world, sent.sent_ms + 1, 9_000) == [], "never sent"
    assert answered(host, world, sent.sent_ms, epoch=host.broker.broker_epoch - 1) == []


def test_a_stale_broker_registers_again(world: World) -> None:
    host = world.hosts[3]
    world.now_ms += 1_000
    host.broker.handle(broker_core.Tick(), world.now_ms)
    actions = answered(host, world, world.now_ms, 0, error=int(E.STALE_BROKER_EPOCH))
    assert isinstance(actions[0].message, broker_messages.RegisterBroker)
    assert actions[-1] == broker_core.SetBroker(-1, host.incarnation, 0, False, True)


def restarted(host, world: World) -> tuple[broker_core.BrokerCore, list]:
    """The core of a new controller process, which inherits its predecessor's lease, and its actions up to
    the request to register.
    """
    core = broker_core.BrokerCore(3, host.core.committed, OPTIONS)
    message = msgspec.structs.replace(registration(3, incarnation=1), directory_id=host.directory_id)
    actions = core.handle(
        broker_core.Started(message, 1, host.sent.broker_epoch, host.sent.lease_until_ms), world.now_ms
    )
    actions += core.handle(
        broker_core.MetadataCommitted(host.core.committed.version, host.core.committed.version), world.now_ms
    )
    actions += core.handle(broker_core.MetadataApplied(host.core.committed.version), world.now_ms)
    actions += core.handle(broker_core.ControllerKnown(world.active, world.epoch), world.now_ms)
    return core, actions


def reported(actions: list) -> list[broker_core.SetBroker]:
    return [action for action in actions if isinstance(action, broker_core.SetBroker)]


def test_a_restarted_controller_process_changes_no_lease(world: World) -> None:
    """The lease that its predecessor wrote into the control segment stays in force until the next
    heartbeat gets a response.
    """
    host = world.hosts[3]
    core, actions = restarted(host, world)
    assert not reported(actions)
    response = broker_messages.RegisterBrokerResponse(world.epoch, 3, 1, 0, "", host.sent.broker_epoch)
    actions = core.handle(broker_core.PeerReceived(world.active, response), world.now_ms)
    assert reported(actions) == [host.sent]


def test_a_lease_from_before_the_hosts_death_is_not_inherited(world: World) -> None:
    """The host's processes died, and this one was started before the response to its registration."""
    host = world.hosts[3]
    core, _ = restarted(host, world)
    response = broker_messages.RegisterBrokerResponse(world.epoch, 3, 1, 0, "", host.sent.broker_epoch)
    actions = core.handle(broker_core.HostDied(), world.now_ms)
    actions += core.handle(broker_core.PeerReceived(world.active, response), world.now_ms)
    actions += core.handle(broker_core.HostDied(False), world.now_ms)
    core.check()
    assert reported(actions) and not any(action.lease_until_ms for action in reported(actions))


def test_the_only_voter_needs_no_lease(world: World) -> None:
    host = world.hosts[3]
    (message,) = host.broker.handle(
        broker_core.ControllerKnown(world.active, world.epoch, is_only_voter=True), world.now_ms
    )
    assert message.lease_until_ms == broker_core.INT64_MAX
    (message,) = host.broker.handle(
        broker_core.ControllerKnown(world.active, world.epoch, is_only_voter=False), world.now_ms
    )
    assert message.lease_until_ms < world.now_ms + OPTIONS.session_ms


def test_a_refusal_of_an_older_controller_does_not_end_a_proposal(world: World) -> None:
    """Found by a random history (seed 129): the first copy was committed by a controller that
    ended; its successor refused the second, and the leader forgot its proposal.
    """
    partition = partitions(world)[0]
    host = world.hosts[partition.leader]
    topic_id = world.unlogged.topics["t"].topic_id
    expected = messages.ProposeInSync(
        topic_id, 0, partition.leader_epoch, partition.partition_epoch, [(host.node, host.broker.broker_epoch)], 99
    )
    (sent,) = host.broker.handle(broker_core.InSyncProposed("w", expected), world.now_ms)
    assert isinstance(sent.message, broker_messages.AlterPartition)

    def answer(error: int, epoch: int) -> list:
        result = broker_messages.InSyncResult(
            topic_id,
            0,
            99,
            int(error),
            host.node,
            partition.leader_epoch,
            partition.partition_epoch + 1,
            [host.node],
            partition.leader_epoch,
        )
        message = broker_messages.AlterPartitionResponse(epoch, host.node, host.broker.broker_epoch, 0, [result])
        return host.broker.handle(broker_core.PeerReceived(world.active, message), world.now_ms)

    assert answer(E.INELIGIBLE_REPLICA, world.epoch - 1) == []
    assert answer(E.INVALID_UPDATE_VERSION, world.epoch) == [], "it may be the first copy that moved the partition on"
    (reported,) = answer(0, world.epoch)
    assert reported.response.error == 0 and reported.response.sequence == 99
    assert answer(0, world.epoch) == []


def test_changes_without_a_controller_are_refused_retriably(world: World) -> None:
    world.depose()
    client = world.request(messages.CreateTopic("x", 1, -1, {}, {}), node=3)
    assert world.answers[client].error == E.NOT_CONTROLLER


def test_a_forwarded_change_that_cannot_be_written_is_answered(world: World) -> None:
    core, now_ms = world.hosts[world.active].core, world.now_ms
    request = messages.Request(7, messages.CreateTopic("lost", 1, -1, {}, {}))
    change = broker_messages.ChangeForwarded(2, world.unlogged.brokers[2].epoch, 9, 1, request)
    (persist,) = core.handle(metadata_core.PeerReceived(2, change), now_ms)
    assert isinstance(persist, metadata_core.Persist)
    failed = metadata_core.PersistFailed("no space left on device", kept_version=persist.version - len(persist.records))
    (answer,) = [one for one in core.handle(failed, now_ms) if isinstance(one, metadata_core.SendPeer)]
    refused = answer.message
    assert answer.node_id == 2 and isinstance(refused, broker_messages.ChangeResponse)
    assert refused.request_id == 9 and refused.response.request_id == 7
    assert refused.response.error == E.KAFKA_STORAGE_ERROR and "no space left" in refused.response.message
    assert refused.version == core.proposed.version and "lost" not in core.proposed.topics
    core.check()


def test_a_change_is_acknowledged_when_this_hosts_workers_have_it(world: World) -> None:
    node = next(node for node in world.hosts if node != world.active)
    host = world.hosts[node]
    client = world.request(messages.CreateTopic("x", 1, -1, {}, {}), node=node)
    if not [entry for entry in world.links if isinstance(entry[3], broker_messages.ChangeForwarded)]:
        pytest.skip("the link lost it")
    world.quiet = True
    for _ in range(3):
        world.now_ms += 70
        world.deliver()
        while world.proposed:
            world.commit()
    assert client not in world.answers
    while host.applied < len(world.log):
        world.learn(host)
    assert world.answers[client].error == 0


def test_proposals_made_while_one_is_in_flight_are_batched(world: World) -> None:
    topic_id = world.unlogged.topics["t"].topic_id
    assert (
        world.send_request(messages.CreateTopic("many", -1, -1, {index: [3, 1, 2] for index in range(20)}, {})).error
        == 0
    )
    host, topic_id = world.hosts[3], world.unlogged.topics["many"].topic_id

    def propose(index: int, sequence: int = 1) -> list:
        expected = messages.ProposeInSync(
            topic_id, index, 0, 0, [(3, host.broker.broker_epoch), (1, world.unlogged.brokers[1].epoch)], sequence
        )
        return [
            action.message for action in host.broker.handle(broker_core.InSyncProposed("w", expected), world.now_ms)
        ]

    (first,) = propose(0)
    assert [propose(index) for index in range(1, 20)] == [[]] * 19
    result = broker_messages.InSyncResult(topic_id, 0, 1, 0, 3, 0, 1, [3, 1], 0)
    response = broker_messages.AlterPartitionResponse(world.epoch, 3, host.broker.broker_epoch, 0, [result])
    reported, rest = host.broker.handle(broker_core.PeerReceived(world.active, response), world.now_ms)
    assert reported.response.index == 0 and [entry.index for entry in rest.message.proposals] == list(range(1, 20))
    again = [
        action.message
        for action in host.broker.handle(broker_core.Tick(), world.now_ms + 600)
        if isinstance(action.message, broker_messages.AlterPartition)
    ]
    assert [len(message.proposals) for message in again] == [19], "there was no response"
    assert propose(20 - 1, 2) == [], "a newer one waits too"


def test_an_answer_to_a_proposal_of_an_older_leader_epoch_is_not_for_this_one(world: World) -> None:
    """Found by a random history (seed 5289): sequence numbers restart with a leader epoch, and a
    late response to the first proposal of the older one ended the first of this one.
    """
    partition = partitions(world)[0]
    host = world.hosts[partition.leader]
    topic_id = world.unlogged.topics["t"].topic_id
    world.kill_worker(host)
    expected = messages.ProposeInSync(
        topic_id,
        0,
        partition.leader_epoch + 1,
        partition.partition_epoch + 1,
        [(host.node, host.broker.broker_epoch)],
        1,
    )
    host.broker.handle(broker_core.InSyncProposed("w", expected), world.now_ms)
    for proposed_in, reported in ((partition.leader_epoch, 0), (partition.leader_epoch + 1, 1)):
        result = broker_messages.InSyncResult(topic_id, 0, 1, int(E.INELIGIBLE_REPLICA), proposed_in=proposed_in)
        message = broker_messages.AlterPartitionResponse(world.epoch, host.node, host.broker.broker_epoch, 0, [result])
        actions = host.broker.handle(broker_core.PeerReceived(world.active, message), world.now_ms)
        assert len([action for action in actions if isinstance(action, broker_core.ToWorker)]) == reported


def test_a_host_whose_node_id_is_taken_logs_it_once_and_keeps_trying(world: World) -> None:
    host = world.hosts[3]
    core = broker_core.BrokerCore(3, host.core.committed, OPTIONS)
    core.handle(broker_core.Started(registration(3, incarnation=1), 1), world.now_ms)
    core.handle(broker_core.ControllerKnown(world.active, world.epoch), world.now_ms)

    def answer(error: int, text: str = "", broker_epoch: int = -1) -> list:
        message = broker_messages.RegisterBrokerResponse(world.epoch, 3, 1, error, text, broker_epoch)
        return core.handle(broker_core.PeerReceived(world.active, message), world.now_ms)

    def asks() -> bool:
        world.now_ms += OPTIONS.register_retry_ms
        return any(
            isinstance(action, broker_core.SendPeer) and isinstance(action.message, broker_messages.RegisterBroker)
            for action in core.handle(broker_core.Tick(), world.now_ms)
        )

    assert answer(int(E.NOT_CONTROLLER)) == []
    assert answer(int(E.DUPLICATE_BROKER_REGISTRATION), "in use") == [broker_core.NotYetRegistered("in use")]
    for _ in range(3):
        assert asks()
        assert answer(int(E.DUPLICATE_BROKER_REGISTRATION), "in use") == []
    assert asks()
    answer(0, "", 77)
    assert core.broker_epoch == 77 and not asks()
