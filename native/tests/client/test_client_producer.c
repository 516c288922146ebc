/* tsan */
/* The producer against a worker that the test drives: the content of frames, when they are sent,
 * and how much memory they take. */
#include "mqd_test.h"

#include <errno.h>

#include "base/varint.h"
#include "client/memory.h"
#include "mqd_client_producer_test.h"

/* ---- the content of frames ---- */

#define RECORDS_MAX 2000
struct columns {
    struct mqd_record_columns view;
    uint8_t values[400000], keys[100000], headers[100000];
    int32_t value_bytes[RECORDS_MAX], key_bytes[RECORDS_MAX], header_bytes[RECORDS_MAX], partitions[RECORDS_MAX];
    int64_t timestamps[RECORDS_MAX];
    uint64_t batches[RECORDS_MAX];
};

static int32_t random_size(uint64_t *seed, uint32_t most)
{
    uint32_t kind = (uint32_t)(test_random(seed) % 10);
    return kind == 0 ? -1 : kind == 1 ? 0 : (int32_t)(test_random(seed) % (kind == 2 ? most : 70));
}

/* Header sections: a count, then names and values of a byte each. */
static int32_t put_headers(uint8_t *at, uint64_t *seed)
{
    uint32_t count = (uint32_t)(test_random(seed) % 3);
    *at++ = (uint8_t)(2 * count);
    for (uint32_t i = 0; i < count; i++) {
        const uint8_t header[] = {2, 'n', 2, (uint8_t)test_random(seed)};
        memcpy(at, header, sizeof header);
        at += sizeof header;
    }
    return (int32_t)(1 + 4 * count);
}

static void columns_fill(struct columns *c, uint64_t *seed, uint32_t count, uint32_t partitions)
{
    uint8_t *value = c->values, *key = c->keys, *headers = c->headers;
    for (uint32_t i = 0; i < count; i++) {
        c->value_bytes[i] = random_size(seed, 1500);
        c->key_bytes[i] = random_size(seed, 300);
        for (int32_t j = 0; j < c->value_bytes[i]; j++)
            *value++ = (uint8_t)test_random(seed);
        for (int32_t j = 0; j < c->key_bytes[i]; j++)
            *key++ = (uint8_t)test_random(seed);
        c->header_bytes[i] = put_headers(headers, seed);
        headers += c->header_bytes[i];
        c->partitions[i] = (int32_t)(test_random(seed) % partitions);
        c->timestamps[i] = test_random(seed) % 20 ? 1700000000000 + (int64_t)(test_random(seed) % 1000)
                                                  : (int64_t)test_random(seed) >> 2;
    }
    c->view = (struct mqd_record_columns){.count = count,
                                          .values = c->values,
                                          .value_bytes = c->value_bytes,
                                          .keys = c->keys,
                                          .key_bytes = c->key_bytes,
                                          .headers = c->headers,
                                          .header_bytes = c->header_bytes,
                                          .partitions = c->partitions,
                                          .timestamps_ms = c->timestamps};
}

static const uint8_t *check_blob(const uint8_t *at, const uint8_t *end, const uint8_t *bytes, int32_t size_bytes)
{
    int64_t size;
    at = mqd_varint_size(at, end, &size);
    CHECK_OR(at && size == size_bytes, return NULL);
    CHECK_OR(size <= 0 || memcmp(at, bytes, (size_t)size) == 0, return NULL);
    return at + (size > 0 ? size : 0);
}

/* The batch of `fake` contains the next records of its partition, complete and in order.
 * next[p]: the first record of the columns not yet seen in partition p. */
