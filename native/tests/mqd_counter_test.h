/* Counters of worker 0 of the bench, and waiting for them. */
#ifndef MQD_COUNTER_TEST_H
#define MQD_COUNTER_TEST_H

#include "mqd_reactor_test.h"
#include "shm/api.h"

__attribute__((unused)) static uint64_t counted(struct bench *b, enum mqd_counter counter)
{
    static uint64_t counters[MQD_COUNTER_COUNT], histograms[MQD_HISTOGRAM_COUNT * 128];
    mqd_stats_read(b->control, 0, counters, histograms);
    return counters[counter];
}

__attribute__((unused)) static void wait_for_count(struct bench *b, enum mqd_counter counter, uint64_t at_least)
{
    int64_t end_ns = test_now_ns() + LIMIT_MS * 1000000ll;
    while (counted(b, counter) < at_least && test_now_ns() < end_ns)
        usleep(500);
    CHECK(counted(b, counter) >= at_least);
}

/* Waits until worker 0 has `count` connections. False: it has another number at the time limit. */
__attribute__((unused)) static bool connections_left(struct bench *b, uint32_t count)
{
    int64_t end_ns = test_now_ns() + LIMIT_MS * 1000000ll;
    while (mqd_worker_connection_count(b->control, 0) != count && test_now_ns() < end_ns)
        usleep(1000);
    return mqd_worker_connection_count(b->control, 0) == count;
}

#endif
