/* ListOffsets: requests and responses, versions 1..11.
 *
 *   request    replica_id | isolation_level v2+ | topics[ name | partitions[ index |
 *              current_leader_epoch v4+ | timestamp ] ] | timeout_ms v10+
 *   response   throttle_ms v2+ | topics[ name | partitions[ index | error | timestamp | offset |
 *              leader_epoch v4+ ] ]
 *   flexible from v6. Negative timestamps in requests are special: -1 latest, -2 earliest, -3
 *   maximum timestamp, -4 and below: tiered storage.
 *
 *   W1  as in wire/produce.c: a body that mqd_list_offsets_parse accepted is well-formed to its
 *       last byte, and timeout_ms is known.
 */
#include "wire/buffer.h"
#include "wire/cursor.h"
#include "wire/wire.h"

#define LIST_OFFSETS_VERSION_MIN 1
#define LIST_OFFSETS_VERSION_MAX 11

static inline bool is_flexible(int16_t version)
{
    return version >= 6;
}

static int check_body(struct mqd_list_offsets_request *request)
{
    struct mqd_list_offsets_topic topic;
    struct mqd_list_offsets_partition partition;
    for (int32_t i = 0; i < request->topic_count; i++) {
        if (mqd_list_offsets_next_topic(request, &topic))
            return -1;
        for (int32_t j = 0; j < topic.partition_count; j++)
            if (mqd_list_offsets_next_partition(request, &partition))
                return -1;
    }
    return mqd_list_offsets_end(request);
}

int mqd_list_offsets_parse(const uint8_t *body, uint32_t size_bytes, int16_t version,
                           struct mqd_list_offsets_request *out)
{
    bool compact = is_flexible(version);
    out->cursor = mqd_cursor_over(body, size_bytes);
    out->version = version;
    out->isolation_level = 0;
    out->timeout_ms = -1;
    out->partitions_left = 0;
    if (version < LIST_OFFSETS_VERSION_MIN || version > LIST_OFFSETS_VERSION_MAX)
        return mqd_wire_wrong(&out->cursor, "ListOffsets", "of a version that is not advertised:", version);
    if (mqd_take_i32(&out->cursor, "replica_id", &out->replica_id) ||
        (version >= 2 && mqd_take_i8(&out->cursor, "isolation_level", &out->isolation_level)) ||
        mqd_take_count(&out->cursor, compact, "topics", compact ? 1 + 1 + 1 : 2 + 4, &out->topic_count))
        return -1;
    out->topics_left = out->topic_count;
    struct mqd_list_offsets_request checked = *out;
    if (check_body(&checked))
        return -1;
    out->timeout_ms = checked.timeout_ms;
    return 0;
}

int mqd_list_offsets_next_topic(struct mqd_list_offsets_request *request, struct mqd_list_offsets_topic *out)
{
    bool compact = is_flexible(request->version);
    uint32_t partition_bytes_min = 4 + (request->version >= 4 ? 4 : 0) + 8 + (compact ? 1 : 0);
    if (request->topics_left <= 0 || request->partitions_left > 0)
        return mqd_wire_misused("ListOffsets: no further topic here");
    request->topics_left--;
    if (mqd_take_text(&request->cursor, compact, false, "topic name", &out->name) ||
        mqd_take_count(&request->cursor, compact, "partitions", partition_bytes_min, &out->partition_count))
        return -1;
    request->partitions_left = out->partition_count;
    return out->partition_count == 0 ? mqd_skip_tags(&request->cursor, compact) : 0;
}

int mqd_list_offsets_next_partition(struct mqd_list_offsets_request *request, struct mqd_list_offsets_partition *out)
{
    bool compact = is_flexible(request->version);
    if (request->partitions_left <= 0)
        return mqd_wire_misused("ListOffsets: no further partition here");
    out->current_leader_epoch = -1;
    if (mqd_take_i32(&request->cursor, "partition_index", &out->partition_index) ||
        (request->version >= 4 && mqd_take_i32(&request->cursor, "current_leader_epoch", &out->current_leader_epoch)) ||
        mqd_take_i64(&request->cursor, "timestamp", &out->timestamp) || mqd_skip_tags(&request->cursor, compact))
        return -1;
    return --request->partitions_left == 0 ? mqd_skip_tags(&request->cursor, compact) : 0;
}

int mqd_list_offsets_end(struct mqd_list_offsets_request *request)
{
    if (request->topics_left > 0 || request->partitions_left > 0)
        return mqd_wire_misused("ListOffsets: ended before its last partition");
    if (request->version >= 10 && mqd_take_i32(&request->cursor, "timeout_ms", &request->timeout_ms))
        return -1;
    if (mqd_skip_tags(&request->cursor, is_flexible(request->version)))
        return -1;
    return 0;
}

void mqd_list_offsets_response_begin(struct mqd_buffer *buffer, int16_t version, int32_t throttle_ms,
                                     int32_t topic_count)
{
    if (version >= 2)
        mqd_put_i32(buffer, throttle_ms);
    mqd_put_count(buffer, is_flexible(version), topic_count);
}

void mqd_list_offsets_response_topic(struct mqd_buffer *buffer, int16_t version, struct mqd_text name,
                                     int32_t partition_count)
{
    mqd_put_text(buffer, is_flexible(version), name);
    mqd_put_count(buffer, is_flexible(version), partition_count);
}

void mqd_list_offsets_response_partition(struct mqd_buffer *buffer, int16_t version, int32_t partition_index,
                                         int16_t error, int64_t timestamp, int64_t offset, int32_t leader_epoch)
{
    mqd_put_i32(buffer, partition_index);
    mqd_put_i16(buffer, error);
    mqd_put_i64(buffer, timestamp);
    mqd_put_i64(buffer, offset);
    if (version >= 4)
        mqd_put_i32(buffer, leader_epoch);
    mqd_put_no_tags(buffer, is_flexible(version));
}

void mqd_list_offsets_response_topic_end(struct mqd_buffer *buffer, int16_t version)
{
    mqd_put_no_tags(buffer, is_flexible(version));
}

void mqd_list_offsets_response_end(struct mqd_buffer *buffer, int16_t version)
{
    mqd_put_no_tags(buffer, is_flexible(version));
}
