/* Encodes and decodes producer snapshots; their format is in log/producers.h. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/big_endian.h"
#include "base/error.h"
#include "log/producers.h"

#define MAGIC 0x4d514450u
#define VERSION 2
#define HEADER_BYTES 24
#define PRODUCER_BYTES 32
#define PRODUCER_BYTES_VERSION_1 24
#define BATCH_BYTES 16
#define FLAG_ANY_SEQUENCE 1
#define FLAG_ENDED 2

static uint8_t *encode_producer(uint8_t *at, const struct mqd_producers *producers,
                                const struct mqd_producer_state *entry)
{
    at = mqd_put_be64(at, (uint64_t)entry->producer_id);
    at = mqd_put_be64(at, (uint64_t)entry->last_append_ms);
    at = mqd_put_be16(at, (uint16_t)entry->epoch);
    *at++ = entry->count;
    *at++ = (uint8_t)((entry->any_sequence ? FLAG_ANY_SEQUENCE : 0) | (entry->ended ? FLAG_ENDED : 0));
    at = mqd_put_be32(at, (uint32_t)entry->coordinator_epoch);
    at = mqd_put_be64(at, (uint64_t)mqd_transaction_first_offset(&producers->transactions, entry->transaction));
    for (uint32_t i = 0; i < entry->count; i++) {
        const struct mqd_producer_batch *batch =
            &entry->batches[(entry->head + MQD_PRODUCER_BATCH_COUNT - entry->count + i) % MQD_PRODUCER_BATCH_COUNT];
        at = mqd_put_be32(at, (uint32_t)batch->first_sequence);
        at = mqd_put_be32(at, (uint32_t)batch->last_sequence);
        at = mqd_put_be64(at, (uint64_t)batch->base_offset);
    }
    return at;
}

uint8_t *mqd_producers_encode(const struct mqd_producers *producers, int64_t offset, size_t *size_bytes)
{
    size_t capacity =
        HEADER_BYTES + producers->count * (size_t)(PRODUCER_BYTES + MQD_PRODUCER_BATCH_COUNT * BATCH_BYTES);
    uint8_t *bytes = malloc(capacity);
    if (!bytes) {
        mqd_error_set(ENOMEM, "out of memory for a snapshot of %u producers", producers->count);
        return NULL;
    }
    uint8_t *at = mqd_put_be32(bytes, MAGIC);
    at = mqd_put_be16(at, VERSION);
    at = mqd_put_be16(at, 0);
    at = mqd_put_be32(at, 0);
    at = mqd_put_be32(at, producers->count);
    at = mqd_put_be64(at, (uint64_t)offset);
    for (uint32_t link = producers->oldest; link; link = producers->entries[link - 1].newer)
        at = encode_producer(at, producers, &producers->entries[link - 1]);
    const struct mqd_transactions *transactions = &producers->transactions;
    for (uint32_t link = transactions->oldest; link; link = transactions->entries[link - 1].newer)
        if (transactions->entries[link - 1].last_offset < 0)
            at = encode_producer(
                at, producers,
                &producers->entries[mqd_producers_find(producers, transactions->entries[link - 1].producer_id)]);
    *size_bytes = (size_t)(at - bytes);
    mqd_put_be32(bytes + 8, mqd_crc32c(0, bytes + 12, *size_bytes - 12));
    return bytes;
}

static const uint8_t *decode_producer(struct mqd_producers *producers, const uint8_t *at, const uint8_t *end,
                                      int version, bool *no_memory)
{
    const int producer_bytes = version == 1 ? PRODUCER_BYTES_VERSION_1 : PRODUCER_BYTES;
    if (end - at < producer_bytes || at[18] > MQD_PRODUCER_BATCH_COUNT ||
        end - at < producer_bytes + at[18] * BATCH_BYTES)
        return NULL;
    int64_t producer_id = (int64_t)mqd_get_be64(at);
    if (producer_id < 0 || mqd_producers_find(producers, producer_id) != MQD_PRODUCER_NONE)
        return NULL;
    uint32_t index = mqd_producers_insert(producers, producer_id);
    if (index == MQD_PRODUCER_NONE) {
        *no_memory = true;
        return NULL;
    }
    struct mqd_producer_state *entry = &producers->entries[index];
    entry->last_append_ms = (int64_t)mqd_get_be64(at + 8);
    entry->epoch = (int16_t)(at[16] << 8 | at[17]);
    entry->count = at[18];
    entry->head = entry->count % MQD_PRODUCER_BATCH_COUNT & 15;
    entry->any_sequence = version == 1 ? entry->count == 0 : (at[19] & FLAG_ANY_SEQUENCE) != 0;
    entry->ended = version > 1 && (at[19] & FLAG_ENDED) && entry->count;
    entry->coordinator_epoch = version == 1 ? -1 : (int32_t)mqd_get_be32(at + 20);
    int64_t first_offset = version == 1 ? -1 : (int64_t)mqd_get_be64(at + PRODUCER_BYTES_VERSION_1);
    if (first_offset >= 0 && mqd_producers_begin_transaction(producers, index, first_offset) < 0) {
        *no_memory = true;
        return NULL;
    }
    at += producer_bytes;
    for (uint32_t i = 0; i < entry->count; i++, at += BATCH_BYTES)
        entry->batches[i] = (struct mqd_producer_batch){(int32_t)mqd_get_be32(at), (int32_t)mqd_get_be32(at + 4),
                                                        (int64_t)mqd_get_be64(at + 8)};
    return at;
}

int mqd_producers_decode(struct mqd_producers *producers, const uint8_t *bytes, size_t size_bytes, int64_t *offset)
{
    int version = size_bytes < HEADER_BYTES || mqd_get_be32(bytes) != MAGIC ? 0 : bytes[4] << 8 | bytes[5];
    if (version < 1 || version > VERSION)
        return mqd_error_set(MQD_E_CORRUPT, "not a producer snapshot of version 1 to %d", VERSION);
    if (mqd_get_be32(bytes + 8) != mqd_crc32c(0, bytes + 12, size_bytes - 12))
        return mqd_error_set(MQD_E_CORRUPT, "the checksum of a producer snapshot is wrong");
    const uint8_t *at = bytes + HEADER_BYTES, *end = bytes + size_bytes;
    uint32_t count = mqd_get_be32(bytes + 12);
    *offset = (int64_t)mqd_get_be64(bytes + 16);
    bool no_memory = false;
    for (uint32_t i = 0; i < count && at; i++)
        at = decode_producer(producers, at, end, version, &no_memory);
    if (at == end)
        return 0;
    mqd_producers_free(producers);
    if (no_memory)
        return mqd_error_set(ENOMEM, "out of memory for the %u producers of a snapshot", count);
    return mqd_error_set(MQD_E_CORRUPT, "a producer snapshot does not hold the %u producers that its header announces",
                         count);
}
