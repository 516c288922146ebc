/* tsan: long */
/* Compressed batches that the worker checks itself (server/check/check_records.c): small ones on
 * the reactor, others on a thread of its pool. The codec is zstd, in frames written here. */
#include "mqd_check_test.h"

static void all(struct bench *b)
{
    b->log_options.validation = MQD_VALIDATION_ALL;
}

/* One record's worth of header and `bytes` of one repeated byte. */
static struct raw bomb(uint32_t bytes)
{
    struct frame frame = {0};
    put_header(&frame, bytes);
    for (uint32_t left = bytes; left;) {
        uint32_t size = left < BLOCK_BYTES ? left : BLOCK_BYTES;
        left -= size;
        put_little(&frame, 3, (left == 0) | 1u << 1 | size << 3);
        put(&frame, 1, 0);
    }
    struct raw raw = with_body(raw_records(1, 0, 1), &frame);
    frame_free(&frame);
    return raw;
}

static int16_t produce(struct client *client, int32_t partition, struct raw raw)
{
    CHECK_OR(client_produce_one(client, 1, NULL, -1, LIMIT_MS, partition, raw), return -1);
    return client_take(client).of[0].error;
}

BOTH(sound_batches)
{
    if (!has_zstd())
        return;
    struct bench *b = bench_start(backend, all);
    struct client client = client_open(b, 0);
    int64_t next[2] = {0};
    for (uint32_t count = 3; count <= 6000;
         count *= 6) { /* on the reactor; on a thread, copied; on a thread, in place */
        int32_t partition = count & 1;
        /* a later batch, which needs no thread, does not overtake it */
        CHECK(
            client_produce_one(&client, 1, NULL, -1, LIMIT_MS, partition, in_zstd(raw_records(count, UINT64_MAX, 50))));
        CHECK(client_produce_one(&client, 2, NULL, -1, LIMIT_MS, partition, raw_records(1, 0, 1)));
        struct outcomes first = client_take(&client), second = client_take(&client);
        CHECK_EQUAL(first.of[0].error, 0);
        CHECK_EQUAL(second.of[0].error, 0);
        CHECK_EQUAL(first.of[0].base_offset, next[partition]);
        CHECK_EQUAL(second.of[0].base_offset, next[partition] + count);
        next[partition] += count + 1;
    }
    client_close(&client);
    bench_stop(b);
}

BOTH(records_that_cannot_be_parsed)
{
    if (!has_zstd())
        return;
    struct bench *b = bench_start(backend, all);
    struct client client = client_open(b, 0);
    for (uint32_t count = 3; count <= 6000; count *= 40) {
        struct raw raw = raw_records(count, 0, 50);
        raw.bytes[raw.size_bytes - 1] = 2; /* the last record's header count */
        CHECK(client_produce_one(&client, 1, NULL, -1, LIMIT_MS, 0, in_zstd(raw)));
        struct outcomes out = client_take(&client);
        CHECK_EQUAL(out.of[0].error, 87);
        CHECK_EQUAL(out.of[0].record_errors, 1);
        CHECK_EQUAL(out.of[0].first_index, count - 1);
        CHECK_CONTAINS(out.of[0].message, "cannot be parsed");
        raw = in_zstd(raw_records(count, 0, 50));
        raw.bytes[MQD_BATCH_HEADER_BYTES] ^= 1; /* of the frame's magic number */
        raw_finish(&raw);
        CHECK(client_produce_one(&client, 2, NULL, -1, LIMIT_MS, 0, raw));
        out = client_take(&client);
        CHECK_EQUAL(out.of[0].error, 87);
        CHECK_EQUAL(out.of[0].record_errors, 0);
        CHECK_CONTAINS(out.of[0].message, "compressed records are damaged");
    }
    CHECK_EQUAL(produce(&client, 0, raw_records(1, 0, 1)), 0);
    client_close(&client);
    bench_stop(b);
}

BOTH(records_without_a_key)
{
    if (!has_zstd())
        return;
    struct bench *b = bench_start(backend, compacted);
    struct client client = client_open(b, 0);
    for (uint32_t count = 10; count <= 1000; count *= 100) {
        CHECK_EQUAL(produce(&client, 0, in_zstd(raw_records(count, 0, 50))), 0);
        CHECK(client_produce_one(&client, 1, NULL, -1, LIMIT_MS, 0, in_zstd(raw_records(count, 1 << 3, 50))));
        struct outcomes out = client_take(&client);
        CHECK_EQUAL(out.of[0].error, 87);
        CHECK_EQUAL(out.of[0].first_index, 3);
        CHECK_CONTAINS(out.of[0].record_message, "Compacted topic cannot accept message without key");
    }
    client_close(&client);
    bench_stop(b);
}

BOTH(bombs)
{
    if (!has_zstd())
        return;
    struct bench *b = bench_start(backend, all);
    struct client client = client_open(b, 0), other = client_open(b, 0);
    CHECK(client_produce_one(&client, 1, NULL, -1, LIMIT_MS, 0, bomb(8u << 20))); /* begun here, ended on a thread */
    CHECK_EQUAL(produce(&other, 0, raw_records(1, 0, 1)), 0);
    CHECK_CONTAINS(client_take(&client).of[0].message, "cannot be parsed");
    if (test_long()) {
        CHECK(client_produce_one(&client, 2, NULL, -1, LIMIT_MS, 0, bomb(MQD_RECORDS_BYTES_MAX + 1)));
        CHECK_CONTAINS(client_take(&client).of[0].message, "decompress to more than 134217728 bytes");
    }
    client_close(&client);
    client_close(&other);
    bench_stop(b);
}

/* A check by the worker's own thread does not depend on the acceptor, or on the client. */
BOTH(acceptor_and_client_end)
{
    if (!has_zstd())
        return;
    struct bench *b = bench_start(backend, all);
    for (int round = 0; round < 10; round++) {
        struct client client = client_open(b, 0), gone = client_open(b, 0);
        CHECK(client_produce_one(&gone, 1, NULL, -1, LIMIT_MS, 0, bomb(2u << 20)));
        CHECK(client_produce_one(&client, 1, NULL, -1, LIMIT_MS, 0, in_zstd(raw_records(6000, 0, 50))));
        acceptor_restarts(b);
        client_close(&gone);
        CHECK_EQUAL(client_take(&client).of[0].error, 0);
        client_close(&client);
    }
    struct client last = client_open(b, 0); /* the reactor stops while the job may run */
    CHECK(client_produce_one(&last, 1, NULL, -1, LIMIT_MS, 0, bomb(8u << 20)));
    client_close(&last);
    bench_stop(b);
}
