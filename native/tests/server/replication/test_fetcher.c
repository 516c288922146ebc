/* tsan */
/* A host that follows another: both reactors are real. */
#include "log/compaction/api.h"
#include "mqd_fetcher_test.h"
#include "shm/api.h"

#include <sys/wait.h>

static struct part part(int32_t partition, uint64_t mark, int32_t record_count)
{
    return (struct part){partition, {.mark = mark, .record_count = record_count}};
}

static const struct role in_step = {
    .leader = 1, .leader_epoch = 1, .partition_epoch = 1, .min_insync = 2, .in_sync = 6};

static void begin_following(struct two *two)
{
    for (int32_t partition = 0; partition <= 2; partition += 2) {
        follower_open(two, partition);
        assign_follower(two, partition, in_step);
        assign_leader(two, partition, in_step);
    }
}

/* Compares both logs of a partition, byte for byte; the leader's may have more. */
static void check_same_files(struct two *two, int32_t partition)
{
    char command[400], path[128];
    follower_path(path, partition);
    snprintf(command, sizeof command, "for f in %s/*.log; do cmp $f %s/quick-%d/$(basename $f) || exit 1; done", path,
             log_root, partition);
    CHECK_EQUAL(system(command), 0);
}

BOTH(records_are_acknowledged_when_the_follower_has_them)
{
    struct two *two = two_start(backend, NULL);
    begin_following(two);
    struct client client = client_open(two->b, 0);
    struct frame frame = {0};
    struct part first = part(0, 1, 3);
    put_produce(&frame, 5, -1, LIMIT_MS, &first, 1);
    CHECK(client_send(&client, &frame));
    usleep(30000);
    CHECK_EQUAL(positions_of(two, 0).high_watermark, 0); /* no follower yet */
    connect_to_leader(two);
    CHECK_EQUAL(client_receive(&client), 1);
    struct produced produced = take_produced(&client);
    CHECK_EQUAL(produced.error[0], 0);
    CHECK_EQUAL(positions_of(two, FOLLOWED(0)).log_end_offset, 3);
    CHECK_EQUAL(positions_of(two, FOLLOWED(0)).durable_offset, 3); /* flush.on.ack */
    UNTIL(positions_of(two, FOLLOWED(0)).high_watermark == 3);
    for (int i = 0; i < 300; i++) {
        struct part parts[2] = {part(0, (uint64_t)i, 1 + i % 4), part(2, (uint64_t)i * 3, 1)};
        parts[i % 2].batch.body_bytes = 64 + i * 50;
        produced = client_produce(&client, -1, parts, 2);
        CHECK_EQUAL(produced.error[0], 0);
        CHECK_EQUAL(produced.error[1], 0);
        CHECK_EQUAL(positions_of(two, FOLLOWED(2)).log_end_offset, i + 1);
    }
    UNTIL(positions_of(two, FOLLOWED(0)).high_watermark == positions_of(two, 0).high_watermark);
    check_same_files(two, 0);
    check_same_files(two, 2);
    CHECK_EQUAL(two->observed.ended, 0);
    frame_free(&frame);
    client_close(&client);
    two_stop(two);
}

static void small_segments(struct bench *b)
{
    b->log_options.segment_bytes = 1000000;
}

static void not_flushed(struct bench *b)
{
    b->log_options.flush_on_ack = 0;
}

/* Heavy load: batches larger than the receive buffer, many small ones, rolls, both with and
 * without flush.on.ack. */
