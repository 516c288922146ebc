/* tsan: long */
/* Everything together, at random: many clients that produce, fetch, query, pipeline, stop half-way
 * and disconnect, while partitions close and open, logs roll, and the acceptor and a worker die.
 * From a seed, though threads make no two runs alike.
 *
 * Checked: replies come in order and to the last byte; every batch that is read is one that was
 * sent, at the offset that was acknowledged, with a right CRC; everything acknowledged can be read
 * in the end; nothing leaks, no wait is left over. */
#include "mqd_reactor_test.h"

#define CLIENTS 32
#define OFFSETS 65536
#define EXPECTED 64

enum kind { PRODUCE, FETCH, SESSION, CONTROL_REQUEST, LIST_OFFSETS };

struct expected {
    int32_t correlation_id;
    enum kind kind;
    uint64_t mark[4];
    int32_t partition[4];
};

struct actor {
    struct client client;
    bool open, doomed; /* doomed: it has sent nonsense and must be closed */
    uint32_t worker;
    struct frame out;
    uint32_t out_sent;
    uint8_t *in;
    uint32_t in_bytes, in_capacity;
    struct expected expected[EXPECTED];
    uint32_t first, count;
    int32_t session_id, session_epoch;
};

struct mix {
    struct bench *b;
    uint64_t seed;
    struct actor actors[CLIENTS];
    int32_t correlation_id;
    uint64_t mark;
    uint64_t *known[PARTITIONS]; /* by offset: the mark that is or must be there, 0 = not known */
    uint8_t *acknowledged[PARTITIONS];
    int64_t end[PARTITIONS]; /* after the last acknowledged offset */
    struct mqd_descriptor lent[256];
    uint32_t lent_from[256], lent_count;
    struct fetched fetched;
    uint64_t at; /* in the acceptor's arena */
    int64_t fake_offset;
    uint32_t answers, refused, closed;
};

static uint32_t below(struct mix *m, uint32_t limit)
{
    return (uint32_t)(test_random(&m->seed) >> 33) % limit;
}

/* ---- clients ---- */

static void leave(struct mix *m, struct actor *actor)
{
    client_close(&actor->client);
    frame_free(&actor->out);
    free(actor->in);
    *actor = (struct actor){.open = false};
    m->closed++;
}

static struct expected *expect(struct actor *actor, int32_t correlation_id, enum kind kind)
{
    struct expected *expected = &actor->expected[(actor->first + actor->count++) % EXPECTED];
    *expected = (struct expected){.correlation_id = correlation_id, .kind = kind};
    return expected;
}

static void expect_produce(struct mix *m, struct actor *actor)
{
    struct part parts[4];
    uint32_t count = 1 + below(m, 4), first = below(m, PARTITIONS);
    int acks = below(m, 10) == 0 ? 0 : below(m, 2) ? -1 : 1;
    int32_t correlation_id = ++m->correlation_id;
    struct expected silent, *expected = acks ? expect(actor, correlation_id, PRODUCE) : &silent;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t roll = below(m, 100);
        parts[i] = (struct part){(int32_t)((first + i) % PARTITIONS),
                                 {.mark = ++m->mark,
                                  .body_bytes = (int32_t)(8 + below(m, roll < 80   ? 400
                                                                       : roll < 98 ? 20000
                                                                                   : 300000))}};
        expected->mark[i] = m->mark, expected->partition[i] = parts[i].partition;
    }
    put_produce(&actor->out, correlation_id, acks, below(m, 20) ? LIMIT_MS : 1 + (int32_t)below(m, 20), parts, count);
}

