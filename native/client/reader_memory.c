/* Record batches in memory as the source of a reader: the contents of a Fetch response. Declared in
 * client/columns.h. */
#include <errno.h>
#include <stdlib.h>

#include "base/error.h"
#include "client/columns.h"
#include "client/reader_state.h"

struct memory_source {
    const uint8_t *bytes;
    uint64_t size_bytes;
};

int64_t mqd_batches_extent(const uint8_t *bytes, uint64_t size_bytes, int64_t *next_offset)
{
    uint64_t at = 0;
    struct mqd_batch batch;
    while (size_bytes - at >= MQD_BATCH_HEADER_BYTES) {
        if (mqd_batch_decode(bytes + at, size_bytes - at, &batch) < 0)
            return mqd_error_wrap("batch at byte %llu of the response", (unsigned long long)at);
        if ((uint64_t)batch.size_bytes > size_bytes - at)
            break;
        at += (uint64_t)batch.size_bytes;
        *next_offset = batch.base_offset + batch.last_offset_delta + 1;
    }
    return (int64_t)at;
}

static int memory_locate(void *context, const struct mqd_local_query *query, struct mqd_segment_mapping *current,
                         struct mqd_local_segment *response, struct mqd_segment_mapping **mapping)
{
    const struct memory_source *memory = context;
    (void)current;
    *response = (struct mqd_local_segment){.kind = query->kind,
                                           .number = query->number,
                                           .next_base_offset = INT64_MAX,
                                           .size_bytes = (uint32_t)memory->size_bytes,
                                           .map_bytes = memory->size_bytes ? (uint32_t)memory->size_bytes : 1};
    *mapping = mqd_mapping_of_borrowed(memory->bytes, response->map_bytes);
    return *mapping ? 0 : -1;
}

struct mqd_segment_reader *mqd_segment_reader_open_memory(const uint8_t *bytes, uint64_t size_bytes, int64_t offset,
                                                          int8_t isolation_level)
{
    static const uint8_t no_topic[16];
    struct memory_source *memory = size_bytes <= INT32_MAX ? malloc(sizeof *memory) : NULL;
    if (!memory) {
        if (size_bytes > INT32_MAX)
            mqd_error_set(MQD_E_INVALID, "%llu bytes of record batches; one reader takes at most 2^31 - 1",
                          (unsigned long long)size_bytes);
        else
            mqd_error_set_static(ENOMEM, "out of memory for a reader");
        return NULL;
    }
    *memory = (struct memory_source){bytes, size_bytes};
    struct mqd_segment_source source = {.context = memory, .locate = memory_locate, .close = free};
    return mqd_segment_reader_new(&source, no_topic, -1, offset, isolation_level);
}
