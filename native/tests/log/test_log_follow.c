/* A follower's log: batches as received, and cuts from which no interruption leaves anything but a
 * prefix. */
#define LOG_TEST_IN_MEMORY
#include <dirent.h>

#include "log/partition_follow.h"
#include "log/recovery/truncation.h"
#include "mqd_log_test.h"

#define ALL_BYTES (8 << 20)

static struct mqd_log_options small_options(void)
{
    struct mqd_log_options options = log_options();
    options.segment_bytes = 6000;
    options.index_interval_bytes = 300;
    return options;
}

/* ---- a leader's log, in memory ---- */

/* the bytes that it would send, and where which batch lies */
struct leader {
    uint8_t *bytes;
    uint32_t size_bytes, count;
    uint32_t position[4000];
    int64_t end[4000];
};

static void leader_free(struct leader *leader)
{
    free(leader->bytes);
    leader->bytes = NULL;
}

static void put_header(uint8_t *batch, int64_t base_offset, int32_t epoch)
{
    uint64_t offset = htobe64((uint64_t)base_offset);
    uint32_t word = htobe32((uint32_t)epoch);
    memcpy(batch, &offset, 8);
    memcpy(batch + 12, &word, 4);
}

static void leader_add(struct leader *leader, struct log_batch want, int64_t base_offset, int32_t epoch)
{
    if (!leader->bytes)
        leader->bytes = malloc(ALL_BYTES);
    uint8_t *at = leader->bytes + leader->size_bytes;
    uint32_t size_bytes = log_encode(at, want);
    put_header(at, base_offset, epoch);
    leader->position[leader->count] = leader->size_bytes;
    leader->size_bytes += size_bytes;
    leader->end[leader->count++] = base_offset + (want.record_count ? want.record_count : 1);
}

/* Batches of idempotent and transactional producers, markers, rising epochs: everything that leaves
 * state behind. */
static void leader_fill(struct leader *leader, uint64_t seed, int count, int64_t begin)
{
    int32_t sequences[4] = {0}, epoch = 0;
    bool ongoing[4] = {false};
    int64_t end = begin;
    for (int i = 0; i < count; i++) {
        uint64_t word = test_random(&seed);
        struct log_batch want = {.mark = word >> 8,
                                 .record_count = 1 + (int32_t)(word % 3),
                                 .body_bytes = 40 + (int32_t)((word >> 16) % 400),
                                 .timestamp_ms = NOW + i};
        int who = (int)((word >> 40) % 4);
        if (word % 17 == 0)
            epoch += 1 + (int32_t)((word >> 50) % 2);
        if (word % 5 == 0) {
            want.mark |= 1; /* nobody's */
        } else if (ongoing[who] && word % 7 == 0) {
            want.producer_id = 1000 + who;
            want.marker = 1 + (int)((word >> 9) % 2);
            want.record_count = 1;
            ongoing[who] = false;
        } else {
            want.producer_id = 1000 + who;
            want.base_sequence = sequences[who];
            want.attributes = who >= 2 ? 0x10 : 0;
            ongoing[who] = who >= 2;
            sequences[who] += want.record_count;
        }
        leader_add(leader, want, end, epoch);
        end = leader->end[leader->count - 1];
    }
}

/* The first `count` batches into `partition`, in pieces of any size. */
static void follow_up_to(struct mqd_partition *partition, const struct leader *leader, uint32_t first, uint32_t count,
                         uint64_t seed)
{
    uint32_t at = leader->position[first], end = count == leader->count ? leader->size_bytes : leader->position[count];
    while (at < end) {
        uint32_t piece = 1 + (uint32_t)(test_random(&seed) % 6000);
        bool rolled;
        struct mqd_follow follow;
        uint64_t size_bytes = piece < end - at ? piece : end - at;
        uint8_t *copy = malloc(size_bytes); /* exactly as long: nothing behind it is looked at */
        memcpy(copy, leader->bytes + at, size_bytes);
        int error = mqd_partition_follow(partition, copy, size_bytes, 1 << 20, -1, NOW, &follow);
        CHECK_OR(error == MQD_FOLLOW_OK || error == MQD_FOLLOW_FULL, fprintf(stderr, "%s\n", follow.reason); free(copy);
                 return);
        CHECK_EQUAL(mqd_partition_write(partition, NOW, &rolled), 0);
        free(copy);
        at += (uint32_t)follow.taken_bytes;
        size_t snapshot_bytes;
        int64_t offset;
        uint8_t *snapshot =
            rolled && test_random(&seed) % 2 ? mqd_partition_snapshot(partition, &snapshot_bytes, &offset) : NULL;
        if (snapshot)
            CHECK_EQUAL(mqd_file_replace(log_file(offset, ".snapshot"), snapshot, snapshot_bytes), 0);
        free(snapshot);
        if (test_random(&seed) % 4 == 0)
            CHECK_EQUAL(log_sync(partition), 0);
    }
}

/* ---- what a log says of itself ---- */

static int by_id(const void *left, const void *right)
{
    const struct mqd_producer_view *a = left, *b = right;
    return (a->producer_id > b->producer_id) - (a->producer_id < b->producer_id);
}

