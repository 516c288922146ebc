"""Differences found by the comparison and fixed, tested on a running broker: each response equals
Kafka's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec
import pytest

from mqd.protocol import encode_request, with_length
from mqd.protocol import messages as m
from mqd.protocol.errors import ErrorCode
from tests.broker import Broker
from tests.kafka_connection import ConnectionEnded, KafkaConnection
from tests.kafka_parity.model import Batch, Step, World
from tests.kafka_parity.sides import Side
from tests.polling import eventually

NO_UUID = bytes(16)
WRONG_NAMES = ["", "..", "bad name!", "x" * 250]


@pytest.mark.parametrize("name", WRONG_NAMES)
def test_an_invalid_topic_name_is_reported_as_invalid(shared_broker: Broker, name: str) -> None:
    with KafkaConnection(port=shared_broker.port) as kafka:
        found = kafka.call(3, 12, m.MetadataRequest([m.MetadataRequest.Topic(NO_UUID, name)], False))
        producers = kafka.call(61, 0, m.DescribeProducersRequest([m.DescribeProducersRequest.Topic(name, [0])]))
    assert found.topics[0].error_code == ErrorCode.INVALID_TOPIC_EXCEPTION
    assert producers.topics[0].partitions[0].error_code == ErrorCode.INVALID_TOPIC_EXCEPTION


def test_a_group_knows_its_configs_as_operations(shared_broker: Broker) -> None:
    side, world = Side("mqd", shared_broker.port), World("")
    side.until(world, Step(10, 3, m.FindCoordinatorRequest("judge-operations", 0)), lambda body: body.error_code == 0)
    described = Step(15, 5, m.DescribeGroupsRequest(["judge-operations"], True))
    found = side.until(world, described, lambda body: body.groups[0].error_code == 0).body
    side.close()
    assert found.groups[0].authorized_operations == 3400  # READ DELETE DESCRIBE DESCRIBE_CONFIGS ALTER_CONFIGS


def test_an_unknown_transaction_has_no_values_of_its_own(shared_broker: Broker) -> None:
    with KafkaConnection(port=shared_broker.port) as kafka:
        (found,) = kafka.call(65, 0, m.DescribeTransactionsRequest(["judge-none"])).transaction_states
    assert (found.producer_id, found.producer_epoch, found.transaction_start_time_ms) == (0, 0, 0)


@pytest.mark.parametrize("endpoint_type", [0, 2, 3])
def test_a_refused_endpoint_type_is_not_repeated(shared_broker: Broker, endpoint_type: int) -> None:
    with KafkaConnection(port=shared_broker.port) as kafka:
        found = kafka.call(60, 1, m.DescribeClusterRequest(endpoint_type=endpoint_type))
    assert found.error_code and found.endpoint_type == 1


@pytest.mark.parametrize(("name", "error"), [("judge-there", 36), ("bad name!", 17), ("judge-twice", 39)])
def test_a_name_is_checked_before_its_assignments(shared_broker: Broker, name: str, error: int) -> None:
    twice = [m.CreateTopicsRequest.Assignment(0, [1]), m.CreateTopicsRequest.Assignment(0, [1])]
    with KafkaConnection(port=shared_broker.port) as kafka:
        kafka.call(19, 5, m.CreateTopicsRequest([m.CreateTopicsRequest.Topic("judge-there", 1, 1)]))
        made = kafka.call(19, 5, m.CreateTopicsRequest([m.CreateTopicsRequest.Topic(name, -1, -1, twice)]))
    assert made.topics[0].error_code == error


def test_a_group_exists_when_its_first_member_is_refused(shared_broker: Broker) -> None:
    """Kafka has created it by then; a request that claims membership of no group creates none."""
    side, world, found = Side("mqd", shared_broker.port), World(""), {}
    for group, member in (("judge-refused", ""), ("judge-claimed", "someone")):
        join = Step(11, 3, m.JoinGroupRequest(group, 10_000, 10_000, member, None, "consumer", []))
        side.until(world, Step(10, 3, m.FindCoordinatorRequest(group, 0)), lambda body: body.error_code == 0)
        joined = side.until(world, join, lambda body: body.error_code in (23, 25)).body
        described = side.call(Step(15, 4, m.DescribeGroupsRequest([group])), world).body
        again = side.call(
            dataclasses.replace(join, request=msgspec.structs.replace(join.request, member_id="x")), world
        )
        found[group] = (joined.error_code, described.groups[0].group_state, again.body.error_code)
    side.close()
    inconsistent, unknown = ErrorCode.INCONSISTENT_GROUP_PROTOCOL, ErrorCode.UNKNOWN_MEMBER_ID
    assert found == {
        "judge-refused": (inconsistent, "Empty", inconsistent),
        "judge-claimed": (unknown, "Dead", unknown),
    }


def test_a_group_whose_first_commit_is_refused_exists_only_for_writes(shared_broker: Broker) -> None:
    """Kafka has it in memory by then, and has written nothing that reads could return."""
    side, world, group, topic = Side("mqd", shared_broker.port), World(""), "judge-commit", "judge-committed"

    def commit(generation: int, member: str, metadata: str) -> int:
        partition = m.OffsetCommitRequest.Partition(0, 5, -1, metadata)
        topics = [m.OffsetCommitRequest.Topic(topic, partitions=[partition])]
        made = side.call(Step(8, 9, m.OffsetCommitRequest(group, generation, member, topics=topics)), world).body
        return made.topics[0].partitions[0].error_code

    def described() -> str:
        return side.call(Step(15, 4, m.DescribeGroupsRequest([group])), world).body.groups[0].group_state

    def is_listed() -> bool:
        return group in {one.group_id for one in side.call(Step(16, 4, m.ListGroupsRequest()), world).body.groups}

    side.call(Step(19, 5, m.CreateTopicsRequest([m.CreateTopicsRequest.Topic(topic, 1, 1)])), world)
    side.until(world, Step(10, 3, m.FindCoordinatorRequest(group, 0)), lambda body: body.error_code == 0)
    side.until(world, Step(15, 4, m.DescribeGroupsRequest([group])), lambda body: body.groups[0].error_code == 0)
    missing, unknown = ErrorCode.GROUP_ID_NOT_FOUND, ErrorCode.UNKNOWN_MEMBER_ID
    assert commit(5, "someone", "m" * 4097) == missing
    assert commit(-1, "", "m" * 4097) == ErrorCode.OFFSET_METADATA_TOO_LARGE
    assert (commit(5, "someone", ""), described(), is_listed()) == (unknown, "Dead", False)
    deleted = [side.call(Step(42, 2, m.DeleteGroupsRequest([group])), world).body.results[0].error_code for _ in "12"]
    assert (deleted, commit(5, "someone", "")) == ([0, missing], missing)
    assert (commit(-1, "", ""), described(), is_listed()) == (0, "Empty", True)
    side.close()


def test_more_partitions_than_a_request_may_ask_for_are_refused_first(shared_broker: Broker) -> None:
    names = ["judge-twice", "bad name!", "judge-twice"]
    topics = [m.CreateTopicsRequest.Topic(name, 10_001, 1) for name in names]
    with KafkaConnection(port=shared_broker.port) as kafka:
        made = kafka.call(19, 5, m.CreateTopicsRequest(topics))
    assert [(topic.name, topic.error_code) for topic in made.topics] == [
        (name, ErrorCode.POLICY_VIOLATION) for name in names
    ]


def test_the_last_of_duplicate_configurations_is_used(shared_broker: Broker) -> None:
    configs = [m.CreateTopicsRequest.Config("retention.ms", value) for value in ("-2", "3600000")]
    asked = [m.CreateTopicsRequest.Topic(f"judge-last-{i}", 1, 1, [], configs[:: 1 - 2 * i]) for i in (0, 1)]
    with KafkaConnection(port=shared_broker.port) as kafka:
        made = kafka.call(19, 5, m.CreateTopicsRequest(asked, validate_only=True))
    assert [topic.error_code for topic in made.topics] == [0, ErrorCode.INVALID_CONFIG]


def test_a_number_beside_assignments_is_checked_before_them(shared_broker: Broker) -> None:
    twice = [m.CreateTopicsRequest.Assignment(0, [1]), m.CreateTopicsRequest.Assignment(0, [1])]
    with KafkaConnection(port=shared_broker.port) as kafka:
        made = kafka.call(19, 5, m.CreateTopicsRequest([m.CreateTopicsRequest.Topic("judge-number", -1, 3, twice)]))
    assert made.topics[0].error_code == ErrorCode.INVALID_REQUEST


def test_a_replication_factor_is_checked_before_the_partitions(shared_broker: Broker) -> None:
    with KafkaConnection(port=shared_broker.port) as kafka:
        made = kafka.call(19, 5, m.CreateTopicsRequest([m.CreateTopicsRequest.Topic("judge-factor", 0, -2)]))
    assert made.topics[0].error_code == ErrorCode.INVALID_REPLICATION_FACTOR


def test_a_resource_of_no_type_fails_the_whole_request(shared_broker: Broker) -> None:
    Resource = m.DescribeConfigsRequest.Resource
    with KafkaConnection(port=shared_broker.port) as kafka:
        found = kafka.call(32, 4, m.DescribeConfigsRequest([Resource(4, "1"), Resource(99, "1"), Resource(2, "..")]))
    assert [(one.error_code, one.configs) for one in found.results] == [(ErrorCode.INVALID_REQUEST, [])] * 3


def test_a_missing_value_is_refused_before_an_operation_that_needs_a_list(shared_broker: Broker) -> None:
    Config, Resource = m.IncrementalAlterConfigsRequest.Config, m.IncrementalAlterConfigsRequest.Resource
    configs = [Config("preallocate", 2, "maybe"), Config("retention.ms", 0, None)]
    with KafkaConnection(port=shared_broker.port) as kafka:
        altered = kafka.call(44, 0, m.IncrementalAlterConfigsRequest([Resource(2, "judge-null", configs)]))
    assert altered.responses[0].error_code == ErrorCode.INVALID_REQUEST


def test_the_in_sync_minimum_of_one_broker_cannot_be_deleted_but_that_of_all_can(shared_broker: Broker) -> None:
    Config, Resource = m.IncrementalAlterConfigsRequest.Config, m.IncrementalAlterConfigsRequest.Resource
    resources = [Resource(4, broker, [Config("min.insync.replicas", 1, None)]) for broker in ("1", "")]
    with KafkaConnection(port=shared_broker.port) as kafka:
        altered = kafka.call(44, 1, m.IncrementalAlterConfigsRequest(resources, validate_only=True))
    assert [one.error_code for one in altered.responses] == [ErrorCode.INVALID_CONFIG, 0]


def test_a_timestamp_of_a_later_version_is_refused_before_the_topic(shared_broker: Broker) -> None:
    asked = m.ListOffsetsRequest.Topic("judge-none", [m.ListOffsetsRequest.Partition(0, -1, -3)])
    with KafkaConnection(port=shared_broker.port) as kafka:
        found = kafka.call(2, 6, m.ListOffsetsRequest(-1, 0, [asked]))
    assert found.topics[0].partitions[0].error_code == ErrorCode.UNSUPPORTED_VERSION


@pytest.mark.parametrize("version", [3, 4])
@pytest.mark.parametrize("name", ["", "bad name", "-a", "a.", "é", "a", "a-1.b", "a" * 300])
def test_a_client_software_name_has_a_form(shared_broker: Broker, name: str, version: int) -> None:
    with KafkaConnection(port=shared_broker.port) as kafka:
        found = [
            kafka.call(18, version, m.ApiVersionsRequest(*names))
            for names in ((name, "1.0"), ("judge", name), (name, name))
        ]
    if name.startswith("a") and not name.endswith("."):
        assert [(one.error_code, len(one.api_keys) > 40) for one in found] == [(0, True)] * 3
    else:
        refused = (ErrorCode.INVALID_REQUEST, [], -1)
        assert [(one.error_code, one.api_keys, one.finalized_features_epoch) for one in found] == [refused] * 3


def test_an_api_versions_request_that_is_cut_ends_the_connection(shared_broker: Broker) -> None:
    frame = encode_request(m.ApiVersionsRequest("judge", "1.0"), 3, 1, "judge")[:-3]
    with KafkaConnection(port=shared_broker.port) as kafka, pytest.raises(ConnectionEnded):
        kafka.send_raw(with_length(frame))
        kafka.receive_frame()


@pytest.mark.parametrize("version", [10, 11])
def test_metadata_by_id_in_versions_without_it_fails_whole(shared_broker: Broker, version: int) -> None:
    asked = [m.MetadataRequest.Topic(NO_UUID, "judge-name"), m.MetadataRequest.Topic(b"i" * 16, "judge-id")]
    with KafkaConnection(port=shared_broker.port) as kafka:
        found = kafka.call(3, version, m.MetadataRequest(asked, include_topic_authorized_operations=True))
    assert (found.brokers, found.cluster_id, found.controller_id) == ([], None, -1)
    assert {topic.error_code for topic in found.topics} == {ErrorCode.INVALID_REQUEST}
    assert {topic.topic_authorized_operations for topic in found.topics} == {-(2**31)}


def test_a_duplicate_entity_gets_one_result(shared_broker: Broker) -> None:
    Entry = m.AlterClientQuotasRequest.EntryData
    entity = [m.AlterClientQuotasRequest.EntityData("client-id", "judge")]
    with KafkaConnection(port=shared_broker.port) as kafka:
        found = kafka.call(49, 1, m.AlterClientQuotasRequest([Entry(entity, []), Entry(entity, [])]))
    assert [entry.error_code for entry in found.entries] == [ErrorCode.INVALID_REQUEST]


def test_an_instance_id_may_be_empty(shared_broker: Broker) -> None:
    side, world = Side("mqd", shared_broker.port), World("")
    side.until(world, Step(10, 3, m.FindCoordinatorRequest("judge-empty", 0)), lambda body: body.error_code == 0)
    join = m.JoinGroupRequest(
        "judge-empty", 10_000, 10_000, "", "", "consumer", [m.JoinGroupRequest.Protocol("a", b"")]
    )
    joined = side.until(world, Step(11, 5, join), lambda body: body.error_code not in (14, 16)).body
    side.close()
    assert (joined.error_code, [one.group_instance_id for one in joined.members]) == (0, [""])


def _altered(broker: Broker, kind: int, name: str, configs: list[tuple[str, int, str]]) -> int:
    Config = m.IncrementalAlterConfigsRequest.Config
    resource = m.IncrementalAlterConfigsRequest.Resource(kind, name, [Config(*config) for config in configs])
    with KafkaConnection(port=broker.port) as kafka:
        return kafka.call(44, 1, m.IncrementalAlterConfigsRequest([resource])).responses[0].error_code


def test_an_invalid_value_is_reported_before_a_missing_topic(shared_broker: Broker) -> None:
    found = [
        _altered(shared_broker, 2, "judge-none", [("retention.ms", 0, "soon")]),
        _altered(shared_broker, 2, "judge-none", [("retention.ms", 0, "3600000")]),
        _altered(shared_broker, 2, "bad name!", [("retention.ms", 0, "soon")]),
        _altered(shared_broker, 2, "bad name!", [("retention.ms", 2, "1")]),
        _altered(shared_broker, 2, "", [("retention.ms", 0, "soon")]),
    ]
    assert found == [
        ErrorCode.INVALID_CONFIG,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.INVALID_TOPIC_EXCEPTION,
        ErrorCode.INVALID_CONFIG,
        ErrorCode.INVALID_REQUEST,
    ]


def test_a_wrong_value_of_a_broker_is_an_invalid_request(shared_broker: Broker) -> None:
    found = [
        _altered(shared_broker, 4, "1", [("log.retention.ms", 0, "soon")]),
        _altered(shared_broker, 4, "1", [("no.such.config", 0, "1"), ("log.retention.ms", 0, "soon")]),
        _altered(shared_broker, 4, "1", [("broker.id", 0, "4")]),
        _altered(shared_broker, 4, "1", [("min.insync.replicas", 0, "1")]),
        _altered(shared_broker, 4, "1", [("min.insync.replicas", 2, "1"), ("log.retention.ms", 4, "1")]),
        _altered(shared_broker, 4, "1", [("min.insync.replicas", 0, "0"), ("compression.type", 0, "zip")]),
    ]
    invalid = ErrorCode.INVALID_REQUEST
    assert found == [invalid, invalid, invalid, ErrorCode.INVALID_CONFIG, invalid, invalid]


def test_an_operation_is_checked_before_the_name_of_the_group(shared_broker: Broker) -> None:
    found = [_altered(shared_broker, 32, "", [("flush.ms", operation, "1")]) for operation in (2, 0)]
    assert found == [ErrorCode.INVALID_CONFIG, ErrorCode.INVALID_REQUEST]


def test_a_configuration_is_checked_before_the_assignments(shared_broker: Broker) -> None:
    twice = [m.CreateTopicsRequest.Assignment(0, [1]), m.CreateTopicsRequest.Assignment(0, [1])]
    configs = [m.CreateTopicsRequest.Config("retention.ms", "soon")]
    with KafkaConnection(port=shared_broker.port) as kafka:
        made = kafka.call(
            19, 5, m.CreateTopicsRequest([m.CreateTopicsRequest.Topic("judge-c", -1, -1, twice, configs)])
        )
    assert made.topics[0].error_code == ErrorCode.INVALID_CONFIG


def test_a_topic_by_name_and_id_gets_one_result_per_match(shared_broker: Broker) -> None:
    both = m.DeleteTopicsRequest.TopicState("judge-both", b"i" * 16)
    with KafkaConnection(port=shared_broker.port) as kafka:
        found = kafka.call(20, 6, m.DeleteTopicsRequest(topics=[both, both], timeout_ms=5000))
    assert [one.error_code for one in found.responses] == [ErrorCode.INVALID_REQUEST] * 2


def test_an_unknown_id_has_no_authorized_operations(shared_broker: Broker) -> None:
    asked = [m.MetadataRequest.Topic(b"i" * 16, None)]
    with KafkaConnection(port=shared_broker.port) as kafka:
        found = kafka.call(3, 12, m.MetadataRequest(asked, False, include_topic_authorized_operations=True))
    assert found.topics[0].topic_authorized_operations == -(2**31)


def test_an_empty_transactional_id_has_a_coordinator(shared_broker: Broker) -> None:
    side = Side("mqd", shared_broker.port)
    asked = Step(10, 6, m.FindCoordinatorRequest(key_type=1, coordinator_keys=[""]))
    found = side.until(World(""), asked, lambda body: body.coordinators[0].error_code != 15).body
    side.close()
    assert (found.coordinators[0].error_code, found.coordinators[0].node_id) == (0, 1)


@pytest.mark.parametrize("verify", [False, True])
def test_partitions_of_a_transaction_are_looked_up_before_its_id(shared_broker: Broker, verify: bool) -> None:
    Topic, Transaction = m.AddPartitionsToTxnRequest.Topic, m.AddPartitionsToTxnRequest.Transaction
    asked = [Transaction("", 1, 0, verify, [Topic("judge-none", [0])])]
    with KafkaConnection(port=shared_broker.port) as kafka:
        found = kafka.call(24, 5, m.AddPartitionsToTxnRequest(transactions=asked)).results_by_transaction
    assert found[0].topic_results[0].results_by_partition[0].partition_error_code == 3


def _produced(broker: Broker, topic: str, batches: list[bytes], acks: int = -1, version: int = 9) -> list:
    Data, Partition = m.ProduceRequest.TopicData, m.ProduceRequest.PartitionData
    data = Data(
        name=topic, partition_data=[Partition(index=index, records=batch) for index, batch in enumerate(batches)]
    )
    request = m.ProduceRequest(None, acks=acks, timeout_ms=10_000, topic_data=[data])
    with KafkaConnection(port=broker.port) as kafka:
        return kafka.call(0, version, request).responses[0].partition_responses


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        # epoch, base sequence -> error, base offset; -1 is Kafka's for no epoch: any sequence goes
        ([(-1, 4), (-1, 9), (-1, 4), (-2, 0), (0, 7)], [(0, 0), (0, 1), (0, 0), (47, -1), (0, 2)]),
        ([(-2, 0), (-2, -1), (-1, -1)], [(47, -1), (87, -1), (87, -1)]),
        ([(0, 0), (-1, 0), (0, 1)], [(0, 0), (47, -1), (0, 1)]),
    ],
)
def test_a_negative_epoch_means_none(
    shared_broker: Broker, request: pytest.FixtureRequest, batches: list[tuple[int, int]], expected: list
) -> None:
    name = f"judge-epoch-{request.node.callspec.indices['batches']}"
    with KafkaConnection(port=shared_broker.port) as kafka:
        kafka.call(19, 5, m.CreateTopicsRequest([m.CreateTopicsRequest.Topic(name, 1, 1)]))
    made = [
        Batch(producer_id=4711, producer_epoch=epoch, base_sequence=sequence).build(World(""))
        for epoch, sequence in batches
    ]
    found = [_produced(shared_broker, name, [batch])[0] for batch in made]
    assert [(one.error_code, one.base_offset) for one in found] == expected


def test_a_negative_producer_id_means_none(shared_broker: Broker, topic: str) -> None:
    batch = Batch(producer_id=-5, producer_epoch=0, base_sequence=0).build(World(""))
    assert [_produced(shared_broker, topic, [batch])[0].error_code for _ in range(2)] == [0, 0]


@pytest.fixture
def topic(shared_broker: Broker) -> str:
    with KafkaConnection(port=shared_broker.port) as kafka:
        kafka.call(19, 5, m.CreateTopicsRequest([m.CreateTopicsRequest.Topic("judge-produce", 2, 1)]))
    return "judge-produce"


def test_a_missing_partition_is_named_before_wrong_acks(shared_broker: Broker, topic: str) -> None:
    whole = Batch().build(World(""))
    assert [one.error_code for one in _produced(shared_broker, topic, [whole, whole, whole], acks=2)] == [21, 21, 3]


@pytest.mark.parametrize(
    ("batch", "error"),
    [
        (Batch(damage="length"), ErrorCode.CORRUPT_MESSAGE),
        (Batch(damage="magic 3"), ErrorCode.CORRUPT_MESSAGE),
        (Batch(is_transactional=True), ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED),
    ],
)
def test_such_a_batch_refuses_the_whole_request(shared_broker: Broker, topic: str, batch: Batch, error: int) -> None:
    batches = [one.build(World("")) for one in (Batch(), batch)]
    assert [one.error_code for one in _produced(shared_broker, topic, batches)] == [error, error]


@pytest.mark.parametrize(
    ("batch", "error"),
    [
        (Batch(damage="cut"), ErrorCode.INVALID_RECORD),
        (Batch(damage="magic 1"), ErrorCode.INVALID_RECORD),
        (Batch(copies=2), ErrorCode.INVALID_RECORD),
        (Batch((b"z",), compression="zstd"), ErrorCode.UNSUPPORTED_COMPRESSION_TYPE),
        (Batch(damage="crc"), ErrorCode.INVALID_REQUIRED_ACKS),
    ],
)
def test_the_form_of_a_batch_is_checked_before_acks(
    shared_broker: Broker, topic: str, batch: Batch, error: int
) -> None:
    (found,) = _produced(shared_broker, topic, [batch.build(World(""))], acks=2, version=6)
    assert found.error_code == error


def test_errors_of_the_log_include_its_start(shared_broker: Broker, topic: str) -> None:
    damages = [Batch(damage="count lies"), Batch(damage="cut")]
    found = _produced(shared_broker, topic, [one.build(World("")) for one in damages])
    assert [(one.error_code, one.log_start_offset) for one in found] == [(87, 0), (87, -1)]


def test_a_clients_base_offset_is_ignored(shared_broker: Broker, topic: str) -> None:
    (found,) = _produced(shared_broker, topic, [Batch(damage="base offset").build(World(""))])
    assert (found.error_code, found.base_offset) == (ErrorCode.INVALID_RECORD, -1)


@pytest.mark.parametrize(
    ("key", "version", "request_"),
    [
        (0, 9, m.ProduceRequest(None, acks=-1, timeout_ms=1000, topic_data=[])),
        (1, 12, m.FetchRequest(max_wait_ms=0, min_bytes=0, topics=[])),
        (2, 7, m.ListOffsetsRequest(-1, 0, [])),
    ],
)
def test_bytes_after_a_whole_request_are_ignored(shared_broker: Broker, key: int, version: int, request_) -> None:
    frame = encode_request(request_, version, 7, "judge") + b"\x01\x02"
    with KafkaConnection(port=shared_broker.port) as kafka:
        kafka.send_raw(with_length(frame))
        assert kafka.receive_frame()[:4] == b"\0\0\0\x07"


def test_an_empty_cleanup_policy_keeps_everything(shared_broker: Broker) -> None:
    Config = m.CreateTopicsRequest.Config
    configs = [Config("cleanup.policy", ""), Config("retention.ms", "1"), Config("segment.bytes", "1048576")]
    Delete = m.DeleteRecordsRequest
    with KafkaConnection(port=shared_broker.port) as kafka:
        made = kafka.call(19, 5, m.CreateTopicsRequest([m.CreateTopicsRequest.Topic("judge-kept", 1, 1, [], configs)]))
        resource = m.DescribeConfigsRequest.Resource(2, "judge-kept", ["cleanup.policy"])
        (found,) = kafka.call(32, 4, m.DescribeConfigsRequest([resource])).results[0].configs
        batches = [Batch((b"v",)).build(World(""))]
        assert [one.error_code for one in _produced(shared_broker, "judge-kept", batches)] == [0]
        deleted = kafka.call(21, 1, Delete([Delete.Topic("judge-kept", [Delete.Partition(0, 1)])], 10_000))
    assert (made.topics[0].error_code, found.value) == (0, "")
    assert deleted.topics[0].partitions[0].low_watermark == 1
    changed = [
        _altered(shared_broker, 2, "judge-kept", [("cleanup.policy", operation, "delete")]) for operation in (2, 3)
    ]
    assert changed == [0, 0]
    assert _altered(shared_broker, 2, "judge-kept", [("cleanup.policy", 0, ",")]) == ErrorCode.INVALID_CONFIG


def test_only_a_consumers_look_up_waits_for_transactions(shared_broker: Broker, topic: str) -> None:
    with KafkaConnection(port=shared_broker.port) as kafka:
        side, world = Side("mqd", shared_broker.port), World("judge-lookup-")
        side.until(world, Step(10, 3, m.FindCoordinatorRequest("¤t", 1)), lambda body: body.error_code == 0)
        made = side.until(world, Step(22, 4, m.InitProducerIdRequest("¤t", 60_000)), lambda body: body.error_code == 0)
        side.close()
        added = [m.AddPartitionsToTxnRequest.Topic(topic, [0])]
        ids = made.body.producer_id, made.body.producer_epoch
        kafka.call(24, 3, m.AddPartitionsToTxnRequest([], world.resolve("¤t"), *ids, added))
        batch = Batch((b"open",), None, "none", *ids, 0, is_transactional=True).build(world)
        partition = m.ProduceRequest.PartitionData(index=0, records=batch)
        data = m.ProduceRequest.TopicData(name=topic, partition_data=[partition])
        written = kafka.call(0, 9, m.ProduceRequest(world.resolve("¤t"), -1, 10_000, [data]))
        assert written.responses[0].partition_responses[0].error_code == 0
        asked = [m.ListOffsetsRequest.Topic(topic, [m.ListOffsetsRequest.Partition(0, -1, -1)])]
        consumer, debugging = (
            kafka.call(2, 7, m.ListOffsetsRequest(replica_id, 1, asked)).topics[0].partitions[0].offset
            for replica_id in (-1, -2)
        )
        kafka.call(26, 3, m.EndTxnRequest(world.resolve("¤t"), *ids, False))
    assert debugging == consumer + 1


@pytest.mark.parametrize(("bytes_max", "count"), [(-1, 1), (0, 1), (1 << 20, 3)])
def test_less_than_no_bytes_are_one_batch(shared_broker: Broker, bytes_max: int, count: int) -> None:
    name, batch = f"judge-bytes-{bytes_max}", Batch().build(World(""))
    with KafkaConnection(port=shared_broker.port) as kafka:
        kafka.call(19, 5, m.CreateTopicsRequest([m.CreateTopicsRequest.Topic(name, 1, 1)]))
        for _ in range(3):
            assert _produced(shared_broker, name, [batch])[0].error_code == 0
        asked = [m.FetchRequest.Topic(name, partitions=[m.FetchRequest.Partition(0, partition_max_bytes=1 << 20)])]
        found = kafka.call(
            1, 11, m.FetchRequest(max_wait_ms=0, min_bytes=0, max_bytes=bytes_max, session_epoch=-1, topics=asked)
        )
    assert len(found.responses[0].partitions[0].records) == count * len(batch)


@pytest.mark.parametrize("version", [11, 12])
def test_a_transaction_of_version_2_begins_with_sequence_0(shared_broker: Broker, topic: str, version: int) -> None:
    side, world = Side("mqd", shared_broker.port), World(f"judge-sequence-{version}-")
    side.until(world, Step(10, 3, m.FindCoordinatorRequest("¤t", 1)), lambda body: body.error_code == 0)
    made = side.until(world, Step(22, 4, m.InitProducerIdRequest("¤t", 60_000)), lambda body: body.error_code == 0)
    ids = made.body.producer_id, made.body.producer_epoch
    added = [m.AddPartitionsToTxnRequest.Topic(topic, [0])]
    side.call(Step(24, 3, m.AddPartitionsToTxnRequest([], "¤t", *ids, added)), world)
    found = []
    for sequence in (5, 0):
        batch = Batch((b"first",), None, "none", *ids, sequence, is_transactional=True)
        data = m.ProduceRequest.TopicData(
            name=topic, partition_data=[m.ProduceRequest.PartitionData(index=0, records=batch)]
        )
        outcome = side.call(Step(0, version, m.ProduceRequest("¤t", -1, 10_000, [data])), world)
        found.append(outcome.body.responses[0].partition_responses[0].error_code)
    side.call(Step(26, 3, m.EndTxnRequest("¤t", *ids, False)), world)
    side.close()
    out_of_order = ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert found == ([0, out_of_order] if version < 12 else [out_of_order, 0])


def test_missing_partitions_are_named_before_the_transaction_is_looked_at(shared_broker: Broker, topic: str) -> None:
    partition = m.TxnOffsetCommitRequest.Partition(0, 5)
    topics = [m.TxnOffsetCommitRequest.Topic(name, [partition]) for name in (topic, "judge-missing")]
    with KafkaConnection(port=shared_broker.port) as kafka:
        found = [
            [
                response.partitions[0].error_code
                for response in kafka.call(28, 3, m.TxnOffsetCommitRequest("", group, 7, 0, topics=topics)).topics
            ]
            for group in ("judge-group", "")
        ]
    missing = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert found == [[ErrorCode.INVALID_REQUEST, missing], [ErrorCode.INVALID_GROUP_ID, missing]]


def test_an_empty_protocol_name_means_none(shared_broker: Broker) -> None:
    """And the member id begins with the instance id, even if that is empty."""
    side, world = Side("mqd", shared_broker.port), World("judge-unnamed-")
    side.until(world, Step(10, 3, m.FindCoordinatorRequest("¤g", 0)), lambda body: body.error_code == 0)
    protocols = [m.JoinGroupRequest.Protocol("", b"")]
    join = Step(11, 7, m.JoinGroupRequest("¤g", 10_000, 10_000, "", "", "consumer", protocols))
    joined = side.until(world, join, lambda body: body.error_code == 0).body
    side.close()
    assert (joined.protocol_name, joined.member_id[0]) == (None, "-")


def test_a_static_member_without_an_id_leaves_by_its_instance(shared_broker: Broker) -> None:
    """In version 0; later ones always have a member id."""
    side, world = Side("mqd", shared_broker.port), World("judge-static-")
    side.until(world, Step(10, 3, m.FindCoordinatorRequest("¤g", 0)), lambda body: body.error_code == 0)
    heartbeat = m.ConsumerGroupHeartbeatRequest
    join = heartbeat("¤g", "one", 0, rebalance_timeout_ms=30_000, subscribed_topic_names=["none"], topic_partitions=[])
    side.until(world, Step(68, 1, join), lambda body: body.error_code == 0)
    leave = heartbeat("¤g", "", -2, "nowhere", rebalance_timeout_ms=0)
    ready = [side.call(Step(68, version, leave), world).body for version in (0, 1)]
    side.close()
    assert [body.error_code for body in ready] == [ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.INVALID_REQUEST]


def test_another_epoch_below_zero_is_fenced_by_list_offsets(shared_broker: Broker, topic: str) -> None:
    with KafkaConnection(port=shared_broker.port) as kafka:
        asked = [m.ListOffsetsRequest.Topic(topic, [m.ListOffsetsRequest.Partition(0, -2, -1)])]
        found = kafka.call(2, 7, m.ListOffsetsRequest(-1, 0, asked)).topics[0].partitions[0]
    assert found.error_code == ErrorCode.FENCED_LEADER_EPOCH


def test_an_empty_group_id_deletes_no_offsets(shared_broker: Broker) -> None:
    topic = m.OffsetDeleteRequest.Topic("judge-none", [m.OffsetDeleteRequest.Partition(0)])
    with KafkaConnection(port=shared_broker.port) as kafka:
        assert kafka.call(47, 0, m.OffsetDeleteRequest("", [topic])).error_code == ErrorCode.INVALID_GROUP_ID


def test_reassigning_nothing_repeats_nothing(shared_broker: Broker) -> None:
    with KafkaConnection(port=shared_broker.port) as kafka:
        found = kafka.call(45, 1, m.AlterPartitionReassignmentsRequest(1000, False, []))
    assert (found.error_code, found.allow_replication_factor_change, found.responses) == (0, True, [])


def test_a_transaction_that_never_began_is_older_than_any(shared_broker: Broker) -> None:
    side, world = Side("mqd", shared_broker.port), World("")
    for key, version, request in (
        (10, 3, m.FindCoordinatorRequest("judge-idle", 1)),
        (22, 4, m.InitProducerIdRequest("judge-idle", 60000)),
    ):
        side.until(world, Step(key, version, request), lambda body: body.error_code == 0)
    listed = [side.call(Step(66, 1, m.ListTransactionsRequest([], [], age)), world).body for age in (0, 2**62)]
    side.close()
    assert ["judge-idle" in [one.transactional_id for one in body.transaction_states] for body in listed] == [
        True,
        False,
    ]


@pytest.mark.parametrize(("partitions", "error"), [([], 0), (None, ErrorCode.INVALID_REQUEST)])
def test_an_election_for_no_partition_needs_no_type(shared_broker: Broker, partitions: list | None, error: int) -> None:
    with KafkaConnection(port=shared_broker.port) as kafka:
        found = kafka.call(43, 2, m.ElectLeadersRequest(2, partitions, 1000))
    assert found.error_code == error and not found.replica_election_results


def test_a_broker_setting_equal_to_the_cluster_wide_one_is_listed(start_broker: Callable[..., Broker]) -> None:
    """Otherwise no one would see it when the cluster-wide one changes."""
    name = "log.retention.ms"
    with KafkaConnection(port=start_broker().port) as kafka:

        def put(resource: str, value: str | None) -> None:
            config = m.IncrementalAlterConfigsRequest.Config(name, 0 if value else 1, value)
            altered = m.IncrementalAlterConfigsRequest.Resource(4, resource, [config])
            assert kafka.call(44, 1, m.IncrementalAlterConfigsRequest([altered])).responses[0].error_code == 0

        def sources(resource_type: int, resource: str, name: str) -> list[int]:
            described = m.DescribeConfigsRequest.Resource(resource_type, resource, [name])
            (entry,) = kafka.call(32, 4, m.DescribeConfigsRequest([described], True)).results[0].configs
            assert entry.config_source == entry.synonyms[0].source
            return [one.source for one in entry.synonyms]

        kafka.call(19, 5, m.CreateTopicsRequest([m.CreateTopicsRequest.Topic("judge-levels", 1, 1)]))
        put("", "5000000")
        put("1", "5000000")
        for resource in ((4, "1", name), (2, "judge-levels", "retention.ms")):
            eventually(lambda: sources(*resource)[:2] == [2, 3], lambda: f"{sources(*resource)}")  # noqa: B023
        put("", None)
        for resource in ((4, "1", name), (2, "judge-levels", "retention.ms")):
            eventually(lambda: sources(*resource)[0] == 2 and 3 not in sources(*resource), "set on the broker")  # noqa: B023
