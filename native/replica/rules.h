/* The replication core of one partition: what its leader knows of its followers and what follows
 * from that; what a follower does with an answer. Pure: no system call, no clock (times come as
 * arguments), no allocation (one struct of fixed size). The broker links it and the simulator loads
 * it by cffi: it is the same code.
 *
 * It holds no log. The caller tells it where the log ends (mqd_replica_log) and hands it the leader
 * epochs of the log where they matter.
 *
 * Words: the position of a replica is how far its log counts: up to its durable offset with
 * flush_on_ack, else to its log end. A follower's position at the leader is the offset from which
 * it fetches; one with flush_on_ack flushes before it fetches again, so that what it fetches from
 * is durable.
 *
 * Invariants (the rules in brackets are those of the protocol)
 *   R-1  nothing that was learnt of followers survives a change of leader epoch (R3); positions
 *        count only once they were fetched in this leader epoch, from a log that is a prefix of the
 *        leader's (R1, R2), by the newest incarnation heard of (KIP-903).
 *   R-2  the high watermark is at most the position of the leader itself and of every member of the
 *        maximal in-sync set, moves only while the committed set has min_insync members, and never
 *        falls (R4). A follower's own is at most its log end and falls only with a truncation.
 *   R-3  the maximal in-sync set is the committed one and the proposed one; the proposed one counts
 *        from before the proposal is handed out until a newer partition epoch has come, or a
 *        refusal after which it can never be accepted (R5). One proposal is under way at a time;
 *        its sequence rises by one with each new content and stays for a repetition (R6b).
 *   R-4  a follower that joins has the high watermark and the epoch's start, has caught up within
 *        half of lag_ms_max, has fetched in this epoch, and is eligible under the broker epoch it
 *        fetched with (R7).
 *   R-5  a node whose own registration its metadata have not reached leads nothing and answers
 *        nothing (R10).
 * Concurrency: one thread at a time; the partition's owner.
 */
#ifndef MQD_REPLICA_H
#define MQD_REPLICA_H
/* MQD_CDEF_OFF */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
/* MQD_CDEF_ON */

#define MQD_REPLICA_COUNT_MAX 16 /* of one partition, while it is reassigned too: current and target together */
#define MQD_REPLICA_NO_RECORD_BOUND -1

/* of a leader epoch that has records in the log; in lists both rise strictly */
struct mqd_epoch {
    int32_t epoch;
    int64_t start_offset;
};

/* ---- what metadata say ---- */

struct mqd_replica_member {
    int32_t node_id;
    uint8_t in_sync;      /* of the committed in-sync set */
    uint8_t eligible;     /* may be in it: unfenced, not shutting down, no observer */
    int64_t broker_epoch; /* of the node's registration that the metadata know; -1 = none */
};

struct mqd_replica_assignment {
    int32_t node_id;      /* this node */
    int64_t broker_epoch; /* of this process's own registration */
    int32_t leader;       /* node id; -1 = none */
    int32_t leader_epoch;
    int32_t partition_epoch; /* rises with every change of the partition */
    int32_t min_insync;      /* min.insync.replicas; more than there are replicas counts as all of them */
    /* replica.lag.time.max.ms: a member that has not had everything for so long is to leave the
     * in-sync set */
    int64_t lag_ms_max;
    int64_t lag_records_max; /* replica.lag.max.messages, or MQD_REPLICA_NO_RECORD_BOUND */
    uint8_t flush_on_ack;
    /* not of the core: this node's replica is fetched at the bound of the throttled lane while it
     * is not in sync */
    uint8_t throttled;
    uint32_t member_count; /* all replicas, this node among them, at most MQD_REPLICA_COUNT_MAX */
    struct mqd_replica_member members[16];
};

/* ---- state; read freely, written by the functions below alone ---- */

enum mqd_replica_role { MQD_REPLICA_NONE, MQD_REPLICA_LEADER, MQD_REPLICA_FOLLOWER };

/* as its leader sees it; this node's own entry has no state */
struct mqd_replica_follower {
    struct mqd_replica_member member;
    int64_t position;             /* -1 = has not fetched in this leader epoch */
    int64_t fetched_broker_epoch; /* with which it fetched; -1 */
    int64_t caught_up_ms;         /* when it last had everything */
    int64_t fetched_ms;           /* its last fetch, and where the leader's log ended then */
    int64_t fetched_log_end;
    int64_t behind_ms; /* since when it is more than lag_records_max behind; INT64_MAX = it is not */
    uint8_t proposed;  /* member of the proposal under way, with this broker epoch */
    int64_t proposed_broker_epoch;
};

