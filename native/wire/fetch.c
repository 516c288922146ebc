/* Fetch: requests and responses, versions 4..18.
 *
 *   request    replica_id v4-14 | wait_ms_max | bytes_min | bytes_max | isolation_level |
 *              session_id, session_epoch v7+ (KIP-227) | topics[ name v4-12 or topic_id v13+
 *              (KIP-516) | partitions[ index | current_leader_epoch v9+ (KIP-320) | fetch_offset |
 *                last_fetched_epoch v12+ (KIP-595) | log_start_offset v5+ | bytes_max | tags: 0
 *                replica_directory_id v17+, 1 high_watermark v18+ ] ] |
 *              forgotten v7+[ name or topic_id | partition indexes[] ] | rack_id v11+ (KIP-392) |
 *              tags: 0 cluster_id v12+, 1 replica_state v15+ (KIP-903)
 *   response   throttle_ms | error, session_id v7+ | topics[ name or topic_id | partitions[ index |
 *              error | high_watermark | last_stable_offset |
 *                log_start_offset v5+ | aborted_transactions[ producer_id | first_offset ] (null:
 *                read_uncommitted) | preferred_read_replica v11+ | records | tags: 0
 *                diverging_epoch, 1 current_leader, 2 snapshot_id ] ] | tags: 0 node_endpoints v16+
 *   flexible from v12. A response has tags only to name other leaders or a diverging epoch.
 *
 *   W1  as in wire/produce.c: a body that mqd_fetch_parse accepted is well-formed to its last byte,
 *       and the fields after the topics (replica_id and replica_epoch from v15, rack_id) are
 *       already known.
 */
#include "wire/buffer.h"
#include "wire/cursor.h"
#include "wire/wire.h"

#define FETCH_VERSION_MIN 4
#define FETCH_VERSION_MAX 18

static inline bool is_flexible(int16_t version)
{
    return version >= 12;
}
static inline bool uses_topic_ids(int16_t version)
{
    return version >= 13;
}

static uint32_t topic_bytes_min(int16_t version)
{
    return uses_topic_ids(version) ? 16 + 1 + 1 : is_flexible(version) ? 1 + 1 + 1 : 2 + 4;
}

static uint32_t partition_bytes_min(int16_t version)
{
    return 4 + (version >= 9 ? 4 : 0) + 8 + (version >= 12 ? 4 : 0) + (version >= 5 ? 8 : 0) + 4 +
           (is_flexible(version) ? 1 : 0);
}

static int check_body(struct mqd_fetch_request *request)
{
    struct mqd_fetch_topic topic;
    struct mqd_fetch_partition partition;
    int32_t forgotten_count, partition_index;
    for (int32_t i = 0; i < request->topic_count; i++) {
        if (mqd_fetch_next_topic(request, &topic))
            return -1;
        for (int32_t j = 0; j < topic.partition_count; j++)
            if (mqd_fetch_next_partition(request, &partition))
                return -1;
    }
    if (mqd_fetch_begin_forgotten(request, &forgotten_count))
        return -1;
    for (int32_t i = 0; i < forgotten_count; i++) {
        if (mqd_fetch_next_forgotten_topic(request, &topic))
            return -1;
        for (int32_t j = 0; j < topic.partition_count; j++)
            if (mqd_fetch_next_forgotten_partition(request, &partition_index))
                return -1;
    }
    return mqd_fetch_end(request);
}

static int take_head(struct mqd_fetch_request *out)
{
    struct mqd_byte_cursor *cursor = &out->cursor;
    int16_t version = out->version;
    if ((version <= 14 && mqd_take_i32(cursor, "replica_id", &out->replica_id)) ||
        mqd_take_i32(cursor, "max_wait_ms", &out->wait_ms_max) || mqd_take_i32(cursor, "min_bytes", &out->bytes_min) ||
        mqd_take_i32(cursor, "max_bytes", &out->bytes_max) ||
        mqd_take_i8(cursor, "isolation_level", &out->isolation_level))
        return -1;
    if (version >= 7 && (mqd_take_i32(cursor, "session_id", &out->session_id) ||
                         mqd_take_i32(cursor, "session_epoch", &out->session_epoch)))
        return -1;
    return mqd_take_count(cursor, is_flexible(version), "topics", topic_bytes_min(version), &out->topic_count);
}

