/* Filters the batches that a consumer of a view gets. See wire/filter.h. */
#include <stdlib.h>
#include <string.h>

#include "codec/codec.h"
#include "wire/filter.h"
#include "wire/kafka_errors.h"

#define OUTPUT_BYTES_MIN 4096
#define NO_MEMORY MQD_KAFKA_STORAGE_ERROR

/* The arguments of a call of mqd_filter_append. */
struct arguments {
    const uint8_t *filter;
    uint32_t filter_bytes;
    int64_t from_offset;
    struct mqd_filtered *out;
};

static bool reserve(struct mqd_filtered *out, uint64_t size_bytes)
{
    uint64_t needed = out->size_bytes + size_bytes, capacity = out->capacity_bytes;
    if (needed <= capacity)
        return true;
    capacity = capacity * 2 > needed ? capacity * 2 : needed;
    capacity = capacity > OUTPUT_BYTES_MIN ? capacity : OUTPUT_BYTES_MIN;
    uint8_t *grown = realloc(out->bytes, capacity);
    if (!grown)
        return false;
    out->bytes = grown;
    out->capacity_bytes = capacity;
    return true;
}

static bool append(struct mqd_filtered *out, const uint8_t *bytes, uint64_t size_bytes)
{
    if (!reserve(out, size_bytes))
        return false;
    memcpy(out->bytes + out->size_bytes, bytes, size_bytes);
    out->size_bytes += size_bytes;
    return true;
}

/* Appends space for the header, then the selected records. Returns their count; or -1 if the
 * records cannot be parsed, or if there is no memory (*no_memory is then set). */
static int64_t select_records(struct arguments *arguments, struct mqd_batch *batch, const uint8_t *bytes,
                              uint64_t size_bytes, bool *no_memory)
{
    struct mqd_records records;
    struct mqd_record record;
    int64_t count = 0, max_timestamp_ms = -1;
    int result;
    mqd_records_begin(&records, batch, bytes, size_bytes);
    while ((result = mqd_records_next(&records, &record)) == 1) {
        if (batch->base_offset + record.offset_delta < arguments->from_offset ||
            !mqd_filter_match(arguments->filter, arguments->filter_bytes, &record))
            continue;
        if (count++ == 0 && !(*no_memory = !reserve(arguments->out, MQD_BATCH_HEADER_BYTES)))
            arguments->out->size_bytes += MQD_BATCH_HEADER_BYTES;
        if (*no_memory || (*no_memory = !append(arguments->out, record.bytes, record.size_bytes)))
            return -1;
        int64_t timestamp_ms = mqd_record_timestamp_ms(batch, &record);
        max_timestamp_ms = timestamp_ms > max_timestamp_ms ? timestamp_ms : max_timestamp_ms;
    }
    if (!(batch->attributes & MQD_ATTRIBUTE_LOG_APPEND_TIME))
        batch->max_timestamp_ms = max_timestamp_ms;
    return result < 0 ? -1 : count;
}

/* Appends a batch with the selected records, or nothing if there are none. Returns 0 or an error
 * code. */
