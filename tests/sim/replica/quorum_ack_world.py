"""Acknowledgement by K of the in-sync replicas: a model of its rules, without an implementation
yet.

docs/decisions/cluster/2026-11-27-acknowledgement-by-k-of-the-in-sync-replicas.md has the rules with
these numbers. One partition, an atomic controller, and hosts that exchange messages which are lost,
repeated and reordered. Every append counts as flushed. There is no time: an event is one step of
one host, of the controller or of a message, drawn from the seed.

Invariants
    K1  an acknowledged record is in the log of every later leader, while at most K-1 disks at a
        time are lost
    K2  records that consumers have read (below the high watermark) are in the log of every later
        leader
    K3  a record at an acknowledged offset never changes
    K4  once all hosts are back, a leader is elected and acknowledges
"""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

NONE = -1
FETCH_RECORDS = 2
MESSAGES_MAX = 40


class Violation(AssertionError):
    pass


class Record(NamedTuple):
    epoch: int
    value: int


class Metadata(NamedTuple):
    """The controller's committed state of the partition."""

    leader: int
    leader_epoch: int
    partition_epoch: int
    in_sync: frozenset[int]
    electors: tuple[tuple[int, int], ...]  # (node, directory), sorted: E2

    @property
    def elector_nodes(self) -> frozenset[int]:
        return frozenset(node for node, _ in self.electors)


class Fetch(NamedTuple):
    node: int
    broker_epoch: int
    leader_epoch: int
    offset: int
    last_epoch: int


class Fetched(NamedTuple):
    node: int
    broker_epoch: int
    leader_epoch: int
    offset: int
    records: tuple[Record, ...]
    truncate_to: int  # NONE: the logs agree


class Proposal(NamedTuple):
    leader: int
    leader_epoch: int
    partition_epoch: int
    in_sync: frozenset[int]
    broker_epochs: tuple[tuple[int, int], ...]  # of the members
    electors: frozenset[int]


class LogEnd(NamedTuple):
    """A member's response to the controller's query: E3."""

    node: int
    broker_epoch: int
    directory: int
    leader_epoch: int
    last_epoch: int
    end: int


Message = Fetch | Fetched | Proposal | LogEnd


class Host:
    def __init__(self, node: int, metadata: Metadata) -> None:
        self.node = node
        self.alive = True
        self.broker_epoch = 0
        self.directory = 0
        self.log: list[Record] = []
        self.known = metadata
        self.high_watermark = 0
        self.forget()

    def forget(self) -> None:
        """State with which a new leader epoch, or a restart, begins."""
        self.epoch_start = len(self.log)
        self.positions: dict[int, tuple[int, int]] = {}  # node -> (offset, broker epoch), in this leader epoch
        self.acked = 0
        self.may_acknowledge = False  # A2
        self.proposal: Proposal | None = None

    @property
    def leads(self) -> bool:
        return self.alive and self.known.leader == self.node

    @property
    def last_epoch(self) -> int:
        return self.log[-1].epoch if self.log else NONE

    def learn(self, metadata: Metadata) -> None:
        if metadata.partition_epoch <= self.known.partition_epoch:
            return
        fresh = metadata.leader_epoch > self.known.leader_epoch
        self.known = metadata
        if fresh:
            self.forget()
        elif self.leads and not self.may_acknowledge and metadata.elector_nodes <= metadata.in_sync:
            self.may_acknowledge = True
        self.proposal = None

    def end_of(self, node: int) -> int:
        return len(self.log) if node == self.node else self.positions.get(node, (NONE, 0))[0]


