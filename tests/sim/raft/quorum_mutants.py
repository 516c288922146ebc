"""Planted bugs in the quorum: each switches one rule off. The simulator must find every one of
them, by its schedules or by a directed trace.
"""

from __future__ import annotations

import msgspec

from mqd.cluster.raft.core import QuorumCore
from mqd.cluster.raft.election import Election
from mqd.cluster.raft.events import (
    NO_DEADLINE,
    AppendLog,
    Committed,
    DiskDone,
    InstallSnapshot,
    LeaderDied,
    PersistVote,
    QuorumSettings,
    TruncateLog,
)
from mqd.cluster.raft.follower import Following
from mqd.cluster.raft.leader import Leadership
from mqd.cluster.raft.messages import EndEpoch, Fetch
from mqd.cluster.raft.progress import Replica
from mqd.cluster.raft.voters import VoterChanges
from tests.sim.raft.quorum_host import Host

# -- elections -------------------------------------------------------------------------------------


class EpochAtOnce(Election):
    def begin(self, now_ns: int) -> None:
        self.become_candidate(now_ns)


class NoPreVote(QuorumCore):
    """A voter that loses its leader begins an epoch without checking whether others do too."""

    election_class = EpochAtOnce


class Deaf(Leadership):
    def _majority_contact_ns(self, now_ns: int) -> int:
        return max(super()._majority_contact_ns(now_ns), min(now_ns, 10**17))


class NoCheckQuorum(QuorumCore):
    """A leader stays leader though no voter fetches."""

    leadership_class = Deaf


class VoteForAnyLog(QuorumCore):
    """A candidate whose log lacks committed records gets votes."""

    def _is_up_to_date(self, request) -> bool:
        return True


class ForgetsVote(QuorumCore):
    """The vote is not written."""

    def handle(self, event, now_ns):
        effects = super().handle(event, now_ns)
        votes = [effect for effect in effects if isinstance(effect, PersistVote)]
        others = [effect for effect in effects if not isinstance(effect, PersistVote)]
        if (
            votes
            and not any(isinstance(effect, AppendLog | TruncateLog | InstallSnapshot) for effect in others)
            and all(entry[1] == "vote" for entry in self._pending_writes)
        ):
            return others + self.handle(DiskDone(votes[-1].sequence), now_ns)
        return effects


# -- the lease -------------------------------------------------------------------------------------


class VoteAfterRestart(QuorumCore):
    """The promise of the previous process is forgotten."""

    def may_have_promised(self) -> bool:
        return False


class VoteAgainstPromise(QuorumCore):
    def is_bound(self, now_ns: int) -> bool:
        return False

    def may_vote(self, now_ns: int) -> bool:
        return self.leading is None


class StampsReceipt(Leadership):
    def update_stamp(self, replica: Replica, stamp_ns: int, now_ns: int) -> None:
        if stamp_ns > 0:
            replica.stamp_ns = now_ns


class LeaseFromReceipt(QuorumCore):
    """The lease counts from when the leader receives the promise."""

    leadership_class = StampsReceipt


class LeaseIsPromise(QuorumCore):
    """L = P: no margin for clocks that differ."""

    def __init__(self, key, stored, settings, rng) -> None:
        super().__init__(key, stored, _Generous(**msgspec.structs.asdict(settings)), rng)


class _Generous(QuorumSettings, frozen=True):
    @property
    def lease_ns(self) -> int:
        return self.promise_ns


class SpeaksTooSoon(Leadership):
    def resign(self, reason, now_ns, successor=None, campaign_again=False) -> None:
        if reason == "handed over":
            for key in self._successors_best_first():
                self.core.send(
                    key.node_id, EndEpoch(self.core.generation, self.epoch, self.core.key, (successor or 0,))
                )
        else:
            super().resign(reason, now_ns, successor, campaign_again)


class TransferWithLease(QuorumCore):
    """The successor may begin while the predecessor continues."""

    leadership_class = SpeaksTooSoon


class ProofOfAnyEpoch(QuorumCore):
    """A proof that the leader of an epoch has died is applied to the current leader."""

    def handle(self, event, now_ns):
        if isinstance(event, LeaderDied) and self.leader not in (-1, self.key.node_id):
            event = LeaderDied(self.leader, self.epoch)
        return super().handle(event, now_ns)


