/* For test_client_producer.c and test_client_outcomes.c: a small attachment with a producer on it,
 * and batches of one record. */
#ifndef MQD_CLIENT_PRODUCER_TEST_H
#define MQD_CLIENT_PRODUCER_TEST_H

#include "mqd_client_test.h"

static struct mqd_client_options small(void)
{
    return (struct mqd_client_options){
        .client_id = "test", .data_bytes = 128 << 10, .reply_bytes = 4096, .submission_count = 64, .timeout_ms = 5000};
}

static struct mqd_producer_options plain(void)
{
    return (struct mqd_producer_options){.acks = -1,
                                         .producer_epoch = -1,
                                         .request_timeout_ms = 30000,
                                         .producer_id = -1,
                                         .batch_bytes = 2000,
                                         .inflight_max = 5,
                                         .produce_version = 11};
}

struct setup {
    struct fake fake;
    struct mqd_client_options client_options;
    struct mqd_client *client;
    struct mqd_producer *producer;
    uint64_t free_bytes;
};

static bool begin(struct setup *s, const char *name, const struct mqd_producer_options *options)
{
    s->client_options = small();
    fake_open(&s->fake, name);
    s->client = fake_attach(&s->fake, &s->client_options);
    CHECK_OR(s->client, return false);
    s->producer = mqd_producer_open(s->client, options);
    CHECK_OR(s->producer, return false);
    s->free_bytes = mqd_client_available_bytes(s->client);
    return true;
}

static void end(struct setup *s)
{
    mqd_producer_close(s->producer);
    mqd_client_close(s->client);
    fake_close(&s->fake);
}

__attribute__((unused)) static struct mqd_record_columns same(const char *value, uint32_t count, int32_t partition)
{
    static uint8_t many[1 << 20];
    size_t size = strlen(value);
    for (uint32_t i = 0; i < count; i++)
        memcpy(many + i * size, value, size);
    return (struct mqd_record_columns){.count = count,
                                       .values = many,
                                       .fixed_value_bytes = (int32_t)size,
                                       .partition = partition,
                                       .timestamp_ms = 1000};
}

__attribute__((unused)) static uint64_t one(struct setup *s, int32_t topic, int32_t partition)
{
    uint64_t number =
        (uint64_t)mqd_producer_put(s->producer, topic, partition, (const uint8_t *)"x", 1, NULL, -1, NULL, 0, 1);
    mqd_producer_send(s->producer, 0, 1);
    return number;
}

__attribute__((unused)) static void answer_next(struct setup *s, int32_t sequence, int16_t error, int64_t base_offset)
{
    CHECK(fake_next(&s->fake));
    CHECK_EQUAL(s->fake.batch.base_sequence, sequence);
    fake_answer(&s->fake, error, base_offset);
    CHECK_EQUAL(mqd_client_poll(s->client), 0);
}

#endif
