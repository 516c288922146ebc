/* Appending to a disk that fails at any call: all or nothing, and the remaining state. */
#define LOG_TEST_IN_MEMORY
#include "mqd_log_test.h"

#include <dirent.h>

#include "log/partition_follow.h"

static struct log_batch numbered(uint64_t mark, int32_t sequence)
{
    return (struct log_batch){.mark = mark, .producer_id = 9, .base_sequence = sequence, .body_bytes = 200};
}

static const struct log_batch plain = {.body_bytes = 200};

/* To be written before the next call, which reuses the memory. */
static void stage_numbered(struct mqd_partition *partition, int32_t count, int32_t first_sequence)
{
    static uint8_t bytes[30][512];
    for (int32_t i = 0; i < count; i++)
        CHECK_EQUAL(log_stage(partition, bytes[i], numbered((uint64_t)i, first_sequence + i), NULL), 0);
}

TEST(a_full_disk_leaves_everything_as_before)
{
    log_fresh();
    struct mqd_log_options options = log_options();
    struct mqd_partition *partition = log_open(&options, NULL);
    CHECK_EQUAL(log_append(partition, numbered(1, 0)), 0);
    static uint8_t bytes[512];
    struct mqd_stage_result result;
    bool rolled;
    for (int budget = 0; budget < 783; budget += 29) { /* short by any amount, in any batch */
        char rule[64];
        snprintf(rule, sizeof rule, "write:ENOSPC:.log:budget=%d", budget);
        CHECK_EQUAL(mqd_file_watch(NULL, rule), 0);
        stage_numbered(partition, 3, 1);
        CHECK_EQUAL(mqd_partition_write(partition, NOW, &rolled), -1);
        CHECK_EQUAL(errno, ENOSPC);
        CHECK_EQUAL(mqd_partition_staged_count(partition), 0);
        CHECK_EQUAL(log_file_bytes(0, ".log"), 261);
        CHECK_EQUAL(mqd_partition_log_end_offset(partition), 1);
    }
    mqd_file_watch(NULL, NULL);
    /* the producer's retry is not a duplicate, and its sequence number is still valid */
    CHECK_EQUAL(log_stage(partition, bytes, numbered(0, 1), &result), 0);
    CHECK(!result.duplicate);
    CHECK_EQUAL(result.base_offset, 1);
    CHECK_EQUAL(mqd_partition_write(partition, NOW, &rolled), 0);
    CHECK_EQUAL(log_stage(partition, bytes, numbered(0, 1), &result), 0);
    CHECK(result.duplicate);
    CHECK_EQUAL(log_verify(partition, NULL), 2);
    mqd_partition_close(partition, 0);
}

TEST(short_writes_are_completed)
{
    log_fresh();
    struct mqd_log_options options = log_options();
    struct mqd_partition *partition = log_open(&options, NULL);
    bool rolled;
    CHECK_EQUAL(mqd_file_watch(NULL, "write:SHORT:.log:bytes=7:count=30,write:SHORT:.log:bytes=100"), 0);
    stage_numbered(partition, 20, 0);
    CHECK_EQUAL(mqd_partition_write(partition, NOW, &rolled), 0);
    mqd_file_watch(NULL, NULL);
    CHECK_EQUAL(log_verify(partition, NULL), 20);
    mqd_partition_close(partition, 0);
}

/* A write over several segments that fails at its nth system call, for every n, whatever the
 * call: all or nothing. */
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
            bool rolled;
            for (int i = 0; i < 4; i++)
                CHECK_EQUAL(log_append(partition, numbered((uint64_t)i, i)), 0);
            stage_numbered(partition, 30, 4);
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
                    CHECK(log_file_bytes(base, ".log") == -1 && log_file_bytes(base, ".index") == -1 &&
                          log_file_bytes(base, ".timeindex") == -1);
                stage_numbered(partition, 30, 4);
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

/* A segment that was created and cannot be deleted again, where that needs space too: the log
 * does not continue beside it, since a clean start would take it for the last one. */
