/* One file, long: every case builds its segments with the same small writer and counts preads and opens through the same shims. */
#define _GNU_SOURCE
#include <dirent.h>
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "mqd_error.h"
#include "mqd_reader.h"
#include "mqd_test.h"

/* Counts what the reader asks of the kernel; the cost of a look-up is part of its contract. */
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

/* ---- a partition made by hand, and what is known about it ---- */

#define BATCH_COUNT_MAX 4096
#define SEGMENT_COUNT_MAX 64
struct model_batch { int64_t base_offset, last_offset, segment; uint32_t position, size_bytes; };
struct model {
    char path[64];
    struct model_batch batches[BATCH_COUNT_MAX];
    uint32_t batch_count;
    int64_t segments[SEGMENT_COUNT_MAX];
    uint32_t segment_count;
    uint32_t active_bytes, index_interval, since_entry, unindexed_count; /* entries held back, like the writer's pending ones */
    FILE *log, *index;
    struct mqd_positions positions; /* with the high watermark at the log end */
};

static void put_word(uint8_t *at, uint64_t value, int bytes)
{
    for (int i = bytes - 1; i >= 0; i--, value >>= 8)
        at[i] = (uint8_t)value;
}

/* A batch of size_bytes with a valid header and CRC; its records are noise, which nobody here looks into. */
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
    m->batches[m->batch_count++] = (struct model_batch){base_offset, base_offset + last_delta, segment, m->active_bytes, size_bytes};
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
static struct mqd_positions positions_at(const struct model *m, uint32_t number)
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

static void model_random(struct model *m, uint64_t *seed, uint32_t segment_count)
{
    static const uint32_t intervals[] = {0, 200, 4096, 20000};
    model_begin(m, (int64_t)(test_random(seed) % 1000), intervals[test_random(seed) % 4]);
    for (uint32_t s = 0; s < segment_count; s++) {
        uint32_t count = (uint32_t)(test_random(seed) % 120), unindexed = s + 1 == segment_count ? (uint32_t)(test_random(seed) % 60) : 0;
        uint32_t size_max = 62 + (uint32_t)(test_random(seed) % 9000);
        for (uint32_t i = 0; i < count; i++) {
            uint32_t size_bytes = test_random(seed) % 40 == 0 ? 70000 + (uint32_t)(test_random(seed) % 9000) : 62 + (uint32_t)(test_random(seed) % size_max);
            model_append(m, test_random(seed) % 10 == 0 ? (int64_t)(test_random(seed) % 5) : 0, (int32_t)(test_random(seed) % 20), size_bytes, i + unindexed < count);
        }
        if (s + 1 < segment_count && count > 0)
            model_roll(m, m->positions.log_end_offset + (int64_t)(test_random(seed) % 3));
    }
}

/* ---- checks of one answer ---- */

static uint32_t segment_limit(const struct model *m, const struct mqd_positions *positions, int64_t segment)
{
    uint32_t limit = 0;
    for (uint32_t i = 0; i < m->batch_count; i++)
        if (m->batches[i].segment == segment && m->batches[i].base_offset < positions->high_watermark)
            limit = m->batches[i].position + m->batches[i].size_bytes;
    return limit;
}

/* Holds the range against the model; returns the number of the batch behind it, UINT32_MAX on failure. */
static uint32_t check_range(const struct model *m, const struct mqd_positions *positions, int64_t offset, uint32_t size_max, bool whole_first, const struct mqd_range *range)
{
    uint32_t first = model_locate(m, offset);
    if (offset >= positions->high_watermark || first == m->batch_count || m->batches[first].base_offset >= positions->high_watermark) { /* the last two: in a gap */
        CHECK_OR(range->size_bytes == 0 && !range->segment, return UINT32_MAX);
        return first;
    }
    const struct model_batch *batch = &m->batches[first];
    if (batch->size_bytes > size_max && !whole_first) {
        CHECK_OR(range->size_bytes == 0 && !range->segment, return UINT32_MAX);
        return first;
    }
    CHECK_OR(range->segment && range->position == batch->position && range->size_bytes >= batch->size_bytes, return UINT32_MAX);
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
    CHECK_OR(m->batches[number - 1].position + m->batches[number - 1].size_bytes == end, return UINT32_MAX); /* whole batches */
    return number;
}

