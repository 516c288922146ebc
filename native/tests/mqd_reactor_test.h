/* For test_reactor*.c: a broker in one process. Two reactors with their threads and real
 * partitions, a third worker and the acceptor whose endpoints the test drives itself, clients over
 * loopback TCP that speak raw Kafka frames.
 *
 *   slots 0..3   topic "quick", partitions 0..3, owned by worker 0, 1, 0, 1
 *   slot 4       topic "quick", partition 4, owned by worker 2, which is the test: what is
 *                forwarded to it waits for the test's answer
 *
 *   slot 5       nobody's yet; worker 1 would own it
 *
 * Every wait ends after LIMIT_MS with a failure, so that what is lost shows. */
#ifndef MQD_REACTOR_TEST_H
#define MQD_REACTOR_TEST_H

#define LOG_TEST_IN_MEMORY
#include "mqd_log_test.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include "base/atomic.h"
#include "base/list.h"
#include "io/poll.h"
#include "server/api.h"
#include "shm/layout.h"

#define LIMIT_MS 30000
#define WORKERS 3 /* the third is the test */
#define REACTORS 2
#define FAKE 2
#define ACCEPTOR 3
#define ENDPOINTS 5
#define PARTITIONS 5
#define SLOTS 6
#define SLOTS_MAX 30 /* a test may assign and open more */
#define ARENA_BYTES (4u << 20)
#define REQUEST_BYTES_MAX (2u << 20)

struct bench {
    void *control, *links;
    uint8_t *arenas[ENDPOINTS];
    uint64_t mapped_bytes; /* each arena is a mapping of so many; 0: it is on the heap */
    int eventfds[ENDPOINTS];
    struct mqd_reactor_options options[REACTORS];
    struct mqd_reactor *reactors[REACTORS];
    int handoffs[REACTORS]; /* our ends */
    int listener;
    struct mqd_endpoint *endpoints[ENDPOINTS]; /* FAKE and ACCEPTOR */
    struct mqd_partition *partitions[SLOTS_MAX];
    uint8_t topic_id[16];
    uint64_t token;
    struct mqd_log_options log_options;
};

static const uint32_t bench_slots[PARTITIONS] = {0, 1, 2, 3, 4};
static inline uint32_t bench_owner(uint32_t slot)
{
    return slot == 4 ? FAKE : slot % 2;
}

static void *bench_memory(size_t size_bytes)
{
    void *memory = aligned_alloc(65536, (size_bytes + 65535) / 65536 * 65536);
    CHECK_OR(memory, abort());
    memset(memory, 0, size_bytes);
    return memory;
}

/* Waits for the event of `token`; other events are for nobody. */
static struct mqd_event bench_done(struct bench *b, uint32_t worker, uint64_t token)
{
    struct mqd_event event;
    for (;;) {
        while (mqd_reactor_next_event(b->reactors[worker], &event))
            if (event.kind == MQD_EVENT_DONE && event.token == token) {
                return event;
            } else {
                if (getenv("MQD_TEST_LOG"))
                    fprintf(stderr, "worker %u: %s\n", worker, event.text);
                mqd_proposal_free(event.proposal);
            }
        struct pollfd wait = {mqd_reactor_event_fd(b->reactors[worker]), POLLIN, 0};
        CHECK_OR(poll(&wait, 1, LIMIT_MS) == 1, abort());
    }
}

__attribute__((unused)) static void bench_topic_put(struct bench *b, const uint8_t id[16], const char *name,
                                                    const uint32_t *slots, uint32_t count)
{
    for (uint32_t worker = 0; worker < REACTORS; worker++) {
        CHECK_EQUAL(mqd_reactor_topic_put(b->reactors[worker], ++b->token, id, name, slots, count), 0);
        CHECK_EQUAL(bench_done(b, worker, b->token).error, 0);
    }
}

__attribute__((unused)) static void bench_topic_remove(struct bench *b, const uint8_t id[16])
{
    for (uint32_t worker = 0; worker < REACTORS; worker++) {
        CHECK_EQUAL(mqd_reactor_topic_remove(b->reactors[worker], ++b->token, id), 0);
        CHECK_EQUAL(bench_done(b, worker, b->token).error, 0);
    }
}

