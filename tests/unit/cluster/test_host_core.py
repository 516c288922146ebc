"""The host core of one host among several: partitions elsewhere are published, replicas are added
and removed, roles and brokers change.
"""

import random

import pytest

from mqd.cluster.host import core as host_core
from mqd.cluster.host import messages
from mqd.cluster.host.core import OWNER_NONE, HostCore
from mqd.cluster.metadata.core import Publish
from mqd.cluster.metadata.records import (
    BrokerChanged,
    BrokerRegistered,
    BrokerState,
    ClusterCreated,
    LeaderEpochsRaised,
    PartitionChange,
    PartitionsChanged,
    PartitionState,
    ReplicaMoved,
    RetiredPartitionsRemoved,
    TopicCreated,
    TopicState,
)
from mqd.cluster.metadata.state import MetadataState
from mqd.protocol.errors import ErrorCode

NODE = 2
TOPIC = b"t" * 16
DIRECTORY = "d2"


class Host:
    """Host 2 of three: the content of the control segment, and the messages to its worker."""

    def __init__(self, worker_count: int = 2, slot_count: int = 8) -> None:
        self.state = MetadataState()
        self.state.apply(ClusterCreated("cluster", 0))
        for node in (1, 2, 3):
            self.state.apply(
                BrokerRegistered(
                    BrokerState(
                        node,
                        "h",
                        9000 + node,
                        f"rack{node}",
                        node,
                        5,
                        {f"d{node}": "/x"},
                        worker_count=2,
                        inter_broker_host="h",
                        inter_broker_port=7,
                    )
                )
            )
        self.core = HostCore(NODE, 1, worker_count, slot_count, {DIRECTORY: 0})
        self.slots: dict[int, tuple[bytes, int, int, int]] = {}
        self.sent: list[tuple[object, object]] = []
        self.actions: list[object] = []
        self.give(host_core.Started(self.state, (), (), {index: 1 for index in range(worker_count)}))
        for index in range(worker_count):
            self.give(host_core.SubscriberJoined(f"w{index}", messages.Subscribe("worker", index, 1)))
        self.give(host_core.SubscriberJoined("acceptor", messages.Subscribe("acceptor", 0, 1)))
        self.sent.clear()

    def give(self, event) -> list:
        actions = self.core.handle(event, 0)
        self.core.check()
        for action in actions:
            match action:
                case host_core.AssignSlot():
                    self.slots[action.slot] = (action.topic_id, action.index, action.owner, action.leader_epoch)
                case host_core.ClearSlot():
                    del self.slots[action.slot]
                case host_core.Send():
                    self.sent.append((action.client, action.message))
        self.actions = actions
        return actions

    def commit(self, *records, **publish) -> list:
        for record in records:
            self.state.apply(record)
        topics = () if "removed_topics" in publish else tuple(self.state.topics.values())
        return self.give(Publish(self.state.version, **{"topics": topics, **publish}))

    def report(self, client: str = "acceptor") -> list:
        """The messages to this subscriber since the last call, in order."""
        found = [
            part
            for to, message in self.sent
            if to == client
            for part in (message.parts if isinstance(message, messages.MessageList) else [message])
        ]
        self.sent = [(to, message) for to, message in self.sent if to != client]
        return found

    def apply_all(self) -> None:
        for index in range(2):
            self.give(host_core.WorkerApplied(f"w{index}", messages.Applied(self.state.version, {})))


def partition(
    index: int, replicas: tuple[int, ...], leader: int | None = None, epoch: int = 0, directory: str = DIRECTORY
) -> PartitionState:
    directories = tuple(directory if node == NODE else f"d{node}" for node in replicas)
    return PartitionState(index, replicas, directories, replicas, replicas[0] if leader is None else leader, epoch)


def topic(*partitions: PartitionState) -> TopicCreated:
    return TopicCreated(TopicState("t", TOPIC, partitions, {}))


@pytest.fixture
def host() -> Host:
    return Host()


