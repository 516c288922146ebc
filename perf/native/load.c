/* A load generator that costs next to nothing: frames are encoded once, replies are only counted. It measures the broker, not a client library.
 *
 *   load produce  PORT TOPIC PARTITIONS CONNECTIONS DEPTH BATCH_BYTES RECORDS ACKS SECONDS
 *   load latency  PORT TOPIC BATCH_BYTES ACKS COUNT        one record at a time; prints percentiles of the round trip
 *   load fetch    PORT TOPIC PARTITIONS CONNECTIONS FETCH_BYTES SECONDS   reads from the start, round and round
 *   load end2end  PORT TOPIC BATCH_BYTES ACKS COUNT        produce on one connection, a parked fetch on another; time until the fetch has it
 *   load echo     REQUEST_BYTES REPLY_BYTES COUNT          the floor: a plain echo server over loopback in a process of its own
 *
 * Prints one JSON object. Loopback only; bounded by SECONDS or COUNT.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static void die(const char *what)
{
    fprintf(stderr, "load: %s: %s\n", what, strerror(errno));
    exit(1);
}

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* ---- bytes ---- */

struct bytes { uint8_t *at; size_t size; };

static void put(struct bytes *b, const void *bytes, size_t size)
{
    memcpy(b->at + b->size, bytes, size);
    b->size += size;
}
static void put8(struct bytes *b, int v) { b->at[b->size++] = (uint8_t)v; }
static void put16(struct bytes *b, int v) { uint16_t n = htons((uint16_t)v); put(b, &n, 2); }
static void put32(struct bytes *b, uint32_t v) { uint32_t n = htonl(v); put(b, &n, 4); }
static void put64(struct bytes *b, uint64_t v) { put32(b, (uint32_t)(v >> 32)); put32(b, (uint32_t)v); }
static void put_text(struct bytes *b, const char *text) { put16(b, (int)strlen(text)); put(b, text, strlen(text)); }
static void put_varint(struct bytes *b, int64_t value)
{
    uint64_t v = (uint64_t)value << 1 ^ (uint64_t)(value >> 63);
    for (; v >= 0x80; v >>= 7)
        put8(b, (int)(v | 0x80));
    put8(b, (int)v);
}
static uint32_t get32(const uint8_t *p) { uint32_t n; memcpy(&n, p, 4); return ntohl(n); }
static uint64_t get64(const uint8_t *p) { return (uint64_t)get32(p) << 32 | get32(p + 4); }
static void set32(uint8_t *p, uint32_t v) { v = htonl(v); memcpy(p, &v, 4); }

static uint32_t crc32c(const uint8_t *p, size_t n)
{
    uint32_t crc = 0xffffffffu;
    while (n--) {
        crc ^= *p++;
        for (int k = 0; k < 8; k++)
            crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
    }
    return ~crc;
}

/* A record batch of about batch_bytes with `records` equal records. */
static void put_batch(struct bytes *b, size_t batch_bytes, int records)
{
    size_t begin = b->size;
    int64_t now_ms = (int64_t)time(NULL) * 1000;
    size_t value_bytes = batch_bytes > 61 + (size_t)records * 10 ? (batch_bytes - 61) / (size_t)records - 9 : 1;
    put64(b, 0);
    put32(b, 0); /* length, below */
    put32(b, 0xffffffffu);
    put8(b, 2);
    put32(b, 0); /* crc, below */
    put16(b, 0);
    put32(b, (uint32_t)records - 1);
    put64(b, (uint64_t)now_ms);
    put64(b, (uint64_t)now_ms);
    put64(b, UINT64_MAX);
    put16(b, -1);
    put32(b, 0xffffffffu);
    put32(b, (uint32_t)records);
    for (int i = 0; i < records; i++) {
        uint8_t room[64];
        struct bytes head = {room, 0};
        put8(&head, 0);
        put_varint(&head, 0);
        put_varint(&head, i);
        put_varint(&head, -1);
        put_varint(&head, (int64_t)value_bytes);
        put_varint(b, (int64_t)(head.size + value_bytes + 1));
        put(b, head.at, head.size);
        for (size_t k = 0; k < value_bytes; k++)
            put8(b, 'a' + (int)(k * 7 + (size_t)i) % 26);
        put8(b, 0);
    }
    set32(b->at + begin + 8, (uint32_t)(b->size - begin - 12));
    set32(b->at + begin + 17, crc32c(b->at + begin + 21, b->size - begin - 21));
}

/* Produce v8: old enough to be short, new enough for every broker. */
static struct bytes produce_frame(const char *topic, int partition, size_t batch_bytes, int records, int acks)
{
    struct bytes b = {malloc(batch_bytes * 2 + 4096), 0};
    put32(&b, 0);
    put16(&b, 0);
    put16(&b, 8);
    put32(&b, 1);
    put_text(&b, "load");
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
    set32(b.at, (uint32_t)b.size - 4);
    return b;
}

