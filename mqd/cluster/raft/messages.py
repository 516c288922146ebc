"""The data types and messages of the metadata quorum: voters, batches, and the messages of a pull
Raft with pre-vote and a lease.

The protocol is like KRaft's (KIP-595, KIP-853, KIP-996): voters and observers fetch; the leader never
pushes. Every message has the generation of the cluster, which only an operator's `force-standalone`
raises: members of different generations do not communicate. Delivery is best effort: lost, repeated
and reordered messages are harmless.

Bounds: a batch has at most BATCH_BYTES_MAX of values, a response to Fetch FETCH_BYTES_MAX unless its
first batch alone is larger, a snapshot's chunk SNAPSHOT_CHUNK_BYTES. All offsets are those of the
metadata log; control batches (leader changes, voter sets) take offsets like others. Stamps are
nanoseconds of the leader's CLOCK_BOOTTIME.
"""

import zlib

import msgspec

BATCH_BYTES_MAX = 8 << 20
FETCH_BYTES_MAX = 1 << 20
SNAPSHOT_CHUNK_BYTES = 1 << 20
SNAPSHOT_BYTES_MAX = 1 << 30
VOTERS_MAX = 7  # five, plus two during a change

DATA, LEADER_CHANGE, VOTERS = 0, 1, 2
"""Kinds of a batch: the state machine's records; the first batch of a leader's epoch; a new voter set,
which is in force as soon as it is in a log, even if it is not committed.
"""


# -- members ---------------------------------------------------------------------------------------


