/* The wire code as a filter, for the differential test against independent codecs
 * (tests/property/test_wire_oracle.py). One line in, one line out:
 *
 *   request API VERSION HEX   the body, walked by the iterators to its end
 *                             -> ok TOKEN... | error CODE MESSAGE
 *   header HEX                -> ok KNOWN API VERSION CORRELATION CLIENT HEADER_BYTES
 *                                | error CODE MESSAGE
 *   response API VERSION CORRELATION TOKEN...
 *                             a whole frame, with its length word -> ok HEX
 *   flexible API VERSION      -> ok 0|1
 *
 * A token is a decimal number, or text and bytes as x + hex, - for null. Buffers are exactly as
 * long as what is in them, so that ASan detects the first byte read too far.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "wire/wire.h"

static uint8_t *unhex(const char *text, uint32_t *size_bytes)
{
    *size_bytes = (uint32_t)strlen(text) / 2;
    uint8_t *bytes = malloc(*size_bytes ? *size_bytes : 1);
    for (uint32_t i = 0; i < *size_bytes; i++)
        sscanf(text + 2 * i, "%2hhx", &bytes[i]);
    return bytes;
}

static void print_bytes(const uint8_t *bytes, int32_t size_bytes)
{
    if (size_bytes < 0) {
        printf(" -");
        return;
    }
    printf(" x");
    for (int32_t i = 0; i < size_bytes; i++)
        printf("%02x", bytes[i]);
}

static void print_text(struct mqd_text text)
{
    print_bytes(text.bytes, text.size_bytes);
}

static void print_number(int64_t value)
{
    printf(" %" PRId64, value);
}

static void print_key(const struct mqd_topic_key *key)
{
    if (key->by_id)
        print_bytes(key->topic_id, 16);
    else
        print_text(key->name);
}

/* After a successful parse nothing may fail: a failure here is a bug of the parser, not of the
 * request. */
static void must(int result)
{
    if (result != 0) {
        fprintf(stderr, "parsed, but the iteration failed: %s\n", mqd_error_message());
        abort();
    }
}

static int print_error(void)
{
    printf("error %d %s\n", mqd_error_code(), mqd_error_message());
    return 0;
}

static int dump_produce(const uint8_t *body, uint32_t size_bytes, int16_t version)
{
    struct mqd_produce_request request;
    struct mqd_produce_topic topic;
    struct mqd_produce_partition partition;
    if (mqd_produce_parse(body, size_bytes, version, &request))
        return print_error();
    printf("ok");
    print_text(request.transactional_id);
    print_number(request.required_acks);
    print_number(request.timeout_ms);
    print_number(request.topic_count);
    for (int32_t i = 0; i < request.topic_count; i++) {
        must(mqd_produce_next_topic(&request, &topic));
        print_key(&topic.key);
        print_number(topic.partition_count);
        for (int32_t j = 0; j < topic.partition_count; j++) {
            must(mqd_produce_next_partition(&request, &partition));
            print_number(partition.partition_index);
            print_bytes(partition.records, partition.size_bytes);
        }
    }
    must(mqd_produce_end(&request));
    return 1;
}

static int dump_fetch(const uint8_t *body, uint32_t size_bytes, int16_t version)
{
    struct mqd_fetch_request request;
    struct mqd_fetch_topic topic;
    struct mqd_fetch_partition partition;
    int32_t forgotten_count, partition_index;
    if (mqd_fetch_parse(body, size_bytes, version, &request))
        return print_error();
    int32_t replica_id = request.replica_id, rack_id_bytes = request.rack_id_bytes;
    printf("ok");
    print_number(request.replica_id);
    print_number(request.replica_epoch);
    print_number(request.wait_ms_max);
    print_number(request.bytes_min);
    print_number(request.bytes_max);
    print_number(request.isolation_level);
    print_number(request.session_id);
    print_number(request.session_epoch);
    print_bytes(request.rack_id, request.rack_id_bytes);
    print_number(request.topic_count);
    for (int32_t i = 0; i < request.topic_count; i++) {
        must(mqd_fetch_next_topic(&request, &topic));
        print_key(&topic.key);
        print_number(topic.partition_count);
        for (int32_t j = 0; j < topic.partition_count; j++) {
            must(mqd_fetch_next_partition(&request, &partition));
            print_number(partition.partition_index);
            print_number(partition.current_leader_epoch);
            print_number(partition.fetch_offset);
            print_number(partition.last_fetched_epoch);
            print_number(partition.log_start_offset);
            print_number(partition.bytes_max);
            print_number(partition.high_watermark);
        }
    }
    must(mqd_fetch_begin_forgotten(&request, &forgotten_count));
    print_number(forgotten_count);
    for (int32_t i = 0; i < forgotten_count; i++) {
        must(mqd_fetch_next_forgotten_topic(&request, &topic));
        print_key(&topic.key);
        print_number(topic.partition_count);
        for (int32_t j = 0; j < topic.partition_count; j++) {
            must(mqd_fetch_next_forgotten_partition(&request, &partition_index));
            print_number(partition_index);
        }
    }
    must(mqd_fetch_end(&request));
    must(replica_id != request.replica_id || rack_id_bytes != request.rack_id_bytes);
    return 1;
}