static struct bytes fetch_frame(const char *topic, int partition, int64_t offset, int bytes_max, int wait_ms)
{
    struct bytes b = {malloc(4096), 0};
    put32(&b, 0);
    put16(&b, 1);
    put16(&b, 11);
    put32(&b, 1);
    put_text(&b, "load");
    put32(&b, 0xffffffffu);
    put32(&b, (uint32_t)wait_ms);
    put32(&b, 1);
    put32(&b, (uint32_t)bytes_max);
    put8(&b, 0);
    put32(&b, 0);
    put32(&b, 0xffffffffu);
    put32(&b, 1);
    put_text(&b, topic);
    put32(&b, 1);
    put32(&b, (uint32_t)partition);
    put32(&b, 0xffffffffu);
    put64(&b, (uint64_t)offset);
    put64(&b, UINT64_MAX);
    put32(&b, (uint32_t)bytes_max);
    put32(&b, 0);
    put_text(&b, "");
    set32(b.at, (uint32_t)b.size - 4);
    return b;
}

/* ---- sockets ---- */

static int dial(int port)
{
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
    if (connect(fd, (struct sockaddr *)&to, sizeof to))
        die("connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return fd;
}

static void send_all(int fd, const uint8_t *bytes, size_t size)
{
    while (size) {
        ssize_t n = send(fd, bytes, size, MSG_NOSIGNAL);
        if (n <= 0)
            die("send");
        bytes += n;
        size -= (size_t)n;
    }
}

static void receive_all(int fd, uint8_t *bytes, size_t size)
{
    while (size) {
        ssize_t n = recv(fd, bytes, size, 0);
        if (n <= 0)
            die("receive");
        bytes += n;
        size -= (size_t)n;
    }
}

static uint8_t *receive_frame(int fd, uint8_t **room, size_t *capacity, uint32_t *size)
{
    uint8_t length[4];
    receive_all(fd, length, 4);
    *size = get32(length);
    if (*size > *capacity)
        *room = realloc(*room, *capacity = *size);
    receive_all(fd, *room, *size);
    return *room;
}

/* Error code of the only partition in a Produce v8 or Fetch v11 reply. */
static int produce_error(const uint8_t *reply, size_t topic_bytes) { return (int16_t)(reply[4 + 4 + 2 + topic_bytes + 4 + 4] << 8 | reply[4 + 4 + 2 + topic_bytes + 4 + 5]); }

/* ---- produce ---- */

struct worker {
    pthread_t thread;
    int port, partition, depth, records, acks, fetch_bytes, partitions;
    size_t batch_bytes;
    const char *topic;
    int64_t end_ns;
    uint64_t batches, bytes, errors;
};

static void *produce_run(void *argument)
{
    struct worker *w = argument;
    struct bytes frame = produce_frame(w->topic, w->partition, w->batch_bytes, w->records, w->acks);
    int burst = w->depth;
    while (burst > 1 && frame.size * (size_t)burst > 262144)
        burst /= 2;
    struct bytes many = {malloc(frame.size * (size_t)burst), 0};
    for (int i = 0; i < burst; i++)
        put(&many, frame.at, frame.size);
    int fd = dial(w->port);
    size_t reply_bytes = 0, got = 0, topic_bytes = strlen(w->topic);
    uint8_t room[262144];
    int inflight = 0;
    while (now_ns() < w->end_ns || inflight) {
        while (inflight + burst <= w->depth && now_ns() < w->end_ns) {
            send_all(fd, many.at, many.size);
            w->batches += (uint64_t)burst;
            w->bytes += (uint64_t)burst * frame.size;
            if (w->acks)
                inflight += burst;
        }
        if (!inflight)
            continue;
        ssize_t n = recv(fd, room + got, sizeof room - got, 0);
        if (n <= 0)
            die("receive");
        got += (size_t)n;
        size_t at = 0;
        while (got - at >= 4 && got - at >= (reply_bytes = 4 + get32(room + at))) {
            if (produce_error(room + at + 4, topic_bytes))
                w->errors++;
            at += reply_bytes;
            inflight--;
        }
        memmove(room, room + at, got - at);
        got -= at;
    }
    close(fd);
    return NULL;
}

/* ---- fetch ---- */

static int64_t next_offset(const uint8_t *records, uint32_t size, int64_t offset)
{
    for (uint32_t at = 0; at + 61 <= size;) {
        uint32_t batch = get32(records + at + 8) + 12;
        if (at + batch > size)
            break;
        offset = (int64_t)get64(records + at) + (int32_t)get32(records + at + 23) + 1;
        at += batch;
    }
    return offset;
}

static void *fetch_run(void *argument)
{
    struct worker *w = argument;
    int fd = dial(w->port);
    size_t capacity = 1 << 20, topic_bytes = strlen(w->topic), header = 4 + 4 + 2 + 4 + 4 + 2 + topic_bytes + 4;
    uint8_t *room = malloc(capacity);
    int64_t offset = 0;
    while (now_ns() < w->end_ns) {
        struct bytes frame = fetch_frame(w->topic, w->partition, offset, w->fetch_bytes, 0);
        uint32_t size;
        send_all(fd, frame.at, frame.size);
        free(frame.at);
        uint8_t *reply = receive_frame(fd, &room, &capacity, &size);
        const uint8_t *p = reply + header; /* partition, error, high watermark, last stable, log start, aborted, preferred, records */
        int error = (int16_t)(p[4] << 8 | p[5]);
        uint32_t records = get32(p + 4 + 2 + 8 + 8 + 8 + 4 + 4);
        if (error || records == 0 || records == UINT32_MAX) {
            w->errors += error != 0;
            offset = 0;
            continue;
        }
        offset = next_offset(p + 4 + 2 + 8 + 8 + 8 + 4 + 4 + 4, records, offset);
        w->batches++;
        w->bytes += records;
    }
    close(fd);
    return NULL;
}

static int run_workers(struct worker *workers, int count, double seconds, void *(*run)(void *), const char *what)
{
    int64_t begin = now_ns();
    for (int i = 0; i < count; i++) {
        workers[i].end_ns = begin + (int64_t)(seconds * 1e9);
        pthread_create(&workers[i].thread, NULL, run, &workers[i]);
    }
    uint64_t batches = 0, bytes = 0, errors = 0;
    for (int i = 0; i < count; i++) {
        pthread_join(workers[i].thread, NULL);
        batches += workers[i].batches;
        bytes += workers[i].bytes;
        errors += workers[i].errors;
    }
    struct timespec cpu;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu);
    printf("{\"what\": \"%s\", \"count\": %llu, \"bytes\": %llu, \"errors\": %llu, \"seconds\": %.6f, \"client_cpu_seconds\": %.6f}\n", what, (unsigned long long)batches,
           (unsigned long long)bytes, (unsigned long long)errors, (double)(now_ns() - begin) / 1e9, (double)cpu.tv_sec + (double)cpu.tv_nsec / 1e9);
    return errors ? 1 : 0;
}

