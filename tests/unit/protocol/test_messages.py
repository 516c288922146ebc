"""Known frames byte by byte, headers, refusals and their messages, the schema's notation, and the
tables.
"""

import struct

import pytest

from mqd.protocol import (
    ERRORS,
    KNOWN,
    SUPPORTED,
    ErrorCode,
    ProtocolError,
    RequestHeader,
    UnsupportedVersion,
    codec,
    decode_request,
    decode_response,
    encode_request,
    encode_response,
    with_length,
)
from mqd.protocol.errors import error_message, error_name, is_retriable
from mqd.protocol.messages import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    CreateTopicsResponse,
    DescribeTopicPartitionsRequest,
    FetchRequest,
    FetchResponse,
    InitProducerIdRequest,
    MetadataRequest,
    MetadataResponse,
    ProduceRequest,
)
from mqd.protocol.schema import APIS, language
from mqd.protocol.table import api_table, error_table

TOPIC_ID = bytes(range(16))

# (request struct, version, correlation id, client id, the frame)
GOLDEN_REQUESTS = {
    "ApiVersions v0": (ApiVersionsRequest(), 0, 1, "me", "0012 0000 00000001 0002 6d65"),
    "ApiVersions v3": (
        ApiVersionsRequest(client_software_name="lib", client_software_version="1.0"),
        3,
        2,
        None,
        "0012 0003 00000002 ffff 00 04 6c6962 04 312e30 00",
    ),
    "Metadata v1, all topics": (MetadataRequest(topics=None), 1, 3, "c", "0003 0001 00000003 0001 63 ffffffff"),
    "Metadata v12 by id": (
        MetadataRequest(topics=[MetadataRequest.Topic(topic_id=TOPIC_ID, name=None)], allow_auto_topic_creation=False),
        12,
        4,
        "c",
        "0003 000c 00000004 0001 63 00 02" + TOPIC_ID.hex() + "00 00 00 00 00",
    ),
    "Produce v9": (
        ProduceRequest(
            acks=-1,
            timeout_ms=1000,
            topic_data=[
                ProduceRequest.TopicData(
                    name="t", partition_data=[ProduceRequest.PartitionData(index=2, records=b"\xaa\xbb")]
                )
            ],
        ),
        9,
        5,
        "c",
        "0000 0009 00000005 0001 63 00 00 ffff 000003e8 02 02 74 02 00000002 03 aabb 00 00 00",
    ),
    "InitProducerId v4": (
        InitProducerIdRequest(transaction_timeout_ms=60000),
        4,
        6,
        "c",
        "0016 0004 00000006 0001 63 00 00 0000ea60" + "ff" * 10 + "00",
    ),
    "Fetch v17": (
        FetchRequest(
            cluster_id="x",
            max_wait_ms=500,
            min_bytes=1,
            max_bytes=2,
            replica_state=FetchRequest.ReplicaState(replica_id=3, replica_epoch=4),
            topics=[
                FetchRequest.Topic(
                    topic_id=TOPIC_ID,
                    partitions=[FetchRequest.Partition(partition=1, fetch_offset=9, partition_max_bytes=7)],
                )
            ],
        ),
        17,
        7,
        "c",
        "0001 0011 00000007 0001 63 00 000001f4 00000001 00000002 00 00000000 ffffffff 02"
        + TOPIC_ID.hex()
        + "02 00000001 ffffffff 0000000000000009 ffffffff ffffffffffffffff 00000007 00 00 01 01"
        + "02 00 02 02 78 01 0d 00000003 0000000000000004 00",
    ),
    "DescribeTopicPartitions v0 with a cursor": (
        DescribeTopicPartitionsRequest(cursor=DescribeTopicPartitionsRequest.Cursor(topic_name="t", partition_index=5)),
        0,
        8,
        "c",
        "004b 0000 00000008 0001 63 00 01 000007d0 01 02 74 00000005 00 00",
    ),
}


@pytest.mark.parametrize("name", GOLDEN_REQUESTS)
def test_requests_byte_by_byte(name: str) -> None:
    request, version, correlation_id, client_id, text = GOLDEN_REQUESTS[name]
    frame = bytes.fromhex(text)
    assert encode_request(request, version, correlation_id, client_id) == frame
    for buffer in (frame, bytearray(frame), memoryview(frame)):
        header, decoded = decode_request(buffer)
        assert decoded == request
        assert (header.api_version, header.correlation_id, header.client_id) == (version, correlation_id, client_id)