static int dump_list_offsets(const uint8_t *body, uint32_t size_bytes, int16_t version)
{
    struct mqd_list_offsets_request request;
    struct mqd_list_offsets_topic topic;
    struct mqd_list_offsets_partition partition;
    if (mqd_list_offsets_parse(body, size_bytes, version, &request))
        return print_error();
    printf("ok");
    print_number(request.replica_id);
    print_number(request.isolation_level);
    print_number(request.timeout_ms);
    print_number(request.topic_count);
    for (int32_t i = 0; i < request.topic_count; i++) {
        must(mqd_list_offsets_next_topic(&request, &topic));
        print_text(topic.name);
        print_number(topic.partition_count);
        for (int32_t j = 0; j < topic.partition_count; j++) {
            must(mqd_list_offsets_next_partition(&request, &partition));
            print_number(partition.partition_index);
            print_number(partition.current_leader_epoch);
            print_number(partition.timestamp);
        }
    }
    must(mqd_list_offsets_end(&request));
    return 1;
}

static int dump_share(const uint8_t *body, uint32_t size_bytes, int16_t api_key, int16_t version)
{
    struct mqd_share_fetch_request request;
    struct mqd_share_fetch_topic topic;
    struct mqd_share_fetch_partition partition;
    struct mqd_share_fetch_acknowledgement given;
    int32_t forgotten_count, partition_index;
    if (mqd_share_fetch_parse(body, size_bytes, api_key, version, &request))
        return print_error();
    printf("ok");
    print_text(request.group_id);
    print_text(request.member_id);
    int64_t head[] = {request.session_epoch, request.wait_ms_max, request.bytes_min,
                      request.bytes_max,     request.records_max, request.batch_size,
                      request.acquire_mode,  request.is_renewal,  request.topic_count};
    for (size_t i = 0; i < sizeof head / sizeof *head; i++)
        print_number(head[i]);
    for (int32_t i = 0; i < request.topic_count; i++) {
        must(mqd_share_fetch_next_topic(&request, &topic));
        print_bytes(topic.topic_id, 16);
        print_number(topic.partition_count);
        for (int32_t j = 0; j < topic.partition_count; j++) {
            must(mqd_share_fetch_next_partition(&request, &partition));
            print_number(partition.partition_index);
            print_number(partition.acknowledgement_count);
            for (int32_t k = 0; k < partition.acknowledgement_count; k++) {
                must(mqd_share_fetch_next_acknowledgement(&request, &given));
                print_number(given.first);
                print_number(given.last);
                print_bytes(given.types, (int32_t)given.type_count);
            }
        }
    }
    must(mqd_share_fetch_begin_forgotten(&request, &forgotten_count));
    print_number(forgotten_count);
    for (int32_t i = 0; i < forgotten_count; i++) {
        must(mqd_share_fetch_next_topic(&request, &topic));
        print_bytes(topic.topic_id, 16);
        print_number(topic.partition_count);
        for (int32_t j = 0; j < topic.partition_count; j++) {
            must(mqd_share_fetch_next_forgotten_partition(&request, &partition_index));
            print_number(partition_index);
        }
    }
    must(mqd_share_fetch_end(&request));
    return 1;
}

static const char *token(void)
{
    const char *next = strtok(NULL, " \n");
    return next ? next : "";
}

static int64_t number(void)
{
    return strtoll(token(), NULL, 10);
}

static struct mqd_text text(uint8_t **owned)
{
    const char *next = token();
    uint32_t size_bytes;
    *owned = NULL;
    if (*next != 'x')
        return (struct mqd_text){NULL, -1};
    *owned = unhex(next + 1, &size_bytes);
    return (struct mqd_text){*owned, (int32_t)size_bytes};
}

static struct mqd_topic_key key(bool by_id, uint8_t **owned)
{
    struct mqd_topic_key result = {.by_id = by_id};
    result.name = text(owned);
    if (by_id && result.name.size_bytes == 16)
        memcpy(result.topic_id, result.name.bytes, 16);
    return result;
}

