/* tsan */
/* The reactor's parts one by one, over real sockets and files, with both I/O backends;
 * test_reactor_mix.c tests all of them together. */
#include "mqd_reactor_test.h"

static struct part part(int32_t partition, uint64_t mark, int32_t body_bytes)
{
    return (struct part){partition, {.mark = mark, .body_bytes = body_bytes}};
}

/* ---- produce ---- */

BOTH(produce_here_and_through_another_worker)
{
    struct bench *b = bench_start(backend, NULL);
    struct fetched *fetched = calloc(1, sizeof *fetched);
    for (uint32_t worker = 0; worker < REACTORS; worker++) {
        struct client client = client_open(b, worker);
        struct frame silent = {0};
        for (int acks = -1; acks <= 1; acks++) {
            struct part parts[4];
            for (int32_t p = 0; p < 4; p++)
                parts[p] = part(p, worker * 1000 + (uint64_t)(acks + 1) * 10 + (uint64_t)p, p * 9000 + 64);
            if (acks == 0) {
                put_produce(&silent, 1, 0, 1000, parts, 4);
                CHECK(client_send(&client, &silent));
                continue;
            }
            struct produced out = client_produce(&client, acks, parts, 4);
            CHECK_EQUAL(out.count, 4);
            for (uint32_t i = 0; i < 4; i++) {
                CHECK_EQUAL(out.error[i], 0);
                /* in order, with the silent one between */
                CHECK_EQUAL(out.base_offset[i], worker * 3 + (acks == 1 ? 2 : 0));
            }
        }
        frame_free(&silent);
        client_close(&client);
    }
    /* any worker serves any partition; small ones are copied, large ones sent from the file */
    for (uint32_t worker = 0; worker < REACTORS; worker++) {
        struct client client = client_open(b, worker);
        for (int32_t p = 0; p < 4; p++) {
            struct fetch_position requested = {p, 0};
            client_fetch(&client,
                         (struct fetch){.wait_ms = LIMIT_MS,
                                        .bytes_min = 6 * (MQD_BATCH_HEADER_BYTES + p * 9000 + 64),
                                        .bytes_max = 8 << 20,
                                        .session_epoch = -1},
                         &requested, 1, fetched);
            CHECK_EQUAL(fetched->batch_count, 6);
            for (uint32_t i = 0; i < 6; i++)
                CHECK_EQUAL(fetched->batches[i].mark, i / 3 * 1000 + i % 3 * 10 + (uint64_t)p);
        }
        client_close(&client);
    }
    free(fetched);
    bench_stop(b);
}

BOTH(a_refused_batch_does_not_free_those_after_it)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0), other = client_open(b, 0);
    struct part first = part(0, 1, 64), parts[2] = {part(0, 2, 64), part(4, 3, 5000)};
    first.batch.producer_id = parts[0].batch.producer_id = 5;
    parts[0].batch.base_sequence = 17; /* out of order: refused by its owner, immediately */
    CHECK_EQUAL(client_produce(&client, 1, &first, 1).error[0], 0);
    struct frame frame = {0};
    put_produce(&frame, 1, 1, LIMIT_MS, parts, 2);
    CHECK(client_send(&client, &frame));
    uint32_t from;
    struct mqd_descriptor lent = bench_expect(b, FAKE, MQD_LINK_PRODUCE, &from);
    for (uint64_t i = 0; i < 64; i++) { /* the windows of as many turns */
        struct part noise = part(0, 1000 + i, 20000);
        CHECK_EQUAL(client_produce(&other, 1, &noise, 1).error[0], 0);
    }
    struct mqd_batch batch;
    const char *reason;
    CHECK_EQUAL(lent.size_bytes, MQD_BATCH_HEADER_BYTES + 5000);
    CHECK_EQUAL(mqd_batch_validate(b->arenas[0] + lent.offset, lent.size_bytes, &batch, &reason), 0);
    bench_put(b, FAKE, from, (struct mqd_descriptor){.kind = MQD_LINK_PRODUCED, .token = lent.token, .a = 99});
    CHECK_EQUAL(client_receive(&client), 1);
    struct produced out = take_produced(&client);
    CHECK_EQUAL(out.error[0], 45);
    CHECK_EQUAL(out.error[1], 0);
    CHECK_EQUAL(out.base_offset[1], 99);
    frame_free(&frame);
    client_close(&client);
    client_close(&other);
    bench_stop(b);
}

