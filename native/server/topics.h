/* Topics by name and by id, and brokers, as this worker knows them. Private to the reactor's
 * thread. */
#ifndef MQD_TOPICS_H
#define MQD_TOPICS_H

#include <stdbool.h>

#include "native.h"
#include "wire/wire.h"

/* The definition of a view: what it selects from another topic's log (server/fetch/view.c).
 * malloc'd. */
struct mqd_view {
    char base[MQD_TOPIC_NAME_BYTES_MAX + 1]; /* the name of the base topic, whose log directories the view reads */
    uint32_t filter_bytes;
    uint8_t filter[]; /* wire/filter.h */
};

struct mqd_topic {
    struct mqd_topic *next_by_name, *next_by_id;
    uint32_t reference_count; /* one reference for the table, one for each fetch entry */
    bool removed;
    uint64_t serial; /* positive, 48 bits wide; never used again for another topic */
    uint8_t topic_id[16];
    uint32_t partition_count;
    struct mqd_view *view;                  /* NULL: an ordinary topic; otherwise `slots` are its base topic's */
    uint32_t *slots;                        /* of this host's replicas, by partition; MQD_SLOT_NONE = none here */
    struct mqd_topic_partition *partitions; /* where the partitions' leaders are; indexed like `slots` */
    uint32_t name_bytes;
    char name[MQD_TOPIC_NAME_BYTES_MAX + 1];
};

#define MQD_SLOT_NONE UINT32_MAX

#define MQD_TOPIC_BUCKET_COUNT 4096
struct mqd_topics {
    int32_t node_id; /* this host's; valid when brokers are known */
    uint32_t broker_count;
    uint64_t last_serial;               /* given to the topic added last */
    struct mqd_broker_address *brokers; /* brokers to which clients may be directed, in the order of node ids */
    struct mqd_topic *by_name[MQD_TOPIC_BUCKET_COUNT];
    struct mqd_topic *by_id[MQD_TOPIC_BUCKET_COUNT];
};
struct mqd_topic *mqd_topics_find(struct mqd_topics *topics, const struct mqd_topic_key *key);
struct mqd_topic *mqd_topics_find_by_id(struct mqd_topics *topics, const uint8_t topic_id[16]);
/* Adds a topic, or replaces the partitions of an existing one. NULL: out of memory. */
struct mqd_topic *mqd_topics_put(struct mqd_topics *topics, const uint8_t topic_id[16], const char *name,
                                 const struct mqd_topic_partition *partitions, uint32_t partition_count);
void mqd_topics_remove(struct mqd_topics *topics, struct mqd_topic *topic);
void mqd_topic_release(struct mqd_topic *topic);
void mqd_topics_clear(struct mqd_topics *topics);
/* takes ownership of `brokers`, which must come from malloc */
void mqd_topics_put_brokers(struct mqd_topics *topics, int32_t node_id, struct mqd_broker_address *brokers,
                            uint32_t count);
/* Whether another host leads the partition, according to the metadata. */
bool mqd_topics_is_led_elsewhere(const struct mqd_topics *topics, const struct mqd_topic_partition *partition);
/* NULL: not known, or clients may not be directed there */
const struct mqd_broker_address *mqd_topics_broker(const struct mqd_topics *topics, int32_t node_id);

/* The current leaders to which a response directs clients (KIP-951), without duplicates. */
#define MQD_RESPONSE_NODES_MAX 32
struct mqd_response_nodes {
    struct mqd_node_endpoint nodes[MQD_RESPONSE_NODES_MAX];
    uint32_t count;
};
/* Fills *out and adds the node. False: nothing to report, because this host is the leader, the
 * partition has no leader, or clients cannot be directed to the leader. */
bool mqd_topics_current_leader(const struct mqd_topics *topics, const struct mqd_topic *topic, int32_t partition_index,
                               struct mqd_current_leader *out, struct mqd_response_nodes *nodes);
bool mqd_topic_is_internal(const struct mqd_topic *topic); /* written only by coordinators */

#endif
