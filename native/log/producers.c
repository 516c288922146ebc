/* See log/producers.h. Links are index + 1, so that zeroed memory means "none". */
#include "log/producers.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "wire/kafka_errors.h"

#define CAPACITY_MIN 8u
#define CAPACITY_MAX (1u << 26)
#define TRANSACTIONAL_BIT 0x10
#define NO_EPOCH (-1) /* Kafka's NO_PRODUCER_EPOCH: lower epochs are invalid; after it any sequence is accepted */
#define CONTROL_BIT 0x20

void mqd_producers_free(struct mqd_producers *producers)
{
    free(producers->entries);
    free(producers->buckets);
    mqd_transactions_free(&producers->transactions);
    memset(producers, 0, sizeof *producers);
}

/* ---- table ---- */

static uint32_t bucket_of(const struct mqd_producers *producers, int64_t producer_id)
{
    return (uint32_t)(((uint64_t)producer_id * 0x9e3779b97f4a7c15ull) >> 32) & (producers->capacity - 1);
}

uint32_t mqd_producers_find(const struct mqd_producers *producers, int64_t producer_id)
{
    if (producers->capacity == 0)
        return MQD_PRODUCER_NONE;
    for (uint32_t link = producers->buckets[bucket_of(producers, producer_id)]; link;
         link = producers->entries[link - 1].hash_next)
        if (producers->entries[link - 1].producer_id == producer_id)
            return link - 1;
    return MQD_PRODUCER_NONE;
}

static void unlink_from_use_list(struct mqd_producers *producers, struct mqd_producer_state *entry)
{
    *(entry->newer ? &producers->entries[entry->newer - 1].older : &producers->newest) = entry->older;
    *(entry->older ? &producers->entries[entry->older - 1].newer : &producers->oldest) = entry->newer;
}

static void link_newest(struct mqd_producers *producers, uint32_t index)
{
    struct mqd_producer_state *entry = &producers->entries[index];
    entry->newer = 0;
    entry->older = producers->newest;
    *(producers->newest ? &producers->entries[producers->newest - 1].newer : &producers->oldest) = index + 1;
    producers->newest = index + 1;
}

static int grow(struct mqd_producers *producers)
{
    uint32_t capacity = producers->capacity ? producers->capacity * 2 : CAPACITY_MIN;
    if (capacity > CAPACITY_MAX)
        return mqd_error_set(MQD_E_FULL, "more than %u producer ids in one partition; lower producer.id.expiration.ms",
                             CAPACITY_MAX);
    struct mqd_producer_state *entries = realloc(producers->entries, capacity * sizeof *entries);
    if (entries)
        producers->entries = entries;
    uint32_t *buckets = calloc(capacity, sizeof *buckets);
    if (!entries || !buckets) {
        free(buckets);
        return mqd_error_set(ENOMEM, "out of memory for %u producers", capacity);
    }
    free(producers->buckets);
    producers->buckets = buckets;
    producers->capacity = capacity;
    /* no entry is free: all of them are in use */
    for (uint32_t link = 1; link <= producers->used; link++) {
        uint32_t bucket = bucket_of(producers, entries[link - 1].producer_id);
        entries[link - 1].hash_next = buckets[bucket];
        buckets[bucket] = link;
    }
    return 0;
}

uint32_t mqd_producers_insert(struct mqd_producers *producers, int64_t producer_id)
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
    struct mqd_producer_state *entry = &producers->entries[index];
    uint32_t bucket = bucket_of(producers, producer_id);
    *entry = (struct mqd_producer_state){
        .producer_id = producer_id, .epoch = -1, .coordinator_epoch = -1, .hash_next = producers->buckets[bucket]};
    producers->buckets[bucket] = index + 1;
    link_newest(producers, index);
    producers->count++;
    return index;
}

static void erase(struct mqd_producers *producers, uint32_t index)
{
    struct mqd_producer_state *entry = &producers->entries[index];
    uint32_t *link = &producers->buckets[bucket_of(producers, entry->producer_id)];
    while (*link != index + 1)
        link = &producers->entries[*link - 1].hash_next;
    *link = entry->hash_next;
    if (!entry->transaction)
        unlink_from_use_list(producers, entry);
    entry->hash_next = producers->free_list;
    producers->free_list = index + 1;
    producers->count--;
    producers->change_count++;
}

