"""Cases: a short preparing history, one to three requests of the API under test, and queries of the
results.
"""

from __future__ import annotations

import contextlib
import zlib

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mqd.protocol import KNOWN
from mqd.protocol import messages as m
from tests.kafka_parity.model import NO_UUID, Batch, Case, Ref, Step, TopicSetup
from tests.kafka_parity.values import GROUP, SHARE_MEMBER, STREAMS_MEMBER, TXN, A, B, Generator, idempotent_batches

KEYS = {spec.name: key for key, spec in KNOWN.items()}
ONE_ID, ONE_EPOCH = Ref("producer_id", "one"), Ref("producer_epoch", "one")
MEMBER, GENERATION = Ref("member_id", "one"), Ref("generation_id", "one")
SHARE_CONNECTION = 1  # a share session ends with its connection, and the connection with the case

TOPICS = frozenset({
    "Metadata", "CreateTopics", "DeleteTopics", "CreatePartitions", "DescribeConfigs", "AlterConfigs",
    "IncrementalAlterConfigs", "DescribeTopicPartitions", "ElectLeaders", "AlterPartitionReassignments",
    "ListPartitionReassignments", "DescribeLogDirs", "ListConfigResources", "DescribeCluster",
})  # fmt: skip
RECORDS = frozenset({"Produce", "Fetch", "ListOffsets", "DeleteRecords", "OffsetForLeaderEpoch", "DescribeProducers"})
GROUPS = frozenset({
    "OffsetCommit", "OffsetFetch", "FindCoordinator", "JoinGroup", "SyncGroup", "Heartbeat", "LeaveGroup",
    "ConsumerGroupHeartbeat", "ConsumerGroupDescribe", "DescribeGroups", "ListGroups", "DeleteGroups", "OffsetDelete",
})  # fmt: skip
TRANSACTIONS = frozenset({
    "InitProducerId", "AddPartitionsToTxn", "AddOffsetsToTxn", "EndTxn", "TxnOffsetCommit", "WriteTxnMarkers",
    "DescribeTransactions", "ListTransactions",
})  # fmt: skip
SHARE = frozenset({
    "ShareGroupHeartbeat", "ShareGroupDescribe", "ShareFetch", "ShareAcknowledge", "DescribeShareGroupOffsets",
    "AlterShareGroupOffsets", "DeleteShareGroupOffsets",
})  # fmt: skip
STREAMS = frozenset({"StreamsGroupHeartbeat", "StreamsGroupDescribe"})
# Their effects concern the whole broker, or cannot be undone.
LEFT_OUT = {
    "UnregisterBroker": "it removes the only broker",
    "AddRaftVoter": "it changes the quorum, and each of the two brokers compared is a quorum of one",
    "RemoveRaftVoter": "it changes the quorum, and each of the two brokers compared is a quorum of one",
    "UpdateFeatures": "a downgrade would change every later case",
    "AlterReplicaLogDirs": "the two brokers' directories have different paths, and moves do not take equally long",
    "WriteTxnMarkers": "brokers send it to each other; from clients, mqd accepts only aborts (see above)",
}

# Versions for which generate() finds fewer than 200 cases.
NO_FIELDS = (
    "a request without fields: its cases differ only in how many are sent, what precedes them, and how frames are"
    " damaged"
)
FEWER = {
    "ApiVersions": ("0-2", NO_FIELDS),
    "DescribeCluster": ("0", "one field, a boolean"),
    "ListGroups": ("0-3", NO_FIELDS),
    "ListConfigResources": ("0", NO_FIELDS),
    "SaslHandshake": ("0-1", "one field; the compared listeners have no SASL and refuse every request"),
    "SaslAuthenticate": ("0-2", "one field; the compared listeners have no SASL and refuse every request"),
}


def step(name: str, version: int, request: object, **options: object) -> Step:
    return Step(KEYS[name], version, request, **options)


def look(name: str, version: int, request: object) -> Step:
    return step(name, version, request, settles=True)


# -- preparation -----------------------------------------------------------------------------------


def produce(topic: str, batch: Batch, transactional_id: str | None = None) -> Step:
    partition = m.ProduceRequest.PartitionData(index=0, records=batch)
    data = m.ProduceRequest.TopicData(name=topic, partition_data=[partition])
    return step("Produce", 9, m.ProduceRequest(transactional_id, acks=-1, timeout_ms=10000, topic_data=[data]))


