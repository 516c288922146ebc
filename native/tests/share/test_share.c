/* The state of share-partitions by itself: single rules, and cases that random histories rarely
 * reach, under the sanitizers. Random histories against a plain array:
 * tests/unit/native/test_share_model.py. Nothing here starts threads: a state belongs to one
 * (share/state.h). */
#include "mqd_test.h"
#include "share/state.h"

#define BLOCKS 4096

static uint8_t *memory;
static struct mqd_share_pool pool;

static struct mqd_share made(uint32_t blocks, int32_t delivery_limit, uint32_t open_max, int64_t start)
{
    memory = aligned_alloc(64, (size_t)blocks * MQD_SHARE_BLOCK_BYTES);
    mqd_share_pool_init(&pool, memory, (uint64_t)blocks * MQD_SHARE_BLOCK_BYTES);
    struct mqd_share_settings settings = {.lock_ms = 100, .delivery_limit = delivery_limit, .open_max = open_max};
    struct mqd_share share;
    mqd_share_init(&share, &pool, &settings, start);
    return share;
}

static void ended(struct mqd_share *share)
{
    mqd_share_check(share);
    mqd_share_destroy(share);
    CHECK_EQUAL(pool.used, 0);
    free(memory);
}

/* Acquires up to `most` records of a log that is one batch. Returns how many. */
static uint32_t acquire(struct mqd_share *share, uint64_t member, int64_t now_ms, uint32_t most, int64_t log_end)
{
    struct mqd_share_acquisition asked = {.member = member, .now_ms = now_ms, .records_max = most, .strict = 1};
    struct mqd_share_run runs[64];
    int64_t from = mqd_share_next_offset(share);
    if (from < 0 || from >= log_end)
        return 0;
    struct mqd_share_batch batch = {.first = from, .last = log_end - 1};
    uint32_t count = mqd_share_acquire(share, &asked, from, &batch, 1, runs, 64), records = 0;
    for (uint32_t index = 0; index < count; index++)
        records += (uint32_t)(runs[index].last - runs[index].first) + 1;
    return records;
}

static int acknowledge(struct mqd_share *share, uint64_t member, int64_t first, int64_t last, uint8_t type,
                       int64_t now_ms)
{
    struct mqd_share_acknowledgement given = {.first = first, .last = last, .types = &type, .type_count = 1};
    return mqd_share_acknowledge(share, member, &given, 1, now_ms);
}

TEST(a_record_is_acquired_once_and_acknowledged_by_its_holder)
{
    struct mqd_share share = made(64, 5, 2000, 0);
    CHECK_EQUAL(acquire(&share, 1, 0, 10, 100), 10);
    CHECK_EQUAL(acquire(&share, 2, 0, 10, 100), 10);
    CHECK_EQUAL(acknowledge(&share, 1, 10, 10, MQD_SHARE_ACCEPT, 1), MQD_SHARE_INVALID_RECORD_STATE);
    CHECK_EQUAL(acknowledge(&share, 1, 5, 10, MQD_SHARE_ACCEPT, 1), MQD_SHARE_INVALID_RECORD_STATE);
    CHECK_EQUAL(mqd_share_state_at(&share, 5).state, MQD_SHARE_ACQUIRED);
    CHECK_EQUAL(acknowledge(&share, 1, 0, 9, MQD_SHARE_ACCEPT, 1), 0);
    CHECK_EQUAL(share.start, 10);
    CHECK_EQUAL(acknowledge(&share, 1, 0, 9, MQD_SHARE_ACCEPT, 1), 0); /* again: the acquisition has ended */
    CHECK_EQUAL(acknowledge(&share, 1, 5, 10, MQD_SHARE_ACCEPT, 1), MQD_SHARE_INVALID_RECORD_STATE);
    CHECK_EQUAL(acknowledge(&share, 2, 5, 12, MQD_SHARE_ACCEPT, 1), 0);
    CHECK_EQUAL(share.start, 13);
    CHECK_EQUAL(acknowledge(&share, 2, 13, 20, MQD_SHARE_ACCEPT, 1), MQD_SHARE_INVALID_REQUEST);
    CHECK_EQUAL(acknowledge(&share, 2, 13, 19, MQD_SHARE_ACCEPT, 1), 0);
    CHECK_EQUAL(acknowledge(&share, 2, 20, 20, MQD_SHARE_ACCEPT, 1), MQD_SHARE_INVALID_RECORD_STATE);
    ended(&share);
}