int mqd_fetch_parse(const uint8_t *body, uint32_t size_bytes, int16_t version, struct mqd_fetch_request *out)
{
    *out = (struct mqd_fetch_request){.cursor = mqd_cursor_over(body, size_bytes),
                                      .version = version,
                                      .replica_id = -1,
                                      .replica_epoch = -1,
                                      .session_epoch = -1};
    if (version < FETCH_VERSION_MIN || version > FETCH_VERSION_MAX)
        return mqd_wire_wrong(&out->cursor, "Fetch", "of a version that is not advertised:", version);
    if (take_head(out))
        return -1;
    out->topics_left = out->topic_count;
    struct mqd_fetch_request checked = *out;
    if (check_body(&checked))
        return -1;
    out->replica_id = checked.replica_id;
    out->replica_epoch = checked.replica_epoch;
    out->rack_id = checked.rack_id;
    out->rack_id_bytes = checked.rack_id_bytes;
    return 0;
}

int mqd_fetch_next_topic(struct mqd_fetch_request *request, struct mqd_fetch_topic *out)
{
    bool compact = is_flexible(request->version);
    if (request->topics_left <= 0 || request->partitions_left > 0)
        return mqd_wire_misused("Fetch: no further topic here");
    request->topics_left--;
    if (mqd_take_topic_key(&request->cursor, compact, uses_topic_ids(request->version), &out->key) ||
        mqd_take_count(&request->cursor, compact, "partitions", partition_bytes_min(request->version),
                       &out->partition_count))
        return -1;
    request->partitions_left = out->partition_count;
    return out->partition_count == 0 ? mqd_skip_tags(&request->cursor, compact) : 0;
}

/* Tag 0 (replica_directory_id) is skipped like an unknown tag, but it must have 16 bytes. */
static int take_partition_tags(struct mqd_byte_cursor *cursor, int16_t version, struct mqd_fetch_partition *out)
{
    uint32_t tag_count, tag;
    struct mqd_byte_cursor value;
    if (mqd_take_varint(cursor, "tagged fields", &tag_count))
        return -1;
    for (uint32_t i = 0; i < tag_count; i++) {
        if (mqd_take_tag(cursor, &tag, &value))
            return -1;
        if (tag == 0 && version >= 17 && mqd_cursor_left(&value) != 16)
            return mqd_wire_wrong(&value, "replica_directory_id", "not 16 bytes long but",
                                  (int64_t)mqd_cursor_left(&value));
        if (tag == 1 && version >= 18 &&
            (mqd_take_i64(&value, "high_watermark", &out->high_watermark) ||
             mqd_tag_finished(&value, "high_watermark")))
            return -1;
    }
    return 0;
}

int mqd_fetch_next_partition(struct mqd_fetch_request *request, struct mqd_fetch_partition *out)
{
    struct mqd_byte_cursor *cursor = &request->cursor;
    int16_t version = request->version;
    if (request->partitions_left <= 0)
        return mqd_wire_misused("Fetch: no further partition here");
    out->current_leader_epoch = -1;
    out->last_fetched_epoch = -1;
    out->log_start_offset = -1;
    out->high_watermark = INT64_MAX; /* KIP-1166: the default if the follower does not send it */
    if (mqd_take_i32(cursor, "partition", &out->partition_index) ||
        (version >= 9 && mqd_take_i32(cursor, "current_leader_epoch", &out->current_leader_epoch)) ||
        mqd_take_i64(cursor, "fetch_offset", &out->fetch_offset) ||
        (version >= 12 && mqd_take_i32(cursor, "last_fetched_epoch", &out->last_fetched_epoch)) ||
        (version >= 5 && mqd_take_i64(cursor, "log_start_offset", &out->log_start_offset)) ||
        mqd_take_i32(cursor, "partition_max_bytes", &out->bytes_max))
        return -1;
    if (is_flexible(version) && take_partition_tags(cursor, version, out))
        return -1;
    return --request->partitions_left == 0 ? mqd_skip_tags(cursor, is_flexible(version)) : 0;
}

