/* tsan: long */
/* Fetches and ListOffsets over real sockets and files, with both I/O backends. */
#include "mqd_reactor_test.h"

static struct part part(int32_t partition, uint64_t mark, int32_t body_bytes)
{
    return (struct part){partition, {.mark = mark, .body_bytes = body_bytes}};
}

/* As a client sends that closes its session; it waits for the response. */
BOTH(a_fetch_without_partitions_does_not_wait)
{
    struct bench *b = bench_start(backend, NULL);
    struct client reader = client_open(b, 0);
    struct fetched *fetched = calloc(1, sizeof *fetched);
    struct fetch_position none = {0};
    fetched->partition_count = -1;
    client_fetch(&reader, (struct fetch){.wait_ms = 3600000, .bytes_min = 1, .session_epoch = -1}, &none, 0, fetched);
    CHECK_EQUAL(fetched->partition_count, 0);
    client_close(&reader);
    free(fetched);
    bench_stop(b);
}

BOTH(a_parked_fetch_wakes_wherever_it_waits)
{
    struct bench *b = bench_start(backend, NULL);
    struct client readers[2] = {client_open(b, 0), client_open(b, 1)}, writer = client_open(b, 0);
    struct fetched *fetched = calloc(1, sizeof *fetched);
    for (int64_t round = 0; round < 200; round++) {
        struct fetch_position requested = {0, round};
        struct frame frame = {0};
        put_fetch(&frame,
                  (struct fetch){.correlation_id = (int32_t)round,
                                 .wait_ms = LIMIT_MS * 2,
                                 .bytes_min = 1,
                                 .bytes_max = 1 << 20,
                                 .session_epoch = -1},
                  &requested, 1);
        CHECK(client_send(&readers[0], &frame) && client_send(&readers[1], &frame));
        frame_free(&frame);
        struct part lone = part(0, (uint64_t)round, 64);
        CHECK_EQUAL(client_produce(&writer, round % 2 ? -1 : 1, &lone, 1).error[0], 0);
        for (int i = 0; i < 2; i++) {
            CHECK_EQUAL(client_receive(&readers[i]), 1);
            take_fetched(&readers[i], fetched);
            CHECK_EQUAL(fetched->batch_count, 1);
            CHECK_EQUAL(fetched->batches[0].mark, (uint64_t)round);
        }
    }
    free(fetched);
    client_close(&readers[0]);
    client_close(&readers[1]);
    client_close(&writer);
    bench_stop(b);
}

BOTH(sessions)
{
    struct bench *b = bench_start(backend, NULL);
    struct client reader = client_open(b, 1), writer = client_open(b, 0);
    struct fetched *fetched = calloc(1, sizeof *fetched);
    struct fetch_position requested[4] = {{0, 0}, {1, 0}, {2, 0}, {3, 0}};
    struct fetch fetch = {.wait_ms = 0, .bytes_min = 0, .bytes_max = 1 << 20};
    client_fetch(&reader, fetch, requested, 4, fetched);
    CHECK_EQUAL(fetched->partition_count, 4);
    CHECK(fetched->session_id != 0);
    fetch.session_id = fetched->session_id, fetch.session_epoch = 1;
    client_fetch(&reader, fetch, NULL, 0, fetched);
    CHECK_EQUAL(fetched->partition_count, 0); /* nothing changed */
    for (uint64_t round = 0; round < 50; round++) {
        struct part lone = part((int32_t)(round % 4), round, 64);
        CHECK_EQUAL(client_produce(&writer, 1, &lone, 1).error[0], 0);
        fetch.session_epoch++, fetch.wait_ms = LIMIT_MS, fetch.bytes_min = 1;
        client_fetch(&reader, fetch, requested, 0, fetched);
        CHECK_EQUAL(fetched->partition_count, 1);
        CHECK_EQUAL(fetched->partition[0], (int)(round % 4));
        CHECK_EQUAL(fetched->batch_count, 1);
        CHECK_EQUAL(fetched->batches[0].mark, round);
        requested[round % 4].offset++;
        fetch.session_epoch++, fetch.wait_ms = 0, fetch.bytes_min = 0;
        client_fetch(&reader, fetch, &requested[round % 4], 1, fetched);
        CHECK_EQUAL(fetched->batch_count, 0);
    }
    fetch.session_epoch++, fetch.forget = 1; /* partition 0 */
    client_fetch(&reader, fetch, NULL, 0, fetched);
    struct part lone = part(0, 1000, 64);
    CHECK_EQUAL(client_produce(&writer, -1, &lone, 1).error[0], 0);
    fetch.session_epoch++, fetch.forget = 0;
    client_fetch(&reader, fetch, NULL, 0, fetched);
    CHECK_EQUAL(fetched->partition_count, 0);
    fetch.session_epoch += 5;
    client_fetch(&reader, fetch, NULL, 0, fetched);
    CHECK_EQUAL(fetched->top_error, 71);
    fetch.session_id ^= 1;
    client_fetch(&reader, fetch, NULL, 0, fetched);
    CHECK_EQUAL(fetched->top_error, 70);
    free(fetched);
    client_close(&reader);
    client_close(&writer);
    bench_stop(b);
}

