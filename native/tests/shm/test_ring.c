/* tsan */
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/error.h"
#include "mqd_test.h"
#include "shm/ring.h"

static struct mqd_ring *ring_make(uint32_t capacity, uint64_t counter)
{
    struct mqd_ring *ring = aligned_alloc(64, mqd_ring_size_bytes(capacity));
    memset(ring, 0, mqd_ring_size_bytes(capacity));
    ring->head = ring->tail = counter;
    return ring;
}

static bool put(struct mqd_ring_writer *writer, uint64_t token)
{
    struct mqd_descriptor *place = mqd_ring_next(writer);
    if (!place)
        return false;
    *place = (struct mqd_descriptor){.kind = MQD_LINK_PRODUCE, .token = token, .a = ~(int64_t)token};
    mqd_ring_put(writer);
    return true;
}

/* Random puts, publishes and takes against a plain counter; counters start just below the wrap of
 * 64 bits. */
TEST(order_and_bounds_at_tiny_capacities)
{
    for (uint32_t capacity = 1; capacity <= 8; capacity *= 2) {
        struct mqd_ring *ring = ring_make(capacity, UINT64_MAX - 5);
        struct mqd_ring_writer writer;
        struct mqd_ring_reader reader;
        CHECK_EQUAL(mqd_ring_writer_open(&writer, ring, capacity), 0);
        CHECK_EQUAL(mqd_ring_reader_open(&reader, ring, capacity), 0);
        uint64_t seed = capacity, sent = 0, published = 0, taken = 0;
        for (int step = 0; step < 20000; step++) {
            struct mqd_descriptor out[16];
            uint32_t max = (uint32_t)(test_random(&seed) % 10);
            switch (test_random(&seed) % 3) {
            case 0: {
                bool room = sent - taken < capacity;
                CHECK_EQUAL(put(&writer, sent), room);
                sent += room;
                break;
            }
            case 1:
                mqd_ring_publish(&writer);
                published = sent;
                break;
            default: {
                uint32_t count = mqd_ring_take(&reader, out, max);
                /* the reader keeps its copy of tail while it has something: it may see less than
                 * published, never nothing, never more */
                CHECK(count <= published - taken && (count > 0 || published == taken || max == 0));
                for (uint32_t i = 0; i < count; i++, taken++)
                    CHECK(out[i].token == taken && out[i].a == ~(int64_t)taken);
            }
            }
            CHECK_EQUAL(mqd_ring_free_count(&writer), capacity - (sent - taken));
        }
        CHECK(taken > 1000);
        free(ring);
    }
}

TEST(unpublished_is_invisible_and_dies_with_the_writer)
{
    struct mqd_ring *ring = ring_make(4, 0);
    struct mqd_ring_writer writer, restarted;
    struct mqd_ring_reader reader;
    struct mqd_descriptor out[4];
    mqd_ring_writer_open(&writer, ring, 4);
    mqd_ring_reader_open(&reader, ring, 4);
    put(&writer, 1);
    mqd_ring_publish(&writer);
    put(&writer, 2);
    put(&writer, 3);
    CHECK_EQUAL(mqd_ring_take(&reader, out, 4), 1);
    CHECK_EQUAL(mqd_ring_take(&reader, out, 4), 0);
    CHECK_EQUAL(mqd_ring_writer_open(&restarted, ring, 4), 0);
    CHECK_EQUAL(mqd_ring_free_count(&restarted), 4);
    put(&restarted, 7);
    mqd_ring_publish(&restarted);
    CHECK_EQUAL(mqd_ring_take(&reader, out, 4), 1);
    CHECK_EQUAL(out[0].token, 7);
    free(ring);
}