static void expect_fetch(struct mix *m, struct actor *actor)
{
    struct fetch_position requested[PARTITIONS];
    uint32_t count = 1 + below(m, PARTITIONS);
    struct fetch fetch = {.correlation_id = ++m->correlation_id,
                          .wait_ms = (int32_t)below(m, 100),
                          .bytes_min = 1 + (int32_t)below(m, 3) * 1000,
                          .bytes_max = 1 + (int32_t)below(m, 300000)};
    bool session = actor->count == 0 && below(m, 2);
    fetch.session_epoch = session ? actor->session_epoch : -1;
    fetch.session_id = session ? actor->session_id : 0;
    if (session && fetch.session_id && below(m, 8) == 0)
        fetch.forget = 1 + (int32_t)below(m, 4);
    for (uint32_t i = 0; i < count; i++) {
        int64_t end = m->end[i];
        requested[i] =
            (struct fetch_position){(int32_t)i, end ? (int64_t)(test_random(&m->seed) % (uint64_t)(end + 1)) : 0};
    }
    expect(actor, fetch.correlation_id, session ? SESSION : FETCH);
    put_fetch(&actor->out, fetch, requested, fetch.session_id ? below(m, count + 1) : count);
}

static void expect_control(struct mix *m, struct actor *actor)
{
    int32_t correlation_id = ++m->correlation_id;
    uint32_t begin;
    if (below(m, 2)) {
        begin = frame_begin(&actor->out, 10, 1, correlation_id);
        for (uint32_t i = below(m, 2000); i; i--)
            put(&actor->out, 1, i);
        expect(actor, correlation_id, CONTROL_REQUEST);
    } else {
        begin = frame_begin(&actor->out, 2, 1, correlation_id);
        put(&actor->out, 4, UINT32_MAX), put(&actor->out, 4, 1), put_text(&actor->out, "quick"), put(&actor->out, 4, 1),
            put(&actor->out, 4, below(m, 4)), put(&actor->out, 8, UINT64_MAX);
        expect(actor, correlation_id, LIST_OFFSETS);
    }
    frame_end(&actor->out, begin);
}

static void want(struct mix *m, struct actor *actor)
{
    if (!actor->open) {
        uint32_t worker = below(m, REACTORS);
        *actor = (struct actor){.open = true, .worker = worker, .client = client_open(m->b, worker)};
    }
    if (actor->doomed || actor->count > EXPECTED - 8 || actor->out.size_bytes > 1 << 20)
        return;
    for (uint32_t more = 1 + (below(m, 8) == 0 ? below(m, 6) : 0); more; more--) {
        uint32_t roll = below(m, 1000);
        if (roll < 500)
            expect_produce(m, actor);
        else if (roll < 850)
            expect_fetch(m, actor);
        else if (roll < 970)
            expect_control(m, actor);
        else if (roll < 980) {
            put(&actor->out, 8, test_random(&m->seed) | 0x80ull << 56);
            actor->doomed = true;
        } else if (roll < 990) {
            leave(m, actor); /* in the middle of whatever there is */
            return;
        }
    }
}

/* What the socket takes, or only a piece of it. */
static void push(struct mix *m, struct actor *actor)
{
    uint32_t left = actor->out.size_bytes - actor->out_sent, piece = below(m, 4) ? left : 1 + below(m, 3000);
    ssize_t n = left ? send(actor->client.fd, actor->out.bytes + actor->out_sent, piece < left ? piece : left,
                            MSG_NOSIGNAL | MSG_DONTWAIT)
                     : 0;
    actor->out_sent += n > 0 ? (uint32_t)n : 0;
    if (actor->out_sent == actor->out.size_bytes)
        actor->out.size_bytes = actor->out_sent = 0;
}

/* ---- what comes back ---- */

static void know(struct mix *m, int32_t partition, int64_t offset, uint64_t mark, bool acknowledged)
{
    CHECK(offset >= 0 && offset < OFFSETS && mark > 0 && mark <= m->mark);
    uint64_t *place = &m->known[partition][offset];
    if (*place && *place != mark)
        TEST_FAIL("partition %d, offset %lld: batch %llu and batch %llu", partition, (long long)offset,
                  (unsigned long long)*place, (unsigned long long)mark);
    *place = mark;
    if (!acknowledged)
        return;
    m->acknowledged[partition][offset] = 1;
    if (offset >= m->end[partition])
        m->end[partition] = offset + 1;
}

