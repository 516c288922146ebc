/* tsan */
/* Quotas in shared memory: rules published and read, buckets charged by one and by several
 * workers, reused, left by dead ones. Time is passed in. */
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

static uint64_t name_key(void *control, const char *name)
{
    return mqd_quota_key(control, (const uint8_t *)name, (uint32_t)strlen(name));
}

/* any key of a bucket */
static uint64_t key_of(const char *name)
{
    static struct mqd_control_header header;
    return name_key(&header, name);
}

static struct mqd_quota_rule rule_of(void *control, uint32_t level, const char *user, const char *client,
                                     uint64_t interval)
{
    return (struct mqd_quota_rule){.key = mqd_quota_rule_key(level, name_key(control, user), name_key(control, client)),
                                   .interval = {interval},
                                   .level = level};
}

static const int64_t BURST_NS[MQD_QUOTA_KIND_COUNT] = {SECOND_NS, SECOND_NS, SECOND_NS, 3 * SECOND_NS};

TEST(without_rules_nothing_is_limited)
{
    void *control = control_new();
    struct mqd_quota_limits *limits = mqd_quota_limits_open();
    CHECK_EQUAL(mqd_quota_version(control), 0);
    CHECK_EQUAL(mqd_quota_refresh(control, limits), 0);
    CHECK_EQUAL(mqd_quota_charge_client(control, limits, name_key(control, "u"), name_key(control, "a"),
                                        MQD_QUOTA_PRODUCE, 1u << 30, SECOND_NS),
                0);
    mqd_quota_limits_close(limits);
    free(control);
}

TEST(rules_are_found_by_client_id_otherwise_the_default_applies)
{
    void *control = control_new();
    struct mqd_quota_limits *limits = mqd_quota_limits_open();
    struct mqd_quota_rule rules[101];
    struct mqd_quota_match match;
    char name[16];
    for (uint32_t i = 0; i < 100; i++) {
        snprintf(name, sizeof name, "client-%u", i);
        rules[i] = rule_of(control, MQD_QUOTA_CLIENT, "", name, 1000 + i);
        rules[i].interval[MQD_QUOTA_REQUEST] = 5;
    }
    rules[100] = rule_of(control, MQD_QUOTA_ANY_CLIENT, "", "", 7);
    CHECK_EQUAL(mqd_quota_publish(control, rules, 101, BURST_NS), 0);
    CHECK_EQUAL(mqd_quota_refresh(control, limits), 1u << MQD_QUOTA_PRODUCE | 1u << MQD_QUOTA_REQUEST);
    CHECK_EQUAL(mqd_quota_limits_version(limits), mqd_quota_version(control));
    CHECK_EQUAL(mqd_quota_limits_burst_ns(limits, MQD_QUOTA_FETCH), SECOND_NS);
    CHECK_EQUAL(mqd_quota_limits_burst_ns(limits, MQD_QUOTA_MUTATION), 3 * SECOND_NS);
    for (uint32_t i = 0; i < 100; i++) {
        snprintf(name, sizeof name, "client-%u", i);
        mqd_quota_match(limits, name_key(control, "u"), name_key(control, name), &match);
        CHECK_EQUAL(match.interval[MQD_QUOTA_PRODUCE], 1000 + i);
    }
    mqd_quota_match(limits, name_key(control, "u"), name_key(control, "another"), &match);
    CHECK_EQUAL(match.interval[MQD_QUOTA_PRODUCE], 7);
    CHECK_EQUAL(match.interval[MQD_QUOTA_REQUEST], 0);
    CHECK_EQUAL(mqd_quota_publish(control, rules, 0, BURST_NS), 0);
    CHECK_EQUAL(mqd_quota_refresh(control, limits), 0);
    CHECK_EQUAL(mqd_quota_publish(control, rules, MQD_QUOTA_RULE_COUNT_MAX + 1, BURST_NS), -1);
    CHECK_CONTAINS(mqd_error_message(), "at most 4096");
    rules[0].level = MQD_QUOTA_LEVEL_COUNT;
    CHECK_EQUAL(mqd_quota_publish(control, rules, 1, BURST_NS), -1);
    CHECK_CONTAINS(mqd_error_message(), "level 8");
    mqd_quota_limits_close(limits);
    free(control);
}

