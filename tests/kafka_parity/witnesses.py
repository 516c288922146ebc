"""Directed cases: the states that lines of the table of allowed differences are about, where the
generator seldom produces them. They follow the generated cases of their API and version, and the
quick tier compares all of them: a line that none of its witnesses meets any more is removed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from mqd.protocol import KNOWN
from mqd.protocol import messages as m
from tests.kafka_parity import stories
from tests.kafka_parity.compare import ANY, ON_RESEND, Allowed
from tests.kafka_parity.model import Batch, Case, Ref, Step, TopicSetup
from tests.kafka_parity.values import GROUP, LIBRARY, SHARE_MEMBER, TXN, A, B

FIRST_NUMBER = 100_000  # of a directed case: beyond those of every seed


@dataclasses.dataclass(frozen=True)
class Witness:
    """`requests` returns the requests under test in a version; `before` prepares, `after` queries the
    results.
    """

    api: str
    versions: tuple[int, ...]
    field: str
    requests: Callable[[int], list[object]]
    kafka: object = ANY
    mqd: object = ANY
    before: tuple[Step, ...] = ()
    after: tuple[Step, ...] = ()
    of: str = ""  # the API of the line, if it is not the one under test

    def is_for(self, entry: Allowed) -> bool:
        return (entry.api, entry.field, entry.kafka, entry.mqd) == (
            self.of or self.api,
            self.field,
            self.kafka,
            self.mqd,
        )

    def case(self, version: int) -> Case:
        key = stories.KEYS[self.api]
        connection = stories.SHARE_CONNECTION if self.api in ("ShareFetch", "ShareAcknowledge") else 0
        saves = stories.SAVES.get(self.api, ())
        tested = [Step(key, version, request, saves, connection) for request in self.requests(version)]
        return Case(key, version, (TopicSetup(A, 2), TopicSetup(B, 1)), (*self.before, *tested, *self.after))


def directed(api_key: int, version: int) -> list[tuple[int, Case]]:
    """The directed cases of an API's version, with their numbers."""
    own = [one.case(version) for one in WITNESSES if one.api == KNOWN[api_key].name and version in one.versions]
    distinct = {repr(case): case for case in own}
    return [(FIRST_NUMBER + number, case) for number, case in enumerate(distinct.values())]


# -- Produce ---------------------------------------------------------------------------------------


def _transactional(batch: Batch, acks: int = -1) -> object:
    data = m.ProduceRequest.TopicData(
        name=A, topic_id=Ref("topic_id", A), partition_data=[m.ProduceRequest.PartitionData(index=0, records=batch)]
    )
    return m.ProduceRequest(TXN, acks=acks, timeout_ms=10_000, topic_data=[data])


def _begun(sequence: int = 0, epoch_plus: int = 0, damage: str = "") -> Batch:
    epoch = Ref("producer_epoch", "one", epoch_plus)
    return Batch((b"in txn",), None, "none", stories.ONE_ID, epoch, sequence, is_transactional=True, damage=damage)


_COMMITTED = (
    stories.init_producer(),
    stories.add_partitions(),
    stories.produce(A, stories.transactional_batch(), TXN),
    stories.end(True),
    stories.until_stable(),
)

_BEGUN_AGAIN = (*_COMMITTED, stories.add_partitions())


# -- configurations --------------------------------------------------------------------------------


def _in_sync(broker: str) -> object:
    resource = m.DescribeConfigsRequest.Resource(4, broker, ["min.insync.replicas"])
    return m.DescribeConfigsRequest([resource], include_synonyms=True)


# -- share groups ----------------------------------------------------------------------------------


def _altered(start: int) -> object:
    partition = m.AlterShareGroupOffsetsRequest.Partition(0, start)
    return m.AlterShareGroupOffsetsRequest(GROUP, [m.AlterShareGroupOffsetsRequest.Topic(A, [partition])])


def _acknowledging(first: int, last: int, name: str = A) -> object:
    batch = m.ShareFetchRequest.AcknowledgementBatch(first, last, [1])
    topic = m.ShareFetchRequest.Topic(
        Ref("topic_id", name), [m.ShareFetchRequest.Partition(0, acknowledgement_batches=[batch])]
    )
    return m.ShareFetchRequest(GROUP, SHARE_MEMBER, 1, max_wait_ms=100, max_records=500, batch_size=500, topics=[topic])


