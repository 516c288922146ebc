"""The controller's two cores, driven together as the controller process drives them, by seeded random histories; and named scenarios."""

import random

import msgspec
import pytest

from mqd.base.config import load_broker
from mqd.cluster import controller_messages as messages
from mqd.cluster import host_core, metadata_core
from mqd.cluster.config_rules import ConfigRules
from mqd.cluster.metadata_records import Record, decode_record, encode_record
from mqd.cluster.metadata_rules import Directory
from mqd.cluster.metadata_state import MetadataState, Snapshot
from mqd.protocol.errors import ErrorCode

NODE = 1
ACCEPTOR = "acceptor"


class World:
    """Both cores, a log that may refuse, workers that apply late, die and come back. Every event is followed by check() of both."""

    def __init__(self, seed: int = 0, worker_count: int = 3, slot_count: int = 40, static: dict[str, str] | None = None) -> None:
        self.random = random.Random(seed)
        self.log: list[Record] = []
        self.slots: dict[int, tuple] = {}  # the control segment
        self.worker_count, self.slot_count = worker_count, slot_count
        self.static = static or {}
        self.now_ms = 0
        self.answers: dict[int, messages.Answer] = {}
        self.incarnation = 7
        self.generations = dict.fromkeys(range(worker_count), 1)
        self.alive: set[int] = set(range(worker_count))
        self.views: dict[int, dict] = {}  # what each worker process has applied
        self.told: dict[int, dict] = {}  # what each worker was told to serve: (topic id, index) -> leader epoch
        self.lost: dict[int, dict] = {}  # the same of its predecessors
        self.request_id = 0
        self.start()

    def start(self) -> None:
        """A controller process starts over the same log and control segment."""
        state = MetadataState()
        for record in self.log:
            state.apply(decode_record(encode_record(record)))
        rules = ConfigRules(load_broker(None, {}, self.static))
        self.core = metadata_core.MetadataCore(state, NODE, rules, lambda: self.random.randbytes(16), self.slot_count)
        self.host = host_core.HostCore(NODE, NODE, self.worker_count, self.slot_count, {"directory-a": 0, "directory-b": 1})
        self.queue: list[metadata_core.Persist] = []
        self.applied_version = -1
        self.subscribed: dict[str, int] = {}
        self.inbox = {}
        directories = (Directory("directory-a", "/a", 1000, True), Directory("directory-b", "/b", 900, True))
        self.metadata(metadata_core.DirectoriesSeen(directories))
        self.metadata(metadata_core.BrokerStarted("127.0.0.1", 9092, None, self.incarnation, "cluster"), started=False)
        self.flush_log(started=False)
        seen = tuple(
            host_core.SlotSeen(slot, entry[0], entry[1], entry[4], entry[2], entry[5] != self.generations[entry[2]] if entry[2] != host_core.OWNER_NONE else False)
            for slot, entry in sorted(self.slots.items())
        )
        self.on_host(host_core.Started(self.core.committed, seen, (), {index: self.generations[index] for index in self.alive}))

    # -- carrying out ------------------------------------------------------------------------------------------------------

    def metadata(self, event, started: bool = True) -> None:
        for action in self.core.handle(event, self.now_ms):
            match action:
                case metadata_core.Persist():
                    self.queue.append(action)
                case metadata_core.Publish() if started:
                    self.on_host(action)
                case metadata_core.Reply():
                    assert action.answer.request_id not in self.answers, "answered twice"
                    answer = action.answer
                    if action.topic is not None:
                        answer = msgspec.structs.replace(answer, topic=self.host.topic_image(action.topic))
                    self.answers[answer.request_id] = answer
        self.core.check()

    def on_host(self, event) -> None:
        actions = self.host.handle(event, self.now_ms)
        self.host.check()
        for action in actions:
            match action:
                case host_core.AssignSlot():
                    generation = self.generations.get(action.owner, 0)
                    self.slots[action.slot] = (action.topic_id, action.index, action.owner, action.log_dir, action.leader_epoch, generation)
                case host_core.ClearSlot():
                    for index, view in self.views.items():
                        assert action.slot not in view["slots"].values(), f"worker {index} still uses slot {action.slot}"
                    del self.slots[action.slot]
                case host_core.Send():
                    if isinstance(action.message, messages.Answer):
                        self.answers[action.message.request_id] = action.message
                    else:
                        self.check_epochs(action)
                        self.inbox.setdefault(action.client, []).append(action.message)
                case host_core.AppliedEverywhere():
                    assert action.version > self.applied_version
                    known = self.views.keys() & self.alive  # without a view: just started, serves nothing
                    assert all(self.views[index]["version"] >= action.version for index in known), "a worker that lives does not have it"
                    self.applied_version = action.version
                    self.metadata(metadata_core.AppliedByHost(action.version))
                case host_core.RaiseEpochs():
                    self.metadata(metadata_core.LeadershipsLost(action.partitions))
                case host_core.RecordMove():
                    self.metadata(metadata_core.MoveCompleted(action.topic_id, action.index, action.directory))

    def check_epochs(self, send: host_core.Send) -> None:
        """Nobody is told to serve a partition in the epoch that died with its predecessor."""
        message = send.message
        parts = message.parts if isinstance(message, messages.Several) else [message]
        topics = message.topics if isinstance(message, messages.Image) else [part.topic for part in parts if isinstance(part, messages.TopicPut)]
        told = [(topic.topic_id, partition) for topic in topics for partition in topic.partitions]
        told += [(part.topic_id, partition) for part in parts if isinstance(part, messages.PartitionsPut) for partition in part.partitions]
        index = self.subscribed.get(send.client)
        for topic_id, partition in told:
            if partition.owner == index:
                key = (topic_id, partition.index)
                dead = partition.leader_epoch <= self.lost.get(index, {}).get(key, -1)
                assert not dead, f"{type(message).__name__}: worker {index} is to serve partition {partition.index} in epoch {partition.leader_epoch}, which died with its predecessor"
                self.told.setdefault(index, {})[key] = partition.leader_epoch

    def flush_log(self, fail: bool = False, started: bool = True) -> None:
        """What is queued goes to disk in one go, or not at all."""
        if not self.queue:
            return
        batch, self.queue = self.queue, []
        if fail:
            self.metadata(metadata_core.PersistFailed("no space left on device"))
            return
        for persist in batch:
            assert persist.base_offset == len(self.log)
            self.log += persist.records
            assert persist.version == len(self.log)
        self.metadata(metadata_core.Persisted(batch[-1].version), started)

    # -- the processes -----------------------------------------------------------------------------------------------------

    def join(self, index: int) -> str:
        """A connection of the worker process; its view, as long as the process lives, outlasts connections and controllers."""
        client = f"worker-{index}.{self.generations[index]}.{self.random.random()}"
        self.views.setdefault(index, {"slots": {}, "version": -1, "epochs": {}})
        self.subscribed[client] = index
        self.on_host(host_core.SubscriberJoined(client, messages.Subscribe("worker", index, self.generations[index])))
        return client

    def apply(self, client: str) -> None:
        """The worker takes in everything that was sent, then answers."""
        view = self.views[self.subscribed[client]]
        told = False
        flat = [part for message in self.inbox.pop(client, []) for part in (message.parts if isinstance(message, messages.Several) else [message])]
        for message in flat:
            match message:
                case messages.Image():
                    view["slots"] = {(t.topic_id, p.index): p.slot for t in message.topics for p in t.partitions if p.slot >= 0}
                    view["epochs"] = {(t.topic_id, p.index): p.leader_epoch for t in message.topics for p in t.partitions}
                case messages.TopicPut():
                    for partition in message.topic.partitions:
                        key = (message.topic.topic_id, partition.index)
                        assert view["epochs"].get(key, -1) <= partition.leader_epoch
                        view["epochs"][key] = partition.leader_epoch
                        if partition.slot >= 0:
                            assert view["slots"].get(key, partition.slot) == partition.slot
                            assert partition.slot not in {slot for other, slot in view["slots"].items() if other != key}, "slot reused too early"
                            view["slots"][key] = partition.slot
                case messages.PartitionsPut():
                    for partition in message.partitions:
                        key = (message.topic_id, partition.index)
                        assert view["epochs"].get(key, -1) <= partition.leader_epoch and view["slots"].get(key, -1) == partition.slot
                        view["epochs"][key] = partition.leader_epoch
                case messages.TopicRemoved():
                    for key in [key for key in view["slots"] if key[0] == message.topic_id]:
                        del view["slots"][key]
            assert view["version"] <= message.version
            view["version"], told = message.version, True
        if told:
            self.on_host(host_core.WorkerApplied(client, messages.Applied(view["version"], {})))

    def die(self, index: int, notice: bool = True) -> None:
        generation = self.generations[index]
        self.lost.setdefault(index, {}).update(self.told.pop(index, {}))
        self.generations[index] += 1
        self.alive.discard(index)
        for client in [client for client, other in self.subscribed.items() if other == index]:
            del self.subscribed[client]
            self.inbox.pop(client, None)
            self.on_host(host_core.SubscriberLeft(client))
        self.views.pop(index, None)
        if notice:
            self.on_host(host_core.WorkerDied(index, generation))

    def request(self, change, validate_only: bool = False) -> int:
        self.request_id += 1
        request = messages.Request(self.request_id, change, validate_only)
        if isinstance(change, messages.DeleteRecords | messages.MoveReplica):
            self.on_host(host_core.CommandRequested(ACCEPTOR, self.request_id, change))
        else:
            self.metadata(metadata_core.ChangeRequested(ACCEPTOR, request))
        return self.request_id

    def settle(self) -> None:
        """Every process lives, every message arrives."""
        for _ in range(10):
            self.now_ms += 1000
            self.metadata(metadata_core.Tick())
            self.flush_log()
            for index in range(self.worker_count):
                if index not in self.subscribed.values():
                    self.alive.add(index)
                    self.join(index)
            for client in list(self.subscribed):
                self.apply(client)

    def ask(self, change, validate_only: bool = False) -> messages.Answer:
        number = self.request(change, validate_only)
        self.settle()
        return self.answers[number]


