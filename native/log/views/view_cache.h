/* Reading a view: what a filter selects from a stretch of a segment file, and a cache of what it
 * selected before.
 *
 * A segment file is divided into pieces of piece_bytes; a batch belongs to the piece in which it
 * begins. If little is selected from a piece, the selection is cached: the batches that
 * wire/filter.h builds, with the selected records only. The next reader of the view gets these, and
 * the piece itself is not read again. Pieces from which much is selected are filtered each time,
 * because caching would save little.
 *
 * The cache is not stored on disk: after a restart it is empty. It holds at most bytes_max; beyond
 * that, pieces are evicted in the order of their hashes, independently of when they were read.
 *
 * Invariants
 *   X1  a cached selection was read while the partition's segments_generation did not change. A
 *       truncation increases that number before other records are written in the place of removed
 *       ones, so no piece contains both.
 *   X2  before a piece is used, the header of its last batch (offset, leader epoch, CRC) is
 *       compared with the file's. Logs that contain the same batch of the same leader epoch are
 *       equal up to it, so a truncation that removed records of the piece is noticed.
 *   X3  a file is identified by a number that is never reused (mqd_segment_ref_serial), a filter by
 *       the number of its topic. After compaction or deletion, the pieces of old files are never
 *       requested.
 *   X4  a piece that ends above the reader's limit (its last stable offset) is not used.
 *
 * Concurrency: any thread; a mutex protects the table. */
#ifndef MQD_VIEW_CACHE_H
#define MQD_VIEW_CACHE_H

/* MQD_CDEF_OFF */
#include "wire/api.h"
/* MQD_CDEF_ON */

struct mqd_view_cache;
struct mqd_view_cache_stats {
    uint64_t pieces, bytes;               /* in the cache now */
    uint64_t hits, added, stale, evicted; /* numbers of pieces, since the cache was created */
};
struct mqd_view_cache *mqd_view_cache_create(uint64_t bytes_max, uint32_t piece_bytes); /* NULL: out of memory */
void mqd_view_cache_destroy(struct mqd_view_cache *cache);
void mqd_view_cache_stats(struct mqd_view_cache *cache, struct mqd_view_cache_stats *out);

struct mqd_view_read {
    int fd;
    uint64_t file, view;   /* X3 */
    const uint8_t *filter; /* wire/filter.h */
    uint32_t filter_bytes;
    uint32_t position; /* of the batch with from_offset */
    uint32_t limit;    /* the end of a batch; nothing beyond it is read */
    /* how much of the file may be read and filtered; at least one piece is. Cached pieces do not
     * count */
    uint32_t filtered_bytes_max;
    int64_t from_offset;
    uint64_t output_bytes_max;     /* the last batch may exceed it */
    const uint64_t *generation_at; /* X1; NULL: the file is never truncated */
    uint64_t generation;           /* the value of *generation_at when the limit was found */
    /* the outcome */
    uint32_t end_position; /* where to continue; 0: not known, but within the bytes that were read */
    uint64_t filtered_bytes;
    struct mqd_filtered selection; /* the caller frees it in either case */
};
/* Returns 0 or a Kafka error code. If something was selected before an error, the selection is
 * returned and the error is not. */
int16_t mqd_view_read(struct mqd_view_cache *cache, struct mqd_view_read *read);

#endif
