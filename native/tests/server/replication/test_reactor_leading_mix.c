/* tsan: long */
/* A leader of several replicas under all of these together: two followers that fetch in sessions
 * and without, stop, leave and come back as a new incarnation; producers with acks=all and acks=1
 * through both workers; consumers that wait; a controller that takes and refuses proposals, raises
 * epochs, takes the leadership away and gives it back.
 *
 * Checked: what was acknowledged with acks=all was held by every member of the in-sync set, where
 * that set was the same from before it was sent until after it was answered; the high watermark had
 * passed it; every follower's copy is the leader's, mark by mark; no wait is left, nothing leaks. */
#include "mqd_leading_test.h"

#include <pthread.h>

#define NODES 3
#define OFFSETS (1 << 18)
#define PRODUCERS 4

struct follower {
    int32_t node;
    _Atomic int64_t position;
    uint64_t *marks;
    int64_t end;
    pthread_t thread;
    struct mix *m;
    uint64_t seed;
    int64_t broker_epoch;
    uint32_t rounds, empty_rounds;
};

struct mix {
    struct bench *b;
    _Atomic bool stop, followers_stop;
    _Atomic uint32_t version; /* odd while the controller changes the next two fields */
    _Atomic uint32_t in_sync; /* bit per node; 0 = node 1 does not lead */
    _Atomic int32_t leader_epoch;
    _Atomic int64_t broker_epoch[NODES + 1];
    struct follower followers[NODES + 1];
    _Atomic uint32_t acknowledged, checked, refused;
    _Atomic uint64_t *by_offset; /* mark of what was acknowledged with acks=all */
    uint64_t seed;
};

static uint32_t below(uint64_t *seed, uint32_t limit)
{
    return (uint32_t)(test_random(seed) >> 33) % limit;
}

/* ---- followers ---- */

/* Like take_fetch_response, but the records are kept. False: the connection has ended. */
static bool take_copy(struct follower *f, struct client *client, struct fetch_response *out)
{
    *out = (struct fetch_response){.diverging_epoch = -1, .diverging_end = -1, .next_offset = -1};
    if (client_receive(client) != 1)
        return false;
    take(client, 4), take_varint(client), take(client, 4);
    out->top_error = (int16_t)take(client, 2), out->session_id = (int32_t)take(client, 4);
    for (uint32_t topics = take_varint(client); topics > 1 && !client->broken; topics--) {
        take_bytes(client, 16);
        for (uint32_t count = take_varint(client); count > 1 && !client->broken; count--) {
            out->partition_count++;
            take(client, 4), out->error = (int16_t)take(client, 2), out->high_watermark = (int64_t)take(client, 8),
                             take(client, 16);
            CHECK_OR(take_varint(client) == 0, abort());
            take(client, 4);
            uint32_t bytes = take_varint(client);
            const uint8_t *at = client->reply + client->at, *end = at + (bytes ? bytes - 1 : 0);
            client->at += (uint32_t)(end - at);
            for (struct mqd_batch batch; (size_t)(end - at) > MQD_BATCH_HEADER_BYTES; at += batch.size_bytes) {
                CHECK_OR(mqd_batch_decode(at, (uint64_t)(end - at), &batch) == 0 && batch.size_bytes <= end - at,
                         abort());
                CHECK_OR(batch.base_offset == f->end && f->end < OFFSETS, abort()); /* nothing is left out */
                memcpy(&f->marks[f->end], at + MQD_BATCH_HEADER_BYTES, 8);
                f->end = batch.base_offset + batch.last_offset_delta + 1;
            }
            take_partition_tags(client, out);
        }
        take_varint(client);
    }
    return true;
}

