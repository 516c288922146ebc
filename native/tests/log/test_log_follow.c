/* A follower's log: batches as received, and the high watermark of a replica. */
#include "mqd_follow_test.h"

/* ---- appending ---- */

TEST(batches_are_kept_as_they_were_sent)
{
    struct leader leader = {0};
    struct mqd_log_options options = small_options();
    leader_fill(&leader, 1, 700, 0);
    log_fresh();
    struct mqd_partition *partition = log_open(&options, NULL);
    follow_up_to(partition, &leader, 0, leader.count, 2);
    check_bytes(partition, &leader, 0, leader.count);
    CHECK_EQUAL(log_verify(partition, NULL), leader.end[leader.count - 1]);
    CHECK(partition->segment_count > 5);
    CHECK_OR(partition->epochs.count > 5, (void)0);
    char before[8192];
    strcpy(before, describe(partition));
    mqd_partition_close(partition, 0);
    partition = log_open(&options, NULL); /* recovery reads the same from the log */
    CHECK_TEXT(describe(partition), before);
    mqd_partition_close(partition, 1);
    leader_free(&leader);
}

static int follow_error(struct mqd_partition *partition, const uint8_t *bytes, uint64_t size_bytes, int32_t epoch,
                        bool gaps, struct mqd_follow_result *out)
{
    int error = mqd_partition_follow(partition, bytes, size_bytes, epoch, gaps ? INT64_MAX : -1, NOW, out);
    mqd_partition_unstage(partition);
    return error;
}

TEST(a_batch_that_is_not_the_next_is_refused)
{
    struct leader leader = {0};
    struct mqd_log_options options = small_options();
    struct mqd_follow_result follow;
    leader_fill(&leader, 3, 20, 0);
    log_fresh();
    struct mqd_partition *partition = log_open(&options, NULL);
    follow_up_to(partition, &leader, 0, 10, 4);
    int64_t end = leader.end[9];
    char before[8192];
    strcpy(before, describe(partition));
    uint8_t *next = leader.bytes + leader.position[10];
    uint32_t size_bytes = leader.position[11] - leader.position[10];
    for (uint32_t at = 0; at < size_bytes; at++) { /* any flipped bit, except in the epoch, which no CRC covers */
        next[at] ^= 0x10;
        int error = follow_error(partition, next, size_bytes, 0xfffff, false, &follow);
        /* a greater length means an incomplete batch */
        bool in_epoch = at >= 12 && at < 16, cut = error == MQD_FOLLOW_OK && follow.taken_bytes == 0;
        CHECK(error == MQD_FOLLOW_CORRUPT || error == MQD_FOLLOW_OFFSET ||
              (in_epoch && (error == MQD_FOLLOW_OK || error == MQD_FOLLOW_EPOCH)) || (at >= 8 && at < 12 && cut));
        CHECK(in_epoch || follow.batch_count == 0);
        next[at] ^= 0x10;
    }
    CHECK_EQUAL(follow_error(partition, leader.bytes + leader.position[9], size_bytes, 99, false, &follow),
                MQD_FOLLOW_OFFSET);
    CHECK_EQUAL(follow_error(partition, leader.bytes + leader.position[11], leader.position[12] - leader.position[11],
                             99, false, &follow),
                MQD_FOLLOW_OFFSET);
    put_header(next, end, 8);
    CHECK_EQUAL(follow_error(partition, next, size_bytes, 7, false, &follow), MQD_FOLLOW_EPOCH);
    put_header(next, end, -1);
    CHECK_EQUAL(follow_error(partition, next, size_bytes, 7, false, &follow), MQD_FOLLOW_EPOCH);
    CHECK_EQUAL(follow.taken_bytes, 0);
    CHECK_TEXT(describe(partition), before);
    CHECK_EQUAL(partition->staged_end_offset, end);
    mqd_partition_fence(partition);
    CHECK_EQUAL(follow_error(partition, next, size_bytes, 9, false, &follow), MQD_FOLLOW_FAILED);
    mqd_partition_close(partition, 0);
    leader_free(&leader);
}