def test_responses_byte_by_byte() -> None:
    header = RequestHeader(18, 3, 9)
    response = ApiVersionsResponse(api_keys=[ApiVersionsResponse.ApiVersion(api_key=18, min_version=0, max_version=4)])
    frame = bytes.fromhex("00000009 0000 02 0012 0000 0004 00 00000000 00")  # header v0 although the body is flexible
    assert encode_response(header, response) == frame
    assert decode_response(frame, 18, 3) == (9, response)
    assert encode_response(header, ApiVersionsResponse(error_code=35), version=0) == bytes.fromhex(
        "00000009 0023 00000000"
    )
    metadata = MetadataResponse(
        cluster_id="c",
        controller_id=1,
        topics=[
            MetadataResponse.Topic(name="t", partitions=[MetadataResponse.Partition(leader_id=1, replica_nodes=[1])])
        ],
    )
    frame = bytes.fromhex(
        "00000001 00 00000000 01 02 63 00000001 02 0000 02 74"
        + "00" * 16
        + "00 02 0000 00000000 00000001 ffffffff 02 00000001 01 01 00 80000000 00 00"
    )
    assert encode_response(RequestHeader(3, 12, 1), metadata) == frame
    assert decode_response(frame, 3, 12) == (1, metadata)
    assert with_length(frame) == struct.pack(">i", len(frame)) + frame


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is not a request"),
        ("0003", "is not a request"),
        ("0003 0001 00000003 00", "cut off"),
        ("0003 0001 00000003 7fff 63", "a length of 32767 where 1 bytes remain"),
        ("0003 0001 00000003 fffe", "a length of -2"),
        ("0003 0001 00000003 0001 ff ffffffff", "not UTF-8"),
        ("0003 000c 00000003 0001 63", "cut off"),
        ("0003 000c 00000003 0001 63 01 00 7f", "beyond the end"),
        ("0003 000c 00000003 0001 63 01 ffffffffff", "varint"),
    ],
)
def test_invalid_headers(text: str, problem: str) -> None:
    with pytest.raises(ProtocolError, match=problem) as caught:
        decode_request(bytes.fromhex(text))
    assert not isinstance(caught.value, UnsupportedVersion)


def test_unknown_apis_and_versions_are_reported_with_their_header() -> None:
    for text, key, version, client_id in [
        ("7fff 0001 0000002a 0001 63", 32767, 1, "c"),
        ("0003 0063 0000002a 0001 63", 3, 99, "c"),
        ("0003 ffff 0000002a 0001 63", 3, -1, "c"),
        ("0012 0005 0000002a", 18, 5, None),
        ("0012 0005 0000002a 7fff", 18, 5, None),
        ("0001 0003 0000002a ffff", 1, 3, None),
    ]:
        with pytest.raises(UnsupportedVersion, match="not supported") as caught:
            decode_request(bytes.fromhex(text))
        header = caught.value.header
        assert (header.api_key, header.api_version, header.correlation_id, header.client_id) == (
            key,
            version,
            42,
            client_id,
        )


@pytest.mark.parametrize(
    ("version", "body", "field", "position", "problem"),
    [
        (1, "7fffffff", "topics", 4, "array of 2147483647"),
        (1, "fffffffe", "topics", 4, "array of -2"),
        (0, "ffffffff", "topics", 4, "null"),
        (1, "00000001 0005 6162", "topics[].name", 6, "a length of 5 where 2"),
        (1, "00000001 0002 c328", "topics[].name", 6, "not UTF-8"),
        (1, "00000001 ffff", "topics[].name", 6, "null where"),
        (4, "00000000", "allow_auto_topic_creation", 4, "cut off"),
        (8, "00000000 01 00", "include_topic_authorized_operations", 6, "cut off"),
        (12, "02" + "00" * 15, "topics", 1, "an array of 1 elements"),
        (12, "02" + "00" * 18, "allow_auto_topic_creation", 19, "cut off"),
        (12, "02" + "00" * 18 + "01 01", "tagged fields", 21, "cut off"),
        (12, "01 00 00 01 05 7f", "tagged fields", 4, "beyond the end"),
        (12, "ffffffffff00", "topics", 1, "varint"),
    ],
)
def test_errors_name_message_field_and_position(
    version: int, body: str, field: str, position: int, problem: str
) -> None:
    with pytest.raises(ProtocolError) as caught:
        codec.decode(MetadataRequest, version, bytes.fromhex(body))
    error = caught.value
    assert (error.message, error.field, error.position) == (f"MetadataRequest v{version}", field, position)
    assert problem in str(error) and str(error).startswith(f"MetadataRequest v{version}")


