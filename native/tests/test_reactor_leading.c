/* tsan */
/* A partition of several replicas on its leader: the test is the followers (nodes 2 and 3) and the controller; the broker is node 1. */
#include "mqd_reactor_test.h"

#include "../mqd_replica.h"

#define SLOT 0 /* partition 0 of "quick", worker 0 */
#define EPOCH_OF(node) (100 + (node)) /* broker epochs */

static struct part part(int32_t partition, uint64_t mark, int32_t record_count)
{
    return (struct part){partition, {.mark = mark, .record_count = record_count}};
}

/* ---- the controller ---- */

struct wanted { int32_t leader, leader_epoch, partition_epoch, min_insync; uint32_t in_sync; /* bit per node */ int64_t lag_ms_max; int32_t replica_count; };

static void assign(struct bench *b, struct wanted wanted)
{
    struct mqd_replica_assignment assignment = {.node_id = 1, .broker_epoch = EPOCH_OF(1), .leader = wanted.leader, .leader_epoch = wanted.leader_epoch,
                                                .partition_epoch = wanted.partition_epoch, .min_insync = wanted.min_insync,
                                                .lag_ms_max = wanted.lag_ms_max ? wanted.lag_ms_max : LIMIT_MS * 10, .lag_records_max = MQD_REPLICA_NO_RECORD_BOUND,
                                                .flush_on_ack = b->log_options.flush_on_ack, .member_count = wanted.replica_count ? (uint32_t)wanted.replica_count : 3};
    for (int32_t node = 1; node <= (int32_t)assignment.member_count; node++)
        assignment.members[node - 1] = (struct mqd_replica_member){node, wanted.in_sync >> node & 1, 1, EPOCH_OF(node)};
    CHECK_EQUAL(mqd_reactor_replica_set(b->reactors[0], ++b->token, SLOT, &assignment, 0), 0);
    CHECK_EQUAL(bench_done(b, 0, b->token).error, 0);
}

/* The next proposal of the leader; other events are for nobody. */
static struct mqd_replica_proposal proposed(struct bench *b)
{
    struct mqd_event event;
    for (;;) {
        while (mqd_reactor_next_event(b->reactors[0], &event))
            if (event.kind == MQD_EVENT_PROPOSE_IN_SYNC) {
                struct mqd_replica_proposal out = *event.proposal;
                mqd_proposal_free(event.proposal);
                CHECK_OR(event.slot == SLOT, abort());
                return out;
            }
        struct pollfd wait = {mqd_reactor_event_fd(b->reactors[0]), POLLIN, 0};
        CHECK_OR(poll(&wait, 1, LIMIT_MS) == 1, abort());
    }
}

static void answer_proposal(struct bench *b, uint64_t sequence, int32_t leader_epoch, int error)
{
    CHECK_EQUAL(mqd_reactor_in_sync_answer(b->reactors[0], ++b->token, SLOT, sequence, leader_epoch, error), 0);
    CHECK_EQUAL(bench_done(b, 0, b->token).error, 0);
}

static struct mqd_partition_view view(struct bench *b)
{
    struct mqd_partition_view out;
    CHECK_OR(mqd_slot_view(b->control, SLOT, &out) == 0, abort());
    return out;
}

static int64_t high_watermark(struct bench *b) { return view(b).positions.high_watermark; }

/* ---- a follower ---- */

struct ask { int32_t node, leader_epoch, last_epoch, wait_ms, session_id, session_epoch; int64_t offset, broker_epoch; /* 0 = the node's */ };
struct told { int16_t top_error, error; int32_t session_id, diverging_epoch; int64_t diverging_end, high_watermark, log_start; uint32_t partition_count, batch_count, bytes; int64_t next_offset; };

/* Fetch v17. `count`: 0 names no partition. */
static void put_follower_fetch(struct bench *b, struct frame *frame, struct ask ask, int count)
{
    uint32_t begin = frame_begin(frame, 1, 17, 5);
    put(frame, 1, 0);
    put(frame, 4, (uint32_t)ask.wait_ms), put(frame, 4, 1), put(frame, 4, 1 << 20), put(frame, 1, 0), put(frame, 4, (uint32_t)ask.session_id), put(frame, 4, (uint32_t)ask.session_epoch);
    put(frame, 1, (uint64_t)count + 1);
    if (count) {
        put_bytes(frame, b->topic_id, 16), put(frame, 1, 2);
        put(frame, 4, 0), put(frame, 4, (uint32_t)ask.leader_epoch), put(frame, 8, (uint64_t)ask.offset), put(frame, 4, (uint32_t)ask.last_epoch), put(frame, 8, 0), put(frame, 4, 1 << 20);
        put(frame, 1, 0), put(frame, 1, 0);
    }
    put(frame, 1, 1), put(frame, 1, 1); /* nothing forgotten, no rack */
    put(frame, 1, 1), put(frame, 1, 1), put(frame, 1, 13); /* one tag: replica_state */
    put(frame, 4, (uint32_t)ask.node), put(frame, 8, (uint64_t)(ask.broker_epoch ? ask.broker_epoch : EPOCH_OF(ask.node))), put(frame, 1, 0);
    frame_end(frame, begin);
}

