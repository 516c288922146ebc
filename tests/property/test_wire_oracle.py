"""The native wire code against independent codecs, byte for byte.

`native/tests/wire/wire_dump.c`, compiled here under ASan and UBSan, is the native side; kio
(generated from Kafka's own schema files) is the oracle; a small encoder below adds what kio cannot
write: unknown tagged fields and the versions before Kafka 4.0's minimum. All of them are held
against each other.
"""

import datetime
import importlib
import io
import random
import shutil
import struct
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kio.schema import index as kio_index
from kio.schema.errors import ErrorCode
from kio.serial import entity_writer
from kio.static.constants import EntityType
from kio.static.primitive import Records, i32Timedelta

NATIVE = Path(__file__).resolve().parents[2] / "native"
PRODUCE, FETCH, LIST_OFFSETS = 0, 1, 2
NAMES = {PRODUCE: "produce", FETCH: "fetch", LIST_OFFSETS: "list_offsets"}
FLEXIBLE_FROM = {PRODUCE: 9, FETCH: 12, LIST_OFFSETS: 6}
IDS_FROM = {PRODUCE: 13, FETCH: 13, LIST_OFFSETS: 99}
VERSIONS = {PRODUCE: range(3, 14), FETCH: range(4, 19), LIST_OFFSETS: range(1, 12)}
EVERY_VERSION = [(api, version) for api, versions in VERSIONS.items() for version in versions]
TINY = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


class Dump:
    """The native side: one line in, one line out."""

    def __init__(self, program: Path) -> None:
        self.process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, *words: object) -> tuple[bool, list[str]]:
        """(accepted, tokens). An end of the process (a sanitizer's finding) is a failure of the
        test.
        """
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().split()
        assert answer, f"wire_dump died (exit code {self.process.wait()}) on: {words}"
        return answer[0] == "ok", answer[1:]

    def request(self, api: int, version: int, body: bytes) -> list[str] | None:
        accepted, tokens = self.ask("request", api, version, body.hex())
        return tokens if accepted else None


@pytest.fixture(scope="session")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dump]:
    compiler = shutil.which("gcc") or shutil.which("cc")
    assert compiler, "no C compiler: install gcc"
    program = tmp_path_factory.mktemp("wire") / "wire_dump"
    sources = [
        NATIVE / "tests/wire/wire_dump.c",
        NATIVE / "base/error.c",
        *(NATIVE / "wire" / f"{name}.c" for name in ("buffer", "fetch", "list_offsets", "nodes", "produce", "wire")),
    ]
    flags = [
        "-std=gnu11",
        "-D_GNU_SOURCE",
        "-O1",
        "-g",
        "-Wall",
        "-Wextra",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
        f"-I{NATIVE}",
    ]
    subprocess.run([compiler, *flags, *sources, "-o", program], check=True)
    native = Dump(program)
    yield native
    assert native.process.stdin
    native.process.stdin.close()
    assert native.process.wait(timeout=30) == 0, "wire_dump ended with an error (a leak?)"


# -- requests as plain values; two encoders and the tokens that the native side must print ---------

i8, i16, i32, i64 = (st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64))
names = st.text(max_size=12)
ids = st.uuids() | st.just(uuid.UUID(int=0))
blobs = st.none() | st.binary(max_size=200)
produce_values = st.fixed_dictionaries(
    {
        "transactional_id": st.none() | names,
        "acks": i16,
        "timeout_ms": i32,
        "topics": st.lists(st.tuples(names, ids, st.lists(st.tuples(i32, blobs), max_size=3)), max_size=3),
    }
)
fetch_partitions = st.fixed_dictionaries(
    {
        "index": i32,
        "current_leader_epoch": i32,
        "fetch_offset": i64,
        "last_fetched_epoch": i32,
        "log_start_offset": i64,
        "max_bytes": i32,
        "directory_id": st.none() | st.uuids(),
        "high_watermark": st.just(2**63 - 1) | i64,
    }
)
fetch_values = st.fixed_dictionaries(
    {
        "replica_id": i32,
        "replica_epoch": i64,
        "max_wait_ms": i32,
        "min_bytes": i32,
        "max_bytes": i32,
        "isolation_level": i8,
        "session_id": i32,
        "session_epoch": i32,
        "rack_id": names,
        "cluster_id": st.none() | names,
        "topics": st.lists(st.tuples(names, ids, st.lists(fetch_partitions, max_size=3)), max_size=3),
        "forgotten": st.lists(st.tuples(names, ids, st.lists(i32, max_size=3)), max_size=2),
    }
)
list_offsets_values = st.fixed_dictionaries(
    {
        "replica_id": i32,
        "isolation_level": i8,
        "timeout_ms": i32,
        "topics": st.lists(st.tuples(names, ids, st.lists(st.tuples(i32, i32, i64), max_size=3)), max_size=3),
    }
)
REQUEST_VALUES = {PRODUCE: produce_values, FETCH: fetch_values, LIST_OFFSETS: list_offsets_values}


