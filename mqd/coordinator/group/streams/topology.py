"""A Kafka Streams topology, and how it resolves against the existing topics: how many tasks each
subtopology has, how many partitions its internal topics need, and which of them are missing. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

MISSING_SOURCE_TOPICS, INCORRECTLY_PARTITIONED_TOPICS, MISSING_INTERNAL_TOPICS = 1, 2, 3
PartitionCountOf = Callable[[str], int | None]  # topic name -> partition count; None: no such topic
LISTED_TOPICS_MAX = 10  # how many topics a status message lists


class InternalTopic(msgspec.Struct, frozen=True):
    """A changelog or repartition topic. `partitions` 0: configure() derives the number.
    `replication_factor` 0: the broker's default.
    """

    name: str
    partitions: int
    replication_factor: int
    configs: tuple[tuple[str, str], ...]


class CopartitionGroup(msgspec.Struct, frozen=True):
    """Topics that must have equal partition counts, as indexes into the subtopology's lists."""

    source_topics: tuple[int, ...]
    repartition_sources: tuple[int, ...]


class Subtopology(msgspec.Struct, frozen=True):
    subtopology_id: str
    source_topics: tuple[str, ...]
    changelogs: tuple[InternalTopic, ...]
    repartition_sinks: tuple[str, ...]
    repartition_sources: tuple[InternalTopic, ...]
    copartition_groups: tuple[CopartitionGroup, ...]

    @property
    def inputs(self) -> tuple[str, ...]:
        return (*self.source_topics, *(topic.name for topic in self.repartition_sources))


class Topology(msgspec.Struct, frozen=True):
    epoch: int
    subtopologies: tuple[Subtopology, ...]  # sorted by id

    @property
    def topic_names(self) -> tuple[str, ...]:
        """Names of all topics that the application reads or keeps its state in, sorted."""
        changelogs = {topic.name for subtopology in self.subtopologies for topic in subtopology.changelogs}
        return tuple(sorted(changelogs.union(*(subtopology.inputs for subtopology in self.subtopologies))))

    def find(self, subtopology_id: str) -> Subtopology | None:
        return next(
            (subtopology for subtopology in self.subtopologies if subtopology.subtopology_id == subtopology_id), None
        )


class NewTopic(NamedTuple):
    """An internal topic that must be created. `replication_factor` -1: the broker's default."""

    name: str
    partition_count: int
    replication_factor: int
    configs: tuple[tuple[str, str], ...]


class ConfiguredTopology(NamedTuple):
    """`task_counts`: tasks of each subtopology; empty unless the topology is ready.
    `partition_counts`: how many partitions the internal topics have or need. `status`: why the
    topology is not ready, as (status code, detail).
    """

    task_counts: Mapping[str, int]
    partition_counts: Mapping[str, int]
    status: tuple[int, str] | None = None
    missing_topics: tuple[NewTopic, ...] = ()

    @property
    def is_ready(self) -> bool:
        return self.status is None


class InvalidTopology(Exception):
    """The topology is invalid whatever topics exist."""


class _Mispartitioned(Exception):
    pass


def parse(message: Any) -> Topology:
    """`message`: the topology in a heartbeat or a record. Raises InvalidTopology."""
    by_id: dict[str, Subtopology] = {}
    for subtopology in message.subtopologies:
        if subtopology.subtopology_id in by_id:
            raise InvalidTopology(f"Subtopology {subtopology.subtopology_id} occurs twice.")
        if any(
            index < 0 or index >= len(subtopology.source_topics)
            for group in subtopology.copartition_groups
            for index in group.source_topics
        ) or any(
            index < 0 or index >= len(subtopology.repartition_source_topics)
            for group in subtopology.copartition_groups
            for index in group.repartition_source_topics
        ):
            raise InvalidTopology(
                f"A copartition group of subtopology {subtopology.subtopology_id} refers to a topic that the"
                " subtopology does not have."
            )
        if not subtopology.source_topics and not subtopology.repartition_source_topics:
            raise InvalidTopology(f"Subtopology {subtopology.subtopology_id} does not contain any source topics.")
        by_id[subtopology.subtopology_id] = Subtopology(
            subtopology.subtopology_id,
            tuple(sorted(subtopology.source_topics)),
            _parse_internal_topics(subtopology.state_changelog_topics),
            tuple(sorted(subtopology.repartition_sink_topics)),
            _parse_internal_topics(subtopology.repartition_source_topics),
            _copartition_groups(subtopology),
        )
    return Topology(message.epoch, tuple(by_id[name] for name in sorted(by_id)))


