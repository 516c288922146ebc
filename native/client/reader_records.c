/* Decodes the records of a batch into columns: the hot loop of a local consumer. See
 * client/reader_state.h (S4) and wire/records.c for the format.
 *
 * Offset deltas must increase and stay within the batch (compaction leaves gaps). Header sections
 * are measured, not parsed.
 */
#include "client/reader_state.h"

#include "base/error.h"
#include "base/varint.h"
#include "wire/record_scan.h" /* attribute bits */

#define RECORD_BYTES_MIN 7 /* including its length: see wire/batch.c */

/* Fast path: sizes of up to 8 KiB and the deltas of most batches take one or two bytes. */
static inline const uint8_t *read_number(const uint8_t *at, const uint8_t *end, int64_t *out)
{
    if (end - at >= 2) {
        uint32_t low = at[0], high = at[1];
        if (low < 0x80) {
            *out = (int64_t)(low >> 1) ^ -(int64_t)(low & 1);
            return at + 1;
        }
        if (high < 0x80) {
            uint32_t value = (low & 0x7f) | high << 7;
            *out = (int64_t)(value >> 1) ^ -(int64_t)(value & 1);
            return at + 2;
        }
    }
    return mqd_varint(at, end, out);
}

static inline const uint8_t *read_blob(const uint8_t *at, const uint8_t *end, const uint8_t **bytes,
                                       int64_t *size_bytes)
{
    at = read_number(at, end, size_bytes);
    if (!at || *size_bytes < -1 || *size_bytes > end - at)
        return NULL;
    *bytes = at;
    return *size_bytes > 0 ? at + *size_bytes : at;
}

static int refuse(struct mqd_batch_walk *walk, const char *reason)
{
    walk->reason = reason;
    return -1;
}

void mqd_batch_walk_begin(struct mqd_batch_walk *walk, const struct mqd_batch *batch, const uint8_t *records,
                          uint64_t size_bytes)
{
    bool has_append_time = batch->attributes & MQD_ATTRIBUTE_LOG_APPEND_TIME;
    *walk = (struct mqd_batch_walk){.at = records,
                                    .end = records + size_bytes,
                                    .records_left = batch->record_count,
                                    .last_delta = batch->last_offset_delta,
                                    .base_offset = batch->base_offset,
                                    .base_timestamp_ms =
                                        has_append_time ? batch->max_timestamp_ms : batch->base_timestamp_ms,
                                    .has_append_time = has_append_time};
}

struct parsed_record {
    int64_t delta, timestamp_delta, key_bytes, value_bytes;
    const uint8_t *key, *value, *headers, *end;
};

static inline int parse_record(struct mqd_batch_walk *walk, struct parsed_record *out)
{
    int64_t size_bytes;
    const uint8_t *at = read_number(walk->at, walk->end, &size_bytes);
    if (!at || size_bytes < RECORD_BYTES_MIN - 1 || size_bytes > walk->end - at)
        return refuse(walk, "a record's length is impossible");
    const uint8_t *end = at + size_bytes;
    if (at[1] == 0) {
        out->timestamp_delta = 0;
        at += 2;
    } else if (!(at = mqd_varlong(at + 1, end, &out->timestamp_delta))) {
        return refuse(walk, "a record's timestamp is cut off");
    }
    at = read_number(at, end, &out->delta);
    if (!at || out->delta < walk->next_delta || out->delta > walk->last_delta)
        return refuse(walk, "a record's offset delta does not increase, or is beyond the batch");
    at = read_blob(at, end, &out->key, &out->key_bytes);
    if (!at)
        return refuse(walk, "a record's key is cut off or has an impossible length");
    at = read_blob(at, end, &out->value, &out->value_bytes);
    if (!at)
        return refuse(walk, "a record's value is cut off or has an impossible length");
    if (at == end)
        return refuse(walk, "a record ends before its headers");
    out->headers = at;
    out->end = end;
    return 0;
}

int mqd_batch_walk_fill(struct mqd_batch_walk *walk, int64_t from_offset, struct mqd_record_view *out)
{
    uint32_t count = out->count;
    const uint8_t *base = out->base;
    int result = 0;
    while (walk->records_left > 0 && count < out->capacity) {
        struct parsed_record record;
        if ((result = parse_record(walk, &record)) < 0)
            break;
        walk->at = record.end;
        walk->records_left--;
        walk->next_delta = record.delta + 1;
        int64_t offset = walk->base_offset + record.delta;
        if (offset < from_offset)
            continue;
        out->offsets[count] = offset;
        /* unsigned, so that it wraps: timestamps are untrusted and their sum may overflow */
        out->timestamps_ms[count] = (int64_t)((uint64_t)walk->base_timestamp_ms +
                                              (walk->has_append_time ? 0 : (uint64_t)record.timestamp_delta));
        out->key_positions[count] = (uint64_t)(record.key - base);
        out->key_bytes[count] = (int32_t)record.key_bytes;
        out->value_positions[count] = (uint64_t)(record.value - base);
        out->value_bytes[count] = (int32_t)record.value_bytes;
        out->header_positions[count] = (uint64_t)(record.headers - base);
        out->header_bytes[count] = (int32_t)(record.end - record.headers);
        count++;
    }
    out->count = count;
    if (result == 0 && walk->records_left == 0 && walk->at != walk->end)
        return refuse(walk, "bytes follow the last record");
    return result;
}

int mqd_segment_records(const uint8_t *header, const uint8_t *records, uint64_t records_bytes, int64_t from_offset,
                        struct mqd_record_view *out)
{
    struct mqd_batch batch;
    struct mqd_batch_walk walk;
    if (mqd_batch_decode(header, MQD_BATCH_HEADER_BYTES, &batch) < 0)
        return -1;
    out->base = records;
    out->base_bytes = records_bytes;
    out->count = 0;
    out->leader_epoch = batch.partition_leader_epoch;
    out->timestamp_type = batch.attributes & MQD_ATTRIBUTE_LOG_APPEND_TIME ? 1 : 0;
    mqd_batch_walk_begin(&walk, &batch, records, records_bytes);
    if (mqd_batch_walk_fill(&walk, from_offset, out) < 0)
        return mqd_error_set(MQD_E_CORRUPT, "batch at offset %lld: %s", (long long)batch.base_offset, walk.reason);
    return 0;
}