def hex_token(value: bytes | str | None) -> str:
    return "-" if value is None else "x" + (value.encode() if isinstance(value, str) else value).hex()


def expected_tokens(api: int, version: int, v: dict) -> list[str]:
    out: list[object] = []

    def topic(name: str, topic_id: uuid.UUID, partitions: list) -> None:
        out.extend([hex_token(topic_id.bytes if version >= IDS_FROM[api] else name), len(partitions)])

    if api == PRODUCE:
        out += [
            hex_token(v["transactional_id"] if version >= 3 else None),
            v["acks"],
            v["timeout_ms"],
            len(v["topics"]),
        ]
        for name, topic_id, partitions in v["topics"]:
            topic(name, topic_id, partitions)
            for index, records in partitions:
                out += [index, hex_token(records)]
    elif api == FETCH:
        rack = v["rack_id"] if version >= 11 else None
        out += [
            v["replica_id"],
            v["replica_epoch"] if version >= 15 else -1,
            v["max_wait_ms"],
            v["min_bytes"],
            v["max_bytes"],
            v["isolation_level"],
        ]
        out += [
            v["session_id"] if version >= 7 else 0,
            v["session_epoch"] if version >= 7 else -1,
            hex_token(rack or ""),
            len(v["topics"]),
        ]
        for name, topic_id, partitions in v["topics"]:
            topic(name, topic_id, partitions)
            for p in partitions:
                out += [
                    p["index"],
                    p["current_leader_epoch"] if version >= 9 else -1,
                    p["fetch_offset"],
                    p["last_fetched_epoch"] if version >= 12 else -1,
                ]
                out += [
                    p["log_start_offset"] if version >= 5 else -1,
                    p["max_bytes"],
                    p["high_watermark"] if version >= 18 else 2**63 - 1,
                ]
        forgotten = v["forgotten"] if version >= 7 else []
        out += [len(forgotten)]
        for name, topic_id, partitions in forgotten:
            topic(name, topic_id, partitions)
            out += partitions
    else:
        out += [
            v["replica_id"],
            v["isolation_level"] if version >= 2 else 0,
            v["timeout_ms"] if version >= 10 else -1,
            len(v["topics"]),
        ]
        for name, topic_id, partitions in v["topics"]:
            topic(name, topic_id, partitions)
            for index, epoch, timestamp in partitions:
                out += [index, epoch if version >= 4 else -1, timestamp]
    return list(map(str, out))


