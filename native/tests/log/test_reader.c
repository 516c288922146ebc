/* Where a reader finds requested offsets: against a model, in sequence, at the ends, and at what
 * cost. */
#include "mqd_reader_test.h"

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
            int64_t offset =
                positions.log_start_offset +
                (int64_t)(test_random(&seed) % (uint64_t)(positions.log_end_offset - positions.log_start_offset + 1));
            uint32_t size_max = (uint32_t)(test_random(&seed) % (i % 3 ? 100000 : 3000000));
            bool min_one_batch = test_random(&seed) % 2;
            struct mqd_range range;
            if (mqd_reader_find(reader, 7, &positions, 1, offset, size_max, min_one_batch, &cursor, &range) != 0)
                TEST_FAIL("seed %" PRIu64 ": %s", begin, mqd_error_message());
            else if (check_range(m, &positions, offset, size_max, min_one_batch, &range) == UINT32_MAX ||
                     !cursor_good(m, &positions, &range, &cursor))
                TEST_FAIL("seed %" PRIu64 " lookup %d", begin, i);
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
TEST(a_sequential_look_up_costs_one_pread_at_most)
{
    struct mqd_reader *reader = plain_partition(2, 100);
    struct mqd_cursor cursor = {0};
    struct mqd_range range;
    int64_t offset = 0;
    bool opened = false;
    while (offset < 100) { /* the limit is far: the index determines where to stop */
        pread_count = open_count = pread_bytes = 0;
        CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 1, offset, 9000, false, &cursor, &range), 0);
        uint32_t reads = pread_count;
        CHECK(!opened || (reads <= 1 && open_count == 0));
        opened = true;
        uint32_t next = check_range(&shared, &shared.positions, offset, 9000, false, &range);
        CHECK(next != UINT32_MAX);
        offset = shared.batches[next - 1].last_offset + 1;
        mqd_range_release(reader, &range);
    }
    CHECK_EQUAL(cursor.segment, 100);
    /* opens the second segment */
    CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 1, 100, 5000, false, &cursor, &range), 0);
    CHECK_EQUAL(range.size_bytes, 5000);
    mqd_range_release(reader, &range);
    pread_count = open_count = 0;
    /* the high watermark is within the limit */
    CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 1, 110, 1000000, false, &cursor, &range), 0);
    CHECK_EQUAL(range.size_bytes, 45000);
    CHECK_EQUAL(pread_count + open_count, 0);
    mqd_range_release(reader, &range);
    struct mqd_cursor other = {0};
    /* ... also when it is the limit */
    CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 1, 100, 50000, false, &other, &range), 0);
    CHECK_EQUAL(range.size_bytes, 50000);
    mqd_range_release(reader, &range);
    model_append(&shared, 0, 9, 3000, false);
    pread_count = open_count = 0;
    /* it grew: still no lookup */
    CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 1, 200, 1000000, false, &cursor, &range), 0);
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
    /* walks over the same positions of the other file */
    CHECK_EQUAL(mqd_reader_find(reader, 3, &shared.positions, 1, 50, 1000, false, &first, &range), 0);
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
    CHECK_CONTAINS(mqd_error_message(), "offset 10 is outside the log's range 11..200");
    CHECK_EQUAL(mqd_reader_find(reader, 3, &positions, 1, 201, 1000, false, &cursor, &range), 1);
    CHECK_EQUAL(mqd_reader_find(reader, 3, &positions, 1, -1, 1000, false, &cursor, &range), 1);
    int64_t empty[] = {150, 151, 199, 200};
    for (int i = 0; i < 4; i++) {
        CHECK_EQUAL(mqd_reader_find(reader, 3, &positions, 1, empty[i], 1000, true, &cursor, &range), 0);
        CHECK(range.size_bytes == 0 && !range.segment);
    }
    /* inside the batch 10..11 */
    CHECK_EQUAL(mqd_reader_find(reader, 3, &positions, 1, 11, 1000, true, &cursor, &range), 0);
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

/* A client that reads the files itself continues with the next segment where readable_bytes end, so
 * the next segment must not be reported before this one is readable completely: the writer rolls
 * while unflushed batches are above the high watermark. */
TEST(the_next_segment_is_named_when_this_one_is_fully_readable)
{
    struct mqd_reader *reader = plain_partition(4, 100);
    for (uint32_t number = 0; number <= shared.batch_count; number++) {
        struct mqd_positions positions = positions_at(&shared, number);
        for (int64_t offset = 0; offset <= positions.high_watermark; offset += 7) {
            struct mqd_segment_location place;
            uint32_t end = 0;
            CHECK_EQUAL(mqd_reader_locate(reader, 3, &positions, 1, offset, &place), 0);
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
            mqd_segment_location_release(reader, &place);
        }
    }
    plain_end(reader);
}

TEST(a_first_batch_above_the_limit_is_complete_or_absent)
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
