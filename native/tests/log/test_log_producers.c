/* Idempotent producers: sequence rules, undo, bounds, snapshots. */
#include <errno.h>
#include <stdarg.h>
#include <sys/syscall.h>

#include "mqd_log_test.h"

/* Calls are counted; the failing-th one fails, none if it is 0. */
struct fault {
    int64_t count, failing;
    bool has_failed;
};
static struct fault reads, opens;

static bool fails(struct fault *fault, int error)
{
    if (++fault->count != fault->failing)
        return false;
    fault->has_failed = true;
    errno = error;
    return true;
}

ssize_t pread(int fd, void *to, size_t size_bytes, off_t position)
{
    return fails(&reads, EIO) ? -1 : syscall(SYS_pread64, fd, to, size_bytes, position);
}

int open(const char *path, int flags, ...)
{
    va_list rest;
    va_start(rest, flags);
    mode_t mode = flags & O_CREAT ? (mode_t)va_arg(rest, int) : 0;
    va_end(rest);
    return fails(&opens, EMFILE) ? -1 : (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

/* Opens the log while the failing-th call fails. NULL: it cannot be opened. */
static struct mqd_partition *open_with(struct fault *fault, int64_t failing, const struct mqd_log_options *options,
                                       struct mqd_recovery *recovery)
{
    *fault = (struct fault){.failing = failing};
    struct mqd_partition *partition = mqd_partition_open(log_path, options, 0, NOW, recovery);
    fault->failing = 0;
    return partition;
}

static void save_snapshot(struct mqd_partition *partition)
{
    size_t size_bytes;
    int64_t offset;
    uint8_t *bytes = mqd_partition_snapshot(partition, &size_bytes, &offset);
    CHECK_EQUAL(mqd_file_replace(log_file(offset, ".snapshot"), bytes, size_bytes), 0);
    free(bytes);
}

static struct mqd_batch numbered(int64_t producer_id, int16_t epoch, int32_t base_sequence, int32_t count)
{
    return (struct mqd_batch){.producer_id = producer_id,
                              .producer_epoch = epoch,
                              .base_sequence = base_sequence,
                              .last_offset_delta = count - 1,
                              .record_count = count};
}

static bool duplicate;
static int64_t original;

/* Checks it, and adds it when it is new. */
static int16_t offer(struct mqd_producers *producers, struct mqd_batch batch, int64_t base_offset)
{
    struct mqd_producer_undo undo;
    original = -1;
    const struct mqd_marker marker = {.commit = true, .coordinator_epoch = 0};
    struct mqd_producer_batch_kind kind = {.marker = batch.attributes & 0x20 ? &marker : NULL,
                                           .from_coordinator = (batch.attributes & 0x20) != 0};
    int16_t error = mqd_producers_check(producers, &batch, kind, &duplicate, &original);
    if (error == 0 && !duplicate && mqd_producers_add(producers, &batch, kind.marker, base_offset, NOW, &undo) < 0)
        return -1;
    return error;
}

TEST(sequences_must_follow)
{
    struct mqd_producers producers = {0};
    CHECK_EQUAL(offer(&producers, numbered(1, 0, 0, 10), 100), 0);
    CHECK_EQUAL(offer(&producers, numbered(1, 0, 10, 5), 110), 0);
    CHECK_EQUAL(offer(&producers, numbered(1, 0, 16, 1), 0), 45); /* gap */
    CHECK_EQUAL(offer(&producers, numbered(1, 0, 12, 3), 0), 45); /* overlaps without being the same */
    CHECK_EQUAL(offer(&producers, numbered(2, 0, 77, 1), 0), 0);  /* unknown: any first sequence */
    CHECK_EQUAL(offer(&producers, numbered(2, 0, 79, 1), 0), 45);
    mqd_producers_free(&producers);
}

/* Kafka's NO_PRODUCER_EPOCH. */
TEST(without_an_epoch_any_sequence_is_accepted)
{
    struct mqd_producers producers = {0};
    CHECK_EQUAL(offer(&producers, numbered(1, -2, 0, 1), 100), 47);
    CHECK_EQUAL(offer(&producers, numbered(1, -1, 5, 1), 100), 0);
    CHECK_EQUAL(offer(&producers, numbered(1, -1, 9, 1), 101), 0);
    CHECK(!duplicate);
    CHECK_EQUAL(offer(&producers, numbered(1, -1, 5, 1), 999), 0);
    CHECK(duplicate);
    CHECK_EQUAL(original, 100);
    CHECK_EQUAL(offer(&producers, numbered(1, -2, 10, 1), 999), 47);

    size_t size_bytes;
    int64_t offset;
    uint8_t *bytes = mqd_producers_encode(&producers, 102, &size_bytes);
    struct mqd_producers again = {0};
    CHECK_EQUAL(mqd_producers_decode(&again, bytes, size_bytes, &offset), 0);
    CHECK_EQUAL(offer(&again, numbered(1, -1, 9, 1), 999), 0);
    CHECK(duplicate);

    CHECK_EQUAL(offer(&again, numbered(1, 3, 7, 1), 102), 0); /* the first epoch may begin anywhere */
    CHECK_EQUAL(offer(&again, numbered(1, 3, 9, 1), 999), 45);
    CHECK_EQUAL(offer(&again, numbered(1, -1, 10, 1), 999), 47);
    free(bytes);
    mqd_producers_free(&producers);
    mqd_producers_free(&again);
}

TEST(the_last_five_are_remembered)
{
    struct mqd_producers producers = {0};
    for (int i = 0; i < 8; i++)
        CHECK_EQUAL(offer(&producers, numbered(1, 0, i * 3, 3), 1000 + i * 3), 0);
    for (int i = 3; i < 8; i++) {
        CHECK_EQUAL(offer(&producers, numbered(1, 0, i * 3, 3), 9999), 0);
        CHECK(duplicate);
        CHECK_EQUAL(original, 1000 + i * 3);
    }
    CHECK_EQUAL(offer(&producers, numbered(1, 0, 6, 3), 0), 46); /* the sixth last */
    CHECK_EQUAL(offer(&producers, numbered(1, 0, 0, 3), 0), 46);
    CHECK_EQUAL(offer(&producers, numbered(1, 0, 9, 4), 0), 45);
    CHECK_EQUAL(offer(&producers, numbered(1, 0, 24, 1), 2000), 0);
    CHECK(!duplicate);
    mqd_producers_free(&producers);
}

/* Two are in flight, the first is refused (the partition was not ready), the second accepted:
 * the first one was never written. */
TEST(unwritten_batches_are_not_reported_as_written)
{
    struct mqd_producers producers = {0};
    CHECK_EQUAL(offer(&producers, numbered(1, 0, 3, 4), 100), 0);
    for (int32_t i = 0; i < 4; i++) {
        CHECK_EQUAL(offer(&producers, numbered(1, 0, 0, 3), 999), 45);
        CHECK(!duplicate);
        CHECK_EQUAL(offer(&producers, numbered(1, 0, 7 + i, 1), 104 + i), 0);
    }
    mqd_producers_free(&producers);
}

static struct mqd_batch of_a_transaction(int32_t base_sequence, int32_t count)
{
    struct mqd_batch batch = numbered(1, 0, base_sequence, count);
    batch.attributes = 0x10;
    return batch;
}

static struct mqd_batch the_marker(void)
{
    struct mqd_batch batch = numbered(1, 0, -1, 1);
    batch.attributes = 0x30;
    return batch;
}

/* A client that gave up records which it had sent (librdkafka, when it aborts) assigns their
 * sequence numbers to the next ones. */
TEST(sequences_of_an_ended_transaction_are_not_duplicates)
{
    struct mqd_producers producers = {0};
    CHECK_EQUAL(offer(&producers, of_a_transaction(0, 3), 100), 0);
    CHECK_EQUAL(offer(&producers, of_a_transaction(3, 4), 103), 0);
    CHECK_EQUAL(offer(&producers, of_a_transaction(3, 4), 999), 0);
    CHECK(duplicate);
    CHECK_EQUAL(offer(&producers, the_marker(), 107), 0);
    for (int after = 0; after < 2; after++) { /* also after a second marker, and from a snapshot */
        CHECK_EQUAL(offer(&producers, of_a_transaction(3, 4), 999), 59);
        CHECK(!duplicate);
        CHECK_EQUAL(offer(&producers, of_a_transaction(0, 3), 999), 59);
        CHECK_EQUAL(offer(&producers, of_a_transaction(0, 1), 999), 59);
        CHECK_EQUAL(offer(&producers, of_a_transaction(6, 3), 999), 59);
        CHECK_EQUAL(offer(&producers, of_a_transaction(8, 1), 999), 45); /* a gap is refused */
        /* a producer that only counts has no transaction to abort */
        CHECK_EQUAL(offer(&producers, numbered(1, 0, 3, 4), 999), 45);
        CHECK_EQUAL(offer(&producers, the_marker(), 108), 0);
        struct mqd_producers copy = {0};
        size_t size_bytes;
        int64_t offset;
        uint8_t *bytes = mqd_producers_encode(&producers, 109, &size_bytes);
        CHECK_EQUAL(mqd_producers_decode(&copy, bytes, size_bytes, &offset), 0);
        free(bytes);
        mqd_producers_free(&producers);
        producers = copy;
    }
    for (int32_t i = 0; i < 6; i++) {
        CHECK_EQUAL(offer(&producers, of_a_transaction(7 + i, 1), 110 + i), 0); /* the following ones are still known */
        CHECK(!duplicate);
        CHECK_EQUAL(offer(&producers, of_a_transaction(7 + i, 1), 999), 0);
        CHECK(duplicate);
        CHECK_EQUAL(original, 110 + i);
        if (i < 4)
            CHECK_EQUAL(offer(&producers, of_a_transaction(3, 4), 999), 45);
    }
    CHECK_EQUAL(offer(&producers, of_a_transaction(7, 1), 999), 46); /* of this transaction, and the sixth last */
    mqd_producers_free(&producers);
}

TEST(epochs_fence)
{
    struct mqd_producers producers = {0};
    CHECK_EQUAL(offer(&producers, numbered(1, 3, 5, 1), 0), 0);
    CHECK_EQUAL(offer(&producers, numbered(1, 2, 0, 1), 0), 47);
    CHECK_EQUAL(offer(&producers, numbered(1, 4, 6, 1), 0), 45); /* a new epoch begins at 0 */
    CHECK_EQUAL(offer(&producers, numbered(1, 4, 0, 1), 1), 0);
    CHECK(!duplicate);
    CHECK_EQUAL(offer(&producers, numbered(1, 3, 6, 1), 0), 47);
    CHECK_EQUAL(offer(&producers, numbered(1, 4, 1, 1), 2), 0);
    mqd_producers_free(&producers);
}

/* A marker bumps the epoch without a sequence number; the next batch may begin anywhere in an
 * epoch without batches. */
TEST(control_batches_carry_no_sequence)
{
    struct mqd_producers producers = {0};
    struct mqd_batch marker = numbered(1, 1, -1, 1);
    marker.attributes = 0x30;
    CHECK_EQUAL(offer(&producers, numbered(1, 0, 0, 1), 0), 0);
    CHECK_EQUAL(offer(&producers, marker, 1), 0);
    CHECK_EQUAL(offer(&producers, numbered(1, 0, 1, 1), 0), 47);
    CHECK_EQUAL(offer(&producers, numbered(1, 1, 0, 1), 2), 0);
    CHECK_EQUAL(offer(&producers, marker, 3), 0);
    CHECK_EQUAL(offer(&producers, numbered(1, 1, 1, 1), 4), 0);
    mqd_producers_free(&producers);
}

TEST(sequences_wrap)
{
    struct mqd_producers producers = {0};
    CHECK_EQUAL(offer(&producers, numbered(1, 0, INT32_MAX - 4, 3), 10), 0); /* .. MAX - 2 */
    CHECK_EQUAL(offer(&producers, numbered(1, 0, INT32_MAX - 1, 4), 13), 0); /* MAX - 1, MAX, 0, 1 */
    CHECK_EQUAL(offer(&producers, numbered(1, 0, 1, 1), 0), 45);
    CHECK_EQUAL(offer(&producers, numbered(1, 0, 2, 1), 17), 0);
    CHECK_EQUAL(offer(&producers, numbered(1, 0, INT32_MAX - 1, 4), 0), 0);
    CHECK(duplicate);
    CHECK_EQUAL(original, 13);
    for (int i = 3; i < 9; i++)
        CHECK_EQUAL(offer(&producers, numbered(1, 0, i, 1), 20 + i), 0);
    CHECK_EQUAL(offer(&producers, numbered(1, 0, INT32_MAX - 4, 3), 0), 46); /* before, across the wrap */
    CHECK_EQUAL(offer(&producers, numbered(2, 0, INT32_MAX, 1), 0), 0);
    CHECK_EQUAL(offer(&producers, numbered(2, 0, 0, 1), 0), 0);
    mqd_producers_free(&producers);
}

TEST(count_is_bounded_least_recently_used_first)
{
    struct mqd_producers producers = {0};
    for (int64_t id = 0; id < 1000; id++) {
        CHECK_EQUAL(offer(&producers, numbered(id, 0, 0, 1), id), 0);
        CHECK_EQUAL(offer(&producers, numbered(0, 0, (int32_t)id, 1), id), 0); /* id 0 stays in use */
        mqd_producers_trim(&producers, 10);
        CHECK(producers.count <= 10);
    }
    CHECK(producers.capacity <= 16);
    CHECK_EQUAL(offer(&producers, numbered(0, 0, 5000, 1), 0), 45); /* still known */
    CHECK_EQUAL(offer(&producers, numbered(999, 0, 7, 1), 0), 45);
    CHECK_EQUAL(offer(&producers, numbered(500, 0, 7, 1), 0), 0); /* forgotten */
    mqd_producers_expire(&producers, NOW + 1);
    CHECK_EQUAL(producers.count, 0);
    mqd_producers_free(&producers);
}

static bool same(const struct mqd_producers *left, const struct mqd_producers *right)
{
    size_t left_bytes, right_bytes;
    uint8_t *a = mqd_producers_encode(left, 5, &left_bytes), *b = mqd_producers_encode(right, 5, &right_bytes);
    bool equal = left_bytes == right_bytes;
    /* order of use may differ after undo: compare as sets, by sorting the text of each producer
     * through decode */
    struct mqd_producers copy = {0};
    int64_t offset;
    equal = equal && mqd_producers_decode(&copy, b, right_bytes, &offset) == 0;
    for (int64_t id = 0; equal && id < 64; id++)
        for (int32_t sequence = 0; equal && sequence < 40; sequence++)
            for (int16_t epoch = 0; epoch < 3; epoch++) {
                struct mqd_batch probe = numbered(id, epoch, sequence, 1);
                bool duplicate_left, duplicate_right;
                int64_t offset_left = -1, offset_right = -1;
                int16_t error_left = mqd_producers_check(left, &probe, (struct mqd_producer_batch_kind){0},
                                                         &duplicate_left, &offset_left);
                int16_t error_right = mqd_producers_check(&copy, &probe, (struct mqd_producer_batch_kind){0},
                                                          &duplicate_right, &offset_right);
                equal = equal && error_left == error_right && duplicate_left == duplicate_right &&
                        (!duplicate_left || offset_left == offset_right);
            }
    mqd_producers_free(&copy);
    free(a);
    free(b);
    return equal;
}

/* R1, with random adds; the copy before is a snapshot, so this tests snapshots as well. */
TEST(undo_is_the_inverse_of_add)
{
    for (uint64_t seed = 1; seed <= 60; seed++) {
        uint64_t random = seed;
        struct mqd_producers producers = {0}, before = {0};
        struct mqd_producer_undo undo[40];
        int32_t next[64] = {0};
        int16_t epochs[64] = {0};
        int count = 0;
        int64_t offset;
        for (int step = 0; step < 80; step++) {
            if (step == 40) {
                size_t size_bytes;
                uint8_t *bytes = mqd_producers_encode(&producers, 40, &size_bytes);
                CHECK_EQUAL(mqd_producers_decode(&before, bytes, size_bytes, &offset), 0);
                CHECK_EQUAL(offset, 40);
                free(bytes);
            }
            int64_t id = (int64_t)(test_random(&random) % (seed % 2 ? 8 : 64));
            if (test_random(&random) % 8 == 0 && epochs[id] < 2)
                epochs[id]++, next[id] = 0;
            const struct mqd_marker marker = {.commit = true};
            bool ends = test_random(&random) % 5 == 0;
            struct mqd_batch batch = ends ? numbered(id, epochs[id], -1, 1) : numbered(id, epochs[id], next[id]++, 1);
            struct mqd_producer_undo one;
            CHECK_EQUAL(mqd_producers_add(&producers, &batch, ends ? &marker : NULL, step, NOW,
                                          step < 40 ? &one : &undo[count]),
                        0);
            count += step >= 40;
        }
        CHECK(!same(&producers, &before));
        while (count > 0)
            mqd_producers_undo(&producers, &undo[--count]);
        CHECK(same(&producers, &before));
        mqd_producers_free(&producers);
        mqd_producers_free(&before);
    }
}

TEST(a_damaged_snapshot_is_refused)
{
    struct mqd_producers producers = {0}, copy = {0};
    int64_t offset;
    size_t size_bytes;
    for (int64_t id = 0; id < 20; id++)
        for (int32_t i = 0; i < id; i++)
            CHECK_EQUAL(offer(&producers, numbered(id, 1, i, 1), i), 0);
    uint8_t *bytes = mqd_producers_encode(&producers, 123456, &size_bytes);
    CHECK_EQUAL(mqd_producers_decode(&copy, bytes, size_bytes, &offset), 0);
    CHECK_EQUAL(offset, 123456);
    CHECK(same(&producers, &copy));
    mqd_producers_free(&copy);
    for (size_t at = 0; at < size_bytes; at += at < 40 ? 1 : 37) {
        bytes[at] ^= 4;
        if (at != 6 && at != 7) /* reserved */
            CHECK(mqd_producers_decode(&copy, bytes, size_bytes, &offset) == -1);
        mqd_producers_free(&copy);
        bytes[at] ^= 4;
    }
    for (size_t cut = 0; cut < size_bytes; cut += 13)
        CHECK(mqd_producers_decode(&copy, bytes, cut, &offset) == -1);
    CHECK_EQUAL(copy.count, 0);
    free(bytes);
    mqd_producers_free(&producers);
}

/* ---- in a partition ---- */

static struct log_batch sent(int64_t producer_id, int16_t epoch, int32_t sequence)
{
    return (struct log_batch){
        .mark = (uint64_t)sequence, .producer_id = producer_id, .producer_epoch = epoch, .base_sequence = sequence};
}

TEST(a_retry_in_the_same_turn_is_a_duplicate)
{
    log_fresh();
    struct mqd_log_options options = log_options();
    struct mqd_partition *partition = log_open(&options, NULL);
    uint8_t bytes[3][256];
    struct mqd_stage_result result;
    bool rolled;
    CHECK_EQUAL(log_stage(partition, bytes[0], sent(4, 0, 0), &result), 0);
    CHECK_EQUAL(log_stage(partition, bytes[1], sent(4, 0, 1), &result), 0);
    CHECK_EQUAL(log_stage(partition, bytes[2], sent(4, 0, 0), &result), 0);
    CHECK(result.duplicate);
    CHECK_EQUAL(result.base_offset, 0);
    CHECK_EQUAL(log_stage(partition, bytes[2], sent(4, 0, 3), &result), 45);
    CHECK_EQUAL(mqd_partition_staged_count(partition), 2);
    CHECK_EQUAL(mqd_partition_write(partition, NOW, &rolled), 0);
    CHECK_EQUAL(mqd_partition_log_end_offset(partition), 2);
    mqd_partition_close(partition, 0);
}

/* The state is the same after every way of closing. */
TEST(state_survives_restarts)
{
    for (int way = 0; way < 4; way++) {
        log_fresh();
        struct mqd_log_options options = log_options();
        options.segment_bytes = 1500;
        struct mqd_partition *partition = log_open(&options, NULL);
        for (int32_t i = 0; i < 40; i++) {
            CHECK_EQUAL(log_append(partition, sent(4, 1, i)), 0);
            CHECK_EQUAL(log_append(partition, sent(5, 0, i * 2 % INT32_MAX ? i : 0)), 0);
            if (way == 1 && i == 20) { /* a snapshot by the helper thread, then a crash */
                size_t size_bytes;
                int64_t offset;
                uint8_t *bytes = mqd_partition_snapshot(partition, &size_bytes, &offset);
                CHECK(bytes && offset == 42);
                CHECK(mqd_partition_snapshot(partition, &size_bytes, &offset) == NULL); /* nothing changed */
                CHECK_EQUAL(mqd_file_replace(log_file(offset, ".snapshot"), bytes, size_bytes), 0);
                free(bytes);
            }
        }
        struct mqd_recovery recovery = log_untrusted();
        recovery.clean_shutdown = way == 2;
        if (way == 3)
            recovery.trusted_end_offset = 80;
        CHECK_EQUAL(mqd_partition_close(partition, way == 2), 0);
        partition = log_open(&options, &recovery);
        CHECK_EQUAL(recovery.log_end_offset, 80);
        struct mqd_stage_result result;
        uint8_t bytes[256];
        CHECK_EQUAL(log_stage(partition, bytes, sent(4, 1, 39), &result), 0);
        CHECK(result.duplicate);
        CHECK_EQUAL(result.base_offset, 78);
        CHECK_EQUAL(log_stage(partition, bytes, sent(4, 1, 35), &result), 0);
        CHECK(result.duplicate);
        CHECK_EQUAL(log_stage(partition, bytes, sent(4, 1, 34), &result), 46);
        CHECK_EQUAL(log_stage(partition, bytes, sent(4, 0, 0), &result), 47);
        CHECK_EQUAL(log_stage(partition, bytes, sent(5, 0, 41), &result), 45);
        CHECK_EQUAL(log_stage(partition, bytes, sent(5, 0, 40), &result), 0);
        mqd_partition_close(partition, 0);
    }
}

TEST(bad_snapshots_are_skipped)
{
    for (int damage = 0; damage < 4; damage++) {
        log_fresh();
        struct mqd_log_options options = log_options();
        struct mqd_partition *partition = log_open(&options, NULL);
        for (int32_t i = 0; i < 30; i++) {
            CHECK_EQUAL(log_append(partition, sent(4, 0, i)), 0);
            if (i % 10 == 9)
                save_snapshot(partition);
        }
        CHECK_EQUAL(log_file_bytes(10, ".snapshot"), -1); /* two are kept */
        mqd_partition_close(partition, 0);
        if (damage == 0)
            log_flip(log_file(30, ".snapshot"), 30);
        if (damage == 1)
            CHECK_EQUAL(truncate(log_file(30, ".snapshot"), 0), 0);
        if (damage == 2) { /* one that contains another offset, and one beyond the end */
            CHECK_EQUAL(unlink(log_file(30, ".snapshot")), 0);
            CHECK_EQUAL(link(log_file(20, ".snapshot"), log_file(30, ".snapshot")), 0);
            CHECK_EQUAL(link(log_file(20, ".snapshot"), log_file(31, ".snapshot")), 0);
        }
        if (damage == 3)
            for (int64_t offset = 20; offset <= 30; offset += 10)
                log_flip(log_file(offset, ".snapshot"), 9);
        struct mqd_recovery recovery = log_untrusted();
        partition = log_open(&options, &recovery);
        struct mqd_stage_result result;
        uint8_t bytes[256];
        CHECK_EQUAL(log_stage(partition, bytes, sent(4, 0, 25), &result), 0);
        CHECK(result.duplicate);
        CHECK_EQUAL(result.base_offset, 25);
        CHECK_EQUAL(log_stage(partition, bytes, sent(4, 0, 24), &result), 46);
        CHECK_EQUAL(log_stage(partition, bytes, sent(4, 0, 30), &result), 0);
        CHECK_EQUAL(log_file_bytes(30, ".snapshot"), -1); /* useless: deleted */
        CHECK_EQUAL(log_file_bytes(31, ".snapshot"), -1);
        mqd_partition_close(partition, 0);
    }
}

/* A start that cannot read a part of the log fails, or knows the producers nevertheless. Most of the
 * log is damaged, below the recovery point, so that the search for the next batch reads too. */
TEST(an_unreadable_part_loses_no_producer)
{
    enum { COUNT = 60, FIRST_DAMAGED = 20, DAMAGED_END = 58 };
    struct mqd_log_options options = log_options();
    log_fresh();
    struct mqd_partition *partition = log_open(&options, NULL);
    for (int32_t i = 0; i < COUNT; i++) {
        struct log_batch batch = sent(4, 0, i);
        batch.body_bytes = 8000;
        CHECK_EQUAL(log_append(partition, batch), 0);
    }
    mqd_partition_close(partition, 0);
    int64_t size_bytes = log_file_bytes(0, ".log"), batch_bytes = size_bytes / COUNT;
    uint8_t *bytes = malloc((size_t)size_bytes);
    int fd = open(log_file(0, ".log"), O_RDONLY);
    CHECK_EQUAL(read(fd, bytes, (size_t)size_bytes), size_bytes);
    close(fd);
    memset(bytes + FIRST_DAMAGED * batch_bytes, 0, (size_t)((DAMAGED_END - FIRST_DAMAGED) * batch_bytes));
    int64_t refused = 0, failing = 0;
    do {
        log_fresh();
        CHECK_EQUAL(mkdir(log_path, 0755), 0);
        log_write_file(log_file(0, ".log"), bytes, (size_t)size_bytes);
        struct mqd_recovery recovery = log_untrusted();
        recovery.recovery_point_offset = COUNT;
        partition = open_with(&reads, ++failing, &options, &recovery);
        refused += !partition;
        if (partition) {
            struct mqd_stage_result result;
            uint8_t staged[256];
            CHECK_EQUAL(recovery.log_end_offset, COUNT);
            CHECK_EQUAL(log_stage(partition, staged, sent(4, 0, COUNT - 1), &result), 0);
            CHECK(result.duplicate);
            mqd_partition_close(partition, 0);
        }
    } while (reads.has_failed);
    test_message("%lld of %lld reads are essential", (long long)refused, (long long)failing - 1);
    CHECK(refused > 0);
    free(bytes);
}

/* ... nor does a start with too few descriptors, which deletes no snapshot either. */
TEST(a_lack_of_descriptors_loses_no_producer)
{
    struct mqd_log_options options = log_options();
    log_fresh();
    struct mqd_partition *partition = log_open(&options, NULL);
    for (int32_t i = 0; i < 10; i++)
        CHECK_EQUAL(log_append(partition, sent(4, 0, i)), 0);
    save_snapshot(partition);
    mqd_partition_close(partition, 0);
    int64_t refused = 0, failing = 0;
    do {
        struct mqd_recovery recovery = log_untrusted();
        partition = open_with(&opens, ++failing, &options, &recovery);
        refused += !partition;
        if (partition)
            mqd_partition_close(partition, 0);
        CHECK(log_file_bytes(10, ".snapshot") > 0);
    } while (opens.has_failed);
    test_message("%lld of %lld opens are essential", (long long)refused, (long long)failing - 1);
    CHECK(refused > 0 && refused < failing);
}

/* A transaction that spans a snapshot; the index of aborted transactions is damaged. A start without
 * the descriptors for the snapshot must not rebuild the index as if there were no such transaction. */
TEST(a_lack_of_descriptors_loses_no_aborted_transaction)
{
    struct mqd_log_options options = log_options();
    options.segment_bytes = 300;
    int64_t failing = 0, damaged;
    do {
        log_fresh();
        struct mqd_partition *partition = log_open(&options, NULL);
        struct log_batch data = {.attributes = 0x10, .producer_id = 4}, abort = {.marker = 1, .producer_id = 4};
        CHECK_EQUAL(log_append(partition, data), 0);
        for (int32_t i = 0; i < 6; i++)
            CHECK_EQUAL(log_append(partition, sent(5, 0, i)), 0);
        save_snapshot(partition);
        for (int32_t i = 6; i < 12; i++)
            CHECK_EQUAL(log_append(partition, sent(5, 0, i)), 0);
        CHECK_EQUAL(log_append(partition, abort), 0);
        damaged = partition->active.base_offset;
        for (int32_t i = 12; i < 18; i++)
            CHECK_EQUAL(log_append(partition, sent(5, 0, i)), 0);
        save_snapshot(partition); /* from here on the start knows all producers */
        struct mqd_recovery recovery = log_untrusted();
        recovery.recovery_point_offset = recovery.trusted_end_offset = log_positions(partition).log_end_offset;
        struct mqd_recovery first = recovery;
        mqd_partition_close(partition, 0);
        CHECK_EQUAL(truncate(log_file(damaged, ".txnindex"), 17), 0);
        partition = open_with(&opens, ++failing, &options, &first);
        mqd_partition_close(partition ? partition : log_open(&options, &recovery), 0);
        struct mqd_aborted_list aborted = {NULL, 0, 0};
        CHECK_EQUAL(mqd_txn_index_load(log_path, damaged, INT64_MAX, &aborted), 0);
        CHECK_EQUAL(aborted.count, 1);
        free(aborted.entries);
    } while (opens.has_failed);
    CHECK(failing > 50);
}

TEST(producers_expire_and_are_bounded)
{
    log_fresh();
    struct mqd_log_options options = log_options();
    options.producer_id_count_max = 5;
    options.producer_id_expiration_ms = 1000;
    struct mqd_partition *partition = log_open(&options, NULL);
    for (int64_t id = 1; id <= 20; id++)
        CHECK_EQUAL(log_append(partition, sent(id, 0, 0)), 0);
    CHECK_EQUAL(mqd_partition_do_periodic_work(partition, NOW + 1000), 5);
    CHECK_EQUAL(mqd_partition_do_periodic_work(partition, NOW + 1001), 0);
    CHECK_EQUAL(log_append(partition, sent(20, 0, 8)), 0); /* forgotten: any sequence number */
    mqd_partition_close(partition, 0);
}
