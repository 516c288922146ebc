"""ShareFetch and ShareAcknowledge in C compared with mqd's Python codec, which other tests compare
with kio: the same requests are understood, the same responses are written.
"""

from __future__ import annotations

import random
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqd.protocol.codec import encode
from mqd.protocol.messages.share_groups import (
    ShareAcknowledgeRequest,
    ShareAcknowledgeResponse,
    ShareFetchRequest,
    ShareFetchResponse,
)
from tests.property.wire_oracle import TINY, Dump, hex_token, i8, i16, i32, i64
from tests.tiers import quick

FETCH, ACKNOWLEDGE = 78, 79
REQUEST: dict[int, Any] = {FETCH: ShareFetchRequest, ACKNOWLEDGE: ShareAcknowledgeRequest}
RESPONSE: dict[int, Any] = {FETCH: ShareFetchResponse, ACKNOWLEDGE: ShareAcknowledgeResponse}
VERSIONS = quick([(api, version) for api in (FETCH, ACKNOWLEDGE) for version in (1, 2)], lambda pair: pair[1] == 2)
texts = st.none() | st.text("aé0-", max_size=9)
ids = st.binary(min_size=16, max_size=16)


@st.composite
def requests(draw: st.DrawFn, api: int, version: int) -> Any:
    cls = REQUEST[api]
    batches = st.builds(cls.AcknowledgementBatch, i64, i64, st.lists(i8, max_size=4))
    partitions = st.builds(cls.Partition, partition_index=i32, acknowledgement_batches=st.lists(batches, max_size=3))
    topics = st.lists(st.builds(cls.Topic, ids, st.lists(partitions, max_size=3)), max_size=3)
    fields: dict[str, Any] = {"group_id": texts, "member_id": texts, "share_session_epoch": i32, "topics": topics}
    if version >= 2:
        fields["is_renew_ack"] = st.booleans()
    if api == FETCH:
        fields |= dict.fromkeys(("max_wait_ms", "min_bytes", "max_bytes", "max_records", "batch_size"), i32)
        fields["forgotten_topics_data"] = st.lists(
            st.builds(cls.ForgottenTopic, ids, st.lists(i32, max_size=3)), max_size=2
        )
        if version >= 2:
            fields["share_acquire_mode"] = i8
    return draw(st.builds(cls, **fields))


def request_tokens(api: int, message: Any) -> list[str]:
    fetch = message if api == FETCH else ShareFetchRequest(max_bytes=0)
    out: list[Any] = [hex_token(message.group_id), hex_token(message.member_id), message.share_session_epoch]
    out += [fetch.max_wait_ms, fetch.min_bytes, fetch.max_bytes, fetch.max_records, fetch.batch_size]
    out += [fetch.share_acquire_mode, int(message.is_renew_ack), len(message.topics)]
    for topic in message.topics:
        out += [hex_token(topic.topic_id), len(topic.partitions)]
        for partition in topic.partitions:
            out += [partition.partition_index, len(partition.acknowledgement_batches)]
            for batch in partition.acknowledgement_batches:
                types = bytes(kind & 0xFF for kind in batch.acknowledge_types)
                out += [batch.first_offset, batch.last_offset, hex_token(types)]
    out.append(len(fetch.forgotten_topics_data))
    for topic in fetch.forgotten_topics_data:
        out += [hex_token(topic.topic_id), len(topic.partitions), *topic.partitions]
    return [str(token) for token in out]


@pytest.mark.parametrize(("api", "version"), VERSIONS)
def test_requests_are_understood(dump: Dump, api: int, version: int) -> None:
    @TINY
    @given(requests(api, version))
    def check(message: Any) -> None:
        body = encode(message, version)
        assert dump.request(api, version, body) == request_tokens(api, message)

    check()