static void produced(struct mix *m, struct client *client, const struct expected *expected)
{
    struct produced out = take_produced(client);
    for (uint32_t i = 0; i < out.count; i++) {
        CHECK_EQUAL(out.partition[i], expected->partition[i]);
        if (out.error[i]) {
            /* closed, dead, too late */
            if (out.error[i] != 3 && out.error[i] != 6 && out.error[i] != 7 && out.error[i] != 56)
                TEST_FAIL("partition %d: error %d", out.partition[i], out.error[i]);
            m->refused++;
        } else if (out.partition[i] < 4) {
            know(m, out.partition[i], out.base_offset[i], expected->mark[i], true);
        }
    }
}

static void answered(struct mix *m, struct actor *actor)
{
    CHECK(actor->count > 0);
    struct expected expected = actor->expected[actor->first];
    struct client *client = &actor->client;
    actor->first = (actor->first + 1) % EXPECTED;
    actor->count--;
    m->answers++;
    int32_t correlation_id = (int32_t)take(client, 4);
    CHECK_EQUAL(correlation_id, expected.correlation_id);
    client->at = 0;
    switch (expected.kind) {
    case PRODUCE:
        produced(m, client, &expected);
        break;
    case FETCH:
    case SESSION:
        take_fetched(client, &m->fetched);
        CHECK_EQUAL(m->fetched.top_error, 0);
        if (expected.kind == SESSION) {
            actor->session_epoch = m->fetched.session_id ? actor->session_epoch + 1 : 0;
            actor->session_id = m->fetched.session_id;
        }
        for (int32_t i = 0; i < m->fetched.partition_count; i++)
            CHECK(m->fetched.error[i] == 0 || m->fetched.error[i] == 1 || m->fetched.error[i] == 3 ||
                  m->fetched.error[i] == 6 || m->fetched.error[i] == 56);
        for (uint32_t i = 0; i < m->fetched.batch_count; i++)
            know(m, m->fetched.batches[i].partition, m->fetched.batches[i].offset, m->fetched.batches[i].mark, false);
        break;
    case CONTROL_REQUEST:
        CHECK_EQUAL(client->reply_bytes, 4 + 6);
        break;
    case LIST_OFFSETS:
        CHECK_EQUAL(client->reply_bytes, 4 + 4 + 2 + 5 + 4 + 4 + 2 + 8 + 8);
    }
}

static void pull(struct mix *m, struct actor *actor)
{
    if (actor->in_capacity - actor->in_bytes < 65536)
        actor->in = realloc(actor->in, actor->in_capacity = actor->in_capacity * 2 + 131072);
    ssize_t n = recv(actor->client.fd, actor->in + actor->in_bytes, actor->in_capacity - actor->in_bytes, MSG_DONTWAIT);
    if (n < 0 && errno == EAGAIN)
        return;
    if (n <= 0) { /* it sent nonsense, or a change was pending when the acceptor died */
        leave(m, actor);
        return;
    }
    actor->in_bytes += (uint32_t)n;
    uint32_t at = 0;
    while (actor->in_bytes - at >= 4) {
        uint32_t size_bytes = (uint32_t)actor->in[at] << 24 | (uint32_t)actor->in[at + 1] << 16 |
                              (uint32_t)actor->in[at + 2] << 8 | actor->in[at + 3];
        if (actor->in_bytes - at - 4 < size_bytes)
            break;
        actor->client = (struct client){.fd = actor->client.fd, .reply = actor->in + at + 4, .reply_bytes = size_bytes};
        answered(m, actor);
        actor->client.reply = NULL;
        at += 4 + size_bytes;
    }
    memmove(actor->in, actor->in + at, actor->in_bytes - at);
    actor->in_bytes -= at;
}

/* ---- the other endpoints ---- */

