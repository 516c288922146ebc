/* A lost or damaged .txnindex: .txnsum detects it, readers refuse it, and recovery rebuilds it
 * from the log. */
#define LOG_TEST_IN_MEMORY
#include "mqd_log_test.h"

#include <fcntl.h>

#include "log/txn_index.h"

static struct log_batch data(int64_t producer_id, int16_t epoch, int32_t sequence)
{
    return (struct log_batch){.attributes = 0x10,
                              .producer_id = producer_id,
                              .producer_epoch = epoch,
                              .base_sequence = sequence,
                              .mark = (uint64_t)sequence};
}

static struct log_batch marker(int64_t producer_id, int16_t epoch, bool commit, int32_t coordinator_epoch)
{
    return (struct log_batch){.marker = commit ? 2 : 1,
                              .producer_id = producer_id,
                              .producer_epoch = epoch,
                              .coordinator_epoch = coordinator_epoch};
}

/* As in a worker: with flags and guard. */
static int16_t stage(struct mqd_partition *partition, struct log_batch want, uint32_t flags, int64_t guard,
                     struct mqd_stage_result *result)
{
    static uint8_t bytes[64][256];
    static uint32_t turn;
    struct mqd_batch batch;
    uint8_t *at = bytes[turn++ % 64];
    log_encode(at, want);
    mqd_batch_decode(at, MQD_BATCH_HEADER_BYTES, &batch);
    return mqd_partition_stage(partition, &batch, at, true, flags, guard, NOW, result);
}

enum damage {
    DELETED,
    SUM_DELETED,
    CUT_BY_ONE,
    CUT_MID_ENTRY,
    EMPTIED,
    SUM_CUT,
    INDEX_OF_ANOTHER,
    BOTH_OF_ANOTHER,
    SUM_FLIPPED,
    FLIPPED /* + position */,
    DAMAGES = FLIPPED + MQD_TXN_INDEX_ENTRY_BYTES / 2
};

static void flip(const char *path, long position)
{
    uint8_t byte;
    int fd = open(path, O_RDWR);
    CHECK(pread(fd, &byte, 1, position) == 1);
    byte ^= 0x10;
    CHECK(pwrite(fd, &byte, 1, position) == 1);
    close(fd);
}

