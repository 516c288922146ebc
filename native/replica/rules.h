/* The replication core of one partition: the leader's view of its followers and the decisions based
 * on it, and a follower's handling of a response. Pure: no system call, no clock (times are
 * arguments), no allocation (one struct of fixed size). The broker links it and the simulator loads
 * it through cffi, so both run the same code.
 *
 * It holds no log. The caller reports where the log ends (mqd_replica_set_log) and passes the
 * leader epochs of the log where needed.
 *
 * Terms: the position of a replica is the end of the part of its log that counts: its durable
 * offset with flush_on_ack, otherwise its log end. A follower's position at the leader is the
 * offset from which it fetches; with flush_on_ack it flushes before the next fetch, so everything
 * below its fetch offset is durable.
 *
 * Invariants (the rules in brackets are those of the protocol)
 *   R-1  no knowledge about followers survives a change of leader epoch (R3); a position counts
 *        only after a fetch in this leader epoch, from a log that is a prefix of the leader's (R1,
 *        R2), by the newest known incarnation of the follower (KIP-903).
 *   R-2  the high watermark is at most the position of the leader itself and of every member of the
 *        maximal in-sync set, moves only while the committed set has at least min_insync members,
 *        and never decreases (R4). A follower's own high watermark is at most its log end and
 *        decreases only with a truncation.
 *   R-3  the maximal in-sync set is the union of the committed and the proposed one. The proposed
 *        one counts before the proposal is returned to the caller. It ceases to count when a newer
 *        partition epoch arrives or the proposal is definitively refused (R5). One proposal is
 *        outstanding at a time; its sequence increases by one whenever the content changes and
 *        stays the same when the proposal is repeated (R6b).
 *   R-4  a follower that joins has reached the high watermark and the epoch's start, was caught up
 *        at most half of lag_ms_max ago, has fetched in this epoch, and is eligible under the broker
 *        epoch it fetched with (R7).
 *   R-5  a node whose metadata does not yet include its own registration leads no partition and
 *        answers no fetch (R10).
 *   R-6  if acks_replicas is set, a leader proposes at most that many members (not counting those
 *        that a reassignment moves or that are shutting down), swaps a slow member with a spare in
 *        one proposal, and does so at most once in MQD_REPLICA_SWAP_MS.
 * Concurrency: one thread at a time; the partition's owner.
 */
#ifndef MQD_REPLICA_H
#define MQD_REPLICA_H
/* MQD_CDEF_OFF */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
/* MQD_CDEF_ON */

/* per partition, including during a reassignment: current and target replicas together */
#define MQD_REPLICA_COUNT_MAX 16
#define MQD_REPLICA_NO_RECORD_BOUND -1
/* acks_replicas: a member is slow when a record has waited for it for this long. It is swapped with
 * a spare (an eligible replica outside the set) that was caught up at most half that time ago. */
#define MQD_REPLICA_SLOW_MS 100
#define MQD_REPLICA_HOLD_MS 2000 /* records wait this long for a spare when too few replicas are in sync */
#define MQD_REPLICA_SWAP_MS 1000 /* between two swaps */
/* after this long without a swap, the preferred replica may replace another member */
#define MQD_REPLICA_PREFER_MS 300000

/* a leader epoch that has records in the log; in lists, both fields are strictly increasing */
struct mqd_epoch {
    int32_t epoch;
    int64_t start_offset;
};

/* ---- metadata ---- */

struct mqd_replica_member {
    int32_t node_id;
    uint8_t in_sync;      /* is in the committed in-sync set */
    uint8_t eligible;     /* may be in the set: unfenced, not shutting down, not an observer */
    int64_t broker_epoch; /* of the node's registration in the metadata; -1 = none */
    uint8_t moving;       /* a reassignment adds or removes it: acks_replicas does not count it */
};

