/* The high watermark of a replicated partition as a position in the log: compared with a list of
 * all positions. */
#include "mqd_log_test.h"

#include "log/partition_follow.h"

#define WRITES 3000

static struct log_batch one(uint64_t mark)
{
    return (struct log_batch){.mark = mark, .record_count = 1 + (int32_t)(mark % 3)};
}

TEST(high_watermark_moves_by_complete_writes)
{
    log_fresh();
    struct mqd_log_options options = log_options();
    struct mqd_partition *partition = log_open(&options, NULL);
    CHECK_EQUAL(log_append(partition, one(3)), 0); /* 1 record */
    CHECK_EQUAL(log_sync(partition), 0);
    mqd_partition_set_replicated(partition, true);
    CHECK_EQUAL(log_positions(partition).high_watermark, 1); /* unchanged */
    CHECK_EQUAL(log_append(partition, one(5)), 0);           /* 3 records */
    CHECK_EQUAL(log_append(partition, one(3)), 0);
    CHECK_EQUAL(log_sync(partition), 0);
    CHECK_EQUAL(log_positions(partition).high_watermark, 1);  /* flushed, which does not affect it */
    CHECK(!mqd_partition_raise_high_watermark(partition, 3)); /* inside a batch */
    CHECK(mqd_partition_raise_high_watermark(partition, 4));
    CHECK_EQUAL(log_positions(partition).high_watermark, 4);
    CHECK(!mqd_partition_raise_high_watermark(partition, 2)); /* never decreases */
    CHECK(mqd_partition_raise_high_watermark(partition, INT64_MAX));
    CHECK_EQUAL(log_positions(partition).high_watermark, 5);
    CHECK_EQUAL(log_append(partition, one(3)), 0);
    mqd_partition_set_replicated(partition, false);
    CHECK_EQUAL(log_positions(partition).high_watermark, 5); /* one replica: the flushed end */
    CHECK_EQUAL(log_sync(partition), 0);
    CHECK_EQUAL(log_positions(partition).high_watermark, 6);
    mqd_partition_close(partition, 1);
    log_clean();
}

/* A follower takes the leader's log start, which may be above its own high watermark. */
TEST(a_truncation_raises_no_high_watermark)
{
    log_fresh();
    struct mqd_log_options options = log_options();
    struct mqd_partition *partition = log_open(&options, NULL);
    struct mqd_truncation cut;
    mqd_partition_set_replicated(partition, true);
    for (int32_t count = 1; count <= 3; count++)
        CHECK_EQUAL(log_append(partition, (struct log_batch){.mark = (uint64_t)count, .record_count = 10}), 0);
    CHECK_EQUAL(mqd_partition_advance_start(partition, 10), 0);
    CHECK_EQUAL(mqd_partition_truncate(partition, 20, NOW, &cut), 0);
    CHECK_EQUAL(log_positions(partition).log_end_offset, 20);
    CHECK(log_positions(partition).high_watermark <= 10);
    CHECK(mqd_partition_raise_high_watermark(partition, 20));
    mqd_partition_close(partition, 0);
    log_clean();
}

/* Followers far behind and close by, rolls in between: the position is always exact, below the
 * requested offset, and reaches the end. */
TEST(places_are_exact)
{
    uint64_t random = 77;
    log_fresh();
    struct mqd_log_options options = log_options();
    options.segment_bytes = 16384;
    struct mqd_partition *partition = log_open(&options, NULL);
    struct mqd_positions *places = calloc(WRITES + 1, sizeof *places); /* after each write */
    mqd_partition_set_replicated(partition, true);
    int64_t previous = 0;
    for (uint32_t i = 1; i <= WRITES; i++) {
        CHECK_EQUAL(log_append(partition, one(test_random(&random))), 0);
        if (test_random(&random) % 64 == 0)
            CHECK_EQUAL(log_sync(partition), 0);
        places[i] = log_positions(partition);
        bool near = i / 500 % 2; /* for 500 writes no reader keeps up: more positions than are kept */
        if (test_random(&random) % (near ? 3 : 400))
            continue;
        int64_t end = places[i].log_end_offset, requested = near ? end - (int64_t)(test_random(&random) % 20)
                                                                 : (int64_t)(test_random(&random) % (uint64_t)end);
        mqd_partition_raise_high_watermark(partition, requested);
        struct mqd_positions now = log_positions(partition);
        CHECK(now.high_watermark >= previous && (now.high_watermark <= requested || now.high_watermark == previous));
        previous = now.high_watermark;
        uint32_t at = 0;
        while (at < i && places[at].log_end_offset < now.high_watermark)
            at++;
        CHECK_EQUAL(places[at].log_end_offset, now.high_watermark);
        /* the same position with its other name */
        bool next_segment = now.high_watermark_segment == now.high_watermark && now.high_watermark_position == 0;
        CHECK(at == 0 || next_segment ||
              (now.high_watermark_segment == places[at].log_end_segment &&
               now.high_watermark_position == places[at].log_end_position));
    }
    CHECK(mqd_partition_raise_high_watermark(partition, INT64_MAX) || previous == places[WRITES].log_end_offset);
    CHECK_EQUAL(log_positions(partition).high_watermark, places[WRITES].log_end_offset);
    mqd_partition_do_periodic_work(partition, NOW); /* a quiet partition keeps no ring */
    CHECK(partition->marks == NULL);
    CHECK_EQUAL(log_append(partition, one(3)), 0);
    CHECK(mqd_partition_raise_high_watermark(partition, INT64_MAX));
    mqd_partition_close(partition, 1);
    free(places);
    log_clean();
}