TEST(a_lock_that_has_ended_is_lost_also_before_it_is_noticed)
{
    struct mqd_share share = made(64, 5, 2000, 0);
    CHECK_EQUAL(acquire(&share, 1, 0, 3, 100), 3);
    CHECK_EQUAL(mqd_share_deadline(&share), 100);
    CHECK_EQUAL(acknowledge(&share, 1, 0, 0, MQD_SHARE_ACCEPT, 100), MQD_SHARE_INVALID_RECORD_STATE);
    CHECK_EQUAL(acknowledge(&share, 1, 1, 1, MQD_SHARE_RENEW, 60), 0);
    CHECK_EQUAL(mqd_share_expire(&share, 100, 1000), 2);
    CHECK_EQUAL(mqd_share_state_at(&share, 1).state, MQD_SHARE_ACQUIRED);
    CHECK_EQUAL(mqd_share_deadline(&share), 160);
    CHECK_EQUAL(mqd_share_expire(&share, 160, 1000), 1);
    CHECK_EQUAL(mqd_share_deadline(&share), MQD_SHARE_NEVER);
    ended(&share);
}

/* A poison record whose lock always expires: it is archived, its neighbours are not. */
TEST(a_poison_record_is_delivered_alone_the_last_time)
{
    struct mqd_share share = made(64, 5, 2000, 0);
    int64_t now_ms = 0;
    for (uint32_t delivery = 1; delivery <= 200 && share.start < 64; delivery++, now_ms += 200) {
        if (!acquire(&share, 1, now_ms, 64, 64))
            break;
        if (mqd_share_state_at(&share, 7).state == MQD_SHARE_ACQUIRED) /* its holder crashes */
            CHECK_EQUAL(mqd_share_expire(&share, now_ms + 100, 1000) > 0, 1);
        for (int64_t offset = share.start; offset < share.end; offset++)
            if (mqd_share_state_at(&share, offset).state == MQD_SHARE_ACQUIRED)
                CHECK_EQUAL(acknowledge(&share, 1, offset, offset, MQD_SHARE_ACCEPT, now_ms), 0);
    }
    CHECK_EQUAL(share.start, 64);
    struct mqd_share_run runs[8];
    struct mqd_share_difference difference;
    mqd_share_take_difference(&share, runs, 8, &difference);
    CHECK_EQUAL(difference.start, 64);
    CHECK_EQUAL(difference.run_count, 0);
    ended(&share);
}

TEST(one_slow_record_does_not_hold_up_a_million)
{
    struct mqd_share share = made(BLOCKS, 5, 2000, 500);
    CHECK_EQUAL(acquire(&share, 1, 0, 1, 1 << 21), 1); /* the slow one */
    for (;;) {
        uint32_t taken = acquire(&share, 2, 0, 500, 1 << 21);
        if (!taken)
            break;
        CHECK_EQUAL(acknowledge(&share, 2, share.end - taken, share.end - 1, MQD_SHARE_ACCEPT, 1), 0);
        struct mqd_share_run runs[8];
        struct mqd_share_difference difference;
        mqd_share_take_difference(&share, runs, 8, &difference);
        CHECK(difference.is_whole);
    }
    CHECK_EQUAL(share.start, 500);
    CHECK_EQUAL(share.end, 500 + MQD_SHARE_SPAN_MAX);
    CHECK(pool.used < 16); /* finished pages are one cell each */
    CHECK_EQUAL(acknowledge(&share, 1, 500, 500, MQD_SHARE_ACCEPT, 1), 0);
    CHECK_EQUAL(share.start, share.end);
    CHECK_EQUAL(acquire(&share, 1, 0, 10, 1 << 21), 10);
    ended(&share);
}

