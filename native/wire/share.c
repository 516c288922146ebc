/* ShareFetch and ShareAcknowledge: requests and responses, versions 1 and 2 (KIP-932, 1206, 1222).
 *
 *   request    group_id | member_id | share_session_epoch |
 *              (ShareFetch: wait_ms_max | bytes_min | bytes_max | records_max | batch_size |
 *                acquire_mode v2) | is_renewal v2 |
 *              topics[ topic_id | partitions[ index |
 *                acknowledgements[ first | last | types[] ] ] ] |
 *              (ShareFetch: forgotten[ topic_id | partition indexes[] ])
 *   response   throttle_ms | error | message | lock_ms (ShareAcknowledge: v2) |
 *              topics[ topic_id | partitions[ index | error | message |
 *                (ShareFetch: acknowledge_error | acknowledge_message) | leader | leader_epoch |
 *                (ShareFetch: records | acquired[ first | last | delivery_count ]) ] ] |
 *              node_endpoints[ node_id | host | port | rack ]
 *   All versions are flexible.
 *
 *   W1  as in wire/produce.c: a body that mqd_share_fetch_parse accepted is well-formed to its end.
 */
#include "wire/buffer.h"
#include "wire/cursor.h"
#include "wire/wire.h"

#define SHARE_FETCH 78
#define SHARE_ACKNOWLEDGE 79
#define VERSION_MIN 1
#define VERSION_MAX 2
#define TOPIC_BYTES_MIN (16 + 1 + 1)
#define PARTITION_BYTES_MIN (4 + 1 + 1)
#define ACKNOWLEDGEMENT_BYTES_MIN (8 + 8 + 1 + 1)

/* ---- requests ---- */

static int take_head(struct mqd_share_fetch_request *out)
{
    struct mqd_byte_cursor *cursor = &out->cursor;
    if (mqd_take_text(cursor, true, true, "group_id", &out->group_id) ||
        mqd_take_text(cursor, true, true, "member_id", &out->member_id) ||
        mqd_take_i32(cursor, "share_session_epoch", &out->session_epoch))
        return -1;
    if (out->api_key == SHARE_FETCH &&
        (mqd_take_i32(cursor, "max_wait_ms", &out->wait_ms_max) || mqd_take_i32(cursor, "min_bytes", &out->bytes_min) ||
         mqd_take_i32(cursor, "max_bytes", &out->bytes_max) || mqd_take_i32(cursor, "max_records", &out->records_max) ||
         mqd_take_i32(cursor, "batch_size", &out->batch_size) ||
         (out->version >= 2 && mqd_take_i8(cursor, "share_acquire_mode", &out->acquire_mode))))
        return -1;
    int8_t is_renewal = 0;
    if (out->version >= 2 && mqd_take_i8(cursor, "is_renew_ack", &is_renewal))
        return -1;
    out->is_renewal = is_renewal != 0;
    return mqd_take_count(cursor, true, "topics", TOPIC_BYTES_MIN, &out->topic_count);
}

static int check_body(struct mqd_share_fetch_request *request)
{
    struct mqd_share_fetch_topic topic;
    struct mqd_share_fetch_partition partition;
    struct mqd_share_fetch_acknowledgement acknowledgement;
    int32_t forgotten_count, partition_index;
    for (int32_t i = 0; i < request->topic_count; i++) {
        if (mqd_share_fetch_next_topic(request, &topic))
            return -1;
        for (int32_t j = 0; j < topic.partition_count; j++) {
            if (mqd_share_fetch_next_partition(request, &partition))
                return -1;
            for (int32_t k = 0; k < partition.acknowledgement_count; k++)
                if (mqd_share_fetch_next_acknowledgement(request, &acknowledgement))
                    return -1;
        }
    }
    if (mqd_share_fetch_begin_forgotten(request, &forgotten_count))
        return -1;
    for (int32_t i = 0; i < forgotten_count; i++) {
        if (mqd_share_fetch_next_topic(request, &topic))
            return -1;
        for (int32_t j = 0; j < topic.partition_count; j++)
            if (mqd_share_fetch_next_forgotten_partition(request, &partition_index))
                return -1;
    }
    return mqd_share_fetch_end(request);
}

