"""Events and effects of the quorum core (raft/core.py): the contract between it, the disk, the
transport and the state machine.

Duties of the caller (mqd/controller)
    order       effects are carried out in the order given. A nested event (a Propose caused by a
                Committed) may be handled in the middle of a list: disk effects come before all
                effects that may cause such an event
    disk        PersistVote, AppendLog, TruncateLog and InstallSnapshot carry rising `sequence`
                numbers and are carried out one after another, in that order. DiskDone(n) means that
                all writes up to and including n are durable (fdatasync; for a vote: write a
                temporary file, fsync, rename, fsync of the directory). One flush may cover many
                appends. DiskRefused(n) means that write n has left nothing on the disk: the caller
                also drops all writes queued after n, as if they had never been requested. A failed
                flush ends the process.
    messages    Send is best effort. Pass on only messages from authenticated connections.
    time        `now_ns` of handle() is CLOCK_BOOTTIME (which includes time suspended), never decreasing
                within a process. Send Tick no later than next_deadline_ns.
    state       Committed batches of all kinds are applied in order (control batches only advance the
                version); no other records are applied. LoadState replaces the state.
    snapshots   the caller stores a snapshot of its applied state together with
                QuorumCore.snapshot_meta(offset), then sends SnapshotStored.
"""

from collections.abc import Hashable

import msgspec

from mqd.cluster.raft.messages import Batch, QuorumMessage, ReplicaKey, SnapshotMeta, Voter, Voters

SECOND_NS = 1_000_000_000
NO_DEADLINE = (1 << 63) - 1


class QuorumSettings(msgspec.Struct, frozen=True):
    """Times in nanoseconds; all are derived from the promise P (docs/design/cluster.md, 3.3)."""

    # P: for this long after a response of the leader, a replica does not vote for another one. Also the
    # time after which it considers its leader lost.
    promise_ns: int = 2 * SECOND_NS
    fetch_bytes_max: int = 1 << 20
    uncommitted_bytes_max: int = 32 << 20  # proposals beyond this are refused
    log_bytes_max: int = 20 << 20  # a longer log causes SnapshotWanted
    # records kept in memory below a snapshot, for replicas that are slightly behind
    retained_bytes: int = 4 << 20

    @property
    def lease_ns(self) -> int:
        return self.promise_ns * 3 // 4  # L: clock rates may differ by a quarter

    @property
    def fetch_wait_ns(self) -> int:
        return self.promise_ns // 4  # how long a Fetch waits for records

    @property
    def fetch_retry_ns(self) -> int:
        return self.promise_ns * 3 // 8  # time until the request is repeated

    @property
    def check_quorum_ns(self) -> int:
        # a leader resigns if a majority has not fetched from it for this long
        return self.promise_ns * 3 // 2

    @property
    def backoff_ns(self) -> tuple[int, int]:
        # range of the random delay between election attempts
        return self.promise_ns // 40, self.promise_ns // 8

    @property
    def handover_ns(self) -> int:
        # how long a named successor waits, so that the other replicas first receive EndEpoch, which
        # releases their promises
        return self.promise_ns // 200


class VoteState(msgspec.Struct, frozen=True, array_like=True):
    """Durable; never regresses (I4)."""

    epoch: int = 0
    voted_for: ReplicaKey | None = None  # in `epoch`
    # The last leader that this replica followed, in any epoch, which may still hold this replica's
    # promise. None if this replica has voted since: it votes only when no leader holds its promise.
    followed: ReplicaKey | None = None


class Stored(msgspec.Struct, frozen=True):
    """The contents of the disk at the start. A founding voter always has a snapshot with the voters, even
    if only at offset 0. A host with neither a snapshot nor batches is joining.
    """

    vote: VoteState = VoteState()
    snapshot: SnapshotMeta | None = None  # already loaded by the state machine
    snapshot_bytes: int = 0
    # durable; contiguous from the snapshot's offset (the first batch may begin before it)
    batches: tuple[Batch, ...] = ()
    committed_offset: int = 0  # known to be committed; 0 is always valid


# -- events ----------------------------------------------------------------------------------------


class Start(msgspec.Struct, frozen=True):
    """The first event."""


class Received(msgspec.Struct, frozen=True):
    sender: int  # node id, as authenticated in the handshake
    message: QuorumMessage


class Tick(msgspec.Struct, frozen=True):
    pass


