/* Opening a log after clean shutdowns, crashes and damage. */
#define LOG_TEST_IN_MEMORY
#include "mqd_log_test.h"

#include "log/recovery/recovery.h"

static void append_count(struct mqd_partition *partition, int count)
{
    for (int i = 0; i < count; i++)
        CHECK_EQUAL(log_append(partition, (struct log_batch){.mark = (uint64_t)i, .timestamp_ms = NOW + i}), 0);
}

/* n batches of 125 bytes in one segment, closed as after a crash. */
static void make_log(const struct mqd_log_options *options, int count)
{
    log_fresh();
    struct mqd_partition *partition = log_open(options, NULL);
    append_count(partition, count);
    CHECK_EQUAL(mqd_partition_close(partition, 0), 0);
}

static void copy_file(const char *from, const char *to, int64_t size_bytes)
{
    uint8_t *bytes = malloc((size_t)size_bytes + 1);
    int fd = open(from, O_RDONLY);
    CHECK_OR(fd >= 0 && read(fd, bytes, (size_t)size_bytes) == size_bytes, (void)0);
    close(fd);
    log_write_file(to, bytes, (size_t)size_bytes);
    free(bytes);
}

TEST(a_new_log_is_empty)
{
    log_fresh();
    struct mqd_log_options options = log_options();
    struct mqd_recovery recovery = log_untrusted();
    struct mqd_partition *partition = log_open(&options, &recovery);
    CHECK_EQUAL(recovery.log_end_offset, 0);
    CHECK_EQUAL(recovery.log_start_offset, 0);
    CHECK_EQUAL(recovery.segment_count, 1);
    CHECK_EQUAL(recovery.last_leader_epoch, -1);
    CHECK_EQUAL(recovery.corrupt_position, -1);
    CHECK_EQUAL(mqd_partition_close(partition, 1), 0);
    recovery.clean_shutdown = 1;
    partition = log_open(&options, &recovery);
    CHECK_EQUAL(recovery.log_end_offset, 0);
    CHECK_EQUAL(mqd_partition_close(partition, 0), 0);
}

/* The last batch torn at every byte; the bytes after the tear missing, zero, or noise. */
TEST(torn_tails_are_cut_at_the_batch)
{
    struct mqd_log_options options = log_options();
    make_log(&options, 5);
    uint8_t whole[5 * 125];
    int fd = open(log_file(0, ".log"), O_RDONLY);
    CHECK_EQUAL(read(fd, whole, sizeof whole), (ssize_t)sizeof whole);
    close(fd);
    for (int kind = 0; kind < 3; kind++)
        for (int torn = 0; torn < 125; torn++) {
            uint8_t damaged[sizeof whole];
            memcpy(damaged, whole, sizeof whole);
            for (int i = 500 + torn; i < 625; i++)
                damaged[i] = kind == 1 ? 0 : (uint8_t)(whole[i] ^ 0xa5);
            if (kind == 1 && memcmp(damaged, whole, sizeof whole) == 0)
                continue;
            log_write_file(log_file(0, ".log"), damaged, kind == 0 ? (size_t)(500 + torn) : sizeof damaged);
            struct mqd_recovery recovery = log_untrusted();
            struct mqd_partition *partition = log_open(&options, &recovery);
            CHECK_EQUAL(recovery.log_end_offset, 4);
            CHECK_EQUAL(recovery.truncated_bytes, kind == 0 ? torn : 125);
            CHECK_EQUAL(recovery.corrupt_position, torn == 0 && kind == 0 ? -1 : 500);
            CHECK_EQUAL(log_file_bytes(0, ".log"), 500);
            append_count(partition, 1);
            CHECK_EQUAL(log_verify(partition, NULL), 5);
            CHECK_EQUAL(mqd_partition_close(partition, 0), 0);
        }
}