TEST(a_million_in_flight_fit_into_sixteen_megabytes)
{
    struct mqd_share share = made(BLOCKS, 5, MQD_SHARE_SPAN_MAX, 0);
    while (acquire(&share, 1, 0, 500, 1 << 21)) {
    }
    CHECK_EQUAL(share.acquired_count, MQD_SHARE_SPAN_MAX);
    test_message("%u in flight: %u KiB", share.acquired_count, pool.used * MQD_SHARE_BLOCK_BYTES / 1024);
    CHECK(pool.used * (uint64_t)MQD_SHARE_BLOCK_BYTES <= 16 << 20);
    CHECK_EQUAL(mqd_share_release_member(&share, 1, 0), MQD_SHARE_SPAN_MAX);
    ended(&share);
}

TEST(acquiring_ends_when_the_pool_is_used_up_and_finishing_does_not)
{
    for (uint32_t blocks = 0; blocks < 12; blocks++) {
        struct mqd_share share = made(blocks ? blocks : 1, 5, 100000, 1000);
        pool.block_count = blocks;
        uint32_t taken = 0, now;
        while ((now = acquire(&share, 1, 0, 700, 100000)))
            taken += now;
        CHECK(share.pool_exhausted);
        mqd_share_check(&share);
        if (taken) {
            CHECK_EQUAL(acknowledge(&share, 1, 1000, 1000, MQD_SHARE_RENEW, 50), 0);
            mqd_share_check(&share);
            CHECK_EQUAL(acknowledge(&share, 1, 1000, 1000 + taken - 1, MQD_SHARE_ACCEPT, 60), 0);
        }
        CHECK_EQUAL(share.start, 1000 + taken);
        ended(&share);
    }
}

TEST(a_backoff_doubles_with_each_delivery)
{
    struct mqd_share share = made(64, 5, 2000, 0);
    share.settings.backoff_ms = 20;
    share.settings.backoff_ms_max = 50;
    static const int64_t expected[] = {20, 40, 50, 50};
    int64_t now_ms = 1000;
    for (int delivery = 0; delivery < 4; delivery++) {
        CHECK_EQUAL(acquire(&share, 1, now_ms, 1, 1), 1);
        CHECK_EQUAL(acknowledge(&share, 1, 0, 0, MQD_SHARE_RELEASE, now_ms), 0);
        CHECK_EQUAL(acquire(&share, 1, now_ms, 1, 1), 0);
        CHECK_EQUAL(mqd_share_deadline(&share), now_ms + expected[delivery]);
        CHECK_EQUAL(mqd_share_expire(&share, now_ms + expected[delivery] - 1, 10), 0);
        mqd_share_check(&share);
        now_ms += expected[delivery];
        CHECK_EQUAL(mqd_share_expire(&share, now_ms, 10), 1);
    }
    CHECK_EQUAL(acquire(&share, 1, now_ms, 1, 1), 1);
    CHECK_EQUAL(acknowledge(&share, 1, 0, 0, MQD_SHARE_RELEASE, now_ms), 0); /* the limit */
    CHECK_EQUAL(share.start, 1);
    CHECK_EQUAL(mqd_share_deadline(&share), MQD_SHARE_NEVER);
    ended(&share);
}

/* Each release needs a separate row: another time, far from the others, another count. */
TEST(a_backoff_lasts_without_memory_for_it)
{
    struct mqd_share share = made(16, 100, 100000, 0);
    share.settings.backoff_ms = 10;
    share.settings.backoff_ms_max = 10000;
    int64_t now_ms = 0;
    for (uint32_t round = 0; round < 40; round++) {
        uint32_t taken = 0, now;
        while ((now = acquire(&share, 1, now_ms, 100, 8000)))
            taken += now;
        if (round == 1)
            pool.block_count = pool.used; /* from now on there is none */
        for (int64_t offset = share.end - 1; taken && offset >= share.start; offset -= 301) {
            if (mqd_share_state_at(&share, offset).state != MQD_SHARE_ACQUIRED)
                continue;
            CHECK_EQUAL(acknowledge(&share, 1, offset, offset, MQD_SHARE_RELEASE, now_ms++), 0);
            CHECK_EQUAL(mqd_share_state_at(&share, offset).state, MQD_SHARE_DELAYED);
        }
        mqd_share_release_member(&share, 1, now_ms);
        CHECK_EQUAL(share.acquired_count, 0);
        CHECK_EQUAL(share.delayed_count, share.open_count);
        mqd_share_check(&share);
        now_ms = mqd_share_deadline(&share);
        mqd_share_expire(&share, now_ms, UINT32_MAX);
    }
    mqd_share_set_log_start(&share, 8000); /* what waits is gone */
    CHECK_EQUAL(share.delayed_count, 0);
    ended(&share);
}