/* The topic is deleted while fetches wait on it, and recreated with its name, another id and
 * other slots. */
BOTH(a_topic_is_deleted_and_created_while_fetches_wait)
{
    struct bench *b = bench_start(backend, NULL);
    struct client reader = client_open(b, 1), session = client_open(b, 1), writer = client_open(b, 0);
    struct fetched *fetched = calloc(1, sizeof *fetched);
    struct fetch_position requested = {0, 0};
    struct frame frame = {0}, more = {0};
    uint8_t id[16];
    memset(id, 9, 16);
    client_fetch(&session, (struct fetch){.bytes_max = 1 << 20}, &requested, 1, fetched);
    struct fetch fetch = {.wait_ms = LIMIT_MS * 2,
                          .bytes_min = 1,
                          .bytes_max = 1 << 20,
                          .session_id = fetched->session_id,
                          .session_epoch = 1};
    put_fetch(&frame,
              (struct fetch){.wait_ms = LIMIT_MS * 2, .bytes_min = 1, .bytes_max = 1 << 20, .session_epoch = -1},
              &requested, 1);
    put_fetch(&more, fetch, NULL, 0);
    for (int replaced = 0; replaced < 2; replaced++) {
        CHECK(client_send(&reader, &frame));
        if (!replaced)
            CHECK(client_send(&session, &more));
        while (mqd_load_acquire(&mqd_control_partition(b->control, 0)->waiters) == 0)
            usleep(1000); /* parked */
        if (replaced) {   /* by a topic of the same name; then its partition 0 moves to another slot and worker */
            uint32_t slots[4] = {5, 1, 2, 3};
            id[0] = 10;
            bench_topic_put(b, id, "quick", bench_slots, 4);
            bench_partition_close(b, 0);
            bench_partition_open(b, 5, 0);
            bench_topic_put(b, id, "quick", slots, 4);
            struct part lone = part(0, 5, 64);
            /* answers the fetch, which waited on slot 0 */
            CHECK_EQUAL(client_produce(&writer, 1, &lone, 1).error[0], 0);
        } else {
            bench_topic_remove(b, b->topic_id);
            CHECK_EQUAL(client_receive(&session), 1);
            take_fetched(&session, fetched);
            CHECK_EQUAL(fetched->error[0], 3);
        }
        CHECK_EQUAL(client_receive(&reader), 1);
        take_fetched(&reader, fetched);
        CHECK_EQUAL(fetched->error[0], replaced ? 0 : 3);
        CHECK_EQUAL(fetched->batch_count, replaced);
        if (!replaced)
            bench_topic_put(b, id, "quick", bench_slots, 4);
    }
    free(fetched);
    frame_free(&frame);
    frame_free(&more);
    client_close(&reader);
    client_close(&session);
    client_close(&writer);
    bench_stop(b);
}