static void check_batch(struct fake *fake, const struct columns *c, uint32_t *next)
{
    int32_t partition = fake->partition.partition_index;
    const uint8_t *at = fake->partition.records + MQD_BATCH_HEADER_BYTES,
                  *end = fake->partition.records + fake->partition.size_bytes;
    int64_t most = INT64_MIN;
    for (int32_t i = 0; i < fake->batch.record_count; i++) {
        uint32_t record = next[partition];
        while (record < c->view.count && c->partitions[record] != partition)
            record++;
        CHECK(record < c->view.count);
        const uint8_t *value = c->values, *key = c->keys, *headers = c->headers;
        for (uint32_t j = 0; j < record; j++) {
            value += c->value_bytes[j] > 0 ? c->value_bytes[j] : 0;
            key += c->key_bytes[j] > 0 ? c->key_bytes[j] : 0;
            headers += c->header_bytes[j];
        }
        int64_t size, timestamp_delta, offset_delta;
        at = mqd_varint(at, end, &size);
        CHECK(at && size > 0 && size <= end - at);
        const uint8_t *record_end = at + size;
        CHECK_EQUAL(*at++, 0);
        at = mqd_varlong(at, record_end, &timestamp_delta);
        CHECK(at);
        CHECK_EQUAL(fake->batch.base_timestamp_ms + timestamp_delta, c->timestamps[record]);
        at = mqd_varint(at, record_end, &offset_delta);
        CHECK(at);
        CHECK_EQUAL(offset_delta, i);
        at = check_blob(at, record_end, key, c->key_bytes[record]);
        CHECK(at);
        at = check_blob(at, record_end, value, c->value_bytes[record]);
        CHECK(at);
        CHECK_EQUAL(record_end - at, c->header_bytes[record]);
        CHECK(memcmp(at, headers, (size_t)c->header_bytes[record]) == 0);
        at = record_end;
        most = c->timestamps[record] > most ? c->timestamps[record] : most;
        next[partition] = record + 1;
    }
    CHECK(at == end);
    CHECK_EQUAL(fake->batch.max_timestamp_ms, most);
    CHECK_EQUAL(fake->batch.partition_leader_epoch, -1);
}

TEST(batches_contain_the_appended_records)
{
    static struct columns c;
    struct setup s;
    uint64_t seed = 11;
    struct mqd_producer_options options = plain();
    for (int round = 0; round < (test_long() ? 40 : 4); round++) {
        options.produce_version = (int16_t)(9 + round % 4);
        options.transactional_id = round % 2 ? "tx" : NULL;
        options.producer_id = round % 2 ? 77 : -1;
        options.producer_epoch = round % 2 ? 3 : -1;
        CHECK(begin(&s, "hold", &options));
        int32_t topic = mqd_producer_topic(s.producer, "things", 3, MQD_PARTITIONER_CONSISTENT);
        CHECK_EQUAL(topic, 0);
        columns_fill(&c, &seed, 300, 3);
        uint32_t next[3] = {0}, taken = 0, batches = 0, acknowledged = 0;
        int32_t sequence[3] = {0};
        for (int step = 0; step < 1000 && (taken < c.view.count || mqd_producer_outstanding_records(s.producer));
             step++) {
            struct mqd_record_columns rest = c.view;
            uint32_t value = 0, key = 0, header = 0;
            for (uint32_t i = 0; i < taken; i++) {
                value += c.value_bytes[i] > 0 ? (uint32_t)c.value_bytes[i] : 0;
                key += c.key_bytes[i] > 0 ? (uint32_t)c.key_bytes[i] : 0;
                header += (uint32_t)c.header_bytes[i];
            }
            rest.count -= taken;
            rest.values += value;
            rest.value_bytes += taken;
            rest.keys += key;
            rest.key_bytes += taken;
            rest.headers += header;
            rest.header_bytes += taken;
            rest.partitions += taken;
            rest.timestamps_ms += taken;
            int64_t more = mqd_producer_append(s.producer, topic, &rest, c.batches + taken);
            CHECK(more >= 0);
            taken += (uint32_t)more;
            if (taken == c.view.count)
                CHECK_EQUAL(mqd_producer_send(s.producer, 0, 1), 0);
            while (fake_next(&s.fake)) {
                check_batch(&s.fake, &c, next);
                CHECK_TEXT(s.fake.topic, "things");
                CHECK_EQUAL(s.fake.request.api_version, options.produce_version);
                CHECK(memcmp(s.fake.request.client_id, "test", 4) == 0);
                CHECK_EQUAL(s.fake.produce.transactional_id.size_bytes, round % 2 ? 2 : -1);
                CHECK_EQUAL(s.fake.produce.required_acks, -1);
                CHECK_EQUAL(s.fake.produce.timeout_ms, 30000);
                CHECK_EQUAL(s.fake.batch.attributes, round % 2 ? 16 : 0);
                CHECK_EQUAL(s.fake.batch.producer_id, options.producer_id);
                CHECK_EQUAL(s.fake.batch.producer_epoch, options.producer_epoch);
                CHECK_EQUAL(s.fake.batch.base_sequence, round % 2 ? sequence[s.fake.partition.partition_index] : -1);
                sequence[s.fake.partition.partition_index] += s.fake.batch.record_count;
                fake_answer(&s.fake, 0, 1000 + batches++);
            }
            CHECK_EQUAL(mqd_client_poll(s.client), 0);
            struct mqd_delivery d[10];
            uint32_t count;
            while ((count = mqd_producer_deliveries(s.producer, d, 10)))
                for (uint32_t i = 0; i < count; i++, acknowledged++) {
                    CHECK_EQUAL(d[i].error, 0);
                    CHECK_EQUAL(d[i].base_offset, 1000 + acknowledged);
                    uint32_t records = 0;
                    for (uint32_t j = 0; j < taken; j++)
                        records += c.batches[j] == d[i].batch;
                    CHECK_EQUAL(records, d[i].record_count);
                }
        }
        CHECK_EQUAL(taken, c.view.count);
        CHECK_EQUAL(acknowledged, batches);
        CHECK_EQUAL(mqd_producer_outstanding_records(s.producer), 0);
        CHECK_EQUAL(mqd_client_available_bytes(s.client), s.free_bytes);
        end(&s);
    }
}

