/* The reader with the real writer: every appended byte is read once and in order, by readers
 * with different limits that follow while the log grows, rolls and loses its oldest segments. */
#include <endian.h>
#include <limits.h>
#include <unistd.h>

#include "base/error.h"
#include "log/partition.h"
#include "log/reader/reader.h"
#include "mqd_test.h"

#define READER_COUNT 4

struct follower {
    struct mqd_cursor cursor;
    int64_t offset;
    uint32_t size_max;
    uint64_t bytes, sum; /* of all data read */
};

static void put_word(uint8_t *at, uint64_t value, int bytes)
{
    for (int i = bytes - 1; i >= 0; i--, value >>= 8)
        at[i] = (uint8_t)value;
}

static uint32_t make_batch(uint8_t *bytes, uint64_t *seed)
{
    uint32_t records = 1 + (uint32_t)(test_random(seed) % 5),
             size_bytes = MQD_BATCH_HEADER_BYTES + 8 * records +
                          (uint32_t)(test_random(seed) % (test_random(seed) % 20 ? 900 : 30000));
    memset(bytes, 0, size_bytes);
    for (uint32_t i = MQD_BATCH_HEADER_BYTES; i < size_bytes; i++)
        bytes[i] = (uint8_t)test_random(seed);
    put_word(bytes + 8, size_bytes - 12, 4);
    bytes[16] = 2;
    put_word(bytes + 23, records - 1, 4);
    put_word(bytes + 27, 1700000000000ull, 8);
    put_word(bytes + 35, 1700000000000ull, 8);
    put_word(bytes + 43, UINT64_MAX, 8);
    put_word(bytes + 51, UINT64_MAX, 2);
    put_word(bytes + 53, UINT64_MAX, 4);
    put_word(bytes + 57, records, 4);
    put_word(bytes + 17, mqd_crc32c(0, bytes + 21, size_bytes - 21), 4);
    return size_bytes;
}

/* without the fields that the broker sets */
static uint64_t sum_of(const uint8_t *bytes, uint32_t size_bytes)
{
    return mqd_crc32c(0, bytes + 16, size_bytes - 16);
}

static struct mqd_partition *open_partition(const char *path)
{
    struct mqd_log_options options = {.segment_bytes = 100000,
                                      .segment_ms = INT64_MAX,
                                      .index_interval_bytes = 1000,
                                      .max_message_bytes = 1 << 20,
                                      .preallocate_bytes_min = 65536,
                                      .preallocate_bytes_max = 65536,
                                      .timestamp_before_max_ms = INT64_MAX,
                                      .timestamp_after_max_ms = INT64_MAX,
                                      .flush_interval_messages = INT64_MAX,
                                      .flush_interval_ms = INT64_MAX,
                                      .producer_id_count_max = 10,
                                      .producer_id_expiration_ms = 1000000};
    struct mqd_recovery recovery = {.recovery_point_offset = -1, .trusted_end_offset = -1};
    return mqd_partition_open(path, &options, 0, 1700000000000, &recovery);
}

/* Reads once; follows offsets by the received batches. */
static void follow(struct mqd_reader *reader, struct follower *f, const struct mqd_positions *positions,
                   uint64_t generation)
{
    static uint8_t bytes[1 << 20];
    struct mqd_range range;
    if (f->offset < positions->log_start_offset)
        f->offset = positions->log_start_offset;
    int16_t code = mqd_reader_find(reader, 5, positions, generation, f->offset, f->size_max, true, &f->cursor, &range);
    if (code)
        TEST_FAIL("find at %" PRId64 ": code %d, %s", f->offset, code, mqd_error_message());
    if (code || !range.size_bytes)
        return;
    CHECK(pread(mqd_segment_ref_fd(range.segment), bytes, range.size_bytes, range.position) ==
          (ssize_t)range.size_bytes);
    for (uint32_t at = 0; at < range.size_bytes;) {
        struct mqd_batch batch;
        const char *reason = "";
        CHECK(mqd_batch_decode(bytes + at, range.size_bytes - at, &batch) == 0 &&
              at + (uint32_t)batch.size_bytes <= range.size_bytes);
        CHECK_OR(mqd_batch_validate(bytes + at, (uint64_t)batch.size_bytes, &batch, &reason) == 0,
                 fprintf(stderr, "%s\n", reason);
                 return);
        /* the first may contain the log start */
        CHECK(batch.base_offset == f->offset || (at == 0 && batch.base_offset < f->offset));
        f->offset = batch.base_offset + batch.last_offset_delta + 1;
        f->bytes += (uint32_t)batch.size_bytes;
        f->sum += sum_of(bytes + at, (uint32_t)batch.size_bytes);
        at += (uint32_t)batch.size_bytes;
    }
    CHECK(f->offset <= positions->high_watermark && f->cursor.offset == f->offset);
    mqd_range_release(reader, &range);
}

/* Appends a few batches in one write; adds them to the sums. */
static void append(struct mqd_partition *partition, uint64_t *seed, uint64_t *bytes, uint64_t *sum,
                   uint64_t *generation)
{
    static uint8_t batches[8][40000];
    uint32_t count = 1 + (uint32_t)(test_random(seed) % 8);
    bool rolled = false;
    for (uint32_t i = 0; i < count; i++) {
        struct mqd_batch batch;
        struct mqd_stage_result result;
        const char *reason = "";
        uint32_t size_bytes = make_batch(batches[i], seed);
        *bytes += size_bytes;
        *sum += sum_of(batches[i], size_bytes);
        CHECK_OR(mqd_batch_validate(batches[i], size_bytes, &batch, &reason) == 0, fprintf(stderr, "%s\n", reason);
                 return);
        CHECK_EQUAL(mqd_partition_stage(partition, &batch, batches[i], true, 0, 0, 1700000000000, &result), 0);
    }
    CHECK_EQUAL(mqd_partition_write(partition, 1700000000000, &rolled), 0);
    *generation += rolled;
}

