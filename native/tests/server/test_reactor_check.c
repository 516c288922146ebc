/* tsan: long */
/* Checks before a batch may be written (server/check/check.c): transactions that must be
 * verified, compressed batches for compacted topics. The test is the acceptor, and the owner of
 * partition 4. test_reactor_check_mix.c is the random version. */
#include "mqd_check_test.h"

/* ---- transactions ---- */

BOTH(one_check_for_all_partitions_of_a_request)
{
    struct bench *b = bench_start(backend, verifying);
    struct client client = client_open(b, 0);
    struct partition_batch batches[3] = {{0, raw_transactional(5, 1, 0, 0)},
                                         {1, raw_transactional(5, 1, 0, 3000)},
                                         {4, raw_transactional(5, 1, 0, 100)}};
    uint32_t from;
    CHECK(client_produce_batches(&client, 1, "my-id", -1, LIMIT_MS, batches, 3));
    struct mqd_descriptor lent = bench_expect(b, FAKE, MQD_LINK_PRODUCE, &from);
    CHECK_EQUAL(lent.b, 0);
    bench_put(b, FAKE, from,
              (struct mqd_descriptor){.kind = MQD_LINK_PRODUCED, .token = lent.token, .error = VERIFY, .a = 4711});
    struct mqd_descriptor check = bench_expect(b, ACCEPTOR, MQD_LINK_CHECK, &from);
    CHECK_EQUAL(from, 0);
    CHECK_EQUAL(check.flags, MQD_CHECK_TRANSACTION);
    CHECK_EQUAL(check.a, 8);
    struct mqd_check_transaction head;
    struct mqd_check_partition partitions[3];
    const uint8_t *payload = b->arenas[0] + check.offset;
    CHECK_EQUAL(check.size_bytes, sizeof head + sizeof partitions + 5);
    memcpy(&head, payload, sizeof head);
    memcpy(partitions, payload + sizeof head, sizeof partitions);
    CHECK_EQUAL(head.producer_id, 5);
    CHECK_EQUAL(head.producer_epoch, 1);
    CHECK_EQUAL(head.version, 8);
    CHECK_EQUAL(head.acks, -1);
    CHECK_EQUAL(head.partition_count, 3);
    CHECK_EQUAL(head.id_bytes, 5);
    CHECK(memcmp(payload + sizeof head + sizeof partitions, "my-id", 5) == 0);
    for (int i = 0; i < 3; i++) {
        CHECK(memcmp(partitions[i].topic_id, b->topic_id, 16) == 0);
        CHECK_EQUAL(partitions[i].partition_index, i == 2 ? 4 : i);
        CHECK_EQUAL(partitions[i].slot, i == 2 ? 4 : i);
    }
    check_answer_all(b, 0, &check, 0);
    lent = bench_expect(b, FAKE, MQD_LINK_PRODUCE, &from);
    CHECK_EQUAL(lent.b, 4711);
    struct mqd_batch batch;
    const char *reason;
    CHECK_EQUAL(mqd_batch_validate(b->arenas[0] + lent.offset, lent.size_bytes, &batch, &reason), 0);
    CHECK_EQUAL(batch.producer_id, 5);
    bench_put(b, FAKE, from, (struct mqd_descriptor){.kind = MQD_LINK_PRODUCED, .token = lent.token, .a = 99});
    struct outcomes out = client_take(&client);
    CHECK_EQUAL(out.count, 3);
    for (int i = 0; i < 3; i++) {
        CHECK_EQUAL(out.of[i].error, 0);
        CHECK_EQUAL(out.of[i].base_offset, i == 2 ? 99 : 0);
    }
    /* the transaction is ongoing: no check is requested */
    struct partition_batch next[2] = {{0, raw_transactional(5, 1, 1, 0)}, {1, raw_transactional(5, 1, 1, 0)}};
    CHECK(client_produce_batches(&client, 2, "my-id", -1, LIMIT_MS, next, 2));
    out = client_take(&client);
    CHECK_EQUAL(out.of[0].error, 0);
    CHECK_EQUAL(out.of[1].base_offset, 1);
    client_close(&client);
    bench_stop(b);
}