int mqd_share_fetch_parse(const uint8_t *body, uint32_t size_bytes, int16_t api_key, int16_t version,
                          struct mqd_share_fetch_request *out)
{
    *out = (struct mqd_share_fetch_request){
        .cursor = mqd_cursor_over(body, size_bytes), .api_key = api_key, .version = version};
    if (version < VERSION_MIN || version > VERSION_MAX)
        return mqd_wire_wrong(&out->cursor, api_key == SHARE_FETCH ? "ShareFetch" : "ShareAcknowledge",
                              "of a version that is not advertised:", version);
    if (take_head(out))
        return -1;
    out->topics_left = out->topic_count;
    struct mqd_share_fetch_request checked = *out;
    return check_body(&checked);
}

int mqd_share_fetch_next_topic(struct mqd_share_fetch_request *request, struct mqd_share_fetch_topic *out)
{
    struct mqd_topic_key key;
    if (request->topics_left <= 0 || request->partitions_left > 0 || request->acknowledgements_left > 0)
        return mqd_wire_misused("ShareFetch: no further topic here");
    request->topics_left--;
    if (mqd_take_topic_key(&request->cursor, true, true, &key) ||
        mqd_take_count(&request->cursor, true, "partitions", request->forgotten_taken ? 4 : PARTITION_BYTES_MIN,
                       &out->partition_count))
        return -1;
    memcpy(out->topic_id, key.topic_id, sizeof out->topic_id);
    request->partitions_left = out->partition_count;
    return out->partition_count == 0 ? mqd_skip_tags(&request->cursor, true) : 0;
}

/* Skips the tags after a partition's acknowledgements; after the topic's last partition also the
 * topic's tags. */
static int end_partition(struct mqd_share_fetch_request *request)
{
    if (mqd_skip_tags(&request->cursor, true))
        return -1;
    return --request->partitions_left == 0 ? mqd_skip_tags(&request->cursor, true) : 0;
}

int mqd_share_fetch_next_partition(struct mqd_share_fetch_request *request, struct mqd_share_fetch_partition *out)
{
    if (request->partitions_left <= 0 || request->acknowledgements_left > 0 || request->forgotten_taken)
        return mqd_wire_misused("ShareFetch: no further partition here");
    if (mqd_take_i32(&request->cursor, "partition", &out->partition_index) ||
        mqd_take_count(&request->cursor, true, "acknowledgement_batches", ACKNOWLEDGEMENT_BYTES_MIN,
                       &out->acknowledgement_count))
        return -1;
    request->acknowledgements_left = out->acknowledgement_count;
    return out->acknowledgement_count == 0 ? end_partition(request) : 0;
}

int mqd_share_fetch_next_acknowledgement(struct mqd_share_fetch_request *request,
                                         struct mqd_share_fetch_acknowledgement *out)
{
    struct mqd_byte_cursor *cursor = &request->cursor;
    int32_t type_count;
    if (request->acknowledgements_left <= 0)
        return mqd_wire_misused("ShareFetch: no further acknowledgement here");
    if (mqd_take_i64(cursor, "first_offset", &out->first) || mqd_take_i64(cursor, "last_offset", &out->last) ||
        mqd_take_count(cursor, true, "acknowledge_types", 1, &type_count))
        return -1;
    out->types = cursor->at;
    out->type_count = (uint32_t)type_count;
    cursor->at += type_count;
    if (mqd_skip_tags(cursor, true))
        return -1;
    return --request->acknowledgements_left == 0 ? end_partition(request) : 0;
}

