/* Records as columns in Arrow's layout: int32 offsets and one buffer of values, validity bitmaps,
 * headers as list<struct<key, value>>. For Spark's reads, and whoever else wants Arrow.
 *
 * mqd_arrow_append copies records of a view (client/reader.h: positions, checked by whoever filled
 * it) behind those that are there. Nothing is allocated: buffers are the caller's, and what does
 * not fit any more is not taken. Header sections are looked into here for the first time: they are
 * a producer's, and hostile.
 *
 * Invariants
 *   A1  row_count rows are whole in every wanted column; a row that does not fit, or is damaged,
 *       leaves no trace
 *   A2  a validity bitmap is written from the first null of its column on (its *_nulls is above 0
 *       then); before, all are valid and the bitmap is not touched
 *   A3  offsets arrays have one entry more than there are rows, from 0 on: entry 0 is written by
 *       mqd_arrow_begin
 * Concurrency: one thread at a time.
 * Source: Arrow's columnar format, "Variable-size Binary Layout", "List Layout"; KIP-82 (headers).
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
    uint32_t data_bytes, nulls;
};
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
    int64_t *offsets; /* these three may be NULL */
    /* of what has no timestamp: -1000, as -1 ms; what does not fit is the nearest that does */
    int64_t *timestamps_us;
    int32_t *timestamp_types; /* 0 CreateTime, 1 LogAppendTime */
    struct mqd_arrow_blobs keys, values;
    uint32_t header_capacity, header_count; /* of all rows */
    int32_t *header_ends;                   /* row_capacity + 1. NULL: headers are not wanted */
    uint8_t *header_validity;               /* rows without headers are null; A2 with row_header_nulls */
    uint32_t row_header_nulls;
    uint32_t damaged_keys;                             /* header keys that are not UTF-8 */
    struct mqd_arrow_blobs header_keys, header_values; /* header_capacity entries */
    uint32_t full; /* enum mqd_arrow_full: what stopped the last append that took fewer than asked */
    /* how much of that there must be for all of the row that did not fit, beside what is there */
    uint64_t needed;
};
void mqd_arrow_begin(struct mqd_arrow_rows *rows); /* no rows; the buffers stay */
/* Records [start, end) of `view`, in order; header_positions may be NULL there: none has headers.
 * Returns how many were taken: fewer when a buffer is full. -1: MQD_E_CORRUPT, a header section is
 * damaged (rows before it were taken: row_count tells); MQD_E_INVALID, a position lies outside of
 * view->base. */
int64_t mqd_arrow_append(struct mqd_arrow_rows *rows, const struct mqd_record_view *view, uint32_t start, uint32_t end);

/* The whole batches at the begin of `bytes`: their size together, and the offset behind the last
 * one (*next_offset; left alone without any). A batch cut off at the end, as Fetch answers have,
 * does not count. -1: MQD_E_CORRUPT, a header makes no sense. Records and checksums are not looked
 * at. */
int64_t mqd_batches_extent(const uint8_t *bytes, uint64_t size_bytes, int64_t *next_offset);
/* A reader over batches in memory, that the caller keeps, unchanged, for as long as the reader and
 * what it gives out are used. size_bytes below 2^31. */
struct mqd_segment_reader *mqd_segment_reader_open_memory(const uint8_t *bytes, uint64_t size_bytes, int64_t offset,
                                                          int8_t isolation_level);

#endif