TEST(a_log_stops_when_a_new_segment_cannot_be_deleted_again)
{
    static const char *const rules[] = {"write:ENOSPC:001.log", "write:ENOSPC:001.log,unlink:ENOSPC:001.log",
                                        "write:ENOSPC:002.log,unlink:ENOSPC:001.log"};
    for (int i = 0; i < 3; i++) {
        log_fresh();
        struct mqd_log_options options = log_options();
        options.segment_bytes = 300;
        struct mqd_partition *partition = log_open(&options, NULL);
        bool rolled;
        CHECK_EQUAL(log_append(partition, numbered(1, 0)), 0);
        stage_numbered(partition, 2, 1);
        CHECK_EQUAL(mqd_file_watch(NULL, rules[i]), 0);
        CHECK_EQUAL(mqd_partition_write(partition, NOW, &rolled), -1);
        CHECK_EQUAL(errno, ENOSPC);
        mqd_file_watch(NULL, NULL);
        CHECK_EQUAL(mqd_partition_log_end_offset(partition), 1);
        CHECK_EQUAL(partition->segment_count, 1);
        bool fenced = mqd_partition_fenced(partition);
        options.segment_bytes = 1 << 20;
        mqd_partition_set_options(partition, &options);
        for (int k = 1; k < 4 && !fenced; k++)
            CHECK_EQUAL(log_append(partition, numbered((uint64_t)k, k)), 0);
        CHECK_EQUAL(mqd_partition_close(partition, 1), fenced ? -1 : 0);
        struct mqd_recovery recovery = log_untrusted();
        recovery.clean_shutdown = !fenced;
        partition = log_open(&options, &recovery);
        CHECK_EQUAL(recovery.log_end_offset, fenced ? i : 4);
        CHECK_EQUAL(log_verify(partition, NULL), fenced ? i : 4);
        CHECK_EQUAL(fenced, i > 0);
        mqd_partition_close(partition, 0);
    }
}

/* The same while the queue of files that wait for a sync is full: its last mark must not refer
 * to undone data. */
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

static uint32_t descriptors(void)
{
    uint32_t count = 0;
    DIR *directory = opendir("/proc/self/fd");
    while (readdir(directory))
        count++;
    closedir(directory);
    return count;
}

/* More sealed segments than wait for a flush: the next one is flushed by its roll, which fails
 * at its index, its .timeindex or its .log. Its .txnindex is open, too. */
TEST(a_roll_that_fails_to_flush_leaves_no_descriptor_behind)
{
    static const char *const rules[] = {"sync:EIO:.index", "sync:EIO:.timeindex", "sync:EIO:.log"};
    for (int i = 0; i < 3; i++) {
        log_fresh();
        struct mqd_log_options options = log_options();
        options.index_interval_bytes = 50;
        uint32_t before = descriptors();
        struct mqd_partition *partition = log_open(&options, NULL);
        for (int32_t k = 0; partition->sync_queue_count < MQD_SYNC_QUEUE_MAX; k++) {
            CHECK_EQUAL(log_append(partition, numbered(0, k)), 0);
            CHECK_EQUAL(mqd_partition_roll(partition, NOW), 0);
        }
        CHECK_EQUAL(log_append(partition, (struct log_batch){.producer_id = 7, .attributes = 0x10, .body_bytes = 200}),
                    0);
        CHECK_EQUAL(log_append(partition, (struct log_batch){.producer_id = 7, .marker = 1}), 0);
        CHECK(partition->active.txn_index.fd >= 0);
        CHECK_EQUAL(mqd_file_watch(NULL, rules[i]), 0);
        CHECK_EQUAL(mqd_partition_roll(partition, NOW), -1);
        mqd_file_watch(NULL, NULL);
        CHECK(mqd_partition_fenced(partition));
        mqd_partition_close(partition, 0);
        CHECK_EQUAL(descriptors(), before);
    }
}

/* The .log whose flush is in progress is sealed by a write that then finds the disk full.
 * Descriptor numbers below its own are free, and one of them is reused: the flush still covers this
 * file and no other. */
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
        CHECK_EQUAL(log_append(partition, plain), 0);
        int count = mqd_partition_sync_begin(partition, fds), fd = fds[count - 1].fd;
        CHECK(count >= 1 && count < 4);
        for (int i = 0; i < count; i++)
            fd = fds[i].is_directory ? fd : fds[i].fd;
        CHECK_EQUAL(fd, partition->active.fd);
        CHECK(fstat(fd, &before) == 0);
        close(low);
        CHECK_EQUAL(mqd_file_watch(NULL, round % 2
                                             ? "write:ENOSPC:001.log,open:EMFILE:000.log,open:EMFILE:timeindex:after=1"
                                             : "write:ENOSPC:001.log"),
                    0);
        CHECK_EQUAL(log_append(partition, plain), -2);
        CHECK_EQUAL(errno, ENOSPC);
        int other = open(log_root, O_RDONLY | O_DIRECTORY); /* reuses any closed number */
        CHECK_EQUAL(partition->active.fd, fd);
        CHECK_OR(fstat(fd, &after) == 0 && after.st_ino == before.st_ino,
                 fprintf(stderr, "another file has its number\n"));
        mqd_file_watch(NULL, NULL);
        /* the next roll succeeds while that flush is still under way, and retention takes the
         * segment */
        if (round >= 2)
            CHECK_EQUAL(log_append(partition, plain), 0);
        CHECK_EQUAL(mqd_partition_advance_start(partition, round >= 2 ? 1 : 0), round >= 2);
        CHECK(fstat(fd, &after) == 0 && after.st_ino == before.st_ino);
        for (int i = 0; i < count; i++)
            CHECK_EQUAL(mqd_file_sync(fds[i].fd, fds[i].is_directory), 0);
        mqd_partition_sync_done(partition, 0);
        CHECK_EQUAL(log_positions(partition).durable_offset, 1);
        CHECK_EQUAL(log_append(partition, plain), 0);
        CHECK_EQUAL(log_sync(partition), 0);
        CHECK_EQUAL(log_positions(partition).durable_offset, round >= 2 ? 3 : 2);
        CHECK_EQUAL(log_verify(partition, NULL), round >= 2 ? 3 : 2);
        mqd_partition_close(partition, 1);
        close(other);
    }
}

