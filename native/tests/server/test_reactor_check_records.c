/* tsan: long */
/* Checks of records before a batch may be written (server/check/check_records.c): keys for
 * compacted topics, and record.validation; by the acceptor, as where a codec's library is missing.
 * The test is the acceptor, and the owner of partition 4. */
#include "mqd_check_test.h"

static void refuse_records(struct bench *b, const struct mqd_descriptor *check, const int32_t *indexes, uint16_t count,
                           const char *message)
{
    struct mqd_check_refusal head = {count, count, (uint16_t)strlen(message)};
    uint8_t *at = b->arenas[ACCEPTOR];
    memcpy(at, &head, sizeof head);
    if (count)
        memcpy(at + sizeof head, indexes, count * sizeof *indexes);
    memcpy(at + sizeof head + count * sizeof *indexes, message, strlen(message));
    bench_put(
        b, ACCEPTOR, 0,
        (struct mqd_descriptor){.kind = MQD_LINK_CHECKED,
                                .token = check->token,
                                .error = 87,
                                .offset = 0,
                                .size_bytes = (uint32_t)(sizeof head + count * sizeof *indexes + strlen(message))});
}

BOTH(records_without_key)
{
    struct bench *b = bench_start(backend, compacted);
    struct client client = client_open(b, 0);
    for (int32_t partition = 0; partition < 2;
         partition++) { /* checked by the worker that receives it, whichever owns it */
        CHECK(client_produce_one(&client, 1, NULL, -1, LIMIT_MS, partition, raw_records(100, 0, 10)));
        CHECK_EQUAL(client_take(&client).of[0].error, 0);
        CHECK(client_produce_one(&client, 2, NULL, -1, LIMIT_MS, partition, raw_records(10, 1 << 3 | 1 << 7, 10)));
        struct outcomes out = client_take(&client);
        CHECK_EQUAL(out.of[0].error, 87);
        CHECK_EQUAL(out.of[0].record_errors, 2);
        CHECK_EQUAL(out.of[0].first_index, 3);
        CHECK_TEXT(out.of[0].record_message,
                   partition ? "Compacted topic cannot accept message without key in topic partition quick-1."
                             : "Compacted topic cannot accept message without key in topic partition quick-0.");
        CHECK_CONTAINS(out.of[0].message, "2 records of the batch have no key");
        CHECK(client_produce_one(&client, 3, NULL, -1, LIMIT_MS, partition, raw_records(200, UINT64_MAX, 0)));
        out = client_take(&client);
        CHECK_EQUAL(out.of[0].record_errors, 64); /* the first of them */
        CHECK_CONTAINS(out.of[0].message, "200 records");
        CHECK(client_produce_one(&client, 4, NULL, -1, LIMIT_MS, partition, raw_noise((struct log_batch){.mark = 1})));
        out = client_take(&client);
        CHECK_EQUAL(out.of[0].error, 87);
        CHECK_EQUAL(out.of[0].record_errors, 1);
        CHECK_EQUAL(out.of[0].first_index, 0);
        CHECK(client_produce_one(&client, 5, NULL, -1, LIMIT_MS, partition, raw_records(1, 0, 1)));
        out = client_take(&client);
        CHECK_EQUAL(out.of[0].error, 0);
        CHECK_EQUAL(out.of[0].base_offset, 100);
    }
    b->log_options.compacted = 0; /* the setting changes */
    CHECK_EQUAL(mqd_reactor_set_log_options(b->reactors[0], ++b->token, 0, &b->log_options), 0);
    bench_done(b, 0, b->token);
    CHECK(client_produce_one(&client, 6, NULL, -1, LIMIT_MS, 0, raw_records(1, 1, 1)));
    CHECK_EQUAL(client_take(&client).of[0].error, 0);
    client_close(&client);
    bench_stop(b);
}

static void uncompressed(struct bench *b)
{
    b->log_options.validation = MQD_VALIDATION_UNCOMPRESSED;
}
static void all(struct bench *b)
{
    b->log_options.validation = MQD_VALIDATION_ALL;
}

/* The records of raw_records(3, 0, 5), which all have one length, with other bytes in the
 * second. */
struct malformed {
    uint32_t at;
    uint8_t bytes[10];
    uint32_t size_bytes;
    const char *why;
};