TEST(columns_that_are_the_same_for_all)
{
    struct setup s;
    struct mqd_producer_options options = plain();
    CHECK(begin(&s, "same", &options));
    int32_t topic = mqd_producer_topic(s.producer, "t", 1, MQD_PARTITIONER_RANDOM);
    struct mqd_record_columns records = same("hello", 3, 0);
    CHECK_EQUAL(mqd_producer_append(s.producer, topic, &records, NULL), 3);
    CHECK(mqd_producer_put(s.producer, topic, -1, (const uint8_t *)"v", 1, (const uint8_t *)"k", 1, NULL, 0, 900) > 0);
    records = (struct mqd_record_columns){.count = 2, .fixed_value_bytes = -1, .timestamp_ms = 1000};
    CHECK_EQUAL(mqd_producer_append(s.producer, topic, &records, NULL), 2);
    CHECK(!fake_peek(&s.fake));
    CHECK_EQUAL(mqd_producer_send(s.producer, 0, 1), 0);
    CHECK(fake_next(&s.fake));
    CHECK_EQUAL(s.fake.batch.record_count, 6);
    CHECK_EQUAL(s.fake.batch.max_timestamp_ms, 1000);
    static const uint8_t want[] = {22, 0, 0, 0, 1, 10, 'h', 'e', 'l', 'l', 'o', 0};
    CHECK(memcmp(s.fake.partition.records + 61, want, sizeof want) == 0);
    static const uint8_t keyed[] = {18, 0, 0xc7, 1, 6, 2, 'k', 2, 'v', 0};
    CHECK(memcmp(s.fake.partition.records + 61 + 36, keyed, sizeof keyed) == 0);
    static const uint8_t null[] = {12, 0, 0, 8, 1, 1, 0};
    CHECK(memcmp(s.fake.partition.records + 61 + 46, null, sizeof null) == 0);
    end(&s);
}