def test_partitions_elsewhere_have_no_slot_and_are_reported(host: Host) -> None:
    host.commit(topic(partition(0, (1, 2)), partition(1, (1, 3)), partition(2, (2, 3))))
    for client in ("acceptor", "w0", "w1"):
        (put,) = host.report(client)
        images = put.topic.partitions
        assert [image.leader for image in images] == [1, 1, 2] and [image.slot >= 0 for image in images] == [
            True,
            False,
            True,
        ]
        assert images[1].owner == OWNER_NONE and images[0].replicas == [1, 2] and put.topic.partition_count == 3
    assert {entry[1] for entry in host.slots.values()} == {0, 2}


def test_a_removed_replicas_slot_is_freed_when_all_workers_know(host: Host) -> None:
    host.commit(topic(partition(0, (1, 2)), partition(1, (2, 3))))
    host.apply_all()
    host.report()
    change = PartitionChange(
        0, raises_leader_epoch=True, replicas=(1, 3), directories=("d1", "d3"), in_sync_replicas=(1, 3)
    )
    host.commit(PartitionsChanged(TOPIC, (change,)), changed_partitions=(("t", (0,)),))
    (put,) = host.report()
    assert isinstance(put, messages.PartitionsPut) and [
        (image.index, image.slot, image.owner) for image in put.partitions
    ] == [(0, -1, OWNER_NONE)]
    assert len(host.slots) == 2
    host.give(host_core.WorkerApplied("w0", messages.Applied(host.state.version, {})))
    assert len(host.slots) == 2, "worker 1 may still use it"
    host.give(host_core.WorkerApplied("w1", messages.Applied(host.state.version, {})))
    assert {entry[1] for entry in host.slots.values()} == {1}


def test_a_new_replica_chooses_a_directory_before_it_has_a_slot(host: Host) -> None:
    host.commit(topic(partition(0, (1, 3))))
    change = PartitionChange(0, replicas=(1, 3, 2), directories=("d1", "d3", ""), adding_replicas=(2,))
    actions = host.commit(PartitionsChanged(TOPIC, (change,)), changed_partitions=(("t", (0,)),))
    assert [action for action in actions if isinstance(action, host_core.ReportReplicaMoved)] == [
        host_core.ReportReplicaMoved(TOPIC, 0, DIRECTORY)
    ]
    assert not host.slots and host.report()[-1].partitions[0].slot == -1
    host.commit(ReplicaMoved(TOPIC, 0, NODE, DIRECTORY), changed_partitions=(("t", (0,)),))
    image = host.report()[-1].partitions[0]
    assert image.slot in host.slots and image.owner != OWNER_NONE and image.adding == [2]
    assert not any(isinstance(action, host_core.ReportReplicaMoved) for action in host.actions)


def test_a_new_leader_epoch_reaches_the_slot_of_a_follower_too(host: Host) -> None:
    host.commit(topic(partition(0, (1, 2))))
    host.commit(
        PartitionsChanged(TOPIC, (PartitionChange(0, raises_leader_epoch=True, leader=2, in_sync_replicas=(2,)),)),
        changed_partitions=(("t", (0,)),),
    )
    assert [entry[3] for entry in host.slots.values()] == [1]
    image = host.report()[-1].partitions[0]
    assert (image.leader, image.leader_epoch, image.in_sync_replicas, image.partition_epoch) == (2, 1, [2], 1)


def test_the_acceptor_receives_withheld_topics_in_order() -> None:
    """A coordinator takes a topic that it never received for a deleted one, and removes its
    committed offsets.
    """
    host = Host(slot_count=3)
    host.commit(topic(partition(0, (2, 1)), partition(1, (2, 1))))
    host.apply_all()
    host.report(), host.report("w0")
    other = TopicCreated(TopicState("u", b"u" * 16, (partition(0, (2, 3)), partition(1, (2, 3))), {}))
    host.commit(other)
    first, *rest = host.report()
    assert isinstance(first, messages.SettingsPut) and first.withheld == ["u"] and first.version < host.state.version
    assert not any(isinstance(part, messages.TopicPut) and part.topic.name == "u" for part in rest)
    assert not any(isinstance(part, messages.SettingsPut) for part in host.report("w0")), "workers have no use for it"
    host.give(host_core.SubscriberJoined("acceptor", messages.Subscribe("acceptor", 0, 1)))
    assert host.report()[-1].withheld == ["u"]
    change = PartitionChange(
        0, raises_leader_epoch=True, replicas=(1, 3), directories=("d1", "d3"), in_sync_replicas=(1, 3), leader=1
    )
    host.commit(PartitionsChanged(TOPIC, (change,)), changed_partitions=(("t", (0,)),))
    host.apply_all()
    *before, put, last = host.report()
    assert isinstance(put, messages.TopicPut) and put.topic.name == "u" and len(put.topic.partitions) == 2
    assert (
        isinstance(last, messages.SettingsPut)
        and last.withheld == []
        and not any(isinstance(part, messages.SettingsPut) for part in before)
    )


