/* tsan: long */
/* The handling of batches: responses of all kinds, retries in their original order, drops, new
 * identities, a producer's successor. */
#include "mqd_test.h"

#include <errno.h>

#include "client/producer.h"
#include "mqd_client_producer_test.h"

enum { NOT_LEADER_OR_FOLLOWER = 6, OUT_OF_ORDER_SEQUENCE_NUMBER = 45, DUPLICATE_SEQUENCE_NUMBER = 46 };

/* The first batch of an identity is sent alone; afterwards several may be in flight. */
static void acknowledge_first(struct setup *s, int32_t topic)
{
    struct mqd_delivery d;
    one(s, topic, 0);
    answer_next(s, 0, 0, 0);
    CHECK_EQUAL(mqd_producer_deliveries(s->producer, &d, 1), 1);
}

TEST(acks_0_succeeds_when_the_request_is_taken)
{
    struct setup s;
    struct mqd_producer_options options = plain();
    options.acks = 0;
    CHECK(begin(&s, "acks0", &options));
    int32_t topic = mqd_producer_topic(s.producer, "t", 1, MQD_PARTITIONER_RANDOM);
    struct mqd_record_columns records = same("x", 5, 0);
    uint64_t numbers[5];
    struct mqd_delivery d;
    mqd_producer_append(s.producer, topic, &records, numbers);
    mqd_producer_send(s.producer, 0, 1);
    CHECK_EQUAL(mqd_client_poll(s.client), 0);
    CHECK_EQUAL(mqd_producer_deliveries(s.producer, &d, 1), 0);
    CHECK(fake_next(&s.fake));
    CHECK_EQUAL(mqd_client_wait(s.client, 0), 1);
    CHECK_EQUAL(mqd_client_poll(s.client), 0);
    CHECK_EQUAL(mqd_producer_deliveries(s.producer, &d, 1), 1);
    CHECK_EQUAL(d.batch, numbers[0]);
    CHECK_EQUAL(d.base_offset, -1);
    CHECK_EQUAL(d.error, 0);
    CHECK_EQUAL(mqd_client_available_bytes(s.client), s.free_bytes);
    end(&s);
}

/* The first batch fails, and later ones because of it; the caller only decides about the first, and
 * all are resent in order with their sequence numbers. */
TEST(retry_in_the_original_order)
{
    struct setup s;
    struct mqd_producer_options options = plain();
    struct mqd_delivery d[8];
    options.producer_id = 9;
    options.producer_epoch = 0;
    CHECK(begin(&s, "retry", &options));
    int32_t topic = mqd_producer_topic(s.producer, "t", 2, MQD_PARTITIONER_RANDOM);
    uint64_t number[4];
    acknowledge_first(&s, topic);
    for (int i = 0; i < 3; i++)
        number[i] = one(&s, topic, 0);
    answer_next(&s, 1, NOT_LEADER_OR_FOLLOWER, 0);
    CHECK_EQUAL(mqd_producer_deliveries(s.producer, d, 8), 1);
    CHECK_EQUAL(d[0].batch, number[0]);
    CHECK_EQUAL(d[0].error, NOT_LEADER_OR_FOLLOWER);
    answer_next(&s, 2, OUT_OF_ORDER_SEQUENCE_NUMBER, 0);
    number[3] = one(&s, topic, 0); /* stays after them */
    CHECK_EQUAL(mqd_producer_retry(s.producer, number[0]), 0);
    CHECK(mqd_producer_retry(s.producer, number[0]) < 0);
    CHECK_EQUAL(mqd_client_poll(s.client), 0);
    answer_next(&s, 3, OUT_OF_ORDER_SEQUENCE_NUMBER, 0); /* to the first attempt */
    CHECK_EQUAL(mqd_producer_deliveries(s.producer, d, 8), 0);
    for (int i = 0; i < 4; i++)
        answer_next(&s, 1 + i, 0, 50 + i);
    CHECK_EQUAL(mqd_producer_deliveries(s.producer, d, 8), 4);
    for (int i = 0; i < 4; i++) {
        CHECK_EQUAL(d[i].batch, number[i]);
        CHECK_EQUAL(d[i].base_offset, 50 + i);
    }
    number[0] = one(&s, topic, 0);
    answer_next(&s, 5, DUPLICATE_SEQUENCE_NUMBER, 0); /* it has been written */
    CHECK_EQUAL(mqd_producer_deliveries(s.producer, d, 8), 1);
    CHECK_EQUAL(d[0].error, 0);
    CHECK_EQUAL(d[0].base_offset, -1);
    CHECK_EQUAL(mqd_client_available_bytes(s.client), s.free_bytes);
    end(&s);
}