TEST(a_restarted_reader_continues)
{
    struct mqd_ring *ring = ring_make(8, 0);
    struct mqd_ring_writer writer;
    struct mqd_ring_reader reader, restarted;
    struct mqd_descriptor out[8];
    mqd_ring_writer_open(&writer, ring, 8);
    mqd_ring_reader_open(&reader, ring, 8);
    for (uint64_t i = 0; i < 6; i++)
        put(&writer, i);
    mqd_ring_publish(&writer);
    CHECK_EQUAL(mqd_ring_take(&reader, out, 2), 2);
    CHECK_EQUAL(mqd_ring_reader_open(&restarted, ring, 8), 0);
    CHECK_EQUAL(mqd_ring_take(&restarted, out, 8), 4);
    CHECK_EQUAL(out[0].token, 2);
    free(ring);
}

TEST(impossible_counters_are_refused_not_followed)
{
    struct mqd_ring *ring = ring_make(4, 100);
    struct mqd_ring_writer writer, second;
    struct mqd_ring_reader reader;
    struct mqd_descriptor out[64];
    mqd_ring_writer_open(&writer, ring, 4);
    mqd_ring_reader_open(&reader, ring, 4);
    static const uint64_t tails[] = {105, 99, 0, UINT64_MAX};
    for (size_t i = 0; i < 4; i++) {
        ring->tail = tails[i];
        CHECK_EQUAL(mqd_ring_take(&reader, out, 64), 0);
        CHECK(reader.corrupt);
        CHECK_EQUAL(mqd_ring_writer_open(&second, ring, 4), -1);
        CHECK_EQUAL(mqd_error_code(), MQD_E_CORRUPT);
        CHECK_CONTAINS(mqd_error_message(), "restart");
    }
    ring->tail = 100;
    for (uint64_t i = 0; i < 4; i++)
        CHECK(put(&writer, i));
    ring->head = 105; /* beyond what was sent */
    CHECK(!put(&writer, 4));
    CHECK(writer.corrupt);
    ring->head = 99;
    CHECK_EQUAL(mqd_ring_free_count(&writer), 0);
    CHECK_EQUAL(mqd_ring_writer_open(&second, ring, 3), -1);
    CHECK_EQUAL(mqd_error_code(), MQD_E_INVALID);
    free(ring);
}

/* ---- endpoints ---- */

struct host {
    void *control;
    void *links;
    uint32_t count;
    int eventfd[MQD_ENDPOINT_COUNT_MAX];
};

static void host_make(struct host *host, uint32_t count)
{
    static const uint8_t boot_id[16];
    host->count = count;
    host->control = aligned_alloc(64, mqd_control_size_bytes());
    memset(host->control, 0, mqd_control_size_bytes());
    mqd_control_format(host->control, mqd_control_size_bytes(), count > 2 ? count - 2 : 1, boot_id, 1, 0);
    host->links = aligned_alloc(64, mqd_links_size_bytes(count));
    memset(host->links, 0, mqd_links_size_bytes(count));
    mqd_links_format(host->links, mqd_links_size_bytes(count), count);
    for (uint32_t i = 0; i < count; i++)
        host->eventfd[i] = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
}

static void host_free(struct host *host)
{
    for (uint32_t i = 0; i < host->count; i++)
        close(host->eventfd[i]);
    free(host->control);
    free(host->links);
}

static struct mqd_endpoint *host_open(struct host *host, uint32_t self)
{
    return mqd_endpoint_open(host->control, host->links, self, host->count, host->eventfd);
}

static uint64_t wakeups(struct host *host, uint32_t endpoint)
{
    uint64_t value = 0;
    return read(host->eventfd[endpoint], &value, sizeof value) == sizeof value ? value : 0;
}

/* A process that opens the segment wakes all others: that wake-up is consumed. */
static void three_open(struct host *host, struct mqd_endpoint **a, struct mqd_endpoint **b, struct mqd_endpoint **c)
{
    host_make(host, 3);
    *a = host_open(host, 0), *b = host_open(host, 1), *c = host_open(host, 2);
    for (uint32_t i = 0; i < host->count; i++)
        wakeups(host, i);
}

static void three_close(struct host *host, struct mqd_endpoint *a, struct mqd_endpoint *b, struct mqd_endpoint *c)
{
    mqd_endpoint_close(a);
    mqd_endpoint_close(b);
    mqd_endpoint_close(c);
    host_free(host);
}

