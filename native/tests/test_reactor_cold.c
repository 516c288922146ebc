/* A fetch whose records may not be in memory is read ahead by the pool or the ring; the reactor never sends what might make it wait for a disk. */
#include "mqd_counter_test.h"
#include "mqd_seccomp_test.h"

#define BATCHES 6

static void one_batch_segments(struct bench *b) { b->log_options.segment_bytes = 300; }

static void fetch_all(int backend, uint64_t cold_count)
{
    struct bench *b = bench_start(backend, one_batch_segments);
    struct client client = client_open(b, 0);
    struct fetched *fetched = calloc(1, sizeof *fetched);
    for (uint64_t i = 0; i < BATCHES; i++) {
        struct part lone = {0, {.mark = i + 1, .body_bytes = 100}};
        CHECK_EQUAL(client_produce(&client, -1, &lone, 1).error[0], 0);
    }
    for (int64_t i = 0; i < BATCHES; i++) {
        client_fetch(&client, (struct fetch){.wait_ms = LIMIT_MS, .bytes_min = 1, .bytes_max = 100, .session_epoch = -1}, &(struct asked){0, i}, 1, fetched);
        CHECK(fetched->batch_count == 1 && fetched->batches[0].mark == (uint64_t)i + 1);
    }
    CHECK_EQUAL(counted(b, MQD_COUNT_FETCH_COLD), cold_count);
    free(fetched);
    client_close(&client);
    bench_stop(b);
}

static void all_are_read_ahead(int backend) { fetch_all(backend, BATCHES - 1); } /* but what lies beside the high watermark */
static void none_is_read_ahead(int backend) { fetch_all(backend, 0); }

BOTH(what_the_kernel_does_not_tell_is_read_ahead)
{
    where_refused(ENOSYS, EPERM, all_are_read_ahead, backend);
    where_refused(EPERM, EPERM, all_are_read_ahead, backend);
}

BOTH(what_is_known_to_be_in_memory_is_sent_at_once)
{
    where_refused(0, EPERM, none_is_read_ahead, backend);
    where_refused(ENOSYS, 0, none_is_read_ahead, backend);
}