/* One flipped bit anywhere except in the two fields that the CRC does not cover. */
TEST(every_flipped_bit_is_found)
{
    struct mqd_log_options options = log_options();
    make_log(&options, 3);
    copy_file(log_file(0, ".log"), "/tmp/mqd-log-copy", 375);
    for (int64_t at = 125; at < 250; at++) {
        copy_file("/tmp/mqd-log-copy", log_file(0, ".log"), 375);
        log_flip(log_file(0, ".log"), at);
        struct mqd_recovery recovery = log_untrusted();
        struct mqd_partition *partition = log_open(&options, &recovery);
        bool in_epoch = at >= 125 + 12 && at < 125 + 16; /* outside the CRC, and any value is valid */
        CHECK_EQUAL(recovery.log_end_offset, in_epoch ? 3 : 1);
        mqd_partition_close(partition, 0);
    }
    unlink("/tmp/mqd-log-copy");
}

TEST(damage_cuts_the_log_and_deletes_later_segments)
{
    struct mqd_log_options options = log_options();
    options.segment_bytes = 1000; /* 8 batches a segment */
    make_log(&options, 40);
    log_flip(log_file(16, ".log"), 3 * 125 + 100);
    struct mqd_recovery recovery = log_untrusted();
    struct mqd_partition *partition = log_open(&options, &recovery);
    CHECK_EQUAL(recovery.log_end_offset, 19);
    CHECK_EQUAL(recovery.corrupt_segment, 16);
    CHECK_EQUAL(recovery.corrupt_position, 375);
    CHECK_EQUAL(recovery.segment_count, 3);
    CHECK_EQUAL(recovery.truncated_bytes, 5 * 125 + 16 * 125);
    CHECK_EQUAL(log_file_bytes(24, ".log"), -1);
    CHECK_EQUAL(log_file_bytes(24, ".timeindex"), -1);
    append_count(partition, 30);
    CHECK_EQUAL(log_verify(partition, NULL), 49);
    mqd_partition_close(partition, 0);
}

/* C5: complete batches after the damage, in its segment or in the next, may have been
 * acknowledged: a log of several replicas is marked, and stays marked. One that is torn at its very
 * end is not. */
TEST(a_truncation_before_valid_batches_is_recorded)
{
    struct mqd_log_options options = log_options();
    options.segment_bytes = 1000;
    const struct {
        int64_t segment;
        int batch;
        bool replicated, noted;
    } cases[] = {{16, 1, true, true}, {16, 3, true, false}, {8, 7, true, true}, {16, 1, false, false}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        make_log(&options, 20);
        log_flip(log_file(cases[i].segment, ".log"), cases[i].batch * 125 + 100);
        char path[PATH_MAX];
        snprintf(path, sizeof path, "%s/" MQD_RECOVERY_SHORTENED, log_path);
        CHECK_EQUAL(access(path, F_OK), -1);
        for (int start = 0; start < 2; start++) {
            struct mqd_recovery recovery = log_untrusted();
            recovery.replicated = cases[i].replicated;
            struct mqd_partition *partition = log_open(&options, &recovery);
            CHECK_EQUAL(recovery.log_end_offset, cases[i].segment + cases[i].batch);
            CHECK_EQUAL(access(path, F_OK), cases[i].noted ? 0 : -1);
            mqd_partition_close(partition, 0);
        }
    }
}

/* C1: below the recovery point nothing is truncated, whatever byte is damaged. */
TEST(damage_below_the_recovery_point_stays)
{
    struct mqd_log_options options = log_options();
    options.segment_bytes = 1000;
    for (int at = 0; at < 125; at++) {
        make_log(&options, 20);
        log_flip(log_file(16, ".log"), 125 + at); /* batch 17 of 16..19 */
        struct mqd_recovery recovery = log_untrusted();
        recovery.recovery_point_offset = 19;
        struct mqd_partition *partition = log_open(&options, &recovery);
        CHECK_EQUAL(recovery.log_end_offset, 20);
        CHECK_EQUAL(recovery.truncated_bytes, 0);
        append_count(partition, 3);
        CHECK_EQUAL(mqd_partition_log_end_offset(partition), 23);
        mqd_partition_close(partition, 0);
    }
    for (int64_t segment = 0; segment <= 8; segment += 8) { /* sealed, trusted */
        make_log(&options, 20);
        log_flip(log_file(segment, ".log"), 70);
        struct mqd_recovery recovery = log_untrusted();
        recovery.recovery_point_offset = 16;
        struct mqd_partition *partition = log_open(&options, &recovery);
        CHECK_EQUAL(recovery.log_end_offset, 20);
        CHECK_EQUAL(recovery.truncated_bytes, 0);
        mqd_partition_close(partition, 0);
    }
}

