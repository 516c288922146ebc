/* Saturates a broker: many connections, one thread that never sleeps while there is work, so that the
 * broker has no more wake-ups than with a client on another host. `spin=0` sleeps in poll(2) instead.
 */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "load.h"

struct stream {
    int fd;
    void *secure; /* session of TLS; NULL = plain */
    size_t topic_bytes;
    uint64_t done, bytes, errors;
    bool closed;
    /* produce */
    struct bytes frames; /* `frame_count` frames, sent round and round in bursts */
    size_t *frame_end;   /* where each ends */
    int frame_count, burst, depth, inflight, next_frame, acks;
    size_t send_at, send_end;
    /* fetch */
    struct bytes request;
    int64_t offset;
    bool requested;
    uint8_t *room;
    size_t capacity, got;
};

struct run {
    int stream_count;
    struct stream *streams;
    int64_t end_ns;
    uint64_t count_max, sent;
    bool spin;
};

static int64_t received(ssize_t n)
{
    if (n == 0)
        fail("the broker closed the connection");
    if (n < 0 && errno != EAGAIN && errno != EINTR)
        die("receive");
    return n < 0 ? 0 : n;
}

static ssize_t stream_send(struct stream *s, const uint8_t *bytes, size_t size)
{
    return s->secure ? secure_send(s->secure, bytes, size) : send(s->fd, bytes, size, MSG_NOSIGNAL);
}

static ssize_t stream_receive(struct stream *s, uint8_t *bytes, size_t size)
{
    return s->secure ? secure_receive(s->secure, bytes, size) : recv(s->fd, bytes, size, 0);
}

static void stream_send_all(struct stream *s, const uint8_t *bytes, size_t size)
{
    if (!s->secure) {
        send_all(s->fd, bytes, size);
        return;
    }
    for (size_t sent = 0; sent < size;) {
        ssize_t n = secure_send(s->secure, bytes + sent, size - sent);
        sent += n > 0 ? (size_t)n : 0;
    }
}

static bool open_for_more(const struct run *run)
{
    return run->sent < run->count_max && now_ns() < run->end_ns;
}

/* ---- produce ---- */

static bool produce_send(struct run *run, struct stream *s)
{
    if (s->send_at == s->send_end) {
        if (s->inflight + s->burst > s->depth || !open_for_more(run))
            return false;
        s->send_at = s->next_frame ? s->frame_end[s->next_frame - 1] : 0;
        s->next_frame += s->burst;
        s->send_end = s->frame_end[s->next_frame - 1];
        s->next_frame %= s->frame_count;
        s->inflight += s->burst;
        run->sent += (uint64_t)s->burst;
    }
    ssize_t n = stream_send(s, s->frames.at + s->send_at, s->send_end - s->send_at);
    if (n < 0 && errno != EAGAIN && errno != EINTR)
        die("send");
    if (n <= 0)
        return false;
    s->send_at += (size_t)n;
    s->bytes += (uint64_t)n;
    if (s->acks == 0 && s->send_at == s->send_end) {
        s->done += (uint64_t)s->burst;
        s->inflight = 0;
    }
    return true;
}

static bool produce_receive(struct stream *s)
{
    if (!s->inflight || !s->acks)
        return false;
    int64_t n = received(stream_receive(s, s->room + s->got, s->capacity - s->got));
    s->got += (size_t)n;
    size_t at = 0, reply;
    while (s->got - at >= 4 && s->got - at >= (reply = 4 + (size_t)get32(s->room + at))) {
        s->errors += produce_reply_error(s->room + at + 4, reply - 4, s->topic_bytes) != 0;
        at += reply;
        s->inflight--;
        s->done++;
    }
    memmove(s->room, s->room + at, s->got - at);
    s->got -= at;
    return n > 0;
}

static bool produce_turn(struct run *run, struct stream *s)
{
    bool moved = produce_receive(s);
    while (produce_send(run, s))
        moved = true;
    s->closed = !s->inflight && s->send_at == s->send_end && !open_for_more(run);
    return moved;
}

