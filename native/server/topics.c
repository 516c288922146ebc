/* The topics that this worker knows: by name (older clients) and by id. Changed by commands of the
 * main thread, read by every request. */
#include <stdlib.h>
#include <string.h>

#include "server/reactor.h"

static uint32_t bucket_of(const uint8_t *bytes, uint32_t size_bytes)
{
    uint64_t hash = 0xcbf29ce484222325ull; /* FNV-1a, because names are short */
    for (uint32_t i = 0; i < size_bytes; i++)
        hash = (hash ^ bytes[i]) * 0x100000001b3ull;
    return (uint32_t)(hash ^ hash >> 32) % MQD_TOPIC_BUCKET_COUNT;
}

static struct mqd_topic *find_name(struct mqd_topics *topics, const uint8_t *name, uint32_t name_bytes)
{
    struct mqd_topic *topic = topics->by_name[bucket_of(name, name_bytes)];
    while (topic && (topic->name_bytes != name_bytes || memcmp(topic->name, name, name_bytes) != 0))
        topic = topic->next_by_name;
    return topic;
}

struct mqd_topic *mqd_topics_find_by_id(struct mqd_topics *topics, const uint8_t topic_id[16])
{
    struct mqd_topic *topic = topics->by_id[bucket_of(topic_id, 16)];
    while (topic && memcmp(topic->topic_id, topic_id, 16) != 0)
        topic = topic->next_by_id;
    return topic;
}

bool mqd_topic_is_internal(const struct mqd_topic *topic)
{
    static const char *const names[] = {"__consumer_offsets", "__transaction_state", "__share_group_state"};
    if (topic->name_bytes < 2 || topic->name[0] != '_' || topic->name[1] != '_')
        return false;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strlen(names[i]) == topic->name_bytes && memcmp(names[i], topic->name, topic->name_bytes) == 0)
            return true;
    return false;
}

struct mqd_topic *mqd_topics_find(struct mqd_topics *topics, const struct mqd_topic_key *key)
{
    if (key->by_id)
        return mqd_topics_find_by_id(topics, key->topic_id);
    if (key->name.size_bytes <= 0 || key->name.size_bytes > MQD_TOPIC_NAME_BYTES_MAX)
        return NULL;
    return find_name(topics, key->name.bytes, (uint32_t)key->name.size_bytes);
}

static bool set_partitions(struct mqd_topic *topic, const struct mqd_topic_partition *partitions,
                           uint32_t partition_count)
{
    uint32_t *slots = malloc(sizeof *slots * (partition_count ? partition_count : 1));
    struct mqd_topic_partition *copy = malloc(sizeof *copy * (partition_count ? partition_count : 1));
    if (!slots || !copy) {
        free(slots);
        free(copy);
        return false;
    }
    for (uint32_t i = 0; i < partition_count; i++) {
        slots[i] = partitions[i].slot;
        copy[i] = partitions[i];
    }
    free(topic->slots);
    free(topic->partitions);
    topic->slots = slots;
    topic->partitions = copy;
    topic->partition_count = partition_count;
    return true;
}

struct mqd_topic *mqd_topics_put(struct mqd_topics *topics, const uint8_t topic_id[16], const char *name,
                                 const struct mqd_topic_partition *partitions, uint32_t partition_count)
{
    struct mqd_topic *topic = mqd_topics_find_by_id(topics, topic_id);
    if (topic)
        return set_partitions(topic, partitions, partition_count) ? topic : NULL;
    size_t name_bytes = strlen(name);
    struct mqd_topic *namesake = find_name(topics, (const uint8_t *)name, (uint32_t)name_bytes);
    if (namesake) /* deleted and created again: the old id no longer exists */
        mqd_topics_remove(topics, namesake);
    topic = calloc(1, sizeof *topic);
    if (!topic || name_bytes > MQD_TOPIC_NAME_BYTES_MAX || !set_partitions(topic, partitions, partition_count)) {
        free(topic);
        return NULL;
    }
    topic->reference_count = 1;
    topic->serial = ++topics->last_serial;
    topic->name_bytes = (uint32_t)name_bytes;
    memcpy(topic->name, name, name_bytes);
    memcpy(topic->topic_id, topic_id, 16);
    uint32_t bucket = bucket_of((const uint8_t *)name, topic->name_bytes);
    topic->next_by_name = topics->by_name[bucket];
    topics->by_name[bucket] = topic;
    bucket = bucket_of(topic_id, 16);
    topic->next_by_id = topics->by_id[bucket];
    topics->by_id[bucket] = topic;
    return topic;
}

