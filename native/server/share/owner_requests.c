/* Requests to the owners of partitions, and their responses. See server/share/share.h. */
#include <stdlib.h>
#include <string.h>

#include "server/share/share.h"

#define CONTROL_ARENA_DIVISOR 2 /* payloads are placed until 1 / CONTROL_ARENA_DIVISOR of the control arena is used */

int16_t mqd_share_owner_of(struct mqd_reactor *r, uint32_t slot, uint16_t *owner, uint64_t *generation)
{
    if (slot == MQD_SLOT_NONE || r->lease_lost) /* H3 */
        return MQD_KAFKA_NOT_LEADER_OR_FOLLOWER;
    struct mqd_partition_slot *shared = mqd_control_partition(r->options.control, slot);
    uint8_t state = mqd_load_acquire(&shared->state);
    if (state != MQD_SLOT_ONLINE)
        return state == MQD_SLOT_OFFLINE ? MQD_KAFKA_STORAGE_ERROR : MQD_KAFKA_NOT_LEADER_OR_FOLLOWER;
    if (mqd_load_acquire(&shared->version) == 0)
        return MQD_KAFKA_STORAGE_ERROR;
    *owner = mqd_load_relaxed(&shared->owner);
    *generation = mqd_load_acquire(&shared->owner_generation);
    bool serves = mqd_load_acquire(&shared->role) == MQD_ROLE_LEADS &&
                  *owner < mqd_control_worker_count(r->options.control) &&
                  *generation == mqd_load_acquire(&mqd_control_endpoint(r->options.control, *owner)->generation);
    return serves ? 0 : MQD_KAFKA_NOT_LEADER_OR_FOLLOWER;
}

/* ---- the table of calls: a token is an index (24 bits), its sequence number (24) and our
 * generation (16) ---- */

static struct mqd_share_call *call_new(struct mqd_shares *shares)
{
    if (shares->call_free != UINT32_MAX) {
        struct mqd_share_call *call = shares->calls[shares->call_free];
        shares->call_free = call->next_free;
        return call;
    }
    if (shares->call_count == shares->call_capacity) {
        uint32_t capacity = shares->call_capacity ? shares->call_capacity * 2 : 256;
        struct mqd_share_call **calls = capacity > 0xffffff ? NULL : realloc(shares->calls, capacity * sizeof *calls);
        if (!calls)
            return NULL;
        shares->calls = calls;
        shares->call_capacity = capacity;
    }
    struct mqd_share_call *call = calloc(1, sizeof *call);
    if (!call)
        return NULL;
    mqd_list_init(&call->node);
    call->index = shares->call_count;
    return shares->calls[shares->call_count++] = call;
}

static struct mqd_share_call **call_field(struct mqd_share_part *part, uint8_t kind)
{
    return kind == MQD_SHARE_REQUEST_ACKNOWLEDGE ? &part->acknowledge_call : &part->acquire_call;
}

static void call_end(struct mqd_reactor *r, struct mqd_share_call *call)
{
    struct mqd_shares *shares = r->shares;
    mqd_list_remove(&call->node);
    if (call->payload_offset >= 0)
        mqd_arena_release(r->control_arena, (uint64_t)call->payload_offset);
    free(call->payload);
    call->payload = NULL;
    if (call->part)
        *call_field(call->part, call->kind) = NULL;
    call->part = NULL;
    call->used = 0;
    call->sequence = (call->sequence + 1) & 0xffffff;
    call->next_free = shares->call_free;
    shares->call_free = call->index;
}

static uint64_t token_of(const struct mqd_reactor *r, const struct mqd_share_call *call)
{
    return (r->generation & 0xffff) << 48 | (uint64_t)call->sequence << 24 | call->index;
}

static struct mqd_share_call *call_of(const struct mqd_reactor *r, uint64_t token)
{
    uint32_t index = token & 0xffffff;
    if (!r->shares || token >> 48 != (r->generation & 0xffff) || index >= r->shares->call_count)
        return NULL;
    struct mqd_share_call *call = r->shares->calls[index];
    return call->used && call->sequence == (token >> 24 & 0xffffff) ? call : NULL;
}

/* ---- sending ---- */

static bool place_payload(struct mqd_reactor *r, struct mqd_share_call *call)
{
    if (mqd_arena_extents_used(r->control_arena) > mqd_arena_extents_total(r->control_arena) / CONTROL_ARENA_DIVISOR)
        return false;
    call->payload_offset = mqd_arena_allocate(r->control_arena, call->size_bytes);
    if (call->payload_offset < 0)
        return false;
    memcpy(r->options.arenas[r->options.self] + r->control_arena_base + call->payload_offset, call->payload,
           call->size_bytes);
    free(call->payload);
    call->payload = NULL;
    return true;
}

void mqd_share_send_unsent(struct mqd_reactor *r)
{
    struct mqd_shares *shares = r->shares;
    while (!mqd_list_empty(&shares->unsent)) {
        struct mqd_share_call *call = MQD_CONTAINER(shares->unsent.next, struct mqd_share_call, node);
        if (!place_payload(r, call))
            return; /* H1: later requests must not overtake it */
        mqd_list_remove(&call->node);
        struct mqd_descriptor request = {.kind = MQD_LINK_SHARE,
                                         .slot = call->slot,
                                         .token = token_of(r, call),
                                         .offset = r->control_arena_base + (uint64_t)call->payload_offset,
                                         .size_bytes = call->size_bytes,
                                         .c = (int64_t)call->owner_generation};
        mqd_forward_send(r, call->owner, &request);
    }
}

