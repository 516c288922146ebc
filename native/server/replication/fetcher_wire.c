/* See server/replication/fetcher_wire.h. */
#include "server/replication/fetcher_wire.h"

#include <string.h>

#include "base/error.h"
#include "wire/buffer.h"
#include "wire/cursor.h"

#define API_FETCH 1
#define TOPIC_BYTES_MIN 18     /* id, count, tags */
#define PARTITION_BYTES_MIN 37 /* index, error, three offsets, aborted, replica, records, tags */
#define TAG_REPLICA_STATE 1    /* in a request */

/* ---- requests ---- */

static bool same_topic(const struct mqd_fetch_key *left, const struct mqd_fetch_key *right)
{
    return memcmp(left->topic_id, right->topic_id, sizeof left->topic_id) == 0;
}

static void put_items(struct mqd_buffer *out, const struct mqd_fetch_item *items, uint32_t count)
{
    uint32_t topic_count = 0;
    for (uint32_t i = 0; i < count; i++)
        topic_count += i == 0 || !same_topic(&items[i].key, &items[i - 1].key);
    mqd_put_count(out, true, (int32_t)topic_count);
    for (uint32_t i = 0, end; i < count; i = end) {
        for (end = i + 1; end < count && same_topic(&items[i].key, &items[end].key);)
            end++;
        mqd_put_bytes(out, items[i].key.topic_id, 16);
        mqd_put_count(out, true, (int32_t)(end - i));
        for (uint32_t j = i; j < end; j++) {
            mqd_put_i32(out, items[j].key.index);
            mqd_put_i32(out, items[j].current_leader_epoch);
            mqd_put_i64(out, items[j].fetch_offset);
            mqd_put_i32(out, items[j].last_fetched_epoch);
            mqd_put_i64(out, items[j].log_start_offset);
            mqd_put_i32(out, items[j].bytes_max);
            mqd_put_no_tags(out, true);
        }
        mqd_put_no_tags(out, true);
    }
}

static void put_forgotten(struct mqd_buffer *out, const struct mqd_fetch_key *keys, uint32_t count)
{
    uint32_t topic_count = 0;
    for (uint32_t i = 0; i < count; i++)
        topic_count += i == 0 || !same_topic(&keys[i], &keys[i - 1]);
    mqd_put_count(out, true, (int32_t)topic_count);
    for (uint32_t i = 0, end; i < count; i = end) {
        for (end = i + 1; end < count && same_topic(&keys[i], &keys[end]);)
            end++;
        mqd_put_bytes(out, keys[i].topic_id, 16);
        mqd_put_count(out, true, (int32_t)(end - i));
        for (uint32_t j = i; j < end; j++)
            mqd_put_i32(out, keys[j].index);
        mqd_put_no_tags(out, true);
    }
}

void mqd_fetch_request_encode(struct mqd_buffer *out, const struct mqd_fetch_request_head *head,
                              const struct mqd_fetch_item *items, uint32_t item_count,
                              const struct mqd_fetch_key *forgotten, uint32_t forgotten_count)
{
    uint32_t begin = out->size_bytes;
    mqd_put_i32(out, 0);
    mqd_put_i16(out, API_FETCH);
    mqd_put_i16(out, MQD_FETCHER_VERSION);
    mqd_put_i32(out, head->correlation_id);
    mqd_put_i16(out, -1); /* client id */
    mqd_put_no_tags(out, true);
    mqd_put_i32(out, head->wait_ms);
    mqd_put_i32(out, 1);
    mqd_put_i32(out, head->bytes_max);
    mqd_put_bytes(out, "", 1); /* isolation_level: read_uncommitted */
    mqd_put_i32(out, head->session_id);
    mqd_put_i32(out, head->session_epoch);
    put_items(out, items, item_count);
    put_forgotten(out, forgotten, forgotten_count);
    mqd_put_varint(out, 1); /* rack_id "" */
    mqd_put_varint(out, 1); /* one tagged field: replica_state, 4 + 8 + 1 bytes */
    mqd_put_varint(out, TAG_REPLICA_STATE);
    mqd_put_varint(out, 13);
    mqd_put_i32(out, head->node_id);
    mqd_put_i64(out, head->broker_epoch);
    mqd_put_no_tags(out, true);
    if (!out->failed)
        mqd_store_be32(out->bytes + begin, out->size_bytes - begin - 4);
}

/* ---- responses ---- */

enum { PHASE_HEAD, PHASE_TOPIC, PHASE_PARTITION, PHASE_RECORDS, PHASE_PARTITION_END, PHASE_TAIL, PHASE_OVER };