struct mqd_replica_assignment {
    int32_t node_id;      /* this node */
    int64_t broker_epoch; /* of this process's own registration */
    int32_t leader;       /* node id; -1 = none */
    int32_t leader_epoch;
    int32_t partition_epoch; /* increases with every change of the partition */
    int32_t min_insync;      /* min.insync.replicas; values above the number of replicas mean all of them */
    /* replica.lag.time.max.ms: a member that has not caught up for this long leaves the in-sync
     * set */
    int64_t lag_ms_max;
    int64_t lag_records_max; /* replica.lag.max.messages, or MQD_REPLICA_NO_RECORD_BOUND */
    /* acks.replicas: the in-sync set is kept at this many members, or at min_insync if that is
     * more; 0 = no limit */
    int32_t acks_replicas;
    uint8_t flush_on_ack;
    /* not used by the core: while not in sync, this node's replica is fetched at the rate of the
     * throttled lane */
    uint8_t throttled;
    /* all replicas including this node, at most MQD_REPLICA_COUNT_MAX; the preferred replica
     * first */
    uint32_t member_count;
    struct mqd_replica_member members[16];
};

/* ---- state: readable by all, written only by the functions below ---- */

enum mqd_replica_role { MQD_REPLICA_NONE, MQD_REPLICA_LEADER, MQD_REPLICA_FOLLOWER };

/* a follower as its leader sees it; the entry of this node itself has no state */
struct mqd_replica_follower {
    struct mqd_replica_member member;
    int64_t position;             /* -1 = has not fetched in this leader epoch */
    int64_t fetched_broker_epoch; /* the broker epoch of its last fetch; -1 = none */
    int64_t caught_up_ms;         /* when it last had all records */
    int64_t fetched_ms;           /* time of its last fetch; fetched_log_end: the leader's log end at that time */
    int64_t fetched_log_end;
    int64_t behind_since_ms; /* since when it has lagged by more than lag_records_max; INT64_MAX = it does not */
    uint8_t proposed;        /* is in the outstanding proposal, with proposed_broker_epoch */
    int64_t proposed_broker_epoch;
};

struct mqd_replica {
/* MQD_CDEF_OFF */
#ifdef MQD_PLANTED
    uint32_t planted; /* disabled rules: replica/planted_bugs.h */
#endif
    /* MQD_CDEF_ON */
    uint8_t role;
    uint8_t flush_on_ack;
    uint8_t holding;   /* too few are in sync and spares may join: records are accepted and wait */
    uint8_t proposing; /* the outstanding proposal has no final response yet */
    int32_t node_id, leader;
    int64_t broker_epoch;
    int32_t leader_epoch, partition_epoch;
    int32_t min_insync;    /* effective: at most the number of replicas */
    int32_t in_sync_max;   /* effective acks_replicas; 0 = no limit */
    int32_t in_sync_count; /* of the committed set */
    int64_t lag_ms_max, lag_records_max;
    int64_t log_start, log_end, durable;
    int64_t high_watermark;
    int64_t epoch_start;        /* log end when this leader epoch began */
    int64_t next_proposal_ms;   /* no proposal before this time */
    int64_t hold_until_ms;      /* while holding */
    int64_t swapped_ms;         /* when a member was last swapped with a spare in this leader epoch */
    uint64_t proposal_sequence; /* of the outstanding or last proposal */
    uint32_t replica_count;     /* entries of `replicas`, which include this node */
    struct mqd_replica_follower replicas[16];
};

void mqd_replica_init(struct mqd_replica *replica);

/* ---- role and metadata ---- */

/* bits */
enum mqd_replica_change {
    /* a new leader epoch: the leader's log uses it for new records; appends that wait for
     * acknowledgement are refused (NOT_LEADER_OR_FOLLOWER) */
    MQD_REPLICA_CHANGED_EPOCH = 1,
    MQD_REPLICA_CHANGED_ROLE = 2,
    MQD_REPLICA_CHANGED_HIGH_WATERMARK = 4,
    MQD_REPLICA_STALE_IGNORED = 8, /* older than the current assignment: nothing changed */
    /* the committed set now has fewer than min_insync members, and no spares that may join: appends
     * that wait for acknowledgement get NOT_ENOUGH_REPLICAS_AFTER_APPEND */
    MQD_REPLICA_CHANGED_BELOW_MIN = 16
};
/* Applies the metadata. Before the first call the caller must report the log's end with
 * mqd_replica_set_log, and a known high watermark with mqd_replica_restore. -1: invalid assignment
 * (too many members, this node listed twice, ...). */