/* ---- rules ---- */

static int32_t sequence_after(int32_t sequence, int32_t count)
{
    return (int32_t)(((uint32_t)sequence + (uint32_t)count) & INT32_MAX);
}

/* The i-th of the remembered batches, 0 = oldest. */
static const struct mqd_producer_batch *batch_at(const struct mqd_producer_state *entry, uint32_t i)
{
    return &entry->batches[(entry->head + MQD_PRODUCER_BATCH_COUNT - entry->count + i) % MQD_PRODUCER_BATCH_COUNT];
}

/* Whether `sequence` is before `other`, by less than half of the sequence space. */
static bool sequence_before(int32_t sequence, int32_t other)
{
    uint32_t distance = ((uint32_t)other - (uint32_t)sequence) & INT32_MAX;
    return distance > 0 && distance <= (1u << 30);
}

/* Checks the sequence of a data batch in the entry's epoch. */
static int16_t check_sequence(const struct mqd_producer_state *entry, const struct mqd_batch *batch, bool *duplicate,
                              int64_t *base_offset)
{
    if (entry->count == 0)
        return entry->any_sequence || batch->base_sequence == 0 ? 0 : MQD_KAFKA_OUT_OF_ORDER_SEQUENCE_NUMBER;
    int32_t last_sequence = sequence_after(batch->base_sequence, batch->last_offset_delta);
    for (uint32_t i = 0; i < entry->count && !entry->ended; i++) {
        const struct mqd_producer_batch *known = batch_at(entry, i);
        if (known->first_sequence == batch->base_sequence && known->last_sequence == last_sequence) {
            *duplicate = true;
            *base_offset = known->base_offset;
            return 0;
        }
    }
    if (entry->epoch == NO_EPOCH ||
        batch->base_sequence == sequence_after(batch_at(entry, entry->count - 1u)->last_sequence, 1))
        return 0;
    if (entry->ended) {
        bool reuses_sequence =
            !sequence_before(batch_at(entry, entry->count - 1u)->last_sequence, batch->base_sequence);
        return reuses_sequence && batch->attributes & TRANSACTIONAL_BIT ? MQD_KAFKA_UNKNOWN_PRODUCER_ID
                                                                        : MQD_KAFKA_OUT_OF_ORDER_SEQUENCE_NUMBER;
    }
    /* if fewer batches are remembered, no earlier batch was ever written */
    bool may_have_forgotten = entry->count == MQD_PRODUCER_BATCH_COUNT;
    return may_have_forgotten && sequence_before(last_sequence, batch_at(entry, 0)->first_sequence)
               ? MQD_KAFKA_DUPLICATE_SEQUENCE_NUMBER
               : MQD_KAFKA_OUT_OF_ORDER_SEQUENCE_NUMBER;
}

int16_t mqd_producers_check(const struct mqd_producers *producers, const struct mqd_batch *batch,
                            struct mqd_producer_batch_kind kind, bool *duplicate, int64_t *base_offset)
{
    *duplicate = false;
    uint32_t index = mqd_producers_find(producers, batch->producer_id);
    if (index == MQD_PRODUCER_NONE)
        return batch->producer_epoch < NO_EPOCH ? MQD_KAFKA_INVALID_PRODUCER_EPOCH : 0;
    const struct mqd_producer_state *entry = &producers->entries[index];
    if (batch->producer_epoch < entry->epoch)
        return MQD_KAFKA_INVALID_PRODUCER_EPOCH;
    if (kind.marker) {
        if (kind.bumps_epoch && batch->producer_epoch == entry->epoch)
            return MQD_KAFKA_INVALID_PRODUCER_EPOCH;
        return kind.marker->coordinator_epoch < entry->coordinator_epoch ? MQD_KAFKA_TRANSACTION_COORDINATOR_FENCED : 0;
    }
    int16_t error = 0;
    if (!kind.from_coordinator && batch->producer_epoch > entry->epoch)
        error = batch->base_sequence == 0 || entry->epoch == NO_EPOCH ? 0 : MQD_KAFKA_OUT_OF_ORDER_SEQUENCE_NUMBER;
    else if (!kind.from_coordinator)
        error = check_sequence(entry, batch, duplicate, base_offset);
    if (error == 0 && !*duplicate && entry->transaction && !(batch->attributes & TRANSACTIONAL_BIT))
        error = MQD_KAFKA_INVALID_TXN_STATE;
    return error;
}

