"""The acceptor's connection to the controller: changes requested before any broker is in service."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from mqd.acceptor.controller_client import ControllerClient
from mqd.acceptor.metadata import Metadata
from mqd.cluster.host import messages
from mqd.protocol.errors import ErrorCode

NODE, INCARNATION = 1, 7
CHANGE = messages.CreateTopic("t", 1, -1, {}, {})
_decode = msgspec.msgpack.Decoder(messages.ToController).decode


class Controller:
    """The other end of the connection: sends metadata, answers each change with success."""

    def __init__(self, path: Path) -> None:
        self.metadata = Metadata()
        self.client = ControllerClient(path, INCARNATION, self.metadata.apply, self._in_service)
        self.applied: asyncio.Queue[int] = asyncio.Queue()
        self.changes = 0
        self._path = path
        self._writer: asyncio.StreamWriter | None = None

    def _in_service(self) -> bool:
        return self.metadata.has_broker_in_service(NODE, INCARNATION)

    async def __aenter__(self) -> Controller:
        self._server = await asyncio.start_unix_server(self._serve, str(self._path))
        self._running = asyncio.create_task(self.client.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._running.cancel()
        self._server.close()

    async def publish(self, version: int, *brokers: messages.BrokerImage) -> None:
        """Returns when the client has applied it, with what it sent before."""
        while self._writer is None:
            await asyncio.sleep(0)
        self._send(messages.BrokersPut(version, list(brokers)))
        assert await self.applied.get() == version

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        while True:
            try:
                message = _decode(await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big")))
            except asyncio.IncompleteReadError:
                return
            if isinstance(message, messages.Applied):
                self.applied.put_nowait(message.version)
            elif isinstance(message, messages.Request):
                self.changes += 1
                self._send(messages.Response(message.request_id, 0))

    def _send(self, message: messages.FromController) -> None:
        assert self._writer is not None
        data = msgspec.msgpack.encode(message)
        self._writer.write(len(data).to_bytes(4, "big") + data)


def broker(node: int = NODE, *, fenced: bool, incarnation: int = INCARNATION) -> messages.BrokerImage:
    return messages.BrokerImage(node, "h", 1, None, 5, fenced=fenced, incarnation=incarnation)


def run(path: Path, *published: messages.BrokerImage) -> tuple[int, messages.Response]:
    """How many changes had been sent before the last message, and the response after it."""

    async def history() -> tuple[int, messages.Response]:
        async with Controller(path / "socket") as controller:
            waiting = asyncio.create_task(controller.client.request(CHANGE, 30_000))
            for version, one in enumerate(published[:-1]):
                await controller.publish(version, one)
            sent_before = controller.changes
            await controller.publish(len(published), published[-1])
            return sent_before, await waiting

    return asyncio.run(asyncio.wait_for(history(), 30))


def test_a_new_topic_waits_until_this_broker_is_in_service(tmp_path: Path) -> None:
    sent_before, response = run(tmp_path, broker(fenced=True), broker(fenced=True), broker(fenced=False))
    assert sent_before == 0 and response.error == 0


def test_the_entry_of_the_previous_registration_does_not_count(tmp_path: Path) -> None:
    old = broker(fenced=False, incarnation=INCARNATION - 1)
    sent_before, response = run(tmp_path, old, broker(fenced=True), broker(fenced=False))
    assert sent_before == 0 and response.error == 0


def test_another_broker_in_service_is_enough(tmp_path: Path) -> None:
    sent_before, response = run(
        tmp_path, broker(fenced=True), broker(fenced=True), broker(2, fenced=False, incarnation=1)
    )
    assert sent_before == 0 and response.error == 0


def test_a_change_that_places_no_replicas_does_not_wait(tmp_path: Path) -> None:
    async def history() -> messages.Response:
        async with Controller(tmp_path / "socket") as controller:
            await controller.publish(1, broker(fenced=True))
            return await controller.client.request(messages.AllocateProducerIds(5), 30_000)

    assert asyncio.run(asyncio.wait_for(history(), 30)).error == 0


def test_once_in_service_new_topics_do_not_wait_for_a_fenced_broker(tmp_path: Path) -> None:
    """The controller's answer is then the right one: no broker can hold a topic."""

    async def history() -> messages.Response:
        async with Controller(tmp_path / "socket") as controller:
            await controller.publish(1, broker(fenced=False))
            await controller.publish(2, broker(fenced=True))
            return await controller.client.request(CHANGE, 30_000)

    assert asyncio.run(asyncio.wait_for(history(), 30)).error == 0


def test_a_new_topic_that_timed_out_was_not_created(tmp_path: Path) -> None:
    async def history() -> tuple[int, messages.Response]:
        async with Controller(tmp_path / "socket") as controller:
            await controller.publish(1, broker(fenced=True))
            return controller.changes, await controller.client.request(CHANGE, 50)

    changes, response = asyncio.run(asyncio.wait_for(history(), 30))
    assert changes == 0 and response.error == ErrorCode.REQUEST_TIMED_OUT
    assert "no broker is in service; nothing was changed" in response.message
