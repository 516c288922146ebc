/* ListOffsets for earliest (-2) and latest (-1): both are in the partition table. Spark requests
 * them twice per poll. Everything else (by time, max timestamp) requires reading files: a request
 * that includes it goes to the acceptor as a whole. The latest offset waits for the flush of earlier
 * appends (server/lookup.c). */
#include <string.h>

#include "server/reactor.h"
#include "server/rights/subject.h"

#define CONSUMER_REPLICA_ID (-1)
/* as in Kafka, other negative epochs get FENCED_LEADER_EPOCH here; a consumer's Fetch ignores
 * them */
#define NO_LEADER_EPOCH (-1)
#define TIMESTAMP_LATEST (-1)
#define TIMESTAMP_EARLIEST (-2)
/* earlier versions do not have the error code OFFSET_NOT_AVAILABLE */
#define OFFSET_NOT_AVAILABLE_VERSION_MIN 5

/* Whether the client is local and another host leads the partition; the acceptor then queries that
 * host. */
static bool led_by_another_host(struct mqd_reactor *r, const struct mqd_connection *c, const struct mqd_topic *topic,
                                int32_t partition_index)
{
    return c->local && r->topics.broker_count && topic && partition_index >= 0 &&
           (uint32_t)partition_index < topic->partition_count &&
           mqd_topics_is_led_elsewhere(&r->topics, &topic->partitions[partition_index]);
}

/* Whether the response must wait for a flush, which is then described in *flush. */
static bool must_wait(struct mqd_reactor *r, const struct mqd_topic *topic,
                      const struct mqd_list_offsets_partition *requested, struct mqd_awaited_flush *flush)
{
    if (!topic || requested->timestamp != TIMESTAMP_LATEST || requested->partition_index < 0 ||
        (uint32_t)requested->partition_index >= topic->partition_count ||
        topic->slots[requested->partition_index] == MQD_SLOT_NONE)
        return false;
    struct mqd_positions positions;
    flush->slot = topic->slots[requested->partition_index];
    mqd_slot_positions(mqd_control_partition(r->options.control, flush->slot), &positions);
    flush->end_offset = positions.log_end_offset;
    return mqd_lookup_must_wait(r, flush->slot, flush->end_offset);
}

/* Whether the reactor can answer the whole request without the acceptor. Sets *awaited_count_max to
 * the number of partitions whose latest offset is requested if any of them must wait for a flush,
 * otherwise to 0. */
static bool reactor_can_serve(struct mqd_reactor *r, const struct mqd_connection *c, const uint8_t *body,
                              uint32_t size_bytes, int16_t version, uint32_t *awaited_count_max)
{
    struct mqd_list_offsets_request parser;
    struct mqd_awaited_flush flush;
    uint32_t latest_count = 0;
    bool waiting = false;
    if (mqd_list_offsets_parse(body, size_bytes, version, &parser) < 0)
        return false;
    for (int32_t t = 0; t < parser.topic_count; t++) {
        struct mqd_list_offsets_topic requested_topic;
        if (mqd_list_offsets_next_topic(&parser, &requested_topic) < 0)
            return false;
        struct mqd_topic_key key = {.name = requested_topic.name};
        const struct mqd_topic *topic = mqd_topics_find(&r->topics, &key);
        for (int32_t p = 0; p < requested_topic.partition_count; p++) {
            struct mqd_list_offsets_partition partition;
            if (mqd_list_offsets_next_partition(&parser, &partition) < 0 ||
                (partition.timestamp != TIMESTAMP_LATEST && partition.timestamp != TIMESTAMP_EARLIEST) ||
                led_by_another_host(r, c, topic, partition.partition_index))
                return false;
            latest_count += partition.timestamp == TIMESTAMP_LATEST;
            waiting = waiting || must_wait(r, topic, &partition, &flush);
        }
    }
    *awaited_count_max = waiting ? latest_count : 0;
    return mqd_list_offsets_end(&parser) == 0;
}

