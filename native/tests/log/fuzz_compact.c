/* fuzz: -max_len=600 */
/* Any bytes as the records of a stored batch. Records accepted by the walk must be re-encoded as
 * the same records, also with another base timestamp. */
#include <stdlib.h>
#include <string.h>

#include "wire/record_scan.h"

static void require(int condition)
{
    if (!condition)
        abort();
}

static void require_same(const struct mqd_record *a, const struct mqd_record *b)
{
    require(a->offset_delta == b->offset_delta && a->key_bytes == b->key_bytes && a->tombstone == b->tombstone);
    require(a->key_bytes <= 0 || memcmp(a->key, b->key, (size_t)a->key_bytes) == 0);
    size_t rest = (size_t)(a->bytes + a->size_bytes - a->offset_delta_at);
    require(rest == (size_t)(b->bytes + b->size_bytes - b->offset_delta_at) &&
            memcmp(a->offset_delta_at, b->offset_delta_at, rest) == 0);
}

/* One record alone, rebased, and read again. */
static void rebase(const struct mqd_batch *batch, const struct mqd_record *record, int64_t base_timestamp_ms)
{
    struct mqd_batch moved = *batch;
    struct mqd_records records;
    struct mqd_record again;
    uint8_t *out = malloc(record->size_bytes + MQD_RECORD_GROWTH_BYTES_MAX);
    uint32_t size_bytes = mqd_record_rebase(out, batch, record, base_timestamp_ms);
    require(size_bytes <= record->size_bytes + MQD_RECORD_GROWTH_BYTES_MAX);
    moved.base_timestamp_ms = base_timestamp_ms;
    moved.record_count = 1;
    mqd_records_begin(&records, &moved, out, size_bytes);
    require(mqd_records_next(&records, &again) == 1 && mqd_records_next(&records, &again) == 0);
    mqd_records_begin(&records, &moved, out, size_bytes);
    require(mqd_records_next(&records, &again) == 1);
    require_same(record, &again);
    require((uint64_t)again.timestamp_delta + (uint64_t)base_timestamp_ms ==
            (uint64_t)record->timestamp_delta + (uint64_t)batch->base_timestamp_ms);
    free(out);
}

/* A header with any name of one byte. */
static void find_header(const struct mqd_record *record, char name)
{
    const uint8_t *value, *end = record->bytes + record->size_bytes;
    int32_t value_bytes;
    if (mqd_record_header(record, &name, 1, &value, &value_bytes))
        require(value > record->headers && value <= end && value_bytes <= end - value);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    int64_t stamps[2];
    if (size < 18)
        return 0;
    struct mqd_batch batch = {.record_count = data[0],
                              .last_offset_delta = data[1],
                              .base_offset = 1000,
                              .producer_id = -1,
                              .producer_epoch = -1,
                              .base_sequence = -1};
    memcpy(stamps, data + 2, sizeof stamps);
    batch.base_timestamp_ms = stamps[0];
    size_t length = size - 18;
    uint8_t *bytes = malloc(length ? length : 1);
    memcpy(bytes, data + 18, length);
    struct mqd_records records;
    struct mqd_record record;
    int more, count = 0, last_delta = -1;
    mqd_records_begin(&records, &batch, bytes, length);
    while ((more = mqd_records_next(&records, &record)) == 1) {
        require(record.bytes >= bytes && record.bytes + record.size_bytes <= bytes + length &&
                record.offset_delta > last_delta && record.offset_delta <= batch.last_offset_delta);
        require(record.key_bytes < 0 ||
                (record.key >= record.bytes && record.key + record.key_bytes <= record.bytes + record.size_bytes));
        last_delta = record.offset_delta;
        count++;
        (void)mqd_record_timestamp_ms(&batch, &record);
        find_header(&record, (char)data[2]);
        rebase(&batch, &record, stamps[1]);
    }
    require(more < 0 ? records.reason != NULL : count == batch.record_count);
    if (more == 0) { /* a valid batch: its header too */
        uint8_t header[MQD_BATCH_HEADER_BYTES];
        struct mqd_batch again;
        mqd_batch_put_header(header, &batch, bytes, (uint32_t)length);
        uint8_t *whole = malloc(sizeof header + length);
        memcpy(whole, header, sizeof header);
        memcpy(whole + sizeof header, bytes, length);
        require(batch.record_count - 1 > batch.last_offset_delta ||
                mqd_batch_decode(whole, sizeof header + length, &again) == 0);
        if (batch.record_count - 1 <= batch.last_offset_delta)
            require(again.size_bytes == (int32_t)(sizeof header + length) &&
                    again.crc == mqd_crc32c(0, whole + 21, sizeof header + length - 21));
        free(whole);
    }
    free(bytes);
    return 0;
}
