/* Rights on the data path. A subject is a principal at one client address; all connections of that
 * principal and address share it. Its tables say what it may do; the worker's Python code compiles
 * them (mqd/security/subject.py).
 *
 *   requested  MQD_EVENT_SUBJECT_REQUESTED was emitted; its connections are not read
 *   known      it has its tables (from mqd_reactor_subject_put); they are replaced as a whole when
 *              rules change
 *   unused     no connection has it; kept for the next one, within bounds, then dropped
 *              (MQD_EVENT_SUBJECT_GONE)
 *
 * Invariants
 *   S1  a client whose connection has no subject, or whose subject has no tables, may do nothing.
 *   S2  a cached mask belongs to the subject's present tables and to the topic with the serial
 *       number stored beside it; a serial number is never used for another topic.
 *   S3  when the tables are replaced, fetches that wait are evaluated again, and responses cached
 *       for the old tables are no longer found (`version`).
 *   S4  a host that has lost its lease may have missed a change of rules: clients can read nothing
 *       from it, and what local clients write is not sent on to the leader, which would not check
 *       it (S5).
 *   S5  connections of other hosts of the cluster have no subject and may do everything; requests
 *       that they forward for clients were checked by the host that received them.
 *   S6  mqd_reactor_revoke rolls an active segment that a local client has mapped, perhaps before
 *       this worker was started: a mapping also shows later appends, and cannot be revoked.
 * Bounds: subjects with connections are bounded by the number of connections; unused ones by
 * UNUSED_COUNT_MAX and UNUSED_BYTES_MAX. Cost without an authorizer: one predictable branch.
 * Concurrency: the reactor's thread.
 */
#ifndef MQD_SUBJECT_H
#define MQD_SUBJECT_H

#include "server/reactor.h"

/* bits of masks: Kafka's AclOperation */
enum mqd_operation { MQD_OPERATION_READ = 3, MQD_OPERATION_WRITE = 4, MQD_OPERATION_DESCRIBE = 8 };
enum mqd_resource {
    MQD_RESOURCE_TOPIC = 2,
    MQD_RESOURCE_GROUP = 3,
    MQD_RESOURCE_TRANSACTIONAL_ID = 5
}; /* Kafka's ResourceType */

#define MQD_SUBJECT_BUCKET_COUNT 1024 /* a power of two */
#define MQD_SUBJECT_MASK_COUNT 256    /* a power of two */
#define MQD_SUBJECT_DENIED_COUNT 16

struct mqd_subject {
    struct mqd_subject *next; /* in its bucket */
    uint64_t id;              /* the bucket is in its low bits */
    uint64_t version;         /* of its tables, unique in this reactor; 0 = none yet */
    uint32_t connection_count;
    uint32_t size_bytes;         /* memory of the subject */
    bool requested;              /* the event has been emitted */
    struct mqd_node connections; /* by subject_node */
    struct mqd_node unused_node; /* in subjects->unused, most recently used last */
    /* memory of the next three tables, one after the other; NULL = not known yet */
    uint8_t *tables;
    const uint8_t *topics, *transactional_ids, *groups; /* server/rights/rights_table.h */
    uint64_t masks[MQD_SUBJECT_MASK_COUNT];             /* serial number of the topic << 16 | mask, by serial number */
    /* reported denials (hash of resource and operation), and when they were reported */
    uint64_t denied_hash[MQD_SUBJECT_DENIED_COUNT];
    int64_t denied_ms[MQD_SUBJECT_DENIED_COUNT];
    uint32_t denied_unreported[MQD_SUBJECT_DENIED_COUNT]; /* the number of equal denials since then */
    uint32_t name_bytes;
    char name[]; /* host, a space, principal; NUL-terminated */
};

struct mqd_subjects {
    struct mqd_subject *bucket[MQD_SUBJECT_BUCKET_COUNT];
    struct mqd_node unused;
    uint32_t unused_count;
    uint64_t unused_bytes;
    uint64_t next_id, next_version;
    /* S6: by slot: a local client may have mapped its active segment */
    uint8_t mapped_by_clients[MQD_PARTITION_SLOT_COUNT];
};

bool mqd_subjects_create(struct mqd_reactor *r); /* false: out of memory */
void mqd_subjects_destroy(struct mqd_reactor *r);
void mqd_subjects_tick(struct mqd_reactor *r); /* retries events that did not fit in the queue */
void mqd_subject_command(struct mqd_reactor *r, const struct mqd_command *command);
void mqd_subjects_revoke_mappings(struct mqd_reactor *r, const struct mqd_command *command); /* MQD_COMMAND_REVOKE */
/* With an authorizer: gives the connection its subject, once its principal is known. False: nothing
 * may be read yet, or c is closed. */
bool mqd_subject_attach(struct mqd_reactor *r, struct mqd_connection *c);
void mqd_subject_detach(struct mqd_reactor *r, struct mqd_connection *c);

/* version of the subject's tables; 0 = no subject or no tables */
static inline uint64_t mqd_subject_version(const struct mqd_connection *c)
{
    return c->subject ? c->subject->version : 0;
}

/* The slow paths of mqd_subject_is_allowed and mqd_subject_is_allowed_by_name, called only with an
 * authorizer. */
bool mqd_subject_is_allowed_slow(struct mqd_reactor *r, const struct mqd_connection *c, const struct mqd_topic *topic,
                                 enum mqd_operation operation);
bool mqd_subject_is_allowed_by_name_slow(struct mqd_reactor *r, const struct mqd_connection *c, enum mqd_resource type,
                                         const void *name, int32_t name_bytes, enum mqd_operation operation);

/* Whether the connection's principal may perform this operation on the topic. */
static inline bool mqd_subject_is_allowed(struct mqd_reactor *r, const struct mqd_connection *c,
                                          const struct mqd_topic *topic, enum mqd_operation operation)
{
    if (__builtin_expect(r->options.rights == MQD_RIGHTS_OFF, 1))
        return true;
    const struct mqd_subject *subject = c->subject;
    uint64_t word = subject ? subject->masks[topic->serial % MQD_SUBJECT_MASK_COUNT] : 0;
    return (word >> 16 == topic->serial && word >> operation & 1) ||
           mqd_subject_is_allowed_slow(r, c, topic, operation);
}
/* Whether rights may have been revoked without this host's knowledge, because it has lost its lease
 * (S4). */
static inline bool mqd_subject_is_stale(const struct mqd_reactor *r)
{
    return r->options.rights != MQD_RIGHTS_OFF && r->lease_lost;
}

/* Like mqd_subject_is_allowed, for a topic that is not known here, and for other resources. */
static inline bool mqd_subject_is_allowed_by_name(struct mqd_reactor *r, const struct mqd_connection *c,
                                                  enum mqd_resource type, const void *name, int32_t name_bytes,
                                                  enum mqd_operation operation)
{
    return __builtin_expect(r->options.rights == MQD_RIGHTS_OFF, 1) ||
           mqd_subject_is_allowed_by_name_slow(r, c, type, name, name_bytes, operation);
}

#endif
