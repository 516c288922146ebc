/* The engine: see stream_load.h and, for what is measured, common.h and rdkafka_load.c, whose
 * arguments and JSON it shares.
 *
 *   create | delete | ping                 all streams of TOPIC
 *   produce | consume | latency            as in rdkafka_load; at most WINDOW records are unacknowledged
 */
#define _GNU_SOURCE
#include "stream_load.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#define STALL_NS ((int64_t)20 * 1000000000)
#define SLICE_NS 100000
#define OUT_BYTES_MAX ((size_t)1 << 20) /* unsent bytes above this are sent before more is published */
#define READ_BYTES ((size_t)256 << 10)
#define READS_OF_A_TURN 8                    /* then it is the other connection's turn */
#define READER_START_NS ((int64_t)300000000) /* the reader is waiting by then */

struct load load;
static const struct protocol *protocol;
static int64_t acknowledged_count, received_count, last_acknowledged_ns, last_received_ns, first_received_ns,
    warm_until_ns = INT64_MAX;
static int64_t began_ns, rate;
static struct samples acknowledged, consumed, late;

/* ---- bytes ---- */

uint8_t *buffer_room(struct buffer *buffer, size_t size)
{
    if (buffer->start == buffer->end)
        buffer->start = buffer->end = 0;
    if (buffer->end + size > buffer->capacity && buffer->start) {
        memmove(buffer->at, buffer->at + buffer->start, buffer_held(buffer));
        buffer->end -= buffer->start;
        buffer->start = 0;
    }
    if (buffer->end + size > buffer->capacity) {
        buffer->capacity = (buffer->end + size) * 2;
        buffer->at = realloc(buffer->at, buffer->capacity);
        if (!buffer->at)
            fail("out of memory: %zu bytes", buffer->capacity);
    }
    return buffer->at + buffer->end;
}

void buffer_add(struct buffer *buffer, const void *bytes, size_t size)
{
    memcpy(buffer_room(buffer, size), bytes, size);
    buffer->end += size;
}

void buffer_text(struct buffer *buffer, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    char text[1024];
    int size = vsnprintf(text, sizeof text, format, list);
    va_end(list);
    if (size < 0 || (size_t)size >= sizeof text)
        fail("a command is too long");
    buffer_add(buffer, text, (size_t)size);
}

void stream_name(char name[NAME_MAX_BYTES], int stream)
{
    snprintf(name, NAME_MAX_BYTES, "%s-%d", load.topic, stream);
}

void stream_of_name(const char *name, size_t size, int *stream)
{
    size_t prefix = strlen(load.topic) + 1;
    char digits[8] = "";
    if (size > prefix && size - prefix < sizeof digits)
        memcpy(digits, name + prefix, size - prefix);
    *stream = atoi(digits);
    if (!*digits || *stream < 0 || *stream >= load.streams)
        fail("records of a stream that was not requested: %.*s", (int)size, name);
}

/* ---- connections ---- */

static void link_open(struct link *link, int port)
{
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    link->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (link->fd < 0 || connect(link->fd, (struct sockaddr *)&address, sizeof address))
        fail("cannot connect to 127.0.0.1:%d: %s", port, strerror(errno));
    int one = 1;
    setsockopt(link->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    protocol->open(link);
}

/* Sends what the socket takes without waiting. True: something was sent. */
static bool link_send(struct link *link)
{
    bool progress = false;
    while (buffer_held(&link->out)) {
        ssize_t sent = send(link->fd, buffer_first(&link->out), buffer_held(&link->out), MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno == EAGAIN || errno == EINTR)
                return progress;
            fail("the peer closed the connection while records were sent: %s", strerror(errno));
        }
        link->out.start += (size_t)sent;
        progress = true;
    }
    return progress;
}

