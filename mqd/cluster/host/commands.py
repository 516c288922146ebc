"""Requests from clients that must be carried out by the worker that owns the partition: the host
core forwards them as commands. They are not in the metadata log. Part of the host core
(mqd/cluster/host/core.py).
"""

from collections.abc import Hashable

import msgspec

from mqd.cluster.host import messages
from mqd.cluster.host.events import (
    Action,
    CommandEnded,
    CommandRequested,
    MoveEnded,
    Partition,
    ReportReplicaMoved,
    Send,
    Tick,
)
from mqd.protocol.errors import ErrorCode

OWNER_NONE = 65535
COMMANDS_MAX = 10_000
COMMAND_WAIT_MS_MAX = 30_000


class Subscriber(msgspec.Struct):
    client: Hashable
    role: str
    index: int
    applied_version: int = -1
    held: bool = False  # H3: it gets no metadata until its predecessor's partitions have new leader epochs
    # whether its last report had failures; True before its first one: its predecessor may have had some
    has_failures: bool = True


class PendingCommand(msgspec.Struct):
    """A command that was sent to `worker`, and whose response goes to `client`."""

    client: Hashable
    request_id: int
    worker: Hashable
    since_ms: int


class HostCommands:
    """The commands of the host core, and the attributes of the core that they use."""

    node_id: int
    _images: dict[str, messages.TopicImage]
    _log_dirs: dict[str, int]
    _subscribers: dict[Hashable, Subscriber]
    _commands: dict[int, PendingCommand]
    _command_id: int

    def _published_image(self, partition: Partition) -> messages.PartitionImage | None:
        raise NotImplementedError

    def _on_command_requested(self, event: CommandRequested, now_ms: int) -> list[Action]:
        def refuse(error: int, text: str) -> list[Action]:
            return [Send(event.client, messages.Response(event.request_id, error, text))]

        change = event.change
        image = self._images.get(change.name)
        if image is None or not 0 <= change.partition < len(image.partitions):
            return refuse(
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"There is no partition {change.name}-{change.partition}."
            )
        partition = image.partitions[change.partition]
        if isinstance(change, messages.DeleteRecords) and partition.leader != self.node_id:
            return refuse(ErrorCode.NOT_LEADER_OR_FOLLOWER, f"{change.name}-{change.partition} is led by another host.")
        if partition.slot < 0:
            return refuse(
                ErrorCode.REPLICA_NOT_AVAILABLE, f"This host has no replica of {change.name}-{change.partition}."
            )
        if partition.owner == OWNER_NONE:
            return refuse(
                ErrorCode.KAFKA_STORAGE_ERROR, f"The log directory of {change.name}-{change.partition} is offline."
            )
        worker = next(
            (
                subscriber
                for subscriber in self._subscribers.values()
                if subscriber.role == "worker" and subscriber.index == partition.owner and not subscriber.held
            ),
            None,
        )
        if worker is None:
            return refuse(
                ErrorCode.NOT_LEADER_OR_FOLLOWER,
                f"The worker that owns {change.name}-{change.partition} is being restarted; try again.",
            )
        # the metadata could not record a move to a directory that is not registered
        if isinstance(change, messages.MoveReplica) and change.log_dir not in self._log_dirs.values():
            return refuse(
                ErrorCode.KAFKA_STORAGE_ERROR,
                f"The log directory with index {change.log_dir} was offline when the controller started.",
            )
        if len(self._commands) >= COMMANDS_MAX:
            return refuse(ErrorCode.REQUEST_TIMED_OUT, "Too many commands are in progress; try again.")
        self._command_id += 1
        self._commands[self._command_id] = PendingCommand(event.client, event.request_id, worker.client, now_ms)
        if isinstance(change, messages.MoveReplica):
            return [
                Send(worker.client, messages.Command(self._command_id, "move_replica", partition.slot, change.log_dir))
            ]
        return [
            Send(worker.client, messages.Command(self._command_id, "delete_records", partition.slot, change.offset))
        ]

    def _on_move_ended(self, event: MoveEnded, now_ms: int) -> list[Action]:
        """Accepts the report only from a live worker, and only for a partition that it owns. (If the worker
        dies, its successor gets the partition only after all earlier records have been applied: H3.)
        """
        worker = self._subscribers.get(event.client)
        image = self._published_image((event.moved.topic_id, event.moved.index))
        directory = next((name for name, index in self._log_dirs.items() if index == event.moved.log_dir), None)
        if (
            worker is None
            or worker.role != "worker"
            or worker.held
            or image is None
            or image.owner != worker.index
            or directory is None
        ):
            return []
        return [ReportReplicaMoved(event.moved.topic_id, event.moved.index, directory)]

    def _on_command_ended(self, event: CommandEnded, now_ms: int) -> list[Action]:
        command = self._commands.get(event.done.command_id)
        if command is None or command.worker != event.client:
            return []
        del self._commands[event.done.command_id]
        return [
            Send(
                command.client,
                messages.Response(
                    command.request_id, event.done.error, event.done.message or None, offset=event.done.offset
                ),
            )
        ]

    def _on_tick(self, event: Tick, now_ms: int) -> list[Action]:
        actions: list[Action] = []
        for number in [
            number for number, command in self._commands.items() if now_ms - command.since_ms >= COMMAND_WAIT_MS_MAX
        ]:
            command = self._commands.pop(number)
            text = f"The worker has not responded within {COMMAND_WAIT_MS_MAX // 1000} s."
            actions.append(
                Send(command.client, messages.Response(command.request_id, ErrorCode.REQUEST_TIMED_OUT, text))
            )
        return actions
