/* Redis Streams: XADD pipelined, XREAD BLOCK over all streams. RESP 2.
 *
 * Replies are parsed token by token, so that a reply of megabytes is never scanned twice: `left` has
 * the number of elements that each open array still lacks. An XREAD reply is [[key, [[id, [field,
 * value]], ...]], ...]: a bulk string's depth and position determine what it is.
 */
#include "stream_load.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEPTH_MAX 8
#define ID_BYTES_MAX 48
#define READ_COUNT 1000

static struct {
    int depth;
    int64_t left[DEPTH_MAX];
    int stream;
    int64_t acknowledged;
    char last_id[STREAMS_MAX][ID_BYTES_MAX];
} redis_state;

static const uint8_t *line_end(const struct buffer *buffer)
{
    const uint8_t *found = memchr(buffer_first(buffer), '\n', buffer_held(buffer));
    return found && found > buffer_first(buffer) && found[-1] == '\r' ? found : NULL;
}

static void send_read(struct link *link)
{
    char name[NAME_MAX_BYTES];
    buffer_text(&link->out,
                "*%d\r\n$5\r\nXREAD\r\n$5\r\nCOUNT\r\n$%d\r\n%d\r\n$5\r\nBLOCK\r\n$1\r\n0\r\n$7\r\nSTREAMS\r\n",
                6 + 2 * load.streams, READ_COUNT > 999 ? 4 : 3, READ_COUNT);
    for (int stream = 0; stream < load.streams; stream++) {
        stream_name(name, stream);
        buffer_text(&link->out, "$%zu\r\n%s\r\n", strlen(name), name);
    }
    for (int stream = 0; stream < load.streams; stream++)
        buffer_text(&link->out, "$%zu\r\n%s\r\n", strlen(redis_state.last_id[stream]), redis_state.last_id[stream]);
}

/* An element is complete: so is each array whose last element it was. */
static void element_done(struct link *link)
{
    while (redis_state.depth && --redis_state.left[redis_state.depth - 1] == 0)
        redis_state.depth--;
    if (!redis_state.depth)
        send_read(link);
}

static void bulk(const uint8_t *bytes, size_t size)
{
    int depth = redis_state.depth;
    int64_t left = depth ? redis_state.left[depth - 1] : 0;
    if (depth == 2)
        stream_of_name((const char *)bytes, size, &redis_state.stream);
    else if (depth == 4) {
        if (size >= ID_BYTES_MAX)
            fail("an id of %zu bytes", size);
        memcpy(redis_state.last_id[redis_state.stream], bytes, size);
        redis_state.last_id[redis_state.stream][size] = 0;
    } else if (depth == 5 && left == 1)
        on_received(bytes, size);
}

/* `depth` and `left` are the reading connection's; the publisher's replies are never arrays. */
static bool redis_take(struct link *link)
{
    const uint8_t *end = line_end(&link->in), *first = buffer_first(&link->in);
    if (!end)
        return false;
    size_t head = (size_t)(end - first) + 1;
    int64_t number = strtoll((const char *)first + 1, NULL, 10);
    switch (*first) {
    case '-':
        fail("redis: %.*s", (int)(end - first) - 1, first);
    case '*':
        if (number < 1 || redis_state.depth == DEPTH_MAX || !link->reads)
            fail("redis: an array of %lld elements, %d deep", (long long)number, redis_state.depth);
        redis_state.left[redis_state.depth++] = number;
        link->in.start += head;
        return true;
    case '$':
        if (number < 0 || (size_t)number > RECORD_BYTES_MAX)
            fail("redis: a string of %lld bytes", (long long)number);
        if (buffer_held(&link->in) < head + (size_t)number + 2)
            return false;
        break;
    case '+':
    case ':':
        number = -2;
        break;
    default:
        fail("redis: not RESP: %02x", *first);
    }
    bool array_member = link->reads && redis_state.depth;
    if (array_member)
        bulk(first + head, (size_t)number);
    else
        on_acknowledged(redis_state.acknowledged++);
    link->in.start += head + (size_t)(number + 2);
    if (array_member)
        element_done(link);
    return true;
}

static void redis_open(struct link *link)
{
    buffer_text(&link->out, "PING\r\n");
    link_need(link, 7);
    if (memcmp(buffer_first(&link->in), "+PONG\r\n", 7))
        fail("redis: %.*s", (int)buffer_held(&link->in) - 2, buffer_first(&link->in));
    link->in.start += 7;
}

/* the first XADD creates the stream */
static void redis_make(struct link *link, const char *stream)
{
    (void)link, (void)stream;
}

static void redis_drop(struct link *link, const char *stream)
{
    buffer_text(&link->out, "UNLINK %s\r\n", stream);
    link_need(link, 4);
    link->in.start = link->in.end;
}

static void redis_publisher(struct link *link)
{
    (void)link;
    redis_state.acknowledged = -load.streams; /* one record to each stream comes before number 0 */
}

static void redis_publish(struct link *link, int64_t number, int stream, const uint8_t *record, size_t size)
{
    (void)number; /* replies come in the order of the commands */
    char name[NAME_MAX_BYTES];
    stream_name(name, stream);
    buffer_text(&link->out, "*5\r\n$4\r\nXADD\r\n$%zu\r\n%s\r\n$1\r\n*\r\n$1\r\nv\r\n$%zu\r\n", strlen(name), name,
                size);
    buffer_add(&link->out, record, size);
    buffer_add(&link->out, "\r\n", 2);
}

static void redis_subscriber(struct link *link)
{
    for (int stream = 0; stream < load.streams; stream++)
        strcpy(redis_state.last_id[stream], "0");
    send_read(link);
}

const struct protocol redis = {"redis",       redis_open, redis_make,       redis_drop, redis_publisher,
                               redis_publish, NULL,       redis_subscriber, redis_take};
