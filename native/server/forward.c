/* Messages between workers: batches to their owners, outcomes back to the senders, and
 * notifications of advanced high watermarks.
 *
 * A batch is passed by descriptor; its bytes stay in the arena of the worker that received them
 * until the owner has written them (RELEASE or PRODUCED).
 *
 * Order: descriptors to one peer leave in the order in which they were queued; when the ring is
 * full they wait in `overflow`, where they are never overtaken. `overflow` is bounded: each entry
 * belongs to an append of a connection with bounded in-flight requests, or is a notification about
 * one slot. Generations: a PRODUCE names the generation of the owner that it is sent to (`c`). A
 * successor of that owner ignores it, and the sender completes it with an error when it learns that
 * the owner has died.
 */
#include <stdlib.h>
#include <string.h>

#include "server/check/checks.h"
#include "server/reactor.h"
#include "server/redirect.h"
#include "server/share/share.h"
#include "shm/ring.h"

static bool overflow_push(struct mqd_reactor *r, uint32_t to, const struct mqd_descriptor *descriptor)
{
    if (r->overflow_head[to] == r->overflow_tail[to])
        r->overflow_head[to] = r->overflow_tail[to] = 0;
    /* reclaims the front of the queue, which rarely becomes empty */
    if (r->overflow_tail[to] == r->overflow_capacity[to] && r->overflow_head[to] > r->overflow_capacity[to] / 2) {
        r->overflow_tail[to] -= r->overflow_head[to];
        memmove(r->overflow[to], r->overflow[to] + r->overflow_head[to],
                r->overflow_tail[to] * sizeof *r->overflow[to]);
        r->overflow_head[to] = 0;
    }
    if (r->overflow_tail[to] == r->overflow_capacity[to]) {
        uint32_t capacity = r->overflow_capacity[to] ? r->overflow_capacity[to] * 2 : 256;
        struct mqd_descriptor *grown = realloc(r->overflow[to], sizeof *grown * capacity);
        if (!grown)
            return false;
        r->overflow[to] = grown;
        r->overflow_capacity[to] = capacity;
    }
    r->overflow[to][r->overflow_tail[to]++] = *descriptor;
    return true;
}

/* A RELEASE does not wake the acceptor: a wake-up would cost it more than most of its requests do.
 * The acceptor reclaims the memory when it next runs; while it waits for memory, it checks the ring
 * every few milliseconds. */
static int put_in_ring(struct mqd_reactor *r, uint32_t to, const struct mqd_descriptor *descriptor)
{
    bool can_wait = descriptor->kind == MQD_LINK_RELEASE && to == mqd_control_worker_count(r->options.control);
    return can_wait ? mqd_endpoint_send_quietly(r->endpoint, to, descriptor)
                    : mqd_endpoint_send(r->endpoint, to, descriptor);
}

void mqd_forward_send(struct mqd_reactor *r, uint32_t to, const struct mqd_descriptor *descriptor)
{
    if (r->overflow_head[to] == r->overflow_tail[to] && put_in_ring(r, to, descriptor) == 0)
        return;
    mqd_stat(r, MQD_COUNT_LINK_STALLS, 1);
    if (!overflow_push(r, to, descriptor)) {
        fprintf(stderr, "mqd-worker-%u: out of memory with %u descriptors queued for endpoint %u\n", r->options.self,
                r->overflow_tail[to] - r->overflow_head[to], to);
        abort(); /* a lost descriptor would lose an acknowledgement or leak an extent */
    }
}

void mqd_forward_flush(struct mqd_reactor *r)
{
    for (uint32_t to = 0; to < r->options.endpoint_count; to++) {
        while (r->overflow_head[to] < r->overflow_tail[to] &&
               mqd_endpoint_send(r->endpoint, to, &r->overflow[to][r->overflow_head[to]]) == 0)
            r->overflow_head[to]++;
    }
    mqd_endpoint_flush(r->endpoint);
}

bool mqd_forward_pending(const struct mqd_reactor *r)
{
    for (uint32_t to = 0; to < r->options.endpoint_count; to++)
        if (r->overflow_head[to] < r->overflow_tail[to])
            return true;
    return false;
}

/* ---- sender's side ---- */

