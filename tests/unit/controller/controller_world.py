"""Several hosts with the real metadata and broker cores, an atomic log between them, links that
lose, repeat and delay, and a model of the replicas' logs. Driven by one seed. Random events are in
controller_chance.py, checks in controller_checks.py.

The quorum is a list: proposals wait in `proposed`, and are committed in order, or dropped with
their controller. Every host applies committed records in its own time. A replica's log is the list
of leader epochs of its records; a leader counts its followers' positions when they fetch (R4, R7),
proposes in-sync sets (R5), and an unclean restart loses a random suffix of every log.

Checked after each step: both cores' check(), and over the model
    P2  every member of in-sync and eligible set with a current registration has every record below
        the true high watermark
    P6  the true high watermark never falls: a new leader has everything below it
    P8  a replica that may have lost records is in no in-sync or eligible set before its leader has
        added it again
    P10 no replica in sync and none eligible: min.insync.replicas of them are still known
    I6  epochs rise: controller, broker, leader; a partition's own by one
    L2  a host that is fenced for its silence has no lease
"""

import random

import msgspec

from mqd.base.config import load_broker
from mqd.cluster.broker import core as broker_core
from mqd.cluster.broker import messages as broker_messages
from mqd.cluster.host import messages
from mqd.cluster.metadata import core as metadata_core
from mqd.cluster.metadata.options import ControllerOptions
from mqd.cluster.metadata.records import Record, decode_record, encode_record
from mqd.cluster.metadata.rules.configs import ConfigRules
from mqd.cluster.metadata.rules.placement import Directory
from mqd.cluster.metadata.state import MetadataState
from tests.unit.controller.controller_chance import Chance
from tests.unit.controller.controller_checks import Checks

OPTIONS = ControllerOptions(
    replication_recovery_delay_ms=60_000,
    leader_balance_check_ms=20_000,
    leader_balance_stable_ms=5_000,
    retire_barrier_ms=2_000,
    retire_grace_ms=5_000,
)
LEASE_MS = 1_500
# of a version that did not know mqd.version
FEATURES = {"metadata.version": (25, 29), "transaction.version": (0, 2), "group.version": (0, 1)}


class Leader:
    """A leader's knowledge of one partition, in one leader epoch."""

    def __init__(self, epoch: int, log_end_offset: int, high_watermark: int) -> None:
        self.epoch = epoch
        self.start = log_end_offset  # leso
        self.high_watermark = high_watermark
        self.followers: dict[int, tuple[int, int]] = {}  # node -> (its position, its broker epoch), seen in this epoch
        self.committed: tuple[int, ...] = ()
        self.partition_epoch = -1
        self.proposed: tuple[int, ...] | None = None
        self.sequence = 0


class Host:
    def __init__(self, node: int, rack: str | None) -> None:
        self.node, self.rack = node, rack
        self.directory_id = f"meta-{node}"
        self.incarnation = 1
        self.up = True
        self.clean_epoch = -1
        self.ended = False
        self.applied = 0  # index into the committed log
        self.logs: dict[tuple[bytes, int], list[int]] = {}
        self.leaders: dict[tuple[bytes, int], Leader] = {}
        self.lost: dict[tuple[bytes, int], int] = {}
        self.sent: broker_core.SetBroker | None = None
        self.features = FEATURES
        self.refused = ""
        self.core: metadata_core.MetadataCore
        self.broker: broker_core.BrokerCore