/* Records that are not in the log, and records that may not be delivered, any number of them. */
TEST(holes_and_aborted_batches_are_archived)
{
    struct mqd_share share = made(BLOCKS, 5, 2000, 0);
    struct mqd_share_acquisition asked = {.member = 1, .records_max = 500};
    struct mqd_share_run runs[8];
    struct mqd_share_batch first[3] = {
        {.first = 1ll << 40, .last = (1ll << 40) + 9, .skipped = 1},
        {.first = (1ll << 40) + 10, .last = (1ll << 40) + 19},
        {.first = (1ll << 40) + 4000, .last = (1ll << 40) + 4009},
    };
    CHECK_EQUAL(mqd_share_acquire(&share, &asked, 0, first, 3, runs, 8), 2);
    CHECK_EQUAL(share.start, (1ll << 40) + 10);
    CHECK_EQUAL(runs[0].first, (1ll << 40) + 10);
    CHECK_EQUAL(runs[0].last, (1ll << 40) + 19);
    CHECK_EQUAL(runs[1].first, (1ll << 40) + 4000);
    CHECK_EQUAL(share.open_count, 20);
    mqd_share_check(&share);
    /* beyond the span: later, when the open ones are finished */
    struct mqd_share_batch far = {.first = 1ll << 50, .last = 1ll << 50};
    CHECK_EQUAL(mqd_share_acquire(&share, &asked, share.end, &far, 1, runs, 8), 0);
    CHECK_EQUAL(share.end - share.start, MQD_SHARE_SPAN_MAX);
    CHECK_EQUAL(mqd_share_next_offset(&share), -1);
    CHECK_EQUAL(mqd_share_release_member(&share, 1, 0), 20);
    mqd_share_set_log_start(&share, 1ll << 50);
    CHECK_EQUAL(acknowledge(&share, 9, 1ll << 40, (1ll << 50) - 1, MQD_SHARE_ACCEPT, 0), 0); /* it is gone */
    CHECK_EQUAL(mqd_share_next_offset(&share), 1ll << 50);
    CHECK_EQUAL(mqd_share_acquire(&share, &asked, 1ll << 50, &far, 1, runs, 8), 1);
    ended(&share);
}

TEST(returned_records_were_not_delivered)
{
    struct mqd_share share = made(64, 2, 2000, 0);
    for (int tries = 0; tries < 10; tries++) {
        CHECK_EQUAL(acquire(&share, 1, 0, 10, 100), 10);
        CHECK_EQUAL(mqd_share_state_at(&share, 5).count, 1);
        CHECK_EQUAL(acknowledge(&share, 1, 0, 9, MQD_SHARE_RETURN, 1), 0);
        CHECK_EQUAL(mqd_share_state_at(&share, 5).count, 0);
        CHECK_EQUAL(mqd_share_next_offset(&share), 0);
        mqd_share_check(&share);
    }
    CHECK_EQUAL(acquire(&share, 1, 0, 10, 100), 10);
    CHECK_EQUAL(acknowledge(&share, 1, 0, 9, MQD_SHARE_RELEASE, 1), 0);
    CHECK_EQUAL(acquire(&share, 1, 0, 1, 1), 1); /* the last delivery, which is returned, too */
    CHECK_EQUAL(acknowledge(&share, 1, 0, 0, MQD_SHARE_RETURN, 1), 0);
    CHECK_EQUAL(acquire(&share, 1, 0, 1, 1), 1);
    CHECK_EQUAL(acknowledge(&share, 1, 0, 0, MQD_SHARE_RELEASE, 1), 0);
    CHECK_EQUAL(mqd_share_next_offset(&share), 1);
    ended(&share);
}

