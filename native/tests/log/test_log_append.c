/* Appending: offsets, bytes on disk, rolling, positions, flushing, preallocation. Failing disks:
 * test_log_refused.c. */
#define LOG_TEST_IN_MEMORY
#include "mqd_log_test.h"

TEST(appends_bytes_as_sent_with_offset_and_epoch)
{
    log_fresh();
    struct mqd_log_options options = log_options();
    struct mqd_partition *partition = log_open(&options, NULL);
    mqd_partition_set_leader_epoch(partition, 7);
    uint8_t a[512], b[512], sent[512], stored[1024];
    struct mqd_stage_result result;
    CHECK_EQUAL(log_stage(partition, a, (struct log_batch){.record_count = 3, .mark = 2}, &result), 0); /* in place */
    CHECK_EQUAL(result.base_offset, 0);
    uint32_t size = log_encode(sent, (struct log_batch){.record_count = 2, .mark = 1});
    CHECK_EQUAL(log_stage(partition, b, (struct log_batch){.record_count = 2, .mark = 1}, &result), 0); /* by copy */
    CHECK_EQUAL(result.base_offset, 3);
    CHECK(memcmp(b, sent, size) == 0);
    CHECK_EQUAL(mqd_partition_log_end_offset(partition), 0);
    bool rolled;
    CHECK_EQUAL(mqd_partition_write(partition, NOW, &rolled), 0);
    CHECK(!rolled);
    CHECK_EQUAL(mqd_partition_log_end_offset(partition), 5);
    int fd = open(log_file(0, ".log"), O_RDONLY);
    CHECK_EQUAL(read(fd, stored, sizeof stored), 2 * size);
    close(fd);
    struct mqd_batch batch;
    const char *reason;
    CHECK_EQUAL(mqd_batch_validate(stored + size, size, &batch, &reason), 0);
    CHECK_EQUAL(batch.base_offset, 3);
    CHECK_EQUAL(batch.partition_leader_epoch, 7);
    CHECK(memcmp(stored + size + 16, sent + 16, size - 16) == 0);
    CHECK_EQUAL(mqd_partition_close(partition, 0), 0);
}

TEST(log_append_time_sets_timestamp_and_crc)
{
    log_fresh();
    struct mqd_log_options options = log_options();
    options.log_append_time = 1;
    struct mqd_partition *partition = log_open(&options, NULL);
    for (uint64_t mark = 0; mark < 4; mark++) {
        uint8_t bytes[4096];
        struct mqd_stage_result result;
        bool rolled;
        CHECK_EQUAL(log_stage(partition, bytes, (struct log_batch){.timestamp_ms = 5, .mark = mark, .body_bytes = 1000},
                              &result),
                    0);
        CHECK_EQUAL(result.log_append_time_ms, NOW);
        CHECK_EQUAL(mqd_partition_write(partition, NOW, &rolled), 0);
    }
    struct mqd_scan_result scan;
    CHECK_EQUAL(mqd_segment_scan(log_file(0, ".log"), 0, 0, 1, &scan), 0);
    CHECK(scan.reason == NULL);
    CHECK_EQUAL(scan.batch_count, 4);
    CHECK_EQUAL(scan.max_timestamp_ms, NOW);
    mqd_partition_close(partition, 0);
}

TEST(a_topic_with_create_time_clears_the_attribute_of_append_time)
{
    log_fresh();
    struct mqd_log_options options = log_options();
    struct mqd_partition *partition = log_open(&options, NULL);
    CHECK_EQUAL(log_append(partition, (struct log_batch){.attributes = 8, .timestamp_ms = NOW - 5}), 0);
    uint8_t stored[1024];
    int fd = open(log_file(0, ".log"), O_RDONLY);
    ssize_t size = read(fd, stored, sizeof stored);
    close(fd);
    struct mqd_batch batch;
    const char *reason;
    CHECK_EQUAL(mqd_batch_validate(stored, (size_t)size, &batch, &reason), 0);
    CHECK_EQUAL(batch.attributes, 0);
    CHECK_EQUAL(batch.max_timestamp_ms, NOW - 5);
    mqd_partition_close(partition, 0);
}