TEST(the_first_batch_of_an_identity_is_sent_alone)
{
    struct setup s;
    struct mqd_producer_options options = plain();
    struct mqd_delivery d[8];
    options.producer_id = 9;
    options.producer_epoch = 0;
    CHECK(begin(&s, "first", &options));
    int32_t topic = mqd_producer_topic(s.producer, "t", 2, MQD_PARTITIONER_RANDOM);
    uint64_t a = one(&s, topic, 0);
    one(&s, topic, 0);
    one(&s, topic, 0);
    answer_next(&s, 0, NOT_LEADER_OR_FOLLOWER, 0);
    CHECK(!fake_next(&s.fake)); /* the second batch cannot overtake it */
    CHECK_EQUAL(mqd_producer_deliveries(s.producer, d, 8), 1);
    CHECK_EQUAL(mqd_producer_retry(s.producer, a), 0);
    CHECK_EQUAL(mqd_producer_send(s.producer, 0, 1), 0);
    answer_next(&s, 0, 0, 0);
    CHECK(fake_next(&s.fake) && fake_next(&s.fake)); /* both others */
    end(&s);
}

TEST(dropping_unsent_batches_leaves_no_gap)
{
    struct setup s;
    struct mqd_producer_options options = plain();
    struct mqd_delivery d[8];
    options.producer_id = 9;
    options.producer_epoch = 0;
    options.inflight_max = 1;
    CHECK(begin(&s, "drop", &options));
    int32_t topic = mqd_producer_topic(s.producer, "t", 1, MQD_PARTITIONER_RANDOM);
    uint64_t a = one(&s, topic, 0), b = one(&s, topic, 0), c = one(&s, topic, 0);
    uint64_t e = (uint64_t)mqd_producer_put(s.producer, topic, 0, (const uint8_t *)"x", 1, NULL, -1, NULL, 0, 1);
    CHECK_EQUAL(mqd_producer_drop(s.producer, b), 0);
    CHECK_EQUAL(mqd_producer_drop(s.producer, e), 0); /* open */
    CHECK(mqd_producer_drop(s.producer, b) < 0);
    CHECK_EQUAL(mqd_producer_outstanding_records(s.producer), 2);
    answer_next(&s, 0, 0, 0);
    answer_next(&s, 1, 0, 1);
    CHECK_EQUAL(mqd_producer_deliveries(s.producer, d, 8), 2);
    CHECK_EQUAL(d[0].batch, a);
    CHECK_EQUAL(d[1].batch, c);
    /* sent and dropped: its response is not reported, whatever it is */
    a = one(&s, topic, 0);
    CHECK_EQUAL(mqd_producer_drop(s.producer, a), 0);
    CHECK_EQUAL(mqd_producer_outstanding_records(s.producer), 0);
    answer_next(&s, 2, NOT_LEADER_OR_FOLLOWER, 0);
    CHECK_EQUAL(mqd_producer_deliveries(s.producer, d, 8), 0);
    CHECK_EQUAL(mqd_client_available_bytes(s.client), s.free_bytes);
    end(&s);
}

TEST(an_invalid_partition_is_named)
{
    struct setup s;
    struct mqd_producer_options options = plain();
    CHECK(begin(&s, "invalid", &options));
    int32_t topic = mqd_producer_topic(s.producer, "t", 2, MQD_PARTITIONER_RANDOM);
    CHECK_EQUAL(mqd_producer_put(s.producer, topic, -7, (const uint8_t *)"v", 1, NULL, -1, NULL, 0, 900), -1);
    CHECK(strstr(mqd_error_message(), "there is no partition -7: \"t\" has 2 partitions"));
    end(&s);
}