/* Of the rules of all eight levels the first one applies; without it the next, to the last. */
TEST(the_first_rule_in_kafkas_order_applies_to_each_kind_separately)
{
    void *control = control_new();
    struct mqd_quota_limits *limits = mqd_quota_limits_open();
    uint64_t user = name_key(control, "alice"), client = name_key(control, "loader");
    struct mqd_quota_match match;
    for (uint32_t first = 0; first < MQD_QUOTA_LEVEL_COUNT; first++) {
        struct mqd_quota_rule rules[MQD_QUOTA_LEVEL_COUNT];
        for (uint32_t level = first; level < MQD_QUOTA_LEVEL_COUNT; level++)
            rules[level - first] = rule_of(control, level, "alice", "loader", 100 + level);
        CHECK_EQUAL(mqd_quota_publish(control, rules, MQD_QUOTA_LEVEL_COUNT - first, BURST_NS), 0);
        mqd_quota_refresh(control, limits);
        mqd_quota_match(limits, user, client, &match);
        CHECK_EQUAL(match.interval[MQD_QUOTA_PRODUCE], 100 + first);
    }
    struct mqd_quota_rule rules[3] = {rule_of(control, MQD_QUOTA_USER_CLIENT, "alice", "loader", 0),
                                      rule_of(control, MQD_QUOTA_USER, "alice", "", 20),
                                      rule_of(control, MQD_QUOTA_USER_CLIENT, "bob", "loader", 30)};
    rules[0].interval[MQD_QUOTA_FETCH] = 10;
    CHECK_EQUAL(mqd_quota_publish(control, rules, 3, BURST_NS), 0);
    mqd_quota_refresh(control, limits);
    mqd_quota_match(limits, user, client, &match);
    CHECK_EQUAL(match.interval[MQD_QUOTA_FETCH], 10);
    CHECK_EQUAL(match.interval[MQD_QUOTA_PRODUCE], 20);
    mqd_quota_match(limits, name_key(control, "carol"), client, &match);
    CHECK_EQUAL(match.interval[MQD_QUOTA_FETCH] + match.interval[MQD_QUOTA_PRODUCE], 0);
    mqd_quota_limits_close(limits);
    free(control);
}

/* Whether alice's loader shares a bucket with another of her clients, and with bob's loader. */
TEST(the_rule_decides_which_clients_share_a_bucket)
{
    static const struct {
        bool own_clients, same_client;
    } shares[MQD_QUOTA_LEVEL_COUNT] = {
        [MQD_QUOTA_USER] = {.own_clients = true},
        [MQD_QUOTA_ANY_USER] = {.own_clients = true},
        [MQD_QUOTA_CLIENT] = {.same_client = true},
        [MQD_QUOTA_ANY_CLIENT] = {.same_client = true},
    };
    void *control = control_new();
    struct mqd_quota_limits *limits = mqd_quota_limits_open();
    uint64_t alice = name_key(control, "alice"), bob = name_key(control, "bob"), loader = name_key(control, "loader"),
             reader = name_key(control, "reader");
    for (uint32_t level = 0; level < MQD_QUOTA_LEVEL_COUNT; level++) {
        struct mqd_quota_match one, own, other;
        struct mqd_quota_rule rules[3] = {rule_of(control, level, "alice", "loader", 100),
                                          rule_of(control, level, "alice", "reader", 100),
                                          rule_of(control, level, "bob", "loader", 100)};
        CHECK_EQUAL(mqd_quota_publish(control, rules, 3, BURST_NS), 0);
        mqd_quota_refresh(control, limits);
        mqd_quota_match(limits, alice, loader, &one);
        mqd_quota_match(limits, alice, reader, &own);
        mqd_quota_match(limits, bob, loader, &other);
        CHECK_EQUAL(one.bucket_key[0] == own.bucket_key[0], shares[level].own_clients);
        CHECK_EQUAL(one.bucket_key[0] == other.bucket_key[0], shares[level].same_client);
    }
    /* a user's name that is a client id shares nothing with it */
    struct mqd_quota_match user, client;
    struct mqd_quota_rule of_user = rule_of(control, MQD_QUOTA_USER, "x", "", 100),
                          of_client = rule_of(control, MQD_QUOTA_CLIENT, "", "x", 100);
    CHECK_EQUAL(mqd_quota_publish(control, &of_user, 1, BURST_NS), 0);
    mqd_quota_refresh(control, limits);
    mqd_quota_match(limits, name_key(control, "x"), loader, &user);
    CHECK_EQUAL(mqd_quota_publish(control, &of_client, 1, BURST_NS), 0);
    mqd_quota_refresh(control, limits);
    mqd_quota_match(limits, alice, name_key(control, "x"), &client);
    CHECK(user.bucket_key[0] && client.bucket_key[0] && user.bucket_key[0] != client.bucket_key[0]);
    mqd_quota_limits_close(limits);
    free(control);
}