/* Text of producers, epochs, aborted transactions and the last stable offset, to compare. */
static char *describe(struct mqd_partition *partition)
{
    static char text[4][8192];
    static int turn;
    char *out = text[turn = (turn + 1) % 4];
    struct mqd_producer_view views[16];
    uint32_t count = mqd_partition_producers(partition, views, 16), epoch_count;
    size_t at = 0;
    qsort(views, count, sizeof *views, by_id);
    for (uint32_t i = 0; i < count; i++)
        at += (size_t)snprintf(out + at, 8192 - at, "p%lld:%d e%d t%lld c%d o%lld ", (long long)views[i].producer_id,
                               views[i].last_sequence, views[i].producer_epoch,
                               (long long)views[i].transaction_first_offset, views[i].coordinator_epoch,
                               (long long)views[i].last_offset);
    const struct mqd_epoch *epochs = mqd_partition_epochs(partition, &epoch_count);
    for (uint32_t i = 0; i < epoch_count; i++)
        at += (size_t)snprintf(out + at, 8192 - at, "[%d@%lld]", epochs[i].epoch, (long long)epochs[i].start_offset);
    for (uint32_t i = 0; i < partition->segment_count; i++) {
        struct mqd_aborted_list aborted = {0};
        CHECK_OR(mqd_txn_index_load(log_path, partition->segments[i], INT64_MAX, &aborted) == 0, break);
        for (uint32_t j = 0; j < aborted.count; j++)
            at +=
                (size_t)snprintf(out + at, 8192 - at, " a%lld:%lld-%lld", (long long)aborted.entries[j].producer_id,
                                 (long long)aborted.entries[j].first_offset, (long long)aborted.entries[j].last_offset);
        free(aborted.entries);
    }
    snprintf(out + at, 8192 - at, " end %lld", (long long)partition->log_end_offset);
    return out;
}

/* Byte for byte the first `count` batches of the leader. */
static void check_bytes(struct mqd_partition *partition, const struct leader *leader, uint32_t first, uint32_t count)
{
    uint32_t at = leader->position[first], end = count == leader->count ? leader->size_bytes : leader->position[count];
    for (uint32_t i = 0; i < partition->segment_count; i++) {
        int64_t size_bytes = log_file_bytes(partition->segments[i], ".log");
        uint8_t *bytes = malloc((size_t)size_bytes + 1);
        int fd = open(log_file(partition->segments[i], ".log"), O_RDONLY);
        CHECK_OR(fd >= 0 && read(fd, bytes, (size_t)size_bytes) == size_bytes && at + (uint32_t)size_bytes <= end,
                 close(fd);
                 free(bytes); return);
        close(fd);
        CHECK_OR(memcmp(bytes, leader->bytes + at, (size_t)size_bytes) == 0, (void)0);
        at += (uint32_t)size_bytes;
        free(bytes);
    }
    CHECK_EQUAL(at, end);
}

/* What a log that never had more than `count` batches would say. */
static const char *described_prefix(const struct mqd_log_options *options, const struct leader *leader, uint32_t count)
{
    static char path[96];
    strcpy(path, log_path);
    snprintf(log_path, sizeof log_path, "%s/fresh-0", log_root);
    struct mqd_partition *fresh = log_open(options, NULL);
    if (count)
        follow_up_to(fresh, leader, 0, count, 5);
    const char *text = describe(fresh);
    mqd_partition_close(fresh, 0);
    char command[160];
    snprintf(command, sizeof command, "%s/fresh-0", log_root);
    nftw(command, log_remove_entry, 16, FTW_DEPTH | FTW_PHYS);
    strcpy(log_path, path);
    return text;
}

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
    partition = log_open(&options, NULL); /* recovery reads the same out of the log */
    CHECK_TEXT(describe(partition), before);
    mqd_partition_close(partition, 1);
    leader_free(&leader);
}

static int follow_error(struct mqd_partition *partition, const uint8_t *bytes, uint64_t size_bytes, int32_t epoch,
                        bool gaps, struct mqd_follow *out)
{
    int error = mqd_partition_follow(partition, bytes, size_bytes, epoch, gaps ? INT64_MAX : -1, NOW, out);
    mqd_partition_unstage(partition);
    return error;
}