static uint32_t take_varint(struct client *client)
{
    uint32_t value = 0;
    for (int shift = 0; shift < 35; shift += 7) {
        uint32_t byte = (uint32_t)take(client, 1);
        value |= (byte & 0x7f) << shift;
        if (!(byte & 0x80))
            break;
    }
    return value;
}

static void take_partition_tags(struct client *client, struct told *out)
{
    for (uint32_t tags = take_varint(client); tags && !client->broken; tags--) {
        uint32_t tag = take_varint(client), size_bytes = take_varint(client), end = client->at + size_bytes;
        if (tag == 0)
            out->diverging_epoch = (int32_t)take(client, 4), out->diverging_end = (int64_t)take(client, 8);
        client->at = end;
    }
}

static void take_records(struct client *client, struct told *out)
{
    uint32_t size_bytes = take_varint(client);
    out->bytes = size_bytes ? size_bytes - 1 : 0;
    CHECK(out->bytes <= client->reply_bytes - client->at);
    const uint8_t *at = client->reply + client->at, *end = at + out->bytes;
    client->at += out->bytes;
    while ((size_t)(end - at) > MQD_BATCH_HEADER_BYTES) {
        struct mqd_batch batch;
        const char *reason;
        CHECK_EQUAL(mqd_batch_decode(at, (uint64_t)(end - at), &batch), 0);
        CHECK_EQUAL(mqd_batch_validate(at, (uint64_t)batch.size_bytes, &batch, &reason), 0);
        out->batch_count++;
        out->next_offset = batch.base_offset + batch.last_offset_delta + 1;
        at += batch.size_bytes;
    }
    CHECK(at == end);
}

static struct told take_told(struct client *client)
{
    struct told out = {.diverging_epoch = -1, .diverging_end = -1, .next_offset = -1, .high_watermark = -1};
    CHECK_OR(client_receive(client) == 1, return out);
    take(client, 4), take_varint(client), take(client, 4);
    out.top_error = (int16_t)take(client, 2), out.session_id = (int32_t)take(client, 4);
    for (uint32_t topics = take_varint(client); topics > 1 && !client->broken; topics--) {
        take_bytes(client, 16);
        for (uint32_t count = take_varint(client); count > 1 && !client->broken; count--) {
            out.partition_count++;
            take(client, 4), out.error = (int16_t)take(client, 2), out.high_watermark = (int64_t)take(client, 8), take(client, 8), out.log_start = (int64_t)take(client, 8);
            CHECK_OR(take_varint(client) == 0, return out);
            take(client, 4), take_records(client, &out);
            take_partition_tags(client, &out);
        }
        take_varint(client);
    }
    take_varint(client);
    CHECK_OR(!client->broken && client->at == client->reply_bytes, return out);
    return out;
}

static void follower_send(struct bench *b, struct client *client, struct ask ask, int count)
{
    struct frame frame = {0};
    put_follower_fetch(b, &frame, ask, count);
    CHECK_OR(client_send(client, &frame), abort());
    frame_free(&frame);
}

static struct told follow(struct bench *b, struct client *client, struct ask ask)
{
    if (!ask.session_epoch)
        ask.session_epoch = -1;
    follower_send(b, client, ask, 1);
    return take_told(client);
}

/* ---- a client ---- */

static void produce_send(struct client *client, int acks, uint64_t mark, int32_t record_count)
{
    struct frame frame = {0};
    struct part one = part(0, mark, record_count);
    put_produce(&frame, 7, acks, LIMIT_MS, &one, 1);
    CHECK_OR(client_send(client, &frame), abort());
    frame_free(&frame);
}

static struct produced produce_take(struct client *client)
{
    CHECK_OR(client_receive(client) == 1, abort());
    return take_produced(client);
}

static int16_t produce(struct client *client, int acks, uint64_t mark)
{
    produce_send(client, acks, mark, 1);
    return produce_take(client).error[0];
}

