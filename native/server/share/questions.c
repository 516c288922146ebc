/* Questions to the owners of partitions, and their answers. See server/share/share.h. */
#include <stdlib.h>
#include <string.h>

#include "server/share/share.h"

#define CONTROL_SHARE 2 /* fraction of the control arena above which no payload is placed */

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
                  *generation == mqd_load_acquire(&mqd_control_worker(r->options.control, *owner)->generation);
    return serves ? 0 : MQD_KAFKA_NOT_LEADER_OR_FOLLOWER;
}

/* ---- the table: a token is an index (24 bits), its sequence number (24) and our generation (16) ---- */

static struct mqd_share_ask *ask_take(struct mqd_shares *shares)
{
    if (shares->ask_free != UINT32_MAX) {
        struct mqd_share_ask *ask = shares->asks[shares->ask_free];
        shares->ask_free = ask->next_free;
        return ask;
    }
    if (shares->ask_count == shares->ask_capacity) {
        uint32_t capacity = shares->ask_capacity ? shares->ask_capacity * 2 : 256;
        struct mqd_share_ask **asks = capacity > 0xffffff ? NULL : realloc(shares->asks, capacity * sizeof *asks);
        if (!asks)
            return NULL;
        shares->asks = asks;
        shares->ask_capacity = capacity;
    }
    struct mqd_share_ask *ask = calloc(1, sizeof *ask);
    if (!ask)
        return NULL;
    mqd_list_init(&ask->node);
    ask->index = shares->ask_count;
    return shares->asks[shares->ask_count++] = ask;
}

static struct mqd_share_ask **place_in(struct mqd_share_part *part, uint8_t kind)
{
    return kind == MQD_SHARE_ASK_ACKNOWLEDGE ? &part->acknowledging : &part->asking;
}

static void ask_end(struct mqd_reactor *r, struct mqd_share_ask *ask)
{
    struct mqd_shares *shares = r->shares;
    mqd_list_remove(&ask->node);
    if (ask->lent >= 0)
        mqd_arena_release(r->control_arena, (uint64_t)ask->lent);
    free(ask->payload);
    ask->payload = NULL;
    if (ask->part)
        *place_in(ask->part, ask->kind) = NULL;
    ask->part = NULL;
    ask->used = 0;
    ask->sequence = (ask->sequence + 1) & 0xffffff;
    ask->next_free = shares->ask_free;
    shares->ask_free = ask->index;
}

static uint64_t token_of(const struct mqd_reactor *r, const struct mqd_share_ask *ask)
{
    return (r->generation & 0xffff) << 48 | (uint64_t)ask->sequence << 24 | ask->index;
}

static struct mqd_share_ask *ask_of(const struct mqd_reactor *r, uint64_t token)
{
    uint32_t index = token & 0xffffff;
    if (!r->shares || token >> 48 != (r->generation & 0xffff) || index >= r->shares->ask_count)
        return NULL;
    struct mqd_share_ask *ask = r->shares->asks[index];
    return ask->used && ask->sequence == (token >> 24 & 0xffffff) ? ask : NULL;
}

/* ---- sending ---- */

static bool place(struct mqd_reactor *r, struct mqd_share_ask *ask)
{
    if (mqd_arena_extents_used(r->control_arena) > mqd_arena_extents_total(r->control_arena) / CONTROL_SHARE)
        return false;
    ask->lent = mqd_arena_allocate(r->control_arena, ask->size_bytes);
    if (ask->lent < 0)
        return false;
    memcpy(r->options.arenas[r->options.self] + r->control_arena_base + ask->lent, ask->payload, ask->size_bytes);
    free(ask->payload);
    ask->payload = NULL;
    return true;
}

void mqd_share_send_unsent(struct mqd_reactor *r)
{
    struct mqd_shares *shares = r->shares;
    while (!mqd_list_empty(&shares->unsent)) {
        struct mqd_share_ask *ask = MQD_CONTAINER(shares->unsent.next, struct mqd_share_ask, node);
        if (!place(r, ask))
            return; /* H1: nothing overtakes it */
        mqd_list_remove(&ask->node);
        struct mqd_descriptor question = {.kind = MQD_LINK_SHARE,
                                          .slot = ask->slot,
                                          .token = token_of(r, ask),
                                          .offset = r->control_arena_base + (uint64_t)ask->lent,
                                          .size_bytes = ask->size_bytes,
                                          .c = (int64_t)ask->owner_generation};
        mqd_forward_send(r, ask->owner, &question);
    }
}

