/* compression.type: a batch in another codec goes to the acceptor, and the acceptor's result, in
 * pieces, is written instead. */
#include "mqd_check_test.h"

#define ZSTD 4
#define LEVEL (-7)

static void to_zstd(struct bench *b)
{
    b->log_options.compression = ZSTD + 1;
    b->log_options.compression_level = LEVEL;
    b->log_options.max_message_bytes = 300000;
}

/* The acceptor returns `batch` in pieces of `piece_bytes`; `reported_bytes` is the size it
 * announces. */
static void return_batch(struct bench *b, const struct mqd_descriptor *check, const struct raw *batch,
                         uint32_t piece_bytes, int64_t reported_bytes, bool last)
{
    memcpy(b->arenas[ACCEPTOR], batch->bytes, batch->size_bytes);
    for (uint32_t at = 0; at < batch->size_bytes; at += piece_bytes) {
        uint32_t left = batch->size_bytes - at;
        bench_put(b, ACCEPTOR, 0,
                  (struct mqd_descriptor){.kind = MQD_LINK_CHECKED,
                                          .flags = left > piece_bytes || !last ? MQD_CHECKED_MORE : 0,
                                          .token = check->token,
                                          .offset = at,
                                          .size_bytes = left < piece_bytes ? left : piece_bytes,
                                          .a = reported_bytes});
    }
}

static struct mqd_descriptor next_check(struct bench *b)
{
    return bench_expect(b, ACCEPTOR, MQD_LINK_CHECK, NULL);
}

BOTH(a_batch_is_recompressed_with_the_topics_codec)
{
    struct bench *b = bench_start(backend, to_zstd);
    struct client client = client_open(b, 0);
    int64_t next_offset = 0;
    for (int32_t size_bytes = 500; size_bytes < 300000; size_bytes *= 20) { /* in each of the arenas' parts */
        struct raw back = raw_noise((struct log_batch){.attributes = ZSTD, .body_bytes = size_bytes, .mark = 9});
        /* a later batch of the connection, which needs no check, must not overtake it */
        struct raw later = raw_noise((struct log_batch){.attributes = ZSTD, .body_bytes = 100, .mark = 8});
        CHECK(client_produce_one(&client, 1, NULL, -1, LIMIT_MS, 0, raw_records(3, UINT64_MAX, 5)));
        CHECK(client_produce_one(&client, 2, NULL, -1, LIMIT_MS, 0, later));
        struct mqd_descriptor check = next_check(b);
        CHECK_EQUAL(check.flags, MQD_CHECK_PARSE);
        CHECK_EQUAL(check.a >> 16, ZSTD + 1);
        CHECK_EQUAL((int32_t)(check.c & 0xffffffff), LEVEL);
        CHECK_EQUAL(check.c >> 32, 300000);
        return_batch(b, &check, &back, 7000, back.size_bytes, true);
        struct outcomes first = client_take(&client), second = client_take(&client);
        CHECK_EQUAL(first.of[0].error, 0);
        CHECK_EQUAL(second.of[0].error, 0);
        CHECK_EQUAL(first.of[0].base_offset, next_offset);
        CHECK_EQUAL(second.of[0].base_offset, next_offset + 1);
        next_offset += 2;
        free(back.bytes);
    }
    client_close(&client);
    bench_stop(b);
}

BOTH(pieces_that_do_not_make_a_batch)
{
    struct bench *b = bench_start(backend, to_zstd);
    struct client client = client_open(b, 0);
    struct raw back = raw_noise((struct log_batch){.attributes = ZSTD, .body_bytes = 20000, .mark = 9});
    int64_t sent[] = {back.size_bytes - 1, back.size_bytes + 1, 0, -5, 10, INT64_MAX, (int64_t)INT32_MAX};
    for (uint32_t i = 0; i < sizeof sent / sizeof *sent; i++) {
        CHECK(client_produce_one(&client, 1, NULL, -1, LIMIT_MS, 0, raw_records(3, 0, 5)));
        struct mqd_descriptor check = next_check(b);
        return_batch(b, &check, &back, 7000, sent[i], true);
        CHECK_EQUAL(client_take(&client).of[0].error, 19); /* to be sent again */
    }
    CHECK(client_produce_one(&client, 2, NULL, -1, LIMIT_MS, 0, raw_records(3, 0, 5)));
    struct mqd_descriptor check = next_check(b);
    bench_put(b, ACCEPTOR, 0,
              (struct mqd_descriptor){.kind = MQD_LINK_CHECKED, .token = check.token, .error = 10}); /* too large now */
    CHECK_EQUAL(client_take(&client).of[0].error, 10);
    CHECK(client_produce_one(&client, 3, NULL, -1, LIMIT_MS, 0, raw_records(3, 0, 5)));
    check = next_check(b);
    bench_put(b, ACCEPTOR, 0,
              (struct mqd_descriptor){.kind = MQD_LINK_CHECKED, .token = check.token}); /* and nothing */
    CHECK_EQUAL(client_take(&client).of[0].error, 19);
    free(back.bytes);
    client_close(&client);
    bench_stop(b);
}

BOTH(the_acceptor_dies_between_two_pieces)
{
    struct bench *b = bench_start(backend, to_zstd);
    struct client client = client_open(b, 0);
    struct raw back = raw_noise((struct log_batch){.attributes = ZSTD, .body_bytes = 20000, .mark = 9});
    struct raw half = {back.bytes, 7000};
    CHECK(client_produce_one(&client, 1, NULL, -1, LIMIT_MS, 0, raw_records(3, 0, 5)));
    struct mqd_descriptor check = next_check(b);
    return_batch(b, &check, &half, 7000, back.size_bytes, false);
    acceptor_restarts(b);
    check = next_check(b);
    return_batch(b, &check, &back, 7000, back.size_bytes, true);
    CHECK_EQUAL(client_take(&client).of[0].error, 0);
    /* the client leaves between two pieces */
    CHECK(client_produce_one(&client, 2, NULL, -1, LIMIT_MS, 0, raw_records(3, 0, 5)));
    check = next_check(b);
    return_batch(b, &check, &half, 7000, back.size_bytes, false);
    client_close(&client);
    struct client other = client_open(b, 0);
    CHECK(client_produce_one(&other, 3, NULL, -1, LIMIT_MS, 0, raw_records(3, 0, 5)));
    struct mqd_descriptor second = next_check(b);
    return_batch(b, &check, &back, 30000, back.size_bytes, true);
    return_batch(b, &second, &back, 7000, back.size_bytes, true);
    CHECK_EQUAL(client_take(&other).of[0].error, 0);
    free(back.bytes);
    client_close(&other);
    bench_stop(b);
}