static bool link_receive(struct link *link)
{
    uint8_t *room = buffer_room(&link->in, READ_BYTES);
    ssize_t got = recv(link->fd, room, READ_BYTES, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return false;
    if (got <= 0)
        fail("the peer closed the connection: %s", got ? strerror(errno) : "end of stream");
    link->in.end += (size_t)got;
    return true;
}

void link_flush(struct link *link)
{
    while (buffer_held(&link->out))
        link_send(link);
}

void link_need(struct link *link, size_t size)
{
    link_flush(link);
    while (buffer_held(&link->in) < size)
        link_receive(link);
}

static void not_blocking(struct link *link)
{
    if (fcntl(link->fd, F_SETFL, fcntl(link->fd, F_GETFL) | O_NONBLOCK))
        fail("fcntl: %s", strerror(errno));
}

/* ---- messages from the peer ---- */

static int64_t due_of(int64_t number)
{
    return began_ns + (int64_t)((double)number * 1e9 / (double)rate);
}

void on_acknowledged(int64_t number)
{
    acknowledged_count++;
    last_acknowledged_ns = now_ns();
    if (rate && number >= 0 && due_of(number) >= warm_until_ns)
        samples_add(&acknowledged, last_acknowledged_ns - due_of(number));
}

void on_received(const uint8_t *record, size_t size)
{
    if (size != (size_t)load.record_bytes)
        fail("a record of %zu bytes came back; it had %lld", size, (long long)load.record_bytes);
    received_count++;
    last_received_ns = now_ns();
    if (!first_received_ns)
        first_received_ns = last_received_ns;
    if (rate) {
        int64_t due = stamp_read(record);
        if (due >= warm_until_ns)
            samples_add(&consumed, last_received_ns - due);
    }
}

static void take_received(struct link *link)
{
    for (int reads = 0; reads < READS_OF_A_TURN && link_receive(link); reads++)
        while (protocol->take(link))
            ;
}

/* Waits for either connection, until `until` at most. Either may be NULL. */
static void turn(struct link *publisher, struct link *subscriber, int64_t until)
{
    struct pollfd wanted[2];
    struct link *links[2];
    nfds_t count = 0;
    for (int which = 0; which < 2; which++) {
        struct link *link = which ? subscriber : publisher;
        if (!link)
            continue;
        while (protocol->take(link)) /* what came with the end of a handshake */
            ;
        link_send(link);
        links[count] = link;
        wanted[count++] =
            (struct pollfd){.fd = link->fd, .events = (short)(POLLIN | (buffer_held(&link->out) ? POLLOUT : 0))};
    }
    int64_t left = until - now_ns();
    struct timespec wait = {.tv_sec = left > 0 ? left / 1000000000 : 0, .tv_nsec = left > 0 ? left % 1000000000 : 0};
    if (ppoll(wanted, count, &wait, NULL) < 0 && errno != EINTR)
        fail("poll: %s", strerror(errno));
    for (nfds_t index = 0; index < count; index++) {
        if (wanted[index].revents & (POLLIN | POLLERR | POLLHUP))
            take_received(links[index]);
        link_send(links[index]);
    }
}

static void publish_one(struct link *publisher, struct pool *pool, int64_t number, int64_t due)
{
    uint8_t *record = pool_next(pool, (size_t)load.record_bytes);
    stamp_write(record, due);
    protocol->publish(publisher, number, (int)(number / STICKY % load.streams), record, (size_t)load.record_bytes);
}

static void wait_until_all(struct link *publisher, struct link *subscriber, int64_t acknowledgements, int64_t receipts)
{
    int64_t deadline = now_ns() + STALL_NS, progress = -1;
    while ((publisher && acknowledged_count < acknowledgements) || (subscriber && received_count < receipts)) {
        turn(publisher, subscriber, now_ns() + 50000000);
        if (acknowledged_count + received_count != progress) {
            progress = acknowledged_count + received_count;
            deadline = now_ns() + STALL_NS;
        }
        if (now_ns() > deadline)
            fail("nothing came for %lld s; acknowledged: %lld of %lld, read: %lld of %lld",
                 (long long)(STALL_NS / 1000000000), (long long)acknowledged_count, (long long)acknowledgements,
                 (long long)received_count, (long long)receipts);
    }
}

static void published(struct link *publisher)
{
    if (protocol->published)
        protocol->published(publisher);
}

/* Sends one record to each stream: connections, files and indexes exist afterwards. Returns how many. */
static int64_t warm_up(struct link *publisher, struct pool *pool)
{
    protocol->publisher(publisher);
    not_blocking(publisher);
    for (int stream = 0; stream < load.streams; stream++) {
        uint8_t *record = pool_next(pool, (size_t)load.record_bytes);
        stamp_write(record, 0);
        protocol->publish(publisher, -1, stream, record, (size_t)load.record_bytes);
        published(publisher);
    }
    wait_until_all(publisher, NULL, load.streams, 0);
    return acknowledged_count;
}

/* ---- modes ---- */

static int produce_main(const struct arguments *arguments, int port)
{
    int64_t records = argument_number(arguments, "records", INT64_MAX),
            window = argument_number(arguments, "window", 4000);
    int64_t nanoseconds = argument_number(arguments, "milliseconds", INT64_MIN) * 1000000;
    bool reading = argument_number(arguments, "reading", 0);
    struct pool pool;
    pool_make(&pool);
    struct link publisher = {0}, subscriber = {.reads = true};
    link_open(&publisher, port);
    int64_t warm = warm_up(&publisher, &pool), sent = 0;
    if (reading) {
        link_open(&subscriber, port);
        protocol->subscriber(&subscriber);
        not_blocking(&subscriber);
        wait_until_all(NULL, &subscriber, 0, warm);
    }
    struct link *second = reading ? &subscriber : NULL;
    double cpu = client_cpu_seconds();
    began_ns = now_ns();
    while (sent < records && now_ns() - began_ns < nanoseconds) {
        while (sent < records && sent + warm - acknowledged_count < window &&
               buffer_held(&publisher.out) < OUT_BYTES_MAX) {
            publish_one(&publisher, &pool, sent, 0);
            sent++;
        }
        published(&publisher);
        turn(&publisher, second, now_ns() + 50000000);
    }
    published(&publisher);
    wait_until_all(&publisher, second, warm + sent, warm + sent);
    int64_t ended = reading && last_received_ns > last_acknowledged_ns ? last_received_ns : last_acknowledged_ns;
    printf("{\"records\": %lld, \"stored\": %lld, \"seconds\": %.6f, \"client_cpu_seconds\": %.3f}\n", (long long)sent,
           (long long)(sent + warm), (double)(ended - began_ns) / 1e9, client_cpu_seconds() - cpu);
    return 0;
}

static int consume_main(const struct arguments *arguments, int port)
{
    int64_t records = argument_number(arguments, "records", INT64_MIN);
    struct link subscriber = {.reads = true};
    link_open(&subscriber, port);
    double cpu = client_cpu_seconds();
    protocol->subscriber(&subscriber);
    not_blocking(&subscriber);
    wait_until_all(NULL, &subscriber, 0, records);
    printf("{\"records\": %lld, \"seconds\": %.6f, \"client_cpu_seconds\": %.3f}\n", (long long)received_count,
           (double)(last_received_ns - first_received_ns) / 1e9, client_cpu_seconds() - cpu);
    return 0;
}

static int latency_main(const struct arguments *arguments, int port)
{
    int64_t wanted_rate = argument_number(arguments, "rate", INT64_MIN),
            milliseconds = argument_number(arguments, "milliseconds", INT64_MIN);
    int64_t warm_ms = argument_number(arguments, "warm_milliseconds", 1000),
            window = argument_number(arguments, "window", 4000);
    int64_t count = wanted_rate * (warm_ms + milliseconds) / 1000, sent = 0;
    if (count <= 0)
        fail("rate and milliseconds must be above 0");
    prctl(PR_SET_TIMERSLACK, 1000);
    struct pool pool;
    pool_make(&pool);
    samples_make(&acknowledged, (size_t)count);
    samples_make(&consumed, (size_t)count);
    samples_make(&late, (size_t)count);
    struct link publisher = {0}, subscriber = {.reads = true};
    link_open(&publisher, port);
    int64_t warm = warm_up(&publisher, &pool);
    link_open(&subscriber, port);
    protocol->subscriber(&subscriber);
    not_blocking(&subscriber);
    wait_until_all(NULL, &subscriber, 0, warm);
    began_ns = now_ns() + READER_START_NS;
    rate = wanted_rate;
    warm_until_ns = began_ns + warm_ms * 1000000;
    double cpu = client_cpu_seconds();
    while (sent < count) {
        int64_t now = now_ns();
        while (sent < count && due_of(sent) <= now && sent + warm - acknowledged_count < window &&
               buffer_held(&publisher.out) < OUT_BYTES_MAX) {
            if (due_of(sent) >= warm_until_ns)
                samples_add(&late, now - due_of(sent));
            publish_one(&publisher, &pool, sent, due_of(sent));
            sent++;
        }
        published(&publisher);
        int64_t next = sent < count ? due_of(sent) : now, soonest = now + SLICE_NS;
        turn(&publisher, &subscriber, next > soonest ? next : soonest);
    }
    int64_t ended = now_ns();
    wait_until_all(&publisher, &subscriber, warm + count, warm + count);
    printf("{\"records\": %lld, \"rate\": %lld, \"seconds\": %.6f, \"reached\": %.1f, \"client_cpu_seconds\": %.3f, ",
           (long long)count, (long long)rate, (double)(now_ns() - began_ns) / 1e9,
           (double)count / ((double)(ended - began_ns) / 1e9), client_cpu_seconds() - cpu);
    samples_print("acknowledged", &acknowledged, ", ");
    samples_print("consumed", &consumed, ", ");
    samples_print("late", &late, "}\n");
    return 0;
}

static int each_stream(int port, void (*what)(struct link *, const char *))
{
    struct link link = {0};
    link_open(&link, port);
    for (int stream = 0; what && stream < load.streams; stream++) {
        char name[NAME_MAX_BYTES];
        stream_name(name, stream);
        what(&link, name);
    }
    return 0;
}

int main(int count, char **words)
{
    static const struct protocol *const known[] = {&nats, &rabbitmq, &redis};
    struct arguments arguments = {.count = count - 2, .word = words + 2};
    if (count < 2)
        fail("stream_load create|delete|ping|produce|consume|latency NAME=VALUE...");
    const char *wanted = argument_text(&arguments, "protocol", NULL), *what = words[1];
    for (size_t index = 0; index < sizeof known / sizeof *known; index++)
        if (!strcmp(known[index]->name, wanted))
            protocol = known[index];
    int port = (int)argument_number(&arguments, "port", INT64_MIN);
    load = (struct load){.topic = argument_text(&arguments, "topic", "ping"),
                         .streams = (int)argument_number(&arguments, "partitions", 1),
                         .record_bytes = argument_number(&arguments, "record_bytes", 1024),
                         .durable = argument_number(&arguments, "durable", 0)};
    if (!protocol || load.streams < 1 || load.streams > STREAMS_MAX || load.record_bytes < 8 ||
        load.record_bytes > (int64_t)RECORD_BYTES_MAX || strlen(load.topic) > NAME_MAX_BYTES - 8)
        fail("protocol is nats, rabbitmq or redis; partitions 1 to %d; record_bytes 8 to %zu", STREAMS_MAX,
             RECORD_BYTES_MAX);
    if (!strcmp(what, "produce"))
        return produce_main(&arguments, port);
    if (!strcmp(what, "consume"))
        return consume_main(&arguments, port);
    if (!strcmp(what, "latency"))
        return latency_main(&arguments, port);
    if (!strcmp(what, "create"))
        return each_stream(port, protocol->make);
    if (!strcmp(what, "delete"))
        return each_stream(port, protocol->drop);
    if (!strcmp(what, "ping"))
        return each_stream(port, NULL);
    fail("stream_load cannot %s", what);
}
