"""The progress of a reassignment plan: which partitions have their planned replicas, which are
moving and how far they are, and which are neither. For `mqd topic reassign --plan FILE --status`.
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
    """One partition of a plan. `replicas`: its current replicas; [] if the partition does not exist.
    `move`: its ongoing move, to the planned replicas or others.
    """

    partition: Partition
    state: str
    planned_replicas: list[int]
    replicas: list[int]
    move: Move | None
    copied_bytes: int | None = None  # by the new replicas; None: unknown, or there are no new replicas
    total_bytes: int | None = None

    @property
    def copied_percent(self) -> str:
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
            "planned": self.planned_replicas,
            "replicas": self.replicas,
            "adding": adding,
            "removing": removing,
            "copied_bytes": self.copied_bytes,
            "total_bytes": self.total_bytes,
        }


def planned_partitions(broker: Broker, topic: str, plan: Plan) -> list[PlannedPartition]:
    """Returns the state of each partition in the plan, in the plan's order. All partitions of the plan
    must be of `topic`. Raises CliError.
    """
    # read before the metadata, so that a move that ends between the two reads is reported as "under
    # way" rather than "not done"
    moving = moves.ongoing_moves(broker, topic)
    response = broker.request(
        moves.METADATA, MetadataRequest(topics=[MetadataRequest.Topic(name=topic)], allow_auto_topic_creation=False)
    )
    check(f"topic {topic}", response.topics[0].error_code, None)
    partitions = {(topic, partition.partition_index): partition for partition in response.topics[0].partitions}
    results = []
    for partition, planned_replicas in plan.items():
        move = moving.get(partition)
        replicas = list(partitions[partition].replica_nodes) if partition in partitions else []
        if move is not None:
            state = (
                UNDER_WAY
                if [node for node in move.replicas if node not in move.removing] == planned_replicas
                else NOT_DONE
            )
        else:
            state = DONE if replicas == planned_replicas else NOT_DONE
        results.append(PlannedPartition(partition, state, planned_replicas, replicas, move))
    leaders = {partition: metadata.leader_id for partition, metadata in partitions.items()}
    return _add_copied_bytes(
        results,
        leaders,
        {
            node.node_id: f"[{node.host}]:{node.port}" if ":" in node.host else f"{node.host}:{node.port}"
            for node in response.brokers
        },
    )


def _add_copied_bytes(
    partitions: Sequence[PlannedPartition], leaders: Mapping[Partition, int], addresses: Mapping[int, str]
) -> list[PlannedPartition]:
    """Returns the partitions with `copied_bytes` and `total_bytes`: the size of the new replicas
    compared with that of the leader. Queries each host once, at most HOSTS_AT_ONCE_MAX in parallel.
    """
    requested: dict[int, dict[str, list[int]]] = {}
    for planned in partitions:
        if planned.move is not None and planned.move.adding:
            topic, index = planned.partition
            for node in {leaders.get(planned.partition, -1), *planned.move.adding} & addresses.keys():
                requested.setdefault(node, {}).setdefault(topic, []).append(index)
    if not requested:
        return list(partitions)

    def query(node: int) -> dict[Partition, int]:
        return _sizes(addresses[node], requested[node])

    with ThreadPoolExecutor(min(len(requested), HOSTS_AT_ONCE_MAX)) as threads:
        sizes = dict(zip(requested, threads.map(client_security.with_credentials(query), requested)))
    return [
        _with_copied_bytes(planned, sizes, leaders.get(planned.partition, -1))
        if planned.move is not None and planned.move.adding
        else planned
        for planned in partitions
    ]


def _sizes(address: str, requested: Mapping[str, list[int]]) -> dict[Partition, int]:
    results = offline.log_directories(address, requested)
    return {
        (topic.name, partition.partition_index): partition.partition_size
        for result in results
        for topic in result.topics
        for partition in topic.partitions
        if not partition.is_future_key
    }


def _with_copied_bytes(
    planned: PlannedPartition, sizes: Mapping[int, Mapping[Partition, int]], leader: int
) -> PlannedPartition:
    assert planned.move is not None
    leader_bytes = sizes.get(leader, {}).get(planned.partition)
    replica_bytes = [sizes.get(node, {}).get(planned.partition) for node in planned.move.adding]
    if leader_bytes is None or None in replica_bytes:
        return planned
    return planned._replace(
        copied_bytes=sum(min(size or 0, leader_bytes) for size in replica_bytes),
        total_bytes=leader_bytes * len(replica_bytes),
    )


def summary(topic: str, partitions: Sequence[PlannedPartition]) -> str:
    """Returns a text: how many partitions are in each state, and the remedy for those not done."""
    counts = {state: sum(planned.state == state for planned in partitions) for state in (DONE, UNDER_WAY, NOT_DONE)}
    if counts[DONE] == len(partitions):
        return f"topic {topic}: the plan is complete"
    states = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    return f"topic {topic}, {len(partitions)} partition{'s' * (len(partitions) != 1)}: {states}" + (
        " (carry the plan out again for these)" if counts[NOT_DONE] else ""
    )
