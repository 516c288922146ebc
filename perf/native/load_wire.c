/* Bytes, frames and sockets of the load generator: just enough of Kafka's protocol (Produce v8,
 * Fetch v11, ListOffsets v1) to drive a broker. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "load.h"

void die(const char *what)
{
    fprintf(stderr, "load: %s: %s\n", what, strerror(errno));
    exit(1);
}

void fail(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fputs("load: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    exit(1);
}

int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

void *allocate(size_t size)
{
    void *bytes = calloc(1, size);
    if (!bytes)
        die("memory");
    return bytes;
}

/* ---- bytes ---- */

static void put(struct bytes *b, const void *bytes, size_t size)
{
    memcpy(b->at + b->size, bytes, size);
    b->size += size;
}
static void put8(struct bytes *b, int v)
{
    b->at[b->size++] = (uint8_t)v;
}
static void put16(struct bytes *b, int v)
{
    uint16_t n = htons((uint16_t)v);
    put(b, &n, 2);
}
static void put32(struct bytes *b, uint32_t v)
{
    uint32_t n = htonl(v);
    put(b, &n, 4);
}
static void put64(struct bytes *b, uint64_t v)
{
    put32(b, (uint32_t)(v >> 32));
    put32(b, (uint32_t)v);
}
static void put_text(struct bytes *b, const char *text)
{
    put16(b, (int)strlen(text));
    put(b, text, strlen(text));
}
static void put_varint(struct bytes *b, int64_t value)
{
    uint64_t v = (uint64_t)value << 1 ^ (uint64_t)(value >> 63);
    for (; v >= 0x80; v >>= 7)
        put8(b, (int)(v | 0x80));
    put8(b, (int)v);
}
uint32_t get32(const uint8_t *p)
{
    uint32_t n;
    memcpy(&n, p, 4);
    return ntohl(n);
}
uint64_t get64(const uint8_t *p)
{
    return (uint64_t)get32(p) << 32 | get32(p + 4);
}
static void set32(uint8_t *p, uint32_t v)
{
    v = htonl(v);
    memcpy(p, &v, 4);
}
void set64(uint8_t *p, uint64_t v)
{
    set32(p, (uint32_t)(v >> 32));
    set32(p + 4, (uint32_t)v);
}

static uint32_t crc32c(const uint8_t *p, size_t n)
{
    static uint32_t table[256];
    if (!table[1])
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t crc = i;
            for (int k = 0; k < 8; k++)
                crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
            table[i] = crc;
        }
    uint32_t crc = 0xffffffffu;
    while (n--)
        crc = crc >> 8 ^ table[(crc ^ *p++) & 255];
    return ~crc;
}

/* ---- batches ---- */

#define BATCH_HEADER_BYTES 61

static void put_record(struct bytes *b, int index, size_t value_bytes)
{
    uint8_t room[64];
    struct bytes head = {room, 0};
    put8(&head, 0);
    put_varint(&head, 0);
    put_varint(&head, index);
    put_varint(&head, -1);
    put_varint(&head, (int64_t)value_bytes);
    put_varint(b, (int64_t)(head.size + value_bytes + 1));
    put(b, head.at, head.size);
    for (size_t k = 0; k < value_bytes; k++)
        put8(b, 'a' + (int)(k * 7 + (size_t)index) % 26);
    put8(b, 0);
}

/* The value that makes a record of about record_bytes. */
static size_t value_bytes_for(size_t record_bytes)
{
    size_t overhead = record_bytes >= 8192 + 12 ? 12 : record_bytes >= 64 + 8 ? 9 : 7;
    return record_bytes > overhead ? record_bytes - overhead : 1;
}

static void put_batch(struct bytes *b, size_t batch_bytes, int records)
{
    size_t begin = b->size;
    uint64_t now_ms = (uint64_t)time(NULL) * 1000;
    put64(b, 0);
    put32(b, 0); /* length, below */
    put32(b, 0xffffffffu);
    put8(b, 2);
    put32(b, 0); /* crc, below */
    put16(b, 0);
    put32(b, (uint32_t)records - 1);
    put64(b, now_ms);
    put64(b, now_ms);
    put64(b, UINT64_MAX);
    put16(b, -1);
    put32(b, 0xffffffffu);
    put32(b, (uint32_t)records);
    size_t room = batch_bytes > BATCH_HEADER_BYTES ? batch_bytes - BATCH_HEADER_BYTES : 1;
    for (int i = 0; i < records; i++)
        put_record(b, i, value_bytes_for(room / (size_t)records));
    set32(b->at + begin + 8, (uint32_t)(b->size - begin - 12));
    set32(b->at + begin + 17, crc32c(b->at + begin + 21, b->size - begin - 21));
}

/* ---- frames ---- */

static struct bytes frame_begin(size_t room, int api, int version)
{
    struct bytes b = {allocate(room + 4096), 0};
    put32(&b, 0); /* length: frame_end */
    put16(&b, api);
    put16(&b, version);
    put32(&b, 1);
    put_text(&b, "load");
    return b;
}

static struct bytes frame_end(struct bytes b)
{
    set32(b.at, (uint32_t)b.size - 4);
    return b;
}

