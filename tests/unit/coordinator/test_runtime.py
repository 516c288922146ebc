"""The group coordinator between its handlers and the link: the real controller and metadata, owners
of partitions played by the test.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from mqd.cluster.host import messages
from mqd.coordinator import internal_topic
from mqd.coordinator.group import records
from mqd.coordinator.internal_topic import CoordinatorError, partition_for
from mqd.coordinator.log import BYTES_MAX, AppendError
from mqd.coordinator.topics import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from mqd.native import SlotState
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import (
    CreatePartitionsRequest,
    CreateTopicsRequest,
    DeleteGroupsRequest,
    DeleteRecordsRequest,
    DeleteTopicsRequest,
    FindCoordinatorRequest,
    MetadataRequest,
    OffsetCommitRequest,
    OffsetDeleteRequest,
    OffsetFetchRequest,
)
from mqd.protocol.records import decode_batch, decode_batch_header
from tests.unit.acceptor.handler_broker import ACCEPTOR, HandlerBroker
from tests.unit.acceptor.test_handler_metadata import create

LOADING, NOT_AVAILABLE, NOT_COORDINATOR = 14, 15, 16


def run(tmp_path: Path, scenario, config: dict[str, str] | None = None) -> None:
    async def body() -> None:
        async with HandlerBroker(tmp_path, {"offsets.topic.num.partitions": "3", **(config or {})}) as broker:
            await create(broker, "t", 4)
            await find(broker)
            await scenario(broker)

    asyncio.run(body())


async def find(broker: HandlerBroker, version: int = 4):
    return await broker.send_request(FindCoordinatorRequest(key="g", coordinator_keys=["g", "h"]), version)


async def commit(
    broker: HandlerBroker,
    offset: int,
    group: str = "g",
    version: int = 8,
    partitions: tuple[int, ...] = (0,),
    topic: str = "t",
    **fields: object,
) -> list[int]:
    image = broker.metadata.topics.get(topic)
    requested = OffsetCommitRequest.Topic(
        name=topic,
        topic_id=image.topic_id if image else bytes(16),
        partitions=[OffsetCommitRequest.Partition(partition_index=one, committed_offset=offset) for one in partitions],
    )
    fields.setdefault("generation_id_or_member_epoch", -1)
    response = await broker.send_request(OffsetCommitRequest(group_id=group, topics=[requested], **fields), version)
    return [one.error_code for one in response.topics[0].partitions]


async def fetch(broker: HandlerBroker, group: str = "g", version: int = 8, partition: int = 0) -> tuple[int, int]:
    """(error, offset)"""
    topic_id = broker.metadata.topics["t"].topic_id
    requested = OffsetFetchRequest.Group(
        group_id=group,
        topics=[OffsetFetchRequest.GroupTopic(name="t", topic_id=topic_id, partition_indexes=[partition])],
    )
    old = [OffsetFetchRequest.Topic(name="t", partition_indexes=[partition])]
    response = await broker.send_request(OffsetFetchRequest(group_id=group, topics=old, groups=[requested]), version)
    if version >= 8:
        response = response.groups[0]
    one = response.topics[0].partitions[0] if response.topics else None
    return response.error_code or (one.error_code if one else 0), one.committed_offset if one else -1


async def until(condition, rounds: int = 3000) -> None:
    for _ in range(rounds):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("never came true")


def shard_of(broker: HandlerBroker, group: str):
    return broker.broker.coordinators.groups.partition_states[partition_for(group, 3)].shard


def store(broker: HandlerBroker, topic: str, partition: int) -> None:
    """Writes appended records to the partition's files, for the next load."""
    slot = broker.metadata.topics[topic].partitions[partition].slot
    positions = dict(broker.table.positions.get(slot, {}))
    path = broker.place(topic, partition)
    path.mkdir(parents=True)
    end, data = 0, b""
    for batch in [batch for at, batch in broker.owners.batches if at == slot]:
        data += end.to_bytes(8, "big") + batch[8:]
        end += decode_batch_header(batch).last_offset_delta + 1
    (path / f"{0:020}.log").write_bytes(data)
    broker.table.positions[slot] = positions


# -- the internal topic ----------------------------------------------------------------------------


