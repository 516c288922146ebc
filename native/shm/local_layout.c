/* The hash by which a local client and its broker verify that they use the same layout. Layout:
 * shm/local_layout.h. */
#include "shm/local_layout.h"

#include <stddef.h>

#include "native.h"

#define FIELD(type, name) offsetof(struct type, name), sizeof(((struct type *)0)->name)

/* FNV-1a over the offset and size of every shared field, over the constants that determine their
 * meaning, and over the control segment's own hash, because the client reads that segment too. */
uint64_t mqd_local_abi_hash(void)
{
    const uint64_t numbers[] = {
        mqd_abi_hash(),
        MQD_LOCAL_LAYOUT_VERSION,
        MQD_LOCAL_SUBMISSION_COUNT_MAX,
        MQD_LOCAL_DATA_BYTES_MIN,
        MQD_LOCAL_DATA_BYTES_MAX,
        MQD_LOCAL_REPLY_BYTES_MIN,
        MQD_LOCAL_REPLY_BYTES_MAX,
        MQD_LOCAL_FD_COUNT,
        FIELD(mqd_local_header, magic),
        FIELD(mqd_local_header, layout_version),
        FIELD(mqd_local_header, worker),
        FIELD(mqd_local_header, abi_hash),
        FIELD(mqd_local_header, total_bytes),
        FIELD(mqd_local_header, submissions_offset),
        FIELD(mqd_local_header, replies_offset),
        FIELD(mqd_local_header, data_offset),
        FIELD(mqd_local_header, data_bytes),
        FIELD(mqd_local_header, submission_count),
        FIELD(mqd_local_header, reply_bytes),
        FIELD(mqd_local_header, request_bytes_max),
        FIELD(mqd_local_header, submission_tail),
        FIELD(mqd_local_header, reply_head),
        FIELD(mqd_local_header, client_sleeping),
        FIELD(mqd_local_header, submission_head),
        FIELD(mqd_local_header, reply_tail),
        FIELD(mqd_local_header, worker_needs_room),
        sizeof(struct mqd_local_header),
        FIELD(mqd_local_submission, offset),
        FIELD(mqd_local_submission, size_bytes),
        FIELD(mqd_local_submission, reserved),
        sizeof(struct mqd_local_submission),
        FIELD(mqd_local_hello, magic),
        FIELD(mqd_local_hello, layout_version),
        FIELD(mqd_local_hello, submission_count),
        FIELD(mqd_local_hello, abi_hash),
        FIELD(mqd_local_hello, data_bytes),
        FIELD(mqd_local_hello, reply_bytes),
        FIELD(mqd_local_hello, reserved),
        FIELD(mqd_local_hello, client_id),
        FIELD(mqd_local_hello, server),
        FIELD(mqd_local_welcome, magic),
        FIELD(mqd_local_welcome, total_bytes),
        FIELD(mqd_local_welcome, worker),
        FIELD(mqd_local_welcome, error),
        FIELD(mqd_local_welcome, reason),
        MQD_LOCAL_QUERY_SEGMENT,
        FIELD(mqd_local_query, kind),
        FIELD(mqd_local_query, number),
        FIELD(mqd_local_query, topic_id),
        FIELD(mqd_local_query, partition_index),
        FIELD(mqd_local_query, reserved),
        FIELD(mqd_local_query, offset),
        FIELD(mqd_local_segment, kind),
        FIELD(mqd_local_segment, number),
        FIELD(mqd_local_segment, error),
        FIELD(mqd_local_segment, slot),
        FIELD(mqd_local_segment, base_offset),
        FIELD(mqd_local_segment, next_base_offset),
        FIELD(mqd_local_segment, segments_generation),
        FIELD(mqd_local_segment, position),
        FIELD(mqd_local_segment, size_bytes),
        FIELD(mqd_local_segment, map_bytes),
        FIELD(mqd_local_segment, reserved),
    };
    uint64_t hash = 0xcbf29ce484222325ull;
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        for (int shift = 0; shift < 64; shift += 8)
            hash = (hash ^ (numbers[i] >> shift & 0xff)) * 0x100000001b3ull;
    return hash;
}
