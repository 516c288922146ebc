"""The metadata quorum as a state machine without I/O: a pull Raft with pre-vote, check-quorum and a
majority-granted lease (docs/design/cluster.md, section 3).

    role         transitions
    UNATTACHED   a leader becomes known -> FOLLOWER; a voter's election timeout -> PROSPECTIVE.
                 Meanwhile it sends Fetch to other hosts, to find the leader
    PROSPECTIVE  a majority would vote for it (pre-vote) -> CANDIDATE; timeout -> PROSPECTIVE again
                 after a delay (KIP-996)
    CANDIDATE    a majority has voted -> LEADER; timeout -> PROSPECTIVE
    FOLLOWER     its leader is silent for P (promise_ns) -> PROSPECTIVE (a voter) or UNATTACHED (an
                 observer); EndEpoch, or proof that its leader has died -> UNATTACHED
    LEADER       a newer epoch, a silent majority, removal, transfer, a failed write -> UNATTACHED

raft/election.py, raft/leader.py and raft/follower.py implement these roles, raft/replica.py has the
state that is common to all roles; this module performs the transitions.

Invariants (check(); tests/sim/raft/quorum_world.py asserts them across all replicas)
    I1  one leader in an epoch: a vote is durable before it is sent, and given once in an epoch
    I2  committed records are the same everywhere, and never truncated
    I3  a leader has all committed records: votes go only to candidates whose log is at least as new,
        and a leader commits a record of its own epoch first
    I4  (epoch, vote) never regress
    I5  records delivered as Committed are committed, and durable here
    I6  the epoch never falls
    L1  at most one valid lease (lease.py)

Single-threaded. `handle` is the only mutator. Times are nanoseconds of this host's CLOCK_BOOTTIME.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from mqd.cluster.raft import events
from mqd.cluster.raft.election import Election
from mqd.cluster.raft.events import NO_DEADLINE, Effect, Event, QuorumSettings, Stored, VoteState
from mqd.cluster.raft.follower import Following
from mqd.cluster.raft.leader import Leadership
from mqd.cluster.raft.lease import lease_deadline_ns
from mqd.cluster.raft.messages import (
    BeginEpoch,
    EndEpoch,
    Fetch,
    FetchResponse,
    FetchSnapshot,
    QuorumMessage,
    ReplicaKey,
    SnapshotChunk,
    SnapshotMeta,
    VoteRequest,
    VoteResponse,
    Voters,
)
from mqd.cluster.raft.progress import QuorumView
from mqd.cluster.raft.replica import QuorumBroken as QuorumBroken
from mqd.cluster.raft.replica import QuorumTransitions
from mqd.protocol.errors import ErrorCode


class QuorumCore(QuorumTransitions):
    """`key`: this replica. `rng` only randomizes election timeouts.

    Public attributes: epoch, leader (node id or -1), high_watermark, applied_offset,
    log.end_offset, voters, generation, is_leader, is_active, is_voter.
    """

    leadership_class = Leadership
    following_class = Following
    election_class = Election

    def __init__(self, key: ReplicaKey, stored: Stored, settings: QuorumSettings, rng: random.Random) -> None:
        super().__init__(key, stored, settings)
        self.rng = rng
        self.peers: tuple[int, ...] = ()  # node ids of hosts that may know a leader
        self.leading: Leadership | None = None
        self.following: Following | None = None
        self.election: Election | None = None
        self._doubted_epoch = self._ended_epoch = -1
        self.election_deadline_ns = NO_DEADLINE  # an unattached voter's election timeout
        self._discover_at_ns = NO_DEADLINE
        self._discover_count = 0
        self._fetch_sequence = 0
        self._emitted_leader = (-1, self.epoch)
        self._emitted_voters: Voters | None = None

    # -- queries ----------------------------------------------------------------------------------

    @property
    def is_leader(self) -> bool:
        return self.leading is not None

    @property
    def is_active(self) -> bool:
        return self.leading is not None and self.leading.is_active

    def lease_deadline_ns(self, now_ns: int) -> int:
        """The time (own clock) until which this host may act as the controller without contacting
        other hosts: 0 if it may not, NO_DEADLINE while it is the only voter.
        """
        if self.leading is None or not self.leading.is_active:
            return 0
        return lease_deadline_ns(self.key, self.log.voters, self.leading.stamps(), now_ns, self.settings.lease_ns)

    def has_lease(self, now_ns: int) -> bool:
        return now_ns < self.lease_deadline_ns(now_ns)

    def describe(self, now_ns: int) -> QuorumView:
        """The view for DescribeQuorum; without replicas if this replica is not the leader."""
        if self.leading is None:
            return QuorumView(self.leader, self.epoch, self.high_watermark, (), ())
        return self.leading.describe(now_ns)

    @property
    def next_deadline_ns(self) -> int:
        """The time of the next Tick; NO_DEADLINE = none."""
        deadline = min(self.election_deadline_ns, self._discover_at_ns, self._retry_vote_ns)
        for role in (self.leading, self.following, self.election):
            if role is not None:
                deadline = min(deadline, role.deadline_ns)
        return deadline

    # -- events ------------------------------------------------------------------------------------

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        _HANDLERS[type(event)](self, event, now_ns)
        self._emit_changes(now_ns)
        return self.take_effects()

    def _on_start(self, event: events.Start, now_ns: int) -> None:
        if self.may_have_promised():
            self.promise.give(self.epoch, now_ns, self.settings.promise_ns)
        self._deliver_committed()
        self.become_unattached(
            now_ns, max(now_ns, self.promise.until_ns) + (0 if self.is_alone else self.random_backoff())
        )
        if self.is_alone and not self.promise.holds(now_ns):
            self.campaign(now_ns)

    def may_have_promised(self) -> bool:
        """Whether the previous process may have given a promise to a leader that is still alive."""
        return self.vote.followed is not None and self.vote.followed != self.key

    def _on_tick(self, event: events.Tick, now_ns: int) -> None:
        if now_ns >= self._retry_vote_ns:
            self._retry_vote_ns = NO_DEADLINE
            self._emit_vote()
        if self.leading is not None:
            self.leading.on_tick(now_ns)
        elif self.following is not None:
            self.following.on_tick(now_ns)
        elif self.election is not None and now_ns >= self.election.deadline_ns:
            self.election.on_tick(now_ns)
        if now_ns >= self.election_deadline_ns:
            self.campaign(now_ns)
        if now_ns >= self._discover_at_ns:
            self._discover(now_ns)

    def _on_received(self, event: events.Received, now_ns: int) -> None:
        message = event.message
        if not self._check_generation(event.sender, message):
            return
        _MESSAGE_HANDLERS[type(message)](self, event.sender, message, now_ns)

    def _check_generation(self, sender: int, message: QuorumMessage) -> bool:
        """Returns whether the message may be handled. If one side has an older generation, it is informed."""
        if message.generation == self.generation:
            return True
        # a joining host sends a Fetch, and gets a snapshot
        if self.generation == 0 or message.generation == 0:
            return isinstance(message, Fetch | FetchResponse | FetchSnapshot | SnapshotChunk)
        if message.generation > self.generation:
            self.emit(events.Outdated(message.generation, sender))
        elif isinstance(message, Fetch | FetchSnapshot):  # the response has the newer generation
            self.send(sender, FetchResponse(self.generation, self.epoch, self.leader, self.key, message.sequence, 0))
        return False

    def _on_disk_done(self, event: events.DiskDone, now_ns: int) -> None:
        installed = self.complete_writes(event.sequence)
        if self.leading is not None:
            self.leading.advance(now_ns)
        self._deliver_committed()
        if self.election is not None:
            self.election.maybe_win(now_ns)
        if self.following is not None:
            self.following.on_writes_done(now_ns, installed)

    def _on_disk_refused(self, event: events.DiskRefused, now_ns: int) -> None:
        """Handles a refused write. The disk is as it was before the write with `event.sequence`."""
        end, truncated = self.drop_refused_writes(now_ns)
        self.emit(events.Note("the disk refused the metadata log", (("reason", event.reason),)))
        if self.leading is not None:
            self.leading.on_disk_refused(end, event.reason, now_ns)
        self.drop_unflushed_batches(end, truncate_disk=truncated)
        if self.following is not None:
            self.following.on_disk_refused(now_ns)

    def _on_propose(self, event: events.Propose, now_ns: int) -> None:
        reason = (
            self.leading.refusal_of(event)
            if self.leading is not None
            else f"this host does not lead the metadata quorum; node {self.leader} does"
        )
        if self.leading is None or reason:
            self.emit(events.ProposalRefused(event.token, reason))
        else:
            self.leading.propose(event.values, now_ns)

    def _on_snapshot_stored(self, event: events.SnapshotStored, now_ns: int) -> None:
        self._snapshot_requested = False
        if self.log.snapshot is None or event.meta.offset > self.log.snapshot.offset:
            self.log.on_snapshot_stored(event.meta, event.size_bytes, self.settings.retained_bytes)

    def _on_snapshot_read(self, event: events.SnapshotRead, now_ns: int) -> None:
        if self.leading is not None and event.request.epoch == self.epoch:
            self.leading.on_snapshot_read(event, now_ns)

    def _on_voter_change(self, event: events.AddVoter | events.RemoveVoter | events.UpdateVoter, now_ns: int) -> None:
        if self.leading is None:
            text = (
                f"This host does not lead the metadata quorum; node {self.leader} does."
                if self.leader >= 0
                else "The metadata quorum has no leader that is known here; try again."
            )
            self.emit(events.VoterChangeEnded(event.token, ErrorCode.NOT_LEADER_OR_FOLLOWER, text))
        else:
            self.leading.voter_changes.request(event, now_ns)

    def _on_transfer(self, event: events.TransferLeadership, now_ns: int) -> None:
        if self.leading is not None:
            self.leading.transfer(event.to, now_ns)

    def _on_peers_known(self, event: events.PeersKnown, now_ns: int) -> None:
        self.peers = tuple(node for node in event.node_ids if node != self.key.node_id)
        if self.leading is None and self.following is None:
            self._discover_at_ns = now_ns

    # -- messages in any role ---------------------------------------------------------------------

    def _on_vote_request(self, sender: int, request: VoteRequest, now_ns: int) -> None:
        if request.voter != self.key or request.candidate.node_id != sender:
            return
        if request.pre_vote:
            granted = request.epoch >= self.epoch and self.may_vote(now_ns) and self._is_up_to_date(request)
            if granted:
                self._defer_to_candidate(now_ns + self.settings.promise_ns // 16)
        else:
            granted = self._grant(request, now_ns)
        self.send(
            sender,
            VoteResponse(self.generation, self.epoch, self.key, granted, request.pre_vote, request.round, self.leader),
        )

    def may_vote(self, now_ns: int) -> bool:
        """Whether this replica may vote: it is not the leader, and has no promise to another one."""
        return self.leading is None and not self.promise.holds(now_ns)

    def _defer_to_candidate(self, until_ns: int) -> None:
        """Delays this replica's own candidacy, because two simultaneous candidates split the votes. A
        round takes twice as long as the delay, so this cannot continue forever.
        """
        if self.following is not None:
            self.following.extend_deadline(until_ns)
        elif self.election is None:
            self.election_deadline_ns = max(self.election_deadline_ns, until_ns)

    def is_bound(self, now_ns: int) -> bool:
        """Whether a promise, or a lease of its own, keeps this replica from voting."""
        return self.promise.holds(now_ns) or (self.leading is not None and self.has_lease(now_ns))

    def _is_up_to_date(self, request: VoteRequest) -> bool:
        return (request.log_end_epoch, request.log_end_offset) >= (self.log.last_epoch, self.log.end_offset)

    def _grant(self, request: VoteRequest, now_ns: int) -> bool:
        if request.epoch < self.epoch or self.is_bound(now_ns):
            return False
        if request.epoch > self.epoch:
            self.adopt_epoch(request.epoch, now_ns)
        if self.leader >= 0 or not self._is_up_to_date(request):
            return False
        if self.vote.voted_for is None:
            self.persist_vote(VoteState(self.epoch, request.candidate, None))
            self.become_unattached(now_ns, now_ns + self.settings.promise_ns // 2 + self.random_backoff())
        return self.vote.voted_for == request.candidate

    def _on_vote_response(self, sender: int, response: VoteResponse, now_ns: int) -> None:
        if response.voter.node_id != sender:
            return
        if response.epoch > self.epoch or (response.epoch == self.epoch and response.leader >= 0):
            self.learn_leader(response.epoch, response.leader, sender, now_ns)
        if self.election is not None:
            self.election.on_response(response, now_ns)

    def _on_begin_epoch(self, sender: int, message: BeginEpoch, now_ns: int) -> None:
        if message.leader.node_id != sender:
            return
        if message.epoch < self.epoch:
            self._send_discovery_fetch(sender)  # the Fetch informs it of the newer epoch
        elif message.epoch > self.epoch or self.leader < 0:
            self.learn_leader(message.epoch, sender, sender, now_ns)

    def _on_end_epoch(self, sender: int, message: EndEpoch, now_ns: int) -> None:
        if message.leader.node_id != sender or sender == self.key.node_id:
            return
        self.promise.release(message.epoch)
        if message.epoch > self.epoch:
            self.adopt_epoch(message.epoch, now_ns)
        elif message.epoch < self.epoch or self.leading is not None or self.leader not in (-1, sender):
            return
        self.end_epoch()
        rank = (
            message.successors.index(self.key.node_id)
            if self.key.node_id in message.successors
            else len(message.successors)
        )
        self.become_unattached(now_ns, now_ns + self.settings.handover_ns + rank * self.settings.backoff_ns[1])

    def _on_leader_died(self, event: events.LeaderDied, now_ns: int) -> None:
        """Acts as if the leader had resigned, except that it is unknown which replica has the newest log.
        The replicas try to be elected in the order of their node ids; a replica whose log is too old is
        refused. The event is repeated, because replicas that have not received it refuse to vote. On a
        repetition only the first replica tries again; the others keep their deadlines.
        """
        if (
            event.node_id == self.key.node_id
            or event.epoch < self.epoch
            or (event.epoch == self.epoch and self.leader not in (-1, event.node_id))
        ):
            return
        self.promise.release(event.epoch)
        if event.epoch > self.epoch:
            self.adopt_epoch(event.epoch, now_ns)
        elif self.election is not None:
            return
        is_repeated = self._ended_epoch == self.epoch and self.leader < 0
        others = sorted(voter.node_id for voter in self.log.voters if voter.node_id != event.node_id)
        rank = others.index(self.key.node_id) if self.key.node_id in others else len(others)
        if not is_repeated or rank == 0:
            self.end_epoch()
            self.become_unattached(now_ns, now_ns + self.settings.handover_ns + rank * self.settings.backoff_ns[0])

    def _on_fetch(self, sender: int, fetch: Fetch, now_ns: int) -> None:
        if fetch.replica.node_id != sender:
            return
        if fetch.epoch > self.epoch and (self.leading is not None or not self.promise.holds(now_ns)):
            self._on_overtaken(fetch.epoch, now_ns)
        if self.leading is not None and fetch.epoch == self.epoch:
            self.leading.on_fetch(fetch, now_ns)
        else:
            self.send(sender, FetchResponse(self.generation, self.epoch, self.leader, self.key, fetch.sequence, 0))

    def _on_overtaken(self, epoch: int, now_ns: int) -> None:
        """Another replica fetches in a newer epoch, and cannot return to the older one. So a leader gives
        up its lease, and a voter soon starts an election in a newer epoch.
        """
        if self.leading is not None:
            self.leading.resign(f"a replica is already in epoch {epoch}", now_ns, campaign_again=True)
        self.adopt_epoch(epoch, now_ns)
        if self.may_campaign:
            self.election_deadline_ns = min(
                self.election_deadline_ns, max(self.promise.until_ns, now_ns + self.random_backoff())
            )

    def _on_fetch_snapshot(self, sender: int, fetch: FetchSnapshot, now_ns: int) -> None:
        if fetch.replica.node_id == sender and self.leading is not None and fetch.epoch == self.epoch:
            self.leading.on_fetch_snapshot(fetch, now_ns)

    def _on_fetch_response(self, sender: int, response: FetchResponse, now_ns: int) -> None:
        if response.sender.node_id != sender:
            return
        if response.epoch > self.epoch or (response.epoch == self.epoch and self.leader < 0 and response.leader >= 0):
            self.learn_leader(response.epoch, response.leader, sender, now_ns)
        elif self.following is not None and response.epoch == self.epoch and sender == self.leader:
            if response.leader == sender:
                self.following.on_fetch_response(response, now_ns)
            elif response.sequence == self.following.sequence:  # no longer the leader
                self.end_epoch()
                self.become_unattached(now_ns, now_ns + self.random_backoff())

    def _on_snapshot_chunk(self, sender: int, chunk: SnapshotChunk, now_ns: int) -> None:
        if self.following is not None and chunk.epoch == self.epoch and chunk.sender.node_id == sender == self.leader:
            self.following.on_snapshot_chunk(chunk, now_ns)

    # -- roles -------------------------------------------------------------------------------------

    def learn_leader(self, epoch: int, leader: int, sender: int, now_ns: int) -> None:
        """`sender` reports that `leader` (-1: none) leads `epoch`, which is not below ours. A report
        without a leader does not make this replica leave a known leader.
        """
        if leader == self.key.node_id or (leader < 0 and (epoch == self.epoch or self.promise.holds(now_ns))):
            return
        if epoch == self._ended_epoch or (epoch == self._doubted_epoch and leader != sender):
            return
        if epoch > self.epoch:
            if self.leading is not None:
                self.leading.resign(f"epoch {epoch} has begun", now_ns)
            self.adopt_epoch(epoch, now_ns)
        if leader >= 0 and self.leader < 0:
            self._leave_role()
            self.leader = leader
            self.following = self.following_class(self, leader, now_ns)
            self.following.maybe_fetch(now_ns)

    def doubt_leader(self) -> None:
        """Notes that the leader of this epoch is silent. Until it sends a message itself, other
        replicas' reports about it are ignored; otherwise replicas would keep referring each other to it.
        """
        self._doubted_epoch = self.epoch

    def end_epoch(self) -> None:
        """Notes that the leader of this epoch has resigned. It never leads this epoch again, even if
        messages from it are still in flight.
        """
        self._ended_epoch = self.epoch

    def adopt_epoch(self, epoch: int, now_ns: int) -> None:
        """Moves to a newer epoch whose leader is not known."""
        if self.leading is not None:
            self.leading.resign(f"epoch {epoch} has begun", now_ns)
        self.persist_vote(VoteState(epoch, None, self.vote.followed))
        self.become_unattached(now_ns, now_ns + self.settings.promise_ns + self.random_backoff())

    def become_unattached(self, now_ns: int, election_deadline_ns: int) -> None:
        self._leave_role()
        self.leader = -1
        self.election_deadline_ns = (
            max(election_deadline_ns, self.promise.until_ns) if self.may_campaign else NO_DEADLINE
        )
        self._discover_at_ns = now_ns + self.random_backoff() if not self.is_alone else NO_DEADLINE

    def _leave_role(self) -> None:
        assert self.leading is None, "resign() first"
        self.following = self.election = None
        self.election_deadline_ns = self._discover_at_ns = NO_DEADLINE

    def campaign(self, now_ns: int) -> None:
        """Starts a pre-vote. If this replica is not a voter, has given a promise, or is installing a
        snapshot, it becomes unattached instead.
        """
        if not self.may_campaign:
            self.become_unattached(now_ns, NO_DEADLINE)
        elif self.promise.holds(now_ns) or self._installing is not None:
            self.become_unattached(now_ns, now_ns + self.settings.backoff_ns[1])
        else:
            self._leave_role()
            self.leader = -1
            self.election = self.election_class(self, now_ns)
            self.election.begin(now_ns)

    def become_leader(self, now_ns: int) -> None:
        if self.high_watermark > self.log.end_offset:
            raise QuorumBroken(
                f"elected in epoch {self.epoch} with a log that ends at {self.log.end_offset}; {self.high_watermark}"
                " records are committed"
            )
        self._leave_role()
        self.leader = self.key.node_id
        self.leading = self.leadership_class(self, now_ns)
        self.leading.begin(now_ns)

    def _discover(self, now_ns: int) -> None:
        """Queries the next of the hosts that may know a leader."""
        nodes = sorted({voter.node_id for voter in self.log.voters} | set(self.peers))
        nodes = [node for node in nodes if node != self.key.node_id]
        self._discover_at_ns = (
            now_ns + self.settings.promise_ns // 8
            if self.leading is None and self.following is None and nodes
            else NO_DEADLINE
        )
        if nodes:
            self._discover_count += 1
            self._send_discovery_fetch(nodes[self._discover_count % len(nodes)])

    def _send_discovery_fetch(self, node: int) -> None:
        self.send(node, self.make_fetch(0))

    def make_fetch(self, stamp_ns: int) -> Fetch:
        self._fetch_sequence += 1
        offset = min(self.durable_offset, self.log.end_offset)
        return Fetch(
            self.generation,
            self.epoch,
            self.key,
            self._fetch_sequence,
            offset,
            self.log.epoch_before(offset),
            self.high_watermark,
            stamp_ns,
        )

    def next_request_sequence(self) -> int:
        self._fetch_sequence += 1
        return self._fetch_sequence

    def random_backoff(self) -> int:
        low, high = self.settings.backoff_ns
        return self.rng.randint(low, high)

    def on_applied(self) -> None:
        if self.leading is not None:
            self.leading.on_applied()

    def _emit_changes(self, now_ns: int) -> None:
        if self._emitted_leader != (self.leader, self.epoch):
            self._emitted_leader = (self.leader, self.epoch)
            self.emit(events.LeaderChanged(self.leader, self.epoch))
        if self._emitted_voters != self.log.voters:
            self._emitted_voters = self.log.voters
            self.emit(events.VotersChanged(self.log.voters))
            if (
                self.leader < 0
                and self.election is None
                and self.may_campaign
                and self.election_deadline_ns == NO_DEADLINE
            ):
                self.election_deadline_ns = max(now_ns, self.promise.until_ns) + self.settings.promise_ns

    # -- invariants --------------------------------------------------------------------------------

    def check(self, check_log: bool = True) -> None:
        super().check(check_log)
        assert sum(role is not None for role in (self.leading, self.following, self.election)) <= 1
        assert (self.leading is not None) == (self.leader == self.key.node_id)
        assert (self.following is not None) == (self.leader >= 0 and self.leading is None)
        assert (
            self.next_deadline_ns < NO_DEADLINE
            or self.is_alone
            or (self.leading is None and not self.log.voters and not self.peers)
        )
        if self.leading is not None:
            self.leading.check()


def standalone_meta(meta: SnapshotMeta, survivors: Voters) -> SnapshotMeta:
    """force-standalone: returns the same snapshot in a new generation with these voters, which are
    treated as founding voters. Members of the old generation are refused.
    """
    return SnapshotMeta(meta.offset, meta.epoch, survivors, meta.generation + 1)


_HANDLERS: dict[type, Callable[[QuorumCore, Any, int], None]] = {
    events.Start: QuorumCore._on_start,
    events.Received: QuorumCore._on_received,
    events.Tick: QuorumCore._on_tick,
    events.DiskDone: QuorumCore._on_disk_done,
    events.DiskRefused: QuorumCore._on_disk_refused,
    events.Propose: QuorumCore._on_propose,
    events.SnapshotStored: QuorumCore._on_snapshot_stored,
    events.SnapshotRead: QuorumCore._on_snapshot_read,
    events.AddVoter: QuorumCore._on_voter_change,
    events.RemoveVoter: QuorumCore._on_voter_change,
    events.UpdateVoter: QuorumCore._on_voter_change,
    events.TransferLeadership: QuorumCore._on_transfer,
    events.LeaderDied: QuorumCore._on_leader_died,
    events.PeersKnown: QuorumCore._on_peers_known,
}

_MESSAGE_HANDLERS: dict[type, Callable[[QuorumCore, int, Any, int], None]] = {
    VoteRequest: QuorumCore._on_vote_request,
    VoteResponse: QuorumCore._on_vote_response,
    BeginEpoch: QuorumCore._on_begin_epoch,
    EndEpoch: QuorumCore._on_end_epoch,
    Fetch: QuorumCore._on_fetch,
    FetchResponse: QuorumCore._on_fetch_response,
    FetchSnapshot: QuorumCore._on_fetch_snapshot,
    SnapshotChunk: QuorumCore._on_snapshot_chunk,
}