def _closing(name: str, *indexes: int) -> object:
    """The last fetch of a session, which acknowledges."""
    batches = [m.ShareFetchRequest.AcknowledgementBatch(0, 2, [1])]
    partitions = [m.ShareFetchRequest.Partition(index, acknowledgement_batches=batches) for index in indexes]
    topics = [m.ShareFetchRequest.Topic(Ref("topic_id", name), partitions)]
    return m.ShareFetchRequest(GROUP, SHARE_MEMBER, -1, max_wait_ms=100, max_records=500, batch_size=500, topics=topics)


_LEFT = (*stories.SHARE_HISTORIES[3], stories.share_heartbeat(-1))
_EPOCH = "groups[].group_epoch"


def _raised(kafka: int, count: int) -> Witness:
    return Witness(
        "AlterShareGroupOffsets",
        (0,),
        _EPOCH,
        lambda _: [_altered(start) for start in range(count)],
        kafka,
        kafka + count,
        before=_LEFT if kafka else (),
        after=tuple(stories.look_at_shares()),
        of="ShareGroupDescribe",
    )


# -- classic groups --------------------------------------------------------------------------------


def _joining(member_id: object) -> object:
    protocols = [m.JoinGroupRequest.Protocol("range", b"\0\1\0\0\0\0\xff\xff\xff\xff")]
    return m.JoinGroupRequest(GROUP, 30_000, 30_000, member_id, None, "consumer", protocols)


def _waiting(name: str) -> tuple[Step, ...]:
    """One more member, which waits until the leader rejoins."""
    member, key = Ref("member_id", name), stories.KEYS["JoinGroup"]
    return (Step(key, 4, _joining(""), ((member, "member_id"),)), Step(key, 4, _joining(member)))


# -- configurations --------------------------------------------------------------------------------


def _incremental(resource_type: int, name: str, *configs: tuple[str, int, str]) -> object:
    made = [m.IncrementalAlterConfigsRequest.Config(*config) for config in configs]
    return m.IncrementalAlterConfigsRequest(
        [m.IncrementalAlterConfigsRequest.Resource(resource_type, name, made)], True
    )


def _created(name: str) -> object:
    return m.CreateTopicsRequest([m.CreateTopicsRequest.Topic(name, 1, 1)], 30_000)


def _quotas_set(*keys: str) -> object:
    request = m.AlterClientQuotasRequest
    entity = request.EntityData("client-id", "¤c")
    return request([request.EntryData([entity], [request.OpData(key, 1e9, False) for key in keys])], False)


def _quotas_seen() -> Step:
    request = m.DescribeClientQuotasRequest
    seen = request([request.ComponentData("client-id", 0, "¤c")], True)
    return Step(stories.KEYS["DescribeClientQuotas"], 1, seen, settles=True, awaits="entries.values.key")


_OWN = (
    "flush.on.ack", "record.validation", "replica.lag.max.messages", "schedule.to", "schedule.delay.ms",
    "queue.delete.on.ack", "queue.unflushed.bytes", "share.priority", "view.of", "view.filter", "acks.replicas",
    "dedup.window.ms", "dedup.header", "dedup.ids.max",
    "errors.deadletterqueue.group.enable",
)  # fmt: skip
_NAMES = (B, "¤missing", A, "¤other", LIBRARY)
_CODE = "responses[].partition_responses[].error_code"

