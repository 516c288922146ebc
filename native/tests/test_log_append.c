/* Appending: offsets, bytes on disk, rolling, positions, flushing, preallocation, and what a refusing disk leaves behind. */
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
        CHECK_EQUAL(log_stage(partition, bytes, (struct log_batch){.timestamp_ms = 5, .mark = mark, .body_bytes = 1000}, &result), 0);
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

TEST(refuses_what_it_must)
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
    CHECK_EQUAL(mqd_partition_stage(partition, &batch, bytes, true, MQD_STAGE_COORDINATOR, 0, NOW - 100000000, &result), 0); /* its clock may be another host's */
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

TEST(full_staging_area_asks_for_a_write)
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
    CHECK_EQUAL(log_append(partition, (struct log_batch){.timestamp_ms = NOW - 5000}), 0); /* older: not by record time */
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
    CHECK(fds[2].directory);
    CHECK_EQUAL(log_append(partition, (struct log_batch){.record_count = 1}), 0); /* after the begin: not covered (P4) */
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
    options.flush_on_ack = 1; /* never back */
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

/* More segments sealed than the queue of waiting files holds: the write blocks in a flush, durable stays behind what was covered, nothing leaks. */
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
    mqd_partition_expire_producers(partition, NOW + 60000);
    CHECK(log_blocks_bytes(base) <= 8192);
    CHECK(!mqd_partition_preallocate_begin(partition, &job)); /* until it is written to again */
    mqd_partition_close(partition, 0);
}