/* ---- latencies ---- */

static int compare(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}

static void percentiles(const char *what, int64_t *ns, int count)
{
    qsort(ns, (size_t)count, sizeof *ns, compare);
    printf("{\"what\": \"%s\", \"count\": %d, \"p50_us\": %.1f, \"p90_us\": %.1f, \"p99_us\": %.1f, \"p999_us\": %.1f, \"max_us\": %.1f}\n", what, count, (double)ns[count / 2] / 1e3,
           (double)ns[count * 9 / 10] / 1e3, (double)ns[(int64_t)count * 99 / 100] / 1e3, (double)ns[(int64_t)count * 999 / 1000] / 1e3, (double)ns[count - 1] / 1e3);
}

static void latency(int port, const char *topic, size_t batch_bytes, int acks, int count)
{
    struct bytes frame = produce_frame(topic, 0, batch_bytes, 1, acks);
    int fd = dial(port);
    size_t capacity = 4096;
    uint8_t *room = malloc(capacity);
    int64_t *ns = malloc(sizeof *ns * (size_t)count);
    for (int i = -100; i < count; i++) {
        uint32_t size;
        int64_t begin = now_ns();
        send_all(fd, frame.at, frame.size);
        receive_frame(fd, &room, &capacity, &size);
        if (i >= 0)
            ns[i] = now_ns() - begin;
        if (produce_error(room, strlen(topic))) {
            fprintf(stderr, "load: produce answered error %d\n", produce_error(room, strlen(topic)));
            exit(1);
        }
    }
    percentiles("latency", ns, count);
}

static int64_t log_end(int port, const char *topic)
{
    struct bytes b = {malloc(4096), 0};
    put32(&b, 0), put16(&b, 2), put16(&b, 1), put32(&b, 1), put_text(&b, "load"), put32(&b, 0xffffffffu), put32(&b, 1), put_text(&b, topic), put32(&b, 1), put32(&b, 0), put64(&b, UINT64_MAX);
    set32(b.at, (uint32_t)b.size - 4);
    int fd = dial(port);
    size_t capacity = 4096;
    uint8_t *room = malloc(capacity);
    uint32_t size;
    send_all(fd, b.at, b.size);
    receive_frame(fd, &room, &capacity, &size);
    close(fd);
    return (int64_t)get64(room + size - 8);
}