static int16_t filter_batch(struct arguments *arguments, const uint8_t *bytes, const struct mqd_batch *batch)
{
    struct mqd_filtered *out = arguments->out;
    uint64_t begin = out->size_bytes;
    const uint8_t *records = bytes + MQD_BATCH_HEADER_BYTES;
    int64_t size_bytes = batch->size_bytes - MQD_BATCH_HEADER_BYTES;
    uint8_t codec = batch->attributes & MQD_ATTRIBUTE_COMPRESSION;
    const char *reason;
    bool no_memory = false;
    if (batch->attributes & MQD_ATTRIBUTE_CONTROL)
        return append(out, bytes, (uint64_t)batch->size_bytes) ? 0 : NO_MEMORY;
    if (codec && !mqd_codec_available(codec))
        return MQD_KAFKA_UNSUPPORTED_COMPRESSION_TYPE;
    if (codec)
        size_bytes = mqd_decompress(codec, records, (size_t)size_bytes, MQD_RECORDS_BYTES_MAX, &records, &reason);
    if (size_bytes < 0)
        return size_bytes == MQD_CODEC_NO_MEMORY ? NO_MEMORY : MQD_KAFKA_CORRUPT_MESSAGE;
    struct mqd_batch header = *batch;
    int64_t count = select_records(arguments, &header, records, (uint64_t)size_bytes, &no_memory);
    if (count < 0)
        return no_memory ? NO_MEMORY : MQD_KAFKA_CORRUPT_MESSAGE;
    if (count == 0)
        return 0;
    if (count == batch->record_count) {
        out->size_bytes = begin;
        return append(out, bytes, (uint64_t)batch->size_bytes) ? 0 : NO_MEMORY;
    }
    header.record_count = (int32_t)count;
    header.attributes &= (int16_t)~MQD_ATTRIBUTE_COMPRESSION;
    mqd_batch_put_header(out->bytes + begin, &header, out->bytes + begin + MQD_BATCH_HEADER_BYTES,
                         (uint32_t)(out->size_bytes - begin - MQD_BATCH_HEADER_BYTES));
    return 0;
}

/* Writes to out->empty a batch without records, which may replace `batch`: none of its records is
 * selected. */
static void put_empty(struct mqd_filtered *out, const struct mqd_batch *batch)
{
    struct mqd_batch header = *batch;
    header.record_count = 0;
    header.attributes &= (int16_t)~MQD_ATTRIBUTE_COMPRESSION;
    if (!(header.attributes & MQD_ATTRIBUTE_LOG_APPEND_TIME))
        header.max_timestamp_ms = -1;
    mqd_batch_put_header(out->empty, &header, NULL, 0);
    out->has_empty = true;
}

void mqd_filtered_free(struct mqd_filtered *filtered)
{
    free(filtered->bytes);
    *filtered = (struct mqd_filtered){0};
}

int16_t mqd_filter_append(const uint8_t *filter, uint32_t filter_bytes, const uint8_t *bytes, uint64_t size_bytes,
                          int64_t from_offset, uint64_t output_bytes_max, struct mqd_filtered *out,
                          uint64_t *consumed_bytes)
{
    struct arguments arguments = {filter, filter_bytes, from_offset, out};
    struct mqd_batch batch;
    uint64_t at = 0, begin_bytes = out->size_bytes;
    int16_t error = 0;
    while (at < size_bytes && (out->size_bytes == begin_bytes || out->size_bytes - begin_bytes < output_bytes_max)) {
        uint64_t old_bytes = out->size_bytes;
        if (size_bytes - at < MQD_BATCH_HEADER_BYTES || mqd_batch_decode(bytes + at, size_bytes - at, &batch) < 0 ||
            (uint64_t)batch.size_bytes > size_bytes - at) {
            error = MQD_KAFKA_CORRUPT_MESSAGE;
            break;
        }
        int64_t next_offset = batch.base_offset + batch.last_offset_delta + 1;
        if (next_offset > from_offset) {
            error = filter_batch(&arguments, bytes + at, &batch);
            if (error) {
                out->size_bytes = old_bytes; /* drops the records of this batch that were already selected */
                break;
            }
            out->next_offset = next_offset;
            out->has_empty = false;
            if (out->size_bytes == old_bytes)
                put_empty(out, &batch);
        }
        at += (uint64_t)batch.size_bytes;
    }
    *consumed_bytes = at;
    return error;
}

int16_t mqd_filter_batches(const uint8_t *filter, uint32_t filter_bytes, const uint8_t *bytes, uint64_t size_bytes,
                           int64_t from_offset, uint64_t output_bytes_max, struct mqd_filtered *out)
{
    uint64_t consumed_bytes;
    *out = (struct mqd_filtered){.next_offset = from_offset};
    return mqd_filter_append(filter, filter_bytes, bytes, size_bytes, from_offset, output_bytes_max, out,
                             &consumed_bytes);
}