/* The helper thread may still be at it when the segment is sealed. */
TEST(preallocation_outlives_a_roll)
{
    log_fresh();
    struct mqd_log_options options = log_options();
    struct mqd_partition *partition = log_open(&options, NULL);
    struct mqd_preallocation job;
    CHECK_EQUAL(log_append(partition, (struct log_batch){.mark = 0}), 0);
    CHECK(mqd_partition_preallocate_begin(partition, &job));
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
    CHECK_EQUAL(mqd_partition_advance_start(partition, 3), 0); /* never back */
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

/* ---- the disk refuses --------------------------------------------------------------------------------------------- */

static struct log_batch numbered(uint64_t mark, int32_t sequence)
{
    return (struct log_batch){.mark = mark, .producer_id = 9, .base_sequence = sequence, .body_bytes = 200};
}

TEST(a_full_disk_leaves_everything_as_before)
{
    log_fresh();
    struct mqd_log_options options = log_options();
    struct mqd_partition *partition = log_open(&options, NULL);
    CHECK_EQUAL(log_append(partition, numbered(1, 0)), 0);
    static uint8_t bytes[3][512];
    struct mqd_stage_result result;
    bool rolled;
    for (int budget = 0; budget < 783; budget += 29) { /* short by any amount, in any batch */
        char rule[64];
        snprintf(rule, sizeof rule, "write:ENOSPC:.log:budget=%d", budget);
        CHECK_EQUAL(mqd_file_watch(NULL, rule), 0);
        for (int i = 0; i < 3; i++)
            CHECK_EQUAL(log_stage(partition, bytes[i], numbered((uint64_t)i, 1 + i), NULL), 0);
        CHECK_EQUAL(mqd_partition_write(partition, NOW, &rolled), -1);
        CHECK_EQUAL(errno, ENOSPC);
        CHECK_EQUAL(mqd_partition_staged_count(partition), 0);
        CHECK_EQUAL(log_file_bytes(0, ".log"), 261);
        CHECK_EQUAL(mqd_partition_log_end_offset(partition), 1);
    }
    mqd_file_watch(NULL, NULL);
    /* the producer's retry is no duplicate, and its sequence still fits */
    CHECK_EQUAL(log_stage(partition, bytes[0], numbered(0, 1), &result), 0);
    CHECK(!result.duplicate);
    CHECK_EQUAL(result.base_offset, 1);
    CHECK_EQUAL(mqd_partition_write(partition, NOW, &rolled), 0);
    CHECK_EQUAL(log_stage(partition, bytes[0], numbered(0, 1), &result), 0);
    CHECK(result.duplicate);
    CHECK_EQUAL(log_verify(partition, NULL), 2);
    mqd_partition_close(partition, 0);
}

TEST(short_writes_are_completed)
{
    log_fresh();
    struct mqd_log_options options = log_options();
    struct mqd_partition *partition = log_open(&options, NULL);
    static uint8_t bytes[20][512];
    bool rolled;
    CHECK_EQUAL(mqd_file_watch(NULL, "write:SHORT:.log:bytes=7:count=30,write:SHORT:.log:bytes=100"), 0);
    for (int i = 0; i < 20; i++)
        CHECK_EQUAL(log_stage(partition, bytes[i], numbered((uint64_t)i, i), NULL), 0);
    CHECK_EQUAL(mqd_partition_write(partition, NOW, &rolled), 0);
    mqd_file_watch(NULL, NULL);
    CHECK_EQUAL(log_verify(partition, NULL), 20);
    mqd_partition_close(partition, 0);
}

/* A write over several segments that fails at its nth system call, for every n, whatever the call: all or nothing. */
TEST(a_write_over_segments_is_undone_at_every_step)
{
    static const char *const calls[] = {"write", "open"};
    for (int call = 0; call < 2; call++)
        for (int after = 0, done = 0; !done; after++) {
            log_fresh();
            struct mqd_log_options options = log_options();
            options.segment_bytes = 2000;
            options.index_interval_bytes = 300;
            struct mqd_partition *partition = log_open(&options, NULL);
            static uint8_t bytes[30][512];
            bool rolled;
            for (int i = 0; i < 4; i++)
                CHECK_EQUAL(log_append(partition, numbered((uint64_t)i, i)), 0);
            for (int i = 0; i < 30; i++)
                CHECK_EQUAL(log_stage(partition, bytes[i], numbered((uint64_t)i, 4 + i), NULL), 0);
            char rule[64];
            snprintf(rule, sizeof rule, "%s:ENOSPC::after=%d:count=1", calls[call], after);
            CHECK_EQUAL(mqd_file_watch(NULL, rule), 0);
            done = mqd_partition_write(partition, NOW, &rolled) == 0;
            int error = errno;
            mqd_file_watch(NULL, NULL);
            if (!done) {
                CHECK_EQUAL(error, ENOSPC);
                CHECK_EQUAL(mqd_partition_log_end_offset(partition), 4);
                CHECK_EQUAL(partition->segment_count, 1);
                CHECK_EQUAL(log_file_bytes(0, ".log"), 4 * 261);
                CHECK_EQUAL(log_verify(partition, NULL), 4);
                for (int64_t base = 1; base < 40; base++)
                    CHECK(log_file_bytes(base, ".log") == -1 && log_file_bytes(base, ".index") == -1 && log_file_bytes(base, ".timeindex") == -1);
                for (int i = 0; i < 30; i++)
                    CHECK_EQUAL(log_stage(partition, bytes[i], numbered((uint64_t)i, 4 + i), NULL), 0);
                CHECK_EQUAL(mqd_partition_write(partition, NOW, &rolled), 0);
            }
            CHECK(rolled);
            CHECK_EQUAL(log_verify(partition, NULL), 34);
            CHECK_EQUAL(log_sync(partition), 0);
            CHECK_EQUAL(log_positions(partition).durable_offset, 34);
            mqd_partition_close(partition, 0);
            CHECK(after < 200);
        }
}

/* The same while the queue of files that wait for a sync is full: its last mark must not tell of what was undone. */
TEST(an_undone_write_leaves_no_mark_behind)
{
    for (int after = 0; after < 30; after++) {
        log_fresh();
        struct mqd_log_options options = log_options();
        options.segment_bytes = 1000;
        struct mqd_partition *partition = log_open(&options, NULL);
        static uint8_t bytes[9][1024];
        bool rolled;
        for (int i = 0; i < 20; i++)
            CHECK_EQUAL(log_append(partition, (struct log_batch){.body_bytes = 900}), 0);
        CHECK_EQUAL(partition->sync_queue_count, MQD_SYNC_QUEUE_MAX);
        for (int i = 0; i < 9; i++)
            CHECK_EQUAL(log_stage(partition, bytes[i], (struct log_batch){.body_bytes = 900}, NULL), 0);
        char rule[64];
        snprintf(rule, sizeof rule, "write:ENOSPC::after=%d:count=1", after);
        CHECK_EQUAL(mqd_file_watch(NULL, rule), 0);
        bool failed = mqd_partition_write(partition, NOW, &rolled) < 0;
        mqd_file_watch(NULL, NULL);
        CHECK_EQUAL(mqd_partition_log_end_offset(partition), failed ? 20 : 29);
        struct mqd_sync_fd fds[4];
        while (mqd_partition_sync_begin(partition, fds) > 0) {
            mqd_partition_sync_done(partition, 0);
            CHECK(log_positions(partition).durable_offset <= (failed ? 20 : 29));
        }
        CHECK_EQUAL(log_positions(partition).durable_offset, failed ? 20 : 29);
        CHECK_EQUAL(log_verify(partition, NULL), failed ? 20 : 29);
        mqd_partition_close(partition, 0);
    }
}

/* The .log whose flush is under way is sealed by a write that then finds the disk full. Numbers below its own are free, and one below them is taken: the flush still covers it, no other file. */
TEST(an_undone_roll_keeps_the_file_that_is_being_flushed)
{
    for (int round = 0; round < 4; round++) {
        log_fresh();
        struct mqd_log_options options = log_options();
        options.segment_bytes = 300;
        int low = dup(0);
        struct mqd_partition *partition = log_open(&options, NULL);
        struct mqd_sync_fd fds[4];
        struct stat before, after;
        CHECK_EQUAL(log_append(partition, (struct log_batch){.body_bytes = 200}), 0);
        int count = mqd_partition_sync_begin(partition, fds), fd = fds[count - 1].fd;
        CHECK(count >= 1 && count < 4);
        for (int i = 0; i < count; i++)
            fd = fds[i].directory ? fd : fds[i].fd;
        CHECK_EQUAL(fd, partition->active.fd);
        CHECK(fstat(fd, &before) == 0);
        close(low);
        CHECK_EQUAL(mqd_file_watch(NULL, round % 2 ? "write:ENOSPC:001.log,open:EMFILE:000.log,open:EMFILE:timeindex:after=1" : "write:ENOSPC:001.log"), 0);
        CHECK_EQUAL(log_append(partition, (struct log_batch){.body_bytes = 200}), -2);
        CHECK_EQUAL(errno, ENOSPC);
        int other = open(log_root, O_RDONLY | O_DIRECTORY); /* takes any number that was let go */
        CHECK_EQUAL(partition->active.fd, fd);
        CHECK_OR(fstat(fd, &after) == 0 && after.st_ino == before.st_ino, fprintf(stderr, "another file has its number\n"));
        mqd_file_watch(NULL, NULL);
        if (round >= 2) /* the next roll succeeds while that flush is still under way, and retention takes the segment */
            CHECK_EQUAL(log_append(partition, (struct log_batch){.body_bytes = 200}), 0);
        CHECK_EQUAL(mqd_partition_advance_start(partition, round >= 2 ? 1 : 0), round >= 2);
        CHECK(fstat(fd, &after) == 0 && after.st_ino == before.st_ino);
        for (int i = 0; i < count; i++)
            CHECK_EQUAL(mqd_file_sync(fds[i].fd, fds[i].directory), 0);
        mqd_partition_sync_done(partition, 0);
        CHECK_EQUAL(log_positions(partition).durable_offset, 1);
        CHECK_EQUAL(log_append(partition, (struct log_batch){.body_bytes = 200}), 0);
        CHECK_EQUAL(log_sync(partition), 0);
        CHECK_EQUAL(log_positions(partition).durable_offset, round >= 2 ? 3 : 2);
        CHECK_EQUAL(log_verify(partition, NULL), round >= 2 ? 3 : 2);
        mqd_partition_close(partition, 1);
        close(other);
    }
}

TEST(an_index_without_space_is_thinned_not_fatal)
{
    log_fresh();
    struct mqd_log_options options = log_options();
    options.index_interval_bytes = 100;
    struct mqd_partition *partition = log_open(&options, NULL);
    CHECK_EQUAL(mqd_file_watch(NULL, "write:ENOSPC:index"), 0);
    for (int i = 0; i < 300; i++)
        CHECK_EQUAL(log_append(partition, (struct log_batch){.mark = (uint64_t)i, .timestamp_ms = NOW + i}), 0);
    CHECK_EQUAL(mqd_partition_roll(partition, NOW), -1); /* sealing needs the index: retriable */
    CHECK_EQUAL(errno, ENOSPC);
    mqd_file_watch(NULL, NULL);
    CHECK_EQUAL(log_append(partition, (struct log_batch){.mark = 300}), 0);
    CHECK_EQUAL(mqd_partition_roll(partition, NOW), 0);
    CHECK(log_file_bytes(0, ".index") >= 8);
    CHECK_EQUAL(log_verify(partition, NULL), 301);
    struct mqd_time_index_entry entry;
    CHECK_EQUAL(mqd_time_index_lookup(log_path, 0, INT64_MAX, &entry), 1);
    CHECK_EQUAL(entry.timestamp_ms, NOW + 299);
    mqd_partition_close(partition, 0);
}

TEST(an_index_io_error_fences)
{
    log_fresh();
    struct mqd_log_options options = log_options();
    options.index_interval_bytes = 100;
    struct mqd_partition *partition = log_open(&options, NULL);
    CHECK_EQUAL(mqd_file_watch(NULL, "write:EIO:timeindex"), 0);
    int error = 0;
    for (int i = 0; i < 300 && error == 0; i++)
        error = log_append(partition, (struct log_batch){.mark = (uint64_t)i, .timestamp_ms = NOW + i});
    mqd_file_watch(NULL, NULL);
    CHECK_EQUAL(error, -2);
    CHECK_EQUAL(log_append(partition, (struct log_batch){.mark = 0}), 56);
    mqd_partition_close(partition, 0);
}

TEST(when_the_file_cannot_be_cut_back_the_partition_is_fenced)
{
    log_fresh();
    struct mqd_log_options options = log_options();
    struct mqd_partition *partition = log_open(&options, NULL);
    CHECK_EQUAL(log_append(partition, (struct log_batch){.mark = 0}), 0);
    CHECK_EQUAL(mqd_file_watch(NULL, "write:ENOSPC:.log:budget=50,truncate:EIO:.log"), 0);
    CHECK_EQUAL(log_append(partition, (struct log_batch){.mark = 0}), -2);
    CHECK_EQUAL(errno, EIO);
    mqd_file_watch(NULL, NULL);
    CHECK_EQUAL(log_append(partition, (struct log_batch){.mark = 0}), 56);
    mqd_partition_close(partition, 0);
    struct mqd_recovery recovery = log_untrusted();
    partition = log_open(&options, &recovery);
    CHECK_EQUAL(recovery.log_end_offset, 1);
    CHECK_EQUAL(recovery.truncated_bytes, 50);
    mqd_partition_close(partition, 0);
}
