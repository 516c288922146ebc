/* See log/transactions.h. Links are index + 1, so that zeroed memory means "none". */
#include "log/transactions.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "base/big_endian.h"
#include "base/error.h"
#include "base/varint.h"

#define CAPACITY_MIN 4u
#define CAPACITY_MAX (1u << 26)
#define COMPRESSION_MASK 7
#define TRANSACTIONAL_BIT 0x10
#define TYPE_ABORT 0
#define TYPE_COMMIT 1

/* ---- markers ---- */

/* record: length | attributes | timestamp delta | offset delta | key length, key: version i16, type
 * i16 | value length, value: version i16, coordinator epoch i32 | headers. Later versions may
 * append to key and value (KIP-98). */
int mqd_marker_parse(const uint8_t *bytes, const struct mqd_batch *batch, struct mqd_marker *out)
{
    int64_t length, ignored, key_bytes, value_bytes;
    if ((batch->attributes & (COMPRESSION_MASK | TRANSACTIONAL_BIT)) != TRANSACTIONAL_BIT || batch->record_count != 1 ||
        batch->size_bytes < MQD_BATCH_HEADER_BYTES || batch->size_bytes > MQD_MARKER_BYTES_MAX)
        return -1;
    const uint8_t *end = bytes + batch->size_bytes, *at = mqd_varint(bytes + MQD_BATCH_HEADER_BYTES, end, &length);
    if (!at || length < 1 || length > end - at)
        return -1;
    end = at + length;
    at = mqd_varlong(at + 1, end, &ignored); /* after the attributes: timestamp delta */
    at = at ? mqd_varint(at, end, &ignored) : NULL;
    const uint8_t *key = at ? mqd_varint_size(at, end, &key_bytes) : NULL;
    if (!key || key_bytes < 4)
        return -1;
    uint16_t type = mqd_get_be16(key + 2);
    const uint8_t *value = mqd_varint_size(key + key_bytes, end, &value_bytes);
    if ((type != TYPE_ABORT && type != TYPE_COMMIT) || !value || value_bytes < 6)
        return -1;
    *out = (struct mqd_marker){type == TYPE_COMMIT, (int32_t)mqd_get_be32(value + 2)};
    return 0;
}

/* ---- transactions ---- */

void mqd_transactions_free(struct mqd_transactions *transactions)
{
    free(transactions->entries);
    memset(transactions, 0, sizeof *transactions);
}

static uint32_t take_entry(struct mqd_transactions *transactions)
{
    if (transactions->free_list) {
        uint32_t link = transactions->free_list;
        transactions->free_list = transactions->entries[link - 1].newer;
        return link;
    }
    if (transactions->used == transactions->capacity) {
        uint32_t capacity = transactions->capacity ? transactions->capacity * 2 : CAPACITY_MIN;
        struct mqd_transaction *entries =
            capacity > CAPACITY_MAX ? NULL : realloc(transactions->entries, capacity * sizeof *entries);
        if (!entries) {
            mqd_error_set(ENOMEM, "out of memory for %u transactions of one partition", capacity);
            return 0;
        }
        transactions->entries = entries;
        transactions->capacity = capacity;
    }
    return ++transactions->used;
}

uint32_t mqd_transactions_begin(struct mqd_transactions *transactions, int64_t producer_id, int64_t first_offset)
{
    uint32_t link = take_entry(transactions);
    if (!link)
        return 0;
    /* offsets increase, so the new transaction nearly always comes last; only a snapshot may list
     * transactions in another order */
    uint32_t older = transactions->newest;
    while (older && transactions->entries[older - 1].first_offset > first_offset)
        older = transactions->entries[older - 1].older;
    uint32_t newer = older ? transactions->entries[older - 1].newer : transactions->oldest;
    transactions->entries[link - 1] = (struct mqd_transaction){
        .producer_id = producer_id, .first_offset = first_offset, .last_offset = -1, .older = older, .newer = newer};
    *(older ? &transactions->entries[older - 1].newer : &transactions->oldest) = link;
    *(newer ? &transactions->entries[newer - 1].older : &transactions->newest) = link;
    return link;
}

void mqd_transactions_end(struct mqd_transactions *transactions, uint32_t link, int64_t last_offset)
{
    struct mqd_transaction *entry = &transactions->entries[link - 1];
    entry->last_offset = last_offset;
    entry->ended_previous = transactions->ended_last;
    entry->ended_next = 0;
    *(transactions->ended_last ? &transactions->entries[transactions->ended_last - 1].ended_next
                               : &transactions->ended_first) = link;
    transactions->ended_last = link;
}

void mqd_transactions_resume(struct mqd_transactions *transactions, uint32_t link)
{
    struct mqd_transaction *entry = &transactions->entries[link - 1];
    *(entry->ended_previous ? &transactions->entries[entry->ended_previous - 1].ended_next
                            : &transactions->ended_first) = entry->ended_next;
    *(entry->ended_next ? &transactions->entries[entry->ended_next - 1].ended_previous : &transactions->ended_last) =
        entry->ended_previous;
    entry->last_offset = -1;
    entry->ended_previous = entry->ended_next = 0;
}

void mqd_transactions_remove(struct mqd_transactions *transactions, uint32_t link)
{
    struct mqd_transaction *entry = &transactions->entries[link - 1];
    *(entry->older ? &transactions->entries[entry->older - 1].newer : &transactions->oldest) = entry->newer;
    *(entry->newer ? &transactions->entries[entry->newer - 1].older : &transactions->newest) = entry->older;
    entry->newer = transactions->free_list;
    transactions->free_list = link;
}