class World:
    def __init__(self, seed: int, off: str = "", count: int = 0, k: int = 0) -> None:
        """`off`: the name of a planted bug."""
        self.random = Random(seed)
        self.off = off
        self.count = count or self.random.choice((3, 3, 4, 5))
        self.k = k or self.random.randint(2, self.count)
        nodes = frozenset(range(self.count))
        self.metadata = Metadata(0, 1, 1, nodes, tuple((node, 0) for node in sorted(nodes)))
        self.hosts = [Host(node, self.metadata) for node in sorted(nodes)]
        self.hosts[0].may_acknowledge = True  # a new topic: every log is empty
        self.registered = dict.fromkeys(nodes, 0)  # node -> broker epoch, of those that are not fenced
        self.directories = dict.fromkeys(nodes, 0)
        self.log_ends: dict[int, LogEnd] = {}
        self.epochs = 0
        self.leaders = {1: 0}  # leader epoch -> node
        self.values = 0
        self.messages: list[Message] = []
        self.lost: set[int] = set()  # nodes whose disk was lost, until they are in sync again
        self.promised: dict[int, Record] = {}  # offset -> record that was acknowledged or read
        self.chosen: tuple[int, list[Record]] = (1, [])  # the newest election's epoch and log
        self.events = self.acknowledged = self.elections = 0
        self.faults = True
        self.trouble = self.random.choice((1.0, 0.5, 0.25))

    # ---- the leader ----

    def minimal(self, host: Host) -> frozenset[int]:
        """A1: members of both the committed and the proposed set. NOT_ENOUGH_REPLICAS below K."""
        members = host.known.in_sync
        if host.proposal is None:
            return members
        return members | host.proposal.in_sync if self.off == "PROPOSED" else members & host.proposal.in_sync

    def held_by_k(self, host: Host) -> int:
        """The offset up to which K of the in-sync replicas have the log."""
        ends = [host.end_of(node) for node in self.minimal(host)]
        if self.off == "TWICE":
            ends.append(len(host.log))
        ends.sort(reverse=True)
        return ends[self.k - 1] if len(ends) >= self.k else NONE

    def advance(self, host: Host) -> None:
        if not host.may_acknowledge and self.off != "ACKNOWLEDGES_AT_ONCE":
            return
        if (held := self.held_by_k(host)) > host.acked:
            self.promise(host, host.acked, held)
            self.acknowledged += held - host.acked
            host.acked = held
        members = host.known.in_sync | (host.proposal.in_sync if host.proposal else frozenset())
        lowest = min(host.end_of(node) for node in members) if members else 0
        enough = len(host.known.in_sync) >= (1 if self.off == "VISIBLE_BELOW_K" else self.k)
        if enough and lowest > host.high_watermark:
            self.promise(host, host.high_watermark, lowest)
            host.high_watermark = lowest

    def promise(self, host: Host, first: int, end: int) -> None:
        epoch, log = self.chosen
        for offset in range(first, end):
            record = host.log[offset]
            if self.promised.setdefault(offset, record) != record:
                raise Violation(f"K3: offset {offset} was {self.promised[offset]}, is {record}")
            if epoch > host.known.leader_epoch and (offset >= len(log) or log[offset] != record):
                raise Violation(f"K1: {record} acknowledged by a leader of an earlier epoch, not in the newest log")

    def produce(self, host: Host) -> None:
        if host.leads and len(host.known.in_sync) >= self.k:
            self.values += 1
            host.log.append(Record(host.known.leader_epoch, self.values))
            self.advance(host)

    def propose(self, host: Host) -> None:
        """First the in-sync set, then the members that no longer have to be queried. One at a time,
        repeated until the metadata is newer.
        """
        if not host.leads:
            return
        if host.proposal is not None:
            self.messages.append(host.proposal)
            return
        known = host.known
        in_sync, electors = set(known.in_sync), set(known.elector_nodes)
        threshold = max(host.epoch_start, host.acked, host.high_watermark)
        if self.off == "JOINS_AT_HIGH_WATERMARK":
            threshold = host.high_watermark
        joining = [n for n in range(self.count) if n not in in_sync and host.end_of(n) >= threshold]
        if joining:
            node = self.random.choice(joining)
            in_sync.add(node)
            electors.add(node)
        elif self.faults and len(in_sync) > 1 and self.random.random() < 0.2:
            in_sync.discard(self.random.choice([n for n in sorted(in_sync) if n != host.node]))  # it is slow
        if in_sync == known.in_sync:  # E5: a replica that is no longer in sync is no longer needed
            enough = max(host.epoch_start, host.acked)
            if self.held_by_k(host) >= enough or self.off == "DROPPED_EARLY":
                electors = set(in_sync)
        if in_sync == known.in_sync and electors == known.elector_nodes:
            return
        epochs = tuple((node, self.broker_epoch_of(host, node)) for node in sorted(in_sync))
        host.proposal = Proposal(
            host.node, known.leader_epoch, known.partition_epoch, frozenset(in_sync), epochs, frozenset(electors)
        )
        self.messages.append(host.proposal)

    def broker_epoch_of(self, host: Host, node: int) -> int:
        if node == host.node:
            return host.broker_epoch
        return host.positions[node][1] if node in host.positions else self.registered.get(node, NONE)

    def on_fetch(self, fetch: Fetch) -> None:
        host = self.hosts[self.leaders[fetch.leader_epoch]]
        if not host.leads or host.known.leader_epoch != fetch.leader_epoch:
            return
        if fetch.broker_epoch < host.positions.get(fetch.node, (0, 0))[1]:
            return
        truncate_to = diverging(host, fetch)
        records: tuple[Record, ...] = ()
        if truncate_to == NONE:
            records = tuple(host.log[fetch.offset : fetch.offset + FETCH_RECORDS])
            host.positions[fetch.node] = fetch.offset, fetch.broker_epoch
            self.advance(host)
        self.messages.append(
            Fetched(fetch.node, fetch.broker_epoch, fetch.leader_epoch, fetch.offset, records, truncate_to)
        )

    # ---- a follower ----

    def fetch(self, host: Host) -> None:
        if host.alive and host.known.leader not in (NONE, host.node):
            self.messages.append(
                Fetch(host.node, host.broker_epoch, host.known.leader_epoch, len(host.log), host.last_epoch)
            )

    def on_fetched(self, answer: Fetched) -> None:
        host = self.hosts[answer.node]
        if not host.alive or host.broker_epoch != answer.broker_epoch or host.known.leader == host.node:
            return
        if host.known.leader_epoch != answer.leader_epoch or len(host.log) != answer.offset:
            return
        if answer.truncate_to != NONE:
            del host.log[answer.truncate_to :]
        else:
            host.log.extend(answer.records)

    def answer(self, host: Host) -> None:
        """E3: only a member that follows no leader responds, so that nothing is added to its log
        afterwards.
        """
        known = host.known
        if not host.alive or self.registered.get(host.node) != host.broker_epoch:
            return
        if self.off == "NOT_FROZEN":
            known = self.metadata
        if known.leader == NONE:
            self.messages.append(
                LogEnd(host.node, host.broker_epoch, host.directory, known.leader_epoch, host.last_epoch, len(host.log))
            )

    # ---- the controller ----

    def commit(self, **changes: Any) -> None:
        changes["partition_epoch"] = self.metadata.partition_epoch + 1
        self.metadata = self.metadata._replace(**changes)
        if "electors" not in changes and self.off == "FORGETS":
            kept = {node: directory for node, directory in self.metadata.electors if node in self.metadata.in_sync}
            self.metadata = self.metadata._replace(electors=tuple(sorted(kept.items())) or self.metadata.electors)

    def ask(self) -> None:
        """E1: no leader, a new epoch. Every host learns of it from the metadata."""
        self.log_ends = {}
        self.commit(leader=NONE, leader_epoch=self.metadata.leader_epoch + 1)

    def fence(self, node: int) -> None:
        if self.registered.pop(node, None) is None:
            return
        self.log_ends.pop(node, None)
        if node in self.metadata.in_sync:
            self.commit(in_sync=self.metadata.in_sync - {node})
        if self.metadata.leader == node:
            self.ask()

    def on_log_end(self, answer: LogEnd) -> None:
        if self.metadata.leader != NONE or answer.leader_epoch != self.metadata.leader_epoch:
            return
        if self.registered.get(answer.node) != answer.broker_epoch:
            return
        directory = dict(self.metadata.electors).get(answer.node)
        if directory is None or (directory != answer.directory and self.off != "EMPTIED"):
            return
        self.log_ends[answer.node] = answer
        self.elect()

    def elect(self) -> None:
        needed = len(self.metadata.electors) - self.k + 1  # E2
        if self.off == "TOO_FEW":
            needed -= 1
        if not self.log_ends or len(self.log_ends) < needed:
            return
        answers = list(self.log_ends.values())
        if self.off == "FIRST":
            chosen = min(answers, key=lambda answer: answer.node)
        elif self.off == "LENGTH":
            chosen = max(answers, key=lambda answer: answer.end)
        else:
            chosen = max(answers, key=lambda answer: (answer.last_epoch, answer.end))
        epoch, members = self.metadata.leader_epoch + 1, frozenset(self.log_ends)
        self.commit(leader=chosen.node, leader_epoch=epoch, in_sync=members)
        self.leaders[self.metadata.leader_epoch] = chosen.node
        self.elections += 1
        log = list(self.hosts[chosen.node].log)
        self.chosen = self.metadata.leader_epoch, log
        for offset, record in self.promised.items():
            if offset >= len(log) or log[offset] != record:
                raise Violation(f"K1: {record} at {offset} is not in the log of leader {chosen.node}")

    def on_proposal(self, proposal: Proposal) -> None:
        now = self.metadata
        if (proposal.leader, proposal.leader_epoch, proposal.partition_epoch) != (
            now.leader,
            now.leader_epoch,
            now.partition_epoch,
        ):
            return
        if any(self.registered.get(node) != epoch for node, epoch in proposal.broker_epochs):
            self.commit()  # final refusal: R6b, shortened
            return
        joined = proposal.in_sync - now.in_sync
        electors = {node: directory for node, directory in now.electors if node in proposal.electors}
        electors.update({node: self.directories[node] for node in joined})
        self.commit(in_sync=proposal.in_sync, electors=tuple(sorted(electors.items())))
        self.lost -= joined

    # ---- events ----

    def kill(self, host: Host) -> None:
        host.alive = False

    def lose_disk(self, host: Host) -> None:
        """At most K-1 hosts at a time."""
        if host.alive or len(self.lost | {host.node}) > self.k - 1 or host.node in self.registered:
            return
        self.lost.add(host.node)
        host.log = []
        host.high_watermark = 0
        host.directory += 1

    def start(self, host: Host) -> None:
        """R9: the controller fences the earlier life first. The metadata is read again: R10."""
        if host.alive:
            return
        self.fence(host.node)
        self.epochs += 1
        host.alive, host.broker_epoch = True, self.epochs
        self.registered[host.node] = self.epochs
        self.directories[host.node] = host.directory
        host.known = self.metadata._replace(partition_epoch=0)
        host.forget()
        host.learn(self.metadata)

    def deliver(self) -> None:
        if not self.messages:
            return
        index = 0 if self.random.random() < 0.7 else self.random.randrange(len(self.messages))
        message = self.messages[index]
        if not self.faults or self.random.random() > 0.1:  # otherwise it arrives again later
            del self.messages[index]
            if self.faults and self.random.random() < 0.05:
                return
        self.dispatch(message)

    def dispatch(self, message: Message) -> None:
        if isinstance(message, Fetch):
            self.on_fetch(message)
        elif isinstance(message, Fetched):
            self.on_fetched(message)
        elif isinstance(message, Proposal):
            self.on_proposal(message)
        else:
            self.on_log_end(message)

    def catch_up(self, host: Host) -> None:
        if host.alive:
            host.learn(self.metadata)
        if host.leads:
            self.advance(host)

    def fault(self, host: Host, draw: float) -> None:
        if draw < 0.20:
            self.kill(host)
        elif draw < 0.35:
            self.fence(host.node)
        elif draw < 0.42:
            self.lose_disk(host)
        elif draw < 0.90:
            self.start(host)
        elif self.metadata.leader != NONE:
            self.ask()  # a handover: drained, or back to the preferred replica

    def step(self) -> None:
        self.events += 1
        random = self.random
        host = self.hosts[random.randrange(self.count)]
        draw = random.random()
        if draw < 0.40:
            self.deliver()
        elif draw < 0.58:
            self.fetch(host)
        elif draw < 0.70:
            self.catch_up(host)
        elif draw < 0.76:
            self.answer(host)
        elif draw < 0.84:
            self.propose(host)
        elif draw < 0.94 or not self.faults:
            self.produce(host)
        elif random.random() < self.trouble:
            self.fault(host, random.random())
        if len(self.messages) > MESSAGES_MAX:
            del self.messages[random.randrange(len(self.messages))]

    def run(self, events: int) -> int:
        for _ in range(events):
            self.step()
        self.heal()
        return self.events

    def heal(self) -> None:
        self.faults = False
        for host in self.hosts:
            if host.alive and self.registered.get(host.node) != host.broker_epoch:
                host.alive = False
            self.start(host)
        before = self.acknowledged
        for _ in range(20_000):
            self.step()
            if self.acknowledged > before and len(self.metadata.in_sync) == self.count:
                return
        raise Violation(f"K4: nothing is acknowledged after healing: {self.metadata}, lost {self.lost}")


def diverging(host: Host, fetch: Fetch) -> int:
    """The offset to which the follower must truncate, one step at a time: R2."""
    if fetch.offset > len(host.log):
        return len(host.log)
    if fetch.offset == 0 or host.log[fetch.offset - 1].epoch == fetch.last_epoch:
        return NONE
    return fetch.offset - 1