def create(name: str, count: int = 2, factor: int = 1, config: dict | None = None, assignments: dict | None = None) -> messages.CreateTopic:
    return messages.CreateTopic(name, count, factor, assignments or {}, config or {})


def alter(name: str, operations: list[tuple], replace: bool = False, kind: int = 2) -> messages.AlterConfig:
    return messages.AlterConfig(kind, name, [messages.ConfigOperation(*operation) for operation in operations], replace)


@pytest.fixture
def world() -> World:
    world = World()
    world.settle()
    return world


# -- histories -----------------------------------------------------------------------------------------------------------------


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
        return alter(name, [("retention.ms", world.random.choice(["set", "delete"]), str(world.random.randint(0, 5)))], world.random.random() < 0.3)
    if dice < 0.9:
        quota = messages.QuotaOperation("producer_byte_rate", world.random.choice([None, 1.0, 2.0]))
        return messages.AlterClientQuota([("client-id", world.random.choice(["a", "b", None]))], [quota])
    if dice < 0.93:
        return messages.UpdateFeatures([messages.FeatureUpdate("metadata.version", world.random.randint(24, 30), world.random.randint(1, 3))])
    return messages.AllocateProducerIds(world.random.randint(1, 100))


def random_move(world: World) -> None:
    """A worker, alive or not any more, says that it has moved a partition, its own or another's."""
    partitions = [(topic.topic_id, partition.index) for topic in world.core.tail.topics.values() for partition in topic.partitions]
    client = world.random.choice([*sorted(world.subscribed), "worker-0.gone"])
    if partitions:
        world.on_host(host_core.MoveEnded(client, messages.MoveCompleted(*world.random.choice(partitions), world.random.randint(0, 2))))