int mqd_share_fetch_begin_forgotten(struct mqd_share_fetch_request *request, int32_t *forgotten_count)
{
    if (request->topics_left > 0 || request->partitions_left > 0 || request->forgotten_taken)
        return mqd_wire_misused("ShareFetch: forgotten topics come once, after the last partition");
    request->forgotten_taken = true;
    *forgotten_count = 0;
    if (request->api_key == SHARE_ACKNOWLEDGE)
        return 0;
    if (mqd_take_count(&request->cursor, true, "forgotten_topics_data", TOPIC_BYTES_MIN, forgotten_count))
        return -1;
    request->topics_left = *forgotten_count;
    return 0;
}

int mqd_share_fetch_next_forgotten_partition(struct mqd_share_fetch_request *request, int32_t *partition_index)
{
    if (!request->forgotten_taken || request->partitions_left <= 0)
        return mqd_wire_misused("ShareFetch: no further forgotten partition here");
    if (mqd_take_i32(&request->cursor, "forgotten partition", partition_index))
        return -1;
    return --request->partitions_left == 0 ? mqd_skip_tags(&request->cursor, true) : 0;
}

int mqd_share_fetch_end(struct mqd_share_fetch_request *request)
{
    if (!request->forgotten_taken || request->topics_left > 0 || request->partitions_left > 0)
        return mqd_wire_misused("ShareFetch: ended before its last forgotten partition");
    return mqd_skip_tags(&request->cursor, true);
}

/* ---- responses ---- */

void mqd_share_fetch_response_begin(struct mqd_buffer *buffer, int16_t api_key, int16_t version, int32_t throttle_ms,
                                    int16_t error, const char *message, int32_t lock_ms, int32_t topic_count)
{
    mqd_put_i32(buffer, throttle_ms);
    mqd_put_i16(buffer, error);
    mqd_put_c_string(buffer, true, message);
    if (api_key == SHARE_FETCH || version >= 2)
        mqd_put_i32(buffer, lock_ms);
    mqd_put_count(buffer, true, topic_count);
}

void mqd_share_fetch_response_topic(struct mqd_buffer *buffer, const uint8_t *topic_id, int32_t partition_count)
{
    mqd_put_bytes(buffer, topic_id, 16);
    mqd_put_count(buffer, true, partition_count);
}

void mqd_share_fetch_response_partition(struct mqd_buffer *buffer, int16_t api_key,
                                        const struct mqd_share_fetch_outcome *outcome)
{
    mqd_put_i32(buffer, outcome->partition_index);
    mqd_put_i16(buffer, outcome->error);
    mqd_put_c_string(buffer, true, outcome->message);
    if (api_key == SHARE_FETCH) {
        mqd_put_i16(buffer, outcome->acknowledge_error);
        mqd_put_c_string(buffer, true, outcome->acknowledge_message);
    }
    mqd_put_i32(buffer, outcome->current_leader.leader);
    mqd_put_i32(buffer, outcome->current_leader.leader_epoch);
    mqd_put_no_tags(buffer, true);
    if (api_key != SHARE_FETCH)
        return;
    if (outcome->records_bytes >= INT32_MAX)
        buffer->failed = true;
    else
        mqd_put_count(buffer, true, (int32_t)outcome->records_bytes);
}

void mqd_share_fetch_response_acquired(struct mqd_buffer *buffer, int32_t run_count)
{
    mqd_put_count(buffer, true, run_count);
}

void mqd_share_fetch_response_run(struct mqd_buffer *buffer, int64_t first, int64_t last, int16_t delivery_count)
{
    mqd_put_i64(buffer, first);
    mqd_put_i64(buffer, last);
    mqd_put_i16(buffer, delivery_count);
    mqd_put_no_tags(buffer, true);
}

void mqd_share_fetch_response_partition_end(struct mqd_buffer *buffer)
{
    mqd_put_no_tags(buffer, true);
}

void mqd_share_fetch_response_topic_end(struct mqd_buffer *buffer)
{
    mqd_put_no_tags(buffer, true);
}

void mqd_share_fetch_response_end(struct mqd_buffer *buffer, const struct mqd_node_endpoint *nodes, uint32_t node_count)
{
    mqd_put_node_list(buffer, nodes, node_count);
    mqd_put_no_tags(buffer, true);
}
