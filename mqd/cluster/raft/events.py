"""Events and effects of the quorum core (raft/core.py): the contract between it, the disk, the
transport and the state machine.

What a shell must do
    order       effects are carried out in the order given; a nested event (a Propose because of a
                Committed) may be handled while it works through a list: what the disk is asked
                comes before everything that may lead to one
    disk        PersistVote, AppendLog, TruncateLog and InstallSnapshot carry rising `sequence`
                numbers and are carried out one after another, in that order. DiskDone(n) says:
                everything up to and with n is durable (fdatasync; vote: write aside, fsync, rename,
                fsync of the directory). One flush may cover many appends. A write that is known to
                have left nothing behind is DiskRefused(n): the shell drops what it has queued
                behind n as well, as if it had never been asked. A flush that fails ends the
                process.
    messages    Send is best effort. Receive only what came over an authenticated connection.
    time        `now_ns` of handle() is CLOCK_BOOTTIME (it counts suspend), never smaller than
                before in this process. Tick no later than next_deadline_ns.
    state       Committed batches are applied in order, all kinds (control batches only move the
                version). Nothing else ever takes effect. LoadState replaces the state.
    snapshots   the shell stores a snapshot of its applied state together with
                QuorumCore.snapshot_meta(offset), then says SnapshotStored.
"""

from collections.abc import Hashable

import msgspec

from mqd.cluster.raft.messages import Batch, QuorumMessage, ReplicaKey, SnapshotMeta, Voter, Voters

SECOND_NS = 1_000_000_000
NO_DEADLINE = (1 << 63) - 1


class QuorumSettings(msgspec.Struct, frozen=True):
    """Times in nanoseconds; all follow from the promise P (docs/design/cluster.md, 3.3)."""

    # P: after an answer of the leader a replica votes for nobody else for so long; also when it
    # begins to miss the leader
    promise_ns: int = 2 * SECOND_NS
    fetch_bytes_max: int = 1 << 20
    uncommitted_bytes_max: int = 32 << 20  # proposals beyond it are refused
    log_bytes_max: int = 20 << 20  # then SnapshotWanted
    retained_bytes: int = 4 << 20  # kept in memory before a snapshot, for those who are only a little behind

    @property
    def lease_ns(self) -> int:
        return self.promise_ns * 3 // 4  # L: clocks may differ in speed by a quarter

    @property
    def fetch_wait_ns(self) -> int:
        return self.promise_ns // 4  # an answer without news waits for news so long

    @property
    def fetch_retry_ns(self) -> int:
        return self.promise_ns * 3 // 8  # then it is asked again

    @property
    def check_quorum_ns(self) -> int:
        return self.promise_ns * 3 // 2  # a leader that a majority has not fetched from for so long resigns

    @property
    def backoff_ns(self) -> tuple[int, int]:
        return self.promise_ns // 40, self.promise_ns // 8  # between attempts to be elected, by chance

    @property
    def handover_ns(self) -> int:
        # so long a named successor waits: the others should have heard by then that their promise
        # has ended
        return self.promise_ns // 200


class VoteState(msgspec.Struct, frozen=True, array_like=True):
    """Durable; never regresses (I4)."""

    epoch: int = 0
    voted_for: ReplicaKey | None = None  # in `epoch`
    # the leader that was followed last, of any epoch: it may hold a promise. None since this
    # replica voted, for then it held none
    followed: ReplicaKey | None = None


class Stored(msgspec.Struct, frozen=True):
    """What the disk held at the start. A founded voter always has a snapshot (at offset 0 if need
    be): it names the voters. Nothing at all: a host that joins.
    """

    vote: VoteState = VoteState()
    snapshot: SnapshotMeta | None = None  # the state machine has loaded it already
    snapshot_bytes: int = 0
    batches: tuple[Batch, ...] = ()  # durable, from the snapshot's offset on (one that begins before it may come first)
    committed_offset: int = 0  # known to be committed; 0 is always right


# -- events ----------------------------------------------------------------------------------------


class Start(msgspec.Struct, frozen=True):
    """First of all."""


class Received(msgspec.Struct, frozen=True):
    sender: int  # node id, as the handshake proved it
    message: QuorumMessage


class Tick(msgspec.Struct, frozen=True):
    pass


class DiskDone(msgspec.Struct, frozen=True):
    sequence: int


class DiskRefused(msgspec.Struct, frozen=True):
    """Nothing of `sequence` and of what came after it was written (no space left)."""

    sequence: int
    reason: str


class Propose(msgspec.Struct, frozen=True):
    """Append these records as one batch. With `base_offset`: only if they get it, for their content
    rests on it.
    """

    token: Hashable
    values: tuple[bytes, ...]
    base_offset: int | None = None


class SnapshotStored(msgspec.Struct, frozen=True):
    """Durable: state and meta. The log below it may go."""

    meta: SnapshotMeta
    size_bytes: int  # of the state's bytes


class SnapshotRead(msgspec.Struct, frozen=True):
    """Answers ReadSnapshot. `data` empty: that snapshot is gone."""

    request: "ReadSnapshot"
    data: bytes


class AddVoter(msgspec.Struct, frozen=True):
    token: Hashable
    voter: Voter