/* ---- fetch ---- */

static bool fetch_turn(struct run *run, struct stream *s)
{
    if (!s->requested) {
        if (!open_for_more(run)) {
            s->closed = true;
            return false;
        }
        fetch_frame_offset(&s->request, s->offset);
        stream_send_all(s, s->request.at, s->request.size); /* small: it fits whenever the last reply has been read */
        s->requested = true;
        run->sent++;
        return true;
    }
    int64_t n = received(stream_receive(s, s->room + s->got, s->capacity - s->got));
    s->got += (size_t)n;
    if (s->got < 4 || s->got < 4 + (size_t)get32(s->room))
        return n > 0;
    struct fetched fetched = fetch_reply(s->room + 4, s->got - 4, s->topic_bytes);
    int64_t next = next_offset(fetched.records, fetched.records_bytes, s->offset);
    s->errors += fetched.error != 0;
    s->done += next > s->offset;
    s->bytes += fetched.records_bytes;
    s->offset = next > s->offset ? next : 0; /* at the end: again from the start */
    s->got = 0;
    s->requested = false;
    return true;
}

/* ---- both ---- */

static void sleep_until_ready(struct run *run)
{
    struct pollfd ready[1024];
    int count = 0;
    for (int i = 0; i < run->stream_count && count < 1024; i++)
        if (!run->streams[i].closed) {
            struct stream *s = &run->streams[i];
            ready[count++] = (struct pollfd){s->fd, (short)(POLLIN | (s->send_at < s->send_end ? POLLOUT : 0)), 0};
        }
    poll(ready, (nfds_t)count, 100);
}

static int run_all(struct run *run, const struct arguments *arguments, bool (*turn)(struct run *, struct stream *),
                   const char *what)
{
    int64_t begin = now_ns(), quiet_since = begin;
    run->end_ns = begin + argument_number(arguments, "milliseconds", INT64_MIN) * 1000000;
    run->count_max = (uint64_t)argument_number(arguments, "count", INT64_MAX);
    run->spin = argument_number(arguments, "spin", 1) != 0;
    for (int open = 1; open;) {
        bool moved = false;
        open = 0;
        for (int i = 0; i < run->stream_count; i++)
            if (!run->streams[i].closed) {
                moved |= turn(run, &run->streams[i]);
                open++;
            }
        if (moved)
            quiet_since = now_ns();
        else if (now_ns() - quiet_since > 60ll * 1000000000)
            fail("no reply for 60 s");
        else if (!run->spin && open)
            sleep_until_ready(run);
    }
    uint64_t done = 0, bytes = 0, errors = 0;
    for (int i = 0; i < run->stream_count; i++) {
        done += run->streams[i].done;
        bytes += run->streams[i].bytes;
        errors += run->streams[i].errors;
        close(run->streams[i].fd);
    }
    struct timespec cpu;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu);
    printf("{\"what\": \"%s\", \"count\": %llu, \"bytes\": %llu, \"errors\": %llu, \"seconds\": %.6f, "
           "\"client_cpu_seconds\": %.6f}\n",
           what, (unsigned long long)done, (unsigned long long)bytes, (unsigned long long)errors,
           (double)(now_ns() - begin) / 1e9, (double)cpu.tv_sec + (double)cpu.tv_nsec / 1e9);
    return errors ? 1 : 0;
}

static struct run streams_open(const struct arguments *arguments, size_t capacity)
{
    struct run run = {.stream_count = (int)argument_number(arguments, "connections", 1)};
    int port = (int)argument_number(arguments, "port", INT64_MIN);
    run.streams = allocate(sizeof *run.streams * (size_t)run.stream_count);
    for (int i = 0; i < run.stream_count; i++) {
        struct stream *s = &run.streams[i];
        s->fd = dial(port);
        if (argument_number(arguments, "tls", 0))
            s->secure = secure_open(s->fd);
        s->topic_bytes = strlen(argument_text(arguments, "topic", NULL));
        s->room = allocate(s->capacity = capacity);
    }
    return run;
}

