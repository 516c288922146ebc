"""A share session with one leader (KIP-932): its epoch, its partitions, the acknowledgements that wait
for a request, and those under way. Sans-I/O.

A Session object is one session, from its first fetch to its end. When it has ended, its records are no
longer acquired: acknowledgements of them that wait, or come later, fail without a request.

Invariants
    H1  one request is under way at a time; epochs are 0, 1, 2, ... 2^31-1, then 1 again
    H2  the first request is a fetch with all partitions and without acknowledgements
    H3  every acknowledgement is in exactly one place: waiting (`acknowledgements`, `renewals`), under
        way, or reported
    H4  the ranges of a request ascend, do not overlap, and are of records acquired in this session
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from mqd.client.share.events import RENEW, Limits, Range, TopicIdPartition, merged
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import (
    ShareAcknowledgeRequest,
    ShareAcknowledgeResponse,
    ShareFetchRequest,
    ShareFetchResponse,
)

SHARE_FETCH, SHARE_ACKNOWLEDGE = 78, 79
FINAL_EPOCH, EPOCH_MAX = -1, (1 << 31) - 1
BATCH_RECORDS = 500
SESSION_LOST = int(ErrorCode.SHARE_SESSION_NOT_FOUND)
OUTCOME_UNKNOWN = int(ErrorCode.NETWORK_EXCEPTION)

Acknowledgements = dict[TopicIdPartition, list[Range]]
Results = list[tuple[TopicIdPartition, list[Range], int]]


class RequestUnderWay(NamedTuple):
    api_key: int
    acknowledgements: Mapping[TopicIdPartition, list[Range]]
    partitions: frozenset[TopicIdPartition]  # those in the session once the request has succeeded
    is_final: bool = False


class Session:
    """See the module. `node_id`: the leader."""

    def __init__(self, node_id: int, group_id: str, member_id: str) -> None:
        self.node_id = node_id
        self.epoch = 0
        self.is_dead = False
        self.partitions: frozenset[TopicIdPartition] = frozenset()
        self.acknowledgements: Acknowledgements = {}
        self.renewals: Acknowledgements = {}
        self.request_under_way: RequestUnderWay | None = None
        self._group_id, self._member_id = group_id, member_id

    @property
    def is_open(self) -> bool:
        return self.epoch > 0 and not self.is_dead

    @property
    def is_flushed(self) -> bool:
        """Whether the broker has confirmed all acknowledgements."""
        return (
            not self.acknowledgements
            and not self.renewals
            and (self.request_under_way is None or not self.request_under_way.acknowledgements)
        )

    def acknowledge(self, key: TopicIdPartition, added: Range) -> None:
        """Adds a range to the next request. The session must not be dead."""
        ranges = (self.renewals if added.type == RENEW else self.acknowledgements).setdefault(key, [])
        if added.type == RENEW and any(waiting.first <= added.first <= waiting.last for waiting in ranges):
            return  # H4: already waiting
        if ranges and ranges[-1].last + 1 == added.first and ranges[-1].type == added.type:
            ranges[-1] = Range(ranges[-1].first, added.last, added.type)
        else:
            ranges.append(added)

    # -- requests ----------------------------------------------------------------------------------

    def fetch_request(self, wanted: frozenset[TopicIdPartition], limits: Limits) -> ShareFetchRequest:
        """Returns a fetch of the `wanted` partitions from the leader `node_id`, with the waiting
        acknowledgements (but see H2).
        """
        acknowledgements, self.acknowledgements = (
            (self.acknowledgements, {}) if self.epoch else ({}, self.acknowledgements)
        )
        forgotten = self.partitions - wanted
        self.request_under_way = RequestUnderWay(SHARE_FETCH, acknowledgements, wanted)
        return ShareFetchRequest(
            group_id=self._group_id,
            member_id=self._member_id,
            share_session_epoch=self.epoch,
            max_wait_ms=limits.wait_ms,
            min_bytes=limits.bytes_min,
            max_bytes=limits.bytes_max,
            max_records=limits.records_max,
            batch_size=min(limits.records_max, BATCH_RECORDS),
            share_acquire_mode=int(limits.is_strict),
            topics=[
                ShareFetchRequest.Topic(
                    topic_id=topic_id,
                    partitions=[
                        ShareFetchRequest.Partition(
                            partition_index=index,
                            acknowledgement_batches=[
                                ShareFetchRequest.AcknowledgementBatch(
                                    first_offset=range_.first, last_offset=range_.last, acknowledge_types=[range_.type]
                                )
                                for range_ in merged(acknowledgements.get((topic_id, index), []))
                            ],
                        )
                        for index in indexes
                    ],
                )
                for topic_id, indexes in _by_topic((wanted - self.partitions) | acknowledgements.keys())
            ],
            forgotten_topics_data=[
                ShareFetchRequest.ForgottenTopic(topic_id=topic_id, partitions=indexes)
                for topic_id, indexes in _by_topic(forgotten)
            ],
        )

    def acknowledge_request(self, is_final: bool = False) -> ShareAcknowledgeRequest:
        """Returns a request with the waiting acknowledgements or, if there are none, with the
        renewals. `is_final` ends the session; then the broker releases all other records.
        """
        is_renewal = not self.acknowledgements and not is_final
        if is_renewal:
            acknowledgements, self.renewals = self.renewals, {}
        else:
            acknowledgements, self.acknowledgements = self.acknowledgements, {}
        self.request_under_way = RequestUnderWay(SHARE_ACKNOWLEDGE, acknowledgements, self.partitions, is_final)
        return ShareAcknowledgeRequest(
            group_id=self._group_id,
            member_id=self._member_id,
            share_session_epoch=FINAL_EPOCH if is_final else self.epoch,
            is_renew_ack=is_renewal,
            topics=[
                ShareAcknowledgeRequest.Topic(
                    topic_id=topic_id,
                    partitions=[
                        ShareAcknowledgeRequest.Partition(
                            partition_index=index,
                            acknowledgement_batches=[
                                ShareAcknowledgeRequest.AcknowledgementBatch(
                                    first_offset=range_.first, last_offset=range_.last, acknowledge_types=[range_.type]
                                )
                                for range_ in merged(acknowledgements[topic_id, index])
                            ],
                        )
                        for index in indexes
                    ],
                )
                for topic_id, indexes in _by_topic(acknowledgements)
            ],
        )

    # -- responses ---------------------------------------------------------------------------------

    def on_response(self, response: ShareFetchResponse | ShareAcknowledgeResponse) -> Results:
        """Returns the results of the acknowledgements in the request under way. An error of the whole
        request ends the session.
        """
        request, self.request_under_way = self.request_under_way, None
        assert request is not None  # H1
        if response.error_code:
            return [*_with_code(request.acknowledgements, response.error_code), *self.end(SESSION_LOST)]
        self.epoch = self.epoch + 1 if self.epoch < EPOCH_MAX else 1
        self.partitions = request.partitions
        codes = {
            (topic.topic_id, partition.partition_index): partition.acknowledge_error_code
            if isinstance(partition, ShareFetchResponse.Partition)
            else partition.error_code
            for topic in response.responses
            for partition in topic.partitions
        }
        reported = [(key, ranges, codes.get(key, 0)) for key, ranges in request.acknowledgements.items()]
        return [*reported, *self.end(SESSION_LOST)] if request.is_final else reported

    def on_no_response(self) -> Results:
        """Ends the session, because the connection has ended or the response is late."""
        request, self.request_under_way = self.request_under_way, None
        unknown = _with_code(request.acknowledgements, OUTCOME_UNKNOWN) if request is not None else []
        return [*unknown, *self.end(SESSION_LOST)]

    def end(self, code: int) -> Results:
        """Fails the waiting acknowledgements with `code`. No request is under way."""
        self.is_dead = True
        waiting, self.acknowledgements, self.renewals = [self.acknowledgements, self.renewals], {}, {}
        return [entry for acknowledgements in waiting for entry in _with_code(acknowledgements, code)]

    def check(self) -> None:
        assert self.epoch or not (self.request_under_way and self.request_under_way.acknowledgements), "H2"
        assert not self.is_dead or (not self.acknowledgements and not self.renewals), "H3"


def _with_code(acknowledgements: Mapping[TopicIdPartition, list[Range]], code: int) -> Results:
    return [(key, ranges, code) for key, ranges in acknowledgements.items()]


def _by_topic(keys: Iterable[TopicIdPartition]) -> list[tuple[bytes, list[int]]]:
    topics: dict[bytes, list[int]] = {}
    for topic_id, index in sorted(keys):
        topics.setdefault(topic_id, []).append(index)
    return list(topics.items())