static void build_produce(struct mqd_buffer *buffer, int16_t version)
{
    int32_t throttle_ms = (int32_t)number(), topic_count = (int32_t)number();
    uint8_t *owned;
    mqd_produce_response_topics(buffer, version, topic_count);
    for (int32_t i = 0; i < topic_count; i++) {
        struct mqd_topic_key topic = key(version >= 13, &owned);
        int32_t partition_count = (int32_t)number();
        mqd_produce_response_topic(buffer, version, &topic, partition_count);
        free(owned);
        for (int32_t j = 0; j < partition_count; j++) {
            struct mqd_produce_outcome outcome = {.partition_index = (int32_t)number()};
            outcome.error = (int16_t)number();
            outcome.base_offset = number();
            outcome.log_append_time_ms = number();
            outcome.log_start_offset = number();
            struct mqd_text message = text(&owned);
            char *terminated = owned ? strndup((char *)message.bytes, (size_t)message.size_bytes) : NULL;
            outcome.message = terminated;
            mqd_produce_response_partition(buffer, version, &outcome);
            free(terminated);
            free(owned);
        }
        mqd_produce_response_topic_end(buffer, version);
    }
    mqd_produce_response_end(buffer, version, throttle_ms);
}

static void build_fetch(struct mqd_buffer *buffer, int16_t version)
{
    int32_t throttle_ms = (int32_t)number();
    int16_t error = (int16_t)number();
    int32_t session_id = (int32_t)number(), topic_count = (int32_t)number();
    uint8_t *owned;
    mqd_fetch_response_begin(buffer, version, throttle_ms, error, session_id, topic_count);
    for (int32_t i = 0; i < topic_count; i++) {
        struct mqd_topic_key topic = key(version >= 13, &owned);
        int32_t partition_count = (int32_t)number();
        mqd_fetch_response_topic(buffer, version, &topic, partition_count);
        free(owned);
        for (int32_t j = 0; j < partition_count; j++) {
            struct mqd_fetch_outcome outcome = {.partition_index = (int32_t)number()};
            outcome.error = (int16_t)number();
            outcome.high_watermark = number();
            outcome.last_stable_offset = number();
            outcome.log_start_offset = number();
            struct mqd_text records = text(&owned);
            outcome.records_bytes = (uint32_t)records.size_bytes;
            mqd_fetch_response_partition(buffer, version, &outcome);
            mqd_buffer_reserve(buffer, outcome.records_bytes);
            if (outcome.records_bytes > 0)
                memcpy(buffer->bytes + buffer->size_bytes, records.bytes, outcome.records_bytes);
            buffer->size_bytes += outcome.records_bytes;
            mqd_fetch_response_partition_end(buffer, version);
            free(owned);
        }
        mqd_fetch_response_topic_end(buffer, version);
    }
    mqd_fetch_response_end(buffer, version);
}

static void build_list_offsets(struct mqd_buffer *buffer, int16_t version)
{
    int32_t throttle_ms = (int32_t)number(), topic_count = (int32_t)number();
    uint8_t *owned;
    mqd_list_offsets_response_begin(buffer, version, throttle_ms, topic_count);
    for (int32_t i = 0; i < topic_count; i++) {
        struct mqd_text name = text(&owned);
        int32_t partition_count = (int32_t)number();
        mqd_list_offsets_response_topic(buffer, version, name, partition_count);
        free(owned);
        for (int32_t j = 0; j < partition_count; j++) {
            int32_t partition_index = (int32_t)number();
            int16_t error = (int16_t)number();
            int64_t timestamp = number(), offset = number();
            mqd_list_offsets_response_partition(buffer, version, partition_index, error, timestamp, offset,
                                                (int32_t)number());
        }
        mqd_list_offsets_response_topic_end(buffer, version);
    }
    mqd_list_offsets_response_end(buffer, version);
}

/* A text as a C string that the caller frees; NULL = null. */
static char *message(void)
{
    uint8_t *owned;
    struct mqd_text given = text(&owned);
    char *terminated = owned ? strndup((char *)given.bytes, (size_t)given.size_bytes) : NULL;
    free(owned);
    return terminated;
}

