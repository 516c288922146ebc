"""A shell for one group with the KIP-848 protocol, on top of group_shell.py: heartbeats by
member, topics set by the test.
"""

from __future__ import annotations

import struct

from mqd.coordinator.group.classic.events import JoinGroup
from mqd.coordinator.group.consumer.cluster import ClientIdentity, FixedCluster
from mqd.coordinator.group.consumer.events import ConsumerDescribe, ConsumerHeartbeat
from mqd.coordinator.group.group import Group
from mqd.coordinator.group.offsets import OffsetsSettings
from mqd.coordinator.group.settings import ConsumerSettings
from mqd.protocol.messages import ConsumerGroupHeartbeatRequest, JoinGroupRequest
from tests.unit.coordinator.group_shell import GroupShell

_Partitions = ConsumerGroupHeartbeatRequest.TopicPartitions


def subscription(*topics: str, owned: dict[str, tuple[int, ...]] | None = None) -> bytes:
    """The metadata of a classic member, version 1."""

    def string(text: str) -> bytes:
        return struct.pack(">h", len(text)) + text.encode()

    out = struct.pack(">hi", 1, len(topics)) + b"".join(map(string, topics)) + struct.pack(">i", -1)
    held = owned or {}
    return (
        out
        + struct.pack(">i", len(held))
        + b"".join(
            string(name) + struct.pack(f">i{len(indexes)}i", len(indexes), *indexes) for name, indexes in held.items()
        )
    )


class ConsumerShell(GroupShell):
    def __init__(self, topics: dict[str, int] | None = None, **settings: object) -> None:
        super().__init__()
        self.cluster = FixedCluster({"a": 4} if topics is None else topics, ConsumerSettings(**settings))
        self.principal = ""  # of heartbeats
        self.core = self._new()

    def _new(self) -> Group:
        return Group("g", self.settings, OffsetsSettings(), self.cluster)

    def restart(self) -> None:
        self.core = self._new()
        for key, value in dict(self.log).items():  # as in a compacted log
            if value is not None:
                self.core.replay(key, value)
        self.timers.clear()
        for action in self.core.on_loaded(self.now):
            self._do(action)
        self.core.check()

    def send_request(self, make) -> object:
        """The response to an event that gets one at once."""
        self.number += 1
        self.handle(make(self.number))
        return self.replies[self.number]

    def heartbeat(self, member_id: str, epoch: int, owned: dict[str, tuple[int, ...]] | None = None, **fields: object):
        if owned is not None:
            fields["topic_partitions"] = [
                _Partitions(topic_id=self.cluster.topics[name].topic_id, partitions=list(indexes))
                for name, indexes in owned.items()
            ]
        authorized_as = ClientIdentity(self.principal, "10.0.0.1") if self.principal else None
        message = ConsumerGroupHeartbeatRequest(group_id="g", member_id=member_id, member_epoch=epoch, **fields)
        return self.send_request(
            lambda number: ConsumerHeartbeat(number, "client", "/10.0.0.1", message, "made-up", authorized_as)
        )

    def enter(self, member_id: str, *names: str, **fields: object):
        fields = {"rebalance_timeout_ms": 10_000, "subscribed_topic_names": list(names or ("a",)), **fields}
        return self.heartbeat(member_id, 0, {}, **fields)

    def report(self, response) -> dict[str, tuple[int, ...]] | None:
        if response.assignment is None:
            return None
        return {
            self.cluster.topic_name(one.topic_id) or "?": tuple(one.partitions)
            for one in response.assignment.topic_partitions
        }

    def classic_join(
        self,
        member_id: str,
        *topics: str,
        owned: dict[str, tuple[int, ...]] | None = None,
        version: int = 3,
        instance_id: str | None = None,
        protocol: str = "range",
        metadata: bytes | None = None,
    ) -> int:
        self.number += 1
        if metadata is None:
            metadata = subscription(*(topics or ("a",)), owned=owned)
        protocols = [JoinGroupRequest.Protocol(name=protocol, metadata=metadata)]
        message = JoinGroupRequest(
            group_id="g",
            session_timeout_ms=10_000,
            rebalance_timeout_ms=20_000,
            member_id=member_id,
            group_instance_id=instance_id,
            protocol_type="consumer",
            protocols=protocols,
        )
        self.handle(JoinGroup(self.number, version, "old", "/10.0.0.2", message, f"c-{self.number}"))
        return self.number

    def describe(self):
        return self.send_request(ConsumerDescribe)

    @property
    def consumer(self):
        return self.core.consumer