class ReplicaKey(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A member of the quorum. A host that lost its disk has a new directory id, so it is another member
    and not a voter.
    """

    node_id: int
    directory_id: bytes  # 16 bytes


class Voter(msgspec.Struct, frozen=True, array_like=True, order=True):
    key: ReplicaKey
    host: str  # address of its controller listener
    port: int

    @property
    def node_id(self) -> int:
        return self.key.node_id


Voters = tuple[Voter, ...]  # sorted; node ids are unique

FOUNDED, GROWING, SHRUNK = 0, 1, 2
"""The trend of a voter set's size. FOUNDED: as founded, or unknown; GROWING: voters were added;
SHRUNK: an operator has removed a voter, and there have not been VOTERS_TARGET voters since.
"""
VOTERS_TARGET = 3


def trend_after(trend: int, before: Voters, voters: Voters) -> int:
    """Returns the trend of `voters`, which replace the set `before`, whose trend was `trend`. Only an
    operator removes a voter, so the smaller number is intended (SHRUNK), even while the removed voter
    is being replaced.
    """
    old, new = {voter.key for voter in before}, {voter.key for voter in voters}
    if old - new:
        return SHRUNK
    if not new - old or (trend == SHRUNK and len(new) < VOTERS_TARGET):
        return trend
    return GROWING


# -- the log ---------------------------------------------------------------------------------------


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """Records that the leader of `epoch` appended together: all of them are committed, or none."""

    base_offset: int
    epoch: int
    kind: int
    values: tuple[bytes, ...]  # never empty; opaque, except in control batches
    crc: int  # of the values; the messages between hosts have no other checksum

    @property
    def next_offset(self) -> int:
        return self.base_offset + len(self.values)

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.values))

    @property
    def is_sound(self) -> bool:
        return bool(self.values) and self.crc == checksum(self.values)


def checksum(values: tuple[bytes, ...]) -> int:
    crc = 0
    for value in values:
        crc = zlib.crc32(value, zlib.crc32(len(value).to_bytes(4, "big"), crc))
    return crc


def make_batch(base_offset: int, epoch: int, kind: int, values: tuple[bytes, ...]) -> Batch:
    return Batch(base_offset, epoch, kind, values, checksum(values))


def leader_change_batch(base_offset: int, epoch: int, leader: ReplicaKey) -> Batch:
    return make_batch(base_offset, epoch, LEADER_CHANGE, (msgspec.msgpack.encode(leader),))


def voters_batch(base_offset: int, epoch: int, voters: Voters) -> Batch:
    return make_batch(base_offset, epoch, VOTERS, (msgspec.msgpack.encode(voters),))


_voters_decoder = msgspec.msgpack.Decoder(Voters)


def voters_of(batch: Batch) -> Voters:
    """The voter set in a batch of kind VOTERS. Raises msgspec.DecodeError."""
    return _voters_decoder.decode(batch.values[0])


class SnapshotMeta(msgspec.Struct, frozen=True, array_like=True):
    """Stored with the state in a snapshot, which replaces the log's records below `offset`."""

    offset: int  # the first offset that is not in the snapshot
    epoch: int  # epoch of the last record in the snapshot; 0 if there is none
    voters: Voters  # the voters in force at `offset`
    generation: int  # generation of the cluster, from 1
    trend: int = FOUNDED  # trend of `voters`; versions without this field ignore and omit it


# -- elections -------------------------------------------------------------------------------------


class VoteRequest(msgspec.Struct, frozen=True, tag="q.vote"):
    """Requests a vote in `epoch`. With `pre_vote`, asks whether the voter would grant one in the
    epoch after `epoch` (KIP-996).
    """

    generation: int
    epoch: int
    candidate: ReplicaKey
    voter: ReplicaKey  # the intended voter; a replica with another directory must not respond
    log_end_offset: int
    log_end_epoch: int
    pre_vote: bool
    round: int  # repeated in the response


class VoteResponse(msgspec.Struct, frozen=True, tag="q.voted"):
    generation: int
    epoch: int  # the voter's epoch
    voter: ReplicaKey
    granted: bool
    pre_vote: bool
    round: int
    leader: int  # node id of the leader of `epoch`, -1 = not known


class BeginEpoch(msgspec.Struct, frozen=True, tag="q.begin"):
    """The sender leads `epoch`; the receiver should fetch. Sent to voters that have not fetched in this
    epoch yet.
    """

    generation: int
    epoch: int
    leader: ReplicaKey


class EndEpoch(msgspec.Struct, frozen=True, tag="q.end"):
    """The sender no longer leads `epoch` and has no lease: promises to it end. `successors`: node ids in
    the order in which they try to be elected, the best first.
    """

    generation: int
    epoch: int
    leader: ReplicaKey
    successors: tuple[int, ...]


# -- replication -----------------------------------------------------------------------------------


class Fetch(msgspec.Struct, frozen=True, tag="q.fetch"):
    """All records below `offset` are on the sender's disk. A receiver that is not the leader returns the
    leader in its response.
    """

    generation: int  # 0: the sender has no snapshot yet, and accepts the leader's generation
    epoch: int
    replica: ReplicaKey
    sequence: int  # rises with every request of a replica; repeated in the response
    offset: int
    last_epoch: int  # epoch of the record before `offset`
    high_watermark: int  # the sender's
    stamp_ns: int  # stamp of the newest response that the sender has accepted in this epoch; 0 = none


class FetchResponse(msgspec.Struct, frozen=True, tag="q.fetched"):
    generation: int
    epoch: int
    # node id of the leader of `epoch`, -1 = not known; it can be another host than the sender
    leader: int
    sender: ReplicaKey
    sequence: int
    sent_ns: int  # a time at or before the sending; 0 if the sender does not lead
    high_watermark: int = -1
    batches: tuple[Batch, ...] = ()
    # (epoch, its end offset): the logs diverge no later than there (KIP-595)
    diverging: tuple[int, int] | None = None
    # the requested offset is older than the log: fetch this first
    snapshot: SnapshotMeta | None = None
    snapshot_bytes: int = 0


class FetchSnapshot(msgspec.Struct, frozen=True, tag="q.snapshot"):
    generation: int
    epoch: int
    replica: ReplicaKey
    sequence: int
    snapshot_offset: int
    snapshot_epoch: int
    position: int  # in bytes; need not be aligned
    stamp_ns: int


class SnapshotChunk(msgspec.Struct, frozen=True, tag="q.chunk"):
    generation: int
    epoch: int
    sender: ReplicaKey
    sequence: int
    sent_ns: int
    position: int
    data: bytes  # empty: the snapshot no longer exists, fetch again
    crc: int


QuorumMessage = (
    VoteRequest | VoteResponse | BeginEpoch | EndEpoch | Fetch | FetchResponse | FetchSnapshot | SnapshotChunk
)
