/* The functions of wire/filter.h that Python calls. */
#ifndef MQD_WIRE_API_H
#define MQD_WIRE_API_H

/* MQD_CDEF_OFF */
#include "native.h"
/* MQD_CDEF_ON */

#define MQD_FILTER_NODES_MAX 64
#define MQD_FILTER_BYTES_MAX 16384
/* Whether the filter is valid. */
bool mqd_filter_check(const uint8_t *filter, uint32_t filter_bytes);
struct mqd_filtered {
    uint8_t *bytes; /* malloc'd: whole batches; NULL = none */
    uint64_t size_bytes, capacity_bytes;
    int64_t next_offset; /* every selected record below it is included */
    /* no record of the last batch that was read is selected; `empty` is a batch without records
     * that may take its place */
    bool has_empty;
    uint8_t empty[61];
};
void mqd_filtered_free(struct mqd_filtered *filtered);
/* Reads the whole batches in the size_bytes at `bytes` until the output has output_bytes_max, which
 * only its last batch may exceed; records below from_offset are never selected. Returns 0 or a
 * Kafka error code; the caller frees `out` in either case. May be called on any thread. */
int16_t mqd_filter_batches(const uint8_t *filter, uint32_t filter_bytes, const uint8_t *bytes, uint64_t size_bytes,
                           int64_t from_offset, uint64_t output_bytes_max, struct mqd_filtered *out);

#endif
