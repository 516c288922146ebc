"""Requests as plain values, two encoders for them (ours and kio's), and the native side."""

import datetime
import importlib
import io
import shutil
import struct
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from kio.serial import entity_writer
from kio.static.primitive import Records, i32Timedelta

from tests.tiers import examples

NATIVE = Path(__file__).resolve().parents[2] / "native"
PRODUCE, FETCH, LIST_OFFSETS = 0, 1, 2
NAMES = {PRODUCE: "produce", FETCH: "fetch", LIST_OFFSETS: "list_offsets"}
FLEXIBLE_FROM = {PRODUCE: 9, FETCH: 12, LIST_OFFSETS: 6}
IDS_FROM = {PRODUCE: 13, FETCH: 13, LIST_OFFSETS: 99}
VERSIONS = {PRODUCE: range(3, 14), FETCH: range(4, 19), LIST_OFFSETS: range(1, 12)}
EVERY_VERSION = [(api, version) for api, versions in VERSIONS.items() for version in versions]
TINY = settings(max_examples=examples(10, 25), deadline=None, suppress_health_check=list(HealthCheck))


class Dump:
    """The native side: one line in, one line out."""

    def __init__(self, program: Path) -> None:
        self.process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def send_request(self, *words: object) -> tuple[bool, list[str]]:
        """(accepted, tokens). If the process ends (a sanitizer's finding) the test fails."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        response = self.process.stdout.readline().split()
        assert response, f"wire_dump died (exit code {self.process.wait()}) on: {words}"
        return response[0] == "ok", response[1:]

    def request(self, api: int, version: int, body: bytes) -> list[str] | None:
        accepted, tokens = self.send_request("request", api, version, body.hex())
        return tokens if accepted else None


@pytest.fixture(scope="session")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dump]:
    compiler = shutil.which("gcc") or shutil.which("cc")
    assert compiler, "no C compiler: install gcc"
    program = tmp_path_factory.mktemp("wire") / "wire_dump"
    sources = [
        NATIVE / "tests/wire/wire_dump.c",
        NATIVE / "base/error.c",
        *(
            NATIVE / "wire" / f"{name}.c"
            for name in ("buffer", "fetch", "list_offsets", "nodes", "produce", "share", "wire")
        ),
    ]
    flags = [
        "-std=gnu11",
        "-D_GNU_SOURCE",
        "-O1",
        "-g1",
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
    """A second implementation of the schema, with support for unknown tagged fields."""

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