def join(protocol: str = "range", instance: str | None = None) -> Step:
    request = m.JoinGroupRequest(
        group_id=GROUP,
        session_timeout_ms=30000,
        rebalance_timeout_ms=30000,
        group_instance_id=instance,
        protocol_type="consumer",
        protocols=[m.JoinGroupRequest.Protocol(protocol, b"\x00\x01\x00\x00\x00\x00\xff\xff\xff\xff")],
    )
    version = 5 if instance else 3
    return step("JoinGroup", version, request, saves=((MEMBER, "member_id"), (GENERATION, "generation_id")))


def sync() -> Step:
    assignment = m.SyncGroupRequest.Assignment(MEMBER, b"\x00\x01\x00\x00\x00\x00\xff\xff\xff\xff")
    return step("SyncGroup", 3, m.SyncGroupRequest(GROUP, GENERATION, MEMBER, assignments=[assignment]))


def consumer_heartbeat(instance: str | None = None) -> Step:
    request = m.ConsumerGroupHeartbeatRequest(
        group_id=GROUP,
        member_id="member-of-consumer",
        instance_id=instance,
        rebalance_timeout_ms=30000,
        subscribed_topic_names=[A],
        topic_partitions=[],
    )
    saves = ((MEMBER, "member_id"), (GENERATION, "member_epoch"))
    return step("ConsumerGroupHeartbeat", 1, request, saves=saves)


def commit_offsets(topic: str = A, offset: int = 5) -> Step:
    partition = m.OffsetCommitRequest.Partition(0, offset, -1, "note")
    request = m.OffsetCommitRequest(GROUP, topics=[m.OffsetCommitRequest.Topic(topic, partitions=[partition])])
    return step("OffsetCommit", 8, request)


def leave() -> Step:
    return step("LeaveGroup", 2, m.LeaveGroupRequest(GROUP, MEMBER))


def init_producer(transactional_id: str | None = TXN) -> Step:
    request = m.InitProducerIdRequest(transactional_id, transaction_timeout_ms=600000)
    return step("InitProducerId", 4, request, saves=((ONE_ID, "producer_id"), (ONE_EPOCH, "producer_epoch")))


def add_partitions() -> Step:
    request = m.AddPartitionsToTxnRequest(
        v3_and_below_transactional_id=TXN,
        v3_and_below_producer_id=ONE_ID,
        v3_and_below_producer_epoch=ONE_EPOCH,
        v3_and_below_topics=[m.AddPartitionsToTxnRequest.Topic(A, [0])],
    )
    return step("AddPartitionsToTxn", 3, request)


def end(committed: bool) -> Step:
    return step("EndTxn", 3, m.EndTxnRequest(TXN, ONE_ID, ONE_EPOCH, committed))


def transactional_batch() -> Batch:
    return Batch((b"in txn",), None, "none", ONE_ID, ONE_EPOCH, 0, is_transactional=True)


def alter(*configs: tuple[str, str | None]) -> Step:
    changed = [m.IncrementalAlterConfigsRequest.Config(name, 0, value) for name, value in configs]
    resource = m.IncrementalAlterConfigsRequest.Resource(2, A, changed)
    return step("IncrementalAlterConfigs", 1, m.IncrementalAlterConfigsRequest([resource]))


def delete_records(offset: int) -> Step:
    partition = m.DeleteRecordsRequest.Partition(0, offset)
    request = m.DeleteRecordsRequest([m.DeleteRecordsRequest.Topic(A, [partition])], 10000)
    return step("DeleteRecords", 1, request)


def share_heartbeat(epoch: object = 0, awaits: str = "") -> Step:
    request = m.ShareGroupHeartbeatRequest(GROUP, SHARE_MEMBER, epoch, None, [A, B] if epoch == 0 else None)
    return step("ShareGroupHeartbeat", 1, request, saves=((GENERATION, "member_epoch"),), awaits=awaits)