void mqd_transactions_forget_decided(struct mqd_transactions *transactions, int64_t high_watermark)
{
    uint32_t link;
    while ((link = transactions->ended_first) && transactions->entries[link - 1].last_offset < high_watermark) {
        mqd_transactions_resume(transactions, link); /* removes it from the list of ended ones */
        mqd_transactions_remove(transactions, link);
    }
}

int64_t mqd_transactions_first_unstable(const struct mqd_transactions *transactions)
{
    return transactions->oldest ? transactions->entries[transactions->oldest - 1].first_offset : INT64_MAX;
}

int64_t mqd_transactions_first_ongoing(const struct mqd_transactions *transactions)
{
    for (uint32_t link = transactions->oldest; link; link = transactions->entries[link - 1].newer)
        if (transactions->entries[link - 1].last_offset < 0)
            return transactions->entries[link - 1].first_offset;
    return INT64_MAX;
}

/* ---- verification ---- */

void mqd_verifications_free(struct mqd_verifications *verifications)
{
    free(verifications->entries);
    memset(verifications, 0, sizeof *verifications);
}

static uint64_t mix(uint64_t value)
{
    value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9ull;
    value = (value ^ value >> 27) * 0x94d049bb133111ebull;
    return value ^ value >> 31;
}

static uint32_t *bucket_of(const struct mqd_verifications *verifications, int64_t producer_id)
{
    return &verifications->buckets[mix((uint64_t)producer_id) % MQD_VERIFICATION_COUNT_MAX];
}

/* The seed is random, so that a guard from before the partition was reopened does not match. */
static int verifications_allocate(struct mqd_verifications *verifications)
{
    void *memory = calloc(MQD_VERIFICATION_COUNT_MAX, sizeof *verifications->entries + sizeof *verifications->buckets);
    if (!memory)
        return -1;
    verifications->entries = memory;
    verifications->buckets = (uint32_t *)(verifications->entries + MQD_VERIFICATION_COUNT_MAX);
    if (getrandom(&verifications->seed, sizeof verifications->seed, GRND_NONBLOCK) !=
        (ssize_t)sizeof verifications->seed) {
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        verifications->seed = mix((uint64_t)now.tv_sec << 30 ^ (uint64_t)now.tv_nsec ^ (uint64_t)(uintptr_t)memory);
    }
    return 0;
}

static struct mqd_verification *entry_of(const struct mqd_verifications *verifications, int64_t producer_id)
{
    if (!verifications->count)
        return NULL;
    for (uint32_t link = *bucket_of(verifications, producer_id); link;
         link = verifications->entries[link - 1].hash_next)
        if (verifications->entries[link - 1].producer_id == producer_id)
            return &verifications->entries[link - 1];
    return NULL;
}

static void release(struct mqd_verifications *verifications, struct mqd_verification *entry)
{
    uint32_t *link = bucket_of(verifications, entry->producer_id),
             entry_link = (uint32_t)(entry - verifications->entries) + 1;
    while (*link != entry_link)
        link = &verifications->entries[*link - 1].hash_next;
    *link = entry->hash_next;
    entry->guard = 0;
    verifications->count--;
}

int64_t mqd_verifications_begin(struct mqd_verifications *verifications, const struct mqd_batch *batch, int64_t now_ms)
{
    if (!verifications->entries && verifications_allocate(verifications) < 0)
        return 0;
    struct mqd_verification *entry = entry_of(verifications, batch->producer_id);
    if (entry && entry->epoch == batch->producer_epoch) {
        if (batch->base_sequence < entry->lowest_sequence)
            entry->lowest_sequence = batch->base_sequence;
        entry->begun_ms = now_ms;
        return entry->guard;
    }
    if (entry)
        release(verifications, entry);
    entry = &verifications->entries[verifications->next];
    verifications->next = (verifications->next + 1) % MQD_VERIFICATION_COUNT_MAX;
    if (entry->guard)
        release(verifications, entry);
    uint32_t *bucket = bucket_of(verifications, batch->producer_id);
    int64_t guard = (int64_t)(mix(verifications->seed += 0x9e3779b97f4a7c15ull) >> 1);
    *entry = (struct mqd_verification){.producer_id = batch->producer_id,
                                       .guard = guard ? guard : 1,
                                       .begun_ms = now_ms,
                                       .lowest_sequence = batch->base_sequence,
                                       .epoch = batch->producer_epoch,
                                       .hash_next = *bucket};
    *bucket = (uint32_t)(entry - verifications->entries) + 1;
    verifications->count++;
    return entry->guard;
}

const struct mqd_verification *mqd_verifications_find(const struct mqd_verifications *verifications,
                                                      const struct mqd_batch *batch, int64_t guard)
{
    const struct mqd_verification *entry = entry_of(verifications, batch->producer_id);
    return entry && entry->guard == guard && entry->epoch == batch->producer_epoch ? entry : NULL;
}

const struct mqd_verification *mqd_verifications_find_producer(const struct mqd_verifications *verifications,
                                                               const struct mqd_batch *batch)
{
    const struct mqd_verification *entry = entry_of(verifications, batch->producer_id);
    return entry && entry->epoch == batch->producer_epoch ? entry : NULL;
}

void mqd_verifications_revoke(struct mqd_verifications *verifications, int64_t producer_id)
{
    struct mqd_verification *entry = entry_of(verifications, producer_id);
    if (entry)
        release(verifications, entry);
}

void mqd_verifications_expire(struct mqd_verifications *verifications, int64_t before_ms)
{
    for (uint32_t i = 0; verifications->count && i < MQD_VERIFICATION_COUNT_MAX; i++)
        if (verifications->entries[i].guard && verifications->entries[i].begun_ms < before_ms)
            release(verifications, &verifications->entries[i]);
    if (!verifications->count)
        mqd_verifications_free(verifications);
}
