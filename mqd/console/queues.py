"""The data of the queues page: share groups, their backlogs, and their failed records."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

import msgspec
from confluent_kafka import KafkaException

from mqd.base.dead_letters import TOPIC as DEAD_LETTER_TOPIC_PROPERTY
from mqd.cli import share_groups
from mqd.cli.broker_lookup import EARLIEST, LATEST, Cluster
from mqd.cli.common import CliError, Settings
from mqd.cli.group_listing import Group
from mqd.console.queries import AGES_MAX, DESCRIBE_CONFIGS, record_ages
from mqd.protocol.messages import DescribeConfigsRequest

GROUP_RESOURCE = 32


class Queue(msgspec.Struct, frozen=True):
    """A share group. `backlog`: how many records it has not finished; `oldest_s`: the age of the
    oldest of them in seconds. `waiting_by_delivery_count`: delivery count -> number of records that
    wait for their next delivery because they were released or their lock has expired.
    `dead_letter_topic`: the topic of its dead letters, or ""; `dead_letter_count`: how many offsets
    that topic has, an upper bound on the number of dead letters. A value is None if it is unknown.
    """

    group: Group
    topics: tuple[str, ...]
    backlog: int | None
    oldest_s: float | None
    waiting_by_delivery_count: dict[int, int]
    dead_letter_topic: str
    dead_letter_count: int | None


def queues(settings: Settings, groups: list[Group]) -> list[Queue]:
    """The queues of the share groups on one page of the list. Raises CliError."""
    with Cluster(settings.bootstrap) as cluster:
        positions = {group.group: share_groups.offsets(cluster, group.group, with_deliveries=True) for group in groups}
        dead_letter_topics = {group.group: _dead_letter_topic(cluster, group.group) for group in groups}
        partitions = [
            (topic, index)
            for topic, indexes in cluster.topics({topic for topic in dead_letter_topics.values() if topic}).items()
            for index in indexes
        ]
        ends, starts = cluster.offsets(partitions, LATEST), cluster.offsets(partitions, EARLIEST)
    dead_letter_counts: Counter[str] = Counter()
    for partition in ends.keys() & starts.keys():
        dead_letter_counts[partition[0]] += ends[partition] - starts[partition]
    return [
        Queue(
            group,
            tuple(sorted({topic for topic, _ in positions[group.group]})),
            sum(position.lag or 0 for position in positions[group.group].values()) if positions[group.group] else None,
            _oldest_s(settings, positions[group.group]),
            _sum_counts(position.records_by_delivery_count for position in positions[group.group].values()),
            dead_letter_topics[group.group],
            dead_letter_counts.get(dead_letter_topics[group.group]),
        )
        for group in groups
    ]


def _sum_counts(counts_by_partition: Iterable[dict[int, int]]) -> dict[int, int]:
    total: Counter[int] = Counter()
    for counts in counts_by_partition:
        total.update(counts)
    return dict(sorted(total.items()))


def _oldest_s(settings: Settings, positions: dict[tuple[str, int], share_groups.SharePosition]) -> float | None:
    """The age of the oldest waiting record in seconds; None if no record waits, or none can be read."""
    offsets = {partition: position.offset for partition, position in positions.items() if position.lag}
    if not offsets:
        return None
    try:
        return max(record_ages(settings, dict(itertools.islice(offsets.items(), AGES_MAX))).values(), default=None)
    except (CliError, KafkaException):
        return None


def _dead_letter_topic(cluster: Cluster, name: str) -> str:
    """The topic of the group's dead letters; "": there is none, or this user may not see it."""
    resource = DescribeConfigsRequest.Resource(resource_type=GROUP_RESOURCE, resource_name=name)
    (result,) = cluster.bootstrap_broker.request(DESCRIBE_CONFIGS, DescribeConfigsRequest(resources=[resource])).results
    if result.error_code:
        return ""
    return next((config.value or "" for config in result.configs if config.name == DEAD_LETTER_TOPIC_PROPERTY), "")
