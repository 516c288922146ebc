"""The controller's two cores in seeded random histories; and named scenarios of topics, workers and
restarts.
"""

import msgspec
import pytest

from mqd.cluster.host import core as host_core
from mqd.cluster.host import messages
from mqd.cluster.metadata import core as metadata_core
from mqd.cluster.metadata import features
from mqd.cluster.metadata.records import DelegationToken, ScramCredential, decode_record, encode_record
from mqd.cluster.metadata.rules import settings as settings_rules
from mqd.cluster.metadata.state import MetadataState, Snapshot
from mqd.protocol.errors import ErrorCode
from mqd.security.acl import AclBinding, AclFilter
from tests.tiers import quick
from tests.unit.controller.cores_world import NODE, World, alter, create


@pytest.fixture
def world() -> World:
    world = World()
    world.settle()
    return world


# -- histories -------------------------------------------------------------------------------------


def random_change(world: World):
    names = ["orders", "orders.eu", "orders_eu", "__consumer_offsets", "a", "b", "..", "bad name"]
    name, dice = world.random.choice(names), world.random.random()
    if dice < 0.35:
        return create(name, world.random.choice([1, 2, 5, -1, 0, 50]), world.random.choice([1, 1, 1, -1, 2]))
    if dice < 0.55:
        return messages.DeleteTopic(name, None)
    if dice < 0.7:
        return messages.AddPartitions(name, world.random.randint(0, 9), None)
    if dice < 0.85:
        return alter(
            name,
            [("retention.ms", world.random.choice(["set", "delete"]), str(world.random.randint(0, 5)))],
            world.random.random() < 0.3,
        )
    if dice < 0.9:
        quota = messages.QuotaOperation("producer_byte_rate", world.random.choice([None, 1.0, 2.0]))
        return messages.AlterClientQuota([("client-id", world.random.choice(["a", "b", None]))], [quota])
    if dice < 0.93:
        return messages.UpdateFeatures(
            [messages.FeatureUpdate("metadata.version", world.random.randint(24, 30), world.random.randint(1, 3))]
        )
    return messages.AllocateProducerIds(world.random.randint(1, 100))


def random_security_change(world: World):
    dice, users = world.random.random(), ["u", "v"]
    if dice < 0.5:
        bindings = [
            AclBinding(2, 3, world.random.choice("abc"), f"User:{world.random.choice(users)}", "*", 3, 3)
            for _ in range(world.random.randint(1, 3))
        ]
        return messages.CreateAcls(bindings)
    if dice < 0.75:
        return messages.DeleteAcls([AclFilter(name=world.random.choice("abc")), AclFilter(principal="User:u")])
    if world.random.random() < 0.3:
        token_id, now_ms = world.random.choice("xyz"), world.now_ms + 1
        if dice < 0.9:
            token = DelegationToken(token_id, "User:u", "User:u", (), now_ms, now_ms + 5000, now_ms + 1000)
            return messages.CreateDelegationToken(token)
        return messages.SetTokenExpiry(token_id, "User:u", now_ms, world.random.choice([-1, 500]), dice < 0.95)
    credential = ScramCredential(world.random.choice(users), 1, b"salt", 4096, world.random.randbytes(4), b"s")
    removals = [(world.random.choice(users), 2)] if dice < 0.8 else [(world.random.choice(users), 1)]
    return messages.AlterScramCredentials(*(([], [credential]) if dice < 0.9 else (removals, [])))


def random_move(world: World) -> None:
    """A worker, alive or not, reports that it has moved a partition, its own or another's. A worker
    has opened its partitions before it moves one.
    """
    partitions = [
        (topic.topic_id, partition.index)
        for topic in world.core.proposed.topics.values()
        for partition in topic.partitions
    ]
    known = {index for index, view in world.views.items() if view["version"] >= 0}
    opened = [client for client, index in world.subscribed.items() if index in known]
    client = world.random.choice([*sorted(opened), "worker-0.gone"])
    if partitions:
        world.on_host(
            host_core.MoveEnded(
                client, messages.MoveCompleted(*world.random.choice(partitions), world.random.randint(0, 2))
            )
        )


@pytest.mark.parametrize("seed", quick(range(60), range(20)))
def test_random_history(seed: int) -> None:
    random_history(seed)