void mqd_response_parser_begin(struct mqd_response_parser *parser, uint32_t frame_bytes)
{
    *parser = (struct mqd_response_parser){.phase = PHASE_HEAD, .frame_left = frame_bytes};
}

/* Reads the number of elements that follow; each takes at least element_bytes_min of the rest of
 * the frame. */
static int take_count(struct mqd_byte_cursor *cursor, const struct mqd_response_parser *parser, const char *field,
                      uint32_t element_bytes_min, uint32_t *out)
{
    uint32_t raw;
    if (mqd_take_varint(cursor, field, &raw))
        return -1;
    uint32_t left = parser->frame_left - (uint32_t)(cursor->at - cursor->begin);
    if (raw == 0 || (raw - 1) > left / element_bytes_min)
        return mqd_wire_wrong(cursor, field, "a count that the rest of the response cannot hold:", (int64_t)raw - 1);
    *out = raw - 1;
    return 0;
}

static int take_head(struct mqd_response_parser *parser, struct mqd_byte_cursor *cursor)
{
    if (mqd_take_i32(cursor, "correlation id", &parser->correlation_id) || mqd_skip_tags(cursor, true) ||
        mqd_take_i32(cursor, "throttle_time_ms", &parser->throttle_ms) ||
        mqd_take_i16(cursor, "error_code", &parser->error) || mqd_take_i32(cursor, "session_id", &parser->session_id))
        return -1;
    return take_count(cursor, parser, "responses", TOPIC_BYTES_MIN, &parser->topics_left);
}

static int take_topic(struct mqd_response_parser *parser, struct mqd_byte_cursor *cursor)
{
    if (mqd_cursor_left(cursor) < 16)
        return mqd_wire_short(cursor, "topic id", 16);
    memcpy(parser->partition.key.topic_id, cursor->at, 16);
    cursor->at += 16;
    if (take_count(cursor, parser, "partitions", PARTITION_BYTES_MIN, &parser->partitions_left))
        return -1;
    return parser->partitions_left == 0 ? mqd_skip_tags(cursor, true) : 0;
}

/* Skips the aborted transactions, which a replica does not need. */
static int skip_aborted(struct mqd_response_parser *parser, struct mqd_byte_cursor *cursor)
{
    uint32_t raw;
    int64_t unused;
    if (mqd_take_varint(cursor, "aborted_transactions", &raw))
        return -1;
    if (raw > MQD_PARSED_STEP_BYTES_MAX / 17)
        return mqd_wire_wrong(cursor, "aborted_transactions", "more than a replica can get:", (int64_t)raw - 1);
    for (uint32_t i = 1; i < raw; i++)
        if (mqd_take_i64(cursor, "producer_id", &unused) || mqd_take_i64(cursor, "first_offset", &unused) ||
            mqd_skip_tags(cursor, true))
            return -1;
    return 0;
}

static int take_partition(struct mqd_response_parser *parser, struct mqd_byte_cursor *cursor)
{
    struct mqd_parsed_partition *partition = &parser->partition;
    int32_t preferred_replica;
    uint32_t raw;
    if (mqd_take_i32(cursor, "partition_index", &partition->key.index) ||
        mqd_take_i16(cursor, "error_code", &partition->error) ||
        mqd_take_i64(cursor, "high_watermark", &partition->high_watermark) ||
        mqd_take_i64(cursor, "last_stable_offset", &partition->last_stable_offset) ||
        mqd_take_i64(cursor, "log_start_offset", &partition->log_start_offset) || skip_aborted(parser, cursor) ||
        mqd_take_i32(cursor, "preferred_read_replica", &preferred_replica) || mqd_take_varint(cursor, "records", &raw))
        return -1;
    uint32_t bytes = raw ? raw - 1 : 0, left = parser->frame_left - (uint32_t)(cursor->at - cursor->begin);
    if (bytes > left)
        return mqd_wire_wrong(cursor, "records", "longer than the rest of the response:", bytes);
    partition->records_bytes = parser->records_left = bytes;
    partition->diverging_epoch = partition->leader_id = partition->leader_epoch = -1;
    partition->diverging_end = -1;
    parser->partitions_left--;
    return 0;
}

