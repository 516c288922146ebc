"""A share consumer's object, with a runner played by the test."""

from __future__ import annotations

import gc
import os
from types import SimpleNamespace
from typing import Any

import pytest

from mqd.client import share_consumer
from mqd.client.config import TransportChoice
from mqd.client.share.opening import OpenedRunner
from mqd.client.share_consumer import ShareConsumer


def test_a_child_of_fork_does_not_stop_the_parents_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the child ended, the parent's connections were shut down, and its share sessions with them."""
    reading, writing = os.pipe()
    runner: Any = SimpleNamespace(core=None, stop=lambda: os.write(writing, b"%d." % os.getpid()))
    monkeypatch.setattr(
        share_consumer, "open_share_runner", lambda *_: OpenedRunner(runner, {}, TransportChoice("tcp", None, ""))
    )
    consumer = ShareConsumer({"bootstrap.servers": "127.0.0.1:1", "group.id": "g"})
    child = os.fork()
    if child == 0:
        try:
            del consumer
            gc.collect()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    del consumer
    gc.collect()
    os.close(writing)
    with os.fdopen(reading) as stopped:
        assert stopped.read() == f"{os.getpid()}."