TEST(invalid_batches_are_refused)
{
    log_fresh();
    struct mqd_log_options options = log_options();
    options.max_message_bytes = 1000;
    options.timestamp_before_max_ms = 1000;
    options.timestamp_after_max_ms = 500;
    struct mqd_partition *partition = log_open(&options, NULL);
    CHECK_EQUAL(log_append(partition, (struct log_batch){.body_bytes = 940}), 10);
    CHECK_EQUAL(log_append(partition, (struct log_batch){.body_bytes = 939}), 0);
    CHECK_EQUAL(log_append(partition, (struct log_batch){.timestamp_ms = NOW - 1001}), 32);
    CHECK_EQUAL(log_append(partition, (struct log_batch){.timestamp_ms = NOW - 1000}), 0);
    CHECK_EQUAL(log_append(partition, (struct log_batch){.timestamp_ms = NOW + 501}), 32);
    CHECK_EQUAL(log_append(partition, (struct log_batch){.timestamp_ms = INT64_MIN}), 32);
    CHECK_EQUAL(log_append(partition, (struct log_batch){.timestamp_ms = INT64_MAX}), 32);
    CHECK_EQUAL(log_append(partition, (struct log_batch){.timestamp_ms = -1}), 0); /* no timestamp */
    uint8_t bytes[512];
    struct mqd_batch batch;
    struct mqd_stage_result result;
    log_encode(bytes, (struct log_batch){.marker = 1, .producer_id = 5});
    mqd_batch_decode(bytes, sizeof bytes, &batch);
    CHECK_EQUAL(mqd_partition_stage(partition, &batch, bytes, true, 0, 0, NOW, &result), 87);
    CHECK_EQUAL(mqd_partition_stage(partition, &batch, bytes, true, MQD_STAGE_COORDINATOR, 0, NOW, &result), 0);
    /* its clock may be another host's */
    CHECK_EQUAL(mqd_partition_stage(partition, &batch, bytes, true, MQD_STAGE_COORDINATOR, 0, NOW - 100000000, &result),
                0);
    bool rolled;
    CHECK_EQUAL(mqd_partition_write(partition, NOW, &rolled), 0);
    options.readonly = 1;
    mqd_partition_set_options(partition, &options);
    CHECK_EQUAL(log_append(partition, (struct log_batch){.mark = 0}), 44);
    options.readonly = 0;
    options.segment_bytes = 100;
    mqd_partition_set_options(partition, &options);
    CHECK_EQUAL(log_append(partition, (struct log_batch){.mark = 0}), 18);
    mqd_partition_fence(partition);
    CHECK_EQUAL(log_append(partition, (struct log_batch){.mark = 0}), 56);
    mqd_partition_close(partition, 0);
}

TEST(a_full_staging_area_requests_a_write)
{
    log_fresh();
    struct mqd_log_options options = log_options();
    struct mqd_partition *partition = log_open(&options, NULL);
    static uint8_t bytes[MQD_STAGE_COUNT_MAX + 1][128];
    bool rolled;
    for (int round = 0; round < 3; round++) {
        for (uint32_t i = 0; i < MQD_STAGE_COUNT_MAX; i++)
            CHECK_EQUAL(log_stage(partition, bytes[i], (struct log_batch){.mark = i, .body_bytes = 60}, NULL), 0);
        CHECK_EQUAL(log_stage(partition, bytes[MQD_STAGE_COUNT_MAX], (struct log_batch){.mark = 9}, NULL), -1);
        CHECK_EQUAL(mqd_partition_write(partition, NOW, &rolled), 0);
        CHECK_EQUAL(mqd_partition_log_end_offset(partition), (round + 1) * MQD_STAGE_COUNT_MAX);
    }
    CHECK_EQUAL(log_verify(partition, NULL), 3 * MQD_STAGE_COUNT_MAX);
    mqd_partition_close(partition, 0);
}

/* One write over many segments. */
TEST(rolls_in_the_middle_of_a_write)
{
    log_fresh();
    struct mqd_log_options options = log_options();
    options.segment_bytes = 1000;
    struct mqd_partition *partition = log_open(&options, NULL);
    static uint8_t bytes[100][128];
    bool rolled;
    for (uint32_t i = 0; i < 100; i++)
        CHECK_EQUAL(log_stage(partition, bytes[i], (struct log_batch){.mark = i}, NULL), 0);
    CHECK_EQUAL(mqd_partition_write(partition, NOW, &rolled), 0);
    CHECK(rolled);
    CHECK_EQUAL(partition->segment_count, 100 / 8 + 1);
    CHECK_EQUAL(log_verify(partition, NULL), 100);
    CHECK_EQUAL(log_positions(partition).high_watermark, 0);
    CHECK_EQUAL(log_sync(partition), 0);
    CHECK_EQUAL(log_positions(partition).high_watermark, 100);
    CHECK(!mqd_partition_dirty(partition));
    CHECK_EQUAL(mqd_partition_dirty_bytes(partition), 0);
    mqd_partition_close(partition, 0);
}