bool mqd_share_ask(struct mqd_reactor *r, struct mqd_share_part *part, uint32_t slot, uint16_t owner,
                   uint64_t generation, const struct mqd_share_question *question, const uint8_t *group,
                   const struct mqd_buffer *ranges)
{
    struct mqd_shares *shares = r->shares;
    uint32_t range_bytes = ranges ? ranges->size_bytes : 0;
    uint32_t size_bytes = (uint32_t)sizeof *question + question->group_bytes + range_bytes;
    uint8_t *payload = malloc(size_bytes);
    struct mqd_share_ask *ask = payload ? ask_take(shares) : NULL;
    if (!ask) {
        free(payload);
        return false;
    }
    memcpy(payload, question, sizeof *question);
    memcpy(payload + sizeof *question, group, question->group_bytes);
    if (range_bytes)
        memcpy(payload + sizeof *question + question->group_bytes, ranges->bytes, range_bytes);
    ask->used = 1;
    ask->part = part;
    if (part)
        *place_in(part, question->kind) = ask;
    ask->kind = question->kind;
    ask->size_bytes = size_bytes;
    ask->slot = slot;
    ask->lent = -1;
    ask->owner = owner;
    ask->owner_generation = generation;
    ask->payload = owner == r->options.self ? NULL : payload;
    if (owner == r->options.self) {
        mqd_share_owner_on(r, owner, token_of(r, ask), slot, payload, size_bytes);
        free(payload);
        return true;
    }
    mqd_list_append(&shares->unsent, &ask->node);
    mqd_share_send_unsent(r);
    return true;
}

/* ---- answers ---- */

static void on_answer(struct mqd_reactor *r, const struct mqd_descriptor *answer)
{
    struct mqd_share_ask *ask = ask_of(r, answer->token);
    if (!ask)
        return;
    struct mqd_share_part *part = ask->part;
    uint8_t kind = ask->kind;
    if (!(answer->flags & MQD_SHARED_RUN))
        ask_end(r, ask);
    if (!part)
        return;
    if (kind == MQD_SHARE_ASK_ACKNOWLEDGE)
        mqd_share_on_acknowledged(r, part, answer);
    else
        mqd_share_on_acquired(r, part, kind, answer);
}

void mqd_share_say(struct mqd_reactor *r, uint32_t to, const struct mqd_descriptor *answer)
{
    if (to == r->options.self)
        on_answer(r, answer);
    else
        mqd_forward_send(r, to, answer);
}

void mqd_share_on_link(struct mqd_reactor *r, const struct mqd_descriptor *descriptor, uint32_t from)
{
    if (from >= mqd_control_worker_count(r->options.control))
        return;
    if (descriptor->kind == MQD_LINK_SHARED) {
        on_answer(r, descriptor);
        mqd_share_pump(r);
        return;
    }
    uint64_t arena_bytes = r->options.arena_bytes[from];
    bool inside = r->options.arenas[from] && descriptor->offset <= arena_bytes &&
                  descriptor->size_bytes <= arena_bytes - descriptor->offset;
    if ((uint64_t)descriptor->c != r->generation || !inside || !mqd_shares_of(r))
        return; /* meant for our predecessor: its sender learns of the death */
    mqd_share_owner_on(r, from, descriptor->token, descriptor->slot, r->options.arenas[from] + descriptor->offset,
                       descriptor->size_bytes);
    mqd_share_pump(r);
}

void mqd_share_endpoint_died(struct mqd_reactor *r, uint32_t endpoint)
{
    struct mqd_shares *shares = r->shares;
    uint64_t generation = mqd_load_acquire(&mqd_control_worker(r->options.control, endpoint)->generation);
    if (!shares)
        return;
    for (uint32_t i = 0; i < shares->ask_count; i++) {
        struct mqd_share_ask *ask = shares->asks[i];
        struct mqd_descriptor answer = {.token = ask->used ? token_of(r, ask) : 0,
                                        .error = MQD_KAFKA_NOT_LEADER_OR_FOLLOWER};
        if (ask->used && ask->owner == endpoint && ask->owner_generation < generation)
            on_answer(r, &answer);
    }
    for (uint32_t i = 0; i < shares->owned_capacity; i++)
        if (shares->owned[i])
            shares->owned[i]->users[endpoint] = 0;
    mqd_share_pump(r);
}
