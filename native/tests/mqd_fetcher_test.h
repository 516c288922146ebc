/* For test_fetcher*.c: two hosts in one process. Node 1 is worker 0, which leads partitions 0
 * and 2 of "quick" (slots 0 and 2); node 2 is worker 1, which follows them in slots 20 and 22. Or
 * the test itself plays node 1 (a fake leader), with arbitrary responses. */
#ifndef MQD_FETCHER_TEST_H
#define MQD_FETCHER_TEST_H

#include "mqd_reactor_test.h"

#include <linux/sockios.h>
#include <sys/ioctl.h>

#include "log/recovery/truncation.h"
#include "replica/rules.h"
#include "server/replication/fetcher_wire.h"
#include "wire/buffer.h"

#define EPOCH_OF(node) (100 + (node))
#define FOLLOWED(partition) (20u + (uint32_t)(partition))

/* events of worker 1 since the last poll */
struct observed {
    uint32_t ended, truncated, log_start, logged, full, failed;
    int64_t offset;
    int32_t error;
    char text[184];
};

struct two {
    struct bench *b;
    struct mqd_partition *followed[4]; /* by partition index */
    struct observed observed;
    int backend;
};

__attribute__((unused)) static void note(struct two *two, const struct mqd_event *event)
{
    struct observed *observed = &two->observed;
    observed->ended += event->kind == MQD_EVENT_FETCHER_ENDED;
    observed->truncated += event->kind == MQD_EVENT_TRUNCATED;
    observed->log_start += event->kind == MQD_EVENT_LOG_START;
    observed->logged += event->kind == MQD_EVENT_LOG;
    observed->full += event->kind == MQD_EVENT_LOG_DIR_FULL;
    observed->failed += event->kind == MQD_EVENT_LOG_DIR_FAILED;
    if (event->kind == MQD_EVENT_FETCHER_ENDED)
        observed->error = event->error;
    if (event->kind == MQD_EVENT_TRUNCATED || event->kind == MQD_EVENT_LOG_START)
        observed->offset = event->offset;
    if (event->kind != MQD_EVENT_DONE)
        snprintf(observed->text, sizeof observed->text, "%.*s", (int)sizeof observed->text - 1, event->text);
    if (getenv("MQD_TEST_LOG"))
        fprintf(stderr, "worker 1: kind %u slot %u error %d %s\n", event->kind, event->slot, event->error, event->text);
}

/* Like bench_done for worker 1, but its other events are recorded. */
__attribute__((unused)) static struct mqd_event done(struct two *two, uint64_t token)
{
    struct mqd_event event;
    for (;;) {
        while (mqd_reactor_next_event(two->b->reactors[1], &event)) {
            if (event.kind == MQD_EVENT_DONE && event.token == token)
                return event;
            note(two, &event);
        }
        struct pollfd wait = {mqd_reactor_event_fd(two->b->reactors[1]), POLLIN, 0};
        CHECK_OR(poll(&wait, 1, LIMIT_MS) == 1, abort());
    }
}

__attribute__((unused)) static void listen_to(struct two *two)
{
    struct mqd_event event;
    while (mqd_reactor_next_event(two->b->reactors[1], &event))
        note(two, &event);
}