/* The log of `partition`, served in `slot` by the slot's owner. */
static void bench_partition_open(struct bench *b, uint32_t slot, uint32_t partition)
{
    char path[128];
    struct mqd_recovery recovery = log_untrusted();
    snprintf(path, sizeof path, "%s/quick-%u", log_root, partition);
    b->partitions[slot] = mqd_partition_open(path, &b->log_options, 0, NOW, &recovery);
    CHECK(b->partitions[slot]);
    CHECK_EQUAL(mqd_reactor_partition_open(b->reactors[bench_owner(slot)], ++b->token, slot, 0, b->partitions[slot]),
                0);
    CHECK_EQUAL(bench_done(b, bench_owner(slot), b->token).error, 0);
}

static void bench_partition_close(struct bench *b, uint32_t slot)
{
    CHECK_EQUAL(mqd_reactor_partition_close(b->reactors[bench_owner(slot)], ++b->token, slot), 0);
    struct mqd_event event = bench_done(b, bench_owner(slot), b->token);
    CHECK_EQUAL(event.error, 0);
    CHECK(event.partition == b->partitions[slot]);
    CHECK_EQUAL(mqd_partition_close(event.partition, 1), 0);
    b->partitions[slot] = NULL;
}

static void bench_options(struct bench *b, uint32_t worker, int backend)
{
    int handoff[2];
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, handoff) == 0);
    b->handoffs[worker] = handoff[0];
    b->options[worker] = (struct mqd_reactor_options){.control = b->control,
                                                      .links = b->links,
                                                      .self = worker,
                                                      .endpoint_count = ENDPOINTS,
                                                      .eventfds = b->eventfds,
                                                      .handoff_fd = handoff[1],
                                                      .backend = backend,
                                                      .cpu = -1,
                                                      .connection_count_max = 1000,
                                                      .request_bytes_max = REQUEST_BYTES_MAX,
                                                      .heap_bytes_max = 32 << 20,
                                                      .inflight_count_max = 16,
                                                      .connection_idle_ms_max = 600000,
                                                      .fetch_bytes_max = 8 << 20,
                                                      .session_count_max = 100,
                                                      .sendfile_bytes_min = 8192,
                                                      .read_fd_count_max = 64};
    for (uint32_t i = 0; i < ENDPOINTS; i++) {
        b->options[worker].arenas[i] = b->arenas[i];
        b->options[worker].arena_bytes[i] = ARENA_BYTES;
    }
}

/* The fake worker serves its slot: it is online, empty, and nobody writes it. */
static void bench_fake_slot(struct bench *b)
{
    struct mqd_partition_slot *slot = mqd_control_partition(b->control, 4);
    struct mqd_positions positions = {0};
    mqd_slot_publish(slot, &positions);
    mqd_store_release(&slot->owner_generation, mqd_endpoint_generation(b->control, FAKE));
    mqd_slot_set_state(b->control, 4, MQD_SLOT_ONLINE);
}

static void bench_listen(struct bench *b)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    b->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(bind(b->listener, (struct sockaddr *)&address, sizeof address) == 0 && listen(b->listener, 128) == 0);
}