/* An epoch whose first batch was refused is not recorded: a follower that names it to a leader
 * which does not know it would never agree with that leader. */
TEST(a_refused_batch_leaves_no_leader_epoch)
{
    static const char *const rules[] = {"write:ENOSPC:.log", "write:ENOSPC", "write:ENOSPC:leader-epoch",
                                        "write:ENOSPC:001.log", "rename:ENOSPC"};
    for (uint32_t i = 0; i < sizeof rules / sizeof rules[0]; i++) {
        log_fresh();
        struct mqd_log_options options = log_options();
        options.segment_bytes = i == 3 ? 300 : 1 << 20;
        struct mqd_partition *partition = log_open(&options, NULL);
        uint32_t count;
        mqd_partition_set_leader_epoch(partition, 4);
        CHECK_EQUAL(log_append(partition, plain), 0);
        mqd_partition_set_leader_epoch(partition, 5);
        CHECK_EQUAL(mqd_file_watch(NULL, rules[i]), 0);
        CHECK_EQUAL(log_append(partition, plain), -2);
        mqd_file_watch(NULL, NULL);
        CHECK_EQUAL(mqd_partition_epochs(partition, &count)[0].epoch, 4);
        CHECK_EQUAL(count, 1);
        mqd_partition_set_leader_epoch(partition, 6);
        CHECK_EQUAL(log_append(partition, plain), 0);
        mqd_partition_close(partition, 1);
        struct mqd_epochs stored = {0};
        CHECK_EQUAL(mqd_epochs_load(&stored, log_path), 1);
        CHECK(stored.count == 2 && stored.entries[0].epoch == 4 && stored.entries[1].epoch == 6 &&
              stored.entries[1].start_offset == 1);
        mqd_epochs_free(&stored);
    }
}

/* ... however often it is retried, and whatever flush is in progress: no more files wait for a
 * flush, and the write itself never flushes. */
TEST(a_batch_that_is_refused_repeatedly_does_not_fill_the_queue)
{
    for (int syncing = 0; syncing < 2; syncing++) {
        log_fresh();
        struct mqd_log_options options = log_options();
        struct mqd_partition *partition = log_open(&options, NULL);
        struct mqd_sync_fd fds[4];
        int count = 0;
        mqd_partition_set_leader_epoch(partition, 4);
        CHECK_EQUAL(log_append(partition, plain), 0);
        if (syncing)
            CHECK((count = mqd_partition_sync_begin(partition, fds)) > 0);
        mqd_partition_set_leader_epoch(partition, 5);
        CHECK_EQUAL(mqd_file_watch(NULL, "write:ENOSPC:.log,sync:EIO"), 0);
        for (int i = 0; i < 3 * MQD_SYNC_QUEUE_MAX; i++)
            CHECK_EQUAL(log_append(partition, plain), -2);
        CHECK_EQUAL(mqd_file_watch(NULL, NULL), 0);
        CHECK(!mqd_partition_fenced(partition));
        CHECK_EQUAL(partition->sync_queue_count, 1 + syncing);
        for (int i = 0; i < count; i++)
            CHECK_EQUAL(mqd_file_sync(fds[i].fd, fds[i].is_directory), 0);
        mqd_partition_sync_done(partition, 0);
        CHECK_EQUAL(log_append(partition, plain), 0);
        CHECK_EQUAL(log_sync(partition), 0);
        CHECK_EQUAL(log_positions(partition).durable_offset, 2);
        mqd_partition_close(partition, 1);
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

TEST(when_the_file_cannot_be_truncated_the_partition_is_fenced)
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