static void *follow_for_ever(void *argument)
{
    struct follower *f = argument;
    struct mix *m = f->m;
    while (!m->followers_stop) {
        struct client client = client_open_as(m->b, 0, f->node);
        int32_t session_id = 0, session_epoch = below(&f->seed, 3) ? 0 : -1;
        for (uint32_t rounds = 1 + below(&f->seed, 60); rounds && !m->followers_stop; rounds--) {
            struct fetch_response response;
            f->broker_epoch = m->broker_epoch[f->node];
            m->followers[f->node].position = f->end; /* before the leader can know */
            follower_send(m->b, &client,
                          (struct follower_fetch){.node = f->node,
                                                  .leader_epoch = m->leader_epoch,
                                                  .last_epoch = -1,
                                                  .offset = f->end,
                                                  .wait_ms = (int32_t)below(&f->seed, 40),
                                                  .session_id = session_id,
                                                  .session_epoch = session_epoch,
                                                  .broker_epoch = f->broker_epoch},
                          1);
            f->rounds++;
            if (below(&f->seed, 40) == 0)
                break; /* it leaves in the middle */
            CHECK_OR(take_copy(f, &client, &response), abort());
            if (response.top_error) {
                session_id = 0, session_epoch = 0;
            } else if (session_epoch >= 0) {
                session_epoch = response.session_id ? session_epoch + 1 : 0;
                session_id = response.session_id;
            }
            if (below(&f->seed, 30) == 0)
                usleep(below(&f->seed, 3000));
        }
        client_close(&client);
    }
    return NULL;
}

/* ---- producers ---- */

struct producer {
    struct mix *m;
    uint64_t seed;
    uint32_t worker, index;
    pthread_t thread;
};

/* Acknowledged with acks=all: every replica that was in sync all the time has it. */
static void check_acknowledged(struct mix *m, uint32_t version, uint32_t in_sync, const struct produced *out,
                               uint64_t mark)
{
    m->acknowledged++;
    m->by_offset[out->base_offset[0]] = mark;
    int64_t end = out->base_offset[0] + 1;
    CHECK_OR(high_watermark(m->b) >= end, abort());
    if ((version & 1) || m->version != version || !in_sync)
        return;
    for (int32_t node = 2; node <= NODES; node++)
        CHECK_OR(
            !(in_sync >> node & 1) || m->followers[node].position >= end,
            fprintf(stderr, "node %d has %lld of %lld\n", node, (long long)m->followers[node].position, (long long)end);
            abort());
    m->checked++;
}

static void *produce_for_ever(void *argument)
{
    struct producer *p = argument;
    struct client client = client_open(p->m->b, p->worker);
    for (uint64_t i = 1; !p->m->stop; i++) {
        uint64_t mark = (uint64_t)p->index << 48 | i;
        int acks = below(&p->seed, 4) ? -1 : 1;
        uint32_t version = p->m->version, in_sync = p->m->in_sync;
        struct part one = {
            0, {.mark = mark, .body_bytes = (int32_t)(8 + below(&p->seed, below(&p->seed, 20) ? 500 : 30000))}};
        struct produced out = client_produce(&client, acks, &one, 1);
        CHECK_OR(out.count == 1, abort());
        if (out.error[0])
            p->m->refused++;
        else if (acks == -1)
            check_acknowledged(p->m, version, in_sync, &out, mark);
        if (below(&p->seed, 200) == 0) {
            client_close(&client);
            client = client_open(p->m->b, p->worker);
        }
        if (out.error[0])
            usleep(500);
    }
    client_close(&client);
    return NULL;
}

static void *consume_for_ever(void *argument)
{
    struct producer *p = argument;
    struct client client = client_open(p->m->b, p->worker);
    struct fetched *fetched = calloc(1, sizeof *fetched);
    struct fetch_position requested = {0, 0};
    while (!p->m->stop) {
        client_fetch(&client, (struct fetch){.wait_ms = 20, .bytes_min = 1, .bytes_max = 1 << 18, .session_epoch = -1},
                     &requested, 1, fetched);
        CHECK_OR(fetched->partition_count == 1, abort());
        for (uint32_t i = 0; i < fetched->batch_count; i++)
            CHECK_OR(fetched->batches[i].offset + 1 <= high_watermark(p->m->b), abort());
        if (fetched->error[0] == 0 && fetched->batch_count)
            requested.offset = fetched->batches[fetched->batch_count - 1].offset + 1;
    }
    free(fetched);
    client_close(&client);
    return NULL;
}