/* `change` (may be NULL) adjusts the options before the reactors are made. */
static struct bench *bench_start(int backend, void (*change)(struct bench *b))
{
    struct bench *b = calloc(1, sizeof *b);
    uint8_t boot_id[16] = {1};
    log_fresh();
    b->control = bench_memory(mqd_control_size_bytes());
    b->links = bench_memory(mqd_links_size_bytes(ENDPOINTS));
    CHECK_OR(mqd_control_format(b->control, mqd_control_size_bytes(), WORKERS, boot_id, 1, NOW) == 0, abort());
    CHECK_OR(mqd_links_format(b->links, mqd_links_size_bytes(ENDPOINTS), ENDPOINTS) == 0, abort());
    mqd_control_set_log_level(b->control, 4);
    for (uint32_t i = 0; i < ENDPOINTS; i++) {
        b->arenas[i] = bench_memory(ARENA_BYTES);
        b->eventfds[i] = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
        mqd_endpoint_set_state(b->control, i, MQD_PROCESS_RUNNING, getpid());
    }
    b->endpoints[FAKE] = mqd_endpoint_open(b->control, b->links, FAKE, ENDPOINTS, b->eventfds);
    b->endpoints[ACCEPTOR] = mqd_endpoint_open(b->control, b->links, ACCEPTOR, ENDPOINTS, b->eventfds);
    b->log_options = log_options();
    b->log_options.preallocate_bytes_max = 1 << 20;
    for (uint32_t worker = 0; worker < REACTORS; worker++)
        bench_options(b, worker, backend);
    bench_listen(b);
    if (change)
        change(b);
    memset(b->topic_id, 7, 16);
    for (uint32_t slot = 0; slot < SLOTS; slot++)
        mqd_slot_assign(b->control, slot, b->topic_id, (int32_t)slot, (uint16_t)bench_owner(slot), 0, 0);
    for (uint32_t worker = 0; worker < REACTORS; worker++) {
        b->reactors[worker] = mqd_reactor_create(&b->options[worker]);
        CHECK_OR(b->reactors[worker], fprintf(stderr, "%s\n", mqd_error_message()); abort());
        CHECK_OR(mqd_reactor_start(b->reactors[worker]) == 0, fprintf(stderr, "%s\n", mqd_error_message()); abort());
        mqd_reactor_log_dir(b->reactors[worker], ++b->token, 0, log_root);
        bench_done(b, worker, b->token);
    }
    for (uint32_t slot = 0; slot < 4; slot++)
        bench_partition_open(b, slot, slot);
    bench_fake_slot(b);
    bench_topic_put(b, b->topic_id, "quick", bench_slots, PARTITIONS);
    return b;
}

static void bench_stop(struct bench *b)
{
    for (uint32_t worker = 0; worker < REACTORS; worker++)
        CHECK_OR(mqd_reactor_stop(b->reactors[worker]) == 0, abort());
    for (uint32_t slot = 0; slot < SLOTS_MAX; slot++)
        if (b->partitions[slot])
            bench_partition_close(b, slot);
    for (uint32_t worker = 0; worker < REACTORS; worker++) {
        mqd_reactor_destroy(b->reactors[worker]);
        close(b->handoffs[worker]);
        close(b->options[worker].handoff_fd);
    }
    mqd_endpoint_close(b->endpoints[FAKE]);
    mqd_endpoint_close(b->endpoints[ACCEPTOR]);
    for (uint32_t i = 0; i < ENDPOINTS; i++) {
        close(b->eventfds[i]);
        if (b->mapped_bytes)
            munmap(b->arenas[i], b->mapped_bytes);
        else
            free(b->arenas[i]);
    }
    close(b->listener);
    free(b->control);
    free(b->links);
    free(b);
    log_clean();
}

/* One descriptor for an endpoint that the test drives; false after limit_ms without any. */
static bool bench_take(struct bench *b, uint32_t endpoint, struct mqd_descriptor *out, uint32_t *from, int limit_ms)
{
    struct mqd_endpoint *own = b->endpoints[endpoint];
    int64_t end_ns = test_now_ns() + limit_ms * 1000000ll;
    for (;;) {
        if (mqd_endpoint_drain(own, out, from, 1) == 1)
            return true;
        if (test_now_ns() >= end_ns)
            return false;
        eventfd_t value;
        if (mqd_endpoint_prepare_sleep(own))
            continue;
        struct pollfd wait = {b->eventfds[endpoint], POLLIN, 0};
        poll(&wait, 1, (int)((end_ns - test_now_ns()) / 1000000) + 1);
        mqd_endpoint_awake(own);
        if (eventfd_read(b->eventfds[endpoint], &value) < 0)
            continue;
    }
}

/* The next of `kind`; RELEASE notes and other kinds are passed over. */
__attribute__((unused)) static struct mqd_descriptor bench_expect(struct bench *b, uint32_t endpoint, uint16_t kind,
                                                                  uint32_t *from)
{
    struct mqd_descriptor descriptor;
    uint32_t sender;
    do
        CHECK_OR(bench_take(b, endpoint, &descriptor, from ? from : &sender, LIMIT_MS), abort());
    while (descriptor.kind != kind);
    return descriptor;
}

