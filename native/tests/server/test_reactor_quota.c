/* tsan: long */
/* Quotas on the reactor: responses are sent immediately with the throttle time; later requests wait
 * in the socket; no other client waits; nothing is lost.
 *
 * Delays have only a lower bound, because a slow machine makes everything later; tests of clients that
 * must not wait also have an upper bound, LIMIT_MS. A throttle time counts from its response, which a
 * slow machine sends later: what has a lower bound is the time until which the client is to wait. */
#include "mqd_counter_test.h"

#include "shm/quota.h"

#define SECOND_NS 1000000000ll
#define TICK_MS 8 /* clocks of the two sides, rounding to milliseconds */

static uint64_t per_second(uint64_t units)
{
    return (uint64_t)(((unsigned __int128)SECOND_NS << 32) / units);
}

static void limit(struct bench *b, const char *client_id, enum mqd_quota_kind kind, uint64_t units_per_second,
                  int64_t burst_ns)
{
    uint64_t client = mqd_quota_key(b->control, (const uint8_t *)client_id, (uint32_t)strlen(client_id));
    struct mqd_quota_rule rule = {.key = mqd_quota_rule_key(MQD_QUOTA_CLIENT, 0, client), .level = MQD_QUOTA_CLIENT};
    rule.interval[kind] = units_per_second ? per_second(units_per_second) : 0;
    int64_t bursts_ns[MQD_QUOTA_KIND_COUNT] = {burst_ns, burst_ns, burst_ns, burst_ns};
    CHECK_EQUAL(mqd_quota_publish(b->control, &rule, 1, bursts_ns), 0);
}

/* Adds a client id to the frame, which has none. */
static void name_frame(struct frame *frame, const char *client_id)
{
    struct frame named = {0};
    put_bytes(&named, frame->bytes, 12);
    put_text(&named, client_id);
    put_bytes(&named, frame->bytes + 14, frame->size_bytes - 14);
    frame_end(&named, 0);
    frame_free(frame);
    *frame = named;
}

static void send_produce(struct client *client, const char *client_id, int32_t correlation_id, int32_t partition,
                         int32_t body_bytes)
{
    struct frame frame = {0};
    struct part part = {partition, {.body_bytes = body_bytes}};
    put_produce(&frame, correlation_id, -1, LIMIT_MS, &part, 1);
    name_frame(&frame, client_id);
    CHECK(client_send(client, &frame));
    frame_free(&frame);
}

/* The throttle time in the response to `correlation_id`; -1 = no valid response. */
static int64_t take_throttle_ms(struct client *client, int32_t correlation_id)
{
    CHECK_OR(client_receive(client) == 1, return -1);
    struct produced produced = take_produced(client);
    CHECK_OR(produced.correlation_id == correlation_id && produced.count == 1 && produced.error[0] == 0, return -1);
    client->at = client->reply_bytes - 4;
    return (int64_t)take(client, 4);
}

static int64_t now_ms(void)
{
    return test_now_ns() / 1000000;
}

static bool silent(struct client *client, int ms)
{
    struct pollfd wait = {client->fd, POLLIN, 0};
    return poll(&wait, 1, ms) == 0;
}

BOTH(a_producer_is_answered_immediately_then_not_read_while_others_continue)
{
    struct bench *b = bench_start(backend, NULL);
    struct client slow = client_open(b, 0), other = client_open(b, 0);
    limit(b, "slow", MQD_QUOTA_PRODUCE, 10000, 0);
    int64_t began_ms = now_ms();
    for (int32_t i = 0; i < 3; i++) /* pipelined: the first is served, the others wait */
        send_produce(&slow, "slow", 10 + i, 0, 3000);
    int64_t debt_ms = 0;
    for (int32_t i = 0; i < 3; i++) {
        int64_t throttle_ms = take_throttle_ms(&slow, 10 + i);
        CHECK(now_ms() - began_ms >= debt_ms - TICK_MS); /* not before the debt of earlier requests was paid */
        debt_ms += 300;                                  /* 3 KB of records at 10 KB/s, and their overhead */
        CHECK(throttle_ms <= 320 && now_ms() - began_ms + throttle_ms >= debt_ms - TICK_MS);
        for (int32_t k = 0; k < 5; k++) {
            send_produce(&other, "other", 100 + k, 0, 50000);
            CHECK_EQUAL(take_throttle_ms(&other, 100 + k), 0);
        }
    }
    client_close(&slow);
    client_close(&other);
    bench_stop(b);
}