@pytest.mark.parametrize("seed", quick(range(20), range(6)))
def test_random_history_of_rules_and_credentials(seed: int) -> None:
    random_history(seed, security=0.5)


def random_history(seed: int, security: float = 0) -> None:
    """`security`: share of changes to rules and credentials; then no replica moves."""
    world = World(seed, worker_count=1 + seed % 4, slot_count=20)
    if security:
        world.settle()
        level = messages.FeatureUpdate(features.MQD_VERSION, 3, settings_rules.UPGRADE)
        assert world.send_request(messages.UpdateFeatures([level])).error == 0
    blocks: list[tuple[int, int]] = []
    allocations: dict[int, int] = {}
    for _ in range(250):
        dice = world.random.random()
        world.now_ms += world.random.randint(0, 300)
        if dice < 0.35:
            is_security = security and world.random.random() < security
            change = random_security_change(world) if is_security else random_change(world)
            number = world.request(
                change,
                validate_only=world.random.random() < 0.1 and not isinstance(change, messages.AllocateProducerIds),
            )
            if isinstance(change, messages.AllocateProducerIds):
                allocations[number] = change.count
        elif dice < 0.6:
            world.flush_log(fail=world.random.random() < 0.15)
        elif dice < 0.8 and world.subscribed:
            world.apply(world.random.choice(sorted(world.subscribed)))
        elif dice < 0.86:
            world.die(world.random.randrange(world.worker_count), notice=world.random.random() < 0.7)
        elif dice < 0.93:
            absent = sorted(set(range(world.worker_count)) - set(world.subscribed.values()))
            if absent:
                index = world.random.choice(absent)
                world.alive.add(index)
                world.join(index)
        elif dice < 0.96:
            if not security:
                random_move(world)
        elif dice < 0.97:
            world.metadata(metadata_core.Tick(world.now_ms))
        else:
            if world.random.random() < 0.3:  # the whole host, not only the controller
                world.slots.clear()
                world.incarnation += 1
                world.generations = {index: generation + 1 for index, generation in world.generations.items()}
                world.alive = set()
                world.views = {}
            live = sorted(set(world.subscribed.values()) & world.alive)
            if not security:
                random_move(world)
            world.die_writing(world.random.randint(0, len(world.queue)))
            for index in live:  # the same processes subscribe again, over new connections
                world.join(index)
    world.settle()
    assert world.core.is_idle and not world.host._lost_epochs and not world.host._slots.retiring
    # every request of the last controller has a response, and the log alone gives the same state
    replayed = MetadataState()
    for record in world.log:
        replayed.apply(decode_record(encode_record(record)))
    assert replayed == world.core.committed == world.core.proposed
    snapshot = msgspec.msgpack.decode(msgspec.msgpack.encode(replayed.snapshot()), type=Snapshot)
    assert MetadataState.from_snapshot(snapshot) == replayed
    for index in sorted(set(world.subscribed.values())):
        assert world.views[index]["rules"] == replayed.acls, "a worker has other rules"
    for number, count in allocations.items():
        response = world.answers.get(number)
        if response is not None and response.error == 0:
            blocks.append((response.offset, response.offset + count))
    blocks.sort()
    assert all(first[1] <= second[0] for first, second in zip(blocks, blocks[1:])), "a producer id was given twice"
    expected = {(t.topic_id, p.index): p.leader_epoch for t in replayed.topics.values() for p in t.partitions}
    placed = {(entry[0], entry[1]): entry[4] for entry in world.slots.values()}
    assert placed == expected
    directories = {
        (t.topic_id, p.index): {"directory-a": 0, "directory-b": 1}[p.directories[0]]
        for t in replayed.topics.values()
        for p in t.partitions
    }
    assert {(entry[0], entry[1]): entry[3] for entry in world.slots.values()} == directories
    for view in world.views.values():
        assert {key: epoch for key, epoch in view["epochs"].items() if key in expected} == expected


# -- scenarios -------------------------------------------------------------------------------------


def test_a_topic_is_acknowledged_only_when_every_worker_has_it(world: World) -> None:
    number = world.request(create("orders", 3))
    world.flush_log()
    clients = sorted(world.subscribed)
    for client in clients[:-1]:
        world.apply(client)
    assert number not in world.answers
    world.apply(clients[-1])
    response = world.answers[number]
    assert response.error == 0 and response.topic is not None
    assert sorted(partition.owner for partition in response.topic.partitions) == [0, 1, 2]
    assert sorted(partition.log_dir for partition in response.topic.partitions) == [0, 0, 1]


