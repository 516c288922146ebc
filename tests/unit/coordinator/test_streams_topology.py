"""Topologies of Kafka Streams, configured against the topics that exist."""

from __future__ import annotations

import pytest

from mqd.coordinator.group.streams import records
from mqd.coordinator.group.streams.topology import (
    INCORRECTLY_PARTITIONED_TOPICS,
    MISSING_INTERNAL_TOPICS,
    MISSING_SOURCE_TOPICS,
    ConfiguredTopology,
    InvalidTopology,
    NewTopic,
    Topology,
    configure,
    parse,
)
from mqd.protocol.messages import StreamsGroupHeartbeatRequest as Request

COMPACT = (("cleanup.policy", "compact"),)


def internal(name: str, partitions: int = 0, *, compact: bool = False) -> Request.TopicInfo:
    configs = [Request.KeyValue(key=key, value=value) for key, value in COMPACT] if compact else []
    return Request.TopicInfo(name=name, partitions=partitions, topic_configs=configs)


def subtopology(number: int, **fields) -> Request.Subtopology:
    return Request.Subtopology(subtopology_id=str(number), **fields)


def topology(*subtopologies: Request.Subtopology) -> Topology:
    return parse(Request.Topology(epoch=3, subtopologies=list(subtopologies)))


def configured(made: Topology, **existing: int) -> ConfiguredTopology:
    return configure(made, {name.replace("_", "-"): count for name, count in existing.items()}.get)


JOINED = topology(
    subtopology(0, source_topics=["orders"], repartition_sink_topics=["by-number"]),
    subtopology(
        1,
        source_topics=["payments"],
        repartition_source_topics=[internal("by-number")],
        state_changelog_topics=[internal("changelog", compact=True)],
        copartition_groups=[Request.CopartitionGroup(source_topics=[0], repartition_source_topics=[0])],
    ),
)


def test_missing_source_topics_are_named() -> None:
    found = configured(JOINED, payments=2)
    assert found.status == (MISSING_SOURCE_TOPICS, "Source topics orders are missing.") and not found.missing_topics


def test_internal_topics_get_the_partition_count_of_joined_topics() -> None:
    found = configured(JOINED, orders=5, payments=2)
    assert found.status == (MISSING_INTERNAL_TOPICS, "Internal topics are missing: [by-number, changelog]")
    assert found.missing_topics == (NewTopic("by-number", 2, -1, ()), NewTopic("changelog", 2, -1, COMPACT))
    assert not found.task_counts


def test_a_topology_is_ready_when_all_its_topics_exist() -> None:
    found = configured(JOINED, orders=5, payments=2, by_number=2, changelog=2)
    assert found.is_ready and found.task_counts == {"0": 5, "1": 2} and not found.missing_topics


def test_an_internal_topic_with_another_partition_count_is_refused() -> None:
    found = configured(JOINED, orders=5, payments=2, by_number=3)
    assert found.status == (
        INCORRECTLY_PARTITIONED_TOPICS,
        "Existing topic by-number has different number of partitions: expected 2, found 3",
    )


def test_copartitioned_source_topics_need_equal_partition_counts() -> None:
    both = [Request.CopartitionGroup(source_topics=[0, 1])]
    found = configured(topology(subtopology(0, source_topics=["b", "a"], copartition_groups=both)), a=1, b=2)
    assert found.status == (
        INCORRECTLY_PARTITIONED_TOPICS,
        "Following topics do not have the same number of partitions: [a=1, b=2]",
    )


def test_a_fixed_repartition_topic_must_match_the_source_topic() -> None:
    fixed = subtopology(
        0,
        source_topics=["a"],
        repartition_source_topics=[internal("r", 4)],
        copartition_groups=[Request.CopartitionGroup(source_topics=[0], repartition_source_topics=[0])],
    )
    found = configured(topology(fixed), a=3)
    assert found.status is not None and found.status[0] == INCORRECTLY_PARTITIONED_TOPICS
    assert "Number of partitions [4] of repartition topic [r]" in found.status[1]


def test_repartition_topics_follow_each_other() -> None:
    chain = topology(
        subtopology(2, repartition_source_topics=[internal("second")]),
        subtopology(1, repartition_source_topics=[internal("first")], repartition_sink_topics=["second"]),
        subtopology(0, source_topics=["a", "b"], repartition_sink_topics=["first"]),
    )
    found = configured(chain, a=2, b=7)
    assert [(topic.name, topic.partition_count) for topic in found.missing_topics] == [("first", 7), ("second", 7)]


@pytest.mark.parametrize(
    ("subtopologies", "reason"),
    [
        ([subtopology(0, repartition_source_topics=[internal("r")])], "never used as a sink topic"),
        (
            [subtopology(0, repartition_source_topics=[internal("r")], repartition_sink_topics=["r"])],
            "There may be loops",
        ),
        ([subtopology(0)], "does not contain any source topics"),
        ([subtopology(0, source_topics=["a"]), subtopology(0, source_topics=["b"])], "occurs twice"),
        (
            [subtopology(0, source_topics=["a"], copartition_groups=[Request.CopartitionGroup(source_topics=[1])])],
            "refers to a topic that the subtopology does not have",
        ),
    ],
)
def test_a_topology_that_no_topics_could_satisfy_is_invalid(subtopologies: list, reason: str) -> None:
    with pytest.raises(InvalidTopology, match=reason):
        configured(topology(*subtopologies), a=1, b=1)


def test_the_order_of_a_clients_topics_is_irrelevant() -> None:
    def made(names: list[str], first: int) -> Topology:
        group = Request.CopartitionGroup(source_topics=[first])
        return topology(subtopology(0, source_topics=names, copartition_groups=[group]))

    assert made(["a", "b"], 1) == made(["b", "a"], 0) != made(["a", "b"], 0)


def test_a_topology_is_read_back_from_its_record() -> None:
    _, value = records.topology_record("g", JOINED)
    assert value is not None and records.decode_topology(value) == JOINED