int mqd_fetch_begin_forgotten(struct mqd_fetch_request *request, int32_t *forgotten_count)
{
    if (request->topics_left > 0 || request->partitions_left > 0)
        return mqd_wire_misused("Fetch: forgotten topics come after the last partition");
    if (request->forgotten_taken)
        return mqd_wire_misused("Fetch: forgotten topics were already read");
    request->forgotten_taken = true;
    *forgotten_count = 0;
    if (request->version < 7)
        return 0;
    if (mqd_take_count(&request->cursor, is_flexible(request->version), "forgotten_topics_data",
                       topic_bytes_min(request->version), forgotten_count))
        return -1;
    request->topics_left = *forgotten_count;
    return 0;
}

int mqd_fetch_next_forgotten_topic(struct mqd_fetch_request *request, struct mqd_fetch_topic *out)
{
    bool compact = is_flexible(request->version);
    if (!request->forgotten_taken || request->topics_left <= 0 || request->partitions_left > 0)
        return mqd_wire_misused("Fetch: no further forgotten topic here");
    request->topics_left--;
    if (mqd_take_topic_key(&request->cursor, compact, uses_topic_ids(request->version), &out->key) ||
        mqd_take_count(&request->cursor, compact, "forgotten partitions", 4, &out->partition_count))
        return -1;
    request->partitions_left = out->partition_count;
    return out->partition_count == 0 ? mqd_skip_tags(&request->cursor, compact) : 0;
}

int mqd_fetch_next_forgotten_partition(struct mqd_fetch_request *request, int32_t *partition_index)
{
    if (!request->forgotten_taken || request->partitions_left <= 0)
        return mqd_wire_misused("Fetch: no further forgotten partition here");
    if (mqd_take_i32(&request->cursor, "forgotten partition", partition_index))
        return -1;
    return --request->partitions_left == 0 ? mqd_skip_tags(&request->cursor, is_flexible(request->version)) : 0;
}

static int take_request_tags(struct mqd_fetch_request *request)
{
    uint32_t tag_count, tag;
    struct mqd_byte_cursor value;
    struct mqd_text cluster_id;
    if (mqd_take_varint(&request->cursor, "tagged fields", &tag_count))
        return -1;
    for (uint32_t i = 0; i < tag_count; i++) {
        if (mqd_take_tag(&request->cursor, &tag, &value))
            return -1;
        if (tag == 0 &&
            (mqd_take_text(&value, true, true, "cluster_id", &cluster_id) || mqd_tag_finished(&value, "cluster_id")))
            return -1;
        if (tag == 1 && request->version >= 15 &&
            (mqd_take_i32(&value, "replica_id", &request->replica_id) ||
             mqd_take_i64(&value, "replica_epoch", &request->replica_epoch) || mqd_skip_tags(&value, true) ||
             mqd_tag_finished(&value, "replica_state")))
            return -1;
    }
    return 0;
}

int mqd_fetch_end(struct mqd_fetch_request *request)
{
    struct mqd_text rack_id = {.bytes = NULL, .size_bytes = 0};
    /* a caller may skip mqd_fetch_begin_forgotten if there are no forgotten topics */
    if (!request->forgotten_taken) {
        int32_t forgotten_count;
        if (mqd_fetch_begin_forgotten(request, &forgotten_count))
            return -1;
    }
    if (request->topics_left > 0 || request->partitions_left > 0)
        return mqd_wire_misused("Fetch: ended before its last forgotten partition");
    if (request->version >= 11 &&
        mqd_take_text(&request->cursor, is_flexible(request->version), false, "rack_id", &rack_id))
        return -1;
    request->rack_id = rack_id.bytes;
    request->rack_id_bytes = rack_id.size_bytes;
    if (is_flexible(request->version) && take_request_tags(request))
        return -1;
    return 0;
}

