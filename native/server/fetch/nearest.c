/* Consumers that state their rack read from a replica in that rack (KIP-392): the leader's response
 * names the replica, and they switch to it.
 *
 * The owner of a partition publishes in its slot which followers are in sync; any worker that
 * serves a Fetch reads this, and the racks of the brokers that clients may be sent to. If a worker
 * reads a torn or slightly outdated set, the worst effect is that a consumer goes to a replica that
 * sends it back or makes it wait.
 */
#include <string.h>

#include "server/reactor.h"

static uint64_t hash_rack(const uint8_t *rack, size_t size_bytes)
{
    uint64_t hash = 0xcbf29ce484222325ull;
    for (size_t i = 0; i < size_bytes; i++)
        hash = (hash ^ rack[i]) * 0x100000001b3ull;
    return hash | 1; /* 0 = none */
}

static uint64_t broker_rack_hash(const struct mqd_broker_address *broker)
{
    return broker && broker->has_rack
               ? hash_rack((const uint8_t *)broker->rack, strnlen(broker->rack, sizeof broker->rack))
               : 0;
}

/* Called by the partition's owner after an assignment. */
void mqd_nearest_publish_followers(struct mqd_reactor *r, const struct mqd_owned *owned)
{
    struct mqd_partition_slot *slot = mqd_control_partition(r->options.control, owned->slot);
    const struct mqd_replica *replica = owned->replica;
    uint32_t count = 0;
    for (uint32_t i = 0; replica && replica->role == MQD_REPLICA_LEADER && i < replica->replica_count &&
                         count < MQD_SLOT_FOLLOWER_COUNT_MAX;
         i++) {
        const struct mqd_replica_member *member = &replica->replicas[i].member;
        if (member->in_sync && member->eligible && member->node_id != replica->node_id)
            mqd_store_relaxed(&slot->in_sync_followers[count++], member->node_id);
    }
    mqd_store_release(&slot->in_sync_follower_count, count);
}

uint64_t mqd_nearest_rack_hash(const struct mqd_reactor *r, const struct mqd_fetch_request *fetch)
{
    if (fetch->rack_id_bytes <= 0 || !r->topics.broker_count || fetch->replica_id >= 0)
        return 0;
    uint64_t hash = hash_rack(fetch->rack_id, (size_t)fetch->rack_id_bytes);
    return hash == broker_rack_hash(mqd_topics_broker(&r->topics, r->topics.node_id)) ? 0 : hash;
}

int32_t mqd_nearest_replica(struct mqd_reactor *r, const struct mqd_fetch_set *set, uint32_t slot_index)
{
    const struct mqd_partition_slot *slot = mqd_control_partition(r->options.control, slot_index);
    uint32_t count = mqd_load_acquire(&slot->in_sync_follower_count);
    if (mqd_load_acquire(&slot->role) != MQD_ROLE_LEADS || mqd_load_acquire(&slot->state) != MQD_SLOT_ONLINE)
        return -1;
    for (uint32_t i = 0; i < count && i < MQD_SLOT_FOLLOWER_COUNT_MAX; i++) {
        int32_t node_id = mqd_load_relaxed(&slot->in_sync_followers[i]);
        if (broker_rack_hash(mqd_topics_broker(&r->topics, node_id)) == set->rack_hash)
            return node_id;
    }
    return -1;
}
