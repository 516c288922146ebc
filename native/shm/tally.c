/* See shm/tally.h. */
#include "shm/tally.h"

#include "base/atomic.h"

#define LOCKED 1ull
#define TRIES 16

static uint32_t sum_of(const struct mqd_tally *tally)
{
    uint32_t sum = 0;
    for (uint32_t worker = 0; worker < MQD_WORKER_COUNT_MAX; worker++)
        sum += mqd_load_relaxed(&tally->count[worker]);
    return sum;
}

static struct mqd_tally *tally_of(struct mqd_tally *set, uint64_t key)
{
    for (uint32_t way = 0; way < MQD_TALLY_WAY_COUNT; way++)
        if (mqd_load_acquire(&set[way].key) == key)
            return &set[way];
    return NULL;
}

/* Gives the tally to `key` (T1). False: the tally is in use, or another process has claimed it. */
static bool claim(struct mqd_tally *tally, uint64_t key)
{
    uint64_t old_key = mqd_load_relaxed(&tally->key);
    if (old_key == LOCKED || sum_of(tally) || !mqd_compare_exchange(&tally->key, &old_key, LOCKED))
        return false;
    mqd_fence_full();
    bool is_unused = sum_of(tally) == 0;
    mqd_store_release(&tally->key, is_unused ? key : old_key);
    return is_unused;
}

static bool increment(struct mqd_tally *tally, uint64_t key, uint32_t worker)
{
    uint16_t *own_count = &tally->count[worker];
    if (*own_count == UINT16_MAX)
        return false;
    mqd_store_relaxed(own_count, (uint16_t)(*own_count + 1));
    mqd_fence_full();
    if (mqd_load_acquire(&tally->key) == key)
        return true;
    mqd_store_relaxed(own_count, (uint16_t)(*own_count - 1));
    return false;
}

int32_t mqd_tally_enter(void *control, uint64_t key, uint32_t worker, uint32_t *sum)
{
    struct mqd_tally_table *table = mqd_control_tallies(control);
    uint32_t set_index = (uint32_t)(key % MQD_TALLY_SET_COUNT);
    struct mqd_tally *set = &table->tally[set_index * MQD_TALLY_WAY_COUNT];
    key += key <= LOCKED ? 2 : 0; /* 0 and LOCKED are not keys */
    *sum = 0;
    mqd_fetch_or(&table->touched[set_index / 64], 1ull << set_index % 64);
    for (uint32_t tries = 0; tries < TRIES; tries++) {
        struct mqd_tally *tally = tally_of(set, key);
        if (tally && increment(tally, key, worker)) {
            *sum = sum_of(tally);
            return (int32_t)(tally - table->tally);
        }
        if (!tally && tries < TRIES / 2 && tally_of(set, LOCKED)) {
            mqd_cpu_relax(); /* the locked tally may be that of this key, and may soon be unlocked */
            continue;
        }
        for (uint32_t way = 0; !tally && way < MQD_TALLY_WAY_COUNT; way++)
            if (claim(&set[way], key))
                break;
    }
    return MQD_TALLY_NONE;
}

void mqd_tally_leave(void *control, int32_t tally, uint32_t worker)
{
    if (tally < 0)
        return;
    uint16_t *own_count = &mqd_control_tallies(control)->tally[tally].count[worker];
    mqd_store_release(own_count, (uint16_t)(*own_count - 1));
}

void mqd_tally_reset(void *control, uint32_t worker)
{
    struct mqd_tally_table *table = mqd_control_tallies(control);
    for (uint32_t set_index = 0; set_index < MQD_TALLY_SET_COUNT; set_index++)
        for (uint32_t way = 0;
             mqd_load_relaxed(&table->touched[set_index / 64]) >> set_index % 64 & 1 && way < MQD_TALLY_WAY_COUNT;
             way++)
            mqd_store_relaxed(&table->tally[set_index * MQD_TALLY_WAY_COUNT + way].count[worker], 0);
}