TEST(the_last_endpoints_have_links_too)
{
    struct host host;
    host_make(&host, MQD_ENDPOINT_COUNT_MAX);
    struct mqd_endpoint *controller = host_open(&host, 65), *worker = host_open(&host, 0);
    CHECK(controller && worker);
    struct mqd_descriptor descriptor = {.kind = MQD_LINK_REQUEST, .token = 5}, out[4];
    uint32_t from[4];
    CHECK_EQUAL(mqd_endpoint_send(worker, 65, &descriptor), 0);
    CHECK_EQUAL(mqd_endpoint_send(controller, 0, &descriptor), 0);
    CHECK_EQUAL(mqd_endpoint_send(controller, 65, &descriptor), 0); /* to itself */
    CHECK_EQUAL(mqd_endpoint_send(controller, 66, &descriptor), -1);
    mqd_endpoint_flush(worker);
    mqd_endpoint_flush(controller);
    CHECK_EQUAL(mqd_endpoint_drain(controller, out, from, 4), 2);
    CHECK_EQUAL(from[0] + from[1], 65);
    CHECK_EQUAL(mqd_endpoint_drain(worker, out, from, 4), 1);
    CHECK_EQUAL(from[0], 65);
    CHECK_EQUAL(out[0].token, 5);
    mqd_endpoint_close(controller);
    mqd_endpoint_close(worker);
    CHECK(mqd_endpoint_open(host.control, host.links, 66, 66, host.eventfd) == NULL);
    CHECK(mqd_endpoint_open(host.control, host.links, 0, 67, host.eventfd) == NULL);
    host_free(&host);
}

TEST(entries_are_invisible_before_flush_and_a_full_ring_is_reported)
{
    struct host host;
    host_make(&host, 3);
    struct mqd_endpoint *a = host_open(&host, 0), *b = host_open(&host, 1);
    struct mqd_descriptor descriptor = {.kind = MQD_LINK_PRODUCE}, out[8];
    uint32_t from[8];
    CHECK_EQUAL(mqd_endpoint_free_count(a, 1), MQD_LINK_DESCRIPTOR_COUNT);
    for (int i = 0; i < MQD_LINK_DESCRIPTOR_COUNT; i++)
        CHECK_EQUAL(mqd_endpoint_send(a, 1, &descriptor), 0);
    CHECK_EQUAL(mqd_endpoint_send(a, 1, &descriptor), -1);
    CHECK_EQUAL(mqd_error_code(), MQD_E_FULL);
    CHECK_EQUAL(mqd_endpoint_free_count(a, 1), 0);
    CHECK_EQUAL(mqd_endpoint_free_count(a, 2), MQD_LINK_DESCRIPTOR_COUNT);
    CHECK_EQUAL(mqd_endpoint_drain(b, out, from, 8), 0);
    mqd_endpoint_flush(a);
    CHECK_EQUAL(mqd_endpoint_drain(b, out, from, 8), 8);
    CHECK_EQUAL(mqd_endpoint_free_count(a, 1), 8);
    mqd_endpoint_close(a);
    mqd_endpoint_close(b);
    host_free(&host);
}