void mqd_fetch_response_begin(struct mqd_buffer *buffer, int16_t version, int32_t throttle_ms, int16_t error,
                              int32_t session_id, int32_t topic_count)
{
    mqd_put_i32(buffer, throttle_ms);
    if (version >= 7) {
        mqd_put_i16(buffer, error);
        mqd_put_i32(buffer, session_id);
    }
    mqd_put_count(buffer, is_flexible(version), topic_count);
}

void mqd_fetch_response_topic(struct mqd_buffer *buffer, int16_t version, const struct mqd_topic_key *key,
                              int32_t partition_count)
{
    mqd_put_topic_key(buffer, is_flexible(version), uses_topic_ids(version), key);
    mqd_put_count(buffer, is_flexible(version), partition_count);
}

static void put_aborted(struct mqd_buffer *buffer, int16_t version, const struct mqd_fetch_outcome *outcome)
{
    mqd_put_count(buffer, is_flexible(version), outcome->read_committed ? (int32_t)outcome->aborted_count : -1);
    for (uint32_t i = 0; outcome->read_committed && i < outcome->aborted_count; i++) {
        mqd_put_i64(buffer, outcome->aborted[i].producer_id);
        mqd_put_i64(buffer, outcome->aborted[i].first_offset);
        mqd_put_no_tags(buffer, is_flexible(version));
    }
}

void mqd_fetch_response_partition(struct mqd_buffer *buffer, int16_t version, const struct mqd_fetch_outcome *outcome)
{
    mqd_put_i32(buffer, outcome->partition_index);
    mqd_put_i16(buffer, outcome->error);
    mqd_put_i64(buffer, outcome->high_watermark);
    mqd_put_i64(buffer, outcome->last_stable_offset);
    if (version >= 5)
        mqd_put_i64(buffer, outcome->log_start_offset);
    put_aborted(buffer, version, outcome);
    if (version >= 11)
        mqd_put_i32(buffer, outcome->has_preferred ? outcome->preferred_read_replica : -1);
    if (outcome->records_bytes > INT32_MAX)
        buffer->failed = true;
    else
        mqd_put_count(buffer, is_flexible(version), (int32_t)outcome->records_bytes);
}

void mqd_fetch_response_partition_end(struct mqd_buffer *buffer, int16_t version)
{
    mqd_put_no_tags(buffer, is_flexible(version));
}

void mqd_fetch_response_partition_tags(struct mqd_buffer *buffer, int16_t version,
                                       const struct mqd_fetch_outcome *outcome)
{
    uint32_t tag_count = version < 12 ? 0 : outcome->has_diverging_epoch + (outcome->current_leader != NULL);
    if (!tag_count) {
        mqd_fetch_response_partition_end(buffer, version);
        return;
    }
    mqd_put_varint(buffer, tag_count);
    if (outcome->has_diverging_epoch) {
        mqd_put_varint(buffer, 0);
        mqd_put_varint(buffer, 4 + 8 + 1);
        mqd_put_i32(buffer, outcome->diverging_epoch);
        mqd_put_i64(buffer, outcome->diverging_end);
        mqd_put_no_tags(buffer, true);
    }
    if (outcome->current_leader)
        mqd_put_current_leader(buffer, 1, outcome->current_leader);
}

void mqd_fetch_response_topic_end(struct mqd_buffer *buffer, int16_t version)
{
    mqd_put_no_tags(buffer, is_flexible(version));
}

void mqd_fetch_response_end(struct mqd_buffer *buffer, int16_t version)
{
    mqd_put_no_tags(buffer, is_flexible(version));
}

void mqd_fetch_response_end_nodes(struct mqd_buffer *buffer, int16_t version, const struct mqd_node_endpoint *nodes,
                                  uint32_t node_count)
{
    if (version < 16 || !node_count) {
        mqd_fetch_response_end(buffer, version);
        return;
    }
    mqd_put_varint(buffer, 1);
    mqd_put_nodes(buffer, 0, nodes, node_count);
}