static int take_partition_end(struct mqd_response_parser *parser, struct mqd_byte_cursor *cursor)
{
    struct mqd_parsed_partition *partition = &parser->partition;
    struct mqd_byte_cursor value;
    uint32_t tag_count, tag;
    if (mqd_take_varint(cursor, "tagged fields", &tag_count))
        return -1;
    for (uint32_t i = 0; i < tag_count; i++) {
        if (mqd_take_tag(cursor, &tag, &value))
            return -1;
        if (tag == 0 && (mqd_take_i32(&value, "diverging epoch", &partition->diverging_epoch) ||
                         mqd_take_i64(&value, "diverging end_offset", &partition->diverging_end) ||
                         mqd_skip_tags(&value, true) || mqd_tag_finished(&value, "diverging_epoch")))
            return -1;
        if (tag == 1 && (mqd_take_i32(&value, "leader_id", &partition->leader_id) ||
                         mqd_take_i32(&value, "leader_epoch", &partition->leader_epoch) ||
                         mqd_skip_tags(&value, true) || mqd_tag_finished(&value, "current_leader")))
            return -1;
    }
    return parser->partitions_left == 0 ? mqd_skip_tags(cursor, true) : 0; /* the topic's tags */
}

static int take_tail(struct mqd_response_parser *parser, struct mqd_byte_cursor *cursor)
{
    uint32_t tag_count, tag;
    struct mqd_byte_cursor value;
    if (mqd_take_varint(cursor, "tagged fields", &tag_count))
        return -1;
    /* node_endpoints: ignored, since the metadata has the addresses */
    for (uint32_t i = 0; i < tag_count; i++)
        if (mqd_take_tag(cursor, &tag, &value))
            return -1;
    uint32_t left = parser->frame_left - (uint32_t)(cursor->at - cursor->begin);
    return left == 0 ? 0 : mqd_wire_wrong(cursor, "Fetch", "a response with bytes after its end:", left);
}

static uint8_t next_phase(const struct mqd_response_parser *parser)
{
    return parser->partitions_left ? PHASE_PARTITION : parser->topics_left ? PHASE_TOPIC : PHASE_TAIL;
}

/* Parses one step other than records. Returns 0, or -1 if the step is incomplete or invalid; in
 * that case, the parser is unchanged. */
static int take_step(struct mqd_response_parser *parser, struct mqd_byte_cursor *cursor)
{
    struct mqd_response_parser saved = *parser;
    int result;
    switch (parser->phase) {
    case PHASE_HEAD:
        result = take_head(parser, cursor);
        break;
    case PHASE_TOPIC:
        result = take_topic(parser, cursor);
        break;
    case PHASE_PARTITION:
        result = take_partition(parser, cursor);
        break;
    case PHASE_PARTITION_END:
        result = take_partition_end(parser, cursor);
        break;
    default:
        result = take_tail(parser, cursor);
    }
    if (result)
        *parser = saved;
    return result;
}

static enum mqd_parsed_step on_step(struct mqd_response_parser *parser)
{
    switch (parser->phase) {
    case PHASE_HEAD:
        parser->phase = parser->topics_left ? PHASE_TOPIC : PHASE_TAIL;
        return MQD_PARSED_HEAD;
    case PHASE_TOPIC:
        parser->topics_left--;
        parser->phase = next_phase(parser);
        return MQD_PARSED_MORE; /* not reported: the caller continues with the next step */
    case PHASE_PARTITION:
        parser->phase = parser->records_left ? PHASE_RECORDS : PHASE_PARTITION_END;
        return MQD_PARSED_PARTITION;
    case PHASE_PARTITION_END:
        parser->phase = next_phase(parser);
        return MQD_PARSED_PARTITION_END;
    default:
        parser->phase = PHASE_OVER;
        return MQD_PARSED_END;
    }
}

enum mqd_parsed_step mqd_response_parser_next(struct mqd_response_parser *parser, const uint8_t *bytes,
                                              uint32_t size_bytes, uint32_t *taken)
{
    *taken = 0;
    for (;;) {
        uint32_t available = size_bytes - *taken < parser->frame_left ? size_bytes - *taken : parser->frame_left;
        if (parser->phase == PHASE_RECORDS)
            return available ? MQD_PARSED_RECORDS : MQD_PARSED_MORE;
        if (parser->phase == PHASE_OVER)
            return MQD_PARSED_END;
        bool complete = available == parser->frame_left || available >= MQD_PARSED_STEP_BYTES_MAX;
        struct mqd_byte_cursor cursor = mqd_cursor_over(bytes + *taken, available);
        if (take_step(parser, &cursor))
            return complete ? MQD_PARSED_INVALID : MQD_PARSED_MORE;
        uint32_t used = (uint32_t)(cursor.at - cursor.begin);
        bool is_topic = parser->phase == PHASE_TOPIC;
        parser->frame_left -= used;
        *taken += used;
        enum mqd_parsed_step step = on_step(parser);
        if (!is_topic)
            return step;
    }
}

void mqd_response_parser_records_taken(struct mqd_response_parser *parser, uint32_t count)
{
    parser->records_left -= count;
    parser->frame_left -= count;
    if (parser->records_left == 0)
        parser->phase = PHASE_PARTITION_END;
}
