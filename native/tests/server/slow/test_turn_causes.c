/* tsan: long */
/* The causes of time spent in turns of the loop: a delay planted for each possible cause is
 * found under that cause. Not planted: a full queue of flushes, and a page that is read from a
 * disk. */
#include "mqd_counter_test.h"
#include "mqd_faults_test.h"
#include "log/partition_state.h"
#include "server/reactor.h"

#include <pthread.h>
#include <sched.h>

enum { DELAY_US = 100000, FOUND_US_LOG2 = 16, TURNS_MAX = 50 };

/* Turns in which `cause` took 2^us_log2 microseconds or more. */
static uint64_t turns(struct bench *b, enum mqd_histogram cause, uint32_t us_log2)
{
    static uint64_t counters[MQD_COUNTER_COUNT], histograms[MQD_HISTOGRAM_COUNT][128];
    uint64_t count = 0;
    mqd_stats_read(b->control, 0, counters, histograms[0]);
    for (uint32_t i = us_log2 * 4; i < 128; i++)
        count += histograms[cause][i];
    return count;
}

/* A turn is counted when it has ended, after its responses were sent. */
static bool found(struct bench *b, enum mqd_histogram cause)
{
    int64_t end_ns = test_now_ns() + LIMIT_MS * 1000000ll;
    while (test_now_ns() < end_ns && !turns(b, cause, FOUND_US_LOG2))
        usleep(1000);
    return turns(b, cause, FOUND_US_LOG2) > 0;
}

static void measured(struct bench *b)
{
    watch(b);
    b->options[0].profile_turns = 1;
}

static void produce(struct client *client, uint64_t mark)
{
    struct frame frame = {0};
    struct part lone = {0, {.mark = mark}};
    put_produce(&frame, (int32_t)mark, 1, LIMIT_MS, &lone, 1);
    CHECK(client_send(client, &frame));
    frame_free(&frame);
    CHECK_OR(client_receive(client) == 1, return);
    CHECK_EQUAL(take_produced(client).error[0], 0);
}

BOTH(a_slow_write_is_found_with_and_without_reserved_space)
{
    struct bench *b = bench_start(backend, measured);
    struct client client = client_open(b, 0);
    faults("write:DELAY:.log:ms=100");
    produce(&client, 1); /* space is reserved after the first */
    CHECK(found(b, MQD_TIME_LOOP_ALLOCATION));
    for (uint64_t mark = 2; mark < TURNS_MAX && !turns(b, MQD_TIME_LOOP_WRITE, FOUND_US_LOG2); mark++)
        produce(&client, mark);
    CHECK(turns(b, MQD_TIME_LOOP_WRITE, FOUND_US_LOG2));
    CHECK_EQUAL(turns(b, MQD_TIME_LOOP_OTHER, FOUND_US_LOG2), 0);
    client_close(&client);
    bench_stop(b);
}

/* Only allocation: no other cause is found. */
static void check_found_as_allocation(struct bench *b)
{
    CHECK(found(b, MQD_TIME_LOOP_ALLOCATION));
    CHECK_EQUAL(turns(b, MQD_TIME_LOOP_OTHER, FOUND_US_LOG2), 0);
    CHECK_EQUAL(turns(b, MQD_TIME_LOOP_WRITE, FOUND_US_LOG2), 0);
}

BOTH(a_slow_roll_on_request_is_found)
{
    struct bench *b = bench_start(backend, measured);
    struct client client = client_open(b, 0);
    produce(&client, 1);
    CHECK_EQUAL(turns(b, MQD_TIME_LOOP_ALLOCATION, FOUND_US_LOG2), 0);
    faults("open:DELAY:.log:ms=100");
    CHECK_EQUAL(mqd_reactor_roll(b->reactors[0], ++b->token, 0), 0);
    CHECK_EQUAL(bench_done(b, 0, b->token).error, 0);
    check_found_as_allocation(b);
    client_close(&client);
    bench_stop(b);
}

/* The space was reserved for a segment that has been sealed in the meantime. */
BOTH(the_release_of_space_reserved_too_late_is_found)
{
    struct bench *b = bench_start(backend, measured);
    struct client client = client_open(b, 0);
    faults("fallocate:DELAY:.log:ms=500;truncate:DELAY:.log:ms=100");
    produce(&client, 1);
    CHECK_EQUAL(mqd_reactor_roll(b->reactors[0], ++b->token, 0), 0);
    CHECK_EQUAL(bench_done(b, 0, b->token).error, 0);
    CHECK_EQUAL(turns(b, MQD_TIME_LOOP_ALLOCATION, FOUND_US_LOG2), 0);
    check_found_as_allocation(b);
    client_close(&client);
    bench_stop(b);
}