BOTH(later_requests_of_the_connection_wait_and_no_other)
{
    struct bench *b = bench_start(backend, verifying);
    struct client client = client_open(b, 0), other = client_open(b, 0);
    uint32_t from;
    for (int32_t partition = 0; partition < 2; partition++) { /* its own, and the other worker's */
        for (int32_t i = 0; i < 12; i++)
            CHECK(client_produce_one(&client, i, "id", i % 2 ? 1 : -1, LIMIT_MS, partition,
                                     raw_transactional(5, 1, i, 3000)));
        struct mqd_descriptor check = bench_expect(b, ACCEPTOR, MQD_LINK_CHECK, &from);
        for (uint64_t i = 0; i < 50; i++) {
            struct part lone = {partition, {.mark = i, .body_bytes = 20000}};
            CHECK_EQUAL(client_produce(&other, -1, &lone, 1).error[0], 0);
        }
        check_answer_all(b, 0, &check, 0);
        for (int32_t i = 0; i < 12; i++) {
            struct outcomes out = client_take(&client);
            CHECK_EQUAL(out.correlation_id, i);
            CHECK_EQUAL(out.of[0].error, 0);
            CHECK_EQUAL(out.of[0].base_offset, 50 + i);
        }
        struct mqd_descriptor none;
        while (bench_take(b, ACCEPTOR, &none, &from, 0))
            CHECK_EQUAL(none.kind, MQD_LINK_RELEASE);
    }
    client_close(&client);
    client_close(&other);
    bench_stop(b);
}

BOTH(refused_partitions_and_written_ones)
{
    struct bench *b = bench_start(backend, verifying);
    struct client client = client_open(b, 1);
    struct partition_batch batches[4];
    for (int32_t i = 0; i < 4; i++)
        batches[i] = (struct partition_batch){i, raw_transactional(5, 1, 0, 200)};
    CHECK(client_produce_batches(&client, 1, "id", 1, LIMIT_MS, batches, 4));
    struct mqd_descriptor check = bench_expect(b, ACCEPTOR, MQD_LINK_CHECK, NULL);
    check_answer(b, 1, &check, (int16_t[]){0, 48, 19, 51}, 4);
    struct outcomes out = client_take(&client);
    CHECK_EQUAL(out.of[0].error, 0);
    CHECK_EQUAL(out.of[1].error, 48);
    CHECK_TEXT(out.of[1].message, "Partition was not added to the transaction");
    CHECK_EQUAL(out.of[2].error, 19);
    CHECK_EQUAL(out.of[3].error, 51);
    CHECK_EQUAL(out.of[3].base_offset, -1);
    CHECK(client_produce_one(&client, 2, "id", 1, LIMIT_MS, 2, raw_transactional(5, 1, 0, 200))); /* one code for all */
    check = bench_expect(b, ACCEPTOR, MQD_LINK_CHECK, NULL);
    bench_put(b, ACCEPTOR, 1, (struct mqd_descriptor){.kind = MQD_LINK_CHECKED, .token = check.token, .error = 90});
    CHECK_EQUAL(client_take(&client).of[0].error, 90);
    /* answers that cannot be right */
    CHECK(client_produce_one(&client, 3, "id", 1, LIMIT_MS, 2, raw_transactional(5, 1, 0, 200)));
    check = bench_expect(b, ACCEPTOR, MQD_LINK_CHECK, NULL);
    check_answer(b, 1, &check, (int16_t[]){0, 0}, 2);
    CHECK_EQUAL(client_take(&client).of[0].error, 19);
    CHECK(client_produce_one(&client, 4, "id", 1, LIMIT_MS, 2, raw_transactional(5, 1, 0, 200)));
    check = bench_expect(b, ACCEPTOR, MQD_LINK_CHECK, NULL);
    bench_put(b, ACCEPTOR, 1,
              (struct mqd_descriptor){
                  .kind = MQD_LINK_CHECKED, .token = check.token, .offset = ARENA_BYTES - 1, .size_bytes = 2});
    CHECK_EQUAL(client_take(&client).of[0].error, 19);
    bench_put(b, ACCEPTOR, 1, (struct mqd_descriptor){.kind = MQD_LINK_CHECKED, .token = check.token});
    bench_put(b, FAKE, 1, (struct mqd_descriptor){.kind = MQD_LINK_CHECKED, .token = check.token});
    CHECK(serves(&client, 1));
    client_close(&client);
    bench_stop(b);
}

