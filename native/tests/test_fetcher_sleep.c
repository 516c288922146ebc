/* When a reactor with fetchers has to be awake. */
#include "mqd_test.h"

#include "../mqd_fetcher_state.h"

/* While the broker ends, what comes from leaders is not read any more: it is no reason not to sleep. */
TEST(a_fetcher_with_bytes_keeps_no_ending_reactor_awake)
{
    struct mqd_reactor *r = calloc(1, sizeof *r);
    struct mqd_fetcher fetcher = {.readable = 1};
    r->fetchers = calloc(1, sizeof *r->fetchers);
    r->fetchers->fetcher[r->fetchers->count++] = &fetcher;
    mqd_list_init(&fetcher.put_off);
    CHECK_EQUAL(mqd_fetchers_next_ms(r), 0);
    r->stop = true;
    CHECK_EQUAL(mqd_fetchers_next_ms(r), -1);
    free(r->fetchers);
    free(r);
}
