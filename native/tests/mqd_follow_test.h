/* For test_log_follow.c and test_log_cut.c: a leader's log in memory, and the state of a log. */
#ifndef MQD_FOLLOW_TEST_H
#define MQD_FOLLOW_TEST_H

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

/* the bytes that it would send, and the positions of batches */
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

/* Batches of idempotent and transactional producers, markers, rising epochs: everything that
 * creates state. */
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
            want.mark |= 1; /* no producer's */
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
        struct mqd_follow_result follow;
        uint64_t size_bytes = piece < end - at ? piece : end - at;
        uint8_t *copy = malloc(size_bytes); /* exactly as long, so that overruns are detected */
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

/* ---- the state of a log ---- */

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

/* The state of a log that never had more than `count` batches. */
__attribute__((unused)) static const char *described_prefix(const struct mqd_log_options *options,
                                                            const struct leader *leader, uint32_t count)
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

#endif
