/* tsan: long */
/* A fetch that waits for more bytes than it has: the cost of a record in one of its
 * partitions. */
#include "mqd_counter_test.h"

#define OTHERS 40 /* segments; more than a reader keeps open */

static void few_open_files(struct bench *b)
{
    b->options[0].read_fd_count_max = 1; /* as few as there may be */
    b->log_options.segment_bytes = 300;  /* one batch */
    b->log_options.flush_on_ack = 0;
}

static void produce(struct bench *b, int32_t partition, uint64_t mark, int32_t body_bytes)
{
    struct client client = client_open(b, (uint32_t)partition % 2);
    struct part lone = {partition, {.mark = mark, .body_bytes = body_bytes}};
    CHECK_EQUAL(client_produce(&client, -1, &lone, 1).error[0], 0);
    client_close(&client);
}

/* The other partition's file is closed and moved away: a fetch that opened it to count again
 * would get a response now, with an error. */
BOTH(only_partitions_with_new_records_are_counted_again)
{
    struct bench *b = bench_start(backend, few_open_files);
    struct client reader = client_open(b, 0), other = client_open(b, 0);
    struct fetched *fetched = calloc(1, sizeof *fetched);
    struct frame frame = {0};
    struct fetch_position requested[2] = {{0, 0}, {1, 0}};
    char path[160], hidden[170];
    produce(b, 0, 1, 100);
    produce(b, 1, 2, 100);
    for (uint64_t i = 0; i < OTHERS; i++)
        produce(b, 3, 3 + i, 100);
    put_fetch(&frame, (struct fetch){.wait_ms = LIMIT_MS, .bytes_min = 1000, .bytes_max = 1 << 20, .session_epoch = -1},
              requested, 2);
    CHECK(client_send(&reader, &frame));
    wait_for_count(b, MQD_COUNT_FETCH_PARKED, 1);
    for (int64_t i = 0; i < OTHERS; i++)
        client_fetch(&other, (struct fetch){.bytes_min = 1, .bytes_max = 100, .session_epoch = -1},
                     &(struct fetch_position){3, i}, 1, fetched);
    snprintf(path, sizeof path, "%s/quick-1/%020d.log", log_root, 0);
    snprintf(hidden, sizeof hidden, "%s.hidden", path);
    CHECK_EQUAL(rename(path, hidden), 0);
    produce(b, 0, 100, 100);
    produce(b, 0, 101, 100); /* the first one has woken the fetch before this one is answered */
    CHECK_EQUAL(rename(hidden, path), 0);
    for (uint64_t i = 0; i < 4; i++)
        produce(b, 0, 102 + i, 100);
    CHECK_EQUAL(client_receive(&reader), 1);
    take_fetched(&reader, fetched);
    for (int32_t i = 0; i < fetched->partition_count; i++) {
        CHECK_EQUAL(fetched->error[i], 0);
        CHECK(fetched->partition[i] != 0 || fetched->high_watermark[i] > 3); /* not before the file was back */
    }
    CHECK_EQUAL(fetched->partition_count, 2);
    client_close(&reader);
    client_close(&other);
    frame_free(&frame);
    free(fetched);
    bench_stop(b);
}