def test_names_are_mapped_to_partitions_as_in_kafka() -> None:
    """Known values of Java's String.hashCode; the second one is Integer.MIN_VALUE."""
    assert partition_for("hello", 1 << 30) == 99162322
    assert partition_for("polygenelubricants", 50) == 0
    assert partition_for("\U0001f600", 1 << 30) == 1772899 and partition_for("", 50) == 0
    # another computation of the same number
    for name in ("x" * 32767, "polygenelubricants" * 100, "\U0001f600" * 5000):
        assert internal_topic._hash_long_name(name) == internal_topic._hash_short_name.__wrapped__(name)


def test_long_names_are_not_cached() -> None:
    """Names of thousands of groups of 32 KiB are not cached for a client."""
    before = internal_topic._hash_short_name.cache_info().currsize, records._cached_prefix.cache_info().currsize
    for number in range(50):
        partition_for(f"{number}" + "x" * 30_000, 50)
        records.encode_offset_key(f"{number}" + "x" * 30_000, "t", 0)
    assert (
        internal_topic._hash_short_name.cache_info().currsize,
        records._cached_prefix.cache_info().currsize,
    ) == before


def test_the_first_lookup_creates_the_topic(tmp_path: Path) -> None:
    async def scenario(broker: HandlerBroker) -> None:
        topic = broker.metadata.topics[OFFSETS_TOPIC]
        assert topic.internal and len(topic.partitions) == 3
        assert topic.config["segment.bytes"] == "104857600" and topic.config["flush.on.ack"] == "true"
        assert topic.config["cleanup.policy"] == "compact" or topic.config["retention.ms"] == "-1"
        for version in range(7):
            found = await find(broker, version)
            ones = found.coordinators if version >= 4 else [found]
            assert [(one.error_code, one.node_id, one.host, one.port) for one in ones] == [
                (0, 1, "10.1.2.3", 9092)
            ] * len(ones)
        metadata = await broker.send_request(MetadataRequest(topics=[MetadataRequest.Topic(name=OFFSETS_TOPIC)]), 9)
        assert metadata.topics[0].is_internal

    run(tmp_path, scenario)


def test_all_look_ups_wait_for_the_first_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with HandlerBroker(tmp_path, {"offsets.topic.num.partitions": "3"}) as broker:
            groups, loaded = broker.broker.coordinators.groups, False
            check_loaded = groups.check_loaded

            def check_slowly() -> None:
                if not loaded:
                    raise CoordinatorError(LOADING)
                check_loaded()

            monkeypatch.setattr(groups, "check_loaded", check_slowly)
            first = asyncio.create_task(find(broker))
            await until(lambda: OFFSETS_TOPIC in broker.metadata.topics)
            second = asyncio.create_task(find(broker))
            await asyncio.wait((first, second), timeout=0.1)
            assert not first.done() and not second.done()
            loaded = True
            for response in await asyncio.gather(first, second):
                assert [one.error_code for one in response.coordinators] == [0, 0]

    asyncio.run(scenario())


def test_clients_cannot_create_delete_or_change_internal_topics(tmp_path: Path) -> None:
    async def scenario(broker: HandlerBroker) -> None:
        expected = [CreateTopicsRequest.Topic(name=TRANSACTIONS_TOPIC, num_partitions=1, replication_factor=1)]
        if TRANSACTIONS_TOPIC not in broker.metadata.topics:
            assert (await broker.send_request(CreateTopicsRequest(topics=expected, timeout_ms=100), 5)).topics[
                0
            ].error_code == ErrorCode.INVALID_TOPIC_EXCEPTION
        deleted = await broker.send_request(DeleteTopicsRequest(topic_names=[OFFSETS_TOPIC], timeout_ms=100), 5)
        assert deleted.responses[0].error_code == ErrorCode.POLICY_VIOLATION
        deleted = await broker.send_request(
            DeleteTopicsRequest(
                topics=[DeleteTopicsRequest.TopicState(topic_id=broker.metadata.topics[OFFSETS_TOPIC].topic_id)],
                timeout_ms=100,
            ),
            6,
        )
        assert deleted.responses[0].error_code == ErrorCode.POLICY_VIOLATION
        more = CreatePartitionsRequest(
            topics=[CreatePartitionsRequest.Topic(name=OFFSETS_TOPIC, count=9)], timeout_ms=100
        )
        assert (await broker.send_request(more, 1)).results[0].error_code == ErrorCode.POLICY_VIOLATION
        cut = DeleteRecordsRequest(
            topics=[
                DeleteRecordsRequest.Topic(
                    name=OFFSETS_TOPIC, partitions=[DeleteRecordsRequest.Partition(partition_index=0, offset=-1)]
                )
            ],
            timeout_ms=100,
        )
        assert (await broker.send_request(cut, 1)).topics[0].partitions[
            0
        ].error_code == ErrorCode.INVALID_TOPIC_EXCEPTION

    run(tmp_path, scenario)