/* ... and when no complete batch follows the damage, a new segment begins at the recovery
 * point. */
TEST(unreadable_below_the_recovery_point_starts_a_new_segment)
{
    struct mqd_log_options options = log_options();
    make_log(&options, 10);
    uint8_t zeros[3 * 125] = {0};
    int fd = open(log_file(0, ".log"), O_RDWR);
    CHECK_EQUAL(pwrite(fd, zeros, sizeof zeros, 7 * 125), (ssize_t)sizeof zeros);
    close(fd);
    struct mqd_recovery recovery = log_untrusted();
    recovery.recovery_point_offset = 10;
    struct mqd_partition *partition = log_open(&options, &recovery);
    CHECK_EQUAL(recovery.log_end_offset, 10);
    CHECK_EQUAL(recovery.corrupt_position, 875);
    CHECK_EQUAL(recovery.segment_count, 2);
    CHECK_EQUAL(log_file_bytes(0, ".log"), 1250);
    append_count(partition, 2);
    CHECK_EQUAL(mqd_partition_log_end_offset(partition), 12);
    mqd_partition_close(partition, 0);
}

TEST(after_a_process_crash_the_log_ends_at_the_published_end)
{
    struct mqd_log_options options = log_options();
    options.segment_bytes = 1000;
    for (int64_t end = 0; end <= 20; end++) {
        make_log(&options, 20);
        struct mqd_recovery recovery = log_untrusted();
        recovery.trusted_end_offset = end;
        struct mqd_partition *partition = log_open(&options, &recovery);
        CHECK_EQUAL(recovery.log_end_offset, end);
        CHECK_EQUAL(recovery.truncated_bytes, (20 - end) * 125);
        CHECK_EQUAL(log_positions(partition).high_watermark, end);
        append_count(partition, 3);
        CHECK_EQUAL(log_verify(partition, NULL), end + 3);
        mqd_partition_close(partition, 0);
    }
}

/* C2: a log is not opened before everything above the recovery point is on disk; after a failed flush
 * it is written again first. */
TEST(what_recovery_has_found_is_flushed)
{
    struct mqd_log_options options = log_options();
    for (int64_t recovery_point = -1; recovery_point < 5; recovery_point++)
        for (int64_t trusted_end = -1; trusted_end <= 5; trusted_end += 6) {
            make_log(&options, 5);
            struct mqd_recovery recovery = log_untrusted();
            recovery.recovery_point_offset = recovery_point;
            recovery.trusted_end_offset = trusted_end;
            struct mqd_partition *partition;
            for (int rewrite = 0; rewrite < 2; rewrite++) {
                recovery.rewrite = rewrite;
                CHECK_EQUAL(mqd_file_watch(NULL, rewrite ? "write:EIO:.log" : "sync:EIO:.log"), 0);
                partition = mqd_partition_open(log_path, &options, 0, NOW, &recovery);
                mqd_file_watch(NULL, NULL);
                CHECK_OR(!partition, mqd_partition_close(partition, 0); return);
            }
            partition = log_open(&options, &recovery);
            CHECK_EQUAL(recovery.log_end_offset, 5);
            mqd_partition_close(partition, 0);
        }
}

/* A published end that the files do not contain is not trusted. */
TEST(a_wrong_trusted_end_falls_back_to_checking)
{
    struct mqd_log_options options = log_options();
    make_log(&options, 5);
    log_flip(log_file(0, ".log"), 4 * 125 + 80);
    struct mqd_recovery recovery = log_untrusted();
    recovery.trusted_end_offset = 9;
    struct mqd_partition *partition = log_open(&options, &recovery);
    CHECK_EQUAL(recovery.log_end_offset, 4);
    mqd_partition_close(partition, 0);
    log_fresh();
    partition = log_open(&options, NULL);
    CHECK_EQUAL(log_append(partition, (struct log_batch){.record_count = 10}), 0);
    mqd_partition_close(partition, 0);
    recovery = log_untrusted();
    recovery.trusted_end_offset = 5; /* inside a batch */
    partition = log_open(&options, &recovery);
    CHECK_EQUAL(recovery.log_end_offset, 10);
    mqd_partition_close(partition, 0);
}

