/* Lookups that wait for a flush: ListOffsets (latest) right after an acknowledgement that did not
 * wait for the disk (acks=1).
 *
 * With flush.on.ack the high watermark follows the flush, which starts in the same turn of the
 * event loop as the append. A lookup therefore waits until everything that the log held when it
 * arrived is flushed; then its client sees the records that it has written, and no offset is
 * returned that a power failure could undo. It waits only for the local flush, never for followers,
 * and for at most MQD_LOOKUP_MS_MAX: if the disk hangs, the response has the offset known so far.
 *
 * A lookup waits for one partition at a time, in r->lookups by slot. All end offsets that it
 * waits for were taken at its arrival, so flushes of different partitions can complete in parallel.
 * The lookup sets flush_awaited in the slot, then checks the positions again; the owner publishes
 * them, then checks the flag. At least one side sees the other's store.
 */
#include <stdlib.h>
#include <string.h>

#include "server/reactor.h"

#define MQD_LOOKUP_MS_MAX 2000

bool mqd_lookup_must_wait(struct mqd_reactor *r, uint32_t slot_index, int64_t end_offset)
{
    const struct mqd_partition_slot *slot = mqd_control_partition(r->options.control, slot_index);
    struct mqd_positions positions;
    if (!mqd_load_acquire(&slot->flush_on_ack) || mqd_load_acquire(&slot->state) != MQD_SLOT_ONLINE ||
        mqd_load_acquire(&slot->role) != MQD_ROLE_LEADS)
        return false;
    mqd_slot_positions(slot, &positions);
    return positions.durable_offset < (end_offset < positions.log_end_offset ? end_offset : positions.log_end_offset);
}

static struct mqd_node *bucket_of(struct mqd_reactor *r, uint32_t slot)
{
    return &r->lookups[slot % MQD_LOOKUP_BUCKET_COUNT];
}

/* Parks the lookup on the next partition that is not flushed yet, or answers it if there is none.
 * May close the connection. */
static void advance(struct mqd_reactor *r, struct mqd_lookup *lookup)
{
    for (; lookup->awaited_index < lookup->count; lookup->awaited_index++) {
        const struct mqd_awaited_flush *awaited = &lookup->awaited[lookup->awaited_index];
        if (!mqd_lookup_must_wait(r, awaited->slot, awaited->end_offset))
            continue;
        mqd_slot_request_flush_notice(r->options.control, awaited->slot);
        if (!mqd_lookup_must_wait(r, awaited->slot, awaited->end_offset))
            continue;
        mqd_list_append(bucket_of(r, awaited->slot), &lookup->node);
        return;
    }
    mqd_list_offsets_respond(r, lookup->request, lookup->body, lookup->body_bytes);
}

struct mqd_lookup *mqd_lookup_new(struct mqd_reactor *r, struct mqd_request *request, uint32_t awaited_count_max,
                                  const uint8_t *body, uint32_t body_bytes)
{
    uint64_t size_bytes = sizeof(struct mqd_lookup) + awaited_count_max * sizeof(struct mqd_awaited_flush) + body_bytes;
    struct mqd_lookup *lookup = mqd_request_charge(r, request, size_bytes) ? malloc(size_bytes) : NULL;
    if (!lookup)
        return NULL;
    *lookup = (struct mqd_lookup){.request = request, .body_bytes = body_bytes};
    mqd_list_init(&lookup->node);
    lookup->body = (uint8_t *)&lookup->awaited[awaited_count_max];
    memcpy(lookup->body, body, body_bytes);
    request->lookup = lookup;
    return lookup;
}

void mqd_lookup_begin(struct mqd_reactor *r, struct mqd_lookup *lookup)
{
    mqd_timer_arm(r, lookup->request, r->now_ms + MQD_LOOKUP_MS_MAX);
    advance(r, lookup);
}

void mqd_lookup_free(struct mqd_request *request)
{
    if (!request->lookup)
        return;
    mqd_list_remove(&request->lookup->node);
    free(request->lookup);
    request->lookup = NULL;
}

void mqd_lookup_expire(struct mqd_reactor *r, struct mqd_request *request)
{
    if (!request->lookup)
        return;
    mqd_list_remove(&request->lookup->node);
    request->lookup->awaited_index = request->lookup->count;
    advance(r, request->lookup);
}

void mqd_lookups_wake(struct mqd_reactor *r, uint32_t slot)
{
    struct mqd_node due, *node;
    mqd_list_init(&due);
    mqd_list_move_all(&due, bucket_of(r, slot));
    /* answering a lookup may close its connection and free other lookups in the list */
    while ((node = mqd_list_pop(&due))) {
        struct mqd_lookup *lookup = MQD_CONTAINER(node, struct mqd_lookup, node);
        if (lookup->awaited[lookup->awaited_index].slot == slot)
            advance(r, lookup);
        else
            mqd_list_append(bucket_of(r, slot), node);
    }
}

/* Called by the owner when a flush has ended and its result is published, or when the slot is no
 * longer served. A worker whose ring is full gets no notification: its lookups are answered when
 * they time out. */
void mqd_lookups_notify(struct mqd_reactor *r, uint32_t slot)
{
    struct mqd_partition_slot *shared = mqd_control_partition(r->options.control, slot);
    mqd_fence_full(); /* orders the publish before the check for waiters */
    if (!mqd_load_relaxed(&shared->flush_awaited) || !mqd_exchange(&shared->flush_awaited, (uint8_t)0))
        return;
    mqd_lookups_wake(r, slot);
    struct mqd_descriptor notification = {.kind = MQD_LINK_FLUSHED, .slot = slot};
    for (uint32_t to = 0; to <= mqd_control_worker_count(r->options.control); to++)
        if (to != r->options.self && r->overflow_head[to] == r->overflow_tail[to])
            mqd_endpoint_send(r->endpoint, to, &notification);
}