/* A client cannot choose an id with the bucket of another: it does not know the hash. */
TEST(keys_differ_from_host_to_host)
{
    struct mqd_control_header here = {.boot_id = {1}}, there = {.boot_id = {2}};
    CHECK(name_key(&here, "loader") != name_key(&there, "loader"));
    CHECK(name_key(&here, "") != name_key(&there, ""));
}

TEST(the_burst_passes_then_the_rate_applies)
{
    void *control = control_new();
    uint64_t key = key_of("p"), interval = per_second(1000), seed = 7;
    int64_t now = 5 * SECOND_NS, began = now, units = 0;
    while (now < began + 100 * SECOND_NS) { /* a client that sends whenever it may */
        uint64_t request = 1 + test_random(&seed) % 400;
        units += (int64_t)request;
        now += mqd_quota_charge(control, key, MQD_QUOTA_PRODUCE, interval, request, 2 * SECOND_NS, now) + 1000;
        CHECK_EQUAL(mqd_quota_debt_ns(control, key, MQD_QUOTA_PRODUCE, 2 * SECOND_NS, now), 0);
    }
    int64_t allowed = (now - began) / 1000000 + 2000; /* milliseconds are units here */
    CHECK(units <= allowed + 400 && units >= allowed - 400);
    CHECK_EQUAL(mqd_quota_debt_ns(control, key, MQD_QUOTA_FETCH, 0, now), 0); /* another kind is another bucket */
    free(control);
}

TEST(one_huge_request_is_paid_for_in_full_and_nothing_overflows)
{
    void *control = control_new();
    uint64_t key = key_of("p");
    CHECK_EQUAL(mqd_quota_charge(control, key, MQD_QUOTA_FETCH, per_second(10), 1000, SECOND_NS, SECOND_NS),
                99 * SECOND_NS);
    CHECK_EQUAL(mqd_quota_debt_ns(control, key, MQD_QUOTA_FETCH, SECOND_NS, 51 * SECOND_NS), 49 * SECOND_NS);
    for (int i = 0; i < 3; i++)
        CHECK(mqd_quota_charge(control, key, MQD_QUOTA_FETCH, UINT64_MAX, UINT64_MAX, 0, SECOND_NS) <= 1ll << 60);
    free(control);
}

TEST(new_rules_cancel_debt)
{
    void *control = control_new();
    struct mqd_quota_rule rule = rule_of(control, MQD_QUOTA_ANY_CLIENT, "", "", per_second(1));
    uint64_t key = key_of("p");
    CHECK(mqd_quota_charge(control, key, MQD_QUOTA_PRODUCE, rule.interval[0], 1000, 0, SECOND_NS) > 0);
    CHECK_EQUAL(mqd_quota_publish(control, &rule, 1, BURST_NS), 0);
    CHECK_EQUAL(mqd_quota_debt_ns(control, key, MQD_QUOTA_PRODUCE, 0, SECOND_NS), 0);
    free(control);
}

/* Keys of one set. */
static uint64_t key_in_set(uint64_t number)
{
    return 5 + number * (MQD_QUOTA_BUCKET_COUNT / MQD_QUOTA_WAY_COUNT);
}

TEST(a_bucket_without_debt_is_evicted_least_recently_used_first)
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
    CHECK(mqd_quota_debt_ns(control, key_in_set(0), MQD_QUOTA_PRODUCE, 0, now) > 3000 * SECOND_NS);
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