/* Connection i writes partitions i, i + connections, ... in turn (or shares them, when there are
 * fewer than connections); `shift` moves the start. */
static void frames_prepare(struct stream *s, const struct arguments *arguments, int index, int connections)
{
    int partitions = (int)argument_number(arguments, "partitions", 1),
        shift = (int)argument_number(arguments, "shift", 0);
    int own = partitions > connections ? (partitions - index + connections - 1) / connections : 1;
    const char *topic = argument_text(arguments, "topic", NULL);
    s->acks = (int)argument_number(arguments, "acks", 1);
    s->depth = (int)argument_number(arguments, "depth", 1);
    struct bytes *frame = allocate(sizeof *frame * (size_t)own);
    for (int k = 0; k < own; k++)
        frame[k] = produce_frame(topic, (index + k * connections + shift) % partitions,
                                 (size_t)argument_number(arguments, "batch", INT64_MIN),
                                 (int)argument_number(arguments, "records", 1), s->acks);
    s->burst = (int)argument_number(arguments, "burst", s->depth > 1 ? s->depth / 2 : 1);
    while (s->burst > 1 && frame[0].size * (size_t)s->burst > 262144)
        s->burst /= 2;
    s->frame_count = (own + s->burst - 1) / s->burst * s->burst;
    s->frame_end = allocate(sizeof *s->frame_end * (size_t)s->frame_count);
    s->frames.at = allocate(frame[0].size * (size_t)s->frame_count + 4096);
    for (int k = 0; k < s->frame_count; k++) {
        memcpy(s->frames.at + s->frames.size, frame[k % own].at, frame[k % own].size);
        s->frame_end[k] = s->frames.size += frame[k % own].size;
    }
    for (int k = 0; k < own; k++)
        free(frame[k].at);
    free(frame);
}

int produce_main(const struct arguments *arguments)
{
    struct run run = streams_open(arguments, 262144);
    for (int i = 0; i < run.stream_count; i++) {
        frames_prepare(&run.streams[i], arguments, i, run.stream_count);
        not_blocking(run.streams[i].fd);
    }
    return run_all(&run, arguments, produce_turn, "produce");
}

int fetch_main(const struct arguments *arguments)
{
    int bytes_max = (int)argument_number(arguments, "bytes", INT64_MIN),
        partitions = (int)argument_number(arguments, "partitions", 1);
    /* a reply may exceed bytes_max by its first batch */
    struct run run = streams_open(arguments, (size_t)bytes_max + (2u << 20));
    for (int i = 0; i < run.stream_count; i++) {
        run.streams[i].request = fetch_frame(argument_text(arguments, "topic", NULL), i % partitions, bytes_max, 1, 0);
        not_blocking(run.streams[i].fd);
    }
    return run_all(&run, arguments, fetch_turn, "fetch");
}

/* Fetches at the log's end that wait for records that never come: prints `ready` when all are sent,
 * then sleeps until its input ends. */
int parked_main(const struct arguments *arguments)
{
    struct run run = streams_open(arguments, 4096);
    struct room room = {0};
    struct bytes ask = log_end_frame(argument_text(arguments, "topic", NULL));
    for (int i = 0; i < run.stream_count; i++) {
        struct stream *s = &run.streams[i];
        stream_send_all(s, ask.at, ask.size);
        if (!s->secure) {
            receive_frame(s->fd, &room);
        } else { /* one record */
            ssize_t n = secure_receive(s->secure, s->room, s->capacity);
            if (n < 12)
                fail("half a reply");
            room = (struct room){s->room + 4, s->capacity - 4, (uint32_t)n - 4};
        }
        s->request = fetch_frame(argument_text(arguments, "topic", NULL), 0, 1 << 20, 1, 60000);
        fetch_frame_offset(&s->request, (int64_t)get64(room.at + room.size - 8));
        stream_send_all(s, s->request.at, s->request.size);
    }
    printf("ready\n");
    fflush(stdout);
    char byte;
    while (read(0, &byte, 1) > 0)
        continue;
    return 0;
}
