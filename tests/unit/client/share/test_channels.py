"""TCP channels of a share consumer whose connections cannot be made."""

from __future__ import annotations

import queue
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mqd.base.property_values import ConfigError
from mqd.client import requests
from mqd.client.messages import KafkaError
from mqd.client.share.channels import TcpChannel
from mqd.client.share.events import Send, Target
from mqd.protocol.messages import FindCoordinatorRequest
from mqd.security.client import ClientSecurity
from tests.ports import free_port

SEND = Send(1, Target("control"), requests.FIND_COORDINATOR, FindCoordinatorRequest(coordinator_keys=["g"]))


@pytest.fixture
def channel_with() -> Iterator[Callable[[Callable[[], ClientSecurity]], TcpChannel]]:
    """channel_with(security) as TcpChannel, to a server that accepts connections."""
    made: list[TcpChannel] = []
    with socket.create_server(("127.0.0.1", free_port())) as server:

        def make(security: Callable[[], ClientSecurity]) -> TcpChannel:
            made.append(TcpChannel("test", lambda: [server.getsockname()], "c", 10, security))
            return made[-1]

        yield make
        for channel in made:
            channel.close()


def errors_of(channel: TcpChannel, count: int) -> list[KafkaError]:
    """The errors of as many requests."""
    arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for _ in range(count):
        channel.send(SEND, lambda _response, error: arrived.put(error))
    return [arrived.get(timeout=10) for _ in range(count)]


def test_a_certificate_that_cannot_be_read_is_reported(channel_with: Callable[..., TcpChannel]) -> None:
    """For example while it is replaced. The channel's thread ended, and poll() waited without end."""
    channel = channel_with(lambda: ClientSecurity({"security.protocol": "ssl", "ssl.ca.location": "/nowhere/ca"}))
    errors = errors_of(channel, 2)
    assert [error.code() for error in errors] == [KafkaError._AUTHENTICATION] * 2
    assert "/nowhere/ca" in errors[0].str() or "certificates" in errors[0].str()


@pytest.mark.parametrize("problem", [ConfigError("not known"), ValueError("a fault of ours")])
def test_each_request_ends_whatever_is_raised(channel_with: Callable[..., TcpChannel], problem: Exception) -> None:
    def security() -> ClientSecurity:
        raise problem

    expected = KafkaError._AUTHENTICATION if isinstance(problem, ConfigError) else KafkaError._TRANSPORT
    errors = errors_of(channel_with(security), 2)
    assert [(error.code(), str(problem) in error.str()) for error in errors] == [(expected, True)] * 2
