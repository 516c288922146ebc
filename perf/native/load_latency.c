/* One record at a time. Three things are measured in alternating blocks within one run, because a
 * machine's clock and disk change from minute to minute: the broker, a plain echo server with frames
 * of the same size on the worker's CPU, and fdatasync of the same bytes on the same file system.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "load.h"

#define BLOCK 50

static int compare(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}

void percentiles(const char *what, int64_t *ns, int count, const char *more)
{
    qsort(ns, (size_t)count, sizeof *ns, compare);
    printf("\"%s\": {\"count\": %d, \"p50_us\": %.1f, \"p90_us\": %.1f, \"p99_us\": %.1f, \"p999_us\": %.1f, "
           "\"max_us\": %.1f}%s",
           what, count, (double)ns[count / 2] / 1e3, (double)ns[(int64_t)count * 9 / 10] / 1e3,
           (double)ns[(int64_t)count * 99 / 100] / 1e3, (double)ns[(int64_t)count * 999 / 1000] / 1e3,
           (double)ns[count - 1] / 1e3, more);
}

/* ---- echo ---- */

struct echo {
    int fd;
    pid_t child;
};

static void echo_serve(int listener, size_t request_bytes, size_t reply_bytes, int cpu)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    if (cpu >= 0 && sched_setaffinity(0, sizeof set, &set))
        die("pin the echo server");
    int fd = accept(listener, NULL, NULL), one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    uint8_t *room = allocate(request_bytes + reply_bytes);
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

static struct echo echo_start(size_t request_bytes, size_t reply_bytes, int cpu)
{
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t size = sizeof at;
    if (listener < 0 || bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 1) ||
        getsockname(listener, (struct sockaddr *)&at, &size))
        die("listen");
    struct echo echo = {-1, fork()};
    if (echo.child < 0)
        die("fork");
    if (echo.child == 0)
        echo_serve(listener, request_bytes, reply_bytes, cpu);
    echo.fd = dial(ntohs(at.sin_port));
    close(listener);
    return echo;
}

static void echo_stop(struct echo *echo)
{
    close(echo->fd);
    waitpid(echo->child, NULL, 0);
}

/* ---- fdatasync ---- */

struct sync {
    int fd;
    int64_t end;
    size_t size;
    uint8_t *bytes;
};

/* Like a segment of the log: preallocated beyond its end, so that a flush carries the new size and
 * the extent's conversion, and no allocation. */
static struct sync sync_open(const char *path, size_t size, int64_t room)
{
    struct sync sync = {open(path, O_CREAT | O_TRUNC | O_RDWR | O_CLOEXEC, 0600), 0, size, allocate(size)};
    if (sync.fd < 0 || fallocate(sync.fd, FALLOC_FL_KEEP_SIZE, 0, room))
        die(path);
    return sync;
}

static int64_t sync_once(struct sync *sync)
{
    int64_t begin = now_ns();
    if (pwrite(sync->fd, sync->bytes, sync->size, sync->end) != (ssize_t)sync->size || fdatasync(sync->fd))
        die("fdatasync");
    sync->end += (int64_t)sync->size;
    return now_ns() - begin;
}

int sync_main(const struct arguments *arguments)
{
    int count = (int)argument_number(arguments, "count", INT64_MIN);
    size_t size = (size_t)argument_number(arguments, "batch", 1024);
    struct sync sync = sync_open(argument_text(arguments, "path", NULL), size, (int64_t)size * count);
    int64_t *ns = allocate(sizeof *ns * (size_t)count);
    for (int i = 0; i < count; i++)
        ns[i] = sync_once(&sync);
    printf("{");
    percentiles("fdatasync", ns, count, "}\n");
    unlink(argument_text(arguments, "path", NULL));
    return 0;
}

/* ---- produce, one at a time ---- */

static int64_t produce_once(int fd, const struct bytes *frame, struct room *room, size_t topic_bytes)
{
    int64_t begin = now_ns();
    send_all(fd, frame->at, frame->size);
    receive_frame(fd, room);
    int64_t ns = now_ns() - begin;
    int error = produce_reply_error(room->at, room->size, topic_bytes);
    if (error)
        fail("Produce was answered error %d", error);
    return ns;
}

static int64_t echo_once(int fd, uint8_t *room, size_t request_bytes, size_t reply_bytes)
{
    int64_t begin = now_ns();
    send_all(fd, room, request_bytes);
    receive_all(fd, room, reply_bytes);
    return now_ns() - begin;
}