@pytest.mark.parametrize("seed", range(60))
def test_random_history(seed: int) -> None:
    world = World(seed, worker_count=1 + seed % 4, slot_count=20)
    blocks: list[tuple[int, int]] = []
    allocations: dict[int, int] = {}
    for _ in range(250):
        dice = world.random.random()
        world.now_ms += world.random.randint(0, 300)
        if dice < 0.35:
            change = random_change(world)
            number = world.request(change, validate_only=world.random.random() < 0.1 and not isinstance(change, messages.AllocateProducerIds))
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
            random_move(world)
        elif dice < 0.97:
            world.metadata(metadata_core.Tick())
        else:
            if world.random.random() < 0.3:  # the whole host, not only the controller
                world.slots.clear()
                world.incarnation += 1
                world.generations = {index: generation + 1 for index, generation in world.generations.items()}
                world.alive = set()
                world.views = {}
            live = sorted(set(world.subscribed.values()) & world.alive)
            world.start()
            for index in live:  # the same processes subscribe again, over new connections
                world.join(index)
    world.settle()
    assert world.core.idle and not world.host._fenced and not world.host._slots.retiring
    # every request of the last controller was answered, and the log alone gives the same state
    replayed = MetadataState()
    for record in world.log:
        replayed.apply(decode_record(encode_record(record)))
    assert replayed == world.core.committed == world.core.tail
    snapshot = msgspec.msgpack.decode(msgspec.msgpack.encode(replayed.snapshot()), type=Snapshot)
    assert MetadataState.from_snapshot(snapshot) == replayed
    for number, count in allocations.items():
        answer = world.answers.get(number)
        if answer is not None and answer.error == 0:
            blocks.append((answer.offset, answer.offset + count))
    blocks.sort()
    assert all(first[1] <= second[0] for first, second in zip(blocks, blocks[1:])), "a producer id was given twice"
    expected = {(t.topic_id, p.index): p.leader_epoch for t in replayed.topics.values() for p in t.partitions}
    placed = {(entry[0], entry[1]): entry[4] for entry in world.slots.values()}
    assert placed == expected
    directories = {(t.topic_id, p.index): {"directory-a": 0, "directory-b": 1}[p.directories[0]] for t in replayed.topics.values() for p in t.partitions}
    assert {(entry[0], entry[1]): entry[3] for entry in world.slots.values()} == directories
    for view in world.views.values():
        assert {key: epoch for key, epoch in view["epochs"].items() if key in expected} == expected


