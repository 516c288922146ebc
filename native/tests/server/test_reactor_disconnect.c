/* tsan: long */
/* Disconnected clients: their connections are freed, whatever they wait for. The test is the
 * acceptor, and does not respond. */
#include "mqd_counter_test.h"

enum { INFLIGHT_COUNT_MAX = 16, FIND_COORDINATOR = 10 };

/* As many requests as a connection may have in flight, and one that stays in its socket; the
 * acceptor has its own ones. */
static void fill(struct bench *b, struct client *client, bool fetch_first)
{
    struct frame frame = {0};
    struct fetch_position requested = {0, 0};
    if (fetch_first)
        put_fetch(&frame,
                  (struct fetch){.correlation_id = 1,
                                 .wait_ms = 10 * LIMIT_MS,
                                 .bytes_min = 1,
                                 .bytes_max = 1 << 20,
                                 .session_epoch = -1},
                  &requested, 1);
    for (int32_t i = fetch_first; i <= INFLIGHT_COUNT_MAX; i++)
        frame_end(&frame, frame_begin(&frame, FIND_COORDINATOR, 1, i));
    CHECK(client_send(client, &frame));
    for (int32_t i = fetch_first; i < INFLIGHT_COUNT_MAX; i++)
        bench_expect(b, ACCEPTOR, MQD_LINK_REQUEST, NULL);
    frame_free(&frame);
}

static void reset(struct client *client)
{
    struct linger at_once = {1, 0};
    setsockopt(client->fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
    client_close(client);
}

BOTH(a_closed_client_is_freed_though_the_acceptor_is_silent)
{
    struct bench *b = bench_start(backend, NULL);
    struct client resets = client_open(b, 0), closes = client_open(b, 0), stays = client_open(b, 0);
    fill(b, &resets, false);
    reset(&resets);
    fill(b, &closes, true);
    client_close(&closes); /* the response to its fetch finds no connection */
    fill(b, &stays, false);
    CHECK_EQUAL(shutdown(stays.fd, SHUT_WR), 0); /* sends no more, and takes its responses */
    CHECK(connections_left(b, 1));
    client_close(&stays);
    bench_stop(b);
}

/* Checks that a client that disconnected later, and waits for the acceptor, is freed. Batches
 * that arrived with acks=0 are written, although its worker was paused. */
BOTH(received_batches_are_written_after_a_disconnect_while_a_worker_stalls)
{
    enum { LATER = 50 };
    struct bench *b = bench_start(backend, NULL);
    struct client writes = client_open(b, 0), later = client_open(b, 0), other = client_open(b, 0);
    struct frame frame = {0};
    struct part slow = {4, {.mark = 1, .record_count = 1}}, own = {0, {.mark = 2, .record_count = 1}};
    for (int32_t i = 0; i < INFLIGHT_COUNT_MAX; i++)
        put_produce(&frame, i, 0, LIMIT_MS, &slow, 1);
    CHECK(client_send(&writes, &frame));
    struct mqd_descriptor requested[INFLIGHT_COUNT_MAX];
    for (int i = 0; i < INFLIGHT_COUNT_MAX; i++)
        requested[i] = bench_expect(b, FAKE, MQD_LINK_PRODUCE, NULL);
    frame.size_bytes = 0;
    for (int32_t i = 0; i < LATER; i++)
        put_produce(&frame, 100 + i, 0, LIMIT_MS, &own, 1);
    CHECK(client_send(&writes, &frame));
    reset(&writes);
    fill(b, &later, false);
    reset(&later);
    CHECK(connections_left(b, 2));
    for (int i = 0; i < INFLIGHT_COUNT_MAX; i++)
        bench_put(b, FAKE, 0,
                  (struct mqd_descriptor){.kind = MQD_LINK_PRODUCED, .token = requested[i].token, .a = i, .b = -1});
    CHECK(connections_left(b, 1));
    CHECK_EQUAL(client_produce(&other, 1, &own, 1).base_offset[0], LATER);
    frame_free(&frame);
    client_close(&other);
    bench_stop(b);
}

/* It left nothing unread, so the kernel does not report immediately that it reads no responses. Its
 * kernel keeps the connection for a second here, otherwise for a minute. */
BOTH(a_full_close_is_not_kept_like_a_half_close)
{
    struct bench *b = bench_start(backend, NULL);
    struct client closes = client_open(b, 0), stays = client_open(b, 0);
    int seconds = 1;
    CHECK_EQUAL(setsockopt(closes.fd, IPPROTO_TCP, TCP_LINGER2, &seconds, sizeof seconds), 0);
    fill(b, &closes, false);
    client_close(&closes);
    fill(b, &stays, false);
    CHECK_EQUAL(shutdown(stays.fd, SHUT_WR), 0);
    CHECK(connections_left(b, 1));
    struct pollfd wait = {stays.fd, POLLIN, 0};
    CHECK_EQUAL(poll(&wait, 1, 0), 0);
    client_close(&stays);
    bench_stop(b);
}