BOTH(connections_of_one_client_id_share_its_limit_on_all_workers)
{
    struct bench *b = bench_start(backend, NULL);
    struct client clients[2] = {client_open(b, 0), client_open(b, 1)};
    limit(b, "both", MQD_QUOTA_PRODUCE, 10000, 0);
    int64_t began_ms = now_ms(), bytes = 0;
    for (int32_t round = 0; round < 4; round++)
        for (int32_t i = 0; i < 2; i++) {
            send_produce(&clients[i], "both", round, i, 1000);
            if (round || i) /* all except the first waited for earlier requests */
                CHECK(now_ms() >= began_ms);
            int64_t throttle_ms = take_throttle_ms(&clients[i], round), passed_ms = now_ms() - began_ms;
            CHECK(throttle_ms >= 0 && passed_ms >= bytes / 10 - TICK_MS);
            bytes += 1000;
            CHECK(passed_ms + throttle_ms >= bytes / 10 - TICK_MS);
        }
    client_close(&clients[0]);
    client_close(&clients[1]);
    bench_stop(b);
}

BOTH(within_the_burst_no_client_waits)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0);
    limit(b, "c", MQD_QUOTA_PRODUCE, 10000, 10 * SECOND_NS);
    for (int32_t i = 0; i < 9; i++) {
        send_produce(&client, "c", i, 0, 10000);
        CHECK_EQUAL(take_throttle_ms(&client, i), 0);
    }
    send_produce(&client, "c", 9, 0, 200000);
    CHECK(take_throttle_ms(&client, 9) > 5000);
    client_close(&client);
    bench_stop(b);
}

BOTH(raising_or_removing_the_quota_ends_an_endless_wait)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 1);
    for (int32_t round = 0; round < 2; round++) {
        limit(b, "c", MQD_QUOTA_PRODUCE, 1, 0);
        send_produce(&client, "c", 1, 1, 100000);
        CHECK(take_throttle_ms(&client, 1) > 90000);
        send_produce(&client, "c", 2, 1, 100000); /* a large frame: it stays in the socket */
        send_produce(&client, "c", 3, 1, 10);
        CHECK(silent(&client, 50));
        limit(b, "c", MQD_QUOTA_PRODUCE, round ? 0 : 1000000000, SECOND_NS);
        CHECK_EQUAL(take_throttle_ms(&client, 2), 0);
        CHECK_EQUAL(take_throttle_ms(&client, 3), 0);
    }
    client_close(&client);
    bench_stop(b);
}

BOTH(a_new_connection_does_not_avoid_the_quota_and_muted_ones_can_close)
{
    struct bench *b = bench_start(backend, NULL);
    limit(b, "c", MQD_QUOTA_PRODUCE, 1, 0);
    struct client first = client_open(b, 0);
    send_produce(&first, "c", 1, 0, 5000);
    CHECK(take_throttle_ms(&first, 1) > 4000);
    for (int32_t i = 0; i < 4; i++) {
        struct client again = client_open(b, (uint32_t)i % 2);
        send_produce(&again, "c", 2, 0, 10);
        CHECK(silent(&again, 30));
        client_close(&again);
    }
    struct client stranger = client_open(b, 0);
    send_produce(&stranger, "stranger", 3, 0, 5000);
    CHECK_EQUAL(take_throttle_ms(&stranger, 3), 0);
    client_close(&stranger);
    bench_stop(b); /* with muted connections */
    client_close(&first);
}