bool mqd_share_call_owner(struct mqd_reactor *r, struct mqd_share_part *part, uint32_t slot, uint16_t owner,
                          uint64_t generation, const struct mqd_share_owner_request *request, const uint8_t *group,
                          const struct mqd_buffer *ranges)
{
    struct mqd_shares *shares = r->shares;
    uint32_t range_bytes = ranges ? ranges->size_bytes : 0;
    uint32_t size_bytes = (uint32_t)sizeof *request + request->group_bytes + range_bytes;
    uint8_t *payload = malloc(size_bytes);
    struct mqd_share_call *call = payload ? call_new(shares) : NULL;
    if (!call) {
        free(payload);
        return false;
    }
    memcpy(payload, request, sizeof *request);
    memcpy(payload + sizeof *request, group, request->group_bytes);
    if (range_bytes)
        memcpy(payload + sizeof *request + request->group_bytes, ranges->bytes, range_bytes);
    call->used = 1;
    call->part = part;
    if (part)
        *call_field(part, request->kind) = call;
    call->kind = request->kind;
    call->joins = request->joins;
    call->size_bytes = size_bytes;
    call->slot = slot;
    call->payload_offset = -1;
    call->owner = owner;
    call->owner_generation = generation;
    call->payload = owner == r->options.self ? NULL : payload;
    if (owner == r->options.self) {
        mqd_share_owner_on_request(r, owner, token_of(r, call), slot, payload, size_bytes);
        free(payload);
        return true;
    }
    mqd_list_append(&shares->unsent, &call->node);
    mqd_share_send_unsent(r);
    return true;
}

/* ---- responses ---- */

static void on_response(struct mqd_reactor *r, const struct mqd_descriptor *response)
{
    struct mqd_share_call *call = call_of(r, response->token);
    if (!call)
        return;
    struct mqd_share_part *part = call->part;
    uint8_t kind = call->kind, joins = call->joins;
    if (!(response->flags & MQD_SHARED_RUN))
        call_end(r, call);
    if (!part)
        return;
    if (response->flags & MQD_SHARED_REFUSED)
        part->joins |= joins;
    if (kind == MQD_SHARE_REQUEST_ACKNOWLEDGE)
        mqd_share_on_acknowledged(r, part, response);
    else
        mqd_share_on_acquired(r, part, kind, response);
}

void mqd_share_respond(struct mqd_reactor *r, uint32_t to, const struct mqd_descriptor *response)
{
    if (to == r->options.self)
        on_response(r, response);
    else
        mqd_forward_send(r, to, response);
}

void mqd_share_on_link(struct mqd_reactor *r, const struct mqd_descriptor *descriptor, uint32_t from)
{
    uint32_t acceptor = mqd_control_worker_count(r->options.control);
    if (from > acceptor || (from == acceptor && descriptor->kind != MQD_LINK_SHARE))
        return;
    if (descriptor->kind == MQD_LINK_SHARE_RESPONSE) {
        on_response(r, descriptor);
        mqd_share_pump(r);
        return;
    }
    uint64_t arena_bytes = r->options.arena_bytes[from];
    bool is_in_arena = r->options.arenas[from] && descriptor->offset <= arena_bytes &&
                       descriptor->size_bytes <= arena_bytes - descriptor->offset;
    if ((uint64_t)descriptor->c != r->generation || !is_in_arena || !mqd_shares_of(r))
        return; /* sent to our predecessor; the sender will notice the predecessor's death */
    const uint8_t *payload = r->options.arenas[from] + descriptor->offset;
    if (from == acceptor) {
        mqd_share_on_archive(r, descriptor->slot, payload, descriptor->size_bytes);
        struct mqd_descriptor release = {
            .kind = MQD_LINK_RELEASE, .token = descriptor->token, .offset = descriptor->offset};
        mqd_forward_send(r, from, &release);
    } else {
        mqd_share_owner_on_request(r, from, descriptor->token, descriptor->slot, payload, descriptor->size_bytes);
    }
    mqd_share_pump(r);
}

void mqd_share_on_endpoint_died(struct mqd_reactor *r, uint32_t endpoint)
{
    struct mqd_shares *shares = r->shares;
    uint64_t generation = mqd_load_acquire(&mqd_control_endpoint(r->options.control, endpoint)->generation);
    if (!shares)
        return;
    for (uint32_t i = 0; i < shares->call_count; i++) {
        struct mqd_share_call *call = shares->calls[i];
        struct mqd_descriptor response = {.token = call->used ? token_of(r, call) : 0,
                                          .error = MQD_KAFKA_NOT_LEADER_OR_FOLLOWER};
        if (call->used && call->owner == endpoint && call->owner_generation < generation)
            on_response(r, &response);
    }
    for (uint32_t i = 0; i < shares->owned_capacity; i++)
        if (shares->owned[i])
            shares->owned[i]->session_counts[endpoint] = 0;
    mqd_share_pump(r);
}
