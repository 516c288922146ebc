"""Views (view.of) on a running broker, with librdkafka's clients."""

from __future__ import annotations

import collections
import urllib.request
import uuid
from collections.abc import Sequence

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, NewPartitions, NewTopic, OffsetSpec, ResourceType

from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import ShareGroupHeartbeatRequest
from tests.broker import Broker
from tests.kafka_connection import KafkaConnection
from tests.polling import PATIENCE_S
from tests.tiers import quick

SHARE_GROUP_HEARTBEAT = 76
Read = list[tuple[int, bytes]]


@pytest.fixture
def broker(shared_broker: Broker) -> Broker:
    return shared_broker


@pytest.fixture
def admin(broker: Broker) -> AdminClient:
    return AdminClient({"bootstrap.servers": broker.bootstrap})


def create(admin: AdminClient, name: str = "", partitions: int = -1, **config: str) -> str:
    name = name or f"orders-{uuid.uuid4().hex[:10]}"
    settings = {key.replace("_", "."): value for key, value in config.items()}
    admin.create_topics([NewTopic(name, partitions, config=settings)])[name].result(PATIENCE_S)
    return name


def view_of(admin: AdminClient, base: str, condition: str) -> str:
    return create(admin, f"{base}-view-{uuid.uuid4().hex[:6]}", view_of=base, view_filter=condition)


def produce(broker: Broker, topic: str, tags: Sequence[str | None], **config: str | int) -> None:
    """Writes one record for each tag to partition 0; its value is its number."""
    producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 50, **config})
    for number, tag in enumerate(tags):
        producer.produce(topic, str(number), partition=0, headers={} if tag is None else {"tag": tag})
    assert producer.flush(PATIENCE_S) == 0


def read(broker: Broker, topic: str, offset: int = 0, **config: str | int) -> Read:
    """All records up to the end of partition 0."""
    consumer = Consumer(
        {"bootstrap.servers": broker.bootstrap, "group.id": topic, "enable.partition.eof": True, **config}
    )
    consumer.assign([TopicPartition(topic, 0, offset)])
    found: Read = []
    while True:
        message = consumer.poll(PATIENCE_S)
        assert message is not None, found
        if message.error():
            break  # the end of the partition
        found.append((message.offset(), message.value()))
    consumer.close()
    return found


def refused(call: object) -> str:
    with pytest.raises(KafkaException) as caught:
        call.result(PATIENCE_S)  # type: ignore[attr-defined]  # a Future
    return f"{caught.value.args[0].name()}: {caught.value.args[0].str()}"


@pytest.mark.parametrize("codec", quick(["none", "lz4"], ["none"]))
def test_a_view_has_the_selected_records_at_their_offsets(broker: Broker, admin: AdminClient, codec: str) -> None:
    base = create(admin, partitions=2)
    view = view_of(admin, base, "tag IN ('a', 'b')")
    tags = ["a", None, "c", "b", "c", "a", "c", "c"]
    produce(broker, base, tags, **{"compression.type": codec})
    wanted = [(number, str(number).encode()) for number, tag in enumerate(tags) if tag in ("a", "b")]
    assert read(broker, view) == wanted
    assert read(broker, view, 1) == wanted[1:] and read(broker, view, 6) == []
    assert read(broker, base) == [(number, str(number).encode()) for number in range(8)]
    produce(broker, base, ["c"] * 50 + ["a"] + ["c"] * 50, **{"compression.type": codec, "batch.num.messages": 7})
    assert read(broker, view, 8) == [(58, b"50")]
    found = admin.list_topics(view, timeout=PATIENCE_S).topics[view]
    assert len(found.partitions) == 2
    ends = admin.list_offsets(
        {TopicPartition(view, 0): OffsetSpec.latest(), TopicPartition(view, 1): OffsetSpec.latest()}
    )
    assert [future.result(PATIENCE_S).offset for future in ends.values()] == [109, 0]
    by_time = admin.list_offsets({TopicPartition(view, 0): OffsetSpec.for_timestamp(1)})
    assert [future.result(PATIENCE_S).offset for future in by_time.values()] == [0]