# -- committing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", range(2, 11))
def test_commit_in_every_version(tmp_path: Path, version: int) -> None:
    async def scenario(broker: HandlerBroker) -> None:
        unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        assert await commit(broker, 5, version=version, partitions=(0, 3, 4, -1)) == [0, 0, unknown, unknown]
        gone = ErrorCode.UNKNOWN_TOPIC_ID if version >= 10 else unknown
        assert await commit(broker, 5, version=version, topic="nowhere") == [gone]
        for pending in range(1, 11):
            assert await fetch(broker, version=pending, partition=3) == (0, 5) and await fetch(
                broker, version=pending, partition=2
            ) == (0, -1)
            assert await fetch(broker, group="unknown", version=pending) == (0, -1)

    run(tmp_path, scenario)


def test_fetching_all_committed_offsets(tmp_path: Path) -> None:
    async def scenario(broker: HandlerBroker) -> None:
        await commit(broker, 5, partitions=(0, 2))
        for version in range(2, 11):
            response = await broker.send_request(
                OffsetFetchRequest(
                    group_id="g",
                    topics=None,
                    groups=[OffsetFetchRequest.Group(group_id=one, topics=None) for one in ("g", "x")],
                ),
                version,
            )
            responses = response.groups if version >= 8 else [response]
            (topic,) = responses[0].topics
            assert topic.topic_id == broker.metadata.topics["t"].topic_id if version >= 10 else topic.name == "t"
            assert [(one.partition_index, one.committed_offset) for one in topic.partitions] == [(0, 5), (2, 5)]
            assert all(one.topics == [] and one.error_code == 0 for one in responses[1:])
        await broker.send_request(DeleteTopicsRequest(topic_names=["t"], timeout_ms=1000), 5)
        # they are removed with their topic; the group can still be deleted
        await until(lambda: shard_of(broker, "g").core("g").offsets.is_empty)
        deleted = await broker.send_request(DeleteGroupsRequest(groups_names=["g", "g", "x"]), 2)
        assert {(one.group_id, one.error_code) for one in deleted.results} >= {
            ("g", 0),
            ("x", int(ErrorCode.GROUP_ID_NOT_FOUND)),
        }
        assert shard_of(broker, "g").core("g") is None

    run(tmp_path, scenario)


def test_unknown_members_are_refused(tmp_path: Path) -> None:
    async def scenario(broker: HandlerBroker) -> None:
        assert await commit(broker, 5, generation_id_or_member_epoch=3, member_id="m") == [ErrorCode.ILLEGAL_GENERATION]
        assert await commit(broker, 5, version=9, generation_id_or_member_epoch=3, member_id="m") == [
            ErrorCode.GROUP_ID_NOT_FOUND
        ]
        assert await commit(broker, 5) == [0]
        assert await commit(broker, 6, generation_id_or_member_epoch=3, member_id="m") == [ErrorCode.UNKNOWN_MEMBER_ID]
        assert await fetch(broker) == (0, 5)

    run(tmp_path, scenario)


def test_offset_delete(tmp_path: Path) -> None:
    async def scenario(broker: HandlerBroker) -> None:
        def delete(group: str, *partitions: int) -> OffsetDeleteRequest:
            requests = [OffsetDeleteRequest.Partition(partition_index=one) for one in partitions]
            return OffsetDeleteRequest(
                group_id=group, topics=[OffsetDeleteRequest.Topic(name="t", partitions=requests)]
            )

        assert (await broker.send_request(delete("g", 0), 0)).error_code == ErrorCode.GROUP_ID_NOT_FOUND
        await commit(broker, 5, partitions=(0, 1))
        response = await broker.send_request(delete("g", 0, 9, 2), 0)
        assert response.error_code == 0 and [one.error_code for one in response.topics[0].partitions] == [
            0,
            ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            0,
        ]
        assert await fetch(broker) == (0, -1) and await fetch(broker, partition=1) == (0, 5)

    run(tmp_path, scenario)


