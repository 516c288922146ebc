/* Describes the producers of a partition to the acceptor (DescribeProducers, KIP-664): receives
 * DESCRIBE, sends DESCRIBED.
 *
 * A description (one struct mqd_producer_view per producer) stays in this worker's control arena
 * until the acceptor sends RELEASE with its offset, or dies. At most MQD_DESCRIPTION_COUNT_MAX
 * exist at a time, and only as many as fit in the arena; beyond that, the response is a retriable
 * error.
 */
#include <string.h>

#include "server/reactor.h"

static struct mqd_description *find_free_description(struct mqd_reactor *r)
{
    for (uint32_t i = 0; i < MQD_DESCRIPTION_COUNT_MAX; i++)
        if (!r->descriptions[i].used)
            return &r->descriptions[i];
    return NULL;
}

void mqd_describe_on_request(struct mqd_reactor *r, const struct mqd_descriptor *descriptor, uint32_t from)
{
    struct mqd_descriptor response = {.kind = MQD_LINK_DESCRIBED, .slot = descriptor->slot, .token = descriptor->token};
    struct mqd_owned *owned = descriptor->slot < MQD_PARTITION_SLOT_COUNT ? r->owned[descriptor->slot] : NULL;
    if (from != mqd_control_worker_count(r->options.control))
        return;
    if (!owned || owned->closing || owned->truncating || !mqd_owned_leads(owned)) {
        response.error = MQD_KAFKA_NOT_LEADER_OR_FOLLOWER;
        mqd_forward_send(r, from, &response);
        return;
    }
    uint32_t count = mqd_partition_producers(owned->partition, NULL, 0);
    uint64_t size_bytes = (uint64_t)count * sizeof(struct mqd_producer_view);
    struct mqd_description *description = count ? find_free_description(r) : NULL;
    int64_t offset = description && size_bytes <= UINT32_MAX ? mqd_arena_allocate(r->control_arena, size_bytes) : -1;
    if (offset >= 0) {
        *description =
            (struct mqd_description){.used = 1, .offset = (uint64_t)offset, .generation = descriptor->generation};
        response.offset = r->control_arena_base + (uint64_t)offset;
        response.size_bytes = (uint32_t)size_bytes;
        mqd_partition_producers(owned->partition,
                                (struct mqd_producer_view *)(r->options.arenas[r->options.self] + response.offset),
                                count);
    } else if (count) {
        response.error = MQD_KAFKA_REQUEST_TIMED_OUT; /* no room now; the acceptor retries */
    }
    mqd_forward_send(r, from, &response);
}

static void release_description(struct mqd_reactor *r, struct mqd_description *description)
{
    description->used = 0;
    mqd_arena_release(r->control_arena, description->offset);
}

void mqd_describe_release(struct mqd_reactor *r, const struct mqd_descriptor *descriptor)
{
    for (uint32_t i = 0; i < MQD_DESCRIPTION_COUNT_MAX; i++)
        if (r->descriptions[i].used && r->control_arena_base + r->descriptions[i].offset == descriptor->offset &&
            r->descriptions[i].generation == descriptor->generation)
            release_description(r, &r->descriptions[i]);
}

void mqd_describe_on_acceptor_died(struct mqd_reactor *r)
{
    uint64_t generation = mqd_load_acquire(
        &mqd_control_endpoint(r->options.control, mqd_control_worker_count(r->options.control))->generation);
    for (uint32_t i = 0; i < MQD_DESCRIPTION_COUNT_MAX; i++)
        if (r->descriptions[i].used && r->descriptions[i].generation != generation)
            release_description(r, &r->descriptions[i]);
}
