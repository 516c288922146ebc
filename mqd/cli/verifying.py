"""The progress of a plan of moves: which partitions have their planned replicas, which are moving and
how far, and which are neither. For `mqd topic reassign --plan FILE --status`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from mqd.cli import client_security, moves
from mqd.cli import offline_replicas as offline
from mqd.cli.kafka_request import Broker, check
from mqd.cli.moves import Move, Partition, Plan
from mqd.protocol.messages import MetadataRequest

DONE, UNDER_WAY, NOT_DONE = "done", "under way", "not done"
HOSTS_AT_ONCE_MAX = 20


class PlannedPartition(NamedTuple):
    """One partition of a plan. `replicas`: as they are, [] = there is no such partition; `move`:
    its ongoing move, towards the plan or elsewhere.
    """

    partition: Partition
    state: str
    planned: list[int]
    replicas: list[int]
    move: Move | None
    copied_bytes: int | None = None  # by the new replicas; None: unknown, or there are none
    total_bytes: int | None = None

    @property
    def share(self) -> str:
        return (
            f"{100 * self.copied_bytes // self.total_bytes}%"
            if self.copied_bytes is not None and self.total_bytes
            else "-"
        )

    def as_json(self) -> dict[str, Any]:
        adding, removing = (self.move.adding, self.move.removing) if self.move is not None else ([], [])
        return {
            "topic": self.partition[0],
            "partition": self.partition[1],
            "state": self.state.replace(" ", "_"),
            "planned": self.planned,
            "replicas": self.replicas,
            "adding": adding,
            "removing": removing,
            "copied_bytes": self.copied_bytes,
            "total_bytes": self.total_bytes,
        }


def planned_partitions(broker: Broker, topic: str, plan: Plan) -> list[PlannedPartition]:
    """The state of each partition in the plan (all of this topic), in order. Raises CliError."""
    # first: a move that ends in between then counts as under way, not as not done
    moving = moves.ongoing_moves(broker, topic)
    response = broker.request(
        moves.METADATA, MetadataRequest(topics=[MetadataRequest.Topic(name=topic)], allow_auto_topic_creation=False)
    )
    check(f"topic {topic}", response.topics[0].error_code, None)
    partitions = {(topic, one.partition_index): one for one in response.topics[0].partitions}
    found = []
    for partition, planned in plan.items():
        move = moving.get(partition)
        replicas = list(partitions[partition].replica_nodes) if partition in partitions else []
        if move is not None:
            state = UNDER_WAY if [node for node in move.replicas if node not in move.removing] == planned else NOT_DONE
        else:
            state = DONE if replicas == planned else NOT_DONE
        found.append(PlannedPartition(partition, state, planned, replicas, move))
    leaders = {partition: one.leader_id for partition, one in partitions.items()}
    return _add_copied_shares(
        found,
        leaders,
        {
            one.node_id: f"[{one.host}]:{one.port}" if ":" in one.host else f"{one.host}:{one.port}"
            for one in response.brokers
        },
    )


def _add_copied_shares(
    found: Sequence[PlannedPartition], leaders: Mapping[Partition, int], addresses: Mapping[int, str]
) -> list[PlannedPartition]:
    """Adds how much has been copied: the bytes of new replicas compared with their leaders'. Queries
    each host once, at most HOSTS_AT_ONCE_MAX in parallel.
    """
    requested: dict[int, dict[str, list[int]]] = {}
    for one in found:
        if one.move is not None and one.move.adding:
            topic, index = one.partition
            for node in {leaders.get(one.partition, -1), *one.move.adding} & addresses.keys():
                requested.setdefault(node, {}).setdefault(topic, []).append(index)
    if not requested:
        return list(found)

    def query(node: int) -> dict[Partition, int]:
        return _sizes(addresses[node], requested[node])

    with ThreadPoolExecutor(min(len(requested), HOSTS_AT_ONCE_MAX)) as threads:
        sizes = dict(zip(requested, threads.map(client_security.with_credentials(query), requested)))
    return [
        _with_copied_bytes(one, sizes, leaders.get(one.partition, -1))
        if one.move is not None and one.move.adding
        else one
        for one in found
    ]


def _sizes(address: str, requested: Mapping[str, list[int]]) -> dict[Partition, int]:
    results = offline.log_directories(address, requested)
    return {
        (topic.name, one.partition_index): one.partition_size
        for result in results
        for topic in result.topics
        for one in topic.partitions
        if not one.is_future_key
    }


def _with_copied_bytes(
    one: PlannedPartition, sizes: Mapping[int, Mapping[Partition, int]], leader: int
) -> PlannedPartition:
    assert one.move is not None
    whole = sizes.get(leader, {}).get(one.partition)
    parts = [sizes.get(node, {}).get(one.partition) for node in one.move.adding]
    if whole is None or None in parts:
        return one
    return one._replace(copied_bytes=sum(min(part or 0, whole) for part in parts), total_bytes=whole * len(parts))


def summary(topic: str, found: Sequence[PlannedPartition]) -> str:
    """Returns the number of partitions in each state, and the remedy for those that are not done."""
    counts = {state: sum(one.state == state for one in found) for state in (DONE, UNDER_WAY, NOT_DONE)}
    if counts[DONE] == len(found):
        return f"topic {topic}: the plan is complete"
    states = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    return f"topic {topic}: of {len(found)} partition{'s' * (len(found) != 1)} {states}" + (
        " (carry the plan out again for these)" if counts[NOT_DONE] else ""
    )