int mqd_replica_assign(struct mqd_replica *replica, const struct mqd_replica_assignment *assignment, int64_t now_ms);
/* Called when a log is opened: sets its known high watermark; 0 or the log's start when none is
 * known. */
void mqd_replica_restore(struct mqd_replica *replica, int64_t high_watermark);
/* Makes later proposals use sequence numbers above `sequence`: a replica that starts again in the
 * same leader epoch (its log moved to another directory) continues after its earlier proposals. */
void mqd_replica_continue_sequence(struct mqd_replica *replica, uint64_t sequence);
/* Reports that the log grew, was flushed or (on a follower) was truncated. Returns bits of enum
 * mqd_replica_change. */
int mqd_replica_set_log(struct mqd_replica *replica, int64_t log_start, int64_t log_end, int64_t durable,
                        int64_t now_ms);

/* ---- the leader ---- */

/* Checks whether a batch may be appended. Returns 0 if so, otherwise 6 NOT_LEADER_OR_FOLLOWER (not
 * the leader, or the lease has ended) or 19 NOT_ENOUGH_REPLICAS (acks=all). Times:
 * CLOCK_BOOTTIME. */
int mqd_replica_check_append(const struct mqd_replica *replica, int acks_all, int64_t lease_deadline_ns,
                             int64_t now_ns);
/* Checks whether the end of the log may be returned (ListOffsets). Returns 0 if so, otherwise 6
 * NOT_LEADER_OR_FOLLOWER, or 78 OFFSET_NOT_AVAILABLE until the high watermark has reached the
 * epoch's start (KIP-207). */
int mqd_replica_check_latest(const struct mqd_replica *replica);

/* one partition of a follower's Fetch */
struct mqd_replica_fetch {
    int32_t node_id;      /* the follower that has authenticated on the connection */
    int64_t broker_epoch; /* replica_state.replica_epoch */
    int32_t current_leader_epoch;
    /* of the last record before fetch_offset; -1 = the follower's log is empty, or begins there */
    int32_t last_fetched_epoch;
    int64_t fetch_offset;
};
struct mqd_replica_response {
    /* 0; 1 OFFSET_OUT_OF_RANGE; 6 NOT_LEADER_OR_FOLLOWER; 74 FENCED_LEADER_EPOCH; 75
     * UNKNOWN_LEADER_EPOCH; 77 STALE_BROKER_EPOCH; 9 REPLICA_NOT_AVAILABLE: the sender is not a
     * replica of the partition */
    int32_t error;
    /* of the response, when error is 0; a follower in another epoch drops the response */
    int32_t leader_epoch;
    /* -1 = the log before fetch_offset matches the leader's; otherwise no records are sent, and the
     * follower truncates according to diverging_end (mqd_replica_truncation) */
    int32_t diverging_epoch;
    int64_t diverging_end;
    int64_t read_end; /* records up to here may be sent: the leader's log end */
    int64_t high_watermark, log_start;
    int32_t changed; /* bits of enum mqd_replica_change */
};
/* Handles a follower's fetch: records its position, advances the high watermark. `epochs`: those of
 * the leader's log. */
void mqd_replica_on_fetch(struct mqd_replica *replica, const struct mqd_replica_fetch *fetch,
                          const struct mqd_epoch *epochs, uint32_t epoch_count, int64_t now_ms,
                          struct mqd_replica_response *response);

/* AlterPartition, sent by this host's controller */
struct mqd_replica_proposal {
    /* R6b: the controller applies each proposal at most once and in order, for each (broker epoch,
     * leader epoch) of the leader */
    uint64_t sequence;
    int64_t broker_epoch; /* the leader's */
    int32_t leader_epoch, partition_epoch;
    uint32_t member_count;
    int32_t node_id[16];
    int64_t member_broker_epoch[16]; /* the broker epoch that each member fetched with; for the leader, its own */
};
/* With acks_replicas, checks whether records have waited for a spare for too long. Returns bits of
 * enum mqd_replica_change. Call it every lag_ms_max / 2, and at least every MQD_REPLICA_HOLD_MS. */
