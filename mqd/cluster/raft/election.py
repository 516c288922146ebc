"""A voter's election: first a pre-vote (KIP-996), then, if a majority agrees, a new epoch and the
requests for votes.

A round ends when it can no longer succeed or times out. The next round begins after a random delay,
again with the pre-vote: an epoch begins only if a majority has lost its leader.
"""

from __future__ import annotations

from mqd.cluster.raft.events import VoteState
from mqd.cluster.raft.lease import majority
from mqd.cluster.raft.messages import VoteRequest, VoteResponse
from mqd.cluster.raft.replica import QuorumTransitions


class Election:
    def __init__(self, core: QuorumTransitions, now_ns: int) -> None:
        self.core = core
        self.is_pre_vote = True
        self.deadline_ns = now_ns
        self._round = 0
        self._granted: set[bytes] = set()  # directory ids
        self._refused: set[bytes] = set()

    def begin(self, now_ns: int) -> None:
        if self.core.is_alone:
            self.become_candidate(now_ns)
        else:
            self._request_votes(now_ns, self.core.settings.promise_ns // 8)
            self.maybe_win(now_ns)

    def become_candidate(self, now_ns: int) -> None:
        """Begins a new epoch and votes for itself; its own vote counts once it is durable."""
        core = self.core
        self.is_pre_vote = False
        core.persist_vote(VoteState(core.epoch + 1, core.key, None))
        self._request_votes(now_ns, core.settings.promise_ns // 4)

    def _request_votes(self, now_ns: int, wait_ns: int) -> None:
        core = self.core
        self._round = core.next_request_sequence()
        self._granted, self._refused = set(), set()
        self.deadline_ns = now_ns + wait_ns + core.random_backoff()
        for voter in core.voters:
            if voter.key != core.key:
                end, epoch = core.log.end_offset, core.log.last_epoch
                core.send(
                    voter.node_id,
                    VoteRequest(
                        core.generation, core.epoch, core.key, voter.key, end, epoch, self.is_pre_vote, self._round
                    ),
                )

    def on_response(self, response: VoteResponse, now_ns: int) -> None:
        is_current = response.round == self._round if self.is_pre_vote else response.epoch == self.core.epoch
        if not is_current or response.pre_vote != self.is_pre_vote:
            return
        (self._granted if response.granted else self._refused).add(response.voter.directory_id)
        self.maybe_win(now_ns)
        if self.core.election is self and sum(
            voter.key.directory_id not in self._refused for voter in self.core.voters
        ) < majority(len(self.core.voters)):
            self.core.become_unattached(now_ns, now_ns + self.core.random_backoff())

    def maybe_win(self, now_ns: int) -> None:
        core = self.core
        if not self.is_pre_vote and core.is_vote_pending:
            return
        votes = sum(voter.key == core.key or voter.key.directory_id in self._granted for voter in core.voters)
        if votes < majority(len(core.voters)):
            return
        if self.is_pre_vote:
            self.become_candidate(now_ns)
        else:
            core.become_leader(now_ns)

    def on_tick(self, now_ns: int) -> None:
        """Handles the timeout. Restarts it while this replica's own vote is being written to disk, because
        the requests for votes are not sent before it is durable.
        """
        if self.core.is_vote_pending:
            self.deadline_ns = now_ns + self.core.settings.promise_ns // 4
            return
        self.core.become_unattached(now_ns, now_ns + self.core.random_backoff())