BOTH(batches_that_cannot_be_in_a_transaction)
{
    struct bench *b = bench_start(backend, verifying);
    struct client client = client_open(b, 0);
    struct outcomes out;
    struct partition_batch batches[3] = {{0, raw_transactional(5, 1, 0, 0)},
                                         {1, raw_noise((struct log_batch){.mark = 3})},
                                         {2, raw_transactional(5, 1, 0, 0)}};
    CHECK(client_produce_batches(&client, 1, NULL, 1, LIMIT_MS, batches, 3));
    out = client_take(&client);
    CHECK_EQUAL(out.of[0].error, 53);
    CHECK_EQUAL(out.of[1].error, 53); /* as in Kafka, of the whole request */
    CHECK_EQUAL(out.of[2].error, 53);
    struct partition_batch two[3] = {
        {0, raw_transactional(5, 1, 0, 0)}, {1, raw_transactional(6, 1, 0, 0)}, {2, raw_transactional(5, 2, 0, 0)}};
    CHECK(client_produce_batches(&client, 2, "id", 1, LIMIT_MS, two, 3));
    struct mqd_descriptor check = bench_expect(b, ACCEPTOR, MQD_LINK_CHECK, NULL);
    check_answer_all(b, 0, &check, 0);
    out = client_take(&client);
    CHECK_EQUAL(out.of[0].error, 0);
    CHECK_EQUAL(out.of[1].error, 49);
    CHECK_EQUAL(out.of[2].error, 49);
    /* a transactional id alone requires no check */
    CHECK(client_produce_one(&client, 3, "id", 1, LIMIT_MS, 1, raw_noise((struct log_batch){.mark = 4})));
    CHECK_EQUAL(client_take(&client).of[0].error, 0);
    CHECK(client_produce_one(&client, 4, "id", 1, LIMIT_MS, 1, raw_transactional(-1, 0, 0, 0)));
    CHECK_EQUAL(client_take(&client).of[0].error, 0); /* as in Kafka: without a producer id the flag is ignored */
    char *huge = calloc(1, 32768);
    memset(huge, 'x', 32767);
    CHECK(client_produce_one(&client, 5, huge, 1, LIMIT_MS, 3, raw_transactional(7, 1, 0, 0)));
    check = bench_expect(b, ACCEPTOR, MQD_LINK_CHECK, NULL);
    struct mqd_check_transaction head;
    memcpy(&head, b->arenas[0] + check.offset, sizeof head);
    CHECK_EQUAL(head.id_bytes, 32767);
    CHECK(memcmp(b->arenas[0] + check.offset + sizeof head + sizeof(struct mqd_check_partition), huge, 32767) == 0);
    check_answer_all(b, 0, &check, 42);
    CHECK_EQUAL(client_take(&client).of[0].error, 42);
    /* for the coordinator to refuse */
    CHECK(client_produce_one(&client, 6, "", 1, LIMIT_MS, 3, raw_transactional(7, 1, 0, 0)));
    check = bench_expect(b, ACCEPTOR, MQD_LINK_CHECK, NULL);
    check_answer_all(b, 0, &check, 42);
    CHECK_EQUAL(client_take(&client).of[0].error, 42);
    free(huge);
    client_close(&client);
    bench_stop(b);
}

