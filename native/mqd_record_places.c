/* Where keys and values lie in stored batches: for a coordinator that reads a whole partition when it starts, a million records in a moment.
 *
 * Plain batches alone: uncompressed, of no transaction, not control. At any other the walk stops, and its caller looks at that batch itself. Every length is
 * checked against what is there; a checksum that does not match stops the walk too.
 */
#define _GNU_SOURCE
#include <string.h>

#include "mqd_error.h"

enum { PLAIN_MASK = 7 | 1 << 4 | 1 << 5, CRC_END = 21 };

struct cursor {
    const uint8_t *at;
    const uint8_t *end;
};

/* A zigzag varint of at most 32 bits; INT64_MIN when it is cut off or longer. */
static int64_t take_varint(struct cursor *c)
{
    uint64_t value = 0;
    for (unsigned shift = 0; shift < 35 && c->at < c->end; shift += 7) {
        uint8_t byte = *c->at++;
        value |= (uint64_t)(byte & 0x7f) << shift;
        if (byte < 0x80)
            return (int64_t)(value >> 1) ^ -(int64_t)(value & 1);
    }
    return INT64_MIN;
}

static bool skip_varlong(struct cursor *c)
{
    for (int i = 0; i < 10 && c->at < c->end; i++)
        if (*c->at++ < 0x80)
            return true;
    return false;
}

static bool take_blob(struct cursor *c, const uint8_t *data, uint32_t *position, int32_t *size_bytes)
{
    int64_t size = take_varint(c);
    if (size < -1 || size > c->end - c->at)
        return false;
    *position = (uint32_t)(c->at - data);
    *size_bytes = (int32_t)size;
    c->at += size > 0 ? size : 0;
    return true;
}

/* One record; headers are passed over with what is left of its bytes. */
static bool place_record(struct cursor *batch, const uint8_t *data, struct mqd_record_place *out)
{
    int64_t size = take_varint(batch);
    if (size < 1 || size > batch->end - batch->at)
        return false;
    struct cursor record = {batch->at + 1, batch->at + size}; /* attributes */
    batch->at += size;
    return skip_varlong(&record) && take_varint(&record) >= 0 && take_blob(&record, data, &out->key_position, &out->key_bytes) &&
           take_blob(&record, data, &out->value_position, &out->value_bytes);
}

static enum mqd_walk_stop place_batch(const uint8_t *data, const struct mqd_batch *batch, const uint8_t *bytes, struct mqd_record_place *out)
{
    if (mqd_crc32c(0, bytes + CRC_END, (uint64_t)batch->size_bytes - CRC_END) != batch->crc)
        return MQD_WALK_CORRUPT;
    if (batch->attributes & PLAIN_MASK)
        return MQD_WALK_OTHER;
    struct cursor cursor = {bytes + MQD_BATCH_HEADER_BYTES, bytes + batch->size_bytes};
    for (int32_t i = 0; i < batch->record_count; i++)
        if (!place_record(&cursor, data, &out[i]))
            return MQD_WALK_CORRUPT;
    return cursor.at == cursor.end ? MQD_WALK_END : MQD_WALK_CORRUPT;
}

void mqd_records_place(const uint8_t *data, uint64_t size_bytes, int64_t end_offset, struct mqd_record_walk *walk, struct mqd_record_place *out, uint32_t capacity)
{
    walk->record_count = 0;
    walk->stop = MQD_WALK_END;
    while (walk->position <= size_bytes && size_bytes - walk->position >= MQD_BATCH_HEADER_BYTES) {
        struct mqd_batch batch;
        const uint8_t *bytes = data + walk->position;
        if (mqd_batch_decode(bytes, size_bytes - walk->position, &batch) < 0 || batch.base_offset < walk->next_offset) {
            walk->stop = MQD_WALK_CORRUPT;
            return;
        }
        if (batch.base_offset >= end_offset) {
            walk->stop = MQD_WALK_END_OFFSET;
            return;
        }
        if ((uint64_t)batch.size_bytes > size_bytes - walk->position)
            return;
        if ((uint32_t)batch.record_count > capacity - walk->record_count) {
            walk->stop = (uint32_t)batch.record_count > capacity ? MQD_WALK_OTHER : MQD_WALK_FULL;
            return;
        }
        enum mqd_walk_stop stop = place_batch(data, &batch, bytes, out + walk->record_count);
        if (stop != MQD_WALK_END) {
            walk->stop = stop;
            return;
        }
        walk->record_count += (uint32_t)batch.record_count;
        walk->position += (uint64_t)batch.size_bytes;
        walk->next_offset = batch.base_offset + batch.last_offset_delta + 1;
    }
}
