/* Lookups that wait for a flush: ListOffsets (latest) right after an acknowledgement that did not
 * wait for the disk (acks=1).
 *
 * With flush.on.ack the high watermark follows the flush, which begins in the turn of the append. A
 * lookup therefore waits until everything that the log held when it arrived is flushed; then its
 * client sees the records that it has written, and no offset is returned that a power failure could
 * undo. It waits only for the local flush, never for followers, and for at most MQD_LOOK_UP_MS_MAX:
 * if the disk hangs, the response has the offset known so far.
 *
 * A lookup waits for one partition at a time, in r->look_ups by slot. All end offsets that it
 * waits for were taken at its arrival, so flushes of different partitions can complete in parallel.
 * The lookup sets flush_awaited in the slot, then checks the positions again; the owner publishes
 * them, then checks the flag. At least one side sees the other.
 */
#include <stdlib.h>
#include <string.h>

#include "server/reactor.h"

#define MQD_LOOK_UP_MS_MAX 2000

bool mqd_look_up_must_wait(struct mqd_reactor *r, uint32_t slot_index, int64_t end_offset)
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
    return &r->look_ups[slot % MQD_LOOK_UP_BUCKET_COUNT];
}

/* Parks the lookup on the next partition that is not flushed yet, or answers it when there is
 * none. On return the connection may have been closed. */
static void advance(struct mqd_reactor *r, struct mqd_look_up *look_up)
{
    for (; look_up->awaited_index < look_up->count; look_up->awaited_index++) {
        const struct mqd_awaited_flush *awaited = &look_up->awaited[look_up->awaited_index];
        if (!mqd_look_up_must_wait(r, awaited->slot, awaited->end_offset))
            continue;
        mqd_slot_await_flush(r->options.control, awaited->slot);
        if (!mqd_look_up_must_wait(r, awaited->slot, awaited->end_offset))
            continue;
        mqd_list_append(bucket_of(r, awaited->slot), &look_up->node);
        return;
    }
    mqd_list_offsets_respond(r, look_up->request, look_up->body, look_up->body_bytes);
}

struct mqd_look_up *mqd_look_up_new(struct mqd_reactor *r, struct mqd_request *request, uint32_t awaited_count_max,
                                    const uint8_t *body, uint32_t body_bytes)
{
    uint64_t size_bytes =
        sizeof(struct mqd_look_up) + awaited_count_max * sizeof(struct mqd_awaited_flush) + body_bytes;
    struct mqd_look_up *look_up = mqd_request_hold(r, request, size_bytes) ? malloc(size_bytes) : NULL;
    if (!look_up)
        return NULL;
    *look_up = (struct mqd_look_up){.request = request, .body_bytes = body_bytes};
    mqd_list_init(&look_up->node);
    look_up->body = (uint8_t *)&look_up->awaited[awaited_count_max];
    memcpy(look_up->body, body, body_bytes);
    request->look_up = look_up;
    return look_up;
}

void mqd_look_up_begin(struct mqd_reactor *r, struct mqd_look_up *look_up)
{
    mqd_timer_arm(r, look_up->request, r->now_ms + MQD_LOOK_UP_MS_MAX);
    advance(r, look_up);
}

void mqd_look_up_free(struct mqd_request *request)
{
    if (!request->look_up)
        return;
    mqd_list_remove(&request->look_up->node);
    free(request->look_up);
    request->look_up = NULL;
}

void mqd_look_up_expire(struct mqd_reactor *r, struct mqd_request *request)
{
    if (!request->look_up)
        return;
    mqd_list_remove(&request->look_up->node);
    request->look_up->awaited_index = request->look_up->count;
    advance(r, request->look_up);
}

void mqd_look_ups_wake(struct mqd_reactor *r, uint32_t slot)
{
    struct mqd_node due, *node;
    mqd_list_init(&due);
    mqd_list_move_all(&due, bucket_of(r, slot));
    /* answering a lookup may close its connection and free other lookups in the list */
    while ((node = mqd_list_pop(&due))) {
        struct mqd_look_up *look_up = MQD_CONTAINER(node, struct mqd_look_up, node);
        if (look_up->awaited[look_up->awaited_index].slot == slot)
            advance(r, look_up);
        else
            mqd_list_append(bucket_of(r, slot), node);
    }
}

/* Called by the owner when a flush has ended and its result is published, or when the slot is no
 * longer served. A worker whose ring is full gets no notification: its lookups are answered when
 * they time out. */
void mqd_look_ups_notify(struct mqd_reactor *r, uint32_t slot)
{
    struct mqd_partition_slot *shared = mqd_control_partition(r->options.control, slot);
    mqd_fence_full(); /* orders the publish before the check for waiters */
    if (!mqd_load_relaxed(&shared->flush_awaited) || !mqd_exchange(&shared->flush_awaited, (uint8_t)0))
        return;
    mqd_look_ups_wake(r, slot);
    struct mqd_descriptor note = {.kind = MQD_LINK_FLUSHED, .slot = slot};
    for (uint32_t to = 0; to <= mqd_control_worker_count(r->options.control); to++)
        if (to != r->options.self && r->overflow_head[to] == r->overflow_tail[to])
            mqd_endpoint_send(r->endpoint, to, &note);
}
