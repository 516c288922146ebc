/* fuzz: -max_len=2048 */
/* Byte 0: which parser (api and version, or the request header); the rest is what the peer sent.
 *
 * Beyond what the sanitizers see: a body that the parser accepted is walked to its end without a
 * failure (W1), what it points to is inside it, counts are bounded by its size, and a response
 * built from what it requested can be finished. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "wire/wire.h"

#define ALWAYS(condition)                                                                                              \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);                                  \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

static const uint8_t *body_begin, *body_end;

static void inside(const uint8_t *bytes, int32_t size_bytes)
{
    static volatile uint8_t sink;
    ALWAYS(size_bytes >= -1);
    if (size_bytes <= 0)
        return;
    ALWAYS(bytes >= body_begin && bytes < body_end && size_bytes <= body_end - bytes);
    sink = (uint8_t)(sink + bytes[0] + bytes[size_bytes - 1]);
}

static void inside_key(const struct mqd_topic_key *key)
{
    if (!key->by_id)
        inside(key->name.bytes, key->name.size_bytes);
}

static void produce(const uint8_t *body, uint32_t size_bytes, int16_t version)
{
    struct mqd_produce_request request;
    struct mqd_produce_topic topic;
    struct mqd_produce_partition partition;
    struct mqd_buffer buffer = {0};
    if (mqd_produce_parse(body, size_bytes, version, &request))
        return;
    inside(request.transactional_id.bytes, request.transactional_id.size_bytes);
    ALWAYS(request.topic_count >= 0 && (uint32_t)request.topic_count <= size_bytes);
    mqd_response_begin(&buffer, 0, version, 7);
    mqd_produce_response_topics(&buffer, version, request.topic_count);
    for (int32_t i = 0; i < request.topic_count; i++) {
        ALWAYS(mqd_produce_next_topic(&request, &topic) == 0);
        inside_key(&topic.key);
        mqd_produce_response_topic(&buffer, version, &topic.key, topic.partition_count);
        for (int32_t j = 0; j < topic.partition_count; j++) {
            ALWAYS(mqd_produce_next_partition(&request, &partition) == 0);
            inside(partition.records, partition.size_bytes);
            struct mqd_produce_outcome outcome = {.partition_index = partition.partition_index,
                                                  .message = j & 1 ? "because" : NULL};
            mqd_produce_response_partition(&buffer, version, &outcome);
        }
        mqd_produce_response_topic_end(&buffer, version);
    }
    ALWAYS(mqd_produce_end(&request) == 0);
    ALWAYS(mqd_produce_next_topic(&request, &topic) == -1 && mqd_produce_next_partition(&request, &partition) == -1);
    mqd_produce_response_end(&buffer, version, 0);
    mqd_response_finish(&buffer, 0);
    ALWAYS(!buffer.failed);
    mqd_buffer_free(&buffer);
}

static void fetch_forgotten(struct mqd_fetch_request *request, uint32_t size_bytes)
{
    struct mqd_fetch_topic topic;
    int32_t count, partition_index;
    ALWAYS(mqd_fetch_begin_forgotten(request, &count) == 0);
    ALWAYS(count >= 0 && (uint32_t)count <= size_bytes);
    for (int32_t i = 0; i < count; i++) {
        ALWAYS(mqd_fetch_next_forgotten_topic(request, &topic) == 0);
        inside_key(&topic.key);
        for (int32_t j = 0; j < topic.partition_count; j++)
            ALWAYS(mqd_fetch_next_forgotten_partition(request, &partition_index) == 0);
    }
    ALWAYS(mqd_fetch_next_forgotten_topic(request, &topic) == -1);
}

static void fetch(const uint8_t *body, uint32_t size_bytes, int16_t version)
{
    struct mqd_fetch_request request;
    struct mqd_fetch_topic topic;
    struct mqd_fetch_partition partition;
    struct mqd_buffer buffer = {0};
    if (mqd_fetch_parse(body, size_bytes, version, &request))
        return;
    inside(request.rack_id, request.rack_id_bytes);
    ALWAYS(request.topic_count >= 0 && (uint32_t)request.topic_count <= size_bytes);
    int32_t replica_id = request.replica_id;
    uint64_t extra_bytes = 0;
    mqd_response_begin(&buffer, 1, version, 7);
    mqd_fetch_response_begin(&buffer, version, 0, 0, request.session_id, request.topic_count);
    for (int32_t i = 0; i < request.topic_count; i++) {
        ALWAYS(mqd_fetch_next_topic(&request, &topic) == 0);
        inside_key(&topic.key);
        mqd_fetch_response_topic(&buffer, version, &topic.key, topic.partition_count);
        for (int32_t j = 0; j < topic.partition_count; j++) {
            ALWAYS(mqd_fetch_next_partition(&request, &partition) == 0);
            struct mqd_fetch_outcome outcome = {.partition_index = partition.partition_index,
                                                .records_bytes = (uint32_t)partition.bytes_max & 0xffff};
            extra_bytes += outcome.records_bytes;
            mqd_fetch_response_partition(&buffer, version, &outcome);
            mqd_fetch_response_partition_end(&buffer, version);
        }
        mqd_fetch_response_topic_end(&buffer, version);
    }
    fetch_forgotten(&request, size_bytes);
    ALWAYS(mqd_fetch_end(&request) == 0);
    ALWAYS(request.replica_id == replica_id);
    mqd_fetch_response_end(&buffer, version);
    mqd_response_finish(&buffer, extra_bytes);
    ALWAYS(!buffer.failed);
    mqd_buffer_free(&buffer);
}

static void list_offsets(const uint8_t *body, uint32_t size_bytes, int16_t version)
{
    struct mqd_list_offsets_request request;
    struct mqd_list_offsets_topic topic;
    struct mqd_list_offsets_partition partition;
    struct mqd_buffer buffer = {0};
    if (mqd_list_offsets_parse(body, size_bytes, version, &request))
        return;
    mqd_response_begin(&buffer, 2, version, 7);
    mqd_list_offsets_response_begin(&buffer, version, 0, request.topic_count);
    for (int32_t i = 0; i < request.topic_count; i++) {
        ALWAYS(mqd_list_offsets_next_topic(&request, &topic) == 0);
        inside(topic.name.bytes, topic.name.size_bytes);
        mqd_list_offsets_response_topic(&buffer, version, topic.name, topic.partition_count);
        for (int32_t j = 0; j < topic.partition_count; j++) {
            ALWAYS(mqd_list_offsets_next_partition(&request, &partition) == 0);
            mqd_list_offsets_response_partition(&buffer, version, partition.partition_index, 0, -1, 5,
                                                partition.current_leader_epoch);
        }
        mqd_list_offsets_response_topic_end(&buffer, version);
    }
    ALWAYS(mqd_list_offsets_end(&request) == 0);
    mqd_list_offsets_response_end(&buffer, version);
    mqd_response_finish(&buffer, 0);
    ALWAYS(!buffer.failed);
    mqd_buffer_free(&buffer);
}

static void share_forgotten(struct mqd_share_fetch_request *request, uint32_t size_bytes)
{
    struct mqd_share_fetch_topic topic;
    int32_t count, partition_index;
    ALWAYS(mqd_share_fetch_begin_forgotten(request, &count) == 0);
    ALWAYS(count >= 0 && (uint32_t)count <= size_bytes);
    for (int32_t i = 0; i < count; i++) {
        ALWAYS(mqd_share_fetch_next_topic(request, &topic) == 0);
        for (int32_t j = 0; j < topic.partition_count; j++)
            ALWAYS(mqd_share_fetch_next_forgotten_partition(request, &partition_index) == 0);
    }
}

static void share(const uint8_t *body, uint32_t size_bytes, int16_t api_key, int16_t version)
{
    struct mqd_share_fetch_request request;
    struct mqd_share_fetch_topic topic;
    struct mqd_share_fetch_partition partition;
    struct mqd_share_fetch_acknowledgement given;
    struct mqd_buffer buffer = {0};
    if (mqd_share_fetch_parse(body, size_bytes, api_key, version, &request))
        return;
    inside(request.group_id.bytes, request.group_id.size_bytes);
    inside(request.member_id.bytes, request.member_id.size_bytes);
    mqd_response_begin(&buffer, api_key, version, 7);
    mqd_share_fetch_response_begin(&buffer, api_key, version, 0, 0, NULL, 30000, request.topic_count);
    for (int32_t i = 0; i < request.topic_count; i++) {
        ALWAYS(mqd_share_fetch_next_topic(&request, &topic) == 0);
        mqd_share_fetch_response_topic(&buffer, topic.topic_id, topic.partition_count);
        for (int32_t j = 0; j < topic.partition_count; j++) {
            ALWAYS(mqd_share_fetch_next_partition(&request, &partition) == 0);
            struct mqd_share_fetch_outcome outcome = {.partition_index = partition.partition_index};
            mqd_share_fetch_response_partition(&buffer, api_key, &outcome);
            mqd_share_fetch_response_acquired(&buffer, partition.acknowledgement_count);
            for (int32_t k = 0; k < partition.acknowledgement_count; k++) {
                ALWAYS(mqd_share_fetch_next_acknowledgement(&request, &given) == 0);
                inside(given.types, (int32_t)given.type_count);
                mqd_share_fetch_response_run(&buffer, given.first, given.last, 1);
            }
            mqd_share_fetch_response_partition_end(&buffer);
        }
        mqd_share_fetch_response_topic_end(&buffer);
    }
    share_forgotten(&request, size_bytes);
    ALWAYS(mqd_share_fetch_end(&request) == 0);
    mqd_share_fetch_response_end(&buffer, NULL, 0);
    mqd_response_finish(&buffer, 0);
    ALWAYS(!buffer.failed);
    mqd_buffer_free(&buffer);
}

static void header(const uint8_t *frame, uint32_t size_bytes)
{
    struct mqd_request_header parsed;
    bool known;
    if (mqd_request_header_parse(frame, size_bytes, &parsed, &known))
        return;
    ALWAYS(parsed.header_bytes <= size_bytes && parsed.header_bytes >= 8);
    inside(parsed.client_id, parsed.client_id_bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 1)
        return 0;
    uint8_t choice = data[0] % 52;
    uint32_t size_bytes = (uint32_t)size - 1;
    uint8_t *body =
        malloc(size_bytes ? size_bytes : 1); /* its own block, so that reading one byte too far is detected */
    memcpy(body, data + 1, size_bytes);
    body_begin = body;
    body_end = body + size_bytes;
    if (data[0] >= 240 && data[0] < 246) /* 1..3 */
        share(body, size_bytes, data[0] & 1 ? 79 : 78, (int16_t)((data[0] - 240) / 2 + 1));
    else if (choice < 16)
        produce(body, size_bytes, (int16_t)(choice - 1)); /* -1..14 */
    else if (choice < 35)
        fetch(body, size_bytes, (int16_t)(choice - 16 + 3)); /* 3..21 */
    else if (choice < 48)
        list_offsets(body, size_bytes, (int16_t)(choice - 35)); /* 0..12 */
    else
        header(body, size_bytes);
    free(body);
    return 0;
}