/* Behind a range the cursor stands at the next batch: its offset lies above the last one sent and not above the next one's. */
static bool cursor_good(const struct model *m, const struct mqd_positions *positions, const struct mqd_range *range, const struct mqd_cursor *cursor)
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
    while (last + 1 < m->batch_count && m->batches[last + 1].segment == m->batches[last].segment && m->batches[last + 1].position < range->position + range->size_bytes)
        last++;
    int64_t next = last + 1 < m->batch_count && m->batches[last + 1].base_offset < positions->high_watermark ? m->batches[last + 1].base_offset : positions->high_watermark;
    CHECK_OR(cursor->valid && cursor->offset > m->batches[last].last_offset && cursor->offset <= next, return false);
    return true;
}

TEST(random_offsets_agree_with_the_model)
{
    struct model *m = malloc(sizeof *m);
    for (uint64_t round = 0, seed = 1; round < (test_long() ? 300 : 25) && !test_failed; round++) {
        uint64_t begin = seed;
        model_random(m, &seed, 1 + (uint32_t)(round % 6));
        struct mqd_reader *reader = mqd_reader_create(5);
        struct mqd_cursor cursor = {0};
        mqd_reader_set_path(reader, 7, m->path);
        for (int i = 0; i < 400 && m->batch_count && !test_failed; i++) {
            struct mqd_positions positions = positions_at(m, (uint32_t)(test_random(&seed) % (m->batch_count + 1)));
            int64_t offset = positions.log_start_offset + (int64_t)(test_random(&seed) % (uint64_t)(positions.log_end_offset - positions.log_start_offset + 1));
            uint32_t size_max = (uint32_t)(test_random(&seed) % (i % 3 ? 100000 : 3000000));
            bool whole_first = test_random(&seed) % 2;
            struct mqd_range range;
            if (mqd_reader_find(reader, 7, &positions, 1, offset, size_max, whole_first, &cursor, &range) != 0)
                TEST_FAIL("seed %" PRIu64 ": %s", begin, mqd_error_message());
            else if (check_range(m, &positions, offset, size_max, whole_first, &range) == UINT32_MAX || !cursor_good(m, &positions, &range, &cursor))
                TEST_FAIL("seed %" PRIu64 " look-up %d", begin, i);
            mqd_range_release(reader, &range);
        }
        mqd_reader_destroy(reader);
        model_end(m);
    }
    free(m);
}

TEST(a_sequential_reader_gets_every_batch_once)
{
    struct model *m = malloc(sizeof *m);
    for (uint64_t round = 0, seed = 77; round < (test_long() ? 200 : 20) && !test_failed; round++) {
        model_random(m, &seed, 1 + (uint32_t)(round % 6));
        struct mqd_reader *reader = mqd_reader_create(5);
        struct mqd_cursor cursor = {0};
        mqd_reader_set_path(reader, 7, m->path);
        uint32_t number = 0, size_max = 62 + (uint32_t)(test_random(&seed) % 200000);
        int64_t offset = m->positions.log_start_offset;
        for (uint32_t steps = 0; number < m->batch_count && steps <= m->batch_count && !test_failed; steps++) {
            struct mqd_range range;
            CHECK_OR(mqd_reader_find(reader, 7, &m->positions, 1, offset, size_max, true, &cursor, &range) == 0, break);
            uint32_t next = check_range(m, &m->positions, offset, size_max, true, &range);
            CHECK_OR(next != UINT32_MAX && next > number, break);
            number = next;
            offset = m->batches[number - 1].last_offset + 1;
            mqd_range_release(reader, &range);
        }
        CHECK_OR(number == m->batch_count, );
        mqd_reader_destroy(reader);
        model_end(m);
    }
    free(m);
}

static struct model shared;

/* `segments` segments of 50 batches of 1000 bytes, 2 records each: offsets 0..100 * segments. */
static struct mqd_reader *plain_partition(uint32_t segments, uint32_t fd_count_max)
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

