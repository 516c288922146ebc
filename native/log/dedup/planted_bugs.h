/* Planted bugs: rules of log/dedup/ that a test breaks, one bit each, to verify that its model
 * detects each one. Only the test's own build has them (MQD_PLANTED_DEDUP); in the broker
 * PLANTED_DEDUP_BUG() is false and costs nothing. */
#ifndef MQD_DEDUP_PLANTED_H
#define MQD_DEDUP_PLANTED_H

#ifdef MQD_PLANTED_DEDUP
enum mqd_dedup_planted {
    MQD_PLANTED_ABORTED_USED = 1,    /* D2: ids of an aborted transaction stay */
    MQD_PLANTED_DECIDE_EARLY = 2,    /* D2: a marker decides before it is below the high watermark */
    MQD_PLANTED_UNDECIDED_USED = 4,  /* D2: undecided ids are treated as known */
    MQD_PLANTED_UNDECIDED_FREE = 8,  /* D1: undecided ids are treated as new */
    MQD_PLANTED_CUT_NOTHING = 16,    /* I3: ids of a failed write stay */
    MQD_PLANTED_CUT_ENTRIES = 32,    /* I3: a failed write's marker still ends its transaction */
    MQD_PLANTED_EARLY = 64,          /* D1: ids expire 100 ms early */
    MQD_PLANTED_LEARN_NOTHING = 128, /* D1: a follower does not read the ids */
    MQD_PLANTED_LEARN_FIRST = 256,   /* D1: a follower keeps the older of two records with an id */
    MQD_PLANTED_HOLES = 512          /* I2: a slot is cleared, and later entries of its probe are not moved */
};
extern uint32_t mqd_dedup_planted;
#define PLANTED_DEDUP_BUG(rule) ((mqd_dedup_planted & MQD_PLANTED_##rule) != 0)
#else
#define PLANTED_DEDUP_BUG(rule) false
#endif

#endif