# -- scenarios -----------------------------------------------------------------------------------------------------------------


def test_topic_is_answered_only_when_every_worker_has_it(world: World) -> None:
    number = world.request(create("orders", 3))
    world.flush_log()
    clients = sorted(world.subscribed)
    for client in clients[:-1]:
        world.apply(client)
    assert number not in world.answers
    world.apply(clients[-1])
    answer = world.answers[number]
    assert answer.error == 0 and answer.topic is not None
    assert sorted(partition.owner for partition in answer.topic.partitions) == [0, 1, 2]
    assert sorted(partition.log_dir for partition in answer.topic.partitions) == [0, 0, 1]


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
    """Nobody subscribed is not everybody served: the workers live, and are on their way back."""
    world.ask(create("orders", 3))
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
    for client in list(world.subscribed):  # the new leader epochs of the dead worker's partitions are news too
        world.apply(client)
    assert world.answers[number].error == 0


def test_without_any_living_worker_a_change_is_answered(world: World) -> None:
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
    world.ask(create("orders", 3))
    world.die(2)
    world.alive.add(2)
    client = world.join(2)
    assert client not in world.inbox, "it was told something before the new epoch was on disk"
    world.flush_log()
    image = world.inbox[client][0]
    assert {partition.leader_epoch for topic in image.topics for partition in topic.partitions if partition.owner == 2} == {1}
    assert {partition.leader_epoch for topic in image.topics for partition in topic.partitions if partition.owner != 2} == {0}


def test_new_epoch_is_tried_again_when_the_disk_was_full(world: World) -> None:
    world.ask(create("orders", 3))
    world.die(2)
    world.alive.add(2)
    client = world.join(2)
    world.flush_log(fail=True)
    assert client not in world.inbox
    world.metadata(metadata_core.Tick())
    world.flush_log()
    assert isinstance(world.inbox[client][0], messages.Image)