static void copy(const char *from, const char *to)
{
    uint8_t bytes[4096];
    int in = open(from, O_RDONLY), out = open(to, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    ssize_t size = read(in, bytes, sizeof bytes);
    CHECK(size > 0 && write(out, bytes, (size_t)size) == size);
    close(in);
    close(out);
}

static void do_damage(int damage, int64_t base, int64_t other)
{
    char from[PATH_MAX], index[PATH_MAX], sum[PATH_MAX];
    snprintf(index, sizeof index, "%s", log_file(base, ".txnindex"));
    snprintf(sum, sizeof sum, "%s", log_file(base, ".txnsum"));
    snprintf(from, sizeof from, "%s", log_file(other, ".txnindex"));
    switch (damage) {
    case DELETED:
        CHECK_EQUAL(unlink(index), 0);
        break;
    case SUM_DELETED:
        CHECK_EQUAL(unlink(sum), 0);
        break;
    case CUT_BY_ONE:
        CHECK_EQUAL(truncate(index, log_file_bytes(base, ".txnindex") - MQD_TXN_INDEX_ENTRY_BYTES), 0);
        break;
    case CUT_MID_ENTRY:
        CHECK_EQUAL(truncate(index, 40), 0);
        break;
    case EMPTIED:
        CHECK_EQUAL(truncate(index, 0), 0);
        break;
    case SUM_CUT:
        CHECK_EQUAL(truncate(sum, 4), 0);
        break;
    case INDEX_OF_ANOTHER:
        copy(from, index);
        break;
    case BOTH_OF_ANOTHER:
        copy(from, index);
        copy(log_file(other, ".txnsum"), sum);
        break;
    case SUM_FLIPPED:
        flip(sum, 5);
        break;
    default:
        flip(index, (damage - FLIPPED) * 4 + 1);
    }
}

/* Of all segments; `stable`: a reader's last stable offset. -1: some segment was refused. */
static int count_aborted(const struct mqd_partition *partition, int64_t stable)
{
    struct mqd_aborted_list found = {0};
    int result = 0;
    for (uint32_t i = 0; i < partition->segment_count && result >= 0; i++)
        result = mqd_txn_index_collect(log_path, partition->segments[i], 0, INT64_MAX, stable, &found);
    int count = (int)found.count;
    free(found.entries);
    return result < 0 ? -1 : count;
}

/* Each in turn aborts a transaction of one batch. */
static struct mqd_partition *open_with_aborted(struct mqd_log_options *options, int count)
{
    log_fresh();
    *options = log_options();
    options->segment_bytes = 600;
    struct mqd_partition *partition = log_open(options, NULL);
    for (int i = 0; i < count; i++) {
        CHECK_OR(log_append(partition, data(7, 0, i)) == 0, return NULL);
        CHECK_OR(log_append(partition, marker(7, 0, false, 0)) == 0, return NULL);
    }
    CHECK_OR(log_sync(partition) == 0, return NULL);
    return partition;
}

#define COUNT 17 /* so that the active segment has two entries as well */

TEST(a_lost_or_damaged_txnindex_is_refused_by_readers_and_rebuilt_from_the_log)
{
    for (int damage = 0; damage < DAMAGES; damage++)
        for (int way = 0; way < 6; way++) { /* clean, kill -9, loss of power; of a sealed segment, of the active one */
            struct mqd_log_options options;
            struct mqd_partition *partition = open_with_aborted(&options, COUNT);
            uint32_t number = way % 2 ? partition->segment_count - 1 : 1;
            int64_t base = partition->segments[number], end = log_positions(partition).log_end_offset;
            CHECK_OR(partition->segment_count > 3 && log_file_bytes(base, ".txnindex") >= 2 * MQD_TXN_INDEX_ENTRY_BYTES,
                     test_message("%u segments, way %d", partition->segment_count, way);
                     return);
            CHECK_EQUAL(count_aborted(partition, end), COUNT);
            do_damage(damage, base, partition->segments[0]);
            CHECK_OR(count_aborted(partition, end) == -1, test_message("damage %d is not noticed by a reader", damage));
            CHECK_EQUAL(mqd_partition_close(partition, way < 2), 0);
            if (way < 2) /* closing has not touched it */
                CHECK_OR(mqd_txn_index_verify(log_path, base, INT64_MAX) == 0,
                         test_message("damage %d way %d", damage, way));
            struct mqd_recovery recovery = log_untrusted();
            recovery.clean_shutdown = way < 2;
            recovery.recovery_point_offset = end;
            if (way == 2 || way == 3)
                recovery.trusted_end_offset = end;
            partition = log_open(&options, &recovery);
            CHECK_OR(count_aborted(partition, end) == COUNT,
                     test_message("damage %d way %d: %d", damage, way, count_aborted(partition, end));
                     return);
            CHECK_EQUAL(log_append(partition, data(7, 0, COUNT)), 0); /* its sequence numbers are still known */
            CHECK_EQUAL(log_append(partition, marker(7, 0, false, 0)), 0);
            CHECK_EQUAL(log_sync(partition), 0);
            CHECK_EQUAL(count_aborted(partition, end + 2), COUNT + 1);
            mqd_partition_close(partition, 0);
        }
}

/* A start that rebuilds a .txnindex stops at any of its calls: the next start rebuilds it. */
TEST(an_interrupted_rebuild_is_begun_again)
{
    bool opened = false;
    for (int stop = 0; !opened; stop++) {
        CHECK(stop < 50);
        struct mqd_log_options options;
        struct mqd_partition *partition = open_with_aborted(&options, COUNT);
        int64_t base = partition->segments[1], end = log_positions(partition).log_end_offset;
        CHECK_EQUAL(mqd_partition_close(partition, 1), 0); /* its snapshot is after the segment */
        do_damage(FLIPPED, base, 0);
        struct mqd_recovery recovery = log_untrusted();
        recovery.recovery_point_offset = end;
        char rule[64];
        snprintf(rule, sizeof rule, "any:EIO:.txn:after=%d", stop);
        CHECK_EQUAL(mqd_file_watch(NULL, rule), 0);
        partition = mqd_partition_open(log_path, &options, 0, NOW, &recovery);
        mqd_file_watch(NULL, NULL);
        opened = partition != NULL;
        if (opened)
            mqd_partition_close(partition, 0);
        partition = log_open(&options, &recovery);
        CHECK_OR(count_aborted(partition, end) == COUNT, test_message("stopped after %d calls", stop));
        mqd_partition_close(partition, 0);
    }
}

TEST(an_entry_without_its_checksum_is_not_trusted)
{
    struct mqd_log_options options;
    struct mqd_partition *partition = open_with_aborted(&options, 2);
    int64_t end = log_positions(partition).log_end_offset;
    /* between the two writes of the second marker, offset 3 */
    CHECK_EQUAL(truncate(log_file(0, ".txnsum"), MQD_TXN_SUM_BYTES), 0);
    CHECK_EQUAL(count_aborted(partition, 3), 1);
    CHECK_EQUAL(count_aborted(partition, 4), -1);
    CHECK_EQUAL(mqd_partition_close(partition, 0), 0);
    struct mqd_recovery recovery = log_untrusted();
    recovery.trusted_end_offset = 3; /* the marker was not published either */
    partition = log_open(&options, &recovery);
    CHECK_EQUAL(log_positions(partition).log_end_offset, 3);
    CHECK_EQUAL(log_file_bytes(0, ".txnindex"), MQD_TXN_INDEX_ENTRY_BYTES);
    CHECK_EQUAL(mqd_txn_index_verify(log_path, 0, INT64_MAX), 1);
    CHECK(end == 4);
    mqd_partition_close(partition, 0);
}

TEST(a_checksum_that_cannot_be_written_removes_its_entry)
{
    struct mqd_log_options options;
    struct mqd_partition *partition = open_with_aborted(&options, 1);
    bool rolled;
    struct mqd_stage_result result;
    CHECK_EQUAL(log_append(partition, data(7, 0, 1)), 0);
    CHECK_EQUAL(stage(partition, marker(7, 0, false, 0), MQD_STAGE_COORDINATOR, 0, &result), 0);
    CHECK_EQUAL(mqd_file_watch(NULL, "write:ENOSPC:.txnsum:count=1"), 0);
    CHECK_EQUAL(mqd_partition_write(partition, NOW, &rolled), -1);
    mqd_file_watch(NULL, NULL);
    CHECK_EQUAL(log_file_bytes(0, ".txnindex"), MQD_TXN_INDEX_ENTRY_BYTES);
    CHECK_EQUAL(mqd_txn_index_verify(log_path, 0, INT64_MAX), 1);
    CHECK_EQUAL(log_append(partition, marker(7, 0, false, 0)), 0);
    CHECK_EQUAL(count_aborted(partition, 4), 2);
    mqd_partition_close(partition, 0);
}
