/* Shared by the files of the segment reader: the mapping, the walk over one batch, the reader
 * itself. See client/reader.h for its interface.
 *
 * Invariants
 *   S1  no byte of a mapping at or after `limit` is read. The limit is the published high
 *       watermark's position, or the size of a segment that no longer grows. Pages are populated
 *       (MADV_POPULATE_READ) before they are read, so that a disk failure is an error here and not
 *       a SIGBUS. Only some megabytes of the walked part stay resident: a reader's memory does not
 *       grow with the segment.
 *   S2  `at` is the start of a batch; while `in_batch` is set, of the batch that `walk` is in.
 *   S3  a mapping is unmapped with its last reference. The reader has one on `mapping` and one on
 *       `view_mapping`; each hold adds one.
 *   S4  everything in a segment is untrusted (a producer wrote the records, a disk stored them):
 *       every length is checked against the remaining bytes before use.
 *   S5  the data and the list of aborted transactions come from the same version of the files. A
 *       compaction may drop an ABORT marker together with the data of its transaction: an old list
 *       with a new file would hide later transactions of that producer; a new list with an old
 *       file would let aborted records through.
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
    uint64_t populated_bytes; /* the requested pages up to here are populated; S1 */
    /* pages up to here are no longer resident in this process; a view that still uses them loads
     * them again from the page cache */
    uint64_t dropped_bytes;
    uint64_t device, inode;
    bool mapped;   /* by mmap; otherwise allocated by malloc (tests), or borrowed */
    bool borrowed; /* memory of the caller, which must keep it as long as it is used */
};

struct mqd_segment_mapping *mqd_mapping_of_fd(int fd, uint64_t map_bytes);
/* a copy, of exactly that size */
struct mqd_segment_mapping *mqd_mapping_of_memory(const void *bytes, uint64_t size_bytes);
struct mqd_segment_mapping *mqd_mapping_of_borrowed(const void *bytes, uint64_t size_bytes);
bool mqd_mapping_is_of_fd(const struct mqd_segment_mapping *mapping, int fd, uint64_t map_bytes);
void mqd_mapping_hold(struct mqd_segment_mapping *mapping);
void mqd_mapping_release(struct mqd_segment_mapping *mapping); /* NULL is fine. Any thread */
/* After the call [from, end) may be read; read-ahead stops at `limit`. -1: the file could not be
 * read. */
int mqd_mapping_populate(struct mqd_segment_mapping *mapping, uint64_t from, uint64_t end, uint64_t limit);

/* ---- sources of segments (client/reader_query.c) ---- */

struct mqd_segment_source {
    void *context;
    void *control; /* the control segment, read-only; NULL: the source has one segment, which is complete */
    /* Finds the segment of the query's offset. Returns 0 when there is a response, which may have a
     * Kafka error code. If the response has no error, *mapping is a new reference to the segment's
     * mapping, or `current` (no reference is added) if that maps the same file. -1: EPIPE,
     * ETIMEDOUT... */
    int (*locate)(void *context, const struct mqd_local_query *query, struct mqd_segment_mapping *current,
                  struct mqd_local_segment *response, struct mqd_segment_mapping **mapping);
    /* Between enter and leave the control segment stays mapped; -1: the attachment has ended.
     * enter, leave and close may be NULL. */
    int (*enter)(void *context);
    void (*leave)(void *context);
    void (*close)(void *context);
};

/* ---- the records of one batch (client/reader_records.c) ---- */

struct mqd_batch_walk {
    const uint8_t *at, *end; /* the remaining records */
    int32_t records_left, last_delta;
    int64_t next_delta;
    int64_t base_offset, base_timestamp_ms;
    bool has_append_time; /* base_timestamp_ms applies to every record */
    const char *reason;   /* why the walk failed; NULL = it has not */
};
void mqd_batch_walk_begin(struct mqd_batch_walk *walk, const struct mqd_batch *batch, const uint8_t *records,
                          uint64_t size_bytes);
/* Appends the records at or after `from_offset` to `out`, as many as fit. Returns 0, or -1 if an
 * invalid record follows; walk->reason has the cause. Positions are counted from out->base. */
int mqd_batch_walk_fill(struct mqd_batch_walk *walk, int64_t from_offset, struct mqd_record_view *out);

/* ---- aborted transactions (client/reader_aborted.c) ---- */

struct mqd_aborted_entry {
    int64_t producer_id, first_offset;
};
struct mqd_aborted_filter {
    struct mqd_aborted_entry *entries; /* by first_offset */
    uint32_t count, next;              /* the transactions of the entries before `next` have begun */
    int64_t *open_producers;           /* ids of producers whose aborted transaction is ongoing; room for `count` */
    uint32_t open_count;
    int64_t until_offset; /* the entries are complete only below this offset */
};
int mqd_aborted_filter_set(struct mqd_aborted_filter *filter, const int64_t *producer_ids, const int64_t *first_offsets,
                           uint32_t count, int64_t until_offset);
void mqd_aborted_filter_free(struct mqd_aborted_filter *filter);
enum mqd_aborted_verdict { MQD_BATCH_READ, MQD_BATCH_SKIP, MQD_BATCH_NEEDS_LIST };
/* `bytes`: the whole batch. Batches must come in order. */
enum mqd_aborted_verdict mqd_aborted_filter_classify(struct mqd_aborted_filter *filter, const struct mqd_batch *batch,
                                                     const uint8_t *bytes);

/* ---- the reader (client/reader.c) ---- */

struct mqd_segment_reader {
    struct mqd_segment_source source;
    uint8_t topic_id[16];
    int32_t partition_index;
    int8_t isolation_level;
    bool slot_known, in_batch, sealed;
    uint32_t slot;
    uint32_t query_number;
    int64_t position;                         /* the next offset to return */
    struct mqd_segment_mapping *mapping;      /* NULL: the segment of `position` must be queried */
    struct mqd_segment_mapping *view_mapping; /* of the last view */
    int64_t base_offset, next_base_offset;    /* of the segment; next_base_offset only when it is sealed */
    /* segments_generation (S5): of the mapped file; of the slot when it was last read; of the slot
     * at the last query for aborted transactions */
    uint64_t file_generation, slot_generation, aborted_generation;
    uint32_t size_bytes; /* of a sealed segment */
    uint32_t map_bytes;
    uint32_t at;         /* S2 */
    uint32_t checked_at; /* the batch at this position has passed its checksum */
    uint32_t decoded_at; /* `batch` is the decoded header at this position */
    struct mqd_batch batch;
    struct mqd_batch_walk walk;
    struct mqd_aborted_filter aborted;
};

#define MQD_NO_POSITION UINT32_MAX

/* Takes ownership of the source, which is closed with the reader, or at once on failure. */
struct mqd_segment_reader *mqd_segment_reader_new(const struct mqd_segment_source *source, const uint8_t topic_id[16],
                                                  int32_t partition_index, int64_t offset, int8_t isolation_level);
/* Sets another source; the next read queries it for the segment. Closes the old one. */
void mqd_segment_reader_set_source(struct mqd_segment_reader *reader, const struct mqd_segment_source *source);

#endif
