"""The wording of the slow-request log."""

from __future__ import annotations

import msgspec

from mqd import native
from mqd.base import logging
from mqd.worker import slow_requests
from mqd.worker.slow_requests import FIELD_NAMES, fields


def slow(api_key: int = 0, unreported_count: int = 0, **spent_ms: float) -> native.SlowRequest:
    spent = tuple(round(spent_ms.get(part.name.lower(), 0) * 1000) for part in native.Spent)
    whole = sum(spent) - spent[native.Spent.THROTTLE]
    return native.SlowRequest(api_key, 9, "billing-1", "User:alice", whole, spent, unreported_count)


def test_the_parts_that_took_time() -> None:
    assert fields(slow(queue=0.2, disk=1500, replicas=250, throttle=40)) == {
        "api": "Produce",
        "version": 9,
        "client": "billing-1",
        "ms": 1750,
        "disk_ms": 1500,
        "replicas_ms": 250,
        "throttle_ms": 40,
        "principal": "User:alice",
    }


def test_every_part_has_a_word_and_an_api_need_not_be_known() -> None:
    assert set(FIELD_NAMES) == set(native.Spent)
    found = fields(msgspec.structs.replace(slow(api_key=9999, unreported_count=7), principal=""))
    assert found["api"] == "9999" and found["left_out"] == 7 and not found.keys() & {"principal", "suppressed"}


def test_a_rebalance_is_not_slow(monkeypatch) -> None:
    lines = []
    monkeypatch.setattr(logging.Logger, "warning", lambda _, message, **fields: lines.append(fields["api"]))
    event = native.Event(native.EventKind.SLOW, native.SLOT_NONE, 0, 0, 0, 0, 1, 0, None, "")
    for api_key in (11, 14, 3):
        found = msgspec.structs.replace(event, slow=slow(api_key=api_key, acceptor=5000))
        slow_requests.log_slow_request(logging.get("worker"), found, None)  # type: ignore[arg-type]
    assert lines == ["Metadata"]