class World(Chance, Checks):
    def __init__(
        self,
        seed: int,
        host_count: int = 4,
        racks: int = 0,
        static: dict[str, str] | None = None,
        lossy: bool = True,
        options: ControllerOptions = OPTIONS,
    ) -> None:
        self.random = random.Random(seed)
        self.options = options
        self.static = static if static is not None else {"cluster.seeds": "127.0.0.1:9094"}
        self.lossy = lossy
        self.now_ms = 1_000_000
        self.log: list[Record] = []
        self.versions = [0]  # of the committed log's prefixes
        self.batch_ends = [0]
        self.proposed: list[metadata_core.Persist] = []
        self.active = -1
        self.epoch = 0
        self.lease_until_ms = 0
        self.links: list[tuple[int, int, int, object]] = []  # (when, to, from, message)
        self.cut: set[tuple[int, int]] = set()
        self.quiet = False  # no loss: healing
        self.answers: dict[object, messages.Response] = {}
        self.number = 0
        self.true_high_watermark: dict[tuple[bytes, int], list[int]] = {}
        self.forgotten: set[tuple[bytes, int, int]] = set()
        self.lost: set[tuple[bytes, int]] = set()  # partitions that lost records of their only replica: P2, P6 are off
        self.clean: dict[tuple[int, int], int] = {}  # (node, incarnation) -> the content of its clean marker
        self.unlogged = MetadataState()  # everything committed
        self.hosts = {node: Host(node, f"rack-{node % racks}" if racks else None) for node in range(1, host_count + 1)}
        for host in self.hosts.values():
            self.boot(host)
        self.elect(1)

    # -- processes ---------------------------------------------------------------------------------

    def boot(self, host: Host) -> None:
        state = MetadataState()
        for record in self.log[: host.applied]:
            state.apply(decode_record(encode_record(record)))
        rules = ConfigRules(load_broker(None, {}, self.static))
        host.core = metadata_core.MetadataCore(
            state, host.node, rules, lambda: self.random.randbytes(16), 10_000, active=False, options=self.options
        )
        host.broker = broker_core.BrokerCore(host.node, host.core.committed, self.options)
        host.up, host.ended, host.sent = True, False, None
        host.leaders, host.lost = {}, {}
        reports = [
            broker_messages.DirectoryReport(f"{host.directory_id}-{name}", f"/{name}", 1000, True)
            for name in ("a", "b")
        ]
        self.metadata(
            host,
            metadata_core.DirectoriesSeen(
                tuple(Directory(entry.directory_id, entry.path, entry.free_bytes, entry.usable) for entry in reports)
            ),
        )
        self.clean[(host.node, host.incarnation)] = host.clean_epoch
        registration = broker_messages.RegisterBroker(
            host.node,
            host.directory_id,
            host.incarnation,
            f"host{host.node}",
            9092,
            host.rack,
            f"host{host.node}",
            9093,
            f"host{host.node}",
            9094,
            2,
            reports,
            host.clean_epoch,
            host.features,
        )
        self.on_broker(host, broker_core.Started(registration, self.now_ms))
        self.on_broker(host, broker_core.MetadataCommitted(state.version, state.version))
        self.on_broker(host, broker_core.MetadataApplied(state.version))
        self.on_broker(host, broker_core.ControllerKnown(self.active, self.epoch))

    def crash(self, node: int, clean: bool = False, wipe: bool = False) -> None:
        host = self.hosts[node]
        if not host.up:
            return
        host.up = False
        host.clean_epoch = host.broker.broker_epoch if clean else -1
        if node == self.active:
            self.depose()
        if not clean and self.lossy:
            for log in host.logs.values():
                del log[self.random.randint(0, len(log)) :]
        if wipe:
            host.logs.clear()
            host.directory_id += "'"
            host.applied = 0
        host.leaders = {}

    def restart(self, node: int) -> None:
        host = self.hosts[node]
        if not host.up:
            host.incarnation += 1
            self.boot(host)

    # -- the quorum --------------------------------------------------------------------------------

    def depose(self) -> None:
        """Its proposals survive up to a random point; another leader cannot be elected before its
        lease has expired.
        """
        host = self.hosts[self.active]
        for _ in range(self.random.randint(0, len(self.proposed))):
            self.commit(report=False)
        self.proposed.clear()
        self.active = -1
        if host.up:
            self.metadata(host, metadata_core.Resigned())
        for other in self.up():
            self.on_broker(other, broker_core.ControllerKnown(-1, self.epoch))

    def elect(self, node: int) -> None:
        host = self.hosts[node]
        assert self.active < 0 and host.up
        self.now_ms = max(self.now_ms, self.lease_until_ms)
        while host.applied < len(self.log):
            self.learn(host)
        self.epoch += 1
        self.active = node
        self.metadata(host, metadata_core.BecameActive(self.epoch, len(self.log)))
        self.renew_lease()
        for other in self.up():
            self.on_broker(other, broker_core.ControllerKnown(node, self.epoch))

    def renew_lease(self) -> None:
        self.lease_until_ms = self.now_ms + LEASE_MS
        self.metadata(self.hosts[self.active], metadata_core.LeaseChanged(self.lease_until_ms))

    def commit(self, report: bool = True) -> None:
        """The oldest proposal; the active controller applies it at once."""
        persist = self.proposed.pop(0)
        assert persist.base_offset == len(self.log)
        before = {topic_id: self.unlogged.topics[name] for topic_id, name in self.unlogged.topics_by_id.items()}
        brokers = dict(self.unlogged.brokers)
        for record in persist.records:
            self.unlogged.apply(record)
        self.log += persist.records
        self.batch_ends.append(len(self.log))
        self.check_epochs(before, brokers, persist.records)
        self.unlogged.check()
        if report and self.active >= 0:
            self.learn(self.hosts[self.active])

    def learn(self, host: Host) -> None:
        """The next committed batch."""
        end = next(end for end in self.batch_ends if end > host.applied)
        records = tuple(decode_record(encode_record(record)) for record in self.log[host.applied : end])
        host.applied = end
        self.metadata(host, metadata_core.Committed(records, end))
        self.on_broker(host, broker_core.MetadataCommitted(end, end))
        self.on_broker(host, broker_core.MetadataApplied(end))
        self.metadata(host, metadata_core.AppliedByHost(end))
        self.follow_metadata(host)

    def up(self) -> list[Host]:
        return [host for host in self.hosts.values() if host.up]

    # -- carrying out ------------------------------------------------------------------------------

    def metadata(self, host: Host, event) -> None:
        before = dict(host.core.proposed.brokers) if isinstance(event, metadata_core.Tick) else {}
        for action in host.core.handle(event, self.now_ms):
            match action:
                case metadata_core.Persist():
                    assert host.node == self.active
                    self.proposed.append(action)
                case metadata_core.SendPeer():
                    self.send(host.node, action.node_id, action.message)
                case metadata_core.Reply():
                    assert action.client not in self.answers, "answered twice"
                    self.answers[action.client] = action.response
        host.core.check()
        for node, broker in host.core.proposed.brokers.items():
            if broker.fenced and node in before and not before[node].fenced:
                message = self.hosts[node].sent
                assert (
                    message is None
                    or not self.hosts[node].up
                    or message.lease_until_ms <= self.now_ms
                    or message.broker_epoch != broker.epoch
                ), f"L2: broker {node} is fenced and has a lease"

    def on_broker(self, host: Host, event) -> None:
        for action in host.broker.handle(event, self.now_ms):
            match action:
                case broker_core.SendPeer():
                    self.send(host.node, action.node_id, action.message)
                case broker_core.SetBroker():
                    host.sent = action
                case broker_core.ToWorker():
                    self.on_in_sync_answer(host, action.response)
                case broker_core.Reply():
                    assert action.client not in self.answers, "answered twice"
                    self.answers[action.client] = action.response
                case broker_core.ShutDown():
                    host.ended = True
                case broker_core.Refused():
                    assert host.features != FEATURES or self.hosts[max(self.active, 1)].features != FEATURES, (
                        action.message
                    )
                    host.refused = action.message
        host.broker.check()

    def send(self, source: int, target: int, message: object) -> None:
        if self.quiet or source == target:
            self.links.append((self.now_ms + 1, target, source, message))
            return
        if (source, target) in self.cut or self.random.random() < 0.08:
            return
        slow = self.random.random() < 0.03
        for _ in range(1 + (self.random.random() < 0.08)):
            self.links.append((self.now_ms + self.random.randint(1, 20_000 if slow else 60), target, source, message))

    def deliver(self) -> None:
        due = [entry for entry in self.links if entry[0] <= self.now_ms]
        self.links = [entry for entry in self.links if entry[0] > self.now_ms]
        for _, target, source, message in due:
            host = self.hosts.get(target)
            if host is None or not host.up:
                continue
            copy = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=broker_messages.BrokerMessage)
            if isinstance(message, broker_messages.ToActiveController):
                self.metadata(host, metadata_core.PeerReceived(source, copy))
            else:
                self.on_broker(host, broker_core.PeerReceived(source, copy))

    def advance(self, milliseconds: int) -> None:
        self.now_ms += milliseconds
        if self.active >= 0 and self.random.random() < 0.9:
            self.renew_lease()
        self.deliver()
        for host in self.up():
            self.on_broker(host, broker_core.Tick())
            self.metadata(host, metadata_core.Tick())

    # -- replicas ----------------------------------------------------------------------------------

    def serves(self, host: Host) -> bool:
        """R10 only: a lease does not make anything safe."""
        return host.up and host.broker.ready and not host.ended

    def follow_metadata(self, host: Host) -> None:
        """The host's worker applies its metadata."""
        for topic in host.core.committed.topics.values():
            for partition in topic.partitions:
                key = (topic.topic_id, partition.index)
                if host.node not in partition.replicas:
                    host.logs.pop(key, None)
                    host.leaders.pop(key, None)
                    continue
                log = host.logs.setdefault(key, [])
                if partition.leader != host.node:
                    host.leaders.pop(key, None)
                    continue
                leader = host.leaders.get(key)
                if not self.serves(host):
                    continue
                if leader is None or leader.epoch < partition.leader_epoch:
                    if partition.leader_epoch <= host.lost.get(key, -1):
                        continue  # the epoch died with a worker
                    leader = host.leaders[key] = Leader(partition.leader_epoch, len(log), 0)
                if leader.partition_epoch < partition.partition_epoch:
                    leader.partition_epoch, leader.committed, leader.proposed = (
                        partition.partition_epoch,
                        partition.in_sync_replicas,
                        None,
                    )
                self.move_high_watermark(host, key, partition)

    def kill_worker(self, host: Host) -> None:
        """Its state as a leader is lost; its files are not."""
        if host.leaders:
            host.lost.update({key: leader.epoch for key, leader in host.leaders.items()})
            host.leaders = {}
            self.on_broker(host, broker_core.ClientGone("worker"))
            self.on_broker(host, broker_core.LeadershipsLost(tuple(host.lost)))

    def partition_of(self, host: Host, key: tuple[bytes, int]):
        name = host.core.committed.topics_by_id.get(key[0])
        topic = host.core.committed.topics.get(name) if name is not None else None
        return (
            (topic, topic.partitions[key[1]]) if topic is not None and key[1] < len(topic.partitions) else (None, None)
        )

    def leading(self) -> list[tuple[Host, tuple[bytes, int]]]:
        return [(host, key) for host in self.up() if self.serves(host) for key in host.leaders]

    def append(self) -> None:
        leading = self.leading()
        if leading:
            host, key = self.random.choice(leading)
            host.logs[key].append(host.leaders[key].epoch)
            self.move_high_watermark(host, key, self.partition_of(host, key)[1])

    def fetch(self, host: Host | None = None, key: tuple[bytes, int] | None = None) -> None:
        """One follower, one round: truncate by epoch, report its position, copy."""
        if host is None:
            candidates = [
                (other, other_key)
                for other in self.up()
                if self.serves(other)
                for other_key in other.logs
                if other_key not in other.leaders
            ]
            if not candidates:
                return
            host, key = self.random.choice(candidates)
        _, partition = self.partition_of(host, key)
        source = self.hosts.get(partition.leader) if partition is not None else None
        if (
            source is None
            or not self.serves(source)
            or (not self.quiet and ((host.node, source.node) in self.cut or (source.node, host.node) in self.cut))
        ):
            return
        leader = source.leaders.get(key)
        if leader is None or leader.epoch != partition.leader_epoch:
            return
        mine, theirs = host.logs[key], source.logs[key]
        common = 0
        while common < min(len(mine), len(theirs)) and mine[common] == theirs[common]:
            common += 1
        if common < len(mine):
            del mine[common:]
        source_partition = self.partition_of(source, key)[1]
        if source_partition is not None and host.node in source_partition.replicas:
            leader.followers[host.node] = (len(mine), host.broker.broker_epoch)
            self.move_high_watermark(source, key, source_partition)
        mine += theirs[len(mine) :]

    def minimum(self, host: Host, key: tuple[bytes, int]) -> int:
        topic, partition = self.partition_of(host, key)
        return host.core.committed.min_in_sync(topic, partition)

    def move_high_watermark(self, host: Host, key: tuple[bytes, int], partition) -> None:
        leader = host.leaders[key]
        if partition is None or len(leader.committed) < self.minimum(host, key):
            return
        maximal = set(leader.committed) | set(leader.proposed or ())
        positions = [
            (
                len(host.logs[key])
                if node == host.node
                else leader.followers.get(node, (0, 0))[0]
                if node in leader.followers
                else -1
            )
            for node in sorted(maximal)
        ]
        if min(positions) < 0:
            return
        if min(positions) > leader.high_watermark:
            leader.high_watermark = min(positions)
            true = self.true_high_watermark.setdefault(key, [])
            if leader.high_watermark > len(true):
                true[:] = host.logs[key][: leader.high_watermark]

    def propose(self) -> None:
        """A leader proposes another in-sync set: without a silent follower, or with one that has
        caught up (R7).
        """
        leading = [(host, key) for host, key in self.leading() if host.leaders[key].proposed is None]
        if not leading:
            return
        host, key = self.random.choice(leading)
        leader = host.leaders[key]
        _, partition = self.partition_of(host, key)
        if partition is None or partition.leader != host.node or partition.leader_epoch != leader.epoch:
            return
        brokers = host.core.committed.brokers
        expected = set(leader.committed)
        for node in partition.replicas:
            position, epoch = leader.followers.get(node, (-1, -1))
            current = node in brokers and brokers[node].epoch == epoch and not brokers[node].fenced
            if (
                node not in expected
                and position >= max(leader.high_watermark, leader.start)
                and current
                and self.random.random() < 0.7
            ):
                expected.add(node)
            elif node in expected and node != host.node and self.random.random() < (0 if self.quiet else 0.15):
                expected.discard(node)
        if expected == set(leader.committed):
            return
        leader.proposed = tuple(sorted(expected))
        leader.sequence += 1
        members = [
            (
                node,
                (
                    host.broker.broker_epoch
                    if node == host.node
                    else leader.followers[node][1]
                    if node in leader.followers
                    else brokers[node].epoch
                ),
            )
            for node in leader.proposed
        ]
        proposal = messages.ProposeInSync(
            key[0], key[1], leader.epoch, leader.partition_epoch, members, leader.sequence, partition.recovering
        )
        self.on_broker(host, broker_core.InSyncProposed("worker", proposal))

    def on_in_sync_answer(self, host: Host, response: messages.InSyncResponse) -> None:
        leader = host.leaders.get((response.topic_id, response.index))
        if leader is None or leader.epoch != response.leader_epoch or leader.sequence != response.sequence:
            return
        if response.error:
            leader.proposed = None  # safe: R6b
        # on success the metadata will change

    # -- clients -----------------------------------------------------------------------------------

    def request(self, change, node: int | None = None, validate_only: bool = False) -> object:
        self.number += 1
        node = node if node is not None else self.random.choice(self.up()).node
        host, client = self.hosts[node], (node, self.number)
        request = messages.Request(self.number, change, validate_only)
        if host.core.active:
            self.metadata(host, metadata_core.ChangeRequested(client, request))
        else:
            self.on_broker(host, broker_core.ChangeRequested(client, request))
        return client

    def send_request(self, change, node: int | None = None, validate_only: bool = False) -> messages.Response:
        self.quiet = True
        client = self.request(change, node, validate_only)
        for _ in range(200):
            if client in self.answers:
                return self.answers[client]
            self.settle(1)
        raise AssertionError(f"{change} was not answered")

    def settle(self, rounds: int = 60, milliseconds: int = 100) -> None:
        """All processes live and all messages arrive."""
        self.quiet = True
        self.cut.clear()
        for host in self.hosts.values():
            if not host.up and not host.ended:
                self.restart(host.node)
        if self.active < 0:
            self.elect(self.random.choice(self.up()).node)
        for _ in range(rounds):
            self.now_ms += milliseconds
            self.renew_lease()
            for _ in range(4):
                self.deliver()
                while self.proposed:
                    self.commit()
                for host in self.up():
                    while host.applied < len(self.log):
                        self.learn(host)
                self.now_ms += 2
            for host in self.up():
                self.on_broker(host, broker_core.Tick())
                self.metadata(host, metadata_core.Tick())
                for key in list(host.logs):
                    if key not in host.leaders:
                        self.fetch(host, key)
            for _ in range(8):
                self.propose()
        self.check()
        self.quiet = False

    def heal(self) -> None:
        """Every host is up and reaches every other: then all changes in progress end, and every
        partition that may have a leader has one.
        """
        for host in self.hosts.values():
            if host.up and (host.ended or host.broker.shutting_down):
                self.crash(host.node, clean=host.ended)
            host.ended = False
        self.settle(150)
        assert all(not broker.fenced for node, broker in self.unlogged.brokers.items() if self.hosts[node].up), (
            self.unlogged.brokers
        )
        for topic in self.unlogged.topics.values():
            for partition in topic.partitions:
                what = f"{topic.name}-{partition.index}: {partition}"
                if not partition.in_sync_replicas and not partition.eligible_leader_replicas:
                    continue  # only an operator can decide what is lost
                assert partition.leader in partition.in_sync_replicas, what
                assert sorted(partition.in_sync_replicas) == sorted(partition.replicas), what
                assert not partition.adding_replicas and not partition.removing_replicas, what