def test_dead_worker_is_not_waited_for(world: World) -> None:
    number = world.request(create("orders", 3))
    world.flush_log()
    alive = [client for client, index in world.subscribed.items() if index != 1]
    for client in alive:
        world.apply(client)
    assert number not in world.answers
    world.die(1)
    assert world.answers[number].error == 0


def test_after_a_controller_restart_a_change_waits_for_workers_that_have_not_subscribed_again(world: World) -> None:
    """Without subscribers it must not count as done: the workers are alive, and will subscribe
    again.
    """
    world.send_request(create("orders", 3))
    live = sorted(set(world.subscribed.values()))
    world.start()
    number = world.request(create("other", 3))
    world.flush_log()
    assert number not in world.answers
    for index in live[:-1]:
        world.apply(world.join(index))
    assert number not in world.answers, "the last one has not even subscribed"
    world.die(live[-1])
    world.flush_log()
    for client in list(world.subscribed):  # the new leader epochs of the dead worker's partitions are sent too
        world.apply(client)
    assert world.answers[number].error == 0


def test_without_live_workers_a_change_is_acknowledged(world: World) -> None:
    for index in range(world.worker_count):
        world.die(index)
    number = world.request(create("orders", 3))
    world.flush_log()
    assert world.answers[number].error == 0


def test_stuck_worker_ends_in_a_timeout(world: World) -> None:
    number = world.request(create("orders"))
    world.flush_log()
    world.now_ms += metadata_core.APPLY_WAIT_MS_MAX
    world.metadata(metadata_core.Tick())
    assert world.answers[number].error == ErrorCode.REQUEST_TIMED_OUT


def test_successor_of_a_dead_worker_gets_its_image_with_new_epochs(world: World) -> None:
    world.send_request(create("orders", 3))
    world.die(2)
    world.alive.add(2)
    client = world.join(2)
    assert client not in world.inbox, "it received a response before the new epoch was on disk"
    world.flush_log()
    image = world.inbox[client][0]
    assert {
        partition.leader_epoch for topic in image.topics for partition in topic.partitions if partition.owner == 2
    } == {1}
    assert {
        partition.leader_epoch for topic in image.topics for partition in topic.partitions if partition.owner != 2
    } == {0}


def test_a_new_epoch_is_retried_when_the_disk_was_full(world: World) -> None:
    world.send_request(create("orders", 3))
    world.die(2)
    world.alive.add(2)
    client = world.join(2)
    world.flush_log(fail=True)
    assert client not in world.inbox
    world.metadata(metadata_core.Tick())
    world.flush_log()
    assert isinstance(world.inbox[client][0], messages.Image)


def test_death_before_a_controller_restart_is_noticed(world: World) -> None:
    world.send_request(create("orders", 3))
    world.die(0, notice=False)
    world.start()
    world.settle()
    epochs = {entry[2]: entry[4] for entry in world.slots.values()}
    assert epochs == {0: 1, 1: 0, 2: 0}


def test_a_death_is_still_noticed_when_the_next_controller_dies_too(world: World) -> None:
    """Found by seed 35: assigning the slot again, in the old epoch, erased the evidence of the
    death.
    """
    world.send_request(create("orders", 3))
    world.die(0, notice=False)
    world.start()
    world.start()  # before the new epoch was written
    world.settle()
    epochs = {entry[2]: entry[4] for entry in world.slots.values()}
    assert epochs == {0: 1, 1: 0, 2: 0}


def test_image_is_not_sent_between_two_publications_of_one_commit(world: World) -> None:
    """Found by seed 57: the committed state was ahead of the subscribers', and a successor got the
    epoch of its dead predecessor.
    """
    world.send_request(create("orders", 3))
    world.request(create("other", 1))
    world.die(0)
    world.alive.add(0)
    client = world.join(0)
    world.flush_log()
    image = world.inbox[client][0]
    assert {
        partition.leader_epoch
        for topic in image.topics
        if topic.name == "orders"
        for partition in topic.partitions
        if partition.owner == 0
    } == {1}


