/* See mqd_producers.h. Links are index + 1, so that zeroed memory means "none". */
#define _GNU_SOURCE
#include "mqd_producers.h"

#include <endian.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "mqd_error.h"

#define CAPACITY_MIN 8u
#define CAPACITY_MAX (1u << 26)
#define SNAPSHOT_MAGIC 0x4d514450u
#define SNAPSHOT_HEADER_BYTES 24
#define SNAPSHOT_PRODUCER_BYTES 24
#define SNAPSHOT_BATCH_BYTES 16
#define CONTROL_BIT 0x20

void mqd_producers_free(struct mqd_producers *producers)
{
    free(producers->entries);
    free(producers->buckets);
    memset(producers, 0, sizeof *producers);
}

/* ---- table -------------------------------------------------------------------------------------------------------- */

static uint32_t bucket_of(const struct mqd_producers *producers, int64_t producer_id)
{
    return (uint32_t)(((uint64_t)producer_id * 0x9e3779b97f4a7c15ull) >> 32) & (producers->capacity - 1);
}

static uint32_t find(const struct mqd_producers *producers, int64_t producer_id)
{
    if (producers->capacity == 0)
        return MQD_PRODUCER_NONE;
    for (uint32_t link = producers->buckets[bucket_of(producers, producer_id)]; link; link = producers->entries[link - 1].hash_next)
        if (producers->entries[link - 1].producer_id == producer_id)
            return link - 1;
    return MQD_PRODUCER_NONE;
}

static void unlink_use(struct mqd_producers *producers, struct mqd_producer *entry)
{
    *(entry->newer ? &producers->entries[entry->newer - 1].older : &producers->newest) = entry->older;
    *(entry->older ? &producers->entries[entry->older - 1].newer : &producers->oldest) = entry->newer;
}

static void link_newest(struct mqd_producers *producers, uint32_t index)
{
    struct mqd_producer *entry = &producers->entries[index];
    entry->newer = 0;
    entry->older = producers->newest;
    *(producers->newest ? &producers->entries[producers->newest - 1].newer : &producers->oldest) = index + 1;
    producers->newest = index + 1;
}

static int grow(struct mqd_producers *producers)
{
    uint32_t capacity = producers->capacity ? producers->capacity * 2 : CAPACITY_MIN;
    if (capacity > CAPACITY_MAX)
        return mqd_error_set(MQD_E_FULL, "more than %u producer ids in one partition; lower producer.id.expiration.ms", CAPACITY_MAX);
    struct mqd_producer *entries = realloc(producers->entries, capacity * sizeof *entries);
    if (entries)
        producers->entries = entries;
    uint32_t *buckets = calloc(capacity, sizeof *buckets);
    if (!entries || !buckets) {
        free(buckets);
        return mqd_error_set(ENOMEM, "no memory for %u producers", capacity);
    }
    free(producers->buckets);
    producers->buckets = buckets;
    producers->capacity = capacity;
    for (uint32_t link = producers->newest; link; link = entries[link - 1].older) {
        uint32_t bucket = bucket_of(producers, entries[link - 1].producer_id);
        entries[link - 1].hash_next = buckets[bucket];
        buckets[bucket] = link;
    }
    return 0;
}

static uint32_t insert(struct mqd_producers *producers, int64_t producer_id)
{
    uint32_t index;
    if (!producers->free_list && producers->used == producers->capacity && grow(producers) < 0)
        return MQD_PRODUCER_NONE;
    if (producers->free_list) {
        index = producers->free_list - 1;
        producers->free_list = producers->entries[index].hash_next;
    } else {
        index = producers->used++;
    }
    struct mqd_producer *entry = &producers->entries[index];
    uint32_t bucket = bucket_of(producers, producer_id);
    *entry = (struct mqd_producer){.producer_id = producer_id, .epoch = -1, .hash_next = producers->buckets[bucket]};
    producers->buckets[bucket] = index + 1;
    link_newest(producers, index);
    producers->count++;
    return index;
}

static void erase(struct mqd_producers *producers, uint32_t index)
{
    struct mqd_producer *entry = &producers->entries[index];
    uint32_t *link = &producers->buckets[bucket_of(producers, entry->producer_id)];
    while (*link != index + 1)
        link = &producers->entries[*link - 1].hash_next;
    *link = entry->hash_next;
    unlink_use(producers, entry);
    entry->hash_next = producers->free_list;
    producers->free_list = index + 1;
    producers->count--;
    producers->changes++;
}

/* ---- rules -------------------------------------------------------------------------------------------------------- */

static int32_t sequence_after(int32_t sequence, int32_t count)
{
    return (int32_t)(((uint32_t)sequence + (uint32_t)count) & INT32_MAX);
}

