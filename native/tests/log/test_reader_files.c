/* A reader's handling of its files: descriptors, files that are deleted, rolled, replaced or
 * damaged; available bytes. */
#include "mqd_reader_test.h"

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

TEST(descriptors_stay_within_the_bound_except_for_those_in_use)
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
    /* in use, so not opened a second time */
    CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 1, 50, 100000, true, &again, &range), 0);
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

TEST(files_of_deleted_segments_are_closed)
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
    mqd_reader_sweep(reader, generation_of, &shared); /* nothing moved, so nothing is done */
    CHECK_EQUAL(mqd_reader_segment_count(reader), 4);
    generation_now = 2;
    mqd_reader_sweep(reader, generation_of, &shared);
    CHECK_EQUAL(mqd_reader_segment_count(reader), 3); /* the held one and the two existing ones */
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
    /* listed again, the segment is missing: the next record is the first of the following one,
     * as after compaction */
    CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 1, 150, 9000, true, &cursor, &range), 0);
    CHECK_EQUAL(range.position, 0);
    mqd_range_release(reader, &range);
    struct mqd_positions positions = shared.positions;
    positions.high_watermark_segment = 555; /* a segment that no listing contains */
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

TEST(a_replaced_file_is_opened_again)
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
    static uint8_t batch[40000];             /* so long that the old position is inside it */
    make_batch(batch, 44, 55, sizeof batch); /* all that compaction left of 0..99 */
    FILE *file = fopen(fresh, "wb");
    fwrite(batch, 1, sizeof batch, file);
    fclose(file);
    CHECK_EQUAL(rename(fresh, path), 0);
    /* the cursor is of the old generation */
    CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 2, old.offset, 100000, true, &cursor, &range), 0);
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

TEST(a_damaged_header_is_reported_with_its_position)
{
    struct mqd_reader *reader = plain_partition(2, 10);
    struct mqd_cursor cursor = {0};
    struct mqd_range range;
    damage(0, ".log", 21000 + 16, "\x07", 1); /* magic of the batch 42..43 */
    CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 1, 42, 2000, true, &cursor, &range), 2);
    CHECK_CONTAINS(mqd_error_message(), "00000000000000000000.log: at position 21000: ");
    CHECK(!range.segment);
    /* others are not affected */
    CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 1, 90, 2000, true, &cursor, &range), 0);
    CHECK_EQUAL(range.position, 45000);
    mqd_range_release(reader, &range);
    damage(0, ".log", 30000 + 8, "\x7f\xff\xff\xff", 4); /* a length beyond the segment */
    CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 1, 60, 2000, true, &cursor, &range), 2);
    damage(100, ".log", 3000, "\0\0\0\0\0\0\0\1", 8); /* a decreasing offset */
    CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 1, 106, 2000, true, &cursor, &range), 2);
    CHECK_CONTAINS(mqd_error_message(), "at position 3000: a batch's base offset is below");
    plain_end(reader);
}

TEST(a_wrong_index_costs_only_time)
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

TEST(a_file_truncated_from_outside_is_a_storage_error)
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

/* A segment whose index has more than one 4 KiB page: binary search over pages, from any
 * hint. */
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
        /* not a scan of the segment's 280,000 bytes; the last batches are not indexed */
        CHECK(pread_bytes < 24000 || offset > 16000);
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
            /* nothing is listed yet */
            CHECK_OR(mqd_reader_available_bytes(reader, 7, &m->positions, m->positions.log_start_offset, &cursor) ==
                         UINT64_MAX, );
            CHECK_OR(mqd_reader_find(reader, 7, &m->positions, 1, m->positions.log_start_offset, 1, true, &cursor,
                                     &range) == 0, );
            mqd_range_release(reader, &range);
        }
        for (int i = 0; i < 100 && m->batch_count && !test_failed; i++) {
            struct mqd_positions positions = positions_at(m, (uint32_t)(test_random(&seed) % (m->batch_count + 1)));
            int64_t offset =
                positions.log_start_offset +
                (int64_t)(test_random(&seed) % (uint64_t)(positions.log_end_offset - positions.log_start_offset + 1));
            uint64_t expected = 0;
            for (uint32_t b = model_locate(m, offset);
                 b < m->batch_count && m->batches[b].base_offset < positions.high_watermark &&
                 offset < positions.high_watermark;
                 b++)
                expected += m->batches[b].size_bytes;
            CHECK_OR(mqd_reader_available_bytes(reader, 7, &positions, offset, &cursor) == expected, );
            pread_count = 0;
            /* the cursor moved along */
            CHECK_OR(mqd_reader_available_bytes(reader, 7, &positions, offset, &cursor) == expected &&
                         (pread_count == 0 || expected == 0), );
            CHECK_OR(mqd_reader_find(reader, 7, &positions, 1, offset, 1 << 30, false, &cursor, &range) == 0 &&
                         range.size_bytes <= expected, );
            mqd_range_release(reader, &range);
        }
        mqd_reader_destroy(reader);
        model_end(m);
    }
    free(m);
}