def test_controller_restart_changes_nothing(world: World) -> None:
    world.send_request(create("orders", 3))
    slots, log = dict(world.slots), list(world.log)
    world.start()
    world.settle()
    assert world.slots == slots and world.log == log


def test_host_restart_raises_every_leader_epoch(world: World) -> None:
    world.send_request(create("orders", 3))
    world.incarnation += 1
    world.slots.clear()
    world.start()
    world.settle()
    assert {entry[4] for entry in world.slots.values()} == {1}


def test_a_slot_is_reused_only_after_every_worker_released_it(world: World) -> None:
    topic = world.send_request(create("orders", 1)).topic
    slot = topic.partitions[0].slot
    number = world.request(messages.DeleteTopic("orders", None))
    world.flush_log()
    clients = sorted(world.subscribed)
    for client in clients[:-1]:
        world.apply(client)
    assert slot in world.slots and number not in world.answers
    world.apply(clients[-1])
    assert slot not in world.slots and world.answers[number].error == 0
    assert world.send_request(create("other", 1)).topic.partitions[0].slot == slot


def test_slots_of_a_deletion_that_the_old_controller_did_not_finish(world: World) -> None:
    world.send_request(create("orders", 2))
    world.request(messages.DeleteTopic("orders", None))
    world.flush_log()
    assert len(world.slots) == 2
    world.start()
    world.join(0)
    world.join(1)
    for client in list(world.subscribed):
        world.apply(client)
    assert len(world.slots) == 2  # worker 2 may still use them
    world.settle()
    assert not world.slots


def test_full_table_waits_for_slots_of_a_deletion(world: World) -> None:
    world.send_request(create("orders", 38))
    deletion = world.request(messages.DeleteTopic("orders", None))
    creation = world.request(create("other", 5))
    world.flush_log()
    assert deletion not in world.answers and creation not in world.answers
    assert all(
        len(message.topic.partitions) == 5
        for box in world.inbox.values()
        for message in box
        if isinstance(message, messages.TopicPut)
    )
    world.settle()
    assert world.answers[deletion].error == 0
    response = world.answers[creation]
    assert (
        response.error == 0
        and len(response.topic.partitions) == 5
        and all(partition.slot >= 0 for partition in response.topic.partitions)
    )


def moved_by_its_owner(world: World) -> tuple[messages.TopicImage, messages.PartitionImage]:
    """A topic of one partition, before its owner reports that it has moved to the other directory;
    nothing of that is written yet.
    """
    image = world.send_request(create("orders", 1)).topic
    (partition,) = image.partitions
    worker = next(client for client, index in world.subscribed.items() if index == partition.owner)
    world.on_host(host_core.MoveEnded(worker, messages.MoveCompleted(image.topic_id, 0, 1 - partition.log_dir)))
    return image, partition


@pytest.mark.parametrize("dies", [False, True])
def test_a_written_move_of_a_dead_controller_is_completed_by_the_next(world: World, dies: bool) -> None:
    """The metadata has it in the other directory, the slot in the old one: readers use the slot,
    and the old directory's files are deleted.
    """
    image, partition = moved_by_its_owner(world)
    if dies:  # its slot is the evidence: it stays as it is until there is a newer epoch
        world.die(partition.owner, notice=False)
    before = world.slots[partition.slot]
    world.die_writing()
    assert world.core.committed.topics["orders"].partitions[0].directories == (
        ["directory-a", "directory-b"][1 - partition.log_dir],
    )
    placed = world.slots[partition.slot]
    assert placed == before if dies else placed == (image.topic_id, 0, partition.owner, 1 - partition.log_dir, 0, 1)
    world.settle()
    assert world.slots[partition.slot][2:5] == (partition.owner, 1 - partition.log_dir, int(dies))


@pytest.mark.parametrize("noticed", [True, False])
def test_a_move_does_not_hide_the_death_of_the_worker_that_moved_it(world: World, noticed: bool) -> None:
    """The worker dies between its report and the publication, the controller before the new epoch
    is written: the next controller only has the slot.
    """
    _, partition = moved_by_its_owner(world)
    world.die(partition.owner, notice=noticed)
    moved, world.queue = world.queue[:1], world.queue[1:]
    raised, world.queue = world.queue, moved
    world.flush_log()
    world.queue = raised
    world.die_writing(0)
    world.settle()  # check_epochs()
    assert world.slots[partition.slot][2:5] == (partition.owner, 1 - partition.log_dir, 1)


