/* tsan: long */
/* Requests that take the acceptor long (MQD_LINK_PARKED) and whose clients may disconnect
 * meanwhile (MQD_LINK_CANCEL): server/control_request.c. The test is the acceptor. */
#include "base/big_endian.h"
#include "mqd_reactor_test.h"

enum { FIND_COORDINATOR = 10, JOIN_GROUP = 11, SYNC_GROUP = 14, CREATE_TOPICS = 19 };

/* One request of `api_key` whose body is `body_bytes` of `fill`. */
static bool request_for(struct client *client, int16_t api_key, int32_t correlation_id, uint32_t body_bytes,
                        uint8_t fill)
{
    struct frame frame = {0};
    uint32_t begin = frame_begin(&frame, api_key, 1, correlation_id);
    for (uint32_t i = 0; i < body_bytes; i++)
        put(&frame, 1, fill);
    frame_end(&frame, begin);
    bool sent = client_send(client, &frame);
    frame_free(&frame);
    return sent;
}

static void park(struct bench *b, const struct mqd_descriptor *request)
{
    bench_put(b, ACCEPTOR, 0, (struct mqd_descriptor){.kind = MQD_LINK_PARKED, .token = request->token});
}

static void acceptor_dies_and_comes_back(struct bench *b)
{
    mqd_endpoint_set_state(b->control, ACCEPTOR, MQD_PROCESS_DEAD, 0);
    mqd_endpoint_close(b->endpoints[ACCEPTOR]);
    CHECK_EQUAL(mqd_reactor_endpoint_died(b->reactors[0], ++b->token, ACCEPTOR), 0);
    bench_done(b, 0, b->token);
    b->endpoints[ACCEPTOR] = mqd_endpoint_open(b->control, b->links, ACCEPTOR, ENDPOINTS, b->eventfds);
    mqd_endpoint_set_state(b->control, ACCEPTOR, MQD_PROCESS_RUNNING, getpid());
}

/* Whether other clients are served. Afterwards the reactor has processed everything sent before. */
static bool others_are_served(struct bench *b, struct client *other)
{
    static int32_t number = 1000000;
    CHECK_OR(request_for(other, FIND_COORDINATOR, ++number, 0, 0), return false);
    struct mqd_descriptor request = bench_expect(b, ACCEPTOR, MQD_LINK_REQUEST, NULL);
    /* every response has memory of its own: the reactor may still be reading the one before */
    bench_respond(b, 0, &request, "answer", 0, true, 65536 + (uint64_t)(number % 128) * 64);
    CHECK_OR(client_receive(other) == 1, return false);
    return (int32_t)take(other, 4) == number;
}

static bool is_answered(struct client *client, int32_t correlation_id)
{
    return client_receive(client) == 1 && (int32_t)take(client, 4) == correlation_id;
}

BOTH(long_requests_release_the_arena)
{
    enum { COUNT = 40, BODY_BYTES = 60000 }; /* more than the control arena holds, a quarter of ARENA_BYTES */
    struct bench *b = bench_start(backend, NULL);
    struct client clients[COUNT], other = client_open(b, 0);
    struct mqd_descriptor requests[COUNT];
    for (int i = 0; i < COUNT; i++) {
        clients[i] = client_open(b, 0);
        CHECK(request_for(&clients[i], i % 2 ? JOIN_GROUP : SYNC_GROUP, i, BODY_BYTES, (uint8_t)i));
        requests[i] = bench_expect(b, ACCEPTOR, MQD_LINK_REQUEST, NULL);
        CHECK(requests[i].size_bytes > BODY_BYTES &&
              b->arenas[0][requests[i].offset + requests[i].size_bytes - 1] == (uint8_t)i);
        park(b, &requests[i]);
        park(b, &requests[i]); /* once more changes nothing */
        /* of no request */
        bench_put(b, ACCEPTOR, 0,
                  (struct mqd_descriptor){.kind = MQD_LINK_PARKED, .token = requests[i].token + (1 << 16)});
        CHECK(others_are_served(b, &other));
    }
    for (int i = COUNT; i-- > 0;) {
        /* the frame has been released: the correlation id of the response comes from the test */
        uint32_t correlation_id = htobe32((uint32_t)i);
        uint64_t at = 64 * (1 + (uint64_t)i);
        memcpy(b->arenas[ACCEPTOR] + at, &correlation_id, 4);
        bench_put(b, ACCEPTOR, 0,
                  (struct mqd_descriptor){
                      .kind = MQD_LINK_RESPONSE, .token = requests[i].token, .offset = at, .size_bytes = 4});
        CHECK(is_answered(&clients[i], i));
        client_close(&clients[i]);
    }
    CHECK(others_are_served(b, &other));
    client_close(&other);
    bench_stop(b);
}

