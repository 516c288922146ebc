/* For the tests of the reader: a hand-made partition, its known content, and counts of the
 * reader's system calls (the cost of a lookup is part of its contract). Include it once, first. */
#ifndef MQD_READER_TEST_H
#define MQD_READER_TEST_H
#include <dirent.h>
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/error.h"
#include "log/reader/reader.h"
#include "mqd_test.h"

static uint32_t pread_count, pread_bytes, open_count;
ssize_t pread(int fd, void *buffer, size_t size, off_t offset)
{
    pread_count++;
    pread_bytes += (uint32_t)size;
    return syscall(SYS_pread64, fd, buffer, size, offset);
}
int open(const char *path, int flags, ...)
{
    open_count++;
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags, 0644);
}

/* ---- a hand-made partition, and its known content ---- */

#define BATCH_COUNT_MAX 4096
#define SEGMENT_COUNT_MAX 64
struct model_batch {
    int64_t base_offset, last_offset, segment;
    uint32_t position, size_bytes;
};
struct model {
    char path[64];
    struct model_batch batches[BATCH_COUNT_MAX];
    uint32_t batch_count;
    int64_t segments[SEGMENT_COUNT_MAX];
    uint32_t segment_count;
    /* entries held back, like the writer's pending ones */
    uint32_t active_bytes, index_interval, since_entry, unindexed_count;
    FILE *log, *index;
    struct mqd_positions positions; /* with the high watermark at the log end */
};

static void put_word(uint8_t *at, uint64_t value, int bytes)
{
    for (int i = bytes - 1; i >= 0; i--, value >>= 8)
        at[i] = (uint8_t)value;
}

/* A batch of size_bytes with a valid header and CRC; its records are noise, which no test here
 * parses. */
static void make_batch(uint8_t *bytes, int64_t base_offset, int32_t last_delta, uint32_t size_bytes)
{
    for (uint32_t i = MQD_BATCH_HEADER_BYTES; i < size_bytes; i++)
        bytes[i] = (uint8_t)(base_offset * 31 + i);
    put_word(bytes, (uint64_t)base_offset, 8);
    put_word(bytes + 8, size_bytes - 12, 4);
    put_word(bytes + 12, 0, 4);
    bytes[16] = 2;
    put_word(bytes + 21, 0, 2);
    put_word(bytes + 23, (uint64_t)last_delta, 4);
    put_word(bytes + 27, 1700000000000ull, 8);
    put_word(bytes + 35, 1700000000000ull, 8);
    put_word(bytes + 43, UINT64_MAX, 8);
    put_word(bytes + 51, UINT64_MAX, 2);
    put_word(bytes + 53, UINT64_MAX, 4);
    put_word(bytes + 57, (uint64_t)last_delta + 1, 4);
    put_word(bytes + 17, mqd_crc32c(0, bytes + 21, size_bytes - 21), 4);
}

static void name_of(char out[PATH_MAX], const struct model *m, int64_t base_offset, const char *suffix)
{
    snprintf(out, PATH_MAX, "%s/%020" PRId64 "%s", m->path, base_offset, suffix);
}

static void model_close_files(struct model *m)
{
    if (m->log)
        fclose(m->log);
    if (m->index)
        fclose(m->index);
    m->log = m->index = NULL;
}

static void model_roll(struct model *m, int64_t base_offset)
{
    char path[PATH_MAX];
    model_close_files(m);
    m->segments[m->segment_count++] = base_offset;
    name_of(path, m, base_offset, ".log");
    m->log = fopen(path, "wb");
    if (m->index_interval) {
        name_of(path, m, base_offset, ".index");
        m->index = fopen(path, "wb");
    }
    m->active_bytes = m->since_entry = 0;
    m->positions.log_end_offset = m->positions.high_watermark = base_offset;
    m->positions.log_end_segment = m->positions.high_watermark_segment = base_offset;
    m->positions.log_end_position = m->positions.high_watermark_position = 0;
}