static void much(int backend, void (*change)(struct bench *b))
{
    struct two *two = two_start(backend, change);
    begin_following(two);
    struct client client = client_open(two->b, 0);
    uint64_t random = 5;
    for (int i = 0; i < 400; i++) {
        struct part parts[2] = {part(0, test_random(&random), 1), part(2, test_random(&random), 2)};
        parts[0].batch.body_bytes = i % 100 == 7 ? 900000 : 10 + (int32_t)(test_random(&random) % 3000);
        struct produced produced = client_produce(&client, 1, parts, 2);
        CHECK_EQUAL(produced.error[0], 0);
        if (i == 200)
            connect_to_leader(two);
    }
    UNTIL(positions_of(two, FOLLOWED(0)).log_end_offset == 400 && positions_of(two, FOLLOWED(2)).log_end_offset == 800);
    UNTIL(positions_of(two, FOLLOWED(0)).high_watermark == 400 && positions_of(two, FOLLOWED(2)).high_watermark == 800);
    CHECK_EQUAL(positions_of(two, 0).high_watermark, 400);
    check_same_files(two, 2);
    uint64_t counters[MQD_COUNTER_COUNT], histograms[MQD_HISTOGRAM_COUNT * 128];
    mqd_stats_read(two->b->control, 1, counters, histograms);
    CHECK(counters[MQD_COUNT_REPLICA_BYTES] > 900000 * 4);
    client_close(&client);
    two_stop(two);
}

BOTH(much_is_followed)
{
    much(backend, NULL);
}
BOTH(rolls_are_followed)
{
    much(backend, small_segments);
}
BOTH(without_flushes)
{
    much(backend, not_flushed);
}

/* How often the follower's log was truncated. */
static int64_t hold(struct two *two, int32_t how)
{
    if (mqd_reactor_segments_hold(two->b->reactors[1], ++two->b->token, FOLLOWED(0), how) < 0)
        return -1;
    return done(two, two->b->token).offset;
}

/* A record that only the old leader has is removed when the new one's epoch is known. */
BOTH(records_unknown_to_the_leader_are_truncated)
{
    struct two *two = two_start(backend, NULL);
    struct client client = client_open(two->b, 0);
    struct part parts[1] = {part(0, 1, 5)};
    begin_following(two);
    connect_to_leader(two);
    CHECK_EQUAL(client_produce(&client, -1, parts, 1).error[0], 0); /* both have 0..4 of epoch 1 */
    UNTIL(positions_of(two, FOLLOWED(0)).high_watermark == 5);
    /* Node 2 leads in epoch 2 and takes 3 records that node 1 never learns of. */
    struct role elsewhere = {
        .leader = 2, .leader_epoch = 2, .partition_epoch = 2, .min_insync = 2, .in_sync = 6, .leader_worker = 1};
    assign_leader(two, 0, elsewhere);
    assign_follower(two, 0, elsewhere);
    uint8_t bytes[400];
    CHECK_EQUAL(mqd_reactor_fetcher_remove(two->b->reactors[1], ++two->b->token, 1, 0, 0), 0);
    CHECK_EQUAL(done(two, two->b->token).error, 0);
    follower_close(two, 0);
    char path[128];
    follower_path(path, 0);
    struct mqd_recovery recovery = log_untrusted();
    struct mqd_partition *partition = mqd_partition_open(path, &two->b->log_options, 2, NOW, &recovery);
    bool rolled;
    CHECK_EQUAL(log_stage(partition, bytes, (struct log_batch){.mark = 77, .record_count = 3}, NULL), 0);
    CHECK_EQUAL(mqd_partition_write(partition, NOW, &rolled), 0);
    CHECK_EQUAL(mqd_partition_close(partition, 1), 0);
    follower_open(two, 0);
    CHECK_EQUAL(positions_of(two, FOLLOWED(0)).log_end_offset, 8);
    CHECK_EQUAL(positions_of(two, FOLLOWED(0)).high_watermark, 0); /* as nothing was checkpointed */
    /* Node 1 leads again, in epoch 3, and has other records there. */
    struct role back = {.leader = 1, .leader_epoch = 3, .partition_epoch = 3, .min_insync = 1, .in_sync = 2};
    assign_leader(two, 0, back);
    struct part other = part(0, 99, 1);
    CHECK_EQUAL(client_produce(&client, -1, &other, 1).error[0], 0);
    CHECK_EQUAL(hold(two, 1), 0); /* compaction is putting files into place: the truncation waits */
    assign_follower(two, 0, back);
    connect_to_leader(two);
    for (int round = 0; round < 200; round++) { /* without the hold it is truncated within a few milliseconds */
        usleep(1000);
        listen_to(two);
    }
    CHECK_EQUAL(two->observed.truncated, 0);
    CHECK_EQUAL(positions_of(two, FOLLOWED(0)).log_end_offset, 8);
    CHECK_EQUAL(hold(two, 0), 0);
    UNTIL(two->observed.truncated == 1);
    CHECK_EQUAL(hold(two, -1), 1); /* files made from data read before must not be put into place */
    CHECK_EQUAL(two->observed.offset, 5);
    UNTIL(positions_of(two, FOLLOWED(0)).log_end_offset == 6);
    UNTIL(positions_of(two, FOLLOWED(0)).high_watermark == 6);
    check_same_files(two, 0);
    CHECK_EQUAL(two->observed.ended, 0);
    client_close(&client);
    two_stop(two);
}