int mqd_replica_tick(struct mqd_replica *replica, int64_t now_ms);
/* Whether there is a set to propose now, or a proposal to repeat. If so, the proposal counts from
 * now on (R5), *out is filled in, and 1 is returned. A proposal without a response is returned
 * again after repeat_ms. Call this after every fetch that was answered with MQD_REPLICA_CHANGED_*
 * or came from a replica outside the set, and every lag_ms_max / 2. */
int mqd_replica_propose(struct mqd_replica *replica, int64_t now_ms, int64_t repeat_ms,
                        struct mqd_replica_proposal *out);
/* Handles the controller's response to a proposal. error: a Kafka error code. 0: the new partition
 * epoch will follow; 55 OPERATION_NOT_ATTEMPTED, 107 INELIGIBLE_REPLICA: definitively refused, the
 * proposal no longer counts and the next one waits until next_proposal_ms; any other: unknown
 * outcome, the proposal still counts and is repeated, at next_proposal_ms at the earliest. A
 * response to another proposal is ignored. Returns bits of enum mqd_replica_change. */
int mqd_replica_on_proposal_response(struct mqd_replica *replica, uint64_t sequence, int32_t leader_epoch, int error,
                                     int64_t next_proposal_ms);

/* ---- the follower ---- */

/* Fills in what to fetch from the leader. Returns 1, or 0 if there is nothing to fetch now, because
 * this node does not follow or the log must be flushed first (flush_on_ack). */
int mqd_replica_next_fetch(const struct mqd_replica *replica, const struct mqd_epoch *epochs, uint32_t epoch_count,
                           struct mqd_replica_fetch *out);

enum mqd_replica_action {
    MQD_REPLICA_IGNORE, /* the response does not match the current leader epoch and log end */
    /* the records begin at the fetch offset: append, then mqd_replica_set_log, then
     * mqd_replica_adopt_high_watermark */
    MQD_REPLICA_APPEND,
    /* truncate the log to `offset` (with producers, transactions and epochs), call
     * mqd_replica_set_log, fetch again */
    MQD_REPLICA_TRUNCATE,
    MQD_REPLICA_RESTART, /* the leader's log begins after this one's end: empty the log, begin at `offset` */
    MQD_REPLICA_LATER    /* fetch again after a pause; this node's metadata or the leader is not up to date */
};
struct mqd_replica_step {
    int32_t action;
    int64_t offset;
};
/* Decides what the follower must do with a response. */
void mqd_replica_next_step(const struct mqd_replica *replica, const struct mqd_replica_fetch *fetch,
                           const struct mqd_replica_response *response, const struct mqd_epoch *epochs,
                           uint32_t epoch_count, struct mqd_replica_step *out);
/* Called after the records of a response are in the log: adopts the leader's high watermark.
 * Returns bits of enum mqd_replica_change. */
int mqd_replica_adopt_high_watermark(struct mqd_replica *replica, int32_t leader_epoch, int64_t high_watermark);

/* ---- leader epochs ---- */

/* Finds the end of `epoch` in a log with these epochs: *found_epoch = the largest known epoch not
 * above it, *end_offset = the start of the next one (the log's end for the last). If `epoch` is -1
 * or above all of them, both are -1; if it is below all of them, *found_epoch = `epoch` and
 * *end_offset = the start of the first. (Kafka's OffsetForLeaderEpoch.) */
void mqd_replica_epoch_end(const struct mqd_epoch *epochs, uint32_t epoch_count, int64_t log_end, int32_t epoch,
                           int32_t *found_epoch, int64_t *end_offset);
/* Returns the offset to which a follower's log must be truncated when diverging_epoch ends at
 * diverging_end on the leader. */
int64_t mqd_replica_truncation(const struct mqd_epoch *epochs, uint32_t epoch_count, int64_t log_end,
                               int32_t diverging_epoch, int64_t diverging_end);

#endif