BOTH(a_check_takes_too_long)
{
    struct bench *b = bench_start(backend, verifying);
    struct client client = client_open(b, 0);
    uint32_t from;
    for (int acks = -1; acks <= 1; acks += 2) {
        CHECK(client_produce_one(&client, 1, "id", acks, 50, 0, raw_transactional(5, 1, 0, 200)));
        struct mqd_descriptor check = bench_expect(b, ACCEPTOR, MQD_LINK_CHECK, &from), again;
        CHECK_EQUAL(client_take(&client).of[0].error, 19);
        CHECK(client_produce_one(&client, 2, "id", acks, LIMIT_MS, 0, raw_transactional(5, 1, 0, 200)));
        again = bench_expect(b, ACCEPTOR, MQD_LINK_CHECK, &from);
        CHECK(again.token != check.token);
        CHECK(again.offset != check.offset); /* the first is still lent */
        check_answer_all(b, 0, &check, 0);   /* too late: ignored */
        check_answer_all(b, 0, &again, 48);
        CHECK_EQUAL(client_take(&client).of[0].error, 48);
    }
    /* acks=0: reported by the end of the connection */
    CHECK(client_produce_one(&client, 3, "id", 0, LIMIT_MS, 0, raw_transactional(5, 1, 0, 200)));
    struct mqd_descriptor check = bench_expect(b, ACCEPTOR, MQD_LINK_CHECK, &from);
    check_answer_all(b, 0, &check, 48);
    CHECK_EQUAL(client_receive(&client), 0);
    client_close(&client);
    bench_stop(b);
}

BOTH(the_acceptor_restarts_and_checks_are_sent_again)
{
    struct bench *b = bench_start(backend, verifying);
    struct client client = client_open(b, 0), late = client_open(b, 0), gone = client_open(b, 0);
    uint32_t from;
    CHECK(client_produce_one(&client, 1, "id", -1, LIMIT_MS, 0, raw_transactional(5, 1, 0, 200)));
    struct mqd_descriptor check = bench_expect(b, ACCEPTOR, MQD_LINK_CHECK, &from);
    CHECK(client_produce_one(&gone, 1, "id3", -1, 1, 0, raw_transactional(7, 1, 0, 200)));
    bench_expect(b, ACCEPTOR, MQD_LINK_CHECK, &from);
    CHECK_EQUAL(client_take(&gone).of[0].error, 19);
    bench_put(b, ACCEPTOR, 0, (struct mqd_descriptor){.kind = MQD_LINK_NONE});
    acceptor_restarts(b);
    CHECK(client_produce_one(&late, 1, "id2", -1, LIMIT_MS, 0, raw_transactional(6, 1, 0, 200)));
    struct mqd_descriptor again = bench_expect(b, ACCEPTOR, MQD_LINK_CHECK, &from),
                          second = bench_expect(b, ACCEPTOR, MQD_LINK_CHECK, &from), none;
    CHECK(again.token != check.token);
    CHECK_EQUAL(again.error, (int32_t)(mqd_endpoint_generation(b->control, ACCEPTOR) & 0x7fffffff));
    check_answer_all(b, 0, &second, 0);
    check_answer_all(b, 0, &again, 0);
    CHECK_EQUAL(client_take(&client).of[0].error, 0);
    CHECK_EQUAL(client_take(&late).of[0].error, 0);
    while (bench_take(b, ACCEPTOR, &none, &from, 20)) /* what no request waits for is not requested again */
        CHECK_EQUAL(none.kind, MQD_LINK_RELEASE);
    client_close(&client);
    client_close(&late);
    client_close(&gone);
    bench_stop(b);
}