static void be_acceptor(struct mix *m)
{
    struct mqd_descriptor request;
    uint32_t from;
    while (mqd_endpoint_drain(m->b->endpoints[ACCEPTOR], &request, &from, 1) == 1) {
        if (request.kind != MQD_LINK_REQUEST)
            continue;
        m->at = (m->at + 64) % ARENA_BYTES;
        if (below(m, 100) == 0)
            bench_put(m->b, ACCEPTOR, from, (struct mqd_descriptor){.kind = MQD_LINK_CLOSE, .token = request.token});
        else if (below(m, 2))
            bench_respond(m->b, from, &request, "answer", 0, true, m->at);
        else {
            bench_respond(m->b, from, &request, "ans", MQD_RESPONSE_MORE, true, m->at);
            m->at = (m->at + 64) % ARENA_BYTES;
            bench_respond(m->b, from, &request, "wer", 0, false, m->at);
        }
    }
}

static void be_owner(struct mix *m, uint32_t keep)
{
    struct mqd_descriptor request;
    uint32_t from;
    while (m->lent_count < 256 && mqd_endpoint_drain(m->b->endpoints[FAKE], &request, &from, 1) == 1) {
        if (request.kind != MQD_LINK_PRODUCE || (uint64_t)request.c != mqd_endpoint_generation(m->b->control, FAKE))
            continue;
        m->lent[m->lent_count] = request;
        m->lent_from[m->lent_count++] = from;
    }
    while (m->lent_count > keep) { /* answered in any order */
        uint32_t i = below(m, m->lent_count);
        struct mqd_batch batch;
        const char *reason = "";
        struct mqd_descriptor lent = m->lent[i];
        CHECK(mqd_batch_validate(m->b->arenas[m->lent_from[i]] + lent.offset, lent.size_bytes, &batch, &reason) == 0);
        if (below(m, 2))
            bench_put(m->b, FAKE, m->lent_from[i],
                      (struct mqd_descriptor){.kind = MQD_LINK_RELEASE, .token = lent.token});
        bench_put(
            m->b, FAKE, m->lent_from[i],
            (struct mqd_descriptor){.kind = MQD_LINK_PRODUCED, .token = lent.token, .a = m->fake_offset++, .b = -1});
        m->lent[i] = m->lent[--m->lent_count];
        m->lent_from[i] = m->lent_from[m->lent_count];
    }
}

static void restart(struct mix *m, uint32_t endpoint)
{
    struct bench *b = m->b;
    mqd_endpoint_set_state(b->control, endpoint, MQD_PROCESS_DEAD, 0);
    mqd_endpoint_close(b->endpoints[endpoint]);
    b->endpoints[endpoint] = mqd_endpoint_open(b->control, b->links, endpoint, ENDPOINTS, b->eventfds);
    mqd_endpoint_set_state(b->control, endpoint, MQD_PROCESS_RUNNING, getpid());
    for (uint32_t worker = 0; worker < REACTORS; worker++) {
        CHECK_EQUAL(mqd_reactor_endpoint_died(b->reactors[worker], ++b->token, endpoint), 0);
        bench_done(b, worker, b->token);
    }
    if (endpoint == FAKE) {
        m->lent_count = 0;
        bench_fake_slot(b);
    }
}

static void disturb(struct mix *m)
{
    struct bench *b = m->b;
    uint32_t slot = below(m, 4), owner = bench_owner(slot);
    uint8_t id[16] = {3};
    switch (below(m, 7)) {
    case 0:
        bench_partition_close(b, slot);
        bench_partition_open(b, slot, slot);
        break;
    case 1:
        mqd_reactor_roll(b->reactors[owner], ++b->token, slot);
        bench_done(b, owner, b->token);
        break;
    case 2:
        restart(m, ACCEPTOR);
        break;
    case 3:
        restart(m, FAKE);
        break;
    case 4:
        bench_topic_put(b, b->topic_id, "quick", bench_slots, PARTITIONS);
        break;
    case 5:
        bench_topic_put(b, id, "other", &slot, 1);
        bench_topic_remove(b, id);
        break;
    default:
        b->log_options.flush_on_ack = (uint8_t)below(m, 2);
        mqd_reactor_set_log_options(b->reactors[owner], ++b->token, slot, &b->log_options);
        bench_done(b, owner, b->token);
    }
}

