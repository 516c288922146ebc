/* For test_reactor_leading*.c and test_reactor_metadata.c: a partition of several replicas whose
 * leader is the broker (node 1); the test plays the followers (nodes 2 and 3) and the
 * controller. */
#ifndef MQD_LEADING_TEST_H
#define MQD_LEADING_TEST_H

#include "mqd_reactor_test.h"

#include "replica/rules.h"

#define SLOT 0                        /* partition 0 of "quick", worker 0 */
#define EPOCH_OF(node) (100 + (node)) /* broker epochs */

__attribute__((unused)) static struct part part(int32_t partition, uint64_t mark, int32_t record_count)
{
    return (struct part){partition, {.mark = mark, .record_count = record_count}};
}

/* ---- the controller ---- */

struct target_replicas {
    int32_t leader, leader_epoch, partition_epoch, min_insync;
    uint32_t in_sync; /* bit per node */
    int64_t lag_ms_max;
    int32_t replica_count;
};

__attribute__((unused)) static void assign(struct bench *b, struct target_replicas target)
{
    struct mqd_replica_assignment assignment = {.node_id = 1,
                                                .broker_epoch = EPOCH_OF(1),
                                                .leader = target.leader,
                                                .leader_epoch = target.leader_epoch,
                                                .partition_epoch = target.partition_epoch,
                                                .min_insync = target.min_insync,
                                                .lag_ms_max = target.lag_ms_max ? target.lag_ms_max : LIMIT_MS * 10,
                                                .lag_records_max = MQD_REPLICA_NO_RECORD_BOUND,
                                                .flush_on_ack = b->log_options.flush_on_ack,
                                                .member_count =
                                                    target.replica_count ? (uint32_t)target.replica_count : 3};
    for (int32_t node = 1; node <= (int32_t)assignment.member_count; node++)
        assignment.members[node - 1] = (struct mqd_replica_member){node, target.in_sync >> node & 1, 1, EPOCH_OF(node)};
    CHECK_EQUAL(mqd_reactor_replica_set(b->reactors[0], ++b->token, SLOT, &assignment, 0), 0);
    CHECK_EQUAL(bench_done(b, 0, b->token).error, 0);
}

/* The next proposal of the leader; other events are dropped. */
__attribute__((unused)) static struct mqd_replica_proposal proposed(struct bench *b)
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

__attribute__((unused)) static void answer_proposal(struct bench *b, uint64_t sequence, int32_t leader_epoch, int error)
{
    CHECK_EQUAL(mqd_reactor_in_sync_response(b->reactors[0], ++b->token, SLOT, sequence, leader_epoch, error), 0);
    CHECK_EQUAL(bench_done(b, 0, b->token).error, 0);
}

__attribute__((unused)) static struct mqd_partition_view view(struct bench *b)
{
    struct mqd_partition_view out;
    CHECK_OR(mqd_slot_view(b->control, SLOT, &out) == 0, abort());
    return out;
}

__attribute__((unused)) static int64_t high_watermark(struct bench *b)
{
    return view(b).positions.high_watermark;
}

/* ---- a follower ---- */

struct follower_fetch {
    int32_t node, leader_epoch, last_epoch, wait_ms, session_id, session_epoch;
    int64_t offset, broker_epoch; /* 0 = the node's */
};
struct fetch_response {
    int16_t top_error, error;
    int32_t session_id, diverging_epoch;
    int64_t diverging_end, high_watermark, last_stable, log_start;
    uint32_t partition_count, batch_count, bytes;
    int64_t next_offset;
};