BOTH(the_release_of_an_idle_partitions_space_is_found)
{
    struct bench *b = bench_start(backend, measured);
    struct client client = client_open(b, 0);
    produce(&client, 1);
    faults("truncate:DELAY:.log:ms=100");
    mqd_store_release(&b->partitions[0]->last_write_ms, 0); /* long ago */
    check_found_as_allocation(b);
    client_close(&client);
    bench_stop(b);
}

/* The reactor takes this lock to read its commands. It is in a slow write while one is
 * posted. */
static void hold_its_lock(struct bench *b, struct client *client)
{
    struct frame frame = {0};
    struct part lone = {0, {.mark = 1}};
    put_produce(&frame, 1, 1, LIMIT_MS, &lone, 1);
    CHECK(client_send(client, &frame));
    frame_free(&frame);
    usleep(DELAY_US / 2);
    mqd_reactor_add_log_dir(b->reactors[0], ++b->token, 0, log_root);
    pthread_mutex_lock(&b->reactors[0]->mutex);
    bool in_time = mqd_load_acquire(&b->reactors[0]->command_waiting);
    CHECK_OR(client_receive(client) == 1, return); /* the write has ended */
    CHECK_EQUAL(take_produced(client).error[0], 0);
    usleep(in_time ? 2 * DELAY_US : 0);
    pthread_mutex_unlock(&b->reactors[0]->mutex);
    bench_done(b, 0, b->token);
}

BOTH(a_lock_that_another_thread_holds_is_found)
{
    struct bench *b = bench_start(backend, measured);
    struct client client = client_open(b, 0);
    faults("write:DELAY:.log:ms=100");
    for (int i = 0; i < TURNS_MAX && !turns(b, MQD_TIME_LOOP_OTHER, FOUND_US_LOG2); i++)
        hold_its_lock(b, &client);
    CHECK(turns(b, MQD_TIME_LOOP_OTHER, FOUND_US_LOG2));
    client_close(&client);
    bench_stop(b);
}

static void *spin(void *argument)
{
    while (!mqd_load_relaxed((uint32_t *)argument))
        ;
    return NULL;
}

BOTH(a_wait_for_a_cpu_is_found)
{
    struct bench *b = bench_start(backend, measured);
    struct client client = client_open(b, 0);
    struct sched_param none = {0};
    pthread_t spinning;
    uint32_t stop = 0;
    cpu_set_t first, before;
    CHECK_OR(pthread_getaffinity_np(b->reactors[0]->thread, sizeof before, &before) == 0, abort());
    CPU_ZERO(&first);
    for (int cpu = 0; cpu < CPU_SETSIZE && !CPU_COUNT(&first); cpu++)
        if (CPU_ISSET(cpu, &before))
            CPU_SET(cpu, &first);
    CHECK(pthread_create(&spinning, NULL, spin, &stop) == 0);
    CHECK(pthread_setaffinity_np(spinning, sizeof first, &first) == 0);
    CHECK(pthread_setaffinity_np(b->reactors[0]->thread, sizeof first, &first) == 0);
    CHECK(pthread_setschedparam(b->reactors[0]->thread, SCHED_IDLE, &none) == 0); /* the other does not yield to it */
    for (uint64_t mark = 1; mark < TURNS_MAX && !turns(b, MQD_TIME_LOOP_SCHEDULING, 10); mark++)
        produce(&client, mark);
    CHECK(turns(b, MQD_TIME_LOOP_SCHEDULING, 10)); /* a millisecond */
    mqd_store_release(&stop, 1u);
    pthread_join(spinning, NULL);
    client_close(&client);
    bench_stop(b);
}

BOTH(nothing_is_measured_unless_it_is_enabled)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0);
    produce(&client, 1);
    for (enum mqd_histogram cause = MQD_TIME_LOOP_WRITE; cause <= MQD_TIME_LOOP_SCHEDULING; cause++)
        CHECK_EQUAL(turns(b, cause, 0), 0);
    client_close(&client);
    bench_stop(b);
}