static void plain_end(struct mqd_reader *reader)
{
    mqd_reader_destroy(reader);
    model_end(&shared);
}

TEST(a_sequential_look_up_costs_one_pread_at_most)
{
    struct mqd_reader *reader = plain_partition(2, 100);
    struct mqd_cursor cursor = {0};
    struct mqd_range range;
    int64_t offset = 0;
    bool opened = false;
    while (offset < 100) { /* the limit is far: the index tells where to stop */
        pread_count = open_count = pread_bytes = 0;
        CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 1, offset, 9000, false, &cursor, &range), 0);
        uint32_t asked = pread_count;
        CHECK(!opened || (asked <= 1 && open_count == 0));
        opened = true;
        uint32_t next = check_range(&shared, &shared.positions, offset, 9000, false, &range);
        CHECK(next != UINT32_MAX);
        offset = shared.batches[next - 1].last_offset + 1;
        mqd_range_release(reader, &range);
    }
    CHECK_EQUAL(cursor.segment, 100);
    CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 1, 100, 5000, false, &cursor, &range), 0); /* opens the second segment */
    CHECK_EQUAL(range.size_bytes, 5000);
    mqd_range_release(reader, &range);
    pread_count = open_count = 0;
    CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 1, 110, 1000000, false, &cursor, &range), 0); /* the high watermark is within the limit */
    CHECK_EQUAL(range.size_bytes, 45000);
    CHECK_EQUAL(pread_count + open_count, 0);
    mqd_range_release(reader, &range);
    struct mqd_cursor other = {0};
    CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 1, 100, 50000, false, &other, &range), 0); /* ... also when it is the limit */
    CHECK_EQUAL(range.size_bytes, 50000);
    mqd_range_release(reader, &range);
    model_append(&shared, 0, 9, 3000, false);
    pread_count = open_count = 0;
    CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 1, 200, 1000000, false, &cursor, &range), 0); /* it grew: still nothing to look up */
    CHECK_EQUAL(range.position, 50000);
    CHECK_EQUAL(range.size_bytes, 3000);
    CHECK_EQUAL(pread_count + open_count, 0);
    mqd_range_release(reader, &range);
    plain_end(reader);
}

TEST(two_readers_do_not_see_each_other_s_bytes)
{
    struct mqd_reader *reader = plain_partition(2, 100);
    struct mqd_cursor first = {0}, second = {0};
    struct mqd_range range;
    CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 1, 150, 1000, false, &second, &range), 0);
    mqd_range_release(reader, &range);
    CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 1, 50, 1000, false, &first, &range), 0); /* walks over the same positions of the other file */
    mqd_range_release(reader, &range);
    for (int64_t offset = 152; offset < 160; offset += 2) {
        CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 1, offset, 1000, false, &second, &range), 0);
        CHECK(range.size_bytes == 1000 && second.offset == offset + 2);
        mqd_range_release(reader, &range);
        CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 1, offset - 100, 1000, false, &first, &range), 0);
        CHECK(range.size_bytes == 1000 && first.offset == offset - 98);
        mqd_range_release(reader, &range);
    }
    plain_end(reader);
}