/* The leader's log begins after the follower's end. */
BOTH(a_follower_behind_the_log_start_restarts_its_log)
{
    struct two *two = two_start(backend, small_segments);
    struct client client = client_open(two->b, 0);
    begin_following(two);
    struct role alone = {.leader = 1, .leader_epoch = 1, .partition_epoch = 2, .min_insync = 1, .in_sync = 2};
    assign_leader(two, 0, alone);
    for (int i = 0; i < 20; i++) {
        struct part parts[1] = {part(0, (uint64_t)i, 10)};
        parts[0].batch.body_bytes = 30000;
        CHECK_EQUAL(client_produce(&client, -1, parts, 1).error[0], 0);
    }
    CHECK_EQUAL(mqd_reactor_advance_start(two->b->reactors[0], ++two->b->token, 0, 155), 0); /* inside of a batch */
    CHECK_EQUAL(bench_done(two->b, 0, two->b->token).offset, 155);
    assign_follower(two, 0, alone);
    connect_to_leader(two);
    UNTIL(positions_of(two, FOLLOWED(0)).log_end_offset == 200);
    UNTIL(positions_of(two, FOLLOWED(0)).high_watermark == 200);
    CHECK(positions_of(two, FOLLOWED(0)).log_start_offset >= 150);
    UNTIL(two->observed.truncated >= 1);
    CHECK_EQUAL(mqd_reactor_advance_start(two->b->reactors[0], ++two->b->token, 0, 180), 0);
    CHECK_EQUAL(bench_done(two->b, 0, two->b->token).offset, 180);
    UNTIL(two->observed.log_start >= 1); /* the follower's Python learns of it */
    CHECK(two->observed.offset >= 155);
    client_close(&client);
    two_stop(two);
}

/* Other partitions continue while one changes its leader, its epoch, or is closed; and
 * connections end and are reopened. */
BOTH(connections_end_and_come_back)
{
    struct two *two = two_start(backend, NULL);
    struct client client = client_open(two->b, 0);
    begin_following(two);
    struct role role = in_step;
    uint32_t ended = 0;
    for (int round = 0; round < 12; round++) {
        struct client link = client_open_as(two->b, 0, 2);
        int mine = dup(link.fd);
        fetcher_put(two, link.fd, fetcher_options());
        struct part parts[2] = {part(0, (uint64_t)round, 1), part(2, (uint64_t)round, 2)};
        struct produced produced = client_produce(&client, -1, parts, 2);
        CHECK_EQUAL(produced.error[0], 0);
        CHECK_EQUAL(produced.error[1], 0);
        if (round % 3 == 0) { /* a new epoch at both, in either order */
            role.leader_epoch++, role.partition_epoch++;
            if (round % 2)
                assign_leader(two, 2, role);
            assign_follower(two, 2, role);
            assign_follower(two, 0, role);
            assign_leader(two, 0, role);
            if (round % 2 == 0)
                assign_leader(two, 2, role);
        } else if (round % 3 == 1) {
            follower_close(two, 2);
            follower_open(two, 2);
            assign_follower(two, 2, role);
        }
        produced = client_produce(&client, -1, parts, 2);
        CHECK_EQUAL(produced.error[0], 0);
        CHECK_EQUAL(produced.error[1], 0);
        if (round % 2) {
            shutdown(mine, SHUT_RDWR);
            ended++;
            UNTIL(two->observed.ended == ended);
        } /* else it is replaced */
        close(mine);
    }
    CHECK_EQUAL(two->observed.ended, ended);
    check_same_files(two, 0);
    check_same_files(two, 2);
    client_close(&client);
    two_stop(two);
}

