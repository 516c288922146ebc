/* What the files of the segment reader share: the mapping, the walk over one batch, the reader
 * itself. See client/reader.h for what it promises.
 *
 * Invariants
 *   S1  no byte of a mapping at or behind `limit` is touched: the published high watermark's
 *       position, or the size of a segment that grows no more. Pages are populated
 *       (MADV_POPULATE_READ) before they are touched, so that a disk that fails is an error here
 *       and not a SIGBUS. Of what was walked it keeps some megabytes mapped in: a reader's resident
 *       memory does not grow with the segment.
 *   S2  `at` is a batch boundary; while `inside` it is the boundary of the batch that `walk` is in.
 *   S3  a mapping is unmapped with its last reference: the reader has one on `mapping` and one on
 *       `viewed`, each hold is one more.
 *   S4  everything in a segment is hostile all the same (a producer wrote the records, a disk kept
 *       them): no length is believed before it is compared with what remains.
 */
#ifndef MQD_CLIENT_READER_STATE_H
#define MQD_CLIENT_READER_STATE_H

#include "client/reader.h"
#include "shm/local_layout.h"

/* ---- one mapping (client/reader_mapping.c) ---- */

struct mqd_segment_mapping {
    uint64_t references; /* atomic */
    const uint8_t *bytes;
    uint64_t map_bytes;
    uint64_t populated_bytes; /* up to here, as far as it was asked for; S1 */
    /* pages up to here are not this process's any more; who still holds a view there gets them back
     * from the page cache */
    uint64_t let_go_bytes;
    uint64_t device, inode;
    bool mapped;   /* by mmap; else memory of malloc (tests), or borrowed */
    bool borrowed; /* somebody else's memory, who keeps it for as long as it is used */
};

struct mqd_segment_mapping *mqd_mapping_of_fd(int fd, uint64_t map_bytes);
/* a copy, of exactly that size */
struct mqd_segment_mapping *mqd_mapping_of_memory(const void *bytes, uint64_t size_bytes);
struct mqd_segment_mapping *mqd_mapping_of_borrowed(const void *bytes, uint64_t size_bytes);
bool mqd_mapping_is_of_fd(const struct mqd_segment_mapping *mapping, int fd, uint64_t map_bytes);
void mqd_mapping_hold(struct mqd_segment_mapping *mapping);
void mqd_mapping_release(struct mqd_segment_mapping *mapping); /* NULL is fine. Any thread */
/* [from, end) may be touched afterwards; `limit` is as far as it may look ahead. -1: the file could
 * not be read. */
int mqd_mapping_populate(struct mqd_segment_mapping *mapping, uint64_t from, uint64_t end, uint64_t limit);

/* ---- where segments come from (client/reader_ask.c) ---- */

struct mqd_segment_source {
    void *context;
    void *control; /* the control segment, read-only; NULL: every segment is whole and the only one */
    /* Where is ask->offset? 0; answer->error says more, and without one *mapping is a new
     * reference, or `current` (not counted again) when it is the same file. -1: EPIPE, ETIMEDOUT... */
    int (*locate)(void *context, const struct mqd_local_ask *ask, struct mqd_segment_mapping *current,
                  struct mqd_local_segment *answer, struct mqd_segment_mapping **mapping);
    /* Between enter and leave the control segment stays mapped; -1: the attachment has ended. All
     * three may be NULL. */
    int (*enter)(void *context);
    void (*leave)(void *context);
    void (*close)(void *context);
};

/* ---- the records of one batch (client/reader_records.c) ---- */

struct mqd_view_walk {
    const uint8_t *at, *end; /* the records that are left */
    int32_t left, next_delta, last_delta;
    int64_t base_offset, base_timestamp_ms;
    bool append_time;   /* base_timestamp_ms is every record's */
    const char *reason; /* what is wrong */
};
void mqd_view_walk_begin(struct mqd_view_walk *walk, const struct mqd_batch *batch, const uint8_t *records,
                         uint64_t size_bytes);
/* Records from `from_offset` on into `out`, as many as it takes. 0; -1: what follows is no record,
 * walk->reason says why. Positions are counted from out->base. */
int mqd_view_walk_fill(struct mqd_view_walk *walk, int64_t from_offset, struct mqd_record_view *out);

/* ---- aborted transactions (client/reader_aborted.c) ---- */

struct mqd_aborted_entry {
    int64_t producer_id, first_offset;
};
struct mqd_aborted_filter {
    struct mqd_aborted_entry *entries; /* by first_offset */
    uint32_t count, next;              /* those before `next` have begun */
    int64_t *open;                     /* producers whose aborted transaction is under way; room for `count` */
    uint32_t open_count;
    int64_t until_offset; /* nothing is known from here on */
};
int mqd_aborted_set(struct mqd_aborted_filter *filter, const int64_t *producer_ids, const int64_t *first_offsets,
                    uint32_t count, int64_t until_offset);
void mqd_aborted_free(struct mqd_aborted_filter *filter);
enum mqd_aborted_verdict { MQD_BATCH_READ, MQD_BATCH_LEAVE_OUT, MQD_BATCH_ASK };
/* `bytes`: all of the batch. Batches must come in order. */
enum mqd_aborted_verdict mqd_aborted_judge(struct mqd_aborted_filter *filter, const struct mqd_batch *batch,
                                           const uint8_t *bytes);

/* ---- the reader (client/reader.c) ---- */

struct mqd_segment_reader {
    struct mqd_segment_source source;
    uint8_t topic_id[16];
    int32_t partition_index;
    int8_t isolation_level;
    bool slot_known, inside, sealed;
    uint32_t slot;
    uint32_t ask_number;
    int64_t position;                      /* the next offset to be given out */
    struct mqd_segment_mapping *mapping;   /* NULL: ask where `position` is */
    struct mqd_segment_mapping *viewed;    /* of the last view */
    int64_t base_offset, next_base_offset; /* of the segment; the latter when it is sealed */
    uint32_t size_bytes;                   /* of a sealed segment */
    uint32_t map_bytes;
    uint32_t at;            /* S2 */
    uint32_t checked_at;    /* the batch there has a right checksum */
    struct mqd_batch batch; /* at `at`, when it was decoded (decoded_at) */
    uint32_t decoded_at;
    struct mqd_view_walk walk;
    struct mqd_aborted_filter aborted;
};

#define MQD_NOWHERE UINT32_MAX

/* Takes the source over (it is closed with the reader, and when this fails). */
struct mqd_segment_reader *mqd_segment_reader_new(const struct mqd_segment_source *source, const uint8_t topic_id[16],
                                                  int32_t partition_index, int64_t offset, int8_t isolation_level);
/* Another source: it is asked where the position is. The old one is closed. */
void mqd_segment_reader_set_source(struct mqd_segment_reader *reader, const struct mqd_segment_source *source);

#endif
