/* tsan: long */
/* Partitioners with numbers published by other clients; topic lookup and parking, with
 * well-formed, truncated and unexpected responses. */
#include "mqd_test.h"

#include <errno.h>

#include "mqd_client_test.h"
#include "wire/buffer.h"

static int32_t hash(uint32_t partitioner, const char *key)
{
    uint64_t state = 1;
    return mqd_partition_for(partitioner, (const uint8_t *)key, key ? (int32_t)strlen(key) : -1, INT32_MAX, &state);
}

/* Java's UtilsTest; the sign bit is cleared in a partition. */
TEST(murmur2_is_javas)
{
    static const struct {
        const char *key;
        int32_t hash;
    } known[] = {{"21", -973932308},
                 {"foobar", -790332482},
                 {"a-little-bit-long-string", -985981536},
                 {"a-little-bit-longer-string", -1486304829},
                 {"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971},
                 {"abc", 479470107}};
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        CHECK_EQUAL(hash(MQD_PARTITIONER_MURMUR2, known[i].key), known[i].hash & INT32_MAX);
        CHECK_EQUAL(hash(MQD_PARTITIONER_MURMUR2_RANDOM, known[i].key), known[i].hash & INT32_MAX);
    }
}

TEST(consistent_is_crc32_and_fnv1a_is_absolute)
{
    CHECK_EQUAL(hash(MQD_PARTITIONER_CONSISTENT, "123456789"), 0xcbf43926u % INT32_MAX);
    CHECK_EQUAL(hash(MQD_PARTITIONER_CONSISTENT_RANDOM, "123456789"), 0xcbf43926u % INT32_MAX);
    CHECK_EQUAL(hash(MQD_PARTITIONER_CONSISTENT, NULL), 0);
    CHECK_EQUAL(hash(MQD_PARTITIONER_CONSISTENT, ""), 0);
    CHECK_EQUAL(hash(MQD_PARTITIONER_FNV1A, "kafka"), 0x0d33c4e1);
    CHECK_EQUAL(hash(MQD_PARTITIONER_FNV1A, "a"), 0 - 0xe40c292cu); /* the published value of FNV */
    CHECK_EQUAL(hash(MQD_PARTITIONER_FNV1A, ""), 0 - 0x811c9dc5u);
}

TEST(records_without_a_key_are_spread_evenly)
{
    static const uint32_t anywhere[] = {MQD_PARTITIONER_RANDOM, MQD_PARTITIONER_CONSISTENT_RANDOM,
                                        MQD_PARTITIONER_MURMUR2_RANDOM, MQD_PARTITIONER_FNV1A_RANDOM};
    for (size_t i = 0; i < sizeof anywhere / sizeof anywhere[0]; i++) {
        uint64_t state = 5;
        uint32_t found[7] = {0};
        for (int j = 0; j < 70000; j++)
            found[mqd_partition_for(anywhere[i], NULL, -1, 7, &state)]++;
        for (int j = 0; j < 7; j++)
            CHECK(found[j] > 9500 && found[j] < 10500);
    }
    uint64_t state = 5, same = 0;
    for (int j = 0; j < 100; j++) { /* an empty key is a key, except for consistent_random */
        same += mqd_partition_for(MQD_PARTITIONER_MURMUR2_RANDOM, (const uint8_t *)"", 0, 7, &state) ==
                hash(MQD_PARTITIONER_MURMUR2, "") % 7;
        same += mqd_partition_for(MQD_PARTITIONER_FNV1A_RANDOM, (const uint8_t *)"", 0, 7, &state) ==
                hash(MQD_PARTITIONER_FNV1A, "") % 7;
    }
    CHECK_EQUAL(same, 200);
    CHECK_EQUAL(mqd_partition_for(MQD_PARTITIONER_RANDOM, NULL, -1, 0, &state), -1);
}

/* ---- requests ---- */

static void put_string(struct mqd_buffer *out, const char *text)
{
    mqd_put_c_string(out, true, text);
}