static bool readable(struct client *client)
{
    struct pollfd wait = {client->fd, POLLIN, 0};
    return poll(&wait, 1, 0) == 1;
}

/* ListOffsets v5 of partition 0. Returns the error; *offset. */
static int16_t list_offset(struct client *client, int64_t timestamp, int64_t *offset)
{
    struct frame frame = {0};
    uint32_t begin = frame_begin(&frame, 2, 5, 9);
    put(&frame, 4, 0xffffffff), put(&frame, 1, 0), put(&frame, 4, 1), put_text(&frame, "quick"), put(&frame, 4, 1);
    put(&frame, 4, 0), put(&frame, 4, 0xffffffff), put(&frame, 8, (uint64_t)timestamp);
    frame_end(&frame, begin);
    CHECK_OR(client_send(client, &frame) && client_receive(client) == 1, abort());
    frame_free(&frame);
    take(client, 4), take(client, 4), take(client, 4);
    take_bytes(client, (uint32_t)take(client, 2));
    take(client, 4), take(client, 4);
    int16_t error = (int16_t)take(client, 2);
    take(client, 8);
    *offset = (int64_t)take(client, 8);
    return error;
}

/* Three replicas in sync, led here in epoch 1. */
static const struct wanted all_in_sync = {.leader = 1, .leader_epoch = 1, .partition_epoch = 1, .min_insync = 2, .in_sync = 1 << 1 | 1 << 2 | 1 << 3};

/* ---- tests ---- */

BOTH(an_acknowledgement_waits_for_every_member)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0), other = client_open(b, 1), second = client_open_as(b, 0, 2), third = client_open_as(b, 0, 3);
    assign(b, all_in_sync);
    CHECK_EQUAL(view(b).role, MQD_ROLE_LEADS);
    produce_send(&client, -1, 1, 3);
    produce_send(&other, -1, 2, 2); /* by way of another worker */
    struct told told = follow(b, &second, (struct ask){.node = 2, .leader_epoch = 1, .last_epoch = -1, .wait_ms = LIMIT_MS});
    CHECK_EQUAL(told.error, 0);
    int64_t end = told.next_offset;
    CHECK(end == 2 || end == 3 || end == 5);
    while (end < 5) {
        told = follow(b, &second, (struct ask){.node = 2, .leader_epoch = 1, .last_epoch = 1, .wait_ms = LIMIT_MS, .offset = end});
        CHECK_EQUAL(told.error, 0);
        end = told.next_offset;
    }
    told = follow(b, &second, (struct ask){.node = 2, .leader_epoch = 1, .last_epoch = 1, .offset = 5}); /* node 2 has everything */
    CHECK_EQUAL(told.batch_count, 0);
    CHECK_EQUAL(high_watermark(b), 0);
    CHECK(!readable(&client) && !readable(&other));
    told = follow(b, &third, (struct ask){.node = 3, .leader_epoch = 1, .last_epoch = -1, .wait_ms = LIMIT_MS});
    CHECK_EQUAL(told.batch_count, 2);
    CHECK_EQUAL(high_watermark(b), 0);
    told = follow(b, &third, (struct ask){.node = 3, .leader_epoch = 1, .last_epoch = 1, .offset = 5});
    CHECK_EQUAL(told.high_watermark, 5);
    CHECK_EQUAL(produce_take(&client).error[0], 0);
    CHECK_EQUAL(produce_take(&other).error[0], 0);
    CHECK_EQUAL(high_watermark(b), 5);
    struct fetched *fetched = calloc(1, sizeof *fetched);
    struct asked asked = {0, 0};
    client_fetch(&other, (struct fetch){.wait_ms = LIMIT_MS, .bytes_min = 1, .bytes_max = 1 << 20, .session_epoch = -1}, &asked, 1, fetched);
    CHECK_EQUAL(fetched->batch_count, 2);
    free(fetched);
    client_close(&client), client_close(&other), client_close(&second), client_close(&third);
    bench_stop(b);
}