static void end_to_end(int port, const char *topic, size_t batch_bytes, int acks, int count)
{
    struct bytes produce = produce_frame(topic, 0, batch_bytes, 1, acks);
    int producer = dial(port), consumer = dial(port);
    size_t capacity = 1 << 16, produce_capacity = 4096;
    uint8_t *room = malloc(capacity), *reply = malloc(produce_capacity);
    int64_t *ns = malloc(sizeof *ns * (size_t)count), offset = log_end(port, topic);
    for (int i = -50; i < count; i++, offset++) {
        struct bytes fetch = fetch_frame(topic, 0, offset, 1 << 16, 5000);
        uint32_t size;
        send_all(consumer, fetch.at, fetch.size);
        free(fetch.at);
        usleep(300); /* it is parked by now; only the time after the produce counts */
        int64_t begin = now_ns();
        send_all(producer, produce.at, produce.size);
        receive_frame(consumer, &room, &capacity, &size);
        if (i >= 0)
            ns[i] = now_ns() - begin;
        receive_frame(producer, &reply, &produce_capacity, &size);
    }
    percentiles("end2end", ns, count);
}

static void echo_server(int listener, size_t request_bytes, size_t reply_bytes)
{
    int fd = accept(listener, NULL, NULL), one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    uint8_t *room = calloc(1, request_bytes > reply_bytes ? request_bytes : reply_bytes);
    for (;;) {
        for (size_t got = 0; got < request_bytes;) {
            struct pollfd ready = {fd, POLLIN, 0};
            poll(&ready, 1, -1);
            ssize_t n = recv(fd, room, request_bytes - got, 0);
            if (n <= 0)
                _exit(0);
            got += (size_t)n;
        }
        send_all(fd, room, reply_bytes);
    }
}

static void echo(size_t request_bytes, size_t reply_bytes, int count)
{
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t size = sizeof at;
    if (bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 1) || getsockname(listener, (struct sockaddr *)&at, &size))
        die("listen");
    pid_t child = fork();
    if (child == 0)
        echo_server(listener, request_bytes, reply_bytes);
    int fd = dial(ntohs(at.sin_port));
    uint8_t *room = calloc(1, request_bytes + reply_bytes);
    int64_t *ns = malloc(sizeof *ns * (size_t)count);
    for (int i = -100; i < count; i++) {
        int64_t begin = now_ns();
        send_all(fd, room, request_bytes);
        receive_all(fd, room, reply_bytes);
        if (i >= 0)
            ns[i] = now_ns() - begin;
    }
    close(fd);
    waitpid(child, NULL, 0);
    percentiles("echo", ns, count);
}

static struct worker *make_workers(char **argv, int count)
{
    struct worker *workers = calloc((size_t)count, sizeof *workers);
    for (int i = 0; i < count; i++) {
        workers[i].port = atoi(argv[2]);
        workers[i].topic = argv[3];
        workers[i].partitions = atoi(argv[4]);
        workers[i].partition = i % workers[i].partitions;
    }
    return workers;
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "";
    if (!strcmp(what, "produce") && argc == 11) {
        int count = atoi(argv[5]);
        struct worker *workers = make_workers(argv, count);
        for (int i = 0; i < count; i++) {
            workers[i].depth = atoi(argv[6]);
            workers[i].batch_bytes = (size_t)atoi(argv[7]);
            workers[i].records = atoi(argv[8]);
            workers[i].acks = atoi(argv[9]);
        }
        return run_workers(workers, count, atof(argv[10]), produce_run, "produce");
    }
    if (!strcmp(what, "fetch") && argc == 8) {
        int count = atoi(argv[5]);
        struct worker *workers = make_workers(argv, count);
        for (int i = 0; i < count; i++)
            workers[i].fetch_bytes = atoi(argv[6]);
        return run_workers(workers, count, atof(argv[7]), fetch_run, "fetch");
    }
    if (!strcmp(what, "latency") && argc == 7)
        return latency(atoi(argv[2]), argv[3], (size_t)atoi(argv[4]), atoi(argv[5]), atoi(argv[6])), 0;
    if (!strcmp(what, "end2end") && argc == 7)
        return end_to_end(atoi(argv[2]), argv[3], (size_t)atoi(argv[4]), atoi(argv[5]), atoi(argv[6])), 0;
    if (!strcmp(what, "echo") && argc == 5)
        return echo((size_t)atoi(argv[2]), (size_t)atoi(argv[3]), atoi(argv[4])), 0;
    fprintf(stderr, "usage: see the head of load.c\n");
    return 2;
}