class RemoveVoter(msgspec.Struct, frozen=True):
    token: Hashable
    key: ReplicaKey


class UpdateVoter(msgspec.Struct, frozen=True):
    """Another address of a voter; who votes does not change."""

    token: Hashable
    voter: Voter


class TransferLeadership(msgspec.Struct, frozen=True):
    """Give it to `to` (node id), or to whoever has most when None. Nothing happens on a host that
    does not lead. Deposed tells that it is done.
    """

    to: int | None = None


class LeaderDied(msgspec.Struct, frozen=True):
    """The process that led `epoch` on `node_id` has ended, and its host's keeper has proven it
    (death_notice.py): its lease has ended with it, and nobody ever leads that epoch again.
    """

    node_id: int
    epoch: int


class PeersKnown(msgspec.Struct, frozen=True):
    """Node ids that may know a leader, for a host that knows no voters yet (seeds)."""

    node_ids: tuple[int, ...]


Event = (
    Start
    | Received
    | Tick
    | DiskDone
    | DiskRefused
    | Propose
    | SnapshotStored
    | SnapshotRead
    | AddVoter
    | RemoveVoter
    | UpdateVoter
    | TransferLeadership
    | LeaderDied
    | PeersKnown
)


# -- effects ---------------------------------------------------------------------------------------


class Send(msgspec.Struct, frozen=True):
    to: int  # node id
    message: QuorumMessage


class PersistVote(msgspec.Struct, frozen=True):
    sequence: int
    vote: VoteState


class AppendLog(msgspec.Struct, frozen=True):
    sequence: int
    batches: tuple[Batch, ...]


class TruncateLog(msgspec.Struct, frozen=True):
    """Everything from `offset` on goes (never anything that was committed)."""

    sequence: int
    offset: int


class InstallSnapshot(msgspec.Struct, frozen=True):
    """Make it durable in place of the whole log. A snapshot that cannot be read is refused by
    DiskRefused.
    """

    sequence: int
    meta: SnapshotMeta
    data: bytes


class LoadState(msgspec.Struct, frozen=True):
    """The installed snapshot is durable: the state machine is now this; nobody was told of what
    lies between.
    """

    meta: SnapshotMeta
    data: bytes


class Committed(msgspec.Struct, frozen=True):
    batches: tuple[Batch, ...]  # gapless from the last one on

    @property
    def next_offset(self) -> int:
        return self.batches[-1].next_offset


class BecameActive(msgspec.Struct, frozen=True):
    """This host leads and everything before its own epoch is committed and was handed out: it may
    propose, from `next_offset` on.
    """

    epoch: int
    next_offset: int
    before: int = -1  # the last epoch before this one whose leader can have been active; 0 = none


class Deposed(msgspec.Struct, frozen=True):
    """It does not any more. Of what was proposed and is not committed nobody knows whether it will
    be.
    """

    epoch: int
    reason: str


class ControlAppended(msgspec.Struct, frozen=True):
    """On an active leader: a control batch has taken offsets up to here; the next proposal begins
    there. Comes before anything else of the same handle(), what it commits included.
    """

    next_offset: int


class ProposalRefused(msgspec.Struct, frozen=True):
    """It is in no log and never will be."""

    token: Hashable
    reason: str


class ProposalsDropped(msgspec.Struct, frozen=True):
    """The disk refused: proposals from `offset` on are in no log and never will be; the host still
    leads.
    """

    offset: int
    reason: str


class LeaderChanged(msgspec.Struct, frozen=True):
    """A hint where to go, not an authority."""

    leader: int  # node id, -1 = none known
    epoch: int


class VotersChanged(msgspec.Struct, frozen=True):
    """The newest voter set in the log, committed or not: whom to be connected with."""

    voters: Voters


class VoterChangeEnded(msgspec.Struct, frozen=True):
    """`error` is Kafka's code, 0 when the change is committed."""

    token: Hashable
    error: int
    message: str = ""


class SnapshotWanted(msgspec.Struct, frozen=True):
    """The log has grown: store a snapshot when convenient."""

    offset: int  # the high watermark


class ReadSnapshot(msgspec.Struct, frozen=True):
    """Read up to `size_bytes` of the snapshot's state from `position` on; answered by SnapshotRead.
    May be forgotten (the replica asks again).
    """

    to: int
    replica: ReplicaKey
    fetch_sequence: int
    epoch: int
    snapshot_offset: int
    snapshot_epoch: int
    position: int
    size_bytes: int


class Outdated(msgspec.Struct, frozen=True):
    """Another host belongs to a newer generation of the cluster (force-standalone): this one must
    be emptied and join anew.
    """

    generation: int
    sender: int


class Note(msgspec.Struct, frozen=True):
    """For the log file."""

    text: str
    fields: tuple[tuple[str, str], ...] = ()


Effect = (
    Send
    | PersistVote
    | AppendLog
    | TruncateLog
    | InstallSnapshot
    | LoadState
    | Committed
    | BecameActive
    | Deposed
    | ControlAppended
    | ProposalRefused
    | ProposalsDropped
    | LeaderChanged
    | VotersChanged
    | VoterChangeEnded
    | SnapshotWanted
    | ReadSnapshot
    | Outdated
    | Note
)