BOTH(records_that_cannot_be_parsed)
{
    /* a record: length, attributes, timestamp delta, offset delta, key length, key, value length,
     * ... */
    static const struct malformed cases[] = {
        {0, {0xfe, 0xff, 0xff, 0xff, 0x0f}, 5, "length is impossible"}, /* 2^31 - 1 */
        {0, {0x09}, 1, "length is impossible"},                         /* -5 */
        {0, {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f}, 10, "length is impossible"},
        {2, {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f}, 10, "timestamp is cut off"},
        {3, {0x00}, 1, "offset delta is not its position"},
        {3, {0x04}, 1, "offset delta is not its position"},
        {4, {0x03}, 1, "key is cut off"},
        {4, {0xfe, 0xff, 0xff, 0xff, 0x0f}, 5, "key is cut off"},
    };
    struct bench *b = bench_start(backend, uncompressed);
    struct client client = client_open(b, 0);
    struct raw good = raw_records(3, 0, 5);
    uint32_t record_bytes = (good.size_bytes - MQD_BATCH_HEADER_BYTES) / 3;
    for (uint32_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct raw raw = {memcpy(malloc(good.size_bytes), good.bytes, good.size_bytes), good.size_bytes};
        memcpy(raw.bytes + MQD_BATCH_HEADER_BYTES + record_bytes + cases[i].at, cases[i].bytes, cases[i].size_bytes);
        raw_finish(&raw);
        CHECK(client_produce_one(&client, (int32_t)i, NULL, -1, LIMIT_MS, i % 2, raw));
        struct outcomes out = client_take(&client);
        CHECK_EQUAL(out.of[0].error, 87);
        CHECK_EQUAL(out.of[0].record_errors, 1);
        CHECK_EQUAL(out.of[0].first_index, 1);
        CHECK_CONTAINS(out.of[0].record_message, cases[i].why);
        CHECK_CONTAINS(out.of[0].message, "record 1 of the batch cannot be parsed");
    }
    /* keys are not required */
    CHECK(client_produce_one(&client, 100, NULL, -1, LIMIT_MS, 0, raw_records(3, UINT64_MAX, 5)));
    CHECK_EQUAL(client_take(&client).of[0].error, 0);
    /* and compressed batches are not parsed */
    CHECK(client_produce_one(&client, 101, NULL, -1, LIMIT_MS, 0,
                             raw_noise((struct log_batch){.attributes = 4, .mark = 7})));
    CHECK_EQUAL(client_take(&client).of[0].error, 0);
    b->log_options.validation = MQD_VALIDATION_NONE;
    CHECK_EQUAL(mqd_reactor_set_log_options(b->reactors[0], ++b->token, 0, &b->log_options), 0);
    bench_done(b, 0, b->token);
    CHECK(client_produce_one(&client, 102, NULL, -1, LIMIT_MS, 0, raw_noise((struct log_batch){.mark = 1})));
    CHECK_EQUAL(client_take(&client).of[0].error, 0);
    free(good.bytes);
    client_close(&client);
    bench_stop(b);
}

BOTH(compressed_batches_are_parsed_where_all_are)
{
    mqd_check_always_by_acceptor = true;
    struct bench *b = bench_start(backend, all);
    struct client client = client_open(b, 0);
    for (int32_t error = 0; error <= 87; error += 87) {
        CHECK(client_produce_one(&client, 1, NULL, -1, LIMIT_MS, 0,
                                 raw_noise((struct log_batch){.attributes = 4, .mark = 7})));
        struct mqd_descriptor check = bench_expect(b, ACCEPTOR, MQD_LINK_CHECK, NULL);
        CHECK_EQUAL(check.flags, MQD_CHECK_PARSE);
        bench_put(b, ACCEPTOR, 0,
                  (struct mqd_descriptor){.kind = MQD_LINK_CHECKED, .token = check.token, .error = error});
        CHECK_EQUAL(client_take(&client).of[0].error, error);
    }
    client_close(&client);
    bench_stop(b);
    mqd_check_always_by_acceptor = false;
}

