/* fuzz: -max_len=1200 */
/* Batches in memory, read and copied into Arrow's buffers: whatever the bytes, offsets rise and
 * stay within the data, and small buffers give the same rows as large ones.
 *
 *   byte 0   bits 0-2 rows of the small buffers - 1, bits 3-5 their headers, bit 6 read_committed
 *            with producer 1 aborted, bit 7 no headers are wanted
 *   byte 1   bytes of the small buffers' data
 *   rest     batches; their checksums are not verified
 */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "client/columns.h"

enum { VIEW = 64, TURNS_MAX = 4000 };

static void require(int condition)
{
    if (!condition)
        abort();
}

static void blobs_new(struct mqd_arrow_blobs *column, uint32_t count, uint32_t data)
{
    *column = (struct mqd_arrow_blobs){.data = malloc(data ? data : 1),
                                       .ends = malloc(4 * (count + 1)),
                                       .validity = malloc((count + 7) / 8 + 1),
                                       .data_capacity = data};
}

static void blobs_free(struct mqd_arrow_blobs *column)
{
    free(column->data);
    free(column->ends);
    free(column->validity);
}

static struct mqd_arrow_rows rows_new(uint32_t count, uint32_t headers, uint32_t data, bool with_headers)
{
    struct mqd_arrow_rows rows = {.row_capacity = count,
                                  .offsets = malloc(8 * count),
                                  .timestamps_us = malloc(8 * count),
                                  .timestamp_types = malloc(4 * count)};
    blobs_new(&rows.keys, count, data);
    blobs_new(&rows.values, count, data);
    if (with_headers) {
        rows.header_capacity = headers;
        rows.header_ends = malloc(4 * (count + 1));
        rows.header_validity = malloc((count + 7) / 8);
        blobs_new(&rows.header_keys, headers, data);
        blobs_new(&rows.header_values, headers, data);
    }
    mqd_arrow_begin(&rows);
    return rows;
}

static void rows_free(struct mqd_arrow_rows *rows)
{
    free(rows->offsets);
    free(rows->timestamps_us);
    free(rows->timestamp_types);
    free(rows->header_ends);
    free(rows->header_validity);
    blobs_free(&rows->keys);
    blobs_free(&rows->values);
    blobs_free(&rows->header_keys);
    blobs_free(&rows->header_values);
}

static uint64_t mix(uint64_t hash, uint64_t value)
{
    return (hash ^ value) * 0x100000001b3u;
}

static uint64_t blob(const struct mqd_arrow_blobs *column, uint32_t i, uint64_t hash)
{
    int32_t from = column->ends[i], to = column->ends[i + 1];
    bool valid = column->null_count == 0 || (column->validity[i / 8] >> i % 8 & 1);
    require(from >= 0 && from <= to && (uint32_t)to <= column->data_bytes && (valid || from == to));
    for (int32_t at = from; at < to; at++)
        hash = mix(hash, column->data[at]);
    return mix(mix(hash, valid), (uint64_t)(to - from));
}

/* A digest of all finished rows, in order: it must not depend on how rows were split into
 * batches. */
static uint64_t digest(const struct mqd_arrow_rows *rows, uint64_t hash)
{
    for (uint32_t i = 0; i < rows->row_count; i++) {
        hash = mix(mix(mix(hash, (uint64_t)rows->offsets[i]), (uint64_t)rows->timestamps_us[i]),
                   (uint64_t)rows->timestamp_types[i]);
        hash = blob(&rows->values, i, blob(&rows->keys, i, hash));
        if (!rows->header_ends)
            continue;
        int32_t from = rows->header_ends[i], to = rows->header_ends[i + 1];
        bool valid = rows->header_null_count == 0 || (rows->header_validity[i / 8] >> i % 8 & 1);
        require(from >= 0 && from <= to && (uint32_t)to <= rows->header_count && valid == (to > from));
        for (int32_t at = from; at < to; at++)
            hash = blob(&rows->header_values, (uint32_t)at, blob(&rows->header_keys, (uint32_t)at, hash));
    }
    return hash;
}