class Encoder:
    """The schema written down a second time, with room for tagged fields that nobody knows."""

    def __init__(self, flexible: bool, unknown_tags: Callable[[], list[tuple[int, bytes]]] = list) -> None:
        self.flexible, self.unknown_tags, self.out = flexible, unknown_tags, bytearray()

    def put(self, form: str, *values: int) -> None:
        self.out += struct.pack(">" + form, *values)

    def varint(self, value: int) -> None:
        while value >= 0x80:
            self.out.append(value & 0x7F | 0x80)
            value >>= 7
        self.out.append(value)

    def count(self, value: int) -> None:
        self.varint(value + 1) if self.flexible else self.put("i", value)

    def text(self, value: str | None) -> None:
        encoded = None if value is None else value.encode()
        length = -1 if encoded is None else len(encoded)
        self.varint(length + 1) if self.flexible else self.put("h", length)
        self.out += encoded or b""

    def blob(self, value: bytes | None) -> None:
        self.count(-1 if value is None else len(value))
        self.out += value or b""

    def tags(self, known: list[tuple[int, bytes]] | None = None) -> None:
        if self.flexible:
            fields = sorted((known or []) + self.unknown_tags())
            self.varint(len(fields))
            for tag, value in fields:
                self.varint(tag)
                self.varint(len(value))
                self.out += value

    def topic(self, by_id: bool, name: str, topic_id: uuid.UUID) -> None:
        if by_id:
            self.out += topic_id.bytes
        else:
            self.text(name)


def encode_request(
    api: int, version: int, v: dict, unknown_tags: Callable[[], list[tuple[int, bytes]]] = list
) -> bytes:
    e = Encoder(version >= FLEXIBLE_FROM[api], unknown_tags)
    by_id = version >= IDS_FROM[api]
    if api == PRODUCE:
        if version >= 3:
            e.text(v["transactional_id"])
        e.put("hi", v["acks"], v["timeout_ms"])
    elif api == FETCH:
        if version <= 14:
            e.put("i", v["replica_id"])
        e.put("iiib", v["max_wait_ms"], v["min_bytes"], v["max_bytes"], v["isolation_level"])
        if version >= 7:
            e.put("ii", v["session_id"], v["session_epoch"])
    else:
        e.put("i", v["replica_id"])
        if version >= 2:
            e.put("b", v["isolation_level"])
    e.count(len(v["topics"]))
    for name, topic_id, partitions in v["topics"]:
        e.topic(by_id, name, topic_id)
        e.count(len(partitions))
        for p in partitions:
            encode_partition(api, version, e, p)
        e.tags()
    if api == FETCH:
        encode_fetch_tail(version, e, v)
    else:
        if api == LIST_OFFSETS and version >= 10:
            e.put("i", v["timeout_ms"])
        e.tags()
    return bytes(e.out)


def encode_partition(api: int, version: int, e: Encoder, p) -> None:
    known: list[tuple[int, bytes]] = []
    if api == PRODUCE:
        e.put("i", p[0])
        e.blob(p[1])
    elif api == LIST_OFFSETS:
        e.put("iiq", *p) if version >= 4 else e.put("iq", p[0], p[2])
    else:
        e.put("i", p["index"])
        if version >= 9:
            e.put("i", p["current_leader_epoch"])
        e.put("q", p["fetch_offset"])
        if version >= 12:
            e.put("i", p["last_fetched_epoch"])
        if version >= 5:
            e.put("q", p["log_start_offset"])
        e.put("i", p["max_bytes"])
        if version >= 17 and p["directory_id"] is not None:
            known.append((0, p["directory_id"].bytes))
        if version >= 18 and p["high_watermark"] != 2**63 - 1:
            known.append((1, struct.pack(">q", p["high_watermark"])))
    e.tags(known)


def encode_fetch_tail(version: int, e: Encoder, v: dict) -> None:
    if version >= 7:
        e.count(len(v["forgotten"]))
        for name, topic_id, partitions in v["forgotten"]:
            e.topic(version >= 13, name, topic_id)
            e.count(len(partitions))
            e.put("i" * len(partitions), *partitions)
            e.tags()
    if version >= 11:
        e.text(v["rack_id"])
    known = []
    if v["cluster_id"] is not None:
        cluster = Encoder(True)
        cluster.text(v["cluster_id"])
        known.append((0, bytes(cluster.out)))
    if version >= 15 and (v["replica_id"], v["replica_epoch"]) != (-1, -1):
        state = Encoder(True, e.unknown_tags)
        state.put("iq", v["replica_id"], v["replica_epoch"])
        state.tags()
        known.append((1, bytes(state.out)))
    e.tags(known)


# -- kio -------------------------------------------------------------------------------------------


