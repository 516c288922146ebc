/* Keys and values found in stored batches: in memory of exactly their size, so that the
 * sanitizer detects every overrun. */
#include "base/error.h"
#include "mqd_test.h"

enum { RECORD = 1 + 10, SIZE = 61 + 3 * RECORD, CAPACITY = 8 };
/* length 10, attributes, timestamp delta, offset delta, key of 2, value of 2, no headers */
static const uint8_t record[RECORD] = {2 * (RECORD - 1), 0, 0, 0, 4, 'k', 'x', 4, 'v', 'y', 0};

static void put(uint8_t *at, int bytes, uint64_t value)
{
    for (int i = 0; i < bytes; i++)
        at[i] = (uint8_t)(value >> (8 * (bytes - 1 - i)));
}

static void seal(uint8_t *batch, size_t size)
{
    put(batch + 17, 4, mqd_crc32c(0, batch + 21, size - 21));
}

static void make(uint8_t *batch, int64_t base_offset, int attributes)
{
    memset(batch, 0, SIZE);
    put(batch, 8, (uint64_t)base_offset);
    put(batch + 8, 4, SIZE - 12);
    batch[16] = 2;
    put(batch + 21, 2, (uint64_t)attributes);
    put(batch + 23, 4, 2);
    put(batch + 43, 8, (uint64_t)-1);
    put(batch + 57, 4, 3);
    for (int i = 0; i < 3; i++) {
        memcpy(batch + 61 + i * RECORD, record, RECORD);
        batch[61 + i * RECORD + 3] = (uint8_t)(2 * i);
        batch[61 + i * RECORD + 6] = (uint8_t)('0' + i);
    }
    seal(batch, SIZE);
}

static struct mqd_record_walk walk(const uint8_t *data, size_t size, int64_t end_offset,
                                   struct mqd_record_location *out, uint32_t capacity)
{
    struct mqd_record_walk state = {0, 0, 0, 0};
    uint8_t *copy = malloc(size ? size : 1);
    memcpy(copy, data, size);
    mqd_records_locate(copy, size, end_offset, &state, out, capacity);
    free(copy);
    return state;
}

TEST(plain_batches)
{
    uint8_t data[2 * SIZE];
    struct mqd_record_location out[CAPACITY];
    make(data, 0, 0);
    make(data + SIZE, 10, 0); /* compaction left a gap */
    struct mqd_record_walk state = walk(data, sizeof data, 100, out, CAPACITY);
    CHECK_EQUAL(state.stop, MQD_WALK_END);
    CHECK_EQUAL(state.record_count, 6);
    CHECK_EQUAL(state.next_offset, 13);
    CHECK_EQUAL(state.position, 2 * SIZE);
    for (uint32_t i = 0; i < 6; i++) {
        CHECK_EQUAL(out[i].key_bytes, 2);
        CHECK_EQUAL(out[i].value_bytes, 2);
        CHECK(data[out[i].key_position] == 'k' && data[out[i].key_position + 1] == (uint8_t)('0' + i % 3));
        CHECK(data[out[i].value_position] == 'v');
    }
}

TEST(where_a_walk_stops)
{
    uint8_t data[2 * SIZE];
    struct mqd_record_location out[CAPACITY];
    make(data, 0, 0);
    make(data + SIZE, 3, 0);
    CHECK_EQUAL(walk(data, sizeof data, 3, out, CAPACITY).stop, MQD_WALK_END_OFFSET);
    struct mqd_record_walk state = walk(data, sizeof data, 100, out, 5);
    CHECK_EQUAL(state.stop, MQD_WALK_FULL);
    CHECK_EQUAL(state.record_count, 3);
    CHECK_EQUAL(walk(data, sizeof data, 100, out, 2).stop, MQD_WALK_OTHER);
    for (size_t size = 0; size < SIZE; size++)
        CHECK_EQUAL(walk(data, size, 100, out, CAPACITY).record_count, 0);
    static const int special[] = {1, 4, 1 << 4, 1 << 5};
    for (size_t i = 0; i < sizeof special / sizeof *special; i++) {
        make(data + SIZE, 3, special[i]);
        state = walk(data, sizeof data, 100, out, CAPACITY);
        CHECK_EQUAL(state.stop, MQD_WALK_OTHER);
        CHECK_EQUAL(state.position, SIZE);
    }
    make(data + SIZE, 2, 0); /* an offset that was there already */
    CHECK_EQUAL(walk(data, sizeof data, 100, out, CAPACITY).stop, MQD_WALK_CORRUPT);
}

TEST(nulls_and_empty_ones)
{
    uint8_t data[SIZE];
    struct mqd_record_location out[CAPACITY];
    make(data, 0, 0);
    uint8_t *body = data + 61;
    body[7] = 1; /* the value is null; its two bytes become headers' */
    seal(data, SIZE);
    struct mqd_record_walk state = walk(data, SIZE, 100, out, CAPACITY);
    CHECK_EQUAL(state.record_count, 3);
    CHECK_EQUAL(out[0].value_bytes, -1);
    body[4] = 1;
    seal(data, SIZE);
    walk(data, SIZE, 100, out, CAPACITY);
    CHECK_EQUAL(out[0].key_bytes, -1);
}

TEST(damage_under_a_right_checksum)
{
    uint64_t seed = 7;
    struct mqd_record_location out[CAPACITY];
    for (int round = 0; round < (test_long() ? 2000000 : 100000); round++) {
        uint8_t data[2 * SIZE];
        make(data, 0, 0);
        make(data + SIZE, 3, 0);
        for (int flips = 1 + (int)(test_random(&seed) % 3); flips; flips--)
            data[test_random(&seed) % sizeof data] = (uint8_t)test_random(&seed);
        seal(data, SIZE);
        seal(data + SIZE, SIZE);
        size_t size = test_random(&seed) % 4 ? sizeof data : test_random(&seed) % sizeof data;
        struct mqd_record_walk state = walk(data, size, 100, out, CAPACITY);
        CHECK(state.record_count <= CAPACITY && state.position <= size);
        for (uint32_t i = 0; i < state.record_count; i++) {
            CHECK(out[i].key_bytes >= -1 &&
                  out[i].key_position + (uint32_t)(out[i].key_bytes > 0 ? out[i].key_bytes : 0) <= size);
            CHECK(out[i].value_bytes >= -1 &&
                  out[i].value_position + (uint32_t)(out[i].value_bytes > 0 ? out[i].value_bytes : 0) <= size);
        }
    }
}
