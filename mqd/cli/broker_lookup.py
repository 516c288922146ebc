"""Finds the broker for a request: the coordinator of a group or transactional id, the leader of a
partition, or all brokers. Connections are opened on demand.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mqd.cli.common import CliError, error_line
from mqd.cli.kafka_request import Broker, check
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import FindCoordinatorRequest, ListOffsetsRequest, MetadataRequest

GROUP, TRANSACTION = 0, 1
EARLIEST, LATEST = -2, -1
_METADATA, _LIST_OFFSETS, _FIND_COORDINATOR = 3, 2, 10
# error codes: no leader, not the leader, coordinator loading, coordinator not available, not the
# coordinator, a transaction is still ending
_RETRIABLE = frozenset({5, 6, 14, 15, 16, 51})
COORDINATOR_UNAVAILABLE = frozenset(
    {ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, ErrorCode.COORDINATOR_NOT_AVAILABLE, ErrorCode.NOT_COORDINATOR}
)
_RETRY_TIME_S = 15.0
_PAUSE_S = 0.1

Partition = tuple[str, int]


class Cluster:
    """Connections to the brokers of a cluster: `with Cluster(bootstrap) as cluster:`. Raises
    CliError.
    """

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap_broker = Broker(bootstrap)
        self._nodes: dict[int, str] = {}
        self._brokers: dict[int, Broker] = {}
        self._topics: dict[str, dict[int, int]] = {}

    def __enter__(self) -> "Cluster":
        self.bootstrap_broker.__enter__()
        self._read_metadata([])
        return self

    def __exit__(self, *_: object) -> None:
        for broker in (self.bootstrap_broker, *self._brokers.values()):
            broker.__exit__()

    # -- brokers -----------------------------------------------------------------------------------

    def _read_metadata(self, names: list[str] | None) -> Any:
        topics = None if names is None else [MetadataRequest.Topic(name=name) for name in names]
        response = self.bootstrap_broker.request(
            _METADATA, MetadataRequest(topics=topics, allow_auto_topic_creation=False)
        )
        self._nodes = {
            broker.node_id: f"[{broker.host}]:{broker.port}" if ":" in broker.host else f"{broker.host}:{broker.port}"
            for broker in response.brokers
        }
        return response

    def node(self, node_id: int) -> Broker:
        """Returns the connection to a broker. A single broker is contacted at the address where it
        was found: its advertised address may not be reachable.
        """
        if len(self._nodes) <= 1:
            return self.bootstrap_broker
        if node_id not in self._brokers:
            if node_id not in self._nodes:
                raise CliError(f"broker {node_id} is not available at the moment; try again")
            broker = Broker(self._nodes[node_id], advertised_by=node_id)
            broker.__enter__()
            self._brokers[node_id] = broker
        return self._brokers[node_id]

    def addresses(self) -> dict[int, str]:
        """Node id -> address of the brokers in the newest metadata."""
        return dict(self._nodes)

    def nodes(self) -> list[Broker]:
        return [self.node(node_id) for node_id in sorted(self._nodes)]

    def topics(self, names: Iterable[str] | None = None) -> dict[str, dict[int, int]]:
        """Returns topic -> partition -> node id of its leader, for those of `names` that exist (None:
        all topics).
        """
        described = self.describe_topics(None if names is None else sorted(names))
        return {topic.name: {p.partition_index: p.leader_id for p in topic.partitions} for topic in described}

    def describe_topics(self, names: list[str] | None = None) -> list[Any]:
        """The broker's descriptions of topics (None: all), except those with an error."""
        response = self._read_metadata(names) if names is None or names else None
        topics = [topic for topic in (response.topics if response else ()) if not topic.error_code]
        self._topics.update(
            {topic.name: {p.partition_index: p.leader_id for p in topic.partitions} for topic in topics}
        )
        return topics

    # -- requests ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def every_coordinator(self, kind: int) -> Iterator[None]:
        """Within this context, the brokers of nodes() include every coordinator: a group or
        transactional id that none of them knows does not exist. Raises CliError if a coordinator is
        unreachable at the beginning or at the end, or if one has moved in between.
        """
        before = self._coordinators(kind)
        yield
        if self._coordinators(kind) != before:
            raise CliError(
                f"the coordinators of {'groups' if kind == GROUP else 'transactions'} are changing; try again"
            )

    def _coordinators(self, kind: int) -> dict[int, tuple[int, int]]:
        """Partition of the coordinators' topic -> (leader, leader epoch); empty if the topic does
        not exist yet. Raises CliError if a partition has no active leader.
        """
        # a costly import that other requests do not need
        from mqd.coordinator.topics import OFFSETS_TOPIC, TRANSACTIONS_TOPIC

        name, noun = (OFFSETS_TOPIC, "groups") if kind == GROUP else (TRANSACTIONS_TOPIC, "transactions")
        (topic,) = self._read_metadata([name]).topics
        if topic.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
            return {}
        check(f"topic {name}", topic.error_code, None)
        leaderless = sorted(
            partition.partition_index for partition in topic.partitions if partition.leader_id not in self._nodes
        )
        if leaderless:
            raise CliError(
                f"not all {noun} can be listed: {len(leaderless)} of {len(topic.partitions)} partitions of {name} have"
                f" no leader (for example {name}-{leaderless[0]}), so their coordinators are unavailable;"
                " start their hosts, then try again"
            )
        return {
            partition.partition_index: (partition.leader_id, partition.leader_epoch) for partition in topic.partitions
        }

    def request_coordinator(
        self,
        kind: int,
        name: str,
        api_key: int,
        request: object,
        error_of: Callable[[Any], int],
        version_max: int = 1 << 15,
    ) -> Any:
        """Returns the response of the coordinator of `name`; repeats the request while the
        coordinator is loading or moving.
        """
        deadline = time.monotonic() + _RETRY_TIME_S
        while True:
            lookup = self.bootstrap_broker.request(
                _FIND_COORDINATOR, FindCoordinatorRequest(key=name, key_type=kind, coordinator_keys=[name])
            )
            coordinator = lookup.coordinators[0] if lookup.coordinators else lookup
            error = coordinator.error_code
            if not error:
                response = self.node(coordinator.node_id).request(api_key, request, version_max)
                error = error_of(response)
            if error not in _RETRIABLE or time.monotonic() > deadline:
                check("no coordinator responds", coordinator.error_code, coordinator.error_message)
                return response
            time.sleep(_PAUSE_S)  # polling: there is no notification when a coordinator has read its log

    def by_leader(self, partitions: Iterable[Partition]) -> dict[int, dict[str, list[int]]]:
        """Node id -> topic -> partitions that it leads. Partitions that do not exist or have no
        leader are omitted.
        """
        grouped: dict[int, dict[str, list[int]]] = {}
        for topic, index in sorted(partitions):
            leader = self._topics.get(topic, {}).get(index, -1)
            if leader >= 0:
                grouped.setdefault(leader, {}).setdefault(topic, []).append(index)
        return grouped

    def offsets(self, partitions: Iterable[Partition], timestamp_ms: int) -> dict[Partition, int]:
        """Returns each partition's EARLIEST or LATEST offset, or its first offset at or after a
        time (-1: none). Partitions that no broker serves are omitted. Call topics() first.
        """
        offsets: dict[Partition, int] = {}
        for node_id, topics in self.by_leader(partitions).items():
            requested = [
                ListOffsetsRequest.Topic(
                    name=name,
                    partitions=[
                        ListOffsetsRequest.Partition(partition_index=index, timestamp=timestamp_ms) for index in indexes
                    ],
                )
                for name, indexes in topics.items()
            ]
            response = self.node(node_id).request(_LIST_OFFSETS, ListOffsetsRequest(topics=requested))
            for topic in response.topics:
                offsets |= {
                    (topic.name, partition.partition_index): partition.offset
                    for partition in topic.partitions
                    if not partition.error_code
                }
        return offsets


def report_left_out(noun: str, names: list[str]) -> None:
    """Prints to stderr which items are missing from a list because coordinators could not be
    reached.
    """
    if names:
        error_line(
            f"{len(names)} {noun}{'s are' if len(names) > 1 else ' is'} left out"
            f" ({names[0]}{', ...' if len(names) > 1 else ''}): coordinators are changing; try again"
        )