/* Offset deltas of one, two and three bytes, values shorter and longer than the unit of copying;
 * the first record has an earlier or a later timestamp. */
TEST(similar_records_across_all_sizes_of_their_deltas)
{
    static const int32_t sizes[] = {1, 4, 7, 8, 15, 16, 63, 64, 100};
    static uint8_t values[20000 * 100];
    for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
        struct setup s = {.client_options = small()};
        struct mqd_producer_options options = plain();
        options.batch_bytes = 4 << 20;
        options.batch_records_max = 20000;
        s.client_options.data_bytes = 40 << 20;
        fake_open(&s.fake, "alike");
        s.client = fake_attach(&s.fake, &s.client_options);
        CHECK(s.client);
        s.producer = mqd_producer_open(s.client, &options);
        int32_t topic = mqd_producer_topic(s.producer, "t", 1, MQD_PARTITIONER_RANDOM), size = sizes[k];
        uint64_t seed = k, first_ms = k % 3 ? 5000 : 4000;
        for (int32_t i = 0; i < 20000 * size; i++)
            values[i] = (uint8_t)test_random(&seed);
        CHECK(mqd_producer_put(s.producer, topic, 0, values, size, NULL, -1, NULL, 0, (int64_t)first_ms) > 0);
        for (uint32_t done = 1; done < 20000;) {
            uint32_t count = 1 + (uint32_t)(test_random(&seed) % 3000);
            count = count < 20000 - done ? count : 20000 - done;
            struct mqd_record_columns columns = {.count = count,
                                                 .values = values + (size_t)done * (size_t)size,
                                                 .fixed_value_bytes = size,
                                                 .partition = k % 2 ? -1 : 0,
                                                 .timestamp_ms = 4321};
            CHECK_EQUAL(mqd_producer_append(s.producer, topic, &columns, NULL), count);
            done += count;
        }
        CHECK_EQUAL(mqd_producer_send(s.producer, 0, 1), 0);
        CHECK(fake_next(&s.fake));
        CHECK_EQUAL(s.fake.batch.record_count, 20000);
        CHECK_EQUAL(s.fake.batch.max_timestamp_ms, first_ms > 4321 ? first_ms : 4321);
        const uint8_t *at = s.fake.partition.records + MQD_BATCH_HEADER_BYTES,
                      *last = s.fake.partition.records + s.fake.partition.size_bytes;
        for (int32_t i = 0; i < 20000; i++) {
            int64_t bytes, timestamp_delta, offset_delta, key;
            at = mqd_varint(at, last, &bytes);
            CHECK(at);
            const uint8_t *next = at + bytes;
            CHECK_EQUAL(*at++, 0);
            at = mqd_varint(mqd_varlong(at, next, &timestamp_delta), next, &offset_delta);
            CHECK_EQUAL(timestamp_delta, i ? 4321 - (int64_t)first_ms : 0);
            CHECK_EQUAL(offset_delta, i);
            at = check_blob(mqd_varint(at, next, &key), next, values + (size_t)i * (size_t)size, size);
            CHECK_EQUAL(key, -1);
            CHECK(at && at + 1 == next && *at == 0);
            at = next;
        }
        CHECK(at == last);
        end(&s);
    }
}

TEST(linger_closes_the_oldest_first)
{
    struct setup s;
    struct mqd_producer_options options = plain();
    options.linger_us = 1000000;
    CHECK(begin(&s, "linger", &options));
    int32_t topic = mqd_producer_topic(s.producer, "t", 2, MQD_PARTITIONER_RANDOM);
    CHECK_EQUAL(mqd_producer_next_send_us(s.producer), INT64_MAX);
    struct mqd_record_columns records = same("a", 1, 1);
    mqd_producer_append(s.producer, topic, &records, NULL);
    int64_t first = mqd_producer_next_send_us(s.producer);
    int64_t now = test_now_ns() / 1000;
    CHECK(first > now && first <= now + 1000000);
    while (test_now_ns() / 1000 < now + 2)
        ;
    records.partition = 0;
    mqd_producer_append(s.producer, topic, &records, NULL);
    CHECK_EQUAL(mqd_producer_send(s.producer, first - 1, 0), 0);
    CHECK(!fake_peek(&s.fake));
    CHECK_EQUAL(mqd_producer_send(s.producer, first, 0), 0);
    CHECK(fake_next(&s.fake));
    CHECK_EQUAL(s.fake.partition.partition_index, 1);
    CHECK(!fake_peek(&s.fake));
    CHECK(mqd_producer_next_send_us(s.producer) > first);
    end(&s);
}

