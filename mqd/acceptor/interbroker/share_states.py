"""Reads and changes the states of share-partitions, whichever host coordinates them, with the five
APIs of the share coordinator (83 to 87). Requests come from workers (docs/design/share-groups.md),
from other hosts over the inter-broker connection, and from the group coordinator as effects of its
share groups.

The coordinator of a share-partition is the leader of its partition of `__share_group_state`. A
local coordinator is called directly; for others, one request per share-partition goes to the
coordinator's host. Any failure on the way is reported as a retriable error of that
share-partition; even then a write may have been applied.

Bounds: at most IN_FLIGHT_MAX share-partitions of one request are in flight. Concurrency: the event
loop's thread.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple

from mqd.acceptor.broker_state import BrokerState
from mqd.acceptor.interbroker.client import PeerError, Peers
from mqd.base import logging
from mqd.base.offset_reset import BY_DURATION
from mqd.coordinator.actions import Effect
from mqd.coordinator.group.settings import ShareSettings
from mqd.coordinator.group.share.events import DeleteStates, InitializeStates, StatesChanged
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.coordinator.runtime import Coordinator
from mqd.coordinator.share import core as share
from mqd.coordinator.share.records import checked_epoch_starts, runs_of, share_partition_name
from mqd.protocol import codec
from mqd.protocol.api import decode_request, encode_response
from mqd.protocol.errors import ErrorCode, ProtocolError, error_message
from mqd.protocol.headers import KNOWN
from mqd.protocol.messages import DeleteShareGroupStateRequest, InitializeShareGroupStateRequest, message_class

INITIALIZE, READ, WRITE, DELETE, READ_SUMMARY = 83, 84, 85, 86, 87
APIS = frozenset((INITIALIZE, READ, WRITE, DELETE, READ_SUMMARY))
TIMEOUT_S = 5.0  # less than group.share.initialize.retry.interval.ms
IN_FLIGHT_MAX = 100

log = logging.get("acceptor.share")


class _Api(NamedTuple):
    version: int  # the version used between hosts
    make_event: Callable[[int, Any], object]  # (request number, partition of the request)


_APIS_BY_KEY: dict[int, _Api] = {
    INITIALIZE: _Api(0, lambda number, part: share.Initialize(number, part.state_epoch, part.start_offset)),
    READ: _Api(
        0,
        lambda number, part: share.Read(
            number,
            part.leader_epoch,
            checked_epoch_starts([(epoch.leader_epoch, epoch.start_offset) for epoch in part.epochs]),
        ),
    ),
    WRITE: _Api(
        1,
        lambda number, part: share.Write(
            number,
            part.state_epoch,
            part.leader_epoch,
            part.start_offset,
            part.delivery_complete_count,
            tuple(runs_of(part.state_batches)),
        ),
    ),
    DELETE: _Api(0, lambda number, part: share.Delete(number)),
    READ_SUMMARY: _Api(1, lambda number, part: share.ReadSummary(number, part.include_deliveries)),
}


class ShareStates:
    """`groups` gets the outcomes of the group coordinator's effects. `settings_of(group)`: the
    group's settings."""

    def __init__(
        self,
        broker: BrokerState,
        coordinator: Coordinator,
        groups: Coordinator,
        settings_of: Callable[[str], ShareSettings],
        dead_letters_allowed: Callable[[], bool] = lambda: False,
    ) -> None:
        self._broker = broker
        self._coordinator = coordinator
        self._groups = groups
        self._settings_of = settings_of
        self._dead_letters_allowed = dead_letters_allowed
        # handles a READ or WRITE of the worker that owns the share-partition; replaced by
        # DeadLetters.respond_to_owner(), which also observes the state
        self.respond_to_owner: Callable[[int, str, bytes, Any], Awaitable[Any]] = self.respond_one
        # topic id, partition, time in ms -> (first offset at that time or later, or -1; error code)
        self.first_offset_since: Callable[[bytes, int, int], Awaitable[tuple[int, int]]] | None = None
        self.peers: Peers | None = None  # set before the first request if there are other hosts
        self._tasks: set[asyncio.Task[None]] = set()

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def respond_to_worker(self, api_key: int, body: bytes) -> bytes:
        """Handles a worker's request, which names one share-partition. Returns the group's settings,
        then the response's body. Both bodies are encoded in the version that hosts use among
        themselves. Raises ProtocolError for an invalid body. May run as an InlineCoroutine
        (mqd/base/tasks.py).
        """
        version = _APIS_BY_KEY[api_key].version
        request: Any = codec.decode(message_class(api_key, "Request"), version, body)
        if [len(topic.partitions) for topic in request.topics] != [1]:
            raise ProtocolError("a worker's request must name exactly one share-partition", type(request).__name__)
        (topic,) = request.topics
        result = await self.respond_to_owner(api_key, request.group_id, topic.topic_id, topic.partitions[0])
        settings = self._settings_of(request.group_id)
        first_offset = 0
        if api_key == READ and settings.offset_reset.kind == BY_DURATION:
            first_offset = await self._first_offset(topic.topic_id, result, settings.offset_reset.duration_ms)
        response_class: Any = message_class(api_key, "Response")
        response = response_class(results=[response_class.Topic(topic_id=topic.topic_id, partitions=[result])])
        return settings.pack(first_offset, self._dead_letters_allowed()) + codec.encode(response, version)

    async def _first_offset(self, topic_id: bytes, result: Any, duration_ms: int) -> int:
        """Returns the offset at which a share-partition without a start offset begins (-1: its end),
        or 0 if it has a start offset. Sets the error of `result` if the offset cannot be found.
        """
        if result.error_code or result.start_offset >= 0 or self.first_offset_since is None:
            return 0
        since_ms = int(time.time() * 1000) - duration_ms
        offset, error = await self.first_offset_since(topic_id, result.partition, since_ms)
        if error:
            result.error_code = int(ErrorCode.COORDINATOR_NOT_AVAILABLE)  # the worker retries
        return offset

    async def serve(self, frame: bytes) -> bytes:
        """Answers another host's frame. Raises ProtocolError."""
        header, request = decode_request(frame, KNOWN)
        return encode_response(header, await self.respond(request, is_from_peer=True))

    async def respond(self, request: Any, is_from_peer: bool = False) -> Any:
        """Returns the response. `is_from_peer`: another host sent the request because it regards this
        host as the coordinator; the request is not passed on again.
        """
        api_key = codec.message_of(type(request))[0].api_key
        response_class: Any = message_class(api_key, "Response")
        slots = asyncio.Semaphore(IN_FLIGHT_MAX)

        async def respond_limited(topic_id: bytes, partition: Any) -> Any:
            async with slots:
                return await self.respond_one(api_key, request.group_id, topic_id, partition, is_from_peer)

        topics = [
            response_class.Topic(
                topic_id=topic.topic_id,
                partitions=list(
                    await asyncio.gather(*(respond_limited(topic.topic_id, part) for part in topic.partitions))
                ),
            )
            for topic in request.topics
        ]
        return response_class(results=topics)

    async def respond_one(
        self, api_key: int, group_id: str, topic_id: bytes, part: Any, is_from_peer: bool = False
    ) -> Any:
        """Returns the response for one share-partition: the Partition of the API's response. `part`:
        the Partition of the request.
        """
        try:
            return await self._respond_one(api_key, group_id, topic_id, part, is_from_peer)
        except CoordinatorError as error:
            return _failed(api_key, part.partition, error.error_code)
        except ValueError as error:
            return _failed(api_key, part.partition, int(ErrorCode.INVALID_REQUEST), str(error))

    async def _respond_one(self, api_key: int, group_id: str, topic_id: bytes, part: Any, is_from_peer: bool) -> Any:
        if not group_id or part.partition < 0:
            raise ValueError("The group id cannot be empty." if not group_id else "The partition id is negative.")
        image = self._broker.metadata.by_id(topic_id)
        if image is None or part.partition >= len(image.partitions):
            raise CoordinatorError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        if not await self._coordinator.ensure_topic():
            raise CoordinatorError(ErrorCode.COORDINATOR_NOT_AVAILABLE)
        name = share_partition_name(group_id, topic_id, part.partition)
        state_partition = self._broker.partition_of(self._coordinator.topic, self._coordinator.partition_for(name))
        leader = state_partition.leader if state_partition is not None else -1
        if leader in (-1, self._broker.node_id) or is_from_peer:
            make_event = _APIS_BY_KEY[api_key].make_event
            return await self._coordinator.request(name, lambda number: make_event(number, part), TIMEOUT_S)
        return await self._request_peer(leader, api_key, group_id, topic_id, part)

    async def _request_peer(self, node_id: int, api_key: int, group_id: str, topic_id: bytes, part: Any) -> Any:
        if self.peers is None:
            raise CoordinatorError(ErrorCode.COORDINATOR_NOT_AVAILABLE)
        request_class: Any = message_class(api_key, "Request")
        request = request_class(group_id=group_id, topics=[request_class.Topic(topic_id=topic_id, partitions=[part])])
        try:
            response = await self.peers.request(node_id, request, _APIS_BY_KEY[api_key].version, TIMEOUT_S)
            (topic,) = response.results
            (result,) = topic.partitions
        except (PeerError, ValueError) as error:
            log.info(
                "a share-partition's coordinator on another host does not respond", node=node_id, reason=str(error)
            )
            raise CoordinatorError(ErrorCode.COORDINATOR_NOT_AVAILABLE) from error
        return result

    # -- effects of share groups -------------------------------------------------------------------

    def carry_out(self, name: str, effect: Effect, leader_epoch: int) -> None:
        """Carries out an effect of the group `name`. The outcome goes to the core that requested it,
        unless that core has been loaded again.
        """
        if isinstance(effect, InitializeStates):
            self._spawn(self._initialize(name, effect, leader_epoch))
        elif isinstance(effect, DeleteStates):
            self._spawn(self._delete(name, effect, leader_epoch))
        else:
            raise TypeError(f"{type(effect).__name__} is not an effect of a group")

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _initialize(self, name: str, effect: InitializeStates, leader_epoch: int) -> None:
        request_class = InitializeShareGroupStateRequest
        topics = [
            request_class.Topic(
                topic_id=topic_id,
                partitions=[
                    request_class.Partition(partition=index, state_epoch=effect.state_epoch, start_offset=start)
                    for index, start in starts.items()
                ],
            )
            for topic_id, starts in effect.offsets.items()
        ]
        response = await self.respond(request_class(group_id=name, topics=topics))
        self._post_outcome(name, effect.token, response, leader_epoch)

    async def _delete(self, name: str, effect: DeleteStates, leader_epoch: int) -> None:
        request_class = DeleteShareGroupStateRequest
        topics = [
            request_class.Topic(
                topic_id=topic_id, partitions=[request_class.Partition(partition=index) for index in indexes]
            )
            for topic_id, indexes in effect.partitions.items()
        ]
        response = await self.respond(request_class(group_id=name, topics=topics))
        self._post_outcome(name, effect.token, response, leader_epoch)

    def _post_outcome(self, name: str, token: int, response: Any, leader_epoch: int) -> None:
        errors = {
            (topic.topic_id, part.partition): part.error_code
            for topic in response.results
            for part in topic.partitions
            if part.error_code
        }
        try:
            if self._groups.leader_epoch(name) == leader_epoch:
                self._groups.post(name, StatesChanged(token, errors))
        except CoordinatorError:
            pass  # the next load starts from the log


def _failed(api_key: int, partition: int, error: int, message: str | None = None) -> Any:
    response_class: Any = message_class(api_key, "Response")
    return response_class.Partition(
        partition=partition, error_code=error, error_message=message or error_message(error)
    )