def test_deleted_partitions_lose_their_slots(host: Host) -> None:
    host.commit(topic(partition(0, (2, 1)), partition(1, (2, 1)), partition(2, (1, 3))))
    assert host.report()[-1].topic.first_leader_epoch == 0
    host.commit(RetiredPartitionsRemoved(TOPIC, 1))
    (put,) = host.report()
    assert len(put.topic.partitions) == 1 and put.topic.partition_count == 1
    assert put.topic.first_leader_epoch == host.state.topics["t"].first_leader_epoch > 0
    host.apply_all()
    assert {entry[1] for entry in host.slots.values()} == {0}


def test_only_led_partitions_of_a_dead_worker_need_new_epochs(host: Host) -> None:
    host = Host(worker_count=1)
    host.commit(topic(partition(0, (2, 1)), partition(1, (1, 2))))
    actions = host.give(host_core.WorkerDied(0, 1))
    assert [action.partitions for action in actions if isinstance(action, host_core.RaiseEpochs)] == [((TOPIC, 0),)]
    assert [(action.index, action.leader_epoch) for action in actions if isinstance(action, host_core.AssignSlot)] == [
        (1, 0)
    ], "its successor owns what it followed, at once"
    host.give(host_core.SubscriberJoined("w0.2", messages.Subscribe("worker", 0, 2)))
    assert host.report("w0.2") == [], "it may not serve what its predecessor led"
    host.commit(LeaderEpochsRaised(TOPIC, (0,)), changed_partitions=(("t", (0,)),))
    assert isinstance(host.report("w0.2")[0], messages.Image)


def test_leaders_that_moved_away_meanwhile_delay_no_worker(host: Host) -> None:
    host = Host(worker_count=1)
    host.commit(topic(partition(0, (2, 1))))
    host.give(host_core.WorkerDied(0, 1))
    host.give(host_core.SubscriberJoined("w0.2", messages.Subscribe("worker", 0, 2)))
    host.commit(
        PartitionsChanged(TOPIC, (PartitionChange(0, raises_leader_epoch=True, leader=1, in_sync_replicas=(1,)),)),
        changed_partitions=(("t", (0,)),),
    )
    assert isinstance(host.report("w0.2")[0], messages.Image)


def test_a_restarted_controller_takes_over_stale_follower_slots(host: Host) -> None:
    host.commit(topic(partition(0, (2, 1)), partition(1, (1, 2))))
    seen = tuple(
        host_core.SlotSeen(slot, entry[0], entry[1], entry[3], entry[2], True, 0)
        for slot, entry in sorted(host.slots.items())
    )
    core = HostCore(NODE, 1, 2, 8, {DIRECTORY: 0})
    actions = core.handle(host_core.Started(host.state, seen, (), {0: 2, 1: 2}), 0)
    core.check()
    assert [action.partitions for action in actions if isinstance(action, host_core.RaiseEpochs)] == [((TOPIC, 0),)]
    assert [action.index for action in actions if isinstance(action, host_core.AssignSlot)] == [1]