BOTH(a_bad_frame_does_not_free_the_good_one_before_it)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0), other = client_open(b, 0);
    struct part lone = part(4, 3, 5000);
    struct frame frame = {0};
    uint32_t from;
    put_produce(&frame, 1, 1, LIMIT_MS, &lone, 1);
    put(&frame, 4, 0x7fffffff);
    CHECK(client_send(&client, &frame));
    struct mqd_descriptor lent = bench_expect(b, FAKE, MQD_LINK_PRODUCE, &from);
    CHECK_EQUAL(client_receive(&client), 0);
    for (uint64_t i = 0; i < 64; i++) {
        struct part noise = part(0, 1000 + i, 20000);
        CHECK_EQUAL(client_produce(&other, 1, &noise, 1).error[0], 0);
    }
    struct mqd_batch batch;
    const char *reason;
    CHECK_EQUAL(mqd_batch_validate(b->arenas[0] + lent.offset, lent.size_bytes, &batch, &reason), 0);
    bench_put(b, FAKE, from, (struct mqd_descriptor){.kind = MQD_LINK_PRODUCED, .token = lent.token});
    frame_free(&frame);
    client_close(&client);
    client_close(&other);
    bench_stop(b);
}

BOTH(a_forwarded_batch_times_out_and_its_late_response_is_ignored)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 1);
    struct part lone = part(4, 3, 500);
    struct frame frame = {0};
    uint32_t from;
    put_produce(&frame, 1, -1, 50, &lone, 1);
    CHECK(client_send(&client, &frame));
    struct mqd_descriptor lent = bench_expect(b, FAKE, MQD_LINK_PRODUCE, &from), again;
    bench_put(b, FAKE, from, (struct mqd_descriptor){.kind = MQD_LINK_RELEASE, .token = lent.token});
    CHECK_EQUAL(client_receive(&client), 1);
    CHECK_EQUAL(take_produced(&client).error[0], 7);
    CHECK(client_send(&client, &frame));
    again = bench_expect(b, FAKE, MQD_LINK_PRODUCE, NULL);
    CHECK(again.token != lent.token);
    bench_put(b, FAKE, from, (struct mqd_descriptor){.kind = MQD_LINK_PRODUCED, .token = lent.token, .a = 1});
    bench_put(b, FAKE, from, (struct mqd_descriptor){.kind = MQD_LINK_PRODUCED, .token = again.token, .a = 2});
    CHECK_EQUAL(client_receive(&client), 1);
    struct produced out = take_produced(&client);
    CHECK(out.error[0] == 0 ? out.base_offset[0] == 2 : out.error[0] == 7); /* 7: this one took longer than 50 ms too */
    CHECK(client_send(&client, &frame));                                    /* its client leaves; then its owner dies */
    bench_expect(b, FAKE, MQD_LINK_PRODUCE, NULL);
    client_close(&client);
    frame_free(&frame);
    bench_stop(b);
}

BOTH(a_client_of_another_process_is_not_taken_for_ours)
{
    struct bench *b = bench_start(backend, NULL);
    struct sockaddr_in address;
    socklen_t size_bytes = sizeof address;
    int stray = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(getsockname(b->listener, (struct sockaddr *)&address, &size_bytes) == 0);
    CHECK(connect(stray, (struct sockaddr *)&address, sizeof address) == 0);
    struct client client = client_open(b, 0);
    struct part lone = part(0, 3, 500);
    CHECK_EQUAL(client_produce(&client, 1, &lone, 1).error[0], 0);
    close(stray);
    client_close(&client);
    bench_stop(b);
}

