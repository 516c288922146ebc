/* RabbitMQ's stream protocol: records go in Publish frames of up to STICKY, like the Java client's
 * batches of 100; confirms have the records' numbers; reading is by credit, one for each chunk
 * received. Big endian throughout. RabbitMQ's PROTOCOL.adoc describes the protocol.
 */
#include "stream_load.h"

#include <stdio.h>
#include <string.h>

enum {
    DECLARE_PUBLISHER = 1,
    PUBLISH = 2,
    PUBLISH_CONFIRM = 3,
    PUBLISH_ERROR = 4,
    SUBSCRIBE = 7,
    DELIVER = 8,
    CREDIT = 9,
    CREATE = 13,
    DELETE = 14,
    METADATA_UPDATE = 16,
    PEER_PROPERTIES = 17,
    SASL_HANDSHAKE = 18,
    SASL_AUTHENTICATE = 19,
    TUNE = 20,
    OPEN = 21,
    HEARTBEAT = 23,
    RESPONSE = 0x8000,
};
#define VERSION 1
#define OK 1
#define CREDIT_FIRST 10
#define CHUNK_HEAD 48
#define FRAME_BYTES_MAX ((size_t)64 << 20)

/* the Publish frame that is being filled; frame: its place in `out`, from out.start */
static struct {
    size_t frame;
    int stream;
    uint32_t records;
    bool open;
} publishing;
static bool responded;
static uint16_t response_code;

static uint64_t get(const uint8_t *at, int bytes)
{
    uint64_t value = 0;
    while (bytes--)
        value = value << 8 | *at++;
    return value;
}

static void write_number(uint8_t *at, uint64_t value, int bytes)
{
    while (bytes--) {
        at[bytes] = (uint8_t)value;
        value >>= 8;
    }
}

static void put(struct buffer *out, uint64_t value, int bytes)
{
    uint8_t word[8];
    write_number(word, value, bytes);
    buffer_add(out, word, (size_t)bytes);
}

static void put_string(struct buffer *out, const char *text)
{
    put(out, strlen(text), 2);
    buffer_add(out, text, strlen(text));
}

/* Begins a frame; its size comes first and is filled in by finish(). Returns its offset from out.start. */
static size_t begin(struct buffer *out, int key)
{
    size_t place = buffer_held(out);
    put(out, 0, 4);
    put(out, (uint64_t)key, 2);
    put(out, VERSION, 2);
    return place;
}

static void finish(struct buffer *out, size_t place)
{
    write_number(out->at + out->start + place, buffer_held(out) - place - 4, 4);
}

static void deliver(struct link *link, const uint8_t *at, size_t size)
{
    if (size < 1 + CHUNK_HEAD)
        fail("rabbitmq: a chunk of %zu bytes", size);
    uint8_t subscription = *at++;
    uint64_t type = get(at + 1, 1), entries = get(at + 2, 2), bytes = get(at + 36, 4);
    const uint8_t *entry = at + CHUNK_HEAD, *end = entry + bytes;
    if (bytes > size - 1 - CHUNK_HEAD)
        fail("rabbitmq: a chunk says %llu bytes and has %zu", (unsigned long long)bytes, size - 1 - CHUNK_HEAD);
    for (; type == 0 && entries; entries--) {
        if (end - entry < 4 || *entry & 0x80 || get(entry, 4) > (uint64_t)(end - entry - 4))
            fail("rabbitmq: an entry that does not fit its chunk, or a sub-batch, which was not sent");
        on_received(entry + 4, get(entry, 4));
        entry += 4 + get(entry, 4);
    }
    size_t place = begin(&link->out, CREDIT);
    put(&link->out, subscription, 1);
    put(&link->out, 1, 2);
    finish(&link->out, place);
}

static void confirm(const uint8_t *at, size_t size)
{
    uint64_t count = size >= 5 ? get(at + 1, 4) : 0;
    if (size < 5 || count > (size - 5) / 8)
        fail("rabbitmq: confirms that do not fit their frame");
    for (uint64_t index = 0; index < count; index++)
        on_acknowledged((int64_t)get(at + 5 + 8 * index, 8) - STREAMS_MAX);
}

static bool rabbitmq_take(struct link *link)
{
    if (buffer_held(&link->in) < 8)
        return false;
    const uint8_t *first = buffer_first(&link->in);
    size_t size = get(first, 4);
    if (size < 4 || size > FRAME_BYTES_MAX)
        fail("rabbitmq: a frame of %zu bytes", size);
    if (buffer_held(&link->in) < 4 + size)
        return false;
    int key = (int)get(first + 4, 2);
    switch (key) {
    case DELIVER:
        deliver(link, first + 8, size - 4);
        break;
    case PUBLISH_CONFIRM:
        confirm(first + 8, size - 4);
        break;
    case PUBLISH_ERROR:
        fail("rabbitmq: records were refused");
    case TUNE:
    case HEARTBEAT:
        break;
    case METADATA_UPDATE:
        fail("rabbitmq: a stream went away");
    default:
        if (key == (RESPONSE | CREDIT))
            fail("rabbitmq: credit was refused");
        if (!(key & RESPONSE) || size < 10)
            fail("rabbitmq: a frame of kind %d", key);
        responded = true;
        response_code = (uint16_t)get(first + 12, 2);
    }
    link->in.start += 4 + size;
    return true;
}