def started_behind(slot_epoch: int, before: PartitionState) -> Host:
    """Host 2, whose worker and controller have died. The new controller's state, with `before`, has not
    reached the epoch of the slot yet.
    """
    host = Host(worker_count=1)
    host.state.apply(topic(before))
    host.slots = {0: (TOPIC, 0, 0, slot_epoch)}
    host.core = HostCore(NODE, 1, 1, 8, {DIRECTORY: 0})
    host.give(host_core.Started(host.state, (host_core.SlotSeen(0, TOPIC, 0, slot_epoch, 0, True, 0),), (), {0: 2}))
    host.give(host_core.SubscriberJoined("w0.2", messages.Subscribe("worker", 0, 2)))
    return host


def elect(host: Host, leader: int) -> list:
    change = PartitionChange(0, raises_leader_epoch=True, leader=leader, in_sync_replicas=(leader,))
    return host.commit(PartitionsChanged(TOPIC, (change,)), changed_partitions=(("t", (0,)),))


def raised(actions: list) -> list:
    return [action.partitions for action in actions if isinstance(action, host_core.RaiseEpochs)]


def test_a_state_that_lags_delays_no_worker_that_followed() -> None:
    """The slot belongs to an epoch in which another host leads, which the state reaches later."""
    host = started_behind(1, partition(0, (2, 1)))
    assert host.report("w0.2") == []
    assert not raised(elect(host, 1))
    assert isinstance(host.report("w0.2")[0], messages.Image)
    assert host.slots == {0: (TOPIC, 0, 0, 1)} and host.actions[0] == host_core.AssignSlot(0, TOPIC, 0, 0, 0, 1)


@pytest.mark.parametrize("leader_before", [1, 2])
def test_a_state_that_lags_hides_no_death_of_a_leader(leader_before: int) -> None:
    """The slot is the evidence of the death, and no worker leads in its epoch a second time."""
    host = started_behind(2, partition(0, (1, 2), leader_before))
    assert host.slots == {0: (TOPIC, 0, 0, 2)} and host.report("w0.2") == []
    assert not raised(elect(host, 1))
    assert raised(elect(host, 2)) == [((TOPIC, 0),)]
    assert not any(isinstance(action, host_core.AssignSlot) for action in host.actions)
    assert host.slots == {0: (TOPIC, 0, 0, 2)} and host.report("w0.2") == []
    host.commit(LeaderEpochsRaised(TOPIC, (0,)), changed_partitions=(("t", (0,)),))
    assert host.slots == {0: (TOPIC, 0, 0, 3)} and isinstance(host.report("w0.2")[0], messages.Image)


@pytest.mark.parametrize("leader_before", [1, 2])
def test_the_death_of_a_held_worker_shortens_no_wait(leader_before: int) -> None:
    host = started_behind(1, partition(0, (2, 1), leader_before))
    host.give(host_core.WorkerDied(0, 2))
    host.give(host_core.SubscriberJoined("w0.3", messages.Subscribe("worker", 0, 3)))
    assert host.slots == {0: (TOPIC, 0, 0, 1)}
    assert raised(elect(host, 2)) == [((TOPIC, 0),)]
    assert host.report("w0.3") == [], "the first worker led in this epoch"
    host.commit(LeaderEpochsRaised(TOPIC, (0,)), changed_partitions=(("t", (0,)),))
    assert isinstance(host.report("w0.3")[0], messages.Image)


def test_brokers_and_topics_of_one_version_come_in_one_message(host: Host) -> None:
    host.commit(topic(partition(0, (2, 1))))
    host.sent.clear()
    change = PartitionChange(0, raises_leader_epoch=True, in_sync_replicas=(2,), eligible_leader_replicas=(1,))
    host.commit(
        BrokerChanged(1, 1, fenced=True),
        PartitionsChanged(TOPIC, (change,)),
        brokers_changed=True,
        changed_partitions=(("t", (0,)),),
    )
    for client in ("acceptor", "w0", "w1"):
        (message,) = [message for to, message in host.sent if to == client]
        assert isinstance(message, messages.MessageList) and message.version == host.state.version
        brokers, put = message.parts
        assert [(broker.node_id, broker.fenced, broker.worker_count) for broker in brokers.brokers] == [
            (1, True, 2),
            (2, False, 2),
            (3, False, 2),
        ]
        assert put.partitions[0].eligible == [1]