TEST(the_ends_of_the_log)
{
    struct mqd_reader *reader = plain_partition(2, 100);
    struct mqd_cursor cursor = {0};
    struct mqd_range range;
    struct mqd_positions positions = positions_at(&shared, 75); /* high watermark 150 of 200 */
    positions.log_start_offset = 11;
    CHECK_EQUAL(mqd_reader_find(reader, 4, &positions, 1, 50, 1000, false, &cursor, &range), 3);
    CHECK_EQUAL(mqd_reader_find(reader, UINT32_MAX, &positions, 1, 50, 1000, false, &cursor, &range), 3);
    CHECK_EQUAL(mqd_reader_find(reader, 3, &positions, 1, 10, 1000, false, &cursor, &range), 1);
    CHECK_CONTAINS(mqd_error_message(), "offset 10 is outside of the log's 11..200");
    CHECK_EQUAL(mqd_reader_find(reader, 3, &positions, 1, 201, 1000, false, &cursor, &range), 1);
    CHECK_EQUAL(mqd_reader_find(reader, 3, &positions, 1, -1, 1000, false, &cursor, &range), 1);
    int64_t empty[] = {150, 151, 199, 200};
    for (int i = 0; i < 4; i++) {
        CHECK_EQUAL(mqd_reader_find(reader, 3, &positions, 1, empty[i], 1000, true, &cursor, &range), 0);
        CHECK(range.size_bytes == 0 && !range.segment);
    }
    CHECK_EQUAL(mqd_reader_find(reader, 3, &positions, 1, 11, 1000, true, &cursor, &range), 0); /* inside the batch 10..11 */
    CHECK_EQUAL(range.position, 5000);
    mqd_range_release(reader, &range);
    CHECK_EQUAL(mqd_reader_find(reader, 3, &positions, 1, 149, 100000, true, &cursor, &range), 0);
    CHECK_EQUAL(range.position, 24000);
    CHECK_EQUAL(range.size_bytes, 1000);
    CHECK_EQUAL(cursor.offset, 150);
    mqd_range_release(reader, &range);
    CHECK_EQUAL(mqd_reader_set_path(reader, MQD_PARTITION_SLOT_COUNT, "/tmp"), -1);
    plain_end(reader);
}

/* Who reads the files himself goes on to the next segment where readable_bytes end, so it must not be told of one before all of this one is readable: the writer rolls
 * while batches that are not flushed yet lie behind the high watermark. */
TEST(the_next_segment_is_told_when_all_of_this_one_is_readable)
{
    struct mqd_reader *reader = plain_partition(4, 100);
    for (uint32_t number = 0; number <= shared.batch_count; number++) {
        struct mqd_positions positions = positions_at(&shared, number);
        for (int64_t offset = 0; offset <= positions.high_watermark; offset += 7) {
            struct mqd_segment_place place;
            uint32_t end = 0;
            CHECK_EQUAL(mqd_reader_place(reader, 3, &positions, 1, offset, &place), 0);
            for (uint32_t i = 0; i < shared.batch_count; i++)
                if (shared.batches[i].segment == place.base_offset)
                    end = shared.batches[i].position + shared.batches[i].size_bytes;
            CHECK(place.position <= place.readable_bytes && place.readable_bytes <= end);
            if (place.next_base_offset != INT64_MAX) {
                CHECK_EQUAL(place.readable_bytes, end);
                CHECK(place.next_base_offset <= positions.high_watermark);
            } else {
                CHECK(place.base_offset >= positions.high_watermark_segment);
            }
            mqd_segment_place_release(reader, &place);
        }
    }
    plain_end(reader);
}

TEST(a_first_batch_above_the_limit_comes_whole_or_not_at_all)
{
    struct model *m = &shared;
    model_begin(m, 0, 4096);
    model_append(m, 0, 0, 500, true);
    model_append(m, 0, 0, 900000, true);
    model_append(m, 0, 0, 500, true);
    model_append(m, 0, 0, 500, true);
    struct mqd_reader *reader = mqd_reader_create(10);
    struct mqd_cursor cursor = {0};
    struct mqd_range range;
    mqd_reader_set_path(reader, 3, m->path);
    CHECK_EQUAL(mqd_reader_find(reader, 3, &m->positions, 1, 1, 1000, false, &cursor, &range), 0);
    CHECK(range.size_bytes == 0 && !range.segment);
    CHECK(cursor.valid && cursor.offset == 1 && cursor.position == 500); /* the next attempt is free */
    CHECK_EQUAL(mqd_reader_find(reader, 3, &m->positions, 1, 1, 0, true, &cursor, &range), 0);
    CHECK_EQUAL(range.position, 500);
    CHECK_EQUAL(range.size_bytes, 900000);
    CHECK(cursor.offset == 2 && cursor.position == 900500);
    mqd_range_release(reader, &range);
    CHECK_EQUAL(mqd_reader_find(reader, 3, &m->positions, 1, 2, 999, true, &cursor, &range), 0);
    CHECK_EQUAL(range.size_bytes, 500);
    mqd_range_release(reader, &range);
    mqd_reader_destroy(reader);
    model_end(m);
}

