/* The table of running checks: the arena memory of their payloads, the queue to the acceptor, and
 * what happens when the acceptor dies. What checks are for: server/check/check.c.
 *
 * Invariants
 *   T1  a payload is lent from the moment it is sent until CHECKED, the acceptor's death, or the
 *       end of its job; its appends may end earlier (timeout, client disconnected).
 *   T2  checks are idempotent: after the acceptor's death they are sent again under another token,
 *       except those that no append waits for.
 *   T3  a token consists of the check's index and sequence number: a late response finds another
 *       sequence number and is ignored.
 * Bounds: MQD_CHECK_COUNT_MAX checks; half of the control arena; a quarter of the receive arena for
 * batches that stay there (a single one may be larger; large requests have a bound of their own,
 * server/large.c). Memory for a batch that the acceptor has compressed is allocated when the batch
 * arrives; if there is none, the batch is refused with a retriable error.
 */
#include <stdlib.h>

#include "server/check/check.h"

#define CONTROL_ARENA_DIVISOR 2 /* checks may use 1 / CONTROL_ARENA_DIVISOR of the control arena */
#define FRAME_ARENA_DIVISOR 4   /* batches that stay in the receive arena may use 1 / FRAME_ARENA_DIVISOR of it */
#define NO_CHECK UINT32_MAX

struct mqd_check *mqd_check_by_token(struct mqd_reactor *r, uint64_t token)
{
    uint32_t index = token & 0xffff;
    if (index >= r->check_used_count || !r->checks[index].used || r->checks[index].sequence != (uint32_t)(token >> 16))
        return NULL;
    return &r->checks[index];
}

struct mqd_check *mqd_check_take(struct mqd_reactor *r, uint64_t control_bytes, uint64_t frame_bytes)
{
    control_bytes =
        (control_bytes + MQD_CONTROL_EXTENT_BYTES - 1) / MQD_CONTROL_EXTENT_BYTES * MQD_CONTROL_EXTENT_BYTES;
    uint64_t control_max =
        (uint64_t)mqd_arena_extents_total(r->control_arena) * MQD_CONTROL_EXTENT_BYTES / CONTROL_ARENA_DIVISOR;
    uint64_t frame_max = (uint64_t)mqd_arena_extents_total(r->arena) * MQD_EXTENT_BYTES / FRAME_ARENA_DIVISOR;
    if ((r->check_free == NO_CHECK && r->check_used_count == MQD_CHECK_COUNT_MAX) ||
        r->check_control_bytes + control_bytes > control_max ||
        (frame_bytes && r->check_frame_bytes && r->check_frame_bytes + frame_bytes > frame_max))
        return NULL;
    int64_t offset = control_bytes ? mqd_arena_allocate(r->control_arena, control_bytes) : 0;
    if (offset < 0)
        return NULL;
    uint32_t index = r->check_free;
    if (index != NO_CHECK) {
        r->check_free = r->checks[index].next_free;
    } else {
        index = r->check_used_count++;
        r->checks[index].sequence = (uint32_t)(r->generation << 20);
    }
    struct mqd_check *check = &r->checks[index];
    *check = (struct mqd_check){.sequence = check->sequence,
                                .used = 1,
                                .offset = r->control_arena_base + (uint64_t)offset,
                                .control_bytes = (uint32_t)control_bytes,
                                .frame_bytes = (uint32_t)frame_bytes};
    mqd_list_init(&check->node);
    mqd_list_init(&check->parked);
    r->check_control_bytes += control_bytes;
    r->check_frame_bytes += frame_bytes;
    return check;
}

bool mqd_check_allocate_buffer(struct mqd_reactor *r, struct mqd_check *check, uint32_t size_bytes)
{
    int64_t offset = -1;
    uint64_t base = 0;
    check->buffer_pin = MQD_PIN_RUN;
    if (size_bytes <= MQD_EXTENT_BYTES) {
        offset = mqd_arena_allocate(r->control_arena, size_bytes);
        base = r->control_arena_base;
        check->buffer_pin = MQD_PIN_CONTROL;
    } else if (size_bytes <= (uint64_t)mqd_arena_extents_total(r->arena) * MQD_EXTENT_BYTES / FRAME_ARENA_DIVISOR) {
        offset = mqd_arena_allocate(r->arena, size_bytes);
    } else if (r->large && (offset = mqd_arena_allocate(r->large, size_bytes)) >= 0) {
        base = r->large_base;
        if (!mqd_large_zero(r, base + (uint64_t)offset, size_bytes)) {
            mqd_frame_release(r, base + (uint64_t)offset);
            offset = -1;
        }
    }
    if (offset < 0)
        return false;
    check->buffer = base + (uint64_t)offset;
    check->buffer_bytes = size_bytes;
    check->buffer_filled = 0;
    return true;
}

