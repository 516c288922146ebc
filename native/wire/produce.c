/* Produce: requests and responses, versions 0..13 (0..2 have old message sets, which the caller
 * refuses; they are parsed so that the caller can respond).
 *
 *   request    transactional_id v3+ | required_acks | timeout_ms | topics[ name v0-12 or topic_id
 *              v13+ | partitions[ index | records ] ]
 *   response   topics[ name or topic_id | partitions[ index | error | base_offset |
 *              log_append_time_ms v2+ | log_start_offset v5+ | record_errors v8+ | error_message
 *              v8+ | tags v9+ (current_leader v10+, KIP-951: only from a broker that is not the
 *              leader) ] ] | throttle_ms v1+ | tags v9+ (node_endpoints v10+)
 *   flexible from v9.
 *
 *   W1  mqd_produce_parse checks the whole body first: when it succeeds, every later call on the
 *       same bytes succeeds. So a frame that is malformed only in its last byte appends nothing.
 */
#include "base/big_endian.h"
#include "wire/buffer.h"
#include "wire/cursor.h"
#include "wire/record_scan.h"
#include "wire/wire.h"

#define PRODUCE_VERSION_MAX 13

static inline bool is_flexible(int16_t version)
{
    return version >= 9;
}
static inline bool uses_topic_ids(int16_t version)
{
    return version >= 13;
}

static uint32_t topic_bytes_min(int16_t version)
{
    return uses_topic_ids(version) ? 16 + 1 + 1 : is_flexible(version) ? 1 + 1 + 1 : 2 + 4;
}

/* False if the bytes that have arrived show that the batch is not of format 2, or is
 * transactional. */
static inline bool is_plain(const struct mqd_produce_partition *partition)
{
    const uint8_t *batch = partition->records;
    if (partition->size_bytes < MQD_BATCH_MAGIC_END)
        return true;
    return batch[16] == 2 && (int32_t)mqd_get_be32(batch + 8) >= MQD_BATCH_LENGTH_MIN &&
           (partition->size_bytes < MQD_BATCH_ATTRIBUTES_END || !(batch[22] & MQD_ATTRIBUTE_TRANSACTIONAL));
}

static int check_body(struct mqd_produce_request request, struct mqd_produce_request *out)
{
    struct mqd_produce_topic topic;
    struct mqd_produce_partition partition;
    for (int32_t i = 0; i < request.topic_count; i++) {
        if (mqd_produce_next_topic(&request, &topic))
            return -1;
        for (int32_t j = 0; j < topic.partition_count; j++) {
            if (mqd_produce_next_partition(&request, &partition))
                return -1;
            out->plain &= is_plain(&partition);
        }
        out->partition_count += (uint32_t)topic.partition_count;
    }
    return mqd_produce_end(&request);
}

int mqd_produce_parse(const uint8_t *body, uint32_t size_bytes, int16_t version, struct mqd_produce_request *out)
{
    out->cursor = mqd_cursor_over(body, size_bytes);
    out->version = version;
    out->transactional_id = (struct mqd_text){.bytes = NULL, .size_bytes = -1};
    out->partitions_left = 0;
    out->partition_count = 0;
    out->plain = true;
    if (version < 0 || version > PRODUCE_VERSION_MAX)
        return mqd_wire_wrong(&out->cursor, "Produce", "of a version that is not advertised:", version);
    if ((version >= 3 &&
         mqd_take_text(&out->cursor, is_flexible(version), true, "transactional_id", &out->transactional_id)) ||
        mqd_take_i16(&out->cursor, "acks", &out->required_acks) ||
        mqd_take_i32(&out->cursor, "timeout_ms", &out->timeout_ms) ||
        mqd_take_count(&out->cursor, is_flexible(version), "topic_data", topic_bytes_min(version), &out->topic_count))
        return -1;
    out->topics_left = out->topic_count;
    return check_body(*out, out);
}

int mqd_produce_next_topic(struct mqd_produce_request *request, struct mqd_produce_topic *out)
{
    bool compact = is_flexible(request->version);
    if (request->topics_left <= 0 || request->partitions_left > 0)
        return mqd_wire_misused("Produce: no further topic here");
    request->topics_left--;
    if (mqd_take_topic_key(&request->cursor, compact, uses_topic_ids(request->version), &out->key) ||
        mqd_take_count(&request->cursor, compact, "partition_data", compact ? 4 + 1 + 1 : 4 + 4, &out->partition_count))
        return -1;
    request->partitions_left = out->partition_count;
    return out->partition_count == 0 ? mqd_skip_tags(&request->cursor, compact) : 0;
}

