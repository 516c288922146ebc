"""Topics in requests that identify them by name or, in newer versions, by id."""

from mqd.acceptor.broker import Broker
from mqd.cluster.metadata.refusal import Refusal
from mqd.cluster.metadata.rules.topics import check_topic_name
from mqd.protocol.errors import ErrorCode


def name_of(broker: Broker, name: str, topic_id: bytes, by_id: bool) -> tuple[str, int]:
    """(name, 0), or ("", UNKNOWN_TOPIC_ID). Only an id is looked up; a name is returned as it is."""
    if not by_id:
        return name, 0
    topic = broker.metadata.by_id(topic_id)
    return (topic.name, 0) if topic is not None else ("", int(ErrorCode.UNKNOWN_TOPIC_ID))


def partition_error(broker: Broker, name: str, partition: int) -> int:
    """0 if the partition exists, otherwise UNKNOWN_TOPIC_OR_PARTITION."""
    return 0 if broker.partition_of(name, partition) is not None else int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)


def is_valid_name(name: str) -> bool:
    """Whether this is a valid topic name."""
    try:
        check_topic_name(name)
    except Refusal:
        return False
    return True


def missing_topic_error(name: str) -> int:
    """The error for a topic that does not exist."""
    return int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if is_valid_name(name) else ErrorCode.INVALID_TOPIC_EXCEPTION)