static void slow_follower(struct bench *b)
{
    CHECK_EQUAL(mqd_file_watch(NULL, "sync:DELAY:follower-0:ms=150"), 0);
}

/* A follower pauses: the flush must be complete before it reports that it has the records. */
TEST(positions_are_reported_when_flushed)
{
    struct two *two = two_start(MQD_BACKEND_EPOLL, slow_follower);
    struct client client = client_open(two->b, 0);
    begin_following(two);
    connect_to_leader(two);
    struct part parts[1] = {part(0, 1, 1)};
    CHECK_EQUAL(client_produce(&client, -1, parts, 1).error[0], 0);
    for (int i = 0; i < 3; i++) {
        int64_t began_ns = test_now_ns();
        CHECK_EQUAL(client_produce(&client, -1, parts, 1).error[0], 0);
        CHECK((test_now_ns() - began_ns) / 1000000 >= 140);
        CHECK_EQUAL(positions_of(two, FOLLOWED(0)).durable_offset, i + 2);
    }
    client_close(&client);
    two_stop(two);
    CHECK_EQUAL(mqd_file_watch(NULL, NULL), 0);
}

static void slow_follower_in_memory(struct bench *b)
{
    b->log_options.flush_on_ack = 0;
    CHECK_EQUAL(mqd_file_watch(NULL, "sync:DELAY:follower-0:ms=500"), 0);
}

static void set_options(struct two *two, uint32_t worker, uint32_t slot)
{
    CHECK_EQUAL(mqd_reactor_set_log_options(two->b->reactors[worker], ++two->b->token, slot, &two->b->log_options), 0);
    CHECK_EQUAL((worker ? done(two, two->b->token) : bench_done(two->b, 0, two->b->token)).error, 0);
}

/* Its records are being flushed when flush.on.ack is switched on: until the flush completes it
 * does not report its position, then it does. */
BOTH(a_follower_continues_when_flush_on_ack_is_enabled_during_its_flush)
{
    struct two *two = two_start(backend, slow_follower_in_memory);
    struct client client = client_open(two->b, 0);
    begin_following(two);
    connect_to_leader(two);
    struct part parts[2] = {part(0, 1, 1), part(2, 1, 1)};
    struct produced produced = client_produce(&client, -1, parts, 2);
    CHECK_EQUAL(produced.error[0], 0);
    CHECK_EQUAL(produced.error[1], 0);
    two->b->log_options.flush_on_ack = 1;
    set_options(two, 0, 0);
    set_options(two, 1, FOLLOWED(0)); /* begins the flush */
    struct role role = in_step;
    role.partition_epoch++;
    assign_follower(two, 0, role);
    assign_leader(two, 0, role);
    /* the fetcher has sent another request: the first partition left its session, unless its flush
     * is over already */
    CHECK_EQUAL(client_produce(&client, -1, &parts[1], 1).error[0], 0);
    produced = client_produce(&client, -1, parts, 1);
    CHECK_EQUAL(produced.error[0], 0);
    CHECK_EQUAL(positions_of(two, FOLLOWED(0)).durable_offset, 2);
    client_close(&client);
    two_stop(two);
    CHECK_EQUAL(mqd_file_watch(NULL, NULL), 0);
}