__attribute__((unused)) static void bench_say(struct bench *b, uint32_t endpoint, uint32_t to,
                                              struct mqd_descriptor descriptor)
{
    while (mqd_endpoint_send(b->endpoints[endpoint], to, &descriptor) < 0)
        mqd_endpoint_flush(b->endpoints[endpoint]);
    mqd_endpoint_flush(b->endpoints[endpoint]);
}

/* The acceptor's answer to `ask`: correlation id and `body`, laid at `at` in its arena. */
__attribute__((unused)) static void bench_respond(struct bench *b, uint32_t to, const struct mqd_descriptor *ask,
                                                  const char *body, uint16_t flags, bool first, uint64_t at)
{
    uint8_t *bytes = b->arenas[ACCEPTOR] + at;
    uint32_t size_bytes = 0;
    if (first) {
        memcpy(bytes, b->arenas[to] + ask->offset + 4, 4);
        size_bytes = 4;
    }
    memcpy(bytes + size_bytes, body, strlen(body));
    bench_say(b, ACCEPTOR, to,
              (struct mqd_descriptor){.kind = MQD_LINK_RESPONSE,
                                      .flags = flags,
                                      .token = ask->token,
                                      .offset = at,
                                      .size_bytes = size_bytes + (uint32_t)strlen(body),
                                      .a = (int64_t)mqd_control_metadata_version(b->control)});
}

