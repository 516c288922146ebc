/* Planted bugs: rules of log/views/ that a test breaks, one bit each, to verify that its simulator
 * detects each one. Only the test's own build has them (MQD_PLANTED); in the broker
 * PLANTED_VIEW_BUG() is false and costs nothing. */
#ifndef MQD_VIEW_PLANTED_H
#define MQD_VIEW_PLANTED_H

#ifdef MQD_PLANTED
/* MQD_PLANTED_CDEF_ON */
enum mqd_view_planted {
    MQD_PLANTED_MIXED = 1,    /* X1: a selection that was read while the log was truncated is cached */
    MQD_PLANTED_STALE = 2,    /* X2: a piece is used without a check of the file */
    MQD_PLANTED_JOIN = 4,     /* X2: a piece is continued without a check of the file */
    MQD_PLANTED_FILE = 8,     /* X3: a piece of another file is used */
    MQD_PLANTED_FILTER = 16,  /* X3: a piece of another filter is used */
    MQD_PLANTED_LIMIT = 32,   /* X4: a piece beyond the limit is used */
    MQD_PLANTED_BORDER = 64,  /* a batch across the border between two pieces is left out */
    MQD_PLANTED_GAP = 128,    /* a piece is continued after a gap */
    MQD_PLANTED_WITHIN = 256, /* a piece that was read from the middle of a batch is cached */
    MQD_PLANTED_TRIM = 512    /* selected batches that exceed output_bytes_max are dropped */
};
extern uint32_t mqd_view_planted;
/* MQD_PLANTED_CDEF_OFF */
#define PLANTED_VIEW_BUG(rule) ((mqd_view_planted & MQD_PLANTED_##rule) != 0)
#else
#define PLANTED_VIEW_BUG(rule) false
#endif

#endif