/* A token consists of an entry's index in `forwards` (24 bits), its sequence number (24) and our
 * generation (16), so a late response to a request that has timed out, or a response to our
 * predecessor, matches no entry. */
static uint32_t forward_take(struct mqd_reactor *r)
{
    if (r->forward_free == UINT32_MAX) {
        uint32_t capacity = r->forward_capacity ? r->forward_capacity * 2 : 1024;
        struct mqd_forward_entry *grown = capacity > 0xffffff ? NULL : realloc(r->forwards, sizeof *grown * capacity);
        if (!grown)
            return UINT32_MAX; /* only with millions of tiny batches in one arena, or out of memory */
        for (uint32_t i = r->forward_capacity; i < capacity; i++)
            grown[i] = (struct mqd_forward_entry){NULL, 0, i + 1 < capacity ? i + 1 : UINT32_MAX};
        r->forwards = grown;
        r->forward_free = r->forward_capacity;
        r->forward_capacity = capacity;
    }
    uint32_t index = r->forward_free;
    r->forward_free = r->forwards[index].next_free;
    return index;
}

void mqd_forward_untrack(struct mqd_reactor *r, struct mqd_append *append)
{
    if (append->forward_index == UINT32_MAX)
        return;
    struct mqd_forward_entry *entry = &r->forwards[append->forward_index];
    entry->append = NULL;
    entry->sequence = (entry->sequence + 1) & 0xffffff;
    entry->next_free = r->forward_free;
    r->forward_free = append->forward_index;
    append->forward_index = UINT32_MAX;
}

static struct mqd_append *append_of(const struct mqd_reactor *r, uint64_t token)
{
    uint32_t index = token & 0xffffff;
    if (token >> 48 != (r->generation & 0xffff) || index >= r->forward_capacity ||
        r->forwards[index].sequence != (token >> 24 & 0xffffff))
        return NULL;
    return r->forwards[index].append;
}

void mqd_forward_append(struct mqd_reactor *r, struct mqd_append *append, uint16_t owner, uint64_t owner_generation,
                        uint64_t offset, uint32_t size_bytes, int32_t leader_epoch)
{
    append->peer = owner;
    append->peer_generation = owner_generation;
    append->forward_index = forward_take(r);
    if (append->forward_index == UINT32_MAX) {
        append->message = "too many batches are on their way to other workers";
        mqd_append_done(r, append, MQD_KAFKA_NOT_LEADER_OR_FOLLOWER); /* retriable; nothing was written */
        return;
    }
    struct mqd_forward_entry *entry = &r->forwards[append->forward_index];
    entry->append = append;
    mqd_list_append(&r->forwarded_to[owner], &append->node);
    struct mqd_descriptor produce = {.kind = MQD_LINK_PRODUCE,
                                     .flags = (append->acks_all ? MQD_PRODUCE_ACKS_ALL : 0) |
                                              (append->stage_flags & MQD_STAGE_FROM_ZERO ? MQD_PRODUCE_FROM_ZERO : 0),
                                     .slot = append->slot,
                                     .token = (r->generation & 0xffff) << 48 | (uint64_t)entry->sequence << 24 |
                                              append->forward_index,
                                     .offset = offset,
                                     .size_bytes = size_bytes,
                                     .a = leader_epoch,
                                     .b = append->guard,
                                     .c = (int64_t)owner_generation};
    if (__builtin_expect(append->sent_to_target, 0)) {
        produce.flags |=
            MQD_PRODUCE_REDIRECTED | (append->stage_flags & MQD_STAGE_REQUIRE_KNOWN ? MQD_PRODUCE_REQUIRE_KNOWN : 0);
        produce.error = append->partition_index;
    }
    mqd_forward_send(r, owner, &produce);
    mqd_stat(r, MQD_COUNT_BATCHES_FORWARDED, 1);
}

static void on_release(struct mqd_reactor *r, const struct mqd_descriptor *descriptor, uint32_t from)
{
    if (from == mqd_control_worker_count(r->options.control))
        mqd_describe_release(r, descriptor);
    if (from >= mqd_control_worker_count(r->options.control))
        return;
    struct mqd_append *append = append_of(r, descriptor->token);
    if (!append)
        return;
    mqd_append_unpin(r, append);
    mqd_check_end_order(r, append);
}

