"""The slow-request log (slow.request.ms): the reactor's measurements as log lines."""

from __future__ import annotations

from typing import Any

from mqd import native
from mqd.base import logging
from mqd.protocol.headers import KNOWN, MEMBER_WAIT_APIS
from mqd.worker.catalog import Catalog

FIELD_NAMES = {
    native.Spent.QUEUE: "queued",
    native.Spent.WAIT: "waited_for_records",
    native.Spent.DISK: "disk",
    native.Spent.OWNER: "other_worker",
    native.Spent.REPLICAS: "replicas",
    native.Spent.ACCEPTOR: "acceptor",
    native.Spent.TURN: "earlier_responses",
    native.Spent.THROTTLE: "throttle",
}


def fields(slow: native.SlowRequest) -> dict[str, Any]:
    """The fields of the line. Times in ms; parts that took no time are left out."""
    api = KNOWN.get(slow.api_key)
    values: dict[str, Any] = {
        "api": api.name if api is not None else str(slow.api_key),
        "version": slow.version,
        "client": slow.client_id,
        "ms": round(slow.total_us / 1000),
    }
    for part, name in FIELD_NAMES.items():
        if (milliseconds := round(slow.spent_us[part] / 1000)) > 0:
            values[f"{name}_ms"] = milliseconds
    if slow.principal:
        values["principal"] = slow.principal
    if slow.unreported_count:
        values["left_out"] = slow.unreported_count  # not "suppressed": mqd.base.logging sets that field
    return values


def log_slow_request(log: logging.Logger, event: native.Event, catalog: Catalog) -> None:
    """Handles MQD_EVENT_SLOW."""
    if event.slow is None or event.slow.api_key in MEMBER_WAIT_APIS:
        return
    partition = {"partition": catalog.partition_name(event.slot)} if event.slot != native.SLOT_NONE else {}
    log.warning("a slow request", connection=event.connection, **partition, **fields(event.slow))