static void model_begin(struct model *m, int64_t base_offset, uint32_t index_interval)
{
    memset(m, 0, sizeof *m);
    strcpy(m->path, "/tmp/mqd-test-reader-XXXXXX");
    if (!mkdtemp(m->path))
        abort();
    m->index_interval = index_interval;
    m->positions.log_start_offset = m->positions.log_end_offset = m->positions.high_watermark = base_offset;
    model_roll(m, base_offset);
}

static void model_append(struct model *m, int64_t gap, int32_t last_delta, uint32_t size_bytes, bool indexed)
{
    int64_t base_offset = m->positions.log_end_offset + gap, segment = m->segments[m->segment_count - 1];
    uint8_t *bytes = malloc(size_bytes);
    make_batch(bytes, base_offset, last_delta, size_bytes);
    fwrite(bytes, 1, size_bytes, m->log);
    fflush(m->log);
    free(bytes);
    if (m->index && indexed && m->since_entry > m->index_interval) {
        uint32_t entry[2] = {htobe32((uint32_t)(base_offset - segment)), htobe32(m->active_bytes)};
        fwrite(entry, sizeof entry, 1, m->index);
        fflush(m->index);
        m->since_entry = 0;
    }
    m->batches[m->batch_count++] =
        (struct model_batch){base_offset, base_offset + last_delta, segment, m->active_bytes, size_bytes};
    m->since_entry += size_bytes;
    m->active_bytes += size_bytes;
    m->positions.log_end_offset = m->positions.high_watermark = base_offset + last_delta + 1;
    m->positions.log_end_position = m->positions.high_watermark_position = m->active_bytes;
}

static void model_end(struct model *m)
{
    model_close_files(m);
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", m->path);
    if (system(command))
        abort();
}

/* The positions with the high watermark before batch `number`. */
__attribute__((unused)) static struct mqd_positions positions_at(const struct model *m, uint32_t number)
{
    struct mqd_positions positions = m->positions;
    if (number < m->batch_count) {
        positions.high_watermark = m->batches[number].base_offset;
        positions.high_watermark_segment = m->batches[number].segment;
        positions.high_watermark_position = m->batches[number].position;
    }
    return positions;
}

/* First batch that ends above `offset`; batch_count when there is none. */
static uint32_t model_locate(const struct model *m, int64_t offset)
{
    uint32_t number = 0;
    while (number < m->batch_count && m->batches[number].last_offset < offset)
        number++;
    return number;
}

__attribute__((unused)) static void model_random(struct model *m, uint64_t *seed, uint32_t segment_count)
{
    static const uint32_t intervals[] = {0, 200, 4096, 20000};
    model_begin(m, (int64_t)(test_random(seed) % 1000), intervals[test_random(seed) % 4]);
    for (uint32_t s = 0; s < segment_count; s++) {
        uint32_t count = (uint32_t)(test_random(seed) % 120),
                 unindexed = s + 1 == segment_count ? (uint32_t)(test_random(seed) % 60) : 0;
        uint32_t size_max = 62 + (uint32_t)(test_random(seed) % 9000);
        for (uint32_t i = 0; i < count; i++) {
            uint32_t size_bytes = test_random(seed) % 40 == 0 ? 70000 + (uint32_t)(test_random(seed) % 9000)
                                                              : 62 + (uint32_t)(test_random(seed) % size_max);
            model_append(m, test_random(seed) % 10 == 0 ? (int64_t)(test_random(seed) % 5) : 0,
                         (int32_t)(test_random(seed) % 20), size_bytes, i + unindexed < count);
        }
        if (s + 1 < segment_count && count > 0)
            model_roll(m, m->positions.log_end_offset + (int64_t)(test_random(seed) % 3));
    }
}

/* ---- checks of one result ---- */

__attribute__((unused)) static uint32_t segment_limit(const struct model *m, const struct mqd_positions *positions,
                                                      int64_t segment)
{
    uint32_t limit = 0;
    for (uint32_t i = 0; i < m->batch_count; i++)
        if (m->batches[i].segment == segment && m->batches[i].base_offset < positions->high_watermark)
            limit = m->batches[i].position + m->batches[i].size_bytes;
    return limit;
}

/* Compares the range with the model; returns the number of the batch after it, UINT32_MAX on
 * failure. */