struct view {
    struct mqd_record_view view;
    int64_t offsets[VIEW], timestamps_ms[VIEW];
    uint64_t key_positions[VIEW], value_positions[VIEW], header_positions[VIEW];
    int32_t key_bytes[VIEW], value_bytes[VIEW], header_bytes[VIEW];
};

static struct mqd_record_view *prepare(struct view *v)
{
    v->view = (struct mqd_record_view){.capacity = VIEW,
                                       .offsets = v->offsets,
                                       .timestamps_ms = v->timestamps_ms,
                                       .key_positions = v->key_positions,
                                       .key_bytes = v->key_bytes,
                                       .value_positions = v->value_positions,
                                       .value_bytes = v->value_bytes,
                                       .header_positions = v->header_positions,
                                       .header_bytes = v->header_bytes};
    return &v->view;
}

/* One view's records. false: damaged, or one that is larger than the buffers. */
static bool take(struct mqd_arrow_rows *rows, const struct mqd_record_view *view, uint64_t *hash)
{
    uint32_t start = 0;
    while (start < view->count) {
        int64_t taken = mqd_arrow_append(rows, view, start, view->count);
        if (taken < 0)
            return false;
        start += (uint32_t)taken;
        if (start < view->count && rows->row_count == 0)
            return false;
        if (start < view->count) {
            *hash = digest(rows, *hash);
            mqd_arrow_begin(rows);
        }
    }
    return true;
}

/* All of it; *whole: nothing stopped it. Returns the digest of the rows. */
static uint64_t run(const uint8_t *bytes, uint64_t size, struct mqd_arrow_rows *rows, bool committed, bool *whole)
{
    static const int64_t producer = 1, first = 0;
    struct mqd_segment_reader *reader = mqd_segment_reader_open_memory(bytes, size, 0, committed);
    struct mqd_read_state state = {0};
    struct view v;
    uint64_t hash = 1469598103934665603u;
    int64_t last = -1;
    require(reader && mqd_segment_reader_set_aborted(reader, &producer, &first, committed, INT64_MAX) == 0);
    *whole = true;
    for (int turn = 0; *whole && turn < TURNS_MAX; turn++) {
        require(mqd_segment_reader_next(reader, 1 << 20, 0, prepare(&v), &state) == 0);
        for (uint32_t i = 0; i < v.view.count; i++) {
            require(v.offsets[i] > last);
            last = v.offsets[i];
        }
        *whole = take(rows, &v.view, &hash);
        if (state.stop == MQD_READ_COMPRESSED && v.view.count == 0)
            mqd_segment_reader_skip(reader);
        else if (state.stop != MQD_READ_FULL && state.stop != MQD_READ_SEGMENT && v.view.count == 0)
            break;
    }
    mqd_segment_reader_close(reader);
    return digest(rows, hash);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2 + MQD_BATCH_HEADER_BYTES)
        return 0;
    int64_t next = -1, extent = mqd_batches_extent(data + 2, size - 2, &next);
    require(extent <= (int64_t)size - 2 && (extent <= 0 || next > 0));
    if (extent <= 0)
        return 0;
    uint8_t *bytes = malloc((size_t)extent);
    memcpy(bytes, data + 2, (size_t)extent);
    bool committed = data[0] >> 6 & 1, with_headers = !(data[0] >> 7), whole, small_whole;
    struct mqd_arrow_rows large = rows_new(4096, 4096, 1 << 16, with_headers),
                          small = rows_new((data[0] & 7u) + 1, (data[0] >> 3 & 7u) + 1, data[1], with_headers);
    uint64_t expected = run(bytes, (uint64_t)extent, &large, committed, &whole);
    uint64_t got = run(bytes, (uint64_t)extent, &small, committed, &small_whole);
    require(!small_whole || !whole || got == expected);
    rows_free(&large);
    rows_free(&small);
    free(bytes);
    return 0;
}
