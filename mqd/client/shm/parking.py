"""A sleeping consumer's request: one Fetch for positions only, in an incremental session (KIP-227).
The broker responds when one of the partitions has grown. Sans-I/O.

    session = PositionSession(isolation_level, rack_id)
    request = session.request({(topic_id, partition): offset, ...}, max_wait_ms)
                                    # contains only what differs from the last request
    for topic_id, partition, data in session.on_response(response): ...
                                    # the partitions that have grown, or have an error
    session.reset()                 # if there was no response: the next request is a full one

With a thousand idle partitions and one busy one, a request and its response take only a few bytes.

    I1  `_sent` has the same offsets as the broker's session: those of the last request, whether it is
        answered or still in flight (one request at a time)
    I2  after a response with an error, or without a session (id 0), the next request is a full one
    I3  max_bytes is 0: the broker sends no records (shm/local_layout.h, A6)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import FetchRequest

PartitionKey = tuple[bytes, int]  # topic id, partition

PARTITION_MAX_BYTES = 1 << 20
_EPOCH_FULL, _EPOCH_MAX = 0, 2**31 - 1
_SESSION_ERRORS = frozenset(
    {
        ErrorCode.FETCH_SESSION_ID_NOT_FOUND,
        ErrorCode.INVALID_FETCH_SESSION_EPOCH,
        ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR,
    }
)


class PositionSession:
    """See the module. `isolation_level` 1 = read_committed: responses list the aborted transactions."""

    def __init__(self, isolation_level: int = 0, rack_id: str = "") -> None:
        self._isolation_level, self._rack_id = isolation_level, rack_id
        self._session_id = 0
        self._epoch = _EPOCH_FULL
        self._sent: dict[PartitionKey, int] = {}  # I1

    def reset(self) -> None:
        self._session_id, self._epoch = 0, _EPOCH_FULL
        self._sent = {}

    def request(self, positions: Mapping[PartitionKey, int], max_wait_ms: int, min_bytes: int = 1) -> FetchRequest:
        """Returns the next request, for version 13 or later. `positions`: all awaited partitions, each
        with the offset of the next expected record.
        """
        changed = [(key, offset) for key, offset in positions.items() if self._sent.get(key) != offset]
        gone = [key for key in self._sent if key not in positions]
        self._sent = dict(positions)
        return FetchRequest(
            max_wait_ms=max_wait_ms,
            min_bytes=min_bytes,
            max_bytes=0,
            isolation_level=self._isolation_level,
            session_id=self._session_id,
            session_epoch=self._epoch,
            topics=_topics(changed),
            forgotten_topics_data=_forgotten(gone),
            rack_id=self._rack_id,
        )

    def on_response(self, response: Any) -> Iterator[tuple[bytes, int, Any]]:
        """Yields (topic id, partition, its data) for the partitions in the response, none when
        response.error_code is set.
        """
        if response.error_code or not response.session_id:
            self.reset()
        else:
            self._session_id = response.session_id
            self._epoch = 1 if self._epoch == _EPOCH_MAX else self._epoch + 1
        return (
            (topic.topic_id, partition.partition_index, partition)
            for topic in response.responses
            for partition in topic.partitions
        )

    @staticmethod
    def is_session_error(code: int) -> bool:
        """Whether this error means that the broker has dropped the session, which was idle for a long
        time, or whose worker was restarted. Harmless: the next request creates a new session.
        """
        return code in _SESSION_ERRORS


def _topics(changed: list[tuple[PartitionKey, int]]) -> list[FetchRequest.Topic]:
    topics: dict[bytes, FetchRequest.Topic] = {}
    for (topic_id, partition), offset in changed:
        topic = topics.get(topic_id)
        if topic is None:
            topic = topics[topic_id] = FetchRequest.Topic(topic_id=topic_id)
        topic.partitions.append(
            FetchRequest.Partition(partition=partition, fetch_offset=offset, partition_max_bytes=PARTITION_MAX_BYTES)
        )
    return list(topics.values())


def _forgotten(gone: list[PartitionKey]) -> list[FetchRequest.ForgottenTopic]:
    topics: dict[bytes, FetchRequest.ForgottenTopic] = {}
    for topic_id, partition in gone:
        topic = topics.get(topic_id)
        if topic is None:
            topic = topics[topic_id] = FetchRequest.ForgottenTopic(topic_id=topic_id)
        topic.partitions.append(partition)
    return list(topics.values())
