/* The response to a Fetch: headers in memory and ranges of segment files. Small ranges are copied,
 * the others are sent by sendfile. See server/fetch/fetch.c. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "server/reactor.h"

bool mqd_fetch_put_range(struct mqd_reactor *r, const struct mqd_connection *c, struct mqd_range *range,
                         uint64_t *file_bytes)
{
    struct mqd_buffer *out = &r->scratch;
    uint32_t size_bytes = range->size_bytes;
    if (size_bytes < r->options.sendfile_bytes_min || c->local) {
        mqd_buffer_reserve(out, size_bytes);
        ssize_t n = out->failed ? -1
                                : pread(mqd_segment_ref_fd(range->segment), out->bytes + out->size_bytes, size_bytes,
                                        range->position);
        mqd_range_release(r->reader, range);
        if (n != (ssize_t)size_bytes)
            return false;
        out->size_bytes += size_bytes;
        return true;
    }
    if (r->scratch_chunk_count == r->scratch_chunk_capacity) {
        uint32_t capacity = r->scratch_chunk_capacity ? r->scratch_chunk_capacity * 2 : 64;
        struct mqd_chunk *chunks = realloc(r->scratch_chunks, sizeof *chunks * capacity);
        if (!chunks)
            return false;
        r->scratch_chunks = chunks;
        r->scratch_chunk_capacity = capacity;
    }
    r->scratch_chunks[r->scratch_chunk_count++] = (struct mqd_chunk){out->size_bytes, *range};
    range->segment = NULL; /* the chunk owns the reference now */
    *file_bytes += size_bytes;
    return true;
}

static bool encode_partition(struct mqd_reactor *r, const struct mqd_connection *c, struct mqd_fetch_entry *entry,
                             int16_t version, uint64_t *file_bytes, struct mqd_response_nodes *nodes)
{
    struct mqd_current_leader leader;
    bool leader_moved = entry->outcome.error == MQD_KAFKA_NOT_LEADER_OR_FOLLOWER ||
                        entry->outcome.error == MQD_KAFKA_FENCED_LEADER_EPOCH;
    bool leader_known = leader_moved && version >= 12 &&
                        mqd_topics_current_leader(&r->topics, entry->topic, entry->partition_index, &leader, nodes);
    entry->outcome.current_leader = leader_known ? &leader : NULL;
    entry->outcome.aborted = entry->aborted.entries;
    entry->outcome.aborted_count = entry->aborted.count;
    mqd_fetch_response_partition(&r->scratch, version, &entry->outcome);
    if (__builtin_expect(entry->filtered.bytes != NULL || entry->filtered.has_empty, 0))
        mqd_view_put(r, entry);
    bool ok = !entry->range.size_bytes || mqd_fetch_put_range(r, c, &entry->range, file_bytes);
    mqd_fetch_response_partition_tags(&r->scratch, version, &entry->outcome);
    entry->outcome.current_leader = NULL;
    entry->sent_once = 1;
    entry->sent_error = entry->outcome.error;
    entry->sent_high_watermark = entry->outcome.high_watermark;
    entry->sent_last_stable = entry->outcome.last_stable_offset;
    entry->sent_log_start = entry->outcome.log_start_offset;
    return ok;
}

static bool same_topic(const struct mqd_fetch_entry *a, const struct mqd_fetch_entry *b)
{
    if (a->topic || b->topic)
        return a->topic == b->topic;
    if (a->key.by_id)
        return memcmp(a->key.topic_id, b->key.topic_id, 16) == 0;
    return a->key.name.size_bytes == b->key.name.size_bytes &&
           memcmp(a->key.name.bytes, b->key.name.bytes, (size_t)a->key.name.size_bytes) == 0;
}

/* Returns how many consecutive entries, starting at index `first`, belong to the same topic. */
static uint32_t count_of_topic(const struct mqd_fetch_set *set, uint32_t first)
{
    uint32_t end = first + 1;
    while (end < set->included_count && same_topic(set->included[first], set->included[end]))
        end++;
    return end - first;
}

static void charge_quota(struct mqd_reactor *r, struct mqd_connection *c, const struct mqd_fetch_set *set)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < set->included_count; i++)
        bytes += (uint64_t)set->included[i]->outcome.records_bytes;
    mqd_throttle_charge(r, c, MQD_QUOTA_FETCH, bytes);
}

void mqd_fetch_encode(struct mqd_reactor *r, struct mqd_request *request)
{
    struct mqd_buffer *out = &r->scratch;
    struct mqd_fetch_set *set = request->set;
    int16_t version = request->version;
    uint64_t file_bytes = 0;
    bool ok = true;
    struct mqd_response_nodes nodes;
    nodes.count = 0;
    out->size_bytes = 0;
    r->scratch_chunk_count = 0;
    mqd_response_begin(out, MQD_API_FETCH, version, request->correlation_id);
    if (request->fetch_error || !set) {
        mqd_fetch_response_begin(out, version, 0, request->fetch_error, 0, 0);
    } else {
        int32_t topic_count = 0;
        if (r->quota_kinds)
            charge_quota(r, request->connection, set);
        for (uint32_t i = 0; i < set->included_count; i += count_of_topic(set, i))
            topic_count++;
        mqd_fetch_response_begin(out, version, mqd_throttle_time_ms(r, request->connection), 0, set->session_id,
                                 topic_count);
        for (uint32_t i = 0; i < set->included_count;) {
            uint32_t count = count_of_topic(set, i);
            mqd_fetch_response_topic(out, version, &set->included[i]->key, (int32_t)count);
            for (uint32_t end = i + count; i < end; i++)
                ok &= encode_partition(r, request->connection, set->included[i], version, &file_bytes, &nodes);
            mqd_fetch_response_topic_end(out, version);
        }
    }
    mqd_fetch_response_end_nodes(out, version, nodes.nodes,
                                 mqd_connection_can_use_node_addresses(request->connection) ? nodes.count : 0);
    mqd_response_finish(out, file_bytes);
    if (!ok) {
        mqd_log(r, 3, request->connection->id, UINT32_MAX,
                "a segment could not be read while answering a fetch; closing the connection");
        /* the bytes so far are not a complete response: output.c closes the connection instead of
         * sending them */
        out->failed = true;
    }
    mqd_output_take_scratch(r, request->connection);
}