BOTH(a_consumer_gets_the_burst_and_is_charged_for_it)
{
    static struct fetched fetched;
    struct bench *b = bench_start(backend, NULL);
    struct client writer = client_open(b, 0), reader = client_open(b, 1);
    for (int32_t i = 0; i < 10; i++) {
        send_produce(&writer, "w", i, 0, 10000);
        CHECK_EQUAL(take_throttle_ms(&writer, i), 0);
    }
    limit(b, "r", MQD_QUOTA_FETCH, 50000, SECOND_NS / 2);
    int64_t began_ms = now_ms(), offset = 0, bytes = 0;
    while (offset < 10) {
        struct frame frame = {0};
        struct fetch_position requested = {0, offset};
        put_fetch(&frame,
                  (struct fetch){
                      .correlation_id = 5, .wait_ms = 1000, .bytes_min = 1, .bytes_max = 4 << 20, .session_epoch = -1},
                  &requested, 1);
        name_frame(&frame, "r");
        CHECK(client_send(&reader, &frame));
        frame_free(&frame);
        CHECK_EQUAL(client_receive(&reader), 1);
        take_fetched(&reader, &fetched);
        CHECK_EQUAL(fetched.error[0], 0);
        CHECK(fetched.batch_count > 0 && fetched.batch_count <= 2); /* 25 KB is half a second's worth */
        CHECK(now_ms() - began_ms >= bytes / 50 - 500 - TICK_MS);
        offset = fetched.batches[fetched.batch_count - 1].offset + 1;
        bytes += 10000 * (int64_t)fetched.batch_count;
    }
    client_close(&writer);
    client_close(&reader);
    bench_stop(b);
}

BOTH(request_time_is_charged_for_every_api)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0);
    /* a thousandth of one thread: the debt of any request lasts milliseconds */
    limit(b, "c", MQD_QUOTA_REQUEST, 1000000, 0);
    send_produce(&client, "c", 1, 0, 1000);
    CHECK(take_throttle_ms(&client, 1) >= 1);
    struct frame frame = {0};
    struct fetch_position requested = {0, 0};
    static struct fetched fetched;
    put_fetch(
        &frame,
        (struct fetch){.correlation_id = 5, .wait_ms = 1000, .bytes_min = 1, .bytes_max = 4 << 20, .session_epoch = -1},
        &requested, 1);
    name_frame(&frame, "c");
    CHECK(client_send(&client, &frame));
    frame_free(&frame);
    CHECK_EQUAL(client_receive(&client), 1);
    take_fetched(&client, &fetched);
    client.at = 4;
    CHECK(take(&client, 4) >= 1);
    client_close(&client);
    bench_stop(b);
}

static void send_part(struct client *client, const struct frame *frame, uint32_t from, uint32_t to)
{
    CHECK(client_send(client, &(struct frame){.bytes = frame->bytes + from, .size_bytes = to - from}));
}

/* A large frame of a client in debt that finds the arena full does not make others wait until the
 * debt is paid. */
BOTH(a_muted_client_that_waits_for_room_delays_no_other)
{
    struct bench *b = bench_start(backend, NULL);
    struct client muted = client_open(b, 0), debtor = client_open(b, 0),
                  holders[2] = {client_open(b, 0), client_open(b, 0)}, stranger = client_open(b, 0);
    struct frame big = {0}, large = {0};
    struct part big_part = {0, {.body_bytes = 1400000}}, large_part = {0, {.body_bytes = 1000000}};
    limit(b, "slow", MQD_QUOTA_PRODUCE, 100, 2 * SECOND_NS);
    send_produce(&muted, "slow", 1, 0, 10);
    CHECK_EQUAL(take_throttle_ms(&muted, 1), 0); /* it is known by now, and owes nothing */
    put_produce(&big, 5, 1, LIMIT_MS, &big_part, 1);
    name_frame(&big, "holder");
    put_produce(&large, 6, 1, LIMIT_MS, &large_part, 1);
    name_frame(&large, "slow");
    uint64_t bytes_in = counted(b, MQD_COUNT_BYTES_IN);
    for (int i = 0; i < 2; i++)
        send_part(&holders[i], &big, 0, 700000); /* 44 of the 45 extents that large frames may have */
    wait_for_count(b, MQD_COUNT_BYTES_IN, bytes_in + 1400000);
    uint64_t stalls = counted(b, MQD_COUNT_ARENA_STALLS);
    send_part(&muted, &large, 0, 500000);
    wait_for_count(b, MQD_COUNT_ARENA_STALLS, stalls + 1); /* there is no run for it: first of those that wait */
    send_produce(&debtor, "slow", 7, 0, 25000);
    CHECK(take_throttle_ms(&debtor, 7) > 3 * LIMIT_MS);
    for (int i = 0; i < 2; i++) { /* the arena is free again */
        send_part(&holders[i], &big, 700000, big.size_bytes);
        CHECK_EQUAL(client_receive(&holders[i]), 1); /* too large a batch: refused */
    }
    send_produce(&stranger, "stranger", 8, 0, 100000);
    CHECK_EQUAL(take_throttle_ms(&stranger, 8), 0);
    frame_free(&big);
    frame_free(&large);
    for (int i = 0; i < 2; i++)
        client_close(&holders[i]);
    client_close(&muted);
    client_close(&debtor);
    client_close(&stranger);
    bench_stop(b);
}