TEST(gaps_are_noted_before_they_are_written)
{
    struct leader leader = {0};
    struct mqd_log_options options = small_options();
    struct mqd_follow_result follow;
    bool rolled;
    leader_add(&leader, (struct log_batch){.mark = 1}, 0, 0);
    leader_add(&leader, (struct log_batch){.mark = 2}, 7, 0);
    leader_add(&leader, (struct log_batch){.mark = 3}, 20, 2);
    log_fresh();
    struct mqd_partition *partition = log_open(&options, NULL);
    CHECK_EQUAL(follow_error(partition, leader.bytes, leader.size_bytes, 2, false, &follow), MQD_FOLLOW_OFFSET);
    CHECK_EQUAL(follow.batch_count, 1);
    /* the second batch begins at 7: above the leader's high watermark */
    CHECK_EQUAL(mqd_partition_follow(partition, leader.bytes, leader.size_bytes, 2, 6, NOW, &follow),
                MQD_FOLLOW_OFFSET);
    CHECK_EQUAL(follow.batch_count, 1);
    mqd_partition_unstage(partition);
    /* from the first gap on the log is marked as having gaps */
    CHECK_EQUAL(mqd_partition_follow(partition, leader.bytes, leader.size_bytes, 2, 7, NOW, &follow), MQD_FOLLOW_OK);
    CHECK_EQUAL(mqd_partition_write(partition, NOW, &rolled), 0);
    CHECK_EQUAL(partition->log_end_offset, 21);
    mqd_partition_close(partition, 0);
    struct mqd_recovery recovery = log_untrusted();
    partition = log_open(&options, &recovery); /* not compacted here: a file marks the gaps as valid */
    CHECK_EQUAL(recovery.log_end_offset, 21);
    struct mqd_truncation cut;
    CHECK_EQUAL(mqd_partition_truncate(partition, 15, NOW, &cut), 0); /* into the gap */
    CHECK_EQUAL(cut.log_end_offset, 8);
    CHECK_EQUAL(mqd_partition_follow(partition, leader.bytes + leader.position[2],
                                     leader.size_bytes - leader.position[2], 2, -1, NOW, &follow),
                MQD_FOLLOW_OK);
    CHECK_EQUAL(mqd_partition_write(partition, NOW, &rolled), 0);
    CHECK_EQUAL(partition->log_end_offset, 21);
    mqd_partition_close(partition, 1);
    leader_free(&leader);
}

/* A leader whose log start is inside a batch sends the whole batch. */
TEST(an_empty_log_begins_where_the_batch_begins)
{
    struct leader leader = {0};
    struct mqd_log_options options = small_options();
    struct mqd_follow_result follow;
    struct mqd_truncation cut;
    bool rolled;
    leader_add(&leader, (struct log_batch){.mark = 1, .record_count = 10, .producer_id = 5}, 100, 3);
    log_fresh();
    struct mqd_partition *partition = log_open(&options, NULL);
    CHECK_EQUAL(mqd_partition_restart_at(partition, 104, 104, NOW, &cut), 0);
    CHECK_EQUAL(partition->log_end_offset, 104);
    CHECK_EQUAL(partition->log_start_offset, 104);
    CHECK_EQUAL(follow_error(partition, leader.bytes, leader.size_bytes, 3, false, &follow), MQD_FOLLOW_BEFORE);
    CHECK_EQUAL(follow.next_offset, 100);
    CHECK_EQUAL(mqd_partition_restart_at(partition, 104, follow.next_offset, NOW, &cut), 0);
    CHECK_EQUAL(partition->log_end_offset, 104);
    CHECK_EQUAL(follow_error(partition, leader.bytes, leader.size_bytes, 3, false, &follow), MQD_FOLLOW_OK);
    CHECK_EQUAL(partition->staged_end_offset, 104);
    CHECK_EQUAL(mqd_partition_follow(partition, leader.bytes, leader.size_bytes, 3, -1, NOW, &follow), MQD_FOLLOW_OK);
    CHECK_EQUAL(mqd_partition_write(partition, NOW, &rolled), 0);
    CHECK_EQUAL(partition->log_end_offset, 110);
    CHECK_EQUAL(partition->log_start_offset, 104);
    CHECK_EQUAL(partition->segments[0], 100);
    mqd_partition_close(partition, 0);
    struct mqd_recovery recovery = log_untrusted();
    recovery.log_start_offset = 104; /* an earlier checkpoint */
    partition = log_open(&options, &recovery);
    CHECK_EQUAL(recovery.log_end_offset, 110);
    CHECK_EQUAL(recovery.log_start_offset, 104);
    mqd_partition_close(partition, 1);
    leader_free(&leader);
}