TEST(a_start_after_a_clean_shutdown_reads_almost_nothing)
{
    struct mqd_log_options options = log_options();
    log_fresh();
    struct mqd_partition *partition = log_open(&options, NULL);
    append_count(partition, 5000);
    CHECK_EQUAL(mqd_partition_close(partition, 1), 0);
    int64_t time_bytes = log_file_bytes(0, ".timeindex"), index_bytes = log_file_bytes(0, ".index");
    struct mqd_recovery recovery = log_untrusted();
    recovery.clean_shutdown = 1;
    partition = log_open(&options, &recovery);
    CHECK_EQUAL(recovery.log_end_offset, 5000);
    CHECK(recovery.scanned_bytes < 10000);
    CHECK_EQUAL(log_file_bytes(0, ".timeindex"), time_bytes);
    CHECK_EQUAL(log_file_bytes(0, ".index"), index_bytes);
    CHECK_EQUAL(log_positions(partition).durable_offset, 5000);
    CHECK_EQUAL(partition->active.first_timestamp_ms, NOW);
    CHECK_EQUAL(partition->active.index.max_timestamp_ms, NOW + 4999);
    append_count(partition, 100);
    CHECK_EQUAL(log_verify(partition, NULL), 5100);
    mqd_partition_close(partition, 0);
}

/* The marker existed, but the file does not match it. */
TEST(a_wrong_marker_is_detected)
{
    struct mqd_log_options options = log_options();
    make_log(&options, 10);
    CHECK_EQUAL(truncate(log_file(0, ".log"), 9 * 125 + 10), 0);
    struct mqd_recovery recovery = log_untrusted();
    recovery.clean_shutdown = 1;
    struct mqd_partition *partition = log_open(&options, &recovery);
    CHECK_EQUAL(recovery.log_end_offset, 9);
    CHECK_EQUAL(log_file_bytes(0, ".log"), 9 * 125);
    mqd_partition_close(partition, 0);
}

static void check_time_index(struct mqd_partition *partition, int count)
{
    for (uint32_t i = 0; i < partition->segment_count; i++) {
        int64_t base = partition->segments[i],
                end = i + 1 < partition->segment_count ? partition->segments[i + 1] : count;
        struct mqd_time_index_entry entry;
        /* timestamps equal offsets here, so the entry must not be after the offset */
        for (int64_t offset = base; offset < end; offset += 7) {
            int found = mqd_time_index_lookup(log_path, base, NOW + offset, &entry);
            CHECK(found >= 0);
            if (found == 1)
                CHECK(entry.timestamp_ms <= NOW + offset && base + entry.relative_offset <= offset);
        }
        if (i + 1 == partition->segment_count)
            break;
        CHECK_EQUAL(mqd_time_index_lookup(log_path, base, INT64_MAX, &entry), 1);
        CHECK_EQUAL(entry.timestamp_ms, NOW + end - 1); /* a sealed segment has its largest timestamp */
    }
}

/* Index files missing, truncated anywhere, zeroed, filled with noise, stale: rebuilt in every
 * mode but clean. */
