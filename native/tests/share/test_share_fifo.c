/* FIFO in the state of share-partitions (F1) by itself, under the sanitizers. Random histories:
 * tests/unit/native/test_share_model.py, tests/sim/share/test_fifo_sim.py. */
#include "mqd_test.h"
#include "share/state.h"

#define BLOCKS 8192
#define RECORDS 1000 /* a batch */

static uint8_t *memory;
static struct mqd_share_pool pool;

static struct mqd_share made(uint32_t open_max, uint32_t fifo)
{
    memory = aligned_alloc(64, (size_t)BLOCKS * MQD_SHARE_BLOCK_BYTES);
    mqd_share_pool_init(&pool, memory, (uint64_t)BLOCKS * MQD_SHARE_BLOCK_BYTES);
    struct mqd_share_settings settings = {.lock_ms = 100, .delivery_limit = 5, .open_max = open_max, .fifo = fifo};
    struct mqd_share share;
    mqd_share_init(&share, &pool, &settings, 0);
    return share;
}

static void ended(struct mqd_share *share)
{
    mqd_share_check(share);
    mqd_share_destroy(share);
    CHECK_EQUAL(pool.used, 0);
    free(memory);
}

/* Acquires available records in the batch of RECORDS records from which to read; record n has
 * key n modulo key_count, from 1 on. Returns how many. */
static uint32_t acquire(struct mqd_share *share, uint64_t member, uint32_t most, uint32_t key_count)
{
    static struct mqd_share_record records[RECORDS];
    struct mqd_share_acquisition asked = {.member = member, .records_max = most, .strict = 1};
    struct mqd_share_run runs[RECORDS];
    int64_t from = mqd_share_next_offset(share);
    if (from < 0)
        return 0;
    int64_t first = from - from % RECORDS;
    for (int32_t delta = 0; delta < RECORDS; delta++)
        records[delta] = (struct mqd_share_record){delta, (uint32_t)(first + delta) % key_count * 2654435761u + 1};
    struct mqd_share_batch batch = {
        .first = first, .last = first + RECORDS - 1, .records = records, .record_count = RECORDS};
    uint32_t count = mqd_share_acquire(share, &asked, from, &batch, 1, runs, RECORDS), acquired = 0;
    for (uint32_t index = 0; index < count; index++)
        acquired += (uint32_t)(runs[index].last - runs[index].first) + 1;
    return acquired;
}

static int acknowledge(struct mqd_share *share, int64_t first, int64_t last, uint8_t type)
{
    struct mqd_share_acknowledgement given = {.first = first, .last = last, .types = &type, .type_count = 1};
    return mqd_share_acknowledge(share, 1, &given, 1, 1);
}

TEST(the_next_record_of_a_key_comes_when_the_one_before_has_ended)
{
    struct mqd_share share = made(2000, 1);
    CHECK_EQUAL(acquire(&share, 1, 1000, 10), 10);
    CHECK_EQUAL(mqd_share_state_at(&share, 10).state, MQD_SHARE_WAITING);
    CHECK_EQUAL(acquire(&share, 1, 1, 10), 0);
    CHECK_EQUAL(acknowledge(&share, 3, 3, MQD_SHARE_ACCEPT), 0);
    CHECK_EQUAL(mqd_share_next_offset(&share), 13);
    CHECK_EQUAL(acquire(&share, 1, 1000, 10), 1);
    CHECK_EQUAL(mqd_share_state_at(&share, 13).state, MQD_SHARE_ACQUIRED);
    ended(&share);
}

TEST(a_released_record_keeps_its_place)
{
    struct mqd_share share = made(2000, 1);
    CHECK_EQUAL(acquire(&share, 1, 1000, 10), 10);
    CHECK_EQUAL(acknowledge(&share, 3, 3, MQD_SHARE_RELEASE), 0);
    CHECK_EQUAL(mqd_share_next_offset(&share), 3);
    CHECK_EQUAL(mqd_share_state_at(&share, 13).state, MQD_SHARE_WAITING);
    CHECK_EQUAL(acquire(&share, 1, 1000, 10), 1);
    CHECK_EQUAL(mqd_share_state_at(&share, 3).count, 2);
    ended(&share);
}

TEST(nothing_is_acquired_whose_key_is_not_known)
{
    struct mqd_share share = made(2000, 1);
    struct mqd_share_acquisition asked = {.member = 1, .records_max = 10};
    struct mqd_share_batch batch = {.first = 0, .last = 9};
    struct mqd_share_run run;
    CHECK_EQUAL(mqd_share_acquire(&share, &asked, 0, &batch, 1, &run, 1), 0);
    CHECK_EQUAL(mqd_share_next_offset(&share), 0);
    ended(&share);
}

/* Buckets are split beyond one block, and finished records free their memory. */
TEST(many_keys_are_open)
{
    uint32_t keys = test_long() ? 1000000 : 20000, open = 0;
    struct mqd_share share = made(MQD_SHARE_SPAN_MAX, 1);
    uint32_t before = pool.used;
    while (open < keys)
        open += acquire(&share, 1, RECORDS, keys * 2);
    mqd_share_check(&share);
    test_message("bytes a record: %" PRIu64, (uint64_t)(pool.used - before) * MQD_SHARE_BLOCK_BYTES / open);
    for (uint32_t stride = 0; stride < 7; stride++)
        for (int64_t offset = stride; offset < open; offset += 7)
            CHECK_EQUAL(acknowledge(&share, offset, offset, MQD_SHARE_ACCEPT), 0);
    CHECK_EQUAL(share.open_count, 0);
    ended(&share);
}

TEST(one_key_has_many_records)
{
    uint32_t records = test_long() ? 100000 : 5000;
    struct mqd_share share = made(records, 1);
    CHECK_EQUAL(acquire(&share, 1, 1, 1), 1);
    for (uint32_t offset = 0; offset < records; offset++) {
        while (acquire(&share, 1, 1, 1))
            ;
        CHECK_EQUAL(share.acquired_count, 1);
        CHECK_EQUAL(acknowledge(&share, offset, offset, MQD_SHARE_ACCEPT), 0);
    }
    CHECK(share.start == records);
    ended(&share);
}

static int64_t cpu_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return time.tv_sec * 1000000000ll + time.tv_nsec;
}

static int64_t measured(uint32_t fifo, uint32_t key_count, int64_t records)
{
    struct mqd_share share = made(5000, fifo);
    int64_t begin_ns = cpu_ns(), done = 0;
    while (done < records) {
        acquire(&share, 1, RECORDS, key_count);
        for (int64_t offset = share.start, end = share.end; offset < end; offset++)
            if (mqd_share_state_at(&share, offset).state == MQD_SHARE_ACQUIRED) {
                acknowledge(&share, offset, offset, MQD_SHARE_ACCEPT);
                done++;
            }
    }
    int64_t ns = (cpu_ns() - begin_ns) / done;
    ended(&share);
    return ns;
}

TEST(speed)
{
    int64_t records = test_long() ? 3000000 : 30000;
    test_message("CPU-ns a record, each acknowledged by itself: without FIFO %" PRId64 ", keys that differ %" PRId64
                 ", 100 keys %" PRId64,
                 measured(0, 100, records), measured(1, 1 << 30, records), measured(1, 100, records));
}
