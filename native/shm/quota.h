/* Quotas by client id: limits that the controller publishes, buckets that all workers and the
 * acceptor charge. In the control segment.
 *
 *   struct mqd_quota_table
 *     version                      controller writes: the copy `version & 1` of the rules is whole;
 *                                  0 = never written
 *     struct mqd_quota_rules[2]    controller writes the inactive copy, then the version
 *     struct mqd_quota_bucket[8192], sets of 8    whoever serves a client of that id
 *
 * A bucket is GCRA: one theoretical arrival time per kind, moved on by what a request costs
 * (units * interval), by compare-and-swap. So what all workers together let through is bounded, and
 * none ever waits for another. Whoever is charged is always served; what comes back is how long its
 * connection is to be left unread afterwards.
 *
 * Invariants
 *   Q1  a bucket whose arrival times lie in the past says nothing: it may be given to another
 *       client id as it is. Such ones go first, the least recently used before others; only a set
 *       of eight clients that all owe gives up one that owes (it is forgiven).
 *   Q2  of two buckets of one key in a set (two workers claimed at once) everybody uses the first;
 *       the other ages.
 *   Q3  nothing is held by anybody: a process that dies between two stores leaves at most a bucket
 *       whose key is new and whose times are its predecessor's.
 * Time: CLOCK_MONOTONIC in nanoseconds, which all processes of a host share.
 */
#ifndef MQD_QUOTA_H
#define MQD_QUOTA_H

#include "native.h"

#define MQD_QUOTA_WAY_COUNT 8
#define MQD_QUOTA_BUCKET_COUNT 8192

struct mqd_quota_rules {
    uint32_t count;
    uint32_t kinds;       /* bit by enum mqd_quota_kind: some rule limits it */
    int64_t burst_ns;     /* what may be spent ahead */
    uint64_t defaults[4]; /* intervals of client ids without a rule of their own, by kind */
    uint8_t pad[16];
    struct mqd_quota_rule rule[MQD_QUOTA_RULE_COUNT_MAX]; /* by key, ascending */
};

struct mqd_quota_bucket {
    uint64_t key;          /* mqd_quota_key; 0 = free */
    int64_t used_ns;       /* last charge; orders the eviction, nothing else */
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
_Static_assert(sizeof(struct mqd_quota_rules) % 64 == 0, "copied by words; the buckets begin a line");

struct mqd_quota_table *mqd_control_quotas(void *control); /* shm/layout.c */

/* One relaxed load: differs from limits->version when mqd_quota_refresh has something to do. */
uint64_t mqd_quota_version(void *control);
/* The intervals of a client id, by kind; 0 = no limit. Valid until the next refresh. */
const uint64_t *mqd_quota_intervals(const struct mqd_quota_limits *limits, uint64_t key);
/* Charges and returns for how long to wait, 0 = not at all. */
int64_t mqd_quota_charge(void *control, uint64_t key, enum mqd_quota_kind kind, uint64_t interval, uint64_t units,
                         int64_t burst_ns, int64_t now_ns);
/* The same without a charge. */
int64_t mqd_quota_owed(void *control, uint64_t key, enum mqd_quota_kind kind, int64_t burst_ns, int64_t now_ns);

#endif