TEST(drain_is_fair)
{
    struct host host;
    host_make(&host, 5);
    struct mqd_endpoint *reader = host_open(&host, 4), *writer[4];
    struct mqd_descriptor out[64];
    uint32_t from[64];
    for (uint32_t i = 0; i < 4; i++) {
        writer[i] = host_open(&host, i);
        struct mqd_descriptor descriptor = {0};
        int count = i == 0 ? MQD_LINK_DESCRIPTOR_COUNT : 3; /* one floods, three have a little */
        for (int j = 0; j < count; j++) {
            descriptor.token = (uint64_t)j;
            mqd_endpoint_send(writer[i], 4, &descriptor);
        }
        mqd_endpoint_flush(writer[i]);
    }
    uint64_t next[4] = {0};
    int count = mqd_endpoint_drain(reader, out, from, 64);
    CHECK_EQUAL(count, 64);
    for (int drained = 0; count > 0; drained++, count = mqd_endpoint_drain(reader, out, from, 64)) {
        for (int i = 0; i < count; i++)
            CHECK_EQUAL(out[i].token, next[from[i]]++);
        if (drained == 0)
            CHECK(next[1] == 3 && next[2] == 3 && next[3] == 3);
    }
    CHECK_EQUAL(next[0], MQD_LINK_DESCRIPTOR_COUNT);
    /* with room for one, the links take turns */
    for (uint32_t i = 0; i < 4; i++) {
        mqd_endpoint_send(writer[i], 4, &(struct mqd_descriptor){0});
        mqd_endpoint_send(writer[i], 4, &(struct mqd_descriptor){0});
        mqd_endpoint_flush(writer[i]);
    }
    unsigned seen = 0;
    for (int i = 0; i < 4; i++) {
        CHECK_EQUAL(mqd_endpoint_drain(reader, out, from, 1), 1);
        seen |= 1u << from[0];
    }
    CHECK_EQUAL(seen, 15);
    for (uint32_t i = 0; i < 4; i++)
        mqd_endpoint_close(writer[i]);
    mqd_endpoint_close(reader);
    host_free(&host);
}

TEST(only_sleepers_are_woken_and_only_once)
{
    struct host host;
    struct mqd_endpoint *a, *b, *c;
    three_open(&host, &a, &b, &c);
    struct mqd_descriptor descriptor = {0}, out[8];
    uint32_t from[8];
    mqd_endpoint_send(a, 1, &descriptor);
    mqd_endpoint_flush(a);
    CHECK_EQUAL(wakeups(&host, 1), 0); /* b is awake */
    CHECK_EQUAL(mqd_endpoint_has_inbound(b), 1);
    CHECK_EQUAL(mqd_endpoint_has_inbound(c), 0);
    CHECK_EQUAL(mqd_endpoint_prepare_sleep(b), 1);
    CHECK_EQUAL(mqd_endpoint_drain(b, out, from, 8), 1);
    CHECK_EQUAL(mqd_endpoint_prepare_sleep(b), 0);
    mqd_endpoint_send(a, 1, &descriptor);
    mqd_endpoint_send(a, 1, &descriptor);
    CHECK_EQUAL(wakeups(&host, 1), 0); /* not before flush */
    mqd_endpoint_flush(a);
    mqd_endpoint_send(c, 1, &descriptor);
    mqd_endpoint_flush(c);
    mqd_endpoint_flush(c); /* nothing staged */
    CHECK_EQUAL(wakeups(&host, 1), 1);
    mqd_endpoint_end_sleep(b);
    CHECK_EQUAL(mqd_endpoint_drain(b, out, from, 8), 3);
    /* the endpoint does not sleep with staged descriptors */
    CHECK_EQUAL(mqd_endpoint_prepare_sleep(c), 0);
    mqd_endpoint_send(b, 2, &descriptor);
    CHECK_EQUAL(mqd_endpoint_prepare_sleep(b), 0);
    CHECK_EQUAL(wakeups(&host, 2), 1);
    CHECK_EQUAL(mqd_endpoint_drain(c, out, from, 8), 1);
    three_close(&host, a, b, c);
}

TEST(what_is_sent_quietly_wakes_only_when_the_ring_fills_up)
{
    struct host host;
    struct mqd_endpoint *a, *b, *c;
    three_open(&host, &a, &b, &c);
    CHECK_EQUAL(mqd_endpoint_prepare_sleep(b), 0);
    for (int i = 0; i <= MQD_LINK_DESCRIPTOR_COUNT / 2; i++) {
        CHECK_EQUAL(wakeups(&host, 1), 0);
        CHECK_EQUAL(mqd_endpoint_send_quietly(a, 1, &(struct mqd_descriptor){0}), 0);
        mqd_endpoint_flush(a);
    }
    CHECK_EQUAL(wakeups(&host, 1), 1);
    three_close(&host, a, b, c);
}