@pytest.mark.parametrize(("api", "version"), VERSIONS)
def test_every_truncation_is_refused(dump: Dump, api: int, version: int) -> None:
    @settings(TINY, max_examples=2)
    @given(requests(api, version))
    def check(message: Any) -> None:
        body = encode(message, version)
        for size in range(len(body)):
            assert dump.request(api, version, body[:size]) is None, size

    check()


@pytest.mark.parametrize(("api", "version"), VERSIONS)
def test_damaged_requests_never_crash(dump: Dump, api: int, version: int) -> None:
    @settings(TINY, max_examples=40)
    @given(requests(api, version), st.integers(0, 2**32))
    def check(message: Any, seed: int) -> None:
        rng, body = random.Random(seed), bytearray(encode(message, version))
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(body))
            body[at : at + rng.randint(0, 4)] = rng.choice([b"\xff" * 4, b"\x80" * 4, b"\0", rng.randbytes(3)])
        dump.request(api, version, bytes(body))

    check()


@pytest.mark.parametrize("api", [FETCH, ACKNOWLEDGE])
def test_other_versions_are_refused(dump: Dump, api: int) -> None:
    for version in (-1, 0, 3):
        accepted, message = dump.send_request("request", api, version, "00" * 40)
        assert not accepted and "not advertised" in " ".join(message)


@st.composite
def responses(draw: st.DrawFn, api: int, version: int) -> Any:
    cls = RESPONSE[api]
    leader = st.builds(cls.LeaderIdAndEpoch, i32, i32)
    fields: dict[str, Any] = {"partition_index": i32, "error_code": i16, "error_message": texts}
    fields["current_leader"] = leader
    if api == FETCH:
        runs = st.lists(st.builds(cls.AcquiredRecords, i64, i64, i16), max_size=3)
        fields |= {"acknowledge_error_code": i16, "acknowledge_error_message": texts}
        fields |= {"records": st.binary(max_size=200), "acquired_records": runs}
    partitions = st.lists(st.builds(cls.Partition, **fields), max_size=3)
    topics = st.lists(st.builds(cls.Topic, ids, partitions), max_size=3)
    nodes = st.lists(st.builds(cls.NodeEndpoint, i32, st.text("ab.", max_size=9), i32, texts), max_size=3)
    whole = {"throttle_time_ms": i32, "error_code": i16, "error_message": texts}
    if api == FETCH or version >= 2:
        whole["acquisition_lock_timeout_ms"] = i32
    return draw(st.builds(cls, **whole, responses=topics, node_endpoints=nodes))


def response_tokens(api: int, message: Any) -> list[Any]:
    out = [message.throttle_time_ms, message.error_code, hex_token(message.error_message)]
    out += [message.acquisition_lock_timeout_ms, len(message.responses)]
    for topic in message.responses:
        out += [hex_token(topic.topic_id), len(topic.partitions)]
        for partition in topic.partitions:
            fetched = partition if api == FETCH else ShareFetchResponse.Partition(records=b"")
            leader = partition.current_leader
            out += [partition.partition_index, partition.error_code, hex_token(partition.error_message)]
            out += [fetched.acknowledge_error_code, hex_token(fetched.acknowledge_error_message)]
            out += [leader.leader_id, leader.leader_epoch, hex_token(fetched.records), len(fetched.acquired_records)]
            for run in fetched.acquired_records:
                out += [run.first_offset, run.last_offset, run.delivery_count]
    out.append(len(message.node_endpoints))
    for node in message.node_endpoints:
        out += [node.node_id, hex_token(node.host), node.port, hex_token(node.rack)]
    return out


@pytest.mark.parametrize(("api", "version"), VERSIONS)
def test_responses_equal_pythons(dump: Dump, api: int, version: int) -> None:
    @TINY
    @given(responses(api, version), i32)
    def check(message: Any, correlation: int) -> None:
        accepted, (frame,) = dump.send_request("response", api, version, correlation, *response_tokens(api, message))
        body = b"\0" + encode(message, version)
        assert accepted and bytes.fromhex(frame) == struct.pack(">ii", 4 + len(body), correlation) + body

    check()