# -- writes ----------------------------------------------------------------------------------------


def test_responses_and_reads_wait_for_the_write(tmp_path: Path) -> None:
    async def scenario(broker: HandlerBroker) -> None:
        await commit(broker, 1)
        broker.owners.hold = True
        committing = [asyncio.create_task(commit(broker, 10 + number)) for number in range(20)]
        await until(lambda: len(broker.owners.batches) == 2)
        fetching = asyncio.create_task(fetch(broker))
        other = await fetch(broker, group="another group of the same broker")
        assert other == (0, -1)
        await asyncio.sleep(0.02)
        assert not any(task.done() for task in [*committing, fetching])
        assert len(broker.owners.batches) == 2 and shard_of(broker, "g").unwritten_count <= 2
        broker.owners.hold = False
        broker.owners.release()
        assert await asyncio.gather(*committing) == [[0]] * 20 and await fetching == (0, 29)
        sizes = [len(list(decode_batch(batch))) for _, batch in broker.owners.batches]
        assert sum(sizes) == 21 and len(sizes) <= 3  # records that waited together were written together

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("refusal", "reported"),
    [(ErrorCode.KAFKA_STORAGE_ERROR, NOT_AVAILABLE), (ErrorCode.NOT_LEADER_OR_FOLLOWER, NOT_COORDINATOR)],
)
def test_a_failed_write_discards_the_cores(tmp_path: Path, refusal: int, reported: int) -> None:
    async def scenario(broker: HandlerBroker) -> None:
        await commit(broker, 5)
        # no segment files: the next load finds nothing
        broker.place(OFFSETS_TOPIC, partition_for("g", 3)).mkdir(parents=True)
        broker.owners.refuse = int(refusal)
        assert await commit(broker, 6) == [reported]
        assert shard_of(broker, "g") is None
        assert (await fetch(broker))[0] in (LOADING, NOT_COORDINATOR)
        broker.owners.refuse = 0
        broker.place(OFFSETS_TOPIC, partition_for("g", 3))  # the test's log is empty again
        await until(lambda: shard_of(broker, "g") is not None)
        assert await commit(broker, 7) == [0] and await fetch(broker) == (0, 7)

    run(tmp_path, scenario)


def test_records_of_a_predecessor_that_came_late_are_loaded(tmp_path: Path) -> None:
    async def scenario(broker: HandlerBroker) -> None:
        partition = partition_for("g", 3)
        slot = broker.metadata.topics[OFFSETS_TOPIC].partitions[partition].slot
        before = shard_of(broker, "g")
        broker.place(OFFSETS_TOPIC, partition).mkdir(parents=True)
        broker.table.positions[slot] = {"log_end_offset": 3, "high_watermark": 3}
        assert await commit(broker, 5) == [NOT_COORDINATOR]
        broker.place(OFFSETS_TOPIC, partition)
        await until(lambda: shard_of(broker, "g") not in (None, before))
        assert await commit(broker, 6) == [0]

    run(tmp_path, scenario)


def test_nothing_is_sent_before_loaded_records_are_below_the_high_watermark(tmp_path: Path) -> None:
    async def scenario(broker: HandlerBroker) -> None:
        partition = partition_for("g", 3)
        topic = broker.metadata.topics[OFFSETS_TOPIC]
        image = msgspec.structs.replace(topic.partitions[partition], leader_epoch=9)
        slot = image.slot
        broker.place(OFFSETS_TOPIC, partition).mkdir(parents=True)
        broker.table.positions[slot] = {"log_end_offset": 3, "high_watermark": 1, "leader_epoch": 9}
        broker._deliver(ACCEPTOR, messages.PartitionsPut(broker.metadata.version, topic.topic_id, [image]))
        assert shard_of(broker, "g") is None
        await asyncio.sleep(0.3)
        assert (await fetch(broker))[0] == LOADING
        broker.table.positions[slot]["high_watermark"] = 3
        await until(lambda: shard_of(broker, "g") is not None)
        assert shard_of(broker, "g").leader_epoch == 9 and await fetch(broker) == (0, -1)

    run(tmp_path, scenario)


