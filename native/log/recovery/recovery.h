/* Opening a partition's log: shared by the files of log/recovery/. Runs off the reactor; may block.
 *
 * Three modes, chosen by mqd_recovery:
 *   clean    the clean-shutdown marker was found: only the headers at the end of the last segment
 *            are walked. If they are inconsistent, the marker was wrong, and the mode becomes
 *            `checked`.
 *   trusted  a process died but the page cache survived: the log is truncated at the published end,
 *            and headers are walked from the last index entry. If they are inconsistent, the mode
 *            becomes `checked`.
 *   checked  every CRC above recovery_point_offset is verified; the log ends before the first
 *            invalid byte, and later segments are deleted.
 *
 * Invariants
 *   C1  nothing below recovery_point_offset is truncated or deleted. A damaged batch there stays,
 *       and readers get an error; the walk continues after the batch. When nothing valid is found
 *       after it, the file is left unchanged and a new segment begins at the recovery point.
 *   C2  afterwards everything below log end is on disk (high watermark = log end): files with bytes
 *       above the recovery point are flushed. Where a flush has failed before (`rewrite`) they are
 *       rewritten first: the kernel marks pages as clean even if it could not write them, so a
 *       flush alone would prove nothing.
 *   C3  offsets are never assigned twice: if the log start is beyond the log end, the log end moves
 *       to it.
 *   C4  every abort marker of a transaction with batches has its entry in a .txnindex; the entries
 *       of truncated markers are removed. A .txnindex that fails verification (log/txn_index.h) is
 *       rebuilt from the log.
 *   C5  when the log of a partition with several replicas is truncated although whole batches
 *       follow the damage, this is recorded in a file `shortened`, which is durable before the
 *       truncation: the cause may be a torn write, but also a flipped bit in data that was flushed
 *       and acknowledged. The caller that opens the log decides how far to trust the log, and
 *       removes the file.
 *   C6  missing data is reported: a sealed segment that ends before the next one begins (only
 *       compaction leaves such gaps), or a log that ends below the recovery point. With several
 *       replicas the log then ends there; a single replica continues at the recovery point.
 */
#ifndef MQD_RECOVERY_H
#define MQD_RECOVERY_H

#include "log/partition_state.h"

#define MQD_RECOVERY_SHORTENED "shortened" /* C5 */

/* offsets in the names of the directory's files, ascending */
struct mqd_listing {
    int64_t *logs, *snapshots;
    uint32_t log_count, snapshot_count;
};

/* Deletes left-over temporary files and index files without a log; lists the other files. -1:
 * mqd_error set. */
int mqd_listing_clean_and_read(struct mqd_listing *listing, const char *directory);
void mqd_listing_free(struct mqd_listing *listing);
/* Deletes all files of one segment; adds the size of its .log to *deleted_bytes. */
int mqd_segment_delete(const char *directory, int64_t base_offset, int64_t *deleted_bytes);

/* Restores producers and transactions from the newest usable snapshot and the batches after it;
 * leader epochs from their file and the batches; and the .txnindex of every segment that has
 * batches after the snapshot, or at or after txn_index_complete_below: below this offset the
 * .txnindex files have all entries. The partition's segments and log end must be known and its
 * other indexes flushed.
 * decided_below: offsets below it are known to be committed; transactions that ended after it
 * still limit the last stable offset. Deletes useless snapshots and all but the newest two. -1:
 * mqd_error set; 1: an index was changed (and flushed). */
int mqd_recovery_replay(struct mqd_partition *partition, const struct mqd_listing *listing,
                        int64_t txn_index_complete_below, int64_t decided_below, int64_t now_ms);

/* Finds where a walk over a segment must begin so that it reaches every batch at or above `offset`:
 * an index entry that points to a batch, or the segment's beginning. */
struct mqd_index_entry mqd_recovery_walk_start(int fd, const char *directory, int64_t base_offset, int64_t offset,
                                               int64_t size_bytes);

/* Fills partition->dedup from the records of the window (log/dedup/dedup.h); transactions whose
 * marker is below decided_below are decided. Segments and their indexes must be known. -1:
 * mqd_error set. */
int mqd_recovery_load_dedup_ids(struct mqd_partition *partition, int64_t decided_below, int64_t now_ms);

/* For log/recovery/truncation.c: returns a new object for the log of `old` (the files of `old` must
 * be closed). The new object has the segments and snapshots of `listing`, without anything beyond
 * cut_offset (-1: the log is emptied and begins at recovery->log_start_offset). In `recovery` the
 * caller also sets trusted_end_offset to the cut and recovery_point_offset to the end of the part
 * that is on disk (at most the cut). On return everything is on disk. NULL: mqd_error set. */
struct mqd_partition *mqd_recovery_cut(const struct mqd_partition *old, struct mqd_listing *listing, int64_t cut_offset,
                                       int64_t now_ms, struct mqd_recovery *recovery);

/* C6; only the first gap is recorded. */
void mqd_recovery_note_missing(struct mqd_recovery *recovery, int64_t from_offset, int64_t to_offset);
/* Creates the partition's directory, durably. -1: mqd_error set. */
int mqd_recovery_make_directory(const char *path);
/* C5: durable on return. -1: mqd_error set. */
int mqd_recovery_note_shortened(const char *directory);

/* Flushes everything above the recovery point (C2); with `changed`, also the names and lengths that
 * recovery has changed. -1: mqd_error set. */
int mqd_recovery_flush(struct mqd_partition *partition, const struct mqd_recovery *recovery, bool changed);

#endif