BOTH(hostile_records)
{
    struct bench *b = bench_start(backend, compacted);
    struct client client = client_open(b, 0);
    uint64_t seed = 7;
    uint32_t refused = 0;
    for (int i = 0; i < (test_long() ? 20000 : 1000); i++) {
        struct raw raw = raw_records(3, 0, 5);
        uint32_t changes = 1 + test_random(&seed) % 3;
        for (uint32_t j = 0; j < changes; j++) {
            uint32_t at =
                MQD_BATCH_HEADER_BYTES + (uint32_t)(test_random(&seed) % (raw.size_bytes - MQD_BATCH_HEADER_BYTES));
            raw.bytes[at] = (uint8_t)test_random(&seed);
        }
        raw_finish(&raw);
        CHECK(client_produce_one(&client, i, NULL, 1, LIMIT_MS, 0, raw));
        struct outcomes out = client_take(&client);
        CHECK(out.of[0].error == 0 || out.of[0].error == 87);
        refused += out.of[0].error == 87;
    }
    CHECK(refused > 500);
    client_close(&client);
    bench_stop(b);
}

BOTH(compressed_batches_are_checked_by_the_acceptor)
{
    mqd_check_always_by_acceptor = true;
    struct bench *b = bench_start(backend, compacted);
    struct client client = client_open(b, 0), other = client_open(b, 0);
    for (int32_t size_bytes = 500; size_bytes < 400000; size_bytes *= 30) { /* copied, and where it is */
        int32_t partition = size_bytes > 1000;
        struct raw raw = raw_noise((struct log_batch){.attributes = 4, .body_bytes = size_bytes, .mark = 77});
        struct raw copy = {memcpy(malloc(raw.size_bytes), raw.bytes, raw.size_bytes), raw.size_bytes};
        CHECK(client_produce_one(&client, 1, NULL, -1, LIMIT_MS, partition, raw));
        CHECK(client_produce_one(&client, 2, NULL, -1, LIMIT_MS, partition, raw_records(5, 0, 1)));
        struct mqd_descriptor check = bench_expect(b, ACCEPTOR, MQD_LINK_CHECK, NULL);
        CHECK_EQUAL(check.flags, MQD_CHECK_RECORDS);
        CHECK_EQUAL(check.slot, partition);
        for (uint64_t i = 0; i < 64; i++) { /* the window is replaced */
            CHECK(client_produce_one(&other, 3, NULL, 1, LIMIT_MS, 3, raw_records(3, 0, 20)));
            CHECK_EQUAL(client_take(&other).of[0].error, 0);
        }
        CHECK_EQUAL(check.size_bytes, copy.size_bytes);
        CHECK(memcmp(b->arenas[0] + check.offset, copy.bytes, copy.size_bytes) == 0);
        bench_put(b, ACCEPTOR, 0, (struct mqd_descriptor){.kind = MQD_LINK_CHECKED, .token = check.token});
        struct outcomes first = client_take(&client), second = client_take(&client);
        CHECK_EQUAL(first.of[0].error, 0);
        CHECK_EQUAL(second.of[0].error, 0);
        CHECK_EQUAL(second.of[0].base_offset, first.of[0].base_offset + 1);
        CHECK(client_produce_one(&client, 4, NULL, -1, LIMIT_MS, partition, copy));
        check = bench_expect(b, ACCEPTOR, MQD_LINK_CHECK, NULL);
        refuse_records(b, &check, (int32_t[]){2, 5}, 2, "");
        first = client_take(&client);
        CHECK_EQUAL(first.of[0].error, 87);
        CHECK_EQUAL(first.of[0].record_errors, 2);
        CHECK_EQUAL(first.of[0].first_index, 2);
        CHECK_CONTAINS(first.of[0].record_message, "Compacted topic cannot accept message without key");
        bench_expect(b, ACCEPTOR, MQD_LINK_RELEASE, NULL);
        CHECK(client_produce_one(&client, 5, NULL, -1, LIMIT_MS, partition,
                                 raw_noise((struct log_batch){.attributes = 1, .body_bytes = size_bytes, .mark = 77})));
        check = bench_expect(b, ACCEPTOR, MQD_LINK_CHECK, NULL);
        refuse_records(b, &check, NULL, 0, "it is not gzip at all");
        first = client_take(&client);
        CHECK_EQUAL(first.of[0].error, 87);
        CHECK_EQUAL(first.of[0].record_errors, 0);
        CHECK_TEXT(first.of[0].message, "it is not gzip at all");
        CHECK(client_produce_one(&client, 6, NULL, -1, 30, partition,
                                 raw_noise((struct log_batch){.attributes = 1, .body_bytes = size_bytes, .mark = 77})));
        bench_expect(b, ACCEPTOR, MQD_LINK_CHECK, NULL); /* never answered */
        CHECK_EQUAL(client_take(&client).of[0].error, 7);
    }
    acceptor_restarts(b); /* what it was lent is free again */
    client_close(&client);
    client_close(&other);
    bench_stop(b);
    mqd_check_always_by_acceptor = false;
}