/* ---- the controller ---- */

struct state {
    struct target_replicas target;
    bool leads;
};

static void change(struct mix *m, struct state *state)
{
    m->version++;
    m->in_sync = 0;
    m->leader_epoch = state->target.leader_epoch;
    struct mqd_replica_assignment assignment = {.node_id = 1,
                                                .broker_epoch = EPOCH_OF(1),
                                                .leader = state->target.leader,
                                                .leader_epoch = state->target.leader_epoch,
                                                .partition_epoch = ++state->target.partition_epoch,
                                                .min_insync = state->target.min_insync,
                                                .lag_ms_max = 20,
                                                .lag_records_max = MQD_REPLICA_NO_RECORD_BOUND,
                                                .flush_on_ack = 1,
                                                .member_count = NODES};
    for (int32_t node = 1; node <= NODES; node++)
        assignment.members[node - 1] =
            (struct mqd_replica_member){node, state->target.in_sync >> node & 1, 1, m->broker_epoch[node]};
    CHECK_OR(mqd_reactor_replica_set(m->b->reactors[0], ++m->b->token, SLOT, &assignment, 0) == 0, abort());
    CHECK_OR(bench_done(m->b, 0, m->b->token).error == 0, abort());
    m->in_sync = state->target.leader == 1 ? state->target.in_sync : 0;
    m->version++;
}

static void decide(struct mix *m, struct state *state, const struct mqd_replica_proposal *proposal)
{
    bool current = proposal->leader_epoch == state->target.leader_epoch &&
                   proposal->partition_epoch == state->target.partition_epoch;
    uint32_t set = 0, roll = below(&m->seed, 10);
    for (uint32_t i = 0; i < proposal->member_count; i++) {
        set |= 1u << proposal->node_id[i];
        current &=
            proposal->node_id[i] == 1 || proposal->member_broker_epoch[i] == m->broker_epoch[proposal->node_id[i]];
    }
    if (roll == 0)
        return; /* lost on the way */
    if (current && roll < 8) {
        state->target.in_sync = set;
        change(m, state);
    }
    CHECK_OR(mqd_reactor_in_sync_response(m->b->reactors[0], ++m->b->token, SLOT, proposal->sequence,
                                          proposal->leader_epoch,
                                          current && roll < 8 ? 0
                                          : roll == 9         ? 41
                                          : current           ? 55
                                                              : 95) == 0,
             abort());
}

static void control(struct mix *m, struct state *state)
{
    struct mqd_event event;
    while (mqd_reactor_next_event(m->b->reactors[0], &event))
        if (event.kind == MQD_EVENT_PROPOSE_IN_SYNC) {
            struct mqd_replica_proposal proposal = *event.proposal;
            mqd_proposal_free(event.proposal);
            decide(m, state, &proposal);
        }
    uint32_t roll = below(&m->seed, 200);
    if (roll == 0) { /* the same leader in another epoch */
        state->target.leader_epoch++;
        change(m, state);
    } else if (roll == 1) { /* away and back; no other leader writes meanwhile, so nothing is truncated */
        state->target.leader = below(&m->seed, 2) ? -1 : 2, state->target.leader_epoch++;
        change(m, state);
        usleep(below(&m->seed, 3000));
        state->target.leader = 1, state->target.leader_epoch++;
        change(m, state);
    } else if (roll == 2) { /* a new incarnation of a follower: out of the set until it has caught up */
        int32_t node = 2 + (int32_t)below(&m->seed, 2);
        m->broker_epoch[node] += 1000;
        state->target.in_sync &= ~(1u << node);
        change(m, state);
    } else if (roll == 3) {
        state->target.min_insync = 1 + (int32_t)below(&m->seed, 2);
        change(m, state);
    }
    usleep(1000);
}

