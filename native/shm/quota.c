/* See shm/quota.h. */
#include "shm/quota.h"

#include <stdlib.h>
#include <string.h>

#include "base/atomic.h"
#include "base/error.h"
#include "shm/layout.h"

#define SET_COUNT (MQD_QUOTA_BUCKET_COUNT / MQD_QUOTA_WAY_COUNT)
#define DEBT_NS_MAX (1ll << 60) /* 36 years: the sum of two values cannot overflow */
#define READ_TRIES 1000

struct mqd_quota_limits {
    uint64_t version; /* of the rules below; 0 = none */
    struct mqd_quota_rules rules;
};

static uint64_t mix(uint64_t hash)
{
    hash = (hash ^ hash >> 33) * 0xff51afd7ed558ccdull;
    hash = (hash ^ hash >> 33) * 0xc4ceb9fe1a85ec53ull;
    return hash ^ hash >> 33;
}

/* FNV-1a with a final mix: names often differ only in their last digits, and both a bucket's
 * set and the order of the rules depend on the hash. */
uint64_t mqd_quota_key(const void *control, const uint8_t *name, uint32_t size_bytes)
{
    uint64_t hash;
    memcpy(&hash, ((const struct mqd_control_header *)control)->boot_id, sizeof hash);
    hash = mix(hash ^ 0xcbf29ce484222325ull);
    for (uint32_t i = 0; i < size_bytes; i++)
        hash = (hash ^ name[i]) * 0x100000001b3ull;
    return mix(hash);
}

static uint64_t combine(uint64_t tag, uint64_t user_key, uint64_t client_key)
{
    uint64_t hash = mix(mix(tag ^ user_key) + client_key);
    return hash ? hash : 1;
}

uint64_t mqd_quota_rule_key(uint32_t level, uint64_t user_key, uint64_t client_key)
{
    const uint32_t user_levels = 1u << MQD_QUOTA_USER_CLIENT | 1u << MQD_QUOTA_USER_ANY_CLIENT | 1u << MQD_QUOTA_USER;
    const uint32_t client_levels =
        1u << MQD_QUOTA_USER_CLIENT | 1u << MQD_QUOTA_ANY_USER_CLIENT | 1u << MQD_QUOTA_CLIENT;
    return combine(level, user_levels >> level & 1 ? user_key : 0, client_levels >> level & 1 ? client_key : 0);
}

/* The key of the bucket that a rule of this level charges; equal for clients that share the
 * bucket. */
static uint64_t bucket_key(uint32_t level, uint64_t user_key, uint64_t client_key)
{
    bool by_client = level == MQD_QUOTA_CLIENT || level == MQD_QUOTA_ANY_CLIENT,
         by_user = level == MQD_QUOTA_USER || level == MQD_QUOTA_ANY_USER;
    return combine(MQD_QUOTA_LEVEL_COUNT + by_client + 2 * by_user, by_client ? 0 : user_key, by_user ? 0 : client_key);
}

/* ---- rules ---- */

uint64_t mqd_quota_version(void *control)
{
    return mqd_load_relaxed(&mqd_control_quotas(control)->version);
}

static int by_key(const void *left, const void *right)
{
    uint64_t a = ((const struct mqd_quota_rule *)left)->key, b = ((const struct mqd_quota_rule *)right)->key;
    return a < b ? -1 : a > b;
}

static uint32_t kinds_of(const uint64_t *interval)
{
    uint32_t kinds = 0;
    for (uint32_t kind = 0; kind < MQD_QUOTA_KIND_COUNT; kind++)
        kinds |= interval[kind] ? 1u << kind : 0;
    return kinds;
}

/* Clears debts incurred under the old limits, because intervals have changed. A concurrent charge
 * may be lost. */
static void clear_debts(struct mqd_quota_table *table)
{
    for (uint32_t i = 0; i < MQD_QUOTA_BUCKET_COUNT; i++)
        for (uint32_t kind = 0; kind < MQD_QUOTA_KIND_COUNT; kind++)
            mqd_store_relaxed(&table->bucket[i].arrival_ns[kind], 0);
}