BOTH(an_owner_dies_with_a_batch)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0);
    struct part lone = part(4, 3, 500);
    struct frame frame = {0};
    put_produce(&frame, 1, 1, LIMIT_MS, &lone, 1);
    CHECK(client_send(&client, &frame));
    bench_expect(b, FAKE, MQD_LINK_PRODUCE, NULL);
    mqd_endpoint_set_state(b->control, FAKE, MQD_PROCESS_DEAD, 0);
    CHECK_EQUAL(mqd_reactor_endpoint_died(b->reactors[0], ++b->token, FAKE), 0);
    bench_done(b, 0, b->token);
    CHECK_EQUAL(client_receive(&client), 1);
    CHECK_EQUAL(take_produced(&client).error[0], 7);
    CHECK(client_send(&client, &frame));
    CHECK_EQUAL(client_receive(&client), 1);
    CHECK_EQUAL(take_produced(&client).error[0], 6);
    frame_free(&frame);
    client_close(&client);
    bench_stop(b);
}

/* ---- connections ---- */

/* The acceptor of worker 0; of two pending requests, it responds to the second first. */
static void answer_until_readable(struct bench *b, struct client *client)
{
    struct mqd_descriptor request, held = {0};
    struct pollfd wait = {client->fd, POLLIN, 0};
    uint32_t from;
    static uint64_t at; /* used cyclically: the worker has taken a response over long before its memory is reused */
    for (int64_t end_ns = test_now_ns() + LIMIT_MS * 1000000ll; poll(&wait, 1, 0) == 0 && test_now_ns() < end_ns;) {
        bool got = bench_take(b, ACCEPTOR, &request, &from, 2);
        if (got && request.kind != MQD_LINK_REQUEST)
            continue;
        if (got && !held.kind) {
            held = request;
            continue;
        }
        if (got)
            bench_respond(b, 0, &request, "answer", 0, true, (at += 64) % ARENA_BYTES);
        if (held.kind)
            bench_respond(b, 0, &held, "answer", 0, true, (at += 64) % ARENA_BYTES);
        held.kind = 0;
    }
    if (held.kind)
        bench_respond(b, 0, &held, "answer", 0, true, (at += 64) % ARENA_BYTES);
}

BOTH(replies_keep_their_order)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0);
    struct fetched *fetched = calloc(1, sizeof *fetched);
    struct frame frame = {0};
    enum { COUNT = 600 }; /* inflight_count_max is 16, and many are in one window */
    mqd_control_set_api_versions(b->control, 0, (const uint8_t *)"abc", 3);
    for (int32_t i = 0; i < COUNT; i++) {
        struct fetch_position requested = {i % 4, 0};
        struct part lone = part(i % 4, (uint64_t)i, 64);
        switch (i % 4) {
        case 0:
            put_produce(&frame, i, i % 3 ? 1 : -1, LIMIT_MS, &lone, 1);
            break;
        case 1:
            put_fetch(&frame,
                      (struct fetch){.correlation_id = i,
                                     .wait_ms = i % 8 == 1 ? 3 : 0,
                                     .bytes_min = 1 << 20,
                                     .bytes_max = 300,
                                     .session_epoch = -1},
                      &requested, 1);
            break;
        case 2:
            frame_end(&frame, frame_begin(&frame, 18, 0, i));
            break;
        default:
            frame_end(&frame, frame_begin(&frame, 10, 1, i));
            break; /* FindCoordinator: the acceptor's */
        }
    }
    CHECK(client_send(&client, &frame));
    for (int32_t i = 0; i < COUNT; i++) {
        answer_until_readable(b, &client);
        CHECK_EQUAL(client_receive(&client), 1);
        int32_t correlation_id = (int32_t)take(&client, 4);
        CHECK_EQUAL(correlation_id, i);
        client.at = 0;
        if (i % 4 == 0)
            CHECK_EQUAL(take_produced(&client).error[0], 0);
        if (i % 4 == 1)
            take_fetched(&client, fetched);
    }
    free(fetched);
    frame_free(&frame);
    client_close(&client);
    bench_stop(b);
}

