"""Levels of this broker's loggers (resource type BROKER_LOGGER, KIP-412). Changes last until its
processes restart.

`root` is the level of all processes of the broker (mqd log-level sets it too). The others are the
acceptor's own loggers: an explicit level overrides root in this process, and deleting it restores
root's level. Kafka's FATAL is ERROR here, and its TRACE is DEBUG.
"""

import logging as standard_logging

from mqd.acceptor.broker import Broker
from mqd.acceptor.handlers.configs.config_entries import ConfigEntry
from mqd.base.logging import LEVELS, SYSLOG_OF_LEVEL, level_name
from mqd.cluster.host.messages import ConfigOperation
from mqd.cluster.metadata.refusal import Refusal
from mqd.protocol.errors import ErrorCode

RESOURCE_BROKER_LOGGER = 8
DYNAMIC_BROKER_LOGGER, UNKNOWN_TYPE = 6, 0
ROOT, PREFIX = "root", "mqd."
FROM_KAFKA = {"FATAL": "error", "ERROR": "error", "WARN": "warning", "INFO": "info", "DEBUG": "debug", "TRACE": "debug"}
TO_KAFKA = {"error": "ERROR", "warning": "WARN", "info": "INFO", "debug": "DEBUG"}
_NAMES = {number: name for name, number in LEVELS.items()}


def check_name(broker: Broker, name: str) -> None:
    """Raises Refusal."""
    if name != str(broker.node_id):
        raise Refusal(
            ErrorCode.INVALID_REQUEST,
            f"Unexpected broker id, expected {broker.node_id} but received {name or repr(name)}",
        )


def describe(broker: Broker, name: str, names: set[str] | None) -> list[ConfigEntry]:
    """Raises Refusal."""
    check_name(broker, name)
    return [
        ConfigEntry(logger, level, DYNAMIC_BROKER_LOGGER, False, False, UNKNOWN_TYPE, "", [])
        for logger, level in _levels(broker).items()
        if names is None or logger in names
    ]


def alter(broker: Broker, name: str, operations: list[ConfigOperation], validate_only: bool) -> None:
    """All or nothing. Raises Refusal."""
    check_name(broker, name)
    if nulls := [
        operation.name for operation in operations if operation.value is None and operation.operation != "delete"
    ]:
        raise Refusal(ErrorCode.INVALID_REQUEST, f"Null value not supported for: {', '.join(nulls)}")
    levels = _levels(broker)
    for operation in operations:
        _check(operation, levels)
    for operation in () if validate_only else operations:
        _set(broker, operation)


def _levels(broker: Broker) -> dict[str, str]:
    root_level = level_name(broker.table.log_level)
    kafka_levels = {ROOT: TO_KAFKA[root_level]}
    for name, logger in sorted(standard_logging.root.manager.loggerDict.items()):
        if name.startswith(PREFIX) and isinstance(logger, standard_logging.Logger):
            kafka_levels[name] = TO_KAFKA[_NAMES.get(logger.level, root_level)]
    return kafka_levels


def _check(operation: ConfigOperation, levels: dict[str, str]) -> None:
    name, verb = operation.name, operation.operation
    if verb not in ("set", "delete"):
        raise Refusal(
            ErrorCode.INVALID_REQUEST, f"{verb.upper()} operation is not allowed for the BROKER_LOGGER resource"
        )
    if name not in levels:
        raise Refusal(ErrorCode.INVALID_CONFIG, f"Logger {name} does not exist!")
    if verb == "delete" and name == ROOT:
        raise Refusal(
            ErrorCode.INVALID_REQUEST, f"Removing the log level of the {ROOT} logger is not allowed; set another one"
        )
    if verb == "set" and operation.value not in FROM_KAFKA:
        raise Refusal(
            ErrorCode.INVALID_CONFIG,
            f"Cannot set the log level of {name} to {operation.value} as it is not a supported log level. Valid log"
            f" levels are {', '.join(sorted(FROM_KAFKA))}",
        )


def _set(broker: Broker, operation: ConfigOperation) -> None:
    level = FROM_KAFKA[operation.value] if operation.operation == "set" and operation.value else None
    if operation.name != ROOT:
        standard_logging.getLogger(operation.name).setLevel(LEVELS[level] if level else standard_logging.NOTSET)
    elif level:
        broker.table.log_level = SYSLOG_OF_LEVEL[level]
