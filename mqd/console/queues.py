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


def queues(settings: Settings, known: list[Group]) -> list[Queue]:
    """The queues of the share groups on one page of the list. Raises CliError."""
    with Cluster(settings.bootstrap) as cluster:
        positions = {one.group: share_groups.offsets(cluster, one.group, with_deliveries=True) for one in known}
        topics = {one.group: _dead_letter_topic(cluster, one.group) for one in known}
        partitions = [
            (topic, index)
            for topic, indexes in cluster.topics({topic for topic in topics.values() if topic}).items()
            for index in indexes
        ]
        ends, starts = cluster.offsets(partitions, LATEST), cluster.offsets(partitions, EARLIEST)
    dead_letter_counts: Counter[str] = Counter()
    for partition in ends.keys() & starts.keys():
        dead_letter_counts[partition[0]] += ends[partition] - starts[partition]
    return [
        Queue(
            one,
            tuple(sorted({topic for topic, _ in positions[one.group]})),
            sum(position.lag or 0 for position in positions[one.group].values()) if positions[one.group] else None,
            _oldest(settings, positions[one.group]),
            _sum_counts(position.records_by_delivery_count for position in positions[one.group].values()),
            topics[one.group],
            dead_letter_counts.get(topics[one.group]),
        )
        for one in known
    ]


def _sum_counts(counts: Iterable[dict[int, int]]) -> dict[int, int]:
    total: Counter[int] = Counter()
    for one in counts:
        total.update(one)
    return dict(sorted(total.items()))


def _oldest(settings: Settings, positions: dict[tuple[str, int], share_groups.SharePosition]) -> float | None:
    """The age of the oldest waiting record in seconds; None if no record waits, or none can be read."""
    offsets = {partition: one.offset for partition, one in positions.items() if one.lag}
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
    return next((one.value or "" for one in result.configs if one.name == DEAD_LETTER_TOPIC_PROPERTY), "")
