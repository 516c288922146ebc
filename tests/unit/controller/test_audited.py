"""Changes by tools through the controller's socket are written to logs/audit.log."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import msgspec

from mqd.cli import local_controller
from mqd.cluster.host import messages
from mqd.cluster.metadata.records import ScramCredential
from mqd.controller.server import Connection, Server
from mqd.protocol.errors import ErrorCode
from mqd.security.acl import AclBinding, Operation, PatternType, Permission, ResourceType
from mqd.security.audit import Audit

RULE = AclBinding(ResourceType.TOPIC, PatternType.LITERAL, "t", "User:alice", "*", Operation.READ, Permission.ALLOW)
ALICE = ScramCredential("alice", 1, b"salt", 4096, b"stored", b"server")
ANSWERS: dict[type, messages.Response] = {
    messages.CreateAcls: messages.Response(1, 0),
    messages.DeleteAcls: messages.Response(1, 0, removed_acls=[[RULE], [RULE]]),
    messages.AlterScramCredentials: messages.Response(
        1, 0, users=[messages.UserResult("alice"), messages.UserResult("bob", int(ErrorCode.RESOURCE_NOT_FOUND))]
    ),
    messages.DescribeQuorum: messages.Response(1, 0),
}
BY = {"by": f"uid {os.getuid()}", "pid": os.getpid(), "through": "controller.sock"}


def events(tmp_path: Path, *changes: messages.Change, error: int = 0) -> list[dict[str, object]]:
    """The audit log's lines, without their times."""
    path = tmp_path / "controller.sock"

    def on_message(connection: Connection, message: messages.ToController) -> None:
        if isinstance(message, messages.Request):
            response = ANSWERS[type(message.change)] if not error else messages.Response(1, error)
            server.send(connection.number, response)

    server = Server(path, on_message, lambda _: None, Audit(tmp_path / "audit.log"))

    def request() -> None:
        for change in changes:
            local_controller.change(path, change, 10)

    async def run() -> None:
        await server.start()
        try:
            await asyncio.to_thread(request)
        finally:
            await server.stop()

    asyncio.run(run())
    written = tmp_path / "audit.log"
    found = [json.loads(line) for line in written.read_text().splitlines()] if written.exists() else []
    assert all(one.pop("time") for one in found)
    return found


def test_changes_are_audited_with_their_user(tmp_path: Path) -> None:
    changes = (
        messages.CreateAcls([RULE]),
        messages.DeleteAcls([]),
        messages.AlterScramCredentials([], [ALICE]),
        messages.DescribeQuorum(),
    )
    assert events(tmp_path, *changes) == [
        {"event": "acl created", **BY, "acl": str(RULE)},
        {"event": "acl removed", **BY, "acl": str(RULE)},
        {"event": "password changed", **BY, "user": "alice"},
    ]


def test_refused_changes_are_not_audited(tmp_path: Path) -> None:
    assert events(tmp_path, messages.CreateAcls([RULE]), error=int(ErrorCode.POLICY_VIOLATION)) == []


def test_a_tool_that_disconnects_before_its_response(tmp_path: Path) -> None:
    path, arrived = tmp_path / "controller.sock", asyncio.Event()

    async def run() -> None:
        server = Server(path, lambda *_: arrived.set(), lambda _: None, Audit(tmp_path / "audit.log"))
        await server.start()
        _, writer = await asyncio.open_unix_connection(str(path))
        for message in (
            messages.Subscribe("tool", 0, 0),
            messages.Request(1, messages.CreateAcls([RULE]), True),
            messages.Request(2, messages.CreateAcls([RULE]), False),
        ):
            data = msgspec.msgpack.encode(message)
            writer.write(len(data).to_bytes(4, "big") + data)
        await writer.drain()
        writer.close()
        await arrived.wait()
        while server._connections:
            await asyncio.sleep(0)
        await server.stop()

    asyncio.run(run())
    (line,) = (json.loads(line) for line in (tmp_path / "audit.log").read_text().splitlines())
    assert (line["event"], line["by"], line["change"]) == ("requested, outcome not known", BY["by"], "CreateAcls")