/* ---- the whole ---- */

static void turn(struct mix *m, bool more)
{
    struct actor *actor = &m->actors[below(m, CLIENTS)];
    if (more)
        want(m, actor);
    for (uint32_t i = 0; i < CLIENTS; i++) {
        if (m->actors[i].open)
            push(m, &m->actors[i]);
        if (m->actors[i].open && (!more || below(m, 3)))
            pull(m, &m->actors[i]);
    }
    be_acceptor(m);
    be_owner(m, more ? below(m, 8) : 0);
}

static bool quiet(const struct mix *m)
{
    for (uint32_t i = 0; i < CLIENTS; i++)
        if (m->actors[i].open && (m->actors[i].count || m->actors[i].doomed || m->actors[i].out.size_bytes))
            return false;
    return true;
}

/* Everything acknowledged is there, read through both workers. */
static void read_all(struct mix *m)
{
    for (uint32_t worker = 0; worker < REACTORS; worker++) {
        struct client client = client_open(m->b, worker);
        for (int32_t p = 0; p < 4; p++) {
            int64_t next = 0;
            while (next < m->end[p]) {
                struct fetch_position requested = {p, next};
                client_fetch(
                    &client,
                    (struct fetch){.wait_ms = LIMIT_MS, .bytes_min = 1, .bytes_max = 200000, .session_epoch = -1},
                    &requested, 1, &m->fetched);
                CHECK(m->fetched.batch_count > 0);
                for (uint32_t i = 0; i < m->fetched.batch_count; i++, next++) {
                    CHECK_EQUAL(m->fetched.batches[i].offset, next);
                    know(m, p, next, m->fetched.batches[i].mark, false);
                }
            }
        }
        client_close(&client);
    }
}

static void change(struct bench *b)
{
    b->log_options.segment_bytes = 1 << 20;
    for (uint32_t worker = 0; worker < REACTORS; worker++)
        b->options[worker].group_commit_us = worker * 300;
}

static void mix(int backend, uint64_t seed, int run_ms, bool to_the_end)
{
    struct mix *m = calloc(1, sizeof *m);
    m->seed = seed;
    m->b = bench_start(backend, change);
    for (uint32_t p = 0; p < PARTITIONS; p++)
        m->known[p] = calloc(OFFSETS, 8), m->acknowledged[p] = calloc(OFFSETS, 1);
    int64_t end_ns = test_now_ns() + run_ms * 1000000ll;
    for (uint64_t turns = 0; test_now_ns() < end_ns && !test_failed; turns++) {
        turn(m, true);
        if (below(m, 150) == 0)
            disturb(m);
        for (uint32_t p = 0; p < 4; p++)
            if (m->end[p] > OFFSETS - 4000)
                end_ns = 0;
    }
    if (to_the_end) {
        end_ns = test_now_ns() + LIMIT_MS * 1000000ll;
        while (!quiet(m) && test_now_ns() < end_ns && !test_failed)
            turn(m, false);
        CHECK_OR(quiet(m), (void)0);
        if (!test_failed)
            read_all(m);
    }
    test_message("seed %llu: %u answers, %u batches refused, %u connections ended, %llu batches sent",
                 (unsigned long long)seed, m->answers, m->refused, m->closed, (unsigned long long)m->mark);
    bench_stop(m->b); /* with whatever is under way */
    for (uint32_t i = 0; i < CLIENTS; i++)
        if (m->actors[i].open)
            leave(m, &m->actors[i]);
    for (uint32_t p = 0; p < PARTITIONS; p++)
        free(m->known[p]), free(m->acknowledged[p]);
    free(m);
}

BOTH(mixes)
{
    const char *seed = getenv("MQD_TEST_SEED");
    uint64_t first = seed ? strtoull(seed, NULL, 0) : test_long() ? (uint64_t)test_now_ns() : 1;
    for (uint64_t i = 0; i < (test_long() ? 20 : 2) && !test_failed; i++)
        mix(backend, first + i, test_long() ? 5000 : 400, i % 2 == 0);
}
