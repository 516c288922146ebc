/* What a worker does once a second. In most of these tests its thread has ended, and the test runs
 * the turns. */
#include "mqd_counter_test.h"
#include "server/reactor.h"

/* A turn with housekeeping. */
static void keep_house(struct mqd_reactor *r)
{
    r->housekeeping_ms = 0;
    mqd_reactor_turn(r, NULL, 0);
}

TEST(housekeeping_reads_no_slot_that_was_never_owned)
{
    struct bench *b = bench_start(MQD_BACKEND_EPOLL, NULL);
    struct mqd_reactor *r = b->reactors[0];
    CHECK_OR(mqd_reactor_stop(r) == 0, abort());
    r->owned[SLOTS_MAX] = (void *)1; /* reading it would be a crash */
    keep_house(r);
    r->owned[SLOTS_MAX] = NULL;
    bench_stop(b);
}