def test_a_partition_that_is_not_served(tmp_path: Path) -> None:
    async def scenario(broker: HandlerBroker) -> None:
        slot = broker.metadata.topics[OFFSETS_TOPIC].partitions[partition_for("g", 3)].slot
        broker.owners.hold = True
        waiting = asyncio.create_task(commit(broker, 5))
        await until(lambda: broker.owners.batches)
        broker.control.set_slot_state(slot, SlotState.OFFLINE)
        broker.broker.coordinators.groups.check_partitions()
        assert await waiting == [NOT_COORDINATOR] and (await fetch(broker))[0] in (LOADING, NOT_COORDINATOR)
        broker.owners.release()  # no request waits for the response
        broker.place(OFFSETS_TOPIC, partition_for("g", 3))
        broker.control.set_slot_state(slot, SlotState.ONLINE)
        await until(lambda: shard_of(broker, "g") is not None)

    run(tmp_path, scenario)


def test_an_owner_that_dies_leaves_the_outcome_open(tmp_path: Path) -> None:
    async def scenario(broker: HandlerBroker) -> None:
        image = broker.metadata.topics[OFFSETS_TOPIC].partitions[partition_for("g", 3)]
        broker.owners.hold = True
        log = broker.broker.coordinators.log
        appending = log.append_nowait("t", 0, b"x" * 100)
        waiting = asyncio.create_task(commit(broker, 5))
        await until(lambda: len(broker.owners.batches) == 1)
        for owner in {image.owner, broker.metadata.topics["t"].partitions[0].owner}:
            broker.broker.coordinators.on_worker_death(owner)
        assert await waiting == [NOT_AVAILABLE] and log.pending_count == 0
        with pytest.raises(AppendError) as failure:
            await appending
        assert failure.value.is_outcome_unknown and failure.value.error == ErrorCode.REQUEST_TIMED_OUT

    # the batch for t is invalid: the owners' stand-in would not accept it
    async def with_batch(broker: HandlerBroker) -> None:
        broker.owners.send_batch = lambda *arguments: (
            broker.owners.batches.append((arguments[2], arguments[3])) if arguments[3][:1] != b"x" else None
        )
        await scenario(broker)

    run(tmp_path, with_batch)


def test_appends_have_bounds_and_conditions(tmp_path: Path) -> None:
    async def scenario(broker: HandlerBroker) -> None:
        broker.owners.send_batch = lambda *arguments: None
        log = broker.broker.coordinators.log

        async def error_of(topic: str, partition: int, batch: bytes, leader_epoch: int = -1) -> tuple[int, bool]:
            with pytest.raises(AppendError) as failure:
                await log.append_nowait(topic, partition, batch, leader_epoch)
            return failure.value.error, failure.value.is_outcome_unknown

        assert await error_of("nowhere", 0, b"") == (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, False)
        assert await error_of("t", 9, b"") == (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, False)
        assert await error_of("t", 0, b"", 55) == (ErrorCode.NOT_LEADER_OR_FOLLOWER, False)
        assert await error_of("t", 0, bytes((4 << 20) + 1)) == (ErrorCode.RECORD_LIST_TOO_LARGE, False)
        batch = bytes(4 << 20)
        taken = [log.append_nowait("t", 0, batch) for _ in range(BYTES_MAX // len(batch))]
        assert await error_of("t", 0, b"x") == (ErrorCode.COORDINATOR_NOT_AVAILABLE, False)
        assert not any(one.done() for one in taken)

    run(tmp_path, scenario)


def test_a_commit_delayed_by_the_disk(tmp_path: Path) -> None:
    async def scenario(broker: HandlerBroker) -> None:
        broker.owners.hold = True
        assert await commit(broker, 5) == [NOT_AVAILABLE]
        broker.owners.hold = False
        broker.owners.release()
        assert await fetch(broker) == (0, 5)

    run(tmp_path, scenario, {"offsets.commit.timeout.ms": "20"})
