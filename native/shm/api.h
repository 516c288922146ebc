/* Measurements of workers, and quotas by user and client id, for Python; read by build_ffi.py like
 * native.h, under the same rules. How quotas work: shm/quota.h.
 */
#ifndef MQD_SHM_API_H
#define MQD_SHM_API_H
/* MQD_CDEF_OFF */
#include "native.h"
/* MQD_CDEF_ON */

enum mqd_histogram {
    MQD_TIME_PRODUCE,
    MQD_TIME_FETCH,
    MQD_TIME_LOOP,
    MQD_TIME_SYNC,
    MQD_TIME_CONTROL,
    /* what a turn of the loop spends its time on (server/slow/turn.h) */
    MQD_TIME_LOOP_WRITE,
    MQD_TIME_LOOP_ALLOCATION,
    MQD_TIME_LOOP_FLUSH,
    MQD_TIME_LOOP_OTHER,
    MQD_TIME_LOOP_FAULT,
    MQD_TIME_LOOP_SCHEDULING,
    MQD_HISTOGRAM_COUNT
};

#define MQD_QUOTA_RULE_COUNT_MAX 4096
/* MQD_QUOTA_MUTATION counts in millionths of a changed partition (KIP-599). */
enum mqd_quota_kind { MQD_QUOTA_PRODUCE, MQD_QUOTA_FETCH, MQD_QUOTA_REQUEST, MQD_QUOTA_MUTATION, MQD_QUOTA_KIND_COUNT };
/* The entity of a rule, in the order of precedence of Kafka's ClientQuotaManager: of the rules that
 * match a client and limit a kind, the first one applies. */
enum mqd_quota_level {
    MQD_QUOTA_USER_CLIENT,
    MQD_QUOTA_USER_ANY_CLIENT,
    MQD_QUOTA_USER,
    MQD_QUOTA_ANY_USER_CLIENT,
    MQD_QUOTA_ANY_USER_ANY_CLIENT,
    MQD_QUOTA_ANY_USER,
    MQD_QUOTA_CLIENT,
    MQD_QUOTA_ANY_CLIENT,
    MQD_QUOTA_LEVEL_COUNT
};
struct mqd_quota_rule {
    uint64_t key; /* mqd_quota_rule_key */
    /* by kind: nanoseconds per unit (byte, nanosecond of work), times 2^32; 0 = no limit */
    uint64_t interval[4];
    uint64_t level; /* enum mqd_quota_level */
};
struct mqd_quota_limits; /* a process's copy of the rules */
/* The key of a user's name, or of a client id. */
uint64_t mqd_quota_key(const void *control, const uint8_t *name, uint32_t size_bytes);
uint64_t mqd_quota_rule_key(uint32_t level, uint64_t user_key, uint64_t client_key);
/* Called by the controller. burst_ns: by kind. Sorts `rules`; resets all token buckets. */
int mqd_quota_publish(void *control, struct mqd_quota_rule *rules, uint32_t count, const int64_t *burst_ns);
struct mqd_quota_limits *mqd_quota_limits_open(void);
void mqd_quota_limits_close(struct mqd_quota_limits *limits);
/* Updates `limits` when the rules have changed; returns the kinds that any rule limits, as bits of
 * enum mqd_quota_kind. */
uint32_t mqd_quota_refresh(void *control, struct mqd_quota_limits *limits);
/* Charges the bucket of the rule that applies to this user and client id. Returns how long
 * the client's connection must not be read, in nanoseconds. With 0 units it only returns the
 * present debt. now_ns: CLOCK_MONOTONIC. */
int64_t mqd_quota_charge_client(void *control, const struct mqd_quota_limits *limits, uint64_t user_key,
                                uint64_t client_key, uint32_t kind, uint64_t units, int64_t now_ns);

#endif
