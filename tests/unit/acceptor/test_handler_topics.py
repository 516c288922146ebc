"""Topics, configuration, deletion of records, offset lookups, log directories: encoded in every
version.
"""

import asyncio
import threading
from pathlib import Path

import pytest

from mqd.acceptor.broker_state import Origin
from mqd.acceptor.disks import READ_THREADS
from mqd.acceptor.handlers.cluster import describe_log_dirs
from mqd.acceptor.handlers.configs import config_entries
from mqd.cluster.host import messages
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import (
    AlterConfigsRequest,
    CreatePartitionsRequest,
    CreateTopicsRequest,
    DeleteRecordsRequest,
    DeleteTopicsRequest,
    DescribeConfigsRequest,
    DescribeLogDirsRequest,
    IncrementalAlterConfigsRequest,
    ListOffsetsRequest,
    OffsetForLeaderEpochRequest,
)
from mqd.worker.assignments import assignment_of, settings_of
from mqd.worker.catalog import Catalog
from tests.unit.acceptor.handler_broker import HandlerBroker
from tests.unit.acceptor.test_handler_metadata import create, versions
from tests.unit.log.log_files import encode_batch, write_segment

TOPIC, BROKER = 2, 4


def test_create_topics(tmp_path: Path) -> None:
    async def run() -> None:
        async with HandlerBroker(tmp_path) as broker:
            for version in versions(19):
                name = f"orders{version}"
                config = [CreateTopicsRequest.Config(name="retention.ms", value="1000")]
                good = CreateTopicsRequest.Topic(name=name, num_partitions=2, replication_factor=1, configs=config)
                twice = CreateTopicsRequest.Topic(name="twice", num_partitions=1, replication_factor=1)
                bad = CreateTopicsRequest.Topic(name="bad", num_partitions=0, replication_factor=1)
                trial = await broker.send_request(CreateTopicsRequest(topics=[good], validate_only=True), version)
                assert trial.topics[0].error_code == 0 and name not in broker.metadata.topics
                results = {
                    topic.name: topic
                    for topic in (
                        await broker.send_request(CreateTopicsRequest(topics=[good, twice, twice, bad]), version)
                    ).topics
                }
                assert (
                    results[name].error_code == 0
                    and results["twice"].error_code == ErrorCode.INVALID_REQUEST
                    and results["bad"].error_code == ErrorCode.INVALID_PARTITIONS
                )
                assert name in broker.metadata.topics, "an answered creation is in force"
                if version >= 5:
                    assert (results[name].num_partitions, results[name].replication_factor) == (2, 1)
                    shown = {config.name: (config.value, config.config_source) for config in results[name].configs}
                    assert shown["retention.ms"] == ("1000", 1) and shown["segment.bytes"] == ("1073741824", 5)
                    assert results["bad"].configs == []
                if version >= 7:
                    assert results[name].topic_id == broker.metadata.topics[name].topic_id
                again = await broker.send_request(CreateTopicsRequest(topics=[good]), version)
                assert again.topics[0].error_code == ErrorCode.TOPIC_ALREADY_EXISTS and "already exists" in (
                    again.topics[0].error_message or "already exists"
                )

    asyncio.run(run())