int mqd_quota_publish(void *control, struct mqd_quota_rule *rules, uint32_t count, const int64_t *burst_ns)
{
    if (count > MQD_QUOTA_RULE_COUNT_MAX)
        return mqd_error_set(MQD_E_INVALID, "there are quotas for %u users and client ids; at most %d are allowed",
                             count, MQD_QUOTA_RULE_COUNT_MAX);
    for (uint32_t i = 0; i < count; i++)
        if (rules[i].level >= MQD_QUOTA_LEVEL_COUNT)
            return mqd_error_set(MQD_E_INVALID, "a quota has level %llu, but there are only %d levels",
                                 (unsigned long long)rules[i].level, MQD_QUOTA_LEVEL_COUNT);
    struct mqd_quota_table *table = mqd_control_quotas(control);
    uint64_t new_version = mqd_load_relaxed(&table->version) + 1;
    struct mqd_quota_rules *to = &table->rules[new_version & 1];
    uint32_t kinds = 0;
    uint64_t levels = 0;
    if (count)
        qsort(rules, count, sizeof *rules, by_key);
    for (uint32_t i = 0; i < count; i++) {
        kinds |= kinds_of(rules[i].interval);
        levels |= 1u << rules[i].level;
        mqd_store_release(&to->rule[i].key, rules[i].key);
        for (uint32_t kind = 0; kind < MQD_QUOTA_KIND_COUNT; kind++)
            mqd_store_release(&to->rule[i].interval[kind], rules[i].interval[kind]);
    }
    for (uint32_t kind = 0; kind < MQD_QUOTA_KIND_COUNT; kind++)
        mqd_store_release(&to->burst_ns[kind], burst_ns[kind]);
    mqd_store_release(&to->levels, levels);
    mqd_store_release(&to->kinds, kinds);
    mqd_store_release(&to->count, count);
    mqd_store_release(&table->version, new_version);
    clear_debts(table);
    return 0;
}

struct mqd_quota_limits *mqd_quota_limits_open(void)
{
    struct mqd_quota_limits *limits = calloc(1, sizeof *limits);
    if (!limits)
        mqd_error_set(MQD_E_FULL, "out of memory for the quotas");
    return limits;
}

void mqd_quota_limits_close(struct mqd_quota_limits *limits)
{
    free(limits);
}

/* A reader that loads a word of a later publication also sees the version stored before it, and
 * retries. If the publisher is faster than this loop, the next call tries again. */
uint32_t mqd_quota_refresh(void *control, struct mqd_quota_limits *limits)
{
    const struct mqd_quota_table *table = mqd_control_quotas(control);
    for (int tries = 0; tries < READ_TRIES; tries++) {
        uint64_t version = mqd_load_acquire(&table->version);
        if (version == limits->version)
            break;
        const uint64_t *from = (const uint64_t *)&table->rules[version & 1];
        uint64_t *to = (uint64_t *)&limits->rules;
        for (size_t i = 0; i < sizeof limits->rules / 8; i++)
            to[i] = mqd_load_acquire(&from[i]);
        /* set even if the copy was torn: the table's version has then advanced, so the next check
         * finds a difference */
        limits->version = version;
        if (mqd_load_acquire(&table->version) == version)
            break;
    }
    return limits->rules.kinds;
}

uint64_t mqd_quota_limits_version(const struct mqd_quota_limits *limits)
{
    return limits->version;
}

int64_t mqd_quota_limits_burst_ns(const struct mqd_quota_limits *limits, uint32_t kind)
{
    return limits->rules.burst_ns[kind];
}

static const struct mqd_quota_rule *rule_of(const struct mqd_quota_rules *rules, uint64_t key)
{
    uint32_t first = 0, end = rules->count <= MQD_QUOTA_RULE_COUNT_MAX ? rules->count : 0;
    while (first < end) {
        uint32_t middle = (first + end) / 2;
        if (rules->rule[middle].key == key)
            return &rules->rule[middle];
        if (rules->rule[middle].key < key)
            first = middle + 1;
        else
            end = middle;
    }
    return NULL;
}

void mqd_quota_match(const struct mqd_quota_limits *limits, uint64_t user_key, uint64_t client_key,
                     struct mqd_quota_match *match)
{
    const struct mqd_quota_rules *rules = &limits->rules;
    uint32_t unmatched_kinds = rules->kinds;
    memset(match, 0, sizeof *match);
    for (uint32_t level = 0; level < MQD_QUOTA_LEVEL_COUNT && unmatched_kinds; level++) {
        const struct mqd_quota_rule *rule =
            rules->levels >> level & 1 ? rule_of(rules, mqd_quota_rule_key(level, user_key, client_key)) : NULL;
        for (uint32_t kind = 0; rule && kind < MQD_QUOTA_KIND_COUNT; kind++) {
            if (!(unmatched_kinds >> kind & 1) || !rule->interval[kind])
                continue;
            match->interval[kind] = rule->interval[kind];
            match->bucket_key[kind] = bucket_key(level, user_key, client_key);
            unmatched_kinds &= ~(1u << kind);
        }
    }
}

/* ---- buckets ---- */

static struct mqd_quota_bucket *bucket_of(struct mqd_quota_bucket *set, uint64_t key)
{
    for (uint32_t way = 0; way < MQD_QUOTA_WAY_COUNT; way++)
        if (mqd_load_acquire(&set[way].key) == key)
            return &set[way];
    return NULL;
}