def kio_class(api: int, version: int, kind: str, name: str):
    return getattr(importlib.import_module(f"kio.schema.{NAMES[api]}.v{version}.{kind}"), name)


def kio_bytes(entity) -> bytes:
    out = io.BytesIO()
    entity_writer(type(entity))(out, entity)
    return out.getvalue()


def milliseconds(value: int) -> i32Timedelta:
    return i32Timedelta.parse(datetime.timedelta(milliseconds=value))


def kio_topic(api: int, version: int, name: str, topic_id: uuid.UUID, field: str = "name") -> dict:
    return {"topic_id": topic_id if topic_id.int else None} if version >= IDS_FROM[api] else {field: name}


def kio_produce_request(version: int, v: dict):
    request, topic, partition = (
        kio_class(PRODUCE, version, "request", n)
        for n in ("ProduceRequest", "TopicProduceData", "PartitionProduceData")
    )
    return request(
        transactional_id=v["transactional_id"],
        acks=v["acks"],
        timeout=milliseconds(v["timeout_ms"]),
        topic_data=tuple(
            topic(
                partition_data=tuple(
                    partition(index=i, records=None if r is None else Records(r)) for i, r in partitions
                ),
                **kio_topic(PRODUCE, version, name, topic_id),
            )
            for name, topic_id, partitions in v["topics"]
        ),
    )


def kio_fetch_partition(version: int, p: dict):
    fields = {"partition": p["index"], "fetch_offset": p["fetch_offset"], "partition_max_bytes": p["max_bytes"]}
    since = {"current_leader_epoch": 9, "last_fetched_epoch": 12, "log_start_offset": 5, "high_watermark": 18}
    fields |= {name: p[name] for name, first in since.items() if version >= first}
    if version >= 17:
        fields["replica_directory_id"] = p["directory_id"]
    return kio_class(FETCH, version, "request", "FetchPartition")(**fields)


def kio_fetch_request(version: int, v: dict):
    request, topic = (kio_class(FETCH, version, "request", n) for n in ("FetchRequest", "FetchTopic"))
    fields = {
        "max_wait": milliseconds(v["max_wait_ms"]),
        "min_bytes": v["min_bytes"],
        "max_bytes": v["max_bytes"],
        "isolation_level": v["isolation_level"],
    }
    since = {"session_id": 7, "session_epoch": 7, "rack_id": 11, "cluster_id": 12}
    fields |= {name: v[name] for name, first in since.items() if version >= first}
    if version >= 15:
        fields["replica_state"] = kio_class(FETCH, version, "request", "ReplicaState")(
            replica_id=v["replica_id"], replica_epoch=v["replica_epoch"]
        )
    else:
        fields["replica_id"] = v["replica_id"]
    if version >= 7:
        forgotten = kio_class(FETCH, version, "request", "ForgottenTopic")
        fields["forgotten_topics_data"] = tuple(
            forgotten(partitions=tuple(partitions), **kio_topic(FETCH, version, name, topic_id, "topic"))
            for name, topic_id, partitions in v["forgotten"]
        )
    topics = (
        topic(
            partitions=tuple(kio_fetch_partition(version, p) for p in partitions),
            **kio_topic(FETCH, version, name, topic_id, "topic"),
        )
        for name, topic_id, partitions in v["topics"]
    )
    return request(topics=tuple(topics), **fields)


def kio_list_offsets_request(version: int, v: dict):
    request, topic, partition = (
        kio_class(LIST_OFFSETS, version, "request", n)
        for n in ("ListOffsetsRequest", "ListOffsetsTopic", "ListOffsetsPartition")
    )
    fields: dict = {"replica_id": v["replica_id"]}
    if version >= 2:
        fields["isolation_level"] = v["isolation_level"]
    if version >= 10:
        fields["timeout"] = milliseconds(v["timeout_ms"])

    def one(index: int, epoch: int, timestamp: int):
        return partition(
            partition_index=index, timestamp=timestamp, **({"current_leader_epoch": epoch} if version >= 4 else {})
        )

    return request(
        topics=tuple(
            topic(name=name, partitions=tuple(one(*p) for p in partitions)) for name, _, partitions in v["topics"]
        ),
        **fields,
    )