def streams_heartbeat(epoch: object = 0, shutdown: bool = False) -> Step:
    cls = m.StreamsGroupHeartbeatRequest
    request = cls(GROUP, STREAMS_MEMBER, epoch, shutdown_application=shutdown)
    if epoch == 0:
        request.rebalance_timeout_ms, request.process_id = 60000, "process"
        request.active_tasks, request.standby_tasks, request.warmup_tasks = [], [], []
        request.topology = cls.Topology(1, [cls.Subtopology("0", [A])])
    return step("StreamsGroupHeartbeat", 0, request, saves=((GENERATION, "member_epoch"),))


def share_fetch(epoch: int = 0, acknowledged: tuple[int, int, int] | None = None, awaits: str = "") -> Step:
    """`acknowledged`: first offset, last offset, type."""
    batches = []
    if acknowledged is not None:
        first, last, how = acknowledged
        batches.append(m.ShareFetchRequest.AcknowledgementBatch(first, last, [how]))
    partition = m.ShareFetchRequest.Partition(0, acknowledgement_batches=batches)
    topic = m.ShareFetchRequest.Topic(Ref("topic_id", A), [partition])
    request = m.ShareFetchRequest(
        GROUP, SHARE_MEMBER, epoch, max_wait_ms=100, max_records=500, batch_size=500, topics=[topic]
    )
    return step("ShareFetch", 1, request, connection=SHARE_CONNECTION, awaits=awaits)


def share_release() -> Step:
    batch = m.ShareAcknowledgeRequest.AcknowledgementBatch(0, 4, [2])
    topic = m.ShareAcknowledgeRequest.Topic(
        Ref("topic_id", A), [m.ShareAcknowledgeRequest.Partition(0, acknowledgement_batches=[batch])]
    )
    request = m.ShareAcknowledgeRequest(GROUP, SHARE_MEMBER, 1, topics=[topic])
    return step("ShareAcknowledge", 1, request, connection=SHARE_CONNECTION)


def share_from_the_beginning() -> Step:
    changed = [m.IncrementalAlterConfigsRequest.Config("share.auto.offset.reset", 0, "earliest")]
    resource = m.IncrementalAlterConfigsRequest.Resource(32, GROUP, changed)
    return step("IncrementalAlterConfigs", 1, m.IncrementalAlterConfigsRequest([resource]))


def until_stable() -> Step:
    """Both respond to EndTxn before the markers are written; then offset 0 is stable."""
    ask = [m.ListOffsetsRequest.Partition(0, -1, -1)]
    request = m.ListOffsetsRequest(-1, 1, [m.ListOffsetsRequest.Topic(A, ask)])
    return step("ListOffsets", 7, request, settles=True, awaits="topics.partitions.offset")


TOPIC_HISTORIES = ([], [], [produce(A, Batch())], [alter(("retention.ms", "7200000"), ("cleanup.policy", "compact"))])
RECORD_HISTORIES = (
    [],
    [produce(A, Batch((b"1", b"2", b"3")))],
    [produce(A, Batch((b"1", b"2", b"3"))), produce(A, Batch((b"4", b"5"), compression="gzip")), produce(B, Batch())],
    [produce(A, Batch((b"1", b"2", b"3"))), delete_records(2)],
    [init_producer(None), produce(A, Batch((b"1",), producer_id=ONE_ID, producer_epoch=ONE_EPOCH, base_sequence=0))],
    [init_producer(), add_partitions(), produce(A, transactional_batch(), TXN)],
    [init_producer(), add_partitions(), produce(A, transactional_batch(), TXN), end(True), until_stable()],
    [init_producer(), add_partitions(), produce(A, transactional_batch(), TXN), end(False), until_stable()],
)
GROUP_HISTORIES = (
    [],
    [commit_offsets()],
    [join(), sync()],
    [join(), sync()],
    [join(), sync(), commit_offsets()],
    [join("sticky", "static"), sync()],
    [join()],
    [join(), sync(), leave()],
    [join(), sync(), leave(), commit_offsets(B)],
    [consumer_heartbeat()],
    [consumer_heartbeat()],
    [consumer_heartbeat("static")],
)
TRANSACTION_HISTORIES = (
    [],
    [init_producer()],
    [init_producer()],
    [init_producer(), init_producer()],
    [init_producer(None)],
    [init_producer(), add_partitions()],
    [init_producer(), add_partitions(), produce(A, transactional_batch(), TXN)],
    [init_producer(), add_partitions(), end(True), until_stable()],
    [init_producer(), add_partitions(), produce(A, transactional_batch(), TXN), end(False), until_stable()],
    [init_producer(), join(), sync()],
    [init_producer(), commit_offsets()],
)
_SHARED = [
    share_from_the_beginning(),
    produce(A, Batch((b"1", b"2", b"3"))),
    produce(A, Batch((b"4", b"5"))),
    share_heartbeat(awaits="assignment.topic_partitions"),
]
_ACQUIRED = [*_SHARED, share_fetch(awaits="responses.partitions.acquired_records")]
SHARE_HISTORIES = (
    [],
    [join(), sync()],
    [share_heartbeat(awaits="assignment.topic_partitions")],
    _SHARED,
    [*_SHARED, share_heartbeat(-1)],
    _ACQUIRED,
    _ACQUIRED,
    _ACQUIRED,
    [*_ACQUIRED, share_fetch(1, (0, 1, 1))],
    [*_ACQUIRED, share_release()],
    [*_ACQUIRED, share_fetch(1, (0, 2, 3)), share_fetch(-1, None), share_heartbeat(-1)],
)