/* ---- descriptors ---- */

static uint32_t fds_on(const char *path)
{
    uint32_t count = 0;
    DIR *directory = opendir("/proc/self/fd");
    for (struct dirent *entry; directory && (entry = readdir(directory));) {
        char link[PATH_MAX], name[300];
        snprintf(name, sizeof name, "/proc/self/fd/%s", entry->d_name);
        ssize_t n = readlink(name, link, sizeof link - 1);
        if (n > 0) {
            link[n] = 0;
            count += strncmp(link, path, strlen(path)) == 0;
        }
    }
    closedir(directory);
    return count;
}

TEST(descriptors_stay_within_the_bound_but_for_those_in_use)
{
    struct mqd_reader *reader = plain_partition(20, 6);
    struct mqd_range held[20], range;
    model_close_files(&shared);
    for (int i = 0; i < 20; i++) {
        struct mqd_cursor cursor = {0};
        CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 1, i * 100 + 50, 9000, true, &cursor, &range), 0);
        mqd_range_release(reader, &range);
        CHECK(mqd_reader_fd_count(reader) <= 6);
        CHECK_EQUAL(fds_on(shared.path), mqd_reader_fd_count(reader));
    }
    for (int i = 0; i < 20; i++) {
        struct mqd_cursor cursor = {0};
        CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 1, i * 100 + 50, 9000, true, &cursor, &held[i]), 0);
    }
    CHECK_EQUAL(mqd_reader_segment_count(reader), 20);
    CHECK_EQUAL(fds_on(shared.path), mqd_reader_fd_count(reader));
    struct mqd_cursor again = {0};
    open_count = 0;
    CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 1, 50, 100000, true, &again, &range), 0); /* in use, so not opened a second time */
    CHECK_EQUAL(open_count, 0);
    mqd_range_release(reader, &range);
    for (int i = 0; i < 20; i++) { /* all still readable */
        CHECK(check_range(&shared, &shared.positions, i * 100 + 50, 9000, true, &held[i]) != UINT32_MAX);
        mqd_range_release(reader, &held[i]);
    }
    CHECK(mqd_reader_fd_count(reader) <= 6);
    CHECK_EQUAL(fds_on(shared.path), mqd_reader_fd_count(reader));
    plain_end(reader);
}

static uint64_t generation_now;
static uint64_t generation_of(void *context, uint32_t slot)
{
    return context == &shared && slot == 3 ? generation_now : 0;
}

TEST(deleted_segments_are_let_go)
{
    struct mqd_reader *reader = plain_partition(4, 100);
    struct mqd_cursor cursor = {0};
    struct mqd_range held, range;
    model_close_files(&shared);
    CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 1, 50, 9000, true, &cursor, &held), 0);
    for (int i = 1; i < 4; i++) {
        CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 1, i * 100 + 50, 9000, true, &cursor, &range), 0);
        mqd_range_release(reader, &range);
    }
    CHECK_EQUAL(mqd_reader_segment_count(reader), 4);
    char path[PATH_MAX];
    for (int i = 0; i < 2; i++) {
        name_of(path, &shared, i * 100, ".log");
        CHECK_EQUAL(unlink(path), 0);
        name_of(path, &shared, i * 100, ".index");
        CHECK_EQUAL(unlink(path), 0);
    }
    generation_now = 1;
    mqd_reader_sweep(reader, generation_of, &shared); /* nothing moved: nothing is done */
    CHECK_EQUAL(mqd_reader_segment_count(reader), 4);
    generation_now = 2;
    mqd_reader_sweep(reader, generation_of, &shared);
    CHECK_EQUAL(mqd_reader_segment_count(reader), 3); /* the held one and the two that are there */
    CHECK(check_range(&shared, &shared.positions, 50, 9000, true, &held) != UINT32_MAX);
    mqd_range_release(reader, &held);
    CHECK_EQUAL(mqd_reader_segment_count(reader), 2);
    CHECK_EQUAL(fds_on(shared.path), mqd_reader_fd_count(reader));
    mqd_range_release(reader, &held); /* a second time: nothing happens */
    struct mqd_positions positions = shared.positions;
    positions.log_start_offset = 200;
    CHECK_EQUAL(mqd_reader_find(reader, 3, &positions, 2, 250, 9000, true, &cursor, &range), 0);
    mqd_range_release(reader, &range);
    mqd_reader_set_path(reader, 3, NULL);
    CHECK_EQUAL(fds_on(shared.path), 0);
    plain_end(reader);
}

