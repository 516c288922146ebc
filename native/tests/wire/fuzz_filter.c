/* fuzz: -max_len=900 */
/* Filters and batches of any bytes: a filter that is accepted reads nothing beyond its end, and what it selects are
 * whole batches of the same offsets. The first byte is the filter's size. */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "wire/filter.h"

static void require(int condition)
{
    if (!condition)
        abort();
}

/* A copy of exactly these bytes, so that overruns are found. */
static uint8_t *copy_of(const uint8_t *data, size_t size)
{
    uint8_t *copy = malloc(size ? size : 1);
    memcpy(copy, data, size);
    return copy;
}

static void walk(const struct mqd_filtered *found, int64_t from_offset)
{
    struct mqd_batch batch;
    uint64_t at = 0;
    for (; at < found->size_bytes; at += (uint64_t)batch.size_bytes) {
        require(mqd_batch_decode(found->bytes + at, found->size_bytes - at, &batch) == 0);
        require(batch.base_offset + batch.last_offset_delta >= from_offset);
    }
    require(at == found->size_bytes);
    require(!found->has_empty ||
            (mqd_batch_decode(found->empty, sizeof found->empty, &batch) == 0 &&
             batch.base_offset + batch.last_offset_delta + 1 == found->next_offset && batch.record_count == 0));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2 || size - 2 < data[0])
        return 0;
    uint32_t filter_bytes = data[0];
    int64_t from_offset = data[1];
    uint8_t *filter = copy_of(data + 2, filter_bytes);
    if (mqd_filter_check(filter, filter_bytes)) {
        size_t rest = size - 2 - filter_bytes;
        uint8_t *batches = copy_of(data + 2 + filter_bytes, rest);
        struct mqd_filtered found;
        mqd_filter_batches(filter, filter_bytes, batches, rest, from_offset, 1 << 16, &found);
        walk(&found, from_offset);
        mqd_filtered_free(&found);
        /* the same bytes as the records of one batch */
        struct mqd_batch batch = {.base_offset = 1, .record_count = from_offset % 8 + 1, .last_offset_delta = 9};
        uint8_t *sealed = malloc(MQD_BATCH_HEADER_BYTES + rest);
        memcpy(sealed + MQD_BATCH_HEADER_BYTES, batches, rest);
        mqd_batch_put_header(sealed, &batch, sealed + MQD_BATCH_HEADER_BYTES, (uint32_t)rest);
        int16_t error =
            mqd_filter_batches(filter, filter_bytes, sealed, MQD_BATCH_HEADER_BYTES + rest, 0, 1 << 16, &found);
        if (!error)
            walk(&found, 0);
        mqd_filtered_free(&found);
        free(sealed);
        free(batches);
    }
    free(filter);
    return 0;
}