TEST(index_files_are_rebuilt)
{
    static const char *const suffixes[] = {".index", ".timeindex"};
    struct mqd_log_options options = log_options();
    options.segment_bytes = 20000;
    options.index_interval_bytes = 300;
    for (int mode = 0; mode < 2; mode++)
        for (int which = 0; which < 2; which++)
            for (int damage = 0; damage < 6; damage++)
                for (int64_t segment = 0; segment <= 320; segment += 160) {
                    make_log(&options, 400);
                    const char *path = log_file(segment, suffixes[which]);
                    int64_t size_bytes = log_file_bytes(segment, suffixes[which]);
                    uint8_t noise[4000];
                    memset(noise, damage == 3 ? 0 : 0xee, sizeof noise);
                    if (damage == 0)
                        unlink(path);
                    if (damage == 1 && size_bytes > 0)
                        CHECK_EQUAL(truncate(path, size_bytes / 2 + 3), 0);
                    if (damage == 2)
                        log_write_file(path, "", 0);
                    if (damage == 3 || damage == 4)
                        log_write_file(path, noise, 500);
                    if (damage == 5 && size_bytes > 100) { /* the end lost: zeros */
                        int fd = open(path, O_RDWR);
                        CHECK(pwrite(fd, (uint8_t[48]){0}, 48, size_bytes - 48) == 48);
                        close(fd);
                    }
                    struct mqd_recovery recovery = log_untrusted();
                    recovery.recovery_point_offset = mode == 0 ? -1 : 200;
                    struct mqd_partition *partition = log_open(&options, &recovery);
                    CHECK_EQUAL(recovery.log_end_offset, 400);
                    CHECK_EQUAL(log_verify(partition, NULL), 400);
                    check_time_index(partition, 400);
                    for (uint32_t i = 0; i + 1 < partition->segment_count; i++)
                        CHECK(log_file_bytes(partition->segments[i], ".index") >= 8 * 40);
                    append_count(partition, 50);
                    CHECK_EQUAL(log_verify(partition, NULL), 450);
                    mqd_partition_close(partition, 0);
                }
}

/* A power loss may remove more of the .timeindex than of the .index; the largest timestamp is in
 * the lost part. */
TEST(the_largest_timestamp_is_found_after_a_short_time_index)
{
    struct mqd_log_options options = log_options();
    options.index_interval_bytes = 300;
    for (int64_t kept = 0; kept < 100; kept += 9) {
        log_fresh();
        struct mqd_partition *partition = log_open(&options, NULL);
        for (int i = 0; i < 400; i++)
            CHECK_EQUAL(log_append(partition, (struct log_batch){.mark = (uint64_t)i,
                                                                 .timestamp_ms = NOW + (i < 280 ? i : 400 - i)}),
                        0);
        CHECK_EQUAL(mqd_partition_close(partition, 1), 0);
        CHECK(log_file_bytes(0, ".timeindex") > 12 * 90);
        CHECK_EQUAL(truncate(log_file(0, ".timeindex"), 12 * kept), 0);
        struct mqd_recovery recovery = log_untrusted();
        recovery.recovery_point_offset = 400;
        partition = log_open(&options, &recovery);
        CHECK_EQUAL(partition->active.index.max_timestamp_ms, NOW + 279);
        struct mqd_time_index_entry entry;
        CHECK_EQUAL(mqd_time_index_lookup(log_path, 0, INT64_MAX, &entry), 1);
        CHECK_EQUAL(entry.timestamp_ms, NOW + 279);
        CHECK_EQUAL(entry.relative_offset, 279);
        CHECK_EQUAL(log_verify(partition, NULL), 400);
        mqd_partition_close(partition, 0);
    }
}

TEST(leftovers_are_removed)
{
    struct mqd_log_options options = log_options();
    options.segment_bytes = 1000;
    make_log(&options, 20);
    char path[200];
    snprintf(path, sizeof path, "%s/leader-epoch-checkpoint.tmp", log_path);
    log_write_file(path, "x", 1);
    log_write_file(log_file(8, ".log.deleted"), "x", 1);
    log_write_file(log_file(500, ".index"), "12345678", 8); /* no such segment */
    log_write_file(log_file(16, ".log"), "", 0);            /* the last segment is empty */
    struct mqd_recovery recovery = log_untrusted();
    struct mqd_partition *partition = log_open(&options, &recovery);
    CHECK_EQUAL(recovery.log_end_offset, 16);
    CHECK(access(path, F_OK) < 0);
    CHECK_EQUAL(log_file_bytes(8, ".log.deleted"), -1);
    CHECK_EQUAL(log_file_bytes(500, ".index"), -1);
    append_count(partition, 1);
    CHECK_EQUAL(log_verify(partition, NULL), 17);
    mqd_partition_close(partition, 0);
    make_log(&options, 20);
    log_write_file(log_file(8, ".log"), "", 0); /* one in the middle is empty */
    recovery = log_untrusted();
    partition = log_open(&options, &recovery);
    CHECK_EQUAL(recovery.log_end_offset, 8);
    CHECK_EQUAL(log_verify(partition, NULL), 8);
    mqd_partition_close(partition, 0);
}