TEST(a_missing_file_is_stale_once_and_then_an_error)
{
    struct mqd_reader *reader = plain_partition(3, 4);
    struct mqd_cursor cursor = {0};
    struct mqd_range range;
    CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 1, 250, 9000, true, &cursor, &range), 0);
    mqd_range_release(reader, &range);
    char path[PATH_MAX];
    name_of(path, &shared, 100, ".log");
    CHECK_EQUAL(unlink(path), 0);
    CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 1, 150, 9000, true, &cursor, &range), -1);
    CHECK_EQUAL(mqd_error_code(), MQD_E_STALE);
    /* listed anew, the segment is not there: the next record is the first of the following one, as after compaction */
    CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 1, 150, 9000, true, &cursor, &range), 0);
    CHECK_EQUAL(range.position, 0);
    mqd_range_release(reader, &range);
    struct mqd_positions positions = shared.positions;
    positions.high_watermark_segment = 555; /* a segment that no listing shows */
    positions.high_watermark = 600;
    CHECK_EQUAL(mqd_reader_find(reader, 3, &positions, 2, 250, 9000, true, &cursor, &range), -1);
    CHECK_EQUAL(mqd_reader_find(reader, 3, &positions, 2, 250, 9000, true, &cursor, &range), 56);
    CHECK_CONTAINS(mqd_error_message(), "00000000000000000555");
    CHECK_EQUAL(mqd_reader_find(reader, 3, &positions, 3, 250, 9000, true, &cursor, &range), -1);
    mqd_reader_set_path(reader, 3, "/tmp/mqd-test-reader-nothing-here");
    CHECK_EQUAL(mqd_reader_find(reader, 3, &positions, 3, 250, 9000, true, &cursor, &range), -1);
    CHECK_EQUAL(mqd_reader_find(reader, 3, &positions, 3, 250, 9000, true, &cursor, &range), 56);
    plain_end(reader);
}

TEST(a_roll_is_seen_without_a_new_generation)
{
    struct mqd_reader *reader = plain_partition(1, 10);
    struct mqd_cursor cursor = {0};
    struct mqd_range range;
    CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 1, 90, 900000, true, &cursor, &range), 0);
    mqd_range_release(reader, &range);
    CHECK(cursor.offset == 100 && cursor.segment == 0 && cursor.position == 50000);
    model_roll(&shared, 100);
    model_append(&shared, 0, 0, 700, true);
    CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 1, 100, 900000, true, &cursor, &range), 0);
    CHECK(range.position == 0 && range.size_bytes == 700 && cursor.segment == 100);
    mqd_range_release(reader, &range);
    plain_end(reader);
}

TEST(a_file_replaced_under_its_name_is_opened_anew)
{
    struct mqd_reader *reader = plain_partition(2, 10);
    struct mqd_cursor cursor = {0}, old;
    struct mqd_range range;
    CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 1, 40, 2000, true, &cursor, &range), 0);
    mqd_range_release(reader, &range);
    old = cursor;
    char path[PATH_MAX], fresh[PATH_MAX];
    name_of(path, &shared, 0, ".index");
    unlink(path);
    name_of(path, &shared, 0, ".log");
    name_of(fresh, &shared, 0, ".cleaned");
    static uint8_t batch[40000]; /* so long that the old position lies inside it */
    make_batch(batch, 44, 55, sizeof batch); /* all that compaction left of 0..99 */
    FILE *file = fopen(fresh, "wb");
    fwrite(batch, 1, sizeof batch, file);
    fclose(file);
    CHECK_EQUAL(rename(fresh, path), 0);
    CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 2, old.offset, 100000, true, &cursor, &range), 0); /* the cursor is of the old generation */
    CHECK(range.position == 0 && range.size_bytes == sizeof batch);
    mqd_range_release(reader, &range);
    CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 2, 0, 100000, true, &cursor, &range), 0);
    CHECK(range.position == 0 && range.size_bytes == sizeof batch);
    mqd_range_release(reader, &range);
    plain_end(reader);
}