# -- the log ---------------------------------------------------------------------------------------


class CountsUnflushed(Leadership):
    def own_position(self) -> int:
        return self.core.log.end_offset


class LeaderCountsBeforeFlush(QuorumCore):
    leadership_class = CountsUnflushed


class Hasty(Following):
    @property
    def is_flushed(self) -> bool:
        return not self.core.is_installing


class FollowerFetchesBeforeFlush(QuorumCore):
    following_class = Hasty

    def make_fetch(self, stamp_ns: int) -> Fetch:
        fetch = super().make_fetch(stamp_ns)
        return msgspec.structs.replace(fetch, offset=self.log.end_offset, last_epoch=self.log.last_epoch)


class CommitsAnyEpoch(Leadership):
    def may_commit(self, offset: int) -> bool:
        return True


class CommitOfOlderEpoch(QuorumCore):
    """A majority has it, but the next leader may lack it (Raft, figure 8)."""

    leadership_class = CommitsAnyEpoch


class Trusting(Leadership):
    def on_fetch(self, fetch: Fetch, now_ns: int) -> None:
        if fetch.generation and self.core.log.start_offset <= fetch.offset <= self.core.log.end_offset:
            fetch = msgspec.structs.replace(fetch, last_epoch=self.core.log.epoch_before(fetch.offset))
        super().on_fetch(fetch, now_ns)


class NoEpochCheck(QuorumCore):
    """A follower's offset counts, whatever precedes it."""

    leadership_class = Trusting


class EffectBeforeCommit(QuorumCore):
    """Records on the leader's own disk are applied."""

    def _deliver_committed(self) -> None:
        if self.leading is not None and self.durable_offset > self.applied_offset:
            batches = self.log.read(self.applied_offset, self.durable_offset, NO_DEADLINE)
            self.applied_offset = self.durable_offset
            self.high_watermark = max(self.high_watermark, self.durable_offset)
            self.emit(Committed(batches))
        super()._deliver_committed()


# -- voters ----------------------------------------------------------------------------------------


class BeforeOwnEpoch(VoterChanges):
    def may_change(self) -> bool:
        return self._core.log.voters_offset < self._core.high_watermark

    def _has_live_majority(self, voters, now_ns) -> bool:
        return True  # before that no voter can have caught up


class ChangesBeforeOwnEpoch(Leadership):
    changes_class = BeforeOwnEpoch

    def on_applied(self) -> None:
        if self.core.applied_offset == self.core.log.end_offset:
            super().on_applied()


class SingleServerChangeBug(QuorumCore):
    """A change of the voters before the leader has committed anything in its own epoch: two
    successive leaders each have one in flight, and their majorities do not intersect.
    """

    leadership_class = ChangesBeforeOwnEpoch


class AnyTime(VoterChanges):
    def request(self, event, now_ns) -> None:
        self._change = None
        super().request(event, now_ns)

    def may_change(self) -> bool:
        return self._leading.is_active


class ManyChanges(Leadership):
    changes_class = AnyTime


class TwoChangesAtOnce(QuorumCore):
    leadership_class = ManyChanges


# -- the lease of brokers, in the world's own model of it ------------------------------------------


class ZombieGrants(Host):
    """A controller renews leases, and fences, though its own has expired."""

    def may_grant(self) -> bool:
        return self.is_active


class FencesAtOnce(Host):
    """A new controller counts silence from before its election."""

    def begin_sessions(self) -> None:
        super().begin_sessions()
        self.silent_since = {node: since - 5_500_000_000 for node, since in self.silent_since.items()}


class DeadlineFromReceipt(Host):
    """A broker's lease counts from when the response arrives."""

    def on_granted(self, stamp_ns: int) -> None:
        super().on_granted(self.clock.now())


# -- keepers ---------------------------------------------------------------------------------------


class ProvesTooSoon(Host):
    """A keeper that sends the proof when the controller's connection has ended: the process may
    continue.
    """

    def deposed(self) -> None:
        super().deposed()
        if self.process is None and self.core is None:
            return
        self.world.kernel.after(0, self.process, self._doubt)

    def _doubt(self) -> None:
        if self.world.kernel.random.random() < 0.05:
            self.prove(self.led_epoch)
        self.world.kernel.after(300_000, self.process, self._doubt)