TEST(rolls_by_age_and_on_demand)
{
    log_fresh();
    struct mqd_log_options options = log_options();
    options.segment_ms = 1000;
    struct mqd_partition *partition = log_open(&options, NULL);
    CHECK_EQUAL(mqd_partition_roll(partition, NOW), 0);
    CHECK_EQUAL(partition->segment_count, 1); /* empty: nothing to roll */
    CHECK_EQUAL(log_append(partition, (struct log_batch){.timestamp_ms = NOW}), 0);
    CHECK_EQUAL(log_append(partition, (struct log_batch){.timestamp_ms = NOW + 1000}), 0);
    CHECK_EQUAL(partition->segment_count, 1);
    CHECK_EQUAL(log_append(partition, (struct log_batch){.timestamp_ms = NOW + 1001}), 0);
    CHECK_EQUAL(partition->segment_count, 2);
    /* older: not by record time */
    CHECK_EQUAL(log_append(partition, (struct log_batch){.timestamp_ms = NOW - 5000}), 0);
    CHECK_EQUAL(partition->segment_count, 2);
    uint8_t bytes[256];
    bool rolled;
    CHECK_EQUAL(log_stage(partition, bytes, (struct log_batch){.timestamp_ms = NOW}, NULL), 0);
    CHECK_EQUAL(mqd_partition_write(partition, NOW + 1001, &rolled), 0); /* by the clock */
    CHECK(rolled);
    CHECK_EQUAL(mqd_partition_roll(partition, NOW), 0);
    CHECK_EQUAL(partition->segment_count, 4);
    CHECK_EQUAL(log_verify(partition, NULL), 5);
    mqd_partition_close(partition, 0);
}

/* Offsets in the index are int32 relative to the segment. */
TEST(rolls_when_the_relative_offset_would_not_fit)
{
    log_fresh();
    struct mqd_log_options options = log_options();
    struct mqd_partition *partition = log_open(&options, NULL);
    CHECK_EQUAL(log_append(partition, (struct log_batch){.record_count = INT32_MAX}), 0);
    CHECK_EQUAL(log_append(partition, (struct log_batch){.record_count = 1}), 0);
    CHECK_EQUAL(partition->segment_count, 1);
    CHECK_EQUAL(log_append(partition, (struct log_batch){.record_count = 1}), 0);
    CHECK_EQUAL(partition->segment_count, 2);
    CHECK_EQUAL(partition->segments[1], (int64_t)INT32_MAX + 1);
    mqd_partition_close(partition, 0);
}

TEST(high_watermark_is_exact_in_both_flush_modes)
{
    log_fresh();
    struct mqd_log_options options = log_options();
    options.segment_bytes = 2000;
    struct mqd_partition *partition = log_open(&options, NULL);
    struct mqd_sync_fd fds[4];
    CHECK_EQUAL(log_append(partition, (struct log_batch){.record_count = 2}), 0);
    struct mqd_positions at = log_positions(partition);
    CHECK_EQUAL(at.high_watermark, 0);
    CHECK_EQUAL(at.high_watermark_position, 0);
    CHECK_EQUAL(at.log_end_position, 125);
    int count = mqd_partition_sync_begin(partition, fds); /* the log, the epoch checkpoint, the directory */
    CHECK_EQUAL(count, 3);
    CHECK(fds[2].is_directory);
    /* after the begin: not covered (P4) */
    CHECK_EQUAL(log_append(partition, (struct log_batch){.record_count = 1}), 0);
    CHECK_EQUAL(mqd_partition_sync_begin(partition, fds), 0);
    mqd_partition_sync_done(partition, 0);
    at = log_positions(partition);
    CHECK_EQUAL(at.high_watermark, 2);
    CHECK_EQUAL(at.durable_offset, 2);
    CHECK_EQUAL(at.high_watermark_position, 125);
    CHECK_EQUAL(mqd_partition_dirty_bytes(partition), 125);
    while (partition->segment_count == 1)
        CHECK_EQUAL(log_append(partition, (struct log_batch){.record_count = 1}), 0);
    at = log_positions(partition);
    CHECK_EQUAL(at.high_watermark, 2);
    CHECK_EQUAL(at.high_watermark_segment, 0);
    options.flush_on_ack = 0;
    mqd_partition_set_options(partition, &options);
    at = log_positions(partition);
    CHECK_EQUAL(at.high_watermark, at.log_end_offset);
    CHECK_EQUAL(at.high_watermark_segment, at.log_end_segment);
    CHECK_EQUAL(at.high_watermark_position, at.log_end_position);
    options.flush_on_ack = 1; /* never decreases */
    mqd_partition_set_options(partition, &options);
    CHECK_EQUAL(log_positions(partition).high_watermark, at.log_end_offset);
    mqd_partition_close(partition, 0);
}

