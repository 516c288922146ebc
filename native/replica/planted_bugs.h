/* Planted bugs: rules of replica/rules.h that the simulator disables, one bit each, to verify that
 * it detects each one. Only the simulator's build has them (MQD_PLANTED); in the broker
 * PLANTED_BUG() is false and costs nothing. */
#ifndef MQD_REPLICA_PLANTED_H
#define MQD_REPLICA_PLANTED_H

#ifdef MQD_PLANTED
/* MQD_PLANTED_CDEF_ON */
enum mqd_replica_planted {
    MQD_PLANTED_FETCH_EPOCH = 1, /* R1: a fetch's leader epoch is not compared */
    /* R2: epochs are not compared; a new follower truncates its log at its high watermark */
    MQD_PLANTED_TRUNCATE_TO_HW = 2,
    MQD_PLANTED_KEEP_STATE = 4,           /* R3: knowledge about followers survives a new leader epoch */
    MQD_PLANTED_HW_BELOW_MIN = 8,         /* R4: the high watermark moves below min_insync */
    MQD_PLANTED_COMMITTED_ONLY = 16,      /* R5: the proposed set is not counted */
    MQD_PLANTED_EXPAND_EARLY = 32,        /* R7: a follower may join once it has reached the high watermark */
    MQD_PLANTED_BROKER_EPOCH = 64,        /* KIP-903: broker epochs of followers are not compared */
    MQD_PLANTED_SERVE_UNREGISTERED = 128, /* R10 */
    MQD_PLANTED_ACK_BELOW_MIN = 256,      /* R11: acks=all is accepted below min_insync */
    /* R12: the latest offset is returned before the high watermark has reached the epoch's start */
    MQD_PLANTED_LATEST_EARLY = 512,
    MQD_PLANTED_COUNT_UNFLUSHED = 1024, /* flush_on_ack: positions count before they are durable */
    MQD_PLANTED_LEASE = 2048,           /* section 5: the lease is ignored */
    /* R7b, with acks_replicas: */
    MQD_PLANTED_SWAP_UNCHECKED = 4096, /* any eligible replica that has fetched may replace a slow member */
    MQD_PLANTED_SWAP_IN_TWO = 8192,    /* the slow member leaves before the spare joins */
    MQD_PLANTED_SWAP_OFTEN = 16384,    /* any member that a record waits for may be swapped, at any time */
    MQD_PLANTED_COUNT_SPARES = 32768   /* the high watermark ignores a member whose position is below a spare's */
};
/* A bit of enum mqd_replica_change, used only by TRUNCATE_TO_HW: truncate the log at the high
 * watermark. */
enum { MQD_PLANTED_CHANGED_CUT = 32 };
/* MQD_PLANTED_CDEF_OFF */
#define PLANTED_BUG(replica, rule) (((replica)->planted & MQD_PLANTED_##rule) != 0)
#define PLANTED_CUT MQD_PLANTED_CHANGED_CUT
#else
#define PLANTED_BUG(replica, rule) false
#define PLANTED_CUT 0
#endif

#endif