/* The i-th of the remembered batches, 0 = oldest. */
static const struct mqd_producer_batch *batch_at(const struct mqd_producer *entry, uint32_t i)
{
    return &entry->batches[(entry->head + MQD_PRODUCER_BATCH_COUNT - entry->count + i) % MQD_PRODUCER_BATCH_COUNT];
}

/* `sequence` lies before `other`, by less than half of the circle. */
static bool sequence_before(int32_t sequence, int32_t other)
{
    uint32_t distance = ((uint32_t)other - (uint32_t)sequence) & INT32_MAX;
    return distance > 0 && distance <= (1u << 30);
}

int16_t mqd_producers_check(const struct mqd_producers *producers, const struct mqd_batch *batch, bool *duplicate, int64_t *base_offset)
{
    *duplicate = false;
    uint32_t index = find(producers, batch->producer_id);
    if (index == MQD_PRODUCER_NONE)
        return 0;
    const struct mqd_producer *entry = &producers->entries[index];
    if (batch->producer_epoch < entry->epoch)
        return 47;
    if (batch->attributes & CONTROL_BIT)
        return 0;
    if (batch->producer_epoch > entry->epoch)
        return batch->base_sequence == 0 ? 0 : 45;
    if (entry->count == 0)
        return 0;
    int32_t last_sequence = sequence_after(batch->base_sequence, batch->last_offset_delta);
    for (uint32_t i = 0; i < entry->count; i++) {
        const struct mqd_producer_batch *known = batch_at(entry, i);
        if (known->first_sequence == batch->base_sequence && known->last_sequence == last_sequence) {
            *duplicate = true;
            *base_offset = known->base_offset;
            return 0;
        }
    }
    if (batch->base_sequence == sequence_after(batch_at(entry, entry->count - 1u)->last_sequence, 1))
        return 0;
    return sequence_before(last_sequence, batch_at(entry, 0)->first_sequence) ? 46 : 45;
}

int mqd_producers_add(struct mqd_producers *producers, const struct mqd_batch *batch, int64_t base_offset, int64_t now_ms, struct mqd_producer_undo *undo)
{
    uint32_t index = find(producers, batch->producer_id);
    bool created = index == MQD_PRODUCER_NONE;
    if (created && (index = insert(producers, batch->producer_id)) == MQD_PRODUCER_NONE)
        return -1;
    struct mqd_producer *entry = &producers->entries[index];
    *undo = (struct mqd_producer_undo){.index = index, .epoch = entry->epoch, .count = entry->count, .head = entry->head, .created = created,
                                       .last_append_ms = entry->last_append_ms, .overwritten = entry->batches[entry->head]};
    if (entry->epoch != batch->producer_epoch)
        entry->count = 0;
    entry->epoch = batch->producer_epoch;
    entry->last_append_ms = now_ms;
    if (!(batch->attributes & CONTROL_BIT)) {
        entry->batches[entry->head] = (struct mqd_producer_batch){batch->base_sequence, sequence_after(batch->base_sequence, batch->last_offset_delta), base_offset};
        entry->head = (uint8_t)((entry->head + 1) % MQD_PRODUCER_BATCH_COUNT);
        entry->count += entry->count < MQD_PRODUCER_BATCH_COUNT;
    }
    if (producers->newest != index + 1) {
        unlink_use(producers, entry);
        link_newest(producers, index);
    }
    producers->changes++;
    return 0;
}

void mqd_producers_undo(struct mqd_producers *producers, const struct mqd_producer_undo *undo)
{
    if (undo->index == MQD_PRODUCER_NONE)
        return;
    if (undo->created) {
        erase(producers, undo->index);
        return;
    }
    struct mqd_producer *entry = &producers->entries[undo->index];
    entry->epoch = undo->epoch;
    entry->count = undo->count;
    entry->head = undo->head;
    entry->last_append_ms = undo->last_append_ms;
    entry->batches[undo->head] = undo->overwritten;
    producers->changes++;
}

void mqd_producers_trim(struct mqd_producers *producers, uint32_t count_max)
{
    while (producers->count > count_max)
        erase(producers, producers->oldest - 1);
}

void mqd_producers_expire(struct mqd_producers *producers, int64_t before_ms)
{
    while (producers->oldest && producers->entries[producers->oldest - 1].last_append_ms < before_ms)
        erase(producers, producers->oldest - 1);
}

/* ---- snapshot ----------------------------------------------------------------------------------------------------- */

static uint8_t *put16(uint8_t *at, uint16_t value)
{
    value = htobe16(value);
    return (uint8_t *)memcpy(at, &value, sizeof value) + sizeof value;
}

static uint8_t *put32(uint8_t *at, uint32_t value)
{
    value = htobe32(value);
    return (uint8_t *)memcpy(at, &value, sizeof value) + sizeof value;
}