def test_only_the_acceptor_learns_of_a_new_controller(host: Host) -> None:
    host.give(host_core.ControllerChanged(3))
    assert [message.controller_id for message in host.report()] == [3] and not host.sent
    assert host.give(host_core.ControllerChanged(3)) == []


def test_a_snapshot_replaces_everything(host: Host) -> None:
    host.commit(topic(partition(0, (2, 1)), partition(1, (2, 1))))
    host.apply_all()
    host.report()
    other = MetadataState()
    other.apply(ClusterCreated("cluster", 0))
    for _ in range(8):
        other.apply(BrokerRegistered(host.state.brokers[2]))
    other.apply(TopicCreated(TopicState("u", b"u" * 16, (partition(0, (2, 3)),), {})))
    for name in MetadataState.__slots__:
        setattr(host.state, name, getattr(other, name))
    host.give(host_core.StateReplaced())
    (image,) = host.report()
    assert [topic.name for topic in image.topics] == ["u"]
    host.apply_all()
    assert {entry[0] for entry in host.slots.values()} == {b"u" * 16}


def test_commands_for_partitions_elsewhere_are_refused(host: Host) -> None:
    host.commit(topic(partition(0, (1, 2)), partition(1, (1, 3))))
    host.give(host_core.CommandRequested("acceptor", 1, messages.DeleteRecords("t", 0, 5)))
    host.give(host_core.CommandRequested("acceptor", 2, messages.MoveReplica("t", 1, 0)))
    responses = {
        message.request_id: message.error for _, message in host.sent if isinstance(message, messages.Response)
    }
    assert responses == {1: ErrorCode.NOT_LEADER_OR_FOLLOWER, 2: ErrorCode.REPLICA_NOT_AVAILABLE}


@pytest.mark.parametrize("seed", range(40))
def test_random_moves_leave_exactly_the_slots_of_the_replicas_here(seed: int) -> None:
    """H6 and H1 are checked at every step; few slots, so some replicas wait."""
    dice = random.Random(seed)
    host = Host(slot_count=4)
    host.commit(topic(*(partition(index, tuple(dice.sample((1, 2, 3), 2))) for index in range(6))))
    for _ in range(60):
        index = dice.randrange(6)
        replicas = tuple(dice.sample((1, 2, 3), dice.randint(1, 3)))
        directories = tuple(
            DIRECTORY if node == NODE and dice.random() < 0.8 else "" if node == NODE else f"d{node}"
            for node in replicas
        )
        change = PartitionChange(
            index,
            raises_leader_epoch=True,
            replicas=replicas,
            directories=directories,
            in_sync_replicas=replicas[:1],
            leader=replicas[0],
        )
        host.commit(PartitionsChanged(TOPIC, (change,)), changed_partitions=(("t", (index,)),))
        for action in [action for action in host.actions if isinstance(action, host_core.ReportReplicaMoved)]:
            if dice.random() < 0.7:
                host.commit(
                    ReplicaMoved(action.topic_id, action.index, NODE, action.directory),
                    changed_partitions=(("t", (action.index,)),),
                )
        if dice.random() < 0.6:
            host.apply_all()
    host.apply_all()
    here = {
        p.index
        for p in host.state.topics["t"].partitions
        if NODE in p.replicas and p.directories[p.replicas.index(NODE)]
    }
    placed = {entry[1] for entry in host.slots.values()}
    assert placed <= here and len(placed) == min(4, len(here))


def test_the_directory_with_the_fewest_replicas_that_is_not_nearly_full_is_chosen() -> None:
    host = Host(slot_count=16)
    host.core._log_dirs.update({"e2": 1, "f2": 2})
    # the first has less than a tenth of the best
    host.give(host_core.DirectoriesMeasured({DIRECTORY: 50, "e2": 600, "f2": 900}))
    partitions = tuple(PartitionState(index, (NODE,), ("",), (NODE,), NODE, 0) for index in range(4))
    chosen = [
        action.directory
        for action in host.commit(TopicCreated(TopicState("t", TOPIC, partitions, {})))
        if isinstance(action, host_core.ReportReplicaMoved)
    ]
    assert chosen == ["f2", "e2", "f2", "e2"]
