/* Topics by name and by id, as this worker was told of them. One thread: the reactor's. */
#ifndef MQD_TOPICS_H
#define MQD_TOPICS_H

#include <stdbool.h>

#include "mqd_wire.h"

struct mqd_topic {
    struct mqd_topic *next_by_name, *next_by_id;
    uint32_t reference_count; /* one for the table, one for each fetch entry */
    bool removed;
    uint8_t topic_id[16];
    uint32_t partition_count;
    uint32_t *slots;
    uint32_t name_bytes;
    char name[MQD_TOPIC_NAME_BYTES_MAX + 1];
};

#define MQD_TOPIC_BUCKET_COUNT 4096
struct mqd_topics {
    struct mqd_topic *by_name[MQD_TOPIC_BUCKET_COUNT];
    struct mqd_topic *by_id[MQD_TOPIC_BUCKET_COUNT];
};
struct mqd_topic *mqd_topics_find(struct mqd_topics *topics, const struct mqd_topic_key *key);
struct mqd_topic *mqd_topics_find_id(struct mqd_topics *topics, const uint8_t topic_id[16]);
struct mqd_topic *mqd_topics_put(struct mqd_topics *topics, const uint8_t topic_id[16], const char *name, const uint32_t *slots, uint32_t partition_count);
void mqd_topics_remove(struct mqd_topics *topics, struct mqd_topic *topic);
void mqd_topic_release(struct mqd_topic *topic);
void mqd_topics_clear(struct mqd_topics *topics);
bool mqd_topic_is_internal(const struct mqd_topic *topic); /* written by coordinators alone */

#endif