bool mqd_producers_continues_transaction(const struct mqd_producers *producers, const struct mqd_batch *batch)
{
    uint32_t index = mqd_producers_find(producers, batch->producer_id);
    return index != MQD_PRODUCER_NONE && producers->entries[index].transaction &&
           producers->entries[index].epoch == batch->producer_epoch;
}

bool mqd_producers_has_sequences(const struct mqd_producers *producers, const struct mqd_batch *batch)
{
    uint32_t index = mqd_producers_find(producers, batch->producer_id);
    return index != MQD_PRODUCER_NONE && producers->entries[index].epoch == batch->producer_epoch &&
           producers->entries[index].count > 0;
}

bool mqd_producers_in_transaction(const struct mqd_producers *producers, int64_t producer_id)
{
    uint32_t index = mqd_producers_find(producers, producer_id);
    return index != MQD_PRODUCER_NONE && producers->entries[index].transaction;
}

int mqd_producers_begin_transaction(struct mqd_producers *producers, uint32_t index, int64_t first_offset)
{
    struct mqd_producer_state *entry = &producers->entries[index];
    uint32_t link = mqd_transactions_begin(&producers->transactions, entry->producer_id, first_offset);
    if (!link)
        return -1;
    unlink_from_use_list(producers, entry);
    entry->newer = entry->older = 0;
    entry->transaction = link;
    return 0;
}

/* Applies the batch to the producer's epoch and sequences. */
static void note_batch(struct mqd_producer_state *entry, const struct mqd_batch *batch, bool is_marker,
                       int64_t base_offset)
{
    bool has_sequence = !is_marker && batch->base_sequence >= 0;
    if (entry->epoch != batch->producer_epoch) {
        entry->any_sequence = !has_sequence && entry->epoch < 0;
        entry->count = entry->ended = 0;
    }
    entry->epoch = batch->producer_epoch;
    if (is_marker)
        entry->ended = entry->count > 0;
    if (!has_sequence)
        return;
    if (entry->ended)
        entry->count = entry->ended = 0;
    entry->any_sequence = 0;
    entry->batches[entry->head] = (struct mqd_producer_batch){
        batch->base_sequence, sequence_after(batch->base_sequence, batch->last_offset_delta), base_offset};
    entry->head = (uint8_t)((entry->head + 1) % MQD_PRODUCER_BATCH_COUNT) & 15;
    entry->count += entry->count < MQD_PRODUCER_BATCH_COUNT;
}

