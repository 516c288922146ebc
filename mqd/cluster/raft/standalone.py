"""force-standalone: one host continues alone after a majority of the quorum's voters is permanently
lost. An operator runs it offline and accepts losses: committed changes that this host does not have
are lost; uncommitted changes in this host's log take effect (docs/design/cluster.md, 3.5).

It raises the generation of the cluster, so that a lost voter that returns is refused and cannot take
part in an election.
"""

from pathlib import Path
from typing import NamedTuple

from mqd.cluster.metadata.records import decode_record
from mqd.cluster.raft.core import standalone_meta
from mqd.cluster.raft.identity import MetadataCorrupt, load_or_create_key
from mqd.cluster.raft.messages import DATA, VOTERS, SnapshotMeta, Voter, voters_of
from mqd.cluster.raft.store import QuorumStore, encode_state


class StandaloneResult(NamedTuple):
    """The result of force_standalone()."""

    generation: int
    offset: int
    known_committed_offset: int  # changes from here to `offset` may not have been committed
    voters_before: tuple[int, ...]  # node ids


def force_standalone(directory: Path, node_id: int) -> StandaloneResult:
    """`directory`: DATA_DIR/metadata of a stopped broker (the caller holds its lock). Raises
    MetadataCorrupt, OSError.
    """
    if not (directory / "meta.properties").exists():
        raise MetadataCorrupt(f"{directory} has no metadata of a cluster")
    key = load_or_create_key(directory, node_id, b"\0" * 16)
    store = QuorumStore(directory, key)
    try:
        stored, state, _ = store.open()
        if stored.snapshot is None:
            raise MetadataCorrupt(f"{directory} has no metadata yet, so this host cannot continue alone")
        voters = stored.snapshot.voters
        for batch in stored.batches:
            for value in batch.values if batch.kind == DATA else ():
                state.apply(decode_record(value))
            voters = voters_of(batch) if batch.kind == VOTERS else voters
            state.version = batch.next_offset
        epoch = stored.batches[-1].epoch if stored.batches else stored.snapshot.epoch
        own = next((voter for voter in voters if voter.key == key), Voter(key, "", 0))
        meta = standalone_meta(SnapshotMeta(state.version, epoch, voters, stored.snapshot.generation), (own,))
        store.begin_generation(meta, encode_state(state))
        return StandaloneResult(
            meta.generation, meta.offset, stored.committed_offset, tuple(sorted(voter.node_id for voter in voters))
        )
    finally:
        store.close()