TEST(restarted_endpoint_continues_under_its_new_generation)
{
    struct host host;
    host_make(&host, 3);
    struct mqd_endpoint *a = host_open(&host, 0), *b = host_open(&host, 1);
    struct mqd_descriptor out[8];
    uint32_t from[8];
    for (uint64_t i = 0; i < 3; i++)
        mqd_endpoint_send(a, 1, &(struct mqd_descriptor){.token = i, .generation = 99});
    mqd_endpoint_flush(a);
    mqd_endpoint_send(a, 1, &(struct mqd_descriptor){.token = 3}); /* dies with it */
    CHECK_EQUAL(mqd_endpoint_drain(b, out, from, 1), 1);
    CHECK_EQUAL(out[0].generation, 0);
    mqd_endpoint_set_state(host.control, 0, MQD_PROCESS_DEAD, 0);
    struct mqd_endpoint *second = host_open(&host, 0);
    mqd_endpoint_send(second, 1, &(struct mqd_descriptor){.token = 10});
    mqd_endpoint_flush(second);
    /* the reader dies too, and asleep */
    CHECK_EQUAL(mqd_endpoint_prepare_sleep(b), 1);
    mqd_store_seq_cst(&mqd_control_endpoint(host.control, 1)->sleeping, 1);
    struct mqd_endpoint *third = host_open(&host, 1);
    CHECK_EQUAL(mqd_load_relaxed(&mqd_control_endpoint(host.control, 1)->sleeping), 0);
    CHECK_EQUAL(mqd_endpoint_drain(third, out, from, 8), 3);
    CHECK_EQUAL(out[0].token, 1);
    CHECK_EQUAL(out[1].token, 2);
    CHECK_EQUAL(out[1].generation, 0);
    CHECK_EQUAL(out[2].token, 10);
    CHECK_EQUAL(out[2].generation, 1);
    free(a); /* as a killed process: without its last flush */
    free(b);
    mqd_endpoint_close(second);
    mqd_endpoint_close(third);
    host_free(&host);
}

TEST(a_successor_wakes_whom_its_predecessor_forgot)
{
    struct host host;
    struct mqd_endpoint *a, *b, *c;
    three_open(&host, &a, &b, &c);
    CHECK_EQUAL(mqd_endpoint_prepare_sleep(b), 0);
    CHECK_EQUAL(mqd_endpoint_prepare_sleep(c), 0);
    mqd_endpoint_send(a, 1, &(struct mqd_descriptor){.token = 1});
    struct mqd_ring *a_to_b =
        (struct mqd_ring *)((uint8_t *)host.links + 1 * mqd_ring_size_bytes(MQD_LINK_DESCRIPTOR_COUNT));
    mqd_store_release(&a_to_b->tail, 1); /* published, and killed before it read the flag */
    free(a);
    CHECK_EQUAL(wakeups(&host, 1), 0);
    a = host_open(&host, 0);
    CHECK_EQUAL(wakeups(&host, 1), 1);
    three_close(&host, a, b, c);
}

/* Killed one step later: it had taken the flag, and had not written yet. */
TEST(a_successor_wakes_whose_flag_its_predecessor_took)
{
    struct host host;
    int nowhere[3] = {-1, -1, -1};
    struct mqd_endpoint *a, *b, *c;
    three_open(&host, &a, &b, &c);
    mqd_endpoint_close(a);
    a = mqd_endpoint_open(host.control, host.links, 0, 3, nowhere);
    CHECK_EQUAL(mqd_endpoint_prepare_sleep(b), 0);
    mqd_endpoint_send(a, 1, &(struct mqd_descriptor){.token = 1});
    mqd_endpoint_flush(a);
    free(a);
    mqd_endpoint_send(c, 1, &(struct mqd_descriptor){.token = 2});
    mqd_endpoint_flush(c); /* finds no endpoint asleep */
    CHECK_EQUAL(wakeups(&host, 1), 0);
    a = host_open(&host, 0);
    CHECK_EQUAL(wakeups(&host, 1), 1);
    three_close(&host, a, b, c);
}

