/* Copies records of a view into Arrow's buffers. Invariants: client/columns.h. */
#include "client/columns.h"

#include <string.h>

#include "base/error.h"
#include "base/varint.h"

#define US_PER_MS 1000

void mqd_arrow_begin(struct mqd_arrow_rows *rows)
{
    struct mqd_arrow_blobs *columns[] = {&rows->keys, &rows->values, &rows->header_keys, &rows->header_values};
    for (size_t i = 0; i < sizeof columns / sizeof *columns; i++) {
        columns[i]->data_bytes = columns[i]->null_count = 0;
        if (columns[i]->data)
            columns[i]->ends[0] = 0;
    }
    if (rows->header_ends)
        rows->header_ends[0] = 0;
    rows->row_count = rows->header_count = rows->header_null_count = rows->damaged_key_count = 0;
}

/* Writes the validity of entry `at_row`, the first one not written yet (A2). */
static void validity_put(uint8_t *validity, uint32_t *null_count, uint32_t at_row, bool is_null)
{
    if (is_null && (*null_count)++ == 0)
        memset(validity, 0xff, (size_t)at_row / 8 + 1);
    if (*null_count == 0)
        return;
    if (at_row % 8 == 0)
        validity[at_row / 8] = 0;
    if (is_null)
        validity[at_row / 8] &= (uint8_t)~(1u << at_row % 8);
    else
        validity[at_row / 8] |= (uint8_t)(1u << at_row % 8);
}

static inline void put_blob(struct mqd_arrow_blobs *column, uint32_t at_row, const uint8_t *bytes, int32_t size_bytes)
{
    if (size_bytes > 0) {
        memcpy(column->data + column->data_bytes, bytes, (size_t)size_bytes);
        column->data_bytes += (uint32_t)size_bytes;
    }
    column->ends[at_row + 1] = (int32_t)column->data_bytes;
    if (size_bytes < 0 || column->null_count)
        validity_put(column->validity, &column->null_count, at_row, size_bytes < 0);
}

static inline bool fits(const struct mqd_arrow_blobs *column, int64_t size_bytes)
{
    return !column->data || size_bytes <= (int64_t)column->data_capacity - column->data_bytes;
}

static bool set_full(struct mqd_arrow_rows *rows, enum mqd_arrow_full buffer, uint64_t needed)
{
    rows->full_buffer = buffer;
    rows->needed = needed;
    return false;
}

/* ---- headers ---- */

struct header {
    const uint8_t *key, *value;
    int64_t key_bytes, value_bytes;
};

/* Reads one header; returns NULL if it is truncated. */
static const uint8_t *header_read(const uint8_t *at, const uint8_t *end, struct header *out)
{
    at = mqd_varint_size(at, end, &out->key_bytes);
    if (!at || out->key_bytes < 0)
        return NULL;
    out->key = at;
    at = mqd_varint_size(at + out->key_bytes, end, &out->value_bytes);
    out->value = at;
    return at && out->value_bytes > 0 ? at + out->value_bytes : at;
}

struct section {
    const uint8_t *at, *end;
    int64_t count, key_bytes, value_bytes;
};

/* Walks a header section to its end to measure its contents. Returns false if it is damaged. */
static bool section_measure(const uint8_t *at, const uint8_t *end, struct section *out)
{
    struct header header;
    *out = (struct section){.end = end};
    at = mqd_varint(at, end, &out->count);
    if (!at || out->count < 0 || out->count > (end - at) / 2)
        return false;
    out->at = at;
    for (int64_t i = 0; i < out->count; i++) {
        if (!(at = header_read(at, end, &header)))
            return false;
        out->key_bytes += header.key_bytes;
        out->value_bytes += header.value_bytes > 0 ? header.value_bytes : 0;
    }
    return at == end;
}

/* Well-formed UTF-8 (RFC 3629: no surrogates, no overlong forms). */
static bool is_utf8(const uint8_t *at, int64_t size_bytes)
{
    const uint8_t *end = at + size_bytes;
    while (at < end) {
        uint8_t first = *at++;
        if (first < 0x80)
            continue;
        int more = first >= 0xc2 && first < 0xe0   ? 1
                   : (first & 0xf0) == 0xe0        ? 2
                   : first >= 0xf0 && first < 0xf5 ? 3
                                                   : 0;
        if (!more || end - at < more)
            return false;
        uint8_t low = first == 0xe0   ? 0xa0
                      : first == 0xf0 ? 0x90
                                      : 0x80,
                high = first == 0xed   ? 0x9f
                       : first == 0xf4 ? 0x8f
                                       : 0xbf;
        if (at[0] < low || at[0] > high)
            return false;
        for (int i = 1; i < more; i++)
            if ((at[i] & 0xc0) != 0x80)
                return false;
        at += more;
    }
    return true;
}