int latency_main(const struct arguments *arguments)
{
    const char *topic = argument_text(arguments, "topic", NULL), *path = argument_text(arguments, "path", "");
    int count = ((int)argument_number(arguments, "count", INT64_MIN) + BLOCK - 1) / BLOCK * BLOCK, at = 0;
    size_t batch_bytes = (size_t)argument_number(arguments, "batch", INT64_MIN), topic_bytes = strlen(topic);
    struct bytes frame = produce_frame(topic, 0, batch_bytes, 1, (int)argument_number(arguments, "acks", 1));
    int fd = dial((int)argument_number(arguments, "port", INT64_MIN));
    struct room room = {0};
    for (int i = 0; i < BLOCK; i++)
        produce_once(fd, &frame, &room, topic_bytes);
    size_t reply_bytes = room.size + 4;
    struct echo echo = echo_start(frame.size, reply_bytes, (int)argument_number(arguments, "cpu", -1));
    uint8_t *echo_room = allocate(frame.size + reply_bytes);
    struct sync sync = {.fd = -1};
    if (*path)
        sync = sync_open(path, batch_bytes, (int64_t)batch_bytes * count);
    int64_t *produce_ns = allocate(sizeof(int64_t) * (size_t)count),
            *echo_ns = allocate(sizeof(int64_t) * (size_t)count);
    int64_t *sync_ns = allocate(sizeof(int64_t) * (size_t)count);
    for (int i = 0; i < 5; i++)
        echo_once(echo.fd, echo_room, frame.size, reply_bytes);
    for (; at < count; at += BLOCK) {
        for (int i = 0; i < BLOCK; i++)
            produce_ns[at + i] = produce_once(fd, &frame, &room, topic_bytes);
        for (int i = 0; i < BLOCK; i++)
            echo_ns[at + i] = echo_once(echo.fd, echo_room, frame.size, reply_bytes);
        for (int i = 0; i < BLOCK && *path; i++)
            sync_ns[at + i] = sync_once(&sync);
    }
    echo_stop(&echo);
    printf("{");
    percentiles("produce", produce_ns, count, ", ");
    if (*path) {
        percentiles("fdatasync", sync_ns, count, ", ");
        unlink(path);
    }
    percentiles("echo", echo_ns, count, "}\n");
    return 0;
}

/* ---- produce to consume ---- */

/* Fetches until records arrive, as consumers do. Returns the offset after them. */
static int64_t consume(int fd, struct bytes *fetch, struct room *room, int64_t offset, size_t topic_bytes)
{
    for (;;) {
        receive_frame(fd, room);
        struct fetched fetched = fetch_reply(room->at, room->size, topic_bytes);
        if (fetched.error)
            fail("the fetch at %lld was answered error %d", (long long)offset, fetched.error);
        int64_t next = next_offset(fetched.records, fetched.records_bytes, offset);
        if (next > offset)
            return next;
        send_all(fd, fetch->at, fetch->size);
    }
}

int end_to_end_main(const struct arguments *arguments)
{
    const char *topic = argument_text(arguments, "topic", NULL);
    int count = (int)argument_number(arguments, "count", INT64_MIN),
        port = (int)argument_number(arguments, "port", INT64_MIN);
    int pause_us = (int)argument_number(arguments, "pause_us", 300),
        records = (int)argument_number(arguments, "records", 1);
    struct bytes produce = produce_frame(topic, 0, (size_t)argument_number(arguments, "batch", INT64_MIN), records,
                                         (int)argument_number(arguments, "acks", 1));
    struct bytes fetch = fetch_frame(topic, 0, 1 << 20, (int)argument_number(arguments, "bytes_min", 1),
                                     (int)argument_number(arguments, "wait_ms", 5000));
    struct bytes ask = log_end_frame(topic);
    int producer = dial(port), consumer = dial(port);
    struct room room = {0}, reply = {0};
    int64_t *ns = allocate(sizeof *ns * (size_t)count);
    /* with acks=all: what earlier runs left unflushed is visible after it, and the log's end does
     * not move */
    struct bytes last = produce_frame(topic, 0, 100, 1, -1);
    produce_once(producer, &last, &reply, strlen(topic));
    send_all(consumer, ask.at, ask.size);
    receive_frame(consumer, &room);
    int64_t offset = (int64_t)get64(room.at + room.size - 8);
    for (int i = -20; i < count; i++) {
        fetch_frame_offset(&fetch, offset);
        send_all(consumer, fetch.at, fetch.size);
        usleep((unsigned)pause_us); /* it is parked by now; only the time after the produce counts */
        int64_t begin = now_ns();
        send_all(producer, produce.at, produce.size);
        int64_t next = consume(consumer, &fetch, &room, offset, strlen(topic));
        if (i >= 0)
            ns[i] = now_ns() - begin;
        if (next != offset + records)
            fail("a fetch at %lld brought records up to %lld", (long long)offset, (long long)next);
        offset = next;
        receive_frame(producer, &reply);
    }
    printf("{");
    percentiles("end_to_end", ns, count, "}\n");
    return 0;
}