static void release_buffer(struct mqd_reactor *r, struct mqd_check *check)
{
    if (check->buffer_bytes && check->buffer_pin == MQD_PIN_CONTROL)
        mqd_arena_release(r->control_arena, check->buffer - r->control_arena_base);
    else if (check->buffer_bytes)
        mqd_frame_release(r, check->buffer);
    check->buffer_bytes = check->buffer_filled = 0;
}

void mqd_check_end(struct mqd_reactor *r, struct mqd_check *check)
{
    release_buffer(r, check);
    if (check->control_bytes)
        mqd_arena_release(r->control_arena, check->offset - r->control_arena_base);
    else
        mqd_frame_release(r, check->offset);
    r->check_control_bytes -= check->control_bytes;
    r->check_frame_bytes -= check->frame_bytes;
    mqd_list_remove(&check->node);
    check->used = 0;
    check->sequence++;
    check->next_free = r->check_free;
    r->check_free = (uint32_t)(check - r->checks);
}

uint64_t mqd_check_token(const struct mqd_reactor *r, const struct mqd_check *check)
{
    return (uint64_t)check->sequence << 16 | (uint64_t)(check - r->checks);
}

static bool send_check(struct mqd_reactor *r, struct mqd_check *check)
{
    uint32_t acceptor = mqd_control_worker_count(r->options.control);
    struct mqd_endpoint_slot *slot = mqd_control_endpoint(r->options.control, acceptor);
    /* read before the state: if the acceptor restarts in between, its successor sees the old
     * generation in the descriptor and drops it */
    uint64_t generation = mqd_load_acquire(&slot->generation);
    if (mqd_load_acquire(&slot->state) != MQD_PROCESS_RUNNING || mqd_endpoint_free_count(r->endpoint, acceptor) == 0 ||
        r->overflow_head[acceptor] != r->overflow_tail[acceptor])
        return false;
    struct mqd_descriptor descriptor = {.kind = MQD_LINK_CHECK,
                                        .flags = check->kind,
                                        .slot = check->slot,
                                        .token = mqd_check_token(r, check),
                                        .offset = check->offset,
                                        .size_bytes = check->size_bytes,
                                        .error = (int32_t)(generation & 0x7fffffff),
                                        .a = check->version | (int64_t)check->compression << 16,
                                        .b = (int64_t)check->connection,
                                        .c = (int64_t)check->message_bytes_max << 32 |
                                             (uint32_t)check->compression_level};
    mqd_forward_send(r, acceptor, &descriptor);
    check->sent = 1;
    check->acceptor_generation = generation;
    return true;
}

void mqd_check_send_queued(struct mqd_reactor *r)
{
    while (!mqd_list_empty(&r->check_queue)) {
        struct mqd_check *check = MQD_CONTAINER(r->check_queue.next, struct mqd_check, node);
        if (!send_check(r, check))
            return;
        mqd_list_remove(&check->node);
    }
}

void mqd_check_arm(struct mqd_reactor *r, struct mqd_check *check, struct mqd_request *request)
{
    int64_t timeout_ms = request->produce_fields.timeout_ms, limit_ms = timeout_ms < 1 ? 1
                                                                        : timeout_ms > MQD_CHECK_MS_MAX
                                                                            ? MQD_CHECK_MS_MAX
                                                                            : timeout_ms;
    if (!request->timer_armed || r->now_ms + limit_ms < request->deadline_ms)
        mqd_timer_arm(r, request, r->now_ms + limit_ms);
    check->version = request->version;
    check->connection = request->connection->id;
}

void mqd_check_submit(struct mqd_reactor *r, struct mqd_check *check, struct mqd_request *request)
{
    mqd_check_arm(r, check, request);
    mqd_list_append(&r->check_queue, &check->node);
    mqd_check_send_queued(r);
}

void mqd_check_on_acceptor_died(struct mqd_reactor *r)
{
    uint64_t generation = mqd_load_acquire(
        &mqd_control_endpoint(r->options.control, mqd_control_worker_count(r->options.control))->generation);
    for (uint32_t index = 0; index < r->check_used_count; index++) {
        struct mqd_check *check = &r->checks[index];
        if (!check->used || !check->sent || check->job || check->acceptor_generation == generation)
            continue;
        check->sent = 0;
        release_buffer(r, check);
        if (mqd_list_empty(&check->parked)) {
            mqd_check_end(r, check);
            continue;
        }
        check->sequence++; /* T2 */
        mqd_list_append(&r->check_queue, &check->node);
    }
    mqd_check_send_queued(r);
}

void mqd_checks_destroy(struct mqd_reactor *r)
{
    for (uint32_t index = 0; index < r->check_used_count; index++)
        free(r->checks[index].job); /* the job's thread has ended */
}