def test_bytes_after_a_message_are_refused() -> None:
    with pytest.raises(ProtocolError, match="1 bytes too many"):
        codec.decode(ApiVersionsRequest, 0, b"\0")


def test_the_four_byte_null_array_of_librdkafka_is_understood() -> None:
    """librdkafka 2.16 requests all topics with four zero bytes where a flexible version has one."""
    request = codec.decode(MetadataRequest, 13, bytes.fromhex("00000000 01 00 00"))
    assert request.topics is None


def test_a_known_tagged_field_must_have_its_declared_length() -> None:
    request = codec.encode(FetchRequest(cluster_id="x"), 13)
    # no topics, none forgotten, no rack, one tagged field: 0, of two bytes
    assert request.endswith(bytes.fromhex("01 01 01 01 00 02 0278"))
    with pytest.raises(ProtocolError, match="whose size is wrong"):
        codec.decode(FetchRequest, 13, request[:-3] + bytes.fromhex("03 0278 00"))


def test_tagged_fields_at_their_default_are_left_out() -> None:
    leader = FetchResponse.LeaderIdAndEpoch
    partition = FetchResponse.PartitionData
    sizes = []
    for current_leader in (None, leader(), leader(leader_id=4)):
        response = FetchResponse(
            responses=[FetchResponse.TopicResponse(partitions=[partition(current_leader=current_leader)])]
        )
        sizes.append(len(codec.encode(response, 16)))
    assert sizes[0] == sizes[1] == sizes[2] - 11


