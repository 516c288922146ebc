"""One simulated member of a group: the client's real membership core, its connection to the
coordinator over the simulated network, and an application that works on partitions and commits its
progress, like mqd/client (runner.py, committing.py, rebalancing.py).

Invariants
    N1  a connection delivers in order, once or not at all, and not at all once it is closed;
        requests without a response then end as ResponseMissing
    N2  one commit is in flight at a time; a failed one is retried with the current positions.
        Revoke ends when its commit has, or after COMMIT_MAX_MS. Nothing is committed after Lost.
        Off (`again`): it is retried unchanged, as mqd/client once did: under a valid epoch, for
        partitions that belong to another member by then
    N3  work on a partition begins at its committed offset, fetched after the assignment
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from mqd.client.group.classic import ClassicCore
from mqd.client.group.classic import ClassicSettings as MemberSettings
from mqd.client.group.consumer_protocol import ConsumerProtocolCore, Settings
from mqd.client.group.events import Assign, Done, Polled, ResponseMissing, ResponseReceived, Revoke, Send
from mqd.coordinator.group.classic.events import Heartbeat, JoinGroup, LeaveGroup, SyncGroup
from mqd.coordinator.group.consumer.events import ConsumerHeartbeat
from mqd.coordinator.group.offsets import CommitOffsets, CommittedOffset, FetchOffsets, OffsetsCommitted, OffsetsFetched
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    JoinGroupRequest,
    JoinGroupResponse,
    LeaveGroupRequest,
    LeaveGroupResponse,
    SyncGroupRequest,
    SyncGroupResponse,
)
from tests.sim.client.client_group_world import INTERVAL_MS, MAX_POLL_MS, SESSION_MS, Consumer, places
from tests.sim.kernel import MILLISECOND, Process, Timer, Violation

if TYPE_CHECKING:
    from tests.sim.coordinator.group_ledger import Place
    from tests.sim.coordinator.group_members import MemberGroup

POLL_MS, AGAIN_MS, REQUEST_MS, COMMIT_MAX_MS = 150, 100, 1_000, 1_500
COMMIT_VERSION = 9
_AWAY = frozenset(
    (ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
)


class Connection:
    """A connection to one acceptor: N1."""

    def __init__(self, acceptor: Any, node: int) -> None:
        self.acceptor, self.node = acceptor, node
        self.is_open = True
        self.sent = self._received = 0
        self._held: dict[int, Any] = {}

    def arrive(self, number: int, partition: Any, group: str, make: Any, caller: Any) -> None:
        self._held[number] = (partition, group, make, caller)
        while self._received in self._held:
            arguments = self._held.pop(self._received)
            self._received += 1
            self.acceptor.coordinator.on_request(*arguments, self._is_open)

    def _is_open(self) -> bool:
        return self.is_open


class Member(Consumer):
    """Inherited methods use `world`, which is its group."""

    def __init__(self, group: MemberGroup, member_id: str) -> None:
        super().__init__(group, member_id, None)  # type: ignore[arg-type]
        self.group = group
        self.kernel = group.kernel
        self.process = Process(f"member {member_id}")
        self.connection: Connection | None = None
        # number -> when it is given up, and its content: a Send, a commit (offsets), an offset
        # fetch (the lowest valid result)
        self.under_way: dict[int, tuple[int, Any]] = {}
        self.failed: list[tuple[int, int]] = []  # when, number of a Send that could not be delivered
        self.positions: dict[Place, int] = {}  # of the partitions it works on, where known
        self._committed: dict[Place, int] = {}
        self._committing: dict[Place, int] | None = None  # in flight
        self._again: dict[Place, int] | None = None  # a failed commit, unchanged
        self._again_ms = 0
        self._asking: dict[Place, int] = {}  # start positions being fetched, in which request
        self._revoke_until_ms = -1
        self._epoch = -1  # the highest leader epoch of the coordinator's partition that it has used
        self._number = 1 << 20  # of requests that are not the core's
        self._timer: Timer | None = None

    # -- time --------------------------------------------------------------------------------------

    def wake(self, delay_ms: int = 0) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.kernel.timer(delay_ms * MILLISECOND, self.process, self._turn)

    def _turn(self) -> None:
        self.step()
        if self.is_gone:
            self.group.members.remove(self)
            self.group.groups.dirty = True
            self.process.die()
            return
        now_ms = self.group.now_ms
        times = [
            now_ms + POLL_MS,
            *[one[0] for one in self.failed],
            *[one[0] for one in self.under_way.values()],
            *[one[0] for one in self.names],
        ]
        if self.core.next_ms is not None:
            times.append(self.core.next_ms)
        self.wake(max(1, min(times) - now_ms))

    def step(self) -> None:
        now_ms = self.group.now_ms
        if self.connection is not None and (
            not self.connection.acceptor.process.alive or any(until <= now_ms for until, _ in self.under_way.values())
        ):
            self.break_connection()
        for one in [one for one in self.failed if one[0] <= now_ms]:
            self.failed.remove(one)
            self.give(ResponseMissing(one[1]))
        while self.requests:
            _, send = self.requests.popleft()
            timeout_s = self.core.timeout_s(send)
            if not self._send(
                send.number, send, self._event(send), REQUEST_MS if timeout_s is None else int(1_000 * timeout_s)
            ):
                self.failed.append((now_ms + AGAIN_MS, send.number))
        works_on = set(self.works_on)
        super().step()
        if works_on != self.works_on:
            self.group.groups.dirty = True

    # -- the network -------------------------------------------------------------------------------

    def _send(self, number: int, what: Any, make: Any, timeout_ms: int) -> bool:
        group = self.group
        world = group.cluster_world
        if self.connection is None:
            leader, epoch = world.leader_hint(group.partition)
            acceptor = world.hosts[leader].acceptor if leader >= 0 and epoch >= self._epoch else None
            if acceptor is None:
                return False
            self._epoch = epoch
            self.connection = Connection(acceptor, leader)
        connection, self.under_way[number] = self.connection, (group.now_ms + timeout_ms, what)
        caller = (world.client_node, self.process, self._on_reply, (connection, number))
        link = world.network.links[world.client_node][connection.node]
        double, link.double = link.double, 0.0
        world.network.send(
            world.client_node,
            connection.node,
            connection.acceptor.process,
            connection.arrive,
            connection.sent,
            group.partition,
            group.name,
            make,
            caller,
        )
        link.double = double
        connection.sent += 1
        return True

    def break_connection(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.is_open = False
        under_way, self.under_way = self.under_way, {}
        for number, (_, what) in under_way.items():
            if isinstance(what, Send):
                self.give(ResponseMissing(number))
            else:
                self._nothing_came(what)

    def _on_reply(self, token: tuple[Connection, int], error: int, response: Any, epoch: int) -> None:
        connection, number = token
        if connection is not self.connection or number not in self.under_way:
            return
        _, what = self.under_way.pop(number)
        self._epoch = max(self._epoch, epoch)
        if isinstance(what, Send):
            message = self._refusal(what.message, error) if error else response
            self.group.groups.received.add(message.error_code)
            if not message.error_code:
                self._was_reported(what.message, message)
            self.give(ResponseReceived(number, message))
        elif error or response.error:
            self.group.groups.refused.add(error or response.error)
            self._nothing_came(what)
        elif isinstance(response, OffsetsCommitted):
            self._on_committed(response)
        else:
            self._on_fetched(number, what, response)
        if error in _AWAY:
            self.break_connection()
        self.wake()

    # -- the application ---------------------------------------------------------------------------

    def _poll(self) -> None:
        """Works, and carries out the core's actions after a while; commits, fetches start
        positions.
        """
        now_ms = self.group.now_ms
        self.give(Polled())
        action = self.callback[1] if self.callback is not None else None
        going = places(action.partitions) if action is not None and not isinstance(action, Assign) else set()
        if going and (not isinstance(action, Revoke) or self.core.has_lost_partitions):
            self._forget(going)
        for place in self.positions:
            if place not in going:
                self.positions[place] += self.rng.randrange(3)
        if going or self.rng.random() < 0.3:
            self._commit()
        if self.callback is not None and self.callback[0] <= now_ms and not self._waits_for_commit(going):
            self.callback = None
            self._revoke_until_ms = -1
            self._forget(going)
            self.works_on -= going
            self.give(Done())
        self._request_positions()

    def _forget(self, gone: set[Place]) -> None:
        for place in gone:
            for known in (self.positions, self._committed, self._asking):
                known.pop(place, None)

    def _waits_for_commit(self, going: set[Place]) -> bool:
        if self.group.groups.is_over or all(
            self._committed.get(place) == position for place, position in self.positions.items() if place in going
        ):
            return False
        if self._revoke_until_ms < 0:
            self._revoke_until_ms = self.group.now_ms + COMMIT_MAX_MS
        return self.group.now_ms < self._revoke_until_ms

    def _topic(self, place: Place) -> str:
        raise NotImplementedError

    def _identity(self) -> tuple[str | None, int]:
        """The identity of the sender in requests."""
        return None, -1

    def _commit(self) -> None:
        core = self.core
        offsets = self._again or {
            place: position for place, position in self.positions.items() if self._committed.get(place) != position
        }
        if (
            self._committing is not None
            or self.group.now_ms < self._again_ms
            or not offsets
            or core.has_lost_partitions
            or core.generation < 0
            or self.group.groups.is_over
        ):
            return
        member_id, generation = core.member_id, core.generation
        message = tuple(
            [
                CommittedOffset(self._topic(place), place[1], position, -1, f"{member_id} {generation}")
                for place, position in offsets.items()
            ]
        )
        self._number += 1
        if self._send(
            self._number,
            offsets,
            lambda number: CommitOffsets(number, COMMIT_VERSION, member_id, None, generation, message),
            REQUEST_MS,
        ):
            self._committing = offsets

    def _on_committed(self, response: OffsetsCommitted) -> None:
        assert not any(response.errors)
        offsets, self._committing, self._again = self._committing, None, None
        for place, position in offsets.items():
            if place in self.positions:
                self._committed[place] = position
            key = (self._topic(place), place[1])
            self.group.acked[key] = max(position, self.group.acked.get(key, -1))

    def _request_positions(self) -> None:
        expected = sorted(place for place in self.works_on if place not in self.positions and place not in self._asking)
        if not expected or self.group.now_ms < self._again_ms or self.core.has_lost_partitions:
            return
        by_topic: dict[str, list[int]] = {}
        for place in expected:
            by_topic.setdefault(self._topic(place), []).append(place[1])
        topics = tuple([(topic, tuple(indexes)) for topic, indexes in by_topic.items()])
        member_id, epoch = self._identity()
        self._number += 1
        floor = [(place, self.group.acked.get((self._topic(place), place[1]), -1)) for place in expected]
        if self._send(
            self._number, floor, lambda number: FetchOffsets(number, topics, False, member_id, epoch), REQUEST_MS
        ):
            self._asking.update(dict.fromkeys(expected, self._number))

    def _on_fetched(self, number: int, floor: list[tuple[Place, int]], response: OffsetsFetched) -> None:
        found = {(topic, one.partition): one.offset for topic, partitions in response.topics for one in partitions}
        for place, least in floor:
            offset = found[self._topic(place), place[1]]
            if offset < least:
                raise Violation(
                    "C5",
                    f"{self.group.name}: {self._topic(place)}-{place[1]} is told to {self.core.member_id} as {offset};"
                    f" {least} was acknowledged before it asked",
                )
            if self._asking.get(place) == number:
                del self._asking[place]
                self.positions[place] = max(0, offset)

    def _nothing_came(self, what: Any) -> None:
        """A commit or an offset fetch was refused, or its outcome is unknown."""
        self._again_ms = self.group.now_ms + AGAIN_MS
        if isinstance(what, dict):
            self._again = what if "again" in self.group.cluster_world.off else None
            self._committing = None
        else:
            self._asking.clear()

    def wants(self, known: dict[str, int]) -> set[str]:
        """Existing topics that it subscribes to."""
        expected = self.core.subscription
        if expected is None:
            return set()
        return {
            topic
            for topic in known
            if topic in expected.topics or (expected.regex is not None and re.fullmatch(expected.regex, topic))
        }

    # -- the protocol ------------------------------------------------------------------------------

    def _event(self, send: Send) -> Any:
        raise NotImplementedError

    def _was_reported(self, request: Any, response: Any) -> None:
        raise NotImplementedError

    def _refusal(self, request: Any, error: int) -> Any:
        raise NotImplementedError


class ConsumerMember(Member):
    """KIP-848."""

    def __init__(self, group: MemberGroup, member_id: str) -> None:
        super().__init__(group, member_id)
        self.core = ConsumerProtocolCore(Settings(group.name, member_id, max_poll_interval_ms=MAX_POLL_MS))

    def _topic(self, place: Place) -> str:
        return self.group.cluster.topic_name(place[0])

    def _identity(self) -> tuple[str | None, int]:
        return self.core.member_id, self.core.epoch

    def _event(self, send: Send) -> Any:
        message: ConsumerGroupHeartbeatRequest = send.message
        return lambda number: ConsumerHeartbeat(number, message.member_id, "/h", message)

    def _was_reported(self, request: ConsumerGroupHeartbeatRequest, response: ConsumerGroupHeartbeatResponse) -> None:
        if request.member_epoch >= 0:
            self.group.report(self.core.member_id, response.member_epoch)

    def _refusal(self, request: Any, error: int) -> Any:
        return ConsumerGroupHeartbeatResponse(error_code=error)


class ClassicMember(Member):
    """JoinGroup, SyncGroup, Heartbeat, LeaveGroup."""

    def __init__(self, group: MemberGroup, member_id: str) -> None:
        super().__init__(group, member_id)
        self.core = ClassicCore(
            MemberSettings(
                group.name, None, SESSION_MS, INTERVAL_MS, MAX_POLL_MS, group.assignors, metadata_interval_ms=1_000
            )
        )
        self._synced_generation = -1

    def identity(self) -> set[Place]:
        return {(topic.encode(), index) for topic, index in self.core.owned}

    def _topic(self, place: Place) -> str:
        return place[0].decode()

    def _event(self, send: Send) -> Any:
        message = send.message
        match message:
            case JoinGroupRequest():
                new_id = f"{self.group.name}-id-{self.group.groups.new_number()}"
                return lambda number: JoinGroup(number, 9, "c", "/h", message, new_id)
            case HeartbeatRequest():
                return lambda number: Heartbeat(number, message)
            case LeaveGroupRequest():
                return lambda number: LeaveGroup(number, message)
        return lambda number: SyncGroup(number, message)

    def _was_reported(self, request: Any, response: Any) -> None:
        """A heartbeat may succeed in a generation that is not in the log yet, as in Kafka: after the
        response to JoinGroup, before that to SyncGroup.
        """
        if isinstance(request, JoinGroupRequest):
            self._synced_generation = -1
        elif isinstance(request, SyncGroupRequest):
            self._synced_generation = request.generation_id
            self.group.report(request.member_id, request.generation_id)
        elif isinstance(request, HeartbeatRequest) and request.generation_id == self._synced_generation:
            self.group.report(request.member_id, request.generation_id)

    def _refusal(self, request: Any, error: int) -> Any:
        match request:
            case JoinGroupRequest():
                return JoinGroupResponse(error_code=error, member_id=request.member_id, protocol_name=None)
            case HeartbeatRequest():
                return HeartbeatResponse(error_code=error)
            case LeaveGroupRequest():
                return LeaveGroupResponse(error_code=error)
        return SyncGroupResponse(error_code=error)