/* The leader's proposals since the last poll: how many in sync; 0 = none. */
static uint32_t proposed(struct two *two)
{
    struct mqd_event event;
    uint32_t count = 0;
    while (mqd_reactor_next_event(two->b->reactors[0], &event))
        if (event.proposal) {
            count = event.proposal->member_count;
            mqd_proposal_free(event.proposal);
        }
    return count;
}

static void follower_full(struct two *two, int full)
{
    CHECK_EQUAL(mqd_reactor_set_log_dir_full(two->b->reactors[1], ++two->b->token, 0, full), 0);
    CHECK_EQUAL(done(two, two->b->token).error, 0);
}

/* Nothing is written to either partition: from the leader's view, a follower that fetches at the
 * end keeps up. */
BOTH(a_follower_on_a_full_disk_does_not_keep_up)
{
    struct two *two = two_start(backend, NULL);
    struct role role = {.leader = 1, .leader_epoch = 1, .partition_epoch = 1, .min_insync = 1, .in_sync = 2};
    follower_open(two, 0);
    assign_follower(two, 0, role);
    assign_leader(two, 0, role);
    follower_full(two, 1);
    connect_to_leader(two);
    usleep(200000); /* without the disk's state it is proposed immediately */
    CHECK_EQUAL(proposed(two), 0);
    follower_full(two, 0);
    UNTIL(proposed(two) == 2);
    role.in_sync = 6, role.partition_epoch = 2;
    assign_follower(two, 0, role);
    assign_leader(two, 0, role);
    follower_full(two, 1);
    role.in_sync = 2, role.partition_epoch = 3,
    role.leader_epoch = 2; /* its host has reported the full disk to the controller */
    assign_leader(two, 0, role);
    assign_follower(two, 0, role);
    usleep(500000); /* no request waits this long at the leader */
    CHECK_EQUAL(proposed(two), 0);
    follower_full(two, 0);
    UNTIL(proposed(two) == 2);
    two_stop(two);
}

/* The throttled lane is bounded; those of in-sync replicas, and of others that catch up, are
 * not. */
BOTH(only_throttled_replicas_are_slow)
{
    struct two *two = two_start(backend, NULL);
    struct client client = client_open(two->b, 0);
    struct role role = {.leader = 1, .leader_epoch = 1, .partition_epoch = 1, .min_insync = 1, .in_sync = 2};
    for (int32_t partition = 0; partition <= 2; partition += 2) {
        follower_open(two, partition);
        assign_leader(two, partition, role);
        struct part parts[1] = {part(partition, 4, 1)};
        parts[0].batch.body_bytes = 20000;
        for (int i = 0; i < 40; i++)
            CHECK_EQUAL(client_produce(&client, -1, parts, 1).error[0], 0);
    }
    struct mqd_fetcher_options options = fetcher_options();
    options.lane = MQD_LANE_THROTTLED;
    options.bytes_per_second_max = 1000000;
    struct client slow = client_open_as(two->b, 0, 2), fast = client_open_as(two->b, 0, 2);
    fetcher_put(two, slow.fd, options);
    fetcher_put(two, fast.fd, fetcher_options());
    role.in_sync = 6, role.partition_epoch = 2; /* partition 2 is in sync, 0 is not */
    int64_t began_ns = test_now_ns();
    assign_follower(two, 2, role);
    role.in_sync = 2, role.throttled = 1;
    assign_follower(two, 0, role);
    UNTIL(positions_of(two, FOLLOWED(2)).log_end_offset == 40);
    CHECK((test_now_ns() - began_ns) / 1000000 < 400);
    UNTIL(positions_of(two, FOLLOWED(0)).log_end_offset == 40);
    int64_t took_ms = (test_now_ns() - began_ns) / 1000000;
    /* 800 kB at 1 MB/s, less what may burst */
    CHECK_OR(took_ms > 400, fprintf(stderr, "took %lld ms\n", (long long)took_ms));
    role.in_sync = 6, role.partition_epoch = 3; /* it has caught up: the other lane has it */
    assign_follower(two, 0, role);
    assign_leader(two, 0, role);
    CHECK_EQUAL(mqd_reactor_fetcher_remove(two->b->reactors[1], ++two->b->token, 1, 0, MQD_LANE_THROTTLED), 0);
    CHECK_EQUAL(done(two, two->b->token).error, 0);
    struct part parts[1] = {part(0, 4, 1)};
    CHECK_EQUAL(client_produce(&client, -1, parts, 1).error[0], 0);
    UNTIL(positions_of(two, FOLLOWED(0)).log_end_offset == 41);
    client_close(&client);
    two_stop(two);
}

