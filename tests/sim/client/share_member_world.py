"""A share group's member against brokers that check it: two leaders, locks, sessions, and faults
drawn from a seed (lost responses, leaders that move, members that are fenced). Cores only, without
I/O.
"""

from __future__ import annotations

import collections
import random
from typing import Any

from mqd.client import requests
from mqd.client.messages import KafkaError, local_error
from mqd.client.share.core import SHARE_GROUP_HEARTBEAT, Settings, ShareCore
from mqd.client.share.events import (
    ACCEPT,
    GAP,
    REJECT,
    RELEASE,
    RENEW,
    Limits,
    Range,
    Send,
    Target,
    TopicIdPartition,
    TopicPartitionKey,
)
from mqd.client.share.session import SHARE_FETCH
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import (
    FindCoordinatorResponse,
    MetadataResponse,
    ShareAcknowledgeResponse,
    ShareFetchResponse,
    ShareGroupHeartbeatResponse,
)
from mqd.protocol.records import Record, encode_batch

TOPIC, TOPIC_ID = "jobs", b"\7" * 16
NODES, PARTITIONS = (1, 2), 3
LOCK_MS = 400
BATCH_RECORDS = 8


class Lot:
    """The group's view of a partition's records: offset -> (state, holder, end of lock, count)."""

    def __init__(self, offsets: int, gaps: set[int]) -> None:
        self.gaps, self.end = gaps, offsets
        self.state = dict.fromkeys(range(offsets), "free")
        self.holder: dict[int, tuple[int, int]] = {}  # session, lock's end
        self.count: collections.Counter[int] = collections.Counter()

    def expire(self, now_ms: int) -> None:
        for offset, (_, until) in list(self.holder.items()):
            if now_ms >= until:
                self.release(offset)

    def release(self, offset: int) -> None:
        del self.holder[offset]
        self.state[offset] = "free"

    def acquire(self, count: int, session: int, now_ms: int) -> list[int]:
        found = [offset for offset in range(self.end) if self.state[offset] == "free"][:count]
        for offset in found:
            self.state[offset], self.holder[offset] = "held", (session, now_ms + LOCK_MS)
            self.count[offset] += 1
        return found

    def batches(self, offsets: list[int]) -> bytes:
        """Whole batches, as in the log."""
        out = b""
        for base in sorted({offset - offset % BATCH_RECORDS for offset in offsets}):
            last = min(base + BATCH_RECORDS, self.end) - 1
            records = [
                Record(b"%d" % offset, None, 1, offset=offset)
                for offset in range(base, last + 1)
                if offset not in self.gaps
            ]
            out += encode_batch(records, base_offset=base, last_offset_delta=last - base)
        return out


