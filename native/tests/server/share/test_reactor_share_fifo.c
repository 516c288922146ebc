/* tsan: long */
/* share.fifo over real sockets and files: keys of small batches, and of larger ones, which are
 * cached, and read by a thread where they are compressed (server/share/keys.c). */
#include "mqd_check_test.h"

#include "mqd_reactor_share_test.h"

static struct coordinator *start_fifo(int backend)
{
    struct coordinator *k = start_with(backend, NULL);
    k->fifo = true; /* no request has been made yet */
    return k;
}

static void write_records(struct coordinator *k, int32_t partition, struct raw raw)
{
    struct client writer = client_open(k->b, (uint32_t)partition % 2);
    CHECK(client_produce_one(&writer, 1, NULL, -1, LIMIT_MS, partition, raw));
    CHECK_EQUAL(client_take(&writer).of[0].error, 0);
    client_close(&writer);
}

/* All of the first `count` records have one key, except the `unkeyed` ones after record 0. Each
 * is delivered when the previous one is accepted. */
static void one_after_the_other(struct coordinator *k, int32_t partition, int64_t count, int64_t unkeyed, bool ends)
{
    struct client one = client_open(k->b, 0);
    struct share_request a = {.member = "a", .partition = partition, .type = -1, .wait_ms = LIMIT_MS};
    struct answered answered = fetch(k, &one, a);
    check_run(&answered, 0, unkeyed, 1);
    for (int64_t offset = unkeyed + 1; offset < count; offset++) {
        a.epoch++, a.type = MQD_SHARE_ACCEPT, a.last = offset - 1, a.first = offset == unkeyed + 1 ? 0 : a.last;
        answered = fetch(k, &one, a); /* acknowledges, and waits for what it frees */
        check_run(&answered, offset, offset, 1);
    }
    if (ends) {
        a.epoch++, a.wait_ms = 1, a.first = a.last = count - 1;
        answered = fetch(k, &one, a);
        CHECK_EQUAL(answered.acknowledge_error, 0);
        CHECK_EQUAL(answered.run_count, 0);
    }
    client_close(&one);
}

BOTH(small_batches)
{
    struct coordinator *k = start_fifo(backend);
    for (int32_t partition = 0; partition < 2; partition++) {
        write_records(k, partition, raw_records(6, 1 << 1, 20));
        one_after_the_other(k, partition, 6, 1, true);
    }
    stop(k);
}

BOTH(a_large_batch)
{
    struct coordinator *k = start_fifo(backend);
    write_records(k, 1, raw_records(400, 0, 40));
    one_after_the_other(k, 1, 60, 0, false);
    stop(k);
}

/* More than one within the range that an acquisition reads. */
BOTH(large_batches)
{
    struct coordinator *k = start_fifo(backend);
    struct client one = client_open(k->b, 0);
    struct share_request a = {
        .member = "a", .partition = 1, .type = -1, .wait_ms = LIMIT_MS, .records_max = 1000, .strict = 1};
    int64_t seen = 0;
    for (int batch = 0; batch < 4; batch++)
        write_records(k, 1, raw_records(300, UINT64_MAX, 40)); /* none has a key */
    for (int tries = 0; tries < 20 && seen < 1200; tries++, a.epoch++) {
        struct answered answered = fetch(k, &one, a);
        CHECK_EQUAL(answered.partition_error, 0);
        for (int i = 0; i < answered.run_count; i++)
            seen += answered.runs[i].last - answered.runs[i].first + 1;
    }
    CHECK_EQUAL(seen, 1200);
    client_close(&one);
    stop(k);
}

BOTH(compressed_batches)
{
    if (!has_zstd())
        return;
    struct coordinator *k = start_fifo(backend);
    write_records(k, 0, in_zstd(raw_records(8, 1 << 1, 20)));
    one_after_the_other(k, 0, 8, 1, true);
    write_records(k, 1, in_zstd(raw_records(64, 1 << 1, 40)));
    write_records(k, 1, in_zstd(raw_records(400, UINT64_MAX, 40))); /* none has a key */
    struct client one = client_open(k->b, 0);
    struct share_request a = {.member = "a", .partition = 1, .type = -1, .wait_ms = LIMIT_MS};
    int64_t seen = 0;
    for (int tries = 0; tries < 20 && seen < 402; tries++, a.epoch++) {
        struct answered answered = fetch(k, &one, a);
        CHECK_EQUAL(answered.partition_error, 0);
        for (int i = 0; i < answered.run_count; i++)
            seen += answered.runs[i].last - answered.runs[i].first + 1;
    }
    CHECK_EQUAL(seen, 402);
    client_close(&one);
    stop(k);
}

/* A thread reads keys while the worker ends. */
BOTH(it_ends_while_keys_are_read)
{
    if (!has_zstd())
        return;
    struct coordinator *k = start_fifo(backend);
    struct client one = client_open(k->b, 0);
    struct share_request a = {.member = "a", .partition = 1, .type = -1, .wait_ms = LIMIT_MS};
    write_records(k, 1, in_zstd(raw_records(4000, UINT64_MAX, 40)));
    send_share_request(k, &one, FETCH, a);
    client_close(&one);
    stop(k);
}

BOTH(a_damaged_batch_is_an_error)
{
    struct coordinator *k = start_fifo(backend);
    struct client one = client_open(k->b, 0);
    struct share_request a = {.member = "a", .partition = 0, .type = -1, .wait_ms = LIMIT_MS};
    produce(k, 0, 5); /* its records are noise */
    CHECK_EQUAL(fetch(k, &one, a).partition_error, MQD_KAFKA_CORRUPT_MESSAGE);
    client_close(&one);
    stop(k);
}
