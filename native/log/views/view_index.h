/* Reading a view: what a filter selects from a stretch of a segment file, and a cache of what it
 * selected before.
 *
 * A segment file is divided into pieces of piece_bytes; a piece has the batches that begin in it. What is
 * selected from a piece, if it is little, is kept: whole batches without the other records, as wire/filter.h makes
 * them. The next reader of the view gets these, and the piece itself is not read again. Pieces from which much is
 * selected are filtered each time; there is little to save.
 *
 * Nothing of it is on disk: a process that starts filters again what is read. At most bytes_max are kept; then
 * pieces are evicted in the order of their hashes, which has nothing to do with the order of reads.
 *
 * Invariants
 *   X1  what is kept of a piece was read while the partition's segments_generation did not change. A log that is
 *       truncated gets records in the place of others only after that number has risen: so no piece mixes the two.
 *   X2  before it is used, the header of the piece's last batch (offset, leader epoch, CRC) is compared with the
 *       file's. Logs with the same batch of the same leader epoch are the same up to it, so a truncation is noticed
 *       where records of a piece are gone.
 *   X3  a file is named by a number that is never used again (mqd_segment_ref_serial), a filter by
 *       its topic's. Compaction and deletion leave pieces that no reader requests.
 *   X4  a piece that ends above the reader's limit (its last stable offset) is not used.
 *
 * Any thread: a mutex protects the table. */
#ifndef MQD_VIEW_INDEX_H
#define MQD_VIEW_INDEX_H

/* MQD_CDEF_OFF */
#include "wire/api.h"
/* MQD_CDEF_ON */

struct mqd_view_index;
struct mqd_view_index_figures {
    uint64_t pieces, bytes;      /* kept */
    uint64_t used, added, stale; /* pieces */
};
struct mqd_view_index *mqd_view_index_create(uint64_t bytes_max, uint32_t piece_bytes); /* NULL: no memory */
void mqd_view_index_destroy(struct mqd_view_index *index);
void mqd_view_index_figures(struct mqd_view_index *index, struct mqd_view_index_figures *out);

struct mqd_view_read {
    int fd;
    uint64_t file, view;   /* X3 */
    const uint8_t *filter; /* wire/filter.h */
    uint32_t filter_bytes;
    uint32_t position;           /* of the batch with from_offset */
    uint32_t limit;              /* the end of a batch; nothing beyond it is read */
    uint32_t filtered_bytes_max; /* of the file; one piece at least. What the index has does not count */
    int64_t from_offset;
    uint64_t output_bytes_max;     /* or more with the last batch */
    const uint64_t *generation_at; /* X1; NULL: nothing truncates the file */
    uint64_t generation;           /* what it was when the limit was found */
    /* the outcome */
    uint32_t end_position; /* where to continue; 0: within what was read, not known where */
    uint64_t filtered_bytes;
    struct mqd_filtered found; /* to be freed in any case */
};
/* Returns 0 or a Kafka error code. If something was selected before an error, the selection is
 * returned and the error is not. */
int16_t mqd_view_read(struct mqd_view_index *index, struct mqd_view_read *read);

#endif