/* Metadata 12 of one topic with three partitions, as a broker of two nodes answers. */
static void metadata(struct mqd_buffer *out, int32_t correlation_id, int16_t error, int32_t topics)
{
    out->size_bytes = 0;
    mqd_response_begin(out, 3, 12, correlation_id);
    mqd_put_i32(out, 0);
    mqd_put_count(out, true, 2);
    for (int32_t node = 1; node <= 2; node++) {
        mqd_put_i32(out, node);
        put_string(out, "host");
        mqd_put_i32(out, 9092);
        put_string(out, node == 1 ? NULL : "rack");
        mqd_put_no_tags(out, true);
    }
    put_string(out, "cluster");
    mqd_put_i32(out, 1);
    mqd_put_count(out, true, topics);
    for (int32_t topic = 0; topic < topics; topic++) {
        mqd_put_i16(out, error);
        put_string(out, "t");
        for (uint8_t i = 0; i < 16; i++)
            mqd_put_bytes(out, &i, 1);
        mqd_put_bytes(out, "", 1);
        mqd_put_count(out, true, error ? 0 : 3);
        for (int32_t partition = 0; !error && partition < 3; partition++) {
            mqd_put_i16(out, 0);
            for (int i = 0; i < 3; i++)
                mqd_put_i32(out, partition);
            for (int i = 0; i < 3; i++) {
                mqd_put_count(out, true, i);
                for (int j = 0; j < i; j++)
                    mqd_put_i32(out, 1);
            }
            mqd_put_no_tags(out, true);
        }
        mqd_put_i32(out, 0);
        mqd_put_no_tags(out, true);
    }
    mqd_put_no_tags(out, true);
    mqd_response_finish(out, 0);
}

struct answering {
    struct fake *fake;
    struct mqd_buffer *reply;
    uint32_t cut; /* the last bytes of the response are omitted, and its length matches */
};

static void *answer(void *argument)
{
    struct answering *a = argument;
    while (!fake_next(a->fake))
        usleep(100);
    uint32_t size = a->reply->size_bytes - a->cut;
    mqd_store_be32(a->reply->bytes, size - 4);
    fake_put(a->fake, a->reply->bytes, size);
    return NULL;
}

TEST(a_topic_is_found)
{
    struct fake fake;
    struct mqd_client_options options = {
        .client_id = "find", .data_bytes = 64 << 10, .reply_bytes = 4096, .submission_count = 16, .timeout_ms = 5000};
    struct mqd_buffer reply = {0};
    struct mqd_client_topic topic;
    pthread_t thread;
    const uint8_t *bytes;
    static const uint8_t other[] = {0, 0, 0, 6, 0, 0, 0, 9, 1, 2};
    fake_open(&fake, "find");
    struct mqd_client *client = fake_attach(&fake, &options);
    CHECK(client);
    for (int16_t error = 0; error <= 3; error += 3) {
        metadata(&reply, 7, error, 1);
        struct answering a = {&fake, &reply, 0};
        fake_put(&fake, other, sizeof other);
        pthread_create(&thread, NULL, answer, &a);
        CHECK_EQUAL(mqd_client_find_topic(client, "t", 7, 10000000, &topic), 0);
        pthread_join(thread, NULL);
        CHECK_EQUAL(topic.error, error);
        CHECK_EQUAL(topic.partition_count, error ? 0 : 3);
        CHECK_EQUAL(topic.topic_id[15], 15);
        CHECK_EQUAL(fake.request.api_key, 3);
        CHECK_EQUAL(mqd_client_response(client, &bytes), 6); /* an earlier response stays the caller's */
        CHECK_EQUAL(mqd_get_be32(bytes), 9);
        CHECK_EQUAL(mqd_client_response(client, &bytes), 0);
    }
    CHECK(mqd_client_find_topic(client, "t", 8, 20000, &topic) < 0);
    CHECK_EQUAL(mqd_error_code(), ETIMEDOUT);
    CHECK(mqd_client_find_topic(client, "", 8, 20000, &topic) < 0);
    mqd_client_close(client);
    fake_close(&fake);
    mqd_buffer_free(&reply);
}

