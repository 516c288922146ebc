/* What a worker does once a second, and the release of what idle partitions hold. In tests without
 * a backend the worker's thread has ended, and the test runs the turns. */
#include "mqd_faults_test.h"
#include "mqd_counter_test.h"
#include "log/partition_state.h"
#include "server/reactor.h"

enum { FIRST = SLOTS, IDLE = (SLOTS_MAX - SLOTS) / 2, SLEEP_S = 1, RELEASED_MS = 750 * IDLE, SLEEP_TURNS_MAX = 20 };

/* A turn with housekeeping. */
static void keep_house(struct mqd_reactor *r)
{
    r->housekeeping_ms = 0;
    mqd_reactor_turn(r, NULL, 0);
}

TEST(housekeeping_reads_no_slot_that_was_never_owned)
{
    struct bench *b = bench_start(MQD_BACKEND_EPOLL, NULL);
    struct mqd_reactor *r = b->reactors[0];
    CHECK_OR(mqd_reactor_stop(r) == 0, abort());
    r->owned[SLOTS_MAX] = (void *)1; /* reading it would be a crash */
    keep_house(r);
    r->owned[SLOTS_MAX] = NULL;
    bench_stop(b);
}

/* Opens further partitions at worker 0, which were last written to long ago. */
static void open_idle(struct bench *b)
{
    char path[128];
    for (uint32_t slot = FIRST; slot < SLOTS_MAX; slot += 2) {
        struct mqd_recovery recovery = log_untrusted();
        snprintf(path, sizeof path, "%s/idle-%u", log_root, slot);
        CHECK_EQUAL(mqd_slot_assign(b->control, slot, b->topic_id, (int32_t)slot, 0, 0, 0), 0);
        b->partitions[slot] = mqd_partition_open(path, &b->log_options, 0, NOW, &recovery);
        CHECK_OR(b->partitions[slot], abort());
        CHECK_EQUAL(log_append(b->partitions[slot], (struct log_batch){.mark = 1}), 0);
        CHECK_EQUAL(log_sync(b->partitions[slot]), 0);
        CHECK_EQUAL(mqd_reactor_partition_open(b->reactors[0], ++b->token, slot, 0, b->partitions[slot]), 0);
        CHECK_EQUAL(bench_done(b, 0, b->token).error, 0);
    }
}

/* Of the partitions of open_idle, those that hold memory or reserved blocks. */
static uint32_t holding(struct bench *b)
{
    uint32_t count = 0;
    for (uint32_t slot = FIRST; slot < SLOTS_MAX; slot += 2) {
        const struct mqd_partition *partition = b->partitions[slot];
        count += mqd_load_acquire(&partition->stage) ||
                 mqd_load_acquire(&partition->active.allocated_bytes) > partition->active.size_bytes;
    }
    return count;
}

TEST(a_turn_releases_what_one_idle_partition_holds)
{
    struct bench *b = bench_start(MQD_BACKEND_EPOLL, NULL);
    struct mqd_reactor *r = b->reactors[0];
    CHECK_OR(mqd_reactor_stop(r) == 0, abort());
    open_idle(b);
    keep_house(r);
    for (uint32_t left = IDLE; left > 0; left--) {
        CHECK_EQUAL(holding(b), left);
        mqd_reactor_turn(r, NULL, 0);
    }
    CHECK_EQUAL(holding(b), 0);
    bench_stop(b);
}

/* What changed after housekeeping: one partition is closed, one is being truncated, one was written
 * to. */
TEST(only_what_is_still_idle_is_released)
{
    struct bench *b = bench_start(MQD_BACKEND_EPOLL, NULL);
    struct mqd_reactor *r = b->reactors[0];
    CHECK_OR(mqd_reactor_stop(r) == 0, abort());
    open_idle(b);
    keep_house(r);
    CHECK_EQUAL(mqd_reactor_partition_close(r, ++b->token, FIRST), 0);
    CHECK_EQUAL(bench_done(b, 0, b->token).error, 0);
    CHECK_EQUAL(mqd_partition_close(b->partitions[FIRST], 1), 0);
    b->partitions[FIRST] = b->partitions[FIRST + 2];
    r->owned[FIRST + 2]->truncating = MQD_TRUNCATION_UNDER_WAY;
    b->partitions[FIRST + 4]->last_write_ms = r->wall_ms;
    for (int i = 0; i < IDLE; i++)
        mqd_reactor_turn(r, NULL, 0);
    b->partitions[FIRST] = NULL;
    r->owned[FIRST + 2]->truncating = MQD_TRUNCATION_NONE;
    CHECK(b->partitions[FIRST + 2]->stage && b->partitions[FIRST + 4]->stage);
    CHECK(!b->partitions[FIRST + 6]->stage);
    b->partitions[FIRST + 4]->last_write_ms = NOW;
    keep_house(r); /* queues them again */
    for (int i = 0; i < IDLE; i++)
        mqd_reactor_turn(r, NULL, 0);
    CHECK(!b->partitions[FIRST + 2]->stage && !b->partitions[FIRST + 4]->stage);
    bench_stop(b);
}

static void wait_until_idle(struct bench *b)
{
    for (int i = 0; i < LIMIT_MS / 10 && !mqd_reactor_is_idle(b->reactors[0]); i++)
        usleep(10000);
    CHECK(mqd_reactor_is_idle(b->reactors[0]));
}

/* No event arrives: the reactor releases everything, more than one partition per housekeeping, then
 * it sleeps. */
BOTH(a_reactor_without_events_releases_all_and_sleeps)
{
    struct bench *b = bench_start(backend, NULL);
    open_idle(b);
    for (int i = 0; i < RELEASED_MS / 10 && holding(b); i++)
        usleep(10000);
    CHECK_EQUAL(holding(b), 0);
    wait_until_idle(b);
    uint64_t turns = counted(b, MQD_COUNT_LOOPS);
    sleep(SLEEP_S);
    CHECK(counted(b, MQD_COUNT_LOOPS) - turns < SLEEP_TURNS_MAX);
    bench_stop(b);
}

BOTH(a_disk_that_refuses_does_not_keep_the_reactor_awake)
{
    struct bench *b = bench_start(backend, watch);
    faults("truncate:EIO:.log");
    open_idle(b);
    wait_until_idle(b);
    CHECK_EQUAL(holding(b), IDLE); /* the blocks that it has reserved */
    faults("");
    bench_stop(b);
}