TEST(a_failed_sync_fences)
{
    log_fresh();
    struct mqd_log_options options = log_options();
    struct mqd_partition *partition = log_open(&options, NULL);
    CHECK_EQUAL(log_append(partition, (struct log_batch){.mark = 0}), 0);
    CHECK_EQUAL(mqd_file_watch(NULL, "sync:EIO:.log"), 0);
    CHECK_EQUAL(log_sync(partition), EIO);
    mqd_file_watch(NULL, NULL);
    CHECK_EQUAL(log_positions(partition).durable_offset, 0);
    CHECK(!mqd_partition_dirty(partition));
    CHECK_EQUAL(log_sync(partition), 0);
    CHECK_EQUAL(log_positions(partition).durable_offset, 0);
    CHECK_EQUAL(log_append(partition, (struct log_batch){.mark = 0}), 56);
    CHECK_EQUAL(mqd_partition_close(partition, 1), -1);
    CHECK_CONTAINS(mqd_error_message(), "fenced");
}

/* The next start trusts the whole log. */
TEST(a_clean_shutdown_flushes)
{
    static const char *const rules[] = {"sync:EIO:0.log", "sync:EIO:5.log", "sync:EIO:5.timeindex"};
    struct mqd_log_options options = log_options();
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        log_fresh();
        struct mqd_partition *partition = log_open(&options, NULL);
        for (int k = 0; k < 6; k++) {
            CHECK_EQUAL(log_append(partition, (struct log_batch){.mark = 0}), 0);
            if (k == 4)
                CHECK_EQUAL(mqd_partition_roll(partition, NOW), 0);
        }
        CHECK_EQUAL(mqd_file_watch(NULL, rules[i]), 0);
        CHECK_EQUAL(mqd_partition_close(partition, 1), -1);
        mqd_file_watch(NULL, NULL);
    }
}

/* More sealed segments than the queue of waiting files holds: the write blocks in a flush,
 * durable stays within what was covered, nothing leaks. */
TEST(sealed_segments_wait_bounded)
{
    log_fresh();
    struct mqd_log_options options = log_options();
    options.segment_bytes = 1000;
    struct mqd_partition *partition = log_open(&options, NULL);
    struct mqd_sync_fd fds[4];
    for (int i = 0; i < 8; i++)
        CHECK_EQUAL(log_append(partition, (struct log_batch){.body_bytes = 900}), 0);
    int count = mqd_partition_sync_begin(partition, fds);
    CHECK_EQUAL(count, 4);
    for (int i = 0; i < 40; i++)
        CHECK_EQUAL(log_append(partition, (struct log_batch){.body_bytes = 900}), 0);
    CHECK_EQUAL(partition->sync_queue_count, MQD_SYNC_QUEUE_MAX);
    mqd_partition_sync_done(partition, 0);
    CHECK(log_positions(partition).durable_offset <= 3);
    int64_t durable = -1;
    while ((count = mqd_partition_sync_begin(partition, fds)) > 0) {
        mqd_partition_sync_done(partition, 0);
        CHECK(log_positions(partition).durable_offset >= durable);
        durable = log_positions(partition).durable_offset;
    }
    CHECK_EQUAL(durable, 48);
    CHECK_EQUAL(log_verify(partition, NULL), 48);
    mqd_partition_close(partition, 0);
}

static uint32_t queued_before(const struct mqd_partition *partition, int64_t segment)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < partition->sync_queue_count; i++)
        count += partition->sync_queue[i].segment >= 0 && partition->sync_queue[i].segment < segment;
    return count;
}

/* Segments that were deleted before they were flushed: no flush covers them, their files are
 * closed, and they are not dirty. Files queued before a flush began wait until it is done. */
