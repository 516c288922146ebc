/* For test_reactor*.c: a broker in one process. Two reactors with their threads and real
 * partitions, a third worker and the acceptor whose endpoints the test drives itself, clients over
 * loopback TCP that speak raw Kafka frames.
 *
 *   slots 0..3   topic "quick", partitions 0..3, owned by worker 0, 1, 0, 1
 *   slot 4       topic "quick", partition 4, owned by worker 2, which is the test: what is
 *                forwarded to it waits for the test's answer
 *
 *   slot 5       not assigned yet; worker 1 would own it
 *
 * Every wait ends after LIMIT_MS with a failure, so that a lost event is noticed. */
#ifndef MQD_REACTOR_TEST_H
#define MQD_REACTOR_TEST_H

#define LOG_TEST_IN_MEMORY
#include "mqd_log_test.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
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
    uint64_t mapped_bytes; /* size of each arena's mapping; 0: arenas are on the heap */
    int eventfds[ENDPOINTS];
    struct mqd_reactor_options options[REACTORS];
    struct mqd_reactor *reactors[REACTORS];
    int handoffs[REACTORS]; /* our ends */
    /* of the connections that are handed over next; 0 = any number */
    uint32_t address_count_max, listener_count_max;
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

/* Zero, and pages that are never touched cost nothing: sanitizers align large blocks, other libraries may not. */
static void *bench_memory(size_t size_bytes)
{
    void *memory = calloc(1, size_bytes);
    if ((uintptr_t)memory % 64 != 0) {
        free(memory);
        memory = aligned_alloc(64, (size_bytes + 63) / 64 * 64);
        CHECK_OR(memory, abort());
        memset(memory, 0, size_bytes);
    }
    CHECK_OR(memory, abort());
    return memory;
}

/* Waits for the event of `token`; other events are dropped. */
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
                                                      .share_bytes_max = 4 << 20,
                                                      .share_session_count_max = 8,
                                                      .sendfile_bytes_min = 8192,
                                                      .read_fd_count_max = 64};
    for (uint32_t i = 0; i < ENDPOINTS; i++) {
        b->options[worker].arenas[i] = b->arenas[i];
        b->options[worker].arena_bytes[i] = ARENA_BYTES;
    }
}

/* The fake worker serves its slot: it is online, empty, and has no producer. */
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
        mqd_reactor_add_log_dir(b->reactors[worker], ++b->token, 0, log_root);
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
        mqd_endpoint_end_sleep(own);
        if (eventfd_read(b->eventfds[endpoint], &value) < 0)
            continue;
    }
}

/* What the reactors did with the requests of the clients: printed when an expected descriptor does not arrive. */
static void bench_report(struct bench *b)
{
    struct mqd_event event;
    for (uint32_t worker = 0; worker < REACTORS; worker++) {
        fprintf(stderr,
                "worker %u: %llu turns, connections %llu accepted and %llu closed, %llu Produce and %llu Fetch, "
                "%llu batches forwarded and %llu refused\n",
                worker, (unsigned long long)mqd_counter_read(b->control, worker, MQD_COUNT_LOOPS),
                (unsigned long long)mqd_counter_read(b->control, worker, MQD_COUNT_CONNECTIONS_ACCEPTED),
                (unsigned long long)mqd_counter_read(b->control, worker, MQD_COUNT_CONNECTIONS_CLOSED),
                (unsigned long long)mqd_counter_read(b->control, worker, MQD_COUNT_REQUESTS_PRODUCE),
                (unsigned long long)mqd_counter_read(b->control, worker, MQD_COUNT_REQUESTS_FETCH),
                (unsigned long long)mqd_counter_read(b->control, worker, MQD_COUNT_BATCHES_FORWARDED),
                (unsigned long long)mqd_counter_read(b->control, worker, MQD_COUNT_BATCHES_REFUSED));
        while (mqd_reactor_next_event(b->reactors[worker], &event)) {
            fprintf(stderr, "worker %u: %s\n", worker, event.text);
            mqd_proposal_free(event.proposal);
        }
    }
}

/* The next of `kind`; RELEASE notes and other kinds are skipped. */
__attribute__((unused)) static struct mqd_descriptor bench_expect(struct bench *b, uint32_t endpoint, uint16_t kind,
                                                                  uint32_t *from)
{
    struct mqd_descriptor descriptor;
    uint32_t sender;
    do
        CHECK_OR(bench_take(b, endpoint, &descriptor, from ? from : &sender, LIMIT_MS), bench_report(b); abort());
    while (descriptor.kind != kind);
    return descriptor;
}

__attribute__((unused)) static void bench_put(struct bench *b, uint32_t endpoint, uint32_t to,
                                              struct mqd_descriptor descriptor)
{
    while (mqd_endpoint_send(b->endpoints[endpoint], to, &descriptor) < 0)
        mqd_endpoint_flush(b->endpoints[endpoint]);
    mqd_endpoint_flush(b->endpoints[endpoint]);
}

/* The acceptor's response to `request`: correlation id and `body`, placed at `at` in its arena. */
__attribute__((unused)) static void bench_respond(struct bench *b, uint32_t to, const struct mqd_descriptor *request,
                                                  const char *body, uint16_t flags, bool first, uint64_t at)
{
    uint8_t *bytes = b->arenas[ACCEPTOR] + at;
    uint32_t size_bytes = 0;
    if (first) {
        memcpy(bytes, b->arenas[to] + request->offset + 4, 4);
        size_bytes = 4;
    }
    memcpy(bytes + size_bytes, body, strlen(body));
    bench_put(b, ACCEPTOR, to,
              (struct mqd_descriptor){.kind = MQD_LINK_RESPONSE,
                                      .flags = flags,
                                      .token = request->token,
                                      .offset = at,
                                      .size_bytes = size_bytes + (uint32_t)strlen(body),
                                      .a = (int64_t)mqd_control_metadata_version(b->control)});
}

/* BOTH(test) { ... backend ... }: once for io_uring, where it is permitted, and once for epoll.
 * Under ThreadSanitizer the short pass has epoll alone: the threads are the same, and it does not
 * see what the kernel does for io_uring. */
#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define TEST_THREAD_SANITIZER true
#endif
#elif defined(__SANITIZE_THREAD__)
#define TEST_THREAD_SANITIZER true
#endif
#ifndef TEST_THREAD_SANITIZER
#define TEST_THREAD_SANITIZER false
#endif
__attribute__((unused)) static bool backend_works(int backend)
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
        if ((!TEST_THREAD_SANITIZER || test_long()) && backend_works(MQD_BACKEND_IO_URING))                            \
            function(MQD_BACKEND_IO_URING);                                                                            \
    }                                                                                                                  \
    TEST(function##_epoll)                                                                                             \
    {                                                                                                                  \
        function(MQD_BACKEND_EPOLL);                                                                                   \
    }                                                                                                                  \
    static void function(int backend)

#include "mqd_frames_test.h"

/* The block before the response that authenticates a client; returns its size. */
static inline uint32_t authenticated_put(uint8_t *at, const char *principal, uint8_t kind, uint64_t session_ms)
{
    struct mqd_authenticated block = {
        .size_bytes = (uint16_t)strlen(principal), .kind = kind, .session_ms = session_ms};
    memcpy(at, &block, sizeof block);
    memcpy(at + sizeof block, principal, block.size_bytes);
    return (uint32_t)sizeof block + block.size_bytes;
}

#endif