/* ---- bounds ---- */

TEST(inflight_is_bounded_and_order_kept)
{
    struct setup s;
    struct mqd_producer_options options = plain();
    options.inflight_max = 3;
    CHECK(begin(&s, "inflight", &options));
    int32_t topic = mqd_producer_topic(s.producer, "t", 1, MQD_PARTITIONER_RANDOM);
    uint64_t numbers[10];
    for (int i = 0; i < 10; i++) {
        struct mqd_record_columns records = same("x", 1, 0);
        CHECK_EQUAL(mqd_producer_append(s.producer, topic, &records, numbers + i), 1);
        CHECK_EQUAL(mqd_producer_send(s.producer, 0, 1), 0);
    }
    for (int i = 0; i < 10; i++) {
        int there = 0;
        CHECK(fake_next(&s.fake));
        while (s.fake.head + (uint64_t)there < mqd_load_acquire(&s.fake.header->submission_tail))
            there++;
        CHECK_EQUAL(there, i <= 7 ? 2 : 9 - i);
        fake_answer(&s.fake, 0, i);
        CHECK_EQUAL(mqd_client_poll(s.client), 0);
        struct mqd_delivery d;
        CHECK_EQUAL(mqd_producer_deliveries(s.producer, &d, 1), 1);
        CHECK_EQUAL(d.batch, numbers[i]);
        CHECK_EQUAL(d.base_offset, i);
    }
    CHECK_EQUAL(mqd_client_available_bytes(s.client), s.free_bytes);
    end(&s);
}

/* The broker would end the attachment for a larger one, whatever batch_bytes is. */
TEST(no_request_is_larger_than_the_broker_takes)
{
    enum { REQUEST_BYTES_MAX = 5000 };
    struct setup s = {.client_options = small()};
    struct mqd_producer_options options = plain();
    static uint8_t value[REQUEST_BYTES_MAX];
    options.batch_bytes = 50000;
    options.linger_us = 1000000;
    fake_open(&s.fake, "carried");
    s.fake.request_bytes_max = REQUEST_BYTES_MAX;
    s.client = fake_attach(&s.fake, &s.client_options);
    CHECK_OR(s.client, return);
    s.producer = mqd_producer_open(s.client, &options);
    CHECK_OR(s.producer, return);
    int32_t topic = mqd_producer_topic(s.producer, "t", 1, MQD_PARTITIONER_RANDOM), count = 0;
    CHECK_EQUAL(mqd_producer_put(s.producer, topic, 0, value, sizeof value, NULL, -1, NULL, 0, 1), -1);
    CHECK_EQUAL(mqd_error_code(), MQD_E_INVALID);
    CHECK(strstr(mqd_error_message(), "socket.request.max.bytes=5000"));
    for (int i = 0; i < 40; i++)
        CHECK(mqd_producer_put(s.producer, topic, 0, value, 300, NULL, -1, NULL, 0, 1) > 0);
    for (uint32_t largest = 0; count < 40; count += s.fake.batch.record_count) {
        mqd_producer_send(s.producer, 0, 1);
        CHECK_OR(fake_next(&s.fake), break);
        largest = s.fake.frame_bytes > largest ? s.fake.frame_bytes : largest;
        CHECK(largest <= REQUEST_BYTES_MAX);
        fake_answer(&s.fake, 0, count);
        CHECK_EQUAL(mqd_client_poll(s.client), 0);
    }
    CHECK_EQUAL(count, 40);
    end(&s);
}