#define UNTIL(condition)                                                                                               \
    do {                                                                                                               \
        int64_t limit_ns_ = test_now_ns() + LIMIT_MS * 1000000ll;                                                      \
        while (!(condition)) {                                                                                         \
            CHECK_OR(test_now_ns() < limit_ns_, fprintf(stderr, "never: %s\n", #condition); return);                   \
            usleep(200);                                                                                               \
            listen_to(two);                                                                                            \
        }                                                                                                              \
    } while (0)

/* ---- assignments ---- */

struct role {
    int32_t leader, leader_epoch, partition_epoch, min_insync;
    uint32_t in_sync; /* bit per node */
    uint32_t leader_worker;
    uint8_t throttled;
};

__attribute__((unused)) static struct mqd_replica_assignment assignment_of(struct two *two, int32_t node,
                                                                           struct role role)
{
    struct mqd_replica_assignment assignment = {.node_id = node,
                                                .broker_epoch = EPOCH_OF(node),
                                                .leader = role.leader,
                                                .leader_epoch = role.leader_epoch,
                                                .partition_epoch = role.partition_epoch,
                                                .min_insync = role.min_insync,
                                                .lag_ms_max = LIMIT_MS * 10,
                                                .lag_records_max = MQD_REPLICA_NO_RECORD_BOUND,
                                                .flush_on_ack = two->b->log_options.flush_on_ack,
                                                .throttled = role.throttled,
                                                .member_count = 2};
    for (int32_t other = 1; other <= 2; other++)
        assignment.members[other - 1] =
            (struct mqd_replica_member){other, role.in_sync >> other & 1, 1, EPOCH_OF(other), 0};
    return assignment;
}

__attribute__((unused)) static void assign_leader(struct two *two, int32_t partition, struct role role)
{
    struct mqd_replica_assignment assignment = assignment_of(two, 1, role);
    CHECK_EQUAL(mqd_reactor_replica_set(two->b->reactors[0], ++two->b->token, (uint32_t)partition, &assignment, 0), 0);
    CHECK_EQUAL(bench_done(two->b, 0, two->b->token).error, 0);
}

__attribute__((unused)) static void assign_follower(struct two *two, int32_t partition, struct role role)
{
    struct mqd_replica_assignment assignment = assignment_of(two, 2, role);
    CHECK_EQUAL(mqd_reactor_replica_set(two->b->reactors[1], ++two->b->token, FOLLOWED(partition), &assignment,
                                        (int32_t)role.leader_worker),
                0);
    CHECK_EQUAL(done(two, two->b->token).error, 0);
}

/* ---- the follower's logs ---- */

__attribute__((unused)) static void follower_path(char path[128], int32_t partition)
{
    snprintf(path, 128, "%s/follower-%d", log_root, partition);
}

__attribute__((unused)) static void follower_open(struct two *two, int32_t partition)
{
    char path[128];
    struct mqd_recovery recovery = log_untrusted();
    uint32_t slot = FOLLOWED(partition);
    follower_path(path, partition);
    recovery.replicated = 1;
    mqd_slot_assign(two->b->control, slot, two->b->topic_id, partition, 1, 0, 0);
    two->followed[partition] = mqd_partition_open(path, &two->b->log_options, 0, NOW, &recovery);
    CHECK_OR(two->followed[partition], fprintf(stderr, "%s\n", mqd_error_message()); abort());
    CHECK_EQUAL(mqd_reactor_partition_open(two->b->reactors[1], ++two->b->token, slot, 0, two->followed[partition]), 0);
    CHECK_EQUAL(done(two, two->b->token).error, 0);
}

__attribute__((unused)) static void follower_close(struct two *two, int32_t partition)
{
    CHECK_EQUAL(mqd_reactor_partition_close(two->b->reactors[1], ++two->b->token, FOLLOWED(partition)), 0);
    struct mqd_event event = done(two, two->b->token);
    CHECK_EQUAL(event.error, 0);
    CHECK(event.partition == two->followed[partition]);
    CHECK_EQUAL(mqd_partition_close(event.partition, 1), 0);
    two->followed[partition] = NULL;
}

__attribute__((unused)) static struct mqd_positions positions_of(struct two *two, uint32_t slot)
{
    struct mqd_partition_view view;
    CHECK_OR(mqd_slot_view(two->b->control, slot, &view) == 0, abort());
    return view.positions;
}

/* ---- the connection ---- */

__attribute__((unused)) static struct mqd_fetcher_options fetcher_options(void)
{
    return (struct mqd_fetcher_options){.leader_node = 1,
                                        .leader_worker = 0,
                                        .lane = MQD_LANE_IN_SYNC,
                                        .node_id = 2,
                                        .wait_ms = 200,
                                        .response_bytes_max = 1 << 20,
                                        .response_bytes_limit = 16 << 20,
                                        .partition_bytes_max = 256 << 10,
                                        .timeout_ms = LIMIT_MS,
                                        .backoff_ms = 20};
}

__attribute__((unused)) static uint64_t fetcher_put(struct two *two, int fd, struct mqd_fetcher_options options)
{
    uint64_t token = ++two->b->token;
    CHECK_OR(mqd_reactor_fetcher_put(two->b->reactors[1], token, fd, &options) == 0, abort());
    struct mqd_event event = done(two, token);
    CHECK_OR(event.error == 0, fprintf(stderr, "%s\n", event.text));
    return token;
}

__attribute__((unused)) static uint64_t connect_to_leader(struct two *two)
{
    struct client client = client_open_as(two->b, 0, 2);
    return fetcher_put(two, client.fd, fetcher_options());
}

static struct two *two_start(int backend, void (*change)(struct bench *b))
{
    struct two *two = calloc(1, sizeof *two);
    two->b = bench_start(backend, change);
    two->backend = backend;
    mqd_control_set_broker(two->b->control, EPOCH_OF(2), 1, INT64_MAX);
    return two;
}

static void two_stop(struct two *two)
{
    for (uint32_t worker = 0; worker < REACTORS; worker++)
        CHECK_OR(mqd_reactor_stop(two->b->reactors[worker]) == 0, abort());
    for (int32_t partition = 0; partition < 4; partition++)
        if (two->followed[partition])
            follower_close(two, partition);
    bench_stop(two->b);
    free(two);
}

#endif