static void build_share_partition(struct mqd_buffer *buffer, int16_t api_key)
{
    struct mqd_share_fetch_outcome outcome = {.partition_index = (int32_t)number()};
    outcome.error = (int16_t)number();
    char *whole = message();
    outcome.acknowledge_error = (int16_t)number();
    char *acknowledge = message();
    outcome.message = whole;
    outcome.acknowledge_message = acknowledge;
    outcome.current_leader.leader = (int32_t)number();
    outcome.current_leader.leader_epoch = (int32_t)number();
    uint8_t *owned;
    struct mqd_text records = text(&owned);
    outcome.records_bytes = (uint32_t)records.size_bytes;
    mqd_share_fetch_response_partition(buffer, api_key, &outcome);
    int32_t run_count = (int32_t)number();
    if (api_key == 78) {
        mqd_buffer_reserve(buffer, outcome.records_bytes);
        if (outcome.records_bytes > 0)
            memcpy(buffer->bytes + buffer->size_bytes, records.bytes, outcome.records_bytes);
        buffer->size_bytes += outcome.records_bytes;
        mqd_share_fetch_response_acquired(buffer, run_count);
    }
    for (int32_t i = 0; i < run_count; i++) {
        int64_t first = number(), last = number();
        mqd_share_fetch_response_run(buffer, first, last, (int16_t)number());
    }
    mqd_share_fetch_response_partition_end(buffer);
    free(owned);
    free(whole);
    free(acknowledge);
}

static void build_share(struct mqd_buffer *buffer, int16_t api_key, int16_t version)
{
    int32_t throttle_ms = (int32_t)number();
    int16_t error = (int16_t)number();
    char *whole = message();
    int32_t lock_ms = (int32_t)number(), topic_count = (int32_t)number();
    mqd_share_fetch_response_begin(buffer, api_key, version, throttle_ms, error, whole, lock_ms, topic_count);
    free(whole);
    for (int32_t i = 0; i < topic_count; i++) {
        uint8_t *owned;
        struct mqd_topic_key topic = key(true, &owned);
        int32_t partition_count = (int32_t)number();
        mqd_share_fetch_response_topic(buffer, topic.topic_id, partition_count);
        free(owned);
        for (int32_t j = 0; j < partition_count; j++)
            build_share_partition(buffer, api_key);
        mqd_share_fetch_response_topic_end(buffer);
    }
    struct mqd_node_endpoint nodes[4];
    uint32_t node_count = (uint32_t)number();
    for (uint32_t i = 0; i < node_count; i++) {
        nodes[i].node_id = (int32_t)number();
        nodes[i].host = message();
        nodes[i].port = (int32_t)number();
        nodes[i].rack = message();
    }
    mqd_share_fetch_response_end(buffer, nodes, node_count);
    for (uint32_t i = 0; i < node_count; i++) {
        free((void *)nodes[i].host);
        free((void *)nodes[i].rack);
    }
}

static void on_request(void)
{
    int16_t api_key = (int16_t)number(), version = (int16_t)number();
    uint32_t size_bytes;
    uint8_t *body = unhex(token(), &size_bytes);
    int done = api_key == 0   ? dump_produce(body, size_bytes, version)
               : api_key == 1 ? dump_fetch(body, size_bytes, version)
               : api_key == 2 ? dump_list_offsets(body, size_bytes, version)
                              : dump_share(body, size_bytes, api_key, version);
    if (done)
        printf("\n");
    free(body);
}

static void on_header(void)
{
    struct mqd_request_header header;
    uint32_t size_bytes;
    bool known;
    uint8_t *frame = unhex(token(), &size_bytes);
    if (mqd_request_header_parse(frame, size_bytes, &header, &known)) {
        print_error();
    } else {
        printf("ok %d %d %d %" PRId32, known, header.api_key, header.api_version, header.correlation_id);
        print_bytes(header.client_id, header.client_id_bytes);
        printf(" %" PRIu32 "\n", header.header_bytes);
    }
    free(frame);
}

static void on_response(void)
{
    int16_t api_key = (int16_t)number(), version = (int16_t)number();
    struct mqd_buffer buffer = {0};
    mqd_response_begin(&buffer, api_key, version, (int32_t)number());
    if (api_key == 0)
        build_produce(&buffer, version);
    if (api_key == 1)
        build_fetch(&buffer, version);
    if (api_key == 2)
        build_list_offsets(&buffer, version);
    if (api_key == 78 || api_key == 79)
        build_share(&buffer, api_key, version);
    mqd_response_finish(&buffer, 0);
    printf("ok ");
    for (uint32_t i = 0; i < buffer.size_bytes; i++)
        printf("%02x", buffer.bytes[i]);
    printf("\n");
    mqd_buffer_free(&buffer);
}

int main(void)
{
    char *line = NULL;
    size_t capacity = 0;
    while (getline(&line, &capacity, stdin) > 0) {
        const char *command = strtok(line, " \n");
        if (command == NULL)
            break;
        if (strcmp(command, "request") == 0)
            on_request();
        if (strcmp(command, "header") == 0)
            on_header();
        if (strcmp(command, "response") == 0)
            on_response();
        if (strcmp(command, "flexible") == 0) {
            int16_t api_key = (int16_t)number();
            printf("ok %d\n", mqd_api_flexible(api_key, (int16_t)number()));
        }
        fflush(stdout);
    }
    free(line);
    return 0;
}