TEST(deleted_segments_are_not_flushed)
{
    for (int running = 0; running < 2; running++) {
        log_fresh();
        struct mqd_log_options options = log_options();
        options.segment_bytes = 1000;
        struct mqd_partition *partition = log_open(&options, NULL);
        struct mqd_sync_fd fds[4];
        for (int i = 0; i < 6; i++)
            CHECK_EQUAL(log_append(partition, (struct log_batch){.body_bytes = 900}), 0);
        int64_t batch_bytes = mqd_partition_dirty_bytes(partition) / 6;
        if (running)
            CHECK_EQUAL(mqd_partition_sync_begin(partition, fds), 4);
        uint32_t queued = partition->sync_queue_count;
        CHECK(queued_before(partition, 4) >= 4);
        CHECK_EQUAL(mqd_partition_advance_start(partition, 4), 1);
        if (running) {
            CHECK_EQUAL(partition->sync_queue_count, queued);
            mqd_partition_sync_done(partition, 0);
        }
        CHECK_EQUAL(queued_before(partition, 4), 0);
        CHECK_EQUAL(mqd_partition_dirty_bytes(partition), 2 * batch_bytes);
        while (mqd_partition_sync_begin(partition, fds) > 0)
            mqd_partition_sync_done(partition, 0);
        CHECK_EQUAL(mqd_partition_dirty_bytes(partition), 0);
        CHECK_EQUAL(log_positions(partition).durable_offset, 6);
        CHECK_EQUAL(log_append(partition, (struct log_batch){.body_bytes = 900}), 0);
        mqd_partition_close(partition, 0);
    }
}

TEST(preallocation_runs_ahead_and_is_trimmed)
{
    log_fresh();
    struct mqd_log_options options = log_options();
    options.segment_bytes = 3 << 20;
    struct mqd_partition *partition = log_open(&options, NULL);
    struct mqd_preallocation job;
    CHECK(!mqd_partition_preallocate_begin(partition, &job)); /* nothing written yet */
    CHECK_EQUAL(log_append(partition, (struct log_batch){.body_bytes = 1000}), 0);
    CHECK(mqd_partition_preallocate_begin(partition, &job));
    CHECK_EQUAL(job.offset, 1061);
    CHECK_EQUAL(job.offset + job.size_bytes, 69632);
    CHECK(!mqd_partition_preallocate_begin(partition, &job)); /* one at a time */
    CHECK_EQUAL(mqd_file_fallocate(job.fd, FALLOC_FL_KEEP_SIZE, job.offset, job.size_bytes), 0);
    mqd_partition_preallocate_done(partition, 0);
    CHECK(log_blocks_bytes(0) >= 69632);
    CHECK_EQUAL(log_file_bytes(0, ".log"), 1061);
    int64_t last = 65536;
    for (int i = 0; i < 60 && partition->segment_count == 1; i++) {
        CHECK_EQUAL(log_append(partition, (struct log_batch){.body_bytes = 50000}), 0);
        if (!mqd_partition_preallocate_begin(partition, &job))
            continue;
        CHECK(job.offset + job.size_bytes <= (3 << 20));
        CHECK(job.size_bytes >= last || job.offset + job.size_bytes == (3 << 20));
        last = job.size_bytes;
        CHECK_EQUAL(mqd_file_fallocate(job.fd, FALLOC_FL_KEEP_SIZE, job.offset, job.size_bytes), 0);
        mqd_partition_preallocate_done(partition, 0);
    }
    CHECK(last > 65536);
    CHECK_EQUAL(mqd_partition_roll(partition, NOW), 0);
    CHECK(log_blocks_bytes(0) <= log_file_bytes(0, ".log") + 8192);
    /* idle */
    int64_t base = partition->active.base_offset;
    CHECK_EQUAL(log_append(partition, (struct log_batch){.body_bytes = 1000}), 0);
    CHECK(mqd_partition_preallocate_begin(partition, &job));
    CHECK_EQUAL(mqd_file_fallocate(job.fd, FALLOC_FL_KEEP_SIZE, job.offset, job.size_bytes), 0);
    mqd_partition_preallocate_done(partition, 0);
    CHECK(log_blocks_bytes(base) >= 65536);
    CHECK(!mqd_partition_release_due(partition, NOW + 10000));
    CHECK(mqd_partition_release_due(partition, NOW + 10001));
    mqd_partition_release_idle(partition, NOW + 60000);
    CHECK(!mqd_partition_release_due(partition, NOW + 120000)); /* it has nothing more to release */
    CHECK(log_blocks_bytes(base) <= 8192);
    CHECK(!mqd_partition_preallocate_begin(partition, &job)); /* until it is written to again */
    mqd_partition_close(partition, 0);
}