@pytest.mark.slow
def test_readers_wait_for_records_that_are_selected(broker: Broker, admin: AdminClient) -> None:
    base = create(admin, partitions=1)
    view = view_of(admin, base, "tag = 'a'")
    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": view,
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": 400,
        }
    )
    consumer.subscribe([view])
    for turn in range(3):
        produce(broker, base, ["c"] * 20)
        assert consumer.poll(0.7) is None
        produce(broker, base, ["a"])
        message = consumer.poll(PATIENCE_S)
        assert message is not None and message.error() is None and message.offset() == 21 * turn + 20
    consumer.commit(asynchronous=False)
    (committed,) = consumer.committed([TopicPartition(view, 0)])
    assert committed.offset == 63
    produce(broker, base, ["c"] * 20)
    assert consumer.poll(0.7) is None
    (position,) = consumer.position([TopicPartition(view, 0)])
    assert position.offset == 63 and consumer.get_watermark_offsets(TopicPartition(view, 0))[1] == 83, "a lag of 20"
    consumer.close()


def test_what_readers_of_a_view_cost_is_counted(broker: Broker, admin: AdminClient) -> None:
    base = create(admin, partitions=1)
    view = view_of(admin, base, "tag = 'a'")
    produce(broker, base, [*["c"] * 200, "a"])
    before = _figures(broker)
    for _ in range(broker.workers + 1):  # so one of the workers has two readers
        assert read(broker, view) == [(200, b"200")]
    now = _figures(broker)
    assert now["filtered_bytes_total"] > before["filtered_bytes_total"]
    assert now["cache_hits_total"] > before["cache_hits_total"]
    assert now["cache_bytes"] > before["cache_bytes"] and now["cache_evictions_total"] == 0


def _figures(broker: Broker) -> dict[str, float]:
    with urllib.request.urlopen(
        f"http://127.0.0.1:{broker.status()['metrics_port']}/metrics", timeout=PATIENCE_S
    ) as page:
        lines = page.read().decode().splitlines()
    found: dict[str, float] = collections.defaultdict(float)
    for line in lines:
        if line.startswith("mqd_view_"):
            found[line.partition("{")[0].removeprefix("mqd_view_")] += float(line.split()[-1])
    return found


@pytest.mark.slow
def test_a_position_skips_records_that_are_not_selected(broker: Broker, admin: AdminClient) -> None:
    base = create(admin, partitions=1)
    view = view_of(admin, base, "tag = 'a'")
    produce(broker, base, ["c"] * 1000, **{"batch.num.messages": 10})
    for _ in range(2):  # the broker knows for the second one up to where nothing is selected
        consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": view, "enable.partition.eof": True})
        consumer.assign([TopicPartition(view, 0, 0)])
        message = consumer.poll(PATIENCE_S)
        assert message is not None and message.error() is not None and message.offset() == 1000  # the end
        consumer.close()


@pytest.mark.slow
def test_read_committed(broker: Broker, admin: AdminClient) -> None:
    base = create(admin, partitions=1)
    view = view_of(admin, base, "tag = 'a'")
    producer = Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": base})
    producer.init_transactions(PATIENCE_S)
    for committed in (True, False, True):
        producer.begin_transaction()
        for tag in "ac":
            producer.produce(base, tag, partition=0, headers={"tag": tag})
        producer.flush(PATIENCE_S)
        (producer.commit_transaction if committed else producer.abort_transaction)(PATIENCE_S)
    assert read(broker, view) == [(0, b"a"), (6, b"a")]
    assert read(broker, view, **{"isolation.level": "read_uncommitted"}) == [(0, b"a"), (3, b"a"), (6, b"a")]
    producer.begin_transaction()
    producer.produce(base, "open", partition=0, headers={"tag": "a"})
    producer.flush(PATIENCE_S)
    assert read(broker, view) == [(0, b"a"), (6, b"a")]  # up to the base's last stable offset
    producer.produce(view, "x", partition=0)
    with pytest.raises(KafkaException):
        producer.commit_transaction(PATIENCE_S)