static void section_put(struct mqd_arrow_rows *rows, const struct section *section)
{
    const uint8_t *at = section->at;
    struct header header;
    for (int64_t i = 0; i < section->count; i++) {
        at = header_read(at, section->end, &header);
        rows->damaged_key_count += !is_utf8(header.key, header.key_bytes);
        put_blob(&rows->header_keys, rows->header_count, header.key, (int32_t)header.key_bytes);
        put_blob(&rows->header_values, rows->header_count, header.value, (int32_t)header.value_bytes);
        rows->header_count++;
    }
    rows->header_ends[rows->row_count + 1] = (int32_t)rows->header_count;
    if (section->count == 0 || rows->header_null_count)
        validity_put(rows->header_validity, &rows->header_null_count, rows->row_count, section->count == 0);
}

static bool section_fits(struct mqd_arrow_rows *rows, const struct section *section)
{
    if (section->count > (int64_t)rows->header_capacity - rows->header_count)
        return set_full(rows, MQD_ARROW_HEADERS, (uint64_t)section->count);
    if (!fits(&rows->header_keys, section->key_bytes))
        return set_full(rows, MQD_ARROW_HEADER_KEYS, (uint64_t)section->key_bytes);
    return fits(&rows->header_values, section->value_bytes)
               ? true
               : set_full(rows, MQD_ARROW_HEADER_VALUES, (uint64_t)section->value_bytes);
}

/* ---- rows ---- */

static inline bool is_inside(const struct mqd_record_view *view, uint64_t position, int32_t size_bytes)
{
    return position <= view->base_bytes && (size_bytes <= 0 || (uint64_t)size_bytes <= view->base_bytes - position);
}

static inline int64_t in_us(int64_t ms)
{
    const int64_t limit = INT64_MAX / US_PER_MS;
    return (ms > limit ? limit : ms < -limit ? -limit : ms) * US_PER_MS;
}

static int section_of(const struct mqd_record_view *view, uint32_t i, struct section *out)
{
    *out = (struct section){0};
    if (!view->header_positions) /* no record of the view has headers */
        return 0;
    if (view->header_bytes[i] < 1 || !is_inside(view, view->header_positions[i], view->header_bytes[i]))
        return mqd_error_set_static(MQD_E_INVALID, "a record's headers are outside of the buffer");
    const uint8_t *headers = view->base + view->header_positions[i];
    if (!section_measure(headers, headers + view->header_bytes[i], out))
        return mqd_error_set(MQD_E_CORRUPT, "the headers of the record at offset %lld are damaged",
                             (long long)view->offsets[i]);
    return 0;
}

/* Returns 1 if the row was appended, 0 if a buffer is full, -1 on error. */
static inline int row_append(struct mqd_arrow_rows *rows, const struct mqd_record_view *view, uint32_t i)
{
    struct section section;
    uint32_t row = rows->row_count;
    if (row == rows->row_capacity)
        return set_full(rows, MQD_ARROW_ROWS, 1);
    if (!is_inside(view, view->key_positions[i], view->key_bytes[i]) ||
        !is_inside(view, view->value_positions[i], view->value_bytes[i]))
        return mqd_error_set_static(MQD_E_INVALID, "a record's key or value is outside of the buffer");
    if (!fits(&rows->keys, view->key_bytes[i]))
        return set_full(rows, MQD_ARROW_KEYS, (uint64_t)view->key_bytes[i]);
    if (!fits(&rows->values, view->value_bytes[i]))
        return set_full(rows, MQD_ARROW_VALUES, (uint64_t)view->value_bytes[i]);
    if (rows->header_ends) {
        if (section_of(view, i, &section) < 0)
            return -1;
        if (!section_fits(rows, &section))
            return 0;
        section_put(rows, &section);
    }
    if (rows->keys.data)
        put_blob(&rows->keys, row, view->base + view->key_positions[i], view->key_bytes[i]);
    if (rows->values.data)
        put_blob(&rows->values, row, view->base + view->value_positions[i], view->value_bytes[i]);
    if (rows->offsets)
        rows->offsets[row] = view->offsets[i];
    if (rows->timestamps_us)
        rows->timestamps_us[row] = in_us(view->timestamps_ms[i]);
    if (rows->timestamp_types)
        rows->timestamp_types[row] = view->timestamp_type;
    rows->row_count++;
    return 1;
}

int64_t mqd_arrow_append(struct mqd_arrow_rows *rows, const struct mqd_record_view *view, uint32_t start, uint32_t end)
{
    if (start > end || end > view->count)
        return mqd_error_set_static(MQD_E_INVALID, "the range of records is outside of the view");
    for (uint32_t i = start; i < end; i++) {
        int result = row_append(rows, view, i);
        if (result <= 0)
            return result < 0 ? -1 : (int64_t)(i - start);
    }
    return end - start;
}
