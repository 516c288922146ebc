"""The leader's changes to the voter set, one voter at a time (KIP-853, Raft dissertation 4.1-4.2).

A set is in force as soon as its batch is in a log. Two sets in force at the same time differ by one
voter, so their majorities overlap. For that (invariant V1) a change begins only when the previous one
is committed and the leader has committed a record of its own epoch. Without the latter condition two
successive leaders could each have a change in flight (the error in Raft's first published algorithm).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple, Protocol

from mqd.cluster.raft.events import NO_DEADLINE, AddVoter, RemoveVoter, UpdateVoter, VoterChangeEnded
from mqd.cluster.raft.lease import majority
from mqd.cluster.raft.messages import VOTERS_MAX, Batch, ReplicaKey, Voter, Voters, voters_batch
from mqd.cluster.raft.progress import Replica
from mqd.cluster.raft.replica import QuorumReplica
from mqd.protocol.errors import ErrorCode

# a new voter may take this many times the duration of a promise (settings.promise_ns) to catch up
CATCH_UP_PROMISE_COUNT = 15


class _Change(NamedTuple):
    token: Hashable
    voter: Voter | None  # the voter to add once it has caught up; None if no voter must catch up
    target_offset: int  # the offset that the new voter must reach
    deadline_ns: int
    end_offset: int  # end of the batch with the new voter set; -1 = not appended yet


class LeaderRole(Protocol):
    """The part of Leadership (leader.py) that VoterChanges needs."""

    epoch: int
    is_active: bool

    @property
    def core(self) -> QuorumReplica: ...

    @property
    def replicas(self) -> Mapping[ReplicaKey, Replica]: ...

    def append_control(self, batch: Batch, now_ns: int) -> None: ...


class VoterChanges:
    def __init__(self, leading: LeaderRole) -> None:
        self._leading = leading
        self._core = leading.core
        self._change: _Change | None = None

    @property
    def deadline_ns(self) -> int:
        return self._change.deadline_ns if self._change is not None and self._change.end_offset < 0 else NO_DEADLINE

    def may_change(self) -> bool:
        """Whether a change may begin (V1)."""
        return self._leading.is_active and self._core.log.voters_offset < self._core.high_watermark

    def request(self, event: AddVoter | RemoveVoter | UpdateVoter, now_ns: int) -> None:
        if self._change is not None or not self.may_change():
            self._report_end(
                event.token,
                ErrorCode.REQUEST_TIMED_OUT,
                "Another change of the voters, or the election, is not finished; try again.",
            )
            return
        match event:
            case AddVoter():
                self._add(event, now_ns)
            case RemoveVoter():
                self._remove(event, now_ns)
            case UpdateVoter():
                self._update(event, now_ns)

    def _report_end(self, token: Hashable, error: int, message: str = "") -> None:
        self._core.emit(VoterChangeEnded(token, error, message))

    def _add(self, event: AddVoter, now_ns: int) -> None:
        voters, key = self._core.voters, event.voter.key
        if any(voter.key == key for voter in voters):
            self._report_end(event.token, ErrorCode.DUPLICATE_VOTER, f"Node {key.node_id} is already a voter.")
        elif any(voter.node_id == key.node_id for voter in voters):
            self._report_end(
                event.token,
                ErrorCode.DUPLICATE_VOTER,
                f"Node {key.node_id} is a voter with another directory, from before its disk was lost; remove that"
                " voter first.",
            )
        elif len(voters) >= VOTERS_MAX:
            self._report_end(
                event.token,
                ErrorCode.INVALID_REQUEST,
                f"There are {len(voters)} voters; more than {VOTERS_MAX} would slow down changes without making them"
                " safer.",
            )
        else:
            deadline = now_ns + CATCH_UP_PROMISE_COUNT * self._core.settings.promise_ns
            self._change = _Change(event.token, event.voter, self._core.log.end_offset, deadline, -1)
            replica = self._leading.replicas.get(key)
            if replica is not None:
                self.on_fetched(replica, now_ns)

    def on_fetched(self, replica: Replica, now_ns: int) -> None:
        """Adds the new voter when it has caught up with the log as of the request, and is active now."""
        change = self._change
        if change is None or change.voter is None or change.end_offset >= 0 or change.voter.key != replica.key:
            return
        is_responsive = now_ns - replica.last_contact_ns < self._core.settings.promise_ns
        if is_responsive and replica.position >= change.target_offset:
            self._append(change.token, tuple(sorted((*self._core.voters, change.voter))), now_ns)

    def _remove(self, event: RemoveVoter, now_ns: int) -> None:
        voters = self._core.voters
        remaining = tuple(voter for voter in voters if voter.key != event.key)
        if len(remaining) == len(voters):
            self._report_end(
                event.token, ErrorCode.VOTER_NOT_FOUND, f"Node {event.key.node_id} with that directory is not a voter."
            )
        elif not remaining:
            self._report_end(
                event.token,
                ErrorCode.INVALID_REQUEST,
                f"Node {event.key.node_id} is the only voter; add another one first.",
            )
        elif not self._has_live_majority(remaining, now_ns):
            self._report_end(
                event.token,
                ErrorCode.INVALID_REQUEST,
                "A majority of the remaining voters is unreachable or lags, so no further change could be"
                " committed. Bring them back first, and try again.",
            )
        else:
            self._append(event.token, remaining, now_ns)

    def _has_live_majority(self, voters: Voters, now_ns: int) -> bool:
        live = sum(voter.key == self._core.key or self._keeps_up(voter.key, now_ns) for voter in voters)
        return live >= majority(len(voters))

    def _keeps_up(self, key: ReplicaKey, now_ns: int) -> bool:
        """Whether the replica fetches and keeps up. A replica with a full disk fetches, but cannot make
        records durable.
        """
        replica = self._leading.replicas.get(key)
        return (
            replica is not None
            and replica.caught_up_ns >= 0
            and now_ns - replica.caught_up_ns < self._core.settings.check_quorum_ns
        )

    def _update(self, event: UpdateVoter, now_ns: int) -> None:
        voters = self._core.voters
        changed = tuple(event.voter if voter.key == event.voter.key else voter for voter in voters)
        if event.voter in voters:
            self._report_end(event.token, 0)
        elif changed == voters:
            self._report_end(
                event.token,
                ErrorCode.VOTER_NOT_FOUND,
                f"Node {event.voter.node_id} with that directory is not a voter.",
            )
        else:
            self._append(event.token, changed, now_ns)

    def _append(self, token: Hashable, voters: Voters, now_ns: int) -> None:
        batch = voters_batch(self._core.log.end_offset, self._leading.epoch, voters)
        self._change = _Change(token, None, 0, NO_DEADLINE, batch.next_offset)
        self._leading.append_control(batch, now_ns)

    def on_committed(self) -> None:
        change = self._change
        if change is not None and 0 <= change.end_offset <= self._core.high_watermark:
            self._change = None
            self._report_end(change.token, 0)

    def on_tick(self, now_ns: int) -> None:
        change = self._change
        if change is not None and change.end_offset < 0 and now_ns >= change.deadline_ns:
            self._change = None
            self._report_end(
                change.token,
                ErrorCode.REQUEST_TIMED_OUT,
                f"Node {change.voter.node_id if change.voter else -1} has not caught up with the metadata log in time;"
                " is it running?",
            )

    def on_dropped(self, end_offset: int) -> None:
        """Ends the change if its batch was truncated; the log now ends at `end_offset`."""
        if self._change is not None and self._change.end_offset > end_offset:
            self.fail("The disk refused the change of the voters; the voters are unchanged.")

    def fail(self, reason: str) -> None:
        if self._change is not None:
            change, self._change = self._change, None
            self._report_end(change.token, ErrorCode.REQUEST_TIMED_OUT, reason)