TEST(malformed_acknowledgements_are_refused_whole)
{
    struct mqd_share share = made(64, 5, 2000, 0);
    uint8_t accept = MQD_SHARE_ACCEPT, unknown = MQD_SHARE_RETURN + 1;
    CHECK_EQUAL(acquire(&share, 1, 0, 10, 100), 10);
    struct mqd_share_acknowledgement lists[][2] = {
        {{0, 1, &accept, 1}, {3, 2, &accept, 1}},  {{0, 2, &accept, 1}, {1, 2, &accept, 1}},
        {{0, 1, &accept, 1}, {4, 5, &accept, 0}},  {{0, 1, &accept, 1}, {4, 4, &unknown, 1}},
        {{-2, 1, &accept, 1}, {4, 4, &accept, 1}}, {{0, 1, &accept, 1}, {4, INT64_MAX, &accept, 7}},
    };
    for (size_t index = 0; index < sizeof lists / sizeof *lists; index++)
        CHECK_EQUAL(mqd_share_acknowledge(&share, 1, lists[index], 2, 1), MQD_SHARE_INVALID_REQUEST);
    struct mqd_share_acknowledgement beyond[2] = {{0, 1, &accept, 1}, {4, INT64_MAX, &accept, 1}};
    CHECK_EQUAL(mqd_share_acknowledge(&share, 1, beyond, 2, 1), MQD_SHARE_INVALID_REQUEST);
    struct mqd_share_acknowledgement again[2] = {{0, 1, &accept, 1}, {1, 2, &accept, 1}};
    CHECK_EQUAL(mqd_share_acknowledge(&share, 1, again, 2, 1), MQD_SHARE_INVALID_RECORD_STATE);
    CHECK_EQUAL(share.acquired_count, 10);
    ended(&share);
}

/* ---- speed, only printed. An optimised build:
 * make BUILD=build/fast ASAN_FLAGS=-O3 TEST_FLAGS=-O2 build/fast/asan/test_share ---- */

static int64_t cpu_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

/* `step` records are acknowledged by one range. */
static int64_t measured(uint32_t acquired, uint32_t step, int64_t records)
{
    struct mqd_share share = made(BLOCKS, 5, 2000, 0);
    int64_t begin_ns = cpu_ns(), done = 0;
    while (done < records) {
        uint32_t taken = acquire(&share, 1, 0, acquired, records);
        for (uint32_t at = 0; at < taken; at += step)
            acknowledge(&share, 1, done + at, done + at + step - 1, MQD_SHARE_ACCEPT, 1);
        done += taken;
        struct mqd_share_run runs[8];
        struct mqd_share_difference difference;
        if (acquired > 1)
            mqd_share_take_difference(&share, runs, 8, &difference);
    }
    int64_t spent = (cpu_ns() - begin_ns) / records;
    ended(&share);
    return spent;
}

TEST(speed)
{
    int64_t records = test_long() ? 5000000 : 50000, whole = measured(500, 500, records);
    int64_t single = measured(500, 1, records), alone = measured(1, 1, records);
    struct mqd_share share = made(BLOCKS, 1000, 2000, 0);
    acquire(&share, 1, 0, 500, 500);
    int64_t begin_ns = cpu_ns(), rounds = records / 500;
    for (int64_t round = 0; round < rounds; round++) {
        mqd_share_expire(&share, round * 100 + 100, UINT32_MAX);
        acquire(&share, 1, round * 100 + 100, 500, 500);
        if (round % 300 == 299) { /* begin again with new records, below the limit */
            acknowledge(&share, 1, share.start, share.end - 1, MQD_SHARE_ACCEPT, round * 100 + 101);
            mqd_share_destroy(&share);
            mqd_share_init(&share, &pool,
                           &(struct mqd_share_settings){.lock_ms = 100, .delivery_limit = 1000, .open_max = 2000}, 0);
            acquire(&share, 1, round * 100 + 100, 500, 500);
        }
    }
    int64_t expired = (cpu_ns() - begin_ns) / (rounds * 500);
    ended(&share);
    test_message("CPU-ns a record: 500 by one range %" PRId64 ", singly %" PRId64 ", one at a time %" PRId64
                 ", acquired and expired %" PRId64,
                 whole, single, alone, expired);
}
