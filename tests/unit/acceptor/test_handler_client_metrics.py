"""Subscriptions to client metrics (KIP-714): stored, described and validated as in Kafka."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mqd.cluster.metadata import features
from mqd.cluster.metadata.records import ClientMetricsConfigured, decode_record, encode_record
from mqd.cluster.metadata.rules import client_metrics
from mqd.cluster.metadata.state import MetadataState
from mqd.protocol.errors import ErrorCode as E
from mqd.protocol.messages import DescribeConfigsRequest, IncrementalAlterConfigsRequest, ListConfigResourcesRequest
from tests.unit.acceptor.handler_broker import HandlerBroker

KIND = 16


def run(tmp_path: Path, scenario) -> None:
    async def body() -> None:
        async with HandlerBroker(tmp_path) as broker:
            await scenario(broker)

    asyncio.run(body())


async def alter(broker: HandlerBroker, name: str, operation: int = 0, **values: str | None) -> int:
    configs = [
        IncrementalAlterConfigsRequest.Config(name=key.replace("_", "."), config_operation=operation, value=value)
        for key, value in values.items()
    ]
    resource = IncrementalAlterConfigsRequest.Resource(resource_type=KIND, resource_name=name, configs=configs)
    response = await broker.send_request(IncrementalAlterConfigsRequest(resources=[resource]), 1)
    return response.responses[0].error_code


async def listed(broker: HandlerBroker, version: int = 0) -> list[str]:
    response = await broker.send_request(ListConfigResourcesRequest(resource_types=[KIND]), version)
    return [one.resource_name for one in response.config_resources]


async def described(broker: HandlerBroker, name: str) -> dict[str, tuple[str | None, int]]:
    requested = DescribeConfigsRequest.Resource(resource_type=KIND, resource_name=name, configuration_keys=None)
    (result,) = (await broker.send_request(DescribeConfigsRequest(resources=[requested]), 4)).results
    assert result.error_code == 0, result
    return {one.name: (one.value, one.config_source) for one in result.configs}


def test_a_subscription_is_created_described_and_deleted(tmp_path: Path) -> None:
    async def scenario(broker: HandlerBroker) -> None:
        assert await listed(broker) == []
        assert await alter(broker, "s1", metrics="org.apache.kafka.producer.", interval_ms="1000") == 0
        assert await alter(broker, "s2", match="client_id=app.*,client_software_name=librdkafka") == 0
        assert await listed(broker) == await listed(broker, 1) == ["s1", "s2"]
        assert await described(broker, "s1") == {
            "metrics": ("org.apache.kafka.producer.", 7),
            "interval.ms": ("1000", 7),
            "match": ("", 5),
        }
        assert await alter(broker, "s1", operation=2, metrics="org.apache.kafka.consumer.") == E.INVALID_CONFIG
        assert await alter(broker, "s1", operation=1, metrics=None, interval_ms=None) == 0
        assert await listed(broker) == ["s2"]
        assert (await described(broker, "s1"))["interval.ms"] == ("300000", 5)

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("name", "values", "error"),
    [
        ("", {"metrics": "*"}, E.INVALID_REQUEST),
        ("s", {"interval_ms": "99"}, E.INVALID_REQUEST),
        ("s", {"interval_ms": "3600001"}, E.INVALID_REQUEST),
        ("s", {"interval_ms": "soon"}, E.INVALID_CONFIG),
        ("s", {"interval_ms": "9" * 5000}, E.INVALID_CONFIG),
        ("s", {"match": "client_id"}, E.INVALID_CONFIG),
        ("s", {"match": "client=a"}, E.INVALID_CONFIG),
        ("s", {"match": "client_id=("}, E.INVALID_CONFIG),
        ("s", {"matches": "client_id=a"}, E.INVALID_REQUEST),
    ],
)
def test_invalid_subscriptions_are_refused_as_by_kafka(
    tmp_path: Path, name: str, values: dict[str, str], error: E
) -> None:
    async def scenario(broker: HandlerBroker) -> None:
        assert await alter(broker, name, **values) == error
        assert await listed(broker) == []

    run(tmp_path, scenario)


def test_subscriptions_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_metrics, "SUBSCRIPTIONS_MAX", 1)

    async def scenario(broker: HandlerBroker) -> None:
        assert await alter(broker, "s1", metrics="*") == 0
        assert await alter(broker, "s2", metrics="*") == E.POLICY_VIOLATION
        assert await alter(broker, "s1", interval_ms="500") == 0

    run(tmp_path, scenario)


def test_a_subscription_is_replaced_removed_and_in_snapshots() -> None:
    state = MetadataState()
    changes = [ClientMetricsConfigured("s", config) for config in ({"metrics": "*"}, {"interval.ms": "500"}, {})]
    for record in changes:
        expected = {"s": record.config} if record.config else {}
        state.apply(decode_record(encode_record(record)))
        assert state.client_metrics == expected
        assert MetadataState.from_snapshot(state.snapshot()).client_metrics == expected


def test_its_record_requires_its_feature_level() -> None:
    assert features.RECORD_LEVELS[ClientMetricsConfigured] == 2
