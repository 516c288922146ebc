/* A fetch whose records may not be in memory is read ahead by the pool or the ring; the reactor
 * never sends data for which it might wait for a disk. */
#include "mqd_counter_test.h"
#include "mqd_seccomp_test.h"

#define BATCHES 6

static void one_batch_segments(struct bench *b)
{
    b->log_options.segment_bytes = 300;
}

static void produce(struct client *client, uint64_t first, uint64_t count)
{
    for (uint64_t mark = first; mark < first + count; mark++) {
        struct part lone = {0, {.mark = mark, .body_bytes = 100}};
        CHECK_EQUAL(client_produce(client, -1, &lone, 1).error[0], 0);
    }
}

static void fetch(struct client *client, int64_t first, int64_t count)
{
    struct fetched *fetched = calloc(1, sizeof *fetched);
    for (int64_t offset = first; offset < first + count; offset++) {
        client_fetch(client, (struct fetch){.wait_ms = LIMIT_MS, .bytes_min = 1, .bytes_max = 100, .session_epoch = -1},
                     &(struct fetch_position){0, offset}, 1, fetched);
        CHECK_OR(fetched->batch_count == 1 && fetched->batches[0].mark == (uint64_t)offset + 1, break);
    }
    free(fetched);
}

static void fetch_all(int backend, void (*change)(struct bench *b), uint64_t cold_count)
{
    struct bench *b = bench_start(backend, change);
    struct client client = client_open(b, 0);
    produce(&client, 1, BATCHES);
    fetch(&client, 0, BATCHES);
    CHECK_EQUAL(counted(b, MQD_COUNT_FETCH_COLD), cold_count);
    produce(&client, BATCHES + 1, 1); /* written since the reader first used the partition, and at its end */
    fetch(&client, BATCHES, 1);
    CHECK_EQUAL(counted(b, MQD_COUNT_FETCH_COLD), cold_count);
    client_close(&client);
    bench_stop(b);
}

static void all_are_read_ahead(int backend)
{
    fetch_all(backend, one_batch_segments, BATCHES);
}
static void none_is_read_ahead(int backend)
{
    fetch_all(backend, one_batch_segments, 0);
}

/* A broker that starts with an existing log, as after a reboot: its newest records may be as
 * cold as the rest. */
static void existing_records_are_read_ahead(int backend)
{
    fetch_all(backend, NULL, BATCHES);
}

BOTH(unknown_pages_are_read_ahead)
{
    where_refused(ENOSYS, EPERM, all_are_read_ahead, backend);
    where_refused(EPERM, EPERM, all_are_read_ahead, backend);
    where_refused(ENOSYS, EPERM, existing_records_are_read_ahead, backend);
}

BOTH(cached_pages_are_sent_immediately)
{
    where_refused(0, EPERM, none_is_read_ahead, backend);
    where_refused(ENOSYS, 0, none_is_read_ahead, backend);
}

/* The second of two concurrent fetches would remove the partition whose records the first one is
 * still reading ahead: a session has one request at a time. */
static void the_second_is_refused(int backend)
{
    struct bench *b = bench_start(backend, one_batch_segments);
    struct client client = client_open(b, 0);
    produce(&client, 1, BATCHES);
    struct fetched *fetched = calloc(1, sizeof *fetched);
    struct fetch fetch = {.bytes_max = 100};
    client_fetch(&client, fetch, &(struct fetch_position){0, BATCHES}, 1, fetched);
    CHECK(fetched->session_id != 0);
    fetch.session_id = fetched->session_id, fetch.session_epoch = 1;
    struct frame both = {0};
    put_fetch(&both, fetch, &(struct fetch_position){0, 2}, 1);
    fetch.session_epoch = 2, fetch.forget = 1;
    put_fetch(&both, fetch, NULL, 0);
    bool sent = client_send(&client, &both);
    frame_free(&both);
    CHECK(sent);
    CHECK_EQUAL(client_receive(&client), 1);
    take_fetched(&client, fetched);
    CHECK_EQUAL(fetched->batch_count, 1);
    CHECK_EQUAL(fetched->batches[0].mark, 3);
    CHECK_EQUAL(client_receive(&client), 1);
    take_fetched(&client, fetched);
    CHECK_EQUAL(fetched->top_error, 71); /* INVALID_FETCH_SESSION_EPOCH */
    free(fetched);
    client_close(&client);
    bench_stop(b);
}

BOTH(a_session_has_one_request_at_a_time)
{
    where_refused(ENOSYS, EPERM, the_second_is_refused, backend);
}
