"""The shell's own behaviour: how long it waits for metadata before it reports anything."""

import asyncio
from types import SimpleNamespace

from mqd.cluster.broker import messages as peer
from mqd.cluster.host import messages
from mqd.cluster.metadata import core as metadata_core
from mqd.cluster.metadata.records import PartitionState, TopicState
from mqd.controller.shell import Shell


def shell(committed: int, log_end_offset: int, alone: bool = False) -> Shell:
    """With a quorum played by the test."""
    found = object.__new__(Shell)
    found.failed = asyncio.get_running_loop().create_future()
    found.metadata = SimpleNamespace(committed=SimpleNamespace(cluster_id="cluster", version=committed), active=False)
    found.quorum = SimpleNamespace(
        core=SimpleNamespace(
            leader=-1, epoch=1, voters=(), is_alone=alone, log=SimpleNamespace(end_offset=log_end_offset)
        )
    )
    return found


async def is_done(task: asyncio.Task[None]) -> bool:
    await asyncio.sleep(0.02)  # ten polls
    return task.done()


def run(scenario) -> None:
    asyncio.run(asyncio.wait_for(scenario, 10))


def test_a_change_waits_for_every_worker_and_for_the_log() -> None:
    async def scenario() -> None:
        one = shell(committed=9, log_end_offset=12)
        waiting = asyncio.create_task(one.wait_metadata(9, 12))
        assert not await is_done(waiting), "a predecessor may have sent its whole log to a worker"
        one.metadata.committed.version = 11
        assert not await is_done(waiting)
        one.metadata.committed.version = 12
        await waiting
        await shell(committed=12, log_end_offset=15).wait_metadata(12)
        assert not await is_done(
            behind := asyncio.create_task(shell(committed=11, log_end_offset=15).wait_metadata(12))
        )
        behind.cancel()

    run(scenario())


def test_truncated_batches_were_not_committed() -> None:
    async def scenario() -> None:
        one = shell(committed=9, log_end_offset=12)
        waiting = asyncio.create_task(one.wait_metadata(9, 12))
        assert not await is_done(waiting)
        one.quorum.core.log.end_offset = 10
        assert not await is_done(waiting)
        one.metadata.committed.version, one.quorum.core.log.end_offset = 10, 11
        await waiting

    run(scenario())


def test_a_single_host_waits_until_it_is_elected() -> None:
    async def scenario() -> None:
        one = shell(committed=12, log_end_offset=12, alone=True)
        waiting = asyncio.create_task(one.wait_metadata(12, 12))
        assert not await is_done(waiting)
        one.metadata.active = True
        await waiting

    run(scenario())


def test_a_change_is_answered_before_the_host_core_has_started() -> None:
    """Its quorum may elect this host while its log directories are still being checked."""

    async def scenario() -> None:
        one = shell(committed=9, log_end_offset=9)
        one._started = False
        sent: list[tuple[int, object]] = []
        one._send_remote = lambda node_id, message: sent.append((node_id, message))
        one.node_id = 1
        partition = PartitionState(0, (2,), ("d",), (2,), 2, 0)
        topic = TopicState("t", b"t" * 16, (partition,), {})
        response = peer.ChangeResponse(1, 2, 7, 5, 9, messages.Response(7, 0))
        one.metadata.handle = lambda event, now_ms: [metadata_core.SendPeer(2, response, topic)]
        one.on_metadata(metadata_core.Tick())
        ((node_id, message),) = sent
        assert node_id == 2 and message.response.topic.partitions[0].leader == 2

    run(scenario())