void mqd_topics_remove(struct mqd_topics *topics, struct mqd_topic *topic)
{
    struct mqd_topic **at = &topics->by_name[bucket_of((const uint8_t *)topic->name, topic->name_bytes)];
    while (*at != topic)
        at = &(*at)->next_by_name;
    *at = topic->next_by_name;
    at = &topics->by_id[bucket_of(topic->topic_id, 16)];
    while (*at != topic)
        at = &(*at)->next_by_id;
    *at = topic->next_by_id;
    topic->removed = true;
    mqd_topic_release(topic);
}

void mqd_topic_release(struct mqd_topic *topic)
{
    if (!topic || --topic->reference_count)
        return;
    free(topic->slots);
    free(topic->partitions);
    free(topic->view);
    free(topic);
}

void mqd_topics_clear(struct mqd_topics *topics)
{
    for (uint32_t i = 0; i < MQD_TOPIC_BUCKET_COUNT; i++)
        while (topics->by_id[i])
            mqd_topics_remove(topics, topics->by_id[i]);
    mqd_topics_put_brokers(topics, 0, NULL, 0);
}

/* ---- brokers ---- */

static int by_node_id(const void *a, const void *b)
{
    int32_t left = ((const struct mqd_broker_address *)a)->node_id,
            right = ((const struct mqd_broker_address *)b)->node_id;
    return (left > right) - (left < right);
}

void mqd_topics_put_brokers(struct mqd_topics *topics, int32_t node_id, struct mqd_broker_address *brokers,
                            uint32_t count)
{
    free(topics->brokers);
    topics->node_id = node_id;
    topics->brokers = brokers;
    topics->broker_count = count;
    if (count)
        qsort(brokers, count, sizeof *brokers, by_node_id);
}

const struct mqd_broker_address *mqd_topics_broker(const struct mqd_topics *topics, int32_t node_id)
{
    struct mqd_broker_address key = {.node_id = node_id};
    return topics->broker_count ? bsearch(&key, topics->brokers, topics->broker_count, sizeof key, by_node_id) : NULL;
}

bool mqd_topics_is_led_elsewhere(const struct mqd_topics *topics, const struct mqd_topic_partition *partition)
{
    return topics->broker_count && partition->leader != MQD_LEADER_HERE && partition->leader != topics->node_id;
}

bool mqd_topics_current_leader(const struct mqd_topics *topics, const struct mqd_topic *topic, int32_t partition_index,
                               struct mqd_current_leader *out, struct mqd_response_nodes *nodes)
{
    if (!topic || partition_index < 0 || (uint32_t)partition_index >= topic->partition_count)
        return false;
    const struct mqd_topic_partition *partition = &topic->partitions[partition_index];
    const struct mqd_broker_address *broker =
        mqd_topics_is_led_elsewhere(topics, partition) ? mqd_topics_broker(topics, partition->leader) : NULL;
    if (!broker)
        return false;
    uint32_t at = 0;
    while (at < nodes->count && nodes->nodes[at].node_id != partition->leader)
        at++;
    if (at == MQD_RESPONSE_NODES_MAX)
        return false;
    if (at == nodes->count)
        nodes->nodes[nodes->count++] = (struct mqd_node_endpoint){broker->node_id, broker->port, broker->host,
                                                                  broker->has_rack ? broker->rack : NULL};
    *out = (struct mqd_current_leader){partition->leader, partition->leader_epoch};
    return true;
}