BOTH(the_acceptor_dies_while_requests_are_parked)
{
    struct bench *b = bench_start(backend, NULL);
    struct client sync = client_open(b, 0), join = client_open(b, 0), gone = client_open(b, 0),
                  other = client_open(b, 0);
    struct mqd_descriptor requested, request;
    CHECK(request_for(&sync, SYNC_GROUP, 1, 5000, 's'));
    requested = bench_expect(b, ACCEPTOR, MQD_LINK_REQUEST, NULL);
    park(b, &requested);
    CHECK(request_for(&join, JOIN_GROUP, 2, 100, 'j'));
    request = bench_expect(b, ACCEPTOR, MQD_LINK_REQUEST, NULL);
    park(b, &request);
    CHECK(request_for(&gone, SYNC_GROUP, 3, 100, 'g'));
    request = bench_expect(b, ACCEPTOR, MQD_LINK_REQUEST, NULL);
    park(b, &request);
    CHECK(others_are_served(b, &other));
    client_close(&gone);
    request = bench_expect(b, ACCEPTOR, MQD_LINK_CANCEL, NULL);
    /* its memory was returned: the request that is sent again must come from the worker's copy */
    memset(b->arenas[0] + requested.offset, 0, requested.size_bytes);
    acceptor_dies_and_comes_back(b);
    CHECK_EQUAL(client_receive(&join), 0);
    do /* requests to the dead acceptor are recognized by the generation that they name */
        request = bench_expect(b, ACCEPTOR, MQD_LINK_REQUEST, NULL);
    while (request.error != (int32_t)mqd_endpoint_generation(b->control, ACCEPTOR));
    CHECK_EQUAL(request.size_bytes, requested.size_bytes);
    for (uint32_t i = 0; i < 5000; i++)
        CHECK(b->arenas[0][request.offset + request.size_bytes - 1 - i] == 's');
    bench_respond(b, 0, &requested, "from the grave", 0, true, 64);
    park(b, &requested);
    park(b, &request);
    CHECK(others_are_served(b, &other));
    client_close(&sync);
    struct mqd_descriptor abandoned = bench_expect(b, ACCEPTOR, MQD_LINK_CANCEL, NULL);
    CHECK_EQUAL(abandoned.token, request.token);
    CHECK_EQUAL(abandoned.error, request.error);
    CHECK(others_are_served(b, &other));
    client_close(&join);
    client_close(&other);
    bench_stop(b);
}

/* The response to a request cannot be copied: its connection ends immediately, and the request with
 * it. The rest of the response has no effect. */
BOTH(a_response_that_cannot_be_copied_ends_its_own_connection)
{
    struct bench *b = bench_start(backend, NULL);
    struct client other = client_open(b, 0);
    for (int i = 0; i < 8; i++) {
        struct client client = client_open(b, 0);
        CHECK(request_for(&client, i % 4 < 2 ? JOIN_GROUP : SYNC_GROUP, i, 100, 'x'));
        struct mqd_descriptor request = bench_expect(b, ACCEPTOR, MQD_LINK_REQUEST, NULL);
        if (i % 2)
            park(b, &request);
        /* outside the arena, which has the same effect as no memory for it */
        struct mqd_descriptor answer = {
            .kind = MQD_LINK_RESPONSE, .token = request.token, .offset = ARENA_BYTES - 64, .size_bytes = 65};
        answer.flags = i < 4 ? MQD_RESPONSE_MORE : 0;
        bench_put(b, ACCEPTOR, 0, answer);
        CHECK_EQUAL(client_receive(&client), 0);
        if (i < 4)
            bench_respond(b, 0, &request, "the rest", 0, true, 64);
        CHECK(others_are_served(b, &other));
        client_close(&client);
    }
    client_close(&other);
    bench_stop(b);
}

