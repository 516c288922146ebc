"""The controller's two cores of one host, driven together as by the controller process, with
workers played by the test.
"""

import random

import msgspec

from mqd.base.config import load_broker
from mqd.cluster.broker import messages as broker_messages
from mqd.cluster.host import core as host_core
from mqd.cluster.host import messages
from mqd.cluster.metadata import core as metadata_core
from mqd.cluster.metadata.records import Record, decode_record, encode_record
from mqd.cluster.metadata.rules.configs import ConfigRules
from mqd.cluster.metadata.rules.placement import INTERNAL_SLOTS, Directory
from mqd.cluster.metadata.state import MetadataState

NODE = 1
ACCEPTOR = "acceptor"


class World:
    """Both cores, a log that may refuse, workers that apply late, die and are restarted. Every
    event is followed by check() of both.
    """

    def __init__(
        self, seed: int = 0, worker_count: int = 3, slot_count: int = 40, static: dict[str, str] | None = None
    ) -> None:
        self.random = random.Random(seed)
        self.log: list[Record] = []
        self.slots: dict[int, tuple] = {}  # the control segment
        self.worker_count, self.slot_count = worker_count, slot_count
        self.static = static or {}
        self.now_ms = 0
        self.answers: dict[int, messages.Response] = {}
        self.incarnation = 7
        self.generations = dict.fromkeys(range(worker_count), 1)
        self.alive: set[int] = set(range(worker_count))
        self.views: dict[int, dict] = {}  # what each worker process has applied
        self.reported: dict[int, dict] = {}  # the partitions sent to each worker: (topic id, index) -> leader epoch
        self.lost: dict[int, dict] = {}  # the same of their predecessors
        self.request_id = 0
        self.start()

    def start(self) -> None:
        """A controller process starts with the same log and control segment."""
        state = MetadataState()
        for record in self.log:
            state.apply(decode_record(encode_record(record)))
        rules = ConfigRules(load_broker(None, {}, self.static))
        self.core = metadata_core.MetadataCore(state, NODE, rules, lambda: self.random.randbytes(16), self.slot_count)
        self.host = host_core.HostCore(
            NODE, NODE, self.worker_count, self.slot_count + INTERNAL_SLOTS, {"directory-a": 0, "directory-b": 1}
        )
        self.queue: list[metadata_core.Persist] = []
        self.applied_version = -1
        self.subscribed: dict[str, int] = {}
        self.inbox = {}
        self.raising: dict[tuple[bytes, int], int] = {}  # led by dead workers -> the epoch that has ended
        directories = (Directory("directory-a", "/a", 1000, True), Directory("directory-b", "/b", 900, True))
        self.metadata(metadata_core.DirectoriesSeen(directories))
        self.metadata(metadata_core.ProcessStarted("127.0.0.1", 9092, None, self.incarnation, "cluster"), started=False)
        self.flush_log(started=False)
        seen = tuple(
            host_core.SlotSeen(slot, entry[0], entry[1], entry[4], entry[2], self.is_stale(slot), entry[3])
            for slot, entry in sorted(self.slots.items())
        )
        self.on_host(
            host_core.Started(self.core.committed, seen, (), {index: self.generations[index] for index in self.alive})
        )

    def is_stale(self, slot: int) -> bool:
        """Whether its owner has died since."""
        entry = self.slots.get(slot)
        return entry is not None and entry[2] != host_core.OWNER_NONE and entry[5] != self.generations[entry[2]]

    # -- carrying out ------------------------------------------------------------------------------

    def metadata(self, event, started: bool = True) -> None:
        for action in self.core.handle(event, self.now_ms):
            match action:
                case metadata_core.Persist():
                    self.queue.append(action)
                case metadata_core.Publish() if started:
                    self.on_host(action)
                case metadata_core.Reply():
                    assert action.response.request_id not in self.answers, "answered twice"
                    response = action.response
                    if action.topic is not None:
                        response = msgspec.structs.replace(response, topic=self.host.topic_image(action.topic))
                    self.answers[response.request_id] = response
        self.core.check()
        if isinstance(event, metadata_core.Tick):
            self.repeat()

    def on_host(self, event) -> None:
        actions = self.host.handle(event, self.now_ms)
        self.host.check()
        for action in actions:
            match action:
                case host_core.AssignSlot():
                    generation = self.generations.get(action.owner, 0)
                    if action.moved and self.is_stale(action.slot):
                        continue  # as mqd/controller/slots.py
                    self.slots[action.slot] = (
                        action.topic_id,
                        action.index,
                        action.owner,
                        action.log_dir,
                        action.leader_epoch,
                        generation,
                    )
                case host_core.ClearSlot():
                    for index, view in self.views.items():
                        assert action.slot not in view["slots"].values(), (
                            f"worker {index} still uses slot {action.slot}"
                        )
                    del self.slots[action.slot]
                case host_core.Send():
                    if isinstance(action.message, messages.Response):
                        self.answers[action.message.request_id] = action.message
                    else:
                        self.check_epochs(action)
                        self.inbox.setdefault(action.client, []).append(action.message)
                case host_core.AppliedEverywhere():
                    assert action.version > self.applied_version
                    known = self.views.keys() & self.alive  # without a view: just started, serves nothing
                    assert all(self.views[index]["version"] >= action.version for index in known), (
                        "a worker that lives does not have it"
                    )
                    self.applied_version = action.version
                    self.metadata(metadata_core.AppliedByHost(action.version))
                case host_core.RaiseEpochs():
                    epochs = self.committed_epochs()
                    self.raising.update({key: epochs[key] for key in action.partitions if key in epochs})
                    self.repeat()
                case host_core.ReportReplicaMoved():
                    place = action.topic_id, action.index, action.directory
                    self.from_broker(broker_messages.ReplicaPlaced(NODE, self.broker_epoch, *place))

    # -- the broker core ---------------------------------------------------------------------------

    @property
    def broker_epoch(self) -> int:
        return self.core.proposed.brokers[NODE].epoch

    def committed_epochs(self) -> dict[tuple[bytes, int], int]:
        topics = self.core.committed.topics.values()
        return {(topic.topic_id, one.index): one.leader_epoch for topic in topics for one in topic.partitions}

    def from_broker(self, message: broker_messages.ToActiveController) -> None:
        self.metadata(metadata_core.PeerReceived(NODE, message))

    def repeat(self) -> None:
        """Reports the leaderships of dead workers until the metadata has newer epochs."""
        epochs = self.committed_epochs()
        self.raising = {key: epoch for key, epoch in self.raising.items() if epochs.get(key) == epoch}
        if self.raising:
            lost = [(*key, epoch) for key, epoch in sorted(self.raising.items())]
            self.from_broker(broker_messages.WorkersDied(NODE, self.broker_epoch, lost))

    def check_epochs(self, send: host_core.Send) -> None:
        """No worker gets a partition in the epoch that ended with its predecessor."""
        message = send.message
        parts = message.parts if isinstance(message, messages.MessageList) else [message]
        topics = (
            message.topics
            if isinstance(message, messages.Image)
            else [part.topic for part in parts if isinstance(part, messages.TopicPut)]
        )
        reported = [(topic.topic_id, partition) for topic in topics for partition in topic.partitions]
        reported += [
            (part.topic_id, partition)
            for part in parts
            if isinstance(part, messages.PartitionsPut)
            for partition in part.partitions
        ]
        index = self.subscribed.get(send.client)
        for topic_id, partition in reported:
            if partition.owner == index:
                key = (topic_id, partition.index)
                dead = partition.leader_epoch <= self.lost.get(index, {}).get(key, -1)
                placed = self.slots[partition.slot]  # every worker reads from the location in the slot
                assert (
                    placed[:4] == (topic_id, partition.index, partition.owner, partition.log_dir)
                    and placed[4] >= partition.leader_epoch
                ), f"slot {partition.slot} says {placed}, not {partition}"
                assert not dead, (
                    f"{type(message).__name__}: worker {index} is to serve partition {partition.index} in epoch"
                    f" {partition.leader_epoch}, which died with its predecessor"
                )
                self.reported.setdefault(index, {})[key] = partition.leader_epoch

    def flush_log(self, fail: bool = False, started: bool = True) -> None:
        """Queued writes are flushed together, or not at all."""
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

    def die_writing(self, count: int | None = None) -> None:
        """The controller process dies when the first `count` queued writes (None: all) are on disk,
        before any of it was carried out. The next one starts.
        """
        for persist in self.queue[:count]:
            self.log += persist.records
        self.start()

    # -- the processes -----------------------------------------------------------------------------

    def join(self, index: int) -> str:
        """A connection of the worker process; its view lives as long as the process, across
        connections and controllers.
        """
        client = f"worker-{index}.{self.generations[index]}.{self.random.random()}"
        self.views.setdefault(index, {"slots": {}, "version": -1, "epochs": {}, "rules": {}})
        self.subscribed[client] = index
        self.on_host(host_core.SubscriberJoined(client, messages.Subscribe("worker", index, self.generations[index])))
        return client

    def apply(self, client: str) -> None:
        """The worker applies everything that was sent, then responds."""
        index = self.subscribed[client]
        view = self.views[index]
        reported = False
        flat = [
            part
            for message in self.inbox.pop(client, [])
            for part in (message.parts if isinstance(message, messages.MessageList) else [message])
        ]
        for message in flat:
            match message:
                case messages.Image():
                    view["slots"] = {
                        (t.topic_id, p.index): p.slot for t in message.topics for p in t.partitions if p.slot >= 0
                    }
                    view["rules"] = dict(message.acls)
                    assert not message.scram_credentials, "not for workers"
                    view["epochs"] = {
                        (t.topic_id, p.index): p.leader_epoch for t in message.topics for p in t.partitions
                    }
                case messages.TopicPut():
                    for partition in message.topic.partitions:
                        key = (message.topic.topic_id, partition.index)
                        assert view["epochs"].get(key, -1) <= partition.leader_epoch
                        view["epochs"][key] = partition.leader_epoch
                        if partition.slot >= 0:
                            assert view["slots"].get(key, partition.slot) == partition.slot
                            assert partition.slot not in {
                                slot for other, slot in view["slots"].items() if other != key
                            }, "slot reused too early"
                            view["slots"][key] = partition.slot
                case messages.PartitionsPut():
                    for partition in message.partitions:
                        key = (message.topic_id, partition.index)
                        assert (
                            view["epochs"].get(key, -1) <= partition.leader_epoch
                            and view["slots"].get(key, -1) == partition.slot
                        )
                        view["epochs"][key] = partition.leader_epoch
                case messages.AclsPut():
                    # the image may have been ahead
                    view["rules"] = {
                        acl_id: rule for acl_id, rule in view["rules"].items() if acl_id not in message.removed
                    } | dict(message.put)
                case messages.TopicRemoved():
                    for key in [key for key in view["slots"] if key[0] == message.topic_id]:
                        del view["slots"][key]
            assert not isinstance(message, messages.CredentialsPut), "not for workers"
            assert view["version"] <= message.version
            view["version"], reported = message.version, True
        for slot in view["slots"].values():  # it has opened its partitions: native/server/command.c
            entry = self.slots.get(slot)
            if entry is not None and entry[2] == index:
                self.slots[slot] = (*entry[:5], self.generations[index])
        if reported:
            self.on_host(host_core.WorkerApplied(client, messages.Applied(view["version"], {})))

    def die(self, index: int, notice: bool = True) -> None:
        generation = self.generations[index]
        self.lost.setdefault(index, {}).update(self.reported.pop(index, {}))
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
        """All processes live and all messages arrive."""
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

    def send_request(self, change, validate_only: bool = False) -> messages.Response:
        number = self.request(change, validate_only)
        self.settle()
        return self.answers[number]


def create(
    name: str, count: int = 2, factor: int = 1, config: dict | None = None, assignments: dict | None = None
) -> messages.CreateTopic:
    return messages.CreateTopic(name, count, factor, assignments or {}, config or {})


def alter(name: str, operations: list[tuple], replace: bool = False, kind: int = 2) -> messages.AlterConfig:
    return messages.AlterConfig(kind, name, [messages.ConfigOperation(*operation) for operation in operations], replace)
