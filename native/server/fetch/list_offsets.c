/* ListOffsets for earliest (-2) and latest (-1): both are in the partition table. Spark asks them twice a poll. Everything else (by time, max timestamp) reads
 * files and goes to the acceptor, with the whole request. */
#include <string.h>

#include "server/reactor.h"

#define TIMESTAMP_LATEST (-1)
#define TIMESTAMP_EARLIEST (-2)
#define NOT_AVAILABLE_SINCE_VERSION 5 /* before it there was no code for it */

/* The acceptor asks other hosts in the name of clients on this one. */
static bool another_host(struct mqd_reactor *r, const struct mqd_connection *c, const struct mqd_text *name, int32_t partition_index)
{
    if (!c->local || !r->topics.broker_count)
        return false;
    struct mqd_topic_key key = {.name = *name};
    const struct mqd_topic *topic = mqd_topics_find(&r->topics, &key);
    return topic && partition_index >= 0 && (uint32_t)partition_index < topic->partition_count && mqd_topics_led_elsewhere(&r->topics, &topic->places[partition_index]);
}

static bool all_native(struct mqd_reactor *r, const struct mqd_connection *c, const uint8_t *body, uint32_t size_bytes, int16_t version)
{
    struct mqd_list_offsets_request walk;
    if (mqd_list_offsets_parse(body, size_bytes, version, &walk) < 0)
        return false;
    for (int32_t t = 0; t < walk.topic_count; t++) {
        struct mqd_list_offsets_topic topic;
        if (mqd_list_offsets_next_topic(&walk, &topic) < 0)
            return false;
        for (int32_t p = 0; p < topic.partition_count; p++) {
            struct mqd_list_offsets_partition partition;
            if (mqd_list_offsets_next_partition(&walk, &partition) < 0 || (partition.timestamp != TIMESTAMP_LATEST && partition.timestamp != TIMESTAMP_EARLIEST) ||
                another_host(r, c, &topic.name, partition.partition_index))
                return false;
        }
    }
    return mqd_list_offsets_end(&walk) == 0;
}

/* 0, or why this replica's latest offset is not to be told: no leader, or not yet (KIP-207). */
static int16_t latest_error(const struct mqd_reactor *r, const struct mqd_partition_slot *slot, int16_t version)
{
    if (r->lease_lost)
        return MQD_KAFKA_NOT_LEADER_OR_FOLLOWER;
    if (!mqd_load_acquire(&slot->latest_pending))
        return 0;
    return version >= NOT_AVAILABLE_SINCE_VERSION ? MQD_KAFKA_OFFSET_NOT_AVAILABLE : MQD_KAFKA_LEADER_NOT_AVAILABLE;
}

static void answer_one(struct mqd_reactor *r, int16_t version, int8_t isolation_level, const struct mqd_topic *topic, const struct mqd_list_offsets_partition *asked)
{
    struct mqd_buffer *out = &r->scratch;
    int16_t error = 0;
    int64_t offset = -1;
    int32_t leader_epoch = -1;
    if (!topic || asked->partition_index < 0 || (uint32_t)asked->partition_index >= topic->partition_count) {
        error = MQD_KAFKA_UNKNOWN_TOPIC_OR_PARTITION;
    } else if (topic->slots[asked->partition_index] == MQD_SLOT_NONE || mqd_topics_led_elsewhere(&r->topics, &topic->places[asked->partition_index])) {
        error = MQD_KAFKA_NOT_LEADER_OR_FOLLOWER;
    } else {
        struct mqd_partition_slot *slot = mqd_control_partition(r->options.control, topic->slots[asked->partition_index]);
        struct mqd_positions positions;
        leader_epoch = mqd_load_relaxed(&slot->leader_epoch);
        if (mqd_load_acquire(&slot->state) != MQD_SLOT_ONLINE || mqd_load_acquire(&slot->role) != MQD_ROLE_LEADS)
            error = MQD_KAFKA_NOT_LEADER_OR_FOLLOWER;
        else if (asked->current_leader_epoch >= 0 && asked->current_leader_epoch != leader_epoch)
            error = asked->current_leader_epoch < leader_epoch ? MQD_KAFKA_FENCED_LEADER_EPOCH : MQD_KAFKA_UNKNOWN_LEADER_EPOCH;
        else if (asked->timestamp == TIMESTAMP_LATEST)
            error = latest_error(r, slot, version);
        mqd_slot_positions(slot, &positions);
        if (!error)
            offset = asked->timestamp == TIMESTAMP_EARLIEST ? positions.log_start_offset : isolation_level ? positions.last_stable_offset : positions.high_watermark;
    }
    mqd_list_offsets_response_partition(out, version, asked->partition_index, error, -1, offset, error ? -1 : leader_epoch);
}

bool mqd_list_offsets_on(struct mqd_reactor *r, struct mqd_connection *c, const struct mqd_request_header *header, const uint8_t *body, uint32_t size_bytes)
{
    int16_t version = header->api_version;
    if (!all_native(r, c, body, size_bytes, version))
        return false;
    struct mqd_request *request = mqd_request_new(r, c, header, MQD_REQUEST_READY);
    if (!request) {
        mqd_connection_close(r, c, "out of memory");
        return true;
    }
    struct mqd_list_offsets_request walk;
    struct mqd_buffer *out = &r->scratch;
    out->size_bytes = 0;
    mqd_list_offsets_parse(body, size_bytes, version, &walk);
    mqd_response_begin(out, MQD_API_LIST_OFFSETS, version, header->correlation_id);
    mqd_list_offsets_response_begin(out, version, 0, walk.topic_count);
    for (int32_t t = 0; t < walk.topic_count; t++) {
        struct mqd_list_offsets_topic named;
        mqd_list_offsets_next_topic(&walk, &named);
        struct mqd_topic_key key = {.name = named.name};
        struct mqd_topic *topic = mqd_topics_find(&r->topics, &key);
        mqd_list_offsets_response_topic(out, version, named.name, named.partition_count);
        for (int32_t p = 0; p < named.partition_count; p++) {
            struct mqd_list_offsets_partition asked;
            mqd_list_offsets_next_partition(&walk, &asked);
            answer_one(r, version, walk.isolation_level, topic, &asked);
        }
        mqd_list_offsets_response_topic_end(out, version);
    }
    mqd_list_offsets_response_end(out, version);
    mqd_stat(r, MQD_COUNT_REQUESTS_LIST_OFFSETS, 1);
    uint32_t length = out->size_bytes - 4; /* a READY reply begins with the correlation id; its length word is written when it leaves */
    if (out->failed || !mqd_request_reply(r, request, out->bytes + 4, length)) {
        out->failed = false;
        mqd_connection_fail(r, c, "no memory for another answer (queued.max.request.bytes)");
        return true;
    }
    mqd_request_complete(r, request);
    return true;
}