BOTH(a_consumer_sees_nothing_that_is_not_replicated)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0), consumer = client_open(b, 1), second = client_open_as(b, 0, 2);
    struct fetched *fetched = calloc(1, sizeof *fetched);
    struct asked asked = {0, 0};
    struct wanted two = all_in_sync;
    two.in_sync = 1 << 1 | 1 << 2;
    assign(b, two);
    CHECK_EQUAL(produce(&client, 1, 1), 0);
    client_fetch(&consumer, (struct fetch){.wait_ms = 0, .bytes_min = 1, .bytes_max = 1 << 20, .session_epoch = -1}, &asked, 1, fetched);
    CHECK_EQUAL(fetched->batch_count, 0);
    CHECK_EQUAL(fetched->high_watermark[0], 0);
    struct frame frame = {0};
    put_fetch(&frame, (struct fetch){.wait_ms = LIMIT_MS, .bytes_min = 1, .bytes_max = 1 << 20, .session_epoch = -1}, &asked, 1); /* parked until the follower has it */
    CHECK(client_send(&consumer, &frame));
    CHECK_EQUAL(follow(b, &second, (struct ask){.node = 2, .leader_epoch = 1, .last_epoch = -1, .wait_ms = LIMIT_MS}).batch_count, 1);
    follow(b, &second, (struct ask){.node = 2, .leader_epoch = 1, .last_epoch = 1, .offset = 1});
    CHECK_EQUAL(client_receive(&consumer), 1);
    take_fetched(&consumer, fetched);
    CHECK_EQUAL(fetched->batch_count, 1);
    frame_free(&frame);
    free(fetched);
    client_close(&client), client_close(&consumer), client_close(&second);
    bench_stop(b);
}

BOTH(who_may_fetch_as_a_follower)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0), second = client_open_as(b, 0, 2), elsewhere = client_open_as(b, 1, 2), stranger = client_open_as(b, 0, 9);
    assign(b, all_in_sync);
    CHECK_EQUAL(produce(&client, 1, 1), 0);
    struct ask good = {.node = 2, .leader_epoch = 1, .last_epoch = -1}, ask = good;
    CHECK_EQUAL(follow(b, &client, ask).top_error, 31);  /* on a listener of clients */
    ask.node = 3;
    CHECK_EQUAL(follow(b, &second, ask).top_error, 31);  /* in another's name */
    ask = (struct ask){.node = 9, .leader_epoch = 1, .last_epoch = -1};
    CHECK_EQUAL(follow(b, &stranger, ask).error, 9);     /* a host that has no replica */
    CHECK_EQUAL(follow(b, &elsewhere, good).error, 6);   /* a worker that does not own it */
    ask = good, ask.leader_epoch = 0;
    CHECK_EQUAL(follow(b, &second, ask).error, 74);
    ask = good, ask.leader_epoch = 2;
    CHECK_EQUAL(follow(b, &second, ask).error, 75);
    ask = good, ask.broker_epoch = EPOCH_OF(2) - 1;
    CHECK_EQUAL(follow(b, &second, ask).error, 77);      /* an earlier life */
    ask = good, ask.offset = 7;
    CHECK_EQUAL(follow(b, &second, ask).error, 1);
    CHECK_EQUAL(follow(b, &second, good).error, 0);
    CHECK_EQUAL(high_watermark(b), 0);
    client_close(&client), client_close(&second), client_close(&elsewhere), client_close(&stranger);
    bench_stop(b);
}

BOTH(a_log_that_differs_is_told_where)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0), second = client_open_as(b, 0, 2);
    struct wanted wanted = all_in_sync;
    assign(b, wanted);
    produce_send(&client, 1, 1, 3); /* epoch 1: offsets 0..2 */
    CHECK_EQUAL(produce_take(&client).error[0], 0);
    wanted.leader_epoch = 4, wanted.partition_epoch = 2;
    assign(b, wanted);
    struct told told = follow(b, &second, (struct ask){.node = 2, .leader_epoch = 4, .last_epoch = 3, .offset = 5}); /* it has records of epoch 3 that this log never had */
    CHECK_EQUAL(told.error, 0);
    CHECK_EQUAL(told.diverging_epoch, 1);
    CHECK_EQUAL(told.diverging_end, 3);
    CHECK_EQUAL(told.bytes, 0);
    produce_send(&client, 1, 2, 2); /* epoch 4: 3..4 */
    CHECK_EQUAL(produce_take(&client).error[0], 0);
    told = follow(b, &second, (struct ask){.node = 2, .leader_epoch = 4, .last_epoch = 1, .offset = 4}); /* more of epoch 1 than there is */
    CHECK_EQUAL(told.diverging_epoch, 1);
    CHECK_EQUAL(told.diverging_end, 3);
    told = follow(b, &second, (struct ask){.node = 2, .leader_epoch = 4, .last_epoch = 1, .offset = 3});
    CHECK_EQUAL(told.diverging_epoch, -1);
    CHECK_EQUAL(told.next_offset, 5);
    client_close(&client), client_close(&second);
    bench_stop(b);
}