def test_delete_topics_by_name_and_id(tmp_path: Path) -> None:
    async def run() -> None:
        async with HandlerBroker(tmp_path) as broker:
            for version in range(1, 6):
                await create(broker, "a")
                response = await broker.send_request(DeleteTopicsRequest(topic_names=["a", "nothing"]), version)
                assert [(one.name, one.error_code) for one in response.responses] == [
                    ("a", 0),
                    ("nothing", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
                ]
                assert "a" not in broker.metadata.topics
            by_id, _ = await create(broker, "a"), await create(broker, "b")
            state = DeleteTopicsRequest.TopicState
            requests = [
                state(name=None, topic_id=by_id),
                state(name="b", topic_id=b"\0" * 16),
                state(name=None, topic_id=b"x" * 16),
                state(name="c", topic_id=b"y" * 16),
            ]
            response = await broker.send_request(DeleteTopicsRequest(topics=requests), 6)
            assert [(one.name, one.error_code) for one in response.responses] == [
                ("c", ErrorCode.INVALID_REQUEST),  # by name and id: before the others, as in Kafka
                ("a", 0),
                ("b", 0),
                (None, ErrorCode.UNKNOWN_TOPIC_ID),
            ]
            assert not broker.metadata.topics

    asyncio.run(run())


def test_create_partitions(tmp_path: Path) -> None:
    async def run() -> None:
        async with HandlerBroker(tmp_path) as broker:
            await create(broker, "a", 1)
            for version in versions(37):
                count = len(broker.metadata.topics["a"].partitions) + 2
                topic = CreatePartitionsRequest.Topic(name="a", count=count, assignments=None)
                assert (
                    await broker.send_request(CreatePartitionsRequest(topics=[topic], validate_only=True), version)
                ).results[0].error_code == 0
                assert len(broker.metadata.topics["a"].partitions) == count - 2
                assert (await broker.send_request(CreatePartitionsRequest(topics=[topic]), version)).results[
                    0
                ].error_code == 0
                assert len(broker.metadata.topics["a"].partitions) == count
                again = (await broker.send_request(CreatePartitionsRequest(topics=[topic]), version)).results[0]
                assert again.error_code == ErrorCode.INVALID_PARTITIONS and str(count) in again.error_message

    asyncio.run(run())


@pytest.mark.parametrize(
    ("set_to", "replicas", "shown"), [(None, 1, "1"), (None, 2, "2"), (None, 3, "2"), ("1", 3, "1"), ("3", 2, "3")]
)
def test_min_insync_replicas_is_described_with_its_effective_value(
    tmp_path: Path, set_to: str | None, replicas: int, shown: str
) -> None:
    async def run() -> None:
        async with HandlerBroker(tmp_path) as broker:
            config = {} if set_to is None else {"min.insync.replicas": set_to}
            (entry,) = config_entries.topic_entries(broker.broker, config, replicas, {"min.insync.replicas"})
            assert entry.value == shown

    asyncio.run(run())


async def describe(broker: HandlerBroker, kind: int, name: str, version: int = 4, **options: object):
    resource = DescribeConfigsRequest.Resource(
        resource_type=kind, resource_name=name, configuration_keys=options.pop("keys", None)
    )
    return (await broker.send_request(DescribeConfigsRequest(resources=[resource], **options), version)).results[0]


def test_describe_configs(tmp_path: Path) -> None:
    async def run() -> None:
        async with HandlerBroker(tmp_path, {"log.segment.bytes": "1048576"}) as broker:
            await create(broker, "a", 1, retention_ms="1000")
            for version in versions(32):
                result = await describe(broker, TOPIC, "a", version, include_synonyms=True, include_documentation=True)
                configs = {config.name: config for config in result.configs}
                assert (configs["retention.ms"].value, configs["retention.ms"].config_source) == ("1000", 1)
                assert (configs["segment.bytes"].value, configs["segment.bytes"].config_source) == ("1048576", 4)
                assert [(one.name, one.value, one.source) for one in configs["segment.bytes"].synonyms] == [
                    ("log.segment.bytes", "1048576", 4),
                    ("log.segment.bytes", "1073741824", 5),
                ]
                if version >= 3:
                    assert configs["segment.bytes"].config_type == 3 and configs["segment.bytes"].documentation
            (in_force,) = (
                await describe(broker, TOPIC, "a", keys=["min.insync.replicas"], include_synonyms=True)
            ).configs
            assert (in_force.value, in_force.config_source, in_force.synonyms[0].value) == ("1", 5, "1"), (
                "tools compare it with the in-sync set"
            )
            own = {config.name: config for config in (await describe(broker, BROKER, "1")).configs}
            assert own["advertised.listeners"].value == "PLAINTEXT://10.1.2.3:9092"
            assert (
                own["log.segment.bytes"].value == "1048576"
                and not own["log.segment.bytes"].read_only
                and own["num.partitions"].read_only
            )
            assert (await describe(broker, TOPIC, "a", keys=[])) == (await describe(broker, TOPIC, "a"))
            assert [config.name for config in (await describe(broker, TOPIC, "a", keys=["flush.ms"])).configs] == [
                "flush.ms"
            ]
            assert (await describe(broker, TOPIC, "nothing")).error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            assert (await describe(broker, TOPIC, "bad name")).error_code == ErrorCode.INVALID_TOPIC_EXCEPTION
            assert (await describe(broker, BROKER, "2")).error_code == ErrorCode.INVALID_REQUEST
            assert (await describe(broker, 64, "1")).error_code == ErrorCode.INVALID_REQUEST

    asyncio.run(run())


def test_the_default_of_advertised_listeners_names_the_clients_listener(tmp_path: Path) -> None:
    async def run() -> None:
        listeners = [("PLAINTEXT", "127.0.0.1", 9092), ("SASL_SSL", "10.1.2.3", 9093), ("INNER", "::1", 9094)]
        resource = DescribeConfigsRequest.Resource(
            resource_type=BROKER, resource_name="1", configuration_keys=["advertised.listeners"]
        )
        async with HandlerBroker(tmp_path, None, listeners) as broker:
            shown = []
            for number, (_, host, port) in enumerate(listeners):
                response = await broker.send_request(
                    DescribeConfigsRequest(resources=[resource]), 4, Origin(number, host, port)
                )
                shown += [config.value for config in response.results[0].configs]
            assert shown == ["PLAINTEXT://127.0.0.1:9092", "SASL_SSL://10.1.2.3:9093", "INNER://[::1]:9094"]

    asyncio.run(run())


class BrokerWithCatalog(HandlerBroker):
    """A broker whose messages for worker 0 about topics also reach a worker's catalog."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.catalog = Catalog(0)

    def _deliver(self, number: object, message: messages.FromController) -> None:
        if number == 0 and isinstance(message, messages.Image):
            self.catalog.on_image(message)
        elif number == 0:
            self.catalog.apply_updates(message.parts if isinstance(message, messages.MessageList) else [message])
        super()._deliver(number, message)

    def lag_records_max(self, name: str) -> int:
        """The limit sent to the replicas of its first partition."""
        topic = next(topic for topic in self.catalog.topics.values() if topic.name == name)
        return assignment_of(
            topic, topic.partitions[0], self.catalog.cluster, settings_of(topic, self.catalog.cluster, self.config)
        ).lag_records_max


def test_a_limit_of_lag_in_records_reaches_the_replicas(tmp_path: Path) -> None:
    async def run() -> None:
        async with BrokerWithCatalog(tmp_path) as broker:

            async def alter(operation: int, value: str | None) -> int:
                config = IncrementalAlterConfigsRequest.Config(
                    name="replica.lag.max.messages", config_operation=operation, value=value
                )
                resource = IncrementalAlterConfigsRequest.Resource(
                    resource_type=TOPIC, resource_name="a", configs=[config]
                )
                return (
                    (await broker.send_request(IncrementalAlterConfigsRequest(resources=[resource]), 1))
                    .responses[0]
                    .error_code
                )

            await create(broker, "a", 1, replica_lag_max_messages="100")
            assert broker.lag_records_max("a") == 100
            assert await alter(0, "7") == 0 and broker.lag_records_max("a") == 7
            assert await alter(0, "0") == ErrorCode.INVALID_CONFIG and broker.lag_records_max("a") == 7
            shown = (await describe(broker, TOPIC, "a", keys=["replica.lag.max.messages"])).configs[0]
            assert (shown.value, shown.config_source, shown.config_type) == ("7", 1, 5)
            assert await alter(1, None) == 0 and broker.lag_records_max("a") == -1

    asyncio.run(run())


def test_throttle_settings_of_kafkas_reassignment_tool_are_accepted(tmp_path: Path) -> None:
    """kafka-reassign-partitions --execute --throttle N, then --verify."""

    async def run() -> None:
        async with HandlerBroker(tmp_path) as broker:
            await create(broker, "a", 2)

            async def alter(operation: int, rate: str | None, replicas: str | None) -> list[int]:
                requested = IncrementalAlterConfigsRequest
                of_broker = [
                    requested.Config(name=f"{side}.replication.throttled.rate", config_operation=operation, value=rate)
                    for side in ("leader", "follower")
                ]
                of_topic = [
                    requested.Config(
                        name=f"{side}.replication.throttled.replicas", config_operation=operation, value=replicas
                    )
                    for side in ("leader", "follower")
                ]
                resources = [
                    requested.Resource(resource_type=BROKER, resource_name="1", configs=of_broker),
                    requested.Resource(resource_type=TOPIC, resource_name="a", configs=of_topic),
                ]
                return [
                    one.error_code for one in (await broker.send_request(requested(resources=resources), 1)).responses
                ]

            def requested_rate(name: str):
                async def one(operation: int, value: str | None) -> int:
                    requested = IncrementalAlterConfigsRequest
                    configs = [requested.Config(name=name, config_operation=operation, value=value)]
                    return (
                        (
                            await broker.send_request(
                                requested(
                                    resources=[
                                        requested.Resource(resource_type=BROKER, resource_name="1", configs=configs)
                                    ]
                                ),
                                1,
                            )
                        )
                        .responses[0]
                        .error_code
                    )

                return one

            assert await alter(0, "50000000", "0:1,1:1") == [0, 0]
            shown = (await describe(broker, BROKER, "1", keys=["follower.replication.throttled.rate"])).configs[0]
            assert (shown.value, shown.config_source) == ("50000000", 2), "that is what throttles"
            assert broker.metadata.topics["a"].config["leader.replication.throttled.replicas"] == "0:1,1:1"
            assert await alter(1, None, None) == [0, 0] and broker.metadata.topics["a"].config == {}
            for wrong in ("all", "0", "0-1", "0:1;1:1", "a:1", "0:1:2"):
                assert await alter(0, "1", wrong) == [0, 40], wrong
            assert await alter(0, "1", "*") == [0, 0]

            moves = requested_rate("replica.alter.log.dirs.io.max.bytes.per.second")
            assert [await moves(operation, value) for operation, value in ((0, "1000"), (1, None), (1, None))] == [
                0,
                0,
                0,
            ]
            assert [
                await requested_rate("no.such.name")(operation, value) for operation, value in ((1, None), (0, "1"))
            ] == [0, 40], "nothing is to be deleted; nothing is known"

    asyncio.run(run())


def test_alter_configs(tmp_path: Path) -> None:
    async def run() -> None:
        async with HandlerBroker(tmp_path) as broker:
            await create(broker, "a", 1, retention_ms="1000")

            async def alter(kind: int, name: str, *operations: tuple, version: int = 1, **options: object):
                configs = [
                    IncrementalAlterConfigsRequest.Config(name=one[0], config_operation=one[1], value=one[2])
                    for one in operations
                ]
                resource = IncrementalAlterConfigsRequest.Resource(
                    resource_type=kind, resource_name=name, configs=configs
                )
                return (
                    await broker.send_request(IncrementalAlterConfigsRequest(resources=[resource], **options), version)
                ).responses[0]

            for version in versions(44):
                assert (
                    await alter(TOPIC, "a", ("flush.ms", 0, "7"), version=version, validate_only=True)
                ).error_code == 0
                assert broker.metadata.topics["a"].config == {"retention.ms": "1000"}
            assert (await alter(TOPIC, "a", ("flush.ms", 0, "7"), ("retention.ms", 1, None))).error_code == 0
            assert broker.metadata.topics["a"].config == {"flush.ms": "7"}
            wrong = await alter(TOPIC, "a", ("flush.ms", 0, "soon"))
            assert wrong.error_code == ErrorCode.INVALID_CONFIG and "flush.ms" in wrong.error_message
            assert (await alter(TOPIC, "a", ("flush.ms", 9, "1"))).error_code == ErrorCode.INVALID_REQUEST
            assert (await alter(BROKER, "1", ("log.retention.ms", 0, "5000"))).error_code == 0
            assert (await alter(BROKER, "", ("log.retention.ms", 0, "6000"))).error_code == 0
            shown = (await describe(broker, TOPIC, "a", keys=["retention.ms"], include_synonyms=True)).configs[0]
            assert (shown.value, shown.config_source) == ("5000", 2)
            assert [one.source for one in shown.synonyms[:2]] == [2, 3]
            assert [(one.name, one.value) for one in (await describe(broker, BROKER, "")).configs] == [
                ("log.retention.ms", "6000")
            ]
            for version in versions(33):
                config = [AlterConfigsRequest.Config(name="segment.bytes", value="2097152")]
                resource = AlterConfigsRequest.Resource(resource_type=TOPIC, resource_name="a", configs=config)
                results = (await broker.send_request(AlterConfigsRequest(resources=[resource]), version)).responses
                assert [one.error_code for one in results] == [0] and broker.metadata.topics["a"].config == {
                    "segment.bytes": "2097152"
                }
            twice = await broker.send_request(AlterConfigsRequest(resources=[resource, resource]), 2)
            assert [one.error_code for one in twice.responses] == [ErrorCode.INVALID_REQUEST]

    asyncio.run(run())


def test_delete_records(tmp_path: Path) -> None:
    async def run() -> None:
        async with HandlerBroker(tmp_path) as broker:
            await create(broker, "a", 1)
            broker.place("a", 0, log_start_offset=0, high_watermark=10, log_end_offset=12)
            for version in versions(21):

                async def delete(name: str, index: int, offset: int, version: int = version) -> tuple[int, int]:
                    partition = DeleteRecordsRequest.Partition(partition_index=index, offset=offset)
                    request = DeleteRecordsRequest(
                        topics=[DeleteRecordsRequest.Topic(name=name, partitions=[partition])], timeout_ms=1000
                    )
                    (result,) = (await broker.send_request(request, version)).topics[0].partitions
                    return result.error_code, result.low_watermark

                assert await delete("a", 0, 10) == (0, 10)
                assert await delete("a", 0, 11) == (ErrorCode.OFFSET_OUT_OF_RANGE, -1)
                assert await delete("a", 0, -2) == (ErrorCode.OFFSET_OUT_OF_RANGE, -1)
                # the worker's stand-in returns the requested offset, at least 0
                assert await delete("a", 0, -1) == (0, 0)
                assert await delete("a", 1, 0) == (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, -1)
                assert await delete("b", 0, 0) == (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, -1)

    asyncio.run(run())


def test_records_of_a_topic_that_only_compacts_are_not_deleted(tmp_path: Path) -> None:
    async def run() -> None:
        async with HandlerBroker(tmp_path) as broker:
            for name, policy, code in (("c", "compact", ErrorCode.POLICY_VIOLATION), ("d", "compact,delete", 0)):
                await create(broker, name, 1)
                broker.metadata.topics[name].config["cleanup.policy"] = policy
                broker.place(name, 0, log_start_offset=0, high_watermark=10, log_end_offset=10)
                partition = DeleteRecordsRequest.Partition(partition_index=0, offset=99 if code else 10)
                topic = DeleteRecordsRequest.Topic(name=name, partitions=[partition])
                response = await broker.send_request(DeleteRecordsRequest(topics=[topic], timeout_ms=1000), 2)
                assert response.topics[0].partitions[0].error_code == code

    asyncio.run(run())


def test_list_offsets(tmp_path: Path) -> None:
    async def run() -> None:
        async with HandlerBroker(tmp_path) as broker:
            await create(broker, "a", 1)
            directory = broker.place(
                "a", 0, log_start_offset=1, high_watermark=6, last_stable_offset=5, log_end_offset=6, leader_epoch=3
            )
            write_segment(
                directory, 0, [encode_batch(0, [100, 300]), encode_batch(2, [200, 400]), encode_batch(4, [350, 350])]
            )
            (directory / "leader-epoch-checkpoint").write_text("0\n2\n0 0\n3 4\n")

            async def send_request(timestamp: int, version: int = 11, **options: object) -> tuple:
                partition = ListOffsetsRequest.Partition(
                    partition_index=0, timestamp=timestamp, current_leader_epoch=options.pop("epoch", -1)
                )
                request = ListOffsetsRequest(
                    topics=[ListOffsetsRequest.Topic(name="a", partitions=[partition])], **options
                )
                (result,) = (await broker.send_request(request, version)).topics[0].partitions
                return result.error_code, result.offset, result.timestamp, result.leader_epoch

            for version in versions(2):
                epoch = lambda known: known if version >= 4 else -1  # noqa: B023, E731
                assert await send_request(-1, version) == (0, 6, -1, epoch(3))
                assert await send_request(-2, version) == (0, 1, -1, epoch(0))
                assert await send_request(150, version) == (0, 1, 300, epoch(0))
                assert await send_request(350, version) == (0, 3, 400, epoch(0))
                assert await send_request(401, version) == (0, -1, -1, -1)
                assert (await send_request(-3, version))[0] == (0 if version >= 7 else ErrorCode.UNSUPPORTED_VERSION)
                assert (await send_request(-4, version))[0] == (0 if version >= 8 else ErrorCode.UNSUPPORTED_VERSION)
                assert (await send_request(-5, version))[0] == (0 if version >= 9 else ErrorCode.UNSUPPORTED_VERSION)
                assert (await send_request(-6, version))[0] == (0 if version >= 11 else ErrorCode.UNSUPPORTED_VERSION)
            assert await send_request(-1, isolation_level=1) == (0, 5, -1, 3)
            assert await send_request(-1, isolation_level=1, replica_id=-2) == (0, 6, -1, 3)  # not a consumer
            assert await send_request(-3) == (0, 3, 400, 0)
            assert await send_request(-4) == (0, 1, -1, 0)
            assert await send_request(-5) == (0, -1, -1, -1)
            assert (await send_request(-1, epoch=7))[0] == ErrorCode.UNKNOWN_LEADER_EPOCH
            assert (await send_request(-7))[0] == ErrorCode.UNSUPPORTED_VERSION
            twice = ListOffsetsRequest.Partition(partition_index=0, timestamp=-1, current_leader_epoch=-1)
            response = await broker.send_request(
                ListOffsetsRequest(topics=[ListOffsetsRequest.Topic(name="a", partitions=[twice, twice])]), 7
            )
            assert {one.error_code for one in response.topics[0].partitions} == {ErrorCode.INVALID_REQUEST}
            (directory / f"{0:020d}.log").write_bytes(b"\xff" * 500)
            assert (await send_request(150))[0] == ErrorCode.KAFKA_STORAGE_ERROR

    asyncio.run(run())


def test_offset_for_leader_epoch(tmp_path: Path) -> None:
    async def run() -> None:
        async with HandlerBroker(tmp_path) as broker:
            await create(broker, "a", 1)
            directory = broker.place("a", 0, high_watermark=9, log_end_offset=9, leader_epoch=2)
            directory.mkdir(parents=True)
            (directory / "leader-epoch-checkpoint").write_text("0\n2\n0 0\n2 5\n")

            async def send_request(
                epoch: int, version: int = 4, current: int = -1, index: int = 0
            ) -> tuple[int, int, int]:
                partition = OffsetForLeaderEpochRequest.Partition(
                    partition=index, current_leader_epoch=current, leader_epoch=epoch
                )
                request = OffsetForLeaderEpochRequest(
                    topics=[OffsetForLeaderEpochRequest.Topic(topic="a", partitions=[partition])]
                )
                (result,) = (await broker.send_request(request, version)).topics[0].partitions
                return result.error_code, result.leader_epoch, result.end_offset

            for version in versions(23):
                assert await send_request(0, version) == (0, 0, 5)
                assert await send_request(1, version) == (0, 0, 5)
                assert await send_request(2, version) == (0, 2, 9)
                assert await send_request(3, version) == (0, -1, -1)
            assert (await send_request(0, current=9))[0] == ErrorCode.UNKNOWN_LEADER_EPOCH
            assert (await send_request(0, index=4))[0] == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION

    asyncio.run(run())


def test_describe_log_dirs(tmp_path: Path) -> None:
    async def run() -> None:
        async with HandlerBroker(tmp_path) as broker:
            await create(broker, "a", 4)
            directory = broker.place("a", 0)
            directory.mkdir(parents=True)
            (directory / f"{0:020d}.log").write_bytes(b"x" * 1234)
            (directory / f"{0:020d}.index").write_bytes(b"y" * 99)
            for version in versions(35):
                for topics in (None, [DescribeLogDirsRequest.Topic(topic="a", partitions=[0, 1, 2, 3, 9])]):
                    results = (await broker.send_request(DescribeLogDirsRequest(topics=topics), version)).results
                    assert [result.log_dir for result in results] == [str(tmp_path / "a"), str(tmp_path / "b")]
                    sizes = {
                        p.partition_index: p.partition_size
                        for result in results
                        for topic in result.topics
                        for p in topic.partitions
                    }
                    assert sizes == {0: 1234, 1: 0, 2: 0, 3: 0}
                    assert [len(topic.partitions) for result in results for topic in result.topics] == [2, 2]
                    if version >= 4:
                        assert all(result.total_bytes > result.usable_bytes > 0 for result in results)
            (tmp_path / "b" / "meta.properties").unlink()
            results = (await broker.send_request(DescribeLogDirsRequest(topics=None), 4)).results
            assert [result.error_code for result in results] == [0, ErrorCode.KAFKA_STORAGE_ERROR], (
                "an empty mount point belongs to no topic, and is not used"
            )

    asyncio.run(run())


def test_describe_log_dirs_does_not_wait_for_a_hung_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`mqd status` sends this request exactly when a disk hangs."""
    let_go, hung = threading.Event(), []
    of = describe_log_dirs._measure

    def measure(broker: object, directory: Path, *rest: object) -> object:
        if directory == tmp_path / "b" and not let_go.is_set():
            hung.append(directory)
            assert let_go.wait(60)
        return of(broker, directory, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(describe_log_dirs, "_measure", measure)
    monkeypatch.setattr(describe_log_dirs, "RESPONSE_TIMEOUT_S", 1.0)

    async def run() -> None:
        async with HandlerBroker(tmp_path) as broker:
            pending = [
                asyncio.create_task(broker.send_request(DescribeLogDirsRequest(topics=None), 4))
                for _ in range(2 * READ_THREADS)
            ]
            _, waiting = await asyncio.wait(pending, timeout=20)
            free, _ = await asyncio.wait({asyncio.ensure_future(broker.broker.disks.read(1, int))}, timeout=5)
            let_go.set()
            assert free and not waiting
            for task in pending:
                assert [result.error_code for result in task.result().results] == [0, ErrorCode.KAFKA_STORAGE_ERROR]
            assert len(hung) == 1, "one that hangs takes one thread"
            while (await broker.send_request(DescribeLogDirsRequest(topics=None), 4)).results[1].error_code:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), 60))
