/* The requests other than Produce that a C program needs: finding a topic, and waiting for records.
 * Programs with their own encoder (Python) use mqd_client_submit.
 *
 * Metadata 12 and Fetch 13, because both name topics by id. The broker's responses are parsed with
 * every length checked; unused fields are skipped.
 */
#include "client/internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/big_endian.h"
#include "base/error.h"
#include "base/varint_put.h"
#include "wire/cursor.h"

enum { API_FETCH = 1, API_METADATA = 3, FETCH_VERSION = 13, METADATA_VERSION = 12 };
#define HEAD_BYTES 80 /* room for a request's header: 10 bytes, the client id, one byte (no tagged fields) */

static uint8_t *put_head(uint8_t *at, const struct mqd_client *client, uint16_t api_key, uint16_t version,
                         uint32_t correlation_id)
{
    size_t size = strlen(client->client_id);
    at = mqd_put_be16(at, api_key);
    at = mqd_put_be16(at, version);
    at = mqd_put_be32(at, correlation_id);
    at = mqd_put_be16(at, (uint16_t)size);
    at = (uint8_t *)memcpy(at, client->client_id, size) + size;
    *at++ = 0;
    return at;
}

static int64_t now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000ll + now.tv_nsec / 1000;
}

/* Takes the response to `correlation_id` out of the queue. Returns NULL if it has not arrived
 * yet. */
static struct mqd_response *take_response(struct mqd_client *client, uint32_t correlation_id)
{
    for (struct mqd_response **link = &client->first_response; *link; link = &(*link)->next) {
        struct mqd_response *response = *link;
        if (mqd_get_be32(response->bytes) != correlation_id)
            continue;
        *link = response->next;
        if (!response->next)
            client->last_response = link;
        return response;
    }
    return NULL;
}

static struct mqd_response *await(struct mqd_client *client, uint32_t correlation_id, int64_t timeout_us)
{
    int64_t deadline = now_us() + timeout_us;
    for (;;) {
        if (mqd_client_poll(client))
            return NULL;
        struct mqd_response *response = take_response(client, correlation_id);
        if (response)
            return response;
        int64_t left_us = deadline - now_us();
        if (left_us <= 0) {
            mqd_error_set_static(ETIMEDOUT, "the broker has not answered in time");
            return NULL;
        }
        if (mqd_client_wait(client, left_us) < 0)
            return NULL;
    }
}

/* ---- Metadata ---- */

static int skip_array(struct mqd_byte_cursor *cursor, uint32_t element_bytes)
{
    int32_t count;
    if (mqd_take_count(cursor, true, "nodes", element_bytes, &count))
        return -1;
    cursor->at += (size_t)count * element_bytes;
    return 0;
}

static int skip_broker(struct mqd_byte_cursor *cursor)
{
    int32_t number;
    struct mqd_text text;
    return mqd_take_i32(cursor, "node id", &number) || mqd_take_text(cursor, true, false, "host", &text) ||
           mqd_take_i32(cursor, "port", &number) || mqd_take_text(cursor, true, true, "rack", &text) ||
           mqd_skip_tags(cursor, true);
}

static int skip_partition(struct mqd_byte_cursor *cursor)
{
    int16_t error;
    int32_t number;
    return mqd_take_i16(cursor, "partition's error", &error) || mqd_take_i32(cursor, "partition index", &number) ||
           mqd_take_i32(cursor, "leader", &number) || mqd_take_i32(cursor, "leader epoch", &number) ||
           skip_array(cursor, 4) || skip_array(cursor, 4) || skip_array(cursor, 4) || mqd_skip_tags(cursor, true);
}

static int parse_topic(struct mqd_byte_cursor *cursor, struct mqd_client_topic *out)
{
    int16_t error;
    int8_t internal;
    int32_t operations;
    struct mqd_text name;
    if (mqd_take_i16(cursor, "topic's error", &error) || mqd_take_text(cursor, true, true, "topic name", &name))
        return -1;
    out->error = error;
    if (mqd_cursor_left(cursor) < sizeof out->topic_id)
        return mqd_wire_short(cursor, "topic id", sizeof out->topic_id);
    memcpy(out->topic_id, cursor->at, sizeof out->topic_id);
    cursor->at += sizeof out->topic_id;
    if (mqd_take_i8(cursor, "is internal", &internal) ||
        mqd_take_count(cursor, true, "partitions", 18, &out->partition_count))
        return -1;
    for (int32_t i = 0; i < out->partition_count; i++)
        if (skip_partition(cursor))
            return -1;
    return mqd_take_i32(cursor, "authorized operations", &operations) || mqd_skip_tags(cursor, true) ? -1 : 0;
}