class World:
    def __init__(self, seed: int, offsets: int = 24, faults: float = 0.05) -> None:
        self.random = random.Random(seed)
        gaps = lambda: {offset for offset in range(offsets) if self.random.random() < 0.1}
        self.lots = [Lot(offsets, gaps()) for _ in range(PARTITIONS)]
        self.leaders = [NODES[index % len(NODES)] for index in range(PARTITIONS)]
        self.faults = faults
        self.now_ms = 1_000
        self.core = ShareCore(Settings("group", "member", max_poll_interval_ms=60_000))
        self.sessions: dict[int, tuple[int, int]] = {}  # by node: number, next epoch
        self.session_count = 0
        self.member_epoch = 0
        self.wire: dict[Target, collections.deque[Send]] = {}
        self.unconfirmed: dict[tuple[TopicPartitionKey, int], int] = {}  # acknowledgements without a result
        self.accepted: collections.Counter[tuple[int, int]] = collections.Counter()
        self.is_waiting = False
        self.lost = 0

    # -- time and the wire -------------------------------------------------------------------------

    def settle(self, ms: int) -> None:
        """Advances the time."""
        until = self.now_ms + ms
        while self.now_ms < until:
            self.pump()
            self.now_ms += self.random.randint(1, 20)
            self.core.advance(self.now_ms)
            self.core.check()

    def pump(self) -> None:
        for send in self.core.take_sends():
            if send.api_key == SHARE_FETCH:
                assert self.is_waiting, "C3: a fetch while the application does not wait"
                fetching = [
                    one
                    for one in self.core.sessions.values()
                    if one.request_under_way and one.request_under_way.api_key == SHARE_FETCH
                ]
                assert not send.message.share_acquire_mode or len(fetching) == 1, "C4"
            self.wire.setdefault(send.target, collections.deque()).append(send)
        for target in self.random.sample(sorted(self.wire), len(self.wire)):
            if self.wire[target] and self.random.random() < 0.6:
                self.serve(self.wire[target].popleft())

    def serve(self, send: Send) -> None:
        for lot in self.lots:
            lot.expire(self.now_ms)
        if self.random.random() < self.faults:
            self.fail(send)
            return
        self.core.on_response(send.number, self.respond(send), None, self.now_ms)
        self.take_outcomes()

    def fail(self, send: Send) -> None:
        """The connection ends, before or after the broker has handled the request."""
        self.lost += 1
        if self.random.random() < 0.5:
            self.respond(send)
        if send.target.kind == "share" and send.target.node_id in self.sessions:
            self.end_session(send.target.node_id)
        error = local_error(KafkaError._TRANSPORT, "lost", retriable=True)
        self.core.on_response(send.number, None, error, self.now_ms)
        self.take_outcomes()

    def end_session(self, node_id: int) -> None:
        number, _ = self.sessions.pop(node_id)
        for lot in self.lots:
            for offset in [offset for offset, (holder, _) in lot.holder.items() if holder == number]:
                lot.release(offset)

    # -- the brokers -------------------------------------------------------------------------------

    def respond(self, send: Send) -> Any:
        if send.api_key == requests.METADATA:
            return self.metadata()
        if send.api_key == requests.FIND_COORDINATOR:
            coordinator = FindCoordinatorResponse.Coordinator(key="group", node_id=1, host="one", port=1)
            return FindCoordinatorResponse(coordinators=[coordinator])
        if send.api_key == SHARE_GROUP_HEARTBEAT:
            return self.heartbeat(send.message)
        return self.share(send)

    def metadata(self) -> MetadataResponse:
        return MetadataResponse(
            brokers=[MetadataResponse.Broker(node_id=node, host=f"node-{node}", port=node) for node in NODES],
            topics=[
                MetadataResponse.Topic(
                    name=TOPIC,
                    topic_id=TOPIC_ID,
                    partitions=[
                        MetadataResponse.Partition(partition_index=index, leader_id=leader)
                        for index, leader in enumerate(self.leaders)
                    ],
                )
            ],
        )

    def heartbeat(self, message: Any) -> ShareGroupHeartbeatResponse:
        if message.member_epoch == -1:
            self.member_epoch = 0
            return ShareGroupHeartbeatResponse(member_epoch=-1)
        if message.member_epoch == 0:
            assert message.subscribed_topic_names, "G2"
            self.member_epoch += 1
        elif message.member_epoch != self.member_epoch or self.random.random() < self.faults:
            self.member_epoch += 10
            return ShareGroupHeartbeatResponse(error_code=ErrorCode.FENCED_MEMBER_EPOCH)
        partitions = sorted(self.random.sample(range(PARTITIONS), self.random.randint(1, PARTITIONS)))
        topics = [ShareGroupHeartbeatResponse.TopicPartitions(topic_id=TOPIC_ID, partitions=partitions)]
        return ShareGroupHeartbeatResponse(
            member_epoch=self.member_epoch,
            heartbeat_interval_ms=200,
            assignment=ShareGroupHeartbeatResponse.Assignment(topic_partitions=topics),
        )

    def share(self, send: Send) -> Any:
        node, message = send.target.node_id, send.message
        is_fetch = send.api_key == SHARE_FETCH
        kind = ShareFetchResponse if is_fetch else ShareAcknowledgeResponse
        epoch, expected = message.share_session_epoch, self.sessions.get(node, (0, -1))[1]
        acknowledgements = self.acknowledgements_of(message)
        if epoch == 0:
            assert is_fetch and not acknowledgements, "H2"
            if node in self.sessions:
                self.end_session(node)
            self.session_count += 1
            self.sessions[node] = self.session_count, 1
        elif node not in self.sessions:
            return kind(error_code=ErrorCode.SHARE_SESSION_NOT_FOUND)
        elif epoch > 0:
            assert epoch == expected, f"H1: epoch {epoch} where {expected} was due"
            self.sessions[node] = self.sessions[node][0], expected + 1
        codes = {key: self.acknowledge(node, key, ranges) for key, ranges in acknowledgements.items()}
        if epoch == -1:
            self.end_session(node)
        if not is_fetch:
            return self.acknowledged(codes)
        return self.fetched(node, message, codes)

    def acknowledgements_of(self, message: Any) -> dict[TopicIdPartition, list[Range]]:
        found: dict[TopicIdPartition, list[Range]] = {}
        for topic in message.topics:
            for one in topic.partitions:
                ranges = [
                    Range(each.first_offset, each.last_offset, each.acknowledge_types[0])
                    for each in one.acknowledgement_batches
                ]
                assert all(a.last < b.first for a, b in zip(ranges, ranges[1:], strict=False)), "H4"
                if ranges:
                    found[topic.topic_id, one.partition_index] = ranges
        return found

    def acknowledge(self, node: int, key: TopicIdPartition, ranges: list[Range]) -> int:
        lot, number = self.lots[key[1]], self.sessions[node][0]
        offsets = [(offset, one.type) for one in ranges for offset in range(one.first, one.last + 1)]
        if self.leaders[key[1]] != node:
            return ErrorCode.NOT_LEADER_OR_FOLLOWER
        if any(lot.holder.get(offset, (0, 0))[0] != number for offset, _ in offsets):
            return ErrorCode.INVALID_RECORD_STATE
        for offset, kind in offsets:
            assert (kind == GAP) == (offset in lot.gaps), f"offset {offset} is acknowledged as {kind}"
            if kind == RENEW:
                lot.holder[offset] = number, self.now_ms + LOCK_MS
                continue
            lot.release(offset)
            if kind in (GAP, ACCEPT, REJECT):
                lot.state[offset] = "done"
                self.accepted[key[1], offset] += kind == ACCEPT
        return 0

    def acknowledged(self, codes: dict[TopicIdPartition, int]) -> ShareAcknowledgeResponse:
        partitions = [
            ShareAcknowledgeResponse.Partition(partition_index=key[1], error_code=code) for key, code in codes.items()
        ]
        return ShareAcknowledgeResponse(
            responses=[ShareAcknowledgeResponse.Topic(topic_id=TOPIC_ID, partitions=partitions)]
        )

    def fetched(self, node: int, message: Any, codes: dict[TopicIdPartition, int]) -> ShareFetchResponse:
        left, partitions = message.max_records, []
        for index, lot in enumerate(self.lots):
            one = ShareFetchResponse.Partition(
                partition_index=index, acknowledge_error_code=codes.get((TOPIC_ID, index), 0)
            )
            if self.leaders[index] != node:
                if (TOPIC_ID, index) in codes or any(
                    p.partition_index == index for t in message.topics for p in t.partitions
                ):
                    one.error_code = ErrorCode.NOT_LEADER_OR_FOLLOWER
                    leader = ShareFetchResponse.LeaderIdAndEpoch(leader_id=self.leaders[index], leader_epoch=1)
                    one.current_leader = leader
                    partitions.append(one)
                continue
            offsets = lot.acquire(min(left, self.random.randint(0, 12)), self.sessions[node][0], self.now_ms)
            left -= len(offsets)
            one.records = lot.batches(offsets)
            one.acquired_records = [
                ShareFetchResponse.AcquiredRecords(first_offset=at, last_offset=at, delivery_count=lot.count[at])
                for at in offsets
            ]
            partitions.append(one)
        return ShareFetchResponse(
            acquisition_lock_timeout_ms=LOCK_MS,
            responses=[ShareFetchResponse.Topic(topic_id=TOPIC_ID, partitions=partitions)],
        )

    # -- the application ---------------------------------------------------------------------------

    def poll(self) -> list[Any]:
        limits = Limits(self.random.randint(1, 10), 50, self.random.random() < 0.3)
        self.is_waiting = True
        self.core.set_limits(limits, self.now_ms)
        self.settle(self.random.randint(10, 200))
        self.pump_sent()
        found = self.core.take(limits.records_max, self.now_ms)
        if not found:
            self.core.set_limits(None, self.now_ms)
        self.core.advance(self.now_ms)
        for send in self.core._sends:
            assert send.api_key != SHARE_FETCH or not found, "C3: a fetch ahead of the application"
        self.pump_sent()
        self.is_waiting = False
        return found

    def pump_sent(self) -> None:
        for send in self.core.take_sends():
            self.wire.setdefault(send.target, collections.deque()).append(send)

    def work(self, messages: list[Any]) -> None:
        self.random.shuffle(messages)
        for message in messages:
            topic_partition, offset = (message.topic(), message.partition()), message.offset()
            if self.random.random() < 0.1:
                assert self.core.acknowledge(topic_partition, offset, RENEW)
                self.core.flush(self.now_ms)
                self.settle(100)
            kind = self.random.choices((ACCEPT, RELEASE, REJECT), (8, 2, 1))[0]
            assert self.core.acknowledge(topic_partition, offset, kind), "C1: a record that was handed out is held"
            assert not self.core.acknowledge(topic_partition, offset, kind), "C1: once"
            self.unconfirmed[topic_partition, offset] = self.unconfirmed.get((topic_partition, offset), 0) + 1
            self.take_outcomes()
        if self.random.random() < 0.5:
            self.core.flush(self.now_ms)
            self.settle(100)

    def take_outcomes(self) -> None:
        while self.core.outcomes:
            outcome = self.core.outcomes.popleft()
            for one in outcome.ranges:
                assert one.type != GAP
                for offset in range(one.first, one.last + 1):
                    if one.type == RENEW:
                        continue
                    due = self.unconfirmed.get((outcome.topic_partition, offset), 0)
                    assert due > 0, f"C2: {outcome} of an acknowledgement that was not given, or was reported already"
                    self.unconfirmed[outcome.topic_partition, offset] = due - 1

    def move_a_leader(self) -> None:
        index = self.random.randrange(PARTITIONS)
        self.leaders[index] = self.random.choice(NODES)
        for offset in list(self.lots[index].holder):
            self.lots[index].release(offset)


def run(seed: int, turns: int = 60) -> World:
    world = World(seed)
    world.core.subscribe((TOPIC,), world.now_ms)
    for turn in range(turns):
        world.work(world.poll())
        if world.random.random() < 0.05:
            world.move_a_leader()
        if turn == turns // 2 and world.random.random() < 0.5:
            world.core.subscribe((), world.now_ms)
            world.settle(100)
            world.core.subscribe((TOPIC,), world.now_ms)
    world.faults = 0
    for _ in range(200):
        if all(state == "done" for lot in world.lots for state in lot.state.values()):
            break
        world.work(world.poll())
    else:
        raise AssertionError("records are left that the member never finished")
    world.core.close(world.now_ms)
    world.settle(2_000)
    assert world.core.is_closed and not world.sessions, "it has not ended its sessions and left"
    assert not any(world.unconfirmed.values()), "C2: acknowledgements without an outcome"
    assert all(count <= 1 for count in world.accepted.values())
    return world