/* ---- damage ---- */

static void damage(int64_t segment, const char *suffix, long at, const void *bytes, size_t size)
{
    char path[PATH_MAX];
    name_of(path, &shared, segment, suffix);
    FILE *file = fopen(path, "r+b");
    fseek(file, at, SEEK_SET);
    fwrite(bytes, 1, size, file);
    fclose(file);
}

TEST(a_damaged_header_is_told_with_its_place)
{
    struct mqd_reader *reader = plain_partition(2, 10);
    struct mqd_cursor cursor = {0};
    struct mqd_range range;
    damage(0, ".log", 21000 + 16, "\x07", 1); /* magic of the batch 42..43 */
    CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 1, 42, 2000, true, &cursor, &range), 2);
    CHECK_CONTAINS(mqd_error_message(), "00000000000000000000.log: at position 21000: ");
    CHECK(!range.segment);
    CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 1, 90, 2000, true, &cursor, &range), 0); /* others are not affected */
    CHECK_EQUAL(range.position, 45000);
    mqd_range_release(reader, &range);
    damage(0, ".log", 30000 + 8, "\x7f\xff\xff\xff", 4); /* a length beyond the segment */
    CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 1, 60, 2000, true, &cursor, &range), 2);
    damage(100, ".log", 3000, "\0\0\0\0\0\0\0\1", 8); /* an offset that goes back */
    CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 1, 106, 2000, true, &cursor, &range), 2);
    CHECK_CONTAINS(mqd_error_message(), "at position 3000: its base offset is below");
    plain_end(reader);
}

TEST(an_index_that_lies_costs_time_only)
{
    struct mqd_reader *reader = plain_partition(2, 10);
    struct mqd_range range;
    damage(0, ".index", 8, "\0\0\0\x14\0\0\x30\x39", 8); /* second entry: offset 20 at 12345, which is inside a batch */
    for (int64_t offset = 0; offset < 200; offset++) {
        struct mqd_cursor cursor = {0};
        CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 1, offset, 1500, true, &cursor, &range), 0);
        CHECK_EQUAL(range.position, offset % 100 / 2 * 1000);
        mqd_range_release(reader, &range);
    }
    char path[PATH_MAX];
    name_of(path, &shared, 0, ".index");
    CHECK_EQUAL(truncate(path, 5), 0); /* not one whole entry */
    for (int64_t offset = 0; offset < 100; offset += 7) {
        struct mqd_cursor cursor = {0};
        CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 1, offset, 2500, true, &cursor, &range), 0);
        CHECK_EQUAL(range.position, offset / 2 * 1000);
        mqd_range_release(reader, &range);
    }
    plain_end(reader);
}

TEST(a_file_cut_from_outside_is_a_storage_error)
{
    struct mqd_reader *reader = plain_partition(1, 10);
    struct mqd_cursor cursor = {0};
    struct mqd_range range;
    char path[PATH_MAX];
    name_of(path, &shared, 0, ".log");
    CHECK_EQUAL(truncate(path, 30000), 0);
    CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 1, 70, 2000, true, &cursor, &range), 56);
    CHECK_CONTAINS(mqd_error_message(), "00000000000000000000.log ends before position");
    plain_end(reader);
}