BOTH(too_few_replicas)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0), other = client_open(b, 1);
    struct wanted wanted = all_in_sync;
    assign(b, wanted);
    produce_send(&client, -1, 1, 1); /* taken, then the set shrinks */
    while (view(b).positions.log_end_offset < 1)
        usleep(1000);
    CHECK(!readable(&client));
    wanted.in_sync = 1 << 1, wanted.partition_epoch = 2;
    assign(b, wanted);
    CHECK_EQUAL(produce_take(&client).error[0], 20);
    CHECK_EQUAL(produce(&client, -1, 2), 19);
    CHECK_EQUAL(produce(&other, -1, 3), 19);
    CHECK_EQUAL(produce(&client, 1, 4), 0);
    CHECK_EQUAL(high_watermark(b), 0);
    wanted.min_insync = 1, wanted.partition_epoch = 3;
    assign(b, wanted);
    CHECK_EQUAL(produce(&client, -1, 5), 0);
    CHECK_EQUAL(high_watermark(b), 3);
    client_close(&client), client_close(&other);
    bench_stop(b);
}

BOTH(a_follower_that_has_caught_up_is_proposed_and_counts)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0), second = client_open_as(b, 0, 2), third = client_open_as(b, 0, 3);
    struct wanted wanted = all_in_sync;
    wanted.in_sync = 1 << 1 | 1 << 2;
    assign(b, wanted);
    follow(b, &third, (struct ask){.node = 3, .leader_epoch = 1, .last_epoch = -1});
    struct mqd_replica_proposal proposal = proposed(b);
    CHECK_EQUAL(proposal.member_count, 3);
    CHECK_EQUAL(proposal.partition_epoch, 1);
    CHECK_EQUAL(proposal.leader_epoch, 1);
    CHECK_EQUAL(proposal.member_broker_epoch[2], EPOCH_OF(3));
    produce_send(&client, -1, 1, 1);
    follow(b, &second, (struct ask){.node = 2, .leader_epoch = 1, .last_epoch = -1, .wait_ms = LIMIT_MS});
    follow(b, &second, (struct ask){.node = 2, .leader_epoch = 1, .last_epoch = 1, .offset = 1});
    CHECK_EQUAL(high_watermark(b), 0); /* node 3 counts since it was proposed */
    CHECK(!readable(&client));
    struct mqd_replica_proposal again = proposed(b); /* nobody has answered */
    CHECK_EQUAL(again.sequence, proposal.sequence);
    answer_proposal(b, proposal.sequence, 1, 41); /* NOT_CONTROLLER: nobody knows */
    CHECK_EQUAL(high_watermark(b), 0);
    again = proposed(b);
    CHECK_EQUAL(again.sequence, proposal.sequence);
    answer_proposal(b, proposal.sequence, 1, 107); /* refused for good */
    CHECK_EQUAL(produce_take(&client).error[0], 0);
    CHECK_EQUAL(high_watermark(b), 1);
    follow(b, &third, (struct ask){.node = 3, .leader_epoch = 1, .last_epoch = 1, .offset = 1});
    again = proposed(b);
    CHECK_EQUAL(again.sequence, proposal.sequence + 1);
    wanted.in_sync |= 1 << 3, wanted.partition_epoch = 2;
    assign(b, wanted);
    produce_send(&client, -1, 2, 1);
    follow(b, &second, (struct ask){.node = 2, .leader_epoch = 1, .last_epoch = 1, .offset = 1, .wait_ms = LIMIT_MS});
    follow(b, &second, (struct ask){.node = 2, .leader_epoch = 1, .last_epoch = 1, .offset = 2});
    CHECK(!readable(&client));
    follow(b, &third, (struct ask){.node = 3, .leader_epoch = 1, .last_epoch = 1, .offset = 2});
    CHECK_EQUAL(produce_take(&client).error[0], 0);
    client_close(&client), client_close(&second), client_close(&third);
    bench_stop(b);
}