/* A partition with one batch, and the preallocation that the helper thread has begun for it. */
static void open_while_space_is_reserved(struct mqd_partition **partition, struct mqd_preallocation *job)
{
    log_fresh();
    struct mqd_log_options options = log_options();
    *partition = log_open(&options, NULL);
    CHECK_EQUAL(log_append(*partition, (struct log_batch){.mark = 0}), 0);
    CHECK(mqd_partition_preallocate_begin(*partition, job));
}

/* Otherwise the reactor would try every second, and never be idle. */
TEST(what_a_disk_refuses_to_release_is_tried_again_later)
{
    struct mqd_partition *partition;
    struct mqd_preallocation job;
    open_while_space_is_reserved(&partition, &job);
    CHECK(!mqd_partition_release_due(partition, NOW + 20000)); /* while the helper thread reserves more */
    CHECK_EQUAL(mqd_file_fallocate(job.fd, FALLOC_FL_KEEP_SIZE, job.offset, job.size_bytes), 0);
    mqd_partition_preallocate_done(partition, 0);
    CHECK_EQUAL(mqd_file_watch(NULL, "truncate:EIO:.log:count=1"), 0);
    CHECK(mqd_partition_release_due(partition, NOW + 20000));
    mqd_partition_release_idle(partition, NOW + 20000);
    CHECK(log_blocks_bytes(0) >= 65536);
    CHECK(!mqd_partition_release_due(partition, NOW + 30000));
    CHECK(mqd_partition_release_due(partition, NOW + 30001));
    mqd_partition_release_idle(partition, NOW + 30001);
    CHECK(log_blocks_bytes(0) <= 8192);
    CHECK_EQUAL(mqd_file_watch(NULL, NULL), 0);
    mqd_partition_close(partition, 0);
}

/* The helper thread may still be running when the segment is sealed. */
TEST(preallocation_outlives_a_roll)
{
    struct mqd_partition *partition;
    struct mqd_preallocation job;
    open_while_space_is_reserved(&partition, &job);
    CHECK_EQUAL(mqd_partition_roll(partition, NOW), 0);
    CHECK_EQUAL(log_sync(partition), 0);
    CHECK_EQUAL(mqd_file_fallocate(job.fd, FALLOC_FL_KEEP_SIZE, job.offset, job.size_bytes), 0);
    mqd_partition_preallocate_done(partition, 0);
    CHECK(log_blocks_bytes(0) <= 8192);
    CHECK_EQUAL(log_file_bytes(0, ".log"), 125);
    CHECK_EQUAL(log_append(partition, (struct log_batch){.mark = 0}), 0);
    CHECK(mqd_partition_preallocate_begin(partition, &job));
    mqd_partition_preallocate_done(partition, ENOSPC);
    CHECK_EQUAL(log_append(partition, (struct log_batch){.mark = 0}), 0);
    CHECK(!mqd_partition_preallocate_begin(partition, &job)); /* a pause after a full disk */
    mqd_partition_close(partition, 0);
}

TEST(advancing_the_start_drops_whole_segments)
{
    log_fresh();
    struct mqd_log_options options = log_options();
    options.segment_bytes = 1000;
    struct mqd_partition *partition = log_open(&options, NULL);
    for (int i = 0; i < 20; i++)
        CHECK_EQUAL(log_append(partition, (struct log_batch){.mark = (uint64_t)i}), 0);
    CHECK_EQUAL(log_sync(partition), 0);
    CHECK_EQUAL(partition->segment_count, 3); /* 0, 8, 16 */
    CHECK_EQUAL(mqd_partition_advance_start(partition, 7), 0);
    CHECK_EQUAL(log_positions(partition).log_start_offset, 7);
    CHECK_EQUAL(mqd_partition_advance_start(partition, 8), 1);
    CHECK_EQUAL(partition->segments[0], 8);
    CHECK_EQUAL(mqd_partition_advance_start(partition, 3), 0); /* never decreases */
    CHECK_EQUAL(mqd_partition_roll(partition, NOW), 0);
    CHECK_EQUAL(mqd_partition_advance_start(partition, 1000), 1);
    struct mqd_positions at = log_positions(partition);
    CHECK_EQUAL(at.log_start_offset, 20);
    CHECK_EQUAL(at.high_watermark, 20);
    CHECK_EQUAL(at.high_watermark_segment, 20);
    CHECK_EQUAL(at.high_watermark_position, 0);
    CHECK_EQUAL(partition->segment_count, 1);
    mqd_partition_close(partition, 0);
}
