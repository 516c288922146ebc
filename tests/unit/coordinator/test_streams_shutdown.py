"""A member of a streams group that requests the shutdown of its application, as in Apache Kafka 4.2
(StreamsGroup.setShutdownRequestMemberId): all members learn of it, new ones too, until the group is empty.
"""

from __future__ import annotations

from mqd.coordinator.actions import Persist, Reply
from mqd.coordinator.group.consumer.cluster import FixedCluster
from mqd.coordinator.group.group import Group
from mqd.coordinator.group.offsets import OffsetsSettings
from mqd.coordinator.group.settings import ClassicSettings
from mqd.coordinator.group.streams.core import SHUTDOWN_APPLICATION
from mqd.coordinator.group.streams.events import StreamsHeartbeat
from mqd.protocol.messages import StreamsGroupHeartbeatRequest, StreamsGroupHeartbeatResponse
from tests.property.streams_group_histories import topology

NOW_MS = 1_000


class Application:
    def __init__(self) -> None:
        self.cluster = FixedCluster({"orders": 2, "payments": 2, "by-number": 2, "joined-changelog": 2})
        self.group = self._new()
        self.log: dict[bytes, bytes | None] = {}
        self.epochs: dict[str, int] = {}

    def _new(self) -> Group:
        return Group("g", ClassicSettings(), OffsetsSettings(), self.cluster)

    def heartbeat(self, name: str, shutdown: bool = False) -> str | None:
        """The member's next heartbeat, or its first; the detail of the status SHUTDOWN_APPLICATION, if it has that."""
        epoch = self.epochs.get(name, 0)
        message = StreamsGroupHeartbeatRequest(
            group_id="g", member_id=name, member_epoch=epoch, shutdown_application=shutdown
        )
        if not epoch:
            message.rebalance_timeout_ms, message.topology, message.process_id = 1_000, topology(), name
            message.active_tasks, message.standby_tasks, message.warmup_tasks = [], [], []
        response = self._send(name, message)
        self.epochs[name] = response.member_epoch
        details = [one.status_detail for one in response.status or () if one.status_code == SHUTDOWN_APPLICATION]
        return details[0] if details else None

    def leave(self, name: str, shutdown: bool = False) -> None:
        del self.epochs[name]
        self._send(
            name,
            StreamsGroupHeartbeatRequest(group_id="g", member_id=name, member_epoch=-1, shutdown_application=shutdown),
        )

    def _send(self, name: str, message: StreamsGroupHeartbeatRequest) -> StreamsGroupHeartbeatResponse:
        outcome = None
        for action in self.group.handle(StreamsHeartbeat(1, name, "/h", message), NOW_MS):
            if isinstance(action, Persist):
                self.log.update(action.records)
            elif isinstance(action, Reply):
                outcome = action.response
        self.group.check()
        assert outcome is not None and not outcome.response.error_code, outcome
        return outcome.response

    def restart_coordinator(self) -> None:
        self.group = self._new()
        for key, value in self.log.items():
            if value is not None:
                self.group.replay(key, value)
        list(self.group.on_loaded(NOW_MS))


def test_all_members_learn_of_it_until_the_group_is_empty() -> None:
    application = Application()
    assert [application.heartbeat(name) for name in ("a", "b", "a")] == [None] * 3
    told = application.heartbeat("b", shutdown=True)
    assert (
        told == "Streams group member b encountered a fatal error and requested a shutdown for the entire application."
    )
    assert application.heartbeat("a") == application.heartbeat("b") == told
    assert application.heartbeat("a", shutdown=True) == told  # the first one is named
    assert application.heartbeat("new") == told
    application.leave("b")
    assert application.heartbeat("a") == told  # though its requester has left
    application.leave("a")
    application.leave("new")
    assert application.heartbeat("a") is None  # the application was started again


def test_a_member_may_request_it_as_it_leaves() -> None:
    application = Application()
    application.heartbeat("a")
    application.heartbeat("b")
    application.leave("b", shutdown=True)
    assert "member b " in (application.heartbeat("a") or "")
    application.leave("a", shutdown=True)
    assert application.heartbeat("a") is None


def test_another_coordinator_does_not_know_of_it() -> None:
    application = Application()
    application.heartbeat("a")
    assert application.heartbeat("b", shutdown=True)
    application.restart_coordinator()
    assert application.heartbeat("a") is None
