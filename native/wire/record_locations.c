/* Positions of keys and values in stored batches. Used by a coordinator when it starts, to read a
 * whole partition quickly.
 *
 * Plain batches only: uncompressed, not transactional, not control. At any other batch the walk
 * stops, and its caller handles that batch. Every length is checked against the available bytes; a
 * wrong checksum also stops the walk.
 */
#include <string.h>

#include "base/error.h"
#include "base/varint.h"

enum { NOT_PLAIN_MASK = 7 | 1 << 4 | 1 << 5, CRC_END = 21 };

struct cursor {
    const uint8_t *at;
    const uint8_t *end;
};

/* Takes a key or value. Stores its position and size, and returns the position after it, or NULL if
 * it is truncated. */
static const uint8_t *take_blob(const uint8_t *at, const uint8_t *end, const uint8_t *data, uint32_t *position,
                                int32_t *size_bytes)
{
    int64_t size;
    at = mqd_varint_size(at, end, &size);
    if (!at)
        return NULL;
    *position = (uint32_t)(at - data);
    *size_bytes = (int32_t)size;
    return size > 0 ? at + size : at;
}

/* Locates the key and value of one record. Its headers are not parsed, because its length
 * determines where it ends. */
static bool locate_record(struct cursor *batch, const uint8_t *data, struct mqd_record_location *out)
{
    int64_t size, number;
    const uint8_t *at = mqd_varint(batch->at, batch->end, &size);
    if (!at || size < 1 || size > batch->end - at)
        return false;
    const uint8_t *end = at + size;
    batch->at = end;
    at = mqd_varlong(at + 1, end, &number); /* after the attributes: timestamp delta */
    at = at ? mqd_varint(at, end, &number) : NULL;
    at = at && number >= 0 ? take_blob(at, end, data, &out->key_position, &out->key_bytes) : NULL;
    return at && take_blob(at, end, data, &out->value_position, &out->value_bytes);
}

static enum mqd_walk_stop locate_batch(const uint8_t *data, const struct mqd_batch *batch, const uint8_t *bytes,
                                       struct mqd_record_location *out)
{
    if (mqd_crc32c(0, bytes + CRC_END, (uint64_t)batch->size_bytes - CRC_END) != batch->crc)
        return MQD_WALK_CORRUPT;
    if (batch->attributes & NOT_PLAIN_MASK)
        return MQD_WALK_OTHER;
    struct cursor cursor = {bytes + MQD_BATCH_HEADER_BYTES, bytes + batch->size_bytes};
    for (int32_t i = 0; i < batch->record_count; i++)
        if (!locate_record(&cursor, data, &out[i]))
            return MQD_WALK_CORRUPT;
    return cursor.at == cursor.end ? MQD_WALK_END : MQD_WALK_CORRUPT;
}

void mqd_records_locate(const uint8_t *data, uint64_t size_bytes, int64_t end_offset, struct mqd_record_walk *walk,
                        struct mqd_record_location *out, uint32_t capacity)
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
        enum mqd_walk_stop stop = locate_batch(data, &batch, bytes, out + walk->record_count);
        if (stop != MQD_WALK_END) {
            walk->stop = stop;
            return;
        }
        walk->record_count += (uint32_t)batch.record_count;
        walk->position += (uint64_t)batch.size_bytes;
        walk->next_offset = batch.base_offset + batch.last_offset_delta + 1;
    }
}
