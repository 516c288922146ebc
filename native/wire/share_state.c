/* Bodies of ReadShareGroupState and WriteShareGroupState: see wire/share_state.h. */
#include "wire/share_state.h"

#include "wire/buffer.h"
#include "wire/cursor.h"

#define PARTITION_BYTES_MIN (4 + 2 + 1 + 1)
#define RUN_BYTES_MIN (8 + 8 + 1 + 2 + 1)
#define EPOCH_BYTES (4 + 8 + 1)

/* ---- requests ---- */

static void put_head(struct mqd_buffer *buffer, const struct mqd_share_partition_id *id)
{
    mqd_put_text(buffer, true, id->group_id);
    mqd_put_count(buffer, true, 1);
    mqd_put_bytes(buffer, id->topic_id, sizeof id->topic_id);
    mqd_put_count(buffer, true, 1);
    mqd_put_i32(buffer, id->partition_index);
}

/* Appends the empty tagged fields of the partition, the topic and the body. */
static void put_tail(struct mqd_buffer *buffer)
{
    for (int level = 0; level < 3; level++)
        mqd_put_no_tags(buffer, true);
}

static uint32_t varint_bytes(uint32_t value)
{
    uint32_t count = 1;
    for (; value > 127; value >>= 7)
        count++;
    return count;
}

void mqd_share_encode_read(struct mqd_buffer *buffer, const struct mqd_share_partition_id *id, int32_t leader_epoch,
                           const struct mqd_share_epoch *epochs, uint32_t epoch_count)
{
    put_head(buffer, id);
    mqd_put_i32(buffer, leader_epoch);
    if (!epoch_count) {
        put_tail(buffer);
        return;
    }
    mqd_put_varint(buffer, 1);
    mqd_put_varint(buffer, MQD_SHARE_EPOCHS_TAG);
    mqd_put_varint(buffer, varint_bytes(epoch_count + 1) + epoch_count * EPOCH_BYTES);
    mqd_put_count(buffer, true, (int32_t)epoch_count);
    for (uint32_t i = 0; i < epoch_count; i++) {
        mqd_put_i32(buffer, epochs[i].epoch);
        mqd_put_i64(buffer, epochs[i].start);
        mqd_put_no_tags(buffer, true);
    }
    for (int level = 0; level < 2; level++)
        mqd_put_no_tags(buffer, true);
}

void mqd_share_write_begin(struct mqd_buffer *buffer, const struct mqd_share_partition_id *id,
                           const struct mqd_share_write *write)
{
    put_head(buffer, id);
    mqd_put_i32(buffer, write->state_epoch);
    mqd_put_i32(buffer, write->leader_epoch);
    mqd_put_i64(buffer, write->start);
    mqd_put_i32(buffer, write->complete_count);
    mqd_put_count(buffer, true, (int32_t)write->run_count);
}

void mqd_share_write_run(struct mqd_buffer *buffer, const struct mqd_share_state_run *run)
{
    uint8_t state = (uint8_t)run->state;
    mqd_put_i64(buffer, run->first);
    mqd_put_i64(buffer, run->last);
    mqd_put_bytes(buffer, &state, 1);
    mqd_put_i16(buffer, run->count);
    mqd_put_no_tags(buffer, true);
}

void mqd_share_write_end(struct mqd_buffer *buffer)
{
    put_tail(buffer);
}

/* ---- responses ---- */

static int take_count_of_one(struct mqd_byte_cursor *cursor, const char *field, uint32_t bytes_min)
{
    int32_t count;
    if (mqd_take_count(cursor, true, field, bytes_min, &count))
        return -1;
    return count == 1 ? 0 : mqd_wire_wrong(cursor, field, "not exactly one, but", count);
}

static int take_run(struct mqd_byte_cursor *cursor, struct mqd_share_state_run *out)
{
    int8_t state;
    if (mqd_take_i64(cursor, "first_offset", &out->first) || mqd_take_i64(cursor, "last_offset", &out->last) ||
        mqd_take_i8(cursor, "delivery_state", &state) || mqd_take_i16(cursor, "delivery_count", &out->count))
        return -1;
    out->state = state;
    return mqd_skip_tags(cursor, true);
}

static int take_head(struct mqd_byte_cursor *cursor, const struct mqd_share_partition_id *id)
{
    struct mqd_topic_key topic;
    int32_t partition_index;
    if (take_count_of_one(cursor, "results", 16 + 1 + 1) || mqd_take_topic_key(cursor, true, true, &topic) ||
        take_count_of_one(cursor, "partitions", PARTITION_BYTES_MIN) ||
        mqd_take_i32(cursor, "partition", &partition_index))
        return -1;
    if (memcmp(topic.topic_id, id->topic_id, sizeof id->topic_id) != 0 || partition_index != id->partition_index)
        return mqd_wire_wrong(cursor, "partition", "that of another share-partition:", partition_index);
    return 0;
}

int mqd_share_response_parse(const uint8_t *body, uint32_t size_bytes, int api_key,
                             const struct mqd_share_partition_id *id, struct mqd_share_response *out)
{
    struct mqd_byte_cursor cursor = mqd_cursor_over(body, size_bytes);
    struct mqd_text message;
    *out = (struct mqd_share_response){0};
    if (take_head(&cursor, id) || mqd_take_i16(&cursor, "error_code", &out->error) ||
        mqd_take_text(&cursor, true, true, "error_message", &message))
        return -1;
    if (api_key == MQD_SHARE_READ) {
        if (mqd_take_i32(&cursor, "state_epoch", &out->state_epoch) ||
            mqd_take_i64(&cursor, "start_offset", &out->start) ||
            mqd_take_count(&cursor, true, "state_batches", RUN_BYTES_MIN, &out->run_count))
            return -1;
        out->cursor = cursor;
        struct mqd_share_state_run run;
        for (int32_t i = 0; i < out->run_count; i++)
            if (take_run(&cursor, &run))
                return -1;
    }
    for (int level = 0; level < 3; level++)
        if (mqd_skip_tags(&cursor, true))
            return -1;
    return cursor.at == cursor.end
               ? 0
               : mqd_wire_wrong(&cursor, "results", "followed by unexpected bytes:", cursor.end - cursor.at);
}

int mqd_share_response_run(struct mqd_share_response *response, struct mqd_share_state_run *out)
{
    if (response->run_count <= 0)
        return mqd_wire_misused("ReadShareGroupState: no further state batch here");
    response->run_count--;
    return take_run(&response->cursor, out);
}