TEST(a_full_buffer_refuses_then_accepts_again)
{
    struct setup s;
    struct mqd_producer_options options = plain();
    CHECK(begin(&s, "full", &options));
    int32_t topic = mqd_producer_topic(s.producer, "t", 4, MQD_PARTITIONER_RANDOM);
    static uint8_t value[100000];
    uint64_t appended = 0, got = 0;
    for (int round = 0; round < 50; round++) {
        int64_t result;
        while ((result = mqd_producer_put(s.producer, topic, (int32_t)(appended % 4), value,
                                          (int32_t)(appended * 37 % 900), NULL, -1, NULL, 0, 1)) > 0)
            appended++;
        CHECK_EQUAL(result, 0);
        CHECK(mqd_client_available_bytes(s.client) < 4096);
        int answers = 0;
        mqd_producer_send(s.producer, 0, 1);
        while (answers < 1 + round % 7 && fake_next(&s.fake)) {
            got += (uint64_t)s.fake.batch.record_count;
            fake_answer(&s.fake, 0, 0);
            answers++;
        }
        CHECK(answers > 0);
        struct mqd_delivery d[100];
        mqd_client_poll(s.client);
        mqd_producer_deliveries(s.producer, d, 100);
    }
    /* a record larger than a batch gets its own batch; one that can never fit is refused, not
     * "full" */
    while (mqd_producer_put(s.producer, topic, 0, value, 60000, NULL, -1, NULL, 0, 1) == 0) {
        mqd_producer_send(s.producer, 0, 1);
        CHECK(fake_next(&s.fake));
        got += (uint64_t)s.fake.batch.record_count;
        fake_answer(&s.fake, 0, 0);
        struct mqd_delivery d[100];
        mqd_client_poll(s.client);
        mqd_producer_deliveries(s.producer, d, 100);
    }
    appended++;
    CHECK(mqd_producer_put(s.producer, topic, 0, value, (int32_t)sizeof value + 20000, NULL, -1, NULL, 0, 1) < 0);
    CHECK_EQUAL(mqd_error_code(), MQD_E_INVALID);
    CHECK_EQUAL(mqd_producer_send(s.producer, 0, 1), 0);
    while (mqd_producer_outstanding_records(s.producer)) {
        if (fake_next(&s.fake)) {
            got += (uint64_t)s.fake.batch.record_count;
            fake_answer(&s.fake, 0, 0);
        }
        CHECK_EQUAL(mqd_client_poll(s.client), 0);
    }
    CHECK_EQUAL(got, appended);
    CHECK_EQUAL(mqd_client_available_bytes(s.client), s.free_bytes);
    end(&s);
}

/* A worker that is slower than the producer: each response frees space for a whole batch, and
 * the next batch fills it instead of being split into small ones. */
TEST(back_pressure_does_not_make_batches_small)
{
    for (int32_t partitions = 1; partitions <= 4; partitions += 3) {
        struct setup s;
        struct mqd_producer_options options = plain();
        options.batch_bytes = 6000;
        options.inflight_max = 1000;
        options.linger_us = 1000000;
        CHECK(begin(&s, "pressure", &options));
        int32_t topic = mqd_producer_topic(s.producer, "t", partitions, MQD_PARTITIONER_RANDOM);
        uint64_t records = 0, batches = 0;
        static uint8_t value[90];
        for (uint32_t n = 0; batches < 400;) {
            while (mqd_producer_put(s.producer, topic, (int32_t)(n % (uint32_t)partitions), value, sizeof value, NULL,
                                    -1, NULL, 0, 1) > 0)
                n++;
            CHECK_EQUAL(mqd_producer_send(s.producer, test_now_ns() / 1000, 0), 0);
            CHECK(fake_next(&s.fake));
            fake_answer(&s.fake, 0, 0);
            CHECK_EQUAL(mqd_client_poll(s.client), 0);
            struct mqd_delivery d;
            CHECK_EQUAL(mqd_producer_deliveries(s.producer, &d, 1), 1);
            records += d.record_count;
            batches++;
        }
        CHECK(records / batches >= 30); /* of 58 */
        end(&s);
    }
}