static size_t begin_request(struct link *link, int key)
{
    size_t place = begin(&link->out, key);
    put(&link->out, 1, 4); /* correlation id: one request at a time */
    return place;
}

static void wait_response(struct link *link, size_t place, const char *what)
{
    finish(&link->out, place);
    for (responded = false; !responded;)
        if (!rabbitmq_take(link))
            link_need(link, buffer_held(&link->in) + 1);
    if (response_code != OK)
        fail("rabbitmq: %s: response code %d", what, response_code);
}

static void rabbitmq_open(struct link *link)
{
    size_t place = begin_request(link, PEER_PROPERTIES);
    put(&link->out, 0, 4);
    wait_response(link, place, "peer properties");
    place = begin_request(link, SASL_HANDSHAKE);
    wait_response(link, place, "SASL handshake");
    place = begin_request(link, SASL_AUTHENTICATE);
    put_string(&link->out, "PLAIN");
    put(&link->out, 12, 4);
    buffer_add(&link->out, "\0guest\0guest", 12); /* RabbitMQ's own user for loopback */
    wait_response(link, place, "authentication");
    place = begin(&link->out, TUNE); /* the server sends its own first; ours: frames of any size, no heartbeats */
    put(&link->out, 0, 4);
    put(&link->out, 0, 4);
    finish(&link->out, place);
    place = begin_request(link, OPEN);
    put_string(&link->out, "/");
    wait_response(link, place, "open");
}

static void rabbitmq_make(struct link *link, const char *stream)
{
    size_t place = begin_request(link, CREATE);
    put_string(&link->out, stream);
    put(&link->out, 0, 4);
    wait_response(link, place, "create");
}

static void rabbitmq_drop(struct link *link, const char *stream)
{
    size_t place = begin_request(link, DELETE);
    put_string(&link->out, stream);
    wait_response(link, place, "delete");
}

static void rabbitmq_publisher(struct link *link)
{
    char name[NAME_MAX_BYTES];
    for (int stream = 0; stream < load.streams; stream++) {
        stream_name(name, stream);
        size_t place = begin_request(link, DECLARE_PUBLISHER);
        put(&link->out, (uint64_t)stream, 1);
        put_string(&link->out, "");
        put_string(&link->out, name);
        wait_response(link, place, "declare publisher");
    }
}

static void rabbitmq_published(struct link *link)
{
    if (!publishing.open)
        return;
    write_number(link->out.at + link->out.start + publishing.frame + 9, publishing.records, 4);
    finish(&link->out, publishing.frame);
    publishing.open = false;
}

/* Publishing ids start above the warm-up's, which all are below STREAMS_MAX. */
static void rabbitmq_publish(struct link *link, int64_t number, int stream, const uint8_t *record, size_t size)
{
    if (publishing.open && (publishing.stream != stream || publishing.records == STICKY))
        rabbitmq_published(link);
    if (!publishing.open) {
        publishing.frame = begin(&link->out, PUBLISH);
        publishing.stream = stream;
        publishing.records = 0;
        publishing.open = true;
        put(&link->out, (uint64_t)stream, 1);
        put(&link->out, 0, 4);
    }
    put(&link->out, (uint64_t)(number + STREAMS_MAX), 8);
    put(&link->out, size, 4);
    buffer_add(&link->out, record, size);
    publishing.records++;
}

static void rabbitmq_subscriber(struct link *link)
{
    char name[NAME_MAX_BYTES];
    for (int stream = 0; stream < load.streams; stream++) {
        stream_name(name, stream);
        size_t place = begin_request(link, SUBSCRIBE);
        put(&link->out, (uint64_t)stream, 1);
        put_string(&link->out, name);
        put(&link->out, 1, 2); /* from the first */
        put(&link->out, CREDIT_FIRST, 2);
        put(&link->out, 0, 4);
        wait_response(link, place, "subscribe");
    }
}

const struct protocol rabbitmq = {"rabbitmq",         rabbitmq_open,       rabbitmq_make,
                                  rabbitmq_drop,      rabbitmq_publisher,  rabbitmq_publish,
                                  rabbitmq_published, rabbitmq_subscriber, rabbitmq_take};