@pytest.mark.slow
def test_nothing_is_written_to_a_view(broker: Broker, admin: AdminClient) -> None:
    base = create(admin, partitions=1)
    view = view_of(admin, base, "EXISTS tag")
    errors: list[str] = []
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    producer.produce(view, "x", partition=0, on_delivery=lambda error, _: errors.append(error.name()))
    assert producer.flush(PATIENCE_S) == 0 and errors == ["POLICY_VIOLATION"]
    assert read(broker, base) == []
    deleted = admin.delete_records([TopicPartition(view, 0, 0)])
    assert "POLICY_VIOLATION" in refused(next(iter(deleted.values())))
    assert "POLICY_VIOLATION" in refused(admin.create_partitions([NewPartitions(view, 4)])[view])


def test_invalid_views_are_refused(broker: Broker, admin: AdminClient) -> None:
    base = create(admin, partitions=3)
    view = view_of(admin, base, "EXISTS tag")

    def of(name: str, condition: str | None, partitions: int = -1, **more: str) -> str:
        config = {"view.of": name, **({"view.filter": condition} if condition is not None else {}), **more}
        name = f"view-{uuid.uuid4().hex[:10]}"
        return refused(admin.create_topics([NewTopic(name, partitions, config=config)])[name])

    assert "is itself a view" in of(view, "EXISTS tag")
    assert "there is no topic nowhere" in of("nowhere", "EXISTS tag")
    assert "internal topic" in of("__consumer_offsets", "EXISTS tag") or "no topic" in of("__consumer_offsets", "a = 1")
    assert "must be set together" in of(base, None)
    assert "the filter ends where 'text'" in of(base, "tag =")
    assert "at most 64 are allowed" in of(base, " OR ".join(["EXISTS a"] * 1000)[:4000].rsplit(" OR", 1)[0])
    assert "retention.ms cannot be set for a view" in of(base, "EXISTS tag", **{"retention.ms": "5"})
    assert "INVALID_PARTITIONS" in of(base, "EXISTS tag", 2)
    for name in (base, view):
        entry = {"view.filter": "EXISTS other", "view.of": base}
        changed = admin.alter_configs([ConfigResource(ResourceType.TOPIC, name, set_config=entry)])
        assert "never change" in refused(next(iter(changed.values())))
    shown = admin.describe_configs([ConfigResource(ResourceType.TOPIC, view)])
    assert next(iter(shown.values())).result(PATIENCE_S)["view.filter"].value == "EXISTS tag"


@pytest.mark.slow
def test_a_topic_with_views_cannot_be_deleted_before_them(broker: Broker, admin: AdminClient) -> None:
    base = create(admin, partitions=1)
    view = view_of(admin, base, "EXISTS tag")
    produce(broker, base, ["a"])
    assert "POLICY_VIOLATION" in refused(admin.delete_topics([base])[base])
    admin.delete_topics([view])[view].result(PATIENCE_S)
    assert read(broker, base) == [(0, b"0")]
    admin.delete_topics([base])[base].result(PATIENCE_S)


@pytest.mark.slow
def test_a_view_gets_the_partitions_that_its_topic_gets(broker: Broker, admin: AdminClient) -> None:
    base = create(admin, partitions=1)
    view = view_of(admin, base, "EXISTS tag")
    admin.create_partitions([NewPartitions(base, 3)])[base].result(PATIENCE_S)
    assert len(admin.list_topics(view, timeout=PATIENCE_S).topics[view].partitions) == 3


@pytest.mark.slow
def test_share_groups_are_refused(broker: Broker, admin: AdminClient) -> None:
    view = view_of(admin, create(admin, partitions=1), "tag = 'a'")
    request = ShareGroupHeartbeatRequest(
        group_id=view, member_id=str(uuid.uuid4()), member_epoch=0, subscribed_topic_names=[view]
    )
    with KafkaConnection("127.0.0.1", broker.port) as kafka:
        answer = kafka.call(SHARE_GROUP_HEARTBEAT, 1, request)
    assert answer.error_code == ErrorCode.INVALID_REQUEST and "is a view" in answer.error_message
