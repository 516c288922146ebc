/* tsan */
/* Quotas in shared memory: rules published and taken over, buckets charged by one and by many,
 * reused, left by the dead. Time is passed in. */
#include <pthread.h>

#include "mqd_test.h"

#include "base/atomic.h"
#include "shm/layout.h"
#include "shm/quota.h"

#define SECOND_NS 1000000000ll

static uint64_t per_second(uint64_t units)
{
    return (uint64_t)(((unsigned __int128)SECOND_NS << 32) / units);
}

static void *control_new(void)
{
    void *control = NULL;
    static const uint8_t boot_id[16];
    CHECK_OR(posix_memalign(&control, 4096, mqd_control_size_bytes()) == 0, return NULL);
    memset(control, 0, mqd_control_size_bytes());
    CHECK_OR(mqd_control_format(control, mqd_control_size_bytes(), 2, boot_id, 1, 0) == 0, return NULL);
    return control;
}

static uint64_t key_of(const char *client_id)
{
    return mqd_quota_key((const uint8_t *)client_id, (uint32_t)strlen(client_id));
}

TEST(without_rules_nothing_is_limited)
{
    void *control = control_new();
    struct mqd_quota_limits *limits = mqd_quota_limits_open();
    CHECK_EQUAL(mqd_quota_version(control), 0);
    CHECK_EQUAL(mqd_quota_refresh(control, limits), 0);
    CHECK_EQUAL(
        mqd_quota_charge_client(control, limits, (const uint8_t *)"a", 1, MQD_QUOTA_PRODUCE, 1u << 30, SECOND_NS), 0);
    mqd_quota_limits_close(limits);
    free(control);
}

TEST(rules_are_found_by_client_id_and_else_the_defaults_hold)
{
    void *control = control_new();
    struct mqd_quota_limits *limits = mqd_quota_limits_open();
    struct mqd_quota_rule rules[100], defaults = {.interval = {7, 0, 0}};
    char name[16];
    for (uint32_t i = 0; i < 100; i++) {
        snprintf(name, sizeof name, "client-%u", i);
        rules[i] = (struct mqd_quota_rule){key_of(name), {1000 + i, 0, 5}};
    }
    CHECK_EQUAL(mqd_quota_publish(control, rules, 100, &defaults, SECOND_NS), 0);
    CHECK_EQUAL(mqd_quota_refresh(control, limits), 1u << MQD_QUOTA_PRODUCE | 1u << MQD_QUOTA_REQUEST);
    CHECK_EQUAL(mqd_quota_limits_version(limits), mqd_quota_version(control));
    CHECK_EQUAL(mqd_quota_limits_burst_ns(limits), SECOND_NS);
    for (uint32_t i = 0; i < 100; i++) {
        snprintf(name, sizeof name, "client-%u", i);
        CHECK_EQUAL(mqd_quota_intervals(limits, key_of(name))[MQD_QUOTA_PRODUCE], 1000 + i);
    }
    CHECK_EQUAL(mqd_quota_intervals(limits, key_of("another"))[MQD_QUOTA_PRODUCE], 7);
    struct mqd_quota_rule none = {0};
    CHECK_EQUAL(mqd_quota_publish(control, rules, 0, &none, SECOND_NS), 0);
    CHECK_EQUAL(mqd_quota_refresh(control, limits), 0);
    CHECK_EQUAL(mqd_quota_publish(control, rules, MQD_QUOTA_RULE_COUNT_MAX + 1, &none, 0), -1);
    CHECK_CONTAINS(mqd_error_message(), "at most 4096");
    mqd_quota_limits_close(limits);
    free(control);
}

TEST(what_is_let_through_is_the_burst_and_then_the_rate)
{
    void *control = control_new();
    uint64_t key = key_of("p"), interval = per_second(1000), seed = 7;
    int64_t now = 5 * SECOND_NS, began = now, units = 0;
    while (now < began + 100 * SECOND_NS) { /* a client that sends whenever it may */
        uint64_t request = 1 + test_random(&seed) % 400;
        units += (int64_t)request;
        now += mqd_quota_charge(control, key, MQD_QUOTA_PRODUCE, interval, request, 2 * SECOND_NS, now) + 1000;
        CHECK_EQUAL(mqd_quota_owed(control, key, MQD_QUOTA_PRODUCE, 2 * SECOND_NS, now), 0);
    }
    int64_t allowed = (now - began) / 1000000 + 2000; /* milliseconds are units here */
    CHECK(units <= allowed + 400 && units >= allowed - 400);
    CHECK_EQUAL(mqd_quota_owed(control, key, MQD_QUOTA_FETCH, 0, now), 0); /* another kind is another bucket */
    free(control);
}

