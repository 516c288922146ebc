"""Moves of replicas between brokers: plans, ongoing moves, and waiting for them with a progress
bar. For `mqd topic reassign`, `mqd cluster drain` and `mqd cluster balance`.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mqd.cli.common import CliError
from mqd.cli.kafka_request import Broker, check, error_text, with_retries
from mqd.protocol.messages import (
    AlterPartitionReassignmentsRequest,
    DescribeClusterRequest,
    ListPartitionReassignmentsRequest,
    MetadataRequest,
    UnregisterBrokerRequest,
)

METADATA, ALTER_REASSIGNMENTS, LIST_REASSIGNMENTS, DESCRIBE_CLUSTER, UNREGISTER = 3, 45, 46, 60, 64
POLL_S = 0.25
STALL_TIMEOUT_S = 60.0

Partition = tuple[str, int]
Plan = dict[Partition, list[int]]  # partition -> its replicas, the preferred leader first


class Move(NamedTuple):
    """An ongoing reassignment."""

    replicas: list[int]
    adding: list[int]
    removing: list[int]


def replicas_of(broker: Broker, topic: str) -> Plan:
    """Returns the current replicas of each partition of a topic. Raises CliError."""
    response = broker.request(
        METADATA, MetadataRequest(topics=[MetadataRequest.Topic(name=topic)], allow_auto_topic_creation=False)
    )
    metadata = response.topics[0]
    check(f"topic {topic}", metadata.error_code, None)
    return _replicas(metadata)


def replicas_of_all(broker: Broker) -> Plan:
    """Returns the current replicas of every partition. Raises CliError."""
    response = broker.request(METADATA, MetadataRequest(topics=None, allow_auto_topic_creation=False))
    return {partition: replicas for topic in response.topics for partition, replicas in _replicas(topic).items()}


def _replicas(topic: Any) -> Plan:
    return {
        (topic.name, partition.partition_index): list(partition.replica_nodes)
        for partition in sorted(topic.partitions, key=lambda partition: partition.partition_index)
    }


class PlanSummary(NamedTuple):
    """The changes of a plan."""

    moved_count: int  # partitions that get other replicas
    leader_change_count: int  # partitions that keep their replicas but get another preferred leader
    copy_count: int  # replicas that are copied

    def lines(self, move_verb: str, get_verb: str) -> list[str]:
        """Lines of text, such as "3 partitions would move" (`move_verb`) and "1 partition would get
        another preferred leader" (`get_verb`).
        """
        return [
            f"{count} partition{'s' * (count != 1)} {text}"
            for count, text in (
                (self.moved_count, move_verb),
                (self.leader_change_count, f"{get_verb} another preferred leader"),
            )
            if count
        ]


def summarize(current: Mapping[Partition, Sequence[int]], plan: Mapping[Partition, Sequence[int]]) -> PlanSummary:
    added = {partition: set(replicas) - set(current.get(partition, ())) for partition, replicas in plan.items()}
    moved = {
        partition for partition, replicas in plan.items() if sorted(current.get(partition, ())) != sorted(replicas)
    }
    with_new_leader = [
        partition for partition in plan if partition not in moved and current[partition] != plan[partition]
    ]
    return PlanSummary(len(moved), len(with_new_leader), sum(map(len, added.values())))


def racks_of(broker: Broker) -> dict[int, str | None]:
    """The rack of each node, including nodes that are down. Raises CliError."""
    response = broker.request(DESCRIBE_CLUSTER, DescribeClusterRequest(include_fenced_brokers=True))
    check("the cluster", response.error_code, response.error_message)
    return {broker.broker_id: broker.rack for broker in response.brokers}


def spread(
    current: Mapping[Partition, Sequence[int]],
    brokers: Sequence[int],
    replication_factor: int | None,
    racks: Mapping[int, str | None],
) -> Plan:
    """Places each partition on `brokers` only, with `replication_factor` replicas (None: as many as
    it has now). Replicas are first spread over the brokers' racks, like those of new topics
    (mqd.cluster.metadata.rules.placement). Replicas that can stay do so; the others go to the
    brokers with the fewest replicas. Raises CliError.
    """
    factor_max = max((replication_factor or len(replicas) for replicas in current.values()), default=0)
    if factor_max > len(set(brokers)):
        raise CliError(f"{factor_max} replicas need as many brokers, but only {len(set(brokers))} are named")
    counts = Counter({broker: 0 for broker in brokers})
    leaders = Counter({broker: 0 for broker in brokers})
    staying = {}  # partition -> its replicas that stay
    for partition, replicas in current.items():
        chosen = _choose_brokers([], replicas, brokers, replication_factor or len(replicas), racks, Counter())
        staying[partition] = [broker for broker in replicas if broker in chosen]
        counts.update(staying[partition])
    plan: Plan = {}
    for partition, replicas in current.items():
        chosen = _choose_brokers(
            staying[partition], replicas, brokers, replication_factor or len(replicas), racks, counts
        )
        counts.update(chosen[len(staying[partition]) :])
        first = min(chosen, key=lambda broker: (leaders[broker], chosen.index(broker)))
        leaders[first] += 1
        plan[partition] = [first, *(broker for broker in chosen if broker != first)]
    return plan


def _choose_brokers(
    staying: Sequence[int],
    current: Sequence[int],
    brokers: Sequence[int],
    factor: int,
    racks: Mapping[int, str | None],
    counts: Mapping[int, int],
) -> list[int]:
    """Adds brokers to `staying` up to `factor`. Prefers brokers in the rack with the fewest replicas,
    then those that already have the partition, then those with the fewest replicas.
    """
    chosen = list(staying)
    while len(chosen) < factor:
        used = Counter(racks.get(broker) for broker in chosen)

        def cost(broker: int, used: Counter[str | None] = used) -> tuple[int, int, int, int]:
            return (
                used[racks.get(broker)],
                current.index(broker) if broker in current else len(current),
                counts[broker],
                broker,
            )

        chosen.append(min((broker for broker in brokers if broker not in chosen), key=cost))
    return chosen


# -- plans as files: the format of Kafka's kafka-reassign-partitions.sh ----------------------------


def plan_text(plan: Mapping[Partition, Sequence[int]]) -> str:
    entries = [
        {"topic": topic, "partition": index, "replicas": list(replicas)} for (topic, index), replicas in plan.items()
    ]
    return json.dumps({"version": 1, "partitions": entries}, indent=1)


def read_plan(file: Path, topic: str) -> Plan:
    """Reads a plan of this topic only. Raises CliError."""
    plan = _read_plan(file)
    if not plan:
        raise CliError(f"{file} lists no partition")
    others = sorted(partition for partition in plan if partition[0] != topic)
    if others:
        examples = ", ".join(f"{name}-{index}" for name, index in others[:3]) + (
            f" and {len(others) - 3} more" if len(others) > 3 else ""
        )
        raise CliError(
            f"{file} names partitions of topics other than {topic}: {examples}; nothing was done. Give each topic its"
            f" own plan: mqd topic reassign {others[0][0]} --plan FILE"
        )
    return plan


def _read_plan(file: Path) -> Plan:
    try:
        entries = json.loads(file.read_text())["partitions"]
        return {
            (entry["topic"], int(entry["partition"])): [int(broker) for broker in entry["replicas"]]
            for entry in entries
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CliError(
            f'{file} is not a plan ({error}); it must have the form {{"version": 1, "partitions":'
            ' [{"topic": "t", "partition": 0, "replicas": [1, 2, 3]}]}'
        ) from error


# -- requests --------------------------------------------------------------------------------------


def begin(broker: Broker, plan: Mapping[Partition, Sequence[int] | None]) -> None:
    """Starts the moves of the plan; None instead of replicas cancels a partition's move. Raises
    CliError with the refused moves; all others have begun.
    """
    by_topic: dict[str, list[Any]] = {}
    for (topic, index), replicas in plan.items():
        reassignment = AlterPartitionReassignmentsRequest.ReassignablePartition(
            partition_index=index, replicas=None if replicas is None else list(replicas)
        )
        by_topic.setdefault(topic, []).append(reassignment)
    topics = [
        AlterPartitionReassignmentsRequest.ReassignableTopic(name=name, partitions=partitions)
        for name, partitions in by_topic.items()
    ]
    response = broker.request(ALTER_REASSIGNMENTS, AlterPartitionReassignmentsRequest(topics=topics))
    check("the reassignment", response.error_code, response.error_message)
    refused = [
        f"{topic.name}-{partition.partition_index}: {error_text(partition.error_code, partition.error_message)}"
        for topic in response.responses
        for partition in topic.partitions
        if partition.error_code
    ]
    if refused:
        more = f" (and {len(refused) - 3} more)" if len(refused) > 3 else ""
        raise CliError("refused: " + "; ".join(refused[:3]) + more)


def ongoing_moves(broker: Broker, topic: str | None = None) -> dict[Partition, Move]:
    """Ongoing reassignments of one topic, or of all. Raises CliError."""
    topics = None
    if topic is not None:
        indexes = [index for _, index in replicas_of(broker, topic)]
        topics = [
            ListPartitionReassignmentsRequest.ListPartitionReassignmentsTopics(name=topic, partition_indexes=indexes)
        ]
    response = broker.request(LIST_REASSIGNMENTS, ListPartitionReassignmentsRequest(topics=topics))
    check("reassignments", response.error_code, response.error_message)
    return {
        (topic.name, partition.partition_index): Move(
            list(partition.replicas), list(partition.adding_replicas), list(partition.removing_replicas)
        )
        for topic in response.topics
        for partition in topic.partitions
    }


def balance(broker: Broker, topics: Sequence[str], dry_run: bool) -> Plan:
    """Balances all topics, or the given ones. Returns the moves that the active controller begins,
    or with `dry_run` would begin. Raises CliError.
    """
    _require_mqd(broker, "spreads replicas by itself", "use mqd topic reassign")
    requested = [AlterPartitionReassignmentsRequest.ReassignableTopic(name=name) for name in topics]
    response = broker.request(
        ALTER_REASSIGNMENTS, AlterPartitionReassignmentsRequest(topics=requested, balance=2 if dry_run else 1)
    )
    check("balancing", response.error_code, response.error_message)
    return {
        (topic.name, partition.partition_index): list(partition.target)
        for topic in response.responses
        for partition in topic.partitions
    }


def drain(broker: Broker, node: int, cancel: bool) -> None:
    """Starts to move all replicas off `node`; with `cancel`, lets it have replicas again. Raises
    CliError.
    """
    # a broker that is not mqd ignores `drain` and would unregister the node
    _require_mqd(broker, "drains a node", "use mqd topic reassign")
    response = broker.request(UNREGISTER, UnregisterBrokerRequest(broker_id=node, drain=2 if cancel else 1))
    check(f"node {node}", response.error_code, response.error_message)


def _require_mqd(broker: Broker, capability: str, alternative: str) -> None:
    if not broker.is_mqd():
        raise CliError(f"only an mqd cluster {capability}; {alternative}")


def partitions_on(broker: Broker, node: int) -> set[Partition]:
    """The partitions that have a replica on `node`. Raises CliError."""
    return {partition for partition, replicas in replicas_of_all(broker).items() if node in replicas}


def wait(
    broker: Broker, plan: Mapping[Partition, Sequence[int]], show_progress: bool, why_stopped: str = "it was cancelled"
) -> None:
    """Waits until every partition has its planned replicas. An interrupt ends only the waiting, not
    the moves. Raises CliError if there was no progress for STALL_TIMEOUT_S and no move is ongoing.
    """
    topics = sorted({topic for topic, _ in plan})

    arrived: set[Partition] = set()  # remembered, because a balance may move a partition again

    def unfinished() -> set[Partition]:
        moving = ongoing_moves(broker).keys()
        current = {
            partition: replicas for topic in topics for partition, replicas in replicas_of(broker, topic).items()
        }
        open_partitions = {
            partition
            for partition, replicas in plan.items()
            if partition in moving or (partition in current and current[partition] != list(replicas))
        }
        arrived.update(plan.keys() - open_partitions)
        return open_partitions - arrived

    def stalled(partitions: set[Partition]) -> str:
        topic, index = min(partitions)
        return (
            f"{len(partitions)} partition(s) have not reached their target brokers and are not moving, such as"
            f" {topic}-{index}: {why_stopped}"
        )

    _watch("moving", unfinished, _StallCheck(broker, stalled), show_progress, len(plan))


def wait_until_empty(broker: Broker, node: int, show_progress: bool) -> None:
    """Waits until `node` holds no replica. Raises CliError like wait()."""

    def stalled(partitions: set[Partition]) -> str:
        topic, index = min(partitions)
        return (
            f"{len(partitions)} partition(s) cannot leave node {node}, {topic}-{index} among them: there are not enough"
            " other brokers in service for their replicas; start or add one, and the replicas are moved. mqd cluster"
            f" drain --cancel {node} lets them stay"
        )

    _watch(f"leaving node {node}", lambda: partitions_on(broker, node), _StallCheck(broker, stalled), show_progress)


class _StallCheck:
    """Raises CliError if there was no progress for STALL_TIMEOUT_S and no remaining move is
    ongoing.
    """

    def __init__(self, broker: Broker, explain: Callable[[set[Partition]], str]) -> None:
        self._broker, self._explain = broker, explain
        self._last_count, self._last_progress_s = -1, time.monotonic()

    def check(self, remaining: set[Partition]) -> None:
        now = time.monotonic()
        if (
            len(remaining) != self._last_count
            or now - self._last_progress_s > STALL_TIMEOUT_S
            and remaining & ongoing_moves(self._broker).keys()
        ):
            self._last_count, self._last_progress_s = len(remaining), now
        elif now - self._last_progress_s > STALL_TIMEOUT_S:
            raise CliError(self._explain(remaining))


def _watch(
    doing: str, list_remaining: Callable[[], set[Partition]], stall: _StallCheck, show_progress: bool, planned: int = 0
) -> None:
    """Waits until no partition remains. Shows a progress bar on a terminal, otherwise occasional
    lines. `planned`: the total, including moves that are done already.
    """
    remaining = with_retries(list_remaining)
    if not remaining:
        return
    total = max(planned, len(remaining))
    with _progress_display(doing, total) if show_progress else contextlib.nullcontext(lambda done: None) as show:
        while remaining:
            with_retries(partial(stall.check, remaining))
            show(max(total - len(remaining), 0))
            time.sleep(POLL_S)  # polling: other hosts copy the replicas
            remaining = with_retries(list_remaining)
        show(total)


@contextlib.contextmanager
def _progress_display(doing: str, total: int) -> Iterator[Callable[[int], None]]:
    if not sys.stderr.isatty():
        tenths = -1

        def line(done: int) -> None:
            nonlocal tenths
            if 10 * done // total > tenths:
                tenths = 10 * done // total
                print(f"{doing}: {done} of {total} partitions", file=sys.stderr, flush=True)

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("partitions"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(doing, total=total)
        yield lambda done: progress.update(task, completed=done)
