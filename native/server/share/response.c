/* Encodes the responses to ShareFetch and ShareAcknowledge. See server/share/share.h. */
#include <string.h>

#include "server/share/share.h"

/* Whether the response includes the part. As in Kafka, naming a partition that is already in the
 * session is not enough: without records, errors or acknowledgements of its own, the partition is
 * included only if an acknowledgement for another partition is accepted. */
static bool is_reported(const struct mqd_share_job *job, const struct mqd_share_part *part)
{
    return part->error || part->acknowledge_error || part->acknowledges || part->run_count ||
           (part->named_with_acknowledgements && job->has_valid_acknowledgement) ||
           ((job->opens || part->unreported) && job->fetches);
}

static void put_part(struct mqd_reactor *r, const struct mqd_request *request, struct mqd_share_part *part,
                     struct mqd_response_nodes *nodes, uint64_t *file_bytes, bool *is_complete)
{
    struct mqd_share_fetch_outcome outcome = {.partition_index = part->partition_index,
                                              .error = part->error,
                                              .acknowledge_error = part->acknowledge_error,
                                              .records_bytes = part->range.size_bytes};
    bool moved =
        part->error == MQD_KAFKA_NOT_LEADER_OR_FOLLOWER || part->acknowledge_error == MQD_KAFKA_NOT_LEADER_OR_FOLLOWER;
    if (moved && part->topic)
        mqd_topics_current_leader(&r->topics, part->topic, part->partition_index, &outcome.current_leader, nodes);
    mqd_share_fetch_response_partition(&r->scratch, request->api_key, &outcome);
    if (request->api_key == MQD_API_SHARE_FETCH) {
        if (part->range.size_bytes)
            *is_complete &= mqd_fetch_put_range(r, request->connection, &part->range, file_bytes);
        mqd_share_fetch_response_acquired(&r->scratch, (int32_t)part->run_count);
        for (uint32_t i = 0; i < part->run_count; i++)
            mqd_share_fetch_response_run(&r->scratch, part->runs[i].first, part->runs[i].last, part->runs[i].count);
    }
    mqd_share_fetch_response_partition_end(&r->scratch);
}

/* The parts of one topic are adjacent and begin with part `first`. Sets *end to the index after the
 * last of them, and returns how many of them are reported. */
static int32_t count_reported(const struct mqd_share_job *job, uint32_t first, uint32_t *end)
{
    int32_t count = 0;
    for (*end = first; *end < job->part_count; ++*end) {
        if (memcmp(job->parts[first].topic_id, job->parts[*end].topic_id, 16) != 0)
            break;
        count += is_reported(job, &job->parts[*end]);
    }
    return count;
}

static void put_topics(struct mqd_reactor *r, const struct mqd_request *request, struct mqd_response_nodes *nodes,
                       uint64_t *file_bytes, bool *is_complete)
{
    struct mqd_share_job *job = request->share;
    uint32_t end;
    for (uint32_t i = 0; i < job->part_count; i = end) {
        int32_t count = count_reported(job, i, &end);
        if (!count)
            continue;
        mqd_share_fetch_response_topic(&r->scratch, job->parts[i].topic_id, count);
        for (uint32_t p = i; p < end; p++)
            if (is_reported(job, &job->parts[p]))
                put_part(r, request, &job->parts[p], nodes, file_bytes, is_complete);
        mqd_share_fetch_response_topic_end(&r->scratch);
    }
}

static int32_t count_topics(const struct mqd_share_job *job)
{
    int32_t topic_count = 0;
    uint32_t end;
    for (uint32_t i = 0; i < job->part_count; i = end)
        topic_count += count_reported(job, i, &end) > 0;
    return topic_count;
}

static void charge(struct mqd_reactor *r, const struct mqd_request *request)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < request->share->part_count; i++)
        bytes += request->share->parts[i].range.size_bytes;
    mqd_throttle_charge(r, request->connection, MQD_QUOTA_FETCH, bytes);
}

void mqd_share_encode(struct mqd_reactor *r, struct mqd_request *request)
{
    struct mqd_buffer *out = &r->scratch;
    struct mqd_share_job *job = request->share;
    struct mqd_response_nodes nodes;
    uint64_t file_bytes = 0;
    bool is_complete = true;
    nodes.count = 0;
    out->size_bytes = 0;
    r->scratch_chunk_count = 0;
    if (job && r->quota_kinds)
        charge(r, request);
    mqd_response_begin(out, request->api_key, request->version, request->correlation_id);
    mqd_share_fetch_response_begin(out, request->api_key, request->version,
                                   mqd_throttle_time_ms(r, request->connection), request->share_error, NULL,
                                   job ? job->lock_ms : 0, job ? count_topics(job) : 0);
    if (job)
        put_topics(r, request, &nodes, &file_bytes, &is_complete);
    mqd_share_fetch_response_end(out, nodes.nodes,
                                 mqd_connection_can_use_node_addresses(request->connection) ? nodes.count : 0);
    mqd_response_finish(out, file_bytes);
    if (!is_complete) {
        mqd_log(r, 3, request->connection->id, UINT32_MAX,
                "a segment could not be read while answering a share group's fetch; closing the connection");
        out->failed = true; /* the response is incomplete: the connection is closed instead */
    }
    mqd_output_take_scratch(r, request->connection);
}
