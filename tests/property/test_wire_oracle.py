"""The native wire code against independent codecs, byte for byte.

`native/tests/wire/wire_dump.c`, compiled here under ASan and UBSan, is the native side; kio
(generated from Kafka's own schema files) is the oracle; a small encoder below covers what kio
cannot write: unknown tagged fields and versions before Kafka 4.0's minimum. All are compared with
each other.
"""

import datetime
import importlib
import random
import struct
import uuid
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.schema import index as kio_index
from kio.schema.errors import ErrorCode
from kio.static.constants import EntityType
from kio.static.primitive import Records

from tests.property.wire_oracle import (
    EVERY_VERSION,
    FETCH,
    FLEXIBLE_FROM,
    IDS_FROM,
    KIO_REQUEST,
    LIST_OFFSETS,
    PRODUCE,
    REQUEST_VALUES,
    TINY,
    VERSIONS,
    Dump,
    Encoder,
    encode_request,
    expected_tokens,
    hex_token,
    i32,
    i64,
    ids,
    kio_bytes,
    kio_class,
    kio_topic,
    milliseconds,
    names,
    produce_values,
)
from tests.tiers import quick

# the versions in every run: the oldest, the first with tagged fields, the newest
TURNS = {
    pair for pair in EVERY_VERSION if pair[1] in (VERSIONS[pair[0]][0], FLEXIBLE_FROM[pair[0]], VERSIONS[pair[0]][-1])
}

# -- requests --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("api", "version"), quick(EVERY_VERSION, TURNS.__contains__))
def test_requests_of_kio_are_understood(dump: Dump, api: int, version: int) -> None:
    @TINY
    @given(REQUEST_VALUES[api])
    def check(values: dict) -> None:
        body = kio_bytes(KIO_REQUEST[api](version, values))
        assert body == encode_request(api, version, values)  # the two oracles agree, byte for byte
        assert dump.request(api, version, body) == expected_tokens(api, version, values)

    check()


@pytest.mark.parametrize("version", [0, 1, 2])
def test_old_produce_requests_are_understood(dump: Dump, version: int) -> None:
    @TINY
    @given(produce_values)
    def check(values: dict) -> None:
        assert dump.request(PRODUCE, version, encode_request(PRODUCE, version, values)) == expected_tokens(
            PRODUCE, version, values
        )

    check()


@pytest.mark.parametrize(("api", "version"), [pair for pair in EVERY_VERSION if pair[1] >= FLEXIBLE_FROM[pair[0]]])
def test_unknown_tagged_fields_are_skipped(dump: Dump, api: int, version: int) -> None:
    tags = st.lists(
        st.tuples(st.integers(2, 2**32 - 1), st.binary(max_size=300)), max_size=3, unique_by=lambda field: field[0]
    )

    @TINY
    @given(REQUEST_VALUES[api], st.data())
    def check(values: dict, data: st.DataObject) -> None:
        body = encode_request(api, version, values, lambda: data.draw(tags))
        assert dump.request(api, version, body) == expected_tokens(api, version, values)

    check()


@pytest.mark.parametrize("version", range(12, 19))
def test_a_tag_that_a_later_version_defines_is_unknown_before(dump: Dump, version: int) -> None:
    """Fetch: the partition's tags 0 (v17+) and 1 (v18+), the request's tag 1 (v15+); in earlier
    versions these numbers mean nothing and any bytes may follow.
    """
    partition = {
        "index": 1,
        "current_leader_epoch": 2,
        "fetch_offset": 3,
        "last_fetched_epoch": 4,
        "log_start_offset": 5,
        "max_bytes": 6,
        "directory_id": None,
        "high_watermark": 2**63 - 1,
    }
    values = {
        "replica_id": -1,
        "replica_epoch": -1,
        "max_wait_ms": 0,
        "min_bytes": 1,
        "max_bytes": 9,
        "isolation_level": 0,
        "session_id": 0,
        "session_epoch": -1,
        "rack_id": "",
        "cluster_id": None,
        "topics": [("t", uuid.UUID(int=7), [partition])],
        "forgotten": [],
    }
    for tag, holder, since in ((0, 0, 17), (1, 0, 18), (1, 2, 15)):
        places = iter(range(9))  # the order of the tag sections: partition, topic, request
        body = encode_request(FETCH, version, values, lambda: [(tag, b"abc")] if next(places) == holder else [])  # noqa: B023 (called at once)
        # three bytes are not a uuid, an int64 or a replica state
        expected = expected_tokens(FETCH, version, values) if version < since else None
        assert dump.request(FETCH, version, body) == expected, (tag, holder)