KIO_REQUEST = {PRODUCE: kio_produce_request, FETCH: kio_fetch_request, LIST_OFFSETS: kio_list_offsets_request}

# -- requests --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("api", "version"), EVERY_VERSION)
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
    """Fetch: the partition's tags 0 (v17+) and 1 (v18+), the request's tag 1 (v15+); before, their
    numbers mean nothing and any bytes may follow.
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
        # three bytes are no uuid, no int64, no replica state
        expected = expected_tokens(FETCH, version, values) if version < since else None
        assert dump.request(FETCH, version, body) == expected, (tag, holder)


@pytest.mark.parametrize(("api", "version"), EVERY_VERSION)
def test_every_cut_is_refused_and_so_is_a_byte_more(dump: Dump, api: int, version: int) -> None:
    @settings(TINY, max_examples=3)
    @given(REQUEST_VALUES[api])
    def check(values: dict) -> None:
        body = encode_request(api, version, values)
        for size in range(len(body)):
            assert dump.request(api, version, body[:size]) is None, size
        assert dump.request(api, version, body + b"\0") is None

    check()


@pytest.mark.parametrize("api", [PRODUCE, FETCH, LIST_OFFSETS])
def test_damaged_requests_never_crash(dump: Dump, api: int) -> None:
    """Whether they are refused is for the schema to say; that the process lives (under the
    sanitizers) is what this asks.
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
    accepted, message = dump.ask("request", api, version, "00" * 40)
    assert not accepted and "not advertised" in " ".join(message)


def test_a_huge_array_count_is_refused_by_what_remains(dump: Dump) -> None:
    accepted, message = dump.ask("request", LIST_OFFSETS, 1, struct.pack(">ii", -1, 2**31 - 1).hex())
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
        assert dump.ask("flexible", key, version) == (True, [str(int(flexible))]), (key, version)
        seen += 1
    assert seen > 250
    for key in (-1, 4, 5, 6, 7, 93, 1000, 32767, -32768):
        assert dump.ask("flexible", key, 5) == (True, ["0"])


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
    flexible = dump.ask("flexible", key, version)[1] == ["1"]
    e = Encoder(
        flexible, lambda: data.draw(st.lists(st.tuples(st.integers(0, 99), st.binary(max_size=200)), max_size=2))
    )
    e.put("hhi", key, version, correlation)
    e.put("h", -1 if client is None else len(client.encode()))
    e.out += (client or "").encode()
    e.tags()
    frame = bytes(e.out)
    assert dump.ask("header", (frame + body).hex()) == (
        True,
        ["1", str(key), str(version), str(correlation), hex_token(client), str(len(frame))],
    )
    for size in range(len(frame)):
        assert not dump.ask("header", frame[:size].hex())[0]


def test_an_unknown_api_gives_its_correlation_id(dump: Dump) -> None:
    assert dump.ask("header", struct.pack(">hhi", 1234, 7, 42).hex()) == (True, ["0", "1234", "7", "42", "-", "8"])


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


@pytest.mark.parametrize(("api", "version"), EVERY_VERSION)
def test_responses_are_what_kio_writes(dump: Dump, api: int, version: int) -> None:
    @TINY
    @given(RESPONSE_VALUES[api], i32)
    def check(values: dict, correlation: int) -> None:
        accepted, (frame,) = dump.ask("response", api, version, correlation, *response_tokens(api, version, values))
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
    _, (frame,) = dump.ask("response", PRODUCE, version, 9, *response_tokens(PRODUCE, version, values))
    expected = struct.pack(">iihc", 9, 1, 1, b"a") + struct.pack(">iihq", 1, 3, 43, -1)
    expected += (struct.pack(">q", -1) if version >= 2 else b"") + (struct.pack(">i", 5) if version >= 1 else b"")
    assert bytes.fromhex(frame) == struct.pack(">i", len(expected)) + expected
