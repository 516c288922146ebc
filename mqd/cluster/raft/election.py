"""How a voter tries to be elected: first asks whether it would be (pre-vote, KIP-996), and only
with a majority's yes begins a new epoch and asks for votes.

A round that cannot succeed any more, or does not in time, ends; the next one begins after a random
while, with the pre-vote again: an epoch begins only where a majority misses its leader.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mqd.cluster.raft.events import VoteState
from mqd.cluster.raft.lease import majority
from mqd.cluster.raft.messages import VoteRequest, VoteResponse

if TYPE_CHECKING:
    from mqd.cluster.raft.core import QuorumCore


class Election:
    def __init__(self, core: QuorumCore, now_ns: int) -> None:
        self.core = core
        self.is_pre_vote = True
        self.deadline_ns = now_ns
        self._round = 0
        self._granted: set[bytes] = set()  # directory ids
        self._refused: set[bytes] = set()

    def begin(self, now_ns: int) -> None:
        if self.core.is_alone:
            self.stand(now_ns)
        else:
            self._ask(now_ns, self.core.settings.promise_ns // 8)
            self.maybe_win(now_ns)

    def stand(self, now_ns: int) -> None:
        """A new epoch, and the first vote in it: one's own, which counts when it is durable."""
        core = self.core
        self.is_pre_vote = False
        core.persist_vote(VoteState(core.epoch + 1, core.key, None))
        self._ask(now_ns, core.settings.promise_ns // 4)

    def _ask(self, now_ns: int, wait_ns: int) -> None:
        core = self.core
        self._round = core.next_fetch_sequence()
        self._granted, self._refused = set(), set()
        self.deadline_ns = now_ns + wait_ns + core.some_backoff()
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
        current = response.round == self._round if self.is_pre_vote else response.epoch == self.core.epoch
        if not current or response.pre_vote != self.is_pre_vote:
            return
        (self._granted if response.granted else self._refused).add(response.voter.directory_id)
        self.maybe_win(now_ns)
        if self.core.election is self and sum(
            voter.key.directory_id not in self._refused for voter in self.core.voters
        ) < majority(len(self.core.voters)):
            self.core.unattach(now_ns, now_ns + self.core.some_backoff())

    def maybe_win(self, now_ns: int) -> None:
        core = self.core
        if not self.is_pre_vote and core.is_vote_pending:
            return
        votes = sum(voter.key == core.key or voter.key.directory_id in self._granted for voter in core.voters)
        if votes < majority(len(core.voters)):
            return
        if self.is_pre_vote:
            self.stand(now_ns)
        else:
            core.elected(now_ns)

    def on_tick(self, now_ns: int) -> None:
        """Time is up; but nobody was asked yet while the own vote is on its way to the disk."""
        if self.core.is_vote_pending:
            self.deadline_ns = now_ns + self.core.settings.promise_ns // 4
            return
        self.core.unattach(now_ns, now_ns + self.core.some_backoff())