/* A JoinGroup whose client disconnects while it waits frees its entry, and the acceptor is notified
 * that the request was cancelled. */
BOTH(a_client_that_leaves_cancels_its_waiting_request)
{
    struct bench *b = bench_start(backend, NULL);
    struct client other = client_open(b, 0);
    for (int i = 0; i < 40; i++) {
        struct client client = client_open(b, 0);
        struct frame frame = {0};
        uint32_t from;
        int16_t api_key =
            i % 4 == 3 ? 19 : 11; /* CreateTopics: the acceptor carries it out, although the client has gone */
        frame_end(&frame, frame_begin(&frame, api_key, 3, i));
        CHECK(client_send(&client, &frame));
        struct mqd_descriptor request = bench_expect(b, ACCEPTOR, MQD_LINK_REQUEST, &from);
        struct mqd_descriptor parked = {.kind = MQD_LINK_PARKED, .token = request.token};
        if (i % 2)
            bench_put(b, ACCEPTOR, from, parked);
        client_close(&client);
        frame.size_bytes = 0;
        /* after the end of that connection, because the reactor has seen both */
        frame_end(&frame, frame_begin(&frame, 10, 1, i));
        CHECK(client_send(&other, &frame));
        if (i % 2 == 0)
            bench_put(b, ACCEPTOR, from, parked);
        struct mqd_descriptor control_request = {0};
        for (int abandoned = api_key != 11; !abandoned || !control_request.kind;) {
            struct mqd_descriptor got;
            CHECK(bench_take(b, ACCEPTOR, &got, &from, LIMIT_MS));
            if (got.kind == MQD_LINK_REQUEST)
                control_request = got;
            if (got.kind != MQD_LINK_CANCEL)
                continue;
            CHECK(!abandoned);
            CHECK_EQUAL(got.token, request.token);
            CHECK_EQUAL(got.error, request.error);
            abandoned = 1;
        }
        bench_respond(b, 0, &request, "late", 0, true, 64); /* its client has gone */
        bench_respond(b, 0, &control_request, "answer", 0, true, 128);
        CHECK_EQUAL(client_receive(&other), 1);
        CHECK_EQUAL((int32_t)take(&other, 4), i);
        other.at = 0;
        frame_free(&frame);
    }
    client_close(&other);
    bench_stop(b);
}

BOTH(large_frames_in_pieces)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0), other = client_open(b, 0);
    struct part large = part(0, 1, 40000), most = part(1, 2, 1000000), lone = part(2, 3, 64);
    struct frame frame = {0};
    put_produce(&frame, 1, 1, LIMIT_MS, &large, 1);
    for (uint32_t at = 0; at < frame.size_bytes;) { /* byte by byte where it matters, then in growing steps */
        uint32_t step = at < 200 || at > frame.size_bytes - 50 || (at > 32700 && at < 32800) ? 1 : 977;
        if (step > frame.size_bytes - at)
            step = frame.size_bytes - at;
        CHECK(send(client.fd, frame.bytes + at, step, MSG_NOSIGNAL) == (ssize_t)step);
        at += step;
        if (at % 64 == 0)
            CHECK_EQUAL(client_produce(&other, 1, &lone, 1).error[0], 0);
    }
    CHECK_EQUAL(client_receive(&client), 1);
    CHECK_EQUAL(take_produced(&client).error[0], 0);
    for (int i = 0; i < 20; i++) {
        struct part both[2] = {part(0, 10, 900000), most};
        CHECK_EQUAL(client_produce(&client, 1, both, 2).error[1], 0); /* nearly request_bytes_max */
        CHECK_EQUAL(client_produce(&other, 1, &lone, 1).error[0], 0);
        struct client brief = client_open(b, (uint32_t)i % 2);
        /* half a frame, then nothing */
        CHECK(send(brief.fd, frame.bytes, (size_t)(i * 2001), MSG_NOSIGNAL) == i * 2001);
        client_close(&brief);
    }
    frame_free(&frame);
    client_close(&client);
    client_close(&other);
    bench_stop(b);
}