TEST(a_new_identity_begins_at_sequence_0)
{
    struct setup s;
    struct mqd_producer_options options = plain();
    struct mqd_delivery d[8];
    options.producer_id = 9;
    options.producer_epoch = 0;
    CHECK(begin(&s, "identity", &options));
    int32_t topic = mqd_producer_topic(s.producer, "t", 1, MQD_PARTITIONER_RANDOM);
    acknowledge_first(&s, topic);
    uint64_t a = one(&s, topic, 0), b = one(&s, topic, 0);
    CHECK(mqd_producer_set_identity(s.producer, 9, 1) < 0 && mqd_error_code() == MQD_E_INVALID);
    answer_next(&s, 1, NOT_LEADER_OR_FOLLOWER, 0);
    answer_next(&s, 2, OUT_OF_ORDER_SEQUENCE_NUMBER, 0);
    CHECK_EQUAL(mqd_producer_deliveries(s.producer, d, 8), 1);
    CHECK_EQUAL(mqd_producer_drop(s.producer, a), 0);
    CHECK_EQUAL(mqd_producer_set_identity(s.producer, 9, 1), 0);
    uint64_t c = one(&s, topic, 0);
    answer_next(&s, 0, 0, 0);
    CHECK_EQUAL(s.fake.batch.producer_epoch, 1);
    answer_next(&s, 1, 0, 1);
    CHECK_EQUAL(mqd_producer_deliveries(s.producer, d, 8), 2);
    CHECK_EQUAL(d[0].batch, b);
    CHECK_EQUAL(d[1].batch, c);
    end(&s);
}

/* A batch whose outcome is open after a new leader or a lost response is resent under the old
 * identity: under a new one it would be written twice. */
TEST(a_new_identity_waits_for_unknown_outcomes)
{
    static const int16_t open_ended[] = {-1, NOT_LEADER_OR_FOLLOWER, 7, 20, 56};
    for (uint32_t i = 0; i < sizeof open_ended / sizeof *open_ended; i++) {
        struct setup s;
        struct mqd_producer_options options = plain();
        struct mqd_delivery d[8];
        options.producer_id = 9;
        options.producer_epoch = 0;
        CHECK(begin(&s, "maybe", &options));
        int32_t topic = mqd_producer_topic(s.producer, "t", 2, MQD_PARTITIONER_RANDOM);
        acknowledge_first(&s, topic);
        uint64_t a = one(&s, topic, 0), b = one(&s, topic, 0), hole = one(&s, topic, 1);
        answer_next(&s, 1, open_ended[i], 0);
        answer_next(&s, 2, open_ended[i], 0); /* this one too, although it is not reported: P4 */
        CHECK(fake_next(&s.fake));
        fake_answer(&s.fake, 32, 0); /* INVALID_TIMESTAMP, of the other partition */
        CHECK_EQUAL(mqd_client_poll(s.client), 0);
        CHECK_EQUAL(mqd_producer_deliveries(s.producer, d, 8), 2);
        CHECK_EQUAL(mqd_producer_drop(s.producer, hole), 0);
        CHECK(mqd_producer_set_identity(s.producer, 10, 0) < 0);
        CHECK_EQUAL(mqd_producer_retry(s.producer, a), 0);
        CHECK_EQUAL(mqd_producer_send(s.producer, 0, 1), 0);
        answer_next(&s, 1, 19, 0); /* refused this time: the outcome of the first attempt stays unknown */
        CHECK_EQUAL(mqd_producer_deliveries(s.producer, d, 8), 1);
        CHECK(mqd_producer_set_identity(s.producer, 10, 0) < 0);
        CHECK_EQUAL(mqd_producer_retry(s.producer, a), 0);
        CHECK_EQUAL(mqd_producer_send(s.producer, 0, 1), 0);
        answer_next(&s, 1, 0, 4); /* a repetition: it had been written */
        CHECK(mqd_producer_set_identity(s.producer, 10, 0) < 0);
        answer_next(&s, 2, OUT_OF_ORDER_SEQUENCE_NUMBER, 0); /* it had not been written */
        CHECK_EQUAL(mqd_producer_deliveries(s.producer, d, 8), 2);
        CHECK_EQUAL(d[0].batch, a);
        CHECK_EQUAL(d[1].batch, b);
        CHECK_EQUAL(mqd_producer_set_identity(s.producer, 10, 0), 0);
        CHECK_EQUAL(mqd_producer_retry(s.producer, b), 0);
        CHECK_EQUAL(mqd_producer_send(s.producer, 0, 1), 0);
        answer_next(&s, 0, 0, 5);
        CHECK_EQUAL(s.fake.batch.producer_id, 10);
        CHECK_EQUAL(mqd_producer_deliveries(s.producer, d, 8), 1);
        end(&s);
    }
}