@pytest.mark.parametrize(
    ("message", "version", "field"),
    [
        (MetadataRequest(topics=None), 0, "topics"),
        (MetadataRequest(topics=[MetadataRequest.Topic(name=None)]), 4, "topics[].name"),
        (MetadataRequest(topics=[MetadataRequest.Topic(topic_id=b"short", name="t")]), 12, "topics[].topic_id"),
        (MetadataRequest(topics=[MetadataRequest.Topic(name="t" * 32768)]), 12, "topics[].name"),
        (MetadataRequest(topics=[MetadataRequest.Topic(name="t" * 32768)]), 1, "topics[].name"),
        (MetadataResponse(throttle_time_ms=1 << 31), 12, "throttle_time_ms"),
        (MetadataResponse(controller_id="one"), 12, "controller_id"),
        (MetadataResponse(brokers=[MetadataResponse.Broker(host=7)]), 12, "brokers[].host"),
    ],
)
def test_out_of_range_values_are_named(message: object, version: int, field: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        codec.encode(message, version)
    assert caught.value.field.startswith(field)


def test_versions_outside_the_schema_are_refused() -> None:
    with pytest.raises(ProtocolError, match="version 14 is not supported; the supported versions are 0 to 13"):
        codec.encode(MetadataRequest(), 14)
    with pytest.raises(ProtocolError, match="not supported"):
        codec.decode(MetadataRequest, -1, b"")


def test_the_frame_is_copied_before_it_is_checked() -> None:
    frame = bytearray(encode_request(MetadataRequest(topics=[MetadataRequest.Topic(name="topic")]), 12, 1))
    _, request = decode_request(memoryview(frame))
    frame[:] = bytes(len(frame))
    assert request.topics[0].name == "topic"


def test_defaults_are_not_shared_between_messages() -> None:
    first, second = CreateTopicsResponse(), CreateTopicsResponse()
    first.topics.append(CreateTopicsResponse.TopicResult())
    assert second.topics == []
    assert CreateTopicsResponse.TopicResult().configs == []  # never null: Java's admin client reads it without a check
    message = MetadataResponse(topics=[MetadataResponse.Topic(name="t", partitions=[MetadataResponse.Partition()])])
    codec.decode(MetadataResponse, 1, codec.encode(message, 1)).topics[0].partitions[0].offline_replicas.append(1)
    assert MetadataResponse.Partition().offline_replicas == []


def test_a_nested_struct_is_encoded_alone_as_within_its_message() -> None:
    topic = MetadataResponse.Topic(
        name="topic", partitions=[MetadataResponse.Partition(partition_index=3, isr_nodes=[1, 2])]
    )
    for version in (1, 12):
        assert codec.encode(topic, version) in codec.encode(MetadataResponse(topics=[topic]), version)
        assert codec.decode(MetadataResponse.Topic, version, codec.encode(topic, version)) == topic


# -- tables and the notation -----------------------------------------------------------------------


def test_supported_versions_fit_old_and_new_clients() -> None:
    # KAFKA-18659: older librdkafka checks for Produce 0
    assert (SUPPORTED[0].min_version, SUPPORTED[0].max_version) == (0, 13)
    # librdkafka 2.0.2 checks for these
    for key, version in [(0, 3), (0, 7), (1, 4), (1, 10), (2, 1), (3, 4), (10, 0), (18, 0), (18, 3), (22, 0)]:
        assert SUPPORTED[key].min_version <= version <= SUPPORTED[key].max_version
    assert list(KNOWN) == sorted(APIS)
    assert set(SUPPORTED) >= {0, 1, 2, 3, 8, 9, 10, 18, 19, 20, 21, 22, 23, 32, 33, 35, 37, 44, 47, 60, 75}


def test_every_struct_of_every_message_parses() -> None:
    for api in APIS.values():
        for kind in ("Request", "Response"):
            message = api.message(kind)
            for struct_ in [message.root, *message.structs.values()]:
                tags = [field.tag for field in struct_.fields if field.tag >= 0]
                assert len(tags) == len(set(tags)), struct_.name
                assert all(field.versions.last <= language.NEWEST for field in struct_.fields)


@pytest.mark.parametrize(
    "text",
    [
        "name string 0+",
        "name: text 0+",
        "name: string",
        "    name: string 0+",
        "a: int8 0+\n      b: int8 0+",
        "a: int8 0+\na: int8 0+",
        "a: [Thing] 0+",
        "a: [T] 0+\n    x: int8 0+\nb: [T] 0+\n    y: int8 0+",
    ],
)
def test_errors_in_the_notation_are_named(text: str) -> None:
    with pytest.raises(language.SchemaError, match="Test"):
        language.parse("Test", 0, language.Versions(0, 1), 0, text)


@pytest.mark.parametrize(
    "text", ["Test 1 versions 0, flexible from 0\nresponse\n", "Test 1: versions 0, flexible from 0\n"]
)
def test_an_invalid_api_is_named(text: str) -> None:
    good = "Other 2: versions 0, flexible from 0\nresponse\nerror_code: int16 0+\n\n"
    with pytest.raises(language.SchemaError, match="Test 1"):
        language.apis(good + text)


def test_error_codes() -> None:
    assert sorted(ERRORS) == list(range(-1, 134))
    assert ErrorCode.UNKNOWN_TOPIC_OR_PARTITION == 3 and error_name(3) == "UNKNOWN_TOPIC_OR_PARTITION"
    assert error_name(999) == "ERROR_999" and not is_retriable(999) and error_message(999)
    assert is_retriable(ErrorCode.KAFKA_STORAGE_ERROR) and not is_retriable(ErrorCode.UNKNOWN_SERVER_ERROR)
    assert all(error.message for error in ERRORS.values())


def test_error_codes_against_kio() -> None:
    errors = pytest.importorskip("kio.schema.errors")
    for error in errors.ErrorCode:
        assert (ERRORS[int(error)].name, ERRORS[int(error)].retriable) == (error.name.upper(), error.retriable)


def test_tables_as_markdown() -> None:
    table = api_table()
    assert "| 3 | Metadata | 0-13 | 9 |" in table and "| 75 | DescribeTopicPartitions | 0 | 0 |" in table
    assert len(table.splitlines()) == len(SUPPORTED) + 2
    assert "| 3 | UNKNOWN_TOPIC_OR_PARTITION | yes |" in error_table()
