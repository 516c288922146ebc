"""A member of a share group: its membership, its sessions with the leaders, and the records that the
application has received and not acknowledged. Sans-I/O: methods take the time, take_sends() returns
the requests to send, on_response() takes their responses.

Invariants
    C1  a record that the application received is in `held` until it is acknowledged, which happens once
    C2  each acknowledgement has one Outcome, or is lost with the process
    C3  records are fetched only while the application waits for them, so that it has the full
        duration of their locks. Records that arrive after it has stopped waiting are kept, and
        dropped when their locks expire
    C4  with strict limits a fetch is sent to one leader at a time
    C5  next_ms is never later than the time when the core has something to do
Bounds: `ready` has at most one response per leader; only the oldest PROBLEMS_MAX problems are kept.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from mqd.client import requests
from mqd.client.messages import KafkaError, KafkaException
from mqd.client.requests import TopicInfo
from mqd.client.retrying import COORDINATOR_MOVED, backoff_ms
from mqd.client.share import records
from mqd.client.share.events import (
    ACCEPT,
    GAP,
    RENEW,
    Limits,
    Outcome,
    Problem,
    Range,
    Send,
    Target,
    TopicIdPartition,
    TopicPartitionKey,
)
from mqd.client.share.membership import Membership
from mqd.client.share.session import SESSION_LOST, SHARE_ACKNOWLEDGE, SHARE_FETCH, Results, Session
from mqd.protocol.errors import ErrorCode, ProtocolError, error_message, error_name
from mqd.protocol.messages import FindCoordinatorRequest

SHARE_GROUP_HEARTBEAT = 76
PROBLEMS_MAX = 100
NEVER_MS = 1 << 62
ONE_LEADER_WAIT_MS = 50  # with strict limits and several leaders: how long one of them may park the request
CONTROL = Target("control")
_MOVED = frozenset(
    {
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.FENCED_LEADER_EPOCH,
        ErrorCode.LEADER_NOT_AVAILABLE,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.UNKNOWN_TOPIC_ID,
        ErrorCode.INCONSISTENT_TOPIC_ID,
        ErrorCode.KAFKA_STORAGE_ERROR,
    }
)
# lasting errors of a topic: metadata that is requested again soon would still have them
_LASTING_TOPIC_ERRORS = frozenset({ErrorCode.TOPIC_AUTHORIZATION_FAILED, ErrorCode.INVALID_TOPIC_EXCEPTION})
_REPORTED = frozenset(
    {
        ErrorCode.TOPIC_AUTHORIZATION_FAILED,
        ErrorCode.GROUP_AUTHORIZATION_FAILED,
        ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
        ErrorCode.SHARE_SESSION_LIMIT_REACHED,
        ErrorCode.INVALID_REQUEST,
    }
)


# the owner of a record: the session in which it was acquired, and its partition
Owner = tuple[Session, TopicIdPartition]


class Settings(NamedTuple):
    group_id: str
    member_id: str
    rack_id: str | None = None
    max_poll_interval_ms: int = 300_000
    metadata_max_age_ms: int = 300_000
    check_crcs: bool = True
    creates_topics: bool = False


class _ReadyRecords:
    """Fetched records of one partition that the application has not received yet."""

    __slots__ = ("position", "deadline_ms", "messages", "offsets", "owner", "topic_partition")

    def __init__(
        self, topic_partition: TopicPartitionKey, owner: Owner, fetched: records.Fetched, deadline_ms: int
    ) -> None:
        self.topic_partition, self.owner = topic_partition, owner
        self.deadline_ms = deadline_ms  # when their locks expire
        self.messages, self.offsets, self.position = fetched.messages, fetched.offsets, 0


class ShareCore:
    """See the module."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.membership = Membership(
            settings.group_id, settings.member_id, settings.rack_id, settings.max_poll_interval_ms
        )
        self.subscription: tuple[str, ...] = ()
        self.topics: dict[str, TopicInfo] = {}
        self.names: dict[bytes, str] = {}
        self.nodes: dict[int, tuple[str, int]] = {}
        self.coordinator: int | None = None
        self.sessions: dict[int, Session] = {}
        self.held: dict[TopicPartitionKey, dict[int, Owner]] = {}
        self.ready: deque[_ReadyRecords] = deque()
        self.outcomes: deque[Outcome] = deque()
        self.problems: deque[Problem] = deque()
        self.limits: Limits | None = None  # None: the application does not wait for records
        self.fatal: Problem | None = None
        self.is_closing = False
        self.has_metadata = False  # metadata has arrived: the nodes are known
        self._sends: list[Send] = []
        self._request_number = 0
        self._requests_under_way: dict[int, tuple[str, Any]] = {}
        self._retry_ms: dict[str | int, int] = {}  # "metadata", "coordinator" or a leader's id -> next attempt
        self._failures: dict[str | int, int] = {}
        self._metadata_due_ms: int | None = None
        self._lookups_under_way: set[str] = set()  # "metadata", "coordinator"
        self._is_flushing = False
        self._leader_turn = 0  # with strict limits: whose turn it is to get the fetch (C4)

    # -- the application ---------------------------------------------------------------------------

    def subscribe(self, topics: tuple[str, ...], now_ms: int) -> None:
        self.subscription = topics
        self.membership.subscribe(topics, now_ms)
        # topics with errors are requested again, and their errors are reported again
        self.topics = {name: topic for name, topic in self.topics.items() if not topic.error}
        if any(name not in self.topics for name in topics):
            self._metadata_due_ms = now_ms
        self.advance(now_ms)

    def set_limits(self, limits: Limits | None, now_ms: int) -> None:
        """Sets the limits of fetches when the application waits for records; None: it has stopped waiting."""
        self.limits = limits
        if limits is not None:
            self.membership.on_polled(now_ms)
            self.flush(now_ms)

    def flush(self, now_ms: int) -> None:
        """Sends all acknowledgements now."""
        self._is_flushing = True
        self.advance(now_ms)

    def take(self, count: int, now_ms: int) -> list[records.ShareMessage]:
        """Returns up to `count` records, which the application holds from now on."""
        messages: list[records.ShareMessage] = []
        while self.ready and len(messages) < count:
            ready = self.ready[0]
            if ready.owner[0].is_dead or now_ms >= ready.deadline_ms:
                self.ready.popleft()  # other members may have acquired them by now
                continue
            begin, end = ready.position, min(ready.position + count - len(messages), len(ready.messages))
            self.held.setdefault(ready.topic_partition, {}).update(dict.fromkeys(ready.offsets[begin:end], ready.owner))
            messages += ready.messages[begin:end]
            ready.position = end
            if end == len(ready.messages):
                self.ready.popleft()
        if messages:
            self.limits = None  # C3
        return messages

    def acknowledge(self, topic_partition: TopicPartitionKey, offset: int, ack_type: int) -> bool:
        """Returns False if the application does not hold this record. After RENEW it still holds the
        record (C1).
        """
        offsets = self.held.get(topic_partition)
        owner = offsets.get(offset) if offsets else None
        if owner is None:
            return False
        if ack_type != RENEW:
            del self.held[topic_partition][offset]
        self._acknowledge(owner, topic_partition, Range(offset, offset, ack_type))
        return True

    def acknowledge_all(self, ack_type: int = ACCEPT) -> None:
        """Acknowledges all records that the application holds."""
        held = self.held
        if ack_type != RENEW:
            self.held = {}
        for topic_partition, offsets in held.items():
            for owner, ranges in _ranges_by_owner(offsets):
                for first, last in ranges:
                    self._acknowledge(owner, topic_partition, Range(first, last, ack_type))

    def _acknowledge(self, owner: Owner, topic_partition: TopicPartitionKey, acknowledged: Range) -> None:
        session, key = owner
        if session.is_dead:
            self.outcomes.append(Outcome(topic_partition, (acknowledged,), SESSION_LOST))
        else:
            session.acknowledge(key, acknowledged)

    @property
    def holds_records(self) -> bool:
        return any(self.held.values())

    def unconfirmed_partitions(self) -> set[TopicPartitionKey]:
        """The partitions with acknowledgements that the broker has not confirmed."""
        partitions: set[TopicPartitionKey] = set()
        for session in self.sessions.values():
            under_way = session.request_under_way.acknowledgements if session.request_under_way is not None else {}
            for acknowledgements in (session.acknowledgements, session.renewals, under_way):
                partitions.update(
                    self._topic_partition(key) for key, ranges in acknowledgements.items() if _without_gaps(ranges)
                )
        return partitions

    def close(self, now_ms: int) -> None:
        """Starts closing: sends the acknowledgements, ends the sessions and leaves the group. When all of
        that is done, is_closed becomes true.
        """
        self.is_closing, self.limits = True, None
        self.membership.subscribe((), now_ms)
        self.advance(now_ms)

    @property
    def is_closed(self) -> bool:
        return (
            self.is_closing
            and self.membership.is_out
            and not any(session.is_open or session.request_under_way for session in self.sessions.values())
        )

    # -- requests ----------------------------------------------------------------------------------

    def take_sends(self) -> list[Send]:
        sends, self._sends = self._sends, []
        return sends

    def advance(self, now_ms: int) -> None:
        """Creates all requests that are due."""
        problem = self.membership.tick(now_ms)
        if problem is not None:
            self._report(problem)
        self._maybe_request_metadata(now_ms)
        self._maybe_send_heartbeat(now_ms)
        self._maybe_send_share_requests(now_ms)

    def _send(self, target: Target, api_key: int, message: Any, kind: str, context: Any, **more: int) -> None:
        self._request_number += 1
        self._requests_under_way[self._request_number] = kind, context
        self._sends.append(Send(self._request_number, target, api_key, message, **more))

    def _may_send(self, retry_key: str | int, now_ms: int) -> bool:
        return now_ms >= self._retry_ms.get(retry_key, 0)

    def _back_off(self, retry_key: str | int, now_ms: int) -> None:
        failures = self._failures[retry_key] = self._failures.get(retry_key, 0) + 1
        self._retry_ms[retry_key] = now_ms + backoff_ms(failures)

    def _reset_backoff(self, retry_key: str | int) -> None:
        self._failures.pop(retry_key, None)
        self._retry_ms.pop(retry_key, None)

    def _maybe_request_metadata(self, now_ms: int) -> None:
        due = self._metadata_due_ms
        if (
            due is None
            or now_ms < due
            or not self.subscription
            or "metadata" in self._lookups_under_way
            or not self._may_send("metadata", now_ms)
        ):
            return
        self._lookups_under_way.add("metadata")
        message = requests.metadata_request(sorted(self.subscription), self.settings.creates_topics)
        self._send(CONTROL, requests.METADATA, message, "metadata", None)

    def _maybe_send_heartbeat(self, now_ms: int) -> None:
        if self.membership.is_out:
            return
        if self.coordinator is None:
            if "coordinator" not in self._lookups_under_way and self._may_send("coordinator", now_ms):
                self._lookups_under_way.add("coordinator")
                group = self.settings.group_id
                message = FindCoordinatorRequest(coordinator_keys=[group])
                self._send(CONTROL, requests.FIND_COORDINATOR, message, "coordinator", None, version_min=4)
            return
        heartbeat = self.membership.request(now_ms) if self.has_metadata else None
        if heartbeat is not None:
            target = Target("group", self.coordinator)
            self._send(target, SHARE_GROUP_HEARTBEAT, heartbeat, "heartbeat", heartbeat.member_epoch)

    # -- sessions ----------------------------------------------------------------------------------

    def _partitions_by_leader(self) -> dict[int, frozenset[TopicIdPartition]]:
        leaders: dict[int, set[TopicIdPartition]] = {}
        for key in self.membership.assigned:
            info = self.topics.get(self.names.get(key[0], ""))
            is_known = info is not None and info.topic_id == key[0] and key[1] < info.partition_count
            leader = info.leaders[key[1]] if info is not None and is_known else -1
            if leader >= 0 and leader in self.nodes:
                leaders.setdefault(leader, set()).add(key)
        return {leader: frozenset(keys) for leader, keys in leaders.items()}

    def _maybe_send_share_requests(self, now_ms: int) -> None:
        leaders = self._partitions_by_leader()
        chosen = self._leaders_to_fetch(leaders, now_ms) if self.limits is not None and not self.ready else []
        for node_id in chosen:
            self._fetch(node_id, leaders[node_id], len(leaders), now_ms)
        for session in self.sessions.values():
            if session.request_under_way is not None or not session.is_open:
                continue
            if self.is_closing or not (self.subscription or self.holds_records):
                self._send_acknowledgements(session, is_final=True)
            elif self._is_flushing and not session.is_flushed:
                self._send_acknowledgements(session)
        if all(session.is_flushed for session in self.sessions.values()):
            self._is_flushing = False

    def _leaders_to_fetch(self, leaders: dict[int, frozenset[TopicIdPartition]], now_ms: int) -> list[int]:
        """Returns the leaders to which a fetch is to be sent now."""
        free = [node for node in sorted(leaders) if self._can_fetch_from(node, now_ms)]
        assert self.limits is not None
        if not self.limits.is_strict or not free:
            return free
        if any(session.request_under_way is not None for session in self.sessions.values()):
            return []  # C4
        self._leader_turn += 1
        return [free[self._leader_turn % len(free)]]

    def _can_fetch_from(self, node_id: int, now_ms: int) -> bool:
        session = self.sessions.get(node_id)
        return (session is None or session.request_under_way is None) and self._may_send(node_id, now_ms)

    def _fetch(self, node_id: int, wanted: frozenset[TopicIdPartition], leader_count: int, now_ms: int) -> None:
        session = self.sessions.get(node_id)
        if session is None or session.is_dead:
            session = self.sessions[node_id] = Session(node_id, self.settings.group_id, self.membership.member_id)
        limits = self.limits
        assert limits is not None
        if limits.is_strict and leader_count > 1:
            limits = limits._replace(wait_ms=min(limits.wait_ms, ONE_LEADER_WAIT_MS))
        message = session.fetch_request(wanted, limits)
        more = {"version_min": 2} if limits.is_strict else {}
        self._send(Target("share", node_id), SHARE_FETCH, message, "share", session, wait_ms=limits.wait_ms, **more)

    def _send_acknowledgements(self, session: Session, is_final: bool = False) -> None:
        message = session.acknowledge_request(is_final)
        more = {"version_min": 2} if message.is_renew_ack else {}
        self._send(Target("share", session.node_id), SHARE_ACKNOWLEDGE, message, "share", session, **more)

    # -- responses ---------------------------------------------------------------------------------

    def on_response(self, number: int, response: Any, error: KafkaError | None, now_ms: int) -> None:
        """Takes the response to request `number` of take_sends(), or the `error` if there is none."""
        kind, context = self._requests_under_way.pop(number)
        if error is not None and error.code() in (KafkaError._UNSUPPORTED_FEATURE, KafkaError._AUTHENTICATION):
            self._report(Problem(error.code(), error.str(), error.code() == KafkaError._UNSUPPORTED_FEATURE))
        if kind == "metadata":
            self._on_metadata(response, error, now_ms)
        elif kind == "coordinator":
            self._on_coordinator(response, error, now_ms)
        elif kind == "heartbeat":
            self._on_heartbeat(response, error, context, now_ms)
        else:
            self._on_share(context, response, error, now_ms)
        self.advance(now_ms)

    def _on_metadata(self, response: Any, error: KafkaError | None, now_ms: int) -> None:
        self._lookups_under_way.discard("metadata")
        if error is not None:
            self._back_off("metadata", now_ms)
            return
        try:
            cluster, topics = requests.read_metadata(response)
        except KafkaException:
            self._back_off("metadata", now_ms)
            return
        self.has_metadata = True
        self.nodes.update(cluster.brokers)
        for topic in topics:
            previous = self.topics.get(topic.name)
            self.topics[topic.name] = topic
            if topic.topic_id != requests.NO_TOPIC_ID:
                self.names[topic.topic_id] = topic.name
            if topic.error in _LASTING_TOPIC_ERRORS and (previous is None or previous.error != topic.error):
                self._report(_problem(topic.error, f"topic {topic.name}"))
        if self._lacks_leaders():
            self._back_off("metadata", now_ms)
            self._metadata_due_ms = now_ms
        else:
            self._reset_backoff("metadata")
            self._metadata_due_ms = now_ms + self.settings.metadata_max_age_ms

    def _lacks_leaders(self) -> bool:
        count_with_leader = sum(len(keys) for keys in self._partitions_by_leader().values())
        return count_with_leader < len(self.membership.assigned) or any(
            name not in self.topics or self.topics[name].error not in (0, *_LASTING_TOPIC_ERRORS)
            for name in self.subscription
        )

    def _request_metadata(self, now_ms: int) -> None:
        self._metadata_due_ms = now_ms

    def _on_coordinator(self, response: Any, error: KafkaError | None, now_ms: int) -> None:
        self._lookups_under_way.discard("coordinator")
        coordinator = response if error is not None or not response.coordinators else response.coordinators[0]
        if error is not None or coordinator.error_code:
            if error is None and coordinator.error_code == ErrorCode.GROUP_AUTHORIZATION_FAILED:
                self._report(_problem(coordinator.error_code, f"group {self.settings.group_id}", is_fatal=True))
            self._back_off("coordinator", now_ms)
            return
        self._reset_backoff("coordinator")
        self.coordinator = coordinator.node_id
        self.nodes[coordinator.node_id] = coordinator.host, coordinator.port

    def _on_heartbeat(self, response: Any, error: KafkaError | None, epoch: int, now_ms: int) -> None:
        previous = self.membership.assigned
        if error is not None or response.error_code in COORDINATOR_MOVED:
            self.coordinator = None
            self._back_off("coordinator", now_ms)
        if error is not None:
            self.membership.on_no_response(now_ms)
            return
        problem = self.membership.on_response(response, epoch, now_ms)
        if problem is not None:
            self._report(problem)
        if self.membership.assigned != previous and self._lacks_leaders():
            self._request_metadata(now_ms)

    def _on_share(self, session: Session, response: Any, error: KafkaError | None, now_ms: int) -> None:
        request, node_id = session.request_under_way, session.node_id
        assert request is not None
        if error is not None:
            self._add_outcomes(session.on_no_response())
            self._back_off(node_id, now_ms)
            self._request_metadata(now_ms)
            return
        self._add_outcomes(session.on_response(response))
        if response.error_code:
            if response.error_code in _REPORTED:
                self._report(_problem(response.error_code, "share fetch"))
            self._back_off(node_id, now_ms)
            return
        self._reset_backoff(node_id)
        self.nodes.update({node.node_id: (node.host, node.port) for node in response.node_endpoints})
        for topic in response.responses:
            for partition in topic.partitions:
                self._on_partition(session, (topic.topic_id, partition.partition_index), partition, now_ms)
        if request.api_key == SHARE_FETCH:
            self._add_fetched(session, response, now_ms)

    def _on_partition(self, session: Session, key: TopicIdPartition, partition: Any, now_ms: int) -> None:
        code = partition.error_code
        if not code and getattr(partition, "acknowledge_error_code", 0) not in _MOVED:
            return
        if code in _REPORTED:
            name, index = self._topic_partition(key)
            self._report(_problem(code, f"{name} [{index}]"))
        elif partition.current_leader is not None and partition.current_leader.leader_id >= 0:
            self._set_leader(key, partition.current_leader.leader_id)
        self._request_metadata(now_ms)
        if code:
            self._back_off(session.node_id, now_ms)

    def _set_leader(self, key: TopicIdPartition, leader_id: int) -> None:
        info = self.topics.get(self.names.get(key[0], ""))
        if info is not None and 0 <= key[1] < info.partition_count:
            leaders = list(info.leaders)
            leaders[key[1]] = leader_id
            self.topics[info.name] = _with_leaders(info, tuple(leaders))

    def _add_fetched(self, session: Session, response: Any, now_ms: int) -> None:
        lock_ms = response.acquisition_lock_timeout_ms
        deadline_ms = now_ms + lock_ms if lock_ms > 0 else NEVER_MS
        for topic in response.responses:
            for partition in topic.partitions:
                key = topic.topic_id, partition.partition_index
                if key[0] not in self.names:
                    continue  # a topic without metadata: the locks of its records expire
                topic_partition = self._topic_partition(key)
                try:
                    fetched = records.read(
                        topic_partition, partition.records, partition.acquired_records, self.settings.check_crcs
                    )
                except ProtocolError as error:
                    self._report(Problem(KafkaError._BAD_MSG, str(error)))
                    continue
                for unusable in fetched.acknowledgements:
                    session.acknowledge(key, unusable)
                if fetched.problem:
                    self._report(Problem(KafkaError._BAD_MSG, fetched.problem))
                if fetched.messages:
                    self.ready.append(_ReadyRecords(topic_partition, (session, key), fetched, deadline_ms))

    # -- outcomes ----------------------------------------------------------------------------------

    def _add_outcomes(self, reported: Results) -> None:
        for key, ranges, code in reported:
            if reportable := _without_gaps(ranges):
                self.outcomes.append(Outcome(self._topic_partition(key), reportable, code))

    def _topic_partition(self, key: TopicIdPartition) -> TopicPartitionKey:
        return self.names.get(key[0], ""), key[1]

    def fail(self, code: int, text: str) -> None:
        self._report(Problem(code, text, is_fatal=True))

    def _report(self, problem: Problem) -> None:
        if problem.is_fatal:
            self.fatal = self.fatal or problem
            self.membership.give_up()
        if len(self.problems) < PROBLEMS_MAX and problem not in self.problems:
            self.problems.append(problem)

    # -- time --------------------------------------------------------------------------------------

    def next_ms(self, now_ms: int) -> int | None:
        """Returns the time of the next advance(), if the last one was at `now_ms` (C5); None: not before
        another event.
        """
        times = [self.membership.poll_deadline_ms]
        if self.coordinator is not None and self.has_metadata:
            times.append(self.membership.heartbeat_due_ms)
        elif self.coordinator is None and not self.membership.is_out and "coordinator" not in self._lookups_under_way:
            times.append(self._retry_ms.get("coordinator", now_ms))
        if self._metadata_due_ms is not None and self.subscription and "metadata" not in self._lookups_under_way:
            times.append(max(self._metadata_due_ms, self._retry_ms.get("metadata", 0)))
        if self.limits is not None and not self.ready:
            times += [ms for node in self._partitions_by_leader() if (ms := self._retry_ms.get(node, 0)) > now_ms]
        due_times = [ms for ms in times if ms is not None]
        return min(due_times) if due_times else None

    def check(self) -> None:
        self.membership.check()
        for session in self.sessions.values():
            session.check()