NEWEST = tuple({api: (api, version) for api, version in EVERY_VERSION}.values())


@pytest.mark.parametrize(("api", "version"), quick(EVERY_VERSION, NEWEST.__contains__))
def test_every_truncation_is_refused_and_an_extra_byte_ignored(dump: Dump, api: int, version: int) -> None:
    @settings(TINY, max_examples=3)
    @given(REQUEST_VALUES[api])
    def check(values: dict) -> None:
        body = encode_request(api, version, values)
        for size in range(len(body)):
            assert dump.request(api, version, body[:size]) is None, size
        assert dump.request(api, version, body + b"\0") == dump.request(api, version, body) is not None

    check()


@pytest.mark.parametrize("api", [PRODUCE, FETCH, LIST_OFFSETS])
def test_damaged_requests_never_crash(dump: Dump, api: int) -> None:
    """Whether they are refused depends on the schema; this checks that the process survives (under
    the sanitizers).
    """

    @settings(TINY, max_examples=150)
    @given(REQUEST_VALUES[api], st.sampled_from(VERSIONS[api]), st.integers(0, 2**32))
    def check(values: dict, version: int, seed: int) -> None:
        rng = random.Random(seed)
        body = bytearray(encode_request(api, version, values))
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(body))
            body[at : at + rng.randint(0, 4)] = rng.choice(
                [b"\xff" * 4, b"\x7f\xff\xff\xff", b"\x80" * 4, b"\0", rng.randbytes(3)]
            )
        dump.request(api, version, bytes(body))

    check()


@pytest.mark.parametrize(
    ("api", "version"), [(PRODUCE, -1), (PRODUCE, 14), (FETCH, 3), (FETCH, 19), (LIST_OFFSETS, 0), (LIST_OFFSETS, 12)]
)
def test_versions_that_are_not_advertised_are_refused(dump: Dump, api: int, version: int) -> None:
    accepted, message = dump.send_request("request", api, version, "00" * 40)
    assert not accepted and "not advertised" in " ".join(message)


def test_a_huge_array_count_is_refused_by_what_remains(dump: Dump) -> None:
    accepted, message = dump.send_request("request", LIST_OFFSETS, 1, struct.pack(">ii", -1, 2**31 - 1).hex())
    assert not accepted and "more elements than the rest of the frame can hold" in " ".join(message)


# -- headers ---------------------------------------------------------------------------------------


def kio_flexible() -> Iterator[tuple[int, int, bool]]:
    for key, name in kio_index.api_key_map.items():
        for version, kinds in kio_index.schema_name_map[name].items():
            if EntityType.request in kinds:
                module, _, cls = (
                    kinds[EntityType.request].rpartition(":")
                    if ":" in kinds[EntityType.request]
                    else kinds[EntityType.request].rpartition(".")
                )
                yield key, version, getattr(importlib.import_module(module), cls).__flexible__


def test_flexible_versions_of_every_api(dump: Dump) -> None:
    seen = 0
    for key, version, flexible in kio_flexible():
        assert dump.send_request("flexible", key, version) == (True, [str(int(flexible))]), (key, version)
        seen += 1
    assert seen > 250
    for key in (-1, 4, 5, 6, 7, 93, 1000, 32767, -32768):
        assert dump.send_request("flexible", key, 5) == (True, ["0"])