/* Two replicas catch up in parallel; the bound is for the throttled one, until it is no longer
 * throttled. */
BOTH(an_unthrottled_catch_up_has_no_rate_limit)
{
    struct two *two = two_start(backend, NULL);
    struct client client = client_open(two->b, 0);
    struct role role = {.leader = 1, .leader_epoch = 1, .partition_epoch = 1, .min_insync = 1, .in_sync = 2};
    for (int32_t partition = 0; partition <= 2; partition += 2) {
        follower_open(two, partition);
        assign_leader(two, partition, role);
        struct part parts[1] = {part(partition, 4, 1)};
        parts[0].batch.body_bytes = 20000;
        for (int i = 0; i < 40; i++)
            CHECK_EQUAL(client_produce(&client, -1, parts, 1).error[0], 0);
    }
    struct mqd_fetcher_options options = fetcher_options();
    struct client slow = client_open_as(two->b, 0, 2), fast = client_open_as(two->b, 0, 2);
    options.lane = MQD_LANE_THROTTLED, options.bytes_per_second_max = 1000;
    fetcher_put(two, slow.fd, options);
    options.lane = MQD_LANE_CATCH_UP;
    fetcher_put(two, fast.fd, options);
    assign_follower(two, 2, role);
    role.throttled = 1;
    assign_follower(two, 0, role);
    UNTIL(positions_of(two, FOLLOWED(2)).log_end_offset == 40);
    CHECK(positions_of(two, FOLLOWED(0)).log_end_offset < 40);
    role.throttled = 0;
    assign_follower(two, 0, role);
    UNTIL(positions_of(two, FOLLOWED(0)).log_end_offset == 40);
    client_close(&client);
    two_stop(two);
}

static void set_rate(struct two *two, int64_t bytes_per_second_max)
{
    CHECK_EQUAL(mqd_reactor_set_fetcher_rate(two->b->reactors[1], ++two->b->token, bytes_per_second_max), 0);
    CHECK_EQUAL(done(two, two->b->token).error, 0);
}

/* Each batch is owed for longer than the test waits. */
BOTH(raising_or_removing_the_rate_ends_the_wait)
{
    struct two *two = two_start(backend, NULL);
    struct client client = client_open(two->b, 0), link = client_open_as(two->b, 0, 2);
    struct role role = {
        .leader = 1, .leader_epoch = 1, .partition_epoch = 1, .min_insync = 1, .in_sync = 2, .throttled = 1};
    follower_open(two, 0);
    assign_follower(two, 0, role);
    assign_leader(two, 0, role);
    struct part parts[1] = {part(0, 1, 1)};
    parts[0].batch.body_bytes = 200000;
    for (int i = 0; i < 3; i++)
        CHECK_EQUAL(client_produce(&client, -1, parts, 1).error[0], 0);
    struct mqd_fetcher_options options = fetcher_options();
    options.lane = MQD_LANE_THROTTLED;
    options.bytes_per_second_max = 1000;
    fetcher_put(two, link.fd, options);
    UNTIL(positions_of(two, FOLLOWED(0)).log_end_offset == 1);
    set_rate(two, 2000);
    UNTIL(positions_of(two, FOLLOWED(0)).log_end_offset == 2);
    set_rate(two, 0);
    UNTIL(positions_of(two, FOLLOWED(0)).log_end_offset == 3);
    client_close(&client);
    two_stop(two);
}
