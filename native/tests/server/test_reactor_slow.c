/* The slow-request log: reports of requests that a slow disk, another worker, the acceptor or an
 * earlier request delays. */
#include "mqd_faults_test.h"

#define SLOW_MS 100
#define DELAY "sync:DELAY:.log:ms=250"

static void watch_slow(struct bench *b)
{
    watch(b);
    for (uint32_t worker = 0; worker < REACTORS; worker++)
        b->options[worker].slow_ms = SLOW_MS;
}

static void send_produce(struct client *client, int32_t partition, uint64_t mark, int acks)
{
    struct frame frame = {0};
    struct part lone = {partition, {.mark = mark}};
    put_produce(&frame, (int32_t)mark, acks, LIMIT_MS, &lone, 1);
    CHECK(client_send(client, &frame));
    frame_free(&frame);
}

static void answered(struct client *client)
{
    CHECK_OR(client_receive(client) == 1, return);
    CHECK_EQUAL(take_produced(client).error[0], 0);
}

/* The next report, emitted before the response was sent or in the same turn. `kind` NONE: there is
 * none. */
static struct mqd_event report(struct bench *b, uint32_t worker)
{
    struct mqd_event event;
    while (mqd_reactor_next_event(b->reactors[worker], &event))
        if (event.kind == MQD_EVENT_SLOW)
            return event;
    return (struct mqd_event){.kind = MQD_EVENT_NONE};
}

/* All other parts are short; the parts add up. */
static void check_report(const struct mqd_event *event, enum mqd_spent part, uint32_t slot)
{
    uint64_t sum = 0;
    CHECK_EQUAL(event->kind, MQD_EVENT_SLOW);
    CHECK_EQUAL(event->slot, slot);
    for (int i = MQD_SPENT_QUEUE; i < MQD_SPENT_THROTTLE; i++)
        sum += event->spent_us[i];
    CHECK(event->total_us >= SLOW_MS * 1000 && sum <= event->total_us && sum + 100 > event->total_us);
    CHECK(event->spent_us[part] > event->total_us - event->total_us / 4);
}

TEST(a_slow_disk_is_named)
{
    struct bench *b = bench_start(MQD_BACKEND_EPOLL, watch_slow);
    struct client client = client_open(b, 0);
    send_produce(&client, 0, 1, -1);
    answered(&client);
    CHECK_EQUAL(report(b, 0).kind, MQD_EVENT_NONE);
    faults(DELAY);
    send_produce(&client, 0, 2, -1);
    answered(&client);
    struct mqd_event event = report(b, 0);
    check_report(&event, MQD_SPENT_DISK, 0);
    CHECK(event.api_key == 0 && event.count == 0 && event.connection > 0);
    client_close(&client);
    bench_stop(b);
}

TEST(a_slow_disk_of_another_worker_is_named)
{
    struct bench *b = bench_start(MQD_BACKEND_EPOLL, watch_slow);
    struct client client = client_open(b, 1);
    faults(DELAY);
    send_produce(&client, 0, 1, -1);
    answered(&client);
    struct mqd_event event = report(b, 1);
    check_report(&event, MQD_SPENT_OWNER, 0);
    CHECK_EQUAL(report(b, 0).kind, MQD_EVENT_NONE); /* the worker that answers reports it */
    client_close(&client);
    bench_stop(b);
}

TEST(a_request_after_a_slow_one_is_not_a_slow_disk)
{
    struct bench *b = bench_start(MQD_BACKEND_EPOLL, watch_slow);
    struct client client = client_open(b, 0);
    faults(DELAY);
    send_produce(&client, 0, 1, -1);
    send_produce(&client, 2, 2, 1);
    answered(&client);
    answered(&client);
    struct mqd_event first = report(b, 0), second = report(b, 0);
    check_report(&first, MQD_SPENT_DISK, 0);
    check_report(&second, MQD_SPENT_TURN, 2);
    client_close(&client);
    bench_stop(b);
}

TEST(a_fetch_that_waits_as_long_as_it_asked_is_not_slow)
{
    struct bench *b = bench_start(MQD_BACKEND_EPOLL, watch_slow);
    struct client client = client_open(b, 0);
    struct fetched *fetched = calloc(1, sizeof *fetched);
    struct fetch_position requested = {0, 0};
    client_fetch(&client,
                 (struct fetch){.wait_ms = 3 * SLOW_MS, .bytes_min = 1, .bytes_max = 1 << 20, .session_epoch = -1},
                 &requested, 1, fetched);
    CHECK_EQUAL(fetched->batch_count, 0);
    CHECK_EQUAL(report(b, 0).kind, MQD_EVENT_NONE);
    free(fetched);
    client_close(&client);
    bench_stop(b);
}

TEST(a_fetch_of_unknown_partitions_is_timed_too)
{
    struct bench *b = bench_start(MQD_BACKEND_EPOLL, watch_slow);
    struct client client = client_open(b, 0);
    struct fetched *fetched = calloc(1, sizeof *fetched);
    struct fetch_position requested[2] = {{99, 0}, {-1, 0}};
    struct fetch fetch = {.bytes_max = 1 << 20, .session_epoch = -1};
    client_fetch(&client, fetch, requested, 2, fetched);
    CHECK(fetched->error[0] == 3 && fetched->error[1] == 3);
    fetch.topic = "unknown";
    client_fetch(&client, fetch, requested, 1, fetched);
    CHECK_EQUAL(fetched->error[0], 3);
    free(fetched);
    client_close(&client);
    bench_stop(b);
}

TEST(many_are_counted_and_not_all_reported)
{
    struct bench *b = bench_start(MQD_BACKEND_EPOLL, watch_slow);
    struct client clients[32];
    faults(DELAY);
    for (int i = 0; i < 32; i++) {
        clients[i] = client_open(b, 0);
        send_produce(&clients[i], 0, (uint64_t)i + 1, -1);
    }
    for (int i = 0; i < 32; i++)
        answered(&clients[i]);
    uint32_t reported = 0, left_out = 0;
    struct mqd_event event;
    while ((event = report(b, 0)).kind == MQD_EVENT_SLOW)
        reported++, left_out += event.count;
    CHECK(reported >= 20 && reported + left_out <= 32);
    usleep(1100000); /* another second of the limit */
    send_produce(&clients[0], 0, 100, -1);
    answered(&clients[0]);
    while ((event = report(b, 0)).kind == MQD_EVENT_SLOW)
        reported++, left_out += event.count;
    CHECK_EQUAL(reported + left_out, 33);
    for (int i = 0; i < 32; i++)
        client_close(&clients[i]);
    bench_stop(b);
}

TEST(nothing_is_reported_while_it_is_off)
{
    struct bench *b = bench_start(MQD_BACKEND_EPOLL, watch);
    struct client client = client_open(b, 0);
    faults(DELAY);
    send_produce(&client, 0, 1, -1);
    answered(&client);
    CHECK_EQUAL(report(b, 0).kind, MQD_EVENT_NONE);
    client_close(&client);
    bench_stop(b);
}