@pytest.mark.parametrize("was_offline", [True, False])
def test_a_log_directory_usable_only_to_the_next_controller(world: World, was_offline: bool) -> None:
    image = world.send_request(create("orders", 1)).topic
    (partition,) = image.partitions
    owner, place = (host_core.OWNER_NONE, 0) if was_offline else (partition.owner, partition.log_dir)
    usable = {"directory-a": 0, "directory-b": 1} if was_offline else {}
    host = host_core.HostCore(NODE, NODE, 3, 40, usable)
    actions = host.handle(
        host_core.Started(
            world.core.committed,
            (host_core.SlotSeen(partition.slot, image.topic_id, 0, 0, owner, False, place),),
            (),
            {0: 1, 1: 1, 2: 1},
        ),
        0,
    )
    host.check()
    expected = (partition.owner, partition.log_dir) if was_offline else (host_core.OWNER_NONE, host_core.LOG_DIR_NONE)
    assert [
        (action.slot, action.owner, action.log_dir) for action in actions if isinstance(action, host_core.AssignSlot)
    ] == [(partition.slot, *expected)]


def test_torn_slot_goes_to_the_partition_that_lacks_one(world: World) -> None:
    image = world.send_request(create("orders", 2)).topic
    host = host_core.HostCore(NODE, NODE, 3, 40, {"directory-a": 0, "directory-b": 1})
    whole, torn = image.partitions
    seen = host_core.SlotSeen(whole.slot, image.topic_id, 0, 0, whole.owner, False, whole.log_dir)
    actions = host.handle(host_core.Started(world.core.committed, (seen,), (torn.slot,), {0: 1, 1: 1, 2: 1}), 0)
    host.check()
    assigned = [action for action in actions if isinstance(action, host_core.AssignSlot)]
    assert [(action.slot, action.index) for action in assigned] == [(torn.slot, 1)]


def test_a_failed_write_has_no_effect(world: World) -> None:
    first, second = world.request(create("orders")), world.request(create("orders"))
    world.flush_log(fail=True)
    assert world.answers[first].error == world.answers[second].error == ErrorCode.KAFKA_STORAGE_ERROR
    assert not world.core.committed.topics and not world.slots
    assert world.send_request(create("orders")).error == 0


def test_a_refusal_based_on_an_unwritten_record_waits_for_it(world: World) -> None:
    world.request(create("orders"))
    second = world.request(create("orders"))
    assert second not in world.answers
    world.flush_log()
    assert world.answers[second].error == ErrorCode.TOPIC_ALREADY_EXISTS


