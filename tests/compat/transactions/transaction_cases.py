"""One request of every version of the transactions' APIs: (request, its error codes, whether its
content is right), for tests/compat/test_versions.py.
"""

from __future__ import annotations

from mqd.protocol.messages import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    DescribeProducersRequest,
    DescribeTransactionsRequest,
    EndTxnRequest,
    ListTransactionsRequest,
    TxnOffsetCommitRequest,
    WriteTxnMarkersRequest,
)
from tests.interaction.traffic import eventually
from tests.interaction.transactional import RawProducer, fresh

FIRST_V2 = {"add": 5, "end": 5, "commit": 5}
NOT_YET = {14, 15, 16}


def _producer(setting, version: int = 0) -> RawProducer:
    producer = RawProducer(setting.kafka, version=version)
    assert producer.init().error_code == 0
    return producer


def _add_partitions(setting, version: int) -> AddPartitionsToTxnRequest:
    producer = _producer(setting)
    topics = [AddPartitionsToTxnRequest.Topic(name=setting.topic, partitions=[0, 1])]
    if version >= 4:
        one = AddPartitionsToTxnRequest.Transaction(
            transactional_id=producer.name,
            producer_id=producer.producer_id,
            producer_epoch=producer.epoch,
            verify_only=False,
            topics=topics,
        )
        return AddPartitionsToTxnRequest(transactions=[one])
    return AddPartitionsToTxnRequest(
        v3_and_below_transactional_id=producer.name,
        v3_and_below_producer_id=producer.producer_id,
        v3_and_below_producer_epoch=producer.epoch,
        v3_and_below_topics=topics,
    )


def _added(response) -> list[int]:
    topics = [
        *response.results_by_topic_v3_and_below,
        *(topic for one in response.results_by_transaction for topic in one.topic_results),
    ]
    return [
        response.error_code,
        *(partition.partition_error_code for topic in topics for partition in topic.results_by_partition),
    ]


def _add_offsets(setting, version: int) -> AddOffsetsToTxnRequest:
    producer = _producer(setting)

    def request(group: str) -> AddOffsetsToTxnRequest:
        return AddOffsetsToTxnRequest(
            transactional_id=producer.name,
            producer_id=producer.producer_id,
            producer_epoch=producer.epoch,
            group_id=group,
        )

    eventually(
        lambda: setting.kafka.call(25, version, request("other")).error_code not in NOT_YET, "a group coordinator"
    )
    return request("versions")


def _end(setting, version: int) -> EndTxnRequest:
    producer = _producer(setting, 2 if version >= FIRST_V2["end"] else 0)
    if producer.version == 0:
        assert producer.add(setting.topic, 1) == 0
    return producer.end_request(False)


def _markers(setting, version: int) -> WriteTxnMarkersRequest:
    producer = _producer(setting)
    topics = [WriteTxnMarkersRequest.Topic(name=setting.topic, partition_indexes=[1])]
    marker = WriteTxnMarkersRequest.Marker(
        producer_id=producer.producer_id,
        producer_epoch=producer.epoch,
        transaction_result=False,
        topics=topics,
        coordinator_epoch=0,
    )
    return WriteTxnMarkersRequest(markers=[marker])


def _commit(setting, version: int) -> TxnOffsetCommitRequest:
    producer = _producer(setting, 2 if version >= FIRST_V2["commit"] else 0)
    group = fresh("versions")
    if producer.version == 0:
        request = AddOffsetsToTxnRequest(
            transactional_id=producer.name,
            producer_id=producer.producer_id,
            producer_epoch=producer.epoch,
            group_id=group,
        )
        eventually(lambda: setting.kafka.call(25, 3, request).error_code == 0, "a group coordinator")
    partitions = [TxnOffsetCommitRequest.Partition(partition_index=0, committed_offset=1, committed_metadata="")]
    return TxnOffsetCommitRequest(
        transactional_id=producer.name,
        group_id=group,
        producer_id=producer.producer_id,
        producer_epoch=producer.epoch,
        topics=[TxnOffsetCommitRequest.Topic(name=setting.topic, partitions=partitions)],
    )


def _describe(setting, version: int) -> DescribeTransactionsRequest:
    return DescribeTransactionsRequest(transactional_ids=[_producer(setting).name])


def _list(setting, version: int) -> ListTransactionsRequest:
    _producer(setting)
    return ListTransactionsRequest(state_filters=["Empty"], duration_filter=-1)


def _producers(setting, version: int) -> DescribeProducersRequest:
    return DescribeProducersRequest(topics=[DescribeProducersRequest.Topic(name=setting.topic, partition_indexes=[0])])


CASES = {
    24: (_add_partitions, _added, lambda s, v, r: len(_added(r)) == 3),
    25: (_add_offsets, lambda r: [r.error_code], lambda s, v, r: True),
    26: (_end, lambda r: [r.error_code], lambda s, v, r: v < FIRST_V2["end"] or r.producer_epoch == 1),
    27: (
        _markers,
        lambda r: [p.error_code for m in r.markers for t in m.topics for p in t.partitions],
        lambda s, v, r: len(r.markers) == 1,
    ),
    28: (
        _commit,
        lambda r: [p.error_code for t in r.topics for p in t.partitions],
        lambda s, v, r: r.topics[0].name == s.topic,
    ),
    61: (
        _producers,
        lambda r: [p.error_code for t in r.topics for p in t.partitions],
        lambda s, v, r: len(r.topics) == 1,
    ),
    65: (
        _describe,
        lambda r: [t.error_code for t in r.transaction_states],
        lambda s, v, r: r.transaction_states[0].transaction_state == "Empty",
    ),
    66: (_list, lambda r: [r.error_code], lambda s, v, r: len(r.transaction_states) > 0),
}
