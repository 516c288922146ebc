"""The leader's view of the replicas that fetch from it, and the response to DescribeQuorum."""

from __future__ import annotations

import msgspec

from mqd.cluster.raft.messages import ReplicaKey


class ReplicaView(msgspec.Struct, frozen=True):
    key: ReplicaKey
    log_end_offset: int  # -1 = not known
    last_fetch_age_ns: int  # -1 = never
    last_caught_up_age_ns: int


class QuorumView(msgspec.Struct, frozen=True):
    """The content of DescribeQuorum (API 55, KIP-836)."""

    leader: int
    epoch: int
    high_watermark: int
    voters: tuple[ReplicaView, ...]
    observers: tuple[ReplicaView, ...]


class Replica(msgspec.Struct):
    """A replica that fetches from this leader."""

    key: ReplicaKey
    position: int = -1  # the offset that it reported as durable (D1 in leader.py)
    stamp_ns: int = 0  # the newest of this leader's stamps that the replica has echoed
    last_contact_ns: int = -1  # when it last fetched records or a snapshot
    caught_up_ns: int = -1  # when it last had all records of this log (KIP-836)
    fetched_ns: int = -1  # time of its last Fetch of records
    fetched_end_offset: int = -1  # the end of this log at that time

    def on_fetched(self, offset: int, end_offset: int, now_ns: int) -> None:
        """Updates `caught_up_ns`. In a log that grows constantly a replica never reaches the end; so it
        is treated as caught up at its previous fetch if it has now reached the end as of that fetch.
        """
        if offset >= end_offset:
            self.caught_up_ns = now_ns
        elif 0 <= self.fetched_end_offset <= offset:
            self.caught_up_ns = max(self.caught_up_ns, self.fetched_ns)
        self.fetched_ns, self.fetched_end_offset = now_ns, end_offset

    def view(self, now_ns: int) -> ReplicaView:
        return ReplicaView(
            self.key,
            self.position,
            now_ns - self.last_contact_ns if self.last_contact_ns >= 0 else -1,
            now_ns - self.caught_up_ns if self.caught_up_ns >= 0 else -1,
        )
