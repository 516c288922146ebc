/* The parts into which the time of a slow request is divided, and, in brackets, the time stamps that
 * separate them. The parts add up to the total:
 *
 *   Produce           queue (check, large batch) [begun] disk or owner [flushed] replicas [completed] turn
 *   Fetch             wait (for records)         [begun] disk [completed] turn
 *   to the acceptor   queue                      [begun] acceptor [completed] turn
 *
 * `turn` is the time spent waiting for earlier requests of the connection. With quotas, `throttle`
 * is reported too, in addition to the total: how long the broker stops reading from the connection
 * after the response.
 */
#include "server/slow/slow.h"

#include <string.h>

#define REPORTS_PER_SECOND_MAX 20

static uint64_t elapsed_us(int64_t from_ns, int64_t to_ns)
{
    return to_ns > from_ns ? (uint64_t)(to_ns - from_ns) / 1000 : 0;
}

void mqd_slow_begin_fetch(const struct mqd_reactor *r, struct mqd_request *request)
{
    if (!mqd_slow_enabled(r))
        return;
    mqd_slow_begin(r, request);
    const struct mqd_fetch_set *set = request->set;
    request->times.slot = MQD_SLOT_NONE;
    for (uint32_t i = 0; i < set->included_count && request->times.slot == MQD_SLOT_NONE; i++) {
        const struct mqd_fetch_entry *entry = set->included[i];
        if (entry->topic && (uint32_t)entry->partition_index < entry->topic->partition_count)
            request->times.slot = entry->topic->slots[entry->partition_index];
    }
}

void mqd_slow_on_flush(struct mqd_reactor *r, const struct mqd_owned *owned)
{
    struct mqd_positions positions;
    mqd_partition_positions(owned->partition, &positions);
    MQD_LIST_EACH(node, next, &owned->waiting) {
        struct mqd_append *append = MQD_CONTAINER(node, struct mqd_append, node);
        if (append->end_offset > positions.durable_offset)
            break;
        if (append->request && !append->request->times.flushed_ns)
            append->request->times.flushed_ns = r->now_ns;
    }
}

void mqd_slow_copy_client(struct mqd_connection *c, const struct mqd_request_header *header)
{
    uint32_t bytes = header->client_id && header->client_id_bytes > 0 ? (uint32_t)header->client_id_bytes : 0;
    if (bytes > sizeof c->slow_client)
        bytes = sizeof c->slow_client;
    if (bytes)
        memcpy(c->slow_client, header->client_id, bytes);
    c->slow_client_bytes = (uint8_t)bytes;
}

/* Counts a report towards REPORTS_PER_SECOND_MAX. False: the limit is reached, and the report is
 * omitted. */
static bool take_report_slot(struct mqd_reactor *r)
{
    int64_t second = r->now_ms / 1000;
    if (second != r->slow_second) {
        r->slow_second = second;
        r->slow_count = 0;
    }
    if (r->slow_count == REPORTS_PER_SECOND_MAX) {
        r->slow_omitted_count++;
        return false;
    }
    r->slow_count++;
    return true;
}

static void divide_time(const struct mqd_reactor *r, const struct mqd_request *request, uint64_t *spent_us)
{
    const struct mqd_request_times *times = &request->times;
    int64_t begun_ns = times->begun_ns ? times->begun_ns : times->completed_ns;
    bool is_fetch = request->kind == MQD_REQUEST_FETCH || request->kind == MQD_REQUEST_SHARE;
    spent_us[is_fetch ? MQD_SPENT_WAIT : MQD_SPENT_QUEUE] = elapsed_us(request->started_ns, begun_ns);
    spent_us[MQD_SPENT_TURN] = elapsed_us(times->completed_ns, r->now_ns);
    enum mqd_spent work_part = request->kind == MQD_REQUEST_CONTROL ? MQD_SPENT_ACCEPTOR
                               : times->forwarded                   ? MQD_SPENT_OWNER
                                                                    : MQD_SPENT_DISK;
    int64_t flushed_ns = times->flushed_ns ? times->flushed_ns : times->completed_ns;
    spent_us[work_part] = elapsed_us(begun_ns, flushed_ns);
    spent_us[MQD_SPENT_REPLICAS] = elapsed_us(flushed_ns, times->completed_ns);
}

void mqd_slow_report(struct mqd_reactor *r, const struct mqd_connection *c, const struct mqd_request *request)
{
    if (c->peer_node >= 0) /* the client is another host: a follower's fetch normally waits for records */
        return;
    struct mqd_event event = {.kind = MQD_EVENT_SLOW, .slot = request->times.slot, .connection = c->id};
    bool is_fetch = request->kind == MQD_REQUEST_FETCH || request->kind == MQD_REQUEST_SHARE;
    uint64_t requested_us = is_fetch && request->wait_ms > 0 ? (uint64_t)request->wait_ms * 1000 : 0;
    divide_time(r, request, event.spent_us);
    uint64_t total_us = elapsed_us(request->started_ns, r->now_ns);
    uint64_t waited_us = event.spent_us[MQD_SPENT_WAIT],
             excused_us = waited_us < requested_us ? waited_us : requested_us;
    if (total_us - excused_us < (uint64_t)r->options.slow_ms * 1000 || !take_report_slot(r))
        return;
    if (c->muted)
        event.spent_us[MQD_SPENT_THROTTLE] = elapsed_us(r->now_ns, c->muted_until_ns);
    event.total_us = total_us;
    event.api_key = request->api_key;
    event.api_version = (uint32_t)request->version;
    event.count = r->slow_omitted_count;
    r->slow_omitted_count = 0;
    event.client_id_bytes = c->slow_client_bytes;
    memcpy(event.text, c->slow_client, c->slow_client_bytes);
    uint32_t room = sizeof event.text - 1 - c->slow_client_bytes;
    if (c->principal)
        memcpy(event.text + c->slow_client_bytes, c->principal, c->principal_bytes < room ? c->principal_bytes : room);
    mqd_reactor_emit(r, &event);
}