/* Lent windows move the current one to the middle of the arena, where it stays when they are
 * returned: no longer run fits on either side of it. */
BOTH(the_window_yields_to_the_largest_frame)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0);
    struct mqd_descriptor lent[24];
    struct frame frame = {0};
    uint32_t from;
    for (uint32_t i = 0; i < 24; i++) { /* of 48 extents */
        struct part lone = part(4, i + 1, 64);
        frame.size_bytes = 0;
        put_produce(&frame, (int32_t)i, 1, LIMIT_MS, &lone, 1);
        CHECK(client_send(&client, &frame));
        lent[i] = bench_expect(b, FAKE, MQD_LINK_PRODUCE, &from);
        if (i % 12 == 11) /* 16 may be under way on a connection */
            client_close(&client), client = client_open(b, 0);
    }
    for (uint32_t i = 0; i < 24; i++)
        bench_put(b, FAKE, from, (struct mqd_descriptor){.kind = MQD_LINK_PRODUCED, .token = lent[i].token});
    struct part both[2] = {part(0, 100, 900000), part(1, 101, 1000000)};
    struct produced out = client_produce(&client, 1, both, 2);
    CHECK_EQUAL(out.count, 2);
    CHECK_EQUAL(out.error[0], 0);
    CHECK_EQUAL(out.error[1], 0);
    frame_free(&frame);
    client_close(&client);
    bench_stop(b);
}

/* Clients that never finish their large frames, but send a byte now and then, against one that
 * sends a frame of maximum size and one with small ones. */
BOTH(dripping_clients_delay_no_other)
{
    struct bench *b = bench_start(backend, NULL);
    enum { DRIPS = 6 };
    struct client drips[DRIPS], large = client_open(b, 0), small = client_open(b, 0);
    for (int i = 0; i < DRIPS; i++) {
        drips[i] = client_open(b, 0);
        CHECK(send(drips[i].fd, "\0\x10\0\0\0\0\0\7", 8, MSG_NOSIGNAL) == 8); /* 1 MiB to come */
    }
    struct part both[2] = {part(0, 10, 900000), part(1, 11, 1000000)}, lone = part(2, 3, 64);
    struct frame frame = {0};
    put_produce(&frame, 1, 1, LIMIT_MS, both, 2);
    uint32_t sent = 0;
    bool answered = false;
    int64_t end_ns = test_now_ns() + LIMIT_MS * 1000000ll;
    while (!answered && test_now_ns() < end_ns) {
        for (int i = 0; i < DRIPS; i++)
            send(drips[i].fd, "x", 1, MSG_NOSIGNAL);
        ssize_t n = sent < frame.size_bytes
                        ? send(large.fd, frame.bytes + sent, frame.size_bytes - sent, MSG_NOSIGNAL | MSG_DONTWAIT)
                        : 0;
        sent += n > 0 ? (uint32_t)n : 0;
        CHECK_EQUAL(client_produce(&small, 1, &lone, 1).error[0], 0);
        struct pollfd wait = {large.fd, POLLIN, 0};
        answered = poll(&wait, 1, 5) == 1;
    }
    CHECK(answered);
    CHECK_EQUAL(client_receive(&large), 1);
    CHECK_EQUAL(take_produced(&large).error[1], 0);
    for (int i = 0; i < DRIPS; i++)
        client_close(&drips[i]);
    frame_free(&frame);
    client_close(&large);
    client_close(&small);
    bench_stop(b);
}

/* ---- the acceptor's responses ---- */

