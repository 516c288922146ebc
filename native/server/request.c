/* Requests between arrival and response: order of responses, timeouts, memory.
 *
 * A request exists until the result of its last append, or the last reply from within the broker,
 * has come back, even if its client has disconnected (connection NULL).
 */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "server/check/checks.h"
#include "server/reactor.h"
#include "server/share/share.h"
#include "server/slow/slow.h"

bool mqd_heap_take(struct mqd_reactor *r, uint64_t bytes)
{
    if (r->heap_bytes + bytes > r->options.heap_bytes_max)
        return false;
    r->heap_bytes += bytes;
    return true;
}

void mqd_heap_release(struct mqd_reactor *r, uint64_t bytes)
{
    MQD_ASSERT(bytes <= r->heap_bytes, "heap: %llu bytes are released, %llu are in use", (unsigned long long)bytes,
               (unsigned long long)r->heap_bytes);
    r->heap_bytes -= bytes;
}

/* The last quarter of the heap is reserved for connections that hold nothing yet, so that one
 * connection cannot stop the others. */
bool mqd_heap_under_pressure(const struct mqd_reactor *r)
{
    return r->heap_bytes > r->options.heap_bytes_max - r->options.heap_bytes_max / 4;
}

bool mqd_request_charge(struct mqd_reactor *r, struct mqd_request *request, uint64_t bytes)
{
    if (!mqd_heap_take(r, bytes))
        return false;
    request->heap_bytes += bytes;
    if (request->connection)
        request->connection->held_bytes += bytes;
    return true;
}

void mqd_request_uncharge(struct mqd_reactor *r, struct mqd_request *request, uint64_t bytes)
{
    mqd_heap_release(r, bytes);
    request->heap_bytes -= bytes;
    if (request->connection)
        request->connection->held_bytes -= bytes;
}

bool mqd_request_reply_append(struct mqd_reactor *r, struct mqd_request *request, const void *bytes,
                              uint32_t size_bytes)
{
    uint32_t old_capacity_bytes = request->reply.capacity_bytes;
    if (request->heap_bytes + size_bytes > r->options.heap_bytes_max)
        return false;
    mqd_buffer_reserve(&request->reply, size_bytes);
    if (request->reply.failed || (request->reply.capacity_bytes > old_capacity_bytes &&
                                  !mqd_request_charge(r, request, request->reply.capacity_bytes - old_capacity_bytes)))
        return false;
    if (size_bytes)
        memcpy(request->reply.bytes + request->reply.size_bytes, bytes, size_bytes);
    request->reply.size_bytes += size_bytes;
    return true;
}

/* Initializes the fields that a Produce does not use. */
static void init_non_produce_fields(struct mqd_request *request)
{
    memset(&request->set, 0, sizeof *request - offsetof(struct mqd_request, set));
    request->control_offset = -1;
    request->control_index = UINT32_MAX;
    mqd_list_init(&request->control_node);
}

static void free_non_produce_fields(struct mqd_reactor *r, struct mqd_request *request)
{
    if (request->set)
        mqd_fetch_detach(r, request);
    if (request->share)
        mqd_share_job_free(r, request);
    if (request->kind == MQD_REQUEST_CONTROL)
        mqd_control_untrack(r, request);
    if (request->frame) {
        mqd_heap_release(r, request->frame_bytes);
        free(request->frame);
    }
    mqd_lookup_free(request);
    if (request->reply.bytes)
        mqd_buffer_free(&request->reply);
}

struct mqd_request *mqd_request_new(struct mqd_reactor *r, struct mqd_connection *c,
                                    const struct mqd_request_header *header, enum mqd_request_kind kind)
{
    if (!mqd_heap_take(r, sizeof(struct mqd_request)))
        return NULL;
    struct mqd_request *request = r->free_requests;
    if (request)
        r->free_requests = request->next;
    else if (!(request = malloc(sizeof *request))) {
        mqd_heap_release(r, sizeof *request);
        return NULL;
    }
    memset(request, 0, offsetof(struct mqd_request, inline_append));
    if (kind != MQD_REQUEST_PRODUCE)
        init_non_produce_fields(request);
    mqd_request_prefetch(r->free_requests);
    request->connection = c;
    request->heap_bytes = sizeof *request;
    c->held_bytes += sizeof *request;
    request->correlation_id = header->correlation_id;
    request->api_key = header->api_key;
    request->version = header->api_version;
    request->kind = (uint8_t)kind;
    request->started_ns = r->now_ns;
    request->arena_offset = -1;
    if (mqd_slow_enabled(r))
        request->times = (struct mqd_request_times){.slot = UINT32_MAX};
    request->id = ++r->next_request_id;
    if (c->tail)
        c->tail->next = request;
    else
        c->head = request;
    c->tail = request;
    c->inflight++;
    return request;
}