static void on_produced(struct mqd_reactor *r, const struct mqd_descriptor *descriptor)
{
    struct mqd_append *append = append_of(r, descriptor->token);
    if (!append)
        return;
    if (descriptor->error == MQD_STAGE_VERIFY) {
        mqd_forward_untrack(r, append);
        mqd_list_remove(&append->node);
        mqd_check_verify(r, append, descriptor->a);
        return;
    }
    if (descriptor->error == MQD_STAGE_REDIRECT) {
        mqd_forward_untrack(r, append);
        mqd_list_remove(&append->node);
        mqd_redirect_to_target(r, append, (uint32_t)descriptor->offset, (int16_t)descriptor->b, descriptor->a);
        return;
    }
    append->base_offset = descriptor->a;
    append->log_append_time_ms = descriptor->b;
    append->log_start_offset = descriptor->c;
    if (descriptor->error)
        append->message =
            descriptor->error == MQD_KAFKA_STORAGE_ERROR ? "the disk of this partition is full or has failed" : NULL;
    mqd_append_done(r, append, (int16_t)descriptor->error);
}

/* ---- owner's side ---- */

static void on_produce(struct mqd_reactor *r, const struct mqd_descriptor *descriptor, uint32_t from)
{
    if ((uint64_t)descriptor->c != r->generation)
        return; /* sent to our predecessor; the sender has completed it */
    struct mqd_append *append = r->free_appends;
    if (append)
        r->free_appends = (struct mqd_append *)append->node.next;
    else if (!(append = malloc(sizeof *append)))
        abort(); /* out of memory: the sender's bytes would stay pinned forever */
    memset(append, 0, sizeof *append);
    mqd_list_init(&append->node);
    append->slot = descriptor->slot;
    append->peer = (uint16_t)from;
    append->peer_token = descriptor->token;
    append->peer_generation = descriptor->generation;
    append->forward_index = UINT32_MAX;
    append->acks_all = (descriptor->flags & MQD_PRODUCE_ACKS_ALL) != 0;
    append->stage_flags =
        descriptor->flags & MQD_PRODUCE_CONTROL
            ? MQD_STAGE_COORDINATOR | (descriptor->flags & MQD_PRODUCE_MARKER_BUMPED ? MQD_STAGE_MARKER_BUMPED : 0)
        : descriptor->flags & MQD_PRODUCE_FROM_ZERO ? MQD_STAGE_FROM_ZERO
                                                    : 0;
    append->guard = descriptor->b;
    append->base_offset = append->log_append_time_ms = append->log_start_offset = -1;
    const struct mqd_owned *owned = append->slot < MQD_PARTITION_SLOT_COUNT ? r->owned[append->slot] : NULL;
    /* the sender is a coordinator of an outdated leader epoch */
    if (owned && descriptor->a >= 0 && descriptor->a != mqd_partition_leader_epoch(owned->partition)) {
        mqd_append_done(r, append, MQD_KAFKA_NOT_LEADER_OR_FOLLOWER);
        return;
    }
    struct mqd_batch batch;
    uint64_t arena_bytes = r->options.arena_bytes[from];
    bool in_arena = r->options.arenas[from] && descriptor->offset <= arena_bytes &&
                    descriptor->size_bytes <= arena_bytes - descriptor->offset &&
                    descriptor->size_bytes >= MQD_BATCH_HEADER_BYTES;
    uint8_t *bytes = in_arena ? r->options.arenas[from] + descriptor->offset : NULL;
    if (!in_arena || mqd_batch_decode(bytes, descriptor->size_bytes, &batch) < 0 ||
        (uint32_t)batch.size_bytes != descriptor->size_bytes) {
        mqd_append_done(r, append, MQD_KAFKA_CORRUPT_MESSAGE);
        return;
    }
    if (__builtin_expect(descriptor->flags & MQD_PRODUCE_REDIRECTED, 0)) {
        append->stage_flags =
            MQD_STAGE_REDIRECTED | (descriptor->flags & MQD_PRODUCE_REQUIRE_KNOWN ? MQD_STAGE_REQUIRE_KNOWN : 0);
        batch.producer_id = mqd_redirect_producer(batch.producer_id, descriptor->error);
    }
    mqd_owner_stage(r, append, &batch, bytes, false);
}

