"""Commands of the controller for one partition: DeleteRecords, and AlterReplicaLogDirs (moving.py).

Records are deleted in a separate task: it waits for the partition's files_lock, which compaction
may hold for as long as a disk fails, and metadata changes must not wait for that.

Bound: the controller limits the commands in progress. Concurrency: the event loop's thread.
"""

import asyncio
from collections.abc import Callable

from mqd import native
from mqd.base import logging
from mqd.cluster.host.messages import Command, CommandDone, ToController
from mqd.protocol.errors import ErrorCode
from mqd.worker.log_directory import LogDirectory
from mqd.worker.maintenance import Upkeep
from mqd.worker.moving import Mover
from mqd.worker.open_partitions import OpenPartition
from mqd.worker.partitions import PartitionSet


class ControllerCommands:
    def __init__(
        self,
        control: native.Control,
        log_dirs: list[LogDirectory],
        partitions: PartitionSet,
        upkeep: Upkeep,
        mover: Mover,
        send: Callable[[ToController], None],
    ) -> None:
        self._control = control
        self._log_dirs = log_dirs
        self._partitions = partitions
        self._upkeep = upkeep
        self._mover = mover
        self._send = send
        self._deletions: set[asyncio.Task[None]] = set()
        self._log = logging.get("worker.commands")

    async def carry_out(self, command: Command) -> None:
        """Called with the worker's changes lock held."""
        opened = self._partitions.by_slot.get(command.slot)
        if opened is None or opened.closing:
            reason = self._partitions.failures.get(command.slot)
            if reason is not None:
                self._respond(command, ErrorCode.KAFKA_STORAGE_ERROR, f"The partition is offline: {reason}")
            else:
                self._respond(command, ErrorCode.NOT_LEADER_OR_FOLLOWER, "This worker does not serve the partition.")
        elif command.kind == "move_replica":
            self._respond(command, *await self._mover.begin(opened, command.offset))
        else:
            task = asyncio.get_running_loop().create_task(self._delete_records(command, opened))
            self._deletions.add(task)
            task.add_done_callback(self._deletions.discard)

    async def _delete_records(self, command: Command, opened: OpenPartition) -> None:
        high_watermark = self._control.slot_view(command.slot).high_watermark
        if command.offset > high_watermark or command.offset < -1:
            text = f"Offset {command.offset} is not between 0 and the high watermark {high_watermark}."
            self._respond(command, ErrorCode.OFFSET_OUT_OF_RANGE, text)
            return
        try:
            start = await self._upkeep.advance_start(opened, self._log_dirs[opened.owned.log_dir], command.offset)
        except OSError as error:
            self._respond(command, ErrorCode.KAFKA_STORAGE_ERROR, str(error))
        except Exception:  # a bug; the client's request times out
            self._log.exception("records cannot be deleted", partition=opened.owned.name)
        else:
            self._respond(command, ErrorCode.NONE, "", start)

    def _respond(self, command: Command, error: int, text: str, offset: int = -1) -> None:
        self._send(CommandDone(command.command_id, int(error), offset, text))

    async def close(self) -> None:
        """Called when the worker ends, so that no log start moves while partitions are being
        closed.
        """
        deletions = list(self._deletions)
        for task in deletions:
            task.cancel()
        await asyncio.gather(*deletions, return_exceptions=True)