/* More requests than the table has entries are parked and abandoned: later clients are served. */
BOTH(joining_and_leaving_holds_no_memory)
{
    /* fewer than inflight_count_max: at the limit the reactor does not read, and misses the end */
    enum { CONNECTIONS = 2200, EACH = 8 };
    struct bench *b = bench_start(backend, NULL);
    struct client other = client_open(b, 0);
    for (int i = 0; i < CONNECTIONS; i++) {
        struct client client = client_open(b, 0);
        struct mqd_descriptor requests[EACH];
        for (int j = 0; j < EACH; j++)
            CHECK(request_for(&client, j % 3 ? JOIN_GROUP : CREATE_TOPICS, j, 0, 0));
        for (int j = 0; j < EACH; j++) {
            requests[j] = bench_expect(b, ACCEPTOR, MQD_LINK_REQUEST, NULL);
            if (j % 2)
                park(b, &requests[j]);
        }
        client_close(&client);
        for (int j = 0; j < EACH; j += 2)
            park(b, &requests[j]);
    }
    CHECK(others_are_served(b, &other));
    client_close(&other);
    bench_stop(b);
}

/* One byte of body names the client of a commit. After each death the new acceptor gets all
 * unanswered requests of every connection, oldest first: those that the dead one had, then those
 * that were never sent. An older commit after a newer one would lower the group's offset. */
BOTH(resent_requests_keep_their_connection_order)
{
    enum { OFFSET_COMMIT = 8, CLIENTS = 3, ROUNDS = 100, PENDING_MAX = 6 };
    struct bench *b = bench_start(backend, NULL);
    struct client clients[CLIENTS];
    struct mqd_descriptor requested[CLIENTS][PENDING_MAX]; /* by commit number modulo PENDING_MAX */
    int sent[CLIENTS] = {0}, answered[CLIENTS] = {0};
    uint64_t seed = 7, at = 0;
    for (int i = 0; i < CLIENTS; i++)
        clients[i] = client_open(b, 0);
    for (int round = 0; round < ROUNDS; round++) {
        for (int living = 1; living >= 0; living--) {
            for (int i = 0; i < CLIENTS; i++)
                for (uint64_t more = test_random(&seed) % (uint64_t)(PENDING_MAX + 1 - (sent[i] - answered[i]));
                     more > 0; more--)
                    CHECK(request_for(&clients[i], OFFSET_COMMIT, sent[i]++, 1, (uint8_t)i));
            if (living) /* later requests are not sent to it */
                mqd_endpoint_set_state(b->control, ACCEPTOR, MQD_PROCESS_DEAD, 0);
        }
        acceptor_dies_and_comes_back(b);
        int missing = 0, next[CLIENTS];
        for (int i = 0; i < CLIENTS; i++) {
            next[i] = answered[i];
            missing += sent[i] - answered[i];
        }
        while (missing > 0) {
            struct mqd_descriptor request = bench_expect(b, ACCEPTOR, MQD_LINK_REQUEST, NULL);
            if (request.error != (int32_t)mqd_endpoint_generation(b->control, ACCEPTOR))
                continue; /* sent to the dead acceptor */
            const uint8_t *frame = b->arenas[0] + request.offset;
            int whose = frame[request.size_bytes - 1];
            CHECK_EQUAL((int)mqd_get_be32(frame + 4), next[whose]);
            requested[whose][next[whose]++ % PENDING_MAX] = request;
            missing--;
        }
        for (int i = 0; i < CLIENTS; i++)
            for (uint64_t some = test_random(&seed) % (uint64_t)(1 + sent[i] - answered[i]); some > 0;
                 some--, answered[i]++) {
                /* each in memory of its own */
                bench_respond(b, 0, &requested[i][answered[i] % PENDING_MAX], "done", 0, true, at += 64);
                CHECK(is_answered(&clients[i], answered[i]));
            }
    }
    for (int i = 0; i < CLIENTS; i++)
        client_close(&clients[i]);
    bench_stop(b);
}

/* How many requests come out of the ring before the one with this correlation id. */
static int seen_before(struct bench *b, int32_t correlation_id)
{
    for (int count = 0;; count++) {
        struct mqd_descriptor request = bench_expect(b, ACCEPTOR, MQD_LINK_REQUEST, NULL);
        if (request.kind != MQD_LINK_REQUEST)
            return -1;
        if ((int32_t)mqd_get_be32(b->arenas[0] + request.offset + 4) == correlation_id)
            return count;
    }
}

