"""Cases that a table of single requests cannot express: rights that are revoked during an
operation. Each story returns the client's results, step by step; they are equal for both brokers.
"""

from __future__ import annotations

from typing import Any

from mqd.protocol import messages as m
from mqd.protocol.records import Record, encode_batch
from mqd.security.acl import Operation, Permission
from tests.kafka_parity.rights.table import (
    AUTHORIZATION,
    Ask,
    Granting,
    Rule,
    make_topic,
    member_id,
    share_acknowledge,
    share_fetch,
)
from tests.unit.acceptor.rights_cases import Right, group, topic, transaction

STORY = "hidden-story"
Steps = list[tuple[str, Any]]


def _rules(*rights: Right) -> tuple[Rule, ...]:
    return tuple((right, Permission.ALLOW) for right in rights)


def _on_story(operation: Operation) -> Right:
    return operation, topic(operation)[1], STORY


def fetch(session_id: int, epoch: int, isolation: int = 0) -> m.FetchRequest:
    part = m.FetchRequest.Partition(partition=0, partition_max_bytes=1 << 20)
    topics = [m.FetchRequest.Topic(topic=STORY, partitions=[part])] if epoch <= 0 else []
    return m.FetchRequest(
        replica_id=-1,
        max_wait_ms=0,
        min_bytes=0,
        isolation_level=isolation,
        session_id=session_id,
        session_epoch=epoch,
        topics=topics,
    )


def _read(response: Any) -> list[tuple[int, bool]]:
    """(error, whether there are records) of each partition."""
    return [(part.error_code, bool(part.records)) for one in response.responses for part in one.partitions]


def session(admin: Ask, alice: Ask) -> Steps:
    """A fetch session (KIP-227) whose client loses its right, and gets it back."""
    granting = Granting(admin)
    make_topic(admin, STORY)
    granting.grant(_rules(_on_story(Operation.READ)))
    opened: Any = alice(1, 11, fetch(0, 0))
    steps: Steps = [("opened", (opened.error_code, opened.session_id != 0, _read(opened)))]
    batch = encode_batch([Record(b"v", b"k")], compression="none")
    data = m.ProduceRequest.TopicData(name=STORY, partition_data=[m.ProduceRequest.PartitionData(0, batch)])
    admin(0, 9, m.ProduceRequest(None, -1, 10_000, [data]))
    for epoch, rights in enumerate(([], [_on_story(Operation.DESCRIBE)], [_on_story(Operation.READ)]), 1):
        granting.grant(_rules(*rights))
        response: Any = alice(1, 11, fetch(opened.session_id, epoch))
        steps.append((f"{len(rights)} rights", (response.error_code, _read(response))))
    return steps


