/* What recovery makes of a segment whose file held an older segment's batches: a power cut leaves any
 * set of sectors of the new content, and the old one in the others. No segment has such a file today;
 * docs/decisions/storage/2026-11-28-recycled-segments.md says why.
 */
#define LOG_TEST_IN_MEMORY
#include "mqd_log_test.h"

#define SECTOR_BYTES 512
#define CRC_END 21 /* offset, length, epoch, magic and CRC: what the CRC does not cover, and the CRC itself */
#define OLD_COUNT 60
#define NEW_COUNT 45
#define NEW_MARK 1000
#define ROUNDS 400

static uint64_t random_state;

static uint64_t next_random(void)
{
    random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
    return random_state >> 33;
}

static int64_t read_file(const char *path, uint8_t **bytes)
{
    struct stat status;
    int fd = open(path, O_RDONLY);
    CHECK_OR(fd >= 0 && fstat(fd, &status) == 0, return -1);
    *bytes = malloc((size_t)status.st_size);
    CHECK_OR(read(fd, *bytes, (size_t)status.st_size) == status.st_size, (void)0);
    close(fd);
    return status.st_size;
}

/* A log of two segments: the old one is deleted later, and the new one gets its file. All batches have
 * one size, so that old and new ones begin at the same positions. */
static void make_segments(const struct mqd_log_options *options, int32_t body_bytes)
{
    log_fresh();
    struct mqd_partition *partition = log_open(options, NULL);
    for (int i = 0; i < OLD_COUNT + NEW_COUNT; i++) {
        if (i == OLD_COUNT)
            CHECK_EQUAL(mqd_partition_roll(partition, NOW), 0);
        CHECK_EQUAL(log_append(partition, (struct log_batch){.mark = (uint64_t)(i < OLD_COUNT ? i : NEW_MARK + i),
                                                             .body_bytes = body_bytes}),
                    0);
    }
    CHECK_EQUAL(mqd_partition_close(partition, 0), 0);
}

/* Makes every old batch invalid whose CRC may be in another sector than its offset. */
static void spoil_split(uint8_t *old, int64_t old_bytes)
{
    struct mqd_batch batch;
    for (int64_t at = 0; at < old_bytes; at += batch.size_bytes) {
        CHECK_OR(mqd_batch_decode(old + at, MQD_BATCH_HEADER_BYTES, &batch) == 0, return);
        if (at / SECTOR_BYTES != (at + CRC_END - 1) / SECTOR_BYTES)
            old[at + CRC_END - 1] ^= 1;
    }
}

/* Seven of eight sectors get the new content. Returns the bytes before the
 * first old sector. */
static int64_t cut_power(uint8_t *disk, const uint8_t *new, int64_t new_bytes)
{
    int64_t whole_bytes = new_bytes;
    for (int64_t at = 0; at < new_bytes; at += SECTOR_BYTES) {
        if (next_random() % 8)
            memcpy(disk + at, new + at, (size_t)(new_bytes - at < SECTOR_BYTES ? new_bytes - at : SECTOR_BYTES));
        else if (at < whole_bytes)
            whole_bytes = at;
    }
    return whole_bytes;
}

static void put_in_place(const uint8_t *disk, int64_t disk_bytes)
{
    const char *const suffixes[] = {".log", ".index", ".timeindex"};
    for (int i = 0; i < 3; i++) {
        unlink(log_file(0, suffixes[i]));
        unlink(log_file(OLD_COUNT, suffixes[i]));
    }
    log_write_file(log_file(OLD_COUNT, ".log"), disk, (size_t)disk_bytes);
}

/* Whether the recovered log is the new batches before the first old sector. */
static bool recovers(const struct mqd_log_options *options, const uint8_t *disk, int64_t disk_bytes, int64_t end_offset)
{
    uint64_t marks[OLD_COUNT + NEW_COUNT] = {0};
    put_in_place(disk, disk_bytes);
    struct mqd_recovery recovery = log_untrusted();
    recovery.log_start_offset = OLD_COUNT;
    struct mqd_partition *partition = log_open(options, &recovery);
    bool same = recovery.log_end_offset == end_offset && log_verify(partition, marks) == end_offset;
    for (int64_t offset = OLD_COUNT; same && offset < end_offset; offset++)
        same = marks[offset] == NEW_MARK + (uint64_t)offset;
    mqd_partition_close(partition, 0);
    return same;
}

/* Returns in how many of the rounds recovery was wrong. */
static int wrong_recoveries(int32_t body_bytes, bool spoil)
{
    struct mqd_log_options options = log_options();
    uint8_t *old = NULL, *new = NULL;
    int wrong = 0;
    make_segments(&options, body_bytes);
    int64_t old_bytes = read_file(log_file(0, ".log"), &old), new_bytes = read_file(log_file(OLD_COUNT, ".log"), &new);
    uint8_t *disk = malloc((size_t)old_bytes);
    if (spoil)
        spoil_split(old, old_bytes);
    for (int i = 0; i < ROUNDS; i++) {
        random_state = (uint64_t)i;
        memcpy(disk, old, (size_t)old_bytes);
        int64_t whole_bytes = cut_power(disk, new, new_bytes);
        wrong += !recovers(&options, disk, old_bytes, OLD_COUNT + whole_bytes / (MQD_BATCH_HEADER_BYTES + body_bytes));
    }
    free(disk);
    free(old);
    free(new);
    return wrong;
}

/* Batches of 128 bytes: an old sector begins with a whole old batch. Its offset is lower than the next
 * expected one, so the log ends there. */
TEST(old_batches_are_not_read)
{
    CHECK_EQUAL(wrong_recoveries(128 - MQD_BATCH_HEADER_BYTES, false), 0);
}

/* Where a header crosses from a new sector into an old one, it has the new offset and the old CRC: the
 * rule by offset is not sufficient. */
TEST(a_header_of_two_segments_is_accepted)
{
    CHECK(wrong_recoveries(64, false) > 0);
    CHECK_EQUAL(wrong_recoveries(64, true), 0);
}