TEST(readers_that_follow_the_writer_get_every_byte_once)
{
    char path[] = "/tmp/mqd-test-reader-partition-XXXXXX", command[64];
    CHECK(mkdtemp(path) != NULL);
    uint64_t seed = 2024, bytes = 0, sum = 0, generation = 1;
    struct mqd_partition *partition = open_partition(path);
    CHECK_OR(partition != NULL, fprintf(stderr, "%s\n", mqd_error_message()); return);
    struct mqd_reader *reader = mqd_reader_create(8);
    mqd_reader_set_path(reader, 5, path);
    struct follower followers[READER_COUNT] = {
        {.size_max = 1}, {.size_max = 3000}, {.size_max = 60000}, {.size_max = 1 << 20}};
    struct mqd_positions positions;
    for (uint32_t turn = 0; turn < (test_long() ? 20000 : 2000) && !test_failed; turn++) {
        append(partition, &seed, &bytes, &sum, &generation);
        mqd_partition_positions(partition, &positions);
        positions.high_watermark = positions.log_end_offset;
        positions.high_watermark_segment = positions.log_end_segment;
        positions.high_watermark_position = positions.log_end_position;
        for (uint32_t i = 0; i < READER_COUNT; i++)
            if (test_random(&seed) % (i + 1) == 0)
                follow(reader, &followers[i], &positions, generation);
    }
    for (uint32_t i = 0; i < READER_COUNT && !test_failed; i++) {
        while (followers[i].offset < positions.high_watermark && !test_failed) {
            uint64_t available =
                mqd_reader_available_bytes(reader, 5, &positions, followers[i].offset, &followers[i].cursor);
            CHECK_OR(available == bytes - followers[i].bytes, );
            follow(reader, &followers[i], &positions, generation);
        }
        CHECK_OR(followers[i].bytes == bytes && followers[i].sum == sum, );
    }
    CHECK_OR(mqd_reader_fd_count(reader) <= 8, );
    mqd_reader_destroy(reader);
    CHECK_OR(mqd_partition_close(partition, 1) == 0, );
    snprintf(command, sizeof command, "rm -rf %s", path);
    CHECK_OR(system(command) == 0, );
}

/* Retention as in the broker: the log start and the generation advance, then the files are
 * deleted; readers in the dropped part continue after it. */
TEST(readers_survive_the_deletion_of_old_segments)
{
    char path[] = "/tmp/mqd-test-reader-partition-XXXXXX", command[64], name[PATH_MAX];
    CHECK(mkdtemp(path) != NULL);
    uint64_t seed = 7, bytes = 0, sum = 0, generation = 1;
    struct mqd_partition *partition = open_partition(path);
    CHECK_OR(partition != NULL, fprintf(stderr, "%s\n", mqd_error_message()); return);
    struct mqd_reader *reader = mqd_reader_create(8);
    mqd_reader_set_path(reader, 5, path);
    struct follower slow = {.size_max = 5000}, fast = {.size_max = 1 << 20};
    struct mqd_positions positions;
    for (uint32_t turn = 0; turn < 1500 && !test_failed; turn++) {
        append(partition, &seed, &bytes, &sum, &generation);
        if (turn % 100 == 99) {
            mqd_partition_positions(partition, &positions);
            /* `fast` is nearer to the end */
            int64_t keep = positions.log_end_offset - 300 - (int64_t)(test_random(&seed) % 600);
            if (mqd_partition_advance_start(
                    partition, keep > positions.log_start_offset ? keep : positions.log_start_offset) == 1) {
                generation++;
                /* every segment that ends at or below the new start, i.e. whose successor begins
                 * there or before */
                for (int64_t base = 0; base < keep; base++) {
                    snprintf(name, sizeof name, "%s/%020" PRId64 ".log", path, base);
                    int64_t next = base + 1;
                    char other[PATH_MAX];
                    if (access(name, F_OK))
                        continue;
                    do
                        snprintf(other, sizeof other, "%s/%020" PRId64 ".log", path, next);
                    while (access(other, F_OK) && ++next <= keep);
                    if (next <= keep)
                        unlink(name);
                }
            }
        }
        mqd_partition_positions(partition, &positions);
        positions.high_watermark = positions.log_end_offset;
        positions.high_watermark_segment = positions.log_end_segment;
        positions.high_watermark_position = positions.log_end_position;
        follow(reader, &fast, &positions, generation);
        if (turn % 3 == 0)
            follow(reader, &slow, &positions, generation);
    }
    while (fast.offset < positions.high_watermark && !test_failed)
        follow(reader, &fast, &positions, generation);
    CHECK_OR(fast.bytes == bytes && fast.sum == sum, );
    CHECK_OR(slow.bytes < bytes && positions.log_start_offset > 0, ); /* it was overtaken */
    mqd_reader_destroy(reader);
    CHECK_OR(mqd_partition_close(partition, 1) == 0, );
    snprintf(command, sizeof command, "rm -rf %s", path);
    CHECK_OR(system(command) == 0, );
}
