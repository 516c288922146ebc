/* tsan */
/* Connections by address: counted by all workers, cleared with them, reused. */
#include <pthread.h>

#include "mqd_test.h"

#include "base/atomic.h"
#include "shm/layout.h"
#include "shm/tally.h"

static void *control_new(void)
{
    void *control = NULL;
    static const uint8_t boot_id[16];
    CHECK_OR(posix_memalign(&control, 4096, mqd_control_size_bytes()) == 0, return NULL);
    memset(control, 0, mqd_control_size_bytes());
    CHECK_OR(mqd_control_format(control, mqd_control_size_bytes(), 2, boot_id, 1, 0) == 0, return NULL);
    return control;
}

static uint64_t key_in_set(uint64_t number)
{
    return 5 + (number + 1) * MQD_TALLY_SET_COUNT;
}

TEST(all_workers_count_and_a_new_process_begins_with_none)
{
    void *control = control_new();
    uint32_t sum;
    int32_t first = mqd_tally_enter(control, 77, 0, &sum);
    CHECK_EQUAL(sum, 1);
    CHECK_EQUAL(mqd_tally_enter(control, 77, 1, &sum), first);
    CHECK_EQUAL(sum, 2);
    CHECK(mqd_tally_enter(control, 78, 1, &sum) != first);
    CHECK_EQUAL(sum, 1);
    mqd_tally_leave(control, first, 0);
    mqd_tally_enter(control, 77, 1, &sum);
    CHECK_EQUAL(sum, 2);
    mqd_tally_reset(control, 1);
    mqd_tally_enter(control, 77, 0, &sum);
    CHECK_EQUAL(sum, 1);
    mqd_tally_leave(control, MQD_TALLY_NONE, 0);
    free(control);
}

TEST(unused_tallies_are_reused_and_a_full_set_does_not_count)
{
    void *control = control_new();
    int32_t taken[MQD_TALLY_WAY_COUNT];
    uint32_t sum;
    for (uint64_t i = 0; i < MQD_TALLY_WAY_COUNT; i++) {
        taken[i] = mqd_tally_enter(control, key_in_set(i), i % 2, &sum);
        CHECK(taken[i] >= 0 && sum == 1);
    }
    CHECK_EQUAL(mqd_tally_enter(control, key_in_set(100), 0, &sum), MQD_TALLY_NONE);
    CHECK_EQUAL(sum, 0);
    mqd_tally_leave(control, taken[3], 1);
    CHECK_EQUAL(mqd_tally_enter(control, key_in_set(100), 0, &sum), taken[3]);
    CHECK_EQUAL(sum, 1);
    CHECK_EQUAL(mqd_tally_enter(control, key_in_set(3), 0, &sum), MQD_TALLY_NONE);
    free(control);
}

TEST(keys_equal_to_the_values_for_free_and_locked_are_counted_too)
{
    void *control = control_new();
    uint32_t sum;
    for (uint64_t key = 0; key < 2; key++) {
        int32_t tally = mqd_tally_enter(control, key, 0, &sum);
        CHECK(tally >= 0 && sum == 1);
        mqd_tally_enter(control, key, 1, &sum);
        CHECK_EQUAL(sum, 2);
    }
    free(control);
}

TEST(more_than_a_count_can_hold_are_not_counted)
{
    void *control = control_new();
    uint32_t sum;
    int32_t tally = mqd_tally_enter(control, 9, 0, &sum);
    mqd_control_tallies(control)->tally[tally].count[0] = UINT16_MAX;
    CHECK_EQUAL(mqd_tally_enter(control, 9, 0, &sum), MQD_TALLY_NONE);
    CHECK_EQUAL(mqd_control_tallies(control)->tally[tally].count[0], UINT16_MAX);
    free(control);
}

/* ---- concurrent workers ---- */

enum { LOCKED = 1, ROUNDS = 20000, KEYS = 12 }; /* more keys than a set has tallies */

struct worker {
    void *control;
    uint32_t index;
};

static void *come_and_go(void *argument)
{
    struct worker *worker = argument;
    uint64_t seed = worker->index + 1;
    for (uint32_t round = 0; round < ROUNDS; round++) {
        uint64_t key = test_random(&seed) % KEYS;
        uint32_t sum;
        int32_t tally = mqd_tally_enter(worker->control, key_in_set(key), worker->index, &sum);
        if (tally < 0)
            continue;
        /* T1 */
        uint64_t now = mqd_load_acquire(&mqd_control_tallies(worker->control)->tally[tally].key);
        CHECK_OR(now == key_in_set(key) || now == LOCKED, break);
        mqd_tally_leave(worker->control, tally, worker->index);
    }
    return NULL;
}

TEST(a_tally_in_use_keeps_its_key)
{
    void *control = control_new();
    struct worker workers[4];
    pthread_t threads[4];
    for (uint32_t i = 0; i < 4; i++) {
        workers[i] = (struct worker){control, i};
        CHECK(pthread_create(&threads[i], NULL, come_and_go, &workers[i]) == 0);
    }
    for (uint32_t i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    uint32_t sum;
    for (uint64_t key = 0; key < KEYS; key++) {
        int32_t tally = mqd_tally_enter(control, key_in_set(key), 0, &sum);
        CHECK(tally >= 0 && sum == 1); /* nothing was left behind */
        mqd_tally_leave(control, tally, 0);
    }
    free(control);
}