def test_death_before_a_controller_restart_is_noticed(world: World) -> None:
    world.ask(create("orders", 3))
    world.die(0, notice=False)
    world.start()
    world.settle()
    epochs = {entry[2]: entry[4] for entry in world.slots.values()}
    assert epochs == {0: 1, 1: 0, 2: 0}


def test_death_is_still_known_when_the_next_controller_dies_too(world: World) -> None:
    """Found by seed 35: assigning the slot anew, in the old epoch, erased the trace of the death."""
    world.ask(create("orders", 3))
    world.die(0, notice=False)
    world.start()
    world.start()  # before the new epoch was written
    world.settle()
    epochs = {entry[2]: entry[4] for entry in world.slots.values()}
    assert epochs == {0: 1, 1: 0, 2: 0}


def test_image_is_not_sent_between_two_publications_of_one_commit(world: World) -> None:
    """Found by seed 57: the committed state was ahead of what subscribers know, and a successor got the epoch that had died."""
    world.ask(create("orders", 3))
    world.request(create("other", 1))
    world.die(0)
    world.alive.add(0)
    client = world.join(0)
    world.flush_log()
    image = world.inbox[client][0]
    assert {partition.leader_epoch for topic in image.topics if topic.name == "orders" for partition in topic.partitions if partition.owner == 0} == {1}


def test_controller_restart_changes_nothing(world: World) -> None:
    world.ask(create("orders", 3))
    slots, log = dict(world.slots), list(world.log)
    world.start()
    world.settle()
    assert world.slots == slots and world.log == log


def test_host_restart_raises_every_leader_epoch(world: World) -> None:
    world.ask(create("orders", 3))
    world.incarnation += 1
    world.slots.clear()
    world.start()
    world.settle()
    assert {entry[4] for entry in world.slots.values()} == {1}


def test_slot_is_reused_only_after_every_worker_let_go(world: World) -> None:
    topic = world.ask(create("orders", 1)).topic
    slot = topic.partitions[0].slot
    number = world.request(messages.DeleteTopic("orders", None))
    world.flush_log()
    clients = sorted(world.subscribed)
    for client in clients[:-1]:
        world.apply(client)
    assert slot in world.slots and number not in world.answers
    world.apply(clients[-1])
    assert slot not in world.slots and world.answers[number].error == 0
    assert world.ask(create("other", 1)).topic.partitions[0].slot == slot


def test_slots_of_a_deletion_that_the_old_controller_did_not_finish(world: World) -> None:
    world.ask(create("orders", 2))
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
    world.ask(create("orders", 38))
    deletion = world.request(messages.DeleteTopic("orders", None))
    creation = world.request(create("other", 5))
    world.flush_log()
    assert deletion not in world.answers and creation not in world.answers
    assert all(len(message.topic.partitions) == 5 for box in world.inbox.values() for message in box if isinstance(message, messages.TopicPut))
    world.settle()
    assert world.answers[deletion].error == 0
    answer = world.answers[creation]
    assert answer.error == 0 and len(answer.topic.partitions) == 5 and all(partition.slot >= 0 for partition in answer.topic.partitions)


def test_torn_slot_goes_to_the_partition_that_lacks_one(world: World) -> None:
    image = world.ask(create("orders", 2)).topic
    host = host_core.HostCore(NODE, NODE, 3, 40, {"directory-a": 0, "directory-b": 1})
    whole, torn = image.partitions
    seen = host_core.SlotSeen(whole.slot, image.topic_id, 0, 0, whole.owner, False)
    actions = host.handle(host_core.Started(world.core.committed, (seen,), (torn.slot,), {0: 1, 1: 1, 2: 1}), 0)
    host.check()
    assigned = [action for action in actions if isinstance(action, host_core.AssignSlot)]
    assert [(action.slot, action.index) for action in assigned] == [(torn.slot, 1)]


def test_failed_write_leaves_nothing_behind(world: World) -> None:
    first, second = world.request(create("orders")), world.request(create("orders"))
    world.flush_log(fail=True)
    assert world.answers[first].error == world.answers[second].error == ErrorCode.KAFKA_STORAGE_ERROR
    assert not world.core.committed.topics and not world.slots
    assert world.ask(create("orders")).error == 0


