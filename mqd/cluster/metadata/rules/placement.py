"""Placement of replicas: a host gets at most one replica of a partition, and a host with full disks gets
none while another host can take it. Replicas are spread over the racks first, then over the hosts
with the fewest replicas; leaders are balanced separately. Within a host, a replica goes into the
directory with the fewest replicas.

Deterministic: every controller makes the same placement for the same state. Counts are those of the
whole cluster, so many small topics are spread like one large topic.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from mqd import native
from mqd.base.config import broker_number
from mqd.cluster.metadata.state import INTERNAL_TOPICS, MetadataState, TopicState

# A log directory is treated as full if it has less than 1/FULL_DIVISOR of the largest free space on any host.
FULL_DIVISOR = 100
# A log directory with less than 1/ROOMY_DIVISOR of the largest free space on its own host is avoided.
ROOMY_DIVISOR = 10
BALANCE_MOVES_MAX = 2_000
# Slots of each host reserved for internal topics: without them a host full of partitions could not
# serve groups and transactions.
INTERNAL_SLOTS = 256
PARTITIONS_MAX = native.PARTITION_SLOT_COUNT - INTERNAL_SLOTS  # partitions of other topics per host


class Directory(NamedTuple):
    """One entry of log.dirs of a host."""

    directory_id: str
    path: str
    free_bytes: int
    usable: bool  # readable, writable, not fenced
    fresh: bool = False  # it had partitions, but is empty now, because it was recreated


def replica_limits(
    state: MetadataState, nodes: Sequence[int], internal: bool, partitions_max: int = PARTITIONS_MAX
) -> dict[int, int]:
    """The maximum number of replicas for each host, which leaves INTERNAL_SLOTS for internal topics.
    `internal`: the maximum for an internal topic.
    """
    if internal:
        return dict.fromkeys(nodes, partitions_max + INTERNAL_SLOTS)
    internal_counts = Counter(
        node
        for name in INTERNAL_TOPICS
        if name in state.topics
        for partition in state.topics[name].partitions
        for node in partition.replicas
    )
    return {node: partitions_max + min(internal_counts[node], INTERNAL_SLOTS) for node in nodes}


class Loads:
    """The load of each host, updated while one plan is made."""

    def __init__(
        self,
        state: MetadataState,
        nodes: Sequence[int],
        full: Collection[int] = (),
        internal: bool = False,
        fenced: Collection[int] = (),
    ) -> None:
        """`full`: hosts without space (Directories.full_hosts). `fenced`: fenced hosts. Both get replicas
        only if no other host can; a full host is preferred to a fenced one. `internal`: the plan is for
        an internal topic.
        """
        self.limits = replica_limits(state, nodes, internal)
        self.nodes = list(nodes)
        self.full = frozenset(full)
        self.fenced = frozenset(fenced)
        self.racks = {node: state.brokers[node].rack for node in nodes}
        self.replica_counts = dict.fromkeys(nodes, 0)
        for (node, _), count in state.directory_replica_counts.items():
            if node in self.replica_counts:
                self.replica_counts[node] += count
        self.leader_counts = {node: state.preferred_counts.get(node, 0) for node in nodes}

    def add(self, replicas: Sequence[int]) -> None:
        for node in replicas:
            if node in self.replica_counts:
                self.replica_counts[node] += 1
        if replicas and replicas[0] in self.leader_counts:
            self.leader_counts[replicas[0]] += 1


def choose_replicas(loads: Loads, factor: int) -> tuple[int, ...] | None:
    """Returns the replicas of one new partition, leader first, and adds them to the loads. None = fewer
    than `factor` hosts have room.
    """
    free = [node for node in loads.nodes if loads.replica_counts[node] < loads.limits[node]]
    first = min(
        free,
        key=lambda node: (
            node in loads.fenced,
            node in loads.full,
            loads.leader_counts[node],
            loads.replica_counts[node],
            node,
        ),
        default=-1,
    )
    replicas = [first]
    while len(replicas) < factor:
        replicas.append(choose_additional_host(loads, replicas))
    if -1 in replicas:
        return None
    loads.add(replicas)
    return tuple(replicas)


def choose_additional_host(loads: Loads, others: Sequence[int]) -> int:
    """Returns the host of one more replica for a partition with replicas on `others`; -1 = no host has
    room. Prefers hosts with disk space, then racks with few of these replicas, then hosts with few
    replicas.
    """
    rack_counts: dict[str | None, int] = {}
    for node in others:
        rack = loads.racks.get(node)
        rack_counts[rack] = rack_counts.get(rack, 0) + 1
    free = [node for node in loads.nodes if node not in others and loads.replica_counts[node] < loads.limits[node]]
    if not free:
        return -1
    return min(
        free,
        key=lambda node: (
            node in loads.fenced,
            node in loads.full,
            rack_counts.get(loads.racks[node], 0),
            loads.replica_counts[node],
            loads.leader_counts[node],
            node,
        ),
    )


def choose_directory(directories: Sequence[Directory], counts: Mapping[str, int]) -> str | None:
    """The directory with the fewest replicas, as in Kafka; among equals the one with more free bytes.
    None if none is usable. A directory with less than a tenth of the largest free space would fill up
    first, so it is used only if there is no other
    (docs/decisions/storage/2026-11-21-log-directories.md).
    """
    usable = [directory for directory in directories if directory.usable]
    if not usable:
        return None
    largest = max(directory.free_bytes for directory in usable)
    roomy = [directory for directory in usable if directory.free_bytes * ROOMY_DIVISOR >= largest]
    return min(
        roomy, key=lambda directory: (counts.get(directory.directory_id, 0), -directory.free_bytes, directory.path)
    ).directory_id


class Directories:
    """The directories of every host as last reported. A host that has not reported yet has those of
    its registration, which are assumed to have space. Counts are updated while one plan is made.
    """

    def __init__(self, state: MetadataState, reported: Mapping[int, Sequence[Directory]]) -> None:
        self._state, self._reported = state, reported
        self._counts: dict[int, dict[str, int]] = {}
        alive = [
            node
            for node in reported
            if (broker := state.brokers.get(node)) is not None
            and not (broker.fenced or broker.draining or broker.in_controlled_shutdown)
        ]
        self._largest_free_bytes = max(
            (entry.free_bytes for node in alive for entry in reported[node] if entry.usable), default=0
        )

    def is_full(self, node: int, directory_id: str) -> bool:
        """Whether no replica can be copied to the directory now, because it has failed or has no space.
        `directory_id` "": whether this is true of all directories of the host.
        """
        reported = self._reported.get(node, ())
        floor = self._free_bytes_min(node)
        return bool(reported) and not any(
            entry.usable and entry.free_bytes >= floor for entry in reported if directory_id in ("", entry.directory_id)
        )

    def has_failed(self, node: int, directory_id: str) -> bool:
        reported = self._reported.get(node, ())
        return bool(reported) and not any(
            entry.usable for entry in reported if directory_id in ("", entry.directory_id)
        )

    def usable_host_count(self, nodes: Sequence[int]) -> int:
        """The number of these hosts with a directory for a replica."""
        return sum(not self.has_failed(node, "") for node in nodes)

    def full_hosts(self, nodes: Sequence[int]) -> frozenset[int]:
        return frozenset(node for node in nodes if self.is_full(node, ""))

    def _free_bytes_min(self, node: int) -> int:
        """The number of free bytes below which the host refuses records, or soon will. Uses the reserve
        in the metadata log, because the host's configuration file is not known here.
        """
        reserve = broker_number(self._state.broker_config(node), "log.dirs.free.bytes.min")
        # the host accepts records again above this much free space (mqd.log.space)
        resume_bytes = reserve + reserve // 4
        return max(
            resume_bytes if resume_bytes <= self._largest_free_bytes else 0,
            -(-self._largest_free_bytes // FULL_DIVISOR),
        )

    def of_host(self, node: int) -> Sequence[Directory]:
        reported = self._reported.get(node)
        if reported:
            return reported
        broker = self._state.brokers.get(node)
        return (
            []
            if broker is None
            else [Directory(directory_id, path, 0, True) for directory_id, path in sorted(broker.directories.items())]
        )

    def choose(self, node: int) -> str | None:
        """Returns a directory for one new replica on the host. "" = the host has reported none and will
        choose. None = none is writable.
        """
        directories = self.of_host(node)
        if not directories:
            return ""
        counts = self._counts.get(node)
        if counts is None:
            counts = self._counts[node] = {
                entry.directory_id: self._state.directory_replica_counts.get((node, entry.directory_id), 0)
                for entry in directories
            }
        chosen = choose_directory(directories, counts)
        if chosen is not None:
            counts[chosen] += 1
        return chosen


# -- balance ---------------------------------------------------------------------------------------


class Move(NamedTuple):
    """The new replicas of one partition."""

    name: str
    index: int  # type: ignore[assignment]  # not tuple's method
    replicas: tuple[int, ...]


def _has_retired_partitions(topic: TopicState) -> bool:
    return any(partition.redirect >= 0 for partition in topic.partitions)


def plan_balance(
    state: MetadataState,
    nodes: Sequence[int],
    is_included: Callable[[str], bool],
    moves_max: int = BALANCE_MOVES_MAX,
    full: Collection[int] = (),
) -> list[Move]:
    """Plans moves of replicas from the hosts with the most to those with the fewest until the counts
    differ by at most one; never makes the spread over racks worse, and never moves replicas to `full` hosts.
    Then balances preferred leaderships by reordering replicas, without copies. Plans at most
    `moves_max` changes of each kind, because a plan for hundreds of thousands of partitions would
    block the controller. The next plan continues.
    """
    if len(nodes) < 2:
        return []
    loads = Loads(state, nodes, full)
    # A topic with retired partitions is left out: moving one partition also moves the retired
    # partitions that belong to it, and the next plan would undo that.
    targets = {
        (topic.name, partition.index): partition.replicas
        for topic in state.topics.values()
        if is_included(topic.name) and not _has_retired_partitions(topic)
        for partition in topic.partitions
    }
    original = dict(targets)
    keys_by_host: dict[int, list[tuple[str, int]]] = {node: [] for node in nodes}
    for key, replicas in targets.items():
        for node in replicas:
            if node in keys_by_host:
                keys_by_host[node].append(key)
    if _even_out(loads, targets, keys_by_host, moves_max) < moves_max:
        _even_out_leaders(loads, targets, moves_max)
    return [
        Move(name, index, targets[(name, index)])
        for name, index in targets
        if targets[(name, index)] != original[(name, index)]
    ]


def _repeated_rack_count(loads: Loads, replicas: Sequence[int]) -> int:
    racks = [loads.racks.get(node) for node in replicas]
    return len(racks) - len(set(racks))


def _even_out(
    loads: Loads,
    targets: dict[tuple[str, int], tuple[int, ...]],
    keys_by_host: dict[int, list[tuple[str, int]]],
    moves_max: int,
) -> int:
    """Plans moves and returns their number. In each pass, every host gives away its surplus; passes are
    repeated until there are no more moves. The number of steps is about moves * hosts.
    """
    count, count_before = 0, -1
    candidates = [node for node in loads.nodes if node not in loads.full]
    if not candidates:
        return 0
    while count_before < count < moves_max:
        count_before = count
        for source in sorted(loads.nodes, key=lambda node: (-loads.replica_counts[node], node)):
            kept: list[tuple[str, int]] = []
            keys = keys_by_host[source]
            while keys and count < moves_max:
                destination = min(candidates, key=lambda node: (loads.replica_counts[node], node))
                if loads.replica_counts[source] - loads.replica_counts[destination] < 2:
                    break
                key = keys.pop()
                receiver = (
                    destination
                    if _may_move(loads, targets[key], source, destination)
                    else _least_loaded(loads, candidates, targets[key], source)
                )
                if receiver < 0:
                    kept.append(key)
                    continue
                _move_replica(loads, targets, key, source, receiver)
                keys_by_host[receiver].append(key)
                count += 1
            keys += reversed(kept)
    return count


def _least_loaded(loads: Loads, candidates: Sequence[int], replicas: tuple[int, ...], source: int) -> int:
    """The least loaded host that may take the replica, if that improves the balance; -1 = none."""
    suitable = [
        node
        for node in candidates
        if loads.replica_counts[source] - loads.replica_counts[node] >= 2 and _may_move(loads, replicas, source, node)
    ]
    return min(suitable, key=lambda node: (loads.replica_counts[node], node), default=-1)


def _move_replica(
    loads: Loads, targets: dict[tuple[str, int], tuple[int, ...]], key: tuple[str, int], source: int, destination: int
) -> None:
    before = targets[key]
    targets[key] = tuple(destination if node == source else node for node in before)
    loads.replica_counts[source] -= 1
    loads.replica_counts[destination] += 1
    if before[0] == source:
        loads.leader_counts[source] -= 1
        loads.leader_counts[destination] += 1


def _may_move(loads: Loads, replicas: tuple[int, ...], source: int, destination: int) -> bool:
    if destination in replicas:
        return False
    return _repeated_rack_count(
        loads, [destination if node == source else node for node in replicas]
    ) <= _repeated_rack_count(loads, replicas)


def _even_out_leaders(loads: Loads, targets: dict[tuple[str, int], tuple[int, ...]], moves_max: int) -> None:
    """Moves leaderships from hosts that lead more than the average to those that lead less. Each
    leadership is moved at most once.
    """
    average = sum(loads.leader_counts.values()) / len(loads.leader_counts)
    count = 0
    for key, replicas in targets.items():
        if count >= moves_max:
            return
        first = replicas[0]
        best = min(
            (node for node in replicas if node in loads.leader_counts),
            key=lambda node: (loads.leader_counts[node], node),
            default=first,
        )
        if (
            first in loads.leader_counts
            and loads.leader_counts[first] >= average + 1
            and loads.leader_counts[best] < average
            and best != first
        ):
            count += 1
            targets[key] = (best, *(node for node in replicas if node != best))
            loads.leader_counts[first] -= 1
            loads.leader_counts[best] += 1
