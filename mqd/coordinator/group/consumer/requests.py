"""Reads ConsumerGroupHeartbeat requests and writes their responses, without the group's state."""

from __future__ import annotations

from collections.abc import Sequence

from mqd.coordinator.group.consumer.events import ConsumerHeartbeat
from mqd.coordinator.group.consumer.records import Description, Partitions
from mqd.coordinator.group.regex import BadExpression, RegexMatcher
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import ConsumerGroupHeartbeatRequest, ConsumerGroupHeartbeatResponse

_TopicPartitions, _Assignment = (
    ConsumerGroupHeartbeatResponse.TopicPartitions,
    ConsumerGroupHeartbeatResponse.Assignment,
)


NAME_CHARS_MAX = 8_000  # a record's string holds 32,767 bytes
SUBSCRIPTION_CHARS_MAX = 250_000  # limit for all names of one member, which go into one record


class Refused(Exception):
    """The request is answered with this error; nothing has changed."""

    def __init__(self, error: int, message: str) -> None:
        super().__init__(message)
        self.error, self.message = int(error), message


def problem_of(
    message: ConsumerGroupHeartbeatRequest, api_version: int, assignors: tuple[str, ...]
) -> tuple[int, str] | None:
    """(error, reason) if the request is invalid whatever the group's state is; otherwise None."""
    epoch, invalid = message.member_epoch, int(ErrorCode.INVALID_REQUEST)
    if not message.group_id.strip():
        return invalid, "GroupId can't be empty."
    if not message.member_id and (api_version >= 1 or epoch > 0 or epoch == -1):
        return invalid, "MemberId can't be empty."
    if message.instance_id == "":
        return invalid, "InstanceId can't be empty."
    if message.rack_id == "":
        return invalid, "RackId can't be empty."
    if epoch < -2:
        return invalid, "MemberEpoch is invalid."
    if epoch == -2 and message.instance_id is None:
        return invalid, "InstanceId can't be null."
    if epoch == 0:
        if message.rebalance_timeout_ms == -1:
            return invalid, "RebalanceTimeoutMs must be provided in first request."
        if message.topic_partitions is None or message.topic_partitions:
            return invalid, "TopicPartitions must be empty when (re-)joining."
        if message.subscribed_topic_names is None and message.subscribed_topic_regex is None:
            return invalid, "Either SubscribedTopicNames or SubscribedTopicRegex must be non-null when (re-)joining."
    if message.rebalance_timeout_ms < -1:
        return invalid, f"RebalanceTimeoutMs cannot be {message.rebalance_timeout_ms}."
    names = message.subscribed_topic_names or ()
    if is_too_long(names, message.group_id, message.member_id, message.instance_id, message.rack_id):
        return invalid, too_long_message()
    if message.server_assignor is not None and message.server_assignor not in assignors:
        return (
            int(ErrorCode.UNSUPPORTED_ASSIGNOR),
            f"ServerAssignor {message.server_assignor} is not supported. Supported assignors: {', '.join(assignors)}.",
        )
    return None


def is_too_long(names: Sequence[str], *texts: str | None) -> bool:
    """`names`: the subscribed topics."""
    return sum(map(len, names)) > SUBSCRIPTION_CHARS_MAX or any(
        text is not None and len(text) > NAME_CHARS_MAX for text in (*texts, *names)
    )


def too_long_message() -> str:
    return f"A name has more than {NAME_CHARS_MAX} characters, or the subscription more than {SUBSCRIPTION_CHARS_MAX}."


def owned_partitions(message: ConsumerGroupHeartbeatRequest) -> Partitions | None:
    """The partitions that the member reports; None: the request does not list them."""
    if message.topic_partitions is None:
        return None
    return {topic.topic_id: tuple(topic.partitions) for topic in message.topic_partitions if topic.partitions}


def sets_all_fields(message: ConsumerGroupHeartbeatRequest) -> bool:
    """Whether all fields are set: the member is joining, or has lost a response."""
    subscribes = message.subscribed_topic_names is not None or message.subscribed_topic_regex is not None
    return message.member_epoch == 0 or (
        message.rebalance_timeout_ms != -1 and subscribes and message.topic_partitions is not None
    )


def updated_description(old: Description | None, event: ConsumerHeartbeat, matcher: RegexMatcher) -> Description:
    """The member's description of itself; absent fields keep their value. Returns `old` itself if
    nothing has changed. Raises Refused.
    """
    message = event.message
    if (
        old is not None
        and old.classic is None
        and event.client_id == old.client_id
        and event.client_host == old.client_host
        and (event.authorized_as == old.authorized_as or not old.topic_regex)
        and not _sets_any_field(message)
    ):
        return old
    regex = message.subscribed_topic_regex
    if regex and (old is None or regex != old.topic_regex):
        try:
            matcher.check(regex)
        except BadExpression as error:
            raise Refused(
                ErrorCode.INVALID_REGULAR_EXPRESSION,
                f"SubscribedTopicRegex `{regex[:200]}` is not a valid regular expression: {error}.",
            ) from None
    names = message.subscribed_topic_names
    expression = (regex or None) if regex is not None else old.topic_regex if old else None
    new = Description(
        message.instance_id if message.instance_id is not None else old.instance_id if old else None,
        message.rack_id if message.rack_id is not None else old.rack_id if old else None,
        event.client_id,
        event.client_host,
        tuple(sorted(set(names))) if names is not None else old.topic_names if old else (),
        expression,
        message.rebalance_timeout_ms if message.rebalance_timeout_ms != -1 else old.rebalance_timeout_ms if old else -1,
        message.server_assignor if message.server_assignor is not None else old.server_assignor if old else None,
        authorized_as=event.authorized_as if expression else None,
    )
    return old if old is not None and new == old else new


def _sets_any_field(message: ConsumerGroupHeartbeatRequest) -> bool:
    return (
        message.subscribed_topic_names is not None
        or message.subscribed_topic_regex is not None
        or message.rebalance_timeout_ms != -1
        or message.server_assignor is not None
        or message.rack_id is not None
        or message.instance_id is not None
    )


def assignment(partitions: Partitions) -> ConsumerGroupHeartbeatResponse.Assignment:
    return _Assignment(
        topic_partitions=[
            _TopicPartitions(topic_id=topic_id, partitions=list(indexes)) for topic_id, indexes in partitions.items()
        ]
    )