BOTH(a_follower_that_lags_is_proposed_away)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0), second = client_open_as(b, 0, 2);
    struct wanted wanted = all_in_sync;
    wanted.lag_ms_max = 300;
    assign(b, wanted);
    produce_send(&client, -1, 1, 1);
    follow(b, &second, (struct ask){.node = 2, .leader_epoch = 1, .last_epoch = -1, .wait_ms = LIMIT_MS});
    follow(b, &second, (struct ask){.node = 2, .leader_epoch = 1, .last_epoch = 1, .offset = 1});
    struct mqd_replica_proposal proposal = proposed(b);
    CHECK_EQUAL(proposal.member_count, 2);
    CHECK_EQUAL(proposal.node_id[1], 2);
    CHECK(!readable(&client)); /* until it is committed, node 3 counts */
    wanted.in_sync = 1 << 1 | 1 << 2, wanted.partition_epoch = 2;
    assign(b, wanted);
    CHECK_EQUAL(produce_take(&client).error[0], 0);
    client_close(&client), client_close(&second);
    bench_stop(b);
}

BOTH(leadership_that_ends)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0), other = client_open(b, 1), second = client_open_as(b, 0, 2);
    struct fetched *fetched = calloc(1, sizeof *fetched);
    struct asked asked = {0, 0};
    struct wanted wanted = all_in_sync;
    int64_t offset;
    assign(b, wanted);
    produce_send(&client, -1, 1, 1);
    CHECK_EQUAL(follow(b, &second, (struct ask){.node = 2, .leader_epoch = 1, .last_epoch = -1, .wait_ms = LIMIT_MS}).batch_count, 1);
    follower_send(b, &second, (struct ask){.node = 2, .leader_epoch = 1, .last_epoch = 1, .offset = 1, .wait_ms = LIMIT_MS, .session_epoch = -1}, 1); /* parked */
    wanted.leader = 2, wanted.leader_epoch = 2, wanted.partition_epoch = 2;
    assign(b, wanted);
    CHECK_EQUAL(produce_take(&client).error[0], 6);
    CHECK_EQUAL(take_told(&second).error, 6);
    CHECK_EQUAL(view(b).role, MQD_ROLE_FOLLOWS);
    CHECK_EQUAL(produce(&client, 1, 2), 6);
    CHECK_EQUAL(produce(&other, -1, 3), 6);
    CHECK_EQUAL(list_offset(&other, -1, &offset), 6);
    client_fetch(&other, (struct fetch){.wait_ms = 0, .bytes_min = 1, .bytes_max = 1 << 20, .session_epoch = -1}, &asked, 1, fetched);
    CHECK_EQUAL(fetched->error[0], 0); /* KIP-392: a consumer may read from a follower */
    CHECK_EQUAL(fetched->batch_count, 0);
    asked.offset = 50;
    client_fetch(&other, (struct fetch){.wait_ms = 0, .bytes_min = 1, .bytes_max = 1 << 20, .session_epoch = -1}, &asked, 1, fetched);
    CHECK_EQUAL(fetched->error[0], 0); /* it may be behind */
    wanted.leader = -1, wanted.leader_epoch = 3, wanted.partition_epoch = 3;
    assign(b, wanted);
    CHECK_EQUAL(view(b).role, MQD_ROLE_NONE);
    client_fetch(&other, (struct fetch){.wait_ms = 0, .bytes_min = 1, .bytes_max = 1 << 20, .session_epoch = -1}, &asked, 1, fetched);
    CHECK_EQUAL(fetched->error[0], 6);
    free(fetched);
    client_close(&client), client_close(&other), client_close(&second);
    bench_stop(b);
}

BOTH(a_new_leader_does_not_tell_its_end_at_once)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 1), second = client_open_as(b, 0, 2);
    struct wanted wanted = all_in_sync;
    int64_t offset;
    wanted.in_sync = 1 << 1 | 1 << 2;
    assign(b, wanted);
    CHECK_EQUAL(list_offset(&client, -1, &offset), 0);
    CHECK_EQUAL(offset, 0);
    CHECK_EQUAL(produce(&client, 1, 1), 0);
    wanted.leader_epoch = 2, wanted.partition_epoch = 2;
    assign(b, wanted);
    CHECK_EQUAL(list_offset(&client, -1, &offset), 78);
    CHECK_EQUAL(list_offset(&client, -2, &offset), 0);
    follow(b, &second, (struct ask){.node = 2, .leader_epoch = 2, .last_epoch = -1});
    CHECK_EQUAL(list_offset(&client, -1, &offset), 78);
    follow(b, &second, (struct ask){.node = 2, .leader_epoch = 2, .last_epoch = 1, .offset = 1});
    CHECK_EQUAL(list_offset(&client, -1, &offset), 0);
    CHECK_EQUAL(offset, 1);
    client_close(&client), client_close(&second);
    bench_stop(b);
}