@TINY
@given(
    key=st.sampled_from(sorted(kio_index.api_key_map)),
    version=st.integers(0, 20),
    correlation=i32,
    client=st.none() | names,
    body=st.binary(max_size=9),
    data=st.data(),
)
def test_request_headers(
    dump: Dump, key: int, version: int, correlation: int, client: str | None, body: bytes, data: st.DataObject
) -> None:
    flexible = dump.send_request("flexible", key, version)[1] == ["1"]
    e = Encoder(
        flexible, lambda: data.draw(st.lists(st.tuples(st.integers(0, 99), st.binary(max_size=200)), max_size=2))
    )
    e.put("hhi", key, version, correlation)
    e.put("h", -1 if client is None else len(client.encode()))
    e.out += (client or "").encode()
    e.tags()
    frame = bytes(e.out)
    assert dump.send_request("header", (frame + body).hex()) == (
        True,
        ["1", str(key), str(version), str(correlation), hex_token(client), str(len(frame))],
    )
    for size in range(len(frame)):
        assert not dump.send_request("header", frame[:size].hex())[0]


def test_an_unknown_api_gives_its_correlation_id(dump: Dump) -> None:
    assert dump.send_request("header", struct.pack(">hhi", 1234, 7, 42).hex()) == (
        True,
        ["0", "1234", "7", "42", "-", "8"],
    )


# -- responses -------------------------------------------------------------------------------------

errors = st.sampled_from(sorted(int(code) for code in ErrorCode))
times = st.just(-1) | st.integers(0, 4 * 10**12)
produce_outcomes = st.fixed_dictionaries(
    {
        "throttle_ms": i32,
        "topics": st.lists(
            st.tuples(
                names,
                ids,
                st.lists(
                    st.tuples(
                        i32,
                        errors,
                        i64,
                        times,
                        i64,
                        st.none() | st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=200),
                    ),
                    max_size=3,
                ),
            ),
            max_size=3,
        ),
    }
)
fetch_outcomes = st.fixed_dictionaries(
    {
        "throttle_ms": i32,
        "error": errors,
        "session_id": i32,
        "topics": st.lists(
            st.tuples(names, ids, st.lists(st.tuples(i32, errors, i64, i64, i64, st.binary(max_size=300)), max_size=3)),
            max_size=3,
        ),
    }
)
list_offsets_outcomes = st.fixed_dictionaries(
    {
        "throttle_ms": i32,
        "topics": st.lists(
            st.tuples(names, ids, st.lists(st.tuples(i32, errors, i64, i64, i32), max_size=3)), max_size=3
        ),
    }
)
RESPONSE_VALUES = {PRODUCE: produce_outcomes, FETCH: fetch_outcomes, LIST_OFFSETS: list_offsets_outcomes}


def response_tokens(api: int, version: int, v: dict) -> list[object]:
    out: list[object] = [v["throttle_ms"]]
    if api == FETCH:
        out += [v["error"], v["session_id"]]
    out += [len(v["topics"])]
    for name, topic_id, partitions in v["topics"]:
        out += [hex_token(topic_id.bytes if version >= IDS_FROM[api] else name), len(partitions)]
        for p in partitions:
            out += [*p[:5], hex_token(p[5])] if api != LIST_OFFSETS else p
    return out


def kio_moment(value: int) -> datetime.datetime | None:
    return (
        None if value < 0 else datetime.datetime.fromtimestamp(0, datetime.UTC) + datetime.timedelta(milliseconds=value)
    )


def kio_produce_response(version: int, v: dict):
    response, topic, partition = (
        kio_class(PRODUCE, version, "response", n)
        for n in ("ProduceResponse", "TopicProduceResponse", "PartitionProduceResponse")
    )

    def one(index: int, error: int, base_offset: int, moment: int, log_start_offset: int, message: str | None):
        fields = {
            "index": index,
            "error_code": ErrorCode(error),
            "base_offset": base_offset,
            "log_append_time": kio_moment(moment),
        }
        if version >= 5:
            fields["log_start_offset"] = log_start_offset
        if version >= 8:
            fields |= {"record_errors": (), "error_message": message}
        return partition(**fields)

    topics = (
        topic(partition_responses=tuple(one(*p) for p in partitions), **kio_topic(PRODUCE, version, name, topic_id))
        for name, topic_id, partitions in v["topics"]
    )
    return response(responses=tuple(topics), throttle_time=milliseconds(v["throttle_ms"]))