/* Returns 0, or an error if this replica may not return its latest offset: it may no longer be the
 * leader, or its high watermark has not reached the start of its epoch yet (KIP-207). */
static int16_t latest_error(const struct mqd_reactor *r, const struct mqd_partition_slot *slot, int16_t version)
{
    if (r->lease_lost)
        return MQD_KAFKA_NOT_LEADER_OR_FOLLOWER;
    if (!mqd_load_acquire(&slot->latest_pending))
        return 0;
    return version >= OFFSET_NOT_AVAILABLE_VERSION_MIN ? MQD_KAFKA_OFFSET_NOT_AVAILABLE
                                                       : MQD_KAFKA_LEADER_NOT_AVAILABLE;
}

static bool may_describe(struct mqd_reactor *r, const struct mqd_connection *c, const struct mqd_topic *topic,
                         struct mqd_text name)
{
    return topic ? mqd_subject_is_allowed(r, c, topic, MQD_OPERATION_DESCRIBE)
                 : mqd_subject_is_allowed_by_name(r, c, MQD_RESOURCE_TOPIC, name.bytes, name.size_bytes,
                                                  MQD_OPERATION_DESCRIBE);
}

static void encode_partition(struct mqd_reactor *r, int16_t version, int8_t isolation_level,
                             const struct mqd_topic *topic, bool is_allowed,
                             const struct mqd_list_offsets_partition *requested)
{
    struct mqd_buffer *out = &r->scratch;
    int16_t error = 0;
    int64_t offset = -1;
    int32_t leader_epoch = -1;
    if (!is_allowed) {
        error = MQD_KAFKA_TOPIC_AUTHORIZATION_FAILED;
    } else if (!topic || requested->partition_index < 0 ||
               (uint32_t)requested->partition_index >= topic->partition_count) {
        error = MQD_KAFKA_UNKNOWN_TOPIC_OR_PARTITION;
    } else if (topic->slots[requested->partition_index] == MQD_SLOT_NONE ||
               mqd_topics_is_led_elsewhere(&r->topics, &topic->partitions[requested->partition_index])) {
        error = MQD_KAFKA_NOT_LEADER_OR_FOLLOWER;
    } else {
        struct mqd_partition_slot *slot =
            mqd_control_partition(r->options.control, topic->slots[requested->partition_index]);
        struct mqd_positions positions;
        leader_epoch = mqd_load_relaxed(&slot->leader_epoch);
        if (mqd_load_acquire(&slot->state) != MQD_SLOT_ONLINE || mqd_load_acquire(&slot->role) != MQD_ROLE_LEADS)
            error = MQD_KAFKA_NOT_LEADER_OR_FOLLOWER;
        else if (requested->current_leader_epoch != NO_LEADER_EPOCH && requested->current_leader_epoch != leader_epoch)
            error = requested->current_leader_epoch < leader_epoch ? MQD_KAFKA_FENCED_LEADER_EPOCH
                                                                   : MQD_KAFKA_UNKNOWN_LEADER_EPOCH;
        else if (requested->timestamp == TIMESTAMP_LATEST)
            error = latest_error(r, slot, version);
        mqd_slot_positions(slot, &positions);
        if (!error)
            offset = requested->timestamp == TIMESTAMP_EARLIEST ? positions.log_start_offset
                     : isolation_level                          ? positions.last_stable_offset
                                                                : positions.high_watermark;
        int32_t log_start_epoch = mqd_load_relaxed(&slot->log_start_epoch);
        if (requested->timestamp == TIMESTAMP_EARLIEST && log_start_epoch >= 0)
            leader_epoch = log_start_epoch;
    }
    mqd_list_offsets_response_partition(out, version, requested->partition_index, error, -1, offset,
                                        error ? -1 : leader_epoch);
}