TEST(one_huge_request_is_paid_for_in_full_and_nothing_overflows)
{
    void *control = control_new();
    uint64_t key = key_of("p");
    CHECK_EQUAL(mqd_quota_charge(control, key, MQD_QUOTA_FETCH, per_second(10), 1000, SECOND_NS, SECOND_NS),
                99 * SECOND_NS);
    CHECK_EQUAL(mqd_quota_owed(control, key, MQD_QUOTA_FETCH, SECOND_NS, 51 * SECOND_NS), 49 * SECOND_NS);
    for (int i = 0; i < 3; i++)
        CHECK(mqd_quota_charge(control, key, MQD_QUOTA_FETCH, UINT64_MAX, UINT64_MAX, 0, SECOND_NS) <= 1ll << 60);
    free(control);
}

TEST(new_rules_forgive_what_is_owed)
{
    void *control = control_new();
    struct mqd_quota_rule defaults = {.interval = {per_second(1), 0, 0}};
    uint64_t key = key_of("p");
    CHECK(mqd_quota_charge(control, key, MQD_QUOTA_PRODUCE, defaults.interval[0], 1000, 0, SECOND_NS) > 0);
    CHECK_EQUAL(mqd_quota_publish(control, NULL, 0, &defaults, 0), 0);
    CHECK_EQUAL(mqd_quota_owed(control, key, MQD_QUOTA_PRODUCE, 0, SECOND_NS), 0);
    free(control);
}

/* Keys of one set. */
static uint64_t key_in_set(uint64_t number)
{
    return 5 + number * (MQD_QUOTA_BUCKET_COUNT / MQD_QUOTA_WAY_COUNT);
}

TEST(who_owes_nothing_makes_room_and_the_least_recently_used_first)
{
    void *control = control_new();
    int64_t now = SECOND_NS;
    for (uint64_t i = 0; i < MQD_QUOTA_WAY_COUNT; i++) /* the first owes an hour, the others a moment */
        mqd_quota_charge(control, key_in_set(i), MQD_QUOTA_PRODUCE, per_second(1), i == 0 ? 3600 : 1, 0,
                         now + (int64_t)i);
    now += 10 * SECOND_NS;
    /* used again, paid soon */
    mqd_quota_charge(control, key_in_set(1), MQD_QUOTA_PRODUCE, per_second(1000), 1, 0, now);
    now += 10 * SECOND_NS;
    CHECK_EQUAL(mqd_quota_charge(control, key_in_set(100), MQD_QUOTA_PRODUCE, per_second(1), 2, 0, now), 2 * SECOND_NS);
    CHECK(mqd_quota_owed(control, key_in_set(0), MQD_QUOTA_PRODUCE, 0, now) > 3000 * SECOND_NS);
    struct mqd_quota_table *table = mqd_control_quotas(control);
    bool found[3] = {false};
    for (uint32_t i = 0; i < MQD_QUOTA_BUCKET_COUNT; i++) {
        found[0] |= table->bucket[i].key == key_in_set(1);
        found[1] |= table->bucket[i].key == key_in_set(2);
        found[2] |= table->bucket[i].key == key_in_set(100);
    }
    CHECK(found[0] && !found[1] && found[2]);
    free(control);
}

TEST(a_set_in_which_all_owe_forgives_the_least_recently_used)
{
    void *control = control_new();
    for (uint64_t i = 0; i < MQD_QUOTA_WAY_COUNT; i++)
        mqd_quota_charge(control, key_in_set(i), MQD_QUOTA_PRODUCE, per_second(1), 3600, 0, SECOND_NS + (int64_t)i);
    CHECK_EQUAL(mqd_quota_charge(control, key_in_set(50), MQD_QUOTA_FETCH, per_second(1), 1, 0, 2 * SECOND_NS),
                SECOND_NS);
    /* not its predecessor's debt */
    CHECK_EQUAL(mqd_quota_owed(control, key_in_set(50), MQD_QUOTA_PRODUCE, 0, 2 * SECOND_NS), 0);
    CHECK_EQUAL(mqd_quota_owed(control, key_in_set(0), MQD_QUOTA_PRODUCE, 0, 2 * SECOND_NS), 0);
    CHECK(mqd_quota_owed(control, key_in_set(1), MQD_QUOTA_PRODUCE, 0, 2 * SECOND_NS) > 0);
    free(control);
}

