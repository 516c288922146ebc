/* The compaction interface for Python; read by build_ffi.py like native.h, under the same rules.
 * What compaction does: log/compaction/compact.h. The order of calls:
 *
 *   1  open
 *   2  step until DONE: the keys of the dirty range are known; figures.mapped_end and
 *      figures.to_clean_count say how far this run can compact the log
 *   3  for each group of neighbouring segments, in order: group_begin, step until DONE, group_end.
 *      If the group changed: swap_prepare, swap_install, mqd_reactor_segments_replaced,
 *      swap_finish, mqd_reactor_segments_replaced
 *   4  close
 *
 * A step may also return DECOMPRESS or COMPRESS: the caller must then decompress or compress
 * result->bytes with result->codec, and pass the new bytes to mqd_compact_resume before the next
 * step.
 */
#ifndef MQD_COMPACT_API_H
#define MQD_COMPACT_API_H
/* MQD_CDEF_OFF */
#include "native.h"
/* MQD_CDEF_ON */

enum mqd_compact_state { MQD_COMPACT_DONE, MQD_COMPACT_MORE, MQD_COMPACT_DECOMPRESS, MQD_COMPACT_COMPRESS };

struct mqd_compact_options {
    int64_t first_dirty_offset;
    int64_t snapshot_offset; /* of the newest producer snapshot; -1 = none */
    int64_t now_ms;
    int64_t delete_retention_ms;
    int64_t end_position; /* high watermark's position in the last segment; -1 = all of its file */
    uint64_t map_bytes;
    uint32_t map_load_percent;
    /* number of segments that may be compacted; the others are only searched for markers */
    uint32_t to_clean_count;
    uint32_t segment_count;
    int32_t index_interval_bytes;
};

/* progress so far */
struct mqd_compact_figures {
    int64_t read_bytes;
    int64_t written_bytes;
    int64_t records_read; /* records read while copying */
    int64_t records_kept;
    int64_t records_without_key; /* dropped */
    int64_t batches_read, batches_unchanged, batches_rebuilt, batches_emptied, batches_dropped;
    int64_t mapped_keys;
    int64_t mapped_end;      /* the log is clean below this offset once all groups are installed */
    uint32_t to_clean_count; /* segments to be copied: fewer than requested if the key table was full */
    uint8_t map_full;
};

struct mqd_compact_step_result {
    const uint8_t *bytes; /* DECOMPRESS, COMPRESS */
    uint64_t size_bytes;
    uint32_t codec;      /* as in a batch's attributes */
    uint64_t done_bytes; /* read and written by this step */
};

struct mqd_compact_group {
    int64_t size_bytes;
    uint8_t changed;          /* 0: no record was removed and no segments were merged; the new files were deleted */
    uint8_t has_transactions; /* the group has a .txnindex */
};

struct mqd_compact;
/* `bases`: base offsets, ascending. First those of the segments to clean, beginning with the log's
 * first segment, then all others up to the segment that holds the high watermark. */
struct mqd_compact *mqd_compact_open(const char *directory, const int64_t *bases,
                                     const struct mqd_compact_options *options);
void mqd_compact_close(struct mqd_compact *compact); /* deletes incomplete files */
/* Processes about bytes_max bytes. Returns enum mqd_compact_state, or -1: MQD_E_CORRUPT (this log
 * cannot be compacted), MQD_E_FULL (the table cannot hold even one key), MQD_E_STALE (try again
 * later), or an errno; ENOENT: a segment was deleted. */
int mqd_compact_step(struct mqd_compact *compact, uint64_t bytes_max, struct mqd_compact_step_result *result);
/* Returns the same as mqd_compact_step; it may request the next conversion immediately. */
int mqd_compact_resume(struct mqd_compact *compact, const uint8_t *bytes, uint64_t size_bytes,
                       struct mqd_compact_step_result *result);
int mqd_compact_group_begin(struct mqd_compact *compact, uint32_t first, uint32_t count);
int mqd_compact_group_end(struct mqd_compact *compact, struct mqd_compact_group *out);
void mqd_compact_read_figures(const struct mqd_compact *compact, struct mqd_compact_figures *out);

/* The new files of `base_offset` replace the files of this segment and of old_bases (the segments
 * after it, ascending). After a crash, recovery finishes the swap if prepare has completed, and
 * undoes it otherwise. */
int mqd_compact_swap_prepare(const char *directory, int64_t base_offset, const int64_t *old_bases, uint32_t old_count,
                             int has_transactions);
int mqd_compact_swap_install(const char *directory, int64_t base_offset);
int mqd_compact_swap_finish(const char *directory, int64_t base_offset);
/* called instead of install: deletes the new files */
int mqd_compact_swap_undo(const char *directory, int64_t base_offset);

#endif