def _parse_internal_topics(topics: Iterable[Any]) -> tuple[InternalTopic, ...]:
    return tuple(
        sorted(
            (
                InternalTopic(
                    topic.name,
                    topic.partitions,
                    topic.replication_factor,
                    tuple(sorted((config.key, config.value) for config in topic.topic_configs)),
                )
                for topic in topics
            ),
            key=lambda topic: topic.name,
        )
    )


def _copartition_groups(message: Any) -> tuple[CopartitionGroup, ...]:
    """Translates the indexes, because the lists of topics are sorted."""
    sources = _sorted_indexes(message.source_topics)
    repartitions = _sorted_indexes([topic.name for topic in message.repartition_source_topics])
    groups = (
        CopartitionGroup(
            tuple(sorted(sources[index] for index in group.source_topics)),
            tuple(sorted(repartitions[index] for index in group.repartition_source_topics)),
        )
        for group in message.copartition_groups
    )
    return tuple(sorted(groups, key=lambda group: (group.source_topics, group.repartition_sources)))


def _sorted_indexes(names: list[str]) -> dict[int, int]:
    """Index in `names` -> index after sorting."""
    order = sorted(range(len(names)), key=names.__getitem__)
    return {number: position for position, number in enumerate(order)}


# -- configuration ---------------------------------------------------------------------------------


def configure(topology: Topology, existing_count_of: PartitionCountOf) -> ConfiguredTopology:
    """Raises InvalidTopology."""
    counts = _fixed_counts(topology)
    order = _derivation_order(topology, counts)
    sources = {name for subtopology in topology.subtopologies for name in subtopology.source_topics}
    missing_sources = sorted(name for name in sources if existing_count_of(name) is None)
    if missing_sources:
        return ConfiguredTopology(
            {}, {}, (MISSING_SOURCE_TOPICS, f"Source topics {_abbreviated_list(missing_sources)} are missing.")
        )

    def count_of(name: str) -> int | None:
        return counts.get(name) or existing_count_of(name)

    _derive_counts(order, counts, existing_count_of)
    try:
        for subtopology in topology.subtopologies:
            for group in subtopology.copartition_groups:
                _apply_copartition_group(subtopology, group, counts, existing_count_of)
        task_counts = {
            subtopology.subtopology_id: max(count_of(name) or 0 for name in subtopology.inputs)
            for subtopology in topology.subtopologies
        }
        for subtopology in topology.subtopologies:
            for topic in subtopology.changelogs:
                counts[topic.name] = task_counts[subtopology.subtopology_id]
        missing_topics = _missing_topics(topology, counts, existing_count_of)
    except _Mispartitioned as problem:
        return ConfiguredTopology({}, {}, (INCORRECTLY_PARTITIONED_TOPICS, str(problem)))
    if missing_topics:
        detail = f"Internal topics are missing: [{_abbreviated_list([topic.name for topic in missing_topics])}]"
        return ConfiguredTopology({}, counts, (MISSING_INTERNAL_TOPICS, detail), missing_topics)
    return ConfiguredTopology(task_counts, counts)


def _fixed_counts(topology: Topology) -> dict[str, int]:
    return {
        topic.name: topic.partitions
        for subtopology in topology.subtopologies
        for topic in subtopology.repartition_sources
        if topic.partitions > 0
    }


def _uncounted_topics(topology: Topology, counts: Mapping[str, int]) -> set[str]:
    """Repartition topics whose count is not known yet."""
    return {
        topic.name
        for subtopology in topology.subtopologies
        for topic in subtopology.repartition_sources
        if topic.name not in counts
    }