def markers(admin: Ask, alice: Ask) -> Steps:
    """A transaction whose producer loses the right to write to the topic before it commits: the
    coordinator writes the marker on its own behalf.
    """
    granting = Granting(admin)
    make_topic(admin, STORY)
    granting.grant(_rules(transaction(Operation.WRITE), _on_story(Operation.WRITE)))
    made: Any = alice(22, 4, m.InitProducerIdRequest(transactional_id="x", transaction_timeout_ms=60_000))
    while made.error_code == 51:  # CONCURRENT_TRANSACTIONS: polls another process
        made = alice(22, 4, m.InitProducerIdRequest(transactional_id="x", transaction_timeout_ms=60_000))
    producer = {"producer_id": made.producer_id, "producer_epoch": made.producer_epoch}
    added: Any = alice(
        24,
        3,
        m.AddPartitionsToTxnRequest(
            v3_and_below_transactional_id="x",
            **{f"v3_and_below_{name}": value for name, value in producer.items()},
            v3_and_below_topics=[m.AddPartitionsToTxnRequest.Topic(name=STORY, partitions=[0])],
        ),
    )
    steps: Steps = [("added", added.results_by_topic_v3_and_below[0].results_by_partition[0].partition_error_code)]

    def produced(sequence: int) -> int:
        batch = encode_batch(
            [Record(b"v", b"k")], compression="none", is_transactional=True, base_sequence=sequence, **producer
        )
        data = m.ProduceRequest.TopicData(name=STORY, partition_data=[m.ProduceRequest.PartitionData(0, batch)])
        response: Any = alice(0, 9, m.ProduceRequest("x", -1, 10_000, [data]))
        return response.responses[0].partition_responses[0].error_code

    steps.append(("written", produced(0)))
    granting.grant(_rules(transaction(Operation.WRITE)))
    steps.append(("without the topic", produced(1)))
    granting.grant(_rules(_on_story(Operation.WRITE)))
    steps.append(("without the id", produced(1)))
    end = m.EndTxnRequest(transactional_id="x", committed=True, **producer)
    steps.append(("commits without the id", alice(26, 3, end).error_code))  # type: ignore[union-attr]
    granting.grant(_rules(transaction(Operation.WRITE)))
    steps.append(("commits without the topic", alice(26, 3, end).error_code))  # type: ignore[union-attr]
    while _last_stable(admin) != _end(admin):
        pass  # polls another process; nothing here can be waited for
    committed: Any = admin(1, 11, fetch(0, -1, isolation=1))
    steps.append(("read committed", (_read(committed), len(committed.responses[0].partitions[0].aborted_transactions))))
    return steps


def _last_stable(admin: Ask) -> int:
    response: Any = admin(1, 11, fetch(0, -1, isolation=1))
    return response.responses[0].partitions[0].last_stable_offset


def _end(admin: Ask) -> int:
    response: Any = admin(1, 11, fetch(0, -1))
    return response.responses[0].partitions[0].high_watermark


def _codes(response: Any) -> tuple[int, set[int]]:
    """The top-level error, and those of partitions that concern rights."""
    return response.error_code, {
        part.error_code for one in response.responses for part in one.partitions
    } & AUTHORIZATION


def share_session(admin: Ask, alice: Ask) -> Steps:
    """A member of a share group that loses its rights after its first fetch."""
    granting = Granting(admin)
    topic_id = make_topic(admin, STORY)
    member, epoch, steps = member_id(), 0, []
    own_group, own_topic = group(Operation.READ), _on_story(Operation.READ)
    for rights in ([own_group, own_topic], [own_group], [own_topic], [own_group, own_topic]):
        granting.grant(_rules(*rights))
        names = " and ".join(right[1].name for right in rights)
        for api_key, request in ((78, share_fetch), (79, share_acknowledge)):
            if api_key == 79 and epoch == 1:
                continue  # no right has been revoked yet
            response: Any = alice(api_key, 1, request(topic_id, member, epoch))
            epoch += not response.error_code
            steps.append((f"{api_key} with {names}", _codes(response)))
    return steps


STORIES = (session, markers, share_session)
# recorded from Apache Kafka, verified by the slow tier
TOLD: dict[str, Steps] = {
    "session": [
        ("opened", (0, True, [(0, False)])),
        ("0 rights", (0, [(29, False)])),
        ("1 rights", (0, [(29, False)])),
        ("1 rights", (0, [(0, True)])),
    ],
    "markers": [
        ("added", 0),
        ("written", 0),
        ("without the topic", 29),
        ("without the id", 53),
        ("commits without the id", 53),
        ("commits without the topic", 0),
        ("read committed", ([(0, True)], 0)),
    ],
    "share_session": [
        ("78 with GROUP and TOPIC", (0, set())),
        ("78 with GROUP", (0, {29})),
        ("79 with GROUP", (0, {29})),
        ("78 with TOPIC", (30, set())),
        ("79 with TOPIC", (30, set())),
        ("78 with GROUP and TOPIC", (0, set())),
        ("79 with GROUP and TOPIC", (0, set())),
    ],
}
