/* Encodes the relay's Produce requests, which have one batch each, and parses the responses. See
 * server/relay/relay.h; wire/produce.c describes both layouts. */
#include "server/relay/relay.h"
#include "wire/buffer.h"
#include "wire/cursor.h"

#define API_PRODUCE 0
#define FLEXIBLE_VERSION_MIN 9
#define BY_ID_VERSION_MIN 13
#define RECORD_ERRORS_VERSION_MIN 8 /* record errors and a message (KIP-467) */

void mqd_relay_encode(struct mqd_buffer *out, const struct mqd_relay_request *request)
{
    bool flexible = request->version >= FLEXIBLE_VERSION_MIN, by_id = request->version >= BY_ID_VERSION_MIN;
    uint32_t begin = out->size_bytes;
    struct mqd_topic_key key = {.name = request->topic, .by_id = by_id};
    if (by_id)
        memcpy(key.topic_id, request->topic_id, sizeof key.topic_id);
    mqd_put_i32(out, 0);
    mqd_put_i16(out, API_PRODUCE);
    mqd_put_i16(out, request->version);
    mqd_put_i32(out, request->correlation_id);
    mqd_put_text(out, false, request->client_id); /* never compact, even in a flexible header */
    mqd_put_no_tags(out, flexible);
    mqd_put_text(out, flexible, request->transactional_id);
    mqd_put_i16(out, request->acks);
    mqd_put_i32(out, request->timeout_ms);
    mqd_put_count(out, flexible, 1);
    mqd_put_topic_key(out, flexible, by_id, &key);
    mqd_put_count(out, flexible, 1);
    mqd_put_i32(out, request->partition_index);
    mqd_put_count(out, flexible, (int32_t)request->records_bytes);
    mqd_put_bytes(out, request->records, request->records_bytes);
    for (int i = 0; i < 3; i++) /* tagged fields of the partition, the topic, the request */
        mqd_put_no_tags(out, flexible);
    if (!out->failed)
        mqd_store_be32(out->bytes + begin, out->size_bytes - begin - 4);
}

static int check_count_is_one(const struct mqd_byte_cursor *cursor, const char *field, int32_t count)
{
    return count == 1 ? 0 : mqd_wire_wrong(cursor, field, "not 1, as requested, but", count);
}

static int take_record_errors(struct mqd_byte_cursor *cursor, bool flexible, struct mqd_relay_response *out)
{
    int32_t count, index;
    struct mqd_text text;
    if (mqd_take_count(cursor, flexible, "record errors", 6, &count))
        return -1;
    for (int32_t i = 0; i < count; i++) {
        if (mqd_take_i32(cursor, "batch index", &index) ||
            mqd_take_text(cursor, flexible, true, "record error", &text) || mqd_skip_tags(cursor, flexible))
            return -1;
        if (out->record_error_count == MQD_RECORD_ERROR_COUNT_MAX)
            continue;
        out->record_errors[out->record_error_count++] = index;
        if (i == 0)
            out->record_message = text;
    }
    return mqd_take_text(cursor, flexible, true, "error message", &out->message);
}

static int take_partition(struct mqd_byte_cursor *cursor, int16_t version, struct mqd_relay_response *out)
{
    bool flexible = version >= FLEXIBLE_VERSION_MIN;
    if (mqd_take_i32(cursor, "partition index", &out->partition_index) ||
        mqd_take_i16(cursor, "error code", &out->error) || mqd_take_i64(cursor, "base offset", &out->base_offset))
        return -1;
    if (version >= 2 && mqd_take_i64(cursor, "log append time", &out->log_append_time_ms))
        return -1;
    if (version >= 5 && mqd_take_i64(cursor, "log start offset", &out->log_start_offset))
        return -1;
    if (version >= RECORD_ERRORS_VERSION_MIN && take_record_errors(cursor, flexible, out))
        return -1;
    /* -1 is Kafka's UNKNOWN_SERVER_ERROR; smaller numbers are the reactor's own codes */
    if (out->error < -1 || (out->error == 0 && out->base_offset < -1))
        return mqd_wire_wrong(cursor, "error code", "an impossible outcome, error code or base offset",
                              out->error ? out->error : out->base_offset);
    return mqd_skip_tags(cursor, flexible);
}

int mqd_relay_parse(const uint8_t *frame, uint32_t size_bytes, int16_t version, struct mqd_relay_response *out)
{
    bool flexible = version >= FLEXIBLE_VERSION_MIN;
    struct mqd_byte_cursor cursor = mqd_cursor_over(frame, size_bytes);
    int32_t correlation_id, count, throttle_ms;
    struct mqd_topic_key key;
    *out = (struct mqd_relay_response){.base_offset = -1,
                                       .log_append_time_ms = -1,
                                       .log_start_offset = -1,
                                       .record_message = {NULL, -1},
                                       .message = {NULL, -1}};
    if (mqd_take_i32(&cursor, "correlation id", &correlation_id) || mqd_skip_tags(&cursor, flexible) ||
        mqd_take_count(&cursor, flexible, "responses", 3, &count) || check_count_is_one(&cursor, "responses", count) ||
        mqd_take_topic_key(&cursor, flexible, version >= BY_ID_VERSION_MIN, &key) ||
        mqd_take_count(&cursor, flexible, "partition responses", 14, &count) ||
        check_count_is_one(&cursor, "partition responses", count) || take_partition(&cursor, version, out) ||
        mqd_skip_tags(&cursor, flexible) || mqd_take_i32(&cursor, "throttle time", &throttle_ms) ||
        mqd_skip_tags(&cursor, flexible))
        return -1;
    return mqd_cursor_finished(&cursor, "Produce response");
}