static int parse_metadata(const struct mqd_response *response, struct mqd_client_topic *out)
{
    struct mqd_byte_cursor cursor = mqd_cursor_over(response->bytes, response->size_bytes);
    struct mqd_text text;
    int32_t number, count;
    if (mqd_take_i32(&cursor, "correlation id", &number) || mqd_skip_tags(&cursor, true) ||
        mqd_take_i32(&cursor, "throttle time", &number) || mqd_take_count(&cursor, true, "brokers", 11, &count))
        return -1;
    for (int32_t i = 0; i < count; i++)
        if (skip_broker(&cursor))
            return -1;
    if (mqd_take_text(&cursor, true, true, "cluster id", &text) || mqd_take_i32(&cursor, "controller", &number) ||
        mqd_take_count(&cursor, true, "topics", 26, &count))
        return -1;
    if (count != 1)
        return mqd_error_set(MQD_E_CORRUPT, "the broker answered for %d topics instead of one", count);
    return parse_topic(&cursor, out);
}

int mqd_client_find_topic(struct mqd_client *client, const char *name, uint32_t correlation_id, int64_t timeout_us,
                          struct mqd_client_topic *out)
{
    uint8_t frame[HEAD_BYTES + MQD_TOPIC_NAME_BYTES_MAX + 32];
    size_t size = strlen(name);
    if (size == 0 || size > MQD_TOPIC_NAME_BYTES_MAX)
        return mqd_error_set(MQD_E_INVALID, "a topic's name has 1 to %d bytes, not %zu", MQD_TOPIC_NAME_BYTES_MAX,
                             size);
    uint8_t *at = put_head(frame, client, API_METADATA, METADATA_VERSION, correlation_id);
    *at++ = 2; /* one topic, by name */
    memset(at, 0, 16);
    at = mqd_put_unsigned_varint(at + 16, size + 1);
    at = (uint8_t *)memcpy(at, name, size) + size;
    *at++ = 0;
    *at++ = 1; /* allow the broker to create the topic, if it is configured to */
    *at++ = 0;
    *at++ = 0;
    if (mqd_client_submit(client, frame, (uint32_t)(at - frame)))
        return -1;
    struct mqd_response *response = await(client, correlation_id, timeout_us);
    if (!response)
        return -1;
    int result = parse_metadata(response, out);
    free(response);
    return result;
}

/* ---- Fetch ---- */

static uint8_t *put_partition(uint8_t *at, const struct mqd_client_position *position)
{
    at = mqd_put_be32(at, (uint32_t)position->partition_index);
    at = mqd_put_be32(at, UINT32_MAX); /* any leader epoch */
    at = mqd_put_be64(at, (uint64_t)position->offset);
    at = mqd_put_be32(at, UINT32_MAX); /* no last fetched epoch */
    at = mqd_put_be64(at, UINT64_MAX); /* log start offset: only a follower has one */
    at = mqd_put_be32(at, INT32_MAX);  /* partition_max_bytes */
    *at++ = 0;
    return at;
}

/* Returns how many consecutive positions, including the first, have the first one's topic; they
 * become one topic of the request. */
static uint32_t count_same_topic(const struct mqd_client_position *positions, uint32_t count)
{
    uint32_t same_count = 1;
    while (same_count < count &&
           memcmp(positions[same_count].topic_id, positions[0].topic_id, sizeof positions[0].topic_id) == 0)
        same_count++;
    return same_count;
}

int mqd_client_park(struct mqd_client *client, const struct mqd_client_position *positions, uint32_t count,
                    int8_t isolation_level, int32_t wait_ms, uint32_t correlation_id)
{
    uint32_t topic_count = 0;
    if (count == 0 || count > 100000)
        return mqd_error_set(MQD_E_INVALID, "cannot wait for %u partitions; 1 to 100000 are allowed", count);
    for (uint32_t i = 0; i < count; i += count_same_topic(positions + i, count - i))
        topic_count++;
    uint8_t *frame = malloc(HEAD_BYTES + 40 + (size_t)topic_count * 22 + (size_t)count * 33), *at = frame;
    if (!frame)
        return mqd_error_set_static(ENOMEM, "out of memory for a request");
    at = put_head(at, client, API_FETCH, FETCH_VERSION, correlation_id);
    at = mqd_put_be32(at, UINT32_MAX); /* a consumer */
    at = mqd_put_be32(at, (uint32_t)wait_ms);
    at = mqd_put_be32(at, 1); /* minimum: one new byte ends the wait */
    at = mqd_put_be32(at, 0); /* maximum: the response has no records */
    *at++ = (uint8_t)isolation_level;
    at = mqd_put_be32(at, 0); /* no session */
    at = mqd_put_be32(at, UINT32_MAX);
    at = mqd_put_unsigned_varint(at, topic_count + 1);
    for (uint32_t i = 0; i < count;) {
        uint32_t same_count = count_same_topic(positions + i, count - i);
        at = (uint8_t *)memcpy(at, positions[i].topic_id, 16) + 16;
        at = mqd_put_unsigned_varint(at, same_count + 1);
        for (uint32_t end = i + same_count; i < end; i++)
            at = put_partition(at, &positions[i]);
        *at++ = 0;
    }
    *at++ = 1; /* no forgotten topics */
    *at++ = 1; /* rack id: empty */
    *at++ = 0;
    int result = mqd_client_submit(client, frame, (uint32_t)(at - frame));
    free(frame);
    if (result == 0)
        mqd_client_flush(client);
    return result;
}