/* ---- both sides ---- */

static void on_descriptor(struct mqd_reactor *r, const struct mqd_descriptor *descriptor, uint32_t from)
{
    if (descriptor->generation != mqd_load_acquire(&mqd_control_endpoint(r->options.control, from)->generation))
        return; /* the sender has died: its arena is no longer valid */
    switch (descriptor->kind) {
    case MQD_LINK_PRODUCE:
        on_produce(r, descriptor, from);
        break;
    case MQD_LINK_RELEASE:
        on_release(r, descriptor, from);
        break;
    case MQD_LINK_PRODUCED:
        on_produced(r, descriptor);
        break;
    case MQD_LINK_HW_CHANGED:
        if (descriptor->slot < MQD_PARTITION_SLOT_COUNT)
            mqd_fetch_wake_slot(r, descriptor->slot);
        break;
    case MQD_LINK_FLUSHED:
        if (descriptor->slot < MQD_PARTITION_SLOT_COUNT)
            mqd_lookups_wake(r, descriptor->slot);
        break;
    case MQD_LINK_RESPONSE:
        mqd_control_on_response(r, descriptor, from);
        break;
    case MQD_LINK_CLOSE:
        mqd_control_on_close(r, descriptor);
        break;
    case MQD_LINK_PARKED:
        mqd_control_on_parked(r, descriptor);
        break;
    case MQD_LINK_CHECKED:
        mqd_check_on_response(r, descriptor, from);
        break;
    case MQD_LINK_DESCRIBE:
        mqd_describe_on_request(r, descriptor, from);
        break;
    case MQD_LINK_ROLL:
        mqd_owner_on_roll(r, descriptor->slot);
        break;
    case MQD_LINK_CACHE_DROP:
        mqd_reply_cache_clear(r);
        break;
    case MQD_LINK_SHARE:
    case MQD_LINK_SHARE_RESPONSE:
        mqd_share_on_link(r, descriptor, from);
        break;
    case MQD_LINK_SHARE_STATE_RESPONSE:
        mqd_share_on_state_response(r, descriptor, from);
        break;
    default:
        mqd_log(r, 4, 0, UINT32_MAX, "endpoint %u sent a descriptor of kind %u, which a worker does not accept", from,
                descriptor->kind);
    }
}

void mqd_links_drain(struct mqd_reactor *r)
{
    struct mqd_descriptor descriptors[256];
    uint32_t from[256];
    for (int round = 0; round < 8; round++) {
        int count = mqd_endpoint_drain(r->endpoint, descriptors, from, 256);
        for (int i = 0; i < count; i++)
            on_descriptor(r, &descriptors[i], from[i]);
        if (count < 256)
            return;
    }
}

/* The keeper has proved that the process died: appends that were sent to it have an unknown
 * outcome, which is reported to clients as REQUEST_TIMED_OUT; memory lent to it is released. */
void mqd_forward_on_endpoint_died(struct mqd_reactor *r, uint32_t endpoint)
{
    uint64_t generation = mqd_load_acquire(&mqd_control_endpoint(r->options.control, endpoint)->generation);
    MQD_LIST_EACH(node, next, &r->forwarded_to[endpoint]) {
        struct mqd_append *append = MQD_CONTAINER(node, struct mqd_append, node);
        if (append->peer_generation >= generation)
            continue; /* already sent to its successor */
        append->message = "the process that owns the partition ended; whether the batch was written is unknown";
        mqd_append_done(r, append, MQD_KAFKA_REQUEST_TIMED_OUT);
    }
    /* wakes all waiters, so that they set their bits again: the dead process may have cleared them,
     * and the slot may have another owner by now */
    for (uint32_t slot = 0; slot < MQD_PARTITION_SLOT_COUNT; slot++) {
        mqd_fetch_wake_slot(r, slot);
        mqd_lookups_wake(r, slot);
    }
    mqd_share_on_endpoint_died(r, endpoint);
    mqd_control_send_queued(r);
}
