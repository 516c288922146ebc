/* tsan: long */
/* share.priority over real sockets and files: in a session partitions of a higher priority come
 * first, and a tenth is reserved for the others (server/share/job.c). */
#include "mqd_reactor_test.h"

#include "mqd_reactor_share_test.h"

/* Partition 1 comes before partition 0. */
static struct coordinator *start_ranked(int backend)
{
    struct coordinator *k = start_with(backend, NULL);
    mqd_store_relaxed(&mqd_control_partition(k->b->control, 1)->share_priority, 1);
    return k;
}

/* A session of both partitions, whose states are loaded: one record of each has been
 * delivered. */
static struct share_request open_both(struct coordinator *k, struct client *client)
{
    struct share_request a = {
        .member = "a", .partition = 0, .beside = true, .type = -1, .wait_ms = LIMIT_MS, .strict = 1};
    produce(k, 0, 1);
    produce(k, 1, 1);
    for (int seen = 0; seen < 2 && a.epoch < 10; a.epoch++) {
        seen += fetch(k, client, a).run_count;
        a.beside = false, a.partition = -1;
    }
    return a;
}

static void check_both(const struct answered *answered, int64_t lower, int64_t higher)
{
    int64_t lengths[2] = {0, 0};
    CHECK_EQUAL(answered->error, 0);
    CHECK_EQUAL(answered->run_count, (lower > 0) + (higher > 0));
    for (int i = 0; i < answered->run_count; i++) /* of partition 0 first */
        lengths[lower > 0 ? i : 1] = answered->runs[i].last - answered->runs[i].first + 1;
    CHECK_EQUAL(lengths[0], lower);
    CHECK_EQUAL(lengths[1], higher);
}

BOTH(a_tenth_is_kept_for_a_lower_priority)
{
    struct coordinator *k = start_ranked(backend);
    struct client one = client_open(k->b, 0);
    struct share_request a = open_both(k, &one);
    a.records_max = 20;
    produce(k, 0, 30);
    produce(k, 1, 30);
    struct answered answered = fetch(k, &one, a);
    check_both(&answered, 2, 18);
    a.epoch++;
    answered = fetch(k, &one, a);
    check_both(&answered, 8, 12); /* what the higher one has left, and the lower one for the rest */
    a.epoch++;
    answered = fetch(k, &one, a);
    check_both(&answered, 20, 0);
    client_close(&one);
    stop(k);
}

BOTH(one_request_in_ten_begins_with_the_lowest)
{
    struct coordinator *k = start_ranked(backend);
    struct client one = client_open(k->b, 0);
    struct share_request a = open_both(k, &one);
    a.records_max = 1;
    produce(k, 0, 30);
    produce(k, 1, 30);
    for (int request = 0; request < 20; request++, a.epoch++) {
        struct answered answered = fetch(k, &one, a);
        bool lowest = a.epoch % 10 == 9;
        check_both(&answered, lowest, !lowest);
    }
    client_close(&one);
    stop(k);
}
