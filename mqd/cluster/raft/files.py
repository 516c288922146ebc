"""Encoding of the metadata log's files: the quorum's batches as record batches, snapshots, the
vote, and the mark of what is flushed and committed.

    NNNNNNNNNNNNNNNNNNNN.log          record batches with magic 2, one for each batch of the quorum.
                                      partition_leader_epoch is its epoch, and so is base_sequence,
                                      because the checksum covers only the latter. Records of the
                                      state machine have no key; a control batch has the control
                                      attribute and one record, whose key is version int16 0, type
                                      int16 (2 leader change, 6 voters: Kafka's numbers, KIP-595 and
                                      KIP-853)
    NNNNNNNNNNNNNNNNNNNN.checkpoint   "MQDMETA2", crc32c of the rest (uint32), size of the meta
                                      (uint32), size of the state (uint64; all big-endian),
                                      SnapshotMeta in msgpack, the state. In releases that predate
                                      clusters: "MQDMETA1", crc32c, size of the state, the state
    vote                              "MQDVOTE1", crc32c uint32, length uint32, VoteState in msgpack
    committed                         "MQDMARK2", base offset int64, position uint64, committed
                                      offset int64, crc32c uint32. In releases that predate clusters:
                                      "MQDMARK1", base offset int64, position uint64, crc32c uint32

Pure functions over bytes. Invalid data raises ValueError (for a batch its subclass CorruptBatch).
"""

from struct import Struct
from struct import error as StructError
from typing import NamedTuple

import msgspec

from mqd import native
from mqd.cluster.raft.events import VoteState
from mqd.cluster.raft.messages import DATA, LEADER_CHANGE, VOTERS, Batch, SnapshotMeta, make_batch
from mqd.log.batches import HEADER_BYTES, BatchInfo, CorruptBatch, parse_header
from mqd.log.records import records as stored_records
from mqd.protocol import records as codec

BATCH_BYTES_MAX = 64 << 20
_CONTROL_TYPES = {LEADER_CHANGE: 2, VOTERS: 6}
_KINDS = {number: kind for kind, number in _CONTROL_TYPES.items()}
_CONTROL_KEY = Struct(">hh")
_CHECKPOINT_1, _CHECKPOINT_2 = Struct(">8sIQ"), Struct(">8sIIQ")
_VOTE = Struct(">8sII")
_MARK_1, _MARK_2 = Struct(">8sqQI"), Struct(">8sqQqI")
MARK_BYTES = _MARK_2.size
_meta_decoder = msgspec.msgpack.Decoder(SnapshotMeta)
_vote_decoder = msgspec.msgpack.Decoder(VoteState)


# -- batches ---------------------------------------------------------------------------------------


def encode_batch(batch: Batch, now_ms: int) -> bytes:
    """Encodes a batch, uncompressed. `now_ms`: the timestamp of its records."""
    if batch.kind == DATA:
        records = [codec.Record(timestamp_ms=now_ms, value=value) for value in batch.values]
    else:
        records = [
            codec.Record(timestamp_ms=now_ms, key=_CONTROL_KEY.pack(0, _CONTROL_TYPES[batch.kind]), value=value)
            for value in batch.values
        ]
    return codec.encode_batch(
        records,
        base_offset=batch.base_offset,
        partition_leader_epoch=batch.epoch,
        base_sequence=batch.epoch,
        is_control=batch.kind != DATA,
    )


def read_header(data: bytes, position: int, base_offset: int) -> BatchInfo:
    """Checks the batch at `position` and returns its header. Raises CorruptBatch."""
    if len(data) - position < HEADER_BYTES:
        raise CorruptBatch(f"{len(data) - position} bytes are less than a batch header")
    batch = parse_header(data, position, position)
    size_max = min(BATCH_BYTES_MAX, len(data) - position)
    if batch.size_bytes > size_max:
        raise CorruptBatch(f"a batch of {batch.size_bytes} bytes, but at most {size_max} are possible here")
    if batch.base_offset != base_offset:
        raise CorruptBatch(f"base offset {batch.base_offset} where {base_offset} was expected")
    if native.crc32c(data[position + 21 : position + batch.size_bytes]) != batch.crc:
        raise CorruptBatch("the checksum does not match")
    if batch.record_count != batch.last_offset - batch.base_offset + 1:
        raise CorruptBatch(f"{batch.record_count} records for offsets {batch.base_offset} to {batch.last_offset}")
    if batch.partition_leader_epoch != max(batch.base_sequence, 0):
        raise CorruptBatch(f"epoch {batch.partition_leader_epoch} does not match base sequence {batch.base_sequence}")
    return batch


