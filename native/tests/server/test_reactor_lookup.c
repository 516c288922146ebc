/* tsan: long */
/* ListOffsets right after an acknowledgement that did not wait for the flush: what it waits for,
 * and for how long. */
#include "mqd_counter_test.h"
#include "mqd_faults_test.h"

#define LATEST UINT64_MAX
#define EARLIEST (UINT64_MAX - 1)

/* ListOffsets v2 of topic "quick". */
static void send_lookup(struct client *client, uint64_t timestamp, const int32_t *partitions, uint32_t count)
{
    struct frame frame = {0};
    uint32_t begin = frame_begin(&frame, 2, 2, 7);
    put(&frame, 4, 0xffffffff), put(&frame, 1, 0), put(&frame, 4, 1), put_text(&frame, "quick"), put(&frame, 4, count);
    for (uint32_t i = 0; i < count; i++)
        put(&frame, 4, (uint32_t)partitions[i]), put(&frame, 8, timestamp);
    frame_end(&frame, begin);
    CHECK(client_send(client, &frame));
    frame_free(&frame);
}

/* The offset found for the last of the partitions; negative: minus the error. */
static int64_t found(struct client *client)
{
    int64_t offset = -1000;
    CHECK_OR(client_receive(client) == 1, return -1000);
    CHECK_OR(take(client, 4) == 7, return -1000);
    take(client, 4);
    CHECK_OR(take(client, 4) == 1, return -1000);
    take_bytes(client, (uint32_t)take(client, 2));
    for (uint32_t count = (uint32_t)take(client, 4); count; count--) {
        take(client, 4);
        int16_t error = (int16_t)take(client, 2);
        take(client, 8);
        offset = (int64_t)take(client, 8);
        if (error)
            offset = -error;
    }
    return offset;
}

static int64_t lookup(struct client *client, uint64_t timestamp, int32_t partition)
{
    send_lookup(client, timestamp, &partition, 1);
    return found(client);
}

static void produce(struct client *client, int32_t partition, uint64_t mark)
{
    struct part lone = {partition, {.mark = mark}};
    CHECK_EQUAL(client_produce(client, 1, &lone, 1).error[0], 0);
}

static int64_t elapsed_ms(int64_t began_ns)
{
    return (test_now_ns() - began_ns) / 1000000;
}

/* Partition 0 is worker 0's, partition 1 worker 1's: the lookup arrives at the owner and at
 * another worker. */
BOTH(acknowledged_offsets_are_found)
{
    struct bench *b = bench_start(backend, watch);
    struct client writer = client_open(b, 0), lookers[2] = {client_open(b, 0), client_open(b, 1)};
    faults("sync:DELAY:.log:ms=20");
    for (int64_t i = 0; i < 30; i++) {
        int32_t partition = (int32_t)(i % 2);
        produce(&writer, partition, (uint64_t)i + 1);
        CHECK_EQUAL(lookup(&lookers[i / 2 % 2], LATEST, partition), i / 2 + 1);
    }
    CHECK_EQUAL(lookup(&lookers[0], EARLIEST, 0), 0);
    faults("");
    for (int i = 0; i < 2; i++)
        client_close(&lookers[i]);
    client_close(&writer);
    bench_stop(b);
}

/* Flushes of several partitions run in parallel: the response takes as long as the slowest, not
 * their sum. */
BOTH(flushes_of_many_partitions_are_waited_for_together)
{
    struct bench *b = bench_start(backend, watch);
    struct client writer = client_open(b, 0), looker = client_open(b, 1), other = client_open(b, 1);
    int32_t all[] = {0, 1, 2, 3};
    faults("sync:DELAY:.log:ms=300");
    int64_t began_ns = test_now_ns();
    for (int32_t i = 0; i < 4; i++)
        produce(&writer, i, (uint64_t)i + 1);
    send_lookup(&looker, LATEST, all, 4);
    CHECK_EQUAL(lookup(&other, EARLIEST, 0), 0); /* no other request waits */
    CHECK(elapsed_ms(began_ns) < 250);
    CHECK_EQUAL(found(&looker), 1);
    CHECK(elapsed_ms(began_ns) >= 250);
    CHECK(elapsed_ms(began_ns) < 1000);
    faults("");
    client_close(&looker);
    client_close(&other);
    client_close(&writer);
    bench_stop(b);
}

/* A disk that hangs: the known offset, after two seconds. And clients that disconnect
 * meanwhile. */
BOTH(a_disk_that_hangs_is_not_waited_for_long)
{
    struct bench *b = bench_start(backend, watch);
    struct client writer = client_open(b, 0), looker = client_open(b, 1), leaving = client_open(b, 0);
    produce(&writer, 0, 1);
    CHECK_EQUAL(lookup(&looker, LATEST, 0), 1);
    faults("sync:DELAY:.log:ms=4000");
    int64_t began_ns = test_now_ns();
    produce(&writer, 0, 2);
    send_lookup(&leaving, LATEST, (int32_t[]){0}, 1);
    CHECK_EQUAL(lookup(&looker, LATEST, 0), 1);
    CHECK(elapsed_ms(began_ns) >= 1900);
    CHECK(elapsed_ms(began_ns) < 3500);
    client_close(&leaving);
    faults("");
    client_close(&looker);
    client_close(&writer);
    bench_stop(b);
}

BOTH(a_failed_flush_ends_the_wait)
{
    struct bench *b = bench_start(backend, watch);
    struct client writer = client_open(b, 0), looker = client_open(b, 1);
    faults("sync:DELAY:.log:ms=100\nsync:EIO:.log");
    int64_t began_ns = test_now_ns();
    produce(&writer, 0, 1);
    CHECK_EQUAL(lookup(&looker, LATEST, 0), -6);
    CHECK(elapsed_ms(began_ns) < 1900);
    faults("");
    client_close(&looker);
    client_close(&writer);
    CHECK_EQUAL(mqd_reactor_partition_close(b->reactors[0], ++b->token, 0), 0);
    struct mqd_event event = bench_done(b, 0, b->token);
    CHECK_EQUAL(mqd_partition_close(event.partition, 1), -1);
    b->partitions[0] = NULL;
    CHECK_EQUAL(mqd_reactor_partition_close(b->reactors[0], ++b->token, 2), 0);
    event = bench_done(b, 0, b->token);
    CHECK_EQUAL(mqd_partition_close(event.partition, 1), -1);
    b->partitions[2] = NULL;
    bench_stop(b);
}

static void lazily(struct bench *b)
{
    b->log_options.flush_on_ack = 0;
    watch(b);
}

BOTH(without_flush_on_ack_nothing_waits)
{
    struct bench *b = bench_start(backend, lazily);
    struct client writer = client_open(b, 0), looker = client_open(b, 1);
    faults("sync:DELAY:.log:ms=1000");
    int64_t began_ns = test_now_ns();
    produce(&writer, 0, 1);
    CHECK_EQUAL(lookup(&looker, LATEST, 0), 1);
    CHECK(elapsed_ms(began_ns) < 900);
    faults("");
    client_close(&looker);
    client_close(&writer);
    bench_stop(b);
}