BOTH(the_owner_dies_while_a_batch_is_verified)
{
    struct bench *b = bench_start(backend, verifying);
    struct client client = client_open(b, 0);
    uint32_t from;
    CHECK(client_produce_one(&client, 1, "id", 1, LIMIT_MS, 4, raw_transactional(5, 1, 0, 200)));
    struct mqd_descriptor lent = bench_expect(b, FAKE, MQD_LINK_PRODUCE, &from);
    bench_put(b, FAKE, from,
              (struct mqd_descriptor){.kind = MQD_LINK_PRODUCED, .token = lent.token, .error = VERIFY, .a = 1});
    struct mqd_descriptor check = bench_expect(b, ACCEPTOR, MQD_LINK_CHECK, &from);
    mqd_endpoint_set_state(b->control, FAKE, MQD_PROCESS_DEAD, 0);
    CHECK_EQUAL(mqd_reactor_endpoint_died(b->reactors[0], ++b->token, FAKE), 0);
    bench_done(b, 0, b->token);
    check_answer_all(b, 0, &check, 0);
    CHECK_EQUAL(client_take(&client).of[0].error, 6);
    mqd_endpoint_set_state(b->control, FAKE, MQD_PROCESS_RUNNING, getpid());
    mqd_endpoint_close(b->endpoints[FAKE]);
    b->endpoints[FAKE] = mqd_endpoint_open(b->control, b->links, FAKE, ENDPOINTS, b->eventfds);
    bench_fake_slot(b);
    /* an owner that forgets the guard that it returned: the client must retry */
    CHECK(client_produce_one(&client, 2, "id", 1, LIMIT_MS, 4, raw_transactional(5, 1, 0, 200)));
    for (int i = 0; i < 2; i++) {
        lent = bench_expect(b, FAKE, MQD_LINK_PRODUCE, &from);
        bench_put(b, FAKE, from,
                  (struct mqd_descriptor){.kind = MQD_LINK_PRODUCED, .token = lent.token, .error = VERIFY, .a = 7});
        if (i)
            break;
        check = bench_expect(b, ACCEPTOR, MQD_LINK_CHECK, &from);
        check_answer_all(b, 0, &check, 0);
    }
    CHECK_EQUAL(client_take(&client).of[0].error, 19);
    /* dies while a batch is with it */
    CHECK(client_produce_one(&client, 3, "id", 1, LIMIT_MS, 4, raw_transactional(5, 1, 0, 200)));
    bench_expect(b, FAKE, MQD_LINK_PRODUCE, &from);
    mqd_endpoint_set_state(b->control, FAKE, MQD_PROCESS_DEAD, 0);
    CHECK_EQUAL(mqd_reactor_endpoint_died(b->reactors[0], ++b->token, FAKE), 0);
    bench_done(b, 0, b->token);
    CHECK_EQUAL(client_take(&client).of[0].error, 7);
    CHECK(serves(&client, 1));
    client_close(&client);
    bench_stop(b);
}

BOTH(a_topic_is_deleted_while_a_batch_is_verified)
{
    struct bench *b = bench_start(backend, verifying);
    struct client client = client_open(b, 0);
    CHECK(client_produce_one(&client, 1, "id", 1, LIMIT_MS, 0, raw_transactional(5, 1, 0, 200)));
    struct mqd_descriptor check = bench_expect(b, ACCEPTOR, MQD_LINK_CHECK, NULL);
    static const uint32_t turned[PARTITIONS] = {2, 1, 0, 3, 4};
    uint8_t id[16] = {9};
    bench_topic_remove(b, b->topic_id);
    bench_topic_put(b, id, "quick", turned, PARTITIONS); /* the slot is another partition's now */
    check_answer_all(b, 0, &check, 0);
    CHECK_EQUAL(client_take(&client).of[0].error, 3);
    struct part lone = {2, {.mark = 1}};
    CHECK_EQUAL(client_produce(&client, 1, &lone, 1).base_offset[0], 0);
    client_close(&client);
    bench_stop(b);
}