def decode_batch(header: BatchInfo, data: bytes, position: int) -> Batch:
    """Decodes a batch whose header was checked by read_header(). Raises CorruptBatch."""
    records = list(stored_records(header, data[position : position + header.size_bytes]))
    kind = DATA
    if header.is_control:
        if (
            len(records) != 1
            or records[0].key is None
            or len(records[0].key) != _CONTROL_KEY.size
            or _CONTROL_KEY.unpack(records[0].key)[1] not in _KINDS
        ):
            raise CorruptBatch("a control batch of a kind that this version of mqd does not know")
        kind = _KINDS[_CONTROL_KEY.unpack(records[0].key)[1]]
    return make_batch(
        header.base_offset, header.partition_leader_epoch, kind, tuple(record.value or b"" for record in records)
    )


def find_later_batch(data: bytes, position: int, base_offset: int) -> int:
    """Returns the position, after `position`, of a complete batch with a later offset; -1 = none. Computes
    the checksum only for candidates with a plausible header.
    """
    magic_position = data.find(b"\2", position + 17)
    while magic_position >= 0:
        start = magic_position - 16
        try:
            offset = int.from_bytes(data[start : start + 8], "big")
            if base_offset < offset < base_offset + (1 << 40):
                read_header(data, start, offset)
                return start
        except CorruptBatch:
            pass
        magic_position = data.find(b"\2", magic_position + 1)
    return -1


# -- snapshots -------------------------------------------------------------------------------------


class CheckpointHead(NamedTuple):
    meta: SnapshotMeta | None  # None: format MQDMETA1
    state_position: int
    state_bytes: int


def encode_checkpoint(meta: SnapshotMeta, state: bytes) -> bytes:
    body = msgspec.msgpack.encode(meta)
    checksummed = Struct(">IQ").pack(len(body), len(state)) + body + state
    return b"MQDMETA2" + native.crc32c(checksummed).to_bytes(4, "big") + checksummed


def decode_checkpoint(data: bytes) -> CheckpointHead:
    """Raises ValueError if the bytes are damaged."""
    try:
        if data[:8] == b"MQDMETA1":
            _, crc, size = _CHECKPOINT_1.unpack_from(data)
            start, meta, checksummed = _CHECKPOINT_1.size, None, data[_CHECKPOINT_1.size :]
        else:
            magic, crc, meta_size, size = _CHECKPOINT_2.unpack_from(data)
            start, checksummed = _CHECKPOINT_2.size + meta_size, data[12:]
            if magic != b"MQDMETA2" or start > len(data):
                raise ValueError("it is not a metadata checkpoint")
        if native.crc32c(checksummed) != crc or len(data) - start != size:
            raise ValueError(f"checksum or length ({len(data) - start} bytes, {size} expected) does not match")
        if data[:8] == b"MQDMETA2":
            meta = _meta_decoder.decode(data[_CHECKPOINT_2.size : start])
    except (StructError, msgspec.MsgspecError) as error:
        raise ValueError(str(error)) from error
    return CheckpointHead(meta, start, size)


# -- vote and mark ---------------------------------------------------------------------------------


def encode_vote(vote: VoteState) -> bytes:
    body = msgspec.msgpack.encode(vote)
    return _VOTE.pack(b"MQDVOTE1", native.crc32c(body), len(body)) + body


def decode_vote(data: bytes) -> VoteState:
    """Raises ValueError if the bytes are damaged."""
    try:
        magic, crc, size = _VOTE.unpack_from(data)
        body = data[_VOTE.size :]
        if magic != b"MQDVOTE1" or size != len(body) or native.crc32c(body) != crc:
            raise ValueError("checksum or length does not match")
        return _vote_decoder.decode(body)
    except (StructError, msgspec.MsgspecError) as error:
        raise ValueError(str(error)) from error


class Mark(NamedTuple):
    base_offset: int  # base offset of the log file; -1 = the mark is empty
    position: int  # the file is flushed up to here, and all earlier files completely
    committed_offset: int  # known to be committed


def encode_mark(mark: Mark) -> bytes:
    body = _MARK_2.pack(b"MQDMARK2", *mark, 0)[:-4]
    return body + native.crc32c(body).to_bytes(4, "big")


def decode_mark(data: bytes) -> Mark:
    """Returns an empty mark if the bytes are invalid: the file is rewritten in place and can be torn."""
    if (
        data[:8] == b"MQDMARK1"
        and len(data) >= _MARK_1.size
        and native.crc32c(data[: _MARK_1.size - 4]) == _MARK_1.unpack_from(data)[-1]
    ):
        _, base_offset, position, _ = _MARK_1.unpack_from(data)
        return Mark(base_offset, position, 0)
    if (
        len(data) >= _MARK_2.size
        and data[:8] == b"MQDMARK2"
        and native.crc32c(data[: _MARK_2.size - 4]) == _MARK_2.unpack_from(data)[-1]
    ):
        return Mark(*_MARK_2.unpack_from(data)[1:4])
    return Mark(-1, 0, 0)