TEST(a_buffer_bound_below_the_memory)
{
    struct setup s;
    struct mqd_producer_options options = plain();
    options.buffer_bytes_max = 10000;
    CHECK(begin(&s, "bound", &options));
    int32_t topic = mqd_producer_topic(s.producer, "t", 1, MQD_PARTITIONER_RANDOM);
    struct mqd_record_columns records = same("0123456789", 10000, 0);
    int64_t taken = mqd_producer_append(s.producer, topic, &records, NULL);
    CHECK(taken > 200 && taken < 600);
    CHECK(mqd_producer_outstanding_bytes(s.producer) <= 10000);
    end(&s);
}

TEST(wrong_calls_are_refused)
{
    struct setup s;
    struct mqd_producer_options options = plain();
    CHECK(begin(&s, "calls", &options));
    CHECK(!mqd_producer_open(s.client, &options) && mqd_error_code() == MQD_E_INVALID);
    int32_t topic = mqd_producer_topic(s.producer, "t", 2, MQD_PARTITIONER_RANDOM);
    CHECK_EQUAL(mqd_producer_topic(s.producer, "u", 2, MQD_PARTITIONER_RANDOM), 1);
    CHECK_EQUAL(mqd_producer_topic(s.producer, "t", 1, MQD_PARTITIONER_RANDOM), 0);
    CHECK(mqd_producer_topic(s.producer, "", 1, 0) < 0);
    CHECK(mqd_producer_topic(s.producer, "t", 0, 0) < 0);
    struct mqd_record_columns records = same("x", 3, 1);
    CHECK_EQUAL(mqd_producer_append(s.producer, topic, &records, NULL), 3);
    records.partition = 2;
    CHECK(mqd_producer_append(s.producer, topic, &records, NULL) < 0 && mqd_error_code() == MQD_E_INVALID);
    records.partition = -2;
    CHECK(mqd_producer_append(s.producer, topic, &records, NULL) < 0);
    CHECK(mqd_producer_append(s.producer, 2, &records, NULL) < 0);
    records.partition = 0;
    const int32_t partitions[] = {0, 1, 2}, sizes[] = {1, -2, 1};
    records.partitions = partitions;
    CHECK_EQUAL(mqd_producer_append(s.producer, topic, &records, NULL), 2);
    records.partitions = NULL;
    records.value_bytes = sizes;
    CHECK_EQUAL(mqd_producer_append(s.producer, topic, &records, NULL), 1);
    CHECK(mqd_producer_retry(s.producer, 12345) < 0);
    CHECK(mqd_producer_drop(s.producer, 1ull << 63 | 5) < 0);
    end(&s);
    options.acks = 1;
    options.producer_id = 4;
    options.producer_epoch = 0;
    s.client_options = small();
    fake_open(&s.fake, "calls");
    s.client = fake_attach(&s.fake, &s.client_options);
    CHECK(!mqd_producer_open(s.client, &options));
    CHECK_CONTAINS(mqd_error_message(), "idempotent");
    s.producer = NULL;
    end(&s);
}

/* ---- encoded batches ---- */