/* Killed at the same step, but the sleeper had read the published entry before it slept: nothing
 * in the ring shows it. */
TEST(a_successor_wakes_whose_flag_was_taken_beside_an_empty_ring)
{
    struct host host;
    struct mqd_endpoint *a, *b, *c;
    three_open(&host, &a, &b, &c);
    struct mqd_descriptor out;
    uint32_t from;
    mqd_endpoint_send(a, 1, &(struct mqd_descriptor){.token = 1});
    mqd_endpoint_flush(a);
    CHECK_EQUAL(mqd_endpoint_drain(b, &out, &from, 1), 1);
    CHECK_EQUAL(mqd_endpoint_prepare_sleep(b), 0);
    /* like a, which reads the flag late, and is killed */
    CHECK_EQUAL(mqd_exchange(&mqd_control_endpoint(host.control, 1)->sleeping, 0u), 1);
    free(a);
    mqd_endpoint_send(c, 1, &(struct mqd_descriptor){.token = 2});
    mqd_endpoint_flush(c);
    CHECK_EQUAL(wakeups(&host, 1), 0);
    a = host_open(&host, 0);
    CHECK_EQUAL(wakeups(&host, 1), 1);
    CHECK_EQUAL(mqd_endpoint_drain(b, &out, &from, 1), 1);
    three_close(&host, a, b, c);
}

TEST(a_corrupt_link_is_both_empty_and_full_and_others_continue)
{
    struct host host;
    struct mqd_endpoint *a, *b, *c;
    three_open(&host, &a, &b, &c);
    struct mqd_descriptor out[8];
    uint32_t from[8];
    struct mqd_ring *a_to_b =
        (struct mqd_ring *)((uint8_t *)host.links + 1 * mqd_ring_size_bytes(MQD_LINK_DESCRIPTOR_COUNT));
    a_to_b->tail = 1ull << 40;
    mqd_endpoint_send(c, 1, &(struct mqd_descriptor){.token = 4});
    mqd_endpoint_flush(c);
    CHECK_EQUAL(mqd_endpoint_drain(b, out, from, 8), 1);
    CHECK_EQUAL(from[0], 2);
    CHECK_EQUAL(mqd_endpoint_prepare_sleep(b), 0);
    a_to_b->head = 1ull << 40;
    CHECK_EQUAL(mqd_endpoint_free_count(a, 1), 0);
    CHECK_EQUAL(mqd_endpoint_send(a, 1, &(struct mqd_descriptor){0}), -1);
    CHECK_EQUAL(mqd_error_code(), MQD_E_CORRUPT);
    mqd_endpoint_close(a);
    mqd_endpoint_close(b);
    mqd_endpoint_close(c);
    a_to_b->head = 3;
    CHECK(host_open(&host, 0) == NULL);
    CHECK_CONTAINS(mqd_error_message(), "link between endpoints 0 and 1");
    host_free(&host);
}

TEST(format_refuses)
{
    uint64_t memory[8];
    CHECK_EQUAL(mqd_links_format(memory, sizeof memory, 3), -1);
    CHECK_EQUAL(mqd_links_format(memory, sizeof memory, 0), -1);
    CHECK_EQUAL(mqd_links_format(memory, sizeof memory, 67), -1);
}

/* ---- threads: three endpoints, each sends to the others and sleeps on its eventfd. A lost wake-up
 * hangs, a torn descriptor differs. ---- */

struct party {
    struct host *host;
    uint32_t self;
    uint64_t total;
};