struct bytes produce_frame(const char *topic, int partition, size_t batch_bytes, int records, int acks)
{
    struct bytes b = frame_begin(batch_bytes + (size_t)records * 16, 0, 8);
    put16(&b, -1);
    put16(&b, acks);
    put32(&b, 30000);
    put32(&b, 1);
    put_text(&b, topic);
    put32(&b, 1);
    put32(&b, (uint32_t)partition);
    size_t length = b.size;
    put32(&b, 0);
    put_batch(&b, batch_bytes, records);
    set32(b.at + length, (uint32_t)(b.size - length - 4));
    return frame_end(b);
}

/* fetch offset, log start offset, bytes, no forgotten topics, no rack */
#define FETCH_OFFSET_FROM_END (8 + 8 + 4 + 4 + 2)

struct bytes fetch_frame(const char *topic, int partition, int bytes_max, int bytes_min, int wait_ms)
{
    struct bytes b = frame_begin(0, 1, 11);
    put32(&b, 0xffffffffu);
    put32(&b, (uint32_t)wait_ms);
    put32(&b, (uint32_t)bytes_min);
    put32(&b, (uint32_t)bytes_max);
    put8(&b, 0);
    put32(&b, 0);
    put32(&b, 0xffffffffu);
    put32(&b, 1);
    put_text(&b, topic);
    put32(&b, 1);
    put32(&b, (uint32_t)partition);
    put32(&b, 0xffffffffu);
    put64(&b, 0);
    put64(&b, UINT64_MAX);
    put32(&b, (uint32_t)bytes_max);
    put32(&b, 0);
    put_text(&b, "");
    return frame_end(b);
}

void fetch_frame_offset(struct bytes *frame, int64_t offset)
{
    set64(frame->at + frame->size - FETCH_OFFSET_FROM_END, (uint64_t)offset);
}

struct bytes log_end_frame(const char *topic)
{
    struct bytes b = frame_begin(0, 2, 1);
    put32(&b, 0xffffffffu);
    put32(&b, 1);
    put_text(&b, topic);
    put32(&b, 1);
    put32(&b, 0);
    put64(&b, UINT64_MAX);
    return frame_end(b);
}

/* ---- replies ---- */

int produce_reply_error(const uint8_t *reply, size_t size, size_t topic_bytes)
{
    size_t at = 4 + 4 + 2 + topic_bytes + 4 + 4; /* correlation id, topics, name, partitions, index */
    if (size < at + 2)
        fail("a Produce reply of %zu bytes is too short", size);
    return (int16_t)(reply[at] << 8 | reply[at + 1]);
}

struct fetched fetch_reply(const uint8_t *reply, size_t size, size_t topic_bytes)
{
    /* correlation id, throttle, error, session, topics, name, partitions */
    size_t at = 4 + 4 + 2 + 4 + 4 + 2 + topic_bytes + 4;
    size_t records_at = at + 4 + 2 + 8 + 8 + 8 + 4 + 4 + 4;
    if (size < records_at)
        fail("a Fetch reply of %zu bytes is too short", size);
    struct fetched fetched = {(int16_t)(reply[at + 4] << 8 | reply[at + 5]), get32(reply + records_at - 4),
                              reply + records_at};
    if (fetched.records_bytes == UINT32_MAX)
        fetched.records_bytes = 0;
    if (fetched.records_bytes != size - records_at)
        fail("a Fetch reply of %zu bytes announces %u bytes of records", size, fetched.records_bytes);
    return fetched;
}

int64_t next_offset(const uint8_t *records, uint32_t size, int64_t offset)
{
    for (uint32_t at = 0; at + BATCH_HEADER_BYTES <= size;) {
        uint32_t batch = get32(records + at + 8) + 12;
        if (at + batch > size)
            break;
        offset = (int64_t)get64(records + at) + (int32_t)get32(records + at + 23) + 1;
        at += batch;
    }
    return offset;
}

/* ---- sockets ---- */

int dial(int port)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;
    struct sockaddr_in to = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
    if (fd < 0 || connect(fd, (struct sockaddr *)&to, sizeof to))
        die("connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return fd;
}

void not_blocking(int fd)
{
    if (fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK))
        die("fcntl");
}

void send_all(int fd, const uint8_t *bytes, size_t size)
{
    while (size) {
        ssize_t n = send(fd, bytes, size, MSG_NOSIGNAL);
        if (n <= 0)
            die("send");
        bytes += n;
        size -= (size_t)n;
    }
}

void receive_all(int fd, uint8_t *bytes, size_t size)
{
    while (size) {
        ssize_t n = recv(fd, bytes, size, 0);
        if (n == 0)
            fail("the broker closed the connection");
        if (n < 0)
            die("receive");
        bytes += n;
        size -= (size_t)n;
    }
}

void receive_frame(int fd, struct room *room)
{
    uint8_t length[4];
    receive_all(fd, length, 4);
    room->size = get32(length);
    if (room->size > 64u << 20)
        fail("a reply of %u bytes is too long", room->size);
    if (room->size > room->capacity && !(room->at = realloc(room->at, room->capacity = room->size)))
        die("memory");
    receive_all(fd, room->at, room->size);
}