BOTH(a_client_that_pipelines_does_not_delay_others)
{
    enum { OFFSET_COMMIT = 8, COUNT = 200, UNANSWERED_MAX = 16, HEARTBEAT = 12, OTHERS = 1000000 };
    struct bench *b = bench_start(backend, NULL);
    struct client busy = client_open(b, 0), other = client_open(b, 0);
    struct mqd_descriptor requests[COUNT];
    for (int i = 0; i < COUNT; i++)
        CHECK(request_for(&busy, OFFSET_COMMIT, i, 10, 0));
    for (int i = 0; i < UNANSWERED_MAX; i++)
        requests[i] = bench_expect(b, ACCEPTOR, MQD_LINK_REQUEST, NULL);
    CHECK(request_for(&other, HEARTBEAT, OTHERS, 10, 0));
    CHECK_EQUAL(seen_before(b, OTHERS), 0);
    /* each response makes room for the next one, in order */
    for (int i = 0; i < COUNT; i++) {
        CHECK_EQUAL((int)mqd_get_be32(b->arenas[0] + requests[i].offset + 4), i);
        bench_respond(b, 0, &requests[i], "done", 0, true, (uint64_t)i * 64);
        CHECK(is_answered(&busy, i));
        if (i + UNANSWERED_MAX < COUNT)
            requests[i + UNANSWERED_MAX] = bench_expect(b, ACCEPTOR, MQD_LINK_REQUEST, NULL);
    }
    client_close(&busy);
    client_close(&other);
    bench_stop(b);
}

static void deep_pipelines(struct bench *b)
{
    b->options[0].inflight_count_max = 1000;
    b->options[0].heap_bytes_max = 256 << 20;
}

/* Twenty clients send more than the table of control requests holds; it reserves room for
 * clients without an entry, and no connection is closed. */
BOTH(clients_that_pipeline_leave_room_in_the_table_for_others)
{
    enum { OFFSET_COMMIT = 8, HEARTBEAT = 12, CLIENTS = 20, EACH = 1000, UNANSWERED_MAX = 16, OTHERS = 1000000 };
    struct bench *b = bench_start(backend, deep_pipelines);
    struct client busy[CLIENTS];
    for (int i = 0; i < CLIENTS; i++) {
        busy[i] = client_open(b, 0);
        for (int k = 0; k < EACH; k++)
            CHECK(request_for(&busy[i], OFFSET_COMMIT, i * EACH + k, 0, 0));
    }
    for (int i = 0; i < 100; i++) {
        struct client other = client_open(b, 0);
        CHECK(request_for(&other, HEARTBEAT, OTHERS + i, 0, 0));
        int before = seen_before(b, OTHERS + i);
        CHECK(before >= 0 && before <= CLIENTS * UNANSWERED_MAX);
        client_close(&other);
    }
    CHECK_EQUAL(mqd_load_relaxed(&mqd_control_stats(b->control, 0)->counter[MQD_COUNT_PROTOCOL_ERRORS]), 0);
    for (int i = 0; i < CLIENTS; i++)
        client_close(&busy[i]);
    bench_stop(b);
}

/* A frame that waits for room does not delay small requests of other connections; it is the first
 * to be sent when there is room. */
BOTH(small_requests_overtake_a_large_one_without_room)
{
    enum { HEARTBEAT = 12, LARGE_BYTES = ARENA_BYTES / 4 / 2 - 4096, LAST = 1000 };
    struct bench *b = bench_start(backend, NULL);
    struct client large[3], other = client_open(b, 0);
    struct mqd_descriptor requests[2];
    for (int i = 0; i < 3; i++) {
        large[i] = client_open(b, 0);
        CHECK(request_for(&large[i], CREATE_TOPICS, i, LARGE_BYTES, 0));
        if (i < 2)
            requests[i] = bench_expect(b, ACCEPTOR, MQD_LINK_REQUEST, NULL);
    }
    CHECK(others_are_served(b, &other));
    CHECK(others_are_served(b, &other));
    bench_respond(b, 0, &requests[0], "done", 0, true, 0);
    CHECK_EQUAL(seen_before(b, 2), 0);
    for (int i = 0; i < 3; i++)
        client_close(&large[i]);
    client_close(&other);
    bench_stop(b);
}