__attribute__((unused)) static uint32_t check_range(const struct model *m, const struct mqd_positions *positions,
                                                    int64_t offset, uint32_t size_max, bool min_one_batch,
                                                    const struct mqd_range *range)
{
    uint32_t first = model_locate(m, offset);
    /* the last two: in a gap */
    if (offset >= positions->high_watermark || first == m->batch_count ||
        m->batches[first].base_offset >= positions->high_watermark) {
        CHECK_OR(range->size_bytes == 0 && !range->segment, return UINT32_MAX);
        return first;
    }
    const struct model_batch *batch = &m->batches[first];
    if (batch->size_bytes > size_max && !min_one_batch) {
        CHECK_OR(range->size_bytes == 0 && !range->segment, return UINT32_MAX);
        return first;
    }
    CHECK_OR(range->segment && range->position == batch->position && range->size_bytes >= batch->size_bytes,
             return UINT32_MAX);
    CHECK_OR(range->size_bytes <= size_max || range->size_bytes == batch->size_bytes, return UINT32_MAX);
    uint32_t limit = segment_limit(m, positions, batch->segment);
    if ((uint64_t)range->position + size_max >= limit)
        CHECK_OR(range->position + range->size_bytes == limit, return UINT32_MAX);
    uint8_t header[8];
    CHECK_OR(pread(mqd_segment_ref_fd(range->segment), header, 8, range->position) == 8, return UINT32_MAX);
    uint64_t base_offset;
    memcpy(&base_offset, header, 8);
    CHECK_OR((int64_t)be64toh(base_offset) == batch->base_offset, return UINT32_MAX); /* the right file */
    uint32_t end = range->position + range->size_bytes, number = first;
    while (number < m->batch_count && m->batches[number].segment == batch->segment && m->batches[number].position < end)
        number++;
    /* whole batches */
    CHECK_OR(m->batches[number - 1].position + m->batches[number - 1].size_bytes == end, return UINT32_MAX);
    return number;
}

/* After a range the cursor is at the next batch: its offset is above the last one sent and at
 * most the next one's. */
__attribute__((unused)) static bool cursor_good(const struct model *m, const struct mqd_positions *positions,
                                                const struct mqd_range *range, const struct mqd_cursor *cursor)
{
    uint32_t last = 0;
    if (!range->size_bytes)
        return true;
    uint8_t header[8];
    uint64_t base_offset;
    CHECK_OR(pread(mqd_segment_ref_fd(range->segment), header, 8, range->position) == 8, return false);
    memcpy(&base_offset, header, 8);
    while (m->batches[last].base_offset != (int64_t)be64toh(base_offset))
        last++;
    while (last + 1 < m->batch_count && m->batches[last + 1].segment == m->batches[last].segment &&
           m->batches[last + 1].position < range->position + range->size_bytes)
        last++;
    int64_t next = last + 1 < m->batch_count && m->batches[last + 1].base_offset < positions->high_watermark
                       ? m->batches[last + 1].base_offset
                       : positions->high_watermark;
    CHECK_OR(cursor->valid && cursor->offset > m->batches[last].last_offset && cursor->offset <= next, return false);
    return true;
}

__attribute__((unused)) static struct model shared;

/* `segments` segments of 50 batches of 1000 bytes, 2 records each: offsets 0..100 * segments. */
__attribute__((unused)) static struct mqd_reader *plain_partition(uint32_t segments, uint32_t fd_count_max)
{
    model_begin(&shared, 0, 4096);
    for (uint32_t s = 0; s < segments; s++) {
        for (int i = 0; i < 50; i++)
            model_append(&shared, 0, 1, 1000, true);
        if (s + 1 < segments)
            model_roll(&shared, shared.positions.log_end_offset);
    }
    struct mqd_reader *reader = mqd_reader_create(fd_count_max);
    mqd_reader_set_path(reader, 3, shared.path);
    return reader;
}

__attribute__((unused)) static void plain_end(struct mqd_reader *reader)
{
    mqd_reader_destroy(reader);
    model_end(&shared);
}

#endif
