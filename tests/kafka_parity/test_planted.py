"""Proof that the comparison finds differences: it compares mqd with another mqd whose responses have one
planted difference each, and must find every one; without any it must find none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from mqd.protocol import codec, decode_response
from mqd.protocol.headers import encode_response_header
from tests.broker import Broker
from tests.kafka_parity.allowed import ALLOWED
from tests.kafka_parity.brokers import SETTINGS
from tests.kafka_parity.compare import Table
from tests.kafka_parity.runner import Comparison
from tests.kafka_parity.sides import Side
from tests.kafka_parity.stories import KEYS

pytestmark = pytest.mark.slow
SEED, CASES = 1, 40


def _each(body: object, *path: str) -> Iterator[object]:
    """Every element at the end of a path of lists."""
    items = [body]
    for name in path:
        items = [inner for item in items for inner in getattr(item, name) or []]
    return iter(items)


def _set(name: str, change: Callable[[object], object], *path: str) -> Callable[[object], None]:
    def plant(body: object) -> None:
        for item in _each(body, *path):
            setattr(item, name, change(getattr(item, name)))

    return plant


class Planted(NamedTuple):
    api: str
    version: int
    field: str  # where the comparison must find it
    plant: Callable[[object], None] | None  # None: the frame is truncated


def _one_less(items: list) -> list:
    return items[:-1]


def _more(value: int) -> int:
    return value + 1


PARTITIONS = ("responses", "partition_responses")
PLANTED = (
    Planted("Produce", 9, "responses[].partition_responses[].error_code", _set("error_code", lambda code: 3 if code == 0 else code, *PARTITIONS)),
    Planted("Produce", 11, "responses[].partition_responses[].base_offset", _set("base_offset", _more, *PARTITIONS)),
    Planted("Produce", 5, "responses[].partition_responses[].log_start_offset", _set("log_start_offset", lambda _: -1, *PARTITIONS)),
    Planted("Fetch", 12, "responses[].partitions[].high_watermark", _set("high_watermark", _more, "responses", "partitions")),
    Planted("Fetch", 16, "responses[].partitions[].records", _set("records", lambda _: b"", "responses", "partitions")),
    Planted("Fetch", 4, "responses[].partitions[] only Kafka", _set("partitions", _one_less, "responses")),
    Planted("ListOffsets", 6, "topics[].partitions[].offset", _set("offset", _more, "topics", "partitions")),
    Planted("ListOffsets", 4, "topics[].partitions[].leader_epoch", _set("leader_epoch", lambda _: -1, "topics", "partitions")),
    Planted("Metadata", 9, "topics[].partitions[].isr_nodes", _set("isr_nodes", lambda _: [], "topics", "partitions")),
    Planted("Metadata", 1, "controller_id", lambda body: setattr(body, "controller_id", -1)),
    Planted("OffsetFetch", 8, "groups[].topics[].partitions[].metadata", _set("metadata", lambda _: "", "groups", "topics", "partitions")),
    Planted("FindCoordinator", 2, "node_id", lambda body: setattr(body, "node_id", 0)),
    Planted("JoinGroup", 5, "protocol_name", lambda body: setattr(body, "protocol_name", "")),
    Planted("JoinGroup", 2, "members[] only Kafka", lambda body: setattr(body, "members", [])),
    Planted("Heartbeat", 4, "error_code", lambda body: setattr(body, "error_code", 27 if body.error_code == 0 else body.error_code)),
    Planted("ConsumerGroupHeartbeat", 1, "member_epoch", lambda body: setattr(body, "member_epoch", body.member_epoch + 1)),
    Planted("LeaveGroup", 3, "members[] order", lambda body: setattr(body, "members", body.members[::-1])),
    Planted("CreateTopics", 7, "topics[].num_partitions", _set("num_partitions", lambda _: -1, "topics")),
    Planted("DescribeConfigs", 4, "results[].configs[] only Kafka", _set("configs", _one_less, "results")),
    Planted("DescribeConfigs", 1, "results[].configs[].read_only", _set("read_only", lambda value: not value, "results", "configs")),
    # not its epoch, which may differ (allowed.py)
    Planted("InitProducerId", 4, "error_code", lambda body: setattr(body, "error_code", 53 if body.error_code == 0 else body.error_code)),
    Planted("EndTxn", 3, "error_code", lambda body: setattr(body, "error_code", 0)),
    Planted("ListGroups", 5, "groups[].group_type", _set("group_type", str.upper, "groups")),
    Planted("DescribeCluster", 0, "outcome", None),
)  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Broker, Broker]]:
    directory = tmp_path_factory.mktemp("planted")
    with (
        Broker(directory / "one", workers=1, config=SETTINGS) as one,
        Broker(directory / "other", workers=1, config=SETTINGS) as other,
    ):
        for broker in (one, other):
            side = Side("mqd", broker.port)
            comparison = Comparison(side, side, Table(ALLOWED))
            comparison.sides, comparison.shared = (side,), comparison.shared[:1]
            comparison.prepare()
            side.close()
        yield one, other


def _compared(pair: tuple[Broker, Broker], planted: Planted, tag: str, plants: bool) -> tuple[Comparison, Side]:
    key = KEYS[planted.api]

    def tamper(api_key: int, version: int, frame: bytes) -> bytes:
        if (api_key, version) != (key, planted.version):
            return frame
        if planted.plant is None:
            return frame[:-1]
        correlation_id, body = decode_response(frame, api_key, version)
        planted.plant(body)
        return encode_response_header(api_key, version, correlation_id) + codec.encode(body, version)

    one, other = (Side("mqd", broker.port) for broker in pair)
    if plants:
        other = Side("planted", pair[1].port, tamper)
    comparison = Comparison(one, other, Table(ALLOWED))
    comparison.tag = tag
    comparison.know_library()
    comparison.run(key, planted.version, SEED, CASES)
    one.close()
    other.close()
    return comparison, other


@pytest.mark.parametrize("number", range(len(PLANTED)), ids=[f"{one.api}-{one.version}-{one.field}" for one in PLANTED])
def test_a_planted_difference_is_found(pair: tuple[Broker, Broker], number: int) -> None:
    planted = PLANTED[number]
    comparison, other = _compared(pair, planted, f"p{number}.", plants=True)
    assert other.tampered, "the plant changed no answer"
    fields = {difference.field for difference in comparison.report.found if difference.api == planted.api}
    assert planted.field in fields, sorted(fields)


@pytest.mark.parametrize("api", ["Produce", "Fetch", "Metadata", "JoinGroup", "EndTxn", "DescribeConfigs"])
def test_nothing_is_found_without_a_planted_difference(pair: tuple[Broker, Broker], api: str) -> None:
    planted = next(one for one in PLANTED if one.api == api)
    comparison, _ = _compared(pair, planted, f"n{api}.", plants=False)
    assert not comparison.report.found, list(comparison.report.lines())
