"""Levels of the broker's loggers, with encoded requests and responses (BROKER_LOGGER, KIP-412)."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqd.base import logging
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import AlterConfigsRequest, DescribeConfigsRequest, IncrementalAlterConfigsRequest
from tests.unit.acceptor.handler_broker import HandlerBroker
from tests.unit.acceptor.test_handler_admin import run

LOGGER, RESOURCE = "mqd.acceptor.requests", 8
SET, DELETE, APPEND = 0, 1, 2


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    logging.setup("acceptor", stream=stream)
    yield stream
    logging.follow(None)


async def levels(broker: HandlerBroker, name: str = "1", keys: list[str] | None = None) -> dict[str, str] | int:
    """Levels by logger, or the error code."""
    requested = DescribeConfigsRequest.Resource(resource_type=RESOURCE, resource_name=name, configuration_keys=keys)
    result = (await broker.send_request(DescribeConfigsRequest(resources=[requested]), 4)).results[0]
    assert all((one.config_source, one.read_only, one.is_sensitive) == (6, False, False) for one in result.configs)
    return result.error_code or {one.name: one.value for one in result.configs}


async def alter(
    broker: HandlerBroker, *changes: tuple[str, int, str | None], name: str = "1", validate_only: bool = False
) -> int:
    requested = IncrementalAlterConfigsRequest
    configs = [requested.Config(name=one, config_operation=operation, value=value) for one, operation, value in changes]
    resource = requested.Resource(resource_type=RESOURCE, resource_name=name, configs=configs)
    response = await broker.send_request(requested(resources=[resource], validate_only=validate_only), 1)
    assert (response.responses[0].resource_type, response.responses[0].resource_name) == (RESOURCE, name)
    return response.responses[0].error_code


def test_one_logger_and_all_of_them(tmp_path: Path, written: io.StringIO) -> None:
    log = logging.get("acceptor.requests")

    async def scenario(broker: HandlerBroker) -> None:
        logging.follow(lambda: broker.control.log_level)
        broker.control.log_level = logging.SYSLOG_OF_LEVEL["info"]
        shown = await levels(broker)
        assert isinstance(shown, dict) and shown["root"] == shown[LOGGER] == "INFO"
        log.debug("unseen")
        assert await alter(broker, (LOGGER, SET, "TRACE"), validate_only=True) == 0
        assert await levels(broker, keys=[LOGGER]) == {LOGGER: "INFO"}
        assert await alter(broker, (LOGGER, SET, "DEBUG")) == 0
        assert await levels(broker, keys=[LOGGER, "root"]) == {"root": "INFO", LOGGER: "DEBUG"}
        log.debug("seen")
        assert await alter(broker, ("root", SET, "WARN")) == 0
        assert broker.control.log_level == logging.SYSLOG_OF_LEVEL["warning"], "of every process of the broker"
        log.debug("still seen")
        assert await alter(broker, (LOGGER, DELETE, None)) == 0
        assert await levels(broker, keys=[LOGGER]) == {LOGGER: "WARN"}
        log.info("unseen too")
        assert await alter(broker, ("root", SET, "INFO")) == 0

    run(scenario, tmp_path)
    assert "unseen" not in written.getvalue() and written.getvalue().count("seen") == 2


def test_what_is_refused_changes_nothing(tmp_path: Path, written: io.StringIO) -> None:
    async def scenario(broker: HandlerBroker) -> None:
        before = await levels(broker)
        assert await levels(broker, "2") == await levels(broker, "") == ErrorCode.INVALID_REQUEST
        assert await alter(broker, (LOGGER, SET, "DEBUG"), name="2") == ErrorCode.INVALID_REQUEST
        assert await alter(broker, (LOGGER, SET, "DEBUG"), ("mqd.none", SET, "INFO")) == ErrorCode.INVALID_CONFIG
        assert await alter(broker, (LOGGER, SET, "LOUD")) == ErrorCode.INVALID_CONFIG
        null = (LOGGER, SET, None)  # refused before names of unknown loggers
        assert await alter(broker, ("mqd.none", SET, "INFO"), null) == ErrorCode.INVALID_REQUEST
        assert await alter(broker, (LOGGER, APPEND, "DEBUG")) == ErrorCode.INVALID_REQUEST
        assert await alter(broker, ("root", DELETE, None)) == ErrorCode.INVALID_REQUEST
        whole = AlterConfigsRequest.Resource(
            resource_type=RESOURCE, resource_name="1", configs=[AlterConfigsRequest.Config(name=LOGGER, value="DEBUG")]
        )
        response = await broker.send_request(AlterConfigsRequest(resources=[whole]), 2)
        assert response.responses[0].error_code == ErrorCode.INVALID_REQUEST, "as in Kafka: only single levels"
        assert await levels(broker) == before

    run(scenario, tmp_path)