/* Responses that no broker sends: each ends the attachment. */
TEST(impossible_responses_end_the_attachment)
{
    struct mqd_producer_options options = plain();
    for (int kind = 0; kind < 6; kind++) {
        struct setup s;
        CHECK(begin(&s, "answers", &options));
        int32_t topic = mqd_producer_topic(s.producer, "t", 2, MQD_PARTITIONER_RANDOM);
        one(&s, topic, 0);
        CHECK(fake_next(&s.fake));
        uint32_t id = (uint32_t)s.fake.request.correlation_id;
        switch (kind) {
        case 0:
            fake_answer_to(&s.fake, (int32_t)(id + 1), 11, "t", 0, 0, 0);
            break;
        case 1:
            fake_answer_to(&s.fake, (int32_t)(id | 0xfffff), 11, "t", 0, 0, 0);
            break;
        case 2:
            fake_answer_to(&s.fake, (int32_t)id, 11, "t", 1, 0, 0);
            break;
        case 3:
            fake_answer_to(&s.fake, (int32_t)(id | 1u << 31), 11, "t", 0, 0, 0);
            break;
        case 4:
            fake_answer(&s.fake, 0, 0);
            fake_answer(&s.fake, 0, 0);
            break;
        case 5: {
            uint8_t cut[20] = {0, 0, 0, 16};
            mqd_put_be32(cut + 4, id);
            cut[9] = 2;
            fake_put(&s.fake, cut, sizeof cut);
        }
        }
        CHECK(mqd_client_poll(s.client) < 0);
        CHECK_EQUAL(mqd_error_code(), MQD_E_CORRUPT);
        end(&s);
    }
}

/* A closed producer: late outcomes are dropped, and its successor does not overwrite data that
 * is still being read. */
TEST(a_successor_on_the_same_attachment)
{
    struct setup s;
    struct mqd_producer_options options = plain();
    CHECK(begin(&s, "successor", &options));
    int32_t topic = mqd_producer_topic(s.producer, "t", 1, MQD_PARTITIONER_RANDOM);
    one(&s, topic, 0);
    mqd_producer_close(s.producer);
    CHECK(!mqd_producer_open(s.client, &options) && mqd_error_code() == MQD_E_FULL);
    CHECK(fake_next(&s.fake));
    s.producer = mqd_producer_open(s.client, &options);
    CHECK(s.producer);
    fake_answer(&s.fake, 0, 0);
    CHECK_EQUAL(mqd_client_poll(s.client), 0);
    struct mqd_delivery d;
    topic = mqd_producer_topic(s.producer, "t", 1, MQD_PARTITIONER_RANDOM);
    uint64_t number = one(&s, topic, 0);
    CHECK(fake_next(&s.fake));
    fake_answer(&s.fake, 0, 3);
    CHECK_EQUAL(mqd_client_poll(s.client), 0);
    CHECK_EQUAL(mqd_producer_deliveries(s.producer, &d, 1), 1);
    CHECK_EQUAL(d.batch, number);
    end(&s);
}

/* An append that processes responses leaves outcomes: a waiter in another thread has to collect
 * them. */
TEST(an_append_that_reads_responses_wakes_the_waiter)
{
    for (int16_t acks = -1; acks <= 0; acks++) {
        struct setup s;
        struct mqd_producer_options options = plain();
        struct mqd_delivery d;
        options.acks = acks;
        options.linger_us = 1000000000;
        CHECK(begin(&s, "news", &options));
        int32_t topic = mqd_producer_topic(s.producer, "t", 1, MQD_PARTITIONER_RANDOM);
        uint64_t number = one(&s, topic, 0);
        CHECK(fake_next(&s.fake));
        if (acks)
            fake_answer(&s.fake, 0, 0);
        struct mqd_record_columns records = same("0123456789", 500, 0);
        /* fills batches; processes pending responses */
        CHECK_EQUAL(mqd_producer_append(s.producer, topic, &records, NULL), 500);
        CHECK(mqd_load_acquire(&s.fake.header->reply_tail) == mqd_load_acquire(&s.fake.header->reply_head));
        CHECK_EQUAL(mqd_client_wait(s.client, 0), 1);
        CHECK_EQUAL(mqd_client_wait(s.client, -1), 1);
        CHECK_EQUAL(mqd_client_poll(s.client), 0);
        CHECK_EQUAL(mqd_producer_deliveries(s.producer, &d, 1), 1);
        CHECK_EQUAL(d.batch, number);
        CHECK_EQUAL(mqd_client_wait(s.client, 0), 0);
        end(&s);
    }
}

TEST(sequences_wrap_to_0)
{
    CHECK_EQUAL(mqd_sequence_after(0, 5), 5);
    CHECK_EQUAL(mqd_sequence_after(INT32_MAX, 1), 0);
    CHECK_EQUAL(mqd_sequence_after(INT32_MAX - 1, 4), 2);
}