int mqd_producers_add(struct mqd_producers *producers, const struct mqd_batch *batch, const struct mqd_marker *marker,
                      int64_t base_offset, int64_t now_ms, struct mqd_producer_undo *undo)
{
    uint32_t index = mqd_producers_find(producers, batch->producer_id);
    bool created = index == MQD_PRODUCER_NONE;
    if (created && (index = mqd_producers_insert(producers, batch->producer_id)) == MQD_PRODUCER_NONE)
        return -1;
    struct mqd_producer_state *entry = &producers->entries[index];
    *undo = (struct mqd_producer_undo){.index = index,
                                       .transaction = entry->transaction,
                                       .coordinator_epoch = entry->coordinator_epoch,
                                       .epoch = entry->epoch,
                                       .count = entry->count,
                                       .head = entry->head,
                                       .any_sequence = entry->any_sequence,
                                       .ended = entry->ended,
                                       .created = created,
                                       .last_append_ms = entry->last_append_ms,
                                       .overwritten = entry->batches[entry->head]};
    /* R4: a batch without records begins no transaction */
    bool begins_transaction = !marker && !entry->transaction && (batch->attributes & TRANSACTIONAL_BIT) &&
                              !(batch->attributes & CONTROL_BIT) && batch->record_count > 0;
    if (begins_transaction) {
        if (mqd_producers_begin_transaction(producers, index, base_offset) < 0) {
            if (created)
                erase(producers, index);
            return -1;
        }
        undo->change = MQD_TRANSACTION_BEGUN;
    } else if (marker && entry->transaction) {
        mqd_transactions_end(&producers->transactions, entry->transaction, base_offset);
        entry->transaction = 0;
        link_newest(producers, index);
        undo->change = MQD_TRANSACTION_ENDED;
    } else if (!entry->transaction && producers->newest != index + 1) {
        unlink_from_use_list(producers, entry);
        link_newest(producers, index);
    }
    note_batch(entry, batch, marker != NULL, base_offset);
    entry->last_append_ms = now_ms;
    if (marker)
        entry->coordinator_epoch = marker->coordinator_epoch;
    producers->change_count++;
    return 0;
}

void mqd_producers_undo(struct mqd_producers *producers, const struct mqd_producer_undo *undo)
{
    if (undo->index == MQD_PRODUCER_NONE)
        return;
    struct mqd_producer_state *entry = &producers->entries[undo->index];
    if (undo->change == MQD_TRANSACTION_BEGUN) {
        mqd_transactions_remove(&producers->transactions, entry->transaction);
        entry->transaction = 0;
        link_newest(producers, undo->index);
    } else if (undo->change == MQD_TRANSACTION_ENDED) {
        mqd_transactions_resume(&producers->transactions, undo->transaction);
        unlink_from_use_list(producers, entry);
        entry->transaction = undo->transaction;
    }
    if (undo->created) {
        erase(producers, undo->index);
        return;
    }
    entry->coordinator_epoch = undo->coordinator_epoch;
    entry->epoch = undo->epoch;
    entry->count = undo->count;
    entry->head = undo->head;
    entry->any_sequence = undo->any_sequence;
    entry->ended = undo->ended;
    entry->last_append_ms = undo->last_append_ms;
    entry->batches[undo->head] = undo->overwritten;
    producers->change_count++;
}

void mqd_producers_trim(struct mqd_producers *producers, uint32_t count_max)
{
    while (producers->count > count_max && producers->oldest)
        erase(producers, producers->oldest - 1);
}

void mqd_producers_expire(struct mqd_producers *producers, int64_t before_ms)
{
    while (producers->oldest && producers->entries[producers->oldest - 1].last_append_ms < before_ms)
        erase(producers, producers->oldest - 1);
}

static void view_one(const struct mqd_producers *producers, const struct mqd_producer_state *entry,
                     struct mqd_producer_view *out)
{
    *out = (struct mqd_producer_view){.producer_id = entry->producer_id,
                                      .last_timestamp_ms = entry->last_append_ms,
                                      .transaction_first_offset =
                                          mqd_transaction_first_offset(&producers->transactions, entry->transaction),
                                      .last_offset = -1,
                                      .last_sequence = -1,
                                      .coordinator_epoch = entry->coordinator_epoch,
                                      .producer_epoch = entry->epoch};
    if (entry->count == 0)
        return;
    const struct mqd_producer_batch *last = batch_at(entry, entry->count - 1u);
    out->last_sequence = last->last_sequence;
    out->last_offset =
        last->base_offset + (uint32_t)(((uint32_t)last->last_sequence - (uint32_t)last->first_sequence) & INT32_MAX);
}

uint32_t mqd_producers_view(const struct mqd_producers *producers, struct mqd_producer_view *out, uint32_t capacity)
{
    uint32_t count = 0;
    for (uint32_t bucket = 0; bucket < producers->capacity && count < capacity; bucket++)
        for (uint32_t link = producers->buckets[bucket]; link && count < capacity;
             link = producers->entries[link - 1].hash_next)
            view_one(producers, &producers->entries[link - 1], &out[count++]);
    return producers->count;
}