def _derivation_order(topology: Topology, fixed: Mapping[str, int]) -> list[tuple[str, list[Subtopology]]]:
    """Orders the repartition topics whose counts are not fixed so that each one follows all topics
    that its writers read. Returns (topic, the subtopologies that write it) pairs. Raises
    InvalidTopology if there is no such order.

    A topological sort in time proportional to the topology, because a client may send 10,000
    subtopologies in a chain.
    """
    unknown = _uncounted_topics(topology, fixed)
    writers: dict[str, list[Subtopology]] = {name: [] for name in unknown}
    readers: dict[str, list[Subtopology]] = {name: [] for name in unknown}
    unresolved_input_counts: dict[str, int] = {}  # subtopology -> inputs that are not in the order yet
    for subtopology in topology.subtopologies:
        for name in unknown.intersection(subtopology.repartition_sinks):
            writers[name].append(subtopology)
        read = unknown.intersection(topic.name for topic in subtopology.repartition_sources)
        for name in read:
            readers[name].append(subtopology)
        unresolved_input_counts[subtopology.subtopology_id] = len(read)
    if not all(writers.values()):
        raise InvalidTopology(
            "Failed to compute number of partitions for all repartition topics, because a repartition source topic"
            " is never used as a sink topic."
        )
    unresolved_writer_counts = {name: len(subtopologies) for name, subtopologies in writers.items()}
    order: list[tuple[str, list[Subtopology]]] = []
    ready = [
        subtopology for subtopology in topology.subtopologies if not unresolved_input_counts[subtopology.subtopology_id]
    ]
    while ready:
        for name in unknown.intersection(ready.pop().repartition_sinks):
            unresolved_writer_counts[name] -= 1
            if unresolved_writer_counts[name]:
                continue
            order.append((name, writers[name]))
            for subtopology in readers[name]:
                unresolved_input_counts[subtopology.subtopology_id] -= 1
                if not unresolved_input_counts[subtopology.subtopology_id]:
                    ready.append(subtopology)
    if len(order) < len(unknown):
        raise InvalidTopology(
            "Failed to compute number of partitions for all repartition topics. There may be loops in the topology"
            " that cannot be resolved."
        )
    return order


def _derive_counts(
    order: list[tuple[str, list[Subtopology]]], counts: dict[str, int], existing_count_of: PartitionCountOf
) -> None:
    largest_input_counts: dict[str, int] = {}  # subtopology -> partitions of its largest input
    for name, writers in order:
        for subtopology in writers:
            if subtopology.subtopology_id not in largest_input_counts:
                largest_input_counts[subtopology.subtopology_id] = max(
                    counts.get(input_name) or existing_count_of(input_name) or 0 for input_name in subtopology.inputs
                )
        counts[name] = max(largest_input_counts[subtopology.subtopology_id] for subtopology in writers)


def _apply_copartition_group(
    subtopology: Subtopology, group: CopartitionGroup, counts: dict[str, int], existing_count_of: PartitionCountOf
) -> None:
    sources = {
        subtopology.source_topics[index]: existing_count_of(subtopology.source_topics[index]) or 0
        for index in group.source_topics
    }
    repartitions = [subtopology.repartition_sources[index] for index in group.repartition_sources]
    fixed = {topic.name: topic.partitions for topic in repartitions if topic.partitions > 0}
    reference_counts = sources or fixed
    if len(set(reference_counts.values())) > 1:
        described = ", ".join(f"{name}={count}" for name, count in sorted(reference_counts.items()))
        raise _Mispartitioned(f"Following topics do not have the same number of partitions: [{described}]")
    count = next(iter(reference_counts.values()), 0) or max((counts[topic.name] for topic in repartitions), default=0)
    for name, actual in fixed.items():
        if actual != count:
            raise _Mispartitioned(
                f"Number of partitions [{actual}] of repartition topic [{name}] doesn't match number of partitions"
                f" [{count}] of the source topic."
            )
    counts.update((topic.name, count) for topic in repartitions)


def _missing_topics(
    topology: Topology, counts: Mapping[str, int], existing_count_of: PartitionCountOf
) -> tuple[NewTopic, ...]:
    new_topics: dict[str, NewTopic] = {}
    for subtopology in topology.subtopologies:
        for topic in (*subtopology.repartition_sources, *subtopology.changelogs):
            expected, actual = counts[topic.name], existing_count_of(topic.name)
            if actual is None:
                factor = topic.replication_factor if topic.replication_factor > 0 else -1
                new_topics[topic.name] = NewTopic(topic.name, expected, factor, topic.configs)
            elif actual != expected:
                raise _Mispartitioned(
                    f"Existing topic {topic.name} has different number of partitions: expected {expected}, found"
                    f" {actual}"
                )
    return tuple(new_topics[name] for name in sorted(new_topics))


def _abbreviated_list(names: list[str]) -> str:
    omitted_count = len(names) - LISTED_TOPICS_MAX
    return ", ".join(names[:LISTED_TOPICS_MAX]) + (
        f" and {omitted_count} additional topics" if omitted_count > 0 else ""
    )
