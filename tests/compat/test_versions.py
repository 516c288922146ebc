"""ApiVersions is accurate: every advertised version of every API is sent once, encoded, and its
response decodes completely.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from typing import Any

import pytest

from mqd.protocol import SUPPORTED, ErrorCode, decode_response, encode_request, encode_response
from mqd.protocol.api import decode_request
from mqd.protocol.headers import decode_request_header
from mqd.protocol.messages import (
    AlterConfigsRequest,
    ApiVersionsRequest,
    ApiVersionsResponse,
    CreatePartitionsRequest,
    CreateTopicsRequest,
    DeleteRecordsRequest,
    DeleteTopicsRequest,
    DescribeClusterRequest,
    DescribeConfigsRequest,
    DescribeLogDirsRequest,
    DescribeTopicPartitionsRequest,
    FetchRequest,
    FindCoordinatorRequest,
    IncrementalAlterConfigsRequest,
    InitProducerIdRequest,
    ListOffsetsRequest,
    MetadataRequest,
    OffsetForLeaderEpochRequest,
    ProduceRequest,
)
from tests.broker import Broker
from tests.compat import topics
from tests.compat.administration import administration_cases
from tests.compat.groups import group_cases
from tests.compat.topics import API_VERSIONS, FETCH, PRODUCE
from tests.compat.transactions import transaction_cases
from tests.kafka_connection import KafkaConnection

TOPIC = 2  # a resource type
# Produce 0-2 is advertised for librdkafka's sake (KAFKA-18659): its records are of magic 0 and 1
RECORD_VERSIONS = range(3, 14)


@dataclasses.dataclass
class Setting:
    """The inputs of a request."""

    broker: Broker
    kafka: KafkaConnection
    topic: str
    topic_id: bytes

    def fresh(self) -> str:
        return topics.create_topic(self.broker, "versions-fresh")


@pytest.fixture(scope="module")
def setting(shared_broker: Broker):
    topic = topics.create_topic(shared_broker, "versions", 2)
    with topics.connect(shared_broker) as kafka:
        topics.must_produce(kafka, topic, b"one", b"two", b"three")
        kafka.call(10, 4, FindCoordinatorRequest(key_type=0, coordinator_keys=["versions"]))  # creates its topic
        yield Setting(shared_broker, kafka, topic, topics.topic_id(kafka, topic))


@dataclasses.dataclass(frozen=True)
class Case:
    """`errors` collects all error codes of a response; `right` checks whether its content is as
    requested.
    """

    request: Callable[[Setting, int], object]
    errors: Callable[[object], list[int]]
    right: Callable[[Setting, int, object], bool]


def _produce(setting: Setting, version: int) -> ProduceRequest:
    names = {"topic_id": setting.topic_id} if version >= 13 else {}
    return topics.produce_request(setting.topic, topics.batch_of(b"versions"), 1, **names)


def _fetch(setting: Setting, version: int) -> FetchRequest:
    return topics.fetch_request([(setting.topic, 0, 0)], topic_ids={setting.topic: setting.topic_id}, session_epoch=-1)


def _list_offsets(setting: Setting, version: int) -> ListOffsetsRequest:
    requests = [ListOffsetsRequest.Partition(partition_index=0, timestamp=topics.EARLIEST)]
    return ListOffsetsRequest(
        topics=[ListOffsetsRequest.Topic(name=setting.topic, partitions=requests)], timeout_ms=5000
    )


def _metadata(setting: Setting, version: int) -> MetadataRequest:
    by_id = version >= 12
    requested = (
        MetadataRequest.Topic(topic_id=setting.topic_id, name=None)
        if by_id
        else MetadataRequest.Topic(name=setting.topic)
    )
    return MetadataRequest(topics=[requested], allow_auto_topic_creation=False)


def _find_coordinator(setting: Setting, version: int) -> FindCoordinatorRequest:
    return FindCoordinatorRequest(key="a group", coordinator_keys=["a group"])


def _found_coordinator(setting: Setting, version: int, response: object) -> bool:
    found = response.coordinators[0] if version >= 4 else response
    return (found.node_id, found.port) == (1, setting.broker.port)


def _create_topics(setting: Setting, version: int) -> CreateTopicsRequest:
    configs = [CreateTopicsRequest.Config(name="retention.ms", value="86400000")]
    return CreateTopicsRequest(
        topics=[
            CreateTopicsRequest.Topic(
                name=topics.fresh_name("versions-created"), num_partitions=3, replication_factor=1, configs=configs
            )
        ],
        timeout_ms=60_000,
    )


def _created_topics(setting: Setting, version: int, response: object) -> bool:
    (created,) = response.topics
    described = version < 5 or (
        created.num_partitions == 3 and "retention.ms" in {config.name for config in created.configs}
    )
    return described and (version < 7 or created.topic_id != bytes(16))


def _delete_topics(setting: Setting, version: int) -> DeleteTopicsRequest:
    name = setting.fresh()
    return DeleteTopicsRequest(
        topics=[DeleteTopicsRequest.TopicState(name=name)], topic_names=[name], timeout_ms=60_000
    )


def _delete_records(setting: Setting, version: int) -> DeleteRecordsRequest:
    name = setting.fresh()
    topics.must_produce(setting.kafka, name, b"a", b"b")
    requested = DeleteRecordsRequest.Partition(partition_index=0, offset=1)
    return DeleteRecordsRequest(
        topics=[DeleteRecordsRequest.Topic(name=name, partitions=[requested])], timeout_ms=60_000
    )


def _epochs(setting: Setting, version: int) -> OffsetForLeaderEpochRequest:
    requested = OffsetForLeaderEpochRequest.Partition(partition=0, current_leader_epoch=-1, leader_epoch=0)
    return OffsetForLeaderEpochRequest(
        replica_id=-1, topics=[OffsetForLeaderEpochRequest.Topic(topic=setting.topic, partitions=[requested])]
    )


def _alter_configs(setting: Setting, version: int) -> AlterConfigsRequest:
    config = AlterConfigsRequest.Config(name="retention.ms", value="1000000")
    return AlterConfigsRequest(
        resources=[AlterConfigsRequest.Resource(resource_type=TOPIC, resource_name=setting.fresh(), configs=[config])]
    )


def _incremental_alter_configs(setting: Setting, version: int) -> IncrementalAlterConfigsRequest:
    config = IncrementalAlterConfigsRequest.Config(name="retention.ms", config_operation=0, value="1000000")
    return IncrementalAlterConfigsRequest(
        resources=[
            IncrementalAlterConfigsRequest.Resource(
                resource_type=TOPIC, resource_name=setting.fresh(), configs=[config]
            )
        ]
    )


def _describe_configs(setting: Setting, version: int) -> DescribeConfigsRequest:
    resource = DescribeConfigsRequest.Resource(
        resource_type=TOPIC, resource_name=setting.topic, configuration_keys=None
    )
    return DescribeConfigsRequest(resources=[resource], include_synonyms=True, include_documentation=True)


def _described_configs(setting: Setting, version: int, response: object) -> bool:
    configs = {config.name: config for config in response.results[0].configs}
    return (
        configs["flush.on.ack"].value == "true"
        and len(configs["retention.ms"].synonyms) > 0
        and (version < 3 or bool(configs["retention.ms"].documentation))
    )


def _create_partitions(setting: Setting, version: int) -> CreatePartitionsRequest:
    return CreatePartitionsRequest(
        topics=[CreatePartitionsRequest.Topic(name=setting.fresh(), count=2, assignments=None)], timeout_ms=60_000
    )


def _describe_log_dirs(setting: Setting, version: int) -> DescribeLogDirsRequest:
    return DescribeLogDirsRequest(topics=[DescribeLogDirsRequest.Topic(topic=setting.topic, partitions=[0, 1])])


CASES: dict[int, Case] = {
    0: Case(
        _produce,
        lambda r: [p.error_code for t in r.responses for p in t.partition_responses],
        lambda s, v, r: (
            r.responses[0].partition_responses[0].base_offset >= 0 and (v >= 13 or r.responses[0].name == s.topic)
        ),
    ),
    1: Case(
        _fetch,
        lambda r: [r.error_code, *(p.error_code for t in r.responses for p in t.partitions)],
        lambda s, v, r: (
            r.responses[0].partitions[0].high_watermark == 3
            and len(topics.headers_in(r.responses[0].partitions[0].records)) == 1
        ),
    ),
    2: Case(
        _list_offsets,
        lambda r: [p.error_code for t in r.topics for p in t.partitions],
        lambda s, v, r: r.topics[0].partitions[0].offset == 0,
    ),
    3: Case(
        _metadata,
        lambda r: [
            r.error_code,
            *(t.error_code for t in r.topics),
            *(p.error_code for t in r.topics for p in t.partitions),
        ],
        lambda s, v, r: (
            (r.topics[0].name, len(r.topics[0].partitions), r.brokers[0].port) == (s.topic, 2, s.broker.port)
        ),
    ),
    10: Case(_find_coordinator, lambda r: [r.error_code, *(c.error_code for c in r.coordinators)], _found_coordinator),
    18: Case(
        lambda s, v: ApiVersionsRequest(client_software_name="tests", client_software_version="1"),
        lambda r: [r.error_code],
        lambda s, v, r: {key.api_key for key in r.api_keys} >= {0, 1, 2, 3, 18},
    ),
    19: Case(_create_topics, lambda r: [t.error_code for t in r.topics], _created_topics),
    20: Case(_delete_topics, lambda r: [t.error_code for t in r.responses], lambda s, v, r: len(r.responses) == 1),
    21: Case(
        _delete_records,
        lambda r: [p.error_code for t in r.topics for p in t.partitions],
        lambda s, v, r: r.topics[0].partitions[0].low_watermark == 1,
    ),
    22: Case(
        lambda s, v: InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=0x7FFFFFFF),
        lambda r: [r.error_code],
        lambda s, v, r: r.producer_id >= 0 and r.producer_epoch == 0,
    ),
    23: Case(
        _epochs,
        lambda r: [p.error_code for t in r.topics for p in t.partitions],
        lambda s, v, r: r.topics[0].partitions[0].end_offset == 3,
    ),
    32: Case(_describe_configs, lambda r: [x.error_code for x in r.results], _described_configs),
    33: Case(_alter_configs, lambda r: [x.error_code for x in r.responses], lambda s, v, r: len(r.responses) == 1),
    35: Case(
        _describe_log_dirs,
        lambda r: [r.error_code, *(d.error_code for d in r.results)],
        lambda s, v, r: {p.partition_index for d in r.results for t in d.topics for p in t.partitions} == {0, 1},
    ),
    37: Case(_create_partitions, lambda r: [t.error_code for t in r.results], lambda s, v, r: len(r.results) == 1),
    44: Case(
        _incremental_alter_configs, lambda r: [x.error_code for x in r.responses], lambda s, v, r: len(r.responses) == 1
    ),
    60: Case(
        lambda s, v: DescribeClusterRequest(),
        lambda r: [r.error_code],
        lambda s, v, r: [(b.broker_id, b.port) for b in r.brokers] == [(1, s.broker.port)],
    ),
    **{
        key: Case(*case)
        for module in (transaction_cases, group_cases, administration_cases)
        for key, case in module.CASES.items()
    },
    75: Case(
        lambda s, v: DescribeTopicPartitionsRequest(topics=[DescribeTopicPartitionsRequest.Topic(name=s.topic)]),
        lambda r: [t.error_code for t in r.topics],
        lambda s, v, r: [p.partition_index for p in r.topics[0].partitions] == [0, 1],
    ),
}


def advertised(kafka: KafkaConnection, version: int = 4) -> dict[int, tuple[int, int]]:
    response = kafka.call(
        API_VERSIONS, version, ApiVersionsRequest(client_software_name="tests", client_software_version="1")
    )
    assert response.error_code == 0
    return {key.api_key: (key.min_version, key.max_version) for key in response.api_keys}


def test_every_advertised_api_has_a_case(setting: Setting) -> None:
    """A new API needs a new case: no advertised API remains untested."""
    assert advertised(setting.kafka) == {key: (spec.min_version, spec.max_version) for key, spec in SUPPORTED.items()}
    assert set(SUPPORTED) == set(CASES)


def supported(key: int) -> range:
    return RECORD_VERSIONS if key == PRODUCE else range(SUPPORTED[key].min_version, SUPPORTED[key].max_version + 1)


def oldest_and_newest_quick() -> list[Any]:
    """The bounds of each API in every run, the versions in between in the slow tier."""
    return [
        pytest.param(key, version, marks=() if version in (supported(key)[0], supported(key)[-1]) else pytest.mark.slow)
        for key in CASES
        for version in supported(key)
    ]


@pytest.mark.parametrize(("key", "version"), oldest_and_newest_quick())
def test_an_advertised_version_gets_a_response(setting: Setting, key: int, version: int) -> None:
    case = CASES[key]
    response = setting.kafka.call(key, version, case.request(setting, version))
    assert not any(case.errors(response)), response
    assert case.right(setting, version, response), response


@pytest.mark.parametrize("version", range(RECORD_VERSIONS[0]))
def test_old_produce_versions_get_an_error(setting: Setting, version: int) -> None:
    message = struct.pack(">bbii", 0, 0, -1, 5) + b"value"
    record = struct.pack(">qiI", 0, len(message) + 4, 0) + message
    response = setting.kafka.call(PRODUCE, version, topics.produce_request(setting.topic, record, 0, acks=1))
    (result,) = response.responses[0].partition_responses
    assert result.error_code in (
        ErrorCode.UNSUPPORTED_VERSION,
        ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT,
        ErrorCode.INVALID_RECORD,
    ), response
    assert result.base_offset == -1
    assert topics.list_offset(setting.kafka, setting.topic, topics.LATEST).offset == 3, "nothing was appended"


def test_all_versions_of_api_versions_agree(setting: Setting) -> None:
    assert len({tuple(sorted(advertised(setting.kafka, version).items())) for version in range(5)}) == 1


def test_versions_needed_by_librdkafka_2_0_are_advertised(setting: Setting) -> None:
    """librdkafka 2.0.2 (Debian's) checks single versions before it uses a feature; these are the
    minimum versions that it needs.
    """
    ranges = advertised(setting.kafka)
    for key, version in [(0, 0), (0, 3), (0, 7), (1, 4), (1, 10), (2, 1), (3, 0), (10, 0), (18, 0), (22, 0)]:
        assert ranges[key][0] <= version <= ranges[key][1], SUPPORTED[key].name


def test_transactions_of_version_2_are_finalized(setting: Setting) -> None:
    """transaction.version 2 makes new clients omit AddPartitionsToTxn. Clients below version 4
    cannot read a lowest level of 0: they get the current level.
    """
    for version in (3, 4):
        response = setting.kafka.call(
            API_VERSIONS, version, ApiVersionsRequest(client_software_name="tests", client_software_version="1")
        )
        assert ("transaction.version", 2) in [(one.name, one.max_version_level) for one in response.finalized_features]
        assert all(one.min_version > 0 or version >= 4 for one in response.supported_features)


@pytest.mark.parametrize("version", [5, 99, 0x7FFF])
def test_an_unknown_version_of_api_versions_gets_a_version_0_response(shared_broker: Broker, version: int) -> None:
    """KIP-511: error 35, response header 0, body 0, which lists the supported versions; the
    connection stays open.
    """
    with topics.connect(shared_broker) as kafka:
        kafka.send_frame(struct.pack(">hhih", API_VERSIONS, version, 77, -1) + b"\0\1\1\0")
        frame = kafka.receive_frame()
        correlation_id, error, count = struct.unpack_from(">ihi", frame)
        assert (correlation_id, error) == (77, ErrorCode.UNSUPPORTED_VERSION)
        keys = [struct.unpack_from(">hhh", frame, 10 + 6 * i) for i in range(count)]
        assert len(frame) == 10 + 6 * count and (API_VERSIONS, 0, 4) in keys
        assert advertised(kafka) == {key: (low, high) for key, low, high in keys}


def test_records_of_every_produce_version_are_read_by_every_fetch_version(shared_broker: Broker) -> None:
    name = topics.create_topic(shared_broker, "round-trip")
    with topics.connect(shared_broker) as kafka:
        topic_id = topics.topic_id(kafka, name)
        batches = {
            version: topics.batch_of(f"produced with version {version}".encode(), b"x" * version)
            for version in RECORD_VERSIONS
        }
        for version, batch in batches.items():
            request = topics.produce_request(name, batch, **({"topic_id": topic_id} if version >= 13 else {}))
            (result,) = kafka.call(PRODUCE, version, request).responses[0].partition_responses
            assert (result.error_code, result.base_offset) == (0, 2 * (version - RECORD_VERSIONS[0])), version
        for version in supported(FETCH):
            for start, batch in zip(range(0, 2 * len(batches), 2), batches.values(), strict=True):
                part = topics.fetch(
                    kafka, name, start, version=version, topic_ids={name: topic_id}, partition_max_bytes=1
                )
                assert part.error_code == 0
                assert _without_broker_fields(part.records) == _without_broker_fields(batch), (version, start)
                assert [header.base_offset for header in topics.headers_in(part.records)] == [start]


def _without_broker_fields(batch: bytes) -> bytes:
    """A batch without base offset and leader epoch, the only bytes that a broker may set."""
    return batch[8:12] + batch[16:]


def test_the_workers_api_versions_response_equals_the_codecs(setting: Setting) -> None:
    """Workers send precomputed bytes, which must equal encode_response's."""
    for version in range(5):
        request = ApiVersionsRequest(client_software_name="tests", client_software_version="1")
        setting.kafka.send(API_VERSIONS, version, request)
        received = setting.kafka.receive()
        header, _ = decode_request(
            struct.pack(">hhih", API_VERSIONS, version, received.correlation_id, -1)
            + (b"\0\1\1\0" if version >= 3 else b"")
        )
        assert isinstance(received.body, ApiVersionsResponse)
        assert encode_response(header, received.body) == received.frame


_UNKNOWN_TAGS = b"\2" + b"\x63\3abc" + b"\xff\xff\3\0"  # tag 99 of three bytes, tag 65535 of none


def _tagged(frame: bytes) -> bytes:
    """The frame with unknown tagged fields in its header and at the end of its body."""
    start = decode_request_header(frame).body_position
    assert frame[start - 1 : start] == frame[-1:] == b"\0"
    return frame[: start - 1] + _UNKNOWN_TAGS + frame[start:-1] + _UNKNOWN_TAGS


def _with_rest(frame: bytes) -> bytes:
    """librdkafka 2.x appends bytes of its own to some requests; Kafka ignores them."""
    return frame + b"\1\2\3"


FLEXIBLE = [key for key in CASES if SUPPORTED[key].is_flexible(SUPPORTED[key].max_version)]


def _check_changed(setting: Setting, key: int, changed: Callable[[bytes], bytes]) -> None:
    version, case = SUPPORTED[key].max_version, CASES[key]
    with topics.connect(setting.broker) as kafka:
        kafka.send_frame(changed(encode_request(case.request(setting, version), version, 4711, "a client")))
        correlation_id, response = decode_response(kafka.receive_frame(), key, version)
        assert correlation_id == 4711 and not any(case.errors(response)), response
        assert case.right(setting, version, response), response
        assert advertised(kafka), "and the connection stays open"


@pytest.mark.parametrize("key", FLEXIBLE)
def test_unknown_tagged_fields_are_ignored(setting: Setting, key: int) -> None:
    """KIP-482: in header and body, by workers and by the acceptor."""
    _check_changed(setting, key, _tagged)


@pytest.mark.parametrize("key", sorted(set(FLEXIBLE) - {PRODUCE, FETCH}))
def test_bytes_after_a_request_are_ignored(setting: Setting, key: int) -> None:
    """Except Produce and Fetch, where no client sends any and inconsistent lengths are an error."""
    _check_changed(setting, key, _with_rest)


@pytest.mark.parametrize("client_id", [None, "", "ümlaut", "x" * 1000])
def test_client_ids(shared_broker: Broker, client_id: str | None) -> None:
    with topics.connect(shared_broker, client_id=client_id) as kafka:
        for version in (0, 3):
            assert advertised(kafka, version)
        assert kafka.call(3, 12, MetadataRequest(topics=None)).brokers


def test_all_topics_and_none(setting: Setting) -> None:
    """Version 0 requests all by an empty list; later an empty list means none and null all."""
    for version in (0, 1, 5, 8, 12, 13):
        everything = setting.kafka.call(3, version, MetadataRequest(topics=[] if version == 0 else None))
        assert setting.topic in {found.name for found in everything.topics}
        if version > 0:
            assert setting.kafka.call(3, version, MetadataRequest(topics=[])).topics == []


def test_two_connections_get_the_same_metadata(shared_broker: Broker) -> None:
    """Responses are cached by workers: the second equals the first except for the correlation id,
    until a topic is created.
    """
    with topics.connect(shared_broker) as one, topics.connect(shared_broker) as two:
        responses = []
        for kafka in (one, two, one, two):
            kafka.send(3, 12, MetadataRequest(topics=None))
            responses.append(kafka.receive().frame[4:])
        assert len(set(responses)) == 1
        name = topics.create_topic(shared_broker, "versions-new")
        for kafka in (one, two):
            assert name in {found.name for found in kafka.call(3, 12, MetadataRequest(topics=None)).topics}