BOTH(a_lost_lease)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0);
    struct fetched *fetched = calloc(1, sizeof *fetched);
    struct asked asked = {0, 0};
    int64_t offset;
    CHECK_EQUAL(produce(&client, -1, 1), 0);
    mqd_control_set_broker(b->control, EPOCH_OF(1), 1, 1); /* CLOCK_BOOTTIME has passed it */
    for (int acks = -1; acks <= 1; acks += 2)
        CHECK_EQUAL(produce(&client, acks, 2), 6);
    CHECK_EQUAL(list_offset(&client, -1, &offset), 6);
    client_fetch(&client, (struct fetch){.wait_ms = LIMIT_MS, .bytes_min = 1, .bytes_max = 1 << 20, .session_epoch = -1}, &asked, 1, fetched);
    CHECK_EQUAL(fetched->batch_count, 1); /* what is committed may be read */
    struct timespec now;
    clock_gettime(CLOCK_BOOTTIME, &now);
    mqd_control_set_broker(b->control, EPOCH_OF(1), 1, (now.tv_sec + 3600) * INT64_C(1000000000));
    CHECK_EQUAL(produce(&client, -1, 3), 0);
    CHECK_EQUAL(list_offset(&client, -1, &offset), 0);
    CHECK_EQUAL(offset, 2);
    free(fetched);
    client_close(&client);
    bench_stop(b);
}

BOTH(a_session_of_a_follower)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0), second = client_open_as(b, 0, 2);
    struct wanted wanted = all_in_sync;
    wanted.in_sync = 1 << 1 | 1 << 2;
    assign(b, wanted);
    follower_send(b, &second, (struct ask){.node = 2, .leader_epoch = 1, .last_epoch = -1, .session_epoch = 0}, 1);
    struct told told = take_told(&second);
    CHECK_EQUAL(told.top_error, 0);
    CHECK_EQUAL(told.partition_count, 1);
    int32_t session = told.session_id;
    CHECK(session);
    follower_send(b, &second, (struct ask){.node = 2, .session_id = session, .session_epoch = 1, .wait_ms = LIMIT_MS}, 0); /* nothing has changed: parked */
    produce_send(&client, -1, 1, 2);
    told = take_told(&second);
    CHECK_EQUAL(told.next_offset, 2);
    follower_send(b, &second, (struct ask){.node = 2, .leader_epoch = 1, .last_epoch = 1, .offset = 2, .session_id = session, .session_epoch = 2, .wait_ms = LIMIT_MS}, 1);
    CHECK_EQUAL(produce_take(&client).error[0], 0);
    told = take_told(&second); /* no records, but a high watermark that it does not know: told soon, not after wait_ms */
    CHECK_EQUAL(told.partition_count, 1);
    CHECK_EQUAL(told.high_watermark, 2);
    CHECK_EQUAL(told.bytes, 0);
    struct client thief = client_open_as(b, 0, 3);
    follower_send(b, &thief, (struct ask){.node = 3, .session_id = session, .session_epoch = 3}, 0);
    CHECK_EQUAL(take_told(&thief).top_error, 70);
    follower_send(b, &second, (struct ask){.node = 2, .session_id = session, .session_epoch = 3, .wait_ms = 1}, 0);
    told = take_told(&second);
    CHECK_EQUAL(told.top_error, 0);
    CHECK_EQUAL(told.partition_count, 0);
    client_close(&client), client_close(&second), client_close(&thief);
    bench_stop(b);
}

BOTH(from_one_replica_to_three_and_back)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0), second = client_open_as(b, 0, 2);
    struct wanted wanted = all_in_sync;
    CHECK_EQUAL(produce(&client, -1, 1), 0);
    wanted.in_sync = 1 << 1, wanted.min_insync = 1;
    assign(b, wanted);
    CHECK_EQUAL(high_watermark(b), 1); /* it stays */
    CHECK_EQUAL(produce(&client, -1, 2), 0);
    struct told told = follow(b, &second, (struct ask){.node = 2, .leader_epoch = 1, .last_epoch = -1});
    CHECK_EQUAL(told.next_offset, 2);
    follow(b, &second, (struct ask){.node = 2, .leader_epoch = 1, .last_epoch = 1, .offset = 2});
    CHECK_EQUAL(proposed(b).member_count, 2);
    wanted.in_sync |= 1 << 2, wanted.min_insync = 2, wanted.partition_epoch = 2;
    assign(b, wanted);
    produce_send(&client, -1, 3, 1);
    follow(b, &second, (struct ask){.node = 2, .leader_epoch = 1, .last_epoch = 1, .offset = 2, .wait_ms = LIMIT_MS});
    CHECK(!readable(&client));
    wanted = (struct wanted){.leader = 1, .leader_epoch = 2, .partition_epoch = 3, .min_insync = 1, .in_sync = 1 << 1, .replica_count = 1};
    assign(b, wanted);
    CHECK_EQUAL(produce_take(&client).error[0], 6); /* of another leader epoch */
    CHECK_EQUAL(produce(&client, -1, 4), 0);
    CHECK_EQUAL(high_watermark(b), 4);
    CHECK_EQUAL(follow(b, &second, (struct ask){.node = 2, .leader_epoch = 2, .last_epoch = 1, .offset = 2}).error, 6);
    client_close(&client), client_close(&second);
    bench_stop(b);
}