void mqd_request_complete(struct mqd_reactor *r, struct mqd_request *request)
{
    if (request->complete)
        return;
    request->complete = 1;
    mqd_slow_complete(r, request);
    mqd_timer_disarm(r, request);
    struct mqd_connection *c = request->connection;
    if (c && (c->head == request || c->relaying_count) && !mqd_list_linked(&c->response_node))
        mqd_list_append(&r->to_respond, &c->response_node);
}

void mqd_request_free(struct mqd_reactor *r, struct mqd_request *request)
{
    MQD_ASSERT(request->kind != MQD_REQUEST_PRODUCE || request->pending == 0,
               "a Produce (id %llu) is freed while %u of its batches are in flight", (unsigned long long)request->id,
               request->pending);
    mqd_timer_disarm(r, request);
    if (request->kind != MQD_REQUEST_PRODUCE)
        free_non_produce_fields(r, request);
    if (request->arena_pins == 0 && request->arena_offset >= 0) {
        mqd_frame_release(r, (uint64_t)request->arena_offset);
        request->arena_offset = -1;
    }
    for (uint32_t i = 0; request->refused && i < request->append_count; i++)
        free(request->appends[i].refusal);
    if (request->transactional_id_kept)
        free((void *)(uintptr_t)request->produce_fields.transactional_id.bytes);
    if (request->appends != &request->inline_append)
        free(request->appends);
    if (request->topics != &request->inline_topic)
        free(request->topics);
    mqd_heap_release(r, request->heap_bytes);
    if (request->connection)
        request->connection->held_bytes -= request->heap_bytes;
    request->next = r->free_requests;
    r->free_requests = request;
}

void mqd_request_orphan(struct mqd_reactor *r, struct mqd_request *request)
{
    request->connection = NULL;
    request->next = NULL;
    mqd_timer_disarm(r, request);
    if (request->kind == MQD_REQUEST_PRODUCE && request->pending) {
        if (request->undecided_count)
            mqd_check_cancel(r, request);
        return; /* mqd_append_done frees the request when its last append is done */
    }
    if ((request->kind == MQD_REQUEST_SHARE || (request->kind == MQD_REQUEST_FETCH && request->evaluated)) &&
        request->pending)
        return; /* reads in flight refer to the request; mqd_fetch_on_read_ahead frees it */
    if (request->kind == MQD_REQUEST_CONTROL && request->sent && !request->complete) {
        mqd_control_orphan(r, request);
        return;
    }
    mqd_request_free(r, request);
}

static void encode(struct mqd_reactor *r, struct mqd_request *request)
{
    struct mqd_connection *c = request->connection;
    switch (request->kind) {
    case MQD_REQUEST_PRODUCE:
        mqd_observe_time(r, MQD_TIME_PRODUCE, r->now_ns - request->started_ns);
        if (!request->no_reply)
            mqd_produce_encode(r, request);
        /* with acks=0 there is no other way to report a failure, and Kafka does the same */
        else if (mqd_produce_failed(request))
            mqd_output_close_when_sent(r, c);
        break;
    case MQD_REQUEST_FETCH:
        mqd_observe_time(r, MQD_TIME_FETCH, r->now_ns - request->started_ns);
        mqd_fetch_encode(r, request);
        break;
    case MQD_REQUEST_SHARE:
        mqd_observe_time(r, MQD_TIME_FETCH, r->now_ns - request->started_ns);
        mqd_share_encode(r, request);
        break;
    default: {
        mqd_observe_time(r, MQD_TIME_CONTROL, r->now_ns - request->started_ns);
        if (request->disconnect)
            mqd_output_close_when_sent(r, c);
        if (request->no_reply)
            break;
        if (c->muted)
            mqd_throttle_write_time(r, request);
        uint8_t length[4] = {(uint8_t)(request->reply.size_bytes >> 24), (uint8_t)(request->reply.size_bytes >> 16),
                             (uint8_t)(request->reply.size_bytes >> 8), (uint8_t)request->reply.size_bytes};
        mqd_output_append(r, c, length, sizeof length);
        if (request->reply.size_bytes) /* a raw SASL token, which has no header, may be empty */
            mqd_output_append(r, c, request->reply.bytes, request->reply.size_bytes);
    }
    }
}

static void encode_and_charge(struct mqd_reactor *r, struct mqd_connection *c, struct mqd_request *request)
{
    int64_t began_ns = r->quota_kinds >> MQD_QUOTA_REQUEST & 1 ? mqd_throttle_measure_begin(r, c) : 0;
    encode(r, request);
    if (began_ns)
        mqd_throttle_measure_end(r, c, began_ns);
    if (mqd_slow_enabled(r))
        mqd_slow_report(r, c, request);
}

/* The one exception to R1 (server/reactor.h: responses in the order of the requests): on a
 * shared-memory connection, a request that waits for a leader on another host, which may be
 * unreachable, does not delay other responses. The client matches responses by correlation id, and
 * those from one leader still arrive in order. */