static bool is_indebted(const struct mqd_quota_bucket *bucket, int64_t now_ns)
{
    for (uint32_t kind = 0; kind < MQD_QUOTA_KIND_COUNT; kind++)
        if (mqd_load_relaxed(&bucket->arrival_ns[kind]) > now_ns)
            return true;
    return false;
}

/* Returns the bucket of the set that another key may take over: an unused one; else the least
 * recently used one without a debt; else the least recently used one (Q1). */
static struct mqd_quota_bucket *choose_victim(struct mqd_quota_bucket *set, int64_t now_ns)
{
    struct mqd_quota_bucket *best = NULL;
    bool best_indebted = false;
    for (uint32_t way = 0; way < MQD_QUOTA_WAY_COUNT; way++) {
        struct mqd_quota_bucket *bucket = &set[way];
        if (mqd_load_relaxed(&bucket->key) == 0)
            return bucket;
        bool indebted = is_indebted(bucket, now_ns);
        if (!best || (best_indebted && !indebted) ||
            (best_indebted == indebted && mqd_load_relaxed(&bucket->used_ns) < mqd_load_relaxed(&best->used_ns))) {
            best = bucket;
            best_indebted = indebted;
        }
    }
    return best;
}

static struct mqd_quota_bucket *claim_bucket(struct mqd_quota_table *table, uint64_t key, int64_t now_ns)
{
    struct mqd_quota_bucket *set = &table->bucket[key % SET_COUNT * MQD_QUOTA_WAY_COUNT], *bucket;
    for (uint32_t tries = 0; tries < MQD_QUOTA_WAY_COUNT; tries++) {
        if ((bucket = bucket_of(set, key)))
            return bucket;
        bucket = choose_victim(set, now_ns);
        uint64_t old_key = mqd_load_relaxed(&bucket->key);
        bool indebted = is_indebted(bucket, now_ns);
        if (old_key == key || !mqd_compare_exchange(&bucket->key, &old_key, key))
            continue;
        mqd_store_relaxed(&bucket->used_ns, now_ns);
        for (uint32_t kind = 0; indebted && kind < MQD_QUOTA_KIND_COUNT; kind++)
            mqd_store_relaxed(&bucket->arrival_ns[kind], 0);
        bucket = bucket_of(set, key); /* Q2 */
        return bucket ? bucket : set;
    }
    return set; /* other clients have just claimed all eight buckets: the first of them is charged instead */
}

int64_t mqd_quota_charge(void *control, uint64_t key, enum mqd_quota_kind kind, uint64_t interval, uint64_t units,
                         int64_t burst_ns, int64_t now_ns)
{
    if (!interval || !units)
        return interval ? mqd_quota_debt_ns(control, key, kind, burst_ns, now_ns) : 0;
    struct mqd_quota_bucket *bucket = claim_bucket(mqd_control_quotas(control), key, now_ns);
    unsigned __int128 product = (unsigned __int128)units * interval >> 32;
    int64_t cost_ns = product > (unsigned __int128)DEBT_NS_MAX ? DEBT_NS_MAX : (int64_t)product;
    int64_t old_arrival_ns = mqd_load_relaxed(&bucket->arrival_ns[kind]), arrival_ns;
    do {
        arrival_ns = (old_arrival_ns > now_ns ? old_arrival_ns : now_ns) + cost_ns;
        if (arrival_ns > now_ns + DEBT_NS_MAX)
            arrival_ns = now_ns + DEBT_NS_MAX;
    } while (!mqd_compare_exchange(&bucket->arrival_ns[kind], &old_arrival_ns, arrival_ns));
    mqd_store_relaxed(&bucket->used_ns, now_ns);
    int64_t delay_ns = arrival_ns - now_ns - burst_ns;
    return delay_ns > 0 ? delay_ns : 0;
}

int64_t mqd_quota_debt_ns(void *control, uint64_t key, enum mqd_quota_kind kind, int64_t burst_ns, int64_t now_ns)
{
    struct mqd_quota_table *table = mqd_control_quotas(control);
    const struct mqd_quota_bucket *bucket = bucket_of(&table->bucket[key % SET_COUNT * MQD_QUOTA_WAY_COUNT], key);
    int64_t delay = bucket ? mqd_load_relaxed(&bucket->arrival_ns[kind]) - now_ns - burst_ns : 0;
    return delay > 0 ? delay : 0;
}

int64_t mqd_quota_charge_client(void *control, const struct mqd_quota_limits *limits, uint64_t user_key,
                                uint64_t client_key, uint32_t kind, uint64_t units, int64_t now_ns)
{
    if (kind >= MQD_QUOTA_KIND_COUNT)
        return 0;
    struct mqd_quota_match match;
    mqd_quota_match(limits, user_key, client_key, &match);
    return mqd_quota_charge(control, match.bucket_key[kind], kind, match.interval[kind], units,
                            limits->rules.burst_ns[kind], now_ns);
}