/* ---- the high watermark of a replica ---- */

TEST(a_replica_opens_at_its_high_watermark)
{
    struct mqd_log_options options = small_options();
    struct leader leader = {0};
    leader_fill(&leader, 4, 200, 0);
    for (uint32_t i = 0; i <= leader.count; i += 7) {
        log_fresh();
        struct mqd_partition *partition = log_open(&options, NULL);
        follow_up_to(partition, &leader, 0, leader.count, 4);
        mqd_partition_close(partition, 1);
        struct mqd_recovery recovery = log_untrusted();
        int64_t known = i ? leader.end[i - 1] : 0;
        recovery.clean_shutdown = 1;
        recovery.replicated = 1;
        /* inside a batch: its beginning */
        recovery.high_watermark = known + (i % 2 && i < leader.count && leader.end[i] > known + 1);
        partition = log_open(&options, &recovery);
        struct mqd_positions positions = log_positions(partition);
        CHECK_EQUAL(positions.high_watermark, known);
        CHECK(mqd_partition_replicated(partition));
        int64_t position = 0;
        for (uint32_t j = 0; j < i; j++) /* the position is the batch's */
            position = leader.end[j] > positions.high_watermark_segment
                           ? position + (leader.position[j + 1 < leader.count ? j + 1 : j] - leader.position[j])
                           : 0;
        if (i < leader.count)
            CHECK_EQUAL(positions.high_watermark_position, position);
        CHECK(positions.last_stable_offset <= known);
        CHECK_EQUAL(mqd_partition_raise_high_watermark(partition, INT64_MAX), known < partition->log_end_offset);
        CHECK_EQUAL(log_positions(partition).high_watermark, partition->log_end_offset);
        mqd_partition_close(partition, 1);
    }
    leader_free(&leader);
}

TEST(epochs_end_where_the_next_begins)
{
    struct mqd_log_options options = small_options();
    struct leader leader = {0};
    int32_t found;
    int64_t end;
    log_fresh();
    struct mqd_partition *partition = log_open(&options, NULL);
    for (int i = 0; i < 10; i++)
        leader_add(&leader, (struct log_batch){.mark = 3}, i, i < 4 ? 2 : i < 7 ? 5 : 9);
    follow_up_to(partition, &leader, 0, 10, 1);
    const struct {
        int32_t epoch, found;
        int64_t end;
    } expected[] = {{-1, -1, -1}, {0, 0, 0}, {1, 1, 0}, {2, 2, 4},  {3, 2, 4},
                    {4, 2, 4},    {5, 5, 7}, {8, 5, 7}, {9, 9, 10}, {10, -1, -1}};
    for (uint32_t i = 0; i < sizeof expected / sizeof *expected; i++) {
        mqd_partition_epoch_end(partition, expected[i].epoch, &found, &end);
        CHECK_EQUAL(found, expected[i].found);
        CHECK_EQUAL(end, expected[i].end);
    }
    struct mqd_truncation outcome; /* nothing to truncate: but offsets beyond the log are no longer reported */
    CHECK_EQUAL(mqd_epochs_add(&partition->epochs, 11, 10), 1);
    CHECK_EQUAL(mqd_partition_truncate(partition, 10, NOW, &outcome), 0);
    CHECK_EQUAL(mqd_epochs_last(&partition->epochs), 9);
    CHECK_EQUAL(log_positions(partition).log_end_offset, 10);
    mqd_partition_close(partition, 1);
    leader_free(&leader);
}