WITNESSES = (
    Witness(
        "Produce", (3, 11, 13), "outcome", lambda _: [_transactional(_begun(), 0)], "silent", "closed", _COMMITTED
    ),
    *(
        Witness("Produce", (9,), field, lambda _, batches=batches: list(map(_transactional, batches)), mqd=mqd, before=_BEGUN_AGAIN)
        for field, mqd, batches in (
            (_CODE, 59, [dataclasses.replace(_begun(), values=(b"1", b"2"))]),
            (_CODE + ON_RESEND, 59, [_begun()]),
            (_CODE + ON_RESEND, 45, [_begun(1), _begun()]),
        )
    ),
    Witness(
        "Produce", (9, 11), _CODE, lambda _: [_transactional(_begun(0, 1, "count lies"))], 47, 87,
        (stories.init_producer(), stories.add_partitions()),
    ),
    *(
        Witness("CreateTopics", (5, 7), "topics[].configs[] only mqd", lambda _: [_created("¤c")], mqd=repr(name))
        for name in _OWN
    ),
    *(
        Witness(
            "DescribeConfigs", (4,), "results[].configs[] only mqd",
            lambda _: [m.DescribeConfigsRequest([m.DescribeConfigsRequest.Resource(2, A, None)])], mqd=repr(name),
        )
        for name in _OWN
    ),
    Witness(
        "IncrementalAlterConfigs", (1,), "responses[].error_code",
        lambda _: [_incremental(4, "1", ("no.such.config", 0, "1"))], 0, 40,
    ),
    Witness(
        "IncrementalAlterConfigs", (1,), "responses[].error_code",
        lambda _: [
            _incremental(2, A, *configs)
            for configs in (
                (("flush.ms", 2, "1"), ("retention.ms", 4, "1"), ("no.such.config", 0, "1")),
                (("no.such.config", 0, "1"), ("segment.bytes", 4, "1048576")),
            )
        ],
        40, 42,
    ),
    Witness(
        "AlterConfigs", (1, 2), "responses[].error_code",
        lambda _: [m.AlterConfigsRequest([m.AlterConfigsRequest.Resource(4, "", [])], True)], 40, 0,
    ),
    Witness(
        "JoinGroup", (2,), "members", lambda _: [_joining(stories.MEMBER)],
        before=(
            stories.join(), stories.sync(),
            *(step for name in ("two", "three", "four", "five", "six") for step in _waiting(name)),
        ),
    ),
    Witness(
        "AlterClientQuotas", (1,), "entries[].values",
        lambda _: [_quotas_set("producer_byte_rate", "request_percentage")],
        after=(_quotas_seen(),), of="DescribeClientQuotas",
    ),
    Witness(
        "ConsumerGroupHeartbeat", (1,), "assignment.topic_partitions[] only mqd", lambda _: [
            m.ConsumerGroupHeartbeatRequest(
                GROUP, "member-of-consumer", 0, rebalance_timeout_ms=30_000, subscribed_topic_names=[],
                subscribed_topic_regex="¤.*", topic_partitions=[],
            )
        ],
    ),
    *(
        Witness(
            "InitProducerId", versions, "error_code",
            lambda _: [m.InitProducerIdRequest(TXN, 600_000, stories.ONE_ID, Ref("producer_epoch", "one", 1))],
            0, error, (stories.init_producer(), stories.add_partitions()),
        )
        for versions, error in (((3,), 47), ((4,), 90))
    ),
    Witness(
        "ListGroups", (4,), "groups", lambda _: [m.ListGroupsRequest()],
        before=(stories.commit_offsets(), *(
            Step(stories.KEYS["OffsetCommit"], 8, m.OffsetCommitRequest(f"¤g{number}", topics=[
                m.OffsetCommitRequest.Topic(A, partitions=[m.OffsetCommitRequest.Partition(0, 5, -1, "")])
            ]))
            for number in range(6)
        )),
    ),
    Witness(
        "OffsetDelete", (0,), "topics",
        lambda _: [m.OffsetDeleteRequest(GROUP, [
            m.OffsetDeleteRequest.Topic(name, [m.OffsetDeleteRequest.Partition(0)])
            for name in _NAMES
        ])],
        before=(stories.commit_offsets(),),
    ),
    *(
        Witness("DescribeConfigs", (1, 4), f"results[].configs[].{field}", lambda _: [_in_sync("1")], kafka, mqd)
        for field, kafka, mqd in (("synonyms[].source", 3, 5), ("synonyms[].value", "1", "-1"), ("value", "1", "-1"))
    ),
    Witness(
        "DescribeConfigs", (1, 4), "results[].configs[] only Kafka",
        lambda _: [_in_sync("")], "'min.insync.replicas'",
    ),
    Witness(
        "ListOffsets", (7, 11), "topics[].partitions[].offset", lambda _: [
            m.ListOffsetsRequest(
                -1, 0, [m.ListOffsetsRequest.Topic(A, [m.ListOffsetsRequest.Partition(0, -1, -3)])]
            )
        ],
        0, 2, before=(stories.produce(A, Batch((b"a", b"b", b"c"))), stories.delete_records(2)),
    ),
    Witness(
        "Produce", (11,), "responses[].partition_responses[].error_code",
        lambda _: [_transactional(_begun(damage="garbage"))], 120, 87, before=(stories.init_producer(),),
    ),
    Witness(
        "ShareGroupHeartbeat", (1,), "heartbeat_interval_ms", lambda _: [stories.share_heartbeat().request], 5000, 1000,
    ),
    Witness(
        "ShareFetch", (1, 2), "responses[].partitions[].acknowledge_error_code",
        lambda _: [_acknowledging(0, 0, B)], 3, 121, before=tuple(stories.SHARE_HISTORIES[5]),
    ),
    Witness(
        "IncrementalAlterConfigs", (0, 1), "responses[].error_code", lambda _: [
            m.IncrementalAlterConfigsRequest(
                [m.IncrementalAlterConfigsRequest.Resource(
                    4, "", [m.IncrementalAlterConfigsRequest.Config("min.insync.replicas", 1, None)]
                )],
                validate_only=True,
            )
        ],
        40, 0,
    ),
    Witness(
        "DescribeProducers", (0,), "topics[].partitions[].active_producers[].last_timestamp",
        lambda _: [m.DescribeProducersRequest([m.DescribeProducersRequest.Topic(A, [0])])], mqd="<now>",
        before=tuple(stories.RECORD_HISTORIES[5]),
    ),
    Witness(
        "AlterShareGroupOffsets", (0,), "groups[].error_code", lambda _: [
            m.AlterShareGroupOffsetsRequest(GROUP, [m.AlterShareGroupOffsetsRequest.Topic(A, [])])
        ],
        0, 69, after=tuple(stories.look_at_shares()), of="ShareGroupDescribe",
    ),
    _raised(0, 1), _raised(0, 2), _raised(0, 3), _raised(3, 1), _raised(3, 2), _raised(3, 3),
    Witness(
        "AlterShareGroupOffsets", (0,), "responses[].partitions[].error_code", lambda _: [_altered(-1)], 0, 42,
    ),
    Witness(
        "AlterShareGroupOffsets", (0,), "responses", lambda _: [
            m.AlterShareGroupOffsetsRequest(GROUP, [
                m.AlterShareGroupOffsetsRequest.Topic(name, [m.AlterShareGroupOffsetsRequest.Partition(0, 1)])
                for name in _NAMES
            ])
        ],
    ),
    Witness(
        "AlterShareGroupOffsets", (0,), "responses[].partitions", lambda _: [
            m.AlterShareGroupOffsetsRequest(GROUP, [
                m.AlterShareGroupOffsetsRequest.Topic(A, [
                    m.AlterShareGroupOffsetsRequest.Partition(1, -1), m.AlterShareGroupOffsetsRequest.Partition(0, 3)
                ])
            ])
        ],
    ),
    Witness(
        "DeleteShareGroupOffsets", (0,), "responses", lambda _: [
            m.DeleteShareGroupOffsetsRequest(GROUP, [m.DeleteShareGroupOffsetsRequest.Topic(name) for name in _NAMES])
        ],
        before=_LEFT,
    ),
    Witness(
        "ShareFetch", (1, 2), "responses", lambda _: [
            m.ShareFetchRequest(
                GROUP, SHARE_MEMBER, 0, max_wait_ms=100, max_records=500, batch_size=500,
                topics=[
                    m.ShareFetchRequest.Topic(Ref("topic_id", name), [m.ShareFetchRequest.Partition(index)])
                    for name, index in ((B, 5), (A, 0), (LIBRARY, 7))
                ],
            )
        ],
        before=tuple(stories.SHARE_HISTORIES[3]),
    ),
    Witness(
        "ShareFetch", (1, 2), "responses[].partitions", lambda _: [_closing(A, 2**31 - 1, 0, 2)],
        before=tuple(stories.SHARE_HISTORIES[5]),
    ),
    Witness(
        "ShareFetch", (1, 2), "responses[].partitions[].acknowledge_error_message",
        lambda _: [_acknowledging(0, 9)], before=tuple(stories.SHARE_HISTORIES[5]),
    ),
)  # fmt: skip
