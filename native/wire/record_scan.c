/* See wire/record_scan.h. */
#include "wire/record_scan.h"

#include <string.h>

#include "base/big_endian.h"
#include "base/varint.h"

#define RECORD_BYTES_MIN 7 /* including its length: see wire/batch.c */
#define CRC_FROM 21

static uint32_t put_varlong(uint8_t *out, int64_t number)
{
    uint64_t value = (uint64_t)number << 1 ^ (uint64_t)(number >> 63);
    uint32_t count = 0;
    for (; value > 0x7f; value >>= 7)
        out[count++] = (uint8_t)(value | 0x80);
    out[count++] = (uint8_t)value;
    return count;
}

void mqd_records_begin(struct mqd_records *records, const struct mqd_batch *batch, const uint8_t *bytes,
                       uint64_t size_bytes)
{
    *records = (struct mqd_records){.at = bytes,
                                    .end = bytes + size_bytes,
                                    .remaining_count = batch->record_count,
                                    .last_delta = batch->last_offset_delta};
}

static int refuse(struct mqd_records *records, const char *reason)
{
    records->reason = reason;
    return -1;
}

int mqd_records_next(struct mqd_records *records, struct mqd_record *out)
{
    int64_t number;
    if (records->remaining_count == 0)
        return records->at == records->end ? 0 : refuse(records, "bytes follow the last record");
    const uint8_t *body = mqd_varint(records->at, records->end, &number);
    if (!body || number < RECORD_BYTES_MIN - 1 || number > records->end - body)
        return refuse(records, "a record's length is impossible");
    const uint8_t *end = body + number, *at = mqd_varlong(body + 1, end, &out->timestamp_delta);
    out->offset_delta_at = at;
    if (!at)
        return refuse(records, "a record's timestamp is cut off");
    at = mqd_varint(at, end, &number);
    if (!at || number < records->next_delta || number > records->last_delta)
        return refuse(records, "a record's offset delta does not increase, or is beyond the batch");
    out->offset_delta = (int32_t)number;
    records->next_delta = number == INT32_MAX ? INT32_MAX : (int32_t)number + 1;
    at = mqd_varint_size(at, end, &number);
    if (!at)
        return refuse(records, "a record's key is cut off or has an impossible length");
    out->key_bytes = (int32_t)number;
    out->key = at;
    at = mqd_varint_size(number > 0 ? at + number : at, end, &number);
    if (!at)
        return refuse(records, "a record's value is cut off or has an impossible length");
    out->headers = number > 0 ? at + number : at;
    if (out->headers == end)
        return refuse(records, "a record ends before its headers");
    out->tombstone = number < 0;
    out->body = body;
    out->bytes = records->at;
    out->size_bytes = (uint32_t)(end - records->at);
    records->at = end;
    records->remaining_count--;
    return 1;
}

bool mqd_record_header(const struct mqd_record *record, const char *name, uint32_t name_bytes, const uint8_t **value,
                       int32_t *value_bytes)
{
    const uint8_t *end = record->bytes + record->size_bytes;
    int64_t count, size_bytes;
    bool found = false;
    const uint8_t *at = mqd_varint(record->headers, end, &count);
    for (; at && count > 0; count--) {
        const uint8_t *key = mqd_varint_size(at, end, &size_bytes);
        if (!key || size_bytes < 0)
            return false;
        bool is_match = (uint64_t)size_bytes == name_bytes && memcmp(key, name, name_bytes) == 0;
        at = mqd_varint_size(key + size_bytes, end, &size_bytes);
        if (!at)
            return false;
        if (is_match) {
            found = true;
            *value = at;
            *value_bytes = (int32_t)size_bytes;
        }
        at += size_bytes > 0 ? size_bytes : 0;
    }
    return found && at;
}

int64_t mqd_record_timestamp_ms(const struct mqd_batch *batch, const struct mqd_record *record)
{
    int64_t timestamp_ms;
    if (__builtin_add_overflow(batch->base_timestamp_ms, record->timestamp_delta, &timestamp_ms))
        return record->timestamp_delta < 0 ? INT64_MIN : INT64_MAX;
    return timestamp_ms;
}

uint32_t mqd_record_rebase(uint8_t *out, const struct mqd_batch *batch, const struct mqd_record *record,
                           int64_t base_timestamp_ms)
{
    uint8_t delta[10];
    /* Modulo 2^64 on purpose: adding it to the new base gives the same timestamp as before. */
    uint32_t delta_bytes =
        put_varlong(delta, (int64_t)((uint64_t)batch->base_timestamp_ms + (uint64_t)record->timestamp_delta -
                                     (uint64_t)base_timestamp_ms));
    uint32_t rest_bytes = (uint32_t)(record->bytes + record->size_bytes - record->offset_delta_at);
    uint32_t at = put_varlong(out, 1 + (int64_t)delta_bytes + rest_bytes);
    out[at++] = record->body[0];
    memcpy(out + at, delta, delta_bytes);
    memcpy(out + at + delta_bytes, record->offset_delta_at, rest_bytes);
    return at + delta_bytes + rest_bytes;
}

void mqd_batch_put_header(uint8_t *out, const struct mqd_batch *batch, const uint8_t *records, uint32_t records_bytes)
{
    mqd_put_be64(out, (uint64_t)batch->base_offset);
    mqd_put_be32(out + 8, MQD_BATCH_HEADER_BYTES - 12 + records_bytes);
    mqd_put_be32(out + 12, (uint32_t)batch->partition_leader_epoch);
    out[16] = 2;
    mqd_put_be16(out + 21, (uint16_t)batch->attributes);
    mqd_put_be32(out + 23, (uint32_t)batch->last_offset_delta);
    mqd_put_be64(out + 27, (uint64_t)batch->base_timestamp_ms);
    mqd_put_be64(out + 35, (uint64_t)batch->max_timestamp_ms);
    mqd_put_be64(out + 43, (uint64_t)batch->producer_id);
    mqd_put_be16(out + 51, (uint16_t)batch->producer_epoch);
    mqd_put_be32(out + 53, (uint32_t)batch->base_sequence);
    mqd_put_be32(out + 57, (uint32_t)batch->record_count);
    mqd_put_be32(out + 17,
                 mqd_crc32c(mqd_crc32c(0, out + CRC_FROM, MQD_BATCH_HEADER_BYTES - CRC_FROM), records, records_bytes));
}