/* Fetch v17. `count`: 0 names no partition. */
__attribute__((unused)) static void put_follower_fetch(struct bench *b, struct frame *frame,
                                                       struct follower_fetch fetch, int count)
{
    uint32_t begin = frame_begin(frame, 1, 17, 5);
    put(frame, 1, 0);
    put(frame, 4, (uint32_t)fetch.wait_ms), put(frame, 4, 1), put(frame, 4, 1 << 20), put(frame, 1, 0),
        put(frame, 4, (uint32_t)fetch.session_id), put(frame, 4, (uint32_t)fetch.session_epoch);
    put(frame, 1, (uint64_t)count + 1);
    if (count) {
        put_bytes(frame, b->topic_id, 16), put(frame, 1, 2);
        put(frame, 4, 0), put(frame, 4, (uint32_t)fetch.leader_epoch), put(frame, 8, (uint64_t)fetch.offset),
            put(frame, 4, (uint32_t)fetch.last_epoch), put(frame, 8, 0), put(frame, 4, 1 << 20);
        put(frame, 1, 0), put(frame, 1, 0);
    }
    put(frame, 1, 1), put(frame, 1, 1);                    /* nothing forgotten, no rack */
    put(frame, 1, 1), put(frame, 1, 1), put(frame, 1, 13); /* one tag: replica_state */
    put(frame, 4, (uint32_t)fetch.node),
        put(frame, 8, (uint64_t)(fetch.broker_epoch ? fetch.broker_epoch : EPOCH_OF(fetch.node))), put(frame, 1, 0);
    frame_end(frame, begin);
}

__attribute__((unused)) static uint32_t take_varint(struct client *client)
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

__attribute__((unused)) static void take_partition_tags(struct client *client, struct fetch_response *out)
{
    for (uint32_t tags = take_varint(client); tags && !client->broken; tags--) {
        uint32_t tag = take_varint(client), size_bytes = take_varint(client), end = client->at + size_bytes;
        if (tag == 0)
            out->diverging_epoch = (int32_t)take(client, 4), out->diverging_end = (int64_t)take(client, 8);
        client->at = end;
    }
}

__attribute__((unused)) static void take_records(struct client *client, struct fetch_response *out)
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

__attribute__((unused)) static struct fetch_response take_fetch_response(struct client *client)
{
    struct fetch_response out = {.diverging_epoch = -1, .diverging_end = -1, .next_offset = -1, .high_watermark = -1};
    CHECK_OR(client_receive(client) == 1, return out);
    take(client, 4), take_varint(client), take(client, 4);
    out.top_error = (int16_t)take(client, 2), out.session_id = (int32_t)take(client, 4);
    for (uint32_t topics = take_varint(client); topics > 1 && !client->broken; topics--) {
        take_bytes(client, 16);
        for (uint32_t count = take_varint(client); count > 1 && !client->broken; count--) {
            out.partition_count++;
            take(client, 4), out.error = (int16_t)take(client, 2), out.high_watermark = (int64_t)take(client, 8),
                             out.last_stable = (int64_t)take(client, 8), out.log_start = (int64_t)take(client, 8);
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

__attribute__((unused)) static void follower_send(struct bench *b, struct client *client, struct follower_fetch fetch,
                                                  int count)
{
    struct frame frame = {0};
    put_follower_fetch(b, &frame, fetch, count);
    CHECK_OR(client_send(client, &frame), abort());
    frame_free(&frame);
}

__attribute__((unused)) static struct fetch_response follow(struct bench *b, struct client *client,
                                                            struct follower_fetch fetch)
{
    if (!fetch.session_epoch)
        fetch.session_epoch = -1;
    follower_send(b, client, fetch, 1);
    return take_fetch_response(client);
}

/* ---- a client ---- */

__attribute__((unused)) static void produce_send(struct client *client, int acks, uint64_t mark, int32_t record_count)
{
    struct frame frame = {0};
    struct part one = part(0, mark, record_count);
    put_produce(&frame, 7, acks, LIMIT_MS, &one, 1);
    CHECK_OR(client_send(client, &frame), abort());
    frame_free(&frame);
}

__attribute__((unused)) static struct produced produce_take(struct client *client)
{
    CHECK_OR(client_receive(client) == 1, abort());
    return take_produced(client);
}

__attribute__((unused)) static int16_t produce(struct client *client, int acks, uint64_t mark)
{
    produce_send(client, acks, mark, 1);
    return produce_take(client).error[0];
}

__attribute__((unused)) static bool readable(struct client *client)
{
    struct pollfd wait = {client->fd, POLLIN, 0};
    return poll(&wait, 1, 0) == 1;
}

/* ListOffsets v5 of partition 0. Returns the error; *offset. */
__attribute__((unused)) static int16_t list_offset(struct client *client, int64_t timestamp, int64_t *offset)
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
__attribute__((unused)) static const struct target_replicas all_in_sync = {
    .leader = 1, .leader_epoch = 1, .partition_epoch = 1, .min_insync = 2, .in_sync = 1 << 1 | 1 << 2 | 1 << 3};

#endif