/* A throttled client that gives up and connects again: its old connections are freed before the debt
 * is paid, and requests that it sent without waiting for responses count. */
BOTH(a_muted_client_that_closed_is_freed_and_its_requests_count)
{
    enum { COUNT = 20 };
    struct bench *b = bench_start(backend, NULL);
    struct client first = client_open(b, 0), writer = client_open(b, 0);
    limit(b, "c", MQD_QUOTA_PRODUCE, 100, 0);
    send_produce(&first, "c", 1, 0, 5000);
    CHECK(take_throttle_ms(&first, 1) > LIMIT_MS);
    struct part part = {0, {.body_bytes = 10}};
    for (int32_t i = 0; i < COUNT; i++) {
        uint64_t throttled = counted(b, MQD_COUNT_THROTTLED);
        struct client again = client_open(b, 0);
        for (int32_t k = 0; k < 2; k++) { /* the second one stays in the socket */
            struct frame frame = {0};
            put_produce(&frame, 2, 0, LIMIT_MS, &part, 1);
            name_frame(&frame, "c");
            CHECK(client_send(&again, &frame));
            frame_free(&frame);
        }
        if (i % 2) /* otherwise it closes before or after it is muted */
            wait_for_count(b, MQD_COUNT_THROTTLED, throttled + 1);
        client_close(&again);
    }
    client_close(&first);
    CHECK(connections_left(b, 1));
    struct produced produced = client_produce(&writer, 1, &part, 1);
    CHECK_EQUAL(produced.base_offset[0], 1 + 2 * COUNT);
    struct client stranger = client_open(b, 0); /* the debt stays */
    send_produce(&stranger, "c", 3, 0, 10);
    CHECK(silent(&stranger, 50));
    client_close(&stranger);
    client_close(&writer);
    bench_stop(b);
}

static bool is_served(struct client *client)
{
    send_produce(client, "c", 1, 0, 10);
    return client_receive(client) == 1;
}

/* What a refused client sees: the end of its connection. */
static bool is_refused(struct client *client)
{
    char byte;
    struct pollfd wait = {client->fd, POLLIN, 0};
    return poll(&wait, 1, LIMIT_MS) == 1 && recv(client->fd, &byte, 1, 0) <= 0;
}

BOTH(connections_per_address_and_per_listener_are_bounded_over_all_workers)
{
    struct bench *b = bench_start(backend, NULL);
    struct client clients[3];
    for (uint32_t i = 0; i < 3; i++) /* counted without a limit too */
        clients[i] = client_open(b, i % 2);
    for (uint32_t i = 0; i < 3; i++)
        CHECK(is_served(&clients[i]));
    for (uint32_t which = 0; which < 2; which++) {
        b->address_count_max = which ? 0 : 4;
        b->listener_count_max = which ? 4 : 0;
        struct client last = client_open(b, 0);
        CHECK(is_served(&last)); /* counted before the next connection, on the other worker */
        struct client more = client_open(b, 1), host = client_open_as(b, 1, 3);
        CHECK(is_refused(&more));
        CHECK(is_served(&host)); /* of the cluster: not limited */
        uint64_t closed = counted(b, MQD_COUNT_CONNECTIONS_CLOSED);
        client_close(&last);
        wait_for_count(b, MQD_COUNT_CONNECTIONS_CLOSED, closed + 1);
        struct client again = client_open(b, 0);
        CHECK(is_served(&again));
        closed = counted(b, MQD_COUNT_CONNECTIONS_CLOSED);
        client_close(&again);
        client_close(&more);
        client_close(&host);
        wait_for_count(b, MQD_COUNT_CONNECTIONS_CLOSED, closed + 1);
    }
    for (uint32_t i = 0; i < 3; i++)
        client_close(&clients[i]);
    bench_stop(b);
}
