"""Views (view.of): topics without partitions of their own. Metadata returns them with the partitions of
their base topic, which cannot be deleted before its views.
"""

from collections.abc import Callable, Mapping
from typing import NoReturn

from mqd.base.views import VIEW_FILTER, VIEW_OF
from mqd.cluster.host import messages
from mqd.cluster.metadata.features import MQD_VERSION, VIEWS_LEVEL, levels
from mqd.cluster.metadata.records import Record, TopicCreated, TopicState
from mqd.cluster.metadata.refusal import Refusal
from mqd.cluster.metadata.state import INTERNAL_TOPICS, MetadataState
from mqd.protocol.errors import ErrorCode

VIEWS_MAX = 1000  # per cluster


def is_view(topic: TopicState) -> bool:
    return bool(topic.config.get(VIEW_OF))


def views_of(state: MetadataState, name: str) -> list[str]:
    """The views of a topic."""
    return sorted(topic.name for topic in state.topics.values() if topic.config.get(VIEW_OF) == name)


def create(
    state: MetadataState, change: messages.CreateTopic, config: dict[str, str], new_id: Callable[[], bytes]
) -> list[Record]:
    """`config`: the checked configuration, which has view.of. Raises Refusal."""
    base = state.topics.get(config[VIEW_OF])
    if levels(state.features)[MQD_VERSION] < VIEWS_LEVEL:
        _refuse(
            f"it needs level {VIEWS_LEVEL} of {MQD_VERSION}, which all hosts must support; run `mqd cluster upgrade`"
            " once they do"
        )
    if base is None:
        _refuse(f"there is no topic {config[VIEW_OF]}; create it first")
    if base.name in INTERNAL_TOPICS:
        _refuse(f"{base.name} is an internal topic")
    if is_view(base):
        _refuse(
            f"{base.name} is itself a view, of {base.config[VIEW_OF]}; create a view of {base.config[VIEW_OF]} instead,"
            " whose filter combines the two conditions"
        )
    if change.name in INTERNAL_TOPICS:
        _refuse("internal topics cannot be views")
    if change.assignments:
        raise Refusal(
            ErrorCode.INVALID_REPLICA_ASSIGNMENT, f"A view has the partitions of {base.name} and takes no assignment."
        )
    if change.partition_count not in (-1, len(base.partitions)):
        raise Refusal(
            ErrorCode.INVALID_PARTITIONS,
            f"A view has the {len(base.partitions)} partition(s) of {base.name}; omit the number of partitions.",
        )
    if sum(map(is_view, state.topics.values())) >= VIEWS_MAX:
        raise Refusal(ErrorCode.POLICY_VIOLATION, f"There are {VIEWS_MAX} views already; delete some.")
    return [TopicCreated(TopicState(name=change.name, topic_id=new_id(), partitions=(), config=config))]


def check_filter_unchanged(config: Mapping[str, str], before: Mapping[str, str]) -> None:
    """Refuses changes to the filter: a consumer's offsets are valid only for the filter with which it read."""
    if any(config.get(name) != before.get(name) for name in (VIEW_OF, VIEW_FILTER)):
        _refuse(
            f"{VIEW_OF} and {VIEW_FILTER} are given when the topic is created and never change; create another view"
        )


def check_has_no_views(state: MetadataState, name: str) -> None:
    """Checks that the topic may be deleted. Raises Refusal."""
    views = views_of(state, name)
    if views:
        shown = ", ".join(views[:10]) + ("" if len(views) <= 10 else f" and {len(views) - 10} more")
        raise Refusal(ErrorCode.POLICY_VIOLATION, f"{name} has views ({shown}): delete them first.")


def check_not_view(topic: TopicState, verb: str) -> None:
    """Raises Refusal."""
    if is_view(topic):
        raise Refusal(
            ErrorCode.POLICY_VIOLATION,
            f"{topic.name} cannot be {verb}: it is a view and has the partitions of {topic.config[VIEW_OF]}.",
        )


def _refuse(reason: str) -> NoReturn:
    raise Refusal(ErrorCode.INVALID_CONFIG, f"Invalid value for configuration {VIEW_OF}: {reason}.")
