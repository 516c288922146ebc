"""A process that only gossips: `python -m tests.interaction.cluster.gossiping NODE PORT DIRECTORY
SEEDS [KEY]`. Prints one JSON line for each change; ends with SIGTERM (goodbye) or by a kill.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
import uuid
from pathlib import Path

from mqd.cluster.membership import gossip_events as events
from mqd.cluster.membership.credentials import Credentials
from mqd.cluster.membership.gossip_events import Profile
from mqd.cluster.membership.handshake import Identity
from mqd.controller.gossip import create
from mqd.controller.peers import Peers

CLUSTER = "gossiping"


def emit(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def directory_of(path: Path) -> str:
    """The directory id in meta.properties of a metadata directory."""
    file = path / "directory.id"
    if not file.exists():
        file.write_text(uuid.uuid4().hex)
    return file.read_text()


async def run(node_id: int, port: int, directory: Path, seeds: list[tuple[str, int]], secret: bytes) -> None:
    loop = asyncio.get_running_loop()
    listener = socket.create_server(("127.0.0.1", port))
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.bind(("127.0.0.1", port))
    directory_id = directory_of(directory)
    identity = Identity(node_id, directory_id, CLUSTER, host="127.0.0.1", port=port)

    async def on_stream(hello, reader, writer) -> None:
        await gossip.serve(hello, reader, writer)

    peers = Peers(
        Credentials([secret]), lambda: identity, lambda hello: identity, lambda connection, message: None, on_stream
    )
    profile = Profile(
        node_id, bytes.fromhex(directory_id), "localhost", port, rack=f"rack-{node_id % 2}", version="test"
    )
    gossip = create(profile, [secret], CLUSTER, seeds, datagrams, peers, directory)

    def on_change(change) -> None:
        if isinstance(change, events.MemberChanged):
            emit(
                member=change.member.node_id,
                before=change.before,
                state=change.member.state,
                incarnation=change.member.incarnation,
                rack=change.member.profile.rack,
            )
        elif isinstance(change, events.ControllerSeen):
            emit(controller=change.node_id, epoch=change.epoch)

    def on_line() -> None:
        line = sys.stdin.readline()
        if line.startswith("controller "):
            gossip.handle(events.ControllerKnown(node_id, int(line.split()[1])))
        elif line.startswith("counts"):
            emit(
                counts=dict(gossip.core.counts),
                living=sorted(identity[0] for identity in gossip.core.membership.living),
            )

    gossip.on_change = on_change
    await peers.listen(listener)
    await gossip.start()
    loop.add_reader(sys.stdin, on_line)
    ended = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    emit(started=node_id)
    await ended.wait()
    await gossip.stop()
    await peers.stop()
    emit(left=node_id)


if __name__ == "__main__":
    seeds = [("localhost", int(port)) for port in sys.argv[4].split(",") if port]
    asyncio.run(
        run(
            int(sys.argv[1]),
            int(sys.argv[2]),
            Path(sys.argv[3]),
            seeds,
            sys.argv[5].encode() if len(sys.argv) > 5 else b"",
        )
    )
