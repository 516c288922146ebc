"""Opening and stopping a share consumer's runner on shared memory."""

from __future__ import annotations

import pytest

from mqd.client.config import Choice, read
from mqd.client.share import opening
from mqd.client.share.share_config import ShareConfig
from tests.unit.client.client_broker import FakeBroker


def test_stopping_before_the_first_request_closes_the_attachments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their threads stayed until the process ended."""
    broker = FakeBroker()
    monkeypatch.setattr(opening, "opener", lambda *_: broker.attach)
    settings = read({"bootstrap.servers": "127.0.0.1:1", "group.id": "g"})
    opened = opening.open_share_runner(settings, ShareConfig(settings), Choice("shm", "/nowhere", "test"))
    assert opened.choice.transport == "shm" and [client.closed for client in broker.clients] == [False, False]
    opened.runner.stop()
    assert [client.closed for client in broker.clients] == [True, True]
