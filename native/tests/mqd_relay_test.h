/* For test_relay*.c: a local client of worker 0, which is node 2; partitions 1 and 3 of "quick"
 * are led by node 1. That is worker 1, with its own logs (two hosts in one process), or the test
 * itself, with arbitrary responses. */
#ifndef MQD_RELAY_TEST_H
#define MQD_RELAY_TEST_H

#include "mqd_local_test.h"

#include "server/relay/relay.h"

#define LEADER 1 /* node id, and worker */
#define SIZES ((struct local_sizes){2 << 20, 1 << 16, 256})
#define NOT_LEADER 6
#define TIMED_OUT 7

__attribute__((unused)) static struct part one_record(int32_t partition, uint64_t mark, int32_t body_bytes)
{
    return (struct part){partition, {.mark = mark, .body_bytes = body_bytes}};
}

/* The leaders of partitions 1 and 3, as worker 0 knows them. */
__attribute__((unused)) static void place(struct bench *b, int32_t leader, int32_t leader_epoch)
{
    struct mqd_topic_partition places[PARTITIONS];
    for (uint32_t i = 0; i < PARTITIONS; i++)
        places[i] = (struct mqd_topic_partition){.slot = i % 2 ? UINT32_MAX : bench_slots[i],
                                                 .leader = i % 2 ? leader : 2,
                                                 .leader_epoch = leader_epoch,
                                                 .redirect = -1,
                                                 .leader_worker = 1};
    CHECK_EQUAL(mqd_reactor_topic_put_partitions(b->reactors[0], ++b->token, b->topic_id, "quick", places, PARTITIONS),
                0);
    CHECK_EQUAL(bench_done(b, 0, b->token).error, 0);
}

__attribute__((unused)) static struct bench *relay_bench_of(int backend, void (*change)(struct bench *b))
{
    struct mqd_broker_address brokers[2] = {{.node_id = 1, .port = 9092, .host = "one"},
                                            {.node_id = 2, .port = 9092, .host = "two"}};
    struct bench *b = local_bench(backend, change);
    CHECK_OR(mqd_reactor_brokers_put(b->reactors[0], ++b->token, 2, brokers, 2) == 0, abort());
    CHECK_OR(bench_done(b, 0, b->token).error == 0, abort());
    place(b, LEADER, 5);
    return b;
}

__attribute__((unused)) static struct bench *relay_bench(int backend)
{
    return relay_bench_of(backend, NULL);
}

__attribute__((unused)) static struct mqd_relay_options relay_options(uint32_t lane, uint32_t timeout_ms)
{
    return (struct mqd_relay_options){
        .leader_node = LEADER, .leader_worker = 1, .lane = lane, .timeout_ms = timeout_ms};
}

__attribute__((unused)) static uint64_t relay_put(struct bench *b, int fd, uint32_t lane, uint32_t timeout_ms)
{
    struct mqd_relay_options options = relay_options(lane, timeout_ms);
    uint64_t token = ++b->token;
    CHECK_OR(mqd_reactor_relay_put(b->reactors[0], token, fd, &options) == 0, abort());
    CHECK_OR(bench_done(b, 0, token).error == 0, abort());
    return token;
}

/* The next event of worker 0 of this kind. */
__attribute__((unused)) static struct mqd_event relay_event(struct bench *b, uint32_t kind)
{
    struct mqd_event event;
    for (;;) {
        while (mqd_reactor_next_event(b->reactors[0], &event))
            if (event.kind == kind)
                return event;
        struct pollfd wait = {mqd_reactor_event_fd(b->reactors[0]), POLLIN, 0};
        CHECK_OR(poll(&wait, 1, LIMIT_MS) == 1, abort());
    }
}

/* A connection whose other end is the test's: `client_receive` takes the relay's frames. */
__attribute__((unused)) static struct client fake_leader(struct bench *b, uint32_t lane, uint32_t timeout_ms,
                                                         int send_buffer_bytes)
{
    int ends[2];
    struct timeval limit = {LIMIT_MS / 1000, 0};
    CHECK_OR(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0, abort());
    setsockopt(ends[0], SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    if (send_buffer_bytes)
        setsockopt(ends[1], SOL_SOCKET, SO_SNDBUF, &send_buffer_bytes, sizeof send_buffer_bytes);
    relay_put(b, ends[1], lane, timeout_ms);
    return (struct client){.fd = ends[0]};
}

__attribute__((unused)) static void submit(struct local *local, int32_t correlation_id, int acks, struct part part)
{
    struct frame frame = {0};
    put_produce(&frame, correlation_id, acks, LIMIT_MS, &part, 1);
    CHECK_EQUAL(local_send(local, &frame), 1);
    frame_free(&frame);
}

__attribute__((unused)) static struct produced outcome(struct local *local)
{
    CHECK_OR(local_receive(local) == 1, abort());
    return take_produced(&local->client);
}

/* The fake leader's request: v7, one partition. */
struct relayed_request {
    int32_t correlation_id, partition;
    int16_t version, acks;
    uint32_t records_bytes;
    uint64_t mark;
};
__attribute__((unused)) static struct relayed_request relayed(struct client *leader)
{
    struct relayed_request out = {0};
    CHECK_OR(client_receive(leader) == 1, abort());
    CHECK_OR(take(leader, 2) == 0, abort());
    out.version = (int16_t)take(leader, 2);
    CHECK_OR(out.version == 7, abort());
    out.correlation_id = (int32_t)take(leader, 4);
    CHECK_OR(take(leader, 2) == 0xffff, abort());
    CHECK_OR(take(leader, 2) == 0xffff, abort()); /* client id, transactional id */
    out.acks = (int16_t)take(leader, 2);
    CHECK_OR(take(leader, 4) == LIMIT_MS, abort());
    CHECK_OR(take(leader, 4) == 1, abort());
    take_bytes(leader, (uint32_t)take(leader, 2));
    CHECK_OR(take(leader, 4) == 1, abort());
    out.partition = (int32_t)take(leader, 4);
    out.records_bytes = (uint32_t)take(leader, 4);
    CHECK_OR(leader->at + out.records_bytes == leader->reply_bytes, abort());
    return out;
}

struct answer {
    int32_t correlation_id, partition;
    int16_t error;
    int64_t base_offset;
};
__attribute__((unused)) static void put_answer(struct frame *frame, struct answer answer)
{
    uint32_t begin = frame->size_bytes;
    put(frame, 4, 0), put(frame, 4, (uint32_t)answer.correlation_id), put(frame, 4, 1), put_text(frame, "quick"),
        put(frame, 4, 1);
    put(frame, 4, (uint32_t)answer.partition), put(frame, 2, (uint16_t)answer.error),
        put(frame, 8, (uint64_t)answer.base_offset), put(frame, 8, UINT64_MAX), put(frame, 8, 0);
    put(frame, 4, 0);
    frame_end(frame, begin);
}

__attribute__((unused)) static void answer(struct client *leader, struct answer answer_)
{
    struct frame frame = {0};
    put_answer(&frame, answer_);
    CHECK_EQUAL(client_send(leader, &frame), 1);
    frame_free(&frame);
}

#endif