/* A segment whose index has more than one 4 KiB page: the binary search over pages, from any hint. */
TEST(an_index_of_many_pages)
{
    struct model *m = &shared;
    model_begin(m, 5000, 62);
    for (int i = 0; i < 4000; i++)
        model_append(m, 0, 2, 70, i < 3900);
    struct mqd_reader *reader = mqd_reader_create(10);
    mqd_reader_set_path(reader, 3, m->path);
    struct mqd_cursor cursor = {0};
    uint64_t seed = 5;
    for (int i = 0; i < 1000; i++) {
        struct mqd_range range;
        int64_t offset = 5000 + (int64_t)(test_random(&seed) % 12000);
        uint32_t size_max = (uint32_t)(test_random(&seed) % 250000);
        pread_bytes = 0;
        CHECK_EQUAL(mqd_reader_find(reader, 3, &m->positions, 1, offset, size_max, true, &cursor, &range), 0);
        CHECK(pread_bytes < 24000 || offset > 16000); /* not a walk over the segment's 280,000 bytes; the last batches have no index */
        CHECK(check_range(m, &m->positions, offset, size_max, true, &range) != UINT32_MAX);
        mqd_range_release(reader, &range);
        if (i % 2 && cursor.offset < m->positions.high_watermark) { /* on from there, with the hint */
            offset = cursor.offset;
            CHECK_EQUAL(mqd_reader_find(reader, 3, &m->positions, 1, offset, size_max, true, &cursor, &range), 0);
            CHECK(check_range(m, &m->positions, offset, size_max, true, &range) != UINT32_MAX);
            mqd_range_release(reader, &range);
        }
    }
    mqd_reader_destroy(reader);
    model_end(m);
}

/* ---- available bytes, page cache ---- */

TEST(available_bytes_are_exact)
{
    struct model *m = malloc(sizeof *m);
    for (uint64_t round = 0, seed = 9; round < 15 && !test_failed; round++) {
        model_random(m, &seed, 1 + (uint32_t)(round % 5));
        struct mqd_reader *reader = mqd_reader_create(5);
        struct mqd_cursor cursor = {0};
        struct mqd_range range;
        mqd_reader_set_path(reader, 7, m->path);
        if (m->batch_count) {
            CHECK_OR(mqd_reader_available_bytes(reader, 7, &m->positions, m->positions.log_start_offset, &cursor) == UINT64_MAX, ); /* nothing is listed yet */
            CHECK_OR(mqd_reader_find(reader, 7, &m->positions, 1, m->positions.log_start_offset, 1, true, &cursor, &range) == 0, );
            mqd_range_release(reader, &range);
        }
        for (int i = 0; i < 100 && m->batch_count && !test_failed; i++) {
            struct mqd_positions positions = positions_at(m, (uint32_t)(test_random(&seed) % (m->batch_count + 1)));
            int64_t offset = positions.log_start_offset + (int64_t)(test_random(&seed) % (uint64_t)(positions.log_end_offset - positions.log_start_offset + 1));
            uint64_t expected = 0;
            for (uint32_t b = model_locate(m, offset); b < m->batch_count && m->batches[b].base_offset < positions.high_watermark && offset < positions.high_watermark; b++)
                expected += m->batches[b].size_bytes;
            CHECK_OR(mqd_reader_available_bytes(reader, 7, &positions, offset, &cursor) == expected, );
            pread_count = 0;
            CHECK_OR(mqd_reader_available_bytes(reader, 7, &positions, offset, &cursor) == expected && (pread_count == 0 || expected == 0), ); /* the cursor came along */
            CHECK_OR(mqd_reader_find(reader, 7, &positions, 1, offset, 1 << 30, false, &cursor, &range) == 0 && range.size_bytes <= expected, );
            mqd_range_release(reader, &range);
        }
        mqd_reader_destroy(reader);
        model_end(m);
    }
    free(m);
}

TEST(what_was_just_written_is_in_the_page_cache)
{
    struct mqd_reader *reader = plain_partition(1, 10);
    struct mqd_cursor cursor = {0};
    struct mqd_range range;
    CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 1, 30, 20000, true, &cursor, &range), 0);
    CHECK_EQUAL(mqd_range_cached(&range), 1);
    mqd_range_release(reader, &range);
    CHECK_EQUAL(mqd_range_cached(&range), 1); /* an empty range needs nothing */
    plain_end(reader);
}