def kio_fetch_response(version: int, v: dict):
    response, topic, partition = (
        kio_class(FETCH, version, "response", n) for n in ("FetchResponse", "FetchableTopicResponse", "PartitionData")
    )

    def one(
        index: int, error: int, high_watermark: int, last_stable_offset: int, log_start_offset: int, records: bytes
    ):
        fields = {
            "partition_index": index,
            "error_code": ErrorCode(error),
            "high_watermark": high_watermark,
            "last_stable_offset": last_stable_offset,
        }
        fields |= {"aborted_transactions": None, "records": Records(records)}
        if version >= 5:
            fields["log_start_offset"] = log_start_offset
        if version >= 11:
            fields["preferred_read_replica"] = -1
        return partition(**fields)

    topics = (
        topic(partitions=tuple(one(*p) for p in partitions), **kio_topic(FETCH, version, name, topic_id, "topic"))
        for name, topic_id, partitions in v["topics"]
    )
    top = {"error_code": ErrorCode(v["error"]), "session_id": v["session_id"]} if version >= 7 else {}
    return response(responses=tuple(topics), throttle_time=milliseconds(v["throttle_ms"]), **top)


def kio_list_offsets_response(version: int, v: dict):
    response, topic, partition = (
        kio_class(LIST_OFFSETS, version, "response", n)
        for n in ("ListOffsetsResponse", "ListOffsetsTopicResponse", "ListOffsetsPartitionResponse")
    )

    def one(index: int, error: int, timestamp: int, offset: int, epoch: int):
        fields = {"partition_index": index, "error_code": ErrorCode(error), "timestamp": timestamp, "offset": offset}
        return partition(**fields, **({"leader_epoch": epoch} if version >= 4 else {}))

    topics = tuple(
        topic(name=name, partitions=tuple(one(*p) for p in partitions)) for name, _, partitions in v["topics"]
    )
    return response(topics=topics, **({"throttle_time": milliseconds(v["throttle_ms"])} if version >= 2 else {}))


KIO_RESPONSE = {PRODUCE: kio_produce_response, FETCH: kio_fetch_response, LIST_OFFSETS: kio_list_offsets_response}


@pytest.mark.parametrize(("api", "version"), quick(EVERY_VERSION, TURNS.__contains__))
def test_responses_equal_kios(dump: Dump, api: int, version: int) -> None:
    @TINY
    @given(RESPONSE_VALUES[api], i32)
    def check(values: dict, correlation: int) -> None:
        accepted, (frame,) = dump.send_request(
            "response", api, version, correlation, *response_tokens(api, version, values)
        )
        tags = b"\0" if version >= FLEXIBLE_FROM[api] else b""
        body = kio_bytes(KIO_RESPONSE[api](version, values))
        assert (
            accepted
            and bytes.fromhex(frame) == struct.pack(">ii", 4 + len(tags) + len(body), correlation) + tags + body
        )

    check()


@pytest.mark.parametrize("version", [0, 1, 2])
def test_old_produce_responses(dump: Dump, version: int) -> None:
    """v0: topics; v1 adds the throttle time behind them, v2 the append time (the protocol guide of
    Kafka 3).
    """
    values = {"throttle_ms": 5, "topics": [("a", uuid.UUID(int=0), [(3, 43, -1, -1, -1, None)])]}
    _, (frame,) = dump.send_request("response", PRODUCE, version, 9, *response_tokens(PRODUCE, version, values))
    expected = struct.pack(">iihc", 9, 1, 1, b"a") + struct.pack(">iihq", 1, 3, 43, -1)
    expected += (struct.pack(">q", -1) if version >= 2 else b"") + (struct.pack(">i", 5) if version >= 1 else b"")
    assert bytes.fromhex(frame) == struct.pack(">i", len(expected)) + expected
