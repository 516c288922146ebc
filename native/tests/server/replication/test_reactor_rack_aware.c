/* tsan: long */
/* A consumer is sent to the replica in its rack (KIP-392). */
#include "mqd_leading_test.h"

BOTH(a_consumer_is_sent_to_the_replica_in_its_rack)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0), consumer = client_open(b, 1);
    struct fetched *fetched = calloc(1, sizeof *fetched);
    struct broker_of {
        int32_t node;
        const char *rack;
    } brokers[3] = {{1, "a"}, {2, "b"}, {3, "c"}};
    struct mqd_broker_address addresses[3] = {0};
    for (uint32_t i = 0; i < 3; i++) {
        addresses[i] =
            (struct mqd_broker_address){.node_id = brokers[i].node, .port = 9092, .has_rack = 1, .host = "127.0.0.1"};
        snprintf(addresses[i].rack, sizeof addresses[i].rack, "%s", brokers[i].rack);
    }
    for (uint32_t worker = 0; worker < REACTORS; worker++) {
        CHECK_EQUAL(mqd_reactor_brokers_put(b->reactors[worker], ++b->token, 1, addresses, 3), 0);
        CHECK_EQUAL(bench_done(b, worker, b->token).error, 0);
    }
    struct target_replicas target = all_in_sync;
    assign(b, target);
    CHECK_EQUAL(produce(&client, 1, 1), 0);
    struct fetch_position requested = {0, 0};
    const struct {
        const char *rack;
        int32_t node;
    } expected[] = {{"a", -1}, {"b", 2}, {"c", 3}, {"d", -1}, {NULL, -1}};
    /* by a worker that does not own the partition; the response is immediate, although there is
     * nothing to read */
    for (uint32_t i = 0; i < 5; i++) {
        client_fetch(&consumer,
                     (struct fetch){.wait_ms = expected[i].node < 0 ? 1 : LIMIT_MS,
                                    .bytes_min = 1,
                                    .bytes_max = 1 << 20,
                                    .session_epoch = -1,
                                    .rack = expected[i].rack},
                     &requested, 1, fetched);
        CHECK_EQUAL(fetched->error[0], 0);
        CHECK_EQUAL(fetched->preferred[0], expected[i].node);
    }
    target.in_sync = 1 << 1 | 1 << 3, target.partition_epoch = 2;
    assign(b, target);
    client_fetch(&consumer,
                 (struct fetch){.wait_ms = 1, .bytes_min = 1, .bytes_max = 1 << 20, .session_epoch = -1, .rack = "b"},
                 &requested, 1, fetched);
    CHECK_EQUAL(fetched->preferred[0], -1); /* not in sync any more */
    free(fetched);
    client_close(&client), client_close(&consumer);
    bench_stop(b);
}