def test_refusal_that_rests_on_an_unwritten_record_waits_for_it(world: World) -> None:
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
        (alter("orders.eu", [("cleanup.policy", "subtract", "delete")]), 40, "cleanup.policy"),
        (alter("1", [("num.partitions", "set", "3")], kind=4), 42, "num.partitions"),
        (alter("7", [("log.retention.ms", "set", "3")], kind=4), 42, "broker id"),
        (alter("x", [], kind=8), 42, "resource type"),
        (messages.AllocateProducerIds(0), 42, "block"),
    ],
)
def test_refusals(world: World, change, error: int, part: str) -> None:
    world.ask(create("orders.eu"))
    before = list(world.log)
    answer = world.ask(change)
    assert (answer.error, part in (answer.message or "")) == (error, True), answer
    assert world.log == before


def test_validate_only_changes_nothing_and_shows_the_topic(world: World) -> None:
    answer = world.ask(create("orders", 3, config={"retention.ms": "5"}), validate_only=True)
    assert answer.error == 0 and answer.topic is not None and len(answer.topic.partitions) == 3 and answer.topic.config == {"retention.ms": "5"}
    assert not world.core.committed.topics


def test_topic_configuration(world: World) -> None:
    world.ask(create("orders", 1, config={"retention.ms": "5"}))
    assert world.ask(alter("orders", [("segment.bytes", "set", "1048576"), ("cleanup.policy", "append", "delete")])).error == 0
    config = world.core.committed.topics["orders"].config
    assert config == {"retention.ms": "5", "segment.bytes": "1048576", "cleanup.policy": "delete"}
    assert world.ask(alter("orders", [("flush.ms", "set", "9")], replace=True)).error == 0
    assert world.core.committed.topics["orders"].config == {"flush.ms": "9"}
    assert world.ask(alter("orders", [("flush.ms", "delete", None)])).error == 0
    assert world.core.committed.topics["orders"].config == {}


def test_broker_configuration_of_one_goes_over_that_of_all(world: World) -> None:
    assert world.ask(alter("", [("log.retention.ms", "set", "1000")], kind=4)).error == 0
    assert world.ask(alter("1", [("log.retention.ms", "set", "2000")], kind=4)).error == 0
    assert world.core.committed.broker_config(NODE) == {"log.retention.ms": "2000"}
    assert world.ask(alter("1", [("log.retention.ms", "delete", None)], kind=4)).error == 0
    assert world.core.committed.broker_config(NODE) == {"log.retention.ms": "1000"}


def test_deletion_can_be_disabled() -> None:
    world = World(static={"delete.topic.enable": "false"})
    world.settle()
    world.ask(create("orders"))
    assert world.ask(messages.DeleteTopic("orders", None)).error == ErrorCode.TOPIC_DELETION_DISABLED


def moved(world: World, image: messages.TopicImage, client: str, index: int = 0) -> None:
    world.on_host(host_core.MoveEnded(client, messages.MoveCompleted(image.topic_id, index, 1 - image.partitions[index].log_dir)))


def client_of(world: World, worker: int) -> str:
    return next(client for client, index in world.subscribed.items() if index == worker)


def test_a_moved_partition_counts_when_it_is_on_disk_and_all_are_told(world: World) -> None:
    image = world.ask(create("orders", 1)).topic
    (before,) = image.partitions
    client = client_of(world, before.owner)
    moved(world, image, client)
    assert world.inbox.get(client, []) == [] and world.slots[before.slot][3] == before.log_dir
    world.flush_log()
    assert world.slots[before.slot][3] == 1 - before.log_dir
    for name in world.subscribed:
        (message,) = world.inbox[name]
        assert isinstance(message, messages.TopicPut) and message.topic.partitions[0].log_dir == 1 - before.log_dir
    log = list(world.log)
    moved(world, image, client)  # said again, as after a reconnection
    world.settle()
    assert world.log == log


