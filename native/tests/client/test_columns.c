/* Records into Arrow's buffers, and readers over memory: buffers of exactly the stated size, so
 * that the sanitizer detects every overrun. */
#include "client/columns.h"
#include "mqd_test.h"
#include "wire/record_scan.h"

enum { ROWS = 20, DATA = 64, HEADERS = 10 };

static void *room(size_t bytes)
{
    void *memory = malloc(bytes);
    memset(memory, 0xa5, bytes);
    return memory;
}

static void blobs_new(struct mqd_arrow_blobs *column, uint32_t count, uint32_t data)
{
    *column = (struct mqd_arrow_blobs){
        .data = room(data), .ends = room(4 * (count + 1)), .validity = room((count + 7) / 8), .data_capacity = data};
}

static void blobs_free(struct mqd_arrow_blobs *column)
{
    free(column->data);
    free(column->ends);
    free(column->validity);
}

static struct mqd_arrow_rows rows_new(uint32_t count, uint32_t data, uint32_t headers)
{
    struct mqd_arrow_rows rows = {.row_capacity = count,
                                  .offsets = room(8 * count),
                                  .timestamps_us = room(8 * count),
                                  .timestamp_types = room(4 * count),
                                  .header_capacity = headers,
                                  .header_ends = room(4 * (count + 1)),
                                  .header_validity = room((count + 7) / 8)};
    blobs_new(&rows.keys, count, data);
    blobs_new(&rows.values, count, data);
    blobs_new(&rows.header_keys, headers, data);
    blobs_new(&rows.header_values, headers, data);
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

/* Records one after the other: key (or null), value (or null), header section. */
struct source {
    struct mqd_record_view view;
    uint8_t bytes[1000];
    int64_t offsets[ROWS], timestamps[ROWS];
    uint64_t key_positions[ROWS], value_positions[ROWS], header_positions[ROWS];
    int32_t key_bytes[ROWS], value_bytes[ROWS], header_bytes[ROWS];
};

static void source_begin(struct source *s)
{
    memset(s, 0, sizeof *s);
    s->view = (struct mqd_record_view){.capacity = ROWS,
                                       .base = s->bytes,
                                       .offsets = s->offsets,
                                       .timestamps_ms = s->timestamps,
                                       .key_positions = s->key_positions,
                                       .key_bytes = s->key_bytes,
                                       .value_positions = s->value_positions,
                                       .value_bytes = s->value_bytes,
                                       .header_positions = s->header_positions,
                                       .header_bytes = s->header_bytes};
}

static int32_t append_blob(struct source *s, const void *bytes, int32_t size, uint64_t *position)
{
    *position = s->view.base_bytes;
    if (size > 0)
        memcpy(s->bytes + s->view.base_bytes, bytes, (size_t)size);
    s->view.base_bytes += (uint64_t)(size > 0 ? size : 0);
    return size;
}

static void source_add(struct source *s, const char *key, const char *value, const char *section, int32_t section_bytes)
{
    uint32_t i = s->view.count++;
    s->offsets[i] = 100 + i;
    s->timestamps[i] = 1000 + i;
    s->key_bytes[i] = append_blob(s, key, key ? (int32_t)strlen(key) : -1, &s->key_positions[i]);
    s->value_bytes[i] = append_blob(s, value, value ? (int32_t)strlen(value) : -1, &s->value_positions[i]);
    s->header_bytes[i] = append_blob(s, section, section_bytes, &s->header_positions[i]);
}

static int bit(const uint8_t *bitmap, int i)
{
    return bitmap[i / 8] >> i % 8 & 1;
}

TEST(rows_with_nulls)
{
    struct source s;
    struct mqd_arrow_rows rows = rows_new(ROWS, DATA, HEADERS);
    source_begin(&s);
    for (int i = 0; i < 9; i++)
        source_add(&s, "k", "vv", "\0", 1);
    source_add(&s, NULL, "", "\0", 1);
    source_add(&s, "", NULL, "\2\2a\1", 4);         /* one header, "a" without value */
    source_add(&s, "z", "end", "\4\2b\4xy\0\0", 8); /* "b": "xy", and "" : "" */
    s.view.timestamp_type = 1;
    CHECK_EQUAL(mqd_arrow_append(&rows, &s.view, 0, 12), 12);
    CHECK_EQUAL(rows.row_count, 12);
    CHECK_EQUAL(rows.keys.null_count, 1);
    CHECK_EQUAL(rows.values.null_count, 1);
    for (int i = 0; i < 12; i++) {
        CHECK_EQUAL(bit(rows.keys.validity, i), i != 9);
        CHECK_EQUAL(bit(rows.values.validity, i), i != 10);
        CHECK_EQUAL(bit(rows.header_validity, i), i >= 10);
        CHECK_EQUAL(rows.offsets[i], 100 + i);
        CHECK_EQUAL(rows.timestamps_us[i], (1000 + i) * 1000);
        CHECK_EQUAL(rows.timestamp_types[i], 1);
    }
    CHECK_EQUAL(rows.keys.data_bytes, 10);
    CHECK_EQUAL(rows.keys.ends[12], 10);
    CHECK(memcmp(rows.keys.data, "kkkkkkkkkz", 10) == 0);
    CHECK_EQUAL(rows.values.ends[9], 18);
    CHECK_EQUAL(rows.values.ends[11], 18);
    CHECK_EQUAL(rows.values.ends[12], 21);
    CHECK_EQUAL(rows.header_count, 3);
    CHECK_EQUAL(rows.header_ends[10], 0);
    CHECK_EQUAL(rows.header_ends[11], 1);
    CHECK_EQUAL(rows.header_ends[12], 3);
    CHECK(memcmp(rows.header_keys.data, "ab", 2) == 0 && memcmp(rows.header_values.data, "xy", 2) == 0);
    CHECK_EQUAL(rows.header_values.null_count, 1);
    CHECK(!bit(rows.header_values.validity, 0) && bit(rows.header_values.validity, 1) &&
          bit(rows.header_values.validity, 2));
    CHECK_EQUAL(rows.damaged_key_count, 0);
    rows_free(&rows);
}

TEST(oversized_records_are_left)
{
    struct source s;
    source_begin(&s);
    for (int i = 0; i < 8; i++)
        source_add(&s, "key", "value", "\2\2h\4ii", 6);
    struct mqd_arrow_rows rows = rows_new(3, DATA, HEADERS);
    CHECK_EQUAL(mqd_arrow_append(&rows, &s.view, 0, 8), 3);
    CHECK_EQUAL(rows.full_buffer, MQD_ARROW_ROWS);
    rows_free(&rows);
    rows = rows_new(ROWS, 14, HEADERS);
    CHECK_EQUAL(mqd_arrow_append(&rows, &s.view, 0, 8), 2);
    CHECK_EQUAL(rows.full_buffer, MQD_ARROW_VALUES);
    CHECK_EQUAL(rows.needed, 5);
    CHECK_EQUAL(rows.header_count, 2); /* A1 */
    CHECK_EQUAL(rows.keys.ends[2], 6);
    mqd_arrow_begin(&rows);
    CHECK_EQUAL(mqd_arrow_append(&rows, &s.view, 2, 8), 2);
    CHECK_EQUAL(rows.offsets[0], 102);
    rows_free(&rows);
    rows = rows_new(ROWS, DATA, 3);
    CHECK_EQUAL(mqd_arrow_append(&rows, &s.view, 0, 8), 3);
    CHECK_EQUAL(rows.full_buffer, MQD_ARROW_HEADERS);
    rows_free(&rows);
    rows = rows_new(ROWS, 4, HEADERS);
    CHECK_EQUAL(mqd_arrow_append(&rows, &s.view, 0, 8), 0);
    CHECK_EQUAL(rows.full_buffer, MQD_ARROW_VALUES);
    rows_free(&rows);
}

TEST(columns_that_are_not_selected)
{
    struct source s;
    source_begin(&s);
    source_add(&s, "key", "value", "\2\2h\4ii", 6);
    int32_t ends[2];
    uint8_t data[5], validity[1];
    struct mqd_arrow_rows rows = {.row_capacity = 1,
                                  .values = {.data = data, .ends = ends, .validity = validity, .data_capacity = 5}};
    mqd_arrow_begin(&rows);
    CHECK_EQUAL(mqd_arrow_append(&rows, &s.view, 0, 1), 1);
    CHECK(memcmp(data, "value", 5) == 0);
    s.view.header_positions = NULL;
    rows = rows_new(ROWS, DATA, HEADERS);
    CHECK_EQUAL(mqd_arrow_append(&rows, &s.view, 0, 1), 1);
    CHECK_EQUAL(rows.header_null_count, 1);
    rows_free(&rows);
}

TEST(times_that_do_not_fit)
{
    struct source s;
    struct mqd_arrow_rows rows = rows_new(ROWS, DATA, HEADERS);
    static const int64_t times[] = {-1, 0, INT64_MAX, INT64_MIN, INT64_MAX / 1000, INT64_MAX / 1000 + 1};
    source_begin(&s);
    for (int i = 0; i < 6; i++) {
        source_add(&s, NULL, NULL, "\0", 1);
        s.timestamps[i] = times[i];
    }
    CHECK_EQUAL(mqd_arrow_append(&rows, &s.view, 0, 6), 6);
    CHECK_EQUAL(rows.timestamps_us[0], -1000);
    CHECK_EQUAL(rows.timestamps_us[1], 0);
    CHECK_EQUAL(rows.timestamps_us[2], INT64_MAX / 1000 * 1000);
    CHECK_EQUAL(rows.timestamps_us[3], -(INT64_MAX / 1000 * 1000));
    CHECK_EQUAL(rows.timestamps_us[4], rows.timestamps_us[5]);
    rows_free(&rows);
}

TEST(damaged_headers_and_positions)
{
    static const struct {
        const char *section;
        int32_t bytes;
    } damaged[] = {{"\1", 1},       {"\2", 1},      {"\2\2", 2},
                   {"\2\1\0", 3},   {"\2\2a\3", 4}, {"\2\2a\4x", 5},
                   {"\2\2a\0z", 5}, {"\x80", 1},    {"\xfe\xff\xff\xff\x0f\0", 6},
                   {"\0\0", 2},     {"", 0}};
    for (size_t i = 0; i < sizeof damaged / sizeof *damaged; i++) {
        struct source s;
        struct mqd_arrow_rows rows = rows_new(ROWS, DATA, HEADERS);
        source_begin(&s);
        source_add(&s, "a", "b", "\0", 1);
        source_add(&s, "c", "d", damaged[i].section, damaged[i].bytes);
        CHECK_EQUAL(mqd_arrow_append(&rows, &s.view, 0, 2), -1);
        CHECK_EQUAL(rows.row_count, 1);
        CHECK_EQUAL(rows.header_count, 0);
        rows_free(&rows);
    }
    for (int kind = 0; kind < 3; kind++) {
        struct source s;
        struct mqd_arrow_rows rows = rows_new(ROWS, DATA, HEADERS);
        source_begin(&s);
        source_add(&s, "a", "b", "\0", 1);
        (kind == 0 ? s.key_positions : kind == 1 ? s.value_positions : s.header_positions)[0] = 3;
        CHECK_EQUAL(mqd_arrow_append(&rows, &s.view, 0, 1), -1);
        CHECK_EQUAL(mqd_arrow_append(&rows, &s.view, 0, 2), -1); /* more than there are */
        rows_free(&rows);
    }
}

TEST(header_keys_that_are_not_utf8)
{
    static const struct {
        const char *key;
        int damaged;
    } keys[] = {{"ok", 0},       {"\xc3\xa9", 0}, {"\xe2\x82\xac", 0}, {"\xf0\x9f\x98\x80", 0}, {"\xff", 1},
                {"\xc3", 1},     {"\xc0\x80", 1}, {"\xed\xa0\x80", 1}, {"\xe0\x80\x80", 1},     {"\xf4\x90\x80\x80", 1},
                {"\xe2\x82", 1}, {"a\x80", 1}};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        struct source s;
        struct mqd_arrow_rows rows = rows_new(ROWS, DATA, HEADERS);
        char section[16] = {2, (char)(2 * strlen(keys[i].key))};
        memcpy(section + 2, keys[i].key, strlen(keys[i].key));
        section[2 + strlen(keys[i].key)] = 1;
        source_begin(&s);
        source_add(&s, NULL, NULL, section, (int32_t)(3 + strlen(keys[i].key)));
        CHECK_EQUAL(mqd_arrow_append(&rows, &s.view, 0, 1), 1);
        CHECK_EQUAL((int)rows.damaged_key_count, keys[i].damaged);
        rows_free(&rows);
    }
}