TEST(of_two_buckets_of_one_key_the_first_counts)
{
    void *control = control_new();
    struct mqd_quota_bucket *set = &mqd_control_quotas(control)->bucket[5 * MQD_QUOTA_WAY_COUNT];
    /* as a worker leaves it that died after it had claimed, beside another that claimed too */
    set[6].key = key_in_set(3);
    set[6].arrival_ns[0] = 100 * SECOND_NS;
    set[2].key = key_in_set(3);
    CHECK_EQUAL(mqd_quota_owed(control, key_in_set(3), MQD_QUOTA_PRODUCE, 0, SECOND_NS), 0);
    CHECK_EQUAL(mqd_quota_charge(control, key_in_set(3), MQD_QUOTA_PRODUCE, per_second(1), 1, 0, SECOND_NS), SECOND_NS);
    CHECK_EQUAL(set[6].arrival_ns[0], 100 * SECOND_NS);
    free(control);
}

/* ---- several at once ---- */

#define THREADS 4
#define CHARGES 20000
struct worker {
    void *control;
    uint64_t seed;
};

static void *charge_many(void *argument)
{
    struct worker *worker = argument;
    for (int i = 0; i < CHARGES; i++)
        mqd_quota_charge(worker->control, key_of("shared"), MQD_QUOTA_PRODUCE, per_second(1000),
                         1 + test_random(&worker->seed) % 4, 0, SECOND_NS);
    return NULL;
}

TEST(no_charge_is_lost_between_workers)
{
    void *control = control_new();
    pthread_t threads[THREADS];
    struct worker workers[THREADS];
    for (uint64_t i = 0; i < THREADS; i++) {
        workers[i] = (struct worker){control, i + 1};
        CHECK_EQUAL(pthread_create(&threads[i], NULL, charge_many, &workers[i]), 0);
    }
    uint64_t expected = 0;
    for (uint64_t i = 0; i < THREADS; i++) {
        uint64_t seed = i + 1;
        pthread_join(threads[i], NULL);
        for (int charge = 0; charge < CHARGES; charge++)
            expected += 1 + test_random(&seed) % 4;
    }
    int64_t owed = mqd_quota_owed(control, key_of("shared"), MQD_QUOTA_PRODUCE, 0, SECOND_NS);
    CHECK(llabs(owed - (int64_t)expected * 1000000) < (int64_t)THREADS * CHARGES); /* a nanosecond of rounding each */
    free(control);
}

static uint32_t stop_publishing;

static void *publish_many(void *control)
{
    for (uint64_t i = 1; !mqd_load_acquire(&stop_publishing); i++) {
        struct mqd_quota_rule rules[64], defaults = {.interval = {i, i, i}};
        for (uint64_t k = 0; k < 64; k++)
            rules[k] = (struct mqd_quota_rule){k * 977 + 1, {i, i, i}};
        mqd_quota_publish(control, rules, 64, &defaults, (int64_t)i);
    }
    return NULL;
}

TEST(a_reader_never_mixes_two_publications)
{
    void *control = control_new();
    pthread_t thread;
    struct mqd_quota_limits *limits = mqd_quota_limits_open();
    CHECK_EQUAL(pthread_create(&thread, NULL, publish_many, control), 0);
    int whole = 0;
    for (int round = 0; round < 2000000 && whole < 200; round++) {
        mqd_quota_refresh(control, limits);
        if (mqd_quota_limits_version(limits) == 0 || mqd_quota_version(control) != mqd_quota_limits_version(limits))
            continue; /* it says itself that it has to be looked at again */
        whole++;
        uint64_t said = (uint64_t)mqd_quota_limits_burst_ns(limits);
        for (uint64_t k = 0; k < 65; k++) {
            const uint64_t *interval = mqd_quota_intervals(limits, k * 977 + 1);
            CHECK_OR(interval[0] == said && interval[1] == said && interval[2] == said, break);
        }
    }
    mqd_store_release(&stop_publishing, 1);
    pthread_join(thread, NULL);
    CHECK(whole > 0);
    mqd_quota_limits_close(limits);
    free(control);
}