static void scheduled(struct bench *b)
{
    b->log_options.validation = MQD_VALIDATION_SCHEDULES;
}

BOTH(scheduled_batches_are_checked_by_the_acceptor)
{
    struct bench *b = bench_start(backend, scheduled);
    struct client client = client_open(b, 0);
    for (uint16_t codec = 0; codec <= 4; codec += 4)
        for (int32_t partition = 0; partition < 2; partition++) {
            struct raw raw =
                codec ? raw_noise((struct log_batch){.attributes = codec, .mark = 7}) : raw_records(9, 0, 10);
            struct raw copy = {memcpy(malloc(raw.size_bytes), raw.bytes, raw.size_bytes), raw.size_bytes};
            CHECK(client_produce_one(&client, 1, NULL, -1, LIMIT_MS, partition, raw));
            struct mqd_descriptor check = bench_expect(b, ACCEPTOR, MQD_LINK_CHECK, NULL);
            CHECK_EQUAL(check.flags, MQD_CHECK_SCHEDULES);
            CHECK_EQUAL(check.size_bytes, copy.size_bytes);
            bench_put(b, ACCEPTOR, 0, (struct mqd_descriptor){.kind = MQD_LINK_CHECKED, .token = check.token});
            CHECK_EQUAL(client_take(&client).of[0].error, 0);
            CHECK(client_produce_one(&client, 2, NULL, -1, LIMIT_MS, partition, copy));
            check = bench_expect(b, ACCEPTOR, MQD_LINK_CHECK, NULL);
            refuse_records(b, &check, (int32_t[]){2, 5}, 2, "record 2 of the batch cannot be scheduled");
            struct outcomes out = client_take(&client);
            CHECK_EQUAL(out.of[0].error, 87);
            CHECK_EQUAL(out.of[0].record_errors, 2);
            CHECK_EQUAL(out.of[0].first_index, 2);
            CHECK_TEXT(out.of[0].record_message, "record 2 of the batch cannot be scheduled");
            CHECK_TEXT(out.of[0].message, "record 2 of the batch cannot be scheduled");
        }
    client_close(&client);
    bench_stop(b);
}

static void both_kinds(struct bench *b)
{
    verifying(b);
    compacted(b);
}

BOTH(compressed_and_transactional)
{
    mqd_check_always_by_acceptor = true;
    struct bench *b = bench_start(backend, both_kinds);
    struct client client = client_open(b, 0);
    struct partition_batch batches[3];
    for (int32_t i = 0; i < 3; i++)
        batches[i] = (struct partition_batch){
            i, raw_noise((struct log_batch){
                   .attributes = 0x13, .producer_id = 5, .producer_epoch = 1, .body_bytes = 1000, .mark = 1})};
    CHECK(client_produce_batches(&client, 1, "the-id", -1, LIMIT_MS, batches, 3));
    for (int32_t i = 0; i < 3; i++) {
        struct mqd_descriptor check = bench_expect(b, ACCEPTOR, MQD_LINK_CHECK, NULL);
        CHECK_EQUAL(check.flags, MQD_CHECK_RECORDS);
        if (i == 1)
            refuse_records(b, &check, (int32_t[]){0}, 1, "");
        else
            bench_put(b, ACCEPTOR, 0, (struct mqd_descriptor){.kind = MQD_LINK_CHECKED, .token = check.token});
    }
    struct mqd_descriptor check = bench_expect(b, ACCEPTOR, MQD_LINK_CHECK, NULL);
    CHECK_EQUAL(check.flags, MQD_CHECK_TRANSACTION);
    struct mqd_check_transaction head;
    memcpy(&head, b->arenas[0] + check.offset, sizeof head);
    CHECK_EQUAL(head.partition_count, 2); /* one check, after all were parsed */
    /* the frame is gone by now */
    CHECK(memcmp(b->arenas[0] + check.offset + sizeof head + 2 * sizeof(struct mqd_check_partition), "the-id", 6) == 0);
    check_answer_all(b, 0, &check, 0);
    struct outcomes out = client_take(&client);
    CHECK_EQUAL(out.of[0].error, 0);
    CHECK_EQUAL(out.of[1].error, 87);
    CHECK_EQUAL(out.of[2].error, 0);
    client_close(&client);
    bench_stop(b);
    mqd_check_always_by_acceptor = false;
}
