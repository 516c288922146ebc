/* Truncations of a follower's log: after any interruption, a prefix of the log is left. */
#include "mqd_follow_test.h"

/* How many batches end at or below offset. */
static uint32_t count_below(const struct leader *leader, int64_t offset)
{
    uint32_t count = 0;
    while (count < leader->count && leader->end[count] <= offset)
        count++;
    return count;
}

TEST(a_truncated_log_is_as_if_it_had_never_been_longer)
{
    struct mqd_log_options options = small_options();
    for (uint64_t seed = 1; seed <= (test_long() ? 400 : 15); seed++) {
        struct leader leader = {0};
        uint64_t random = seed * 77;
        leader_fill(&leader, seed, 300, 0);
        log_fresh();
        struct mqd_partition *partition = log_open(&options, NULL);
        mqd_partition_set_replicated(partition, true);
        follow_up_to(partition, &leader, 0, leader.count, seed);
        for (int round = 0; round < 3; round++) {
            int64_t end = partition->log_end_offset, offset = (int64_t)(test_random(&random) % (uint64_t)(end + 2)),
                    high_watermark = (int64_t)(test_random(&random) % (uint64_t)(offset + 1));
            struct mqd_truncation cut;
            mqd_partition_raise_high_watermark(partition, high_watermark);
            high_watermark = log_positions(partition).high_watermark;
            if (round < 2 && partition->preallocate_fd < 0 && test_random(&random) % 3 == 0)
                CHECK_EQUAL(mqd_partition_roll(partition, NOW), 0);
            CHECK_OR(mqd_partition_truncate(partition, offset, NOW, &cut) == 0,
                     fprintf(stderr, "seed %llu: %s\n", (unsigned long long)seed, mqd_error_message());
                     return);
            uint32_t count = count_below(&leader, offset < end ? offset : end);
            CHECK_EQUAL(cut.log_end_offset, count ? leader.end[count - 1] : 0);
            CHECK_EQUAL(cut.below_high_watermark, high_watermark > cut.log_end_offset);
            CHECK_EQUAL(log_positions(partition).high_watermark,
                        high_watermark < cut.log_end_offset ? high_watermark : cut.log_end_offset);
            CHECK(offset >= end || !mqd_partition_dirty(partition));
            const char *expected = described_prefix(&options, &leader, count);
            CHECK_TEXT(describe(partition), expected);
            check_bytes(partition, &leader, 0, count);
            CHECK_EQUAL(log_verify(partition, NULL), cut.log_end_offset);
            if (round == 1)
                follow_up_to(partition, &leader, count, leader.count, seed + 1000);
        }
        int64_t end = partition->log_end_offset;
        char before[8192];
        strcpy(before, describe(partition));
        mqd_partition_close(partition, (int)(seed % 2));
        struct mqd_recovery recovery = log_untrusted();
        partition = log_open(&options, &recovery);
        CHECK_EQUAL(recovery.log_end_offset, end);
        CHECK_TEXT(describe(partition), before);
        mqd_partition_close(partition, 1);
        leader_free(&leader);
    }
}

static bool mark_exists(const char *prefix)
{
    DIR *stream = opendir(log_path);
    struct dirent *entry;
    bool found = false;
    while (stream && (entry = readdir(stream)))
        found |= strncmp(entry->d_name, prefix, strlen(prefix)) == 0 && !strstr(entry->d_name, ".tmp");
    if (stream)
        closedir(stream);
    return found;
}

/* The disk refuses all calls from the n-th on, for every n: the process dies there, and its
 * successor opens the rest. `trust`: what recovery may trust. */
static void interrupted(uint64_t seed, bool restart, int trust)
{
    struct mqd_log_options options = small_options();
    struct leader leader = {0};
    bool through = false;
    leader_fill(&leader, seed, 120, 0);
    int64_t end = leader.end[leader.count - 1];
    for (int n = 0; !through; n++) {
        uint64_t random = seed + 1;
        log_fresh();
        struct mqd_partition *partition = log_open(&options, NULL);
        follow_up_to(partition, &leader, 0, leader.count, seed);
        CHECK_EQUAL(log_sync(partition), 0);
        int64_t offset = (int64_t)(test_random(&random) % (uint64_t)end);
        uint32_t count = count_below(&leader, offset);
        int64_t target = restart ? offset : count ? leader.end[count - 1] : 0;
        char faults[64];
        snprintf(faults, sizeof faults, "any:EIO:after=%d", n);
        CHECK_EQUAL(mqd_file_watch(NULL, faults), 0);
        struct mqd_truncation cut;
        through = (restart ? mqd_partition_restart_at(partition, offset, offset, NOW, &cut)
                           : mqd_partition_truncate(partition, offset, NOW, &cut)) == 0;
        CHECK(through || mqd_partition_fenced(partition));
        CHECK_EQUAL(mqd_file_watch(NULL, NULL), 0);
        mqd_partition_close(partition, 0);
        bool begun = mark_exists(MQD_TRUNCATING_FILE), done = mark_exists(MQD_TRUNCATED_PREFIX);
        struct mqd_recovery recovery = log_untrusted();
        if (trust >= 1)
            recovery.recovery_point_offset = end; /* all of it was flushed */
        if (trust == 2)
            recovery.trusted_end_offset = end; /* ... and the page cache is intact: as published before */
        if (trust == 3)
            recovery.clean_shutdown = 1; /* a wrong marker */
        partition = log_open(&options, &recovery);
        CHECK(partition);
        CHECK_EQUAL(recovery.log_end_offset, begun || done ? target : end);
        CHECK(!mark_exists(MQD_TRUNCATING_FILE));
        CHECK_EQUAL(mark_exists(MQD_TRUNCATED_PREFIX), begun || done);
        if (!restart || !(begun || done)) {
            const char *expected = described_prefix(&options, &leader, begun || done ? count : leader.count);
            CHECK_TEXT(describe(partition), expected);
            check_bytes(partition, &leader, 0, begun || done ? count : leader.count);
        }
        mqd_partition_close(partition, 1);
        CHECK(n < 1000);
    }
    leader_free(&leader);
}