STREAMS_HISTORIES = (
    [],
    [join(), sync()],
    [streams_heartbeat()],
    [streams_heartbeat()],
    [streams_heartbeat(), streams_heartbeat(Ref("generation_id", "one"))],
    [streams_heartbeat(), streams_heartbeat(Ref("generation_id", "one"), shutdown=True)],
    [streams_heartbeat(), streams_heartbeat(-1)],
)


# -- queries of the results --------------------------------------------------------------------


def look_at_topics() -> list[Step]:
    names = [A, B, "¤c"]
    resource = m.DescribeConfigsRequest.Resource(2, A, ["retention.ms", "cleanup.policy", "segment.bytes"])
    topics = [m.MetadataRequest.Topic(NO_UUID, name) for name in names]
    return [
        look("Metadata", 12, m.MetadataRequest(topics, False)),
        look("DescribeConfigs", 4, m.DescribeConfigsRequest([resource])),
    ]


def check_records() -> list[Step]:
    ask = [m.ListOffsetsRequest.Partition(number, -1, -1) for number in (0, 1)]
    partition = m.FetchRequest.Partition(0, partition_max_bytes=1 << 20)
    fetch = m.FetchRequest(
        max_wait_ms=0, min_bytes=0, isolation_level=1, topics=[m.FetchRequest.Topic(A, partitions=[partition])]
    )
    return [
        look("ListOffsets", 7, m.ListOffsetsRequest(-1, 0, [m.ListOffsetsRequest.Topic(A, ask)])),
        look("Fetch", 11, fetch),
    ]


def look_at_groups() -> list[Step]:
    group = m.OffsetFetchRequest.Group(GROUP, None, -1, None)
    return [
        look("DescribeGroups", 5, m.DescribeGroupsRequest([GROUP])),
        look("OffsetFetch", 8, m.OffsetFetchRequest(groups=[group])),
    ]


def look_at_transactions() -> list[Step]:
    return [
        look("DescribeTransactions", 0, m.DescribeTransactionsRequest([TXN])),
        look("ListOffsets", 7, m.ListOffsetsRequest(
            -1, 1, [m.ListOffsetsRequest.Topic(A, [m.ListOffsetsRequest.Partition(0, -1, -1)])]
        )),
    ]  # fmt: skip


def look_at_shares() -> list[Step]:
    group = m.DescribeShareGroupOffsetsRequest.Group(GROUP, None)
    return [
        look("ShareGroupDescribe", 1, m.ShareGroupDescribeRequest([GROUP])),
        look("DescribeShareGroupOffsets", 1, m.DescribeShareGroupOffsetsRequest([group])),
    ]


def look_at_streams() -> list[Step]:
    return [look("StreamsGroupDescribe", 0, m.StreamsGroupDescribeRequest([GROUP]))]