@pytest.mark.parametrize(
    ("change", "error", "part"),
    [
        (create(""), 17, "empty"),
        (create("."), 17, "'.'"),
        (create("a" * 250), 17, "249"),
        (create("tëst"), 17, "alphanumerics"),
        (create("__cluster_metadata"), 17, "prohibited"),
        (create("orders.eu"), 36, "already exists"),
        (create("orders_eu"), 17, "collides"),
        (create("new", 0), 37, "non-positive"),
        (create("new", -2), 37, "non-positive"),
        (create("new", 1000), 37, "room"),
        (create("new", 1, 0), 38, "larger than 0"),
        (create("new", 1, 3), 38, "only 1 broker(s)"),
        (create("new", 1, config={"retention.ms": None}), 40, "retention.ms"),
        (create("new", 1, config={"retention.ms": "soon"}), 40, "retention.ms"),
        (create("new", 1, config={"retension.ms": "1"}), 40, "retention.ms"),
        (create("new", 2, assignments={0: [1]}), 42, "numPartitions"),
        (create("new", -1, 1, assignments={0: [1]}), 42, "replication factor"),
        (create("new", -1, -1, assignments={1: [1]}), 39, "consecutive"),
        (create("new", -1, -1, assignments={0: []}), 39, "empty"),
        (create("new", -1, -1, assignments={0: [1, 1]}), 39, "more than once"),
        (create("new", -1, -1, assignments={0: [2]}), 39, "broker 2"),
        (messages.AddPartitions("nothing", 3, None), 3, "nothing"),
        (messages.AddPartitions("orders.eu", 2, None), 37, "already has 2"),
        (messages.AddPartitions("orders.eu", 1, None), 37, "would not be an increase"),
        (messages.AddPartitions("orders.eu", 4, [[1]]), 39, "2 additional"),
        (messages.AddPartitions("orders.eu", 3, [[5]]), 39, "broker 5"),
        (messages.DeleteTopic("nothing", None), 3, "nothing"),
        (messages.DeleteTopic(None, b"x" * 16), 100, "topic ID"),
        (alter("nothing", [("retention.ms", "set", "1")]), 3, "nothing"),
        (alter("orders.eu", [("retention.ms", "set", "1"), ("retention.ms", "delete", None)]), 42, "duplicate"),
        (alter("orders.eu", [("retention.ms", "set", None)]), 42, "Null"),
        (alter("orders.eu", [("retention.ms", "append", "1")]), 40, "LIST"),
        (alter("orders.eu", [("unheard.of", "set", "1")]), 40, "unheard.of"),
        (alter("orders.eu", [("cleanup.policy", "append", "burn")]), 40, "cleanup.policy"),
        (alter("1", [("num.partitions", "set", "3")], kind=4), 42, "num.partitions"),
        (alter("7", [("log.retention.ms", "set", "3")], kind=4), 42, "broker id"),
        (alter("x", [], kind=8), 42, "resource type"),
        (messages.AllocateProducerIds(0), 42, "block"),
    ],
)
def test_refusals(world: World, change, error: int, part: str) -> None:
    world.send_request(create("orders.eu"))
    before = list(world.log)
    response = world.send_request(change)
    assert (response.error, part in (response.message or "")) == (error, True), response
    assert world.log == before


def test_validate_only_changes_nothing_and_shows_the_topic(world: World) -> None:
    response = world.send_request(create("orders", 3, config={"retention.ms": "5"}), validate_only=True)
    assert (
        response.error == 0
        and response.topic is not None
        and len(response.topic.partitions) == 3
        and response.topic.config == {"retention.ms": "5"}
    )
    assert not world.core.committed.topics


def test_topic_configuration(world: World) -> None:
    world.send_request(create("orders", 1, config={"retention.ms": "5"}))
    assert (
        world.send_request(
            alter("orders", [("segment.bytes", "set", "1048576"), ("cleanup.policy", "append", "delete")])
        ).error
        == 0
    )
    config = world.core.committed.topics["orders"].config
    assert config == {"retention.ms": "5", "segment.bytes": "1048576", "cleanup.policy": "delete"}
    assert world.send_request(alter("orders", [("flush.ms", "set", "9")], replace=True)).error == 0
    assert world.core.committed.topics["orders"].config == {"flush.ms": "9"}
    assert world.send_request(alter("orders", [("flush.ms", "delete", None)])).error == 0
    assert world.send_request(alter("orders", [("nothing.of.the.kind", "delete", None)])).error == 0, "as in Kafka"
    # as kafka-reassign-partitions does to brokers
    for verb, value in (("set", "1000000"), ("delete", None), ("delete", None)):
        throttles = (
            "leader.replication.throttled.rate",
            "follower.replication.throttled.rate",
            "replica.alter.log.dirs.io.max.bytes.per.second",
        )
        assert world.send_request(alter("1", [(name, verb, value) for name in throttles], kind=4)).error == 0
    assert world.core.committed.topics["orders"].config == {}


def test_one_brokers_configuration_overrides_that_of_all(world: World) -> None:
    assert world.send_request(alter("", [("log.retention.ms", "set", "1000")], kind=4)).error == 0
    assert world.send_request(alter("1", [("log.retention.ms", "set", "2000")], kind=4)).error == 0
    assert world.core.committed.broker_config(NODE) == {"log.retention.ms": "2000"}
    assert world.send_request(alter("1", [("log.retention.ms", "delete", None)], kind=4)).error == 0
    assert world.core.committed.broker_config(NODE) == {"log.retention.ms": "1000"}


def test_deletion_can_be_disabled() -> None:
    world = World(static={"delete.topic.enable": "false"})
    world.settle()
    world.send_request(create("orders"))
    assert world.send_request(messages.DeleteTopic("orders", None)).error == ErrorCode.TOPIC_DELETION_DISABLED