struct mqd_replica {
/* MQD_CDEF_OFF */
#ifdef MQD_PLANTED
    uint32_t planted; /* rules that are off: replica/planted.h */
#endif
    /* MQD_CDEF_ON */
    uint8_t role;
    uint8_t flush_on_ack;
    uint8_t proposing; /* a proposal has no final answer yet */
    int32_t node_id, leader;
    int64_t broker_epoch;
    int32_t leader_epoch, partition_epoch;
    int32_t min_insync;    /* effective: at most the number of replicas */
    int32_t in_sync_count; /* of the committed set */
    int64_t lag_ms_max, lag_records_max;
    int64_t log_start, log_end, durable;
    int64_t high_watermark;
    int64_t epoch_start;        /* log end when this leader epoch began: leader_epoch_start_offset */
    int64_t proposal_ms;        /* nothing is handed out before */
    uint64_t proposal_sequence; /* of the one under way, or the last */
    uint32_t follower_count;    /* replicas, this node included */
    struct mqd_replica_follower followers[16];
};

void mqd_replica_init(struct mqd_replica *replica);

/* ---- role and metadata ---- */

/* bits */
enum mqd_replica_change {
    /* a new leader epoch: the leader's own log takes it for new records; whoever awaits
     * acknowledgement is refused (NOT_LEADER_OR_FOLLOWER) */
    MQD_REPLICA_CHANGED_EPOCH = 1,
    MQD_REPLICA_CHANGED_ROLE = 2,
    MQD_REPLICA_CHANGED_HIGH_WATERMARK = 4,
    MQD_REPLICA_CHANGED_STALE = 8, /* older than what is known: nothing was done */
    /* the committed set has fewer than min_insync members now: whoever awaits acknowledgement is
     * told NOT_ENOUGH_REPLICAS_AFTER_APPEND */
    MQD_REPLICA_CHANGED_BELOW_MIN = 16
};
/* Takes what metadata say. Before the first one the caller has told mqd_replica_log where the log
 * ends, and a high watermark that it knows (mqd_replica_restore). -1: not an assignment (more
 * members than fit, this node twice, ...). */
int mqd_replica_assign(struct mqd_replica *replica, const struct mqd_replica_assignment *assignment, int64_t now_ms);
/* of a log that is opened: known below it; 0 or the log's start when nothing is known */
void mqd_replica_restore(struct mqd_replica *replica, int64_t high_watermark);
/* Proposals are numbered above `sequence`: one that begins anew in the same leader epoch (its log
 * moved to another directory) goes on above its earlier ones. */
void mqd_replica_number_above(struct mqd_replica *replica, uint64_t sequence);
/* The log grew, was flushed, or (a follower's) was cut. Returns bits of enum mqd_replica_change. */
int mqd_replica_log(struct mqd_replica *replica, int64_t log_start, int64_t log_end, int64_t durable, int64_t now_ms);

/* ---- the leader ---- */

/* May a batch be appended? 0; 6 NOT_LEADER_OR_FOLLOWER (no leader, or the lease has ended); 19
 * NOT_ENOUGH_REPLICAS (acks=all). Times: CLOCK_BOOTTIME. */
int mqd_replica_may_append(const struct mqd_replica *replica, int acks_all, int64_t lease_deadline_ns, int64_t now_ns);
/* May the end of the log be told (ListOffsets)? 0; 6; 78 OFFSET_NOT_AVAILABLE until the high
 * watermark has reached the epoch's start (KIP-207). */
int mqd_replica_latest(const struct mqd_replica *replica);

/* one partition of a follower's Fetch */
struct mqd_replica_fetch {
    int32_t node_id;      /* the follower, as its connection was authenticated */
    int64_t broker_epoch; /* replica_state.replica_epoch */
    int32_t current_leader_epoch;
    int32_t last_fetched_epoch; /* of the last record before fetch_offset; -1 = its log is empty, or begins there */
    int64_t fetch_offset;
};
struct mqd_replica_answer {
    /* 0; 1 OFFSET_OUT_OF_RANGE; 6 NOT_LEADER_OR_FOLLOWER; 74 FENCED_LEADER_EPOCH; 75
     * UNKNOWN_LEADER_EPOCH; 77 STALE_BROKER_EPOCH; 9 REPLICA_NOT_AVAILABLE: no replica of it */
    int32_t error;
    /* with the first: of the answer; the follower drops an answer of another epoch than its own */
    int32_t leader_epoch;
    /* -1 = the log before fetch_offset is the leader's; otherwise no records: cut to what
     * diverging_end says (mqd_replica_truncation) */
    int32_t diverging_epoch;
    int64_t diverging_end;
    int64_t read_end; /* records up to here may be sent: the leader's log end */
    int64_t high_watermark, log_start;
    int32_t changed; /* bits of enum mqd_replica_change */
};
/* A follower fetches: notes its position, moves the high watermark. `epochs`: those of the leader's
 * log. */