class DiskDone(msgspec.Struct, frozen=True):
    sequence: int


class DiskRefused(msgspec.Struct, frozen=True):
    """The writes from `sequence` on were not carried out (no space left)."""

    sequence: int
    reason: str


class Propose(msgspec.Struct, frozen=True):
    """Append these records as one batch. With `base_offset`: only at that offset, because the records
    depend on it.
    """

    token: Hashable
    values: tuple[bytes, ...]
    base_offset: int | None = None


class SnapshotStored(msgspec.Struct, frozen=True):
    """The state and `meta` are durable. The log below the snapshot may be deleted."""

    meta: SnapshotMeta
    size_bytes: int  # size of the encoded state


class SnapshotRead(msgspec.Struct, frozen=True):
    """The response to ReadSnapshot. Empty `data`: that snapshot no longer exists."""

    request: "ReadSnapshot"
    data: bytes


class AddVoter(msgspec.Struct, frozen=True):
    token: Hashable
    voter: Voter


class RemoveVoter(msgspec.Struct, frozen=True):
    token: Hashable
    key: ReplicaKey


class UpdateVoter(msgspec.Struct, frozen=True):
    """Changes the address of a voter, not the set of voters."""

    token: Hashable
    voter: Voter


class TransferLeadership(msgspec.Struct, frozen=True):
    """Transfers leadership to `to` (node id), or to the replica with the longest log if None. Has no effect
    on a host that does not lead. Deposed follows when it is done.
    """

    to: int | None = None


class LeaderDied(msgspec.Struct, frozen=True):
    """The process that led `epoch` on `node_id` has ended, as its host's keeper has proven
    (death_notice.py). Its lease has ended with it, and no process leads that epoch again.
    """

    node_id: int
    epoch: int


class PeersKnown(msgspec.Struct, frozen=True):
    """Node ids of hosts (seeds) that may know a leader, for a host that does not know the voters yet."""

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
    """Remove all batches from `offset` on; committed records are never removed."""

    sequence: int
    offset: int


class InstallSnapshot(msgspec.Struct, frozen=True):
    """Replace the whole log with this snapshot, durably. An unreadable snapshot is refused with
    DiskRefused.
    """

    sequence: int
    meta: SnapshotMeta
    data: bytes


class LoadState(msgspec.Struct, frozen=True):
    """The installed snapshot is durable and replaces the state of the state machine. The changes between
    the two states are not reported.
    """

    meta: SnapshotMeta
    data: bytes


class Committed(msgspec.Struct, frozen=True):
    batches: tuple[Batch, ...]  # contiguous with the previous ones

    @property
    def next_offset(self) -> int:
        return self.batches[-1].next_offset


class BecameActive(msgspec.Struct, frozen=True):
    """This host leads, and all records before its own epoch are committed and have been delivered. It may
    propose from `next_offset` on.
    """

    epoch: int
    next_offset: int
    previous_epoch: int = -1  # the last earlier epoch in which a leader may have been active; 0 or -1: none


class Deposed(msgspec.Struct, frozen=True):
    """This host no longer leads. Whether uncommitted proposals will be committed is unknown."""

    epoch: int
    reason: str


class ControlAppended(msgspec.Struct, frozen=True):
    """An active leader has appended a control batch; the next proposal begins at `next_offset`. Precedes
    all other effects of the same handle(), including the commits that it causes.
    """

    next_offset: int


class ProposalRefused(msgspec.Struct, frozen=True):
    """The proposal will never be in a log."""

    token: Hashable
    reason: str


class ProposalsDropped(msgspec.Struct, frozen=True):
    """The disk refused a write: proposals from `offset` on will never be in a log. The host still leads."""

    offset: int
    reason: str


class LeaderChanged(msgspec.Struct, frozen=True):
    """The leader changed. Only a routing hint."""

    leader: int  # node id, -1 = none known
    epoch: int


class VotersChanged(msgspec.Struct, frozen=True):
    """The newest voter set in the log, committed or not: the hosts to keep connections to."""

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
    """Read up to `size_bytes` of the snapshot's state from `position` on, and respond with SnapshotRead.
    The response may be lost; then the replica retries.
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
    """Another host belongs to a newer generation of the cluster (force-standalone). This host must be
    emptied and join again.
    """

    generation: int
    sender: int


class Note(msgspec.Struct, frozen=True):
    """A line for the log file."""

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