static uint8_t *batches_new(int count, size_t *size)
{
    static const uint8_t record[] = {2 * 8, 0, 0, 0, 2, 'k', 2, 'v', 0};
    size_t one = MQD_BATCH_HEADER_BYTES + sizeof record;
    uint8_t *bytes = malloc(one * (size_t)count);
    for (int i = 0; i < count; i++) {
        struct mqd_batch batch = {
            .record_count = 1, .base_offset = 5 + 2 * i, .producer_id = -1, .producer_epoch = -1, .base_sequence = -1};
        uint8_t *at = bytes + one * (size_t)i;
        memcpy(at + MQD_BATCH_HEADER_BYTES, record, sizeof record);
        mqd_batch_put_header(at, &batch, at + MQD_BATCH_HEADER_BYTES, sizeof record);
    }
    *size = one * (size_t)count;
    return bytes;
}

TEST(extent_and_reader_of_memory)
{
    size_t size;
    uint8_t *bytes = batches_new(3, &size);
    int64_t next = -7;
    CHECK_EQUAL(mqd_batches_extent(bytes, size, &next), (int64_t)size);
    CHECK_EQUAL(next, 10);
    for (size_t cut = 0; cut < size; cut++) {
        uint8_t *part = malloc(cut ? cut : 1);
        memcpy(part, bytes, cut);
        next = -7;
        CHECK_EQUAL(mqd_batches_extent(part, cut, &next), (int64_t)(cut / (size / 3) * (size / 3)));
        CHECK_EQUAL(next, cut < size / 3 ? -7 : cut < size / 3 * 2 ? 6 : 8);
        free(part);
    }
    struct source s;
    struct mqd_read_state state;
    source_begin(&s);
    struct mqd_segment_reader *reader = mqd_segment_reader_open_memory(bytes, size, 6, 0);
    CHECK_EQUAL(mqd_segment_reader_next(reader, 1 << 20, 1, &s.view, &state), 0);
    CHECK_EQUAL(s.view.count, 2);
    CHECK_EQUAL(s.offsets[0], 7);
    CHECK(s.view.base == bytes); /* nothing was copied */
    CHECK_EQUAL(mqd_segment_reader_next(reader, 1 << 20, 1, &s.view, &state), 0);
    CHECK_EQUAL(state.stop, MQD_READ_END);
    mqd_segment_reader_close(reader);
    bytes[16] = 1;
    CHECK_EQUAL(mqd_batches_extent(bytes, size, &next), -1);
    free(bytes);
}