FAMILIES = (
    (TOPICS, TOPIC_HISTORIES, look_at_topics),
    (RECORDS, RECORD_HISTORIES, check_records),
    (GROUPS, GROUP_HISTORIES, look_at_groups),
    (TRANSACTIONS, TRANSACTION_HISTORIES, look_at_transactions),
    (SHARE, SHARE_HISTORIES, look_at_shares),
    (STREAMS, STREAMS_HISTORIES, look_at_streams),
)
READ_ONLY = frozenset(
    {"Metadata", "DescribeConfigs", "Fetch", "ListOffsets", "ListGroups", "FindCoordinator", "ApiVersions"}
)
SAVES = {
    "JoinGroup": ((MEMBER, "member_id"), (GENERATION, "generation_id")),
    "ConsumerGroupHeartbeat": ((MEMBER, "member_id"), (GENERATION, "member_epoch")),
    "ShareGroupHeartbeat": ((GENERATION, "member_epoch"),),
    "StreamsGroupHeartbeat": ((GENERATION, "member_epoch"),),
    "InitProducerId": ((ONE_ID, "producer_id"), (ONE_EPOCH, "producer_epoch")),
    "EndTxn": (),
}


@st.composite
def case(draw: st.DrawFn, api_key: int, version: int) -> Case:
    name = KNOWN[api_key].name
    histories, looks = next(
        ((histories, looks) for members, histories, looks in FAMILIES if name in members), (((),), lambda: [])
    )
    history = list(draw(st.sampled_from(histories)))
    if name == "DescribeConfigs" and history and KNOWN[history[-1].api_key].name == "IncrementalAlterConfigs":
        history.append(look_at_topics()[1])  # Kafka's broker learns of the change a moment later
    pools = {}
    if name == "Produce" and any(KNOWN[prepared.api_key].name == "InitProducerId" for prepared in history):
        is_transactional = any(prepared.request.transactional_id for prepared in history[:1])
        pools["records"] = idempotent_batches(is_transactional)
        if is_transactional:
            pools["transactional_id"] = [TXN, TXN, TXN, None]
    generator = Generator(draw, api_key, version, pools)
    steps = []
    count = draw(st.sampled_from([1, 1, 2, 3]))
    if name == "ShareGroupHeartbeat" and not any(KNOWN[one.api_key].name == name for one in history):
        count = 1  # its partitions are initialized in the background: the state seen by a second one is a race
    for _ in range(count):
        damage = draw(st.sampled_from([""] * 28 + ["cut", "extra"]))
        saves = SAVES.get(name, ())
        connection = SHARE_CONNECTION if name in ("ShareFetch", "ShareAcknowledge") else 0
        steps.append(Step(api_key, version, generator.request(), saves, connection, damage=damage))
    after = looks() if name not in READ_ONLY else []
    topics = _topics(name, history + steps)
    if not topics:
        after = [looked for looked in after if KNOWN[looked.api_key].name != "ListOffsets"]
    return Case(api_key, version, topics, (*history, *steps, *after))


def _topics(name: str, steps: list[Step]) -> tuple[TopicSetup, ...]:
    """Both where one is named, or where all may be."""
    requests = repr([one.request for one in steps])
    if name in TOPICS | RECORDS | SHARE | STREAMS or A in requests or B in requests or "topic_id" in requests:
        return TopicSetup(A, 2), TopicSetup(B, 1)
    return ()


WHOLE = 200  # cases of a version, unless a run requests another number
TURNS = 4  # hypothesis repeats itself: where one attempt finds too few, others have other seeds


class _Enough(BaseException):
    """Ends hypothesis, which tries another example after any other exception."""


def generate(api_key: int, version: int, seed: int, count: int) -> list[Case]:
    """`count` distinct cases, always the same ones for a seed; fewer where there are no more.
    Fewer of them are the first of more, up to `WHOLE`: hypothesis draws otherwise for another limit.
    """
    found: dict[str, Case] = {}
    for turn in range(TURNS):
        known = len(found)
        _collect(api_key, version, f"{seed}/{api_key}/{version}" + f"/{turn}" * (turn > 0), count, found)
        if len(found) in (known, count):
            break
    return list(found.values())


def _collect(api_key: int, version: int, seed: str, count: int, found: dict[str, Case]) -> None:
    @hypothesis.seed(zlib.crc32(seed.encode()))
    @settings(
        max_examples=max(count, WHOLE) * 4,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        deadline=None,
    )
    @given(case(api_key, version))
    def collect(made: Case) -> None:
        found.setdefault(repr(made), made)
        if len(found) == count:
            raise _Enough

    with contextlib.suppress(_Enough):
        collect()