TEST(encoded_batches_keep_their_order)
{
    static uint8_t batch[100000];
    struct setup s;
    struct mqd_producer_options options = plain();
    options.producer_id = 9;
    options.producer_epoch = 0;
    CHECK(begin(&s, "encoded", &options));
    int32_t topic = mqd_producer_topic(s.producer, "t", 1, MQD_PARTITIONER_RANDOM);
    struct mqd_record_columns records = same("hello", 100, 0);
    uint32_t taken;
    uint64_t number;
    CHECK_EQUAL(mqd_records_encode(&records, 0, batch, 61, &taken), 0);
    CHECK_EQUAL(taken, 0);
    CHECK_EQUAL(mqd_records_encode(&records, 0, batch, 61 + 12 * 3 + 11, &taken), 61 + 12 * 3);
    CHECK_EQUAL(taken, 3);
    int64_t size = mqd_records_encode(&records, 70, batch, sizeof batch, &taken);
    CHECK_EQUAL(taken, 70);
    mqd_producer_put(s.producer, topic, 0, (const uint8_t *)"x", 1, NULL, -1, NULL, 0, 1);
    batch[22] = 8 | 32 | 3; /* as if compressed by lz4; flags that a client may not set are dropped */
    CHECK_EQUAL(mqd_producer_append_batch(s.producer, topic, 0, batch, (uint32_t)size, &number), 0);
    CHECK(mqd_producer_append_batch(s.producer, topic, 0, batch, (uint32_t)size - 1, &number) < 0);
    CHECK(mqd_producer_append_batch(s.producer, topic, 1, batch, (uint32_t)size, &number) < 0);
    answer_next(&s, 0, 0, 0);
    CHECK_EQUAL(s.fake.batch.record_count, 1);
    answer_next(&s, 1, 0, 1);
    CHECK_EQUAL(s.fake.batch.record_count, 70);
    CHECK_EQUAL(s.fake.batch.attributes, 3);
    CHECK_EQUAL(mqd_producer_outstanding_records(s.producer), 0);
    CHECK_EQUAL(mqd_client_available_bytes(s.client), s.free_bytes);
    end(&s);
}

/* ---- memory ---- */

/* Random allocations and releases against a byte map: runs never overlap, the longest free run is
 * found when none has the preferred length, and in the end all memory is free. */
TEST(memory_against_a_model)
{
    struct mqd_client_memory memory;
    static uint8_t owner[300];
    struct run {
        uint32_t first, count;
    } runs[300];
    uint32_t run_count = 0;
    uint64_t seed = 3;
    CHECK_EQUAL(mqd_client_memory_open(&memory, 300 * 1024 + 5), 0);
    CHECK_EQUAL(memory.chunk_count, 300);
    memset(owner, 0, sizeof owner);
    for (int step = 0; step < 20000; step++) {
        if (test_random(&seed) % 2) {
            uint32_t preferred = 1 + (uint32_t)(test_random(&seed) % 80),
                     needed = 1 + (uint32_t)(test_random(&seed) % preferred), longest = 0, exact = 0, got = 0;
            for (uint32_t i = 0, length = 0; i < 300; i++) {
                length = owner[i] ? 0 : length + 1;
                longest = length > longest ? length : longest;
            }
            exact = longest >= preferred ? preferred : longest;
            uint32_t first = mqd_client_memory_take(&memory, preferred, needed, &got);
            if (longest < needed) {
                CHECK_EQUAL(first, UINT32_MAX);
                continue;
            }
            CHECK_EQUAL(got, exact);
            CHECK(first + got <= 300);
            for (uint32_t i = first; i < first + got; i++) {
                CHECK(!owner[i]);
                owner[i] = 1;
            }
            runs[run_count++] = (struct run){first, got};
        } else if (run_count) {
            struct run *run = &runs[test_random(&seed) % run_count];
            uint32_t kept = test_random(&seed) % 2 ? 0 : (uint32_t)(test_random(&seed) % run->count);
            mqd_client_memory_release(&memory, run->first + kept, run->count - kept);
            memset(owner + run->first + kept, 0, run->count - kept);
            run->count = kept;
            if (!kept)
                *run = runs[--run_count];
        }
        uint32_t free_count = 0;
        for (uint32_t i = 0; i < 300; i++)
            free_count += !owner[i];
        CHECK_EQUAL(memory.free_count, free_count);
    }
    mqd_client_memory_close(&memory);
}