TEST(what_is_not_the_next_batch_is_refused)
{
    struct leader leader = {0};
    struct mqd_log_options options = small_options();
    struct mqd_follow follow;
    leader_fill(&leader, 3, 20, 0);
    log_fresh();
    struct mqd_partition *partition = log_open(&options, NULL);
    follow_up_to(partition, &leader, 0, 10, 4);
    int64_t end = leader.end[9];
    char before[8192];
    strcpy(before, describe(partition));
    uint8_t *next = leader.bytes + leader.position[10];
    uint32_t size_bytes = leader.position[11] - leader.position[10];
    for (uint32_t at = 0; at < size_bytes; at++) { /* any flipped bit; but in the epoch, which no CRC covers */
        next[at] ^= 0x10;
        int error = follow_error(partition, next, size_bytes, 0xfffff, false, &follow);
        /* a length that says more is only the beginning */
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
    struct mqd_follow follow;
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
    /* from the first gap on the log is one that has them */
    CHECK_EQUAL(mqd_partition_follow(partition, leader.bytes, leader.size_bytes, 2, 7, NOW, &follow), MQD_FOLLOW_OK);
    CHECK_EQUAL(mqd_partition_write(partition, NOW, &rolled), 0);
    CHECK_EQUAL(partition->log_end_offset, 21);
    mqd_partition_close(partition, 0);
    struct mqd_recovery recovery = log_untrusted();
    partition = log_open(&options, &recovery); /* not compacted here: a file says that the gaps are right */
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

/* A leader whose log start lies inside of a batch sends all of the batch. */
TEST(an_empty_log_begins_where_the_batch_begins)
{
    struct leader leader = {0};
    struct mqd_log_options options = small_options();
    struct mqd_follow follow;
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
    recovery.log_start_offset = 104; /* a checkpoint of before */
    partition = log_open(&options, &recovery);
    CHECK_EQUAL(recovery.log_end_offset, 110);
    CHECK_EQUAL(recovery.log_start_offset, 104);
    mqd_partition_close(partition, 1);
    leader_free(&leader);
}

/* ---- cutting ---- */

/* How many batches reach no further than offset. */
static uint32_t count_below(const struct leader *leader, int64_t offset)
{
    uint32_t count = 0;
    while (count < leader->count && leader->end[count] <= offset)
        count++;
    return count;
}

TEST(a_cut_log_is_as_if_it_had_never_had_more)
{
    struct mqd_log_options options = small_options();
    for (uint64_t seed = 1; seed <= (test_long() ? 400 : 40); seed++) {
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

/* The disk stops taking anything at the n-th call, for every n: the process dies there, and its
 * successor opens what is left, trusting what it is told. */
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
            recovery.clean_shutdown = 1; /* a marker that lies */
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

TEST(an_interrupted_cut_is_carried_out)
{
    for (uint64_t seed = 1; seed <= (test_long() ? 20 : 3); seed++)
        for (int trust = 0; trust < 4; trust++)
            interrupted(seed, false, trust);
}

TEST(an_interrupted_new_beginning_is_carried_out)
{
    for (int trust = 0; trust < 4; trust++)
        interrupted(9, true, trust);
}

/* The disk, or the system, refuses one call for the moment: before the mark is there nothing has
 * happened, and the next try cuts. */
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

TEST(a_cut_that_cannot_begin_leaves_the_log_whole)
{
    refused_once("any", "ENOSPC", false);
    refused_once("any", "ENOSPC", true);
    refused_once("write", "EDQUOT", false);
    refused_once("open", "EMFILE", false);
}

/* What was written behind a cut is not believed because a recovery point of before says so. */
TEST(an_old_recovery_point_is_not_believed_above_a_cut)
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
    log_flip(log_file(active, ".log"), 400); /* never flushed: the power cut took it */
    struct mqd_recovery recovery = log_untrusted();
    recovery.recovery_point_offset = recovery_point + 1000000;
    partition = log_open(&options, &recovery);
    CHECK(recovery.log_end_offset < active + 20);
    CHECK_EQUAL(log_verify(partition, NULL), recovery.log_end_offset);
    mqd_partition_close(partition, 1);
    leader_free(&old);
    leader_free(&new);
}

/* ---- the high watermark of a replica ---- */

TEST(a_replica_opens_with_what_is_known_to_be_committed)
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
        /* inside of a batch: its beginning */
        recovery.high_watermark = known + (i % 2 && i < leader.count && leader.end[i] > known + 1);
        partition = log_open(&options, &recovery);
        struct mqd_positions positions = log_positions(partition);
        CHECK_EQUAL(positions.high_watermark, known);
        CHECK(mqd_partition_replicated(partition));
        int64_t position = 0;
        for (uint32_t j = 0; j < i; j++) /* the place is the batch's */
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
    } wanted[] = {{-1, -1, -1}, {0, 0, 0}, {1, 1, 0}, {2, 2, 4},  {3, 2, 4},
                  {4, 2, 4},    {5, 5, 7}, {8, 5, 7}, {9, 9, 10}, {10, -1, -1}};
    for (uint32_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        mqd_partition_epoch_end(partition, wanted[i].epoch, &found, &end);
        CHECK_EQUAL(found, wanted[i].found);
        CHECK_EQUAL(end, wanted[i].end);
    }
    struct mqd_truncation outcome; /* nothing to cut: but what the log has no record of is not spoken of again */
    CHECK_EQUAL(mqd_epochs_add(&partition->epochs, 11, 10), 1);
    CHECK_EQUAL(mqd_partition_truncate(partition, 10, NOW, &outcome), 0);
    CHECK_EQUAL(mqd_epochs_last(&partition->epochs), 9);
    CHECK_EQUAL(log_positions(partition).log_end_offset, 10);
    mqd_partition_close(partition, 1);
    leader_free(&leader);
}