static uint8_t *put64(uint8_t *at, uint64_t value)
{
    value = htobe64(value);
    return (uint8_t *)memcpy(at, &value, sizeof value) + sizeof value;
}

static uint32_t get32(const uint8_t *at)
{
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return be32toh(value);
}

static uint64_t get64(const uint8_t *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return be64toh(value);
}

static uint8_t *encode_producer(uint8_t *at, const struct mqd_producer *entry)
{
    at = put64(at, (uint64_t)entry->producer_id);
    at = put64(at, (uint64_t)entry->last_append_ms);
    at = put16(at, (uint16_t)entry->epoch);
    *at++ = entry->count;
    *at++ = 0;
    at = put32(at, 0);
    for (uint32_t i = 0; i < entry->count; i++) {
        const struct mqd_producer_batch *batch = batch_at(entry, i);
        at = put32(at, (uint32_t)batch->first_sequence);
        at = put32(at, (uint32_t)batch->last_sequence);
        at = put64(at, (uint64_t)batch->base_offset);
    }
    return at;
}

uint8_t *mqd_producers_encode(const struct mqd_producers *producers, int64_t offset, size_t *size_bytes)
{
    size_t capacity = SNAPSHOT_HEADER_BYTES + producers->count * (size_t)(SNAPSHOT_PRODUCER_BYTES + MQD_PRODUCER_BATCH_COUNT * SNAPSHOT_BATCH_BYTES);
    uint8_t *bytes = malloc(capacity);
    if (!bytes) {
        mqd_error_set(ENOMEM, "no memory for a snapshot of %u producers", producers->count);
        return NULL;
    }
    uint8_t *at = put32(bytes, SNAPSHOT_MAGIC);
    at = put16(at, 1);
    at = put16(at, 0);
    at = put32(at, 0);
    at = put32(at, producers->count);
    at = put64(at, (uint64_t)offset);
    for (uint32_t link = producers->oldest; link; link = producers->entries[link - 1].newer)
        at = encode_producer(at, &producers->entries[link - 1]);
    *size_bytes = (size_t)(at - bytes);
    put32(bytes + 8, mqd_crc32c(0, bytes + 12, *size_bytes - 12));
    return bytes;
}

static const uint8_t *decode_producer(struct mqd_producers *producers, const uint8_t *at, const uint8_t *end)
{
    if (end - at < SNAPSHOT_PRODUCER_BYTES || at[18] > MQD_PRODUCER_BATCH_COUNT || end - at < SNAPSHOT_PRODUCER_BYTES + at[18] * SNAPSHOT_BATCH_BYTES)
        return NULL;
    int64_t producer_id = (int64_t)get64(at);
    if (producer_id < 0 || find(producers, producer_id) != MQD_PRODUCER_NONE)
        return NULL;
    uint32_t index = insert(producers, producer_id);
    if (index == MQD_PRODUCER_NONE)
        return NULL;
    struct mqd_producer *entry = &producers->entries[index];
    entry->last_append_ms = (int64_t)get64(at + 8);
    entry->epoch = (int16_t)(at[16] << 8 | at[17]);
    entry->count = at[18];
    entry->head = entry->count % MQD_PRODUCER_BATCH_COUNT;
    at += SNAPSHOT_PRODUCER_BYTES;
    for (uint32_t i = 0; i < entry->count; i++, at += SNAPSHOT_BATCH_BYTES)
        entry->batches[i] = (struct mqd_producer_batch){(int32_t)get32(at), (int32_t)get32(at + 4), (int64_t)get64(at + 8)};
    return at;
}

int mqd_producers_decode(struct mqd_producers *producers, const uint8_t *bytes, size_t size_bytes, int64_t *offset)
{
    if (size_bytes < SNAPSHOT_HEADER_BYTES || get32(bytes) != SNAPSHOT_MAGIC || bytes[4] != 0 || bytes[5] != 1)
        return mqd_error_set(MQD_E_CORRUPT, "not a producer snapshot of version 1");
    if (get32(bytes + 8) != mqd_crc32c(0, bytes + 12, size_bytes - 12))
        return mqd_error_set(MQD_E_CORRUPT, "the checksum of a producer snapshot is wrong");
    const uint8_t *at = bytes + SNAPSHOT_HEADER_BYTES, *end = bytes + size_bytes;
    uint32_t count = get32(bytes + 12);
    *offset = (int64_t)get64(bytes + 16);
    for (uint32_t i = 0; i < count && at; i++)
        at = decode_producer(producers, at, end);
    if (at == end)
        return 0;
    mqd_producers_free(producers);
    return mqd_error_set(MQD_E_CORRUPT, "a producer snapshot does not hold the %u producers that it names", count);
}
