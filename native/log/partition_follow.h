/* A partition's log as a replica has it: batches as another host's leader sent them, a high
 * watermark that somebody else decides, and the cut back to where two logs agree.
 *
 * Invariants
 *   F1  what is appended is byte for byte what the leader sent: offsets and epochs are kept, every
 *       CRC is checked, a batch begins where the log ends (behind a gap only where a compaction may
 *       have left one: below the leader's high watermark, or as the topic's policy or the log
 *       itself say). Nothing of the first batch that breaks this, or behind it, is taken.
 *   F2  producers, transactions, aborted transactions and leader epochs are as if every batch below
 *       log end had been appended here.
 *   F3  a truncation deletes from the end, segment by segment, then cuts; epochs and snapshots
 *       follow: wherever it is interrupted, the log is a prefix of the old one not shorter than the
 *       new one, and what is beside it says nothing of records that are gone. Recovery carries the
 *       rest out.
 *   F4  a truncation below what was flushed leaves the file "truncated" behind: recovery trusts no
 *       recovery point above the offset in it. It goes when a checkpoint that was taken afterwards
 *       is on disk (mqd_truncation_forget).
 *   F5  a replicated partition's high watermark moves by mqd_partition_raise_high_watermark alone;
 *       it never exceeds log end; it falls only with a truncation below it.
 * Concurrency: as log/partition.h. mqd_partition_truncate and _restart_at block (they flush and
 * read): they run on a helper thread while nobody else touches the partition; neither is called
 * while a flush, a preallocation or a snapshot of it is under way, or anything is staged.
 */
#ifndef MQD_PARTITION_FOLLOW_H
#define MQD_PARTITION_FOLLOW_H

#include "log/partition.h"
#include "replica/rules.h" /* struct mqd_epoch */

/* ---- the high watermark of a replicated partition ---- */

/* From now on (or no longer) replicated: the high watermark does not follow durable or log end by
 * itself. On becoming replicated it stays where it is. */
void mqd_partition_set_replicated(struct mqd_partition *partition, bool replicated);
bool mqd_partition_replicated(const struct mqd_partition *partition);
/* One that is opened as replicated (struct mqd_recovery) begins with the high watermark that is
 * told there. */
/* To `offset`, at most log end; never down. An offset inside of a batch counts as its beginning.
 * Returns whether it moved. Settles transactions. */
bool mqd_partition_raise_high_watermark(struct mqd_partition *partition, int64_t offset);

/* ---- appending ---- */

enum mqd_follow_error {
    /* all whole batches were staged; what is behind taken_bytes is the beginning of one more (a
     * leader may cut an answer anywhere) */
    MQD_FOLLOW_OK,
    MQD_FOLLOW_FULL,    /* as many are staged as one write takes: write, then go on behind taken_bytes */
    MQD_FOLLOW_CORRUPT, /* the batch behind taken_bytes is none, or its CRC is wrong */
    MQD_FOLLOW_OFFSET,  /* ... does not begin where the log ends */
    /* ... begins below the end of an empty log and reaches beyond it (the leader's log start lies
     * inside of it): restart there, with its base offset (next_offset) */
    MQD_FOLLOW_BEFORE,
    MQD_FOLLOW_EPOCH, /* ... is of a higher epoch than the leader's */
    MQD_FOLLOW_FAILED /* the partition is fenced, or no memory */
};
struct mqd_follow {
    uint64_t taken_bytes; /* whole batches from the beginning of `bytes` that were staged */
    uint32_t batch_count;
    uint64_t record_count;
    int64_t next_offset; /* where the log will end */
    const char *reason;  /* static text; NULL = OK */
};
/* Stages the whole batches of `bytes`, which must stay readable until mqd_partition_write. They are
 * a peer's. leader_epoch: of the leader that sent them. gaps_below: the leader's high watermark; a
 * batch behind a gap begins there at the latest, for compaction leaves none above. -1: there is
 * none at all. now_ms: wall clock. Returns enum mqd_follow_error; *out is filled with every one of
 * them. */
int mqd_partition_follow(struct mqd_partition *partition, const uint8_t *bytes, uint64_t size_bytes,
                         int32_t leader_epoch, int64_t gaps_below, int64_t now_ms, struct mqd_follow *out);

/* ---- epochs ---- */

/* Those of the log that have records, ascending; valid until the next write or truncation. For
 * mqd_replica_*. */
const struct mqd_epoch *mqd_partition_epochs(const struct mqd_partition *partition, uint32_t *count);
/* Where an epoch ends here: as mqd_replica_epoch_end. */
void mqd_partition_epoch_end(const struct mqd_partition *partition, int32_t epoch, int32_t *found, int64_t *end_offset);

/* ---- cutting ---- */

struct mqd_truncation {
    int64_t log_end_offset; /* where the log ends now: `offset`, or the end of the last batch below it */
    int64_t cut_bytes;
    bool below_high_watermark; /* committed records went: an unclean election, or a leader that is wrong */
};
/* Cuts the log so that no batch reaches beyond `offset`. Nothing happens when none does. 0; -1:
 * mqd_error set, and the partition is fenced, or as it was: there is no space for the mark now, no
 * descriptor, no memory. On disk when it returns. */
int mqd_partition_truncate(struct mqd_partition *partition, int64_t offset, int64_t now_ms, struct mqd_truncation *out);
/* Empties the log; it begins and ends at `offset` then, which may lie anywhere. As truncate
 * otherwise. batch_offset: below `offset` when the leader's log start lies inside of a batch, which
 * begins there (MQD_FOLLOW_BEFORE); it may then be appended. Else `offset`. */
int mqd_partition_restart_at(struct mqd_partition *partition, int64_t offset, int64_t batch_offset, int64_t now_ms,
                             struct mqd_truncation *out);

#endif
