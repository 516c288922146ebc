"""A bug of our own is never mistaken for an invalid message: between controller and acceptor, as in
mqd/acceptor/dispatch.py (test_failures.py).
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from mqd.acceptor import controller_client
from mqd.acceptor.controller_client import ControllerClient, MetadataFault
from mqd.cluster.host import messages
from mqd.controller import server
from mqd.controller.server import Server
from mqd.security.audit import Audit

FAULTS = (ValueError("a bug"), msgspec.ValidationError("a bug"), OSError("a bug"), KeyError("a bug"))


class Log:
    def __init__(self) -> None:
        self.tracebacks: list[str] = []
        self.warnings: list[str] = []

    def exception(self, text: str, **_: object) -> None:
        self.tracebacks.append(text)

    def warning(self, text: str, **_: object) -> None:
        self.warnings.append(text)


def frame(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


@pytest.mark.parametrize("fault", [*FAULTS, None], ids=lambda fault: type(fault).__name__)
def test_the_controller_distinguishes_its_bugs_from_invalid_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception | None
) -> None:
    log, ends = Log(), []
    monkeypatch.setattr(server, "log", log)

    def on_message(*_: object) -> None:
        assert fault is not None
        raise fault

    async def run() -> None:
        served = Server(tmp_path / "socket", on_message, lambda connection: ends.append(connection), Audit())
        await served.start()
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "socket"))
        writer.write(
            frame(msgspec.msgpack.encode(messages.Subscribe("acceptor", 0, 1)) if fault is not None else b"\xc1")
        )
        assert await reader.read() == b""
        writer.close()
        await served.stop()

    asyncio.run(asyncio.wait_for(run(), 30))
    assert len(ends) == 1
    assert (len(log.tracebacks), len(log.warnings)) == ((1, 0) if fault is not None else (0, 1))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_the_acceptor_ends_when_it_cannot_take_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    """It used to reconnect endlessly, and reported the bug as a lost connection."""
    log = Log()
    monkeypatch.setattr(controller_client, "log", log)

    def on_metadata(_: object) -> None:
        raise fault

    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(
            frame(msgspec.msgpack.encode(messages.TopicRemoved(version=1, name="t", topic_id=bytes(16), slots=[])))
        )

    async def run() -> None:
        async with await asyncio.start_unix_server(serve, str(tmp_path / "socket")):
            with pytest.raises(MetadataFault):
                await ControllerClient(tmp_path / "socket", 1, on_metadata, lambda: True).run()

    asyncio.run(asyncio.wait_for(run(), 30))
    assert len(log.tracebacks) == 1 and not log.warnings