TEST(log_start_comes_from_the_checkpoint)
{
    struct mqd_log_options options = log_options();
    options.segment_bytes = 1000;
    make_log(&options, 20);
    struct mqd_recovery recovery = log_untrusted();
    recovery.log_start_offset = 9; /* the files of segment 0 had not been deleted yet */
    struct mqd_partition *partition = log_open(&options, &recovery);
    CHECK_EQUAL(recovery.log_start_offset, 9);
    CHECK_EQUAL(partition->segments[0], 8);
    mqd_partition_close(partition, 0);
    unlink(log_file(0, ".log"));
    recovery = log_untrusted();
    partition = log_open(&options, &recovery);
    CHECK_EQUAL(recovery.log_start_offset, 8); /* no checkpoint: the first file determines it */
    mqd_partition_close(partition, 0);
    for (int i = 0; i < 2; i++) { /* beyond the end, twice */
        recovery = log_untrusted();
        recovery.log_start_offset = 100;
        partition = log_open(&options, &recovery);
        CHECK_EQUAL(recovery.log_start_offset, 100);
        CHECK_EQUAL(recovery.log_end_offset, 100 + i);
        CHECK_EQUAL(recovery.segment_count, 1);
        append_count(partition, 1);
        CHECK_EQUAL(mqd_partition_log_end_offset(partition), 101 + i);
        mqd_partition_close(partition, 0);
    }
}

static void epochs_are(const char *expected)
{
    char path[200], text[400] = "";
    snprintf(path, sizeof path, "%s/leader-epoch-checkpoint", log_path);
    int fd = open(path, O_RDONLY);
    CHECK(fd >= 0);
    CHECK(read(fd, text, sizeof text - 1) >= 0);
    close(fd);
    CHECK_TEXT(text, expected);
}

TEST(leader_epochs_are_noted_cut_and_rebuilt)
{
    struct mqd_log_options options = log_options();
    log_fresh();
    struct mqd_partition *partition = log_open(&options, NULL);
    const int32_t epochs[] = {0, 3, 4};
    for (int i = 0; i < 3; i++) {
        mqd_partition_set_leader_epoch(partition, epochs[i]);
        append_count(partition, 5);
    }
    mqd_partition_set_leader_epoch(partition, 9); /* without a record */
    mqd_partition_close(partition, 0);
    epochs_are("0\n3\n0 0\n3 5\n4 10\n");
    struct mqd_recovery recovery = log_untrusted();
    recovery.trusted_end_offset = 10;
    mqd_partition_close(log_open(&options, &recovery), 0);
    CHECK_EQUAL(recovery.last_leader_epoch, 3);
    epochs_are("0\n2\n0 0\n3 5\n");
    char path[200];
    snprintf(path, sizeof path, "%s/leader-epoch-checkpoint", log_path);
    const char *const bad[] = {"", "0\n2\n0 0\n", "0\n1\n-4 0\n", "1\n0\n", "0\n2\n3 5\n0 0\n", "rubbish", NULL};
    for (int i = 0; i < 7; i++) {
        unlink(path);
        if (bad[i])
            log_write_file(path, bad[i], strlen(bad[i]));
        recovery = log_untrusted();
        recovery.clean_shutdown = i % 2;
        mqd_partition_close(log_open(&options, &recovery), 0);
        CHECK_EQUAL(recovery.last_leader_epoch, 3);
        epochs_are("0\n2\n0 0\n3 5\n");
    }
    recovery = log_untrusted();
    recovery.log_start_offset = 7;
    mqd_partition_close(log_open(&options, &recovery), 0);
    epochs_are("0\n1\n3 7\n");
}

TEST(opening_names_the_cause)
{
    log_fresh();
    struct mqd_log_options options = log_options();
    struct mqd_recovery recovery = log_untrusted();
    log_write_file(log_path, "a file", 6);
    CHECK(!mqd_partition_open(log_path, &options, 0, NOW, &recovery));
    CHECK_CONTAINS(mqd_error_message(), "not a directory");
    unlink(log_path);
    CHECK_EQUAL(mqd_file_watch(NULL, "open:EIO:.log"), 0);
    CHECK(!mqd_partition_open(log_path, &options, 0, NOW, &recovery));
    CHECK_EQUAL(mqd_error_code(), EIO);
    CHECK_CONTAINS(mqd_error_message(), "cannot create segment 0");
    mqd_file_watch(NULL, NULL);
}