/* What the acceptor's coordinators write names the leader epoch in which they have read the partition. */
BOTH(a_coordinator_of_another_leader_epoch_writes_nothing)
{
    struct bench *b = bench_start(backend, NULL);
    struct wanted wanted = all_in_sync;
    wanted.in_sync = 1 << 1, wanted.min_insync = 1, wanted.leader_epoch = 3;
    assign(b, wanted);
    uint32_t from, size_bytes = log_encode(b->arenas[ACCEPTOR], (struct log_batch){.mark = 1});
    int64_t generation = (int64_t)mqd_endpoint_generation(b->control, 0);
    for (int64_t epoch = 2; epoch <= 4; epoch++) {
        bench_say(b, ACCEPTOR, 0, (struct mqd_descriptor){.kind = MQD_LINK_PRODUCE, .flags = MQD_PRODUCE_ACKS_ALL, .slot = SLOT, .token = (uint64_t)epoch, .size_bytes = size_bytes,
                                                          .a = epoch, .c = generation});
        struct mqd_descriptor out = bench_expect(b, ACCEPTOR, MQD_LINK_PRODUCED, &from);
        CHECK_EQUAL(out.token, epoch);
        CHECK_EQUAL(out.error, epoch == 3 ? 0 : 6);
    }
    CHECK_EQUAL(high_watermark(b), 1);
    bench_stop(b);
}

BOTH(a_consumer_is_sent_to_the_replica_in_its_rack)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0), consumer = client_open(b, 1);
    struct fetched *fetched = calloc(1, sizeof *fetched);
    struct broker_of { int32_t node; const char *rack; } brokers[3] = {{1, "a"}, {2, "b"}, {3, "c"}};
    struct mqd_broker_address addresses[3] = {0};
    for (uint32_t i = 0; i < 3; i++) {
        addresses[i] = (struct mqd_broker_address){.node_id = brokers[i].node, .port = 9092, .has_rack = 1, .host = "127.0.0.1"};
        snprintf(addresses[i].rack, sizeof addresses[i].rack, "%s", brokers[i].rack);
    }
    for (uint32_t worker = 0; worker < REACTORS; worker++) {
        CHECK_EQUAL(mqd_reactor_brokers_put(b->reactors[worker], ++b->token, 1, addresses, 3), 0);
        CHECK_EQUAL(bench_done(b, worker, b->token).error, 0);
    }
    struct wanted wanted = all_in_sync;
    assign(b, wanted);
    CHECK_EQUAL(produce(&client, 1, 1), 0);
    struct asked asked = {0, 0};
    const struct { const char *rack; int32_t node; } expected[] = {{"a", -1}, {"b", 2}, {"c", 3}, {"d", -1}, {NULL, -1}};
    for (uint32_t i = 0; i < 5; i++) { /* by a worker that does not own the partition; told at once, though there is nothing to read */
        client_fetch(&consumer, (struct fetch){.wait_ms = expected[i].node < 0 ? 1 : LIMIT_MS, .bytes_min = 1, .bytes_max = 1 << 20, .session_epoch = -1, .rack = expected[i].rack}, &asked, 1,
                     fetched);
        CHECK_EQUAL(fetched->error[0], 0);
        CHECK_EQUAL(fetched->preferred[0], expected[i].node);
    }
    wanted.in_sync = 1 << 1 | 1 << 3, wanted.partition_epoch = 2;
    assign(b, wanted);
    client_fetch(&consumer, (struct fetch){.wait_ms = 1, .bytes_min = 1, .bytes_max = 1 << 20, .session_epoch = -1, .rack = "b"}, &asked, 1, fetched);
    CHECK_EQUAL(fetched->preferred[0], -1); /* not in sync any more */
    free(fetched);
    client_close(&client), client_close(&consumer);
    bench_stop(b);
}
