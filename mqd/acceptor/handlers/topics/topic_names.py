"""Topics in requests that name them by name or, in newer versions, by id."""

from mqd.acceptor.broker import Broker
from mqd.protocol.errors import ErrorCode


def name_of(broker: Broker, name: str, topic_id: bytes, by_id: bool) -> tuple[str, int]:
    """(name, 0), or ("", UNKNOWN_TOPIC_ID). A name is not looked up."""
    if not by_id:
        return name, 0
    topic = broker.metadata.by_id(topic_id)
    return (topic.name, 0) if topic is not None else ("", int(ErrorCode.UNKNOWN_TOPIC_ID))


def exists(broker: Broker, name: str, partition: int) -> int:
    """0, or UNKNOWN_TOPIC_OR_PARTITION."""
    return 0 if broker.partition_of(name, partition) is not None else int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
