/* A partition's log on a replica: batches as the leader sent them, a high watermark that is set
 * from outside, and truncation to where the two logs agree.
 *
 * Invariants
 *   F1  appended bytes are exactly what the leader sent: offsets and epochs are kept, every CRC is
 *       checked, and each batch begins where the log ends, or after a gap that compaction may have
 *       left (below the leader's high watermark, or where the topic's policy or the log itself
 *       allows gaps). The first batch that violates this, and everything after it, is not appended.
 *   F2  producers, transactions, aborted transactions and leader epochs are as if every batch below
 *       log end had been appended here.
 *   F3  a truncation deletes segments from the end, then truncates the last one; epochs and
 *       snapshots follow. Wherever it is interrupted, the log is a prefix of the old one and not
 *       shorter than the new one, and the files beside it contain nothing about removed records.
 *       Recovery completes it.
 *   F4  a truncation below the flushed end leaves a file truncated.NUMBER: recovery trusts no
 *       recovery point above the offset in it. The file is removed when a checkpoint that was taken
 *       afterwards is on disk (mqd/worker/maintenance.py).
 *   F5  only mqd_partition_raise_high_watermark moves a replicated partition's high watermark; it
 *       never exceeds log end, and decreases only with a truncation below it.
 * Concurrency: as in log/partition.h. mqd_partition_truncate and _restart_at block (they flush and
 * read). They run on a helper thread while no other thread touches the partition, and only if the
 * partition has nothing staged and no flush, preallocation or snapshot under way.
 */
#ifndef MQD_PARTITION_FOLLOW_H
#define MQD_PARTITION_FOLLOW_H

#include "log/partition.h"
#include "replica/rules.h" /* struct mqd_epoch */

/* ---- the high watermark of a replicated partition ---- */

/* Sets whether the partition is replicated: a replicated partition's high watermark does not follow
 * durable_offset or log end by itself. When a partition becomes replicated, its high watermark
 * stays unchanged. One that is opened as replicated starts with the high watermark in struct
 * mqd_recovery. */
void mqd_partition_set_replicated(struct mqd_partition *partition, bool replicated);
bool mqd_partition_replicated(const struct mqd_partition *partition);
/* Raises the high watermark to the last recorded end of a write at or below `offset`, at most to
 * log end; never lowers it. Returns whether the high watermark moved. Transactions whose markers
 * are below it become decided. */
bool mqd_partition_raise_high_watermark(struct mqd_partition *partition, int64_t offset);

/* ---- appending ---- */

enum mqd_follow_error {
    /* all whole batches were staged; the beginning of one more follows taken_bytes (a leader may
     * cut a response anywhere) */
    MQD_FOLLOW_OK,
    MQD_FOLLOW_FULL,    /* the maximum for one write is staged: write, then continue after taken_bytes */
    MQD_FOLLOW_CORRUPT, /* the batch after taken_bytes is invalid, or its CRC is wrong */
    MQD_FOLLOW_OFFSET,  /* ... does not begin where the log ends */
    /* ... begins below the end of an empty log and extends beyond that end, because the leader's
     * log start is inside the batch: restart the log with the batch's base offset (next_offset) */
    MQD_FOLLOW_BEFORE,
    MQD_FOLLOW_EPOCH, /* ... has a negative epoch, or a higher one than the leader */
    MQD_FOLLOW_FAILED /* the partition is fenced, or out of memory */
};
struct mqd_follow_result {
    uint64_t taken_bytes; /* size of the whole batches at the beginning of `bytes` that were staged */
    uint32_t batch_count;
    uint64_t record_count;
    int64_t next_offset; /* the log's end after the write */
    const char *reason;  /* static text; NULL = OK */
};
/* Stages the whole batches in `bytes`, which must stay readable until mqd_partition_write. The
 * bytes come from a peer and are not trusted. leader_epoch: of the leader that sent them.
 * gaps_below: the leader's high watermark; a batch after a gap may not begin above it, because
 * compaction leaves no gaps there. -1: no gaps at all. now_ms: wall clock. Returns enum
 * mqd_follow_error; always fills in *out. */
int mqd_partition_follow(struct mqd_partition *partition, const uint8_t *bytes, uint64_t size_bytes,
                         int32_t leader_epoch, int64_t gaps_below, int64_t now_ms, struct mqd_follow_result *out);

/* ---- epochs ---- */

/* Epochs that have records in the log, ascending; valid until the next write or truncation. For
 * mqd_replica_*. */
const struct mqd_epoch *mqd_partition_epochs(const struct mqd_partition *partition, uint32_t *count);
/* Calls mqd_replica_epoch_end for this log. */
void mqd_partition_epoch_end(const struct mqd_partition *partition, int32_t epoch, int32_t *found_epoch,
                             int64_t *end_offset);

/* ---- truncation ---- */

struct mqd_truncation {
    int64_t log_end_offset; /* the new log end: `offset`, or the end of the last batch below it */
    int64_t cut_bytes;
    bool below_high_watermark; /* committed records were removed: an unclean election, or a faulty leader */
};
/* Truncates the log so that no batch extends beyond `offset`; does nothing when none does. Returns
 * 0 when the truncation is on disk; or -1 with mqd_error set. After -1 the partition is unchanged
 * if memory, descriptors, or disk space for the truncation's mark file ran out; otherwise it is
 * fenced. */
int mqd_partition_truncate(struct mqd_partition *partition, int64_t offset, int64_t now_ms, struct mqd_truncation *out);
/* Empties the log; it then begins and ends at `offset`, which may be any offset. Otherwise like
 * mqd_partition_truncate. batch_offset: if the leader's log start is inside a batch
 * (MQD_FOLLOW_BEFORE), the base offset of that batch, which is below `offset`; the batch may be
 * appended next. Otherwise equal to `offset`. */
int mqd_partition_restart_at(struct mqd_partition *partition, int64_t offset, int64_t batch_offset, int64_t now_ms,
                             struct mqd_truncation *out);

#endif
