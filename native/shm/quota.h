/* Quotas by user and client id: limits that the controller publishes, and buckets that all workers
 * and the acceptor charge. In the control segment.
 *
 * A client is identified by the name of its principal and by its client id. For each kind the first
 * matching rule in the order of enum mqd_quota_level applies, and determines which clients share a
 * bucket, as in Kafka: each pair of user and client id has a bucket if the rule is for both, each
 * user if it is for users, and each client id if it is for clients. Names are hashed with the
 * host's boot id, so a client cannot choose an id whose bucket is another user's.
 *
 * struct mqd_quota_table:
 *   version             written by the controller: the copy `version & 1` of the rules is complete;
 *                       0 = never written
 *   mqd_quota_rules[2]  the controller writes the inactive copy, then the version
 *   mqd_quota_bucket[]  8192 in sets of 8: written by every process that serves clients of the
 *                       bucket
 *
 * A bucket implements GCRA: one theoretical arrival time per kind, advanced with compare-and-swap
 * by the cost of a request (its units times the interval). So the total that all workers admit is
 * bounded, and no worker ever waits for another. A charged request is always served; the result is
 * how long its connection must then be left unread.
 *
 * Invariants
 *   Q1  a bucket whose arrival times are in the past carries no information: it may be reused for
 *       another client unchanged. Such buckets are reused first, the least recently used before
 *       others; a debt is dropped only if all eight clients of a set have debts.
 *   Q2  if a set has two buckets of one key (two workers claimed one at the same time) all
 *       processes use the first; the other is no longer used and is eventually evicted.
 *   Q3  no process holds a lock: one that dies between two stores leaves at most a bucket with a
 *       new key and the arrival times of the old key.
 * Time: CLOCK_MONOTONIC in nanoseconds, which all processes of a host share.
 */
#ifndef MQD_QUOTA_H
#define MQD_QUOTA_H

#include "shm/api.h"

#define MQD_QUOTA_WAY_COUNT 8
#define MQD_QUOTA_BUCKET_COUNT 8192

struct mqd_quota_rules {
    uint32_t count;
    uint32_t kinds;      /* kinds that any rule limits, as bits of enum mqd_quota_kind */
    uint64_t levels;     /* levels of the rules, as bits of enum mqd_quota_level */
    int64_t burst_ns[4]; /* how much may be spent in advance, by kind */
    uint8_t pad[16];
    struct mqd_quota_rule rule[MQD_QUOTA_RULE_COUNT_MAX]; /* by key, ascending */
};

struct mqd_quota_bucket {
    uint64_t key;          /* from struct mqd_quota_match; 0 = free */
    int64_t used_ns;       /* time of the last charge; used only to choose which bucket to evict */
    int64_t arrival_ns[4]; /* theoretical arrival time, by kind */
    uint8_t pad[16];
};

struct mqd_quota_table {
    uint64_t version;
    uint8_t pad[56];
    struct mqd_quota_rules rules[2];
    struct mqd_quota_bucket bucket[MQD_QUOTA_BUCKET_COUNT];
};

_Static_assert(sizeof(struct mqd_quota_bucket) == 64, "a bucket is a cache line");
_Static_assert(sizeof(struct mqd_quota_rules) % 64 == 0, "copied word by word; the buckets begin at a cache line");

struct mqd_quota_table *mqd_control_quotas(void *control); /* shm/layout.c */

/* The version of the rules, by one relaxed load. If it differs from mqd_quota_limits_version,
 * mqd_quota_refresh is needed. */
uint64_t mqd_quota_version(void *control);
uint64_t mqd_quota_limits_version(const struct mqd_quota_limits *limits);
int64_t mqd_quota_limits_burst_ns(const struct mqd_quota_limits *limits, uint32_t kind);

/* The limits of one client, by kind. */
struct mqd_quota_match {
    uint64_t interval[MQD_QUOTA_KIND_COUNT];   /* 0 = no limit */
    uint64_t bucket_key[MQD_QUOTA_KIND_COUNT]; /* of the bucket to charge */
};
void mqd_quota_match(const struct mqd_quota_limits *limits, uint64_t user_key, uint64_t client_key,
                     struct mqd_quota_match *match);
/* Charges the units. Returns how long to wait in nanoseconds; 0 = there is no debt. */
int64_t mqd_quota_charge(void *control, uint64_t key, enum mqd_quota_kind kind, uint64_t interval, uint64_t units,
                         int64_t burst_ns, int64_t now_ns);
/* The current debt, without a charge. */
int64_t mqd_quota_debt_ns(void *control, uint64_t key, enum mqd_quota_kind kind, int64_t burst_ns, int64_t now_ns);

#endif