static void follower_begin(struct mix *m, int32_t node)
{
    struct follower *f = &m->followers[node];
    *f = (struct follower){
        .node = node, .m = m, .seed = m->seed * 31 + (uint64_t)node, .marks = calloc(OFFSETS, sizeof *f->marks)};
    CHECK_OR(pthread_create(&f->thread, NULL, follow_for_ever, f) == 0, abort());
}

static void finish(struct mix *m, struct state *state)
{
    m->followers_stop = true;
    for (int32_t node = 2; node <= NODES; node++)
        pthread_join(m->followers[node].thread, NULL);
    struct fetched *fetched = calloc(1, sizeof *fetched);
    int64_t end = view(m->b).positions.log_end_offset, at = 0;
    state->target.in_sync = 1 << 1, state->target.min_insync = 1; /* so that all of it may be read */
    change(m, state);
    struct client client = client_open(m->b, 1);
    while (at < end) {
        struct fetch_position requested = {0, at};
        client_fetch(&client,
                     (struct fetch){.wait_ms = LIMIT_MS, .bytes_min = 1, .bytes_max = 1 << 18, .session_epoch = -1},
                     &requested, 1, fetched);
        CHECK_OR(fetched->batch_count, abort());
        for (uint32_t i = 0; i < fetched->batch_count; i++) {
            int64_t offset = fetched->batches[i].offset;
            uint64_t mark = fetched->batches[i].mark, known = m->by_offset[offset];
            CHECK(!known || known == mark);
            for (int32_t node = 2; node <= NODES; node++)
                CHECK(offset >= m->followers[node].end || m->followers[node].marks[offset] == mark);
            at = offset + 1;
        }
    }
    client_close(&client);
    free(fetched);
    test_message(
        "%lld batches, %u acknowledged by all, %u of them checked, %u refused; followers asked %u and %u times",
        (long long)end, m->acknowledged, m->checked, m->refused, m->followers[2].rounds, m->followers[3].rounds);
    CHECK(m->checked > 20);
}

static void mix(int backend, uint64_t seed)
{
    struct mix *m = calloc(1, sizeof *m);
    struct producer producers[PRODUCERS + 2] = {0};
    struct state state = {
        .target = {.leader = 1, .leader_epoch = 1, .min_insync = 2, .in_sync = 1 << 1 | 1 << 2 | 1 << 3}};
    m->b = bench_start(backend, NULL);
    m->seed = seed;
    m->by_offset = calloc(OFFSETS, sizeof *m->by_offset);
    for (int32_t node = 1; node <= NODES; node++)
        m->broker_epoch[node] = EPOCH_OF(node);
    change(m, &state);
    for (int32_t node = 2; node <= NODES; node++)
        follower_begin(m, node);
    for (uint32_t i = 0; i < PRODUCERS + 2; i++) {
        producers[i] = (struct producer){m, seed + i * 7919, i % 2, i + 1, 0};
        CHECK_OR(pthread_create(&producers[i].thread, NULL, i < PRODUCERS ? produce_for_ever : consume_for_ever,
                                &producers[i]) == 0,
                 abort());
    }
    int64_t until_ns = test_now_ns() + (test_long() ? 20000 : 1000) * 1000000ll;
    while (test_now_ns() < until_ns)
        control(m, &state);
    m->stop = true;
    state.target.leader_epoch++; /* requests that still wait are answered */
    change(m, &state);
    for (uint32_t i = 0; i < PRODUCERS + 2; i++)
        pthread_join(producers[i].thread, NULL);
    finish(m, &state);
    bench_stop(m->b);
    for (int32_t node = 2; node <= NODES; node++)
        free(m->followers[node].marks);
    free(m->by_offset);
    free(m);
}

static uint64_t seed(void)
{
    const char *given = getenv("MQD_TEST_SEED");
    uint64_t value = given ? strtoull(given, NULL, 0) : (uint64_t)test_now_ns();
    test_message("MQD_TEST_SEED=%llu", (unsigned long long)value);
    return value;
}

BOTH(leading_under_everything)
{
    mix(backend, seed());
}
