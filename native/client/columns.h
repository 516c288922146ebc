/* Records as columns in Arrow's layout: int32 offsets and one buffer of values, validity bitmaps,
 * headers as list<struct<key, value>>. For Spark's reads and other users of Arrow.
 *
 * mqd_arrow_append appends records of a view (client/reader.h: positions, already checked when the
 * view was filled) after the existing rows. Nothing is allocated: buffers are the caller's, and
 * records that do not fit are not taken. Header sections come from a producer and are parsed here
 * for the first time, so they are untrusted.
 *
 * Invariants
 *   A1  row_count rows are complete in every wanted column; a row that does not fit, or is damaged,
 *       leaves no trace
 *   A2  a validity bitmap is first written when its column gets its first null (its null count is
 *       then above 0); until then all rows are valid and the bitmap is not written
 *   A3  Arrow's offsets arrays (`ends`, `header_ends`) have one entry more than there are rows; the
 *       first is 0, which mqd_arrow_begin writes
 * Concurrency: one thread at a time. Source: Arrow's columnar format, "Variable-size Binary
 * Layout", "List Layout"; KIP-82 (headers).
 */
#ifndef MQD_COLUMNS_H
#define MQD_COLUMNS_H
/* MQD_CDEF_OFF */
#include <stdint.h>

#include "client/reader.h"
/* MQD_CDEF_ON */

/* a column of byte strings. data NULL: not wanted */
struct mqd_arrow_blobs {
    uint8_t *data;
    int32_t *ends;          /* capacity + 1; A3 */
    uint8_t *validity;      /* (capacity + 7) / 8 bytes; A2 */
    uint32_t data_capacity; /* at most INT32_MAX */
    uint32_t data_bytes, null_count;
};
/* which buffer was full */
enum mqd_arrow_full {
    MQD_ARROW_ROWS,
    MQD_ARROW_KEYS,
    MQD_ARROW_VALUES,
    MQD_ARROW_HEADERS,
    MQD_ARROW_HEADER_KEYS,
    MQD_ARROW_HEADER_VALUES
};
struct mqd_arrow_rows {
    uint32_t row_capacity, row_count;
    /* offsets, timestamps_us and timestamp_types may be NULL */
    int64_t *offsets;
    /* -1000 (-1 ms) for a record without a timestamp; values out of range are clamped */
    int64_t *timestamps_us;
    int32_t *timestamp_types; /* 0 CreateTime, 1 LogAppendTime */
    struct mqd_arrow_blobs keys, values;
    uint32_t header_capacity, header_count; /* over all rows */
    int32_t *header_ends;                   /* row_capacity + 1. NULL: headers are not wanted */
    uint8_t *header_validity;               /* rows without headers are null; A2 with header_null_count */
    uint32_t header_null_count;
    uint32_t damaged_key_count;                        /* header keys that are not UTF-8 */
    struct mqd_arrow_blobs header_keys, header_values; /* header_capacity entries */
    uint32_t full_buffer; /* enum mqd_arrow_full: why the last append took fewer than requested */
    /* what the row that did not fit would add to that buffer: rows, headers or bytes */
    uint64_t needed;
};
void mqd_arrow_begin(struct mqd_arrow_rows *rows); /* removes all rows; the buffers stay */
/* Appends records [start, end) of `view`, in order; header_positions may be NULL: no record has
 * headers. Returns how many were taken: fewer when a buffer is full. -1: MQD_E_CORRUPT, a header
 * section is damaged (earlier rows were taken: see row_count); MQD_E_INVALID, a position is outside
 * view->base. */
int64_t mqd_arrow_append(struct mqd_arrow_rows *rows, const struct mqd_record_view *view, uint32_t start, uint32_t end);

/* Returns the total size of the whole batches at the beginning of `bytes`, and sets *next_offset to
 * the offset after the last one (unchanged if there are none). A truncated batch at the end, as in
 * Fetch responses, is not counted. -1: MQD_E_CORRUPT, an invalid header. Records and checksums are
 * not checked. */
int64_t mqd_batches_extent(const uint8_t *bytes, uint64_t size_bytes, int64_t *next_offset);
/* A reader over batches in memory, which the caller must keep unchanged as long as the reader and
 * its views are used. size_bytes below 2^31. */
struct mqd_segment_reader *mqd_segment_reader_open_memory(const uint8_t *bytes, uint64_t size_bytes, int64_t offset,
                                                          int8_t isolation_level);

#endif
