"""Subscriptions to metrics of clients (KIP-714), beside Apache Kafka: what may be set, and what is
then shown.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mqd.protocol import messages as m
from perf.peers.peer import Unavailable
from tests.judge.brokers import both
from tests.judge.compare import Table
from tests.judge.model import Step, World
from tests.judge.sides import Side

KIND, DESCRIBE, ALTER, INCREMENTAL, LIST = 16, 32, 33, 44, 74
SET, DELETE, APPEND, SUBTRACT = range(4)
# name of the subscription, operation, configurations
CHANGES: list[tuple[str, int, dict[str, str | None]]] = [
    ("a", SET, {"metrics": "org.apache.kafka.producer.", "interval.ms": "1000"}),
    ("a", APPEND, {"metrics": "org.apache.kafka.consumer."}),
    ("a", SUBTRACT, {"metrics": "org.apache.kafka.producer."}),
    ("a", APPEND, {"interval.ms": "1"}),
    ("a", DELETE, {"metrics": None}),
    ("a", SET, {"metrics": None}),
    ("b", SET, {"match": "client_id=app.*, client_software_name=librdkafka"}),
    ("b", SET, {"match": "client_id=a=b"}),
    ("b", SET, {"match": "client_id="}),
    ("b", SET, {"match": "client_id"}),
    ("b", SET, {"match": "client=a"}),
    ("b", SET, {"match": "client_id=("}),
    ("b", SET, {"match": " client_source_port = 1.* "}),
    ("b", SET, {"match": "a=b", "interval.ms": "1"}),
    ("c", SET, {"interval.ms": "99"}),
    ("c", SET, {"interval.ms": "100"}),
    ("c", SET, {"interval.ms": "3600000"}),
    ("c", SET, {"interval.ms": "3600001"}),
    ("c", SET, {"interval.ms": "soon"}),
    ("c", SET, {"interval.ms": "2147483648"}),
    ("c", SET, {"interval.ms": "-5"}),
    ("c", SET, {"interval.ms": ""}),
    ("c", SET, {"unknown": "1"}),
    ("c", SET, {"unknown": "1", "interval.ms": "1"}),
    ("c", DELETE, {"unknown": None}),
    ("d", SET, {"metrics": ""}),
    ("d", SET, {"metrics": "*"}),
    ("", SET, {"metrics": "*"}),
    ("a", DELETE, {"interval.ms": None}),
]


def _alter(side: Side, name: str, operation: int, values: dict[str, str | None]) -> int:
    request = m.IncrementalAlterConfigsRequest
    configs = [request.Config(key, operation, value) for key, value in values.items()]
    step = Step(INCREMENTAL, 1, request([request.Resource(KIND, name, configs)]))
    return side.call(step, World("")).body.responses[0].error_code


def _replace(side: Side, name: str, values: dict[str, str | None]) -> int:
    request = m.AlterConfigsRequest
    configs = [request.Config(key, value) for key, value in values.items()]
    return (
        side.call(Step(ALTER, 2, request([request.Resource(KIND, name, configs)])), World(""))
        .body.responses[0]
        .error_code
    )


def _shown(side: Side) -> tuple[object, ...]:
    listed = side.call(Step(LIST, 1, m.ListConfigResourcesRequest([KIND])), World("")).body
    asked = [m.DescribeConfigsRequest.Resource(KIND, name, None) for name in "abcd"]
    found = side.call(Step(DESCRIBE, 4, m.DescribeConfigsRequest(asked, include_synonyms=True)), World("")).body
    return (
        sorted(one.resource_name for one in listed.config_resources),
        [
            sorted(
                (
                    one.name,
                    one.value,
                    one.read_only,
                    one.config_source,
                    one.config_type,
                    [(synonym.name, synonym.value, synonym.source) for synonym in one.synonyms],
                )
                for one in result.configs
            )
            for result in found.results
        ],
    )


@pytest.mark.slow
def test_subscriptions_are_set_and_shown_alike(tmp_path: Path) -> None:
    try:
        with both(tmp_path, Table([])) as judge:
            differences = []
            for number, (name, operation, values) in enumerate(CHANGES):
                for change in (
                    lambda side: _alter(side, name, operation, values),
                    lambda side: _replace(side, name, values),
                ):
                    kafka, mqd = change(judge.sides[0]), change(judge.sides[1])
                    if kafka != mqd:
                        differences.append(f"{number} {name} {operation} {values}: Kafka {kafka}, mqd {mqd}")
                    if (kafka := _shown(judge.sides[0])) != (mqd := _shown(judge.sides[1])):
                        differences.append(f"{number} {name} {values}: Kafka shows\n{kafka}\nmqd\n{mqd}")
    except Unavailable as reason:
        pytest.skip(f"Apache Kafka cannot be had: {reason}")
    assert not differences, "\n".join(differences)