void mqd_list_offsets_respond(struct mqd_reactor *r, struct mqd_request *request, const uint8_t *body,
                              uint32_t size_bytes)
{
    int16_t version = request->version;
    struct mqd_list_offsets_request parser;
    struct mqd_buffer *out = &r->scratch;
    out->size_bytes = 0;
    mqd_list_offsets_parse(body, size_bytes, version, &parser);
    /* Only a consumer waits for transactions to end, as in Kafka. Any other replica id gets the
     * high watermark here; Kafka returns the log end. */
    int8_t isolation_level = parser.replica_id == CONSUMER_REPLICA_ID ? parser.isolation_level : 0;
    mqd_response_begin(out, MQD_API_LIST_OFFSETS, version, request->correlation_id);
    mqd_list_offsets_response_begin(out, version, 0, parser.topic_count);
    for (int32_t t = 0; t < parser.topic_count; t++) {
        struct mqd_list_offsets_topic requested_topic;
        mqd_list_offsets_next_topic(&parser, &requested_topic);
        struct mqd_topic_key key = {.name = requested_topic.name};
        struct mqd_topic *topic = mqd_topics_find(&r->topics, &key);
        bool is_allowed = may_describe(r, request->connection, topic, requested_topic.name);
        mqd_list_offsets_response_topic(out, version, requested_topic.name, requested_topic.partition_count);
        for (int32_t p = 0; p < requested_topic.partition_count; p++) {
            struct mqd_list_offsets_partition requested;
            mqd_list_offsets_next_partition(&parser, &requested);
            encode_partition(r, version, isolation_level, topic, is_allowed, &requested);
        }
        mqd_list_offsets_response_topic_end(out, version);
    }
    mqd_list_offsets_response_end(out, version);
    /* the reply begins with the correlation id; its length word is written when it is sent */
    uint32_t length = out->size_bytes - 4;
    if (out->failed || !mqd_request_reply_append(r, request, out->bytes + 4, length)) {
        out->failed = false;
        mqd_connection_fail(r, request->connection, "no memory for another response (queued.max.request.bytes)");
        return;
    }
    mqd_lookup_free(request);
    mqd_request_complete(r, request);
}

/* Collects the partitions whose flush the lookup awaits. */
static void collect_awaited(struct mqd_reactor *r, struct mqd_lookup *lookup, int16_t version)
{
    struct mqd_list_offsets_request parser;
    mqd_list_offsets_parse(lookup->body, lookup->body_bytes, version, &parser);
    for (int32_t t = 0; t < parser.topic_count; t++) {
        struct mqd_list_offsets_topic requested_topic;
        mqd_list_offsets_next_topic(&parser, &requested_topic);
        struct mqd_topic_key key = {.name = requested_topic.name};
        const struct mqd_topic *topic = mqd_topics_find(&r->topics, &key);
        for (int32_t p = 0; p < requested_topic.partition_count; p++) {
            struct mqd_list_offsets_partition requested;
            mqd_list_offsets_next_partition(&parser, &requested);
            if (must_wait(r, topic, &requested, &lookup->awaited[lookup->count]))
                lookup->count++;
        }
    }
}

bool mqd_list_offsets_on_request(struct mqd_reactor *r, struct mqd_connection *c,
                                 const struct mqd_request_header *header, const uint8_t *body, uint32_t size_bytes)
{
    uint32_t awaited_count_max;
    if (!reactor_can_serve(r, c, body, size_bytes, header->api_version, &awaited_count_max))
        return false;
    struct mqd_request *request = mqd_request_new(r, c, header, MQD_REQUEST_LIST_OFFSETS);
    if (!request) {
        mqd_connection_close(r, c, "out of memory");
        return true;
    }
    mqd_stat(r, MQD_COUNT_REQUESTS_LIST_OFFSETS, 1);
    struct mqd_lookup *lookup =
        awaited_count_max ? mqd_lookup_new(r, request, awaited_count_max, body, size_bytes) : NULL;
    if (!lookup) { /* no flush to wait for, or no memory: answers immediately */
        mqd_list_offsets_respond(r, request, body, size_bytes);
        return true;
    }
    collect_awaited(r, lookup, header->api_version);
    mqd_lookup_begin(r, lookup);
    return true;
}
