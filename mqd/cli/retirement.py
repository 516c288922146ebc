"""Partitions that are being retired: their progress, the records that consumers have left to read,
and releasing the producers afterwards. For `mqd topic retire-partitions`.

    co-locating -> sealed -> redirected -> hidden -> gone

(docs/decisions/cluster/2026-11-21-retired-partitions.md.)

While the partitions are sealed, the producers of their keys wait, so that a consumer never sees a
later record of a key (in the partition that takes over the key) before an earlier one (in the
retired partition). The producers need to wait only until the groups have read to the end: this
module detects when they have, and notifies the controller. It does not wait for groups without
members, because they are not reading, nor longer than the controller waits
(partition.retire.barrier.ms).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from mqd.cli import group_listing as groups
from mqd.cli.broker_lookup import EARLIEST, GROUP, LATEST, Cluster, Partition
from mqd.cli.common import CliError
from mqd.cli.kafka_request import Broker, check, with_retries
from mqd.protocol.messages import CreatePartitionsRequest, FetchRequest
from mqd.protocol.records import TRANSACTIONAL, decode_batch, iterate_batches

CREATE_PARTITIONS, FETCH = 37, 1
RETIRE, RETIRE_MOVING_KEYS, RELEASE, STATUS = 1, 2, 3, 4
NONE, CO_LOCATING, SEALED, REDIRECTED, HIDDEN = range(5)
STEP_DESCRIPTIONS = (
    "no partition is being retired",
    "replicas and leaders move to the brokers of the partitions that take the records",
    "waiting for consumers to read the remaining records",
    "new records go to the other partitions",
    "empty, and no longer shown to clients",
)
POLL_S = 0.25
TIMEOUT_MS = 30_000
FETCH_VERSION_MAX = 12  # the newest version that identifies topics by name
FETCH_BYTES = 1 << 20
UNREADABLE_MAX = 1_000  # more unread offsets than this are assumed to include readable records
READ_COMMITTED = 1
ABORT = b"\0\0"  # the type in a marker's key, after the version (KIP-98)


class RetirementState(msgspec.Struct):
    """`step`: NONE when no partition is being retired, or all are removed. `is_applied`: the queried
    host has applied the step to the partitions that it leads. `staying_count`: how many partitions
    are not retired. `retired`: partition -> the partition that takes its new records. `leaders`: the
    nodes that lead the retired partitions; -1 for a partition without a leader.
    """

    topic: str
    step: int
    is_applied: bool
    staying_count: int
    retired: dict[int, int]
    leaders: set[int]

    @property
    def partitions(self) -> list[Partition]:
        return [(self.topic, index) for index in sorted(self.retired)]


class LaggingGroup(msgspec.Struct):
    """A group that has not read all records of the retired partitions."""

    group: str
    unread_count: int
    has_members: bool


class Readers(msgspec.Struct):
    """The groups that have records left to read. `error`: why there may be more groups; "" when all
    coordinators have responded.
    """

    behind: list[LaggingGroup] = msgspec.field(default_factory=list)
    error: str = ""

    @property
    def all_have_read(self) -> bool:
        """Whether no group with members has records left to read."""
        return not self.error and not any(group.has_members for group in self.behind)


def request(broker: Broker, topic: str, staying_count: int, action: int) -> RetirementState:
    """Begins the retirement, releases the producers, or queries the state. `staying_count`: how many
    partitions are to stay; only for RETIRE and RETIRE_MOVING_KEYS. Raises CliError.
    """
    request = CreatePartitionsRequest(
        topics=[
            CreatePartitionsRequest.Topic(name=topic, count=staying_count, assignments=None, retirement_action=action)
        ],
        timeout_ms=TIMEOUT_MS,
    )
    response = broker.request(CREATE_PARTITIONS, request).results[0]
    check(f"topic {topic}", response.error_code, response.error_message)
    retirement = response.retirement
    if retirement is None:
        raise CliError("the broker cannot retire partitions: it is not mqd, or an older version")
    retired = {partition.partition_index: partition.redirect_index for partition in retirement.retired}
    return RetirementState(
        topic,
        retirement.step,
        retirement.applied,
        retirement.remaining,
        retired,
        {partition.leader_id for partition in retirement.retired},
    )


def wait(
    cluster: Cluster, topic: str, until_step: int, show: Callable[[RetirementState, Readers], None]
) -> tuple[RetirementState, Readers]:
    """Waits until the given step, such as REDIRECTED, is reached, or no partition is being
    retired. Releases the producers as soon as every group has read to the end. If a group's
    coordinator cannot be reached, the controller releases the producers after its own timeout.
    Returns the final state, and the groups that were behind when the producers were released. An
    interrupt ends only the waiting. Raises CliError.
    """
    readers = Readers()
    while True:
        state = with_retries(lambda: request(cluster.bootstrap_broker, topic, 0, STATUS))
        if state.step == SEALED:
            sealed = is_sealed(cluster, state)  # before groups_behind(): only later positions count
            readers = groups_behind(cluster, state)
            if sealed and readers.all_have_read:
                with_retries(lambda: request(cluster.bootstrap_broker, topic, 0, RELEASE))
        with_retries(partial(show, state, readers))
        if state.step == NONE or state.step >= until_step:
            return state, readers
        time.sleep(POLL_S)  # polling: other hosts do the work


def is_sealed(cluster: Cluster, state: RetirementState) -> bool:
    """Whether the leaders themselves refuse new records; until they do, more records may follow
    those that groups have read. False if a leader is unreachable.
    """
    if -1 in state.leaders:
        return False
    try:
        cluster.topics([state.topic])
        states = [request(cluster.node(node), state.topic, 0, STATUS) for node in state.leaders]
    except CliError:
        return False
    return all(state_of_leader.step == SEALED and state_of_leader.is_applied for state_of_leader in states)


def groups_behind(cluster: Cluster, state: RetirementState) -> Readers:
    """Returns the groups with records left to read, among the groups that read the partitions or
    have committed offsets in them. If a coordinator is unreachable, groups may be missing, and
    Readers.error says why.
    """
    retired = set(state.partitions)
    readers = Readers()
    try:
        with cluster.every_coordinator(GROUP):
            for group in groups.all_groups(cluster):
                rows = [row for row in groups.progress(cluster, group) if (row.topic, row.partition) in retired]
                unread = sum(_unread_records(cluster, row) for row in rows)
                if unread:
                    readers.behind.append(LaggingGroup(group.group, unread, group.state not in groups.WITHOUT_MEMBERS))
    except CliError as error:
        readers.error = error.message
    return readers


def _unread_records(cluster: Cluster, row: groups.Progress) -> int:
    """Returns how many records the group has not read. Offsets after the last record that an
    application receives do not count: they are transaction markers and records of aborted
    transactions. A group cannot commit beyond them until another record follows, and none follows
    while the partition is sealed.
    """
    if row.log_end_offset is None:
        return 1  # the partition is not served, so the number is unknown
    next_offset = max(row.committed_offset if row.committed_offset is not None else 0, row.log_start_offset or 0)
    unread = row.log_end_offset - next_offset
    return (
        0
        if unread <= 0
        or (
            unread <= UNREADABLE_MAX
            and _has_nothing_to_read(cluster, (row.topic, row.partition), next_offset, row.log_end_offset)
        )
        else unread
    )


def _has_nothing_to_read(cluster: Cluster, partition: Partition, offset: int, end: int) -> bool:
    topic, index = partition
    ((node_id, _),) = cluster.by_leader([partition]).items()
    requested = FetchRequest.Topic(
        topic=topic,
        partitions=[FetchRequest.Partition(partition=index, fetch_offset=offset, partition_max_bytes=FETCH_BYTES)],
    )
    request = FetchRequest(
        replica_id=-1,
        max_wait_ms=0,
        min_bytes=0,
        max_bytes=FETCH_BYTES,
        isolation_level=READ_COMMITTED,
        session_epoch=-1,
        topics=[requested],
    )
    response = cluster.node(node_id).request(FETCH, request, FETCH_VERSION_MAX)
    fetched = response.responses[0].partitions[0]
    aborted = [
        (transaction.producer_id, transaction.first_offset) for transaction in fetched.aborted_transactions or ()
    ]
    return not fetched.error_code and has_nothing_to_read(bytes(fetched.records or b""), aborted, offset, end)


def has_nothing_to_read(data: bytes, aborted: list[tuple[int, int]], offset: int, end: int) -> bool:
    """Whether an application that reads committed records gets nothing from `offset` to `end`
    (exclusive). `data`: the batches of a Fetch response, the last possibly cut off; `aborted`: its
    aborted transactions, as (producer id, first offset). Also False where `data` does not reach
    `end`, because of an open transaction or because there is too much data.
    """
    not_begun, aborting = sorted(aborted, key=lambda one: one[1]), set()
    for header, batch in iterate_batches(data, allow_partial=True):
        while not_begun and not_begun[0][1] <= header.last_offset:
            aborting.add(not_begun.pop(0)[0])
        if header.is_control:
            if (marker := next(decode_batch(batch)).key) is not None and marker[2:4] == ABORT:
                aborting.discard(header.producer_id)
        elif header.last_offset >= offset and not (
            header.attributes & TRANSACTIONAL and header.producer_id in aborting
        ):
            return False
        if header.last_offset + 1 >= end:
            return True
    return False


def stored_record_count(cluster: Cluster, state: RetirementState) -> int:
    """Returns how many records of the retired partitions retention has not deleted yet."""
    cluster.topics([state.topic])
    starts, ends = cluster.offsets(state.partitions, EARLIEST), cluster.offsets(state.partitions, LATEST)
    return sum(max(ends[partition] - starts.get(partition, 0), 0) for partition in ends)


def as_json(state: RetirementState, readers: Readers, stored_records: int | None) -> dict[str, Any]:
    return {
        "topic": state.topic,
        "step": ("none", "co_locating", "sealed", "redirected", "hidden")[state.step],
        "partitions": state.staying_count,
        "retired": [{"partition": index, "redirected_to": to} for index, to in sorted(state.retired.items())],
        "records_left": stored_records,
        "groups_behind": [
            {"group": group.group, "records": group.unread_count, "active": group.has_members}
            for group in readers.behind
        ],
        "groups_unknown": readers.error or None,
    }