def test_only_the_worker_that_lives_and_owns_it_says_where_a_partition_lies(world: World) -> None:
    image = world.ask(create("orders", 1)).topic
    owner = image.partitions[0].owner
    log = list(world.log)
    moved(world, image, client_of(world, (owner + 1) % 3))
    moved(world, image, ACCEPTOR)
    old = client_of(world, owner)
    world.die(owner)
    moved(world, image, old)
    world.alive.add(owner)
    moved(world, image, world.join(owner))  # held until its new epoch is on disk: it has served nothing yet
    world.flush_log()
    assert {type(record).__name__ for record in world.log[len(log) :]} == {"LeaderEpochsRaised"}


def test_a_successor_is_told_of_the_move_that_its_predecessor_completed(world: World) -> None:
    image = world.ask(create("orders", 1)).topic
    owner = image.partitions[0].owner
    moved(world, image, client_of(world, owner))
    world.die(owner)
    world.alive.add(owner)
    client = world.join(owner)
    assert client not in world.inbox
    world.flush_log()
    (first, *_) = world.inbox[client]
    assert isinstance(first, messages.Image) and first.topics[0].partitions[0].log_dir == 1 - image.partitions[0].log_dir


def test_a_replica_is_moved_by_its_owner(world: World) -> None:
    image = world.ask(create("orders", 1)).topic
    assert world.ask(messages.MoveReplica("orders", 0, 7)).error == ErrorCode.KAFKA_STORAGE_ERROR, "nobody could record that it lies there"
    world.request(messages.MoveReplica("orders", 0, 1))
    command = world.inbox[client_of(world, image.partitions[0].owner)][-1]
    assert (command.kind, command.slot, command.offset) == ("move_replica", image.partitions[0].slot, 1)


def test_quotas_and_features_are_told_to_all(world: World) -> None:
    quota = messages.AlterClientQuota([("client-id", "c")], [messages.QuotaOperation("producer_byte_rate", 5.0)])
    number = world.request(quota)
    world.flush_log()
    assert number not in world.answers
    assert {message.client_quotas[0].quotas["producer_byte_rate"] for box in world.inbox.values() for message in box} == {5.0}
    world.settle()
    assert world.answers[number].error == 0
    log = list(world.log)
    assert world.ask(quota).error == 0 and world.log == log
    assert world.ask(messages.UpdateFeatures([messages.FeatureUpdate("metadata.version", 28, 2), messages.FeatureUpdate("nothing", 1, 1)])).error == ErrorCode.INVALID_UPDATE_VERSION
    assert world.log == log, "all or none"


def test_delete_records_goes_to_the_owner_and_back(world: World) -> None:
    image = world.ask(create("orders", 3)).topic
    number = world.request(messages.DeleteRecords("orders", 1, 77))
    client, command = next((client, box[-1]) for client, box in world.inbox.items() if box and isinstance(box[-1], messages.Command))
    assert world.subscribed[client] == image.partitions[1].owner and command.slot == image.partitions[1].slot and command.offset == 77
    other = next(name for name in world.subscribed if name != client)
    world.on_host(host_core.CommandEnded(other, messages.CommandDone(command.command_id, 0, 1)))
    assert number not in world.answers  # only the worker that was asked may answer
    world.on_host(host_core.CommandEnded(client, messages.CommandDone(command.command_id, 0, 70)))
    assert world.answers[number].error == 0 and world.answers[number].offset == 70


def test_delete_records_ends_with_its_worker(world: World) -> None:
    image = world.ask(create("orders", 1)).topic
    number = world.request(messages.DeleteRecords("orders", 0, -1))
    world.die(image.partitions[0].owner)
    assert world.answers[number].error == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert world.ask(messages.DeleteRecords("orders", 4, -1)).error == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_partition_in_a_directory_that_is_gone_has_no_owner(world: World) -> None:
    world.ask(create("orders", 2))
    host = host_core.HostCore(NODE, NODE, 3, 40, {"directory-a": 0})
    actions = host.handle(host_core.Started(world.core.committed, (), (), {}), 0)
    owners = sorted(action.owner for action in actions if isinstance(action, host_core.AssignSlot))
    assert len(owners) == 2 and owners[-1] == host_core.OWNER_NONE and owners[0] != host_core.OWNER_NONE
