/* Seeded histories of one partition on a disk that refuses any call; every second one is slow to
 * flush, so that many files wait. As long as it is not fenced a failed write leaves nothing: the
 * log verifies, it has only its own segments, and a flush in progress covers the files it began
 * with. However it ends: no descriptor is left, and the next start finds all written records.
 * MQD_TEST_SEED=n runs only that seed. */
#define LOG_TEST_IN_MEMORY
#include "mqd_log_test.h"

#include <dirent.h>

enum { STEP_COUNT = 60, PRODUCER_COUNT = 3, TRANSACTIONAL = 2, STAGED_MAX = 8 };

struct history {
    uint64_t random;
    struct mqd_partition *partition;
    int64_t end, durable, sync_end;
    int32_t next_sequence[PRODUCER_COUNT], leader_epoch;
    struct mqd_sync_fd fds[4];
    ino_t inodes[4]; /* of these */
    int sync_count;  /* 0: no flush is in progress */
};

static uint64_t pick(struct history *history, uint64_t below)
{
    return test_random(&history->random) % below;
}

static uint32_t entries(const char *path, const char *suffix)
{
    uint32_t count = 0;
    DIR *directory = opendir(path);
    for (struct dirent *entry; directory && (entry = readdir(directory));) {
        size_t length = strlen(entry->d_name), end = strlen(suffix);
        count += length >= end && strcmp(entry->d_name + length - end, suffix) == 0;
    }
    closedir(directory);
    return count;
}

/* For one call in two: some of the next calls are refused. */
static void refuse(struct history *history)
{
    static const char *const calls[] = {"write",  "write",  "write", "open", "truncate",
                                        "rename", "unlink", "any",   "sync"};
    static const char *const errors[] = {"ENOSPC", "ENOSPC", "EDQUOT", "EMFILE", "ENOMEM", "EIO"};
    static const char *const files[] = {"", ".log", "index", ".timeindex", ".txnindex", "leader-epoch"};
    char rule[96];
    if (pick(history, 2))
        return;
    snprintf(rule, sizeof rule, "%s:%s:%s:after=%d:count=%d", calls[pick(history, 9)], errors[pick(history, 6)],
             files[pick(history, 6)], (int)pick(history, 8), 1 + (int)pick(history, 6));
    CHECK_EQUAL(mqd_file_watch(NULL, rule), 0);
}

static void flush_begins(struct history *history)
{
    struct stat status;
    if (history->sync_count)
        return;
    refuse(history);
    history->sync_count = mqd_partition_sync_begin(history->partition, history->fds);
    history->sync_end = history->end;
    for (int i = 0; i < history->sync_count; i++) {
        CHECK_EQUAL(fstat(history->fds[i].fd, &status), 0);
        history->inodes[i] = status.st_ino;
    }
}

static void flush_ends(struct history *history)
{
    struct stat status;
    if (!history->sync_count)
        return;
    for (int i = 0; i < history->sync_count; i++)
        CHECK(fstat(history->fds[i].fd, &status) == 0 && status.st_ino == history->inodes[i]);
    mqd_partition_sync_done(history->partition, 0);
    history->sync_count = 0;
    int64_t durable = log_positions(history->partition).durable_offset;
    CHECK(durable == history->durable || (durable > history->durable && durable <= history->sync_end));
    history->durable = durable;
}

static struct log_batch some_batch(struct history *history)
{
    int producer = (int)pick(history, PRODUCER_COUNT);
    struct log_batch batch = {.mark = 2, .producer_id = 100 + producer, .body_bytes = 20 + (int)pick(history, 300)};
    if (producer == TRANSACTIONAL && pick(history, 3) == 0) {
        batch.marker = 1 + (int)pick(history, 2);
        return batch;
    }
    batch.attributes = producer == TRANSACTIONAL ? 0x10 : 0;
    batch.base_sequence = history->next_sequence[producer]++;
    return batch;
}

/* A fenced partition may or may not have it. */
static void write_some(struct history *history)
{
    static uint8_t bytes[STAGED_MAX][512];
    int32_t before[PRODUCER_COUNT];
    int count = 1 + (int)pick(history, STAGED_MAX);
    bool rolled;
    memcpy(before, history->next_sequence, sizeof before);
    for (int i = 0; i < count; i++)
        CHECK_EQUAL(log_stage(history->partition, bytes[i], some_batch(history), NULL), 0);
    refuse(history);
    if (mqd_partition_write(history->partition, NOW, &rolled) == 0)
        history->end += count;
    else if (mqd_partition_fenced(history->partition))
        history->end = mqd_partition_log_end_offset(history->partition);
    else
        memcpy(history->next_sequence, before, sizeof before);
}

static void step(struct history *history, bool slow)
{
    switch (pick(history, 10)) {
    case 0:
        mqd_partition_set_leader_epoch(history->partition, history->leader_epoch += (int32_t)pick(history, 2));
        break;
    case 1:
        refuse(history);
        mqd_partition_roll(history->partition, NOW);
        break;
    case 2:
    case 3:
        flush_begins(history);
        break;
    case 4:
        if (!slow || pick(history, 5) == 0)
            flush_ends(history);
        break;
    default:
        write_some(history);
    }
    mqd_file_watch(NULL, NULL);
}

static void check_whole(const struct history *history)
{
    struct mqd_partition *partition = history->partition;
    CHECK_EQUAL(mqd_partition_log_end_offset(partition), history->end);
    if (mqd_partition_fenced(partition))
        return;
    CHECK_EQUAL(log_verify(partition, NULL), history->end);
    CHECK_EQUAL(entries(log_path, ".log"), partition->segment_count);
    CHECK(!partition->epochs.count ||
          partition->epochs.entries[partition->epochs.count - 1].start_offset < history->end);
}

static void run_history(uint64_t seed)
{
    struct history history = {.random = seed};
    struct mqd_log_options options = log_options();
    log_fresh();
    options.segment_bytes = 400 + (int32_t)pick(&history, 3000);
    options.index_interval_bytes = 50 + (int32_t)pick(&history, 500);
    uint32_t descriptors = entries("/proc/self/fd", "");
    history.partition = log_open(&options, NULL);
    for (int i = 0; i < STEP_COUNT && !test_failed && !mqd_partition_fenced(history.partition); i++) {
        step(&history, seed % 2);
        check_whole(&history);
    }
    flush_ends(&history);
    struct mqd_recovery recovery = log_untrusted();
    recovery.clean_shutdown = mqd_partition_close(history.partition, 1) == 0;
    CHECK_EQUAL(entries("/proc/self/fd", ""), descriptors);
    history.partition = log_open(&options, &recovery);
    CHECK(recovery.log_end_offset >= history.end);
    CHECK_EQUAL(log_verify(history.partition, NULL), recovery.log_end_offset);
    mqd_partition_close(history.partition, 0);
}

TEST(after_any_disk_error_the_log_is_intact_and_no_file_stays_open)
{
    const char *alone = getenv("MQD_TEST_SEED");
    uint64_t first = alone ? strtoull(alone, NULL, 10) : 1, count = alone ? 1 : test_long() ? 5000 : 40;
    for (uint64_t seed = first; seed < first + count && !test_failed; seed++) {
        run_history(seed);
        if (test_failed)
            test_message("seed %llu", (unsigned long long)seed);
    }
}