static void respond_past_relays(struct mqd_reactor *r, struct mqd_connection *c)
{
    struct mqd_request *previous = c->head;
    while (previous && !previous->complete && previous->relaying_count && c->relaying_count && !c->closing) {
        struct mqd_request *request = previous->next;
        if (!request || request->kind == MQD_REQUEST_FETCH || !request->complete || !mqd_output_has_room(r, c)) {
            previous = request && request->kind != MQD_REQUEST_FETCH && !request->complete ? request : NULL;
            continue;
        }
        encode_and_charge(r, c, request);
        previous->next = request->next;
        if (c->tail == request)
            c->tail = previous;
        c->inflight--;
        mqd_request_free(r, request);
    }
}

void mqd_connection_respond(struct mqd_reactor *r, struct mqd_connection *c)
{
    while (c->head && !c->closing) {
        struct mqd_request *request = c->head;
        if (!request->complete && request->kind == MQD_REQUEST_FETCH && !request->set->request && !request->evaluated) {
            /* a fetch is evaluated when its response may be sent, so that the data are as recent as
             * possible */
            request->set->request = request;
            /* a client that has hung up does not wait for records and does not delay later
             * requests */
            mqd_fetch_evaluate(r, request, c->hangup);
        }
        if (!request->complete || !mqd_output_has_room(r, c))
            break;
        mqd_request_prefetch(request->next);
        encode_and_charge(r, c, request);
        c->head = request->next;
        if (!c->head)
            c->tail = NULL;
        MQD_ASSERT(c->inflight > 0 && (c->inflight > 1) == (c->head != NULL),
                   "R1: connection %llu: inflight is %u, but after the answered request its list has %s",
                   (unsigned long long)c->id, c->inflight, c->head ? "another" : "no other");
        c->inflight--;
        mqd_request_free(r, request);
    }
    if (c->relaying_count)
        respond_past_relays(r, c);
    mqd_connection_resume(r, c);
}

/* ---- timers: a binary heap by deadline ---- */

static void timer_set(struct mqd_reactor *r, uint32_t index, struct mqd_request *request)
{
    r->timers[index] = request;
    request->timer_index = index;
}

static void timer_sift_up(struct mqd_reactor *r, uint32_t index, struct mqd_request *request)
{
    while (index && r->timers[(index - 1) / 2]->deadline_ms > request->deadline_ms) {
        timer_set(r, index, r->timers[(index - 1) / 2]);
        index = (index - 1) / 2;
    }
    timer_set(r, index, request);
}

static void timer_sift_down(struct mqd_reactor *r, uint32_t index, struct mqd_request *request)
{
    for (;;) {
        uint32_t child = index * 2 + 1;
        if (child >= r->timer_count)
            break;
        if (child + 1 < r->timer_count && r->timers[child + 1]->deadline_ms < r->timers[child]->deadline_ms)
            child++;
        if (r->timers[child]->deadline_ms >= request->deadline_ms)
            break;
        timer_set(r, index, r->timers[child]);
        index = child;
    }
    timer_set(r, index, request);
}

void mqd_timer_arm(struct mqd_reactor *r, struct mqd_request *request, int64_t deadline_ms)
{
    if (request->timer_armed)
        mqd_timer_disarm(r, request);
    if (r->timer_count == r->timer_capacity) {
        uint32_t capacity = r->timer_capacity ? r->timer_capacity * 2 : 1024;
        struct mqd_request **timers = realloc(r->timers, sizeof *timers * capacity);
        if (!timers)
            return; /* without a timer the request still ends when its data arrive or its connection closes */
        r->timers = timers;
        r->timer_capacity = capacity;
    }
    request->deadline_ms = deadline_ms;
    request->timer_armed = 1;
    timer_sift_up(r, r->timer_count++, request);
}

void mqd_timer_disarm(struct mqd_reactor *r, struct mqd_request *request)
{
    if (!request->timer_armed)
        return;
    request->timer_armed = 0;
    struct mqd_request *last = r->timers[--r->timer_count];
    if (last == request)
        return;
    uint32_t index = request->timer_index;
    if (index && r->timers[(index - 1) / 2]->deadline_ms > last->deadline_ms)
        timer_sift_up(r, index, last);
    else
        timer_sift_down(r, index, last);
}

int64_t mqd_timers_next_ms(const struct mqd_reactor *r)
{
    return r->timer_count ? r->timers[0]->deadline_ms : -1;
}

void mqd_timers_run(struct mqd_reactor *r)
{
    while (r->timer_count && r->timers[0]->deadline_ms <= r->now_ms) {
        struct mqd_request *request = r->timers[0];
        mqd_timer_disarm(r, request);
        if (request->kind == MQD_REQUEST_FETCH)
            mqd_fetch_evaluate(r, request, true);
        else if (request->kind == MQD_REQUEST_PRODUCE)
            mqd_produce_timeout(r, request);
        else if (request->kind == MQD_REQUEST_SHARE)
            mqd_share_expire_wait(r, request);
        else if (request->kind == MQD_REQUEST_LIST_OFFSETS)
            mqd_lookup_expire(r, request);
    }
}