BOTH(clients_leave_and_the_broker_stops_while_batches_are_verified)
{
    struct bench *b = bench_start(backend, verifying);
    struct client leaving = client_open(b, 0), other = client_open(b, 0);
    struct linger at_once = {1, 0};
    CHECK(client_produce_one(&leaving, 1, "id", -1, LIMIT_MS, 0, raw_transactional(5, 1, 0, 200)));
    struct mqd_descriptor check = bench_expect(b, ACCEPTOR, MQD_LINK_CHECK, NULL);
    setsockopt(leaving.fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
    client_close(&leaving);
    for (uint64_t i = 0; i < 64; i++)
        CHECK(serves(&other, i));
    check_answer_all(b, 0, &check, 0);
    for (int i = 0; i < 40; i++) {
        leaving = client_open(b, i % 2);
        /* one parked, one with its owner */
        struct partition_batch batches[2] = {{0, raw_transactional(100 + i, 1, 0, 200)},
                                             {4, raw_transactional(100 + i, 1, 0, 100000)}};
        CHECK(client_produce_batches(&leaving, 1, "id", -1, LIMIT_MS, batches, 2));
        if (i % 3)
            bench_expect(b, FAKE, MQD_LINK_PRODUCE, NULL);
        client_close(&leaving);
    }
    CHECK(serves(&other, 99));
    client_close(&other);
    bench_stop(b);
}

BOTH(batches_that_wait_do_not_take_the_memory_of_others)
{
    struct bench *b = bench_start(backend, verifying);
    enum { COUNT = 200 };
    static struct client clients[COUNT];
    struct client other = client_open(b, 0);
    uint32_t requested = 0, refused = 0, from;
    struct mqd_descriptor sent_checks[COUNT];
    /* four times what the control arena holds; large ones in runs of their own */
    for (uint32_t i = 0; i < COUNT; i++) {
        clients[i] = client_open(b, 0);
        CHECK(client_produce_one(&clients[i], 1, "id", 1, LIMIT_MS, 0,
                                 raw_transactional(100 + i, 1, 0, i % 8 == 7 ? 150000 : 16000)));
    }
    for (uint64_t i = 0; i < 100; i++)
        CHECK(serves(&other, i));
    while (requested + refused < COUNT && !test_failed) {
        for (uint32_t i = 0; i < COUNT; i++) {
            struct pollfd wait = {clients[i].fd, POLLIN, 0};
            if (clients[i].fd < 0 || poll(&wait, 1, 0) != 1)
                continue;
            struct outcomes out = client_take(&clients[i]);
            CHECK_EQUAL(out.of[0].error, 19);
            client_close(&clients[i]);
            refused++;
        }
        while (bench_take(b, ACCEPTOR, &sent_checks[requested], &from, 1))
            requested += sent_checks[requested].kind == MQD_LINK_CHECK;
    }
    CHECK(requested > 20 && refused > 20);
    for (uint32_t i = 0; i < requested; i++)
        check_answer_all(b, 0, &sent_checks[i], 0);
    for (uint32_t i = 0; i < COUNT; i++)
        if (clients[i].fd >= 0) {
            CHECK_EQUAL(client_take(&clients[i]).of[0].error, 0);
            CHECK(client_produce_one(&clients[i], 2, "id", 1, LIMIT_MS, 0, raw_transactional(100 + i, 1, 1, 16000)));
            CHECK_EQUAL(client_take(&clients[i]).of[0].error, 0);
            client_close(&clients[i]);
        }
    client_close(&other);
    bench_stop(b);
}

BOTH(a_full_ring_delays_and_loses_nothing)
{
    struct bench *b = bench_start(backend, verifying);
    struct client client = client_open(b, 0), other = client_open(b, 0);
    struct mqd_descriptor check;
    uint32_t from, count = 0;
    /* answers without a request: each is returned by a note, more than the ring holds */
    for (int i = 0; i < 1500; i++)
        bench_put(b, ACCEPTOR, 0,
                  (struct mqd_descriptor){.kind = MQD_LINK_RESPONSE, .token = UINT64_MAX, .size_bytes = 4});
    CHECK(client_produce_one(&client, 1, "id", 1, LIMIT_MS, 0, raw_transactional(5, 1, 0, 200)));
    for (uint64_t i = 0; i < 20; i++)
        CHECK(serves(&other, i));
    do {
        CHECK(bench_take(b, ACCEPTOR, &check, &from, LIMIT_MS));
        count++;
    } while (check.kind != MQD_LINK_CHECK);
    CHECK(count > 1024);
    check_answer_all(b, 0, &check, 0);
    CHECK_EQUAL(client_take(&client).of[0].error, 0);
    client_close(&client);
    client_close(&other);
    bench_stop(b);
}