TEST(responses_that_are_cut_off_or_foreign)
{
    struct fake fake;
    struct mqd_client_options options = {
        .client_id = "find", .data_bytes = 64 << 10, .reply_bytes = 4096, .submission_count = 16, .timeout_ms = 5000};
    struct mqd_buffer reply = {0};
    struct mqd_client_topic topic;
    pthread_t thread;
    fake_open(&fake, "cut");
    struct mqd_client *client = fake_attach(&fake, &options);
    metadata(&reply, 7, 0, 1);
    uint32_t size = reply.size_bytes;
    for (uint32_t cut = 2; cut + 9 <= size; cut++) { /* the last byte is the response's own tags, which are not read */
        metadata(&reply, 7, 0, 1);
        struct answering a = {&fake, &reply, cut};
        pthread_create(&thread, NULL, answer, &a);
        CHECK(mqd_client_find_topic(client, "t", 7, 10000000, &topic) < 0);
        pthread_join(thread, NULL);
    }
    metadata(&reply, 7, 0, 2);
    struct answering a = {&fake, &reply, 0};
    pthread_create(&thread, NULL, answer, &a);
    CHECK(mqd_client_find_topic(client, "t", 7, 10000000, &topic) < 0);
    CHECK_EQUAL(mqd_error_code(), MQD_E_CORRUPT);
    pthread_join(thread, NULL);
    mqd_client_close(client);
    fake_close(&fake);
    mqd_buffer_free(&reply);
}

TEST(parking_requests_positions_only)
{
    struct fake fake;
    struct mqd_client_options options = {
        .client_id = "park", .data_bytes = 64 << 10, .reply_bytes = 4096, .submission_count = 16, .timeout_ms = 5000};
    struct mqd_client_position positions[5];
    struct mqd_fetch_request request;
    struct mqd_fetch_topic topic;
    struct mqd_fetch_partition partition;
    int32_t forgotten;
    fake_open(&fake, "park");
    struct mqd_client *client = fake_attach(&fake, &options);
    for (int i = 0; i < 5; i++) {
        memset(&positions[i], 0, sizeof positions[i]);
        positions[i].topic_id[0] = i < 3 ? 1 : 2;
        positions[i].partition_index = i;
        positions[i].offset = 100 + i;
    }
    CHECK(mqd_client_park(client, positions, 0, 0, 1000, 5) < 0);
    CHECK_EQUAL(mqd_client_park(client, positions, 5, 1, 1000, 5), 0);
    CHECK(fake_next(&fake));
    CHECK_EQUAL(fake.request.api_key, 1);
    CHECK_EQUAL(fake.request.correlation_id, 5);
    CHECK_EQUAL(mqd_fetch_parse(fake.frame + fake.request.header_bytes, fake.frame_bytes - fake.request.header_bytes,
                                fake.request.api_version, &request),
                0);
    CHECK_EQUAL(request.bytes_max, 0);
    CHECK_EQUAL(request.bytes_min, 1);
    CHECK_EQUAL(request.wait_ms_max, 1000);
    CHECK_EQUAL(request.isolation_level, 1);
    CHECK_EQUAL(request.session_epoch, -1);
    CHECK_EQUAL(request.topic_count, 2);
    for (int i = 0, first = 0; i < 2; i++, first = 3) {
        CHECK_EQUAL(mqd_fetch_next_topic(&request, &topic), 0);
        CHECK_EQUAL(topic.key.topic_id[0], i + 1);
        CHECK_EQUAL(topic.partition_count, i ? 2 : 3);
        for (int32_t j = 0; j < topic.partition_count; j++) {
            CHECK_EQUAL(mqd_fetch_next_partition(&request, &partition), 0);
            CHECK_EQUAL(partition.partition_index, first + j);
            CHECK_EQUAL(partition.fetch_offset, 100 + first + j);
        }
    }
    CHECK_EQUAL(mqd_fetch_begin_forgotten(&request, &forgotten), 0);
    CHECK_EQUAL(forgotten, 0);
    CHECK_EQUAL(mqd_fetch_end(&request), 0);
    mqd_client_close(client);
    fake_close(&fake);
}
