/* Opening a partition's log: the parts of mqd_recovery*.c. Runs off the reactor; may block.
 *
 * Three ways in, by what mqd_recovery says:
 *   clean      the marker was found: only the end of the last segment is walked, by headers. If
 *              that does not add up, the marker lied: checked.
 *   trusted    a process died, the page cache did not: the log is cut at the published end, headers
 *              are walked from the last index entry. If that does not add up: checked.
 *   checked    from recovery_point_offset on every CRC is computed; the log ends before the first
 *              invalid byte, later segments are deleted.
 *
 * Invariants
 *   C1  nothing below recovery_point_offset is cut or deleted. A damaged batch there stays for
 *       readers to meet; the walk goes on behind it. When nothing whole is found behind it, the
 *       file is left as it is and a new segment begins at the recovery point.
 *   C2  afterwards everything below log end is on disk (high watermark = log end): files with bytes
 *       above the recovery point are flushed. Where a flush has failed before (`rewrite`) they are
 *       written anew first: the kernel calls pages clean that it could not write, so a flush alone
 *       would prove nothing.
 *   C3  offsets are never given twice: a log start beyond the end moves the end there.
 *   C5  a log of several replicas that is cut although whole batches lie behind the damage says so
 *       for ever after, by a file `shortened` that is durable before the cut: a torn write can look
 *       like that, and so can a bit that flipped in what was flushed and counted. Who opens it
 *       decides what it may be trusted with, and removes the file.
 *   C6  files that are missing are told of: a sealed segment that ends before the next one begins
 *       (compaction alone leaves such gaps), a log that ends below the recovery point. Of several
 *       replicas the log ends where it ends; the only one goes on at the recovery point.
 *   C4  every abort marker of a transaction with batches has its entry in a .txnindex; the entries
 *       of markers that were cut off are gone. A .txnindex that does not prove itself
 *       (log/txn_index.h) is made from the log.
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

/* Deletes left-over temporary files and index files without a log. -1: mqd_error set. */
int mqd_listing_read(struct mqd_listing *listing, const char *directory);
void mqd_listing_free(struct mqd_listing *listing);
/* .log and the three indexes of one segment; adds the log's size to *bytes. */
int mqd_segment_delete(const char *directory, int64_t base_offset, int64_t *bytes);

/* Producers and transactions from the newest usable snapshot and the batches behind it; leader
 * epochs from their file and the batches; the .txnindex of every segment that has batches behind
 * the snapshot, or behind sound_below: what was written for markers below it is in the files. The
 * partition's segments and log end are known, its other indexes flushed. settle_below: what is
 * known to be committed; transactions that have ended behind it still bound the last stable offset.
 * Deletes snapshots that are of no use any more, all but the newest two. -1: mqd_error set; 1: an
 * index was changed (and flushed). */
int mqd_recovery_replay(struct mqd_partition *partition, const struct mqd_listing *listing, int64_t sound_below,
                        int64_t settle_below, int64_t now_ms);

/* For log/recovery/truncation.c: `old`, whose files are closed, anew from the segments and
 * snapshots of `listing`, without what lies beyond cut_offset (-1: without anything; it begins at
 * io->log_start_offset). io: trusted_end_offset = cut_offset, recovery_point_offset = what of it is
 * on disk. All of it is, afterwards. NULL: mqd_error set. */
struct mqd_partition *mqd_recovery_cut(const struct mqd_partition *old, struct mqd_listing *listing, int64_t cut_offset,
                                       int64_t now_ms, struct mqd_recovery *io);

/* C6; the first gap counts. */
void mqd_recovery_note_missing(struct mqd_recovery *io, int64_t from_offset, int64_t to_offset);
/* The partition's directory, durable when it is new. -1: mqd_error set. */
int mqd_recovery_make_directory(const char *path);
/* C5: durable when it returns. -1: mqd_error set. */
int mqd_recovery_note_shortened(const char *directory);

/* Flushes what lies above the recovery point (C2); `changed`: and the names and lengths that
 * recovery has changed. -1: mqd_error set. */
int mqd_recovery_flush(struct mqd_partition *partition, const struct mqd_recovery *io, bool changed);

#endif