static void *party_run(void *argument)
{
    struct party *party = argument;
    struct mqd_endpoint *endpoint = host_open(party->host, party->self);
    uint32_t count = party->host->count;
    uint64_t sent = 0, received = 0, seed = party->self, expected[8] = {0};
    struct mqd_descriptor out[32];
    uint32_t from[32];
    while (sent < party->total || received < party->total * (count - 1)) {
        int got = mqd_endpoint_drain(endpoint, out, from, 32);
        for (int i = 0; i < got; i++) {
            uint64_t token = expected[from[i]]++;
            CHECK_OR(out[i].token == token && out[i].a == (int64_t)(token * 3) && out[i].c == (int64_t)~token,
                     return NULL);
        }
        received += (uint64_t)got;
        uint64_t burst = test_random(&seed) % 5;
        bool moved = false;
        while (burst-- && sent < party->total) {
            bool room = true;
            for (uint32_t to = 0; to < count; to++)
                room = room && mqd_endpoint_free_count(endpoint, to) > 0;
            if (!room)
                break;
            struct mqd_descriptor descriptor = {.token = sent, .a = (int64_t)(sent * 3), .c = (int64_t)~sent};
            for (uint32_t to = 0; to < count; to++)
                if (to != party->self)
                    mqd_endpoint_send(endpoint, to, &descriptor);
            sent++;
            moved = true;
        }
        mqd_endpoint_flush(endpoint);
        if (got || moved || sent < party->total)
            continue;
        if (mqd_endpoint_prepare_sleep(endpoint) == 0 && received < party->total * (count - 1)) {
            uint64_t value;
            CHECK_OR(read(party->host->eventfd[party->self], &value, sizeof value) == sizeof value, return NULL);
        }
        mqd_endpoint_end_sleep(endpoint);
    }
    mqd_endpoint_close(endpoint);
    return NULL;
}

TEST(threads_exchange_and_sleep)
{
    struct host host;
    host_make(&host, 3);
    struct party party[3];
    pthread_t thread[3];
    for (uint32_t i = 0; i < 3; i++) {
        close(host.eventfd[i]);
        host.eventfd[i] = eventfd(0, EFD_CLOEXEC);
        party[i] = (struct party){.host = &host, .self = i, .total = test_long() ? 2000000 : 30000};
    }
    for (int i = 0; i < 3; i++)
        pthread_create(&thread[i], NULL, party_run, &party[i]);
    for (int i = 0; i < 3; i++)
        pthread_join(thread[i], NULL);
    host_free(&host);
}

/* Ping-pong: both sides sleep after every message, so that every message crosses the protocol. */
struct pong {
    struct host *host;
    uint32_t self;
    int rounds;
};

static void *pong_run(void *argument)
{
    struct pong *pong = argument;
    struct mqd_endpoint *endpoint = host_open(pong->host, pong->self);
    uint32_t peer = 1 - pong->self;
    for (int round = 0; round < pong->rounds; round++) {
        struct mqd_descriptor out;
        uint32_t from;
        if (pong->self == 0) {
            mqd_endpoint_send(endpoint, peer, &(struct mqd_descriptor){.token = (uint64_t)round});
            mqd_endpoint_flush(endpoint);
        }
        while (mqd_endpoint_drain(endpoint, &out, &from, 1) == 0) {
            uint64_t value;
            if (mqd_endpoint_prepare_sleep(endpoint) == 0)
                CHECK_OR(read(pong->host->eventfd[pong->self], &value, sizeof value) == sizeof value, return NULL);
            mqd_endpoint_end_sleep(endpoint);
        }
        CHECK_OR(out.token == (uint64_t)round, return NULL);
        if (pong->self == 1) {
            mqd_endpoint_send(endpoint, peer, &out);
            mqd_endpoint_flush(endpoint);
        }
    }
    mqd_endpoint_close(endpoint);
    return NULL;
}

TEST(threads_ping_pong_through_sleep)
{
    struct host host;
    host_make(&host, 2);
    struct pong pong[2];
    pthread_t thread[2];
    for (uint32_t i = 0; i < 2; i++) {
        close(host.eventfd[i]);
        host.eventfd[i] = eventfd(0, EFD_CLOEXEC);
        pong[i] = (struct pong){.host = &host, .self = i, .rounds = test_long() ? 500000 : 20000};
    }
    for (int i = 0; i < 2; i++)
        pthread_create(&thread[i], NULL, pong_run, &pong[i]);
    pthread_join(thread[0], NULL);
    pthread_join(thread[1], NULL);
    host_free(&host);
}