void mqd_replica_fetch(struct mqd_replica *replica, const struct mqd_replica_fetch *fetch,
                       const struct mqd_epoch *epochs, uint32_t epoch_count, int64_t now_ms,
                       struct mqd_replica_answer *answer);

/* AlterPartition, by way of this host's controller */
struct mqd_replica_proposal {
    /* R6b: the controller takes it at most once and in order, for each (broker epoch, leader epoch)
     * of the leader */
    uint64_t sequence;
    int64_t broker_epoch; /* the leader's */
    int32_t leader_epoch, partition_epoch;
    uint32_t member_count;
    int32_t node_id[16];
    int64_t member_broker_epoch[16]; /* with which it fetched; the leader's own */
};
/* Is there anything to propose now, or to repeat? Then it is installed (R5), *out filled, 1
 * returned. It comes again when there was no answer within repeat_ms. Look after every fetch that
 * was answered with MQD_REPLICA_CHANGED_* or by whom not in the set, and every lag_ms_max / 2. */
int mqd_replica_propose(struct mqd_replica *replica, int64_t now_ms, int64_t repeat_ms,
                        struct mqd_replica_proposal *out);
/* The controller answered. error: Kafka's. 0: the new partition epoch is on its way; 55
 * OPERATION_NOT_ATTEMPTED, 107 INELIGIBLE_REPLICA: refused for good, the proposal no longer counts
 * and the next one waits until again_ms; every other: unknown, it goes on counting and is repeated
 * from again_ms on. An answer to another proposal is ignored. Returns bits of enum
 * mqd_replica_change. */
int mqd_replica_answered(struct mqd_replica *replica, uint64_t sequence, int32_t leader_epoch, int error,
                         int64_t now_ms, int64_t again_ms);

/* ---- the follower ---- */

/* What to ask the leader for. 1; 0: not now: this node does not follow, or the log is to be flushed
 * first (flush_on_ack). */
int mqd_replica_next_fetch(const struct mqd_replica *replica, const struct mqd_epoch *epochs, uint32_t epoch_count,
                           struct mqd_replica_fetch *out);

enum mqd_replica_action {
    MQD_REPLICA_IGNORE, /* of another epoch than the one in force */
    /* the records begin at the fetch offset: append, then mqd_replica_log, then
     * mqd_replica_followed */
    MQD_REPLICA_APPEND,
    /* cut the log to `offset` (producers, transactions and epochs with it), mqd_replica_log, ask
     * again */
    MQD_REPLICA_TRUNCATE,
    MQD_REPLICA_RESTART, /* the leader's log begins behind this one's end: empty the log, begin at `offset` */
    MQD_REPLICA_LATER    /* ask again after a while; metadata or the leader are not that far */
};
struct mqd_replica_step {
    int32_t action;
    int64_t offset;
};
void mqd_replica_step(const struct mqd_replica *replica, const struct mqd_replica_fetch *fetch,
                      const struct mqd_replica_answer *answer, const struct mqd_epoch *epochs, uint32_t epoch_count,
                      struct mqd_replica_step *out);
/* After what an answer brought is in the log: takes the leader's high watermark. Bits of enum
 * mqd_replica_change. */
int mqd_replica_followed(struct mqd_replica *replica, int32_t leader_epoch, int64_t high_watermark);

/* ---- leader epochs ---- */

/* Where `epoch` ends in a log of these epochs: *found the largest known epoch not above it,
 * *end_offset where the next one begins (the log's end for the last). An epoch above all, or -1:
 * -1/-1. One below all: itself, and where the first begins. (Kafka's OffsetForLeaderEpoch.) */
void mqd_replica_epoch_end(const struct mqd_epoch *epochs, uint32_t epoch_count, int64_t log_end, int32_t epoch,
                           int32_t *found, int64_t *end_offset);
/* How far a follower's log is to be cut when the leader says that diverging_epoch ends at
 * diverging_end there. */
int64_t mqd_replica_truncation(const struct mqd_epoch *epochs, uint32_t epoch_count, int64_t log_end,
                               int32_t diverging_epoch, int64_t diverging_end);

#endif