def _ranges_by_owner(offsets: dict[int, Owner]) -> list[tuple[Owner, list[tuple[int, int]]]]:
    """The offsets of each owner, as contiguous ranges."""
    by_owner: dict[int, tuple[Owner, list[int]]] = {}
    for offset, owner in offsets.items():
        by_owner.setdefault(id(owner), (owner, []))[1].append(offset)
    return [(owner, _ranges(sorted(owned_offsets))) for owner, owned_offsets in by_owner.values()]


def _ranges(offsets: list[int]) -> list[tuple[int, int]]:
    if offsets[-1] - offsets[0] == len(offsets) - 1:
        return [(offsets[0], offsets[-1])]
    ranges = [(offsets[0], offsets[0])]
    for offset in offsets[1:]:
        if offset == ranges[-1][1] + 1:
            ranges[-1] = ranges[-1][0], offset
        else:
            ranges.append((offset, offset))
    return ranges


def _without_gaps(ranges: list[Range]) -> tuple[Range, ...]:
    return tuple(acknowledged for acknowledged in ranges if acknowledged.type != GAP)


def _problem(code: int, activity: str, is_fatal: bool = False) -> Problem:
    return Problem(code, f"{activity}: {error_name(code)}: {error_message(code)}", is_fatal)


def _with_leaders(info: TopicInfo, leaders: tuple[int, ...]) -> TopicInfo:
    return TopicInfo(
        info.name,
        info.topic_id,
        info.error,
        info.is_internal,
        leaders,
        info.leader_epochs,
        info.replicas,
        info.in_sync_replicas,
    )
