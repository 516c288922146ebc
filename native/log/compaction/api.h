/* What Python sees of a compaction; read by build_ffi.py like native.h, under the same rules. What
 * it does: log/compaction/compact.h; the order of calls:
 *
 *   open -> step until DONE (the keys of the dirty range are known, figures.mapped_end and
 *   figures.clean_count say how far)
 *        -> for each group of neighbouring segments, in order: group_begin, step until DONE,
 *        group_end
 *                where it changed something: swap_prepare, swap_install,
 *                mqd_reactor_segments_replaced, swap_finish, mqd_reactor_segments_replaced
 *        -> close
 *
 * A step may also say DECOMPRESS or COMPRESS: work->bytes in that codec must be answered by
 * mqd_compact_give before the next step.
 */
#ifndef MQD_COMPACT_API_H
#define MQD_COMPACT_API_H
/* MQD_CDEF_OFF */
#include "native.h"
/* MQD_CDEF_ON */

enum mqd_compact_state { MQD_COMPACT_DONE, MQD_COMPACT_MORE, MQD_COMPACT_DECOMPRESS, MQD_COMPACT_COMPRESS };

struct mqd_compact_options {
    int64_t first_dirty_offset;
    int64_t snapshot_offset; /* of the newest producer snapshot; -1 = there is none */
    int64_t now_ms;
    int64_t delete_retention_ms;
    int64_t end_position; /* high watermark's position in the last segment named; -1 = all of its file */
    uint64_t map_bytes;
    uint32_t map_load_percent;
    /* so many of the segments may be compacted; the others are looked through for markers alone */
    uint32_t clean_count;
    uint32_t segment_count;
    int32_t index_interval_bytes;
};

/* so far */
struct mqd_compact_figures {
    int64_t read_bytes;
    int64_t written_bytes;
    int64_t records_read; /* by the copy */
    int64_t records_kept;
    int64_t records_without_key; /* dropped */
    int64_t batches_read, batches_whole, batches_rebuilt, batches_emptied, batches_dropped;
    int64_t mapped_keys;
    int64_t mapped_end;   /* the log is clean below, once all groups are in place */
    uint32_t clean_count; /* segments to be copied: fewer than asked when the key table was full */
    uint8_t map_full;
};

struct mqd_compact_work {
    const uint8_t *bytes; /* DECOMPRESS, COMPRESS */
    uint64_t size_bytes;
    uint32_t codec;      /* as in a batch's attributes */
    uint64_t done_bytes; /* read and written by this step */
};

struct mqd_compact_group {
    int64_t size_bytes;
    uint8_t changed;          /* 0: nothing was lost and nothing joined; the new files were thrown away */
    uint8_t has_transactions; /* there is a .txnindex */
};

struct mqd_compact;
/* `bases` ascending: those to clean from the log's first on, then all up to the high watermark's. */
struct mqd_compact *mqd_compact_open(const char *directory, const int64_t *bases,
                                     const struct mqd_compact_options *options);
void mqd_compact_close(struct mqd_compact *compact); /* throws away what is half written */
/* Works on about bytes_max bytes. enum mqd_compact_state, or -1: MQD_E_CORRUPT (this log cannot be
 * compacted), MQD_E_FULL (the table cannot hold even one key), MQD_E_STALE (look again later), or
 * an errno; ENOENT: a segment is gone. */
int mqd_compact_step(struct mqd_compact *compact, uint64_t bytes_max, struct mqd_compact_work *work);
/* As a step; the next question may come at once. */
int mqd_compact_give(struct mqd_compact *compact, const uint8_t *bytes, uint64_t size_bytes,
                     struct mqd_compact_work *work);
int mqd_compact_group_begin(struct mqd_compact *compact, uint32_t first, uint32_t count);
int mqd_compact_group_end(struct mqd_compact *compact, struct mqd_compact_group *out);
void mqd_compact_look(const struct mqd_compact *compact, struct mqd_compact_figures *out);

/* The new files of `base_offset` take the place of it and of old_bases (those behind it,
 * ascending). After prepare a crash finishes the swap, before it undoes it. */
int mqd_compact_swap_prepare(const char *directory, int64_t base_offset, const int64_t *old_bases, uint32_t old_count,
                             int has_transactions);
int mqd_compact_swap_install(const char *directory, int64_t base_offset);
int mqd_compact_swap_finish(const char *directory, int64_t base_offset);
int mqd_compact_swap_undo(const char *directory, int64_t base_offset); /* instead of install: the new files go */

#endif