TEST(a_set_of_debtors_evicts_the_least_recently_used)
{
    void *control = control_new();
    for (uint64_t i = 0; i < MQD_QUOTA_WAY_COUNT; i++)
        mqd_quota_charge(control, key_in_set(i), MQD_QUOTA_PRODUCE, per_second(1), 3600, 0, SECOND_NS + (int64_t)i);
    CHECK_EQUAL(mqd_quota_charge(control, key_in_set(50), MQD_QUOTA_FETCH, per_second(1), 1, 0, 2 * SECOND_NS),
                SECOND_NS);
    /* not its predecessor's debt */
    CHECK_EQUAL(mqd_quota_debt_ns(control, key_in_set(50), MQD_QUOTA_PRODUCE, 0, 2 * SECOND_NS), 0);
    CHECK_EQUAL(mqd_quota_debt_ns(control, key_in_set(0), MQD_QUOTA_PRODUCE, 0, 2 * SECOND_NS), 0);
    CHECK(mqd_quota_debt_ns(control, key_in_set(1), MQD_QUOTA_PRODUCE, 0, 2 * SECOND_NS) > 0);
    free(control);
}

TEST(of_two_buckets_of_one_key_the_first_counts)
{
    void *control = control_new();
    struct mqd_quota_bucket *set = &mqd_control_quotas(control)->bucket[5 * MQD_QUOTA_WAY_COUNT];
    /* as left by a worker that died after it had claimed the bucket, while another claimed one
     * too */
    set[6].key = key_in_set(3);
    set[6].arrival_ns[0] = 100 * SECOND_NS;
    set[2].key = key_in_set(3);
    CHECK_EQUAL(mqd_quota_debt_ns(control, key_in_set(3), MQD_QUOTA_PRODUCE, 0, SECOND_NS), 0);
    CHECK_EQUAL(mqd_quota_charge(control, key_in_set(3), MQD_QUOTA_PRODUCE, per_second(1), 1, 0, SECOND_NS), SECOND_NS);
    CHECK_EQUAL(set[6].arrival_ns[0], 100 * SECOND_NS);
    free(control);
}

/* ---- several workers in parallel ---- */

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
    int64_t owed = mqd_quota_debt_ns(control, key_of("shared"), MQD_QUOTA_PRODUCE, 0, SECOND_NS);
    CHECK(llabs(owed - (int64_t)expected * 1000000) < (int64_t)THREADS * CHARGES); /* a nanosecond of rounding each */
    free(control);
}

static uint32_t stop_publishing;

static void *publish_many(void *control)
{
    for (uint64_t i = 1; !mqd_load_acquire(&stop_publishing); i++) {
        struct mqd_quota_rule rules[64];
        int64_t burst_ns[MQD_QUOTA_KIND_COUNT] = {(int64_t)i};
        for (uint64_t k = 0; k < 64; k++)
            rules[k] =
                (struct mqd_quota_rule){mqd_quota_rule_key(MQD_QUOTA_CLIENT, 0, k), {i, i, i, i}, MQD_QUOTA_CLIENT};
        mqd_quota_publish(control, rules, 64, burst_ns);
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
    /* the publisher may begin late, or wait for the only CPU */
    for (int64_t end_ns = test_now_ns() + 30 * SECOND_NS; whole < 200 && test_now_ns() < end_ns;) {
        mqd_quota_refresh(control, limits);
        if (mqd_quota_limits_version(limits) == 0 || mqd_quota_version(control) != mqd_quota_limits_version(limits))
            continue; /* the versions show that a refresh is needed again */
        whole++;
        uint64_t sent = (uint64_t)mqd_quota_limits_burst_ns(limits, MQD_QUOTA_PRODUCE);
        for (uint64_t k = 0; k < 64; k++) {
            struct mqd_quota_match match;
            mqd_quota_match(limits, 0, k, &match);
            CHECK_OR(match.interval[0] == sent && match.interval[1] == sent && match.interval[3] == sent, break);
        }
    }
    mqd_store_release(&stop_publishing, 1);
    pthread_join(thread, NULL);
    CHECK_EQUAL(whole, 200);
    mqd_quota_limits_close(limits);
    free(control);
}