TEST(an_interrupted_truncation_is_completed)
{
    for (uint64_t seed = 1; seed <= (test_long() ? 20 : 3); seed++)
        for (int trust = 0; trust < 4; trust++)
            interrupted(seed, false, trust);
}

TEST(an_interrupted_restart_of_the_log_is_completed)
{
    for (int trust = 0; trust < 4; trust++)
        interrupted(9, true, trust);
}

/* After a power cut the deletions might be undone, and the mark gone that completes them. */
TEST(a_truncation_ends_when_its_deletions_are_durable)
{
    log_fresh();
    CHECK_EQUAL(mkdir(log_path, 0755), 0);
    CHECK_EQUAL(mqd_truncation_begin(log_path, 7, -1), 0);
    CHECK_EQUAL(mqd_file_watch(NULL, "sync:EIO"), 0);
    CHECK_EQUAL(mqd_truncation_end(log_path, NOW), -1);
    mqd_file_watch(NULL, NULL);
    CHECK(mark_exists(MQD_TRUNCATING_FILE) && !mark_exists(MQD_TRUNCATED_PREFIX));
    CHECK_EQUAL(mqd_truncation_end(log_path, NOW), 0);
    CHECK(!mark_exists(MQD_TRUNCATING_FILE) && mark_exists(MQD_TRUNCATED_PREFIX));
}

/* The disk, or the system, refuses one call: if that is before the marker file is written, the log
 * is unchanged, and the next attempt truncates it. */
static void refused_once(const char *call, const char *error, bool restart)
{
    struct mqd_log_options options = small_options();
    struct leader leader = {0};
    bool through = false;
    int whole_count = 0;
    leader_fill(&leader, 5, 60, 0);
    for (int n = 0; !through; n++) {
        log_fresh();
        struct mqd_partition *partition = log_open(&options, NULL);
        follow_up_to(partition, &leader, 0, leader.count, 5);
        CHECK_EQUAL(log_sync(partition), 0);
        int64_t end = partition->log_end_offset, offset = leader.end[20];
        struct mqd_truncation cut;
        char faults[64];
        snprintf(faults, sizeof faults, "%s:%s:after=%d:count=1", call, error, n);
        CHECK_EQUAL(mqd_file_watch(NULL, faults), 0);
        through = (restart ? mqd_partition_restart_at(partition, offset, offset, NOW, &cut)
                           : mqd_partition_truncate(partition, offset, NOW, &cut)) == 0;
        CHECK_EQUAL(mqd_file_watch(NULL, NULL), 0);
        if (!through && !mqd_partition_fenced(partition)) {
            whole_count++;
            CHECK(!mark_exists(MQD_TRUNCATING_FILE) && !mark_exists(MQD_TRUNCATED_PREFIX));
            CHECK_EQUAL(log_verify(partition, NULL), end);
            CHECK_EQUAL(mqd_partition_truncate(partition, offset, NOW, &cut), 0);
            CHECK_EQUAL(cut.log_end_offset, offset);
            CHECK_EQUAL(log_verify(partition, NULL), offset);
        } else if (!through) {
            CHECK(mark_exists(MQD_TRUNCATING_FILE) || mark_exists(MQD_TRUNCATED_PREFIX));
        }
        mqd_partition_close(partition, 1);
        CHECK(n < 1000);
    }
    CHECK(whole_count > 0);
    leader_free(&leader);
}

TEST(a_truncation_that_cannot_begin_leaves_the_log_intact)
{
    refused_once("any", "ENOSPC", false);
    refused_once("any", "ENOSPC", true);
    refused_once("write", "EDQUOT", false);
    refused_once("open", "EMFILE", false);
}

/* A recovery point from before a truncation does not cover data written after it. */
TEST(an_old_recovery_point_is_not_trusted_above_a_truncation)
{
    struct mqd_log_options options = small_options();
    struct leader old = {0}, new = {0};
    struct mqd_truncation cut;
    leader_fill(&old, 1, 60, 0);
    log_fresh();
    struct mqd_partition *partition = log_open(&options, NULL);
    follow_up_to(partition, &old, 0, old.count, 1);
    CHECK_EQUAL(log_sync(partition), 0);
    int64_t recovery_point = partition->log_end_offset;
    uint32_t count = 30;
    CHECK_EQUAL(mqd_partition_truncate(partition, old.end[count - 1], NOW, &cut), 0);
    leader_fill(&new, 2, 60, old.end[count - 1]);
    for (uint32_t i = 0; i < new.count; i++) /* of a later epoch */
        put_header(new.bytes + new.position[i], i ? new.end[i - 1] : old.end[count - 1], 100);
    follow_up_to(partition, &new, 0, new.count, 3);
    int64_t active = partition->active.base_offset, size_bytes = partition->active.size_bytes;
    CHECK(partition->log_end_offset > recovery_point && size_bytes > 700);
    mqd_partition_close(partition, 0);
    log_flip(log_file(active, ".log"), 400); /* never flushed: the power cut lost it */
    struct mqd_recovery recovery = log_untrusted();
    recovery.recovery_point_offset = recovery_point + 1000000;
    partition = log_open(&options, &recovery);
    CHECK(recovery.log_end_offset < active + 20);
    CHECK_EQUAL(log_verify(partition, NULL), recovery.log_end_offset);
    mqd_partition_close(partition, 1);
    leader_free(&old);
    leader_free(&new);
}