/* A full disk at start: an existing log opens, even without its index files. */
TEST(a_full_disk_does_not_keep_a_log_from_opening)
{
    struct mqd_log_options options = log_options();
    options.index_interval_bytes = 300;
    make_log(&options, 100);
    unlink(log_file(0, ".index"));
    unlink(log_file(0, ".timeindex"));
    char path[200];
    snprintf(path, sizeof path, "%s/leader-epoch-checkpoint", log_path);
    unlink(path);
    CHECK_EQUAL(mqd_file_watch(NULL, "write:ENOSPC"), 0);
    struct mqd_recovery recovery = log_untrusted();
    struct mqd_partition *partition = log_open(&options, &recovery);
    CHECK(partition);
    CHECK_EQUAL(recovery.log_end_offset, 100);
    CHECK_EQUAL(log_append(partition, (struct log_batch){.mark = 0}), -2);
    mqd_file_watch(NULL, NULL);
    append_count(partition, 100);
    CHECK_EQUAL(log_verify(partition, NULL), 200);
    epochs_are("0\n1\n0 0\n");
    mqd_partition_close(partition, 0);
}

/* The disk fails during an open, at any call: an error or a valid log, never a wrong one; the
 * next open is good. */
TEST(an_open_that_fails_harms_nothing)
{
    static const char *const calls[] = {"write:EIO",   "truncate:EIO", "sync:EIO",
                                        "open:EMFILE", "unlink:EIO",   "rename:EIO"};
    struct mqd_log_options options = log_options();
    options.segment_bytes = 3000;
    options.index_interval_bytes = 300;
    for (size_t call = 0; call < sizeof calls / sizeof calls[0]; call++)
        for (int after = 0, failed = 1; failed; after++) {
            make_log(&options, 100);
            CHECK_EQUAL(truncate(log_file(96, ".log"), 3 * 125 + 30), 0);
            unlink(log_file(24, ".index"));
            unlink(log_file(96, ".timeindex"));
            char rule[64];
            snprintf(rule, sizeof rule, "%s::after=%d", calls[call], after);
            CHECK_EQUAL(mqd_file_watch(NULL, rule), 0);
            struct mqd_recovery recovery = log_untrusted();
            recovery.recovery_point_offset = 50;
            struct mqd_partition *partition = mqd_partition_open(log_path, &options, 0, NOW, &recovery);
            failed = !partition;
            mqd_file_watch(NULL, NULL);
            if (partition)
                mqd_partition_close(partition, 0);
            recovery = log_untrusted();
            recovery.recovery_point_offset = 50;
            partition = log_open(&options, &recovery);
            CHECK_EQUAL(recovery.log_end_offset, 99);
            CHECK_EQUAL(log_verify(partition, NULL), 99);
            mqd_partition_close(partition, 0);
            CHECK(after < 100);
        }
}

/* Batches larger than the walk's buffer are summed in pieces. */
TEST(large_batches_are_checked)
{
    log_fresh();
    struct mqd_log_options options = log_options();
    options.segment_bytes = 64 << 20;
    options.max_message_bytes = 16 << 20;
    struct mqd_partition *partition = log_open(&options, NULL);
    for (uint64_t i = 0; i < 4; i++)
        CHECK_EQUAL(log_append(partition, (struct log_batch){.body_bytes = (3 << 20) + (int32_t)i, .mark = i}), 0);
    mqd_partition_close(partition, 0);
    struct mqd_recovery recovery = log_untrusted();
    mqd_partition_close(log_open(&options, &recovery), 0);
    CHECK_EQUAL(recovery.log_end_offset, 4);
    log_flip(log_file(0, ".log"), 3 * ((3ll << 20) + 62) - 10);
    recovery = log_untrusted();
    mqd_partition_close(log_open(&options, &recovery), 0);
    CHECK_EQUAL(recovery.log_end_offset, 2);
}
