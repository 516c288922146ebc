"""A shell for one group's core: requests by number, timers by name, a log in memory. A core's
records are written at once; `written=False` holds responses back as a disk would.
"""

from __future__ import annotations

from mqd.coordinator.actions import Persist, Reply, Timer, TimerFired
from mqd.coordinator.group.classic.events import Heartbeat, JoinGroup, LeaveGroup, SyncGroup
from mqd.coordinator.group.group import DeleteGroup, Group
from mqd.coordinator.group.offsets import OffsetsSettings
from mqd.coordinator.group.settings import ClassicSettings
from mqd.protocol.messages import HeartbeatRequest, JoinGroupRequest, LeaveGroupRequest, SyncGroupRequest


class GroupShell:
    def __init__(self, **settings: int) -> None:
        self.settings = ClassicSettings(**{"initial_rebalance_delay_ms": 0, **settings})
        self.core = Group("g", self.settings, OffsetsSettings())
        self.now = 1_000_000
        self.number = 0
        self.replies: dict[int, object] = {}
        self.timers: dict[str, int] = {}
        self.log: list[tuple[bytes, bytes | None]] = []

    @property
    def classic(self):
        return self.core.classic

    def handle(self, event: object) -> None:
        for action in self.core.handle(event, self.now):
            self._do(action)
        self.core.check()

    def _do(self, action: object) -> None:
        match action:
            case Reply(request, response):
                assert request not in self.replies
                self.replies[request] = response
            case Persist(records):
                self.log.extend(records)
            case Timer(name, at_ms):
                self.timers.pop(name, None)
                if at_ms is not None:
                    self.timers[name] = at_ms

    def advance(self, by_ms: int) -> None:
        end = self.now + by_ms
        while due := sorted((at, name) for name, at in self.timers.items() if at <= end):
            at, name = due[0]
            self.now = max(self.now, at)
            del self.timers[name]
            self.handle(TimerFired(name))
        self.now = end

    def restart(self) -> None:
        self.core = Group("g", self.settings, OffsetsSettings())
        for key, value in self.log:
            self.core.replay(key, value)
        self.timers.clear()
        for action in self.core.on_loaded(self.now):
            self._do(action)
        self.core.check()

    # -- requests ----------------------------------------------------------------------------------

    def _send_request(self, make) -> int:
        self.number += 1
        self.handle(make(self.number))
        return self.number

    def reply(self, number: int):
        return self.replies.get(number)

    def join(
        self,
        member_id: str = "",
        *,
        version: int = 9,
        instance: str | None = None,
        protocols: dict[str, bytes] | None = None,
        session: int = 10_000,
        rebalance: int = 60_000,
        kind: str = "consumer",
    ) -> int:
        offered = [
            JoinGroupRequest.Protocol(name=name, metadata=data) for name, data in (protocols or {"range": b"m"}).items()
        ]
        message = JoinGroupRequest(
            group_id="g",
            session_timeout_ms=session,
            rebalance_timeout_ms=rebalance,
            member_id=member_id,
            group_instance_id=instance,
            protocol_type=kind,
            protocols=offered,
        )
        return self._send_request(
            lambda number: JoinGroup(number, version, "client", "/10.0.0.1", message, f"{instance or 'm'}-{number}")
        )

    def join_twice(self, **options) -> tuple[int, str]:
        """As clients since KIP-394: without an id, then with the assigned one. Returns the second
        request's number and the id.
        """
        member_id = self.reply(self.join(**options)).member_id
        return self.join(member_id, **options), member_id

    def sync(
        self,
        member_id: str,
        generation: int,
        assignments: dict[str, bytes] | None = None,
        *,
        instance: str | None = None,
        protocol: str | None = "range",
    ) -> int:
        given = [
            SyncGroupRequest.Assignment(member_id=name, assignment=data) for name, data in (assignments or {}).items()
        ]
        message = SyncGroupRequest(
            group_id="g",
            generation_id=generation,
            member_id=member_id,
            group_instance_id=instance,
            protocol_type="consumer",
            protocol_name=protocol,
            assignments=given,
        )
        return self._send_request(lambda number: SyncGroup(number, message))

    def beat(self, member_id: str, generation: int, instance: str | None = None) -> int:
        """Returns the error code."""
        message = HeartbeatRequest(
            group_id="g", generation_id=generation, member_id=member_id, group_instance_id=instance
        )
        return self.reply(self._send_request(lambda number: Heartbeat(number, message))).error_code

    def leave(self, *members: tuple[str, str | None]) -> list[int]:
        named = [
            LeaveGroupRequest.MemberIdentity(member_id=member_id, group_instance_id=instance)
            for member_id, instance in members
        ]
        message = LeaveGroupRequest(group_id="g", members=named)
        return [
            one.error_code for one in self.reply(self._send_request(lambda number: LeaveGroup(number, message))).members
        ]

    def delete(self) -> int:
        return self.reply(self._send_request(DeleteGroup))

    def stable(self, count: int, instances: bool = False, **options) -> list[str]:
        """A stable group of `count` members; the first one leads. They have the assignments a0, a1
        ...
        """
        joins = [
            self.join(version=3 if not instances else 9, instance=f"i{number}" if instances else None, **options)
            for number in range(count)
        ]
        self.advance(1)
        if len({self.reply(number).generation_id for number in joins if self.reply(number)}) != 1:
            raise AssertionError("the members did not join together: give the group an initial delay")
        ids = [self.reply(number).member_id for number in joins]
        generation = self.classic.generation
        for number in range(1, count):
            self.sync(ids[number], generation, instance=f"i{number}" if instances else None)
        self.sync(
            ids[0],
            generation,
            {name: b"a%d" % number for number, name in enumerate(ids)},
            instance="i0" if instances else None,
        )
        assert self.core.state_name == "Stable"
        return ids