int mqd_produce_next_partition(struct mqd_produce_request *request, struct mqd_produce_partition *out)
{
    bool compact = is_flexible(request->version);
    if (request->partitions_left <= 0)
        return mqd_wire_misused("Produce: no further partition here");
    if (mqd_take_i32(&request->cursor, "partition index", &out->partition_index) ||
        mqd_take_length(&request->cursor, compact, false, "records", &out->size_bytes))
        return -1;
    /* not const: the owner writes base offset and leader epoch into the batch in place */
    out->records = out->size_bytes < 0 ? NULL : (uint8_t *)(uintptr_t)request->cursor.at;
    if (out->size_bytes > 0)
        request->cursor.at += out->size_bytes;
    if (mqd_skip_tags(&request->cursor, compact))
        return -1;
    /* the topic's tags follow its last partition */
    return --request->partitions_left == 0 ? mqd_skip_tags(&request->cursor, compact) : 0;
}

int mqd_produce_end(struct mqd_produce_request *request)
{
    if (request->topics_left > 0 || request->partitions_left > 0)
        return mqd_wire_misused("Produce: ended before its last partition");
    if (mqd_skip_tags(&request->cursor, is_flexible(request->version)))
        return -1;
    return 0;
}

void mqd_produce_response_topics(struct mqd_buffer *buffer, int16_t version, int32_t topic_count)
{
    mqd_put_count(buffer, is_flexible(version), topic_count);
}

void mqd_produce_response_topic(struct mqd_buffer *buffer, int16_t version, const struct mqd_topic_key *key,
                                int32_t partition_count)
{
    mqd_put_topic_key(buffer, is_flexible(version), uses_topic_ids(version), key);
    mqd_put_count(buffer, is_flexible(version), partition_count);
}

void mqd_produce_response_partition(struct mqd_buffer *buffer, int16_t version,
                                    const struct mqd_produce_outcome *outcome)
{
    mqd_put_i32(buffer, outcome->partition_index);
    mqd_put_i16(buffer, outcome->error);
    mqd_put_i64(buffer, outcome->base_offset);
    if (version >= 2)
        mqd_put_i64(buffer, outcome->log_append_time_ms);
    if (version >= 5)
        mqd_put_i64(buffer, outcome->log_start_offset);
    if (version >= 8) {
        mqd_put_count(buffer, is_flexible(version), (int32_t)outcome->record_error_count);
        for (uint32_t i = 0; i < outcome->record_error_count; i++) {
            mqd_put_i32(buffer, outcome->record_errors[i]);
            mqd_put_c_string(buffer, is_flexible(version), outcome->record_message);
            mqd_put_no_tags(buffer, is_flexible(version));
        }
        mqd_put_c_string(buffer, is_flexible(version), outcome->message);
    }
    if (version < 10 || !outcome->current_leader) {
        mqd_put_no_tags(buffer, is_flexible(version));
        return;
    }
    mqd_put_varint(buffer, 1);
    mqd_put_current_leader(buffer, 0, outcome->current_leader);
}

void mqd_produce_response_topic_end(struct mqd_buffer *buffer, int16_t version)
{
    mqd_put_no_tags(buffer, is_flexible(version));
}

void mqd_produce_response_end(struct mqd_buffer *buffer, int16_t version, int32_t throttle_ms)
{
    if (version >= 1)
        mqd_put_i32(buffer, throttle_ms);
    mqd_put_no_tags(buffer, is_flexible(version));
}

void mqd_produce_response_end_nodes(struct mqd_buffer *buffer, int16_t version, int32_t throttle_ms,
                                    const struct mqd_node_endpoint *nodes, uint32_t node_count)
{
    if (version < 10 || !node_count) {
        mqd_produce_response_end(buffer, version, throttle_ms);
        return;
    }
    mqd_put_i32(buffer, throttle_ms);
    mqd_put_varint(buffer, 1);
    mqd_put_nodes(buffer, 0, nodes, node_count);
}