BOTH(control_requests)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0), other = client_open(b, 0), change = client_open(b, 0);
    struct frame frame = {0}, large = {0}, creation = {0};
    uint32_t from;
    frame_end(&frame, frame_begin(&frame, 10, 1, 5));
    CHECK(client_send(&client, &frame));
    struct mqd_descriptor request = bench_expect(b, ACCEPTOR, MQD_LINK_REQUEST, &from);
    int64_t connection = request.b;
    bench_respond(b, 0, &request, "one", MQD_RESPONSE_MORE, true, 0); /* in fragments */
    bench_respond(b, 0, &request, "two", MQD_RESPONSE_MORE, false, 64);
    bench_respond(b, 0, &request, "three", 0, false, 128);
    CHECK_EQUAL(client_receive(&client), 1);
    CHECK_EQUAL(client.reply_bytes, 4 + 11);
    CHECK(memcmp(client.reply + 4, "onetwothree", 11) == 0);
    /* one that is larger than its arena ends its own connection and nothing else */
    uint32_t begin = frame_begin(&large, 19, 1, 6);
    for (int i = 0; i < 1 << 17; i++)
        put(&large, 8, 0);
    frame_end(&large, begin);
    CHECK(client_send(&other, &large));
    CHECK_EQUAL(client_receive(&other), 0);
    client_close(&other);
    other = client_open(b, 0);
    /* the acceptor dies: a read is resent, a change closes its connection, a disconnected client
     * leaves nothing */
    CHECK(client_send(&client, &frame));
    request = bench_expect(b, ACCEPTOR, MQD_LINK_REQUEST, &from);
    frame_end(&creation, frame_begin(&creation, 19, 1, 8));
    CHECK(client_send(&change, &creation));
    bench_expect(b, ACCEPTOR, MQD_LINK_REQUEST, &from);
    CHECK(client_send(&other, &frame));
    bench_expect(b, ACCEPTOR, MQD_LINK_REQUEST, &from);
    client_close(&other);
    mqd_endpoint_set_state(b->control, ACCEPTOR, MQD_PROCESS_DEAD, 0);
    bench_respond(b, 0, &request, "from the grave", 0, true, 0);
    mqd_endpoint_close(b->endpoints[ACCEPTOR]);
    b->endpoints[ACCEPTOR] = mqd_endpoint_open(b->control, b->links, ACCEPTOR, ENDPOINTS, b->eventfds);
    mqd_endpoint_set_state(b->control, ACCEPTOR, MQD_PROCESS_RUNNING, getpid());
    CHECK_EQUAL(mqd_reactor_endpoint_died(b->reactors[0], ++b->token, ACCEPTOR), 0);
    bench_done(b, 0, b->token);
    CHECK_EQUAL(client_receive(&change), 0);
    /* those of the dead one are distinguished by their generation; a disconnected client's may
     * be resent once */
    do
        CHECK(bench_take(b, ACCEPTOR, &request, &from, LIMIT_MS));
    while (request.kind != MQD_LINK_REQUEST || request.b != connection ||
           request.error != (int32_t)mqd_endpoint_generation(b->control, ACCEPTOR));
    bench_respond(b, 0, &request, "answer", 0, true, 256);
    CHECK_EQUAL(client_receive(&client), 1);
    CHECK(client.reply_bytes == 10 && memcmp(client.reply + 4, "answer", 6) == 0);
    CHECK(client_send(&client, &frame));
    do
        request = bench_expect(b, ACCEPTOR, MQD_LINK_REQUEST, &from);
    while (request.b != connection);
    bench_put(b, ACCEPTOR, 0, (struct mqd_descriptor){.kind = MQD_LINK_CLOSE, .token = request.token});
    CHECK_EQUAL(client_receive(&client), 0);
    frame_free(&frame);
    frame_free(&large);
    frame_free(&creation);
    client_close(&client);
    client_close(&change);
    bench_stop(b);
}
