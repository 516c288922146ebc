/* Load for peers with protocols of their own: one engine (stream_load.c), one file for each
 * protocol (stream_nats.c, stream_rabbitmq.c, stream_redis.c).
 *
 * One thread, two connections: one publishes, one reads. A record has a number; number n goes to
 * stream (n / STICKY) % streams, as a client that fills batches does.
 */
#ifndef MQD_PEERS_STREAM_LOAD_H
#define MQD_PEERS_STREAM_LOAD_H

#include "common.h"

#define STICKY 100
#define STREAMS_MAX 128
#define NAME_MAX_BYTES 64

struct buffer {
    uint8_t *at;
    size_t start, end, capacity;
};
struct link {
    int fd;
    bool reads;
    struct buffer in, out;
}; /* reads: it is the subscriber's */

/* Shared by all files; set by main before anything else. */
struct load {
    const char *topic;
    int streams;
    int64_t record_bytes;
    bool durable;
};
extern struct load load;

void stream_name(char name[NAME_MAX_BYTES], int stream);         /* TOPIC-0, TOPIC-1, ... */
void stream_of_name(const char *name, size_t size, int *stream); /* the reverse; fails if it is not one of ours */

/* Callbacks of the engine: a protocol calls them from take. */
void on_acknowledged(int64_t number);
void on_received(const uint8_t *record, size_t size);

uint8_t *buffer_room(struct buffer *buffer, size_t size); /* at its end; grows */
void buffer_add(struct buffer *buffer, const void *bytes, size_t size);
void buffer_text(struct buffer *buffer, const char *format, ...) __attribute__((format(printf, 2, 3)));
static inline size_t buffer_held(const struct buffer *buffer)
{
    return buffer->end - buffer->start;
}
static inline const uint8_t *buffer_first(const struct buffer *buffer)
{
    return buffer->at + buffer->start;
}

/* Blocking, for handshakes. */
void link_flush(struct link *link);
void link_need(struct link *link, size_t size); /* until `size` bytes have been received */

struct protocol {
    const char *name;
    void (*open)(struct link *);                     /* handshake of either kind of connection */
    void (*make)(struct link *, const char *stream); /* blocking; fails with the peer's reason */
    void (*drop)(struct link *, const char *stream);
    void (*publisher)(struct link *); /* before the first publish */
    void (*publish)(struct link *, int64_t number, int stream, const uint8_t *record, size_t size);
    /* makes everything published so far ready to send: closes an open frame; NULL: nothing to do */
    void (*published)(struct link *);
    void (*subscriber)(struct link *); /* all streams from their beginnings */
    /* one message out of `in`; false: it is not whole yet. May add to `out`. */
    bool (*take)(struct link *);
};

extern const struct protocol nats, rabbitmq, redis;

#endif