/* BOTH(test) { ... backend ... }: once for io_uring, where it is permitted, and once for epoll. */
static bool backend_works(int backend)
{
    struct mqd_poll *poll;
    if (mqd_poll_create(&poll, backend, 16) < 0) {
        test_message("left out: %s", mqd_error_message());
        return false;
    }
    mqd_poll_destroy(poll);
    return true;
}
#define BOTH(function)                                                                                                 \
    static void function(int backend);                                                                                 \
    TEST(function##_uring)                                                                                             \
    {                                                                                                                  \
        if (backend_works(MQD_BACKEND_IO_URING))                                                                       \
            function(MQD_BACKEND_IO_URING);                                                                            \
    }                                                                                                                  \
    TEST(function##_epoll)                                                                                             \
    {                                                                                                                  \
        function(MQD_BACKEND_EPOLL);                                                                                   \
    }                                                                                                                  \
    static void function(int backend)

/* ---- clients ---- */

struct client {
    int fd;
    uint8_t *reply;
    uint32_t reply_bytes, at;
    bool broken;
};

/* peer_node: of the host that it comes from, by the listener between hosts; -1 = a client. */
static struct client client_open_by(struct bench *b, uint32_t worker, uint16_t listener_id, int32_t peer_node)
{
    struct sockaddr_in address;
    socklen_t size_bytes = sizeof address;
    struct client client = {.fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
    struct timeval limit = {LIMIT_MS / 1000, 0};
    int one = 1, peer;
    getsockname(b->listener, (struct sockaddr *)&address, &size_bytes);
    CHECK_OR(connect(client.fd, (struct sockaddr *)&address, sizeof address) == 0 &&
                 (peer = accept(b->listener, NULL, NULL)) >= 0,
             abort());
    setsockopt(client.fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(client.fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    setsockopt(client.fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(peer, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    uint8_t bytes[64] = {0};
    uint32_t magic = 0x31434e4fu;
    memcpy(bytes, &magic, 4);
    memcpy(bytes + 4, &listener_id, 2);
    if (peer_node >= 0) {
        bytes[6] = 2; /* MQD_HANDOFF_PEER */
        memcpy(bytes + 44, &peer_node, 4);
    }
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } ancillary = {0};
    struct iovec iov = {bytes, sizeof bytes};
    struct msghdr message = {
        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = &ancillary, .msg_controllen = sizeof ancillary};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET, header->cmsg_type = SCM_RIGHTS, header->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(header), &peer, sizeof peer);
    CHECK_OR(sendmsg(b->handoffs[worker], &message, 0) == 64, abort());
    close(peer);
    return client;
}

static inline struct client client_open_as(struct bench *b, uint32_t worker, int32_t peer_node)
{
    return client_open_by(b, worker, 0, peer_node);
}

static inline struct client client_open(struct bench *b, uint32_t worker)
{
    return client_open_by(b, worker, 0, -1);
}

__attribute__((unused)) static void client_close(struct client *client)
{
    close(client->fd);
    free(client->reply);
    client->reply = NULL;
    client->fd = -1;
}

/* recv with a time-out (SO_RCVTIMEO) is not restarted after an interruption, and io_uring
 * interrupts whoever made the ring when it has news. */
static ssize_t client_recv(struct client *client, uint8_t *bytes, size_t size_bytes)
{
    ssize_t n;
    do
        n = recv(client->fd, bytes, size_bytes, 0);
    while (n < 0 && errno == EINTR);
    return n;
}

/* 1: a whole reply is in client->reply, from the correlation id on; 0: the broker closed; -1:
 * nothing came in time. */
static int client_receive(struct client *client)
{
    uint8_t length[4];
    uint32_t size_bytes = 0;
    ssize_t n = 0;
    for (uint32_t got = 0; got < 4; got += (uint32_t)n)
        if ((n = client_recv(client, length + got, 4 - got)) <= 0)
            return n == 0 || errno == ECONNRESET || errno == EPIPE ? 0 : -1;
    for (int i = 0; i < 4; i++)
        size_bytes = size_bytes << 8 | length[i];
    CHECK_OR(size_bytes < 64u << 20, return -1);
    free(client->reply);
    client->reply = malloc(size_bytes ? size_bytes : 1);
    client->reply_bytes = size_bytes;
    client->at = 0;
    client->broken = false;
    for (uint32_t got = 0; got < size_bytes; got += (uint32_t)n)
        if ((n = client_recv(client, client->reply + got, size_bytes - got)) <= 0)
            return n == 0 || errno == ECONNRESET ? 0 : -1;
    return 1;
}

static uint64_t take(struct client *client, int bytes)
{
    uint64_t value = 0;
    if (client->at + (uint32_t)bytes > client->reply_bytes) {
        client->broken = true;
        return 0;
    }
    for (int i = 0; i < bytes; i++)
        value = value << 8 | client->reply[client->at++];
    return value;
}
static void take_bytes(struct client *client, uint32_t bytes)
{
    if (bytes > client->reply_bytes - client->at)
        client->broken = true;
    else
        client->at += bytes;
}

/* ---- frames ---- */

struct frame {
    uint8_t *bytes;
    uint32_t size_bytes, capacity;
};

static void put_bytes(struct frame *frame, const void *bytes, uint32_t size_bytes)
{
    while (frame->size_bytes + size_bytes > frame->capacity) {
        frame->capacity = frame->capacity ? frame->capacity * 2 : 256;
        frame->bytes = realloc(frame->bytes, frame->capacity);
    }
    if (size_bytes)
        memcpy(frame->bytes + frame->size_bytes, bytes, size_bytes);
    frame->size_bytes += size_bytes;
}
static void put(struct frame *frame, int bytes, uint64_t value)
{
    uint8_t out[8];
    for (int i = 0; i < bytes; i++)
        out[i] = (uint8_t)(value >> (8 * (bytes - 1 - i)));
    put_bytes(frame, out, (uint32_t)bytes);
}
static void put_text(struct frame *frame, const char *text)
{
    put(frame, 2, strlen(text));
    put_bytes(frame, text, (uint32_t)strlen(text));
}
static uint32_t frame_begin(struct frame *frame, int16_t api_key, int16_t version, int32_t correlation_id)
{
    uint32_t begin = frame->size_bytes;
    put(frame, 4, 0), put(frame, 2, (uint16_t)api_key), put(frame, 2, (uint16_t)version),
        put(frame, 4, (uint32_t)correlation_id), put(frame, 2, 0xffff);
    return begin;
}
static void frame_end(struct frame *frame, uint32_t begin)
{
    uint32_t size_bytes = frame->size_bytes - begin - 4;
    for (int i = 0; i < 4; i++)
        frame->bytes[begin + (uint32_t)i] = (uint8_t)(size_bytes >> (24 - 8 * i));
}
static void frame_free(struct frame *frame)
{
    free(frame->bytes);
    *frame = (struct frame){0};
}

struct part {
    int32_t partition;
    struct log_batch batch;
};

/* Produce v7 of one batch for each part, all of topic "quick". */
static void put_produce(struct frame *frame, int32_t correlation_id, int acks, int32_t timeout_ms,
                        const struct part *parts, uint32_t count)
{
    uint32_t begin = frame_begin(frame, 0, 7, correlation_id);
    put(frame, 2, 0xffff), put(frame, 2, (uint16_t)acks), put(frame, 4, (uint32_t)timeout_ms), put(frame, 4, 1),
        put_text(frame, "quick"), put(frame, 4, count);
    for (uint32_t i = 0; i < count; i++) {
        uint8_t *batch =
            malloc(MQD_BATCH_HEADER_BYTES + (size_t)(parts[i].batch.body_bytes ? parts[i].batch.body_bytes : 64));
        uint32_t size_bytes = log_encode(batch, parts[i].batch);
        put(frame, 4, (uint32_t)parts[i].partition), put(frame, 4, size_bytes), put_bytes(frame, batch, size_bytes);
        free(batch);
    }
    frame_end(frame, begin);
}

struct asked {
    int32_t partition;
    int64_t offset;
};
struct fetch {
    int32_t correlation_id, wait_ms, bytes_min, bytes_max, session_id, session_epoch;
    const char *topic;
    int32_t forget; /* partition + 1; 0 = none */
    uint8_t committed;
    const char *rack;
};

/* Fetch v11 */
static void put_fetch(struct frame *frame, struct fetch fetch, const struct asked *asked, uint32_t count)
{
    const char *topic = fetch.topic ? fetch.topic : "quick";
    uint32_t begin = frame_begin(frame, 1, 11, fetch.correlation_id);
    put(frame, 4, 0xffffffff), put(frame, 4, (uint32_t)fetch.wait_ms), put(frame, 4, (uint32_t)fetch.bytes_min),
        put(frame, 4, (uint32_t)fetch.bytes_max), put(frame, 1, fetch.committed);
    put(frame, 4, (uint32_t)fetch.session_id), put(frame, 4, (uint32_t)fetch.session_epoch), put(frame, 4, count != 0);
    if (count)
        put_text(frame, topic), put(frame, 4, count);
    for (uint32_t i = 0; i < count; i++)
        put(frame, 4, (uint32_t)asked[i].partition), put(frame, 4, 0xffffffff),
            put(frame, 8, (uint64_t)asked[i].offset), put(frame, 8, UINT64_MAX), put(frame, 4, 4 << 20);
    put(frame, 4, fetch.forget != 0);
    if (fetch.forget)
        put_text(frame, topic), put(frame, 4, 1), put(frame, 4, (uint32_t)fetch.forget - 1);
    put_text(frame, fetch.rack ? fetch.rack : "");
    frame_end(frame, begin);
}

static bool client_send(struct client *client, const struct frame *frame)
{
    for (uint32_t sent = 0; sent < frame->size_bytes;) {
        ssize_t n = send(client->fd, frame->bytes + sent, frame->size_bytes - sent, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return false;
        sent += (uint32_t)n;
    }
    return true;
}

/* ---- answers ---- */

struct produced {
    int32_t correlation_id, partition[8];
    int16_t error[8];
    int64_t base_offset[8];
    uint32_t count;
};

static struct produced take_produced(struct client *client)
{
    struct produced out = {.correlation_id = (int32_t)take(client, 4)};
    CHECK_OR(take(client, 4) == 1, return out);
    take_bytes(client, (uint32_t)take(client, 2));
    out.count = (uint32_t)take(client, 4);
    CHECK_OR(out.count <= 8, return out);
    for (uint32_t i = 0; i < out.count; i++) {
        out.partition[i] = (int32_t)take(client, 4), out.error[i] = (int16_t)take(client, 2),
        out.base_offset[i] = (int64_t)take(client, 8);
        take(client, 8), take(client, 8);
    }
    take(client, 4);
    CHECK_OR(!client->broken && client->at == client->reply_bytes, return out);
    return out;
}

struct seen {
    int64_t offset;
    uint64_t mark;
    int32_t partition;
};
struct fetched {
    int32_t correlation_id, session_id, partition_count, error[8], partition[8];
    int16_t top_error;
    int64_t high_watermark[8], last_stable_offset[8];
    int32_t preferred[8];
    int32_t aborted_count; /* of all partitions; -1 = null */
    int64_t aborted_producer[8192], aborted_first[8192];
    uint32_t batch_count;
    struct seen batches[4096];
};

static void take_batches(struct client *client, struct fetched *out, int32_t partition, uint32_t size_bytes)
{
    CHECK(size_bytes <= client->reply_bytes - client->at);
    const uint8_t *at = client->reply + client->at, *end = at + size_bytes;
    client->at += size_bytes;
    while ((size_t)(end - at) > MQD_BATCH_HEADER_BYTES) {
        struct mqd_batch batch;
        const char *reason;
        CHECK_EQUAL(mqd_batch_decode(at, (uint64_t)(end - at), &batch), 0);
        CHECK(batch.size_bytes <= end - at);
        CHECK_EQUAL(mqd_batch_validate(at, (uint64_t)batch.size_bytes, &batch, &reason), 0);
        CHECK(out->batch_count < 4096);
        struct seen *seen = &out->batches[out->batch_count++];
        *seen = (struct seen){.offset = batch.base_offset, .partition = partition};
        memcpy(&seen->mark, at + MQD_BATCH_HEADER_BYTES, 8);
        for (int32_t i = 8; i < batch.size_bytes - MQD_BATCH_HEADER_BYTES && !(batch.attributes & 0x20); i += 97)
            CHECK_EQUAL(at[MQD_BATCH_HEADER_BYTES + i], (uint8_t)((uint64_t)i * 31 + seen->mark));
        at += batch.size_bytes;
    }
    CHECK(at == end);
}

static void take_fetched(struct client *client, struct fetched *out)
{
    out->batch_count = 0;
    out->partition_count = 0;
    out->correlation_id = (int32_t)take(client, 4);
    take(client, 4);
    out->top_error = (int16_t)take(client, 2), out->session_id = (int32_t)take(client, 4);
    for (uint32_t topics = (uint32_t)take(client, 4); topics && !client->broken; topics--) {
        take_bytes(client, (uint32_t)take(client, 2));
        for (uint32_t count = (uint32_t)take(client, 4); count && !client->broken; count--) {
            int32_t partition = (int32_t)take(client, 4), at = out->partition_count++;
            CHECK(at < 8);
            out->partition[at] = partition, out->error[at] = (int16_t)take(client, 2),
            out->high_watermark[at] = (int64_t)take(client, 8);
            out->last_stable_offset[at] = (int64_t)take(client, 8), take(client, 8);
            int32_t aborted = (int32_t)take(client, 4);
            CHECK(aborted <= 8192);
            out->aborted_count = aborted;
            for (int32_t i = 0; i < aborted; i++)
                out->aborted_producer[i] = (int64_t)take(client, 8), out->aborted_first[i] = (int64_t)take(client, 8);
            out->preferred[at] = (int32_t)take(client, 4);
            uint32_t records = (uint32_t)take(client, 4);
            if (records != UINT32_MAX)
                take_batches(client, out, partition, records);
        }
    }
    CHECK(!client->broken && client->at == client->reply_bytes);
}

/* Sends and takes one answer. */
__attribute__((unused)) static struct produced client_produce(struct client *client, int acks, const struct part *parts,
                                                              uint32_t count)
{
    struct frame frame = {0};
    struct produced out = {.correlation_id = -1};
    put_produce(&frame, 77, acks, LIMIT_MS, parts, count);
    CHECK_OR(client_send(client, &frame), goto done);
    CHECK_OR(client_receive(client) == 1, goto done);
    out = take_produced(client);
done:
    frame_free(&frame);
    return out;
}

__attribute__((unused)) static void client_fetch(struct client *client, struct fetch fetch, const struct asked *asked,
                                                 uint32_t count, struct fetched *out)
{
    struct frame frame = {0};
    put_fetch(&frame, fetch, asked, count);
    memset(out, 0, offsetof(struct fetched, batches));
    out->correlation_id = -1;
    bool sent = client_send(client, &frame);
    frame_free(&frame);
    CHECK(sent);
    CHECK_EQUAL(client_receive(client), 1);
    take_fetched(client, out);
}

#endif
